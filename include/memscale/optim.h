/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim.h
 * One optimizer step over flat arrays, on host cores or on a card, fused: each byte of a parameter and its state passes
 * once.
 *
 *     gradient ──► FP32, × gradient_scale ──► moments ──► update ──► weight, master
 *
 * The arrays are the caller's. The library reads and writes them where they are and keeps nothing of them between
 * calls, so state is saved by saving the arrays (docs/formats/optimizer-state.md). All state begins as zero bytes.
 * No alignment is needed; arrays that begin on cache lines, as tensors do, take up to half the time of others.
 *
 * **Weights**, `msc_optim_weights`. In bytes per parameter, with the weight itself:
 *
 *     FP32          4       one array, the weight
 *     MASTER_FP32   2 + 4   weight = master rounded to BF16, to nearest, halves to even
 *     MASTER_REST16 2 + 2   master = weight and 16 bits more, exactly FP32
 *     MASTER_REST8  2 + 1   master = weight and 8 bits more: 24 bits, 1 of sign, 8 of exponent, 15 of fraction
 *
 *   With a rest, the weight is the master rounded to the nearest BF16, halves away from zero, and the rest is the
 *   signed distance, in units of the master's last place, from weight to master: in [-2^15, 2^15) or [-2^7, 2^7).
 *   As bit patterns, master = (weight << 16) + rest, or + (rest << 8). Every master but a NaN comes back exactly,
 *   also where the weight rounds to infinity; a NaN becomes a quiet one. `msc_optim_split` and `msc_optim_join`
 *   convert.
 *   A step rounds a 24-bit master at random (below): its error is less than 2^-15 of the weight and 0 on average,
 *   so updates smaller than the last place are not lost.
 *
 * **Moments**, `msc_optim_moments`:
 *
 *     FP32   4 bytes each
 *     BF16   2 bytes each, rounded at random
 *     CODE8  1 byte each, and one byte of scale per MSC_OPTIM_BLOCK of them, rounded at random
 *
 *   A code is a small float X of 8 bits, less 1/128, times a power of two b that its block shares, in [max / 1.97,
 *   max × 1.04). The second moment is stored as its root r = sqrt(v); the first one as m / r for Adam, and as m otherwise:
 *
 *     root, 3 bits of exponent, 5 of fraction      up to 1.9609375 b; the next code is at most (r + b/128) / 32 away
 *     signed, 1 bit of sign, 3 and 4               up to 1.9296875 b; the next code is at most (|x| + b/128) / 16 away
 *
 *   Root and ratio are rounded each by itself, and the code for m stands for the ratio times the stored root. So what
 *   rounding does to a root shows in the next update only in the new gradient's share, which it can double and no more:
 *   an r > 0 is never stored as 0. Adam's gradients are limited to ±2^62 here, after scaling, so that v stays finite;
 *   below 2^-75 they vanish in v, as in FP32, and then also in m. Moments above 2^127 saturate. Blocks of zeros, denormal
 *   and huge numbers make no NaN.
 *
 * **Rounding at random** takes the upper or the lower neighbour with the probability that makes the mean right; what is
 * representable stays. A moving average with 0.999 would stand still if it were rounded to nearest: its steps are
 * smaller than half a code. The random numbers are a hash of `step` and the element's index, so the result is a
 * function of the arguments: the same in every run, on every machine, for every number of threads.
 *
 * **Numerics.** Hyperparameters are double; what follows from them alone (bias corrections, 1 - lr × decay, …) is
 * computed in double, as by torch.optim, and rounded to FP32 once. Elements are computed in FP32, IEEE, each operation
 * rounded, none fused, in the order of torch's single-tensor optimizers. What differs from torch: it fuses a
 * multiplication and an addition where it vectorises `lerp`, `addcmul` (Adam's moments) and `add(alpha=…)` (SGD,
 * weight decay of the gradient); it takes `lerp` from the other end for beta1 ≤ 0.5; its square root can be off by
 * a last place, where it is MKL's; and where Adam's moments are CODE8, the root of v is multiplied by the inverse of the
 * root of its bias correction, not divided by that. Every instruction set gives the same bits.
 *
 * **NaN and infinity** in gradients are the caller's to find, with `msc_optim_norm`, before it calls
 * `msc_optim_step`; a step that is not to be done is not called, and nothing changes. Otherwise they do what IEEE says to
 * weights and to FP32 and BF16 moments, and spoil a whole block of codes. With one exception: where Adam's moments are
 * CODE8, an infinite gradient counts as ±2^62, so its weight stays finite. Which NaN results is not specified.
 *
 * **On a card.** An optimizer that is created with a device works there: arrays of numbers and codes are then in that
 * device's memory, each at a multiple of its numbers' size, and what describes them (rules, tensors, results of norms)
 * is the program's as ever. Calls submit their work to the optimizer's stream and return; what the stream did before is
 * seen, and the arrays must stay until it has done the work. Only `msc_optim_norm` waits, for its result. The kernels are
 * the same formulas, compiled by NVIDIA's run-time compiler (device.h) when the first optimizer of a device is created, and
 * give the same bits.
 *
 * @code
 *     msc_optim_rule rule = msc_optim_rule_default(MSC_OPTIM_KIND_ADAMW);
 *     msc_optim_tensor tensor = {.count = n, .step = step, .weight = w, .gradient = g, .moment1 = m, .moment2 = v};
 *
 *     msc_optim_norm(optim, &array, 1, 1.0f, &norm, NULL);          // array: {g, n, MSC_OPTIM_FLOAT_FP32}
 *     if (norm.nonfinite_count == 0) {
 *         rule.gradient_scale = msc_optim_clip_factor(norm.sum_of_squares, 1.0);
 *         msc_optim_step(optim, &rule, &tensor, 1, &err);
 *     }
 * @endcode
 */
