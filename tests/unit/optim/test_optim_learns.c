/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether narrow state trains as FP32 does: ten thousand tiny updates, a convex problem and a small network, each run with
 * FP32 and with less. All of it is deterministic: gradients, batches and rounding follow from seeds.
 */
#include "optim_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- 24 bits ------------------------------------------------------------------------------------------------- */

#define TINY_COUNT 2000u
#define TINY_STEPS 10000u
#define PLACE 0x1p-15 /* of a 24-bit master in [1, 2) */

/* Steps of a fiftieth of the last place. Rounded to nearest, not one would be seen. */
static void tiny_updates_are_not_lost(void **state)
{
    msc_optim_rule full = msc_optim_rule_default(MSC_OPTIM_KIND_SGD);
    msc_optim_rule narrow;
    fixture a, b;
    float *wide, *masters;
    double mean = 0.0;
    const double moved = TINY_STEPS / 50.0; /* last places, in all */
    uint64_t step;
    uint32_t i;

    (void)state;
    full.learning_rate = 1.0;
    narrow = full;
    narrow.weights = MSC_OPTIM_WEIGHTS_MASTER_REST8;
    a = fixture_make(optim, &full, TINY_COUNT, 0, 1);
    b = fixture_make(optim, &narrow, TINY_COUNT, 0, 1);
    wide = a.tensor.weight;
    for (i = 0; i < TINY_COUNT; i++) {
        wide[i] = 1.25f + (float)i * (float)PLACE; /* 24 bits: both begin with the same */
        ((float *)(uintptr_t)a.tensor.gradient)[i] = (float)(PLACE / 50.0);
        ((float *)(uintptr_t)b.tensor.gradient)[i] = (float)(PLACE / 50.0);
    }
    assert_int_equal(
        msc_optim_split(optim, narrow.weights, wide, TINY_COUNT, b.tensor.weight, b.tensor.master, NULL),
        MSC_OK);
    for (step = 1; step <= TINY_STEPS; step++) {
        a.tensor.step = b.tensor.step = step;
        assert_int_equal(msc_optim_step(optim, &full, &a.tensor, 1, NULL), MSC_OK);
        assert_int_equal(msc_optim_step(optim, &narrow, &b.tensor, 1, NULL), MSC_OK);
    }
    masters = fixture_masters(&b, optim);
    for (i = 0; i < TINY_COUNT; i++) {
        double error = ((double)masters[i] - (double)wide[i]) / PLACE;

        /* a walk of single places with variance 1/50 × 49/50 a step; six deviations, and FP32's own roundings */
        assert_true(fabs(error) < 6.0 * sqrt(moved) + TINY_STEPS * 0.5 / 256);
        assert_true((double)masters[i] < 1.25 + i * PLACE - 0.4 * moved * PLACE);
        mean += error / TINY_COUNT;
    }
    assert_true(fabs(mean) < 6.0 * sqrt(moved) / sqrt(TINY_COUNT) + TINY_STEPS * 0.01 / 256);
    free(masters);
    fixture_end(&a);
    fixture_end(&b);
}

/* ---- training --------------------------------------------------------------------------------------------------- */

#define INPUTS 16u
#define HIDDEN 40u
#define CLASSES 5u
#define SAMPLES 512u
#define BATCH 64u

typedef struct problem {
    uint32_t hidden; /* 0: logistic regression, which is convex */
    uint32_t count;  /* parameters */
    float x[SAMPLES][INPUTS];
    uint32_t label[SAMPLES];
} problem;

static float normal(uint64_t *seed)
{
    float sum = 0.0f;
    int i;

    for (i = 0; i < 12; i++)
        sum += (float)fixture_random(seed) / 4294967296.0f;
    return sum - 6.0f;
}

/* Classes by a random quadratic of the inputs, one label in six wrong, so that the loss stays away from 0. Inputs have scales
   from 1 to 1/40: so do gradients within a block. */
