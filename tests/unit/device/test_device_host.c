/* SPDX-License-Identifier: Apache-2.0 */
/* What only the host device has: trouble on purpose, the machine's memory, and threads of its own. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_setattr_default_np */
#endif
#include "base/thread.h"
#include "device_fixture.h"
#include "fork_probe.h"
#include "oom/failing_alloc.h"

#define COPY_BYTES 1024u
#define COPIES 200

/* ---- options ------------------------------------------------------------------------------------------ */

static void refuses(msc_context *ctx, const msc_device_options *options, const char *named)
{
    msc_device *device = (msc_device *)(uintptr_t)8;
    msc_error err;

    assert_int_equal(msc_device_create(ctx, options, &device, &err), MSC_EINVAL);
    assert_null(device);
    if (strstr(err.message, named) == NULL)
        fail_msg("'%s' does not name %s", err.message, named);
}

static void wrong_options(void **state)
{
    msc_device_options good = msc_device_options_default();
    msc_device_options bad;
    msc_context *ctx;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    assert_int_equal(msc_device_create(ctx, &good, NULL, NULL), MSC_EINVAL);
    refuses(NULL, &good, "ctx");
    refuses(ctx, (bad = good, bad.struct_bytes = 3, &bad), "struct_bytes");
    refuses(ctx, (bad = good, bad.kind = MSC_DEVICE_COUNT, &bad), "kind");
    refuses(ctx, (bad = good, bad.ordinal = 1, &bad), "ordinal");
    refuses(ctx, (bad = good, bad.library = "x.so", &bad), "x.so");
    refuses(ctx, (bad = good, bad.faults.delay_most_ns = -1, &bad), "delay_most_ns");
    refuses(ctx, (bad = good, bad.faults.split_ppm = 1000001, &bad), "split_ppm");
    refuses(ctx, (bad = good, bad.faults.fail_ppm = 1000001, &bad), "fail_ppm");
    refuses(ctx, (bad = good, bad.kind = MSC_DEVICE_CUDA, bad.faults.seed = 1, &bad), "faults");
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_device_destroy(NULL);
    msc_context_destroy(ctx);
}

/* Without options: the host, without faults. */
static void defaults(void **state)
{
    msc_context *ctx;
    msc_device *device;
    void *none;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    assert_int_equal(msc_device_create(ctx, NULL, &device, NULL), MSC_OK);
    assert_int_equal(device->ops->memory_create(device, UINT64_MAX, &none, NULL), MSC_EDEVMEM);
    assert_null(none);
    assert_int_equal(msc_device_kind_of(device), MSC_DEVICE_HOST);
    assert_string_equal(msc_device_name(device), "host");
    msc_device_destroy(device);
    msc_context_destroy(ctx);
}

static void foreign_streams(void **state)
{
    fixture fix;
    void *event;
    char bytes[8] = {0};

    (void)state;
    fixture_open(&fix, NULL);
    event = fixture_event(&fix);
    assert_int_equal(fix.ops->event_record(fix.device, event, bytes, &fix.err), MSC_EINVAL);
    assert_int_equal(fix.ops->stream_wait(fix.device, bytes, event, &fix.err), MSC_EINVAL);
    assert_int_equal(fix.ops->copy(fix.device, bytes + 4, bytes, 4, MSC_COPY_IN, bytes, &fix.err),
                     MSC_EINVAL);
    assert_non_null(strstr(fix.err.message, "none of this device"));
    fix.ops->event_destroy(fix.device, event);
    fixture_close(&fix);
}

/* ---- copies that fail --------------------------------------------------------------------------------- */

/* Copies with an event behind each; which of them failed goes to `failed`. */
static int run_failing(uint64_t seed, bool *failed)
{
    msc_device_options options = msc_device_options_default();
    unsigned char from[COPY_BYTES];
    unsigned char to[COPY_BYTES];
    fixture fix;
    void *event;
    int count = 0;
    int i;

    options.faults.seed = seed;
    options.faults.fail_ppm = 200000;
    fixture_open(&fix, &options);
    event = fixture_event(&fix);
    for (i = 0; i < COPIES; i++) {
        msc_status status;

        fixture_fill(from, COPY_BYTES, (uint64_t)i + 1);
        fixture_fill(to, COPY_BYTES, 0);
        fixture_copy(&fix, to, from, COPY_BYTES, MSC_COPY_OUT, i % FIXTURE_STREAMS);
        fixture_record(&fix, event, i % FIXTURE_STREAMS);
        status = fix.ops->event_wait(fix.device, event, &fix.err);
        failed[i] = status != MSC_OK;
        count += failed[i];
        if (failed[i]) {
            assert_int_equal(status, MSC_EDRIVER);
            assert_non_null(strstr(fix.err.message, "1024 bytes out of it"));
            assert_int_equal(fix.ops->event_query(fix.device, event, NULL), MSC_EDRIVER);
        }
        assert_true(fixture_holds(to, COPY_BYTES, failed[i] ? 0 : (uint64_t)i + 1));
    }
    fix.ops->event_destroy(fix.device, event);
    fixture_close(&fix);
    return count;
}

