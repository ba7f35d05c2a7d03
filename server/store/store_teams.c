/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Teams and members.
 *
 * Every call begins with the role of who asks, read in the same transaction as what it then does. Nobody gives
 * or takes a role above their own, and an owner who can log in always remains.
 */
#include <stdio.h>
#include <string.h>

#include "base/invariant.h"
#include "store/store_internal.h"

const char *store_role_name(store_role role)
{
    static const char *const names[] = {"none", "viewer", "member", "admin", "owner"};

    MSC__ASSERT(role <= STORE_OWNER);
    return names[role];
}

bool store_has_row(store_db *db, store_sql_id id, bool bound, store_result *result)
{
    sqlite3_stmt *row = db->statements[id];
    bool found = bound && store_row(row);

    *result = bound ? store_row_end(db, row, STORE_OK) : store_db_failed(db);
    return found && *result == STORE_OK;
}

store_result store_team_role(store_db *db, store_who who, int64_t team, store_role least, store_role *role)
{
    sqlite3_stmt *row = store_sql(db, SQL_MEMBER_ROLE);
    bool found = store_bind(row, "ii", team, who.account) && store_row(row);
    store_result result;

    *role = found ? (store_role)sqlite3_column_int(row, 0) : STORE_NO_ROLE;
    result = store_row_end(db, row, STORE_OK);
    if (result != STORE_OK)
        return result;
    if (!found || who.project != 0 || (who.team != 0 && who.team != team))
        return STORE_NOT_FOUND;
    return *role < least ? STORE_FORBIDDEN : STORE_OK;
}

store_result store_member_join(store_db *db, int64_t team, int64_t account, store_role role, int64_t now_ms)
{
    return STORE_RUN(db, MEMBER_ADD, "iiii", team, account, (int64_t)role, now_ms);
}

/* ---- teams ----------------------------------------------------------------------------------- */

typedef struct team_job {
    const store_act *act;
    int64_t team;
    const char *name;
    store_team *out;
} team_job;

static void team_row(sqlite3_stmt *row, store_team *out)
{
    out->id = sqlite3_column_int64(row, 0);
    store_column_text(row, 1, out->name, sizeof out->name);
    out->created_ms = sqlite3_column_int64(row, 2);
    out->members = sqlite3_column_int64(row, 3);
    out->projects = sqlite3_column_int64(row, 4);
    out->role = (store_role)sqlite3_column_int(row, 5);
}

static store_result get_team(store_db *db, store_who who, int64_t team, store_team *out)
{
    store_role role;
    store_result result = store_team_role(db, who, team, STORE_VIEWER, &role);
    sqlite3_stmt *row;
    bool found;

    if (result != STORE_OK)
        return result;
    row = store_sql(db, SQL_TEAM_FIND);
    found = store_bind(row, "ii", who.account, team) && store_row(row);
    if (found)
        team_row(row, out);
    result = store_row_end(db, row, STORE_OK);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

static store_result add_team(store_db *db, void *user)
{
    const team_job *job = user;
    const store_act *act = job->act;
    store_result result = STORE_RUN(db, TEAM_ADD, "ti", job->name, act->now_ms);
    int64_t team = sqlite3_last_insert_rowid(db->it);

    if (result == STORE_OK)
        result = store_member_join(db, team, act->who.account, STORE_OWNER, act->now_ms);
    if (result == STORE_OK)
        result = store_note(db, act, 0, "team.make", job->name, "");
    return result == STORE_OK ? get_team(db, act->who, team, job->out) : result;
}

store_result store_team_add(store *it, store_act act, const char *name, store_team *out)
{
    team_job job = {&act, 0, name, out};

    return store_write(it, add_team, NULL, &job);
}

store_result store_teams(store *it, store_who who, store_team_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_TEAMS);
    store_result result = store_bind(row, "ii", who.account, who.team) ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && who.project == 0 && store_row(row)) {
        store_team team;

        team_row(row, &team);
        if (!each(user, &team))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}

store_result store_team_find(store *it, store_who who, int64_t team, store_team *out)
{
    store_db *db = store_reader_get(it);
    store_result result = get_team(db, who, team, out);

    store_reader_put(it, db);
    return result;
}

static store_result rename_team(store_db *db, void *user)
{
    const team_job *job = user;
    store_role role;
    store_result result = store_team_role(db, job->act->who, job->team, STORE_OWNER, &role);

    if (result == STORE_OK)
        result = STORE_RUN(db, TEAM_RENAME, "ti", job->name, job->team);
    if (result == STORE_OK)
        result = store_note(db, job->act, job->team, "team.rename", job->name, "");
    return result == STORE_OK ? get_team(db, job->act->who, job->team, job->out) : result;
}

store_result store_team_rename(store *it, store_act act, int64_t team, const char *name, store_team *out)
{
    team_job job = {&act, team, name, out};

    return store_write(it, rename_team, NULL, &job);
}

