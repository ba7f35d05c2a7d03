/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps, and what to fetch ahead of its use.
 *
 * The window is how many blocks may be on their way back, or back and not yet used. It begins with one and
 * grows by one whenever a block was not there when it was used, up to prefetch_count: as deep as the link needs
 * and no deeper, since each block that is back early takes memory on the device.
 *
 * Groups divide the order of uses into parts. The window reaches to the end of the group in use and, as far as that
 * group's allowance goes, into the one behind it:
 *
 *      expected      g g g | h h h | i i
 *                    ^ in use: the others of g as the window allows; of h what the allowance of g has
 *                      left after all that is early; of i nothing
 */
#include "offload/offload_engine.h"

#include "base/invariant.h"

void msc__offload_begin_step(msc_offload *engine)
{
    if (engine->schedule.bytes.count == 0 && engine->schedule.uses.count == 0)
        return;
    if (!engine->used_in_step) {
        msc__schedule_forget(&engine->schedule);
    } else {
        engine->counters.step_count++;
        if (!msc__schedule_step(engine->ctx, &engine->schedule))
            engine->counters.reorder_count++;
    }
    MSC__ASSERT(engine->schedule.bytes.count == 0 && engine->schedule.uses.count == 0);
    engine->step_puts.count = 0;
    engine->used_in_step = false;
}

void msc_offload_group_ahead(msc_offload *engine, uint64_t ahead_bytes)
{
    if (msc__offload_enter(engine, 0, NULL, NULL) != MSC_OK)
        return;
    engine->group++;
    engine->allowance = ahead_bytes;
    msc__mutex_unlock(&engine->mutex);
}

void msc_offload_group(msc_offload *engine)
{
    msc_offload_group_ahead(engine, 0);
}

void msc_offload_step(msc_offload *engine)
{
    if (msc__offload_enter(engine, 0, NULL, NULL) != MSC_OK)
        return;
    msc__offload_begin_step(engine);
    msc__mutex_unlock(&engine->mutex);
}

/* Where a block that was put in this step is noted; NULL: it was put in another one. */
static msc__put *put_of(const msc_offload *engine, const msc__block *block)
{
    msc__put *puts = engine->step_puts.items;

    return block->ordinal < engine->step_puts.count && puts[block->ordinal].ticket == msc__block_ticket(block)
               ? &puts[block->ordinal]
               : NULL;
}

static void note_ahead(const msc_offload *engine, const msc__block *block, bool ahead)
{
    msc__put *put = put_of(engine, block);

    if (put != NULL)
        put->ahead = ahead;
}

void msc__window_leave(msc_offload *engine, msc__block *block)
{
    msc__block *last;

    if (block->ahead_place == MSC_NONE)
        return;
    MSC__ASSERT(block->ahead_place < engine->ahead_count && engine->ahead[block->ahead_place] == block);
    MSC__ASSERT(engine->ahead_bytes >= block->bytes);
    note_ahead(engine, block, false);
    last = engine->ahead[--engine->ahead_count];
    engine->ahead[block->ahead_place] = last;
    last->ahead_place = block->ahead_place;
    block->ahead_place = MSC_NONE;
    engine->ahead_bytes -= block->bytes;
    MSC__ASSERT(engine->ahead_count > 0 || engine->ahead_bytes == 0);
}

static void enter_window(msc_offload *engine, msc__block *block)
{
    MSC__ASSERT(block->ahead_place == MSC_NONE && engine->ahead_count < MSC__OFFLOAD_AHEAD_MOST);
    note_ahead(engine, block, true);
    block->ahead_place = engine->ahead_count;
    engine->ahead[engine->ahead_count++] = block;
    engine->ahead_bytes += block->bytes;
}

static bool is_ahead(const msc__block *block)
{
    return block->ahead_place != MSC_NONE;
}

static bool is_back(msc_offload *engine, const msc__block *block)
{
    const msc_device_ops *ops = engine->device->ops;

    return block->in == MSC__IN_OVER ||
           (block->in == MSC__IN_ISSUED && msc__has_streams(engine) &&
            ops->event_query(engine->device, block->events[MSC__IN_DONE], NULL) == MSC_OK);
}

/* Whether nobody has asked for the block since it was used last. */
static bool is_away(const msc__block *block)
{
    return !is_ahead(block) &&
           (block->in == MSC__IN_NONE || block->in == MSC__IN_OVER || block->in == MSC__IN_FAILED ||
            (block->in == MSC__IN_ISSUED && block->arrived));
}

