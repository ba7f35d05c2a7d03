/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls of a program that change a block: put, settle, get, arrive, drop.
 *
 * Each takes the mutex, looks, changes the state of a block, and passes its ticket to a lane or waits for
 * `changed`. Bytes move in the lanes alone.
 */
#include "base/error.h"
#include "base/invariant.h"
#include "offload/offload_engine.h"

#define MOST_BYTES (1ull << 60) /* so that rounding up cannot overflow */

/* The block that a ticket names, if the program has not dropped it. */
static msc__block *find(msc_offload *engine, msc_ticket ticket)
{
    msc__block *block = msc__block_find(engine, ticket);

    return block != NULL && !block->dropped ? block : NULL;
}

static msc_status fail_gone(msc_ticket ticket, msc_error *err)
{
    (void)msc__fail(err, MSC_EINVAL, "no block has ticket %016llx: it was dropped, or never put",
                    (unsigned long long)ticket);
    return MSC_EINVAL;
}

msc_status msc__offload_enter(msc_offload *engine, msc_ticket ticket, msc__block **out, msc_error *err)
{
    if (engine->process != msc__fork_count()) {
        (void)msc__fail(err, MSC_ESTATE,
                        "this engine belongs to the process that this one was forked from: create one here");
        return MSC_ESTATE;
    }
    msc__mutex_lock(&engine->mutex);
    if (out == NULL)
        return MSC_OK;
    *out = find(engine, ticket);
    if (*out != NULL)
        return MSC_OK;
    msc__mutex_unlock(&engine->mutex);
    return fail_gone(ticket, err);
}

/* Somebody asks for a result: nothing is put off any longer. */
static void flush_deferred_wakeups(msc_offload *engine)
{
    msc__lane_wake(&engine->out);
    msc__lane_wake(&engine->in);
}

/* Waits for a change, and finds the block again; NULL where another thread has dropped it meanwhile. */
static msc__block *await_change(msc_offload *engine, msc_ticket ticket)
{
    flush_deferred_wakeups(engine);
    msc__cond_wait(&engine->changed, &engine->mutex);
    return find(engine, ticket);
}

/*
 * Whether the step can be taken for over although blocks of it are held, as by a graph that waits for a backward of its own:
 * nearly all that was put is gone. Or else one such block would let a single step go on, and grow, for ever.
 */
static bool is_over(const msc_offload *engine)
{
    return engine->live_count == 0 ||
           (engine->used_in_step && engine->step_puts.count / 4 > (uint64_t)engine->live_count + 64);
}

/* A place and a record, or nothing. `now`: ETIMEDOUT where the system would have to be asked for room. */
static msc_status make_block(msc_offload *engine, uint64_t bytes, bool now, msc__block **out, msc_error *err)
{
    msc__place place;
    msc_error why; /* whole ones are 500 bytes to clear: a good part of what a put takes */
    msc_status status = msc__place_take(engine, bytes, MSC_TIER_PINNED, MSC_TIER_FILE, now, &place, err);

    if (status != MSC_OK) {
        engine->counters.refused_count += status != MSC_ETIMEDOUT;
        return status;
    }
    *out = msc__block_take(engine, &why);
    if (*out == NULL) {
        msc__place_give(engine, &place, bytes);
        if (err != NULL)
            *err = why;
        return why.status;
    }
    (*out)->place = place;
    (*out)->bytes = bytes;
    return MSC_OK;
}

/* Whether copies have to wait for a stream. The host's default one is the program itself: what it did is done. */
static bool has_to_wait(const msc_offload *engine, const void *stream)
{
    return msc__has_streams(engine) || stream != NULL;
}

static msc_status record(const msc_offload *engine, void *event, void *stream, msc_error *err)
{
    return engine->device->ops->event_record(engine->device, event, stream, err);
}

/* The block waits for its source, and has an ordinal and a ticket in its step; or none of it. */
static msc_status enter_step(msc_offload *engine, msc__block *block, void *stream, msc_error *err)
{
    msc__put mine = {.ticket = msc__block_ticket(block), .group = engine->group};
    msc_status status = MSC_OK;

    block->out_waits = has_to_wait(engine, stream);
    if (block->out_waits)
        status = record(engine, block->events[MSC__OUT_READY], stream, err);
    if (status == MSC_OK)
        status = msc__array_reserve(engine->ctx, &engine->step_puts, sizeof mine, 1, err);
    if (status == MSC_OK)
        status = msc__schedule_put(engine->ctx, &engine->schedule, block->bytes, &block->ordinal, err);
    if (status == MSC_OK)
        status = msc__array_push(engine->ctx, &engine->step_puts, sizeof mine, &mine, err);
    MSC__ASSERT(status != MSC_OK || engine->step_puts.count == engine->schedule.bytes.count);
    MSC__ASSERT(status != MSC_OK || block->ordinal + 1 == engine->step_puts.count);
    return status;
}

