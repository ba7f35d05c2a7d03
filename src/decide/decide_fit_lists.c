/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What regions change, as lists that the fit walks along.
 *
 * Holds. A buffer's end is the latest of its natural end, the releases of the saves on it that are not
 * dropped, and the ends of the regions that hold it as an input. Saves that no candidate can drop, and the
 * natural end, come down to one position, `fixed`; only later holds are listed, latest first, and the fixed
 * one last. A buffer without any later hold always ends there and is not listed at all:
 *
 *      natural  save X   save Y   input of R
 *         |        |        |         |           X cannot be dropped, Y can
 *         3        5        9        12     ->    12 if R is in, else 9 unless Y is dropped, else 5
 *
 * Points. The recompute of a region is run once, here, to find the most that it has alive of its own; the
 * instances that its saves hold, and its state, are ranges with fixed ends.
 */
#include <stdlib.h>

#include "decide/decide_fit_build.h"

/* ---- holds ------------------------------------------------------------------------------------- */

/* Whether a candidate exists that would drop the save. */
static bool is_droppable(const msc__fit_builder *b, const msc_save *save)
{
    const msc_buffer *buffer = &b->model->buffers[save->buffer];
    uint32_t c;

    for (c = save->call; c != MSC_NONE; c = b->model->calls[c].parent)
        if (b->is_region[c] && msc__save_is_internal(save, buffer, &b->model->regions[c]))
            return true;
    return false;
}

void msc__fit_count_holds(msc__fit_builder *b)
{
    const msc__model *model = b->model;
    int pass;
    uint32_t i;

    msc__buckets_init(&b->scratch, &b->saves_by_buffer, model->buffer_count);
    msc__buckets_init(&b->scratch, &b->holders, model->buffer_count);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < model->save_count; i++)
            msc__buckets_add(&b->saves_by_buffer, model->saves[i].buffer, i);
        for (i = 0; i < model->input_count; i++)
            if (b->is_region[model->inputs[i].call])
                msc__buckets_add(&b->holders, model->inputs[i].buffer, model->inputs[i].call);
        if (pass == 0) {
            msc__buckets_place(&b->scratch, &b->saves_by_buffer);
            msc__buckets_place(&b->scratch, &b->holders);
        }
    }
}

/* The latest end that no set can avoid. */
static uint32_t fixed_end(const msc__fit_builder *b, uint32_t buffer)
{
    uint32_t end = msc__natural_end(&b->model->buffers[buffer]);
    uint32_t i;

    for (i = b->saves_by_buffer.first[buffer]; i < b->saves_by_buffer.first[buffer + 1]; i++) {
        const msc_save *save = &b->model->saves[b->saves_by_buffer.items[i]];
        if (save->release > end && !is_droppable(b, save))
            end = save->release;
    }
    return end;
}

static msc_status push_hold(msc__fit_builder *b, uint32_t position, uint32_t call, msc__fit_hold_kind kind,
                            msc_error *err)
{
    msc__fit_hold hold = {
        .segment = msc__fit_slot_at(b, position), .call = call, .release = position, .kind = kind};

    return msc__array_push(b->scratch.ctx, &b->fit->holds, sizeof hold, &hold, err);
}

/* Latest first; equal ends in any fixed order. */
static int compare_holds(const void *left, const void *right)
{
    const msc__fit_hold *x = left;
    const msc__fit_hold *y = right;

    if (x->segment != y->segment)
        return x->segment > y->segment ? -1 : 1;
    if (x->kind != y->kind)
        return x->kind > y->kind ? -1 : 1;
    return (x->call > y->call) - (x->call < y->call);
}

static msc_status push_conditional_holds(msc__fit_builder *b, uint32_t buffer, uint32_t fixed, msc_error *err)
{
    const msc__model *model = b->model;
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = b->saves_by_buffer.first[buffer]; i < b->saves_by_buffer.first[buffer + 1] && status == MSC_OK;
         i++) {
        const msc_save *save = &model->saves[b->saves_by_buffer.items[i]];
        if (save->release > fixed)
            status = push_hold(b, save->release, save->call, MSC__FIT_SAVE, err);
    }
    for (i = b->holders.first[buffer]; i < b->holders.first[buffer + 1] && status == MSC_OK; i++) {
        uint32_t call = b->holders.items[i];
        if (model->regions[call].until > fixed)
            status = push_hold(b, model->regions[call].until, call, MSC__FIT_INPUT, err);
    }
    return status;
}

static msc_status add_buffer(msc__fit_builder *b, uint32_t buffer, uint32_t plain_end, msc_error *err)
{
    msc__fit *fit = b->fit;
    uint32_t first = fit->holds.count;
    uint32_t fixed = fixed_end(b, buffer);
    msc__fit_buffer added = {
        .size_bytes = msc__fit_size_of(b, buffer), .first_hold = first, .home = MSC_NONE};
    msc_status status;

    if (added.size_bytes == 0)
        return MSC_OK;
    status = push_conditional_holds(b, buffer, fixed, err);
    if (status != MSC_OK || fit->holds.count == first)
        return status;
    qsort((msc__fit_hold *)fit->holds.items + first, fit->holds.count - first, sizeof(msc__fit_hold),
          compare_holds);
    status = push_hold(b, fixed, MSC_NONE, MSC__FIT_ALWAYS, err);
    if (status != MSC_OK)
        return status;
    added.plain_end = msc__fit_slot_at(b, plain_end);
    added.end = added.plain_end;
    b->index_of[buffer] = fit->buffers.count + 1;
    return msc__array_push(b->scratch.ctx, &fit->buffers, sizeof added, &added, err);
}

