/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules of PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp).
 *
 *     request ── round ──> pool: small (<= 1 MiB) or large
 *        │ best fit in the free set of (stream, pool)                     hit ──┐
 *        │ collect garbage (a fraction and a threshold are set)                 │
 *        │ new segment                                                    hit ──┤
 *        │ release oversize blocks (max_split_bytes finite), new segment  hit ──┤
 *        │ release all cached, new segment: a retry                       hit ──┤
 *        └ EDEVMEM                                           split, count ──────┘
 *
 *     segment   [ A ][ free ][ A ][   free   ]    neighbours linked by prev and next
 *
 * A free block is split when the rest is worth keeping, the request at the low address; a freed block
 * merges with free neighbours at once. So two neighbours are never both free, and a segment that is one
 * free block can go back to the device. A block that a stream still uses when its owner frees it waits as
 * AWAITING: neither free nor allocated.
 *
 * Addresses only break ties between blocks of one size, and that decides which of them is cut, so much follows
 * from it. They fall from segment to segment, as those of Linux drivers do: histories of an H100 (driver 580)
 * are repeated exactly, and were not while addresses rose. What is simulated differently, and why it does not
 * show: they start anew when no segment is left, unless the caller gives the real ones. The
 * capacity acts where the driver would fail. When streams finish is not known here: the caller says so, or
 * a retry waits for them.
 *
 * Room for every block that a request may create is reserved before anything changes. In expandable mode
 * the reserve also covers a later release, which may cut blocks but must not fail.
 */
#include "sim/sim_pools.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"

/* ---- new memory --------------------------------------------------------------------------------- */

/* A segment of fixed size as one FREE block that is in no set; 0 when the device has no room. */
static uint32_t add_segment(msc__sim_pools *pools, uint32_t set_index, uint64_t bytes)
{
    uint64_t address;
    uint32_t slot;
    msc__sim_block *block;

    MSC__ASSERT(msc__sim_reserved(pools) <= pools->options.capacity_bytes);
    if (bytes > pools->options.capacity_bytes - msc__sim_reserved(pools))
        return 0;
    address = msc__sim_pools_place(pools, bytes, 1);
    if (address == 0)
        return 0;
    slot = msc__sim_blocks_take(&pools->blocks);
    block = msc__sim_block_at(&pools->blocks, slot);
    block->address = address;
    block->size_bytes = bytes;
    block->set_index = set_index;
    block->state = MSC__SIM_FREE;
    msc__sim_count_segment(pools, MSC_SIM_SEGMENT_ALLOC, set_index, address, bytes);
    return slot;
}

/* Asks the device once. The fraction is held against the size of a segment in either mode, as in PyTorch. */
static uint32_t ask_device(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    uint64_t bytes = msc__sim_segment_bytes(&pools->options, rounded_bytes);

    MSC__ASSERT(bytes >= rounded_bytes);

    if (pools->options.allowed_bytes != UINT64_MAX &&
        msc__sat_add_u64(msc__sim_reserved(pools), bytes) > pools->options.allowed_bytes)
        return 0;
    if (pools->options.expandable_segments)
        return msc__sim_expandable_grow(pools, set_index, rounded_bytes);
    return add_segment(pools, set_index, bytes);
}

/* New memory for a request that no cached block fits, with up to three rounds of releasing. */
static uint32_t obtain(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    uint32_t slot;

    msc__sim_collect_garbage(pools);
    slot = ask_device(pools, set_index, rounded_bytes);
    if (slot == 0 && msc__sim_release_oversize(pools, set_index, rounded_bytes))
        slot = ask_device(pools, set_index, rounded_bytes);
    if (slot == 0 && !pools->capturing) {
        msc__sim_pools_release_cached(pools);
        pools->counters.alloc_retry_count++;
        slot = ask_device(pools, set_index, rounded_bytes);
    }
    return slot;
}

/* ---- requests ----------------------------------------------------------------------------------- */

/* The block that PyTorch takes for the best fit: one that can grow counts as what it can grow to. */
static uint32_t prefer_smaller_growth(const msc__sim_pools *pools, const msc__sim_set *set, uint32_t slot)
{
    for (;;) {
        msc__sim_key key = msc__sim_key_of(&pools->blocks, slot);
        uint32_t next = msc__sim_set_after(&pools->blocks, set, &key);
        if (next == 0 || msc__sim_expandable_size(pools, next) >= msc__sim_expandable_size(pools, slot))
            return slot;
        slot = next;
    }
}

