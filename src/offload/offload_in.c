/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lane in: copies from the tiers back to the device.
 *
 *      direct    place ──device──► destination
 *      staged    place ──file or memcpy──► buffer ──device──► destination  a piece of chunk_bytes at a time
 *      to host   the same, with memcpy by this thread in place of the device's copy
 *
 * A block is begun when its copy out is in its tier, or, where that copy is on a stream, behind it on ours. Its
 * pieces go to the device in their order, while the file reads the next ones. `in_done` is recorded behind the
 * last of them, and only then may a stream of the program wait for it.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "offload/offload_engine.h"

/*
 * What was begun before is ended before the lane sleeps. A program that got a block, and gets it again while the end of
 * the first copy is still on the stream, waits for that end here.
 */
static msc__ask claim(msc__lane *lane, msc__block *block)
{
    if (block->in != MSC__IN_QUEUED)
        return MSC__ASK_NOTHING;
    if (block->out == MSC__OUT_QUEUED || block->out == MSC__OUT_RUNNING)
        return MSC__ASK_LATER;
    /* A checksum, and what memcpy reads, come with the end of the copy. */
    if (block->out == MSC__OUT_ISSUED && (lane->engine->options.debug || block->to_host))
        return MSC__ASK_LATER;
    if (block->out == MSC__OUT_FAILED) {
        block->in = MSC__IN_FAILED;
        msc__cond_broadcast(&lane->engine->changed);
        return MSC__ASK_NOTHING;
    }
    if (block->returning.pieces_left > 0)
        return MSC__ASK_LATER;
    block->in = MSC__IN_RUNNING;
    block->in_busy = true;
    return MSC__ASK_NOW;
}

/* A block that the program asked for again meanwhile stays queued. */
static void tell(msc__lane *lane, const msc__report *report)
{
    msc_offload *engine = lane->engine;
    msc__block *block = report->block;

    MSC__ASSERT(block->in_busy && report->state >= MSC__IN_ISSUED);
    if (block->in != MSC__IN_QUEUED)
        block->in = report->state;
    block->in_busy = report->state == MSC__IN_ISSUED;
    if (report->state == MSC__IN_OVER)
        engine->counters.in_bytes[block->place.tier] += block->bytes;
    if (report->state == MSC__IN_FAILED)
        engine->counters.lost_count++;
    if (report->state != MSC__IN_ISSUED)
        msc__trace_add(engine, MSC_OFFLOAD_IN, block, block->returning.begin_ns, report->when_ns);
    msc__block_settle_drop(engine, block);
}

static void finish(msc__lane *lane, msc__block *block)
{
    MSC__ASSERT(block->returning.failure != MSC_OK || block->returning.offset == block->bytes);
    msc__lane_report(lane, block, block->returning.failure == MSC_OK ? MSC__IN_OVER : MSC__IN_FAILED);
}

/* The bytes that are about to go to the device, in the order of the block. */
static msc_status check(const msc_offload *engine, msc__block *block, const void *memory, uint64_t bytes,
                        msc_error *err)
{
    if (!engine->options.debug)
        return MSC_OK;
    block->returning.checksum = msc__checksum(block->returning.checksum, memory, bytes);
    if (block->returning.offset + bytes < block->bytes ||
        block->returning.checksum == block->leaving.checksum)
        return MSC_OK;
    return msc__fail(
        err, MSC_EIO, "a block of %llu bytes changed in tier %d: its checksum is %016llx and was %016llx",
        (unsigned long long)block->bytes, (int)block->place.tier,
        (unsigned long long)block->returning.checksum, (unsigned long long)block->leaving.checksum);
}

/* Submits the copy of the block's next `bytes` to the device, and the events behind it. */
static msc_status deliver(msc__lane *lane, msc__block *block, const void *from, uint64_t bytes, void *event,
                          msc_error *err)
{
    msc_device *device = lane->engine->device;
    bool last = block->returning.offset + bytes == block->bytes;
    void *to = (char *)block->destination + block->returning.offset;
    msc_status status = check(lane->engine, block, from, bytes, err);

    MSC__ASSERT(bytes > 0 && block->returning.offset + bytes <= block->bytes);
    if (status == MSC_OK && block->to_host)
        memcpy(to, from, (size_t)bytes);
    else if (status == MSC_OK)
        status = device->ops->copy(device, to, from, bytes, MSC_COPY_IN, lane->stream, err);
    if (status != MSC_OK)
        return status;
    if (event != NULL)
        status = device->ops->event_record(device, event, lane->stream, err);
    if (status == MSC_OK && last)
        status = device->ops->event_record(device, block->events[MSC__IN_DONE], lane->stream, err);
    if (status != MSC_OK) {
        msc__lane_finish(lane);
        return status;
    }
    block->returning.offset += bytes;
    if (last && msc__lane_tells_issue(lane, block))
        msc__lane_report(lane, block, MSC__IN_ISSUED);
    return MSC_OK;
}

