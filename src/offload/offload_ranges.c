/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranges of a space, after M. Masmano's "TLSF: a new dynamic memory allocator for real-time systems" (2004), with
 * the records outside of what they describe.
 *
 * One record per range, taken or free. They form a ring in the order of their starts; record 0 closes it, counts
 * as taken and has no size, so that no range lacks a neighbour:
 *
 *      record      0   <->   4   <->   1   <->   7   <-> (0)
 *                          taken     free      taken
 *      units               0..11     12..39    40..99
 *
 * Free ranges are also in the list of their size class. Sizes are counted in units of the alignment; a class is
 * one size up to 2 * CLASSES_PER_POWER units and a 32nd of a power of two above. `words` has a bit for each list
 * that is not empty, `summary` one for each word that is not zero, so the next class with something in it is found
 * in a few instructions.
 *
 * Looking for n units:
 *   1. the first ranges in the list of n's own class, and of these the smallest that is large enough: what a
 *      repeated step gives back is taken again without a cut;
 *   2. the first range of the next class above that has any: large enough, whichever it is;
 *   3. all of n's own class. Only here the time is not constant, and only in a space where nothing larger is
 *      left; to refuse what would fit costs more, a new slab or a slower tier.
 *
 * Invariants (`msc__ranges_valid`): the sizes add up to the capacity; two free ranges are never neighbours; each
 * free range is in the list of its class and nowhere else; a bit is set where a list is not empty.
 */
#include "offload/offload_ranges.h"

#include <stdbool.h>

#include "base/alloc.h"
#include "base/array.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"

#define CLASS_BITS 5u /* log2 of the classes for each power of two */
#define CLASSES_PER_POWER (1u << CLASS_BITS)
#define CLASS_COUNT ((64u - CLASS_BITS + 1u) * CLASSES_PER_POWER)
#define WORD_COUNT (CLASS_COUNT / 64u)
#define LOOK_MOST 8u /* ranges of the own class that are looked at before a larger one is cut */
#define EDGE 0u      /* record before the first range and behind the last; also "none" in lists */

typedef enum state { EMPTY, FREE, TAKEN } state;

/* One range: 40 bytes. */
typedef struct record {
    uint64_t start;       /* in units */
    uint64_t size;        /* in units */
    uint32_t below;       /* neighbour by place */
    uint32_t above;       /* neighbour by place */
    uint32_t list_before; /* FREE: in the class's list; EDGE: it is the first */
    uint32_t list_after;  /* FREE: in the class's list; EMPTY: the next record without a range; EDGE: none */
    uint32_t state;
    uint32_t pad;
} record;

struct msc__ranges {
    msc_context *ctx;
    msc__array records; /* of record; EDGE is always there */
    uint64_t capacity;  /* in units, like `taken` */
    uint64_t taken;
    uint32_t taken_count;
    uint32_t unit_shift;         /* log2 of the alignment */
    uint32_t empty_first;        /* records without a range */
    uint32_t summary;            /* bit w: words[w] is not 0 */
    uint64_t words[WORD_COUNT];  /* bit c: lists[c] is not EDGE */
    uint32_t lists[CLASS_COUNT]; /* first range of each class */
};

static record *at(const msc__ranges *ranges, uint32_t i)
{
    MSC__ASSERT(i < ranges->records.count);
    return (record *)ranges->records.items + i;
}

/* ---- lists by size ------------------------------------------------------------------------------ */

/* Below 32 units the class is the size; above, the position of the highest bit and the five bits behind it. */
static uint32_t class_of(uint64_t units)
{
    uint32_t high;

    if (units < CLASSES_PER_POWER)
        return (uint32_t)units;
    high = 63u - (uint32_t)__builtin_clzll(units);
    return ((high - CLASS_BITS + 1) << CLASS_BITS) +
           (uint32_t)((units >> (high - CLASS_BITS)) & (CLASSES_PER_POWER - 1));
}

static void list_insert(msc__ranges *ranges, uint32_t i)
{
    record *range = at(ranges, i);
    uint32_t class_index = class_of(range->size);
    uint32_t first = ranges->lists[class_index];

    MSC__ASSERT(i != EDGE && range->size > 0);
    range->state = FREE;
    range->list_before = EDGE;
    range->list_after = first;
    if (first != EDGE)
        at(ranges, first)->list_before = i;
    ranges->lists[class_index] = i;
    ranges->words[class_index / 64] |= UINT64_C(1) << (class_index % 64);
    ranges->summary |= UINT32_C(1) << (class_index / 64);
}

