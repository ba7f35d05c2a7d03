/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file streams.h
 * Streams and events of the card that is not there, for the runtime and the driver alike: what was submitted, and
 * when it happens.
 *
 * Copies, fills, calls and waits lie in a stream's list until something needs them:
 *
 *      STANDIN_LATE not set    they happen when they are submitted
 *      STANDIN_LATE=0          they happen when somebody waits for them, or asks whether they have
 *      STANDIN_LATE=seed       the same, or by chance earlier, in pieces, between other calls
 *
 * A computation (values/) happens when it is submitted, after what its stream had before, and after nothing else.
 * All calls may come from any thread.
 */
#ifndef STANDIN_STREAMS_H
#define STANDIN_STREAMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct card_stream card_stream;
typedef struct card_event card_event;

/** Rows of bytes from one place to another. */
typedef struct card_copy {
    void *to;
    const void *from;
    size_t to_pitch, from_pitch; /**< bytes from row to row */
    size_t width, height;        /**< bytes of a row, rows */
} card_copy;

/** Where the two ends of a copy have to be. */
typedef enum card_direction {
    CARD_TO_CARD,
    CARD_TO_HOST,
    HOST_TO_CARD,
    HOST_TO_HOST,
    BY_ADDRESS
} card_direction;

/** A new stream; `blocking`: it keeps order with the default stream, which is NULL. Never freed. */
card_stream *card_stream_create(bool blocking);

/** Copies. False: an end is not where the direction says, or not in living memory; stderr says which. */
bool card_submit_copy(card_stream *stream, const char *function, card_copy copy, card_direction direction);

/** Sets bytes of the card. False as above. */
bool card_submit_fill(card_stream *stream, const char *function, void *at, int value, size_t size);

/** Calls `function` with a copy of `bytes` at `argument` (0: with `argument` itself). */
void card_submit_call(card_stream *stream, void (*function)(void *argument), const void *argument,
                      size_t bytes);

/** Does what the stream has before a computation on it, which happens at once. */
void card_begin_compute(card_stream *stream);

/** The last submission, a computation or a call, touches these bytes. False: without order, see order.h. */
bool card_submit_access(card_stream *stream, const char *what, const void *at, size_t size, bool write);

/** Does what the stream has; blocking streams too if it is the default one. */
void card_stream_finish(card_stream *stream);

/** True if the stream has nothing left; where it has, a little is done. */
bool card_stream_query(card_stream *stream);

/** Does what all streams have. */
void card_finish(void);

/** Events. One that was never recorded is complete. */
card_event *card_event_create(void);
void card_event_destroy(card_event *event);
bool card_event_record(card_event *event, card_stream *stream);
bool card_event_query(card_event *event);
bool card_event_finish(card_event *event);
bool card_stream_wait(card_stream *stream, card_event *event);

/** True if a copy from or to some of these bytes is still to be done. */
bool card_copying(const void *at, size_t size);

/** Pinned memory of the host: copies from and to other memory are over, or have read it, when the call returns. */
bool card_pin(void *at, size_t size);

/** False: nothing is pinned from there on. Who unpins memory with a copy under way is told so on stderr. */
bool card_unpin(void *at);
bool card_pinned(const void *at, size_t size);

#endif
