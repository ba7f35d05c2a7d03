/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records into batches, batches into segments.
 *
 *     batch     7 7 7 8 8 8 8 9 (tick) 9 9 …      a batch is complete as soon as a record of a later one
 *               follows
 *     segment   ─────────────┤├──────────────     and lies in one file
 *
 * A batch ends where the next record would make the request for it larger than a server takes, and by time:
 * then a tick, a record without content, begins the next one. How large a request can become is counted with
 * every number at its longest.
 */
#include "record/record_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"

#define MOST_JSON_BYTES 1000000u
#define MOST_EVENTS 1000u
#define MOST_DOCUMENTS 16u
#define FRAME_JSON_BYTES 256u /* what is around everything */
#define SERIES_JSON_BYTES 96u /* around its columns */
#define VALUE_JSON_BYTES 72u  /* value, step and time, with their commas */
#define RETRIES_NS INT64_C(1000000000)

/* ---- what a record adds to a batch -------------------------------------------------------------------- */

typedef struct added {
    uint64_t json_bytes;
    uint32_t series_count, event_count, document_count;
} added;

static uint64_t hash_of(const char *name, size_t bytes)
{
    uint64_t hash = 0xcbf29ce484222325u;
    size_t i;

    for (i = 0; i < bytes; i++)
        hash = (hash ^ (uint8_t)name[i]) * 0x100000001b3u;
    return hash == 0 ? 1 : hash;
}

/* Where a hash is in the batch, or may be put. */
static uint64_t *slot_of(msc__batch_sum *sum, uint64_t hash)
{
    uint32_t at = (uint32_t)(hash ^ hash >> 32) & (MSC__WRITER_SERIES_SLOTS - 1);

    MSC__ASSERT(sum->series_count < MSC__WRITER_SERIES_SLOTS);
    while (sum->series[at] != 0 && sum->series[at] != hash)
        at = (at + 1) & (MSC__WRITER_SERIES_SLOTS - 1);
    return &sum->series[at];
}

/* What a row adds; with `enters` its series are the batch's from now on. */
static added weigh_row(msc__batch_sum *sum, const uint8_t *payload, uint32_t payload_bytes, bool enters)
{
    msc__spool_row row;
    msc__spool_value value;
    added sum_of_row = {0};

    if (!msc__spool_row_begin(payload, payload_bytes, &row))
        return sum_of_row;
    while (msc__spool_row_next(&row, &value)) {
        uint64_t hash = hash_of(value.name, value.name_bytes);
        uint64_t *slot = slot_of(sum, hash);

        sum_of_row.json_bytes += VALUE_JSON_BYTES;
        if (*slot == hash)
            continue;
        sum_of_row.series_count++;
        sum_of_row.json_bytes += SERIES_JSON_BYTES + 2u * (value.name_bytes + value.unit_bytes);
        if (enters) {
            *slot = hash;
            sum->series_count++;
        }
    }
    return sum_of_row;
}

static added weigh(msc__batch_sum *sum, msc__spool_kind kind, const uint8_t *payload, uint32_t payload_bytes)
{
    added other = {payload_bytes + 8u, 0, 0, 0};

    if (kind == MSC__SPOOL_ROW)
        return weigh_row(sum, payload, payload_bytes, false);
    other.event_count = kind == MSC__SPOOL_EVENT;
    other.document_count = kind == MSC__SPOOL_DOCUMENT;
    if (other.document_count > 0)
        other.json_bytes += MSC_RECORD_NAME_BYTES;
    return other;
}

static bool fits(const msc__batch_sum *sum, const added *more)
{
    return sum->json_bytes + more->json_bytes <= MOST_JSON_BYTES &&
           sum->series_count + more->series_count <= MSC__WRITER_SERIES &&
           sum->event_count + more->event_count <= MOST_EVENTS &&
           sum->document_count + more->document_count <= MOST_DOCUMENTS;
}

static void begin_batch(msc__writer *writer)
{
    memset(&writer->sum, 0, sizeof writer->sum);
    writer->sum.json_bytes = FRAME_JSON_BYTES;
    writer->batch++;
}

/* ---- files -------------------------------------------------------------------------------------------- */

/* The system has refused. Always false. */
static bool refused(msc__writer *writer)
{
    writer->failure = errno == 0 ? EIO : errno;
    writer->failures++;
    return false;
}

static bool write_buffer(msc__writer *writer)
{
    uint32_t done = 0;

    while (done < writer->used) {
        ssize_t wrote =
            pwrite(writer->fd, writer->buffer + done, writer->used - done, (off_t)(writer->offset + done));

        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return refused(writer);
        done += (uint32_t)wrote;
    }
    writer->is_dirty = writer->is_dirty || done > 0;
    writer->offset += done;
    writer->held_bytes += done;
    writer->written_bytes += done;
    writer->used = 0;
    writer->failure = 0;
    return true;
}

static bool sync_file(msc__writer *writer)
{
    if (writer->is_dirty && fsync(writer->fd) != 0)
        return refused(writer);
    writer->is_dirty = false;
    return true;
}

