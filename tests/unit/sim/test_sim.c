/* SPDX-License-Identifier: Apache-2.0 */
/* The simulator through its public header: ids, HOST, statistics, lack of memory, and a plain reference. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "memscale/sim.h"
#include "oom/failing_alloc.h"
#include "sim_reference.h"

#define MIB (UINT64_C(1) << 20)

static msc_context *ctx;
static msc_sim *sim; /* one test at a time */
static msc_error err;

static int setup(void **state)
{
    (void)state;
    sim = NULL;
    memset(&err, 0, sizeof err);
    return msc_context_create(NULL, &ctx, NULL) == MSC_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    msc_sim_destroy(sim);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    return 0;
}

static void make(msc_sim_kind kind, uint64_t capacity_bytes)
{
    msc_sim_options options = msc_sim_options_default(kind);

    options.capacity_bytes = capacity_bytes;
    assert_int_equal(msc_sim_create(ctx, &options, &sim, &err), MSC_OK);
}

static void check(void)
{
    if (msc_sim_validate(sim, &err) != MSC_OK)
        fail_msg("%s", err.message);
}

static void alloc(uint32_t id, uint64_t size_bytes)
{
    assert_int_equal(msc_sim_alloc(sim, id, size_bytes, 0, &err), MSC_OK);
    check();
}

static void release(uint32_t id)
{
    assert_int_equal(msc_sim_free(sim, id, &err), MSC_OK);
    check();
}

#define STAT(field) (msc_sim_get_stats(sim).field)

static uint64_t next_random(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

/* ---- options ------------------------------------------------------------------------------------ */

static void default_options(void **state)
{
    msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);
    uint32_t i;

    (void)state;
    assert_int_equal(options.struct_bytes, sizeof options);
    assert_int_equal(options.kind, MSC_SIM_CUDA);
    assert_true(options.capacity_bytes == UINT64_MAX);
    assert_true(options.max_split_bytes == UINT64_MAX);
    assert_int_equal(options.max_non_split_rounding_bytes, 20 * MIB);
    assert_int_equal(options.large_segment_bytes, 20 * MIB);
    assert_true(options.allowed_bytes == UINT64_MAX);
    assert_true(options.device_total_bytes == UINT64_MAX);
    for (i = 0; i < MSC_SIM_ROUNDUP_INTERVALS; i++)
        assert_int_equal(options.roundup_power2_divisions[i], 0);
    assert_int_equal(options.expandable_segments, 0);
}

static void refuse(msc_sim_options options, const char *field)
{
    sim = (msc_sim *)&options; /* anything but NULL */
    assert_int_equal(msc_sim_create(ctx, &options, &sim, &err), MSC_EINVAL);
    assert_null(sim);
    assert_non_null(strstr(err.message, field));
}

static void bad_options(void **state)
{
    const msc_sim_options good = msc_sim_options_default(MSC_SIM_CUDA);
    msc_sim_options bad = good;

    (void)state;
    bad.struct_bytes = 3;
    refuse(bad, "struct_bytes");
    bad = good;
    bad.kind = MSC_SIM_KIND_COUNT;
    refuse(bad, "kind");
    bad = good;
    bad.roundup_power2_divisions[7] = 3;
    refuse(bad, "roundup_power2_divisions[7]");
    bad = good;
    bad.expandable_segments = 2;
    refuse(bad, "expandable_segments");
    bad = good;
    bad.record_segments = 2;
    refuse(bad, "record_segments");
    bad = good;
    bad.garbage_collection_threshold = 1;
    refuse(bad, "garbage_collection_threshold");
    bad.garbage_collection_threshold = -0.1;
    refuse(bad, "garbage_collection_threshold");
    bad = good;
    bad.pad[2] = 1;
    refuse(bad, "pad");
    bad = good;
    bad.large_segment_bytes = 9 * MIB;
    refuse(bad, "large_segment_bytes");
    bad.large_segment_bytes = 20 * MIB + 512;
    refuse(bad, "large_segment_bytes");
    bad = good;
    bad.max_split_bytes = 20 * MIB - 1;
    refuse(bad, "max_split_bytes");
    bad = good;
    bad.max_split_bytes = 20 * MIB;
    assert_int_equal(msc_sim_create(ctx, &bad, &sim, &err), MSC_OK);
}

