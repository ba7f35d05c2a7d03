/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The context: its books, its limit, and what it promises to a caller's allocator. The books are checked
 * against an allocator that keeps its own.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "base/alloc.h"
#include "memscale/base.h"
#include "oom/failing_alloc.h"

static failing_alloc heap;

static msc_context *open_context(uint64_t fail_at, uint64_t limit_bytes)
{
    msc_context_options options = msc_context_options_default();
    msc_context *ctx = NULL;

    failing_alloc_init(&heap, fail_at);
    options.allocator.user = &heap;
    options.allocator.resize = failing_alloc_resize;
    options.memory_limit_bytes = limit_bytes;
    assert_int_equal(msc_context_create(&options, &ctx, NULL), MSC_OK);
    assert_non_null(ctx);
    return ctx;
}

static void close_context(msc_context *ctx)
{
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    assert_true(failing_alloc_is_clean(&heap));
}

static void test_defaults(void **state)
{
    msc_context *ctx = NULL;
    void *memory;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    memory = msc__alloc(ctx, 100);
    assert_non_null(memory);
    assert_int_equal(msc_context_held_bytes(ctx), 100);
    memory = msc__resize(ctx, memory, 100, 1000);
    assert_non_null(memory);
    msc__free(ctx, memory, 1000);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    msc_context_destroy(NULL);
}

static void test_needs_out(void **state)
{
    msc_error err;

    (void)state;
    assert_int_equal(msc_context_create(NULL, NULL, &err), MSC_EINVAL);
    assert_int_equal(err.status, MSC_EINVAL);
}

static void test_unknown_options(void **state)
{
    msc_context_options options = msc_context_options_default();
    msc_context *ctx = (msc_context *)&options; /* anything but NULL */
    msc_error err;

    (void)state;
    options.struct_bytes = 3;
    assert_int_equal(msc_context_create(&options, &ctx, &err), MSC_EINVAL);
    assert_null(ctx);
    assert_non_null(strstr(err.message, "struct_bytes"));
}

static void test_own_memory_refused(void **state)
{
    msc_context_options options = msc_context_options_default();
    msc_context *ctx = (msc_context *)&options;
    msc_error err;

    (void)state;
    failing_alloc_init(&heap, 0);
    options.allocator.user = &heap;
    options.allocator.resize = failing_alloc_resize;
    assert_int_equal(msc_context_create(&options, &ctx, &err), MSC_ENOMEM);
    assert_null(ctx);
    assert_int_equal(err.status, MSC_ENOMEM);
    assert_true(failing_alloc_is_clean(&heap));
}

static void test_books(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER, 0);
    uint64_t own_bytes = heap.outstanding_bytes;
    void *a = msc__alloc(ctx, 300);
    void *b = msc__alloc(ctx, 200);

    (void)state;
    assert_int_equal(msc_context_held_bytes(ctx), 500);
    assert_int_equal(heap.outstanding_bytes - own_bytes, 500);
    a = msc__resize(ctx, a, 300, 50);
    assert_int_equal(msc_context_held_bytes(ctx), 250);
    msc__free(ctx, b, 200);
    b = msc__alloc(ctx, 10);
    assert_int_equal(msc_context_held_bytes(ctx), 60);
    assert_int_equal(heap.outstanding_bytes - own_bytes, 60);
    assert_int_equal(msc_context_peak_bytes(ctx), 500);
    msc__free(ctx, a, 50);
    msc__free(ctx, b, 10);
    msc__free(ctx, NULL, 10);
    close_context(ctx);
}

static void test_memory_is_zeroed(void **state)
{
    static const unsigned char zeros[64];
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER, 0);
    void *memory = msc__alloc(ctx, sizeof zeros); /* the heap hands out 0xa5 */

    (void)state;
    assert_memory_equal(memory, zeros, sizeof zeros);
    msc__free(ctx, memory, sizeof zeros);
    close_context(ctx);
}

static void test_zero_bytes(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER, 0);
    uint64_t requests = heap.request_count;

    (void)state;
    assert_null(msc__alloc(ctx, 0));
    assert_int_equal(heap.request_count, requests);
    close_context(ctx);
}

