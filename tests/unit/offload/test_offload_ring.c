/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring alone and between threads: full and empty, order, nothing lost or doubled, numbers that wrap.
 *
 * An entry carries its writer in the upper half and its number among that writer's in the lower one.
 */
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "context_fixture.h"
#include "offload/offload_ring.h"
#include "oom/failing_alloc.h"

#define SIDES_MOST 4u
#define ENTRIES_EACH 20000u /* per writer */

static msc__ring *make(msc_context *ctx, uint32_t capacity)
{
    msc__ring *ring = NULL;

    assert_int_equal(msc__ring_create(ctx, capacity, &ring, NULL), MSC_OK);
    return ring;
}

/* ---- one thread ----------------------------------------------------------------------------------- */

/* Fills it, empties it and goes once around in uneven portions, from any first number. */
static void exercise(msc__ring *ring, uint32_t capacity)
{
    uint64_t next_in = 0;
    uint64_t next_out = 0;
    uint64_t entry = 77;
    uint32_t round, i;

    assert_int_equal(msc__ring_pop(ring, &entry), MSC_EAGAIN);
    assert_int_equal(entry, 77);
    for (round = 0; round < 3 * capacity; round++) {
        uint32_t portion = 1 + round % capacity;
        for (i = 0; i < portion; i++)
            assert_int_equal(msc__ring_push(ring, next_in++), MSC_OK);
        assert_int_equal(msc__ring_count(ring), portion);
        if (portion == capacity)
            assert_int_equal(msc__ring_push(ring, 12345), MSC_EAGAIN);
        for (i = 0; i < portion; i++) {
            assert_int_equal(msc__ring_pop(ring, &entry), MSC_OK);
            assert_int_equal(entry, next_out++);
        }
        assert_int_equal(msc__ring_pop(ring, &entry), MSC_EAGAIN);
        assert_int_equal(msc__ring_count(ring), 0);
    }
}

static void full_and_empty(void **state)
{
    msc_context *ctx = *state;
    uint32_t capacity;

    for (capacity = 2; capacity <= 64; capacity *= 2) {
        msc__ring *ring = make(ctx, capacity);
        exercise(ring, capacity);
        msc__ring_destroy(ring);
    }
}

static void numbers_wrap(void **state)
{
    msc_context *ctx = *state;
    msc__ring *ring = make(ctx, 8);
    uint64_t before;

    for (before = 0; before < 20; before++) {
        msc__ring_restart(ring, UINT64_MAX - before);
        exercise(ring, 8);
    }
    msc__ring_destroy(ring);
}

static void refuses_odd_capacities(void **state)
{
    static const uint32_t bad[] = {0, 1, 3, 6, 1000, (UINT32_C(1) << 30) + 1, UINT32_C(1) << 31, UINT32_MAX};
    msc_context *ctx = *state;
    msc__ring *ring = (msc__ring *)state;
    msc_error err;
    size_t i;

    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(msc__ring_create(ctx, bad[i], &ring, &err), MSC_EINVAL);
        assert_null(ring);
        assert_non_null(strstr(err.message, "power of two"));
    }
    msc__ring_destroy(NULL);
}

static void without_memory(void **state)
{
    failing_alloc *heap = malloc(sizeof *heap);
    msc_context *ctx;
    msc__ring *ring = NULL;

    (void)state;
    assert_non_null(heap);
    failing_alloc_init(heap, 1);
    ctx = failing_alloc_context(heap);
    assert_int_equal(msc__ring_create(ctx, 16, &ring, NULL), MSC_ENOMEM);
    assert_null(ring);
    ring = make(ctx, 16);
    assert_int_equal(heap->request_count, 3); /* the context, the failure, the ring */
    exercise(ring, 16);
    assert_int_equal(heap->request_count, 3); /* nothing since */
    msc__ring_destroy(ring);
    msc_context_destroy(ctx);
    assert_true(failing_alloc_is_clean(heap));
    free(heap);
}

/* ---- several threads ------------------------------------------------------------------------------ */

