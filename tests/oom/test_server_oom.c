/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A server's life in which one allocation after the other fails: those of our contexts, of jansson and of SQLite.
 *
 * Whatever fails, a request is answered with a status that says so or, where even the answer has no memory, not at all; a batch that was
 * acknowledged is there, one that was not is not; and everything comes back. Requests are numbered over all three sources, which
 * several threads use, so the heap here has a lock.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>

#include "oom/failing_alloc.h"
#include "samples.h"

static failing_alloc heap;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t foreign_count; /* requests of jansson and SQLite */
static uint64_t foreign_fail_at;
static uint64_t foreign_failed;

static void *locked_resize(void *user, void *old, size_t old_bytes, size_t new_bytes)
{
    void *result;

    (void)pthread_mutex_lock(&lock);
    result = failing_alloc_resize(user, old, old_bytes, new_bytes);
    (void)pthread_mutex_unlock(&lock);
    return result;
}

static bool foreign_refuses(void)
{
    bool refused;

    (void)pthread_mutex_lock(&lock);
    refused = foreign_count++ == foreign_fail_at;
    foreign_failed += refused;
    (void)pthread_mutex_unlock(&lock);
    return refused;
}

static void *foreign_malloc(size_t bytes)
{
    return foreign_refuses() ? NULL : malloc(bytes);
}

/* SQLite asks for the size of a block; it stands in front of it. */
static void *sql_malloc(int bytes)
{
    uint64_t *block = foreign_malloc((size_t)bytes + 16);

    if (block == NULL)
        return NULL;
    block[0] = (uint64_t)bytes;
    return block + 2;
}

static void sql_free(void *block)
{
    if (block != NULL)
        free((uint64_t *)block - 2);
}

static void *sql_realloc(void *old, int bytes)
{
    uint64_t *block = foreign_refuses() ? NULL : realloc((uint64_t *)old - 2, (size_t)bytes + 16);

    if (block == NULL)
        return NULL;
    block[0] = (uint64_t)bytes;
    return block + 2;
}

static int sql_size(void *block)
{
    return block == NULL ? 0 : (int)((uint64_t *)block)[-2];
}

static int sql_round_up(int bytes)
{
    return (bytes + 7) & ~7;
}

static int sql_start(void *user)
{
    (void)user;
    return SQLITE_OK;
}

static void sql_end(void *user)
{
    (void)user;
}

/* ---- one life -------------------------------------------------------------------------------- */

#define RUN "/api/v1/runs/run-00000001"
#define MLFLOW "/api/2.0/mlflow"

typedef struct step {
    const char *method;
    const char *target;
    const char *body;
    unsigned status;
} step;

