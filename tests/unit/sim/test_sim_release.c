/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What goes back to the device and when: awaited frees, garbage, private pools, captures; and the segment
 * events and the map that show it. Numbers worked out by hand from PyTorch's source.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "memscale/sim.h"
#include "oom/failing_alloc.h"

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

static void make(uint64_t capacity_mib, const char *conf)
{
    msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);

    options.capacity_bytes = capacity_mib == 0 ? UINT64_MAX : capacity_mib * MIB;
    options.record_segments = 1;
    assert_int_equal(msc_sim_options_parse(conf, options.capacity_bytes, &options, &err), MSC_OK);
    assert_int_equal(msc_sim_create(ctx, &options, &sim, &err), MSC_OK);
}

static void check(void)
{
    if (msc_sim_validate(sim, &err) != MSC_OK)
        fail_msg("%s", err.message);
}

static void alloc_in(uint32_t id, uint64_t mib, uint32_t stream, uint32_t pool)
{
    const msc_sim_place place = {stream, pool};

    assert_int_equal(msc_sim_alloc_in(sim, id, mib * MIB, &place, &err), MSC_OK);
    check();
}

static void alloc(uint32_t id, uint64_t mib)
{
    alloc_in(id, mib, 0, 0);
}

static void alloc_fails(uint32_t id, uint64_t mib)
{
    assert_int_equal(msc_sim_alloc(sim, id, mib * MIB, 0, &err), MSC_EDEVMEM);
    check();
}

static void release(uint32_t id)
{
    assert_int_equal(msc_sim_free(sim, id, &err), MSC_OK);
    check();
}

static void request(uint32_t id)
{
    assert_int_equal(msc_sim_free_request(sim, id, &err), MSC_OK);
    check();
}

static void complete(uint32_t id)
{
    assert_int_equal(msc_sim_free_complete(sim, id, &err), MSC_OK);
    check();
}

static void empty_cache(void)
{
    msc_sim_empty_cache(sim);
    check();
}

static msc_sim_memory_stats stats(void)
{
    msc_sim_memory_stats out;

    msc_sim_get_memory_stats(sim, &out);
    return out;
}

#define ALL(field) (stats().field[MSC_SIM_STAT_ALL])
#define RESERVED(mib) assert_int_equal(ALL(reserved_bytes).current, (mib)*MIB)

static void expect_event(uint64_t i, msc_sim_segment_kind kind, uint64_t mib, uint32_t stream)
{
    uint64_t count = 0;
    const msc_sim_segment_event *events = msc_sim_segment_events(sim, &count);

    assert_true(i < count);
    assert_int_equal(events[i].kind, kind);
    assert_int_equal(events[i].size_bytes, mib * MIB);
    assert_int_equal(events[i].stream, stream);
}

/* ---- awaited frees ------------------------------------------------------------------------------- */

static void awaited_block_stays_active(void **state)
{
    (void)state;
    make(0, "");
    alloc(0, 30);
    request(0);
    assert_int_equal(ALL(allocated_bytes).current, 0);
    assert_int_equal(ALL(allocation).current, 0);
    assert_int_equal(ALL(active_bytes).current, 30 * MIB);
    assert_int_equal(ALL(active).current, 1);
    assert_int_equal(ALL(requested_bytes).current, 30 * MIB);
    alloc(1, 30); /* the awaited block cannot be taken */
    RESERVED(60);
    complete(0);
    assert_int_equal(ALL(active_bytes).current, 30 * MIB);
    alloc(0, 30);
    RESERVED(60);
}

/* An awaited neighbour does not merge: [ 0 ][ awaited ][ 2 ] and both others freed are three blocks. */
static void awaited_block_does_not_merge(void **state)
{
    msc_sim_map *map = NULL;
    uint32_t count = 0;

    (void)state;
    make(0, "");
    alloc(0, 6);
    alloc(1, 6);
    alloc(2, 6);
    request(1);
    release(0);
    release(2);
    assert_int_equal(ALL(inactive_split).current, 2);
    assert_int_equal(msc_sim_map_create(sim, &map, &err), MSC_OK);
    assert_int_equal(msc_sim_map_blocks(map, &count)[1].state, MSC_SIM_BLOCK_AWAITING);
    assert_int_equal(count, 3);
    msc_sim_map_destroy(map);
    complete(1);
    assert_int_equal(ALL(inactive_split).current, 0);
    empty_cache();
    RESERVED(0);
}

