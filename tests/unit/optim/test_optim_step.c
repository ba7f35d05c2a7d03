/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One step of every storage against a plain second implementation: FP32 exactly; what is rounded at random becomes one of
 * the two neighbours of the exact number, as often as it is near. And what gradients of any size do.
 */
#include "optim_fixture.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT 1500u

typedef struct element {
    float w, m, v;
} element;

static float corrected_root(const msc_optim_rule *rule, float v, uint64_t step)
{
    double correction = sqrt(1.0 - pow(rule->beta2, (double)step));

    if (rule->moments == MSC_OPTIM_MOMENTS_CODE8)
        return sqrtf(v) * (float)(1.0 / correction);
    return sqrtf(v) / (float)correction;
}

/* Adam, SGD with momentum and Lion as their papers have them, in the order of rounding of the header. */
static element plain_step(const msc_optim_rule *rule, float g, uint64_t step, element e)
{
    float rate = (float)-rule->learning_rate;

    g *= rule->gradient_scale;
    if (rule->kind == MSC_OPTIM_KIND_ADAMW) {
        e.w *= (float)(1.0 - rule->learning_rate * rule->weight_decay);
        rate = (float)-(rule->learning_rate / (1.0 - pow(rule->beta1, (double)step)));
        e.m += (float)(1.0 - rule->beta1) * (g - e.m);
        e.v = e.v * (float)rule->beta2 + (float)(1.0 - rule->beta2) * g * g;
        e.w += rate * e.m / (corrected_root(rule, e.v, step) + (float)rule->epsilon);
    } else if (rule->kind == MSC_OPTIM_KIND_LION) {
        float mix = (float)rule->beta1 * e.m + (float)(1.0 - rule->beta1) * g;
        float sign = (float)(mix > 0.0f) - (float)(mix < 0.0f);

        e.w = e.w * (float)(1.0 - rule->learning_rate * rule->weight_decay) + rate * sign;
        e.m = (float)rule->beta2 * e.m + (float)(1.0 - rule->beta2) * g;
    } else {
        g += (float)rule->weight_decay * e.w;
        e.m = step == 1 ? g : (float)rule->momentum * e.m + g;
        e.w += rate * e.m;
    }
    return e;
}

/* Everything of a fixture as FP32. */
typedef struct picture {
    float *w, *g;
    float m[COUNT], v[COUNT];
} picture;

static void take_picture(picture *now, const fixture *one)
{
    msc_optim_array gradient = {one->tensor.gradient, COUNT, one->rule.gradient};

    memset(now->v, 0, sizeof now->v);
    now->w = fixture_masters(one, optim);
    now->g = malloc(COUNT * sizeof *now->g);
    assert_non_null(now->g);
    assert_int_equal(msc_optim_convert(optim, now->g, MSC_OPTIM_FLOAT_FP32, &gradient, NULL), MSC_OK);
    assert_int_equal(msc_optim_moments_read(optim, &one->rule, &one->tensor, now->m, now->v, NULL), MSC_OK);
}

static void drop_picture(picture *now)
{
    free(now->w);
    free(now->g);
}

/* ---- FP32 --------------------------------------------------------------------------------------------------- */

