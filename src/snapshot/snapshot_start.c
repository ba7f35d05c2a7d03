/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state at the beginning of a trace.
 *
 * A history is a ring: what is older than its room is lost. What was there before it follows from what
 * happened since and from the end:
 *
 *     memory    given back without having been obtained in the trace, or there at the end and never touched
 *     blocks    freed without having been allocated in the trace, or there at the end and never touched
 *     free      whatever the blocks leave, since free neighbours merge
 *
 * Memory of expandable segments is counted in pages of 2 MiB, all else in whole segments. Sizes of blocks:
 * those at the end are recorded. For the others the request is rounded; in a large segment of fixed size a
 * rest of up to 1 MiB belongs to the block, since the allocator never cuts off so little. An expandable
 * segment is the address space of its stream and pool from the lowest page on that the trace knows.
 *
 *     pieces    [ range 20 MiB ][ hole ][ range 40 MiB ][ unmapped up to the size of the address space ]
 */
#include "snapshot/snapshot_replay.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/search.h"
#include "sim/sim_options.h"
#include "sim/sim_restore.h"

#define PAGE_BYTES (UINT64_C(2) << 20)
#define MOST_PAGES (UINT32_C(1) << 22)       /* 8 TiB */
#define MOST_SPACES 1024u                    /* streams and pools with expandable segments */
#define MOST_SPACE_BYTES (UINT64_C(1) << 42) /* as in sim_expandable.c */

/* Memory that was there: a segment of fixed size, or a page and later a range of pages. */
typedef struct range {
    uint64_t address;
    uint64_t bytes;
    uint32_t stream;
    uint32_t pool;
    uint32_t is_large;
    uint32_t pad;
} range;

/* A block that was there. */
typedef struct held {
    uint64_t address;
    uint32_t allocation;
    uint32_t pad;
} held;

typedef struct start {
    msc__replay *replay;
    msc_context *ctx;
    msc_error *err;
    msc__array ranges; /* of range */
    msc__array blocks; /* of held */
    msc__array pieces; /* of msc__sim_restored_block */
    msc__array touched_keys;
    msc__hash_index touched; /* addresses that an event named first */
} start;

/* ---- what was there ----------------------------------------------------------------------------- */

static uint32_t hash_address(uint64_t address)
{
    return (uint32_t)((address >> 9) * UINT64_C(0x9e3779b97f4a7c15) >> 32);
}

/* Whether this is the first time that an address is named; it then counts as named. */
static msc_status touch(start *s, uint64_t address, bool *first)
{
    const uint64_t *keys = s->touched_keys.items;
    uint32_t hash = hash_address(address);
    uint32_t probe = hash;
    uint32_t index;
    msc_status status;

    *first = false;
    while (keys != NULL && (index = msc__hash_index_next(&s->touched, hash, &probe)) != MSC_NONE) {
        MSC__ASSERT(index < s->touched_keys.count);
        if (keys[index] == address)
            return MSC_OK;
    }
    *first = true;
    status = msc__hash_index_reserve(s->ctx, &s->touched, "addresses", s->err);
    if (status == MSC_OK)
        status = msc__array_push(s->ctx, &s->touched_keys, sizeof address, &address, s->err);
    if (status == MSC_OK)
        msc__hash_index_insert(&s->touched, hash, s->touched_keys.count - 1);
    return status;
}

/* Names each unit of some memory; what was not named before was there, if `was_there`. */
static msc_status touch_all(start *s, const range *memory, uint64_t unit_bytes, bool was_there)
{
    uint64_t done;
    range unit = *memory;
    msc_status status = MSC_OK;

    if (memory->bytes == 0 || memory->bytes / unit_bytes >= MOST_PAGES - s->touched_keys.count)
        return msc__fail(s->err, MSC_EUNSUPPORTED, "the trace names %" PRIu64 " bytes at once",
                         memory->bytes);
    MSC__ASSERT(unit_bytes > 0);
    unit.bytes = unit_bytes;
    for (done = 0; done < memory->bytes && status == MSC_OK; done += unit_bytes) {
        bool first;
        unit.address = memory->address + done;
        status = touch(s, unit.address, &first);
        if (status == MSC_OK && first && was_there)
            status = msc__array_push(s->ctx, &s->ranges, sizeof unit, &unit, s->err);
    }
    return status;
}

