/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The server: from libmicrohttpd's callbacks to one handler.
 *
 *      connection        http_connection_changed     its deadline begins
 *      request line      begin_exchange              the context of the request; the target is taken apart
 *      header            let_in                      guard, then the handler's `begin`
 *      body              take_body
 *      end               the handler's `answer`      reply or stream
 *      completed         end_exchange                the context ends
 *
 * What is refused is answered at the header, before any body is read, and the connection is closed.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "http/http_internal.h"

#define CONNECTION_BYTES (32u * 1024u) /* request line and header */
#define SILENCE_SECONDS 30u
#define BODY_BYTES_OF_ALL (UINT64_C(256) << 20)
#define FIRST_BODY_BYTES 4096u

/* ---- one exchange ---------------------------------------------------------------------------- */

static void *begin_exchange(void *user, const char *uri, struct MHD_Connection *connection)
{
    http_server *server = user;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    msc_context_options options = msc_context_options_default();
    msc_context *ctx = NULL;
    http_exchange *exchange;
    char *room;

    options.allocator = server->options.allocator;
    options.memory_limit_bytes = HTTP_REQUEST_MEMORY;
    if (msc_context_create(&options, &ctx, NULL) != MSC_OK)
        return NULL;
    exchange = msc__alloc(ctx, sizeof *exchange);
    if (exchange == NULL) {
        msc_context_destroy(ctx);
        return NULL;
    }
    exchange->request.memory.ctx = ctx;
    exchange->server = server;
    exchange->connection = info->socket_context;
    room = http_memory_get(&exchange->request.memory, strlen(uri) + 1);
    exchange->wrong_target = room == NULL ? "there is no memory for the target"
                                          : http_target_parse(uri, room, &exchange->request.target);
    http_connection_deadline(exchange->connection, HTTP_REQUEST_SECONDS);
    return exchange;
}

static void end_exchange(void *user, struct MHD_Connection *connection, void **context,
                         enum MHD_RequestTerminationCode code)
{
    http_exchange *exchange = *context;
    http_server *server = user;
    msc_context *ctx;

