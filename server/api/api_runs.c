/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs.
 */
#include <string.h>

#include "api/api_internal.h"

#define PAGE 50
#define MOST_OF_PAGE 500

static const char *const states[] = {[STORE_RUNNING] = "running",
                                     [STORE_FINISHED] = "finished",
                                     [STORE_ENDED_BADLY] = "failed",
                                     [STORE_LOST] = "lost"};

static bool parse_state(const char *text, store_state *state)
{
    for (size_t i = 0; i < API_COUNT(states); i++) {
        if (strcmp(states[i], text) == 0) {
            *state = (store_state)i;
            return true;
        }
    }
    return false;
}

/* ---- one run --------------------------------------------------------------------------------- */

store_run_ref api_ref(const api_call *call)
{
    return (store_run_ref){call->caller.account.id, call->path_values[0], call->now_ms, call->caller.team,
                           call->caller.project};
}

bool api_find_run(api_call *call, store_run *run)
{
    store_result result = store_run_find(call->it->parts.store, api_ref(call), run);

    if (result != STORE_OK)
        api_refuse_store(call, result);
    return result == STORE_OK;
}

void api_write_run(json_out *out, const store_run *run, bool closed)
{
    out_open(out, NULL, '{');
    out_text(out, "id", run->id);
    out_integer(out, "project", run->project);
    out_text(out, "name", run->name);
    out_text(out, "state", states[run->state]);
    out_boolean(out, "archived", run->archived);
    out_boolean(out, "pinned", run->pinned);
    out_integer(out, "created_ms", run->created_ms);
    out_integer(out, "seen_ms", run->seen_ms);
    if (run->ended_ms == STORE_NO_TIME)
        out_null(out, "ended_ms");
    else
        out_integer(out, "ended_ms", run->ended_ms);
    if (closed)
        out_close(out, '}');
}

static void send_run(api_call *call, unsigned status, const store_run *run)
{
    json_out out = api_json(call);

    api_write_run(&out, run, true);
    api_send(call, status, &out);
}

void api_say_run(void *user, const store_run *run)
{
    api_call *call = user;
    json_out out = api_json(call);

    api_write_run(&out, run, true);
    live_say(call->it->parts.live, run->id, run->version, "run", out.failed ? "{}" : out.text);
}

void api_say_gone(void *user, const store_run *run)
{
    const api_call *call = user;

    live_say(call->it->parts.live, run->id, run->version + 1, "gone", "{}");
}

void api_create_run(api_call *call)
{
    static const api_field fields[] = {{"id", JSON_STRING, true},
                                       {"project", JSON_STRING, true},
                                       {"name", JSON_STRING, false},
                                       {"created_ms", JSON_INTEGER, false},
                                       {"team", JSON_INTEGER, false}};
    json_t *given[API_COUNT(fields)];
    store_run_ref ref = api_ref(call);
    store_new_run fresh;
    store_run run;
    store_result result;
    bool made;

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !api_check_name(call, "project", given[1], 1, STORE_NAME_BYTES) ||
        (given[2] != NULL && !api_check_name(call, "name", given[2], 1, STORE_NAME_BYTES)))
        return;
    ref.id = json_string_value(given[0]);
    if (!api_is_run_id(ref.id)) {
        (void)api_invalid(call, "id", ref.id, "8 to 64 of A-Z, a-z, 0-9, underscore and hyphen");
        return;
    }
    fresh.project = json_string_value(given[1]);
    fresh.name = given[2] == NULL ? ref.id : json_string_value(given[2]);
    fresh.created_ms = given[3] == NULL ? call->now_ms : json_integer_value(given[3]);
    if (fresh.created_ms < 0 || fresh.created_ms > API_EXACT) {
        (void)api_invalid(call, "created_ms", NULL, "milliseconds since 1970");
        return;
    }
    fresh.team = given[4] == NULL ? 0 : json_integer_value(given[4]);
    result = store_run_add(call->it->parts.store, ref, &fresh, &run, &made);
    if (result == STORE_OK)
        send_run(call, made ? 201 : 200, &run);
    else
        api_refuse_store(call, result);
}

