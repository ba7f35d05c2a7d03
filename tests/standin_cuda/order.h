/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file order.h
 * Which work is ordered before which, and who touches the same bytes without order (STANDIN_LATE).
 *
 * A computation happens when it is submitted, so a copy that should wait for it and does not would get its bytes all the
 * same. Therefore the order itself is checked: each stream, event and the host know how much of every stream is before
 * them (a vector clock), and two accesses of the same bytes, one of them a write, must be ordered.
 *
 * What one thread of the host has waited for is before everything that any thread submits later: threads order
 * themselves by means that are not seen here. The caller of these functions holds the lock of streams.c.
 */
#ifndef STANDIN_ORDER_H
#define STANDIN_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ORDER_STREAMS = 256 }; /**< of further ones nothing is checked */

/** How many submissions of each stream are before something. */
typedef struct order_clock {
    uint64_t seen[ORDER_STREAMS];
} order_clock;

/** A stream's books, or NULL: there are too many. Never freed. */
typedef struct order_stream order_stream;
order_stream *order_stream_create(void);

/** A submission to the stream begins; its accesses follow. */
void order_submit(order_stream *stream);

/** The stream's submissions up to now are before what the clock stands for. */
void order_record(const order_stream *stream, order_clock *clock);

/** The clock is before what the stream (NULL: everybody) submits later. */
void order_after(order_stream *stream, const order_clock *clock);

/** All that this stream has submitted is before what everybody submits later. */
void order_finished(const order_stream *stream);

/**
 * The last submission reads or writes bytes. False: another stream's access to some of them is neither before nor after
 * it; stderr names both.
 *
 * @param what whose access it is; the text must stay.
 */
bool order_access(order_stream *stream, const char *what, const void *at, size_t size, bool write);

#endif
