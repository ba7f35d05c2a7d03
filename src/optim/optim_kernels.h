/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim_kernels.h
 * What is compiled for each instruction set: loops over a strip of elements, as a table of functions.
 *
 * Each function does one thing on floats in the first-level cache, so types of gradients, weights and moments combine
 * without a function for every combination. Arrays need no alignment; those of one call do not overlap.
 */
#ifndef MSC_OPTIM_KERNELS_H
#define MSC_OPTIM_KERNELS_H

#include <stdint.h>

#include "memscale/optim.h"
#include "optim/adamw_core.h"

/**
 * Elements that are worked on at a time. Four arrays of floats and one of random numbers take 10 KiB; with twice that, the
 * arrays that come from memory are driven out of a first-level cache of 48 KiB too early.
 */
#define MSC__STRIP 512u

/** The caller's arrays as the kernels see them: of any alignment, of any declared type. */
typedef float msc__f32 __attribute__((aligned(1), may_alias));
typedef uint16_t msc__u16 __attribute__((aligned(1), may_alias));

typedef struct msc__codes {
    uint8_t *code1;
    uint8_t *scale1;
    uint8_t *code2;
    uint8_t *scale2;
} msc__codes;

/** A strip, in whole blocks, for Adam with codes. */
typedef struct msc__adam_work {
    const void *gradient;
    msc_optim_float type; /* of the gradient, FP32 or BF16 */
    void *weight;         /* FP32; BF16, if there is a rest */
    void *rest;           /* 8 bits each, or NULL */
    msc__codes codes;
    uint32_t blocks;
    uint32_t first; /* number of element 0, see `msc__random` */
} msc__adam_work;

/** Moments as floats; NULL: not there. */
typedef struct msc__moments {
    msc__f32 *of1;
    msc__f32 *of2;
} msc__moments;

typedef enum msc__sgd_mode { MSC__SGD_PLAIN, MSC__SGD_MOMENTUM, MSC__SGD_NESTEROV } msc__sgd_mode;

/** Begins at a block where there are codes. `count` at most MSC__STRIP. `random`: a number for each element. */
typedef struct msc__optim_kernels {
    /** `first`: the number of element 0, see `msc__random`. */
    void (*random)(uint32_t *to, uint32_t first, uint32_t count);

    void (*widen[MSC_OPTIM_FLOAT_COUNT])(msc__f32 *to, const void *from, uint32_t count);
    void (*narrow[MSC_OPTIM_FLOAT_COUNT])(void *to, const msc__f32 *from, uint32_t count);
    /** `shift`: of the random number, to the lowest bit that is used. */
    void (*narrow_bf16_random)(void *to, const msc__f32 *from, uint32_t count, const uint32_t *random,
                               uint32_t shift);

    void (*join_rest16)(msc__f32 *to, const void *weight, const void *rest, uint32_t count);
    void (*join_rest8)(msc__f32 *to, const void *weight, const void *rest, uint32_t count);
    void (*split_rest16)(void *weight, void *rest, const msc__f32 *from, uint32_t count);
    void (*split_rest8)(void *weight, void *rest, const msc__f32 *from, uint32_t count,
                        const uint32_t *random);

    /** Codes in whole blocks; numbers are in buffers that no other array overlaps. */
    void (*decode_signed)(float *m, const msc__codes *codes, uint32_t blocks);
    void (*encode_signed)(const msc__codes *codes, const float *m, uint32_t blocks, const uint32_t *random);
    void (*decode_adam)(float *m, float *v, const msc__codes *codes, uint32_t blocks);
    /** To nearest. Adam's arrays are not kept. */
    void (*write_signed)(const msc__codes *codes, const float *m, uint32_t blocks);
    void (*write_adam)(const msc__codes *codes, float *m, float *v, uint32_t blocks);
    /** Decodes, steps and encodes. */
    void (*adam_codes)(const msc__optim_numbers *by, const msc__adam_work *work);

    void (*adam)(const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g, msc__moments moments,
                 uint32_t count);
    void (*sgd[3])(const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g, msc__f32 *m, uint32_t count);
    void (*lion)(const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g, msc__f32 *m, uint32_t count);

    void (*add)(msc__f32 *sums, const msc__f32 *g, uint32_t count);
    /** Sum of squares of the finite ones; returns the number of others. */
    uint32_t (*squares)(const msc__f32 *g, uint32_t count, float scale, double *sum);
} msc__optim_kernels;

/** x86 has the wider ones, whichever the processor at hand is (src/optim/meson.build). */
#if defined(__x86_64__)
#define MSC__OPTIM_X86
#endif

extern const msc__optim_kernels msc__optim_scalar;
#ifdef MSC__OPTIM_X86
extern const msc__optim_kernels msc__optim_avx2;
extern const msc__optim_kernels msc__optim_avx512;
#endif

#endif /* MSC_OPTIM_KERNELS_H */
