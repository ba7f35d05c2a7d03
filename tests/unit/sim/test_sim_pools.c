/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The caching allocator's rules, each with numbers worked out by hand from PyTorch's source. Every change
 * is followed by a whole-structure check.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "sim/sim_pools.h"

#define KIB UINT64_C(1024)
#define MIB (UINT64_C(1) << 20)
#define STAT(field) (msc__sim_counters_summary(&pools.counters).field)

static msc_context *ctx;
static msc__sim_pools pools; /* one test at a time */
static const msc_sim_place place;

static int setup(void **state)
{
    (void)state;
    memset(&pools, 0, sizeof pools);
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    pools.ctx = ctx;
    pools.options = msc_sim_options_default(MSC_SIM_CUDA);
    pools.options.capacity_bytes = MSC__SIM_MOST_BYTES - 1;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    msc__sim_pools_fini(&pools);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    return 0;
}

static void check(void)
{
    msc_error err = {0};

    if (msc__sim_pools_validate(&pools, &err) != MSC_OK)
        fail_msg("%s", err.message);
}

static uint32_t alloc_on(uint64_t size_bytes, uint32_t stream)
{
    uint32_t slot = 0;

    assert_int_equal(msc__sim_pools_alloc(&pools, 0, size_bytes, &(msc_sim_place){stream, 0}, &slot, NULL),
                     MSC_OK);
    check();
    return slot;
}

static uint32_t alloc(uint64_t size_bytes)
{
    return alloc_on(size_bytes, 0);
}

static void alloc_fails(uint64_t size_bytes)
{
    uint32_t slot = 0;

    assert_int_equal(msc__sim_pools_alloc(&pools, 0, size_bytes, &place, &slot, NULL), MSC_EDEVMEM);
    check();
}

static void release(uint32_t slot)
{
    msc__sim_pools_free(&pools, slot);
    check();
}

static void empty_cache(void)
{
    msc__sim_pools_release_cached(&pools);
    check();
}

static uint64_t address(uint32_t slot)
{
    return msc__sim_block_at(&pools.blocks, slot)->address;
}

static uint64_t size(uint32_t slot)
{
    return msc__sim_block_at(&pools.blocks, slot)->size_bytes;
}

#define RESERVED(bytes) assert_int_equal(STAT(reserved_now_bytes), bytes)
#define ALLOCATED(bytes) assert_int_equal(STAT(allocated_now_bytes), bytes)
#define INACTIVE(bytes) assert_int_equal(STAT(inactive_split_now_bytes), bytes)

/* ---- sizes -------------------------------------------------------------------------------------- */

static void round_granule(void **state)
{
    static const uint64_t cases[][2] = {
        {1, 512},
        {511, 512},
        {512, 512},
        {513, 1024},
        {1024, 1024},
        {1025, 1536},
        {MIB, MIB},
        {MIB + 1, MIB + 512},
        {UINT64_MAX, MSC__SIM_MOST_BYTES},
        {5 * MIB - 1, 5 * MIB},
    };
    size_t i;

    (void)state;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(msc__sim_round_size(&pools.options, cases[i][0]), cases[i][1]);
}

static void divide(uint32_t divisions)
{
    uint32_t i;

    for (i = 0; i < MSC_SIM_ROUNDUP_INTERVALS; i++)
        pools.options.roundup_power2_divisions[i] = divisions;
}

static void round_divisions(void **state)
{
    static const uint64_t cases[][3] = {
        {1, 1200, 1536},                       /* one division: off */
        {4, 100, 512},                         /* below a granule */
        {4, 1200, 1536},                       /* not above 4 * 512: granules */
        {4, 2048, 2048},                       /* the border belongs to granules */
        {4, 2049, 2560},                       /* 2048 / 4 = 512 */
        {4, 5000, 5120},                       /* 4096 / 4 = 1024 */
        {4, 4096, 4096},                       /* a power of two stays */
        {4, 3 * MIB, 3 * MIB},                 /* on a step */
        {4, 3 * MIB + 1, 3 * MIB + 512 * KIB}, /* just past it */
        {8, MIB + 1, MIB + 128 * KIB},         /* 1 MiB / 8 */
        {2, 7 * MIB, 8 * MIB},                 /* up to the next power of two */
        {16, 100 * MIB, 100 * MIB},            /* 64 / 16 = 4 MiB steps */
        {16, 101 * MIB, 104 * MIB},
        {UINT32_C(1) << 31, 513, 1024}, /* more divisions than granules */
        {4, UINT64_MAX, MSC__SIM_MOST_BYTES},
    };
    size_t i;

    (void)state;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        divide((uint32_t)cases[i][0]);
        assert_int_equal(msc__sim_round_size(&pools.options, cases[i][1]), cases[i][2]);
    }
}

