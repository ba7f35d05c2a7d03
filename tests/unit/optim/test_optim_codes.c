/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 8-bit codes: every code in every block scale; between two of them; scales; random numbers.
 */
#include "optim_fixture.h"

#include <math.h>

#include "optim/lanes.h"
/* after it */
#include "optim/codes_core.h"
#include "optim/optim_internal.h"

#define ROOT_HALF 0x20000u /* of a random number: half the last place */
#define SIGNED_HALF 0x80000000u

/* One element each. */
static float decode_root(uint32_t code, float value)
{
    const msc__ulanes codes = {code};

    return msc__decode_root(codes, value)[0];
}

static float decode_signed(uint32_t code, float value)
{
    const msc__ulanes codes = {(code ^ 0x80u) - 0x80u};

    return msc__decode_signed(codes, value)[0];
}

static uint32_t encode_root(float root, float inverse, uint32_t random)
{
    const msc__lanes x = {root};
    const msc__ulanes numbers = {random};

    return msc__encode_root(x, inverse, numbers)[0] & 0xFFu;
}

static uint32_t encode_signed(float number, float inverse, uint32_t random)
{
    const msc__lanes x = {number};
    const msc__ulanes numbers = {random};

    return msc__encode_signed(x, inverse, numbers)[0] & 0xFFu;
}

/* What the header promises: a float with 3 bits of exponent, less 1/128. */
static double value_of(uint32_t code, int fraction_bits)
{
    uint32_t exponent = code >> fraction_bits;
    double fraction = (double)(code & ((1u << fraction_bits) - 1u)) / (double)(1u << fraction_bits);

    return ldexp(1.0 + fraction, (int)exponent - 7) - ldexp(1.0, -7);
}

static void every_code_is_itself(void **state)
{
    uint32_t scale, code;

    (void)state;
    for (scale = MSC__SCALE_LEAST; scale <= MSC__SCALE_MOST; scale++) {
        double block = ldexp(1.0, (int)scale - 127);
        float inverse = msc__scale_inverse(scale);
        float value = msc__scale_value(scale);

        assert_true((double)value == block && (double)inverse == 256.0 / block);
        for (code = 0; code < 256; code++) {
            float root = decode_root(code, value);
            float number = decode_signed(code, value);
            uint32_t same = code == 128 ? 0 : code; /* there is one zero */
            double exact = value_of(code & 127u, 4) * block;

            assert_true((double)root == value_of(code, 5) * block);
            assert_true((double)number == (code < 128 ? exact : -exact) &&
                        (signbit(number) != 0) == (same > 128));
            assert_int_equal(encode_root(root, inverse, ROOT_HALF), code);
            assert_int_equal(encode_root(root, inverse, 0), code);
            assert_int_equal(encode_root(root, inverse, UINT32_MAX), code);
            assert_int_equal(encode_signed(number, inverse, 0), same);
            assert_int_equal(encode_signed(number, inverse, UINT32_MAX), same);
        }
    }
}

/* Rises, by steps that the header bounds, up to what it says is the largest. */
static void codes_rise(void **state)
{
    uint32_t code;

    (void)state;
    assert_true(value_of(0, 5) == 0.0 && value_of(255, 5) == 1.9609375 && value_of(127, 4) == 1.9296875);
    for (code = 0; code < 255; code++) {
        double here = value_of(code, 5);
        double step = value_of(code + 1, 5) - here;

        assert_true(step > 0.0 && step <= (here + 1.0 / 128) / 32);
    }
    for (code = 0; code < 127; code++) {
        double here = value_of(code, 4);
        double step = value_of(code + 1, 4) - here;

        assert_true(step > 0.0 && step <= (here + 1.0 / 128) / 16);
    }
}

/* Between two codes: one of them, by the random number; the nearer one for a half. */
static void between_codes(void **state)
{
    const float inverse = msc__scale_inverse(127);
    uint32_t code, k;

    (void)state;
    for (code = 0; code < 127; code++)
        for (k = 1; k < 16; k++) {
            float low = decode_signed(code, 1.0f);
            float high = decode_signed(code + 1, 1.0f);
            float x = low + (high - low) * (float)k / 16.0f;
            uint32_t step, up = 0;

            assert_int_equal(encode_signed(x, inverse, 0), code);
            assert_int_equal(encode_signed(-x, inverse, 0), code | 128u);
            assert_int_equal(encode_signed(x, inverse, UINT32_MAX), code + 1);
            assert_int_equal(encode_signed(x, inverse, SIGNED_HALF), code + (k >= 8));
            for (step = 0; step < 256; step++)
                up += encode_signed(x, inverse, step << 24 | 1u << 23) - code;
            assert_int_equal(up, 16 * k); /* as often as it is near */
        }
}

