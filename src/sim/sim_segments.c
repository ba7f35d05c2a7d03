/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments: where they lie, what happened to them, and a map of what is there.
 *
 *     events  ALLOC 20 MiB @2M │ ALLOC 2 MiB @22M │ FREE 20 MiB @2M │ …      when record_segments is set
 *
 *     map     segments  [ @2M: 0 … 2 ][ @22M: 2 … 5 ]                        a copy, made when asked for
 *             blocks    [ A ][ free ][ A ][ awaiting ][ free ]
 *
 * Releasing must not need host memory, so room for events is made when a request comes. Between two
 * requests a segment of fixed size is freed once at most. For expandable segments: every range that is
 * unmapped contains a page that a block of its own shared when the last request ended, and that block has
 * become free since; so there are no more such ranges than blocks. The request itself maps each unmapped
 * block once in either attempt, or the one after the last, and unmaps between them.
 */
#include "sim/sim_pools.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"

/* Above all segments: the most there is below 2^64 that is a multiple of the smallest segment. */
#define TOP_ADDRESS (UINT64_MAX - MSC__SIM_SMALL_SEGMENT_BYTES + 1)

/* ---- addresses ---------------------------------------------------------------------------------- */

uint64_t msc__sim_pools_place(msc__sim_pools *pools, uint64_t bytes, uint64_t unit)
{
    uint64_t end = pools->lowest_address == 0 ? TOP_ADDRESS : pools->lowest_address;
    uint64_t start = pools->placed_address;

    MSC__ASSERT(bytes > 0 && bytes % MSC__SIM_GRANULE_BYTES == 0 && unit > 0);
    if (start == 0) {
        start = end > bytes ? (end - bytes) / unit * unit : 0;
        if (start == 0)
            return 0;
    } else if (bytes > UINT64_MAX - start) {
        return 0;
    }
    if (start < end)
        pools->lowest_address = start;
    pools->placed_address = 0;
    pools->segment_count++;
    return start;
}

void msc__sim_pools_forget_segment(msc__sim_pools *pools)
{
    MSC__ASSERT(pools->segment_count > 0);
    pools->segment_count--;
    if (pools->segment_count == 0)
        pools->lowest_address = 0;
}

/* ---- events ------------------------------------------------------------------------------------- */

/* Events that releases may add before the next request. */
static uint64_t events_of_releases(const msc__sim_pools *pools)
{
    return pools->options.expandable_segments ? pools->blocks.used_count : pools->segment_count;
}

msc_status msc__sim_events_reserve(msc__sim_pools *pools, msc_error *err)
{
    uint64_t blocks = (uint64_t)pools->blocks.used_count + 4; /* with those that a request makes */
    uint64_t extra = pools->options.expandable_segments ? 4 * blocks : (uint64_t)pools->segment_count + 2;

    if (!pools->options.record_segments)
        return MSC_OK;
    if (extra > UINT32_MAX)
        return msc__fail(err, MSC_EOVERFLOW, "too many segment events for one simulator");
    return msc__array_reserve(pools->ctx, &pools->events, sizeof(msc_sim_segment_event), (uint32_t)extra,
                              err);
}

bool msc__sim_events_have_room(const msc__sim_pools *pools)
{
    return !pools->options.record_segments ||
           pools->events.capacity - pools->events.count >= events_of_releases(pools);
}

static void record(msc__sim_pools *pools, msc_sim_segment_kind kind, uint32_t set_index, uint64_t address,
                   uint64_t bytes)
{
    const msc__sim_place *place = msc__sim_place_at(pools, set_index / 2);
    msc_sim_segment_event *event = (msc_sim_segment_event *)pools->events.items + pools->events.count;

    MSC__ASSERT(pools->events.count < pools->events.capacity); /* msc__sim_events_reserve */
    MSC__ASSERT(pools->call_count > 0);
    memset(event, 0, sizeof *event);
    event->address = address;
    event->size_bytes = bytes;
    event->call = pools->call_count - 1;
    event->stream = place->stream;
    event->pool = place->pool;
    event->kind = (uint8_t)kind;
    event->is_large = set_index % 2;
    pools->events.count++;
}