static void list_remove(msc__ranges *ranges, uint32_t i)
{
    const record *range = at(ranges, i);
    uint32_t class_index = class_of(range->size);

    MSC__ASSERT(i != EDGE && range->state == FREE);
    MSC__ASSERT(range->list_before != EDGE || ranges->lists[class_index] == i);
    if (range->list_after != EDGE)
        at(ranges, range->list_after)->list_before = range->list_before;
    if (range->list_before != EDGE) {
        at(ranges, range->list_before)->list_after = range->list_after;
        return;
    }
    ranges->lists[class_index] = range->list_after;
    if (range->list_after != EDGE)
        return;
    ranges->words[class_index / 64] &= ~(UINT64_C(1) << (class_index % 64));
    if (ranges->words[class_index / 64] == 0)
        ranges->summary &= ~(UINT32_C(1) << (class_index / 64));
}

/* The smallest of the first `most` ranges of a list that have at least `units`; EDGE: none. */
static uint32_t smallest_of(const msc__ranges *ranges, uint32_t i, uint64_t units, uint32_t most)
{
    uint32_t best = EDGE;

    for (; i != EDGE && most > 0; i = at(ranges, i)->list_after, most--) {
        uint64_t size = at(ranges, i)->size;
        if (size == units)
            return i;
        if (size > units && (best == EDGE || size < at(ranges, best)->size))
            best = i;
    }
    return best;
}

/* First range of the first class above `class_index` that has any; EDGE: none. */
static uint32_t first_above(const msc__ranges *ranges, uint32_t class_index)
{
    uint32_t word = (class_index + 1) / 64;
    uint64_t bits;
    uint32_t later;

    if (word == WORD_COUNT)
        return EDGE;
    bits = ranges->words[word] & (UINT64_MAX << ((class_index + 1) % 64));
    if (bits == 0) {
        later = ranges->summary & ~((UINT32_C(2) << word) - 1);
        if (later == 0)
            return EDGE;
        word = (uint32_t)__builtin_ctz(later);
        bits = ranges->words[word];
    }
    MSC__ASSERT(bits != 0);
    return ranges->lists[word * 64 + (uint32_t)__builtin_ctzll(bits)];
}

/* A free range of at least `units`, or EDGE. The essay's three steps. */
static uint32_t find(const msc__ranges *ranges, uint64_t units)
{
    uint32_t class_index = class_of(units);
    uint32_t own = ranges->lists[class_index];
    uint32_t found = smallest_of(ranges, own, units, LOOK_MOST);

    if (found == EDGE)
        found = first_above(ranges, class_index);
    if (found == EDGE)
        found = smallest_of(ranges, own, units, UINT32_MAX);
    MSC__ASSERT(found == EDGE || (at(ranges, found)->state == FREE && at(ranges, found)->size >= units));
    return found;
}

/* ---- records ------------------------------------------------------------------------------------ */

/* Makes sure that one more record can be had. */
static msc_status reserve_record(msc__ranges *ranges, msc_error *err)
{
    if (ranges->empty_first != EDGE)
        return MSC_OK;
    return msc__array_reserve(ranges->ctx, &ranges->records, sizeof(record), 1, err);
}

/* A new record above `below`. There must be room. */
static uint32_t add_record(msc__ranges *ranges, uint32_t below, uint64_t start, uint64_t size)
{
    uint32_t i = ranges->empty_first;
    uint32_t above = at(ranges, below)->above;

    MSC__ASSERT(size > 0 && at(ranges, below)->start + at(ranges, below)->size == start);
    MSC__ASSERT(i != EDGE || ranges->records.count < ranges->records.capacity); /* reserve_record */
    if (i != EDGE)
        ranges->empty_first = at(ranges, i)->list_after;
    else
        i = ranges->records.count++;
    *at(ranges, i) = (record){.start = start, .size = size, .below = below, .above = above, .state = TAKEN};
    at(ranges, below)->above = i;
    at(ranges, above)->below = i;
    return i;
}

/* Joins a range to its neighbour below; neither is in a list. Returns the neighbour. */
static uint32_t join(msc__ranges *ranges, uint32_t i)
{
    record *range = at(ranges, i);
    uint32_t below = range->below;

    MSC__ASSERT(below != EDGE && at(ranges, below)->start + at(ranges, below)->size == range->start);
    at(ranges, below)->size += range->size;
    at(ranges, below)->above = range->above;
    at(ranges, range->above)->below = below;
    range->state = EMPTY;
    range->list_after = ranges->empty_first;
    ranges->empty_first = i;
    return below;
}

