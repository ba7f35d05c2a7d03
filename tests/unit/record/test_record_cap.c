/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches, segments and the cap: what a request can hold, where files end, and what goes when there are too
 * many.
 */
#include "record_fixture.h"

#include "oom/failing_alloc.h"
#include "record/record_writer.h"

#define MOST_REQUEST (1u << 20)

static void begin(const place *here, uint64_t segment_bytes, uint64_t cap_bytes, msc__writer *out)
{
    msc_record_options options = options_for(here);

    options.segment_bytes = segment_bytes;
    options.cap_bytes = cap_bytes;
    assert_int_equal(msc__writer_init(here->ctx, &options, "1-test", out, NULL), MSC_OK);
}

static void add_row(msc__writer *writer, int64_t step, const char *name)
{
    msc_record_value value = {name, "bytes", -1.0 / 3};
    uint8_t payload[256];

    msc__spool_put_row(payload, step, INT64_MIN, &value, 1);
    assert_true(msc__writer_add(writer, MSC__SPOOL_ROW, payload, msc__spool_row_bytes(&value, 1), 0));
}

static void finish(msc__writer *writer)
{
    assert_true(msc__writer_close_batch(writer) && msc__writer_settle(writer));
    msc__writer_fini(writer);
}

typedef struct totals {
    uint64_t values, events, documents, batches;
    uint64_t largest; /* request */
} totals;

/* All files, in order: batches are numbered without a gap, and each lies in one file. */
static totals read_all(const place *here, unsigned last)
{
    totals found = {0};
    unsigned number;
    int64_t before = -1;

    for (number = 0; number <= last; number++) {
        msc_spool *spool = NULL;
        msc_spool_batch batch;
        char path[512];

        spool_path(here, number, path);
        if (!exists(path))
            continue;
        assert_int_equal(msc_spool_load(here->ctx, path, 0, &spool, NULL), MSC_OK);
        while (msc_spool_next(spool, &batch)) {
            const char *text;
            size_t bytes;

            if (batch.value_count + batch.event_count + batch.document_count == 0)
                continue;
            assert_true((int64_t)batch.sequence > before);
            before = batch.sequence;
            assert_int_equal(msc_spool_body(spool, &batch, "1-test", &text, &bytes, NULL), MSC_OK);
            found.largest = bytes > found.largest ? bytes : found.largest;
            found.values += batch.value_count;
            found.events += batch.event_count;
            found.documents += batch.document_count;
            found.batches++;
        }
        msc_spool_destroy(spool);
    }
    return found;
}

/* Numbers at their longest, names of quotes: what is counted beforehand is never less than what comes out. */
static void a_request_is_never_too_large(void **state)
{
    const place *here = *state;
    msc__writer writer;
    totals found;
    char name[64];
    int i;

    begin(here, 4u << 20, 256u << 20, &writer);
    for (i = 0; i < 30000; i++) {
        (void)snprintf(name, sizeof name, "\"\"\"\"\\\\\\\\%d", i % 997);
        add_row(&writer, INT64_MIN, name);
    }
    finish(&writer);
    found = read_all(here, writer.segment);
    assert_int_equal(found.values, 30000);
    assert_true(found.batches > 1 && found.largest <= MOST_REQUEST && found.largest > MOST_REQUEST / 4);
}

static void a_batch_has_no_more_series_than_a_server_takes(void **state)
{
    const place *here = *state;
    msc__writer writer;
    totals found;
    char name[64];
    int i;

    begin(here, 4u << 20, 256u << 20, &writer);
    for (i = 0; i < 2500; i++) {
        (void)snprintf(name, sizeof name, "s%d", i);
        add_row(&writer, i, name);
    }
    finish(&writer);
    found = read_all(here, writer.segment);
    assert_int_equal(found.values, 2500);
    assert_int_equal(found.batches, 3);
}

static void events_and_documents_have_limits(void **state)
{
    const place *here = *state;
    static uint8_t large[MSC_RECORD_MOST_BYTES];
    msc__writer writer;
    totals found;
    int i;

    memset(large, ' ', sizeof large);
    memcpy(large, "\1d[]", 4);
    begin(here, 4u << 20, 256u << 20, &writer);
    for (i = 0; i < 2100; i++)
        assert_true(msc__writer_add(&writer, MSC__SPOOL_EVENT, (const uint8_t *)"{}", 2, 0));
    for (i = 0; i < 3; i++) /* two of them do not fit one request */
        assert_true(msc__writer_add(&writer, MSC__SPOOL_DOCUMENT, large, sizeof large, 0));
    finish(&writer);
    found = read_all(here, writer.segment);
    assert_true(found.events == 2100 && found.documents == 3 && found.batches == 3 + 2);
    assert_true(found.largest <= MOST_REQUEST);
}

static void a_batch_ends_by_time(void **state)
{
    const place *here = *state;
    msc__writer writer;

    begin(here, 4u << 20, 256u << 20, &writer);
    add_row(&writer, 0, "a");
    assert_true(msc__writer_tick(&writer, writer.batch_ns - 1));
    assert_int_equal(writer.batch, 0);
    assert_true(msc__writer_tick(&writer, writer.batch_ns));
    assert_int_equal(writer.batch, 1);
    assert_true(msc__writer_tick(&writer, 10 * writer.batch_ns)); /* an empty one does not */
    assert_int_equal(writer.batch, 1);
    finish(&writer);
}

#define SMALL_SEGMENT 4096u
#define SMALL_CAP (8u * SMALL_SEGMENT)

