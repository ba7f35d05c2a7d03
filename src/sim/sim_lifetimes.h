/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_lifetimes.h
 * What a checkpoint does to lifetimes, as facts about regions. The rules are at the top of sim_trace.c.
 *
 * `decide` builds its regions with the same functions, so that its fast evaluation and the trace cannot
 * disagree about what a region is.
 */
#ifndef MSC_SIM_LIFETIMES_H
#define MSC_SIM_LIFETIMES_H

#include <stdbool.h>

#include "memscale/graph.h"
#include "memscale/plan.h"

/** What is recomputed as a whole: a call, or sibling calls that follow each other. */
typedef struct msc__region {
    uint32_t first_call; /**< calls first_call … last_call lie inside */
    uint32_t last_call;
    uint32_t begin;
    uint32_t end;
    uint32_t stop;        /**< the recompute executes operations begin … stop - 1, but for kept ones */
    uint32_t redo;        /**< position at which the recompute runs */
    uint32_t until;       /**< position up to which inputs and state are held */
    uint8_t live;         /**< 0: no internal save is ever used; the region behaves like a kept call */
    uint8_t early;        /**< 1: an internal save is used before the call has ended */
    uint8_t offload;      /**< 1: is run once and moves what it saves; never live */
    uint8_t boundary;     /**< 1: moves inputs that it holds */
    uint32_t first_move;  /**< of what it moves, in a list of the region's owner */
    uint32_t move_count;  /**< 0: it moves nothing */
    uint64_t state_bytes; /**< of its outermost calls' modules */
} msc__region;

/** Natural end of a buffer, which is never before the operation that makes it has run. */
static inline uint32_t msc__natural_end(const msc_buffer *buffer)
{
    return buffer->resident || buffer->end > buffer->begin ? buffer->end : buffer->begin + 1;
}

/** Whether a recompute of the operation that made a buffer makes it again. Weights that come for a while it finds.
 */
static inline bool msc__is_made_again(const msc_buffer *buffer)
{
    return !buffer->resident && buffer->category != MSC_CATEGORY_PARAMETER;
}

/** Whether a buffer is made by an operation of the region, in each run. */
static inline bool msc__is_made_inside(const msc_buffer *buffer, const msc__region *region)
{
    return msc__is_made_again(buffer) && buffer->begin >= region->begin && buffer->begin < region->end;
}

/** Whether a save that was packed inside the region is one that the region drops, its buffer not being kept.
 */
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

/** Whether the rising offsets contain one. Cost: a binary search. */
bool msc__offsets_have(const uint32_t *offsets, uint32_t count, uint32_t offset);

/** Starts a region: a call, from which its siblings may continue it. No save has been noted. */
msc__region msc__region_of_call(const msc_graph *graph, uint32_t call, uint32_t last_call);

/** Lets a region go on with the sibling that begins where it ends. `last_call` is the last one inside it. */
void msc__region_extend(msc__region *region, const msc_graph *graph, uint32_t call, uint32_t last_call);

/** Takes a save into account that was packed inside the region and does not lie on a kept buffer. */
void msc__region_note(msc__region *region, const msc_save *save, const msc_buffer *buffer, uint32_t op_count);

/** Once all saves are noted. */
void msc__region_settle(msc__region *region);

/** Fills one region per call of the graph. Cost: saves × nesting depth. */
void msc__regions_derive(const msc_graph *graph, msc__region *regions);

/** Fills, for each call, the last call inside it: itself, if it contains none. */
void msc__last_calls(const msc_graph *graph, uint32_t *last_calls);

/** The regions of a plan. Arrays are the caller's. */
typedef struct msc__plan_regions {
    msc__region *regions; /**< room for one per call */
    uint32_t count;
    uint32_t *cover;          /**< per call: the live region that it lies in, or MSC_NONE */
    uint8_t *kept;            /**< per operation: 1: kept, and its region is live */
    uint32_t *last_calls;     /**< per call; working memory */
    struct msc__moved *moves; /**< what leaves the device, region by region: sim_moves.h */
    uint32_t move_count;
    uint32_t *move_of_save; /**< per save: the move that it is part of, plus 1; 0: it does not move */
} msc__plan_regions;

/** Fills the regions of a plan, in call order, but not its moves. NULL: there are none. Cost: calls + saves. */
void msc__regions_of_plan(const msc_graph *graph, const msc_plan *plan, msc__plan_regions *out);

#endif /* MSC_SIM_LIFETIMES_H */