static void divisions_in_a_request(void **state)
{
    (void)state;
    divide(4);
    (void)alloc(9 * MIB); /* 8 / 4 = 2 MiB steps: 10 MiB, so a segment of its own */
    ALLOCATED(10 * MIB);
    RESERVED(10 * MIB);
    assert_int_equal(STAT(requested_now_bytes), 9 * MIB);
    (void)alloc(900 * KIB); /* 512 / 4 = 128 KiB steps: 1 MiB, the small pool */
    RESERVED(12 * MIB);
    ALLOCATED(11 * MIB);
}

static void segment_sizes(void **state)
{
    static const uint64_t cases[][2] = {
        {512, 2 * MIB},        {MIB, 2 * MIB},
        {MIB + 512, 20 * MIB}, {10 * MIB - 512, 20 * MIB},
        {10 * MIB, 10 * MIB},  {10 * MIB + 512, 12 * MIB},
        {12 * MIB, 12 * MIB},  {1000 * MIB + 512, 1002 * MIB},
    };
    size_t i;

    (void)state;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(msc__sim_segment_bytes(&pools.options, cases[i][0]), cases[i][1]);
    pools.options.large_segment_bytes = 12 * MIB;
    assert_int_equal(msc__sim_segment_bytes(&pools.options, 2 * MIB), 12 * MIB);
    assert_int_equal(msc__sim_segment_bytes(&pools.options, MIB), 2 * MIB);
    assert_int_equal(msc__sim_segment_bytes(&pools.options, 10 * MIB), 10 * MIB);
}

/* ---- segments and splits ------------------------------------------------------------------------ */

static void small_segment(void **state)
{
    uint32_t a, b;

    (void)state;
    a = alloc(1);
    b = alloc(513);
    RESERVED(2 * MIB);
    ALLOCATED(512 + 1024);
    INACTIVE(2 * MIB - 1536);
    assert_int_equal(STAT(requested_now_bytes), 514);
    assert_int_equal(STAT(segment_now_count), 1);
    assert_int_equal(STAT(device_alloc_count), 1);
    assert_int_equal(address(b), address(a) + 512); /* the request keeps the low part */
}

static void large_segment(void **state)
{
    (void)state;
    (void)alloc(MIB + 1);
    RESERVED(20 * MIB);
    ALLOCATED(MIB + 512);
    (void)alloc(10 * MIB - 512); /* from the rest */
    RESERVED(20 * MIB);
    (void)alloc(10 * MIB - 512); /* 9 MiB are left */
    RESERVED(40 * MIB);
    (void)alloc(10 * MIB); /* best fit is what remains of the second segment */
    RESERVED(40 * MIB);
    (void)alloc(10 * MIB);
    RESERVED(50 * MIB);
    assert_int_equal(STAT(segment_now_count), 3);
}

static void small_pool_splits_to_the_granule(void **state)
{
    uint32_t c;

    (void)state;
    (void)alloc(MIB);
    (void)alloc(MIB - 512);
    INACTIVE(512);
    c = alloc(1);
    INACTIVE(0);
    ALLOCATED(2 * MIB);
    RESERVED(2 * MIB);
    assert_int_equal(size(c), 512);
    (void)alloc(1);
    RESERVED(4 * MIB);
}

static void large_pool_splits_above_one_mib(void **state)
{
    uint32_t a, b;

    (void)state;
    a = alloc(11 * MIB); /* 12 MiB segment, exactly 1 MiB over: kept whole */
    assert_int_equal(size(a), 12 * MIB);
    ALLOCATED(12 * MIB);
    INACTIVE(0);
    assert_int_equal(STAT(requested_now_bytes), 11 * MIB);
    b = alloc(11 * MIB - 512); /* one granule more than 1 MiB over: split */
    assert_int_equal(size(b), 11 * MIB - 512);
    INACTIVE(MIB + 512);
    RESERVED(24 * MIB);
}

