/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One engine, several threads: each with blocks of its own; two that contend for one block; and the end of an engine
 * whose copies are under way.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "offload_training.h"

#include "base/thread.h"
#include "device/device_internal.h"

#define THREADS 4u
#define ROUNDS 12u
#define BLOCKS 6u
#define MOST_BYTES 150000u

static msc_error err;

/* ---- each its own --------------------------------------------------------------------------------- */

/* One thread. cmocka's assertions are for the main thread, so this one tells where it stopped. */
typedef struct worker {
    msc_offload *engine;
    uint64_t seed;
    pthread_t thread;
    const char *stopped;
} worker;

typedef struct held {
    msc_ticket ticket;
    uint64_t bytes;
    uint64_t seed;
    unsigned char *memory;
} held;

static bool leave(worker *w, held *block)
{
    unsigned char *source;

    block->seed = training_random(&w->seed);
    block->bytes = 1 + training_random(&w->seed) % MOST_BYTES;
    source = malloc(block->bytes);
    if (source == NULL)
        return false;
    training_fill(source, block->bytes, block->seed);
    if (msc_offload_put(w->engine, source, block->bytes, NULL, &block->ticket, NULL) != MSC_OK ||
        msc_offload_settle(w->engine, block->ticket, NULL, NULL) != MSC_OK) {
        free(source);
        return false;
    }
    memset(source, 0xAA, block->bytes);
    free(source);
    return true;
}

static bool come_back(worker *w, held *block)
{
    msc_ticket soon;
    bool right;

    (void)msc_offload_use(w->engine, block->ticket, &soon, 1); /* it alone: the others are not all ours */
    block->memory = malloc(block->bytes);
    if (block->memory == NULL)
        return false;
    right = msc_offload_get(w->engine, block->ticket, block->memory, NULL, NULL) == MSC_OK &&
            msc_offload_arrive(w->engine, block->ticket, NULL, NULL) == MSC_OK &&
            training_is(block->memory, block->bytes, block->seed);
    msc_offload_drop(w->engine, block->ticket);
    free(block->memory);
    return right;
}

static void *work(void *argument)
{
    worker *w = argument;
    held blocks[BLOCKS];
    uint32_t round, i;

    for (round = 0; round < ROUNDS; round++) {
        msc_offload_group_ahead(w->engine, MOST_BYTES);
        for (i = 0; i < BLOCKS; i++)
            if (!leave(w, &blocks[i])) {
                w->stopped = "forward";
                return NULL;
            }
        for (i = BLOCKS; i-- > 0;)
            if (!come_back(w, &blocks[i])) {
                w->stopped = "backward";
                return NULL;
            }
        (void)msc_offload_counters_now(w->engine);
        (void)msc_offload_note(w->engine, MSC_TIER_PINNED);
    }
    return NULL;
}

static void several_threads(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_FILE);
    msc_device_faults faults = {.seed = 3, .split_ppm = 300000, .pin_limit_bytes = 300000};
    msc_offload_counters counters;
    worker workers[THREADS];
    training t;
    uint32_t i;

    (void)state;
    options.limit_bytes[MSC_TIER_PINNED] =
        1u << 20; /* refused on the way: the note is written while others read it */
    options.limit_bytes[MSC_TIER_HOST] = 1u << 20;
    options.staging_count = 2;
    training_open(&t, &options, &faults);
    for (i = 0; i < THREADS; i++) {
        workers[i] = (worker){.engine = t.engine, .seed = i + 1};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
        if (workers[i].stopped != NULL)
            fail_msg("thread %u stopped in %s", i, workers[i].stopped);
    }
    counters = msc_offload_counters_now(t.engine);
    assert_int_equal(counters.block_count, 0);
    assert_int_equal(counters.put_count[0] + counters.put_count[1] + counters.put_count[2],
                     THREADS * ROUNDS * BLOCKS);
    training_close(&t);
}

/* ---- one block, two threads ------------------------------------------------------------------------ */

typedef struct waiter {
    msc_offload *engine;
    msc_ticket ticket;
    msc_status (*call)(msc_offload *, msc_ticket, void *, msc_error *); /* NULL: drop */
    msc_status status;
    pthread_t thread;
} waiter;

static void *wait_for_it(void *argument)
{
    waiter *w = argument;

    if (w->call != NULL)
        w->status = w->call(w->engine, w->ticket, NULL, NULL);
    else
        msc_offload_drop(w->engine, w->ticket);
    return NULL;
}

