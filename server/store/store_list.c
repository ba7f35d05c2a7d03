/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A page of a project's runs.
 *
 * Pages go by key: the next begins after the sort's value and the key of the last run, which an index finds
 * at once, however many pages came before. Each combination of sort, direction and filter is another
 * statement; its text is put together of the parts below, and never of what a client has sent.
 */
#include <stdio.h>
#include <string.h>

#include "base/invariant.h"
#include "store/store_internal.h"

#define MOST_TEXT 1024

typedef struct statement_text {
    char text[MOST_TEXT];
    size_t length;
} statement_text;

static void add(statement_text *to, const char *part)
{
    size_t bytes = strlen(part);

    MSC__ASSERT(to->length + bytes < sizeof to->text);
    memcpy(to->text + to->length, part, bytes + 1);
    to->length += bytes;
}

static const char *sort_column(store_sort sort)
{
    return sort == STORE_BY_NAME ? "r.name" : sort == STORE_BY_SEEN ? "r.seen_ms" : "r.created_ms";
}

/* Numbered parameters: 1 project, 2 archived, 3 limit, 4 the lost line, 5 state, 6 search, 7 the sort's
   value, 8 key, 9 account. */
static void write_statement(const store_runs_query *query, statement_text *to)
{
    const char *column = sort_column(query->sort);

    add(to, "SELECT " STORE_RUN_COLUMNS " FROM run r WHERE r.project = ?1 AND r.archived = ?2"
            " AND EXISTS(SELECT 1 FROM reach WHERE project = ?1 AND account = ?9)");
    if (query->state == STORE_LOST)
        add(to, " AND r.state = ?5 AND r.seen_ms < ?4");
    else if (query->state == STORE_RUNNING)
        add(to, " AND r.state = ?5 AND r.seen_ms >= ?4");
    else if (query->state != STORE_ANY)
        add(to, " AND r.state = ?5");
    if (query->search != NULL)
        add(to, " AND r.name LIKE ?6 ESCAPE '\\'");
    if (query->resumes) {
        add(to, " AND (");
        add(to, column);
        add(to, query->descending ? ", r.id) < (?7, ?8)" : ", r.id) > (?7, ?8)");
    }
    add(to, " ORDER BY ");
    add(to, column);
    add(to, query->descending ? " DESC, r.id DESC LIMIT ?3" : ", r.id LIMIT ?3");
}

/* The text between percent signs, with those of its own marked. */
static void write_pattern(const char *search, char *into)
{
    *into++ = '%';
    for (; *search != '\0'; search++) {
        if (*search == '%' || *search == '_' || *search == '\\')
            *into++ = '\\';
        *into++ = *search;
    }
    *into++ = '%';
    *into = '\0';
}

/* Those parameters that the text has; others are out of its range, or not looked at. */
static bool give(int code)
{
    return code == SQLITE_OK || code == SQLITE_RANGE;
}

static bool give_values(sqlite3_stmt *row, const store_runs_query *query, const char *pattern)
{
    int64_t state = query->state == STORE_LOST ? STORE_RUNNING : query->state;
    bool by_name = query->sort == STORE_BY_NAME;

    return give(sqlite3_bind_int64(row, 1, query->project)) &&
           give(sqlite3_bind_int64(row, 2, query->archived)) &&
           give(sqlite3_bind_int64(row, 3, query->limit)) &&
           give(sqlite3_bind_int64(row, 4, query->now_ms - STORE_LOST_MS)) &&
           give(sqlite3_bind_int64(row, 5, state)) &&
           give(sqlite3_bind_text(row, 6, pattern, -1, SQLITE_STATIC)) &&
           give(by_name ? sqlite3_bind_text(row, 7, query->after_name, -1, SQLITE_STATIC)
                        : sqlite3_bind_int64(row, 7, query->after_ms)) &&
           give(sqlite3_bind_int64(row, 8, query->after_key)) &&
           give(sqlite3_bind_int64(row, 9, query->who.account));
}

static store_result read_runs(store_db *db, const store_runs_query *query, store_run_each *each, void *user)
{
    statement_text statement = {.length = 0};
    char pattern[2 * STORE_NAME_BYTES + 3] = "";
    sqlite3_stmt *row = NULL;
    store_result result = STORE_OK;

    MSC__ASSERT(query->search == NULL || strlen(query->search) <= STORE_NAME_BYTES);
    write_statement(query, &statement);
    if (query->search != NULL)
        write_pattern(query->search, pattern);
    if (sqlite3_prepare_v2(db->it, statement.text, -1, &row, NULL) != SQLITE_OK ||
        !give_values(row, query, pattern))
        result = store_db_failed(db);
    while (result == STORE_OK && store_row(row)) {
        store_run run;

        store_run_row(row, query->now_ms, &run);
        if (!each(user, &run))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    (void)sqlite3_finalize(row);
    return result;
}

store_result store_runs(store *it, const store_runs_query *query, store_run_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_PROJECT_IS);
    bool is_theirs =
        store_bind(row, "iiii", query->project, query->who.account, query->who.team, query->who.project) &&
        store_row(row);
    store_result result = store_row_end(db, row, STORE_OK);

    if (result == STORE_OK)
        result = is_theirs ? read_runs(db, query, each, user) : STORE_NOT_FOUND;
    store_reader_put(it, db);
    return result;
}
