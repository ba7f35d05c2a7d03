/* SPDX-License-Identifier: Apache-2.0 */
/* In a process that has PyTorch's library, its threads read large tensors, with the same value. */
#include "fingerprint_fixture.h"

#include "team_library.h"

#define BYTES (19u << 20)

static unsigned char *data;

/* Of the first `bytes`, by so many threads. `asked` gets how often the team was. */
static uint64_t of_bytes(int64_t bytes, uint32_t one_in, uint32_t threads, unsigned *asked)
{
    msc_fingerprint_tensor tensor = {data, 1, 1, &bytes, NULL};
    unsigned before = team_calls();
    uint64_t value = 0;

    assert_int_equal(msc_fingerprint(&tensor, one_in, threads, &value, NULL), MSC_OK);
    *asked = team_calls() - before;
    return value;
}

static void a_team_reads(void **state)
{
    static const uint32_t threads[] = {0, 2, 3, 5, 16};
    uint64_t wanted = msc_fingerprint_bytes(data, BYTES);
    unsigned asked;
    size_t i;

    (void)state;
    for (i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        assert_int_equal(of_bytes(BYTES, 1, threads[i], &asked), wanted);
        assert_int_equal(asked, 1);
    }
    team_limit(1); /* as inside of a parallel region */
    assert_int_equal(of_bytes(BYTES, 1, 3, &asked), wanted);
    assert_int_equal(asked, 1);
    team_limit(16);
}

static void nobody_is_asked_for_little(void **state)
{
    unsigned asked;

    (void)state;
    (void)of_bytes(BYTES, 1, 1, &asked);
    assert_int_equal(asked, 0);
    (void)of_bytes(7 << 20, 1, 4, &asked);
    assert_int_equal(asked, 0);
    (void)of_bytes(BYTES, 16, 4, &asked); /* reads 1.2 MiB */
    assert_int_equal(asked, 0);
}

/* Rows with gaps, which are gathered on the way, and samples of them. */
static void rows_and_samples(void **state)
{
    static const int64_t sizes[] = {19000, 1000}, strides[] = {1024, 1};
    msc_fingerprint_tensor tensor = {data, 1, 2, sizes, strides};
    uint32_t one_in;

    (void)state;
    for (one_in = 1; one_in <= 2; one_in++) {
        unsigned before = team_calls();
        uint64_t alone, together;

        assert_int_equal(msc_fingerprint(&tensor, one_in, 1, &alone, NULL), MSC_OK);
        assert_int_equal(msc_fingerprint(&tensor, one_in, 3, &together, NULL), MSC_OK);
        assert_int_equal(alone, together);
        assert_int_equal(team_calls() - before, 1);
    }
}

static int begin(void **state)
{
    (void)state;
    data = malloc(BYTES);
    if (data != NULL)
        fixture_fill(data, BYTES, 3);
    return data == NULL;
}

static int finish(void **state)
{
    (void)state;
    free(data);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_team_reads),
        cmocka_unit_test(nobody_is_asked_for_little),
        cmocka_unit_test(rows_and_samples),
    };

    return cmocka_run_group_tests_name("fingerprint_team", tests, begin, finish);
}
