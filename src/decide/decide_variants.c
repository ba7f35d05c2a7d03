/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Variants: ways to checkpoint a module and keep the outputs of some of its operations.
 *
 * Keeping what an operation makes costs its bytes and saves its time. Nothing else in the region changes, so
 * the best set for any price of a byte is found by sorting: all operations that save more time per byte than
 * the price. Taken one by one in that order they draw a curve, from "keep nothing" to "keep all":
 *
 *      time saved                        . - - - - - o   all
 *                          . - - - o                     + element-wise
 *                   . o                                  + small products
 *               o                                        + attention
 *          o                                             nothing
 *          |-----------------------------------------> bytes kept
 *
 * Few of its points are worth a candidate. Those are taken that lie farthest off the line through their taken
 * neighbours, one after another, which finds the corners. The set that suits a budget is a mixture of
 * neighbouring points over blocks, which the search makes.
 *
 * An operation can be kept if it makes something and changes nothing, is not random (a recompute would then
 * draw other numbers behind it), is no cast (autocast remembers casts, so the recompute may have fewer), and if
 * nothing changes what it made before the recompute. A module that is called several times has variants if its calls run the
 * same operations.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "decide/decide_cost.h"
#include "decide/decide_survey.h"

#define MOST_VARIANTS 6u
#define MOST_OPERATIONS 1024u /* of a region: larger ones are a model rather than a block */
#define LEAST_GAIN_SHIFT 5    /* a variant must save 1/32 of the recompute */
#define LEAST_TIME_SHIFT 8    /* an operation that is kept, 1/256 */

/* An operation that can be kept. */
typedef struct item {
    uint64_t bytes;
    int64_t time_ns;
    uint32_t offset;
} item;

/* Working memory of one call. */
typedef struct variants {
    msc__model *model;
    const msc__survey *survey;
    msc__scratch scratch;
    item *items;
    uint32_t count;
    uint64_t *bytes;   /* per prefix 0 … count: sums */
    int64_t *times;    /* per prefix */
    uint8_t *is_taken; /* per prefix */
    uint32_t *offsets;
    msc__region *regions;
} variants;

/* ---- what can be kept ------------------------------------------------------------------------------ */

static bool is_cast(const msc__model *model, uint32_t op)
{
    const char *name = msc_graph_string(model->graph, model->ops[op].name);

    return strncmp(name, "_to_copy", 8) == 0;
}

/* Whether an operation changes anything in place, if only running statistics: it must be recomputed then. */
static bool changes_anything(const msc__model *model, uint32_t op)
{
    uint32_t write = msc__first_write(model, op);

    return write < model->write_count && model->writes[write].op == op;
}

/* Adds the bytes that keeping an operation's outputs would hold; false if it cannot be kept. */
static bool weigh_outputs(const variants *v, const msc__region *region, uint32_t op, uint64_t *bytes)
{
    const msc__model *model = v->model;
    bool makes = false;
    uint32_t i;

    for (i = model->begins.first[op]; i < model->begins.first[op + 1]; i++) {
        const msc_buffer *buffer = &model->buffers[model->begins.items[i]];
        if (msc__is_written(model, v->survey, model->begins.items[i], op + 1, region->redo))
            return false;
        makes |= buffer->size_bytes > 0;
        if (msc__natural_end(buffer) < region->redo)
            *bytes += msc__model_bytes(model, buffer->size_bytes);
    }
    return makes;
}

static bool weigh_operation(const variants *v, const msc__candidate *candidate, uint32_t offset, item *out)
{
    const msc__model *model = v->model;
    uint32_t i;

    *out = (item){.offset = offset};
    for (i = 0; i < candidate->region_count; i++) {
        const msc__region *region = &model->regions[candidate->first_region + i];
        uint32_t op = region->begin + offset;
        MSC__ASSERT(op < region->stop);
        if ((model->ops[op].flags & MSC_OP_RANDOM) != 0 || is_cast(model, op) ||
            changes_anything(model, op) || !weigh_outputs(v, region, op, &out->bytes))
            return false;
        out->time_ns += model->time_before_ns[op + 1] - model->time_before_ns[op];
    }
    return true;
}

