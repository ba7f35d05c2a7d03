/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the driver that PyTorch asks the runtime for by name: virtual memory, which expandable segments
 * are made of. A physical chunk is its size; addresses are reserved in card.c; mapping needs nothing.
 */
#include "driver.h"

#include "card.h"

#include <cuda.h>
#include <stdint.h>
#include <string.h>

static CUresult succeed(void)
{
    return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties,
                       unsigned long long flags)
{
    (void)properties;
    (void)flags;
    *out = (CUmemGenericAllocationHandle)size;
    return card_count(size) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    card_uncount((size_t)handle);
    return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wanted,
                        unsigned long long flags)
{
    (void)alignment;
    (void)wanted;
    (void)flags;
    *out = (CUdeviceptr)(uintptr_t)card_reserve(size);
    return *out != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult error_text(CUresult error, const char **out)
{
    *out = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "stand-in error";
    return CUDA_SUCCESS;
}

static CUresult attribute(int *out, CUdevice_attribute which, CUdevice device)
{
    (void)which;
    (void)device;
    *out = 0;
    return CUDA_SUCCESS;
}

static CUresult context_state(CUdevice device, unsigned *flags, int *active)
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

static const struct {
    const char *name;
    void *function;
} functions[] = {
    {"cuMemCreate", (void *)create},
    {"cuMemRelease", (void *)release},
    {"cuMemAddressReserve", (void *)reserve},
    {"cuGetErrorString", (void *)error_text},
    {"cuDeviceGetAttribute", (void *)attribute},
    {"cuDevicePrimaryCtxGetState", (void *)context_state},
};

void *driver_function(const char *name)
{
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        if (strcmp(functions[i].name, name) == 0) {
            return functions[i].function;
        }
    }
    return (void *)succeed;
}
