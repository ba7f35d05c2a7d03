/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Snapshots that PyTorch 2.11 wrote (tests/data/snapshots/workloads.py), replayed: every segment event with
 * its address, the peaks that `torch.cuda.memory_stats` showed, and every block at the end must come out.
 */
#include "base/error.h"
#include "snapshot_text.h"

#include <stdlib.h>

#define MIB (UINT64_C(1) << 20)
#define DEVICE_BYTES (8192 * MIB)
#define LIMIT_BYTES (200 * MIB)

/* One file; the peaks are those of memory_stats, 0 where recording began late. */
typedef struct expected {
    const char *name;
    uint64_t allowed_bytes;
    uint64_t reserved_peak_bytes;
    uint64_t allocated_peak_bytes;
    uint64_t active_peak_bytes;
    uint32_t oom_count;
} expected;

static const expected files[] = {
    {"churn", UINT64_MAX, 507510784, 305148928, 305148928, 0},
    {"streams", UINT64_MAX, 497025024, 282059264, 282059264, 0},
    {"streams-expandable", UINT64_MAX, 327155712, 191824384, 191824384, 0},
    {"record", UINT64_MAX, 587202560, 323274240, 323274240, 0},
    {"record-expandable", UINT64_MAX, 455081984, 417256448, 417256448, 0},
    {"pool", UINT64_MAX, 383778816, 151382528, 151382528, 0},
    {"oom", LIMIT_BYTES, 205520896, 177518592, 177518592, 5},
    {"oom-expandable", LIMIT_BYTES, 171966464, 147651072, 147651072, 0},
    {"oom-split", LIMIT_BYTES, 209715200, 197520384, 197520384, 2},
    {"gc", LIMIT_BYTES, 209715200, 187898880, 187898880, 2},
    {"roundup", UINT64_MAX, 304087040, 223362048, 223362048, 0},
    {"train", UINT64_MAX, 50331648, 44474368, 44474368, 0},
    {"late", UINT64_MAX, 0, 0, 0, 0},
    {"ring", UINT64_MAX, 0, 0, 0, 0},
    {"ring-expandable", UINT64_MAX, 0, 0, 0, 0},
};

static msc_snapshot *load(const char *name)
{
    char path[1024];
    msc_snapshot *snapshot = NULL;
    msc_error err = {0};

    assert_true(snprintf(path, sizeof path, MSC_TEST_DATA "/%s.pickle", name) < (int)sizeof path);
    if (msc_snapshot_load(test_context, path, &snapshot, &err) != MSC_OK)
        fail_msg("%s", err.message);
    return snapshot;
}

static msc_snapshot_replay_result play(const msc_snapshot *snapshot, uint64_t allowed_bytes)
{
    msc_snapshot_replay_options options = msc_snapshot_replay_options_default();
    msc_snapshot_replay_result result;
    msc_error err = {0};

    options.device_total_bytes = DEVICE_BYTES;
    options.allowed_bytes = allowed_bytes;
    if (msc_snapshot_replay(snapshot, 0, &options, NULL, &result, &err) != MSC_OK)
        fail_msg("%s", err.message);
    return result;
}

static void assert_exact(const char *name, const msc_snapshot_replay_result *result)
{
    if (result->difference_count > 0)
        fail_msg("%s: %u differences, the first of kind %u at event %u", name, result->difference_count,
                 result->difference, result->difference_event);
    assert_int_equal(result->difference, MSC_SNAPSHOT_DIFFERENCE_NONE);
    assert_int_equal(result->map_compared, 1);
    assert_true(result->replayed_count > 100 && result->map_block_count > 2);
    assert_true(result->reserved_peak_bytes == result->recorded_reserved_peak_bytes);
    assert_true(result->requested_peak_bytes == result->recorded_requested_peak_bytes);
}

