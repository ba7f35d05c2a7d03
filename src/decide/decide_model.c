/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model: the graph, in the form that the decision reads.
 *
 * The graph's arrays are used where they lie. What is added is derived: one region per call, the saves of a
 * call and of everything inside it side by side, buffers by begin, and the time before each position. Calls
 * are numbered in order of entry, so the calls inside call c are exactly c + 1 … last_call[c].
 *
 * The model refers to the graph, which must outlive it.
 */
#include "decide/decide_model.h"

#include "base/bytes.h"
#include "base/error.h"
#include "base/search.h"

/* All that is alive at once, everything twice, must stay below this: sums of two such totals fit int64_t. */
#define MOST_BYTES ((uint64_t)1 << 61)
/* The CUDA allocator hands out multiples of this. */
#define CUDA_UNIT_BYTES 512u

static void read_graph(msc__model *model, const msc_graph *graph)
{
    model->graph = graph;
    model->ops = msc_graph_ops(graph);
    model->buffers = msc_graph_buffers(graph);
    model->saves = msc_graph_saves(graph);
    model->modules = msc_graph_modules(graph);
    model->calls = msc_graph_calls(graph);
    model->inputs = msc_graph_inputs(graph);
    model->writes = msc_graph_writes(graph);
    model->op_count = msc_graph_op_count(graph);
    model->buffer_count = msc_graph_buffer_count(graph);
    model->save_count = msc_graph_save_count(graph);
    model->module_count = msc_graph_module_count(graph);
    model->call_count = msc_graph_call_count(graph);
    model->input_count = msc_graph_input_count(graph);
    model->write_count = msc_graph_write_count(graph);
}

static uint32_t find_forward_end(const msc__model *model)
{
    return MSC__LOWER_BOUND(msc_op, phase, model->ops, model->op_count, MSC_PHASE_FORWARD + 1);
}

static void fill_buckets(msc__model *model)
{
    int pass;
    uint32_t i;

    msc__buckets_init(&model->scratch, &model->saves_by_call, model->call_count);
    msc__buckets_init(&model->scratch, &model->begins, model->op_count);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < model->save_count; i++)
            if (model->saves[i].call != MSC_NONE)
                msc__buckets_add(&model->saves_by_call, model->saves[i].call, i);
        for (i = 0; i < model->buffer_count; i++)
            if (msc__is_made_again(&model->buffers[i]))
                msc__buckets_add(&model->begins, model->buffers[i].begin, i);
        if (pass == 0) {
            msc__buckets_place(&model->scratch, &model->saves_by_call);
            msc__buckets_place(&model->scratch, &model->begins);
        }
    }
}

/* The sum of everything that could ever be alive at once, rounding included. */
static msc_status check_sizes(msc__model *model, bool allow_offload, msc_error *err)
{
    uint64_t unit = model->unit_bytes;
    uint64_t sum = 0;
    uint64_t most_scratch = 0;
    uint32_t i;

    for (i = 0; i < model->buffer_count; i++) {
        uint64_t rounded = msc__round_up_u64(model->buffers[i].size_bytes, unit);
        sum = msc__sat_add_u64(sum, msc__sat_add_u64(rounded, rounded));
        if (allow_offload) /* what came back may be there beside both */
            sum = msc__sat_add_u64(sum, rounded);
    }
    for (i = 0; i < model->call_count; i++)
        sum = msc__sat_add_u64(sum,
                               msc__round_up_u64(model->modules[model->calls[i].module].state_bytes, unit));
    for (i = 0; i < model->op_count; i++)
        if (model->ops[i].scratch_bytes > most_scratch)
            most_scratch = model->ops[i].scratch_bytes;
    sum = msc__sat_add_u64(sum, msc__round_up_u64(most_scratch, unit));
    if (sum > MOST_BYTES)
        return msc__fail(err, MSC_EOVERFLOW, "cannot decide on a step of more than %llu bytes",
                         (unsigned long long)MOST_BYTES);
    model->most_bytes = sum;
    return MSC_OK;
}

static void take_arrays(msc__model *model)
{
    msc__scratch *scratch = &model->scratch;

    model->call_regions = msc__scratch_take(scratch, model->call_count, sizeof *model->call_regions);
    model->last_call = msc__scratch_take(scratch, model->call_count, sizeof *model->last_call);
    model->time_before_ns =
        msc__scratch_take(scratch, (size_t)model->op_count + 1, sizeof *model->time_before_ns);
    model->subjects = msc__scratch_take(scratch, model->module_count, sizeof *model->subjects);
}

/* Room for one of each, so that the lists of a graph without candidates are empty rather than NULL. */
static msc_status open_lists(msc__model *model, msc_error *err)
{
    msc_context *ctx = model->scratch.ctx;
    msc_status status = msc__array_reserve(ctx, &model->candidate_list, sizeof *model->candidates, 1, err);

    if (status == MSC_OK)
        status = msc__array_reserve(ctx, &model->region_list, sizeof *model->regions, 1, err);
    if (status == MSC_OK)
        status = msc__array_reserve(ctx, &model->kept_list, sizeof *model->kept, 1, err);
    if (status == MSC_OK)
        status = msc__array_reserve(ctx, &model->moved_list, sizeof *model->moved, 1, err);
    if (status == MSC_OK)
        status = msc__array_reserve(ctx, &model->move_list, sizeof *model->moves, 1, err);
    model->candidates = model->candidate_list.items;
    model->regions = model->region_list.items;
    model->kept = model->kept_list.items;
    model->moved = model->moved_list.items;
    model->moves = model->move_list.items;
    return status;
}

msc_status msc__model_read(msc__model *model, msc_context *ctx, const msc_graph *graph,
                           const msc_decide_options *options, msc_error *err)
{
    msc_status status;

    *model = (msc__model){.scratch = {.ctx = ctx}};
    read_graph(model, graph);
    model->unit_bytes = options->sim.kind == MSC_SIM_CUDA ? CUDA_UNIT_BYTES : 1;
    model->link = options->link;
    model->rerun_bytes = options->rerun_bytes;
    status = check_sizes(model, options->allow_offload != 0, err);
    if (status != MSC_OK)
        return status;
    take_arrays(model);
    fill_buckets(model);
    if (model->scratch.failed_bytes > 0)
        return msc__scratch_check(&model->scratch, "a decision", err);
    model->forward_end = find_forward_end(model);
    msc__last_calls(graph, model->last_call);
    msc__regions_derive(graph, model->call_regions);
    return open_lists(model, err);
}

uint32_t msc__first_input(const msc__model *model, uint32_t call)
{
    return MSC__LOWER_BOUND(msc_input, call, model->inputs, model->input_count, call);
}

uint32_t msc__first_write(const msc__model *model, uint32_t op)
{
    return MSC__LOWER_BOUND(msc_write, op, model->writes, model->write_count, op);
}

void msc__model_fini(msc__model *model)
{
    msc_context *ctx = model->scratch.ctx;

    if (ctx == NULL)
        return;
    msc__array_fini(ctx, &model->candidate_list, sizeof *model->candidates);
    msc__array_fini(ctx, &model->region_list, sizeof *model->regions);
    msc__array_fini(ctx, &model->kept_list, sizeof *model->kept);
    msc__array_fini(ctx, &model->moved_list, sizeof *model->moved);
    msc__array_fini(ctx, &model->move_list, sizeof *model->moves);
    msc__scratch_fini(&model->scratch);
}
