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
} golden;

static msc_graph *transformer(msc_context *ctx)
{
    return synth_transformer(ctx, 12);
}

static const golden goldens[] = {
    {"transformer", transformer, MSC_SIM_HOST, 40},
    {"transformer_tight", transformer, MSC_SIM_HOST, 0},
    {"transformer_cuda", transformer, MSC_SIM_CUDA, 40},
    {"chain", synth_chain, MSC_SIM_HOST, 50},
    {"shared", synth_shared, MSC_SIM_HOST, 50},
    {"nothing", synth_nothing, MSC_SIM_HOST, 0},
    {"huge", synth_huge, MSC_SIM_HOST, 0},
    {"barred", synth_barred, MSC_SIM_HOST, 30},
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
