/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file plan.h
 * A plan: what shall be done with each module, and what that is expected to bring.
 *
 * A plan is a list of choices, one per module that was considered, in module order, and a summary. It
 * knows nothing of how a technique is carried out. Its canonical text (docs/formats/plan.md) holds every
 * number in it, and its digest is a digest of that text, so two plans are equal exactly when their
 * digests are, in any process, on any machine, with any compiler.
 */
#ifndef MEMSCALE_PLAN_H
#define MEMSCALE_PLAN_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What is done with a module. */
typedef enum msc_action {
    MSC_ACTION_KEEP,       /**< runs as it is */
    MSC_ACTION_CHECKPOINT, /**< its saved tensors are dropped in forward and recomputed in backward */
    MSC_ACTION_SELECTIVE,  /**< likewise, but the outputs of some of its operations are kept in between and
                                need not be computed again: see msc_plan_keep */
    MSC_ACTION_OFFLOAD,    /**< runs once; tensors that its forward saves leave the device in forward and come
                                back for its backward: see msc_plan_move */
    MSC_ACTION_COUNT
} msc_action;

/**
 * The rule behind a choice, as X(name, key, text). `key` appears in texts and JSON and is stable.
 */
#define MSC_RULE_LIST(X)                                                                                     \
    X(CHOSEN, "chosen", "cheapest way found to meet the budget")                                             \
    X(SMALLEST, "smallest", "part of the smallest plan found: none meets the budget")                        \
    X(NOT_NEEDED, "not-needed", "the budget is met without it")                                              \
    X(COVERED, "covered", "lies inside a module that is checkpointed or offloaded")                          \
    X(SPLIT, "split", "modules inside it are checkpointed or offloaded instead")                             \
    X(COSTLIER, "costlier", "another choice frees the same memory in less time")                             \
    X(NO_SAVING, "no-saving", "re-running it would free nothing")                                            \
    X(ROOT, "root", "the whole model: re-running it at the peak would free nothing")                         \
    X(NO_BACKWARD, "no-backward", "nothing that it saves is used in backward")                               \
    X(WRITES_OUTSIDE, "writes-outside",                                                                      \
      "changes a tensor from outside in place; a recompute would repeat that")                               \
    X(INPUT_CHANGED, "input-changed",                                                                        \
      "its input, or a buffer that it reads, is changed in place after it ran")                              \
    X(PYTHON_STATE, "python-state", "its forward changes a Python attribute; a recompute would repeat that") \
    X(NOT_TENSORS, "not-tensors", "fills an object that is not a tensor, such as a cache")                   \
    X(NO_FORWARD, "no-forward", "is not called through its own forward")                                     \
    X(EXCLUDED, "excluded", "excluded by configuration")                                                     \
    X(DISABLED, "disabled", "checkpointing is switched off in the configuration")                            \
    X(HOOKED, "hooked", "a module inside it has forward hooks, which would fire twice")                      \
    X(NO_ROOM, "no-room", "a recompute would need more streamed weights at once than there is room for")     \
    X(HOLDS_EXCLUDED, "holds-excluded",                                                                      \
      "a module inside it is excluded by configuration, and a recompute would run that twice")               \
    X(DIFFERED, "differed",                                                                                  \
      "its recompute, or that of a module around or inside it, differed from its forward")                   \
    X(SCRIPTED, "scripted", "calls TorchScript, whose rounding follows from how often it is called")

typedef enum msc_rule {
#define MSC_RULE_ENUM(name, key, text) MSC_RULE_##name,
    MSC_RULE_LIST(MSC_RULE_ENUM)
#undef MSC_RULE_ENUM
        MSC_RULE_COUNT
} msc_rule;

