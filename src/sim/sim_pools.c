/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules of PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp).
 *
 *     request ── round ──> pool: small (<= 1 MiB) or large
 *        │ best fit in the free set of (stream, pool)                     hit ──┐
 *        │ new segment                                                    hit ──┤
 *        │ release oversize blocks (max_split_bytes finite), new segment  hit ──┤
 *        │ release all cached, new segment: a retry                       hit ──┤
 *        └ EDEVMEM                                           split, count ──────┘
 *
 *     segment   [ A ][ free ][ A ][   free   ]    neighbours linked by prev and next
 *
 * A free block is split when the rest is worth keeping, the request at the low address; a freed block
 * merges with free neighbours at once. So two neighbours are never both free, and a segment that is one
 * free block can go back to the device.
 *
 * What is simulated differently, and why it does not show: addresses rise from segment to segment and
 * start anew when no segment is left (the real ones come from the driver; they only break ties). The
 * capacity acts where the driver would fail. There are no events, private pools or garbage collection: a
 * trace has none. PyTorch asserts when it releases oversize blocks of expandable segments; here that step
 * is skipped for them.
 *
 * Room for every block that a request may create is reserved before anything changes. In expandable mode
 * the reserve also covers a later release, which may cut blocks but must not fail.
 */
#include "sim/sim_pools.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/error.h"

#define FIRST_ADDRESS MSC__SIM_SMALL_SEGMENT_BYTES

/* ---- sizes -------------------------------------------------------------------------------------- */

/* Rounds up to the next of `divisions` equal steps between two powers of two. size > 512 * divisions. */
static uint64_t round_to_division(uint64_t size_bytes, uint32_t divisions)
{
    uint64_t power = UINT64_C(1) << (63 - __builtin_clzll(size_bytes));

    return msc__round_up_u64(size_bytes, power / divisions);
}

uint64_t msc__sim_round_size(const msc_sim_options *options, uint64_t size_bytes)
{
    uint32_t divisions = options->roundup_power2_divisions;

    if (size_bytes >= MSC__SIM_MOST_BYTES)
        return MSC__SIM_MOST_BYTES;
    if (divisions > 1 && size_bytes > (uint64_t)MSC__SIM_GRANULE_BYTES * divisions)
        return round_to_division(size_bytes, divisions);
    return size_bytes == 0 ? MSC__SIM_GRANULE_BYTES : msc__round_up_u64(size_bytes, MSC__SIM_GRANULE_BYTES);
}

uint64_t msc__sim_segment_bytes(const msc_sim_options *options, uint64_t rounded_bytes)
{
    if (rounded_bytes <= MSC__SIM_SMALL_BYTES)
        return MSC__SIM_SMALL_SEGMENT_BYTES;
    if (rounded_bytes < MSC__SIM_OWN_SEGMENT_BYTES)
        return options->large_segment_bytes;
    return msc__round_up_u64(rounded_bytes, MSC__SIM_OWN_ROUND_BYTES);
}

/* ---- streams ------------------------------------------------------------------------------------ */

static msc_status add_stream(msc__sim_pools *pools, uint32_t stream, msc_error *err)
{
    msc__sim_stream added = {0};
    msc_status status;

    status = msc__array_reserve(pools->ctx, &pools->streams, sizeof added, 1, err);
    if (status != MSC_OK)
        return status;
    added.stream = stream;
    added.sets = msc__alloc(pools->ctx, 2 * sizeof *added.sets);
    if (added.sets == NULL)
        return msc__fail_memory(err, "the free sets of a stream", 2 * sizeof *added.sets);
    pools->last_stream = pools->streams.count;
    return msc__array_push(pools->ctx, &pools->streams, sizeof added, &added, err);
}

/* Makes last_stream the record of `stream`. A program has a handful of streams and changes seldom. */
static msc_status select_stream(msc__sim_pools *pools, uint32_t stream, msc_error *err)
{
    const msc__sim_stream *streams = pools->streams.items;
    uint32_t i;

    if (pools->last_stream < pools->streams.count && streams[pools->last_stream].stream == stream)
        return MSC_OK;
    for (i = 0; i < pools->streams.count; i++) {
        if (streams[i].stream == stream) {
            pools->last_stream = i;
            return MSC_OK;
        }
    }
    return add_stream(pools, stream, err);
}

