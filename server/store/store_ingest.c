/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a run sends: one batch, one savepoint.
 *
 *      batch (run, client, sequence)      is there already: nothing is done, and the answer says so
 *      series                             the last block is unpacked, grows, and is packed; full ones stay
 *      events, documents                  rows
 *      run                                its version grows by one; it was seen
 *
 * Everything that is read here is read within the writer's transaction, so nothing can come in between.
 */
#include <string.h>

#include "base/invariant.h"
#include "store/store_internal.h"

typedef struct ingest_job {
    store *it;
    store_run_ref ref;
    const store_batch *batch;
    store_ingested *out;
    store_run run;
} ingest_job;

/* The block that a series is adding to. */
typedef struct tail {
    int64_t series;
    int64_t number;
    uint32_t count;
    block_point points[BLOCK_POINTS];
    uint8_t packed[BLOCK_BYTES];
} tail;

static block_summary read_summary(sqlite3_stmt *row, int first)
{
    block_summary summary = {
        sqlite3_column_int64(row, first),     sqlite3_column_int64(row, first + 1),
        sqlite3_column_int64(row, first + 2), sqlite3_column_int64(row, first + 3),
        sqlite3_column_int64(row, first + 4), store_column_double(row, first + 5),
        store_column_double(row, first + 6),  store_column_double(row, first + 7),
        store_column_double(row, first + 8),
    };

    return summary;
}

static void series_row(sqlite3_stmt *row, store_series *out)
{
    memset(out, 0, sizeof *out);
    out->key = sqlite3_column_int64(row, 0);
    store_column_text(row, 1, out->name, sizeof out->name);
    store_column_text(row, 2, out->unit, sizeof out->unit);
    out->blocks = sqlite3_column_int64(row, 3);
    out->summary = read_summary(row, 4);
}

static store_result get_series(store_db *db, int64_t run, const char *name, store_series *out)
{
    sqlite3_stmt *row = store_sql(db, SQL_SERIES_FIND);
    bool found = store_bind(row, "it", run, name) && store_row(row);
    store_result result;

    if (found)
        series_row(row, out);
    result = store_row_end(db, row, STORE_OK);
    return result == STORE_OK && !found ? STORE_NOT_FOUND : result;
}

/* `limit`: TOO_MANY if a run has as many rows already. */
static store_result check_count(store_db *db, store_sql_id id, int64_t run, int64_t limit)
{
    sqlite3_stmt *row = store_sql(db, id);
    int64_t count = store_bind(row, "i", run) && store_row(row) ? sqlite3_column_int64(row, 0) : 0;
    store_result result = store_row_end(db, row, STORE_OK);

    return result == STORE_OK && count > limit ? STORE_TOO_MANY : result;
}

static store_result add_series(store_db *db, int64_t run, const store_new_points *from, store_series *out)
{
    store_result result = get_series(db, run, from->series, out);

    if (result != STORE_NOT_FOUND)
        return result;
    result = STORE_RUN(db, SERIES_ADD, "itt", run, from->series, from->unit);
    if (result == STORE_OK)
        result = check_count(db, SQL_SERIES_COUNT, run, STORE_SERIES);
    return result == STORE_OK ? get_series(db, run, from->series, out) : result;
}

store_result store_get_block(store_db *db, int64_t series, int64_t number, block_point *points,
                             uint32_t *count)
{
    /* One statement: between two, a reader could see a block grow. */
    sqlite3_stmt *row = store_sql(db, SQL_BLOCK_POINTS);
    bool found = store_bind(row, "ii", series, number) && store_row(row);
    bool whole = false;
    store_result result;

    *count = found ? (uint32_t)sqlite3_column_int64(row, 0) : 0;
    if (found)
        whole =
            block_unpack(sqlite3_column_blob(row, 1), (size_t)sqlite3_column_bytes(row, 1), *count, points);
    result = store_row_end(db, row, STORE_OK);
    if (result != STORE_OK || !found)
        return result == STORE_OK ? STORE_NOT_FOUND : result;
    return whole ? STORE_OK : STORE_FAILED;
}

static store_result load_tail(store_db *db, const store_series *series, tail *out)
{
    store_result result = STORE_OK;

    out->series = series->key;
    out->number = series->blocks;
    out->count = 0;
    if (series->blocks == 0)
        return STORE_OK;
    if (series->summary.count % BLOCK_POINTS != 0) { /* the last block has room */
        out->number--;
        result = store_get_block(db, series->key, out->number, out->points, &out->count);
    }
    return result == STORE_NOT_FOUND ? STORE_FAILED : result;
}

static block_summary summarize(const block_point *points, uint32_t count)
{
    block_summary summary = block_summary_empty();
    uint32_t i;

    for (i = 0; i < count; i++)
        block_summary_add(&summary, &points[i]);
    return summary;
}

static store_result save_tail(store_db *db, tail *from)
{
    block_summary s = summarize(from->points, from->count);
    size_t bytes = block_pack(from->points, from->count, from->packed);
    store_result result;

    if (from->number >= STORE_BLOCKS)
        return STORE_TOO_MANY;
    result = STORE_RUN(db, BLOCK_SET, "iiiiiiidddd", from->series, from->number, s.count, s.nans,
                       s.first_step, s.last_step, s.last_time_ms, s.min, s.max, s.sum, s.last);
    return result != STORE_OK ? result
                              : STORE_RUN(db, PACKED_SET, "ib", from->series * STORE_BLOCKS + from->number,
                                          (const void *)from->packed, bytes);
}

