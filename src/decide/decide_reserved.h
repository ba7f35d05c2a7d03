/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_reserved.h
 * Peaks of a caching allocator, by replay.
 */
#ifndef MSC_DECIDE_RESERVED_H
#define MSC_DECIDE_RESERVED_H

#include "base/invariant.h"
#include "decide/decide_fit.h"
#include "decide/decide_frontier.h"

/** What a replay of sets needs. */
typedef struct msc__reserving {
    const msc__model *model;
    msc__fit *fit; /**< its set is empty before and after */
    msc_sim *sim;
    uint64_t unit_bytes;   /**< what is reserved is a multiple of it */
    bool allow_checkpoint; /**< false: only the plain step */
} msc__reserving;

/** Length of a replay, for limits of effort. */
static inline uint64_t msc__reserving_records(const msc__model *model)
{
    return (uint64_t)model->op_count + 2 * (uint64_t)model->buffer_count + 1;
}

/** Least that can be reserved where so much is allocated at once. */
static inline uint64_t msc__reserving_lower(const msc__reserving *r, uint64_t allocated_bytes)
{
    uint64_t rest = allocated_bytes % r->unit_bytes;

    MSC__ASSERT(allocated_bytes <= UINT64_MAX - r->unit_bytes);
    return rest == 0 ? allocated_bytes : allocated_bytes + (r->unit_bytes - rest);
}

/** Reserved peak of a set; a value above `most_bytes`, and not above the peak, when it is more than that.
 *  Errors: ENOMEM. */
msc_status msc__reserved_peak(const msc__reserving *r, const uint64_t *set, uint64_t most_bytes,
                              uint64_t *peak_bytes, msc_error *err);

/** Likewise of a plan, which remembers what is found. */
msc_status msc__reserved_of_plan(const msc__reserving *r, msc__frontier *frontier, uint32_t plan,
                                 uint64_t most_bytes, uint64_t *peak_bytes, msc_error *err);

/** Makes of a frontier in allocated bytes the list that a choice in reserved bytes is made from: in order of
 *  time, the plain step first. Errors: ENOMEM. */
msc_status msc__reserve(const msc__reserving *r, msc__frontier *frontier, msc_error *err);

/** Looks for a neighbour of a set that reserves less, again and again. Both are changed. Errors: ENOMEM. */
msc_status msc__reserve_less(const msc__reserving *r, uint64_t *set, uint64_t *peak_bytes, msc_error *err);

/** What msc__reserve does where replays are short: lists all combinations, or those around the frontier.
 *  Otherwise not `done`, and the frontier is as it was. */
msc_status msc__reserve_every(const msc__reserving *r, msc__frontier *frontier, bool *done, msc_error *err);

#endif /* MSC_DECIDE_RESERVED_H */
