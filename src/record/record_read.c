/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads a spool: batches, and the request that each one is.
 *
 *     bytes ──► records ──► runs of one number ──► columns by series, events, the last document of each name
 *
 * What is not a sound record is passed over to the next that is: a cut-off end is normal, anything else is
 * counted as damage.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/array.h"
#include "base/error.h"
#include "base/invariant.h"
#include "record/record_codec.h"
#include "record/record_json.h"

#define MOST_FILE_BYTES (UINT64_C(1) << 30)
/*
 * How many bytes are looked at in search of a sound record, at most: each place that looks like one costs a
 * checksum.
 */
#define MOST_SEARCH_BYTES (UINT64_C(64) << 20)

struct msc_spool {
    msc_context *ctx;
    uint8_t *bytes;
    uint64_t count;
    uint64_t base; /* offset of the first byte in the file */
    uint64_t at;
    uint64_t damaged, searched;
    uint32_t level;
    msc__json body;
    msc__array values; /* of `entry` */
};

/* A number of a batch. */
typedef struct entry {
    msc__spool_value value;
    int64_t step, time_ms;
    uint32_t order;
} entry;

/* ---- loading ------------------------------------------------------------------------------------------ */

static msc_status make(msc_context *ctx, uint64_t count, msc_spool **out, msc_error *err)
{
    msc_spool *spool = msc__alloc(ctx, sizeof *spool);

    if (spool == NULL)
        return msc__fail_memory(err, "a spool", sizeof *spool);
    spool->ctx = spool->body.ctx = ctx;
    spool->bytes = count == 0 ? NULL : msc__alloc(ctx, count);
    if (count > 0 && spool->bytes == NULL) {
        msc__free(ctx, spool, sizeof *spool);
        return msc__fail_memory(err, "a spool", count);
    }
    spool->count = count;
    *out = spool;
    return MSC_OK;
}

