/* SPDX-License-Identifier: Apache-2.0 */
/* What a snapshot holds: records, settings, strings, files; real ones and ones written by hand. */
#include "snapshot_text.h"

#define NO_TRACE TRACES SNAPSHOT_END

static void test_segment_and_blocks(void **state)
{
    static const char text[] = SNAPSHOT_BEGIN SEGMENT_BEGIN ONE_BLOCK SEGMENT_END NO_TRACE;
    msc_snapshot *snapshot = read_text(text);
    const msc_snapshot_segment *segments;
    const msc_snapshot_block *blocks;
    uint32_t count;

    (void)state;
    assert_int_equal(msc_snapshot_device_count(snapshot), 1);
    segments = msc_snapshot_segments(snapshot, 0, &count);
    assert_int_equal(count, 1);
    assert_true(segments[0].address == 2097152 && segments[0].total_bytes == 2097152);
    assert_int_equal(segments[0].is_large, 0);
    assert_int_equal(segments[0].block_count, 2);
    blocks = msc_snapshot_blocks(snapshot, &count);
    assert_int_equal(count, 2);
    assert_true(blocks[0].size_bytes == 1024 && blocks[0].requested_bytes == 1000);
    assert_int_equal(blocks[0].state, MSC_SNAPSHOT_STATE_ALLOCATED);
    assert_int_equal(blocks[1].state, MSC_SNAPSHOT_STATE_INACTIVE);
    assert_null(msc_snapshot_segments(snapshot, 1, &count));
    assert_int_equal(count, 0);
    msc_snapshot_destroy(snapshot);
}

/* Files of PyTorch before 2.1 give blocks no address. */
static void test_blocks_without_address(void **state)
{
    static const char text[] = SNAPSHOT_BEGIN SEGMENT_BEGIN "(d" NUMBER("size", "1024")
        TEXT("state", "inactive") "a"
                                  "(d" NUMBER("size", "2096128")
                                      TEXT("state", "active_awaiting_free") "a" SEGMENT_END NO_TRACE;
    msc_snapshot *snapshot = read_text(text);
    uint32_t count;
    const msc_snapshot_block *blocks = msc_snapshot_blocks(snapshot, &count);

    (void)state;
    assert_true(blocks[0].address == 2097152 && blocks[1].address == 2098176);
    assert_int_equal(blocks[1].state, MSC_SNAPSHOT_STATE_PENDING);
    msc_snapshot_destroy(snapshot);
}

static void test_impossible_records(void **state)
{
    (void)state;
    REFUSE(SNAPSHOT_BEGIN SEGMENT_BEGIN BLOCK("2097152", "1024", "1", "inactive") SEGMENT_END NO_TRACE,
           "do not fill it");
    REFUSE(SNAPSHOT_BEGIN SEGMENT_BEGIN BLOCK("2097664", "2097152", "1", "inactive") SEGMENT_END NO_TRACE,
           "leave a gap or overlap");
    REFUSE(SNAPSHOT_BEGIN SEGMENT_BEGIN BLOCK("2097152", "2097152", "1", "strange") SEGMENT_END NO_TRACE,
           "state must be");
    REFUSE(SNAPSHOT_BEGIN SEGMENT_BEGIN ONE_BLOCK SEGMENT_END SEGMENT_BEGIN ONE_BLOCK SEGMENT_END NO_TRACE,
           "segments 0 and 1 overlap");
    REFUSE(SNAPSHOT_BEGIN "(d" NUMBER("address", "18446744073709551615")
               NUMBER("total_size", "512") "a" NO_TRACE,
           "leaves the address space");
    REFUSE(SNAPSHOT_BEGIN "(d" NUMBER("total_size", "512") "a" NO_TRACE, "a segment has no address");
    REFUSE(SNAPSHOT_BEGIN "(d" NUMBER("address", "-1") NUMBER("total_size", "512") "a" NO_TRACE,
           "address must be an integer");
    REFUSE(SNAPSHOT_BEGIN "(d" NUMBER("address", "0") NUMBER("total_size", "1")
               NUMBER("device", "5000") "a" NO_TRACE,
           "device must be below 1024");
    REFUSE(SNAPSHOT_BEGIN TRACES "(d" TEXT("action", "alloc") NUMBER("size", "1") "a" SNAPSHOT_END,
           "an entry of a trace has no addr");
    REFUSE(SNAPSHOT_BEGIN TRACES EVENT("alloc", "18446744073709551615", "1") SNAPSHOT_END,
           "within the 64 bits of an address");
    REFUSE("(d" KEY("device_traces") "(ls.", "a snapshot has no segments");
    REFUSE("(d" KEY("segments") "I5\ns.", "segments must be a list of segments");
}