/* Memory that an event names. The size tells the pool: small segments and pages have 2 MiB. */
static msc_status touch_event(start *s, const msc_snapshot_event *event)
{
    bool paged = event->action == MSC_SNAPSHOT_ACTION_SEGMENT_MAP ||
                 event->action == MSC_SNAPSHOT_ACTION_SEGMENT_UNMAP;
    bool was_there = event->action == MSC_SNAPSHOT_ACTION_SEGMENT_FREE ||
                     event->action == MSC_SNAPSHOT_ACTION_SEGMENT_UNMAP;
    msc_sim_place place = msc__replay_place(s->replay, event->address, event->stream);
    range memory = {event->address, event->size_bytes, place.stream, place.pool, 0, 0};
    uint64_t large_bytes = s->replay->sim_options.large_segment_bytes;

    if (event->action < MSC_SNAPSHOT_ACTION_SEGMENT_ALLOC ||
        event->action > MSC_SNAPSHOT_ACTION_SEGMENT_UNMAP)
        return MSC_OK;
    memory.is_large = paged ? event->size_bytes % large_bytes == 0 : event->size_bytes != PAGE_BYTES;
    return touch_all(s, &memory, paged ? PAGE_BYTES : event->size_bytes, was_there);
}

static msc_status touch_segment(start *s, const msc_snapshot_segment *segment)
{
    range memory = {segment->address,
                    segment->total_bytes,
                    msc__numbering_stream(&s->replay->numbering, segment->stream),
                    msc__numbering_pool(&s->replay->numbering, segment->pool),
                    segment->is_large,
                    0};

    return touch_all(s, &memory, segment->is_expandable ? PAGE_BYTES : segment->total_bytes, true);
}

static msc_status collect_ranges(start *s)
{
    const msc__history *history = &s->replay->history;
    uint32_t count;
    uint32_t i;
    const msc_snapshot_segment *segments =
        msc_snapshot_segments(s->replay->snapshot, history->device, &count);
    msc_status status = MSC_OK;

    for (i = history->first_event; i < history->event_count && status == MSC_OK; i++)
        status = touch_event(s, &history->events[i]);
    for (i = 0; i < count && status == MSC_OK && history->ends_in_blocks; i++)
        status = touch_segment(s, &segments[i]);
    return status;
}

static msc_status collect_blocks(start *s)
{
    const msc__history *history = &s->replay->history;
    uint32_t i;
    msc_status status = MSC_OK;

    for (i = 0; i < history->allocations.count && status == MSC_OK; i++) {
        held block = {msc__history_at(history, i)->address, i, 0};
        if (msc__history_at(history, i)->alloc == MSC__BEFORE)
            status = msc__array_push(s->ctx, &s->blocks, sizeof block, &block, s->err);
    }
    return status;
}

/* ---- order -------------------------------------------------------------------------------------- */

static int compare_words(uint64_t x, uint64_t y)
{
    return (x > y) - (x < y);
}

static bool is_same_place(const range *a, const range *b)
{
    return a->stream == b->stream && a->pool == b->pool && a->is_large == b->is_large;
}

static int compare_ranges(const void *a, const void *b)
{
    const range *x = a;
    const range *y = b;

    if (x->pool != y->pool)
        return compare_words(x->pool, y->pool);
    if (x->stream != y->stream)
        return compare_words(x->stream, y->stream);
    if (x->is_large != y->is_large)
        return compare_words(x->is_large, y->is_large);
    return compare_words(x->address, y->address);
}

