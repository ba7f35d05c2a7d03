/* SPDX-License-Identifier: Apache-2.0 */
/* The text of PYTORCH_ALLOC_CONF: what is understood, and what is said about the rest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "memscale/sim.h"

#define MIB (UINT64_C(1) << 20)
#define DEVICE (1000 * MIB)

static msc_error err;

/* Reads a text that must be right. */
static msc_sim_options parse(const char *text)
{
    msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);

    if (msc_sim_options_parse(text, DEVICE, &options, &err) != MSC_OK)
        fail_msg("\"%s\": %s", text, err.message);
    return options;
}

/* Reads a text that must be refused in these words, and leave the options alone. */
static void refuse(const char *text, msc_status status, const char *words)
{
    msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);
    const msc_sim_options before = options;

    assert_int_equal(msc_sim_options_parse(text, DEVICE, &options, &err), status);
    if (strstr(err.message, words) == NULL)
        fail_msg("\"%s\" gives: %s", text, err.message);
    assert_memory_equal(&options, &before, sizeof before);
}

static void expect_divisions(const char *text, const uint32_t *expected)
{
    msc_sim_options options = parse(text);

    assert_memory_equal(options.roundup_power2_divisions, expected, sizeof options.roundup_power2_divisions);
}

static void every_key(void **state)
{
    msc_sim_options options =
        parse("max_split_size_mb:40,max_non_split_rounding_mb:30,large_segment_size_mb:24,"
              "garbage_collection_threshold:0.8,expandable_segments:True,per_process_memory_fraction:0.5,"
              "roundup_power2_divisions:8");

    (void)state;
    assert_int_equal(options.max_split_bytes, 40 * MIB);
    assert_int_equal(options.max_non_split_rounding_bytes, 30 * MIB);
    assert_int_equal(options.large_segment_bytes, 24 * MIB);
    assert_true(options.garbage_collection_threshold == 0.8);
    assert_int_equal(options.expandable_segments, 1);
    assert_int_equal(options.allowed_bytes, 500 * MIB);
    assert_int_equal(options.device_total_bytes, DEVICE);
    assert_int_equal(options.roundup_power2_divisions[0], 8);
    assert_int_equal(options.roundup_power2_divisions[15], 8);
}

static void nothing(void **state)
{
    msc_sim_options expected = msc_sim_options_default(MSC_SIM_CUDA);
    msc_sim_options options = parse("  ");

    (void)state;
    expected.device_total_bytes = DEVICE;
    assert_memory_equal(&options, &expected, sizeof expected);
}

/* Only what is named changes, spaces count for nothing, and the last of two wins. */
static void later_texts_add(void **state)
{
    msc_sim_options options = parse(" max_split_size_mb : 4 0 ,max_split_size_mb:60, ");

    (void)state;
    assert_int_equal(options.max_split_bytes, 60 * MIB);
    assert_int_equal(msc_sim_options_parse("expandable_segments:True", DEVICE, &options, &err), MSC_OK);
    assert_int_equal(options.max_split_bytes, 60 * MIB);
    assert_int_equal(msc_sim_options_parse("expandable_segments:False", DEVICE, &options, &err), MSC_OK);
    assert_int_equal(options.expandable_segments, 0);
}

/* A large segment moves the rounding with it, wherever it stands, unless that is named. */
static void rounding_follows_the_segment(void **state)
{
    (void)state;
    assert_int_equal(parse("large_segment_size_mb:32").max_non_split_rounding_bytes, 32 * MIB);
    assert_int_equal(
        parse("max_non_split_rounding_mb:50,large_segment_size_mb:32").max_non_split_rounding_bytes,
        50 * MIB);
    assert_int_equal(parse("max_split_size_mb:12,large_segment_size_mb:12").max_split_bytes, 12 * MIB);
    assert_true(parse("max_split_size_mb:99999999999999999").max_split_bytes >= UINT64_MAX - MIB);
}