/* Begins file `segment`. The one before is complete. */
static bool open_segment(msc__writer *writer, uint32_t segment)
{
    char name[MSC__SPOOL_NAME_BYTES];
    int fd;

    msc__writer_name(writer, segment, "spool", name);
    fd = openat(writer->folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return refused(writer);
    if (writer->fd >= 0)
        (void)close(writer->fd);
    writer->fd = fd;
    writer->segment = segment;
    writer->offset = 0;
    msc__spool_put_header(writer->buffer, 0, segment);
    writer->used = MSC__SPOOL_HEADER_BYTES;
    return true;
}

static bool next_segment(msc__writer *writer)
{
    if (!write_buffer(writer) || !sync_file(writer))
        return false;
    msc__writer_trim(writer);
    return open_segment(writer, writer->segment + 1);
}

/* ---- life --------------------------------------------------------------------------------------------- */

msc_status msc__writer_init(msc_context *ctx, const msc_record_options *options, const char *client,
                            msc__writer *out, msc_error *err)
{
    memset(out, 0, sizeof *out);
    out->ctx = ctx;
    out->client = client;
    out->segment_bytes = options->segment_bytes;
    out->cap_bytes = options->cap_bytes;
    out->batch_ns = options->batch_ns;
    out->sync_ns = options->sync_ns;
    out->fd = -1;
    out->sum.json_bytes = FRAME_JSON_BYTES;
    out->folder = open(options->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    out->buffer = out->folder < 0 ? NULL : msc__alloc(ctx, MSC__WRITER_BUFFER_BYTES);
    if (out->folder >= 0 && out->buffer == NULL)
        return msc__fail_memory(err, "the buffer of a spool", MSC__WRITER_BUFFER_BYTES);
    if (out->folder < 0 || !open_segment(out, 0)) {
        int number = errno;
        msc_status status =
            msc__fail(err, MSC_EIO, "cannot write a spool to '%s': %s", options->directory,
                      out->folder < 0 ? "the folder cannot be opened" : "a file cannot be made in it");

        if (err != NULL)
            err->driver_code = number;
        return status;
    }
    out->held_bytes = MSC__SPOOL_HEADER_BYTES;
    return MSC_OK;
}

void msc__writer_fini(msc__writer *writer)
{
    if (writer->ctx == NULL)
        return;
    if (writer->fd >= 0)
        (void)close(writer->fd);
    if (writer->folder >= 0)
        (void)close(writer->folder);
    msc__free(writer->ctx, writer->buffer, MSC__WRITER_BUFFER_BYTES);
    writer->ctx = NULL;
}

/* ---- records ------------------------------------------------------------------------------------------ */

static bool put(msc__writer *writer, const msc__spool_record *record)
{
    uint32_t size = msc__spool_size(record->payload_bytes);

    if (writer->used + size > MSC__WRITER_BUFFER_BYTES && !write_buffer(writer))
        return false;
    msc__spool_put(writer->buffer + writer->used, record);
    writer->used += size;
    return true;
}

/* Whether the spool has no room for it. Counts it then. */
static bool is_dropped(msc__writer *writer, msc__spool_kind kind)
{
    if (writer->is_full && kind == MSC__SPOOL_ROW) {
        writer->dropped_rows++;
        return true;
    }
    if (writer->is_overfull && (kind == MSC__SPOOL_EVENT || kind == MSC__SPOOL_DOCUMENT)) {
        writer->dropped_count++;
        return true;
    }
    return false;
}

bool msc__writer_add(msc__writer *writer, msc__spool_kind kind, const uint8_t *payload,
                     uint32_t payload_bytes, int64_t now_ns)
{
    msc__spool_record record = {kind, 0, payload, payload_bytes};
    added more;

    if (is_dropped(writer, kind))
        return true;
    more = weigh(&writer->sum, kind, payload, payload_bytes);
    if (writer->sum.record_count > 0 && !fits(&writer->sum, &more))
        begin_batch(writer);
    if (writer->sum.record_count == 0) {
        if (writer->offset + writer->used >= writer->segment_bytes && !next_segment(writer))
            return false;
        writer->batch_begin_ns = now_ns;
    }
    record.batch = writer->batch;
    if (!put(writer, &record))
        return false;
    if (kind == MSC__SPOOL_ROW)
        more = weigh_row(&writer->sum, payload, payload_bytes, true);
    else
        more = weigh(&writer->sum, kind, payload, payload_bytes);
    writer->sum.json_bytes += more.json_bytes;
    writer->sum.event_count += more.event_count;
    writer->sum.document_count += more.document_count;
    writer->sum.record_count++;
    return true;
}

bool msc__writer_close_batch(msc__writer *writer)
{
    msc__spool_record tick = {MSC__SPOOL_TICK, writer->batch + 1, NULL, 0};

    if (writer->sum.record_count == 0)
        return true;
    if (!put(writer, &tick))
        return false;
    begin_batch(writer);
    return true;
}

bool msc__writer_tick(msc__writer *writer, int64_t now_ns)
{
    if (writer->is_full && now_ns - writer->looked_ns >= RETRIES_NS) {
        writer->looked_ns = now_ns;
        msc__writer_trim(writer);
    }
    if (writer->sum.record_count > 0 && now_ns - writer->batch_begin_ns >= writer->batch_ns &&
        !msc__writer_close_batch(writer))
        return false;
    if (!write_buffer(writer))
        return false;
    if (!writer->is_dirty || now_ns - writer->synced_ns < writer->sync_ns)
        return true;
    writer->synced_ns = now_ns;
    return sync_file(writer);
}

bool msc__writer_settle(msc__writer *writer)
{
    return write_buffer(writer) && sync_file(writer);
}
