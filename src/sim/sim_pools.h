/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_pools.h
 * The policy of PyTorch's CUDA caching allocator over simulated memory.
 *
 *   sim_pools.c       requests and frees
 *   sim_release.c     memory back to the device: oversize blocks, garbage, the whole cache
 *   sim_expandable.c  expandable segments
 *   sim_places.c      the free sets of each stream and pool
 *   sim_segments.c    segment events, and the map of what is reserved
 *   sim_validate.c    checks the result of all
 */
#ifndef MSC_SIM_SIM_POOLS_H
#define MSC_SIM_SIM_POOLS_H

#include "sim/sim_options.h"
#include "sim/sim_stats.h"

/** In the table of ids: in use, without a block (zero bytes, or taken back before the completion). */
#define MSC__SIM_ID_NO_BLOCK 0x7fffffffu
/** In the table of ids: freed, awaiting its completion. */
#define MSC__SIM_ID_AWAITED 0x80000000u

/** The free sets of a place. Set index of a block: 2 * index of this record + (1 for the large pool). */
typedef struct msc__sim_place {
    uint32_t stream;    /**< the caller's numbers */
    uint32_t pool;      /**< 0: the default pool */
    msc__sim_set *sets; /**< two: small, large */
    bool released;      /**< a private pool that nobody uses; the same for all places of a pool */
} msc__sim_place;

/** A device and the cache over it. The kind HOST uses `ids`, `blocks` and `counters` only. */
typedef struct msc__sim_pools {
    msc_context *ctx;
    msc_sim_options options; /**< capacity_bytes and device_total_bytes below MSC__SIM_MOST_BYTES */
    msc__sim_counters counters;
    msc__sim_blocks blocks;
    msc__array ids;             /**< of uint32_t: 0 (not in use), a slot or MSC__SIM_ID_…; see sim.c */
    msc__array awaiting;        /**< of uint32_t: slots of AWAITING blocks, in order of request */
    msc__array places;          /**< of msc__sim_place, in order of first use */
    msc__array order;           /**< of uint32_t: places by pool, then stream */
    msc__array events;          /**< of msc_sim_segment_event */
    uint32_t last_place;        /**< index of the record found last */
    uint32_t active_count;      /**< blocks in state ALLOCATED or AWAITING */
    uint32_t segment_count;     /**< segments of both sorts, unmapped ones included */
    uint32_t search_count;      /**< requests of the default large pool, modulo 2^32; age of garbage */
    uint64_t garbage_bytes;     /**< reserved bytes above which garbage is collected; 0: never */
    uint64_t mapped_page_count; /**< pages that have memory, in expandable segments */
    uint64_t lowest_address;    /**< of all segments, the next one ends there; 0: there was none */
    uint64_t placed_address;    /**< where the caller wants it; 0: anywhere */
    uint64_t call_count;        /**< calls so far, the present one included */
    bool capturing;
} msc__sim_pools;

static inline msc__sim_place *msc__sim_place_at(const msc__sim_pools *pools, uint32_t index)
{
    return (msc__sim_place *)pools->places.items + index;
}

static inline msc__sim_set *msc__sim_set_at(const msc__sim_pools *pools, uint32_t set_index)
{
    return msc__sim_place_at(pools, set_index / 2)->sets + set_index % 2;
}

static inline uint64_t msc__sim_reserved(const msc__sim_pools *pools)
{
    return msc__sim_now(&pools->counters, MSC__SIM_RESERVED_BYTES);
}

/** Makes a FREE block that is in no set part of its set. */
static inline void msc__sim_pools_insert(msc__sim_pools *pools, uint32_t slot)
{
    msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);

    block->tag = pools->search_count;
    msc__sim_set_insert(&pools->blocks, msc__sim_set_at(pools, block->set_index), slot);
}

/**
 * Serves a request of at least one byte for an id; `*slot` names its block.
 * Errors: EDEVMEM (caches released), ENOMEM and EOVERFLOW (nothing changed).
 */
msc_status msc__sim_pools_alloc(msc__sim_pools *pools, uint32_t id, uint64_t size_bytes,
                                const msc_sim_place *place, uint32_t *slot, msc_error *err);
/** Frees an ALLOCATED block. */
void msc__sim_pools_free(msc__sim_pools *pools, uint32_t slot);
/** Makes an ALLOCATED block AWAITING. Errors: ENOMEM, EOVERFLOW (nothing changed). */
msc_status msc__sim_pools_request(msc__sim_pools *pools, uint32_t slot, msc_error *err);
/** Frees an AWAITING block. Cost: linear in those requested before it. */
void msc__sim_pools_complete(msc__sim_pools *pools, uint32_t slot);
/** Frees an active block that is no longer counted as allocated, and merges it. */
void msc__sim_pools_free_active(msc__sim_pools *pools, uint32_t slot);
void msc__sim_pools_clear(msc__sim_pools *pools);
void msc__sim_pools_fini(msc__sim_pools *pools);

