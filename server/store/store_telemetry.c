/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Telemetry: how often a row of values came on a day.
 *
 * A row is one of `meta`, named "telemetry/<day>/<values>", whose value is its count. There is nothing that
 * names a sender, and nothing that could be joined with an account.
 */
#include <stdio.h>
#include <string.h>

#include "base/invariant.h"
#include "store/store_internal.h"

#define PREFIX "telemetry/"
#define DAY_BYTES 10u

typedef struct telemetry_job {
    char name[sizeof PREFIX + DAY_BYTES + 1 + STORE_TELEMETRY_BYTES];
    bool counted;
} telemetry_job;

static void name_row(char *into, size_t room, const char *day, const char *rest)
{
    int length = snprintf(into, room, PREFIX "%s%s", day, rest);

    MSC__ASSERT(length > 0 && (size_t)length < room);
}

static store_result count_rows(store_db *db, int64_t *count)
{
    sqlite3_stmt *row = store_sql(db, SQL_TELEMETRY_COUNT);

    *count = store_row(row) ? sqlite3_column_int64(row, 0) : 0;
    return store_row_end(db, row, STORE_OK);
}

static store_result add_row(store_db *db, void *user)
{
    telemetry_job *job = user;
    store_result result = STORE_RUN(db, TELEMETRY_AGAIN, "t", job->name);
    int64_t count = 0;

    job->counted = result == STORE_OK && sqlite3_changes(db->it) > 0;
    if (result != STORE_OK || job->counted)
        return result;
    result = count_rows(db, &count);
    if (result == STORE_OK && count >= STORE_TELEMETRY_ROWS)
        return STORE_TOO_MANY;
    if (result == STORE_OK)
        result = STORE_RUN(db, META_SET, "ti", job->name, INT64_C(1));
    return result;
}

store_result store_telemetry_add(store *it, const char *day, const char *values)
{
    telemetry_job job = {.counted = false};

    MSC__ASSERT(strlen(day) == DAY_BYTES && strlen(values) <= STORE_TELEMETRY_BYTES);
    name_row(job.name, sizeof job.name, day, "/");
    memcpy(job.name + strlen(job.name), values, strlen(values) + 1);
    return store_write(it, add_row, NULL, &job);
}

static store_result forget_rows(store_db *db, void *user)
{
    const telemetry_job *job = user;

    return STORE_RUN(db, TELEMETRY_OLD, "t", job->name);
}

store_result store_telemetry_forget(store *it, const char *day)
{
    telemetry_job job = {.counted = false};

    name_row(job.name, sizeof job.name, day, "");
    return store_write(it, forget_rows, NULL, &job);
}

static bool give_row(sqlite3_stmt *row, store_telemetry_each *each, void *user, store_result *result)
{
    const char *name = (const char *)sqlite3_column_text(row, 0);
    char day[DAY_BYTES + 1] = "";

    if (name == NULL) {
        *result = STORE_NO_MEMORY;
        return false;
    }
    name += sizeof PREFIX - 1;
    MSC__ASSERT(strlen(name) > DAY_BYTES && name[DAY_BYTES] == '/');
    memcpy(day, name, DAY_BYTES);
    if (!each(user, day, name + DAY_BYTES + 1, sqlite3_column_int64(row, 1)))
        *result = STORE_STOPPED;
    return *result == STORE_OK;
}

store_result store_telemetry(store *it, const char *from, const char *to, store_telemetry_each *each,
                             void *user)
{
    char first[sizeof PREFIX + DAY_BYTES + 1];
    char beyond[sizeof PREFIX + DAY_BYTES + 1];
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_TELEMETRY);
    store_result result;

    name_row(first, sizeof first, from, "");
    name_row(beyond, sizeof beyond, to, "0"); /* stands behind "/" */
    result = store_bind(row, "tt", first, beyond) ? STORE_OK : store_db_failed(db);
    while (result == STORE_OK && store_row(row))
        (void)give_row(row, each, user, &result);
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}
