/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The door: options are checked, the backend is opened, and what all backends share is answered here.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"
#include "base/thread.h"
#include "device/device_internal.h"

#define MILLION 1000000u

void msc_device_options_init(msc_device_options *out, size_t struct_bytes)
{
    msc_device_options options;

    memset(&options, 0, sizeof options);
    options.kind = MSC_DEVICE_HOST;
    msc__sized_init(out, struct_bytes, &options, sizeof options);
}

static int any_fault(const msc_device_faults *faults)
{
    return faults->seed != 0 || faults->delay_most_ns != 0 || faults->bytes_per_second != 0 ||
           faults->split_ppm != 0 || faults->fail_ppm != 0 || faults->pin_limit_bytes != 0 ||
           faults->refuse_pins != 0 || faults->pin_delay_us != 0;
}

static msc_status check_host(const msc_device_options *options, msc_error *err)
{
    const msc_device_faults *faults = &options->faults;

    if (options->ordinal != 0)
        return msc__fail(err, MSC_EINVAL, "ordinal is %u; the host has one device, 0", options->ordinal);
    if (options->library != NULL)
        return msc__fail(err, MSC_EINVAL, "library is '%s'; the host needs none", options->library);
    if (options->compiler != NULL)
        return msc__fail(err, MSC_EINVAL, "compiler is '%s'; the host needs none", options->compiler);
    if (faults->delay_most_ns < 0)
        return msc__fail(err, MSC_EINVAL, "faults.delay_most_ns is %lld; no delay is 0",
                         (long long)faults->delay_most_ns);
    if (faults->split_ppm > MILLION)
        return msc__fail(err, MSC_EINVAL, "faults.split_ppm is %u of a million", faults->split_ppm);
    if (faults->fail_ppm > MILLION)
        return msc__fail(err, MSC_EINVAL, "faults.fail_ppm is %u of a million", faults->fail_ppm);
    return MSC_OK;
}

static msc_status check_options(const msc_device_options *options, msc_error *err)
{
    if (options->kind == MSC_DEVICE_HOST)
        return check_host(options, err);
    if (options->kind != MSC_DEVICE_CUDA)
        return msc__fail(err, MSC_EINVAL, "kind is %d; MSC_DEVICE_HOST and MSC_DEVICE_CUDA are known",
                         (int)options->kind);
    if (any_fault(&options->faults))
        return msc__fail(err, MSC_EINVAL, "faults are set; only MSC_DEVICE_HOST has them");
    return MSC_OK;
}

msc_status msc_device_create(msc_context *ctx, const msc_device_options *options, msc_device **out,
                             msc_error *err)
{
    msc_device_options used = msc_device_options_default();
    msc_status status = MSC_OK;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "out is NULL");
    *out = NULL;
    if (ctx == NULL)
        return msc__fail(err, MSC_EINVAL, "ctx is NULL");
    if (options != NULL)
        status = MSC__READ_OPTIONS("", msc_device_options, ordinal, options, &used, err);
    if (status == MSC_OK)
        status = check_options(&used, err);
    if (status != MSC_OK)
        return status;
    if (used.kind == MSC_DEVICE_CUDA)
        return msc__device_cuda_create(ctx, &used, out, err);
    return msc__device_host_create(ctx, &used, out, err);
}

void msc_device_destroy(msc_device *device)
{
    if (device != NULL)
        device->ops->destroy(device);
}

msc_device_kind msc_device_kind_of(const msc_device *device)
{
    return device->kind;
}

const char *msc_device_name(const msc_device *device)
{
    return device->name;
}

msc_status msc_device_memory_now(msc_device *device, msc_device_memory *out, msc_error *err)
{
    if (device == NULL || out == NULL)
        return msc__fail(err, MSC_EINVAL, "%s is NULL", device == NULL ? "device" : "out");
    return device->ops->memory_now(device, out, err);
}

void msc__device_init(msc_device *device, const msc_device_ops *ops, msc_context *ctx, msc_device_kind kind)
{
    MSC__ASSERT(ops->destroy != NULL && ops->copy != NULL && ops->event_wait != NULL);
    MSC__ASSERT((ops->program_create == NULL) == (ops->launch == NULL));
    device->ops = ops;
    device->ctx = ctx;
    device->kind = kind;
    device->process = msc__fork_count();
}

msc_status msc__device_check_process(const msc_device *device, msc_error *err)
{
    if (device->process == msc__fork_count())
        return MSC_OK;
    return msc__fail(
        err, MSC_ESTATE,
        "the device was opened by the process that this one was forked from: open one here, or start "
        "workers by spawn");
}
