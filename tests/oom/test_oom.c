/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a step, from the first record of its graph to the replay of its plan, with allocation 0, 1, 2 …
 * failing until a run needs no more of them than were granted. Most of the requests are those of the decision,
 * which makes the same ones again and again: in the middle of a run every third fails, another third in
 * each pass, so that none is left out; with MEMSCALE_OOM=all every one fails in each pass, with few a quarter of them.
 *
 *      build -> finish -> text -> parse -> file -> load -> decide -> text -> parse -> trace -> replay
 *
 * Every failing run must end in ENOMEM with a filled error record, must leave NULL in the result of the call
 * that failed, and must give every byte back. A second pass repeats each refused call once: since a refused
 * call changes nothing, graph and plan must come out as if nothing had been refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memscale/memscale.h"
#include "oom/failing_alloc.h"

#define BLOCKS 36u /* more records of each kind than the first capacity of a table */
#define BLOCK_BYTES 4096u
#define MOST_RUNS 100000u
#define DENSE 40u /* requests at the begin and at the end of a run, all of which fail */
#define STRIDE 3u
#define FEW 4u /* with MEMSCALE_OOM=few one of so many of those */
#define GRAPH_FILE "test_oom.graph"

/* Everything that one run makes, so that one place can take it down again. */
typedef struct life {
    msc_context *ctx;
    msc_graph *graph;
    msc_graph *parsed_graph;
    msc_graph *loaded_graph;
    msc_plan *plan;
    msc_plan *parsed_plan;
    msc_trace *trace;
    msc_sim *sim;
    bool repeats; /* a refused call is made once more */
    msc_error err;
} life;

static failing_alloc heap;
static char text[1u << 20];

/* Runs a call, once more if that is wanted; leaves the function with the status of a failure. */
#define TRY(life, call)                                                                                      \
    do {                                                                                                     \
        msc_status try_status = (call);                                                                      \
        if (try_status == MSC_ENOMEM && (life)->repeats)                                                     \
            try_status = (call);                                                                             \
        if (try_status != MSC_OK)                                                                            \
            return try_status;                                                                               \
    } while (0)

/* As TRY for a call that makes an object: on failure it must leave NULL where an address was. */
#define MAKE(life, slot, call)                                                                               \
    do {                                                                                                     \
        msc_status make_status;                                                                              \
        (slot) = (void *)&heap;                                                                              \
        make_status = (call);                                                                                \
        if (make_status == MSC_ENOMEM && (life)->repeats) {                                                  \
            assert_null(slot);                                                                               \
            make_status = (call);                                                                            \
        }                                                                                                    \
        if (make_status != MSC_OK) {                                                                         \
            assert_null(slot);                                                                               \
            return make_status;                                                                              \
        }                                                                                                    \
        assert_non_null(slot);                                                                               \
    } while (0)

/* What the forward of one block left behind for its backward. */
typedef struct block {
    uint32_t module;
    uint32_t weight;
    uint32_t output;
    uint32_t input_save;
    uint32_t inner_save;
} block;

static msc_status add_op(life *run, const char *name)
{
    msc_op op;

    memset(&op, 0, sizeof op);
    op.flops = 1000;
    op.moved_bytes = BLOCK_BYTES;
    op.scratch_bytes = 64;
    TRY(run, msc_graph_add_op(run->graph, name, &op, NULL, &run->err));
    return MSC_OK;
}

static msc_status add_modules(life *run, block *blocks)
{
    msc_module desc;
    uint32_t i;

    memset(&desc, 0, sizeof desc);
    desc.parent = MSC_NONE;
    desc.flags = MSC_MODULE_ROOT;
    TRY(run, msc_graph_add_module(run->graph, "", "Model", &desc, NULL, &run->err));
    desc.parent = 0;
    desc.flags = 0;
    desc.structure = 1;
    for (i = 0; i < BLOCKS; i++) {
        char path[16];
        (void)snprintf(path, sizeof path, "layer.%u", i);
        TRY(run, msc_graph_add_module(run->graph, path, "Block", &desc, &blocks[i].module, &run->err));
        TRY(run,
            msc_graph_add_resident(run->graph, 512, MSC_CATEGORY_PARAMETER, &blocks[i].weight, &run->err));
    }
    TRY(run, msc_graph_mark_module(run->graph, blocks[0].module, 0, 128, &run->err));
    return MSC_OK;
}

/* input -> linear -> inner -> gelu -> output; both inputs are saved, each just before its operation. */
static msc_status add_forward(life *run, uint32_t input, block *b)
{
    msc_graph *graph = run->graph;
    uint32_t call;
    uint32_t inner;

    TRY(run, msc_graph_begin_call(graph, b->module, &call, &run->err));
    TRY(run, msc_graph_add_input(graph, call, input, &run->err));
    TRY(run, msc_graph_add_save(graph, input, &b->input_save, &run->err));
    TRY(run, add_op(run, "linear"));
    TRY(run, msc_graph_add_buffer(graph, 4 * BLOCK_BYTES, MSC_CATEGORY_ACTIVATION, &inner, &run->err));
    TRY(run, msc_graph_add_save(graph, inner, &b->inner_save, &run->err));
    TRY(run, add_op(run, "gelu"));
    TRY(run, msc_graph_add_buffer(graph, BLOCK_BYTES, MSC_CATEGORY_ACTIVATION, &b->output, &run->err));
    TRY(run, msc_graph_end_buffer(graph, inner, &run->err));
    TRY(run, msc_graph_end_call(graph, call, &run->err));
    return MSC_OK;
}

