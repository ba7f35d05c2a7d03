/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a graph and a plan to lists per position, by the rules at the top of sim_trace.c.
 *
 * First the regions are found (sim_lifetimes.c). Then two ends per buffer: `end` of its forward instance, and
 * `redo_end`, up to which internal saves hold its recomputed instance. Then everything that happens is put
 * into buckets, in the order in which it happens at one position:
 *
 *      drops     moves that are offloaded no longer
 *      puts      moves that begin
 *      frees     forward and recomputed instances in buffer order, then states in region order, then instances that
 *                came back, in the order of their puts
 *      returns   moves that come back
 *      redos     regions that recompute there, the later call first
 *      starts    regions that begin there, for their states
 *      arrivals  weights that come with the operation
 *      begins    buffers that the operation makes
 *      expires   buffers whose recomputed instance goes while its recompute still runs
 *
 * Cost: operations + buffers + saves × nesting depth.
 */
#include "sim/sim_derive.h"

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "sim/sim_ahead.h"

/* Bytes that may be alive at once, of everything, so that sums of them never overflow. */
#define MOST_BYTES ((uint64_t)1 << 63)

static void raise_to(uint32_t *value, uint32_t least)
{
    if (*value < least)
        *value = least;
}

/* The region that drops a save, or MSC_NONE: what lies on a kept buffer is not dropped. */
static uint32_t dropped_by(const msc__derivation *d, const msc_save *save)
{
    const msc_buffer *buffer = &d->buffers[save->buffer];
    uint32_t r = save->call == MSC_NONE ? MSC_NONE : d->plan.cover[save->call];

    if (r == MSC_NONE || !msc__save_is_internal(save, buffer, &d->plan.regions[r]) ||
        msc__op_is_kept(d, buffer->begin))
        return MSC_NONE;
    return r;
}

/* Whether a region's boundary has the buffer moved. Cost: its moves. */
static bool is_moved_by(const msc__derivation *d, uint32_t r, uint32_t buffer)
{
    const msc__region *region = &d->plan.regions[r];

    return region->move_count > 0 &&
           msc__moves_have(d->plan.moves + region->first_move, region->move_count, buffer);
}

/* What the outermost calls of a region are given from outside is held, unless it moves. */
static void hold_input(msc__derivation *d, const msc_call *calls, const msc_input *input)
{
    uint32_t parent = calls[input->call].parent;
    uint32_t r = d->plan.cover[input->call];

    if (r == MSC_NONE || is_moved_by(d, r, input->buffer) ||
        (parent != MSC_NONE && d->plan.cover[parent] != MSC_NONE))
        return;
    if (!msc__is_made_inside(&d->buffers[input->buffer], &d->plan.regions[r]))
        raise_to(&d->end[input->buffer], d->plan.regions[r].until);
}

static void find_ends(msc__derivation *d, const msc_graph *graph)
{
    const msc_save *saves = msc_graph_saves(graph);
    const msc_input *inputs = msc_graph_inputs(graph);
    uint32_t i;

    for (i = 0; i < d->buffer_count; i++)
        d->end[i] = msc__natural_end(&d->buffers[i]);
    for (i = 0; i < msc_graph_save_count(graph); i++) {
        uint32_t b = saves[i].buffer;
        if (d->plan.move_of_save[i] > 0)
            continue;
        if (dropped_by(d, &saves[i]) == MSC_NONE)
            raise_to(&d->end[b], saves[i].release);
        else if (!msc__save_is_unused(&saves[i], d->op_count))
            raise_to(&d->redo_end[b], saves[i].release);
    }
    for (i = 0; i < msc_graph_input_count(graph); i++)
        hold_input(d, msc_graph_calls(graph), &inputs[i]);
    for (i = 0; i < d->plan.move_count; i++) {
        MSC__ASSERT(!d->buffers[d->plan.moves[i].buffer].resident);
        raise_to(&d->end[d->plan.moves[i].buffer], d->plan.moves[i].settle);
    }
}

/* A save that is released where its region recomputes holds its instance for the recompute only. A kept
 * buffer that nothing holds any longer stays until the recompute is over. */
static void settle_ends(msc__derivation *d, const msc__region *region)
{
    uint32_t i;

    MSC__ASSERT(region->live && region->end <= d->op_count);
    for (i = d->begins.first[region->begin]; i < d->begins.first[region->end]; i++) {
        uint32_t b = d->begins.items[i];
        if (msc__op_is_kept(d, d->buffers[b].begin)) {
            if (d->end[b] <= region->redo)
                d->end[b] = MSC__WITH_RECOMPUTE;
        } else if (d->redo_end[b] > 0 && d->redo_end[b] <= region->redo) {
            d->redo_end[b] = MSC__WITH_RECOMPUTE;
        }
    }
}