/* Counts how the block was met. Returns whether it is to be got now. */
static bool meet(msc_offload *engine, msc__block *block)
{
    bool ahead = is_ahead(block);
    bool asked = ahead && block->in != MSC__IN_NONE && block->in != MSC__IN_FAILED;
    bool missed = !asked && (ahead || is_away(block));

    if (missed)
        engine->counters.missed_count++;
    else if (is_back(engine, block))
        engine->counters.prefetched_count++;
    else
        engine->counters.late_count++;
    if ((missed || (ahead && !is_back(engine, block))) && engine->window < engine->options.prefetch_count)
        engine->window++;
    msc__window_leave(engine, block);
    return missed;
}

static msc__block *block_of(msc_offload *engine, const msc__put *put)
{
    msc__block *block = msc__block_find(engine, put->ticket);

    return block != NULL && !block->dropped && block->out != MSC__OUT_FAILED ? block : NULL;
}

/* Bytes that are back, or on their way, before their group is in use. */
static uint64_t early_bytes(const msc_offload *engine, const msc__block *in_use)
{
    uint64_t bytes = 0;
    uint32_t i;

    for (i = 0; i < engine->ahead_count; i++)
        if (engine->ahead[i]->group != in_use->group)
            bytes += engine->ahead[i]->bytes;
    return bytes;
}

static bool is_within(uint64_t taken, uint64_t bytes, uint64_t most)
{
    return taken <= most && bytes <= most - taken;
}

static bool has_room(const msc_offload *engine, const msc__block *block, const msc__block *in_use)
{
    return engine->ahead_count < engine->window && engine->ahead_count < engine->options.prefetch_count &&
           is_within(engine->ahead_bytes, block->bytes, engine->options.prefetch_bytes) &&
           (block->group == in_use->group ||
            is_within(early_bytes(engine, in_use), block->bytes, in_use->allowance));
}

/* The blocks that follow the one in use, as far as the window goes. */
static uint32_t look_ahead(msc_offload *engine, const msc__block *in_use, msc_ticket *soon, uint32_t most)
{
    msc__schedule_walk walk = msc__schedule_ahead(&engine->schedule);
    const msc__put *puts = engine->step_puts.items;
    uint32_t next = in_use->group; /* the group behind it, once there is one */
    uint32_t count = 0;
    uint32_t ahead;

    for (ahead = 0; count < most && ahead < engine->options.prefetch_count; ahead++) {
        uint32_t ordinal = msc__schedule_next(&walk);
        msc__block *block = NULL; /* not looked at where it is ahead: a lane may have its line */

        if (ordinal == MSC_NONE)
            break;
        if (ordinal >= engine->step_puts.count) /* not put yet */
            continue;
        if (!puts[ordinal].ahead && (block = block_of(engine, &puts[ordinal])) == NULL)
            continue;
        if (block == in_use)
            continue;
        if (next == in_use->group)
            next = puts[ordinal].group;
        if (block == NULL || !is_away(block) || (walk.order == NULL && block->in != MSC__IN_NONE))
            continue; /* where nothing was recorded, what has been used is not expected a second time */
        if (block->group != in_use->group && block->group != next)
            break;
        if (!has_room(engine, block, in_use))
            break;
        enter_window(engine, block);
        soon[count++] = msc__block_ticket(block);
    }
    return count;
}

/* The block is met: notes its use, and says what to get. */
static uint32_t use(msc_offload *engine, msc__block *block, bool missed, msc_ticket *soon, uint32_t most)
{
    uint32_t count = 0;

    MSC__ASSERT(!is_ahead(block)); /* it has been met */
    if (missed && most > 0)
        soon[count++] = msc__block_ticket(block);
    engine->used_in_step = true;
    if (put_of(engine, block) != NULL && block->out != MSC__OUT_FAILED)
        msc__schedule_use(engine->ctx, &engine->schedule, block->ordinal);
    return count + look_ahead(engine, block, soon + count, most - count);
}

uint32_t msc_offload_use(msc_offload *engine, msc_ticket ticket, msc_ticket *soon, uint32_t most)
{
    msc__block *block = NULL;
    uint32_t count;

    if (msc__offload_enter(engine, ticket, &block, NULL) != MSC_OK)
        return 0;
    count = use(engine, block, meet(engine, block), soon, most);
    msc__mutex_unlock(&engine->mutex);
    return count;
}

uint32_t msc_offload_use_on(msc_offload *engine, msc_ticket ticket, void *stream, msc_ticket *soon,
                            uint32_t most, uint32_t *here)
{
    msc__block *block = NULL;
    uint32_t count;
    bool missed;

    *here = 0;
    if (msc__offload_enter(engine, ticket, &block, NULL) != MSC_OK)
        return 0;
    missed = meet(engine, block);
    *here = !missed && msc__offload_arrived(engine, block, stream, NULL) == MSC_OK;
    count = use(engine, block, missed, soon, most);
    msc__mutex_unlock(&engine->mutex);
    return count;
}
