/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions: what a checkpoint would drop, when it would be recomputed and how long it would hold its inputs.
 * See the rules at the top of sim_trace.c.
 *
 * For the decision, all calls are treated at once, each as a region of its own. Each save climbs from its
 * call to the outermost one and leaves its mark on every call on the way for which it is internal:
 *
 *      call 0      [------------------------]      release beyond the end of 1, 2: internal to both,
 *        call 1      [-----------]                 not beyond the end of 0: plain there
 *          call 2       [-----]
 *            save          P                 R
 *
 * For a plan, calls are first put into its regions, and each save then looks at one. Calls are numbered in
 * order of entry, so a parent always precedes its children, and what lies inside a call follows it.
 */
#include "sim/sim_lifetimes.h"

#include <string.h>

#include "base/invariant.h"
#include "base/search.h"

bool msc__offsets_have(const uint32_t *offsets, uint32_t count, uint32_t offset)
{
    uint32_t at = msc__lower_bound_u32(offsets, count, sizeof *offsets, 0, offset);

    return at < count && offsets[at] == offset;
}

/* ---- one region ----------------------------------------------------------------------------------- */

msc__region msc__region_of_call(const msc_graph *graph, uint32_t call, uint32_t last_call)
{
    const msc_call *called = &msc_graph_calls(graph)[call];
    msc__region region;

    MSC__ASSERT(call <= last_call && called->begin <= called->end);
    memset(&region, 0, sizeof region);
    region.first_call = call;
    region.last_call = last_call;
    region.begin = called->begin;
    region.end = called->end;
    region.stop = called->begin;
    region.redo = MSC_NONE;
    region.state_bytes = msc_graph_modules(graph)[called->module].state_bytes;
    return region;
}

void msc__region_extend(msc__region *region, const msc_graph *graph, uint32_t call, uint32_t last_call)
{
    const msc_call *called = &msc_graph_calls(graph)[call];
    uint64_t state_bytes = msc_graph_modules(graph)[called->module].state_bytes;

    MSC__ASSERT(call == region->last_call + 1 && called->begin == region->end);
    region->last_call = last_call;
    region->end = called->end;
    if (state_bytes <= UINT64_MAX - region->state_bytes)
        region->state_bytes += state_bytes;
    else
        region->state_bytes = UINT64_MAX; /* the sum overflows, which is an error */
}

void msc__region_note(msc__region *region, const msc_save *save, const msc_buffer *buffer, uint32_t op_count)
{
    if (!msc__save_is_internal(save, buffer, region))
        return;
    /* The recompute must get as far as the pack, and far enough to make the buffer. */
    if (save->pack > region->stop)
        region->stop = save->pack;
    if (buffer->begin + 1 > region->stop)
        region->stop = buffer->begin + 1;
    MSC__ASSERT(region->stop > region->begin && region->stop <= region->end);
    if (msc__save_is_unused(save, op_count))
        return;
    region->live = 1;
    if (save->unpack < region->redo)
        region->redo = save->unpack;
    if (save->release > region->until)
        region->until = save->release;
}

void msc__region_settle(msc__region *region)
{
    if (region->live && region->redo < region->end) {
        region->early = 1;
        region->redo = region->end;
    }
    MSC__ASSERT(!region->live || (region->redo >= region->end && region->until > region->end));
}

/* ---- all calls, each for itself ------------------------------------------------------------------- */

void msc__last_calls(const msc_graph *graph, uint32_t *last_calls)
{
    const msc_call *calls = msc_graph_calls(graph);
    uint32_t c;

    for (c = 0; c < msc_graph_call_count(graph); c++)
        last_calls[c] = c;
    for (c = msc_graph_call_count(graph); c-- > 0;)
        if (calls[c].parent != MSC_NONE && last_calls[calls[c].parent] < last_calls[c])
            last_calls[calls[c].parent] = last_calls[c];
}

static void start_regions(const msc_graph *graph, msc__region *regions)
{
    const msc_call *calls = msc_graph_calls(graph);
    uint32_t c;

    for (c = 0; c < msc_graph_call_count(graph); c++)
        regions[c] = msc__region_of_call(graph, c, c);
    for (c = msc_graph_call_count(graph); c-- > 0;) {
        uint32_t parent = calls[c].parent;
        MSC__ASSERT(parent == MSC_NONE || parent < c);
        if (parent != MSC_NONE && regions[parent].last_call < regions[c].last_call)
            regions[parent].last_call = regions[c].last_call;
    }
}

void msc__regions_derive(const msc_graph *graph, msc__region *regions)
{
    const msc_call *calls = msc_graph_calls(graph);
    const msc_save *saves = msc_graph_saves(graph);
    const msc_buffer *buffers = msc_graph_buffers(graph);
    uint32_t op_count = msc_graph_op_count(graph);
    uint32_t i;
    uint32_t c;

    start_regions(graph, regions);
    for (i = 0; i < msc_graph_save_count(graph); i++)
        for (c = saves[i].call; c != MSC_NONE; c = calls[c].parent)
            msc__region_note(&regions[c], &saves[i], &buffers[saves[i].buffer], op_count);
    for (c = 0; c < msc_graph_call_count(graph); c++)
        msc__region_settle(&regions[c]);
}