static void missing_arguments(void **state)
{
    msc_sim_options options = msc_sim_options_default(MSC_SIM_HOST);

    (void)state;
    assert_int_equal(msc_sim_create(ctx, &options, NULL, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_create(ctx, NULL, &sim, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_create(NULL, &options, &sim, &err), MSC_EINVAL);
    msc_sim_destroy(NULL);
}

/* ---- HOST --------------------------------------------------------------------------------------- */

static void host_counts_live_bytes(void **state)
{
    (void)state;
    make(MSC_SIM_HOST, UINT64_MAX);
    alloc(0, 100);
    alloc(1, 1);
    alloc(7, 1000);
    release(0);
    alloc(0, 3);
    assert_int_equal(STAT(allocated_now_bytes), 1004);
    assert_int_equal(STAT(allocated_peak_bytes), 1101);
    assert_int_equal(STAT(reserved_now_bytes), 1004);
    assert_int_equal(STAT(reserved_peak_bytes), 1101);
    assert_int_equal(STAT(requested_now_bytes), 1004);
    assert_int_equal(STAT(segment_now_count), 0);
    assert_int_equal(STAT(device_alloc_count), 0);
    msc_sim_empty_cache(sim);
    check();
    assert_int_equal(STAT(allocated_now_bytes), 1004);
}

static void host_capacity(void **state)
{
    (void)state;
    make(MSC_SIM_HOST, 1000);
    alloc(0, 600);
    alloc(1, 400);
    assert_int_equal(msc_sim_alloc(sim, 2, 1, 0, &err), MSC_EDEVMEM);
    assert_int_equal(err.status, MSC_EDEVMEM);
    assert_non_null(strstr(err.message, "1 bytes"));
    assert_non_null(strstr(err.message, "1000 reserved"));
    assert_non_null(strstr(err.message, "capacity of 1000"));
    check();
    assert_int_equal(STAT(oom_count), 1);
    assert_int_equal(STAT(allocated_now_bytes), 1000);
    assert_int_equal(msc_sim_free(sim, 2, &err), MSC_EINVAL);
    release(0);
    alloc(2, 600);
}

static void host_sum_cannot_overflow(void **state)
{
    (void)state;
    make(MSC_SIM_HOST, UINT64_MAX);
    alloc(0, UINT64_C(1) << 61);
    assert_int_equal(msc_sim_alloc(sim, 1, UINT64_MAX, 0, NULL), MSC_EDEVMEM);
    assert_int_equal(msc_sim_alloc(sim, 1, UINT64_MAX - (UINT64_C(1) << 61) + 1, 0, NULL), MSC_EDEVMEM);
    check();
    assert_true(STAT(allocated_now_bytes) == UINT64_C(1) << 61);
}

/* ---- ids ---------------------------------------------------------------------------------------- */

static void id_misuse(void **state)
{
    (void)state;
    make(MSC_SIM_CUDA, UINT64_MAX);
    assert_int_equal(msc_sim_free(sim, 0, &err), MSC_EINVAL);
    alloc(5, 100);
    assert_int_equal(msc_sim_alloc(sim, 5, 100, 0, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "id 5"));
    assert_int_equal(msc_sim_free(sim, 4, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_free(sim, 6, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_free(sim, MSC_NONE, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_alloc(sim, MSC_NONE, 100, 0, &err), MSC_EINVAL);
    release(5);
    assert_int_equal(msc_sim_free(sim, 5, &err), MSC_EINVAL);
    assert_int_equal(STAT(allocated_now_bytes), 0);
    check();
}

static void zero_bytes(void **state)
{
    (void)state;
    make(MSC_SIM_CUDA, 0);
    alloc(3, 0);
    assert_int_equal(msc_sim_alloc(sim, 3, 0, 0, &err), MSC_EINVAL);
    assert_int_equal(STAT(reserved_now_bytes), 0);
    release(3);
    assert_int_equal(msc_sim_free(sim, 3, &err), MSC_EINVAL);
}

/* ---- statistics --------------------------------------------------------------------------------- */

static void peaks_start_anew(void **state)
{
    (void)state;
    make(MSC_SIM_CUDA, UINT64_MAX);
    alloc(0, 30 * MIB);
    alloc(1, 40 * MIB);
    release(0);
    msc_sim_empty_cache(sim);
    check();
    assert_int_equal(STAT(allocated_peak_bytes), 70 * MIB);
    assert_int_equal(STAT(reserved_peak_bytes), 70 * MIB);
    assert_int_equal(STAT(segment_peak_count), 2);
    msc_sim_reset_peaks(sim);
    assert_int_equal(STAT(allocated_peak_bytes), 40 * MIB);
    assert_int_equal(STAT(reserved_peak_bytes), 40 * MIB);
    assert_int_equal(STAT(requested_peak_bytes), 40 * MIB);
    assert_int_equal(STAT(segment_peak_count), 1);
    assert_int_equal(STAT(device_alloc_count), 2); /* not a peak */
}

static void failure_releases_the_cache(void **state)
{
    (void)state;
    make(MSC_SIM_CUDA, 100 * MIB);
    alloc(0, 60 * MIB);
    alloc(1, 30 * MIB);
    release(0);
    assert_int_equal(msc_sim_alloc(sim, 2, 80 * MIB, 0, &err), MSC_EDEVMEM);
    check();
    assert_non_null(strstr(err.message, "83886080 bytes"));
    assert_non_null(strstr(err.message, "31457280 reserved"));
    assert_non_null(strstr(err.message, "104857600"));
    assert_int_equal(STAT(reserved_now_bytes), 30 * MIB);
    assert_int_equal(STAT(reserved_peak_bytes), 90 * MIB);
    alloc(2, 70 * MIB);
}

static msc_sim_stats play(uint64_t seed)
{
    uint32_t i;

    for (i = 0; i < 500; i++)
        assert_int_equal(msc_sim_alloc(sim, i, 1 + next_random(&seed) % (4 * MIB), i % 3, NULL), MSC_OK);
    for (i = 0; i < 500; i += 2)
        assert_int_equal(msc_sim_free(sim, i, NULL), MSC_OK);
    check();
    return msc_sim_get_stats(sim);
}

static void reset_forgets_and_repeats(void **state)
{
    const msc_sim_stats empty = {0};
    msc_sim_stats first, second, between;
    uint64_t held;

    (void)state;
    make(MSC_SIM_CUDA, UINT64_MAX);
    first = play(77);
    held = msc_context_held_bytes(ctx);
    msc_sim_reset(sim);
    check();
    between = msc_sim_get_stats(sim);
    assert_memory_equal(&between, &empty, sizeof empty);
    assert_int_equal(msc_sim_free(sim, 1, NULL), MSC_EINVAL);
    second = play(77);
    assert_memory_equal(&first, &second, sizeof first);
    assert_int_equal(msc_context_held_bytes(ctx), held);
}

/* ---- lack of host memory ------------------------------------------------------------------------ */

#define SCRIPT_EVENTS 1500u

/*
 * Runs a fixed script on a heap that refuses one request. The refused call must leave everything as it
 * was, and repeating it must lead to the same end as a run without refusal. Returns the refusals seen.
 */
static uint64_t run_script(uint64_t fail_at, const msc_sim_options *options, msc_sim_stats *end)
{
    static failing_alloc heap;
    msc_context *small_ctx;
    msc_sim *s = NULL;
    uint8_t live[256] = {0};
    uint64_t seed = 4711;
    uint32_t i;

    failing_alloc_init(&heap, FAILING_ALLOC_NEVER);
    small_ctx = failing_alloc_context(&heap);
    heap.fail_at = fail_at + heap.request_count;
    if (msc_sim_create(small_ctx, options, &s, &err) != MSC_OK) {
        assert_int_equal(err.status, MSC_ENOMEM);
        assert_null(s);
        assert_int_equal(msc_sim_create(small_ctx, options, &s, &err), MSC_OK);
    }
    for (i = 0; i < SCRIPT_EVENTS; i++) {
        uint32_t id = (uint32_t)(next_random(&seed) % sizeof live);
        uint64_t size = 1 + next_random(&seed) % (next_random(&seed) % 4 == 0 ? 30 * MIB : MIB);
        msc_sim_stats before = msc_sim_get_stats(s);
        msc_sim_stats after;
        msc_status status = live[id] ? msc_sim_free(s, id, &err) : msc_sim_alloc(s, id, size, i % 3, &err);
        if (status == MSC_ENOMEM) {
            after = msc_sim_get_stats(s);
            assert_memory_equal(&before, &after, sizeof before);
            assert_int_equal(msc_sim_validate(s, &err), MSC_OK);
            assert_int_equal(live[id], 0);
            assert_int_equal(msc_sim_free(s, id, NULL), MSC_EINVAL);
            status = msc_sim_alloc(s, id, size, i % 3, &err);
        }
        assert_true(status == MSC_OK || (status == MSC_EDEVMEM && !live[id]));
        if (status == MSC_OK)
            live[id] = !live[id];
        if (i % 100 == 0)
            msc_sim_empty_cache(s);
    }
    assert_int_equal(msc_sim_validate(s, &err), MSC_OK);
    *end = msc_sim_get_stats(s);
    msc_sim_destroy(s);
    msc_context_destroy(small_ctx);
    assert_true(failing_alloc_is_clean(&heap));
    return heap.failed_count;
}

static void every_refusal_is_survived(msc_sim_options options)
{
    msc_sim_stats expected, end;
    uint64_t n;

    assert_int_equal(run_script(FAILING_ALLOC_NEVER / 2, &options, &expected), 0);
    for (n = 0; run_script(n, &options, &end) != 0; n++)
        assert_memory_equal(&expected, &end, sizeof end);
    assert_true(n >= 5); /* the simulator, ids, blocks, and the growth of both at least */
}

static void no_memory_host(void **state)
{
    (void)state;
    every_refusal_is_survived(msc_sim_options_default(MSC_SIM_HOST));
}

static void no_memory_cuda(void **state)
{
    msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);

    (void)state;
    options.capacity_bytes = 600 * MIB;
    every_refusal_is_survived(options);
}

static void no_memory_expandable(void **state)
{
    msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);

    (void)state;
    options.capacity_bytes = 600 * MIB;
    options.expandable_segments = 1;
    every_refusal_is_survived(options);
}

/* ---- the reference ------------------------------------------------------------------------------ */

static msc_sim_options random_options(uint64_t *seed)
{
    static const uint64_t segments[] = {20 * MIB, 20 * MIB, 12 * MIB, 10 * MIB};
    static const uint32_t divisions[] = {0, 0, 1, 2, 4, 8, 16, 4096};
    msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);
    uint32_t i;

    options.large_segment_bytes = segments[next_random(seed) % 4];
    for (i = 0; i < MSC_SIM_ROUNDUP_INTERVALS; i++)
        options.roundup_power2_divisions[i] = divisions[next_random(seed) % 8];
    options.expandable_segments = next_random(seed) % 2 == 0;
    if (next_random(seed) % 4 != 0)
        options.capacity_bytes = (next_random(seed) % 500 + 1) * MIB;
    if (next_random(seed) % 2 == 0) {
        options.max_split_bytes = options.large_segment_bytes + (next_random(seed) % 20) * 2 * MIB;
        options.max_split_bytes += next_random(seed) % 2 * 512;
        options.max_non_split_rounding_bytes = (next_random(seed) % 40) * MIB;
    }
    return options;
}

static uint64_t random_size(uint64_t *seed)
{
    static const uint64_t bounds[] = {2000, 100000, 2 * MIB, 12 * MIB, 12 * MIB, 60 * MIB};
    uint64_t bound = bounds[next_random(seed) % 6];

    if (next_random(seed) % 3 == 0) /* repeated sizes make ties */
        return bound / 4 * (1 + next_random(seed) % 4);
    return 1 + next_random(seed) % bound;
}

static void compare_run(uint64_t seed, uint32_t events)
{
    static reference ref;
    msc_sim_options options = random_options(&seed);
    uint8_t live[150] = {0};
    uint32_t i;

    ref_init(&ref, &options);
    assert_int_equal(msc_sim_create(ctx, &options, &sim, &err), MSC_OK);
    for (i = 0; i < events; i++) {
        uint32_t id = (uint32_t)(next_random(&seed) % sizeof live);
        uint64_t size = random_size(&seed);
        uint32_t stream = (uint32_t)(next_random(&seed) % 8 / 6);
        msc_sim_stats stats;
        if (next_random(&seed) % 200 == 0) {
            msc_sim_empty_cache(sim);
            ref_empty_cache(&ref);
        } else if (live[id]) {
            assert_int_equal(msc_sim_free(sim, id, NULL), MSC_OK);
            ref_free(&ref, id);
            live[id] = 0;
        } else {
            live[id] = ref_alloc(&ref, id, size, stream);
            assert_int_equal(msc_sim_alloc(sim, id, size, stream, NULL), live[id] ? MSC_OK : MSC_EDEVMEM);
        }
        check();
        stats = msc_sim_get_stats(sim);
        assert_memory_equal(&stats, &ref.stats, sizeof stats);
    }
    msc_sim_destroy(sim);
    sim = NULL;
}

static void equals_the_reference(void **state)
{
    uint64_t seed;

    (void)state;
    for (seed = 1; seed <= 60; seed++)
        compare_run(seed * UINT64_C(0x9e3779b97f4a7c15), 600);
}

#define CASE(name, function)                                                                                 \
    {                                                                                                        \
        name, function, setup, teardown, NULL                                                                \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE("options/default", default_options),
        CASE("options/bad", bad_options),
        CASE("options/missing-arguments", missing_arguments),
        CASE("host/live-bytes", host_counts_live_bytes),
        CASE("host/capacity", host_capacity),
        CASE("host/sum-cannot-overflow", host_sum_cannot_overflow),
        CASE("id/misuse", id_misuse),
        CASE("id/zero-bytes", zero_bytes),
        CASE("stats/peaks-start-anew", peaks_start_anew),
        CASE("stats/failure-releases-the-cache", failure_releases_the_cache),
        CASE("reset/forgets-and-repeats", reset_forgets_and_repeats),
        CASE("memory/host", no_memory_host),
        CASE("memory/cuda", no_memory_cuda),
        CASE("memory/expandable", no_memory_expandable),
        CASE("random/equals-the-reference", equals_the_reference),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
