/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A card gives the host's fingerprints, and finds what differs: `test_fingerprint_card [LIBRARY COMPILER]`, on a real card
 * without arguments, where exit status 77 means that there is none, or no compiler; MEMSCALE_NVRTC may name one.
 *
 * The stand-in runs the kernel's text compiled for the host. What NVIDIA's compiler and a card make of it, the same cases
 * show where there is a card.
 */
#include "fingerprint_fixture.h"

#include <stdbool.h>
#include <stdio.h>

#include "base/error.h"
#include "base/thread.h"
#include "device/device_internal.h"
#include "fingerprint/cuda/card_types.h"

#define BYTES ((size_t)3 << 20)
#define SLOTS 8u
#define SKIPPED 77

static msc_context *ctx;
static msc_device *device;
static msc_fingerprint_table *table;
static void *stream;
static void *other_stream;
static void *event;
static unsigned char *here;  /* what is on the card */
static unsigned char *there; /* where it is */
static msc_error err;

static void must(msc_status status)
{
    if (status != MSC_OK)
        fail_msg("%s: %s", msc_status_name(status), err.message);
}

static void send(size_t from, size_t bytes)
{
    const msc_device_ops *ops = device->ops;

    must(ops->copy(device, there + from, here + from, bytes, MSC_COPY_IN, stream, &err));
}

static void wait_for(void *of)
{
    must(device->ops->event_record(device, event, of, &err));
    must(device->ops->event_wait(device, event, &err));
}

/* So that nothing that is under way reads what is written next. */
static void wait_for_all(void)
{
    wait_for(stream);
    wait_for(other_stream);
    wait_for(NULL);
}

static msc_fingerprint_tensor on_card(msc_fingerprint_tensor tensor)
{
    if (tensor.data != NULL)
        tensor.data = there + ((const unsigned char *)tensor.data - here);
    return tensor;
}

static uint32_t keep(msc_fingerprint_tensor tensor, uint32_t one_in)
{
    uint32_t slot = MSC_NONE;

    tensor = on_card(tensor);
    must(msc_fingerprint_keep(table, &tensor, one_in, stream, &slot, &err));
    return slot;
}

static void compare(uint32_t slot, msc_fingerprint_tensor tensor, uint32_t one_in, uint64_t tag)
{
    tensor = on_card(tensor);
    must(msc_fingerprint_compare(table, slot, &tensor, one_in, tag, stream, &err));
}

static msc_fingerprint_differences read_differences(void)
{
    msc_fingerprint_differences found;

    must(msc_fingerprint_read(table, &found, &err));
    return found;
}

static uint64_t value_of(uint32_t slot)
{
    uint64_t value = 0;

    must(msc_fingerprint_value(table, slot, &value, &err));
    return value;
}

static uint64_t of_host(msc_fingerprint_tensor tensor, uint32_t one_in)
{
    uint64_t value = 0;

    must(msc_fingerprint(&tensor, one_in, 1, &value, &err));
    return value;
}

/* Kept and compared, as a whole and by samples. */
static void same_as_host(msc_fingerprint_tensor tensor)
{
    static const uint32_t shares[] = {MSC_FINGERPRINT_WHOLE, 3, MSC_FINGERPRINT_SAMPLE};
    size_t i;

    for (i = 0; i < sizeof shares / sizeof shares[0]; i++) {
        uint32_t slot = keep(tensor, shares[i]);

        assert_int_equal(value_of(slot), of_host(tensor, shares[i]));
        compare(slot, tensor, shares[i], i);
        assert_int_equal(read_differences().differences, 0);
        msc_fingerprint_release(table, slot);
    }
}

static msc_fingerprint_tensor range(size_t from, const int64_t *bytes)
{
    return (msc_fingerprint_tensor){here + from, 1, 1, bytes, NULL};
}

/* ---- values ---------------------------------------------------------------------------------------------------- */

