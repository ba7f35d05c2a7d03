/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading in buckets, events and documents.
 *
 *      blocks      [-- 0 --][-- 1 --][-- 2 --][-- 3 --]
 *      buckets     |      a       |       b      |  c
 *
 * Block 0 lies within bucket a and adds its row; 1 lies across an edge and is unpacked. So every point counts
 * in the bucket of its step, and no peak is lost, at the cost of one row a block and one unpacked block an
 * edge.
 */
#include "store/store_internal.h"

#include "base/invariant.h"

static uint32_t bucket_of(const store_buckets *buckets, int64_t step)
{
    uint64_t index = ((uint64_t)step - (uint64_t)buckets->from) / buckets->width;

    MSC__ASSERT(step >= buckets->from && step <= buckets->to && index < buckets->count);
    return (uint32_t)index;
}

/* A block that counts in part, or lies in several buckets. */
static store_result add_points_of(store_db *db, int64_t series, int64_t number, const store_buckets *buckets)
{
    block_point points[BLOCK_POINTS];
    uint32_t count;
    store_result result = store_get_block(db, series, number, points, &count);

    for (uint32_t i = 0; i < count && result == STORE_OK; i++)
        if (points[i].step >= buckets->from && points[i].step <= buckets->to)
            block_summary_add(&buckets->at[bucket_of(buckets, points[i].step)], &points[i]);
    return result == STORE_NOT_FOUND ? STORE_FAILED : result;
}

static store_result add_block(store_db *db, sqlite3_stmt *row, int64_t series, const store_buckets *buckets)
{
    block_summary block = {
        sqlite3_column_int64(row, 0), sqlite3_column_int64(row, 1), sqlite3_column_int64(row, 2),
        sqlite3_column_int64(row, 3), sqlite3_column_int64(row, 4), store_column_double(row, 5),
        store_column_double(row, 6),  store_column_double(row, 7),  store_column_double(row, 8),
    };
    bool within = block.first_step >= buckets->from && block.last_step <= buckets->to;

    if (within && bucket_of(buckets, block.first_step) == bucket_of(buckets, block.last_step)) {
        block_summary_merge(&buckets->at[bucket_of(buckets, block.first_step)], &block);
        return STORE_OK;
    }
    return add_points_of(db, series, sqlite3_column_int64(row, 9), buckets);
}

store_result store_read_buckets(store *it, int64_t series, const store_buckets *buckets)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_BLOCKS);
    store_result result =
        store_bind(row, "iii", series, buckets->from, buckets->to) ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && store_row(row))
        result = add_block(db, row, series, buckets);
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}

static void event_row(sqlite3_stmt *row, store_event *out)
{
    out->id = sqlite3_column_int64(row, 0);
    out->kind = (const char *)sqlite3_column_text(row, 1);
    out->step = store_column_time(row, 2);
    out->time_ms = sqlite3_column_int64(row, 3);
    out->text = (const char *)sqlite3_column_text(row, 4);
    out->data = (const char *)sqlite3_column_text(row, 5);
}

store_result store_events(store *it, int64_t run, const char *kind, int64_t after, uint32_t limit,
                          store_event_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, kind == NULL ? SQL_EVENTS : SQL_EVENTS_KIND);
    bool bound = kind == NULL ? store_bind(row, "iii", run, after, (int64_t)limit)
                              : store_bind(row, "itii", run, kind, after, (int64_t)limit);
    store_result result = bound ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && store_row(row)) {
        store_event event;

        event_row(row, &event);
        if (event.kind == NULL || event.text == NULL) /* SQLite had no memory for them */
            result = STORE_NO_MEMORY;
        else if (!each(user, &event))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}

store_result store_documents(store *it, int64_t run, const char *name, store_document_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, name == NULL ? SQL_DOCUMENTS : SQL_DOCUMENT);
    bool bound = name == NULL ? store_bind(row, "i", run) : store_bind(row, "it", run, name);
    store_result result = bound ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && store_row(row)) {
        store_document document = {(const char *)sqlite3_column_text(row, 0),
                                   (const char *)sqlite3_column_text(row, 1), 0};

        document.bytes = (size_t)sqlite3_column_int64(row, 2);
        if (document.text != NULL) /* length() counts characters */
            document.bytes = (size_t)sqlite3_column_bytes(row, 1);
        if (document.name == NULL || (name != NULL && document.text == NULL))
            result = STORE_NO_MEMORY;
        else if (!each(user, &document, sqlite3_column_int64(row, 3)))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}
