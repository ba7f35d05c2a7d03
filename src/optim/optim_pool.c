/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threads of an optimizer.
 *
 *     caller   lock call ── open a round, wake ── takes chunks … ── close ── wait for busy 0 ── unlock call
 *     worker                 └── busy + 1 ── takes chunks … ── busy - 1 ──┘   sleep
 *     worker                          └── (comes when the round is closed: goes back to sleep)
 *
 * Threads take chunks of items until none is left. So a worker that the system wakes late, because its core has other
 * things to do, delays nobody: the caller has done its share, and does not wait for who has not begun. A job lives as long
 * as its call; only workers that joined while the round was open look at it.
 *
 * On a machine with several memory nodes a thread takes what lies on its own first (optim_shares.h). Threads are not bound to
 * cores: that is the program's to decide, and PyTorch's threads are not ours.
 *
 * Where PyTorch has a team of threads (base/team.h), that takes the chunks, and there are no workers.
 *
 * A child of fork has none of its parent's threads, and the parent's locks may be taken for ever. There a call does
 * everything by itself and touches no lock.
 */
#include "optim/optim_pool.h"

#include <fenv.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"

/* A thread's share: so many chunks that the last ones of all threads end at about the same time. */
#define CHUNKS_EACH 128u

#define NODES "/sys/devices/system/node"

/*
 * Rounding and what becomes of denormal numbers are settings of a thread (torch.set_flush_denormal changes the
 * caller's), and which thread does what is chance: all compute with the defaults.
 */
static void do_plainly(msc__pool_work work, void *job, uint64_t begin, uint64_t end)
{
    fenv_t found;

    MSC__ASSERT(begin <= end);
    (void)fegetenv(&found);
    (void)fesetenv(FE_DFL_ENV);
    work(job, begin, end);
    (void)fesetenv(&found);
}

static void take_chunks(msc__pool *pool)
{
    uint64_t begin;
    uint64_t end;

    /* The node anew for each chunk: the system may have moved the thread. */
    while (msc__shares_take(&pool->shares, msc__nodes_here(&pool->nodes), &begin, &end))
        do_plainly(pool->work, pool->job, begin, end);
}

static void run_member(void *argument)
{
    take_chunks(argument);
}

static void *run_worker(void *argument)
{
    msc__pool *pool = argument;
    uint64_t seen_round = 0;

    msc__mutex_lock(&pool->mutex);
    for (;;) {
        while (!pool->ending && (!pool->open || seen_round == pool->round))
            msc__cond_wait(&pool->begun, &pool->mutex);
        if (pool->ending)
            break;
        seen_round = pool->round;
        pool->busy++;
        msc__mutex_unlock(&pool->mutex);
        take_chunks(pool); /* what describes the round does not change while somebody is busy */
        msc__mutex_lock(&pool->mutex);
        MSC__ASSERT(pool->busy > 0 && pool->busy <= pool->worker_count);
        pool->busy--;
        if (pool->busy == 0)
            msc__cond_signal(&pool->done);
    }
    msc__mutex_unlock(&pool->mutex);
    return NULL;
}

static msc_status init_locks(msc__pool *pool, msc_error *err)
{
    msc_status status = msc__mutex_init(&pool->call, err);

    if (status != MSC_OK)
        return status;
    status = msc__mutex_init(&pool->mutex, err);
    if (status != MSC_OK)
        goto no_mutex;
    status = msc__cond_init(&pool->begun, err);
    if (status != MSC_OK)
        goto no_begun;
    status = msc__cond_init(&pool->done, err);
    if (status != MSC_OK)
        goto no_done;
    pool->locks = true;
    return MSC_OK;

no_done:
    msc__cond_fini(&pool->begun);
no_begun:
    msc__mutex_fini(&pool->mutex);
no_mutex:
    msc__mutex_fini(&pool->call);
    return status;
}

msc_status msc__pool_init(msc__pool *pool, msc_context *ctx, uint32_t thread_count, msc_error *err)
{
    size_t bytes = (thread_count - 1) * sizeof *pool->workers;
    msc_status status;
    uint32_t i;

    MSC__ASSERT(thread_count >= 1 && thread_count <= MSC__POOL_MOST);
    pool->ctx = ctx;
    pool->thread_count = thread_count;
    pool->process = msc__fork_count();
    msc__nodes_read(&pool->nodes, NODES);
    status = init_locks(pool, err);
    if (status != MSC_OK || thread_count == 1)
        return status;
    pool->team = msc__team_find();
    if (pool->team.run != NULL)
        return MSC_OK;
    pool->workers = msc__alloc(ctx, bytes);
    if (pool->workers == NULL)
        return msc__fail_memory(err, "the threads of an optimizer", bytes);
    for (i = 0; i < thread_count - 1; i++) {
        status = msc__thread_start(&pool->workers[i], "memscale-optim", run_worker, pool, err);
        if (status != MSC_OK)
            return status;
        pool->worker_count++;
    }
    return MSC_OK;
}

static void end_workers(msc__pool *pool)
{
    uint32_t i;

    msc__mutex_lock(&pool->mutex);
    pool->ending = true;
    msc__cond_broadcast(&pool->begun);
    msc__mutex_unlock(&pool->mutex);
    for (i = 0; i < pool->worker_count; i++)
        msc__thread_join(&pool->workers[i]);
    msc__cond_fini(&pool->done);
    msc__cond_fini(&pool->begun);
    msc__mutex_fini(&pool->mutex);
    msc__mutex_fini(&pool->call);
}

void msc__pool_fini(msc__pool *pool)
{
    if (pool->locks && pool->process == msc__fork_count())
        end_workers(pool);
    msc__free(pool->ctx, pool->workers, (pool->thread_count - 1) * sizeof *pool->workers);
    msc__team_leave(&pool->team);
}

static void run_with_workers(msc__pool *pool)
{
    msc__mutex_lock(&pool->mutex);
    MSC__ASSERT(!pool->open && pool->busy == 0 && !pool->ending);
    pool->open = true;
    pool->round++;
    msc__cond_broadcast(&pool->begun);
    msc__mutex_unlock(&pool->mutex);

    take_chunks(pool);

    msc__mutex_lock(&pool->mutex);
    pool->open = false;
    while (pool->busy > 0)
        msc__cond_wait(&pool->done, &pool->mutex);
    msc__mutex_unlock(&pool->mutex);
}

/* Workers look at what is set here only after `run_with_workers` has opened the round, and not after it has closed it. */
static void share(msc__pool *pool, uint64_t items, uint64_t chunk, msc__pool_work work,
                  msc__shares_where where, void *job)
{
    MSC__ASSERT(pool->thread_count > 1 && chunk > 0 && chunk < items);
    msc__mutex_lock(&pool->call);
    pool->work = work;
    pool->job = job;
    msc__shares_begin(&pool->shares, &pool->nodes, items, chunk, where, job);
    if (pool->team.run != NULL)
        pool->team.run(run_member, pool, pool->thread_count, 0);
    else
        run_with_workers(pool);
    msc__mutex_unlock(&pool->call);
}

void msc__pool_run(msc__pool *pool, uint64_t items, uint64_t grain, msc__pool_work work,
                   msc__shares_where where, void *job)
{
    uint64_t chunk = items / ((uint64_t)pool->thread_count * CHUNKS_EACH);

    if (chunk < grain)
        chunk = grain;
    if (pool->thread_count == 1 || chunk >= items || pool->process != msc__fork_count())
        do_plainly(work, job, 0, items);
    else
        share(pool, items, chunk, work, where, job);
}