/* Around words, rows, blocks, segments, windows of samples, and what all groups of a launch read at a time. */
static void every_size(void **state)
{
    static const int64_t sizes[] = {
        0,     1,     7,     8,     9,      127,    128,     129,           1023,
        1024,  1025,  4095,  4096,  4097,   8191,   8192,    8193,          65535,
        65536, 65537, 65540, 69632, 131072, 200003, 1 << 20, (1 << 20) + 1, 2500001};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        same_as_host(range(0, &sizes[i]));
}

static void nothing_has_no_address(void **state)
{
    static const int64_t none = 0;

    (void)state;
    same_as_host((msc_fingerprint_tensor){NULL, 4, 1, &none, NULL});
}

static void every_alignment(void **state)
{
    static const int64_t sizes[] = {5, 1024, 5003, 100003};
    size_t i, from;

    (void)state;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (from = 1; from <= 16; from++)
            same_as_host(range(from, &sizes[i]));
}

/* A launch has no more groups than that; each goes on behind what all of them have read. */
static void more_than_all_groups(void **state)
{
    const size_t at_a_time = (size_t)MSC__FP_MOST_GROUPS * MSC__FP_AT_A_TIME * MSC__FP_BLOCK_BYTES;
    unsigned char *large_here = calloc(1, at_a_time + 9000);
    void *large_there = NULL;
    int64_t size = (int64_t)at_a_time + 8999;
    msc_fingerprint_tensor tensor = {large_here, 1, 1, &size, NULL};
    uint64_t expected;
    uint32_t slot;

    (void)state;
    assert_non_null(large_here);
    fixture_fill(large_here + at_a_time - 5000, 13000, 3);
    expected = of_host(tensor, MSC_FINGERPRINT_WHOLE);
    must(device->ops->memory_create(device, at_a_time + 9000, &large_there, &err));
    must(device->ops->copy(device, large_there, large_here, at_a_time + 9000, MSC_COPY_IN, stream, &err));
    tensor.data = large_there;
    must(msc_fingerprint_keep(table, &tensor, MSC_FINGERPRINT_WHOLE, stream, &slot, &err));
    assert_int_equal(value_of(slot), expected);
    msc_fingerprint_release(table, slot);
    device->ops->memory_destroy(device, large_there, at_a_time + 9000);
    free(large_here);
}

typedef struct shape {
    uint32_t dims;
    int64_t sizes[5];
    int64_t strides[5];
} shape;

