/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From events to allocations.
 *
 *     event        0      1        2          3        4
 *     trace     alloc X  free Y  alloc Y   alloc X?  free Y
 *                          └ allocated before the trace began: a ring has lost its beginning, or
 *                            recording started late
 *                                             └ X is in use already: events are missing before 3
 *
 * One walk forward, with a record of what each address holds. What is freed without having been allocated,
 * and what the snapshot's blocks hold without it, was there before the trace. Where an event contradicts what
 * came before it, recording had been interrupted; what lies before is given up, and the walk goes on as if
 * the trace began there, which costs nothing since the records carry the number of their walk.
 *
 * At the end each block in use must be what its address holds. If it is not, recording stopped before the
 * snapshot was taken; then the trace stands alone.
 */
#include "snapshot/snapshot_history.h"

#include <string.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"

/* What an address holds. */
typedef struct place {
    uint64_t address;
    uint32_t walk;       /* of another walk: nothing is known */
    uint32_t allocation; /* MSC_NONE: free */
} place;

typedef struct walk {
    msc__history *history;
    msc_context *ctx;
    msc_error *err;
    msc__hash_index table;
    msc__array places;
    uint32_t number;
} walk;

static uint32_t hash_address(uint64_t address)
{
    uint64_t mixed = (address >> 9 ^ address) * UINT64_C(0x9e3779b97f4a7c15);

    return (uint32_t)(mixed >> 32);
}

/* Record of an address, made if there is none. */
static msc_status place_of(walk *w, uint64_t address, place **out)
{
    place added = {address, 0, MSC_NONE};
    uint32_t hash = hash_address(address);
    uint32_t probe = hash;
    uint32_t index;
    msc_status status;

    while (w->places.items != NULL && (index = msc__hash_index_next(&w->table, hash, &probe)) != MSC_NONE) {
        MSC__ASSERT(index < w->places.count);
        *out = (place *)w->places.items + index;
        if ((*out)->address == address)
            return MSC_OK;
    }
    status = msc__hash_index_reserve(w->ctx, &w->table, "addresses", w->err);
    if (status == MSC_OK)
        status = msc__array_push(w->ctx, &w->places, sizeof added, &added, w->err);
    if (status != MSC_OK)
        return status;
    msc__hash_index_insert(&w->table, hash, w->places.count - 1);
    *out = (place *)w->places.items + (w->places.count - 1);
    return MSC_OK;
}

static msc_status add_allocation(walk *w, const msc_snapshot_event *event, place *at)
{
    msc__allocation allocation = {.address = event->address,
                                  .requested_bytes = event->size_bytes,
                                  .alloc = MSC__BEFORE,
                                  .request = MSC_NONE,
                                  .complete = MSC_NONE,
                                  .block = MSC_NONE};

    MSC__ASSERT(at->walk != w->number || at->allocation == MSC_NONE);
    at->walk = w->number;
    at->allocation = w->history->allocations.count;
    return msc__array_push(w->ctx, &w->history->allocations, sizeof allocation, &allocation, w->err);
}

/* Whether an event can follow on what the walk knows of its address. */
static bool fits(const walk *w, const place *at, uint8_t action)
{
    const msc__allocation *held;

    if (at->walk != w->number)
        return true;
    if (at->allocation == MSC_NONE)
        return action == MSC_SNAPSHOT_ACTION_ALLOC;
    held = msc__history_at(w->history, at->allocation);
    MSC__ASSERT(held->address == at->address && held->complete == MSC_NONE);
    return action == MSC_SNAPSHOT_ACTION_FREE_COMPLETED ||
           (action == MSC_SNAPSHOT_ACTION_FREE_REQUESTED && held->request == MSC_NONE);
}

/* Gives up everything before an event. */
static void restart(walk *w, uint32_t event)
{
    MSC__ASSERT(event >= w->history->first_event);
    w->number++;
    w->history->first_event = event;
    w->history->allocations.count = 0;
    w->history->of_event.count = 0;
}

