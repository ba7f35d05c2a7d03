/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Room in the tiers.
 *
 * Two memory tiers are slabs; the file is a space of offsets that grows with the file's reserved length. Each
 * takes from the machine no more than its limit. What the system refuses (pinning, mapping, disk space) closes
 * the tier's growth and leaves one line in its note: blocks then go to the next tier, and nobody asks the system
 * again at every block.
 *
 * The system is asked without the mutex, by one thread at a time for each tier: pinning a large slab and reserving disk
 * space take milliseconds, in which the others go on.
 *
 * Staging buffers are slabs of their own, mapped once; what they take is taken off the limit of the tier that
 * they count for.
 */
#include <stdio.h>
#include <string.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "offload/offload_engine.h"

/* The file grows by this at least: reserving is a system call that writes the file system's journal. */
#define FILE_GROWTH_BYTES (256ull << 20)

static void note(msc_offload *engine, msc_tier tier, const msc_error *why)
{
    if (engine->notes[tier][0] == '\0')
        (void)snprintf(engine->notes[tier], sizeof engine->notes[tier], "%s", why->message);
}

static bool needs_staging(const msc_offload *engine)
{
    const uint64_t *limit = engine->options.limit_bytes;

    return limit[MSC_TIER_FILE] > 0 || (limit[MSC_TIER_HOST] > 0 && engine->device->kind != MSC_DEVICE_HOST);
}

/* Maps the slab of the staging buffers, pinned where the device can. */
static msc_status init_staging(msc_offload *engine, msc_error *err)
{
    uint64_t bytes = 2 * engine->options.staging_count * engine->options.chunk_bytes;
    msc_device *pinning = engine->device->kind == MSC_DEVICE_HOST ? NULL : engine->device;
    msc__slab_block probe;
    msc_error why;
    msc_status status;

    engine->staging_tier = pinning != NULL ? MSC_TIER_PINNED : MSC_TIER_HOST;
    status = msc__slabs_create(engine->ctx, pinning, bytes, &engine->staging_slabs, err);
    if (status != MSC_OK || pinning == NULL)
        return status;
    if (msc__slabs_take(engine->staging_slabs, bytes, &probe, &why) == MSC_OK) {
        msc__slabs_give(engine->staging_slabs, probe);
        return MSC_OK;
    }
    note(engine, MSC_TIER_PINNED, &why);
    msc__slabs_destroy(engine->staging_slabs);
    engine->staging_slabs = NULL;
    engine->staging_tier = MSC_TIER_HOST;
    return msc__slabs_create(engine->ctx, NULL, bytes, &engine->staging_slabs, err);
}

/* What staging leaves of a tier's limit. */
static msc_status rest_of_limit(const msc_offload *engine, msc_tier tier, uint64_t *out, msc_error *err)
{
    uint64_t limit = engine->options.limit_bytes[tier];
    uint64_t staging = 2 * engine->options.staging_count * engine->options.chunk_bytes;

    *out = limit;
    if (limit == 0 || engine->staging_slabs == NULL || engine->staging_tier != tier)
        return MSC_OK;
    if (limit < staging)
        return msc__fail(err, MSC_EINVAL,
                         "limit_bytes[%d] is %llu: the staging buffers alone take %llu (staging_count %u, "
                         "chunk_bytes %llu, two directions)",
                         (int)tier, (unsigned long long)limit, (unsigned long long)staging,
                         engine->options.staging_count, (unsigned long long)engine->options.chunk_bytes);
    *out = limit - staging;
    return MSC_OK;
}

static msc_status init_slabs(msc_offload *engine, msc_tier tier, msc_error *err)
{
    msc_device *pinning = tier == MSC_TIER_PINNED ? engine->device : NULL;
    uint64_t limit;
    msc_status status = rest_of_limit(engine, tier, &limit, err);

    if (status != MSC_OK || limit == 0)
        return status;
    status = msc__slabs_create(engine->ctx, pinning, limit, &engine->slabs[tier], err);
    if (status == MSC_OK)
        msc__slabs_share(engine->slabs[tier], &engine->mutex, &engine->changed);
    return status;
}

