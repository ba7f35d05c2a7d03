/* SPDX-License-Identifier: Apache-2.0 */
/* The fit gives the replayed peak, to the byte, for any set and after any history; and the bound holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "decide/decide_plan.h"
#include "decide/decide_search.h"
#include "synth.h"

static uint32_t random_state = 7;

static uint32_t random_u32(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

typedef struct fixture {
    msc_context *ctx;
    msc_sim *sim;
    msc_graph *graph;
    msc__model model;
    msc__fit fit;
    uint64_t set[16];
    uint32_t selective; /* flips of candidates that keep something */
    uint32_t runs;      /* and of runs of siblings */
    uint32_t offloads;  /* and of offloads */
    uint32_t boundaries;
    uint8_t allow_offload;
} fixture;

static void start(fixture *f)
{
    const msc_sim_options options = msc_sim_options_default(MSC_SIM_HOST);

    memset(f, 0, sizeof *f);
    assert_int_equal(msc_context_create(NULL, &f->ctx, NULL), MSC_OK);
    assert_int_equal(msc_sim_create(f->ctx, &options, &f->sim, NULL), MSC_OK);
}

static void load(fixture *f, msc_graph *graph)
{
    msc_decide_options options = msc_decide_options_default();

    /* Fixed costs that leave it worth while to keep something in tiny graphs. */
    options.rates.launch_ns = 1000;
    options.rates.recompute_ns = 2000;
    options.rates.intercept_ns = 100;
    options.allow_offload = f->allow_offload;
    options.link.offload_ns = 500;
    options.link.least_bytes = 1;
    options.link.window_out_bytes = random_u32() % 3 * 3000;
    options.link.window_in_bytes = random_u32() % 3 * 3000;
    assert_non_null(graph);
    f->graph = graph;
    memset(f->set, 0, sizeof f->set);
    assert_int_equal(msc__model_init(&f->model, f->ctx, graph, &options, NULL), MSC_OK);
    assert_int_equal(msc__fit_init(&f->fit, &f->model, NULL), MSC_OK);
    assert_in_range(f->model.candidate_count, 0, 1024);
}

static void unload(fixture *f)
{
    msc__fit_fini(&f->fit);
    msc__model_fini(&f->model);
    msc_graph_destroy(f->graph);
}

static void stop(fixture *f)
{
    msc_sim_destroy(f->sim);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
}

static bool overlaps(const fixture *f, const msc__buckets *lists, uint32_t candidate)
{
    uint32_t i;

    for (i = lists->first[candidate]; i < lists->first[candidate + 1]; i++)
        if (msc__set_has(f->set, lists->items[i]))
            return true;
    return false;
}

/* Puts a candidate in or out; false when it overlaps one that is in. */
static bool flip(fixture *f, uint32_t candidate)
{
    bool active = msc__set_has(f->set, candidate);

    if (!active && (overlaps(f, &f->model.above, candidate) || overlaps(f, &f->model.below, candidate)))
        return false;
    msc__fit_set(&f->fit, candidate, !active);
    f->set[candidate / 64] ^= (uint64_t)1 << candidate % 64;
    f->selective += f->model.candidates[candidate].kept_count > 0;
    f->runs += f->model.candidates[candidate].is_run;
    f->offloads += f->model.candidates[candidate].offload;
    f->boundaries += f->model.candidates[candidate].boundary;
    return true;
}

