/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Traces: small cases read event by event, and many odd graphs compared with a reference that follows the
 * rules at the top of sim_trace.c one operation at a time, with no care for speed.
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
    msc_graph_begin_call(f->graph, f->module, &call, NULL);
    msc_graph_add_input(f->graph, call, 0, NULL);
    add_op(f, 3);
    add_buffer(f, 10);
    add_buffer(f, 20);
    assert_int_equal(msc_graph_add_save(f->graph, 1, &save, NULL), MSC_OK);
    msc_graph_end_buffer(f->graph, 1, NULL);
    add_op(f, 0);
    add_buffer(f, 40);
    msc_graph_end_buffer(f->graph, 2, NULL);
    msc_graph_end_call(f->graph, call, NULL);
    msc_graph_end_buffer(f->graph, 0, NULL);
    add_op(f, 0);
    msc_graph_end_buffer(f->graph, 3, NULL);
    msc_graph_set_phase(f->graph, MSC_PHASE_BACKWARD, NULL);
    msc_graph_unpack(f->graph, save, NULL);
    add_op(f, 0);
    msc_graph_release(f->graph, save, NULL);
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
    static const char kinds[] = {'+', '-', 'o', 'r'};
    const msc_event *events = msc_trace_events(trace);
    uint64_t i;
    size_t at = 0;

    for (i = 0; i < msc_trace_event_count(trace); i++) {
        bool op = events[i].kind >= MSC_EVENT_OP;
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
    check_text(&f, plan,
               "o0 +100 o1 +7 +10 +20 +3 -3 -10 o2 +40 -20 o3 -40 r1 +10 +20 +3 -3 -20 o4 -100 -10 -7 o5");
    msc_plan_destroy(plan);
    stop(&f);
}

