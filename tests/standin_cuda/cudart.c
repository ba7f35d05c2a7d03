/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcudart: the runtime calls that PyTorch needs answered, here those about the device, errors and kernels. Every other
 * symbol of the real library is a stub that returns success (build.py). Kernels are registered and launched, and do
 * nothing.
 */
#include "cudart.h"

#include "card.h"
#include "driver.h"

#include <cuda.h>
#include <driver_types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local cudaError_t last_error;
static int current_device;

cudaError_t note(cudaError_t error)
{
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
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
