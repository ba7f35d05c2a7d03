/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How `msc` says things. Results go to stdout, everything else to stderr, so that output can be piped.
 * Quantities are rounded in integers, half up, with two digits after the point: the same digits everywhere.
 */
#include "print.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MOST_NAME_BYTES 4097

void cli_error(const char *file, const char *format, ...)
{
    va_list args;

    fputs("msc: ", stderr);
    if (file != NULL)
        fprintf(stderr, "%s: ", file);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

cli_exit cli_fail(const char *file, const msc_error *err)
{
    cli_error(file, "%s", err->message);
    switch (err->status) {
    case MSC_EINVAL:
    case MSC_EFORMAT:
    case MSC_EVERSION:
    case MSC_EOVERFLOW:
        return CLI_EXIT_INPUT;
    default:
        return CLI_EXIT_INTERNAL;
    }
}

/* value / unit with two digits after the point. */
static const char *scaled(uint64_t value, uint64_t unit, const char *name, char text[CLI_QUANTITY_BYTES])
{
    uint64_t whole = value / unit;
    uint64_t rest = value % unit;
    uint64_t hundredths =
        unit >= 1000000 ? (rest / (unit / 10000) + 50) / 100 : (rest * 100 + unit / 2) / unit;

    if (hundredths >= 100) {
        whole++;
        hundredths -= 100;
    }
    snprintf(text, CLI_QUANTITY_BYTES, "%" PRIu64 ".%02" PRIu64 " %s", whole, hundredths, name);
    return text;
}

const char *cli_bytes(uint64_t bytes, char text[CLI_QUANTITY_BYTES])
{
    if (bytes >= (uint64_t)1 << 40)
        return scaled(bytes, (uint64_t)1 << 40, "TiB", text);
    if (bytes >= (uint64_t)1 << 30)
        return scaled(bytes, (uint64_t)1 << 30, "GiB", text);
    if (bytes >= (uint64_t)1 << 20)
        return scaled(bytes, (uint64_t)1 << 20, "MiB", text);
    if (bytes >= (uint64_t)1 << 10)
        return scaled(bytes, (uint64_t)1 << 10, "KiB", text);
    snprintf(text, CLI_QUANTITY_BYTES, "%" PRIu64 " B", bytes);
    return text;
}

const char *cli_time(int64_t ns, char text[CLI_QUANTITY_BYTES])
{
    uint64_t value = ns < 0 ? 0 : (uint64_t)ns;

    if (value >= 1000000000)
        return scaled(value, 1000000000, "s", text);
    if (value >= 1000000)
        return scaled(value, 1000000, "ms", text);
    if (value >= 1000)
        return scaled(value, 1000, "us", text);
    snprintf(text, CLI_QUANTITY_BYTES, "%" PRIu64 " ns", value);
    return text;
}

void cli_print_bytes(const char *label, uint64_t bytes)
{
    char text[CLI_QUANTITY_BYTES];

    printf("  %-18s %12s  (%" PRIu64 " bytes)\n", label, cli_bytes(bytes, text), bytes);
}

const char *cli_digest(uint64_t digest, char text[CLI_QUANTITY_BYTES])
{
    snprintf(text, CLI_QUANTITY_BYTES, "%016" PRIx64, digest);
    return text;
}

const char *cli_module_path(const msc_graph *graph, uint32_t module)
{
    const char *path;

    if (module >= msc_graph_module_count(graph))
        return "(no module)";
    path = msc_graph_string(graph, msc_graph_modules(graph)[module].path);
    return path[0] == '\0' ? "(model)" : path;
}

uint32_t cli_module_of_op(const msc_graph *graph, uint32_t op)
{
    uint32_t call;

    if (op >= msc_graph_op_count(graph))
        return MSC_NONE;
    call = msc_graph_ops(graph)[op].call;
    return call == MSC_NONE ? MSC_NONE : msc_graph_calls(graph)[call].module;
}

const char *cli_op_name(const msc_graph *graph, uint32_t op)
{
    if (op >= msc_graph_op_count(graph))
        return "(before the first operation)";
    return msc_graph_string(graph, msc_graph_ops(graph)[op].name);
}

const char *cli_category_name(msc_category category)
{
    static const char *const names[MSC_CATEGORY_COUNT] = {"parameters",      "buffers",   "gradients",
                                                          "optimizer_state", "inputs",    "activations",
                                                          "temporaries",     "workspaces"};
    return (unsigned)category < MSC_CATEGORY_COUNT ? names[category] : "unknown";
}

const char *cli_device_name(msc_sim_kind device)
{
    return device == MSC_SIM_CUDA ? "cuda" : "cpu";
}

json_t *cli_json_u64(uint64_t value)
{
    return json_integer((json_int_t)(value > INT64_MAX ? INT64_MAX : value));
}

json_t *cli_json_text(const char *text)
{
    char ascii[MOST_NAME_BYTES];
    json_t *result = json_string(text);
    size_t i;

    if (result != NULL)
        return result;
    for (i = 0; text[i] != '\0' && i + 1 < sizeof ascii; i++)
        ascii[i] = (unsigned char)text[i] < 0x80 ? text[i] : '?';
    ascii[i] = '\0';
    return json_string(ascii);
}

cli_exit cli_print_json(json_t *root)
{
    int failed = root == NULL || json_dumpf(root, stdout, JSON_INDENT(2) | JSON_SORT_KEYS) != 0;

    json_decref(root);
    if (failed) {
        cli_error(NULL, "cannot write JSON");
        return CLI_EXIT_INTERNAL;
    }
    putchar('\n');
    return CLI_EXIT_OK;
}
