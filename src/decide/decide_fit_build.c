/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Building the tables of decide_fit.c.
 *
 *      1. slots      where operations, possible recomputes and the end of the step lie
 *      2. plain      live bytes of the plain step, per slot
 *      3. holds      for each buffer whose end a set can change: what may end it late
 *      4. points     for each region: its fixed changes, at slots
 *      5. segments   slots between which no hold and no point lies become one
 *
 * Steps 3 and 4 write slots and mark them; step 5 turns slots into segments in place. A position p begins at
 * the slot after operation p - 1: frees of that position have happened there, recomputes and operation p have
 * not.
 *
 * Cost: operations + buffers + (saves + operations inside candidates) × nesting depth.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "decide/decide_internal.h"

/* Working arrays, gone when the tables are built. */
typedef struct builder {
    msc__fit *fit;
    const msc__model *model;
    msc__scratch scratch;
    int64_t *live_bytes;          /* per slot */
    uint8_t *marks;               /* per slot: a segment begins here */
    uint8_t *is_region;           /* per call: it is a candidate's */
    uint32_t *index_of;           /* per buffer: in fit->buffers, plus 1; 0: its end is fixed */
    uint32_t *stamps;             /* per buffer: last region that listed it, plus 1 */
    uint32_t *redo_end;           /* per buffer: while one region is looked at */
    uint64_t *expire_bytes;       /* per position: likewise */
    msc__buckets saves_by_buffer; /* saves that a region could drop or that outlast the natural end */
    msc__buckets holders;         /* regions that have the buffer as an input, by buffer */
} builder;

static uint32_t slot_at(const builder *b, uint32_t position)
{
    return position == 0 ? 1 : b->fit->op_slot[position - 1] + 1;
}

static int64_t size_of(const builder *b, uint32_t buffer)
{
    return (int64_t)msc__model_bytes(b->model, b->model->buffers[buffer].size_bytes);
}

/* ---- 1. slots ------------------------------------------------------------------------------------- */

static void number_slots(builder *b, const msc__buckets *redos)
{
    uint32_t next = 1; /* slot 0: before the first operation */
    uint32_t p;
    uint32_t i;

    for (p = 0; p <= b->model->op_count; p++) {
        for (i = redos->first[p]; i < redos->first[p + 1]; i++)
            b->fit->redo_slot[redos->items[i]] = next++;
        b->fit->op_slot[p] = next++;
    }
    b->fit->slot_count = next;
}

static void lay_out_slots(builder *b)
{
    const msc__model *model = b->model;
    msc__buckets redos;
    int pass;
    uint32_t c;

    msc__buckets_init(&b->scratch, &redos, model->op_count + 1);
    for (pass = 0; pass < 2; pass++) {
        for (c = model->call_count; c-- > 0;) /* the later call first */
            if (b->is_region[c])
                msc__buckets_add(&redos, model->regions[c].redo, c);
        if (pass == 0)
            msc__buckets_place(&b->scratch, &redos);
    }
    if (b->scratch.failed_bytes == 0)
        number_slots(b, &redos);
}

/* ---- 2. plain ------------------------------------------------------------------------------------- */

static void fill_live(builder *b, const uint32_t *plain_ends)
{
    const msc__model *model = b->model;
    int64_t live = 0;
    uint32_t i;

    for (i = 0; i < model->buffer_count; i++) {
        const msc_buffer *buffer = &model->buffers[i];
        b->live_bytes[buffer->resident ? 0 : b->fit->op_slot[buffer->begin]] += size_of(b, i);
        b->live_bytes[slot_at(b, plain_ends[i])] -= size_of(b, i);
    }
    for (i = 0; i < b->fit->slot_count; i++) {
        live += b->live_bytes[i];
        b->live_bytes[i] = live;
    }
    for (i = 0; i < model->op_count; i++)
        b->live_bytes[b->fit->op_slot[i]] += (int64_t)msc__model_bytes(model, model->ops[i].scratch_bytes);
}

