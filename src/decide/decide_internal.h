/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_internal.h
 * What the files of this folder share, and nobody else.
 *
 * decide.c             the two public calls: options, choice
 * decide_plan.c        the plan that comes out: choices, rules, what the other way round would bring
 * decide_cost.c        time of operations and regions, comparison of ratios
 * decide_model.c       the graph in the form that the decision reads
 * decide_survey.c      what the graph says against running calls a second time
 * decide_candidates.c  which modules may be checkpointed, and why the others may not
 * decide_chains.c      siblings that may be checkpointed as one
 * decide_variants.c    which outputs a checkpoint may keep
 * decide_offload.c     what may leave the device
 * decide_overlaps.c    which candidates exclude each other, which are interchangeable
 * decide_reserved.c    peaks of a caching allocator, by replay
 * decide_every.c       every combination of a small graph, for a caching allocator
 * decide_fit.c         exact host peak of a set of candidates, kept up to date as the set changes
 * decide_fit_build.c   the tables that it needs, with decide_fit_lists.c and decide_fit_points.c
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
#include "sim/sim_moves.h"

/* ---- decide_model.c, decide_candidates.c ----------------------------------------------------------- */

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
 * One way to treat a module or some siblings: run it again as a whole (CHECKPOINT), or all but some
 * operations whose outputs are kept (SELECTIVE), either with its boundary offloaded or not; or move what it saves
 * (OFFLOAD). Ways that overlap exclude each other; the ways of one module all do.
 */