/* The item's bytes are in its buffer, or on their way into it from the file. True when they were passed on. */
static bool pass_on(msc__lane *lane, msc__item *item, bool wait)
{
    msc__staging *staging = &lane->staging[item->staging];
    msc_error why;
    msc_status status = MSC_OK;

    if (item->copied)
        return true;
    MSC__ASSERT(item->staging != MSC_NONE && staging->busy);
    if (item->in_file && !wait && !msc__file_done(lane->file, item->slot))
        return false;
    if (item->in_file) {
        msc__lane_tell(lane);
        status = msc__file_wait(lane->file, item->slot, &why);
    }
    item->in_file = false;
    item->copied = true;
    MSC__ASSERT(item->block->returning.failure != MSC_OK || item->offset == item->block->returning.offset);
    if (status == MSC_OK && item->block->returning.failure == MSC_OK)
        status = deliver(lane, item->block, staging->memory, item->bytes, staging->event, &why);
    if (status != MSC_OK)
        msc__lane_fail(lane, &item->block->returning, status, &why);
    return true;
}

/*
 * Waits for the end of an item's copy to the device. A direct one may have begun when the copy out was only on its
 * stream: had that failed, what was copied back is not what the program gave.
 */
static msc_status wait_for(msc__lane *lane, const msc__item *item, msc_error *err)
{
    void *const *events = item->block->events;
    msc_status status;

    if (item->staging != MSC_NONE)
        return msc__lane_await(lane, lane->staging[item->staging].event, err);
    status = msc__lane_await(lane, events[MSC__IN_DONE], err);
    return status == MSC_OK ? msc__lane_await(lane, events[MSC__OUT_DONE], err) : status;
}

/* Passes on what has been read, in the order of the items; waits for the oldest if asked to. */
static void pass_on_those_read(msc__lane *lane, bool wait)
{
    uint32_t i;

    for (i = 0; i < lane->count; i++) {
        msc__item *item = msc__lane_item(lane, i);

        if (item->staging != MSC_NONE && !pass_on(lane, item, wait && i == 0))
            break;
    }
}

/* Waits for the end of the oldest item. What was read meanwhile is passed on before the lane reads more. */
static void retire(msc__lane *lane)
{
    msc__item *item = msc__lane_item(lane, 0);
    msc_error why;
    msc_status status;

    pass_on_those_read(lane, true);
    status = wait_for(lane, item, &why);
    if (status != MSC_OK)
        msc__lane_fail(lane, &item->block->returning, status, &why);
    msc__lane_end_oldest(lane);
    pass_on_those_read(lane, false);
}

static msc_status copy_whole(msc__lane *lane, msc__block *block, msc_error *err)
{
    const msc_device_ops *ops = lane->engine->device->ops;
    msc_status status =
        ops->stream_wait(lane->engine->device, lane->stream, block->events[MSC__OUT_DONE], err);

    return status == MSC_OK ? deliver(lane, block, block->place.slab.memory, block->bytes, NULL, err)
                            : status;
}

/* The buffer gets the piece from its place; it goes on to the device in `pass_on`. */
static msc_status copy_piece(msc__lane *lane, msc__item *item, msc_error *err)
{
    const msc__place *place = &item->block->place;
    void *buffer = lane->staging[item->staging].memory;

    if (place->tier != MSC_TIER_FILE) {
        memcpy(buffer, (const char *)place->slab.memory + item->offset, (size_t)item->bytes);
        return MSC_OK;
    }
    item->in_file = true;
    return msc__file_read(lane->file, buffer, msc__place_file_bytes(item->bytes),
                          place->offset + item->offset, &item->slot, err);
}

const msc__direction msc__direction_in = {
    .claim = claim,
    .copy_whole = copy_whole,
    .copy_piece = copy_piece,
    .retire = retire,
    .finish = finish,
    .tell = tell,
};
