/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is alive in each operation of a step under a plan, by the rules at the top of sim_trace.c and sim_moves.c,
 * one operation at a time, with no care for speed.
 */
#ifndef MSC_TEST_TRACE_REFERENCE_H
#define MSC_TEST_TRACE_REFERENCE_H

#include <stdbool.h>
#include <string.h>

#include "memscale/memscale.h"

enum { MOST_CALLS = 256, MOST_BUFFERS = 512, MOST_OPS = 1024, MOST_SAVES = 2048, MOST_MOVES = 1024 };

/* A storage that a region moves. */
typedef struct reference_move {
    uint32_t buffer, region, put, settle, use, back, release;
} reference_move;

/* A region is named by its first call. */
typedef struct reference {
    const msc_graph *graph;
    const msc_plan *plan;
    uint32_t region_of[MOST_CALLS]; /* per call: region, or MSC_NONE */
    bool outermost[MOST_CALLS];     /* per call: no call around it belongs to a region */
    uint32_t begin[MOST_CALLS], finish[MOST_CALLS];
    uint64_t state[MOST_CALLS];
    uint32_t stop[MOST_CALLS], redo[MOST_CALLS], until[MOST_CALLS];
    uint32_t end[MOST_BUFFERS], hold[MOST_BUFFERS];
    bool kept[MOST_OPS];             /* per operation */
    uint32_t offload_of[MOST_CALLS]; /* per call: offload that it lies in, by its first call, or MSC_NONE */
    reference_move moves[MOST_MOVES];
    uint32_t move_count;
    bool save_moves[MOST_SAVES];
} reference;

static uint32_t natural_end(const msc_buffer *b)
{
    return !b->resident && b->end == b->begin ? b->begin + 1 : b->end;
}

static bool made_inside(const reference *r, const msc_buffer *b, uint32_t region)
{
    return !b->resident && b->begin >= r->begin[region] && b->begin < r->finish[region];
}

static bool internal_to(const reference *r, const msc_save *s, uint32_t region)
{
    const msc_buffer *b = &msc_graph_buffers(r->graph)[s->buffer];

    return made_inside(r, b, region) && !r->kept[b->begin] && s->release > r->finish[region];
}

static uint32_t region_of_save(const reference *r, const msc_save *s)
{
    return s->call == MSC_NONE ? MSC_NONE : r->region_of[s->call];
}

static bool never_used(const reference *r, const msc_save *s)
{
    return s->unpack == s->release && s->release == msc_graph_op_count(r->graph);
}

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static const msc_choice *choice_of_call(const reference *r, uint32_t call)
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

/* ---- moves ----------------------------------------------------------------------------------------- */

static bool is_named(const reference *r, uint32_t call, uint32_t ordinal)
{
    uint32_t count;
    const uint32_t *named =
        msc_plan_moved(r->plan, msc_plan_find(r->plan, msc_graph_calls(r->graph)[call].module), &count);
    uint32_t i;

    for (i = 0; i < count; i++)
        if (named[i] == ordinal)
            return true;
    return false;
}

static reference_move *move_of(reference *r, uint32_t region, uint32_t buffer)
{
    uint32_t i;

    for (i = 0; i < r->move_count; i++)
        if (r->moves[i].region == region && r->moves[i].buffer == buffer)
            return &r->moves[i];
    return NULL;
}

static reference_move *new_move(reference *r, uint32_t region, uint32_t buffer, uint32_t put)
{
    reference_move *move = &r->moves[r->move_count++];

    move->region = region;
    move->buffer = buffer;
    move->put = max_u32(put, msc_graph_buffers(r->graph)[buffer].begin + 1);
    move->use = UINT32_MAX;
    move->release = 0;
    return move;
}

static void note_save(const reference *r, reference_move *move, const msc_save *s)
{
    move->release = max_u32(move->release, s->release);
    if (!never_used(r, s) && s->unpack < move->use)
        move->use = s->unpack;
}

static void move_saves(reference *r, uint32_t call)
{
    const msc_save *saves = msc_graph_saves(r->graph);
    uint32_t ordinal = 0;
    uint32_t i;

    for (i = 0; i < msc_graph_save_count(r->graph); i++) {
        reference_move *move = move_of(r, call, saves[i].buffer);
        if (saves[i].call == MSC_NONE || r->offload_of[saves[i].call] != call ||
            !is_named(r, call, ordinal++) || msc_graph_buffers(r->graph)[saves[i].buffer].resident)
            continue;
        if (move == NULL)
            move = new_move(r, call, saves[i].buffer, saves[i].pack);
        note_save(r, move, &saves[i]);
        r->save_moves[i] = true;
    }
}

