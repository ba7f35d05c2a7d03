/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decision under budgets of reserved bytes, against brute force (brute.h) with a replay of every
 * combination: "cannot fit" is said exactly when no combination fits, the smallest peak is the smallest
 * there is, and what is chosen takes at most 2 % longer than the best in the median and 5 % at worst. Where
 * there are too many combinations for the decision to list, what it finds is compared all the same, with
 * more room.
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

#define BUDGETS 6u
#define MOST_SETS 30000u
#define MOST_REPLAYED 60000u

static msc_decide_options on_card(void)
{
    msc_decide_options options = msc_decide_options_default();

    options.sim = msc_sim_options_default(MSC_SIM_CUDA);
    return options;
}

static msc_decide_options whole_modules(void)
{
    msc_decide_options options = on_card();

    options.allow_selective = 0;
    return options;
}

/* ---- every combination, replayed --------------------------------------------------------------------- */

typedef struct replayed {
    msc_sim *sim;
    uint64_t peak_bytes[MOST_REPLAYED];
    int64_t added_ns[MOST_REPLAYED];
    uint32_t count;
    uint64_t least_bytes;
} replayed;

static void replay(brute *b, uint64_t allocated_bytes, void *state)
{
    replayed *r = state;
    uint64_t peak_bytes = figures_replay(b, r->sim);
    uint32_t i;

    assert_true(peak_bytes >= allocated_bytes); /* what the decision leaves out by */
    assert_in_range(r->count, 0, MOST_REPLAYED - 1);
    r->peak_bytes[r->count] = peak_bytes;
    r->added_ns[r->count] = 0;
    for (i = 0; i < b->model.candidate_count; i++)
        if (msc__set_has(b->set, i))
            r->added_ns[r->count] += b->model.candidates[i].cost_ns;
    r->least_bytes = peak_bytes < r->least_bytes ? peak_bytes : r->least_bytes;
    r->count++;
}

static void replay_all(brute *b, replayed *r, const msc_sim_options *options)
{
    msc_sim_options unlimited = *options;
    brute_best any = {.budget_bytes = UINT64_MAX};

    unlimited.capacity_bytes = UINT64_MAX;
    assert_int_equal(msc_sim_create(b->ctx, &unlimited, &r->sim, NULL), MSC_OK);
    r->count = 0;
    r->least_bytes = UINT64_MAX;
    b->watch = replay;
    b->watch_state = r;
    brute_solve(b, &any, 1);
    msc_sim_destroy(r->sim);
}

/* Least added time of what is within a budget; INT64_MAX: nothing is. */
static int64_t best_ns(const replayed *r, uint64_t budget_bytes)
{
    int64_t best = INT64_MAX;
    uint32_t i;

    for (i = 0; i < r->count; i++)
        if (r->peak_bytes[i] <= budget_bytes && r->added_ns[i] < best)
            best = r->added_ns[i];
    return best;
}

/* Budgets from the plain peak down to just below the least: peaks never rise, times never fall, and brute
 * force finds nothing better. */
static void check_budgets(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                          const replayed *r, figures *f)
{
    msc_plan_summary before = figures_decide(ctx, graph, options, UINT64_MAX);
    uint64_t range = before.plain_peak_bytes - r->least_bytes;
    uint32_t i;

    assert_true(before.smallest_peak_bytes == r->least_bytes);
    for (i = 0; i <= BUDGETS; i++) {
        uint64_t budget =
            i == BUDGETS ? r->least_bytes - 1 : r->least_bytes + range / (BUDGETS - 1) * (BUDGETS - 1 - i);
        msc_plan_summary s = figures_decide(ctx, graph, options, budget);
        int64_t best = best_ns(r, budget);
        assert_int_equal(s.fits, best != INT64_MAX);
        assert_true(s.smallest_peak_bytes == r->least_bytes);
        assert_true(s.peak_bytes <= (s.fits ? budget : r->least_bytes));
        assert_true(s.peak_bytes <= before.peak_bytes && s.step_ns >= before.step_ns);
        if (s.fits)
            figures_enter(f, s.step_ns, s.plain_step_ns + best);
        before = s;
    }
}

