/* SPDX-License-Identifier: Apache-2.0 */
/* Replay: where the peak is, what it is made of, and what happens at the limit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "memscale/memscale.h"

typedef struct fixture {
    msc_context *ctx;
    msc_graph *graph;
    msc_trace *trace;
    msc_sim *sim;
} fixture;

/* Parameter 1000; op 0 makes 100; op 1 makes 50 with scratch 500; op 2 makes 200; 100 and 50 end before. */
static void start(fixture *f, msc_sim_kind kind, uint64_t capacity_bytes)
{
    const msc_op ops[] = {{.scratch_bytes = 0}, {.scratch_bytes = 500}, {.scratch_bytes = 0}};
    const uint64_t sizes[] = {100, 50, 200};
    msc_sim_options options = msc_sim_options_default(kind);
    uint32_t i;

    options.capacity_bytes = capacity_bytes;
    assert_int_equal(msc_context_create(NULL, &f->ctx, NULL), MSC_OK);
    assert_int_equal(msc_sim_create(f->ctx, &options, &f->sim, NULL), MSC_OK);
    assert_int_equal(msc_graph_create(f->ctx, &f->graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_resident(f->graph, 1000, MSC_CATEGORY_PARAMETER, NULL, NULL), MSC_OK);
    for (i = 0; i < 3; i++) {
        assert_int_equal(msc_graph_add_op(f->graph, "op", &ops[i], NULL, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_buffer(f->graph, sizes[i], MSC_CATEGORY_ACTIVATION, NULL, NULL),
                         MSC_OK);
    }
    assert_int_equal(msc_graph_end_buffer(f->graph, 1, NULL), MSC_OK);
    assert_int_equal(msc_graph_finish(f->graph, NULL), MSC_OK);
    assert_int_equal(msc_trace_create(f->ctx, f->graph, NULL, &f->trace, NULL), MSC_OK);
}

static void stop(fixture *f)
{
    msc_trace_destroy(f->trace);
    msc_graph_destroy(f->graph);
    msc_sim_destroy(f->sim);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
}

static void peak(void **state)
{
    fixture f;
    msc_replay replay;

    (void)state;
    start(&f, MSC_SIM_HOST, UINT64_MAX);
    assert_int_equal(msc_trace_replay(f.trace, f.sim, NULL, 0, &replay, NULL), MSC_OK);
    assert_int_equal(replay.peak_bytes, 1650);
    assert_int_equal(replay.peak_op, 1);
    assert_int_equal(replay.peak_in_recompute, 0);
    assert_int_equal(msc_trace_events(f.trace)[replay.peak_event].size_bytes, 500);
    assert_int_equal(replay.category_peak_bytes[MSC_CATEGORY_PARAMETER], 1000);
    assert_int_equal(replay.category_peak_bytes[MSC_CATEGORY_ACTIVATION], 150);
    assert_int_equal(replay.category_peak_bytes[MSC_CATEGORY_TEMPORARY], 500);
    assert_int_equal(replay.stats.allocated_now_bytes, 1250);
    stop(&f);
}

static void live(void **state)
{
    const uint64_t expected[] = {1100, 1650, 1350};
    uint64_t values[4] = {9, 9, 9, 9};
    fixture f;
    msc_replay replay;

    (void)state;
    start(&f, MSC_SIM_HOST, UINT64_MAX);
    assert_int_equal(msc_trace_op_event_count(f.trace), 3);
    assert_int_equal(msc_trace_replay(f.trace, f.sim, values, 3, &replay, NULL), MSC_OK);
    assert_memory_equal(values, expected, sizeof expected);
    assert_int_equal(values[3], 9);
    values[1] = 9;
    assert_int_equal(msc_trace_replay(f.trace, f.sim, values, 1, &replay, NULL), MSC_OK);
    assert_int_equal(values[0], 1100);
    assert_int_equal(values[1], 9);
    stop(&f);
}

/* Callers that know less of the result, or more. */
static void results_of_every_size(void **state)
{
    fixture f;
    msc_replay whole;
    size_t size;

    (void)state;
    start(&f, MSC_SIM_CUDA, UINT64_MAX);
    assert_int_equal(msc_trace_replay(f.trace, f.sim, NULL, 0, &whole, NULL), MSC_OK);
    for (size = 1; size < sizeof whole + 20; size += 7) {
        char *got = malloc(size);
        size_t both = size < sizeof whole ? size : sizeof whole;

        assert_non_null(got);
        assert_int_equal(
            msc_trace_replay_into(f.trace, f.sim, NULL, 0, (msc_replay *)(void *)got, size, NULL), MSC_OK);
        assert_memory_equal(got, &whole, both);
        while (both < size && got[both] == 0)
            both++;
        assert_int_equal(both, size);
        free(got);
    }
    stop(&f);
}

static void again(void **state)
{
    fixture f;
    msc_replay first;
    msc_replay second;

    (void)state;
    start(&f, MSC_SIM_CUDA, UINT64_MAX);
    assert_int_equal(msc_trace_replay(f.trace, f.sim, NULL, 0, &first, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(f.trace, f.sim, NULL, 0, &second, NULL), MSC_OK);
    assert_memory_equal(&first, &second, sizeof first);
    assert_int_equal(first.peak_bytes, first.stats.reserved_peak_bytes);
    assert_int_equal(first.stats.allocated_peak_bytes, 1024 + 3 * 512);
    stop(&f);
}

static void capacity(void **state)
{
    fixture f;
    msc_replay replay;
    msc_error err;

    (void)state;
    start(&f, MSC_SIM_HOST, 1200);
    assert_int_equal(msc_trace_replay(f.trace, f.sim, NULL, 0, &replay, &err), MSC_EDEVMEM);
    assert_int_equal(replay.peak_op, 1);
    assert_int_equal(replay.stats.oom_count, 1);
    stop(&f);
}

static void before_the_first(void **state)
{
    fixture f;
    msc_replay replay;
    msc_trace *trace;
    msc_graph *graph;

    (void)state;
    start(&f, MSC_SIM_HOST, UINT64_MAX);
    assert_int_equal(msc_graph_create(f.ctx, &graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_resident(graph, 10, MSC_CATEGORY_PARAMETER, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(graph, "op", &(msc_op){0}, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(graph, "op", &(msc_op){0}, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_finish(graph, NULL), MSC_OK);
    assert_int_equal(msc_trace_create(f.ctx, graph, NULL, &trace, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(trace, f.sim, NULL, 0, &replay, NULL), MSC_OK);
    assert_int_equal(replay.peak_op, 2);
    assert_int_equal(replay.peak_bytes, 10);
    assert_int_equal(msc_trace_replay(NULL, f.sim, NULL, 0, &replay, NULL), MSC_EINVAL);
    msc_trace_destroy(trace);
    msc_graph_destroy(graph);
    stop(&f);
}

enum { MIB = 1 << 20 };

/* Forward makes 12 MiB and makes a workspace appear, backward ends them and makes a gradient of 3 MiB, the
 * optimizer has two states of 3 MiB and a temporary of 5. */
static msc_graph *training_step(msc_context *ctx)
{
    const msc_op op = {0};
    msc_graph *graph;

    assert_int_equal(msc_graph_create(ctx, &graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_resident(graph, 3 * MIB, MSC_CATEGORY_PARAMETER, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_resident(graph, 3 * MIB, MSC_CATEGORY_OPTIMIZER_STATE, NULL, NULL),
                     MSC_OK);
    assert_int_equal(msc_graph_add_resident(graph, 3 * MIB, MSC_CATEGORY_OPTIMIZER_STATE, NULL, NULL),
                     MSC_OK);
    assert_int_equal(msc_graph_add_op(graph, "forward", &op, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(graph, "forward", &op, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_late(graph, 8519680, MSC_CATEGORY_WORKSPACE, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(graph, 12 * MIB, MSC_CATEGORY_ACTIVATION, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_set_phase(graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(graph, "backward", &op, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(graph, 3 * MIB, MSC_CATEGORY_GRADIENT, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_buffer(graph, 4, NULL), MSC_OK);
    assert_int_equal(msc_graph_set_phase(graph, MSC_PHASE_OPTIMIZER, NULL), MSC_OK);
    assert_int_equal(msc_graph_make_late(graph, 1, NULL), MSC_OK);
    assert_int_equal(msc_graph_make_late(graph, 2, NULL), MSC_OK);
    assert_int_equal(msc_graph_make_late(graph, 4, NULL), MSC_EINVAL);
    assert_int_equal(msc_graph_add_op(graph, "optimizer", &op, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(graph, 5 * MIB, MSC_CATEGORY_TEMPORARY, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_buffer(graph, 6, NULL), MSC_OK);
    assert_int_equal(msc_graph_finish(graph, NULL), MSC_OK);
    return graph;
}

/* The same by hand. */
static void first_steps(msc_sim *sim)
{
    int step;

    assert_int_equal(msc_sim_alloc(sim, 0, 3 * MIB, 0, NULL), MSC_OK);
    for (step = 0; step < MSC_REPLAY_STEPS; step++) {
        assert_int_equal(msc_sim_alloc(sim, 4, 12 * MIB, 0, NULL), MSC_OK);
        if (step == 0)
            assert_int_equal(msc_sim_alloc(sim, 3, 8519680, 0, NULL), MSC_OK);
        assert_int_equal(msc_sim_alloc(sim, 5, 3 * MIB, 0, NULL), MSC_OK);
        assert_int_equal(msc_sim_free(sim, 4, NULL), MSC_OK);
        if (step == 0) {
            assert_int_equal(msc_sim_alloc(sim, 1, 3 * MIB, 0, NULL), MSC_OK);
            assert_int_equal(msc_sim_alloc(sim, 2, 3 * MIB, 0, NULL), MSC_OK);
        }
        assert_int_equal(msc_sim_alloc(sim, 6, 5 * MIB, 0, NULL), MSC_OK);
        assert_int_equal(msc_sim_free(sim, 6, NULL), MSC_OK);
        if (step + 1 < MSC_REPLAY_STEPS)
            assert_int_equal(msc_sim_free(sim, 5, NULL), MSC_OK);
    }
}

static void steps_of_a_run(void **state)
{
    uint64_t live_bytes[4];
    msc_sim_stats by_hand;
    msc_replay replay;
    msc_trace *trace;
    msc_graph *graph;
    fixture f;

    (void)state;
    start(&f, MSC_SIM_CUDA, UINT64_MAX);
    graph = training_step(f.ctx);
    assert_int_equal(msc_trace_create(f.ctx, graph, NULL, &trace, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(trace, f.sim, live_bytes, 4, &replay, NULL), MSC_OK);
    msc_sim_reset(f.sim);
    first_steps(f.sim);
    by_hand = msc_sim_get_stats(f.sim);
    assert_memory_equal(&replay.stats, &by_hand, sizeof by_hand);
    /* The last step is the one that is told of: everything is there from its start. */
    assert_int_equal(live_bytes[0], 9 * MIB + 8519680);
    assert_int_equal(replay.peak_op, 2);
    assert_int_equal(replay.category_peak_bytes[MSC_CATEGORY_OPTIMIZER_STATE], 6 * MIB);
    assert_int_equal(replay.category_peak_bytes[MSC_CATEGORY_WORKSPACE], 8519680);
    assert_int_equal(replay.category_peak_bytes[MSC_CATEGORY_GRADIENT], 3 * MIB);
    msc_trace_destroy(trace);
    msc_graph_destroy(graph);
    stop(&f);
}

static void no_memory_in_the_first_step(void **state)
{
    msc_replay replay;
    fixture f;

    (void)state;
    start(&f, MSC_SIM_CUDA, 1 * MIB);
    assert_int_equal(msc_trace_replay(f.trace, f.sim, NULL, 0, &replay, NULL), MSC_EDEVMEM);
    assert_int_equal(replay.stats.oom_count, 1);
    stop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"replay/peak", peak, NULL, NULL, NULL},
        {"replay/live-per-operation", live, NULL, NULL, NULL},
        {"replay/results-of-every-size", results_of_every_size, NULL, NULL, NULL},
        {"replay/again-is-the-same", again, NULL, NULL, NULL},
        {"replay/capacity", capacity, NULL, NULL, NULL},
        {"replay/peak-before-the-first-operation", before_the_first, NULL, NULL, NULL},
        {"replay/steps-of-a-run", steps_of_a_run, NULL, NULL, NULL},
        {"replay/no-memory-in-the-first-step", no_memory_in_the_first_step, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
