/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `memscale-server`: what stands on what, started in that order and stopped in the other.
 *
 *      store  accounts  live  page  api  keeper  http     until SIGINT or SIGTERM     live's end, http, keeper, …
 *
 * Signals that end the program are taken by `sigwait`, so no handler runs in the middle of anything.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "api/api.h"
#include "main/keeper.h"
#include "main/options.h"

typedef struct program {
    server_options options;
    store *store;
    accounts *accounts;
    live *live;
    http_page *page;
    api *api;
    http_server *http;
    keeper keeper;
} program;

static const msc_allocator plain_allocator; /* the C library's, which bears threads */

/* A server without its page is one for programs alone; one that was named must be there. */
static msc_status load_page(program *it, msc_error *err)
{
    if (it->options.page != NULL)
        return http_page_load(&plain_allocator, it->options.page, &it->page, err);
    if (access(SERVER_PAGE, F_OK) != 0)
        return MSC_OK;
    return http_page_load(&plain_allocator, SERVER_PAGE, &it->page, err);
}

static msc_status start_parts(program *it, msc_error *err)
{
    const store_options kept = {
        .folder = it->options.data, .readers = it->options.threads, .most_bytes = it->options.most_bytes};
    api_parts parts;
    msc_status status = keeper_init(&it->keeper, err);

    if (status == MSC_OK)
        status = store_open(&kept, &it->store, err);
    if (status == MSC_OK)
        status = accounts_create(&plain_allocator, it->store, &it->accounts, err);
    if (status == MSC_OK)
        status = live_create(&plain_allocator, &it->live, err);
    if (status == MSC_OK)
        status = load_page(it, err);
    parts = (api_parts){.store = it->store,
                        .accounts = it->accounts,
                        .live = it->live,
                        .page = it->page,
                        .behind_https = it->options.https,
                        .wake = keeper_wake,
                        .user = &it->keeper,
                        .telemetry_days = it->options.telemetry_days};
    if (status == MSC_OK)
        status = api_create(&parts, &it->api, err);
    if (status == MSC_OK)
        status = keeper_start(&it->keeper, it->api, err);
    return status;
}

static msc_status start_http(program *it, msc_error *err)
{
    const http_options options = {.address = it->options.address,
                                  .port = it->options.port,
                                  .hosts = it->options.hosts,
                                  .threads = it->options.threads,
                                  .connections = it->options.connections,
                                  .connections_per_address = it->options.connections_per_address,
                                  .behind_https = it->options.https,
                                  .handler = api_handler(it->api)};

    return http_start(&options, &it->http, err);
}

static void stop(program *it)
{
    if (it->live != NULL)
        live_stop(it->live);
    http_stop(it->http);
    keeper_stop(&it->keeper);
    api_destroy(it->api);
    http_page_free(it->page);
    live_destroy(it->live);
    accounts_destroy(it->accounts);
    store_close(it->store);
}

/* Where it listens, and the way to the first account. */
static void greet(program *it)
{
    const char *name = it->options.address;
    bool is_v6 = strchr(name, ':') != NULL;
    char secret[ACCOUNTS_SECRET_BYTES];
    struct timespec now;
    char base[512];
    bool needed;

    (void)snprintf(base, sizeof base, is_v6 ? "http://[%s]:%u" : "http://%s:%u", name,
                   (unsigned)http_port(it->http));
    (void)printf("memscale-server listens on %s\n", base);
    (void)clock_gettime(CLOCK_REALTIME, &now);
    if (accounts_setup_offer(it->accounts, (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000, secret,
                             &needed) == STORE_OK &&
        needed)
        (void)printf("make the first account within 15 minutes: %s/setup#token=%s\n", base, secret);
    (void)fflush(stdout);
}

/* Signals are blocked before any thread is there, so that all inherit it. A file that may not grow is an
   error of writing. */
static void take_signals(sigset_t *ends)
{
    const struct sigaction ignore = {.sa_handler = SIG_IGN};
    struct rlimit files;

    (void)sigemptyset(ends);
    (void)sigaddset(ends, SIGINT);
    (void)sigaddset(ends, SIGTERM);
    (void)sigprocmask(SIG_BLOCK, ends, NULL);
    (void)sigaction(SIGPIPE, &ignore, NULL);
    (void)sigaction(SIGXFSZ, &ignore, NULL);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files);
    }
}

static void print_route(void *user, const char *method, const char *path)
{
    (void)user;
    (void)printf("%s %s\n", method, path);
}

/* `backup` and `restore`. */
static int copy(const server_options *options)
{
    bool restores = options->command == OPTIONS_RESTORE;
    msc_error err = {0};
    msc_status status = restores ? store_restore(options->data, options->file, &err)
                                 : store_backup(options->data, options->file, &err);

    if (status != MSC_OK) {
        (void)fprintf(stderr, "memscale-server: %s\n", err.message);
        return 3;
    }
    (void)printf(restores ? "%s has what %s had\n" : "all of %s is in %s\n", options->data, options->file);
    return 0;
}

int main(int count, char **words)
{
    static program it;
    msc_error err = {0};
    sigset_t ends;
    int got = 0;
    msc_status status;

    switch (options_read(count, words, &it.options)) {
    case OPTIONS_DONE:
        return 0;
    case OPTIONS_WRONG:
        return 2;
    default:
        break;
    }
    if (it.options.lists_routes) {
        api_list_routes(print_route, NULL);
        return 0;
    }
    (void)umask(077); /* what is kept is nobody else's to read */
    if (it.options.command != OPTIONS_SERVE)
        return copy(&it.options);
    take_signals(&ends);
    status = start_parts(&it, &err);
    if (status == MSC_OK)
        status = start_http(&it, &err);
    if (status == MSC_OK) {
        greet(&it);
        (void)sigwait(&ends, &got);
    } else {
        (void)fprintf(stderr, "memscale-server: %s\n", err.message);
    }
    stop(&it);
    return status == MSC_OK ? 0 : 3;
}
