/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Accounts, sessions and tokens. Secrets come as hashes; what they are hashes of, and until when they count,
 * is the business of `accounts`.
 */
#include <string.h>

#include "store/store_internal.h"

#define ACCOUNT_COLUMNS 5

void store_account_row(sqlite3_stmt *row, store_account *out)
{
    out->id = sqlite3_column_int64(row, 0);
    store_column_text(row, 1, out->name, sizeof out->name);
    store_column_text(row, 2, out->password, sizeof out->password);
    out->admin = sqlite3_column_int(row, 3) != 0;
    out->created_ms = sqlite3_column_int64(row, 4);
}

typedef struct account_job {
    store_account *account;
    bool only_first;
} account_job;

static store_result add_account(store_db *db, void *user)
{
    const account_job *job = user;
    store_account *account = job->account;
    store_result result;

    if (job->only_first) {
        sqlite3_stmt *row = store_sql(db, SQL_ACCOUNT_COUNT);
        bool none = store_row(row) && sqlite3_column_int64(row, 0) == 0;

        result = store_row_end(db, row, STORE_OK);
        if (result != STORE_OK || !none)
            return result == STORE_OK ? STORE_CONFLICT : result;
    }
    result = STORE_RUN(db, ACCOUNT_ADD, "ttii", account->name, account->password, (int64_t)account->admin,
                       account->created_ms);
    account->id = sqlite3_last_insert_rowid(db->it);
    return result;
}

store_result store_account_add(store *it, store_account *account, bool only_first)
{
    account_job job = {account, only_first};

    return store_write(it, add_account, NULL, &job);
}

store_result store_account_find(store *it, const char *name, store_account *out)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_ACCOUNT_FIND);
    bool found = store_bind(row, "t", name) && store_row(row);
    store_result result;

    if (found)
        store_account_row(row, out);
    result = store_row_end(db, row, STORE_OK);
    store_reader_put(it, db);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

store_result store_account_count(store *it, int64_t *count)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_ACCOUNT_COUNT);
    store_result result;

    *count = store_row(row) ? sqlite3_column_int64(row, 0) : 0;
    result = store_row_end(db, row, STORE_OK);
    store_reader_put(it, db);
    return result;
}

store_result store_accounts(store *it, store_account_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_ACCOUNTS);
    store_result result = STORE_OK;

    while (result == STORE_OK && store_row(row)) {
        store_account account;

        store_account_row(row, &account);
        if (!each(user, &account))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}

typedef struct password_job {
    int64_t account;
    const char *password;
} password_job;

static store_result set_password(store_db *db, void *user)
{
    const password_job *job = user;
    store_result result = STORE_RUN(db, PASSWORD_SET, "ti", job->password, job->account);

    return result == STORE_OK ? STORE_RUN(db, SESSIONS_END, "i", job->account) : result;
}

store_result store_password_set(store *it, int64_t account, const char *password)
{
    password_job job = {account, password};

    return store_write(it, set_password, NULL, &job);
}

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
    store_result result = STORE_RUN(db, SESSIONS_OLD, "i", job->ms);

    return result != STORE_OK
               ? result
               : STORE_RUN(db, SESSION_ADD, "biii", (const void *)session->hash, (size_t)STORE_HASH_BYTES,
                           session->account.id, session->created_ms, session->used_ms);
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

store_result store_session_find(store *it, const uint8_t *hash, store_session *out)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_SESSION_FIND);
    bool found = store_bind(row, "b", (const void *)hash, (size_t)STORE_HASH_BYTES) && store_row(row);
    store_result result;

    if (found) {
        memcpy(out->hash, hash, STORE_HASH_BYTES);
        store_account_row(row, &out->account);
        out->created_ms = sqlite3_column_int64(row, ACCOUNT_COLUMNS);
        out->used_ms = sqlite3_column_int64(row, ACCOUNT_COLUMNS + 1);
    }
    result = store_row_end(db, row, STORE_OK);
    store_reader_put(it, db);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

typedef struct token_job {
    const store_token *token;
    const char *id;
    int64_t number; /* a time, or an account */
} token_job;

static store_result add_token(store_db *db, void *user)
{
    const store_token *token = ((const token_job *)user)->token;

    return STORE_RUN(db, TOKEN_ADD, "tibtiin", token->id, token->account.id, (const void *)token->hash,
                     (size_t)STORE_HASH_BYTES, token->name, (int64_t)token->scopes, token->created_ms,
                     token->expires_ms);
}

static store_result use_token(store_db *db, void *user)
{
    const token_job *job = user;

    return STORE_RUN(db, TOKEN_USED, "it", job->number, job->id);
}

static store_result revoke_token(store_db *db, void *user)
{
    const token_job *job = user;
    store_result result = STORE_RUN(db, TOKEN_REVOKE, "ti", job->id, job->number);

    return result == STORE_OK && sqlite3_changes(db->it) == 0 ? STORE_NOT_FOUND : result;
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

store_result store_token_revoke(store *it, int64_t account, const char *id)
{
    token_job job = {NULL, id, account};

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

store_result store_tokens(store *it, int64_t account, store_token_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_TOKENS);
    store_result result = store_bind(row, "i", account) ? STORE_OK : store_db_failed(db);

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
