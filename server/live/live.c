/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Topics and watches.
 *
 *      topic of a run     ring of bytes, positions count on for ever:   first ─────── messages ─────── end
 *      watch              position in the topic's bytes, up to which it has been given
 *
 * A message is the text that goes out, whole ("id: 7\nevent: batch\ndata: {…}\n\n"), so giving it to a watch
 * is a copy. If the ring has no room, the oldest messages go; a watch whose position was there is behind. In
 * front of each message stand its length and version, so that messages go whole and a version can be looked
 * for.
 *
 * Versions grow by one, and are said after their commit. A topic is made before the run's version is read, so
 * what is committed later is heard; what was read already and is only said later is skipped by its number. If
 * a number is missing all are behind.
 *
 * One lock for all: what happens under it is a copy of some kilobytes.
 */
#include "live/live.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/thread.h"

#define COMMENT_NS (INT64_C(15) * 1000000000)
#define EXTRA_BYTES 80u /* id, event and data lines without what they say */
#define NOTE_BYTES 96u

typedef struct message_head {
    int64_t version;
    uint64_t bytes; /* of the text that follows */
} message_head;

typedef struct live_topic {
    char run[LIVE_RUN_BYTES + 1]; /* empty: free */
    int64_t version;              /* of the last message, or that the run had then; -1: not known yet */
    int64_t base;                 /* version before the first message in the ring */
    uint64_t first;
    uint64_t end;
    uint32_t watches;
    uint64_t used; /* when, in calls */
    bool gone;     /* the run was deleted */
    char *ring;
} live_topic;

struct live_watch {
    live *it;
    live_topic *topic;
    int64_t seen;      /* messages up to this version are not for it */
    uint64_t position; /* of the head of the next message */
    uint64_t given;    /* bytes of it that were read already */
    bool behind;
    bool wants_comment;
    int64_t spoken_ns;
    char note[NOTE_BYTES]; /* a reset or comment that is being read */
    size_t note_bytes;
    size_t note_given;
    live_wake *wake;
    void *user;
    live_watch *next;
    live_watch **link;
};

struct live {
    msc_context *ctx;
    msc__mutex mutex; /* of everything */
    live_topic topics[LIVE_TOPICS];
    live_watch *watches;
    uint32_t count;
    uint64_t calls;
    bool stops;
};

msc_status live_create(const msc_allocator *allocator, live **out, msc_error *err)
{
    msc_context_options options = msc_context_options_default();
    msc_context *ctx = NULL;
    msc_status status;
    live *it;

    *out = NULL;
    options.allocator = *allocator;
    status = msc_context_create(&options, &ctx, err);
    if (status != MSC_OK)
        return status;
    it = msc__alloc(ctx, sizeof *it);
    if (it == NULL) {
        msc_context_destroy(ctx);
        return msc__fail_memory(err, "live", sizeof *it);
    }
    it->ctx = ctx;
    status = msc__mutex_init(&it->mutex, err);
    if (status == MSC_OK)
        *out = it;
    else
        live_destroy(it);
    return status;
}

