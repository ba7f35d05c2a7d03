/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The recorded order of uses.
 *
 * Two sets of arrays change places at the end of a step. Where one grows the other is given as much room, so that a
 * run that repeats allocates nothing after its first step. The latest use is not stored: the last entry of `uses`
 * has it.
 */
#include "offload/offload_schedule.h"

#include <string.h>

#include "base/invariant.h"

static uint64_t size_at(const msc__array *sizes, uint32_t i)
{
    return ((const uint64_t *)sizes->items)[i];
}

static uint32_t ordinal_at(const msc__array *ordinals, uint32_t i)
{
    MSC__ASSERT(i < ordinals->count);
    return ((const uint32_t *)ordinals->items)[i];
}

void msc__schedule_fini(msc_context *ctx, msc__schedule *schedule)
{
    msc__array_fini(ctx, &schedule->bytes, sizeof(uint64_t));
    msc__array_fini(ctx, &schedule->uses, sizeof(uint32_t));
    msc__array_fini(ctx, &schedule->known, sizeof(uint64_t));
    msc__array_fini(ctx, &schedule->order, sizeof(uint32_t));
    msc__array_fini(ctx, &schedule->places, sizeof(uint32_t));
}

/* Without memory it grows when its turn comes. */
static void keep_pace(msc_context *ctx, const msc__array *grown, msc__array *other, size_t item_bytes)
{
    if (other->capacity < grown->capacity)
        (void)msc__array_reserve(ctx, other, item_bytes, grown->capacity - other->count, NULL);
}

msc_status msc__schedule_put(msc_context *ctx, msc__schedule *schedule, uint64_t bytes, uint32_t *ordinal,
                             msc_error *err)
{
    uint32_t mine = schedule->bytes.count;
    msc_status status = msc__array_push(ctx, &schedule->bytes, sizeof bytes, &bytes, err);

    if (status != MSC_OK)
        return status;
    keep_pace(ctx, &schedule->bytes, &schedule->known, sizeof bytes);
    keep_pace(ctx, &schedule->bytes, &schedule->places, sizeof(uint32_t));
    if (mine >= schedule->known.count || size_at(&schedule->known, mine) != bytes)
        schedule->differs = true;
    *ordinal = mine;
    return MSC_OK;
}

/* Whether the order of the step before is to be followed. Fewer puts than then show at the first use. */
static bool is_known(const msc__schedule *schedule)
{
    uint32_t before = schedule->uses.count > 0 ? schedule->before : schedule->bytes.count;

    return !schedule->differs && before == schedule->expected && schedule->order.count > 0;
}

static void follow(msc__schedule *schedule, uint32_t ordinal)
{
    uint32_t place;

    if (schedule->position < schedule->order.count &&
        ordinal_at(&schedule->order, schedule->position) == ordinal) {
        schedule->position++;
        return;
    }
    schedule->surprised = true;
    MSC__ASSERT(schedule->places.count == schedule->known.count);
    place = ordinal_at(&schedule->places, ordinal);
    if (place != MSC_NONE)
        schedule->position = place + 1;
}

void msc__schedule_use(msc_context *ctx, msc__schedule *schedule, uint32_t ordinal)
{
    MSC__ASSERT(ordinal < schedule->bytes.count);
    if (schedule->uses.count == 0)
        schedule->before = schedule->bytes.count;
    if (is_known(schedule))
        follow(schedule, ordinal);
    if (msc__array_push(ctx, &schedule->uses, sizeof ordinal, &ordinal, NULL) != MSC_OK)
        schedule->differs = true;
    keep_pace(ctx, &schedule->uses, &schedule->order, sizeof ordinal);
}

msc__schedule_walk msc__schedule_ahead(const msc__schedule *schedule)
{
    uint32_t used = schedule->uses.count;
    msc__schedule_walk walk = {NULL, 0};

    MSC__ASSERT(schedule->position <= schedule->order.count);
    if (is_known(schedule)) {
        walk.order = (const uint32_t *)schedule->order.items + schedule->position;
        walk.left = schedule->order.count - schedule->position;
    } else {
        walk.left = used > 0 ? ordinal_at(&schedule->uses, used - 1) : schedule->bytes.count;
    }
    return walk;
}

static void swap(msc__array *first, msc__array *second)
{
    msc__array kept = *first;

    *first = *second;
    *second = kept;
}

/* Position of each ordinal in `order`; there are none without memory. */
static void find_places(msc_context *ctx, msc__schedule *schedule)
{
    uint32_t count = schedule->known.count;
    uint32_t *places;
    uint32_t i;

    schedule->places.count = 0;
    if (msc__array_reserve(ctx, &schedule->places, sizeof *places, count, NULL) != MSC_OK)
        return;
    schedule->places.count = count;
    places = schedule->places.items;
    for (i = 0; i < count; i++)
        places[i] = MSC_NONE;
    for (i = schedule->order.count; i-- > 0;) {
        MSC__ASSERT(ordinal_at(&schedule->order, i) < count);
        places[ordinal_at(&schedule->order, i)] = i;
    }
}

void msc__schedule_forget(msc__schedule *schedule)
{
    schedule->bytes.count = 0;
    schedule->uses.count = 0;
    schedule->position = 0;
    schedule->surprised = false;
    schedule->differs = schedule->places.count != schedule->known.count;
}

bool msc__schedule_step(msc_context *ctx, msc__schedule *schedule)
{
    bool expected =
        is_known(schedule) && schedule->bytes.count == schedule->known.count && !schedule->surprised;

    schedule->expected = schedule->uses.count > 0 ? schedule->before : schedule->bytes.count;
    swap(&schedule->bytes, &schedule->known);
    swap(&schedule->uses, &schedule->order);
    find_places(ctx, schedule);
    msc__schedule_forget(schedule);
    return expected;
}
