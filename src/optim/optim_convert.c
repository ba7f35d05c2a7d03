/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole arrays from one form into another: types of floats, and masters into weight and rest and back. Each strip is
 * widened into a buffer and narrowed from there; FP32 is read and written in place.
 */
#include "base/error.h"
#include "base/invariant.h"
#include "optim/optim_cuda.h"
#include "optim/optim_internal.h"

typedef struct convert_job {
    const msc_optim *optim;
    const msc_optim_array *from;
    char *to;
    msc_optim_float to_type;
} convert_job;

static void convert_strips(void *argument, uint64_t begin, uint64_t end)
{
    const convert_job *job = argument;
    const msc__optim_kernels *kernels = job->optim->kernels;
    uint32_t from_bytes = msc__float_bytes(job->from->type);
    _Alignas(64) float buffer[MSC__STRIP];

    for (; begin < end; begin++) {
        uint64_t at = begin * MSC__STRIP;
        uint32_t count = msc__strip_count(job->from->count, begin);
        const void *values = (const char *)job->from->values + at * from_bytes;
        const msc__f32 *floats = values;

        if (job->from->type != MSC_OPTIM_FLOAT_FP32) {
            kernels->widen[job->from->type](buffer, values, count);
            floats = buffer;
        }
        kernels->narrow[job->to_type](job->to + at * msc__float_bytes(job->to_type), floats, count);
    }
}

static msc_status check_count(uint64_t count, msc_error *err)
{
    if (count > MSC__MOST_ELEMENTS)
        return msc__fail(err, MSC_EINVAL, "count is %llu, allowed are 0 to %llu", (unsigned long long)count,
                         (unsigned long long)MSC__MOST_ELEMENTS);
    return MSC_OK;
}

msc_status msc_optim_convert(msc_optim *optim, void *to, msc_optim_float to_type, const msc_optim_array *from,
                             msc_error *err)
{
    convert_job job = {optim, from, to, to_type};
    msc_status status;

    if (optim == NULL || from == NULL)
        return msc__fail(err, MSC_EINVAL, "optim or from is NULL");
    status = msc__float_check(from->type, "type", err);
    if (status == MSC_OK)
        status = msc__float_check(to_type, "to_type", err);
    if (status == MSC_OK)
        status = check_count(from->count, err);
    if (status == MSC_OK) {
        msc__range ranges[] = {
            {"values", from->values, from->count * msc__float_bytes(from->type)},
            {"to", to, from->count * msc__float_bytes(to_type)},
        };

        status = msc__ranges_check(ranges, 2, 0, err);
    }
    if (status == MSC_OK && optim->card != NULL)
        return msc__card_convert(optim->card, to, to_type, from, err);
    if (status == MSC_OK)
        msc__pool_run(&optim->pool, msc__strips(from->count), MSC__STRIPS_EACH, convert_strips, NULL, &job);
    return status;
}

/* ---- masters --------------------------------------------------------------------------------------------- */

typedef struct split_job {
    const msc__optim_kernels *kernels;
    msc_optim_weights form;
    uint64_t count;
    const msc__f32 *from;
    msc__u16 *weight;
    char *master;
} split_job;

typedef struct join_job {
    const msc__optim_kernels *kernels;
    msc_optim_weights form;
    uint64_t count;
    const msc__u16 *weight;
    const char *master;
    msc__f32 *to;
} join_job;