static msc_status add_backward(life *run, const block *b)
{
    msc_graph *graph = run->graph;
    uint32_t gradient;

    TRY(run, msc_graph_unpack(graph, b->inner_save, &run->err));
    TRY(run, add_op(run, "gelu_backward"));
    TRY(run, msc_graph_add_buffer(graph, 4 * BLOCK_BYTES, MSC_CATEGORY_TEMPORARY, &gradient, &run->err));
    TRY(run, msc_graph_release(graph, b->inner_save, &run->err));
    TRY(run, msc_graph_unpack(graph, b->input_save, &run->err));
    TRY(run, add_op(run, "linear_backward"));
    TRY(run, msc_graph_end_buffer(graph, gradient, &run->err));
    TRY(run, msc_graph_release(graph, b->input_save, &run->err));
    return MSC_OK;
}

static msc_status build(life *run)
{
    block blocks[BLOCKS];
    uint32_t model;
    uint32_t input;
    uint32_t i;

    memset(blocks, 0, sizeof blocks);
    MAKE(run, run->graph, msc_graph_create(run->ctx, &run->graph, &run->err));
    TRY(run, add_modules(run, blocks));
    TRY(run, msc_graph_add_resident(run->graph, BLOCK_BYTES, MSC_CATEGORY_INPUT, &input, &run->err));
    TRY(run, msc_graph_begin_call(run->graph, 0, &model, &run->err));
    for (i = 0; i < BLOCKS; i++) {
        TRY(run, add_forward(run, input, &blocks[i]));
        /* Out of call order, so that finishing has to sort. */
        TRY(run, msc_graph_add_input(run->graph, model, blocks[i].weight, &run->err));
        if (i > 0)
            TRY(run, msc_graph_end_buffer(run->graph, input, &run->err));
        input = blocks[i].output;
    }
    TRY(run, msc_graph_end_call(run->graph, model, &run->err));
    TRY(run, msc_graph_set_phase(run->graph, MSC_PHASE_BACKWARD, &run->err));
    for (i = BLOCKS; i-- > 0;)
        TRY(run, add_backward(run, &blocks[i]));
    TRY(run, msc_graph_set_phase(run->graph, MSC_PHASE_OPTIMIZER, &run->err));
    for (i = 0; i < BLOCKS; i++) {
        TRY(run, add_op(run, "adamw"));
        TRY(run, msc_graph_add_write(run->graph, blocks[i].weight, &run->err));
    }
    TRY(run, msc_graph_finish(run->graph, &run->err));
    return MSC_OK;
}

static msc_status copy_graph(life *run)
{
    size_t bytes;

    TRY(run, msc_graph_format(run->graph, text, sizeof text, &bytes, &run->err));
    assert_true(bytes < sizeof text);
    MAKE(run, run->parsed_graph, msc_graph_parse(run->ctx, text, bytes, &run->parsed_graph, &run->err));
    assert_true(msc_graph_digest(run->parsed_graph) == msc_graph_digest(run->graph));
    TRY(run, msc_graph_save_file(run->graph, GRAPH_FILE, &run->err));
    MAKE(run, run->loaded_graph, msc_graph_load_file(run->ctx, GRAPH_FILE, &run->loaded_graph, &run->err));
    assert_true(msc_graph_digest(run->loaded_graph) == msc_graph_digest(run->graph));
    return MSC_OK;
}

static msc_status decide(life *run)
{
    msc_decide_options options = msc_decide_options_default();
    msc_frontier_point points[4];
    size_t count;
    size_t bytes;

    options.allow_offload = 1;
    options.link.least_bytes = 1;
    options.budget_bytes = 1; /* cannot be met: the search goes all the way to the smallest plan */
    MAKE(run, run->plan, msc_decide(run->ctx, run->graph, &options, &run->plan, &run->err));
    TRY(run, msc_decide_frontier(run->ctx, run->graph, &options, points, 4, &count, &run->err));
    assert_true(count >= 2);
    TRY(run, msc_plan_format(run->plan, text, sizeof text, &bytes, &run->err));
    assert_true(bytes < sizeof text);
    MAKE(run, run->parsed_plan, msc_plan_parse(run->ctx, text, bytes, &run->parsed_plan, &run->err));
    assert_true(msc_plan_digest(run->parsed_plan) == msc_plan_digest(run->plan));
    assert_true(msc_plan_get_summary(run->plan)->away_peak_bytes > 0);
    return MSC_OK;
}