/**
 * One choice.
 *
 * `joined` is for the children of a module that runs them one after another (MSC_MODULE_CHAIN): the child
 * is part of the checkpoint of the sibling before it, so that what passes between the two is not kept. Bytes
 * and times of each choice of such a region are those of the whole region.
 *
 * `boundary` is for a checkpoint whose *boundary*, the inputs that it holds for its recompute, is offloaded:
 * what leaves the device is named by msc_plan_move. It stands at the first choice of a region.
 */
typedef struct msc_choice {
    uint32_t module;      /**< module id in the graph */
    uint8_t action;       /**< msc_action */
    uint8_t rule;         /**< msc_rule */
    uint16_t call_count;  /**< calls of the module in a step, saturating */
    uint64_t saved_bytes; /**< what the action frees at the moment of the plain step's peak; for KEEP,
                                    what a checkpoint (or, of a module that cannot run twice, its offload)
                                    would free */
    int64_t cost_ns;      /**< time that the action adds; for KEEP, that a checkpoint would add, likewise */
    uint64_t other_peak_bytes; /**< allocated peak if this one choice were the other way round (kept instead,
                                    or checkpointed in place of what overlaps it); 0: there is no other */
    int64_t other_step_ns;     /**< and the step time then */
    uint64_t moved_bytes;      /**< that leave the device in a step, over all calls */
    int64_t transfer_ns;  /**< what of `cost_ns` is for moving them: copies that compute does not hide, and
                                    the fixed cost of each */
    uint64_t ahead_bytes; /**< of what backward uses next, that may come back early: msc_plan_set_ahead */
    uint32_t moved_count; /**< storages that leave in a step, over all calls */
    uint8_t joined;       /**< 1: belongs to the region of the sibling before it */
    uint8_t boundary;     /**< 1: what the checkpoint holds for its recompute is offloaded */
    uint8_t pad[2];       /**< zero */
} msc_choice;

/** The plan as a whole. */
typedef struct msc_plan_summary {
    uint64_t budget_bytes;        /**< what had to be met */
    uint64_t plain_peak_bytes;    /**< peak of the step without any technique */
    uint64_t peak_bytes;          /**< peak of this plan */
    uint64_t smallest_peak_bytes; /**< smallest peak that was found reachable */
    int64_t plain_step_ns;        /**< step time without any technique, by the cost model */
    int64_t step_ns;              /**< step time of this plan */
    uint32_t time_bound_ppm;      /**< this plan is at most so much slower than any plan that fits */
    uint32_t peak_op;             /**< operation at whose moment the plan peaks (the plain step's op id) */
    uint8_t peak_in_recompute;    /**< 1: the peak lies inside a recompute that precedes `peak_op` */
    uint8_t fits;                 /**< 1: peak_bytes <= budget_bytes */
    uint16_t pad;                 /**< zero */
    uint32_t pad2;                /**< zero */
    uint64_t graph_digest;        /**< of the graph it was made for */
    uint64_t window_out_bytes;    /**< of one call, most bytes that wait on the device for their copy out */
    uint64_t window_in_bytes;     /**< of one call, most bytes that come back ahead of their use. Both
                                       are 0 where nothing is offloaded */
    uint64_t away_peak_bytes;     /**< most bytes off the device at once */
    uint64_t staging_bytes;       /**< of all peaks: memory that what is offloaded passes through, where it is
                                       the device's, and that a recompute takes all the time
                                       (`msc_decide_options.rerun_bytes`) */
} msc_plan_summary;

typedef struct msc_plan msc_plan;

/** Creates an empty plan. Errors: ENOMEM. */
MSC_API MSC_NODISCARD msc_status msc_plan_create(msc_context *ctx, msc_plan **out, msc_error *err);

/** Ends a plan. NULL is accepted. */
MSC_API void msc_plan_destroy(msc_plan *plan);

/** Appends a choice; module ids must rise. Errors: EINVAL (action, rule, order, joined), ENOMEM. */
MSC_API MSC_NODISCARD msc_status msc_plan_add(msc_plan *plan, const msc_choice *choice, msc_error *err);