/* Some fail, the others are whole, and the same seed lets the same ones fail. */
static void failures_repeat(void **state)
{
    bool first[COPIES];
    bool again[COPIES];
    bool other[COPIES];
    int count = run_failing(11, first);

    (void)state;
    assert_in_range(count, COPIES / 10, COPIES / 3);
    assert_int_equal(run_failing(11, again), count);
    assert_memory_equal(first, again, sizeof first);
    (void)run_failing(12, other);
    assert_memory_not_equal(first, other, sizeof first);
}

static void failing_copies(fixture *fix, msc_device_options *options)
{
    *options = msc_device_options_default();
    options->faults.fail_ppm = 1000000;
    fixture_open(fix, options);
}

/* The first event behind a failure tells it, as often as it is asked, and until it is recorded again. */
static void failures_are_told(void **state)
{
    msc_device_options options;
    char bytes[8] = {0};
    void *events[2];
    fixture fix;

    (void)state;
    failing_copies(&fix, &options);
    events[0] = fixture_event(&fix);
    events[1] = fixture_event(&fix);
    fixture_copy(&fix, bytes, bytes + 4, 4, MSC_COPY_IN, 0);
    fixture_copy(&fix, bytes, bytes + 4, 3, MSC_COPY_IN, 0);
    fixture_record(&fix, events[0], 0);
    fixture_record(&fix, events[1], 0);
    fixture_wait(&fix, 1, events[0]);
    assert_int_equal(fix.ops->event_wait(fix.device, events[0], &fix.err), MSC_EDRIVER);
    assert_non_null(strstr(fix.err.message, "copy 0 of the host device, 4 bytes into it"));
    assert_int_equal(fix.ops->event_wait(fix.device, events[0], NULL), MSC_EDRIVER);
    fixture_await(&fix, events[1]);
    fixture_record(&fix, events[1], 1);
    fixture_await(&fix, events[1]); /* waiting for a failure is no failure */
    fixture_record(&fix, events[0], 0);
    fixture_await(&fix, events[0]);
    fixture_copy(&fix, bytes, bytes + 4, 4, MSC_COPY_IN, 0);
    fixture_record(&fix, events[0], 0);
    assert_int_equal(fix.ops->event_wait(fix.device, events[0], NULL), MSC_EDRIVER);
    OK(&fix, fix.ops->event_record(fix.device, events[0], NULL, &fix.err));
    fixture_await(&fix, events[0]);
    fix.ops->event_destroy(fix.device, events[0]);
    fix.ops->event_destroy(fix.device, events[1]);
    fixture_close(&fix);
}

/* A record that cannot be asked any more does not take the failure with it. */
static void failures_are_not_lost(void **state)
{
    msc_device_options options = msc_device_options_default();
    char bytes[8] = {0};
    fixture fix;
    void *event;
    void *gone;

    (void)state;
    options.faults.fail_ppm = 1000000;
    options.faults.delay_most_ns = 20000000; /* the thread comes to the records after they were replaced */
    fixture_open(&fix, &options);
    event = fixture_event(&fix);
    gone = fixture_event(&fix);
    fixture_copy(&fix, bytes, bytes + 4, 4, MSC_COPY_IN, 0);
    fixture_record(&fix, event, 0);
    fixture_record(&fix, gone, 0);
    fix.ops->event_destroy(fix.device, gone);
    fixture_record(&fix, event, 0);
    assert_int_equal(fix.ops->event_wait(fix.device, event, NULL), MSC_EDRIVER);
    fix.ops->event_destroy(fix.device, event);
    fixture_close(&fix);
}

/* ---- copies that take time ---------------------------------------------------------------------------- */

