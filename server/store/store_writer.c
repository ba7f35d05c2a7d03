/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The writer: one thread, one transaction for all who wait.
 *
 *      caller      store_write: append a job, wait
 *      writer      take up to 64 jobs │ BEGIN │ SAVEPOINT job RELEASE │ … │ COMMIT │ after hooks │ wake
 *
 * The cost of a commit is the disk's, so the more wait the less each pays. A job that fails is undone to its
 * savepoint; the others go on. What makes SQLite give up the whole transaction (the disk is full, memory has
 * run out), and a commit that fails, say nothing of who is at fault: each job is then done alone in a
 * transaction of its own.
 *
 * With nothing else to do, the writer removes what deleted runs had, a step at a time.
 */
#include "base/error.h"
#include "base/invariant.h"
#include "store/store_internal.h"

#define MOST_JOBS 64u

static store_result run_job(store_db *db, store_job *job)
{
    store_result result = STORE_RUN(db, SAVE, "");

    if (result != STORE_OK)
        return result;
    result = job->work(db, job->user);
    if (sqlite3_get_autocommit(db->it) != 0)
        return result == STORE_OK ? STORE_FAILED : result; /* the transaction is gone */
    if (result != STORE_OK && STORE_RUN(db, SAVE_BACK, "") != STORE_OK)
        return STORE_FAILED;
    return STORE_RUN(db, SAVE_END, "") == STORE_OK ? result : STORE_FAILED;
}

/* Commits, or undoes everything. */
static store_result end_transaction(store *it, bool keep)
{
    store_db *db = &it->writer;
    int64_t start_ns = msc__clock_ns();
    store_result result = keep ? STORE_RUN(db, COMMIT, "") : STORE_FAILED;

    if (sqlite3_get_autocommit(db->it) == 0 && STORE_RUN(db, ROLLBACK, "") != STORE_OK)
        result = STORE_FAILED;
    if (result == STORE_OK) {
        msc__mutex_lock(&it->mutex);
        it->figures.commits++;
        it->figures.commit_ns += (uint64_t)(msc__clock_ns() - start_ns);
        msc__mutex_unlock(&it->mutex);
    }
    return result;
}

/* Does jobs in one transaction; false: none is done, and each is to be tried alone. */
static bool run_together(store *it, store_job *const *jobs, uint32_t count)
{
    store_db *db = &it->writer;
    store_result result = STORE_RUN(db, BEGIN, "");
    bool whole = result == STORE_OK;
    uint32_t i;

    for (i = 0; i < count && whole; i++) {
        result = run_job(db, jobs[i]);
        jobs[i]->result = result;
        whole = sqlite3_get_autocommit(db->it) == 0;
    }
    if (whole) {
        result = end_transaction(it, true);
        if (result == STORE_OK)
            return true;
    } else {
        (void)end_transaction(it, false);
        result = result == STORE_OK ? STORE_FAILED : result;
    }
    for (i = 0; i < count; i++)
        jobs[i]->result = result;
    return false;
}

static void run_jobs(store *it, store_job *const *jobs, uint32_t count)
{
    bool failed = false;
    uint32_t i;

    if (!run_together(it, jobs, count)) {
        for (i = 0; i < count && count > 1; i++)
            (void)run_together(it, &jobs[i], 1);
    }
    for (i = 0; i < count; i++) {
        if (jobs[i]->result == STORE_OK && jobs[i]->after != NULL)
            jobs[i]->after(jobs[i]->user);
        failed = failed || jobs[i]->result == STORE_FULL || jobs[i]->result == STORE_FAILED;
    }
    msc__mutex_lock(&it->mutex);
    it->write_failed = failed;
    it->figures.jobs += count;
    for (i = 0; i < count; i++)
        jobs[i]->done = true;
    msc__cond_broadcast(&it->jobs_done);
    msc__mutex_unlock(&it->mutex);
}

static void purge(store *it)
{
    store_db *db = &it->writer;
    store_result result = STORE_RUN(db, BEGIN, "");

    if (result == STORE_OK)
        result = store_purge_step(db, &it->purges);
    result = end_transaction(it, result == STORE_OK);
    if (result != STORE_OK)
        it->purges = false; /* a full disk, say: the next deletion or start tries once more */
}

/* Takes jobs off the queue; 0: there are none and something is to be purged, or the store closes. */
static uint32_t take_jobs(store *it, store_job **jobs, bool *stops)
{
    uint32_t count = 0;

    msc__mutex_lock(&it->mutex);
    while (it->first == NULL && !it->stops && !it->purges)
        msc__cond_wait(&it->jobs_changed, &it->mutex);
    while (it->first != NULL && count < MOST_JOBS) {
        jobs[count++] = it->first;
        it->first = it->first->next;
    }
    if (it->first == NULL)
        it->last = &it->first;
    *stops = it->stops;
    msc__mutex_unlock(&it->mutex);
    return count;
}

void *store_writer_run(void *user)
{
    store_job *jobs[MOST_JOBS];
    store *it = user;
    bool stops = false;

    while (!stops) {
        uint32_t count = take_jobs(it, jobs, &stops);

        if (count > 0) {
            run_jobs(it, jobs, count);
            stops = false; /* the queue is emptied first */
        } else if (!stops) {
            purge(it);
        }
    }
    return NULL;
}

store_result store_write(store *it, store_work *work, void (*after)(void *), void *user)
{
    store_job job = {.work = work, .after = after, .user = user, .result = STORE_FAILED};

    msc__mutex_lock(&it->mutex);
    MSC__ASSERT(!it->stops);
    /* The job is off the queue before this returns. */
    *it->last = &job;     /* cppcheck-suppress autoVariables */
    it->last = &job.next; /* cppcheck-suppress autoVariables */
    msc__cond_signal(&it->jobs_changed);
    while (!job.done)
        msc__cond_wait(&it->jobs_done, &it->mutex);
    msc__mutex_unlock(&it->mutex);
    return job.result;
}