static void pools_do_not_mix(void **state)
{
    uint32_t a;

    (void)state;
    a = alloc(5 * MIB);
    release(a);
    (void)alloc(MIB); /* a free 20 MiB block is no help to the small pool */
    RESERVED(22 * MIB);
    (void)alloc(MIB + 1); /* but it is to the large one */
    RESERVED(22 * MIB);
}

/* ---- fit ---------------------------------------------------------------------------------------- */

static void best_fit_is_the_smallest(void **state)
{
    uint32_t a, b, c, d;

    (void)state;
    a = alloc(40 * MIB);
    b = alloc(30 * MIB);
    c = alloc(50 * MIB);
    release(a);
    release(b);
    release(c);
    d = alloc(30 * MIB - 512 * KIB);
    assert_int_equal(size(d), 30 * MIB);
    RESERVED(120 * MIB);
}

static void ties_go_to_the_lowest_address(void **state)
{
    uint32_t a, b, c;
    uint64_t low, high;

    (void)state;
    a = alloc(30 * MIB);
    b = alloc(30 * MIB);
    c = alloc(30 * MIB);
    low = address(c);
    high = address(a);
    assert_true(low < high);
    release(a);
    release(c);
    assert_int_equal(address(alloc(30 * MIB)), low);
    assert_int_equal(address(alloc(30 * MIB)), high);
    release(b);
}

static void streams_are_separate(void **state)
{
    uint32_t a;

    (void)state;
    a = alloc_on(30 * MIB, 7);
    release(a);
    (void)alloc_on(30 * MIB, 3);
    RESERVED(60 * MIB);
    (void)alloc_on(30 * MIB, 7);
    RESERVED(60 * MIB);
    (void)alloc_on(1, 7);
    (void)alloc_on(1, 3);
    RESERVED(64 * MIB);
}

/* ---- coalescing --------------------------------------------------------------------------------- */

/* Three neighbours and the rest of a small segment: [a][b][c][rest]. */
static void three(uint32_t *a, uint32_t *b, uint32_t *c)
{
    *a = alloc(100 * KIB);
    *b = alloc(200 * KIB);
    *c = alloc(300 * KIB);
    assert_int_equal(address(*c), address(*a) + 300 * KIB);
}

static void coalesce_none(void **state)
{
    uint32_t a, b, c;

    (void)state;
    three(&a, &b, &c);
    release(b);
    assert_int_equal(size(b), 200 * KIB);
    assert_int_equal(pools.blocks.used_count, 4);
    INACTIVE(2 * MIB - 400 * KIB);
}

static void coalesce_left(void **state)
{
    uint32_t a, b, c;
    uint64_t start;

    (void)state;
    three(&a, &b, &c);
    start = address(a);
    release(a);
    release(b);
    assert_int_equal(pools.blocks.used_count, 3);
    assert_int_equal(address(alloc(300 * KIB)), start);
    RESERVED(2 * MIB);
}

static void coalesce_right(void **state)
{
    uint32_t a, b, c;
    uint64_t start;

    (void)state;
    three(&a, &b, &c);
    start = address(a);
    release(b);
    release(a);
    assert_int_equal(pools.blocks.used_count, 3);
    assert_int_equal(address(alloc(300 * KIB)), start);
}

static void coalesce_left_and_right(void **state)
{
    uint32_t a, b, c;

    (void)state;
    three(&a, &b, &c);
    release(a);
    release(c); /* merges with the rest */
    assert_int_equal(pools.blocks.used_count, 3);
    release(b);
    assert_int_equal(pools.blocks.used_count, 1);
    INACTIVE(0); /* a whole segment is not split */
    RESERVED(2 * MIB);
    empty_cache();
    RESERVED(0);
    assert_int_equal(STAT(segment_now_count), 0);
    assert_int_equal(STAT(segment_peak_count), 1);
    assert_int_equal(STAT(device_free_count), 1);
}

/* ---- the limit ---------------------------------------------------------------------------------- */

static void retry_releases_the_cache(void **state)
{
    uint32_t a;

    (void)state;
    pools.options.capacity_bytes = 40 * MIB;
    a = alloc(20 * MIB);
    release(a);
    (void)alloc(30 * MIB);
    RESERVED(30 * MIB);
    assert_int_equal(STAT(alloc_retry_count), 1);
    assert_int_equal(STAT(device_alloc_count), 2);
    assert_int_equal(STAT(device_free_count), 1);
    assert_int_equal(STAT(oom_count), 0);
    assert_int_equal(STAT(reserved_peak_bytes), 30 * MIB);
}

