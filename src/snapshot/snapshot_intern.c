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
#include "snapshot/snapshot_internal.h"

#define FIRST_SLOTS 64u
#define MOST_SLOTS 0x80000000u
#define FNV_OFFSET_32 2166136261u /* FNV-1a, 32 bit */
#define FNV_PRIME_32 16777619u

/* ---- table -------------------------------------------------------------------------------------- */

static void insert(msc__snapshot_slot *slots, uint32_t capacity, msc__snapshot_slot entry)
{
    uint32_t at = entry.hash & (capacity - 1);

    while (slots[at].item != 0)
        at = (at + 1) & (capacity - 1);
    slots[at] = entry;
}

msc_status msc__snapshot_table_reserve(msc_context *ctx, msc__snapshot_table *table, msc_error *err)
{
    msc__snapshot_slot *slots;
    uint32_t capacity = table->capacity == 0 ? FIRST_SLOTS : table->capacity * 2;
    uint32_t i;

    if (table->count < table->capacity / 2)
        return MSC_OK;
    if (capacity > MOST_SLOTS || capacity == 0)
        return msc__fail(err, MSC_EOVERFLOW, "more than %u strings, frames or stacks", MOST_SLOTS / 2);
    slots = msc__alloc(ctx, capacity * sizeof *slots);
    if (slots == NULL)
        return msc__fail_memory(err, "a table", capacity * sizeof *slots);
    for (i = 0; i < table->capacity; i++) {
        if (table->slots[i].item != 0)
            insert(slots, capacity, table->slots[i]);
    }
    msc__free(ctx, table->slots, table->capacity * sizeof *slots);
    table->slots = slots;
    table->capacity = capacity;
    return MSC_OK;
}

void msc__snapshot_table_insert(msc__snapshot_table *table, uint32_t hash, uint32_t index)
{
    insert(table->slots, table->capacity, (msc__snapshot_slot){.hash = hash, .item = index + 1});
    table->count++;
}

uint32_t msc__snapshot_table_next(const msc__snapshot_table *table, uint32_t hash, uint32_t *probe)
{
    if (table->capacity == 0)
        return MSC_NONE;
    for (;;) {
        const msc__snapshot_slot *slot = &table->slots[(*probe)++ & (table->capacity - 1)];
        if (slot->item == 0)
            return MSC_NONE;
        if (slot->hash == hash)
            return slot->item - 1;
    }
}

void msc__snapshot_table_fini(msc_context *ctx, msc__snapshot_table *table)
{
    msc__free(ctx, table->slots, table->capacity * sizeof *table->slots);
    *table = (msc__snapshot_table){.slots = NULL, .capacity = 0, .count = 0};
}

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

    while ((*out = msc__snapshot_table_next(&snapshot->string_table, hash, &probe)) != MSC_NONE) {
        if (string_is(snapshot, *out, bytes, size_bytes))
            return MSC_OK;
    }
    if (size_bytes >= UINT32_MAX)
        return msc__fail(err, MSC_EOVERFLOW, "a string of %zu bytes", size_bytes);
    status = msc__array_reserve(snapshot->ctx, &snapshot->chars, 1, (uint32_t)size_bytes + 1, err);
    if (status == MSC_OK)
        status = msc__snapshot_table_reserve(snapshot->ctx, &snapshot->string_table, err);
    if (status == MSC_OK)
        status = msc__array_push(snapshot->ctx, &snapshot->strings, sizeof offset, &offset, err);
    if (status != MSC_OK)
        return status;
    if (size_bytes > 0)
        memcpy((char *)snapshot->chars.items + offset, bytes, size_bytes);
    ((char *)snapshot->chars.items)[offset + size_bytes] = '\0';
    snapshot->chars.count += (uint32_t)size_bytes + 1;
    *out = snapshot->strings.count - 1;
    msc__snapshot_table_insert(&snapshot->string_table, hash, *out);
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

    while ((*out = msc__snapshot_table_next(&snapshot->frame_table, hash, &probe)) != MSC_NONE) {
        if (memcmp(&frames[*out], frame, sizeof *frame) == 0)
            return MSC_OK;
    }
    status = msc__snapshot_table_reserve(snapshot->ctx, &snapshot->frame_table, err);
    if (status == MSC_OK)
        status = msc__array_push(snapshot->ctx, &snapshot->frames, sizeof *frame, frame, err);
    if (status != MSC_OK)
        return status;
    *out = snapshot->frames.count - 1;
    msc__snapshot_table_insert(&snapshot->frame_table, hash, *out);
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
    while ((*out = msc__snapshot_table_next(&snapshot->stack_table, hash, &probe)) != MSC_NONE) {
        if (stack_is(snapshot, *out, frames, count))
            return MSC_OK;
    }
    status = msc__array_reserve(snapshot->ctx, &snapshot->stack_frames, sizeof *frames, count, err);
    if (status == MSC_OK)
        status = msc__snapshot_table_reserve(snapshot->ctx, &snapshot->stack_table, err);
    if (status == MSC_OK)
        status = msc__array_push(snapshot->ctx, &snapshot->stacks, sizeof range, &range, err);
    if (status != MSC_OK)
        return status;
    memcpy((uint32_t *)snapshot->stack_frames.items + range.first, frames, count * sizeof *frames);
    snapshot->stack_frames.count += count;
    *out = snapshot->stacks.count - 1;
    msc__snapshot_table_insert(&snapshot->stack_table, hash, *out);
    return MSC_OK;
}
