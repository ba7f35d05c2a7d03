/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams of the host device: one thread each, which does the operations of a queue in their order.
 *
 *                       done              given
 *      queue   . . . . . [ copy | record | wait ] . . .      a ring of MSC__HOST_QUEUE operations
 *                          ^ the thread is here
 *
 * Operations of a stream are numbered from 1, so a moment of a stream is a number, and it has come when `done`
 * has reached it. An event is no more than that: the stream on which it was recorded last and the number of the
 * record. A wait takes the event's moment along when it is submitted, so records that come later cannot change
 * it, and an event that was recorded on two streams needs no thought. Ids of streams are never given twice: a
 * moment of a stream that is not there any more has come, because a stream ends when its work is done.
 *
 * A stream that has nothing to do needs no thread: a record there is done at once, and so is a small copy without
 * trouble, because handing it over takes longer. Where the thread has something to do, all waits for its turn.
 *
 * A record still has something to do when its turn comes: it moves the failure of the copies before it, if
 * there was one, from the stream to the event. It finds its event by address; an event that is destroyed
 * before that is struck from the queues.
 *
 * Nothing can wait in a circle: a wait names a moment that was submitted before it, so of all operations that
 * are not done, the one that was submitted first can be done. That is also why a submitter may sleep while a queue
 * is full.
 *
 * One mutex of the device is over everything; copies run without it. It is what makes the bytes of one stream's
 * copy visible to a thread that saw the moment come.
 */
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "device/device_host.h"

#define AT_ONCE_BYTES (16u << 10) /* copied in the time that waking a thread takes, or less */

typedef enum operation_verb { VERB_COPY, VERB_RECORD, VERB_WAIT } operation_verb;

typedef struct operation {
    operation_verb verb;
    msc__host_copy copy;    /* COPY */
    msc__host_point point;  /* WAIT */
    msc__host_event *event; /* RECORD; NULL: destroyed since */
} operation;

struct msc__host_stream {
    msc__host *host;
    msc__host_stream *next;
    uint64_t id;
    uint64_t given; /* operations submitted */
    uint64_t done;  /* of those; the thread alone advances it */
    bool ending;
    msc__host_failure failure; /* of the copies since the last record */
    msc__thread thread;
    msc__cond work; /* something was given, or the stream ends */
    operation queue[MSC__HOST_QUEUE];
};

static operation *at(msc__host_stream *stream, uint64_t index)
{
    MSC__ASSERT(index >= stream->done && index - stream->done < MSC__HOST_QUEUE);
    return &stream->queue[index % MSC__HOST_QUEUE];
}

static bool is_idle(const msc__host_stream *stream)
{
    MSC__ASSERT(stream->done <= stream->given && stream->given - stream->done <= MSC__HOST_QUEUE);
    return stream->done == stream->given;
}

/* ---- moments; the mutex is held --------------------------------------------------------------------- */

static bool has_come(const msc__host *host, msc__host_point point)
{
    const msc__host_stream *stream;

    MSC__ASSERT(point.stream <= host->last_stream);
    for (stream = host->streams; stream != NULL; stream = stream->next)
        if (stream->id == point.stream)
            return stream->done >= point.position;
    return true;
}

static void await_progress(msc__host *host)
{
    host->waiting++;
    msc__cond_wait(&host->progress, &host->mutex);
    MSC__ASSERT(host->waiting > 0);
    host->waiting--;
}

static void await_point(msc__host *host, msc__host_point point)
{
    while (!has_come(host, point))
        await_progress(host);
}

static void announce_progress(msc__host *host)
{
    if (host->waiting > 0)
        msc__cond_broadcast(&host->progress);
}

/* ---- the thread of a stream ------------------------------------------------------------------------- */

static void take_failure(msc__host_stream *stream, msc__host_event *event)
{
    event->failure = stream->failure;
    memset(&stream->failure, 0, sizeof stream->failure);
}

