/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What both lanes share: their queue, their sleep, their staging buffers, the list of copies under way, and how a block is
 * begun piece by piece. What is copied from where, and what the end of a copy means, is the direction's
 * (offload_out.c, offload_in.c).
 *
 * A lane is woken only when it sleeps, so a burst of puts costs one system call; and lane out for small blocks only
 * when some have come together or somebody asks for one, or else each of them would cost a system call, which takes
 * longer than its copy. It is woken when the mutex is free: a lane that wakes to a mutex that is held costs each side one
 * more system call. Lane in sleeps on while more blocks are ahead of the program than wait for it. A lane decides to
 * sleep under the engine's mutex, which submitters hold, and looks at the queue once more there: nothing is
 * submitted unseen.
 *
 * Copies under way are a queue: the streams and the file finish them in about the order in which they began,
 * and looking at the oldest alone keeps the loop simple.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "offload/offload_engine.h"

#define WAKES_COUNT 16u
#define WAKES_BYTES (256u << 10)
#define BATCH_BYTES (256u << 10) /* what is taken cannot be dropped any more before it was copied */
#define SMALL_BYTES (BATCH_BYTES / MSC__OFFLOAD_BATCH)

static msc_status init_staging(msc_offload *engine, msc__lane *lane, msc_error *err)
{
    uint32_t count = engine->options.staging_count;
    uint32_t i;

    lane->staging = msc__alloc(engine->ctx, count * sizeof *lane->staging);
    if (lane->staging == NULL)
        return msc__fail_memory(err, "staging buffers", count * sizeof *lane->staging);
    for (i = 0; i < count; i++) {
        msc__staging *staging = &lane->staging[i];
        msc_status status =
            msc__slabs_take(engine->staging_slabs, engine->options.chunk_bytes, &staging->slab, err);

        if (status == MSC_OK)
            status = engine->device->ops->event_create(engine->device, &staging->event, err);
        if (status == MSC_EAGAIN)
            return msc__fail(err, MSC_EINTERNAL, "the staging slab has no room for %u buffers", count);
        if (status != MSC_OK)
            return status;
        staging->memory = staging->slab.memory;
    }
    return MSC_OK;
}

msc_status msc__lane_init(msc_offload *engine, msc__lane *lane, msc_error *err)
{
    msc_status status;

    lane->engine = engine;
    status = msc__cond_init(&lane->awake, err);
    if (status != MSC_OK)
        return status;
    lane->ready = true;
    status = engine->device->ops->stream_create(engine->device, &lane->stream, err);
    if (status == MSC_OK && engine->staging_slabs != NULL)
        status = init_staging(engine, lane, err);
    return status;
}

void msc__lane_fini(msc__lane *lane)
{
    msc_offload *engine = lane->engine;
    uint32_t i;

    if (!lane->ready)
        return;
    if (lane->stream != NULL)
        engine->device->ops->stream_destroy(engine->device, lane->stream);
    for (i = 0; lane->staging != NULL && i < engine->options.staging_count; i++)
        if (lane->staging[i].event != NULL)
            engine->device->ops->event_destroy(engine->device, lane->staging[i].event);
    msc__free(engine->ctx, lane->staging, engine->options.staging_count * sizeof *lane->staging);
    msc__cond_fini(&lane->awake);
}

/* ---- the queue: the mutex is held --------------------------------------------------------------- */

/* Relaxed: stores are under the mutex, and who has no mutex looks again with it before it counts on the answer. */
static uint32_t queued(const msc__lane *lane)
{
    return atomic_load_explicit(&lane->queued, memory_order_relaxed);
}

static bool push(msc__lane *lane, msc_ticket ticket)
{
    uint32_t count = queued(lane);

    MSC__ASSERT(ticket != 0 && count <= MSC__OFFLOAD_QUEUE);
    if (count == MSC__OFFLOAD_QUEUE)
        return false;
    lane->queue[(lane->queue_first + count) % MSC__OFFLOAD_QUEUE] = ticket;
    atomic_store_explicit(&lane->queued, count + 1, memory_order_relaxed);
    return true;
}