void msc__sim_count_segment(msc__sim_pools *pools, msc_sim_segment_kind kind, uint32_t set_index,
                            uint64_t address, uint64_t bytes)
{
    msc__sim_counters *counters = &pools->counters;
    uint32_t pool = set_index % 2;
    bool is_oversize = bytes >= pools->options.max_split_bytes;

    MSC__ASSERT((kind == MSC_SIM_SEGMENT_MAP || kind == MSC_SIM_SEGMENT_UNMAP) ==
                (pools->options.expandable_segments != 0));
    if (kind == MSC_SIM_SEGMENT_ALLOC || kind == MSC_SIM_SEGMENT_MAP) {
        msc__sim_count_up(counters, pool, MSC__SIM_RESERVED_BYTES, bytes);
        counters->device_alloc_count++;
    } else {
        msc__sim_count_down(counters, pool, MSC__SIM_RESERVED_BYTES, bytes);
        counters->device_free_count++;
    }
    if (kind == MSC_SIM_SEGMENT_ALLOC) {
        msc__sim_count_up(counters, pool, MSC__SIM_SEGMENT, 1);
        if (is_oversize)
            msc__sim_counter_add(&counters->oversize_segments, 1);
    } else if (kind == MSC_SIM_SEGMENT_FREE) {
        msc__sim_count_down(counters, pool, MSC__SIM_SEGMENT, 1);
        if (is_oversize)
            counters->oversize_segments.current--;
    }
    if (pools->options.record_segments)
        record(pools, kind, set_index, address, bytes);
}

/* ---- map ---------------------------------------------------------------------------------------- */

struct msc_sim_map {
    msc_context *ctx;
    msc_sim_segment *segments;
    msc_sim_block *blocks;
    uint32_t segment_count;
    uint32_t block_count;
};

static bool is_mapped(const msc__sim_block *block)
{
    return block->state != MSC__SIM_EMPTY && block->state != MSC__SIM_UNMAPPED;
}

/* Whether a range with memory begins at a block. */
static bool is_head(const msc__sim_blocks *blocks, uint32_t slot)
{
    const msc__sim_block *block = msc__sim_block_at(blocks, slot);

    return is_mapped(block) && (block->prev == 0 || !is_mapped(msc__sim_block_at(blocks, block->prev)));
}

/* Notes a head as a segment; its slot stands in `block_begin` until the blocks are copied. */
static void add_segment(msc_sim_map *map, const msc__sim_pools *pools, uint32_t slot)
{
    const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
    const msc__sim_place *place = msc__sim_place_at(pools, block->set_index / 2);
    msc_sim_segment *segment = &map->segments[map->segment_count++];

    segment->address = block->address;
    segment->block_begin = slot;
    segment->stream = place->stream;
    segment->pool = place->pool;
    segment->is_large = block->set_index % 2;
    segment->is_expandable = pools->options.expandable_segments;
}

static void add_block(msc_sim_map *map, msc_sim_segment *segment, const msc__sim_block *block)
{
    msc_sim_block *out = &map->blocks[map->block_count++];
    bool is_active = msc__sim_is_active(block);

    MSC__ASSERT(is_mapped(block) && segment->address + segment->size_bytes == block->address);
    out->address = block->address;
    out->size_bytes = block->size_bytes;
    out->requested_bytes = is_active ? block->use.requested_bytes : 0;
    out->id = is_active ? block->tag : MSC_NONE;
    out->state = (uint8_t)(block->state == MSC__SIM_ALLOCATED ? MSC_SIM_BLOCK_ALLOCATED
                           : is_active                        ? MSC_SIM_BLOCK_AWAITING
                                                              : MSC_SIM_BLOCK_FREE);
    segment->size_bytes += block->size_bytes;
    segment->allocated_bytes += block->state == MSC__SIM_ALLOCATED ? block->size_bytes : 0;
    segment->active_bytes += is_active ? block->size_bytes : 0;
    segment->requested_bytes += out->requested_bytes;
}

