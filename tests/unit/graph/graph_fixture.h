/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file graph_fixture.h
 * What the graph's tests share: a context, short forms of the builders, and a small step.
 *
 *      position   0        1        2        3        4        5
 *      operation  | linear | gelu   | loss   | gelu'  | linear'|
 *      module       [ layer.0      )
 *      weight     [=============================================  resident, written by nobody
 *      hidden       [========)                                     saved: pack 1, unpack 3, release 4
 *      output                [=================)                   never saved
 *      gradient                               [=================   made in backward
 */
#ifndef MSC_TEST_GRAPH_FIXTURE_H
#define MSC_TEST_GRAPH_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "memscale/graph.h"
#include "oom/failing_alloc.h"

typedef struct graph_fixture {
    failing_alloc heap;
    msc_context *ctx;
    msc_graph *graph; /**< open and empty after setup */
    msc_error err;
} graph_fixture;

/** Starts over with an allocator that fails request `fail_at` made after the empty graph exists. */
static inline void graph_fixture_open(graph_fixture *f, uint64_t fail_at)
{
    memset(f, 0, sizeof *f);
    failing_alloc_init(&f->heap, FAILING_ALLOC_NEVER);
    f->ctx = failing_alloc_context(&f->heap);
    assert_non_null(f->ctx);
    assert_int_equal(msc_graph_create(f->ctx, &f->graph, &f->err), MSC_OK);
    if (fail_at != FAILING_ALLOC_NEVER)
        f->heap.fail_at = f->heap.request_count + fail_at;
}

/** Ends everything and requires that no byte is left. */
static inline void graph_fixture_close(graph_fixture *f)
{
    msc_graph_destroy(f->graph);
    f->graph = NULL;
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
    assert_true(failing_alloc_is_clean(&f->heap));
}

static inline int graph_fixture_setup(void **state)
{
    static graph_fixture fixture;

    graph_fixture_open(&fixture, FAILING_ALLOC_NEVER);
    *state = &fixture;
    return 0;
}

static inline int graph_fixture_teardown(void **state)
{
    graph_fixture_close(*state);
    return 0;
}

static inline uint32_t add_module(graph_fixture *f, const char *path, uint32_t parent)
{
    msc_module desc = {.parent = parent};
    uint32_t id = MSC_NONE;

    assert_int_equal(msc_graph_add_module(f->graph, path, "Linear", &desc, &id, &f->err), MSC_OK);
    return id;
}

static inline uint32_t add_op(graph_fixture *f, const char *name)
{
    msc_op desc = {.flops = 100, .moved_bytes = 64, .scratch_bytes = 8};
    uint32_t id = MSC_NONE;

    assert_int_equal(msc_graph_add_op(f->graph, name, &desc, &id, &f->err), MSC_OK);
    return id;
}

static inline uint32_t add_buffer(graph_fixture *f, uint64_t size_bytes)
{
    uint32_t id = MSC_NONE;

    assert_int_equal(msc_graph_add_buffer(f->graph, size_bytes, MSC_CATEGORY_ACTIVATION, &id, &f->err),
                     MSC_OK);
    return id;
}

static inline uint32_t begin_call(graph_fixture *f, uint32_t module)
{
    uint32_t id = MSC_NONE;

    assert_int_equal(msc_graph_begin_call(f->graph, module, &id, &f->err), MSC_OK);
    return id;
}

static inline uint32_t add_save(graph_fixture *f, uint32_t buffer)
{
    uint32_t id = MSC_NONE;

    assert_int_equal(msc_graph_add_save(f->graph, buffer, &id, &f->err), MSC_OK);
    return id;
}

#define GRAPH_TRY(call)                                                                                      \
    do {                                                                                                     \
        msc_status graph_try_status = (call);                                                                \
        if (graph_try_status != MSC_OK)                                                                      \
            return graph_try_status;                                                                         \
    } while (0)

/** Streams the step of the picture above; returns the first failure. Buffers 0 … 3, saves 0, calls 0, 1. */
static inline msc_status build_step(msc_graph *g, msc_error *err)
{
    const msc_op op = {.flops = 100, .moved_bytes = 64, .scratch_bytes = 8};
    const msc_module root = {.parent = MSC_NONE, .flags = MSC_MODULE_ROOT};
    const msc_module layer = {.parent = 0, .structure = 0xabcdef, .state_bytes = 16};

    GRAPH_TRY(msc_graph_add_module(g, "", "My Model", &root, NULL, err));
    GRAPH_TRY(msc_graph_add_module(g, "layer.0", "Linear", &layer, NULL, err));
    GRAPH_TRY(msc_graph_add_buffer(g, 1000, MSC_CATEGORY_PARAMETER, NULL, err));
    GRAPH_TRY(msc_graph_begin_call(g, 0, NULL, err));
    GRAPH_TRY(msc_graph_begin_call(g, 1, NULL, err));
    GRAPH_TRY(msc_graph_add_input(g, 1, 0, err));
    GRAPH_TRY(msc_graph_add_input(g, 0, 0, err));
    GRAPH_TRY(msc_graph_add_op(g, "aten.linear", &op, NULL, err));
    GRAPH_TRY(msc_graph_add_buffer(g, 200, MSC_CATEGORY_ACTIVATION, NULL, err));
    GRAPH_TRY(msc_graph_add_save(g, 1, NULL, err));
    GRAPH_TRY(msc_graph_add_op(g, "aten.gelu", &op, NULL, err));
    GRAPH_TRY(msc_graph_add_buffer(g, 300, MSC_CATEGORY_ACTIVATION, NULL, err));
    GRAPH_TRY(msc_graph_add_write(g, 0, err));
    GRAPH_TRY(msc_graph_end_buffer(g, 1, err));
    GRAPH_TRY(msc_graph_end_call(g, 1, err));
    GRAPH_TRY(msc_graph_add_op(g, "aten.loss", &op, NULL, err));
    GRAPH_TRY(msc_graph_end_call(g, 0, err));
    GRAPH_TRY(msc_graph_set_phase(g, MSC_PHASE_BACKWARD, err));
    GRAPH_TRY(msc_graph_unpack(g, 0, err));
    GRAPH_TRY(msc_graph_add_op(g, "aten.gelu", &op, NULL, err));
    GRAPH_TRY(msc_graph_release(g, 0, err));
    GRAPH_TRY(msc_graph_end_buffer(g, 2, err));
    GRAPH_TRY(msc_graph_add_buffer(g, 1000, MSC_CATEGORY_GRADIENT, NULL, err));
    GRAPH_TRY(msc_graph_add_op(g, "aten.linear", &op, NULL, err));
    return msc_graph_finish(g, err);
}

/** A test case with a fresh fixture. */
#define GRAPH_CASE(name, function)                                                                           \
    {                                                                                                        \
        name, function, graph_fixture_setup, graph_fixture_teardown, NULL                                    \
    }

#endif /* MSC_TEST_GRAPH_FIXTURE_H */