/* The same for roots, but that what is above 0 is not stored as 0. */
static void between_roots(void **state)
{
    const float inverse = msc__scale_inverse(127);
    uint32_t code, k;

    (void)state;
    for (code = 0; code < 255; code++)
        for (k = 1; k < 16; k++) {
            float low = decode_root(code, 1.0f);
            float high = decode_root(code + 1, 1.0f);
            float x = low + (high - low) * (float)k / 16.0f;
            uint32_t step, up = 0;

            assert_int_equal(encode_root(x, inverse, 0), code > 0 ? code : 1);
            assert_int_equal(encode_root(x, inverse, UINT32_MAX), code + 1);
            assert_int_equal(encode_root(x, inverse, ROOT_HALF), code + (code == 0 || k >= 8));
            for (step = 0; step < 256; step++)
                up += encode_root(x, inverse, step << 10 | 1u << 9) - code;
            assert_int_equal(up, code > 0 ? 16 * k : 256);
        }
}

/* The scale is the smallest that holds the largest of a block. */
static void scales_hold(void **state)
{
    const uint32_t least = MSC__SCALE_LEAST, last = MSC__SCALE_MOST;
    uint64_t seed = 4;
    uint32_t i;

    (void)state;
    for (i = 0; i < 1000000; i++) {
        uint32_t most = fixture_random(&seed) & 0x7FFFFFFFu;
        uint32_t root = msc__scale_of(most, MSC__ROOT_FRACTION);
        uint32_t number = msc__scale_of(most, MSC__SIGNED_FRACTION);
        double x = (double)fixture_from_bits(most);

        assert_true(root >= least && root <= last && number >= least && number <= last);
        if (root > least && root < last)
            assert_true(x <= ldexp(1.9609375, (int)root - 127) && x > ldexp(1.9609375, (int)root - 128));
        if (number > least && number < last)
            assert_true(x <= ldexp(1.9296875, (int)number - 127) && x > ldexp(1.9296875, (int)number - 128));
    }
}

/* 256 cells with 4096 each expected, deviation 64: six of them. */
static void check_even(const uint32_t seen[256])
{
    uint32_t i;

    for (i = 0; i < 256; i++)
        assert_true(seen[i] > 4096 - 384 && seen[i] < 4096 + 384);
}

static void random_numbers_are_even(void **state)
{
    static uint32_t first[256], second[256], master[256], both[256], next_to[256], later[256], differ[32];
    uint32_t step, i;

    (void)state;
    for (step = 1; step <= 64; step++) {
        uint32_t number = msc__random_first(step, 0);
        uint32_t number_later = msc__random_first(step + 1, 0);

        for (i = 0; i < 16384; i++) {
            uint32_t here = msc__random(number + i * MSC__RANDOM_STEP);
            uint32_t next = msc__random(number + (i + 1) * MSC__RANDOM_STEP);
            uint32_t then = msc__random(number_later + i * MSC__RANDOM_STEP);
            uint32_t bit;

            first[here >> 24]++; /* the upper bits of what rounds each */
            second[here >> 10 & 255u]++;
            master[here & 255u]++;
            both[here >> 28 << 4 | (here >> 14 & 15u)]++; /* of one element, of neighbours, of two steps */
            next_to[here >> 28 << 4 | next >> 28]++;
            later[here >> 28 << 4 | then >> 28]++;
            for (bit = 0; bit < 32; bit++)
                differ[bit] += (here ^ next) >> bit & 1u;
        }
    }
    check_even(first);
    check_even(second);
    check_even(master);
    check_even(both);
    check_even(next_to);
    check_even(later);
    for (i = 0; i < 32; i++) /* 2^19 expected, deviation 512 */
        assert_true(differ[i] > (1u << 19) - 3072 && differ[i] < (1u << 19) + 3072);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_is_itself), cmocka_unit_test(codes_rise),
        cmocka_unit_test(between_codes),        cmocka_unit_test(between_roots),
        cmocka_unit_test(scales_hold),          cmocka_unit_test(random_numbers_are_even),
    };

    return cmocka_run_group_tests_name("optim_codes", tests, NULL, NULL);
}
