/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions: for every call, what its checkpoint would drop, when it would be recomputed and how long it
 * would hold its inputs. See the rules at the top of sim_trace.c.
 *
 * All calls are treated at once. Each save climbs from its call to the outermost one and leaves its mark on
 * every call on the way for which it is internal:
 *
 *      call 0      [------------------------]      release beyond the end of 1, 2: internal to both,
 *        call 1      [-----------]                 not beyond the end of 0: plain there
 *          call 2       [-----]
 *            save          P                 R
 *
 * Calls are numbered in order of entry, so a parent always precedes its children.
 */
#include "sim/sim_lifetimes.h"

#include <string.h>

/* The recompute must get as far as the pack, and far enough to make the buffer. */
static void mark(msc__region *region, const msc_save *save, const msc_buffer *buffer, bool used)
{
    if (save->pack > region->stop)
        region->stop = save->pack;
    if (buffer->begin + 1 > region->stop)
        region->stop = buffer->begin + 1;
    if (!used)
        return;
    region->live = 1;
    if (save->unpack < region->redo)
        region->redo = save->unpack;
    if (save->release > region->until)
        region->until = save->release;
}

static void start_regions(const msc_graph *graph, msc__region *regions)
{
    const msc_call *calls = msc_graph_calls(graph);
    uint32_t c;

    for (c = 0; c < msc_graph_call_count(graph); c++) {
        memset(&regions[c], 0, sizeof regions[c]);
        regions[c].begin = calls[c].begin;
        regions[c].end = calls[c].end;
        regions[c].stop = calls[c].begin;
        regions[c].redo = MSC_NONE;
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
    for (i = 0; i < msc_graph_save_count(graph); i++) {
        const msc_buffer *buffer = &buffers[saves[i].buffer];
        bool used = !msc__save_is_unused(&saves[i], op_count);
        for (c = saves[i].call; c != MSC_NONE; c = calls[c].parent)
            if (msc__save_is_internal(&saves[i], buffer, &regions[c]))
                mark(&regions[c], &saves[i], buffer, used);
    }
    for (c = 0; c < msc_graph_call_count(graph); c++) {
        if (regions[c].live && regions[c].redo < regions[c].end) {
            regions[c].early = 1;
            regions[c].redo = regions[c].end;
        }
    }
}

/* The outermost checkpointed call decides, even when it turns out not to be live. */
void msc__regions_cover(const msc_graph *graph, const msc_plan *plan, const msc__region *regions,
                        uint32_t *cover)
{
    const msc_call *calls = msc_graph_calls(graph);
    uint32_t count = msc_graph_call_count(graph);
    uint32_t c;

    for (c = 0; c < count; c++) {
        cover[c] = calls[c].parent == MSC_NONE ? MSC_NONE : cover[calls[c].parent];
        if (cover[c] == MSC_NONE && plan != NULL &&
            msc_plan_action(plan, calls[c].module) == MSC_ACTION_CHECKPOINT)
            cover[c] = c;
    }
    for (c = 0; c < count; c++)
        if (cover[c] != MSC_NONE && !regions[cover[c]].live)
            cover[c] = MSC_NONE;
}