static int compare_held(const void *a, const void *b)
{
    return compare_words(((const held *)a)->address, ((const held *)b)->address);
}

/* Sorts by place and address; pages side by side become one range. */
static void order(start *s)
{
    range *ranges = s->ranges.items;
    uint32_t kept = 0;
    uint32_t i;

    if (s->blocks.count > 0)
        qsort(s->blocks.items, s->blocks.count, sizeof(held), compare_held);
    if (s->ranges.count == 0)
        return;
    qsort(ranges, s->ranges.count, sizeof *ranges, compare_ranges);
    for (i = 1; i < s->ranges.count; i++) {
        MSC__ASSERT(kept < i && compare_ranges(&ranges[kept], &ranges[i]) <= 0);
        if (s->replay->sim_options.expandable_segments && is_same_place(&ranges[kept], &ranges[i]) &&
            ranges[kept].address + ranges[kept].bytes == ranges[i].address)
            ranges[kept].bytes += ranges[i].bytes;
        else
            ranges[++kept] = ranges[i];
    }
    s->ranges.count = kept + 1;
}

/* ---- pieces ------------------------------------------------------------------------------------- */

static msc_status add_piece(start *s, uint64_t bytes, msc__sim_state state)
{
    msc__sim_restored_block piece = {bytes, 0, MSC_NONE, (uint32_t)state};

    return bytes == 0 ? MSC_OK : msc__array_push(s->ctx, &s->pieces, sizeof piece, &piece, s->err);
}

/* Bytes of a block that owns at most `most_bytes`. */
static uint64_t block_bytes(const start *s, const range *memory, const msc__allocation *allocation,
                            uint64_t most_bytes)
{
    const msc_sim_options *options = &s->replay->sim_options;
    const msc_snapshot_block *blocks = s->replay->snapshot->blocks.items;
    uint64_t rounded = msc__sim_round_size(options, allocation->requested_bytes);

    MSC__ASSERT(allocation->block == MSC_NONE || allocation->block < s->replay->snapshot->blocks.count);
    if (allocation->block != MSC_NONE)
        return blocks[allocation->block].size_bytes;
    if (rounded >= most_bytes || !memory->is_large || options->expandable_segments)
        return rounded;
    if (rounded >= options->max_split_bytes || most_bytes - rounded <= MSC__SIM_SMALL_BYTES)
        return most_bytes;
    return rounded;
}

/* First block at or above an address. */
static uint32_t first_block(const start *s, uint64_t address)
{
    return MSC__LOWER_BOUND(held, address, s->blocks.items, s->blocks.count, address);
}

/* Adds the pieces of a range; counts the blocks that it holds. */
static msc_status add_range(start *s, const range *memory, uint32_t *placed)
{
    const held *blocks = s->blocks.items;
    uint64_t address = memory->address;
    uint64_t end = memory->address + memory->bytes;
    uint32_t i = first_block(s, address);
    msc_status status = MSC_OK;

    for (; i < s->blocks.count && blocks[i].address < end && status == MSC_OK; i++) {
        const msc__allocation *allocation = msc__history_at(&s->replay->history, blocks[i].allocation);
        bool is_last = i + 1 == s->blocks.count || blocks[i + 1].address >= end;
        uint64_t limit = is_last ? end : blocks[i + 1].address;
        MSC__ASSERT(allocation->alloc == MSC__BEFORE);
        msc__sim_restored_block piece = {0, allocation->requested_bytes, blocks[i].allocation, 0};
        piece.size_bytes = block_bytes(s, memory, allocation, limit - blocks[i].address);
        piece.state = allocation->request == MSC__BEFORE ? MSC__SIM_AWAITING : MSC__SIM_ALLOCATED;
        if (piece.size_bytes > limit - blocks[i].address)
            return msc__fail(
                s->err, MSC_EUNSUPPORTED,
                "the state at the beginning of the trace cannot be derived: the block at 0x%" PRIx64
                " would overlap the next",
                blocks[i].address);
        status = add_piece(s, blocks[i].address - address, MSC__SIM_FREE);
        if (status == MSC_OK)
            status = msc__array_push(s->ctx, &s->pieces, sizeof piece, &piece, s->err);
        address = blocks[i].address + piece.size_bytes;
        ++*placed;
    }
    return status == MSC_OK ? add_piece(s, end - address, MSC__SIM_FREE) : status;
}

