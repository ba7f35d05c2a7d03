/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Places: the free sets of each stream in each pool.
 *
 *     places   [0] stream 0, pool 0   [1] stream 7, pool 0   [2] stream 0, pool 3   [3] stream 2, pool 0
 *     order    0 3 1 2                                       by pool, then stream
 *
 * Records stay where they are, because blocks name them by index. The order is kept beside them: releases
 * go through the cache pool by pool and stream by stream, and looking a place up is a binary search. A
 * program has a handful of places and changes seldom, so the last one is remembered.
 *
 * PyTorch keeps one set per pool, ordered by stream first. Sets of one stream each say the same.
 */
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "sim/sim_pools.h"

/* Position of the first place in `order` that is not below (pool, stream). */
static uint32_t find_place(const msc__sim_pools *pools, uint32_t pool, uint32_t stream)
{
    uint32_t low = 0;
    uint32_t high = pools->order.count;

    MSC__ASSERT(pools->order.count == pools->places.count);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const msc__sim_place *place = msc__sim_place_at(pools, msc__sim_places_by_order(pools, middle));
        if (place->pool < pool || (place->pool == pool && place->stream < stream))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whether a pool has been released. */
static bool is_released(const msc__sim_pools *pools, uint32_t pool)
{
    uint32_t first = find_place(pools, pool, 0);
    const msc__sim_place *place;

    if (first >= pools->order.count)
        return false;
    place = msc__sim_place_at(pools, msc__sim_places_by_order(pools, first));
    return place->pool == pool && place->released;
}

static msc_status add_place(msc__sim_pools *pools, uint32_t position, const msc_sim_place *wanted,
                            msc_error *err)
{
    msc__sim_place added = {.stream = wanted->stream, .pool = wanted->pool};
    bool released = is_released(pools, wanted->pool);
    uint32_t *order;
    msc_status status;

    status = msc__array_reserve(pools->ctx, &pools->places, sizeof added, 1, err);
    if (status == MSC_OK)
        status = msc__array_reserve(pools->ctx, &pools->order, sizeof *order, 1, err);
    if (status != MSC_OK)
        return status;
    added.sets = msc__alloc(pools->ctx, 2 * sizeof *added.sets);
    if (added.sets == NULL)
        return msc__fail_memory(err, "the free sets of a stream", 2 * sizeof *added.sets);
    added.released = released;
    order = pools->order.items;
    MSC__ASSERT(position <= pools->order.count);
    memmove(order + position + 1, order + position, (pools->order.count - position) * sizeof *order);
    order[position] = pools->places.count;
    pools->order.count++;
    pools->last_place = pools->places.count;
    return msc__array_push(pools->ctx, &pools->places, sizeof added, &added, err);
}

void msc__sim_places_mark(msc__sim_pools *pools, uint32_t pool, bool released)
{
    uint32_t i;

    MSC__ASSERT(pool != 0 || !released); /* the default pool stays */
    for (i = find_place(pools, pool, 0); i < pools->order.count; i++) {
        msc__sim_place *place = msc__sim_place_at(pools, msc__sim_places_by_order(pools, i));
        if (place->pool != pool)
            break;
        place->released = released;
    }
}

msc_status msc__sim_places_select(msc__sim_pools *pools, const msc_sim_place *wanted, msc_error *err)
{
    const msc__sim_place *place;
    uint32_t position;

    if (pools->last_place < pools->places.count) {
        place = msc__sim_place_at(pools, pools->last_place);
        if (place->stream == wanted->stream && place->pool == wanted->pool)
            return MSC_OK;
    }
    position = find_place(pools, wanted->pool, wanted->stream);
    if (position < pools->order.count) {
        uint32_t index = msc__sim_places_by_order(pools, position);
        place = msc__sim_place_at(pools, index);
        if (place->stream == wanted->stream && place->pool == wanted->pool) {
            pools->last_place = index;
            return MSC_OK;
        }
    }
    return add_place(pools, position, wanted, err);
}