static void start(waiter *w)
{
    assert_int_equal(pthread_create(&w->thread, NULL, wait_for_it, w), 0);
    msc__sleep_ns(2000000); /* it waits by then, mostly; nothing depends on it */
}

/*
 * While a thread waits for a block, another drops it, and puts the next one, which gets the same record. The first
 * copy is slow: the second block is still in the queue when it is dropped.
 */
static void dropped_by_another(void **state)
{
    static msc_status (*const calls[])(msc_offload *, msc_ticket, void *,
                                       msc_error *) = {msc_offload_settle, msc_offload_arrive, NULL};
    msc_offload_options options = training_options(MSC_TIER_HOST);
    msc_device_faults faults = {.bytes_per_second = 5000000}; /* a block takes 20 ms */
    unsigned char *memory = calloc(3, 100000);
    training t;
    size_t i;
    int first;

    (void)state;
    assert_non_null(memory);
    for (i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        for (first = 0; first < 2; first++) { /* the one under way, or the one behind it */
            msc_ticket tickets[3];
            waiter w = {.call = calls[i], .status = MSC_OK};
            uint32_t k;

            training_open(&t, &options, &faults);
            w.engine = t.engine;
            for (k = 0; k < 2; k++)
                assert_int_equal(msc_offload_put(t.engine, memory, 100000, NULL, &tickets[k], &err), MSC_OK);
            w.ticket = tickets[first ? 0 : 1];
            if (calls[i] == msc_offload_arrive)
                assert_int_equal(msc_offload_get(t.engine, w.ticket, memory + 100000, NULL, &err), MSC_OK);
            start(&w);
            msc_offload_drop(t.engine, w.ticket);
            assert_int_equal(msc_offload_put(t.engine, memory, 100000, NULL, &tickets[2], &err), MSC_OK);
            assert_int_equal(pthread_join(w.thread, NULL), 0);
            assert_true(w.status == MSC_OK || w.status == MSC_EINVAL || w.status == MSC_ESTATE);
            assert_int_equal(msc_offload_counters_now(t.engine).block_count, 2);
            assert_int_equal(msc_offload_settle(t.engine, tickets[2], NULL, &err), MSC_OK);
            msc_offload_drop(t.engine, tickets[2]);
            msc_offload_drop(t.engine, tickets[first ? 1 : 0]);
            assert_int_equal(msc_offload_counters_now(t.engine).block_count, 0);
            training_close(&t);
        }
    }
    free(memory);
}

/* ---- the system takes its time --------------------------------------------------------------------- */

/* A device whose pins wait until the test lets them go. */
static struct gate {
    msc_device_ops ops;
    const msc_device_ops *host;
    atomic_bool closed;
    atomic_uint waiting;
} gate;

static msc_status pin_at_the_gate(msc_device *device, void *start, uint64_t bytes, msc_error *error)
{
    atomic_fetch_add(&gate.waiting, 1);
    while (atomic_load(&gate.closed))
        msc__sleep_ns(100000);
    atomic_fetch_sub(&gate.waiting, 1);
    return gate.host->pin(device, start, bytes, error);
}

typedef struct putter {
    msc_offload *engine;
    const void *source;
    uint64_t bytes;
    msc_ticket ticket;
    msc_status status;
    pthread_t thread;
} putter;

static void *put_one(void *argument)
{
    putter *p = argument;

    p->status = msc_offload_put(p->engine, p->source, p->bytes, NULL, &p->ticket, NULL);
    return NULL;
}

static void start_putter(putter *p)
{
    assert_int_equal(pthread_create(&p->thread, NULL, put_one, p), 0);
}

