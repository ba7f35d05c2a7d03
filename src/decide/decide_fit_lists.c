/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What holds buffers, and which buffers regions touch, as lists that the fit walks along.
 *
 * A buffer's end is the latest of its natural end, the releases of the saves on it that are not dropped, and
 * the ends of the regions that hold it as an input, keep it or move it. Saves that no candidate can drop, and the
 * natural end, come down to one position, `fixed`; only later holds are listed, latest first, and the fixed
 * one last. A buffer without any later hold always ends there and is not listed at all:
 *
 *      natural  save X   save Y   input of R
 *         |        |        |         |           X cannot be dropped, Y can
 *         3        5        9        12     ->    12 if R is in, else 9 unless Y is dropped, else 5
 */
#include <stdlib.h>

#include "base/invariant.h"
#include "decide/decide_fit_build.h"

/* ---- holds ------------------------------------------------------------------------------------- */

/* Whether a candidate exists that would drop the save, or move it. */
static bool is_droppable(const msc__fit_builder *b, const msc_save *save)
{
    const msc_buffer *buffer = &b->model->buffers[save->buffer];
    uint32_t c;

    if (b->movers.first[save->buffer] < b->movers.first[save->buffer + 1])
        return true;
    for (c = save->call; c != MSC_NONE; c = b->model->calls[c].parent)
        if (b->is_region[c] == MSC__IN_RUN ||
            (b->is_region[c] != 0 && msc__save_is_internal(save, buffer, &b->model->call_regions[c])))
            return true;
    return false;
}

static const msc__moved *moves_of(const msc__fit_builder *b, uint32_t r)
{
    return b->model->moves + b->model->regions[r].first_move;
}

/* Whether a region holds an input of one of its outermost calls: it is made outside, and not moved. */
static bool holds(const msc__fit_builder *b, uint32_t r, uint32_t buffer)
{
    const msc__region *region = &b->model->regions[r];

    return !msc__is_made_inside(&b->model->buffers[buffer], region) &&
           !msc__moves_have(moves_of(b, r), region->move_count, buffer);
}

/* What the outermost calls of a region are given from outside. */
static void count_holders(msc__fit_builder *b, uint32_t r)
{
    const msc__model *model = b->model;
    const msc__region *region = &model->regions[r];
    uint32_t c;
    uint32_t i;

    for (c = region->first_call; c <= region->last_call && !region->offload; c = model->last_call[c] + 1)
        for (i = msc__first_input(model, c); i < model->input_count && model->inputs[i].call == c; i++)
            if (holds(b, r, model->inputs[i].buffer))
                msc__buckets_add(&b->holders, model->inputs[i].buffer, r);
}

static void count_keepers(msc__fit_builder *b, uint32_t r)
{
    const msc__model *model = b->model;
    const msc__region *region = &model->regions[r];
    const msc__candidate *owner = msc__fit_owner(b, r);
    uint32_t k;
    uint32_t i;

    for (k = 0; k < owner->kept_count; k++) {
        uint32_t op = region->begin + msc__kept_of(model, owner)[k];
        MSC__ASSERT(op < region->end);
        for (i = model->begins.first[op]; i < model->begins.first[op + 1]; i++)
            msc__buckets_add(&b->keepers, model->begins.items[i], r);
    }
}

static void count_movers(msc__fit_builder *b, uint32_t r)
{
    uint32_t i;

    for (i = 0; i < b->model->regions[r].move_count; i++)
        msc__buckets_add(&b->movers, moves_of(b, r)[i].buffer, r);
}

