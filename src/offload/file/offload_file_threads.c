/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes moved by threads: they take operations from a queue in the order in which they were begun, and each does
 * one at a time with pread and pwrite. A disk wants several in flight, so there are several threads.
 *
 * One mutex over the queue and over `over` of the slots. A worker holds it only to take and to end an operation;
 * the fields of a slot in between are its own.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/thread.h"
#include "offload/file/offload_file_internal.h"

/* Eight operations of 1 MiB keep any disk busy that a machine has one of; more threads only cost. */
#define WORKERS_MOST 8u

typedef struct workers {
    msc__mutex mutex;
    msc__cond queued; /* an operation is in the queue, or it is the end */
    msc__cond ended;  /* an operation is over */
    bool ending;
    uint32_t first;   /* in `queue` */
    uint32_t count;   /* in `queue` */
    uint32_t started; /* how much of this object there is, for `destroy`: threads that run */
    uint32_t ready;   /* mutex, then the two conditions */
    uint32_t queue[MSC__FILE_DEPTH_MOST]; /* slots */
    msc__thread threads[WORKERS_MOST];
} workers;

static void *work(void *argument)
{
    msc__file *file = argument;
    workers *all = file->mover_state;

    msc__mutex_lock(&all->mutex);
    for (;;) {
        uint32_t slot;

        while (all->count == 0 && !all->ending)
            msc__cond_wait(&all->queued, &all->mutex);
        if (all->count == 0)
            break;
        slot = all->queue[all->first];
        all->first = (all->first + 1) % file->depth;
        all->count--;
        msc__mutex_unlock(&all->mutex);
        msc__file_run(file, &file->slots[slot]);
        msc__mutex_lock(&all->mutex);
        MSC__ASSERT(file->slots[slot].left == 0 || file->slots[slot].number != 0);
        file->slots[slot].over = true;
        msc__cond_broadcast(&all->ended);
    }
    msc__mutex_unlock(&all->mutex);
    return NULL;
}

static void threads_destroy(msc__file *file)
{
    workers *all = file->mover_state;
    uint32_t i;

    if (all->started > 0) {
        msc__mutex_lock(&all->mutex);
        all->ending = true;
        msc__cond_broadcast(&all->queued);
        msc__mutex_unlock(&all->mutex);
    }
    for (i = 0; i < all->started; i++)
        msc__thread_join(&all->threads[i]);
    if (all->ready > 2)
        msc__cond_fini(&all->ended);
    if (all->ready > 1)
        msc__cond_fini(&all->queued);
    if (all->ready > 0)
        msc__mutex_fini(&all->mutex);
    msc__free(file->body->ctx, all, sizeof *all);
    file->mover_state = NULL;
}

static msc_status init_locks(workers *all, msc_error *err)
{
    msc_status status = msc__mutex_init(&all->mutex, err);

    if (status != MSC_OK)
        return status;
    all->ready = 1;
    status = msc__cond_init(&all->queued, err);
    if (status != MSC_OK)
        return status;
    all->ready = 2;
    status = msc__cond_init(&all->ended, err);
    if (status == MSC_OK)
        all->ready = 3;
    return status;
}

static msc_status threads_create(msc__file *file, msc_error *err)
{
    uint32_t count = file->depth < WORKERS_MOST ? file->depth : WORKERS_MOST;
    workers *all = msc__alloc(file->body->ctx, sizeof *all);
    msc_status status;

    if (all == NULL)
        return msc__fail_memory(err, "threads", sizeof *all);
    file->mover_state = all;
    status = init_locks(all, err);
    while (status == MSC_OK && all->started < count) {
        status = msc__thread_start(&all->threads[all->started], "memscale-file", work, file, err);
        if (status == MSC_OK)
            all->started++;
    }
    if (status != MSC_OK)
        threads_destroy(file);
    return status;
}

static void threads_begin(msc__file *file, uint32_t slot)
{
    workers *all = file->mover_state;

    msc__mutex_lock(&all->mutex);
    MSC__ASSERT(all->count < file->depth && file->slots[slot].taken && !file->slots[slot].over);
    all->queue[(all->first + all->count) % file->depth] = slot;
    all->count++;
    msc__cond_signal(&all->queued);
    msc__mutex_unlock(&all->mutex);
}

static bool threads_is_over(msc__file *file, uint32_t slot)
{
    workers *all = file->mover_state;
    bool over;

    msc__mutex_lock(&all->mutex);
    over = file->slots[slot].over;
    msc__mutex_unlock(&all->mutex);
    return over;
}

static void threads_wait(msc__file *file, uint32_t slot)
{
    workers *all = file->mover_state;

    msc__mutex_lock(&all->mutex);
    while (!file->slots[slot].over)
        msc__cond_wait(&all->ended, &all->mutex);
    msc__mutex_unlock(&all->mutex);
}

const msc__file_mover msc__file_threads = {
    .create = threads_create,
    .destroy = threads_destroy,
    .begin = threads_begin,
    .is_over = threads_is_over,
    .wait = threads_wait,
};
