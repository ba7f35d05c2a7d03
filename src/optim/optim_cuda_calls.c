/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other calls on a card: norms, whose segments come back to be added up on the host, and arrays from one form into
 * another.
 *
 *      arrays ──► lists ──► a kernel each, which goes on with the sums of the one before
 *                              └──► event ──► copy on a stream of ours ──► 256 sums ──► the same tree as on the host
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "device/device_internal.h"
#include "optim/optim_cuda.h"
#include "optim/optim_internal.h"

/* ---- norms ---------------------------------------------------------------------------------------------------- */

static msc_status submit_norm(msc__card *card, const msc_optim_array *arrays, uint64_t array_count,
                              float scale, uint64_t strips, msc_error *err)
{
    msc_status status = MSC_OK;
    uint64_t after = 0;
    msc__card_norm list;
    uint64_t i;

    memset(&list, 0, sizeof list);
    list.sums = card->sums;
    list.scale = scale;
    list.strips = strips;
    for (i = 0; status == MSC_OK && i < array_count; i++) {
        if (arrays[i].count == 0)
            continue;
        after += msc__strips(arrays[i].count);
        MSC__ASSERT(list.array_count < MSC__CARD_ARRAYS && after <= strips);
        list.arrays[list.array_count++] =
            (msc__card_array){arrays[i].values, arrays[i].count, after, (uint64_t)arrays[i].type};
        if (list.array_count < MSC__CARD_ARRAYS && after < strips)
            continue;
        status = msc__card_run(card, MSC__CARD_NORM, MSC__SEGMENTS, &list, err);
        list.first = after;
        list.array_count = 0;
    }
    MSC__ASSERT(status != MSC_OK || (after == strips && list.array_count == 0));
    return status;
}

/* What a norm needs is made at the first one: who only steps takes no memory of the card. */
static msc_status make_ready(msc__card *card, msc_error *err)
{
    const msc_device_ops *ops = card->device->ops;
    void *sums = NULL;
    msc_status status = MSC_OK;

    if (card->sums == NULL) {
        status = ops->memory_create(card->device, sizeof *card->sums, &sums, err);
        card->sums = sums;
    }
    if (status == MSC_OK && card->back == NULL)
        status = ops->stream_create(card->device, &card->back, err);
    if (status == MSC_OK && card->event == NULL)
        status = ops->event_create(card->device, &card->event, err);
    return status;
}

/* The copy is on a stream of ours, because the caller's may be the default one, which copies nothing for us. */
static msc_status bring_back(msc__card *card, msc__card_sums *out, msc_error *err)
{
    const msc_device_ops *ops = card->device->ops;
    msc_device *device = card->device;
    msc_status status = ops->event_record(device, card->event, card->stream, err);

    MSC__ASSERT(card->sums != NULL && card->back != NULL && card->event != NULL);
    if (status == MSC_OK)
        status = ops->stream_wait(device, card->back, card->event, err);
    if (status == MSC_OK)
        status = ops->copy(device, out, card->sums, sizeof *out, MSC_COPY_OUT, card->back, err);
    if (status == MSC_OK)
        status = ops->event_record(device, card->event, card->back, err);
    if (status == MSC_OK)
        status = ops->event_wait(device, card->event, err);
    return status;
}

/* Kernels write the sums and a copy reads them, with no event to tell of their end. */
static void finish(msc__card *card)
{
    const msc_device_ops *ops = card->device->ops;

    ops->stream_finish(card->device, card->stream);
    if (card->back != NULL)
        ops->stream_finish(card->device, card->back);
}

msc_status msc__card_norm_all(msc__card *card, const msc_optim_array *arrays, uint64_t array_count,
                              float scale, uint64_t strips, msc__card_sums *out, msc_error *err)
{
    msc_status status = MSC_OK;
    uint64_t i;

    MSC__ASSERT(strips > 0);
    for (i = 0; status == MSC_OK && i < array_count; i++)
        status = msc__card_aligned("values", arrays[i].values, msc__float_bytes(arrays[i].type), err);
    if (status == MSC_OK)
        status = msc__device_check_process(card->device, err);
    if (status != MSC_OK)
        return status;
    msc__mutex_lock(&card->call);
    status = make_ready(card, err);
    if (status == MSC_OK) {
        status = submit_norm(card, arrays, array_count, scale, strips, err);
        if (status == MSC_OK)
            status = bring_back(card, out, err);
        if (status != MSC_OK)
            finish(card);
    }
    msc__mutex_unlock(&card->call);
    return status;
}

