/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The codec against what it was given: any points come back with every bit, and bytes that are not a block are refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "samples.h"
#include "store/block.h"

static void check_round_trip(const block_point *points, uint32_t count)
{
    uint8_t packed[BLOCK_BYTES];
    block_point back[BLOCK_POINTS];
    size_t bytes = block_pack(points, count, packed);

    assert_true(bytes <= BLOCK_BYTES);
    assert_true(block_unpack(packed, bytes, count, back));
    if (count > 0)
        assert_memory_equal(points, back, count * sizeof *points);
    assert_false(block_unpack(packed, bytes - 1, count, back));
    if (count > 0)
        assert_false(block_unpack(packed, bytes, count - 1, back));
}

/* Every kind of series that is met, and the corners of each type. */
static block_point random_point(uint64_t *state, unsigned kind, uint32_t i)
{
    static const double corners[] = {0.0, -0.0, 1.0, 9007199254740992.0, -9007199254740992.0, 1e308, -1e-308};
    block_point point = {(int64_t)i, 1700000000000 + 50 * (int64_t)i, 0};

    if (kind == 0) {
        point.value = (double)(sample_random(state) % 1000000000000);
    } else if (kind == 1) {
        point.value = 1.0 / (1.0 + (double)(sample_random(state) % 1000));
    } else if (kind == 2) {
        point.value = corners[sample_random(state) % (sizeof corners / sizeof corners[0])];
    } else {
        uint64_t bits = sample_random(state);

        memcpy(&point.value, &bits, sizeof bits);
        point.step = (int64_t)sample_random(state);
        point.time_ms = (int64_t)sample_random(state);
    }
    return point;
}

static void test_any_points_come_back(void **state)
{
    uint64_t random = 1;
    block_point points[BLOCK_POINTS];

    (void)state;
    for (unsigned round = 0; round < 400; round++) {
        uint32_t count = (uint32_t)(sample_random(&random) % (BLOCK_POINTS + 1));

        for (uint32_t i = 0; i < count; i++)
            points[i] = random_point(&random, round % 4, i);
        check_round_trip(points, count);
    }
}

static void test_even_series_are_small(void **state)
{
    block_point points[BLOCK_POINTS];
    uint8_t packed[BLOCK_BYTES];

    (void)state;
    for (uint32_t i = 0; i < BLOCK_POINTS; i++)
        points[i] = (block_point){i, 1700000000000 + 50 * (int64_t)i, 8589934592.0};
    assert_true(block_pack(points, BLOCK_POINTS, packed) < 4 * BLOCK_POINTS);
}

static void test_broken_bytes_are_refused(void **state)
{
    uint64_t random = 7;
    block_point points[BLOCK_POINTS];
    uint8_t bytes[64] = {0};

    (void)state;
    assert_false(block_unpack(bytes, 0, 0, points));
    for (unsigned round = 0; round < 20000; round++) {
        size_t count = 1 + sample_random(&random) % sizeof bytes;

        for (size_t i = 0; i < count; i++)
            bytes[i] = (uint8_t)sample_random(&random);
        bytes[0] = (uint8_t)(sample_random(&random) % 4);
        (void)block_unpack(bytes, count, (uint32_t)(sample_random(&random) % 600),
                           points); /* the sanitizers look on */
    }
    memcpy(bytes, "\1\x80\0\0\0", 5); /* a varint that is longer than it needs to be */
    assert_false(block_unpack(bytes, 5, 1, points));
}

static void test_summary_leaves_nan_out(void **state)
{
    const block_point points[] = {{5, 10, NAN}, {3, 20, 2}, {9, 15, -4}};
    block_summary summary = block_summary_empty();
    block_summary rest = block_summary_empty();

    (void)state;
    assert_true(isnan(block_summary_mean(&summary)) && isnan(summary.min));
    block_summary_add(&summary, &points[0]);
    assert_true(isnan(summary.min) && isnan(summary.last) && summary.nans == 1);
    block_summary_add(&rest, &points[1]);
    block_summary_add(&rest, &points[2]);
    block_summary_merge(&summary, &rest);
    assert_true(summary.count == 3 && summary.nans == 1 && summary.first_step == 3 && summary.last_step == 9);
    assert_true(summary.min == -4 && summary.max == 2 && summary.last == -4 && summary.last_time_ms == 20);
    assert_true(block_summary_mean(&summary) == -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_points_come_back),
        cmocka_unit_test(test_even_series_are_small),
        cmocka_unit_test(test_broken_bytes_are_refused),
        cmocka_unit_test(test_summary_leaves_nan_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