void msc__fit_count_holds(msc__fit_builder *b)
{
    const msc__model *model = b->model;
    int pass;
    uint32_t i;

    msc__buckets_init(&b->scratch, &b->saves_by_buffer, model->buffer_count);
    msc__buckets_init(&b->scratch, &b->holders, model->buffer_count);
    msc__buckets_init(&b->scratch, &b->keepers, model->buffer_count);
    msc__buckets_init(&b->scratch, &b->movers, model->buffer_count);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < model->save_count; i++)
            msc__buckets_add(&b->saves_by_buffer, model->saves[i].buffer, i);
        for (i = 0; i < model->region_count; i++) {
            count_holders(b, i);
            count_keepers(b, i);
            count_movers(b, i);
        }
        if (pass == 0) {
            msc__buckets_place(&b->scratch, &b->saves_by_buffer);
            msc__buckets_place(&b->scratch, &b->holders);
            msc__buckets_place(&b->scratch, &b->keepers);
            msc__buckets_place(&b->scratch, &b->movers);
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

static msc_status push_hold(msc__fit_builder *b, const msc__fit_hold *hold, msc_error *err)
{
    return msc__array_push(b->scratch.ctx, &b->fit->holds, sizeof *hold, hold, err);
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
    return (x->by > y->by) - (x->by < y->by);
}

static msc_status push_saves(msc__fit_builder *b, uint32_t buffer, uint32_t fixed, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = b->saves_by_buffer.first[buffer]; i < b->saves_by_buffer.first[buffer + 1] && status == MSC_OK;
         i++) {
        const msc_save *save = &b->model->saves[b->saves_by_buffer.items[i]];
        msc__fit_hold hold = {.segment = msc__fit_slot_at(b, save->release),
                              .by = save->call,
                              .release = save->release,
                              .kind = MSC__FIT_SAVE};
        if (save->release > fixed)
            status = push_hold(b, &hold, err);
    }
    return status;
}

/* The position up to which a region's copy out holds a buffer. */
static uint32_t settles_at(const msc__fit_builder *b, uint32_t r, uint32_t buffer)
{
    const msc__moved *moves = moves_of(b, r);
    uint32_t i = 0;

    while (moves[i].buffer != buffer)
        i++;
    MSC__ASSERT(i < b->model->regions[r].move_count);
    return moves[i].settle;
}

static msc_status push_movers(msc__fit_builder *b, uint32_t buffer, uint32_t fixed, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = b->movers.first[buffer]; i < b->movers.first[buffer + 1] && status == MSC_OK; i++) {
        uint32_t r = b->movers.items[i];
        uint32_t settle = settles_at(b, r, buffer);
        msc__fit_hold hold = {.segment = msc__fit_slot_at(b, settle), .by = r, .kind = MSC__FIT_REGION};
        if (settle > fixed)
            status = push_hold(b, &hold, err);
    }
    return status;
}

/* Regions that hold a buffer as an input do so up to a position; those that keep it, behind their recompute.
 */
static msc_status push_regions(msc__fit_builder *b, uint32_t buffer, uint32_t fixed, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = b->holders.first[buffer]; i < b->holders.first[buffer + 1] && status == MSC_OK; i++) {
        uint32_t r = b->holders.items[i];
        uint32_t until = b->model->regions[r].until;
        msc__fit_hold hold = {.segment = msc__fit_slot_at(b, until), .by = r, .kind = MSC__FIT_REGION};
        if (until > fixed)
            status = push_hold(b, &hold, err);
    }
    for (i = b->keepers.first[buffer]; i < b->keepers.first[buffer + 1] && status == MSC_OK; i++) {
        uint32_t r = b->keepers.items[i];
        msc__fit_hold hold = {.segment = b->fit->redo_slot[r] + 1, .by = r, .kind = MSC__FIT_REGION};
        if (hold.segment > msc__fit_slot_at(b, fixed))
            status = push_hold(b, &hold, err);
    }
    return status;
}

