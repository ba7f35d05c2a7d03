/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_reference.h
 * The caching allocator once more, as plainly as possible, to compare the simulator with.
 *
 * All blocks are in one array sorted by address. Every question is answered by looking at all of them, and
 * most statistics are sums taken afresh. Nothing here is shared with src/sim.
 */
#ifndef MSC_TEST_SIM_REFERENCE_H
#define MSC_TEST_SIM_REFERENCE_H

#include "sim_reference_blocks.h"

/* Whether block a comes before block b in best-fit order. */
static inline bool ref_before(const ref_block *a, const ref_block *b)
{
    return a->size < b->size || (a->size == b->size && a->start < b->start);
}

/* First free block of the stream and pool that is not below (size, start), or -1. */
static inline int ref_find(const reference *ref, uint32_t stream, bool large, uint64_t size, uint64_t start)
{
    ref_block bound = {.size = size, .start = start};
    int best = -1;
    int i;

    for (i = 0; i < ref->count; i++) {
        const ref_block *b = &ref->blocks[i];
        if (b->state == REF_FREE && b->stream == stream && b->large == large && !ref_before(b, &bound) &&
            (best < 0 || ref_before(b, &ref->blocks[best])))
            best = i;
    }
    return best;
}

static inline uint64_t ref_growable(const reference *ref, int i)
{
    bool grows = ref_joined(ref, i, i + 1) && ref->blocks[i + 1].state == REF_UNMAPPED;

    return ref->blocks[i].size + (grows ? ref->blocks[i + 1].size : 0);
}

static inline int ref_fit(const reference *ref, uint32_t stream, bool large, uint64_t size)
{
    uint64_t limit = ref->options.max_split_bytes;
    int i = ref_find(ref, stream, large, size, 0);

    while (i >= 0 && ref->options.expandable_segments) {
        int next = ref_find(ref, stream, large, ref->blocks[i].size, ref->blocks[i].start + 1);
        if (next < 0 || ref_growable(ref, next) >= ref_growable(ref, i))
            break;
        i = next;
    }
    if (i >= 0 && size < limit && ref->blocks[i].size >= limit)
        return -1;
    if (i >= 0 && size >= limit && ref->blocks[i].size >= size + ref->options.max_non_split_rounding_bytes)
        return -1;
    return i;
}

static inline int ref_add_segment(reference *ref, uint32_t stream, bool large, uint64_t size, int state)
{
    uint64_t start = (ref->lowest - size) / ref_page(ref, large) * ref_page(ref, large);
    ref_block block = {.start = start, .size = size, .segment = start};

    block.stream = stream;
    block.large = large;
    block.state = state;
    ref->lowest = start;
    ref_insert(ref, 0, block);
    return 0;
}

static inline int ref_new_segment(reference *ref, uint32_t stream, bool large, uint64_t size)
{
    uint64_t bytes = !large ? 2 * REF_MIB : ref->options.large_segment_bytes;

    if (size >= 10 * REF_MIB)
        bytes = ref_up(size, 2 * REF_MIB);
    if (ref_reserved(ref) + bytes > ref->options.capacity_bytes)
        return -1;
    ref->stats.device_alloc_count++;
    return ref_add_segment(ref, stream, large, bytes, REF_FREE);
}

/* Start of the lowest run, beginning at an unmapped block or the free one below, that holds `size`. */
static inline int ref_space(reference *ref, uint32_t stream, bool large, uint64_t size)
{
    uint64_t page = ref_page(ref, large);
    uint64_t space = UINT64_C(1) << 42;
    int i;

    for (i = 0; i < ref->count; i++) {
        const ref_block *b = &ref->blocks[i];
        uint64_t found = 0;
        int from = i;
        int j;
        if (b->state != REF_UNMAPPED || b->stream != stream || b->large != large)
            continue;
        if (ref_joined(ref, i - 1, i) && ref->blocks[i - 1].state == REF_FREE)
            from = i - 1;
        for (j = from; ref_joined(ref, from, j) && ref->blocks[j].state != REF_USED; j++)
            found += ref->blocks[j].size;
        if (found >= size)
            return from;
    }
    if (ref->options.capacity_bytes < space)
        space = ref->options.capacity_bytes + ref->options.capacity_bytes / 8;
    return ref_add_segment(ref, stream, large, ref_up(space, page), REF_UNMAPPED);
}

static inline int ref_grow(reference *ref, uint32_t stream, bool large, uint64_t size)
{
    uint64_t page = ref_page(ref, large);
    uint64_t start;
    int i;

    if (size > ref->options.capacity_bytes)
        return -1;
    i = ref_space(ref, stream, large, size);
    start = ref->blocks[i].start;
    for (;;) {
        uint64_t have, short_by;
        for (i = 0; ref->blocks[i].start != start; i++)
            ;
        have = ref->blocks[i].state == REF_FREE ? ref->blocks[i].size : 0;
        if (have >= size)
            return i;
        i += have != 0 ? 1 : 0; /* the unmapped block */
        short_by = size - have < ref->blocks[i].size ? size - have : ref->blocks[i].size;
        short_by = ref_up(short_by, page);
        if (ref_reserved(ref) + short_by > ref->options.capacity_bytes)
            return -1;
        if (short_by < ref->blocks[i].size)
            ref_cut(ref, i, short_by);
        ref->blocks[i].state = REF_FREE;
        ref->stats.device_alloc_count++;
        ref_merge(ref);
        ref_highest(&ref->stats.reserved_peak_bytes, ref_reserved(ref));
    }
}

