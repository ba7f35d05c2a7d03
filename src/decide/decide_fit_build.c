/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Building the tables of decide_fit.c.
 *
 *      1. slots      where operations, possible recomputes and the end of the step lie
 *      2. plain      live bytes of the plain step, per slot
 *                    holds and points, at slots (decide_fit_lists.c)
 *      3. segments   slots between which no hold and no point lies become one
 *
 * Holds and points are written with slots; the last step turns slots into segments in place.
 *
 * Cost: operations + buffers + (saves + operations inside candidates) × nesting depth.
 */
#include "decide/decide_fit_build.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"

/* ---- 1. slots ------------------------------------------------------------------------------------- */

static void number_slots(msc__fit_builder *b, const msc__buckets *redos)
{
    uint32_t next = 1; /* slot 0: before the first operation */
    uint32_t p;
    uint32_t i;

    for (p = 0; p <= b->model->op_count; p++) {
        for (i = redos->first[p]; i < redos->first[p + 1]; i++)
            b->fit->redo_slot[redos->items[i]] = next++;
        b->fit->op_slot[p] = next++;
    }
    MSC__ASSERT(next == b->model->op_count + b->model->region_count + 2);
    b->fit->slot_count = next;
}

/* Of regions at one position the one with the later call comes first, as in a trace. */
static void lay_out_slots(msc__fit_builder *b)
{
    const msc__model *model = b->model;
    msc__buckets redos;
    int pass;
    uint32_t c;
    uint32_t i;

    msc__buckets_init(&b->scratch, &redos, model->op_count + 1);
    for (pass = 0; pass < 2; pass++) {
        for (c = model->call_count; c-- > 0;)
            for (i = b->by_call.first[c]; i < b->by_call.first[c + 1]; i++)
                msc__buckets_add(&redos, model->regions[b->by_call.items[i]].redo, b->by_call.items[i]);
        if (pass == 0)
            msc__buckets_place(&b->scratch, &redos);
    }
    if (b->scratch.failed_bytes == 0)
        number_slots(b, &redos);
}

static void find_owners(msc__fit_builder *b)
{
    const msc__model *model = b->model;
    int pass;
    uint32_t i;
    uint32_t r;

    for (i = 0; i < model->candidate_count; i++)
        for (r = 0; r < model->candidates[i].region_count; r++) {
            MSC__ASSERT(model->candidates[i].first_region + r < model->region_count);
            b->owner[model->candidates[i].first_region + r] = i;
        }
    msc__buckets_init(&b->scratch, &b->by_call, model->call_count);
    for (pass = 0; pass < 2; pass++) {
        for (r = 0; r < model->region_count; r++)
            msc__buckets_add(&b->by_call, model->regions[r].first_call, r);
        if (pass == 0)
            msc__buckets_place(&b->scratch, &b->by_call);
    }
    for (r = 0; r < model->region_count; r++)
        if (!model->regions[r].offload)
            b->is_region[model->regions[r].first_call] = 1;
    /* Of a run, saves may be dropped that none of its calls would drop alone. */
    for (r = 0; r < model->region_count; r++)
        if (msc__fit_owner(b, r)->is_run)
            for (i = model->regions[r].first_call; i <= model->regions[r].last_call; i++)
                b->is_region[i] = MSC__IN_RUN;
}

/* ---- 2. plain ------------------------------------------------------------------------------------- */

