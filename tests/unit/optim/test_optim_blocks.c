/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moments in less than FP32: what a block of odd numbers becomes, and the public reading and writing.
 */
#include "optim_fixture.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct block {
    fixture state;
    float m[MSC_OPTIM_BLOCK], v[MSC_OPTIM_BLOCK];
} block;

static void write_and_read(block *one, const float *m, const float *v, uint32_t count)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                                       MSC_OPTIM_MOMENTS_CODE8);

    one->state = fixture_make(optim, &rule, count, 0, 1);
    assert_int_equal(msc_optim_moments_write(optim, &rule, &one->state.tensor, m, v, NULL), MSC_OK);
    assert_int_equal(msc_optim_moments_read(optim, &rule, &one->state.tensor, one->m, one->v, NULL), MSC_OK);
}

/* Numbers of one size: within half a step, relative to the largest in the block and to themselves. */
static void errors_are_bounded(void **state)
{
    float m[MSC_OPTIM_BLOCK], v[MSC_OPTIM_BLOCK];
    uint64_t seed = 9;
    uint32_t round, i;

    (void)state;
    for (round = 0; round < 300; round++) {
        double size = ldexp(1.0, (int)(round % 60) - 30);
        double most_root = 0.0, most_ratio = 0.0;
        block one;

        for (i = 0; i < MSC_OPTIM_BLOCK; i++) {
            v[i] = (float)(size * size) * fabsf(fixture_float(&seed)) + (float)(size * size) * 1e-6f;
            m[i] = sqrtf(v[i]) * fixture_float(&seed);
        }
        write_and_read(&one, m, v, MSC_OPTIM_BLOCK);
        for (i = 0; i < MSC_OPTIM_BLOCK; i++) {
            most_root = fmax(most_root, sqrt((double)v[i]));
            most_ratio = fmax(most_ratio, fabs((double)m[i]) / sqrt((double)one.v[i]));
        }
        for (i = 0; i < MSC_OPTIM_BLOCK; i++) {
            double root = sqrt((double)v[i]);
            double stored = sqrt((double)one.v[i]);
            double ratio = (double)m[i] / stored;

            /* the block's power of two is less than 1.04 times the largest; half a step; roundings of FP32 */
            assert_true(fabs(stored - root) <= (root + 1.04 * most_root / 128) / 64 * 1.0001);
            assert_true(fabs((double)one.m[i] / stored - ratio) <=
                        (fabs(ratio) + 1.04 * most_ratio / 128) / 32 * 1.0001);
        }
        fixture_end(&one.state);
    }
}

/* What was read is written as the same bytes, whatever the codes were. */
static void reading_and_writing_change_nothing(void **state)
{
    static const msc_optim_kind kinds[] = {MSC_OPTIM_KIND_ADAM, MSC_OPTIM_KIND_LION};
    float m[700], v[700], again_m[700], again_v[700];
    uint64_t seed = 12;
    unsigned kind, moments;
    uint32_t round;

    (void)state;
    for (round = 0; round < 50; round++)
        for (kind = 0; kind < 2; kind++)
            for (moments = 0; moments < MSC_OPTIM_MOMENTS_COUNT; moments++) {
                msc_optim_rule rule = fixture_rule(kinds[kind], MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                                                   (msc_optim_moments)moments);
                fixture a = fixture_make(optim, &rule, 700, 0, 1);

                fixture_run(&a, optim, 1, 1 + fixture_random(&seed) % 5, round);
                assert_int_equal(msc_optim_moments_read(optim, &rule, &a.tensor, m, v, NULL), MSC_OK);
                assert_int_equal(msc_optim_moments_write(optim, &rule, &a.tensor, m, v, NULL), MSC_OK);
                assert_int_equal(msc_optim_moments_read(optim, &rule, &a.tensor, again_m, again_v, NULL),
                                 MSC_OK);
                assert_memory_equal(again_m, m, sizeof m);
                if (kind == 0)
                    assert_memory_equal(again_v, v, sizeof v);
                fixture_end(&a);
            }
}