static bool pop(msc__lane *lane, msc_ticket *out)
{
    uint32_t count = queued(lane);

    MSC__ASSERT(count <= MSC__OFFLOAD_QUEUE && lane->queue_first < MSC__OFFLOAD_QUEUE);
    if (count == 0)
        return false;
    *out = lane->queue[lane->queue_first];
    lane->queue_first = (lane->queue_first + 1) % MSC__OFFLOAD_QUEUE;
    atomic_store_explicit(&lane->queued, count - 1, memory_order_relaxed);
    return true;
}

/* ---- sleep -------------------------------------------------------------------------------------- */

/* Nothing is put off any more. Returns whether something was, and the lane sleeps. */
static bool end_putting_off(msc__lane *lane)
{
    bool sleeps_on = lane->asleep && lane->put_off_count > 0;

    lane->put_off_count = 0;
    lane->put_off_bytes = 0;
    return sleeps_on;
}

void msc__lane_wake(msc__lane *lane)
{
    if (end_putting_off(lane))
        msc__cond_signal(&lane->awake);
}

void msc__lane_rouse(msc__lane *lane)
{
    msc__cond_signal(&lane->awake);
}

/* Whether what was put off may go on waiting. */
static bool can_wait(const msc__lane *lane)
{
    const msc_offload *engine = lane->engine;

    if (lane->put_off_count >= WAKES_COUNT || lane->put_off_bytes >= WAKES_BYTES)
        return false;
    return lane == &engine->out || 2 * lane->put_off_count <= engine->ahead_count;
}

bool msc__lane_submit(msc__lane *lane, msc_ticket ticket, uint64_t bytes)
{
    msc_offload *engine = lane->engine;

    lane->full_count++;
    while (!push(lane, ticket))
        msc__cond_wait(&engine->changed, &engine->mutex);
    lane->full_count--;
    if (!lane->asleep)
        return false;
    lane->put_off_count++;
    lane->put_off_bytes += bytes;
    return !can_wait(lane) && end_putting_off(lane);
}

/* ---- what is to be reported ---------------------------------------------------------------------- */

/* The mutex is held. */
static void tell(msc__lane *lane)
{
    uint32_t i;

    for (i = 0; i < lane->report_count; i++)
        lane->direction->tell(lane, &lane->reports[i]);
    if (lane->report_count > 0)
        msc__cond_broadcast(&lane->engine->changed);
    lane->report_count = 0;
}

void msc__lane_tell(msc__lane *lane)
{
    if (lane->report_count == 0)
        return;
    msc__mutex_lock(&lane->engine->mutex);
    tell(lane);
    msc__mutex_unlock(&lane->engine->mutex);
}

void msc__lane_report(msc__lane *lane, msc__block *block, uint32_t state)
{
    bool small = block->bytes <= SMALL_BYTES; /* once it is reported the block may be another one */

    MSC__ASSERT(lane->report_count < MSC__OFFLOAD_BATCH);
    lane->reports[lane->report_count++] =
        (msc__report){.block = block, .state = state, .when_ns = msc__trace_now(lane->engine)};
    if (!small || lane->report_count == MSC__OFFLOAD_BATCH)
        msc__lane_tell(lane);
}

bool msc__lane_tells_issue(const msc__lane *lane, const msc__block *block)
{
    return block->bytes > SMALL_BYTES || msc__has_streams(lane->engine);
}

msc_status msc__lane_await(msc__lane *lane, void *event, msc_error *err)
{
    msc_device *device = lane->engine->device;
    msc_status status = lane->report_count > 0 ? device->ops->event_query(device, event, err) : MSC_EAGAIN;

    if (status == MSC_OK)
        return status;
    msc__lane_tell(lane);
    status = device->ops->event_wait(device, event, err);
    if (status != MSC_OK)
        msc__lane_finish(lane);
    return status;
}

void msc__lane_finish(msc__lane *lane)
{
    lane->engine->device->ops->stream_finish(lane->engine->device, lane->stream);
}

/* ---- the thread --------------------------------------------------------------------------------- */