static void find_plain_ends(const msc__model *model, uint32_t *ends)
{
    uint32_t i;

    for (i = 0; i < model->buffer_count; i++)
        ends[i] = msc__natural_end(&model->buffers[i]);
    for (i = 0; i < model->save_count; i++)
        if (ends[model->saves[i].buffer] < model->saves[i].release)
            ends[model->saves[i].buffer] = model->saves[i].release;
}

/* ---- 3. holds ------------------------------------------------------------------------------------- */

/* Whether a candidate exists that would drop the save. */
static bool is_droppable(const builder *b, const msc_save *save)
{
    const msc_buffer *buffer = &b->model->buffers[save->buffer];
    uint32_t c;

    for (c = save->call; c != MSC_NONE; c = b->model->calls[c].parent)
        if (b->is_region[c] && msc__save_is_internal(save, buffer, &b->model->regions[c]))
            return true;
    return false;
}

static void fill_hold_buckets(builder *b)
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
static uint32_t fixed_end(const builder *b, uint32_t buffer)
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

static msc_status push_hold(builder *b, uint32_t position, uint32_t call, msc__fit_hold_kind kind,
                            msc_error *err)
{
    msc__fit_hold hold = {.segment = slot_at(b, position), .call = call, .release = position, .kind = kind};

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

static msc_status push_conditional_holds(builder *b, uint32_t buffer, uint32_t fixed, msc_error *err)
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

static msc_status add_buffer(builder *b, uint32_t buffer, uint32_t plain_end, msc_error *err)
{
    msc__fit *fit = b->fit;
    uint32_t first = fit->holds.count;
    uint32_t fixed = fixed_end(b, buffer);
    msc__fit_buffer added = {.size_bytes = size_of(b, buffer), .first_hold = first, .home = MSC_NONE};
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
    added.plain_end = slot_at(b, plain_end);
    added.end = added.plain_end;
    b->index_of[buffer] = fit->buffers.count + 1;
    return msc__array_push(b->scratch.ctx, &fit->buffers, sizeof added, &added, err);
}

static msc_status add_buffers(builder *b, const uint32_t *plain_ends, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = 0; i < b->model->buffer_count && status == MSC_OK; i++)
        status = add_buffer(b, i, plain_ends[i], err);
    return status;
}

/* ---- 4. points ------------------------------------------------------------------------------------ */

static msc_status push_point(builder *b, uint32_t slot, int64_t delta_bytes, msc_error *err)
{
    msc__fit_point point = {.segment = slot, .delta_bytes = delta_bytes};

    if (delta_bytes == 0)
        return MSC_OK;
    return msc__array_push(b->scratch.ctx, &b->fit->points, sizeof point, &point, err);
}

static msc_status push_range(builder *b, uint32_t from, uint32_t to, int64_t bytes, msc_error *err)
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

static void note_redo_ends(builder *b, uint32_t call, bool clear)
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
static int64_t recompute_peak(builder *b, const msc__region *region)
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
            live += (uint64_t)size_of(b, buffer);
            if (b->redo_end[buffer] == 0 && natural < region->stop)
                b->expire_bytes[natural] += (uint64_t)size_of(b, buffer);
        }
        if (live + scratch_bytes > peak)
            peak = live + scratch_bytes;
        live -= b->expire_bytes[t + 1];
        b->expire_bytes[t + 1] = 0;
    }
    return (int64_t)peak;
}

static msc_status push_held(builder *b, uint32_t call, msc_error *err)
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
            status = push_range(b, slot + 1, slot_at(b, b->redo_end[buffer]), size_of(b, buffer), err);
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
static void merge_points(builder *b, uint32_t first)
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

static msc_status add_points(builder *b, msc__fit_region *added, msc_error *err)
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
        status = push_range(b, b->fit->op_slot[region->begin], slot_at(b, region->until),
                            (int64_t)msc__model_bytes(model, state_bytes), err);
    note_redo_ends(b, added->call, true);
    merge_points(b, added->first_point);
    added->point_count = b->fit->points.count - added->first_point;
    return status;
}

