/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_ahead.h
 * What comes back before its own region is used: which region follows which in backward, and which of its moves are early.
 * The rule is at the top of sim_moves.c.
 */
#ifndef MSC_SIM_AHEAD_H
#define MSC_SIM_AHEAD_H

#include "sim/sim_moves.h"

/** A region that brings something back, and the one that follows it in backward. */
typedef struct msc__follow {
    uint32_t region;
    uint32_t next;      /**< region whose moves are used next, or MSC_NONE */
    uint32_t first_use; /**< of the region's moves */
    uint32_t next_use;  /**< first use of those of `next` */
    uint8_t uncertain;  /**< 1: something may follow, but not what a plan could count on */
} msc__follow;

/** Fills one entry per region that brings something back, in region order; returns how many. Cost: moves. */
uint32_t msc__follows_of_plan(const msc__plan_regions *plan, msc__follow *out);

/** Lets what fits into a region's `ahead_bytes` come back with it. `follows` is room for one per region. */
void msc__moves_bring_early(const msc_graph *graph, const msc_plan *plan, msc__plan_regions *regions,
                            msc__follow *follows);

/**
 * How many of a region's moves, which are in order of use, may be early: they come back with the first use, and fit.
 *
 * @param granule_bytes of the allocator: sizes count as multiples of it.
 */
uint32_t msc__count_early(const msc__moved *moves, uint32_t count, uint64_t most_bytes,
                          uint64_t granule_bytes);

#endif /* MSC_SIM_AHEAD_H */
