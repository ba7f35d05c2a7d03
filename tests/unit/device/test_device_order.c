/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Order, on any device. A slow copy stands before what must wait; whoever does not wait sees the bytes that were
 * there before, or overwrites what is still to be read.
 */
#include "device_cases.h"

#include <sched.h>

#include "base/thread.h"

#define PATIENCE_NS INT64_C(20000000000) /* longer than any of this takes */

static void fill_slow(unsigned char *memory, uint64_t pattern)
{
    fixture_fill(memory, tested_slow_bytes, pattern);
}

/* Two host buffers and one on the device, all of the slow size, and a few events. */
typedef struct stage {
    fixture fix;
    unsigned char *from;  /* pattern 1 */
    unsigned char *to;    /* pattern 2 */
    unsigned char *there; /* pattern 0 */
    void *events[4];
} stage;

static void stage_open(stage *on)
{
    int i;

    fixture_open(&on->fix, &tested_options);
    on->from = fixture_host(&on->fix, tested_slow_bytes);
    on->to = fixture_host(&on->fix, tested_slow_bytes);
    on->there = fixture_memory(&on->fix, tested_slow_bytes);
    for (i = 0; i < 4; i++)
        on->events[i] = fixture_event(&on->fix);
    fill_slow(on->from, 0);
    fixture_copy(&on->fix, on->there, on->from, tested_slow_bytes, MSC_COPY_IN, 0); /* pattern 0 there too */
    fixture_record(&on->fix, on->events[0], 0);
    fixture_await(&on->fix, on->events[0]);
    fill_slow(on->from, 1);
    fill_slow(on->to, 2);
}

static void stage_close(stage *on)
{
    int i;

    for (i = 0; i < 4; i++)
        on->fix.ops->event_destroy(on->fix.device, on->events[i]);
    for (i = 0; i < FIXTURE_STREAMS; i++) {
        on->fix.ops->stream_destroy(on->fix.device, on->fix.streams[i]);
        on->fix.streams[i] = NULL;
    }
    on->fix.ops->memory_destroy(on->fix.device, on->there, tested_slow_bytes);
    fixture_host_end(&on->fix, on->from, tested_slow_bytes);
    fixture_host_end(&on->fix, on->to, tested_slow_bytes);
    fixture_close(&on->fix);
}

static void copy_in(stage *on, size_t bytes, int stream)
{
    fixture_copy(&on->fix, on->there, on->from, bytes, MSC_COPY_IN, stream);
}

static void copy_out(stage *on, size_t bytes, int stream)
{
    fixture_copy(&on->fix, on->to, on->there, bytes, MSC_COPY_OUT, stream);
}

/* ---- order -------------------------------------------------------------------------------------------- */

/* A stream does one thing after the other. */
void order_within_a_stream(void **state)
{
    stage on;

    (void)state;
    stage_open(&on);
    copy_in(&on, tested_slow_bytes, 0);
    copy_out(&on, tested_slow_bytes, 0);
    fixture_record(&on.fix, on.events[0], 0);
    fixture_await(&on.fix, on.events[0]);
    assert_true(fixture_holds(on.to, tested_slow_bytes, 1));
    stage_close(&on);
}

/* An event is complete when the work before it is, and not earlier. */
void order_event_waits_for_work(void **state)
{
    bool seen_early = false;
    stage on;
    int attempt;

    (void)state;
    stage_open(&on);
    for (attempt = 0; attempt < 20 && !seen_early; attempt++) {
        msc_status status;

        fill_slow(on.to, 5);
        copy_out(&on, tested_slow_bytes, 0);
        fixture_record(&on.fix, on.events[0], 0);
        on.fix.err.message[0] = '\0';
        while ((status = on.fix.ops->event_query(on.fix.device, on.events[0], &on.fix.err)) == MSC_EAGAIN) {
            seen_early = true;
            assert_int_equal(on.fix.err.message[0], '\0');
            (void)sched_yield();
        }
        assert_int_equal(status, MSC_OK);
        assert_true(fixture_holds(on.to, tested_slow_bytes, 0));
    }
    assert_true(seen_early);
    stage_close(&on);
}

