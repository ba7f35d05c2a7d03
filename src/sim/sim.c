/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public face of the simulator: ids, the kind HOST, statistics.
 *
 *     ids    [id] -> 0 (not in use) | ZERO_SIZE | slot of a block
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
#include "sim/sim_pools.h"

#define ZERO_SIZE UINT32_MAX
#define MOST_IDS 0x40000000u /* 2^30: the table would take 4 GiB, and slots stay far from ZERO_SIZE */

struct msc_sim {
    msc_context *ctx;
    msc__array ids; /* of uint32_t; count: one more than the highest id used */
    msc__sim_pools pools;
};

/* ---- options ------------------------------------------------------------------------------------ */

msc_sim_options msc_sim_options_default(msc_sim_kind kind)
{
    msc_sim_options options;

    memset(&options, 0, sizeof options);
    options.struct_bytes = sizeof options;
    options.kind = kind;
    options.capacity_bytes = UINT64_MAX;
    options.max_split_bytes = UINT64_MAX;
    options.max_non_split_rounding_bytes = 20 * MSC__SIM_MIB;
    options.large_segment_bytes = 20 * MSC__SIM_MIB;
    return options;
}

/* A smaller large segment could not hold every request that is put into one; PyTorch sets it in MiB. */
static msc_status check_sizes(const msc_sim_options *options, msc_error *err)
{
    uint64_t segment = options->large_segment_bytes;

    if (segment < MSC__SIM_OWN_SEGMENT_BYTES || segment % MSC__SIM_MIB != 0 ||
        segment >= MSC__SIM_MOST_BYTES / 2)
        return msc__fail(err, MSC_EINVAL,
                         "large_segment_bytes is %" PRIu64 ", must be a multiple of 1 MiB from 10 MiB on",
                         segment);
    if (options->max_split_bytes < segment)
        return msc__fail(err, MSC_EINVAL,
                         "max_split_bytes is %" PRIu64 ", must be at least large_segment_bytes, %" PRIu64,
                         options->max_split_bytes, segment);
    return MSC_OK;
}

static msc_status check_options(const msc_sim_options *options, msc_error *err)
{
    uint32_t divisions = options->roundup_power2_divisions;

    if (options->struct_bytes != sizeof *options)
        return msc__fail(err, MSC_EINVAL, "struct_bytes is %zu, this library knows %zu",
                         options->struct_bytes, sizeof *options);
    if ((uint32_t)options->kind >= MSC_SIM_KIND_COUNT)
        return msc__fail(err, MSC_EINVAL, "kind is %u, must be below %u", (unsigned)options->kind,
                         (unsigned)MSC_SIM_KIND_COUNT);
    if ((divisions & (divisions - 1)) != 0 && divisions != 0)
        return msc__fail(err, MSC_EINVAL, "roundup_power2_divisions is %" PRIu32 ", must be a power of two",
                         divisions);
    if (options->expandable_segments > 1)
        return msc__fail(err, MSC_EINVAL, "expandable_segments is %u, must be 0 or 1",
                         (unsigned)options->expandable_segments);
    if (options->pad[0] != 0 || options->pad[1] != 0 || options->pad[2] != 0)
        return msc__fail(err, MSC_EINVAL, "pad must be zero");
    return check_sizes(options, err);
}

/* ---- life --------------------------------------------------------------------------------------- */

msc_status msc_sim_create(msc_context *ctx, const msc_sim_options *options, msc_sim **out, msc_error *err)
{
    msc_status status;
    msc_sim *sim;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "out is NULL");
    *out = NULL;
    if (ctx == NULL || options == NULL)
        return msc__fail(err, MSC_EINVAL, "%s is NULL", ctx == NULL ? "ctx" : "options");
    status = check_options(options, err);
    if (status != MSC_OK)
        return status;
    sim = msc__alloc(ctx, sizeof *sim);
    if (sim == NULL)
        return msc__fail_memory(err, "a simulator", sizeof *sim);
    sim->ctx = ctx;
    sim->pools.ctx = ctx;
    sim->pools.options = *options;
    if (sim->pools.options.capacity_bytes >= MSC__SIM_MOST_BYTES)
        sim->pools.options.capacity_bytes = MSC__SIM_MOST_BYTES - 1;
    *out = sim;
    return MSC_OK;
}

void msc_sim_destroy(msc_sim *sim)
{
    if (sim == NULL)
        return;
    msc__array_fini(sim->ctx, &sim->ids, sizeof(uint32_t));
    msc__sim_pools_fini(&sim->pools);
    msc__free(sim->ctx, sim, sizeof *sim);
}

void msc_sim_reset(msc_sim *sim)
{
    sim->ids.count = 0;
    msc__sim_pools_clear(&sim->pools);
}

/* ---- requests ----------------------------------------------------------------------------------- */

/* Makes the table cover `id`. New entries are 0. */
static msc_status cover_id(msc_sim *sim, uint32_t id, msc_error *err)
{
    uint32_t count = sim->ids.count;
    msc_status status;

    if (id < count)
        return MSC_OK;
    status = msc__array_reserve(sim->ctx, &sim->ids, sizeof(uint32_t), id + 1 - count, err);
    if (status != MSC_OK)
        return status;
    memset((uint32_t *)sim->ids.items + count, 0, (id + 1 - count) * sizeof(uint32_t));
    sim->ids.count = id + 1;
    return MSC_OK;
}

