/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_model.h
 * The graph in the form that the decision reads, and its candidates: what every file of this folder knows.
 *
 * decide.c             the two public calls: options, choice
 * decide_plan.c        the plan that comes out: choices, rules, what the other way round would bring
 * decide_cost.c        time of operations and regions, comparison of ratios
 * decide_model.c       the graph in the form that the decision reads
 * decide_survey.c      what the graph says against recomputing calls
 * decide_candidates.c  which modules may be checkpointed, and why the others may not
 * decide_chains.c      siblings that may be checkpointed as one
 * decide_variants.c    which outputs a checkpoint may keep
 * decide_offload.c     what may leave the device
 * decide_overlaps.c    which candidates exclude each other, which are interchangeable
 * decide_reserved.c    peaks of a caching allocator, by replay
 * decide_every.c       every combination of a small graph, for a caching allocator
 * decide_fit.c         exact host peak of a set of candidates, kept up to date as the set changes
 * decide_fit_build.c   the tables that it needs, with decide_fit_lists.c and decide_fit_points.c
 * decide_frontier.c    plans that no other plan beats in both peak and time
 * decide_search.c      the walks that fill the frontier, with decide_walker.c and decide_improve.c
 * decide_bound.c       how far from the best possible time a plan can be
 *
 *      graph -> model (candidates, costs) -> fit -> search -> frontier -> one plan
 */
#ifndef MSC_DECIDE_MODEL_H
#define MSC_DECIDE_MODEL_H

#include <stdbool.h>

#include "base/array.h"
#include "base/invariant.h"
#include "memscale/decide.h"
#include "sim/sim_buckets.h"
#include "sim/sim_moves.h"

/** What is known of a module. */
typedef struct msc__subject {
    uint32_t call_count;
    uint32_t candidate; /**< index of its checkpoint, or MSC_NONE */
    uint32_t offload;   /**< index of its offload, or MSC_NONE */
    uint8_t rule;       /**< msc_rule: why it is no candidate; MSC_RULE_NOT_NEEDED: it is one */
    uint8_t has_saves;  /**< 1: something is saved inside its calls, so the plan mentions it */
    uint16_t pad;
} msc__subject;

/**
 * One way to treat a module or some siblings: recompute it as a whole (CHECKPOINT), or all but some
 * operations whose outputs are kept (SELECTIVE), either with its boundary offloaded or not; or move what it saves
 * (OFFLOAD). Ways that overlap exclude each other; the ways of one module all do.
 */
typedef struct msc__candidate {
    uint32_t module;       /**< the first of them, for siblings */
    uint32_t first_region; /**< its calls are the regions first_region … */
    uint32_t region_count;
    uint32_t first_kept; /**< offsets of kept operations, in the model's `kept` */
    uint32_t kept_count; /**< 0: all is recomputed */
    uint32_t base;       /**< the candidate of the same module that keeps nothing; itself, if it is that */
    uint32_t next;       /**< the next way to treat the same module, which is faster: it keeps more, or does
                              not move the boundary; or MSC_NONE */
    uint32_t also; /**< of `base`: the first way to treat the same module that moves something, of that one:
                              the next such; or MSC_NONE */
    uint32_t first_moved; /**< ordinals of what it moves, in the model's `moved` */
    uint32_t moved_count; /**< 0: nothing */
    uint32_t group;       /**< interchangeable candidates have the same one; dense */
    int64_t cost_ns;
    uint64_t saved_bytes; /**< freed at the moment of the plain peak */
    uint8_t usable;       /**< 0: it turned out to free nothing, or may not be used */
    uint8_t is_run;       /**< 1: siblings in a chain */
    uint8_t offload;      /**< 1: OFFLOAD */
    uint8_t boundary;     /**< 1: a checkpoint whose boundary is offloaded */
    uint8_t pad[4];
} msc__candidate;

