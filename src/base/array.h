/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file array.h
 * Growable array of plain records.
 *
 * A zeroed `msc__array` is a valid empty one. The element size is passed to every call instead of being
 * stored, so an array is two words and a pointer, and `items` can be cast to the element type.
 */
#ifndef MSC_BASE_ARRAY_H
#define MSC_BASE_ARRAY_H

#include "memscale/base.h"

typedef struct msc__array {
    void *items;
    uint32_t count;
    uint32_t capacity; /**< elements that `items` has room for */
} msc__array;

/** Makes room for `extra` more elements. Errors: ENOMEM, EOVERFLOW (2^31 elements). */
msc_status msc__array_reserve(msc_context *ctx, msc__array *array, size_t item_bytes, uint32_t extra,
                              msc_error *err);

/** Appends a copy of `item`. Errors: as reserve; the array is unchanged on error. */
msc_status msc__array_push(msc_context *ctx, msc__array *array, size_t item_bytes, const void *item,
                           msc_error *err);

/** Releases the memory and makes the array empty. */
void msc__array_fini(msc_context *ctx, msc__array *array, size_t item_bytes);

#endif /* MSC_BASE_ARRAY_H */
