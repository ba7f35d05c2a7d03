/* SPDX-License-Identifier: Apache-2.0 */
/** @file optim_internal.h  What the files of the optimizer share: the object, checks, and walks over strips. */
#ifndef MSC_OPTIM_INTERNAL_H
#define MSC_OPTIM_INTERNAL_H

#include <stdbool.h>

#include "optim/optim_kernels.h"
#include "optim/optim_pool.h"

/** Strips that a thread gets at least: below that, waking it takes as long as its part (some 10 µs). */
#define MSC__STRIPS_EACH 16u

/** More elements than any address space has room for, and few enough that no size computed from them overflows. */
#define MSC__MOST_ELEMENTS (UINT64_C(1) << 56)

struct msc_optim {
    msc_context *ctx;
    msc_optim_isa isa;
    const msc__optim_kernels *kernels;
    msc__pool pool;
};

static inline uint64_t msc__strips(uint64_t count)
{
    return count / MSC__STRIP + (count % MSC__STRIP != 0);
}

/** Elements of strip number `strip` of `count`. */
static inline uint32_t msc__strip_count(uint64_t count, uint64_t strip)
{
    uint64_t left = count - strip * MSC__STRIP;

    return left < MSC__STRIP ? (uint32_t)left : MSC__STRIP;
}

/** Bytes of one element of a type. */
uint32_t msc__float_bytes(msc_optim_float type);

/** Moments that a rule has: 0, 1 or 2. */
uint32_t msc__moment_count(const msc_optim_rule *rule);

/** Errors: EINVAL, with the field, its value and what is allowed. */
msc_status msc__rule_check(const msc_optim_rule *rule, msc_error *err);
msc_status msc__float_check(msc_optim_float type, const char *what, msc_error *err);
msc_status msc__form_check(msc_optim_weights form, msc_error *err);

/** `rule` as the formulas want it, in the step of that number. */
msc__optim_numbers msc__rule_numbers(const msc_optim_rule *rule, uint64_t step);

/** What the random numbers of a step follow from, beside the index. */
uint32_t msc__seed_of(uint64_t step);

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

/**
 * Moments of `count` elements from element `at` of a tensor. `load` returns them as floats, where they are or in
 * `buffers`; `store` puts them back. For Adam's codes, `store` takes the root of v instead of v.
 */
msc__moments msc__moments_load(const msc_optim *optim, const msc_optim_rule *rule,
                               const msc_optim_tensor *tensor, uint64_t at, uint32_t count,
                               msc__moments buffers);
/** What is stored, and from where. */
typedef struct msc__stored {
    uint64_t at;
    uint32_t count;
    msc__moments from;
    const uint32_t *random; /* as many */
} msc__stored;

void msc__moments_store(const msc_optim *optim, const msc_optim_rule *rule, const msc_optim_tensor *tensor,
                        const msc__stored *stored);

#endif /* MSC_OPTIM_INTERNAL_H */