#ifndef MEMSCALE_OPTIM_H
#define MEMSCALE_OPTIM_H

#include "base.h"
#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Elements that share a scale in CODE8 moments. */
#define MSC_OPTIM_BLOCK 128u

/** Version of the state's layout, to be kept with what is saved. */
#define MSC_OPTIM_STATE_VERSION 1u

typedef enum msc_optim_kind {
    MSC_OPTIM_KIND_ADAMW, /**< weight_decay shrinks the weight */
    MSC_OPTIM_KIND_ADAM,  /**< weight_decay is added to the gradient */
    MSC_OPTIM_KIND_SGD,  /**< torch's: momentum, dampening, nesterov; weight_decay is added to the gradient */
    MSC_OPTIM_KIND_LION, /**< sign of beta1's average; beta2 for the moment; weight_decay shrinks the weight */
    MSC_OPTIM_KIND_COUNT
} msc_optim_kind;

typedef enum msc_optim_float {
    MSC_OPTIM_FLOAT_FP32,
    MSC_OPTIM_FLOAT_BF16,
    MSC_OPTIM_FLOAT_FP16,
    MSC_OPTIM_FLOAT_COUNT
} msc_optim_float;

typedef enum msc_optim_weights {
    MSC_OPTIM_WEIGHTS_FP32,
    MSC_OPTIM_WEIGHTS_MASTER_FP32,
    MSC_OPTIM_WEIGHTS_MASTER_REST16,
    MSC_OPTIM_WEIGHTS_MASTER_REST8,
    MSC_OPTIM_WEIGHTS_COUNT
} msc_optim_weights;

typedef enum msc_optim_moments {
    MSC_OPTIM_MOMENTS_FP32,
    MSC_OPTIM_MOMENTS_BF16,
    MSC_OPTIM_MOMENTS_CODE8,
    MSC_OPTIM_MOMENTS_COUNT
} msc_optim_moments;

/** Instruction sets, narrowest first. */
typedef enum msc_optim_isa {
    MSC_OPTIM_ISA_ANY,    /**< the widest that runs here */
    MSC_OPTIM_ISA_SCALAR, /**< what the compiler's target has by itself */
    MSC_OPTIM_ISA_AVX2,
    MSC_OPTIM_ISA_AVX512, /**< F, BW, DQ, VL */
    MSC_OPTIM_ISA_COUNT
} msc_optim_isa;

/**
 * Options of an `msc_optim`.
 *
 * Threads are PyTorch's own in a process that has it, where it is built with OpenMP. With a device, `thread_count` and
 * `isa` are the defaults.
 */
typedef struct msc_optim_options {
    size_t struct_bytes;   /**< sizeof(msc_optim_options) */
    uint32_t thread_count; /**< threads that work in a call, the caller's among them, 1 … 256. Default 1 */
    msc_optim_isa isa;     /**< default ANY */
    msc_device *device; /**< where the arrays are; outlives the optimizer. NULL, the default: the program's */
    void *stream; /**< of `device`, for all calls: the driver's handle. Default NULL, its default stream */
} msc_optim_options;