/* A retry waits for all streams; the id stays taken until the caller has completed it, too. */
static void retry_waits(void **state)
{
    (void)state;
    make(50, "");
    alloc(0, 30);
    request(0);
    alloc(1, 40);
    RESERVED(40);
    assert_int_equal(stats().num_sync_all_streams, 1);
    assert_int_equal(stats().num_alloc_retries, 1);
    assert_int_equal(msc_sim_alloc(sim, 0, 1, 0, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_free(sim, 0, &err), MSC_EINVAL);
    complete(0);
    assert_int_equal(msc_sim_free_complete(sim, 0, &err), MSC_EINVAL);
    alloc(0, 1);
}

static void awaited_misuse(void **state)
{
    (void)state;
    make(0, "");
    assert_int_equal(msc_sim_free_request(sim, 0, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_free_complete(sim, 0, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_alloc(sim, 0, 0, 0, &err), MSC_OK); /* zero bytes */
    assert_int_equal(msc_sim_free_complete(sim, 0, &err), MSC_EINVAL);
    request(0);
    assert_int_equal(msc_sim_free_request(sim, 0, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "awaits its completion"));
    complete(0);
}

static void awaited_on_the_host(void **state)
{
    const msc_sim_options options = msc_sim_options_default(MSC_SIM_HOST);

    (void)state;
    assert_int_equal(msc_sim_create(ctx, &options, &sim, &err), MSC_OK);
    assert_int_equal(msc_sim_alloc(sim, 0, 1000, 0, &err), MSC_OK);
    request(0);
    assert_int_equal(msc_sim_get_stats(sim).reserved_now_bytes, 0);
    assert_int_equal(msc_sim_alloc(sim, 0, 1, 0, &err), MSC_EINVAL);
    complete(0);
    assert_int_equal(msc_sim_alloc(sim, 0, 1, 0, &err), MSC_OK);
}

/* A list that cannot grow leaves the id allocated. */
static void request_without_memory(void **state)
{
    static failing_alloc heap;
    const msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);
    msc_context *small_ctx;

    (void)state;
    failing_alloc_init(&heap, FAILING_ALLOC_NEVER);
    small_ctx = failing_alloc_context(&heap);
    assert_int_equal(msc_sim_create(small_ctx, &options, &sim, &err), MSC_OK);
    alloc(0, 1);
    heap.fail_at = heap.request_count;
    assert_int_equal(msc_sim_free_request(sim, 0, &err), MSC_ENOMEM);
    check();
    assert_int_equal(ALL(allocation).current, 1);
    request(0);
    complete(0);
    msc_sim_destroy(sim);
    sim = NULL;
    msc_context_destroy(small_ctx);
    assert_true(failing_alloc_is_clean(&heap));
}

/* ---- fraction and garbage ------------------------------------------------------------------------ */

static void fraction_is_held(void **state)
{
    (void)state;
    make(100, "per_process_memory_fraction:0.5");
    alloc(0, 30);
    alloc_fails(1, 21); /* 22 as a segment */
    assert_non_null(strstr(err.message, "memory fraction of 52428800"));
    alloc(1, 20);
    RESERVED(50);
    assert_int_equal(stats().num_ooms, 1);
    assert_int_equal(stats().num_alloc_retries, 1);
}

/* The size of a segment is held against the fraction, though the pages of a request are fewer or more. */
static void fraction_and_pages(void **state)
{
    (void)state;
    make(100, "per_process_memory_fraction:0.5,expandable_segments:True");
    alloc(0, 30); /* two pages */
    RESERVED(40);
    alloc(1, 10); /* fits the pages, asks nobody */
    alloc(2, 10); /* 40 + 10 is allowed, a page of 20 is mapped */
    RESERVED(60);
    alloc_fails(3, 11);
}

/*
 * Limit 60. When 30 are asked for, 72 are reserved, and the free blocks of 20 and 24 have waited for 2
 * searches and 1: the first reaches the mean of 1.5 and goes, which is enough.
 */
static void garbage_goes_by_age(void **state)
{
    (void)state;
    make(200, "per_process_memory_fraction:0.5,garbage_collection_threshold:0.6");
    alloc(0, 20);
    alloc(1, 24);
    alloc(2, 28);
    release(0);
    release(1);
    alloc(1, 24);
    release(1);
    RESERVED(72);
    alloc(3, 30);
    expect_event(3, MSC_SIM_SEGMENT_FREE, 20, 0);
    expect_event(4, MSC_SIM_SEGMENT_ALLOC, 30, 0);
    RESERVED(82);
}

static void garbage_stays_without_fraction(void **state)
{
    (void)state;
    make(200, "garbage_collection_threshold:0.1");
    alloc(0, 30);
    release(0);
    alloc(1, 40);
    RESERVED(70);
}

/* ---- pools and captures -------------------------------------------------------------------------- */

static void private_pools_are_separate(void **state)
{
    (void)state;
    make(0, "");
    alloc_in(0, 30, 0, 1);
    release(0);
    alloc(1, 30); /* not from pool 1 */
    RESERVED(60);
    release(1);
    empty_cache(); /* pool 1 is in use */
    RESERVED(30);
    assert_int_equal(msc_sim_release_pool(sim, 0, &err), MSC_EINVAL);
    assert_int_equal(msc_sim_release_pool(sim, 1, &err), MSC_OK);
    alloc_in(0, 30, 3, 1); /* takes it back into use, with a stream of its own */
    release(0);
    empty_cache();
    RESERVED(60);
    assert_int_equal(msc_sim_release_pool(sim, 1, &err), MSC_OK);
    empty_cache();
    RESERVED(0);
}

static void capture_does_not_retry(void **state)
{
    (void)state;
    make(50, "");
    alloc(0, 30);
    release(0);
    msc_sim_set_capturing(sim, 1);
    alloc_fails(1, 40);
    assert_int_equal(stats().num_alloc_retries, 0);
    assert_int_equal(stats().num_ooms, 1);
    empty_cache();
    assert_int_equal(stats().num_sync_all_streams, 0);
    RESERVED(30);
    msc_sim_set_capturing(sim, 0);
    alloc(1, 40);
    RESERVED(40);
}

/* ---- events, map, places -------------------------------------------------------------------------- */

/* Large before small, streams ascending, sizes ascending; private pools last, small before large. */
static void release_order(void **state)
{
    static const uint64_t sizes[] = {30, 20, 40, 2, 2, 2, 24};
    static const uint32_t streams[] = {2, 9, 9, 2, 9, 4, 4};
    uint64_t count = 0;
    uint32_t i;

    (void)state;
    make(0, "");
    alloc_in(0, 24, 4, 1);
    alloc_in(1, 1, 4, 1);
    alloc_in(2, 40, 9, 0);
    alloc_in(3, 20, 9, 0);
    alloc_in(4, 30, 2, 0);
    alloc_in(5, 1, 9, 0);
    alloc_in(6, 1, 2, 0);
    for (i = 0; i < 7; i++)
        release(i);
    assert_int_equal(msc_sim_release_pool(sim, 1, &err), MSC_OK);
    empty_cache();
    (void)msc_sim_segment_events(sim, &count);
    assert_int_equal(count, 14);
    for (i = 0; i < 7; i++)
        expect_event(7 + i, MSC_SIM_SEGMENT_FREE, sizes[i], streams[i]);
    assert_int_equal(msc_sim_segment_events(sim, &count)[13].call, 14); /* 7 allocs, 7 frees before it */
}

static void map_and_unmap(void **state)
{
    (void)state;
    make(0, "expandable_segments:True");
    alloc(0, 30);
    alloc(1, 30);
    release(0);
    empty_cache();
    expect_event(0, MSC_SIM_SEGMENT_MAP, 40, 0);
    expect_event(1, MSC_SIM_SEGMENT_MAP, 20, 0);
    expect_event(2, MSC_SIM_SEGMENT_UNMAP, 20, 0);
}

/* Equal blocks: the one at the lower address goes first, which is the one obtained last here. */
static void placed_segments_break_ties(void **state)
{
    msc_sim_map *map = NULL;
    const msc_sim_segment *segments;
    uint32_t count = 0;

    (void)state;
    make(0, "");
    assert_int_equal(msc_sim_place_next_segment(sim, 900 * MIB, &err), MSC_OK);
    alloc(0, 20);
    assert_int_equal(msc_sim_place_next_segment(sim, 300 * MIB, &err), MSC_OK);
    alloc(1, 20);
    release(0);
    release(1);
    alloc(2, 20);
    assert_int_equal(msc_sim_map_create(sim, &map, &err), MSC_OK);
    segments = msc_sim_map_segments(map, &count);
    assert_int_equal(count, 2);
    assert_int_equal(segments[0].address, 300 * MIB);
    assert_int_equal(segments[0].allocated_bytes, 20 * MIB);
    assert_int_equal(segments[1].address, 900 * MIB);
    assert_int_equal(segments[1].allocated_bytes, 0);
    assert_int_equal(msc_sim_map_blocks(map, &count)[0].id, 2);
    msc_sim_map_destroy(map);
    alloc(3, 20);
    alloc(4, 20); /* below the lowest */
    assert_int_equal(msc_sim_segment_events(sim, &(uint64_t){0})[2].address, 280 * MIB);
    assert_int_equal(msc_sim_place_next_segment(sim, 100, &err), MSC_EINVAL);
}

/* Pages begin at the first address, wherever that is: 7 MiB off a multiple of 20 here. */
static void placed_pages(void **state)
{
    (void)state;
    make(0, "expandable_segments:True");
    assert_int_equal(msc_sim_place_next_segment(sim, 407 * MIB, &err), MSC_OK);
    alloc(0, 5);
    alloc(1, 30);
    alloc(2, 5);
    release(1);
    empty_cache();
    expect_event(0, MSC_SIM_SEGMENT_MAP, 20, 0);
    expect_event(1, MSC_SIM_SEGMENT_MAP, 20, 0);
    release(0);
    empty_cache();
    expect_event(2, MSC_SIM_SEGMENT_UNMAP, 20, 0);
    assert_int_equal(msc_sim_segment_events(sim, &(uint64_t){0})[2].address, 407 * MIB);
}

/* Two segments at one address are the caller's mistake, but nothing may break. */
static void same_address_twice(void **state)
{
    (void)state;
    make(0, "");
    assert_int_equal(msc_sim_place_next_segment(sim, 900 * MIB, &err), MSC_OK);
    alloc(0, 20);
    assert_int_equal(msc_sim_place_next_segment(sim, 900 * MIB, &err), MSC_OK);
    alloc(1, 20);
    release(1);
    release(0);
    empty_cache();
    RESERVED(0);
}

/* ---- figures -------------------------------------------------------------------------------------- */

static void oversize_is_counted(void **state)
{
    (void)state;
    make(0, "max_split_size_mb:20");
    alloc(0, 20);
    alloc(1, 19); /* gets a segment of 20, whose rest is too small to split off */
    alloc(2, 18);
    assert_int_equal(stats().oversize_allocations.current, 2);
    assert_int_equal(stats().oversize_segments.current, 2);
    release(0);
    empty_cache();
    assert_int_equal(stats().oversize_allocations.current, 1);
    assert_int_equal(stats().oversize_allocations.freed, 1);
    assert_int_equal(stats().oversize_segments.current, 1);
    assert_int_equal(stats().max_split_size, 20 * MIB);
}

static void sums_start_anew(void **state)
{
    (void)state;
    make(0, "");
    alloc(0, 30);
    alloc(1, 1);
    release(0);
    assert_int_equal(ALL(allocated_bytes).allocated, 31 * MIB);
    assert_int_equal(ALL(allocated_bytes).freed, 30 * MIB);
    assert_int_equal(stats().allocated_bytes[MSC_SIM_STAT_SMALL_POOL].allocated, MIB);
    msc_sim_reset_accumulated(sim);
    msc_sim_reset_peaks(sim);
    assert_int_equal(ALL(allocated_bytes).allocated, 0);
    assert_int_equal(ALL(allocated_bytes).freed, 0);
    assert_int_equal(ALL(allocated_bytes).peak, MIB);
    assert_int_equal(stats().num_device_alloc, 0);
    release(1);
    assert_int_equal(ALL(allocated_bytes).freed, MIB);
    assert_int_equal(ALL(allocated_bytes).current, 0);
}

#define CASE(name, function)                                                                                 \
    {                                                                                                        \
        name, function, setup, teardown, NULL                                                                \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE("awaited/stays-active", awaited_block_stays_active),
        CASE("awaited/does-not-merge", awaited_block_does_not_merge),
        CASE("awaited/retry-waits", retry_waits),
        CASE("awaited/misuse", awaited_misuse),
        CASE("awaited/host", awaited_on_the_host),
        CASE("awaited/no-memory", request_without_memory),
        CASE("fraction/is-held", fraction_is_held),
        CASE("fraction/and-pages", fraction_and_pages),
        CASE("garbage/goes-by-age", garbage_goes_by_age),
        CASE("garbage/stays-without-fraction", garbage_stays_without_fraction),
        CASE("pool/private", private_pools_are_separate),
        CASE("capture/does-not-retry", capture_does_not_retry),
        CASE("events/release-order", release_order),
        CASE("events/map-and-unmap", map_and_unmap),
        CASE("place/breaks-ties", placed_segments_break_ties),
        CASE("place/pages", placed_pages),
        CASE("place/same-address-twice", same_address_twice),
        CASE("stats/oversize", oversize_is_counted),
        CASE("stats/sums-start-anew", sums_start_anew),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
