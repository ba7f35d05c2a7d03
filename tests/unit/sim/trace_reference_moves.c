/* SPDX-License-Identifier: Apache-2.0 */
/* What leaves the device, when, and when it comes back. */
#include "trace_reference.h"

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

/* Its number, or that of the next one to be made. */
static uint32_t number_of(const reference *r, uint32_t region, uint32_t buffer)
{
    uint32_t i = 0;

    while (i < r->move_count && (r->moves[i].region != region || r->moves[i].buffer != buffer))
        i++;
    return i;
}

bool is_moved(const reference *r, uint32_t region, uint32_t buffer)
{
    return number_of(r, region, buffer) < r->move_count;
}

static reference_move *move_of(reference *r, uint32_t region, uint32_t buffer)
{
    return is_moved(r, region, buffer) ? &r->moves[number_of(r, region, buffer)] : NULL;
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

uint64_t size_of(const reference *r, const reference_move *move)
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

/* The nearest region before this one that moves anything, or MSC_NONE. */
static uint32_t mover_before(const reference *r, uint32_t region)
{
    uint32_t before = MSC_NONE;
    uint32_t i;

    for (i = 0; i < r->move_count; i++)
        if (r->moves[i].region < region && (before == MSC_NONE || r->moves[i].region > before))
            before = r->moves[i].region;
    return before;
}

uint32_t first_use_of(const reference *r, uint32_t region)
{
    uint32_t first = UINT32_MAX;
    uint32_t i;

    for (i = 0; i < r->move_count; i++)
        if (r->moves[i].region == region && r->moves[i].use < first)
            first = r->moves[i].use;
    return first;
}

/* Whether backward uses what `region` moves, and next what `before` does, everything else earlier or later. */
static bool is_followed_by(const reference *r, uint32_t region, uint32_t before)
{
    const uint32_t first = first_use_of(r, region);
    const uint32_t next = first_use_of(r, before);
    uint32_t i;

    if (first == UINT32_MAX || next == UINT32_MAX)
        return false;
    for (i = 0; i < r->move_count; i++) {
        const reference_move *m = &r->moves[i];
        if (m->use == UINT32_MAX)
            continue;
        if ((m->region > region && m->use > first) || (m->region == region && m->use > next) ||
            (m->region < before && m->use < next))
            return false;
    }
    return true;
}

static void bring_early(reference *r, uint32_t region)
{
    const uint32_t before = mover_before(r, region);
    uint32_t i;

    if (before == MSC_NONE || !is_followed_by(r, region, before))
        return;
    for (i = 0; i < r->move_count; i++) {
        reference_move *m = &r->moves[i];
        if (m->region == before && m->back == first_use_of(r, before) &&
            bytes_between(r, NULL, m) <= choice_of_call(r, region)->ahead_bytes)
            m->back = first_use_of(r, region);
    }
}

void find_moves(reference *r)
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
    for (c = 0; c < msc_graph_call_count(r->graph); c++)
        if (first_use_of(r, c) != UINT32_MAX)
            bring_early(r, c);
}

bool is_back(const reference_move *move, uint32_t position)
{
    return move->back <= position && max_u32(move->release, move->back + 1) > position;
}

uint64_t away_at(const reference *r, uint32_t t)
{
    uint64_t away = 0;
    uint32_t i;

    for (i = 0; i < r->move_count; i++)
        if (r->moves[i].put <= t && r->moves[i].release > t)
            away += size_of(r, &r->moves[i]);
    return away;
}
