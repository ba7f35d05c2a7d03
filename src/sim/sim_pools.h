/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_pools.h
 * The policy of PyTorch's CUDA caching allocator over simulated memory.
 *
 * sim_pools.c holds the rules that every configuration shares and segments of fixed size;
 * sim_expandable.c holds expandable segments; sim_validate.c checks the result of both.
 */
#ifndef MSC_SIM_SIM_POOLS_H
#define MSC_SIM_SIM_POOLS_H

#include <stdbool.h>

#include "memscale/sim.h"
#include "sim/sim_blocks.h"

#define MSC__SIM_MIB (UINT64_C(1) << 20)
#define MSC__SIM_SMALL_BYTES MSC__SIM_MIB               /**< largest size of the small pool; kSmallSize */
#define MSC__SIM_SMALL_SEGMENT_BYTES (2 * MSC__SIM_MIB) /**< kSmallBuffer */
#define MSC__SIM_OWN_SEGMENT_BYTES (10 * MSC__SIM_MIB)  /**< from here on, a segment each; kMinLargeAlloc */
#define MSC__SIM_OWN_ROUND_BYTES (2 * MSC__SIM_MIB)     /**< granule of such segments; kRoundLarge */

/** The free sets of a stream. Set index of a block: 2 * index of this record + (1 for the large pool). */
typedef struct msc__sim_stream {
    uint32_t stream; /**< the caller's number */
    uint32_t pad;
    msc__sim_set *sets; /**< two: small, large */
} msc__sim_stream;

/** A device and the cache over it. The kind HOST uses `blocks` and `stats` only. */
typedef struct msc__sim_pools {
    msc_context *ctx;
    msc_sim_options options; /**< capacity_bytes below MSC__SIM_MOST_BYTES */
    msc_sim_stats stats;
    msc__sim_blocks blocks;
    msc__array streams;       /**< of msc__sim_stream, in order of first use */
    uint32_t last_stream;     /**< index of the record found last */
    uint32_t allocated_count; /**< blocks in state ALLOCATED */
    uint32_t segment_count;   /**< segments of both sorts, unmapped ones included */
    uint32_t pad;
    uint64_t mapped_page_count; /**< pages that have memory, in expandable segments */
    uint64_t next_address;      /**< where the next segment is put; 0: nowhere yet */
} msc__sim_pools;

static inline msc__sim_set *msc__sim_set_at(const msc__sim_pools *pools, uint32_t set_index)
{
    return ((const msc__sim_stream *)pools->streams.items)[set_index / 2].sets + set_index % 2;
}

static inline void msc__sim_raise(uint64_t *peak, uint64_t now)
{
    if (now > *peak)
        *peak = now;
}

/** The request as the allocator sees it: at most MSC__SIM_MOST_BYTES, which no device can serve. */
uint64_t msc__sim_round_size(const msc_sim_options *options, uint64_t size_bytes);
/** Bytes asked from the device for a rounded request, without expandable segments. */
uint64_t msc__sim_segment_bytes(const msc_sim_options *options, uint64_t rounded_bytes);

/**
 * Serves a request of at least one byte; `*slot` names its block.
 * Errors: EDEVMEM (caches released), ENOMEM and EOVERFLOW (nothing changed).
 */
msc_status msc__sim_pools_alloc(msc__sim_pools *pools, uint64_t size_bytes, uint32_t stream, uint32_t *slot,
                                msc_error *err);
void msc__sim_pools_free(msc__sim_pools *pools, uint32_t slot);
/** Gives back every unsplit segment, or every free page of expandable segments. */
void msc__sim_pools_release_cached(msc__sim_pools *pools);
void msc__sim_pools_clear(msc__sim_pools *pools);
void msc__sim_pools_fini(msc__sim_pools *pools);

/** The error of a failed request, for both kinds. Counts it and returns MSC_EDEVMEM. */
msc_status msc__sim_pools_fail(msc__sim_pools *pools, uint64_t size_bytes, uint64_t rounded_bytes,
                               msc_error *err);

/* ---- between sim_pools.c and sim_expandable.c --------------------------------------------------- */

/** An address for a segment of `bytes`, a multiple of `unit`; 0 when 64 bits of addresses are used up. */
uint64_t msc__sim_pools_place(msc__sim_pools *pools, uint64_t bytes, uint64_t unit);
/** Counts a segment out. With the last one, addresses start anew. */
void msc__sim_pools_forget_segment(msc__sim_pools *pools);
/** Adds memory to, or takes it from, what is reserved. */
void msc__sim_pools_add_reserved(msc__sim_pools *pools, uint64_t bytes);
void msc__sim_pools_drop_reserved(msc__sim_pools *pools, uint64_t bytes);

/** Bytes per page of a set's expandable segments. */
uint64_t msc__sim_page_bytes(const msc_sim_options *options, uint32_t set_index);
/** Blocks that releases may add to those in use, were `new_page_count` more pages mapped. */
uint64_t msc__sim_expandable_spare(const msc__sim_pools *pools, uint64_t new_page_count);
/** Blocks that the table must hold so that this request, and any release later, needs no host memory. */
uint64_t msc__sim_expandable_room(const msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes);
/** Maps memory for a request: a FREE block of at least `rounded_bytes` that is in no set, or 0. */
uint32_t msc__sim_expandable_grow(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes);
/** Takes the whole pages out of a free block. */
void msc__sim_expandable_unmap(msc__sim_pools *pools, uint32_t slot);
/** Size for best fit: a block before unmapped space counts as what it can grow to. */
uint64_t msc__sim_expandable_size(const msc__sim_pools *pools, uint32_t slot);

/** Every invariant of the pools. Errors: EINTERNAL. */
msc_status msc__sim_pools_validate(const msc__sim_pools *pools, msc_error *err);

#endif /* MSC_SIM_SIM_POOLS_H */
