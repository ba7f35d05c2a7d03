/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists of work, one for each stream.
 *
 *      stream     done            submitted
 *                  |                  |
 *      items    [ copy ][ wait for B, 7 ][ copy ][ call ]
 *
 * An event that is recorded is a stream and its number of submitted items; it is complete when that many are done.
 * A wait keeps both, so recording the event again does not change it. Doing a stream's work up to a number does,
 * for each wait, the other stream's up to that one's number: nobody ever blocks, and nothing is done that no order
 * asks for. That is what makes a missing wait visible: the bytes are not there yet.
 */
#define _GNU_SOURCE
#include "streams.h"

#include "card.h"
#include "order.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum item_kind { COPY, FILL, CALL, WAIT } item_kind;

typedef struct item {
    item_kind kind;
    card_copy copy;
    size_t row; /* COPY: the next to be copied */
    void *kept; /* freed when done: bytes of the host that were not pinned, or an argument */
    int value;  /* FILL */
    void (*function)(void *);
    void *argument;
    card_stream *awaited;
    uint64_t until;
} item;

struct card_stream {
    item *items; /* of number done + i at [i + gap] */
    size_t gap, count, room;
    uint64_t done, submitted;
    bool blocking;
    order_stream *order;
    card_stream *next;
};

struct card_event {
    bool living;
    card_stream *stream; /* NULL: never recorded */
    uint64_t until;
    uint64_t tick; /* for STANDIN_LAZY_EVENTS, card.h */
    order_clock before;
};

enum { PIECES = 4 };

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_once_t begun = PTHREAD_ONCE_INIT;
static card_stream standard = {.blocking = true};
static card_stream *all = &standard;
static bool late;
static uint64_t chance;

static void begin(void)
{
    const char *seed = getenv("STANDIN_LATE");

    late = seed != NULL && *seed != '\0';
    chance = late ? strtoull(seed, NULL, 10) : 0;
    standard.order = late ? order_stream_create() : NULL;
}

static void enter(void)
{
    pthread_once(&begun, begin);
    pthread_mutex_lock(&lock);
}

static void leave(void)
{
    pthread_mutex_unlock(&lock);
}

/* NULL and the two names that the runtime has for default streams. */
static card_stream *real(card_stream *stream)
{
    return (uintptr_t)stream <= 2 ? &standard : stream;
}

/* ---- doing work ------------------------------------------------------------------------------------- */

static void copy_rows(card_copy *copy, size_t row, size_t count)
{
    for (size_t i = row; i < row + count; i++) {
        memmove((char *)copy->to + i * copy->to_pitch, (const char *)copy->from + i * copy->from_pitch,
                copy->width);
    }
}

static void run_until(card_stream *stream, uint64_t until);

/* The first item of a stream, which is not a wait for something undone. */
static void do_first(card_stream *stream)
{
    item first = stream->items[stream->gap];

    if (first.kind == COPY) {
        copy_rows(&first.copy, first.row, first.copy.height - first.row);
    } else if (first.kind == FILL) {
        memset(first.copy.to, first.value, first.copy.width);
    }
    stream->gap++;
    stream->count--;
    stream->done++;
    if (first.kind == CALL) {
        first.function(first.argument);
    }
    free(first.kept);
}

static void run_until(card_stream *stream, uint64_t until)
{
    while (stream->done < until) {
        const item *first = &stream->items[stream->gap];

        if (first->kind == WAIT && first->awaited->done < first->until) {
            run_until(first->awaited, first->until);
        } else {
            do_first(stream);
        }
    }
}

static uint64_t draw(void)
{
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return chance;
}

/* By chance: some rows or an item of some stream that could go on. */
static void drift(void)
{
    if (chance == 0 || draw() % 4 != 0) {
        return;
    }
    for (card_stream *stream = all; stream != NULL; stream = stream->next) {
        item *first = stream->count > 0 ? &stream->items[stream->gap] : NULL;

        if (first == NULL || draw() % 3 != 0 ||
            (first->kind == WAIT && first->awaited->done < first->until)) {
            continue;
        }
        if (first->kind == COPY && first->row + 1 < first->copy.height && draw() % 2 == 0) {
            size_t count = 1 + draw() % (first->copy.height - first->row - 1);

            copy_rows(&first->copy, first->row, count);
            first->row += count;
        } else {
            do_first(stream);
        }
    }
}

