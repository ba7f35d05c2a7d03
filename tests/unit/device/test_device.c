/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What device_internal.h promises, of any kind of device:
 *
 *      test_device host              the host, with its copies slowed down and split
 *      test_device cuda LIBRARY      CUDA on a stand-in for the driver library
 *      test_device cuda              CUDA on a card; exit status 77 where there is none
 *
 * The environment slows the stand-in down; the last case looks into its books.
 *
 * Order is tested in test_device_order.c, much at once in test_device_many.c.
 */
#include "device_cases.h"

#include <dlfcn.h>

#include "fake_cuda/fake_cuda.h"

#define SKIPPED 77

msc_device_options tested_options;
size_t tested_slow_bytes = 1u << 20;

/* ---- copies ----------------------------------------------------------------------------------------- */

static void there_and_back(void **state)
{
    const size_t sizes[] = {1, 2, 3, 511, 512, 513, FAST_BYTES, FAST_BYTES + 1, tested_slow_bytes};
    fixture fix;
    unsigned char *from;
    unsigned char *to;
    unsigned char *there;
    void *event;
    size_t i;

    (void)state;
    fixture_open(&fix, &tested_options);
    from = fixture_host(&fix, tested_slow_bytes);
    to = fixture_host(&fix, tested_slow_bytes + 1);
    there = fixture_memory(&fix, tested_slow_bytes);
    event = fixture_event(&fix);
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        fixture_fill(from, sizes[i], i);
        memset(to, 0xee, sizes[i] + 1);
        fixture_copy(&fix, there, from, sizes[i], MSC_COPY_IN, 0);
        fixture_copy(&fix, to, there, sizes[i], MSC_COPY_OUT, 0);
        fixture_record(&fix, event, 0);
        fixture_await(&fix, event);
        assert_true(fixture_holds(to, sizes[i], i));
        assert_int_equal(to[sizes[i]], 0xee);
    }
    fix.ops->event_destroy(fix.device, event);
    fix.ops->memory_destroy(fix.device, there, tested_slow_bytes);
    fixture_host_end(&fix, from, tested_slow_bytes);
    fixture_host_end(&fix, to, tested_slow_bytes + 1);
    fixture_close(&fix);
}

