/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_lifetimes.h
 * What a checkpoint does to lifetimes, as facts about calls. The rules are at the top of sim_trace.c.
 *
 * `decide` uses the same two functions, so that its fast evaluation and the trace cannot disagree about
 * what a region is.
 */
#ifndef MSC_SIM_LIFETIMES_H
#define MSC_SIM_LIFETIMES_H

#include <stdbool.h>

#include "memscale/graph.h"
#include "memscale/plan.h"

/** A call as a region: what would happen if it, and nothing around it, were checkpointed. */
typedef struct msc__region {
    uint32_t begin;
    uint32_t end;
    uint32_t stop;  /**< the recompute executes operations begin … stop - 1 */
    uint32_t redo;  /**< position at which the recompute runs */
    uint32_t until; /**< position up to which inputs and state are held */
    uint8_t live;   /**< 0: no internal save is ever used; the region behaves like a kept call */
    uint8_t early;  /**< 1: an internal save is used before the call has ended */
    uint16_t pad;
} msc__region;

/** Natural end of a buffer, which is never before the operation that makes it has run. */
static inline uint32_t msc__natural_end(const msc_buffer *buffer)
{
    return buffer->resident || buffer->end > buffer->begin ? buffer->end : buffer->begin + 1;
}

/** Whether a buffer is made by an operation of the region. */
static inline bool msc__is_made_inside(const msc_buffer *buffer, const msc__region *region)
{
    return !buffer->resident && buffer->begin >= region->begin && buffer->begin < region->end;
}

/** Whether a save that was packed inside the region's call is one that the region drops. */
static inline bool msc__save_is_internal(const msc_save *save, const msc_buffer *buffer,
                                         const msc__region *region)
{
    return msc__is_made_inside(buffer, region) && save->release > region->end;
}

/** Whether a save is released with the end of the step without ever having been used. */
static inline bool msc__save_is_unused(const msc_save *save, uint32_t op_count)
{
    return save->unpack == op_count && save->release == op_count;
}

/** Fills one region per call of the graph. Cost: saves × nesting depth. */
void msc__regions_derive(const msc_graph *graph, msc__region *regions);

/** Fills, for each call, the call of the live region that it lies in under a plan, or MSC_NONE. */
void msc__regions_cover(const msc_graph *graph, const msc_plan *plan, const msc__region *regions,
                        uint32_t *cover);

#endif /* MSC_SIM_LIFETIMES_H */