/* ---- segments ----------------------------------------------------------------------------------- */

uint64_t msc__sim_pools_place(msc__sim_pools *pools, uint64_t bytes, uint64_t unit)
{
    uint64_t start = pools->next_address == 0 ? FIRST_ADDRESS : pools->next_address;
    uint64_t past = start % unit;

    if (past != 0 && !msc__add_u64(start, unit - past, &start))
        return 0;
    if (!msc__add_u64(start, bytes, &pools->next_address)) {
        pools->next_address = UINT64_MAX;
        return 0;
    }
    pools->segment_count++;
    return start;
}

void msc__sim_pools_forget_segment(msc__sim_pools *pools)
{
    pools->segment_count--;
    if (pools->segment_count == 0)
        pools->next_address = 0;
}

void msc__sim_pools_add_reserved(msc__sim_pools *pools, uint64_t bytes)
{
    pools->stats.reserved_now_bytes += bytes;
    msc__sim_raise(&pools->stats.reserved_peak_bytes, pools->stats.reserved_now_bytes);
    pools->stats.device_alloc_count++;
}

void msc__sim_pools_drop_reserved(msc__sim_pools *pools, uint64_t bytes)
{
    pools->stats.reserved_now_bytes -= bytes;
    pools->stats.device_free_count++;
}

/* A segment of fixed size as one FREE block that is in no set; 0 when the device has no room. */
static uint32_t add_segment(msc__sim_pools *pools, uint32_t set_index, uint64_t bytes)
{
    uint64_t address;
    uint32_t slot;
    msc__sim_block *block;

    if (bytes > pools->options.capacity_bytes - pools->stats.reserved_now_bytes)
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
    msc__sim_pools_add_reserved(pools, bytes);
    pools->stats.segment_now_count++;
    msc__sim_raise(&pools->stats.segment_peak_count, pools->stats.segment_now_count);
    return slot;
}

/* Gives an unsplit free block back to the device. */
static void release_segment(msc__sim_pools *pools, uint32_t slot)
{
    const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);

    msc__sim_set_erase(&pools->blocks, msc__sim_set_at(pools, block->set_index), slot);
    msc__sim_pools_drop_reserved(pools, block->size_bytes);
    pools->stats.segment_now_count--;
    msc__sim_pools_forget_segment(pools);
    msc__sim_blocks_give(&pools->blocks, slot);
}

/*
 * Releases oversize blocks of the stream: one that is large enough alone, else from the largest down until
 * together they are. False when that was not enough; what was released stays so.
 */
static bool release_oversize(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    msc__sim_set *set = msc__sim_set_at(pools, set_index);
    uint64_t limit = pools->options.max_split_bytes;
    uint64_t wanted = rounded_bytes < limit ? limit : rounded_bytes;
    uint64_t released = 0;
    uint32_t slot;

    if (limit == UINT64_MAX || pools->options.expandable_segments)
        return false;
    slot = wanted < MSC__SIM_MOST_BYTES ? msc__sim_set_lower_bound(&pools->blocks, set, wanted, 0) : 0;
    if (slot != 0) {
        release_segment(pools, slot);
        return true;
    }
    while (released < wanted) {
        slot = msc__sim_set_largest(&pools->blocks, set);
        if (slot == 0 || msc__sim_block_at(&pools->blocks, slot)->size_bytes < limit)
            return false;
        released += msc__sim_block_at(&pools->blocks, slot)->size_bytes;
        release_segment(pools, slot);
    }
    return true;
}

/* In slot order: the outcome is the same in any, and a scan needs no cursor that a release could move. */
void msc__sim_pools_release_cached(msc__sim_pools *pools)
{
    uint32_t count = pools->blocks.slots.count;
    uint32_t slot;

    for (slot = 1; slot < count; slot++) {
        const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
        if (block->state != MSC__SIM_FREE)
            continue;
        if (pools->options.expandable_segments)
            msc__sim_expandable_unmap(pools, slot);
        else if (block->prev == 0 && block->next == 0)
            release_segment(pools, slot);
    }
}