/* Time from submission to completion of one copy. */
static int64_t copy_ns(const msc_device_options *options, size_t bytes)
{
    static unsigned char from[1u << 20];
    static unsigned char to[1u << 20];
    fixture fix;
    void *event;
    int64_t start_ns;

    fixture_open(&fix, options);
    event = fixture_event(&fix);
    fixture_fill(from, bytes, 3);
    start_ns = msc__clock_ns();
    fixture_copy(&fix, to, from, bytes, MSC_COPY_IN, 0);
    fixture_record(&fix, event, 0);
    fixture_await(&fix, event);
    start_ns = msc__clock_ns() - start_ns;
    assert_true(fixture_holds(to, bytes, 3));
    fix.ops->event_destroy(fix.device, event);
    fixture_close(&fix);
    return start_ns;
}

static void slow_copies(void **state)
{
    msc_device_options options = msc_device_options_default();
    int64_t longest_ns = 0;

    (void)state;
    options.faults.bytes_per_second = 50000000;
    assert_true(copy_ns(&options, 1000000) >= 20000000);
    options.faults.split_ppm = 1000000;
    assert_true(copy_ns(&options, 999999) >= 19990000); /* an odd size is whole all the same */
    assert_true(copy_ns(&options, 1) >= 20000);         /* the pause */
    options = msc_device_options_default();
    options.faults.delay_most_ns = 10000000;
    for (options.faults.seed = 1; options.faults.seed <= 8; options.faults.seed++) {
        int64_t ns = copy_ns(&options, 1);

        longest_ns = ns > longest_ns ? ns : longest_ns;
    }
    assert_true(longest_ns >= 5000000); /* the seeds differ, and one of them draws the upper half */
}

/* A small copy on a stream that has nothing to do is over when it was submitted; behind another one it waits. */
static void idle_streams_do_it_at_once(void **state)
{
    static unsigned char first[8u << 20];
    static unsigned char second[8u << 20];
    unsigned char third[COPY_BYTES] = {0};
    fixture fix;
    void *event;

    (void)state;
    fixture_open(&fix, NULL);
    event = fixture_event(&fix);
    fixture_fill(first, sizeof first, 1);
    fixture_copy(&fix, third, first, COPY_BYTES, MSC_COPY_IN, 0);
    fixture_record(&fix, event, 0);
    OK(&fix, fix.ops->event_query(fix.device, event, &fix.err));
    assert_true(fixture_holds(third, COPY_BYTES, 1));
    fixture_copy(&fix, second, first, sizeof first, MSC_COPY_IN, 0);
    fixture_copy(&fix, third, second + sizeof second - COPY_BYTES, COPY_BYTES, MSC_COPY_IN, 0);
    fixture_record(&fix, event, 0);
    fixture_await(&fix, event);
    assert_memory_equal(third, first + sizeof first - COPY_BYTES, COPY_BYTES);
    fix.ops->event_destroy(fix.device, event);
    fixture_close(&fix);
}

/* A record on a stream that has nothing to do tells of the failure that nobody was told yet, once. */
static void idle_streams_tell_failures(void **state)
{
    msc_device_options options = msc_device_options_default();
    char bytes[8] = {0};
    fixture fix;
    void *event;

    (void)state;
    options.faults.fail_ppm = 1000000;
    fixture_open(&fix, &options);
    event = fixture_event(&fix);
    fixture_copy(&fix, bytes, bytes + 4, 4, MSC_COPY_IN, 0);
    msc__sleep_ns(20000000);
    fixture_record(&fix, event, 0);
    assert_int_equal(fix.ops->event_wait(fix.device, event, NULL), MSC_EDRIVER);
    fixture_record(&fix, event, 0);
    OK(&fix, fix.ops->event_wait(fix.device, event, &fix.err));
    fix.ops->event_destroy(fix.device, event);
    fixture_close(&fix);
}

/* On the host the default stream is the caller, who has waited when the call returns. */
static void default_stream_blocks(void **state)
{
    msc_device_options options = msc_device_options_default();
    unsigned char from[COPY_BYTES];
    unsigned char to[COPY_BYTES] = {0};
    fixture fix;
    void *event;

    (void)state;
    options.faults.bytes_per_second = 100000; /* 10 ms */
    fixture_open(&fix, &options);
    event = fixture_event(&fix);
    fixture_fill(from, COPY_BYTES, 1);
    fixture_copy(&fix, to, from, COPY_BYTES, MSC_COPY_OUT, 0);
    fixture_record(&fix, event, 0);
    OK(&fix, fix.ops->stream_wait(fix.device, NULL, event, &fix.err));
    assert_true(fixture_holds(to, COPY_BYTES, 1));
    OK(&fix, fix.ops->event_record(fix.device, event, NULL, &fix.err));
    OK(&fix, fix.ops->event_query(fix.device, event, &fix.err));
    fix.ops->event_destroy(fix.device, event);
    fixture_close(&fix);
}

