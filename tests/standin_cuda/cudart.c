/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcudart: the runtime calls that PyTorch needs answered. Every other symbol of the real library is a stub
 * that returns success (build.py). Kernels are registered and launched, and do nothing.
 *
 * Small copies are real (up to 1 MiB), so that a scalar which a program puts on the card can be read back.
 */
#define __CUDA_RUNTIME_API_H_STANDIN
#include "card.h"
#include "driver.h"

#include <cuda.h>
#include <driver_types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COPIED_BYTES = 1 << 20, EVENT_SLOTS = 1 << 16 };

typedef cudaStream_t stream;

static _Thread_local cudaError_t last_error;
static int current_device;

static cudaError_t note(cudaError_t error)
{
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

/* ---- memory ----------------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **out, size_t size)
{
    *out = card_take(size);
    return note(*out != NULL ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *at)
{
    return at == NULL || card_give(at) ? cudaSuccess : note(cudaErrorInvalidValue);
}

cudaError_t cudaMallocAsync(void **out, size_t size, stream s)
{
    (void)s;
    return cudaMalloc(out, size);
}

cudaError_t cudaFreeAsync(void *at, stream s)
{
    (void)s;
    return cudaFree(at);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *free_bytes = card_free_bytes();
    *total = card()->capacity_bytes;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags)
{
    (void)flags;
    *out = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    return *out != NULL ? cudaSuccess : note(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocHost(void **out, size_t size)
{
    return cudaHostAlloc(out, size, 0);
}

cudaError_t cudaFreeHost(void *at)
{
    free(at);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind)
{
    (void)kind;
    if (size <= COPIED_BYTES) {
        memmove(to, from, size);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, stream s)
{
    (void)s;
    return cudaMemcpy(to, from, size, kind);
}

cudaError_t cudaMemset(void *at, int value, size_t size)
{
    if (size <= COPIED_BYTES) {
        memset(at, value, size);
    }
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *at, int value, size_t size, stream s)
{
    (void)s;
    return cudaMemset(at, value, size);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *at)
{
    memset(out, 0, sizeof *out);
    out->type = card_owns(at) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    out->devicePointer = (void *)(uintptr_t)at;
    return cudaSuccess;
}

/* ---- device ----------------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    return cudaDriverGetVersion(version);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device)
{
    const card_facts *facts = card();

    (void)device;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", facts->name);
    out->totalGlobalMem = facts->capacity_bytes;
    out->sharedMemPerBlock = 49152;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->warpSize = 32;
    out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
    out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 2147483647;
    out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->totalConstMem = 65536;
    out->major = facts->major;
    out->minor = facts->minor;
    out->multiProcessorCount = facts->units;
    out->maxThreadsPerMultiProcessor = facts->threads_per_unit;
    out->l2CacheSize = 6 << 20;
    out->sharedMemPerMultiprocessor = (size_t)facts->shared_bytes_per_unit;
    out->sharedMemPerBlockOptin = (size_t)facts->shared_bytes_optin;
    out->textureAlignment = 512;
    out->memPitch = 2147483647;
    out->unifiedAddressing = out->concurrentKernels = out->managedMemory = 1;
    out->maxBlocksPerMultiProcessor = 16;
    out->memoryBusWidth = 384;
    out->asyncEngineCount = 2;
    return cudaSuccess;
}

static int attribute_of(int attribute)
{
    struct cudaDeviceProp facts;

    cudaGetDeviceProperties(&facts, 0);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
        return 1024;
    case cudaDevAttrMaxBlockDimZ:
        return 64;
    case cudaDevAttrMaxGridDimX:
        return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
        return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        return 49152;
    case cudaDevAttrWarpSize:
        return 32;
    case cudaDevAttrMultiProcessorCount:
        return facts.multiProcessorCount;
    case cudaDevAttrComputeCapabilityMajor:
        return facts.major;
    case cudaDevAttrComputeCapabilityMinor:
        return facts.minor;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        return facts.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return (int)facts.sharedMemPerMultiprocessor;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return (int)facts.sharedMemPerBlockOptin;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
        return 65536;
    case cudaDevAttrL2CacheSize:
        return facts.l2CacheSize;
    case cudaDevAttrClockRate:
        return 1695000;
    case cudaDevAttrMemoryClockRate:
        return 9751000;
    case cudaDevAttrGlobalMemoryBusWidth:
        return facts.memoryBusWidth;
    case cudaDevAttrUnifiedAddressing:
        return 1;
    default:
        return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device)
{
    (void)device;
    *out = attribute_of((int)attribute);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    (void)device;
    (void)peer;
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device)
{
    (void)device;
    snprintf(out, (size_t)size, "0000:00:00.0");
    return cudaSuccess;
}

/* ---- errors ----------------------------------------------------------------------------------------- */

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;

    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory" : error != 0 ? "stand-in error" : "no error";
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
           : error != 0                       ? "error"
                                              : "cudaSuccess";
}

