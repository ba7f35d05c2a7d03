/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a spool: batches and their requests; any truncation, any flipped bit, any allocation that fails. */
#include "record_fixture.h"

#include "oom/failing_alloc.h"
#include "record/record_codec.h"

#define FILE_BYTES 1024u

static uint8_t file[FILE_BYTES];
static uint32_t file_bytes;
/* Where each record ends, the header before them. */
static uint32_t ends[16];
static uint32_t end_count;

static void add(msc__spool_kind kind, uint32_t batch, const char *payload, uint32_t payload_bytes)
{
    msc__spool_record record = {kind, batch, (const uint8_t *)payload, payload_bytes};

    msc__spool_put(file + file_bytes, &record);
    file_bytes += msc__spool_size(payload_bytes);
    ends[end_count++] = file_bytes;
}

static void add_row(uint32_t batch, int64_t step, const char *name, double value)
{
    msc_record_value values[1] = {{name, "bytes", value}};
    char payload[64];

    msc__spool_put_row((uint8_t *)payload, step, 1000 + step, values, 1);
    add(MSC__SPOOL_ROW, batch, payload, msc__spool_row_bytes(values, 1));
}

static int make_file(void **state)
{
    (void)state;
    memset(file, 0, sizeof file);
    msc__spool_put_header(file, 0, 0);
    file_bytes = MSC__SPOOL_HEADER_BYTES;
    end_count = 0;
    add_row(0, 0, "b", 1.5);
    add_row(0, 0, "a", 2);
    add_row(0, 1, "b", 3);
    add(MSC__SPOOL_EVENT, 0, "{\"kind\":\"oom\"}", 14);
    add(MSC__SPOOL_DOCUMENT, 0, "\4plan{}", 7);
    add(MSC__SPOOL_DOCUMENT, 0, "\4plan[1]", 8);
    add_row(1, 2, "b", 4);
    add(MSC__SPOOL_TICK, 2, "", 0);
    add(MSC__SPOOL_END, 2, "\1", 1);
    return place_setup(state);
}

static msc_spool *parsed(msc_context *ctx, uint32_t bytes)
{
    msc_spool *spool = NULL;

    assert_int_equal(msc_spool_parse(ctx, file, bytes, &spool, NULL), MSC_OK);
    return spool;
}

static void check_body(msc_spool *spool, const msc_spool_batch *batch, const char *expected)
{
    const char *text = NULL;
    size_t bytes = 0;

    assert_int_equal(msc_spool_body(spool, batch, "1-a", &text, &bytes, NULL), MSC_OK);
    assert_int_equal(bytes, strlen(expected));
    assert_memory_equal(text, expected, bytes);
}

static void batches_are_requests(void **state)
{
    const place *here = *state;
    msc_spool *spool = parsed(here->ctx, file_bytes);
    msc_spool_batch batch;

    assert_int_equal(msc_spool_next(spool, &batch), 1);
    assert_true(batch.sequence == 0 && batch.is_complete && batch.begin == MSC__SPOOL_HEADER_BYTES);
    assert_true(batch.value_count == 3 && batch.event_count == 1 && batch.document_count == 2);
    check_body(
        spool, &batch,
        "{\"client\":\"1-a\",\"sequence\":0,\"points\":["
        "{\"series\":\"a\",\"unit\":\"bytes\",\"steps\":[0],\"times_ms\":[1000],\"values\":[2]},"
        "{\"series\":\"b\",\"unit\":\"bytes\",\"steps\":[0,1],\"times_ms\":[1000,1001],\"values\":[1.5,3]}],"
        "\"events\":[{\"kind\":\"oom\"}],\"documents\":{\"plan\":[1]}}");
    assert_int_equal(msc_spool_next(spool, &batch), 1);
    assert_true(batch.sequence == 1 && batch.is_complete && batch.value_count == 1);
    assert_int_equal(msc_spool_next(spool, &batch), 1);
    assert_true(batch.sequence == 2 && !batch.is_complete && batch.end_state == 1 && batch.end == file_bytes);
    check_body(spool, &batch, "{\"client\":\"1-a\",\"sequence\":2}");
    assert_int_equal(msc_spool_next(spool, &batch), 0);
    assert_int_equal(msc_spool_damaged_bytes(spool), 0);
    msc_spool_destroy(spool);
}

/* Records in a file that ends after `bytes`. */
static uint32_t whole_records(uint32_t bytes)
{
    uint32_t count = 0;

    while (count < end_count && ends[count] <= bytes)
        count++;
    return count;
}

static uint32_t read_records(msc_spool *spool)
{
    msc_spool_batch batch;
    uint32_t count = 0;

    while (msc_spool_next(spool, &batch)) {
        const char *text;
        size_t bytes;

        count += batch.value_count + batch.event_count + batch.document_count + (batch.end_state != 0);
        assert_int_equal(msc_spool_body(spool, &batch, "1-a", &text, &bytes, NULL), MSC_OK);
    }
    return count;
}