/* ---- pinning ------------------------------------------------------------------------------------------ */

static void pin_limits(void **state)
{
    const size_t page = FIXTURE_PAGE_BYTES;
    msc_device_options options = msc_device_options_default();
    unsigned char *memory = aligned_alloc(page, 4 * page);
    fixture fix;

    (void)state;
    assert_non_null(memory);
    options.faults.pin_limit_bytes = 3 * page;
    fixture_open(&fix, &options);
    OK(&fix, fix.ops->pin(fix.device, memory, 2 * page, &fix.err));
    assert_int_equal(fix.ops->pin(fix.device, memory + 2 * page, 2 * page, &fix.err), MSC_ENOMEM);
    assert_non_null(strstr(fix.err.message, "pin_limit_bytes is 196608"));
    assert_int_equal(fix.ops->pin(fix.device, memory + 2 * page, UINT64_MAX, NULL), MSC_ENOMEM);
    OK(&fix, fix.ops->pin(fix.device, memory + 2 * page, page, &fix.err));
    fix.ops->unpin(fix.device, memory, 2 * page);
    OK(&fix, fix.ops->pin(fix.device, memory, 2 * page, &fix.err));
    fix.ops->unpin(fix.device, memory, 2 * page);
    fix.ops->unpin(fix.device, memory + 2 * page, page);
    assert_int_equal(fix.ops->pin(fix.device, memory + 1, page, &fix.err), MSC_EINVAL);
    assert_int_equal(fix.ops->pin(fix.device, NULL, page, &fix.err), MSC_EINVAL);
    assert_int_equal(fix.ops->pin(fix.device, memory, 0, &fix.err), MSC_EINVAL);
    fixture_close(&fix);

    options.faults.pin_limit_bytes = 0;
    options.faults.refuse_pins = 1;
    fixture_open(&fix, &options);
    assert_int_equal(fix.ops->pin(fix.device, memory, page, &fix.err), MSC_ENOMEM);
    fixture_close(&fix);
    free(memory);
}

/* ---- no memory ---------------------------------------------------------------------------------------- */

/* Makes one of each, with allocation `n` failing; true when nothing failed any more. */
static bool make_all(failing_alloc *heap, uint64_t n)
{
    msc_device *device = (msc_device *)(uintptr_t)8;
    void *stream = NULL;
    void *event = NULL;
    void *memory = NULL;
    msc_status status;
    msc_error err;
    msc_context *ctx;

    failing_alloc_init(heap, n);
    ctx = failing_alloc_context(heap);
    if (ctx == NULL)
        return false;
    memset(&err, 0, sizeof err);
    status = msc_device_create(ctx, NULL, &device, &err);
    if (status != MSC_OK)
        assert_null(device);
    if (status == MSC_OK)
        status = device->ops->stream_create(device, &stream, &err);
    if (status == MSC_OK)
        status = device->ops->event_create(device, &event, &err);
    if (status == MSC_OK) {
        status = device->ops->memory_create(device, 100, &memory, &err);
        assert_true(status == MSC_OK || status == MSC_EDEVMEM);
    } else {
        assert_int_equal(status, MSC_ENOMEM);
    }
    assert_int_equal(heap->failed_count, status != MSC_OK);
    assert_int_equal(err.status, status);
    if (device != NULL) {
        device->ops->memory_destroy(device, memory, 100);
        device->ops->event_destroy(device, event);
        device->ops->stream_destroy(device, stream);
        msc_device_destroy(device);
    }
    msc_context_destroy(ctx);
    assert_true(failing_alloc_is_clean(heap));
    return status == MSC_OK;
}

static void no_memory(void **state)
{
    static failing_alloc heap;
    uint64_t n = 0;

    (void)state;
    while (!make_all(&heap, n))
        n++;
    assert_int_equal(n, 5); /* context, device, stream, event, memory */
}