/* What a stream gets after a wait comes after the work before the event. */
void order_stream_waits_for_event(void **state)
{
    stage on;

    (void)state;
    stage_open(&on);
    copy_in(&on, tested_slow_bytes, 0);
    fixture_record(&on.fix, on.events[0], 0);
    fixture_wait(&on.fix, 1, on.events[0]);
    copy_out(&on, FAST_BYTES, 1);
    fixture_record(&on.fix, on.events[1], 1);
    fixture_await(&on.fix, on.events[1]);
    assert_true(fixture_holds(on.to, FAST_BYTES, 1));
    assert_int_equal(on.fix.ops->event_query(on.fix.device, on.events[0], NULL), MSC_OK);
    stage_close(&on);
}

/* The other danger: what is written before it was read. */
void order_overwriting_waits_for_reading(void **state)
{
    stage on;

    (void)state;
    stage_open(&on);
    copy_out(&on, tested_slow_bytes, 0);
    fixture_record(&on.fix, on.events[0], 0);
    fixture_wait(&on.fix, 1, on.events[0]);
    copy_in(&on, FAST_BYTES, 1);
    fixture_record(&on.fix, on.events[1], 1);
    fixture_await(&on.fix, on.events[1]);
    fixture_await(&on.fix, on.events[0]);
    assert_true(fixture_holds(on.to, tested_slow_bytes, 0));
    stage_close(&on);
}

/* Several streams may wait for one event, and one stream for several. */
void order_many_waiters(void **state)
{
    stage on;

    (void)state;
    stage_open(&on);
    copy_in(&on, tested_slow_bytes, 0);
    fixture_record(&on.fix, on.events[0], 0);
    fixture_wait(&on.fix, 1, on.events[0]);
    fixture_wait(&on.fix, 2, on.events[0]);
    fixture_copy(&on.fix, on.to, on.there, FAST_BYTES, MSC_COPY_OUT, 1);
    fixture_copy(&on.fix, on.to + FAST_BYTES, on.there, FAST_BYTES, MSC_COPY_OUT, 2);
    fixture_record(&on.fix, on.events[1], 1);
    fixture_record(&on.fix, on.events[2], 2);
    fixture_wait(&on.fix, 0, on.events[1]);
    fixture_wait(&on.fix, 0, on.events[2]);
    fixture_record(&on.fix, on.events[3], 0);
    fixture_await(&on.fix, on.events[3]);
    assert_true(fixture_holds(on.to, FAST_BYTES, 1));
    assert_true(fixture_holds(on.to + FAST_BYTES, FAST_BYTES, 1));
    stage_close(&on);
}

/* A later record, complete at once, does not let a stream go that waits for the earlier one. */
void order_rerecord_releases_nobody(void **state)
{
    stage on;

    (void)state;
    stage_open(&on);
    copy_in(&on, tested_slow_bytes, 0);
    fixture_record(&on.fix, on.events[0], 0);
    fixture_wait(&on.fix, 1, on.events[0]);
    fixture_record(&on.fix, on.events[0], 2);
    fixture_await(&on.fix, on.events[0]);
    copy_out(&on, FAST_BYTES, 1);
    fixture_record(&on.fix, on.events[1], 1);
    fixture_await(&on.fix, on.events[1]);
    assert_true(fixture_holds(on.to, FAST_BYTES, 1));
    stage_close(&on);
}

/*
 * Nor does a later record hold a stream back: stream 1 waits for the event as recorded on stream 0; the event is
 * then recorded on stream 2 behind a wait for stream 1. Whoever took the later record would wait in a circle.
 */
void order_rerecord_holds_nobody(void **state)
{
    int64_t give_up_ns = msc__clock_ns() + PATIENCE_NS;
    stage on;

    (void)state;
    stage_open(&on);
    copy_in(&on, tested_slow_bytes, 0);
    fixture_record(&on.fix, on.events[0], 0);
    fixture_wait(&on.fix, 1, on.events[0]);
    fixture_record(&on.fix, on.events[1], 1);
    fixture_wait(&on.fix, 2, on.events[1]);
    fixture_record(&on.fix, on.events[0], 2);
    while (on.fix.ops->event_query(on.fix.device, on.events[0], &on.fix.err) == MSC_EAGAIN) {
        if (msc__clock_ns() > give_up_ns)
            fail_msg("stream 1 waits for the later record");
        msc__sleep_ns(100000);
    }
    stage_close(&on);
}

