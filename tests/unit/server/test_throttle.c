/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The throttle: attempts cost more and more time, nobody is locked out, memory is bounded.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "accounts/throttle.h"

static throttle table;

static void test_delays_grow_and_end(void **state)
{
    int64_t now = 1000000;
    int64_t longest = 0;

    (void)state;
    memset(&table, 0, sizeof table);
    for (int i = 0; i < 5; i++)
        assert_int_equal(throttle_begin(&table, 7, 5, now), 0);
    assert_int_equal(throttle_begin(&table, 7, 5, now), 1000);
    assert_int_equal(throttle_begin(&table, 7, 5, now), 1000); /* one that waits is not counted */
    for (int i = 0; i < 20; i++) {
        int64_t wait = throttle_begin(&table, 7, 5, now);

        longest = wait > longest ? wait : longest;
        now += wait;
        assert_int_equal(throttle_begin(&table, 7, 5, now), 0);
    }
    assert_int_equal(longest, 60000);
    assert_int_equal(throttle_begin(&table, 9, 5, now), 0); /* another key is another one */
    assert_int_equal(throttle_begin(&table, 7, 5, now + 16 * 60 * 1000), 0);
}

static void test_success(void **state)
{
    (void)state;
    memset(&table, 0, sizeof table);
    for (int i = 0; i < 5; i++)
        assert_int_equal(throttle_begin(&table, 7, 5, 1), 0);
    throttle_succeeded(&table, 7, 0);
    assert_int_equal(throttle_begin(&table, 7, 5, 1), 0);
    assert_true(throttle_begin(&table, 7, 5, 1) > 0);
    throttle_succeeded(&table, 7, 1);
    assert_int_equal(throttle_begin(&table, 7, 5, 1), 0);
    throttle_succeeded(&table, 12345, 1); /* nobody */
}

static void test_a_full_set_forgets_the_oldest(void **state)
{
    (void)state;
    memset(&table, 0, sizeof table);
    for (uint64_t i = 1; i <= THROTTLE_WAYS; i++)
        assert_int_equal(throttle_begin(&table, i * THROTTLE_SETS, 1, (int64_t)(100 + i)), 0);
    assert_int_equal(throttle_begin(&table, (THROTTLE_WAYS + 1) * THROTTLE_SETS, 1, 200), 0);
    assert_true(throttle_begin(&table, 2 * THROTTLE_SETS, 1, 200) > 0);
    assert_int_equal(throttle_begin(&table, 1 * THROTTLE_SETS, 1, 200), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_delays_grow_and_end),
        cmocka_unit_test(test_success),
        cmocka_unit_test(test_a_full_set_forgets_the_oldest),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
