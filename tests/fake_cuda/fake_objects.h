/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file fake_objects.h
 * What the fake driver keeps: cards, and every object that was ever made on them.
 *
 * A handle is not an address: it is a number that names a row of one table, whose rows are never used twice. So
 * any value may be asked about, and one that was destroyed is known as such.
 */
#ifndef MSC_FAKE_OBJECTS_H
#define MSC_FAKE_OBJECTS_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device_internal.h"

#define FAKE_CARDS_MOST 4

typedef enum fake_kind {
    FAKE_CONTEXT,
    FAKE_STREAM,
    FAKE_EVENT,
    FAKE_BLOCK,
    FAKE_PINNED,
    FAKE_MODULE,
    FAKE_FUNCTION,        /* of a module, whose handle is in `host`; goes with it */
    FAKE_DESTROYED_STREAM /* whose work goes on; no handle names it */
} fake_kind;

typedef struct fake_object {
    fake_kind kind;
    bool alive;
    int card;
    void *host;         /**< STREAM, EVENT: of the host device; BLOCK, PINNED: the address */
    const void *kernel; /**< FUNCTION */
    uint64_t bytes;
} fake_object;

typedef struct fake_card {
    msc_device *device;
    void *context;        /**< its handle */
    void *default_stream; /**< of the host device; stands for NULL */
    unsigned retained;
} fake_card;

extern fake_card fake_cards[FAKE_CARDS_MOST];
extern int fake_card_count;

/** Memory of a card, its compute capability, and the limit on pinned memory. */
uint64_t fake_card_bytes(void);
int fake_capability(void);
uint64_t fake_pin_limit_bytes(void);

/**
 * Every driver function begins with this: counts the call, lets it fail if that is asked for, and checks the
 * process, that cuInit was called and, if `needs_context`, that a context is current, whose card `card` receives.
 * Anything but 0 is to be returned.
 */
int fake_begin(const char *function, bool needs_context, int *card);

/** Opens the cards, as the environment has them. */
int fake_start(void);

/** Notes that the caller is wrong and returns `result`. */
int fake_blame(const char *function, const char *why, int result);

/** Context stack of this thread. */
bool fake_push(int card);
int fake_pop(void); /**< the card, or -1: it is empty */

/** Enters an object and returns its handle. */
void *fake_add(fake_kind kind, int card, void *host, uint64_t bytes);

/** What the handle names, if it is of that kind, alive and of that card. */
bool fake_find(const void *handle, fake_kind kind, int card, fake_object *out);

/** As fake_find, and the object is not alive any more: of several callers, one gets it. */
bool fake_take(const void *handle, fake_kind kind, int card, fake_object *out);

/** Handle of a living block or pinned range that holds all of `at … at + bytes`, or NULL. */
void *fake_holder(fake_kind kind, const void *at, uint64_t bytes);

/** Handle of a living block or pinned range that has a byte of it, or NULL. */
void *fake_toucher(fake_kind kind, const void *at, uint64_t bytes);

/** Sum of the bytes of the living objects of a kind; of one card, or of all: -1. */
uint64_t fake_sum(fake_kind kind, int card);

/** Calls `visit` for each living object of the kind on the card. */
void fake_each(fake_kind kind, int card, void (*visit)(fake_object object));

/** The last user of a card's context is gone: what is left there is noted and given up. */
void fake_give_up(int card);

/** As fake_add, of a kernel that a module has. */
void *fake_add_function(int card, void *module, const void *kernel);

/** Counters of fake_cuda_report. */
void fake_count_copy(bool pageable);
void fake_count_launch(void);

/** One at a time: the contexts that host objects are made from. */
void fake_lock(void);
void fake_unlock(void);

#endif /* MSC_FAKE_OBJECTS_H */
