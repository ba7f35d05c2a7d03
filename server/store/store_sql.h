/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file store_sql.h One connection to SQLite with its statements, and how they are run. Of `store` alone.
 */
#ifndef MSC_SERVER_STORE_SQL_H
#define MSC_SERVER_STORE_SQL_H

#include <sqlite3.h>

#include "store/store.h"

/** Every statement that is prepared once for a connection: store_statements.h has them. */
typedef enum store_sql_id {
#define STORE_SQL(name, text) SQL_##name,
#include "store/store_statements.h"
#undef STORE_SQL
    SQL_COUNT
} store_sql_id;

typedef struct store_db {
    sqlite3 *it;
    sqlite3_stmt *statements[SQL_COUNT];
    int64_t deadline_ns; /**< 0: none */
} store_db;

/** Opens a file with what every connection has set. Errors: EIO, ENOMEM. */
msc_status store_db_open(store_db *db, const char *path, bool reads_only, msc_error *err);
void store_db_close(store_db *db);

/** A statement, reset, ready to be given its values; NULL: `store_db_failed` says why. */
sqlite3_stmt *store_sql(store_db *db, store_sql_id id);

/**
 * Gives values to the parameters of a statement in order: 'i' int64_t, 't' text or NULL, 'b' const void * and
 * size_t, 'd' double, 'n' int64_t where STORE_NO_TIME is NULL. `statement` may be NULL. Texts must live until
 * it has run.
 */
bool store_bind(sqlite3_stmt *statement, const char *types, ...);

/** Runs to the next row: true; false: no more, or failed, which `store_row_end` distinguishes. */
bool store_row(sqlite3_stmt *statement);
/** Ends reading. `found` of STORE_OK becomes the failure of the statement, if there was one. */
store_result store_row_end(store_db *db, sqlite3_stmt *statement, store_result found);

/** Prepares, gives values and runs a statement that returns nothing. */
#define STORE_RUN(db, name, ...)                                                                             \
    store_run_bound((db), store_bind(store_sql((db), SQL_##name), __VA_ARGS__), SQL_##name)
store_result store_run_bound(store_db *db, bool bound, store_sql_id id);

/** What a failure of the connection's last call means. */
store_result store_db_failed(store_db *db);
store_result store_meaning(int code);

/** Text of a column into an array, cut to its size. */
void store_column_text(sqlite3_stmt *statement, int column, char *into, size_t room);
/** A double; NULL is NaN, as SQLite has none. */
double store_column_double(sqlite3_stmt *statement, int column);
/** A time or step; NULL is STORE_NO_TIME. */
int64_t store_column_time(sqlite3_stmt *statement, int column);

#endif /* MSC_SERVER_STORE_SQL_H */
