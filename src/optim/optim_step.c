/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A step: for each strip, gradient, weight and moments as floats, the update, and all of it back.
 *
 *      gradient  FP32  where it is ──────────────┐
 *                else  widened into a buffer ────┤
 *      weight    FP32, or FP32 master: in place ─┼──► update ──► weight narrowed, master split,
 *                else  joined into a buffer ─────┤               moments narrowed or encoded
 *      moments   FP32  in place ─────────────────┤
 *                else  widened or decoded ───────┘
 *
 * The buffers stay in the first-level cache, so memory sees each array once. All kinds of types combine, and what is
 * FP32 anyway is not copied.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "optim/optim_cuda.h"
#include "optim/optim_internal.h"

/* Elements of a call of a kernel whose arrays are all in place. */
#define LONG_RUN (64u * MSC__STRIP)

typedef struct step_job {
    const msc_optim *optim;
    const msc_optim_rule *rule;
    const msc_optim_tensor *tensors;
    uint64_t tensor_count;
} step_job;

typedef struct step_buffers {
    float gradient[MSC__STRIP];
    float weight[MSC__STRIP];
    uint32_t random[MSC__STRIP];
    msc__buffers moments;
} step_buffers;

static const msc__f32 *load_gradient(const step_job *job, const msc_optim_tensor *tensor, uint64_t at,
                                     uint32_t count, msc__f32 *buffer)
{
    if (job->rule->gradient == MSC_OPTIM_FLOAT_FP32)
        return (const msc__f32 *)tensor->gradient + at;
    job->optim->kernels->widen[job->rule->gradient](buffer, (const msc__u16 *)tensor->gradient + at, count);
    return buffer;
}

static msc__f32 *load_weight(const step_job *job, const msc_optim_tensor *tensor, uint64_t at, uint32_t count,
                             msc__f32 *buffer)
{
    const msc__u16 *upper = (const msc__u16 *)tensor->weight + at;

    switch (job->rule->weights) {
    case MSC_OPTIM_WEIGHTS_FP32:
        return (msc__f32 *)tensor->weight + at;
    case MSC_OPTIM_WEIGHTS_MASTER_FP32:
        return (msc__f32 *)tensor->master + at;
    case MSC_OPTIM_WEIGHTS_MASTER_REST16:
        job->optim->kernels->join_rest16(buffer, upper, (const msc__u16 *)tensor->master + at, count);
        return buffer;
    default:
        MSC__ASSERT(job->rule->weights == MSC_OPTIM_WEIGHTS_MASTER_REST8);
        job->optim->kernels->join_rest8(buffer, upper, (const uint8_t *)tensor->master + at, count);
        return buffer;
    }
}

static void store_weight(const step_job *job, const msc_optim_tensor *tensor, const msc__stored *stored,
                         const msc__f32 *from)
{
    const msc__optim_kernels *kernels = job->optim->kernels;
    uint64_t at = stored->at;
    uint32_t count = stored->count;
    msc__u16 *upper = (msc__u16 *)tensor->weight + at;

    switch (job->rule->weights) {
    case MSC_OPTIM_WEIGHTS_FP32:
        return;
    case MSC_OPTIM_WEIGHTS_MASTER_FP32:
        kernels->narrow[MSC_OPTIM_FLOAT_BF16](upper, from, count);
        return;
    case MSC_OPTIM_WEIGHTS_MASTER_REST16:
        kernels->split_rest16(upper, (msc__u16 *)tensor->master + at, from, count);
        return;
    default:
        MSC__ASSERT(job->rule->weights == MSC_OPTIM_WEIGHTS_MASTER_REST8);
        kernels->split_rest8(upper, (uint8_t *)tensor->master + at, from, count, stored->random);
    }
}

static void update(const step_job *job, const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g,
                   msc__moments moments, uint32_t count)
{
    const msc__optim_kernels *kernels = job->optim->kernels;
    msc__sgd_mode mode;

    switch (job->rule->kind) {
    case MSC_OPTIM_KIND_SGD:
        mode = job->rule->nesterov != 0 ? MSC__SGD_NESTEROV : MSC__SGD_MOMENTUM;
        mode = moments.of1 != NULL ? mode : MSC__SGD_PLAIN;
        kernels->sgd[mode](by, w, g, moments.of1, count);
        return;
    case MSC_OPTIM_KIND_LION:
        kernels->lion(by, w, g, moments.of1, count);
        return;
    default:
        MSC__ASSERT(moments.of1 != NULL && moments.of2 != NULL);
        kernels->adam(by, w, g, moments, count);
    }
}

