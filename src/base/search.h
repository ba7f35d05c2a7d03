/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file search.h
 * Binary search in sorted records: the first one whose key is not below a given one.
 *
 *      MSC__LOWER_BOUND(msc_save, pack, saves, count, position)      records, found by a field
 *      msc__lower_bound_u32(offsets, count, sizeof *offsets, 0, offset)       numbers
 *
 * One function per type of key. All are inline and get constant strides and offsets, so that each use compiles to the
 * loop that one would write there.
 */
#ifndef MSC_BASE_SEARCH_H
#define MSC_BASE_SEARCH_H

#include <stddef.h>
#include <stdint.h>

#include "base/invariant.h"

/* Of `count` items of `item_bytes`, which are in order of the key that each has at `key_offset`. */
#define MSC__DEFINE_LOWER_BOUND(suffix, key_type)                                                            \
    static inline key_type msc__key_##suffix(const void *items, size_t item_bytes, size_t key_offset,        \
                                             uint32_t index)                                                 \
    {                                                                                                        \
        return *(const key_type *)(const void *)((const char *)items + index * item_bytes + key_offset);     \
    }                                                                                                        \
                                                                                                             \
    static inline uint32_t msc__lower_bound_##suffix(const void *items, uint32_t count, size_t item_bytes,   \
                                                     size_t key_offset, key_type key)                        \
    {                                                                                                        \
        uint32_t low = 0;                                                                                    \
        uint32_t high = count;                                                                               \
                                                                                                             \
        while (low < high) {                                                                                 \
            uint32_t middle = low + (high - low) / 2;                                                        \
                                                                                                             \
            if (msc__key_##suffix(items, item_bytes, key_offset, middle) < key)                              \
                low = middle + 1;                                                                            \
            else                                                                                             \
                high = middle;                                                                               \
        }                                                                                                    \
        MSC__ASSERT(low == 0 || msc__key_##suffix(items, item_bytes, key_offset, low - 1) < key);            \
        MSC__ASSERT(low == count || msc__key_##suffix(items, item_bytes, key_offset, low) >= key);           \
        return low;                                                                                          \
    }

MSC__DEFINE_LOWER_BOUND(u8, uint8_t)
MSC__DEFINE_LOWER_BOUND(u32, uint32_t)
MSC__DEFINE_LOWER_BOUND(u64, uint64_t)
MSC__DEFINE_LOWER_BOUND(i64, int64_t)

/** Index of the first of `count` records of a type whose field is not below `key`, or `count`. The records are in order
 *  of that field. Cost: log count. */
/* clang-format off */
#define MSC__LOWER_BOUND(type, field, items, count, key)                                                     \
    _Generic(((type){0}).field,                                                                              \
        uint8_t: msc__lower_bound_u8,                                                                        \
        uint32_t: msc__lower_bound_u32,                                                                      \
        uint64_t: msc__lower_bound_u64,                                                                      \
        int64_t: msc__lower_bound_i64)                                                                       \
    (1 ? (items) : (const type *)0, count, sizeof(type), offsetof(type, field), key)
/* clang-format on */

#endif /* MSC_BASE_SEARCH_H */