/* Makes a range free that is in no list, joined with its free neighbours. */
static void release(msc__ranges *ranges, uint32_t i)
{
    uint32_t above = at(ranges, i)->above;
    uint32_t below = at(ranges, i)->below;

    MSC__ASSERT(i != EDGE && at(ranges, i)->state == TAKEN);
    if (at(ranges, above)->state == FREE) {
        list_remove(ranges, above);
        (void)join(ranges, above);
    }
    if (at(ranges, below)->state == FREE) {
        list_remove(ranges, below);
        i = join(ranges, i);
    }
    list_insert(ranges, i);
}

/* ---- what the header offers ---------------------------------------------------------------------- */

msc_status msc__ranges_create(msc_context *ctx, uint64_t capacity, uint64_t alignment, msc__ranges **out,
                              msc_error *err)
{
    msc__ranges *ranges;
    msc_status status;

    *out = NULL;
    if (alignment == 0 || (alignment & (alignment - 1)) != 0)
        return msc__fail(err, MSC_EINVAL, "alignment %llu is not a power of two",
                         (unsigned long long)alignment);
    ranges = msc__alloc(ctx, sizeof *ranges);
    if (ranges == NULL)
        return msc__fail_memory(err, "ranges", sizeof *ranges);
    ranges->ctx = ctx;
    ranges->unit_shift = (uint32_t)__builtin_ctzll(alignment);
    status = msc__array_push(ctx, &ranges->records, sizeof(record), &(record){.state = TAKEN}, err);
    if (status == MSC_OK && capacity > 0)
        status = msc__ranges_grow(ranges, capacity, err);
    if (status != MSC_OK) {
        msc__ranges_destroy(ranges);
        return status;
    }
    *out = ranges;
    return MSC_OK;
}

void msc__ranges_destroy(msc__ranges *ranges)
{
    if (ranges == NULL)
        return;
    msc__array_fini(ranges->ctx, &ranges->records, sizeof(record));
    msc__free(ranges->ctx, ranges, sizeof *ranges);
}

msc_status msc__ranges_grow(msc__ranges *ranges, uint64_t more, msc_error *err)
{
    uint64_t alignment = UINT64_C(1) << ranges->unit_shift;
    uint64_t units = more >> ranges->unit_shift;
    uint64_t bytes;
    msc_status status;

    if ((more & (alignment - 1)) != 0)
        return msc__fail(err, MSC_EINVAL, "%llu is not a multiple of the alignment %llu",
                         (unsigned long long)more, (unsigned long long)alignment);
    if (!msc__add_u64(ranges->capacity << ranges->unit_shift, more, &bytes))
        return msc__fail(err, MSC_EOVERFLOW, "a space of more than 2^64");
    if (more == 0)
        return MSC_OK;
    status = reserve_record(ranges, err);
    if (status != MSC_OK)
        return status;
    release(ranges, add_record(ranges, at(ranges, EDGE)->below, ranges->capacity, units));
    ranges->capacity += units;
    return MSC_OK;
}

msc_status msc__ranges_take(msc__ranges *ranges, uint64_t size, uint64_t *start, uint32_t *range,
                            msc_error *err)
{
    uint64_t alignment = UINT64_C(1) << ranges->unit_shift;
    uint64_t units = (size >> ranges->unit_shift) + ((size & (alignment - 1)) != 0);
    uint64_t rest;
    uint32_t found;
    msc_status status;

    if (size == 0)
        return msc__fail(err, MSC_EINVAL, "a range of size 0");
    found = find(ranges, units);
    if (found == EDGE)
        return MSC_EAGAIN;
    rest = at(ranges, found)->size - units;
    if (rest > 0) {
        status = reserve_record(ranges, err);
        if (status != MSC_OK)
            return status;
    }
    list_remove(ranges, found);
    at(ranges, found)->state = TAKEN;
    if (rest > 0) {
        at(ranges, found)->size = units;
        list_insert(ranges, add_record(ranges, found, at(ranges, found)->start + units, rest));
    }
    ranges->taken += units;
    ranges->taken_count++;
    MSC__ASSERT(at(ranges, found)->size == units && ranges->taken <= ranges->capacity);
    *start = at(ranges, found)->start << ranges->unit_shift;
    *range = found;
    return MSC_OK;
}