/* Best fit, taken out of its set; 0 if there is none or the rules for oversize blocks forbid it. */
static uint32_t take_fit(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    msc__sim_set *set = msc__sim_set_at(pools, set_index);
    uint64_t limit = pools->options.max_split_bytes;
    uint32_t slot = msc__sim_set_lower_bound(&pools->blocks, set, rounded_bytes, 0);
    uint64_t bytes;

    if (slot == 0)
        return 0;
    if (pools->options.expandable_segments)
        slot = prefer_smaller_growth(pools, set, slot);
    bytes = msc__sim_block_at(&pools->blocks, slot)->size_bytes;
    MSC__ASSERT(bytes >= rounded_bytes);
    if (rounded_bytes < limit && bytes >= limit)
        return 0;
    if (rounded_bytes >= limit &&
        bytes >= msc__sat_add_u64(rounded_bytes, pools->options.max_non_split_rounding_bytes))
        return 0;
    msc__sim_set_erase(&pools->blocks, set, slot);
    return slot;
}

static bool should_split(const msc__sim_pools *pools, const msc__sim_block *block, uint64_t rounded_bytes)
{
    uint64_t rest = block->size_bytes - rounded_bytes;

    MSC__ASSERT(rounded_bytes <= block->size_bytes);

    if (block->set_index % 2 == MSC__SIM_SMALL || pools->options.expandable_segments)
        return rest >= MSC__SIM_GRANULE_BYTES;
    return rounded_bytes < pools->options.max_split_bytes && rest > MSC__SIM_SMALL_BYTES;
}

/*
 * Keeps what the request does not need, and counts inactive split blocks: a part cut off one shrinks it, a
 * part cut off a whole segment leaves one, and one that is used up is gone.
 */
static void split_rest(msc__sim_pools *pools, uint32_t slot, uint64_t rounded_bytes)
{
    msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
    msc__sim_counters *counters = &pools->counters;
    uint32_t pool = block->set_index % 2;
    bool counts = !pools->options.expandable_segments;
    bool was_split = block->prev != 0 || block->next != 0;

    MSC__ASSERT(block->state == MSC__SIM_FREE);
    if (should_split(pools, block, rounded_bytes)) {
        uint32_t rest = msc__sim_blocks_split(&pools->blocks, slot, rounded_bytes);
        msc__sim_pools_insert(pools, rest);
        if (counts && was_split) {
            msc__sim_count_down(counters, pool, MSC__SIM_INACTIVE_SPLIT_BYTES, rounded_bytes);
        } else if (counts) {
            msc__sim_count_up(counters, pool, MSC__SIM_INACTIVE_SPLIT_BYTES,
                              msc__sim_block_at(&pools->blocks, rest)->size_bytes);
            msc__sim_count_up(counters, pool, MSC__SIM_INACTIVE_SPLIT, 1);
        }
    } else if (counts && was_split) {
        msc__sim_count_down(counters, pool, MSC__SIM_INACTIVE_SPLIT_BYTES, block->size_bytes);
        msc__sim_count_down(counters, pool, MSC__SIM_INACTIVE_SPLIT, 1);
    }
}

msc_status msc__sim_pools_fail(msc__sim_pools *pools, uint64_t size_bytes, uint64_t rounded_bytes,
                               msc_error *err)
{
    bool has_fraction = pools->options.allowed_bytes < pools->options.capacity_bytes;

    pools->counters.oom_count++;
    return msc__fail(err, MSC_EDEVMEM,
                     "cannot allocate %" PRIu64 " bytes (%" PRIu64 " rounded): %" PRIu64 " reserved, %" PRIu64
                     " of it allocated, of %s of %" PRIu64,
                     size_bytes, rounded_bytes, msc__sim_reserved(pools),
                     msc__sim_now(&pools->counters, MSC__SIM_ALLOCATED_BYTES),
                     has_fraction ? "a memory fraction" : "a capacity",
                     has_fraction ? pools->options.allowed_bytes : pools->options.capacity_bytes);
}

