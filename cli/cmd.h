/* SPDX-License-Identifier: Apache-2.0 */
/** @file cmd.h  The commands of `msc`, and reading what they work on. */
#ifndef MSC_CLI_CMD_H
#define MSC_CLI_CMD_H

#include "args.h"
#include "memscale/memscale.h"
#include "print.h"

/** What a command works on. A zeroed one is empty. */
typedef struct cli_work {
    msc_context *ctx;
    msc_graph *graph;
    msc_plan *plan; /**< NULL: the plain step */
} cli_work;

/** Creates the context and reads the graph. `cli_work_close` is due in any case. */
cli_exit cli_work_open(cli_work *work, const char *graph_path);

/** Reads a plan and checks that it was made for the graph. */
cli_exit cli_work_read_plan(cli_work *work, const char *plan_path, const char *graph_path);

void cli_work_close(cli_work *work);

cli_exit cmd_plan(const cli_args *args);
cli_exit cmd_replay(const cli_args *args);
cli_exit cmd_inspect(const cli_args *args);
cli_exit cmd_snapshot(const cli_args *args);

#endif /* MSC_CLI_CMD_H */