typedef struct msc__candidate {
    uint32_t module;       /**< the first of them, for siblings */
    uint32_t first_region; /**< its calls are the regions first_region … */
    uint32_t region_count;
    uint32_t first_kept; /**< offsets of kept operations, in the model's `kept` */
    uint32_t kept_count; /**< 0: all is run again */
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
void msc__model_fini(msc__model *model);

/** Fills subjects, candidates and their relations; part of init. Errors: ENOMEM. */
msc_status msc__model_judge(msc__model *model, const msc_decide_options *options, msc_error *err);

/** Appends a candidate and its regions; what follows from the regions is filled in. Errors: ENOMEM. */
msc_status msc__model_add(msc__model *model, const msc__candidate *candidate, const msc__region *regions,
                          msc_error *err);

/** Whether a candidate moves anything off the device. */
static inline bool msc__moves(const msc__candidate *candidate)
{
    return candidate->moved_count > 0;
}

/** Whether a candidate runs anything a second time. */
static inline bool msc__reruns(const msc__candidate *candidate)
{
    return !candidate->offload;
}

/** Offsets of the operations that a candidate keeps. */
static inline const uint32_t *msc__kept_of(const msc__model *model, const msc__candidate *candidate)
{
    return model->kept + candidate->first_kept;
}

/** Whether a candidate keeps what an operation inside one of its regions makes. */
static inline bool msc__keeps(const msc__model *model, const msc__candidate *candidate,
                              const msc__region *region, uint32_t op)
{
    return candidate->kept_count > 0 &&
           msc__offsets_have(msc__kept_of(model, candidate), candidate->kept_count, op - region->begin);
}

/** First input of a call, or where it would be; inputs are sorted by call. Cost: a binary search. */
uint32_t msc__first_input(const msc__model *model, uint32_t call);

/** First write of an operation or a later one; writes are in program order. Cost: a binary search. */
uint32_t msc__first_write(const msc__model *model, uint32_t op);

/** Notes all saves inside a region that a candidate drops, and settles it. */
void msc__model_fill_region(const msc__model *model, const msc__candidate *candidate, msc__region *region);

/* ---- decide_survey.c -------------------------------------------------------------------------------- */

/** Notes on a call. */
enum {
    MSC__NOTE_SAVES = 1u << 0,          /**< something is saved inside */
    MSC__NOTE_USED = 1u << 1,           /**< something saved inside is used in backward */
    MSC__NOTE_WRITES_OUTSIDE = 1u << 2, /**< something from outside is changed inside */
    MSC__NOTE_INPUT_CHANGED = 1u << 3   /**< something from outside that it reads changes before the redo */
};

/** What the graph says of calls; gone when the candidates are known. */
typedef struct msc__survey {
    msc__scratch scratch;
    uint8_t *notes;      /**< per call: MSC__NOTE_… */
    uint32_t *flags;     /**< per call: MSC_MODULE_… of the modules called inside it */
    msc__buckets writes; /**< indices of writes, by buffer, in program order; module buffers left out */
    msc__buckets calls;  /**< outermost calls by module */
} msc__survey;

/** Fills the survey. `msc__survey_fini` is due in any case. Errors: ENOMEM. */
msc_status msc__survey_init(msc__survey *s, const msc__model *model, msc_error *err);
void msc__survey_fini(msc__survey *s);

/** Whether a buffer is written in operations from … to - 1. */
bool msc__is_written(const msc__model *model, const msc__survey *s, uint32_t buffer, uint32_t from,
                     uint32_t to);

/** What speaks for and against running a region again: MSC__NOTE_…. Cost: its operations and saves. */
uint8_t msc__survey_region(const msc__model *model, const msc__survey *s, const msc__region *region);

/* ---- decide_chains.c, decide_variants.c, decide_offload.c, decide_overlaps.c ------------------------------------------ */

/** Adds the runs of siblings that may be checkpointed as one. Errors: ENOMEM. */
msc_status msc__model_add_runs(msc__model *model, const msc__survey *s, msc_error *err);

/** Adds, per candidate, ways to keep some outputs. Errors: ENOMEM. */
msc_status msc__model_add_variants(msc__model *model, const msc__survey *s, msc_error *err);

/** Adds, per candidate, the one that moves its boundary, and per module the one that moves what it saves.
 *  Errors: ENOMEM. */
msc_status msc__model_add_offloads(msc__model *model, const msc__survey *s, const msc_decide_options *options,
                                   msc_error *err);

/** Fills `above` and `below`. Errors: ENOMEM. */
msc_status msc__model_pair(msc__model *model, const msc__survey *s, msc_error *err);

/** Sorts candidates into groups, after `usable` has been settled. Errors: ENOMEM. */
msc_status msc__model_group(msc__model *model, msc_error *err);

/** Size of a buffer as the allocator counts it. */
static inline uint64_t msc__model_bytes(const msc__model *model, uint64_t size_bytes)
{
    uint64_t mask = model->unit_bytes - 1;
    return (size_bytes + mask) & ~mask;
}

/* ---- decide_cost.c -------------------------------------------------------------------------------- */

/** Checks every rate; the message names the field, and the kind of rate. Errors: EINVAL. */
msc_status msc__check_rates(const msc_rates *rates, msc_error *err);

/** What a caller has given, whole; on EINVAL the defaults. */
msc_status msc__read_rates(const msc_rates *given, msc_rates *out, msc_error *err);

/** Fills `time_before_ns`, `call_overhead_ns` and `intercept_ns`, limited so that sums never overflow. */
void msc__cost_times(msc__model *model, const msc_rates *rates);

/** Checks what describes the link. Errors: EINVAL. */
msc_status msc__check_link(const msc_link *link, msc_error *err);

/** Time that the moves of all regions of a candidate add: no part of it hides behind compute. */
int64_t msc__cost_transfers(const msc__model *model, const msc__candidate *candidate);

/** Time that one region of a candidate adds. */
int64_t msc__cost_region(const msc__model *model, const msc__candidate *candidate, const msc__region *region);

/** Time that a candidate adds. */
int64_t msc__cost_candidate(const msc__model *model, const msc__candidate *candidate);

/** Sign of a / b − c / d, for b, d > 0, without overflow. */
int msc__cost_compare(uint64_t a, uint64_t b, uint64_t c, uint64_t d);

/* ---- decide_fit.h: the exact peak of a set -------------------------------------------------------- */

typedef struct msc__fit msc__fit;

/* ---- decide_frontier.c ---------------------------------------------------------------------------- */

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

/* ---- decide_plan.c -------------------------------------------------------------------------------- */

/** A plan with nothing but a set's actions, and windows in its summary. The caller owns it, also when the call fails. Errors: ENOMEM. */
msc_status msc__plan_of_set(const msc__model *model, const uint64_t *set, msc_plan **plan, msc_error *err);

/** Fills in the windows within which a set moves anything; leaves them where it moves nothing. */
void msc__plan_windows(const msc__model *model, const uint64_t *set, msc_plan_summary *summary);

/** What a set's choices are explained with. */
typedef struct msc__explained {
    const msc__model *model;
    msc__fit *fit; /**< its set is empty before and after */
    const uint64_t *set;
    int64_t step_ns; /**< under the set */
    uint32_t least;  /**< filled in: the active candidate that frees least per time, or MSC_NONE */
    bool fits;
    bool allow_checkpoint;
} msc__explained;

/** A plan with a choice per module in which something is saved; the summary has windows only. Otherwise as above.
 */
msc_status msc__plan_explain(msc__explained *explained, msc_plan **plan, msc_error *err);

/* ---- decide_reserved.c, decide_every.c -------------------------------------------------------------- */

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

/* ---- decide_bound.c ------------------------------------------------------------------------------- */

/** Lower bound of the time added by any set whose peak is within a budget. Errors: ENOMEM. */
msc_status msc__bound_added_ns(const msc__model *model, const msc__fit *fit, uint64_t budget_bytes,
                               int64_t *added_ns, msc_error *err);

/** By how much `step_ns` can exceed the best, in parts per million, rounded up. */
uint32_t msc__bound_ppm(int64_t step_ns, int64_t lower_ns);

#endif /* MSC_DECIDE_INTERNAL_H */
