/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Norms against sums in long double, the same bits in every way of computing them; clip factors; accumulated gradients.
 */
#include "optim_fixture.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Enough strips for seven threads, and a last one that is not full. */
#define MANY (300u * 1024u + 77u)

typedef struct arrays {
    msc_optim_array list[6];
    float *full;
    uint16_t *bf16, *fp16;
} arrays;

/* Types mixed, empty arrays between, the same numbers in each type. */
static arrays make_arrays(void)
{
    arrays made;
    uint64_t seed = 6;
    uint32_t i;

    made.full = malloc(MANY * sizeof *made.full);
    made.bf16 = malloc(MANY * sizeof *made.bf16);
    made.fp16 = malloc(MANY * sizeof *made.fp16);
    assert_true(made.full != NULL && made.bf16 != NULL && made.fp16 != NULL);
    for (i = 0; i < MANY; i++)
        made.full[i] = fixture_float(&seed);
    made.list[0] = (msc_optim_array){made.full, MANY, MSC_OPTIM_FLOAT_FP32};
    made.list[1] = (msc_optim_array){NULL, 0, MSC_OPTIM_FLOAT_FP32};
    made.list[2] = (msc_optim_array){made.bf16, MANY - 5000, MSC_OPTIM_FLOAT_BF16};
    made.list[3] = (msc_optim_array){made.fp16, 3000, MSC_OPTIM_FLOAT_FP16};
    made.list[4] = (msc_optim_array){made.full, 1, MSC_OPTIM_FLOAT_FP32};
    made.list[5] = (msc_optim_array){NULL, 0, MSC_OPTIM_FLOAT_BF16};
    assert_int_equal(msc_optim_convert(optim, made.bf16, MSC_OPTIM_FLOAT_BF16, &made.list[0], NULL), MSC_OK);
    assert_int_equal(msc_optim_convert(optim, made.fp16, MSC_OPTIM_FLOAT_FP16, &made.list[0], NULL), MSC_OK);
    return made;
}

static void drop_arrays(arrays *made)
{
    free(made->full);
    free(made->bf16);
    free(made->fp16);
}

static float *widened(const msc_optim_array *array)
{
    float *wide = malloc((size_t)array->count * sizeof *wide + 1);

    assert_non_null(wide);
    assert_int_equal(msc_optim_convert(optim, wide, MSC_OPTIM_FLOAT_FP32, array, NULL), MSC_OK);
    return wide;
}

static long double plain_squares(const msc_optim_array *list, uint32_t count, float scale)
{
    long double sum = 0.0L;
    uint32_t i;
    uint64_t k;

    for (i = 0; i < count; i++) {
        float *wide = widened(&list[i]);

        for (k = 0; k < list[i].count; k++) {
            float x = wide[k] * scale;

            sum += (long double)x * (long double)x;
        }
        free(wide);
    }
    return sum;
}

static void norms_are_right_and_the_same(void **state)
{
    arrays made = make_arrays();
    long double expected = plain_squares(made.list, 6, 0.37f);
    msc_optim_norm_result first;
    unsigned isa, threads;

    (void)state;
    assert_int_equal(msc_optim_norm(optim, made.list, 6, 0.37f, &first, NULL), MSC_OK);
    assert_int_equal(first.nonfinite_count, 0);
    /* valgrind computes long double as double, and then it is this sum that is less exact */
    assert_true(fabsl((long double)first.sum_of_squares - expected) <= 1e-11L * expected);
    for (isa = MSC_OPTIM_ISA_SCALAR; isa < MSC_OPTIM_ISA_COUNT; isa++)
        for (threads = 1; threads <= 7; threads += 2) {
            msc_optim_norm_result norm;
            msc_optim *other;

            if (!msc_optim_isa_runs((msc_optim_isa)isa))
                continue;
            other = fixture_optim((msc_optim_isa)isa, threads);
            assert_int_equal(msc_optim_norm(other, made.list, 6, 0.37f, &norm, NULL), MSC_OK);
            assert_memory_equal(&norm.sum_of_squares, &first.sum_of_squares, sizeof norm.sum_of_squares);
            fixture_optim_end(other);
        }
    drop_arrays(&made);
}