/* An event speaks for its last record alone. */
void order_rerecord_is_what_counts(void **state)
{
    stage on;

    (void)state;
    stage_open(&on);
    fixture_record(&on.fix, on.events[0], 1);
    fixture_await(&on.fix, on.events[0]);
    copy_out(&on, tested_slow_bytes, 0);
    fixture_record(&on.fix, on.events[0], 0);
    fill_slow(on.from, 9); /* takes time, and disturbs nobody */
    fixture_await(&on.fix, on.events[0]);
    assert_true(fixture_holds(on.to, tested_slow_bytes, 0));
    stage_close(&on);
}

void order_never_recorded(void **state)
{
    stage on;

    (void)state;
    stage_open(&on);
    OK(&on.fix, on.fix.ops->event_query(on.fix.device, on.events[3], &on.fix.err));
    fixture_await(&on.fix, on.events[3]);
    fixture_wait(&on.fix, 1, on.events[3]);
    fixture_record(&on.fix, on.events[1], 1);
    fixture_await(&on.fix, on.events[1]);
    stage_close(&on);
}

/* The program's default stream waits as any other, and is waited for as any other. */
void order_default_stream(void **state)
{
    stage on;

    (void)state;
    stage_open(&on);
    copy_out(&on, tested_slow_bytes, 0);
    fixture_record(&on.fix, on.events[0], 0);
    OK(&on.fix, on.fix.ops->stream_wait(on.fix.device, NULL, on.events[0], &on.fix.err));
    OK(&on.fix, on.fix.ops->event_record(on.fix.device, on.events[1], NULL, &on.fix.err));
    fixture_wait(&on.fix, 1, on.events[1]);
    copy_in(&on, FAST_BYTES, 1);
    fixture_record(&on.fix, on.events[2], 1);
    fixture_await(&on.fix, on.events[1]);
    assert_true(fixture_holds(on.to, tested_slow_bytes, 0));
    fixture_await(&on.fix, on.events[2]);
    stage_close(&on);
}

/* The end of a stream is after its work; events recorded on it stay complete. */
void order_stream_ends_its_work(void **state)
{
    stage on;

    (void)state;
    stage_open(&on);
    copy_in(&on, tested_slow_bytes, 0);
    copy_out(&on, tested_slow_bytes, 0);
    fixture_record(&on.fix, on.events[0], 0);
    on.fix.ops->stream_destroy(on.fix.device, on.fix.streams[0]);
    on.fix.streams[0] = NULL;
    assert_true(fixture_holds(on.to, tested_slow_bytes, 1));
    OK(&on.fix, on.fix.ops->event_query(on.fix.device, on.events[0], &on.fix.err));
    fixture_wait(&on.fix, 1, on.events[0]);
    fixture_record(&on.fix, on.events[1], 1);
    fixture_await(&on.fix, on.events[1]);
    stage_close(&on);
}

/* An event may go while streams have still to reach it or to wait for it. */
void order_event_goes_early(void **state)
{
    stage on;
    void *early;

    (void)state;
    stage_open(&on);
    early = fixture_event(&on.fix);
    copy_in(&on, tested_slow_bytes, 0);
    fixture_record(&on.fix, early, 0);
    fixture_wait(&on.fix, 1, early);
    on.fix.ops->event_destroy(on.fix.device, early);
    early = fixture_event(&on.fix); /* in the same place, likely */
    OK(&on.fix, on.fix.ops->event_query(on.fix.device, early, &on.fix.err));
    copy_out(&on, FAST_BYTES, 1);
    fixture_record(&on.fix, on.events[1], 1);
    fixture_await(&on.fix, on.events[1]);
    assert_true(fixture_holds(on.to, FAST_BYTES, 1));
    on.fix.ops->event_destroy(on.fix.device, early);
    stage_close(&on);
}

/* More than any queue holds, behind a slow one: nothing is lost and nothing overtakes. */
void order_long_queue(void **state)
{
    enum { COUNT = 1500 };
    stage on;
    size_t i;

    (void)state;
    stage_open(&on);
    copy_in(&on, tested_slow_bytes, 0);
    for (i = 0; i < COUNT; i++)
        fixture_copy(&on.fix, on.there, on.from + i, 8, MSC_COPY_IN, 0);
    for (i = 0; i < COUNT; i++) {
        fixture_record(&on.fix, on.events[0], 0);
        fixture_wait(&on.fix, 1, on.events[0]);
    }
    copy_out(&on, 8, 1);
    fixture_record(&on.fix, on.events[1], 1);
    fixture_await(&on.fix, on.events[1]);
    assert_memory_equal(on.to, on.from + COUNT - 1, 8);
    stage_close(&on);
}