/* FP32 moments: all exact, where the master is too; a 24-bit master is next to the exact one. */
static void fp32_moments_are_exact(void **state)
{
    static const msc_optim_kind kinds[] = {MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_KIND_SGD, MSC_OPTIM_KIND_LION};
    unsigned kind, gradient, weights;
    uint64_t step;
    uint32_t i;

    (void)state;
    for (kind = 0; kind < 3; kind++)
        for (gradient = 0; gradient < MSC_OPTIM_FLOAT_COUNT; gradient++)
            for (weights = 0; weights < MSC_OPTIM_WEIGHTS_COUNT; weights++) {
                msc_optim_rule rule = fixture_rule(kinds[kind], (msc_optim_float)gradient,
                                                   (msc_optim_weights)weights, MSC_OPTIM_MOMENTS_FP32);
                fixture one = fixture_make(optim, &rule, COUNT, 0, 3);

                for (step = 1; step <= 3; step++) {
                    picture before, after;

                    fixture_gradient(&one, optim, 8, step);
                    take_picture(&before, &one);
                    one.tensor.step = step;
                    assert_int_equal(msc_optim_step(optim, &rule, &one.tensor, 1, NULL), MSC_OK);
                    take_picture(&after, &one);
                    for (i = 0; i < COUNT; i++) {
                        element was = {before.w[i], before.m[i], before.v[i]};
                        element is = plain_step(&rule, before.g[i], step, was);

                        assert_int_equal(fixture_bits(after.m[i]), fixture_bits(is.m));
                        assert_int_equal(fixture_bits(after.v[i]), fixture_bits(is.v));
                        if (weights != MSC_OPTIM_WEIGHTS_MASTER_REST8)
                            assert_int_equal(fixture_bits(after.w[i]), fixture_bits(is.w));
                        else /* one of the two neighbours on the grid of 256 last places */
                            assert_true((fixture_bits(after.w[i]) - fixture_bits(is.w) + 255u) <= 510u &&
                                        (fixture_bits(after.w[i]) & 255u) == 0);
                    }
                    drop_picture(&before);
                    drop_picture(&after);
                }
                fixture_end(&one);
            }
}

/* Weights as the program sees them: nearest to the master, in every form. */
static void weights_are_rounded_masters(void **state)
{
    unsigned weights;
    uint32_t i;

    (void)state;
    for (weights = MSC_OPTIM_WEIGHTS_MASTER_FP32; weights < MSC_OPTIM_WEIGHTS_COUNT; weights++) {
        msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_BF16,
                                           (msc_optim_weights)weights, MSC_OPTIM_MOMENTS_FP32);
        fixture one = fixture_make(optim, &rule, COUNT, 0, 3);
        float *masters;

        fixture_run(&one, optim, 1, 4, 2);
        masters = fixture_masters(&one, optim);
        for (i = 0; i < COUNT; i++) {
            uint32_t weight = (uint32_t)((const uint16_t *)one.tensor.weight)[i] << 16;
            uint32_t distance = fixture_bits(masters[i]) - weight;

            assert_true(distance + 0x8000u <= 0x10000u);
        }
        free(masters);
        fixture_end(&one);
    }
}

/* ---- rounded at random ----------------------------------------------------------------------------------------- */

/* Mean error and largest one of stored numbers, in units of a step between neighbours. */
typedef struct errors {
    double sum, most;
    uint64_t count;
} errors;

static void note(errors *e, double stored, double exact, double step)
{
    double error = (stored - exact) / step;

    e->sum += error;
    e->most = fmax(e->most, fabs(error));
    e->count++;
}

/* Less than a step each; on average nothing: six deviations, of which each is at most half a step. */
static void check_errors(const errors *e)
{
    assert_true(e->count > 10000);
    assert_true(e->most < 1.01);
    assert_true(fabs(e->sum / (double)e->count) < 6.0 * 0.5 / sqrt((double)e->count));
}

static double bf16_step(double x)
{
    int exponent;

    (void)frexp(x, &exponent);
    return ldexp(1.0, exponent - 8);
}

static void bf16_moments_are_neighbours(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                                       MSC_OPTIM_MOMENTS_BF16);
    fixture one = fixture_make(optim, &rule, COUNT, 0, 3);
    errors m = {0}, v = {0};
    uint64_t step;
    uint32_t i;

    (void)state;
    for (step = 1; step <= 20; step++) {
        picture before, after;

        fixture_gradient(&one, optim, 8, step);
        take_picture(&before, &one);
        one.tensor.step = step;
        assert_int_equal(msc_optim_step(optim, &rule, &one.tensor, 1, NULL), MSC_OK);
        take_picture(&after, &one);
        for (i = 0; i < COUNT; i++) {
            element was = {before.w[i], before.m[i], before.v[i]};
            element is = plain_step(&rule, before.g[i], step, was);

            assert_int_equal(fixture_bits(after.w[i]),
                             fixture_bits(is.w)); /* from the moments before rounding */
            note(&m, (double)after.m[i], (double)is.m, bf16_step((double)is.m));
            note(&v, (double)after.v[i], (double)is.v, bf16_step((double)is.v));
        }
        drop_picture(&before);
        drop_picture(&after);
    }
    check_errors(&m);
    check_errors(&v);
    fixture_end(&one);
}