/* Adam with codes has a kernel of its own, for whole blocks and the usual types. */
static bool is_usual(const step_job *job, uint32_t count)
{
    const msc_optim_rule *rule = job->rule;

    return count % MSC_OPTIM_BLOCK == 0 && rule->gradient != MSC_OPTIM_FLOAT_FP16 &&
           (rule->weights == MSC_OPTIM_WEIGHTS_FP32 || rule->weights == MSC_OPTIM_WEIGHTS_MASTER_REST8);
}

static void step_codes(const step_job *job, const msc__optim_numbers *by, const msc_optim_tensor *tensor,
                       uint64_t at, uint32_t count)
{
    bool wide = job->rule->weights == MSC_OPTIM_WEIGHTS_FP32;
    uint32_t gradient_bytes = msc__float_bytes(job->rule->gradient);
    msc__adam_work work = {
        .gradient = (const char *)tensor->gradient + at * gradient_bytes,
        .type = job->rule->gradient,
        .weight = (char *)tensor->weight + at * (wide ? 4 : 2),
        .rest = wide ? NULL : (uint8_t *)tensor->master + at,
        .codes = msc__codes_begin(job->rule, tensor, at, count, NULL),
        .blocks = count / MSC_OPTIM_BLOCK,
        .first = msc__random_first(tensor->step, tensor->first + at),
    };

    MSC__ASSERT(is_usual(job, count) && work.blocks > 0);
    job->optim->kernels->adam_codes(by, &work);
}

/* Any types, any count: as floats, followed by zeros, in buffers. */
static void step_codes_buffered(const step_job *job, const msc__optim_numbers *by,
                                const msc_optim_tensor *tensor, uint64_t at, uint32_t count,
                                step_buffers *buffers)
{
    const msc__f32 *g = load_gradient(job, tensor, at, count, buffers->gradient);
    msc__f32 *w = load_weight(job, tensor, at, count, buffers->weight);
    msc__stored stored = {at, count, buffers->random};
    uint32_t bytes = count * (uint32_t)sizeof *w;
    msc__adam_work work = {
        .gradient = buffers->gradient,
        .weight = buffers->weight,
        .codes = msc__codes_begin(job->rule, tensor, at, count, &buffers->moments.pad),
        .blocks = msc__blocks(count),
        .first = msc__random_first(tensor->step, tensor->first + at),
    };

    MSC__ASSERT(count > 0 && count <= MSC__STRIP && bytes <= sizeof buffers->gradient);
    if (g != buffers->gradient)
        memcpy(buffers->gradient, g, bytes);
    if (w != buffers->weight)
        memcpy(buffers->weight, w, bytes);
    memset(buffers->gradient + count, 0, sizeof buffers->gradient - bytes);
    memset(buffers->weight + count, 0, sizeof buffers->weight - bytes);
    job->optim->kernels->adam_codes(by, &work);
    msc__codes_end(job->rule, tensor, at, count, &buffers->moments.pad);
    if (w != buffers->weight)
        memcpy(w, buffers->weight, bytes);
    job->optim->kernels->random(buffers->random, work.first, count);
    store_weight(job, tensor, &stored, w);
}

/* All else. */
static void step_strip(const step_job *job, const msc__optim_numbers *by, const msc_optim_tensor *tensor,
                       uint64_t at, uint32_t count, step_buffers *buffers)
{
    const msc_optim_rule *rule = job->rule;
    const msc__f32 *g = load_gradient(job, tensor, at, count, buffers->gradient);
    msc__f32 *w = load_weight(job, tensor, at, count, buffers->weight);
    msc__moments moments = msc__moments_load(job->optim, rule, tensor, at, count, &buffers->moments);
    msc__stored stored = {at, count, buffers->random};

    if (rule->weights == MSC_OPTIM_WEIGHTS_MASTER_REST8 ||
        (rule->moments != MSC_OPTIM_MOMENTS_FP32 && msc__moment_count(rule) > 0))
        job->optim->kernels->random(buffers->random, msc__random_first(tensor->step, tensor->first + at),
                                    msc__blocks(count) * MSC_OPTIM_BLOCK);
    update(job, by, w, g, moments, count);
    msc__moments_store(job->optim, rule, tensor, &stored, &buffers->moments);
    store_weight(job, tensor, &stored, w);
}

/* All in place: without buffers, strips need not be worked on one by one. */
static bool is_in_place(const msc_optim_rule *rule)
{
    return rule->gradient == MSC_OPTIM_FLOAT_FP32 && rule->weights == MSC_OPTIM_WEIGHTS_FP32 &&
           (rule->moments == MSC_OPTIM_MOMENTS_FP32 || msc__moment_count(rule) == 0);
}