/* The first boundary counts for all below it, `>` for all above the last; between two it is off. */
static void intervals(void **state)
{
    static const uint32_t documented[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8};
    static const uint32_t gaps[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16};
    static const uint32_t first[16] = {4, 4, 4, 0, 0, 2};
    static const uint32_t last[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2};
    static const uint32_t none[16] = {0};

    (void)state;
    expect_divisions("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", documented);
    expect_divisions("roundup_power2_divisions:[1:0,1024:16]", gaps);
    expect_divisions("roundup_power2_divisions:[4:4,32:2]", first);
    expect_divisions("roundup_power2_divisions:[1:0,1048576:2]", last);
    expect_divisions("roundup_power2_divisions:[]", none);
    expect_divisions("roundup_power2_divisions:8,roundup_power2_divisions:[4:0]", none);
}

static void fractions(void **state)
{
    (void)state;
    assert_true(parse("per_process_memory_fraction:1").allowed_bytes == UINT64_MAX);
    assert_true(parse("per_process_memory_fraction:1.000").allowed_bytes == UINT64_MAX);
    assert_int_equal(parse("per_process_memory_fraction:0").allowed_bytes, 0);
    assert_int_equal(parse("per_process_memory_fraction:.25").allowed_bytes, DEVICE / 4);
    assert_int_equal(parse("per_process_memory_fraction:0.333").allowed_bytes, 349175808);
    assert_true(parse("garbage_collection_threshold:0.123456789").garbage_collection_threshold ==
                0.123456789);
}

static void keys_that_change_nothing(void **state)
{
    msc_sim_options expected = parse("");
    msc_sim_options options =
        parse("backend:native,release_lock_on_cudamalloc:True,release_lock_on_hipmalloc:False,"
              "pinned_use_cuda_host_register:True,pinned_use_hip_host_register:True,"
              "pinned_num_register_threads:8,pinned_reserve_segment_size_mb:64,"
              "pinned_use_background_threads:True,pinned_free_catch_all:True,"
              "pinned_max_round_threshold_mb:0,pinned_max_cached_size_mb:7,"
              "graph_capture_record_stream_reuse:True,throw_on_cudamalloc_oom:True");

    (void)state;
    assert_memory_equal(&options, &expected, sizeof expected);
}

static void bad_texts(void **state)
{
    (void)state;
    refuse("max_split_mb:40", MSC_EINVAL, "unknown key \"max_split_mb\"");
    refuse(",", MSC_EINVAL, "unknown key \",\"");
    refuse("a_key_that_is_much_longer_than_any_key_could_reasonably_be:1", MSC_EINVAL, "unknown key \"a_key");
    refuse("max_split_size_mb", MSC_EINVAL, "after max_split_size_mb, \":\" is expected");
    refuse("max_split_size_mb=40", MSC_EINVAL, "unknown key");
    refuse("max_split_size_mb:40;expandable_segments:True", MSC_EINVAL, "must be a whole number");
    refuse("max_split_size_mb:40:", MSC_EINVAL, "\",\" is expected, not \":\"");
}

static void bad_numbers(void **state)
{
    (void)state;
    refuse("max_split_size_mb:", MSC_EINVAL, "max_split_size_mb is \"\"");
    refuse("max_split_size_mb:-1", MSC_EINVAL, "max_split_size_mb is \"-1\", must be a whole number");
    refuse("max_split_size_mb:40x", MSC_EINVAL, "\"40x\"");
    refuse("max_split_size_mb:99999999999999999999", MSC_EINVAL, "must be a whole number");
    refuse("max_split_size_mb:19", MSC_EINVAL, "max_split_size_mb is 19, must be at least");
    refuse("max_non_split_rounding_mb:19", MSC_EINVAL, "max_non_split_rounding_mb is 19, must be at least");
    refuse("large_segment_size_mb:10", MSC_EINVAL, "from 11 to 1048576");
    refuse("large_segment_size_mb:1048577", MSC_EINVAL, "from 11 to 1048576");
    refuse("large_segment_size_mb:30,max_split_size_mb:29", MSC_EINVAL, "at least large_segment_size_mb, 30");
    refuse("expandable_segments:true", MSC_EINVAL, "must be True or False");
    refuse("pinned_num_register_threads:6", MSC_EINVAL, "power of two of at most 128");
    refuse("pinned_num_register_threads:256", MSC_EINVAL, "power of two of at most 128");
    refuse("pinned_reserve_segment_size_mb:0", MSC_EINVAL, "above 0");
    refuse("pinned_use_background_threads:1", MSC_EINVAL, "must be True or False");
    refuse("pinned_max_cached_size_mb:x", MSC_EINVAL, "a whole number");
}

