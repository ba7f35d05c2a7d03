/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a region changes by itself, whatever else is in the set.
 *
 *      redo slot               the most that its recompute ever has alive of its own, with its modules' state once
 *                              more: it is run once, here
 *      behind it               each instance that its saves hold, up to their release
 *      from its begin          its modules' state
 *      from `back`             what it has moved, up to its release
 *
 * All of it becomes points: changes of live bytes at slots; and so does what is off the device.
 */
#include <stdlib.h>

#include "base/invariant.h"
#include "decide/decide_fit_build.h"

static msc_status push_point(msc__fit_builder *b, uint32_t slot, int64_t delta_bytes, msc_error *err)
{
    msc__fit_point point = {.segment = slot, .delta_bytes = delta_bytes};

    if (delta_bytes == 0)
        return MSC_OK;
    return msc__array_push(b->scratch.ctx, &b->fit->points, sizeof point, &point, err);
}

static msc_status push_range(msc__fit_builder *b, uint32_t from, uint32_t to, int64_t bytes, msc_error *err)
{
    msc_status status = push_point(b, from, bytes, err);

    MSC__ASSERT(from < to || bytes == 0);
    return status == MSC_OK ? push_point(b, to, -bytes, err) : status;
}

static void note_redo_ends(msc__fit_builder *b, uint32_t r, bool clear)
{
    const msc__model *model = b->model;
    const msc__region *region = &model->regions[r];
    uint32_t i;

    for (i = model->saves_by_call.first[region->first_call];
         i < model->saves_by_call.first[region->last_call + 1]; i++) {
        const msc_save *save = &model->saves[model->saves_by_call.items[i]];
        if (!msc__save_is_internal(save, &model->buffers[save->buffer], region) ||
            msc__fit_keeps(b, r, save->buffer))
            continue;
        if (clear)
            b->redo_end[save->buffer] = 0;
        else if (!msc__save_is_unused(save, model->op_count) && b->redo_end[save->buffer] < save->release)
            b->redo_end[save->buffer] = save->release;
    }
}

/* What an operation makes anew comes to life, and is noted where it expires inside the recompute. */
static uint64_t make_again(msc__fit_builder *b, const msc__region *region, uint32_t op)
{
    const msc__model *model = b->model;
    uint64_t made = 0;
    uint32_t i;

    for (i = model->begins.first[op]; i < model->begins.first[op + 1]; i++) {
        uint32_t buffer = model->begins.items[i];
        uint32_t natural = msc__natural_end(&model->buffers[buffer]);
        MSC__ASSERT(natural > op);
        made += (uint64_t)msc__fit_size_of(b, buffer);
        if (b->redo_end[buffer] == 0 && natural < region->stop)
            b->expire_bytes[natural] += (uint64_t)msc__fit_size_of(b, buffer);
    }
    return made;
}

/* Runs the recompute and returns the most that it has alive of its own. */
static int64_t recompute_peak(msc__fit_builder *b, uint32_t r)
{
    const msc__region *region = &b->model->regions[r];
    uint64_t live = msc__model_bytes(b->model, region->state_bytes); /* put aside meanwhile */
    uint64_t peak = 0;
    uint32_t t;

    for (t = region->begin; t < region->stop; t++) {
        if (!msc__keeps(b->model, msc__fit_owner(b, r), region, t)) {
            uint64_t scratch_bytes = msc__model_bytes(b->model, b->model->ops[t].scratch_bytes);
            live += make_again(b, region, t);
            if (live + scratch_bytes > peak)
                peak = live + scratch_bytes;
        }
        MSC__ASSERT(live >= b->expire_bytes[t + 1]);
        live -= b->expire_bytes[t + 1];
        b->expire_bytes[t + 1] = 0;
    }
    MSC__ASSERT(peak <= b->model->most_bytes);
    return (int64_t)peak;
}

static msc_status push_held(msc__fit_builder *b, uint32_t r, msc_error *err)
{
    const msc__model *model = b->model;
    const msc__region *region = &model->regions[r];
    uint32_t slot = b->fit->redo_slot[r];
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = model->begins.first[region->begin]; i < model->begins.first[region->stop] && status == MSC_OK;
         i++) {
        uint32_t buffer = model->begins.items[i];
        if (b->redo_end[buffer] > region->redo)
            status = push_range(b, slot + 1, msc__fit_slot_at(b, b->redo_end[buffer]),
                                msc__fit_size_of(b, buffer), err);
    }
    return status;
}

