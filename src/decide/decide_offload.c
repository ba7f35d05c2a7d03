/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Offloads: what may leave the device, of what a module saves and of what a checkpoint holds.
 *
 * A storage is worth moving only if nothing but the module needs it in between. Whether that is so must not depend
 * on what else a plan does, so that what a candidate frees and costs is its own:
 *
 *      moves      activations of `least_bytes` and more, all of whose saves are packed inside the call, that
 *                 nobody holds when they come back, and that nobody changes between their copy out and their last
 *                 use: the copy would be another value than plain PyTorch sees, or hides that it fails
 *      stays      parameters, buffers of modules, inputs of the step, everything that is resident; what is saved by
 *                 another call, too, or named by the program until backward
 *
 * A boundary is an input that no call outside the region is given, too: each of them would hold it.
 *
 * What is moved is named by ordinals (msc_plan_move), the same for each call of a module. So what does not hold for
 * one call does for none: ordinals are struck off until all that are left may move, in every call.
 *
 *      saves of call 1   0 1 2 3 4        2 is a parameter, 3 changes: struck off
 *      saves of call 2   0 1 2 3 4        1 is saved by another module, too: struck off
 *      moved             0       4
 *
 * A module that must not run twice can be offloaded all the same, for it runs once. Cost: the saves and inputs of all
 * candidates, × log.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "decide/decide_survey.h"

/* A module that moves more pieces than this in a step is a model rather than a block: where the modules inside it move
 * nearly as much, it is left to them. */
#define MANY_PIECES 64u
/* Where there are more checkpoints than this, ways to move less than some share of what the module around moves are
 * left out, and so are the boundaries of checkpoints of single layers and of those that keep something. */
#define MANY_CHECKPOINTS 256u
#define LEAST_SHARE 4u

/* Working memory. */
typedef struct offloads {
    msc__model *model;
    const msc__survey *survey;
    msc__scratch scratch;
    uint32_t *save_count;  /* per buffer: its saves */
    msc__buckets input_of; /* calls by the buffer that they are given */
    uint32_t *place;       /* per buffer: its move, plus 1, while one region is looked at */
    uint32_t *noted;       /* per move: saves inside the region */
    msc__moved *moves;     /* of one region */
    uint32_t count;
    uint8_t *may_move;      /* per ordinal */
    uint64_t *bytes;        /* per module: what its offload moves */
    uint64_t *inside_bytes; /* per module: what the offloads of the modules in it move */
    uint32_t *pieces;       /* per module: in how many pieces */
    bool has_many;
    msc__region *regions;
} offloads;

/* ---- the moves of one region ----------------------------------------------------------------------- */

static void start(offloads *o, msc__moved move)
{
    MSC__ASSERT(o->place[move.buffer] == 0 && o->count < o->model->save_count + o->model->input_count);
    move.order = o->count;
    o->noted[o->count] = 0;
    o->moves[o->count++] = move;
    o->place[move.buffer] = o->count;
}

static void clear(offloads *o)
{
    while (o->count > 0)
        o->place[o->moves[--o->count].buffer] = 0;
}

static void list_saves(offloads *o, const msc__region *region)
{
    const msc__model *model = o->model;
    uint32_t ordinal = 0;
    uint32_t i;

    for (i = msc__first_save(model->graph, region->begin);
         i < model->save_count && model->saves[i].pack <= region->end; i++) {
        const msc_save *save = &model->saves[i];
        if (!msc__save_is_inside(save, region) || !o->may_move[ordinal++])
            continue;
        if (o->place[save->buffer] == 0)
            start(o, msc__move_of_save(model->graph, save));
        else
            msc__move_note(&o->moves[o->place[save->buffer] - 1], model->graph, save);
        o->noted[o->place[save->buffer] - 1]++;
    }
}

static void list_inputs(offloads *o, const msc__region *region)
{
    const msc__model *model = o->model;
    uint32_t ordinal = 0;
    uint32_t i;

    for (i = msc__first_input(model, region->first_call);
         i < model->input_count && model->inputs[i].call == region->first_call; i++)
        if (o->may_move[ordinal++])
            start(o, msc__move_of_input(model->graph, region, model->inputs[i].buffer));
    for (i = msc__first_save(model->graph, region->begin);
         i < model->save_count && model->saves[i].pack <= region->end; i++)
        if (msc__save_is_inside(&model->saves[i], region) && o->place[model->saves[i].buffer] > 0)
            o->noted[o->place[model->saves[i].buffer] - 1]++;
}

