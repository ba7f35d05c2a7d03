/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Projects: who sees which is said by the view `reach` alone, and every statement here goes through it.
 */
#include <stdio.h>
#include <string.h>

#include "store/store_internal.h"

store_who store_who_of(store_run_ref ref)
{
    return (store_who){ref.account, ref.team, ref.project};
}

static void project_row(sqlite3_stmt *row, store_project *out)
{
    memset(out, 0, sizeof *out);
    out->id = sqlite3_column_int64(row, 0);
    store_column_text(row, 1, out->name, sizeof out->name);
    out->created_ms = sqlite3_column_int64(row, 2);
    out->runs = sqlite3_column_int64(row, 3);
    out->team = sqlite3_column_int64(row, 4);
    store_column_text(row, 5, out->owner, sizeof out->owner);
    out->owned = sqlite3_column_int(row, 6) != 0;
    out->is_private = sqlite3_column_int(row, 7) != 0;
    out->role = (store_role)sqlite3_column_int(row, 8);
    out->archive_days = sqlite3_column_int64(row, 9);
    out->delete_days = sqlite3_column_int64(row, 10);
}

store_result store_project_get(store_db *db, store_who who, int64_t id, store_project *out)
{
    sqlite3_stmt *row = store_sql(db, SQL_PROJECT_FIND);
    bool found = store_bind(row, "iiii", who.account, id, who.team, who.project) && store_row(row);
    store_result result;

    if (found)
        project_row(row, out);
    result = store_row_end(db, row, STORE_OK);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

store_result store_project_find(store *it, store_who who, int64_t id, store_project *out)
{
    store_db *db = store_reader_get(it);
    store_result result = store_project_get(db, who, id, out);

    store_reader_put(it, db);
    return result;
}

store_result store_projects(store *it, store_who who, int64_t team, store_project_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_PROJECTS);
    store_result result =
        store_bind(row, "iiii", who.account, who.team, who.project, team) ? STORE_OK : store_db_failed(db);

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

/* ---- by name --------------------------------------------------------------------------------- */

/* The team that is meant, and the role in it. */
static store_result home_team(store_db *db, store_who who, int64_t *team, store_role *role)
{
    sqlite3_stmt *row = store_sql(db, SQL_MEMBER_HOME);
    int64_t wanted = *team != 0 ? *team : who.team;
    bool found = store_bind(row, "ii", who.account, wanted) && store_row(row);
    store_result result;

    *team = found ? sqlite3_column_int64(row, 0) : 0;
    *role = found ? (store_role)sqlite3_column_int(row, 1) : STORE_NO_ROLE;
    result = store_row_end(db, row, STORE_OK);
    if (result != STORE_OK)
        return result;
    return !found || (who.team != 0 && who.team != *team) ? STORE_NOT_FOUND : STORE_OK;
}

/* A token of one project means that one, if it has the name. */
static store_result named_project(store_db *db, store_who who, int64_t team, const char *name, int64_t *id)
{
    sqlite3_stmt *row = store_sql(db, SQL_PROJECT_NAMED);
    bool found = store_bind(row, "iiti", who.account, team, name, who.project) && store_row(row);

    *id = found ? sqlite3_column_int64(row, 0) : 0;
    return store_row_end(db, row, STORE_OK);
}

store_result store_project_obtain(store_db *db, const store_act *act, int64_t team, const char *name,
                                  int64_t *id, bool *made)
{
    store_who who = act->who;
    store_role role = STORE_NO_ROLE;
    store_result result = STORE_OK;

    *made = false;
    if (who.project != 0) {
        store_project bound;

        result = store_project_get(db, who, who.project, &bound);
        if (result == STORE_OK && team != 0 && team != bound.team)
            result = STORE_NOT_FOUND;
        if (result != STORE_OK)
            return result;
        team = bound.team;
    }
    result = home_team(db, who, &team, &role);
    if (result == STORE_OK)
        result = named_project(db, who, team, name, id);
    if (result == STORE_OK && role < STORE_MEMBER)
        result = STORE_FORBIDDEN;
    if (result != STORE_OK || *id != 0)
        return result;
    if (who.project != 0)
        return STORE_FORBIDDEN;
    result = STORE_RUN(db, PROJECT_ADD, "iiti", team, who.account, name, act->now_ms);
    *id = sqlite3_last_insert_rowid(db->it);
    *made = true;
    return result == STORE_OK ? store_note(db, act, team, "project.make", name, "") : result;
}

typedef struct project_job {
    const store_act *act;
    int64_t id; /* of a team, where it is made */
    const char *name;
    const store_project_change *change;
    bool chosen;
    store_project *out;
    bool made;
} project_job;

static store_result add_project(store_db *db, void *user)
{
    project_job *job = user;
    int64_t id = 0;
    store_result result = store_project_obtain(db, job->act, job->id, job->name, &id, &job->made);

    return result == STORE_OK ? store_project_get(db, job->act->who, id, job->out) : result;
}

store_result store_project_add(store *it, store_act act, int64_t team, const char *name, store_project *out,
                               bool *made)
{
    project_job job = {.act = &act, .id = team, .name = name, .out = out};
    store_result result = store_write(it, add_project, NULL, &job);

    *made = job.made;
    return result;
}

/* ---- changes --------------------------------------------------------------------------------- */

/* A project that the caller may change: it is theirs, or they are an admin of its team. */
static store_result get_own(store_db *db, store_who who, int64_t id, store_project *out)
{
    store_result result = store_project_get(db, who, id, out);

    if (result == STORE_OK && out->role < STORE_ADMIN && !(out->owned && out->role >= STORE_MEMBER))
        result = STORE_FORBIDDEN;
    return result;
}

static store_result note_change(store_db *db, const project_job *job, const store_project *was)
{
    const store_project *now = job->out;
    store_result result = STORE_OK;
    char detail[STORE_DETAIL_BYTES + 1];

    if (strcmp(was->name, now->name) != 0) {
        (void)snprintf(detail, sizeof detail, "was %s", was->name);
        result = store_note(db, job->act, now->team, "project.rename", now->name, detail);
    }
    if (result == STORE_OK && was->is_private != now->is_private)
        result = store_note(db, job->act, now->team, "project.visibility", now->name,
                            now->is_private ? "private" : "team");
    if (result == STORE_OK &&
        (was->archive_days != now->archive_days || was->delete_days != now->delete_days)) {
        (void)snprintf(detail, sizeof detail, "archive after %lld days, delete after %lld, 0 is never",
                       (long long)now->archive_days, (long long)now->delete_days);
        result = store_note(db, job->act, now->team, "project.retention", now->name, detail);
    }
    return result;
}

static store_result alter_project(store_db *db, void *user)
{
    const project_job *job = user;
    const store_project_change *change = job->change;
    store_project was;
    store_result result = get_own(db, job->act->who, job->id, &was);

    if (result != STORE_OK)
        return result;
    result = STORE_RUN(db, PROJECT_ALTER, "tiiii", change->name != NULL ? change->name : was.name,
                       (int64_t)(change->is_private >= 0 ? change->is_private : was.is_private),
                       change->archive_days >= 0 ? change->archive_days : was.archive_days,
                       change->delete_days >= 0 ? change->delete_days : was.delete_days, job->id);
    if (result == STORE_OK)
        result = store_project_get(db, job->act->who, job->id, job->out);
    return result == STORE_OK ? note_change(db, job, &was) : result;
}

store_result store_project_alter(store *it, store_act act, int64_t id, const store_project_change *change,
                                 store_project *out)
{
    project_job job = {.act = &act, .id = id, .change = change, .out = out};

    return store_write(it, alter_project, NULL, &job);
}

static store_result delete_project(store_db *db, void *user)
{
    const project_job *job = user;
    store_project project;
    store_result result = get_own(db, job->act->who, job->id, &project);

    if (result == STORE_OK)
        result = STORE_RUN(db, PROJECT_DELETE, "ii", job->act->now_ms, job->id);
    return result == STORE_OK ? store_note(db, job->act, project.team, "project.delete", project.name, "")
                              : result;
}

store_result store_project_delete(store *it, store_act act, int64_t id)
{
    project_job job = {.act = &act, .id = id};

    return store_write(it, delete_project, NULL, &job);
}

static store_result purge_project(store_db *db, void *user)
{
    const project_job *job = user;
    store_project project;
    store_result result = get_own(db, job->act->who, job->id, &project);

    if (result == STORE_OK)
        result = STORE_RUN(db, PROJECT_PURGE, "ii", job->act->now_ms, job->id);
    return result == STORE_OK ? store_note(db, job->act, project.team, "project.purge", project.name,
                                           "archived runs that are not pinned")
                              : result;
}

store_result store_project_purge(store *it, store_act act, int64_t id)
{
    project_job job = {.act = &act, .id = id};

    return store_write(it, purge_project, NULL, &job);
}

/* ---- who was chosen -------------------------------------------------------------------------- */

store_result store_project_chosen(store *it, store_who who, int64_t id, store_name_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    store_project project;
    store_result result = store_project_get(db, who, id, &project);
    sqlite3_stmt *row = store_sql(db, SQL_CHOSEN);

    if (result == STORE_OK && !store_bind(row, "i", id))
        result = store_db_failed(db);
    while (result == STORE_OK && store_row(row)) {
        char name[STORE_ID_BYTES + 1];

        store_column_text(row, 0, name, sizeof name);
        if (!each(user, name))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}

static store_result choose(store_db *db, void *user)
{
    const project_job *job = user;
    store_project project;
    store_result result = get_own(db, job->act->who, job->id, &project);
    int64_t account = 0;
    sqlite3_stmt *row;

    if (result != STORE_OK)
        return result;
    row = store_sql(db, SQL_MEMBER_NAMED);
    if (store_bind(row, "it", project.team, job->name) && store_row(row))
        account = sqlite3_column_int64(row, 1);
    result = store_row_end(db, row, STORE_OK);
    if (result == STORE_OK && account == 0)
        result = STORE_NOT_FOUND;
    if (result == STORE_OK)
        result = job->chosen ? STORE_RUN(db, CHOSEN_ADD, "ii", job->id, account)
                             : STORE_RUN(db, CHOSEN_END, "ii", job->id, account);
    if (result != STORE_OK || sqlite3_changes(db->it) == 0)
        return result == STORE_OK && !job->chosen ? STORE_NOT_FOUND : result;
    return store_note(db, job->act, project.team, job->chosen ? "project.choose" : "project.unchoose",
                      project.name, job->name);
}

store_result store_project_choose(store *it, store_act act, int64_t id, const char *account, bool chosen)
{
    project_job job = {.act = &act, .id = id, .name = account, .chosen = chosen};

    return store_write(it, choose, NULL, &job);
}
