/* SPDX-License-Identifier: Apache-2.0 */
/* Expandable segments: mapping, growing, unmapping, with numbers worked out by hand. Sizes in MiB. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "sim/sim_pools.h"

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
    pools.options.expandable_segments = 1;
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

static uint32_t alloc(uint64_t size_bytes)
{
    uint32_t slot = 0;

    assert_int_equal(msc__sim_pools_alloc(&pools, 0, size_bytes, &place, &slot, NULL), MSC_OK);
    check();
    return slot;
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

static void maps_by_the_page(void **state)
{
    (void)state;
    (void)alloc(1);
    RESERVED(2 * MIB);
    (void)alloc(5 * MIB);
    RESERVED(22 * MIB);
    ALLOCATED(5 * MIB + 512);
    assert_int_equal(STAT(segment_now_count), 0); /* PyTorch does not count these */
    assert_int_equal(STAT(inactive_split_now_bytes), 0);
    assert_int_equal(STAT(device_alloc_count), 2);
    assert_int_equal(pools.segment_count, 2);
}

static void page_follows_the_option(void **state)
{
    (void)state;
    pools.options.large_segment_bytes = 12 * MIB;
    (void)alloc(13 * MIB);
    RESERVED(24 * MIB);
}

static void grows_by_the_shortfall(void **state)
{
    uint32_t a, b;

    (void)state;
    a = alloc(5 * MIB);
    b = alloc(18 * MIB); /* 15 are there, 3 are short: one page more */
    RESERVED(40 * MIB);
    assert_int_equal(address(b), address(a) + 5 * MIB);
    assert_int_equal(size(b), 18 * MIB);
    assert_int_equal(pools.segment_count, 1);
    (void)alloc(100 * MIB); /* 17 there, 83 short: five pages */
    RESERVED(140 * MIB);
    assert_int_equal(STAT(device_alloc_count), 3);
}

static void large_pool_splits_to_the_granule(void **state)
{
    uint32_t b;

    (void)state;
    (void)alloc(10 * MIB);
    b = alloc(10 * MIB - 512);
    assert_int_equal(size(b), 10 * MIB - 512);
    RESERVED(20 * MIB);
    assert_int_equal(pools.blocks.used_count, 4); /* two, a granule, the unmapped rest */
}

static void empty_segment_is_given_up(void **state)
{
    uint32_t a, b;

    (void)state;
    a = alloc(5 * MIB);
    b = alloc(18 * MIB);
    release(a);
    empty_cache();
    RESERVED(40 * MIB); /* neither [0, 5) nor [23, 40) holds a whole page */
    assert_int_equal(STAT(device_free_count), 0);
    release(b);
    empty_cache();
    RESERVED(0);
    assert_int_equal(STAT(device_free_count), 1);
    assert_int_equal(pools.segment_count, 0);
    assert_int_equal(pools.blocks.used_count, 0);
    assert_int_equal(STAT(reserved_peak_bytes), 40 * MIB);
}

static void unmaps_whole_pages_inside(void **state)
{
    uint32_t a, b, c, d;

    (void)state;
    a = alloc(5 * MIB);
    b = alloc(50 * MIB);
    c = alloc(5 * MIB);
    RESERVED(60 * MIB);
    release(b); /* [5, 55) is free */
    empty_cache();
    RESERVED(40 * MIB); /* page [20, 40) went; [5, 20) and [40, 55) stay */
    assert_int_equal(pools.blocks.used_count, 6);
    d = alloc(30 * MIB); /* none of 15 fits; the lowest gap grows by 15: the page comes back */
    RESERVED(60 * MIB);
    assert_int_equal(address(d), address(a) + 5 * MIB);
    assert_int_equal(STAT(device_alloc_count), 3);
    release(a);
    release(c);
    release(d);
    empty_cache();
    RESERVED(0);
}

