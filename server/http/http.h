/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file http.h
 * HTTP/1.1 to programs and browsers: requests in, replies out. The door of `server/http`.
 *
 * libmicrohttpd reads the wire; the guard decides who is let in; a handler, which is one for all requests,
 * answers. Each request has memory of its own for all that answering it takes, of a context with a limit; it
 * ends with the request.
 */
#ifndef MSC_SERVER_HTTP_H
#define MSC_SERVER_HTTP_H

#include "http/http_guard.h"
#include "http/http_memory.h"
#include "http/http_target.h"
#include "memscale/base.h"

typedef struct http_server http_server;
typedef struct http_stream http_stream;

/** Most bytes that a request's memory may take. */
#define HTTP_REQUEST_MEMORY (UINT64_C(48) << 20)
#define HTTP_COOKIE_BYTES 256u

typedef struct http_request {
    http_memory memory; /**< all that answering takes; ends with the request */
    const char *method;
    http_target target;
    const char *host;
    const http_field *fields;
    uint32_t field_count;
    char address[64];    /**< of the peer, as text */
    const uint8_t *body; /**< NULL without one */
    size_t body_bytes;
    void *user; /**< the handler's own */
} http_request;

enum { HTTP_SOURCE_END = -1, HTTP_SOURCE_FAILED = -2 };

/** Where the bytes of a long or endless reply come from. Called by one thread at a time. */
typedef struct http_source {
    /**
     * Writes at most `room` bytes and returns how many; 0: nothing yet, and `http_stream_wake` will be
     * called; HTTP_SOURCE_END: that was all; HTTP_SOURCE_FAILED: the rest is not to be had, and the
     * connection ends so that the client sees it.
     */
    int64_t (*pull)(void *self, char *into, size_t room);
    /** Is called once, when the request ends, however it ends. May be NULL. */
    void (*close)(void *self);
    void *self;
} http_source;

typedef struct http_reply {
    unsigned status;
    const char *type; /**< of the body; static */
    const void *body; /**< of the request's memory, or what lives longer */
    size_t body_bytes;
    const http_source *source; /**< instead of a body */
    unsigned retry_after_s;    /**< 0: none */
    const char *allow;         /**< methods, for 405 */
    const char *file_name;     /**< to be saved under; characters that need no quoting */
    char cookie[HTTP_COOKIE_BYTES];
    bool may_be_kept; /**< by caches that ask each time: files of the page */
} http_reply;

typedef struct http_handler {
    void *user;
    /**
     * When the header is there. Returns the most bytes that the body may have, and 0 where there may be none;
     * with a status in `reply` the request is answered with that at once.
     */
    uint64_t (*begin)(void *user, http_request *request, http_reply *reply);
    /** With the whole body. Fills `reply`. */
    void (*answer)(void *user, http_request *request, http_reply *reply);
    /** The stream of a reply with a source, before its first pull. */
    void (*streams)(void *user, http_request *request, http_stream *stream);
    /** About once a second, from a thread of its own. */
    void (*tick)(void *user);
} http_handler;

typedef struct http_options {
    const char *address;      /**< numeric; IPv6 without brackets */
    uint16_t port;            /**< 0: any that is free */
    const char *const *hosts; /**< as `http_guard` has them; they live as long as the server */
    uint32_t threads;
    uint32_t connections;
    uint32_t connections_per_address;
    bool behind_https;       /**< says so to browsers */
    msc_allocator allocator; /**< all zero: the C library's; must bear several threads */
    http_handler handler;
} http_options;

/** Begins to answer. Errors: EINVAL: the address; EIO: it is in use, say; ENOMEM. */
MSC_NODISCARD msc_status http_start(const http_options *options, http_server **out, msc_error *err);
uint16_t http_port(const http_server *server);
/**
 * Ends every connection and waits for the threads. Streams must have been woken to their end. NULL is
 * accepted.
 */
void http_stop(http_server *server);

/** There is something to pull. From any thread, until the source is closed. */
void http_stream_wake(http_stream *stream);

/** A reply of ours for a request that is not answered otherwise; `message` is a literal without quotes. */
void http_refuse(http_request *request, http_refusal refusal, http_reply *reply);

/* ---- the page's files ------------------------------------------------------------------------ */

typedef struct http_page http_page;

/** Reads all files of a folder, at most 16 MiB; links are not followed. Errors: EIO, EOVERFLOW, ENOMEM. */
MSC_NODISCARD msc_status http_page_load(const msc_allocator *allocator, const char *folder, http_page **out,
                                        msc_error *err);
void http_page_free(http_page *page);
/**
 * The file of a path that was asked for, or false. Names that files do not have cannot be found, whatever
 * they are.
 */
bool http_page_find(const http_page *page, const http_target *target, http_reply *reply);
/** The page's first file, for paths that it draws itself. */
bool http_page_index(const http_page *page, http_reply *reply);

#endif /* MSC_SERVER_HTTP_H */
