/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reader of canonical text. Strict by design: one space between words, no leading zeros, '\n' ends a
 * line. What is read can then be written again byte for byte, and digests survive a round trip.
 */
#include "base/reader.h"

#include <string.h>

#include "base/error.h"

void msc__reader_init(msc__reader *reader, const char *what, const char *text, size_t text_bytes,
                      msc_error *err)
{
    reader->at = text;
    reader->end = text + text_bytes;
    reader->what = what;
    reader->line = 1;
    reader->space = false;
    reader->status = MSC_OK;
    reader->err = err;
}

bool msc__reader_fail(msc__reader *reader, msc_status status, const char *problem)
{
    if (reader->status == MSC_OK)
        reader->status =
            msc__fail(reader->err, status, "%s, line %u: %s", reader->what, reader->line, problem);
    return false;
}

bool msc__reader_at_end(const msc__reader *reader)
{
    return reader->at == reader->end;
}

static bool at_break(const msc__reader *reader)
{
    return reader->at == reader->end || *reader->at == ' ' || *reader->at == '\n';
}

bool msc__reader_word(msc__reader *reader, const char **word, size_t *word_bytes)
{
    if (reader->status != MSC_OK)
        return false;
    *word = reader->at;
    while (!at_break(reader))
        reader->at++;
    *word_bytes = (size_t)(reader->at - *word);
    if (*word_bytes == 0)
        return msc__reader_fail(reader, MSC_EFORMAT, "a word is missing");
    reader->space = reader->at != reader->end && *reader->at == ' ';
    reader->at += reader->space;
    return true;
}

bool msc__reader_expect(msc__reader *reader, const char *expected)
{
    const char *word;
    size_t bytes;

    if (!msc__reader_word(reader, &word, &bytes))
        return false;
    if (bytes == strlen(expected) && memcmp(word, expected, bytes) == 0)
        return true;
    return msc__reader_fail(reader, MSC_EFORMAT, "an unexpected word");
}

bool msc__reader_u64(msc__reader *reader, uint64_t max, uint64_t *value)
{
    const char *word;
    size_t bytes;
    size_t i;
    uint64_t sum = 0;

    if (!msc__reader_word(reader, &word, &bytes))
        return false;
    if (bytes > 1 && word[0] == '0')
        return msc__reader_fail(reader, MSC_EFORMAT, "a number with a leading zero");
    for (i = 0; i < bytes; i++) {
        unsigned digit = (unsigned char)word[i] - (unsigned)'0';
        if (digit > 9)
            return msc__reader_fail(reader, MSC_EFORMAT, "not a decimal number");
        if (sum > (UINT64_MAX - digit) / 10)
            return msc__reader_fail(reader, MSC_EFORMAT, "a number beyond 64 bits");
        sum = sum * 10 + digit;
    }
    if (sum > max)
        return msc__reader_fail(reader, MSC_EFORMAT, "a number out of range");
    *value = sum;
    return true;
}

bool msc__reader_hex64(msc__reader *reader, uint64_t *value)
{
    const char *word;
    size_t bytes;
    size_t i;
    uint64_t sum = 0;

    if (!msc__reader_word(reader, &word, &bytes))
        return false;
    if (bytes != 16)
        return msc__reader_fail(reader, MSC_EFORMAT, "not 16 hexadecimal digits");
    for (i = 0; i < 16; i++) {
        const char *digit = memchr("0123456789abcdef", word[i], 16);
        if (digit == NULL)
            return msc__reader_fail(reader, MSC_EFORMAT, "not 16 hexadecimal digits");
        sum = sum << 4 | (uint64_t)(digit - "0123456789abcdef");
    }
    *value = sum;
    return true;
}

bool msc__reader_rest(msc__reader *reader, const char **text, size_t *text_bytes)
{
    const char *stop;

    if (reader->status != MSC_OK)
        return false;
    reader->space = false;
    *text = reader->at;
    stop = memchr(reader->at, '\n', (size_t)(reader->end - reader->at));
    reader->at = stop == NULL ? reader->end : stop;
    *text_bytes = (size_t)(reader->at - *text);
    return true;
}

bool msc__reader_line_end(msc__reader *reader)
{
    if (reader->status != MSC_OK)
        return false;
    if (reader->space || reader->at == reader->end || *reader->at != '\n')
        return msc__reader_fail(reader, MSC_EFORMAT, "the line should end here");
    reader->at++;
    reader->line++;
    return true;
}