/* False when there are too few or too many combinations to look at. Ends the graph. */
static bool check_graph(msc_context *ctx, msc_graph *graph, const msc_decide_options *options, uint64_t least,
                        figures *f)
{
    static brute b;
    static replayed r;
    uint64_t sets;
    bool good;

    assert_non_null(graph);
    assert_true(brute_init(&b, ctx, graph, options));
    sets = brute_count(&b, MOST_SETS + 1);
    good = sets >= least && sets <= MOST_SETS;
    if (good) {
        replay_all(&b, &r, &options->sim);
        check_budgets(ctx, graph, options, &r, f);
        f->graphs++;
    }
    brute_fini(&b);
    msc_graph_destroy(graph);
    return good;
}

/* ---- cases ------------------------------------------------------------------------------------------- */

static void blocks(void **state)
{
    const msc_decide_options all = on_card();
    const msc_decide_options whole = whole_modules();
    static figures f;
    msc_context *ctx = figures_start();

    (void)state;
    assert_true(check_graph(ctx, synth_blocks(ctx, 4, 0), &all, 1000, &f));
    assert_true(check_graph(ctx, synth_blocks(ctx, 5, 0), &all, 7000, &f));
    assert_true(check_graph(ctx, synth_blocks(ctx, 2, SYNTH_HALVES | SYNTH_LAYERS), &all, 1000, &f));
    assert_true(check_graph(ctx, synth_blocks(ctx, 4, SYNTH_HALVES), &whole, 600, &f));
    assert_true(check_graph(ctx, synth_blocks(ctx, 12, 0), &whole, 4096, &f));
    figures_check(&f);
    figures_stop(ctx);
}

static void unequal(void **state)
{
    const msc_decide_options all = on_card();
    const msc_decide_options whole = whole_modules();
    static figures f;
    msc_context *ctx = figures_start();
    uint32_t seed;

    (void)state;
    assert_true(check_graph(ctx, synth_unequal(ctx, 7, 2), &all, 2000, &f));
    assert_true(check_graph(ctx, synth_unequal(ctx, 8, 3), &all, 6000, &f));
    assert_true(check_graph(ctx, synth_unequal(ctx, 12, 1), &whole, 4096, &f));
    assert_true(check_graph(ctx, synth_chain(ctx), &all, 1000, &f));
    for (seed = 1; seed <= 3; seed++) {
        assert_true(check_graph(ctx, synth_unequal(ctx, 6, seed), &all, 700, &f));
        assert_true(check_graph(ctx, synth_unequal(ctx, 10, seed), &whole, 1024, &f));
    }
    figures_check(&f);
    figures_stop(ctx);
}

static void chains(void **state)
{
    const msc_decide_options all = on_card();
    static figures f;
    msc_context *ctx = figures_start();
    uint32_t count;
    uint32_t kind;

    (void)state;
    assert_true(check_graph(ctx, synth_sequence(ctx, 12, SYNTH_UNEQUAL), &all, 9000, &f));
    for (count = 4; count <= 10; count += 2)
        for (kind = 0; kind < 4; kind++)
            assert_true(check_graph(ctx, synth_sequence(ctx, count, kind), &all, 4, &f));
    for (count = 3; count <= 5; count++)
        assert_true(check_graph(ctx, synth_tied(ctx, count), &all, 40, &f));
    figures_check(&f);
    figures_stop(ctx);
}

static void random_graphs(void **state)
{
    msc_decide_options options = figures_small_costs(MSC_SIM_CUDA);
    static figures f;
    msc_context *ctx = figures_start();
    uint32_t random = 78;
    uint32_t tries;

    (void)state;
    for (tries = 0; f.graphs < 30; tries++) {
        uint8_t bytes[700];
        size_t i;
        options.rerun_bytes = tries % 2 == 0 ? 0 : (uint64_t)1 << 20;
        for (i = 0; i < sizeof bytes; i++) {
            random = random * 1664525u + 1013904223u;
            bytes[i] = (uint8_t)(random >> 16);
        }
        (void)check_graph(ctx, synth_bytes(ctx, bytes, sizeof bytes), &options, tries % 4 == 0 ? 100 : 8, &f);
    }
    figures_check(&f);
    figures_stop(ctx);
}

