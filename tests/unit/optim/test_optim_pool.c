/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that share a job: every item is done once, all threads get to work, and a call does not end before they do.
 */
#include "optim_fixture.h"

#include <stdatomic.h>
#include <string.h>

#include "optim/optim_pool.h"

#define ITEMS 1000u
#define THREADS 3u

typedef struct job {
    _Atomic uint32_t done[ITEMS];
    _Atomic uint32_t working; /* threads that are in the job now */
    _Atomic uint32_t most;    /* threads that were in it at a time */
    uint32_t wanted;          /* chunks wait until so many are */
} job;

static void work(void *argument, uint64_t begin, uint64_t end)
{
    job *me = argument;
    uint32_t here = atomic_fetch_add(&me->working, 1) + 1;
    uint32_t most = atomic_load(&me->most);

    while (most < here && !atomic_compare_exchange_weak(&me->most, &most, here)) {
    }
    while (atomic_load(&me->most) < me->wanted)
        msc__sleep_ns(1000);
    for (; begin < end; begin++)
        atomic_fetch_add(&me->done[begin], 1);
    atomic_fetch_sub(&me->working, 1);
}

static void check_done(job *one, uint64_t items, uint32_t times)
{
    uint32_t i;

    assert_int_equal(atomic_load(&one->working), 0);
    for (i = 0; i < ITEMS; i++)
        assert_int_equal(atomic_load(&one->done[i]), i < items ? times : 0);
}

static msc__pool pool;

/* No chunk ends before all threads have begun one. */
static void all_threads_work(void **state)
{
    static job one = {.wanted = THREADS};

    (void)state;
    msc__pool_run(&pool, ITEMS, 1, work, NULL, &one);
    assert_int_equal(atomic_load(&one.most), THREADS);
    check_done(&one, ITEMS, 1);
}

static void items_are_done_once(void **state)
{
    static job one;
    uint32_t round;
    uint64_t items;

    (void)state;
    for (items = 0; items <= ITEMS; items += 1 + items / 3) {
        memset(&one, 0, sizeof one);
        for (round = 0; round < 50; round++)
            msc__pool_run(&pool, items, 1 + round, work, NULL, &one);
        check_done(&one, items, 50);
    }
}

/* What is too small to be divided does not wake anybody. */
static void small_jobs_stay_here(void **state)
{
    static job one;
    uint32_t round;

    (void)state;
    for (round = 0; round < 100; round++)
        msc__pool_run(&pool, 8, 8, work, NULL, &one);
    assert_int_equal(atomic_load(&one.most), 1);
    check_done(&one, 8, 100);
}

static int begin(void **state)
{
    msc_context *ctx;

    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    assert_int_equal(msc__pool_init(&pool, ctx, THREADS, NULL), MSC_OK);
    *state = ctx;
    return 0;
}

static int end(void **state)
{
    msc__pool_fini(&pool);
    msc_context_destroy(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_threads_work),
        cmocka_unit_test(items_are_done_once),
        cmocka_unit_test(small_jobs_stay_here),
    };

    return cmocka_run_group_tests_name("optim_pool", tests, begin, end);
}