static void fill_live(msc__fit_builder *b, const uint32_t *plain_ends)
{
    const msc__model *model = b->model;
    int64_t live = 0;
    uint32_t i;

    for (i = 0; i < model->buffer_count; i++) {
        const msc_buffer *buffer = &model->buffers[i];
        b->live_bytes[buffer->resident ? 0 : b->fit->op_slot[buffer->begin]] += msc__fit_size_of(b, i);
        b->live_bytes[msc__fit_slot_at(b, plain_ends[i])] -= msc__fit_size_of(b, i);
    }
    for (i = 0; i < b->fit->slot_count; i++) {
        live += b->live_bytes[i];
        MSC__ASSERT(live >= 0);
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

/* ---- 3. segments ---------------------------------------------------------------------------------- */

static void mark_slots(msc__fit_builder *b)
{
    const msc__fit_hold *holds = b->fit->holds.items;
    const msc__fit_point *points = b->fit->points.items;
    uint32_t i;

    const msc__fit_point *away = b->fit->away.items;

    b->marks[0] = 1;
    for (i = 0; i < b->fit->away.count; i++)
        b->marks[away[i].segment] = 1;
    for (i = 0; i < b->fit->holds.count; i++)
        b->marks[holds[i].segment] = 1;
    for (i = 0; i < b->fit->points.count; i++)
        b->marks[points[i].segment] = 1;
}

static void number_segments(msc__fit_builder *b)
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
    MSC__ASSERT(fit->segment_count <= fit->slot_count);
    fit->block_count = (fit->segment_count + MSC__FIT_BLOCK - 1) / MSC__FIT_BLOCK;
}

static void slots_to_segments(msc__fit *fit)
{
    msc__fit_hold *holds = fit->holds.items;
    msc__fit_point *points = fit->points.items;
    msc__fit_point *away = fit->away.items;
    msc__fit_buffer *buffers = fit->buffers.items;
    uint32_t i;

    for (i = 0; i < fit->holds.count; i++)
        holds[i].segment = fit->segment_of[holds[i].segment];
    for (i = 0; i < fit->points.count; i++)
        points[i].segment = fit->segment_of[points[i].segment];
    for (i = 0; i < fit->away.count; i++)
        away[i].segment = fit->segment_of[away[i].segment];
    for (i = 0; i < fit->buffers.count; i++) {
        buffers[i].end = fit->segment_of[buffers[i].end];
        buffers[i].plain_end = buffers[i].end;
    }
}

static void fill_segments(msc__fit_builder *b)
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
        MSC__ASSERT(fit->base_bytes[i] >= 0);
        if ((uint64_t)fit->base_bytes[i] > fit->plain_peak_bytes) {
            fit->plain_peak_bytes = (uint64_t)fit->base_bytes[i];
            fit->plain_peak_segment = i;
        }
    }
    /* Sums of bytes × operations must stay within 64 bits. */
    while (b->model->most_bytes >> fit->excess_shift > UINT64_MAX / ((uint64_t)b->model->op_count + 1))
        fit->excess_shift++;
}

/* If every buffer went as early as any set could let it go, and nothing were recomputed: what is left is a
 * lower bound of any peak. Uses the changes of the fit, which are
 * zero before and after. */
static void find_floor(msc__fit *fit)
{
    const msc__fit_buffer *buffers = fit->buffers.items;
    const msc__fit_hold *holds = fit->holds.items;
    int64_t *freed_bytes = fit->delta_bytes;
    int64_t sum = 0;
    uint32_t i;

    for (i = 0; i < fit->buffers.count; i++) {
        const msc__fit_hold *hold = &holds[buffers[i].first_hold];
        while (hold->kind != MSC__FIT_ALWAYS)
            hold++;
        if (hold->segment >= buffers[i].plain_end)
            continue;
        MSC__ASSERT(hold->segment < fit->segment_count);
        freed_bytes[hold->segment] += buffers[i].size_bytes;
        if (buffers[i].plain_end < fit->segment_count)
            freed_bytes[buffers[i].plain_end] -= buffers[i].size_bytes;
    }
    for (i = 0; i < fit->segment_count; i++) {
        sum += freed_bytes[i];
        freed_bytes[i] = 0;
        if (fit->base_bytes[i] - sum > (int64_t)fit->floor_bytes)
            fit->floor_bytes = (uint64_t)(fit->base_bytes[i] - sum);
    }
}

static msc_status build_segments(msc__fit_builder *b, msc_error *err)
{
    msc__fit *fit = b->fit;
    msc__scratch *scratch = &fit->scratch;

    mark_slots(b);
    number_segments(b);
    fit->base_bytes = msc__scratch_take(scratch, fit->segment_count, sizeof *fit->base_bytes);
    fit->width = msc__scratch_take(scratch, fit->segment_count, sizeof *fit->width);
    fit->delta_bytes = msc__scratch_take(scratch, fit->segment_count, sizeof *fit->delta_bytes);
    if (fit->away.count > 0)
        fit->away_bytes = msc__scratch_take(scratch, fit->segment_count, sizeof *fit->away_bytes);
    fit->block_delta_bytes = msc__scratch_take(scratch, fit->block_count, sizeof *fit->block_delta_bytes);
    fit->block_peak_bytes = msc__scratch_take(scratch, fit->block_count, sizeof *fit->block_peak_bytes);
    fit->block_stale = msc__scratch_take(scratch, fit->block_count, sizeof *fit->block_stale);
    fit->block_excess = msc__scratch_take(scratch, fit->block_count, sizeof *fit->block_excess);
    if (scratch->failed_bytes > 0)
        return msc__scratch_check(scratch, "a decision", err);
    slots_to_segments(fit);
    fill_segments(b);
    find_floor(fit);
    MSC__ASSERT(fit->floor_bytes <= fit->plain_peak_bytes && fit->plain_peak_bytes <= b->model->most_bytes);
    return MSC_OK;
}