static void test_events(void **state)
{
    static const char text[] = SNAPSHOT_BEGIN TRACES EVENT("segment_map", "4194304",
                                                           "2097152") "(d" TEXT("action", "oom")
        NUMBER("device_free", "77") NUMBER("size", "9") NUMBER("stream", "-2") TEXT("user_metadata", "mine")
            KEY("compile_context") "Ns"
                                   "a"
                                   "(d" TEXT("action", "something_new")
                                       NUMBER("what", "1") "a"
                                                           "(d" TEXT("action",
                                                                     "workspace_snapshot") "a" SNAPSHOT_END;
    msc_snapshot *snapshot = read_text(text);
    uint32_t count;
    const msc_snapshot_event *events = msc_snapshot_events(snapshot, 0, &count);

    (void)state;
    assert_int_equal(count, 4);
    assert_int_equal(events[0].action, MSC_SNAPSHOT_ACTION_SEGMENT_MAP);
    assert_true(events[0].time_us == 7 && events[0].user_metadata == MSC_NONE);
    assert_int_equal(events[1].action, MSC_SNAPSHOT_ACTION_OOM);
    assert_true(events[1].address == 77 && events[1].size_bytes == 9);
    assert_true(events[1].stream == UINT64_MAX - 1);
    assert_string_equal(msc_snapshot_string(snapshot, events[1].user_metadata), "mine");
    assert_int_equal(events[1].compile_context, MSC_NONE);
    assert_int_equal(events[2].action, MSC_SNAPSHOT_ACTION_OTHER);
    assert_int_equal(events[3].action, MSC_SNAPSHOT_ACTION_WORKSPACE);
    msc_snapshot_destroy(snapshot);
}

static void test_settings(void **state)
{
    static const char as_dict[] = SNAPSHOT_BEGIN
        "s" KEY("allocator_settings") "(d" TEXT("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:32")
            NUMBER("max_split_size", "-1") KEY("garbage_collection_threshold") "F0.8\ns" KEY(
                "expandable_segments") "I01\ns" KEY("roundup_power2_divisions") "(d" NUMBER("1", "4")
                NUMBER("256", "2") "ss.";
    static const char as_text[] = SNAPSHOT_BEGIN "s" TEXT("allocator_settings", "backend:native") ".";
    msc_snapshot *snapshot = read_text(as_dict);
    msc_snapshot_settings settings = msc_snapshot_get_settings(snapshot);

    (void)state;
    assert_int_equal(settings.is_recorded, 1);
    assert_int_equal(settings.has_numbers, 1);
    assert_int_equal(settings.expandable_segments, 1);
    assert_true(settings.max_split_bytes == UINT64_MAX);
    assert_int_equal(settings.garbage_collection_ppm, 800000);
    assert_int_equal(settings.divisions[0], 4);
    assert_int_equal(settings.divisions[8], 2);
    assert_int_equal(settings.divisions[1], 0);
    assert_string_equal(msc_snapshot_string(snapshot, settings.conf), "max_split_size_mb:32");
    msc_snapshot_destroy(snapshot);
    snapshot = read_text(as_text);
    settings = msc_snapshot_get_settings(snapshot);
    assert_string_equal(msc_snapshot_string(snapshot, settings.conf), "backend:native");
    assert_int_equal(settings.has_numbers, 0);
    msc_snapshot_destroy(snapshot);
}

/* Equal frames and stacks are one, whether the pickle shares them or not. */
static void test_stacks_are_shared(void **state)
{
#define FRAME(line) "(d" TEXT("filename", "a.py") TEXT("name", "f") NUMBER("line", line) "a"
#define STACK_EVENT(frames)                                                                                  \
    "(d" TEXT("action", "snapshot") KEY("frames") "(l" frames "s"                                            \
                                                  "a"
    static const char text[] = SNAPSHOT_BEGIN TRACES STACK_EVENT(FRAME("1") FRAME("2"))
        STACK_EVENT(FRAME("1") FRAME("2")) STACK_EVENT(FRAME("2")) STACK_EVENT("") SNAPSHOT_END;
    msc_snapshot *snapshot = read_text(text);
    uint32_t count;
    const msc_snapshot_event *events = msc_snapshot_events(snapshot, 0, &count);
    const uint32_t *frames;

    (void)state;
    assert_int_equal(msc_snapshot_frame_count(snapshot), 2);
    assert_int_equal(msc_snapshot_stack_count(snapshot), 3);
    assert_int_equal(events[0].stack, events[1].stack);
    assert_int_not_equal(events[0].stack, events[2].stack);
    assert_int_equal(events[3].stack, 0);
    frames = msc_snapshot_stack(snapshot, events[0].stack, &count);
    assert_int_equal(count, 2);
    assert_int_equal(msc_snapshot_frame_at(snapshot, frames[1]).line, 2);
    assert_string_equal(msc_snapshot_string(snapshot, msc_snapshot_frame_at(snapshot, frames[0]).file),
                        "a.py");
    msc_snapshot_destroy(snapshot);
}

