/* SPDX-License-Identifier: Apache-2.0 */
/* What runs again, and what lives when. */
#include "trace_reference.h"

#include <string.h>

const msc_choice *choice_of_call(const reference *r, uint32_t call)
{
    uint32_t index = msc_plan_find(r->plan, msc_graph_calls(r->graph)[call].module);
    const msc_choice *choice = index == MSC_NONE ? NULL : &msc_plan_choices(r->plan)[index];

    return choice == NULL || choice->action == MSC_ACTION_KEEP ? NULL : choice;
}

/* The outermost call around a call, or itself, that the plan treats; or MSC_NONE. */
static uint32_t treated_call(const reference *r, uint32_t call)
{
    uint32_t found = MSC_NONE;

    for (; call != MSC_NONE; call = msc_graph_calls(r->graph)[call].parent)
        if (choice_of_call(r, call) != NULL)
            found = call;
    return found;
}

/* The region that a joined call goes on with: its sibling's that was treated last and ends where it begins. */
static uint32_t region_to_join(const reference *r, uint32_t call)
{
    const msc_call *calls = msc_graph_calls(r->graph);
    uint32_t before = call;

    if (!choice_of_call(r, call)->joined || call == 0)
        return MSC_NONE;
    for (before = call - 1; before != MSC_NONE && !r->outermost[before]; before = calls[before].parent) {
    }
    if (before == MSC_NONE || choice_of_call(r, before)->action == MSC_ACTION_OFFLOAD ||
        calls[before].parent != calls[call].parent || calls[before].end != calls[call].begin)
        return MSC_NONE;
    return r->region_of[before];
}

static void start_region(reference *r, uint32_t call)
{
    const msc_call *called = &msc_graph_calls(r->graph)[call];
    uint32_t region = region_to_join(r, call);

    if (region == MSC_NONE) {
        region = call;
        r->begin[region] = called->begin;
        r->state[region] = 0;
    }
    r->region_of[call] = region;
    r->finish[region] = called->end;
    r->state[region] += msc_graph_modules(r->graph)[called->module].state_bytes;
}

static void find_regions(reference *r)
{
    uint32_t i;

    for (i = 0; i < msc_graph_call_count(r->graph); i++) {
        uint32_t call = treated_call(r, i);
        r->outermost[i] = call == i;
        r->region_of[i] = MSC_NONE;
        if (call == i)
            start_region(r, i);
        else if (call != MSC_NONE)
            r->region_of[i] = r->region_of[call];
    }
}

/* An offload is no region: nothing runs again. */
static void find_offloads(reference *r)
{
    uint32_t i;

    for (i = 0; i < msc_graph_call_count(r->graph); i++) {
        uint32_t call = r->region_of[i];
        r->offload_of[i] = MSC_NONE;
        if (call == MSC_NONE || choice_of_call(r, call)->action != MSC_ACTION_OFFLOAD)
            continue;
        r->offload_of[i] = call;
        r->region_of[i] = MSC_NONE;
        r->outermost[i] = false;
    }
}

static void mark_kept(reference *r, uint32_t region, bool mark)
{
    uint32_t module = msc_graph_calls(r->graph)[region].module;
    uint32_t count;
    const uint32_t *offsets = msc_plan_kept(r->plan, msc_plan_find(r->plan, module), &count);
    uint32_t i;

    for (i = 0; i < count; i++)
        if (r->begin[region] + offsets[i] < r->finish[region])
            r->kept[r->begin[region] + offsets[i]] = mark;
}