static msc_status touch(builder *b, uint32_t buffer, uint32_t stamp, msc_error *err)
{
    uint32_t index = b->index_of[buffer] - 1;

    if (b->index_of[buffer] == 0 || b->stamps[buffer] == stamp)
        return MSC_OK;
    b->stamps[buffer] = stamp;
    return msc__array_push(b->scratch.ctx, &b->fit->touches, sizeof index, &index, err);
}

static msc_status add_touches(builder *b, msc__fit_region *added, uint32_t stamp, msc_error *err)
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

static msc_status add_regions(builder *b, msc_error *err)
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

/* ---- 5. segments ---------------------------------------------------------------------------------- */

static void mark_slots(builder *b)
{
    const msc__fit_hold *holds = b->fit->holds.items;
    const msc__fit_point *points = b->fit->points.items;
    uint32_t i;

    b->marks[0] = 1;
    for (i = 0; i < b->fit->holds.count; i++)
        b->marks[holds[i].segment] = 1;
    for (i = 0; i < b->fit->points.count; i++)
        b->marks[points[i].segment] = 1;
}

static void number_segments(builder *b)
{
    msc__fit *fit = b->fit;
    uint32_t segment = 0;
    uint32_t i;

    for (i = 0; i < fit->slot_count; i++) {
        segment += i > 0 && b->marks[i];
        fit->segment_of[i] = segment;
    }
    fit->segment_count = segment + 1;
    fit->segment_of[fit->slot_count] = fit->segment_count;
    fit->block_count = (fit->segment_count + MSC__FIT_BLOCK - 1) / MSC__FIT_BLOCK;
}

static void slots_to_segments(msc__fit *fit)
{
    msc__fit_hold *holds = fit->holds.items;
    msc__fit_point *points = fit->points.items;
    msc__fit_buffer *buffers = fit->buffers.items;
    uint32_t i;

    for (i = 0; i < fit->holds.count; i++)
        holds[i].segment = fit->segment_of[holds[i].segment];
    for (i = 0; i < fit->points.count; i++)
        points[i].segment = fit->segment_of[points[i].segment];
    for (i = 0; i < fit->buffers.count; i++) {
        buffers[i].end = fit->segment_of[buffers[i].end];
        buffers[i].plain_end = buffers[i].end;
    }
}

static void fill_segments(builder *b)
{
    msc__fit *fit = b->fit;
    uint32_t i;

    for (i = 0; i < fit->slot_count; i++) {
        uint32_t segment = fit->segment_of[i];
        if (fit->base_bytes[segment] < b->live_bytes[i])
            fit->base_bytes[segment] = b->live_bytes[i];
    }
    for (i = 0; i < b->model->op_count; i++)
        fit->width[fit->segment_of[fit->op_slot[i]]]++;
    for (i = 0; i < fit->block_count; i++)
        fit->block_stale[i] = 1;
    for (i = 0; i < fit->segment_count; i++) {
        if ((uint64_t)fit->base_bytes[i] > fit->plain_peak_bytes) {
            fit->plain_peak_bytes = (uint64_t)fit->base_bytes[i];
            fit->plain_peak_segment = i;
        }
    }
    /* Sums of bytes × operations must stay within 64 bits. */
    while (b->model->most_bytes >> fit->excess_shift > UINT64_MAX / ((uint64_t)b->model->op_count + 1))
        fit->excess_shift++;
}

static msc_status build_segments(builder *b, msc_error *err)
{
    msc__fit *fit = b->fit;
    msc__scratch *scratch = &fit->scratch;

    mark_slots(b);
    number_segments(b);
    fit->base_bytes = msc__scratch_take(scratch, fit->segment_count, sizeof *fit->base_bytes);
    fit->width = msc__scratch_take(scratch, fit->segment_count, sizeof *fit->width);
    fit->delta_bytes = msc__scratch_take(scratch, fit->segment_count, sizeof *fit->delta_bytes);
    fit->block_delta_bytes = msc__scratch_take(scratch, fit->block_count, sizeof *fit->block_delta_bytes);
    fit->block_peak_bytes = msc__scratch_take(scratch, fit->block_count, sizeof *fit->block_peak_bytes);
    fit->block_stale = msc__scratch_take(scratch, fit->block_count, sizeof *fit->block_stale);
    if (scratch->failed_bytes > 0)
        return msc__scratch_check(scratch, "a decision", err);
    slots_to_segments(fit);
    fill_segments(b);
    return MSC_OK;
}