/* Most time per byte first; what costs no bytes before all. */
static int compare_items(const void *left, const void *right)
{
    const item *a = left;
    const item *b = right;
    int order;

    if (a->bytes == 0 || b->bytes == 0) {
        if ((a->bytes == 0) != (b->bytes == 0))
            return a->bytes == 0 ? -1 : 1;
        return (a->offset > b->offset) - (a->offset < b->offset);
    }
    order = msc__cost_compare((uint64_t)b->time_ns, b->bytes, (uint64_t)a->time_ns, a->bytes);
    return order != 0 ? order : (a->offset > b->offset) - (a->offset < b->offset);
}

static bool runs_alike(const msc__model *model, const msc__candidate *candidate)
{
    const msc__region *first = &model->regions[candidate->first_region];
    uint32_t i;
    uint32_t t;

    for (i = 1; i < candidate->region_count; i++) {
        const msc__region *other = first + i;
        if (other->end - other->begin != first->end - first->begin ||
            other->stop - other->begin != first->stop - first->begin)
            return false;
        for (t = 0; t < first->end - first->begin; t++)
            if (model->ops[first->begin + t].name != model->ops[other->begin + t].name)
                return false;
    }
    return true;
}

static void list_items(variants *v, const msc__candidate *candidate)
{
    const msc__region *first = &v->model->regions[candidate->first_region];
    uint32_t length = first->stop - first->begin;
    uint32_t i;

    v->count = 0;
    if (length < 2 || length > MOST_OPERATIONS || !runs_alike(v->model, candidate))
        return;
    for (i = 0; i < length; i++)
        if (weigh_operation(v, candidate, i, &v->items[v->count]) &&
            v->items[v->count].time_ns > candidate->cost_ns >> LEAST_TIME_SHIFT)
            v->count++;
    MSC__ASSERT(v->count <= length && length <= MOST_OPERATIONS);
    if (v->count > 0)
        qsort(v->items, v->count, sizeof *v->items, compare_items);
    v->bytes[0] = 0;
    v->times[0] = 0;
    for (i = 0; i < v->count; i++) {
        v->bytes[i + 1] = v->bytes[i] + v->items[i].bytes;
        v->times[i + 1] = v->times[i] + v->items[i].time_ns;
    }
}

/* ---- which prefixes are taken ---------------------------------------------------------------------- */

/* How far the curve lies above the line through two of its points, as time, at a third one between them. */
static int64_t height(const variants *v, uint32_t low, uint32_t point, uint32_t high)
{
    uint64_t width = v->bytes[high] - v->bytes[low];
    uint64_t part = v->bytes[point] - v->bytes[low];
    uint64_t rise = (uint64_t)(v->times[high] - v->times[low]);
    uint64_t on_line;

    MSC__ASSERT(low < point && point < high && part <= width);
    while (width >> 31 != 0) { /* the share part / width is good enough in 31 bits */
        width >>= 1;
        part >>= 1;
    }
    if (width == 0)
        return v->times[point] - v->times[low];
    on_line = rise / width * part + rise % width * part / width;
    return v->times[point] - v->times[low] - (int64_t)on_line;
}

static uint32_t next_taken(const variants *v, uint32_t after)
{
    uint32_t i = after + 1;

    while (!v->is_taken[i])
        i++;
    MSC__ASSERT(i <= v->count); /* the last one is taken */
    return i;
}

/* The untaken point that lies highest above the line through its taken neighbours; 0: none lies above. */
static uint32_t highest(const variants *v)
{
    int64_t most = 0;
    uint32_t found = 0;
    uint32_t low = 0;

    while (low < v->count) {
        uint32_t high = next_taken(v, low);
        uint32_t i;
        for (i = low + 1; i < high; i++) {
            int64_t above = height(v, low, i, high);
            if (above > most) {
                most = above;
                found = i;
            }
        }
        low = high;
    }
    return found;
}

static void take_corners(variants *v)
{
    uint32_t taken;

    memset(v->is_taken, 0, v->count + 1);
    v->is_taken[0] = 1;
    v->is_taken[v->count] = 1;
    for (taken = 1; taken < MOST_VARIANTS; taken++) {
        uint32_t point = highest(v);
        if (point == 0)
            return;
        v->is_taken[point] = 1;
    }
}

/* ---- candidates ------------------------------------------------------------------------------------ */

static int compare_offsets(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left;
    uint32_t b = *(const uint32_t *)right;

    return (a > b) - (a < b);
}