    (void)connection;
    (void)code;
    if (exchange == NULL)
        return;
    http_stream_end(exchange);
    http_connection_deadline(exchange->connection, HTTP_BETWEEN_SECONDS);
    atomic_fetch_sub(&server->body_bytes, exchange->body_room);
    http_memory_end(&exchange->request.memory);
    ctx = exchange->request.memory.ctx;
    msc__free(ctx, exchange, sizeof *exchange);
    MSC__ASSERT(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
    *context = NULL;
}

static enum MHD_Result take_field(void *user, enum MHD_ValueKind kind, const char *name, size_t name_bytes,
                                  const char *value, size_t value_bytes)
{
    http_exchange *exchange = user;
    http_request *request = &exchange->request;

    (void)kind;
    exchange->too_many_fields = request->field_count == HTTP_FIELDS;
    if (exchange->too_many_fields)
        return MHD_NO;
    exchange->fields[request->field_count++] =
        (http_field){name, name_bytes, value == NULL ? "" : value, value_bytes};
    return MHD_YES;
}

static void read_address(http_request *request, struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const struct sockaddr *from = info == NULL ? NULL : info->client_addr;
    const void *number = NULL;

    if (from != NULL && from->sa_family == AF_INET)
        number = &((const struct sockaddr_in *)(const void *)from)->sin_addr;
    else if (from != NULL && from->sa_family == AF_INET6)
        number = &((const struct sockaddr_in6 *)(const void *)from)->sin6_addr;
    if (number == NULL ||
        inet_ntop(from->sa_family, number, request->address, sizeof request->address) == NULL)
        request->address[0] = '\0';
}

/* Whether the request may go on; if not, the reply says why. */
static bool let_in(http_exchange *exchange, struct MHD_Connection *connection, const char *version)
{
    const http_server *server = exchange->server;
    http_request *request = &exchange->request;
    http_refusal refusal = {0, NULL, NULL};
    http_guarded guarded = {0};

    (void)MHD_get_connection_values_n(connection, MHD_HEADER_KIND, take_field, exchange);
    request->fields = exchange->fields;
    if (exchange->too_many_fields)
        refusal = (http_refusal){431, "too_large", "the header has more than 64 fields"};
    else
        refusal = http_guard(version, request->fields, request->field_count, server->options.hosts, &guarded);
    if (refusal.status == 0 && exchange->wrong_target != NULL)
        refusal = (http_refusal){400, "invalid", exchange->wrong_target};
    if (refusal.status != 0) {
        http_refuse(request, refusal, &exchange->reply);
        return false;
    }
    request->host = guarded.host;
    read_address(request, connection);
    exchange->body_limit =
        server->options.handler.begin(server->options.handler.user, request, &exchange->reply);
    if (exchange->reply.status != 0)
        return false;
    if (guarded.length > exchange->body_limit)
        http_refuse(request,
                    (http_refusal){413, "too_large", "the body is larger than this request may have"},
                    &exchange->reply);
    return exchange->reply.status == 0;
}

/* Appends a part of the body; what it may take grows with what has come, not with what was announced. */
static bool take_body(http_exchange *exchange, const char *data, size_t bytes)
{
    http_request *request = &exchange->request;
    size_t needed = request->body_bytes + bytes;
    size_t room = exchange->body_room == 0 ? FIRST_BODY_BYTES : exchange->body_room;
    uint8_t *grown;

    if (needed > exchange->body_limit)
        return false;
    while (room < needed)
        room *= 2;
    if (room > exchange->body_room) {
        uint64_t more = room - exchange->body_room;

        if (atomic_fetch_add(&exchange->server->body_bytes, more) + more > BODY_BYTES_OF_ALL ||
            (grown = http_memory_grow(&request->memory, exchange->body, room)) == NULL) {
            atomic_fetch_sub(&exchange->server->body_bytes, more);
            return false;
        }
        exchange->body = grown;
        exchange->body_room = room;
    }
    memcpy(exchange->body + request->body_bytes, data, bytes);
    request->body = exchange->body;
    request->body_bytes = needed;
    return true;
}

static enum MHD_Result handle(void *user, struct MHD_Connection *connection, const char *url,
                              const char *method, const char *version, const char *data, size_t *data_bytes,
                              void **context)
{
    http_exchange *exchange = *context;
    const http_server *server = user;

    (void)url;
    if (exchange == NULL)
        return MHD_NO; /* there was no memory for it */
    if (exchange->phase == HTTP_NEW) {
        exchange->phase = HTTP_BODY;
        exchange->request.method = method;
        return let_in(exchange, connection, version) ? MHD_YES : http_reply_send(exchange, connection);
    }
    if (*data_bytes > 0) {
        bool taken = exchange->phase == HTTP_BODY && take_body(exchange, data, *data_bytes);

        *data_bytes = 0;
        return taken ? MHD_YES : MHD_NO;
    }
    if (exchange->phase == HTTP_ANSWERED)
        return MHD_YES;
    http_connection_deadline(exchange->connection, 0);
    server->options.handler.answer(server->options.handler.user, &exchange->request, &exchange->reply);
    MSC__ASSERT(exchange->reply.status != 0);
    return http_reply_send(exchange, connection);
}

/* ---- the server ------------------------------------------------------------------------------ */

/* Targets are taken apart by us, from the raw text. */
static size_t leave_escaped(void *user, struct MHD_Connection *connection, char *text)
{
    (void)user;
    (void)connection;
    return strlen(text);
}

static msc_status start_daemon(http_server *server, msc_error *err)
{
    const http_options *options = &server->options;
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(options->port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(options->port)};
    bool is_v6 = strchr(options->address, ':') != NULL;
    const void *address = is_v6 ? (const void *)&v6 : (const void *)&v4;
    unsigned flags =
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_ITC | MHD_ALLOW_SUSPEND_RESUME | (is_v6 ? MHD_USE_IPv6 : 0u);

    if (inet_pton(is_v6 ? AF_INET6 : AF_INET, options->address,
                  is_v6 ? (void *)&v6.sin6_addr : (void *)&v4.sin_addr) != 1)
        return msc__fail(err, MSC_EINVAL, "%s is not an IP address", options->address);
    errno = 0;
    server->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, handle, server, MHD_OPTION_SOCK_ADDR, address, MHD_OPTION_URI_LOG_CALLBACK,
        begin_exchange, server, MHD_OPTION_NOTIFY_COMPLETED, end_exchange, server,
        MHD_OPTION_NOTIFY_CONNECTION, http_connection_changed, server, MHD_OPTION_UNESCAPE_CALLBACK,
        leave_escaped, server, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_BYTES,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)options->connections, MHD_OPTION_PER_IP_CONNECTION_LIMIT,
        (unsigned)options->connections_per_address, MHD_OPTION_CONNECTION_TIMEOUT, SILENCE_SECONDS,
        MHD_OPTION_THREAD_POOL_SIZE, (unsigned)options->threads, MHD_OPTION_STRICT_FOR_CLIENT, 1,
        MHD_OPTION_LISTENING_ADDRESS_REUSE, 1u, MHD_OPTION_END);
    if (server->daemon == NULL)
        return msc__fail(err, MSC_EIO, "cannot listen on %s port %u: %s", options->address,
                         (unsigned)options->port, errno == 0 ? "the library refused" : strerror(errno));
    return MSC_OK;
}

msc_status http_start(const http_options *options, http_server **out, msc_error *err)
{
    msc_context_options context = msc_context_options_default();
    msc_context *ctx = NULL;
    http_server *server;
    msc_status status;

    *out = NULL;
    context.allocator = options->allocator;
    status = msc_context_create(&context, &ctx, err);
    if (status != MSC_OK)
        return status;
    server = msc__alloc(ctx, sizeof *server);
    if (server == NULL) {
        msc_context_destroy(ctx);
        return msc__fail_memory(err, "the server", sizeof *server);
    }
    server->options = *options;
    server->ctx = ctx;
    server->stop_fds[0] = server->stop_fds[1] = -1;
    status = msc__mutex_init(&server->mutex, err);
    if (status == MSC_OK && pipe(server->stop_fds) != 0)
        status = msc__fail(err, MSC_EIO, "cannot make a pipe: %s", strerror(errno));
    if (status == MSC_OK)
        status = start_daemon(server, err);
    if (status == MSC_OK)
        status = msc__thread_start(&server->sweeper, "http-sweeper", http_sweep_run, server, err);
    if (status == MSC_OK)
        *out = server;
    else
        http_stop(server);
    return status;
}

uint16_t http_port(const http_server *server)
{
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(server->daemon, MHD_DAEMON_INFO_BIND_PORT);

    return info == NULL ? server->options.port : info->port;
}

void http_stop(http_server *server)
{
    msc_context *ctx;

    if (server == NULL)
        return;
    if (server->stop_fds[1] >= 0)
        (void)close(server->stop_fds[1]); /* the sweeper's poll sees the end of the pipe */
    msc__thread_join(&server->sweeper);
    if (server->daemon != NULL)
        MHD_stop_daemon(server->daemon);
    MSC__ASSERT(server->connections == NULL);
    if (server->stop_fds[0] >= 0)
        (void)close(server->stop_fds[0]);
    msc__mutex_fini(&server->mutex);
    ctx = server->ctx;
    msc__free(ctx, server, sizeof *server);
    MSC__ASSERT(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
}