static void list_moves(offloads *o, const msc__region *region)
{
    const msc__model *model = o->model;
    const msc__move_limits limits =
        msc__move_limits_of(region, model->link.window_out_bytes, model->link.window_in_bytes);

    MSC__ASSERT(o->count == 0);
    if (region->offload)
        list_saves(o, region);
    else
        list_inputs(o, region);
    msc__moves_settle(o->moves, o->count, &limits);
}

/* ---- what may move --------------------------------------------------------------------------------- */

static bool contains(const msc__model *model, uint32_t call, uint32_t inner)
{
    return call <= inner && model->last_call[call] >= inner;
}

/* Whether a call that neither lies in the region nor around it is given the buffer. */
static bool is_given_to_others(const offloads *o, const msc__region *region, uint32_t buffer)
{
    uint32_t i;

    for (i = o->input_of.first[buffer]; i < o->input_of.first[buffer + 1]; i++) {
        uint32_t call = o->input_of.items[i];
        if ((call < region->first_call || call > region->last_call) &&
            !contains(o->model, call, region->first_call))
            return true;
    }
    return false;
}

static bool may_move(const offloads *o, const msc__region *region, const msc__moved *move)
{
    const msc__model *model = o->model;
    const msc_buffer *buffer = &model->buffers[move->buffer];

    MSC__ASSERT(move->order < o->count && o->noted[move->order] <= o->save_count[move->buffer]);
    if (buffer->resident || buffer->category != MSC_CATEGORY_ACTIVATION ||
        buffer->size_bytes < model->link.least_bytes || move->back == MSC_NONE ||
        o->noted[move->order] != o->save_count[move->buffer])
        return false;
    if (region->boundary && (buffer->begin >= region->begin || is_given_to_others(o, region, move->buffer)))
        return false;
    return msc__natural_end(buffer) < move->back && move->settle < move->back &&
           !msc__is_written(model, o->survey, move->buffer, move->put, move->release);
}

/* Strikes off the ordinals of what must stay. True if there was any. */
static bool strike(offloads *o, const msc__region *region)
{
    const msc__model *model = o->model;
    uint32_t ordinal = 0;
    bool struck = false;
    uint32_t i;

    list_moves(o, region);
    for (i = 0; i < o->count; i++)
        if (!may_move(o, region, &o->moves[i])) {
            o->place[o->moves[i].buffer] = MSC_NONE;
            struck = true;
        }
    if (region->offload) {
        for (i = msc__first_save(model->graph, region->begin);
             i < model->save_count && model->saves[i].pack <= region->end && struck; i++)
            if (msc__save_is_inside(&model->saves[i], region)) {
                if (o->place[model->saves[i].buffer] == MSC_NONE)
                    o->may_move[ordinal] = 0;
                ordinal++;
            }
    } else {
        for (i = msc__first_input(model, region->first_call);
             i < model->input_count && model->inputs[i].call == region->first_call && struck; i++, ordinal++)
            if (o->place[model->inputs[i].buffer] == MSC_NONE)
                o->may_move[ordinal] = 0;
    }
    clear(o);
    return struck;
}

/* Most saves, or inputs of its first call, that a region has. */
static uint32_t count_ordinals(const msc__model *model, const msc__region *region)
{
    uint32_t first;
    uint32_t last;

    if (region->offload)
        return model->saves_by_call.first[region->last_call + 1] -
               model->saves_by_call.first[region->first_call];
    first = msc__first_input(model, region->first_call);
    for (last = first; last < model->input_count && model->inputs[last].call == region->first_call; last++) {
    }
    return last - first;
}

/* ---- candidates ------------------------------------------------------------------------------------ */

static msc_status push_moves(offloads *o, msc__region *region, msc_error *err)
{
    msc__model *model = o->model;
    msc_status status = MSC_OK;
    uint32_t i;

    list_moves(o, region);
    region->first_move = model->move_list.count;
    region->move_count = o->count;
    for (i = 0; i < o->count && status == MSC_OK; i++)
        status = msc__array_push(model->scratch.ctx, &model->move_list, sizeof *o->moves, &o->moves[i], err);
    MSC__ASSERT(status != MSC_OK || region->first_move + region->move_count == model->move_list.count);
    model->moves = model->move_list.items;
    clear(o);
    return status;
}

static msc_status push_ordinals(offloads *o, uint32_t most, msc__candidate *added, msc_error *err)
{
    msc__model *model = o->model;
    msc_status status = MSC_OK;
    uint32_t i;

    added->first_moved = model->moved_list.count;
    for (i = 0; i < most && status == MSC_OK; i++)
        if (o->may_move[i])
            status = msc__array_push(model->scratch.ctx, &model->moved_list, sizeof i, &i, err);
    added->moved_count = model->moved_list.count - added->first_moved;
    model->moved = model->moved_list.items;
    return status;
}

