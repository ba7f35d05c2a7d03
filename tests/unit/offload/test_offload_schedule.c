/* SPDX-License-Identifier: Apache-2.0 */
/* Which block is expected next: reversed at first, as recorded afterwards, and what happens on surprises. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "offload/offload_schedule.h"
#include "oom/failing_alloc.h"

static failing_alloc heap;
static msc_context *ctx;
static msc__schedule schedule;

static int open_schedule(void **state)
{
    (void)state;
    failing_alloc_init(&heap, FAILING_ALLOC_NEVER);
    ctx = failing_alloc_context(&heap);
    memset(&schedule, 0, sizeof schedule);
    return ctx == NULL;
}

static int close_schedule(void **state)
{
    (void)state;
    msc__schedule_fini(ctx, &schedule);
    msc_context_destroy(ctx);
    return !failing_alloc_is_clean(&heap);
}

static void put(uint64_t bytes, uint32_t expected)
{
    uint32_t ordinal = 99;

    assert_int_equal(msc__schedule_put(ctx, &schedule, bytes, &ordinal, NULL), MSC_OK);
    assert_int_equal(ordinal, expected);
}

static void put_all(const uint64_t *bytes, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        put(bytes[i], i);
}

/* What is expected from here on. */
static void expect(const uint32_t *ordinals, uint32_t count)
{
    msc__schedule_walk walk = msc__schedule_ahead(&schedule);
    uint32_t i;

    for (i = 0; i < count; i++)
        assert_int_equal(msc__schedule_next(&walk), ordinals[i]);
    assert_int_equal(msc__schedule_next(&walk), MSC_NONE);
}

static const uint64_t sizes[] = {10, 20, 30, 40};

static void use_all(const uint32_t *order)
{
    uint32_t i;

    for (i = 0; i < 4; i++)
        msc__schedule_use(ctx, &schedule, order[i]);
}

static void reversed_at_first(void **state)
{
    (void)state;
    expect(NULL, 0);
    put_all(sizes, 4);
    expect((const uint32_t[]){3, 2, 1, 0}, 4);
    msc__schedule_use(ctx, &schedule, 2);
    expect((const uint32_t[]){1, 0}, 2);
    assert_false(msc__schedule_step(ctx, &schedule));
}

static void recorded_afterwards(void **state)
{
    static const uint32_t order[] = {3, 0, 2, 1};

    (void)state;
    put_all(sizes, 4);
    use_all(order);
    (void)msc__schedule_step(ctx, &schedule);
    put_all(sizes, 4);
    expect(order, 4);
    msc__schedule_use(ctx, &schedule, 3);
    expect(order + 1, 3);
    msc__schedule_use(ctx, &schedule, 0);
    msc__schedule_use(ctx, &schedule, 2);
    msc__schedule_use(ctx, &schedule, 1);
    expect(NULL, 0);
    assert_true(msc__schedule_step(ctx, &schedule));
}

/* A use out of order is followed from where it stands, and the step counts as a surprise. */
static void surprises(void **state)
{
    (void)state;
    put_all(sizes, 4);
    use_all((const uint32_t[]){3, 2, 1, 0});
    (void)msc__schedule_step(ctx, &schedule);
    put_all(sizes, 4);
    msc__schedule_use(ctx, &schedule, 2);
    expect((const uint32_t[]){1, 0}, 2);
    assert_false(msc__schedule_step(ctx, &schedule));
}

static void other_sizes_and_numbers(void **state)
{
    static const uint64_t others[] = {10, 20, 31, 40};
    static const uint32_t order[] = {0, 1, 2, 3};

    (void)state;
    put_all(sizes, 4);
    use_all(order);
    (void)msc__schedule_step(ctx, &schedule);
    put_all(others, 4);
    expect((const uint32_t[]){3, 2, 1, 0}, 4); /* a size differs */
    use_all(order);
    assert_false(msc__schedule_step(ctx, &schedule));
    put_all(others, 3);
    expect((const uint32_t[]){2, 1, 0}, 3); /* fewer than in the step before */
    put(40, 3);
    expect(order, 4);
    put(50, 4);
    expect((const uint32_t[]){4, 3, 2, 1, 0}, 5); /* and more */
}