static void step_in_place(const step_job *job, const msc__optim_numbers *by, const msc_optim_tensor *tensor,
                          uint64_t begin, uint64_t end)
{
    uint64_t at = begin * MSC__STRIP;
    uint64_t stop = end * MSC__STRIP < tensor->count ? end * MSC__STRIP : tensor->count;

    MSC__ASSERT(is_in_place(job->rule) && at < stop);
    while (at < stop) {
        uint32_t count = stop - at < LONG_RUN ? (uint32_t)(stop - at) : LONG_RUN;
        msc__moments moments = msc__moments_load(job->optim, job->rule, tensor, at, count, NULL);

        update(job, by, (msc__f32 *)tensor->weight + at, (const msc__f32 *)tensor->gradient + at, moments,
               count);
        at += count;
    }
}

/* Strips [begin, end) of one tensor. */
static void step_tensor(const step_job *job, const msc_optim_tensor *tensor, uint64_t begin, uint64_t end)
{
    const msc_optim_rule *rule = job->rule;
    msc__optim_numbers by = msc__rule_numbers(rule, tensor->step);
    step_buffers buffers;
    bool codes = rule->moments == MSC_OPTIM_MOMENTS_CODE8 && msc__moment_count(rule) == 2;

    MSC__ASSERT(begin < end && end <= msc__strips(tensor->count));
    if (is_in_place(rule)) {
        step_in_place(job, &by, tensor, begin, end);
        return;
    }
    for (; begin < end; begin++) {
        uint64_t at = begin * MSC__STRIP;
        uint32_t count = msc__strip_count(tensor->count, begin);

        if (!codes)
            step_strip(job, &by, tensor, at, count, &buffers);
        else if (is_usual(job, count))
            step_codes(job, &by, tensor, at, count);
        else
            step_codes_buffered(job, &by, tensor, at, count, &buffers);
    }
}

/* Strips are numbered through all tensors. */
static void step_strips(void *argument, uint64_t begin, uint64_t end)
{
    const step_job *job = argument;
    uint64_t first = 0; /* number of the tensor's first strip */
    uint64_t i;

    for (i = 0; i < job->tensor_count && begin < end; i++) {
        uint64_t after = first + msc__strips(job->tensors[i].count);
        uint64_t stop = after < end ? after : end;

        if (begin < stop) {
            step_tensor(job, &job->tensors[i], begin - first, stop - first);
            begin = stop;
        }
        MSC__ASSERT(begin >= end || begin >= after); /* what lies in this tensor is done */
        first = after;
    }
    MSC__ASSERT(begin == end);
}

/* Its first moment, which has a second one beside it; its weight, where there are none. */
static const void *where_strip(const void *argument, uint64_t strip)
{
    const step_job *job = argument;
    const msc_optim_tensor *tensor = job->tensors;
    msc_optim_sizes before;

    while (strip >= msc__strips(tensor->count)) {
        strip -= msc__strips(tensor->count);
        tensor++;
    }
    MSC__ASSERT(tensor < job->tensors + job->tensor_count);
    (void)msc__rule_sizes(job->rule, strip * MSC__STRIP, &before, NULL); /* a tensor's part: checked */
    if (msc__moment_count(job->rule) > 0)
        return (const char *)tensor->moment1 + before.moment1_bytes;
    return (const char *)tensor->weight + before.weight_bytes;
}

static msc_status check(const msc_optim_rule *rule, const msc_optim_tensor *tensors, uint64_t tensor_count,
                        uint64_t *strips, msc_error *err)
{
    msc_status status = MSC_OK;
    uint64_t i;

    if (tensors == NULL && tensor_count > 0)
        return msc__fail(err, MSC_EINVAL, "tensors is NULL and tensor_count %llu",
                         (unsigned long long)tensor_count);
    for (i = 0; status == MSC_OK && i < tensor_count; i++) {
        status = msc__tensor_check(rule, &tensors[i], i, false, err);
        *strips += msc__strips(tensors[i].count);
    }
    return status;
}

msc_status msc_optim_step(msc_optim *optim, const msc_optim_rule *rule, const msc_optim_tensor *tensors,
                          uint64_t tensor_count, msc_error *err)
{
    msc_optim_rule used;
    step_job job = {optim, &used, tensors, tensor_count};
    uint64_t strips = 0;
    msc_status status;

    if (optim == NULL)
        return msc__fail(err, MSC_EINVAL, "optim is NULL");
    status = msc__rule_read(rule, &used, err);
    if (status == MSC_OK)
        status = check(&used, tensors, tensor_count, &strips, err);
    if (status == MSC_OK && optim->card != NULL)
        return msc__card_step_all(optim->card, &used, tensors, tensor_count, err);
    if (status == MSC_OK)
        msc__pool_run(&optim->pool, strips, MSC__STRIPS_EACH, step_strips, where_strip, &job);
    return status;
}
