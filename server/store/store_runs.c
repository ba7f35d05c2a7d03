/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Projects and runs.
 *
 * A run is found through its project, whose account must be the caller's: there is no call that reaches a run
 * by its id alone. States that are written are running, finished and failed; `lost` is a running one that has
 * been silent for too long, and is made of the clock when a row is read or looked for.
 */
#include <string.h>

#include "store/store_internal.h"

/* ---- projects -------------------------------------------------------------------------------- */

typedef struct project_job {
    int64_t account;
    const char *name;
    int64_t now_ms;
    store_project *out;
    bool made;
} project_job;

static void project_row(sqlite3_stmt *row, store_project *out)
{
    out->id = sqlite3_column_int64(row, 0);
    store_column_text(row, 1, out->name, sizeof out->name);
    out->created_ms = sqlite3_column_int64(row, 2);
    out->runs = sqlite3_column_int64(row, 3);
}

static store_result add_project(store_db *db, void *user)
{
    project_job *job = user;
    store_result result = STORE_RUN(db, PROJECT_ADD, "iti", job->account, job->name, job->now_ms);
    sqlite3_stmt *row;
    bool found;

    if (result != STORE_OK)
        return result;
    job->made = sqlite3_changes(db->it) > 0;
    row = store_sql(db, SQL_PROJECT_FIND);
    found = store_bind(row, "it", job->account, job->name) && store_row(row);
    if (found)
        project_row(row, job->out);
    result = store_row_end(db, row, STORE_OK);
    return result == STORE_OK && !found ? STORE_FAILED : result;
}

store_result store_project_add(store *it, int64_t account, const char *name, int64_t now_ms,
                               store_project *out, bool *made)
{
    project_job job = {account, name, now_ms, out, false};
    store_result result = store_write(it, add_project, NULL, &job);

    *made = job.made;
    return result;
}

store_result store_projects(store *it, int64_t account, store_project_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_PROJECTS);
    store_result result = store_bind(row, "i", account) ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && store_row(row)) {
        store_project project;

        project_row(row, &project);
        if (!each(user, &project))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}

/* ---- one run --------------------------------------------------------------------------------- */

void store_run_row(sqlite3_stmt *row, int64_t now_ms, store_run *out)
{
    memset(out, 0, sizeof *out);
    out->key = sqlite3_column_int64(row, 0);
    store_column_text(row, 1, out->id, sizeof out->id);
    out->project = sqlite3_column_int64(row, 2);
    store_column_text(row, 3, out->name, sizeof out->name);
    out->state = (store_state)sqlite3_column_int(row, 4);
    out->archived = sqlite3_column_int(row, 5) != 0;
    out->created_ms = sqlite3_column_int64(row, 6);
    out->seen_ms = sqlite3_column_int64(row, 7);
    out->ended_ms = store_column_time(row, 8);
    out->version = sqlite3_column_int64(row, 9);
    if (out->state == STORE_RUNNING && out->seen_ms < now_ms - STORE_LOST_MS)
        out->state = STORE_LOST;
}

