/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory back to the device, in the order in which PyTorch gives it.
 *
 *     a request that the device refuses          what goes back
 *     ─ before asking, above the threshold       old unsplit segments of the default large pool
 *     ─ max_split_bytes finite                   oversize blocks of the request's own stream and pool
 *     ─ as a last resort, and in empty_cache     everything unsplit, after waiting for all streams
 *
 * A walk through a free set takes the key of the block at hand before it releases it: what releasing cuts
 * off is smaller and so lies behind the walk. Streams go in ascending order, in each of them blocks by size
 * and address; the default pool's large blocks before its small ones, those of released private pools the
 * other way round. None of this changes how much goes back, but it is the order of the segment events.
 *
 * PyTorch waits for streams in the order of a hash table. Here blocks complete in the order of their
 * requests, which is the same while one stream is waited for.
 */
#include "sim/sim_pools.h"

#include "base/invariant.h"

static bool is_unsplit(const msc__sim_block *block)
{
    return block->prev == 0 && block->next == 0;
}

/* Gives an unsplit free block of a segment of fixed size back to the device. */
static void release_segment(msc__sim_pools *pools, uint32_t slot)
{
    const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
    uint64_t bytes = block->size_bytes;

    MSC__ASSERT(block->state == MSC__SIM_FREE && is_unsplit(block));
    msc__sim_set_erase(&pools->blocks, msc__sim_set_at(pools, block->set_index), slot);
    msc__sim_count_segment(pools, MSC_SIM_SEGMENT_FREE, block->set_index, block->address, bytes);
    msc__sim_pools_forget_segment(pools);
    msc__sim_blocks_give(&pools->blocks, slot);
}

/* ---- oversize blocks ---------------------------------------------------------------------------- */

bool msc__sim_release_oversize(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    msc__sim_set *set = msc__sim_set_at(pools, set_index);
    uint64_t limit = pools->options.max_split_bytes;
    uint64_t wanted = rounded_bytes < limit ? limit : rounded_bytes;
    uint64_t released = 0;
    uint32_t slot;

    if (limit == UINT64_MAX || pools->options.expandable_segments)
        return false; /* blocks of expandable segments are passed over, and there are no others */
    MSC__ASSERT(limit >= pools->options.large_segment_bytes);
    slot = wanted < MSC__SIM_MOST_BYTES ? msc__sim_set_lower_bound(&pools->blocks, set, wanted, 0) : 0;
    if (slot != 0) {
        release_segment(pools, slot);
        return true;
    }
    while (released < wanted) {
        slot = msc__sim_set_largest(&pools->blocks, set);
        if (slot == 0 || msc__sim_block_at(&pools->blocks, slot)->size_bytes < limit)
            return false;
        released += msc__sim_block_at(&pools->blocks, slot)->size_bytes;
        release_segment(pools, slot);
    }
    return true;
}

/* ---- garbage ------------------------------------------------------------------------------------ */

/* Unsplit blocks of the default large pool and their ages: searches since they became free. */
typedef struct garbage {
    uint64_t age;
    uint64_t count;
    uint64_t released_bytes;
} garbage;

static uint32_t age_of(const msc__sim_pools *pools, const msc__sim_block *block)
{
    return pools->search_count - block->tag;
}

/* Visits them all: adds them up, or releases those of at least `least_age`, when that is not negative. */
static bool visit_garbage(msc__sim_pools *pools, garbage *sum, double least_age)
{
    bool found = false;
    uint32_t i;

    for (i = 0; i < pools->order.count; i++) {
        uint32_t place = msc__sim_places_by_order(pools, i);
        const msc__sim_set *set = msc__sim_set_at(pools, 2 * place + MSC__SIM_LARGE);
        msc__sim_key key;
        uint32_t slot;
        if (msc__sim_place_at(pools, place)->pool != 0)
            break;
        slot = msc__sim_set_lower_bound(&pools->blocks, set, 0, 0);
        for (; slot != 0; slot = msc__sim_set_after(&pools->blocks, set, &key)) {
            const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
            key = msc__sim_key_of(&pools->blocks, slot);
            if (!is_unsplit(block))
                continue;
            if (least_age < 0) {
                sum->age += age_of(pools, block);
                sum->count++;
            } else if ((double)age_of(pools, block) >= least_age) {
                MSC__ASSERT(sum->count > 0 && sum->age >= age_of(pools, block));
                sum->age -= age_of(pools, block);
                sum->count--;
                sum->released_bytes += block->size_bytes;
                release_segment(pools, slot);
                found = true;
            }
        }
    }
    return found;
}