/* ---- streams and events ----------------------------------------------------------------------------- */

static struct {
    cudaEvent_t event;
    uint64_t at;
} recorded[EVENT_SLOTS];

static size_t slot_of(cudaEvent_t event)
{
    return ((uintptr_t)event >> 4) % EVENT_SLOTS;
}

cudaError_t cudaStreamCreateWithPriority(stream *out, unsigned flags, int priority)
{
    (void)flags;
    (void)priority;
    *out = card_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(stream *out, unsigned flags)
{
    return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamCreate(stream *out)
{
    return cudaStreamCreateWithPriority(out, 0, 0);
}

cudaError_t cudaStreamGetPriority(stream s, int *priority)
{
    (void)s;
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -1;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(stream s, enum cudaStreamCaptureStatus *status)
{
    (void)s;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(stream s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     void *graph, void *dependencies, void *edges, size_t *count)
{
    (void)graph;
    (void)dependencies;
    (void)edges;
    if (id != NULL) {
        *id = 0;
    }
    if (count != NULL) {
        *count = 0;
    }
    return cudaStreamIsCapturing(s, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    (void)mode;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    (void)flags;
    *out = card_handle();
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    return cudaEventCreateWithFlags(out, 0);
}

cudaError_t cudaEventRecord(cudaEvent_t event, stream s)
{
    (void)s;
    recorded[slot_of(event)].event = event;
    recorded[slot_of(event)].at = card_tick();
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, stream s, unsigned flags)
{
    (void)flags;
    return cudaEventRecord(event, s);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return card_reached(recorded[slot_of(event)].at) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    (void)event;
    card_settle();
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    card_settle();
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(stream s)
{
    (void)s;
    card_settle();
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    (void)from;
    (void)to;
    *ms = 1.0F;
    return cudaSuccess;
}

/* ---- kernels ---------------------------------------------------------------------------------------- */

static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    stream s;
} launch;

void **__cudaRegisterFatBinary(void *image)
{
    static void *handle[2];

    (void)image;
    return handle;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, stream s)
{
    launch.grid = grid;
    launch.block = block;
    launch.shared = shared;
    launch.s = s;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s)
{
    *grid = launch.grid;
    *block = launch.block;
    *shared = launch.shared;
    *(stream *)s = launch.s;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(void **out, const void *function)
{
    *out = (void *)(uintptr_t)function;
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **out, const void *symbol)
{
    *out = (void *)(uintptr_t)symbol;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function)
{
    const card_facts *facts = card();

    (void)function;
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = facts->major * 10 + facts->minor;
    out->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}

/* A kernel that is limited by threads alone; registers and shared memory of real ones are not known here. */
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                   int threads, size_t shared, unsigned flags)
{
    (void)function;
    (void)shared;
    (void)flags;
    *blocks = card()->threads_per_unit / (threads > 0 ? threads : 1);
    *blocks = *blocks > 0 ? *blocks : 1;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                          size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

/* ---- entry points of the driver --------------------------------------------------------------------- */

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status)
{
    (void)version;
    (void)flags;
    if (status != NULL) {
        *status = cudaDriverEntryPointSuccess;
    }
    *out = driver_function(name);
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status)
{
    return cudaGetDriverEntryPointByVersion(name, out, 0, flags, status);
}
