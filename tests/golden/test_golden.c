/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Golden plans: the canonical text of a few decisions, byte for byte, whatever the compiler and its options.
 *
 *      test_golden FOLDER            compares
 *      test_golden --write FOLDER    writes the files anew; the difference then tells what a change did
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "memscale/memscale.h"
#include "synth.h"

#define MOST_TEXT_BYTES (1 << 18)

static const char *folder;
static int writing;

typedef struct golden {
    const char *name;
    msc_graph *(*make)(msc_context *ctx);
    msc_sim_kind kind;
    uint32_t share_percent; /* budget: this share of the way from the smallest peak to the plain one */
    uint64_t bytes_per_us;  /* of the link; 0: nothing is offloaded */
} golden;

static msc_graph *transformer(msc_context *ctx)
{
    return synth_transformer(ctx, 12);
}

static msc_graph *blocks(msc_context *ctx)
{
    return synth_blocks(ctx, 6, SYNTH_HALVES);
}

static msc_graph *sequence(msc_context *ctx)
{
    return synth_sequence(ctx, 12, 0);
}

static msc_graph *sequence_long(msc_context *ctx)
{
    return synth_sequence(ctx, 40, SYNTH_UNEQUAL);
}

static msc_graph *sequence_in_place(msc_context *ctx)
{
    return synth_sequence(ctx, 10, SYNTH_IN_PLACE);
}

static msc_graph *tied(msc_context *ctx)
{
    return synth_tied(ctx, 6);
}

static msc_graph *unequal(msc_context *ctx)
{
    return synth_unequal(ctx, 12, 1);
}

static msc_graph *deep(msc_context *ctx)
{
    return synth_deep(ctx, 8);
}

static const golden goldens[] = {
    {"transformer", transformer, MSC_SIM_HOST, 40, 0},
    {"transformer_tight", transformer, MSC_SIM_HOST, 0, 0},
    {"transformer_cuda", transformer, MSC_SIM_CUDA, 40, 0},
    {"chain", synth_chain, MSC_SIM_HOST, 50, 0},
    {"shared", synth_shared, MSC_SIM_HOST, 50, 0},
    {"nothing", synth_nothing, MSC_SIM_HOST, 0, 0},
    {"huge", synth_huge, MSC_SIM_HOST, 0, 0},
    {"barred", synth_barred, MSC_SIM_HOST, 30, 0},
    {"blocks", blocks, MSC_SIM_HOST, 40, 0},
    {"blocks_tight", blocks, MSC_SIM_HOST, 0, 0},
    {"blocks_cuda", blocks, MSC_SIM_CUDA, 40, 0},
    {"sequence", sequence, MSC_SIM_HOST, 20, 0},
    {"sequence_long", sequence_long, MSC_SIM_HOST, 10, 0},
    {"sequence_in_place", sequence_in_place, MSC_SIM_HOST, 0, 0},
    {"tied", tied, MSC_SIM_HOST, 30, 0},
    {"unequal", unequal, MSC_SIM_HOST, 30, 0},
    {"deep", deep, MSC_SIM_HOST, 0, 0},
    {"offload", blocks, MSC_SIM_HOST, 20, 4000},
    {"offload_slow", blocks, MSC_SIM_HOST, 20, 60},
    {"offload_cuda", blocks, MSC_SIM_CUDA, 20, 4000},
    {"offload_barred", synth_barred, MSC_SIM_HOST, 0, 20000},
};

static void write_plan(const golden *g, char *text, size_t bytes)
{
    msc_decide_options options = msc_decide_options_default();
    const msc_plan_summary *s;
    msc_context *ctx;
    msc_graph *graph;
    msc_plan *plan;
    size_t needed;

    options.sim = msc_sim_options_default(g->kind);
    options.allow_offload = g->bytes_per_us > 0;
    options.link.out_bytes_per_us = g->bytes_per_us;
    options.link.in_bytes_per_us = g->bytes_per_us;
    options.link.least_bytes = 16384;
    options.link.window_out_bytes = 1 << 20;
    options.link.window_in_bytes = 1 << 20;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    graph = g->make(ctx);
    assert_non_null(graph);
    assert_int_equal(msc_decide(ctx, graph, &options, &plan, NULL), MSC_OK);
    s = msc_plan_get_summary(plan);
    options.budget_bytes =
        s->smallest_peak_bytes + (s->plain_peak_bytes - s->smallest_peak_bytes) / 100 * g->share_percent;
    msc_plan_destroy(plan);
    assert_int_equal(msc_decide(ctx, graph, &options, &plan, NULL), MSC_OK);
    assert_int_equal(msc_plan_format(plan, text, bytes, &needed, NULL), MSC_OK);
    assert_in_range(needed, 1, bytes - 1);
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    msc_context_destroy(ctx);
}

static void read_file(const char *path, char *text, size_t bytes)
{
    FILE *file = fopen(path, "rb");
    size_t count = 0;

    if (file != NULL) {
        count = fread(text, 1, bytes - 1, file);
        (void)fclose(file);
    }
    text[count] = '\0';
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
}

static void check(void **state)
{
    static char text[MOST_TEXT_BYTES];
    static char expected[MOST_TEXT_BYTES];
    const golden *g = *state;
    char path[4096];

    snprintf(path, sizeof path, "%s/%s.plan", folder, g->name);
    write_plan(g, text, sizeof text);
    if (writing)
        write_file(path, text);
    read_file(path, expected, sizeof expected);
    assert_string_equal(text, expected);
}

int main(int argc, char **argv)
{
    enum { COUNT = sizeof goldens / sizeof goldens[0] };
    struct CMUnitTest tests[COUNT];
    size_t i;

    writing = argc == 3 && strcmp(argv[1], "--write") == 0;
    if (argc != 2 + writing)
        return EXIT_FAILURE;
    folder = argv[argc - 1];
    for (i = 0; i < COUNT; i++) {
        const struct CMUnitTest test = {goldens[i].name, check, NULL, NULL, (void *)(uintptr_t)&goldens[i]};
        tests[i] = test;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
