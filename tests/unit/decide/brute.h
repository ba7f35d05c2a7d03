/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file brute.h
 * Every combination of candidates that do not overlap, one by one: what the decision is measured against. Which
 * candidates overlap is worked out anew from the calls. Peaks are the fit's, which tests compare with replays.
 */
#ifndef MSC_TEST_BRUTE_H
#define MSC_TEST_BRUTE_H

#include "decide/decide_plan.h"

#define BRUTE_MOST_CANDIDATES 512u

/** The least time that any combination within a budget adds. */
typedef struct brute_best {
    uint64_t budget_bytes;
    int64_t added_ns; /**< INT64_MAX: none is within it */
} brute_best;

typedef struct brute {
    msc_context *ctx;
    msc__model model;
    msc__fit fit;
    uint8_t *excludes; /**< candidates × candidates */
    uint32_t *blocked; /**< per candidate: members of the present set that it overlaps */
    brute_best *best;  /**< the caller's */
    uint32_t best_count;
    uint64_t sets;      /**< looked at, or counted */
    uint64_t most_sets; /**< counting stops there */
    uint64_t smallest_bytes;
    uint64_t set[BRUTE_MOST_CANDIDATES / 64];
    /** Optional: called with every set that is looked at. */
    void (*watch)(struct brute *b, uint64_t peak_bytes, void *state);
    void *watch_state;
} brute;

/** Builds the candidates of a graph as a decision under these options has them. False: without memory, or too
 *  many. `brute_fini` is due in any case. */
bool brute_init(brute *b, msc_context *ctx, const msc_graph *graph, const msc_decide_options *options);
void brute_fini(brute *b);

/** Whether two candidates treat some call both. */
bool brute_overlap(const brute *b, uint32_t one, uint32_t other);

/** Number of combinations, the empty one among them; at most `most`. */
uint64_t brute_count(brute *b, uint64_t most);

/** Looks at all combinations and fills in the best, which start with their budgets. */
void brute_solve(brute *b, brute_best *best, uint32_t count);

#endif /* MSC_TEST_BRUTE_H */
