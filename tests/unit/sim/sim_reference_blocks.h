/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_reference_blocks.h
 * Blocks of the plain reference allocator: rounding, cutting, merging, and sums over all of them.
 */
#ifndef MSC_TEST_SIM_REFERENCE_BLOCKS_H
#define MSC_TEST_SIM_REFERENCE_BLOCKS_H

#include <stdbool.h>
#include <string.h>

#include "memscale/sim.h"

#define REF_MOST_BLOCKS 4096
#define REF_MIB (UINT64_C(1) << 20)

enum { REF_FREE, REF_USED, REF_UNMAPPED };

typedef struct ref_block {
    uint64_t start, size, asked;
    uint64_t segment; /* start of its segment; tells neighbours from strangers */
    uint32_t stream, id;
    bool large;
    int state;
} ref_block;

typedef struct reference {
    msc_sim_options options;
    msc_sim_stats stats;
    ref_block blocks[REF_MOST_BLOCKS];
    int count;
    uint64_t lowest; /* where the next segment ends */
} reference;

static inline void ref_init(reference *ref, const msc_sim_options *options)
{
    memset(ref, 0, sizeof *ref);
    ref->options = *options;
    ref->lowest = UINT64_C(1) << 60;
}

static inline uint64_t ref_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static inline uint64_t ref_round(const reference *ref, uint64_t size)
{
    uint64_t divisions;
    uint64_t power = 1;
    int interval = 0;

    if (size < 512)
        return 512;
    while (interval < 15 && (UINT64_C(2) << (20 + interval)) <= size)
        interval++;
    divisions = ref->options.roundup_power2_divisions[interval];
    if (divisions <= 1 || size <= 512 * divisions)
        return ref_up(size, 512);
    while (power * 2 <= size)
        power *= 2;
    return ref_up(size, power / divisions);
}

static inline uint64_t ref_page(const reference *ref, bool large)
{
    return large ? ref->options.large_segment_bytes : 2 * REF_MIB;
}

static inline bool ref_joined(const reference *ref, int low, int high)
{
    return low >= 0 && high < ref->count && ref->blocks[low].segment == ref->blocks[high].segment;
}

static inline bool ref_is_split(const reference *ref, int i)
{
    return ref_joined(ref, i - 1, i) || ref_joined(ref, i, i + 1);
}

static inline void ref_remove(reference *ref, int i)
{
    ref->count--;
    memmove(&ref->blocks[i], &ref->blocks[i + 1], (size_t)(ref->count - i) * sizeof ref->blocks[0]);
}

static inline void ref_insert(reference *ref, int i, ref_block block)
{
    memmove(&ref->blocks[i + 1], &ref->blocks[i], (size_t)(ref->count - i) * sizeof ref->blocks[0]);
    ref->blocks[i] = block;
    ref->count++;
}

/* Cuts block i after `size` bytes. */
static inline void ref_cut(reference *ref, int i, uint64_t size)
{
    ref_block rest = ref->blocks[i];

    rest.start += size;
    rest.size -= size;
    ref->blocks[i].size = size;
    ref_insert(ref, i + 1, rest);
}

/* Merges every two neighbours that are both free or both unmapped. */
static inline void ref_merge(reference *ref)
{
    int i = 0;

    while (i + 1 < ref->count) {
        ref_block *b = &ref->blocks[i];
        if (ref_joined(ref, i, i + 1) && b[0].state == b[1].state && b[0].state != REF_USED) {
            b[0].size += b[1].size;
            ref_remove(ref, i + 1);
        } else {
            i++;
        }
    }
}

static inline uint64_t ref_reserved(const reference *ref)
{
    uint64_t sum = 0;
    int i;

    for (i = 0; i < ref->count; i++)
        sum += ref->blocks[i].state == REF_UNMAPPED ? 0 : ref->blocks[i].size;
    return sum;
}

static inline void ref_highest(uint64_t *peak, uint64_t now)
{
    *peak = now > *peak ? now : *peak;
}

/* Brings sums and peaks up to date. */
static inline void ref_count(reference *ref)
{
    msc_sim_stats *s = &ref->stats;
    int i;

    s->allocated_now_bytes = 0;
    s->requested_now_bytes = 0;
    s->inactive_split_now_bytes = 0;
    s->segment_now_count = 0;
    for (i = 0; i < ref->count; i++) {
        const ref_block *b = &ref->blocks[i];
        s->allocated_now_bytes += b->state == REF_USED ? b->size : 0;
        s->requested_now_bytes += b->state == REF_USED ? b->asked : 0;
        if (ref->options.expandable_segments)
            continue;
        s->inactive_split_now_bytes += b->state == REF_FREE && ref_is_split(ref, i) ? b->size : 0;
        s->segment_now_count += b->start == b->segment ? 1 : 0;
    }
    s->reserved_now_bytes = ref_reserved(ref);
    ref_highest(&s->allocated_peak_bytes, s->allocated_now_bytes);
    ref_highest(&s->requested_peak_bytes, s->requested_now_bytes);
    ref_highest(&s->reserved_peak_bytes, s->reserved_now_bytes);
    ref_highest(&s->segment_peak_count, s->segment_now_count);
}

#endif /* MSC_TEST_SIM_REFERENCE_BLOCKS_H */
