/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_moves.h
 * What an offload does to lifetimes, as facts about moves. The rules are at the top of sim_moves.c.
 *
 * As with regions, `decide` builds its moves with the same functions that a trace is derived with.
 */
#ifndef MSC_SIM_MOVES_H
#define MSC_SIM_MOVES_H

#include "sim/sim_lifetimes.h"

/** One storage that leaves the device during one call, and comes back. */
typedef struct msc__moved {
    uint32_t buffer;
    uint32_t order;   /**< place among the moves of its region, which are put in this order */
    uint32_t put;     /**< position at which its copy out begins */
    uint32_t settle;  /**< from here on the copy out holds it no longer */
    uint32_t use;     /**< position of its first use in backward; MSC_NONE: it is never used again */
    uint32_t back;    /**< position at which it comes back; MSC_NONE: never */
    uint32_t release; /**< from here on nothing needs it, neither resident nor offloaded */
    uint64_t size_bytes;
} msc__moved;

/** Within what the moves of one region happen. */
typedef struct msc__move_limits {
    uint64_t window_out_bytes;
    uint64_t window_in_bytes;
    uint32_t end; /**< all copies out are done here */
} msc__move_limits;

/** The limits of a region: a boundary is held until it ends, whatever the window is. */
static inline msc__move_limits msc__move_limits_of(const msc__region *region, uint64_t window_out_bytes,
                                                   uint64_t window_in_bytes)
{
    return (msc__move_limits){.window_out_bytes = region->offload ? window_out_bytes : UINT64_MAX,
                              .window_in_bytes = window_in_bytes,
                              .end = region->end};
}

/** First save packed at a position or later. Saves are in the order of packing. Cost: a binary search. */
uint32_t msc__first_save(const msc_graph *graph, uint32_t position);

/** Whether a save is packed inside a region. */
static inline bool msc__save_is_inside(const msc_save *save, const msc__region *region)
{
    return save->call != MSC_NONE && save->call >= region->first_call && save->call <= region->last_call;
}

/** Starts the move of a saved tensor of a region. */
msc__moved msc__move_of_save(const msc_graph *graph, const msc_save *save);

/** Starts the move of an input that a checkpoint holds for its recompute. */
msc__moved msc__move_of_input(const msc_graph *graph, const msc__region *region, uint32_t buffer);

/** Takes a further save on the same storage into account. */
void msc__move_note(msc__moved *move, const msc_graph *graph, const msc_save *save);

/** Puts moves in order of use, those that are used together in their own order. */
void msc__moves_by_use(msc__moved *moves, uint32_t count);

/** Puts moves in their own order. */
void msc__moves_by_order(msc__moved *moves, uint32_t count);

/** Fills `settle` and `back` of a region's moves, which are in order. Cost: n log n. */
void msc__moves_settle(msc__moved *moves, uint32_t count, const msc__move_limits *limits);

/** Whether one of the moves is of a buffer. */
bool msc__moves_have(const msc__moved *moves, uint32_t count, uint32_t buffer);

/** Position from which the instance that came back is gone: after `back` in any case. */
static inline uint32_t msc__move_end(const msc__moved *move)
{
    return move->release > move->back ? move->release : move->back + 1;
}

/** Working memory of `msc__moves_of_plan`, zeroed. */
typedef struct msc__moves_room {
    msc__moved *moves; /**< one per save and input; the regions' moves afterwards */
    uint32_t *last_of; /**< one per buffer */
} msc__moves_room;

/** Fills the moves of a plan's regions, none of them early. Cost: saves and inputs of the regions that move something, × log. */
void msc__moves_of_plan(const msc_graph *graph, const msc_plan *plan, msc__plan_regions *out,
                        const msc__moves_room *room);

#endif /* MSC_SIM_MOVES_H */
