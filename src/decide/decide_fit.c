/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The exact host peak of a set of candidates, kept up to date as candidates come and go.
 *
 * The answer is that of msc_trace_create followed by a HOST replay, to the byte; tests hold it to that. The
 * time axis is laid out so that everything becomes "add so many bytes from here to there":
 *
 *      slot        0      1     2     3      4     5     6      7
 *                start | op 0 | op 1 | redo R | op 2 | redo Q | op 3 | end
 *      a buffer [1, 3)        +=============|
 *      R in the set           - dropped -   M  + held ===========|
 *
 * Every operation has a slot, and so has every recompute that could happen, right before the operation that
 * it precedes; the end of the step is the last slot. A region in the set changes live bytes in four ways:
 *
 *  1. at its recompute's slot, by M: the most that its recompute ever has alive of its own. What happens in
 *     there depends on nothing else, so M is one number;
 *  2. from there on, by instances that internal saves hold, each up to its release: fixed as well;
 *  3. from its begin, by the module's state: fixed;
 *  4. by buffers made in it, kept or not, and by its inputs, whose forward instances end elsewhere. Only this
 *     depends on the rest of the set: a buffer ends at the latest of the holds that apply.
 *
 * A region may also move buffers. Their saves then hold nothing, the copy out does for a while (one more hold, by
 * the region), and each comes back at a point and stays up to another one. When they are off the device is
 * summed in a row of changes of its own, which is only looked at when all that the set moves is more than
 * what may be offloaded.
 *
 * The fixed part is a list of points (slot, change). A buffer has its holds sorted, latest first, so its end
 * is the first that applies. Slots between which no set can make a difference are one *segment*; of it
 * only the highest plain value matters. Live bytes of a segment are its base plus the sum of the changes up
 * to it; changes are summed in blocks, and only blocks that were touched are summed again:
 *
 *      peak = max over blocks of (sum of the blocks before + the block's own peak)
 *
 * Changing the set costs its points and holds, a few dozen; the peak costs the touched blocks and one pass
 * over the block list. Nothing is allocated.
 */
#include "decide/decide_fit.h"

#include "base/invariant.h"

static void add_change(msc__fit *fit, uint32_t segment, int64_t delta_bytes)
{
    uint32_t block = segment / MSC__FIT_BLOCK;

    MSC__ASSERT(segment <= fit->segment_count);
    if (segment >= fit->segment_count)
        return;
    fit->delta_bytes[segment] += delta_bytes;
    fit->block_stale[block] = 1;
    fit->block_excess[block].known = 0;
}

/* Whether a hold applies to a buffer that is made in the region `home` and moved by the region `mover`. */
static bool hold_applies(const msc__fit *fit, const msc__fit_hold *hold, uint32_t home, uint32_t mover)
{
    if (hold->kind == MSC__FIT_ALWAYS)
        return true;
    if (hold->kind == MSC__FIT_REGION)
        return fit->active[hold->by] != 0;
    MSC__ASSERT(hold->kind == MSC__FIT_SAVE);
    if (mover != MSC_NONE)
        return false;
    return home == MSC_NONE || hold->by < fit->model->regions[home].first_call ||
           hold->by > fit->model->regions[home].last_call || hold->release <= fit->model->regions[home].end;
}

static void settle_buffer(msc__fit *fit, msc__fit_buffer *buffer)
{
    const msc__fit_hold *hold = (const msc__fit_hold *)fit->holds.items + buffer->first_hold;

    while (!hold_applies(fit, hold, buffer->home, buffer->mover))
        hold++;
    MSC__ASSERT(hold < (const msc__fit_hold *)fit->holds.items + fit->holds.count);
    MSC__ASSERT(hold->segment <= buffer->plain_end || hold->kind == MSC__FIT_REGION);
    if (hold->segment == buffer->end)
        return;
    add_change(fit, buffer->end, buffer->size_bytes);
    add_change(fit, hold->segment, -buffer->size_bytes);
    buffer->end = hold->segment;
}

static void set_away(msc__fit *fit, const msc__fit_region *region, bool active)
{
    const msc__fit_point *away = (const msc__fit_point *)fit->away.items + region->first_away;
    uint32_t i;

    for (i = 0; i < region->away_count; i++)
        if (away[i].segment < fit->segment_count)
            fit->away_bytes[away[i].segment] += active ? away[i].delta_bytes : -away[i].delta_bytes;
    MSC__ASSERT(active || fit->moved_bytes >= region->moved_bytes);
    fit->moved_bytes += active ? region->moved_bytes : 0 - region->moved_bytes;
}

static void set_region(msc__fit *fit, uint32_t r, bool active)
{
    const msc__fit_region *region = &fit->regions[r];
    const msc__fit_point *points = (const msc__fit_point *)fit->points.items + region->first_point;
    const uint32_t *touches = (const uint32_t *)fit->touches.items + region->first_touch;
    msc__fit_buffer *buffers = fit->buffers.items;
    uint32_t i;

    MSC__ASSERT((fit->active[r] != 0) != active);
    MSC__ASSERT(region->home_count + region->moved_count <= region->touch_count);
    fit->active[r] = active;
    for (i = 0; i < region->point_count; i++)
        add_change(fit, points[i].segment, active ? points[i].delta_bytes : -points[i].delta_bytes);
    for (i = 0; i < region->touch_count; i++) {
        /* No two active regions are made of, or move, the same. */
        MSC__ASSERT(i >= region->home_count || buffers[touches[i]].home == (active ? MSC_NONE : r));
        MSC__ASSERT(i < region->home_count || i >= region->home_count + region->moved_count ||
                    buffers[touches[i]].mover == (active ? MSC_NONE : r));
        if (i < region->home_count)
            buffers[touches[i]].home = active ? r : MSC_NONE;
        else if (i < region->home_count + region->moved_count)
            buffers[touches[i]].mover = active ? r : MSC_NONE;
        settle_buffer(fit, &buffers[touches[i]]);
    }
    set_away(fit, region, active);
}

void msc__fit_set(msc__fit *fit, uint32_t candidate, bool active)
{
    const msc__candidate *changed = &fit->model->candidates[candidate];
    uint32_t i;

    MSC__ASSERT(candidate < fit->model->candidate_count);
    for (i = 0; i < changed->region_count; i++)
        set_region(fit, changed->first_region + i, active);
    MSC__ASSERT(active || !msc__reruns(changed) || fit->rerun_count > 0);
    if (msc__reruns(changed))
        fit->rerun_count = active ? fit->rerun_count + 1 : fit->rerun_count - 1;
}

static uint32_t block_end(const msc__fit *fit, uint32_t block)
{
    uint32_t end = (block + 1) * MSC__FIT_BLOCK;

    return end < fit->segment_count ? end : fit->segment_count;
}

static void sum_block(msc__fit *fit, uint32_t block)
{
    uint32_t end = block_end(fit, block);
    int64_t sum = 0;
    int64_t peak = INT64_MIN;
    uint32_t i;

    for (i = block * MSC__FIT_BLOCK; i < end; i++) {
        int64_t live;
        sum += fit->delta_bytes[i];
        live = fit->base_bytes[i] + sum;
        peak = live > peak ? live : peak;
    }
    fit->block_delta_bytes[block] = sum;
    fit->block_peak_bytes[block] = peak;
    fit->block_stale[block] = 0;
}

uint64_t msc__fit_away(const msc__fit *fit)
{
    int64_t sum = 0;
    int64_t most = 0;
    uint32_t i;

    for (i = 0; i < fit->segment_count && fit->moved_bytes > 0; i++) {
        sum += fit->away_bytes[i];
        MSC__ASSERT(sum >= 0);
        most = sum > most ? sum : most;
    }
    return (uint64_t)most;
}

uint64_t msc__fit_peak(msc__fit *fit)
{
    int64_t sum = 0;
    int64_t peak = 0;
    uint32_t i;

    if (fit->moved_bytes > fit->model->link.limit_bytes && msc__fit_away(fit) > fit->model->link.limit_bytes)
        return MSC__FIT_NO_PEAK;
    for (i = 0; i < fit->block_count; i++) {
        if (fit->block_stale[i])
            sum_block(fit, i);
        if (sum + fit->block_peak_bytes[i] > peak)
            peak = sum + fit->block_peak_bytes[i];
        sum += fit->block_delta_bytes[i];
    }
    MSC__ASSERT((uint64_t)peak >= fit->floor_bytes);
    return (uint64_t)peak;
}

/* Excess within a block whose first segment starts from `sum`. */
static uint64_t sum_excess(const msc__fit *fit, uint32_t block, int64_t sum)
{
    uint32_t end = block_end(fit, block);
    uint64_t excess = 0;
    uint32_t i;

    for (i = block * MSC__FIT_BLOCK; i < end; i++) {
        sum += fit->delta_bytes[i];
        if (fit->base_bytes[i] + sum > 0)
            excess += ((uint64_t)(fit->base_bytes[i] + sum) >> fit->excess_shift) * fit->width[i];
    }
    return excess;
}

/* A block's excess depends on its changes and on the sum before it, and is remembered with that. */
uint64_t msc__fit_excess(msc__fit *fit, uint64_t level_bytes)
{
    int64_t sum = -(int64_t)level_bytes;
    uint64_t excess = 0;
    uint32_t i;

    MSC__ASSERT(level_bytes <= INT64_MAX);
    for (i = 0; i < fit->block_count; i++) {
        msc__fit_excess_of *of = &fit->block_excess[i];
        if (fit->block_stale[i])
            sum_block(fit, i);
        if (!of->known || of->sum != sum) {
            of->value = sum + fit->block_peak_bytes[i] > 0 ? sum_excess(fit, i, sum) : 0;
            of->sum = sum;
            of->known = 1;
        }
        excess += of->value;
        sum += fit->block_delta_bytes[i];
    }
    return excess;
}

/* Blocks that are not stale are as in the plain step. */
bool msc__fit_lowers(const msc__fit *fit)
{
    int64_t sum = 0;
    uint32_t b;
    uint32_t i;

    for (b = 0; b < fit->block_count && sum >= 0; b++)
        if (fit->block_stale[b])
            for (i = b * MSC__FIT_BLOCK; i < block_end(fit, b) && sum >= 0; i++)
                sum += fit->delta_bytes[i];
    return sum < 0;
}

int64_t msc__fit_freed(const msc__fit *fit, uint32_t segment)
{
    int64_t sum = 0;
    uint32_t i;

    MSC__ASSERT(segment < fit->segment_count);
    for (i = 0; i <= segment; i++)
        sum += fit->delta_bytes[i];
    return -sum;
}

/* What a region drops or moves at a segment, if nothing else held it. */
static int64_t most_dropped(const msc__fit *fit, uint32_t r, uint32_t segment)
{
    const msc__fit_region *region = &fit->regions[r];
    const uint32_t *touches = (const uint32_t *)fit->touches.items + region->first_touch;
    const msc__fit_buffer *buffers = fit->buffers.items;
    int64_t sum = 0;
    uint32_t i;

    for (i = 0; i < region->home_count + region->moved_count; i++) {
        const msc__fit_buffer *buffer = &buffers[touches[i]];
        const msc__fit_hold *hold = (const msc__fit_hold *)fit->holds.items + buffer->first_hold;
        uint32_t home = i < region->home_count ? r : MSC_NONE;
        uint32_t mover = i < region->home_count ? MSC_NONE : r;
        while (hold->kind == MSC__FIT_REGION ? hold->by != r : !hold_applies(fit, hold, home, mover))
            hold++;
        MSC__ASSERT(hold < (const msc__fit_hold *)fit->holds.items + fit->holds.count);
        if (buffer->plain_end > segment && hold->segment <= segment)
            sum += buffer->size_bytes;
    }
    return sum;
}

int64_t msc__fit_most_freed(const msc__fit *fit, uint32_t r, uint32_t segment)
{
    const msc__fit_region *region = &fit->regions[r];
    const msc__fit_point *points = (const msc__fit_point *)fit->points.items + region->first_point;
    int64_t sum = most_dropped(fit, r, segment);
    uint32_t k;

    for (k = 0; k < region->point_count && points[k].segment <= segment; k++)
        sum -= points[k].delta_bytes;
    return sum;
}