static void add_region(msc__derivation *d, uint32_t r)
{
    const msc__region *region = &d->plan.regions[r];
    uint32_t i;

    MSC__ASSERT(region->begin < region->stop && region->stop <= region->end);
    MSC__ASSERT(region->redo >= region->end && region->redo <= d->op_count);
    msc__buckets_add(&d->starts, region->begin, r);
    for (i = d->begins.first[region->begin]; i < d->begins.first[region->stop]; i++) {
        uint32_t b = d->begins.items[i];
        if (msc__redo_expires_inside(d, b, region))
            msc__buckets_add(&d->expires, msc__natural_end(&d->buffers[b]), b);
    }
}

static void add_frees(msc__derivation *d)
{
    uint32_t b;
    uint32_t r;

    for (b = 0; b < d->buffer_count; b++) {
        if (d->end[b] <= d->op_count)
            msc__buckets_add(&d->frees, d->end[b], b);
        if (msc__redo_is_held(d, b))
            msc__buckets_add(&d->frees, d->redo_end[b], d->buffer_count + b);
    }
    for (r = 0; r < d->plan.count; r++)
        if (d->plan.regions[r].live && d->plan.regions[r].state_bytes > 0)
            msc__buckets_add(&d->frees, d->plan.regions[r].until, 2 * d->buffer_count + r);
}

static void add_moves(msc__derivation *d)
{
    uint32_t i;

    for (i = 0; i < d->plan.move_count; i++) {
        const msc__moved *move = &d->plan.moves[i];
        MSC__ASSERT(move->put <= move->settle && (move->back == MSC_NONE || move->back <= move->use));
        if (move->release > move->put) { /* else it is never away */
            msc__buckets_add(&d->puts, move->put, i);
            msc__buckets_add(&d->drops, move->release, i);
        }
        if (move->back == MSC_NONE)
            continue;
        msc__buckets_add(&d->returns, move->back, i);
        if (msc__move_end(move) <= d->op_count)
            msc__buckets_add(&d->frees, msc__move_end(move), msc__returned_object(d, i));
    }
}

static void fill_begins(msc__derivation *d, msc__scratch *scratch)
{
    int pass;
    uint32_t b;

    msc__buckets_init(scratch, &d->begins, d->op_count + 2);
    msc__buckets_init(scratch, &d->arrivals, d->op_count + 2);
    for (pass = 0; pass < 2; pass++) {
        for (b = 0; b < d->buffer_count; b++) {
            const msc_buffer *buffer = &d->buffers[b];
            if (!buffer->resident)
                msc__buckets_add(msc__is_made_again(buffer) ? &d->begins : &d->arrivals, buffer->begin, b);
        }
        if (pass == 0) {
            msc__buckets_place(scratch, &d->begins);
            msc__buckets_place(scratch, &d->arrivals);
        }
    }
}

static void fill_buckets(msc__derivation *d, msc__scratch *scratch)
{
    uint32_t positions = d->op_count + 2;
    int pass;
    uint32_t r;

    for (r = 0; r < d->plan.count; r++)
        if (d->plan.regions[r].live)
            settle_ends(d, &d->plan.regions[r]);
    msc__buckets_init(scratch, &d->frees, positions);
    msc__buckets_init(scratch, &d->expires, positions);
    msc__buckets_init(scratch, &d->starts, positions);
    msc__buckets_init(scratch, &d->redos, positions);
    msc__buckets_init(scratch, &d->puts, positions);
    msc__buckets_init(scratch, &d->drops, positions);
    msc__buckets_init(scratch, &d->returns, positions);
    for (pass = 0; pass < 2; pass++) {
        for (r = 0; r < d->plan.count; r++)
            if (d->plan.regions[r].live)
                add_region(d, r);
        for (r = d->plan.count; r-- > 0;)
            if (d->plan.regions[r].live)
                msc__buckets_add(&d->redos, d->plan.regions[r].redo, r);
        add_frees(d);
        add_moves(d);
        if (pass == 0) {
            msc__buckets_place(scratch, &d->puts);
            msc__buckets_place(scratch, &d->drops);
            msc__buckets_place(scratch, &d->returns);
            msc__buckets_place(scratch, &d->expires);
            msc__buckets_place(scratch, &d->starts);
            msc__buckets_place(scratch, &d->redos);
            msc__buckets_place(scratch, &d->frees);
        }
    }
}

/* Every buffer and every state at most twice, staging, what came back and the largest scratch at once: an upper bound
 * of what is live. */
