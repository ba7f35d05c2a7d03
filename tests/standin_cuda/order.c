/* SPDX-License-Identifier: Apache-2.0 */
/* Vector clocks, and the accesses of each stream in the order of their submission. */
#include "order.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct access {
    uintptr_t at, end;
    uint64_t submission;
    const char *what;
    bool write;
} access;

struct order_stream {
    int index;
    order_clock clock; /* at `index`: its own submissions */
    access *accesses;
    size_t count, room;
};

static order_stream *streams[ORDER_STREAMS];
static int stream_count;
static order_clock host;

order_stream *order_stream_create(void)
{
    order_stream *made = NULL;

    if (stream_count < ORDER_STREAMS) {
        made = calloc(1, sizeof *made);
        made->index = stream_count;
        streams[stream_count++] = made;
    }
    return made;
}

static void join(order_clock *clock, const order_clock *other)
{
    for (int i = 0; i < stream_count; i++) {
        clock->seen[i] = clock->seen[i] > other->seen[i] ? clock->seen[i] : other->seen[i];
    }
}

void order_submit(order_stream *stream)
{
    if (stream != NULL) {
        join(&stream->clock, &host);
        stream->clock.seen[stream->index]++;
    }
}

void order_record(const order_stream *stream, order_clock *clock)
{
    if (stream != NULL) {
        *clock = stream->clock;
    }
}

void order_after(order_stream *stream, const order_clock *clock)
{
    join(stream != NULL ? &stream->clock : &host, clock);
}

void order_finished(const order_stream *stream)
{
    if (stream != NULL) {
        join(&host, &stream->clock);
    }
}

/* ---- accesses --------------------------------------------------------------------------------------- */

/* Forgets what is before everything that can still come. */
static void forget(order_stream *stream)
{
    size_t kept = 0;

    for (size_t i = 0; i < stream->count; i++) {
        if (stream->accesses[i].submission > host.seen[stream->index]) {
            stream->accesses[kept++] = stream->accesses[i];
        }
    }
    stream->count = kept;
}

static void remember(order_stream *stream, access added)
{
    if (stream->count == stream->room) {
        forget(stream);
        if (stream->count > stream->room / 2 || stream->room == 0) {
            stream->room = 2 * stream->room + 1024;
            stream->accesses = realloc(stream->accesses, stream->room * sizeof added);
        }
    }
    stream->accesses[stream->count++] = added;
}

/* The latest access of another stream that collides and has no order, or NULL. */
static const access *collision(const order_stream *stream, const order_stream *other, access mine)
{
    for (size_t i = other->count; i-- > 0;) {
        const access *theirs = &other->accesses[i];

        if (theirs->submission <= stream->clock.seen[other->index]) {
            return NULL;
        }
        if (theirs->at < mine.end && mine.at < theirs->end && (theirs->write || mine.write)) {
            return theirs;
        }
    }
    return NULL;
}

bool order_access(order_stream *stream, const char *what, const void *at, size_t size, bool write)
{
    access mine = {(uintptr_t)at, (uintptr_t)at + size, 0, what, write};

    if (stream == NULL || size == 0) {
        return true;
    }
    mine.submission = stream->clock.seen[stream->index];
    for (int i = 0; i < stream_count; i++) {
        const access *theirs = i != stream->index ? collision(stream, streams[i], mine) : NULL;

        if (theirs != NULL) {
            fprintf(stderr,
                    "stand-in CUDA: %s of stream %d %s %zu bytes at %p without order after %s of stream %d, "
                    "which "
                    "%s them\n",
                    what, stream->index, write ? "writes" : "reads", size, at, theirs->what, i,
                    theirs->write ? "writes" : "reads");
            return false;
        }
    }
    remember(stream, mine);
    return true;
}
