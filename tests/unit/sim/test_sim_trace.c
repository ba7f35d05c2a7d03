/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Traces: small cases read event by event, and many odd graphs compared with a reference
 * (trace_reference.h).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "memscale/memscale.h"
#include "oom/failing_alloc.h"
#include "synth.h"
#include "trace_reference.h"

typedef struct fixture {
    msc_context *ctx;
    msc_graph *graph;
    uint32_t module;
} fixture;

static void start(fixture *f)
{
    const msc_module module = {.parent = MSC_NONE, .state_bytes = 7};

    assert_int_equal(msc_context_create(NULL, &f->ctx, NULL), MSC_OK);
    assert_int_equal(msc_graph_create(f->ctx, &f->graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_module(f->graph, "m", "M", &module, &f->module, NULL), MSC_OK);
}

static void stop(fixture *f)
{
    msc_graph_destroy(f->graph);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
}

static void add_op(fixture *f, uint64_t scratch_bytes)
{
    const msc_op op = {.scratch_bytes = scratch_bytes};

    assert_int_equal(msc_graph_add_op(f->graph, "op", &op, NULL, NULL), MSC_OK);
}

static uint32_t add_buffer(fixture *f, uint64_t bytes)
{
    uint32_t id;

    assert_int_equal(msc_graph_add_buffer(f->graph, bytes, MSC_CATEGORY_ACTIVATION, &id, NULL), MSC_OK);
    return id;
}

/* Module m: op 1 makes b1 (10, saved) and b2 (20, not saved), op 2 makes b3 (40). Then op 3 uses it, op 4 is
 * backward and uses the save, op 5 is what follows. b0 (100) is the input, made by op 0. */
static void build_small(fixture *f)
{
    uint32_t call;
    uint32_t save;

    start(f);
    add_op(f, 0);
    add_buffer(f, 100);
    assert_int_equal(msc_graph_begin_call(f->graph, f->module, &call, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_input(f->graph, call, 0, NULL), MSC_OK);
    add_op(f, 3);
    add_buffer(f, 10);
    add_buffer(f, 20);
    assert_int_equal(msc_graph_add_save(f->graph, 1, &save, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_buffer(f->graph, 1, NULL), MSC_OK);
    add_op(f, 0);
    add_buffer(f, 40);
    assert_int_equal(msc_graph_end_buffer(f->graph, 2, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_call(f->graph, call, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_buffer(f->graph, 0, NULL), MSC_OK);
    add_op(f, 0);
    assert_int_equal(msc_graph_end_buffer(f->graph, 3, NULL), MSC_OK);
    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    assert_int_equal(msc_graph_unpack(f->graph, save, NULL), MSC_OK);
    add_op(f, 0);
    assert_int_equal(msc_graph_release(f->graph, save, NULL), MSC_OK);
    add_op(f, 0);
    assert_int_equal(msc_graph_finish(f->graph, NULL), MSC_OK);
}

static msc_plan *plan_of(msc_context *ctx, const uint8_t *chosen, uint32_t count)
{
    msc_plan *plan;
    uint32_t m;

    assert_int_equal(msc_plan_create(ctx, &plan, NULL), MSC_OK);
    for (m = 0; m < count; m++) {
        const msc_choice choice = {.module = m, .action = MSC_ACTION_CHECKPOINT};
        if (chosen[m])
            assert_int_equal(msc_plan_add(plan, &choice, NULL), MSC_OK);
    }
    return plan;
}

/* Text of a trace: "o0 +100 -100 r1 …". */
static void write_text(const msc_trace *trace, char *text, size_t bytes)
{
    static const char kinds[] = {'+', '-', 'o', 'r', '>', '<'};
    const msc_event *events = msc_trace_events(trace);
    uint64_t i;
    size_t at = 0;

    for (i = 0; i < msc_trace_event_count(trace); i++) {
        bool op = events[i].kind == MSC_EVENT_OP || events[i].kind == MSC_EVENT_RECOMPUTE;
        at += (size_t)snprintf(text + at, bytes - at, "%s%c%llu", i == 0 ? "" : " ", kinds[events[i].kind],
                               (unsigned long long)(op ? events[i].id : events[i].size_bytes));
    }
}

static void check_text(const fixture *f, const msc_plan *plan, const char *expected)
{
    msc_trace *trace;
    char text[512];

    assert_int_equal(msc_trace_create(f->ctx, f->graph, plan, &trace, NULL), MSC_OK);
    write_text(trace, text, sizeof text);
    assert_string_equal(text, expected);
    msc_trace_destroy(trace);
}

static void plain(void **state)
{
    fixture f;

    (void)state;
    build_small(&f);
    check_text(&f, NULL, "o0 +100 o1 +10 +20 +3 -3 o2 +40 -100 -20 o3 -40 o4 -10 o5");
    stop(&f);
}

static void checkpointed(void **state)
{
    const uint8_t chosen[] = {1};
    fixture f;
    msc_plan *plan;

    (void)state;
    build_small(&f);
    plan = plan_of(f.ctx, chosen, 1);
    /* State 7 and input 100 stay until 5; the recompute stops behind op 1; 20 goes with it, 10 at 5. */
    check_text(
        &f, plan,
        "o0 +100 o1 +7 +10 +20 +3 -3 -10 o2 +40 -20 o3 -40 r1 +7 +10 +20 +3 -3 -20 -7 o4 -100 -10 -7 o5");
    msc_plan_destroy(plan);
    stop(&f);
}

static void residents(void **state)
{
    fixture f;
    uint32_t id;

    (void)state;
    start(&f);
    assert_int_equal(msc_graph_add_resident(f.graph, 5, MSC_CATEGORY_PARAMETER, &id, NULL), MSC_OK);
    add_op(&f, 0);
    add_buffer(&f, 6);
    assert_int_equal(msc_graph_add_resident(f.graph, 8, MSC_CATEGORY_PARAMETER, &id, NULL), MSC_OK);
    assert_int_equal(msc_graph_finish(f.graph, NULL), MSC_OK);
    check_text(&f, NULL, "+5 +8 o0 +6");
    stop(&f);
}

static void errors(void **state)
{
    const uint8_t chosen[] = {0, 1};
    fixture f;
    msc_trace *trace;
    msc_plan *plan;

    (void)state;
    start(&f);
    assert_int_equal(msc_trace_create(f.ctx, f.graph, NULL, &trace, NULL), MSC_ESTATE);
    assert_null(trace);
    assert_int_equal(msc_graph_finish(f.graph, NULL), MSC_OK);
    plan = plan_of(f.ctx, chosen, 2);
    assert_int_equal(msc_trace_create(f.ctx, f.graph, plan, &trace, NULL), MSC_EINVAL);
    assert_null(trace);
    assert_int_equal(msc_trace_create(f.ctx, f.graph, NULL, NULL, NULL), MSC_EINVAL);
    msc_plan_destroy(plan);
    stop(&f);
}

static void overflow(void **state)
{
    fixture f;
    msc_trace *trace;

    (void)state;
    start(&f);
    add_op(&f, UINT64_MAX);
    assert_int_equal(msc_graph_finish(f.graph, NULL), MSC_OK);
    assert_int_equal(msc_trace_create(f.ctx, f.graph, NULL, &trace, NULL), MSC_EOVERFLOW);
    stop(&f);
}

/* ---- kept operations, joined calls ------------------------------------------------------------------ */

/* Module m: op 1 makes b1 (10), op 2 makes b2 (20) of it, op 3 makes b3 (40) of that. Then op 4 uses b3. In
 * backward op 5 uses the save of b2, op 6 that of b1, if they are saved; op 7 is what follows. b0 (100) is the
 * input. */
static void build_three(fixture *f, bool save_first, bool save_second)
{
    uint32_t call;
    uint32_t first = 0;
    uint32_t second = 0;

    start(f);
    add_op(f, 0);
    add_buffer(f, 100);
    assert_int_equal(msc_graph_begin_call(f->graph, f->module, &call, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_input(f->graph, call, 0, NULL), MSC_OK);
    add_op(f, 0);
    add_buffer(f, 10);
    if (save_first)
        assert_int_equal(msc_graph_add_save(f->graph, 1, &first, NULL), MSC_OK);
    add_op(f, 0);
    add_buffer(f, 20);
    assert_int_equal(msc_graph_end_buffer(f->graph, 1, NULL), MSC_OK);
    if (save_second)
        assert_int_equal(msc_graph_add_save(f->graph, 2, &second, NULL), MSC_OK);
    add_op(f, 0);
    add_buffer(f, 40);
    assert_int_equal(msc_graph_end_buffer(f->graph, 2, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_call(f->graph, call, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_buffer(f->graph, 0, NULL), MSC_OK);
    add_op(f, 0);
    assert_int_equal(msc_graph_end_buffer(f->graph, 3, NULL), MSC_OK);
    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    if (save_second)
        assert_int_equal(msc_graph_unpack(f->graph, second, NULL), MSC_OK);
    add_op(f, 0);
    if (save_second)
        assert_int_equal(msc_graph_release(f->graph, second, NULL), MSC_OK);
    if (save_first)
        assert_int_equal(msc_graph_unpack(f->graph, first, NULL), MSC_OK);
    add_op(f, 0);
    if (save_first)
        assert_int_equal(msc_graph_release(f->graph, first, NULL), MSC_OK);
    add_op(f, 0);
    assert_int_equal(msc_graph_finish(f->graph, NULL), MSC_OK);
}

/* Events with module 0 selective and the given offsets kept, up to MSC_NONE. */
static void check_keeping(const fixture *f, const uint32_t *offsets, const char *expected)
{
    const msc_choice choice = {.action = MSC_ACTION_SELECTIVE};
    msc_plan *plan;

    assert_int_equal(msc_plan_create(f->ctx, &plan, NULL), MSC_OK);
    assert_int_equal(msc_plan_add(plan, &choice, NULL), MSC_OK);
    for (; *offsets != MSC_NONE; offsets++)
        assert_int_equal(msc_plan_keep(plan, *offsets, NULL), MSC_OK);
    check_text(f, plan, expected);
    msc_plan_destroy(plan);
}

/* What is kept and saved is held by the save, as in the plain step, and is not made again. */
static void kept_and_saved(void **state)
{
    const uint32_t first[] = {0, MSC_NONE};
    fixture f;

    (void)state;
    build_three(&f, true, true);
    check_keeping(&f, first,
                  "o0 +100 o1 +7 +10 o2 +20 o3 +40 -20 o4 -40 r2 +7 +20 -7 o5 -100 -20 -7 o6 -10 o7");
    stop(&f);
}

/* What nobody has saved is held for the recompute alone and goes with its end. */
static void kept_not_saved(void **state)
{
    const uint32_t first[] = {0, MSC_NONE};
    fixture f;

    (void)state;
    build_three(&f, false, true);
    check_keeping(&f, first,
                  "o0 +100 o1 +7 +10 o2 +20 o3 +40 -20 o4 -40 r2 +7 +20 -10 -7 o5 -100 -20 -7 o6 o7");
    stop(&f);
}

/* The recompute stops behind op 1. Op 2 lies beyond: its save ends right before the recompute, but what is kept
 * goes with the cache, at the recompute's end. */
static void kept_beyond_stop(void **state)
{
    const uint32_t second[] = {1, MSC_NONE};
    fixture f;

    (void)state;
    build_three(&f, true, true);
    check_keeping(&f, second,
                  "o0 +100 o1 +7 +10 o2 +20 -10 o3 +40 o4 -40 o5 r1 +7 +10 -20 -7 o6 -100 -10 -7 o7");
    stop(&f);
}

/* The module's result, kept: it is alive until the recompute though nothing needs it. Offsets beyond the call
 * name nothing. */
static void kept_result(void **state)
{
    const uint32_t last[] = {2, 3, 900, MSC_NONE};
    fixture f;

    (void)state;
    build_three(&f, false, true);
    check_keeping(
        &f, last,
        "o0 +100 o1 +7 +10 o2 +20 -10 o3 +40 -20 o4 r1 +7 +10 r2 +20 -10 -40 -7 o5 -100 -20 -7 o6 o7");
    stop(&f);
}

/* With everything saved kept, there is nothing to recompute: the step is the plain one. */
static void kept_all(void **state)
{
    const uint32_t both[] = {0, 1, MSC_NONE};
    fixture f;

    (void)state;
    build_three(&f, true, true);
    check_keeping(&f, both, "o0 +100 o1 +10 o2 +20 o3 +40 -100 o4 -40 o5 -20 o6 -10 o7");
    check_text(&f, NULL, "o0 +100 o1 +10 o2 +20 o3 +40 -100 o4 -40 o5 -20 o6 -10 o7");
    stop(&f);
}

/* Module m twice: a call makes a buffer of 10 and of that one of 20, which is saved and is the next input. */
static void build_twice(fixture *f)
{
    uint32_t saves[2];
    uint32_t i;

    start(f);
    add_op(f, 0);
    add_buffer(f, 100);
    for (i = 0; i < 2; i++) {
        uint32_t call;
        assert_int_equal(msc_graph_begin_call(f->graph, f->module, &call, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_input(f->graph, call, 2 * i, NULL), MSC_OK);
        add_op(f, 0);
        add_buffer(f, 10);
        add_op(f, 0);
        add_buffer(f, 20);
        assert_int_equal(msc_graph_end_buffer(f->graph, 2 * i + 1, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_save(f->graph, 2 * i + 2, &saves[i], NULL), MSC_OK);
        assert_int_equal(msc_graph_end_call(f->graph, call, NULL), MSC_OK);
        assert_int_equal(msc_graph_end_buffer(f->graph, 2 * i, NULL), MSC_OK);
    }
    add_op(f, 0);
    assert_int_equal(msc_graph_end_buffer(f->graph, 4, NULL), MSC_OK);
    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    for (i = 2; i-- > 0;) {
        assert_int_equal(msc_graph_unpack(f->graph, saves[i], NULL), MSC_OK);
        add_op(f, 0);
        assert_int_equal(msc_graph_release(f->graph, saves[i], NULL), MSC_OK);
    }
    add_op(f, 0);
    assert_int_equal(msc_graph_finish(f->graph, NULL), MSC_OK);
}

/* Offsets count from the first operation of each call; each call's cache ends with its own recompute. */
static void kept_in_two_calls(void **state)
{
    const uint32_t first[] = {0, MSC_NONE};
    fixture f;

    (void)state;
    build_twice(&f);
    check_keeping(&f, first,
                  "o0 +100 o1 +7 +10 o2 +20 o3 +7 +10 o4 +20 o5 -20 r4 +7 +20 -10 -7 o6 -20 -20 -7 r2 +7 +20 "
                  "-10 -7 o7 -100 -20 -7 o8");
    stop(&f);
}

/* Module m makes b1 (10) of b0 (100) and saves it, module n (state 5) makes b2 (20) of that and saves it. With
 * a gap, an operation runs between the two. */
static void build_row(fixture *f, bool gap)
{
    const msc_module second = {.parent = MSC_NONE, .state_bytes = 5};
    uint32_t modules[2];
    uint32_t saves[2];
    uint32_t i;

    start(f);
    modules[0] = f->module;
    assert_int_equal(msc_graph_add_module(f->graph, "n", "N", &second, &modules[1], NULL), MSC_OK);
    add_op(f, 0);
    add_buffer(f, 100);
    for (i = 0; i < 2; i++) {
        uint32_t call;
        if (i == 1 && gap)
            add_op(f, 0);
        assert_int_equal(msc_graph_begin_call(f->graph, modules[i], &call, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_input(f->graph, call, i, NULL), MSC_OK);
        add_op(f, 0);
        add_buffer(f, 10 * (i + 1));
        assert_int_equal(msc_graph_add_save(f->graph, i + 1, &saves[i], NULL), MSC_OK);
        assert_int_equal(msc_graph_end_call(f->graph, call, NULL), MSC_OK);
        assert_int_equal(msc_graph_end_buffer(f->graph, i, NULL), MSC_OK);
    }
    add_op(f, 0);
    assert_int_equal(msc_graph_end_buffer(f->graph, 2, NULL), MSC_OK);
    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    for (i = 2; i-- > 0;) {
        assert_int_equal(msc_graph_unpack(f->graph, saves[i], NULL), MSC_OK);
        add_op(f, 0);
        assert_int_equal(msc_graph_release(f->graph, saves[i], NULL), MSC_OK);
    }
    add_op(f, 0);
    assert_int_equal(msc_graph_finish(f->graph, NULL), MSC_OK);
}

static void check_row(bool gap, bool joined, const char *expected)
{
    const msc_choice first = {.action = MSC_ACTION_CHECKPOINT};
    const msc_choice second = {.module = 1, .action = MSC_ACTION_CHECKPOINT, .joined = joined};
    fixture f;
    msc_plan *plan;

    build_row(&f, gap);
    assert_int_equal(msc_plan_create(f.ctx, &plan, NULL), MSC_OK);
    assert_int_equal(msc_plan_add(plan, &first, NULL), MSC_OK);
    assert_int_equal(msc_plan_add(plan, &second, NULL), MSC_OK);
    check_text(&f, plan, expected);
    msc_plan_destroy(plan);
    stop(&f);
}

/* One region: one state of 7 + 5, what passes between the two is not held, both run again at once. */
static void joined(void **state)
{
    (void)state;
    check_row(false, true,
              "o0 +100 o1 +12 +10 o2 +20 -10 o3 -20 r1 +12 +10 r2 +20 -12 o4 -20 o5 -100 -10 -12 o6");
}

static void not_joined(void **state)
{
    (void)state;
    check_row(false, false,
              "o0 +100 o1 +7 +10 o2 +5 +20 o3 -20 r2 +5 +20 -5 o4 -10 -20 -5 r1 +7 +10 -7 o5 -100 -10 -7 o6");
}

/* Something runs in between: a region of its own. */
static void cannot_join(void **state)
{
    const char *expected =
        "o0 +100 o1 +7 +10 o2 o3 +5 +20 o4 -20 r3 +5 +20 -5 o5 -10 -20 -5 r1 +7 +10 -7 o6 -100 -10 -7 o7";

    (void)state;
    check_row(true, true, expected);
    check_row(true, false, expected);
}

/* Nothing that it could go on with is checkpointed. */
static void joins_nothing(void **state)
{
    const msc_choice second = {.module = 1, .action = MSC_ACTION_CHECKPOINT, .joined = 1};
    fixture f;
    msc_plan *plan;

    (void)state;
    build_row(&f, false);
    assert_int_equal(msc_plan_create(f.ctx, &plan, NULL), MSC_OK);
    assert_int_equal(msc_plan_add(plan, &second, NULL), MSC_OK);
    check_text(&f, plan, "o0 +100 o1 +10 -100 o2 +5 +20 o3 -20 r2 +5 +20 -5 o4 -20 -5 o5 -10 o6");
    msc_plan_destroy(plan);
    stop(&f);
}

/* ---- many odd graphs -------------------------------------------------------------------------------- */

static uint32_t random_state = 1;

/* The step under one choice that moves what is numbered 0. */
static void check_moves(const fixture *f, const msc_choice *choice, uint64_t window_bytes,
                        const char *expected)
{
    const msc_plan_summary windows = {.window_out_bytes = window_bytes, .window_in_bytes = 1000};
    msc_plan *plan;

    assert_int_equal(msc_plan_create(f->ctx, &plan, NULL), MSC_OK);
    assert_int_equal(msc_plan_add(plan, choice, NULL), MSC_OK);
    assert_int_equal(msc_plan_move(plan, 0, NULL), MSC_OK);
    assert_int_equal(msc_plan_set_summary(plan, &windows, NULL), MSC_OK);
    check_text(f, plan, expected);
    msc_plan_destroy(plan);
}

/* The saved b1 leaves when it is packed (>10), its place is free when the module has ended (without a window: at once),
 * and it is back for operation 4 (+10). The boundary, b0, leaves when the call begins and is back for the recompute. */
static void moves(void **state)
{
    const msc_choice offload = {.action = MSC_ACTION_OFFLOAD};
    const msc_choice boundary = {.action = MSC_ACTION_CHECKPOINT, .boundary = 1};
    fixture f;

    (void)state;
    build_small(&f);
    check_moves(&f, &offload, 1000,
                "o0 +100 o1 +10 +20 +3 -3 >10 o2 +40 -100 -10 -20 o3 -40 +10 o4 <10 -10 o5");
    check_moves(&f, &offload, 0, "o0 +100 o1 +10 +20 +3 -3 >10 -10 o2 +40 -100 -20 o3 -40 +10 o4 <10 -10 o5");
    check_moves(&f, &boundary, 1000,
                "o0 +100 >100 o1 +7 +10 +20 +3 -3 -10 o2 +40 -100 -20 o3 -40 +100 r1 +7 +10 +20 +3 -3 -20 -7 "
                "o4 <100 -10 -7 -100 o5");
    stop(&f);
}

static uint32_t random_u32(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static void compare_with_reference(msc_context *ctx, const msc_graph *graph, msc_sim *sim,
                                   const msc_plan *plan)
{
    static reference r;
    static uint64_t expected[4096];
    static uint64_t live[4096];
    msc_trace *trace;
    msc_replay replay;
    uint64_t away = 0;
    uint32_t moved = 0;
    size_t count;
    size_t i;

    assert_int_equal(msc_trace_create(ctx, graph, plan, &trace, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(trace, sim, live, 4096, &replay, NULL), MSC_OK);
    prepare_reference(&r, graph, plan);
    count = list_live(&r, expected, 4096);
    assert_int_equal(count, msc_trace_op_event_count(trace));
    for (i = 0; i < count; i++)
        assert_int_equal(live[i], expected[i]);
    for (i = 0; i <= msc_graph_op_count(graph); i++)
        away = away_at(&r, (uint32_t)i) > away ? away_at(&r, (uint32_t)i) : away;
    assert_int_equal(replay.away_peak_bytes, away);
    for (i = 0; i < r.move_count; i++)
        moved += r.moves[i].release > r.moves[i].put;
    assert_int_equal(replay.moved_count, moved);
    msc_trace_destroy(trace);
}

/* Of four modules one is kept, one checkpointed, a third of these joined to whatever is before, one selective, one
 * offloaded; half of the boundaries are, too. Windows are small, large or nothing. */
static msc_plan *random_plan(msc_context *ctx, uint32_t module_count)
{
    msc_plan_summary windows = {0};
    msc_plan *plan;
    uint32_t m;
    uint32_t offset;

    windows.window_out_bytes = random_u32() % 3 * 2000000;
    windows.window_in_bytes = random_u32() % 3 * 2000000;
    assert_int_equal(msc_plan_create(ctx, &plan, NULL), MSC_OK);
    for (m = 0; m < module_count; m++) {
        msc_choice choice = {.module = m, .action = (uint8_t)(random_u32() % 4)};
        bool runs_again = choice.action == MSC_ACTION_CHECKPOINT || choice.action == MSC_ACTION_SELECTIVE;
        choice.joined = choice.action == MSC_ACTION_CHECKPOINT && random_u32() % 3 == 0;
        choice.boundary = runs_again && !choice.joined && random_u32() % 2 == 0;
        assert_int_equal(msc_plan_add(plan, &choice, NULL), MSC_OK);
        for (offset = 0; choice.action == MSC_ACTION_SELECTIVE && offset < 12; offset++)
            if (random_u32() % 3 == 0)
                assert_int_equal(msc_plan_keep(plan, offset, NULL), MSC_OK);
        for (offset = 0; (choice.action == MSC_ACTION_OFFLOAD || choice.boundary) && offset < 16; offset++)
            if (random_u32() % 4 != 0)
                assert_int_equal(msc_plan_move(plan, offset, NULL), MSC_OK);
        if (choice.action == MSC_ACTION_OFFLOAD || choice.boundary)
            assert_int_equal(msc_plan_set_ahead(plan, m, random_u32() % 3 * 2000000, NULL), MSC_OK);
    }
    assert_int_equal(msc_plan_set_summary(plan, &windows, NULL), MSC_OK);
    return plan;
}

/* What a reference found, over all graphs: enough of everything new for the comparison to mean something. */
typedef struct coverage {
    uint32_t kept_ops, long_regions, moves, boundaries, early_returns, before_region;
} coverage;

static void count_coverage(coverage *seen, const msc_graph *graph, const msc_plan *plan)
{
    static reference r;
    uint32_t i;

    prepare_reference(&r, graph, plan);
    for (i = 0; i < msc_graph_op_count(graph); i++)
        seen->kept_ops += r.kept[i];
    for (i = 0; i < msc_graph_call_count(graph); i++)
        seen->long_regions += r.region_of[i] == i && r.finish[i] > msc_graph_calls(graph)[i].end;
    seen->moves += r.move_count;
    for (i = 0; i < r.move_count; i++) {
        seen->boundaries += r.region_of[r.moves[i].region] == r.moves[i].region;
        seen->early_returns += r.moves[i].back < r.moves[i].use;
        seen->before_region += r.moves[i].back < first_use_of(&r, r.moves[i].region);
    }
}

static void random_graphs(void **state)
{
    const msc_sim_options options = msc_sim_options_default(MSC_SIM_HOST);
    msc_context *ctx;
    msc_sim *sim;
    uint32_t round;
    coverage seen = {0};

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    assert_int_equal(msc_sim_create(ctx, &options, &sim, NULL), MSC_OK);
    for (round = 0; round < 600; round++) {
        uint8_t bytes[400];
        msc_plan *plan;
        size_t i;
        msc_graph *graph;
        for (i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)random_u32();
        graph = synth_bytes(ctx, bytes, 100 + round / 2);
        assert_non_null(graph);
        plan = random_plan(ctx, msc_graph_module_count(graph));
        compare_with_reference(ctx, graph, sim, plan);
        count_coverage(&seen, graph, plan);
        msc_plan_destroy(plan);
        msc_graph_destroy(graph);
    }
    assert_true(seen.kept_ops > 600);
    assert_true(seen.long_regions > 20);
    assert_true(seen.moves > 1500);
    assert_true(seen.boundaries > 100);
    assert_true(seen.early_returns > 500 && seen.before_region > 300);
    msc_sim_destroy(sim);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
}

/* The trace must give the same error for want of memory, and leave nothing behind. */
static void out_of_memory(void **state)
{
    fixture f;
    uint64_t n;
    const uint8_t chosen[] = {1};
    msc_plan *plan;
    static failing_alloc heap;

    (void)state;
    build_small(&f);
    plan = plan_of(f.ctx, chosen, 1);
    for (n = 1;; n++) {
        msc_trace *trace = NULL;
        msc_context *ctx;
        msc_status status;
        failing_alloc_init(&heap, n);
        ctx = failing_alloc_context(&heap);
        assert_non_null(ctx);
        status = msc_trace_create(ctx, f.graph, plan, &trace, NULL);
        assert_int_equal(status, heap.failed_count > 0 ? MSC_ENOMEM : MSC_OK);
        assert_true((trace == NULL) == (heap.failed_count > 0));
        msc_trace_destroy(trace);
        assert_int_equal(msc_context_held_bytes(ctx), 0);
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(&heap));
        if (heap.failed_count == 0)
            break;
    }
    assert_true(n > 3);
    msc_plan_destroy(plan);
    stop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"trace/plain", plain, NULL, NULL, NULL},
        {"trace/checkpointed", checkpointed, NULL, NULL, NULL},
        {"trace/kept-and-saved", kept_and_saved, NULL, NULL, NULL},
        {"trace/kept-not-saved", kept_not_saved, NULL, NULL, NULL},
        {"trace/kept-beyond-stop", kept_beyond_stop, NULL, NULL, NULL},
        {"trace/kept-result", kept_result, NULL, NULL, NULL},
        {"trace/kept-all-is-plain", kept_all, NULL, NULL, NULL},
        {"trace/kept-in-two-calls", kept_in_two_calls, NULL, NULL, NULL},
        {"trace/moves", moves, NULL, NULL, NULL},
        {"trace/joined", joined, NULL, NULL, NULL},
        {"trace/not-joined", not_joined, NULL, NULL, NULL},
        {"trace/cannot-join", cannot_join, NULL, NULL, NULL},
        {"trace/joins-nothing", joins_nothing, NULL, NULL, NULL},
        {"trace/residents-come-first", residents, NULL, NULL, NULL},
        {"trace/errors", errors, NULL, NULL, NULL},
        {"trace/overflow", overflow, NULL, NULL, NULL},
        {"trace/equals-reference-on-random-graphs", random_graphs, NULL, NULL, NULL},
        {"trace/out-of-memory", out_of_memory, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