/** What is done, for all tensors of a call: a parameter group. */
typedef struct msc_optim_rule {
    size_t struct_bytes; /**< sizeof(msc_optim_rule) */
    msc_optim_kind kind;
    msc_optim_float gradient; /**< type of the gradients. Default FP32 */
    msc_optim_weights weights;
    msc_optim_moments moments;
    double learning_rate; /**< ≥ 0. Default that of torch: 1e-3; Lion 1e-4 */
    double beta1;         /**< Adam, AdamW, Lion: [0, 1). Default 0.9 */
    double beta2;         /**< the same. Default 0.999; Lion 0.99 */
    double epsilon;       /**< Adam, AdamW: ≥ 0. Default 1e-8 */
    double weight_decay;  /**< ≥ 0. Default 0; AdamW 0.01 */
    double momentum;      /**< SGD: ≥ 0. Default 0, which needs no moment */
    double dampening;     /**< SGD: any finite number. Default 0 */
    uint32_t nesterov;    /**< SGD: not 0 needs momentum and no dampening */
    uint32_t maximize;    /**< not 0: along the gradient instead of against it */
    float gradient_scale; /**< multiplies each gradient first: 1 / loss scale × clip factor. Default 1 */
} msc_optim_rule;

/**
 * A parameter, or a part of one. Which arrays are used follows from the rule; the others are not looked at. None may
 * overlap another.
 *
 * A part gives the same as the whole if it begins at a multiple of MSC_OPTIM_BLOCK and `first` says where.
 */
typedef struct msc_optim_tensor {
    uint64_t count;       /**< elements; 0: nothing is done, pointers may be NULL */
    uint64_t first;       /**< index of element 0 in the parameter, a multiple of MSC_OPTIM_BLOCK */
    uint64_t step;        /**< number of this step, counted from 1 */
    const void *gradient; /**< of the rule's type */
    void *weight;         /**< FP32 or BF16, by `weights` */
    void *master;         /**< FP32, 16 or 8 bits of rest; not for weights FP32 */
    void *moment1;        /**< m; not for SGD without momentum. SGD's becomes the gradient in step 1 */
    void *moment2;        /**< v; Adam and AdamW */
    uint8_t *scale1;      /**< CODE8: one byte per block of `moment1` */
    uint8_t *scale2;      /**< CODE8, Adam and AdamW: one byte per block of `moment2` */
} msc_optim_tensor;

/** Bytes of each array of a tensor; 0: not used. */
typedef struct msc_optim_sizes {
    uint64_t gradient_bytes;
    uint64_t weight_bytes;
    uint64_t master_bytes;
    uint64_t moment1_bytes;
    uint64_t moment2_bytes;
    uint64_t scale1_bytes;
    uint64_t scale2_bytes;
} msc_optim_sizes;

/** An array that is only read. */
typedef struct msc_optim_array {
    const void *values;
    uint64_t count;
    msc_optim_float type;
} msc_optim_array;

typedef struct msc_optim_norm_result {
    double sum_of_squares;    /**< of the finite elements; sums of several calls may be added */
    uint64_t nonfinite_count; /**< elements that are infinite or NaN */
} msc_optim_norm_result;

/** Threads, or a card's stream, and the kernels that they run. */
typedef struct msc_optim msc_optim;

