/* SPDX-License-Identifier: Apache-2.0 */
/** @file bytes.h  Size arithmetic that says when it overflows, and saturating sums for bounds. */
#ifndef MSC_BASE_BYTES_H
#define MSC_BASE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** `*out = a + b`; false on overflow, and then `*out` is not to be used. */
static inline bool msc__add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    *out = a + b;
    return *out >= a;
}

/** `*out = a * b`; false on overflow. */
static inline bool msc__mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    *out = a * b;
    return a == 0 || *out / a == b;
}

/** `*out = a * b`; false on overflow. */
static inline bool msc__mul_size(size_t a, size_t b, size_t *out)
{
    *out = a * b;
    return a == 0 || *out / a == b;
}

/** a + b, or UINT64_MAX. */
static inline uint64_t msc__sat_add_u64(uint64_t a, uint64_t b)
{
    uint64_t sum = a + b;
    return sum < a ? UINT64_MAX : sum;
}

/** a - b, or 0. */
static inline uint64_t msc__sat_sub_u64(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/** Smallest multiple of `unit` (a power of two) that is >= value; UINT64_MAX when there is none. */
static inline uint64_t msc__round_up_u64(uint64_t value, uint64_t unit)
{
    uint64_t mask = unit - 1;
    return value > UINT64_MAX - mask ? UINT64_MAX : (value + mask) & ~mask;
}

#endif /* MSC_BASE_BYTES_H */
