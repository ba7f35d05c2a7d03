/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The routes without a socket: who may what, what is refused and how, what goes in comes out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "samples.h"

#define RUN "/api/v1/runs/run-00000001"
#define BEGIN "{\"id\": \"run-00000001\", \"project\": \"p\"}"

static unsigned ask_as(const char *token, const char *method, const char *target, const char *body,
                       const char *const *headers)
{
    sample_end(&sample_last);
    return sample_ask(&sample_one, token, method, target, body, headers, &sample_last);
}

static unsigned ask(const char *method, const char *target, const char *body)
{
    return ask_as(sample_one.token, method, target, body, NULL);
}

static bool says(const char *part)
{
    return strstr(sample_last.text, part) != NULL;
}

static void make_token(uint32_t scopes, char *text)
{
    store_token token = {.scopes = scopes, .expires_ms = STORE_NO_TIME};

    token.account.id = sample_one.account;
    assert_int_equal(accounts_token_make(sample_one.accounts, &token, sample_now_ms, text).result,
                     ACCOUNTS_OK);
}

static void test_routes(void **state)
{
    (void)state;
    assert_int_equal(ask("GET", "/healthz", NULL), 200);
    assert_int_equal(ask("HEAD", "/healthz", NULL), 200);
    assert_int_equal(ask("GET", "/readyz", NULL), 200);
    assert_int_equal(ask("GET", "/api/v1/nothing", NULL), 404);
    assert_int_equal(ask("GET", "/", NULL), 404); /* there is no page here */
    assert_int_equal(ask("DELETE", "/api/v1/projects", NULL), 405);
    assert_string_equal(sample_last.reply.allow, "GET, POST");
    assert_int_equal(ask("POST", "/api/v1/runs/x/series", "{}"), 405);
    assert_int_equal(ask("GET", "/healthz?x=1", NULL), 400);
    assert_true(says("\"field\": \"x\""));
    assert_int_equal(ask("GET", "/api/v1/projects/1/runs?limit=1&limit=2", NULL), 400);
    assert_int_equal(ask("GET", "/metrics", NULL), 200);
    assert_true(
        says("memscale_server_http_requests_total{method=\"GET\",route=\"/healthz\",code=\"2xx\"} 2"));
}

/* Every route that needs somebody says so to nobody, and to who has the other scopes. */
static void refuse_route(void *user, const char *method, const char *path)
{
    char target[256];
    size_t length = 0;

    for (; *path != '\0'; path++) {
        if (*path == '{') {
            length += (size_t)snprintf(target + length, sizeof target - length, "run-00000001");
            path = strchr(path, '}');
        } else {
            target[length++] = *path;
        }
    }
    target[length] = '\0';
    ++*(unsigned *)user;
    if (strstr(target, "setup") == NULL && strstr(target, "login") == NULL && strstr(target, "z") == NULL &&
        strstr(target, "v1/reset") == NULL && strstr(target, "v1/invitations") == NULL &&
        strcmp(target, "/api/v1/telemetry") != 0)
        if (ask_as(NULL, method, target, NULL, NULL) != 401)
            fail_msg("%s %s answered %u", method, target, sample_last.reply.status);
}

static void test_nobody_may_nothing(void **state)
{
    unsigned count = 0;
    char token[ACCOUNTS_TOKEN_BYTES];

    (void)state;
    api_list_routes(refuse_route, &count);
    assert_true(count > 25);
    make_token(ACCOUNTS_READ, token);
    assert_int_equal(ask_as(token, "POST", "/api/v1/runs", BEGIN, NULL), 403);
    assert_int_equal(ask_as(token, "GET", "/api/v1/tokens", NULL, NULL), 403);
    make_token(ACCOUNTS_INGEST, token);
    assert_int_equal(ask_as(token, "POST", "/api/v1/runs", BEGIN, NULL), 201);
    assert_int_equal(ask_as(token, "GET", RUN, NULL, NULL), 403);
    assert_int_equal(ask_as(token, "DELETE", RUN, NULL, NULL), 403);
    assert_int_equal(ask_as(token, "GET", "/api/v1/me", NULL, NULL), 200);
    token[30] = token[30] == '0' ? '1' : '0';
    assert_int_equal(ask_as(token, "GET", "/api/v1/me", NULL, NULL), 401);
}