/* Whatever bytes a state has, the largest code among small ones too. */
static void any_codes_are_kept(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAM, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                                       MSC_OPTIM_MOMENTS_CODE8);
    float m[MSC_OPTIM_BLOCK], v[MSC_OPTIM_BLOCK], again_m[MSC_OPTIM_BLOCK], again_v[MSC_OPTIM_BLOCK];
    fixture a = fixture_make(optim, &rule, MSC_OPTIM_BLOCK, 0, 1);
    uint64_t seed = 77;
    uint32_t round, i;

    (void)state;
    for (round = 0; round < 2000; round++) {
        a.tensor.scale1[0] = (uint8_t)(100 + fixture_random(&seed) % 50);
        a.tensor.scale2[0] = (uint8_t)(100 + fixture_random(&seed) % 50);
        for (i = 0; i < MSC_OPTIM_BLOCK; i++) {
            ((uint8_t *)a.tensor.moment1)[i] = (uint8_t)(i == 9 ? 127 : fixture_random(&seed) % 64);
            ((uint8_t *)a.tensor.moment2)[i] = (uint8_t)(1 + fixture_random(&seed) % 255);
        }
        assert_int_equal(msc_optim_moments_read(optim, &rule, &a.tensor, m, v, NULL), MSC_OK);
        assert_int_equal(msc_optim_moments_write(optim, &rule, &a.tensor, m, v, NULL), MSC_OK);
        assert_int_equal(msc_optim_moments_read(optim, &rule, &a.tensor, again_m, again_v, NULL), MSC_OK);
        assert_memory_equal(again_m, m, sizeof m);
        assert_memory_equal(again_v, v, sizeof v);
    }
    fixture_end(&a);
}

/* The largest number does not become infinite. */
static void bf16_stays_finite(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_LION, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                                       MSC_OPTIM_MOMENTS_BF16);
    static const float m[] = {FLT_MAX, -FLT_MAX, INFINITY, NAN};
    fixture a = fixture_make(optim, &rule, 4, 0, 1);
    float back[4];

    (void)state;
    assert_int_equal(msc_optim_moments_write(optim, &rule, &a.tensor, m, NULL, NULL), MSC_OK);
    assert_int_equal(msc_optim_moments_read(optim, &rule, &a.tensor, back, NULL, NULL), MSC_OK);
    assert_int_equal(fixture_bits(back[0]), 0x7F7F0000);
    assert_int_equal(fixture_bits(back[1]), 0xFF7F0000);
    assert_true(isinf(back[2]) && isnan(back[3]));
    fixture_end(&a);
}

/* The scale's ends: below, steps get no smaller; above, the largest code stands for more. */
static void ends_of_the_scale(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_LION, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                                       MSC_OPTIM_MOMENTS_CODE8);
    static const float large[] = {FLT_MAX, -FLT_MAX, 1.0f, 0x1p120f};
    static const float small[] = {0x1p-127f, -0x3p-130f, 0x1p-138f, 0x1p-149f};
    fixture a = fixture_make(optim, &rule, 4, 0, 1);
    float back[4];

    (void)state;
    assert_int_equal(msc_optim_moments_write(optim, &rule, &a.tensor, large, NULL, NULL), MSC_OK);
    assert_int_equal(msc_optim_moments_read(optim, &rule, &a.tensor, back, NULL, NULL), MSC_OK);
    assert_true(back[0] == 0x1.EEp126f && back[1] == -0x1.EEp126f && back[2] == 0.0f && back[3] == 0x1p120f);
    assert_int_equal(msc_optim_moments_write(optim, &rule, &a.tensor, small, NULL, NULL), MSC_OK);
    assert_int_equal(msc_optim_moments_read(optim, &rule, &a.tensor, back, NULL, NULL), MSC_OK);
    assert_true(back[0] == small[0] && back[1] == small[1] && back[2] == 0.0f && back[3] == 0.0f);
    fixture_end(&a);
}