/* ---- all of it ------------------------------------------------------------------------------------ */

static msc_status take_arrays(builder *b, msc_error *err)
{
    const msc__model *model = b->model;
    msc__fit *fit = b->fit;
    size_t slots = (size_t)model->op_count + model->region_count + 3;
    uint32_t i;

    fit->op_slot = msc__scratch_take(&fit->scratch, (size_t)model->op_count + 1, sizeof *fit->op_slot);
    fit->redo_slot = msc__scratch_take(&fit->scratch, model->call_count, sizeof *fit->redo_slot);
    fit->segment_of = msc__scratch_take(&fit->scratch, slots, sizeof *fit->segment_of);
    fit->regions = msc__scratch_take(&fit->scratch, model->region_count, sizeof *fit->regions);
    fit->active = msc__scratch_take(&fit->scratch, model->call_count, sizeof *fit->active);
    b->live_bytes = msc__scratch_take(&b->scratch, slots, sizeof *b->live_bytes);
    b->marks = msc__scratch_take(&b->scratch, slots, sizeof *b->marks);
    b->is_region = msc__scratch_take(&b->scratch, model->call_count, sizeof *b->is_region);
    b->index_of = msc__scratch_take(&b->scratch, model->buffer_count, sizeof *b->index_of);
    b->stamps = msc__scratch_take(&b->scratch, model->buffer_count, sizeof *b->stamps);
    b->redo_end = msc__scratch_take(&b->scratch, model->buffer_count, sizeof *b->redo_end);
    b->expire_bytes = msc__scratch_take(&b->scratch, (size_t)model->op_count + 2, sizeof *b->expire_bytes);
    if (fit->scratch.failed_bytes > 0)
        return msc__scratch_check(&fit->scratch, "a decision", err);
    if (b->scratch.failed_bytes > 0)
        return msc__scratch_check(&b->scratch, "a decision", err);
    for (i = 0; i < model->region_count; i++)
        b->is_region[model->region_calls[i]] = 1;
    return MSC_OK;
}

static msc_status build(builder *b, msc_error *err)
{
    msc_status status = take_arrays(b, err);
    uint32_t *plain_ends;

    if (status != MSC_OK)
        return status;
    plain_ends = msc__scratch_take(&b->scratch, b->model->buffer_count, sizeof *plain_ends);
    lay_out_slots(b);
    fill_hold_buckets(b);
    if (b->scratch.failed_bytes > 0)
        return msc__scratch_check(&b->scratch, "a decision", err);
    find_plain_ends(b->model, plain_ends);
    fill_live(b, plain_ends);
    status = add_buffers(b, plain_ends, err);
    if (status == MSC_OK)
        status = add_regions(b, err);
    if (status == MSC_OK)
        status = build_segments(b, err);
    return status;
}

msc_status msc__fit_init(msc__fit *fit, const msc__model *model, msc_error *err)
{
    builder b = {.fit = fit, .model = model, .scratch = {.ctx = model->scratch.ctx}};
    msc_status status;

    *fit = (msc__fit){.scratch = {.ctx = model->scratch.ctx}, .model = model};
    status = build(&b, err);
    msc__scratch_fini(&b.scratch);
    return status;
}

void msc__fit_fini(msc__fit *fit)
{
    msc_context *ctx = fit->scratch.ctx;

    if (ctx == NULL)
        return;
    msc__array_fini(ctx, &fit->points, sizeof(msc__fit_point));
    msc__array_fini(ctx, &fit->holds, sizeof(msc__fit_hold));
    msc__array_fini(ctx, &fit->buffers, sizeof(msc__fit_buffer));
    msc__array_fini(ctx, &fit->touches, sizeof(uint32_t));
    msc__scratch_fini(&fit->scratch);
}
