/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decision against brute force (brute.h): "cannot fit" is said exactly when no combination fits, and what is
 * chosen takes at most 2 % longer than the best in the median and 5 % at worst. bench/c/bench_optimal.c does
 * the same on larger graphs.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "figures.h"
#include "synth.h"

#define BUDGETS 13u
#define MOST_SETS 30000u

static msc_decide_options all_ways(void)
{
    return msc_decide_options_default();
}

static msc_decide_options whole_modules(void)
{
    msc_decide_options options = msc_decide_options_default();

    options.allow_selective = 0;
    return options;
}

/* Over a link that takes about as long for a tensor as the operations that make it do. */
static msc_decide_options offloads(uint64_t bytes_per_us)
{
    msc_decide_options options = msc_decide_options_default();

    options.allow_offload = 1;
    options.link.out_bytes_per_us = bytes_per_us;
    options.link.in_bytes_per_us = bytes_per_us;
    options.link.least_bytes = 4096;
    options.link.window_out_bytes = (uint64_t)1 << 20;
    options.link.window_in_bytes = (uint64_t)1 << 20;
    return options;
}

/* One budget below the smallest peak, the others from there to the plain one. */
static void fill_budgets(brute_best *best, const msc_plan_summary *s)
{
    uint64_t range = s->plain_peak_bytes - s->smallest_peak_bytes;
    uint32_t i;

    best[0].budget_bytes = s->smallest_peak_bytes > 0 ? s->smallest_peak_bytes - 1 : 0;
    for (i = 1; i < BUDGETS; i++)
        best[i].budget_bytes = s->smallest_peak_bytes + range * (i - 1) / (BUDGETS - 2);
}

/* Looks at all sets, and at all budgets. */
static void check_solved(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                         brute *b, figures *f)
{
    msc_plan_summary s = figures_decide(ctx, graph, options, UINT64_MAX);
    brute_best best[BUDGETS];
    uint32_t i;

    fill_budgets(best, &s);
    brute_solve(b, best, BUDGETS);
    assert_true(b->smallest_bytes == s.smallest_peak_bytes);
    for (i = 0; i < BUDGETS; i++) {
        s = figures_decide(ctx, graph, options, best[i].budget_bytes);
        assert_int_equal(s.fits, best[i].added_ns != INT64_MAX);
        if (!s.fits)
            continue;
        figures_enter(f, s.step_ns, s.plain_step_ns + best[i].added_ns);
        assert_true(f->ppm[f->count - 1] <= s.time_bound_ppm);
    }
}

/* False when there are too few or too many combinations to look at. Ends the graph. */
static bool check_graph(msc_context *ctx, msc_graph *graph, const msc_decide_options *options, uint64_t least,
                        figures *f)
{
    static brute b;
    uint64_t sets;
    bool good;

    assert_non_null(graph);
    assert_true(brute_init(&b, ctx, graph, options));
    sets = brute_count(&b, MOST_SETS + 1);
    good = sets >= least && sets <= MOST_SETS;
    if (good) {
        check_solved(ctx, graph, options, &b, f);
        f->graphs++;
    }
    brute_fini(&b);
    msc_graph_destroy(graph);
    return good;
}

static void shaped(void **state)
{
    const msc_decide_options all = all_ways();
    const msc_decide_options whole = whole_modules();
    static figures f;
    msc_context *ctx = figures_start();
    uint32_t i;

    (void)state;
    for (i = 1; i <= 3; i++)
        assert_true(check_graph(ctx, synth_unequal(ctx, 8, i), &all, 1000, &f));
    assert_true(check_graph(ctx, synth_unequal(ctx, 12, 1), &whole, 4096, &f));
    assert_true(check_graph(ctx, synth_chain(ctx), &all, 1000, &f));
    assert_true(check_graph(ctx, synth_blocks(ctx, 12, 0), &whole, 4096, &f));
    assert_true(check_graph(ctx, synth_blocks(ctx, 4, SYNTH_HALVES), &whole, 600, &f));
    assert_true(check_graph(ctx, synth_blocks(ctx, 3, SYNTH_HALVES), &all, 20000, &f));
    assert_true(check_graph(ctx, synth_blocks(ctx, 5, 0), &all, 7000, &f));
    assert_true(check_graph(ctx, synth_blocks(ctx, 2, SYNTH_HALVES | SYNTH_LAYERS), &all, 1000, &f));
    assert_true(check_graph(ctx, synth_transformer(ctx, 2), &all, 10000, &f));
    figures_check(&f);
    figures_stop(ctx);
}

static void chains(void **state)
{
    const msc_decide_options all = all_ways();
    static figures f;
    msc_context *ctx = figures_start();
    uint32_t count;
    uint32_t kind;

    (void)state;
    for (count = 4; count <= 12; count += 2)
        for (kind = 0; kind < 4; kind++)
            assert_true(check_graph(ctx, synth_sequence(ctx, count, kind), &all, 4, &f));
    figures_check(&f);
    figures_stop(ctx);
}

