/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run, live: a watch becomes the source of a stream.
 *
 * The run is looked for twice: first whether it is the caller's, then, with the watch in place, for its
 * version. What is committed in between is in the version; what comes after is heard by the watch.
 *
 * Who watches is asked about again while the stream goes on, at most every few seconds: a session that ended, a
 * token that was revoked, a member who was removed hear no more.
 */
#include <string.h>

#include "api/api_internal.h"
#include "base/thread.h"

#define TRUST_NS (INT64_C(5) * 1000000000)

typedef struct live_source {
    http_source source;
    live_watch *watch;
    const api_call *call;
    int64_t trusted_ns; /* until then nobody is asked */
} live_source;

static bool may_still_read(live_source *it)
{
    const api_call *call = it->call;
    store_run_ref ref = api_ref(call);
    store_run run;

    if (msc__clock_ns() < it->trusted_ns || live_is_gone(it->watch))
        return true;
    it->trusted_ns = msc__clock_ns() + TRUST_NS;
    ref.now_ms = call->it->parts.now_ms();
    return api_is_still_known(call) && store_run_find(call->it->parts.store, ref, &run) == STORE_OK;
}

static int64_t pull(void *self, char *into, size_t room)
{
    live_source *it = self;

    return may_still_read(it) ? live_read(it->watch, into, room) : HTTP_SOURCE_END;
}

static void end(void *self)
{
    live_close(((live_source *)self)->watch);
}

static void wake(void *stream)
{
    http_stream_wake(stream);
}

void api_live_stream(http_request *request, http_stream *stream)
{
    const api_call *call = request->user;
    const live_source *source = call->input;

    if (source != NULL) /* an export has no need to be woken */
        live_listen(source->watch, wake, stream);
}

/* What the client has seen: of its last connection, or of the run as it read it; -1: nothing. */
static bool read_seen(api_call *call, int64_t *seen)
{
    const http_request *request = call->request;
    const char *last = http_field_find(request->fields, request->field_count, "last-event-id");

    *seen = -1;
    if (last != NULL)
        return api_parse_integer(last, 0, API_EXACT, seen) ||
               api_invalid(call, "Last-Event-ID", last, "the id of an event of this stream");
    return api_parameter(call, "after", 0, API_EXACT, seen);
}

void api_live(api_call *call)
{
    live_source *source = http_memory_get(&call->request->memory, sizeof *source);
    live_watch *watch;
    int64_t seen;
    store_run run;

    if (!read_seen(call, &seen) || !api_find_run(call, &run))
        return;
    watch = source == NULL ? NULL : live_open(call->it->parts.live, run.id);
    if (watch == NULL) {
        api_refuse(call, &(const api_fault){.status = 503,
                                            .code = "later",
                                            .message = "too many runs are watched at this moment",
                                            .retry_after_s = 5});
        return;
    }
    if (!api_find_run(call, &run)) {
        live_close(watch);
        return;
    }
    live_begin(watch, run.version, seen);
    source->watch = watch;
    source->call = call;
    source->trusted_ns = msc__clock_ns() + TRUST_NS;
    source->source = (http_source){pull, end, source};
    call->input = source;
    call->reply->status = 200;
    call->reply->type = "text/event-stream";
    call->reply->source = &source->source;
}