static void bad_fractions(void **state)
{
    (void)state;
    refuse("garbage_collection_threshold:0", MSC_EINVAL, "above 0 and below 1");
    refuse("garbage_collection_threshold:1.0", MSC_EINVAL, "\"1.0\", must be a decimal fraction");
    refuse("garbage_collection_threshold:0.5.5", MSC_EINVAL, "decimal fraction");
    refuse("garbage_collection_threshold:.", MSC_EINVAL, "decimal fraction");
    refuse("garbage_collection_threshold:nan", MSC_EINVAL, "decimal fraction");
    refuse("garbage_collection_threshold:0.1234567890123456", MSC_EINVAL, "at most 15 digits");
    refuse("per_process_memory_fraction:1.01", MSC_EINVAL, "from 0 to 1");
    refuse("per_process_memory_fraction:5e-1", MSC_EINVAL, "from 0 to 1");
}

static void bad_intervals(void **state)
{
    (void)state;
    refuse("roundup_power2_divisions:0", MSC_EINVAL, "a power of two");
    refuse("roundup_power2_divisions:3", MSC_EINVAL, "a power of two");
    refuse("roundup_power2_divisions:8589934592", MSC_EINVAL, "a power of two");
    refuse("roundup_power2_divisions:[256:3]", MSC_EINVAL, "is \"3\", must be a list");
    refuse("roundup_power2_divisions:[255:2]", MSC_EINVAL, "is \"255\", must be a list");
    refuse("roundup_power2_divisions:[0:2]", MSC_EINVAL, "must be a list");
    refuse("roundup_power2_divisions:[256]", MSC_EINVAL, "\":\" is expected, not \"]\"");
    refuse("roundup_power2_divisions:[256:2", MSC_EINVAL, "must be a list");
    refuse("roundup_power2_divisions:[256:2,", MSC_EINVAL, "must be a list");
    refuse("roundup_power2_divisions:[256:2 512:2]", MSC_EINVAL, "must be a list");
}

static void what_cannot_be_simulated(void **state)
{
    (void)state;
    refuse("backend:cudaMallocAsync", MSC_EUNSUPPORTED, "only backend:native can be simulated");
    refuse("backend:jemalloc", MSC_EINVAL, "must be native or cudaMallocAsync");
    refuse("expandable_segments_reserve:0.5", MSC_EUNSUPPORTED, "9/8 of the device");
    refuse("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True", MSC_EUNSUPPORTED,
           "throw_on_cudamalloc_oom");
}

static void bad_calls(void **state)
{
    msc_sim_options options = msc_sim_options_default(MSC_SIM_HOST);

    (void)state;
    assert_int_equal(msc_sim_options_parse("", 0, &options, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "CUDA"));
    options = msc_sim_options_default(MSC_SIM_CUDA);
    assert_int_equal(msc_sim_options_parse(NULL, 0, &options, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_options_parse("", 0, NULL, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_options_parse("per_process_memory_fraction:0.5", UINT64_MAX, &options, &err),
                     MSC_EINVAL);
    assert_non_null(strstr(err.message, "memory of the device"));
    options.struct_bytes = 0;
    assert_int_equal(msc_sim_options_parse("", 0, &options, &err), MSC_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"conf/every-key", every_key, NULL, NULL, NULL},
        {"conf/nothing", nothing, NULL, NULL, NULL},
        {"conf/later-texts-add", later_texts_add, NULL, NULL, NULL},
        {"conf/rounding-follows-the-segment", rounding_follows_the_segment, NULL, NULL, NULL},
        {"conf/intervals", intervals, NULL, NULL, NULL},
        {"conf/fractions", fractions, NULL, NULL, NULL},
        {"conf/keys-that-change-nothing", keys_that_change_nothing, NULL, NULL, NULL},
        {"conf/bad-texts", bad_texts, NULL, NULL, NULL},
        {"conf/bad-numbers", bad_numbers, NULL, NULL, NULL},
        {"conf/bad-fractions", bad_fractions, NULL, NULL, NULL},
        {"conf/bad-intervals", bad_intervals, NULL, NULL, NULL},
        {"conf/cannot-be-simulated", what_cannot_be_simulated, NULL, NULL, NULL},
        {"conf/bad-calls", bad_calls, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
