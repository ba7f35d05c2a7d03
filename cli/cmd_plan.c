/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `msc plan`: decides under a budget, and prints the plan.
 *
 *      summary     budget, plain and planned peak, smallest reachable peak, times
 *      table       one line per module: action, bytes, time, rule; below it what a selective checkpoint
 * keeps, and peak and time if this one choice were the other way round
 *
 * Modules that lie inside a checkpointed one follow it in every respect. They are folded into its line,
 * which says how many they are; --all lists them, and JSON always does. `--output` writes the canonical
 * text of the plan for `msc replay --plan`.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cmd.h"

/* ---- deciding ------------------------------------------------------------------------------------ */

static cli_exit decide(cli_work *work, const cli_args *args)
{
    msc_decide_options options = msc_decide_options_default();
    msc_error err;

    options.budget_bytes = args->budget_bytes;
    options.sim = msc_sim_options_default(args->device);
    options.allow_offload = args->offload_bytes > 0;
    options.link.out_bytes_per_us = args->offload_bytes / 1000000;
    options.link.in_bytes_per_us = args->offload_bytes / 1000000;
    if (msc_decide(work->ctx, work->graph, &options, &work->plan, &err) != MSC_OK)
        return cli_fail(args->graph_path, &err);
    return CLI_EXIT_OK;
}

static cli_exit write_plan(const msc_plan *plan, const char *path)
{
    size_t bytes = 0;
    char *text = NULL;
    FILE *file = NULL;
    msc_error err;
    cli_exit result = CLI_EXIT_OK;

    if (msc_plan_format(plan, NULL, 0, &bytes, &err) != MSC_OK)
        return cli_fail(path, &err);
    text = malloc(bytes + 1);
    file = fopen(path, "wb");
    if (text == NULL || file == NULL || msc_plan_format(plan, text, bytes + 1, NULL, &err) != MSC_OK ||
        fwrite(text, 1, bytes, file) != bytes || fflush(file) != 0) {
        cli_error(path, "cannot write the plan: %s", strerror(errno));
        result = CLI_EXIT_INTERNAL;
    }
    if (file != NULL)
        (void)fclose(file);
    free(text);
    return result;
}

/* ---- kept operations ----------------------------------------------------------------------------- */

/* First operation of a module's first call, from which kept operations are counted; 0 without a call. */
static uint32_t first_op(const msc_graph *graph, uint32_t module)
{
    const msc_call *calls = msc_graph_calls(graph);
    uint32_t i;

    for (i = 0; i < msc_graph_call_count(graph); i++) {
        if (calls[i].module == module)
            return calls[i].begin;
    }
    return 0;
}

/* Operations of the same name since `begin`: two of them are up#0 and up#1. */
static uint32_t op_ordinal(const msc_graph *graph, uint32_t begin, uint32_t op)
{
    const char *name = cli_op_name(graph, op);
    uint32_t count = 0;

    for (; begin < op && begin < msc_graph_op_count(graph); begin++)
        count += strcmp(cli_op_name(graph, begin), name) == 0;
    return count;
}

/* ---- text ---------------------------------------------------------------------------------------- */

/* Nearest module around `module` that is checkpointed, or MSC_NONE. */
static uint32_t checkpoint_around(const cli_work *work, uint32_t module)
{
    const msc_module *modules = msc_graph_modules(work->graph);

    do
        module = modules[module].parent;
    while (module != MSC_NONE && msc_plan_action(work->plan, module) == MSC_ACTION_KEEP);
    return module;
}

/* A kept module inside a checkpointed one needs no line of its own. */
static bool is_folded(const cli_work *work, const msc_choice *choice)
{
    return choice->action == MSC_ACTION_KEEP && checkpoint_around(work, choice->module) != MSC_NONE;
}

/* Choices that are folded into the line of `module`. */
static uint32_t count_folded(const cli_work *work, uint32_t module)
{
    const msc_choice *choices = msc_plan_choices(work->plan);
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(work->plan); i++)
        count += is_folded(work, &choices[i]) && checkpoint_around(work, choices[i].module) == module;
    return count;
}

static void print_kept(const cli_work *work, uint32_t index)
{
    const uint32_t begin = first_op(work->graph, msc_plan_choices(work->plan)[index].module);
    uint32_t count;
    const uint32_t *kept = msc_plan_kept(work->plan, index, &count);
    uint32_t i;

    printf("    keeps");
    for (i = 0; i < count; i++)
        printf("%s %s#%" PRIu32, i > 0 ? "," : "", cli_op_name(work->graph, begin + kept[i]),
               op_ordinal(work->graph, begin, begin + kept[i]));
    puts(count == 0 ? " nothing" : "");
}

