/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcudart: memory and copies. Without values (STANDIN_COMPUTE) only small copies are done, up to 1 MiB, so that a scalar
 * which a program puts on the card can be read back.
 */
#include "cudart.h"

#include "card.h"
#include "streams.h"

#include <stdlib.h>
#include <string.h>

enum { COPIED_BYTES = 1 << 20 };

/* More than a function of ours would have. */
#define COPY_ROWS_PARAMETERS                                                                                 \
    (void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,            \
     enum cudaMemcpyKind kind, stream s)

cudaError_t cudaMalloc(void **out, size_t size)
{
    *out = card_take(size);
    return note(*out != NULL ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *at)
{
    card_finish();
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
    size_t taken = (size + 4095) / 4096 * 4096;

    (void)flags;
    *out = aligned_alloc(4096, taken > 0 ? taken : 4096);
    return *out != NULL && card_pin(*out, taken) ? cudaSuccess : note(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocHost(void **out, size_t size)
{
    return cudaHostAlloc(out, size, 0);
}

cudaError_t cudaFreeHost(void *at)
{
    card_finish();
    if (at != NULL && !card_unpin(at)) {
        return note(cudaErrorInvalidValue);
    }
    free(at);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *at, size_t size, unsigned flags)
{
    (void)flags;
    return card_pin(at, size) ? cudaSuccess : note(cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void *at)
{
    return card_unpin(at) ? cudaSuccess : note(cudaErrorHostMemoryNotRegistered);
}

/* What the stand-in does not copy: much, when nothing is computed. */
static bool skipped(size_t size)
{
    return size > COPIED_BYTES && !card_computes();
}

static card_direction direction_of(enum cudaMemcpyKind kind)
{
    switch (kind) {
    case cudaMemcpyHostToHost:
        return HOST_TO_HOST;
    case cudaMemcpyHostToDevice:
        return HOST_TO_CARD;
    case cudaMemcpyDeviceToHost:
        return CARD_TO_HOST;
    case cudaMemcpyDeviceToDevice:
        return CARD_TO_CARD;
    default:
        return BY_ADDRESS;
    }
}

cudaError_t cudaMemcpy2DAsync COPY_ROWS_PARAMETERS
{
    card_copy copy = {to, from, to_pitch, from_pitch, width, height};

    if (skipped(width * height) ||
        card_submit_copy((card_stream *)s, "cudaMemcpy", copy, direction_of(kind))) {
        return cudaSuccess;
    }
    return note(cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, stream s)
{
    return cudaMemcpy2DAsync(to, size, from, size, size, 1, kind, s);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                stream s)
{
    (void)to_device;
    (void)from_device;
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, s);
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                         size_t height, enum cudaMemcpyKind kind)
{
    cudaError_t error = cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL);

    card_stream_finish(NULL);
    return error;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind)
{
    return cudaMemcpy2D(to, size, from, size, size, 1, kind);
}

cudaError_t cudaMemsetAsync(void *at, int value, size_t size, stream s)
{
    if (skipped(size) || card_submit_fill((card_stream *)s, "cudaMemset", at, value, size)) {
        return cudaSuccess;
    }
    return note(cudaErrorInvalidValue);
}

cudaError_t cudaMemset(void *at, int value, size_t size)
{
    cudaError_t error = cudaMemsetAsync(at, value, size, NULL);

    card_stream_finish(NULL);
    return error;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *at)
{
    memset(out, 0, sizeof *out);
    out->type = card_owns(at)        ? cudaMemoryTypeDevice
                : card_pinned(at, 1) ? cudaMemoryTypeHost
                                     : cudaMemoryTypeUnregistered;
    out->devicePointer = (void *)(uintptr_t)at;
    out->hostPointer = out->type == cudaMemoryTypeHost ? out->devicePointer : NULL;
    return cudaSuccess;
}
