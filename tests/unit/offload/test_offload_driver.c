/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a driver refuses after a copy has begun: the copy is over before anybody gets memory of it back. Copies of this
 * device take their time and write their bytes at the end, so one that is still under way shows.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "offload_training.h"

#include "base/error.h"
#include "device/device_internal.h"

#define BYTES 200000u
#define CHUNK (64u << 10)

static msc_error err;

/* The host device, whose records fail as told. */
static struct driver {
    msc_device_ops ops;
    const msc_device_ops *host;
    atomic_uint records_left; /* until one fails; 0: none does */
    atomic_bool refuses_waits;
    void *copied_to; /* of the latest copy */
    const void *copied_from;
    uint64_t copied_bytes;
} driver;

static msc_status record(msc_device *device, void *event, void *stream, msc_error *why)
{
    if (atomic_load(&driver.records_left) > 0 && atomic_fetch_sub(&driver.records_left, 1) == 1)
        return msc__fail(why, MSC_EDRIVER, "no record on purpose");
    return driver.host->event_record(device, event, stream, why);
}

static msc_status wait_on_stream(msc_device *device, void *stream, void *event, msc_error *why)
{
    if (stream == NULL && atomic_load(&driver.refuses_waits))
        return msc__fail(why, MSC_EDRIVER, "no wait on purpose");
    return driver.host->stream_wait(device, stream, event, why);
}

static msc_status copy(msc_device *device, void *to, const void *from, uint64_t bytes, msc_copy_kind kind,
                       void *stream, msc_error *why)
{
    driver.copied_to = to;
    driver.copied_from = from;
    driver.copied_bytes = bytes;
    return driver.host->copy(device, to, from, bytes, kind, stream, why);
}

static bool copy_is_over(void)
{
    return memcmp(driver.copied_to, driver.copied_from, (size_t)driver.copied_bytes) == 0;
}

static void open_driver(training *t, msc_tier tier, msc_device_kind kind)
{
    msc_offload_options options = training_options(tier);
    msc_device_options slow = msc_device_options_default();

    memset(t, 0, sizeof *t);
    failing_alloc_init(&t->heap, FAILING_ALLOC_NEVER);
    failing_alloc_init(&t->device_heap, FAILING_ALLOC_NEVER);
    t->ctx = failing_alloc_context(&t->heap);
    t->device_ctx = failing_alloc_context(&t->device_heap);
    slow.faults.bytes_per_second = 4000000; /* a block takes 50 ms */
    assert_int_equal(msc_device_create(t->device_ctx, &slow, &t->device, &err), MSC_OK);
    driver.host = t->device->ops;
    driver.ops = *driver.host;
    driver.ops.event_record = record;
    driver.ops.stream_wait = wait_on_stream;
    driver.ops.copy = copy;
    t->device->ops = &driver.ops;
    t->device->kind = kind;
    options.chunk_bytes = CHUNK;
    assert_int_equal(msc_offload_create(t->ctx, t->device, &options, &t->engine, &err), MSC_OK);
}

static unsigned char *bytes_of(uint64_t seed)
{
    unsigned char *bytes = malloc(BYTES);

    assert_non_null(bytes);
    if (seed != 0)
        training_fill(bytes, BYTES, seed);
    else
        memset(bytes, 0, BYTES);
    return bytes;
}

/* The place, or the buffer, is the engine's again as soon as the block has failed. */
static void a_copy_out_without_a_record(void **state)
{
    (void)state;
    for (msc_tier tier = MSC_TIER_PINNED; tier <= MSC_TIER_FILE; tier++) {
        unsigned char *source = bytes_of(3);
        msc_ticket ticket;
        training t;

        open_driver(&t, tier, MSC_DEVICE_HOST);
        atomic_store(&driver.records_left, 1);
        assert_int_equal(msc_offload_put(t.engine, source, BYTES, NULL, &ticket, &err), MSC_OK);
        assert_int_equal(msc_offload_settle(t.engine, ticket, NULL, &err), MSC_EDRIVER);
        assert_non_null(strstr(err.message, "no record on purpose"));
        assert_true(copy_is_over());
        msc_offload_drop(t.engine, ticket);
        training_close(&t);
        free(source);
    }
}

/* The destination is the program's again. */
static void a_copy_back_without_a_record(void **state)
{
    (void)state;
    for (msc_tier tier = MSC_TIER_PINNED; tier <= MSC_TIER_FILE; tier++) {
        unsigned char *source = bytes_of(3);
        unsigned char *destination = bytes_of(0);
        msc_ticket ticket;
        training t;

        open_driver(&t, tier, MSC_DEVICE_HOST);
        assert_int_equal(msc_offload_put(t.engine, source, BYTES, NULL, &ticket, &err), MSC_OK);
        assert_int_equal(msc_offload_settle(t.engine, ticket, NULL, &err), MSC_OK);
        atomic_store(&driver.records_left, 1);
        assert_int_equal(msc_offload_get(t.engine, ticket, destination, NULL, &err), MSC_OK);
        assert_int_equal(msc_offload_arrive(t.engine, ticket, NULL, &err), MSC_EDRIVER);
        assert_true(copy_is_over());
        memset(destination, 0, BYTES);
        assert_int_equal(msc_offload_get(t.engine, ticket, destination, NULL, &err), MSC_OK);
        assert_int_equal(msc_offload_arrive(t.engine, ticket, NULL, &err), MSC_OK);
        assert_true(training_is(destination, BYTES, 3));
        msc_offload_drop(t.engine, ticket);
        training_close(&t);
        free(source);
        free(destination);
    }
}

/* A stream that cannot be made to wait: then the host does, before it says so. */
static void a_stream_that_cannot_wait(void **state)
{
    unsigned char *source = bytes_of(5);
    unsigned char *destination = bytes_of(0);
    msc_ticket ticket;
    training t;

    (void)state;
    open_driver(&t, MSC_TIER_PINNED, MSC_DEVICE_CUDA); /* whose streams wait for what is under way */
    assert_int_equal(msc_offload_put(t.engine, source, BYTES, NULL, &ticket, &err), MSC_OK);
    assert_int_equal(msc_offload_settle(t.engine, ticket, NULL, &err), MSC_OK);
    assert_int_equal(msc_offload_get(t.engine, ticket, destination, NULL, &err), MSC_OK);
    atomic_store(&driver.refuses_waits, true);
    assert_int_equal(msc_offload_arrive(t.engine, ticket, NULL, &err), MSC_EDRIVER);
    assert_true(training_is(destination, BYTES, 5));
    atomic_store(&driver.refuses_waits, false);
    msc_offload_drop(t.engine, ticket);
    training_close(&t);
    free(source);
    free(destination);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_copy_out_without_a_record),
        cmocka_unit_test(a_copy_back_without_a_record),
        cmocka_unit_test(a_stream_that_cannot_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