static void capacity_is_inclusive(void **state)
{
    (void)state;
    pools.options.capacity_bytes = 20 * MIB;
    (void)alloc(20 * MIB);
    assert_int_equal(STAT(alloc_retry_count), 0);
    alloc_fails(1);
    assert_int_equal(STAT(oom_count), 1);
}

static void split_segments_stay(void **state)
{
    uint32_t a, b, c;

    (void)state;
    pools.options.capacity_bytes = 70 * MIB;
    a = alloc(5 * MIB);
    b = alloc(5 * MIB); /* same 20 MiB segment */
    c = alloc(40 * MIB);
    release(a);
    release(c);
    alloc_fails(60 * MIB);
    RESERVED(20 * MIB); /* the free 40 MiB went back, the split 20 MiB could not */
    ALLOCATED(5 * MIB);
    assert_int_equal(STAT(oom_count), 1);
    assert_int_equal(STAT(alloc_retry_count), 1);
    assert_int_equal(STAT(requested_now_bytes), 5 * MIB);
    release(b);
    (void)alloc(60 * MIB);
    RESERVED(60 * MIB);
}

static void absurd_request(void **state)
{
    (void)state;
    alloc_fails(UINT64_MAX);
    alloc_fails(MSC__SIM_MOST_BYTES);
    assert_int_equal(STAT(oom_count), 2);
    pools.options.expandable_segments = 1;
    alloc_fails(UINT64_MAX);
    RESERVED(0);
}

static void addresses_start_anew(void **state)
{
    uint32_t i;

    (void)state;
    for (i = 0; i < 40; i++) { /* 40 * 2^58 would not fit in 64 bits */
        uint32_t a = alloc(UINT64_C(1) << 58);
        release(a);
        empty_cache();
    }
    assert_int_equal(STAT(device_free_count), 40);
}

/* ---- oversize blocks ---------------------------------------------------------------------------- */

static void small_requests_leave_oversize_blocks(void **state)
{
    uint32_t a;

    (void)state;
    pools.options.max_split_bytes = 30 * MIB;
    a = alloc(40 * MIB);
    release(a);
    (void)alloc(5 * MIB);
    RESERVED(60 * MIB);
    a = alloc(28 * MIB); /* below the limit: not from 40 */
    RESERVED(88 * MIB);
    release(a);
    (void)alloc(5 * MIB);  /* from the first 20 MiB */
    (void)alloc(20 * MIB); /* 28 MiB may be split */
    RESERVED(88 * MIB);
    INACTIVE(10 * MIB + 8 * MIB);
}

/* "Oversize" includes the limit itself, for the block and for the request. */
static void limit_itself_is_oversize(void **state)
{
    uint32_t a;

    (void)state;
    pools.options.max_split_bytes = 40 * MIB;
    a = alloc(40 * MIB);
    release(a);
    (void)alloc(38 * MIB);
    RESERVED(78 * MIB);
    a = alloc(40 * MIB);
    RESERVED(78 * MIB);
    assert_int_equal(size(a), 40 * MIB);
}

static void oversize_blocks_are_not_split(void **state)
{
    uint32_t a;

    (void)state;
    pools.options.max_split_bytes = 30 * MIB;
    a = alloc(48 * MIB);
    release(a);
    a = alloc(30 * MIB); /* 48 < 30 + 20: taken whole */
    assert_int_equal(size(a), 48 * MIB);
    RESERVED(48 * MIB);
    INACTIVE(0);
}

static void oversize_rounding_is_bounded(void **state)
{
    uint32_t a;

    (void)state;
    pools.options.max_split_bytes = 30 * MIB;
    a = alloc(50 * MIB);
    release(a);
    a = alloc(30 * MIB); /* 50 >= 30 + 20: refused */
    assert_int_equal(size(a), 30 * MIB);
    RESERVED(80 * MIB);
    release(a);
    empty_cache();
    a = alloc(50 * MIB);
    release(a);
    pools.options.max_non_split_rounding_bytes = 21 * MIB;
    a = alloc(30 * MIB);
    assert_int_equal(size(a), 50 * MIB);
}

