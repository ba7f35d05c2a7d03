/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves: what leaves the device during a call, when its place is free, and when it is back.
 *
 * WHAT AN OFFLOAD DOES TO LIFETIMES. These rules are normative, as those at the top of sim_trace.c are, whose
 * words they use. The executor may let go of a source earlier, and fetch it later, but not the other way round.
 *
 *      position        fb   put      settle  fe      back        use     release
 *      forward       [ region R              )       |           |       |
 *      forward instance      ========)               |           |       |
 *      offloaded             ============================================)
 *      what came back                                [===================)
 *
 *  What moves. OFFLOAD: each storage with a named save, counted in the order of packing from R's begin.
 *  A boundary: each input of R's first call that is named, if R is live and it was made before R; with it go all
 *  saves on it that are packed inside R. Memory that is resident never moves. put = where the first named
 *  save is packed, or fb, but not before it is made. use = its least unpack, for a boundary rb if that is less.
 *  release = the latest release, for a boundary at least until.
 *
 *  Out. The copies of a call are done in the order of their puts. A move is settled once it and the later ones that
 *  have been put are more than `window_out_bytes`, but by fe at the latest: nothing waits for its copy once R has
 *  ended. A boundary is needed up to fe, and settled there. Up to its settle the saves of a move hold the forward
 *  instance, and a boundary's region does. Whatever else holds it, holds on.
 *
 *  In. What is used in backward comes back as a new instance, in order of use: with the use of the last move that is
 *  more than `window_in_bytes` ahead of it, itself included, or with the first use of all if there is none. The
 *  instance lives until `release`.
 *
 *  Early. Of regions that bring something back, R is followed by the one before it in forward, Q, if backward uses
 *  them in that order: all uses of later regions are at or before R's first use, all of R at or before Q's
 *  first, that not after those of earlier regions, and no region between the two moves something that is never used.
 *  Then Q's moves that would come back with Q's first use, in order of use and as far as all of them together are at most
 *  `ahead_bytes` of R's choice, come back with R's first use.
 *
 *  Offloaded. The bytes are offloaded from put to release, if that is later.
 */
#include "sim/sim_moves.h"

#include <stdlib.h>
#include <string.h>

#include "base/invariant.h"
#include "base/search.h"

/* ---- finding ---------------------------------------------------------------------------------------- */

/* Of a call, or where it would be; inputs are sorted by call. */
static uint32_t first_input_of(const msc_graph *graph, uint32_t call)
{
    return MSC__LOWER_BOUND(msc_input, call, msc_graph_inputs(graph), msc_graph_input_count(graph), call);
}

uint32_t msc__first_save(const msc_graph *graph, uint32_t position)
{
    return MSC__LOWER_BOUND(msc_save, pack, msc_graph_saves(graph), msc_graph_save_count(graph), position);
}

/* ---- one move -------------------------------------------------------------------------------------- */

static msc__moved start_move(const msc_graph *graph, uint32_t buffer, uint32_t position)
{
    const msc_buffer *moved = &msc_graph_buffers(graph)[buffer];
    msc__moved move = {.buffer = buffer, .use = MSC_NONE, .back = MSC_NONE, .size_bytes = moved->size_bytes};

    move.put = position > moved->begin || moved->resident ? position : moved->begin + 1;
    MSC__ASSERT(move.put <= msc_graph_op_count(graph));
    return move;
}

void msc__move_note(msc__moved *move, const msc_graph *graph, const msc_save *save)
{
    if (save->release > move->release)
        move->release = save->release;
    if (!msc__save_is_unused(save, msc_graph_op_count(graph)) && save->unpack < move->use)
        move->use = save->unpack;
}

msc__moved msc__move_of_save(const msc_graph *graph, const msc_save *save)
{
    msc__moved move = start_move(graph, save->buffer, save->pack);

    msc__move_note(&move, graph, save);
    return move;
}

msc__moved msc__move_of_input(const msc_graph *graph, const msc__region *region, uint32_t buffer)
{
    const msc_save *saves = msc_graph_saves(graph);
    msc__moved move = start_move(graph, buffer, region->begin);
    uint32_t i;

    move.use = region->redo;
    move.release = region->until;
    MSC__ASSERT(region->live && move.use <= move.release);
    for (i = msc__first_save(graph, region->begin);
         i < msc_graph_save_count(graph) && saves[i].pack <= region->end; i++)
        if (saves[i].buffer == buffer && msc__save_is_inside(&saves[i], region))
            msc__move_note(&move, graph, &saves[i]);
    return move;
}

/* ---- all moves of a region ------------------------------------------------------------------------- */

static int compare_uses(const void *left, const void *right)
{
    const msc__moved *a = left;
    const msc__moved *b = right;

    if (a->use != b->use)
        return a->use < b->use ? -1 : 1;
    return (a->order > b->order) - (a->order < b->order);
}

static int compare_orders(const void *left, const void *right)
{
    const msc__moved *a = left;
    const msc__moved *b = right;

    return (a->order > b->order) - (a->order < b->order);
}

void msc__moves_by_use(msc__moved *moves, uint32_t count)
{
    qsort(moves, count, sizeof *moves, compare_uses);
}

void msc__moves_by_order(msc__moved *moves, uint32_t count)
{
    qsort(moves, count, sizeof *moves, compare_orders);
}

