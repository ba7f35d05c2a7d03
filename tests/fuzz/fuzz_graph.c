/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target for everything that reads text: graphs and plans.
 *
 * Properties, for any bytes whatever:
 *
 *  - the parser gives a graph or an error with a message, never both, and no memory is left behind
 *  - memory is bounded by the length of the text, whatever numbers the text holds
 *  - what was parsed formats to the very text it came from, and parsing that gives the same digest
 *  - a parsed graph is finished and consistent enough for its liveness to be computed
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "memscale/graph.h"
#include "memscale/plan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A line of 10 bytes (an input) makes a record of 8 bytes and, at worst, 6 slots of 8 bytes; arrays may be
 * half empty. The rest is what an empty graph grows to with its first records. */
#define MOST_BYTES_PER_TEXT_BYTE 16u
#define MOST_FIXED_BYTES 16384u

static void require(int truth)
{
    if (!truth)
        abort();
}

static void check_ends(const msc_graph *graph)
{
    uint32_t count = msc_graph_buffer_count(graph);
    uint32_t *ends = malloc((size_t)count * sizeof *ends + 1);
    uint32_t i;

    require(ends != NULL);
    require(msc_graph_plain_ends(graph, ends, NULL) == MSC_OK);
    for (i = 0; i < count; i++)
        require(ends[i] >= msc_graph_buffers(graph)[i].begin && ends[i] <= msc_graph_op_count(graph) + 1);
    free(ends);
}

static void check_graph(msc_context *ctx, const msc_graph *graph, const char *text, size_t size)
{
    char *again = malloc(size + 1);
    size_t needed = 0;
    msc_graph *copy = NULL;

    require(again != NULL && msc_graph_is_finished(graph));
    require(msc_graph_format(graph, again, size + 1, &needed, NULL) == MSC_OK);
    require(needed == size && memcmp(again, text, size) == 0);
    require(msc_graph_parse(ctx, again, needed, &copy, NULL) == MSC_OK);
    require(msc_graph_digest(copy) == msc_graph_digest(graph));
    check_ends(copy);
    msc_graph_destroy(copy);
    free(again);
}

static void check_plan(msc_context *ctx, const msc_plan *plan, const char *text, size_t size)
{
    char *again = malloc(size + 1);
    size_t needed = 0;
    msc_plan *copy = NULL;

    require(again != NULL);
    require(msc_plan_format(plan, again, size + 1, &needed, NULL) == MSC_OK);
    require(needed == size && memcmp(again, text, size) == 0);
    require(msc_plan_parse(ctx, again, needed, &copy, NULL) == MSC_OK);
    require(msc_plan_digest(copy) == msc_plan_digest(plan));
    msc_plan_destroy(copy);
    free(again);
}

static void fuzz_graph(msc_context *ctx, const char *text, size_t size)
{
    msc_graph *graph = NULL;
    msc_error err = {0};
    msc_status status = msc_graph_parse(ctx, text, size, &graph, &err);

    require(msc_context_peak_bytes(ctx) <= MOST_FIXED_BYTES + (uint64_t)size * MOST_BYTES_PER_TEXT_BYTE);
    require((status == MSC_OK) == (graph != NULL));
    require(status == MSC_OK || (err.status == status && err.message[0] != '\0'));
    if (graph != NULL)
        check_graph(ctx, graph, text, size);
    msc_graph_destroy(graph);
    require(msc_context_held_bytes(ctx) == 0);
}

static void fuzz_plan(msc_context *ctx, const char *text, size_t size)
{
    msc_plan *plan = NULL;
    msc_error err = {0};
    msc_status status = msc_plan_parse(ctx, text, size, &plan, &err);

    require((status == MSC_OK) == (plan != NULL));
    require(status == MSC_OK || (err.status == status && err.message[0] != '\0'));
    if (plan != NULL)
        check_plan(ctx, plan, text, size);
    msc_plan_destroy(plan);
    require(msc_context_held_bytes(ctx) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char nothing[1] = "";
    const char *text = size == 0 ? nothing : (const char *)data;
    msc_context *ctx = NULL;

    require(msc_context_create(NULL, &ctx, NULL) == MSC_OK);
    fuzz_graph(ctx, text, size);
    fuzz_plan(ctx, text, size);
    msc_context_destroy(ctx);
    return 0;
}
