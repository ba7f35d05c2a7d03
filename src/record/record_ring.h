/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file record_ring.h
 * Entries from many threads to one, in a fixed number of bytes, without a lock.
 *
 * A producer reserves its bytes by moving `head`, copies, and then sets the entry's first word: the consumer
 * stops at an entry whose word is still 0. So no thread ever waits for another, and one that is stopped in
 * the middle of its copy holds up nobody but the consumer. An entry lies in one piece; before the end of the
 * ring a filler stands in.
 */
#ifndef MSC_RECORD_RING_H
#define MSC_RECORD_RING_H

#include <stdatomic.h>
#include <stdbool.h>

#include "memscale/base.h"

typedef struct msc__ring {
    uint8_t *bytes;        /* all zero where no entry is */
    uint64_t size;         /* a power of two */
    _Atomic uint64_t head; /* what has been reserved, since the beginning */
    _Atomic uint64_t tail; /* what has been consumed */
} msc__ring;

/** Where an entry of the ring is. */
typedef struct msc__ring_entry {
    uint32_t kind; /* above 0 */
    uint32_t byte_count;
    uint8_t *bytes;
} msc__ring_entry;

/** Errors: ENOMEM. */
msc_status msc__ring_init(msc_context *ctx, uint64_t size, msc__ring *out, msc_error *err);
void msc__ring_fini(msc_context *ctx, msc__ring *ring);

static inline uint64_t msc__ring_used(const msc__ring *ring)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);

    return atomic_load_explicit(&ring->head, memory_order_acquire) - tail;
}

/** Reserves an entry; its bytes are the caller's until `publish`. False: there is no room. Threads: any. */
bool msc__ring_reserve(msc__ring *ring, uint32_t kind, uint32_t byte_count, msc__ring_entry *out);
void msc__ring_publish(const msc__ring_entry *entry);

/** The oldest entry. False: there is none that is whole. Threads: the consumer. */
bool msc__ring_peek(msc__ring *ring, msc__ring_entry *out);
/** Gives the bytes of the entry that was looked at back. */
void msc__ring_consume(msc__ring *ring, const msc__ring_entry *entry);

#endif /* MSC_RECORD_RING_H */
