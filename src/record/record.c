/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The recorder: who puts, and the thread that writes.
 *
 *     put      checks, reserves in the ring, copies; all that it shares with the thread is atomic
 *     thread   each 0.1 s, or when it is woken: ring ──► writer, until the ring is empty
 *
 * The thread sleeps on a pipe, so that waking it is one `write` that cannot block. It begins with all signals
 * held back, as every thread of the library: a file that may not grow is an error of the write (EFBIG) and no
 * signal to the program.
 */
#include "memscale/record.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"
#include "base/thread.h"
#include "record/record_ring.h"
#include "record/record_writer.h"

#define LEAST_RING_BYTES (UINT64_C(1) << 20)
#define LEAST_SEGMENT_BYTES (UINT64_C(4) << 10)
#define LEAST_CAP_SEGMENTS 4u
#define TICK_MS 100
#define POLL_NS INT64_C(1000000)
#define RETRY_NS INT64_C(1000000000)

enum { ENDED_NOT, ENDED_FINISHED, ENDED_FAILED };

struct msc_record {
    msc_context *ctx;
    char client[MSC_RECORD_CLIENT_BYTES + 1];
    uint32_t fork_count; /* of the process that it belongs to */
    msc__ring ring;
    msc__thread thread;
    int wake[2];
    atomic_bool stops, is_woken, has_ended;
    _Atomic uint64_t wanted;  /* place in the ring up to which somebody waits for complete batches */
    _Atomic uint64_t settled; /* up to which they are in the files */
    _Atomic uint64_t row_count, event_count, refused_rows, refused_count;
    /* What the thread shows of its own. */
    _Atomic uint64_t written_bytes, held_bytes, failures, dropped_rows, dropped_count;
    _Atomic uint32_t segment;
    _Atomic int32_t system_error;
    /* The thread's own. */
    msc__writer writer;
    int64_t retry_ns;
};

/* ---- options ------------------------------------------------------------------------------------------ */

void msc_record_options_init(msc_record_options *out, size_t struct_bytes)
{
    msc_record_options options;

    memset(&options, 0, sizeof options);
    options.ring_bytes = UINT64_C(4) << 20;
    options.segment_bytes = UINT64_C(4) << 20;
    options.cap_bytes = UINT64_C(256) << 20;
    options.batch_ns = 2 * RETRY_NS;
    options.sync_ns = RETRY_NS;
    msc__sized_init(out, struct_bytes, &options, sizeof options);
}

