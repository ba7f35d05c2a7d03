/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_internal.h
 * What the files of this folder share, and nobody else.
 *
 * decide.c             the two public calls: options, choice, the plan that comes out
 * decide_cost.c        time of operations and regions, comparison of ratios
 * decide_model.c       the graph in the form that the decision reads
 * decide_candidates.c  which modules may be checkpointed, and why the others may not
 * decide_fit.c         exact host peak of a set of candidates, kept up to date as the set changes
 * decide_fit_build.c   the tables that it needs, with decide_fit_lists.c
 * decide_frontier.c    plans of which none is worse than another in both peak and time
 * decide_search.c      the walks that fill the frontier, with decide_walker.c and decide_improve.c
 * decide_bound.c       how far from the best possible time a plan can be
 *
 *      graph -> model (candidates, costs) -> fit -> search -> frontier -> one plan
 */
#ifndef MSC_DECIDE_INTERNAL_H
#define MSC_DECIDE_INTERNAL_H

#include <stdbool.h>

#include "base/array.h"
#include "memscale/decide.h"
#include "sim/sim_buckets.h"
#include "sim/sim_lifetimes.h"

/* ---- decide_model.c, decide_candidates.c ----------------------------------------------------------- */

/** What is known of a module. */
typedef struct msc__subject {
    uint32_t call_count;
    uint32_t candidate; /**< index, or MSC_NONE */
    uint8_t rule;       /**< msc_rule: why it is no candidate; MSC_RULE_NOT_NEEDED: it is one */
    uint8_t has_saves;  /**< 1: something is saved inside its calls, so the plan mentions it */
    uint16_t pad;
} msc__subject;

/** A module that may be checkpointed. */
typedef struct msc__candidate {
    uint32_t module;
    uint32_t first_region; /**< its calls are region_calls[first_region] … */
    uint32_t region_count;
    uint32_t group; /**< interchangeable modules have the same one; dense */
    int64_t cost_ns;
    uint64_t saved_bytes;
    uint8_t usable; /**< 0: it turned out to free nothing */
    uint8_t pad[7];
} msc__candidate;

/** The graph, seen by the decision. Nothing changes once it is built, but for `usable` and `saved_bytes`. */
typedef struct msc__model {
    msc__scratch scratch; /**< owns every array below */
    const msc_op *ops;
    const msc_buffer *buffers;
    const msc_save *saves;
    const msc_module *modules;
    const msc_call *calls;
    const msc_input *inputs;
    const msc_write *writes;
    uint32_t op_count;
    uint32_t buffer_count;
    uint32_t save_count;
    uint32_t module_count;
    uint32_t call_count;
    uint32_t input_count;
    uint32_t write_count;
    uint32_t forward_end;       /**< position at which forward ends */
    uint64_t unit_bytes;        /**< sizes are rounded up to it */
    uint64_t most_bytes;        /**< live bytes never exceed it, whatever the set */
    msc__region *regions;       /**< per call */
    uint32_t *last_call;        /**< per call: the last call inside it, itself at least */
    msc__buckets saves_by_call; /**< a call and all inside it are consecutive */
    msc__buckets begins;        /**< buffers by begin, those that are not resident */
    int64_t *time_before_ns;    /**< per position: time of the operations before it */
    int64_t call_overhead_ns;   /**< of one recomputed region */
    msc__subject *subjects;     /**< per module */
    msc__candidate *candidates; /**< in module order */
    uint32_t candidate_count;   /**< of all, usable or not */
    uint32_t usable_count;
    uint32_t group_count;
    uint32_t *region_calls; /**< live calls of the candidates */
    uint32_t region_count;  /**< length of `region_calls` */
    msc__buckets above;     /**< per candidate: candidates that contain it */
    msc__buckets below;     /**< per candidate: candidates that it contains */
    msc__buckets members;   /**< per group: candidates in call order */
} msc__model;

/** Builds everything up to the candidates. `msc__model_fini` is due in any case. */
msc_status msc__model_init(msc__model *model, msc_context *ctx, const msc_graph *graph,
                           const msc_decide_options *options, msc_error *err);
void msc__model_fini(msc__model *model);

/** Fills subjects, candidates and their relations; part of init. Errors: ENOMEM. */
msc_status msc__model_judge(msc__model *model, msc_error *err);

/** Sorts candidates into groups, after `usable` has been settled. */
msc_status msc__model_group(msc__model *model, msc_error *err);

/** Size of a buffer as the allocator counts it. */
static inline uint64_t msc__model_bytes(const msc__model *model, uint64_t size_bytes)
{
    uint64_t mask = model->unit_bytes - 1;
    return (size_bytes + mask) & ~mask;
}

/* ---- decide_cost.c -------------------------------------------------------------------------------- */

/** Fills `time_before_ns` and `call_overhead_ns`, limited so that sums of a step never overflow. */
void msc__cost_times(msc__model *model, const msc_rates *rates);

/** Time that checkpointing a candidate adds. */
int64_t msc__cost_candidate(const msc__model *model, const msc__candidate *candidate);

/** Sign of a / b − c / d, for b, d > 0, without overflow. */
int msc__cost_compare(uint64_t a, uint64_t b, uint64_t c, uint64_t d);

/* ---- decide_fit.c, decide_fit_build.c ------------------------------------------------------------- */

#define MSC__FIT_BLOCK 64u /* segments per block */

/** A change of live bytes at a segment. */
typedef struct msc__fit_point {
    uint32_t segment;
    int64_t delta_bytes;
} msc__fit_point;