/* While a large slab is pinned, others put, get and drop; who needs a slab, too, waits for its turn. */
static void pinning_holds_up_nobody(void **state)
{
    enum { LARGE = 9 << 20 };
    msc_offload_options options = training_options(MSC_TIER_PINNED);
    unsigned char *memory = calloc(1, LARGE);
    putter putters[2];
    msc_ticket small;
    training t;
    int i;

    (void)state;
    assert_non_null(memory);
    options.limit_bytes[MSC_TIER_PINNED] = (64u << 20) + 2 * LARGE;
    training_open(&t, &options, NULL);
    gate.ops = *t.device->ops;
    gate.host = t.device->ops;
    gate.ops.pin = pin_at_the_gate;
    t.device->ops = &gate.ops;
    assert_int_equal(msc_offload_put_now(t.engine, memory, 64, NULL, &small, NULL), MSC_ETIMEDOUT);
    assert_int_equal(msc_offload_counters_now(t.engine).refused_count, 0);
    assert_int_equal(msc_offload_put(t.engine, memory, 64, NULL, &small, &err), MSC_OK);
    msc_offload_drop(t.engine, small);
    atomic_store(&gate.closed, true);
    for (i = 0; i < 2; i++) {
        putters[i] = (putter){.engine = t.engine, .source = memory, .bytes = LARGE};
        start_putter(&putters[i]);
    }
    while (atomic_load(&gate.waiting) == 0)
        msc__sleep_ns(100000);
    assert_int_equal(msc_offload_put_now(t.engine, memory, LARGE, NULL, &small, NULL), MSC_ETIMEDOUT);
    for (i = 0; i < 100; i++) { /* the gate stays closed */
        assert_int_equal(msc_offload_put_now(t.engine, memory, 64, NULL, &small, &err), MSC_OK);
        assert_int_equal(msc_offload_settle(t.engine, small, NULL, &err), MSC_OK);
        assert_int_equal(msc_offload_get(t.engine, small, memory + 64, NULL, &err), MSC_OK);
        assert_int_equal(msc_offload_arrive(t.engine, small, NULL, &err), MSC_OK);
        msc_offload_drop(t.engine, small);
    }
    assert_int_equal(atomic_load(&gate.waiting), 1);
    assert_true(msc_offload_counters_now(t.engine).taken_bytes[MSC_TIER_PINNED] <=
                options.limit_bytes[MSC_TIER_PINNED]);
    atomic_store(&gate.closed, false);
    for (i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(putters[i].thread, NULL), 0);
        assert_int_equal(putters[i].status, MSC_OK);
        assert_int_equal(msc_offload_settle(t.engine, putters[i].ticket, NULL, &err), MSC_OK);
        msc_offload_drop(t.engine, putters[i].ticket);
    }
    training_close(&t);
    free(memory);
}

enum { SHAPES_MOST = 12 << 20 };

/* Blocks of other sizes each time; some are refused. */
static void *put_shapes(void *argument)
{
    worker *w = argument;
    msc_ticket tickets[3] = {0, 0, 0};
    unsigned char *memory = calloc(1, SHAPES_MOST);
    uint32_t round;

    for (round = 0; memory != NULL && round < 30; round++) {
        msc_ticket *ticket = &tickets[round % 3];
        uint64_t bytes = 1 + training_random(&w->seed) % SHAPES_MOST;
        msc_status status;

        msc_offload_drop(w->engine, *ticket);
        *ticket = 0;
        status = msc_offload_put(w->engine, memory, bytes, NULL, ticket, NULL);
        if (status != MSC_OK && status != MSC_EAGAIN)
            w->stopped = "put";
        if (status == MSC_OK && msc_offload_settle(w->engine, *ticket, NULL, NULL) != MSC_OK)
            w->stopped = "settle";
    }
    for (round = 0; round < 3; round++)
        msc_offload_drop(w->engine, tickets[round]);
    free(memory);
    return NULL;
}

/* Several threads let the tiers grow, and empty slabs of other sizes go. */
static void several_threads_let_it_grow(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_PINNED);
    msc_device_faults faults = {.pin_delay_us = 300};
    msc_offload_counters counters;
    worker workers[THREADS];
    training t;
    uint32_t i;

    (void)state;
    options.limit_bytes[MSC_TIER_PINNED] = 30u << 20;
    options.limit_bytes[MSC_TIER_FILE] = 30u << 20;
    training_open(&t, &options, &faults);
    for (i = 0; i < THREADS; i++) {
        workers[i] = (worker){.engine = t.engine, .seed = i + 1};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, put_shapes, &workers[i]), 0);
    }
    for (i = 0; i < 50; i++) {
        counters = msc_offload_counters_now(t.engine);
        assert_true(counters.taken_bytes[MSC_TIER_PINNED] <= options.limit_bytes[MSC_TIER_PINNED]);
        assert_true(counters.taken_bytes[MSC_TIER_FILE] <= options.limit_bytes[MSC_TIER_FILE]);
        msc__sleep_ns(500000);
    }
    for (i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
        if (workers[i].stopped != NULL)
            fail_msg("thread %u stopped in %s", i, workers[i].stopped);
    }
    assert_int_equal(msc_offload_counters_now(t.engine).block_count, 0);
    training_close(&t);
}

