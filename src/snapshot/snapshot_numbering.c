/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams and pools of a trace as small numbers.
 *
 * A stream is the address of a CUDA object, a private pool a pair of counters. The simulator takes any
 * number and releases memory in ascending order of them, as the real allocator does of the addresses; so
 * numbers follow the order of the addresses. The default stream is address 0 and the default pool 0, 0:
 * both get number 0.
 *
 * An entry of a trace does not say which pool it belongs to. A segment at the end does, and a private pool
 * keeps its segments while it lives; memory that was given back before the end counts as the default pool's.
 */
#include <stdlib.h>

#include "base/error.h"
#include "base/invariant.h"
#include "snapshot/snapshot_replay.h"

static int compare_words(const void *a, const void *b)
{
    const uint64_t *x = a;
    const uint64_t *y = b;

    return (*x > *y) - (*x < *y);
}

static int compare_pairs(const void *a, const void *b)
{
    const uint64_t *x = a;
    const uint64_t *y = b;

    return x[0] != y[0] ? compare_words(x, y) : compare_words(x + 1, y + 1);
}

/* Sorts an array of records of whole words and drops what is there twice. */
static void make_set(msc__array *array, size_t item_words, int (*compare)(const void *, const void *))
{
    uint64_t *items = array->items;
    size_t item_bytes = item_words * sizeof *items;
    uint32_t kept = 1;
    uint32_t i;
    size_t word;

    MSC__ASSERT(array->count > 0);
    qsort(items, array->count, item_bytes, compare);
    for (i = 1; i < array->count; i++) {
        if (compare(items + (kept - 1) * item_words, items + i * item_words) == 0)
            continue;
        for (word = 0; word < item_words; word++)
            items[kept * item_words + word] = items[i * item_words + word];
        kept++;
    }
    MSC__ASSERT(kept <= array->count);
    array->count = kept;
}

/* Traces stay on one stream for long: only changes are collected. */
static msc_status collect_streams(msc__numbering *numbering, const msc__history *history, msc_error *err)
{
    msc_context *ctx = history->snapshot->ctx;
    uint64_t last = 0;
    uint32_t count;
    uint32_t i;
    const msc_snapshot_segment *segments = msc_snapshot_segments(history->snapshot, history->device, &count);
    msc_status status = msc__array_push(ctx, &numbering->streams, sizeof last, &last, err);

    for (i = 0; i < count && status == MSC_OK; i++)
        status = msc__array_push(ctx, &numbering->streams, sizeof last, &segments[i].stream, err);
    for (i = 0; i < history->event_count && status == MSC_OK; i++) {
        if (history->events[i].stream == last)
            continue;
        last = history->events[i].stream;
        status = msc__array_push(ctx, &numbering->streams, sizeof last, &last, err);
        if (numbering->streams.count > 4096)
            make_set(&numbering->streams, 1, compare_words);
    }
    return status;
}

msc_status msc__numbering_init(msc__numbering *numbering, const msc__history *history, msc_error *err)
{
    static const uint64_t default_pool[2] = {0, 0};
    msc_context *ctx = history->snapshot->ctx;
    uint32_t count;
    uint32_t i;
    const msc_snapshot_segment *segments = msc_snapshot_segments(history->snapshot, history->device, &count);
    msc_status status = collect_streams(numbering, history, err);

    if (status == MSC_OK)
        status = msc__array_push(ctx, &numbering->pools, sizeof default_pool, default_pool, err);
    for (i = 0; i < count && status == MSC_OK; i++)
        status = msc__array_push(ctx, &numbering->pools, sizeof default_pool, segments[i].pool, err);
    if (status != MSC_OK)
        return status;
    make_set(&numbering->streams, 1, compare_words);
    make_set(&numbering->pools, 2, compare_pairs);
    MSC__ASSERT(msc__numbering_pool(numbering, default_pool) == 0);
    return MSC_OK;
}

void msc__numbering_fini(msc_context *ctx, msc__numbering *numbering)
{
    msc__array_fini(ctx, &numbering->streams, sizeof(uint64_t));
    msc__array_fini(ctx, &numbering->pools, 2 * sizeof(uint64_t));
}

/* Index of a record that is there. */
static uint32_t index_of(const msc__array *array, size_t item_bytes, const void *wanted,
                         int (*compare)(const void *, const void *))
{
    const char *found = bsearch(wanted, array->items, array->count, item_bytes, compare);

    return found == NULL ? 0 : (uint32_t)((size_t)(found - (const char *)array->items) / item_bytes);
}

uint32_t msc__numbering_stream(const msc__numbering *numbering, uint64_t stream)
{
    return stream == 0 ? 0 : index_of(&numbering->streams, sizeof stream, &stream, compare_words);
}

uint32_t msc__numbering_pool(const msc__numbering *numbering, const uint64_t pool[2])
{
    return index_of(&numbering->pools, 2 * sizeof *pool, pool, compare_pairs);
}
