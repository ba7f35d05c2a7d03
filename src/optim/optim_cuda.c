/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An optimizer's card, and steps on it.
 *
 *      tensors of a call ──► lists of those with the same step number ──► a kernel each, on the caller's stream
 *
 * A kernel's argument has the addresses and all numbers that follow from the rule, so nothing is allocated, copied or
 * awaited: the driver copies the argument when it takes the kernel. What a list cannot hold goes into the next one. A
 * group of threads does a strip, and finds its tensor in the list.
 *
 * The kernels' formulas are those of host cores, from the same text, and so is the order of each reduction that rounds;
 * which thread does what shows in no result.
 */
#include "optim/optim_cuda.h"

#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "device/device_internal.h"
#include "optim/optim_internal.h"

_Static_assert(MSC__CARD_STRIP == MSC__STRIP, "the norm's order is in strips");
_Static_assert(sizeof(msc__card_step) <= 4096 && sizeof(msc__card_norm) <= 4096 &&
                   sizeof(msc__card_arrays) <= 4096,
               "what a driver copies with a kernel");

/* Groups of one kernel; more strips than any card has memory for. */
#define MOST_GROUPS 0x7FFFFFFFu

static const msc_program_text kernels = {"the optimizer's kernels", msc__optim_cuda_text};

/* ---- create and destroy --------------------------------------------------------------------------------------- */

static msc_status find_kernels(msc__card *card, msc_error *err)
{
    static const char *const names[] = {"msc_card_step", "msc_card_norm", "msc_card_change",
                                        "msc_card_write"};
    const msc_device_ops *ops = card->device->ops;
    void *program = NULL;
    msc_status status;
    int i;

    if (ops->program_create == NULL)
        return msc__fail(err, MSC_EUNSUPPORTED,
                         "device '%s' runs no kernels: leave `device` NULL for host cores",
                         card->device->name);
    status = ops->program_create(card->device, &kernels, &program, err);
    for (i = 0; status == MSC_OK && i < MSC__CARD_KERNELS; i++)
        status = ops->kernel_find(card->device, program, names[i], &card->kernels[i], err);
    return status;
}

static msc_status fill(msc__card *card, msc_error *err)
{
    msc_status status = find_kernels(card, err);

    if (status == MSC_OK)
        status = msc__mutex_init(&card->call, err);
    card->locks = status == MSC_OK;
    return status;
}

msc_status msc__card_create(msc_context *ctx, msc_device *device, void *stream, msc__card **out,
                            msc_error *err)
{
    msc__card *card = msc__alloc(ctx, sizeof *card);
    msc_status status;

    *out = NULL;
    if (card == NULL)
        return msc__fail_memory(err, "an optimizer's card", sizeof *card);
    card->ctx = ctx;
    card->device = device;
    card->stream = stream;
    status = fill(card, err);
    if (status != MSC_OK) {
        msc__card_destroy(card);
        return status;
    }
    *out = card;
    return MSC_OK;
}

void msc__card_destroy(msc__card *card)
{
    const msc_device_ops *ops;

    if (card == NULL)
        return;
    ops = card->device->ops;
    if (card->locks)
        msc__mutex_fini(&card->call);
    ops->event_destroy(card->device, card->event);
    ops->stream_destroy(card->device, card->back);
    ops->memory_destroy(card->device, card->sums, sizeof *card->sums);
    msc__free(card->ctx, card, sizeof *card);
}

/* ---- kernels -------------------------------------------------------------------------------------------------- */

msc_status msc__card_run(msc__card *card, msc__card_kernel kernel, uint64_t groups, const void *argument,
                         msc_error *err)
{
    msc_launch what = {card->kernels[kernel], (uint32_t)groups, MSC__CARD_THREADS, argument};

    MSC__ASSERT(kernel < MSC__CARD_KERNELS && groups > 0);
    if (groups > MOST_GROUPS)
        return msc__fail(err, MSC_EINVAL, "an array has %llu blocks of %u elements, a card takes %u",
                         (unsigned long long)groups, MSC__CARD_STRIP, MOST_GROUPS);
    return card->device->ops->launch(card->device, &what, card->stream, err);
}

msc_status msc__card_aligned(const char *name, const void *at, uint32_t bytes, msc_error *err)
{
    if ((uintptr_t)at % bytes != 0)
        return msc__fail(err, MSC_EINVAL, "%s is at %p, on a card it must be at a multiple of %u bytes", name,
                         at, bytes);
    return MSC_OK;
}

/* ---- steps ---------------------------------------------------------------------------------------------------- */

static uint8_t update_of(const msc_optim_rule *rule)
{
    switch (rule->kind) {
    case MSC_OPTIM_KIND_SGD:
        if (msc__moment_count(rule) == 0)
            return MSC__UPDATE_SGD;
        return rule->nesterov != 0 ? MSC__UPDATE_NESTEROV : MSC__UPDATE_MOMENTUM;
    case MSC_OPTIM_KIND_LION:
        return MSC__UPDATE_LION;
    default:
        MSC__ASSERT(msc__moment_count(rule) == 2);
        return rule->moments == MSC_OPTIM_MOMENTS_CODE8 ? MSC__UPDATE_ADAM_CODES : MSC__UPDATE_ADAM;
    }
}

