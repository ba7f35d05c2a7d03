/* SPDX-License-Identifier: Apache-2.0 */
#include "samples.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int64_t sample_now_ms = SAMPLE_NOW_MS;

static int64_t now_ms(void)
{
    return sample_now_ms;
}

static void require(bool truth, const char *what)
{
    if (!truth) {
        (void)fprintf(stderr, "samples: %s\n", what);
        abort();
    }
}

void sample_folder(char path[SAMPLE_PATH])
{
    /* In memory, where there is such a place: the tests sync often. */
    (void)snprintf(path, SAMPLE_PATH, "%s/memscale-server-XXXXXX",
                   access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    require(mkdtemp(path) != NULL, "no folder");
}

void sample_remove(const char *path)
{
    DIR *folder = opendir(path);
    const struct dirent *entry;

    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char inner[512];

        (void)snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name);
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            (void)remove(inner);
    }
    if (folder != NULL)
        (void)closedir(folder);
    (void)rmdir(path);
}

store *sample_store(const char *folder)
{
    const store_options options = {.folder = folder, .readers = 2};
    msc_error err = {0};
    store *it = NULL;

    if (store_open(&options, &it, &err) != MSC_OK)
        (void)fprintf(stderr, "%s\n", err.message);
    require(it != NULL, "no store");
    return it;
}

int64_t sample_account(store *it, const char *name)
{
    store_account account = {.created_ms = SAMPLE_NOW_MS, .admin = true};
    store_act act = {.now_ms = SAMPLE_NOW_MS};
    store_team team;

    (void)snprintf(account.name, sizeof account.name, "%s", name);
    (void)snprintf(account.password, sizeof account.password, "none");
    require(store_account_add(it, &account, 1) == STORE_OK, "no account");
    act.who.account = account.id;
    require(store_team_add(it, act, name, &team) == STORE_OK, "no team");
    return account.id;
}

uint64_t sample_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static bool make_token(sample_server *it)
{
    store_token token = {.scopes = ACCOUNTS_ADMIN, .expires_ms = STORE_NO_TIME};
    store_account account = {.created_ms = SAMPLE_NOW_MS, .admin = true};

    (void)snprintf(account.name, sizeof account.name, "ann");
    (void)snprintf(account.password, sizeof account.password, "none");
    if (store_account_add(it->store, &account, 0) != STORE_OK)
        return false;
    it->account = token.account.id = account.id;
    (void)snprintf(token.name, sizeof token.name, "all");
    return accounts_token_make(it->accounts, &token, sample_now_ms, it->token).result == ACCOUNTS_OK;
}

bool sample_server_start(sample_server *it, const msc_allocator *allocator)
{
    const store_options options = {.folder = it->folder, .readers = 2, .allocator = *allocator};
    api_parts parts;
    msc_status status;

    memset(it, 0, sizeof *it);
    sample_folder(it->folder);
    it->allocator = *allocator;
    status = store_open(&options, &it->store, NULL);
    if (status == MSC_OK)
        status = accounts_create(allocator, it->store, &it->accounts, NULL);
    if (status == MSC_OK)
        status = live_create(allocator, &it->live, NULL);
    parts = (api_parts){.store = it->store,
                        .accounts = it->accounts,
                        .live = it->live,
                        .telemetry_days = 30,
                        .allocator = *allocator,
                        .now_ms = now_ms};
    if (status == MSC_OK)
        status = api_create(&parts, &it->api, NULL);
    if (status == MSC_OK && make_token(it))
        return true;
    sample_server_stop(it);
    return false;
}

void sample_server_stop(sample_server *it)
{
    api_destroy(it->api);
    live_destroy(it->live);
    accounts_destroy(it->accounts);
    store_close(it->store);
    sample_remove(it->folder);
}

sample_server sample_one;
sample_exchange sample_last;

int sample_set_up(void **state)
{
    const msc_allocator allocator = {0};

    (void)state;
    sample_now_ms = SAMPLE_NOW_MS;
    return sample_server_start(&sample_one, &allocator) ? 0 : 1;
}

int sample_tear_down(void **state)
{
    (void)state;
    sample_end(&sample_last);
    memset(&sample_last, 0, sizeof sample_last);
    sample_server_stop(&sample_one);
    return 0;
}

static void add_field(sample_exchange *out, const char *name, size_t name_bytes, const char *value)
{
    require(out->request.field_count < 16, "too many fields");
    out->fields[out->request.field_count++] = (http_field){name, name_bytes, value, strlen(value)};
}

static void fill(sample_exchange *out, const char *token, const char *body, const char *const *headers)
{
    out->request.fields = out->fields;
    out->request.host = "localhost:8300";
    (void)snprintf(out->request.address, sizeof out->request.address, "10.0.0.1");
    if (token != NULL) {
        (void)snprintf(out->authorization, sizeof out->authorization, "Bearer %s", token);
        add_field(out, "Authorization", strlen("Authorization"), out->authorization);
    }
    if (body != NULL)
        add_field(out, "Content-Type", strlen("Content-Type"), "application/json");
    for (; headers != NULL && *headers != NULL; headers++) {
        const char *colon = strstr(*headers, ": ");

        add_field(out, *headers, (size_t)(colon - *headers), colon + 2);
    }
}

/* 0: there was no memory for the request itself, which `http` answers by closing the connection. */
unsigned sample_ask(sample_server *it, const char *token, const char *method, const char *target,
                    const char *body, const char *const *headers, sample_exchange *out)
{
    msc_context_options options = msc_context_options_default();
    http_handler handler = api_handler(it->api);
    uint64_t limit;

    memset(out, 0, sizeof *out);
    options.allocator = it->allocator;
    options.memory_limit_bytes = HTTP_REQUEST_MEMORY;
    if (msc_context_create(&options, &out->request.memory.ctx, NULL) != MSC_OK)
        return 0;
    (void)snprintf(out->target, sizeof out->target, "%s", target);
    require(http_target_parse(out->target, out->room, &out->request.target) == NULL, "a bad target");
    out->request.method = method;
    fill(out, token, body, headers);
    limit = handler.begin(handler.user, &out->request, &out->reply);
    if (out->reply.status == 0) {
        require(body == NULL || strlen(body) <= limit, "the body is too large");
        out->request.body = (const uint8_t *)body;
        out->request.body_bytes = body == NULL ? 0 : strlen(body);
        handler.answer(handler.user, &out->request, &out->reply);
    }
    (void)snprintf(out->text, sizeof out->text, "%.*s",
                   (int)(out->reply.body_bytes < 4000 ? out->reply.body_bytes : 4000),
                   out->reply.body == NULL ? "" : (const char *)out->reply.body);
    return out->reply.status;
}

void sample_end(sample_exchange *exchange)
{
    if (exchange->reply.source != NULL && exchange->reply.source->close != NULL)
        exchange->reply.source->close(exchange->reply.source->self);
    if (exchange->request.memory.ctx != NULL)
        http_memory_end(&exchange->request.memory);
    msc_context_destroy(exchange->request.memory.ctx);
}
