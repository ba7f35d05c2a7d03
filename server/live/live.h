/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file live.h
 * Who watches which run, and what was said of it last. The door of `server/live`.
 *
 * Messages of a run are kept once, in a ring of 32 KiB, with the run's version as their number. One who
 * watches has a cursor: it costs the same however slow it reads. One that falls behind the ring, or comes
 * with a version that the ring does not reach back to, hears `reset` and knows that it must read. Any thread
 * may call.
 */
#ifndef MSC_SERVER_LIVE_H
#define MSC_SERVER_LIVE_H

#include <stdbool.h>

#include "memscale/base.h"

#define LIVE_RUN_BYTES 64u
#define LIVE_RING_BYTES 32768u
#define LIVE_MESSAGE_BYTES 16384u /**< longest */
#define LIVE_TOPICS 256u          /**< runs that are watched or were spoken of lately */

typedef struct live live;
typedef struct live_watch live_watch;

/** Called when there is something to read; never from within a call of the same watch. */
typedef void live_wake(void *user);

MSC_NODISCARD msc_status live_create(const msc_allocator *allocator, live **out, msc_error *err);
/** Nobody may watch. NULL is accepted. */
void live_destroy(live *it);

/**
 * Begins to watch a run. Whatever is said of it from here on is kept for it; read the run's version now, and
 * call `live_begin`. NULL: no memory, or LIVE_TOPICS other runs are watched, or `run` was deleted while it
 * was watched.
 */
live_watch *live_open(live *it, const char *run);
/**
 * The first message is the one after `seen`, or `reset` where that is not in the ring. `seen` of -1: after
 * `version`.
 */
void live_begin(live_watch *watch, int64_t version, int64_t seen);
/** From here on `wake` is called; once at once if there is something already. */
void live_listen(live_watch *watch, live_wake *wake, void *user);
/** Copies what is next as text/event-stream; 0: nothing yet; -1: the end. */
int64_t live_read(live_watch *watch, char *into, size_t room);
/** Whether its run was deleted: `gone` is what it hears, and its end. */
bool live_is_gone(live_watch *watch);
void live_close(live_watch *watch);

/**
 * Something happened to a run: `data` of one line under `event`. A run that nobody watches or watched costs
 * nothing.
 */
void live_say(live *it, const char *run, int64_t version, const char *event, const char *data);
/** About once a second: a comment every 15 seconds to those who have heard nothing. */
void live_tick(live *it);
/** All watches come to their end; new ones do at once. */
void live_stop(live *it);
uint32_t live_count(live *it);

#endif /* MSC_SERVER_LIVE_H */