static void submit(card_stream *stream, item added)
{
    if (stream->gap + stream->count == stream->room) {
        if (stream->gap > stream->room / 2) {
            memmove(stream->items, stream->items + stream->gap, stream->count * sizeof added);
            stream->gap = 0;
        } else {
            stream->room = 2 * stream->room + 16;
            stream->items = realloc(stream->items, stream->room * sizeof added);
        }
    }
    stream->items[stream->gap + stream->count++] = added;
    stream->submitted++;
    if (!late) {
        run_until(stream, stream->submitted);
    }
    drift();
}

/* A submission begins, after what the host has waited for; blocking streams keep order with the default one. */
static void begin_submission(card_stream *stream)
{
    order_clock before = {{0}};

    for (card_stream *other = all; late && stream->blocking && other != NULL; other = other->next) {
        if (other != stream && other->blocking && (other == &standard || stream == &standard)) {
            order_record(other->order, &before);
            order_after(stream->order, &before);
        }
    }
    order_submit(stream->order);
}

/* ---- streams ---------------------------------------------------------------------------------------- */

card_stream *card_stream_create(bool blocking)
{
    card_stream *made = calloc(1, sizeof *made);

    enter();
    made->blocking = blocking;
    made->order = late ? order_stream_create() : NULL;
    made->next = all;
    all = made;
    leave();
    return made;
}

void card_stream_finish(card_stream *stream)
{
    enter();
    stream = real(stream);
    run_until(stream, stream->submitted);
    order_finished(stream->order);
    for (card_stream *other = all; other != NULL && stream == &standard; other = other->next) {
        if (other->blocking) {
            run_until(other, other->submitted);
            order_finished(other->order);
        }
    }
    leave();
}

bool card_stream_query(card_stream *stream)
{
    bool empty;

    enter();
    stream = real(stream);
    empty = stream->count == 0;
    if (empty) {
        order_finished(stream->order);
    } else {
        run_until(stream, stream->done + 1);
    }
    leave();
    return empty;
}

void card_finish(void)
{
    enter();
    for (card_stream *stream = all; stream != NULL; stream = stream->next) {
        run_until(stream, stream->submitted);
        order_finished(stream->order);
    }
    leave();
}

/* ---- copies ----------------------------------------------------------------------------------------- */

static bool complain(const char *function, const char *what, const void *at, size_t size)
{
    fprintf(stderr, "stand-in CUDA: %s: %s (%zu bytes at %p)\n", function, what, size, at);
    return false;
}

static bool check_end(const char *function, const char *end, const void *at, size_t size, bool on_card)
{
    char text[128];

    if (on_card ? card_holds(at, size) : !card_owns(at)) {
        return true;
    }
    snprintf(text, sizeof text,
             on_card ? "the %s is not living memory of the card" : "the %s is the card's memory", end);
    return complain(function, text, at, size);
}

static size_t extent(size_t pitch, size_t width, size_t height)
{
    return pitch * (height - 1) + width;
}

/* One row becomes several, so that a copy can be half done. */
static card_copy in_pieces(card_copy copy)
{
    if (late && copy.height == 1 && copy.width >= 4096 && copy.width % PIECES == 0) {
        copy.width /= PIECES;
        copy.height = PIECES;
        copy.to_pitch = copy.from_pitch = copy.width;
    }
    return copy;
}

bool card_submit_copy(card_stream *stream, const char *function, card_copy copy, card_direction direction)
{
    item added = {.kind = COPY};
    size_t read, written;
    bool from_card, to_card, wait, ordered;

    if (copy.width == 0 || copy.height == 0) {
        return true;
    }
    read = extent(copy.from_pitch, copy.width, copy.height);
    written = extent(copy.to_pitch, copy.width, copy.height);
    from_card = direction == BY_ADDRESS ? card_owns(copy.from) : direction <= CARD_TO_HOST;
    to_card =
        direction == BY_ADDRESS ? card_owns(copy.to) : direction == CARD_TO_CARD || direction == HOST_TO_CARD;
    if (!check_end(function, "source", copy.from, read, from_card) ||
        !check_end(function, "destination", copy.to, written, to_card)) {
        return false;
    }
    enter();
    stream = real(stream);
    begin_submission(stream);
    ordered = order_access(stream->order, function, copy.from, read, false) &&
              order_access(stream->order, function, copy.to, written, true);
    if (late && !from_card && !card_pinned(copy.from, read)) {
        added.kept = malloc(read);
        copy.from = memcpy(added.kept, copy.from, read);
    }
    wait = !to_card && !card_pinned(copy.to, written);
    added.copy = in_pieces(copy);
    submit(stream, added);
    if (wait) {
        card_stream_finish(stream);
    }
    leave();
    return ordered;
}

