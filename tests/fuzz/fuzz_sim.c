/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random requests to the allocator simulator, checked wholly after each.
 *
 * Input: 6 bytes of options, then events of up to 4 bytes each:
 *
 *     options  kind and flags | capacity | max_split | rounding | large segment | divisions
 *     event    verb and stream | id | size exponent | size mantissa
 *
 * Sizes are mantissa * 2^exponent plus a little, so that every pool, the limits and the absurd are reached.
 * For HOST a running sum is kept here and must equal the simulator's; for both kinds live requests must be
 * conserved, and freeing everything and emptying the cache must leave nothing.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "memscale/sim.h"

#define IDS 256u
#define MOST_EVENTS 400u
#define MIB (UINT64_C(1) << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct run {
    msc_sim *sim;
    uint64_t sizes[IDS]; /* of live ids */
    uint8_t live[IDS];
    uint64_t requested_bytes;
} run;

static void require(int condition)
{
    if (!condition)
        abort();
}

static msc_sim_options read_options(const uint8_t *bytes)
{
    msc_sim_options options = msc_sim_options_default(bytes[0] % 4 == 0 ? MSC_SIM_HOST : MSC_SIM_CUDA);

    options.expandable_segments = bytes[0] >> 2 & 1;
    if (bytes[1] != 0)
        options.capacity_bytes = bytes[1] * 4 * MIB + (bytes[0] >> 3) * 512u;
    options.large_segment_bytes = (10 + bytes[4] % 30) * MIB;
    if (bytes[2] != 0)
        options.max_split_bytes = options.large_segment_bytes + bytes[2] * MIB / 4;
    options.max_non_split_rounding_bytes = bytes[3] * MIB;
    options.roundup_power2_divisions = bytes[5] % 16 == 0 ? 0 : UINT32_C(1) << bytes[5] % 32;
    return options;
}

static void check(const run *r)
{
    msc_sim_stats stats = msc_sim_get_stats(r->sim);

    require(msc_sim_validate(r->sim, NULL) == MSC_OK);
    require(stats.requested_now_bytes == r->requested_bytes);
    require(stats.allocated_now_bytes >= r->requested_bytes);
    require(stats.reserved_now_bytes >= stats.allocated_now_bytes);
}

static void toggle(run *r, uint32_t id, uint64_t size_bytes, uint32_t stream)
{
    msc_status status;

    if (r->live[id]) {
        require(msc_sim_alloc(r->sim, id, size_bytes, stream, NULL) == MSC_EINVAL);
        require(msc_sim_free(r->sim, id, NULL) == MSC_OK);
        r->live[id] = 0;
        r->requested_bytes -= r->sizes[id];
        return;
    }
    require(msc_sim_free(r->sim, id, NULL) == MSC_EINVAL);
    status = msc_sim_alloc(r->sim, id, size_bytes, stream, NULL);
    require(status == MSC_OK || status == MSC_EDEVMEM);
    if (status == MSC_OK) {
        r->live[id] = 1;
        r->sizes[id] = size_bytes;
        r->requested_bytes += size_bytes;
    }
}

/* Plays one event and returns the bytes it took; 0: too few are left. */
static size_t play(run *r, const uint8_t *bytes, size_t left)
{
    uint64_t size_bytes;

    if (left < 4)
        return 0;
    if (bytes[0] >= 252) {
        msc_sim_empty_cache(r->sim);
        return 1;
    }
    if (bytes[0] == 251) {
        msc_sim_reset(r->sim);
        memset(r->live, 0, sizeof r->live);
        r->requested_bytes = 0;
        return 1;
    }
    if (bytes[0] == 250) {
        msc_sim_reset_peaks(r->sim);
        return 1;
    }
    size_bytes = bytes[3];
    size_bytes = (size_bytes << bytes[2] % 64) + bytes[2] / 64;
    toggle(r, bytes[1], size_bytes, bytes[0] % 3);
    return 4;
}

static void finish(run *r, msc_sim_kind kind)
{
    msc_sim_stats stats;
    uint32_t id;

    for (id = 0; id < IDS; id++)
        if (r->live[id])
            toggle(r, id, 1, 0);
    msc_sim_empty_cache(r->sim);
    check(r);
    stats = msc_sim_get_stats(r->sim);
    require(stats.allocated_now_bytes == 0 && stats.reserved_now_bytes == 0);
    require(kind == MSC_SIM_HOST || stats.segment_now_count == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static run r;
    msc_sim_options options;
    msc_context *ctx = NULL;
    size_t used;
    uint32_t events;

    if (size < 6)
        return 0;
    memset(&r, 0, sizeof r);
    options = read_options(data);
    require(msc_context_create(NULL, &ctx, NULL) == MSC_OK);
    require(msc_sim_create(ctx, &options, &r.sim, NULL) == MSC_OK);
    data += 6;
    size -= 6;
    for (events = 0; events < MOST_EVENTS && (used = play(&r, data, size)) != 0; events++) {
        check(&r);
        if (options.kind == MSC_SIM_HOST)
            require(msc_sim_get_stats(r.sim).allocated_now_bytes == r.requested_bytes);
        data += used;
        size -= used;
    }
    finish(&r, options.kind);
    msc_sim_destroy(r.sim);
    require(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
    return 0;
}
