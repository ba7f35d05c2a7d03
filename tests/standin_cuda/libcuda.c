/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcuda: the driver library that PyTorch links to or opens itself, and that MemScale works with: memory, streams,
 * events, copies and kernels of the same card as the runtime's (libcudart, which this library needs). What is not
 * here is a stub (build.py).
 */
#include "card.h"
#include "kernels.h"
#include "streams.h"

#include <cuda.h>
#include <stdio.h>
#include <string.h>

/* More than a function of ours would have. */
#define LAUNCH_PARAMETERS                                                                                    \
    (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,               \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **arguments,           \
     void **extra)

static char present; /* its address is the context */
static _Thread_local int depth;

/* ---- the library and its card ----------------------------------------------------------------------- */

CUresult cuDeviceGetCount(int *count)
{
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device)
{
    (void)device;
    snprintf(name, (size_t)bytes, "%s", card()->name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    (void)device;
    *bytes = card()->capacity_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute which, CUdevice device)
{
    (void)device;
    *out = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? card()->major
           : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? card()->minor
                                                                   : 0;
    return CUDA_SUCCESS;
}

static const struct {
    CUresult result;
    const char *name;
    const char *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the memory is pinned"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "the memory is not pinned"},
};

static CUresult describe(CUresult result, const char **name, const char **text)
{
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        if (errors[i].result == result) {
            *name = errors[i].name;
            *text = errors[i].text;
            return CUDA_SUCCESS;
        }
    }
    *name = *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult result, const char **name)
{
    const char *text;

    return describe(result, name, &text);
}

CUresult cuGetErrorString(CUresult result, const char **text)
{
    const char *name;

    return describe(result, &name, text);
}

/* NVRTC asks for a table of its own, and does without where there is none. */
CUresult cuGetExportTable(const void **out, const CUuuid *which)
{
    (void)which;
    *out = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

/* ---- contexts --------------------------------------------------------------------------------------- */

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    (void)device;
    if (flags != NULL) {
        *flags = 0;
    }
    if (active != NULL) {
        *active = 1;
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    *context = (CUcontext)&present;
    return device == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = (CUcontext)&present;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    depth++;
    return context == (CUcontext)&present ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    *context = (CUcontext)&present;
    return depth-- > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* ---- memory ----------------------------------------------------------------------------------------- */

static void *address(CUdeviceptr at)
{
    return (void *)(uintptr_t)at;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    *free_bytes = card_free_bytes();
    *total = card()->capacity_bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size)
{
    *out = (CUdeviceptr)(uintptr_t)(size > 0 ? card_take(size) : NULL);
    return *out != 0 ? CUDA_SUCCESS : size > 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFree_v2(CUdeviceptr at)
{
    card_finish();
    return card_give(address(at)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostRegister_v2(void *at, size_t size, unsigned flags)
{
    (void)flags;
    return card_pin(at, size) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUresult cuMemHostUnregister(void *at)
{
    return card_unpin(at) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

static CUresult copy(const char *function, void *to, const void *from, size_t size, card_direction direction,
                     CUstream stream)
{
    card_copy what = {to, from, size, size, size, 1};

    return card_submit_copy((card_stream *)stream, function, what, direction) ? CUDA_SUCCESS
                                                                              : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy("cuMemcpyDtoHAsync", to, address(from), size, CARD_TO_HOST, stream);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    return copy("cuMemcpyHtoDAsync", address(to), from, size, HOST_TO_CARD, stream);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy("cuMemcpyDtoDAsync", address(to), address(from), size, CARD_TO_CARD, stream);
}

CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t size, CUstream stream)
{
    return card_submit_fill((card_stream *)stream, "cuMemsetD8Async", address(at), value, size)
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

/* ---- streams and events ----------------------------------------------------------------------------- */

CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    *out = (CUstream)card_stream_create((flags & CU_STREAM_NON_BLOCKING) == 0);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream)
{
    card_settle();
    card_stream_finish((card_stream *)stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    (void)flags;
    return card_stream_wait((card_stream *)stream, (card_event *)event) ? CUDA_SUCCESS
                                                                        : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
{
    card_submit_call((card_stream *)stream, function, argument, 0);
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    (void)flags;
    *out = (CUevent)card_event_create();
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event)
{
    card_event_destroy((card_event *)event);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    return card_event_record((card_event *)event, (card_stream *)stream) ? CUDA_SUCCESS
                                                                         : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventQuery(CUevent event)
{
    return card_event_query((card_event *)event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event)
{
    card_settle();
    return card_event_finish((card_event *)event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- kernels ---------------------------------------------------------------------------------------- */

/* The image is machine code of a card; its kernels are looked up by name among those compiled for the host. */
CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    *out = (CUmodule)(uintptr_t)image;
    return image != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
    (void)module;
    *out = (CUfunction)kernel_named(name);
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuLaunchKernel LAUNCH_PARAMETERS
{
    (void)shared_bytes;
    (void)extra;
    return kernel_launch((const void *)function, grid_x * grid_y * grid_z, block_x * block_y * block_z,
                         arguments[0], (card_stream *)stream)
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}