static inline int ref_ask(reference *ref, uint32_t stream, bool large, uint64_t size)
{
    return ref->options.expandable_segments ? ref_grow(ref, stream, large, size)
                                            : ref_new_segment(ref, stream, large, size);
}

/* Unmaps whole pages of the free block i; true if there were any. */
static inline bool ref_unmap(reference *ref, int i)
{
    uint64_t page = ref_page(ref, ref->blocks[i].large);
    uint64_t from = ref_up(ref->blocks[i].start - ref->blocks[i].segment, page);
    uint64_t to = (ref->blocks[i].start + ref->blocks[i].size - ref->blocks[i].segment) / page * page;

    if (from >= to)
        return false;
    from += ref->blocks[i].segment;
    to += ref->blocks[i].segment;
    if (from > ref->blocks[i].start) {
        ref_cut(ref, i, from - ref->blocks[i].start);
        i++;
    }
    if (ref->blocks[i].size > to - from)
        ref_cut(ref, i, to - from);
    ref->blocks[i].state = REF_UNMAPPED;
    ref->stats.device_free_count++;
    return true;
}

/* A segment that has nothing mapped goes when its last pages do. One that never got any stays. */
static inline void ref_empty_cache(reference *ref)
{
    uint64_t shrunk[REF_MOST_BLOCKS];
    int shrunk_count = 0;
    int i = 0;
    int j;

    while (i < ref->count) {
        bool whole = !ref_is_split(ref, i);
        if (ref->blocks[i].state == REF_FREE && !ref->options.expandable_segments && whole) {
            ref_remove(ref, i);
            ref->stats.device_free_count++;
        } else if (ref->blocks[i].state == REF_FREE && ref->options.expandable_segments &&
                   ref_unmap(ref, i)) {
            shrunk[shrunk_count++] = ref->blocks[i].segment;
            i = 0;
        } else {
            i++;
        }
    }
    ref_merge(ref);
    for (j = 0; j < shrunk_count; j++)
        for (i = ref->count - 1; i >= 0; i--)
            if (ref->blocks[i].segment == shrunk[j] && ref->blocks[i].state == REF_UNMAPPED &&
                !ref_is_split(ref, i))
                ref_remove(ref, i);
    ref_count(ref);
}

/* Oversize blocks: one that is large enough, or the largest ones until they are. */
static inline bool ref_release_oversize(reference *ref, uint32_t stream, bool large, uint64_t size)
{
    uint64_t limit = ref->options.max_split_bytes;
    uint64_t wanted = size > limit ? size : limit;
    uint64_t sum = 0;
    int i;

    if (limit == UINT64_MAX || ref->options.expandable_segments)
        return false;
    i = ref_find(ref, stream, large, wanted, 0);
    if (i >= 0) {
        ref_remove(ref, i);
        ref->stats.device_free_count++;
        return true;
    }
    while (sum < wanted) {
        int best = -1;
        for (i = 0; i < ref->count; i++) {
            const ref_block *b = &ref->blocks[i];
            if (b->state == REF_FREE && b->stream == stream && b->large == large && b->size >= limit &&
                (best < 0 || ref_before(&ref->blocks[best], b)))
                best = i;
        }
        if (best < 0)
            return false;
        sum += ref->blocks[best].size;
        ref_remove(ref, best);
        ref->stats.device_free_count++;
    }
    return true;
}

static inline bool ref_splits(const reference *ref, const ref_block *b, uint64_t size)
{
    uint64_t rest = b->size - size;

    if (!b->large || ref->options.expandable_segments)
        return rest >= 512;
    return size < ref->options.max_split_bytes && rest > REF_MIB;
}

static inline bool ref_alloc(reference *ref, uint32_t id, uint64_t asked, uint32_t stream)
{
    uint64_t size = ref_round(ref, asked);
    bool large = size > REF_MIB;
    int i = ref_fit(ref, stream, large, size);

    if (i < 0)
        i = ref_ask(ref, stream, large, size);
    if (i < 0 && ref_release_oversize(ref, stream, large, size))
        i = ref_ask(ref, stream, large, size);
    if (i < 0) {
        ref_empty_cache(ref);
        ref->stats.alloc_retry_count++;
        i = ref_ask(ref, stream, large, size);
    }
    if (i < 0) {
        ref->stats.oom_count++;
        ref_count(ref);
        return false;
    }
    if (ref_splits(ref, &ref->blocks[i], size))
        ref_cut(ref, i, size);
    ref->blocks[i].state = REF_USED;
    ref->blocks[i].id = id;
    ref->blocks[i].asked = asked;
    ref_count(ref);
    return true;
}

static inline void ref_free(reference *ref, uint32_t id)
{
    int i;

    for (i = 0; i < ref->count; i++)
        if (ref->blocks[i].state == REF_USED && ref->blocks[i].id == id)
            ref->blocks[i].state = REF_FREE;
    ref_merge(ref);
    ref_count(ref);
}

#endif /* MSC_TEST_SIM_REFERENCE_H */