typedef struct meeting {
    msc__ring *ring;
    uint64_t wanted;        /* entries of all writers */
    _Atomic uint64_t taken; /* so far, by all readers */
    uint64_t payload[SIDES_MOST]
                    [ENTRIES_EACH]; /* written before its entry is pushed, read after it is taken */
    unsigned char seen[SIDES_MOST][ENTRIES_EACH];
} meeting;

typedef struct side {
    meeting *at;
    uint32_t number;
    uint64_t wrong; /* readers: entries out of order, of no writer, or whose payload was not there */
    pthread_t thread;
} side;

static uint64_t payload_of(uint64_t entry)
{
    return entry * UINT64_C(0x9e3779b97f4a7c15) + 1;
}

static void *write_all(void *argument)
{
    const side *own = argument;
    uint64_t i;

    for (i = 0; i < ENTRIES_EACH; i++) {
        uint64_t entry = (uint64_t)own->number << 32 | i;
        own->at->payload[own->number][i] = payload_of(entry);
        while (msc__ring_push(own->at->ring, entry) != MSC_OK)
            (void)sched_yield();
    }
    return NULL;
}

static void *read_all(void *argument)
{
    side *own = argument;
    meeting *at = own->at;
    uint64_t next[SIDES_MOST] = {0};
    uint64_t entry;

    while (at->taken < at->wanted) {
        if (msc__ring_pop(at->ring, &entry) != MSC_OK) {
            (void)sched_yield();
            continue;
        }
        at->taken++;
        if (entry >> 32 >= SIDES_MOST || (uint32_t)entry >= ENTRIES_EACH) {
            own->wrong++;
            continue;
        }
        own->wrong += (uint32_t)entry < next[entry >> 32];
        own->wrong += at->payload[entry >> 32][(uint32_t)entry] != payload_of(entry);
        next[entry >> 32] = (uint32_t)entry + 1;
        at->seen[entry >> 32][(uint32_t)entry]++;
    }
    return NULL;
}

static void meet(msc_context *ctx, uint32_t capacity, uint64_t first, uint32_t writers, uint32_t readers)
{
    meeting *at = calloc(1, sizeof *at);
    side sides[2 * SIDES_MOST] = {{0}};
    uint32_t i, k;

    assert_non_null(at);
    at->ring = make(ctx, capacity);
    msc__ring_restart(at->ring, first);
    at->wanted = (uint64_t)writers * ENTRIES_EACH;
    for (i = 0; i < writers + readers; i++) {
        sides[i].at = at;
        sides[i].number = i < writers ? i : i - writers;
        assert_int_equal(
            pthread_create(&sides[i].thread, NULL, i < writers ? write_all : read_all, &sides[i]), 0);
    }
    for (i = 0; i < writers + readers; i++) {
        (void)pthread_join(sides[i].thread, NULL);
        assert_int_equal(sides[i].wrong, 0);
    }
    for (i = 0; i < writers; i++)
        for (k = 0; k < ENTRIES_EACH; k++)
            assert_int_equal(at->seen[i][k], 1);
    assert_int_equal(msc__ring_count(at->ring), 0);
    msc__ring_destroy(at->ring);
    free(at);
}

static void one_writer_one_reader(void **state)
{
    meet(*state, 2, 0, 1, 1);
    meet(*state, 64, UINT64_MAX - ENTRIES_EACH / 2, 1, 1);
}

static void several_writers_and_readers(void **state)
{
    meet(*state, 2, 0, 2, 2);
    meet(*state, 8, UINT64_MAX - ENTRIES_EACH, 4, 1);
    meet(*state, 256, 0, 1, 4);
    meet(*state, 16, 0, 4, 4);
}

/* ---- group ---------------------------------------------------------------------------------------- */

int main(void)
{
    const struct CMUnitTest tests[] = {
        context_test(full_and_empty),         context_test(numbers_wrap),
        context_test(refuses_odd_capacities), cmocka_unit_test(without_memory),
        context_test(one_writer_one_reader),  context_test(several_writers_and_readers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