/* Dense in every order, slices, gaps in several dimensions, repeated and overlapping elements, large and odd runs. */
static void every_layout(void **state)
{
    static const shape shapes[] = {
        {0, {0}, {0}},
        {3, {5, 7, 11}, {77, 11, 1}},
        {3, {7, 5, 11}, {11, 77, 1}},
        {4, {4, 3, 9, 8}, {216, 1, 24, 3}},
        {2, {100, 60}, {64, 1}},
        {2, {60, 100}, {1, 64}},
        {2, {1000, 3}, {5, 1}},
        {2, {3, 30000}, {30001, 1}},
        {3, {20, 30, 7}, {700, 21, 2}},
        {5, {2, 1, 6, 2, 5}, {500, 3, 40, 15, 1}},
        {2, {900, 7}, {1, 0}},
        {2, {500, 40}, {8, 1}},
        {2, {200, 24}, {27, 1}},
        {2, {0, 4}, {4, 1}},
    };
    static const uint64_t items[] = {1, 2, 3, 4, 8, 16};
    size_t i, k, from;

    (void)state;
    for (i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (k = 0; k < sizeof items / sizeof items[0]; k++)
            for (from = 0; from <= 8; from += i % 2 == 0 ? 4 : 3)
                same_as_host((msc_fingerprint_tensor){here + from, items[k], shapes[i].dims, shapes[i].sizes,
                                                      shapes[i].strides});
}

static void random_layouts(void **state)
{
    uint64_t seed = 11;
    int i;

    (void)state;
    for (i = 0; i < 200; i++) {
        shape of = {1 + (uint32_t)(fixture_random(&seed) % 4), {0}, {0}};
        uint64_t item = UINT64_C(1) << fixture_random(&seed) % 4;
        int64_t stride = 1;
        uint32_t d;

        for (d = of.dims; d-- > 0;) {
            of.sizes[d] = 1 + (int64_t)(fixture_random(&seed) % 9);
            of.strides[d] = stride;
            stride *= of.sizes[d] + (int64_t)(fixture_random(&seed) % 3);
        }
        same_as_host(
            (msc_fingerprint_tensor){here + fixture_random(&seed) % 32, item, of.dims, of.sizes, of.strides});
    }
}

/* ---- differences ----------------------------------------------------------------------------------------------- */

/* In a first word, a last byte, on either side of a block's end. */
static void a_flipped_bit_is_found(void **state)
{
    static const int64_t size = 20003;
    static const size_t places[] = {0, 7, 8, 1023, 1024, 4096, 12345, 20002};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof places / sizeof places[0]; i++) {
        uint32_t slot = keep(range(1, &size), MSC_FINGERPRINT_WHOLE);
        msc_fingerprint_differences found;
        uint64_t before = of_host(range(1, &size), MSC_FINGERPRINT_WHOLE);
        unsigned char bit = (unsigned char)(1u << i % 8);

        wait_for_all();
        here[1 + places[i]] ^= bit;
        send(0, 20016);
        compare(slot, range(1, &size), MSC_FINGERPRINT_WHOLE, 100 + i);
        found = read_differences();
        assert_int_equal(found.differences, 1);
        assert_int_equal(found.tag, 100 + i);
        assert_int_equal(found.kept, before);
        assert_int_equal(found.found, of_host(range(1, &size), MSC_FINGERPRINT_WHOLE));
        here[1 + places[i]] ^= bit;
        send(0, 20016);
        compare(slot, range(1, &size), MSC_FINGERPRINT_WHOLE, 200);
        assert_int_equal(read_differences().differences, 0);
        msc_fingerprint_release(table, slot);
    }
}

/* So does another length, of the same bytes. */
static void lengths_differ(void **state)
{
    static const int64_t one = 4096, two = 4097;
    uint32_t slot;

    (void)state;
    wait_for_all();
    here[4096] = 0;
    send(0, 8192);
    slot = keep(range(0, &one), MSC_FINGERPRINT_WHOLE);
    compare(slot, range(0, &two), MSC_FINGERPRINT_WHOLE, 1);
    assert_int_equal(read_differences().differences, 1);
    msc_fingerprint_release(table, slot);
}

/* Many under way before anybody reads: the first difference is told, the others are counted, and a read forgets them. */
static void the_first_is_told(void **state)
{
    static const int64_t size = 5000;
    uint32_t slots[SLOTS];
    msc_fingerprint_differences found;
    uint32_t i;

    (void)state;
    for (i = 0; i < SLOTS; i++)
        slots[i] = keep(range((size_t)i * 8192, &size), MSC_FINGERPRINT_WHOLE);
    for (i = 0; i < SLOTS; i++) /* 3 and from 5 on are compared with their neighbours */
        compare(slots[i], range((size_t)(i == 3 || i >= 5 ? i - 1 : i) * 8192, &size), MSC_FINGERPRINT_WHOLE,
                UINT64_MAX - i);
    found = read_differences();
    assert_int_equal(found.differences, 1 + SLOTS - 5);
    assert_int_equal(found.tag, UINT64_MAX - 3);
    assert_int_equal(found.found, value_of(slots[2]));
    assert_int_equal(found.kept, value_of(slots[3]));
    assert_int_equal(read_differences().differences, 0);
    compare(slots[0], range(0, &size), MSC_FINGERPRINT_WHOLE, 1);
    assert_int_equal(read_differences().tag, 0);
    for (i = 0; i < SLOTS; i++)
        msc_fingerprint_release(table, slots[i]);
}

