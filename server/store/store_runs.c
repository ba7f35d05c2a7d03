/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs.
 *
 * A run is found through its project, which must be in the caller's reach: there is no call that reaches a run
 * by its id alone. States that are written are running, finished and failed; `lost` is a running one that has
 * been silent for too long, and is made of the clock when a row is read or looked for.
 */
#include <string.h>

#include "store/store_internal.h"

#define RUN_COLUMNS 11

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
    out->pinned = sqlite3_column_int(row, 10) != 0;
    if (out->state == STORE_RUNNING && out->seen_ms < now_ms - STORE_LOST_MS)
        out->state = STORE_LOST;
}

store_result store_run_get_as(store_db *db, store_run_ref ref, store_role least, store_run *out,
                              int64_t *team)
{
    sqlite3_stmt *row = store_sql(db, SQL_RUN_FIND);
    bool found = store_bind(row, "tiii", ref.id, ref.account, ref.team, ref.project) && store_row(row);
    store_role role = STORE_NO_ROLE;
    store_result result;

    if (found) {
        store_run_row(row, ref.now_ms, out);
        role = (store_role)sqlite3_column_int(row, RUN_COLUMNS);
        *team = sqlite3_column_int64(row, RUN_COLUMNS + 1);
    }
    result = store_row_end(db, row, STORE_OK);
    if (result != STORE_OK || !found)
        return result == STORE_OK ? STORE_NOT_FOUND : result;
    return role < least ? STORE_FORBIDDEN : STORE_OK;
}

store_result store_run_get(store_db *db, store_run_ref ref, store_run *out)
{
    int64_t team;

    return store_run_get_as(db, ref, STORE_VIEWER, out, &team);
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

static store_result add_run(store_db *db, void *user)
{
    run_job *job = user;
    const store_act act = {store_who_of(job->ref), job->ref.now_ms};
    int64_t project = 0;
    bool made;
    store_result result = store_project_obtain(db, &act, job->run->team, job->run->project, &project, &made);

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
    int64_t team;
    store_result result = store_run_get_as(db, job->ref, STORE_MEMBER, &run, &team);

    return result == STORE_OK ? STORE_RUN(db, RUN_ALIVE, "ii", job->ref.now_ms, run.key) : result;
}

store_result store_run_alive(store *it, store_run_ref ref)
{
    run_job job = {.it = it, .ref = ref};

    return store_write(it, keep_alive, NULL, &job);
}

/* What people do to a run is in the log; that it ended is not. */
static store_result note_change(store_db *db, const run_job *job, int64_t team, const store_run *was)
{
    const store_act act = {store_who_of(job->ref), job->ref.now_ms};
    const store_run *run = job->out;
    store_result result = STORE_OK;

    if (strcmp(was->name, run->name) != 0)
        result = store_note(db, &act, team, "run.rename", run->id, run->name);
    if (result == STORE_OK && was->archived != run->archived)
        result =
            store_note(db, &act, team, run->archived ? "run.archive" : "run.unarchive", run->id, run->name);
    if (result == STORE_OK && was->pinned != run->pinned)
        result = store_note(db, &act, team, run->pinned ? "run.pin" : "run.unpin", run->id, run->name);
    return result;
}

static store_result alter_run(store_db *db, void *user)
{
    run_job *job = user;
    const store_run_change *change = job->change;
    store_run *run = job->out;
    store_run was;
    int64_t team;
    store_result result = store_run_get_as(db, job->ref, STORE_MEMBER, &was, &team);
    store_state state;
    bool archived;

    if (result != STORE_OK)
        return result;
    *run = was;
    state = was.state;
    if (change->state != STORE_ANY) {
        state = change->state;
        if (state == STORE_RUNNING) /* again */
            run->ended_ms = STORE_NO_TIME;
        else if (run->ended_ms == STORE_NO_TIME)
            run->ended_ms = job->ref.now_ms;
    }
    archived = change->archived >= 0 ? change->archived == 1 : was.archived;
    result = STORE_RUN(
        db, RUN_ALTER, "tiiiinii", change->name != NULL ? change->name : was.name, (int64_t)archived,
        job->ref.now_ms, (int64_t)(change->pin == 0 ? was.pinned : change->pin > 0),
        (int64_t)(state == STORE_LOST ? STORE_RUNNING : state), run->ended_ms, was.version + 1, was.key);
    if (result == STORE_OK)
        result = store_run_get(db, job->ref, run);
    return result == STORE_OK ? note_change(db, job, team, &was) : result;
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

store_result store_run_drop(store_db *db, int64_t key)
{
    store_result result = STORE_RUN(db, RUN_DELETE, "i", key);

    return result == STORE_OK ? STORE_RUN(db, PURGE_ADD, "i", key) : result;
}

static store_result delete_run(store_db *db, void *user)
{
    const run_job *job = user;
    const store_act act = {store_who_of(job->ref), job->ref.now_ms};
    int64_t team;
    store_result result = store_run_get_as(db, job->ref, STORE_MEMBER, job->out, &team);

    if (result == STORE_OK)
        result = store_run_drop(db, job->out->key);
    return result == STORE_OK ? store_note(db, &act, team, "run.delete", job->out->id, job->out->name)
                              : result;
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
