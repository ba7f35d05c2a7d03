/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random requests to the allocator simulator, checked wholly after each; and random texts of
 * PYTORCH_ALLOC_CONF.
 *
 * Input: 8 bytes of options, then events of up to 4 bytes each; or, after a byte 255, a text:
 *
 *     options  kind and flags | capacity | max_split | rounding | large segment | divisions | fraction |
 * garbage event    verb, stream and pool | id | size exponent | size mantissa
 *
 * Sizes are mantissa * 2^exponent plus a little, so that every pool, the limits and the absurd are reached.
 * What must hold: the map shows exactly the ids that are live here, with their sizes; its segments add up
 * to what is reserved and do not overlap unless the input has placed some; the segment events add up to it
 * too; and freeing everything and emptying the cache leaves nothing.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "memscale/sim.h"

#define IDS 256u
#define POOLS 3u
#define MOST_EVENTS 400u
#define OPTION_BYTES 8u
#define MIB (UINT64_C(1) << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { FREE, LIVE, AWAITED };

typedef struct run {
    msc_sim *sim;
    msc_sim_options options;
    uint64_t sizes[IDS];
    uint8_t states[IDS];
    uint8_t placed; /* the input has chosen addresses */
} run;

static void require(int condition)
{
    if (!condition)
        abort();
}

static msc_sim_options read_options(const uint8_t *bytes)
{
    msc_sim_options options = msc_sim_options_default(bytes[0] % 4 == 0 ? MSC_SIM_HOST : MSC_SIM_CUDA);
    uint32_t i;

    options.expandable_segments = bytes[0] >> 2 & 1;
    options.record_segments = bytes[0] >> 3 & 1;
    if (bytes[1] != 0)
        options.capacity_bytes = bytes[1] * 4 * MIB + (bytes[0] >> 4) * 512u;
    options.large_segment_bytes = (10 + bytes[4] % 30) * MIB;
    if (bytes[2] != 0)
        options.max_split_bytes = options.large_segment_bytes + bytes[2] * MIB / 4;
    options.max_non_split_rounding_bytes = bytes[3] * MIB;
    for (i = 0; i < MSC_SIM_ROUNDUP_INTERVALS; i++)
        options.roundup_power2_divisions[i] = bytes[5] % 16 == 0 ? 0 : UINT32_C(1) << (bytes[5] + i) % 32;
    if (bytes[6] != 0)
        options.allowed_bytes = bytes[6] * 4 * MIB;
    options.garbage_collection_threshold = bytes[7] / 256.0;
    return options;
}

/* ---- checks ------------------------------------------------------------------------------------- */

static void check_block(const run *r, const msc_sim_block *block)
{
    require(block->state == MSC_SIM_BLOCK_FREE || block->id < IDS);
    switch (block->state) {
    case MSC_SIM_BLOCK_ALLOCATED:
        require(r->states[block->id] == LIVE && r->sizes[block->id] == block->requested_bytes);
        break;
    case MSC_SIM_BLOCK_AWAITING:
        require(r->states[block->id] == AWAITED && r->sizes[block->id] == block->requested_bytes);
        break;
    default:
        require(block->id == MSC_NONE && block->requested_bytes == 0);
        break;
    }
    require(block->requested_bytes <= block->size_bytes);
}

/* Returns the number of allocated blocks; `*reserved` receives the sum of the segments. */
static uint32_t check_map(const run *r, uint64_t *reserved)
{
    msc_sim_map *map = NULL;
    const msc_sim_segment *segments;
    const msc_sim_block *blocks;
    uint32_t segment_count, block_count, i, j;
    uint32_t allocated = 0;
    uint64_t end = 0;

    require(msc_sim_map_create(r->sim, &map, NULL) == MSC_OK);
    segments = msc_sim_map_segments(map, &segment_count);
    blocks = msc_sim_map_blocks(map, &block_count);
    *reserved = 0;
    for (i = 0; i < segment_count; i++) {
        uint64_t at = segments[i].address;
        require(r->placed || at >= end);
        require(segments[i].block_begin < segments[i].block_end && segments[i].block_end <= block_count);
        for (j = segments[i].block_begin; j < segments[i].block_end; j++) {
            require(blocks[j].address == at);
            at += blocks[j].size_bytes;
            check_block(r, &blocks[j]);
            allocated += blocks[j].state == MSC_SIM_BLOCK_ALLOCATED;
        }
        end = at;
        require(at == segments[i].address + segments[i].size_bytes);
        *reserved += segments[i].size_bytes;
    }
    msc_sim_map_destroy(map);
    return allocated;
}