/* Marks on the allocation at an address what an event says. */
static void apply(walk *w, place *at, uint32_t index)
{
    const msc_snapshot_event *event = &w->history->events[index];
    msc__allocation *held = msc__history_at(w->history, at->allocation);

    MSC__ASSERT(at->walk == w->number && held->address == event->address && held->complete == MSC_NONE);
    if (event->action == MSC_SNAPSHOT_ACTION_ALLOC) {
        held->alloc = index;
        held->stack = event->stack;
        return;
    }
    if (event->action == MSC_SNAPSHOT_ACTION_FREE_REQUESTED) {
        held->request = index;
        return;
    }
    if (held->request == MSC_NONE) /* the request was not recorded, or before the trace */
        held->request = held->alloc == MSC__BEFORE ? MSC__BEFORE : index;
    held->complete = index;
    at->allocation = MSC_NONE;
}

static msc_status visit(walk *w, uint32_t index)
{
    const msc_snapshot_event *event = &w->history->events[index];
    uint32_t allocation = MSC_NONE;
    place *at;
    msc_status status = MSC_OK;

    if (event->action <= MSC_SNAPSHOT_ACTION_FREE_COMPLETED) {
        status = place_of(w, event->address, &at);
        if (status == MSC_OK && !fits(w, at, event->action))
            restart(w, index);
        if (status == MSC_OK && (at->walk != w->number || at->allocation == MSC_NONE))
            status = add_allocation(w, event, at);
        if (status != MSC_OK)
            return status;
        allocation = at->allocation;
        apply(w, at, index);
    }
    MSC__ASSERT(w->history->of_event.count == index - w->history->first_event);
    return msc__array_push(w->ctx, &w->history->of_event, sizeof allocation, &allocation, w->err);
}

/* ---- the end ------------------------------------------------------------------------------------ */

/* Compares a block in use with what its address holds; what the trace never saw is added. */
static msc_status visit_block(walk *w, uint32_t index, uint32_t *matched)
{
    const msc_snapshot_block *block = (const msc_snapshot_block *)w->history->snapshot->blocks.items + index;
    msc_snapshot_event as_event = {.address = block->address, .size_bytes = block->requested_bytes};
    bool pending = block->state == MSC_SNAPSHOT_STATE_PENDING;
    msc__allocation *held;
    place *at;
    msc_status status = place_of(w, block->address, &at);

    if (status != MSC_OK)
        return status;
    if (at->walk != w->number) {
        status = add_allocation(w, &as_event, at);
        if (status != MSC_OK)
            return status;
        held = msc__history_at(w->history, at->allocation);
        held->request = pending ? MSC__BEFORE : MSC_NONE;
    }
    if (at->allocation == MSC_NONE) {
        w->history->ends_in_blocks = false;
        return MSC_OK;
    }
    held = msc__history_at(w->history, at->allocation);
    MSC__ASSERT(held->address == block->address && held->complete == MSC_NONE);
    held->block = index;
    if (held->stack == 0)
        held->stack = block->stack;
    if (held->requested_bytes != block->requested_bytes || (held->request != MSC_NONE) != pending)
        w->history->ends_in_blocks = false;
    ++*matched;
    return MSC_OK;
}

static msc_status visit_blocks(walk *w)
{
    const msc_snapshot *snapshot = w->history->snapshot;
    const msc_snapshot_block *blocks = snapshot->blocks.items;
    const msc_snapshot_segment *segments;
    uint32_t matched = 0;
    uint32_t alive = 0;
    uint32_t count;
    uint32_t i, j;
    msc_status status = MSC_OK;

    w->history->ends_in_blocks = true;
    segments = msc_snapshot_segments(snapshot, w->history->device, &count);
    for (i = 0; i < count && status == MSC_OK; i++) {
        for (j = segments[i].first_block; j < segments[i].first_block + segments[i].block_count; j++) {
            if (blocks[j].state != MSC_SNAPSHOT_STATE_INACTIVE && status == MSC_OK)
                status = visit_block(w, j, &matched);
        }
    }
    for (i = 0; i < w->history->allocations.count; i++)
        alive += msc__history_at(w->history, i)->complete == MSC_NONE;
    if (alive != matched)
        w->history->ends_in_blocks = false;
    return status;
}

