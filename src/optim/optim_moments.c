/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moments of a strip as floats and back, whatever they are stored as; and reading and writing those of a whole tensor.
 *
 * FP32 moments are worked on where they are: `load` returns their address, and there is nothing to put back.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "optim/optim_cuda.h"
#include "optim/optim_internal.h"

msc__codes msc__codes_begin(const msc_optim_rule *rule, const msc_optim_tensor *tensor, uint64_t at,
                            uint32_t count, msc__code_pad *pad)
{
    bool two = msc__moment_count(rule) == 2;
    uint64_t block = at / MSC_OPTIM_BLOCK;
    msc__codes codes = {(uint8_t *)tensor->moment1 + at, tensor->scale1 + block, NULL, NULL};

    MSC__ASSERT(at % MSC_OPTIM_BLOCK == 0);
    if (two) {
        codes.code2 = (uint8_t *)tensor->moment2 + at;
        codes.scale2 = tensor->scale2 + block;
    }
    if (count % MSC_OPTIM_BLOCK == 0)
        return codes;
    MSC__ASSERT(count < MSC__STRIP &&
                at + count == tensor->count); /* only a tensor's end has a part of a block */
    memset(pad, 0, sizeof *pad);
    memcpy(pad->code1, codes.code1, count);
    codes.code1 = pad->code1;
    if (two) {
        memcpy(pad->code2, codes.code2, count);
        codes.code2 = pad->code2;
    }
    return codes;
}

void msc__codes_end(const msc_optim_rule *rule, const msc_optim_tensor *tensor, uint64_t at, uint32_t count,
                    const msc__code_pad *pad)
{
    if (count % MSC_OPTIM_BLOCK == 0)
        return;
    memcpy((uint8_t *)tensor->moment1 + at, pad->code1, count);
    if (msc__moment_count(rule) == 2)
        memcpy((uint8_t *)tensor->moment2 + at, pad->code2, count);
}

static msc__f32 *load_bf16(const msc_optim *optim, const void *moment, uint64_t at, uint32_t count,
                           msc__f32 *buffer)
{
    optim->kernels->widen[MSC_OPTIM_FLOAT_BF16](buffer, (const msc__u16 *)moment + at, count);
    return buffer;
}

msc__moments msc__moments_load(const msc_optim *optim, const msc_optim_rule *rule,
                               const msc_optim_tensor *tensor, uint64_t at, uint32_t count,
                               msc__buffers *buffers)
{
    uint32_t moments = msc__moment_count(rule);
    msc__moments loaded = {NULL, NULL};
    msc__codes codes;

    if (moments == 0)
        return loaded;
    if (rule->moments == MSC_OPTIM_MOMENTS_FP32) {
        loaded.of1 = (msc__f32 *)tensor->moment1 + at;
        loaded.of2 = moments == 2 ? (msc__f32 *)tensor->moment2 + at : NULL;
        return loaded;
    }
    MSC__ASSERT(count <= MSC__STRIP && rule->moments < MSC_OPTIM_MOMENTS_COUNT);
    loaded = (msc__moments){buffers->of1, buffers->of2};
    if (rule->moments == MSC_OPTIM_MOMENTS_CODE8) {
        codes = msc__codes_begin(rule, tensor, at, count, &buffers->pad);
        if (moments == 2)
            optim->kernels->decode_adam(buffers->of1, buffers->of2, &codes, msc__blocks(count));
        else
            optim->kernels->decode_signed(buffers->of1, &codes, msc__blocks(count));
        return loaded;
    }
    MSC__ASSERT(rule->moments == MSC_OPTIM_MOMENTS_BF16);
    load_bf16(optim, tensor->moment1, at, count, loaded.of1);
    if (moments == 2)
        load_bf16(optim, tensor->moment2, at, count, loaded.of2);
    return loaded;
}

void msc__moments_store(const msc_optim *optim, const msc_optim_rule *rule, const msc_optim_tensor *tensor,
                        const msc__stored *stored, msc__buffers *buffers)
{
    const msc__optim_kernels *kernels = optim->kernels;
    uint32_t moments = msc__moment_count(rule);
    uint64_t at = stored->at;
    uint32_t count = stored->count;
    msc__codes codes;

    if (moments == 0 || rule->moments == MSC_OPTIM_MOMENTS_FP32)
        return;
    if (rule->moments == MSC_OPTIM_MOMENTS_CODE8) {
        codes = msc__codes_begin(rule, tensor, at, count, &buffers->pad);
        MSC__ASSERT(moments == 1); /* Adam with codes has a kernel of its own */
        kernels->encode_signed(&codes, buffers->of1, msc__blocks(count), stored->random);
        msc__codes_end(rule, tensor, at, count, &buffers->pad);
        return;
    }
    MSC__ASSERT(rule->moments == MSC_OPTIM_MOMENTS_BF16 && count <= MSC__STRIP);
    kernels->narrow_bf16_random((msc__u16 *)tensor->moment1 + at, buffers->of1, count, stored->random, 16);
    if (moments == 2)
        kernels->narrow_bf16_random((msc__u16 *)tensor->moment2 + at, buffers->of2, count, stored->random, 0);
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
    msc__buffers buffers;
    msc__moments loaded;

    for (; begin < end; begin++) {
        uint64_t at = begin * MSC__STRIP;
        uint32_t count = msc__strip_count(job->tensor->count, begin);

        loaded = msc__moments_load(job->optim, job->rule, job->tensor, at, count, &buffers);
        kernels->widen[MSC_OPTIM_FLOAT_FP32](job->to.of1 + at, loaded.of1, count);
        if (msc__moment_count(job->rule) == 2)
            kernels->widen[MSC_OPTIM_FLOAT_FP32](job->to.of2 + at, loaded.of2, count);
    }
}

