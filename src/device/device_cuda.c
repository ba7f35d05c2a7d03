/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVIDIA cards, through the driver interface.
 *
 * Each slot is one driver call between two others that make the card's primary context current and put back what
 * was. The primary context is the one that the CUDA runtime, and hence PyTorch, works in, so pointers, streams and
 * events of both sides are of one kind. It is retained here, so it outlives a runtime that lets it go.
 *
 * Streams, events and device memory are the driver's own handles: there is nothing that we could keep about them
 * which the driver does not know better.
 *
 * An error of an earlier call may show in a later one: the driver reports failures of asynchronous work wherever it
 * notices them. That cannot be distinguished here; the message has the driver's name for it.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "device/device_cuda.h"

_Static_assert(sizeof(void *) == sizeof(msc__cu_pointer),
               "the driver's addresses have 64 bits, and so must ours");

/* ---- the current context ---------------------------------------------------------------------------- */

msc_status msc__cuda_enter(const msc__cuda *self, msc_error *err)
{
    msc_status status = msc__device_check_process(&self->device, err);

    MSC__ASSERT(self->context != NULL);
    if (status != MSC_OK)
        return status;
    return msc__cuda_check(&self->driver, self->driver.context_push(self->context), err,
                           "make the context of %s current", self->device.name);
}

void msc__cuda_leave(const msc__cuda *self)
{
    msc__cu_context ours;

    (void)self->driver.context_pop(&ours);
}

/* ---- memory ----------------------------------------------------------------------------------------- */

static msc_status cuda_memory_now(msc_device *device, msc_device_memory *out, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    msc_status status = msc__cuda_enter(self, err);

    if (status != MSC_OK)
        return status;
    status = msc__cuda_check(&self->driver, self->driver.memory_info(&free_bytes, &total_bytes), err,
                             "ask %s for its free memory", device->name);
    msc__cuda_leave(self);
    out->free_bytes = free_bytes;
    out->total_bytes = total_bytes;
    return status;
}

/* The driver's blocks are aligned to 512 bytes and more. */
static msc_status cuda_memory_create(msc_device *device, uint64_t bytes, void **out, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    msc__cu_pointer memory = 0;
    msc_status status;

    *out = NULL;
    if (bytes == 0)
        return msc__fail(err, MSC_EINVAL, "0 bytes of device memory were asked for");
    status = msc__cuda_enter(self, err);
    if (status != MSC_OK)
        return status;
    status = msc__cuda_check(&self->driver, self->driver.memory_alloc(&memory, (size_t)bytes), err,
                             "get %llu bytes of memory of %s", (unsigned long long)bytes, device->name);
    msc__cuda_leave(self);
    if (status == MSC_OK)
        memcpy(out, &memory, sizeof *out); /* addresses of the card and of the host are of one kind */
    return status;
}

static void cuda_memory_destroy(msc_device *device, void *memory, uint64_t bytes)
{
    const msc__cuda *self = (const msc__cuda *)device;

    (void)bytes;
    if (memory == NULL || msc__cuda_enter(self, NULL) != MSC_OK)
        return;
    (void)self->driver.memory_free((msc__cu_pointer)(uintptr_t)memory);
    msc__cuda_leave(self);
}

/* What to say when the system does not let go of so much memory; the limit is named because it is the usual one. */
static msc_status refuse_pin(const msc__cuda *self, uint64_t bytes, msc__cu_result result, msc_error *err)
{
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    const char *name = NULL;
    char limit_text[32] = "unlimited";
    msc_status status;

    (void)getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur != RLIM_INFINITY)
        (void)snprintf(limit_text, sizeof limit_text, "%llu KiB", (unsigned long long)limit.rlim_cur / 1024);
    if (self->driver.error_name(result, &name) != MSC__CU_SUCCESS || name == NULL)
        name = "an unknown error";
    status =
        msc__fail(err, MSC_ENOMEM,
                  "cannot pin %llu bytes: %s; ulimit -l is %s. Raise it, give the container more (docker run "
                  "--ulimit memlock=-1), or pin less; WSL allows only a part of the memory to be pinned",
                  (unsigned long long)bytes, name, limit_text);
    if (err != NULL)
        err->driver_code = result;
    return status;
}

static msc_status cuda_pin(msc_device *device, void *start, uint64_t bytes, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    msc__cu_result result;
    msc_status status = msc__cuda_enter(self, err);

    if (status != MSC_OK)
        return status;
    result = self->driver.host_register(start, (size_t)bytes, MSC__CU_HOST_REGISTER_PORTABLE);
    if (result == MSC__CU_OUT_OF_MEMORY || result == MSC__CU_OPERATING_SYSTEM ||
        result == MSC__CU_NOT_SUPPORTED)
        status = refuse_pin(self, bytes, result, err);
    else
        status = msc__cuda_check(&self->driver, result, err, "pin %llu bytes at %p",
                                 (unsigned long long)bytes, start);
    msc__cuda_leave(self);
    return status;
}