static bool touches(const void *end, size_t end_size, const void *at, size_t size)
{
    return (const char *)end < (const char *)at + size && (const char *)at < (const char *)end + end_size;
}

bool card_copying(const void *at, size_t size)
{
    bool found = false;

    enter();
    for (const card_stream *stream = all; stream != NULL; stream = stream->next) {
        for (size_t i = stream->gap; i < stream->gap + stream->count && !found; i++) {
            const card_copy *copy = &stream->items[i].copy;

            found = stream->items[i].kind == COPY &&
                    (touches(copy->from, extent(copy->from_pitch, copy->width, copy->height), at, size) ||
                     touches(copy->to, extent(copy->to_pitch, copy->width, copy->height), at, size));
        }
    }
    leave();
    return found;
}

bool card_submit_fill(card_stream *stream, const char *function, void *at, int value, size_t size)
{
    item added = {.kind = FILL, .copy = {.to = at, .width = size}, .value = value};
    bool ordered;

    if (size == 0 || !check_end(function, "destination", at, size, true)) {
        return size == 0;
    }
    enter();
    stream = real(stream);
    begin_submission(stream);
    ordered = order_access(stream->order, function, at, size, true);
    submit(stream, added);
    leave();
    return ordered;
}

void card_submit_call(card_stream *stream, void (*function)(void *), const void *argument, size_t bytes)
{
    item added = {.kind = CALL, .function = function, .argument = (void *)(uintptr_t)argument};

    if (bytes > 0) {
        added.kept = aligned_alloc(64, (bytes + 63) / 64 * 64);
        added.argument = memcpy(added.kept, argument, bytes);
    }
    enter();
    stream = real(stream);
    begin_submission(stream);
    submit(stream, added);
    leave();
}

bool card_submit_access(card_stream *stream, const char *what, const void *at, size_t size, bool write)
{
    bool ordered;

    enter();
    ordered = order_access(real(stream)->order, what, at, size, write);
    leave();
    return ordered;
}

void card_begin_compute(card_stream *stream)
{
    enter();
    stream = real(stream);
    run_until(stream, stream->submitted);
    begin_submission(stream);
    leave();
}

/* ---- events ----------------------------------------------------------------------------------------- */

card_event *card_event_create(void)
{
    card_event *made = calloc(1, sizeof *made);

    made->living = true;
    return made;
}

/* Its memory stays, so that whoever uses it later is told. */
void card_event_destroy(card_event *event)
{
    event->living = false;
}

static bool check_event(const char *function, const card_event *event)
{
    return (event != NULL && event->living) || complain(function, "the event was destroyed", event, 0);
}

bool card_event_record(card_event *event, card_stream *stream)
{
    if (!check_event("cudaEventRecord", event)) {
        return false;
    }
    enter();
    event->stream = real(stream);
    event->until = event->stream->submitted;
    event->tick = card_tick();
    order_record(event->stream->order, &event->before);
    drift();
    leave();
    return true;
}

bool card_event_query(card_event *event)
{
    bool complete = card_reached(event->tick);

    enter();
    drift();
    if (event->stream != NULL && event->stream->done < event->until) {
        run_until(event->stream, event->stream->done + 1);
        complete = complete && event->stream->done >= event->until;
    }
    if (complete) {
        order_after(NULL, &event->before);
    }
    leave();
    return complete;
}

bool card_event_finish(card_event *event)
{
    if (!check_event("cudaEventSynchronize", event)) {
        return false;
    }
    enter();
    if (event->stream != NULL) {
        run_until(event->stream, event->until);
        order_after(NULL, &event->before);
    }
    leave();
    return true;
}

bool card_stream_wait(card_stream *stream, card_event *event)
{
    item added = {.kind = WAIT};

    if (!check_event("cudaStreamWaitEvent", event)) {
        return false;
    }
    enter();
    if (event->stream != NULL && event->stream != real(stream)) {
        added.awaited = event->stream;
        added.until = event->until;
        order_after(real(stream)->order, &event->before);
        submit(real(stream), added);
    }
    leave();
    return true;
}