static msc_status push_kept(variants *v, uint32_t prefix, msc__candidate *added, msc_error *err)
{
    msc__model *model = v->model;
    msc_status status = MSC_OK;
    uint32_t i;

    MSC__ASSERT(prefix > 0 && prefix <= v->count);
    for (i = 0; i < prefix; i++)
        v->offsets[i] = v->items[i].offset;
    qsort(v->offsets, prefix, sizeof *v->offsets, compare_offsets);
    added->first_kept = model->kept_list.count;
    added->kept_count = prefix;
    for (i = 0; i < prefix && status == MSC_OK; i++)
        status =
            msc__array_push(model->scratch.ctx, &model->kept_list, sizeof *v->offsets, &v->offsets[i], err);
    model->kept = model->kept_list.items;
    return status;
}

/* The regions of a candidate, with what `added` keeps. False if one of them would recompute nothing. */
static bool fill_regions(variants *v, const msc__candidate *candidate, const msc__candidate *added)
{
    const msc__model *model = v->model;
    uint32_t i;

    for (i = 0; i < candidate->region_count; i++) {
        uint32_t call = model->regions[candidate->first_region + i].first_call;
        v->regions[i] = msc__region_of_call(model->graph, call, model->last_call[call]);
        msc__model_fill_region(model, added, &v->regions[i]);
        if (!v->regions[i].live || v->regions[i].early)
            return false;
    }
    return true;
}

/* Adds the candidate that keeps the first `prefix` items, unless it saves next to nothing. */
static msc_status add_variant(variants *v, uint32_t base, uint32_t prefix, uint32_t *last, msc_error *err)
{
    msc__model *model = v->model;
    msc__candidate added = model->candidates[base];
    msc_status status = push_kept(v, prefix, &added, err);
    int64_t gain_ns;

    added.next = MSC_NONE;
    if (status != MSC_OK || !fill_regions(v, &model->candidates[base], &added))
        return status;
    status = msc__model_add(model, &added, v->regions, err);
    if (status != MSC_OK)
        return status;
    gain_ns = model->candidates[*last].cost_ns - model->candidates[model->candidate_count - 1].cost_ns;
    if (gain_ns <= model->candidates[base].cost_ns >> LEAST_GAIN_SHIFT) {
        MSC__ASSERT(model->region_list.count >= added.region_count);
        model->region_count = model->region_list.count -= added.region_count;
        model->candidate_count = --model->candidate_list.count;
        return MSC_OK;
    }
    model->candidates[*last].next = model->candidate_count - 1;
    *last = model->candidate_count - 1;
    return MSC_OK;
}

static msc_status add_to(variants *v, uint32_t base, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t last = base;
    uint32_t i;

    list_items(v, &v->model->candidates[base]);
    if (v->count == 0)
        return MSC_OK;
    take_corners(v);
    for (i = 1; i <= v->count && status == MSC_OK; i++)
        if (v->is_taken[i])
            status = add_variant(v, base, i, &last, err);
    return status;
}

msc_status msc__model_add_variants(msc__model *model, const msc__survey *s, msc_error *err)
{
    variants v = {.model = model, .survey = s, .scratch = {.ctx = model->scratch.ctx}};
    uint32_t bases = model->candidate_count;
    msc_status status;
    uint32_t i;

    v.items = msc__scratch_take(&v.scratch, MOST_OPERATIONS, sizeof *v.items);
    v.bytes = msc__scratch_take(&v.scratch, MOST_OPERATIONS + 1, sizeof *v.bytes);
    v.times = msc__scratch_take(&v.scratch, MOST_OPERATIONS + 1, sizeof *v.times);
    v.is_taken = msc__scratch_take(&v.scratch, MOST_OPERATIONS + 1, sizeof *v.is_taken);
    v.offsets = msc__scratch_take(&v.scratch, MOST_OPERATIONS, sizeof *v.offsets);
    v.regions = msc__scratch_take(&v.scratch, model->call_count, sizeof *v.regions);
    status = msc__scratch_check(&v.scratch, "variants", err);
    for (i = 0; i < bases && status == MSC_OK; i++)
        if (!model->candidates[i].is_run)
            status = add_to(&v, i, err);
    msc__scratch_fini(&v.scratch);
    return status;
}