static void cuda_unpin(msc_device *device, void *start, uint64_t bytes)
{
    const msc__cuda *self = (const msc__cuda *)device;

    (void)bytes;
    if (start == NULL || msc__cuda_enter(self, NULL) != MSC_OK)
        return;
    (void)self->driver.host_unregister(start);
    msc__cuda_leave(self);
}

/* ---- streams ---------------------------------------------------------------------------------------- */

static msc_status cuda_stream_create(msc_device *device, void **out, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    msc__cu_stream stream = NULL;
    msc_status status;

    *out = NULL;
    status = msc__cuda_enter(self, err);
    if (status != MSC_OK)
        return status;
    status = msc__cuda_check(&self->driver, self->driver.stream_create(&stream, MSC__CU_STREAM_NON_BLOCKING),
                             err, "create a stream on %s", device->name);
    msc__cuda_leave(self);
    if (status == MSC_OK)
        *out = stream;
    return status;
}

/* The driver would let the work of a destroyed stream go on; the memory that it works on is about to go. */
static void cuda_stream_destroy(msc_device *device, void *stream)
{
    const msc__cuda *self = (const msc__cuda *)device;

    if (stream == NULL || msc__cuda_enter(self, NULL) != MSC_OK)
        return;
    (void)self->driver.stream_finish(stream);
    (void)self->driver.stream_destroy(stream);
    msc__cuda_leave(self);
}

static void cuda_stream_finish(msc_device *device, void *stream)
{
    const msc__cuda *self = (const msc__cuda *)device;

    if (msc__cuda_enter(self, NULL) != MSC_OK)
        return;
    (void)self->driver.stream_finish(
        stream); /* where it fails, the context has failed, and runs nothing more */
    msc__cuda_leave(self);
}

static msc_status cuda_stream_wait(msc_device *device, void *stream, void *event, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    msc_status status = msc__cuda_enter(self, err);

    if (status != MSC_OK)
        return status;
    status = msc__cuda_check(&self->driver, self->driver.stream_wait(stream, event, 0), err,
                             "make stream %p wait for event %p", stream, event);
    msc__cuda_leave(self);
    return status;
}

/* ---- events ----------------------------------------------------------------------------------------- */

/* Who waits on the host sleeps: it has nothing else to do, and the program that feeds the card needs the core. */
static msc_status cuda_event_create(msc_device *device, void **out, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    msc__cu_event event = NULL;
    msc_status status;

    *out = NULL;
    status = msc__cuda_enter(self, err);
    if (status != MSC_OK)
        return status;
    status = msc__cuda_check(
        &self->driver,
        self->driver.event_create(&event, MSC__CU_EVENT_DISABLE_TIMING | MSC__CU_EVENT_BLOCKING_SYNC), err,
        "create an event on %s", device->name);
    msc__cuda_leave(self);
    if (status == MSC_OK)
        *out = event;
    return status;
}

static void cuda_event_destroy(msc_device *device, void *event)
{
    const msc__cuda *self = (const msc__cuda *)device;

    if (event == NULL || msc__cuda_enter(self, NULL) != MSC_OK)
        return;
    (void)self->driver.event_destroy(event);
    msc__cuda_leave(self);
}

static msc_status cuda_event_record(msc_device *device, void *event, void *stream, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    msc_status status = msc__cuda_enter(self, err);

    if (status != MSC_OK)
        return status;
    status = msc__cuda_check(&self->driver, self->driver.event_record(event, stream), err,
                             "record event %p on stream %p", event, stream);
    msc__cuda_leave(self);
    return status;
}

static msc_status cuda_event_query(msc_device *device, void *event, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    msc__cu_result result;
    msc_status status = msc__cuda_enter(self, err);

    if (status != MSC_OK)
        return status;
    result = self->driver.event_query(event);
    status = result == MSC__CU_NOT_READY
                 ? MSC_EAGAIN
                 : msc__cuda_check(&self->driver, result, err, "finish the work before event %p", event);
    msc__cuda_leave(self);
    return status;
}

static msc_status cuda_event_wait(msc_device *device, void *event, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    msc_status status = msc__cuda_enter(self, err);

    if (status != MSC_OK)
        return status;
    status = msc__cuda_check(&self->driver, self->driver.event_wait(event), err,
                             "finish the work before event %p", event);
    msc__cuda_leave(self);
    return status;
}

/* ---- copies ----------------------------------------------------------------------------------------- */