/* What is put, and how. */
typedef struct wish {
    const void *source;
    uint64_t bytes;
    void *stream;
    bool now; /* ask the system for nothing */
} wish;

static msc_status put(msc_offload *engine, const wish *what, msc_ticket *out, bool *rouse, msc_error *err)
{
    msc__block *block = NULL;
    msc_status status;

    if (is_over(engine))
        msc__offload_begin_step(engine);
    status = make_block(engine, what->bytes, what->now, &block, err);
    if (status != MSC_OK)
        return status;
    status = enter_step(engine, block, what->stream, err);
    if (status != MSC_OK) {
        msc__block_give(engine, block);
        return status;
    }
    block->source = what->source;
    block->group = engine->group;
    block->allowance = engine->allowance;
    engine->live_count++;
    engine->counters.put_count[block->place.tier]++;
    *out = msc__block_ticket(block);
    *rouse = msc__lane_submit(&engine->out, *out, what->bytes);
    return MSC_OK;
}

static msc_status enter_and_put(msc_offload *engine, const wish *what, msc_ticket *out, msc_error *err)
{
    bool rouse = false;
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "out is NULL");
    *out = 0;
    if (what->source == NULL || what->bytes == 0 || what->bytes > MOST_BYTES)
        return msc__fail(err, MSC_EINVAL, "source is %p and bytes is %llu: there must be something to copy",
                         what->source, (unsigned long long)what->bytes);
    status = msc__offload_enter(engine, 0, NULL, err);
    if (status != MSC_OK)
        return status;
    status = put(engine, what, out, &rouse, err);
    msc__mutex_unlock(&engine->mutex);
    if (rouse)
        msc__lane_rouse(&engine->out);
    return status;
}

msc_status msc_offload_put(msc_offload *engine, const void *source, uint64_t bytes, void *stream,
                           msc_ticket *out, msc_error *err)
{
    wish what = {.source = source, .bytes = bytes, .stream = stream};

    return enter_and_put(engine, &what, out, err);
}

msc_status msc_offload_put_now(msc_offload *engine, const void *source, uint64_t bytes, void *stream,
                               msc_ticket *out, msc_error *err)
{
    wish what = {.source = source, .bytes = bytes, .stream = stream, .now = true};

    return enter_and_put(engine, &what, out, err);
}

/* Why a copy failed. */
static msc_status failure(const msc_offload *engine, const msc__transfer *move, msc_error *err)
{
    MSC__ASSERT(move->failure != MSC_OK);
    if (err != NULL) {
        *err = engine->failure;
        err->status = move->failure;
    }
    return move->failure;
}

static bool out_is_awaited(const msc_offload *engine, const msc__block *block)
{
    return block->out == MSC__OUT_QUEUED || block->out == MSC__OUT_RUNNING ||
           (block->out == MSC__OUT_ISSUED && !msc__has_streams(engine));
}

/* Waits until the block is in its tier, or behind an event that a stream can wait for. NULL: it is gone. */
static msc__block *wait_out(msc_offload *engine, msc__block *block)
{
    msc_ticket ticket = msc__block_ticket(block);
    int64_t begin_ns;
    int64_t end_ns;

    if (!out_is_awaited(engine, block))
        return block;
    begin_ns = msc__clock_ns();
    while (block != NULL && out_is_awaited(engine, block))
        block = await_change(engine, ticket);
    end_ns = msc__clock_ns();
    engine->counters.settle_wait_ns += (uint64_t)(end_ns - begin_ns);
    if (block != NULL)
        msc__trace_add(engine, MSC_OFFLOAD_WAIT_SETTLE, block, begin_ns, end_ns);
    return block;
}

static msc_status settle(msc_offload *engine, msc__block *block, void *stream, msc_error *err)
{
    msc_device *device = engine->device;
    msc_status status = MSC_OK;

    MSC__ASSERT(!out_is_awaited(engine, block));
    if (block->out == MSC__OUT_FAILED)
        status = failure(engine, &block->leaving, err);
    else if (block->out == MSC__OUT_ISSUED)
        status = device->ops->stream_wait(device, stream, block->events[MSC__OUT_DONE], err);
    block->settled = block->settled || status == MSC_OK;
    return status;
}