/* Room in the tables for whatever this request may lead to. */
static msc_status reserve_room(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes,
                               msc_error *err)
{
    uint64_t total = (uint64_t)pools->blocks.used_count + 2; /* a segment and the rest of a split */
    msc_status status;

    if (pools->options.expandable_segments)
        total = msc__sim_expandable_room(pools, set_index, rounded_bytes);
    status = msc__sim_blocks_reserve(pools->ctx, &pools->blocks, total, err);
    return status == MSC_OK ? msc__sim_events_reserve(pools, err) : status;
}

msc_status msc__sim_pools_alloc(msc__sim_pools *pools, uint32_t id, uint64_t size_bytes,
                                const msc_sim_place *place, uint32_t *slot, msc_error *err)
{
    uint64_t rounded_bytes = msc__sim_round_size(&pools->options, size_bytes);
    uint32_t pool = rounded_bytes > MSC__SIM_SMALL_BYTES ? MSC__SIM_LARGE : MSC__SIM_SMALL;
    uint32_t set_index;
    msc__sim_block *block;
    msc_status status;

    status = msc__sim_places_select(pools, place, err);
    if (status != MSC_OK)
        return status;
    set_index = pools->last_place * 2 + pool;
    MSC__ASSERT(pools->last_place < pools->places.count);
    MSC__ASSERT(rounded_bytes >= size_bytes || rounded_bytes == MSC__SIM_MOST_BYTES);
    status = reserve_room(pools, set_index, rounded_bytes, err);
    if (status != MSC_OK)
        return status;
    if (msc__sim_place_at(pools, pools->last_place)->released)
        msc__sim_places_mark(pools, place->pool, false);
    pools->search_count += pool == MSC__SIM_LARGE && place->pool == 0;
    *slot = take_fit(pools, set_index, rounded_bytes);
    if (*slot == 0)
        *slot = obtain(pools, set_index, rounded_bytes);
    if (*slot == 0)
        return msc__sim_pools_fail(pools, size_bytes, rounded_bytes, err);
    split_rest(pools, *slot, rounded_bytes);
    block = msc__sim_block_at(&pools->blocks, *slot);
    MSC__ASSERT(block->size_bytes >= rounded_bytes && block->set_index == set_index);
    block->state = MSC__SIM_ALLOCATED;
    block->tag = id;
    block->use.requested_bytes = size_bytes;
    pools->active_count++;
    msc__sim_count_allocated(&pools->counters, pool, block->size_bytes, size_bytes);
    if (block->size_bytes >= pools->options.max_split_bytes)
        msc__sim_counter_add(&pools->counters.oversize_allocations, 1);
    return MSC_OK;
}

/* ---- frees -------------------------------------------------------------------------------------- */

/* Merges a free neighbour into a block; returns the bytes gained. */
static uint64_t absorb_free(msc__sim_pools *pools, uint32_t slot, uint32_t other)
{
    const msc__sim_block *block = msc__sim_block_at(&pools->blocks, other);
    uint64_t bytes = block->size_bytes;

    if (other == 0 || block->state != MSC__SIM_FREE)
        return 0;
    msc__sim_set_erase(&pools->blocks, msc__sim_set_at(pools, block->set_index), other);
    msc__sim_blocks_absorb(&pools->blocks, slot, other);
    return bytes;
}

/* One free counts its net change of inactive split blocks, up or down. */
static void count_inactive(msc__sim_pools *pools, uint32_t pool, msc__sim_metric metric, uint64_t gained,
                           uint64_t lost)
{
    if (gained > lost)
        msc__sim_count_up(&pools->counters, pool, metric, gained - lost);
    else if (lost > gained)
        msc__sim_count_down(&pools->counters, pool, metric, lost - gained);
}

