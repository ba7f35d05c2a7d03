/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Launches that wait. A card may run a kernel long after it was submitted, so here it runs when something needs it: a copy
 * behind it, someone who waits for its stream, or for an event that was recorded behind it. Who looks at its results, or
 * takes its memory, without any of these sees that it has not run.
 */
#include "fake_cuda/fake_kernels.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* A launch, or the record of an event behind one. */
typedef struct kept {
    struct kept *next;
    void *host_stream;
    void *host_event; /* NULL: a launch */
    const fake_kernel *kernel;
    uint32_t groups;
    _Alignas(16) unsigned char argument[];
} kept;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* over the list */
static pthread_mutex_t running =
    PTHREAD_MUTEX_INITIALIZER; /* held while kernels run, so that who flushes sees all done */
static kept *first;

static void append(kept item, const void *argument, size_t bytes)
{
    kept *added = aligned_alloc(16, (sizeof *added + bytes + 15) / 16 * 16);
    kept **end = &first;

    if (added == NULL)
        abort();
    *added = item;
    if (bytes > 0)
        memcpy(added->argument, argument, bytes);
    pthread_mutex_lock(&mutex);
    while (*end != NULL)
        end = &(*end)->next;
    *end = added;
    pthread_mutex_unlock(&mutex);
}

void fake_launch_add(void *host_stream, const fake_kernel *kernel, uint32_t groups, const void *argument)
{
    append((kept){.host_stream = host_stream, .kernel = kernel, .groups = groups}, argument,
           kernel->argument_bytes);
}

/* The first that is kept of a stream, or with a record of an event; or NULL. */
static kept **find(const void *host_stream, const void *host_event)
{
    kept **at = &first;

    while (*at != NULL &&
           !(host_event != NULL ? (*at)->host_event == host_event : (*at)->host_stream == host_stream))
        at = &(*at)->next;
    return at;
}

bool fake_launch_add_record(void *host_stream, void *host_event)
{
    bool behind;

    pthread_mutex_lock(&mutex);
    behind = *find(host_stream, NULL) != NULL;
    pthread_mutex_unlock(&mutex);
    if (behind)
        append((kept){.host_stream = host_stream, .host_event = host_event}, NULL, 0);
    return behind;
}

static kept *take(const void *host_stream)
{
    kept **at;
    kept *taken;

    pthread_mutex_lock(&mutex);
    at = find(host_stream, NULL);
    taken = *at;
    if (taken != NULL)
        *at = taken->next;
    pthread_mutex_unlock(&mutex);
    return taken;
}

void fake_launch_flush(int card, void *host_stream, const fake_launch_calls *calls)
{
    kept *next;

    pthread_mutex_lock(&running);
    next = take(host_stream);
    if (next != NULL)
        calls->finish(card, host_stream);
    for (; next != NULL; next = take(host_stream)) {
        if (next->host_event != NULL)
            calls->record(card, host_stream, next->host_event);
        else
            next->kernel->run(next->argument, next->groups);
        free(next);
    }
    pthread_mutex_unlock(&running);
}

void fake_launch_flush_event(int card, const void *host_event, const fake_launch_calls *calls)
{
    void *host_stream = NULL;
    kept *found;

    pthread_mutex_lock(&mutex);
    found = *find(NULL, host_event);
    if (found != NULL)
        host_stream = found->host_stream;
    pthread_mutex_unlock(&mutex);
    if (host_stream != NULL)
        fake_launch_flush(card, host_stream, calls);
}