static msc_status replay(life *run)
{
    msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);
    msc_replay result;

    MAKE(run, run->trace,
         msc_trace_create(run->ctx, run->loaded_graph, run->parsed_plan, &run->trace, &run->err));
    MAKE(run, run->sim, msc_sim_create(run->ctx, &options, &run->sim, &run->err));
    TRY(run, msc_trace_replay(run->trace, run->sim, NULL, 0, &result, &run->err));
    assert_true(result.peak_bytes > 0);
    TRY(run, msc_sim_validate(run->sim, &run->err));
    return MSC_OK;
}

static msc_status live(life *run)
{
    TRY(run, build(run));
    TRY(run, copy_graph(run));
    TRY(run, decide(run));
    TRY(run, replay(run));
    return MSC_OK;
}

static void destroy(life *run)
{
    msc_sim_destroy(run->sim);
    msc_trace_destroy(run->trace);
    msc_plan_destroy(run->parsed_plan);
    msc_plan_destroy(run->plan);
    msc_graph_destroy(run->loaded_graph);
    msc_graph_destroy(run->parsed_graph);
    msc_graph_destroy(run->graph);
    assert_int_equal(msc_context_held_bytes(run->ctx), 0);
    msc_context_destroy(run->ctx);
    assert_true(failing_alloc_is_clean(&heap));
}

/* One run on a heap that was set up by the caller. False when the context itself could not be had. */
static bool open_life(life *run)
{
    memset(run, 0, sizeof *run);
    run->ctx = failing_alloc_context(&heap);
    if (run->ctx == NULL)
        assert_true(failing_alloc_is_clean(&heap));
    return run->ctx != NULL;
}

/* Requests of a run in which none fails. */
static uint64_t requests_in_all(void)
{
    life run;

    failing_alloc_init(&heap, FAILING_ALLOC_NEVER);
    assert_true(open_life(&run));
    assert_int_equal(live(&run), MSC_OK);
    destroy(&run);
    return heap.request_count;
}

/* Whether request `n` of `total` is one that fails in a pass. */
static bool is_tried(uint64_t n, uint64_t total, unsigned pass)
{
    unsigned stride = failing_alloc_wanted("few") ? FEW * STRIDE : STRIDE;

    if (n < DENSE || n + DENSE > total || failing_alloc_wanted("all"))
        return true;
    return n % stride == pass;
}

static void fail_requests(bool fail_rest, unsigned pass)
{
    uint64_t total = requests_in_all();
    uint64_t n;

    for (n = 0; n < MOST_RUNS; n++) {
        life run;
        msc_status status;

        if (!is_tried(n, total, pass))
            continue;
        failing_alloc_init(&heap, n);
        heap.fail_rest = fail_rest;
        if (!open_life(&run)) {
            assert_int_equal(n, 0);
            continue;
        }
        status = live(&run);
        if (status == MSC_OK) {
            assert_int_equal(heap.failed_count, 0);
            destroy(&run);
            break;
        }
        assert_int_equal(status, MSC_ENOMEM);
        assert_int_equal(run.err.status, MSC_ENOMEM);
        assert_true(run.err.message[0] != '\0');
        destroy(&run);
    }
    assert_in_range(n, 20, MOST_RUNS - 1);
    (void)remove(GRAPH_FILE);
}

static void test_one_request_fails(void **state)
{
    (void)state;
    fail_requests(false, 0);
}

static void test_rest_fails_too(void **state)
{
    (void)state;
    fail_requests(true, 1);
}

static void test_repeated_calls_give_the_same(void **state)
{
    uint64_t total = requests_in_all();
    uint64_t graph_digest = 0;
    uint64_t plan_digest = 0;
    uint64_t n;

    (void)state;
    /* Run 0 is undisturbed, run n fails request n once; request 0 is the context's own. */
    for (n = 0; n < MOST_RUNS; n++) {
        life run;

        if (!is_tried(n, total, 2))
            continue;
        failing_alloc_init(&heap, n == 0 ? FAILING_ALLOC_NEVER : n);
        assert_true(open_life(&run));
        run.repeats = true;
        assert_int_equal(live(&run), MSC_OK);
        if (n == 0) {
            graph_digest = msc_graph_digest(run.graph);
            plan_digest = msc_plan_digest(run.plan);
        }
        assert_true(msc_graph_digest(run.graph) == graph_digest);
        assert_true(msc_plan_digest(run.plan) == plan_digest);
        destroy(&run);
        if (n > 0 && heap.failed_count == 0)
            break;
    }
    assert_in_range(n, 20, MOST_RUNS - 1);
    (void)remove(GRAPH_FILE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"life/one-request-fails", test_one_request_fails, NULL, NULL, NULL},
        {"life/rest-fails-too", test_rest_fails_too, NULL, NULL, NULL},
        {"life/repeated-calls-give-the-same", test_repeated_calls_give_the_same, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("oom", tests, NULL, NULL);
}
