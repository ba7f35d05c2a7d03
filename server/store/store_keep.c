/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Retention: what is archived and deleted because a project's rule says so, because it was asked for once, or
 * because the project is gone.
 *
 * One step is one job of the writer: it goes on with the projects after the one that the last step ended at, and
 * stops at 100 runs or 50 projects. What a run has sent goes afterwards, in the steps of the purge.
 */
#include <stdio.h>
#include <string.h>

#include "base/invariant.h"
#include "store/store_internal.h"

#define DAY_MS (INT64_C(24) * 3600 * 1000)
#define RUNS_A_STEP 100u
#define PROJECTS_A_STEP 50u

/* The time before which a run was last heard of, to be old; 0 days: never. */
static int64_t line_of(int64_t days, int64_t now_ms)
{
    MSC__ASSERT(days >= 0 && days <= STORE_MOST_DAYS);
    return days == 0 ? INT64_MIN : now_ms - days * DAY_MS;
}

/* ---- what would go --------------------------------------------------------------------------- */

typedef struct old_count {
    int64_t loose;
    int64_t pinned;
} old_count;

static store_result count_old(store_db *db, int64_t project, bool archived, int64_t line, old_count *out)
{
    sqlite3_stmt *row = store_sql(db, SQL_OLD_RUNS_COUNT);
    bool found = store_bind(row, "iii", project, (int64_t)archived, line) && store_row(row);

    out->loose = found ? sqlite3_column_int64(row, 0) : 0;
    out->pinned = found ? sqlite3_column_int64(row, 1) : 0;
    return store_row_end(db, row, STORE_OK);
}

/* The project's rule, with what is asked about in its place. */
static store_result get_rule(store_db *db, const store_act *act, const store_rule *asked, store_project *out)
{
    store_result result = store_project_get(db, act->who, asked->project, out);

    if (result == STORE_OK && asked->archive_days >= 0)
        out->archive_days = asked->archive_days;
    if (result == STORE_OK && asked->delete_days >= 0)
        out->delete_days = asked->delete_days;
    return result;
}

store_result store_retention_preview(store *it, store_act act, const store_rule *rule, store_retention *out)
{
    store_db *db = store_reader_get(it);
    old_count to_archive = {0};
    old_count open = {0};
    old_count archived = {0};
    store_project kept;
    store_result result = get_rule(db, &act, rule, &kept);

    if (result == STORE_OK)
        result = count_old(db, kept.id, false, line_of(kept.archive_days, act.now_ms), &to_archive);
    if (result == STORE_OK)
        result = count_old(db, kept.id, false, line_of(kept.delete_days, act.now_ms), &open);
    if (result == STORE_OK)
        result = count_old(db, kept.id, true, line_of(kept.delete_days, act.now_ms), &archived);
    store_reader_put(it, db);
    out->deletes = open.loose + archived.loose;
    out->archives = to_archive.loose > open.loose ? to_archive.loose - open.loose : 0;
    out->pinned = archived.pinned + (to_archive.pinned > open.pinned ? to_archive.pinned : open.pinned);
    return result;
}

typedef struct old_list {
    int64_t project;
    int64_t now_ms;
    uint32_t limit; /* how many more */
    store_run_each *each;
    void *user;
} old_list;

/* Runs that are old and not pinned; those of before `skip_line` are left out. */
static store_result list_old(store_db *db, old_list *list, bool archived, int64_t line, int64_t skip_line)
{
    sqlite3_stmt *row = store_sql(db, SQL_OLD_RUNS);
    bool bound = store_bind(row, "iiii", list->project, (int64_t)archived, line, INT64_MAX);
    store_result result = bound ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && list->limit > 0 && store_row(row)) {
        store_run run;

        store_run_row(row, list->now_ms, &run);
        if (run.seen_ms < skip_line)
            continue;
        list->limit--;
        if (!list->each(list->user, &run))
            result = STORE_STOPPED;
    }
    return store_row_end(db, row, result);
}

store_result store_retention_runs(store *it, store_act act, const store_rule *rule, bool deletes,
                                  uint32_t limit, store_run_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    old_list list = {rule->project, act.now_ms, limit, each, user};
    store_project kept;
    store_result result = get_rule(db, &act, rule, &kept);
    int64_t delete_line = result == STORE_OK ? line_of(kept.delete_days, act.now_ms) : 0;

    if (result == STORE_OK && deletes) {
        result = list_old(db, &list, true, delete_line, INT64_MIN);
        if (result == STORE_OK)
            result = list_old(db, &list, false, delete_line, INT64_MIN);
    } else if (result == STORE_OK) {
        result = list_old(db, &list, false, line_of(kept.archive_days, act.now_ms), delete_line);
    }
    store_reader_put(it, db);
    return result;
}

/* ---- a step ---------------------------------------------------------------------------------- */

typedef struct kept_project {
    int64_t id;
    int64_t team;
    int64_t archive_days;
    int64_t delete_days;
    int64_t purge_ms;   /* or STORE_NO_TIME */
    int64_t deleted_ms; /* or STORE_NO_TIME */
} kept_project;

typedef struct keep_job {
    store *it;
    int64_t now_ms;
    store_changed *altered;
    store_changed *gone;
    void *user;
    int64_t at;   /* project that is done with; the next step goes on after it */
    bool is_last; /* there is no other: the next step begins with the first */
    store_run runs[RUNS_A_STEP];
    bool is_gone[RUNS_A_STEP];
    uint32_t count;
} keep_job;