static msc_status cuda_copy(msc_device *device, void *to, const void *from, uint64_t bytes,
                            msc_copy_kind kind, void *stream, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    msc__cu_result result;
    msc_status status;

    if (to == NULL || from == NULL || bytes == 0 || stream == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot copy %llu bytes from %p to %p on stream %p",
                         (unsigned long long)bytes, from, to, stream);
    status = msc__cuda_enter(self, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(kind == MSC_COPY_OUT || kind == MSC_COPY_IN);
    if (kind == MSC_COPY_OUT)
        result = self->driver.copy_out(to, (msc__cu_pointer)(uintptr_t)from, (size_t)bytes, stream);
    else
        result = self->driver.copy_in((msc__cu_pointer)(uintptr_t)to, from, (size_t)bytes, stream);
    status = msc__cuda_check(&self->driver, result, err, "copy %llu bytes %s %s, from %p to %p",
                             (unsigned long long)bytes, kind == MSC_COPY_OUT ? "out of" : "into",
                             device->name, from, to);
    msc__cuda_leave(self);
    return status;
}

/* ---- opening and closing ---------------------------------------------------------------------------- */

static void cuda_destroy(msc_device *device)
{
    msc__cuda *self = (msc__cuda *)device;

    msc__cuda_programs_end(self);
    MSC__ASSERT(self->programs == NULL);
    if (self->context != NULL && msc__device_check_process(device, NULL) == MSC_OK)
        (void)self->driver.context_release(self->card);
    msc__free(device->ctx, self->compiler, self->compiler_bytes);
    msc__free(device->ctx, self, sizeof *self);
}

static const msc_device_ops cuda_ops = {
    .destroy = cuda_destroy,
    .memory_now = cuda_memory_now,
    .memory_create = cuda_memory_create,
    .memory_destroy = cuda_memory_destroy,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_finish = cuda_stream_finish,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .stream_wait = cuda_stream_wait,
    .event_query = cuda_event_query,
    .event_wait = cuda_event_wait,
    .copy = cuda_copy,
    .program_create = msc__cuda_program_create,
    .kernel_find = msc__cuda_kernel_find,
    .launch = msc__cuda_launch,
};

static msc_status start_driver(const msc__cuda *self, msc_error *err)
{
    msc__cu_result result = self->driver.init(0);

    if (result == MSC__CU_NOT_INITIALIZED)
        return msc__cuda_check(
            &self->driver, result, err,
            "start the driver (it does not start in a process that was forked from one that "
            "used it: start workers by spawn)");
    return msc__cuda_check(&self->driver, result, err, "start the driver");
}

static msc_status find_card(msc__cuda *self, uint32_t ordinal, msc_error *err)
{
    const msc__cuda_driver *driver = &self->driver;
    int count = 0;
    msc_status status = msc__cuda_check(driver, driver->device_count(&count), err, "count the cards");

    if (status != MSC_OK)
        return status;
    if (count <= 0 || ordinal >= (uint32_t)count)
        return msc__fail(err, MSC_ENODEV,
                         "there is no card %u: the driver counts %d (CUDA_VISIBLE_DEVICES hides some)",
                         ordinal, count);
    MSC__ASSERT(ordinal < (uint32_t)count);
    status =
        msc__cuda_check(driver, driver->device_at(&self->card, (int)ordinal), err, "find card %u", ordinal);
    if (status != MSC_OK)
        return status;
    return msc__cuda_check(driver,
                           driver->device_name(self->device.name, (int)sizeof self->device.name, self->card),
                           err, "ask card %u for its name", ordinal);
}

/* The caller's name may be gone when the compiler is opened. */
static msc_status keep_compiler(msc__cuda *self, const char *name, msc_error *err)
{
    MSC__ASSERT(self->compiler == NULL);
    if (name == NULL)
        return MSC_OK;
    self->compiler_bytes = strlen(name) + 1;
    self->compiler = msc__alloc(self->device.ctx, self->compiler_bytes);
    if (self->compiler == NULL)
        return msc__fail_memory(err, "a file name", self->compiler_bytes);
    memcpy(self->compiler, name, self->compiler_bytes);
    return MSC_OK;
}

msc_status msc__device_cuda_create(msc_context *ctx, const msc_device_options *options, msc_device **out,
                                   msc_error *err)
{
    msc__cuda *self = msc__alloc(ctx, sizeof *self);
    msc_status status;

    *out = NULL;
    if (self == NULL)
        return msc__fail_memory(err, "a device", sizeof *self);
    msc__device_init(&self->device, &cuda_ops, ctx, MSC_DEVICE_CUDA);
    status = keep_compiler(self, options->compiler, err);
    if (status == MSC_OK)
        status = msc__cuda_open(&self->driver, options->library, err);
    if (status == MSC_OK)
        status = start_driver(self, err);
    if (status == MSC_OK)
        status = find_card(self, options->ordinal, err);
    if (status == MSC_OK) {
        status = msc__cuda_check(&self->driver, self->driver.context_retain(&self->context, self->card), err,
                                 "retain the context of %s", self->device.name);
        if (status != MSC_OK)
            self->context = NULL;
    }
    if (status != MSC_OK) {
        cuda_destroy(&self->device);
        return status;
    }
    MSC__ASSERT(self->context != NULL);
    *out = &self->device;
    return MSC_OK;
}
