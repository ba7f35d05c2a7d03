/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keeper waits at a pipe: a byte in it wakes, and its closing, which is how it stops, does as well. A full
 * pipe is one that wakes already.
 */
#include "main/keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"

#define ROUND_MS 60000

msc_status keeper_init(keeper *it, msc_error *err)
{
    if (pipe(it->fds) != 0) {
        it->fds[0] = it->fds[1] = -1;
        return msc__fail(err, MSC_EIO, "cannot make a pipe: %s", strerror(errno));
    }
    for (int i = 0; i < 2; i++) {
        (void)fcntl(it->fds[i], F_SETFD, FD_CLOEXEC);
        (void)fcntl(it->fds[i], F_SETFL, O_NONBLOCK);
    }
    return MSC_OK;
}

static bool stops(void *user)
{
    const keeper *it = user;
    struct pollfd at = {.fd = it->fds[0], .events = POLLIN};

    return poll(&at, 1, 0) > 0 && (at.revents & POLLHUP) != 0;
}

static void *run(void *user)
{
    keeper *it = user;
    struct pollfd at = {.fd = it->fds[0], .events = POLLIN};

    while (!stops(it)) {
        char bytes[64];

        (void)api_keep(it->api, stops, it);
        (void)poll(&at, 1, ROUND_MS);
        while (read(it->fds[0], bytes, sizeof bytes) > 0)
            ;
    }
    return NULL;
}

msc_status keeper_start(keeper *it, api *kept, msc_error *err)
{
    it->api = kept;
    return msc__thread_start(&it->thread, "keeper", run, it, err);
}

void keeper_wake(void *it)
{
    const char byte = 1;

    (void)!write(((const keeper *)it)->fds[1], &byte, 1);
}

void keeper_stop(keeper *it)
{
    if (it->fds[1] >= 0)
        (void)close(it->fds[1]);
    msc__thread_join(&it->thread);
    if (it->fds[0] >= 0)
        (void)close(it->fds[0]);
    it->fds[0] = it->fds[1] = -1;
}