static void test_resize_keeps_content(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER, 0);
    char *memory = msc__alloc(ctx, 8);

    (void)state;
    memcpy(memory, "memscale", 8);
    memory = msc__resize(ctx, memory, 8, 4096);
    assert_memory_equal(memory, "memscale", 8);
    memory = msc__resize(ctx, memory, 4096, 3);
    assert_memory_equal(memory, "mem", 3);
    msc__free(ctx, memory, 3);
    close_context(ctx);
}

static void test_refusal_changes_nothing(void **state)
{
    msc_context *ctx = open_context(2, 0); /* 0: the context, 1: the block, 2: its growth */
    char *memory = msc__alloc(ctx, 8);

    (void)state;
    memcpy(memory, "memscale", 8);
    assert_null(msc__resize(ctx, memory, 8, 16));
    assert_int_equal(msc_context_held_bytes(ctx), 8);
    assert_int_equal(msc_context_peak_bytes(ctx), 8);
    assert_memory_equal(memory, "memscale", 8);
    msc__free(ctx, memory, 8);
    close_context(ctx);
}

static void test_limit_is_exact(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER, 100);
    void *a;
    void *b;

    (void)state;
    assert_null(msc__alloc(ctx, 101));
    a = msc__alloc(ctx, 60);
    assert_non_null(a);
    assert_null(msc__alloc(ctx, 41));
    b = msc__alloc(ctx, 40);
    assert_non_null(b);
    assert_null(msc__alloc(ctx, 1));
    assert_null(msc__resize(ctx, a, 60, 61));
    a = msc__resize(ctx, a, 60, 59); /* shrinking is allowed at the limit */
    assert_non_null(a);
    a = msc__resize(ctx, a, 59, 60);
    assert_non_null(a);
    assert_int_equal(msc_context_peak_bytes(ctx), 100);
    msc__free(ctx, a, 60);
    msc__free(ctx, b, 40);
    close_context(ctx);
}

static void test_limit_against_wrap(void **state)
{
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER, 0);
    void *memory = msc__alloc(ctx, 64);
    uint64_t requests = heap.request_count;

    (void)state;
    /* 64 held and SIZE_MAX more would wrap to 63: it must not reach the allocator. */
    assert_null(msc__alloc(ctx, SIZE_MAX));
    assert_int_equal(heap.request_count, requests);
    assert_int_equal(msc_context_held_bytes(ctx), 64);
    msc__free(ctx, memory, 64);
    close_context(ctx);
}

static void test_contexts_are_independent(void **state)
{
    msc_context *other = NULL;
    msc_context *ctx = open_context(FAILING_ALLOC_NEVER, 0);
    void *memory;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &other, NULL), MSC_OK);
    memory = msc__alloc(other, 32);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    assert_int_equal(msc_context_peak_bytes(ctx), 0);
    msc__free(other, memory, 32);
    msc_context_destroy(other);
    close_context(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"create/defaults", test_defaults, NULL, NULL, NULL},
        {"create/needs-out", test_needs_out, NULL, NULL, NULL},
        {"create/unknown-options", test_unknown_options, NULL, NULL, NULL},
        {"create/own-memory-refused", test_own_memory_refused, NULL, NULL, NULL},
        {"alloc/books", test_books, NULL, NULL, NULL},
        {"alloc/is-zeroed", test_memory_is_zeroed, NULL, NULL, NULL},
        {"alloc/zero-bytes", test_zero_bytes, NULL, NULL, NULL},
        {"resize/keeps-content", test_resize_keeps_content, NULL, NULL, NULL},
        {"resize/refusal-changes-nothing", test_refusal_changes_nothing, NULL, NULL, NULL},
        {"limit/exact", test_limit_is_exact, NULL, NULL, NULL},
        {"limit/against-wrap", test_limit_against_wrap, NULL, NULL, NULL},
        {"contexts/independent", test_contexts_are_independent, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("base/context", tests, NULL, NULL);
}