static void any_truncation_is_read_to_its_last_record(void **state)
{
    const place *here = *state;
    uint32_t bytes;

    for (bytes = MSC__SPOOL_HEADER_BYTES; bytes <= file_bytes; bytes++) {
        msc_spool *spool = parsed(here->ctx, bytes);
        uint32_t whole = whole_records(bytes);
        uint32_t expected = whole >= 8 ? whole - 1 : whole; /* the tick has no content */

        assert_int_equal(read_records(spool), expected);
        assert_int_equal(msc_spool_damaged_bytes(spool), 0);
        msc_spool_destroy(spool);
    }
    for (bytes = 0; bytes < MSC__SPOOL_HEADER_BYTES; bytes++) {
        msc_spool *spool = NULL;

        assert_int_equal(msc_spool_parse(here->ctx, file, bytes, &spool, NULL), MSC_EFORMAT);
        assert_null(spool);
    }
}

static void a_flipped_bit_costs_its_record_alone(void **state)
{
    const place *here = *state;
    uint32_t bit;

    for (bit = MSC__SPOOL_HEADER_BYTES * 8; bit < ends[end_count - 3] * 8; bit++) {
        msc_spool *spool;
        uint32_t found;

        file[bit / 8] ^= (uint8_t)(1u << bit % 8);
        spool = parsed(here->ctx, file_bytes);
        found = read_records(spool);
        assert_true(found == 8 || found == 7); /* 8: in the zeros behind a payload */
        assert_int_equal(msc_spool_damaged_bytes(spool) > 0, found == 7);
        msc_spool_destroy(spool);
        file[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

static void a_file_is_read_from_a_batch_on(void **state)
{
    const place *here = *state;
    msc_spool *spool = NULL;
    msc_spool_batch batch;
    char path[512];
    FILE *out;

    path_in(here, "x.spool", path);
    out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(file, 1, file_bytes, out), file_bytes);
    assert_int_equal(fclose(out), 0);
    assert_int_equal(msc_spool_load(here->ctx, path, ends[5], &spool, NULL), MSC_OK);
    assert_int_equal(msc_spool_next(spool, &batch), 1);
    assert_true(batch.sequence == 1 && batch.begin == ends[5] && batch.end == ends[6]);
    check_body(
        spool, &batch,
        "{\"client\":\"1-a\",\"sequence\":1,\"points\":[{\"series\":\"b\",\"unit\":\"bytes\",\"steps\":[2],"
        "\"times_ms\":[1002],\"values\":[4]}]}");
    msc_spool_destroy(spool);
    assert_int_equal(msc_spool_load(here->ctx, path, UINT64_MAX, &spool, NULL), MSC_OK);
    assert_int_equal(msc_spool_next(spool, &batch), 0);
    msc_spool_destroy(spool);
    path_in(here, "none", path);
    assert_int_equal(msc_spool_load(here->ctx, path, 0, &spool, NULL), MSC_EIO);
    assert_null(spool);
}

static void wrong_arguments_are_refused(void **state)
{
    const place *here = *state;
    msc_spool *spool = parsed(here->ctx, file_bytes);
    msc_spool_batch batch;
    const char *text;
    size_t bytes;

    assert_int_equal(msc_spool_next(spool, &batch), 1);
    assert_int_equal(msc_spool_body(spool, &batch, "", &text, &bytes, NULL), MSC_EINVAL);
    assert_int_equal(msc_spool_body(spool, &batch, NULL, &text, &bytes, NULL), MSC_EINVAL);
    batch.end = file_bytes + 1;
    assert_int_equal(msc_spool_body(spool, &batch, "1-a", &text, &bytes, NULL), MSC_EINVAL);
    msc_spool_destroy(spool);
    msc_spool_destroy(NULL);
}

static void any_allocation_may_fail(void **state)
{
    failing_alloc heap;
    uint64_t fail_at;

    (void)state;
    for (fail_at = 1;; fail_at++) {
        msc_context *ctx;
        msc_spool *spool = NULL;
        msc_spool_batch batch;
        const char *text;
        size_t bytes;
        msc_status status;

        failing_alloc_init(&heap, fail_at);
        ctx = failing_alloc_context(&heap);
        status = msc_spool_parse(ctx, file, file_bytes, &spool, NULL);
        while (status == MSC_OK && msc_spool_next(spool, &batch))
            status = msc_spool_body(spool, &batch, "1-a", &text, &bytes, NULL);
        assert_int_equal(status, heap.failed_count > 0 ? MSC_ENOMEM : MSC_OK);
        msc_spool_destroy(spool);
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(&heap));
        if (heap.failed_count == 0)
            break;
    }
    assert_true(fail_at > 3);
}

#define file_test(test) cmocka_unit_test_setup_teardown(test, make_file, place_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        file_test(batches_are_requests),
        file_test(any_truncation_is_read_to_its_last_record),
        file_test(a_flipped_bit_costs_its_record_alone),
        file_test(a_file_is_read_from_a_batch_on),
        file_test(wrong_arguments_are_refused),
        file_test(any_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