static uint64_t replayed_peak(fixture *f)
{
    msc_plan *plan = NULL;
    msc_trace *trace;
    msc_replay replay;

    assert_int_equal(msc__plan_of_set(&f->model, f->set, &plan, NULL), MSC_OK);
    assert_int_equal(msc_trace_create(f->ctx, f->graph, plan, &trace, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(trace, f->sim, NULL, 0, &replay, NULL), MSC_OK);
    assert_true(replay.away_peak_bytes == msc__fit_away(&f->fit));
    assert_true(replay.moved_bytes == f->fit.moved_bytes);
    msc_trace_destroy(trace);
    msc_plan_destroy(plan);
    return replay.peak_bytes;
}

static uint32_t walk(fixture *f, uint32_t steps)
{
    uint32_t flips = 0;
    uint32_t i;

    assert_true(msc__fit_peak(&f->fit) == replayed_peak(f));
    assert_true(f->fit.plain_peak_bytes == msc__fit_peak(&f->fit));
    for (i = 0; i < steps && f->model.candidate_count > 0; i++) {
        if (!flip(f, random_u32() % f->model.candidate_count))
            continue;
        flips++;
        assert_true(msc__fit_peak(&f->fit) == replayed_peak(f));
    }
    return flips;
}

static void walk_random_graphs(fixture *f)
{
    uint32_t flips = 0;
    uint32_t round;

    for (round = 0; round < 500; round++) {
        uint8_t bytes[600];
        size_t i;
        for (i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)random_u32();
        load(f, synth_bytes(f->ctx, bytes, 100 + round));
        flips += walk(f, f->allow_offload ? 25 : 10);
        unload(f);
    }
    assert_true(flips > 2000); /* the graphs do have candidates, of all sorts */
    assert_true(f->selective > flips / 5);
    assert_true(f->runs > flips / 20);
}

static void random_graphs(void **state)
{
    fixture f;

    (void)state;
    start(&f);
    walk_random_graphs(&f);
    assert_int_equal(f.offloads + f.boundaries, 0);
    f.allow_offload = 1;
    walk_random_graphs(&f);
    assert_true(f.offloads > 500);
    assert_true(f.boundaries > 30);
    stop(&f);
}

static void shaped_graphs(void **state)
{
    fixture f;

    (void)state;
    start(&f);
    load(&f, synth_transformer(f.ctx, 3));
    assert_true(walk(&f, 600) > 50);
    unload(&f);
    load(&f, synth_shared(f.ctx));
    assert_true(walk(&f, 40) > 10);
    unload(&f);
    load(&f, synth_chain(f.ctx));
    assert_true(walk(&f, 60) > 10);
    unload(&f);
    f.allow_offload = 1;
    load(&f, synth_transformer(f.ctx, 3));
    assert_true(walk(&f, 600) > 50);
    unload(&f);
    load(&f, synth_tied(f.ctx, 4));
    assert_true(walk(&f, 200) > 20);
    unload(&f);
    load(&f, synth_sequence(f.ctx, 12, SYNTH_IN_PLACE));
    assert_true(walk(&f, 200) > 20);
    unload(&f);
    assert_true(f.offloads > 20 && f.boundaries > 20);
    stop(&f);
}

/* Taking everything out again leaves no trace. */
static void empty_again(void **state)
{
    fixture f;
    uint32_t c;
    uint32_t i;

    (void)state;
    start(&f);
    load(&f, synth_transformer(f.ctx, 3));
    walk(&f, 50);
    for (c = 0; c < f.model.candidate_count; c++)
        if (msc__set_has(f.set, c))
            flip(&f, c);
    assert_true(msc__fit_peak(&f.fit) == f.fit.plain_peak_bytes);
    for (i = 0; i < f.fit.segment_count; i++)
        assert_true(f.fit.delta_bytes[i] == 0);
    unload(&f);
    stop(&f);
}

/* Every set whose peak is within a budget adds at least the bound, whatever the budget. */
static void check_bound(fixture *f, uint32_t steps)
{
    int64_t added_ns = 0;
    uint32_t i;

    for (i = 0; i < steps && f->model.candidate_count > 0; i++) {
        uint32_t c = random_u32() % f->model.candidate_count;
        int64_t sign = msc__set_has(f->set, c) ? -1 : 1;
        int64_t bound_ns;
        if (!flip(f, c))
            continue;
        added_ns += sign * f->model.candidates[c].cost_ns;
        assert_int_equal(msc__bound_added_ns(&f->model, &f->fit, msc__fit_peak(&f->fit), &bound_ns, NULL),
                         MSC_OK);
        assert_true(bound_ns <= added_ns);
    }
}

static void bound(void **state)
{
    uint32_t round;
    fixture f;

    (void)state;
    start(&f);
    load(&f, synth_transformer(f.ctx, 4));
    check_bound(&f, 300);
    unload(&f);
    f.allow_offload = 1;
    load(&f, synth_transformer(f.ctx, 4));
    check_bound(&f, 300);
    unload(&f);
    for (round = 0; round < 500; round++) {
        uint8_t bytes[600];
        f.allow_offload = round % 2 != 0;
        size_t i;
        for (i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)random_u32();
        load(&f, synth_bytes(f.ctx, bytes, sizeof bytes));
        check_bound(&f, 12);
        unload(&f);
    }
    stop(&f);
}

static void bound_ppm(void **state)
{
    (void)state;
    assert_int_equal(msc__bound_ppm(100, 100), 0);
    assert_int_equal(msc__bound_ppm(99, 100), 0);
    assert_int_equal(msc__bound_ppm(101, 100), 10000);
    assert_int_equal(msc__bound_ppm(1000001, 1000000), 1);
    assert_int_equal(msc__bound_ppm(3000001, 3000000), 1); /* rounded up */
    assert_int_equal(msc__bound_ppm(INT64_MAX, 1), UINT32_MAX);
    assert_in_range(msc__bound_ppm((int64_t)3 << 60, (int64_t)2 << 60), 500000, 500001);
    assert_int_equal(msc__bound_ppm(10, 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"fit/equals-replay-on-random-graphs", random_graphs, NULL, NULL, NULL},
        {"fit/equals-replay-on-shaped-graphs", shaped_graphs, NULL, NULL, NULL},
        {"fit/empty-again", empty_again, NULL, NULL, NULL},
        {"bound/never-above-any-set", bound, NULL, NULL, NULL},
        {"bound/ppm", bound_ppm, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
