/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Growable arrays: capacity doubles, starting at 16 elements, so that appending n records costs O(n).
 */
#include "base/array.h"

#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"

#define FIRST_CAPACITY 16u
#define MOST_ITEMS 0x7fffffffu

msc_status msc__array_reserve(msc_context *ctx, msc__array *array, size_t item_bytes, uint32_t extra,
                              msc_error *err)
{
    uint64_t needed = (uint64_t)array->count + extra;
    uint64_t capacity = array->capacity;
    size_t bytes;
    void *items;

    MSC__ASSERT(item_bytes > 0 && array->count <= array->capacity);
    if (needed <= capacity)
        return MSC_OK;
    if (needed > MOST_ITEMS)
        return msc__fail(err, MSC_EOVERFLOW, "more than %u records", MOST_ITEMS);
    if (capacity < FIRST_CAPACITY)
        capacity = FIRST_CAPACITY;
    while (capacity < needed)
        capacity *= 2;
    if (!msc__mul_size((size_t)capacity, item_bytes, &bytes))
        return msc__fail_memory(err, "records", UINT64_MAX);
    items = msc__resize(ctx, array->items, array->capacity * item_bytes, bytes);
    if (items == NULL)
        return msc__fail_memory(err, "records", bytes);
    array->items = items;
    array->capacity = (uint32_t)capacity;
    return MSC_OK;
}

msc_status msc__array_push(msc_context *ctx, msc__array *array, size_t item_bytes, const void *item,
                           msc_error *err)
{
    if (array->count == array->capacity) {
        msc_status status = msc__array_reserve(ctx, array, item_bytes, 1, err);
        if (status != MSC_OK)
            return status;
    }
    MSC__ASSERT(array->count < array->capacity);
    memcpy((char *)array->items + (size_t)array->count * item_bytes, item, item_bytes);
    array->count++;
    return MSC_OK;
}

void msc__array_fini(msc_context *ctx, msc__array *array, size_t item_bytes)
{
    msc__free(ctx, array->items, array->capacity * item_bytes);
    memset(array, 0, sizeof *array);
}
