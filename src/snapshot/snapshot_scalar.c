/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numbers and strings of a pickle.
 *
 * Integers keep the whole range of both signs of 64 bits, since addresses are unsigned and sizes without a
 * limit are written as -1. Most fit the 61 bits beside the tag. Text forms are those of protocol 0; they
 * are parsed without the locale.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "snapshot/snapshot_pickle.h"

#define MOST_INT (INT64_C(1) << 60) /* 61 bits, signed */
#define MOST_EXPONENT 400           /* beyond this a double is 0 or infinite */

bool msc__pickle_push(msc__pickle *pickle, msc__value value)
{
    return msc__pickle_check(pickle,
                             msc__array_push(pickle->ctx, &pickle->stack, sizeof value, &value, pickle->err));
}

/* ---- integers ----------------------------------------------------------------------------------- */

static bool push_wide(msc__pickle *pickle, msc__tag tag, uint64_t bits)
{
    uint32_t index = pickle->wide.count;

    return msc__pickle_check(pickle,
                             msc__array_push(pickle->ctx, &pickle->wide, sizeof bits, &bits, pickle->err)) &&
           msc__pickle_push(pickle, msc__value_make(tag, index));
}

bool msc__pickle_push_i64(msc__pickle *pickle, int64_t number)
{
    if (number >= -MOST_INT && number < MOST_INT)
        return msc__pickle_push(pickle, msc__value_make(MSC__TAG_INT, (uint64_t)number));
    return push_wide(pickle, number < 0 ? MSC__TAG_NEGATIVE : MSC__TAG_WIDE, (uint64_t)number);
}

bool msc__pickle_push_u64(msc__pickle *pickle, uint64_t number)
{
    if (number < (uint64_t)MOST_INT)
        return msc__pickle_push(pickle, msc__value_make(MSC__TAG_INT, number));
    return push_wide(pickle, MSC__TAG_WIDE, number);
}

bool msc__pickle_push_float(msc__pickle *pickle, uint64_t bits)
{
    return push_wide(pickle, MSC__TAG_FLOAT, bits);
}

/* Bytes beyond the eighth may only repeat the sign; a ninth zero byte makes a large number positive. */
bool msc__pickle_push_long(msc__pickle *pickle, const uint8_t *bytes, size_t size_bytes)
{
    bool negative = size_bytes > 0 && bytes[size_bytes - 1] >= 0x80;
    uint64_t bits = negative ? UINT64_MAX : 0;
    size_t i;

    for (i = size_bytes; i-- > 0;) {
        if (i >= 8 && bytes[i] != (negative ? 0xff : 0))
            return msc__pickle_fail(pickle, MSC_EFORMAT, "an integer of at most 64 bits is expected");
        bits = bits << 8 | bytes[i];
    }
    if (negative && bits <= INT64_MAX)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "an integer of at most 64 bits is expected");
    return negative ? msc__pickle_push_i64(pickle, (int64_t)bits) : msc__pickle_push_u64(pickle, bits);
}

bool msc__pickle_push_decimal(msc__pickle *pickle, const uint8_t *text, size_t text_bytes)
{
    bool negative = text_bytes > 0 && text[0] == '-';
    uint64_t number = 0;
    size_t i;

    if (negative) {
        text++;
        text_bytes--;
    }
    if (text_bytes == 0)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a decimal integer is expected");
    for (i = 0; i < text_bytes; i++) {
        uint64_t digit = (uint64_t)text[i] - '0';
        if (digit > 9)
            return msc__pickle_fail(pickle, MSC_EFORMAT, "a decimal integer is expected");
        if (number > (UINT64_MAX - digit) / 10)
            return msc__pickle_fail(pickle, MSC_EFORMAT, "an integer of at most 64 bits is expected");
        number = number * 10 + digit;
    }
    if (!negative)
        return msc__pickle_push_u64(pickle, number);
    if (number > (uint64_t)INT64_MAX + 1)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "an integer of at most 64 bits is expected");
    return msc__pickle_push_i64(pickle, (int64_t)(0 - number));
}

static bool is_bool(msc__value value, uint64_t *out)
{
    *out = msc__value_payload(value) == MSC__CONSTANT_TRUE;
    return *out == 1 || msc__value_payload(value) == MSC__CONSTANT_FALSE;
}

/* The payload of an INT with its sign back. */
static int64_t small_int(msc__value value)
{
    uint64_t bits = msc__value_payload(value);

    MSC__ASSERT(msc__value_tag(value) == MSC__TAG_INT);
    return (int64_t)(bits < (uint64_t)MOST_INT ? bits : bits | UINT64_C(7) << 61);
}

bool msc__pickle_to_u64(const msc__pickle *pickle, msc__value value, uint64_t *out)
{
    const uint64_t *wide = pickle->wide.items;

    switch (msc__value_tag(value)) {
    case MSC__TAG_INT:
        *out = msc__value_payload(value);
        return *out < (uint64_t)MOST_INT;
    case MSC__TAG_WIDE:
        MSC__ASSERT(msc__value_payload(value) < pickle->wide.count);
        *out = wide[msc__value_payload(value)];
        return true;
    case MSC__TAG_CONSTANT:
        return is_bool(value, out);
    default:
        return false;
    }
}