static const step steps[] = {
    {"GET", "/api/v1/me", NULL, 200},
    {"POST", "/api/v1/projects", "{\"name\": \"p\"}", 201},
    {"POST", "/api/v1/runs", "{\"id\": \"run-00000001\", \"project\": \"p\"}", 201},
    {"POST", RUN "/batches",
     "{\"client\": \"c\", \"sequence\": 1, \"points\": [{\"series\": \"a\", \"steps\": [1, 2], \"values\": "
     "[1, 2.5]}],"
     " \"events\": [{\"kind\": \"oom\", \"data\": {\"x\": 1}}], \"documents\": {\"plan\": {\"y\": [2]}}}",
     200},
    {"GET", RUN, NULL, 200},
    {"GET", RUN "/series", NULL, 200},
    {"GET", RUN "/points?series=a&buckets=2", NULL, 200},
    {"GET", RUN "/events", NULL, 200},
    {"GET", RUN "/documents/plan", NULL, 200},
    {"GET", "/api/v1/projects", NULL, 200},
    {"GET", "/api/v1/projects/1/runs?search=r&sort=name", NULL, 200},
    {"GET", RUN "/live", NULL, 200},
    {"GET", RUN "/export?format=json", NULL, 200},
    {"GET", RUN "/export?format=perfetto", NULL, 200},
    {"GET", RUN "/export?format=html", NULL, 200},
    {"PATCH", RUN, "{\"archived\": true, \"pinned\": true}", 200},
    {"GET", "/api/v1/teams", NULL, 200},
    {"GET", "/api/v1/teams/1/members", NULL, 200},
    {"POST", "/api/v1/teams/1/invitations", "{\"role\": \"member\"}", 201},
    {"GET", "/api/v1/teams/1/invitations", NULL, 200},
    {"PATCH", "/api/v1/teams/1", "{\"name\": \"t\"}", 200},
    {"GET", "/api/v1/teams/1/audit?limit=1", NULL, 200},
    {"GET", "/api/v1/audit", NULL, 200},
    {"GET", "/api/v1/me/sessions", NULL, 200},
    {"PATCH", "/api/v1/projects/1", "{\"visibility\": \"private\", \"delete_days\": 1}", 200},
    {"PUT", "/api/v1/projects/1/chosen/ann", NULL, 204},
    {"GET", "/api/v1/projects/1/chosen", NULL, 200},
    {"GET", "/api/v1/projects/1/retention?archive_days=1", NULL, 200},
    {"POST", "/api/v1/projects/1/purge", NULL, 204},
    {"POST", "/api/v1/accounts/ann/reset", NULL, 201},
    {"POST", "/api/v1/tokens", "{\"name\": \"t\", \"scopes\": [\"read\"]}", 201},
    {"GET", "/api/v1/tokens", NULL, 200},
    {"POST", "/api/v1/telemetry",
     "{\"schema\": 2, \"event\": \"plan\", \"architecture\": \"gpt2\", \"parameters\": \"<1M\", "
     "\"techniques\": [\"offload\"], \"device\": \"cpu\", \"fits\": true, \"os\": \"linux\", "
     "\"python\": \"3.11\", \"torch\": \"2.13\", \"memscale\": \"0.1.0\"}",
     204},
    {"GET", "/api/v1/telemetry", NULL, 200},
    {"POST", MLFLOW "/runs/log-batch",
     "{\"run_id\": \"run-00000001\", \"metrics\": [{\"key\": \"m\", \"value\": 1, \"step\": 1}],"
     " \"params\": [{\"key\": \"p\", \"value\": \"1\"}], \"tags\": [{\"key\": \"t\", \"value\": \"x\"}]}",
     200},
    {"POST", MLFLOW "/runs/set-tag", "{\"run_id\": \"run-00000001\", \"key\": \"u\", \"value\": \"y\"}", 200},
    {"POST", MLFLOW "/runs/delete-tag", "{\"run_id\": \"run-00000001\", \"key\": \"u\"}", 200},
    {"GET", MLFLOW "/runs/get?run_id=run-00000001", NULL, 200},
    {"GET", MLFLOW "/metrics/get-history?run_id=run-00000001&metric_key=m", NULL, 200},
    {"POST", MLFLOW "/runs/search",
     "{\"experiment_ids\": [\"1\"], \"filter\": \"params.p = '1' and metrics.m > 0\", "
     "\"order_by\": [\"tags.t DESC\"], \"run_view_type\": \"ALL\"}",
     200},
    {"POST", MLFLOW "/experiments/search", "{}", 200},
    {"GET", "/metrics", NULL, 200},
    {"POST", RUN "/finish", "{\"state\": \"finished\"}", 200},
    {"DELETE", RUN, NULL, 204},
    {"DELETE", "/api/v1/projects/1", NULL, 204},
};

static bool never(void *user)
{
    (void)user;
    return false;
}

static bool drain(const sample_exchange *from)
{
    char text[256];
    int64_t bytes = 1;

    while (bytes > 0)
        bytes = from->reply.source->pull(from->reply.source->self, text, sizeof text);
    return bytes != HTTP_SOURCE_FAILED;
}

