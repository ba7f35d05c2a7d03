/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Options of `msc`, by getopt_long with messages of our own.
 *
 * One table holds the options of all commands. A command says which of them it takes; an option that it
 * does not take is refused instead of ignored, because an ignored budget would look like one that was met.
 *
 * Sizes are parsed in integers: the fraction is at most six digits and the largest unit 2^40, so
 * fraction × unit stays below 2^60.
 */
#include "args.h"

#include <getopt.h>
#include <string.h>
#include <strings.h>

#include "print.h"

#define MOST_BYTES ((uint64_t)1 << 62)
#define MOST_FRACTION 1000000u
#define LEAST_RATE 1000000u /* the core counts bytes per microsecond */

enum {
    OPTION_BUDGET = 256,
    OPTION_PLAN,
    OPTION_OUTPUT,
    OPTION_ALL,
    OPTION_DEVICE,
    OPTION_JSON,
    OPTION_HELP,
    OPTION_REPLAY,
    OPTION_OFFLOAD
};

static const struct option options[] = {
    {"budget", required_argument, NULL, OPTION_BUDGET},
    {"plan", required_argument, NULL, OPTION_PLAN},
    {"output", required_argument, NULL, OPTION_OUTPUT},
    {"all", no_argument, NULL, OPTION_ALL},
    {"device", required_argument, NULL, OPTION_DEVICE},
    {"json", no_argument, NULL, OPTION_JSON},
    {"help", no_argument, NULL, OPTION_HELP},
    {"replay", no_argument, NULL, OPTION_REPLAY},
    {"offload", required_argument, NULL, OPTION_OFFLOAD},
    {NULL, 0, NULL, 0},
};

static bool unit_bytes(const char *unit, uint64_t *bytes)
{
    static const struct {
        const char *name;
        uint64_t bytes;
    } units[] = {
        {"", 1},
        {"B", 1},
        {"kB", 1000},
        {"MB", 1000000},
        {"GB", 1000000000},
        {"TB", 1000000000000},
        {"KiB", (uint64_t)1 << 10},
        {"MiB", (uint64_t)1 << 20},
        {"GiB", (uint64_t)1 << 30},
        {"TiB", (uint64_t)1 << 40},
    };
    size_t i;

    for (i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcasecmp(unit, units[i].name) == 0) {
            *bytes = units[i].bytes;
            return true;
        }
    }
    return false;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Reads digits after the point as `*number` / `*scale`. */
static bool parse_fraction(const char **at, uint64_t *number, uint64_t *scale)
{
    *number = 0;
    *scale = 1;
    if (**at != '.')
        return true;
    ++*at;
    if (!is_digit(**at))
        return false;
    for (; is_digit(**at); ++*at) {
        if (*scale == MOST_FRACTION)
            return false;
        *number = *number * 10 + (uint64_t)(**at - '0');
        *scale *= 10;
    }
    return true;
}

bool cli_parse_size(const char *text, uint64_t *bytes)
{
    uint64_t whole = 0;
    uint64_t fraction;
    uint64_t scale;
    uint64_t unit;

    if (!is_digit(*text))
        return false;
    for (; is_digit(*text); text++) {
        if (whole >= MOST_BYTES / 10)
            return false;
        whole = whole * 10 + (uint64_t)(*text - '0');
    }
    if (!parse_fraction(&text, &fraction, &scale))
        return false;
    if (*text == ' ')
        text++;
    if (!unit_bytes(text, &unit) || whole >= MOST_BYTES / unit)
        return false;
    *bytes = whole * unit + fraction * unit / scale;
    return *bytes > 0 && *bytes < MOST_BYTES;
}

static bool set_budget(const char *text, cli_args *args)
{
    if (cli_parse_size(text, &args->budget_bytes))
        return true;
    cli_error(NULL,
              "--budget %s is not a size: write bytes or a unit, such as 8000000000, 8GB, 1.5GiB, 512MiB",
              text);
    return false;
}

