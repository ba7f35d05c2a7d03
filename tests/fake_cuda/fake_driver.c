/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver's functions, in the order of src/device/cuda_syms.h, over the host device. Each checks what it is
 * given, then does it there.
 */
#include <stdio.h>
#include <string.h>

#include "device/cuda_syms.h"
#include "device/cuda_types.h"
#include "fake_cuda/fake_kernels.h"
#include "fake_cuda/fake_objects.h"

#define COPY_FAILED 719 /* CUDA_ERROR_LAUNCH_FAILED: what a card says of work that went wrong */

/* The functions are declared from the table that they are looked up by. */
#define DECLARE(member, symbol, parameters)                                                                  \
    __attribute__((visibility("default"))) msc__cu_result symbol parameters;
MSC__CUDA_SYMBOLS(DECLARE)
#undef DECLARE

/* Leaves the function if it must fail; `card` is then set if a context is needed. */
#define BEGIN(needs_context)                                                                                 \
    int card = -1;                                                                                           \
    int begin_result = fake_begin(__func__, needs_context, &card);                                           \
    (void)card;                                                                                              \
    if (begin_result != MSC__CU_SUCCESS)                                                                     \
    return begin_result

#define BLAME(why, result) fake_blame(__func__, why, result)

static msc__cu_result result_of(msc_status status)
{
    switch (status) {
    case MSC_OK:
        return MSC__CU_SUCCESS;
    case MSC_EAGAIN:
        return MSC__CU_NOT_READY;
    case MSC_ENOMEM:
    case MSC_EDEVMEM:
        return MSC__CU_OUT_OF_MEMORY;
    default:
        return COPY_FAILED;
    }
}

static const msc_device_ops *ops(int card)
{
    return fake_cards[card].device->ops;
}

/* The host stream behind a handle; NULL: the handle is bad. */
static void *bare_stream(msc__cu_stream stream, int card)
{
    fake_object object;

    if (stream == NULL)
        return fake_cards[card].default_stream;
    return fake_find(stream, FAKE_STREAM, card, &object) ? object.host : NULL;
}

/* Takes the block or pinned range that begins exactly there; false: none of this card does (-1: of any). */
static bool take_at(fake_kind kind, const void *at, int card, fake_object *out)
{
    void *handle = fake_holder(kind, at, 1);

    return fake_find(handle, kind, card, out) && out->host == at && fake_take(handle, kind, card, out);
}

/* Blocks until a host stream has done every copy. */
static msc_status finish_copies(int card, void *stream)
{
    msc_device *device = fake_cards[card].device;
    void *event = NULL;
    msc_status status;

    fake_lock();
    status = ops(card)->event_create(device, &event, NULL);
    fake_unlock();
    if (status == MSC_OK)
        status = ops(card)->event_record(device, event, stream, NULL);
    if (status == MSC_OK)
        status = ops(card)->event_wait(device, event, NULL);
    fake_lock();
    ops(card)->event_destroy(device, event);
    fake_unlock();
    return status;
}

static void before_launch(int card, void *stream)
{
    (void)finish_copies(card, stream);
}

static void after_launch(int card, void *stream, void *event)
{
    (void)ops(card)->event_record(fake_cards[card].device, event, stream, NULL);
}

static const fake_launch_calls launch_calls = {before_launch, after_launch};

/* Blocks until a host stream has done everything. */
static msc_status finish(int card, void *stream)
{
    fake_launch_flush(card, stream, &launch_calls);
    return finish_copies(card, stream);
}

/* The same as bare_stream, for what comes behind the launches that wait there. */
static void *host_stream(msc__cu_stream stream, int card)
{
    void *host = bare_stream(stream, card);

    if (host != NULL)
        fake_launch_flush(card, host, &launch_calls);
    return host;
}

/* The host event behind a handle, with its last record where that was kept; NULL: the handle is bad. */
static void *host_event(msc__cu_event event, int card)
{
    fake_object object;

    if (!fake_find(event, FAKE_EVENT, card, &object))
        return NULL;
    fake_launch_flush_event(card, object.host, &launch_calls);
    return object.host;
}

static void finish_object(fake_object stream)
{
    (void)finish(stream.card, stream.host);
}

static void end_stream(fake_object stream)
{
    ops(stream.card)->stream_destroy(fake_cards[stream.card].device, stream.host);
}

/* ---- the library and its cards ---------------------------------------------------------------------- */