static msc_status push_returned(msc__fit_builder *b, uint32_t r, msc_error *err)
{
    const msc__region *region = &b->model->regions[r];
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = 0; i < region->move_count && status == MSC_OK; i++) {
        const msc__moved *move = &b->model->moves[region->first_move + i];
        MSC__ASSERT(move->back <= move->use && move->use <= b->model->op_count);
        status = push_range(b, msc__fit_slot_at(b, move->back), msc__fit_slot_at(b, msc__move_end(move)),
                            msc__fit_size_of(b, move->buffer), err);
    }
    return status;
}

static msc_status push_away(msc__fit_builder *b, uint32_t r, msc_error *err)
{
    const msc__region *region = &b->model->regions[r];
    msc__fit_region *added = &b->fit->regions[r];
    msc_status status = MSC_OK;
    uint32_t i;

    added->first_away = b->fit->away.count;
    for (i = 0; i < region->move_count && status == MSC_OK; i++) {
        const msc__moved *move = &b->model->moves[region->first_move + i];
        MSC__ASSERT(move->put < move->release);
        const msc__fit_point goes = {msc__fit_slot_at(b, move->put), (int64_t)move->size_bytes};
        const msc__fit_point ends = {msc__fit_slot_at(b, move->release), -(int64_t)move->size_bytes};
        status = msc__array_push(b->scratch.ctx, &b->fit->away, sizeof goes, &goes, err);
        if (status == MSC_OK)
            status = msc__array_push(b->scratch.ctx, &b->fit->away, sizeof ends, &ends, err);
        added->moved_bytes += move->size_bytes;
    }
    added->away_count = b->fit->away.count - added->first_away;
    return status;
}

static int compare_points(const void *left, const void *right)
{
    const msc__fit_point *x = left;
    const msc__fit_point *y = right;

    if (x->segment != y->segment)
        return x->segment < y->segment ? -1 : 1;
    return (x->delta_bytes > y->delta_bytes) - (x->delta_bytes < y->delta_bytes);
}

/* Sorts a region's points and makes one of those at the same slot. */
static void merge_points(msc__fit_builder *b, uint32_t first)
{
    msc__fit_point *points = b->fit->points.items;
    uint32_t count = b->fit->points.count;
    uint32_t kept = first;
    uint32_t i;

    if (count > first)
        qsort(points + first, count - first, sizeof *points, compare_points);
    for (i = first; i < count; i++) {
        if (kept > first && points[kept - 1].segment == points[i].segment)
            points[kept - 1].delta_bytes += points[i].delta_bytes;
        else
            points[kept++] = points[i];
    }
    b->fit->points.count = kept;
}

static msc_status add_points(msc__fit_builder *b, uint32_t r, msc_error *err)
{
    const msc__model *model = b->model;
    const msc__region *region = &model->regions[r];
    msc__fit_region *added = &b->fit->regions[r];
    uint32_t slot = b->fit->redo_slot[r];
    msc_status status;

    MSC__ASSERT(region->offload || slot > b->fit->op_slot[region->begin]);
    added->first_point = b->fit->points.count;
    if (!region->offload)
        note_redo_ends(b, r, false);
    status = push_range(b, slot, slot + 1, recompute_peak(b, r), err);
    if (status == MSC_OK)
        status = push_held(b, r, err);
    if (status == MSC_OK)
        status = push_range(b, b->fit->op_slot[region->begin], msc__fit_slot_at(b, region->until),
                            (int64_t)msc__model_bytes(model, region->state_bytes), err);
    if (!region->offload)
        note_redo_ends(b, r, true);
    if (status == MSC_OK)
        status = push_returned(b, r, err);
    if (status == MSC_OK)
        status = push_away(b, r, err);
    merge_points(b, added->first_point);
    added->point_count = b->fit->points.count - added->first_point;
    return status;
}

msc_status msc__fit_add_points(msc__fit_builder *b, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t r;

    for (r = 0; r < b->model->region_count && status == MSC_OK; r++)
        status = add_points(b, r, err);
    return status;
}
