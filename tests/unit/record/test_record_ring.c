/* SPDX-License-Identifier: Apache-2.0 */
/* The ring: order, room, fillers, and many producers at once, of whom nothing is lost, doubled or torn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "base/thread.h"
#include "record/record_ring.h"

#define PRODUCERS 4u
#define ENTRIES 20000u

static msc_context *ctx;

static int setup(void **state)
{
    (void)state;
    return msc_context_create(NULL, &ctx, NULL) == MSC_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    return 0;
}

static bool put(msc__ring *ring, uint32_t kind, const char *text)
{
    msc__ring_entry entry;

    if (!msc__ring_reserve(ring, kind, (uint32_t)strlen(text), &entry))
        return false;
    memcpy(entry.bytes, text, strlen(text));
    msc__ring_publish(&entry);
    return true;
}

static void take(msc__ring *ring, uint32_t kind, const char *text)
{
    msc__ring_entry entry;

    assert_true(msc__ring_peek(ring, &entry));
    assert_int_equal(entry.kind, kind);
    assert_int_equal(entry.byte_count, strlen(text));
    assert_memory_equal(entry.bytes, text, strlen(text));
    msc__ring_consume(ring, &entry);
}

static void first_in_first_out(void **state)
{
    msc__ring ring;
    msc__ring_entry entry;

    (void)state;
    assert_int_equal(msc__ring_init(ctx, 1024, &ring, NULL), MSC_OK);
    assert_false(msc__ring_peek(&ring, &entry));
    assert_true(put(&ring, 1, "one") && put(&ring, 2, "") && put(&ring, 3, "three and more"));
    take(&ring, 1, "one");
    take(&ring, 2, "");
    take(&ring, 3, "three and more");
    assert_false(msc__ring_peek(&ring, &entry));
    assert_int_equal(msc__ring_used(&ring), 0);
    msc__ring_fini(ctx, &ring);
}

static void an_entry_is_seen_when_it_is_whole(void **state)
{
    msc__ring ring;
    msc__ring_entry first, second, seen;

    (void)state;
    assert_int_equal(msc__ring_init(ctx, 1024, &ring, NULL), MSC_OK);
    assert_true(msc__ring_reserve(&ring, 1, 4, &first));
    assert_true(msc__ring_reserve(&ring, 2, 4, &second));
    memcpy(second.bytes, "late", 4);
    msc__ring_publish(&second);
    assert_false(msc__ring_peek(&ring, &seen)); /* the first is not whole: the second waits behind it */
    memcpy(first.bytes, "soon", 4);
    msc__ring_publish(&first);
    take(&ring, 1, "soon");
    take(&ring, 2, "late");
    msc__ring_fini(ctx, &ring);
}

static void full_is_refused_and_room_comes_back(void **state)
{
    msc__ring ring;
    unsigned count = 0;
    unsigned round;

    (void)state;
    assert_int_equal(msc__ring_init(ctx, 256, &ring, NULL), MSC_OK);
    while (put(&ring, 1, "0123456789abcdef"))
        count++;
    assert_int_equal(count, 256 / 24);
    for (round = 0; round < 1000; round++) { /* at every place of the ring, fillers among them */
        take(&ring, 1, "0123456789abcdef");
        if (!put(&ring, 1, "0123456789abcdef")) {
            take(&ring, 1, "0123456789abcdef");
            assert_true(put(&ring, 1, "0123456789abcdef"));
        }
    }
    msc__ring_fini(ctx, &ring);
}

static void too_large_is_refused(void **state)
{
    msc__ring ring;
    msc__ring_entry entry;

    (void)state;
    assert_int_equal(msc__ring_init(ctx, 256, &ring, NULL), MSC_OK);
    assert_false(msc__ring_reserve(&ring, 1, 256, &entry));
    assert_false(msc__ring_reserve(&ring, 1, UINT32_MAX, &entry));
    assert_true(msc__ring_reserve(&ring, 1, 248, &entry)); /* all of it */
    memset(entry.bytes, 'x', 248);
    msc__ring_publish(&entry);
    assert_true(msc__ring_peek(&ring, &entry));
    msc__ring_consume(&ring, &entry);
    msc__ring_fini(ctx, &ring);
}

typedef struct producer {
    msc__ring *ring;
    uint32_t number;
} producer;

/* Entries of changing length, each full of one byte, with who it is from and its number at the front. */
static void *produce(void *argument)
{
    const producer *it = argument;
    uint32_t i;

    for (i = 0; i < ENTRIES; i++) {
        msc__ring_entry entry;

        while (!msc__ring_reserve(it->ring, it->number + 1, 8 + i % 57, &entry))
            msc__sleep_ns(1000);
        memcpy(entry.bytes, &it->number, 4);
        memcpy(entry.bytes + 4, &i, 4);
        memset(entry.bytes + 8, (int)(i % 251), i % 57);
        msc__ring_publish(&entry);
    }
    return NULL;
}

static void nothing_is_lost_among_many(void **state)
{
    msc__ring ring;
    msc__thread threads[PRODUCERS];
    producer producers[PRODUCERS];
    uint32_t next[PRODUCERS] = {0};
    uint32_t total = 0;
    uint32_t i;

    (void)state;
    assert_int_equal(msc__ring_init(ctx, 4096, &ring, NULL), MSC_OK);
    for (i = 0; i < PRODUCERS; i++) {
        producers[i].ring = &ring;
        producers[i].number = i;
        assert_int_equal(msc__thread_start(&threads[i], "producer", produce, &producers[i], NULL), MSC_OK);
    }
    while (total < PRODUCERS * ENTRIES) {
        msc__ring_entry entry;
        uint32_t who, number;

        if (!msc__ring_peek(&ring, &entry))
            continue;
        memcpy(&who, entry.bytes, 4);
        memcpy(&number, entry.bytes + 4, 4);
        assert_true(who < PRODUCERS);
        assert_int_equal(entry.kind, who + 1);
        assert_int_equal(number, next[who]++);
        assert_int_equal(entry.byte_count, 8 + number % 57);
        for (i = 8; i < entry.byte_count; i++)
            assert_int_equal(entry.bytes[i], number % 251);
        msc__ring_consume(&ring, &entry);
        total++;
    }
    for (i = 0; i < PRODUCERS; i++)
        msc__thread_join(&threads[i]);
    msc__ring_fini(ctx, &ring);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_in_first_out),
        cmocka_unit_test(an_entry_is_seen_when_it_is_whole),
        cmocka_unit_test(full_is_refused_and_room_comes_back),
        cmocka_unit_test(too_large_is_refused),
        cmocka_unit_test(nothing_is_lost_among_many),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