static msc_status init_file(msc_offload *engine, msc_error *err)
{
    msc__file_options options = {.directory = engine->directory, .depth = engine->options.staging_count};
    msc_status status = msc__ranges_create(engine->ctx, 0, MSC__FILE_PAGE, &engine->file_space, err);

    if (status != MSC_OK)
        return status;
    return msc__file_create(engine->ctx, &options, &engine->file, err);
}

msc_status msc__places_init(msc_offload *engine, msc_error *err)
{
    msc_status status = needs_staging(engine) ? init_staging(engine, err) : MSC_OK;

    if (status == MSC_OK)
        status = init_slabs(engine, MSC_TIER_PINNED, err);
    if (status == MSC_OK)
        status = init_slabs(engine, MSC_TIER_HOST, err);
    if (status == MSC_OK && engine->options.limit_bytes[MSC_TIER_FILE] > 0)
        status = init_file(engine, err);
    return status;
}

void msc__places_fini(msc_offload *engine)
{
    msc__file_destroy(engine->file);
    msc__ranges_destroy(engine->file_space);
    msc__slabs_destroy(engine->slabs[MSC_TIER_PINNED]);
    msc__slabs_destroy(engine->slabs[MSC_TIER_HOST]);
    msc__slabs_destroy(engine->staging_slabs);
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* What the file's limit leaves. */
static uint64_t left_of_file(const msc_offload *engine)
{
    uint64_t limit = engine->options.limit_bytes[MSC_TIER_FILE] / MSC__FILE_PAGE * MSC__FILE_PAGE;

    MSC__ASSERT(msc__ranges_in_use(engine->file_space).capacity <= limit);
    return limit - msc__ranges_in_use(engine->file_space).capacity;
}

/* Makes the file longer, within its limit: by FILE_GROWTH_BYTES if the disk has it, else by what the block needs. */
static msc_status grow_file(msc_offload *engine, uint64_t need, msc_error *err)
{
    uint64_t capacity = msc__ranges_in_use(engine->file_space).capacity;
    uint64_t more = least(need > FILE_GROWTH_BYTES ? need : FILE_GROWTH_BYTES, left_of_file(engine));
    msc_status status;

    MSC__ASSERT(!engine->file_grows && more >= need && more % MSC__FILE_PAGE == 0);
    engine->file_grows = true;
    msc__mutex_unlock(&engine->mutex);
    status = msc__file_reserve(engine->file, capacity + more, err);
    if (status != MSC_OK && more > need) {
        more = need;
        status = msc__file_reserve(engine->file, capacity + more, err);
    }
    msc__mutex_lock(&engine->mutex);
    engine->file_grows = false;
    msc__cond_broadcast(&engine->changed);
    return status == MSC_OK ? msc__ranges_grow(engine->file_space, more, err) : status;
}

static msc_status take_in_file(msc_offload *engine, uint64_t bytes, bool now, msc__place *out, msc_error *err)
{
    uint64_t need = msc__place_file_bytes(bytes);
    msc_status status;

    for (;;) {
        status = msc__ranges_take(engine->file_space, bytes, &out->offset, &out->range, err);
        if (status != MSC_EAGAIN || (!engine->file_grows && need > left_of_file(engine)))
            return status;
        if (now)
            return MSC_ETIMEDOUT;
        if (engine->file_grows) {
            msc__cond_wait(&engine->changed, &engine->mutex);
            continue;
        }
        status = grow_file(engine, need, err);
        if (status != MSC_OK)
            return status;
    }
}

static msc_status take_in(msc_offload *engine, msc_tier tier, uint64_t bytes, bool now, msc__place *out,
                          msc_error *err)
{
    MSC__ASSERT(bytes > 0 && tier < MSC_TIER_COUNT);
    memset(out, 0, sizeof *out);
    out->tier = tier;
    if (tier == MSC_TIER_FILE)
        return engine->file != NULL ? take_in_file(engine, bytes, now, out, err) : MSC_EAGAIN;
    if (engine->slabs[tier] == NULL)
        return MSC_EAGAIN;
    return now ? msc__slabs_take_now(engine->slabs[tier], bytes, &out->slab, err)
               : msc__slabs_take(engine->slabs[tier], bytes, &out->slab, err);
}

/* The system refused. The tier keeps what it has. */
static void close_tier(msc_offload *engine, msc_tier tier, const msc_error *why)
{
    note(engine, tier, why);
    if (tier == MSC_TIER_FILE)
        engine->options.limit_bytes[tier] = msc__ranges_in_use(engine->file_space).capacity;
    else
        msc__slabs_stop(engine->slabs[tier]);
}

static msc_status fail_no_room(const msc_offload *engine, uint64_t bytes, msc_error *err)
{
    const uint64_t *limit = engine->options.limit_bytes;

    return msc__fail(err, MSC_EAGAIN,
                     "no tier has room for %llu bytes: limits are %llu pinned, %llu host, %llu file bytes",
                     (unsigned long long)bytes, (unsigned long long)limit[MSC_TIER_PINNED],
                     (unsigned long long)limit[MSC_TIER_HOST], (unsigned long long)limit[MSC_TIER_FILE]);
}

msc_status msc__place_take(msc_offload *engine, uint64_t bytes, msc_tier first, msc_tier last, bool now,
                           msc__place *out, msc_error *err)
{
    msc_tier tier;

    for (tier = first; tier <= last; tier++) {
        msc_error why;
        msc_status status = take_in(engine, tier, bytes, now, out, &why);

        if (status == MSC_OK) {
            uint64_t *held = &engine->counters.held_bytes[tier];
            uint64_t *peak = &engine->counters.held_peak_bytes[tier];

            *held += bytes;
            *peak = *held > *peak ? *held : *peak;
            return MSC_OK;
        }
        if (status == MSC_ETIMEDOUT)
            return status;
        if (status != MSC_EAGAIN)
            close_tier(engine, tier, &why);
    }
    return fail_no_room(engine, bytes, err);
}

void msc__place_give(msc_offload *engine, const msc__place *place, uint64_t bytes)
{
    MSC__ASSERT(engine->counters.held_bytes[place->tier] >= bytes);
    engine->counters.held_bytes[place->tier] -= bytes;
    if (place->tier == MSC_TIER_FILE) {
        msc__ranges_give(engine->file_space, place->range);
        return;
    }
    if (engine->options.debug)
        memset(place->slab.memory, 0xDB, (size_t)bytes);
    msc__slabs_give(engine->slabs[place->tier], place->slab);
}

bool msc__place_is_direct(const msc_offload *engine, const msc__place *place)
{
    return place->tier == MSC_TIER_PINNED ||
           (place->tier == MSC_TIER_HOST && engine->device->kind == MSC_DEVICE_HOST);
}

uint64_t msc__place_file_bytes(uint64_t bytes)
{
    return msc__round_up_u64(bytes, MSC__FILE_PAGE);
}

uint64_t msc__place_staging_bytes(const msc_offload *engine)
{
    return engine->staging_slabs != NULL ? msc__slabs_in_use(engine->staging_slabs).mapped_bytes : 0;
}

uint64_t msc__place_taken_bytes(const msc_offload *engine, msc_tier tier)
{
    uint64_t bytes = 0;

    if (tier == MSC_TIER_FILE)
        return engine->file != NULL ? msc__file_facts_of(engine->file).reserved_bytes : 0;
    if (engine->slabs[tier] != NULL)
        bytes = msc__slabs_in_use(engine->slabs[tier]).mapped_bytes;
    return engine->staging_tier == tier ? bytes + msc__place_staging_bytes(engine) : bytes;
}
