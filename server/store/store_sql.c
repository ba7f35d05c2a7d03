/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection and its statements.
 *
 * A statement is prepared when it is first needed and kept. Values are always bound, so no text of a client
 * is ever part of SQL. A connection that reads has a deadline, which SQLite is asked about every thousand
 * steps of its machine.
 */
#include "store/store_sql.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/thread.h"

static const char *const texts[SQL_COUNT] = {
#define STORE_SQL(name, text) [SQL_##name] = (text),
#include "store/store_statements.h"
#undef STORE_SQL
};

#define STEPS_BETWEEN_LOOKS 1000

static int is_late(void *user)
{
    const store_db *db = user;

    return db->deadline_ns != 0 && msc__clock_ns() > db->deadline_ns;
}

msc_status store_db_open(store_db *db, const char *path, bool reads_only, msc_error *err)
{
    static const char *const settings =
        "PRAGMA busy_timeout = 5000; PRAGMA foreign_keys = ON; PRAGMA mmap_size = 0;"
        "PRAGMA trusted_schema = OFF; PRAGMA temp_store = MEMORY;";
    int flags = reads_only ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
    int code;

    memset(db, 0, sizeof *db);
    code = sqlite3_open_v2(path, &db->it, flags | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE, NULL);
    if (code == SQLITE_OK)
        code = sqlite3_exec(db->it, settings, NULL, NULL, NULL);
    if (code != SQLITE_OK) {
        msc_status status = store_meaning(code) == STORE_NO_MEMORY ? MSC_ENOMEM : MSC_EIO;

        msc__ignore(msc__fail(err, status, "cannot open %s: %s", path,
                              db->it == NULL ? sqlite3_errstr(code) : sqlite3_errmsg(db->it)));
        store_db_close(db);
        return status;
    }
    (void)sqlite3_db_config(db->it, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    if (reads_only)
        sqlite3_progress_handler(db->it, STEPS_BETWEEN_LOOKS, is_late, db);
    return MSC_OK;
}

void store_db_close(store_db *db)
{
    size_t i;

    for (i = 0; i < SQL_COUNT; i++)
        (void)sqlite3_finalize(db->statements[i]);
    (void)sqlite3_close(db->it);
    memset(db, 0, sizeof *db);
}

sqlite3_stmt *store_sql(store_db *db, store_sql_id id)
{
    sqlite3_stmt **kept = &db->statements[id];

    if (*kept == NULL)
        (void)sqlite3_prepare_v3(db->it, texts[id], -1, SQLITE_PREPARE_PERSISTENT, kept, NULL);
    else
        (void)sqlite3_reset(*kept);
    return *kept;
}

bool store_bind(sqlite3_stmt *statement, const char *types, ...)
{
    va_list values;
    int code = statement == NULL ? SQLITE_ERROR : SQLITE_OK;
    int i;

    MSC__ASSERT(statement == NULL || sqlite3_bind_parameter_count(statement) == (int)strlen(types));
    va_start(values, types);
    for (i = 1; code == SQLITE_OK && types[i - 1] != '\0'; i++) {
        char type = types[i - 1];

        if (type == 't') {
            code = sqlite3_bind_text(statement, i, va_arg(values, const char *), -1, SQLITE_STATIC);
        } else if (type == 'b') {
            const void *data = va_arg(values, const void *);

            code = sqlite3_bind_blob64(statement, i, data, va_arg(values, size_t), SQLITE_STATIC);
        } else if (type == 'd') {
            code = sqlite3_bind_double(statement, i, va_arg(values, double));
        } else {
            int64_t number = va_arg(values, int64_t);

            code = type == 'n' && number == STORE_NO_TIME ? sqlite3_bind_null(statement, i)
                                                          : sqlite3_bind_int64(statement, i, number);
        }
    }
    va_end(values);
    return code == SQLITE_OK;
}

bool store_row(sqlite3_stmt *statement)
{
    return statement != NULL && sqlite3_step(statement) == SQLITE_ROW;
}

store_result store_row_end(store_db *db, sqlite3_stmt *statement, store_result found)
{
    int code;

    if (statement == NULL)
        return store_db_failed(db);
    code = sqlite3_reset(statement); /* the failure of its last step */
    return code != SQLITE_OK && found == STORE_OK ? store_meaning(code) : found;
}

store_result store_run_bound(store_db *db, bool bound, store_sql_id id)
{
    sqlite3_stmt *statement = db->statements[id];
    int code;

    if (!bound)
        return store_db_failed(db);
    while ((code = sqlite3_step(statement)) == SQLITE_ROW)
        ;
    (void)sqlite3_reset(statement);
    return code == SQLITE_DONE ? STORE_OK : store_meaning(code);
}

store_result store_meaning(int code)
{
    switch (code & 0xff) {
    case SQLITE_OK:
    case SQLITE_ROW:
    case SQLITE_DONE:
        return STORE_OK;
    case SQLITE_CONSTRAINT:
        return STORE_CONFLICT;
    case SQLITE_FULL:
        return STORE_FULL;
    case SQLITE_NOMEM:
        return STORE_NO_MEMORY;
    case SQLITE_INTERRUPT:
        return STORE_LATE;
    case SQLITE_IOERR: /* quotas and limits on a file's size are not ENOSPC, which SQLite calls full */
        return code == SQLITE_IOERR_WRITE || code == SQLITE_IOERR_SHMSIZE ? STORE_FULL
               : code == SQLITE_IOERR_NOMEM                               ? STORE_NO_MEMORY
                                                                          : STORE_FAILED;
    default:
        return STORE_FAILED;
    }
}

store_result store_db_failed(store_db *db)
{
    store_result result = store_meaning(sqlite3_extended_errcode(db->it));

    return result == STORE_OK ? STORE_FAILED : result;
}

void store_column_text(sqlite3_stmt *statement, int column, char *into, size_t room)
{
    const unsigned char *text = sqlite3_column_text(statement, column);

    (void)snprintf(into, room, "%s", text == NULL ? "" : (const char *)text);
}

double store_column_double(sqlite3_stmt *statement, int column)
{
    return sqlite3_column_type(statement, column) == SQLITE_NULL ? (double)NAN
                                                                 : sqlite3_column_double(statement, column);
}

int64_t store_column_time(sqlite3_stmt *statement, int column)
{
    return sqlite3_column_type(statement, column) == SQLITE_NULL ? STORE_NO_TIME
                                                                 : sqlite3_column_int64(statement, column);
}
