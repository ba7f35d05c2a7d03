/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who watches a run hears each message once and in order, or is told to read.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "live/live.h"

static live *make(void)
{
    const msc_allocator allocator = {0};
    live *it = NULL;

    assert_int_equal(live_create(&allocator, &it, NULL), MSC_OK);
    return it;
}

static live_watch *watch(live *it, int64_t version, int64_t seen)
{
    live_watch *made = live_open(it, "run-1");

    assert_non_null(made);
    live_begin(made, version, seen);
    return made;
}

/* All that there is to read, in pieces of `room`. */
static const char *drain(live_watch *from, size_t room)
{
    static char text[200000];
    size_t length = 0;
    int64_t bytes;

    while ((bytes = live_read(from, text + length, room)) > 0)
        length += (size_t)bytes;
    text[length] = '\0';
    return bytes < 0 ? strcat(text, "END") : text;
}

static void test_messages_in_order(void **state)
{
    live *it = make();
    live_watch *one = watch(it, 4, -1);
    live_watch *two = watch(it, 4, -1);

    (void)state;
    assert_string_equal(drain(one, 100), ": here\n\n");
    live_say(it, "run-1", 5, "batch", "{\"a\":1}");
    live_say(it, "run-1", 6, "run", "{}");
    live_say(it, "run-2", 6, "run", "{}");
    assert_string_equal(drain(one, 3),
                        "id: 5\nevent: batch\ndata: {\"a\":1}\n\nid: 6\nevent: run\ndata: {}\n\n");
    assert_string_equal(drain(one, 100), "");
    assert_string_equal(drain(two, 100),
                        ": here\n\nid: 5\nevent: batch\ndata: {\"a\":1}\n\nid: 6\nevent: run\ndata: {}\n\n");
    assert_int_equal(live_count(it), 2);
    live_close(one);
    live_close(two);
    live_destroy(it);
}

static void test_resume(void **state)
{
    live *it = make();
    live_watch *first = watch(it, 1, -1);
    live_watch *next;

    (void)state;
    live_say(it, "run-1", 2, "batch", "{}");
    live_say(it, "run-1", 3, "batch", "{}");
    live_close(first);
    next = watch(it, 3, 2); /* what it had seen is not sent once more */
    assert_string_equal(drain(next, 100), ": here\n\nid: 3\nevent: batch\ndata: {}\n\n");
    live_close(next);
    next = watch(it, 3, 3);
    assert_string_equal(drain(next, 100), ": here\n\n");
    live_close(next);
    next = watch(it, 3, 0); /* before the ring */
    assert_string_equal(drain(next, 100), "id: 3\nevent: reset\ndata: {}\n\n");
    live_say(it, "run-1", 4, "batch", "{}");
    assert_string_equal(drain(next, 100), "id: 4\nevent: batch\ndata: {}\n\n");
    live_close(next);
    next = watch(it, 4, 99); /* a version that never was */
    assert_string_equal(drain(next, 100), "id: 4\nevent: reset\ndata: {}\n\n");
    live_close(next);
    live_destroy(it);
}

/* Between the watch and the reading of the version a change is committed, and said before or after. */
static void test_changes_while_it_begins(void **state)
{
    live *it = make();
    live_watch *one = live_open(it, "run-1");

    (void)state;
    live_say(it, "run-1", 5, "batch", "{}");
    live_begin(one, 5, 4); /* said before: 5 is new to it */
    assert_string_equal(drain(one, 100), ": here\n\nid: 5\nevent: batch\ndata: {}\n\n");
    live_close(one);
    one = live_open(it, "run-1");
    live_begin(one, 6, -1); /* committed before it was read, said afterwards: it has read 6 */
    live_say(it, "run-1", 6, "batch", "{}");
    live_say(it, "run-1", 7, "batch", "{}");
    assert_string_equal(drain(one, 100), ": here\n\nid: 7\nevent: batch\ndata: {}\n\n");
    live_say(it, "run-1", 9, "batch", "{}"); /* 8 was never said */
    assert_string_equal(drain(one, 100), "id: 9\nevent: reset\ndata: {}\n\n");
    live_close(one);
    live_destroy(it);
}

static void test_who_is_slow_is_behind(void **state)
{
    live *it = make();
    live_watch *slow = watch(it, 0, -1);
    live_watch *quick = watch(it, 0, -1);
    char data[5000];
    char piece[32];
    int64_t version;

    (void)state;
    memset(data, 'x', sizeof data - 1);
    data[sizeof data - 1] = '\0';
    (void)drain(quick, 1000);
    for (version = 1; version <= 40; version++) {
        live_say(it, "run-1", version, "batch", data);
        if (version == 1) {
            assert_true(live_read(slow, piece, sizeof piece) > 0); /* the comment, then half a message */
            assert_true(live_read(slow, piece, sizeof piece) > 0);
        }
        assert_true(strlen(drain(quick, 777)) > sizeof data - 1);
    }
    assert_string_equal(drain(slow, 100), "\n\nid: 40\nevent: reset\ndata: {}\n\n");
    live_say(it, "run-1", 41, "batch", "{}");
    assert_string_equal(drain(slow, 100), "id: 41\nevent: batch\ndata: {}\n\n");
    live_close(slow);
    live_close(quick);
    live_destroy(it);
}

static void count_wake(void *user)
{
    ++*(int *)user;
}

static void test_waking(void **state)
{
    live *it = make();
    live_watch *one = watch(it, 0, -1);
    int woken = 0;

    (void)state;
    live_listen(one, count_wake, &woken);
    assert_int_equal(woken, 1); /* the comment at its beginning waits */
    (void)drain(one, 100);
    live_say(it, "run-1", 1, "batch", "{}");
    assert_int_equal(woken, 2);
    live_tick(it); /* it has just been spoken to */
    assert_int_equal(woken, 2);
    live_stop(it);
    assert_int_equal(woken, 3);
    assert_string_equal(drain(one, 100), "END");
    live_close(one);
    live_destroy(it);
}

static void test_a_deleted_run(void **state)
{
    live *it = make();
    live_watch *one = watch(it, 3, -1);

    (void)state;
    live_say(it, "run-1", 4, "gone", "{}");
    assert_string_equal(drain(one, 100), ": here\n\nid: 4\nevent: gone\ndata: {}\n\nEND");
    assert_null(live_open(it, "run-1")); /* until those who watched the old one have left */
    live_close(one);
    one = watch(it, 0, -1);
    live_say(it, "run-1", 1, "batch", "{}");
    assert_string_equal(drain(one, 100), ": here\n\nid: 1\nevent: batch\ndata: {}\n\n");
    live_close(one);
    live_destroy(it);
}

static void test_topics_are_bounded(void **state)
{
    live *it = make();
    live_watch *watches[LIVE_TOPICS];
    char run[16];

    (void)state;
    for (unsigned i = 0; i < LIVE_TOPICS; i++) {
        (void)snprintf(run, sizeof run, "run-%u", i);
        watches[i] = live_open(it, run);
        assert_non_null(watches[i]);
    }
    assert_null(live_open(it, "one-more"));
    live_close(watches[7]);
    watches[7] = live_open(it, "one-more");
    assert_non_null(watches[7]);
    for (unsigned i = 0; i < LIVE_TOPICS; i++)
        live_close(watches[i]);
    live_destroy(it);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages_in_order),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_changes_while_it_begins),
        cmocka_unit_test(test_who_is_slow_is_behind),
        cmocka_unit_test(test_waking),
        cmocka_unit_test(test_a_deleted_run),
        cmocka_unit_test(test_topics_are_bounded),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
