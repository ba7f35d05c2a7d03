/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A state from outside, segment by segment.
 *
 *     given   [ A 1 MiB, id 7 ][ free 19 MiB ]     place, address, large
 *     made    two blocks, linked; id 7 names the first; the second is in the free set of its place; 20 MiB
 *             reserved, 1 MiB allocated and active, 19 MiB inactive and split
 *
 * Room is made as a request would make it: for the blocks and events of every release that may follow. What
 * a state does not show is taken as fresh: the age of free blocks, which only garbage collection reads.
 */
#include "sim/sim_restore.h"

#include <inttypes.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "sim/sim_pools.h"

/* Sum of the blocks, if the sizes can be. */
static msc_status check_blocks(const msc__sim_restored_segment *segment, uint64_t *bytes, msc_error *err)
{
    uint32_t i;

    *bytes = 0;
    for (i = 0; i < segment->block_count; i++) {
        uint64_t size_bytes = segment->blocks[i].size_bytes;
        if (size_bytes == 0 || size_bytes % MSC__SIM_GRANULE_BYTES != 0 ||
            !msc__add_u64(*bytes, size_bytes, bytes) || *bytes >= MSC__SIM_MOST_BYTES)
            return msc__fail(err, MSC_EINVAL, "cannot restore a block of %" PRIu64 " bytes", size_bytes);
    }
    if (*bytes == 0 || *bytes > UINT64_MAX - segment->address)
        return msc__fail(err, MSC_EINVAL, "cannot restore a segment of %" PRIu64 " bytes", *bytes);
    return MSC_OK;
}

static msc_status name_block(msc_sim *sim, uint32_t slot, const msc__sim_restored_block *given,
                             msc_error *err)
{
    msc__sim_pools *pools = msc__sim_pools_of(sim);
    uint32_t *ids;
    msc_status status = msc__sim_cover_id(sim, given->id, err);

    if (status != MSC_OK)
        return status;
    ids = pools->ids.items;
    if (ids[given->id] != 0)
        return msc__fail(err, MSC_EINVAL, "cannot restore a block: id %" PRIu32 " is in use", given->id);
    ids[given->id] = slot;
    if (given->state != MSC__SIM_AWAITING)
        return MSC_OK;
    ids[given->id] |= MSC__SIM_ID_AWAITED;
    return msc__sim_pools_request(pools, slot, err);
}

/* Counts and enters an active block; one that is awaited was allocated first. */
static msc_status enter_active(msc_sim *sim, uint32_t slot, const msc__sim_restored_block *given,
                               msc_error *err)
{
    msc__sim_pools *pools = msc__sim_pools_of(sim);
    msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);

    MSC__ASSERT(given->state == MSC__SIM_ALLOCATED || given->state == MSC__SIM_AWAITING);
    block->state = MSC__SIM_ALLOCATED;
    block->tag = given->id;
    block->use.requested_bytes = given->requested_bytes;
    pools->active_count++;
    msc__sim_count_allocated(&pools->counters, block->set_index % 2, block->size_bytes,
                             given->requested_bytes);
    if (block->size_bytes >= pools->options.max_split_bytes)
        msc__sim_counter_add(&pools->counters.oversize_allocations, 1);
    return name_block(sim, slot, given, err);
}

static void enter_free(msc__sim_pools *pools, uint32_t slot, bool is_split)
{
    const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);

    msc__sim_pools_insert(pools, slot);
    if (pools->options.expandable_segments || !is_split)
        return;
    msc__sim_count_up(&pools->counters, block->set_index % 2, MSC__SIM_INACTIVE_SPLIT, 1);
    msc__sim_count_up(&pools->counters, block->set_index % 2, MSC__SIM_INACTIVE_SPLIT_BYTES,
                      block->size_bytes);
}