/* A difference where no sample is read is not seen, nor are bytes between rows. */
static void samples_and_gaps_are_not_seen(void **state)
{
    static const int64_t size = 1 << 20, sizes[] = {100, 10}, strides[] = {16, 1};
    msc_fingerprint_tensor rows = {here, 4, 2, sizes, strides};
    uint32_t sampled = keep(range(0, &size), MSC_FINGERPRINT_SAMPLE);
    uint32_t gaps = keep(rows, MSC_FINGERPRINT_WHOLE);
    size_t changed = 4 * 11;

    (void)state;
    wait_for_all();
    here[changed] ^= 1;
    here[MSC_FINGERPRINT_SEGMENT * 15] ^=
        1; /* not the first segment of the first window, which is the one read */
    send(0, (size_t)size);
    compare(gaps, rows, MSC_FINGERPRINT_WHOLE, 1);
    assert_int_equal(read_differences().differences, 0);
    here[changed] ^= 1;
    wait_for_all();
    send(0, (size_t)size);
    compare(sampled, range(0, &size), MSC_FINGERPRINT_SAMPLE, 2);
    assert_int_equal(read_differences().differences, 0);
    msc_fingerprint_release(table, sampled);
    msc_fingerprint_release(table, gaps);
}

/* ---- order ------------------------------------------------------------------------------------------------------ */

/*
 * The host is not waited for, and each call comes behind the one before, whatever the streams: a slot that was given back is
 * written behind who still reads it, and before who reads it next.
 */
static void streams_take_turns(void **state)
{
    static const int64_t size = 300000;
    const msc_fingerprint_tensor tensors[] = {on_card(range(0, &size)), on_card(range(1 << 20, &size))};
    void *const streams[] = {stream, other_stream, NULL};
    uint32_t slot = keep(range(0, &size), MSC_FINGERPRINT_WHOLE);
    uint32_t first = slot;
    int i;

    (void)state;
    for (i = 0; i < 9; i++) {
        must(msc_fingerprint_compare(table, slot, &tensors[i % 2], MSC_FINGERPRINT_WHOLE, 1, streams[i % 3],
                                     &err));
        msc_fingerprint_release(table, slot);
        must(msc_fingerprint_keep(table, &tensors[(i + 1) % 2], MSC_FINGERPRINT_WHOLE,
                                  streams[(i + 1) / 2 % 3], &slot, &err));
        assert_int_equal(slot, first);
    }
    wait_for_all(); /* what comes too late is told, too */
    assert_int_equal(read_differences().differences, 0);
    assert_int_equal(value_of(slot), of_host(range(1 << 20, &size), MSC_FINGERPRINT_WHOLE));
    msc_fingerprint_release(table, slot);
}

typedef struct worker {
    msc_fingerprint_tensor tensor; /* on the card */
    uint64_t expected;
    msc_status status;
    uint32_t wrong;
} worker;

static void *work(void *argument)
{
    worker *self = argument;
    uint32_t slot = 0;
    uint64_t value = 0;
    int i;

    for (i = 0; i < 30 && self->status == MSC_OK; i++) {
        self->status = msc_fingerprint_keep(table, &self->tensor, MSC_FINGERPRINT_WHOLE, stream, &slot, NULL);
        if (self->status == MSC_OK)
            self->status =
                msc_fingerprint_compare(table, slot, &self->tensor, MSC_FINGERPRINT_WHOLE, 1, stream, NULL);
        if (self->status == MSC_OK)
            self->status = msc_fingerprint_value(table, slot, &value, NULL);
        self->wrong += value != self->expected;
        msc_fingerprint_release(table, slot);
    }
    return NULL;
}

static void threads_take_turns(void **state)
{
    static const int64_t size = 9000;
    worker workers[4];
    msc__thread threads[4];
    size_t i;

    (void)state;
    for (i = 0; i < 4; i++) {
        workers[i] = (worker){on_card(range(i * 10000, &size)), 0, MSC_OK, 0};
        workers[i].expected = of_host(range(i * 10000, &size), MSC_FINGERPRINT_WHOLE);
        must(msc__thread_start(&threads[i], "worker", work, &workers[i], &err));
    }
    for (i = 0; i < 4; i++) {
        msc__thread_join(&threads[i]);
        assert_int_equal(workers[i].status, MSC_OK);
        assert_int_equal(workers[i].wrong, 0);
    }
    assert_int_equal(read_differences().differences, 0);
}

