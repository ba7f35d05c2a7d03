/* SPDX-License-Identifier: Apache-2.0 */
/* Which memory of the host is pinned: ranges that do not overlap. */
#include "streams.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct range {
    uintptr_t at;
    size_t size;
} range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range *pins;
static size_t pin_count, pin_room;

/* The first range that has a byte of this one, or holds all of it; or as many as there are. */
static size_t find(const void *at, size_t size, bool whole)
{
    uintptr_t first = (uintptr_t)at, end = first + size;
    size_t i = 0;

    for (; i < pin_count; i++) {
        uintptr_t start = pins[i].at, stop = start + pins[i].size;

        if (whole ? start <= first && end <= stop : start < end && first < stop) {
            break;
        }
    }
    return i;
}

bool card_pin(void *at, size_t size)
{
    bool free_there;

    pthread_mutex_lock(&lock);
    free_there = find(at, size, false) == pin_count;
    if (free_there && pin_count == pin_room) {
        pin_room = 2 * pin_room + 64;
        pins = realloc(pins, pin_room * sizeof *pins);
    }
    if (free_there) {
        pins[pin_count++] = (range){(uintptr_t)at, size};
    }
    pthread_mutex_unlock(&lock);
    return free_there;
}

bool card_unpin(void *at)
{
    range pin = {0, 0};
    size_t i;

    pthread_mutex_lock(&lock);
    i = find(at, 1, true);
    if (i < pin_count && pins[i].at == (uintptr_t)at) {
        pin = pins[i];
        pins[i] = pins[--pin_count];
    }
    pthread_mutex_unlock(&lock);
    if (pin.size > 0 && card_copying(at, pin.size)) {
        fprintf(stderr,
                "stand-in CUDA: memory is unpinned, and a copy of it is under way (%zu bytes at %p)\n",
                pin.size, at);
    }
    return pin.size > 0;
}

bool card_pinned(const void *at, size_t size)
{
    bool found;

    pthread_mutex_lock(&lock);
    found = find(at, size, true) < pin_count;
    pthread_mutex_unlock(&lock);
    return found;
}
