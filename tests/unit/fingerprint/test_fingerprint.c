/* SPDX-License-Identifier: Apache-2.0 */
/* Samples: which bytes they read, and that they read as little as they say. */
#include "fingerprint_fixture.h"

#define SEGMENT ((uint64_t)MSC_FINGERPRINT_SEGMENT)
#define MOST (300u * SEGMENT)

static unsigned char *data;

static uint64_t of_bytes(uint64_t bytes, uint32_t one_in)
{
    int64_t size = (int64_t)bytes;
    msc_fingerprint_tensor tensor = {data, 1, 1, &size, NULL};
    msc_error err;
    uint64_t value = 0;

    if (msc_fingerprint(&tensor, one_in, 1, &value, &err) != MSC_OK)
        fail_msg("%s", err.message);
    return value;
}

/* Which segments count: a byte of each is changed. */
static uint64_t find_read(uint64_t bytes, uint32_t one_in, unsigned char *is_read)
{
    uint64_t segments = (bytes + SEGMENT - 1) / SEGMENT;
    uint64_t before = of_bytes(bytes, one_in);
    uint64_t read = 0;
    uint64_t i;

    for (i = 0; i < segments; i++) {
        uint64_t at = i * SEGMENT + i * 1009 % (i + 1 < segments ? SEGMENT : bytes - i * SEGMENT);

        data[at] ^= 1;
        is_read[i] = of_bytes(bytes, one_in) != before;
        data[at] ^= 1;
        read += is_read[i];
    }
    return read;
}

static void whole_is_all_bytes(void **state)
{
    static const uint64_t sizes[] = {0, 1, SEGMENT, SEGMENT + 1, 64 * SEGMENT, 64 * SEGMENT + 5, MOST};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        assert_int_equal(of_bytes(sizes[i], 1), msc_fingerprint_bytes(data, sizes[i]));
        assert_int_equal(of_bytes(sizes[i], 1), fixture_fingerprint(data, sizes[i]));
    }
}

static void a_window_is_read_whole(void **state)
{
    static const uint32_t shares[] = {2, 3, 16, 64};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof shares / sizeof shares[0]; i++) {
        uint64_t window = shares[i] * SEGMENT;

        assert_int_equal(of_bytes(window, shares[i]), msc_fingerprint_bytes(data, window));
        assert_int_equal(of_bytes(window - 1, shares[i]), msc_fingerprint_bytes(data, window - 1));
        assert_int_not_equal(of_bytes(window + 1, shares[i]), msc_fingerprint_bytes(data, window + 1));
    }
}

/* One segment of each window, the first and the last of all among them, at more than one place in their windows. */
static void samples_are_spread(void **state)
{
    static const uint32_t shares[] = {2, 7, 16};
    static const uint64_t sizes[] = {17 * SEGMENT, 32 * SEGMENT, 100 * SEGMENT + 9, MOST};
    unsigned char is_read[300];
    size_t i, k;

    (void)state;
    for (i = 0; i < sizeof shares / sizeof shares[0]; i++)
        for (k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
            uint64_t segments = (sizes[k] + SEGMENT - 1) / SEGMENT;
            uint64_t windows = (segments + shares[i] - 1) / shares[i];
            uint64_t places = 0;
            uint64_t w, s;

            assert_int_equal(find_read(sizes[k], shares[i], is_read), windows);
            assert_true(is_read[0] == 1 && is_read[segments - 1] == 1);
            for (w = 0; w < windows; w++) {
                unsigned in_window = 0;

                for (s = w * shares[i]; s < (w + 1) * shares[i] && s < segments; s++)
                    if (is_read[s] != 0) {
                        in_window++;
                        places |= UINT64_C(1) << s % shares[i];
                    }
                assert_int_equal(in_window, 1);
            }
            assert_true((places & (places - 1)) != 0 || windows < 3);
        }
}

/* A sample of the length's own: the rest of the data being equal, lengths differ. */
static void lengths_differ(void **state)
{
    uint64_t bytes = 40 * SEGMENT;

    (void)state;
    memset(data, 0, MOST);
    assert_int_not_equal(of_bytes(bytes, 16), of_bytes(bytes + 1, 16));
    assert_int_not_equal(of_bytes(bytes, 16), of_bytes(bytes, 1));
}

/* The sum of the blocks that are read, and of no others. A value that changes here breaks who kept one. */
static void golden_sample(void **state)
{
    unsigned char is_read[300];
    uint64_t sum = 0;
    uint64_t block;

    (void)state;
    fixture_fill(data, MOST, 11);
    (void)find_read(MOST, MSC_FINGERPRINT_SAMPLE, is_read);
    for (block = 0; block < MOST / 1024; block++)
        if (is_read[block / 4] != 0)
            sum += fixture_block(data, MOST, block * 1024, block);
    assert_int_equal(of_bytes(MOST, MSC_FINGERPRINT_SAMPLE), fixture_end(sum, MOST));
    assert_int_equal(of_bytes(MOST, MSC_FINGERPRINT_SAMPLE), UINT64_C(0x028F69B6A00833A7));
}

static int begin(void **state)
{
    (void)state;
    data = malloc(MOST);
    if (data != NULL)
        fixture_fill(data, MOST, 9);
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
        cmocka_unit_test(whole_is_all_bytes), cmocka_unit_test(a_window_is_read_whole),
        cmocka_unit_test(samples_are_spread), cmocka_unit_test(lengths_differ),
        cmocka_unit_test(golden_sample),
    };

    return cmocka_run_group_tests_name("fingerprint", tests, begin, finish);
}
