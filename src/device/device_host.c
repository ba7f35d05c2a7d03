/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host device: the processor in the role of a card. It is the reference for what a backend does, and the
 * place where faults are injected, so that the code above it can be wrong here and nowhere else.
 *
 *      device_host.c          the object, memory, pinning
 *      device_host_stream.c   streams, events, order
 *      device_host_copy.c     one copy and its faults
 *      device_host_memory.c   what the machine has left
 *
 * Device memory comes from the context, so its limit is the limit of this card, and the tests' allocator sees
 * every byte of it.
 *
 * Pinning does nothing but count. mlock would be the wrong thing: no device reads this memory past the processor,
 * and what mlock takes is a scarce good (`ulimit -l` is 8 MiB in many places) that the program may need for real.
 * The count is there because limits on pinned memory are what the callers must live with.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "device/device_host.h"

#define ALIGNMENT 512u /* of device memory: what the contract asks for */

static void host_destroy(msc_device *device)
{
    if (msc__device_check_process(device, NULL) == MSC_OK)
        msc__host_streams_fini((msc__host *)device);
    msc__free(device->ctx, device, sizeof(msc__host));
}

static msc_status host_memory_now(msc_device *device, msc_device_memory *out, msc_error *err)
{
    msc_status status = msc__device_check_process(device, err);

    return status == MSC_OK ? msc__host_memory_read("", out, err) : status;
}

/*
 * The context's blocks are aligned for fundamental types only. The address of the block stands in front of the
 * part that is given out:
 *
 *      block          | address | memory, aligned               |
 *      +-- up to 512 -+---- 8 --+-- bytes ----------------------+
 */
static msc_status host_memory_create(msc_device *device, uint64_t bytes, void **out, msc_error *err)
{
    uint64_t whole = UINT64_MAX;
    char *block = NULL;
    uintptr_t start;
    msc_status status = msc__device_check_process(device, err);

    *out = NULL;
    if (status != MSC_OK)
        return status;
    if (bytes == 0)
        return msc__fail(err, MSC_EINVAL, "0 bytes of device memory were asked for");
    if (msc__add_u64(bytes, ALIGNMENT + sizeof block, &whole) && whole <= SIZE_MAX)
        block = msc__resize(device->ctx, NULL, 0, (size_t)whole);
    if (block == NULL)
        return msc__fail(err, MSC_EDEVMEM, "cannot get %llu bytes of memory of the host device",
                         (unsigned long long)bytes);
    start = (uintptr_t)msc__round_up_u64((uintptr_t)block + sizeof block, ALIGNMENT);
    *out = block + (start - (uintptr_t)block);
    MSC__ASSERT((uintptr_t)*out % ALIGNMENT == 0);
    MSC__ASSERT((char *)*out - block >= (ptrdiff_t)sizeof block && (char *)*out + bytes <= block + whole);
    memcpy((char *)*out - sizeof block, &block, sizeof block);
    return MSC_OK;
}

static void host_memory_destroy(msc_device *device, void *memory, uint64_t bytes)
{
    char *block;

    if (memory == NULL)
        return;
    memcpy(&block, (char *)memory - sizeof block, sizeof block);
    MSC__ASSERT(block < (char *)memory && (char *)memory - block <= (ptrdiff_t)(ALIGNMENT + sizeof block));
    msc__free(device->ctx, block, (size_t)bytes + ALIGNMENT + sizeof block);
}

static msc_status host_pin(msc_device *device, void *start, uint64_t bytes, msc_error *err)
{
    msc__host *host = (msc__host *)device;
    const msc_device_faults *faults = &host->faults;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    msc_status status = msc__device_check_process(device, err);
    uint64_t after;

    if (status != MSC_OK)
        return status;
    if (start == NULL || bytes == 0 || (uintptr_t)start % page != 0)
        return msc__fail(err, MSC_EINVAL, "cannot pin %llu bytes at %p: pages have %llu bytes",
                         (unsigned long long)bytes, start, (unsigned long long)page);
    if (faults->refuse_pins != 0)
        return msc__fail(err, MSC_ENOMEM, "cannot pin %llu bytes: refused by fault injection (refuse_pins)",
                         (unsigned long long)bytes);
    if (faults->pin_delay_us != 0)
        msc__sleep_ns(faults->pin_delay_us * 1000LL);
    msc__mutex_lock(&host->mutex);
    after = msc__sat_add_u64(host->pinned_bytes, bytes);
    if (faults->pin_limit_bytes != 0 && after > faults->pin_limit_bytes)
        status =
            msc__fail(err, MSC_ENOMEM, "cannot pin %llu bytes: %llu are pinned and pin_limit_bytes is %llu",
                      (unsigned long long)bytes, (unsigned long long)host->pinned_bytes,
                      (unsigned long long)faults->pin_limit_bytes);
    else
        host->pinned_bytes = after;
    MSC__ASSERT(faults->pin_limit_bytes == 0 || host->pinned_bytes <= faults->pin_limit_bytes);
    msc__mutex_unlock(&host->mutex);
    return status;
}

static void host_unpin(msc_device *device, void *start, uint64_t bytes)
{
    msc__host *host = (msc__host *)device;

    if (start == NULL || msc__device_check_process(device, NULL) != MSC_OK)
        return;
    msc__mutex_lock(&host->mutex);
    host->pinned_bytes = msc__sat_sub_u64(host->pinned_bytes, bytes);
    msc__mutex_unlock(&host->mutex);
}

static const msc_device_ops host_ops = {
    .destroy = host_destroy,
    .memory_now = host_memory_now,
    .memory_create = host_memory_create,
    .memory_destroy = host_memory_destroy,
    .pin = host_pin,
    .unpin = host_unpin,
    .stream_create = msc__host_stream_create,
    .stream_destroy = msc__host_stream_destroy,
    .stream_finish = msc__host_stream_finish,
    .event_create = msc__host_event_create,
    .event_destroy = msc__host_event_destroy,
    .event_record = msc__host_event_record,
    .stream_wait = msc__host_stream_wait,
    .event_query = msc__host_event_query,
    .event_wait = msc__host_event_wait,
    .copy = msc__host_copy_submit,
};

msc_status msc__device_host_create(msc_context *ctx, const msc_device_options *options, msc_device **out,
                                   msc_error *err)
{
    msc__host *host = msc__alloc(ctx, sizeof *host);
    msc_status status;

    *out = NULL;
    if (host == NULL)
        return msc__fail_memory(err, "a device", sizeof *host);
    msc__device_init(&host->device, &host_ops, ctx, MSC_DEVICE_HOST);
    (void)snprintf(host->device.name, sizeof host->device.name, "host");
    host->faults = options->faults;
    status = msc__host_streams_init(host, err);
    if (status != MSC_OK) {
        msc__free(ctx, host, sizeof *host);
        return status;
    }
    *out = &host->device;
    return MSC_OK;
}
