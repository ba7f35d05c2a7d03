/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of a spool: the checksum's known values, records there and back, and that no flipped bit passes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "record/record_codec.h"

static void checksums_are_the_published_ones(void **state)
{
    uint8_t bytes[32];
    int i;

    (void)state; /* RFC 3720, B.4 */
    memset(bytes, 0, sizeof bytes);
    assert_int_equal(msc__crc32c(0, bytes, sizeof bytes), 0x8a9136aau);
    memset(bytes, 0xff, sizeof bytes);
    assert_int_equal(msc__crc32c(0, bytes, sizeof bytes), 0x62a8ab43u);
    for (i = 0; i < 32; i++)
        bytes[i] = (uint8_t)i;
    assert_int_equal(msc__crc32c(0, bytes, sizeof bytes), 0x46dd794eu);
    assert_int_equal(msc__crc32c(msc__crc32c(0, bytes, 7), bytes + 7, 25), 0x46dd794eu);
    assert_int_equal(msc__crc32c(0, "123456789", 9), 0xe3069283u);
}

static void a_record_comes_back(void **state)
{
    uint8_t bytes[64];
    uint32_t length;

    (void)state;
    for (length = 0; length <= 40; length++) {
        msc__spool_record put = {MSC__SPOOL_EVENT, 7,
                                 (const uint8_t *)"0123456789012345678901234567890123456789", length};
        msc__spool_record got;

        memset(bytes, 0xee, sizeof bytes);
        msc__spool_put(bytes, &put);
        assert_int_equal(msc__spool_get(bytes, sizeof bytes, &got), msc__spool_size(length));
        assert_int_equal(got.kind, MSC__SPOOL_EVENT);
        assert_int_equal(got.batch, 7);
        assert_int_equal(got.payload_bytes, length);
        assert_memory_equal(got.payload, put.payload, length);
        assert_int_equal(msc__spool_get(bytes, msc__spool_size(length) - 1, &got), 0); /* cut off */
    }
}

static void every_flipped_bit_is_found(void **state)
{
    msc__spool_record record = {MSC__SPOOL_DOCUMENT, 3, (const uint8_t *)"\4plan{\"a\":1}", 12};
    uint8_t bytes[32];
    uint32_t size = msc__spool_size(12);
    uint32_t covered = MSC__SPOOL_RECORD_BYTES + 12; /* the rest is zeros that nobody reads */
    uint32_t bit;

    (void)state;
    msc__spool_put(bytes, &record);
    assert_int_equal(msc__spool_get(bytes, size, &record), size);
    for (bit = 0; bit < covered * 8; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(msc__spool_get(bytes, size, &record), 0);
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

static void a_row_comes_back(void **state)
{
    const msc_record_value values[] = {{"loss", NULL, -0.125}, {"memory/peak", "bytes", 9007199254740993.0}};
    uint8_t bytes[128];
    uint32_t count = msc__spool_row_bytes(values, 2);
    msc__spool_row row;
    msc__spool_value value;

    (void)state;
    assert_true(count > 0 && count <= sizeof bytes);
    msc__spool_put_row(bytes, -5, INT64_MAX, values, 2);
    assert_true(msc__spool_row_begin(bytes, count, &row));
    assert_true(row.step == -5 && row.time_ms == INT64_MAX && row.left == 2);
    assert_true(msc__spool_row_next(&row, &value));
    assert_true(value.value == -0.125 && value.name_bytes == 4 && value.unit_bytes == 0);
    assert_memory_equal(value.name, "loss", 4);
    assert_true(msc__spool_row_next(&row, &value));
    assert_memory_equal(value.unit, "bytes", 5);
    assert_false(msc__spool_row_next(&row, &value));
    assert_int_equal(row.left, 0);
    for (; count > 0; count--) { /* cut off anywhere: fewer values, and never one beyond the end */
        if (msc__spool_row_begin(bytes, count - 1, &row))
            while (msc__spool_row_next(&row, &value))
                assert_true((const uint8_t *)value.unit + value.unit_bytes <= bytes + count - 1);
    }
}

static void bad_values_are_no_row(void **state)
{
    static char long_name[MSC_RECORD_NAME_BYTES + 2];
    msc_record_value value = {"", "", 1};

    (void)state;
    memset(long_name, 'n', sizeof long_name - 1);
    assert_int_equal(msc__spool_row_bytes(&value, 1), 0);
    value.name = NULL;
    assert_int_equal(msc__spool_row_bytes(&value, 1), 0);
    value.name = "a\nb";
    assert_int_equal(msc__spool_row_bytes(&value, 1), 0);
    value.name = long_name;
    assert_int_equal(msc__spool_row_bytes(&value, 1), 0);
    value.name = long_name + 1;
    assert_true(msc__spool_row_bytes(&value, 1) > 0);
    value.unit = "a unit of seventeen";
    assert_int_equal(msc__spool_row_bytes(&value, 1), 0);
    value.unit = "";
    assert_int_equal(msc__spool_row_bytes(&value, 0), 0);
    assert_int_equal(msc__spool_row_bytes(&value, MSC_RECORD_ROW_VALUES + 1), 0);
}

static void headers_say_what_they_are(void **state)
{
    uint8_t bytes[MSC__SPOOL_HEADER_BYTES];
    uint32_t level = 0;
    msc_error err;

    (void)state;
    msc__spool_put_header(bytes, 3, 9);
    assert_int_equal(msc__spool_get_header(bytes, sizeof bytes, &level, &err), MSC_OK);
    assert_int_equal(level, 3);
    assert_int_equal(msc__spool_get_header(bytes, sizeof bytes - 1, &level, &err), MSC_EFORMAT);
    bytes[12] ^= 1;
    assert_int_equal(msc__spool_get_header(bytes, sizeof bytes, &level, &err), MSC_EFORMAT);
    bytes[8] = 2;
    assert_int_equal(msc__spool_get_header(bytes, sizeof bytes, &level, &err), MSC_EVERSION);
    bytes[0] = 'X';
    assert_int_equal(msc__spool_get_header(bytes, sizeof bytes, &level, &err), MSC_EFORMAT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checksums_are_the_published_ones),
        cmocka_unit_test(a_record_comes_back),
        cmocka_unit_test(every_flipped_bit_is_found),
        cmocka_unit_test(a_row_comes_back),
        cmocka_unit_test(bad_values_are_no_row),
        cmocka_unit_test(headers_say_what_they_are),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
