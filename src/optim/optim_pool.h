/* SPDX-License-Identifier: Apache-2.0 */
/** @file optim_pool.h  Threads that share the items of one call at a time. */
#ifndef MSC_OPTIM_POOL_H
#define MSC_OPTIM_POOL_H

#include "base/team.h"
#include "base/thread.h"
#include "memscale/base.h"
#include "optim/optim_nodes.h"
#include "optim/optim_shares.h"

#define MSC__POOL_MOST 256u

/** Does items [begin, end) of a job. */
typedef void (*msc__pool_work)(void *job, uint64_t begin, uint64_t end);

typedef struct msc__pool msc__pool;

struct msc__pool {
    msc_context *ctx;
    uint32_t thread_count; /* the caller's among them */
    uint32_t process;      /* `msc__fork_count` where the threads are */
    msc__team team;        /* instead of workers, if there is one */
    msc__mutex call;       /* one call at a time */
    msc__mutex mutex;      /* guards what follows, but `shares` and `nodes` */
    msc__cond begun;
    msc__cond done;
    uint64_t round;      /* rises when there is something to do */
    bool open;           /* workers may join the round */
    bool ending;         /* set once, by `fini` */
    uint32_t busy;       /* workers in the round */
    msc__pool_work work; /* this and the next two change before a round only; who joins one holds the mutex */
    void *job;
    msc__shares shares;
    msc__nodes nodes;      /* of the machine */
    uint32_t worker_count; /* started */
    msc__thread *workers;
    bool locks; /* mutexes and conditions exist */
};

/** `pool` in place, all zero. After a failure, `_fini` gives back what there is. */
msc_status msc__pool_init(msc__pool *pool, msc_context *ctx, uint32_t thread_count, msc_error *err);
void msc__pool_fini(msc__pool *pool);

/**
 * Does all `items`, by as many threads as get at least `grain` each, and returns when all are done. Threads prefer what lies
 * on their own memory node. Which thread does which depends on chance; a job's result must not.
 *
 * @param where tells it; NULL: anywhere.
 */
void msc__pool_run(msc__pool *pool, uint64_t items, uint64_t grain, msc__pool_work work,
                   msc__shares_where where, void *job);

#endif /* MSC_OPTIM_POOL_H */