/* Finds the ordinals of all that may move, of the regions in `o->regions`. Returns how many there are to look at. */
static uint32_t find_ordinals(offloads *o, uint32_t region_count)
{
    bool struck = true;
    uint32_t most = 0;
    uint32_t i;

    for (i = 0; i < region_count; i++) {
        uint32_t ordinals = count_ordinals(o->model, &o->regions[i]);
        most = ordinals > most ? ordinals : most;
    }
    memset(o->may_move, 1, most);
    while (struck) {
        struck = false;
        for (i = 0; i < region_count; i++)
            struck |= strike(o, &o->regions[i]);
    }
    return most;
}

/* Adds a candidate that moves what was found, if that is anything. Regions that move nothing are left out of an
 * offload. */
static msc_status add_candidate(offloads *o, msc__candidate *added, uint32_t region_count, msc_error *err)
{
    uint32_t most = find_ordinals(o, region_count);
    msc_status status = push_ordinals(o, most, added, err);
    uint32_t i;

    if (status != MSC_OK || added->moved_count == 0)
        return status;
    added->region_count = 0;
    for (i = 0; i < region_count && status == MSC_OK; i++) {
        status = push_moves(o, &o->regions[i], err);
        if (o->regions[i].move_count > 0 || !added->offload)
            o->regions[added->region_count++] = o->regions[i];
    }
    return status == MSC_OK ? msc__model_add(o->model, added, o->regions, err) : status;
}

/* Puts the candidate added last among the ways to treat a module. */
static void link_way(msc__model *model)
{
    uint32_t last = model->candidate_count - 1;
    msc__candidate *base = &model->candidates[model->candidates[last].base];

    MSC__ASSERT(model->candidates[last].base <= last);
    if (model->candidates[last].base == last)
        return;
    model->candidates[last].also = base->also;
    base->also = last;
}

static msc_status add_boundary(offloads *o, uint32_t candidate, msc_error *err)
{
    msc__model *model = o->model;
    msc__candidate added = model->candidates[candidate];
    uint32_t before = model->candidate_count;
    msc_status status;
    uint32_t i;

    for (i = 0; i < added.region_count; i++) {
        o->regions[i] = model->regions[added.first_region + i];
        o->regions[i].boundary = 1;
    }
    added.boundary = 1;
    added.next = candidate;
    added.also = MSC_NONE;
    status = add_candidate(o, &added, added.region_count, err);
    if (status == MSC_OK && model->candidate_count > before)
        link_way(model);
    return status;
}

/* Whether a module's calls lie in forward and nobody forbids to touch them. */
static bool may_offload(const offloads *o, uint32_t module)
{
    const msc__model *model = o->model;
    const msc__survey *s = o->survey;
    uint32_t i;

    if ((model->modules[module].flags &
         (MSC_MODULE_NO_FORWARD | MSC_MODULE_LEFT_OUT | MSC_MODULE_DIFFERED)) != 0)
        return false;
    for (i = s->calls.first[module]; i < s->calls.first[module + 1]; i++) {
        uint32_t call = s->calls.items[i];
        if ((s->flags[call] & MSC_MODULE_EXCLUDED) != 0 || model->calls[call].end > model->forward_end)
            return false;
    }
    return true;
}

/* The regions that an offload of a module would have. */
static uint32_t fill_regions(offloads *o, uint32_t module)
{
    const msc__model *model = o->model;
    const msc__survey *s = o->survey;
    uint32_t count = 0;
    uint32_t i;

    for (i = s->calls.first[module]; i < s->calls.first[module + 1]; i++) {
        uint32_t call = s->calls.items[i];
        MSC__ASSERT(count < model->call_count);
        o->regions[count] = msc__region_of_call(model->graph, call, model->last_call[call]);
        o->regions[count].state_bytes = 0;
        o->regions[count].redo = o->regions[count].end; /* it has none: any position will do */
        o->regions[count++].offload = 1;
    }
    return count;
}

static msc_status add_module(offloads *o, uint32_t module, msc_error *err)
{
    msc__model *model = o->model;
    msc__subject *subject = &model->subjects[module];
    msc__candidate added = {
        .module = module, .base = subject->candidate, .next = MSC_NONE, .also = MSC_NONE, .offload = 1};
    msc_status status = add_candidate(o, &added, fill_regions(o, module), err);

    if (status != MSC_OK)
        return status;
    subject->offload = model->candidate_count - 1;
    MSC__ASSERT(model->candidates[subject->offload].offload &&
                model->candidates[subject->offload].module == module);
    link_way(model);
    return MSC_OK;
}

/* ---- which modules --------------------------------------------------------------------------------- */