/** Every default, for a struct of `struct_bytes`. */
MSC_API void msc_optim_options_init(msc_optim_options *options, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_optim_options msc_optim_options_default(void)
{
    msc_optim_options options;

    msc_optim_options_init(&options, sizeof options);
    return options;
}

/** The rule of `kind` with every default filled in, for FP32 throughout. */
MSC_API void msc_optim_rule_init(msc_optim_kind kind, msc_optim_rule *rule, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_optim_rule msc_optim_rule_default(msc_optim_kind kind)
{
    msc_optim_rule rule;

    msc_optim_rule_init(kind, &rule, sizeof rule);
    return rule;
}

/**
 * Creates the threads, which sleep between calls; or compiles a card's kernels and loads them, which takes about a
 * second for the first optimizer of a device.
 *
 * @param ctx     of this optimizer; a device's own is used as well.
 * @param options NULL for the defaults.
 * @param out     the caller owns the result and ends it with `msc_optim_destroy`.
 * Errors: EINVAL (names the field), EUNSUPPORTED (`isa` does not run here; the device runs no kernels, or there is no
 * compiler: says what to install), ENOMEM, EINTERNAL (no thread), EDEVMEM, EDRIVER, ESTATE (device.h).
 * Threads: any may call with the result; calls on the same one wait for each other. After a fork the child may go on:
 * its calls run on the calling thread alone, with the same results; with a device they return ESTATE. Which thread works on
 * which part depends on chance; on a machine with several memory nodes, threads prefer arrays (of a step: moments) that lie
 * on their own node. What has not been written yet comes to lie on all nodes alike.
 */
MSC_API MSC_NODISCARD msc_status msc_optim_create(msc_context *ctx, const msc_optim_options *options,
                                                  msc_optim **out, msc_error *err);

/** Ends the threads. No call may be under way, and none of its work on a card. NULL is accepted. */
MSC_API void msc_optim_destroy(msc_optim *optim);

/** The instruction set that was chosen; ANY for a card, else never. */
MSC_API msc_optim_isa msc_optim_isa_used(const msc_optim *optim);

/** Whether this machine and this build of the library have an instruction set: 1 or 0. */
MSC_API int msc_optim_isa_runs(msc_optim_isa isa);

/** "scalar", "avx2", "avx512", or "any". Never NULL. */
MSC_API const char *msc_optim_isa_name(msc_optim_isa isa);

/**
 * What arrays a tensor of `count` elements has under `rule`.
 * Errors: EINVAL (the rule), EOVERFLOW.
 */
MSC_API MSC_NODISCARD msc_status msc_optim_tensor_sizes(const msc_optim_rule *rule, uint64_t count,
                                                        msc_optim_sizes *out, msc_error *err);

/**
 * One step of all `tensors`, small ones in one go. Returns when it is done, or submitted to a card.
 *
 * Errors: EINVAL: the rule or a tensor, named with its index, field, value and what is allowed; all is checked
 * before anything changes. On a card, these calls also have the errors of its driver: EDRIVER, ESTATE.
 * Cost: allocates nothing. One pass over the arrays; with enough elements the machine's memory bandwidth decides
 * (bench/c/bench_optim.c).
 */
MSC_API MSC_NODISCARD msc_status msc_optim_step(msc_optim *optim, const msc_optim_rule *rule,
                                                const msc_optim_tensor *tensors, uint64_t tensor_count,
                                                msc_error *err);

/**
 * Sum of squares over all `arrays`, each element × `scale` in FP32 first, and how many are not finite, in one pass.
 *
 * Numerics: squares and sums in double, in an order that depends on the counts only.
 * Errors: EINVAL. Cost: allocates nothing; the first one on a card takes 4 KiB of its memory (EDEVMEM) until the end.
 */
MSC_API MSC_NODISCARD msc_status msc_optim_norm(msc_optim *optim, const msc_optim_array *arrays,
                                                uint64_t array_count, float scale, msc_optim_norm_result *out,
                                                msc_error *err);

/**
 * min(1, max_norm / (norm + 1e-6)) with norm = sqrt(sum_of_squares), in FP32 with torch's operations (reciprocal, then
 * product): what `torch.nn.utils.clip_grad_norm_` multiplies with. NaN for a NaN.
 */
MSC_API float msc_optim_clip_factor(double sum_of_squares, double max_norm);

/**
 * sums[i] += gradient[i], in FP32: gradients of several backward passes, exactly as torch adds FP32 ones.
 * Errors: EINVAL (also where the two overlap). Cost: allocates nothing.
 */
MSC_API MSC_NODISCARD msc_status msc_optim_accumulate(msc_optim *optim, float *sums,
                                                      const msc_optim_array *gradient, msc_error *err);

/**
 * Converts `from` to another type: to nearest, halves to even, overflow to infinity, a NaN stays one.
 * Errors: EINVAL (also where the two overlap). Cost: allocates nothing.
 */
MSC_API MSC_NODISCARD msc_status msc_optim_convert(msc_optim *optim, void *to, msc_optim_float to_type,
                                                   const msc_optim_array *from, msc_error *err);

/**
 * FP32 masters into weights and, by `form`, a copy or a rest. Not for FP32 weights.
 *
 * A 24-bit master is rounded to nearest here, halves away from zero.
 * Errors: EINVAL. Cost: allocates nothing.
 */
MSC_API MSC_NODISCARD msc_status msc_optim_split(msc_optim *optim, msc_optim_weights form, const float *from,
                                                 uint64_t count, void *weight, void *master, msc_error *err);

/** The masters of `msc_optim_split`, or of a step, as FP32. */
MSC_API MSC_NODISCARD msc_status msc_optim_join(msc_optim *optim, msc_optim_weights form, const void *weight,
                                                const void *master, uint64_t count, float *to,
                                                msc_error *err);

/**
 * The moments of a tensor as FP32, to show them or to go on with another optimizer.
 *
 * @param tensor  count, first and the arrays of its moments; nothing else is looked at.
 * @param moment1 `count` floats, where the rule has one. `moment2` likewise. Else ignored.
 * Errors: EINVAL.
 */
MSC_API MSC_NODISCARD msc_status msc_optim_moments_read(msc_optim *optim, const msc_optim_rule *rule,
                                                        const msc_optim_tensor *tensor, float *moment1,
                                                        float *moment2, msc_error *err);

/** The other way round, rounded to nearest, to a 30,000th of the distance; Adam's m over the root that is then stored. What
    `read` gave comes out the same when it is read again. */
MSC_API MSC_NODISCARD msc_status msc_optim_moments_write(msc_optim *optim, const msc_optim_rule *rule,
                                                         const msc_optim_tensor *tensor, const float *moment1,
                                                         const float *moment2, msc_error *err);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_OPTIM_H */