static msc_status alloc_host(msc__sim_pools *pools, uint64_t size_bytes, uint32_t *slot, msc_error *err)
{
    msc_sim_stats *stats = &pools->stats;
    msc__sim_block *block;
    msc_status status;

    status = msc__sim_blocks_reserve(pools->ctx, &pools->blocks, (uint64_t)pools->blocks.used_count + 1, err);
    if (status != MSC_OK)
        return status;
    if (size_bytes > pools->options.capacity_bytes - stats->allocated_now_bytes)
        return msc__sim_pools_fail(pools, size_bytes, size_bytes, err);
    *slot = msc__sim_blocks_take(&pools->blocks);
    block = msc__sim_block_at(&pools->blocks, *slot);
    block->size_bytes = size_bytes;
    block->use.requested_bytes = size_bytes;
    block->state = MSC__SIM_ALLOCATED;
    pools->allocated_count++;
    stats->allocated_now_bytes += size_bytes;
    stats->requested_now_bytes += size_bytes;
    stats->reserved_now_bytes += size_bytes;
    msc__sim_raise(&stats->allocated_peak_bytes, stats->allocated_now_bytes);
    msc__sim_raise(&stats->requested_peak_bytes, stats->requested_now_bytes);
    msc__sim_raise(&stats->reserved_peak_bytes, stats->reserved_now_bytes);
    return MSC_OK;
}

static void free_host(msc__sim_pools *pools, uint32_t slot)
{
    uint64_t size_bytes = msc__sim_block_at(&pools->blocks, slot)->size_bytes;

    pools->allocated_count--;
    pools->stats.allocated_now_bytes -= size_bytes;
    pools->stats.requested_now_bytes -= size_bytes;
    pools->stats.reserved_now_bytes -= size_bytes;
    msc__sim_blocks_give(&pools->blocks, slot);
}

msc_status msc_sim_alloc(msc_sim *sim, uint32_t id, uint64_t size_bytes, uint32_t stream, msc_error *err)
{
    uint32_t slot = ZERO_SIZE;
    msc_status status;

    if (id >= MOST_IDS)
        return msc__fail(err, MSC_EINVAL, "id %" PRIu32 " is too large, must be below %u", id, MOST_IDS);
    if (id < sim->ids.count && ((const uint32_t *)sim->ids.items)[id] != 0)
        return msc__fail(err, MSC_EINVAL, "id %" PRIu32 " is in use", id);
    status = cover_id(sim, id, err);
    if (status != MSC_OK)
        return status;
    if (size_bytes != 0) {
        if (sim->pools.options.kind == MSC_SIM_HOST)
            status = alloc_host(&sim->pools, size_bytes, &slot, err);
        else
            status = msc__sim_pools_alloc(&sim->pools, size_bytes, stream, &slot, err);
        if (status != MSC_OK)
            return status;
    }
    ((uint32_t *)sim->ids.items)[id] = slot;
    return MSC_OK;
}

msc_status msc_sim_free(msc_sim *sim, uint32_t id, msc_error *err)
{
    uint32_t *ids = sim->ids.items;
    uint32_t slot;

    if (id >= sim->ids.count || ids[id] == 0)
        return msc__fail(err, MSC_EINVAL, "id %" PRIu32 " is not in use", id);
    slot = ids[id];
    ids[id] = 0;
    if (slot == ZERO_SIZE)
        return MSC_OK;
    if (sim->pools.options.kind == MSC_SIM_HOST)
        free_host(&sim->pools, slot);
    else
        msc__sim_pools_free(&sim->pools, slot);
    return MSC_OK;
}

void msc_sim_empty_cache(msc_sim *sim)
{
    if (sim->pools.options.kind == MSC_SIM_CUDA)
        msc__sim_pools_release_cached(&sim->pools);
}

/* ---- statistics --------------------------------------------------------------------------------- */

void msc_sim_reset_peaks(msc_sim *sim)
{
    msc_sim_stats *stats = &sim->pools.stats;

    stats->allocated_peak_bytes = stats->allocated_now_bytes;
    stats->reserved_peak_bytes = stats->reserved_now_bytes;
    stats->requested_peak_bytes = stats->requested_now_bytes;
    stats->segment_peak_count = stats->segment_now_count;
}

msc_sim_stats msc_sim_get_stats(const msc_sim *sim)
{
    return sim->pools.stats;
}

/* Every allocated block must belong to exactly one id: equal counts, equal sums of slots, right states. */
static msc_status validate_ids(const msc_sim *sim, msc_error *err)
{
    const msc__sim_blocks *blocks = &sim->pools.blocks;
    const uint32_t *ids = sim->ids.items;
    uint64_t balance = 0; /* slots of allocated blocks less slots of ids, modulo 2^64 */
    uint32_t live = 0;
    uint32_t i;

    for (i = 0; i < sim->ids.count; i++) {
        if (ids[i] == 0 || ids[i] == ZERO_SIZE)
            continue;
        if (ids[i] >= blocks->slots.count || msc__sim_block_at(blocks, ids[i])->state != MSC__SIM_ALLOCATED)
            return msc__fail(err, MSC_EINTERNAL, "id %" PRIu32 " names slot %" PRIu32 ", not allocated", i,
                             ids[i]);
        balance -= ids[i];
        live++;
    }
    for (i = 1; i < blocks->slots.count; i++)
        balance += msc__sim_block_at(blocks, i)->state == MSC__SIM_ALLOCATED ? i : 0;
    if (balance != 0 || live != sim->pools.allocated_count)
        return msc__fail(err, MSC_EINTERNAL, "%" PRIu32 " ids for %" PRIu32 " allocated blocks", live,
                         sim->pools.allocated_count);
    return MSC_OK;
}

msc_status msc_sim_validate(const msc_sim *sim, msc_error *err)
{
    msc_status status = msc__sim_pools_validate(&sim->pools, err);

    return status == MSC_OK ? validate_ids(sim, err) : status;
}
