/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fifty steps against torch.optim, from what torch left behind (torch_steps.h).
 *
 * A plain second implementation, element by element, can round as torch does, which fuses a multiplication and an
 * addition in `lerp`, `addcmul` and `add(alpha=...)`, or as the library does, which does not. In the first way it has to give
 * torch's bits, in the second the library's: so that is all the difference there is.
 */
#include "optim_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "torch_steps.h"

typedef struct plain_state {
    float w, m, v;
} plain_state;

/* a + b c, in one rounding or two. */
static float multiply_add(int fused, float a, float b, float c)
{
    float product = b * c;

    return fused ? fmaf(b, c, a) : a + product;
}

/* torch/optim/adam.py, _single_tensor_adam */
static void plain_adam(const msc_optim_rule *rule, int fused, float g, uint32_t step, plain_state *s)
{
    double correction1 = 1.0 - pow(rule->beta1, step);
    double correction2 = 1.0 - pow(rule->beta2, step);
    double step_size = rule->learning_rate / correction1;
    float denominator;

    if (rule->maximize != 0)
        g = -g;
    if (rule->weight_decay != 0.0 && rule->kind == MSC_OPTIM_KIND_ADAMW)
        s->w *= (float)(1.0 - rule->learning_rate * rule->weight_decay);
    else if (rule->weight_decay != 0.0)
        g = multiply_add(fused, g, s->w, (float)rule->weight_decay);
    s->m = multiply_add(fused, s->m, (float)(1.0 - rule->beta1), g - s->m);
    s->v *= (float)rule->beta2;
    s->v = multiply_add(fused, s->v, (float)(1.0 - rule->beta2) * g, g);
    denominator = sqrtf(s->v) / (float)sqrt(correction2);
    denominator += (float)rule->epsilon;
    s->w += (float)-step_size * s->m / denominator;
}

/* torch/optim/sgd.py, _single_tensor_sgd */
static void plain_sgd(const msc_optim_rule *rule, int fused, float g, uint32_t step, plain_state *s)
{
    if (rule->weight_decay != 0.0)
        g = multiply_add(fused, g, s->w, (float)rule->weight_decay);
    if (rule->momentum != 0.0) {
        if (step == 1) {
            s->m = g;
        } else {
            s->m *= (float)rule->momentum;
            s->m = multiply_add(fused, s->m, g, (float)(1.0 - rule->dampening));
        }
        g = rule->nesterov != 0 ? multiply_add(fused, g, s->m, (float)rule->momentum) : s->m;
    }
    s->w = multiply_add(fused, s->w, g, (float)-rule->learning_rate);
}

static msc_optim_rule rule_named(const char *name)
{
    int sgd = strncmp(name, "sgd", 3) == 0;
    msc_optim_kind kind = sgd ? MSC_OPTIM_KIND_SGD : MSC_OPTIM_KIND_ADAM;
    msc_optim_rule rule;

    if (strcmp(name, "adamw") == 0)
        kind = MSC_OPTIM_KIND_ADAMW;
    rule = msc_optim_rule_default(kind);
    rule.learning_rate = sgd ? 0.05 : 3e-3;
    if (strcmp(name, "adamw") == 0 || strcmp(name, "adam") == 0)
        rule.weight_decay = 0.05;
    if (strcmp(name, "adam") == 0) {
        rule.beta1 = 0.8;
        rule.beta2 = 0.95;
    }
    rule.maximize = strcmp(name, "adam_maximize") == 0;
    if (strcmp(name, "sgd") == 0 || strcmp(name, "sgd_momentum") == 0)
        rule.weight_decay = 0.01;
    rule.momentum = strcmp(name, "sgd_momentum") == 0 || strcmp(name, "sgd_nesterov") == 0 ? 0.9 : 0.0;
    rule.dampening = strcmp(name, "sgd_momentum") == 0 ? 0.25 : 0.0;
    rule.nesterov = strcmp(name, "sgd_nesterov") == 0;
    return rule;
}

static float first_weight(uint32_t i)
{
    return ((float)i - 15.5f) / 8.0f;
}

static plain_state plain_run(const msc_optim_rule *rule, int fused, uint32_t i)
{
    plain_state s = {first_weight(i), 0.0f, 0.0f};
    uint32_t step;

    for (step = 1; step <= TORCH_STEPS; step++)
        (rule->kind == MSC_OPTIM_KIND_SGD ? plain_sgd : plain_adam)(rule, fused, torch_gradient(i, step),
                                                                    step, &s);
    return s;
}

static void plain_is_torch(void **state)
{
    size_t k;
    uint32_t i;

    (void)state;
    for (k = 0; k < sizeof torch_recorded / sizeof torch_recorded[0]; k++) {
        const torch_steps *torch = &torch_recorded[k];
        msc_optim_rule rule = rule_named(torch->name);

        for (i = 0; i < TORCH_COUNT; i++) {
            plain_state s = plain_run(&rule, 1, i);

            if (fixture_bits(s.w) != torch->arrays[0][i] || fixture_bits(s.m) != torch->arrays[1][i] ||
                fixture_bits(s.v) != torch->arrays[2][i])
                fail_msg("%s, element %u: %.9g %.9g %.9g, torch has %.9g %.9g %.9g", torch->name, i,
                         (double)s.w, (double)s.m, (double)s.v,
                         (double)fixture_from_bits(torch->arrays[0][i]),
                         (double)fixture_from_bits(torch->arrays[1][i]),
                         (double)fixture_from_bits(torch->arrays[2][i]));
        }
    }
}

typedef struct library_run {
    float w[TORCH_COUNT], m[TORCH_COUNT], v[TORCH_COUNT];
} library_run;

static library_run run_library(const msc_optim_rule *rule)
{
    library_run run;
    float g[TORCH_COUNT];
    msc_optim_tensor tensor = {
        .count = TORCH_COUNT, .gradient = g, .weight = run.w, .moment1 = run.m, .moment2 = run.v};
    uint32_t i;

    memset(&run, 0, sizeof run);
    for (i = 0; i < TORCH_COUNT; i++)
        run.w[i] = first_weight(i);
    for (tensor.step = 1; tensor.step <= TORCH_STEPS; tensor.step++) {
        for (i = 0; i < TORCH_COUNT; i++)
            g[i] = torch_gradient(i, (uint32_t)tensor.step);
        assert_int_equal(msc_optim_step(optim, rule, &tensor, 1, NULL), MSC_OK);
    }
    return run;
}

static void library_is_plain(void **state)
{
    size_t k;
    uint32_t i;

    (void)state;
    for (k = 0; k < sizeof torch_recorded / sizeof torch_recorded[0]; k++) {
        const torch_steps *torch = &torch_recorded[k];
        msc_optim_rule rule = rule_named(torch->name);
        library_run run = run_library(&rule);

        for (i = 0; i < TORCH_COUNT; i++) {
            plain_state s = plain_run(&rule, 0, i);
            float there = fixture_from_bits(torch->arrays[0][i]);

            assert_int_equal(fixture_bits(run.w[i]), fixture_bits(s.w));
            assert_int_equal(fixture_bits(run.m[i]), fixture_bits(s.m));
            assert_int_equal(fixture_bits(run.v[i]), fixture_bits(s.v));
            /* Fifty steps whose roundings differ by half a last place each: 2^-24 of what the weight was at most, 2. */
            assert_true(fabsf(run.w[i] - there) <= (float)TORCH_STEPS * 0x1p-23f);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_is_torch),
        cmocka_unit_test(library_is_plain),
    };

    return cmocka_run_group_tests_name("optim_torch", tests, fixture_begin, fixture_finish);
}