msc_status msc_spool_parse(msc_context *ctx, const void *bytes, size_t byte_count, msc_spool **out,
                           msc_error *err)
{
    uint32_t level = 0;
    msc_status status;

    if (ctx == NULL || bytes == NULL || out == NULL)
        return msc__fail(err, MSC_EINVAL, "ctx, bytes or out is NULL");
    *out = NULL;
    status = msc__spool_get_header(bytes, byte_count, &level, err);
    if (status == MSC_OK)
        status = make(ctx, byte_count, out, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(*out != NULL && (*out)->bytes != NULL);
    memcpy((*out)->bytes, bytes, byte_count);
    (*out)->at = MSC__SPOOL_HEADER_BYTES;
    (*out)->level = level;
    return MSC_OK;
}

static msc_status fail_io(const char *path, int number, msc_error *err)
{
    msc_status status = msc__fail(err, MSC_EIO, "cannot read '%s'", path);

    if (err != NULL)
        err->driver_code = number;
    return status;
}

/* Up to `count` bytes of a file. How many there were; -1: errno. */
static int64_t read_at(int fd, uint8_t *bytes, uint64_t count, uint64_t offset)
{
    uint64_t done = 0;

    while (done < count) {
        ssize_t got = pread(fd, bytes + done, count - done, (off_t)(offset + done));

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        done += (uint64_t)got;
    }
    return (int64_t)done;
}

static msc_status load(msc_context *ctx, int fd, const char *path, uint64_t offset, msc_spool **out,
                       msc_error *err)
{
    uint8_t header[MSC__SPOOL_HEADER_BYTES];
    uint64_t begin = offset < sizeof header ? sizeof header : offset;
    uint32_t level = 0;
    struct stat found;
    int64_t got = read_at(fd, header, sizeof header, 0);
    msc_status status;

    if (got < 0 || fstat(fd, &found) != 0)
        return fail_io(path, errno, err);
    status = msc__spool_get_header(header, (size_t)got, &level, err);
    if (status != MSC_OK)
        return status;
    if (found.st_size < 0 || (uint64_t)found.st_size > MOST_FILE_BYTES)
        return msc__fail(err, MSC_EFORMAT, "'%s' is larger than a spool's file can be", path);
    status = make(ctx, (uint64_t)found.st_size <= begin ? 0 : (uint64_t)found.st_size - begin, out, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(*out != NULL);
    got = read_at(fd, (*out)->bytes, (*out)->count, begin);
    if (got < 0) {
        int number = errno;

        msc_spool_destroy(*out);
        *out = NULL;
        return fail_io(path, number, err);
    }
    (*out)->base = begin;
    (*out)->level = level;
    if ((uint64_t)got < (*out)->count) /* it was replaced by a shorter one meanwhile: the rest stays zero */
        memset((*out)->bytes + got, 0, (*out)->count - (uint64_t)got);
    return MSC_OK;
}

msc_status msc_spool_load(msc_context *ctx, const char *path, uint64_t offset, msc_spool **out,
                          msc_error *err)
{
    msc_status status;
    int fd;

    if (ctx == NULL || path == NULL || out == NULL)
        return msc__fail(err, MSC_EINVAL, "ctx, path or out is NULL");
    *out = NULL;
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return fail_io(path, errno, err);
    status = load(ctx, fd, path, offset, out, err);
    (void)close(fd);
    return status;
}

void msc_spool_destroy(msc_spool *spool)
{
    msc_context *ctx;

    if (spool == NULL)
        return;
    ctx = spool->ctx;
    msc__json_fini(&spool->body);
    msc__array_fini(ctx, &spool->values, sizeof(entry));
    msc__free(ctx, spool->bytes, spool->count);
    msc__free(ctx, spool, sizeof *spool);
}

uint32_t msc_spool_level(const msc_spool *spool)
{
    return spool->level;
}

uint64_t msc_spool_damaged_bytes(const msc_spool *spool)
{
    return spool->damaged;
}

/* ---- batches ------------------------------------------------------------------------------------------ */

/* The next sound record from `*at` on, which is moved to it. Its size; 0: there is none. */
static uint32_t find(msc_spool *spool, uint64_t *at, msc__spool_record *out)
{
    uint64_t from = *at;
    uint64_t place;

    for (place = from; place < spool->count; place += 8) {
        uint32_t size = msc__spool_get(spool->bytes + place, spool->count - place, out);

        if (size > 0) {
            spool->damaged += place - from;
            *at = place;
            return size;
        }
        spool->searched += MSC__SPOOL_RECORD_BYTES;
        if (spool->searched > MOST_SEARCH_BYTES)
            break;
    }
    return 0;
}

static void count_record(const msc__spool_record *record, msc_spool_batch *out)
{
    msc__spool_row row;

    switch (record->kind) {
    case MSC__SPOOL_ROW:
        if (msc__spool_row_begin(record->payload, record->payload_bytes, &row))
            out->value_count += row.left;
        break;
    case MSC__SPOOL_EVENT:
        out->event_count++;
        break;
    case MSC__SPOOL_DOCUMENT:
        out->document_count++;
        break;
    case MSC__SPOOL_END:
        if (record->payload_bytes == 1 && record->payload[0] <= 2)
            out->end_state = record->payload[0];
        break;
    default:
        break;
    }
}

/* The next run of records of one number, which may be a tick alone. */
static bool next_run(msc_spool *spool, msc_spool_batch *out)
{
    msc__spool_record record;
    uint64_t end = spool->at;
    uint32_t size = find(spool, &spool->at, &record);

    memset(out, 0, sizeof *out);
    if (size == 0)
        return false;
    out->begin = spool->base + spool->at;
    out->sequence = record.batch;
    while (size > 0 && record.batch == out->sequence) {
        count_record(&record, out);
        end = spool->at += size;
        size = find(spool, &spool->at, &record);
    }
    out->end = spool->base + end;
    out->is_complete = size > 0;
    return true;
}

int msc_spool_next(msc_spool *spool, msc_spool_batch *out)
{
    while (next_run(spool, out))
        if (out->value_count > 0 || out->event_count > 0 || out->document_count > 0 || out->end_state != 0)
            return 1;
    memset(out, 0, sizeof *out);
    return 0;
}

/* ---- the request -------------------------------------------------------------------------------------- */

static int by_series(const void *left, const void *right)
{
    const entry *a = left;
    const entry *b = right;
    size_t shorter = a->value.name_bytes < b->value.name_bytes ? a->value.name_bytes : b->value.name_bytes;
    int order = memcmp(a->value.name, b->value.name, shorter);

    if (order != 0)
        return order;
    if (a->value.name_bytes != b->value.name_bytes)
        return a->value.name_bytes < b->value.name_bytes ? -1 : 1;
    return a->order < b->order ? -1 : 1;
}

static msc_status add_row(msc_spool *spool, const msc__spool_record *record, msc_error *err)
{
    msc__spool_row row;
    entry item = {0};

    if (!msc__spool_row_begin(record->payload, record->payload_bytes, &row))
        return MSC_OK;
    item.step = row.step;
    item.time_ms = row.time_ms;
    while (msc__spool_row_next(&row, &item.value)) {
        msc_status status;

        item.order = spool->values.count;
        status = msc__array_push(spool->ctx, &spool->values, sizeof item, &item, err);
        if (status != MSC_OK)
            return status;
    }
    return MSC_OK;
}

/* A column of a series: its numbers, one behind the other. */
static void put_column(msc__json *json, const char *name, const entry *first, const entry *last, char which)
{
    const entry *at;

    msc__json_word(json, name);
    for (at = first; at < last; at++) {
        if (at > first)
            msc__json_put(json, ",", 1);
        if (which == 'v')
            msc__json_double(json, at->value.value);
        else
            msc__json_i64(json, which == 's' ? at->step : at->time_ms);
    }
    msc__json_put(json, "]", 1);
}

static bool is_same_series(const entry *a, const entry *b)
{
    return a->value.name_bytes == b->value.name_bytes &&
           memcmp(a->value.name, b->value.name, a->value.name_bytes) == 0;
}

static void put_points(msc_spool *spool)
{
    msc__json *json = &spool->body;
    entry *entries = spool->values.items;
    const entry *end;
    const entry *first;
    const entry *last;

    if (spool->values.count == 0)
        return;
    end = entries + spool->values.count;
    qsort(entries, spool->values.count, sizeof *entries, by_series);
    msc__json_word(json, ",\"points\":[");
    for (first = entries; first < end; first = last) {
        for (last = first + 1; last < end && is_same_series(first, last); last++) {
        }
        msc__json_word(json, first == entries ? "{\"series\":" : ",{\"series\":");
        msc__json_string(json, first->value.name, first->value.name_bytes);
        msc__json_word(json, ",\"unit\":");
        msc__json_string(json, first->value.unit, first->value.unit_bytes);
        put_column(json, ",\"steps\":[", first, last, 's');
        put_column(json, ",\"times_ms\":[", first, last, 't');
        put_column(json, ",\"values\":[", first, last, 'v');
        msc__json_put(json, "}", 1);
    }
    msc__json_put(json, "]", 1);
}

/* Whether a later document of the batch, before `end`, has the same name. */
static bool is_replaced(const msc_spool *spool, uint64_t at, uint64_t end, const char *name,
                        uint32_t name_bytes)
{
    msc__spool_record record;
    const char *other;
    uint32_t other_bytes;

    while (at < end) {
        uint32_t size = msc__spool_get(spool->bytes + at, end - at, &record);

        if (size > 0 && record.kind == MSC__SPOOL_DOCUMENT &&
            msc__spool_document_name(record.payload, record.payload_bytes, &other, &other_bytes) &&
            other_bytes == name_bytes && memcmp(other, name, name_bytes) == 0)
            return true;
        at += size > 0 ? size : 8;
    }
    return false;
}

/* All records of a kind, in the order in which they were put. */
static void put_others(msc_spool *spool, uint64_t begin, uint64_t end, msc__spool_kind kind, const char *open,
                       const char *close)
{
    msc__json *json = &spool->body;
    msc__spool_record record;
    const char *name;
    uint32_t name_bytes;
    uint64_t at = begin;
    bool is_first = true;

    while (at < end) {
        uint32_t size = msc__spool_get(spool->bytes + at, end - at, &record);

        at += size > 0 ? size : 8;
        if (size == 0 || record.kind != kind)
            continue;
        if (kind == MSC__SPOOL_EVENT) {
            msc__json_word(json, is_first ? open : ",");
            msc__json_put(json, (const char *)record.payload, record.payload_bytes);
        } else if (msc__spool_document_name(record.payload, record.payload_bytes, &name, &name_bytes) &&
                   !is_replaced(spool, at, end, name, name_bytes)) {
            msc__json_word(json, is_first ? open : ",");
            msc__json_string(json, name, name_bytes);
            msc__json_put(json, ":", 1);
            msc__json_put(json, name + name_bytes, record.payload_bytes - 1 - name_bytes);
        } else {
            continue;
        }
        is_first = false;
    }
    if (!is_first)
        msc__json_word(json, close);
}

static msc_status collect(msc_spool *spool, uint64_t begin, uint64_t end, msc_error *err)
{
    msc__spool_record record;
    msc_status status = MSC_OK;

    spool->values.count = 0;
    while (begin < end && status == MSC_OK) {
        uint32_t size = msc__spool_get(spool->bytes + begin, end - begin, &record);

        if (size > 0 && record.kind == MSC__SPOOL_ROW)
            status = add_row(spool, &record, err);
        begin += size > 0 ? size : 8;
    }
    return status;
}

msc_status msc_spool_body(msc_spool *spool, const msc_spool_batch *batch, const char *client,
                          const char **text, size_t *text_bytes, msc_error *err)
{
    uint64_t begin = batch->begin - spool->base;
    uint64_t end = batch->end - spool->base;
    msc_status status;

    if (batch->begin < spool->base || begin > end || end > spool->count)
        return msc__fail(err, MSC_EINVAL, "the batch is none of this spool");
    if (client == NULL || !msc__record_is_name(client, strlen(client), MSC_RECORD_CLIENT_BYTES))
        return msc__fail(err, MSC_EINVAL, "client is no name of 1 to %u bytes", MSC_RECORD_CLIENT_BYTES);
    status = collect(spool, begin, end, err);
    if (status != MSC_OK)
        return status;
    spool->body.length = 0;
    spool->body.status = MSC_OK;
    msc__json_word(&spool->body, "{\"client\":");
    msc__json_string(&spool->body, client, strlen(client));
    msc__json_word(&spool->body, ",\"sequence\":");
    msc__json_i64(&spool->body, batch->sequence);
    put_points(spool);
    put_others(spool, begin, end, MSC__SPOOL_EVENT, ",\"events\":[", "]");
    put_others(spool, begin, end, MSC__SPOOL_DOCUMENT, ",\"documents\":{", "}");
    msc__json_put(&spool->body, "}", 1);
    if (spool->body.status != MSC_OK)
        return msc__fail_memory(err, "a request", spool->body.length);
    *text = spool->body.text;
    *text_bytes = spool->body.length;
    return MSC_OK;
}