/* On any day and machine: the order of additions is part of the result. */
static void norms_are_what_they_were(void **state)
{
    arrays made = make_arrays();
    uint64_t digest = UINT64_C(0xCBF29CE484222325);
    uint32_t i;

    (void)state;
    for (i = 1; i <= 20; i++) {
        msc_optim_norm_result norm;
        uint64_t bits;

        made.list[0].count = MANY / 20 * i;
        assert_int_equal(msc_optim_norm(optim, made.list, 3, 1.0f, &norm, NULL), MSC_OK);
        memcpy(&bits, &norm.sum_of_squares, sizeof bits);
        digest = (digest ^ bits) * UINT64_C(0x100000001B3);
    }
    if (digest != UINT64_C(0xF467D57F30FA7679))
        fail_msg("%016llx", (unsigned long long)digest);
    drop_arrays(&made);
}

/* Few strips and many; each length's last lanes. */
static void every_length_is_summed(void **state)
{
    float values[200];
    msc_optim_array array = {values, 0, MSC_OPTIM_FLOAT_FP32};
    msc_optim_norm_result norm;
    double sum = 0.0;
    uint32_t i;

    (void)state;
    for (i = 0; i < 200; i++)
        values[i] = (float)(i + 1); /* squares and sums are integers: exact in any order */
    for (i = 0; i <= 200; i++) {
        array.count = i;
        assert_int_equal(msc_optim_norm(optim, &array, 1, 1.0f, &norm, NULL), MSC_OK);
        assert_true(norm.sum_of_squares == sum);
        sum += (double)(i + 1) * (double)(i + 1);
    }
    assert_int_equal(msc_optim_norm(optim, NULL, 0, 1.0f, &norm, NULL), MSC_OK);
    assert_true(norm.sum_of_squares == 0.0 && norm.nonfinite_count == 0);
}

/* FP32's own squares would overflow or vanish. */
static void extreme_numbers_are_summed(void **state)
{
    static const float values[] = {FLT_MAX, -FLT_MAX, 1e-45f, 1e-30f};
    msc_optim_array array = {values, 2, MSC_OPTIM_FLOAT_FP32};
    msc_optim_norm_result norm;

    (void)state;
    assert_int_equal(msc_optim_norm(optim, &array, 1, 1.0f, &norm, NULL), MSC_OK);
    assert_true(norm.sum_of_squares == 2.0 * (double)FLT_MAX * (double)FLT_MAX);
    array.values = values + 2;
    assert_int_equal(msc_optim_norm(optim, &array, 1, 1.0f, &norm, NULL), MSC_OK);
    assert_true(norm.sum_of_squares ==
                (double)values[3] * (double)values[3] + (double)values[2] * (double)values[2]);
    array.values = values;
    assert_int_equal(msc_optim_norm(optim, &array, 1, 4.0f, &norm, NULL), MSC_OK); /* after scaling */
    assert_int_equal(norm.nonfinite_count, 2);
}

static void what_is_not_finite_is_counted(void **state)
{
    static const uint32_t patterns[] = {0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001};
    arrays made = make_arrays();
    msc_optim_norm_result before, norm;
    uint64_t seed = 2;
    uint32_t bad = 0;
    uint32_t i;

    (void)state;
    for (i = 0; i < MANY; i++)
        if (fixture_random(&seed) % 1000 == 0) {
            made.full[i] = 0.0f;
            bad++;
        }
    assert_int_equal(msc_optim_norm(optim, made.list, 1, 1.0f, &before, NULL), MSC_OK);
    for (seed = 2, i = 0; i < MANY; i++)
        if (fixture_random(&seed) % 1000 == 0)
            made.full[i] = fixture_from_bits(patterns[i % 5]);
    assert_int_equal(msc_optim_norm(optim, made.list, 1, 1.0f, &norm, NULL), MSC_OK);
    assert_int_equal(norm.nonfinite_count, bad);
    assert_true(norm.sum_of_squares == before.sum_of_squares); /* the others' sum */
    made.bf16[5] = 0x7F80;
    made.fp16[6] = 0xFC00;
    made.fp16[7] = 0x7C01;
    assert_int_equal(msc_optim_norm(optim, made.list + 2, 2, 1.0f, &norm, NULL), MSC_OK);
    assert_int_equal(norm.nonfinite_count, 3);
    drop_arrays(&made);
}

