/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Invitations and reset links: secrets that were handed to somebody, kept as hashes, used once. What has been
 * used or revoked is deleted; the audit log remembers it.
 */
#include <stdio.h>
#include <string.h>

#include "store/store_internal.h"

typedef struct invitation_job {
    const store_act *act;
    const store_invitation *invitation;
    int64_t team;
    const char *id;
    const uint8_t *hash;
    store_account *account;
    int64_t now_ms;
} invitation_job;

static void invitation_row(sqlite3_stmt *row, store_invitation *out)
{
    const void *hash = sqlite3_column_blob(row, 1);

    memset(out, 0, sizeof *out);
    store_column_text(row, 0, out->id, sizeof out->id);
    if (hash != NULL && sqlite3_column_bytes(row, 1) == (int)STORE_HASH_BYTES)
        memcpy(out->hash, hash, STORE_HASH_BYTES);
    out->team = sqlite3_column_int64(row, 2);
    store_column_text(row, 3, out->team_name, sizeof out->team_name);
    out->role = (store_role)sqlite3_column_int(row, 4);
    store_column_text(row, 5, out->by, sizeof out->by);
    out->created_ms = sqlite3_column_int64(row, 6);
    out->expires_ms = sqlite3_column_int64(row, 7);
}

static store_result get_invitation(store_db *db, const char *id, store_invitation *out)
{
    sqlite3_stmt *row = store_sql(db, SQL_INVITATION_FIND);
    bool found = store_bind(row, "t", id) && store_row(row);
    store_result result;

    if (found)
        invitation_row(row, out);
    result = store_row_end(db, row, STORE_OK);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

/* TOO_MANY if a team has as many as it may. */
static store_result count_invitations(store_db *db, int64_t team)
{
    sqlite3_stmt *row = store_sql(db, SQL_INVITATIONS_COUNT);
    int64_t count = store_bind(row, "i", team) && store_row(row) ? sqlite3_column_int64(row, 0) : 0;
    store_result result = store_row_end(db, row, STORE_OK);

    return result == STORE_OK && count >= STORE_OPEN_INVITATIONS ? STORE_TOO_MANY : result;
}

static store_result add_invitation(store_db *db, void *user)
{
    const invitation_job *job = user;
    const store_invitation *from = job->invitation;
    const store_act *act = job->act;
    store_role role;
    store_result result = store_team_role(db, act->who, from->team, STORE_ADMIN, &role);

    if (result == STORE_OK && from->role > role)
        result = STORE_FORBIDDEN;
    if (result == STORE_OK)
        result = STORE_RUN(db, INVITATIONS_OLD, "i", act->now_ms);
    if (result == STORE_OK)
        result = count_invitations(db, from->team);
    if (result == STORE_OK)
        result = STORE_RUN(db, INVITATION_ADD, "tibiiii", from->id, from->team, (const void *)from->hash,
                           (size_t)STORE_HASH_BYTES, (int64_t)from->role, act->who.account, act->now_ms,
                           from->expires_ms);
    return result == STORE_OK
               ? store_note(db, act, from->team, "invitation.make", from->id, store_role_name(from->role))
               : result;
}

store_result store_invitation_add(store *it, store_act act, const store_invitation *invitation)
{
    invitation_job job = {.act = &act, .invitation = invitation};

    return store_write(it, add_invitation, NULL, &job);
}

store_result store_invitations(store *it, store_who who, int64_t team, store_invitation_each *each,
                               void *user)
{
    store_db *db = store_reader_get(it);
    store_role role;
    store_result result = store_team_role(db, who, team, STORE_ADMIN, &role);
    sqlite3_stmt *row = store_sql(db, SQL_INVITATIONS);

    if (result == STORE_OK && !store_bind(row, "i", team))
        result = store_db_failed(db);
    while (result == STORE_OK && store_row(row)) {
        store_invitation invitation;

        invitation_row(row, &invitation);
        if (!each(user, &invitation))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}

static store_result revoke_invitation(store_db *db, void *user)
{
    const invitation_job *job = user;
    store_role role;
    store_result result = store_team_role(db, job->act->who, job->team, STORE_ADMIN, &role);

    if (result == STORE_OK)
        result = STORE_RUN(db, INVITATION_END, "ti", job->id, job->team);
    if (result == STORE_OK && sqlite3_changes(db->it) == 0)
        result = STORE_NOT_FOUND;
    return result == STORE_OK ? store_note(db, job->act, job->team, "invitation.revoke", job->id, "")
                              : result;
}

store_result store_invitation_revoke(store *it, store_act act, int64_t team, const char *id)
{
    invitation_job job = {.act = &act, .team = team, .id = id};

    return store_write(it, revoke_invitation, NULL, &job);
}

store_result store_invitation_find(store *it, const char *id, store_invitation *out)
{
    store_db *db = store_reader_get(it);
    store_result result = get_invitation(db, id, out);

    store_reader_put(it, db);
    return result;
}

/* The account that accepts: a new one, or as it is now. */
static store_result accepting_account(store_db *db, store_account *account)
{
    sqlite3_stmt *row;
    bool found;
    store_result result;

    if (account->id == 0)
        return store_account_insert(db, account);
    row = store_sql(db, SQL_ACCOUNT_GET);
    found = store_bind(row, "i", account->id) && store_row(row);
    if (found)
        store_account_row(row, account);
    result = store_row_end(db, row, STORE_OK);
    return result == STORE_OK && (!found || account->disabled_ms != STORE_NO_TIME) ? STORE_NOT_FOUND : result;
}

static store_result accept_invitation(store_db *db, void *user)
{
    const invitation_job *job = user;
    store_invitation invitation;
    store_account account = *job->account; /* this may be done twice */
    store_act act = {.now_ms = job->now_ms};
    store_result result = get_invitation(db, job->id, &invitation);

    if (result == STORE_OK &&
        (memcmp(invitation.hash, job->hash, STORE_HASH_BYTES) != 0 || invitation.expires_ms <= job->now_ms))
        result = STORE_NOT_FOUND;
    if (result == STORE_OK)
        result = accepting_account(db, &account);
    if (result == STORE_OK)
        result = store_member_join(db, invitation.team, account.id, invitation.role, job->now_ms);
    if (result == STORE_OK)
        result = STORE_RUN(db, INVITATION_END, "ti", invitation.id, invitation.team);
    act.who.account = account.id;
    if (result == STORE_OK && job->account->id == 0)
        result = store_note(db, &act, 0, "account.make", account.name, "by an invitation");
    if (result == STORE_OK)
        result = store_note(db, &act, invitation.team, "invitation.accept", invitation.id,
                            store_role_name(invitation.role));
    if (result == STORE_OK)
        *job->account = account;
    return result;
}

store_result store_invitation_accept(store *it, const char *id, const uint8_t *hash, store_account *account,
                                     int64_t now_ms)
{
    store_account made = *account;
    invitation_job job = {.id = id, .hash = hash, .account = &made, .now_ms = now_ms};
    store_result result = store_write(it, accept_invitation, NULL, &job);

    if (result == STORE_OK)
        *account = made;
    return result;
}

/* ---- reset links ----------------------------------------------------------------------------- */

typedef struct reset_job {
    const store_act *act;
    const char *name;
    const uint8_t *hash;
    int64_t ms; /* when it expires; or now */
    const char *password;
    store_account *account;
} reset_job;

static store_result add_reset(store_db *db, void *user)
{
    const reset_job *job = user;
    store_account account;
    store_result result = store_account_get(db, job->name, &account);

    if (result == STORE_OK)
        result = STORE_RUN(db, RESET_ADD, "ibii", account.id, (const void *)job->hash,
                           (size_t)STORE_HASH_BYTES, job->ms, job->act->who.account);
    return result == STORE_OK ? store_note(db, job->act, 0, "reset.make", job->name, "") : result;
}

store_result store_reset_add(store *it, store_act act, const char *name, const uint8_t *hash,
                             int64_t expires_ms)
{
    reset_job job = {.act = &act, .name = name, .hash = hash, .ms = expires_ms};

    return store_write(it, add_reset, NULL, &job);
}

static store_result get_reset(store_db *db, const uint8_t *hash, int64_t now_ms, store_account *out)
{
    sqlite3_stmt *row = store_sql(db, SQL_RESET_FIND);
    bool found =
        store_bind(row, "bi", (const void *)hash, (size_t)STORE_HASH_BYTES, now_ms) && store_row(row);
    store_result result;

    if (found)
        store_account_row(row, out);
    result = store_row_end(db, row, STORE_OK);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

store_result store_reset_find(store *it, const uint8_t *hash, int64_t now_ms, store_account *out)
{
    store_db *db = store_reader_get(it);
    store_result result = get_reset(db, hash, now_ms, out);

    store_reader_put(it, db);
    return result;
}

static store_result use_reset(store_db *db, void *user)
{
    const reset_job *job = user;
    store_act act = {.now_ms = job->ms};
    store_result result = get_reset(db, job->hash, job->ms, job->account);

    act.who.account = job->account->id;
    if (result == STORE_OK)
        result = store_password_change(db, job->account->id, job->password);
    return result == STORE_OK ? store_note(db, &act, 0, "password.reset", job->account->name, "") : result;
}

store_result store_reset_use(store *it, const uint8_t *hash, const char *password, int64_t now_ms,
                             store_account *out)
{
    reset_job job = {.hash = hash, .ms = now_ms, .password = password, .account = out};

    memset(out, 0, sizeof *out);
    return store_write(it, use_reset, NULL, &job);
}