/* As a member. */
static void join_first_team(int64_t account)
{
    store_invitation invitation = {.team = 1, .role = STORE_MEMBER, .expires_ms = SAMPLE_NOW_MS + 1};
    const store_act act = {{.account = sample_one.account}, SAMPLE_NOW_MS};
    store_account joining = {.id = account};
    char text[ACCOUNTS_INVITATION_BYTES];

    assert_int_equal(accounts_invite(sample_one.accounts, act, &invitation, text), STORE_OK);
    assert_int_equal(accounts_join(sample_one.accounts, text, &joining, NULL, SAMPLE_NOW_MS).result,
                     ACCOUNTS_OK);
}

static void test_sessions_and_origins(void **state)
{
    const char *const no_origin[] = {
        "Cookie: x=1; memscale=0000000000000000000000000000000000000000000000000000000000000000", NULL};
    char cookie[128];
    const char *headers[] = {cookie, NULL, NULL};
    store_account account;

    (void)state;
    assert_int_equal(
        accounts_add(sample_one.accounts, sample_one.account, "bob", "a long password", false, 5, &account)
            .result,
        ACCOUNTS_OK);
    join_first_team(account.id);
    assert_int_equal(ask_as(NULL, "POST", "/api/v1/login",
                            "{\"name\": \"bob\", \"password\": \"a long password\"}", no_origin),
                     200);
    assert_true(strncmp(sample_last.reply.cookie, "memscale=", 9) == 0 &&
                strstr(sample_last.reply.cookie, "; HttpOnly; SameSite=Lax"));
    assert_null(strstr(sample_last.reply.cookie, "000000000000")); /* never the one that came */
    (void)snprintf(cookie, sizeof cookie, "Cookie: %.*s", 9 + 64, sample_last.reply.cookie);
    assert_int_equal(ask_as(NULL, "GET", "/api/v1/me", NULL, headers), 200);
    assert_true(says("\"via\": \"session\""));
    assert_int_equal(ask_as(NULL, "POST", "/api/v1/projects", "{\"name\": \"x\"}", headers), 403);
    headers[1] = "Origin: http://evil.example";
    assert_int_equal(ask_as(NULL, "POST", "/api/v1/projects", "{\"name\": \"x\"}", headers), 403);
    headers[1] = "Origin: http://localhost:8300.evil.example";
    assert_int_equal(ask_as(NULL, "POST", "/api/v1/projects", "{\"name\": \"x\"}", headers), 403);
    headers[1] = "Sec-Fetch-Site: cross-site";
    assert_int_equal(ask_as(NULL, "POST", "/api/v1/projects", "{\"name\": \"x\"}", headers), 403);
    headers[1] = "Origin: null";
    assert_int_equal(ask_as(NULL, "POST", "/api/v1/projects", "{\"name\": \"x\"}", headers), 403);
    headers[1] = "Origin: http://localhost:8300";
    assert_int_equal(ask_as(NULL, "POST", "/api/v1/projects", "{\"name\": \"x\"}", headers), 201);
    headers[1] = "Sec-Fetch-Site: same-origin";
    assert_int_equal(ask_as(NULL, "POST", "/api/v1/projects", "{\"name\": \"x\"}", headers), 200);
    assert_int_equal(ask_as(NULL, "POST", "/api/v1/accounts",
                            "{\"name\": \"eve\", \"password\": \"0123456789\"}", headers),
                     403); /* bob is no admin */
    assert_int_equal(ask_as(NULL, "POST", "/api/v1/logout", NULL, headers), 204);
    assert_int_equal(ask_as(NULL, "GET", "/api/v1/me", NULL, headers), 401);
}

