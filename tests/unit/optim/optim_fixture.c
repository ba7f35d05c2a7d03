/* SPDX-License-Identifier: Apache-2.0 */
#include "optim_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint32_t fixture_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9E3779B97F4A7C15);

    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return (uint32_t)(x >> 32);
}

float fixture_float(uint64_t *state)
{
    uint32_t random = fixture_random(state);
    float x = (float)(random >> 8) / 16777216.0f * 2.0f - 1.0f;

    return x / (float)(1u << (random & 7u));
}

uint32_t fixture_bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

float fixture_from_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A context per optimizer, found again when the optimizer ends. */
static struct {
    msc_optim *optim;
    msc_context *ctx;
} made[32];

msc_optim *fixture_optim(msc_optim_isa isa, uint32_t threads)
{
    msc_optim_options options = msc_optim_options_default();
    msc_error err;
    size_t i = 0;

    while (made[i].optim != NULL)
        i++;
    assert_true(i < sizeof made / sizeof made[0]);
    options.isa = isa;
    options.thread_count = threads;
    assert_int_equal(msc_context_create(NULL, &made[i].ctx, NULL), MSC_OK);
    if (msc_optim_create(made[i].ctx, &options, &made[i].optim, &err) != MSC_OK)
        fail_msg("%s", err.message);
    return made[i].optim;
}

void fixture_optim_end(msc_optim *by)
{
    size_t i = 0;

    while (made[i].optim != by)
        i++;
    msc_optim_destroy(by);
    assert_int_equal(msc_context_held_bytes(made[i].ctx), 0);
    msc_context_destroy(made[i].ctx);
    made[i].optim = NULL;
}

msc_optim *optim;

int fixture_begin(void **state)
{
    (void)state;
    optim = fixture_optim(MSC_OPTIM_ISA_ANY, 1);
    return 0;
}

int fixture_begin_scalar(void **state)
{
    (void)state;
    optim = fixture_optim(MSC_OPTIM_ISA_SCALAR, 1);
    return 0;
}

int fixture_finish(void **state)
{
    (void)state;
    fixture_optim_end(optim);
    return 0;
}

msc_optim_rule fixture_rule(msc_optim_kind kind, msc_optim_float gradient, msc_optim_weights weights,
                            msc_optim_moments moments)
{
    msc_optim_rule rule = msc_optim_rule_default(kind);

    rule.gradient = gradient;
    rule.weights = weights;
    rule.moments = moments;
    rule.learning_rate = 0.0137;
    rule.weight_decay = 0.043;
    rule.beta2 = 0.97;
    rule.momentum = kind == MSC_OPTIM_KIND_SGD ? 0.85 : 0.0;
    rule.gradient_scale = 0.71f;
    return rule;
}

#define VARIANTS 6u

void fixture_every_rule(void (*each)(const msc_optim_rule *rule, const char *name))
{
    static const msc_optim_kind kinds[VARIANTS] = {MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_KIND_ADAM,
                                                   MSC_OPTIM_KIND_SGD,   MSC_OPTIM_KIND_SGD,
                                                   MSC_OPTIM_KIND_SGD,   MSC_OPTIM_KIND_LION};
    unsigned variant, gradient, weights, moments;
    char name[64];

    for (variant = 0; variant < VARIANTS; variant++)
        for (gradient = 0; gradient < MSC_OPTIM_FLOAT_COUNT; gradient++)
            for (weights = 0; weights < MSC_OPTIM_WEIGHTS_COUNT; weights++)
                for (moments = 0; moments < MSC_OPTIM_MOMENTS_COUNT; moments++) {
                    msc_optim_rule rule =
                        fixture_rule(kinds[variant], (msc_optim_float)gradient, (msc_optim_weights)weights,
                                     (msc_optim_moments)moments);

                    rule.momentum = variant == 2 ? 0.0 : rule.momentum;
                    rule.nesterov = variant == 4;
                    rule.maximize = variant == 1;
                    (void)snprintf(name, sizeof name, "variant %u gradient %u weights %u moments %u", variant,
                                   gradient, weights, moments);
                    each(&rule, name);
                }
}

static void *array(uint64_t bytes, size_t shift)
{
    char *memory;

    if (bytes == 0)
        return NULL;
    memory = calloc(1, (size_t)bytes + shift);
    assert_non_null(memory);
    return memory + shift;
}

static void free_array(const void *memory, size_t shift)
{
    if (memory != NULL)
        free((char *)(uintptr_t)memory - shift);
}