/* ---- requests ----------------------------------------------------------------------------------- */

/* Best fit, taken out of its set; 0 if there is none or the rules for oversize blocks forbid it. */
static uint32_t take_fit(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    const msc__sim_blocks *blocks = &pools->blocks;
    msc__sim_set *set = msc__sim_set_at(pools, set_index);
    uint64_t limit = pools->options.max_split_bytes;
    uint32_t slot = msc__sim_set_lower_bound(blocks, set, rounded_bytes, 0);
    const msc__sim_block *block;

    while (slot != 0 && pools->options.expandable_segments) {
        uint32_t next;
        block = msc__sim_block_at(blocks, slot);
        next = msc__sim_set_lower_bound(blocks, set, block->size_bytes, block->address + 1);
        if (next == 0 || msc__sim_expandable_size(pools, next) >= msc__sim_expandable_size(pools, slot))
            break;
        slot = next;
    }
    if (slot == 0)
        return 0;
    block = msc__sim_block_at(blocks, slot);
    if (rounded_bytes < limit && block->size_bytes >= limit)
        return 0;
    if (rounded_bytes >= limit &&
        block->size_bytes >= msc__sat_add_u64(rounded_bytes, pools->options.max_non_split_rounding_bytes))
        return 0;
    msc__sim_set_erase(&pools->blocks, set, slot);
    return slot;
}

/* Asks the device once. */
static uint32_t ask_device(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    if (pools->options.expandable_segments)
        return msc__sim_expandable_grow(pools, set_index, rounded_bytes);
    return add_segment(pools, set_index, msc__sim_segment_bytes(&pools->options, rounded_bytes));
}

/* New memory for a request that no cached block fits, with up to two rounds of releasing. */
static uint32_t obtain(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    uint32_t slot = ask_device(pools, set_index, rounded_bytes);

    if (slot == 0 && release_oversize(pools, set_index, rounded_bytes))
        slot = ask_device(pools, set_index, rounded_bytes);
    if (slot == 0) {
        msc__sim_pools_release_cached(pools);
        pools->stats.alloc_retry_count++;
        slot = ask_device(pools, set_index, rounded_bytes);
    }
    return slot;
}

static bool should_split(const msc__sim_pools *pools, const msc__sim_block *block, uint64_t rounded_bytes)
{
    uint64_t rest = block->size_bytes - rounded_bytes;

    if (block->set_index % 2 == 0 || pools->options.expandable_segments)
        return rest >= MSC__SIM_GRANULE_BYTES;
    return rounded_bytes < pools->options.max_split_bytes && rest > MSC__SIM_SMALL_BYTES;
}

/* Keeps what the request does not need and reports what has become of inactive split bytes. */
static void split_rest(msc__sim_pools *pools, uint32_t slot, uint64_t rounded_bytes)
{
    msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
    bool was_split = block->prev != 0 || block->next != 0;
    bool counts = !pools->options.expandable_segments;
    uint64_t *inactive = &pools->stats.inactive_split_now_bytes;

    if (counts && was_split)
        *inactive -= block->size_bytes;
    if (should_split(pools, block, rounded_bytes)) {
        uint32_t rest = msc__sim_blocks_split(&pools->blocks, slot, rounded_bytes);
        msc__sim_set_insert(&pools->blocks, msc__sim_set_at(pools, block->set_index), rest);
        if (counts)
            *inactive += msc__sim_block_at(&pools->blocks, rest)->size_bytes;
    }
}

static void count_allocated(msc__sim_pools *pools, uint64_t block_bytes, uint64_t requested_bytes)
{
    msc_sim_stats *stats = &pools->stats;

    pools->allocated_count++;
    stats->allocated_now_bytes += block_bytes;
    stats->requested_now_bytes += requested_bytes;
    msc__sim_raise(&stats->allocated_peak_bytes, stats->allocated_now_bytes);
    msc__sim_raise(&stats->requested_peak_bytes, stats->requested_now_bytes);
}

