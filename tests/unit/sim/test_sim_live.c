/* SPDX-License-Identifier: Apache-2.0 */
/* What is alive at a moment of a trace: buffers, scratch, recomputes, and whose they are. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "memscale/memscale.h"
#include "oom/failing_alloc.h"

typedef struct fixture {
    failing_alloc heap;
    msc_context *ctx;
    msc_graph *graph;
    msc_plan *plan;
    msc_trace *trace;
} fixture;

/*
 * Parameter 1000 of module 1. In module 1's call, op 0 makes 100 (dropped, not saved) and op 1 makes 50,
 * which is saved, with scratch 500. Backward's op 2 uses the save and makes a gradient of 30.
 */
static void start(fixture *f, int checkpoint)
{
    const msc_module root = {.parent = MSC_NONE, .flags = MSC_MODULE_ROOT};
    const msc_module block = {.parent = 0};
    const msc_choice choice = {.module = 1, .action = MSC_ACTION_CHECKPOINT};

    failing_alloc_init(&f->heap, FAILING_ALLOC_NEVER);
    f->ctx = failing_alloc_context(&f->heap);
    f->plan = NULL;
    assert_int_equal(msc_graph_create(f->ctx, &f->graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_module(f->graph, "", "Model", &root, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_module(f->graph, "block", "Block", &block, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_resident(f->graph, 1000, MSC_CATEGORY_PARAMETER, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_note_buffer(f->graph, 0, 1, "weight", NULL), MSC_OK);
    assert_int_equal(msc_graph_begin_call(f->graph, 1, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(f->graph, "a", &(msc_op){0}, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(f->graph, 100, MSC_CATEGORY_TEMPORARY, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(f->graph, "b", &(msc_op){.scratch_bytes = 500}, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(f->graph, 50, MSC_CATEGORY_ACTIVATION, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_buffer(f->graph, 1, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_save(f->graph, 2, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_buffer(f->graph, 2, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_call(f->graph, 0, NULL), MSC_OK);
    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(f->graph, "c", &(msc_op){0}, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(f->graph, 20, MSC_CATEGORY_TEMPORARY, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_unpack(f->graph, 0, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(f->graph, "d", &(msc_op){0}, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_note_op(f->graph, 1, "", NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(f->graph, 30, MSC_CATEGORY_GRADIENT, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_release(f->graph, 0, NULL), MSC_OK);
    assert_int_equal(msc_graph_finish(f->graph, NULL), MSC_OK);
    if (checkpoint) {
        assert_int_equal(msc_plan_create(f->ctx, &f->plan, NULL), MSC_OK);
        assert_int_equal(msc_plan_add(f->plan, &choice, NULL), MSC_OK);
    }
    assert_int_equal(msc_trace_create(f->ctx, f->graph, f->plan, &f->trace, NULL), MSC_OK);
}

static void stop(fixture *f)
{
    msc_trace_destroy(f->trace);
    msc_plan_destroy(f->plan);
    msc_graph_destroy(f->graph);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
    assert_true(failing_alloc_is_clean(&f->heap));
}

/* The event that allocates `size_bytes` for the n-th time, counted from 0. */
static uint64_t alloc_of(const fixture *f, uint64_t size_bytes, unsigned n)
{
    const msc_event *events = msc_trace_events(f->trace);
    uint64_t i;

    for (i = 0; i < msc_trace_event_count(f->trace); i++)
        if (events[i].kind == MSC_EVENT_ALLOC && events[i].size_bytes == size_bytes && n-- == 0)
            return i;
    fail_msg("no such allocation");
    return 0;
}

static void at_scratch(void **state)
{
    msc_live live[8];
    uint32_t count = 0;
    fixture f;

    (void)state;
    start(&f, 0);
    assert_int_equal(msc_trace_live_at(f.trace, f.graph, alloc_of(&f, 500, 0), live, 8, &count, NULL),
                     MSC_OK);
    assert_int_equal(count, 4);
    assert_int_equal(live[0].size_bytes, 1000);
    assert_int_equal(live[0].buffer, 0);
    assert_int_equal(live[0].op, 4); /* before the first of four */
    assert_int_equal(live[0].module, 1);
    assert_int_equal(live[0].category, MSC_CATEGORY_PARAMETER);
    assert_int_equal(live[3].size_bytes, 500);
    assert_int_equal(live[3].buffer, MSC_NONE);
    assert_int_equal(live[3].op, 1);
    assert_int_equal(live[3].module, 1);
    assert_int_equal(live[3].recomputed, 0);
    stop(&f);
}

static void in_second_run(void **state)
{
    msc_live live[8];
    uint32_t count = 0;
    fixture f;

    (void)state;
    start(&f, 1);
    assert_int_equal(msc_trace_live_at(f.trace, f.graph, alloc_of(&f, 50, 1), live, 8, &count, NULL), MSC_OK);
    assert_int_equal(live[count - 1].size_bytes, 50);
    assert_int_equal(live[count - 1].buffer, 2);
    assert_int_equal(live[count - 1].op, 1);
    assert_int_equal(live[count - 1].recomputed, 1);
    assert_int_equal(msc_trace_live_at(f.trace, f.graph, alloc_of(&f, 30, 0), live, 8, &count, NULL), MSC_OK);
    assert_int_equal(live[count - 1].size_bytes, 30);
    assert_int_equal(live[count - 1].module, 1); /* by the note on what made it */
    assert_int_equal(live[count - 1].recomputed, 0);
    stop(&f);
}

static void little_room(void **state)
{
    msc_live live[1];
    uint32_t count = 0;
    fixture f;

    (void)state;
    start(&f, 0);
    assert_int_equal(msc_trace_live_at(f.trace, f.graph, 0, NULL, 0, &count, NULL), MSC_OK);
    assert_int_equal(count, 1);
    assert_int_equal(msc_trace_live_at(f.trace, f.graph, alloc_of(&f, 100, 0), live, 1, &count, NULL),
                     MSC_OK);
    assert_int_equal(count, 2);
    assert_int_equal(live[0].size_bytes, 1000);
    stop(&f);
}

static void refused(void **state)
{
    uint32_t count = 0;
    fixture f;

    (void)state;
    start(&f, 0);
    assert_int_equal(
        msc_trace_live_at(f.trace, f.graph, msc_trace_event_count(f.trace), NULL, 0, &count, NULL),
        MSC_EINVAL);
    assert_int_equal(msc_trace_live_at(f.trace, f.graph, 0, NULL, 1, &count, NULL), MSC_EINVAL);
    assert_int_equal(msc_trace_live_at(f.trace, NULL, 0, NULL, 0, &count, NULL), MSC_EINVAL);
    f.heap.fail_at = f.heap.request_count;
    assert_int_equal(msc_trace_live_at(f.trace, f.graph, 0, NULL, 0, &count, NULL), MSC_ENOMEM);
    stop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"live/at-scratch", at_scratch, NULL, NULL, NULL},
        {"live/in-a-second-run", in_second_run, NULL, NULL, NULL},
        {"live/little-room", little_room, NULL, NULL, NULL},
        {"live/refused", refused, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