static void print_moved(const msc_choice *choice)
{
    char bytes[CLI_QUANTITY_BYTES];
    char time[CLI_QUANTITY_BYTES];

    printf("    offloads %s: %" PRIu32 " tensors, %s; %s of the copies does not hide\n",
           choice->boundary ? "what it holds for its recompute" : "what it saves", choice->moved_count,
           cli_bytes(choice->moved_bytes, bytes), cli_time(choice->transfer_ns, time));
}

static void print_other(const msc_choice *choice)
{
    const char *other = choice->action != MSC_ACTION_KEEP ? "kept instead"
                        : choice->rule == MSC_RULE_SPLIT  ? "checkpointed as a whole"
                                                          : "checkpointed too";
    char peak[CLI_QUANTITY_BYTES];
    char time[CLI_QUANTITY_BYTES];

    printf("    %s: peak %s allocated, step %s\n", other, cli_bytes(choice->other_peak_bytes, peak),
           cli_time(choice->other_step_ns, time));
}

static void print_choice(const cli_work *work, uint32_t index, uint32_t folded, int width)
{
    const msc_choice *choice = &msc_plan_choices(work->plan)[index];
    char bytes[CLI_QUANTITY_BYTES];
    char time[CLI_QUANTITY_BYTES];

    if (choice->joined) {
        printf("%-*s  %-10s %12s %12s  in one region with the module before it", width,
               cli_module_path(work->graph, choice->module), "joined", "", "");
    } else {
        printf("%-*s  %-10s %12s %12s  %s", width, cli_module_path(work->graph, choice->module),
               msc_action_name((msc_action)choice->action), cli_bytes(choice->saved_bytes, bytes),
               cli_time(choice->cost_ns, time), msc_rule_text((msc_rule)choice->rule));
    }
    if (choice->call_count > 1)
        printf(" [%u calls]", choice->call_count);
    if (folded > 0)
        printf(" [+ %" PRIu32 " inside]", folded);
    putchar('\n');
    if (choice->action == MSC_ACTION_SELECTIVE)
        print_kept(work, index);
    if (choice->moved_count > 0)
        print_moved(choice);
    if (choice->other_peak_bytes > 0 && !choice->joined)
        print_other(choice);
}

static void print_table(const cli_work *work, bool all)
{
    const msc_choice *choices = msc_plan_choices(work->plan);
    uint32_t count = msc_plan_choice_count(work->plan);
    int width = (int)strlen("MODULE");
    uint32_t i;

    for (i = 0; i < count; i++) {
        size_t length = strlen(cli_module_path(work->graph, choices[i].module));
        if ((int)length > width && (all || !is_folded(work, &choices[i])))
            width = (int)length;
    }
    printf("\n%-*s  %-10s %12s %12s  %s\n", width, "MODULE", "ACTION", "FREES", "COSTS", "BECAUSE");
    for (i = 0; i < count; i++) {
        bool folds = !all && choices[i].action != MSC_ACTION_KEEP;
        if (all || !is_folded(work, &choices[i]))
            print_choice(work, i, folds ? count_folded(work, choices[i].module) : 0, width);
    }
}

static void print_summary(const cli_work *work, const cli_args *args)
{
    const msc_plan_summary *summary = msc_plan_get_summary(work->plan);
    char digest[CLI_QUANTITY_BYTES];
    char plain[CLI_QUANTITY_BYTES];
    char planned[CLI_QUANTITY_BYTES];

    printf("Plan %s for %s: %s\n", cli_digest(msc_plan_digest(work->plan), digest),
           cli_device_name(args->device), summary->fits ? "fits the budget" : "DOES NOT FIT the budget");
    cli_print_bytes("budget", summary->budget_bytes);
    cli_print_bytes("plain peak", summary->plain_peak_bytes);
    cli_print_bytes("planned peak", summary->peak_bytes);
    cli_print_bytes("smallest peak", summary->smallest_peak_bytes);
    if (summary->away_peak_bytes > 0)
        cli_print_bytes("most bytes away", summary->away_peak_bytes);
    printf("  step time          %12s  (plain %s)\n", cli_time(summary->step_ns, planned),
           cli_time(summary->plain_step_ns, plain));
    if (summary->fits)
        printf("  at most %u.%04u %% slower than any plan that fits\n", summary->time_bound_ppm / 10000,
               summary->time_bound_ppm % 10000);
    else
        cli_print_bytes("short by", summary->peak_bytes - summary->budget_bytes);
    printf("  peaks at operation %" PRIu32 ", %s in %s%s\n", summary->peak_op,
           cli_op_name(work->graph, summary->peak_op),
           cli_module_path(work->graph, cli_module_of_op(work->graph, summary->peak_op)),
           summary->peak_in_recompute ? ", in a recompute before it" : "");
}

/* ---- JSON ---------------------------------------------------------------------------------------- */