static msc_status add_buffer(msc__fit_builder *b, uint32_t buffer, uint32_t plain_end, msc_error *err)
{
    msc__fit *fit = b->fit;
    uint32_t first = fit->holds.count;
    uint32_t fixed = fixed_end(b, buffer);
    msc__fit_buffer added = {
        .size_bytes = msc__fit_size_of(b, buffer), .first_hold = first, .home = MSC_NONE, .mover = MSC_NONE};
    msc__fit_hold always = {.by = MSC_NONE, .kind = MSC__FIT_ALWAYS};
    msc_status status;

    if (added.size_bytes == 0)
        return MSC_OK;
    status = push_saves(b, buffer, fixed, err);
    if (status == MSC_OK)
        status = push_regions(b, buffer, fixed, err);
    if (status == MSC_OK)
        status = push_movers(b, buffer, fixed, err);
    if (status != MSC_OK || fit->holds.count == first)
        return status;
    qsort((msc__fit_hold *)fit->holds.items + first, fit->holds.count - first, sizeof(msc__fit_hold),
          compare_holds);
    always.segment = msc__fit_slot_at(b, fixed);
    MSC__ASSERT(((const msc__fit_hold *)fit->holds.items)[fit->holds.count - 1].segment > always.segment);
    MSC__ASSERT(plain_end >= fixed);
    status = push_hold(b, &always, err);
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

/* ---- touches ----------------------------------------------------------------------------------- */

static msc_status touch(msc__fit_builder *b, uint32_t buffer, uint32_t stamp, msc_error *err)
{
    uint32_t index = b->index_of[buffer] - 1;

    if (b->index_of[buffer] == 0 || b->stamps[buffer] == stamp)
        return MSC_OK;
    b->stamps[buffer] = stamp;
    return msc__array_push(b->scratch.ctx, &b->fit->touches, sizeof index, &index, err);
}

/* Buffers whose saves the region drops, first; an offload drops none. */
static msc_status touch_dropped(msc__fit_builder *b, uint32_t r, msc_error *err)
{
    const msc__model *model = b->model;
    const msc__region *region = &model->regions[r];
    msc_status status = MSC_OK;
    uint32_t i;

    if (region->offload)
        return MSC_OK;
    for (i = model->saves_by_call.first[region->first_call];
         i < model->saves_by_call.first[region->last_call + 1] && status == MSC_OK; i++) {
        const msc_save *save = &model->saves[model->saves_by_call.items[i]];
        if (msc__save_is_internal(save, &model->buffers[save->buffer], region) &&
            !msc__fit_keeps(b, r, save->buffer))
            status = touch(b, save->buffer, r + 1, err);
    }
    return status;
}

static msc_status touch_moved(msc__fit_builder *b, uint32_t r, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = 0; i < b->model->regions[r].move_count && status == MSC_OK; i++)
        status = touch(b, moves_of(b, r)[i].buffer, r + 1, err);
    return status;
}

/* Buffers that it holds: inputs, and what it keeps. */
static msc_status touch_held(msc__fit_builder *b, uint32_t r, msc_error *err)
{
    const msc__model *model = b->model;
    const msc__region *region = &model->regions[r];
    const msc__candidate *owner = msc__fit_owner(b, r);
    msc_status status = MSC_OK;
    uint32_t c;
    uint32_t i;
    uint32_t k;

    for (c = region->first_call; c <= region->last_call && !region->offload; c = model->last_call[c] + 1)
        for (i = msc__first_input(model, c);
             i < model->input_count && model->inputs[i].call == c && status == MSC_OK; i++)
            if (holds(b, r, model->inputs[i].buffer))
                status = touch(b, model->inputs[i].buffer, r + 1, err);
    for (k = 0; k < owner->kept_count; k++) {
        uint32_t op = region->begin + msc__kept_of(model, owner)[k];
        for (i = model->begins.first[op]; i < model->begins.first[op + 1] && status == MSC_OK; i++)
            status = touch(b, model->begins.items[i], r + 1, err);
    }
    return status;
}

msc_status msc__fit_add_touches(msc__fit_builder *b, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t r;

    for (r = 0; r < b->model->region_count && status == MSC_OK; r++) {
        msc__fit_region *added = &b->fit->regions[r];
        added->first_touch = b->fit->touches.count;
        status = touch_dropped(b, r, err);
        added->home_count = b->fit->touches.count - added->first_touch;
        if (status == MSC_OK)
            status = touch_moved(b, r, err);
        added->moved_count = b->fit->touches.count - added->first_touch - added->home_count;
        if (status == MSC_OK)
            status = touch_held(b, r, err);
        added->touch_count = b->fit->touches.count - added->first_touch;
    }
    return status;
}
