/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structs of other versions of the headers: each kind of options cut off anywhere behind what it cannot do without, and
 * longer than the library knows; results of callers that know less, or more. Structs lie in memory of exactly their size,
 * so that a sanitizer sees who reads or writes on.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/sized.h"
#include "memscale/memscale.h"

#define MORE 40u

static msc_context *ctx;
static msc_device *host;
static msc_graph *graph;
static msc_error err;

/* ---- what takes options ----------------------------------------------------------------------------- */

static msc_status use_context(const void *options)
{
    msc_context *made;
    msc_status status = msc_context_create(options, &made, &err);

    msc_context_destroy(made);
    return status;
}

static msc_status use_device(const void *options)
{
    msc_device *made;
    msc_status status = msc_device_create(ctx, options, &made, &err);

    msc_device_destroy(made);
    return status;
}

static msc_status use_offload(const void *options)
{
    msc_context *own;
    msc_offload *made = NULL;
    msc_status status = msc_context_create(NULL, &own, &err);

    if (status == MSC_OK)
        status = msc_offload_create(own, host, options, &made, &err);
    msc_offload_destroy(made);
    msc_context_destroy(own);
    return status;
}

static msc_status use_optim(const void *options)
{
    msc_optim *made;
    msc_status status = msc_optim_create(ctx, options, &made, &err);

    msc_optim_destroy(made);
    return status;
}

static msc_status use_rule(const void *options)
{
    float weight = 1;
    float gradient = 1;
    float moments[2] = {0, 0};
    msc_optim_tensor tensor = {.count = 1, .step = 1, .gradient = &gradient, .weight = &weight};
    msc_optim_sizes sizes;
    msc_optim *optim;
    msc_status status = msc_optim_tensor_sizes(options, 1, &sizes, &err);

    if (status != MSC_OK)
        return status;
    tensor.moment1 = &moments[0];
    tensor.moment2 = &moments[1];
    status = msc_optim_create(ctx, NULL, &optim, &err);
    if (status == MSC_OK)
        status = msc_optim_step(optim, options, &tensor, 1, &err);
    msc_optim_destroy(optim);
    assert_true(status != MSC_OK || weight < 1); /* gradient_scale is not 0 */
    return status;
}

/* It has read them when it looks at the device. */
static msc_status use_table(const void *options)
{
    msc_fingerprint_table *made;
    msc_status status = msc_fingerprint_table_create(ctx, options, &made, &err);

    assert_null(made);
    return status == MSC_EUNSUPPORTED ? MSC_OK : status;
}

static msc_status use_sim(const void *options)
{
    msc_sim *made;
    msc_status status = msc_sim_create(ctx, options, &made, &err);

    msc_sim_destroy(made);
    return status;
}

/* Read and written. */
static msc_status use_sim_text(const void *options)
{
    size_t bytes;
    size_t room;
    msc_sim_options *copy;
    msc_status status;

    memcpy(&bytes, options, sizeof bytes);
    room = bytes > sizeof bytes ? bytes : sizeof bytes;
    copy = malloc(room);
    assert_non_null(copy);
    memcpy(copy, options, room);
    status = msc_sim_options_parse("expandable_segments:True", UINT64_MAX, copy, &err);
    assert_int_equal(copy->struct_bytes, bytes);
    if (status == MSC_OK && bytes >= sizeof *copy)
        assert_int_equal(copy->expandable_segments, 1);
    free(copy);
    return status;
}

static msc_status use_decide(const void *options)
{
    msc_plan *plan;
    msc_status status = msc_decide(ctx, graph, options, &plan, &err);

    msc_plan_destroy(plan);
    return status;
}

/* Whose size is that of the caller, inside of a whole struct. */
static msc_status use_rates(const void *rates)
{
    msc_decide_options options = msc_decide_options_default();
    size_t bytes;

    memcpy(&bytes, rates, sizeof bytes);
    if (bytes > sizeof options.rates)
        return MSC_OK; /* a struct in another never grows */
    memset(&options.rates, 0, sizeof options.rates);
    memcpy(&options.rates, rates, bytes > sizeof bytes ? bytes : sizeof bytes);
    if (bytes >= MSC__THROUGH(msc_rates, moved_bytes_per_us)) {
        static const msc_op op = {.flops = 100000000};
        msc_rates whole = msc_rates_default();

        assert_int_equal(msc_op_time_ns(&op, rates), msc_op_time_ns(&op, &whole));
    }
    return use_decide(&options);
}

