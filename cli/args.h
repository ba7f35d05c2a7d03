/* SPDX-License-Identifier: Apache-2.0 */
/** @file args.h  The command line of `msc`, turned into one struct. */
#ifndef MSC_CLI_ARGS_H
#define MSC_CLI_ARGS_H

#include <stdbool.h>

#include "memscale/sim.h"

/** Which options a command takes; --json, --device and --help go with every command. */
enum {
    CLI_TAKES_BUDGET = 1u << 0,
    CLI_TAKES_PLAN = 1u << 1,
    CLI_TAKES_OUTPUT = 1u << 2,
    CLI_TAKES_ALL = 1u << 3,
    CLI_TAKES_REPLAY = 1u << 4,
    CLI_TAKES_NO_DEVICE = 1u << 5, /**< --device is refused */
    CLI_TAKES_OFFLOAD = 1u << 6
};

/** What a user asked for. Texts point into argv. */
typedef struct cli_args {
    const char *graph_path;  /**< the file that the command is about: a graph or a snapshot */
    const char *plan_path;   /**< --plan, or NULL */
    const char *output_path; /**< --output, or NULL */
    uint64_t budget_bytes;   /**< --budget; 0: not given */
    uint64_t offload_bytes;  /**< --offload: bytes per second each way; 0: not given */
    msc_sim_kind device;     /**< --device; HOST by default */
    bool json;
    bool replay; /**< --replay: play a snapshot's trace into the simulator */
    bool all;    /**< --all: list modules inside checkpointed ones too */
    bool help;   /**< --help: nothing else counts */
} cli_args;

/**
 * Parses what follows the name of a command, which is argv[0].
 *
 * @param takes CLI_TAKES_…
 * @return false after a message on stderr.
 */
bool cli_args_parse(int argc, char **argv, unsigned takes, cli_args *args);

/**
 * Parses a size: a decimal number, with or without a fraction, and a unit or none, such as 123, 8GB, 1.5GiB.
 * Units count in 1000 (kB, MB, GB, TB) or 1024 (KiB, MiB, GiB, TiB); upper and lower case are the same.
 *
 * @return false for anything else, for 0, and for 2^62 bytes or more.
 */
bool cli_parse_size(const char *text, uint64_t *bytes);

#endif /* MSC_CLI_ARGS_H */
