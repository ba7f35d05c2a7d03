/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_frontier.h
 * Plans that no other plan beats in both peak and time.
 */
#ifndef MSC_DECIDE_FRONTIER_H
#define MSC_DECIDE_FRONTIER_H

#include "base/array.h"
#include "base/invariant.h"
#include "memscale/base.h"

typedef struct msc__frontier_plan {
    uint64_t peak_bytes;     /**< allocated; for a caching allocator: a lower bound of what it reserves */
    uint64_t reserved_bytes; /**< for a caching allocator: replayed; 0: not yet */
    int64_t added_ns;
    uint32_t set;  /**< index into the sets */
    uint32_t seen; /**< 1: its neighbours have been looked at */
} msc__frontier_plan;

typedef struct msc__frontier {
    msc_context *ctx;
    msc__array plans;     /**< msc__frontier_plan; added time rises, peaks fall */
    msc__array sets;      /**< uint64_t: `word_count` per set, bit c: candidate c is in */
    msc__array free_sets; /**< uint32_t: sets that no plan uses any more */
    uint32_t word_count;
} msc__frontier;

void msc__frontier_init(msc__frontier *frontier, msc_context *ctx, uint32_t candidate_count);
void msc__frontier_fini(msc__frontier *frontier);

/** Offers a plan; it is kept unless a plan at least as good is there. Errors: ENOMEM. */
msc_status msc__frontier_offer(msc__frontier *frontier, uint64_t peak_bytes, int64_t added_ns,
                               const uint64_t *set, msc_error *err);

/** Puts a plan behind those that take no longer, whatever its peak: of use for a peak that only a replay knows.
 *  `set` of the plan is filled in. Errors: ENOMEM. */
msc_status msc__frontier_insert(msc__frontier *frontier, const msc__frontier_plan *plan, const uint64_t *set,
                                msc_error *err);

/** Takes all plans out. */
void msc__frontier_clear(msc__frontier *frontier);

/** Keeps at most `most` plans, first and last among them, at about evenly spaced peaks. */
void msc__frontier_thin(msc__frontier *frontier, uint32_t most);

static inline const msc__frontier_plan *msc__frontier_plans(const msc__frontier *frontier)
{
    return frontier->plans.items;
}

static inline const uint64_t *msc__frontier_set(const msc__frontier *frontier, uint32_t plan)
{
    MSC__ASSERT(plan < frontier->plans.count);
    return (const uint64_t *)frontier->sets.items +
           (size_t)msc__frontier_plans(frontier)[plan].set * frontier->word_count;
}

#endif /* MSC_DECIDE_FRONTIER_H */