/* ---- every size --------------------------------------------------------------------------------------- */

static void *of_size(const void *from, size_t from_bytes, size_t bytes)
{
    void *made = calloc(1, bytes > sizeof bytes ? bytes : sizeof bytes);

    assert_non_null(made);
    memcpy(made, from, from_bytes < bytes ? from_bytes : bytes);
    memcpy(made, &bytes, sizeof bytes);
    return made;
}

static void every_size(const void *defaults, size_t bytes, size_t first_bytes,
                       msc_status (*use)(const void *))
{
    void *given;
    size_t size;

    for (size = 0; size <= bytes + MORE; size++) {
        msc_status status;

        given = of_size(defaults, bytes, size);
        status = use(given);
        free(given);
        if (status != (size < first_bytes ? MSC_EINVAL : MSC_OK))
            fail_msg("%zu bytes of %zu: %s, %s", size, bytes, msc_status_name(status), err.message);
        if (size < first_bytes)
            assert_non_null(strstr(err.message, "struct_bytes"));
    }
}

/* Something set that the library does not know. */
static void unknown_field(const void *defaults, size_t bytes, msc_status (*use)(const void *))
{
    char *given = of_size(defaults, bytes, bytes + MORE);

    given[bytes + MORE - 1] = 1;
    assert_int_equal(use(given), MSC_EINVAL);
    assert_non_null(strstr(err.message, "not zero"));
    free(given);
}

#define EVERY(type, made, field, use)                                                                        \
    do {                                                                                                     \
        type defaults_ = (made);                                                                             \
        every_size(&defaults_, sizeof defaults_, MSC__THROUGH(type, field), (use));                          \
    } while (0)

static void options_of_every_size(void **state)
{
    msc_offload_options offload = msc_offload_options_default();
    msc_fingerprint_table_options table = msc_fingerprint_table_options_default();

    (void)state;
    offload.limit_bytes[MSC_TIER_HOST] = 1u << 20;
    table.device = host;
    EVERY(msc_context_options, msc_context_options_default(), allocator, use_context);
    EVERY(msc_device_options, msc_device_options_default(), ordinal, use_device);
    EVERY(msc_offload_options, offload, limit_bytes, use_offload);
    EVERY(msc_optim_options, msc_optim_options_default(), thread_count, use_optim);
    EVERY(msc_optim_rule, msc_optim_rule_default(MSC_OPTIM_KIND_ADAMW), moments, use_rule);
    EVERY(msc_optim_rule, msc_optim_rule_default(MSC_OPTIM_KIND_LION), moments, use_rule);
    EVERY(msc_fingerprint_table_options, table, device, use_table);
    EVERY(msc_sim_options, msc_sim_options_default(MSC_SIM_HOST), capacity_bytes, use_sim);
    EVERY(msc_sim_options, msc_sim_options_default(MSC_SIM_CUDA), capacity_bytes, use_sim);
    EVERY(msc_sim_options, msc_sim_options_default(MSC_SIM_CUDA), capacity_bytes, use_sim_text);
    EVERY(msc_decide_options, msc_decide_options_default(), rates, use_decide);
    EVERY(msc_rates, msc_rates_default(), moved_bytes_per_us, use_rates);
}

static void options_of_a_newer_caller(void **state)
{
    msc_context_options context = msc_context_options_default();
    msc_device_options device = msc_device_options_default();
    msc_offload_options offload = msc_offload_options_default();
    msc_optim_options optim = msc_optim_options_default();
    msc_optim_rule rule = msc_optim_rule_default(MSC_OPTIM_KIND_SGD);
    msc_fingerprint_table_options table = msc_fingerprint_table_options_default();
    msc_sim_options sim = msc_sim_options_default(MSC_SIM_CUDA);
    msc_decide_options decide = msc_decide_options_default();

    (void)state;
    unknown_field(&context, sizeof context, use_context);
    unknown_field(&device, sizeof device, use_device);
    unknown_field(&offload, sizeof offload, use_offload);
    unknown_field(&optim, sizeof optim, use_optim);
    unknown_field(&rule, sizeof rule, use_rule);
    unknown_field(&table, sizeof table, use_table);
    unknown_field(&sim, sizeof sim, use_sim);
    unknown_field(&decide, sizeof decide, use_decide);
}