static bool measure_region(reference *r, uint32_t region)
{
    const msc_save *saves = msc_graph_saves(r->graph);
    bool live = false;
    uint32_t i;

    r->stop[region] = r->until[region] = 0;
    r->redo[region] = UINT32_MAX;
    for (i = 0; i < msc_graph_save_count(r->graph); i++) {
        const msc_save *s = &saves[i];
        if (region_of_save(r, s) != region || !internal_to(r, s, region))
            continue;
        r->stop[region] =
            max_u32(r->stop[region], max_u32(s->pack, msc_graph_buffers(r->graph)[s->buffer].begin + 1));
        if (never_used(r, s))
            continue;
        live = true;
        r->until[region] = max_u32(r->until[region], s->release);
        if (s->unpack < r->redo[region])
            r->redo[region] = s->unpack;
    }
    r->redo[region] = max_u32(r->redo[region], r->finish[region]);
    return live;
}

/* The region that keeps a buffer, or MSC_NONE. */
static uint32_t keeper(const reference *r, uint32_t buffer)
{
    const msc_buffer *b = &msc_graph_buffers(r->graph)[buffer];
    uint32_t c;

    for (c = 0; c < msc_graph_call_count(r->graph); c++)
        if (r->region_of[c] == c && made_inside(r, b, c) && r->kept[b->begin])
            return c;
    return MSC_NONE;
}

/* ---- lifetimes ------------------------------------------------------------------------------------- */

static void find_lifetimes(reference *r)
{
    const msc_save *saves = msc_graph_saves(r->graph);
    const msc_input *inputs = msc_graph_inputs(r->graph);
    uint32_t i;

    for (i = 0; i < msc_graph_buffer_count(r->graph); i++) {
        r->end[i] = natural_end(&msc_graph_buffers(r->graph)[i]);
        r->hold[i] = 0;
    }
    for (i = 0; i < msc_graph_save_count(r->graph); i++) {
        uint32_t region = region_of_save(r, &saves[i]);
        uint32_t b = saves[i].buffer;
        if (r->save_moves[i])
            continue;
        if (region == MSC_NONE || !internal_to(r, &saves[i], region))
            r->end[b] = max_u32(r->end[b], saves[i].release);
        else if (!never_used(r, &saves[i]))
            r->hold[b] = max_u32(r->hold[b], saves[i].release);
    }
    for (i = 0; i < msc_graph_input_count(r->graph); i++) {
        uint32_t region = r->region_of[inputs[i].call];
        uint32_t b = inputs[i].buffer;
        if (region != MSC_NONE && r->outermost[inputs[i].call] && !is_moved(r, region, b) &&
            !made_inside(r, &msc_graph_buffers(r->graph)[b], region))
            r->end[b] = max_u32(r->end[b], r->until[region]);
    }
    for (i = 0; i < msc_graph_buffer_count(r->graph); i++)
        if (keeper(r, i) != MSC_NONE)
            r->end[i] = max_u32(r->end[i], r->redo[keeper(r, i)]);
    for (i = 0; i < r->move_count; i++)
        r->end[r->moves[i].buffer] = max_u32(r->end[r->moves[i].buffer], r->moves[i].settle);
}

void prepare_reference(reference *r, const msc_graph *graph, const msc_plan *plan)
{
    uint32_t c;
    uint32_t i;

    memset(r, 0, sizeof *r);
    r->graph = graph;
    r->plan = plan;
    find_regions(r);
    find_offloads(r);
    for (c = 0; c < msc_graph_call_count(graph); c++)
        if (r->region_of[c] == c)
            mark_kept(r, c, true);
    for (c = 0; c < msc_graph_call_count(graph); c++) {
        if (r->region_of[c] != c || measure_region(r, c))
            continue;
        mark_kept(r, c, false);
        for (i = 0; i < msc_graph_call_count(graph); i++)
            if (r->region_of[i] == c)
                r->region_of[i] = MSC_NONE;
    }
    find_moves(r);
    find_lifetimes(r);
}

/* Region whose recompute makes the buffer again, or MSC_NONE. */
static uint32_t remaker(const reference *r, uint32_t buffer)
{
    const msc_buffer *b = &msc_graph_buffers(r->graph)[buffer];
    uint32_t c;

    for (c = 0; c < msc_graph_call_count(r->graph); c++)
        if (r->region_of[c] == c && made_inside(r, b, c) && b->begin < r->stop[c] && !r->kept[b->begin])
            return c;
    return MSC_NONE;
}