msc_status msc__sim_pools_fail(msc__sim_pools *pools, uint64_t size_bytes, uint64_t rounded_bytes,
                               msc_error *err)
{
    pools->stats.oom_count++;
    return msc__fail(err, MSC_EDEVMEM,
                     "cannot allocate %" PRIu64 " bytes (%" PRIu64 " rounded): %" PRIu64
                     " reserved, of which %" PRIu64 " allocated, of a capacity of %" PRIu64,
                     size_bytes, rounded_bytes, pools->stats.reserved_now_bytes,
                     pools->stats.allocated_now_bytes, pools->options.capacity_bytes);
}

/* Room in the tables for whatever this request may lead to. */
static msc_status reserve_room(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes,
                               msc_error *err)
{
    uint64_t total = (uint64_t)pools->blocks.used_count + 2; /* a segment and the rest of a split */

    if (pools->options.expandable_segments)
        total = msc__sim_expandable_room(pools, set_index, rounded_bytes);
    return msc__sim_blocks_reserve(pools->ctx, &pools->blocks, total, err);
}

msc_status msc__sim_pools_alloc(msc__sim_pools *pools, uint64_t size_bytes, uint32_t stream, uint32_t *slot,
                                msc_error *err)
{
    uint64_t rounded_bytes = msc__sim_round_size(&pools->options, size_bytes);
    uint32_t set_index;
    msc__sim_block *block;
    msc_status status;

    status = select_stream(pools, stream, err);
    if (status != MSC_OK)
        return status;
    set_index = pools->last_stream * 2 + (rounded_bytes > MSC__SIM_SMALL_BYTES ? 1u : 0u);
    status = reserve_room(pools, set_index, rounded_bytes, err);
    if (status != MSC_OK)
        return status;
    *slot = take_fit(pools, set_index, rounded_bytes);
    if (*slot == 0)
        *slot = obtain(pools, set_index, rounded_bytes);
    if (*slot == 0)
        return msc__sim_pools_fail(pools, size_bytes, rounded_bytes, err);
    split_rest(pools, *slot, rounded_bytes);
    block = msc__sim_block_at(&pools->blocks, *slot);
    block->state = MSC__SIM_ALLOCATED;
    block->use.requested_bytes = size_bytes;
    count_allocated(pools, block->size_bytes, size_bytes);
    return MSC_OK;
}

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

void msc__sim_pools_free(msc__sim_pools *pools, uint32_t slot)
{
    msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
    msc_sim_stats *stats = &pools->stats;
    uint64_t merged;

    pools->allocated_count--;
    stats->allocated_now_bytes -= block->size_bytes;
    stats->requested_now_bytes -= block->use.requested_bytes;
    block->state = MSC__SIM_FREE;
    merged = absorb_free(pools, slot, block->prev);
    merged += absorb_free(pools, slot, block->next);
    msc__sim_set_insert(&pools->blocks, msc__sim_set_at(pools, block->set_index), slot);
    if (pools->options.expandable_segments)
        return;
    stats->inactive_split_now_bytes -= merged;
    if (block->prev != 0 || block->next != 0)
        stats->inactive_split_now_bytes += block->size_bytes;
}

/* ---- life --------------------------------------------------------------------------------------- */

void msc__sim_pools_clear(msc__sim_pools *pools)
{
    msc__sim_stream *streams = pools->streams.items;
    uint32_t i;

    for (i = 0; i < pools->streams.count; i++)
        memset(streams[i].sets, 0, 2 * sizeof *streams[i].sets);
    msc__sim_blocks_clear(&pools->blocks);
    memset(&pools->stats, 0, sizeof pools->stats);
    pools->allocated_count = 0;
    pools->segment_count = 0;
    pools->mapped_page_count = 0;
    pools->next_address = 0;
}

void msc__sim_pools_fini(msc__sim_pools *pools)
{
    msc__sim_stream *streams = pools->streams.items;
    uint32_t i;

    for (i = 0; i < pools->streams.count; i++)
        msc__free(pools->ctx, streams[i].sets, 2 * sizeof *streams[i].sets);
    msc__array_fini(pools->ctx, &pools->streams, sizeof *streams);
    msc__sim_blocks_fini(pools->ctx, &pools->blocks);
}
