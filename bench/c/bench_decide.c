/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time and memory of the decision: bench_decide [--csv]
 *
 * Transformers of 12, 100 and so many blocks that the graph has about 100,000 operations (tests/unit/decide/
 * synth.c makes them). For each:
 *
 *   build     streaming the records in and freezing the graph; "bytes/event" is what the graph holds then
 * over the allocations, frees and executions that its plain step consists of replay    one step into the
 * simulator, HOST decide    a plan for a budget at 60 % of the plain peak, HOST and CUDA frontier  all plans
 * that the decision chooses from
 *
 * Each time is the median of five runs; the largest graph runs three times.
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "memscale/memscale.h"
#include "synth.h"

#define MOST_RUNS 5
#define LARGE_OPS 100000u

typedef struct bench {
    msc_context *ctx;
    msc_graph *graph;
    msc_decide_options options;
    uint32_t blocks;
    int runs;
    int csv;
} bench;

static double now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static void must(msc_status status, const msc_error *err)
{
    if (status == MSC_OK)
        return;
    fprintf(stderr, "bench_decide: %s\n", err->message);
    exit(1);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;

    return (x > y) - (x < y);
}

static void run_build(bench *b)
{
    msc_graph_destroy(b->graph);
    b->graph = synth_transformer(b->ctx, b->blocks);
    if (b->graph == NULL)
        exit(1);
}

/* Peak of the plain step; `event_count`, if wanted, gets the length of its trace. */
static uint64_t plain_peak_bytes(const bench *b, uint64_t *event_count)
{
    msc_error err = {0};
    msc_replay result = {0};
    msc_trace *trace = NULL;
    msc_sim *sim = NULL;

    must(msc_trace_create(b->ctx, b->graph, NULL, &trace, &err), &err);
    must(msc_sim_create(b->ctx, &b->options.sim, &sim, &err), &err);
    must(msc_trace_replay(trace, sim, NULL, 0, &result, &err), &err);
    if (event_count != NULL)
        *event_count = msc_trace_event_count(trace);
    msc_sim_destroy(sim);
    msc_trace_destroy(trace);
    return result.peak_bytes;
}

static void run_replay(bench *b)
{
    (void)plain_peak_bytes(b, NULL);
}

static void run_decide(bench *b)
{
    msc_error err = {0};
    msc_plan *plan = NULL;

    must(msc_decide(b->ctx, b->graph, &b->options, &plan, &err), &err);
    msc_plan_destroy(plan);
}

static void run_frontier(bench *b)
{
    msc_error err = {0};
    size_t count = 0;

    must(msc_decide_frontier(b->ctx, b->graph, &b->options, NULL, 0, &count, &err), &err);
}

static void measure(bench *b, const char *what, const char *kind, void (*run)(bench *))
{
    double ms[MOST_RUNS];
    double per_event = 0.0;
    uint64_t events = 0;
    int i;

    for (i = 0; i < b->runs; i++) {
        double begin = now_ms();
        run(b);
        ms[i] = now_ms() - begin;
    }
    qsort(ms, (size_t)b->runs, sizeof ms[0], compare_doubles);
    if (run == run_build)
        per_event = (double)msc_context_held_bytes(b->ctx);
    (void)plain_peak_bytes(b, &events);
    per_event /= (double)events;
    if (b->csv)
        printf("decide,%s,%s,%u,%u,%" PRIu64 ",%.3f,%.1f\n", what, kind, b->blocks,
               msc_graph_op_count(b->graph), events, ms[b->runs / 2], per_event);
    else
        printf("%-9s %-5s %5u blocks %7u ops %8" PRIu64 " events %10.3f ms %7.1f bytes/event\n", what, kind,
               b->blocks, msc_graph_op_count(b->graph), events, ms[b->runs / 2], per_event);
    fflush(stdout);
}

static void run_case(uint32_t blocks, int runs, int csv)
{
    static const msc_sim_kind kinds[] = {MSC_SIM_HOST, MSC_SIM_CUDA};
    static const char *const names[] = {"host", "cuda"};
    bench b = {.blocks = blocks, .runs = runs, .csv = csv, .options = msc_decide_options_default()};
    msc_error err = {0};
    int i;

    must(msc_context_create(NULL, &b.ctx, &err), &err);
    measure(&b, "build", "", run_build);
    for (i = 0; i < 2; i++) {
        b.options.sim = msc_sim_options_default(kinds[i]);
        b.options.budget_bytes = plain_peak_bytes(&b, NULL) / 10 * 6;
        measure(&b, "replay", names[i], run_replay);
        measure(&b, "decide", names[i], run_decide);
        measure(&b, "frontier", names[i], run_frontier);
    }
    msc_graph_destroy(b.graph);
    msc_context_destroy(b.ctx);
}

/* Blocks that make `ops` operations, by what one block adds. */
static uint32_t blocks_for(uint32_t ops)
{
    msc_context *ctx = NULL;
    msc_graph *one;
    msc_graph *three;
    msc_error err = {0};
    uint32_t per_block;

    must(msc_context_create(NULL, &ctx, &err), &err);
    one = synth_transformer(ctx, 1);
    three = synth_transformer(ctx, 3);
    if (one == NULL || three == NULL)
        exit(1);
    per_block = (msc_graph_op_count(three) - msc_graph_op_count(one)) / 2;
    msc_graph_destroy(one);
    msc_graph_destroy(three);
    msc_context_destroy(ctx);
    return ops / per_block;
}

int main(int argc, char **argv)
{
    int csv = argc > 1 && strcmp(argv[1], "--csv") == 0;

    run_case(12, MOST_RUNS, csv);
    run_case(100, MOST_RUNS, csv);
    run_case(blocks_for(LARGE_OPS), 3, csv);
    return 0;
}
