/* SPDX-License-Identifier: Apache-2.0 */
/* Allocations out of events: what was there before, what is missing, peaks and sites. */
#include "snapshot_text.h"

#include "snapshot/snapshot_history.h"

#define ALLOC(address, size) EVENT("alloc", address, size)
#define FREE(address, size) EVENT("free_requested", address, size) EVENT("free_completed", address, size)
#define WITH(trace) SNAPSHOT_BEGIN SEGMENT_BEGIN ONE_BLOCK SEGMENT_END TRACES trace SNAPSHOT_END

typedef struct fixture {
    msc_snapshot *snapshot;
    msc__history history;
} fixture;

static fixture open_history(const char *text)
{
    fixture f = {.snapshot = read_text(text)};
    msc_error err = {0};

    if (msc__history_init(&f.history, f.snapshot, 0, 0, &err) != MSC_OK)
        fail_msg("%s", err.message);
    return f;
}

static void close_history(fixture *f)
{
    msc__history_fini(&f->history);
    msc_snapshot_destroy(f->snapshot);
}

static void test_whole_life(void **state)
{
    fixture f = open_history(WITH(ALLOC("2097152", "1000") ALLOC("2098176", "300") FREE("2098176", "300")));
    const msc__allocation *second = msc__history_at(&f.history, 1);

    (void)state;
    assert_int_equal(f.history.first_event, 0);
    assert_true(f.history.ends_in_blocks);
    assert_int_equal(f.history.allocations.count, 2);
    assert_int_equal(msc__history_at(&f.history, 0)->request, MSC_NONE);
    assert_int_equal(msc__history_at(&f.history, 0)->block, 0);
    assert_int_equal(second->alloc, 1);
    assert_int_equal(second->request, 2);
    assert_int_equal(second->complete, 3);
    assert_int_equal(msc__history_of(&f.history, 3), 1);
    close_history(&f);
}

static void test_what_was_there_before(void **state)
{
    fixture f = open_history(WITH(EVENT("free_completed", "2099200", "64") FREE("2098176", "300")));
    uint64_t bytes;
    uint32_t event;

    (void)state;
    assert_true(f.history.ends_in_blocks);
    assert_int_equal(f.history.allocations.count, 3);
    assert_int_equal(msc__history_at(&f.history, 0)->request, MSC__BEFORE);
    assert_int_equal(msc__history_at(&f.history, 1)->alloc, MSC__BEFORE);
    assert_int_equal(msc__history_at(&f.history, 2)->alloc, MSC__BEFORE); /* of the block at the end */
    msc__history_peak(&f.history, &bytes, &event);
    assert_true(bytes == 1300);
    assert_int_equal(event, f.history.event_count);
    close_history(&f);
}

/* Recording was off between the second and the third event. */
static void test_missing_events(void **state)
{
    fixture f = open_history(
        WITH(ALLOC("2097152", "9") ALLOC("2098176", "5") ALLOC("2097152", "1000") FREE("2098176", "5")));

    (void)state;
    assert_int_equal(f.history.first_event, 2);
    assert_true(f.history.ends_in_blocks);
    assert_int_equal(msc__history_of(&f.history, 0), MSC_NONE);
    assert_int_equal(msc__history_at(&f.history, msc__history_of(&f.history, 3))->alloc, MSC__BEFORE);
    close_history(&f);
}

static void test_freed_twice(void **state)
{
    fixture f = open_history(WITH(ALLOC("2098176", "5") FREE("2098176", "5") FREE("2098176", "5")));

    (void)state;
    assert_int_equal(f.history.first_event, 3);
    close_history(&f);
}

/* The snapshot is younger than the last event: its blocks are not those of the trace. */
static void test_recording_stopped(void **state)
{
    fixture f = open_history(WITH(ALLOC("2097152", "77")));

    (void)state;
    assert_false(f.history.ends_in_blocks);
    assert_int_equal(f.history.allocations.count, 1);
    close_history(&f);
    f = open_history(WITH(ALLOC("2097152", "1000") ALLOC("2098176", "5")));
    assert_false(f.history.ends_in_blocks);
    close_history(&f);
}

