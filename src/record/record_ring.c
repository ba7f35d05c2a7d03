/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring.
 *
 *     entry   ready u32 (bytes + 1; 0: not yet)   kind u32 (0: filler)   bytes, to a multiple of 8
 *
 * What the consumer gives back it has set to 0 before it moves `tail`, so an entry's first word is 0 until
 * its own producer sets it, wherever in the ring it comes to lie.
 */
#include "record/record_ring.h"

#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"

#define HEAD_BYTES 8u

static uint64_t entry_size(uint64_t byte_count)
{
    return (HEAD_BYTES + byte_count + 7u) & ~UINT64_C(7);
}

static atomic_uint *ready_of(uint8_t *entry)
{
    return (atomic_uint *)(void *)entry;
}

msc_status msc__ring_init(msc_context *ctx, uint64_t size, msc__ring *out, msc_error *err)
{
    MSC__ASSERT(size >= 64 && (size & (size - 1)) == 0);
    memset(out, 0, sizeof *out);
    out->bytes = msc__alloc(ctx, size);
    if (out->bytes == NULL)
        return msc__fail_memory(err, "the ring of a recorder", size);
    out->size = size;
    return MSC_OK;
}

void msc__ring_fini(msc_context *ctx, msc__ring *ring)
{
    msc__free(ctx, ring->bytes, ring->size);
    ring->bytes = NULL;
}

static void set_head(uint8_t *at, uint32_t kind, uint32_t byte_count)
{
    memcpy(at + 4, &kind, sizeof kind);
    atomic_store_explicit(ready_of(at), byte_count + 1, memory_order_release);
}

bool msc__ring_reserve(msc__ring *ring, uint32_t kind, uint32_t byte_count, msc__ring_entry *out)
{
    uint64_t wanted = entry_size(byte_count);
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint64_t filler;

    MSC__ASSERT(kind > 0);
    for (;;) {
        uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
        uint64_t left = ring->size - (head & (ring->size - 1)); /* in one piece */

        if (head < tail) { /* read long ago */
            head = atomic_load_explicit(&ring->head, memory_order_relaxed);
            continue;
        }
        filler = wanted > left ? left : 0;
        if (wanted > ring->size || filler + wanted > ring->size - (head - tail))
            return false;
        if (atomic_compare_exchange_weak_explicit(&ring->head, &head, head + filler + wanted,
                                                  memory_order_acq_rel, memory_order_relaxed))
            break;
    }
    if (filler > 0)
        set_head(ring->bytes + (head & (ring->size - 1)), 0, (uint32_t)(filler - HEAD_BYTES));
    out->kind = kind;
    out->byte_count = byte_count;
    out->bytes = ring->bytes + ((head + filler) & (ring->size - 1)) + HEAD_BYTES;
    return true;
}

void msc__ring_publish(const msc__ring_entry *entry)
{
    set_head(entry->bytes - HEAD_BYTES, entry->kind, entry->byte_count);
}

/* Clears an entry and moves on. */
static void give_back(msc__ring *ring, uint8_t *at, uint64_t bytes)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);

    memset(at, 0, bytes);
    atomic_store_explicit(&ring->tail, tail + bytes, memory_order_release);
}

bool msc__ring_peek(msc__ring *ring, msc__ring_entry *out)
{
    for (;;) {
        uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
        uint8_t *at = ring->bytes + (tail & (ring->size - 1));
        uint32_t ready;

        if (atomic_load_explicit(&ring->head, memory_order_acquire) == tail)
            return false;
        ready = atomic_load_explicit(ready_of(at), memory_order_acquire);
        if (ready == 0)
            return false;
        memcpy(&out->kind, at + 4, sizeof out->kind);
        out->byte_count = ready - 1;
        out->bytes = at + HEAD_BYTES;
        if (out->kind != 0)
            return true;
        give_back(ring, at, entry_size(out->byte_count));
    }
}

void msc__ring_consume(msc__ring *ring, const msc__ring_entry *entry)
{
    give_back(ring, entry->bytes - HEAD_BYTES, entry_size(entry->byte_count));
}