/* From a code below x to the next one, by the byte of its block. */
static double code_step(const uint8_t *scale, uint32_t i, double x, int fraction_bits)
{
    double block = ldexp(1.0, scale[i / MSC_OPTIM_BLOCK] - 127);
    int exponent;

    (void)frexp(fabs(x) + block / 128, &exponent);
    return ldexp(1.0, exponent - 1 - fraction_bits);
}

/* The five bytes of state at work. */
static void codes_are_neighbours(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_BF16,
                                       MSC_OPTIM_WEIGHTS_MASTER_REST8, MSC_OPTIM_MOMENTS_CODE8);
    fixture one = fixture_make(optim, &rule, COUNT, 0, 3);
    errors root = {0}, ratio = {0}, master = {0};
    uint64_t step;
    uint32_t i;

    (void)state;
    for (step = 1; step <= 20; step++) {
        picture before, after;

        fixture_gradient(&one, optim, 8, step);
        take_picture(&before, &one);
        one.tensor.step = step;
        assert_int_equal(msc_optim_step(optim, &rule, &one.tensor, 1, NULL), MSC_OK);
        take_picture(&after, &one);
        for (i = 0; i < COUNT; i++) {
            element was = {before.w[i], before.m[i], before.v[i]};
            element is = plain_step(&rule, before.g[i], step, was);
            double r = sqrt((double)is.v);
            double stored = sqrt((double)after.v[i]);
            double q = (double)is.m / r;

            note(&root, stored, r, code_step(one.tensor.scale2, i, r, 5));
            note(&ratio, (double)after.m[i] / stored, q, code_step(one.tensor.scale1, i, q, 4));
            note(&master, (double)after.w[i], (double)is.w, bf16_step((double)is.w) / 256.0);
        }
        drop_picture(&before);
        drop_picture(&after);
    }
    check_errors(&root);
    check_errors(&ratio);
    check_errors(&master);
    fixture_end(&one);
}

/* ---- gradients of any size --------------------------------------------------------------------------------------- */

static void set_gradients(fixture *one, float x)
{
    float *gradient = (float *)(uintptr_t)one->tensor.gradient;
    uint64_t i;

    for (i = 0; i < one->tensor.count; i++)
        gradient[i] = i % 3 == 0 ? x : (i % 3 == 1 ? -x : 0.0f);
}

/* With codes, whatever finite gradients come and in whatever order, updates stay finite and of Adam's size. */
static void any_gradient_is_stepped(void **state)
{
    static const float sizes[] = {0.0f,  1e-45f, 1e-40f,  1e-30f, 1e-15f, 1.0f,
                                  1e15f, 1e30f,  FLT_MAX, 1e-3f,  0.0f,   1e-42f};
    const uint64_t many = sizeof sizes / sizeof sizes[0];
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32,
                                       MSC_OPTIM_WEIGHTS_MASTER_REST8, MSC_OPTIM_MOMENTS_CODE8);
    uint64_t first, step;
    uint32_t i;

    (void)state;
    rule.gradient_scale = 1.0f;
    /* |m| / root(v) is at most (1 - beta1) / root((1 - beta2) (1 - beta1² / beta2)), corrections and roundings apart */
    for (first = 0; first < many; first++) {
        fixture one = fixture_make(optim, &rule, 1000, 0, 5);

        for (step = 1; step <= 40; step++) {
            float *before = fixture_masters(&one, optim);
            float *after;

            set_gradients(&one, sizes[(first + step) % many]);
            one.tensor.step = step;
            assert_int_equal(msc_optim_step(optim, &rule, &one.tensor, 1, NULL), MSC_OK);
            after = fixture_masters(&one, optim);
            for (i = 0; i < 1000; i++) {
                assert_true(isfinite(after[i]));
                assert_true(fabsf(after[i] - before[i]) <= 5.0f * (float)rule.learning_rate);
            }
            free(before);
            free(after);
        }
        fixture_end(&one);
    }
}