bool msc__pickle_to_i64(const msc__pickle *pickle, msc__value value, int64_t *out)
{
    const uint64_t *wide = pickle->wide.items;
    uint64_t bits = 0;

    switch (msc__value_tag(value)) {
    case MSC__TAG_INT:
        *out = small_int(value);
        return true;
    case MSC__TAG_WIDE:
    case MSC__TAG_NEGATIVE:
        MSC__ASSERT(msc__value_payload(value) < pickle->wide.count);
        bits = wide[msc__value_payload(value)];
        *out = (int64_t)bits;
        return (msc__value_tag(value) == MSC__TAG_NEGATIVE) == (*out < 0);
    case MSC__TAG_CONSTANT:
        (void)is_bool(value, &bits);
        *out = (int64_t)bits;
        return is_bool(value, &bits);
    default:
        return false;
    }
}

/* ---- floats ------------------------------------------------------------------------------------- */

static double scale(double number, int exponent)
{
    for (; exponent > 0; exponent--)
        number *= 10;
    for (; exponent < 0; exponent++)
        number /= 10;
    return number;
}

/* Digits with at most one point, then an exponent. A threshold needs no correct last bit. */
static bool parse_float(const uint8_t *text, const uint8_t *end, double *out)
{
    double number = 0;
    int exponent = 0;
    int given = 0;
    bool negative = false;
    bool digits = false;
    bool point = false;

    for (; text < end && (*text == '.' || (*text >= '0' && *text <= '9')); text++) {
        if (*text == '.' && point)
            return false;
        if (*text == '.') {
            point = true;
            continue;
        }
        number = number * 10 + (*text - '0');
        exponent -= point && exponent > -MOST_EXPONENT;
        digits = true;
    }
    if (text < end && (*text == 'e' || *text == 'E')) {
        text++;
        negative = text < end && *text == '-';
        if (text < end && (*text == '-' || *text == '+'))
            text++;
        for (; text < end && *text >= '0' && *text <= '9'; text++)
            given = given < MOST_EXPONENT ? given * 10 + (*text - '0') : given;
    }
    MSC__ASSERT(text <= end && exponent <= 0 && exponent >= -MOST_EXPONENT);
    *out = scale(number, exponent + (negative ? -given : given));
    return digits && text == end;
}

bool msc__pickle_push_float_text(msc__pickle *pickle, const uint8_t *text, size_t text_bytes)
{
    bool negative = text_bytes > 0 && text[0] == '-';
    double number;
    uint64_t bits;

    if (!parse_float(text + negative, text + text_bytes, &number))
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a decimal fraction is expected");
    if (negative)
        number = -number;
    memcpy(&bits, &number, sizeof bits);
    return msc__pickle_push_float(pickle, bits);
}

/* ---- strings ------------------------------------------------------------------------------------ */

bool msc__pickle_push_string(msc__pickle *pickle, const void *bytes, size_t size_bytes)
{
    uint32_t id = 0;

    return msc__pickle_check(
               pickle, msc__snapshot_intern_string(pickle->snapshot, bytes, size_bytes, &id, pickle->err)) &&
           msc__pickle_push(pickle, msc__value_make(MSC__TAG_STRING, id));
}

/* Code of the escape at `text`, which starts with a backslash; 0 when it is none. Writes its length. */
static uint32_t escape_code(const uint8_t *text, const uint8_t *end, size_t *length)
{
    uint32_t code = 0;
    size_t digits = end - text > 1 && text[1] == 'u' ? 4 : 8;
    size_t i;

    MSC__ASSERT(text < end && *text == '\\');
    *length = 2 + digits;
    if (end - text < (ptrdiff_t)*length || (text[1] != 'u' && text[1] != 'U'))
        return 0;
    for (i = 2; i < *length; i++) {
        uint8_t c = text[i];
        uint8_t lower = c | 0x20;
        if (c >= '0' && c <= '9')
            code = code << 4 | (uint32_t)(c - '0');
        else if (lower >= 'a' && lower <= 'f')
            code = code << 4 | (uint32_t)(lower - 'a' + 10);
        else
            return 0;
    }
    return code;
}

/* UTF-8 of a code point below 2^21; surrogates are written as they are. Returns the length. */
static size_t put_utf8(char *out, uint32_t code)
{
    MSC__ASSERT(code < 0x200000);
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xe0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3f));
        out[2] = (char)(0x80 | (code & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 0x3f));
    out[2] = (char)(0x80 | (code >> 6 & 0x3f));
    out[3] = (char)(0x80 | (code & 0x3f));
    return 4;
}

bool msc__pickle_push_escaped(msc__pickle *pickle, const uint8_t *text, size_t text_bytes)
{
    const uint8_t *end = text + text_bytes;
    char *out;
    size_t length = 0;

    if (text_bytes > UINT32_MAX / 4)
        return msc__pickle_fail(pickle, MSC_EOVERFLOW, "a string is too long");
    pickle->scratch.count = 0; /* a byte becomes at most two */
    if (!msc__pickle_check(pickle, msc__array_reserve(pickle->ctx, &pickle->scratch, 1,
                                                      2 * (uint32_t)text_bytes + 4, pickle->err)))
        return false;
    out = pickle->scratch.items;
    while (text < end) {
        size_t taken = 1;
        uint32_t code = *text;
        bool zero = false;
        if (code == '\\') {
            code = escape_code(text, end, &taken);
            zero = taken == 6 && end - text >= 6 && memcmp(text, "\\u0000", 6) == 0;
            if ((code == 0 && !zero) || code > 0x10ffff)
                return msc__pickle_fail(pickle, MSC_EFORMAT,
                                        "\\u or \\U with hexadecimal digits is expected");
        }
        MSC__ASSERT(length + 4 <= pickle->scratch.capacity && taken <= (size_t)(end - text));
        length += put_utf8(out + length, code);
        text += taken;
    }
    return msc__pickle_push_string(pickle, out, length);
}