/* Gradients leave while backward uses what forward has put, and the next step does the same. */
static void puts_between_uses(void **state)
{
    uint32_t step;

    (void)state;
    for (step = 0; step < 3; step++) {
        put_all(sizes, 3);
        expect(step == 0 ? (const uint32_t[]){2, 1, 0} : (const uint32_t[]){1, 2, 0}, 3);
        msc__schedule_use(ctx, &schedule, 1);
        put(99, 3);
        if (step > 0)
            expect((const uint32_t[]){2, 0}, 2);
        msc__schedule_use(ctx, &schedule, 2);
        msc__schedule_use(ctx, &schedule, 0);
        assert_int_equal(msc__schedule_step(ctx, &schedule), step > 0);
    }
    put_all(sizes, 3);
    msc__schedule_use(ctx, &schedule, 1);
    put(98, 3); /* another size */
    expect((const uint32_t[]){0}, 1);
}

/* A block that is used twice (`retain_graph`) is expected twice. */
static void used_twice(void **state)
{
    static const uint32_t order[] = {1, 0, 1, 0};

    (void)state;
    put_all(sizes, 2);
    use_all(order);
    (void)msc__schedule_step(ctx, &schedule);
    put_all(sizes, 2);
    expect(order, 4);
    use_all(order);
    assert_true(msc__schedule_step(ctx, &schedule));
}

/* What was put and not used is no step; the order of the one before it stays. */
static void forgotten(void **state)
{
    static const uint32_t order[] = {3, 0, 2, 1};

    (void)state;
    put_all(sizes, 3);
    msc__schedule_forget(&schedule);
    put_all(sizes, 4);
    expect((const uint32_t[]){3, 2, 1, 0}, 4);
    use_all(order);
    (void)msc__schedule_step(ctx, &schedule);
    put_all((const uint64_t[]){7, 8}, 2);
    msc__schedule_forget(&schedule);
    put_all(sizes, 4);
    expect(order, 4);
    use_all(order);
    assert_true(msc__schedule_step(ctx, &schedule));
}

static void a_run_that_repeats_allocates_nothing(void **state)
{
    uint64_t requests = 0;
    int step;

    (void)state;
    for (step = 0; step < 10; step++) {
        if (step == 1)
            requests = heap.request_count;
        put_all(sizes, 4);
        use_all((const uint32_t[]){3, 1, 2, 0});
        (void)msc__schedule_step(ctx, &schedule);
    }
    assert_int_equal(heap.request_count, requests);
}

/* Without memory for the record a step is expected in reverse; a put that cannot be recorded is refused whole. */
static void without_memory(void **state)
{
    uint32_t ordinal = 99;

    (void)state;
    heap.fail_at = heap.request_count;
    heap.fail_rest = true;
    assert_int_equal(msc__schedule_put(ctx, &schedule, 10, &ordinal, NULL), MSC_ENOMEM);
    assert_int_equal(ordinal, 99);
    heap.fail_at = FAILING_ALLOC_NEVER;
    heap.fail_rest = false;
    put_all(sizes, 4);
    heap.fail_at = heap.request_count;
    heap.fail_rest = true;
    use_all((const uint32_t[]){0, 1, 2, 3});
    (void)msc__schedule_step(ctx, &schedule);
    heap.fail_at = FAILING_ALLOC_NEVER;
    heap.fail_rest = false;
    put_all(sizes, 4);
    expect((const uint32_t[]){3, 2, 1, 0}, 4);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, open_schedule, close_schedule)
    const struct CMUnitTest tests[] = {
        CASE(reversed_at_first), CASE(recorded_afterwards),
        CASE(surprises),         CASE(other_sizes_and_numbers),
        CASE(puts_between_uses), CASE(used_twice),
        CASE(forgotten),         CASE(a_run_that_repeats_allocates_nothing),
        CASE(without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
