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
 *  1. **Candidates.** Every module whose calls may be executed a second time without changing anything,
 *     and whose checkpoint would free memory. The others get a choice with the reason.
 *  2. **Cost.** Time of an operation = launch + max(flops / rate, moved bytes / rate). A checkpoint costs
 *     the operations that it repeats plus a fixed overhead per call.
 *  3. **Frontier.** A search that does not know the budget walks from the plain step towards the
 *     smallest peak and collects plans, each with its exact replayed peak. What is worse than another
 *     plan in both peak and time is dropped.
 *  4. **Choice.** The fastest plan of the frontier whose peak is within the budget. Since the frontier is
 *     the same for every budget, a lower budget can never give a higher peak or a faster step.
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

/** Rates of the machine that the step will run on. All above zero. */
typedef struct msc_rates {
    size_t struct_bytes;
    uint64_t flops_per_us;       /**< floating-point operations per microsecond, as reached in practice */
    uint64_t moved_bytes_per_us; /**< memory bandwidth, read plus write */
    int64_t launch_ns;           /**< fixed cost of one operation */
    int64_t recompute_ns;        /**< fixed cost of one checkpointed call */
} msc_rates;

/** A 2-core host: 100 GFLOP/s, 20 GB/s, 5 µs an operation, 60 µs a checkpointed call. */
MSC_API msc_rates msc_rates_default(void);

/** Options of a decision. */
typedef struct msc_decide_options {
    size_t struct_bytes;
    uint64_t budget_bytes; /**< what the replayed peak (HOST: allocated, CUDA: reserved) must not exceed */
    msc_sim_options sim;   /**< allocator that the step will run on */
    msc_rates rates;
    uint8_t allow_checkpoint; /**< 0: every module is kept */
    uint8_t force;            /**< 1: plan even if the plain step fits: the budget becomes the smallest
                                   peak's three-quarter point; see msc_decide */
    uint8_t pad[6];           /**< zero */
} msc_decide_options;

MSC_API msc_decide_options msc_decide_options_default(void);

/**
 * Decides.
 *
 * A budget that cannot be met is not an error: the plan with the smallest peak is returned with
 * `fits` 0. With `force` and a plain peak within the budget, the plan chosen is the fastest one with a
 * peak of at most smallest + (plain − smallest) / 4.
 *
 * @param out the caller owns the plan.
 * Errors: ESTATE (graph not finished), EINVAL (names the option), ENOMEM, EOVERFLOW.
 * Cost: about candidates × candidate kinds × operations; milliseconds for a 12-block transformer.
 * Threads: any number at once on one finished graph with distinct contexts.
 */
MSC_API msc_status msc_decide(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                              msc_plan **out, msc_error *err);

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
MSC_API msc_status msc_decide_frontier(msc_context *ctx, const msc_graph *graph,
                                       const msc_decide_options *options, msc_frontier_point *points,
                                       size_t capacity, size_t *count, msc_error *err);

/** Time of one operation under the rates, ns. */
MSC_API int64_t msc_op_time_ns(const msc_op *op, const msc_rates *rates);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_DECIDE_H */