store_result store_run_get(store_db *db, store_run_ref ref, store_run *out)
{
    sqlite3_stmt *row = store_sql(db, SQL_RUN_FIND);
    bool found = store_bind(row, "ti", ref.id, ref.account) && store_row(row);
    store_result result;

    if (found)
        store_run_row(row, ref.now_ms, out);
    result = store_row_end(db, row, STORE_OK);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

store_result store_run_find(store *it, store_run_ref ref, store_run *out)
{
    store_db *db = store_reader_get(it);
    store_result result = store_run_get(db, ref, out);

    store_reader_put(it, db);
    return result;
}

typedef struct run_job {
    store *it;
    store_run_ref ref;
    const store_new_run *run;
    const store_run_change *change;
    store_changed *after;
    void *user;
    store_run *out;
    bool made;
} run_job;

/* The project of a new run, which is made if it is not there. Its runs are not counted: there may be many. */
static store_result get_project(store_db *db, const run_job *job, int64_t *id)
{
    store_result result =
        STORE_RUN(db, PROJECT_ADD, "iti", job->ref.account, job->run->project, job->ref.now_ms);
    sqlite3_stmt *row;
    bool found;

    if (result != STORE_OK)
        return result;
    row = store_sql(db, SQL_PROJECT_ID);
    found = store_bind(row, "it", job->ref.account, job->run->project) && store_row(row);
    *id = found ? sqlite3_column_int64(row, 0) : 0;
    result = store_row_end(db, row, STORE_OK);
    return result == STORE_OK && !found ? STORE_FAILED : result;
}

static store_result add_run(store_db *db, void *user)
{
    run_job *job = user;
    int64_t project = 0;
    store_result result = get_project(db, job, &project);

    if (result == STORE_OK)
        result = STORE_RUN(db, RUN_ADD, "titii", job->ref.id, project, job->run->name, job->run->created_ms,
                           job->ref.now_ms);
    if (result != STORE_OK)
        return result;
    job->made = sqlite3_changes(db->it) > 0;
    result = store_run_get(db, job->ref, job->out);
    if (result == STORE_NOT_FOUND || (result == STORE_OK && job->out->project != project))
        return STORE_CONFLICT;
    return result;
}

store_result store_run_add(store *it, store_run_ref ref, const store_new_run *run, store_run *out, bool *made)
{
    run_job job = {.it = it, .ref = ref, .run = run, .out = out};
    store_result result = store_write(it, add_run, NULL, &job);

    *made = job.made;
    return result;
}

static store_result keep_alive(store_db *db, void *user)
{
    const run_job *job = user;
    store_run run;
    store_result result = store_run_get(db, job->ref, &run);

    return result == STORE_OK ? STORE_RUN(db, RUN_ALIVE, "ii", job->ref.now_ms, run.key) : result;
}

store_result store_run_alive(store *it, store_run_ref ref)
{
    run_job job = {.it = it, .ref = ref};

    return store_write(it, keep_alive, NULL, &job);
}

static store_result alter_run(store_db *db, void *user)
{
    run_job *job = user;
    const store_run_change *change = job->change;
    store_run *run = job->out;
    store_result result = store_run_get(db, job->ref, run);
    store_state state = run->state;

    if (result != STORE_OK)
        return result;
    if (change->state != STORE_ANY) {
        state = change->state;
        if (state == STORE_RUNNING) /* again */
            run->ended_ms = STORE_NO_TIME;
        else if (run->ended_ms == STORE_NO_TIME)
            run->ended_ms = job->ref.now_ms;
    }
    result = STORE_RUN(db, RUN_ALTER, "tiinii", change->name != NULL ? change->name : run->name,
                       (int64_t)(change->archived >= 0 ? change->archived == 1 : run->archived),
                       (int64_t)(state == STORE_LOST ? STORE_RUNNING : state), run->ended_ms,
                       run->version + 1, run->key);
    return result == STORE_OK ? store_run_get(db, job->ref, run) : result;
}

static void tell(void *user)
{
    const run_job *job = user;

    if (job->after != NULL)
        job->after(job->user, job->out);
}

store_result store_run_alter(store *it, store_run_ref ref, const store_run_change *change, store_run *out)
{
    run_job job = {
        .it = it, .ref = ref, .change = change, .out = out, .after = change->after, .user = change->user};

    memset(out, 0, sizeof *out);
    return store_write(it, alter_run, tell, &job);
}

static store_result delete_run(store_db *db, void *user)
{
    const run_job *job = user;
    store_result result = store_run_get(db, job->ref, job->out);

    if (result == STORE_OK)
        result = STORE_RUN(db, RUN_DELETE, "i", job->out->key);
    return result == STORE_OK ? STORE_RUN(db, PURGE_ADD, "i", job->out->key) : result;
}

static void tell_of_deletion(void *user)
{
    const run_job *job = user;

    job->it->purges = true; /* this is the writer's thread */
    tell(user);
}

store_result store_run_delete(store *it, store_run_ref ref, store_changed *after, void *user)
{
    store_run run;
    run_job job = {.it = it, .ref = ref, .out = &run, .after = after, .user = user};

    return store_write(it, delete_run, tell_of_deletion, &job);
}

/* ---- removing what deleted runs had ---------------------------------------------------------- */

/* What was freed goes back to the file system, some pages at a time. */
static store_result give_back(store_db *db, bool *more)
{
    sqlite3_stmt *row = store_sql(db, SQL_FREE_PAGES);
    store_result result;

    *more = store_row(row) && sqlite3_column_int64(row, 0) > 0;
    result = store_row_end(db, row, STORE_OK);
    if (result == STORE_OK && *more &&
        sqlite3_exec(db->it, "PRAGMA incremental_vacuum(1000)", NULL, NULL, NULL) != SQLITE_OK)
        result = store_db_failed(db);
    return result;
}

store_result store_purge_step(store_db *db, bool *more)
{
    static const store_sql_id parts[] = {SQL_PURGE_PACKED, SQL_PURGE_BLOCKS,    SQL_PURGE_SERIES,
                                         SQL_PURGE_EVENTS, SQL_PURGE_DOCUMENTS, SQL_PURGE_BATCHES};
    sqlite3_stmt *row = store_sql(db, SQL_PURGE_NEXT);
    store_result result;
    int64_t run = 0;
    size_t i;

    *more = store_row(row);
    if (*more)
        run = sqlite3_column_int64(row, 0);
    result = store_row_end(db, row, STORE_OK);
    if (!*more && result == STORE_OK)
        return give_back(db, more);
    for (i = 0; i < sizeof parts / sizeof parts[0] && result == STORE_OK; i++) {
        result = store_run_bound(db, store_bind(store_sql(db, parts[i]), "i", run), parts[i]);
        if (result == STORE_OK && sqlite3_changes(db->it) > 0)
            return STORE_OK; /* a step is small, so that nobody who writes waits long */
    }
    return result == STORE_OK ? STORE_RUN(db, PURGE_END, "i", run) : result;
}