/* Bytes alive while operation t runs for real. */
static uint64_t live_in_op(const reference *r, uint32_t t)
{
    const msc_buffer *buffers = msc_graph_buffers(r->graph);
    uint64_t live = msc_graph_ops(r->graph)[t].scratch_bytes;
    uint32_t i;

    for (i = 0; i < msc_graph_buffer_count(r->graph); i++) {
        uint32_t c = remaker(r, i);
        if (buffers[i].begin <= t && r->end[i] > t)
            live += buffers[i].size_bytes;
        if (c != MSC_NONE && r->redo[c] <= t && r->hold[i] > r->redo[c] && r->hold[i] > t)
            live += buffers[i].size_bytes;
    }
    for (i = 0; i < msc_graph_call_count(r->graph); i++)
        if (r->region_of[i] == i && r->begin[i] <= t && r->until[i] > t)
            live += r->state[i];
    for (i = 0; i < r->move_count; i++)
        if (is_back(&r->moves[i], t))
            live += size_of(r, &r->moves[i]);
    return live;
}

/* Kept for a recompute that is not over while another one at the same position runs. */
static bool is_in_cache(const reference *r, uint32_t buffer, uint32_t region)
{
    uint32_t c = keeper(r, buffer);

    return c != MSC_NONE && r->redo[c] == r->redo[region] && c <= region;
}

static uint64_t size_in_recompute(const reference *r, uint32_t buffer, uint32_t region, uint32_t t)
{
    const msc_buffer *b = &msc_graph_buffers(r->graph)[buffer];
    uint32_t c = remaker(r, buffer);
    uint32_t rb = r->redo[region];
    uint64_t bytes = 0;

    if ((b->resident || b->begin < rb) && (r->end[buffer] > rb || is_in_cache(r, buffer, region)))
        bytes += b->size_bytes;
    if (c == region && b->begin <= t &&
        (r->hold[buffer] > 0 || natural_end(b) > t || natural_end(b) >= r->stop[region]))
        bytes += b->size_bytes;
    if (c != MSC_NONE && c != region && (r->redo[c] < rb || (r->redo[c] == rb && c > region)) &&
        r->hold[buffer] > r->redo[c] && r->hold[buffer] > rb)
        bytes += b->size_bytes;
    return bytes;
}

/* Bytes alive while operation t runs again for a region. */
static uint64_t live_in_recompute(const reference *r, uint32_t region, uint32_t t)
{
    uint32_t rb = r->redo[region];
    uint64_t live = msc_graph_ops(r->graph)[t].scratch_bytes;
    uint32_t i;

    for (i = 0; i < msc_graph_buffer_count(r->graph); i++)
        live += size_in_recompute(r, i, region, t);
    for (i = 0; i < msc_graph_call_count(r->graph); i++)
        if (r->region_of[i] == i && r->begin[i] < rb && r->until[i] > rb)
            live += r->state[i];
    live += r->state[region]; /* the present one, which is put back afterwards */
    for (i = 0; i < r->move_count; i++)
        if (is_back(&r->moves[i], rb))
            live += size_of(r, &r->moves[i]);
    return live;
}

size_t list_live(const reference *r, uint64_t *live, size_t most)
{
    uint32_t op_count = msc_graph_op_count(r->graph);
    size_t count = 0;
    uint32_t p;
    uint32_t c;
    uint32_t t;

    for (p = 0; p <= op_count; p++) {
        for (c = msc_graph_call_count(r->graph); c-- > 0;) {
            if (r->region_of[c] != c || r->redo[c] != p)
                continue;
            for (t = r->begin[c]; t < r->stop[c] && count < most; t++)
                if (!r->kept[t])
                    live[count++] = live_in_recompute(r, c, t);
        }
        if (p < op_count && count < most)
            live[count++] = live_in_op(r, p);
    }
    return count;
}
