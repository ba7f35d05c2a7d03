/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a graph and a plan to lists per position, by the rules at the top of sim_trace.c.
 *
 * First the regions are found (sim_lifetimes.c). Then two ends per buffer: `end` of its forward instance, and
 * `redo_end`, up to which internal saves hold its recomputed instance. Then everything that happens is put
 * into buckets, in the order in which it happens at one position:
 *
 *      frees     forward and recomputed instances in buffer order, then states in call order
 *      redos     regions that recompute there, the later call first
 *      starts    regions that begin there, for their states
 *      begins    buffers that the operation makes
 *      expires   buffers whose recomputed instance goes while its recompute still runs
 *
 * Cost: operations + buffers + saves × nesting depth.
 */
#include "sim/sim_derive.h"

#include "base/bytes.h"
#include "base/error.h"

/* Bytes that may be alive at once, of everything, so that sums of them never overflow. */
#define MOST_BYTES ((uint64_t)1 << 63)

static bool is_region(const msc__derivation *d, uint32_t call)
{
    return d->cover[call] == call;
}

static void raise_to(uint32_t *value, uint32_t least)
{
    if (*value < least)
        *value = least;
}

static void find_ends(msc__derivation *d, const msc_graph *graph)
{
    const msc_save *saves = msc_graph_saves(graph);
    const msc_input *inputs = msc_graph_inputs(graph);
    uint32_t i;

    for (i = 0; i < d->buffer_count; i++)
        d->end[i] = msc__natural_end(&d->buffers[i]);
    for (i = 0; i < msc_graph_save_count(graph); i++) {
        uint32_t region = saves[i].call == MSC_NONE ? MSC_NONE : d->cover[saves[i].call];
        uint32_t b = saves[i].buffer;
        if (region == MSC_NONE || !msc__save_is_internal(&saves[i], &d->buffers[b], &d->regions[region]))
            raise_to(&d->end[b], saves[i].release);
        else if (!msc__save_is_unused(&saves[i], d->op_count))
            raise_to(&d->redo_end[b], saves[i].release);
    }
    for (i = 0; i < msc_graph_input_count(graph); i++)
        if (is_region(d, inputs[i].call))
            raise_to(&d->end[inputs[i].buffer], d->regions[inputs[i].call].until);
}

/* A save that is released where its region recomputes holds its instance for the recompute only. */
static void settle_redo_ends(msc__derivation *d, const msc__region *region)
{
    uint32_t i;

    for (i = d->begins.first[region->begin]; i < d->begins.first[region->stop]; i++) {
        uint32_t *end = &d->redo_end[d->begins.items[i]];
        if (*end > 0 && *end <= region->redo)
            *end = MSC__WITH_RECOMPUTE;
    }
}

static void add_region(msc__derivation *d, uint32_t call)
{
    const msc__region *region = &d->regions[call];
    uint32_t i;

    msc__buckets_add(&d->starts, region->begin, call);
    for (i = d->begins.first[region->begin]; i < d->begins.first[region->stop]; i++) {
        uint32_t b = d->begins.items[i];
        if (msc__redo_expires_inside(d, b, region))
            msc__buckets_add(&d->expires, msc__natural_end(&d->buffers[b]), b);
    }
}

static void add_frees(msc__derivation *d)
{
    uint32_t b;
    uint32_t c;

    for (b = 0; b < d->buffer_count; b++) {
        if (d->end[b] <= d->op_count)
            msc__buckets_add(&d->frees, d->end[b], b);
        if (msc__redo_is_held(d, b))
            msc__buckets_add(&d->frees, d->redo_end[b], d->buffer_count + b);
    }
    for (c = 0; c < d->call_count; c++)
        if (is_region(d, c) && d->modules[d->calls[c].module].state_bytes > 0)
            msc__buckets_add(&d->frees, d->regions[c].until, 2 * d->buffer_count + c);
}

