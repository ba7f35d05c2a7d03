/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time and memory of the decision: bench_decide [--csv]
 *
 * Transformers of 12, 100 and so many blocks that the graph has about 10,000, 100,000 and a million operations,
 * 100 blocks in which it matters what is kept ("blocks"), and a chain of 10,000 layers ("chain"); the files
 * tests/unit/decide/synth*.c make them. For each:
 *
 *   build     streaming the records in and freezing the graph; bytes: what the graph holds then, per
 *             allocation, free and execution that its plain step consists of
 *   replay    one step into the simulator
 *   decide    a plan for a budget at 60 % of the plain peak; bytes: what that holds at its peak, per operation
 *   frontier  all plans that the decision chooses from
 *
 * Each time is processor time (there is one thread, and it never waits), the median of five runs; large graphs run
 * three times, the largest once.
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

typedef msc_graph *maker(msc_context *ctx, uint32_t count);

typedef struct bench {
    const char *name; /* after what is measured; "" for transformers */
    maker *make;
    msc_context *ctx;
    msc_context *own; /* that decisions are made in */
    msc_graph *graph;
    msc_decide_options options;
    uint32_t blocks;
    int runs;
    int csv;
} bench;

static double now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
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
    b->graph = b->make(b->ctx, b->blocks);
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

    must(msc_decide(b->own, b->graph, &b->options, &plan, &err), &err);
    msc_plan_destroy(plan);
}

static void run_frontier(bench *b)
{
    msc_error err = {0};
    size_t count = 0;

    must(msc_decide_frontier(b->own, b->graph, &b->options, NULL, 0, &count, &err), &err);
}

/* Median of the runs, ms. */
static double median_ms(bench *b, void (*run)(bench *))
{
    double ms[MOST_RUNS];
    int i;

    for (i = 0; i < b->runs; i++) {
        double begin = now_ms();
        run(b);
        ms[i] = now_ms() - begin;
    }
    qsort(ms, (size_t)b->runs, sizeof ms[0], compare_doubles);
    return ms[b->runs / 2];
}

static void measure(bench *b, const char *what, const char *kind, void (*run)(bench *))
{
    msc_error err = {0};
    double bytes = 0.0;
    uint64_t events = 0;
    double ms;

    must(msc_context_create(NULL, &b->own, &err), &err);
    ms = median_ms(b, run);
    (void)plain_peak_bytes(b, &events);
    if (run == run_build)
        bytes = (double)msc_context_held_bytes(b->ctx) / (double)events;
    if (run == run_decide)
        bytes = (double)msc_context_peak_bytes(b->own) / (double)msc_graph_op_count(b->graph);
    msc_context_destroy(b->own);
    if (b->csv)
        printf("decide,%s%s,%s,%u,%u,%" PRIu64 ",%.3f,%.1f\n", what, b->name, kind, b->blocks,
               msc_graph_op_count(b->graph), events, ms, bytes);
    else
        printf("%-8s%-7s %-5s %5u blocks %7u ops %8" PRIu64 " events %10.3f ms %7.1f bytes\n", what, b->name,
               kind, b->blocks, msc_graph_op_count(b->graph), events, ms, bytes);
    fflush(stdout);
}

static void run_case(const char *name, maker *make, uint32_t blocks, int runs, int csv)
{
    static const msc_sim_kind kinds[] = {MSC_SIM_HOST, MSC_SIM_CUDA};
    static const char *const names[] = {"host", "cuda"};
    bench b = {.name = name,
               .make = make,
               .blocks = blocks,
               .runs = runs,
               .csv = csv,
               .options = msc_decide_options_default()};
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

static msc_graph *make_blocks(msc_context *ctx, uint32_t count)
{
    return synth_blocks(ctx, count, SYNTH_HALVES | SYNTH_LAYERS);
}

static msc_graph *make_chain(msc_context *ctx, uint32_t count)
{
    return synth_sequence(ctx, count, 0);
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

    run_case("", synth_transformer, 12, MOST_RUNS, csv);
    run_case("", synth_transformer, blocks_for(10000), MOST_RUNS, csv);
    run_case("", synth_transformer, 100, MOST_RUNS, csv);
    run_case("", synth_transformer, blocks_for(100000), 3, csv);
    run_case("", synth_transformer, blocks_for(1000000), 1, csv);
    run_case("-blocks", make_blocks, 100, MOST_RUNS, csv);
    run_case("-chain", make_chain, 10000, 3, csv);
    return 0;
}
