/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Accounts. Passwords come as hashes; what they are hashes of is the business of `accounts`.
 */
#include <string.h>

#include "store/store_internal.h"

void store_account_row(sqlite3_stmt *row, store_account *out)
{
    out->id = sqlite3_column_int64(row, 0);
    store_column_text(row, 1, out->name, sizeof out->name);
    store_column_text(row, 2, out->password, sizeof out->password);
    out->admin = sqlite3_column_int(row, 3) != 0;
    out->created_ms = sqlite3_column_int64(row, 4);
    out->disabled_ms = store_column_time(row, 5);
}

store_result store_account_get(store_db *db, const char *name, store_account *out)
{
    sqlite3_stmt *row = store_sql(db, SQL_ACCOUNT_FIND);
    bool found = store_bind(row, "t", name) && store_row(row);
    store_result result;

    if (found)
        store_account_row(row, out);
    result = store_row_end(db, row, STORE_OK);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

store_result store_account_insert(store_db *db, store_account *account)
{
    store_result result = STORE_RUN(db, ACCOUNT_ADD, "ttii", account->name, account->password,
                                    (int64_t)account->admin, account->created_ms);

    account->id = sqlite3_last_insert_rowid(db->it);
    account->disabled_ms = STORE_NO_TIME;
    return result;
}

typedef struct account_job {
    store_account *account;
    int64_t by;
} account_job;

/* The first account of a server has the first team, which the schema has made. */
static store_result add_first(store_db *db, const store_account *account)
{
    store_result result = STORE_RUN(db, TEAM_FIRST, "i", account->created_ms);

    return result == STORE_OK ? store_member_join(db, 1, account->id, STORE_OWNER, account->created_ms)
                              : result;
}

static store_result add_account(store_db *db, void *user)
{
    const account_job *job = user;
    store_account *account = job->account;
    store_act act = {.now_ms = account->created_ms};
    store_result result;

    if (job->by == 0) {
        sqlite3_stmt *row = store_sql(db, SQL_ACCOUNT_COUNT);
        bool none = store_row(row) && sqlite3_column_int64(row, 0) == 0;

        result = store_row_end(db, row, STORE_OK);
        if (result != STORE_OK || !none)
            return result == STORE_OK ? STORE_CONFLICT : result;
    }
    result = store_account_insert(db, account);
    if (result == STORE_OK && job->by == 0)
        result = add_first(db, account);
    act.who.account = job->by == 0 ? account->id : job->by;
    return result == STORE_OK
               ? store_note(db, &act, 0, "account.make", account->name, account->admin ? "admin" : "")
               : result;
}

store_result store_account_add(store *it, store_account *account, int64_t by)
{
    account_job job = {account, by};

    return store_write(it, add_account, NULL, &job);
}

store_result store_account_find(store *it, const char *name, store_account *out)
{
    store_db *db = store_reader_get(it);
    store_result result = store_account_get(db, name, out);

    store_reader_put(it, db);
    return result;
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

store_result store_password_change(store_db *db, int64_t account, const char *password)
{
    store_result result = STORE_RUN(db, PASSWORD_SET, "ti", password, account);

    if (result == STORE_OK)
        result = STORE_RUN(db, SESSIONS_END, "i", account);
    return result == STORE_OK ? STORE_RUN(db, RESET_END, "i", account) : result;
}

typedef struct password_job {
    const store_act *act;
    const char *password;
} password_job;

static store_result set_password(store_db *db, void *user)
{
    const password_job *job = user;
    store_result result = store_password_change(db, job->act->who.account, job->password);

    return result == STORE_OK ? store_note(db, job->act, 0, "password.change", "", "") : result;
}

store_result store_password_set(store *it, store_act act, const char *password)
{
    password_job job = {&act, password};

    return store_write(it, set_password, NULL, &job);
}

/* ---- what an admin does ---------------------------------------------------------------------- */

typedef struct alter_job {
    const store_act *act;
    const char *name;
    const store_account_change *change;
    store_account *out;
} alter_job;

/* Somebody who can log in still has the server, and each team. */
static store_result check_left(store_db *db, const store_account *was, bool admin, bool disabled)
{
    store_result result = STORE_OK;

    if (was->admin && was->disabled_ms == STORE_NO_TIME && (!admin || disabled) &&
        !store_has_row(db, SQL_ADMINS_BESIDE, store_bind(store_sql(db, SQL_ADMINS_BESIDE), "i", was->id),
                       &result))
        return result == STORE_OK ? STORE_LAST_ADMIN : result;
    if (result == STORE_OK && disabled && was->disabled_ms == STORE_NO_TIME &&
        store_has_row(db, SQL_OWNS_ALONE, store_bind(store_sql(db, SQL_OWNS_ALONE), "i", was->id), &result))
        return STORE_LAST_OWNER;
    return result;
}

static store_result end_all(store_db *db, int64_t account)
{
    store_result result = STORE_RUN(db, SESSIONS_END, "i", account);

    if (result == STORE_OK)
        result = STORE_RUN(db, RESET_END, "i", account);
    return result == STORE_OK ? STORE_RUN(db, INVITATIONS_BY_END, "ii", account, (int64_t)0) : result;
}

static store_result alter_account(store_db *db, void *user)
{
    const alter_job *job = user;
    store_account was = {.disabled_ms = STORE_NO_TIME};
    store_result result = store_account_get(db, job->name, &was);
    bool admin = job->change->admin >= 0 ? job->change->admin == 1 : was.admin;
    bool disabled =
        job->change->disabled >= 0 ? job->change->disabled == 1 : was.disabled_ms != STORE_NO_TIME;
    bool turns = result == STORE_OK && disabled != (was.disabled_ms != STORE_NO_TIME);

    if (result == STORE_OK)
        result = check_left(db, &was, admin, disabled);
    if (result == STORE_OK)
        result = STORE_RUN(db, ACCOUNT_ALTER, "ini", (int64_t)admin,
                           turns ? (disabled ? job->act->now_ms : STORE_NO_TIME) : was.disabled_ms, was.id);
    if (result == STORE_OK && disabled)
        result = end_all(db, was.id);
    if (result == STORE_OK && (disabled || !admin))
        result = STORE_RUN(db, RESETS_BY_END, "i", was.id);
    if (result == STORE_OK && admin != was.admin)
        result = store_note(db, job->act, 0, "account.admin", was.name, admin ? "yes" : "no");
    if (result == STORE_OK && turns)
        result = store_note(db, job->act, 0, disabled ? "account.disable" : "account.enable", was.name, "");
    return result == STORE_OK ? store_account_get(db, job->name, job->out) : result;
}

store_result store_account_alter(store *it, store_act act, const char *name,
                                 const store_account_change *change, store_account *out)
{
    alter_job job = {&act, name, change, out};

    return store_write(it, alter_account, NULL, &job);
}