/* Other ways for the allocator to take memory. */
static void allocators(void **state)
{
    msc_decide_options options = on_card();
    static figures f;
    msc_context *ctx = figures_start();

    (void)state;
    options.sim.expandable_segments = 1;
    assert_true(check_graph(ctx, synth_unequal(ctx, 6, 3), &options, 700, &f));
    assert_true(check_graph(ctx, synth_blocks(ctx, 4, 0), &options, 1000, &f));
    options.sim.large_segment_bytes = (uint64_t)31 << 20;
    assert_true(check_graph(ctx, synth_unequal(ctx, 6, 4), &options, 700, &f));
    options.sim.expandable_segments = 0;
    assert_true(check_graph(ctx, synth_unequal(ctx, 6, 5), &options, 700, &f));
    options.sim.max_split_bytes = (uint64_t)40 << 20;
    assert_true(check_graph(ctx, synth_blocks(ctx, 4, 0), &options, 1000, &f));
    figures_check(&f);
    figures_stop(ctx);
}

/* More combinations than are listed: the smallest peak need not be found, but nearly, and what is chosen above
 * it is good. */
static void many(void **state)
{
    const msc_decide_options options = on_card();
    static brute b;
    static replayed r;
    static figures f;
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_unequal(ctx, 10, 1);
    msc_plan_summary s = figures_decide(ctx, graph, &options, UINT64_MAX);
    uint64_t least = s.smallest_peak_bytes;
    uint64_t range = s.plain_peak_bytes - least;
    uint32_t i;

    (void)state;
    assert_true(brute_init(&b, ctx, graph, &options));
    assert_true(brute_count(&b, MOST_REPLAYED) > 1u << 15);
    replay_all(&b, &r, &options.sim);
    assert_in_range(least, r.least_bytes, r.least_bytes + r.least_bytes / 12);
    for (i = 0; i < BUDGETS; i++) {
        uint64_t budget = least + range / (BUDGETS - 1) * i;
        s = figures_decide(ctx, graph, &options, budget);
        assert_true(s.fits && s.peak_bytes <= budget && s.smallest_peak_bytes == least);
        figures_enter(&f, s.step_ns, s.plain_step_ns + best_ns(&r, budget));
    }
    assert_int_equal(figures_decide(ctx, graph, &options, least - 1).fits, 0);
    brute_fini(&b);
    msc_graph_destroy(graph);
    f.graphs++;
    figures_check(&f);
    figures_stop(ctx);
}

/* Nothing but the plain step, and that is known exactly. */
static void not_allowed(void **state)
{
    msc_decide_options options = on_card();
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_blocks(ctx, 4, 0);
    msc_plan_summary s;

    (void)state;
    options.allow_checkpoint = 0;
    s = figures_decide(ctx, graph, &options, UINT64_MAX);
    assert_true(s.fits && s.smallest_peak_bytes == s.plain_peak_bytes && s.step_ns == s.plain_step_ns);
    s = figures_decide(ctx, graph, &options, s.plain_peak_bytes - 1);
    assert_true(!s.fits && s.peak_bytes == s.plain_peak_bytes && s.step_ns == s.plain_step_ns);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"reserved/blocks", blocks, NULL, NULL, NULL},
        {"reserved/unequal", unequal, NULL, NULL, NULL},
        {"reserved/chains-and-shared", chains, NULL, NULL, NULL},
        {"reserved/random-graphs", random_graphs, NULL, NULL, NULL},
        {"reserved/allocators", allocators, NULL, NULL, NULL},
        {"reserved/too-many-to-list", many, NULL, NULL, NULL},
        {"reserved/not-allowed", not_allowed, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