static void make_problem(problem *made, uint32_t hidden, uint64_t seed)
{
    float wheel[CLASSES][INPUTS][2];
    uint32_t i, k, c;

    made->hidden = hidden;
    made->count = hidden == 0 ? CLASSES * (INPUTS + 1) : hidden * (INPUTS + 1) + CLASSES * (hidden + 1);
    for (c = 0; c < CLASSES; c++)
        for (k = 0; k < INPUTS; k++) {
            wheel[c][k][0] = normal(&seed);
            wheel[c][k][1] = normal(&seed) * 0.5f;
        }
    for (i = 0; i < SAMPLES; i++) {
        float best = -1e30f;

        for (k = 0; k < INPUTS; k++)
            made->x[i][k] = normal(&seed);
        for (c = 0; c < CLASSES; c++) {
            float score = 0.0f;

            for (k = 0; k < INPUTS; k++)
                score += wheel[c][k][0] * made->x[i][k] + wheel[c][k][1] * made->x[i][k] * made->x[i][k];
            if (score > best) {
                best = score;
                made->label[i] = c;
            }
        }
        if (fixture_random(&seed) % 6 == 0)
            made->label[i] = fixture_random(&seed) % CLASSES;
        for (k = 0; k < INPUTS; k++)
            made->x[i][k] *= powf(0.78f, (float)k);
    }
}

/* y = W x + b, row by row behind each other with the bias last. */
static void affine(const float *w, const float *x, uint32_t inputs, float *y, uint32_t outputs)
{
    uint32_t o, k;

    for (o = 0; o < outputs; o++) {
        const float *row = w + (size_t)o * (inputs + 1);

        y[o] = row[inputs];
        for (k = 0; k < inputs; k++)
            y[o] += row[k] * x[k];
    }
}

static void affine_gradient(const float *x, uint32_t inputs, const float *dy, float *dw, uint32_t outputs)
{
    uint32_t o, k;

    for (o = 0; o < outputs; o++) {
        float *row = dw + (size_t)o * (inputs + 1);

        row[inputs] += dy[o];
        for (k = 0; k < inputs; k++)
            row[k] += dy[o] * x[k];
    }
}

/* Cross entropy of one sample; adds its gradient if `dw` is not NULL. */
static double sample_loss(const problem *of, const float *w, uint32_t i, float *dw, float share)
{
    const float *out_w = w + (size_t)of->hidden * (INPUTS + 1);
    float h[HIDDEN], dh[HIDDEN], y[CLASSES], most = -1e30f, sum = 0.0f;
    const float *top = of->hidden == 0 ? of->x[i] : h;
    uint32_t width = of->hidden == 0 ? INPUTS : of->hidden;
    double loss;
    uint32_t c, k;

    if (of->hidden > 0) {
        affine(w, of->x[i], INPUTS, h, of->hidden);
        for (k = 0; k < of->hidden; k++)
            h[k] = h[k] > 0.0f ? h[k] : 0.1f * h[k];
    }
    affine(out_w, top, width, y, CLASSES);
    for (c = 0; c < CLASSES; c++)
        most = fmaxf(most, y[c]);
    for (c = 0; c < CLASSES; c++)
        sum += y[c] = expf(y[c] - most);
    loss = -log((double)(y[of->label[i]] / sum));
    if (dw == NULL)
        return loss;
    for (c = 0; c < CLASSES; c++)
        y[c] = (y[c] / sum - (float)(c == of->label[i])) * share;
    affine_gradient(top, width, y, dw + (size_t)of->hidden * (INPUTS + 1), CLASSES);
    for (k = 0; k < of->hidden; k++) {
        dh[k] = 0.0f;
        for (c = 0; c < CLASSES; c++)
            dh[k] += y[c] * out_w[(size_t)c * (width + 1) + k];
        dh[k] *= h[k] > 0.0f ? 1.0f : 0.1f;
    }
    if (of->hidden > 0)
        affine_gradient(of->x[i], INPUTS, dh, dw, of->hidden);
    return loss;
}

static double whole_loss(const problem *of, const float *w)
{
    double sum = 0.0;
    uint32_t i;

    for (i = 0; i < SAMPLES; i++)
        sum += sample_loss(of, w, i, NULL, 0.0f);
    return sum / SAMPLES;
}

/* The weights that the model computes with: BF16 where there are such. */
static void visible_weights(const fixture *state, float *w)
{
    msc_optim_array from = {state->tensor.weight, state->tensor.count,
                            state->rule.weights == MSC_OPTIM_WEIGHTS_FP32 ? MSC_OPTIM_FLOAT_FP32
                                                                          : MSC_OPTIM_FLOAT_BF16};

    assert_int_equal(msc_optim_convert(optim, w, MSC_OPTIM_FLOAT_FP32, &from, NULL), MSC_OK);
}

