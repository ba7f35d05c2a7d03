/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file figures.h
 * What tests of the decision against brute force share: a decision under one budget, how far it is from the best,
 * and the replay of a combination.
 */
#ifndef MSC_TEST_FIGURES_H
#define MSC_TEST_FIGURES_H

#include "brute.h"

#define FIGURES_MOST 8192u

/** How much slower than the best, one entry per graph and budget. Begins zeroed. */
typedef struct figures {
    uint32_t ppm[FIGURES_MOST]; /**< in parts per million of the best step */
    uint32_t count;
    uint32_t worst;
    uint32_t graphs; /**< looked at; the caller counts */
} figures;

/** Enters a step, which must not be quicker than the best one. */
void figures_enter(figures *f, int64_t step_ns, int64_t best_ns);

/** Prints them, and fails unless the median is at most 2 % and the worst at most 5 %. */
void figures_check(figures *f);

/** A context, and its end: everything has been given back. */
msc_context *figures_start(void);
void figures_stop(msc_context *ctx);

/** Options with fixed costs so small that it pays to keep something in tiny graphs. */
msc_decide_options figures_small_costs(msc_sim_kind kind);

/** The summary of what is decided within a budget. */
msc_plan_summary figures_decide(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                                uint64_t budget_bytes);

/** Peak of the present combination, by a replay. */
uint64_t figures_replay(const brute *b, msc_sim *sim);

#endif /* MSC_TEST_FIGURES_H */