/* What a caller of another version gets from `_init` is good for its size, and in it. */
static void defaults_of_every_size(void **state)
{
    msc_offload_options whole = msc_offload_options_default();
    size_t size;

    (void)state;
    for (size = 0; size <= sizeof whole + MORE; size++) {
        char *made = malloc(size > 0 ? size : 1);
        size_t both = size < sizeof whole ? size : sizeof whole;

        assert_non_null(made);
        msc_offload_options_init((msc_offload_options *)(void *)made, size);
        if (size >= sizeof size) {
            assert_memory_equal(made, &size, sizeof size);
            assert_memory_equal(made + sizeof size, (char *)&whole + sizeof size, both - sizeof size);
        }
        while (size > both && made[both] == 0)
            both++;
        assert_int_equal(both, size);
        free(made);
    }
}

/* ---- results ------------------------------------------------------------------------------------------ */

static void check_result(const char *got, size_t size, const void *whole, size_t bytes)
{
    size_t both = size < bytes ? size : bytes;

    assert_memory_equal(got, whole, both);
    while (both < size && got[both] == 0)
        both++;
    assert_int_equal(both, size);
}

static void results_of_every_size(void **state)
{
    msc_offload_options options = msc_offload_options_default();
    msc_offload_counters counters;
    msc_sim_memory_stats stats;
    msc_context *own;
    msc_offload *engine;
    msc_sim_options sim_options = msc_sim_options_default(MSC_SIM_CUDA);
    msc_sim *sim;
    size_t size;

    (void)state;
    options.limit_bytes[MSC_TIER_HOST] = 1u << 20;
    assert_int_equal(msc_context_create(NULL, &own, &err), MSC_OK);
    assert_int_equal(msc_offload_create(own, host, &options, &engine, &err), MSC_OK);
    counters = msc_offload_counters_now(engine);
    assert_true(counters.table_bytes > 0);
    assert_int_equal(msc_sim_create(ctx, &sim_options, &sim, &err), MSC_OK);
    assert_int_equal(msc_sim_alloc(sim, 0, 1000, 0, &err), MSC_OK);
    msc_sim_get_memory_stats(sim, &stats);
    for (size = 1; size < sizeof stats + MORE; size += 13) {
        char *got = malloc(size);

        assert_non_null(got);
        msc_sim_memory_stats_read(sim, (msc_sim_memory_stats *)(void *)got, size);
        check_result(got, size, &stats, sizeof stats);
        msc_offload_counters_read(engine, (msc_offload_counters *)(void *)got, size);
        check_result(got, size, &counters, sizeof counters);
        free(got);
    }
    msc_sim_destroy(sim);
    msc_offload_destroy(engine);
    msc_context_destroy(own);
}

/* ---- all of it ---------------------------------------------------------------------------------------- */

static int begin(void **state)
{
    uint32_t op;
    msc_op add = {.flops = 1, .moved_bytes = 8};

    (void)state;
    return !(msc_context_create(NULL, &ctx, &err) == MSC_OK &&
             msc_device_create(ctx, NULL, &host, &err) == MSC_OK &&
             msc_graph_create(ctx, &graph, &err) == MSC_OK &&
             msc_graph_add_op(graph, "add", &add, &op, &err) == MSC_OK &&
             msc_graph_finish(graph, &err) == MSC_OK);
}

static int finish(void **state)
{
    (void)state;
    msc_graph_destroy(graph);
    msc_device_destroy(host);
    msc_context_destroy(ctx);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_of_every_size),
        cmocka_unit_test(options_of_a_newer_caller),
        cmocka_unit_test(defaults_of_every_size),
        cmocka_unit_test(results_of_every_size),
    };
    return cmocka_run_group_tests(tests, begin, finish);
}
