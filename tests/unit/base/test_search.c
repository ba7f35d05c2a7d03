/* SPDX-License-Identifier: Apache-2.0 */
/* Binary search: every place in lists of every small length, with and without equal keys, for each type of key. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/search.h"

#define MOST 17u

typedef struct record {
    uint8_t small;
    uint32_t number;
    uint64_t large;
    int64_t sign;
} record;

/* The first of them whose number is not below `key`, looked for from the front. */
static uint32_t first_from(const record *records, uint32_t count, uint32_t key)
{
    uint32_t i = 0;

    while (i < count && records[i].number < key)
        i++;
    return i;
}

/* Numbers 1, 3, 5, …, or each of them `repeats` times; the other fields are in the same order. */
static void fill(record *records, uint32_t repeats)
{
    uint32_t i;

    for (i = 0; i < MOST; i++) {
        records[i].number = 1 + 2 * (i / repeats);
        records[i].small = (uint8_t)records[i].number;
        records[i].large = UINT64_MAX - 100 + records[i].number;
        records[i].sign = (int64_t)records[i].number - 20;
    }
}

static void every_place(void **state)
{
    record records[MOST];
    uint32_t repeats, count, key;

    (void)state;
    for (repeats = 1; repeats <= 3; repeats++) {
        fill(records, repeats);
        for (count = 0; count <= MOST; count++) {
            for (key = 0; key <= 2 * MOST + 2; key++) {
                uint32_t wanted = first_from(records, count, key);

                assert_int_equal(MSC__LOWER_BOUND(record, number, records, count, key), wanted);
                assert_int_equal(MSC__LOWER_BOUND(record, small, records, count, (uint8_t)key), wanted);
                assert_int_equal(MSC__LOWER_BOUND(record, large, records, count, UINT64_MAX - 100 + key),
                                 wanted);
                assert_int_equal(MSC__LOWER_BOUND(record, sign, records, count, (int64_t)key - 20), wanted);
            }
        }
    }
}

static void nothing_to_search(void **state)
{
    const record *none = NULL;
    const uint32_t one[] = {7};

    (void)state;
    assert_int_equal(MSC__LOWER_BOUND(record, number, none, 0, 5), 0);
    assert_int_equal(msc__lower_bound_u32(one, 1, sizeof *one, 0, 7), 0);
    assert_int_equal(msc__lower_bound_u32(one, 1, sizeof *one, 0, 8), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_place),
        cmocka_unit_test(nothing_to_search),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
