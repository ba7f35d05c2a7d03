/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far from the best the decision is: bench_optimal [--csv] [MILLIONS]
 *
 * On graphs that are small enough, all combinations of candidates are looked at (tests/unit/decide/brute.c),
 * two million of them at most unless told otherwise. For a ladder of budgets from just below the smallest
 * peak to the plain one:
 *
 *   ways          candidates, and how many combinations they have
 *   refusals      budgets for which "cannot fit" was said though something fits, or the reverse
 *   step          time of the chosen plan's step above the best, in parts per million: median and worst
 *   added         the same for the time that the plan adds to the plain step
 *   bound         what the plan says of itself: at most so much slower than the best; median and worst
 *
 * Rows with --csv: optimal,graph,host,candidates,combinations,budgets,refusals,step median,step worst,added
 * median,added worst,bound median,bound worst. The last row is over all graphs.
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "brute.h"
#include "synth.h"

#define BUDGETS 14u
#define MOST_FIGURES 4096u

/* Of one graph, or of all. */
typedef struct tally {
    uint32_t count;
    uint32_t refusals;
    uint32_t step_ppm[MOST_FIGURES];
    uint32_t added_ppm[MOST_FIGURES];
    uint32_t bound_ppm[MOST_FIGURES];
} tally;

typedef struct bench {
    msc_context *ctx;
    uint64_t least_sets;
    uint64_t most_sets;
    int csv;
    tally all;
    uint64_t sets;
} bench;

static void must(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "bench_optimal: %s\n", what);
    exit(1);
}

static msc_plan_summary decide(const bench *b, const msc_graph *graph, uint64_t budget_bytes,
                               const msc_decide_options *options)
{
    msc_decide_options o = *options;
    msc_plan_summary summary;
    msc_plan *plan = NULL;

    o.budget_bytes = budget_bytes;
    must(msc_decide(b->ctx, graph, &o, &plan, NULL) == MSC_OK, "cannot decide");
    summary = *msc_plan_get_summary(plan);
    msc_plan_destroy(plan);
    return summary;
}

static uint32_t above_ppm(int64_t value, int64_t least)
{
    if (least <= 0)
        return value <= least ? 0 : UINT32_MAX;
    return (uint32_t)(1e6 * (double)(value - least) / (double)least + 0.5);
}

static void enter(tally *t, uint32_t step_ppm, uint32_t added_ppm, uint32_t bound_ppm)
{
    must(t->count < MOST_FIGURES, "too many figures");
    t->step_ppm[t->count] = step_ppm;
    t->added_ppm[t->count] = added_ppm;
    t->bound_ppm[t->count] = bound_ppm;
    t->count++;
}

static void compare(bench *b, tally *t, const msc_plan_summary *chosen, const brute_best *best)
{
    int64_t plain_ns = chosen->plain_step_ns;
    uint32_t step_ppm;
    uint32_t added_ppm;

    if (chosen->fits != (best->added_ns != INT64_MAX)) {
        t->refusals++;
        b->all.refusals++;
    }
    if (!chosen->fits || best->added_ns == INT64_MAX)
        return;
    step_ppm = above_ppm(chosen->step_ns, plain_ns + best->added_ns);
    added_ppm = above_ppm(chosen->step_ns - plain_ns, best->added_ns);
    must(step_ppm <= chosen->time_bound_ppm, "a plan is further from the best than its bound says");
    enter(t, step_ppm, added_ppm, chosen->time_bound_ppm);
    enter(&b->all, step_ppm, added_ppm, chosen->time_bound_ppm);
}

