/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Size arithmetic at and around the edge of its range, where a silent wrap would become a small allocation
 * for a large request.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/bytes.h"

static void test_add(void **state)
{
    uint64_t sum = 0;

    (void)state;
    assert_true(msc__add_u64(UINT64_MAX - 1, 1, &sum));
    assert_int_equal(sum, UINT64_MAX);
    assert_true(msc__add_u64(0, UINT64_MAX, &sum));
    assert_int_equal(sum, UINT64_MAX);
    assert_true(msc__add_u64(UINT64_MAX, 0, &sum));
    assert_int_equal(sum, UINT64_MAX);
    assert_false(msc__add_u64(UINT64_MAX, 1, &sum));
    assert_false(msc__add_u64(UINT64_MAX, UINT64_MAX, &sum));
}

static void test_multiply(void **state)
{
    uint64_t product = 1;

    (void)state;
    assert_true(msc__mul_u64(0, UINT64_MAX, &product));
    assert_int_equal(product, 0);
    assert_true(msc__mul_u64(UINT64_MAX, 0, &product));
    assert_int_equal(product, 0);
    assert_true(msc__mul_u64(UINT64_C(1) << 32, (UINT64_C(1) << 32) - 1, &product));
    assert_int_equal(product, UINT64_MAX - UINT32_MAX);
    assert_false(msc__mul_u64(UINT64_C(1) << 32, UINT64_C(1) << 32, &product));
    /* The wrapped product is larger than both factors: comparing with them would not notice. */
    assert_false(msc__mul_u64(UINT64_C(0x123456789), UINT64_C(0x1234567890), &product));
}

static void test_multiply_size(void **state)
{
    size_t product = 1;

    (void)state;
    assert_true(msc__mul_size(0, SIZE_MAX, &product));
    assert_int_equal(product, 0);
    assert_true(msc__mul_size(SIZE_MAX / 16, 16, &product));
    assert_int_equal(product, SIZE_MAX - 15);
    assert_false(msc__mul_size(SIZE_MAX / 16 + 1, 16, &product));
}

static void test_saturate(void **state)
{
    (void)state;
    assert_int_equal(msc__sat_add_u64(2, 3), 5);
    assert_int_equal(msc__sat_add_u64(UINT64_MAX - 1, 1), UINT64_MAX);
    assert_int_equal(msc__sat_add_u64(UINT64_MAX - 1, 9), UINT64_MAX);
    assert_int_equal(msc__sat_sub_u64(5, 3), 2);
    assert_int_equal(msc__sat_sub_u64(3, 3), 0);
    assert_int_equal(msc__sat_sub_u64(3, 5), 0);
}

static void test_round_up(void **state)
{
    (void)state;
    assert_int_equal(msc__round_up_u64(0, 512), 0);
    assert_int_equal(msc__round_up_u64(1, 512), 512);
    assert_int_equal(msc__round_up_u64(512, 512), 512);
    assert_int_equal(msc__round_up_u64(513, 512), 1024);
    assert_int_equal(msc__round_up_u64(7, 1), 7);
}

static void test_round_up_end_of_range(void **state)
{
    uint64_t last = UINT64_MAX - 511; /* the largest multiple of 512 */

    (void)state;
    assert_int_equal(msc__round_up_u64(last, 512), last);
    assert_int_equal(msc__round_up_u64(last - 1, 512), last);
    assert_int_equal(msc__round_up_u64(last + 1, 512), UINT64_MAX);
    assert_int_equal(msc__round_up_u64(UINT64_MAX, 512), UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"add/range", test_add, NULL, NULL, NULL},
        {"multiply/range", test_multiply, NULL, NULL, NULL},
        {"multiply/size", test_multiply_size, NULL, NULL, NULL},
        {"saturate/both-ends", test_saturate, NULL, NULL, NULL},
        {"round-up/units", test_round_up, NULL, NULL, NULL},
        {"round-up/end-of-range", test_round_up_end_of_range, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("base/bytes", tests, NULL, NULL);
}