static void test_real_snapshots(void **state)
{
    size_t i;

    (void)state;
    for (i = 0; i < sizeof files / sizeof files[0]; i++) {
        const expected *file = &files[i];
        msc_snapshot *snapshot = load(file->name);
        msc_snapshot_replay_result result = play(snapshot, file->allowed_bytes);
        assert_exact(file->name, &result);
        assert_int_equal(result.oom_count, file->oom_count);
        if (file->reserved_peak_bytes > 0) {
            assert_int_equal(result.start_block_count, 0);
            assert_true(result.reserved_peak_bytes == file->reserved_peak_bytes);
            assert_true(result.allocated_peak_bytes == file->allocated_peak_bytes);
            assert_true(result.active_peak_bytes == file->active_peak_bytes);
        } else {
            assert_true(result.start_block_count > 0);
        }
        if (file->allowed_bytes != UINT64_MAX)
            assert_int_equal(result.release_count, 0); /* all predicted */
        msc_snapshot_destroy(snapshot);
    }
}

/* Without the limit the releases are taken from the trace; what they release is still compared. */
static void test_unknown_limit(void **state)
{
    msc_snapshot *snapshot = load("oom");
    msc_snapshot_replay_result result = play(snapshot, UINT64_MAX);

    (void)state;
    assert_exact("oom", &result);
    assert_true(result.release_count > 0);
    assert_int_equal(result.retry_count, 0);
    assert_int_equal(result.oom_count, 5);
    msc_snapshot_destroy(snapshot);
}

static char *read_file(const char *name, size_t *size)
{
    char path[1024];
    FILE *file;
    char *bytes = malloc(1 << 20);

    (void)snprintf(path, sizeof path, MSC_TEST_DATA "/%s.pickle", name);
    file = fopen(path, "rb");
    assert_true(file != NULL && bytes != NULL);
    *size = fread(bytes, 1, 1 << 20, file);
    (void)fclose(file);
    assert_true(*size > 0 && *size < 1 << 20);
    return bytes;
}

/* Any byte changed, or the file cut: an error with a message, or a snapshot that can be replayed. */
static void test_damaged_files(void **state)
{
    size_t size, i;
    char *bytes = read_file("ring", &size);

    (void)state;
    for (i = 0; i < size; i += 37) {
        msc_snapshot *snapshot = NULL;
        msc_snapshot_replay_result result;
        msc_error err = {0};
        char before = bytes[i];
        bytes[i] = (char)(before ^ (1 << i % 8));
        if (read_bytes(bytes, size, &snapshot, &err) == MSC_OK && msc_snapshot_device_count(snapshot) > 0)
            msc__ignore(msc_snapshot_replay(snapshot, 0, NULL, NULL, &result, &err));
        msc_snapshot_destroy(snapshot);
        bytes[i] = before;
        snapshot = NULL;
        assert_int_equal(read_bytes(bytes, i, &snapshot, &err), MSC_EFORMAT);
        assert_null(snapshot);
        assert_true(err.message[0] != '\0');
        assert_int_equal(msc_context_held_bytes(test_context), 0);
    }
    free(bytes);
}

/* ---- differences -------------------------------------------------------------------------------- */

#define SEGMENT_ALLOC EVENT("segment_alloc", "2097152", "2097152")
#define WITH(trace) SNAPSHOT_BEGIN SEGMENT_BEGIN ONE_BLOCK SEGMENT_END TRACES trace SNAPSHOT_END

static msc_snapshot_replay_result play_text(const char *text)
{
    msc_snapshot *snapshot = read_text(text);
    msc_snapshot_replay_result result = play(snapshot, UINT64_MAX);

    msc_snapshot_destroy(snapshot);
    return result;
}

static void test_exact_by_hand(void **state)
{
    msc_snapshot_replay_result result = play_text(WITH(SEGMENT_ALLOC EVENT("alloc", "2097152", "1000")));

    (void)state;
    assert_int_equal(result.difference_count, 0);
    assert_int_equal(result.segment_count, 1);
    assert_int_equal(result.map_block_count, 2);
    assert_true(result.allocated_peak_bytes == 1024);
}

