/* SPDX-License-Identifier: Apache-2.0 */
/** @file optim_internal.h  What the files of the optimizer share: the object, checks, and walks over strips. */
#ifndef MSC_OPTIM_INTERNAL_H
#define MSC_OPTIM_INTERNAL_H

#include <stdbool.h>

#include "base/invariant.h"
#include "optim/optim_kernels.h"
#include "optim/optim_pool.h"

/** Strips that a thread gets at least: below that, waking it takes as long as its part (some 10 µs). */
#define MSC__STRIPS_EACH 16u

/** More elements than any address space has room for, and few enough that no size computed from them overflows. */
#define MSC__MOST_ELEMENTS (UINT64_C(1) << 56)

struct msc__card;

struct msc_optim {
    msc_context *ctx;
    msc_optim_isa isa;
    const msc__optim_kernels *kernels;
    msc__pool pool;
    struct msc__card *card; /* NULL: host cores */
};

static inline uint64_t msc__strips(uint64_t count)
{
    return count / MSC__STRIP + (count % MSC__STRIP != 0);
}

/** Elements of strip number `strip` of `count`. */
static inline uint32_t msc__strip_count(uint64_t count, uint64_t strip)
{
    uint64_t left = count - strip * MSC__STRIP;

    MSC__ASSERT(strip < msc__strips(count));

    return left < MSC__STRIP ? (uint32_t)left : MSC__STRIP;
}

/** Bytes of one element of a type. */
uint32_t msc__float_bytes(msc_optim_float type);

/** Moments that a rule has: 0, 1 or 2. */
uint32_t msc__moment_count(const msc_optim_rule *rule);

/** What a caller has given, whole, and checked. Errors: EINVAL, with the field, its value and what is allowed. */
msc_status msc__rule_read(const msc_optim_rule *given, msc_optim_rule *out, msc_error *err);

/** As `msc_optim_tensor_sizes`, of a rule that was read. */
msc_status msc__rule_sizes(const msc_optim_rule *rule, uint64_t count, msc_optim_sizes *out, msc_error *err);
msc_status msc__float_check(msc_optim_float type, const char *what, msc_error *err);
msc_status msc__form_check(msc_optim_weights form, msc_error *err);

/** `rule` as the formulas want it, in the step of that number. */
msc__optim_numbers msc__rule_numbers(const msc_optim_rule *rule, uint64_t step);

/** Number of element `index` in the step of that number, for the kernels' `random`. */
uint32_t msc__random_first(uint64_t step, uint64_t index);

/** A piece of memory that a call uses. */
typedef struct msc__range {
    const char *name;
    const void *at;
    uint64_t bytes; /* 0: not used */
} msc__range;

/** None of the ranges is NULL or overlaps another. `index`: of the tensor, for the message. */
msc_status msc__ranges_check(const msc__range *ranges, uint32_t count, uint64_t index, msc_error *err);

/** The count, `first` and arrays of a tensor; `moments_only` leaves out gradient, weight, master and step. */
msc_status msc__tensor_check(const msc_optim_rule *rule, const msc_optim_tensor *tensor, uint64_t index,
                             bool moments_only, msc_error *err);

/** Blocks that `count` elements have, the last one not always whole. */
static inline uint32_t msc__blocks(uint32_t count)
{
    return (count + MSC_OPTIM_BLOCK - 1) / MSC_OPTIM_BLOCK;
}

/** Codes of a strip whose last block is not whole: those of that block are followed by zeros. */
typedef struct msc__code_pad {
    uint8_t code1[MSC__STRIP];
    uint8_t code2[MSC__STRIP];
} msc__code_pad;

/** Codes of `count` elements from element `at` of a tensor, in whole blocks: where they are, or in `pad`. */
msc__codes msc__codes_begin(const msc_optim_rule *rule, const msc_optim_tensor *tensor, uint64_t at,
                            uint32_t count, msc__code_pad *pad);
/** Puts back what is in `pad`. */
void msc__codes_end(const msc_optim_rule *rule, const msc_optim_tensor *tensor, uint64_t at, uint32_t count,
                    const msc__code_pad *pad);

/** Floats of a strip, zeros behind the last one. */
typedef struct msc__buffers {
    _Alignas(64) float of1[MSC__STRIP];
    _Alignas(64) float of2[MSC__STRIP];
    msc__code_pad pad;
} msc__buffers;

/**
 * Moments of `count` elements from element `at` of a tensor. `load` returns them as floats, where they are or in
 * `buffers`; `store` puts them back, after a step that was not Adam's with codes.
 */
msc__moments msc__moments_load(const msc_optim *optim, const msc_optim_rule *rule,
                               const msc_optim_tensor *tensor, uint64_t at, uint32_t count,
                               msc__buffers *buffers);

/** What is stored. */
typedef struct msc__stored {
    uint64_t at;
    uint32_t count;
    const uint32_t *random; /* in whole blocks */
} msc__stored;

void msc__moments_store(const msc_optim *optim, const msc_optim_rule *rule, const msc_optim_tensor *tensor,
                        const msc__stored *stored, msc__buffers *buffers);

#endif /* MSC_OPTIM_INTERNAL_H */