/* Loss on all samples after `steps` steps with a rate that falls to 0; masters count, as they would be saved. */
static double train(const problem *of, msc_optim_rule rule, uint32_t steps, uint64_t seed)
{
    fixture state = fixture_make(optim, &rule, of->count, 0, seed);
    float *w = malloc(of->count * sizeof *w);
    float *dw = malloc(of->count * sizeof *dw);
    msc_optim_array gradient = {dw, of->count, MSC_OPTIM_FLOAT_FP32};
    double rate = rule.learning_rate;
    double loss;
    uint64_t order = seed;
    uint64_t step;
    uint32_t i;

    assert_true(w != NULL && dw != NULL);
    for (step = 1; step <= steps; step++) {
        visible_weights(&state, w);
        memset(dw, 0, of->count * sizeof *dw);
        for (i = 0; i < BATCH; i++)
            (void)sample_loss(of, w, fixture_random(&order) % SAMPLES, dw, 1.0f / BATCH);
        assert_int_equal(msc_optim_convert(optim, (void *)(uintptr_t)state.tensor.gradient, rule.gradient,
                                           &gradient, NULL),
                         MSC_OK);
        state.rule.learning_rate = rate * (1.0 - (double)(step - 1) / steps);
        state.tensor.step = step;
        assert_int_equal(msc_optim_step(optim, &state.rule, &state.tensor, 1, NULL), MSC_OK);
    }
    free(w);
    w = fixture_masters(&state, optim);
    loss = whole_loss(of, w);
    free(w);
    free(dw);
    fixture_end(&state);
    return loss;
}

static msc_optim_rule narrowed(msc_optim_rule rule, msc_optim_moments moments)
{
    rule.moments = moments;
    rule.weights = MSC_OPTIM_WEIGHTS_MASTER_REST8;
    rule.gradient = MSC_OPTIM_FLOAT_BF16;
    return rule;
}

/* Mean over seeds: a single run of a network differs as much when one bit of FP32 does. */
static void compare(msc_optim_kind kind, double rate, uint32_t hidden, uint32_t steps, uint32_t seeds)
{
    static problem of;
    msc_optim_rule full = msc_optim_rule_default(kind);
    double loss[MSC_OPTIM_MOMENTS_COUNT] = {0.0};
    double first = 0.0;
    uint32_t seed;
    unsigned moments;

    full.learning_rate = rate;
    full.beta2 = kind == MSC_OPTIM_KIND_LION ? 0.99 : 0.999;
    full.momentum = kind == MSC_OPTIM_KIND_SGD ? 0.9 : 0.0;
    for (seed = 1; seed <= seeds; seed++) {
        make_problem(&of, hidden, seed);
        first += train(&of, full, 0, seed) / seeds;
        loss[0] += train(&of, full, steps, seed) / seeds;
        for (moments = MSC_OPTIM_MOMENTS_BF16; moments < MSC_OPTIM_MOMENTS_COUNT; moments++)
            loss[moments] += train(&of, narrowed(full, (msc_optim_moments)moments), steps, seed) / seeds;
    }
    print_message("kind %u: %.4f at first, FP32 %.5f, BF16 %+.3f %%, codes %+.3f %%\n", (unsigned)kind, first,
                  loss[0], 100.0 * (loss[1] / loss[0] - 1.0), 100.0 * (loss[2] / loss[0] - 1.0));
    assert_true(loss[0] < 0.75 * first); /* it does learn */
    assert_true(fabs(loss[1] / loss[0] - 1.0) < 0.005);
    assert_true(fabs(loss[2] / loss[0] - 1.0) < 0.005);
}

static void convex_problem(void **state)
{
    (void)state;
    compare(MSC_OPTIM_KIND_ADAMW, 0.03, 0, 600, 2);
    compare(MSC_OPTIM_KIND_SGD, 0.3, 0, 600, 2);
    compare(MSC_OPTIM_KIND_LION, 0.01, 0, 600, 2);
}

static void network(void **state)
{
    (void)state;
    compare(MSC_OPTIM_KIND_ADAMW, 0.01, HIDDEN, 400, 2);
    compare(MSC_OPTIM_KIND_SGD, 0.1, HIDDEN, 400, 2);
    compare(MSC_OPTIM_KIND_LION, 0.001, HIDDEN, 400, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiny_updates_are_not_lost),
        cmocka_unit_test(convex_problem),
        cmocka_unit_test(network),
    };

    return cmocka_run_group_tests_name("optim_learns", tests, fixture_begin, fixture_finish);
}