/* ---- a plan's --------------------------------------------------------------------------------------- */

/* A joined call continues the region before it, if that ends where the call begins and the two calls have
 * one parent; otherwise it is a region of its own. */
static bool continues(const msc_graph *graph, const msc__region *before, uint32_t call)
{
    const msc_call *calls = msc_graph_calls(graph);

    return !before->offload && before->last_call + 1 == call &&
           calls[before->first_call].parent == calls[call].parent && before->end == calls[call].begin;
}

static void place_call(const msc_graph *graph, const msc_plan *plan, msc__plan_regions *out, uint32_t call)
{
    const msc_call *called = &msc_graph_calls(graph)[call];
    uint32_t index = msc_plan_find(plan, called->module);
    const msc_choice *choice = index == MSC_NONE ? NULL : &msc_plan_choices(plan)[index];

    if (choice == NULL || choice->action == MSC_ACTION_KEEP)
        return;
    if (choice->joined && out->count > 0 && continues(graph, &out->regions[out->count - 1], call)) {
        msc__region_extend(&out->regions[out->count - 1], graph, call, out->last_calls[call]);
    } else {
        msc__region region = msc__region_of_call(graph, call, out->last_calls[call]);
        MSC__ASSERT(out->count < msc_graph_call_count(graph));
        region.offload = choice->action == MSC_ACTION_OFFLOAD;
        region.boundary = choice->boundary;
        out->regions[out->count++] = region;
    }
    out->cover[call] = out->count - 1;
}

/* The outermost call that is treated decides. */
static void place_calls(const msc_graph *graph, const msc_plan *plan, msc__plan_regions *out)
{
    const msc_call *calls = msc_graph_calls(graph);
    uint32_t c;

    for (c = 0; c < msc_graph_call_count(graph); c++) {
        MSC__ASSERT(calls[c].parent == MSC_NONE || calls[c].parent < c);
        out->cover[c] = calls[c].parent == MSC_NONE ? MSC_NONE : out->cover[calls[c].parent];
        if (out->cover[c] == MSC_NONE && plan != NULL)
            place_call(graph, plan, out, c);
    }
}

static void mark_kept(const msc_graph *graph, const msc_plan *plan, msc__plan_regions *out, uint8_t mark)
{
    const msc_call *calls = msc_graph_calls(graph);
    uint32_t r;
    uint32_t i;

    for (r = 0; r < out->count; r++) {
        const msc__region *region = &out->regions[r];
        uint32_t count = 0;
        const uint32_t *offsets =
            msc_plan_kept(plan, msc_plan_find(plan, calls[region->first_call].module), &count);
        if (mark == 0 && region->live)
            continue;
        MSC__ASSERT(region->end <= msc_graph_op_count(graph));
        for (i = 0; i < count && offsets[i] < region->end - region->begin; i++)
            out->kept[region->begin + offsets[i]] = mark;
    }
}

static void note_saves(const msc_graph *graph, msc__plan_regions *out)
{
    const msc_save *saves = msc_graph_saves(graph);
    const msc_buffer *buffers = msc_graph_buffers(graph);
    uint32_t i;

    for (i = 0; i < msc_graph_save_count(graph); i++) {
        const msc_buffer *buffer = &buffers[saves[i].buffer];
        uint32_t r = saves[i].call == MSC_NONE ? MSC_NONE : out->cover[saves[i].call];
        if (r == MSC_NONE || out->regions[r].offload)
            continue;
        if (msc__is_made_inside(buffer, &out->regions[r]) && out->kept[buffer->begin])
            continue;
        msc__region_note(&out->regions[r], &saves[i], buffer, msc_graph_op_count(graph));
    }
}

/* A region that turns out to drop nothing, as one that is offloaded does, counts as kept; what lies inside it stays covered all the same. */
void msc__regions_of_plan(const msc_graph *graph, const msc_plan *plan, msc__plan_regions *out)
{
    uint32_t r;
    uint32_t c;

    out->count = 0;
    memset(out->kept, 0, msc_graph_op_count(graph) * sizeof *out->kept);
    msc__last_calls(graph, out->last_calls);
    place_calls(graph, plan, out);
    if (out->count == 0)
        return;
    mark_kept(graph, plan, out, 1);
    note_saves(graph, out);
    for (r = 0; r < out->count; r++)
        msc__region_settle(&out->regions[r]);
    mark_kept(graph, plan, out, 0); /* of regions that are not live */
    for (c = 0; c < msc_graph_call_count(graph); c++)
        if (out->cover[c] != MSC_NONE && !out->regions[out->cover[c]].live)
            out->cover[c] = MSC_NONE;
}
