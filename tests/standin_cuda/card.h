/* SPDX-License-Identifier: Apache-2.0 */
/** @file card.h  The card that is not there: its memory as addresses, its facts, a clock for its events. */
#ifndef STANDIN_CARD_H
#define STANDIN_CARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** What programs ask of a card. Set by the environment, see README.md. */
typedef struct card_facts {
    int major, minor;          /**< compute capability */
    int units;                 /**< streaming multiprocessors */
    int threads_per_unit;      /**< resident threads of one */
    int shared_bytes_optin;    /**< shared memory that one block may ask for */
    int shared_bytes_per_unit; /**< of one multiprocessor */
    size_t capacity_bytes;     /**< memory */
    const char *name;
} card_facts;

/** The facts; read from the environment at the first call. */
const card_facts *card(void);

/** True when STANDIN_COMPUTE is set: values are real. */
bool card_computes(void);

/** Takes memory as cudaMalloc does: 2 MiB pages from 1 MiB on. NULL: more than the card has. */
void *card_take(size_t size);

/** Gives memory back. False: it was never taken. */
bool card_give(void *at);

/** Counts `size` bytes as used without an address (cuMemCreate). False: more than the card has. */
bool card_count(size_t size);

/** Takes that back. */
void card_uncount(size_t size);

/** Reserves addresses without memory (cuMemAddressReserve); host pages stand behind them. */
void *card_reserve(size_t size);

/** Bytes that nobody uses. */
size_t card_free_bytes(void);

/** True for an address that belongs to the card. */
bool card_owns(const void *at);

/** True if all of these bytes are taken or reserved. */
bool card_holds(const void *at, size_t size);

/** Events: `card_tick` is the next moment, `card_settle` completes everything up to now. */
uint64_t card_tick(void);
void card_settle(void);

/** True when the moment `at` has been reached: always, unless STANDIN_LAZY_EVENTS is set. */
bool card_reached(uint64_t at);

#endif
