/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A table of sets, as a cache has them: the key chooses the set, and within it the entry that was quiet the
 * longest makes room. Keys are hashes under a secret, so nobody can aim at the entry of somebody else.
 */
#include "accounts/throttle.h"

#include <string.h>

#define FORGET_MS (INT64_C(15) * 60 * 1000)
#define MOST_MS (INT64_C(60) * 1000)
#define FIRST_MS INT64_C(1000)

static throttle_entry *find(throttle *of, uint64_t key)
{
    throttle_entry *set = of->entries[key % THROTTLE_SETS];
    throttle_entry *oldest = &set[0];
    uint32_t i;

    for (i = 0; i < THROTTLE_WAYS; i++) {
        if (set[i].key == key)
            return &set[i];
        if (set[i].last_ms < oldest->last_ms)
            oldest = &set[i];
    }
    return oldest;
}

static int64_t wait_after(uint32_t attempts, uint32_t free_attempts)
{
    uint32_t more = attempts < free_attempts ? 0 : attempts - free_attempts;
    int64_t wait_ms = attempts < free_attempts ? 0 : FIRST_MS << (more < 6 ? more : 6);

    return wait_ms < MOST_MS ? wait_ms : MOST_MS;
}

int64_t throttle_begin(throttle *of, uint64_t key, uint32_t free_attempts, int64_t now_ms)
{
    throttle_entry *entry = find(of, key);
    int64_t ready_ms;

    if (entry->key != key || entry->last_ms + FORGET_MS < now_ms) {
        memset(entry, 0, sizeof *entry);
        entry->key = key;
    }
    ready_ms = entry->attempts == 0 ? now_ms : entry->last_ms + wait_after(entry->attempts, free_attempts);
    if (ready_ms > now_ms)
        return ready_ms - now_ms;
    entry->attempts++;
    entry->last_ms = now_ms;
    return 0;
}

void throttle_succeeded(throttle *of, uint64_t key, int all)
{
    throttle_entry *entry = find(of, key);

    if (entry->key != key)
        return;
    if (all)
        memset(entry, 0, sizeof *entry);
    else if (entry->attempts > 0)
        entry->attempts--;
}