fixture fixture_make(msc_optim *by, const msc_optim_rule *rule, uint64_t count, size_t shift, uint64_t seed)
{
    fixture one;
    float *weights = malloc((size_t)count * sizeof *weights + 1);
    uint64_t i;

    memset(&one, 0, sizeof one);
    one.rule = *rule;
    one.shift = shift;
    assert_non_null(weights);
    assert_int_equal(msc_optim_tensor_sizes(rule, count, &one.sizes, NULL), MSC_OK);
    one.tensor.count = count;
    one.tensor.gradient = array(one.sizes.gradient_bytes, shift);
    one.tensor.weight = array(one.sizes.weight_bytes, shift);
    one.tensor.master = array(one.sizes.master_bytes, shift);
    one.tensor.moment1 = array(one.sizes.moment1_bytes, shift);
    one.tensor.moment2 = array(one.sizes.moment2_bytes, shift);
    one.tensor.scale1 = array(one.sizes.scale1_bytes, shift);
    one.tensor.scale2 = array(one.sizes.scale2_bytes, shift);
    for (i = 0; i < count; i++)
        weights[i] = fixture_float(&seed);
    if (rule->weights == MSC_OPTIM_WEIGHTS_FP32)
        memcpy(one.tensor.weight, weights, (size_t)count * sizeof *weights);
    else
        assert_int_equal(
            msc_optim_split(by, rule->weights, weights, count, one.tensor.weight, one.tensor.master, NULL),
            MSC_OK);
    free(weights);
    return one;
}

void fixture_end(fixture *one)
{
    free_array(one->tensor.gradient, one->shift);
    free_array(one->tensor.weight, one->shift);
    free_array(one->tensor.master, one->shift);
    free_array(one->tensor.moment1, one->shift);
    free_array(one->tensor.moment2, one->shift);
    free_array(one->tensor.scale1, one->shift);
    free_array(one->tensor.scale2, one->shift);
}

void fixture_gradient(fixture *one, msc_optim *by, uint64_t seed, uint64_t step)
{
    float *gradient = malloc((size_t)one->tensor.count * sizeof *gradient + 1);
    msc_optim_array from = {gradient, one->tensor.count, MSC_OPTIM_FLOAT_FP32};
    uint64_t state = seed * 1000003u + step;
    uint64_t i;

    assert_non_null(gradient);
    for (i = 0; i < one->tensor.count; i++)
        gradient[i] = fixture_float(&state);
    assert_int_equal(
        msc_optim_convert(by, (void *)(uintptr_t)one->tensor.gradient, one->rule.gradient, &from, NULL),
        MSC_OK);
    free(gradient);
}

void fixture_run(fixture *one, msc_optim *by, uint64_t from, uint64_t to, uint64_t seed)
{
    msc_error err;

    for (; from <= to; from++) {
        fixture_gradient(one, by, seed, from);
        one->tensor.step = from;
        if (msc_optim_step(by, &one->rule, &one->tensor, 1, &err) != MSC_OK)
            fail_msg("%s", err.message);
    }
}

static void same(const void *a, const void *b, uint64_t bytes, const char *name, const char *what)
{
    const unsigned char *x = a;
    const unsigned char *y = b;
    uint64_t i;

    for (i = 0; i < bytes; i++)
        if (x[i] != y[i])
            fail_msg("%s: %s differs at byte %llu of %llu", what, name, (unsigned long long)i,
                     (unsigned long long)bytes);
}

void fixture_same(const fixture *a, const fixture *b, const char *what)
{
    same(a->tensor.weight, b->tensor.weight, a->sizes.weight_bytes, "weight", what);
    same(a->tensor.master, b->tensor.master, a->sizes.master_bytes, "master", what);
    same(a->tensor.moment1, b->tensor.moment1, a->sizes.moment1_bytes, "moment1", what);
    same(a->tensor.moment2, b->tensor.moment2, a->sizes.moment2_bytes, "moment2", what);
    same(a->tensor.scale1, b->tensor.scale1, a->sizes.scale1_bytes, "scale1", what);
    same(a->tensor.scale2, b->tensor.scale2, a->sizes.scale2_bytes, "scale2", what);
}

float *fixture_masters(const fixture *one, msc_optim *by)
{
    float *masters = malloc((size_t)one->tensor.count * sizeof *masters);

    assert_non_null(masters);
    if (one->rule.weights == MSC_OPTIM_WEIGHTS_FP32)
        memcpy(masters, one->tensor.weight, (size_t)one->sizes.weight_bytes);
    else
        assert_int_equal(msc_optim_join(by, one->rule.weights, one->tensor.weight, one->tensor.master,
                                        one->tensor.count, masters, NULL),
                         MSC_OK);
    return masters;
}
