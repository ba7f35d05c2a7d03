/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rules: their defaults, what is allowed in them, and the numbers that the formulas take from them.
 *
 * Numbers are computed in double with the operations of torch.optim (Python's `**` is the C library's pow), and rounded to
 * FP32 at the end, which is when torch does it.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"
#include "optim/optim_internal.h"

void msc_optim_rule_init(msc_optim_kind kind, msc_optim_rule *out, size_t struct_bytes)
{
    msc_optim_rule rule;

    memset(&rule, 0, sizeof rule);
    rule.kind = kind;
    rule.learning_rate = kind == MSC_OPTIM_KIND_LION ? 1e-4 : 1e-3;
    rule.beta1 = 0.9;
    rule.beta2 = kind == MSC_OPTIM_KIND_LION ? 0.99 : 0.999;
    rule.epsilon = 1e-8;
    rule.weight_decay = kind == MSC_OPTIM_KIND_ADAMW ? 0.01 : 0.0;
    rule.gradient_scale = 1.0f;
    msc__sized_init(out, struct_bytes, &rule, sizeof rule);
}

static bool is_adam(const msc_optim_rule *rule)
{
    return rule->kind == MSC_OPTIM_KIND_ADAM || rule->kind == MSC_OPTIM_KIND_ADAMW;
}

uint32_t msc__moment_count(const msc_optim_rule *rule)
{
    if (rule->kind == MSC_OPTIM_KIND_SGD)
        return rule->momentum != 0.0;
    return is_adam(rule) ? 2 : 1;
}

/* ---- checks -------------------------------------------------------------------------------------------- */

static msc_status check_enum(const char *name, uint32_t value, uint32_t count, msc_error *err)
{
    if (value >= count)
        return msc__fail(err, MSC_EINVAL, "%s is %u, allowed are 0 to %u", name, value, count - 1);
    return MSC_OK;
}

/* Larger ones would not be finite as FP32. */
static msc_status check_positive(const char *name, double value, msc_error *err)
{
    if (!(value >= 0.0 && value <= (double)FLT_MAX))
        return msc__fail(err, MSC_EINVAL, "%s is %g, allowed are finite numbers from 0", name, value);
    return MSC_OK;
}

static msc_status check_beta(const char *name, double value, msc_error *err)
{
    if (!(value >= 0.0 && value < 1.0))
        return msc__fail(err, MSC_EINVAL, "%s is %g, allowed is [0, 1)", name, value);
    return MSC_OK;
}

static msc_status check_averages(const msc_optim_rule *rule, msc_error *err)
{
    msc_status status = check_beta("beta1", rule->beta1, err);

    if (status == MSC_OK)
        status = check_beta("beta2", rule->beta2, err);
    if (status == MSC_OK && is_adam(rule))
        status = check_positive("epsilon", rule->epsilon, err);
    return status;
}

static msc_status check_sgd(const msc_optim_rule *rule, msc_error *err)
{
    msc_status status = check_positive("momentum", rule->momentum, err);

    if (status != MSC_OK)
        return status;
    if (!(fabs(rule->dampening) <= (double)FLT_MAX))
        return msc__fail(err, MSC_EINVAL, "dampening is %g, allowed are finite numbers", rule->dampening);
    if (rule->nesterov != 0 && (rule->momentum == 0.0 || rule->dampening != 0.0))
        return msc__fail(err, MSC_EINVAL,
                         "nesterov is %u with momentum %g and dampening %g, allowed are momentum > 0 and "
                         "dampening 0 with it",
                         rule->nesterov, rule->momentum, rule->dampening);
    return MSC_OK;
}

static msc_status check_types(const msc_optim_rule *rule, msc_error *err)
{
    msc_status status = check_enum("kind", (uint32_t)rule->kind, MSC_OPTIM_KIND_COUNT, err);

    if (status == MSC_OK)
        status = msc__float_check(rule->gradient, "gradient", err);
    if (status == MSC_OK)
        status = check_enum("weights", (uint32_t)rule->weights, MSC_OPTIM_WEIGHTS_COUNT, err);
    if (status == MSC_OK)
        status = check_enum("moments", (uint32_t)rule->moments, MSC_OPTIM_MOMENTS_COUNT, err);
    return status;
}

static msc_status check(const msc_optim_rule *rule, msc_error *err)
{
    msc_status status = check_types(rule, err);

    if (status == MSC_OK)
        status = check_positive("learning_rate", rule->learning_rate, err);
    if (status == MSC_OK)
        status = check_positive("weight_decay", rule->weight_decay, err);
    if (status != MSC_OK)
        return status;
    if (!(fabsf(rule->gradient_scale) <= FLT_MAX))
        return msc__fail(err, MSC_EINVAL, "gradient_scale is %g, allowed are finite numbers",
                         (double)rule->gradient_scale);
    return rule->kind == MSC_OPTIM_KIND_SGD ? check_sgd(rule, err) : check_averages(rule, err);
}

msc_status msc__rule_read(const msc_optim_rule *given, msc_optim_rule *out, msc_error *err)
{
    size_t least_bytes = MSC__THROUGH(msc_optim_rule, kind);
    msc_status status;

    if (given == NULL)
        return msc__fail(err, MSC_EINVAL, "rule is NULL");
    msc_optim_rule_init(given->struct_bytes >= least_bytes ? given->kind : MSC_OPTIM_KIND_ADAMW, out,
                        sizeof *out);
    status = MSC__READ_OPTIONS("rule.", msc_optim_rule, moments, given, out, err);
    return status == MSC_OK ? check(out, err) : status;
}

msc_status msc__float_check(msc_optim_float type, const char *what, msc_error *err)
{
    return check_enum(what, (uint32_t)type, MSC_OPTIM_FLOAT_COUNT, err);
}

