/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels for NVIDIA's cards, compiled by NVRTC when they are first used (the text of this file and of what it
 * includes is in the library), and by nvcc in a test.
 *
 * To be compiled with --fmad=false, -prec-div=true, -prec-sqrt=true and without -ftz, as src/device/cuda_rtc.c does: each
 * operation is then rounded once, as on the host.
 */
#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define UINT64_C(x) x##ull
#else
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#endif

#define MSC__CORE static __device__ __forceinline__
#define MSC__SQRT(x) __fsqrt_rn(x)
#define MSC__UNROLL _Pragma("unroll")
#define MSC__KERNEL(name, type)                                                                              \
    extern "C" __global__ void __launch_bounds__(128) name(const __grid_constant__ type by)
#define MSC__GROUP blockIdx.x
#define MSC__PER_THREAD(type, name) type name
#define MSC__SHARED(type, name) __shared__ type name
#define MSC__OWN(name, thread) name
#define MSC__PHASE(thread, ...)                                                                              \
    do {                                                                                                     \
        const uint32_t thread = threadIdx.x;                                                                 \
        (void)thread;                                                                                        \
        __VA_ARGS__;                                                                                         \
        __syncthreads();                                                                                     \
    } while (0)

#define MSC__LARGEST(name, member)                                                                           \
    do {                                                                                                     \
        MSC__UNROLL                                                                                          \
        for (uint32_t width = 16; width > 0; width /= 2) {                                                   \
            uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, name.member, width);                               \
            name.member = name.member > other ? name.member : other;                                         \
        }                                                                                                    \
    } while (0)

#define MSC__FOLD(name, member)                                                                              \
    do {                                                                                                     \
        MSC__UNROLL                                                                                          \
        for (uint32_t width = 8; width > 0; width /= 2)                                                      \
            name.member = name.member + __shfl_down_sync(0xFFFFFFFFu, name.member, width, 16);               \
    } while (0)

#include "optim/cuda/card_template.h"