static unsigned ask(sample_server *server, const step *of)
{
    sample_exchange exchange;
    unsigned status = sample_ask(server, server->token, of->method, of->target, of->body, NULL, &exchange);

    if (exchange.reply.source != NULL && !drain(&exchange))
        status = 503; /* the connection ends in the middle of the file */
    sample_end(&exchange);
    return status;
}

static bool removes(const step *of)
{
    return strcmp(of->method, "DELETE") == 0 || strstr(of->target, "/delete-") != NULL;
}

/* Where a step fails it is done once more, as a client does; then it must go on as if nothing had been. */
static void live_through(sample_server *server)
{
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        unsigned status = ask(server, &steps[i]);

        if (status == steps[i].status)
            continue;
        if (status != 0 && status != 503 && status != 500)
            fail_msg("%s %s answered %u", steps[i].method, steps[i].target, status);
        status = ask(server, &steps[i]);
        /* What was done, but could not be said, is there already: 200 for 201. */
        if (status != steps[i].status && !(steps[i].status == 201 && status == 200) &&
            !(removes(&steps[i]) && status == 404))
            fail_msg("%s %s answered %u the second time", steps[i].method, steps[i].target, status);
    }
    if (!api_keep(server->api, never, NULL) && !api_keep(server->api, never, NULL))
        fail_msg("what was asked for was not done the second time");
}

/* A copy, and a folder of it: whole, or not there. */
static void copy(const sample_server *server)
{
    char folder[SAMPLE_PATH];
    char file[SAMPLE_PATH + 8];

    sample_folder(folder);
    (void)snprintf(file, sizeof file, "%s/copy", server->folder);
    if (store_backup(server->folder, file, NULL) == MSC_OK ||
        store_backup(server->folder, file, NULL) == MSC_OK) {
        if (store_restore(folder, file, NULL) != MSC_OK && store_restore(folder, file, NULL) != MSC_OK)
            fail_msg("the copy does not make a folder the second time");
    } else {
        fail_msg("no copy the second time");
    }
    sample_remove(folder);
}

/* Whether anything failed. */
static bool one_life(uint64_t fail_at, uint64_t foreign_at)
{
    const msc_allocator allocator = {&heap, locked_resize};
    static sample_server server;

    failing_alloc_init(&heap, fail_at);
    foreign_count = foreign_failed = 0;
    foreign_fail_at = foreign_at;
    if (sample_server_start(&server, &allocator)) {
        live_through(&server);
        copy(&server);
        sample_server_stop(&server);
    }
    if (!failing_alloc_is_clean(&heap))
        fail_msg("request %llu, %llu: something is left", (unsigned long long)fail_at,
                 (unsigned long long)foreign_at);
    return heap.failed_count + foreign_failed > 0;
}

static unsigned stride(void)
{
    return failing_alloc_wanted("all") ? 1 : failing_alloc_wanted("few") ? 211 : 61;
}

static void test_ours(void **state)
{
    uint64_t n = 0;

    (void)state;
    while (one_life(n, UINT64_MAX))
        n += n < 60 ? 1 : stride() / 4 + 1;
    assert_true(n > 60);
}

static void test_of_jansson_and_sqlite(void **state)
{
    uint64_t n = 0;

    (void)state;
    while (one_life(FAILING_ALLOC_NEVER, n))
        n += stride();
    assert_true(n > 500);
}

int main(void)
{
    static const sqlite3_mem_methods methods = {sql_malloc,   sql_free,  sql_realloc, sql_size,
                                                sql_round_up, sql_start, sql_end,     NULL};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ours),
        cmocka_unit_test(test_of_jansson_and_sqlite),
    };

    json_set_alloc_funcs(foreign_malloc, free);
    if (sqlite3_config(SQLITE_CONFIG_MALLOC, &methods) != SQLITE_OK ||
        sqlite3_config(SQLITE_CONFIG_LOOKASIDE, 0, 0) != SQLITE_OK)
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