/* The next one after `id`; `out->id` 0: none. */
static store_result next_project(store_db *db, int64_t id, kept_project *out)
{
    sqlite3_stmt *row = store_sql(db, SQL_KEPT_PROJECT);

    memset(out, 0, sizeof *out);
    if (store_bind(row, "i", id) && store_row(row)) {
        out->id = sqlite3_column_int64(row, 0);
        out->team = sqlite3_column_int64(row, 1);
        out->archive_days = sqlite3_column_int64(row, 2);
        out->delete_days = sqlite3_column_int64(row, 3);
        out->purge_ms = store_column_time(row, 4);
        out->deleted_ms = store_column_time(row, 5);
    }
    return store_row_end(db, row, STORE_OK);
}

static void take_row(keep_job *job, sqlite3_stmt *row, bool gone)
{
    store_run_row(row, job->now_ms, &job->runs[job->count]);
    job->is_gone[job->count++] = gone;
}

/* Reads runs that a statement lists, and then archives or deletes each: a table is not changed while it is read. */
static store_result take(store_db *db, keep_job *job, const kept_project *from, store_sql_id id, bool bound,
                         bool gone)
{
    const store_act act = {.now_ms = job->now_ms};
    uint32_t first = job->count;
    sqlite3_stmt *row = db->statements[id];
    store_result result = bound ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && job->count < RUNS_A_STEP && store_row(row))
        take_row(job, row, gone);
    result = store_row_end(db, row, result);
    for (uint32_t i = first; i < job->count && result == STORE_OK; i++) {
        store_run *run = &job->runs[i];

        result =
            gone ? store_run_drop(db, run->key) : STORE_RUN(db, RUN_ARCHIVE, "ii", job->now_ms, run->key);
        run->archived = true;
        run->version++;
        if (result == STORE_OK && from->deleted_ms == STORE_NO_TIME)
            result =
                store_note(db, &act, from->team, gone ? "run.delete" : "run.archive", run->id, run->name);
    }
    return result;
}

static store_result take_old(store_db *db, keep_job *job, const kept_project *from, bool archived,
                             int64_t days, bool gone)
{
    bool bound;

    if (days == 0 || job->count == RUNS_A_STEP)
        return STORE_OK;
    bound = store_bind(store_sql(db, SQL_OLD_RUNS), "iiii", from->id, (int64_t)archived,
                       line_of(days, job->now_ms), (int64_t)(RUNS_A_STEP - job->count));
    return take(db, job, from, SQL_OLD_RUNS, bound, gone);
}

/* The project's row goes with its last run. */
static store_result end_project(store_db *db, keep_job *job, const kept_project *from)
{
    int64_t room = RUNS_A_STEP - job->count;
    bool bound = store_bind(store_sql(db, SQL_ALL_RUNS), "ii", from->id, room);
    store_result result = take(db, job, from, SQL_ALL_RUNS, bound, true);

    if (result != STORE_OK || job->count == RUNS_A_STEP)
        return result;
    result = STORE_RUN(db, CHOSEN_OF_END, "i", from->id);
    return result == STORE_OK ? STORE_RUN(db, PROJECT_END, "i", from->id) : result;
}

static store_result purge_archived(store_db *db, keep_job *job, const kept_project *from)
{
    int64_t room = RUNS_A_STEP - job->count;
    bool bound = store_bind(store_sql(db, SQL_PURGED_RUNS), "iii", from->id, from->purge_ms, room);
    store_result result = take(db, job, from, SQL_PURGED_RUNS, bound, true);

    return result == STORE_OK && job->count < RUNS_A_STEP ? STORE_RUN(db, PURGE_DONE, "i", from->id) : result;
}

static store_result keep_project(store_db *db, keep_job *job, const kept_project *from)
{
    store_result result = STORE_OK;

    if (from->deleted_ms != STORE_NO_TIME)
        return end_project(db, job, from);
    if (from->purge_ms != STORE_NO_TIME)
        result = purge_archived(db, job, from);
    if (result == STORE_OK)
        result = take_old(db, job, from, true, from->delete_days, true);
    if (result == STORE_OK)
        result = take_old(db, job, from, false, from->delete_days, true);
    if (result == STORE_OK)
        result = take_old(db, job, from, false, from->archive_days, false);
    return result;
}

static store_result keep(store_db *db, void *user)
{
    keep_job *job = user;
    kept_project next;
    store_result result = STORE_OK;

    job->at = job->it->kept_to;
    job->count = 0;
    job->is_last = false;
    for (uint32_t i = 0; i < PROJECTS_A_STEP && result == STORE_OK && job->count < RUNS_A_STEP; i++) {
        result = next_project(db, job->at, &next);
        if (result == STORE_OK && next.id != 0)
            result = keep_project(db, job, &next);
        if (job->count < RUNS_A_STEP) /* else there may be more in the same one */
            job->at = next.id;
        job->is_last = job->count < RUNS_A_STEP && next.id == 0;
        if (job->is_last)
            break;
    }
    return result;
}

static void tell(void *user)
{
    const keep_job *job = user;

    job->it->kept_to = job->at; /* this is the writer's thread */
    for (uint32_t i = 0; i < job->count; i++) {
        store_changed *told = job->is_gone[i] ? job->gone : job->altered;

        job->it->purges = job->it->purges || job->is_gone[i];
        if (told != NULL)
            told(job->user, &job->runs[i]);
    }
}

store_result store_keep_step(store *it, int64_t now_ms, store_changed *altered, store_changed *gone,
                             void *user, bool *more)
{
    keep_job job = {.it = it, .now_ms = now_ms, .altered = altered, .gone = gone, .user = user};
    store_result result = store_write(it, keep, tell, &job);

    *more = result == STORE_OK && !job.is_last;
    return result;
}