/** The error of a failed request, for both kinds. Counts it and returns MSC_EDEVMEM. */
msc_status msc__sim_pools_fail(msc__sim_pools *pools, uint64_t size_bytes, uint64_t rounded_bytes,
                               msc_error *err);

/** The state behind a simulator, for sim_restore.c. */
msc__sim_pools *msc__sim_pools_of(msc_sim *sim);
/** Makes the table of ids cover `id`, which is below 2^31 - 1; new entries are 0. Errors: ENOMEM, EOVERFLOW.
 */
msc_status msc__sim_cover_id(msc_sim *sim, uint32_t id, msc_error *err);

/* ---- places ------------------------------------------------------------------------------------- */

/** Makes last_place the record of a place. Errors: ENOMEM, EOVERFLOW; nothing changed. */
msc_status msc__sim_places_select(msc__sim_pools *pools, const msc_sim_place *place, msc_error *err);
/** Marks the places of a private pool as released, or as in use. */
void msc__sim_places_mark(msc__sim_pools *pools, uint32_t pool, bool released);
/** The place at a position of `order`. */
static inline uint32_t msc__sim_places_by_order(const msc__sim_pools *pools, uint32_t position)
{
    return ((const uint32_t *)pools->order.items)[position];
}

/* ---- segments ----------------------------------------------------------------------------------- */

/** An address for a segment of `bytes`, a multiple of `unit` unless the caller has chosen it; 0 when 64
 * bits of addresses are used up. */
uint64_t msc__sim_pools_place(msc__sim_pools *pools, uint64_t bytes, uint64_t unit);
/** Counts a segment out. With the last one, addresses start anew. */
void msc__sim_pools_forget_segment(msc__sim_pools *pools);
/** Counts memory of the device in or out, and records the event. */
void msc__sim_count_segment(msc__sim_pools *pools, msc_sim_segment_kind kind, uint32_t set_index,
                            uint64_t address, uint64_t bytes);
/** Makes room for the events of one request and of every release that may follow before the next.
 * Errors: ENOMEM, EOVERFLOW. */
msc_status msc__sim_events_reserve(msc__sim_pools *pools, msc_error *err);
/** Whether the room of the line above is there for releases. */
bool msc__sim_events_have_room(const msc__sim_pools *pools);

/** The map behind msc_sim_map_create. Errors: ENOMEM. */
msc_status msc__sim_map_make(const msc__sim_pools *pools, msc_sim_map **out, msc_error *err);

/* ---- memory back to the device ------------------------------------------------------------------ */

/** Releases oversize blocks of a set for a request; false when that cannot be enough. */
bool msc__sim_release_oversize(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes);
/** Releases old segments of the default large pool when more than garbage_bytes are reserved. */
void msc__sim_collect_garbage(msc__sim_pools *pools);
/** Waits for every stream, then gives back every unsplit segment, or every free page. */
void msc__sim_pools_release_cached(msc__sim_pools *pools);

/* ---- expandable segments ------------------------------------------------------------------------ */

/** Blocks that releases may add to those in use, were `new_page_count` more pages mapped. */
uint64_t msc__sim_expandable_spare(const msc__sim_pools *pools, uint64_t new_page_count);
/** Blocks that the table must hold so that this request, and any release later, needs no host memory. */
uint64_t msc__sim_expandable_room(const msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes);
/** Maps memory for a request: a FREE block of at least `rounded_bytes` that is in no set, or 0. */
uint32_t msc__sim_expandable_grow(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes);
/** Takes the whole pages out of a free block. */
void msc__sim_expandable_unmap(msc__sim_pools *pools, uint32_t slot);
/** Enters an UNMAPPED block into the list of its set. */
void msc__sim_expandable_add_unmapped(msc__sim_pools *pools, uint32_t slot);
/** Size for best fit: a block before unmapped space counts as what it can grow to. */
uint64_t msc__sim_expandable_size(const msc__sim_pools *pools, uint32_t slot);
/** Bytes from an address up to the first page border at or above it. */
uint64_t msc__sim_expandable_to_border(const msc__sim_pools *pools, const msc__sim_block *block,
                                       uint64_t address);

/** Every invariant of the pools. Errors: EINTERNAL. */
msc_status msc__sim_pools_validate(const msc__sim_pools *pools, msc_error *err);

#endif /* MSC_SIM_SIM_POOLS_H */