/* Modules that are called from several places: what is done with one is done with all its calls. */
/* Links from one that hides nearly all to one over which nothing pays, one that holds little, and one with staging. */
static void offloaded(void **state)
{
    static const uint64_t rates[] = {100000, 5000, 1000, 100};
    static figures f;
    msc_context *ctx = figures_start();
    size_t i;

    (void)state;
    for (i = 0; i < sizeof rates / sizeof rates[0] + 3; i++) {
        const size_t last = sizeof rates / sizeof rates[0] - 1;
        msc_decide_options options = offloads(rates[i < last ? i : i == last + 3 ? 0 : last]);
        if (i == last + 3)
            options.link.staging_bytes = (uint64_t)1 << 20;
        else if (i > last)
            options.link.limit_bytes = (uint64_t)(i - last) << 24;
        assert_true(check_graph(ctx, synth_blocks(ctx, 3, 0), &options, 100, &f));
        options.allow_selective = 0;
        assert_true(check_graph(ctx, synth_unequal(ctx, 6, 1), &options, 500, &f));
        assert_true(check_graph(ctx, synth_sequence(ctx, 8, SYNTH_UNEQUAL), &options, 20, &f));
        assert_true(check_graph(ctx, synth_tied(ctx, 4), &options, 20, &f));
        assert_true(check_graph(ctx, synth_blocks(ctx, 2, SYNTH_HALVES), &options, 100, &f));
        assert_true(check_graph(ctx, synth_transformer(ctx, 1), &options, 100, &f));
    }
    figures_check(&f);
    figures_stop(ctx);
}

static void shared(void **state)
{
    const msc_decide_options all = all_ways();
    static figures f;
    msc_context *ctx = figures_start();
    uint32_t rounds;

    (void)state;
    assert_true(check_graph(ctx, synth_shared(ctx), &all, 5, &f));
    for (rounds = 2; rounds <= 6; rounds++)
        assert_true(check_graph(ctx, synth_tied(ctx, rounds), &all, 40, &f));
    figures_check(&f);
    figures_stop(ctx);
}

static void check_random_graphs(const msc_decide_options *options, uint32_t wanted)
{
    static figures f;
    msc_context *ctx = figures_start();
    uint32_t random = 77;
    uint32_t good = 0;

    memset(&f, 0, sizeof f);
    while (good < wanted) {
        uint8_t bytes[700];
        size_t i;
        for (i = 0; i < sizeof bytes; i++) {
            random = random * 1664525u + 1013904223u;
            bytes[i] = (uint8_t)(random >> 16);
        }
        good += check_graph(ctx, synth_bytes(ctx, bytes, sizeof bytes), options, 16, &f);
    }
    figures_check(&f);
    figures_stop(ctx);
}

static void random_graphs(void **state)
{
    const msc_decide_options options = figures_small_costs(MSC_SIM_HOST);

    (void)state;
    check_random_graphs(&options, 150);
}

static void random_offloads(void **state)
{
    msc_decide_options options = figures_small_costs(MSC_SIM_HOST);

    (void)state;
    options.allow_offload = 1;
    options.link.least_bytes = 1;
    options.link.offload_ns = 100;
    options.link.out_bytes_per_us = 2000;
    options.link.in_bytes_per_us = 3000;
    options.link.window_out_bytes = 2000;
    options.link.window_in_bytes = 2000;
    check_random_graphs(&options, 80);
    options.link.staging_bytes = 300;
    check_random_graphs(&options, 80);
    options.rerun_bytes = 200;
    check_random_graphs(&options, 80);
}

/* ---- is brute force right? -------------------------------------------------------------------------- */

/* Every 97th peak is replayed. */
static void replay_some(brute *b, uint64_t peak_bytes, void *state)
{
    if (b->sets % 97 == 0)
        assert_true(figures_replay(b, state) == peak_bytes);
}

static void peaks_are_replayed(void **state)
{
    const msc_sim_options sim_options = msc_sim_options_default(MSC_SIM_HOST);
    msc_context *ctx = figures_start();
    msc_graph *graphs[] = {synth_sequence(ctx, 12, SYNTH_UNEQUAL), NULL, NULL, NULL, NULL};
    static brute b;
    msc_sim *sim;
    size_t i;

    (void)state;
    graphs[1] = synth_blocks(ctx, 3, SYNTH_HALVES);
    graphs[2] = synth_tied(ctx, 5);
    graphs[3] = synth_transformer(ctx, 2);
    graphs[4] = synth_unequal(ctx, 6, 1);
    assert_int_equal(msc_sim_create(ctx, &sim_options, &sim, NULL), MSC_OK);
    for (i = 0; i < sizeof graphs / sizeof graphs[0]; i++) {
        brute_best best = {.budget_bytes = UINT64_MAX};
        msc_decide_options options = i < 4 ? all_ways() : offloads(5000);
        options.link.staging_bytes = i < 4 ? 0 : (uint64_t)1 << 16;
        options.rerun_bytes = i % 2 == 0 ? 0 : (uint64_t)1 << 17;
        assert_non_null(graphs[i]);
        assert_true(brute_init(&b, ctx, graphs[i], &options));
        b.watch = replay_some;
        b.watch_state = sim;
        brute_solve(&b, &best, 1);
        assert_true(b.sets == brute_count(&b, UINT64_MAX) && b.sets > 1000);
        assert_int_equal(best.added_ns, 0); /* the plain step */
        brute_fini(&b);
        msc_graph_destroy(graphs[i]);
    }
    msc_sim_destroy(sim);
    figures_stop(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"optimal/brute-force-is-replayed", peaks_are_replayed, NULL, NULL, NULL},
        {"optimal/shaped-graphs", shaped, NULL, NULL, NULL},
        {"optimal/chains", chains, NULL, NULL, NULL},
        {"optimal/shared-modules", shared, NULL, NULL, NULL},
        {"optimal/random-graphs", random_graphs, NULL, NULL, NULL},
        {"optimal/offloads", offloaded, NULL, NULL, NULL},
        {"optimal/offloads-of-random-graphs", random_offloads, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
