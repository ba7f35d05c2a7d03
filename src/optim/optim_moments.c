/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moments of a strip as floats and back, whatever they are stored as; and reading and writing those of a whole tensor.
 *
 * FP32 moments are worked on where they are: `load` returns their address, and there is nothing to put back.
 */
#include "base/error.h"
#include "optim/optim_internal.h"

static msc__f32 *load_bf16(const msc_optim *optim, const void *moment, uint64_t at, uint32_t count,
                           msc__f32 *buffer)
{
    optim->kernels->widen[MSC_OPTIM_FLOAT_BF16](buffer, (const msc__u16 *)moment + at, count);
    return buffer;
}

static msc__codes codes_at(const msc_optim_tensor *tensor, uint32_t moments, uint64_t at)
{
    uint64_t block = at / MSC_OPTIM_BLOCK;
    msc__codes codes = {(uint8_t *)tensor->moment1 + at, tensor->scale1 + block, NULL, NULL};

    if (moments == 2) {
        codes.code2 = (uint8_t *)tensor->moment2 + at;
        codes.scale2 = tensor->scale2 + block;
    }
    return codes;
}

msc__moments msc__moments_load(const msc_optim *optim, const msc_optim_rule *rule,
                               const msc_optim_tensor *tensor, uint64_t at, uint32_t count,
                               msc__moments buffers)
{
    uint32_t moments = msc__moment_count(rule);
    msc__moments loaded = {NULL, NULL};
    msc__codes codes;

    if (moments == 0)
        return loaded;
    if (rule->moments == MSC_OPTIM_MOMENTS_CODE8) {
        codes = codes_at(tensor, moments, at);
        if (moments == 2)
            optim->kernels->decode_adam(buffers.of1, buffers.of2, &codes, count);
        else
            optim->kernels->decode_signed(buffers.of1, &codes, count);
        return buffers;
    }
    if (rule->moments == MSC_OPTIM_MOMENTS_FP32) {
        loaded.of1 = (msc__f32 *)tensor->moment1 + at;
        loaded.of2 = moments == 2 ? (msc__f32 *)tensor->moment2 + at : NULL;
        return loaded;
    }
    loaded.of1 = load_bf16(optim, tensor->moment1, at, count, buffers.of1);
    if (moments == 2)
        loaded.of2 = load_bf16(optim, tensor->moment2, at, count, buffers.of2);
    return loaded;
}

void msc__moments_store(const msc_optim *optim, const msc_optim_rule *rule, const msc_optim_tensor *tensor,
                        const msc__stored *stored)
{
    const msc__optim_kernels *kernels = optim->kernels;
    uint32_t moments = msc__moment_count(rule);
    uint64_t at = stored->at;
    uint32_t count = stored->count;
    msc__codes codes;

    if (moments == 0 || rule->moments == MSC_OPTIM_MOMENTS_FP32)
        return;
    if (rule->moments == MSC_OPTIM_MOMENTS_CODE8) {
        codes = codes_at(tensor, moments, at);
        if (moments == 2)
            kernels->encode_adam(&codes, stored->from.of1, stored->from.of2, count, stored->random);
        else
            kernels->encode_signed(&codes, stored->from.of1, count, stored->random);
        return;
    }
    kernels->narrow_bf16_random((msc__u16 *)tensor->moment1 + at, stored->from.of1, count, stored->random, 0);
    if (moments == 2)
        kernels->narrow_bf16_random((msc__u16 *)tensor->moment2 + at, stored->from.of2, count, stored->random,
                                    MSC__RANDOM_OF2);
}

/* ---- whole tensors --------------------------------------------------------------------------------------- */

typedef struct moments_job {
    const msc_optim *optim;
    const msc_optim_rule *rule;
    const msc_optim_tensor *tensor;
    msc__moments to;       /* of `read` */
    const msc__f32 *from1; /* of `write` */
    const msc__f32 *from2;
} moments_job;

static void read_strips(void *argument, uint64_t begin, uint64_t end)
{
    const moments_job *job = argument;
    const msc__optim_kernels *kernels = job->optim->kernels;
    float buffer1[MSC__STRIP];
    float buffer2[MSC__STRIP];
    msc__moments buffers = {buffer1, buffer2};
    msc__moments loaded;

    for (; begin < end; begin++) {
        uint64_t at = begin * MSC__STRIP;
        uint32_t count = msc__strip_count(job->tensor->count, begin);

        loaded = msc__moments_load(job->optim, job->rule, job->tensor, at, count, buffers);
        kernels->widen[MSC_OPTIM_FLOAT_FP32](job->to.of1 + at, loaded.of1, count);
        if (msc__moment_count(job->rule) == 2)
            kernels->widen[MSC_OPTIM_FLOAT_FP32](job->to.of2 + at, loaded.of2, count);
    }
}

