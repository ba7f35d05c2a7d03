/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command line. Names that the server answers to are those of loopback, the address that it listens on,
 * and what `--host` adds.
 */
#include "main/options.h"

#include <ctype.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memscale/base.h"

static const char usage[] =
    "usage: memscale-server --data DIR [options]\n"
    "       memscale-server backup --data DIR --to FILE\n"
    "       memscale-server restore --data DIR --from FILE\n"
    "\n"
    "Keeps what training runs send and shows it. The first account is made with a link that is printed "
    "here.\n"
    "\n"
    "  --data DIR               folder of everything that is kept; is made if it is not there; on a local "
    "disk\n"
    "  --listen ADDRESS:PORT    default: 127.0.0.1:8300; [::1]:8300 for IPv6; port 0: any that is free\n"
    "  --host NAME              answers to this name too (the Host that browsers send); may be given up to "
    "24 times\n"
    "  --https                  a proxy with TLS stands in front: cookies are for HTTPS alone\n"
    "  --page DIR               the page's files (default: where they are installed)\n"
    "  --threads N              threads that answer (default: 8)\n"
    "  --connections N          most connections at once (default: 4096)\n"
    "  --per-address N          most from one address (default: 2048)\n"
    "  --max-bytes SIZE         most that the data may take, as 500M or 20G (default: what the disk has)\n"
    "  --to FILE                backup: writes all of DIR into a new file; a server may be at work in DIR\n"
    "  --from FILE              restore: makes DIR, which has no data yet, of such a file\n"
    "  --telemetry DAYS         takes telemetry that people have switched on, and keeps its counts so long "
    "(default: off)\n"
    "  --list-routes            prints the routes of the API and ends\n"
    "  --version, --help\n"
    "\n"
    "Exit codes: 0 stopped by SIGINT or SIGTERM, or copied; 2 wrong usage; 3 it cannot start, or copy.\n";

enum {
    LONG_DATA = 256,
    LONG_LISTEN,
    LONG_HOST,
    LONG_HTTPS,
    LONG_PAGE,
    LONG_THREADS,
    LONG_CONNECTIONS,
    LONG_PER_ADDRESS,
    LONG_MAX_BYTES,
    LONG_TO,
    LONG_FROM,
    LONG_TELEMETRY,
    LONG_ROUTES,
    LONG_VERSION,
    LONG_HELP
};

static const struct option names[] = {
    {"data", required_argument, NULL, LONG_DATA},
    {"listen", required_argument, NULL, LONG_LISTEN},
    {"host", required_argument, NULL, LONG_HOST},
    {"https", no_argument, NULL, LONG_HTTPS},
    {"page", required_argument, NULL, LONG_PAGE},
    {"threads", required_argument, NULL, LONG_THREADS},
    {"connections", required_argument, NULL, LONG_CONNECTIONS},
    {"per-address", required_argument, NULL, LONG_PER_ADDRESS},
    {"max-bytes", required_argument, NULL, LONG_MAX_BYTES},
    {"to", required_argument, NULL, LONG_TO},
    {"from", required_argument, NULL, LONG_FROM},
    {"telemetry", required_argument, NULL, LONG_TELEMETRY},
    {"list-routes", no_argument, NULL, LONG_ROUTES},
    {"version", no_argument, NULL, LONG_VERSION},
    {"help", no_argument, NULL, LONG_HELP},
    {NULL, 0, NULL, 0},
};

static bool wrong(const char *what, const char *value, const char *allowed)
{
    (void)fprintf(stderr, "memscale-server: %s is not %s: %s\n", value, what, allowed);
    return false;
}

static bool add_host(server_options *out, const char *name)
{
    uint32_t count = 0;
    size_t i;

    while (out->hosts[count] != NULL)
        count++;
    if (count == OPTIONS_HOSTS || strlen(name) >= OPTIONS_NAME_BYTES || *name == '\0')
        return wrong("a host name", name, "at most 24 names of 255 bytes");
    for (i = 0; name[i] != '\0'; i++)
        out->host_names[count][i] = (char)tolower((unsigned char)name[i]);
    out->hosts[count] = out->host_names[count];
    return true;
}

static bool read_number(const char *text, uint64_t least, uint64_t most, uint64_t *out)
{
    char *end = NULL;

    if (*text < '0' || *text > '9')
        return false;
    *out = strtoull(text, &end, 10);
    return *end == '\0' && *out >= least && *out <= most;
}

static bool read_count(const char *text, uint64_t least, uint64_t most, uint32_t *out)
{
    uint64_t number;
    char allowed[64];

    if (read_number(text, least, most, &number)) {
        *out = (uint32_t)number;
        return true;
    }
    (void)snprintf(allowed, sizeof allowed, "%llu to %llu", (unsigned long long)least,
                   (unsigned long long)most);
    return wrong("a number that fits", text, allowed);
}