/* ---- conversions ------------------------------------------------------------------------------------------------ */

static msc_status change(msc__card *card, msc__card_kernel kernel, const msc__card_arrays *arrays,
                         msc_error *err)
{
    msc_status status;

    if (arrays->count == 0)
        return MSC_OK;
    status = msc__device_check_process(card->device, err);
    if (status != MSC_OK)
        return status;
    msc__mutex_lock(&card->call);
    status = msc__card_run(card, kernel, msc__strips(arrays->count), arrays, err);
    msc__mutex_unlock(&card->call);
    return status;
}

msc_status msc__card_add(msc__card *card, float *sums, const msc_optim_array *gradient, msc_error *err)
{
    msc__card_arrays arrays = {.from = {gradient->values},
                               .to = {sums},
                               .count = gradient->count,
                               .change = MSC__CHANGE_ADD,
                               .type = (uint8_t)gradient->type};
    msc_status status = msc__card_aligned("sums", sums, sizeof *sums, err);

    if (status == MSC_OK)
        status = msc__card_aligned("values", gradient->values, msc__float_bytes(gradient->type), err);
    return status == MSC_OK ? change(card, MSC__CARD_CHANGE, &arrays, err) : status;
}

msc_status msc__card_convert(msc__card *card, void *to, msc_optim_float to_type, const msc_optim_array *from,
                             msc_error *err)
{
    msc__card_arrays arrays = {.from = {from->values},
                               .to = {to},
                               .count = from->count,
                               .change = MSC__CHANGE_TYPE,
                               .type = (uint8_t)from->type,
                               .to_type = (uint8_t)to_type};
    msc_status status = msc__card_aligned("values", from->values, msc__float_bytes(from->type), err);

    if (status == MSC_OK)
        status = msc__card_aligned("to", to, msc__float_bytes(to_type), err);
    return status == MSC_OK ? change(card, MSC__CARD_CHANGE, &arrays, err) : status;
}

static msc_status check_masters(msc_optim_weights form, const void *floats, const void *weight,
                                const void *master, msc_error *err)
{
    static const uint8_t master_bytes[] = {1, 4, 2, 1};
    msc_status status = msc__card_aligned("masters as floats", floats, sizeof(float), err);

    MSC__ASSERT(form != MSC_OPTIM_WEIGHTS_FP32);
    if (status == MSC_OK)
        status = msc__card_aligned("weight", weight, 2, err);
    return status == MSC_OK ? msc__card_aligned("master", master, master_bytes[form], err) : status;
}

msc_status msc__card_split_all(msc__card *card, msc_optim_weights form, const float *from, uint64_t count,
                               void *weight, void *master, msc_error *err)
{
    msc__card_arrays arrays = {.from = {from},
                               .to = {weight, master},
                               .count = count,
                               .change = MSC__CHANGE_SPLIT,
                               .form = (uint8_t)form};
    msc_status status = check_masters(form, from, weight, master, err);

    return status == MSC_OK ? change(card, MSC__CARD_CHANGE, &arrays, err) : status;
}

msc_status msc__card_join_all(msc__card *card, msc_optim_weights form, const void *weight, const void *master,
                              uint64_t count, float *to, msc_error *err)
{
    msc__card_arrays arrays = {.from = {weight, master},
                               .to = {to},
                               .count = count,
                               .change = MSC__CHANGE_JOIN,
                               .form = (uint8_t)form};
    msc_status status = check_masters(form, to, weight, master, err);

    return status == MSC_OK ? change(card, MSC__CARD_CHANGE, &arrays, err) : status;
}

/* ---- moments ------------------------------------------------------------------------------------------------------ */

static msc_status check_moment(const msc_optim_rule *rule, const void *moment, const float *floats,
                               msc_error *err)
{
    static const uint8_t moment_bytes[] = {4, 2, 1};
    msc_status status = msc__card_aligned("a moment", moment, moment_bytes[rule->moments], err);

    return status == MSC_OK ? msc__card_aligned("a moment as floats", floats, sizeof *floats, err) : status;
}