static void zeros_stay(void **state)
{
    float zeros[MSC_OPTIM_BLOCK] = {0.0f};
    float as_many[MSC_OPTIM_BLOCK] = {0.0f};
    block one;
    uint32_t i;

    (void)state;
    write_and_read(&one, zeros, as_many, MSC_OPTIM_BLOCK);
    for (i = 0; i < MSC_OPTIM_BLOCK; i++) {
        assert_true(one.m[i] == 0.0f && one.v[i] == 0.0f);
        assert_int_equal(((const uint8_t *)one.state.tensor.moment2)[i], 0);
    }
    memset(one.state.tensor.scale1, 0, 1); /* a state that was never written */
    memset(one.state.tensor.scale2, 0, 1);
    assert_int_equal(msc_optim_moments_read(optim, &one.state.rule, &one.state.tensor, one.m, one.v, NULL),
                     MSC_OK);
    for (i = 0; i < MSC_OPTIM_BLOCK; i++)
        assert_true(one.m[i] == 0.0f && one.v[i] == 0.0f);
    fixture_end(&one.state);
}

/* Beside something large, a small v is never stored as 0, and m / root(v) grows by half a step of the root at most. */
static void small_beside_large(void **state)
{
    static const float sizes[] = {1e-30f, 1e-20f, 1e-8f, 1e-4f, 1e4f, 1e15f, 1e18f};
    float m[MSC_OPTIM_BLOCK], v[MSC_OPTIM_BLOCK];
    size_t large;
    uint32_t i;

    (void)state;
    for (large = 0; large < sizeof sizes / sizeof sizes[0]; large++) {
        block one;

        for (i = 0; i < MSC_OPTIM_BLOCK; i++) {
            double root = (double)sizes[large] * pow(10.0, -(double)(i % 32) / 2);

            v[i] = (float)(root * root);
            m[i] = (float)root * 0.7f;
        }
        write_and_read(&one, m, v, MSC_OPTIM_BLOCK);
        for (i = 0; i < MSC_OPTIM_BLOCK; i++) {
            assert_true((v[i] > 0.0f) == (((const uint8_t *)one.state.tensor.moment2)[i] > 0));
            assert_true(isfinite(one.m[i]) && isfinite(one.v[i]));
            if (one.v[i] > FLT_MIN)
                assert_true(fabs((double)one.m[i]) <= 0.7 * 1.51 * sqrt((double)one.v[i]));
        }
        fixture_end(&one.state);
    }
}

/* Not a number, or too large: no NaN comes back, and no other block is touched. */
static void trouble_stays_in_its_block(void **state)
{
    float m[MSC_OPTIM_BLOCK * 2], v[MSC_OPTIM_BLOCK * 2], m_out[MSC_OPTIM_BLOCK * 2],
        v_out[MSC_OPTIM_BLOCK * 2];
    static const float trouble[] = {NAN, INFINITY, -INFINITY, FLT_MAX, -FLT_MAX};
    const float ratio = 127.0f / 512.0f, root = 127.0f / 128.0f; /* of codes */
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                                       MSC_OPTIM_MOMENTS_CODE8);
    size_t k;
    uint32_t i;

    (void)state;
    for (k = 0; k < sizeof trouble / sizeof trouble[0]; k++) {
        fixture a = fixture_make(optim, &rule, MSC_OPTIM_BLOCK * 2, 0, 1);

        for (i = 0; i < MSC_OPTIM_BLOCK * 2; i++) {
            m[i] = ratio * root;
            v[i] = root * root;
        }
        m[5] = trouble[k];
        v[7] = fabsf(trouble[k]);
        assert_int_equal(msc_optim_moments_write(optim, &rule, &a.tensor, m, v, NULL), MSC_OK);
        assert_int_equal(msc_optim_moments_read(optim, &rule, &a.tensor, m_out, v_out, NULL), MSC_OK);
        for (i = 0; i < MSC_OPTIM_BLOCK * 2; i++) {
            assert_true(isfinite(v_out[i]) && !isnan(m_out[i]));
            if (i >= MSC_OPTIM_BLOCK)
                assert_true(m_out[i] == ratio * root && v_out[i] == root * root);
        }
        fixture_end(&a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_are_bounded), cmocka_unit_test(reading_and_writing_change_nothing),
        cmocka_unit_test(any_codes_are_kept), cmocka_unit_test(bf16_stays_finite),
        cmocka_unit_test(ends_of_the_scale),  cmocka_unit_test(zeros_stay),
        cmocka_unit_test(small_beside_large), cmocka_unit_test(trouble_stays_in_its_block),
    };

    return cmocka_run_group_tests_name("optim_blocks", tests, fixture_begin, fixture_finish);
}