static msc_status restore(start *s, const range *memory, uint64_t address)
{
    msc__sim_restored_segment segment = {.address = address,
                                         .place = {memory->stream, memory->pool},
                                         .is_large = memory->is_large,
                                         .block_count = s->pieces.count,
                                         .blocks = s->pieces.items};

    return msc__sim_restore(s->replay->sim, &segment, s->err);
}

/* ---- address space of expandable segments ------------------------------------------------------- */

/* Lowest page that the trace maps for the place of a range, below it and within `space_bytes`. */
static uint64_t lowest_page(const start *s, const range *memory, uint64_t space_bytes)
{
    const msc__history *history = &s->replay->history;
    uint64_t page_bytes = msc__sim_page_bytes(&s->replay->sim_options, memory->is_large);
    uint64_t lowest = memory->address;
    uint32_t i;

    for (i = history->first_event; i < history->event_count; i++) {
        const msc_snapshot_event *event = &history->events[i];
        if (event->action != MSC_SNAPSHOT_ACTION_SEGMENT_MAP || event->address >= lowest ||
            memory->address - event->address >= space_bytes ||
            (memory->address - event->address) % page_bytes != 0 ||
            msc__numbering_stream(&s->replay->numbering, event->stream) != memory->stream ||
            (event->size_bytes % s->replay->sim_options.large_segment_bytes == 0) != memory->is_large)
            continue;
        lowest = event->address;
    }
    MSC__ASSERT(lowest <= memory->address);
    return lowest;
}

static uint64_t space_bytes_of(const start *s, const range *memory)
{
    uint64_t device = s->replay->sim_options.device_total_bytes;
    uint64_t page_bytes = msc__sim_page_bytes(&s->replay->sim_options, memory->is_large);
    uint64_t bytes = device < MOST_SPACE_BYTES ? device + device / 8 : MOST_SPACE_BYTES;

    MSC__ASSERT(page_bytes > 0);
    return (bytes / page_bytes + (bytes % page_bytes != 0)) * page_bytes;
}

/* Restores the ranges from `first` on that share one address space; `*next` is the first that does not. */
static msc_status restore_space(start *s, uint32_t first, uint32_t *next, uint32_t *placed)
{
    const range *ranges = s->ranges.items;
    const range *lowest = &ranges[first];
    uint64_t space = space_bytes_of(s, lowest);
    uint64_t begin = lowest_page(s, lowest, space);
    uint64_t address = begin;
    uint32_t i;
    msc_status status = MSC_OK;

    MSC__ASSERT(first < s->ranges.count && begin <= lowest->address);
    s->pieces.count = 0;
    for (i = first; i < s->ranges.count && status == MSC_OK; i++) {
        if (!is_same_place(lowest, &ranges[i]) || ranges[i].address - begin >= space ||
            ranges[i].bytes > space - (ranges[i].address - begin))
            break;
        status = add_piece(s, ranges[i].address - address, MSC__SIM_UNMAPPED);
        if (status == MSC_OK)
            status = add_range(s, &ranges[i], placed);
        address = ranges[i].address + ranges[i].bytes;
    }
    if (status == MSC_OK && i == first)
        return msc__fail(s->err, MSC_EUNSUPPORTED,
                         "the state at the beginning of the trace cannot be derived: %" PRIu64
                         " bytes at 0x%" PRIx64 " are more than the device has",
                         lowest->bytes, lowest->address);
    if (status == MSC_OK)
        status = add_piece(s, space - (address - begin), MSC__SIM_UNMAPPED);
    *next = i;
    return status == MSC_OK ? restore(s, lowest, begin) : status;
}

