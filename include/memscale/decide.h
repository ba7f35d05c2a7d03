/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide.h
 * The decision: the fastest plan whose replayed peak is within a budget.
 *
 * The engine works on numbers alone. It sees no device, no clock, no environment, no locale, and uses
 * integers only, so the same graph, hardware numbers and options give the same plan everywhere.
 *
 * How it decides:
 *
 *  1. **Candidates.** Every module whose calls may be recomputed without changing anything,
 *     and whose checkpoint would free memory; in several variants that keep the outputs of some operations,
 *     those that take much time and little memory; and runs of siblings in a chain. With `allow_offload`, each
 *     of these with its boundary offloaded, and every module whose saved tensors can leave the device. Modules
 *     that are no candidate get a choice with the reason.
 *  2. **Cost.** Time of an operation = launch + max(flops / rate, moved bytes / rate), with the rates of its
 *     class, plus what large fresh buffers take. A checkpoint costs the operations that it repeats plus a
 *     fixed overhead per call; an offload costs what its copies take longer than what they hide behind.
 *  3. **Frontier.** A search that does not know the budget walks from the plain step towards the
 *     smallest peak and collects plans, each with its exact replayed peak. What is worse than another
 *     plan in both peak and time is dropped.
 *  4. **Choice.** The fastest plan of the frontier whose peak is within the budget. Since the frontier is
 *     the same for every budget, a lower budget can never give a higher peak or a faster step.
 *
 * What a CUDA allocator reserves only a replay tells. There the frontier is a list of plans in order of time,
 * and as many of them are replayed as a budget needs. Where the candidates combine in at most 32768 ways, all of
 * them are on it (the most promising, where there is too much to replay), else plans around the frontier.
 *
 * **Refusals.** That a budget cannot be met is proven where every combination was looked at: for HOST up to
 * 4096 combinations, 32768 where something may be offloaded, for CUDA up to 32768, as long as the replays that this takes have some eight million
 * operations and buffers together. Beyond that it says that the search found no plan.
 */
#ifndef MEMSCALE_DECIDE_H
#define MEMSCALE_DECIDE_H

#include "base.h"
#include "graph.h"
#include "plan.h"
#include "sim.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Kinds of rates: the classes of work in full precision, then the same in half precision. */
#define MSC_RATE_COUNT (2 * MSC_WORK_COUNT)

/** The kind of rate that an operation has: its class, and whether it works on half precision. */
#define MSC_RATE_OF(op) ((op)->work + (((op)->flags & MSC_OP_HALF) != 0 ? MSC_WORK_COUNT : 0))

/**
 * Rates of the machine that the step will run on, as reached in practice. All above zero.
 *
 * Where an allocator fetches large buffers from the system each time and gives them back (the C library does
 * so on a host), each of their pages costs time when it is first touched, often more than the operation
 * itself.
 */
typedef struct msc_rates {
    size_t struct_bytes;
    uint64_t flops_per_us[MSC_RATE_COUNT];       /**< floating-point operations per microsecond */
    uint64_t moved_bytes_per_us[MSC_RATE_COUNT]; /**< bytes read plus written per microsecond */
    uint64_t fresh_from_bytes;                   /**< buffers and scratch of this size and above are fresh */
    uint64_t fresh_bytes_per_us;                 /**< of fresh ones, beside what the operation moves */
    int64_t launch_ns;                           /**< fixed cost of one operation */
    int64_t recompute_ns;                        /**< fixed cost of one checkpointed call */
    int64_t intercept_ns; /**< cost of one operation inside a selective checkpoint: each is looked at */
} msc_rates;

/** A 2-core host: 100 GFLOP/s and 20 GB/s whatever the class, nothing fresh, 5 µs an operation, 60 µs a
 *  checkpointed call, 15 µs an operation looked at. */
