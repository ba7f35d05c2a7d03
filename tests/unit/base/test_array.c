/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Growable arrays: order and content over many growths, growth that is geometric, refusals that leave the
 * array as it was, and the two ends of the range.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "base/array.h"
#include "oom/failing_alloc.h"

typedef struct record {
    uint64_t key;
    uint32_t value;
} record;

static failing_alloc heap;

static msc_context *open_context(uint64_t fail_at)
{
    msc_context *ctx;

    failing_alloc_init(&heap, fail_at);
    ctx = failing_alloc_context(&heap);
    assert_non_null(ctx);
    return ctx;
}

static void close_context(msc_context *ctx)
{
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    assert_true(failing_alloc_is_clean(&heap));
}

static msc_status push(msc_context *ctx, msc__array *array, uint32_t number)
{
    record item;

    memset(&item, 0, sizeof item);
    item.key = UINT64_C(0x100000000) * number;
    item.value = number;
    return msc__array_push(ctx, array, sizeof item, &item, NULL);
}

static void assert_holds(const msc__array *array, uint32_t count)
{
    const record *items = array->items;
    uint32_t i;

    assert_int_equal(array->count, count);
    assert_true(array->capacity >= count);
    for (i = 0; i < count; i++) {
        assert_int_equal(items[i].value, i);
        assert_int_equal(items[i].key >> 32, i);
    }
}

static void test_push_keeps_order(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER);
    msc__array array = {0};
    uint32_t i;

    (void)state;
    for (i = 0; i < 1000; i++)
        assert_int_equal(push(ctx, &array, i), MSC_OK);
    assert_holds(&array, 1000);
    msc__array_fini(ctx, &array, sizeof(record));
    close_context(ctx);
}

static void test_growth_is_geometric(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER);
    msc__array array = {0};
    uint64_t before = heap.request_count;
    uint32_t i;

    (void)state;
    for (i = 0; i < 16 * 64; i++)
        assert_int_equal(push(ctx, &array, i), MSC_OK);
    assert_int_equal(heap.request_count - before, 7); /* 16, 32, 64, 128, 256, 512, 1024 */
    msc__array_fini(ctx, &array, sizeof(record));
    close_context(ctx);
}

static void test_reserve_makes_room(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER);
    msc__array array = {0};
    uint64_t requests;
    uint32_t i;

    (void)state;
    assert_int_equal(msc__array_reserve(ctx, &array, sizeof(record), 100, NULL), MSC_OK);
    assert_int_equal(array.count, 0);
    requests = heap.request_count;
    for (i = 0; i < 100; i++)
        assert_int_equal(push(ctx, &array, i), MSC_OK);
    assert_int_equal(heap.request_count, requests);
    assert_holds(&array, 100);
    msc__array_fini(ctx, &array, sizeof(record));
    close_context(ctx);
}

static void test_reserve_nothing(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER);
    msc__array array = {0};

    (void)state;
    assert_int_equal(msc__array_reserve(ctx, &array, sizeof(record), 0, NULL), MSC_OK);
    assert_null(array.items);
    msc__array_fini(ctx, &array, sizeof(record));
    close_context(ctx);
}

static void test_refusal_changes_nothing(void **state)
{
    msc_context *ctx = open_context(2); /* 0: the context, 1: first 16, 2: the growth to 32 */
    msc__array array = {0};
    msc__array before;
    msc_error err;
    record item = {0};
    uint32_t i;

    (void)state;
    for (i = 0; i < 16; i++)
        assert_int_equal(push(ctx, &array, i), MSC_OK);
    before = array;
    assert_int_equal(msc__array_push(ctx, &array, sizeof item, &item, &err), MSC_ENOMEM);
    assert_int_equal(err.status, MSC_ENOMEM);
    assert_memory_equal(&array, &before, sizeof array);
    assert_int_equal(push(ctx, &array, 16), MSC_OK); /* the next attempt succeeds */
    assert_holds(&array, 17);
    msc__array_fini(ctx, &array, sizeof(record));
    close_context(ctx);
}

static void test_most_records(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER);
    msc__array array = {0};
    msc_error err;

    (void)state;
    assert_int_equal(msc__array_reserve(ctx, &array, 1, UINT32_MAX, &err), MSC_EOVERFLOW);
    assert_int_equal(err.status, MSC_EOVERFLOW);
    array.count = UINT32_MAX; /* count + extra must not wrap in 32 bits */
    array.capacity = UINT32_MAX;
    assert_int_equal(msc__array_reserve(ctx, &array, 1, 1, &err), MSC_EOVERFLOW);
    assert_null(array.items);
    close_context(ctx);
}

static void test_byte_size_wraps(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER);
    msc__array array = {0};
    uint64_t requests = heap.request_count;

    (void)state;
    assert_int_equal(msc__array_reserve(ctx, &array, SIZE_MAX / 8, 1, NULL), MSC_ENOMEM);
    assert_int_equal(heap.request_count, requests);
    assert_null(array.items);
    assert_int_equal(array.capacity, 0);
    close_context(ctx);
}

static void test_fini_leaves_empty(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER);
    msc__array array = {0};

    (void)state;
    assert_int_equal(push(ctx, &array, 0), MSC_OK);
    msc__array_fini(ctx, &array, sizeof(record));
    assert_null(array.items);
    assert_int_equal(array.count, 0);
    assert_int_equal(push(ctx, &array, 0), MSC_OK); /* usable again */
    msc__array_fini(ctx, &array, sizeof(record));
    msc__array_fini(ctx, &array, sizeof(record));
    close_context(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"push/keeps-order", test_push_keeps_order, NULL, NULL, NULL},
        {"push/growth-is-geometric", test_growth_is_geometric, NULL, NULL, NULL},
        {"push/refusal-changes-nothing", test_refusal_changes_nothing, NULL, NULL, NULL},
        {"reserve/makes-room", test_reserve_makes_room, NULL, NULL, NULL},
        {"reserve/nothing", test_reserve_nothing, NULL, NULL, NULL},
        {"reserve/most-records", test_most_records, NULL, NULL, NULL},
        {"reserve/byte-size-wraps", test_byte_size_wraps, NULL, NULL, NULL},
        {"fini/leaves-empty", test_fini_leaves_empty, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("base/array", tests, NULL, NULL);
}
