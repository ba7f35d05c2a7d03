/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums: the norm of all gradients, and gradients added up.
 *
 * The norm's order of additions depends on counts alone. Strips are numbered through all arrays and divided evenly into
 * SEGMENTS; threads take whole segments:
 *
 *      strip     sixteen lanes, then pairs of lanes           (kernels)
 *      segment   strip after strip
 *      all       pairs of segments, pairs of pairs, …
 *
 * Squares are taken in double, where no float's overflows and each is exact; with the additions above, a sum over 10^9
 * elements has a relative error below 10^-12.
 */
#include <math.h>

#include "base/error.h"
#include "base/invariant.h"
#include "optim/optim_cuda.h"
#include "optim/optim_internal.h"
#include "optim/sums_core.h"

#define SEGMENTS MSC__SEGMENTS

typedef struct norm_job {
    const msc_optim *optim;
    const msc_optim_array *arrays;
    uint64_t array_count;
    uint64_t strips;
    float scale;
    msc__card_sums of; /* each segment */
} norm_job;

/* Where a walk over all strips stands. */
typedef struct place {
    uint64_t array;
    uint64_t strip;
} place;

static const void *element(const msc_optim_array *array, uint64_t at)
{
    return (const char *)array->values + at * msc__float_bytes(array->type);
}

static place find(const norm_job *job, uint64_t strip)
{
    place here = {0, strip};

    while (here.array < job->array_count && here.strip >= msc__strips(job->arrays[here.array].count)) {
        here.strip -= msc__strips(job->arrays[here.array].count);
        here.array++;
    }
    MSC__ASSERT(here.array == job->array_count || here.strip < msc__strips(job->arrays[here.array].count));
    return here;
}

static void advance(const norm_job *job, place *here)
{
    here->strip++;
    while (here->array < job->array_count && here->strip >= msc__strips(job->arrays[here->array].count)) {
        here->strip = 0;
        here->array++;
    }
}

static double strip_squares(const norm_job *job, place here, uint64_t *bad)
{
    const msc_optim_array *array = &job->arrays[here.array];
    uint32_t count = msc__strip_count(array->count, here.strip);
    const void *values = element(array, here.strip * MSC__STRIP);
    _Alignas(64) float buffer[MSC__STRIP];
    const msc__f32 *floats = values;
    double sum;

    MSC__ASSERT(here.array < job->array_count && count > 0);
    if (array->type != MSC_OPTIM_FLOAT_FP32) {
        job->optim->kernels->widen[array->type](buffer, values, count);
        floats = buffer;
    }
    *bad += job->optim->kernels->squares(floats, count, job->scale, &sum);
    return sum;
}

static void sum_segments(void *argument, uint64_t begin, uint64_t end)
{
    norm_job *job = argument;
    place here = find(job, msc__segment_begin(job->strips, begin));
    uint64_t left;

    for (; begin < end; begin++) {
        left = msc__segment_begin(job->strips, begin + 1) - msc__segment_begin(job->strips, begin);
        MSC__ASSERT(msc__segment_begin(job->strips, begin + 1) <= job->strips);
        for (; left > 0; left--) {
            job->of.sums[begin] += strip_squares(job, here, &job->of.bad[begin]);
            advance(job, &here);
        }
    }
}

static const void *where_segment(const void *argument, uint64_t segment)
{
    const norm_job *job = argument;
    place here = find(job, msc__segment_begin(job->strips, segment));

    return here.array < job->array_count ? element(&job->arrays[here.array], here.strip * MSC__STRIP) : NULL;
}

static msc_status check_array(const msc_optim_array *array, uint64_t index, msc_error *err)
{
    msc_status status = msc__float_check(array->type, "type", err);
    msc__range range = {"values", array->values, 0};

    if (status != MSC_OK)
        return status;
    if (array->count > MSC__MOST_ELEMENTS)
        return msc__fail(err, MSC_EINVAL, "count of array %llu is %llu, allowed are 0 to %llu",
                         (unsigned long long)index, (unsigned long long)array->count,
                         (unsigned long long)MSC__MOST_ELEMENTS);
    range.bytes = array->count * msc__float_bytes(array->type);
    return msc__ranges_check(&range, 1, index, err);
}