static json_t *json_kept(const cli_work *work, uint32_t index)
{
    const uint32_t begin = first_op(work->graph, msc_plan_choices(work->plan)[index].module);
    uint32_t count;
    const uint32_t *kept = msc_plan_kept(work->plan, index, &count);
    json_t *root = json_array();
    uint32_t i;

    for (i = 0; i < count; i++)
        json_array_append_new(root,
                              json_pack("{s:o, s:o, s:o}", "offset", cli_json_u64(kept[i]), "name",
                                        cli_json_text(cli_op_name(work->graph, begin + kept[i])), "ordinal",
                                        cli_json_u64(op_ordinal(work->graph, begin, begin + kept[i]))));
    return root;
}

static json_t *json_moved(const cli_work *work, uint32_t index)
{
    uint32_t count;
    const uint32_t *moved = msc_plan_moved(work->plan, index, &count);
    json_t *root = json_array();
    uint32_t i;

    for (i = 0; i < count; i++)
        json_array_append_new(root, cli_json_u64(moved[i]));
    return root;
}

static json_t *json_choices(const cli_work *work)
{
    const msc_choice *choices = msc_plan_choices(work->plan);
    const msc_module *modules = msc_graph_modules(work->graph);
    json_t *root = json_array();
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(work->plan); i++) {
        const msc_choice *c = &choices[i];
        const msc_module *module = &modules[c->module];
        json_array_append_new(
            root, json_pack("{s:o, s:o, s:o, s:s, s:s, s:s, s:i, s:o, s:o, s:o, s:o, s:b, s:o, s:b, s:o, "
                            "s:o, s:o, s:o, s:o}",
                            "module", cli_json_u64(c->module), "path",
                            cli_json_text(msc_graph_string(work->graph, module->path)), "type",
                            cli_json_text(msc_graph_string(work->graph, module->type)), "action",
                            msc_action_name((msc_action)c->action), "rule", msc_rule_key((msc_rule)c->rule),
                            "rule_text", msc_rule_text((msc_rule)c->rule), "call_count", (int)c->call_count,
                            "saved_bytes", cli_json_u64(c->saved_bytes), "cost_ns",
                            cli_json_u64((uint64_t)c->cost_ns), "other_peak_bytes",
                            cli_json_u64(c->other_peak_bytes), "other_step_ns",
                            cli_json_u64((uint64_t)c->other_step_ns), "joined", (int)c->joined, "kept",
                            json_kept(work, i), "boundary", (int)c->boundary, "moved_bytes",
                            cli_json_u64(c->moved_bytes), "moved_count", cli_json_u64(c->moved_count),
                            "transfer_ns", cli_json_u64((uint64_t)c->transfer_ns), "moved",
                            json_moved(work, i), "ahead_bytes", cli_json_u64(c->ahead_bytes)));
    }
    return root;
}

static json_t *json_plan(const cli_work *work, const cli_args *args)
{
    const msc_plan_summary *s = msc_plan_get_summary(work->plan);
    char graph[CLI_QUANTITY_BYTES];
    char plan[CLI_QUANTITY_BYTES];

    return json_pack("{s:s, s:s, s:s, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:b, s:o, s:o}",
                     "graph_digest", cli_digest(s->graph_digest, graph), "plan_digest",
                     cli_digest(msc_plan_digest(work->plan), plan), "device", cli_device_name(args->device),
                     "fits", (int)s->fits, "budget_bytes", cli_json_u64(s->budget_bytes), "plain_peak_bytes",
                     cli_json_u64(s->plain_peak_bytes), "peak_bytes", cli_json_u64(s->peak_bytes),
                     "smallest_peak_bytes", cli_json_u64(s->smallest_peak_bytes), "plain_step_ns",
                     cli_json_u64((uint64_t)s->plain_step_ns), "step_ns", cli_json_u64((uint64_t)s->step_ns),
                     "time_bound_ppm", cli_json_u64(s->time_bound_ppm), "peak_op", cli_json_u64(s->peak_op),
                     "peak_in_recompute", (int)s->peak_in_recompute, "away_peak_bytes",
                     cli_json_u64(s->away_peak_bytes), "choices", json_choices(work));
}

/* -------------------------------------------------------------------------------------------------- */

static cli_exit print_plan(const cli_work *work, const cli_args *args)
{
    if (args->json)
        return cli_print_json(json_plan(work, args));
    print_summary(work, args);
    print_table(work, args->all);
    return CLI_EXIT_OK;
}

cli_exit cmd_plan(const cli_args *args)
{
    cli_work work;
    cli_exit result = cli_work_open(&work, args->graph_path);

    if (result == CLI_EXIT_OK)
        result = decide(&work, args);
    if (result == CLI_EXIT_OK)
        result = print_plan(&work, args);
    if (result == CLI_EXIT_OK && args->output_path != NULL)
        result = write_plan(work.plan, args->output_path);
    if (result == CLI_EXIT_OK && !msc_plan_get_summary(work.plan)->fits)
        result = CLI_EXIT_OVER_BUDGET;
    cli_work_close(&work);
    return result;
}