static void check_events(const run *r, uint64_t reserved)
{
    uint64_t count, i;
    const msc_sim_segment_event *events = msc_sim_segment_events(r->sim, &count);
    uint64_t sum = 0;

    require(r->options.record_segments || count == 0);
    for (i = 0; i < count; i++) {
        if (events[i].kind == MSC_SIM_SEGMENT_ALLOC || events[i].kind == MSC_SIM_SEGMENT_MAP)
            sum += events[i].size_bytes;
        else
            sum -= events[i].size_bytes;
    }
    require(!r->options.record_segments || r->options.kind == MSC_SIM_HOST || sum == reserved);
}

static void check(const run *r)
{
    msc_sim_stats stats = msc_sim_get_stats(r->sim);
    uint64_t live_bytes = 0;
    uint64_t awaited_bytes = 0;
    uint64_t reserved;
    uint32_t live = 0;
    uint32_t allocated, i;

    require(msc_sim_validate(r->sim, NULL) == MSC_OK);
    for (i = 0; i < IDS; i++) {
        live += r->states[i] == LIVE && r->sizes[i] > 0;
        live_bytes += r->states[i] == LIVE ? r->sizes[i] : 0;
        awaited_bytes += r->states[i] == AWAITED ? r->sizes[i] : 0;
    }
    require(stats.requested_now_bytes >= live_bytes);
    require(stats.requested_now_bytes <= live_bytes + awaited_bytes);
    require(stats.allocated_now_bytes >= live_bytes);
    require(stats.reserved_now_bytes >= stats.allocated_now_bytes);
    allocated = check_map(r, &reserved);
    check_events(r, reserved);
    if (r->options.kind == MSC_SIM_HOST)
        require(stats.allocated_now_bytes == live_bytes && stats.reserved_now_bytes == live_bytes);
    else
        require(allocated == live && reserved == stats.reserved_now_bytes);
}

/* ---- events ------------------------------------------------------------------------------------- */

/* The next thing that can happen to an id; the others must be refused. */
static void step(run *r, uint32_t id, uint64_t size_bytes, uint8_t verb)
{
    const msc_sim_place place = {verb % 3, verb / 3 % POOLS};
    msc_status status;

    if (r->states[id] == FREE) {
        require(msc_sim_free(r->sim, id, NULL) == MSC_EINVAL);
        status = msc_sim_alloc_in(r->sim, id, size_bytes, &place, NULL);
        require(status == MSC_OK || status == MSC_EDEVMEM);
        r->states[id] = status == MSC_OK ? LIVE : FREE;
        r->sizes[id] = size_bytes;
        return;
    }
    require(msc_sim_alloc_in(r->sim, id, size_bytes, &place, NULL) == MSC_EINVAL);
    if (r->states[id] == AWAITED) {
        require(msc_sim_free(r->sim, id, NULL) == MSC_EINVAL);
        require(msc_sim_free_request(r->sim, id, NULL) == MSC_EINVAL);
        require(msc_sim_free_complete(r->sim, id, NULL) == MSC_OK);
        r->states[id] = FREE;
    } else if (verb >= 128) {
        require(msc_sim_free_complete(r->sim, id, NULL) == MSC_EINVAL);
        require(msc_sim_free_request(r->sim, id, NULL) == MSC_OK);
        r->states[id] = AWAITED;
    } else {
        require(msc_sim_free(r->sim, id, NULL) == MSC_OK);
        r->states[id] = FREE;
    }
}