static void move_inputs(reference *r, uint32_t region)
{
    const msc_input *inputs = msc_graph_inputs(r->graph);
    const msc_save *saves = msc_graph_saves(r->graph);
    uint32_t ordinal = 0;
    uint32_t i;

    for (i = 0; i < msc_graph_input_count(r->graph); i++) {
        const msc_buffer *b = &msc_graph_buffers(r->graph)[inputs[i].buffer];
        if (inputs[i].call != region || !is_named(r, region, ordinal++) || b->resident ||
            b->begin >= r->begin[region])
            continue;
        new_move(r, region, inputs[i].buffer, r->begin[region])->use = r->redo[region];
        move_of(r, region, inputs[i].buffer)->release = r->until[region];
    }
    for (i = 0; i < msc_graph_save_count(r->graph); i++) {
        reference_move *move = move_of(r, region, saves[i].buffer);
        if (move == NULL || region_of_save(r, &saves[i]) != region)
            continue;
        note_save(r, move, &saves[i]);
        r->save_moves[i] = true;
    }
}

static uint64_t size_of(const reference *r, const reference_move *move)
{
    return msc_graph_buffers(r->graph)[move->buffer].size_bytes;
}

static bool is_used_before(const reference_move *a, const reference_move *b)
{
    return a->use != b->use ? a->use < b->use : a < b;
}

/* Bytes of the moves of one region that are used after `from` (NULL: all), up to and with `to`. */
static uint64_t bytes_between(const reference *r, const reference_move *from, const reference_move *to)
{
    uint64_t bytes = 0;
    uint32_t i;

    for (i = 0; i < r->move_count; i++) {
        const reference_move *m = &r->moves[i];
        if (m->region == to->region && !is_used_before(to, m) &&
            (from == NULL || (m != from && is_used_before(from, m))))
            bytes += size_of(r, m);
    }
    return bytes;
}

/* A boundary is held until its region ends. What an offload sends waits until more than the window has been put,
 * itself included. */
static void settle_move(reference *r, reference_move *move)
{
    const uint64_t window = msc_plan_get_summary(r->plan)->window_out_bytes;
    uint64_t waits = 0;
    uint32_t i;

    move->settle = max_u32(move->put, r->finish[move->region]);
    if (r->region_of[move->region] == move->region)
        return;
    for (i = (uint32_t)(move - r->moves); i < r->move_count && waits <= window; i++) {
        if (r->moves[i].region != move->region)
            continue;
        waits += size_of(r, &r->moves[i]);
        if (waits > window)
            move->settle = max_u32(move->put, r->moves[i].put);
    }
}

/* Comes back with the last use that leaves no more than the window ahead of it. */
static void bring_move_back(reference *r, reference_move *move)
{
    const uint64_t window = msc_plan_get_summary(r->plan)->window_in_bytes;
    uint32_t first_use = move->use;
    uint32_t earliest = move->use;
    uint32_t i;

    move->back = UINT32_MAX;
    if (move->use == UINT32_MAX)
        return;
    for (i = 0; i < r->move_count; i++) {
        const reference_move *m = &r->moves[i];
        if (m->region != move->region || is_used_before(move, m))
            continue;
        if (m->use < first_use)
            first_use = m->use;
        if (bytes_between(r, m, move) <= window && m->use < earliest)
            earliest = m->use;
    }
    move->back = bytes_between(r, NULL, move) > window ? earliest : first_use;
}

static void find_moves(reference *r)
{
    uint32_t c;
    uint32_t i;

    for (c = 0; c < msc_graph_call_count(r->graph); c++) {
        if (r->offload_of[c] == c)
            move_saves(r, c);
        else if (r->region_of[c] == c && choice_of_call(r, c)->boundary)
            move_inputs(r, c);
    }
    for (i = 0; i < r->move_count; i++) {
        settle_move(r, &r->moves[i]);
        bring_move_back(r, &r->moves[i]);
    }
}

static bool is_back(const reference_move *move, uint32_t position)
{
    return move->back <= position && max_u32(move->release, move->back + 1) > position;
}

/* Bytes that are off the device before operation t. */
static uint64_t away_at(const reference *r, uint32_t t)
{
    uint64_t away = 0;
    uint32_t i;

    for (i = 0; i < r->move_count; i++)
        if (r->moves[i].put <= t && r->moves[i].release > t)
            away += size_of(r, &r->moves[i]);
    return away;
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
        if (region != MSC_NONE && r->outermost[inputs[i].call] && move_of(r, region, b) == NULL &&
            !made_inside(r, &msc_graph_buffers(r->graph)[b], region))
            r->end[b] = max_u32(r->end[b], r->until[region]);
    }
    for (i = 0; i < msc_graph_buffer_count(r->graph); i++)
        if (keeper(r, i) != MSC_NONE)
            r->end[i] = max_u32(r->end[i], r->redo[keeper(r, i)]);
    for (i = 0; i < r->move_count; i++)
        r->end[r->moves[i].buffer] = max_u32(r->end[r->moves[i].buffer], r->moves[i].settle);
}

static void prepare_reference(reference *r, const msc_graph *graph, const msc_plan *plan)
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
    for (i = 0; i < r->move_count; i++)
        if (is_back(&r->moves[i], rb))
            live += size_of(r, &r->moves[i]);
    return live;
}

/* Appends what should be alive in each operation, in the order of events. */
static size_t list_live(const reference *r, uint64_t *live, size_t most)
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

#endif /* MSC_TEST_TRACE_REFERENCE_H */
