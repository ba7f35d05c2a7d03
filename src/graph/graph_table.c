/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hash table that finds interned strings and duplicate inputs.
 *
 * The table stores hashes and indices only; the records themselves stay in their arrays, and the caller
 * compares. Keeping the hash in the slot makes growing possible without knowing the records:
 *
 *      slot   0        1        2        3
 *           [ h, 7 ] [ -, 0 ] [ h, 2 ] [ g, 1 ]      item = index + 1, 0 = empty
 *
 * Invariant: at most half of the slots are taken, so a probe always meets an empty one. The table is
 * never iterated, hence its layout cannot leak into any result.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "graph/graph_internal.h"

#define FIRST_SLOTS 64u
#define MOST_SLOTS 0x40000000u

static void insert(msc__graph_slot *slots, uint32_t capacity, msc__graph_slot entry)
{
    uint32_t at = entry.hash & (capacity - 1);

    while (slots[at].item != 0)
        at = (at + 1) & (capacity - 1);
    slots[at] = entry;
}

msc_status msc__graph_table_reserve(msc_context *ctx, msc__graph_table *table, msc_error *err)
{
    msc__graph_slot *slots;
    uint32_t capacity = table->capacity == 0 ? FIRST_SLOTS : table->capacity * 2;
    uint32_t i;

    if (table->count < table->capacity / 2)
        return MSC_OK;
    if (capacity > MOST_SLOTS)
        return msc__fail(err, MSC_EOVERFLOW, "more than %u names or inputs", MOST_SLOTS / 2);
    slots = msc__alloc(ctx, capacity * sizeof *slots);
    if (slots == NULL)
        return msc__fail_memory(err, "a table", capacity * sizeof *slots);
    for (i = 0; i < table->capacity; i++) {
        if (table->slots[i].item != 0)
            insert(slots, capacity, table->slots[i]);
    }
    msc__free(ctx, table->slots, table->capacity * sizeof *slots);
    table->slots = slots;
    table->capacity = capacity;
    return MSC_OK;
}

void msc__graph_table_insert(msc__graph_table *table, uint32_t hash, uint32_t index)
{
    insert(table->slots, table->capacity, (msc__graph_slot){.hash = hash, .item = index + 1});
    table->count++;
}

uint32_t msc__graph_table_next(const msc__graph_table *table, uint32_t hash, uint32_t *probe)
{
    if (table->capacity == 0)
        return MSC_NONE;
    for (;;) {
        const msc__graph_slot *slot = &table->slots[(*probe)++ & (table->capacity - 1)];
        if (slot->item == 0)
            return MSC_NONE;
        if (slot->hash == hash)
            return slot->item - 1;
    }
}

void msc__graph_table_fini(msc_context *ctx, msc__graph_table *table)
{
    msc__free(ctx, table->slots, table->capacity * sizeof *table->slots);
    *table = (msc__graph_table){.slots = NULL, .capacity = 0, .count = 0};
}
