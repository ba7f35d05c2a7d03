/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sessions and tokens. Secrets come as hashes; what they are hashes of, and until when they count, is the
 * business of `accounts`.
 */
#include <string.h>

#include "store/store_internal.h"

#define ACCOUNT_COLUMNS STORE_ACCOUNT_WIDTH

/* ---- sessions -------------------------------------------------------------------------------- */

typedef struct session_job {
    const store_session *session;
    const uint8_t *hash;
    int64_t ms;
} session_job;

static store_result add_session(store_db *db, void *user)
{
    const session_job *job = user;
    const store_session *session = job->session;
    const store_act act = {{.account = session->account.id}, session->created_ms};
    store_result result = STORE_RUN(db, SESSIONS_OLD, "i", job->ms);

    if (result == STORE_OK)
        result = STORE_RUN(db, SESSION_ADD, "biii", (const void *)session->hash, (size_t)STORE_HASH_BYTES,
                           session->account.id, session->created_ms, session->used_ms);
    return result == STORE_OK ? store_note(db, &act, 0, "session.begin", "", "") : result;
}

static store_result use_session(store_db *db, void *user)
{
    const session_job *job = user;

    return STORE_RUN(db, SESSION_USED, "ib", job->ms, (const void *)job->hash, (size_t)STORE_HASH_BYTES);
}

static store_result end_session(store_db *db, void *user)
{
    const session_job *job = user;

    return STORE_RUN(db, SESSION_END, "b", (const void *)job->hash, (size_t)STORE_HASH_BYTES);
}

store_result store_session_add(store *it, const store_session *session, int64_t oldest_ms)
{
    session_job job = {session, NULL, oldest_ms};

    return store_write(it, add_session, NULL, &job);
}

store_result store_session_used(store *it, const uint8_t *hash, int64_t now_ms)
{
    session_job job = {NULL, hash, now_ms};

    return store_write(it, use_session, NULL, &job);
}

store_result store_session_end(store *it, const uint8_t *hash)
{
    session_job job = {NULL, hash, 0};

    return store_write(it, end_session, NULL, &job);
}

static void session_row(sqlite3_stmt *row, store_session *out)
{
    const void *hash = sqlite3_column_blob(row, ACCOUNT_COLUMNS);

    memset(out, 0, sizeof *out);
    store_account_row(row, &out->account);
    if (hash != NULL && sqlite3_column_bytes(row, ACCOUNT_COLUMNS) == (int)STORE_HASH_BYTES)
        memcpy(out->hash, hash, STORE_HASH_BYTES);
    out->created_ms = sqlite3_column_int64(row, ACCOUNT_COLUMNS + 1);
    out->used_ms = sqlite3_column_int64(row, ACCOUNT_COLUMNS + 2);
}

store_result store_session_find(store *it, const uint8_t *hash, store_session *out)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_SESSION_FIND);
    bool found = store_bind(row, "b", (const void *)hash, (size_t)STORE_HASH_BYTES) && store_row(row);
    store_result result;

    if (found)
        session_row(row, out);
    result = store_row_end(db, row, STORE_OK);
    store_reader_put(it, db);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

store_result store_sessions(store *it, int64_t account, int64_t oldest_ms, int64_t idle_ms,
                            store_session_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_SESSIONS);
    store_result result =
        store_bind(row, "iii", account, oldest_ms, idle_ms) ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && store_row(row)) {
        store_session session;

        session_row(row, &session);
        if (!each(user, &session))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}

typedef struct revoke_job {
    const store_act *act;
    const uint8_t *hash;
    const char *id;
} revoke_job;

static store_result revoke_session(store_db *db, void *user)
{
    const revoke_job *job = user;
    store_result result = STORE_RUN(db, SESSION_REVOKE, "bi", (const void *)job->hash,
                                    (size_t)STORE_HASH_BYTES, job->act->who.account);

    if (result == STORE_OK && sqlite3_changes(db->it) == 0)
        result = STORE_NOT_FOUND;
    return result == STORE_OK ? store_note(db, job->act, 0, "session.end", "", "") : result;
}