void msc__ranges_give(msc__ranges *ranges, uint32_t range)
{
    MSC__ASSERT(range != EDGE && at(ranges, range)->state == TAKEN);
    MSC__ASSERT(ranges->taken >= at(ranges, range)->size && ranges->taken_count > 0);
    ranges->taken -= at(ranges, range)->size;
    ranges->taken_count--;
    release(ranges, range);
}

uint64_t msc__ranges_size_of(const msc__ranges *ranges, uint32_t range)
{
    MSC__ASSERT(at(ranges, range)->state == TAKEN);
    return at(ranges, range)->size << ranges->unit_shift;
}

/* The largest lies in the highest class that has any; within it every range must be looked at. */
static uint64_t largest_units(const msc__ranges *ranges)
{
    uint64_t largest = 0;
    uint32_t word;
    uint32_t i;

    if (ranges->summary == 0)
        return 0;
    word = 31u - (uint32_t)__builtin_clz(ranges->summary);
    i = ranges->lists[word * 64 + 63u - (uint32_t)__builtin_clzll(ranges->words[word])];
    for (; i != EDGE; i = at(ranges, i)->list_after)
        if (at(ranges, i)->size > largest)
            largest = at(ranges, i)->size;
    return largest;
}

msc__ranges_use msc__ranges_in_use(const msc__ranges *ranges)
{
    return (msc__ranges_use){
        .capacity = ranges->capacity << ranges->unit_shift,
        .taken = ranges->taken << ranges->unit_shift,
        .largest = largest_units(ranges) << ranges->unit_shift,
        .count = ranges->taken_count,
    };
}

/* ---- invariants ---------------------------------------------------------------------------------- */

/* What the walk by place found, to be compared with the totals and the lists. */
typedef struct census {
    uint64_t units;
    uint64_t taken;
    uint32_t taken_count;
    uint32_t free_count;
} census;

static bool places_are_valid(const msc__ranges *ranges, census *seen)
{
    uint32_t below = EDGE;
    uint32_t i;

    for (i = at(ranges, EDGE)->above; i != EDGE; below = i, i = at(ranges, i)->above) {
        const record *range = at(ranges, i);
        if (range->start != seen->units || range->size == 0 || range->below != below)
            return false;
        if (range->state == EMPTY || (range->state == FREE && at(ranges, below)->state == FREE))
            return false;
        if (seen->free_count + seen->taken_count >= ranges->records.count)
            return false; /* the walk goes round in a circle that leaves out EDGE */
        seen->units += range->size;
        seen->taken += range->state == TAKEN ? range->size : 0;
        seen->taken_count += range->state == TAKEN;
        seen->free_count += range->state == FREE;
    }
    return at(ranges, EDGE)->below == below && at(ranges, EDGE)->state == TAKEN &&
           at(ranges, EDGE)->size == 0;
}

/* Walks one list; false, or adds its length to `*count`. */
static bool list_is_valid(const msc__ranges *ranges, uint32_t class_index, uint32_t *count)
{
    bool marked = (ranges->words[class_index / 64] >> (class_index % 64) & 1) != 0;
    uint32_t before = EDGE;
    uint32_t i;

    for (i = ranges->lists[class_index]; i != EDGE; before = i, i = at(ranges, i)->list_after) {
        const record *range = at(ranges, i);
        if (range->state != FREE || class_of(range->size) != class_index || range->list_before != before)
            return false;
        if (++*count > ranges->records.count)
            return false;
    }
    return marked == (before != EDGE);
}

int msc__ranges_valid(const msc__ranges *ranges)
{
    census seen = {0};
    uint32_t listed = 0;
    uint32_t empty = 0;
    uint32_t i;

    if (!places_are_valid(ranges, &seen))
        return 0;
    for (i = 0; i < CLASS_COUNT; i++)
        if (!list_is_valid(ranges, i, &listed))
            return 0;
    for (i = 0; i < WORD_COUNT; i++)
        if ((ranges->summary >> i & 1) != (ranges->words[i] != 0))
            return 0;
    for (i = ranges->empty_first; i != EDGE; i = at(ranges, i)->list_after)
        if (at(ranges, i)->state != EMPTY || ++empty > ranges->records.count)
            return 0;
    return seen.units == ranges->capacity && seen.taken == ranges->taken &&
           seen.taken_count == ranges->taken_count && seen.free_count == listed &&
           1 + seen.taken_count + seen.free_count + empty == ranges->records.count;
}
