/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans a training step from C alone: four blocks, each of which saves two activations for backward.
 *     cc 01_plan.c $(pkg-config --cflags --libs memscale) && ./a.out
 * The graph says what the plain step does, in program order. The decision says which blocks to checkpoint
 * so that the step fits a budget, and what the peak is without and with the plan.
 */
#include <memscale/memscale.h>
#include <stdio.h>
#include <stdlib.h>

#define BLOCKS 4
#define MIB ((uint64_t)1 << 20)

static msc_error err;

/* Ends the program with the library's own sentence when a call fails. */
static void check(msc_status status)
{
    if (status != MSC_OK) {
        fprintf(stderr, "%s: %s\n", msc_status_name(status), err.message);
        exit(EXIT_FAILURE);
    }
}

static uint32_t run_op(msc_graph *graph, const char *name, uint64_t out_bytes, msc_category category)
{
    const msc_op op = {.flops = 200000000, .moved_bytes = 2 * out_bytes};
    uint32_t buffer;

    check(msc_graph_add_op(graph, name, &op, NULL, &err));
    check(msc_graph_add_buffer(graph, out_bytes, category, &buffer, &err));
    return buffer;
}

/* One block: hidden = up(input); output = down(hidden). Backward needs both inputs, so both are saved. */
static uint32_t forward(msc_graph *graph, uint32_t module, uint32_t input, uint32_t saves[2])
{
    uint32_t call, hidden, output;

    check(msc_graph_begin_call(graph, module, &call, &err));
    check(msc_graph_add_input(graph, call, input, &err));
    check(msc_graph_add_save(graph, input, &saves[0], &err));
    hidden = run_op(graph, "up", 32 * MIB, MSC_CATEGORY_ACTIVATION);
    check(msc_graph_add_save(graph, hidden, &saves[1], &err));
    output = run_op(graph, "down", 8 * MIB, MSC_CATEGORY_ACTIVATION);
    check(msc_graph_end_buffer(graph, hidden, &err));
    check(msc_graph_end_call(graph, call, &err));
    return output;
}

/* Backward of one block: uses its saves, last first, and lets go of the gradient that came in. */
static uint32_t backward(msc_graph *graph, const uint32_t saves[2], uint32_t gradient)
{
    uint32_t next;
    int i;

    for (i = 1; i >= 0; i--) {
        check(msc_graph_unpack(graph, saves[i], &err));
        next = run_op(graph, "backward", (i == 1 ? 32 : 8) * MIB, MSC_CATEGORY_TEMPORARY);
        check(msc_graph_release(graph, saves[i], &err));
        check(msc_graph_end_buffer(graph, gradient, &err));
        gradient = next;
    }
    return gradient;
}

static void build(msc_graph *graph)
{
    const msc_module root = {.parent = MSC_NONE, .flags = MSC_MODULE_ROOT};
    const msc_module block = {.parent = 0, .structure = 1};
    uint32_t saves[BLOCKS][2], x, next, i;
    char path[16];

    check(msc_graph_add_module(graph, "", "Model", &root, NULL, &err));
    check(msc_graph_add_buffer(graph, 8 * MIB, MSC_CATEGORY_INPUT, &x, &err));
    for (i = 0; i < BLOCKS; i++) {
        snprintf(path, sizeof path, "blocks.%u", i);
        check(msc_graph_add_module(graph, path, "Block", &block, NULL, &err));
        next = forward(graph, i + 1, x, saves[i]);
        if (i > 0)
            check(msc_graph_end_buffer(graph, x, &err)); /* the saves still hold it */
        x = next;
    }
    check(msc_graph_set_phase(graph, MSC_PHASE_BACKWARD, &err));
    for (i = BLOCKS; i-- > 0;)
        x = backward(graph, saves[i], x);
    check(msc_graph_finish(graph, &err));
}

int main(void)
{
    msc_decide_options options = msc_decide_options_default();
    const msc_plan_summary *summary;
    msc_context *ctx;
    msc_graph *graph;
    msc_plan *plan;
    uint32_t i;

    check(msc_context_create(NULL, &ctx, &err));
    check(msc_graph_create(ctx, &graph, &err));
    build(graph);
    options.budget_bytes = 140 * MIB;
    check(msc_decide(ctx, graph, &options, &plan, &err));
    summary = msc_plan_get_summary(plan);
    printf("plain peak %llu MiB, planned peak %llu MiB, budget %llu MiB: %s\n",
           (unsigned long long)(summary->plain_peak_bytes / MIB),
           (unsigned long long)(summary->peak_bytes / MIB), (unsigned long long)(summary->budget_bytes / MIB),
           summary->fits ? "fits" : "does not fit");
    for (i = 0; i < msc_plan_choice_count(plan); i++) {
        const msc_choice *choice = &msc_plan_choices(plan)[i];
        printf("%-10s %-10s %s\n", msc_graph_string(graph, msc_graph_modules(graph)[choice->module].path),
               msc_action_name(choice->action), msc_rule_text(choice->rule));
    }
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    msc_context_destroy(ctx);
    return EXIT_SUCCESS;
}
