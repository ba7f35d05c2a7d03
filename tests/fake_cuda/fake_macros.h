/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file fake_macros.h
 * device/cuda/card_macros.h for the host. A loop takes the place of a group's threads in each phase, in either direction, so
 * what a thread takes from another in the same phase is wrong in every other group. Groups come one after another, the last
 * one first.
 */
#ifndef MSC_FAKE_MACROS_H
#define MSC_FAKE_MACROS_H

#include <stdint.h>
#include <string.h>

#include "device/cuda/card_group.h"

#define MSC__CORE static inline
#define MSC__SQRT(x) __builtin_sqrtf(x)
#define MSC__UNROLL
#define MSC__KERNEL(name, type)                                                                              \
    static void name##_group(type by, uint32_t group);                                                       \
    static void name(const void *argument, uint32_t groups)                                                  \
    {                                                                                                        \
        type by;                                                                                             \
                                                                                                             \
        memcpy(&by, argument, sizeof by);                                                                    \
        while (groups-- > 0)                                                                                 \
            name##_group(by, groups);                                                                        \
    }                                                                                                        \
    static void name##_group(type by, uint32_t group)
#define MSC__GROUP group
#define MSC__PER_THREAD(type, name) type name[MSC__CARD_THREADS]
#define MSC__SHARED(type, name) type name
#define MSC__OWN(name, thread) name[thread]
#define MSC__PHASE(thread, ...)                                                                              \
    do {                                                                                                     \
        uint32_t turn;                                                                                       \
                                                                                                             \
        for (turn = 0; turn < MSC__CARD_THREADS; turn++) {                                                   \
            const uint32_t thread = group % 2 == 0 ? turn : MSC__CARD_THREADS - 1 - turn;                    \
                                                                                                             \
            __VA_ARGS__;                                                                                     \
        }                                                                                                    \
    } while (0)
#define MSC__LARGEST(name, member)                                                                           \
    do {                                                                                                     \
        uint32_t turn, i;                                                                                    \
                                                                                                             \
        for (turn = 0; turn < MSC__CARD_THREADS; turn += MSC__CARD_WARP) {                                   \
            uint32_t most = 0;                                                                               \
                                                                                                             \
            for (i = 0; i < MSC__CARD_WARP; i++)                                                             \
                most = name[turn + i].member > most ? name[turn + i].member : most;                          \
            for (i = 0; i < MSC__CARD_WARP; i++)                                                             \
                name[turn + i].member = most;                                                                \
        }                                                                                                    \
    } while (0)
#define MSC__FOLD(name, member)                                                                              \
    do {                                                                                                     \
        uint32_t turn, i, width;                                                                             \
                                                                                                             \
        for (turn = 0; turn < MSC__CARD_THREADS; turn += 16)                                                 \
            for (width = 8; width > 0; width /= 2)                                                           \
                for (i = 0; i < width; i++)                                                                  \
                    name[turn + i].member += name[turn + i + width].member;                                  \
    } while (0)

static inline uint64_t fake_atomic_add(uint64_t *at, uint64_t x)
{
    uint64_t before = *at;

    *at += x;
    return before;
}

#define MSC__ATOMIC_ADD(at, x) fake_atomic_add(at, x)
#define MSC__FENCE() ((void)0)

#endif /* MSC_FAKE_MACROS_H */