/* ---- all of it ------------------------------------------------------------------------------------ */

static msc_status take_arrays(msc__fit_builder *b, msc_error *err)
{
    const msc__model *model = b->model;
    msc__fit *fit = b->fit;
    size_t slots = (size_t)model->op_count + model->region_count + 3; /* one behind a recompute at the end */

    fit->op_slot = msc__scratch_take(&fit->scratch, (size_t)model->op_count + 1, sizeof *fit->op_slot);
    fit->redo_slot = msc__scratch_take(&fit->scratch, model->region_count, sizeof *fit->redo_slot);
    fit->segment_of = msc__scratch_take(&fit->scratch, slots, sizeof *fit->segment_of);
    fit->regions = msc__scratch_take(&fit->scratch, model->region_count, sizeof *fit->regions);
    fit->active = msc__scratch_take(&fit->scratch, model->region_count, sizeof *fit->active);
    b->live_bytes = msc__scratch_take(&b->scratch, slots, sizeof *b->live_bytes);
    b->marks = msc__scratch_take(&b->scratch, slots, sizeof *b->marks);
    b->is_region = msc__scratch_take(&b->scratch, model->call_count, sizeof *b->is_region);
    b->owner = msc__scratch_take(&b->scratch, model->region_count, sizeof *b->owner);
    b->index_of = msc__scratch_take(&b->scratch, model->buffer_count, sizeof *b->index_of);
    b->stamps = msc__scratch_take(&b->scratch, model->buffer_count, sizeof *b->stamps);
    b->redo_end = msc__scratch_take(&b->scratch, model->buffer_count, sizeof *b->redo_end);
    b->expire_bytes = msc__scratch_take(&b->scratch, (size_t)model->op_count + 2, sizeof *b->expire_bytes);
    if (fit->scratch.failed_bytes > 0)
        return msc__scratch_check(&fit->scratch, "a decision", err);
    if (b->scratch.failed_bytes > 0)
        return msc__scratch_check(&b->scratch, "a decision", err);
    find_owners(b);
    return msc__scratch_check(&b->scratch, "a decision", err);
}

/* Room for one of each, so that the arrays of a graph without candidates are empty rather than NULL. */
static msc_status open_lists(msc__fit_builder *b, msc_error *err)
{
    msc_context *ctx = b->scratch.ctx;
    msc__fit *fit = b->fit;
    msc_status status = msc__array_reserve(ctx, &fit->points, sizeof(msc__fit_point), 1, err);

    if (status == MSC_OK)
        status = msc__array_reserve(ctx, &fit->away, sizeof(msc__fit_point), 1, err);
    if (status == MSC_OK)
        status = msc__array_reserve(ctx, &fit->holds, sizeof(msc__fit_hold), 1, err);
    if (status == MSC_OK)
        status = msc__array_reserve(ctx, &fit->buffers, sizeof(msc__fit_buffer), 1, err);
    if (status == MSC_OK)
        status = msc__array_reserve(ctx, &fit->touches, sizeof(uint32_t), 1, err);
    return status;
}

static msc_status build(msc__fit_builder *b, msc_error *err)
{
    msc_status status = take_arrays(b, err);
    uint32_t *plain_ends;

    if (status == MSC_OK)
        status = open_lists(b, err);
    if (status != MSC_OK)
        return status;
    plain_ends = msc__scratch_take(&b->scratch, b->model->buffer_count, sizeof *plain_ends);
    lay_out_slots(b);
    msc__fit_count_holds(b);
    if (b->scratch.failed_bytes > 0)
        return msc__scratch_check(&b->scratch, "a decision", err);
    find_plain_ends(b->model, plain_ends);
    fill_live(b, plain_ends);
    status = msc__fit_add_buffers(b, plain_ends, err);
    if (status == MSC_OK)
        status = msc__fit_add_touches(b, err);
    if (status == MSC_OK)
        status = msc__fit_add_points(b, err);
    if (status == MSC_OK)
        status = build_segments(b, err);
    return status;
}

msc_status msc__fit_init(msc__fit *fit, const msc__model *model, msc_error *err)
{
    msc__fit_builder b = {.fit = fit, .model = model, .scratch = {.ctx = model->scratch.ctx}};
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
    msc__array_fini(ctx, &fit->away, sizeof(msc__fit_point));
    msc__array_fini(ctx, &fit->holds, sizeof(msc__fit_hold));
    msc__array_fini(ctx, &fit->buffers, sizeof(msc__fit_buffer));
    msc__array_fini(ctx, &fit->touches, sizeof(uint32_t));
    msc__scratch_fini(&fit->scratch);
}
