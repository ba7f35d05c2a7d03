/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Types of floats and masters with a rest, against arithmetic in double: all patterns of 16 bits, and FP32 patterns of
 * every exponent with those low bits that decide. Each instruction set by itself.
 */
#include "optim_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ALL 65536u

static float *floats; /* patterns that decide, ALL × 24 */
static uint32_t float_count;

static void make_floats(void)
{
    static const uint32_t low[] = {0,      1,      0x7F,   0x80,   0x81,   0xFF,   0x100,  0x17F,
                                   0x180,  0x181,  0xFFF,  0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001,
                                   0x7FFF, 0x8000, 0x8001, 0xFF7F, 0xFF80, 0xFF81, 0xFFFE, 0xFFFF};
    uint32_t high;
    size_t i;

    floats = malloc(sizeof low / sizeof low[0] * ALL * sizeof *floats);
    assert_non_null(floats);
    float_count = 0;
    for (high = 0; high < ALL; high++)
        for (i = 0; i < sizeof low / sizeof low[0]; i++)
            floats[float_count++] = fixture_from_bits(high << 16 | low[i]);
}

/* The nearest multiple of `place` powers of two, halves to even: what rounding to `digits` binary digits gives. */
static double rounded(double x, int digits, int least_exponent)
{
    int exponent;
    double unit;

    (void)frexp(x, &exponent);
    exponent = exponent - digits < least_exponent ? least_exponent : exponent - digits;
    unit = ldexp(1.0, exponent);
    return nearbyint(x / unit) * unit;
}

static void check_widened(const uint16_t *halves, msc_optim_float type)
{
    msc_optim_array from = {halves, ALL, type};
    float *wide = malloc(ALL * sizeof *wide);
    uint32_t i;

    assert_non_null(wide);
    assert_int_equal(msc_optim_convert(optim, wide, MSC_OPTIM_FLOAT_FP32, &from, NULL), MSC_OK);
    for (i = 0; i < ALL; i++) {
        int fraction_bits = type == MSC_OPTIM_FLOAT_BF16 ? 7 : 10;
        int exponent = (int)(i & 0x7FFFu) >> fraction_bits;
        int fraction = (int)(i & ((1u << fraction_bits) - 1u));
        int last = type == MSC_OPTIM_FLOAT_BF16 ? 255 : 31;
        int bias = last / 2;
        double value = exponent == 0
                           ? ldexp(fraction, 1 - bias - fraction_bits)
                           : ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);

        if (exponent == last && fraction != 0) {
            assert_true(isnan(wide[i]));
            continue;
        }
        value = exponent == last ? INFINITY : value;
        assert_int_equal(fixture_bits(wide[i]), fixture_bits((float)(i >= 0x8000u ? -value : value)));
    }
    free(wide);
}

static void sixteen_bits_widen(void **state)
{
    uint16_t *halves = malloc(ALL * sizeof *halves);
    uint32_t i;

    (void)state;
    assert_non_null(halves);
    for (i = 0; i < ALL; i++)
        halves[i] = (uint16_t)i;
    check_widened(halves, MSC_OPTIM_FLOAT_BF16);
    check_widened(halves, MSC_OPTIM_FLOAT_FP16);
    free(halves);
}

static void check_narrowed(msc_optim_float type)
{
    msc_optim_array from = {floats, float_count, MSC_OPTIM_FLOAT_FP32};
    uint16_t *halves = malloc(float_count * sizeof *halves);
    float *back = malloc(float_count * sizeof *back);
    msc_optim_array narrow = {halves, float_count, type};
    int bf16 = type == MSC_OPTIM_FLOAT_BF16;
    uint32_t i;

    assert_true(halves != NULL && back != NULL);
    assert_int_equal(msc_optim_convert(optim, halves, type, &from, NULL), MSC_OK);
    assert_int_equal(msc_optim_convert(optim, back, MSC_OPTIM_FLOAT_FP32, &narrow, NULL), MSC_OK);
    for (i = 0; i < float_count; i++) {
        double expected = rounded((double)floats[i], bf16 ? 8 : 11, bf16 ? -133 : -24);

        if (isnan(floats[i])) {
            assert_true(isnan(back[i]));
            continue;
        }
        if (fabs(expected) > (bf16 ? ldexp(255.0, 120) : 65504.0))
            expected = copysign(INFINITY, expected);
        if (isinf(floats[i]))
            expected = (double)floats[i];
        assert_int_equal(fixture_bits(back[i]), fixture_bits((float)copysign(expected, (double)floats[i])));
    }
    free(halves);
    free(back);
}

static void floats_narrow(void **state)
{
    (void)state;
    check_narrowed(MSC_OPTIM_FLOAT_BF16);
    check_narrowed(MSC_OPTIM_FLOAT_FP16);
}

/* Weight, then master as it comes back. */
static void split_and_join(msc_optim_weights form, uint16_t *weight, float *back)
{
    void *rest = malloc(float_count * sizeof(float));

    assert_non_null(rest);
    assert_int_equal(msc_optim_split(optim, form, floats, float_count, weight, rest, NULL), MSC_OK);
    assert_int_equal(msc_optim_join(optim, form, weight, rest, float_count, back, NULL), MSC_OK);
    free(rest);
}