static void split_strips(void *argument, uint64_t begin, uint64_t end)
{
    const split_job *job = argument;
    const msc__optim_kernels *kernels = job->kernels;
    uint32_t nearest[MSC__STRIP];
    uint32_t i;

    for (i = 0; i < MSC__STRIP; i++)
        nearest[i] = MSC__NEAREST_MASTER;
    for (; begin < end; begin++) {
        uint64_t at = begin * MSC__STRIP;
        uint32_t count = msc__strip_count(job->count, begin);
        const msc__f32 *from = job->from + at;

        if (job->form == MSC_OPTIM_WEIGHTS_MASTER_FP32) {
            kernels->narrow[MSC_OPTIM_FLOAT_BF16](job->weight + at, from, count);
            kernels->narrow[MSC_OPTIM_FLOAT_FP32](job->master + 4 * at, from, count);
        } else if (job->form == MSC_OPTIM_WEIGHTS_MASTER_REST16) {
            kernels->split_rest16(job->weight + at, job->master + 2 * at, from, count);
        } else {
            MSC__ASSERT(job->form == MSC_OPTIM_WEIGHTS_MASTER_REST8);
            kernels->split_rest8(job->weight + at, job->master + at, from, count, nearest);
        }
    }
}

static void join_strips(void *argument, uint64_t begin, uint64_t end)
{
    const join_job *job = argument;
    const msc__optim_kernels *kernels = job->kernels;

    for (; begin < end; begin++) {
        uint64_t at = begin * MSC__STRIP;
        uint32_t count = msc__strip_count(job->count, begin);
        msc__f32 *to = job->to + at;

        MSC__ASSERT(job->form != MSC_OPTIM_WEIGHTS_FP32 && job->form < MSC_OPTIM_WEIGHTS_COUNT);
        if (job->form == MSC_OPTIM_WEIGHTS_MASTER_FP32)
            kernels->widen[MSC_OPTIM_FLOAT_FP32](to, job->master + 4 * at, count);
        else if (job->form == MSC_OPTIM_WEIGHTS_MASTER_REST16)
            kernels->join_rest16(to, job->weight + at, job->master + 2 * at, count);
        else
            kernels->join_rest8(to, job->weight + at, job->master + at, count);
    }
}

/* Bytes of the ranges follow from form and count. */
static msc_status check_masters(const msc_optim *optim, msc_optim_weights form, uint64_t count,
                                msc__range ranges[3], msc_error *err)
{
    static const uint8_t master_bytes[] = {0, 4, 2, 1};
    msc_status status;

    if (optim == NULL)
        return msc__fail(err, MSC_EINVAL, "optim is NULL");
    status = msc__form_check(form, err);
    if (status == MSC_OK)
        status = check_count(count, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(form != MSC_OPTIM_WEIGHTS_FP32 && form < MSC_OPTIM_WEIGHTS_COUNT);
    ranges[0].bytes = 2 * count;
    ranges[1].bytes = master_bytes[form] * count;
    ranges[2].bytes = sizeof(float) * count;
    return msc__ranges_check(ranges, 3, 0, err);
}

msc_status msc_optim_split(msc_optim *optim, msc_optim_weights form, const float *from, uint64_t count,
                           void *weight, void *master, msc_error *err)
{
    msc__range ranges[] = {{"weight", weight, 0}, {"master", master, 0}, {"masters as floats", from, 0}};
    msc_status status = check_masters(optim, form, count, ranges, err);
    split_job job;

    if (status != MSC_OK)
        return status;
    if (optim->card != NULL)
        return msc__card_split_all(optim->card, form, from, count, weight, master, err);
    job = (split_job){optim->kernels, form, count, from, weight, master};
    msc__pool_run(&optim->pool, msc__strips(count), MSC__STRIPS_EACH, split_strips, NULL, &job);
    return MSC_OK;
}

msc_status msc_optim_join(msc_optim *optim, msc_optim_weights form, const void *weight, const void *master,
                          uint64_t count, float *to, msc_error *err)
{
    msc__range ranges[] = {{"weight", weight, 0}, {"master", master, 0}, {"masters as floats", to, 0}};
    msc_status status = check_masters(optim, form, count, ranges, err);
    join_job job;

    if (status != MSC_OK)
        return status;
    if (optim->card != NULL)
        return msc__card_join_all(optim->card, form, weight, master, count, to, err);
    job = (join_job){optim->kernels, form, count, weight, master, to};
    msc__pool_run(&optim->pool, msc__strips(count), MSC__STRIPS_EACH, join_strips, NULL, &job);
    return MSC_OK;
}
