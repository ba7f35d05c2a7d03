/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `msc replay`: plays a step into the allocator simulator and says where it peaks and what fills memory
 * then. Without a plan it is the plain step. This is the same replay that the decision rests on.
 */
#include <inttypes.h>
#include <stdio.h>

#include "cmd.h"

static cli_exit replay(const cli_work *work, const cli_args *args, msc_replay *out)
{
    msc_sim_options options = msc_sim_options_default(args->device);
    msc_trace *trace = NULL;
    msc_sim *sim = NULL;
    msc_error err;
    cli_exit result = CLI_EXIT_OK;

    if (msc_trace_create(work->ctx, work->graph, work->plan, &trace, &err) != MSC_OK ||
        msc_sim_create(work->ctx, &options, &sim, &err) != MSC_OK ||
        msc_trace_replay(trace, sim, NULL, 0, out, &err) != MSC_OK)
        result = cli_fail(args->graph_path, &err);
    msc_sim_destroy(sim);
    msc_trace_destroy(trace);
    return result;
}

static void print_text(const cli_work *work, const cli_args *args, const msc_replay *seen)
{
    unsigned i;

    printf("Replay of the %s step on %s\n", work->plan == NULL ? "plain" : "planned",
           cli_device_name(args->device));
    cli_print_bytes("peak", seen->peak_bytes);
    cli_print_bytes("allocated peak", seen->stats.allocated_peak_bytes);
    cli_print_bytes("reserved peak", seen->stats.reserved_peak_bytes);
    printf("  peaks at operation %" PRIu32 ", %s in %s%s\n\nAt the peak\n", seen->peak_op,
           cli_op_name(work->graph, seen->peak_op),
           cli_module_path(work->graph, cli_module_of_op(work->graph, seen->peak_op)),
           seen->peak_in_recompute ? ", in a recompute before it" : "");
    for (i = 0; i < MSC_CATEGORY_COUNT; i++)
        cli_print_bytes(cli_category_name((msc_category)i), seen->category_peak_bytes[i]);
}

static json_t *json_by_category(const msc_replay *seen)
{
    json_t *root = json_object();
    unsigned i;

    for (i = 0; i < MSC_CATEGORY_COUNT; i++)
        json_object_set_new(root, cli_category_name((msc_category)i),
                            cli_json_u64(seen->category_peak_bytes[i]));
    return root;
}

static json_t *json_replay(const cli_work *work, const cli_args *args, const msc_replay *seen)
{
    char digest[CLI_QUANTITY_BYTES];

    return json_pack(
        "{s:s, s:s, s:b, s:o, s:o, s:o, s:o, s:b, s:o, s:o, s:o}", "graph_digest",
        cli_digest(msc_graph_digest(work->graph), digest), "device", cli_device_name(args->device), "planned",
        work->plan != NULL, "peak_bytes", cli_json_u64(seen->peak_bytes), "allocated_peak_bytes",
        cli_json_u64(seen->stats.allocated_peak_bytes), "reserved_peak_bytes",
        cli_json_u64(seen->stats.reserved_peak_bytes), "peak_op", cli_json_u64(seen->peak_op),
        "peak_in_recompute", (int)seen->peak_in_recompute, "peak_op_name",
        cli_json_text(cli_op_name(work->graph, seen->peak_op)), "peak_module",
        cli_json_text(cli_module_path(work->graph, cli_module_of_op(work->graph, seen->peak_op))),
        "by_category_bytes", json_by_category(seen));
}

cli_exit cmd_replay(const cli_args *args)
{
    cli_work work;
    msc_replay seen = {.peak_op = MSC_NONE};
    cli_exit result = cli_work_open(&work, args->graph_path);

    if (result == CLI_EXIT_OK && args->plan_path != NULL)
        result = cli_work_read_plan(&work, args->plan_path, args->graph_path);
    if (result == CLI_EXIT_OK)
        result = replay(&work, args, &seen);
    if (result == CLI_EXIT_OK && args->json)
        result = cli_print_json(json_replay(&work, args, &seen));
    else if (result == CLI_EXIT_OK)
        print_text(&work, args, &seen);
    cli_work_close(&work);
    return result;
}