static void record_now(msc__host_stream *stream, const operation *record)
{
    msc__host_event *event = record->event;

    MSC__ASSERT(record->verb == VERB_RECORD);
    /* Only the event's last record may speak for it. A failure that nobody can be given stays for the next one. */
    if (event == NULL || event->point.stream != stream->id || event->point.position != stream->done + 1)
        return;
    take_failure(stream, event);
}

static void copy_now(msc__host_stream *stream, const msc__host_copy *copy)
{
    msc__host *host = stream->host;
    msc__host_failure failure;

    MSC__ASSERT(copy->to != NULL && copy->from != NULL && copy->bytes > 0);
    memset(&failure, 0, sizeof failure);
    msc__mutex_unlock(&host->mutex);
    msc__host_copy_run(&host->faults, copy, &failure);
    msc__mutex_lock(&host->mutex);
    if (stream->failure.status == MSC_OK)
        stream->failure = failure;
}

/* A thread that waits for a copy waits for the record behind it, and is not woken before that. */
static bool is_followed_by_record(msc__host_stream *stream)
{
    return stream->done < stream->given && at(stream, stream->done)->verb == VERB_RECORD;
}

/* The operation stays in the queue while it is done, so its place is not given away. */
static void do_next(msc__host_stream *stream)
{
    operation *next = at(stream, stream->done);

    MSC__ASSERT(stream->done < stream->given);
    switch (next->verb) {
    case VERB_COPY:
        copy_now(stream, &next->copy);
        break;
    case VERB_WAIT:
        await_point(stream->host, next->point);
        break;
    case VERB_RECORD:
        record_now(stream, next);
        break;
    }
    stream->done++;
    if (!is_followed_by_record(stream))
        announce_progress(stream->host);
}

static void *run(void *argument)
{
    msc__host_stream *stream = argument;
    msc__host *host = stream->host;

    msc__mutex_lock(&host->mutex);
    for (;;) {
        while (stream->done == stream->given && !stream->ending)
            msc__cond_wait(&stream->work, &host->mutex);
        if (stream->done == stream->given)
            break;
        do_next(stream);
    }
    msc__mutex_unlock(&host->mutex);
    return NULL;
}

/* ---- streams ---------------------------------------------------------------------------------------- */

msc_status msc__host_streams_init(msc__host *host, msc_error *err)
{
    msc_status status = msc__mutex_init(&host->mutex, err);

    if (status != MSC_OK)
        return status;
    status = msc__cond_init(&host->progress, err);
    if (status != MSC_OK)
        msc__mutex_fini(&host->mutex);
    return status;
}

void msc__host_streams_fini(msc__host *host)
{
    msc__cond_fini(&host->progress);
    msc__mutex_fini(&host->mutex);
}

msc_status msc__host_stream_create(msc_device *device, void **out, msc_error *err)
{
    msc__host *host = (msc__host *)device;
    msc__host_stream *stream;
    msc_status status = msc__device_check_process(device, err);

    *out = NULL;
    if (status != MSC_OK)
        return status;
    stream = msc__alloc(device->ctx, sizeof *stream);
    if (stream == NULL)
        return msc__fail_memory(err, "a stream", sizeof *stream);
    stream->host = host;
    status = msc__cond_init(&stream->work, err);
    if (status != MSC_OK)
        goto no_cond;
    msc__mutex_lock(&host->mutex);
    stream->id = ++host->last_stream;
    msc__mutex_unlock(&host->mutex);
    status = msc__thread_start(&stream->thread, "msc-stream", run, stream, err);
    if (status != MSC_OK)
        goto no_thread;
    msc__mutex_lock(&host->mutex);
    stream->next = host->streams;
    host->streams = stream;
    msc__mutex_unlock(&host->mutex);
    *out = stream;
    return MSC_OK;

no_thread:
    msc__cond_fini(&stream->work);
no_cond:
    msc__free(device->ctx, stream, sizeof *stream);
    return status;
}