MSC_API void msc_rates_init(msc_rates *rates, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_rates msc_rates_default(void)
{
    msc_rates rates;

    msc_rates_init(&rates, sizeof rates);
    return rates;
}

/** Name of a kind of rate, such as "matrix" or "matrix_half"; "" for an unknown one. */
MSC_API const char *msc_rate_name(uint32_t rate);

/**
 * The way off the device and back, for tensors that are offloaded.
 *
 * A call's copies hide behind its forward and its backward, except for the way back of what is used first: that of a
 * boundary hides behind nothing. What they take longer, and `offload_ns` for each storage and direction, is added to
 * the step.
 */
typedef struct msc_link {
    uint64_t out_bytes_per_us; /**< from the device, beside a running step; above 0 */
    uint64_t in_bytes_per_us;  /**< and back; above 0 */
    int64_t offload_ns;        /**< fixed cost of one copy; at least 0 */
    uint64_t least_bytes;      /**< of a storage that is moved; above 0 */
    uint64_t limit_bytes;      /**< most bytes off the device at once */
    uint64_t window_out_bytes; /**< of one call, most bytes that wait on the device for their copy out */
    uint64_t window_in_bytes;  /**< of one call, most bytes that come back ahead of their use */
    uint64_t staging_bytes; /**< of the device's memory, held all the time by a plan that moves anything: what
                                    copies pass through. 0 for a card, whose copies pass through host memory; at
                                    most INT64_MAX */
} msc_link;

/** 10 GB/s each way, 20 µs a copy, storages from 1 MiB on, no limit, windows of 64 MiB, no staging. */
MSC_API msc_link msc_link_default(void);

/** Options of a decision. */
typedef struct msc_decide_options {
    size_t struct_bytes;
    uint64_t budget_bytes; /**< what the replayed peak (HOST: allocated, CUDA: reserved) must not exceed */
    msc_sim_options sim;   /**< allocator that the step will run on */
    msc_rates rates;
    uint8_t allow_checkpoint; /**< 0: every module is kept */
    uint8_t allow_selective;  /**< 0: a checkpoint keeps nothing of what it recomputes */
    uint8_t force;            /**< 1: plan even if the plain step fits: the budget becomes the smallest
                                   peak's three-quarter point; see msc_decide */
    uint8_t allow_offload;    /**< 1: saved tensors, and what a checkpoint holds, may leave the device.
                                   Default: 0 */
    uint8_t pad[4];           /**< zero */
    msc_link link;            /**< how; of no effect without `allow_offload` */
    uint64_t rerun_bytes;     /**< held all the time by a plan that recomputes anything: a library's
                                   workspace for the thread of backward, which the plain step does not take.
                                   At most INT64_MAX. Default: 0 */
} msc_decide_options;

/** Every default, for a struct of `struct_bytes`. */
MSC_API void msc_decide_options_init(msc_decide_options *options, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_decide_options msc_decide_options_default(void)
{
    msc_decide_options options;

    msc_decide_options_init(&options, sizeof options);
    return options;
}

/**
 * Decides.
 *
 * A budget that no plan is found for is not an error: the plan with the smallest peak is returned with
 * `fits` 0 (see above for when that is a proof). With `force` and a plain peak within the budget, the plan
 * chosen is the fastest one with a peak of at most smallest + (plain − smallest) / 4.
 *
 * @param out the caller owns the plan.
 * Errors: ESTATE (graph not finished), EINVAL (names the option), ENOMEM, EOVERFLOW.
 * Cost: about candidates × candidate kinds × operations; milliseconds for a 12-block transformer, some tens of
 * them for CUDA; half a second at most where all combinations are replayed.
 * Threads: any number at once on one finished graph with distinct contexts.
 */
MSC_API MSC_NODISCARD msc_status msc_decide(msc_context *ctx, const msc_graph *graph,
                                            const msc_decide_options *options, msc_plan **out,
                                            msc_error *err);

/** One point of the frontier. */
typedef struct msc_frontier_point {
    uint64_t peak_bytes;
    int64_t step_ns;
} msc_frontier_point;

/**
 * The memory/time frontier that `msc_decide` chooses from, fastest first, peaks falling.
 *
 * @param points  array of `capacity` entries, filled from the fastest.
 * @param count   number of points the frontier has, which may exceed `capacity`.
 * Errors: as `msc_decide`.
 */
MSC_API MSC_NODISCARD msc_status msc_decide_frontier(msc_context *ctx, const msc_graph *graph,
                                                     const msc_decide_options *options,
                                                     msc_frontier_point *points, size_t capacity,
                                                     size_t *count, msc_error *err);

/** Time of one operation under the rates, ns; without what the buffers that it makes take. Rates of a size that
 *  `msc_decide` would refuse count as the default ones. */
MSC_API int64_t msc_op_time_ns(const msc_op *op, const msc_rates *rates);

/**
 * Time of every operation under the rates, with what the buffers that it makes take.
 * @param out array of `msc_graph_op_count` times, ns; INT64_MAX where it would be more.
 */
MSC_API void msc_op_times_ns(const msc_graph *graph, const msc_rates *rates, int64_t *out);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_DECIDE_H */
