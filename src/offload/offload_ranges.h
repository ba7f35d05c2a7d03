/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file offload_ranges.h
 * Hands out ranges of a space of numbers: places in a slab of memory, or in a file. It never touches what the
 * numbers stand for.
 *
 * Sizes are kept exact up to the alignment: no power-of-two rounding, whose waste in pinned memory is what
 * peers pay for (up to 1.9 times). Free ranges are held in lists by size class (two levels, as TLSF has them)
 * and joined with their neighbours when they are returned. Every call takes constant time, but for one case: in
 * a space where the request's own size class is the largest with anything left, that class is searched wholly,
 * because to refuse what would fit costs more than the search.
 *
 * A space may grow at its end. Memory for the records of ranges is taken when the number of ranges reaches a
 * new maximum, and never after that: a training step that repeats allocates nothing.
 *
 * Threads: one at a time; the engine holds its mutex.
 */
#ifndef MSC_OFFLOAD_RANGES_H
#define MSC_OFFLOAD_RANGES_H

#include <stdint.h>

#include "memscale/base.h"

typedef struct msc__ranges msc__ranges;

/** What a space holds. taken + free = capacity at all times. */
typedef struct msc__ranges_use {
    uint64_t capacity;
    uint64_t taken;   /* in units of the alignment, so never less than what was asked for */
    uint64_t largest; /* the largest range that can be had now */
    uint32_t count;   /* ranges taken */
} msc__ranges_use;

/**
 * @param capacity  size of the space at first, a multiple of `alignment`; may be 0.
 * @param alignment of every start and size; a power of two.
 */
msc_status msc__ranges_create(msc_context *ctx, uint64_t capacity, uint64_t alignment, msc__ranges **out,
                              msc_error *err);
void msc__ranges_destroy(msc__ranges *ranges);

/**
 * Makes the space larger by `more` at its end, a multiple of the alignment. Ranges that are out stay as they are.
 * Errors: EINVAL, EOVERFLOW (the end would pass 2^64 - 1), ENOMEM; nothing has changed then.
 */
msc_status msc__ranges_grow(msc__ranges *ranges, uint64_t more, msc_error *err);

/**
 * Takes `size` > 0.
 *
 * @param start where it begins.
 * @param range names it for `msc__ranges_give`.
 * Errors: EINVAL (size 0), EAGAIN (no free range is large enough; no message), ENOMEM; nothing is taken then.
 */
msc_status msc__ranges_take(msc__ranges *ranges, uint64_t size, uint64_t *start, uint32_t *range,
                            msc_error *err);

/** Gives back a range that was taken. Cannot fail. */
void msc__ranges_give(msc__ranges *ranges, uint32_t range);

/** Size of a range that is taken: what was asked for, rounded up to the alignment. */
uint64_t msc__ranges_size_of(const msc__ranges *ranges, uint32_t range);

/** Cost: a walk over the largest size class that has anything. */
msc__ranges_use msc__ranges_in_use(const msc__ranges *ranges);

/** Walks everything and returns whether all invariants hold; for tests and debug builds. */
int msc__ranges_valid(const msc__ranges *ranges);

#endif /* MSC_OFFLOAD_RANGES_H */
