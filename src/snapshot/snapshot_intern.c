/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Strings, frames and stacks, each stored once.
 *
 * A trace has millions of entries, but the program has some thousand places that allocate. Their stacks come
 * as lists of frames, which the pickle shares only in part; known by their contents they take next to
 * nothing. Numbers follow the order of first use. The tables are never iterated.
 *
 * Room is made in every array before anything changes, so a failure leaves all of them as they were.
 */
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "snapshot/snapshot_internal.h"

#define FNV_OFFSET_32 2166136261u /* FNV-1a, 32 bit */
#define FNV_PRIME_32 16777619u

static uint32_t hash_bytes(const void *bytes, size_t size_bytes)
{
    const unsigned char *at = bytes;
    uint32_t hash = FNV_OFFSET_32;
    size_t i;

    for (i = 0; i < size_bytes; i++)
        hash = (hash ^ at[i]) * FNV_PRIME_32;
    return hash;
}

/* ---- strings ------------------------------------------------------------------------------------ */

/* Compared with the terminator, so that "a" and "a\0b" differ whichever came first. */
static bool string_is(const msc_snapshot *snapshot, uint32_t string, const void *bytes, size_t size_bytes)
{
    const uint32_t *offsets = snapshot->strings.items;
    uint32_t begin = offsets[string];
    uint32_t end = string + 1 < snapshot->strings.count ? offsets[string + 1] : snapshot->chars.count;

    MSC__ASSERT(string < snapshot->strings.count && begin < end && end <= snapshot->chars.count);
    return end - begin == size_bytes + 1 &&
           (size_bytes == 0 || memcmp((const char *)snapshot->chars.items + begin, bytes, size_bytes) == 0);
}

msc_status msc__snapshot_intern_string(msc_snapshot *snapshot, const void *bytes, size_t size_bytes,
                                       uint32_t *out, msc_error *err)
{
    uint32_t offset = snapshot->chars.count;
    uint32_t hash = hash_bytes(bytes, size_bytes);
    uint32_t probe = hash;
    msc_status status;

    while ((*out = msc__hash_index_next(&snapshot->string_table, hash, &probe)) != MSC_NONE) {
        if (string_is(snapshot, *out, bytes, size_bytes))
            return MSC_OK;
    }
    if (size_bytes >= UINT32_MAX)
        return msc__fail(err, MSC_EOVERFLOW, "a string of %zu bytes", size_bytes);
    status = msc__array_reserve(snapshot->ctx, &snapshot->chars, 1, (uint32_t)size_bytes + 1, err);
    if (status == MSC_OK)
        status = msc__hash_index_reserve(snapshot->ctx, &snapshot->string_table, "strings", err);
    if (status == MSC_OK)
        status = msc__array_push(snapshot->ctx, &snapshot->strings, sizeof offset, &offset, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(offset == snapshot->chars.count && size_bytes < snapshot->chars.capacity - offset);
    if (size_bytes > 0)
        memcpy((char *)snapshot->chars.items + offset, bytes, size_bytes);
    ((char *)snapshot->chars.items)[offset + size_bytes] = '\0';
    snapshot->chars.count += (uint32_t)size_bytes + 1;
    *out = snapshot->strings.count - 1;
    msc__hash_index_insert(&snapshot->string_table, hash, *out);
    return MSC_OK;
}

/* ---- frames and stacks -------------------------------------------------------------------------- */

msc_status msc__snapshot_intern_frame(msc_snapshot *snapshot, const msc_snapshot_frame *frame, uint32_t *out,
                                      msc_error *err)
{
    const msc_snapshot_frame *frames = snapshot->frames.items;
    uint32_t hash = hash_bytes(frame, sizeof *frame);
    uint32_t probe = hash;
    msc_status status;

    while ((*out = msc__hash_index_next(&snapshot->frame_table, hash, &probe)) != MSC_NONE) {
        MSC__ASSERT(*out < snapshot->frames.count);
        if (memcmp(&frames[*out], frame, sizeof *frame) == 0)
            return MSC_OK;
    }
    status = msc__hash_index_reserve(snapshot->ctx, &snapshot->frame_table, "frames", err);
    if (status == MSC_OK)
        status = msc__array_push(snapshot->ctx, &snapshot->frames, sizeof *frame, frame, err);
    if (status != MSC_OK)
        return status;
    *out = snapshot->frames.count - 1;
    msc__hash_index_insert(&snapshot->frame_table, hash, *out);
    return MSC_OK;
}

/* Whole words at a time: stacks are what is hashed most. */
static uint32_t hash_stack(const uint32_t *frames, uint32_t count)
{
    uint32_t hash = FNV_OFFSET_32;
    uint32_t i;

    for (i = 0; i < count; i++) {
        hash = (hash ^ frames[i]) * FNV_PRIME_32;
        hash ^= hash >> 15;
    }
    return hash;
}

static bool stack_is(const msc_snapshot *snapshot, uint32_t stack, const uint32_t *frames, uint32_t count)
{
    const msc__snapshot_range *range = (const msc__snapshot_range *)snapshot->stacks.items + stack;
    const uint32_t *own = (const uint32_t *)snapshot->stack_frames.items + range->first;

    MSC__ASSERT(stack < snapshot->stacks.count);
    MSC__ASSERT(range->first + range->count <= snapshot->stack_frames.count);
    return range->count == count && memcmp(own, frames, count * sizeof *frames) == 0;
}

msc_status msc__snapshot_intern_stack(msc_snapshot *snapshot, const uint32_t *frames, uint32_t count,
                                      uint32_t *out, msc_error *err)
{
    msc__snapshot_range range = {snapshot->stack_frames.count, count};
    uint32_t hash = hash_stack(frames, count);
    uint32_t probe = hash;
    msc_status status;

    if (count == 0) {
        *out = 0;
        return MSC_OK;
    }
    while ((*out = msc__hash_index_next(&snapshot->stack_table, hash, &probe)) != MSC_NONE) {
        if (stack_is(snapshot, *out, frames, count))
            return MSC_OK;
    }
    status = msc__array_reserve(snapshot->ctx, &snapshot->stack_frames, sizeof *frames, count, err);
    if (status == MSC_OK)
        status = msc__hash_index_reserve(snapshot->ctx, &snapshot->stack_table, "stacks", err);
    if (status == MSC_OK)
        status = msc__array_push(snapshot->ctx, &snapshot->stacks, sizeof range, &range, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(range.first + count <= snapshot->stack_frames.capacity);
    memcpy((uint32_t *)snapshot->stack_frames.items + range.first, frames, count * sizeof *frames);
    snapshot->stack_frames.count += count;
    *out = snapshot->stacks.count - 1;
    msc__hash_index_insert(&snapshot->stack_table, hash, *out);
    return MSC_OK;
}