msc_status msc__form_check(msc_optim_weights form, msc_error *err)
{
    if (form == MSC_OPTIM_WEIGHTS_FP32 || form >= MSC_OPTIM_WEIGHTS_COUNT)
        return msc__fail(err, MSC_EINVAL, "form is %u, allowed are 1 to %u", (unsigned)form,
                         (unsigned)MSC_OPTIM_WEIGHTS_COUNT - 1);
    return MSC_OK;
}

/* ---- sizes --------------------------------------------------------------------------------------------- */

uint32_t msc__float_bytes(msc_optim_float type)
{
    return type == MSC_OPTIM_FLOAT_FP32 ? 4 : 2;
}

msc_status msc__rule_sizes(const msc_optim_rule *rule, uint64_t count, msc_optim_sizes *out, msc_error *err)
{
    static const uint8_t weight_bytes[] = {4, 2, 2, 2};
    static const uint8_t master_bytes[] = {0, 4, 2, 1};
    static const uint8_t moment_bytes[] = {4, 2, 1};
    uint64_t blocks = count / MSC_OPTIM_BLOCK + (count % MSC_OPTIM_BLOCK != 0);
    uint32_t moments;

    if (count > MSC__MOST_ELEMENTS)
        return msc__fail(err, MSC_EOVERFLOW, "count is %llu, allowed are 0 to %llu",
                         (unsigned long long)count, (unsigned long long)MSC__MOST_ELEMENTS);
    MSC__ASSERT(rule->weights < MSC_OPTIM_WEIGHTS_COUNT && rule->moments < MSC_OPTIM_MOMENTS_COUNT);
    moments = msc__moment_count(rule);
    memset(out, 0, sizeof *out);
    out->gradient_bytes = count * msc__float_bytes(rule->gradient);
    out->weight_bytes = count * weight_bytes[rule->weights];
    out->master_bytes = count * master_bytes[rule->weights];
    out->moment1_bytes = moments >= 1 ? count * moment_bytes[rule->moments] : 0;
    out->moment2_bytes = moments == 2 ? count * moment_bytes[rule->moments] : 0;
    if (rule->moments == MSC_OPTIM_MOMENTS_CODE8) {
        out->scale1_bytes = moments >= 1 ? blocks : 0;
        out->scale2_bytes = moments == 2 ? blocks : 0;
    }
    return MSC_OK;
}

msc_status msc_optim_tensor_sizes(const msc_optim_rule *rule, uint64_t count, msc_optim_sizes *out,
                                  msc_error *err)
{
    msc_optim_rule used = {0};
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "out is NULL");
    status = msc__rule_read(rule, &used, err);
    return status == MSC_OK ? msc__rule_sizes(&used, count, out, err) : status;
}

/* ---- numbers ------------------------------------------------------------------------------------------- */

static void fill_adam(const msc_optim_rule *rule, double step, msc__optim_numbers *by)
{
    double correction1 = 1.0 - pow(rule->beta1, step);
    double correction2 = 1.0 - pow(rule->beta2, step);

    MSC__ASSERT(correction1 >= 0.0 && correction1 <= 1.0 && correction2 >= 0.0 && correction2 <= 1.0);
    by->rate = (float)-(rule->learning_rate / correction1);
    by->add1 = (float)(1.0 - rule->beta1);
    by->average2 = (float)rule->beta2;
    by->add2 = (float)(1.0 - rule->beta2);
    by->root2 = (float)pow(correction2, 0.5);
    by->inverse2 = (float)(1.0 / pow(correction2, 0.5));
    by->epsilon = (float)rule->epsilon;
    if (rule->moments == MSC_OPTIM_MOMENTS_CODE8)
        by->limit = MSC__ROOT_LIMIT;
}

static void fill_sgd(const msc_optim_rule *rule, uint64_t step, msc__optim_numbers *by)
{
    by->average1 = step == 1 ? 0.0f : (float)rule->momentum;
    by->add1 = step == 1 ? 1.0f : (float)(1.0 - rule->dampening);
    by->lookahead = (float)rule->momentum;
}

static void fill_lion(const msc_optim_rule *rule, msc__optim_numbers *by)
{
    by->average1 = (float)rule->beta1;
    by->add1 = (float)(1.0 - rule->beta1);
    by->average2 = (float)rule->beta2;
    by->add2 = (float)(1.0 - rule->beta2);
}

msc__optim_numbers msc__rule_numbers(const msc_optim_rule *rule, uint64_t step)
{
    bool shrinks = rule->kind == MSC_OPTIM_KIND_ADAMW || rule->kind == MSC_OPTIM_KIND_LION;
    msc__optim_numbers by;

    MSC__ASSERT(step > 0); /* steps are counted from 1 */
    memset(&by, 0, sizeof by);
    by.factor = rule->maximize != 0 ? -rule->gradient_scale : rule->gradient_scale;
    by.limit = INFINITY;
    by.l2 = shrinks ? 0.0f : (float)rule->weight_decay;
    by.keep = shrinks ? (float)(1.0 - rule->learning_rate * rule->weight_decay) : 1.0f;
    by.rate = (float)-rule->learning_rate;
    if (is_adam(rule))
        fill_adam(rule, (double)step, &by);
    else if (rule->kind == MSC_OPTIM_KIND_SGD)
        fill_sgd(rule, step, &by);
    else
        fill_lion(rule, &by);
    return by;
}

uint32_t msc__random_first(uint64_t step, uint64_t index)
{
    uint64_t x = step * UINT64_C(0x9E3779B97F4A7C15);

    /* The finisher of splitmix64: neighbouring steps get unrelated numbers. */
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    x = (x >> 32) ^ (x >> 1);
    return ((uint32_t)index + (uint32_t)x) * MSC__RANDOM_STEP;
}
