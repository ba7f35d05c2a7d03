/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Deadlines of connections.
 *
 * libmicrohttpd ends a connection that is silent, which one byte now and then prevents. So each connection
 * has a deadline for what it is doing: its first line, the rest of a request, the pause until the next. The
 * sweeper shuts down those that are overdue; the library then sees their end and cleans up. While an answer
 * is on its way there is none: it is bounded in memory, and silence ends it.
 *
 * A descriptor is closed only after `http_connection_changed` took its connection off the list, so what is
 * shut down here is always ours.
 */
#include <poll.h>
#include <sys/socket.h>

#include "base/alloc.h"
#include "http/http_internal.h"

#define TICK_MS 1000

void http_connection_deadline(http_connection *connection, int seconds)
{
    int64_t at_ns = seconds == 0 ? INT64_MAX : msc__clock_ns() + seconds * HTTP_SECOND_NS;

    if (connection != NULL)
        atomic_store(&connection->deadline_ns, at_ns);
}

static void add(http_server *server, struct MHD_Connection *from, void **context)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(from, MHD_CONNECTION_INFO_CONNECTION_FD);
    http_connection *connection;

    msc__mutex_lock(&server->mutex);
    connection = msc__alloc(server->ctx, sizeof *connection);
    if (connection != NULL) {
        connection->fd = info->connect_fd;
        connection->next = server->connections;
        connection->link = &server->connections;
        if (connection->next != NULL)
            connection->next->link = &connection->next;
        server->connections = connection;
        http_connection_deadline(connection, HTTP_FIRST_LINE_SECONDS);
    } else {
        (void)shutdown(info->connect_fd, SHUT_RDWR); /* what has no deadline is not let in */
    }
    msc__mutex_unlock(&server->mutex);
    *context = connection;
}

static void take_off(http_server *server, http_connection *connection)
{
    if (connection == NULL)
        return;
    msc__mutex_lock(&server->mutex);
    *connection->link = connection->next;
    if (connection->next != NULL)
        connection->next->link = connection->link;
    msc__free(server->ctx, connection, sizeof *connection);
    msc__mutex_unlock(&server->mutex);
}

void http_connection_changed(void *server, struct MHD_Connection *connection, void **context,
                             enum MHD_ConnectionNotificationCode code)
{
    if (code == MHD_CONNECTION_NOTIFY_STARTED)
        add(server, connection, context);
    else
        take_off(server, *context);
}

void *http_sweep_run(void *user)
{
    http_server *server = user;
    struct pollfd stop = {.fd = server->stop_fds[0], .events = POLLIN};

    while (poll(&stop, 1, TICK_MS) <= 0) {
        int64_t now_ns = msc__clock_ns();

        msc__mutex_lock(&server->mutex);
        for (http_connection *at = server->connections; at != NULL; at = at->next) {
            if (atomic_load(&at->deadline_ns) < now_ns) {
                (void)shutdown(at->fd, SHUT_RDWR);
                http_connection_deadline(at, 0);
            }
        }
        msc__mutex_unlock(&server->mutex);
        server->options.handler.tick(server->options.handler.user);
    }
    return NULL;
}