/* Plays an event without an id. False if the verb is none of these. */
static int play_verb(run *r, const uint8_t *bytes)
{
    switch (bytes[0]) {
    case 255:
    case 254:
        msc_sim_empty_cache(r->sim);
        break;
    case 253:
        require(msc_sim_release_pool(r->sim, 1 + bytes[1] % (POOLS - 1), NULL) == MSC_OK);
        break;
    case 252:
        msc_sim_set_capturing(r->sim, bytes[1] % 2);
        break;
    case 251:
        msc_sim_reset(r->sim);
        memset(r->states, FREE, sizeof r->states);
        break;
    case 250:
        msc_sim_reset_peaks(r->sim);
        break;
    case 249:
        msc_sim_reset_accumulated(r->sim);
        break;
    case 248: /* addresses up to the end of 64 bits, and the same ones again */
        if (msc_sim_place_next_segment(r->sim, ((uint64_t)bytes[1] << bytes[2] % 57) * 512, NULL) == MSC_OK)
            r->placed = 1;
        break;
    default:
        return 0;
    }
    return 1;
}

/* Plays one event and returns the bytes it took; 0: too few are left. */
static size_t play(run *r, const uint8_t *bytes, size_t left)
{
    uint64_t size_bytes;

    if (left < 4)
        return 0;
    if (play_verb(r, bytes))
        return bytes[0] == 248 ? 3 : bytes[0] == 252 || bytes[0] == 253 ? 2 : 1;
    size_bytes = bytes[3];
    size_bytes = (size_bytes << bytes[2] % 64) + bytes[2] / 64;
    step(r, bytes[1], size_bytes, bytes[0]);
    return 4;
}

static void finish(run *r)
{
    msc_sim_stats stats;
    uint32_t id;

    for (id = 0; id < IDS; id++)
        while (r->states[id] != FREE)
            step(r, id, 1, 0);
    for (id = 1; id < POOLS; id++)
        require(msc_sim_release_pool(r->sim, id, NULL) == MSC_OK);
    msc_sim_set_capturing(r->sim, 0);
    msc_sim_empty_cache(r->sim);
    check(r);
    stats = msc_sim_get_stats(r->sim);
    require(stats.allocated_now_bytes == 0 && stats.reserved_now_bytes == 0);
    require(r->options.kind == MSC_SIM_HOST || stats.segment_now_count == 0);
}

/* ---- texts -------------------------------------------------------------------------------------- */

/* What is accepted must make a simulator; what is not must say why and leave the options alone. */
static void read_text(const uint8_t *data, size_t size)
{
    static char text[4096];
    msc_sim_options options = msc_sim_options_default(MSC_SIM_CUDA);
    const msc_sim_options before = options;
    msc_context *ctx = NULL;
    msc_sim *sim = NULL;
    msc_error err = {0};
    msc_status status;

    if (size >= sizeof text)
        size = sizeof text - 1;
    memcpy(text, data, size);
    text[size] = '\0';
    status = msc_sim_options_parse(text, 1000 * MIB, &options, &err);
    if (status != MSC_OK) {
        require(status == MSC_EINVAL || status == MSC_EUNSUPPORTED);
        require(err.message[0] != '\0' && memcmp(&options, &before, sizeof before) == 0);
        return;
    }
    require(msc_context_create(NULL, &ctx, NULL) == MSC_OK);
    require(msc_sim_create(ctx, &options, &sim, NULL) == MSC_OK);
    status = msc_sim_alloc(sim, 0, 3 * MIB, 0, NULL);
    require(status == MSC_OK || status == MSC_EDEVMEM);
    require(msc_sim_validate(sim, NULL) == MSC_OK);
    msc_sim_destroy(sim);
    msc_context_destroy(ctx);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static run r;
    msc_context *ctx = NULL;
    size_t used;
    uint32_t events;

    if (size > 0 && data[0] == 255)
        read_text(data + 1, size - 1);
    if (size < OPTION_BYTES || data[0] == 255)
        return 0;
    memset(&r, 0, sizeof r);
    r.options = read_options(data);
    require(msc_context_create(NULL, &ctx, NULL) == MSC_OK);
    require(msc_sim_create(ctx, &r.options, &r.sim, NULL) == MSC_OK);
    data += OPTION_BYTES;
    size -= OPTION_BYTES;
    for (events = 0; events < MOST_EVENTS && (used = play(&r, data, size)) != 0; events++) {
        check(&r);
        data += used;
        size -= used;
    }
    finish(&r);
    msc_sim_destroy(r.sim);
    require(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
    return 0;
}