/* Where recording stopped early, blocks that the trace never saw may be younger than it: they go. */
static void drop_unseen(msc__history *history, uint32_t seen_count)
{
    uint32_t i;

    MSC__ASSERT(seen_count <= history->allocations.count);
    if (history->ends_in_blocks)
        return;
    history->allocations.count = seen_count;
    for (i = 0; i < seen_count; i++)
        msc__history_at(history, i)->block = MSC_NONE;
}

msc_status msc__history_init(msc__history *history, const msc_snapshot *snapshot, uint32_t device,
                             uint32_t first_event, msc_error *err)
{
    walk w = {.history = history, .ctx = snapshot->ctx, .err = err, .number = 1};
    uint32_t seen_count = 0;
    uint32_t i;
    msc_status status = MSC_OK;

    memset(history, 0, sizeof *history);
    if (device >= snapshot->device_count)
        return msc__fail(err, MSC_EINVAL, "the snapshot has no device %u, it has %u", device,
                         snapshot->device_count);
    history->snapshot = snapshot;
    history->device = device;
    history->events = msc_snapshot_events(snapshot, device, &history->event_count);
    history->first_event = first_event;
    for (i = first_event; i < history->event_count && status == MSC_OK; i++)
        status = visit(&w, i);
    seen_count = history->allocations.count;
    MSC__ASSERT(status != MSC_OK || history->of_event.count == history->event_count - history->first_event);
    if (status == MSC_OK)
        status = visit_blocks(&w);
    drop_unseen(history, seen_count);
    msc__hash_index_fini(w.ctx, &w.table);
    msc__array_fini(w.ctx, &w.places, sizeof(place));
    if (status != MSC_OK)
        msc__history_fini(history);
    return status;
}

void msc__history_fini(msc__history *history)
{
    if (history->snapshot == NULL)
        return;
    msc__array_fini(history->snapshot->ctx, &history->allocations, sizeof(msc__allocation));
    msc__array_fini(history->snapshot->ctx, &history->of_event, sizeof(uint32_t));
}

/* ---- sums --------------------------------------------------------------------------------------- */

void msc__history_peak(const msc__history *history, uint64_t *bytes, uint32_t *event)
{
    uint64_t now = 0;
    uint32_t i;

    for (i = 0; i < history->allocations.count; i++) {
        const msc__allocation *allocation = msc__history_at(history, i);
        if (allocation->alloc == MSC__BEFORE && allocation->request != MSC__BEFORE)
            now = msc__sat_add_u64(now, allocation->requested_bytes);
    }
    *bytes = now;
    *event = history->event_count;
    for (i = history->first_event; i < history->event_count; i++) {
        uint32_t index = msc__history_of(history, i);
        const msc__allocation *allocation;
        if (index == MSC_NONE)
            continue;
        allocation = msc__history_at(history, index);
        MSC__ASSERT(allocation->alloc == MSC__BEFORE || allocation->alloc <= i);
        if (allocation->alloc == i)
            now = msc__sat_add_u64(now, allocation->requested_bytes);
        else if (allocation->request == i)
            now = msc__sat_sub_u64(now, allocation->requested_bytes);
        if (now > *bytes) {
            *bytes = now;
            *event = i;
        }
    }
}

uint64_t msc__history_reserved_peak(const msc__history *history)
{
    const msc_snapshot_segment *segments;
    uint64_t now = 0;
    uint64_t peak;
    uint32_t count;
    uint32_t i;

    segments = msc_snapshot_segments(history->snapshot, history->device, &count);
    for (i = 0; i < count; i++)
        now = msc__sat_add_u64(now, segments[i].total_bytes);
    peak = now;
    for (i = history->event_count; i-- > history->first_event;) {
        const msc_snapshot_event *event = &history->events[i];
        if (event->action == MSC_SNAPSHOT_ACTION_SEGMENT_ALLOC ||
            event->action == MSC_SNAPSHOT_ACTION_SEGMENT_MAP)
            now = msc__sat_sub_u64(now, event->size_bytes);
        if (event->action == MSC_SNAPSHOT_ACTION_SEGMENT_FREE ||
            event->action == MSC_SNAPSHOT_ACTION_SEGMENT_UNMAP)
            now = msc__sat_add_u64(now, event->size_bytes);
        if (now > peak)
            peak = now;
    }
    return peak;
}