/* `waits` is what was put from move i on, up to before move k. */
static void settle_out(msc__moved *moves, uint32_t count, const msc__move_limits *limits)
{
    uint64_t waits = 0;
    uint32_t k = 0;
    uint32_t i;

    for (i = 0; i < count; i++) {
        uint32_t settle;
        while (waits <= limits->window_out_bytes && k < count)
            waits += moves[k++].size_bytes;
        MSC__ASSERT(k > i);
        settle = waits > limits->window_out_bytes ? moves[k - 1].put : limits->end;
        moves[i].settle = settle > moves[i].put ? settle : moves[i].put;
        MSC__ASSERT(waits >= moves[i].size_bytes && (i == 0 || moves[i].order > moves[i - 1].order));
        waits -= moves[i].size_bytes;
    }
}

/* `ahead` is what comes back after move j, up to move i. */
static void bring_back(msc__moved *moves, uint32_t count, const msc__move_limits *limits)
{
    uint64_t ahead = 0;
    uint32_t first = 0; /* of those that are ahead of move i or it */
    uint32_t i;

    for (i = 0; i < count && moves[i].use != MSC_NONE; i++) {
        ahead += moves[i].size_bytes;
        while (ahead > limits->window_in_bytes)
            ahead -= moves[first++].size_bytes;
        MSC__ASSERT(first <= i + 1 && (i == 0 || moves[i].use >= moves[i - 1].use));
        moves[i].back = moves[first > 0 ? first - 1 : 0].use;
        MSC__ASSERT(moves[i].back <= moves[i].use);
    }
}

void msc__moves_settle(msc__moved *moves, uint32_t count, const msc__move_limits *limits)
{
    if (count == 0)
        return;
    settle_out(moves, count, limits);
    msc__moves_by_use(moves, count);
    bring_back(moves, count, limits);
    msc__moves_by_order(moves, count);
}

bool msc__moves_have(const msc__moved *moves, uint32_t count, uint32_t buffer)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        if (moves[i].buffer == buffer)
            return true;
    return false;
}

/* ---- a plan's -------------------------------------------------------------------------------------- */

/* What a plan's moves are listed with. */
typedef struct listing {
    const msc_graph *graph;
    msc__plan_regions *out;
    msc__moved *moves;
    uint32_t *last_of; /* per buffer: its latest move, plus 1 */
    uint32_t first;    /* of the region's moves */
} listing;

static void add_move(listing *l, msc__moved move)
{
    MSC__ASSERT(l->out->move_count < msc_graph_save_count(l->graph) + msc_graph_input_count(l->graph));
    move.order = l->out->move_count - l->first;
    l->moves[l->out->move_count++] = move;
    l->last_of[move.buffer] = l->out->move_count;
}

static void list_saves(listing *l, const msc__region *region, const uint32_t *named, uint32_t count)
{
    const msc_save *saves = msc_graph_saves(l->graph);
    uint32_t ordinal = 0;
    uint32_t i;

    for (i = msc__first_save(l->graph, region->begin);
         i < msc_graph_save_count(l->graph) && saves[i].pack <= region->end; i++) {
        uint32_t last = l->last_of[saves[i].buffer];
        if (!msc__save_is_inside(&saves[i], region))
            continue;
        if (!msc__offsets_have(named, count, ordinal++) ||
            msc_graph_buffers(l->graph)[saves[i].buffer].resident)
            continue;
        if (last > l->first)
            msc__move_note(&l->moves[last - 1], l->graph, &saves[i]);
        else
            add_move(l, msc__move_of_save(l->graph, &saves[i]));
        l->out->move_of_save[i] = l->last_of[saves[i].buffer];
    }
}

static void list_inputs(listing *l, const msc__region *region, const uint32_t *named, uint32_t count)
{
    const msc_input *inputs = msc_graph_inputs(l->graph);
    const msc_buffer *buffers = msc_graph_buffers(l->graph);
    const msc_save *saves = msc_graph_saves(l->graph);
    uint32_t ordinal = 0;
    uint32_t i;

    for (i = first_input_of(l->graph, region->first_call);
         i < msc_graph_input_count(l->graph) && inputs[i].call == region->first_call; i++) {
        const msc_buffer *buffer = &buffers[inputs[i].buffer];
        if (msc__offsets_have(named, count, ordinal++) && !buffer->resident && buffer->begin < region->begin)
            add_move(l, msc__move_of_input(l->graph, region, inputs[i].buffer));
    }
    for (i = msc__first_save(l->graph, region->begin);
         i < msc_graph_save_count(l->graph) && saves[i].pack <= region->end; i++)
        if (msc__save_is_inside(&saves[i], region) && l->last_of[saves[i].buffer] > l->first)
            l->out->move_of_save[i] = l->last_of[saves[i].buffer];
}

void msc__moves_of_plan(const msc_graph *graph, const msc_plan *plan, msc__plan_regions *out,
                        const msc__moves_room *room)
{
    const msc_plan_summary *summary = plan == NULL ? NULL : msc_plan_get_summary(plan);
    listing l = {.graph = graph, .out = out, .moves = room->moves, .last_of = room->last_of};
    uint32_t r;

    out->moves = room->moves;
    out->move_count = 0;
    for (r = 0; r < out->count; r++) {
        msc__region *region = &out->regions[r];
        uint32_t count = 0;
        const uint32_t *named = msc_plan_moved(
            plan, msc_plan_find(plan, msc_graph_calls(graph)[region->first_call].module), &count);
        msc__move_limits limits;
        l.first = out->move_count;
        if (region->offload)
            list_saves(&l, region, named, count);
        else if (region->live && region->boundary)
            list_inputs(&l, region, named, count);
        region->first_move = l.first;
        region->move_count = out->move_count - l.first;
        if (region->move_count == 0)
            continue;
        MSC__ASSERT(summary != NULL);
        limits = msc__move_limits_of(region, summary->window_out_bytes, summary->window_in_bytes);
        msc__moves_settle(room->moves + l.first, region->move_count, &limits);
    }
}