/* The ticket that is next, out of the queue; false: there is none. */
static bool find_next(msc__lane *lane)
{
    if (lane->next != 0)
        return true;
    if (!pop(lane, &lane->next))
        return false;
    if (lane->full_count > 0)
        msc__cond_broadcast(&lane->engine->changed);
    return true;
}

/* Takes blocks that can be begun now, in their order. The mutex is held. */
static uint32_t claim(msc__lane *lane, msc__block **out)
{
    msc_offload *engine = lane->engine;
    uint64_t bytes = 0;
    uint32_t count = 0;

    while (count < MSC__OFFLOAD_BATCH && bytes < BATCH_BYTES && !atomic_load(&engine->ending) &&
           find_next(lane)) {
        msc__block *block = msc__block_find(engine, lane->next);
        msc__ask asked = block != NULL ? lane->direction->claim(lane, block) : MSC__ASK_NOTHING;

        if (asked == MSC__ASK_LATER)
            break;
        lane->next = 0;
        if (asked == MSC__ASK_NOTHING)
            continue;
        bytes += block->bytes;
        out[count++] = block;
    }
    return count;
}

/* Waits for something to take, or for what the next block waits for, which may be put off. The mutex is held. */
static void sleep_on(msc__lane *lane)
{
    msc_offload *engine = lane->engine;

    /* Nothing is left to begin or to end, and everything is reported. */
    MSC__ASSERT(lane->count == 0 && lane->report_count == 0 && (lane->next != 0 || queued(lane) == 0));
    if (lane->next != 0) {
        msc__lane_wake(&engine->out);
        msc__cond_wait(&engine->changed, &engine->mutex);
        return;
    }
    lane->asleep = true;
    lane->put_off_count = 0;
    lane->put_off_bytes = 0;
    msc__cond_wait(&lane->awake, &engine->mutex);
    lane->asleep = false;
}

/* Blocks to begin. None: there are copies under way to be ended first, or the engine ends. */
static uint32_t take(msc__lane *lane, msc__block **out)
{
    msc_offload *engine = lane->engine;
    uint32_t count;

    if (lane->count > 0 && lane->next == 0 && queued(lane) == 0)
        return 0;
    msc__mutex_lock(&engine->mutex);
    tell(lane);
    while ((count = claim(lane, out)) == 0 && lane->count == 0 && !atomic_load(&engine->ending))
        sleep_on(lane);
    msc__mutex_unlock(&engine->mutex);
    return count;
}

static void begin(msc__lane *lane, msc__block *block)
{
    if (block->bytes > SMALL_BYTES)
        msc__lane_tell(lane);
    msc__lane_begin(lane, block);
}

static void retire(msc__lane *lane)
{
    MSC__ASSERT(lane->count > 0);
    if (msc__lane_item(lane, 0)->bytes > SMALL_BYTES)
        msc__lane_tell(lane);
    lane->direction->retire(lane);
}

static void *run(void *argument)
{
    msc__lane *lane = argument;
    msc__block *blocks[MSC__OFFLOAD_BATCH];
    uint32_t count;
    uint32_t i;

    while ((count = take(lane, blocks)) > 0 || lane->count > 0) {
        for (i = 0; i < count; i++)
            begin(lane, blocks[i]);
        if (count == 0)
            retire(lane);
    }
    return NULL;
}

msc_status msc__lane_start(msc__lane *lane, const msc__direction *direction, const char *name, msc_error *err)
{
    lane->direction = direction;
    return msc__thread_start(&lane->thread, name, run, lane, err);
}

/* ---- copies under way --------------------------------------------------------------------------- */

void msc__lane_fail(msc__lane *lane, msc__transfer *move, msc_status status, const msc_error *why)
{
    msc_offload *engine = lane->engine;

    MSC__ASSERT(status != MSC_OK);
    if (move->failure != MSC_OK)
        return;
    move->failure = status;
    msc__mutex_lock(&engine->mutex);
    engine->failure = *why;
    msc__mutex_unlock(&engine->mutex);
}

/* A staging buffer that no item has. */
static bool find_staging(const msc__lane *lane, uint32_t *out)
{
    uint32_t i;

    for (i = 0; i < lane->engine->options.staging_count; i++) {
        if (!lane->staging[i].busy) {
            *out = i;
            return true;
        }
    }
    return false;
}

