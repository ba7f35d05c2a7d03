/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The canonical writer. Numbers are formatted by hand: printf depends on the locale, and canonical text
 * must not.
 */
#include "base/text.h"

#include "base/invariant.h"

#define FNV_OFFSET 14695981039346656037u /* FNV-1a, 64 bit */
#define FNV_PRIME 1099511628211u

void msc__text_init(msc__text *text, char *buffer, size_t buffer_bytes)
{
    text->buffer = buffer;
    text->buffer_bytes = buffer == NULL ? 0 : buffer_bytes;
    text->length = 0;
    text->digest = FNV_OFFSET;
}

void msc__text_put_char(msc__text *text, char c)
{
    if (text->length + 1 < text->buffer_bytes)
        text->buffer[text->length] = c;
    text->length++;
    text->digest = (text->digest ^ (unsigned char)c) * FNV_PRIME;
}

void msc__text_put(msc__text *text, const char *string)
{
    while (*string != '\0')
        msc__text_put_char(text, *string++);
}

void msc__text_put_u64(msc__text *text, uint64_t value)
{
    char digits[20];
    int count = 0;

    do {
        digits[count++] = (char)('0' + value % 10);
        value /= 10;
    } while (value != 0);
    MSC__ASSERT(count <= (int)sizeof digits);
    while (count > 0)
        msc__text_put_char(text, digits[--count]);
}

void msc__text_put_hex64(msc__text *text, uint64_t value)
{
    int shift;

    for (shift = 60; shift >= 0; shift -= 4)
        msc__text_put_char(text, "0123456789abcdef"[(value >> shift) & 15]);
}

void msc__text_end(msc__text *text)
{
    if (text->buffer_bytes > 0) {
        size_t last = text->buffer_bytes - 1;
        text->buffer[text->length < last ? text->length : last] = '\0';
    }
}