static int compare_addresses(const void *a, const void *b)
{
    const msc_sim_segment *x = a;
    const msc_sim_segment *y = b;

    if (x->address != y->address)
        return x->address < y->address ? -1 : 1;
    return x->block_begin < y->block_begin ? -1 : x->block_begin > y->block_begin;
}

static void fill_map(msc_sim_map *map, const msc__sim_pools *pools)
{
    uint32_t slot;
    uint32_t i;

    for (slot = 1; slot < pools->blocks.slots.count; slot++)
        if (is_head(&pools->blocks, slot))
            add_segment(map, pools, slot);
    if (map->segment_count > 1)
        qsort(map->segments, map->segment_count, sizeof *map->segments, compare_addresses);
    for (i = 0; i < map->segment_count; i++) {
        msc_sim_segment *segment = &map->segments[i];
        slot = segment->block_begin;
        segment->block_begin = map->block_count;
        for (; slot != 0 && is_mapped(msc__sim_block_at(&pools->blocks, slot));
             slot = msc__sim_block_at(&pools->blocks, slot)->next)
            add_block(map, segment, msc__sim_block_at(&pools->blocks, slot));
        MSC__ASSERT(segment->allocated_bytes <= segment->active_bytes &&
                    segment->active_bytes <= segment->size_bytes);
        segment->block_end = map->block_count;
    }
}

/* Counts first, so that both arrays have exactly the size that destroying gives back. */
msc_status msc__sim_map_make(const msc__sim_pools *pools, msc_sim_map **out, msc_error *err)
{
    msc_sim_map *map = msc__alloc(pools->ctx, sizeof *map);
    uint32_t segments = 0;
    uint32_t blocks = 0;
    uint32_t slot;

    if (map == NULL)
        return msc__fail_memory(err, "a map of segments", sizeof *map);
    map->ctx = pools->ctx;
    for (slot = 1; pools->options.kind == MSC_SIM_CUDA && slot < pools->blocks.slots.count; slot++) {
        segments += is_head(&pools->blocks, slot);
        blocks += is_mapped(msc__sim_block_at(&pools->blocks, slot));
    }
    if (segments > 0) {
        map->segments = msc__alloc(pools->ctx, segments * sizeof *map->segments);
        map->blocks = msc__alloc(pools->ctx, blocks * sizeof *map->blocks);
        if (map->segments != NULL && map->blocks != NULL)
            fill_map(map, pools);
        MSC__ASSERT(map->segment_count == 0 ||
                    (map->segment_count == segments && map->block_count == blocks));
        map->segment_count = segments;
        map->block_count = blocks;
        if (map->segments == NULL || map->blocks == NULL) {
            msc_sim_map_destroy(map);
            return msc__fail_memory(err, "a map of segments", blocks * sizeof *map->blocks);
        }
    }
    *out = map;
    return MSC_OK;
}

void msc_sim_map_destroy(msc_sim_map *map)
{
    if (map == NULL)
        return;
    msc__free(map->ctx, map->segments, map->segment_count * sizeof *map->segments);
    msc__free(map->ctx, map->blocks, map->block_count * sizeof *map->blocks);
    msc__free(map->ctx, map, sizeof *map);
}

const msc_sim_segment *msc_sim_map_segments(const msc_sim_map *map, uint32_t *count)
{
    *count = map->segment_count;
    return map->segments;
}

const msc_sim_block *msc_sim_map_blocks(const msc_sim_map *map, uint32_t *count)
{
    *count = map->block_count;
    return map->blocks;
}