/* FP32 moments are where `load` says, and copied there; others are rounded to nearest, from buffers. */
static void write_strips(void *argument, uint64_t begin, uint64_t end)
{
    const moments_job *job = argument;
    const msc__optim_kernels *kernels = job->optim->kernels;
    bool codes = job->rule->moments == MSC_OPTIM_MOMENTS_CODE8;
    float buffer1[MSC__STRIP];
    float buffer2[MSC__STRIP];
    msc__moments buffers = {buffer1, buffer2};
    uint32_t nearest[MSC__STRIP];
    uint32_t i;

    for (i = 0; i < MSC__STRIP; i++)
        nearest[i] = MSC__RANDOM_NEAREST;
    for (; begin < end; begin++) {
        uint64_t at = begin * MSC__STRIP;
        uint32_t count = msc__strip_count(job->tensor->count, begin);
        msc__moments there = msc__moments_load(job->optim, job->rule, job->tensor, at, count, buffers);
        msc__stored stored = {at, count, there, nearest};

        kernels->widen[MSC_OPTIM_FLOAT_FP32](there.of1, job->from1 + at, count);
        if (msc__moment_count(job->rule) == 2 && codes)
            kernels->roots(there.of2, job->from2 + at, count);
        else if (msc__moment_count(job->rule) == 2)
            kernels->widen[MSC_OPTIM_FLOAT_FP32](there.of2, job->from2 + at, count);
        msc__moments_store(job->optim, job->rule, job->tensor, &stored);
    }
}

static msc_status check(const msc_optim *optim, const msc_optim_rule *rule, const msc_optim_tensor *tensor,
                        const float *moment1, const float *moment2, msc_error *err)
{
    uint64_t float_bytes = tensor != NULL ? tensor->count * sizeof(float) : 0;
    msc_optim_sizes sizes;
    msc_status status;

    if (optim == NULL || tensor == NULL)
        return msc__fail(err, MSC_EINVAL, "optim or tensor is NULL");
    status = msc__rule_check(rule, err);
    if (status == MSC_OK)
        status = msc__tensor_check(rule, tensor, 0, true, err);
    if (status == MSC_OK)
        status = msc_optim_tensor_sizes(rule, tensor->count, &sizes, err);
    if (status != MSC_OK)
        return status;
    msc__range ranges[] = {
        {"moment1", tensor->moment1, sizes.moment1_bytes},
        {"moment2", tensor->moment2, sizes.moment2_bytes},
        {"scale1", tensor->scale1, sizes.scale1_bytes},
        {"scale2", tensor->scale2, sizes.scale2_bytes},
        {"moment1 as floats", moment1, sizes.moment1_bytes > 0 ? float_bytes : 0},
        {"moment2 as floats", moment2, sizes.moment2_bytes > 0 ? float_bytes : 0},
    };
    return msc__ranges_check(ranges, 6, 0, err);
}

msc_status msc_optim_moments_read(msc_optim *optim, const msc_optim_rule *rule,
                                  const msc_optim_tensor *tensor, float *moment1, float *moment2,
                                  msc_error *err)
{
    msc_status status = check(optim, rule, tensor, moment1, moment2, err);
    moments_job job = {optim, rule, tensor, {moment1, moment2}, NULL, NULL};

    if (status == MSC_OK && msc__moment_count(rule) > 0)
        msc__pool_run(&optim->pool, msc__strips(tensor->count), MSC__STRIPS_EACH, read_strips, &job);
    return status;
}

msc_status msc_optim_moments_write(msc_optim *optim, const msc_optim_rule *rule,
                                   const msc_optim_tensor *tensor, const float *moment1, const float *moment2,
                                   msc_error *err)
{
    msc_status status = check(optim, rule, tensor, moment1, moment2, err);
    moments_job job = {optim, rule, tensor, {NULL, NULL}, moment1, moment2};

    if (status == MSC_OK && msc__moment_count(rule) > 0)
        msc__pool_run(&optim->pool, msc__strips(tensor->count), MSC__STRIPS_EACH, write_strips, &job);
    return status;
}
