/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file throttle.h How long who fails must wait. Bounded memory, no clock of its own, no lock. Of `accounts`
 * and its tests.
 */
#ifndef MSC_SERVER_THROTTLE_H
#define MSC_SERVER_THROTTLE_H

#include <stdint.h>

#define THROTTLE_SETS 512u
#define THROTTLE_WAYS 8u

typedef struct throttle_entry {
    uint64_t key;      /* 0: none */
    uint32_t attempts; /* that have not succeeded */
    int64_t last_ms;
} throttle_entry;

/** Zeroed it knows nobody. Forgets who has been quiet the longest of a set, and anybody after 15 minutes. */
typedef struct throttle {
    throttle_entry entries[THROTTLE_SETS][THROTTLE_WAYS];
} throttle;

/**
 * An attempt begins: 0, and it is counted as one that fails until `throttle_succeeded`; or the milliseconds
 * to wait, and it is not counted. The first `free_attempts` cost nothing, then 1, 2, 4 … up to 60 seconds.
 */
int64_t throttle_begin(throttle *of, uint64_t key, uint32_t free_attempts, int64_t now_ms);
/** `all`: the key is forgotten; else one attempt is. */
void throttle_succeeded(throttle *of, uint64_t key, int all);

#endif /* MSC_SERVER_THROTTLE_H */
