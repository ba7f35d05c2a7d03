/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What both lanes share: their ring, their sleep, their staging buffers and the list of copies under way.
 *
 * A lane is woken only when it sleeps, so a burst of puts costs one system call; and lane out for small blocks only
 * when some have come together or somebody asks for one, or else each of them would cost a system call, which takes
 * longer than its copy. It decides to sleep under the engine's mutex, which submitters hold, and looks at the ring once more
 * there: nothing is submitted unseen.
 *
 * Copies under way are a queue: the streams and the file finish them in about the order in which they began,
 * and looking at the oldest alone keeps the loop simple.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "offload/offload_engine.h"

#define WAKES_COUNT 8u
#define WAKES_BYTES (256u << 10)

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
    status = msc__ring_create(engine->ctx, MSC__OFFLOAD_RING_CAPACITY, &lane->ring, err);
    if (status == MSC_OK)
        status = engine->device->ops->stream_create(engine->device, &lane->stream, err);
    if (status == MSC_OK && engine->staging_slabs != NULL)
        status = init_staging(engine, lane, err);
    return status;
}

msc_status msc__lane_start(msc__lane *lane, const char *name, void *(*run)(void *), msc_error *err)
{
    return msc__thread_start(&lane->thread, name, run, lane, err);
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
    msc__ring_destroy(lane->ring);
    msc__cond_fini(&lane->awake);
}

void msc__lane_wake(msc__lane *lane)
{
    if (lane->asleep && lane->put_off_count > 0)
        msc__cond_signal(&lane->awake);
    lane->put_off_count = 0;
    lane->put_off_bytes = 0;
}

void msc__lane_submit(msc__lane *lane, msc_ticket ticket, uint64_t bytes)
{
    msc_offload *engine = lane->engine;

    lane->full_count++;
    while (msc__ring_push(lane->ring, ticket) == MSC_EAGAIN)
        msc__cond_wait(&engine->changed, &engine->mutex);
    lane->full_count--;
    if (!lane->asleep)
        return;
    if (lane == &engine->in) { /* somebody will wait for it soon */
        msc__cond_signal(&lane->awake);
        return;
    }
    lane->put_off_count++;
    lane->put_off_bytes += bytes;
    if (lane->put_off_count >= WAKES_COUNT || lane->put_off_bytes >= WAKES_BYTES)
        msc__lane_wake(lane);
}

/* The next ticket; 0 where there is none now and `wait` is false, or where the engine ends. */
static msc_ticket next_ticket(msc__lane *lane, bool wait)
{
    msc_offload *engine = lane->engine;
    msc_ticket ticket = 0;

    if (atomic_load(&engine->ending) || msc__ring_pop(lane->ring, &ticket) == MSC_OK || !wait)
        return ticket;
    msc__mutex_lock(&engine->mutex);
    while (!atomic_load(&engine->ending) && msc__ring_pop(lane->ring, &ticket) == MSC_EAGAIN) {
        lane->asleep = true;
        lane->put_off_count = 0;
        lane->put_off_bytes = 0;
        msc__cond_wait(&lane->awake, &engine->mutex);
        lane->asleep = false;
    }
    msc__mutex_unlock(&engine->mutex);
    return ticket;
}

void msc__lane_run(msc__lane *lane, void (*take)(msc__lane *, msc_ticket), void (*retire)(msc__lane *))
{
    for (;;) {
        msc_ticket ticket = next_ticket(lane, lane->count == 0);

        if (ticket != 0)
            take(lane, ticket);
        else if (lane->count > 0)
            retire(lane);
        else
            return;
    }
}

void msc__lane_took(msc__lane *lane)
{
    if (lane->full_count > 0)
        msc__cond_broadcast(&lane->engine->changed);
}

void msc__lane_fail(msc__lane *lane, msc__transfer *move, msc_status status, const msc_error *why)
{
    msc_offload *engine = lane->engine;

    if (move->failure != MSC_OK)
        return;
    move->failure = status;
    msc__mutex_lock(&engine->mutex);
    engine->failure = *why;
    msc__mutex_unlock(&engine->mutex);
}

bool msc__lane_staging(const msc__lane *lane, uint32_t *out)
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

msc__item *msc__lane_oldest(msc__lane *lane)
{
    return lane->count > 0 ? &lane->items[lane->first] : NULL;
}

msc__item *msc__lane_append(msc__lane *lane)
{
    return &lane->items[(lane->first + lane->count++) % MSC__OFFLOAD_ITEMS];
}

void msc__lane_retire_oldest(msc__lane *lane)
{
    lane->first = (lane->first + 1) % MSC__OFFLOAD_ITEMS;
    lane->count--;
}