/* What reaches the mean age goes, until enough has gone; each round to its end, as in PyTorch. */
void msc__sim_collect_garbage(msc__sim_pools *pools)
{
    garbage sum = {0};
    uint64_t wanted;

    if (pools->garbage_bytes == 0 || msc__sim_reserved(pools) <= pools->garbage_bytes ||
        pools->options.expandable_segments)
        return; /* blocks of expandable segments are not garbage */
    wanted = msc__sim_reserved(pools) - pools->garbage_bytes;
    MSC__ASSERT(wanted > 0);
    (void)visit_garbage(pools, &sum, -1);
    while (sum.released_bytes < wanted && sum.count > 0)
        if (!visit_garbage(pools, &sum, (double)sum.age / (double)sum.count))
            return;
}

/* ---- the whole cache ---------------------------------------------------------------------------- */

/* As synchronize_and_free_events: no block awaits a stream after it. */
static void complete_awaiting(msc__sim_pools *pools)
{
    const uint32_t *slots = pools->awaiting.items;
    uint32_t *ids = pools->ids.items;
    uint32_t count = pools->awaiting.count;
    uint32_t i;

    pools->counters.sync_count++;
    pools->awaiting.count = 0;
    for (i = 0; i < count; i++) {
        MSC__ASSERT(ids[msc__sim_block_at(&pools->blocks, slots[i])->tag] ==
                    (MSC__SIM_ID_AWAITED | slots[i]));
        ids[msc__sim_block_at(&pools->blocks, slots[i])->tag] = MSC__SIM_ID_AWAITED | MSC__SIM_ID_NO_BLOCK;
        msc__sim_pools_free_active(pools, slots[i]);
    }
}

static void release_set(msc__sim_pools *pools, uint32_t set_index)
{
    const msc__sim_set *set = msc__sim_set_at(pools, set_index);
    uint32_t slot = msc__sim_set_lower_bound(&pools->blocks, set, 0, 0);

    while (slot != 0) {
        msc__sim_key key = msc__sim_key_of(&pools->blocks, slot);
        if (pools->options.expandable_segments)
            msc__sim_expandable_unmap(pools, slot);
        else if (is_unsplit(msc__sim_block_at(&pools->blocks, slot)))
            release_segment(pools, slot);
        slot = msc__sim_set_after(&pools->blocks, set, &key);
    }
}

/* Releases the sets of one sort of the places at begin … end - 1 of the order. */
static void release_places(msc__sim_pools *pools, uint32_t begin, uint32_t end, uint32_t sort)
{
    for (; begin < end; begin++)
        release_set(pools, 2 * msc__sim_places_by_order(pools, begin) + sort);
}

/* End of the places of the pool that begins at `begin` of the order. */
static uint32_t pool_end(const msc__sim_pools *pools, uint32_t begin)
{
    uint32_t pool = msc__sim_place_at(pools, msc__sim_places_by_order(pools, begin))->pool;

    while (begin < pools->order.count &&
           msc__sim_place_at(pools, msc__sim_places_by_order(pools, begin))->pool == pool)
        begin++;
    return begin;
}

void msc__sim_pools_release_cached(msc__sim_pools *pools)
{
    uint32_t begin;
    uint32_t end;

    if (!pools->capturing)
        complete_awaiting(pools);
    for (begin = 0; begin < pools->order.count; begin = end) {
        const msc__sim_place *place = msc__sim_place_at(pools, msc__sim_places_by_order(pools, begin));
        end = pool_end(pools, begin);
        MSC__ASSERT(end > begin && (!place->released || place->pool != 0));
        if (place->pool == 0 && !pools->capturing) {
            release_places(pools, begin, end, MSC__SIM_LARGE);
            release_places(pools, begin, end, MSC__SIM_SMALL);
        } else if (place->pool != 0 && place->released) {
            release_places(pools, begin, end, MSC__SIM_SMALL);
            release_places(pools, begin, end, MSC__SIM_LARGE);
        }
    }
}
