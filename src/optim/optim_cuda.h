/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim_cuda.h
 * The calls of optim.h on a card. What they are given has been checked, as for host cores; here comes what only a card asks
 * for.
 */
#ifndef MSC_OPTIM_CUDA_H
#define MSC_OPTIM_CUDA_H

#include "base/thread.h"
#include "optim/cuda/card_types.h"

/** The kernels' text, made by tools/embed_text.py from cuda/kernels.cu. */
extern const char msc__optim_cuda_text[];

typedef enum msc__card_kernel {
    MSC__CARD_STEP,
    MSC__CARD_NORM,
    MSC__CARD_CHANGE,
    MSC__CARD_WRITE,
    MSC__CARD_KERNELS
} msc__card_kernel;

/** A card, as an optimizer has it. */
typedef struct msc__card {
    msc_context *ctx;
    msc_device *device;
    void *stream; /* the caller's */
    void *kernels[MSC__CARD_KERNELS];
    msc__card_sums *sums; /* on the card; with the next two, NULL before the first norm */
    void *back;           /* a stream of ours, for what comes back */
    void *event;
    msc__mutex call; /* one call at a time: `sums` and `event` are one call's */
    bool locks;      /* the mutex exists */
} msc__card;

/**
 * Compiles the kernels, unless the device has them.
 * Errors: EUNSUPPORTED (no card, no compiler), EDEVMEM, EDRIVER, ENOMEM.
 */
msc_status msc__card_create(msc_context *ctx, msc_device *device, void *stream, msc__card **out,
                            msc_error *err);
void msc__card_destroy(msc__card *card);

/** Submits a kernel for `strips` groups, one for each. */
msc_status msc__card_run(msc__card *card, msc__card_kernel kernel, uint64_t groups, const void *argument,
                         msc_error *err);

msc_status msc__card_step_all(msc__card *card, const msc_optim_rule *rule, const msc_optim_tensor *tensors,
                              uint64_t tensor_count, msc_error *err);

/** Sums of each segment, as optim_sums.c has them, when they have come back. `strips`: of all arrays, above 0. */
msc_status msc__card_norm_all(msc__card *card, const msc_optim_array *arrays, uint64_t array_count,
                              float scale, uint64_t strips, msc__card_sums *out, msc_error *err);

msc_status msc__card_add(msc__card *card, float *sums, const msc_optim_array *gradient, msc_error *err);
msc_status msc__card_convert(msc__card *card, void *to, msc_optim_float to_type, const msc_optim_array *from,
                             msc_error *err);
msc_status msc__card_split_all(msc__card *card, msc_optim_weights form, const float *from, uint64_t count,
                               void *weight, void *master, msc_error *err);
msc_status msc__card_join_all(msc__card *card, msc_optim_weights form, const void *weight, const void *master,
                              uint64_t count, float *to, msc_error *err);
msc_status msc__card_read(msc__card *card, const msc_optim_rule *rule, const msc_optim_tensor *tensor,
                          float *moment1, float *moment2, msc_error *err);
msc_status msc__card_write_all(msc__card *card, const msc_optim_rule *rule, const msc_optim_tensor *tensor,
                               const float *moment1, const float *moment2, msc_error *err);

/** An address whose numbers of `bytes` each lie in line, as a card needs them. Errors: EINVAL, which names it. */
msc_status msc__card_aligned(const char *name, const void *at, uint32_t bytes, msc_error *err);

#endif /* MSC_OPTIM_CUDA_H */