static bool write_document(void *user, const store_document *document, int64_t updated_ms)
{
    json_out *out = user;

    out_open(out, NULL, '{');
    out_text(out, "name", document->name);
    out_integer(out, "bytes", (int64_t)document->bytes);
    out_integer(out, "updated_ms", updated_ms);
    out_close(out, '}');
    return !out->failed;
}

void api_run(api_call *call)
{
    json_out out = api_json(call);
    store_result result;
    store_run run;

    if (!api_find_run(call, &run))
        return;
    api_write_run(&out, &run, false);
    out_integer(&out, "version", run.version);
    out_open(&out, "documents", '[');
    result = store_documents(call->it->parts.store, run.key, NULL, write_document, &out);
    api_send_list(call, result, &out);
}

static void alter(api_call *call, store_run_change *change, int64_t at_ms)
{
    store_run_ref ref = api_ref(call);
    store_result result;
    store_run run;

    change->after = api_say_run;
    change->user = call;
    ref.now_ms = at_ms;
    result = store_run_alter(call->it->parts.store, ref, change, &run);
    if (result == STORE_OK)
        send_run(call, 200, &run);
    else
        api_refuse_store(call, result);
}

void api_change_run(api_call *call)
{
    static const api_field fields[] = {
        {"name", JSON_STRING, false}, {"archived", JSON_TRUE, false}, {"pinned", JSON_TRUE, false}};
    store_run_change change = {.archived = -1, .state = STORE_ANY};
    json_t *given[API_COUNT(fields)];

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        (given[0] != NULL && !api_check_name(call, "name", given[0], 1, STORE_NAME_BYTES)))
        return;
    if (given[0] == NULL && given[1] == NULL && given[2] == NULL) {
        (void)api_invalid(call, "body", "{}", "name, archived, pinned");
        return;
    }
    change.name = json_string_value(given[0]);
    if (given[1] != NULL)
        change.archived = json_is_true(given[1]);
    if (given[2] != NULL)
        change.pin = json_is_true(given[2]) ? 1 : -1;
    alter(call, &change, call->now_ms);
}

void api_finish(api_call *call)
{
    static const api_field fields[] = {{"state", JSON_STRING, true}, {"ended_ms", JSON_INTEGER, false}};
    store_run_change change = {.archived = -1, .state = STORE_ANY};
    json_t *given[API_COUNT(fields)];
    int64_t ended_ms = call->now_ms;

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given))
        return;
    if (!parse_state(json_string_value(given[0]), &change.state) ||
        (change.state != STORE_FINISHED && change.state != STORE_ENDED_BADLY)) {
        (void)api_invalid(call, "state", json_string_value(given[0]), "finished, failed");
        return;
    }
    if (given[1] != NULL)
        ended_ms = json_integer_value(given[1]);
    if (ended_ms < 0 || ended_ms > API_EXACT) {
        (void)api_invalid(call, "ended_ms", NULL, "milliseconds since 1970");
        return;
    }
    alter(call, &change, ended_ms);
}

void api_delete_run(api_call *call)
{
    store_result result = store_run_delete(call->it->parts.store, api_ref(call), api_say_gone, call);

    if (result == STORE_OK)
        api_send_nothing(call);
    else
        api_refuse_store(call, result);
}

void api_heartbeat(api_call *call)
{
    store_result result = store_run_alive(call->it->parts.store, api_ref(call));

    if (result == STORE_OK)
        api_send_nothing(call);
    else
        api_refuse_store(call, result);
}

/* ---- a page of runs -------------------------------------------------------------------------- */

typedef struct runs_page {
    json_out out;
    store_run last;
    uint32_t count;
    uint32_t limit;
} runs_page;

