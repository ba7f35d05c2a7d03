/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `msc inspect`: what a graph holds. Counts, operations and work by phase, storages by category, and the
 * modules whose calls save the most for backward. Nothing is planned; the plain step is not replayed.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cmd.h"

typedef struct phase_sum {
    uint32_t op_count;
    uint64_t flops; /* saturating */
} phase_sum;

typedef struct category_sum {
    uint32_t buffer_count;
    uint32_t resident_count;
    uint64_t size_bytes;
} category_sum;

typedef struct findings {
    phase_sum phases[MSC_PHASE_COUNT];
    category_sum categories[MSC_CATEGORY_COUNT];
    uint32_t random_op_count;
} findings;

static const char *const phase_names[MSC_PHASE_COUNT] = {"forward", "backward", "optimizer"};

static findings collect(const msc_graph *graph)
{
    const msc_op *ops = msc_graph_ops(graph);
    const msc_buffer *buffers = msc_graph_buffers(graph);
    findings found;
    uint32_t i;

    memset(&found, 0, sizeof found);
    for (i = 0; i < msc_graph_op_count(graph); i++) {
        phase_sum *phase = &found.phases[ops[i].phase];
        phase->op_count++;
        phase->flops = ops[i].flops > UINT64_MAX - phase->flops ? UINT64_MAX : phase->flops + ops[i].flops;
        found.random_op_count += (ops[i].flags & MSC_OP_RANDOM) != 0;
    }
    for (i = 0; i < msc_graph_buffer_count(graph); i++) {
        category_sum *category = &found.categories[buffers[i].category];
        category->buffer_count++;
        category->resident_count += buffers[i].resident;
        category->size_bytes += buffers[i].size_bytes;
    }
    return found;
}

static void print_text(const msc_graph *graph, const findings *found)
{
    char digest[CLI_QUANTITY_BYTES];
    char text[CLI_QUANTITY_BYTES];
    unsigned i;

    printf("Graph %s\n", cli_digest(msc_graph_digest(graph), digest));
    printf("  modules %" PRIu32 ", calls %" PRIu32 ", operations %" PRIu32 ", buffers %" PRIu32 "\n",
           msc_graph_module_count(graph), msc_graph_call_count(graph), msc_graph_op_count(graph),
           msc_graph_buffer_count(graph));
    printf("  saved tensors %" PRIu32 ", inputs of calls %" PRIu32 ", in-place writes %" PRIu32 "\n\n",
           msc_graph_save_count(graph), msc_graph_input_count(graph), msc_graph_write_count(graph));
    printf("%-16s %10s %20s\n", "PHASE", "OPERATIONS", "FLOPS");
    for (i = 0; i < MSC_PHASE_COUNT; i++)
        printf("%-16s %10" PRIu32 " %20" PRIu64 "\n", phase_names[i], found->phases[i].op_count,
               found->phases[i].flops);
    printf("\n%-16s %10s %10s %14s\n", "CATEGORY", "BUFFERS", "RESIDENT", "BYTES IN ALL");
    for (i = 0; i < MSC_CATEGORY_COUNT; i++)
        printf("%-16s %10" PRIu32 " %10" PRIu32 " %14s\n", cli_category_name((msc_category)i),
               found->categories[i].buffer_count, found->categories[i].resident_count,
               cli_bytes(found->categories[i].size_bytes, text));
}

static json_t *json_phases(const findings *found)
{
    json_t *root = json_object();
    unsigned i;

    for (i = 0; i < MSC_PHASE_COUNT; i++)
        json_object_set_new(root, phase_names[i],
                            json_pack("{s:i, s:o}", "operations", (int)found->phases[i].op_count, "flops",
                                      cli_json_u64(found->phases[i].flops)));
    return root;
}

static json_t *json_categories(const findings *found)
{
    json_t *root = json_object();
    unsigned i;

    for (i = 0; i < MSC_CATEGORY_COUNT; i++)
        json_object_set_new(root, cli_category_name((msc_category)i),
                            json_pack("{s:i, s:i, s:o}", "buffers", (int)found->categories[i].buffer_count,
                                      "resident", (int)found->categories[i].resident_count, "size_bytes",
                                      cli_json_u64(found->categories[i].size_bytes)));
    return root;
}

static json_t *json_counts(const msc_graph *graph, const findings *found)
{
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "modules",
                     (int)msc_graph_module_count(graph), "calls", (int)msc_graph_call_count(graph),
                     "operations", (int)msc_graph_op_count(graph), "random_operations",
                     (int)found->random_op_count, "buffers", (int)msc_graph_buffer_count(graph), "saves",
                     (int)msc_graph_save_count(graph), "inputs", (int)msc_graph_input_count(graph), "writes",
                     (int)msc_graph_write_count(graph));
}

cli_exit cmd_inspect(const cli_args *args)
{
    cli_work work;
    cli_exit result = cli_work_open(&work, args->graph_path);

    if (result == CLI_EXIT_OK) {
        findings found = collect(work.graph);
        char digest[CLI_QUANTITY_BYTES];
        if (args->json)
            result = cli_print_json(json_pack("{s:s, s:o, s:o, s:o}", "digest",
                                              cli_digest(msc_graph_digest(work.graph), digest), "counts",
                                              json_counts(work.graph, &found), "phases", json_phases(&found),
                                              "categories", json_categories(&found)));
        else
            print_text(work.graph, &found);
    }
    cli_work_close(&work);
    return result;
}
