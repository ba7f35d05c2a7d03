/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The audit log. A line is written in the transaction of the change, so there is neither a change without its
 * line nor a line without its change; triggers keep both from being altered. Names are those of the time.
 */
#include <stdio.h>
#include <string.h>

#include "store/store_internal.h"

store_result store_note(store_db *db, const store_act *act, int64_t team, const char *action,
                        const char *thing, const char *detail)
{
    int64_t account = act->who.account == 0 ? STORE_NO_TIME : act->who.account;

    return STORE_RUN(db, AUDIT_ADD, "innttt", act->now_ms, team == 0 ? STORE_NO_TIME : team, account, action,
                     thing, detail);
}

static store_result read_entries(store_db *db, sqlite3_stmt *row, bool bound, store_entry_each *each,
                                 void *user)
{
    store_result result = bound ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && store_row(row)) {
        store_entry entry;

        entry.id = sqlite3_column_int64(row, 0);
        entry.time_ms = sqlite3_column_int64(row, 1);
        store_column_text(row, 2, entry.by, sizeof entry.by);
        store_column_text(row, 3, entry.action, sizeof entry.action);
        store_column_text(row, 4, entry.thing, sizeof entry.thing);
        store_column_text(row, 5, entry.detail, sizeof entry.detail);
        if (!each(user, &entry))
            result = STORE_STOPPED;
    }
    return store_row_end(db, row, result);
}

store_result store_team_entries(store *it, store_who who, int64_t team, int64_t before, uint32_t limit,
                                store_entry_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    store_role role;
    store_result result = store_team_role(db, who, team, STORE_ADMIN, &role);

    if (result == STORE_OK) {
        sqlite3_stmt *row = store_sql(db, SQL_TEAM_ENTRIES);

        result = read_entries(db, row, store_bind(row, "iii", team, before, (int64_t)limit), each, user);
    }
    store_reader_put(it, db);
    return result;
}

store_result store_server_entries(store *it, int64_t before, uint32_t limit, store_entry_each *each,
                                  void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_SERVER_ENTRIES);
    store_result result = read_entries(db, row, store_bind(row, "ii", before, (int64_t)limit), each, user);

    store_reader_put(it, db);
    return result;
}