msc__cu_result cuInit(unsigned flags)
{
    int result = fake_start();
    BEGIN(false);

    if (flags != 0)
        return BLAME("flags must be 0", MSC__CU_INVALID_VALUE);
    return result;
}

static const struct {
    msc__cu_result result;
    const char *name;
    const char *text;
} errors[] = {
    {MSC__CU_SUCCESS, "CUDA_SUCCESS", "no error"},
    {MSC__CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {MSC__CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {MSC__CU_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {MSC__CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {MSC__CU_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {MSC__CU_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {MSC__CU_NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {MSC__CU_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {MSC__CU_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {MSC__CU_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM",
     "OS call failed or operation not supported on this OS"},
    {MSC__CU_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {MSC__CU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {MSC__CU_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the memory is pinned"},
    {MSC__CU_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "the memory is not pinned"},
    {COPY_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {MSC__CU_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

static msc__cu_result describe(msc__cu_result result, const char **name, const char **text)
{
    size_t i;

    for (i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        if (errors[i].result != result)
            continue;
        *name = errors[i].name;
        *text = errors[i].text;
        return MSC__CU_SUCCESS;
    }
    *name = NULL;
    *text = NULL;
    return MSC__CU_INVALID_VALUE;
}

msc__cu_result cuGetErrorName(msc__cu_result result, const char **name)
{
    const char *text;

    return describe(result, name, &text);
}

msc__cu_result cuGetErrorString(msc__cu_result result, const char **text)
{
    const char *name;

    return describe(result, &name, text);
}

msc__cu_result cuDriverGetVersion(int *version)
{
    BEGIN(false);

    *version = 12040;
    return MSC__CU_SUCCESS;
}

msc__cu_result cuDeviceGetCount(int *count)
{
    BEGIN(false);

    *count = fake_card_count;
    return fake_card_count > 0 ? MSC__CU_SUCCESS : MSC__CU_NO_DEVICE;
}

msc__cu_result cuDeviceGet(msc__cu_device *device, int ordinal)
{
    BEGIN(false);

    if (ordinal < 0 || ordinal >= fake_card_count)
        return MSC__CU_INVALID_DEVICE;
    *device = ordinal;
    return MSC__CU_SUCCESS;
}

msc__cu_result cuDeviceGetName(char *name, int bytes, msc__cu_device device)
{
    BEGIN(false);

    if (device < 0 || device >= fake_card_count)
        return BLAME("no such card", MSC__CU_INVALID_DEVICE);
    (void)snprintf(name, (size_t)bytes, "fake card %d", device);
    return MSC__CU_SUCCESS;
}

msc__cu_result cuDeviceGetAttribute(int *value, msc__cu_attribute attribute, msc__cu_device device)
{
    BEGIN(false);

    if (device < 0 || device >= fake_card_count)
        return BLAME("no such card", MSC__CU_INVALID_DEVICE);
    if (attribute != MSC__CU_CAPABILITY_MAJOR && attribute != MSC__CU_CAPABILITY_MINOR)
        return BLAME("no such attribute", MSC__CU_INVALID_VALUE);
    *value = attribute == MSC__CU_CAPABILITY_MAJOR ? fake_capability() / 10 : fake_capability() % 10;
    return MSC__CU_SUCCESS;
}

/* ---- contexts --------------------------------------------------------------------------------------- */

msc__cu_result cuDevicePrimaryCtxRetain(msc__cu_context *context, msc__cu_device device)
{
    msc_status status = MSC_OK;
    BEGIN(false);

    if (device < 0 || device >= fake_card_count)
        return BLAME("no such card", MSC__CU_INVALID_DEVICE);
    fake_lock();
    if (fake_cards[device].retained == 0)
        status =
            ops(device)->stream_create(fake_cards[device].device, &fake_cards[device].default_stream, NULL);
    if (status == MSC_OK)
        fake_cards[device].retained++;
    fake_unlock();
    *context = fake_cards[device].context;
    return result_of(status);
}

msc__cu_result cuDevicePrimaryCtxRelease_v2(msc__cu_device device)
{
    BEGIN(false);

    if (device < 0 || device >= fake_card_count || fake_cards[device].retained == 0)
        return BLAME("the context is not retained", MSC__CU_INVALID_CONTEXT);
    (void)finish(device, fake_cards[device].default_stream);
    fake_lock();
    if (--fake_cards[device].retained == 0) {
        ops(device)->stream_destroy(fake_cards[device].device, fake_cards[device].default_stream);
        fake_each(FAKE_DESTROYED_STREAM, device, end_stream);
        fake_give_up(device);
    }
    fake_unlock();
    return MSC__CU_SUCCESS;
}

msc__cu_result cuCtxPushCurrent_v2(msc__cu_context context)
{
    fake_object object;
    BEGIN(false);

    if (!fake_find(context, FAKE_CONTEXT, -1, &object))
        return BLAME("no such context", MSC__CU_INVALID_CONTEXT);
    return fake_push(object.card) ? MSC__CU_SUCCESS : BLAME("the stack is full", MSC__CU_INVALID_CONTEXT);
}

msc__cu_result cuCtxPopCurrent_v2(msc__cu_context *context)
{
    int popped;
    BEGIN(false);

    popped = fake_pop();
    if (popped < 0)
        return BLAME("no context is current", MSC__CU_INVALID_CONTEXT);
    *context = fake_cards[popped].context;
    return MSC__CU_SUCCESS;
}

/* ---- memory ----------------------------------------------------------------------------------------- */

msc__cu_result cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    BEGIN(true);

    *total_bytes = fake_card_bytes();
    *free_bytes = *total_bytes - fake_sum(FAKE_BLOCK, card);
    return MSC__CU_SUCCESS;
}

msc__cu_result cuMemAlloc_v2(msc__cu_pointer *out, size_t bytes)
{
    void *memory = NULL;
    msc_status status = MSC_EDEVMEM;
    BEGIN(true);

    if (bytes == 0)
        return MSC__CU_INVALID_VALUE;
    fake_lock();
    if (bytes <= fake_card_bytes() - fake_sum(FAKE_BLOCK, card))
        status = ops(card)->memory_create(fake_cards[card].device, bytes, &memory, NULL);
    if (status == MSC_OK)
        (void)fake_add(FAKE_BLOCK, card, memory, bytes);
    fake_unlock();
    *out = (msc__cu_pointer)(uintptr_t)memory;
    return result_of(status);
}

/* As the driver does: the memory goes when nothing can be using it any more. */
msc__cu_result cuMemFree_v2(msc__cu_pointer memory)
{
    const void *at = (const void *)(uintptr_t)memory;
    fake_object block;
    BEGIN(true);

    fake_each(FAKE_STREAM, card, finish_object);
    fake_each(FAKE_DESTROYED_STREAM, card, finish_object);
    (void)finish(card, fake_cards[card].default_stream);
    fake_lock();
    if (!take_at(FAKE_BLOCK, at, card, &block)) {
        fake_unlock();
        return BLAME("no block begins there", MSC__CU_INVALID_VALUE);
    }
    ops(card)->memory_destroy(fake_cards[card].device, block.host, block.bytes);
    fake_unlock();
    return MSC__CU_SUCCESS;
}

msc__cu_result cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags)
{
    msc__cu_result result = MSC__CU_SUCCESS;
    BEGIN(true);

    if (start == NULL || bytes == 0 || (flags & ~(unsigned)MSC__CU_HOST_REGISTER_PORTABLE) != 0)
        return BLAME("nothing, or unknown flags", MSC__CU_INVALID_VALUE);
    fake_lock();
    if (fake_pin_limit_bytes() != 0 && fake_sum(FAKE_PINNED, -1) + bytes > fake_pin_limit_bytes())
        result = MSC__CU_OUT_OF_MEMORY;
    else if (fake_toucher(FAKE_PINNED, start, bytes) != NULL)
        result = MSC__CU_ALREADY_REGISTERED;
    else
        (void)fake_add(FAKE_PINNED, card, start, bytes);
    fake_unlock();
    return result;
}

msc__cu_result cuMemHostUnregister(void *start)
{
    fake_object range;
    BEGIN(true);

    if (!take_at(FAKE_PINNED, start, -1, &range))
        return BLAME("the memory is not pinned", MSC__CU_NOT_REGISTERED);
    return MSC__CU_SUCCESS;
}

/* ---- streams ---------------------------------------------------------------------------------------- */

msc__cu_result cuStreamCreate(msc__cu_stream *out, unsigned flags)
{
    void *host = NULL;
    msc_status status;
    BEGIN(true);

    if (flags != MSC__CU_STREAM_NON_BLOCKING)
        return BLAME("it would wait for the default stream", MSC__CU_INVALID_VALUE);
    fake_lock();
    status = ops(card)->stream_create(fake_cards[card].device, &host, NULL);
    fake_unlock();
    *out = status == MSC_OK ? fake_add(FAKE_STREAM, card, host, 0) : NULL;
    return result_of(status);
}

/* As with a card, the call is over before the stream's work is. */
msc__cu_result cuStreamDestroy_v2(msc__cu_stream stream)
{
    fake_object object;
    BEGIN(true);

    if (stream != NULL)
        (void)host_stream(stream, card);
    if (!fake_take(stream, FAKE_STREAM, card, &object))
        return BLAME("no such stream", MSC__CU_INVALID_HANDLE);
    (void)fake_add(FAKE_DESTROYED_STREAM, card, object.host, 0);
    return MSC__CU_SUCCESS;
}

msc__cu_result cuStreamWaitEvent(msc__cu_stream stream, msc__cu_event event, unsigned flags)
{
    void *host = NULL;
    void *awaited = NULL;
    BEGIN(true);

    host = host_stream(stream, card);
    awaited = host_event(event, card);
    if (host == NULL || awaited == NULL || flags != 0)
        return BLAME("no such stream or event", MSC__CU_INVALID_HANDLE);
    return result_of(ops(card)->stream_wait(fake_cards[card].device, host, awaited, NULL));
}

msc__cu_result cuStreamSynchronize(msc__cu_stream stream)
{
    void *host = NULL;
    BEGIN(true);

    host = host_stream(stream, card);
    if (host == NULL)
        return BLAME("no such stream", MSC__CU_INVALID_HANDLE);
    return result_of(finish(card, host));
}

/* ---- events ----------------------------------------------------------------------------------------- */

msc__cu_result cuEventCreate(msc__cu_event *out, unsigned flags)
{
    void *host = NULL;
    msc_status status;
    BEGIN(true);

    if ((flags & MSC__CU_EVENT_DISABLE_TIMING) == 0)
        return BLAME("timing slows events down", MSC__CU_INVALID_VALUE);
    fake_lock();
    status = ops(card)->event_create(fake_cards[card].device, &host, NULL);
    fake_unlock();
    *out = status == MSC_OK ? fake_add(FAKE_EVENT, card, host, 0) : NULL;
    return result_of(status);
}

msc__cu_result cuEventDestroy_v2(msc__cu_event event)
{
    fake_object object;
    BEGIN(true);

    (void)host_event(event, card);
    if (!fake_take(event, FAKE_EVENT, card, &object))
        return BLAME("no such event", MSC__CU_INVALID_HANDLE);
    fake_lock();
    ops(card)->event_destroy(fake_cards[card].device, object.host);
    fake_unlock();
    return MSC__CU_SUCCESS;
}

msc__cu_result cuEventRecord(msc__cu_event event, msc__cu_stream stream)
{
    void *recorded = NULL;
    void *host = NULL;
    BEGIN(true);

    recorded = host_event(event, card);
    host = bare_stream(stream, card);
    if (recorded == NULL || host == NULL)
        return BLAME("no such event or stream", MSC__CU_INVALID_HANDLE);
    if (fake_launch_add_record(host, recorded))
        return MSC__CU_SUCCESS;
    return result_of(ops(card)->event_record(fake_cards[card].device, recorded, host, NULL));
}

msc__cu_result cuEventQuery(msc__cu_event event)
{
    void *host = NULL;
    BEGIN(true);

    host = host_event(event, card);
    if (host == NULL)
        return BLAME("no such event", MSC__CU_INVALID_HANDLE);
    return result_of(ops(card)->event_query(fake_cards[card].device, host, NULL));
}

msc__cu_result cuEventSynchronize(msc__cu_event event)
{
    void *host = NULL;
    BEGIN(true);

    host = host_event(event, card);
    if (host == NULL)
        return BLAME("no such event", MSC__CU_INVALID_HANDLE);
    return result_of(ops(card)->event_wait(fake_cards[card].device, host, NULL));
}

/* ---- copies ----------------------------------------------------------------------------------------- */

/* A copy from or to memory that is not pinned is over when the call returns, as the driver says of its own. */
static msc__cu_result copy(const char *function, void *to, const void *from, size_t bytes, bool out,
                           msc__cu_stream stream)
{
    const void *there = out ? from : to; /* on the card */
    const void *here = out ? to : from;
    void *host = NULL;
    fake_object block;
    msc_status status;
    bool pageable;
    int card = -1;
    int result = fake_begin(function, true, &card);

    if (result != MSC__CU_SUCCESS)
        return result;
    host = host_stream(stream, card);
    if (host == NULL)
        return fake_blame(function, "no such stream", MSC__CU_INVALID_HANDLE);
    if (bytes == 0 || !fake_find(fake_holder(FAKE_BLOCK, there, bytes), FAKE_BLOCK, card, &block))
        return fake_blame(function, "no block of this card holds these bytes", MSC__CU_INVALID_VALUE);
    if (fake_toucher(FAKE_BLOCK, here, bytes) != NULL)
        return fake_blame(function, "the host's side is a card's memory", MSC__CU_INVALID_VALUE);
    pageable = fake_holder(FAKE_PINNED, here, bytes) == NULL;
    fake_count_copy(pageable);
    status = ops(card)->copy(fake_cards[card].device, to, from, bytes, out ? MSC_COPY_OUT : MSC_COPY_IN, host,
                             NULL);
    if (status == MSC_OK && pageable)
        status = finish(card, host);
    return result_of(status);
}

msc__cu_result cuMemcpyDtoHAsync_v2(void *to, msc__cu_pointer from, size_t bytes, msc__cu_stream stream)
{
    return copy(__func__, to, (const void *)(uintptr_t)from, bytes, true, stream);
}

msc__cu_result cuMemcpyHtoDAsync_v2(msc__cu_pointer to, const void *from, size_t bytes, msc__cu_stream stream)
{
    return copy(__func__, (void *)(uintptr_t)to, from, bytes, false, stream);
}

/* ---- programs --------------------------------------------------------------------------------------- */

/* What libfake_nvrtc.so gives: machine code of just this card, or text for one that is not newer. */
msc__cu_result cuModuleLoadData(msc__cu_module *out, const void *image)
{
    char kind[8];
    int arch = 0;
    BEGIN(true);

    if (sscanf(image, "fake %7s %d", kind, &arch) != 2)
        return BLAME("no image", MSC__CU_INVALID_IMAGE);
    if (strcmp(kind, "cubin") == 0 ? arch != fake_capability() : arch > fake_capability())
        return BLAME("the image is for another card", MSC__CU_NO_BINARY);
    *out = fake_add(FAKE_MODULE, card, NULL, 0);
    return MSC__CU_SUCCESS;
}

msc__cu_result cuModuleUnload(msc__cu_module module)
{
    fake_object object;
    BEGIN(true);

    return fake_take(module, FAKE_MODULE, card, &object) ? MSC__CU_SUCCESS
                                                         : BLAME("no such module", MSC__CU_INVALID_HANDLE);
}

msc__cu_result cuModuleGetFunction(msc__cu_function *out, msc__cu_module module, const char *name)
{
    const fake_kernel *kernel = fake_kernel_named(name);
    fake_object object;
    BEGIN(true);

    if (!fake_find(module, FAKE_MODULE, card, &object))
        return BLAME("no such module", MSC__CU_INVALID_HANDLE);
    if (kernel == NULL)
        return MSC__CU_NOT_FOUND;
    *out = fake_add_function(card, module, kernel);
    return MSC__CU_SUCCESS;
}

msc__cu_result cuLaunchKernel MSC__CUDA_LAUNCH_PARAMETERS
{
    const fake_kernel *kernel;
    const char *fault;
    fake_object object;
    fake_object module;
    void *host;
    BEGIN(true);

    host = bare_stream(stream, card);
    if (!fake_find(function, FAKE_FUNCTION, card, &object) ||
        !fake_find(object.host, FAKE_MODULE, card, &module) || host == NULL)
        return BLAME("no such function or stream", MSC__CU_INVALID_HANDLE);
    if (grid_x == 0 || grid_x > INT32_MAX || block_x != fake_kernel_threads || shared_bytes != 0 ||
        grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || arguments == NULL || extra != NULL)
        return BLAME("the kernel was not made for such a launch", MSC__CU_INVALID_VALUE);
    kernel = object.kernel;
    fault = kernel->fault(arguments[0], card);
    if (fault != NULL)
        return BLAME(fault, MSC__CU_INVALID_VALUE);
    fake_count_launch();
    fake_launch_add(host, kernel, grid_x, arguments[0]);
    return MSC__CU_SUCCESS;
}
