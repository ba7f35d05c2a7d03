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
#include "base/bytes.h"
#include "base/error.h"
#include "decide/decide_internal.h"

/* All that is alive at once, everything twice, must stay below this: sums of two such totals fit int64_t. */
#define MOST_BYTES ((uint64_t)1 << 61)
/* The CUDA allocator hands out multiples of this. */
#define CUDA_UNIT_BYTES 512u

static void read_graph(msc__model *model, const msc_graph *graph)
{
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
    uint32_t low = 0;
    uint32_t high = model->op_count;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (model->ops[middle].phase == MSC_PHASE_FORWARD)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void find_last_calls(msc__model *model)
{
    uint32_t c;

    for (c = model->call_count; c-- > 0;) {
        uint32_t parent = model->calls[c].parent;
        if (model->last_call[c] < c)
            model->last_call[c] = c;
        if (parent != MSC_NONE && model->last_call[parent] < model->last_call[c])
            model->last_call[parent] = model->last_call[c];
    }
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
            if (!model->buffers[i].resident)
                msc__buckets_add(&model->begins, model->buffers[i].begin, i);
        if (pass == 0) {
            msc__buckets_place(&model->scratch, &model->saves_by_call);
            msc__buckets_place(&model->scratch, &model->begins);
        }
    }
}

/* The sum of everything that could ever be alive at once, rounding included. */
static msc_status check_sizes(msc__model *model, msc_error *err)
{
    uint64_t unit = model->unit_bytes;
    uint64_t sum = 0;
    uint64_t most_scratch = 0;
    uint32_t i;

    for (i = 0; i < model->buffer_count; i++) {
        uint64_t rounded = msc__round_up_u64(model->buffers[i].size_bytes, unit);
        sum = msc__sat_add_u64(sum, msc__sat_add_u64(rounded, rounded));
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

    model->regions = msc__scratch_take(scratch, model->call_count, sizeof *model->regions);
    model->last_call = msc__scratch_take(scratch, model->call_count, sizeof *model->last_call);
    model->time_before_ns =
        msc__scratch_take(scratch, (size_t)model->op_count + 1, sizeof *model->time_before_ns);
    model->subjects = msc__scratch_take(scratch, model->module_count, sizeof *model->subjects);
    model->candidates = msc__scratch_take(scratch, model->module_count, sizeof *model->candidates);
    model->region_calls = msc__scratch_take(scratch, model->call_count, sizeof *model->region_calls);
}

msc_status msc__model_init(msc__model *model, msc_context *ctx, const msc_graph *graph,
                           const msc_decide_options *options, msc_error *err)
{
    msc_status status;

    *model = (msc__model){.scratch = {.ctx = ctx}};
    read_graph(model, graph);
    model->unit_bytes = options->sim.kind == MSC_SIM_CUDA ? CUDA_UNIT_BYTES : 1;
    status = check_sizes(model, err);
    if (status != MSC_OK)
        return status;
    take_arrays(model);
    fill_buckets(model);
    if (model->scratch.failed_bytes > 0)
        return msc__scratch_check(&model->scratch, "a decision", err);
    model->forward_end = find_forward_end(model);
    find_last_calls(model);
    msc__regions_derive(graph, model->regions);
    msc__cost_times(model, &options->rates);
    return msc__model_judge(model, err);
}

void msc__model_fini(msc__model *model)
{
    msc__scratch_fini(&model->scratch);
}