/* ---- the whole ---------------------------------------------------------------------------------- */

static msc_status restore_all(start *s)
{
    const range *ranges = s->ranges.items;
    uint32_t placed = 0;
    uint32_t spaces = 0;
    uint32_t i = 0;
    msc_status status = MSC_OK;

    while (i < s->ranges.count && status == MSC_OK) {
        if (s->replay->sim_options.expandable_segments) {
            if (++spaces > MOST_SPACES)
                return msc__fail(s->err, MSC_EUNSUPPORTED, "more than %u expandable segments", MOST_SPACES);
            status = restore_space(s, i, &i, &placed);
            continue;
        }
        s->pieces.count = 0;
        status = add_range(s, &ranges[i], &placed);
        if (status == MSC_OK)
            status = restore(s, &ranges[i], ranges[i].address);
        i++;
    }
    MSC__ASSERT(placed <= s->blocks.count || status != MSC_OK);
    if (status == MSC_EINVAL)
        return msc__fail(
            s->err, MSC_EUNSUPPORTED,
            "the state at the beginning of the trace cannot be derived: it is not one of the allocator");
    if (status == MSC_OK && placed != s->blocks.count)
        return msc__fail(s->err, MSC_EUNSUPPORTED,
                         "the state at the beginning of the trace cannot be derived: of %" PRIu32
                         " blocks in use, %" PRIu32 " lie in no segment",
                         s->blocks.count, s->blocks.count - placed);
    return status;
}

msc_sim_place msc__replay_place(const msc__replay *replay, uint64_t address, uint64_t stream)
{
    uint32_t count;
    const msc_snapshot_segment *segments =
        msc_snapshot_segments(replay->snapshot, replay->history.device, &count);
    msc_sim_place place = {msc__numbering_stream(&replay->numbering, stream), 0};
    uint32_t low = 0;
    uint32_t high = count;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (segments[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    MSC__ASSERT(low <= count && (low == 0 || segments[low - 1].address <= address));
    if (low > 0 && address - segments[low - 1].address < segments[low - 1].total_bytes)
        place.pool = msc__numbering_pool(&replay->numbering, segments[low - 1].pool);
    return place;
}

/* A file made by hand can describe what the allocator never makes, such as a segment of a wrong size. */
static msc_status check_state(const msc__replay *replay)
{
    msc_error found;

    if (msc_sim_validate(replay->sim, &found) == MSC_OK)
        return MSC_OK;
    return msc__fail(
        replay->err, MSC_EUNSUPPORTED,
        "the state at the beginning of the trace cannot be derived: it is not one of the allocator: %s",
        found.message);
}

msc_status msc__replay_start(msc__replay *replay)
{
    start s = {.replay = replay, .ctx = replay->snapshot->ctx, .err = replay->err};
    msc_status status = collect_ranges(&s);

    if (status == MSC_OK)
        status = collect_blocks(&s);
    if (status == MSC_OK && !replay->history.ends_in_blocks && s.ranges.count + s.blocks.count > 0)
        status =
            msc__fail(replay->err, MSC_EUNSUPPORTED,
                      "the state at the beginning of the trace cannot be derived: recording stopped before "
                      "the snapshot was taken");
    if (status == MSC_OK) {
        order(&s);
        status = restore_all(&s);
    }
    if (status == MSC_OK)
        status = check_state(replay);
    replay->result->start_block_count = s.blocks.count;
    msc__array_fini(s.ctx, &s.ranges, sizeof(range));
    msc__array_fini(s.ctx, &s.blocks, sizeof(held));
    msc__array_fini(s.ctx, &s.pieces, sizeof(msc__sim_restored_block));
    msc__array_fini(s.ctx, &s.touched_keys, sizeof(uint64_t));
    msc__hash_index_fini(s.ctx, &s.touched);
    return status;
}