/* ---- errors ----------------------------------------------------------------------------------------------------- */

static void slots_run_out(void **state)
{
    static const int64_t size = 100;
    msc_fingerprint_tensor tensor = on_card(range(0, &size));
    uint32_t slots[SLOTS];
    uint32_t slot = 77;
    uint32_t i;

    (void)state;
    for (i = 0; i < SLOTS; i++)
        slots[i] = keep(range(0, &size), MSC_FINGERPRINT_WHOLE);
    assert_int_equal(msc_fingerprint_keep(table, &tensor, 1, stream, &slot, &err), MSC_EAGAIN);
    assert_string_equal(err.message, "all 8 slots of the table are taken: release some");
    assert_int_equal(slot, 77);
    msc_fingerprint_release(table, slots[5]);
    msc_fingerprint_release(table, slots[2]);
    assert_int_equal(keep(range(0, &size), MSC_FINGERPRINT_WHOLE), slots[2]);
    assert_int_equal(keep(range(0, &size), MSC_FINGERPRINT_WHOLE), slots[5]);
    for (i = 0; i < SLOTS; i++)
        msc_fingerprint_release(table, slots[i]);
}

#define REFUSED(call, said)                                                                                  \
    do {                                                                                                     \
        assert_int_equal(call, MSC_EINVAL);                                                                  \
        assert_string_equal(err.message, said);                                                              \
    } while (0)

static void wrong_arguments(void **state)
{
    static const int64_t size = 100, less = -1;
    msc_fingerprint_tensor tensor = on_card(range(0, &size));
    msc_fingerprint_tensor negative = on_card(range(0, &less));
    msc_fingerprint_differences found;
    uint64_t value;
    uint32_t slot;

    (void)state;
    REFUSED(msc_fingerprint_keep(NULL, &tensor, 1, stream, &slot, &err), "table or slot is NULL");
    REFUSED(msc_fingerprint_keep(table, &tensor, 1, stream, NULL, &err), "table or slot is NULL");
    REFUSED(msc_fingerprint_keep(table, NULL, 1, stream, &slot, &err), "tensor is NULL");
    REFUSED(msc_fingerprint_keep(table, &tensor, 0, stream, &slot, &err),
            "one_in is 0, allowed are 1 and above");
    REFUSED(msc_fingerprint_keep(table, &negative, 1, stream, &slot, &err),
            "size 0 is -1, allowed are 0 and above");
    REFUSED(msc_fingerprint_compare(NULL, 0, &tensor, 1, 0, stream, &err), "table is NULL");
    REFUSED(msc_fingerprint_compare(table, 0, &tensor, 1, 0, stream, &err), "slot 0 has no fingerprint");
    REFUSED(msc_fingerprint_compare(table, SLOTS, &tensor, 1, 0, stream, &err), "slot 8 has no fingerprint");
    REFUSED(msc_fingerprint_value(table, 1, &value, &err), "slot 1 has no fingerprint");
    REFUSED(msc_fingerprint_value(table, 1, NULL, &err), "table or out is NULL");
    REFUSED(msc_fingerprint_read(NULL, &found, &err), "table or out is NULL");
    msc_fingerprint_release(table, 3);
    msc_fingerprint_release(table, MSC_NONE);
    msc_fingerprint_release(NULL, 0);
    msc_fingerprint_table_destroy(NULL);
    must(msc_fingerprint_read(table, &found, &err));
    assert_int_equal(found.differences, 0);
}