void msc__host_stream_destroy(msc_device *device, void *handle)
{
    msc__host *host = (msc__host *)device;
    msc__host_stream *stream = handle;
    msc__host_stream **link = &host->streams;

    if (stream == NULL)
        return;
    if (msc__device_check_process(device, NULL) == MSC_OK) {
        msc__mutex_lock(&host->mutex);
        stream->ending = true;
        msc__cond_signal(&stream->work);
        msc__mutex_unlock(&host->mutex);
        msc__thread_join(&stream->thread);
        msc__mutex_lock(&host->mutex);
        MSC__ASSERT(is_idle(stream));
        while (*link != stream) {
            MSC__ASSERT(*link != NULL);
            link = &(*link)->next;
        }
        *link = stream->next;
        msc__mutex_unlock(&host->mutex);
        msc__cond_fini(&stream->work);
    }
    msc__free(device->ctx, stream, sizeof *stream);
}

/* Locks. A handle that is not one of our streams is refused, and then nothing is locked. */
static msc_status enter(msc__host *host, const void *handle, msc_error *err)
{
    const msc__host_stream *stream;
    msc_status status = msc__device_check_process(&host->device, err);

    if (status != MSC_OK)
        return status;
    msc__mutex_lock(&host->mutex);
    if (handle == NULL)
        return MSC_OK;
    for (stream = host->streams; stream != NULL; stream = stream->next)
        if (stream == handle)
            return MSC_OK;
    msc__mutex_unlock(&host->mutex);
    return msc__fail(err, MSC_EINVAL, "stream %p is none of this device; the program's own is NULL", handle);
}

/* A free place of the queue, which `submit` then counts; waits for one if there is none. */
static operation *place(msc__host_stream *stream, operation_verb verb)
{
    operation *free_place;

    while (stream->given - stream->done == MSC__HOST_QUEUE)
        await_progress(stream->host);
    MSC__ASSERT(!stream->ending);
    free_place = at(stream, stream->given);
    memset(free_place, 0, sizeof *free_place);
    free_place->verb = verb;
    return free_place;
}

static void submit(msc__host_stream *stream)
{
    MSC__ASSERT(stream->given - stream->done < MSC__HOST_QUEUE);
    stream->given++;
    msc__cond_signal(&stream->work);
}

void msc__host_stream_finish(msc_device *device, void *handle)
{
    msc__host *host = (msc__host *)device;
    const msc__host_stream *stream = handle;

    if (enter(host, stream, NULL) != MSC_OK)
        return;
    if (stream != NULL) {
        msc__host_point end = {.stream = stream->id, .position = stream->given};

        await_point(host, end);
    }
    msc__mutex_unlock(&host->mutex);
}

/* ---- events ----------------------------------------------------------------------------------------- */

msc_status msc__host_event_create(msc_device *device, void **out, msc_error *err)
{
    msc_status status = msc__device_check_process(device, err);

    *out = NULL;
    if (status != MSC_OK)
        return status;
    *out = msc__alloc(device->ctx, sizeof(msc__host_event));
    return *out != NULL ? MSC_OK : msc__fail_memory(err, "an event", sizeof(msc__host_event));
}

void msc__host_event_destroy(msc_device *device, void *event)
{
    msc__host *host = (msc__host *)device;
    msc__host_stream *stream;
    uint64_t i;

    if (event == NULL)
        return;
    if (msc__device_check_process(device, NULL) == MSC_OK) {
        msc__mutex_lock(&host->mutex);
        for (stream = host->streams; stream != NULL; stream = stream->next)
            for (i = stream->done; i < stream->given; i++)
                if (at(stream, i)->event == event)
                    at(stream, i)->event = NULL;
        msc__mutex_unlock(&host->mutex);
    }
    msc__free(device->ctx, event, sizeof(msc__host_event));
}

