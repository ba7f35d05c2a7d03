/* SPDX-License-Identifier: Apache-2.0 */
/** @file http_internal.h  What the files of `http` that know libmicrohttpd share. */
#ifndef MSC_SERVER_HTTP_INTERNAL_H
#define MSC_SERVER_HTTP_INTERNAL_H

#include <microhttpd.h>
#include <stdatomic.h>

#include "base/thread.h"
#include "http/http.h"

/* A connection, as the sweeper sees it. */
typedef struct http_connection {
    int fd;
    _Atomic int64_t deadline_ns; /* when it is ended, unless something happens before */
    struct http_connection *next;
    struct http_connection **link;
} http_connection;

struct http_server {
    http_options options;
    msc_context *ctx; /* under the mutex, once the server runs */
    struct MHD_Daemon *daemon;
    msc__mutex mutex; /* of the connections */
    http_connection *connections;
    msc__thread sweeper;
    int stop_fds[2];
    _Atomic uint64_t body_bytes; /* of all requests under way */
};

struct http_stream {
    struct MHD_Connection *connection;
    const http_source *source;
    msc__mutex mutex;
    bool suspended;
    bool woken; /* since the last pull began */
};

typedef enum http_phase { HTTP_NEW, HTTP_BODY, HTTP_ANSWERED } http_phase;

/* A request, and what its handler does not see. */
typedef struct http_exchange {
    http_request request; /* first */
    http_server *server;
    http_connection *connection;
    http_phase phase;
    const char *wrong_target; /* NULL: it could be taken apart */
    uint8_t *body;
    size_t body_room;
    uint64_t body_limit;
    http_field fields[HTTP_FIELDS];
    bool too_many_fields;
    http_stream stream;
    bool streams;
    http_reply reply;
} http_exchange;

#define HTTP_FIRST_LINE_SECONDS 15
#define HTTP_REQUEST_SECONDS 30
#define HTTP_BETWEEN_SECONDS 75
#define HTTP_SECOND_NS INT64_C(1000000000)

/* http_sweep.c */
void http_connection_changed(void *server, struct MHD_Connection *connection, void **context,
                             enum MHD_ConnectionNotificationCode code);
void http_connection_deadline(http_connection *connection, int seconds); /* 0: none */
void *http_sweep_run(void *server);

/* http_reply.c */
enum MHD_Result http_reply_send(http_exchange *exchange, struct MHD_Connection *connection);
void http_stream_end(http_exchange *exchange);

#endif /* MSC_SERVER_HTTP_INTERNAL_H */