/** The graph, seen by the decision. Nothing changes once it is built, but for `usable` and `saved_bytes`. */
typedef struct msc__model {
    msc__scratch scratch; /**< owns every plain array below */
    const msc_graph *graph;
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
    msc__region *call_regions;  /**< per call, as a region of its own */
    uint32_t *last_call;        /**< per call: the last call inside it, itself at least */
    msc__buckets saves_by_call; /**< a call and all inside it are consecutive */
    msc__buckets begins;        /**< buffers by begin, those that each run makes */
    int64_t *time_before_ns;    /**< per position: time of the operations before it */
    int64_t call_overhead_ns;   /**< of one recomputed region */
    int64_t intercept_ns;       /**< per operation that runs inside a selective region */
    msc__subject *subjects;     /**< per module */
    msc__array candidate_list;  /**< msc__candidate */
    msc__array region_list;     /**< msc__region */
    msc__array kept_list;       /**< uint32_t */
    msc__array moved_list;      /**< uint32_t */
    msc__array move_list;       /**< msc__moved */
    msc__candidate *candidates; /**< of `candidate_list` */
    msc__region *regions;       /**< of `region_list`: what the candidates' calls recompute */
    uint32_t *kept;             /**< of `kept_list` */
    uint32_t *moved;            /**< of `moved_list` */
    msc__moved *moves;          /**< of `move_list`: what the regions move */
    msc_link link;
    uint64_t rerun_bytes;     /**< see msc_decide_options */
    int64_t most_call_ns;     /**< that each fixed cost of a region may count */
    uint32_t candidate_count; /**< of all, usable or not */
    uint32_t region_count;
    uint32_t usable_count;
    uint32_t group_count;
    msc__buckets above;   /**< per candidate: candidates that contain it, and others that go before it */
    msc__buckets below;   /**< per candidate: candidates that it contains, likewise */
    msc__buckets members; /**< per group: candidates in call order */
} msc__model;

/** Builds everything up to the candidates. `msc__model_fini` is due in any case. */
msc_status msc__model_init(msc__model *model, msc_context *ctx, const msc_graph *graph,
                           const msc_decide_options *options, msc_error *err);

/** The first part of init: what stands in the graph, without times and candidates. */
msc_status msc__model_read(msc__model *model, msc_context *ctx, const msc_graph *graph,
                           const msc_decide_options *options, msc_error *err);
void msc__model_fini(msc__model *model);

/** Whether a candidate moves anything off the device. */
static inline bool msc__moves(const msc__candidate *candidate)
{
    return candidate->moved_count > 0;
}

/** Whether a candidate recomputes anything. */
static inline bool msc__reruns(const msc__candidate *candidate)
{
    return !candidate->offload;
}

/** Offsets of the operations that a candidate keeps. */
static inline const uint32_t *msc__kept_of(const msc__model *model, const msc__candidate *candidate)
{
    MSC__ASSERT(candidate->first_kept + candidate->kept_count <= model->kept_list.count);
    return model->kept + candidate->first_kept;
}

/** Whether a candidate keeps what an operation inside one of its regions makes. */
static inline bool msc__keeps(const msc__model *model, const msc__candidate *candidate,
                              const msc__region *region, uint32_t op)
{
    MSC__ASSERT(op >= region->begin && op < region->end);
    return candidate->kept_count > 0 &&
           msc__offsets_have(msc__kept_of(model, candidate), candidate->kept_count, op - region->begin);
}

/** First input of a call, or where it would be; inputs are sorted by call. Cost: a binary search. */
uint32_t msc__first_input(const msc__model *model, uint32_t call);

/** First write of an operation or a later one; writes are in program order. Cost: a binary search. */
uint32_t msc__first_write(const msc__model *model, uint32_t op);

/** Sorts candidates into groups, after `usable` has been settled. Errors: ENOMEM. */
msc_status msc__model_group(msc__model *model, msc_error *err);

/** Size of a buffer as the allocator counts it. */
static inline uint64_t msc__model_bytes(const msc__model *model, uint64_t size_bytes)
{
    uint64_t mask = model->unit_bytes - 1;

    MSC__ASSERT((model->unit_bytes & mask) == 0 && size_bytes <= UINT64_MAX - mask);
    return (size_bytes + mask) & ~mask;
}

/** Whether a candidate is in a set, which is a bit for each. */
static inline bool msc__set_has(const uint64_t *set, uint32_t candidate)
{
    return (set[candidate / 64] >> (candidate % 64) & 1) != 0;
}

#endif /* MSC_DECIDE_MODEL_H */