static void fit_prefers_what_cannot_grow(void **state)
{
    uint32_t a, hole, b;

    (void)state;
    a = alloc(2 * MIB);
    hole = alloc(20 * MIB);
    (void)alloc(10 * MIB);
    RESERVED(40 * MIB);
    release(hole);
    b = alloc(4 * MIB); /* the tail of 8 fits better, but it can grow */
    assert_int_equal(address(b), address(a) + 2 * MIB);
}

static void lowest_gap_first(void **state)
{
    uint32_t slots[4];
    uint64_t start;
    uint32_t i;

    (void)state;
    pools.options.capacity_bytes = 80 * MIB; /* 90 rounded to pages: 100 of address space */
    for (i = 0; i < 4; i++)
        slots[i] = alloc(20 * MIB);
    start = address(slots[0]);
    release(slots[0]);
    release(slots[2]);
    empty_cache();
    RESERVED(40 * MIB);
    assert_int_equal(address(alloc(15 * MIB)), start);
    assert_int_equal(address(alloc(15 * MIB)), start + 40 * MIB);
    RESERVED(80 * MIB);
}

static void no_gap_is_large_enough(void **state)
{
    uint32_t slots[4];
    uint32_t i;

    (void)state;
    pools.options.capacity_bytes = 80 * MIB;
    pools.options.device_total_bytes = 80 * MIB;
    for (i = 0; i < 4; i++)
        slots[i] = alloc(20 * MIB);
    assert_int_equal(pools.segment_count, 1);
    release(slots[0]);
    release(slots[2]);
    (void)alloc(40 * MIB); /* retry unmaps two pages; gaps of 20, 20 and 20 do not hold 40 */
    assert_int_equal(pools.segment_count, 2);
    RESERVED(80 * MIB);
    assert_int_equal(STAT(alloc_retry_count), 1);
    assert_int_equal(STAT(oom_count), 0);
}

/* 80 of memory make 90 of address space: 20 are left behind the seventh block, and 30 do not fit. */
static void space_is_nine_eighths(void **state)
{
    uint32_t slots[8];
    uint32_t i;

    (void)state;
    pools.options.capacity_bytes = 80 * MIB;
    pools.options.device_total_bytes = 80 * MIB;
    pools.options.large_segment_bytes = 10 * MIB;
    for (i = 0; i < 8; i++)
        slots[i] = alloc(10 * MIB);
    release(slots[0]);
    release(slots[3]);
    release(slots[7]);
    empty_cache();
    i = alloc(20 * MIB);
    assert_int_equal(address(i), address(slots[6]) + 10 * MIB);
    assert_int_equal(pools.segment_count, 1);
    release(i);
    empty_cache();
    (void)alloc(30 * MIB);
    assert_int_equal(pools.segment_count, 2);
    RESERVED(80 * MIB);
}

static void limit_counts_pages(void **state)
{
    uint32_t slot = 0;

    (void)state;
    pools.options.capacity_bytes = 50 * MIB;
    pools.options.device_total_bytes = 50 * MIB;
    (void)alloc(30 * MIB);
    RESERVED(40 * MIB);
    assert_int_equal(msc__sim_pools_alloc(&pools, 0, 15 * MIB, &place, &slot, NULL), MSC_EDEVMEM);
    check();
    RESERVED(40 * MIB);
    assert_int_equal(STAT(oom_count), 1);
    (void)alloc(10 * MIB);
    RESERVED(40 * MIB);
}

/* Unmapped, free, unmapped, 20 each, then 40 allocated. */
static void make_two_gaps(void)
{
    uint32_t slots[5];
    uint32_t i;

    for (i = 0; i < 5; i++)
        slots[i] = alloc(20 * MIB);
    release(slots[0]);
    release(slots[2]);
    empty_cache();
    release(slots[1]);
    RESERVED(60 * MIB);
    assert_int_equal(STAT(device_alloc_count), 5);
    assert_int_equal(STAT(device_free_count), 2);
}