/* Rows of two series in turn, an event now and then, until far more was put than the cap. */
static void overfill(msc__writer *writer, int rounds)
{
    int i;

    for (i = 0; i < rounds; i++) {
        add_row(writer, i, "first of two series");
        add_row(writer, i, "second of two series");
        if (i % 50 == 0)
            assert_true(msc__writer_add(writer, MSC__SPOOL_EVENT, (const uint8_t *)"{}", 2, 0));
        if (i % 10 == 0)
            assert_true(msc__writer_close_batch(writer) && msc__writer_tick(writer, 0));
        assert_true(writer->held_bytes <= SMALL_CAP + SMALL_SEGMENT);
    }
}

static void rows_go_and_events_stay(void **state)
{
    const place *here = *state;
    msc__writer writer;
    totals found;

    begin(here, SMALL_SEGMENT, SMALL_CAP, &writer);
    overfill(&writer, 3000);
    finish(&writer);
    found = read_all(here, writer.segment);
    assert_int_equal(found.events, 60);
    assert_true(found.values > 100 && found.values < 3000);
    assert_int_equal(found.values + writer.dropped_rows, 6000);
}

/* Thinned files have rows of both series still, and their first. */
static void every_series_is_thinned_alike(void **state)
{
    const place *here = *state;
    msc__writer writer;
    msc_spool *spool = NULL;
    msc_spool_batch batch;
    char path[512];
    const char *text;
    size_t bytes;

    begin(here, SMALL_SEGMENT, SMALL_CAP, &writer);
    overfill(&writer, 1500);
    finish(&writer);
    spool_path(here, 0, path);
    assert_int_equal(msc_spool_load(here->ctx, path, 0, &spool, NULL), MSC_OK);
    assert_true(msc_spool_level(spool) > 0);
    assert_int_equal(msc_spool_next(spool, &batch), 1);
    assert_int_equal(msc_spool_body(spool, &batch, "1-test", &text, &bytes, NULL), MSC_OK);
    assert_non_null(strstr(text, "first of two series\",\"unit\":\"bytes\",\"steps\":[0"));
    assert_non_null(strstr(text, "second of two series\",\"unit\":\"bytes\",\"steps\":[0"));
    msc_spool_destroy(spool);
}

static void events_alone_stop_at_the_cap(void **state)
{
    const place *here = *state;
    static uint8_t event[1024];
    msc__writer writer;
    int i;

    memset(event, ' ', sizeof event);
    begin(here, SMALL_SEGMENT, SMALL_CAP, &writer);
    for (i = 0; i < 200; i++) {
        assert_true(msc__writer_add(&writer, MSC__SPOOL_EVENT, event, sizeof event, 0));
        assert_true(msc__writer_close_batch(&writer) && msc__writer_tick(&writer, 0));
    }
    assert_true(writer.is_overfull && writer.dropped_count > 0);
    assert_true(writer.held_bytes <= SMALL_CAP + 2 * SMALL_SEGMENT);
    finish(&writer);
}

static void room_comes_back_when_files_are_sent(void **state)
{
    const place *here = *state;
    static uint8_t event[1024];
    msc__writer writer;
    unsigned number;
    char path[512];
    int i;

    memset(event, ' ', sizeof event);
    begin(here, SMALL_SEGMENT, SMALL_CAP, &writer);
    for (i = 0; i < 200; i++) {
        assert_true(msc__writer_add(&writer, MSC__SPOOL_EVENT, event, sizeof event, 0));
        assert_true(msc__writer_close_batch(&writer) && msc__writer_tick(&writer, 0));
    }
    assert_true(writer.is_full);
    for (number = 0; number < writer.segment; number++) {
        spool_path(here, number, path);
        (void)unlink(path);
    }
    assert_true(msc__writer_tick(&writer, INT64_C(2000000000)));
    assert_false(writer.is_full || writer.is_overfull);
    assert_int_equal(writer.first, writer.segment);
    finish(&writer);
}

static void thinning_without_memory_leaves_files_as_they_are(void **state)
{
    const place *here = *state;
    failing_alloc heap;
    msc_context *ctx;
    msc__writer writer;
    msc_record_options options = options_for(here);

    failing_alloc_init(&heap, FAILING_ALLOC_NEVER);
    ctx = failing_alloc_context(&heap);
    options.segment_bytes = SMALL_SEGMENT;
    options.cap_bytes = SMALL_CAP;
    assert_int_equal(msc__writer_init(ctx, &options, "1-test", &writer, NULL), MSC_OK);
    heap.fail_at = heap.request_count;
    heap.fail_rest = true;
    overfill(&writer, 3000);
    assert_true(heap.failed_count > 0 && writer.is_full && writer.dropped_rows > 0);
    assert_true(msc__writer_close_batch(&writer) && msc__writer_settle(&writer));
    msc__writer_fini(&writer);
    msc_context_destroy(ctx);
    assert_true(failing_alloc_is_clean(&heap));
    assert_true(read_all(here, writer.segment).values + writer.dropped_rows == 6000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        place_test(a_request_is_never_too_large),
        place_test(a_batch_has_no_more_series_than_a_server_takes),
        place_test(events_and_documents_have_limits),
        place_test(a_batch_ends_by_time),
        place_test(rows_go_and_events_stay),
        place_test(every_series_is_thinned_alike),
        place_test(events_alone_stop_at_the_cap),
        place_test(room_comes_back_when_files_are_sent),
        place_test(thinning_without_memory_leaves_files_as_they_are),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
