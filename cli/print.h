/* SPDX-License-Identifier: Apache-2.0 */
/** @file print.h  How `msc` says things: errors, quantities, JSON. */
#ifndef MSC_CLI_PRINT_H
#define MSC_CLI_PRINT_H

#include <jansson.h>

#include "memscale/graph.h"
#include "memscale/sim.h"

/** Exit codes of `msc`. */
typedef enum cli_exit {
    CLI_EXIT_OK = 0,
    CLI_EXIT_OVER_BUDGET = 1, /**< the budget cannot be met; the smallest plan was printed */
    CLI_EXIT_INPUT = 2,       /**< bad input or usage */
    CLI_EXIT_INTERNAL = 3     /**< input or output failed, lack of memory, internal error */
} cli_exit;

/** Room for any text made below. */
#define CLI_QUANTITY_BYTES 32

/** `msc: <file>: <message>` on stderr; without a file: `msc: <message>`. */
void cli_error(const char *file, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Reports a failed library call and returns the exit code that fits its status. */
cli_exit cli_fail(const char *file, const msc_error *err);

/** "1.50 GiB"; below 1 KiB "512 B". Returns `text`. */
const char *cli_bytes(uint64_t bytes, char text[CLI_QUANTITY_BYTES]);

/** "12.34 ms", "5.00 us" or "999 ns". Returns `text`. */
const char *cli_time(int64_t ns, char text[CLI_QUANTITY_BYTES]);

/** `  label      1.50 GiB  (1610612736 bytes)` */
void cli_print_bytes(const char *label, uint64_t bytes);

/** 16 lower-case hexadecimal digits. Returns `text`. */
const char *cli_digest(uint64_t digest, char text[CLI_QUANTITY_BYTES]);

/** Path of a module; "(model)" for the root, "(no module)" for MSC_NONE. */
const char *cli_module_path(const msc_graph *graph, uint32_t module);

/** Innermost module around an operation, or MSC_NONE. */
uint32_t cli_module_of_op(const msc_graph *graph, uint32_t op);

/** Name of an operation; "(before the first operation)" when there is none such. */
const char *cli_op_name(const msc_graph *graph, uint32_t op);

/** "parameters", "activations" … */
const char *cli_category_name(msc_category category);

/** "cpu" or "cuda". */
const char *cli_device_name(msc_sim_kind device);

/** A JSON integer; values beyond 2^63 - 1 become that. */
json_t *cli_json_u64(uint64_t value);

/** A JSON string; bytes that are not UTF-8 become '?'. */
json_t *cli_json_text(const char *text);

/** Prints `root`, a line end, and ends `root`. NULL (lack of memory while it was made) is a failure. */
cli_exit cli_print_json(json_t *root);

#endif /* MSC_CLI_PRINT_H */
