/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Creates and destroys an optimizer, and the choice of its instruction set.
 *
 *      on a card, after the same checks: optim_cuda*.c, cuda/
 *
 *      msc_optim_step ─► optim_step.c ─┬─► optim_moments.c ─┐
 *      sums, types ─► optim_sums.c ────┤                    ├─► a table of kernels, optim_template.h
 *                     optim_convert.c ─┘                    │   compiled three times from one text
 *                            │                              │
 *                     optim_pool.c: strips of arrays        └── adamw_core.h, convert_core.h: one element;
 *                     divided among threads                     codes_core.h, lanes.h: a vector of them
 *
 * Invariants: an element's result depends on the element, its block's neighbours, the rule, the step and the index.
 * Strips and parts of threads begin at blocks, so neither shows in a result; nor does the instruction set, since each
 * kernel is the same sequence of rounded operations.
 *
 * An object has no state but its threads; the arrays of a call are the caller's.
 */
#include "memscale/optim.h"

#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"
#include "optim/optim_cuda.h"
#include "optim/optim_internal.h"

void msc_optim_options_init(msc_optim_options *out, size_t struct_bytes)
{
    msc_optim_options options;

    memset(&options, 0, sizeof options);
    options.thread_count = 1;
    options.isa = MSC_OPTIM_ISA_ANY;
    msc__sized_init(out, struct_bytes, &options, sizeof options);
}

static const msc__optim_kernels *kernels_of(msc_optim_isa isa)
{
    switch (isa) {
    case MSC_OPTIM_ISA_SCALAR:
        return &msc__optim_scalar;
#ifdef MSC__OPTIM_X86
    case MSC_OPTIM_ISA_AVX2:
        return __builtin_cpu_supports("avx2") ? &msc__optim_avx2 : NULL;
    case MSC_OPTIM_ISA_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                   ? &msc__optim_avx512
                   : NULL;
#endif
    default:
        return NULL;
    }
}

static msc_optim_isa widest(void)
{
    if (kernels_of(MSC_OPTIM_ISA_AVX512) != NULL)
        return MSC_OPTIM_ISA_AVX512;
    return kernels_of(MSC_OPTIM_ISA_AVX2) != NULL ? MSC_OPTIM_ISA_AVX2 : MSC_OPTIM_ISA_SCALAR;
}

int msc_optim_isa_runs(msc_optim_isa isa)
{
    return isa == MSC_OPTIM_ISA_ANY || kernels_of(isa) != NULL;
}

const char *msc_optim_isa_name(msc_optim_isa isa)
{
    static const char *const names[] = {"any", "scalar", "avx2", "avx512"};

    return isa < MSC_OPTIM_ISA_COUNT ? names[isa] : "unknown";
}

static msc_status check_device(const msc_optim_options *options, msc_error *err)
{
    if (options->device == NULL && options->stream != NULL)
        return msc__fail(err, MSC_EINVAL, "stream is %p, of no device", options->stream);
    if (options->device != NULL && options->thread_count != 1)
        return msc__fail(err, MSC_EINVAL, "thread_count is %u, a device has threads of its own: allowed is 1",
                         options->thread_count);
    if (options->device != NULL && options->isa != MSC_OPTIM_ISA_ANY)
        return msc__fail(err, MSC_EINVAL, "isa is %s, a device has one of its own: allowed is any",
                         msc_optim_isa_name(options->isa));
    return MSC_OK;
}

static msc_status check_options(const msc_optim_options *options, msc_error *err)
{
    if (options->thread_count == 0 || options->thread_count > MSC__POOL_MOST)
        return msc__fail(err, MSC_EINVAL, "thread_count is %u, allowed are 1 to %u", options->thread_count,
                         MSC__POOL_MOST);
    if (options->isa >= MSC_OPTIM_ISA_COUNT)
        return msc__fail(err, MSC_EINVAL, "isa is %u, allowed are 0 to %u", (unsigned)options->isa,
                         (unsigned)MSC_OPTIM_ISA_COUNT - 1);
    if (!msc_optim_isa_runs(options->isa))
        return msc__fail(err, MSC_EUNSUPPORTED, "isa is %s, which this machine or this build does not have",
                         msc_optim_isa_name(options->isa));
    return check_device(options, err);
}

/* Host cores, or a card. */
static msc_status give_workers(msc_optim *optim, const msc_optim_options *options, msc_error *err)
{
    if (options->device != NULL)
        return msc__card_create(optim->ctx, options->device, options->stream, &optim->card, err);
    optim->isa = options->isa == MSC_OPTIM_ISA_ANY ? widest() : options->isa;
    optim->kernels = kernels_of(optim->isa);
    MSC__ASSERT(optim->kernels != NULL && optim->isa != MSC_OPTIM_ISA_ANY);
    return msc__pool_init(&optim->pool, optim->ctx, options->thread_count, err);
}

msc_status msc_optim_create(msc_context *ctx, const msc_optim_options *options, msc_optim **out,
                            msc_error *err)
{
    msc_optim_options used = msc_optim_options_default();
    msc_optim *optim;
    msc_status status = MSC_OK;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "out is NULL");
    *out = NULL;
    if (ctx == NULL)
        return msc__fail(err, MSC_EINVAL, "ctx is NULL");
    if (options != NULL)
        status = MSC__READ_OPTIONS("", msc_optim_options, thread_count, options, &used, err);
    if (status == MSC_OK)
        status = check_options(&used, err);
    if (status != MSC_OK)
        return status;
    optim = msc__alloc(ctx, sizeof *optim);
    if (optim == NULL)
        return msc__fail_memory(err, "an optimizer", sizeof *optim);
    optim->ctx = ctx;
    status = give_workers(optim, &used, err);
    if (status != MSC_OK) {
        msc_optim_destroy(optim);
        return status;
    }
    *out = optim;
    return MSC_OK;
}

void msc_optim_destroy(msc_optim *optim)
{
    if (optim == NULL)
        return;
    msc__card_destroy(optim->card);
    if (optim->kernels != NULL)
        msc__pool_fini(&optim->pool);
    msc__free(optim->ctx, optim, sizeof *optim);
}

msc_optim_isa msc_optim_isa_used(const msc_optim *optim)
{
    return optim->isa;
}