msc_status msc__fit_add_buffers(msc__fit_builder *b, const uint32_t *plain_ends, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = 0; i < b->model->buffer_count && status == MSC_OK; i++)
        status = add_buffer(b, i, plain_ends[i], err);
    return status;
}

/* ---- points ------------------------------------------------------------------------------------ */

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

    return status == MSC_OK ? push_point(b, to, -bytes, err) : status;
}

/* Saves inside a region's call: those of the calls that it contains are consecutive. */
static void saves_inside(const msc__model *model, uint32_t call, uint32_t *first, uint32_t *end)
{
    *first = model->saves_by_call.first[call];
    *end = model->saves_by_call.first[model->last_call[call] + 1];
}

static void note_redo_ends(msc__fit_builder *b, uint32_t call, bool clear)
{
    const msc__model *model = b->model;
    uint32_t i;
    uint32_t end;

    for (saves_inside(model, call, &i, &end); i < end; i++) {
        const msc_save *save = &model->saves[model->saves_by_call.items[i]];
        if (!msc__save_is_internal(save, &model->buffers[save->buffer], &model->regions[call]))
            continue;
        if (clear)
            b->redo_end[save->buffer] = 0;
        else if (!msc__save_is_unused(save, model->op_count) && b->redo_end[save->buffer] < save->release)
            b->redo_end[save->buffer] = save->release;
    }
}

/* Runs the recompute and returns the most that it has alive of its own. */
static int64_t recompute_peak(msc__fit_builder *b, const msc__region *region)
{
    const msc__model *model = b->model;
    uint64_t live = 0;
    uint64_t peak = 0;
    uint32_t t;
    uint32_t i;

    for (t = region->begin; t < region->stop; t++) {
        uint64_t scratch_bytes = msc__model_bytes(model, model->ops[t].scratch_bytes);
        for (i = model->begins.first[t]; i < model->begins.first[t + 1]; i++) {
            uint32_t buffer = model->begins.items[i];
            uint32_t natural = msc__natural_end(&model->buffers[buffer]);
            live += (uint64_t)msc__fit_size_of(b, buffer);
            if (b->redo_end[buffer] == 0 && natural < region->stop)
                b->expire_bytes[natural] += (uint64_t)msc__fit_size_of(b, buffer);
        }
        if (live + scratch_bytes > peak)
            peak = live + scratch_bytes;
        live -= b->expire_bytes[t + 1];
        b->expire_bytes[t + 1] = 0;
    }
    return (int64_t)peak;
}

static msc_status push_held(msc__fit_builder *b, uint32_t call, msc_error *err)
{
    const msc__model *model = b->model;
    const msc__region *region = &model->regions[call];
    uint32_t slot = b->fit->redo_slot[call];
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

static msc_status add_points(msc__fit_builder *b, msc__fit_region *added, msc_error *err)
{
    const msc__model *model = b->model;
    const msc__region *region = &model->regions[added->call];
    uint64_t state_bytes = model->modules[model->calls[added->call].module].state_bytes;
    uint32_t slot = b->fit->redo_slot[added->call];
    msc_status status;

    added->first_point = b->fit->points.count;
    note_redo_ends(b, added->call, false);
    status = push_range(b, slot, slot + 1, recompute_peak(b, region), err);
    if (status == MSC_OK)
        status = push_held(b, added->call, err);
    if (status == MSC_OK)
        status = push_range(b, b->fit->op_slot[region->begin], msc__fit_slot_at(b, region->until),
                            (int64_t)msc__model_bytes(model, state_bytes), err);
    note_redo_ends(b, added->call, true);
    merge_points(b, added->first_point);
    added->point_count = b->fit->points.count - added->first_point;
    return status;
}

static msc_status touch(msc__fit_builder *b, uint32_t buffer, uint32_t stamp, msc_error *err)
{
    uint32_t index = b->index_of[buffer] - 1;

    if (b->index_of[buffer] == 0 || b->stamps[buffer] == stamp)
        return MSC_OK;
    b->stamps[buffer] = stamp;
    return msc__array_push(b->scratch.ctx, &b->fit->touches, sizeof index, &index, err);
}

static msc_status add_touches(msc__fit_builder *b, msc__fit_region *added, uint32_t stamp, msc_error *err)
{
    const msc__model *model = b->model;
    const msc__region *region = &model->regions[added->call];
    msc_status status = MSC_OK;
    uint32_t i;
    uint32_t end;

    added->first_touch = b->fit->touches.count;
    for (saves_inside(model, added->call, &i, &end); i < end && status == MSC_OK; i++) {
        const msc_save *save = &model->saves[model->saves_by_call.items[i]];
        if (msc__save_is_internal(save, &model->buffers[save->buffer], region))
            status = touch(b, save->buffer, stamp, err);
    }
    added->home_count = b->fit->touches.count - added->first_touch;
    return status;
}

/* First input of a call; inputs are sorted by call. */
static uint32_t first_input(const msc__model *model, uint32_t call)
{
    uint32_t low = 0;
    uint32_t high = model->input_count;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (model->inputs[middle].call < call)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

msc_status msc__fit_add_regions(msc__fit_builder *b, msc_error *err)
{
    const msc__model *model = b->model;
    msc_status status = MSC_OK;
    uint32_t r;
    uint32_t i;

    for (r = 0; r < model->region_count && status == MSC_OK; r++) {
        msc__fit_region *added = &b->fit->regions[r];
        added->call = model->region_calls[r];
        status = add_points(b, added, err);
        if (status == MSC_OK)
            status = add_touches(b, added, r + 1, err);
        for (i = first_input(model, added->call);
             i < model->input_count && model->inputs[i].call == added->call && status == MSC_OK; i++)
            status = touch(b, model->inputs[i].buffer, r + 1, err);
        added->touch_count = b->fit->touches.count - added->first_touch;
    }
    return status;
}