static void test_totals(void **state)
{
    msc_snapshot *snapshot = read_text(WITH(EVENT("segment_free", "8388608", "2097152") ALLOC(
        "2097152", "1000") ALLOC("2098176", "300") FREE("2098176", "300") EVENT("oom", "5", "9")));
    msc_snapshot_totals totals;
    msc_error err = {0};

    (void)state;
    assert_int_equal(msc_snapshot_get_totals(snapshot, 0, &totals, &err), MSC_OK);
    assert_true(totals.reserved_bytes == 2097152 && totals.reserved_peak_bytes == 2 * 2097152);
    assert_true(totals.requested_peak_bytes == 1300 && totals.requested_peak_event == 2);
    assert_true(totals.event_count == 6 && totals.block_count == 2);
    assert_true(totals.action_count[MSC_SNAPSHOT_ACTION_ALLOC] == 2);
    assert_true(totals.action_count[MSC_SNAPSHOT_ACTION_OOM] == 1);
    memset(&totals, 9, sizeof totals);
    assert_int_equal(msc_snapshot_totals_read(snapshot, 0, &totals, 1, &err),
                     MSC_OK); /* of a caller who knows less */
    assert_int_equal(((unsigned char *)&totals)[1], 9);
    assert_int_equal(msc_snapshot_get_totals(snapshot, 1, &totals, &err), MSC_EINVAL);
    assert_string_equal(err.message, "the snapshot has no device 1, it has 1");
    msc_snapshot_destroy(snapshot);
}

#define FRAME(file, name, line) "(d" TEXT("filename", file) TEXT("name", name) NUMBER("line", line) "a"
#define ALLOC_AT(address, size, frames)                                                                      \
    "(d" TEXT("action", "alloc") NUMBER("addr", address) NUMBER("size", size) KEY("frames") "(l" frames "s"  \
                                                                                            "a"

/* The innermost line of Python, past PyTorch's own C++. */
static void test_sites(void **state)
{
    msc_snapshot *snapshot = read_text(WITH(
        ALLOC_AT("2098176", "300", FRAME("Empty.cpp", "at::empty", "5") FRAME("model.py", "forward", "7"))
            ALLOC_AT("2099200", "40", FRAME("??", "c10::alloc", "0") FRAME("??", "at::native::mm", "0"))
                ALLOC("2097152", "1000") FREE("2098176", "300") FREE("2099200", "40")));
    msc_snapshot_site sites[4];
    uint32_t found;

    (void)state;
    assert_int_equal(msc_snapshot_sites(snapshot, 0, MSC_SNAPSHOT_MOMENT_PEAK, sites, 4, &found, NULL),
                     MSC_OK);
    assert_int_equal(found, 3);
    assert_true(sites[0].requested_bytes == 1000 && sites[0].frame == MSC_NONE);
    assert_true(sites[1].requested_bytes == 300 && sites[1].allocation_count == 1);
    assert_string_equal(
        msc_snapshot_string(snapshot, msc_snapshot_frame_at(snapshot, sites[1].frame).function), "forward");
    assert_string_equal(
        msc_snapshot_string(snapshot, msc_snapshot_frame_at(snapshot, sites[2].frame).function),
        "at::native::mm");
    assert_int_equal(msc_snapshot_sites(snapshot, 0, MSC_SNAPSHOT_MOMENT_END, sites, 1, &found, NULL),
                     MSC_OK);
    assert_int_equal(found, 1);
    assert_true(sites[0].requested_bytes == 1000);
    msc_snapshot_destroy(snapshot);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE("history/whole-life", test_whole_life),
        CASE("history/what-was-there-before", test_what_was_there_before),
        CASE("history/missing-events", test_missing_events),
        CASE("history/freed-twice", test_freed_twice),
        CASE("history/recording-stopped", test_recording_stopped),
        CASE("sums/totals", test_totals),
        CASE("sums/sites", test_sites),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