static msc_status check_moments(const msc_optim_rule *rule, const msc_optim_tensor *tensor,
                                const float *moment1, const float *moment2, msc_error *err)
{
    msc_status status = check_moment(rule, tensor->moment1, moment1, err);

    if (status == MSC_OK && msc__moment_count(rule) == 2)
        status = check_moment(rule, tensor->moment2, moment2, err);
    return status;
}

static msc_optim_float type_of(const msc_optim_rule *rule)
{
    MSC__ASSERT(rule->moments != MSC_OPTIM_MOMENTS_CODE8);
    return rule->moments == MSC_OPTIM_MOMENTS_FP32 ? MSC_OPTIM_FLOAT_FP32 : MSC_OPTIM_FLOAT_BF16;
}

/* A moment that is stored as numbers. */
static msc_status read_numbers(msc__card *card, const msc_optim_rule *rule, const void *moment,
                               uint64_t count, float *to, msc_error *err)
{
    msc__card_arrays arrays = {.from = {moment},
                               .to = {to},
                               .count = count,
                               .change = MSC__CHANGE_TYPE,
                               .type = (uint8_t)type_of(rule),
                               .to_type = MSC_OPTIM_FLOAT_FP32};

    return change(card, MSC__CARD_CHANGE, &arrays, err);
}

static msc_status write_numbers(msc__card *card, const msc_optim_rule *rule, const float *from,
                                uint64_t count, void *moment, msc_error *err)
{
    bool wide = rule->moments == MSC_OPTIM_MOMENTS_FP32;
    msc__card_arrays arrays = {.from = {from},
                               .to = {moment},
                               .count = count,
                               .change = wide ? MSC__CHANGE_TYPE : MSC__CHANGE_NEAREST,
                               .type = MSC_OPTIM_FLOAT_FP32,
                               .to_type = MSC_OPTIM_FLOAT_FP32};

    return change(card, MSC__CARD_CHANGE, &arrays, err);
}

msc_status msc__card_read(msc__card *card, const msc_optim_rule *rule, const msc_optim_tensor *tensor,
                          float *moment1, float *moment2, msc_error *err)
{
    bool two = msc__moment_count(rule) == 2;
    msc__card_arrays codes = {.from = {tensor->moment1, tensor->scale1, tensor->moment2, tensor->scale2},
                              .to = {moment1, moment2},
                              .count = tensor->count,
                              .change = two ? MSC__CHANGE_READ_ADAM : MSC__CHANGE_READ_SIGNED};
    msc_status status = check_moments(rule, tensor, moment1, moment2, err);

    if (status == MSC_OK && rule->moments == MSC_OPTIM_MOMENTS_CODE8)
        return change(card, MSC__CARD_CHANGE, &codes, err);
    if (status == MSC_OK)
        status = read_numbers(card, rule, tensor->moment1, tensor->count, moment1, err);
    if (status == MSC_OK && two)
        status = read_numbers(card, rule, tensor->moment2, tensor->count, moment2, err);
    return status;
}

msc_status msc__card_write_all(msc__card *card, const msc_optim_rule *rule, const msc_optim_tensor *tensor,
                               const float *moment1, const float *moment2, msc_error *err)
{
    bool two = msc__moment_count(rule) == 2;
    msc__card_arrays codes = {.from = {moment1, moment2},
                              .to = {tensor->moment1, tensor->scale1, tensor->moment2, tensor->scale2},
                              .count = tensor->count,
                              .change = two ? MSC__CHANGE_WRITE_ADAM : MSC__CHANGE_WRITE_SIGNED};
    msc_status status = check_moments(rule, tensor, moment1, moment2, err);

    if (status == MSC_OK && rule->moments == MSC_OPTIM_MOMENTS_CODE8)
        return change(card, MSC__CARD_WRITE, &codes, err);
    if (status == MSC_OK)
        status = write_numbers(card, rule, moment1, tensor->count, tensor->moment1, err);
    if (status == MSC_OK && two)
        status = write_numbers(card, rule, moment2, tensor->count, tensor->moment2, err);
    return status;
}