/* ---- the end --------------------------------------------------------------------------------------- */

/* Memory of the program goes as soon as `destroy` returns; a sanitizer sees who touches it afterwards. */
static void ends_under_way(void **state)
{
    msc_device_faults faults = {.delay_most_ns = 300000, .bytes_per_second = 300000000, .split_ppm = 500000};
    msc_tier tier;
    uint32_t stage;

    (void)state;
    for (tier = 0; tier < MSC_TIER_COUNT; tier++) {
        for (stage = 0; stage < 4; stage++) {
            msc_offload_options options = training_options(tier);
            msc_ticket tickets[8];
            void *sources[8];
            void *destinations[8];
            training t;
            uint32_t i;

            faults.seed = tier * 4 + stage + 1;
            training_open(&t, &options, &faults);
            for (i = 0; i < 8; i++) {
                sources[i] = malloc(200000);
                destinations[i] = malloc(200000);
                assert_true(sources[i] != NULL && destinations[i] != NULL);
                memset(sources[i], (int)i, 200000);
                assert_int_equal(msc_offload_put(t.engine, sources[i], 200000, NULL, &tickets[i], &err),
                                 MSC_OK);
            }
            for (i = 0; i < 8 && stage > 0; i++) {
                if (i < 2 * stage)
                    assert_int_equal(msc_offload_settle(t.engine, tickets[i], NULL, &err), MSC_OK);
                assert_int_equal(msc_offload_get(t.engine, tickets[i], destinations[i], NULL, &err), MSC_OK);
            }
            if (stage == 3)
                assert_int_equal(msc_offload_arrive(t.engine, tickets[0], NULL, &err), MSC_OK);
            training_close(&t);
            for (i = 0; i < 8; i++) {
                free(sources[i]);
                free(destinations[i]);
            }
        }
    }
}

/* ---- nobody asks ----------------------------------------------------------------------------------- */

enum { STORED = 8 };

static uint32_t came_back(msc_offload *engine)
{
    msc_offload_event events[64];
    uint32_t count = msc_offload_trace(engine, events, 64);
    uint32_t found = 0;
    uint32_t i;

    for (i = 0; i < count; i++)
        found += events[i].kind == MSC_OFFLOAD_IN;
    return found;
}

/* A small block's copy out is put off while its lane sleeps, but not when the other lane waits for it: that would
 * hold up all that is asked for behind it. */
static void gets_behind_what_is_put_off(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    unsigned char memory[STORED + 1][64];
    msc_ticket tickets[STORED + 1];
    training t;
    uint32_t i;

    (void)state;
    options.trace_count = 64;
    training_open(&t, &options, NULL);
    for (i = 0; i <= STORED; i++) {
        memset(memory[i], (int)i, sizeof memory[i]);
        if (i == STORED)
            msc__sleep_ns(20000000); /* for the lane to fall asleep */
        assert_int_equal(msc_offload_put(t.engine, memory[i], sizeof memory[i], NULL, &tickets[i], &err),
                         MSC_OK);
        if (i < STORED)
            assert_int_equal(msc_offload_settle(t.engine, tickets[i], NULL, &err), MSC_OK);
    }
    for (i = STORED + 1; i-- > 0;)
        assert_int_equal(msc_offload_get(t.engine, tickets[i], memory[i], NULL, &err), MSC_OK);
    while (came_back(t.engine) <= STORED) /* nobody asks for any of them */
        msc__sleep_ns(100000);
    for (i = 0; i <= STORED; i++) {
        assert_int_equal(msc_offload_arrive(t.engine, tickets[i], NULL, &err), MSC_OK);
        assert_true(memory[i][0] == i && memory[i][63] == i);
        msc_offload_drop(t.engine, tickets[i]);
    }
    training_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(several_threads),         cmocka_unit_test(dropped_by_another),
        cmocka_unit_test(pinning_holds_up_nobody), cmocka_unit_test(several_threads_let_it_grow),
        cmocka_unit_test(ends_under_way),          cmocka_unit_test(gets_behind_what_is_put_off),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