static store_result delete_team(store_db *db, void *user)
{
    const team_job *job = user;
    store_team team;
    store_role role;
    store_result result = store_team_role(db, job->act->who, job->team, STORE_OWNER, &role);

    if (result == STORE_OK)
        result = get_team(db, job->act->who, job->team, &team);
    if (result != STORE_OK)
        return result;
    if (store_has_row(db, SQL_TEAM_HOLDS, store_bind(store_sql(db, SQL_TEAM_HOLDS), "i", job->team), &result))
        return STORE_CONFLICT;
    if (result == STORE_OK)
        result = STORE_RUN(db, TEAM_INVITATIONS_END, "i", job->team);
    if (result == STORE_OK)
        result = STORE_RUN(db, TEAM_MEMBERS_END, "i", job->team);
    if (result == STORE_OK)
        result = STORE_RUN(db, TEAM_DELETE, "i", job->team);
    return result == STORE_OK ? store_note(db, job->act, 0, "team.delete", team.name, "") : result;
}

store_result store_team_delete(store *it, store_act act, int64_t team)
{
    team_job job = {&act, team, NULL, NULL};

    return store_write(it, delete_team, NULL, &job);
}

/* ---- members --------------------------------------------------------------------------------- */

typedef struct member_job {
    const store_act *act;
    int64_t team;
    const char *name;
    store_role role;
} member_job;

store_result store_members(store *it, store_who who, int64_t team, store_member_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    store_role role;
    store_result result = store_team_role(db, who, team, STORE_VIEWER, &role);
    sqlite3_stmt *row = store_sql(db, SQL_MEMBERS);

    if (result == STORE_OK && !store_bind(row, "i", team))
        result = store_db_failed(db);
    while (result == STORE_OK && store_row(row)) {
        store_member member;

        store_column_text(row, 0, member.name, sizeof member.name);
        member.role = (store_role)sqlite3_column_int(row, 1);
        member.joined_ms = sqlite3_column_int64(row, 2);
        member.disabled = store_column_time(row, 3) != STORE_NO_TIME;
        if (!each(user, &member))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}

/* Whose membership it is, and that an owner remains if this one is none any more. */
static store_result find_member(store_db *db, const member_job *job, int64_t *account, store_role *role)
{
    sqlite3_stmt *row = store_sql(db, SQL_MEMBER_NAMED);
    bool found = store_bind(row, "it", job->team, job->name) && store_row(row);
    store_result result;

    *role = found ? (store_role)sqlite3_column_int(row, 0) : STORE_NO_ROLE;
    *account = found ? sqlite3_column_int64(row, 1) : 0;
    result = store_row_end(db, row, STORE_OK);
    if (result != STORE_OK || !found)
        return result == STORE_OK ? STORE_NOT_FOUND : result;
    if (*role != STORE_OWNER || job->role == STORE_OWNER)
        return STORE_OK;
    row = store_sql(db, SQL_OWNERS_BESIDE);
    if (store_has_row(db, SQL_OWNERS_BESIDE, store_bind(row, "ii", job->team, *account), &result))
        return STORE_OK;
    return result == STORE_OK ? STORE_LAST_OWNER : result;
}

static store_result set_member(store_db *db, void *user)
{
    const member_job *job = user;
    store_role own;
    store_role role = STORE_NO_ROLE;
    int64_t account = 0;
    store_result result = store_team_role(db, job->act->who, job->team, STORE_ADMIN, &own);
    char detail[64];

    if (result == STORE_OK)
        result = find_member(db, job, &account, &role);
    if (result == STORE_OK || result == STORE_LAST_OWNER)
        result = role > own || job->role > own ? STORE_FORBIDDEN : result;
    if (result == STORE_OK)
        result = STORE_RUN(db, MEMBER_SET, "iii", (int64_t)job->role, job->team, account);
    if (result == STORE_OK && job->role < STORE_ADMIN)
        result = STORE_RUN(db, INVITATIONS_BY_END, "ii", account, job->team);
    if (result != STORE_OK)
        return result;
    (void)snprintf(detail, sizeof detail, "%s, was %s", store_role_name(job->role), store_role_name(role));
    return store_note(db, job->act, job->team, "member.role", job->name, detail);
}

store_result store_member_set(store *it, store_act act, int64_t team, const char *name, store_role role)
{
    member_job job = {&act, team, name, role};

    return store_write(it, set_member, NULL, &job);
}

static store_result remove_member(store_db *db, void *user)
{
    const member_job *job = user;
    store_role own;
    store_role role = STORE_NO_ROLE;
    int64_t account = 0;
    store_result result = store_team_role(db, job->act->who, job->team, STORE_VIEWER, &own);

    if (result == STORE_OK)
        result = find_member(db, job, &account, &role);
    if ((result == STORE_OK || result == STORE_LAST_OWNER) && account != job->act->who.account)
        result = own < STORE_ADMIN || role > own ? STORE_FORBIDDEN : result;
    if (result == STORE_OK)
        result = STORE_RUN(db, MEMBER_CHOSEN_END, "ii", account, job->team);
    if (result == STORE_OK)
        result = STORE_RUN(db, INVITATIONS_BY_END, "ii", account, job->team);
    if (result == STORE_OK)
        result = STORE_RUN(db, MEMBER_REMOVE, "ii", job->team, account);
    return result != STORE_OK
               ? result
               : store_note(db, job->act, job->team,
                            account == job->act->who.account ? "member.leave" : "member.remove", job->name,
                            store_role_name(role));
}

store_result store_member_remove(store *it, store_act act, int64_t team, const char *name)
{
    member_job job = {&act, team, name, STORE_NO_ROLE};

    return store_write(it, remove_member, NULL, &job);
}