static bool is_client(const char *client)
{
    size_t i;

    for (i = 0; client != NULL && client[i] != '\0'; i++) {
        char c = client[i];

        if (i == MSC_RECORD_CLIENT_BYTES || !((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                                              (c >= '0' && c <= '9') || c == '_' || c == '-'))
            return false;
    }
    return client != NULL && i > 0;
}

static msc_status check_options(const msc_record_options *options, msc_error *err)
{
    if (options->directory == NULL)
        return msc__fail(err, MSC_EINVAL, "directory is NULL");
    if (!is_client(options->client))
        return msc__fail(err, MSC_EINVAL, "client is no name of 1 to %u letters, digits, _ and -",
                         MSC_RECORD_CLIENT_BYTES);
    if (options->ring_bytes < LEAST_RING_BYTES || (options->ring_bytes & (options->ring_bytes - 1)) != 0)
        return msc__fail(err, MSC_EINVAL, "ring_bytes is %llu, allowed are powers of two from %llu on",
                         (unsigned long long)options->ring_bytes, (unsigned long long)LEAST_RING_BYTES);
    if (options->segment_bytes < LEAST_SEGMENT_BYTES)
        return msc__fail(err, MSC_EINVAL, "segment_bytes is %llu, must be at least %llu",
                         (unsigned long long)options->segment_bytes, (unsigned long long)LEAST_SEGMENT_BYTES);
    if (options->cap_bytes / LEAST_CAP_SEGMENTS < options->segment_bytes)
        return msc__fail(err, MSC_EINVAL, "cap_bytes is %llu, must be at least %u segments of %llu",
                         (unsigned long long)options->cap_bytes, LEAST_CAP_SEGMENTS,
                         (unsigned long long)options->segment_bytes);
    if (options->batch_ns <= 0 || options->sync_ns <= 0)
        return msc__fail(err, MSC_EINVAL, "batch_ns and sync_ns must be above 0");
    return MSC_OK;
}

/* ---- the thread --------------------------------------------------------------------------------------- */

/* Wakes the thread. Never blocks: a full pipe means that it is woken already. */
static void wake(msc_record *record)
{
    static const char any = 0;

    if (!atomic_exchange_explicit(&record->is_woken, true, memory_order_acq_rel)) {
        ssize_t wrote = write(record->wake[1], &any, 1);

        (void)wrote;
    }
}

static void wait_for_work(msc_record *record)
{
    struct pollfd woken = {record->wake[0], POLLIN, 0};
    char bytes[16];

    if (poll(&woken, 1, TICK_MS) > 0) {
        ssize_t got = read(record->wake[0], bytes, sizeof bytes);

        (void)got;
        atomic_store_explicit(&record->is_woken, false, memory_order_release);
    }
}

static void show(msc_record *record)
{
    const msc__writer *writer = &record->writer;

    atomic_store_explicit(&record->written_bytes, writer->written_bytes, memory_order_relaxed);
    atomic_store_explicit(&record->held_bytes, writer->held_bytes, memory_order_relaxed);
    atomic_store_explicit(&record->failures, writer->failures, memory_order_relaxed);
    atomic_store_explicit(&record->dropped_rows, writer->dropped_rows, memory_order_relaxed);
    atomic_store_explicit(&record->dropped_count, writer->dropped_count, memory_order_relaxed);
    atomic_store_explicit(&record->segment, writer->segment, memory_order_relaxed);
    atomic_store_explicit(&record->system_error, writer->failure, memory_order_release);
}

/* All of the ring to the writer. False: the system refuses. */
static bool drain(msc_record *record, int64_t now_ns)
{
    msc__ring_entry entry;

    while (msc__ring_peek(&record->ring, &entry)) {
        if (!msc__writer_add(&record->writer, (msc__spool_kind)entry.kind, entry.bytes, entry.byte_count,
                             now_ns))
            return false;
        msc__ring_consume(&record->ring, &entry);
    }
    return true;
}

/* What somebody waits for, where it has come out of the ring by now. False: the system refuses. */
static bool settle(msc_record *record)
{
    uint64_t wanted = atomic_load_explicit(&record->wanted, memory_order_acquire);
    uint64_t done = atomic_load_explicit(&record->settled, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&record->ring.tail, memory_order_relaxed);

    if (wanted <= done || tail < wanted)
        return true;
    if (!msc__writer_close_batch(&record->writer) || !msc__writer_settle(&record->writer))
        return false;
    show(record); /* who waits may read the figures as soon as it goes on */
    atomic_store_explicit(&record->settled, tail, memory_order_release);
    return true;
}

static void *run(void *argument)
{
    msc_record *record = argument;
    bool stops;

    do {
        int64_t now_ns = msc__clock_ns();

        stops = atomic_load_explicit(&record->stops, memory_order_acquire);
        if (stops || now_ns >= record->retry_ns) {
            bool ok = drain(record, now_ns) && msc__writer_tick(&record->writer, now_ns) && settle(record);

            record->retry_ns = ok ? 0 : now_ns + RETRY_NS;
            show(record);
        }
        if (!stops)
            wait_for_work(record);
    } while (!stops);
    (void)(msc__writer_close_batch(&record->writer) && msc__writer_settle(&record->writer));
    show(record);
    return NULL;
}

/* ---- life --------------------------------------------------------------------------------------------- */

/* A pipe that never blocks and that no other program inherits. */
static msc_status open_pipe(int ends[2], msc_error *err)
{
    int i;

    if (pipe(ends) != 0) {
        ends[0] = ends[1] = -1;
        return msc__fail(err, MSC_EINTERNAL, "cannot make a pipe: the system said %d", errno);
    }
    for (i = 0; i < 2; i++) {
        (void)fcntl(ends[i], F_SETFD, FD_CLOEXEC);
        (void)fcntl(ends[i], F_SETFL, O_NONBLOCK);
    }
    return MSC_OK;
}

static void let_go(msc_record *record)
{
    int i;

    msc__writer_fini(&record->writer);
    for (i = 0; i < 2; i++)
        if (record->wake[i] >= 0)
            (void)close(record->wake[i]);
    msc__ring_fini(record->ctx, &record->ring);
    msc__free(record->ctx, record, sizeof *record);
}

msc_status msc_record_create(msc_context *ctx, const msc_record_options *options, msc_record **out,
                             msc_error *err)
{
    msc_record_options used = msc_record_options_default();
    msc_record *record;
    msc_status status;

    if (ctx == NULL || options == NULL || out == NULL)
        return msc__fail(err, MSC_EINVAL, "ctx, options or out is NULL");
    *out = NULL;
    status = MSC__READ_OPTIONS("", msc_record_options, sync_ns, options, &used, err);
    if (status == MSC_OK)
        status = check_options(&used, err);
    if (status != MSC_OK)
        return status;
    record = msc__alloc(ctx, sizeof *record);
    if (record == NULL)
        return msc__fail_memory(err, "a recorder", sizeof *record);
    record->ctx = ctx;
    record->fork_count = msc__fork_count();
    record->wake[0] = record->wake[1] = -1;
    memcpy(record->client, used.client, strlen(used.client) + 1);
    status = msc__ring_init(ctx, used.ring_bytes, &record->ring, err);
    if (status == MSC_OK)
        status = open_pipe(record->wake, err);
    if (status == MSC_OK)
        status = msc__writer_init(ctx, &used, record->client, &record->writer, err);
    if (status == MSC_OK)
        status = msc__thread_start(&record->thread, "msc record", run, record, err);
    if (status != MSC_OK) {
        let_go(record);
        return status;
    }
    *out = record;
    return MSC_OK;
}

void msc_record_destroy(msc_record *record)
{
    if (record == NULL)
        return;
    if (record->fork_count == msc__fork_count()) {
        atomic_store_explicit(&record->stops, true, memory_order_release);
        wake(record);
        msc__thread_join(&record->thread);
    }
    let_go(record);
}

/* ---- putting ------------------------------------------------------------------------------------------ */

static msc_status may_put(const msc_record *record, msc_error *err)
{
    if (atomic_load_explicit(&record->has_ended, memory_order_relaxed))
        return msc__fail(err, MSC_ESTATE, "the run has ended");
    if (record->fork_count != msc__fork_count())
        return msc__fail(err, MSC_ESTATE,
                         "the recorder belongs to the process that this one was forked from");
    return MSC_OK;
}

/* Whether a row is to be left out, by how full the ring is. */
static bool is_crowded(msc_record *record)
{
    uint64_t used = msc__ring_used(&record->ring);

    if (used <= record->ring.size / 2)
        return false;
    wake(record);
    return used > record->ring.size / 4 * 3 ||
           (atomic_load_explicit(&record->row_count, memory_order_relaxed) +
            atomic_load_explicit(&record->refused_rows, memory_order_relaxed)) %
                   2 >
               0;
}

static msc_status no_room(_Atomic uint64_t *counter, msc_error *err)
{
    (void)atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
    return msc__fail(err, MSC_EAGAIN, "the ring has no room");
}

msc_status msc_record_row(msc_record *record, int64_t step, int64_t time_ms, const msc_record_value *values,
                          uint32_t value_count, msc_error *err)
{
    uint32_t bytes = msc__spool_row_bytes(values, value_count);
    msc__ring_entry entry;
    msc_status status;

    if (bytes == 0)
        return msc__fail(err, MSC_EINVAL,
                         "a row has 1 to %u values, their names 1 to %u bytes, units at most %u, without "
                         "control characters",
                         MSC_RECORD_ROW_VALUES, MSC_RECORD_NAME_BYTES, MSC_RECORD_UNIT_BYTES);
    status = may_put(record, err);
    if (status != MSC_OK)
        return status;
    if (is_crowded(record) || !msc__ring_reserve(&record->ring, MSC__SPOOL_ROW, bytes, &entry))
        return no_room(&record->refused_rows, err);
    msc__spool_put_row(entry.bytes, step, time_ms, values, value_count);
    msc__ring_publish(&entry);
    (void)atomic_fetch_add_explicit(&record->row_count, 1, memory_order_relaxed);
    return MSC_OK;
}

msc_status msc_record_event(msc_record *record, const char *json, size_t json_bytes, msc_error *err)
{
    msc__ring_entry entry;
    msc_status status = may_put(record, err);

    if (status != MSC_OK)
        return status;
    if (json == NULL || json_bytes == 0 || json_bytes > MSC_RECORD_MOST_BYTES)
        return msc__fail(err, MSC_EINVAL, "an event has %zu bytes, allowed are 1 to %u", json_bytes,
                         MSC_RECORD_MOST_BYTES);
    if (!msc__ring_reserve(&record->ring, MSC__SPOOL_EVENT, (uint32_t)json_bytes, &entry))
        return no_room(&record->refused_count, err);
    memcpy(entry.bytes, json, json_bytes);
    msc__ring_publish(&entry);
    (void)atomic_fetch_add_explicit(&record->event_count, 1, memory_order_relaxed);
    return MSC_OK;
}

msc_status msc_record_document(msc_record *record, const char *name, const char *json, size_t json_bytes,
                               msc_error *err)
{
    size_t name_bytes = name == NULL ? 0 : strlen(name);
    msc__ring_entry entry;
    msc_status status = may_put(record, err);

    if (status != MSC_OK)
        return status;
    if (!msc__record_is_name(name, name_bytes, MSC_RECORD_NAME_BYTES))
        return msc__fail(err, MSC_EINVAL, "a document's name has 1 to %u bytes", MSC_RECORD_NAME_BYTES);
    MSC__ASSERT(name != NULL);
    if (json == NULL || json_bytes == 0 || json_bytes > MSC_RECORD_MOST_BYTES)
        return msc__fail(err, MSC_EINVAL, "document '%s' has %zu bytes, allowed are 1 to %u", name,
                         json_bytes, MSC_RECORD_MOST_BYTES);
    if (!msc__ring_reserve(&record->ring, MSC__SPOOL_DOCUMENT, (uint32_t)(1 + name_bytes + json_bytes),
                           &entry))
        return no_room(&record->refused_count, err);
    entry.bytes[0] = (uint8_t)name_bytes;
    memcpy(entry.bytes + 1, name, name_bytes);
    memcpy(entry.bytes + 1 + name_bytes, json, json_bytes);
    msc__ring_publish(&entry);
    (void)atomic_fetch_add_explicit(&record->event_count, 1, memory_order_relaxed);
    return MSC_OK;
}

msc_status msc_record_end(msc_record *record, const char *state, msc_error *err)
{
    msc__ring_entry entry;
    msc_status status = may_put(record, err);
    uint8_t code = ENDED_NOT;

    if (status != MSC_OK)
        return status;
    if (state != NULL && strcmp(state, "finished") == 0)
        code = ENDED_FINISHED;
    else if (state != NULL && strcmp(state, "failed") == 0)
        code = ENDED_FAILED;
    if (code == ENDED_NOT)
        return msc__fail(err, MSC_EINVAL, "state is neither \"finished\" nor \"failed\"");
    if (!msc__ring_reserve(&record->ring, MSC__SPOOL_END, 1, &entry))
        return no_room(&record->refused_count, err);
    entry.bytes[0] = code;
    msc__ring_publish(&entry);
    atomic_store_explicit(&record->has_ended, true, memory_order_relaxed);
    return MSC_OK;
}

msc_status msc_record_flush(msc_record *record, int64_t timeout_ns, msc_error *err)
{
    uint64_t wanted = atomic_load_explicit(&record->ring.head, memory_order_acquire);
    uint64_t before = atomic_load_explicit(&record->wanted, memory_order_relaxed);
    int64_t end_ns = msc__clock_ns() + timeout_ns;

    if (record->fork_count != msc__fork_count())
        return msc__fail(err, MSC_ESTATE,
                         "the recorder belongs to the process that this one was forked from");
    while (before < wanted && !atomic_compare_exchange_weak(&record->wanted, &before, wanted)) {
    }
    wake(record);
    while (atomic_load_explicit(&record->settled, memory_order_acquire) < wanted) {
        int number = atomic_load_explicit(&record->system_error, memory_order_acquire);

        if (number != 0) {
            msc_status status =
                msc__fail(err, MSC_EIO, "the spool cannot be written: the system said %d", number);

            if (err != NULL)
                err->driver_code = number;
            return status;
        }
        if (msc__clock_ns() >= end_ns)
            return msc__fail(err, MSC_ETIMEDOUT, "the spool is not written yet");
        msc__sleep_ns(POLL_NS);
    }
    return MSC_OK;
}

void msc_record_figures_read(const msc_record *record, msc_record_figures *out, size_t out_bytes)
{
    msc_record_figures figures;

    memset(&figures, 0, sizeof figures);
    figures.row_count = atomic_load_explicit(&record->row_count, memory_order_relaxed);
    figures.event_count = atomic_load_explicit(&record->event_count, memory_order_relaxed);
    figures.dropped_rows = atomic_load_explicit(&record->refused_rows, memory_order_relaxed) +
                           atomic_load_explicit(&record->dropped_rows, memory_order_relaxed);
    figures.dropped_count = atomic_load_explicit(&record->refused_count, memory_order_relaxed) +
                            atomic_load_explicit(&record->dropped_count, memory_order_relaxed);
    figures.written_bytes = atomic_load_explicit(&record->written_bytes, memory_order_relaxed);
    figures.held_bytes = atomic_load_explicit(&record->held_bytes, memory_order_relaxed);
    figures.failures = atomic_load_explicit(&record->failures, memory_order_relaxed);
    figures.system_error = atomic_load_explicit(&record->system_error, memory_order_relaxed);
    figures.segment = atomic_load_explicit(&record->segment, memory_order_relaxed);
    msc__sized_copy(out, out_bytes, &figures, sizeof figures);
}