static void residents(void **state)
{
    fixture f;
    uint32_t id;

    (void)state;
    start(&f);
    msc_graph_add_resident(f.graph, 5, MSC_CATEGORY_PARAMETER, &id, NULL);
    add_op(&f, 0);
    add_buffer(&f, 6);
    msc_graph_add_resident(f.graph, 8, MSC_CATEGORY_PARAMETER, &id, NULL);
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

/* ---- reference ------------------------------------------------------------------------------------- */

enum { MOST_CALLS = 256, MOST_BUFFERS = 512 };

typedef struct reference {
    const msc_graph *graph;
    uint32_t region_of[MOST_CALLS]; /* per call: region, or MSC_NONE */
    uint32_t stop[MOST_CALLS], redo[MOST_CALLS], until[MOST_CALLS];
    uint32_t end[MOST_BUFFERS], hold[MOST_BUFFERS];
} reference;

static uint32_t natural_end(const msc_buffer *b)
{
    return !b->resident && b->end == b->begin ? b->begin + 1 : b->end;
}

static bool internal_to(const reference *r, const msc_save *s, uint32_t region)
{
    const msc_buffer *b = &msc_graph_buffers(r->graph)[s->buffer];
    const msc_call *c = &msc_graph_calls(r->graph)[region];

    return !b->resident && b->begin >= c->begin && b->begin < c->end && s->release > c->end;
}

static uint32_t region_of_save(const reference *r, const msc_save *s)
{
    return s->call == MSC_NONE ? MSC_NONE : r->region_of[s->call];
}

static bool never_used(const reference *r, const msc_save *s)
{
    return s->unpack == s->release && s->release == msc_graph_op_count(r->graph);
}

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static void find_regions(reference *r, const uint8_t *chosen)
{
    const msc_call *calls = msc_graph_calls(r->graph);
    uint32_t i;

    for (i = 0; i < msc_graph_call_count(r->graph); i++) {
        uint32_t c;
        r->region_of[i] = MSC_NONE;
        for (c = i; c != MSC_NONE; c = calls[c].parent)
            if (chosen[calls[c].module])
                r->region_of[i] = c;
    }
}

static bool measure_region(reference *r, uint32_t region)
{
    const msc_save *saves = msc_graph_saves(r->graph);
    bool live = false;
    uint32_t i;

    r->stop[region] = r->until[region] = 0;
    r->redo[region] = UINT32_MAX;
    for (i = 0; i < msc_graph_save_count(r->graph); i++) {
        const msc_save *s = &saves[i];
        if (region_of_save(r, s) != region || !internal_to(r, s, region))
            continue;
        r->stop[region] =
            max_u32(r->stop[region], max_u32(s->pack, msc_graph_buffers(r->graph)[s->buffer].begin + 1));
        if (never_used(r, s))
            continue;
        live = true;
        r->until[region] = max_u32(r->until[region], s->release);
        if (s->unpack < r->redo[region])
            r->redo[region] = s->unpack;
    }
    r->redo[region] = max_u32(r->redo[region], msc_graph_calls(r->graph)[region].end);
    return live;
}

static void find_lifetimes(reference *r)
{
    const msc_save *saves = msc_graph_saves(r->graph);
    const msc_input *inputs = msc_graph_inputs(r->graph);
    uint32_t i;

    for (i = 0; i < msc_graph_buffer_count(r->graph); i++) {
        r->end[i] = natural_end(&msc_graph_buffers(r->graph)[i]);
        r->hold[i] = 0;
    }
    for (i = 0; i < msc_graph_save_count(r->graph); i++) {
        uint32_t region = region_of_save(r, &saves[i]);
        uint32_t b = saves[i].buffer;
        if (region == MSC_NONE || !internal_to(r, &saves[i], region))
            r->end[b] = max_u32(r->end[b], saves[i].release);
        else if (!never_used(r, &saves[i]))
            r->hold[b] = max_u32(r->hold[b], saves[i].release);
    }
    for (i = 0; i < msc_graph_input_count(r->graph); i++)
        if (r->region_of[inputs[i].call] == inputs[i].call)
            r->end[inputs[i].buffer] = max_u32(r->end[inputs[i].buffer], r->until[inputs[i].call]);
}

static void prepare_reference(reference *r, const msc_graph *graph, const uint8_t *chosen)
{
    uint32_t c;
    uint32_t i;

    r->graph = graph;
    find_regions(r, chosen);
    for (c = 0; c < msc_graph_call_count(graph); c++)
        if (r->region_of[c] == c && !measure_region(r, c))
            for (i = 0; i < msc_graph_call_count(graph); i++)
                if (r->region_of[i] == c)
                    r->region_of[i] = MSC_NONE;
    find_lifetimes(r);
}

/* Region whose recompute makes the buffer again, or MSC_NONE. */
static uint32_t remaker(const reference *r, uint32_t buffer)
{
    const msc_buffer *b = &msc_graph_buffers(r->graph)[buffer];
    uint32_t c;

    for (c = 0; c < msc_graph_call_count(r->graph); c++)
        if (r->region_of[c] == c && !b->resident && b->begin >= msc_graph_calls(r->graph)[c].begin &&
            b->begin < r->stop[c])
            return c;
    return MSC_NONE;
}

static uint64_t state_bytes(const reference *r, uint32_t region)
{
    return msc_graph_modules(r->graph)[msc_graph_calls(r->graph)[region].module].state_bytes;
}

/* Bytes alive while operation t runs for real. */
static uint64_t live_in_op(const reference *r, uint32_t t)
{
    const msc_buffer *buffers = msc_graph_buffers(r->graph);
    uint64_t live = msc_graph_ops(r->graph)[t].scratch_bytes;
    uint32_t i;

    for (i = 0; i < msc_graph_buffer_count(r->graph); i++) {
        uint32_t c = remaker(r, i);
        if (buffers[i].begin <= t && r->end[i] > t)
            live += buffers[i].size_bytes;
        if (c != MSC_NONE && r->redo[c] <= t && r->hold[i] > r->redo[c] && r->hold[i] > t)
            live += buffers[i].size_bytes;
    }
    for (i = 0; i < msc_graph_call_count(r->graph); i++)
        if (r->region_of[i] == i && msc_graph_calls(r->graph)[i].begin <= t && r->until[i] > t)
            live += state_bytes(r, i);
    return live;
}

static uint64_t size_in_recompute(const reference *r, uint32_t buffer, uint32_t region, uint32_t t)
{
    const msc_buffer *b = &msc_graph_buffers(r->graph)[buffer];
    uint32_t c = remaker(r, buffer);
    uint32_t rb = r->redo[region];
    uint64_t bytes = 0;

    if ((b->resident || b->begin < rb) && r->end[buffer] > rb)
        bytes += b->size_bytes;
    if (c == region && b->begin <= t &&
        (r->hold[buffer] > 0 || natural_end(b) > t || natural_end(b) >= r->stop[region]))
        bytes += b->size_bytes;
    if (c != MSC_NONE && c != region && (r->redo[c] < rb || (r->redo[c] == rb && c > region)) &&
        r->hold[buffer] > r->redo[c] && r->hold[buffer] > rb)
        bytes += b->size_bytes;
    return bytes;
}

/* Bytes alive while operation t runs again for a region. */
static uint64_t live_in_recompute(const reference *r, uint32_t region, uint32_t t)
{
    uint32_t rb = r->redo[region];
    uint64_t live = msc_graph_ops(r->graph)[t].scratch_bytes;
    uint32_t i;

    for (i = 0; i < msc_graph_buffer_count(r->graph); i++)
        live += size_in_recompute(r, i, region, t);
    for (i = 0; i < msc_graph_call_count(r->graph); i++)
        if (r->region_of[i] == i && msc_graph_calls(r->graph)[i].begin < rb && r->until[i] > rb)
            live += state_bytes(r, i);
    return live;
}

/* Appends what should be alive in each operation, in the order of events. */
static size_t list_live(const reference *r, uint64_t *live, size_t most)
{
    uint32_t op_count = msc_graph_op_count(r->graph);
    size_t count = 0;
    uint32_t p;
    uint32_t c;
    uint32_t t;

    for (p = 0; p <= op_count; p++) {
        for (c = msc_graph_call_count(r->graph); c-- > 0;) {
            if (r->region_of[c] != c || r->redo[c] != p)
                continue;
            for (t = msc_graph_calls(r->graph)[c].begin; t < r->stop[c] && count < most; t++)
                live[count++] = live_in_recompute(r, c, t);
        }
        if (p < op_count && count < most)
            live[count++] = live_in_op(r, p);
    }
    return count;
}

static uint32_t random_state = 1;

static uint32_t random_u32(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static void compare_with_reference(msc_context *ctx, const msc_graph *graph, msc_sim *sim,
                                   const uint8_t *chosen)
{
    static reference r;
    static uint64_t expected[4096];
    static uint64_t live[4096];
    msc_plan *plan = plan_of(ctx, chosen, msc_graph_module_count(graph));
    msc_trace *trace;
    msc_replay replay;
    size_t count;
    size_t i;

    assert_int_equal(msc_trace_create(ctx, graph, plan, &trace, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(trace, sim, live, 4096, &replay, NULL), MSC_OK);
    prepare_reference(&r, graph, chosen);
    count = list_live(&r, expected, 4096);
    assert_int_equal(count, msc_trace_op_event_count(trace));
    for (i = 0; i < count; i++)
        assert_int_equal(live[i], expected[i]);
    msc_trace_destroy(trace);
    msc_plan_destroy(plan);
}

static void random_graphs(void **state)
{
    const msc_sim_options options = msc_sim_options_default(MSC_SIM_HOST);
    msc_context *ctx;
    msc_sim *sim;
    uint32_t round;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    assert_int_equal(msc_sim_create(ctx, &options, &sim, NULL), MSC_OK);
    for (round = 0; round < 600; round++) {
        uint8_t bytes[400];
        uint8_t chosen[32];
        size_t i;
        msc_graph *graph;
        for (i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)random_u32();
        graph = synth_bytes(ctx, bytes, 100 + round / 2);
        assert_non_null(graph);
        for (i = 0; i < sizeof chosen; i++)
            chosen[i] = random_u32() % 3 == 0;
        compare_with_reference(ctx, graph, sim, chosen);
        msc_graph_destroy(graph);
    }
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
        {"trace/residents-come-first", residents, NULL, NULL, NULL},
        {"trace/errors", errors, NULL, NULL, NULL},
        {"trace/overflow", overflow, NULL, NULL, NULL},
        {"trace/equals-reference-on-random-graphs", random_graphs, NULL, NULL, NULL},
        {"trace/out-of-memory", out_of_memory, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
