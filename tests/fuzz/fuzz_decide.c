/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Properties of a decision on any graph: it is the same twice; its peak is that of the replayed trace; it
 * fits exactly when it says so; a lower budget gives neither a higher peak nor a faster step.
 *
 * Bytes: 2 choose the budgets, 1 the allocator, whether outputs may be kept, what it costs to look at an
 * operation, and whether, how fast and how much may be offloaded, the rest is a graph (tests/unit/decide/synth_bytes.c).
 */
#include <stdint.h>
#include <stdlib.h>

#include "memscale/memscale.h"
#include "synth.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int holds)
{
    if (!holds)
        abort();
}

static msc_plan *decide(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options)
{
    msc_plan *plan = NULL;

    require(msc_decide(ctx, graph, options, &plan, NULL) == MSC_OK);
    return plan;
}

static uint64_t replayed_peak(msc_context *ctx, const msc_graph *graph, const msc_plan *plan,
                              const msc_sim_options *options)
{
    msc_trace *trace = NULL;
    msc_sim *sim = NULL;
    msc_replay replay;

    require(msc_sim_create(ctx, options, &sim, NULL) == MSC_OK);
    require(msc_trace_create(ctx, graph, plan, &trace, NULL) == MSC_OK);
    require(msc_trace_replay(trace, sim, NULL, 0, &replay, NULL) == MSC_OK);
    require(msc_sim_validate(sim, NULL) == MSC_OK);
    msc_trace_destroy(trace);
    msc_sim_destroy(sim);
    return replay.peak_bytes;
}

/* Everything that must hold of one decision; returns its summary. */
static msc_plan_summary check_decision(msc_context *ctx, const msc_graph *graph,
                                       const msc_decide_options *options)
{
    msc_plan *plan = decide(ctx, graph, options);
    msc_plan *again = decide(ctx, graph, options);
    msc_plan_summary summary = *msc_plan_get_summary(plan);

    require(msc_plan_digest(plan) == msc_plan_digest(again));
    require(summary.peak_bytes == replayed_peak(ctx, graph, plan, &options->sim));
    require(summary.plain_peak_bytes == replayed_peak(ctx, graph, NULL, &options->sim));
    require(summary.fits == (summary.peak_bytes <= options->budget_bytes));
    require(summary.smallest_peak_bytes <= summary.peak_bytes);
    require(summary.step_ns >= summary.plain_step_ns);
    require(summary.away_peak_bytes <= options->link.limit_bytes);
    require(options->allow_offload || summary.away_peak_bytes == 0);
    msc_plan_destroy(plan);
    msc_plan_destroy(again);
    return summary;
}

static msc_decide_options make_options(uint32_t byte)
{
    msc_decide_options options = msc_decide_options_default();

    options.sim = msc_sim_options_default(byte % 2 == 0 ? MSC_SIM_HOST : MSC_SIM_CUDA);
    options.allow_selective = byte / 2 % 4 != 3;
    if (byte / 8 % 2 == 0) {
        options.rates.launch_ns = 1000;
        options.rates.recompute_ns = 2000;
        options.rates.intercept_ns = 100;
    }
    options.allow_offload = byte / 16 % 2;
    options.link.least_bytes = 1;
    options.link.offload_ns = 500;
    options.link.out_bytes_per_us = byte / 32 % 2 == 0 ? 2000 : 100000;
    options.link.window_out_bytes = byte / 64 % 2 * 100000;
    options.link.window_in_bytes = byte / 64 % 2 * 100000;
    if (byte / 128 % 2 != 0)
        options.link.limit_bytes = 1000000;
    else if (options.sim.kind == MSC_SIM_HOST)
        options.link.staging_bytes = byte / 64 % 2 * 5000;
    options.rerun_bytes = byte / 8 % 2 * 3000;
    return options;
}

static void check_graph(msc_context *ctx, const msc_graph *graph, uint32_t high, uint32_t low, uint32_t byte)
{
    msc_decide_options options = make_options(byte);
    msc_plan_summary plain;
    msc_plan_summary wide;
    msc_plan_summary tight;

    plain = check_decision(ctx, graph, &options);
    options.budget_bytes = plain.plain_peak_bytes / 256 * high;
    wide = check_decision(ctx, graph, &options);
    options.budget_bytes = plain.plain_peak_bytes / 256 * (low % (high + 1));
    tight = check_decision(ctx, graph, &options);
    require(tight.peak_bytes <= wide.peak_bytes);
    require(!wide.fits || tight.step_ns >= wide.step_ns);
    require(wide.smallest_peak_bytes == tight.smallest_peak_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    msc_context *ctx = NULL;
    msc_graph *graph;

    if (size < 3 || msc_context_create(NULL, &ctx, NULL) != MSC_OK)
        return 0;
    graph = synth_bytes(ctx, data + 3, size - 3);
    require(graph != NULL);
    check_graph(ctx, graph, data[0], data[1], data[2]);
    msc_graph_destroy(graph);
    require(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
    return 0;
}