static int compare_u32(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

static void print(const bench *b, const char *name, uint32_t candidates, uint64_t sets, tally *t)
{
    uint32_t *lists[] = {t->step_ppm, t->added_ppm, t->bound_ppm};
    uint32_t middle[3] = {0};
    uint32_t worst[3] = {0};
    size_t i;

    for (i = 0; i < 3 && t->count > 0; i++) {
        qsort(lists[i], t->count, sizeof *lists[i], compare_u32);
        middle[i] = lists[i][t->count / 2];
        worst[i] = lists[i][t->count - 1];
    }
    printf(b->csv ? "optimal,%s,host,%u,%" PRIu64 ",%u,%u,%u,%u,%u,%u,%u,%u\n"
                  : "%-22s %4u ways %8" PRIu64
                    " sets %4u budgets %u wrong | step %6u %6u | added %7u %7u | bound %7u %7u\n",
           name, candidates, sets, t->count, t->refusals, middle[0], worst[0], middle[1], worst[1], middle[2],
           worst[2]);
    fflush(stdout);
}

static void fill_budgets(brute_best *best, const msc_plan_summary *s)
{
    uint64_t range = s->plain_peak_bytes - s->smallest_peak_bytes;
    uint32_t i;

    best[0].budget_bytes = s->smallest_peak_bytes - (s->smallest_peak_bytes > 0);
    for (i = 1; i < BUDGETS; i++)
        best[i].budget_bytes = s->smallest_peak_bytes + range * (i - 1) / (BUDGETS - 2);
}

/* False when the graph has too many combinations, or nothing to choose. */
static int run_graph(bench *b, const char *name, msc_graph *graph, const msc_decide_options *options,
                     int quiet)
{
    static tally t;
    static brute search;
    brute_best best[BUDGETS] = {0};
    msc_plan_summary summary;
    uint64_t sets;
    uint32_t i;
    int good;

    must(graph != NULL, "no memory");
    t.count = t.refusals = 0;
    good = brute_init(&search, b->ctx, graph, options);
    sets = good ? brute_count(&search, b->most_sets + 1) : 0;
    good = good && sets >= b->least_sets && sets <= b->most_sets;
    if (good) {
        summary = decide(b, graph, UINT64_MAX, options);
        fill_budgets(best, &summary);
        brute_solve(&search, best, BUDGETS);
        for (i = 0; i < BUDGETS; i++) {
            summary = decide(b, graph, best[i].budget_bytes, options);
            compare(b, &t, &summary, &best[i]);
        }
        b->sets += sets;
        if (!quiet)
            print(b, name, search.model.candidate_count, sets, &t);
    } else if (!quiet) {
        fprintf(stderr, "bench_optimal: %s has %u candidates in too many combinations\n", name,
                search.model.candidate_count);
    }
    brute_fini(&search);
    msc_graph_destroy(graph);
    return good;
}

static void run_shapes(bench *b)
{
    const msc_decide_options all = msc_decide_options_default();
    msc_decide_options whole = all;
    char name[64];
    uint32_t i;

    whole.allow_selective = 0;
    for (i = 1; i <= 4; i++) {
        snprintf(name, sizeof name, "unequal-12-seed%u", i);
        run_graph(b, name, synth_unequal(b->ctx, 12, i), &all, 0);
    }
    run_graph(b, "chain-13-wrapped", synth_chain(b->ctx), &all, 0);
    run_graph(b, "blocks-12-whole", synth_blocks(b->ctx, 12, 0), &whole, 0);
    run_graph(b, "blocks-7-halves-whole", synth_blocks(b->ctx, 7, SYNTH_HALVES), &whole, 0);
    run_graph(b, "blocks-5-layers-whole", synth_blocks(b->ctx, 5, SYNTH_HALVES | SYNTH_LAYERS), &whole, 0);
    run_graph(b, "blocks-6", synth_blocks(b->ctx, 6, 0), &all, 0);
    run_graph(b, "blocks-8", synth_blocks(b->ctx, 8, 0), &all, 0);
    run_graph(b, "blocks-4-halves", synth_blocks(b->ctx, 4, SYNTH_HALVES), &all, 0);
    run_graph(b, "blocks-3-layers", synth_blocks(b->ctx, 3, SYNTH_HALVES | SYNTH_LAYERS), &all, 0);
    run_graph(b, "blocks-4-layers", synth_blocks(b->ctx, 4, SYNTH_HALVES | SYNTH_LAYERS), &all, 0);
    run_graph(b, "transformer-3-all", synth_transformer(b->ctx, 3), &all, 0);
    run_graph(b, "transformer-2-all", synth_transformer(b->ctx, 2), &all, 0);
    run_graph(b, "blocks-3-halves", synth_blocks(b->ctx, 3, SYNTH_HALVES), &all, 0);
    run_graph(b, "blocks-2-layers", synth_blocks(b->ctx, 2, SYNTH_HALVES | SYNTH_LAYERS), &all, 0);
    run_graph(b, "transformer-3", synth_transformer(b->ctx, 3), &whole, 0);
    for (i = 6; i <= 16; i += i < 12 ? 2 : 4) {
        snprintf(name, sizeof name, "sequence-%u", i);
        run_graph(b, name, synth_sequence(b->ctx, i, 0), &all, 0);
        snprintf(name, sizeof name, "sequence-%u-unequal", i);
        run_graph(b, name, synth_sequence(b->ctx, i, SYNTH_UNEQUAL), &all, 0);
        snprintf(name, sizeof name, "sequence-%u-in-place", i);
        run_graph(b, name, synth_sequence(b->ctx, i, SYNTH_UNEQUAL | SYNTH_IN_PLACE), &all, 0);
    }
    for (i = 3; i <= 6; i++) {
        snprintf(name, sizeof name, "tied-%u", i);
        run_graph(b, name, synth_tied(b->ctx, i), &all, 0);
    }
    run_graph(b, "shared", synth_shared(b->ctx), &all, 0);
}

/* Graphs made from random bytes, as one row. */
static void run_random(bench *b, uint32_t count)
{
    msc_decide_options options = msc_decide_options_default();
    static tally t;
    uint64_t sets = b->sets;
    uint32_t before = b->all.count;
    uint32_t state = 1;
    uint32_t good = 0;
    uint64_t most_sets = b->most_sets;

    options.rates.intercept_ns = 100; /* so that these small operations are worth keeping */
    options.rates.launch_ns = 1000;
    options.rates.recompute_ns = 2000;
    b->least_sets = 16; /* below there is little to choose */
    b->most_sets = most_sets / 40;
    t.refusals = b->all.refusals;
    while (good < count) {
        uint8_t bytes[700];
        size_t i;
        for (i = 0; i < sizeof bytes; i++) {
            state = state * 1664525u + 1013904223u;
            bytes[i] = (uint8_t)(state >> 16);
        }
        good += (uint32_t)run_graph(b, "", synth_bytes(b->ctx, bytes, sizeof bytes), &options, 1);
    }
    b->most_sets = most_sets;
    t.count = b->all.count - before;
    t.refusals = b->all.refusals - t.refusals;
    memcpy(t.step_ppm, b->all.step_ppm + before, t.count * sizeof *t.step_ppm);
    memcpy(t.added_ppm, b->all.added_ppm + before, t.count * sizeof *t.added_ppm);
    memcpy(t.bound_ppm, b->all.bound_ppm + before, t.count * sizeof *t.bound_ppm);
    print(b, "random-graphs", 0, b->sets - sets, &t);
}

int main(int argc, char **argv)
{
    static bench b;
    int i;

    b.least_sets = 2;
    b.most_sets = 2000000;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--csv") == 0)
            b.csv = 1;
        else
            b.most_sets = (uint64_t)(1e6 * strtod(argv[i], NULL));
    }
    must(msc_context_create(NULL, &b.ctx, NULL) == MSC_OK, "no memory");
    run_shapes(&b);
    run_random(&b, 200);
    print(&b, "all", 0, b.sets, &b.all);
    msc_context_destroy(b.ctx);
    return 0;
}