void live_destroy(live *it)
{
    msc_context *ctx;

    if (it == NULL)
        return;
    MSC__ASSERT(it->watches == NULL);
    ctx = it->ctx;
    for (uint32_t i = 0; i < LIVE_TOPICS; i++)
        msc__free(ctx, it->topics[i].ring, LIVE_RING_BYTES);
    msc__mutex_fini(&it->mutex);
    msc__free(ctx, it, sizeof *it);
    MSC__ASSERT(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
}

/* ---- the ring -------------------------------------------------------------------------------- */

static void ring_put(live_topic *topic, const void *from, size_t bytes)
{
    size_t at = (size_t)(topic->end % LIVE_RING_BYTES);
    size_t before = LIVE_RING_BYTES - at < bytes ? LIVE_RING_BYTES - at : bytes;

    MSC__ASSERT(topic->end - topic->first + bytes <= LIVE_RING_BYTES);
    memcpy(topic->ring + at, from, before);
    memcpy(topic->ring, (const char *)from + before, bytes - before);
    topic->end += bytes;
}

static void ring_get(const live_topic *topic, uint64_t position, void *into, size_t bytes)
{
    size_t at = (size_t)(position % LIVE_RING_BYTES);
    size_t before = LIVE_RING_BYTES - at < bytes ? LIVE_RING_BYTES - at : bytes;

    MSC__ASSERT(position >= topic->first && position + bytes <= topic->end);
    memcpy(into, topic->ring + at, before);
    memcpy((char *)into + before, topic->ring, bytes - before);
}

static message_head head_at(const live_topic *topic, uint64_t position)
{
    message_head head;

    ring_get(topic, position, &head, sizeof head);
    return head;
}

static void make_room(live_topic *topic, size_t bytes)
{
    while (LIVE_RING_BYTES - (topic->end - topic->first) < bytes) {
        message_head head = head_at(topic, topic->first);

        topic->base = head.version;
        topic->first += sizeof head + head.bytes;
    }
}

/* ---- topics ---------------------------------------------------------------------------------- */

static live_topic *find_topic(live *it, const char *run)
{
    for (uint32_t i = 0; i < LIVE_TOPICS; i++)
        if (strcmp(it->topics[i].run, run) == 0)
            return &it->topics[i];
    return NULL;
}

/* In the place of one that is over; or one that is free, or that nobody watches and was not used for the longest time. */
static live_topic *make_topic(live *it, const char *run, live_topic *over)
{
    live_topic *found = over;
    char *ring;

    for (uint32_t i = 0; i < LIVE_TOPICS && over == NULL; i++) {
        live_topic *topic = &it->topics[i];

        if (topic->watches == 0 && (found == NULL || topic->used < found->used))
            found = topic;
    }
    if (found == NULL ||
        (ring = found->ring != NULL ? found->ring : msc__alloc(it->ctx, LIVE_RING_BYTES)) == NULL)
        return NULL;
    memset(found, 0, sizeof *found);
    found->ring = ring;
    found->version = found->base = -1;
    (void)snprintf(found->run, sizeof found->run, "%s", run);
    return found;
}

/* ---- watches --------------------------------------------------------------------------------- */

live_watch *live_open(live *it, const char *run)
{
    live_watch *watch;
    live_topic *topic;

    msc__mutex_lock(&it->mutex);
    topic = find_topic(it, run);
    if (topic == NULL || (topic->gone && topic->watches == 0))
        topic = make_topic(it, run, topic);
    else if (topic->gone)
        topic = NULL;
    watch = topic == NULL ? NULL : msc__alloc(it->ctx, sizeof *watch);
    if (watch != NULL) {
        watch->it = it;
        watch->topic = topic;
        watch->spoken_ns = msc__clock_ns();
        watch->wants_comment = true; /* that it begins is seen at once */
        watch->next = it->watches;
        watch->link = &it->watches;
        if (watch->next != NULL)
            watch->next->link = &watch->next;
        it->watches = watch;
        topic->watches++;
        topic->used = ++it->calls;
        it->count++;
    }
    msc__mutex_unlock(&it->mutex);
    return watch;
}

void live_begin(live_watch *watch, int64_t version, int64_t seen)
{
    live_topic *topic = watch->topic;

    msc__mutex_lock(&watch->it->mutex);
    if (topic->version < 0)
        topic->version = topic->base = version;
    watch->seen = seen < 0 ? version : seen;
    watch->behind = watch->seen < topic->base || (watch->seen > version && watch->seen > topic->version);
    watch->position = topic->first; /* what it has seen is skipped where it reads */
    msc__mutex_unlock(&watch->it->mutex);
}

bool live_is_gone(live_watch *watch)
{
    bool gone;

    msc__mutex_lock(&watch->it->mutex);
    gone = watch->topic->gone;
    msc__mutex_unlock(&watch->it->mutex);
    return gone;
}

void live_close(live_watch *watch)
{
    live *it = watch->it;

    msc__mutex_lock(&it->mutex);
    *watch->link = watch->next;
    if (watch->next != NULL)
        watch->next->link = watch->link;
    MSC__ASSERT(watch->topic->watches > 0 && it->count > 0);
    watch->topic->watches--;
    it->count--;
    msc__free(it->ctx, watch, sizeof *watch);
    msc__mutex_unlock(&it->mutex);
}

/* Moves on to the next message that is for this watch; false: there is none yet. */
static bool has_message(live_watch *watch)
{
    const live_topic *topic = watch->topic;

    while (watch->given == 0 && watch->position < topic->end) {
        message_head head = head_at(topic, watch->position);

        if (head.version > watch->seen)
            break;
        watch->position += sizeof head + head.bytes;
    }
    return watch->position < topic->end;
}

static bool has_news(const live_watch *watch)
{
    return watch->it->stops || watch->behind || watch->wants_comment ||
           watch->note_given < watch->note_bytes || watch->position < watch->topic->end || watch->topic->gone;
}

static void wake(const live_watch *watch)
{
    if (watch->wake != NULL)
        watch->wake(watch->user);
}

void live_listen(live_watch *watch, live_wake *called, void *user)
{
    msc__mutex_lock(&watch->it->mutex);
    watch->wake = called;
    watch->user = user;
    if (has_news(watch))
        wake(watch);
    msc__mutex_unlock(&watch->it->mutex);
}

/* A watch whose message was half given cannot skip its rest: its end closes the event, and the reset
   follows. */
static void write_note(live_watch *watch)
{
    const char *before = watch->given > 0 ? "\n\n" : "";

    watch->note_given = 0;
    if (watch->behind) {
        watch->note_bytes =
            (size_t)snprintf(watch->note, sizeof watch->note, "%sid: %lld\nevent: reset\ndata: {}\n\n",
                             before, (long long)watch->topic->version);
        watch->position = watch->topic->end;
        watch->seen = watch->topic->version;
        watch->given = 0;
        watch->behind = false;
    } else {
        watch->note_bytes = (size_t)snprintf(watch->note, sizeof watch->note, ": here\n\n");
    }
    watch->wants_comment = false;
}

static size_t read_note(live_watch *watch, char *into, size_t room)
{
    size_t left = watch->note_bytes - watch->note_given;
    size_t bytes = left < room ? left : room;

    memcpy(into, watch->note + watch->note_given, bytes);
    watch->note_given += bytes;
    return bytes;
}

static size_t read_message(live_watch *watch, char *into, size_t room)
{
    message_head head = head_at(watch->topic, watch->position);
    uint64_t left = head.bytes - watch->given;
    size_t bytes = left < room ? (size_t)left : room;

    ring_get(watch->topic, watch->position + sizeof head + watch->given, into, bytes);
    watch->given += bytes;
    if (watch->given == head.bytes) {
        watch->position += sizeof head + head.bytes;
        watch->given = 0;
    }
    return bytes;
}

/* Up to `room` bytes of what is next: a note, or a message. */
static size_t read_next(live_watch *watch, char *into, size_t room)
{
    if (watch->position < watch->topic->first)
        watch->behind = true;
    if (watch->note_given == watch->note_bytes &&
        (watch->behind || (watch->wants_comment && watch->given == 0)))
        write_note(watch);
    if (watch->note_given < watch->note_bytes)
        return read_note(watch, into, room);
    return has_message(watch) ? read_message(watch, into, room) : 0;
}

int64_t live_read(live_watch *watch, char *into, size_t room)
{
    live *it = watch->it;
    int64_t bytes = 0;

    msc__mutex_lock(&it->mutex);
    if (!it->stops)
        bytes = (int64_t)read_next(watch, into, room);
    if (bytes > 0)
        watch->spoken_ns = msc__clock_ns();
    else if (it->stops || watch->topic->gone)
        bytes = -1;
    msc__mutex_unlock(&it->mutex);
    return bytes;
}

/* ---- saying ---------------------------------------------------------------------------------- */

static void append(live_topic *topic, int64_t version, const char *event, const char *data)
{
    char start[EXTRA_BYTES];
    size_t start_bytes =
        (size_t)snprintf(start, sizeof start, "id: %lld\nevent: %s\ndata: ", (long long)version, event);
    size_t data_bytes = strlen(data);
    message_head head = {version, start_bytes + data_bytes + 2};

    MSC__ASSERT(start_bytes < sizeof start && data_bytes <= LIVE_MESSAGE_BYTES && strchr(data, '\n') == NULL);
    make_room(topic, sizeof head + (size_t)head.bytes);
    ring_put(topic, &head, sizeof head);
    ring_put(topic, start, start_bytes);
    ring_put(topic, data, data_bytes);
    ring_put(topic, "\n\n", 2);
    topic->version = version;
}

/* A number is missing: the ring starts empty, and all must read. */
static void start_again(live *it, live_topic *topic, int64_t version)
{
    topic->first = topic->end;
    topic->base = version - 1;
    for (live_watch *watch = it->watches; watch != NULL; watch = watch->next)
        if (watch->topic == topic)
            watch->behind = true;
}

void live_say(live *it, const char *run, int64_t version, const char *event, const char *data)
{
    live_topic *topic;

    msc__mutex_lock(&it->mutex);
    topic = find_topic(it, run);
    if (topic != NULL && !topic->gone && version > topic->version) {
        if (topic->version >= 0 && version != topic->version + 1)
            start_again(it, topic, version);
        else if (topic->version < 0)
            topic->base = version - 1;
        append(topic, version, event, data);
        topic->used = ++it->calls;
        topic->gone = strcmp(event, "gone") == 0;
        for (live_watch *watch = it->watches; watch != NULL && topic->watches > 0; watch = watch->next)
            if (watch->topic == topic)
                wake(watch);
    }
    msc__mutex_unlock(&it->mutex);
}

void live_tick(live *it)
{
    int64_t now_ns = msc__clock_ns();

    msc__mutex_lock(&it->mutex);
    for (live_watch *watch = it->watches; watch != NULL; watch = watch->next) {
        if (now_ns - watch->spoken_ns > COMMENT_NS) {
            watch->wants_comment = true;
            wake(watch);
        }
    }
    msc__mutex_unlock(&it->mutex);
}

void live_stop(live *it)
{
    msc__mutex_lock(&it->mutex);
    it->stops = true;
    for (live_watch *watch = it->watches; watch != NULL; watch = watch->next)
        wake(watch);
    msc__mutex_unlock(&it->mutex);
}

uint32_t live_count(live *it)
{
    uint32_t count;

    msc__mutex_lock(&it->mutex);
    count = it->count;
    msc__mutex_unlock(&it->mutex);
    return count;
}
