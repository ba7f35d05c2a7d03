/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public face of the simulator: ids, the kind HOST, statistics.
 *
 *     ids    [id] -> 0                   not in use
 *                    slot of a block     allocated
 *                    NO_BLOCK            allocated, zero bytes
 *                    AWAITED | slot      freed, a stream still uses the block
 *                    AWAITED | NO_BLOCK  freed, the block is free already; waits for the caller to say so
 *     blocks [slot], see sim_blocks.c
 *
 * The kind HOST is that table alone: a block per live id, its exact size, and sums. The kind CUDA hands the
 * request to sim_pools.c and keeps the slot that comes back. A request of zero bytes takes an id but no
 * block, as PyTorch's null data pointer.
 *
 * A request that fails with ENOMEM changes nothing that can be seen: every table is grown before the first
 * change. Requests and frees touch a few cache lines; only growth allocates.
 */
#include "memscale/sim.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"
#include "sim/sim_pools.h"
#include "sim/sim_trace.h"

#define NO_BLOCK MSC__SIM_ID_NO_BLOCK
#define AWAITED MSC__SIM_ID_AWAITED
#define MOST_IDS 0x40000000u /* 2^30: the table would take 4 GiB */

struct msc_sim {
    msc_context *ctx;
    msc__sim_pools pools;
};

msc__sim_pools *msc__sim_pools_of(msc_sim *sim)
{
    return &sim->pools;
}

/* ---- life --------------------------------------------------------------------------------------- */

/* A number of bytes; UINT64_MAX: unknown. */
static void limit(uint64_t *bytes, uint64_t unknown)
{
    if (*bytes == UINT64_MAX || *bytes >= MSC__SIM_MOST_BYTES)
        *bytes = unknown;
}

msc_status msc_sim_create(msc_context *ctx, const msc_sim_options *options, msc_sim **out, msc_error *err)
{
    msc_sim_options used;
    msc_status status;
    msc_sim *sim;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "out is NULL");
    *out = NULL;
    if (ctx == NULL || options == NULL)
        return msc__fail(err, MSC_EINVAL, "%s is NULL", ctx == NULL ? "ctx" : "options");
    status = msc__sim_options_read("", options, &used, err);
    if (status != MSC_OK)
        return status;
    sim = msc__alloc(ctx, sizeof *sim);
    if (sim == NULL)
        return msc__fail_memory(err, "a simulator", sizeof *sim);
    sim->ctx = ctx;
    sim->pools.ctx = ctx;
    sim->pools.options = used;
    limit(&sim->pools.options.capacity_bytes, MSC__SIM_MOST_BYTES - 1);
    limit(&sim->pools.options.device_total_bytes, sim->pools.options.capacity_bytes);
    sim->pools.garbage_bytes = msc__sim_garbage_limit(&used);
    *out = sim;
    return MSC_OK;
}

void msc_sim_destroy(msc_sim *sim)
{
    if (sim == NULL)
        return;
    msc__sim_pools_fini(&sim->pools);
    msc__free(sim->ctx, sim, sizeof *sim);
}

void msc_sim_reset(msc_sim *sim)
{
    msc__sim_pools_clear(&sim->pools);
}

/* ---- HOST --------------------------------------------------------------------------------------- */

