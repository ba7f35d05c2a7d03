/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The codec of blocks.
 *
 *      kind        1 byte: INTEGERS or BITS
 *      per point   step, time    varint of the zig-zag difference to the difference before
 *                  value         INTEGERS: varint of the zig-zag difference
 *                                BITS: XOR with the bits before, as one byte (leading zero bytes << 4 | bytes
 *                                that follow) and those bytes, the highest first
 *
 * Steps and clocks advance evenly, so most of their differences of differences take a byte. Sizes of memory
 * are integers; losses share sign, exponent and first digits. All arithmetic is modulo 2^64: any value
 * survives.
 */
#include "store/block.h"

#include <math.h>
#include <string.h>

#include "base/invariant.h"

enum { INTEGERS = 1, BITS = 2 };

#define EXACT 9007199254740992.0 /* 2^53 */
#define VARINT_BYTES 10

block_summary block_summary_empty(void)
{
    return (block_summary){.min = NAN, .max = NAN, .last = NAN};
}

void block_summary_add(block_summary *summary, const block_point *point)
{
    bool is_first = summary->count == 0;

    summary->count++;
    if (is_first || point->step < summary->first_step)
        summary->first_step = point->step;
    if (is_first || point->step > summary->last_step)
        summary->last_step = point->step;
    if (is_first || point->time_ms > summary->last_time_ms)
        summary->last_time_ms = point->time_ms;
    summary->last = point->value;
    if (isnan(point->value)) {
        summary->nans++;
        return;
    }
    if (!(summary->min <= point->value)) /* true of NaN, too: there was none */
        summary->min = point->value;
    if (!(summary->max >= point->value))
        summary->max = point->value;
    summary->sum += point->value;
}

void block_summary_merge(block_summary *summary, const block_summary *later)
{
    if (later->count == 0)
        return;
    if (summary->count == 0) {
        *summary = *later;
        return;
    }
    summary->count += later->count;
    summary->nans += later->nans;
    if (later->first_step < summary->first_step)
        summary->first_step = later->first_step;
    if (later->last_step > summary->last_step)
        summary->last_step = later->last_step;
    if (later->last_time_ms > summary->last_time_ms)
        summary->last_time_ms = later->last_time_ms;
    summary->min = fmin(summary->min, later->min); /* of NaN and a number: the number */
    summary->max = fmax(summary->max, later->max);
    summary->sum += later->sum;
    summary->last = later->last;
}

double block_summary_mean(const block_summary *summary)
{
    int64_t known = summary->count - summary->nans;

    return known == 0 ? NAN : summary->sum / (double)known;
}

static uint64_t zigzag(uint64_t difference)
{
    return (difference << 1) ^ (0 - (difference >> 63));
}

static uint64_t unzigzag(uint64_t code)
{
    return (code >> 1) ^ (0 - (code & 1));
}

static uint8_t *put_varint(uint8_t *at, uint64_t value)
{
    while (value >= 0x80) {
        *at++ = (uint8_t)(value | 0x80);
        value >>= 7;
    }
    *at++ = (uint8_t)value;
    return at;
}

/* NULL: there is none, or it is longer than it needs to be or than 64 bits. */
static const uint8_t *get_varint(const uint8_t *at, const uint8_t *end, uint64_t *value)
{
    unsigned shift;

    *value = 0;
    for (shift = 0; at < end && shift < 7 * VARINT_BYTES; shift += 7) {
        uint8_t byte = *at++;

        if (shift == 63 && byte > 1)
            return NULL;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return byte == 0 && shift > 0 ? NULL : at;
    }
    return NULL;
}

static uint64_t bits_of(double value)
{
    uint64_t bits;

    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double value_of(uint64_t bits)
{
    double value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Whether a value comes back from int64_t with every bit; negative zero does not. */
static bool is_integer(double value)
{
    return value >= -EXACT && value <= EXACT && bits_of((double)(int64_t)value) == bits_of(value);
}

static uint8_t *put_bits(uint8_t *at, uint64_t bits)
{
    unsigned leading = 0;
    unsigned trailing = 0;
    unsigned length;
    unsigned i;

    while (leading < 8 && (bits >> (56 - 8 * leading) & 0xff) == 0)
        leading++;
    while (leading + trailing < 8 && (bits >> (8 * trailing) & 0xff) == 0)
        trailing++;
    length = 8 - leading - trailing;
    *at++ = (uint8_t)(leading << 4 | length);
    for (i = 0; i < length; i++)
        *at++ = (uint8_t)(bits >> (56 - 8 * (leading + i)));
    return at;
}

static const uint8_t *get_bits(const uint8_t *at, const uint8_t *end, uint64_t *bits)
{
    unsigned leading;
    unsigned length;
    unsigned i;

    *bits = 0;
    if (at == end)
        return NULL;
    leading = *at >> 4;
    length = *at++ & 15;
    if (leading + length > 8 || (size_t)(end - at) < length)
        return NULL;
    for (i = 0; i < length; i++)
        *bits |= (uint64_t)*at++ << (56 - 8 * (leading + i));
    return at;
}

size_t block_pack(const block_point *points, uint32_t count, uint8_t *into)
{
    uint64_t step = 0, step_by = 0, time = 0, time_by = 0, value = 0;
    uint8_t *at = into;
    uint8_t kind = INTEGERS;
    uint32_t i;

    MSC__ASSERT(count <= BLOCK_POINTS);
    for (i = 0; i < count && kind == INTEGERS; i++)
        kind = is_integer(points[i].value) ? INTEGERS : BITS;
    *at++ = kind;
    for (i = 0; i < count; i++) {
        uint64_t by = (uint64_t)points[i].step - step;
        uint64_t later = (uint64_t)points[i].time_ms - time;
        uint64_t now = kind == INTEGERS ? (uint64_t)(int64_t)points[i].value : bits_of(points[i].value);

        at = put_varint(at, zigzag(by - step_by));
        at = put_varint(at, zigzag(later - time_by));
        at = kind == INTEGERS ? put_varint(at, zigzag(now - value)) : put_bits(at, now ^ value);
        step += step_by = by;
        time += time_by = later;
        value = now;
    }
    MSC__ASSERT((size_t)(at - into) <= BLOCK_BYTES);
    return (size_t)(at - into);
}

bool block_unpack(const uint8_t *data, size_t bytes, uint32_t count, block_point *points)
{
    uint64_t step = 0, step_by = 0, time = 0, time_by = 0, value = 0, code = 0;
    const uint8_t *end = data + bytes;
    const uint8_t *at = data;
    uint8_t kind;
    uint32_t i;

    if (bytes == 0 || count > BLOCK_POINTS || (*at != INTEGERS && *at != BITS))
        return false;
    kind = *at++;
    for (i = 0; i < count; i++) {
        if ((at = get_varint(at, end, &code)) == NULL)
            return false;
        step += step_by += unzigzag(code);
        if ((at = get_varint(at, end, &code)) == NULL)
            return false;
        time += time_by += unzigzag(code);
        at = kind == INTEGERS ? get_varint(at, end, &code) : get_bits(at, end, &code);
        if (at == NULL)
            return false;
        value = kind == INTEGERS ? value + unzigzag(code) : value ^ code;
        points[i].step = (int64_t)step;
        points[i].time_ms = (int64_t)time;
        points[i].value = kind == INTEGERS ? (double)(int64_t)value : value_of(value);
    }
    return at == end;
}