/* What the numbers say is in force, whatever the text does; a fraction of an unknown total is no limit. */
static void test_settings_in_force(void **state)
{
#define SETTINGS(conf, split)                                                                                \
    "sV"                                                                                                     \
    "allocator_settings\n(d" TEXT("PYTORCH_CUDA_ALLOC_CONF", conf)                                           \
        NUMBER("max_split_size", split) "Vexpandable_segments\nI00\ns"                                       \
                                        "s."
    msc_snapshot *snapshot = read_text(
        SNAPSHOT_BEGIN SETTINGS("expandable_segments:True,per_process_memory_fraction:0.5", "33554432"));
    msc_snapshot_replay_options given = msc_snapshot_replay_options_default();
    msc_snapshot_replay_result result;
    msc_sim_options options;
    msc_error err = {0};

    (void)state;
    assert_int_equal(msc_snapshot_device_count(snapshot), 0);
    assert_int_equal(msc_snapshot_replay(snapshot, 0, NULL, &options, &result, &err), MSC_EINVAL);
    assert_int_equal(options.expandable_segments, 0);
    assert_true(options.max_split_bytes == 33554432);
    assert_true(options.allowed_bytes == UINT64_MAX);
    given.device_total_bytes = 1000;
    assert_int_equal(msc_snapshot_replay(snapshot, 0, &given, &options, &result, &err), MSC_EINVAL);
    assert_true(options.allowed_bytes == 500);
    given.struct_bytes = offsetof(msc_snapshot_replay_options, capacity_bytes); /* an older caller's */
    given.capacity_bytes = 1;
    options.struct_bytes = offsetof(msc_sim_options, expandable_segments);
    options.expandable_segments = 9;
    result.segment_count = 9;
    assert_int_equal(msc_snapshot_replay_into(snapshot, 0, &given, &options, &result, 4, &err), MSC_EINVAL);
    assert_null(strstr(err.message, "struct_bytes"));
    assert_true(options.allowed_bytes == 500 && options.capacity_bytes != 1);
    assert_int_equal(options.expandable_segments, 9);
    assert_int_equal(result.segment_count, 9);
    given.struct_bytes = 3;
    assert_int_equal(msc_snapshot_replay(snapshot, 0, &given, NULL, &result, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "struct_bytes"));
    msc_snapshot_destroy(snapshot);
    snapshot = read_text(SNAPSHOT_BEGIN SETTINGS("no_such_key:1", "-1"));
    assert_int_equal(msc_snapshot_replay(snapshot, 0, NULL, NULL, &result, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "no_such_key"));
    msc_snapshot_destroy(snapshot);
}

static void test_segment_differs(void **state)
{
    /* The request needs a segment of 2 MiB; the trace says that the device gave 4 MiB. */
    msc_snapshot_replay_result result =
        play_text(WITH(EVENT("segment_alloc", "2097152", "4194304") EVENT("alloc", "2097152", "1000")));

    (void)state;
    assert_int_equal(result.difference, MSC_SNAPSHOT_DIFFERENCE_SEGMENT);
    assert_int_equal(result.difference_event, 0);
    assert_true(result.expected.is_there && result.expected.size_bytes == 4194304);
    assert_true(result.got.is_there && result.got.size_bytes == 2097152);
    /* A segment too few in the trace. */
    result =
        play_text(WITH(EVENT("segment_alloc", "1073741824", "2097152") EVENT("alloc", "1073741824", "1000")
                           EVENT("alloc", "4194304", "5000000") EVENT("free_requested", "4194304", "5000000")
                               EVENT("free_completed", "4194304", "5000000")));
    assert_int_equal(result.difference, MSC_SNAPSHOT_DIFFERENCE_SEGMENT);
    assert_int_equal(result.difference_event, 2);
    assert_false(result.expected.is_there);
    assert_int_equal(result.got.action, MSC_SNAPSHOT_ACTION_SEGMENT_ALLOC);
    assert_true(result.got.size_bytes == 20 * MIB);
}

