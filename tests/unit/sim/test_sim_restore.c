/* SPDX-License-Identifier: Apache-2.0 */
/* A state from outside: counted, valid, and used by what follows as if requests had made it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "sim/sim_pools.h"
#include "sim/sim_restore.h"

#define MIB MSC__SIM_MIB
#define PIECES(array) .block_count = sizeof(array) / sizeof(array)[0], .blocks = (array)

typedef struct fixture {
    msc_context *ctx;
    msc_sim *sim;
    msc_error err;
} fixture;

static void open_sim(fixture *f, int expandable)
{
    msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);

    memset(f, 0, sizeof *f);
    options.expandable_segments = (uint8_t)expandable;
    options.record_segments = 1;
    assert_int_equal(msc_context_create(NULL, &f->ctx, NULL), MSC_OK);
    assert_int_equal(msc_sim_create(f->ctx, &options, &f->sim, NULL), MSC_OK);
}

static void close_sim(fixture *f)
{
    msc_sim_destroy(f->sim);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
}

static void restore(fixture *f, const msc__sim_restored_segment *segment)
{
    if (msc__sim_restore(f->sim, segment, &f->err) != MSC_OK || msc_sim_validate(f->sim, &f->err) != MSC_OK)
        fail_msg("%s", f->err.message);
}

static uint64_t event_count(const fixture *f)
{
    uint64_t count;

    (void)msc_sim_segment_events(f->sim, &count);
    return count;
}

static void test_fixed_segment(void **state)
{
    static const msc__sim_restored_block pieces[] = {
        {2 * MIB, 2 * MIB - 5, 3, MSC__SIM_ALLOCATED},
        {8 * MIB, 0, MSC_NONE, MSC__SIM_FREE},
        {4 * MIB, 4 * MIB, 0, MSC__SIM_AWAITING},
        {6 * MIB, 0, MSC_NONE, MSC__SIM_FREE},
    };
    const msc__sim_restored_segment segment = {
        .address = 64 * MIB, .place = {5, 0}, .is_large = 1, PIECES(pieces)};
    msc_sim_memory_stats stats;
    const msc_sim_segment_event *events;
    uint64_t count;
    fixture f;

    (void)state;
    open_sim(&f, 0);
    restore(&f, &segment);
    msc_sim_get_memory_stats(f.sim, &stats);
    assert_true(stats.reserved_bytes[0].current == 20 * MIB && stats.segment[0].current == 1);
    assert_true(stats.allocated_bytes[0].current == 2 * MIB && stats.active_bytes[0].current == 6 * MIB);
    assert_true(stats.inactive_split_bytes[0].current == 14 * MIB && stats.inactive_split[0].current == 2);
    assert_int_equal(event_count(&f), 0);
    /* A request of the same stream takes the best fit, 6 MiB at 78 MiB; no segment is obtained. */
    assert_int_equal(msc_sim_alloc(f.sim, 9, 6 * MIB, 5, &f.err), MSC_OK);
    assert_int_equal(event_count(&f), 0);
    assert_int_equal(msc_sim_free(f.sim, 9, &f.err), MSC_OK);
    assert_int_equal(msc_sim_free(f.sim, 3, &f.err), MSC_OK);
    assert_int_equal(msc_sim_free_complete(f.sim, 0, &f.err), MSC_OK);
    msc_sim_empty_cache(f.sim);
    events = msc_sim_segment_events(f.sim, &count);
    assert_int_equal(count, 1);
    assert_true(events[0].kind == MSC_SIM_SEGMENT_FREE && events[0].address == 64 * MIB);
    assert_int_equal(msc_sim_validate(f.sim, &f.err), MSC_OK);
    close_sim(&f);
}

static void test_expandable_space(void **state)
{
    static const msc__sim_restored_block pieces[] = {
        {20 * MIB, 0, MSC_NONE, MSC__SIM_UNMAPPED},  {15 * MIB, 15 * MIB, 1, MSC__SIM_ALLOCATED},
        {5 * MIB, 0, MSC_NONE, MSC__SIM_FREE},       {40 * MIB, 0, MSC_NONE, MSC__SIM_UNMAPPED},
        {20 * MIB, 20 * MIB, 2, MSC__SIM_ALLOCATED}, {80 * MIB, 0, MSC_NONE, MSC__SIM_UNMAPPED},
    };
    const msc__sim_restored_segment segment = {
        .address = 2 * MIB, .place = {0, 0}, .is_large = 1, PIECES(pieces)};
    const msc_sim_segment_event *events;
    uint64_t count;
    fixture f;

    (void)state;
    open_sim(&f, 1);
    restore(&f, &segment);
    assert_true(msc_sim_get_stats(f.sim).reserved_now_bytes == 40 * MIB);
    assert_true(msc_sim_get_stats(f.sim).allocated_now_bytes == 35 * MIB);
    /* The hole is the lowest place that can grow: 5 MiB are there, one page is mapped. */
    assert_int_equal(msc_sim_alloc(f.sim, 3, 25 * MIB, 0, &f.err), MSC_OK);
    events = msc_sim_segment_events(f.sim, &count);
    assert_int_equal(count, 1);
    assert_true(events[0].kind == MSC_SIM_SEGMENT_MAP && events[0].address == 42 * MIB);
    assert_true(events[0].size_bytes == 20 * MIB);
    assert_int_equal(msc_sim_validate(f.sim, &f.err), MSC_OK);
    close_sim(&f);
}

static void test_refused(void **state)
{
    static const msc__sim_restored_block odd[] = {{100, 0, MSC_NONE, MSC__SIM_FREE}};
    static const msc__sim_restored_block huge[] = {{UINT64_C(1) << 62, 0, MSC_NONE, MSC__SIM_FREE}};
    static const msc__sim_restored_block twice[] = {{512, 1, 1, MSC__SIM_ALLOCATED},
                                                    {512, 1, 1, MSC__SIM_ALLOCATED}};
    const msc__sim_restored_segment segments[] = {
        {.address = MIB, PIECES(odd)}, {.address = MIB, PIECES(huge)}, {.address = MIB, PIECES(twice)}};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof segments / sizeof segments[0]; i++) {
        fixture f;
        open_sim(&f, 0);
        assert_int_equal(msc__sim_restore(f.sim, &segments[i], &f.err), MSC_EINVAL);
        assert_non_null(strstr(f.err.message, "cannot restore"));
        close_sim(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"restore/fixed-segment", test_fixed_segment, NULL, NULL, NULL},
        {"restore/expandable-space", test_expandable_space, NULL, NULL, NULL},
        {"restore/refused", test_refused, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