static bool write_run(void *user, const store_run *run)
{
    runs_page *page = user;

    page->count++;
    if (page->count > page->limit)
        return true; /* one more than the page has: there is a next one */
    api_write_run(&page->out, run, true);
    page->last = *run;
    return !page->out.failed;
}

static bool read_sort(api_call *call, store_runs_query *query)
{
    static const struct {
        const char *name;
        store_sort sort;
    } sorts[] = {{"created", STORE_BY_CREATED}, {"name", STORE_BY_NAME}, {"seen", STORE_BY_SEEN}};
    const char *text = http_target_find(&call->request->target, "sort");

    query->sort = STORE_BY_CREATED;
    query->descending = true;
    if (text == NULL)
        return true;
    query->descending = *text == '-';
    for (size_t i = 0; i < API_COUNT(sorts); i++) {
        if (strcmp(sorts[i].name, text + query->descending) == 0) {
            query->sort = sorts[i].sort;
            return true;
        }
    }
    return api_invalid(call, "sort", text, "created, -created, name, -name, seen, -seen");
}

/* Where the page begins: the last run's key and what it was sorted by. */
static bool read_cursor(api_call *call, store_runs_query *query)
{
    const char *text = http_target_find(&call->request->target, "after");

    if (text == NULL)
        return true;
    query->resumes = true;
    if (!api_parse_cursor(text, &query->after_key, &query->after_name) ||
        (query->sort != STORE_BY_NAME &&
         !api_parse_integer(query->after_name, 0, INT64_MAX, &query->after_ms)))
        return api_invalid(call, "after", text, "next of a page with the same sort");
    return true;
}

static bool read_query(api_call *call, store_runs_query *query)
{
    const http_target *target = &call->request->target;
    const char *state = http_target_find(target, "state");
    int64_t limit = PAGE;

    *query = (store_runs_query){.who = api_who(call), .now_ms = call->now_ms, .state = STORE_ANY};
    query->search = http_target_find(target, "search");
    if (!api_parse_integer(call->path_values[0], 0, INT64_MAX, &query->project)) {
        api_not_found(call);
        return false;
    }
    if (state != NULL && !parse_state(state, &query->state))
        return api_invalid(call, "state", state, "running, lost, finished, failed");
    if (query->search != NULL && !api_is_name(query->search, 0, STORE_NAME_BYTES))
        return api_invalid(call, "search", query->search, "at most 128 bytes without control characters");
    if (!api_parameter(call, "limit", 1, MOST_OF_PAGE, &limit) ||
        !api_parameter_boolean(call, "archived", &query->archived) || !read_sort(call, query))
        return false;
    query->limit = (uint32_t)limit + 1;
    return read_cursor(call, query);
}

static void write_next(runs_page *page, const store_runs_query *query)
{
    char next[STORE_NAME_BYTES + 32];
    int64_t ms = query->sort == STORE_BY_SEEN ? page->last.seen_ms : page->last.created_ms;

    if (page->count <= page->limit) {
        out_null(&page->out, "next");
        return;
    }
    if (query->sort == STORE_BY_NAME)
        (void)snprintf(next, sizeof next, "%lld.%s", (long long)page->last.key, page->last.name);
    else
        (void)snprintf(next, sizeof next, "%lld.%lld", (long long)page->last.key, (long long)ms);
    out_text(&page->out, "next", next);
}

void api_runs(api_call *call)
{
    runs_page page = {.out = api_json(call)};
    store_runs_query query;
    store_result result;

    if (!read_query(call, &query))
        return;
    page.limit = query.limit - 1;
    out_open(&page.out, NULL, '{');
    out_open(&page.out, "runs", '[');
    result = store_runs(call->it->parts.store, &query, write_run, &page);
    out_close(&page.out, ']');
    write_next(&page, &query);
    out_close(&page.out, '}');
    if (result == STORE_OK)
        api_send(call, 200, &page.out);
    else
        api_refuse_store(call, result);
}