static bool is_out(const msc__lane *lane)
{
    return lane == &lane->engine->out;
}

/* The half of a block that is this lane's. */
static msc__transfer *transfer_of(const msc__lane *lane, msc__block *block)
{
    return is_out(lane) ? &block->leaving : &block->returning;
}

static void append(msc__lane *lane, msc__item item)
{
    MSC__ASSERT(lane->count < MSC__OFFLOAD_ITEMS && item.bytes > 0);
    MSC__ASSERT(item.offset + item.bytes <= item.block->bytes);
    MSC__ASSERT(item.staging == MSC_NONE || lane->staging[item.staging].busy);
    transfer_of(lane, item.block)->pieces_left++;
    *msc__lane_item(lane, lane->count++) = item;
}

static void end_piece(msc__lane *lane, msc__block *block)
{
    MSC__ASSERT(transfer_of(lane, block)->pieces_left > 0);
    if (--transfer_of(lane, block)->pieces_left == 0)
        lane->direction->finish(lane, block);
}

void msc__lane_end_oldest(msc__lane *lane)
{
    const msc__item *item = msc__lane_item(lane, 0);
    msc__block *block = item->block;

    MSC__ASSERT(lane->count > 0 && (item->staging == MSC_NONE || lane->staging[item->staging].busy));
    if (item->staging != MSC_NONE)
        lane->staging[item->staging].busy = false;
    lane->first = (lane->first + 1) % MSC__OFFLOAD_ITEMS;
    lane->count--;
    end_piece(lane, block);
}

static msc_status begin_whole(msc__lane *lane, msc__block *block, msc_error *err)
{
    msc_status status;

    while (lane->count == MSC__OFFLOAD_ITEMS)
        lane->direction->retire(lane);
    status = lane->direction->copy_whole(lane, block, err);
    if (status == MSC_OK)
        append(lane, (msc__item){.block = block, .bytes = block->bytes, .staging = MSC_NONE});
    return status;
}

static msc_status begin_pieces(msc__lane *lane, msc__block *block, msc_error *err)
{
    const msc__transfer *move = transfer_of(lane, block);
    uint64_t chunk = lane->engine->options.chunk_bytes;
    uint64_t offset;

    for (offset = 0; offset < block->bytes && move->failure == MSC_OK; offset += chunk) {
        uint64_t rest = block->bytes - offset;
        msc__item item = {.block = block, .offset = offset, .bytes = rest < chunk ? rest : chunk};
        msc_status status;

        while (lane->count == MSC__OFFLOAD_ITEMS || !find_staging(lane, &item.staging))
            lane->direction->retire(lane);
        status = lane->direction->copy_piece(lane, &item, err);
        if (status != MSC_OK)
            return status;
        lane->staging[item.staging].busy = true;
        append(lane, item);
    }
    return MSC_OK;
}

/* Beginning counts as a piece, so that the block is not over before all its pieces have begun. */
void msc__lane_begin(msc__lane *lane, msc__block *block)
{
    msc_offload *engine = lane->engine;
    msc__transfer *move = transfer_of(lane, block);
    bool waits = is_out(lane) ? block->out_waits : block->in_waits;
    void *ready = block->events[is_out(lane) ? MSC__OUT_READY : MSC__IN_READY];
    msc_error why;
    msc_status status = MSC_OK;

    MSC__ASSERT(move->pieces_left == 0);
    MSC__ASSERT(is_out(lane) ? block->out_busy : block->in_busy);
    *move = (msc__transfer){.pieces_left = 1, .begin_ns = msc__trace_now(engine), .failure = MSC_OK};
    if (waits)
        status = engine->device->ops->stream_wait(engine->device, lane->stream, ready, &why);
    if (status == MSC_OK)
        status = msc__place_is_direct(engine, &block->place) ? begin_whole(lane, block, &why)
                                                             : begin_pieces(lane, block, &why);
    if (status != MSC_OK)
        msc__lane_fail(lane, move, status, &why);
    end_piece(lane, block);
}
