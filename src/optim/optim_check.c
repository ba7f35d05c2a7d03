/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether the arrays of a call can be worked on. All tensors are checked before the first one changes, so a call that
 * fails has done nothing.
 */
#include "base/error.h"
#include "base/invariant.h"
#include "optim/optim_internal.h"

static bool overlap(const msc__range *a, const msc__range *b)
{
    uintptr_t from_a = (uintptr_t)a->at;
    uintptr_t from_b = (uintptr_t)b->at;

    MSC__ASSERT(a->bytes > 0 && b->bytes > 0);
    return from_a < from_b + b->bytes && from_b < from_a + a->bytes;
}

msc_status msc__ranges_check(const msc__range *ranges, uint32_t count, uint64_t index, msc_error *err)
{
    unsigned long long number = index;
    uint32_t i, k;

    for (i = 0; i < count; i++) {
        if (ranges[i].bytes == 0)
            continue;
        if (ranges[i].at == NULL)
            return msc__fail(err, MSC_EINVAL, "%s of tensor %llu is NULL, it must have %llu bytes",
                             ranges[i].name, number, (unsigned long long)ranges[i].bytes);
        if ((uintptr_t)ranges[i].at > UINTPTR_MAX - ranges[i].bytes)
            return msc__fail(err, MSC_EINVAL, "%s of tensor %llu has %llu bytes from %p: beyond all memory",
                             ranges[i].name, number, (unsigned long long)ranges[i].bytes, ranges[i].at);
        for (k = 0; k < i; k++)
            if (ranges[k].bytes > 0 && overlap(&ranges[i], &ranges[k]))
                return msc__fail(err, MSC_EINVAL,
                                 "%s (%llu bytes from %p) and %s (%llu bytes from %p) of tensor %llu overlap",
                                 ranges[k].name, (unsigned long long)ranges[k].bytes, ranges[k].at,
                                 ranges[i].name, (unsigned long long)ranges[i].bytes, ranges[i].at, number);
    }
    return MSC_OK;
}

msc_status msc__tensor_check(const msc_optim_rule *rule, const msc_optim_tensor *tensor, uint64_t index,
                             bool moments_only, msc_error *err)
{
    msc_optim_sizes sizes;
    msc_status status = msc__rule_sizes(rule, tensor->count, &sizes, err);
    msc__range ranges[] = {
        {"moment1", tensor->moment1, sizes.moment1_bytes},
        {"moment2", tensor->moment2, sizes.moment2_bytes},
        {"scale1", tensor->scale1, sizes.scale1_bytes},
        {"scale2", tensor->scale2, sizes.scale2_bytes},
        {"gradient", tensor->gradient, sizes.gradient_bytes},
        {"weight", tensor->weight, sizes.weight_bytes},
        {"master", tensor->master, sizes.master_bytes},
    };

    if (status != MSC_OK)
        return status == MSC_EOVERFLOW
                   ? msc__fail(err, MSC_EINVAL, "count of tensor %llu is %llu, allowed are 0 to %llu",
                               (unsigned long long)index, (unsigned long long)tensor->count,
                               (unsigned long long)MSC__MOST_ELEMENTS)
                   : status;
    if (tensor->count == 0)
        return MSC_OK;
    if (tensor->first % MSC_OPTIM_BLOCK != 0)
        return msc__fail(err, MSC_EINVAL, "first of tensor %llu is %llu, allowed are multiples of %u",
                         (unsigned long long)index, (unsigned long long)tensor->first, MSC_OPTIM_BLOCK);
    if (!moments_only && tensor->step == 0)
        return msc__fail(err, MSC_EINVAL, "step of tensor %llu is 0, steps are counted from 1",
                         (unsigned long long)index);
    return msc__ranges_check(ranges, moments_only ? 4 : 7, index, err);
}
