/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The frontier: plans that no other plan equals or beats in both peak and time.
 *
 *      added time    0      40     90     120          an offer at 90 with a peak below 25 replaces that
 *      peak         100     60     30      25          plan and every later one whose peak is not lower
 *
 * Plans lie sorted by added time, so an offer is one binary search, and nearly all offers end there. A plan's
 * set is a row of bits in a shared pool; rows of plans that left are used again. Of plans that are equal in
 * both, the one whose list of candidates comes first stays, so the result does not depend on the order of
 * offers.
 */
#include "decide/decide_frontier.h"

#include <stdbool.h>
#include <string.h>

#include "base/invariant.h"
#include "base/search.h"

void msc__frontier_init(msc__frontier *frontier, msc_context *ctx, uint32_t candidate_count)
{
    *frontier = (msc__frontier){.ctx = ctx, .word_count = candidate_count / 64 + 1};
}

void msc__frontier_fini(msc__frontier *frontier)
{
    if (frontier->ctx == NULL)
        return;
    msc__array_fini(frontier->ctx, &frontier->plans, sizeof(msc__frontier_plan));
    msc__array_fini(frontier->ctx, &frontier->sets, sizeof(uint64_t));
    msc__array_fini(frontier->ctx, &frontier->free_sets, sizeof(uint32_t));
}

/* First plan that takes at least this long. */
static uint32_t find_place(const msc__frontier *frontier, int64_t added_ns)
{
    return MSC__LOWER_BOUND(msc__frontier_plan, added_ns, frontier->plans.items, frontier->plans.count,
                            added_ns);
}

/* Whether the candidates of `set` come first where the two differ first. */
static bool comes_first(const uint64_t *set, const uint64_t *other, uint32_t word_count)
{
    uint32_t i;

    for (i = 0; i < word_count; i++) {
        uint64_t differ = set[i] ^ other[i];
        if (differ != 0)
            return (set[i] & differ & (~differ + 1)) != 0;
    }
    return false;
}

static bool is_beaten(const msc__frontier *frontier, uint32_t place, const msc__frontier_plan *offer,
                      const uint64_t *set)
{
    const msc__frontier_plan *plans = msc__frontier_plans(frontier);

    if (place > 0 && plans[place - 1].peak_bytes <= offer->peak_bytes)
        return true;
    if (place == frontier->plans.count || plans[place].added_ns != offer->added_ns ||
        plans[place].peak_bytes > offer->peak_bytes)
        return false;
    return plans[place].peak_bytes < offer->peak_bytes ||
           !comes_first(set, msc__frontier_set(frontier, place), frontier->word_count);
}

/* A row for a set: a free one, or a new one. Makes room for all that a change of the plans may push. */
static msc_status take_set(msc__frontier *frontier, uint32_t *row, msc_error *err)
{
    uint32_t rows = frontier->sets.count / frontier->word_count + 1;
    msc_status status =
        msc__array_reserve(frontier->ctx, &frontier->plans, sizeof(msc__frontier_plan), 1, err);

    MSC__ASSERT(rows > frontier->free_sets.count && frontier->sets.count % frontier->word_count == 0);
    if (status == MSC_OK)
        status = msc__array_reserve(frontier->ctx, &frontier->free_sets, sizeof(uint32_t),
                                    rows - frontier->free_sets.count, err);
    if (status != MSC_OK)
        return status;
    if (frontier->free_sets.count > 0) {
        *row = ((const uint32_t *)frontier->free_sets.items)[--frontier->free_sets.count];
        return MSC_OK;
    }
    status = msc__array_reserve(frontier->ctx, &frontier->sets, sizeof(uint64_t), frontier->word_count, err);
    if (status != MSC_OK)
        return status;
    *row = frontier->sets.count / frontier->word_count;
    frontier->sets.count += frontier->word_count;
    return MSC_OK;
}

/* Room was made by take_set. */
static void give_back_set(msc__frontier *frontier, uint32_t row)
{
    MSC__ASSERT(frontier->free_sets.count < frontier->free_sets.capacity);
    MSC__ASSERT(row < frontier->sets.count / frontier->word_count);
    ((uint32_t *)frontier->free_sets.items)[frontier->free_sets.count++] = row;
}