store_result store_session_revoke(store *it, store_act act, const uint8_t *hash)
{
    revoke_job job = {.act = &act, .hash = hash};

    return store_write(it, revoke_session, NULL, &job);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

typedef struct token_job {
    const store_token *token;
    const char *id;
    int64_t now_ms;
} token_job;

/* What a token is bound to must be its account's to see. */
static store_result check_bound(store_db *db, const store_token *token)
{
    store_who who = {.account = token->account.id};
    store_project project;
    store_role role;

    if (token->project != 0)
        return store_project_get(db, who, token->project, &project);
    return token->team != 0 ? store_team_role(db, who, token->team, STORE_VIEWER, &role) : STORE_OK;
}

static store_result add_token(store_db *db, void *user)
{
    const store_token *token = ((const token_job *)user)->token;
    const store_act act = {{.account = token->account.id}, token->created_ms};
    store_result result = check_bound(db, token);

    if (result == STORE_OK)
        result =
            STORE_RUN(db, TOKEN_ADD, "tibtiinii", token->id, token->account.id, (const void *)token->hash,
                      (size_t)STORE_HASH_BYTES, token->name, (int64_t)token->scopes, token->created_ms,
                      token->expires_ms, token->team, token->project);
    return result == STORE_OK ? store_note(db, &act, 0, "token.make", token->id, token->name) : result;
}

static store_result use_token(store_db *db, void *user)
{
    const token_job *job = user;

    return STORE_RUN(db, TOKEN_USED, "it", job->now_ms, job->id);
}

static store_result revoke_token(store_db *db, void *user)
{
    const revoke_job *job = user;
    store_result result =
        STORE_RUN(db, TOKEN_REVOKE, "iti", job->act->now_ms, job->id, job->act->who.account);

    if (result == STORE_OK && sqlite3_changes(db->it) == 0)
        result = STORE_NOT_FOUND;
    return result == STORE_OK ? store_note(db, job->act, 0, "token.revoke", job->id, "") : result;
}

store_result store_token_add(store *it, const store_token *token)
{
    token_job job = {token, NULL, 0};

    return store_write(it, add_token, NULL, &job);
}

store_result store_token_used(store *it, const char *id, int64_t now_ms)
{
    token_job job = {NULL, id, now_ms};

    return store_write(it, use_token, NULL, &job);
}

store_result store_token_revoke(store *it, store_act act, const char *id)
{
    revoke_job job = {.act = &act, .id = id};

    return store_write(it, revoke_token, NULL, &job);
}

static void token_row(sqlite3_stmt *row, store_token *out)
{
    const void *hash = sqlite3_column_blob(row, ACCOUNT_COLUMNS + 1);

    memset(out, 0, sizeof *out);
    store_account_row(row, &out->account);
    store_column_text(row, ACCOUNT_COLUMNS, out->id, sizeof out->id);
    if (hash != NULL && sqlite3_column_bytes(row, ACCOUNT_COLUMNS + 1) == (int)STORE_HASH_BYTES)
        memcpy(out->hash, hash, STORE_HASH_BYTES);
    store_column_text(row, ACCOUNT_COLUMNS + 2, out->name, sizeof out->name);
    out->scopes = (uint32_t)sqlite3_column_int64(row, ACCOUNT_COLUMNS + 3);
    out->created_ms = sqlite3_column_int64(row, ACCOUNT_COLUMNS + 4);
    out->expires_ms = store_column_time(row, ACCOUNT_COLUMNS + 5);
    out->used_ms = store_column_time(row, ACCOUNT_COLUMNS + 6);
    out->revoked_ms = store_column_time(row, ACCOUNT_COLUMNS + 7);
    out->team = sqlite3_column_int64(row, ACCOUNT_COLUMNS + 8);
    out->project = sqlite3_column_int64(row, ACCOUNT_COLUMNS + 9);
}

store_result store_token_find(store *it, const char *id, store_token *out)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_TOKEN_FIND);
    bool found = store_bind(row, "t", id) && store_row(row);
    store_result result;

    if (found)
        token_row(row, out);
    result = store_row_end(db, row, STORE_OK);
    store_reader_put(it, db);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

store_result store_tokens(store *it, int64_t account, bool revoked, store_token_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_TOKENS);
    store_result result = store_bind(row, "ii", account, (int64_t)revoked) ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && store_row(row)) {
        store_token token;

        token_row(row, &token);
        if (!each(user, &token))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}