msc_status msc_offload_settle(msc_offload *engine, msc_ticket ticket, void *stream, msc_error *err)
{
    msc__block *block = NULL;
    msc_status status = msc__offload_enter(engine, ticket, &block, err);

    if (status != MSC_OK)
        return status;
    block = wait_out(engine, block);
    status = block != NULL ? settle(engine, block, stream, err) : fail_gone(ticket, err);
    msc__mutex_unlock(&engine->mutex);
    return status;
}

msc_status msc_offload_settled(msc_offload *engine, msc_ticket ticket, msc_error *err)
{
    msc__block *block = NULL;
    msc_status status = msc__offload_enter(engine, ticket, &block, err);

    if (status != MSC_OK)
        return status;
    if (block->out == MSC__OUT_FAILED)
        status = failure(engine, &block->leaving, err);
    else if (block->out != MSC__OUT_STORED)
        status = MSC_EAGAIN;
    if (status == MSC_EAGAIN)
        flush_deferred_wakeups(engine);
    block->settled = block->settled || status == MSC_OK;
    msc__mutex_unlock(&engine->mutex);
    return status;
}

uint32_t msc_offload_settled_of(msc_offload *engine, const msc_ticket *tickets, uint32_t count)
{
    uint32_t i;

    if (msc__offload_enter(engine, 0, NULL, NULL) != MSC_OK)
        return 0;
    for (i = 0; i < count; i++) {
        msc__block *block = find(engine, tickets[i]);

        if (block == NULL || block->out != MSC__OUT_STORED)
            break;
        block->settled = true;
    }
    if (i < count)
        flush_deferred_wakeups(engine);
    msc__mutex_unlock(&engine->mutex);
    return i;
}

static bool may_get(const msc__block *block)
{
    return block->in == MSC__IN_NONE || block->in == MSC__IN_OVER || block->in == MSC__IN_FAILED ||
           (block->in == MSC__IN_ISSUED && block->arrived);
}