/* Copies that no device can do are refused at once. */
static void refused_copies(void **state)
{
    unsigned char here[8];
    fixture fix;
    void *there;
    const msc_device_ops *ops;

    (void)state;
    fixture_open(&fix, &tested_options);
    ops = fix.ops;
    there = fixture_memory(&fix, 8);
    assert_int_equal(ops->copy(fix.device, NULL, there, 8, MSC_COPY_OUT, fix.streams[0], &fix.err),
                     MSC_EINVAL);
    assert_int_equal(ops->copy(fix.device, there, NULL, 8, MSC_COPY_IN, fix.streams[0], &fix.err),
                     MSC_EINVAL);
    assert_int_equal(ops->copy(fix.device, there, here, 0, MSC_COPY_IN, fix.streams[0], &fix.err),
                     MSC_EINVAL);
    assert_int_equal(ops->copy(fix.device, there, here, 8, MSC_COPY_IN, NULL, NULL), MSC_EINVAL);
    assert_non_null(strstr(fix.err.message, "0 bytes"));
    ops->memory_destroy(fix.device, there, 8);
    ops->memory_destroy(fix.device, NULL, 8);
    ops->unpin(fix.device, NULL, 8);
    ops->stream_destroy(fix.device, NULL);
    ops->event_destroy(fix.device, NULL);
    fixture_close(&fix);
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static void device_memory(void **state)
{
    msc_device_memory now;
    fixture fix;
    void *blocks[3];
    void *none = &fix;
    int i;

    (void)state;
    fixture_open(&fix, &tested_options);
    for (i = 0; i < 3; i++) {
        blocks[i] = fixture_memory(&fix, 1000);
        assert_int_equal((uintptr_t)blocks[i] % 512, 0);
    }
    for (i = 0; i < 3; i++)
        fix.ops->memory_destroy(fix.device, blocks[i], 1000);
    OK(&fix, msc_device_memory_now(fix.device, &now, &fix.err));
    assert_true(now.free_bytes > 0 && now.free_bytes <= now.total_bytes);
    assert_int_equal(fix.ops->memory_create(fix.device, UINT64_C(1) << 60, &none, &fix.err), MSC_EDEVMEM);
    assert_null(none);
    assert_non_null(strstr(fix.err.message, "1152921504606846976"));
    assert_int_equal(fix.ops->memory_create(fix.device, 0, &none, NULL), MSC_EINVAL);
    fixture_close(&fix);
}

static void facts(void **state)
{
    fixture fix;

    (void)state;
    fixture_open(&fix, &tested_options);
    assert_int_equal(msc_device_kind_of(fix.device), tested_options.kind);
    assert_true(strlen(msc_device_name(fix.device)) > 0);
    assert_int_equal(msc_device_memory_now(fix.device, NULL, &fix.err), MSC_EINVAL);
    assert_int_equal(msc_device_memory_now(NULL, NULL, &fix.err), MSC_EINVAL);
    fixture_close(&fix);
}

/* On the stand-in: nothing was done that a driver would not forgive, nothing is left, and every copy was of
   the kind that runs beside the program. */
static void clean_books(void **state)
{
    fake_cuda_tell_function *tell;
    fake_cuda_report report;
    void *library;
    void *found;

    (void)state;
    if (tested_options.library == NULL)
        skip();
    library = dlopen(tested_options.library, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    found = dlsym(library, "fake_cuda_tell");
    assert_non_null(found);
    memcpy(&tell, &found, sizeof tell);
    tell(&report);
    if (report.violation_count > 0)
        fail_msg("%s", report.first_violation);
    assert_int_equal(report.left_count, 0);
    assert_int_equal(report.object_count, 0);
    assert_int_equal(report.context_count, 0);
    assert_int_equal(report.pageable_copy_count, 0);
    assert_true(report.copy_count > 1000);
}

static bool has_card(void)
{
    msc_context *ctx = NULL;
    msc_device *card = NULL;
    msc_status status = msc_context_create(NULL, &ctx, NULL);

    if (status == MSC_OK)
        status = msc_device_create(ctx, &tested_options, &card, NULL);
    msc_device_destroy(card);
    msc_context_destroy(ctx);
    return status != MSC_ENODEV; /* any other failure is the tests' to tell */
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        {"device/there-and-back", there_and_back, NULL, NULL, NULL},
        {"device/refused-copies", refused_copies, NULL, NULL, NULL},
        {"device_order/within-a-stream", order_within_a_stream, NULL, NULL, NULL},
        {"device_order/event-waits-for-work", order_event_waits_for_work, NULL, NULL, NULL},
        {"device_order/stream-waits-for-event", order_stream_waits_for_event, NULL, NULL, NULL},
        {"device_order/overwriting-waits-for-reading", order_overwriting_waits_for_reading, NULL, NULL, NULL},
        {"device_order/many-waiters", order_many_waiters, NULL, NULL, NULL},
        {"device_order/rerecord-releases-nobody", order_rerecord_releases_nobody, NULL, NULL, NULL},
        {"device_order/rerecord-holds-nobody", order_rerecord_holds_nobody, NULL, NULL, NULL},
        {"device_order/rerecord-is-what-counts", order_rerecord_is_what_counts, NULL, NULL, NULL},
        {"device_order/never-recorded", order_never_recorded, NULL, NULL, NULL},
        {"device_order/default-stream", order_default_stream, NULL, NULL, NULL},
        {"device_order/stream-ends-its-work", order_stream_ends_its_work, NULL, NULL, NULL},
        {"device_order/event-goes-early", order_event_goes_early, NULL, NULL, NULL},
        {"device_order/long-queue", order_long_queue, NULL, NULL, NULL},
        {"device_many/random-copies", many_random_copies, NULL, NULL, NULL},
        {"device_many/several-threads", many_several_threads, NULL, NULL, NULL},
        {"device_many/waiting-threads", many_waiting_threads, NULL, NULL, NULL},
        {"device/memory", device_memory, NULL, NULL, NULL},
        {"device/facts", facts, NULL, NULL, NULL},
        {"device/clean-books", clean_books, NULL, NULL, NULL},
    };

    tested_options = msc_device_options_default();
    if (argc >= 2 && strcmp(argv[1], "cuda") == 0) {
        tested_options.kind = MSC_DEVICE_CUDA;
        tested_options.library = argc >= 3 ? argv[2] : NULL;
    } else {
        tested_options.faults.seed = 7;
        tested_options.faults.delay_most_ns = 100000;
        tested_options.faults.bytes_per_second = 200000000;
        tested_options.faults.split_ppm = 300000;
    }
    if (tested_options.kind == MSC_DEVICE_CUDA && tested_options.library == NULL) {
        tested_slow_bytes = (size_t)128 << 20;
        if (!has_card())
            return SKIPPED;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