/* Replaces plans place … end - 1 by one. */
static void splice(msc__frontier *frontier, uint32_t place, uint32_t end, const msc__frontier_plan *offer)
{
    msc__frontier_plan *plans = frontier->plans.items;
    uint32_t i;

    MSC__ASSERT(place <= end && end <= frontier->plans.count &&
                frontier->plans.count < frontier->plans.capacity);
    for (i = place; i < end; i++)
        give_back_set(frontier, plans[i].set);
    memmove(plans + place + 1, plans + end, (frontier->plans.count - end) * sizeof *plans);
    plans[place] = *offer;
    frontier->plans.count = frontier->plans.count - (end - place) + 1;
    MSC__ASSERT(place == 0 || plans[place - 1].added_ns <= offer->added_ns);
    MSC__ASSERT(place + 1 == frontier->plans.count || plans[place + 1].added_ns >= offer->added_ns);
}

msc_status msc__frontier_offer(msc__frontier *frontier, uint64_t peak_bytes, int64_t added_ns,
                               const uint64_t *set, msc_error *err)
{
    msc__frontier_plan offer = {.peak_bytes = peak_bytes, .added_ns = added_ns};
    uint32_t place = find_place(frontier, added_ns);
    uint32_t end = place;
    msc_status status;

    MSC__ASSERT(added_ns >= 0);
    if (is_beaten(frontier, place, &offer, set))
        return MSC_OK;
    status = take_set(frontier, &offer.set, err);
    if (status != MSC_OK)
        return status;
    memcpy((uint64_t *)frontier->sets.items + (size_t)offer.set * frontier->word_count, set,
           frontier->word_count * sizeof *set);
    while (end < frontier->plans.count && msc__frontier_plans(frontier)[end].peak_bytes >= peak_bytes)
        end++;
    MSC__ASSERT(place == 0 || msc__frontier_plans(frontier)[place - 1].peak_bytes > peak_bytes);
    splice(frontier, place, end, &offer);
    MSC__ASSERT(place + 1 == frontier->plans.count ||
                msc__frontier_plans(frontier)[place + 1].peak_bytes < peak_bytes);
    return MSC_OK;
}

msc_status msc__frontier_insert(msc__frontier *frontier, const msc__frontier_plan *plan, const uint64_t *set,
                                msc_error *err)
{
    msc__frontier_plan entry = *plan;
    uint32_t place = find_place(frontier, plan->added_ns);
    msc_status status = take_set(frontier, &entry.set, err);

    if (status != MSC_OK)
        return status;
    memcpy((uint64_t *)frontier->sets.items + (size_t)entry.set * frontier->word_count, set,
           frontier->word_count * sizeof *set);
    while (place < frontier->plans.count && msc__frontier_plans(frontier)[place].added_ns == plan->added_ns)
        place++;
    splice(frontier, place, place, &entry);
    return MSC_OK;
}

void msc__frontier_clear(msc__frontier *frontier)
{
    frontier->plans.count = 0;
    frontier->sets.count = 0;
    frontier->free_sets.count = 0;
}

/* For each of `most` peaks, evenly spaced from the highest to the lowest, the fastest plan below it. */
void msc__frontier_thin(msc__frontier *frontier, uint32_t most)
{
    msc__frontier_plan *plans = frontier->plans.items;
    uint32_t count = frontier->plans.count;
    uint64_t highest;
    uint64_t lowest;
    uint32_t kept = 0;
    uint32_t i = 0;
    uint32_t k;

    if (count <= most || most < 2)
        return;
    highest = plans[0].peak_bytes;
    lowest = plans[count - 1].peak_bytes;
    MSC__ASSERT(highest >= lowest);
    for (k = 0; k < most && i < count; k++) {
        uint64_t level = highest - (highest - lowest) / (most - 1) * k;
        if (k == most - 1)
            level = lowest;
        for (; plans[i].peak_bytes > level; i++)
            if (plans[kept - 1].set != plans[i].set)
                give_back_set(frontier, plans[i].set);
        MSC__ASSERT(i < count && plans[i].peak_bytes <= level);
        if (kept == 0 || plans[kept - 1].set != plans[i].set)
            plans[kept++] = plans[i];
    }
    MSC__ASSERT(kept > 0 && kept <= most && plans[kept - 1].peak_bytes == lowest);
    frontier->plans.count = kept;
}