/* NaN is not hidden: it shows in the weight. And a step that is not called changes nothing, so a caller can look first. */
static void show_not_a_number(uint64_t count)
{
    unsigned kind, weights, moments;

    for (kind = 0; kind < MSC_OPTIM_KIND_COUNT; kind++)
        for (weights = 0; weights < MSC_OPTIM_WEIGHTS_COUNT; weights++)
            for (moments = 0; moments < MSC_OPTIM_MOMENTS_COUNT; moments++) {
                msc_optim_rule rule = fixture_rule((msc_optim_kind)kind, MSC_OPTIM_FLOAT_FP32,
                                                   (msc_optim_weights)weights, (msc_optim_moments)moments);
                fixture one = fixture_make(optim, &rule, count, 0, 5);
                msc_optim_array gradient = {one.tensor.gradient, count, MSC_OPTIM_FLOAT_FP32};
                msc_optim_norm_result norm;
                float *masters;

                fixture_run(&one, optim, 1, 2, 1);
                set_gradients(&one, 1.0f);
                ((float *)(uintptr_t)one.tensor.gradient)[17] = NAN;
                one.tensor.step = 3;
                assert_int_equal(msc_optim_norm(optim, &gradient, 1, 1.0f, &norm, NULL), MSC_OK);
                assert_int_equal(norm.nonfinite_count, 1);
                assert_int_equal(msc_optim_step(optim, &rule, &one.tensor, 1, NULL), MSC_OK);
                masters = fixture_masters(&one, optim);
                assert_true(isnan(masters[17]));
                assert_true(isfinite(masters[16]) && isfinite(masters[18]));
                free(masters);
                fixture_end(&one);
            }
}

static void not_a_number_shows(void **state)
{
    (void)state;
    show_not_a_number(300);
    show_not_a_number(3 * MSC_OPTIM_BLOCK);
}

/* maximize is minimize of the negative; a scale of a power of two is as good as scaled gradients. */
static void scale_and_direction(void **state)
{
    unsigned kind;
    uint64_t i;

    (void)state;
    for (kind = 0; kind < MSC_OPTIM_KIND_COUNT; kind++) {
        msc_optim_rule rule = fixture_rule((msc_optim_kind)kind, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                                           MSC_OPTIM_MOMENTS_FP32);
        msc_optim_rule other = rule;
        fixture a, b;
        float *gradient;

        other.maximize = 1;
        other.gradient_scale = rule.gradient_scale * 4.0f;
        a = fixture_make(optim, &rule, 500, 0, 5);
        b = fixture_make(optim, &other, 500, 0, 5);
        fixture_gradient(&a, optim, 3, 1);
        fixture_gradient(&b, optim, 3, 1);
        gradient = (float *)(uintptr_t)b.tensor.gradient;
        for (i = 0; i < 500; i++)
            gradient[i] *= -0.25f;
        a.tensor.step = b.tensor.step = 1;
        assert_int_equal(msc_optim_step(optim, &rule, &a.tensor, 1, NULL), MSC_OK);
        assert_int_equal(msc_optim_step(optim, &other, &b.tensor, 1, NULL), MSC_OK);
        fixture_same(&a, &b, "scaled and turned round");
        fixture_end(&a);
        fixture_end(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp32_moments_are_exact),      cmocka_unit_test(weights_are_rounded_masters),
        cmocka_unit_test(bf16_moments_are_neighbours), cmocka_unit_test(codes_are_neighbours),
        cmocka_unit_test(any_gradient_is_stepped),     cmocka_unit_test(not_a_number_shows),
        cmocka_unit_test(scale_and_direction),
    };

    return cmocka_run_group_tests_name("optim_step", tests, fixture_begin, fixture_finish);
}