static bool set_offload(const char *text, cli_args *args)
{
    if (cli_parse_size(text, &args->offload_bytes) && args->offload_bytes >= LEAST_RATE)
        return true;
    cli_error(NULL, "--offload %s is not a rate: write bytes per second, at least 1MB, such as 12GB", text);
    return false;
}

static bool set_device(const char *text, cli_args *args)
{
    if (strcmp(text, "cpu") == 0)
        args->device = MSC_SIM_HOST;
    else if (strcmp(text, "cuda") == 0)
        args->device = MSC_SIM_CUDA;
    else {
        cli_error(NULL, "--device %s is unknown: write cpu or cuda", text);
        return false;
    }
    return true;
}

/* The bit that a command must take for an option to be allowed; 0: always allowed. */
static unsigned bit_of(int option)
{
    switch (option) {
    case OPTION_BUDGET:
        return CLI_TAKES_BUDGET;
    case OPTION_PLAN:
        return CLI_TAKES_PLAN;
    case OPTION_OUTPUT:
        return CLI_TAKES_OUTPUT;
    case OPTION_ALL:
        return CLI_TAKES_ALL;
    case OPTION_REPLAY:
        return CLI_TAKES_REPLAY;
    case OPTION_OFFLOAD:
        return CLI_TAKES_OFFLOAD;
    default:
        return 0;
    }
}

static bool set_option(int option, cli_args *args)
{
    switch (option) {
    case OPTION_BUDGET:
        return set_budget(optarg, args);
    case OPTION_DEVICE:
        return set_device(optarg, args);
    case OPTION_OFFLOAD:
        return set_offload(optarg, args);
    case OPTION_PLAN:
        args->plan_path = optarg;
        return true;
    case OPTION_OUTPUT:
        args->output_path = optarg;
        return true;
    case OPTION_ALL:
        args->all = true;
        return true;
    case OPTION_REPLAY:
        args->replay = true;
        return true;
    case OPTION_JSON:
        args->json = true;
        return true;
    default:
        args->help = true;
        return true;
    }
}

static bool check_complete(int argc, char **argv, unsigned takes, cli_args *args)
{
    if (optind + 1 != argc) {
        cli_error(NULL, "%s: exactly one %s file is needed, %d given", argv[0],
                  (takes & CLI_TAKES_REPLAY) != 0 ? "snapshot" : "graph", argc - optind);
        return false;
    }
    args->graph_path = argv[optind];
    if ((takes & CLI_TAKES_BUDGET) != 0 && args->budget_bytes == 0) {
        cli_error(NULL, "%s: --budget is missing, such as --budget 8GiB", argv[0]);
        return false;
    }
    return true;
}

/* A short option (there are none) stands in `optopt`; a long one is the word just read. */
static void complain(int option, char **argv)
{
    if (option == ':')
        cli_error(NULL, "%s: %s needs a value", argv[0], argv[optind - 1]);
    else if (optopt > 0 && optopt < OPTION_BUDGET)
        cli_error(NULL, "%s: option -%c is unknown", argv[0], optopt);
    else if (optopt >= OPTION_BUDGET)
        cli_error(NULL, "%s: --%s takes no value", argv[0], options[optopt - OPTION_BUDGET].name);
    else
        cli_error(NULL, "%s: option %s is unknown or ambiguous", argv[0], argv[optind - 1]);
}

bool cli_args_parse(int argc, char **argv, unsigned takes, cli_args *args)
{
    int option;

    memset(args, 0, sizeof *args);
    args->device = MSC_SIM_HOST;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":", options, NULL)) != -1) {
        if (option == ':' || option == '?') {
            complain(option, argv);
            return false;
        }
        if ((bit_of(option) != 0 && (bit_of(option) & takes) == 0) ||
            (option == OPTION_DEVICE && (takes & CLI_TAKES_NO_DEVICE) != 0)) {
            cli_error(NULL, "%s does not take --%s", argv[0], options[option - OPTION_BUDGET].name);
            return false;
        }
        if (!set_option(option, args))
            return false;
    }
    return args->help || check_complete(argc, argv, takes, args);
}