static void write_codes(const moments_job *job, uint64_t at, uint32_t count, msc__buffers *buffers)
{
    const msc__optim_kernels *kernels = job->optim->kernels;
    msc__codes codes = msc__codes_begin(job->rule, job->tensor, at, count, &buffers->pad);

    if (msc__moment_count(job->rule) == 2)
        kernels->write_adam(&codes, buffers->of1, buffers->of2, msc__blocks(count));
    else
        kernels->write_signed(&codes, buffers->of1, msc__blocks(count));
    msc__codes_end(job->rule, job->tensor, at, count, &buffers->pad);
}

/* FP32 moments are where `load` says, and copied there; others are rounded to nearest, from buffers. */
static void write_strips(void *argument, uint64_t begin, uint64_t end)
{
    const moments_job *job = argument;
    const msc__optim_kernels *kernels = job->optim->kernels;
    uint32_t nearest[MSC__STRIP];
    msc__buffers buffers;
    uint32_t i;

    for (i = 0; i < MSC__STRIP; i++)
        nearest[i] = MSC__NEAREST_BF16;
    for (; begin < end; begin++) {
        uint64_t at = begin * MSC__STRIP;
        uint32_t count = msc__strip_count(job->tensor->count, begin);
        msc__moments there = msc__moments_load(job->optim, job->rule, job->tensor, at, count, &buffers);
        msc__stored stored = {at, count, nearest};

        kernels->widen[MSC_OPTIM_FLOAT_FP32](there.of1, job->from1 + at, count);
        if (msc__moment_count(job->rule) == 2)
            kernels->widen[MSC_OPTIM_FLOAT_FP32](there.of2, job->from2 + at, count);
        if (job->rule->moments == MSC_OPTIM_MOMENTS_CODE8)
            write_codes(job, at, count, &buffers);
        else
            msc__moments_store(job->optim, job->rule, job->tensor, &stored, &buffers);
    }
}

/* Reads the rule, and checks it with the rest. */
static msc_status check(const msc_optim *optim, const msc_optim_rule *given, msc_optim_rule *rule,
                        const msc_optim_tensor *tensor, const float *moment1, const float *moment2,
                        msc_error *err)
{
    uint64_t float_bytes = tensor != NULL ? tensor->count * sizeof(float) : 0;
    msc_optim_sizes sizes;
    msc_status status;

    if (optim == NULL || tensor == NULL)
        return msc__fail(err, MSC_EINVAL, "optim or tensor is NULL");
    status = msc__rule_read(given, rule, err);
    if (status == MSC_OK)
        status = msc__tensor_check(rule, tensor, 0, true, err);
    if (status == MSC_OK)
        status = msc__rule_sizes(rule, tensor->count, &sizes, err);
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
    msc_optim_rule used;
    msc_status status = check(optim, rule, &used, tensor, moment1, moment2, err);
    moments_job job = {optim, &used, tensor, {moment1, moment2}, NULL, NULL};

    if (status == MSC_OK && optim->card != NULL && msc__moment_count(&used) > 0)
        return msc__card_read(optim->card, &used, tensor, moment1, moment2, err);
    if (status == MSC_OK && msc__moment_count(&used) > 0)
        msc__pool_run(&optim->pool, msc__strips(tensor->count), MSC__STRIPS_EACH, read_strips, NULL, &job);
    return status;
}

msc_status msc_optim_moments_write(msc_optim *optim, const msc_optim_rule *rule,
                                   const msc_optim_tensor *tensor, const float *moment1, const float *moment2,
                                   msc_error *err)
{
    msc_optim_rule used;
    msc_status status = check(optim, rule, &used, tensor, moment1, moment2, err);
    moments_job job = {optim, &used, tensor, {NULL, NULL}, moment1, moment2};

    if (status == MSC_OK && optim->card != NULL && msc__moment_count(&used) > 0)
        return msc__card_write_all(optim->card, &used, tensor, moment1, moment2, err);
    if (status == MSC_OK && msc__moment_count(&used) > 0)
        msc__pool_run(&optim->pool, msc__strips(tensor->count), MSC__STRIPS_EACH, write_strips, NULL, &job);
    return status;
}