static msc_status get(msc_offload *engine, msc__block *block, void *destination, bool to_host, void *stream,
                      bool *rouse, msc_error *err)
{
    msc_status status = MSC_OK;

    if (block->out == MSC__OUT_FAILED)
        return msc__fail(err, MSC_ESTATE, "the copy out of this block failed: its source is all there is");
    if (!may_get(block))
        return msc__fail(err, MSC_ESTATE, "an earlier get of this block has not arrived");
    block->in_waits = !to_host && has_to_wait(engine, stream);
    if (block->in_waits)
        status = record(engine, block->events[MSC__IN_READY], stream, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(block->out != MSC__OUT_FAILED && may_get(block));
    block->destination = destination;
    block->to_host = to_host;
    block->in = MSC__IN_QUEUED;
    block->arrived = false;
    *rouse = msc__lane_submit(&engine->in, msc__block_ticket(block), block->bytes);
    return MSC_OK;
}

static msc_status enter_and_get(msc_offload *engine, msc_ticket ticket, void *destination, bool to_host,
                                void *stream, msc_error *err)
{
    msc__block *block = NULL;
    bool rouse = false;
    msc_status status;

    if (destination == NULL)
        return msc__fail(err, MSC_EINVAL, "destination is NULL");
    status = msc__offload_enter(engine, ticket, &block, err);
    if (status != MSC_OK)
        return status;
    status = get(engine, block, destination, to_host, stream, &rouse, err);
    msc__mutex_unlock(&engine->mutex);
    if (rouse)
        msc__lane_rouse(&engine->in);
    return status;
}

msc_status msc_offload_get(msc_offload *engine, msc_ticket ticket, void *destination, void *stream,
                           msc_error *err)
{
    return enter_and_get(engine, ticket, destination, false, stream, err);
}

msc_status msc_offload_get_to_host(msc_offload *engine, msc_ticket ticket, void *destination, msc_error *err)
{
    return enter_and_get(engine, ticket, destination, true, NULL, err);
}

static bool in_is_awaited(const msc_offload *engine, const msc__block *block)
{
    return block->in == MSC__IN_QUEUED || block->in == MSC__IN_RUNNING ||
           (block->in == MSC__IN_ISSUED && !msc__has_streams(engine));
}

/* Waits until the block is back, or behind an event that a stream can wait for. NULL: it is gone. */
static msc__block *wait_in(msc_offload *engine, msc__block *block)
{
    msc_ticket ticket = msc__block_ticket(block);
    int64_t begin_ns;
    int64_t end_ns;

    if (!in_is_awaited(engine, block))
        return block;
    begin_ns = msc__clock_ns();
    while (block != NULL && in_is_awaited(engine, block))
        block = await_change(engine, ticket);
    end_ns = msc__clock_ns();
    engine->counters.arrive_wait_ns += (uint64_t)(end_ns - begin_ns);
    if (block != NULL)
        msc__trace_add(engine, MSC_OFFLOAD_WAIT_ARRIVE, block, begin_ns, end_ns);
    return block;
}

/* Where a stream cannot be made to wait, this thread does: the destination is about to be the program's again. */
static msc_status wait_in_stream(const msc_offload *engine, const msc__block *block, void *stream,
                                 msc_error *err)
{
    msc_device *device = engine->device;
    msc_status status = device->ops->stream_wait(device, stream, block->events[MSC__IN_DONE], err);

    if (status != MSC_OK && device->ops->event_wait(device, block->events[MSC__IN_DONE], NULL) != MSC_OK)
        device->ops->stream_finish(device, engine->in.stream);
    return status;
}

static msc_status arrive(msc_offload *engine, msc__block *block, void *stream, msc_error *err)
{
    msc_status status = MSC_OK;

    MSC__ASSERT(!in_is_awaited(engine, block));
    if (block->in == MSC__IN_NONE)
        return msc__fail(err, MSC_ESTATE, "nothing is on its way: get comes before arrive");
    if (block->in == MSC__IN_FAILED)
        status = failure(engine, block->out == MSC__OUT_FAILED ? &block->leaving : &block->returning, err);
    else if (msc__has_streams(engine))
        status = wait_in_stream(engine, block, stream, err);
    block->arrived = block->arrived || status == MSC_OK;
    return status;
}

msc_status msc_offload_arrive(msc_offload *engine, msc_ticket ticket, void *stream, msc_error *err)
{
    msc__block *block = NULL;
    msc_status status = msc__offload_enter(engine, ticket, &block, err);

    if (status != MSC_OK)
        return status;
    block = wait_in(engine, block);
    status = block != NULL ? arrive(engine, block, stream, err) : fail_gone(ticket, err);
    msc__mutex_unlock(&engine->mutex);
    return status;
}

msc_status msc__offload_arrived(msc_offload *engine, msc__block *block, void *stream, msc_error *err)
{
    return in_is_awaited(engine, block) ? MSC_EAGAIN : arrive(engine, block, stream, err);
}

msc_status msc_offload_arrived(msc_offload *engine, msc_ticket ticket, void *stream, msc_error *err)
{
    msc__block *block = NULL;
    msc_status status = msc__offload_enter(engine, ticket, &block, err);

    if (status != MSC_OK)
        return status;
    status = msc__offload_arrived(engine, block, stream, err);
    if (status == MSC_EAGAIN)
        flush_deferred_wakeups(engine);
    msc__mutex_unlock(&engine->mutex);
    return status;
}

/* Whether a lane may still touch memory that the program would free after the drop. */
static bool is_touched(const msc__block *block)
{
    return (block->out_busy && !block->settled) || (block->in_busy && !block->arrived);
}

void msc_offload_drop(msc_offload *engine, msc_ticket ticket)
{
    msc__block *block = NULL;

    if (msc__offload_enter(engine, ticket, &block, NULL) != MSC_OK)
        return;
    if (block->in == MSC__IN_QUEUED)
        block->in = MSC__IN_NONE;
    if (block->out == MSC__OUT_QUEUED)
        block->out = MSC__OUT_FAILED;
    msc__cond_broadcast(&engine->changed); /* lane in may wait for the copy out */
    while (block != NULL && is_touched(block))
        block = await_change(engine, ticket);
    if (block != NULL) {
        msc__window_leave(engine, block);
        block->dropped = true;
        MSC__ASSERT(engine->live_count > 0 && !is_touched(block));
        engine->live_count--;
        msc__block_settle_drop(engine, block);
    }
    msc__mutex_unlock(&engine->mutex);
}

uint64_t msc_offload_bytes_of(msc_offload *engine, msc_ticket ticket)
{
    msc__block *block = NULL;
    uint64_t bytes;

    if (msc__offload_enter(engine, ticket, &block, NULL) != MSC_OK)
        return 0;
    bytes = block->bytes;
    msc__mutex_unlock(&engine->mutex);
    return bytes;
}