/* Makes one block above `prev` and returns its slot. */
static uint32_t add_block(msc__sim_pools *pools, const msc__sim_restored_segment *segment, uint64_t address,
                          const msc__sim_restored_block *given, uint32_t prev)
{
    uint32_t slot = msc__sim_blocks_take(&pools->blocks);
    msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);

    MSC__ASSERT(prev == 0 || msc__sim_block_at(&pools->blocks, prev)->address +
                                     msc__sim_block_at(&pools->blocks, prev)->size_bytes ==
                                 address);
    block->address = address;
    block->size_bytes = given->size_bytes;
    block->set_index = pools->last_place * 2 + (segment->is_large ? MSC__SIM_LARGE : MSC__SIM_SMALL);
    block->state = (uint8_t)given->state;
    block->prev = prev;
    if (prev != 0)
        msc__sim_block_at(&pools->blocks, prev)->next = slot;
    if (pools->options.expandable_segments) {
        uint64_t page_bytes = msc__sim_page_bytes(&pools->options, block->set_index);
        block->phase = (uint32_t)(segment->address % page_bytes / MSC__SIM_GRANULE_BYTES);
    }
    return slot;
}

static msc_status enter(msc_sim *sim, uint32_t slot, const msc__sim_restored_block *given, bool is_split,
                        msc_error *err)
{
    msc__sim_pools *pools = msc__sim_pools_of(sim);

    switch (given->state) {
    case MSC__SIM_FREE:
        enter_free(pools, slot, is_split);
        return MSC_OK;
    case MSC__SIM_UNMAPPED:
        msc__sim_expandable_add_unmapped(pools, slot);
        return MSC_OK;
    default:
        return enter_active(sim, slot, given, err);
    }
}

/* Counts the memory of a segment: all of it, or its mapped pages. */
static void count_memory(msc__sim_pools *pools, const msc__sim_restored_segment *segment, uint64_t bytes)
{
    uint32_t set_index = pools->last_place * 2 + (segment->is_large ? MSC__SIM_LARGE : MSC__SIM_SMALL);
    bool expandable = pools->options.expandable_segments != 0;
    uint8_t recorded = pools->options.record_segments;
    uint64_t mapped = bytes;
    uint32_t i;

    for (i = 0; i < segment->block_count; i++) {
        if (segment->blocks[i].state == MSC__SIM_UNMAPPED)
            mapped -= segment->blocks[i].size_bytes;
    }
    pools->options.record_segments = 0;
    msc__sim_count_segment(pools, expandable ? MSC_SIM_SEGMENT_MAP : MSC_SIM_SEGMENT_ALLOC, set_index,
                           segment->address, mapped);
    pools->options.record_segments = recorded;
    if (expandable)
        pools->mapped_page_count += mapped / msc__sim_page_bytes(&pools->options, set_index);
    pools->segment_count++;
    if (pools->lowest_address == 0 || segment->address < pools->lowest_address)
        pools->lowest_address = segment->address;
}

/* As a request does, for the releases that may come before the next one. */
static msc_status make_room_for_releases(msc__sim_pools *pools, msc_error *err)
{
    uint64_t total = pools->blocks.used_count;
    msc_status status;

    if (pools->options.expandable_segments)
        total += msc__sim_expandable_spare(pools, 0);
    status = msc__sim_blocks_reserve(pools->ctx, &pools->blocks, total, err);
    return status == MSC_OK ? msc__sim_events_reserve(pools, err) : status;
}

msc_status msc__sim_restore(msc_sim *sim, const msc__sim_restored_segment *segment, msc_error *err)
{
    msc__sim_pools *pools = msc__sim_pools_of(sim);
    uint64_t address = segment->address;
    uint64_t bytes;
    uint32_t slot = 0;
    uint32_t i;
    msc_status status = check_blocks(segment, &bytes, err);

    if (status == MSC_OK)
        status = msc__sim_places_select(pools, &segment->place, err);
    if (status == MSC_OK)
        status = msc__sim_blocks_reserve(pools->ctx, &pools->blocks,
                                         (uint64_t)pools->blocks.used_count + segment->block_count, err);
    if (status != MSC_OK)
        return status;
    count_memory(pools, segment, bytes);
    for (i = 0; i < segment->block_count; i++) {
        slot = add_block(pools, segment, address, &segment->blocks[i], slot);
        address += segment->blocks[i].size_bytes;
        status = enter(sim, slot, &segment->blocks[i], segment->block_count > 1, err);
        if (status != MSC_OK)
            return status;
    }
    MSC__ASSERT(address == segment->address + bytes);
    return make_room_for_releases(pools, err);
}