/* All of it before anything is submitted. */
static msc_status check_tensor(const msc_optim_rule *rule, const msc_optim_tensor *tensor, msc_error *err)
{
    static const uint8_t weight_bytes[] = {4, 2, 2, 2};
    static const uint8_t master_bytes[] = {1, 4, 2, 1};
    static const uint8_t moment_bytes[] = {4, 2, 1};
    uint32_t moments = msc__moment_count(rule);
    msc_status status =
        msc__card_aligned("gradient", tensor->gradient, msc__float_bytes(rule->gradient), err);

    if (status == MSC_OK)
        status = msc__card_aligned("weight", tensor->weight, weight_bytes[rule->weights], err);
    if (status == MSC_OK && rule->weights != MSC_OPTIM_WEIGHTS_FP32)
        status = msc__card_aligned("master", tensor->master, master_bytes[rule->weights], err);
    if (status == MSC_OK && moments >= 1)
        status = msc__card_aligned("moment1", tensor->moment1, moment_bytes[rule->moments], err);
    if (status == MSC_OK && moments == 2)
        status = msc__card_aligned("moment2", tensor->moment2, moment_bytes[rule->moments], err);
    if (status == MSC_OK && msc__strips(tensor->count) > MOST_GROUPS)
        status = msc__fail(err, MSC_EINVAL, "a tensor has %llu elements, more than a card takes",
                           (unsigned long long)tensor->count);
    return status;
}

static uint32_t listed_strips(const msc__card_step *list)
{
    return list->tensor_count > 0 ? list->tensors[list->tensor_count - 1].after : 0;
}

static void append(msc__card_step *list, const msc_optim_tensor *tensor)
{
    uint32_t before = listed_strips(list);
    msc__card_tensor *to = &list->tensors[list->tensor_count++];

    MSC__ASSERT(list->tensor_count <= MSC__CARD_TENSORS && tensor->count > 0);
    MSC__ASSERT(msc__strips(tensor->count) <= MOST_GROUPS - before);
    to->gradient = tensor->gradient;
    to->weight = tensor->weight;
    to->master = tensor->master;
    to->moment1 = tensor->moment1;
    to->moment2 = tensor->moment2;
    to->scale1 = tensor->scale1;
    to->scale2 = tensor->scale2;
    to->count = tensor->count;
    to->random = msc__random_first(tensor->step, tensor->first);
    to->after = before + (uint32_t)msc__strips(tensor->count);
}

static msc_status flush(msc__card *card, msc__card_step *list, msc_error *err)
{
    msc_status status = MSC_OK;

    if (list->tensor_count > 0)
        status = msc__card_run(card, MSC__CARD_STEP, listed_strips(list), list, err);
    MSC__ASSERT(list->tensor_count == 0 || listed_strips(list) > 0);
    list->tensor_count = 0;
    return status;
}

static msc_status submit(msc__card *card, const msc_optim_rule *rule, const msc_optim_tensor *tensors,
                         uint64_t tensor_count, msc_error *err)
{
    msc__card_step list;
    msc_status status = MSC_OK;
    uint64_t step = 0; /* of the list; none has 0 */
    uint64_t i;

    memset(&list, 0, sizeof list);
    list.update = update_of(rule);
    list.gradient = (uint8_t)rule->gradient;
    list.weights = (uint8_t)rule->weights;
    list.moments = (uint8_t)rule->moments;
    for (i = 0; status == MSC_OK && i < tensor_count; i++) {
        const msc_optim_tensor *tensor = &tensors[i];

        if (tensor->count == 0)
            continue;
        if (list.tensor_count == MSC__CARD_TENSORS || tensor->step != step ||
            msc__strips(tensor->count) > MOST_GROUPS - listed_strips(&list))
            status = flush(card, &list, err);
        if (tensor->step != step)
            list.numbers = msc__rule_numbers(rule, tensor->step);
        MSC__ASSERT(tensor->step > 0 && (list.tensor_count == 0 || tensor->step == step || status != MSC_OK));
        step = tensor->step;
        append(&list, tensor);
    }
    return status == MSC_OK ? flush(card, &list, err) : status;
}

msc_status msc__card_step_all(msc__card *card, const msc_optim_rule *rule, const msc_optim_tensor *tensors,
                              uint64_t tensor_count, msc_error *err)
{
    msc_status status = MSC_OK;
    uint64_t i;

    for (i = 0; status == MSC_OK && i < tensor_count; i++)
        if (tensors[i].count > 0)
            status = check_tensor(rule, &tensors[i], err);
    if (status == MSC_OK)
        status = msc__device_check_process(card->device, err); /* a parent's lock may be taken for ever */
    if (status != MSC_OK)
        return status;
    msc__mutex_lock(&card->call);
    status = submit(card, rule, tensors, tensor_count, err);
    msc__mutex_unlock(&card->call);
    return status;
}
