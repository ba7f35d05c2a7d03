/* SPDX-License-Identifier: Apache-2.0 */
/* Time of operations: classes of work, precision, fresh memory, and sums that nothing can make overflow. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "decide/decide_cost.h"
#include "synth.h"

static void operation_time(void **state)
{
    const msc_rates rates = msc_rates_default();
    const msc_op computes = {.flops = 100000000, .moved_bytes = 1000};
    const msc_op moves = {.flops = 1, .moved_bytes = 20000000};
    const msc_op part = {.moved_bytes = 30};
    const msc_op nothing = {0};

    (void)state;
    assert_int_equal(msc_op_time_ns(&nothing, &rates), 5000);
    assert_int_equal(msc_op_time_ns(&computes, &rates), 5000 + 1000000);
    assert_int_equal(msc_op_time_ns(&moves, &rates), 5000 + 1000000);
    assert_int_equal(msc_op_time_ns(&part, &rates), 5001);
}

static void extreme_rates(void **state)
{
    const msc_op endless = {.flops = UINT64_MAX, .moved_bytes = UINT64_MAX, .scratch_bytes = UINT64_MAX};
    msc_rates slow = msc_rates_default();

    (void)state;
    slow.flops_per_us[0] = UINT64_MAX;
    slow.moved_bytes_per_us[0] = 1;
    slow.launch_ns = 10;
    assert_int_equal(msc_op_time_ns(&endless, &slow), INT64_MAX);
    assert_in_range(msc_op_time_ns(&(msc_op){.flops = UINT64_MAX / 2}, &slow), 509, 511);
    slow.moved_bytes_per_us[0] = UINT64_MAX;
    slow.fresh_from_bytes = 1;
    slow.fresh_bytes_per_us = 1;
    assert_int_equal(msc_op_time_ns(&endless, &slow), INT64_MAX);
}

/* Each class has its own rates, once in full and once in half precision. */
static void classes(void **state)
{
    msc_rates rates = msc_rates_default();
    uint32_t kind;

    (void)state;
    for (kind = 0; kind < MSC_RATE_COUNT; kind++) {
        rates.flops_per_us[kind] = kind + 1;
        rates.moved_bytes_per_us[kind] = 1000 * (kind + 1);
    }
    for (kind = 0; kind < MSC_RATE_COUNT; kind++) {
        msc_op op = {.work = (uint8_t)(kind % MSC_WORK_COUNT), .flops = 10000};
        op.flags = kind >= MSC_WORK_COUNT ? MSC_OP_HALF : MSC_OP_RANDOM;
        assert_int_equal(MSC_RATE_OF(&op), kind);
        assert_int_equal(msc_op_time_ns(&op, &rates), 5000 + 10000 * 1000 / (kind + 1));
        op.flops = 0;
        op.moved_bytes = 1000000;
        assert_int_equal(msc_op_time_ns(&op, &rates), 5000 + 1000000 / (kind + 1));
    }
}

static void names(void **state)
{
    uint32_t kind;
    uint32_t other;

    (void)state;
    assert_string_equal(msc_rate_name(MSC_WORK_MATRIX), "matrix");
    assert_string_equal(msc_rate_name(MSC_WORK_COUNT + MSC_WORK_RECURRENT), "recurrent_half");
    assert_string_equal(msc_rate_name(MSC_RATE_COUNT), "");
    for (kind = 0; kind < MSC_WORK_COUNT; kind++) {
        const char *full = msc_rate_name(kind);
        const char *half = msc_rate_name(kind + MSC_WORK_COUNT);
        assert_memory_equal(half, full, strlen(full));
        assert_string_equal(half + strlen(full), "_half");
        for (other = 0; other < kind; other++)
            assert_string_not_equal(full, msc_rate_name(other));
    }
}

/* A parameter, and operations that make buffers of 99, 100 and 300 bytes and take scratch of 200. */
static msc_graph *large_buffers(msc_context *ctx)
{
    const msc_op plain = {.moved_bytes = 20000};
    const msc_op scratches = {.moved_bytes = 20000, .scratch_bytes = 200};
    msc_graph *graph = NULL;

    assert_int_equal(msc_graph_create(ctx, &graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(graph, 1000, MSC_CATEGORY_PARAMETER, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(graph, "small", &plain, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(graph, 99, MSC_CATEGORY_ACTIVATION, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(graph, "two", &plain, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(graph, 100, MSC_CATEGORY_ACTIVATION, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(graph, 300, MSC_CATEGORY_ACTIVATION, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(graph, "scratches", &scratches, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_finish(graph, NULL), MSC_OK);
    return graph;
}

static void fresh_memory(void **state)
{
    msc_rates rates = msc_rates_default();
    msc_context *ctx = NULL;
    msc_graph *graph;
    int64_t times_ns[3];

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    graph = large_buffers(ctx);
    msc_op_times_ns(graph, &rates, times_ns);
    assert_int_equal(times_ns[0], 6000);
    assert_int_equal(times_ns[1], 6000);
    assert_int_equal(times_ns[2], 6000);
    rates.fresh_from_bytes = 100;
    rates.fresh_bytes_per_us = 1;
    msc_op_times_ns(graph, &rates, times_ns);
    assert_int_equal(times_ns[0], 6000);
    assert_int_equal(times_ns[1], 6000 + 400000);
    assert_int_equal(times_ns[2], 6000 + 200000);
    msc_graph_destroy(graph);
    msc_context_destroy(ctx);
}

/* Whatever the rates, the plain step and every candidate count for less than 2^62 ns together. */
static void sums_stay_small(void **state)
{
    const int64_t most_ns = (int64_t)1 << 60;
    msc_decide_options options = msc_decide_options_default();
    msc_context *ctx = NULL;
    msc_graph *graph;
    msc__model model;
    uint32_t i;

    (void)state;
    memset(&model, 0, sizeof model);
    for (i = 0; i < MSC_RATE_COUNT; i++)
        options.rates.moved_bytes_per_us[i] = 1;
    options.rates.launch_ns = INT64_MAX;
    options.rates.recompute_ns = INT64_MAX;
    options.rates.intercept_ns = INT64_MAX;
    options.rates.fresh_from_bytes = 1;
    options.rates.fresh_bytes_per_us = 1;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    graph = synth_transformer(ctx, 4);
    assert_non_null(graph);
    assert_int_equal(msc__model_init(&model, ctx, graph, &options, NULL), MSC_OK);
    assert_in_range(model.time_before_ns[model.op_count], 1, most_ns);
    assert_true(model.candidate_count > 0);
    for (i = 0; i < model.candidate_count; i++)
        assert_in_range(model.candidates[i].cost_ns, 1, 3 * most_ns);
    msc__model_fini(&model);
    msc_graph_destroy(graph);
    msc_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"cost/operation-time", operation_time, NULL, NULL, NULL},
        {"cost/extreme-rates", extreme_rates, NULL, NULL, NULL},
        {"cost/classes", classes, NULL, NULL, NULL},
        {"cost/names", names, NULL, NULL, NULL},
        {"cost/fresh-memory", fresh_memory, NULL, NULL, NULL},
        {"cost/sums-stay-small", sums_stay_small, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