/* A list that names one record twice gets copies of it. */
static void test_repeated_records(void **state)
{
    static const char text[] = SNAPSHOT_BEGIN TRACES
        "(d" TEXT("action", "snapshot") "p9\na" EVENT("oom", "1", "2") "g9\na" SNAPSHOT_END;
    msc_snapshot *snapshot = read_text(text);
    uint32_t count;
    const msc_snapshot_event *events = msc_snapshot_events(snapshot, 0, &count);

    (void)state;
    assert_int_equal(count, 3);
    assert_int_equal(events[0].action, MSC_SNAPSHOT_ACTION_SNAPSHOT);
    assert_int_equal(events[1].action, MSC_SNAPSHOT_ACTION_OOM);
    assert_int_equal(events[2].action, MSC_SNAPSHOT_ACTION_SNAPSHOT);
    msc_snapshot_destroy(snapshot);
}

/* A snapshot inside a snapshot is data like any other. */
static void test_nested_snapshot(void **state)
{
    static const char text[] =
        "(d" KEY("inner") SNAPSHOT_BEGIN SEGMENT_BEGIN ONE_BLOCK SEGMENT_END "s"
                                                                             "s" KEY("segments") "(ls.";
    msc_snapshot *snapshot = read_text(text);
    uint32_t count;

    (void)state;
    assert_int_equal(msc_snapshot_device_count(snapshot), 0);
    (void)msc_snapshot_segments(snapshot, 0, &count);
    assert_int_equal(count, 0);
    msc_snapshot_destroy(snapshot);
}

static void test_annotations(void **state)
{
    static const char text[] =
        SNAPSHOT_BEGIN "s" KEY("external_annotations") "(l(d" TEXT("name", "## forward ##")
            TEXT("stage", "START") NUMBER("device", "0") NUMBER("time_us", "12") "as.";
    msc_snapshot *snapshot = read_text(text);
    uint32_t count;
    const msc_snapshot_annotation *annotations = msc_snapshot_annotations(snapshot, &count);

    (void)state;
    assert_int_equal(count, 1);
    assert_true(annotations[0].time_us == 12);
    assert_string_equal(msc_snapshot_string(snapshot, annotations[0].name), "## forward ##");
    assert_string_equal(msc_snapshot_string(snapshot, annotations[0].stage), "START");
    msc_snapshot_destroy(snapshot);
}

static void test_real_file(void **state)
{
    msc_snapshot *snapshot = NULL;
    msc_error err = {0};
    const msc_snapshot_segment *segments;
    uint32_t count, i;
    uint32_t private_count = 0;

    (void)state;
    if (msc_snapshot_load(test_context, MSC_TEST_DATA "/pool.pickle", &snapshot, &err) != MSC_OK)
        fail_msg("%s", err.message);
    segments = msc_snapshot_segments(snapshot, 0, &count);
    assert_true(count > 10);
    for (i = 0; i < count; i++)
        private_count += segments[i].pool[0] != 0 || segments[i].pool[1] != 0;
    assert_true(private_count > 0 && private_count < count);
    (void)msc_snapshot_events(snapshot, 0, &count);
    assert_true(count > 100);
    assert_int_equal(msc_snapshot_get_settings(snapshot).is_recorded, 1);
    assert_true(msc_snapshot_frame_count(snapshot) > 0);
    msc_snapshot_destroy(snapshot);
}

static void test_files_and_arguments(void **state)
{
    msc_snapshot *snapshot = (void *)&test_context;
    msc_error err = {0};

    (void)state;
    assert_int_equal(msc_snapshot_load(test_context, MSC_TEST_DATA "/none", &snapshot, &err), MSC_EIO);
    assert_null(snapshot);
    assert_int_equal(err.driver_code, 2);
    assert_int_equal(msc_snapshot_load(test_context, MSC_TEST_DATA, &snapshot, &err), MSC_EIO);
    assert_int_equal(msc_snapshot_load(test_context, NULL, &snapshot, &err), MSC_EINVAL);
    assert_int_equal(msc_snapshot_load(test_context, "x", NULL, &err), MSC_EINVAL);
    assert_int_equal(msc_snapshot_parse(NULL, "", 0, &snapshot, &err), MSC_EINVAL);
    assert_int_equal(msc_snapshot_parse(test_context, NULL, 0, &snapshot, &err), MSC_EINVAL);
    msc_snapshot_destroy(NULL);
    assert_string_equal(msc_snapshot_action_name((msc_snapshot_action)99), "other");
    assert_string_equal(msc_snapshot_state_name(MSC_SNAPSHOT_STATE_PENDING), "active_pending_free");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE("records/segment-and-blocks", test_segment_and_blocks),
        CASE("records/blocks-without-address", test_blocks_without_address),
        CASE("records/impossible", test_impossible_records),
        CASE("records/events", test_events),
        CASE("records/settings", test_settings),
        CASE("records/annotations", test_annotations),
        CASE("sharing/stacks", test_stacks_are_shared),
        CASE("sharing/repeated-records", test_repeated_records),
        CASE("sharing/nested-snapshot", test_nested_snapshot),
        CASE("files/real", test_real_file),
        CASE("files/errors-and-arguments", test_files_and_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