/* The last block lies where the allocator would not have put it. */
static void test_map_differs(void **state)
{
    msc_snapshot_replay_result result = play_text(
        SNAPSHOT_BEGIN SEGMENT_BEGIN BLOCK("2097152", "512", "0", "inactive")
            BLOCK("2097664", "1024", "1000", "active_allocated") BLOCK("2098688", "2095616", "0", "inactive")
                SEGMENT_END TRACES SEGMENT_ALLOC EVENT("alloc", "2097664", "1000") SNAPSHOT_END);

    (void)state;
    assert_int_equal(result.difference, MSC_SNAPSHOT_DIFFERENCE_MAP);
    assert_int_equal(result.difference_event, 2);
    assert_true(result.expected.size_bytes == 512);
    assert_int_equal(result.got.action, MSC_SNAPSHOT_STATE_ALLOCATED);
}

static void test_request_differs(void **state)
{
    msc_snapshot *snapshot =
        read_text(WITH(SEGMENT_ALLOC EVENT("alloc", "2097152", "1000") EVENT("oom", "0", "5000")));
    msc_snapshot_replay_result result = play(snapshot, LIMIT_BYTES);

    (void)state;
    assert_int_equal(result.difference, MSC_SNAPSHOT_DIFFERENCE_REQUEST);
    assert_int_equal(result.difference_event, 2);
    assert_int_equal(result.expected.action, MSC_SNAPSHOT_ACTION_OOM);
    msc_snapshot_destroy(snapshot);
}

static void test_not_replayable(void **state)
{
    /* In use at the end but in no segment: the block at 8 MiB was freed and never allocated. */
    msc_snapshot *snapshot =
        read_text(WITH(EVENT("free_requested", "8388608", "100") EVENT("free_completed", "8388608", "100")));
    msc_snapshot_replay_result result;
    msc_error err = {0};

    (void)state;
    assert_int_equal(msc_snapshot_replay(snapshot, 0, NULL, NULL, &result, &err), MSC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "1 lie in no segment"));
    msc_snapshot_destroy(snapshot);
    /* There is no large segment of 2 MiB. */
    snapshot = read_text(SNAPSHOT_BEGIN "(d" NUMBER("address", "2097152") NUMBER("total_size", "2097152") KEY(
        "blocks") "(l" ONE_BLOCK SEGMENT_END TRACES EVENT("snapshot", "0", "0") SNAPSHOT_END);
    assert_int_equal(msc_snapshot_replay(snapshot, 0, NULL, NULL, &result, &err), MSC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "a large segment of wrong size"));
    assert_int_equal(msc_snapshot_replay(snapshot, 7, NULL, NULL, &result, &err), MSC_EINVAL);
    msc_snapshot_destroy(snapshot);
    snapshot = read_text(WITH(EVENT("alloc", "2097152", "77") EVENT("segment_free", "8388608", "2097152")));
    assert_int_equal(msc_snapshot_replay(snapshot, 0, NULL, NULL, &result, &err), MSC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "recording stopped"));
    msc_snapshot_destroy(snapshot);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE("real/exact", test_real_snapshots),
        CASE("real/unknown-limit", test_unknown_limit),
        CASE("real/damaged", test_damaged_files),
        CASE("by-hand/exact", test_exact_by_hand),
        CASE("by-hand/settings-in-force", test_settings_in_force),
        CASE("by-hand/segment-differs", test_segment_differs),
        CASE("by-hand/map-differs", test_map_differs),
        CASE("by-hand/request-differs", test_request_differs),
        CASE("by-hand/not-replayable", test_not_replayable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