static bool read_size(const char *text, uint64_t *out)
{
    static const char units[] = "KMGT";
    char digits[24] = "";
    size_t bytes = strlen(text);
    const char *unit = bytes == 0 ? NULL : strchr(units, text[bytes - 1]);

    if (bytes > 0 && bytes < sizeof digits) {
        memcpy(digits, text, unit == NULL ? bytes : bytes - 1);
        if (read_number(digits, 1, UINT64_C(1) << 20, out)) {
            *out <<= unit == NULL ? 0 : 10 * (unit - units + 1);
            if (*out >= UINT64_C(1) << 20)
                return true;
        }
    }
    return wrong("a size", text, "1M or more, as 500M or 20G");
}

/* ADDRESS:PORT, the address of IPv6 in brackets. */
static bool read_listen(const char *text, server_options *out)
{
    const char *colon = strrchr(text, ':');
    uint64_t port;
    size_t bytes;

    if (colon == NULL || !read_number(colon + 1, 0, 65535, &port))
        return wrong("an address and a port", text, "127.0.0.1:8300 or [::1]:8300");
    bytes = (size_t)(colon - text);
    if (bytes >= 2 && text[0] == '[' && text[bytes - 1] == ']') {
        text++;
        bytes -= 2;
    } else if (memchr(text, ':', bytes) != NULL) {
        return wrong("an address and a port", text, "brackets around an IPv6 address");
    }
    if (bytes == 0 || bytes >= sizeof out->address)
        return wrong("an address and a port", text, "127.0.0.1:8300 or [::1]:8300");
    memcpy(out->address, text, bytes);
    out->address[bytes] = '\0';
    out->port = (uint16_t)port;
    return true;
}

static bool read_file(options_command command, const char *value, server_options *out)
{
    if (out->command != command)
        return wrong("for this command", value, "backup --to FILE, restore --from FILE");
    out->file = value;
    return true;
}

/* A word before the options. */
static options_command read_command(const char *word)
{
    if (word != NULL && strcmp(word, "backup") == 0)
        return OPTIONS_BACKUP;
    return word != NULL && strcmp(word, "restore") == 0 ? OPTIONS_RESTORE : OPTIONS_SERVE;
}

static bool read_option(int option, const char *value, server_options *out)
{
    switch (option) {
    case LONG_DATA:
        out->data = value;
        return true;
    case LONG_LISTEN:
        return read_listen(value, out);
    case LONG_HOST:
        return add_host(out, value);
    case LONG_HTTPS:
        out->https = true;
        return true;
    case LONG_PAGE:
        out->page = value;
        return true;
    case LONG_THREADS:
        return read_count(value, 1, 256, &out->threads);
    case LONG_CONNECTIONS:
        return read_count(value, 16, 100000, &out->connections);
    case LONG_PER_ADDRESS:
        return read_count(value, 1, 100000, &out->connections_per_address);
    case LONG_MAX_BYTES:
        return read_size(value, &out->most_bytes);
    case LONG_TO:
        return read_file(OPTIONS_BACKUP, value, out);
    case LONG_FROM:
        return read_file(OPTIONS_RESTORE, value, out);
    case LONG_TELEMETRY:
        return read_count(value, 1, 400, &out->telemetry_days);
    case LONG_ROUTES:
        out->lists_routes = true;
        return true;
    default:
        (void)fputs(usage, stderr);
        return false;
    }
}

static bool add_own_hosts(server_options *out)
{
    char bracketed[OPTIONS_NAME_BYTES + 2];

    (void)snprintf(bracketed, sizeof bracketed, strchr(out->address, ':') == NULL ? "%s" : "[%s]",
                   out->address);
    return add_host(out, "localhost") && add_host(out, "127.0.0.1") && add_host(out, "[::1]") &&
           add_host(out, bracketed);
}

options_result options_read(int count, char **words, server_options *out)
{
    int option;

    memset(out, 0, sizeof *out);
    out->threads = 8;
    out->connections = 4096;
    out->connections_per_address = 2048;
    (void)read_listen("127.0.0.1:8300", out);
    out->command = read_command(words[1]);
    if (out->command != OPTIONS_SERVE) {
        words++;
        count--;
    }
    while ((option = getopt_long(count, words, "", names, NULL)) != -1) {
        if (option == LONG_HELP || option == LONG_VERSION) {
            (void)fputs(option == LONG_HELP ? usage : "memscale-server " MSC_VERSION_TEXT "\n", stdout);
            return OPTIONS_DONE;
        }
        if (!read_option(option, optarg, out))
            return OPTIONS_WRONG;
    }
    if (optind < count || (out->data == NULL && !out->lists_routes) ||
        (out->command != OPTIONS_SERVE && out->file == NULL)) {
        (void)fputs(usage, stderr);
        return OPTIONS_WRONG;
    }
    return add_own_hosts(out) ? OPTIONS_RUN : OPTIONS_WRONG;
}