static void growth_maps_two_gaps(void **state)
{
    (void)state;
    pools.options.capacity_bytes = 100 * MIB;
    pools.options.device_total_bytes = 100 * MIB;
    make_two_gaps();
    (void)alloc(55 * MIB);
    RESERVED(100 * MIB);
    assert_int_equal(STAT(device_alloc_count), 7);
    assert_int_equal(STAT(alloc_retry_count), 0);
    assert_int_equal(pools.segment_count, 1);
}

/* A failed attempt maps the first gap and stops at the second: the retry gives that back too. */
static void failed_growth_is_released(void **state)
{
    uint32_t slot = 0;

    (void)state;
    pools.options.capacity_bytes = 100 * MIB;
    pools.options.device_total_bytes = 100 * MIB;
    make_two_gaps();
    pools.options.capacity_bytes = 80 * MIB;
    assert_int_equal(msc__sim_pools_alloc(&pools, 0, 55 * MIB, &place, &slot, NULL), MSC_EDEVMEM);
    check();
    RESERVED(40 * MIB);
    assert_int_equal(STAT(device_alloc_count), 6);
    assert_int_equal(STAT(device_free_count), 3);
    assert_int_equal(STAT(reserved_peak_bytes), 100 * MIB);
    (void)alloc(40 * MIB);
    RESERVED(80 * MIB);
}

#define MOST_BLOCKS 140u

/* Every second block freed and unmapped leaves two ends, so the table ends up half as full again or more. */
static void release_all(uint32_t count)
{
    uint32_t slots[MOST_BLOCKS];
    msc__array before;
    uint32_t i;

    for (i = 0; i < count; i++)
        assert_int_equal(
            msc__sim_pools_alloc(&pools, 0, (i % 2 == 0 ? 7 : 45) * MIB, &place, &slots[i], NULL), MSC_OK);
    before = pools.blocks.slots;
    for (i = 1; i < count; i += 2)
        msc__sim_pools_free(&pools, slots[i]);
    empty_cache();
    for (i = 0; i < count; i += 2) {
        msc__sim_pools_free(&pools, slots[i]);
        if (i % 6 == 0)
            empty_cache();
    }
    empty_cache();
    assert_ptr_equal(pools.blocks.slots.items, before.items);
    assert_true(pools.blocks.slots.count <= before.capacity);
    RESERVED(0);
}

/* Tables grow by doubling, so among these counts are some that just fit before the releases. */
static void release_needs_no_memory(void **state)
{
    uint32_t count;

    (void)state;
    for (count = 1; count <= MOST_BLOCKS; count++) {
        release_all(count);
        msc__sim_pools_fini(&pools);
        pools.last_place = 0;
    }
}

#define CASE(name, function)                                                                                 \
    {                                                                                                        \
        name, function, setup, teardown, NULL                                                                \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE("map/by-the-page", maps_by_the_page),
        CASE("map/page-follows-the-option", page_follows_the_option),
        CASE("map/by-the-shortfall", grows_by_the_shortfall),
        CASE("map/two-gaps", growth_maps_two_gaps),
        CASE("map/lowest-gap-first", lowest_gap_first),
        CASE("map/no-gap-is-large-enough", no_gap_is_large_enough),
        CASE("map/space-is-nine-eighths", space_is_nine_eighths),
        CASE("split/large-to-the-granule", large_pool_splits_to_the_granule),
        CASE("fit/prefers-what-cannot-grow", fit_prefers_what_cannot_grow),
        CASE("unmap/empty-segment", empty_segment_is_given_up),
        CASE("unmap/whole-pages-inside", unmaps_whole_pages_inside),
        CASE("unmap/needs-no-memory", release_needs_no_memory),
        CASE("limit/counts-pages", limit_counts_pages),
        CASE("limit/failed-growth-is-released", failed_growth_is_released),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