/* No BF16 is nearer to the master, and of two that are as near, the weight is the larger one. */
static void check_weight(uint16_t weight, float master)
{
    double here = (double)fixture_from_bits((uint32_t)weight << 16);
    double below = (double)fixture_from_bits((uint32_t)(weight - 1u) << 16);
    double above = (double)fixture_from_bits((uint32_t)(weight + 1u) << 16);
    double x = (double)master;

    if (isinf(here)) { /* infinity as the next number there would be */
        assert_true(isinf(master) || fabs(x) >= ldexp(511.0, 119));
        return;
    }
    if ((weight & 0x7FFFu) > 0)
        assert_true(fabs(here - x) <= fabs(below - x));
    assert_true(fabs(here - x) < fabs(above - x) || (weight & 0x7FFFu) == 0x7F7Fu);
}

static void rest16_is_exact(void **state)
{
    uint16_t *weight = malloc(float_count * sizeof *weight);
    float *back = malloc(float_count * sizeof *back);
    uint32_t i;

    (void)state;
    assert_true(weight != NULL && back != NULL);
    split_and_join(MSC_OPTIM_WEIGHTS_MASTER_REST16, weight, back);
    for (i = 0; i < float_count; i++) {
        if (isnan(floats[i])) {
            assert_true(isnan(back[i]) && isnan(fixture_from_bits((uint32_t)weight[i] << 16)));
            continue;
        }
        assert_int_equal(fixture_bits(back[i]), fixture_bits(floats[i]));
        check_weight(weight[i], floats[i]);
    }
    free(weight);
    free(back);
}

static void rest8_is_24_bits(void **state)
{
    uint16_t *weight = malloc(float_count * sizeof *weight);
    float *back = malloc(float_count * sizeof *back);
    uint32_t i;

    (void)state;
    assert_true(weight != NULL && back != NULL);
    split_and_join(MSC_OPTIM_WEIGHTS_MASTER_REST8, weight, back);
    for (i = 0; i < float_count; i++) {
        uint32_t bits = fixture_bits(floats[i]);
        uint32_t joined = fixture_bits(back[i]);

        if (isnan(floats[i])) {
            assert_true(isnan(back[i]));
            continue;
        }
        assert_true(isfinite(back[i]) == isfinite(floats[i]));
        assert_int_equal(joined & 0xFFu, 0);
        assert_int_equal(joined >> 31, bits >> 31);
        if ((bits & 0x7FFFFFFFu) <=
            0x7F7FFF00u) /* above, nearest would be infinity: the largest stands for it */
            assert_true(joined + 0x80u >= bits && joined <= bits + 0x80u);
        if ((bits & 0xFFu) == 0)
            assert_int_equal(joined, bits);
        check_weight(weight[i], back[i]);
    }
    free(weight);
    free(back);
}

static void full_masters_are_kept(void **state)
{
    uint16_t *weight = malloc(float_count * sizeof *weight);
    float *back = malloc(float_count * sizeof *back);
    uint16_t *expected = malloc(float_count * sizeof *expected);
    msc_optim_array from = {floats, float_count, MSC_OPTIM_FLOAT_FP32};

    (void)state;
    assert_true(weight != NULL && back != NULL && expected != NULL);
    split_and_join(MSC_OPTIM_WEIGHTS_MASTER_FP32, weight, back);
    assert_memory_equal(back, floats, float_count * sizeof *back);
    assert_int_equal(msc_optim_convert(optim, expected, MSC_OPTIM_FLOAT_BF16, &from, NULL), MSC_OK);
    assert_memory_equal(weight, expected, float_count * sizeof *weight);
    free(weight);
    free(back);
    free(expected);
}

static void same_type_is_a_copy(void **state)
{
    static const uint16_t from[] = {1, 0x8000, 0x7FFF, 0x3C00, 5};
    uint16_t to[5];
    msc_optim_array array = {from, 5, MSC_OPTIM_FLOAT_BF16};

    (void)state;
    assert_int_equal(msc_optim_convert(optim, to, MSC_OPTIM_FLOAT_BF16, &array, NULL), MSC_OK);
    assert_memory_equal(to, from, sizeof to);
}

static int begin(void **state)
{
    (void)state;
    make_floats();
    return 0;
}

static int end(void **state)
{
    (void)state;
    free(floats);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sixteen_bits_widen),    cmocka_unit_test(floats_narrow),
        cmocka_unit_test(rest16_is_exact),       cmocka_unit_test(rest8_is_24_bits),
        cmocka_unit_test(full_masters_are_kept), cmocka_unit_test(same_type_is_a_copy),
    };
    int failed = 0;
    unsigned isa;

    for (isa = MSC_OPTIM_ISA_SCALAR; isa < MSC_OPTIM_ISA_COUNT; isa++) {
        if (!msc_optim_isa_runs((msc_optim_isa)isa)) {
            print_message("this machine has no %s\n", msc_optim_isa_name((msc_optim_isa)isa));
            continue;
        }
        optim = fixture_optim((msc_optim_isa)isa, 1);
        failed += cmocka_run_group_tests_name(msc_optim_isa_name((msc_optim_isa)isa), tests, begin, end);
        fixture_optim_end(optim);
    }
    return failed;
}