/**
 * Names an operation whose outputs the SELECTIVE choice that was added last keeps.
 *
 * @param offset counted from the first operation of each call of the module; offsets must rise.
 * Errors: EINVAL (no choice yet, not SELECTIVE, order), ENOMEM.
 */
MSC_API MSC_NODISCARD msc_status msc_plan_keep(msc_plan *plan, uint32_t offset, msc_error *err);

/**
 * The operations that a choice keeps, as offsets, rising; NULL for none.
 *
 * @param choice index of the choice.
 * @param count  their number. A choice that does not exist has none.
 */
MSC_API const uint32_t *msc_plan_kept(const msc_plan *plan, uint32_t choice, uint32_t *count);

/**
 * Names something that the choice that was added last offloads.
 *
 * @param ordinal OFFLOAD: number of a saved tensor within each call of the module, counted from 0 in the order in
 *                which they are packed. Every tensor that autograd saves counts, in modules inside, too, but for
 *                those that the graph has no save of (parameters and views of them). All that is saved
 *                of one storage is named, or none of it.
 *                Boundary: number of an input of each call, in the order of `msc_graph_inputs`. Ordinals must rise.
 * Errors: EINVAL (no choice yet, neither OFFLOAD nor a boundary, order), ENOMEM.
 */
MSC_API MSC_NODISCARD msc_status msc_plan_move(msc_plan *plan, uint32_t ordinal, msc_error *err);

/** What a choice offloads, as ordinals, rising; otherwise as `msc_plan_kept`. */
MSC_API const uint32_t *msc_plan_moved(const msc_plan *plan, uint32_t choice, uint32_t *count);

/**
 * Sets how many bytes may come back early, ahead of the region that they are of, from the first use in a region of this
 * choice on. They are those of the region that backward uses next, in order of use.
 *
 * @param choice index of a choice that moves something.
 * Errors: EINVAL (no such choice, it moves nothing).
 */
MSC_API MSC_NODISCARD msc_status msc_plan_set_ahead(msc_plan *plan, uint32_t choice, uint64_t ahead_bytes,
                                                    msc_error *err);

/** Replaces the summary. Errors: EINVAL. */
MSC_API MSC_NODISCARD msc_status msc_plan_set_summary(msc_plan *plan, const msc_plan_summary *summary,
                                                      msc_error *err);

MSC_API uint32_t msc_plan_choice_count(const msc_plan *plan);
MSC_API const msc_choice *msc_plan_choices(const msc_plan *plan);
MSC_API const msc_plan_summary *msc_plan_get_summary(const msc_plan *plan);

/** Action for a module: that of its choice, or KEEP when the plan does not mention it. */
MSC_API msc_action msc_plan_action(const msc_plan *plan, uint32_t module);

/** Index of a module's choice, or MSC_NONE. */
MSC_API uint32_t msc_plan_find(const msc_plan *plan, uint32_t module);

/** Digest of the canonical text. */
MSC_API uint64_t msc_plan_digest(const msc_plan *plan);

/** Canonical text, in the manner of `snprintf`; see `msc_graph_format`. Errors: EINVAL. */
MSC_API MSC_NODISCARD msc_status msc_plan_format(const msc_plan *plan, char *buffer, size_t buffer_bytes,
                                                 size_t *needed_bytes, msc_error *err);

/** Reads canonical text. Errors: EFORMAT (names the line), EVERSION, ENOMEM. */
MSC_API MSC_NODISCARD msc_status msc_plan_parse(msc_context *ctx, const char *text, size_t text_bytes,
                                                msc_plan **out, msc_error *err);

MSC_API const char *msc_action_name(msc_action action); /**< "keep", "checkpoint", "selective", "offload" */
MSC_API const char *msc_rule_key(msc_rule rule);        /**< stable key, e.g. "not-needed" */
MSC_API const char *msc_rule_text(msc_rule rule);       /**< one clause of English */

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_PLAN_H */
