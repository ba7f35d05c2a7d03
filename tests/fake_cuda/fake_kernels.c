/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of src/optim/cuda, compiled for the host, and the search among all of ours. */
#include "fake_cuda/fake_kernels.h"

#include <string.h>

#include "fake_cuda/fake_objects.h"

#include "fake_cuda/fake_macros.h"
/* after it */
#include "optim/cuda/card_template.h"

const uint32_t fake_kernel_threads = MSC__CARD_THREADS;

/* ---- what a card would fault at --------------------------------------------------------------------------------- */

const char *fake_fault_at(const void *at, uint64_t count, uint32_t each, int card)
{
    fake_object block;

    if (count == 0 || each == 0)
        return NULL;
    if ((uintptr_t)at % each != 0)
        return "misaligned address";
    if (!fake_find(fake_holder(FAKE_BLOCK, at, count * each), FAKE_BLOCK, card, &block))
        return "illegal address: no block of this card holds the array";
    return NULL;
}

#define NO_FAULT(at, count, each)                                                                            \
    do {                                                                                                     \
        const char *why = fake_fault_at(at, count, each, card);                                              \
        if (why != NULL)                                                                                     \
            return why;                                                                                      \
    } while (0)

static uint32_t float_bytes(uint32_t type)
{
    return type == MSC_OPTIM_FLOAT_FP32 ? 4 : 2;
}

static uint64_t blocks_of(uint64_t count)
{
    return (count + MSC_OPTIM_BLOCK - 1) / MSC_OPTIM_BLOCK;
}

static const char *step_fault(const void *argument, int card)
{
    static const uint8_t weight_bytes[] = {4, 2, 2, 2};
    static const uint8_t master_bytes[] = {0, 4, 2, 1};
    static const uint8_t moment_bytes[] = {4, 2, 1};
    const msc__card_step *by = argument;
    uint32_t moment1 = by->update == MSC__UPDATE_SGD ? 0 : moment_bytes[by->moments];
    uint32_t moment2 = by->update <= MSC__UPDATE_ADAM_CODES ? moment_bytes[by->moments] : 0;
    bool codes = by->moments == MSC_OPTIM_MOMENTS_CODE8;
    uint32_t i;

    for (i = 0; i < by->tensor_count; i++) {
        const msc__card_tensor *of = &by->tensors[i];

        NO_FAULT(of->gradient, of->count, float_bytes(by->gradient));
        NO_FAULT(of->weight, of->count, weight_bytes[by->weights]);
        NO_FAULT(of->master, of->count, master_bytes[by->weights]);
        NO_FAULT(of->moment1, of->count, moment1);
        NO_FAULT(of->moment2, of->count, moment2);
        NO_FAULT(of->scale1, blocks_of(of->count), codes && moment1 > 0);
        NO_FAULT(of->scale2, blocks_of(of->count), codes && moment2 > 0);
    }
    return NULL;
}

static const char *norm_fault(const void *argument, int card)
{
    const msc__card_norm *by = argument;
    uint32_t i;

    NO_FAULT(by->sums, sizeof *by->sums / 8, 8);
    for (i = 0; i < by->array_count; i++)
        NO_FAULT(by->arrays[i].values, by->arrays[i].count, float_bytes((uint32_t)by->arrays[i].type));
    return NULL;
}

static const char *arrays_fault(const void *argument, int card)
{
    static const uint8_t master_bytes[] = {0, 4, 2, 1};
    const msc__card_arrays *by = argument;
    uint64_t n = by->count;

    switch (by->change) {
    case MSC__CHANGE_TYPE:
    case MSC__CHANGE_ADD:
    case MSC__CHANGE_NEAREST:
        NO_FAULT(by->from[0], n, float_bytes(by->type));
        NO_FAULT(by->to[0], n, by->change == MSC__CHANGE_NEAREST ? 2 : float_bytes(by->to_type));
        return NULL;
    case MSC__CHANGE_SPLIT:
        NO_FAULT(by->from[0], n, 4);
        NO_FAULT(by->to[0], n, 2);
        NO_FAULT(by->to[1], n, master_bytes[by->form]);
        return NULL;
    case MSC__CHANGE_JOIN:
        NO_FAULT(by->from[0], n, 2);
        NO_FAULT(by->from[1], n, master_bytes[by->form]);
        NO_FAULT(by->to[0], n, 4);
        return NULL;
    case MSC__CHANGE_READ_SIGNED:
    case MSC__CHANGE_READ_ADAM:
        NO_FAULT(by->from[0], n, 1);
        NO_FAULT(by->from[1], blocks_of(n), 1);
        NO_FAULT(by->from[2], n, by->change == MSC__CHANGE_READ_ADAM);
        NO_FAULT(by->from[3], blocks_of(n), by->change == MSC__CHANGE_READ_ADAM);
        NO_FAULT(by->to[0], n, 4);
        NO_FAULT(by->to[1], n, by->change == MSC__CHANGE_READ_ADAM ? 4 : 0);
        return NULL;
    default:
        NO_FAULT(by->from[0], n, 4);
        NO_FAULT(by->from[1], n, by->change == MSC__CHANGE_WRITE_ADAM ? 4 : 0);
        NO_FAULT(by->to[0], n, 1);
        NO_FAULT(by->to[1], blocks_of(n), 1);
        NO_FAULT(by->to[2], n, by->change == MSC__CHANGE_WRITE_ADAM);
        NO_FAULT(by->to[3], blocks_of(n), by->change == MSC__CHANGE_WRITE_ADAM);
        return NULL;
    }
}

static const fake_kernel kernels[] = {
    {"msc_card_step", sizeof(msc__card_step), msc_card_step, step_fault},
    {"msc_card_norm", sizeof(msc__card_norm), msc_card_norm, norm_fault},
    {"msc_card_change", sizeof(msc__card_arrays), msc_card_change, arrays_fault},
    {"msc_card_write", sizeof(msc__card_arrays), msc_card_write, arrays_fault},
};

const fake_kernel *fake_kernel_named(const char *name)
{
    size_t i;

    for (i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (strcmp(kernels[i].name, name) == 0)
            return &kernels[i];
    return strcmp(fake_fingerprint_kernel.name, name) == 0 ? &fake_fingerprint_kernel : NULL;
}