/* Computed by torch 2.13: max_norm / (torch.tensor(norm) + 1e-6), clamped to 1. */
static void clip_factors_are_torchs(void **state)
{
    static const struct {
        double norm, max_norm;
        uint32_t factor;
    } torch[] = {{0.5, 1.0, 0x3f800000},
                 {0.5, 0.25, 0x3effffde},
                 {0.5, 5.0, 0x3f800000},
                 {0.5, 0.1, 0x3e4cccb2},
                 {0.999999, 1.0, 0x3f800000},
                 {0.999999, 0.25, 0x3e800000},
                 {0.999999, 5.0, 0x3f800000},
                 {0.999999, 0.1, 0x3dcccccd},
                 {1.0, 1.0, 0x3f7ffff0},
                 {1.0, 0.25, 0x3e7ffff0},
                 {1.0, 5.0, 0x3f800000},
                 {1.0, 0.1, 0x3dccccc0},
                 {1.0000019, 1.0, 0x3f7fffd0},
                 {1.0000019, 0.25, 0x3e7fffd0},
                 {1.0000019, 5.0, 0x3f800000},
                 {1.0000019, 0.1, 0x3dcccca7},
                 {3.7, 1.0, 0x3e8a60db},
                 {3.7, 0.25, 0x3d8a60db},
                 {3.7, 5.0, 0x3f800000},
                 {3.7, 0.1, 0x3cdd67c5},
                 {12.34375, 1.0, 0x3da5e9f6},
                 {12.34375, 0.25, 0x3ca5e9f6},
                 {12.34375, 5.0, 0x3ecf6474},
                 {12.34375, 0.1, 0x3c04bb2b},
                 {1e-07, 1.0, 0x3f800000},
                 {1e-07, 0.25, 0x3f800000},
                 {1e-07, 5.0, 0x3f800000},
                 {1e-07, 0.1, 0x3f800000},
                 {100000000.0, 1.0, 0x322bcc77},
                 {100000000.0, 0.25, 0x312bcc77},
                 {100000000.0, 5.0, 0x3356bf95},
                 {100000000.0, 0.1, 0x3089705f},
                 {0.30000000000000004, 1.0, 0x3f800000},
                 {0.30000000000000004, 0.25, 0x3f555526},
                 {0.30000000000000004, 5.0, 0x3f800000},
                 {0.30000000000000004, 0.1, 0x3eaaaa85},
                 {7.0, 1.0, 0x3e124923},
                 {7.0, 0.25, 0x3d124923},
                 {7.0, 5.0, 0x3f36db6c},
                 {7.0, 0.1, 0x3c6a0e9f}};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof torch / sizeof torch[0]; i++) {
        float factor = msc_optim_clip_factor(torch[i].norm * torch[i].norm, torch[i].max_norm);

        assert_int_equal(fixture_bits(factor), torch[i].factor);
    }
    assert_true(isnan(msc_optim_clip_factor(NAN, 1.0)));
    assert_true(msc_optim_clip_factor(0.0, 1.0) == 1.0f);
    assert_true(msc_optim_clip_factor(INFINITY, 1.0) == 0.0f);
}

/* As FP32 additions one after the other, from every type, with threads. */
static void gradients_accumulate(void **state)
{
    arrays made = make_arrays();
    msc_optim *many = fixture_optim(MSC_OPTIM_ISA_ANY, 3);
    float *sums = calloc(MANY, sizeof *sums);
    float *expected = calloc(MANY, sizeof *expected);
    uint32_t i;
    uint64_t k;

    (void)state;
    assert_true(sums != NULL && expected != NULL);
    for (i = 0; i < 6; i++) {
        float *wide = widened(&made.list[i]);

        for (k = 0; k < made.list[i].count; k++)
            expected[k] = expected[k] + wide[k];
        assert_int_equal(msc_optim_accumulate(many, sums, &made.list[i], NULL), MSC_OK);
        free(wide);
    }
    assert_memory_equal(sums, expected, MANY * sizeof *sums);
    free(sums);
    free(expected);
    fixture_optim_end(many);
    drop_arrays(&made);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms_are_right_and_the_same),  cmocka_unit_test(norms_are_what_they_were),
        cmocka_unit_test(every_length_is_summed),        cmocka_unit_test(extreme_numbers_are_summed),
        cmocka_unit_test(what_is_not_finite_is_counted), cmocka_unit_test(clip_factors_are_torchs),
        cmocka_unit_test(gradients_accumulate),
    };

    return cmocka_run_group_tests_name("optim_sums", tests, fixture_begin_scalar, fixture_finish);
}