static void wrong_options(void **state)
{
    msc_fingerprint_table_options options = msc_fingerprint_table_options_default();
    msc_fingerprint_table *made = NULL;
    msc_device *host = NULL;

    (void)state;
    assert_int_equal(options.slot_count, 65536);
    REFUSED(msc_fingerprint_table_create(ctx, &options, NULL, &err), "out is NULL");
    REFUSED(msc_fingerprint_table_create(NULL, &options, &made, &err), "ctx or options is NULL");
    REFUSED(msc_fingerprint_table_create(ctx, &options, &made, &err),
            "device is NULL: a table lies on a card");
    options.device = device;
    options.slot_count = 0;
    REFUSED(msc_fingerprint_table_create(ctx, &options, &made, &err),
            "slot_count is 0, allowed are 1 to 16777216");
    options.slot_count = MSC_FINGERPRINT_MOST_SLOTS + 1;
    REFUSED(msc_fingerprint_table_create(ctx, &options, &made, &err),
            "slot_count is 16777217, allowed are 1 to 16777216");
    options.struct_bytes = 3;
    assert_int_equal(msc_fingerprint_table_create(ctx, &options, &made, &err), MSC_EINVAL);
    options = msc_fingerprint_table_options_default();
    must(msc_device_create(ctx, NULL, &host, &err));
    options.device = host;
    assert_int_equal(msc_fingerprint_table_create(ctx, &options, &made, &err), MSC_EUNSUPPORTED);
    assert_string_equal(err.message, "device 'host' runs no kernels: msc_fingerprint is for host memory");
    assert_null(made);
    msc_device_destroy(host);
}

/* Records fail, and what is under way is waited for all the same. */
static const msc_device_ops *real_ops;
static uint32_t finished;

static msc_status refuse_record(msc_device *of, void *which, void *on, msc_error *why)
{
    (void)of;
    (void)which;
    (void)on;
    return msc__fail(why, MSC_EDRIVER, "no record on purpose");
}

static void count_finish(msc_device *of, void *which)
{
    finished++;
    real_ops->stream_finish(of, which);
}

static void records_that_are_refused(void **state)
{
    static const int64_t size = 50000;
    msc_fingerprint_tensor tensor = on_card(range(3, &size));
    uint32_t slot = keep(range(3, &size), 1);
    uint32_t other = MSC_NONE;
    msc_device_ops ops = *device->ops;
    uint64_t value;

    (void)state;
    real_ops = device->ops;
    finished = 0;
    ops.event_record = refuse_record;
    ops.stream_finish = count_finish;
    device->ops = &ops;
    assert_int_equal(msc_fingerprint_keep(table, &tensor, 1, stream, &other, &err), MSC_EDRIVER);
    assert_int_equal(finished, 1); /* its kernel writes to the table's memory */
    assert_int_equal(msc_fingerprint_value(table, slot, &value, &err), MSC_EDRIVER);
    assert_int_equal(finished, 2); /* its copy to `value` */
    device->ops = real_ops;
    assert_int_equal(value_of(slot), of_host(range(3, &size), 1));
    msc_fingerprint_release(table, slot);
}

/* With less and less memory refused: each failure is named, leaves NULL and gives back what it had. */
static void no_memory(void **state)
{
    msc_fingerprint_table_options options = msc_fingerprint_table_options_default();
    msc_context_options limits = msc_context_options_default();
    msc_fingerprint_table *made = table;
    msc_status status = MSC_ENOMEM;

    (void)state;
    options.device = device;
    options.slot_count = 100;
    for (limits.memory_limit_bytes = 16; status == MSC_ENOMEM; limits.memory_limit_bytes += 16) {
        msc_context *tight;

        must(msc_context_create(&limits, &tight, &err));
        status = msc_fingerprint_table_create(tight, &options, &made, &err);
        assert_true((status == MSC_OK) == (made != NULL));
        msc_fingerprint_table_destroy(made);
        assert_int_equal(msc_context_held_bytes(tight), 0);
        msc_context_destroy(tight);
    }
    must(status);
    assert_true(limits.memory_limit_bytes > 400);
}

