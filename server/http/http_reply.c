/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replies, and streams.
 *
 * Every reply has the headers that keep a browser from doing more with it than it should: no foreign scripts,
 * frames, types or referrers, and nothing kept by caches but the page's files.
 *
 * A stream whose source has nothing is suspended. Between the moment when the source says so and the
 * suspension somebody may wake it: `woken` remembers that, and it is pulled once more. Nobody holds the
 * stream's lock while a source is pulled, so a source may hold its own while it wakes streams.
 */
#include <stdio.h>
#include <string.h>

#include "http/http_internal.h"

#define STREAM_BLOCK_BYTES 4096u
#define REFUSAL_BYTES 512u

void http_refuse(http_request *request, http_refusal refusal, http_reply *reply)
{
    char *body = http_memory_get(&request->memory, REFUSAL_BYTES);
    int bytes = 0;

    if (body != NULL)
        bytes = snprintf(body, REFUSAL_BYTES, "{\"error\": {\"code\": \"%s\", \"message\": \"%s\"}}\n",
                         refusal.code, refusal.message);
    reply->status = refusal.status;
    reply->type = "application/json";
    reply->body = body;
    reply->body_bytes = (size_t)bytes;
    reply->source = NULL;
}

void http_stream_wake(http_stream *stream)
{
    msc__mutex_lock(&stream->mutex);
    if (stream->suspended) {
        stream->suspended = false;
        MHD_resume_connection(stream->connection);
    } else {
        stream->woken = true;
    }
    msc__mutex_unlock(&stream->mutex);
}

static ssize_t pull(void *user, uint64_t position, char *into, size_t room)
{
    http_stream *stream = user;
    bool again = true;

    (void)position;
    while (again) {
        int64_t bytes;

        msc__mutex_lock(&stream->mutex);
        stream->woken = false;
        msc__mutex_unlock(&stream->mutex);
        bytes = stream->source->pull(stream->source->self, into, room);
        if (bytes != 0)
            return bytes == HTTP_SOURCE_END      ? MHD_CONTENT_READER_END_OF_STREAM
                   : bytes == HTTP_SOURCE_FAILED ? MHD_CONTENT_READER_END_WITH_ERROR
                                                 : (ssize_t)bytes;
        msc__mutex_lock(&stream->mutex);
        stream->suspended = !stream->woken;
        if (stream->suspended)
            MHD_suspend_connection(stream->connection);
        again = !stream->suspended;
        msc__mutex_unlock(&stream->mutex);
    }
    return 0;
}

void http_stream_end(http_exchange *exchange)
{
    const http_source *source = exchange->stream.source;

    if (source == NULL)
        return;
    if (source->close != NULL)
        source->close(source->self);
    if (exchange->streams)
        msc__mutex_fini(&exchange->stream.mutex);
    exchange->stream.source = NULL;
}

static struct MHD_Response *make_stream(http_exchange *exchange, struct MHD_Connection *connection)
{
    const http_server *server = exchange->server;
    http_stream *stream = &exchange->stream;

    stream->source = exchange->reply.source; /* from here on it is closed with the request */
    stream->connection = connection;
    if (msc__mutex_init(&stream->mutex, NULL) != MSC_OK)
        return NULL;
    exchange->streams = true;
    server->options.handler.streams(server->options.handler.user, &exchange->request, stream);
    return MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK_BYTES, pull, stream, NULL);
}

static bool put(struct MHD_Response *response, const char *name, const char *value)
{
    return value == NULL || *value == '\0' || MHD_add_response_header(response, name, value) == MHD_YES;
}

static bool put_guards(struct MHD_Response *response, const http_exchange *exchange)
{
    return put(response, "Content-Security-Policy",
               "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src "
               "'none'") &&
           put(response, "X-Content-Type-Options", "nosniff") && put(response, "X-Frame-Options", "DENY") &&
           put(response, "Referrer-Policy", "no-referrer") &&
           put(response, "Cross-Origin-Opener-Policy", "same-origin") &&
           put(response, "Cross-Origin-Resource-Policy", "same-origin") &&
           put(response, "Cache-Control", exchange->reply.may_be_kept ? "no-cache" : "no-store") &&
           put(response, "Strict-Transport-Security",
               exchange->server->options.behind_https ? "max-age=31536000" : NULL);
}

static bool put_headers(struct MHD_Response *response, const http_exchange *exchange)
{
    const http_reply *reply = &exchange->reply;
    char text[HTTP_COOKIE_BYTES] = "";
    bool done = put_guards(response, exchange) && put(response, "Content-Type", reply->type) &&
                put(response, "Set-Cookie", reply->cookie) && put(response, "Allow", reply->allow);

    if (reply->retry_after_s > 0) {
        (void)snprintf(text, sizeof text, "%u", reply->retry_after_s);
        done = done && put(response, "Retry-After", text);
    }
    if (reply->file_name != NULL) {
        (void)snprintf(text, sizeof text, "attachment; filename=\"%s\"", reply->file_name);
        done = done && put(response, "Content-Disposition", text);
    }
    if (reply->source != NULL && strcmp(reply->type, "text/event-stream") == 0)
        done = done && put(response, "X-Accel-Buffering", "no"); /* nginx passes events on at once */
    return done;
}

/* To HEAD the library would send the last chunk of a stream, which is no part of its answer. */
static void drop_stream(http_exchange *exchange)
{
    exchange->stream.source = exchange->reply.source;
    http_stream_end(exchange);
    exchange->reply.source = NULL;
}

enum MHD_Result http_reply_send(http_exchange *exchange, struct MHD_Connection *connection)
{
    const http_reply *reply = &exchange->reply;
    struct MHD_Response *response;
    enum MHD_Result result = MHD_NO;

    if (reply->source != NULL && strcmp(exchange->request.method, "HEAD") == 0)
        drop_stream(exchange);
    if (reply->source != NULL)
        response = make_stream(exchange, connection);
    else /* the body lives as long as the request, and the library does not write to it */
        response =
            MHD_create_response_from_buffer(reply->body_bytes, (void *)reply->body, MHD_RESPMEM_PERSISTENT);
    exchange->phase = HTTP_ANSWERED;
    http_connection_deadline(exchange->connection, 0);
    if (response == NULL)
        return MHD_NO;
    if (reply->status >= 400 && reply->status != 404 && reply->status != 429)
        (void)put(response, "Connection", "close");
    if (put_headers(response, exchange))
        result = MHD_queue_response(connection, reply->status, response);
    MHD_destroy_response(response);
    return result;
}