static msc_status alloc_host(msc__sim_pools *pools, uint32_t id, uint64_t size_bytes, uint32_t *slot,
                             msc_error *err)
{
    msc__sim_block *block;
    msc_status status;

    status = msc__sim_blocks_reserve(pools->ctx, &pools->blocks, (uint64_t)pools->blocks.used_count + 1, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(msc__sim_reserved(pools) <= pools->options.capacity_bytes);
    if (size_bytes > pools->options.capacity_bytes - msc__sim_reserved(pools))
        return msc__sim_pools_fail(pools, size_bytes, size_bytes, err);
    *slot = msc__sim_blocks_take(&pools->blocks);
    block = msc__sim_block_at(&pools->blocks, *slot);
    block->size_bytes = size_bytes;
    block->tag = id;
    block->use.requested_bytes = size_bytes;
    block->state = MSC__SIM_ALLOCATED;
    pools->active_count++;
    msc__sim_count_allocated(&pools->counters, MSC__SIM_LARGE, size_bytes, size_bytes);
    msc__sim_count_up(&pools->counters, MSC__SIM_LARGE, MSC__SIM_RESERVED_BYTES, size_bytes);
    return MSC_OK;
}

static void free_host(msc__sim_pools *pools, uint32_t slot)
{
    uint64_t size_bytes = msc__sim_block_at(&pools->blocks, slot)->size_bytes;

    MSC__ASSERT(pools->active_count > 0);
    pools->active_count--;
    msc__sim_count_requested(&pools->counters, MSC__SIM_LARGE, size_bytes);
    msc__sim_count_completed(&pools->counters, MSC__SIM_LARGE, size_bytes, size_bytes);
    msc__sim_count_down(&pools->counters, MSC__SIM_LARGE, MSC__SIM_RESERVED_BYTES, size_bytes);
    msc__sim_blocks_give(&pools->blocks, slot);
}

static bool is_host(const msc_sim *sim)
{
    return sim->pools.options.kind == MSC_SIM_HOST;
}

/* ---- checks after each event --------------------------------------------------------------------- */

/*
 * With MSC_SIM_CHECKED, which debug builds define, every call that changes a simulator ends with a check of
 * the whole. It costs a walk over all blocks and ids, so large simulators are checked at every 256th call.
 */
#ifdef MSC_SIM_CHECKED
#define CHECKED_RECORDS 256u

static msc_status checked(const msc_sim *sim, msc_status status, msc_error *err)
{
    const msc__sim_pools *pools = &sim->pools;

    if (pools->blocks.slots.count + pools->ids.count > CHECKED_RECORDS && pools->call_count % 256 != 0)
        return status;
    if (msc_sim_validate(sim, err) != MSC_OK)
        return MSC_EINTERNAL;
    return status;
}
#else
static inline msc_status checked(const msc_sim *sim, msc_status status, const msc_error *err)
{
    (void)sim;
    (void)err;
    return status;
}
#endif

/* ---- requests ----------------------------------------------------------------------------------- */

static uint32_t *id_at(const msc_sim *sim, uint32_t id)
{
    return (uint32_t *)sim->pools.ids.items + id;
}

bool msc__sim_has(const msc_sim *sim, uint32_t id)
{
    return id < sim->pools.ids.count && *id_at(sim, id) != 0;
}

uint64_t msc__sim_reserved_now(const msc_sim *sim)
{
    return msc__sim_reserved(&sim->pools);
}

bool msc__sim_is_caching(const msc_sim *sim)
{
    return !is_host(sim);
}

/* Makes the table cover `id`. New entries are 0. */
msc_status msc__sim_cover_id(msc_sim *sim, uint32_t id, msc_error *err)
{
    msc__array *ids = &sim->pools.ids;
    uint32_t count = ids->count;
    msc_status status;

    if (id < count)
        return MSC_OK;
    MSC__ASSERT(id < NO_BLOCK); /* entries name slots, and both have marks above them */
    status = msc__array_reserve(sim->ctx, ids, sizeof(uint32_t), id + 1 - count, err);
    if (status != MSC_OK)
        return status;
    memset(id_at(sim, count), 0, (id + 1 - count) * sizeof(uint32_t));
    ids->count = id + 1;
    return MSC_OK;
}

msc_status msc_sim_alloc_in(msc_sim *sim, uint32_t id, uint64_t size_bytes, const msc_sim_place *place,
                            msc_error *err)
{
    uint32_t slot = NO_BLOCK;
    msc_status status;

    if (place == NULL)
        return msc__fail(err, MSC_EINVAL, "place is NULL");
    if (id >= MOST_IDS)
        return msc__fail(err, MSC_EINVAL, "id %" PRIu32 " is too large, must be below %u", id, MOST_IDS);
    if (msc__sim_has(sim, id))
        return msc__fail(err, MSC_EINVAL, "id %" PRIu32 " is in use", id);
    status = msc__sim_cover_id(sim, id, err);
    if (status != MSC_OK)
        return status;
    sim->pools.call_count++;
    if (size_bytes != 0) {
        if (is_host(sim))
            status = alloc_host(&sim->pools, id, size_bytes, &slot, err);
        else
            status = msc__sim_pools_alloc(&sim->pools, id, size_bytes, place, &slot, err);
    }
    MSC__ASSERT(status != MSC_OK || (slot == NO_BLOCK) == (size_bytes == 0));
    if (status == MSC_OK)
        *id_at(sim, id) = slot;
    return checked(sim, status, err);
}

msc_status msc_sim_alloc(msc_sim *sim, uint32_t id, uint64_t size_bytes, uint32_t stream, msc_error *err)
{
    const msc_sim_place place = {stream, 0};

    return msc_sim_alloc_in(sim, id, size_bytes, &place, err);
}

/* Looks up an id that is allocated, or freed and awaited. */
static msc_status find_id(const msc_sim *sim, uint32_t id, bool awaited, uint32_t *slot, msc_error *err)
{
    uint32_t entry = id < sim->pools.ids.count ? *id_at(sim, id) : 0;

    if (entry == 0)
        return msc__fail(err, MSC_EINVAL, "id %" PRIu32 " is not in use", id);
    if (((entry & AWAITED) != 0) != awaited)
        return msc__fail(err, MSC_EINVAL, "id %" PRIu32 " %s", id,
                         awaited ? "has not been freed" : "has been freed and awaits its completion");
    *slot = entry & ~AWAITED;
    MSC__ASSERT(*slot == NO_BLOCK || msc__sim_block_at(&sim->pools.blocks, *slot)->tag == id);
    return MSC_OK;
}

msc_status msc_sim_free(msc_sim *sim, uint32_t id, msc_error *err)
{
    uint32_t slot = NO_BLOCK;
    msc_status status = find_id(sim, id, false, &slot, err);

    if (status != MSC_OK)
        return status;
    sim->pools.call_count++;
    *id_at(sim, id) = 0;
    if (slot != NO_BLOCK) {
        if (is_host(sim))
            free_host(&sim->pools, slot);
        else
            msc__sim_pools_free(&sim->pools, slot);
    }
    return checked(sim, MSC_OK, err);
}

msc_status msc_sim_free_request(msc_sim *sim, uint32_t id, msc_error *err)
{
    uint32_t slot = NO_BLOCK;
    msc_status status = find_id(sim, id, false, &slot, err);

    if (status != MSC_OK)
        return status;
    if (slot != NO_BLOCK && is_host(sim)) {
        free_host(&sim->pools, slot);
        slot = NO_BLOCK;
    } else if (slot != NO_BLOCK) {
        status = msc__sim_pools_request(&sim->pools, slot, err);
        if (status != MSC_OK)
            return status;
    }
    sim->pools.call_count++;
    *id_at(sim, id) = AWAITED | slot;
    return checked(sim, MSC_OK, err);
}

msc_status msc_sim_free_complete(msc_sim *sim, uint32_t id, msc_error *err)
{
    uint32_t slot = NO_BLOCK;
    msc_status status = find_id(sim, id, true, &slot, err);

    if (status != MSC_OK)
        return status;
    sim->pools.call_count++;
    *id_at(sim, id) = 0;
    if (slot != NO_BLOCK)
        msc__sim_pools_complete(&sim->pools, slot);
    return checked(sim, MSC_OK, err);
}

/* ---- the cache ---------------------------------------------------------------------------------- */

void msc_sim_empty_cache(msc_sim *sim)
{
    sim->pools.call_count++;
    if (!is_host(sim))
        msc__sim_pools_release_cached(&sim->pools);
    (void)checked(sim, MSC_OK, NULL);
}

msc_status msc_sim_release_pool(msc_sim *sim, uint32_t pool, msc_error *err)
{
    if (pool == 0)
        return msc__fail(err, MSC_EINVAL, "pool 0, the default pool, cannot be released");
    msc__sim_places_mark(&sim->pools, pool, true);
    return MSC_OK;
}

void msc_sim_set_capturing(msc_sim *sim, int capturing)
{
    sim->pools.capturing = capturing != 0;
}

msc_status msc_sim_place_next_segment(msc_sim *sim, uint64_t address, msc_error *err)
{
    if (is_host(sim))
        return msc__fail(err, MSC_EINVAL, "kind HOST has no segments to place");
    if (address % MSC__SIM_GRANULE_BYTES != 0)
        return msc__fail(err, MSC_EINVAL, "address %" PRIu64 " is not a multiple of %u", address,
                         MSC__SIM_GRANULE_BYTES);
    sim->pools.placed_address = address;
    return MSC_OK;
}

/* ---- reading ------------------------------------------------------------------------------------ */

void msc_sim_reset_peaks(msc_sim *sim)
{
    msc__sim_counters_reset_peaks(&sim->pools.counters);
}

void msc_sim_reset_accumulated(msc_sim *sim)
{
    msc__sim_counters_reset_accumulated(&sim->pools.counters);
}

msc_sim_stats msc_sim_get_stats(const msc_sim *sim)
{
    return msc__sim_counters_summary(&sim->pools.counters);
}

void msc_sim_memory_stats_read(const msc_sim *sim, msc_sim_memory_stats *out, size_t out_bytes)
{
    msc_sim_memory_stats stats;

    msc__sim_counters_read(&sim->pools.counters, &stats);
    stats.max_split_size = sim->pools.options.max_split_bytes;
    msc__sized_copy(out, out_bytes, &stats, sizeof stats);
}

const msc_sim_segment_event *msc_sim_segment_events(const msc_sim *sim, uint64_t *count)
{
    *count = sim->pools.events.count;
    return sim->pools.events.items;
}

msc_status msc_sim_map_create(const msc_sim *sim, msc_sim_map **out, msc_error *err)
{
    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "out is NULL");
    *out = NULL;
    return msc__sim_map_make(&sim->pools, out, err);
}