static void calls_allocate_nothing(void **state)
{
    static const int64_t size = 50000;
    uint64_t held = msc_context_held_bytes(ctx);
    uint64_t peak = msc_context_peak_bytes(ctx);
    uint32_t slot = keep(range(3, &size), MSC_FINGERPRINT_SAMPLE);

    (void)state;
    compare(slot, range(3, &size), MSC_FINGERPRINT_SAMPLE, 1);
    assert_int_equal(read_differences().differences, 0);
    msc_fingerprint_release(table, slot);
    assert_int_equal(msc_context_held_bytes(ctx), held);
    assert_int_equal(msc_context_peak_bytes(ctx), peak);
}

/* ---- the card ---------------------------------------------------------------------------------------------------- */

static int refill(void **state)
{
    (void)state;
    wait_for_all();
    fixture_fill(here, BYTES, 1);
    send(0, BYTES);
    return 0;
}

static int give_up(const char *what)
{
    print_message("%s: %s\n", what, err.message);
    return SKIPPED;
}

static int make_table(bool is_real)
{
    msc_fingerprint_table_options options = msc_fingerprint_table_options_default();
    msc_status status;

    options.device = device;
    options.slot_count = SLOTS;
    status = msc_fingerprint_table_create(ctx, &options, &table, &err);
    if (status == MSC_EUNSUPPORTED && is_real)
        return give_up("no compiler");
    return status != MSC_OK;
}

static int begin(const char *library, const char *compiler)
{
    msc_device_options options = msc_device_options_default();
    void *memory = NULL;
    msc_status status;
    int made;

    options.kind = MSC_DEVICE_CUDA;
    options.library = library;
    options.compiler = compiler;
    if (msc_context_create(NULL, &ctx, &err) != MSC_OK)
        return 1;
    status = msc_device_create(ctx, &options, &device, &err);
    if (status == MSC_ENODEV && library == NULL)
        return give_up("no card");
    if (status != MSC_OK)
        return fprintf(stderr, "%s\n", err.message) > 0;
    made = make_table(library == NULL);
    if (made != 0)
        return made;
    must(device->ops->stream_create(device, &stream, &err));
    must(device->ops->stream_create(device, &other_stream, &err));
    must(device->ops->event_create(device, &event, &err));
    must(device->ops->memory_create(device, BYTES, &memory, &err));
    there = memory;
    here = malloc(BYTES);
    return here == NULL;
}

static int finish(void **state)
{
    (void)state;
    msc_fingerprint_table_destroy(table);
    device->ops->memory_destroy(device, there, BYTES);
    device->ops->event_destroy(device, event);
    device->ops->stream_destroy(device, other_stream);
    device->ops->stream_destroy(device, stream);
    msc_device_destroy(device);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    free(here);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(every_size, refill),
        cmocka_unit_test_setup(records_that_are_refused, refill),
        cmocka_unit_test_setup(nothing_has_no_address, refill),
        cmocka_unit_test_setup(every_alignment, refill),
        cmocka_unit_test_setup(more_than_all_groups, refill),
        cmocka_unit_test_setup(every_layout, refill),
        cmocka_unit_test_setup(random_layouts, refill),
        cmocka_unit_test_setup(a_flipped_bit_is_found, refill),
        cmocka_unit_test_setup(lengths_differ, refill),
        cmocka_unit_test_setup(the_first_is_told, refill),
        cmocka_unit_test_setup(samples_and_gaps_are_not_seen, refill),
        cmocka_unit_test_setup(streams_take_turns, refill),
        cmocka_unit_test_setup(threads_take_turns, refill),
        cmocka_unit_test_setup(slots_run_out, refill),
        cmocka_unit_test_setup(wrong_arguments, refill),
        cmocka_unit_test_setup(wrong_options, refill),
        cmocka_unit_test_setup(no_memory, refill),
        cmocka_unit_test_setup(calls_allocate_nothing, refill),
    };
    int opened = begin(argc > 2 ? argv[1] : NULL, argc > 2 ? argv[2] : getenv("MEMSCALE_NVRTC"));

    if (opened != 0)
        return opened;
    return cmocka_run_group_tests_name("fingerprint_card", tests, NULL, finish);
}