static void fill_begins(msc__derivation *d, msc__scratch *scratch)
{
    int pass;
    uint32_t b;

    msc__buckets_init(scratch, &d->begins, d->op_count + 2);
    for (pass = 0; pass < 2; pass++) {
        for (b = 0; b < d->buffer_count; b++)
            if (!d->buffers[b].resident)
                msc__buckets_add(&d->begins, d->buffers[b].begin, b);
        if (pass == 0)
            msc__buckets_place(scratch, &d->begins);
    }
}

static void fill_buckets(msc__derivation *d, msc__scratch *scratch)
{
    uint32_t positions = d->op_count + 2;
    int pass;
    uint32_t i;

    for (i = 0; i < d->call_count; i++)
        if (is_region(d, i))
            settle_redo_ends(d, &d->regions[i]);
    msc__buckets_init(scratch, &d->frees, positions);
    msc__buckets_init(scratch, &d->expires, positions);
    msc__buckets_init(scratch, &d->starts, positions);
    msc__buckets_init(scratch, &d->redos, positions);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < d->call_count; i++)
            if (is_region(d, i))
                add_region(d, i);
        for (i = d->call_count; i-- > 0;)
            if (is_region(d, i))
                msc__buckets_add(&d->redos, d->regions[i].redo, i);
        add_frees(d);
        if (pass == 0) {
            msc__buckets_place(scratch, &d->expires);
            msc__buckets_place(scratch, &d->starts);
            msc__buckets_place(scratch, &d->redos);
            msc__buckets_place(scratch, &d->frees);
        }
    }
}

/* Every buffer at most twice, every state and the largest scratch at once: an upper bound of what is live. */
static msc_status check_sizes(const msc__derivation *d, msc_error *err)
{
    uint64_t sum = 0;
    uint64_t scratch_bytes = 0;
    uint32_t i;

    for (i = 0; i < d->buffer_count; i++)
        sum = msc__sat_add_u64(sum, d->buffers[i].size_bytes);
    sum = msc__sat_add_u64(sum, sum);
    for (i = 0; i < d->call_count; i++)
        if (is_region(d, i))
            sum = msc__sat_add_u64(sum, d->modules[d->calls[i].module].state_bytes);
    for (i = 0; i < d->op_count; i++)
        if (d->ops[i].scratch_bytes > scratch_bytes)
            scratch_bytes = d->ops[i].scratch_bytes;
    if (msc__sat_add_u64(sum, scratch_bytes) > MOST_BYTES)
        return msc__fail(err, MSC_EOVERFLOW, "a step of up to %llu bytes and %llu bytes of scratch",
                         (unsigned long long)sum, (unsigned long long)scratch_bytes);
    if ((uint64_t)d->buffer_count * 2 + d->call_count > UINT32_MAX)
        return msc__fail(err, MSC_EOVERFLOW, "%u buffers and %u calls are too many", d->buffer_count,
                         d->call_count);
    return MSC_OK;
}

msc_status msc__derive(msc__derivation *d, msc__scratch *scratch, const msc_graph *graph,
                       const msc_plan *plan, msc_error *err)
{
    msc_status status;

    d->ops = msc_graph_ops(graph);
    d->buffers = msc_graph_buffers(graph);
    d->modules = msc_graph_modules(graph);
    d->calls = msc_graph_calls(graph);
    d->op_count = msc_graph_op_count(graph);
    d->buffer_count = msc_graph_buffer_count(graph);
    d->call_count = msc_graph_call_count(graph);
    d->regions = msc__scratch_take(scratch, d->call_count, sizeof *d->regions);
    d->cover = msc__scratch_take(scratch, d->call_count, sizeof *d->cover);
    d->end = msc__scratch_take(scratch, d->buffer_count, sizeof *d->end);
    d->redo_end = msc__scratch_take(scratch, d->buffer_count, sizeof *d->redo_end);
    if (scratch->failed_bytes > 0)
        return msc__scratch_check(scratch, "a trace", err);
    msc__regions_derive(graph, d->regions);
    msc__regions_cover(graph, plan, d->regions, d->cover);
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
