/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file card_macros.h
 * What our kernels are written in, for NVIDIA's compilers. A kernel's text is what C and CUDA's C++ have in common; the tests
 * compile it for the host, where a loop takes the place of a group's threads (tests/fake_cuda/fake_macros.h).
 *
 *      MSC__CORE                     how functions of the card are declared
 *      MSC__SQRT(x)                  a root that is rounded correctly
 *      MSC__UNROLL                   before a loop whose arrays shall be registers
 *      MSC__KERNEL(name, type)       a kernel with the one argument `by`
 *      MSC__GROUP                    number of the group of threads
 *      MSC__PER_THREAD(type, name)   a variable that each thread has, between phases
 *      MSC__SHARED(type, name)       one that the threads of a group share
 *      MSC__OWN(name, thread)        the variable of a thread
 *      MSC__PHASE(thread, ...)       what all threads of a group do; the next phase sees it done
 *      MSC__LARGEST(name, member)    of each thread, becomes the largest of its warp
 *      MSC__FOLD(name, member)       of sixteen lanes: in the first, the sum of pairs of pairs of pairs of pairs, lane i
 *                                    and i + 8 first
 *      MSC__ATOMIC_ADD(at, x)        adds to a number that other groups add to; what was there before
 *      MSC__FENCE()                  what this thread has written is seen by who sees what it writes next
 *
 * To be compiled with --fmad=false, -prec-div=true, -prec-sqrt=true and without -ftz, as src/device/cuda_rtc.c does: each
 * operation is then rounded once, as on the host.
 */
#ifndef MSC_DEVICE_CARD_MACROS_H
#define MSC_DEVICE_CARD_MACROS_H

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

/* CUDA knows two types of integers by name, and neither is always uint64_t. */
static __device__ __forceinline__ uint32_t msc__atomic_add(uint32_t *at, uint32_t x)
{
    return atomicAdd((unsigned int *)at, (unsigned int)x);
}

static __device__ __forceinline__ uint64_t msc__atomic_add(uint64_t *at, uint64_t x)
{
    return atomicAdd((unsigned long long *)at, (unsigned long long)x);
}

#define MSC__ATOMIC_ADD(at, x) msc__atomic_add(at, x)
#define MSC__FENCE() __threadfence()

#endif /* MSC_DEVICE_CARD_MACROS_H */
