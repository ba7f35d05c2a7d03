/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hash table. Keeping the hash in the slot makes growing possible without knowing the records:
 *
 *      slot   0        1        2        3
 *           [ h, 7 ] [ -, 0 ] [ h, 2 ] [ g, 1 ]      item = index + 1, 0 = empty
 *
 * Invariant: at most half of the slots are taken, so a probe always meets an empty one.
 */
#include "base/hash_index.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"

#define FIRST_SLOTS 64u
#define MOST_SLOTS 0x80000000u

static void insert(msc__hash_slot *slots, uint32_t capacity, msc__hash_slot entry)
{
    uint32_t at = entry.hash & (capacity - 1);

    MSC__ASSERT((capacity & (capacity - 1)) == 0 && entry.item != 0);
    while (slots[at].item != 0)
        at = (at + 1) & (capacity - 1);
    slots[at] = entry;
}

msc_status msc__hash_index_reserve(msc_context *ctx, msc__hash_index *index, const char *what, msc_error *err)
{
    msc__hash_slot *slots;
    uint32_t capacity = index->capacity == 0 ? FIRST_SLOTS : index->capacity * 2;
    uint32_t i;

    if (index->count < index->capacity / 2)
        return MSC_OK;
    if (capacity > MOST_SLOTS || capacity == 0)
        return msc__fail(err, MSC_EOVERFLOW, "more than %u %s", MOST_SLOTS / 2, what);
    slots = msc__alloc(ctx, capacity * sizeof *slots);
    if (slots == NULL)
        return msc__fail_memory(err, "a table", capacity * sizeof *slots);
    for (i = 0; i < index->capacity; i++) {
        if (index->slots[i].item != 0)
            insert(slots, capacity, index->slots[i]);
    }
    msc__free(ctx, index->slots, index->capacity * sizeof *slots);
    index->slots = slots;
    index->capacity = capacity;
    return MSC_OK;
}

void msc__hash_index_insert(msc__hash_index *index, uint32_t hash, uint32_t record)
{
    MSC__ASSERT(index->count < index->capacity / 2); /* msc__hash_index_reserve: searches end */
    insert(index->slots, index->capacity, (msc__hash_slot){.hash = hash, .item = record + 1});
    index->count++;
}

uint32_t msc__hash_index_next(const msc__hash_index *index, uint32_t hash, uint32_t *probe)
{
    if (index->capacity == 0)
        return MSC_NONE;
    MSC__ASSERT(index->count < index->capacity);
    for (;;) {
        const msc__hash_slot *slot = &index->slots[(*probe)++ & (index->capacity - 1)];
        if (slot->item == 0)
            return MSC_NONE;
        if (slot->hash == hash)
            return slot->item - 1;
    }
}

void msc__hash_index_fini(msc_context *ctx, msc__hash_index *index)
{
    msc__free(ctx, index->slots, index->capacity * sizeof *index->slots);
    *index = (msc__hash_index){.slots = NULL, .capacity = 0, .count = 0};
}