static msc_status check_sizes(const msc__derivation *d, msc_error *err)
{
    uint64_t sum = 0;
    uint64_t scratch_bytes = 0;
    uint32_t i;

    for (i = 0; i < d->buffer_count; i++)
        sum = msc__sat_add_u64(sum, d->buffers[i].size_bytes);
    for (i = 0; i < d->plan.count; i++)
        sum = msc__sat_add_u64(sum, d->plan.regions[i].state_bytes);
    sum = msc__sat_add_u64(msc__sat_add_u64(sum, sum), d->staging_bytes);
    for (i = 0; i < d->plan.move_count; i++)
        sum = msc__sat_add_u64(sum, d->plan.moves[i].size_bytes);
    for (i = 0; i < d->op_count; i++)
        if (d->ops[i].scratch_bytes > scratch_bytes)
            scratch_bytes = d->ops[i].scratch_bytes;
    if (msc__sat_add_u64(sum, scratch_bytes) > MOST_BYTES)
        return msc__fail(err, MSC_EOVERFLOW, "a step of up to %llu bytes and %llu bytes of scratch",
                         (unsigned long long)sum, (unsigned long long)scratch_bytes);
    if ((uint64_t)d->buffer_count * 2 + d->plan.count + d->plan.move_count > UINT32_MAX)
        return msc__fail(err, MSC_EOVERFLOW, "%u buffers, %u regions and %u moves are too many",
                         d->buffer_count, d->plan.count, d->plan.move_count);
    return MSC_OK;
}

static void take_arrays(msc__derivation *d, msc__scratch *scratch, uint32_t call_count)
{
    d->plan.regions = msc__scratch_take(scratch, call_count, sizeof *d->plan.regions);
    d->plan.cover = msc__scratch_take(scratch, call_count, sizeof *d->plan.cover);
    d->plan.last_calls = msc__scratch_take(scratch, call_count, sizeof *d->plan.last_calls);
    d->plan.kept = msc__scratch_take(scratch, d->op_count, sizeof *d->plan.kept);
    d->end = msc__scratch_take(scratch, d->buffer_count, sizeof *d->end);
    d->redo_end = msc__scratch_take(scratch, d->buffer_count, sizeof *d->redo_end);
}

/* Few plans move anything, and only those need room for it. */
static void find_moves(msc__derivation *d, msc__scratch *scratch, const msc_graph *graph,
                       const msc_plan *plan)
{
    size_t most = 0;
    msc__moves_room room;
    msc__follow *follows;
    uint32_t r;

    for (r = 0; r < d->plan.count; r++)
        if (d->plan.regions[r].offload || d->plan.regions[r].boundary)
            most = (size_t)msc_graph_save_count(graph) + msc_graph_input_count(graph);
    d->plan.move_of_save =
        msc__scratch_take(scratch, msc_graph_save_count(graph), sizeof *d->plan.move_of_save);
    if (most == 0)
        return;
    room.moves = msc__scratch_take(scratch, most, sizeof *room.moves);
    room.last_of = msc__scratch_take(scratch, d->buffer_count, sizeof *room.last_of);
    follows = msc__scratch_take(scratch, d->plan.count, sizeof *follows);
    if (scratch->failed_bytes > 0)
        return;
    msc__moves_of_plan(graph, plan, &d->plan, &room);
    msc__moves_bring_early(graph, plan, &d->plan, follows);
}

msc_status msc__derive(msc__derivation *d, msc__scratch *scratch, const msc_graph *graph,
                       const msc_plan *plan, msc_error *err)
{
    msc_status status;

    d->ops = msc_graph_ops(graph);
    d->buffers = msc_graph_buffers(graph);
    d->op_count = msc_graph_op_count(graph);
    d->buffer_count = msc_graph_buffer_count(graph);
    d->staging_bytes = plan == NULL ? 0 : msc_plan_get_summary(plan)->staging_bytes;
    take_arrays(d, scratch, msc_graph_call_count(graph));
    if (scratch->failed_bytes > 0)
        return msc__scratch_check(scratch, "a trace", err);
    msc__regions_of_plan(graph, plan, &d->plan);
    find_moves(d, scratch, graph, plan);
    if (scratch->failed_bytes > 0)
        return msc__scratch_check(scratch, "a trace", err);
    status = check_sizes(d, err);
    if (status != MSC_OK)
        return status;
    find_ends(d, graph);
    fill_begins(d, scratch);
    if (scratch->failed_bytes > 0)
        return msc__scratch_check(scratch, "a trace", err);
    fill_buckets(d, scratch);
    return msc__scratch_check(scratch, "a trace", err);
}
