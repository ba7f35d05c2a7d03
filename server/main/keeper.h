/* SPDX-License-Identifier: Apache-2.0 */
/** @file keeper.h  A thread that has retention done: once a minute, and when it is woken. */
#ifndef MSC_SERVER_KEEPER_H
#define MSC_SERVER_KEEPER_H

#include "api/api.h"
#include "base/thread.h"

typedef struct keeper {
    api *api;
    int fds[2]; /**< a pipe: a byte wakes, its end stops */
    msc__thread thread;
} keeper;

/** `keeper_wake` may be called from here on. Errors: EIO: no pipe. */
msc_status keeper_init(keeper *it, msc_error *err);
msc_status keeper_start(keeper *it, api *kept, msc_error *err);
/** Any thread may call; `it` is a keeper. */
void keeper_wake(void *it);
/** Of one that was not started, too. */
void keeper_stop(keeper *it);

#endif /* MSC_SERVER_KEEPER_H */