/** What may end a buffer late: the latest that applies does. */
typedef struct msc__fit_hold {
    uint32_t segment; /**< end of the buffer if this applies */
    uint32_t call;    /**< SAVE: where it was packed; INPUT: the region that holds it */
    uint32_t release; /**< SAVE: position */
    uint32_t kind;    /**< msc__fit_hold_kind */
} msc__fit_hold;

typedef enum msc__fit_hold_kind { MSC__FIT_ALWAYS, MSC__FIT_SAVE, MSC__FIT_INPUT } msc__fit_hold_kind;

/** A buffer whose end depends on the set. */
typedef struct msc__fit_buffer {
    int64_t size_bytes;
    uint32_t first_hold; /**< latest end first; the last one always applies */
    uint32_t end;        /**< segment at present */
    uint32_t plain_end;  /**< segment in the plain step */
    uint32_t home;       /**< active region that it is made in, or MSC_NONE */
} msc__fit_buffer;

/** A region's part: fixed changes, and the buffers whose ends it affects. */
typedef struct msc__fit_region {
    uint32_t call;
    uint32_t first_point;
    uint32_t point_count;
    uint32_t first_touch; /**< the first `home_count` are made in the region, the rest are inputs */
    uint32_t touch_count;
    uint32_t home_count;
} msc__fit_region;

/** See decide_fit.c. */
typedef struct msc__fit {
    msc__scratch scratch; /**< owns every array below */
    const msc__model *model;
    uint32_t *op_slot;    /**< per position 0 … op count */
    uint32_t *redo_slot;  /**< per call */
    uint32_t *segment_of; /**< per slot, and one beyond the last */
    uint32_t slot_count;
    uint32_t segment_count;
    uint32_t block_count;
    uint32_t plain_peak_segment;
    uint64_t plain_peak_bytes;
    int64_t *base_bytes;  /**< per segment: highest live bytes of the plain step */
    uint32_t *width;      /**< per segment: operations in it */
    int64_t *delta_bytes; /**< per segment: change against the one before it, by the set */
    int64_t *block_delta_bytes;
    int64_t *block_peak_bytes; /**< highest base + change, from the block's begin */
    uint8_t *block_stale;
    uint32_t stale_count;
    uint32_t excess_shift;    /**< keeps sums of bytes × operations within 64 bits */
    msc__array points;        /**< msc__fit_point */
    msc__array holds;         /**< msc__fit_hold */
    msc__array buffers;       /**< msc__fit_buffer */
    msc__array touches;       /**< uint32_t: index into `buffers` */
    msc__fit_region *regions; /**< parallel to the model's region_calls */
    uint8_t *active;          /**< per call: 1 while its region is in the set */
} msc__fit;

/** Builds the tables for the empty set. `msc__fit_fini` is due in any case. Errors: ENOMEM, EOVERFLOW. */
msc_status msc__fit_init(msc__fit *fit, const msc__model *model, msc_error *err);
void msc__fit_fini(msc__fit *fit);

/** Adds a candidate to the set or takes it away. It must not be in already (or be in), nor overlap another.
 */
void msc__fit_set(msc__fit *fit, uint32_t candidate, bool active);

/** Highest live bytes of the step under the present set. */
uint64_t msc__fit_peak(msc__fit *fit);

/** Bytes above a level, summed over operations, scaled. */
uint64_t msc__fit_excess(const msc__fit *fit, uint64_t level_bytes);

/** By how much the set lowers live bytes at the begin of a segment; negative: it raises them. */
int64_t msc__fit_freed(const msc__fit *fit, uint32_t segment);

/** Most that a candidate, in whatever set, can take off the live bytes of a segment. */
int64_t msc__fit_most_freed(const msc__fit *fit, uint32_t candidate, uint32_t segment);

/** Segment that begins at a position, before anything that happens there but frees. */
uint32_t msc__fit_segment_at(const msc__fit *fit, uint32_t position);

/* ---- decide_frontier.c ---------------------------------------------------------------------------- */

typedef struct msc__frontier_plan {
    uint64_t peak_bytes;
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

/** Keeps at most `most` plans, first and last among them. */
void msc__frontier_thin(msc__frontier *frontier, uint32_t most);

static inline const msc__frontier_plan *msc__frontier_plans(const msc__frontier *frontier)
{
    return frontier->plans.items;
}

static inline const uint64_t *msc__frontier_set(const msc__frontier *frontier, uint32_t plan)
{
    return (const uint64_t *)frontier->sets.items +
           (size_t)msc__frontier_plans(frontier)[plan].set * frontier->word_count;
}

static inline bool msc__set_has(const uint64_t *set, uint32_t candidate)
{
    return (set[candidate / 64] >> (candidate % 64) & 1) != 0;
}

/* ---- decide_search.c ------------------------------------------------------------------------------ */

/** Walks from the plain step and offers every set on the way. The fit's set is empty before and after. */
msc_status msc__search(const msc__model *model, msc__fit *fit, msc__frontier *frontier, msc_error *err);

/* ---- decide_bound.c ------------------------------------------------------------------------------- */

/** Lower bound of the time added by any set whose peak is within a budget. Errors: ENOMEM. */
msc_status msc__bound_added_ns(const msc__model *model, const msc__fit *fit, uint64_t budget_bytes,
                               int64_t *added_ns, msc_error *err);

/** By how much `step_ns` can exceed the best, in parts per million, rounded up. */
uint32_t msc__bound_ppm(int64_t step_ns, int64_t lower_ns);

#endif /* MSC_DECIDE_INTERNAL_H */