msc_status msc_optim_norm(msc_optim *optim, const msc_optim_array *arrays, uint64_t array_count, float scale,
                          msc_optim_norm_result *out, msc_error *err)
{
    norm_job job = {.optim = optim, .arrays = arrays, .array_count = array_count, .scale = scale};
    msc_status status = MSC_OK;
    uint64_t grain;
    uint64_t i;
    uint32_t width;

    if (optim == NULL || out == NULL || (arrays == NULL && array_count > 0))
        return msc__fail(err, MSC_EINVAL, "optim, out or arrays is NULL");
    if (!(fabsf(scale) < INFINITY))
        return msc__fail(err, MSC_EINVAL, "scale is %g, allowed are finite numbers", (double)scale);
    for (i = 0; status == MSC_OK && i < array_count; i++) {
        status = check_array(&arrays[i], i, err);
        job.strips += msc__strips(arrays[i].count);
    }
    if (status != MSC_OK)
        return status;
    grain = job.strips > 0 ? SEGMENTS * MSC__STRIPS_EACH / job.strips + 1 : SEGMENTS;
    if (optim->card != NULL && job.strips > 0)
        status = msc__card_norm_all(optim->card, arrays, array_count, scale, job.strips, &job.of, err);
    else if (optim->card == NULL)
        msc__pool_run(&optim->pool, SEGMENTS, grain, sum_segments, where_segment, &job);
    if (status != MSC_OK)
        return status;
    for (width = SEGMENTS / 2; width > 0; width /= 2)
        for (i = 0; i < width; i++) {
            job.of.sums[i] += job.of.sums[i + width];
            job.of.bad[i] += job.of.bad[i + width];
        }
    MSC__ASSERT(job.of.bad[0] > 0 || job.of.sums[0] >= 0);
    out->sum_of_squares = job.of.sums[0];
    out->nonfinite_count = job.of.bad[0];
    return MSC_OK;
}

float msc_optim_clip_factor(double sum_of_squares, double max_norm)
{
    float norm = (float)sqrt(sum_of_squares);
    float factor = 1.0f / (norm + 1e-6f) * (float)max_norm;

    return factor > 1.0f ? 1.0f : factor;
}

/* ---- accumulation ---------------------------------------------------------------------------------------- */

typedef struct add_job {
    const msc_optim *optim;
    const msc_optim_array *gradient;
    msc__f32 *sums;
} add_job;

static void add_strips(void *argument, uint64_t begin, uint64_t end)
{
    const add_job *job = argument;
    const msc__optim_kernels *kernels = job->optim->kernels;
    msc_optim_float type = job->gradient->type;
    _Alignas(64) float buffer[MSC__STRIP];

    for (; begin < end; begin++) {
        uint64_t at = begin * MSC__STRIP;
        uint32_t count = msc__strip_count(job->gradient->count, begin);
        const void *values = element(job->gradient, at);

        if (type == MSC_OPTIM_FLOAT_FP32) {
            kernels->add(job->sums + at, values, count);
            continue;
        }
        kernels->widen[type](buffer, values, count);
        kernels->add(job->sums + at, buffer, count);
    }
}

static const void *where_added(const void *argument, uint64_t strip)
{
    const add_job *job = argument;

    return job->sums + strip * MSC__STRIP;
}

msc_status msc_optim_accumulate(msc_optim *optim, float *sums, const msc_optim_array *gradient,
                                msc_error *err)
{
    add_job job = {optim, gradient, sums};
    msc_status status;

    if (optim == NULL || gradient == NULL)
        return msc__fail(err, MSC_EINVAL, "optim or gradient is NULL");
    status = check_array(gradient, 0, err);
    if (status == MSC_OK) {
        msc__range ranges[] = {
            {"sums", sums, gradient->count * sizeof *sums},
            {"values", gradient->values, gradient->count * msc__float_bytes(gradient->type)},
        };

        status = msc__ranges_check(ranges, 2, 0, err);
    }
    if (status == MSC_OK && optim->card != NULL)
        return msc__card_add(optim->card, sums, gradient, err);
    if (status == MSC_OK)
        msc__pool_run(&optim->pool, msc__strips(gradient->count), MSC__STRIPS_EACH, add_strips, where_added,
                      &job);
    return status;
}