void msc__sim_pools_free_active(msc__sim_pools *pools, uint32_t slot)
{
    msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
    uint32_t pool = block->set_index % 2;
    uint64_t below;
    uint64_t above;
    bool is_split;

    MSC__ASSERT(pools->active_count > 0 && msc__sim_is_active(block));
    pools->active_count--;
    msc__sim_count_completed(&pools->counters, pool, block->size_bytes, block->use.requested_bytes);
    block->state = MSC__SIM_FREE;
    below = absorb_free(pools, slot, block->prev);
    above = absorb_free(pools, slot, block->next);
    MSC__ASSERT(block->prev == 0 || msc__sim_block_at(&pools->blocks, block->prev)->state != MSC__SIM_FREE);
    MSC__ASSERT(block->next == 0 || msc__sim_block_at(&pools->blocks, block->next)->state != MSC__SIM_FREE);
    msc__sim_pools_insert(pools, slot);
    if (pools->options.expandable_segments)
        return;
    is_split = block->prev != 0 || block->next != 0;
    count_inactive(pools, pool, MSC__SIM_INACTIVE_SPLIT, is_split,
                   (below != 0 ? 1u : 0u) + (above != 0 ? 1u : 0u));
    count_inactive(pools, pool, MSC__SIM_INACTIVE_SPLIT_BYTES, is_split ? block->size_bytes : 0,
                   below + above);
}

/* Counts a block as no longer allocated. */
static void stop_counting(msc__sim_pools *pools, const msc__sim_block *block)
{
    MSC__ASSERT(block->state == MSC__SIM_ALLOCATED);
    msc__sim_count_requested(&pools->counters, block->set_index % 2, block->size_bytes);
    if (block->size_bytes >= pools->options.max_split_bytes)
        pools->counters.oversize_allocations.current--;
}

void msc__sim_pools_free(msc__sim_pools *pools, uint32_t slot)
{
    stop_counting(pools, msc__sim_block_at(&pools->blocks, slot));
    msc__sim_pools_free_active(pools, slot);
}

msc_status msc__sim_pools_request(msc__sim_pools *pools, uint32_t slot, msc_error *err)
{
    msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
    msc_status status = msc__array_push(pools->ctx, &pools->awaiting, sizeof slot, &slot, err);

    if (status != MSC_OK)
        return status;
    stop_counting(pools, block);
    block->state = MSC__SIM_AWAITING;
    return MSC_OK;
}

void msc__sim_pools_complete(msc__sim_pools *pools, uint32_t slot)
{
    uint32_t *slots = pools->awaiting.items;
    uint32_t i = 0;

    MSC__ASSERT(msc__sim_block_at(&pools->blocks, slot)->state == MSC__SIM_AWAITING);
    while (slots[i] != slot)
        i++;
    MSC__ASSERT(i < pools->awaiting.count);
    pools->awaiting.count--;
    memmove(slots + i, slots + i + 1, (pools->awaiting.count - i) * sizeof *slots);
    msc__sim_pools_free_active(pools, slot);
}

/* ---- life --------------------------------------------------------------------------------------- */

void msc__sim_pools_clear(msc__sim_pools *pools)
{
    uint32_t i;

    for (i = 0; i < pools->places.count; i++) {
        msc__sim_place *place = msc__sim_place_at(pools, i);
        memset(place->sets, 0, 2 * sizeof *place->sets);
        place->released = false;
    }
    msc__sim_blocks_clear(&pools->blocks);
    memset(&pools->counters, 0, sizeof pools->counters);
    pools->ids.count = 0;
    pools->awaiting.count = 0;
    pools->events.count = 0;
    pools->active_count = 0;
    pools->segment_count = 0;
    pools->search_count = 0;
    pools->mapped_page_count = 0;
    pools->lowest_address = 0;
    pools->placed_address = 0;
    pools->call_count = 0;
    pools->capturing = false;
}

void msc__sim_pools_fini(msc__sim_pools *pools)
{
    uint32_t i;

    for (i = 0; i < pools->places.count; i++)
        msc__free(pools->ctx, msc__sim_place_at(pools, i)->sets, 2 * sizeof(msc__sim_set));
    msc__array_fini(pools->ctx, &pools->places, sizeof(msc__sim_place));
    msc__array_fini(pools->ctx, &pools->order, sizeof(uint32_t));
    msc__array_fini(pools->ctx, &pools->ids, sizeof(uint32_t));
    msc__array_fini(pools->ctx, &pools->awaiting, sizeof(uint32_t));
    msc__array_fini(pools->ctx, &pools->events, sizeof(msc_sim_segment_event));
    msc__sim_blocks_fini(pools->ctx, &pools->blocks);
}