/* ---- checks ------------------------------------------------------------------------------------- */

static msc_status validate_id(const msc_sim *sim, uint32_t id, msc_error *err)
{
    const msc__sim_blocks *blocks = &sim->pools.blocks;
    uint32_t entry = *id_at(sim, id);
    uint32_t slot = entry & ~AWAITED;
    msc__sim_state state = (entry & AWAITED) != 0 ? MSC__SIM_AWAITING : MSC__SIM_ALLOCATED;
    const msc__sim_block *block;

    if (slot == 0 || slot >= blocks->slots.count)
        return msc__fail(err, MSC_EINTERNAL, "id %" PRIu32 " names slot %" PRIu32 ", which is none", id,
                         slot);
    block = msc__sim_block_at(blocks, slot);
    if (block->state != state || block->tag != id)
        return msc__fail(err, MSC_EINTERNAL, "id %" PRIu32 " names slot %" PRIu32 " of id %" PRIu32, id, slot,
                         block->tag);
    return MSC_OK;
}

/* Every id names a block that names it; with as many ids as active blocks, that is one to one. */
static msc_status validate_ids(const msc_sim *sim, msc_error *err)
{
    uint32_t active = 0;
    uint32_t id;

    for (id = 0; id < sim->pools.ids.count; id++) {
        uint32_t entry = *id_at(sim, id);
        msc_status status;
        if (entry == 0 || (entry & ~AWAITED) == NO_BLOCK)
            continue;
        status = validate_id(sim, id, err);
        if (status != MSC_OK)
            return status;
        active++;
    }
    if (active != sim->pools.active_count)
        return msc__fail(err, MSC_EINTERNAL, "%" PRIu32 " ids for %" PRIu32 " active blocks", active,
                         sim->pools.active_count);
    return MSC_OK;
}

msc_status msc_sim_validate(const msc_sim *sim, msc_error *err)
{
    msc_status status = msc__sim_pools_validate(&sim->pools, err);

    return status == MSC_OK ? validate_ids(sim, err) : status;
}
