/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `msc`: plans and replays training steps from graph files, without Python and without a device.
 *
 * The tool is a user of the shared library like any other: it sees the installed headers and nothing else.
 * Exit codes are stable: 0 done, 1 the budget cannot be met, 2 bad input or usage, 3 anything else.
 */
#include <stdio.h>
#include <string.h>

#include "cmd.h"

static const char usage[] =
    "usage: msc plan GRAPH --budget SIZE [--device cpu|cuda] [--offload SIZE] [--output FILE] [--all] "
    "[--json]\n"
    "       msc replay GRAPH [--plan FILE] [--device cpu|cuda] [--json]\n"
    "       msc inspect GRAPH [--json]\n"
    "       msc snapshot FILE [--replay] [--json]\n"
    "       msc --version | --help\n"
    "\n"
    "plan     decides which modules to checkpoint or offload so that the step fits SIZE, and prints why\n"
    "replay   plays the step, plain or under a plan, and prints where memory peaks\n"
    "inspect  prints what the graph holds\n"
    "snapshot prints what a file of torch.cuda.memory._dump_snapshot holds\n"
    "\n"
    "  --budget SIZE   123, 8GB (1000s), 8GiB (1024s), 1.5GiB, 512MiB ...\n"
    "  --device NAME   cpu: live bytes; cuda: PyTorch's caching allocator (default: cpu)\n"
    "  --offload SIZE  tensors may leave the device, at SIZE per second each way\n"
    "  --plan FILE     plan written by `msc plan --output`\n"
    "  --output FILE   write the plan there\n"
    "  --replay        play the snapshot's trace into the allocator simulator and compare\n"
    "  --all           list the modules inside checkpointed ones too\n"
    "  --json          print JSON\n"
    "\n"
    "Exit codes: 0 done, 1 the budget cannot be met (the smallest plan is printed), 2 bad input or usage,\n"
    "3 input or output failed, or an internal error.\n";

typedef struct command {
    const char *name;
    unsigned takes;
    cli_exit (*run)(const cli_args *args);
} command;

static const command commands[] = {
    {"plan", CLI_TAKES_BUDGET | CLI_TAKES_OUTPUT | CLI_TAKES_ALL | CLI_TAKES_OFFLOAD, cmd_plan},
    {"replay", CLI_TAKES_PLAN, cmd_replay},
    {"inspect", 0, cmd_inspect},
    {"snapshot", CLI_TAKES_REPLAY | CLI_TAKES_NO_DEVICE, cmd_snapshot},
};

static const command *find_command(const char *name)
{
    size_t i;

    for (i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (strcmp(name, commands[i].name) == 0)
            return &commands[i];
    }
    return NULL;
}

static cli_exit run(int argc, char **argv)
{
    const command *chosen;
    cli_args args;

    if (argc < 2) {
        fputs(usage, stderr);
        return CLI_EXIT_INPUT;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("msc %s\n", msc_version());
        return CLI_EXIT_OK;
    }
    if (strcmp(argv[1], "--help") == 0) {
        fputs(usage, stdout);
        return CLI_EXIT_OK;
    }
    chosen = find_command(argv[1]);
    if (chosen == NULL) {
        cli_error(NULL, "there is no command %s: plan, replay, inspect, snapshot; see msc --help", argv[1]);
        return CLI_EXIT_INPUT;
    }
    if (!cli_args_parse(argc - 1, argv + 1, chosen->takes, &args))
        return CLI_EXIT_INPUT;
    if (args.help) {
        fputs(usage, stdout);
        return CLI_EXIT_OK;
    }
    return chosen->run(&args);
}

int main(int argc, char **argv)
{
    cli_exit result = run(argc, argv);

    /* A full disk or a closed pipe shows only now. */
    if (fflush(stdout) != 0 || ferror(stdout)) {
        cli_error(NULL, "cannot write to standard output");
        result = CLI_EXIT_INTERNAL;
    }
    return (int)result;
}