static store_result add_points(store_db *db, int64_t run, const store_new_points *from)
{
    store_series series;
    block_summary added;
    tail last;
    uint32_t taken = 0;
    store_result result = add_series(db, run, from, &series);

    if (result == STORE_OK)
        result = load_tail(db, &series, &last);
    while (result == STORE_OK && taken < from->count) {
        uint32_t room = BLOCK_POINTS - last.count;
        uint32_t count = from->count - taken < room ? from->count - taken : room;

        memcpy(last.points + last.count, from->points + taken, count * sizeof *from->points);
        last.count += count;
        taken += count;
        result = save_tail(db, &last);
        if (last.count == BLOCK_POINTS) {
            last.number++;
            last.count = 0;
        }
    }
    if (result != STORE_OK)
        return result;
    added = summarize(from->points, from->count);
    block_summary_merge(&series.summary, &added);
    MSC__ASSERT(series.summary.count == last.number * BLOCK_POINTS + last.count);
    return STORE_RUN(db, SERIES_SET, "iiiiiiddddi", last.number + (last.count > 0), series.summary.count,
                     series.summary.nans, series.summary.first_step, series.summary.last_step,
                     series.summary.last_time_ms, series.summary.min, series.summary.max, series.summary.sum,
                     series.summary.last, series.key);
}

static store_result add_rest(store_db *db, int64_t run, const store_batch *batch, int64_t now_ms)
{
    store_result result = STORE_OK;
    uint32_t i;

    for (i = 0; i < batch->event_count && result == STORE_OK; i++) {
        const store_event *event = &batch->events[i];

        result = STORE_RUN(db, EVENT_ADD, "itnitt", run, event->kind, event->step, event->time_ms,
                           event->text, event->data);
    }
    for (i = 0; i < batch->document_count && result == STORE_OK; i++) {
        const store_document *document = &batch->documents[i];

        result = STORE_RUN(db, DOCUMENT_SET, "itti", run, document->name, document->text, now_ms);
    }
    if (batch->document_count > 0 && result == STORE_OK)
        result = check_count(db, SQL_DOCUMENT_COUNT, run, STORE_DOCUMENTS);
    return result;
}

static store_result ingest(store_db *db, void *user)
{
    ingest_job *job = user;
    const store_batch *batch = job->batch;
    int64_t team;
    store_result result = store_run_get_as(db, job->ref, STORE_MEMBER, &job->run, &team);
    uint32_t i;

    if (result == STORE_OK)
        result = STORE_RUN(db, BATCH_ADD, "iti", job->run.key, batch->client, batch->sequence);
    if (result != STORE_OK)
        return result;
    job->out->duplicate = sqlite3_changes(db->it) == 0;
    if (job->out->duplicate) {
        job->out->version = job->run.version;
        return STORE_OK;
    }
    for (i = 0; i < batch->series_count && result == STORE_OK; i++)
        if (batch->series[i].count > 0)
            result = add_points(db, job->run.key, &batch->series[i]);
    if (result == STORE_OK)
        result = add_rest(db, job->run.key, batch, job->ref.now_ms);
    job->out->version = ++job->run.version;
    return result == STORE_OK
               ? STORE_RUN(db, RUN_CHANGED, "iii", job->ref.now_ms, job->run.version, job->run.key)
               : result;
}

static void count_batch(void *user)
{
    const ingest_job *job = user;
    const store_batch *batch = job->batch;
    uint64_t points = 0;
    uint32_t i;

    if (job->out->duplicate)
        return;
    for (i = 0; i < batch->series_count; i++)
        points += batch->series[i].count;
    msc__mutex_lock(&job->it->mutex);
    job->it->figures.batches++;
    job->it->figures.points += points;
    msc__mutex_unlock(&job->it->mutex);
    if (batch->after != NULL)
        batch->after(batch->user, &job->run);
}

store_result store_ingest(store *it, store_run_ref ref, const store_batch *batch, store_ingested *out)
{
    ingest_job job = {.it = it, .ref = ref, .batch = batch, .out = out};

    return store_write(it, ingest, count_batch, &job);
}

/* ---- reading --------------------------------------------------------------------------------- */

store_result store_series_find(store *it, int64_t run, const char *name, store_series *out)
{
    store_db *db = store_reader_get(it);
    store_result result = get_series(db, run, name, out);

    store_reader_put(it, db);
    return result;
}

store_result store_series_list(store *it, int64_t run, store_series_each *each, void *user)
{
    store_db *db = store_reader_get(it);
    sqlite3_stmt *row = store_sql(db, SQL_SERIES_LIST);
    store_result result = store_bind(row, "i", run) ? STORE_OK : store_db_failed(db);

    while (result == STORE_OK && store_row(row)) {
        store_series series;

        series_row(row, &series);
        if (!each(user, &series))
            result = STORE_STOPPED;
    }
    result = store_row_end(db, row, result);
    store_reader_put(it, db);
    return result;
}

store_result store_read_block(store *it, int64_t series, int64_t block, block_point *points, uint32_t *count)
{
    store_db *db = store_reader_get(it);
    store_result result = store_get_block(db, series, block, points, count);

    store_reader_put(it, db);
    return result;
}