static void test_bodies_that_are_refused(void **state)
{
    static const struct {
        const char *body;
        const char *part;
    } wrong[] = {
        {"", "JSON object"},
        {"[]", "no object"},
        {"{\"id\": 1}", "\"field\": \"id\""},
        {"{\"id\": \"short\", \"project\": \"p\"}", "\"value\": \"short\""},
        {"{\"id\": \"run-00000001\"}", "\"field\": \"project\""},
        {"{\"id\": \"run-00000001\", \"project\": \"p\", \"x\": 1}", "\"value\": \"x\""},
        {"{\"id\": \"run-00000001\", \"id\": \"run-00000002\", \"project\": \"p\"}", "duplicate"},
        {"{\"id\": \"run-00000001\", \"project\": \"a\\u0000b\"}", "\"field\": \"body\""},
        {"{\"id\": \"run-00000001\", \"project\": \"a\\nb\"}", "control"},
        {"{\"id\": \"run-00000001\", \"project\": \"p\", \"created_ms\": 1e999}", "body"},
        {"{\"id\": \"run-00000001\", \"project\": \"p\", \"created_ms\": -1}", "created_ms"},
        {"{\"id\": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}", "32 deep"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        if (ask("POST", "/api/v1/runs", wrong[i].body) != 400 || !says(wrong[i].part) ||
            !says("\"code\": \"invalid\""))
            fail_msg("%s: %s", wrong[i].body, sample_last.text);
    assert_int_equal(ask("GET", "/api/v1/projects", NULL), 200);
    assert_string_equal(sample_last.text, "{\"projects\": []}\n");
}

static void test_what_goes_in_comes_out(void **state)
{
    const char *batch =
        "{\"client\": \"c\", \"sequence\": 1, \"points\": [{\"series\": \"<i>a/b</i>\", \"unit\": \"bytes\","
        " \"steps\": [1, 2, 3], \"times_ms\": [5, 6, 7], \"values\": [8589934592, \"NaN\", 0.1]}],"
        " \"events\": [{\"kind\": \"oom\", \"step\": 2, \"text\": \"\\\"</script>\", \"data\": {\"a\": "
        "[1]}}],"
        " \"documents\": {\"plan\": {\"z\": 1, \"a\": null}}}";

    (void)state;
    assert_int_equal(ask("POST", "/api/v1/runs", BEGIN), 201);
    assert_int_equal(ask("POST", "/api/v1/runs", BEGIN), 200);
    assert_int_equal(ask("POST", RUN "/batches", batch), 200);
    assert_string_equal(sample_last.text, "{\"duplicate\": false, \"version\": 1}\n");
    assert_int_equal(ask("POST", RUN "/batches", batch), 200);
    assert_string_equal(sample_last.text, "{\"duplicate\": true, \"version\": 1}\n");
    assert_int_equal(ask("GET", RUN "/points?series=%3Ci%3Ea%2Fb%3C%2Fi%3E&buckets=2", NULL), 200);
    assert_string_equal(
        sample_last.text,
        "{\"from\": 1, \"to\": 3, \"buckets\": 2, \"width\": 2, \"series\": [{\"name\": "
        "\"\\u003ci\\u003ea/b\\u003c/i\\u003e\", \"unit\": \"bytes\", \"index\": [0, 1], \"from\": [1, 3], "
        "\"to\": [2, 3], \"count\": [2, 1], \"nans\": [1, 0], \"min\": [8589934592, 0.1], \"max\": "
        "[8589934592, 0.1], \"mean\": [8589934592, 0.1], \"last\": [\"NaN\", 0.1]}]}\n");
    assert_int_equal(ask("GET", RUN "/events", NULL), 200);
    assert_true(says("\"text\": \"\\u0022\\u003c/script\\u003e\", \"data\": {\"a\":[1]}}], \"next\": null"));
    assert_int_equal(ask("GET", RUN "/documents/plan", NULL), 200);
    assert_true(says("\"a\":null"));
    assert_int_equal(ask("GET", RUN "/documents/none", NULL), 404);
    assert_int_equal(ask("GET", RUN "/points?series=none", NULL), 404);
    assert_int_equal(ask("GET", RUN "/points", NULL), 400);
    assert_int_equal(ask("GET", RUN "/points?series=a&buckets=0", NULL), 404);
    assert_int_equal(ask("POST", RUN "/finish", "{\"state\": \"lost\"}"), 400);
    assert_int_equal(ask("POST", RUN "/finish", "{\"state\": \"finished\"}"), 200);
    assert_int_equal(ask("PATCH", RUN, "{}"), 400);
    assert_int_equal(ask("PATCH", RUN, "{\"archived\": true}"), 200);
    assert_true(says("\"state\": \"finished\", \"archived\": true"));
    assert_int_equal(ask("DELETE", RUN, NULL), 204);
    assert_int_equal(ask("GET", RUN, NULL), 404);
}

static void test_batches_that_are_refused(void **state)
{
    static const char *const wrong[] = {
        "{\"client\": \"c d\", \"sequence\": 1}",
        "{\"client\": \"c\", \"sequence\": -1}",
        "{\"client\": \"c\", \"sequence\": 1.5}",
        "{\"client\": \"c\", \"sequence\": 1, \"points\": [7]}",
        "{\"client\": \"c\", \"sequence\": 1, \"points\": [{\"series\": \"\", \"steps\": [], \"values\": "
        "[]}]}",
        "{\"client\": \"c\", \"sequence\": 1, \"points\": [{\"series\": \"a\", \"steps\": [1], \"values\": "
        "[]}]}",
        "{\"client\": \"c\", \"sequence\": 1, \"points\": [{\"series\": \"a\", \"steps\": [1.5], \"values\": "
        "[1]}]}",
        "{\"client\": \"c\", \"sequence\": 1, \"points\": [{\"series\": \"a\", \"steps\": [1], \"values\": "
        "[\"nan\"]}]}",
        "{\"client\": \"c\", \"sequence\": 1, \"points\": [{\"series\": \"a\", \"steps\": "
        "[9007199254740993], \"values\": [1]}]}",
        "{\"client\": \"c\", \"sequence\": 1, \"events\": [{\"kind\": \"No\"}]}",
        "{\"client\": \"c\", \"sequence\": 1, \"documents\": {\"../x\": 1}}",
    };

    (void)state;
    assert_int_equal(ask("POST", "/api/v1/runs", BEGIN), 201);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        if (ask("POST", RUN "/batches", wrong[i]) != 400 || !says("\"allowed\": "))
            fail_msg("%s: %s", wrong[i], sample_last.text);
    assert_int_equal(ask("GET", RUN, NULL), 200);
    assert_true(says("\"version\": 0"));
    assert_int_equal(ask("POST", "/api/v1/runs/run-00000002/batches", "{\"client\": \"c\", \"sequence\": 1}"),
                     404);
}

static void test_pages_of_runs(void **state)
{
    char target[256] = "/api/v1/projects/1/runs?sort=name&limit=2";
    unsigned seen = 0;

    (void)state;
    for (char i = 'a'; i < 'h'; i++) {
        char body[128];

        (void)snprintf(body, sizeof body,
                       "{\"id\": \"run-0000000%c\", \"project\": \"p\", \"name\": \"n.%c.\"}", i, i);
        assert_int_equal(ask("POST", "/api/v1/runs", body), 201);
    }
    for (;;) {
        json_t *page;
        const char *next;

        assert_int_equal(ask("GET", target, NULL), 200);
        page = json_loads(sample_last.text, 0, NULL);
        seen += (unsigned)json_array_size(json_object_get(page, "runs"));
        next = json_string_value(json_object_get(page, "next"));
        if (next != NULL)
            (void)snprintf(target, sizeof target, "/api/v1/projects/1/runs?sort=name&limit=2&after=%s", next);
        json_decref(page);
        if (next == NULL)
            break;
    }
    assert_int_equal(seen, 7);
    assert_int_equal(ask("GET", "/api/v1/projects/1/runs?after=x", NULL), 400);
    assert_int_equal(ask("GET", "/api/v1/projects/1/runs?sort=id", NULL), 400);
    assert_int_equal(ask("GET", "/api/v1/projects/1/runs?state=dead", NULL), 400);
    assert_int_equal(ask("GET", "/api/v1/projects/1/runs?archived=yes", NULL), 400);
    assert_int_equal(ask("GET", "/api/v1/projects/x/runs", NULL), 404);
    assert_int_equal(ask("GET", "/api/v1/projects/2/runs", NULL), 404);
}

/* All of a source that does not end by itself. */
static const char *pull_all(const sample_exchange *from, size_t room)
{
    static char text[1 << 20];
    size_t length = 0;
    int64_t bytes;

    while ((bytes = from->reply.source->pull(from->reply.source->self, text + length, room)) > 0)
        length += (size_t)bytes;
    text[length] = '\0';
    return text;
}

static void test_exports(void **state)
{
    static const char start[] = "series,unit,step,time_ms,value\r\n"
                                "\"a\"\"b\",\"\",0,1,0\r\n\"a\"\"b\",\"\",1,2,0.5\r\n";
    const char *csv;
    json_t *whole;

    (void)state;
    assert_int_equal(ask("POST", "/api/v1/runs", BEGIN), 201);
    for (int i = 0; i < 300; i++) {
        char body[512];

        (void)snprintf(
            body, sizeof body,
            "{\"client\": \"c\", \"sequence\": %d, \"points\": [{\"series\": \"a\\\"b\", \"steps\": [%d, %d],"
            " \"times_ms\": [1, 2], \"values\": [%d, 0.5]}, {\"series\": \"b\", \"steps\": [%d], \"values\": "
            "[1]}],"
            " \"events\": [{\"kind\": \"oom\"}], \"documents\": {\"plan\": [%d]}}",
            i, 2 * i, 2 * i + 1, i, i, i);
        assert_int_equal(ask("POST", RUN "/batches", body), 200);
    }
    assert_int_equal(ask("GET", RUN "/export?format=csv", NULL), 200);
    csv = pull_all(&sample_last, 999);
    assert_memory_equal(csv, start, sizeof start - 1);
    assert_int_equal(ask("GET", RUN "/export?format=json", NULL), 200);
    whole = json_loads(pull_all(&sample_last, 77), 0, NULL);
    assert_non_null(whole);
    assert_int_equal(json_array_size(json_object_get(whole, "events")), 300);
    assert_int_equal(
        json_array_size(json_object_get(json_array_get(json_object_get(whole, "series"), 0), "points")), 600);
    assert_int_equal(
        json_array_size(json_object_get(json_array_get(json_object_get(whole, "series"), 1), "points")), 300);
    assert_int_equal(
        json_integer_value(json_array_get(json_object_get(json_object_get(whole, "documents"), "plan"), 0)),
        299);
    json_decref(whole);
    assert_int_equal(ask("GET", RUN "/export?format=xml", NULL), 400);
    assert_int_equal(ask("GET", RUN "/export", NULL), 400);
}

static void test_live(void **state)
{
    const char *const resumed[] = {"Last-Event-ID: 1", NULL};
    const char *const broken[] = {"Last-Event-ID: x", NULL};
    sample_exchange watch;

    (void)state;
    assert_int_equal(ask("POST", "/api/v1/runs", BEGIN), 201);
    assert_int_equal(ask_as(sample_one.token, "GET", RUN "/live", NULL, broken), 400);
    assert_int_equal(
        sample_ask(&sample_one, sample_one.token, "GET", RUN "/live?after=0", NULL, NULL, &watch), 200);
    assert_string_equal(pull_all(&watch, 1000), ": here\n\n");
    assert_int_equal(
        ask("POST", RUN "/batches",
            "{\"client\": \"c\", \"sequence\": 1, \"points\": [{\"series\": \"a\", \"steps\": [4, 5],"
            " \"values\": [1, 3]}], \"documents\": {\"plan\": 1}}"),
        200);
    assert_string_equal(
        pull_all(&watch, 1000),
        "id: 1\nevent: batch\ndata: {\"series\": [{\"name\": \"a\", \"unit\": \"\", \"from\": 4, \"to\": 5, "
        "\"count\": 2, \"nans\": 0, \"min\": 1, \"max\": 3, \"mean\": 2, \"last\": 3}], \"events\": 0, "
        "\"documents\": [\"plan\"]}\n\n");
    assert_int_equal(ask("POST", RUN "/finish", "{\"state\": \"failed\"}"), 200);
    assert_int_equal(ask("DELETE", RUN, NULL), 204);
    assert_non_null(strstr(pull_all(&watch, 1000), "id: 2\nevent: run\ndata: {\"id\": \"run-00000001\""));
    sample_end(&watch);
    assert_int_equal(ask("POST", "/api/v1/runs", BEGIN), 201);
    assert_int_equal(sample_ask(&sample_one, sample_one.token, "GET", RUN "/live", NULL, resumed, &watch),
                     200);
    assert_string_equal(pull_all(&watch, 1000), "id: 0\nevent: reset\ndata: {}\n\n");
    sample_end(&watch);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, sample_set_up, sample_tear_down)
    const struct CMUnitTest tests[] = {
        CASE(test_routes),
        CASE(test_nobody_may_nothing),
        CASE(test_sessions_and_origins),
        CASE(test_bodies_that_are_refused),
        CASE(test_what_goes_in_comes_out),
        CASE(test_batches_that_are_refused),
        CASE(test_pages_of_runs),
        CASE(test_exports),
        CASE(test_live),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