msc_status msc__host_event_record(msc_device *device, void *handle, void *stream_handle, msc_error *err)
{
    msc__host *host = (msc__host *)device;
    msc__host_stream *stream = stream_handle;
    msc__host_event *event = handle;
    msc_status status = enter(host, stream, err);
    bool idle;

    if (status != MSC_OK)
        return status;
    idle = stream == NULL || is_idle(stream);
    if (!idle)
        place(stream, VERB_RECORD)->event = event;
    memset(event, 0, sizeof *event); /* a moment that has come */
    if (stream != NULL && idle)
        take_failure(stream, event);
    if (!idle) {
        event->point.stream = stream->id;
        event->point.position = stream->given + 1;
        submit(stream);
        MSC__ASSERT(event->point.position == stream->given && stream->id > 0);
    }
    msc__mutex_unlock(&host->mutex);
    return MSC_OK;
}

msc_status msc__host_stream_wait(msc_device *device, void *stream_handle, void *handle, msc_error *err)
{
    msc__host *host = (msc__host *)device;
    msc__host_stream *stream = stream_handle;
    msc__host_event *event = handle;
    msc_status status = enter(host, stream, err);

    if (status != MSC_OK)
        return status;
    if (stream == NULL) {
        await_point(host, event->point);
    } else if (!has_come(host, event->point)) {
        msc__host_point point = event->point; /* as it is now, not when there is a place */

        place(stream, VERB_WAIT)->point = point;
        submit(stream);
    }
    msc__mutex_unlock(&host->mutex);
    return MSC_OK;
}

static msc_status tell(const msc__host_failure *failure, msc_error *err)
{
    if (failure->status == MSC_OK)
        return MSC_OK;
    return msc__fail(err, failure->status,
                     "copy %llu of the host device, %llu bytes %s, failed by fault injection",
                     (unsigned long long)failure->number, (unsigned long long)failure->bytes,
                     failure->kind == MSC_COPY_OUT ? "out of it" : "into it");
}

msc_status msc__host_event_query(msc_device *device, void *handle, msc_error *err)
{
    msc__host *host = (msc__host *)device;
    const msc__host_event *event = handle;
    msc_status status = enter(host, NULL, err);

    if (status != MSC_OK)
        return status;
    status = has_come(host, event->point) ? tell(&event->failure, err) : MSC_EAGAIN;
    msc__mutex_unlock(&host->mutex);
    return status;
}

msc_status msc__host_event_wait(msc_device *device, void *handle, msc_error *err)
{
    msc__host *host = (msc__host *)device;
    const msc__host_event *event = handle;
    msc_status status = enter(host, NULL, err);

    if (status != MSC_OK)
        return status;
    await_point(host, event->point);
    MSC__ASSERT(has_come(host, event->point));
    status = tell(&event->failure, err);
    msc__mutex_unlock(&host->mutex);
    return status;
}

/* ---- copies ----------------------------------------------------------------------------------------- */

msc_status msc__host_copy_submit(msc_device *device, void *to, const void *from, uint64_t bytes,
                                 msc_copy_kind kind, void *stream_handle, msc_error *err)
{
    msc__host *host = (msc__host *)device;
    msc__host_stream *stream = stream_handle;
    msc__host_copy *copy;
    msc_status status;

    if (to == NULL || from == NULL || bytes == 0 || bytes > SIZE_MAX || stream == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot copy %llu bytes from %p to %p on stream %p",
                         (unsigned long long)bytes, from, to, stream_handle);
    status = enter(host, stream, err);
    if (status != MSC_OK)
        return status;
    if (is_idle(stream) && bytes <= AT_ONCE_BYTES && msc__host_copies_plainly(&host->faults)) {
        msc__mutex_unlock(&host->mutex);
        memcpy(to, from, (size_t)bytes);
        return MSC_OK;
    }
    copy = &place(stream, VERB_COPY)->copy;
    copy->to = to;
    copy->from = from;
    copy->bytes = bytes;
    copy->number = host->last_copy++;
    copy->kind = kind;
    submit(stream);
    msc__mutex_unlock(&host->mutex);
    return MSC_OK;
}