/* A stream needs a thread; a thread of such a stack is nowhere to be had. */
static void no_thread(void **state)
{
    pthread_attr_t usual;
    pthread_attr_t huge;
    uint64_t held_bytes;
    fixture fix;
    void *stream = &fix;

    (void)state;
    fixture_open(&fix, NULL);
    held_bytes = msc_context_held_bytes(fix.ctx);
    assert_int_equal(pthread_getattr_default_np(&usual), 0);
    assert_int_equal(pthread_getattr_default_np(&huge), 0);
    assert_int_equal(pthread_attr_setstacksize(&huge, (size_t)1 << 50), 0);
    assert_int_equal(pthread_setattr_default_np(&huge), 0);
    assert_int_equal(fix.ops->stream_create(fix.device, &stream, &fix.err), MSC_EINTERNAL);
    assert_int_equal(pthread_setattr_default_np(&usual), 0);
    assert_null(stream);
    assert_int_equal(msc_context_held_bytes(fix.ctx), held_bytes);
    fixture_close(&fix);
}

/* Whatever is given to streams while they run, nothing is allocated. */
static void allocates_nothing(void **state)
{
    msc_device_options options = msc_device_options_default();
    unsigned char from[64] = {0};
    unsigned char to[64];
    uint64_t requests;
    static failing_alloc heap;
    msc_device *device;
    void *stream;
    void *event;
    int i;

    (void)state;
    options.faults.delay_most_ns = 1000;
    failing_alloc_init(&heap, FAILING_ALLOC_NEVER);
    assert_int_equal(msc_device_create(failing_alloc_context(&heap), &options, &device, NULL), MSC_OK);
    assert_int_equal(device->ops->stream_create(device, &stream, NULL), MSC_OK);
    assert_int_equal(device->ops->event_create(device, &event, NULL), MSC_OK);
    requests = heap.request_count;
    for (i = 0; i < 1000; i++) {
        assert_int_equal(device->ops->copy(device, to, from, 64, MSC_COPY_IN, stream, NULL), MSC_OK);
        assert_int_equal(device->ops->event_record(device, event, stream, NULL), MSC_OK);
    }
    assert_int_equal(device->ops->event_wait(device, event, NULL), MSC_OK);
    assert_int_equal(heap.request_count, requests);
    device->ops->event_destroy(device, event);
    device->ops->stream_destroy(device, stream);
    {
        msc_context *ctx = device->ctx;

        msc_device_destroy(device);
        msc_context_destroy(ctx);
    }
    assert_true(failing_alloc_is_clean(&heap));
}

/* ---- processes ---------------------------------------------------------------------------------------- */

static void forked(void **state)
{
    msc_device_options options = msc_device_options_default();
    unsigned char from[COPY_BYTES];
    unsigned char to[COPY_BYTES];
    fixture fix;
    void *event;

    (void)state;
    options.faults.bytes_per_second = 100000; /* streams are at work while the child is made */
    fixture_open(&fix, &options);
    event = fixture_event(&fix);
    fixture_fill(from, COPY_BYTES, 1);
    fixture_copy(&fix, to, from, COPY_BYTES, MSC_COPY_OUT, 0);
    fixture_record(&fix, event, 0);
    assert_int_equal(fork_probe(&fix, event, to, NULL), 0);
    fixture_await(&fix, event);
    assert_true(fixture_holds(to, COPY_BYTES, 1));
    fix.ops->event_destroy(fix.device, event);
    fixture_close(&fix);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"device_host/wrong-options", wrong_options, NULL, NULL, NULL},
        {"device_host/defaults", defaults, NULL, NULL, NULL},
        {"device_host/foreign-streams", foreign_streams, NULL, NULL, NULL},
        {"device_host/failures-repeat", failures_repeat, NULL, NULL, NULL},
        {"device_host/failures-are-told", failures_are_told, NULL, NULL, NULL},
        {"device_host/failures-are-not-lost", failures_are_not_lost, NULL, NULL, NULL},
        {"device_host/slow-copies", slow_copies, NULL, NULL, NULL},
        {"device_host/idle-streams-at-once", idle_streams_do_it_at_once, NULL, NULL, NULL},
        {"device_host/idle-streams-tell", idle_streams_tell_failures, NULL, NULL, NULL},
        {"device_host/default-stream-blocks", default_stream_blocks, NULL, NULL, NULL},
        {"device_host/pin-limits", pin_limits, NULL, NULL, NULL},
        {"device_host/no-memory", no_memory, NULL, NULL, NULL},
        {"device_host/no-thread", no_thread, NULL, NULL, NULL},
        {"device_host/allocates-nothing", allocates_nothing, NULL, NULL, NULL},
        {"device_host/forked", forked, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
