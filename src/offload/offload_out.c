/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lane out: copies from the device into the tiers.
 *
 *      direct    source ──device──► place
 *      staged    source ──device──► buffer ──memcpy or file──► place       a piece of chunk_bytes at a time
 *
 * A piece has two stages, and several pieces are under way: while one is being written the next is being copied
 * from the device. The file gets whole pages, the last one with what is left in the buffer, because what is not
 * aligned would go through the page cache. Every block waits for the program's stream on the lane's stream, once, before its first
 * copy. Where the file fails, the block begins anew in host memory; its source is still there, because nobody
 * reads that it may go before all pieces are in their place.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "offload/offload_engine.h"

static msc__ask claim(msc__lane *lane, msc__block *block)
{
    (void)lane;
    if (block->out != MSC__OUT_QUEUED)
        return MSC__ASK_NOTHING;
    block->out = MSC__OUT_RUNNING;
    block->out_busy = true;
    return MSC__ASK_NOW;
}

static void tell(msc__lane *lane, const msc__report *report)
{
    msc_offload *engine = lane->engine;
    msc__block *block = report->block;

    MSC__ASSERT(block->out_busy && report->state >= MSC__OUT_ISSUED);
    block->out = report->state;
    block->out_busy = block->out == MSC__OUT_ISSUED;
    if (block->out == MSC__OUT_STORED)
        engine->counters.out_bytes[block->place.tier] += block->bytes;
    if (block->out == MSC__OUT_FAILED)
        engine->counters.failed_count++;
    if (block->out != MSC__OUT_ISSUED)
        msc__trace_add(engine, MSC_OFFLOAD_OUT, block, block->leaving.begin_ns, report->when_ns);
    msc__block_settle_drop(engine, block);
}

/* The file failed. True if host memory has room for the block. */
static bool move_to_memory(msc_offload *engine, msc__block *block)
{
    msc__place place;
    bool moved;

    if (block->place.tier != MSC_TIER_FILE)
        return false;
    msc__mutex_lock(&engine->mutex);
    moved =
        msc__place_take(engine, block->bytes, MSC_TIER_PINNED, MSC_TIER_HOST, false, &place, NULL) == MSC_OK;
    if (moved) {
        msc__place_give(engine, &block->place, block->bytes);
        block->place = place;
        MSC__ASSERT(block->place.tier != MSC_TIER_FILE);
        engine->counters.moved_count++;
    }
    msc__mutex_unlock(&engine->mutex);
    return moved;
}

/* A block whose file failed begins anew. */
static void finish(msc__lane *lane, msc__block *block)
{
    MSC__ASSERT(block->leaving.pieces_left == 0);
    if (block->leaving.failure == MSC_OK)
        msc__lane_report(lane, block, MSC__OUT_STORED);
    else if (move_to_memory(lane->engine, block))
        msc__lane_begin(lane, block);
    else
        msc__lane_report(lane, block, MSC__OUT_FAILED);
}

static void sum_up(const msc_offload *engine, msc__block *block, const void *memory, uint64_t bytes)
{
    if (engine->options.debug)
        block->leaving.checksum = msc__checksum(block->leaving.checksum, memory, bytes);
}

/* The device's copy into the buffer is over: the file gets it, or the place in memory has it at once. */
static msc_status pass_on(msc__lane *lane, msc__item *item, msc_error *err)
{
    msc__block *block = item->block;
    const void *buffer = lane->staging[item->staging].memory;

    MSC__ASSERT(item->offset + item->bytes <= block->bytes);
    sum_up(lane->engine, block, buffer, item->bytes);
    if (block->place.tier != MSC_TIER_FILE) {
        memcpy((char *)block->place.slab.memory + item->offset, buffer, (size_t)item->bytes);
        return MSC_OK;
    }
    item->in_file = true;
    return msc__file_write(lane->file, buffer, msc__place_file_bytes(item->bytes),
                           block->place.offset + item->offset, &item->slot, err);
}

/* Waits for the device's copy of an item, and begins what follows it. */
static void advance(msc__lane *lane, msc__item *item)
{
    bool staged = item->staging != MSC_NONE;
    void *event = staged ? lane->staging[item->staging].event : item->block->events[MSC__OUT_DONE];
    msc_error why;
    msc_status status = msc__lane_await(lane, event, &why);

    MSC__ASSERT(!item->copied && !item->in_file);
    item->copied = true;
    if (status == MSC_OK && staged)
        status = pass_on(lane, item, &why);
    else if (status == MSC_OK)
        sum_up(lane->engine, item->block, item->block->place.slab.memory, item->bytes);
    if (status != MSC_OK) {
        item->in_file = false;
        msc__lane_fail(lane, &item->block->leaving, status, &why);
    }
}

/* The first item whose copy from the device has to be waited for, in the order of the stream; NULL: none. */
static msc__item *first_uncopied(msc__lane *lane)
{
    uint32_t i;

    for (i = 0; i < lane->count; i++) {
        msc__item *item = msc__lane_item(lane, i);

        if (!item->copied && (i == 0 || item->staging != MSC_NONE))
            return item;
    }
    return NULL;
}

static bool is_over(const msc__lane *lane, const msc__item *item)
{
    return item->copied && (!item->in_file || msc__file_done(lane->file, item->slot));
}

/*
 * Ends the oldest item. Those behind it go on to the file meanwhile, so that the disk has work, one by one: as soon as
 * the oldest is over its buffer gets the next copy, so that the device has work, too. Nobody waits for a direct one
 * behind it: the lane has to look for new blocks before the stream runs dry.
 */
static void retire(msc__lane *lane)
{
    msc__item *item = msc__lane_item(lane, 0);
    msc__item *next;
    msc_error why;
    msc_status status;

    while (!is_over(lane, item) && (next = first_uncopied(lane)) != NULL)
        advance(lane, next);
    if (item->in_file) {
        msc__lane_tell(lane);
        status = msc__file_wait(lane->file, item->slot, &why);
        if (status != MSC_OK)
            msc__lane_fail(lane, &item->block->leaving, status, &why);
    }
    msc__lane_end_oldest(lane);
}

/* Submits one copy and the event behind it. */
static msc_status copy(msc__lane *lane, void *to, const void *from, uint64_t bytes, void *event,
                       msc_error *err)
{
    msc_device *device = lane->engine->device;
    msc_status status = device->ops->copy(device, to, from, bytes, MSC_COPY_OUT, lane->stream, err);

    if (status != MSC_OK)
        return status;
    status = device->ops->event_record(device, event, lane->stream, err);
    if (status != MSC_OK)
        msc__lane_finish(lane);
    return status;
}

static msc_status copy_whole(msc__lane *lane, msc__block *block, msc_error *err)
{
    msc_status status =
        copy(lane, block->place.slab.memory, block->source, block->bytes, block->events[MSC__OUT_DONE], err);

    if (status == MSC_OK && msc__lane_tells_issue(lane, block))
        msc__lane_report(lane, block, MSC__OUT_ISSUED);
    return status;
}

static msc_status copy_piece(msc__lane *lane, msc__item *item, msc_error *err)
{
    const msc__staging *staging = &lane->staging[item->staging];

    return copy(lane, staging->memory, (const char *)item->block->source + item->offset, item->bytes,
                staging->event, err);
}

const msc__direction msc__direction_out = {
    .claim = claim,
    .copy_whole = copy_whole,
    .copy_piece = copy_piece,
    .retire = retire,
    .finish = finish,
    .tell = tell,
};
