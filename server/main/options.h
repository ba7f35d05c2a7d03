/* SPDX-License-Identifier: Apache-2.0 */
/** @file options.h  The command line of memscale-server. */
#ifndef MSC_SERVER_OPTIONS_H
#define MSC_SERVER_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#define OPTIONS_HOSTS 32u
#define OPTIONS_NAME_BYTES 256u

typedef enum options_command { OPTIONS_SERVE, OPTIONS_BACKUP, OPTIONS_RESTORE } options_command;

typedef struct server_options {
    options_command command;
    const char *file;                 /**< of `backup` and `restore` */
    const char *data;                 /**< folder */
    const char *page;                 /**< folder, or NULL: where it is installed, if it is */
    char address[OPTIONS_NAME_BYTES]; /**< numeric; IPv6 without brackets */
    uint16_t port;
    char host_names[OPTIONS_HOSTS][OPTIONS_NAME_BYTES];
    const char *hosts[OPTIONS_HOSTS + 1]; /**< NULL-terminated, into `host_names` */
    uint32_t threads;
    uint32_t connections;
    uint32_t connections_per_address;
    uint64_t most_bytes;     /**< 0: no limit */
    uint32_t telemetry_days; /**< 0: telemetry is not taken */
    bool https;
    bool lists_routes;
} server_options;

typedef enum options_result { OPTIONS_RUN, OPTIONS_DONE, OPTIONS_WRONG } options_result;

/**
 * Reads the command line; help, the version and what is wrong go to the terminal. `out` must stay where it
 * is.
 */
options_result options_read(int count, char **words, server_options *out);

#endif /* MSC_SERVER_OPTIONS_H */