static void weigh_module(offloads *o, uint32_t module)
{
    uint32_t count = fill_regions(o, module);
    uint32_t i;
    uint32_t k;

    (void)find_ordinals(o, count);
    for (i = 0; i < count; i++) {
        list_moves(o, &o->regions[i]);
        o->pieces[module] += o->count;
        for (k = 0; k < o->count; k++)
            o->bytes[module] += o->moves[k].size_bytes;
        clear(o);
    }
}

static void weigh_modules(offloads *o)
{
    uint32_t m;

    for (m = 0; m < o->model->module_count; m++)
        if (may_offload(o, m))
            weigh_module(o, m);
    for (m = o->model->module_count; m-- > 0;) {
        uint32_t parent = o->model->modules[m].parent;
        MSC__ASSERT(parent == MSC_NONE || parent < m);
        if (parent != MSC_NONE)
            o->inside_bytes[parent] += o->bytes[m] > o->inside_bytes[m] ? o->bytes[m] : o->inside_bytes[m];
    }
}

/* What the nearest module around that moves anything, and is not left to those inside, moves. */
static uint64_t bytes_around(const offloads *o, uint32_t module)
{
    uint32_t m = o->model->modules[module].parent;

    while (m != MSC_NONE && (o->bytes[m] == 0 || o->pieces[m] > MANY_PIECES))
        m = o->model->modules[m].parent;
    return m == MSC_NONE ? 0 : o->bytes[m];
}

/* Whether a checkpoint runs more than one module again, all of it. */
static bool is_block(const msc__model *model, const msc__candidate *candidate)
{
    const msc__region *region = &model->regions[candidate->first_region];

    return candidate->kept_count == 0 && region->last_call > region->first_call;
}

static bool is_worth_it(const offloads *o, uint32_t module)
{
    uint64_t bytes = o->bytes[module];

    if (bytes == 0)
        return false;
    if (o->pieces[module] > MANY_PIECES && o->inside_bytes[module] >= bytes - bytes / 8)
        return false;
    return !o->has_many || bytes >= bytes_around(o, module) / LEAST_SHARE;
}

/* ---- all of it ------------------------------------------------------------------------------------- */

static msc_status prepare(offloads *o, msc_error *err)
{
    const msc__model *model = o->model;
    size_t most = (size_t)model->save_count + model->input_count;
    int pass;
    uint32_t i;

    o->save_count = msc__scratch_take(&o->scratch, model->buffer_count, sizeof *o->save_count);
    o->place = msc__scratch_take(&o->scratch, model->buffer_count, sizeof *o->place);
    o->noted = msc__scratch_take(&o->scratch, most, sizeof *o->noted);
    o->moves = msc__scratch_take(&o->scratch, most, sizeof *o->moves);
    o->may_move = msc__scratch_take(&o->scratch, most, sizeof *o->may_move);
    o->regions = msc__scratch_take(&o->scratch, model->call_count, sizeof *o->regions);
    o->bytes = msc__scratch_take(&o->scratch, model->module_count, sizeof *o->bytes);
    o->inside_bytes = msc__scratch_take(&o->scratch, model->module_count, sizeof *o->inside_bytes);
    o->pieces = msc__scratch_take(&o->scratch, model->module_count, sizeof *o->pieces);
    msc__buckets_init(&o->scratch, &o->input_of, model->buffer_count);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < model->input_count; i++)
            msc__buckets_add(&o->input_of, model->inputs[i].buffer, model->inputs[i].call);
        if (pass == 0)
            msc__buckets_place(&o->scratch, &o->input_of);
    }
    if (o->scratch.failed_bytes > 0)
        return msc__scratch_check(&o->scratch, "offloads", err);
    for (i = 0; i < model->save_count; i++)
        o->save_count[model->saves[i].buffer]++;
    return MSC_OK;
}

msc_status msc__model_add_offloads(msc__model *model, const msc__survey *s, const msc_decide_options *options,
                                   msc_error *err)
{
    offloads o = {.model = model, .survey = s, .scratch = {.ctx = model->scratch.ctx}};
    uint32_t checkpoints = options->allow_checkpoint ? model->candidate_count : 0;
    msc_status status = prepare(&o, err);
    uint32_t i;

    o.has_many = model->candidate_count > MANY_CHECKPOINTS;
    for (i = 0; i < checkpoints && status == MSC_OK; i++)
        if (!o.has_many || is_block(model, &model->candidates[i]))
            status = add_boundary(&o, i, err);
    if (status == MSC_OK)
        weigh_modules(&o);
    for (i = 0; i < model->module_count && status == MSC_OK; i++)
        if (is_worth_it(&o, i))
            status = add_module(&o, i, err);
    msc__scratch_fini(&o.scratch);
    return status;
}