static void one_oversize_block_is_released(void **state)
{
    uint32_t a, b;

    (void)state;
    pools.options.max_split_bytes = 30 * MIB;
    pools.options.capacity_bytes = 130 * MIB;
    a = alloc(60 * MIB);
    b = alloc(62 * MIB);
    release(a);
    release(b);
    (void)alloc(34 * MIB); /* 60 >= 34 + 20: refused; the smallest that is large enough goes */
    RESERVED(62 * MIB + 34 * MIB);
    assert_int_equal(STAT(alloc_retry_count), 0);
    assert_int_equal(STAT(device_free_count), 1);
}

static void several_oversize_blocks_are_released(void **state)
{
    uint32_t a, b, c;

    (void)state;
    pools.options.max_split_bytes = 30 * MIB;
    pools.options.capacity_bytes = 130 * MIB;
    a = alloc(32 * MIB);
    b = alloc(34 * MIB);
    c = alloc(40 * MIB);
    (void)alloc(20 * MIB);
    release(a);
    release(b);
    release(c);
    (void)alloc(60 * MIB); /* 40, then 34: 74 are enough, 32 stays */
    RESERVED(32 * MIB + 20 * MIB + 60 * MIB);
    assert_int_equal(STAT(alloc_retry_count), 0);
    assert_int_equal(STAT(device_free_count), 2);
}

/* 34 and the 32 that is just oversize make 66 exactly: neither more nor fewer go. */
static void just_enough_oversize_blocks(void **state)
{
    uint32_t a, b, c;

    (void)state;
    pools.options.max_split_bytes = 32 * MIB;
    pools.options.capacity_bytes = 110 * MIB;
    a = alloc(32 * MIB);
    b = alloc(34 * MIB);
    c = alloc(32 * MIB);
    release(a);
    release(b);
    release(c);
    (void)alloc(66 * MIB);
    RESERVED(98 * MIB);
    assert_int_equal(STAT(alloc_retry_count), 0);
    assert_int_equal(STAT(device_free_count), 2);
}

static void too_few_oversize_blocks(void **state)
{
    uint32_t a, b;

    (void)state;
    pools.options.max_split_bytes = 30 * MIB;
    pools.options.capacity_bytes = 100 * MIB;
    a = alloc(32 * MIB);
    b = alloc(20 * MIB);
    (void)alloc(20 * MIB);
    release(a);
    release(b);
    (void)alloc(80 * MIB); /* 32 is not enough; the retry gives back the 20 too */
    RESERVED(100 * MIB);
    assert_int_equal(STAT(alloc_retry_count), 1);
    assert_int_equal(STAT(device_free_count), 2);
}

#define CASE(name, function)                                                                                 \
    {                                                                                                        \
        name, function, setup, teardown, NULL                                                                \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE("round/granule", round_granule),
        CASE("round/power2-divisions", round_divisions),
        CASE("round/divisions-in-a-request", divisions_in_a_request),
        CASE("segment/sizes", segment_sizes),
        CASE("segment/small", small_segment),
        CASE("segment/large", large_segment),
        CASE("segment/pools-do-not-mix", pools_do_not_mix),
        CASE("split/small-to-the-granule", small_pool_splits_to_the_granule),
        CASE("split/large-above-one-mib", large_pool_splits_above_one_mib),
        CASE("fit/smallest", best_fit_is_the_smallest),
        CASE("fit/ties-go-to-the-lowest-address", ties_go_to_the_lowest_address),
        CASE("fit/streams-are-separate", streams_are_separate),
        CASE("coalesce/none", coalesce_none),
        CASE("coalesce/left", coalesce_left),
        CASE("coalesce/right", coalesce_right),
        CASE("coalesce/left-and-right", coalesce_left_and_right),
        CASE("limit/retry-releases-the-cache", retry_releases_the_cache),
        CASE("limit/inclusive", capacity_is_inclusive),
        CASE("limit/split-segments-stay", split_segments_stay),
        CASE("limit/absurd-request", absurd_request),
        CASE("limit/addresses-start-anew", addresses_start_anew),
        CASE("oversize/small-requests-leave-them", small_requests_leave_oversize_blocks),
        CASE("oversize/limit-itself", limit_itself_is_oversize),
        CASE("oversize/not-split", oversize_blocks_are_not_split),
        CASE("oversize/rounding-is-bounded", oversize_rounding_is_bounded),
        CASE("oversize/one-is-released", one_oversize_block_is_released),
        CASE("oversize/several-are-released", several_oversize_blocks_are_released),
        CASE("oversize/just-enough", just_enough_oversize_blocks),
        CASE("oversize/too-few", too_few_oversize_blocks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
