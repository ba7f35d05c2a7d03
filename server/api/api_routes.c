/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The routes, and the way of a request through them:
 *
 *      header is there     route │ who is it │ may they │ do they mean it     → how much body may follow
 *      body is there       JSON and its depth │ parameters │ the route's handler                → reply
 *
 * What is not below /api/ is a file of the page, or drawn by it.
 */
#include <string.h>
#include <time.h>

#include "api/api_internal.h"
#include "api/mlflow/api_mlflow.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/thread.h"

#define METHODS_BYTES 64u /* of the methods of a path */

#define V1 "/api/v1"
#define RUN V1 "/runs/{run}"
#define ACCOUNT V1 "/accounts/{account}"
#define TEAM V1 "/teams/{team}"
#define PROJECT V1 "/projects/{project}"
#define MLFLOW "/api/2.0/mlflow"
#define API_ANY "*" /* parameters that are not known are passed over */

const api_route api_routes[] = {
    {"GET", V1 "/setup", 0, 0, NULL, api_setup_state},
    {"POST", V1 "/setup", 0, API_BODY_BYTES, NULL, api_setup},
    {"POST", V1 "/login", 0, API_BODY_BYTES, NULL, api_login},
    {"POST", V1 "/logout", ACCOUNTS_READ, 0, NULL, api_logout},
    {"GET", V1 "/me", ACCOUNTS_READ | ACCOUNTS_INGEST, 0, NULL, api_me},
    {"PUT", V1 "/me/password", ACCOUNTS_SELF, API_BODY_BYTES, NULL, api_change_password},
    {"GET", V1 "/accounts", ACCOUNTS_SELF, 0, NULL, api_accounts},
    {"POST", V1 "/accounts", ACCOUNTS_SELF, API_BODY_BYTES, NULL, api_create_account},
    {"GET", V1 "/tokens", ACCOUNTS_SELF, 0, ",revoked,", api_tokens},
    {"POST", V1 "/tokens", ACCOUNTS_SELF, API_BODY_BYTES, NULL, api_create_token},
    {"DELETE", V1 "/tokens/{token}", ACCOUNTS_SELF, 0, NULL, api_revoke_token},
    {"GET", V1 "/projects", ACCOUNTS_READ, 0, ",team,", api_projects},
    {"POST", V1 "/projects", ACCOUNTS_INGEST, API_BODY_BYTES, NULL, api_create_project},
    {"GET", V1 "/projects/{project}/runs", ACCOUNTS_READ, 0, ",state,search,archived,sort,limit,after,",
     api_runs},
    {"POST", V1 "/runs", ACCOUNTS_INGEST, API_BODY_BYTES, NULL, api_create_run},
    {"GET", RUN, ACCOUNTS_READ, 0, NULL, api_run},
    {"PATCH", RUN, ACCOUNTS_ADMIN, API_BODY_BYTES, NULL, api_change_run},
    {"DELETE", RUN, ACCOUNTS_ADMIN, 0, NULL, api_delete_run},
    {"POST", RUN "/batches", ACCOUNTS_INGEST, API_BATCH_BYTES, NULL, api_ingest},
    {"POST", RUN "/heartbeat", ACCOUNTS_INGEST, 0, NULL, api_heartbeat},
    {"POST", RUN "/finish", ACCOUNTS_INGEST, API_BODY_BYTES, NULL, api_finish},
    {"GET", RUN "/series", ACCOUNTS_READ, 0, NULL, api_series},
    {"GET", RUN "/points", ACCOUNTS_READ, 0, ",series,buckets,from,to,", api_points},
    {"GET", RUN "/events", ACCOUNTS_READ, 0, ",kind,limit,after,", api_events},
    {"GET", RUN "/documents/{name}", ACCOUNTS_READ, 0, NULL, api_document},
    {"GET", RUN "/live", ACCOUNTS_READ, 0, ",after,", api_live},
    {"GET", RUN "/export", ACCOUNTS_READ, 0, ",format,", api_export},
    {"PATCH", ACCOUNT, ACCOUNTS_SELF, API_BODY_BYTES, NULL, api_change_account},
    {"POST", ACCOUNT "/reset", ACCOUNTS_SELF, 0, NULL, api_make_reset},
    {"POST", V1 "/reset", 0, API_BODY_BYTES, NULL, api_reset},
    {"GET", V1 "/me/sessions", ACCOUNTS_SELF, 0, NULL, api_sessions},
    {"DELETE", V1 "/me/sessions/{session}", ACCOUNTS_SELF, 0, NULL, api_end_session},
    {"GET", V1 "/audit", ACCOUNTS_SELF, 0, ",limit,before,", api_audit},
    {"GET", V1 "/teams", ACCOUNTS_READ, 0, NULL, api_teams},
    {"POST", V1 "/teams", ACCOUNTS_SELF, API_BODY_BYTES, NULL, api_create_team},
    {"GET", TEAM, ACCOUNTS_READ, 0, NULL, api_team},
    {"PATCH", TEAM, ACCOUNTS_ADMIN, API_BODY_BYTES, NULL, api_rename_team},
    {"DELETE", TEAM, ACCOUNTS_ADMIN, 0, NULL, api_delete_team},
    {"GET", TEAM "/members", ACCOUNTS_READ, 0, NULL, api_members},
    {"PATCH", TEAM "/members/{account}", ACCOUNTS_ADMIN, API_BODY_BYTES, NULL, api_change_member},
    {"DELETE", TEAM "/members/{account}", ACCOUNTS_ADMIN, 0, NULL, api_remove_member},
    {"GET", TEAM "/audit", ACCOUNTS_ADMIN, 0, ",limit,before,", api_team_audit},
    {"GET", TEAM "/invitations", ACCOUNTS_ADMIN, 0, NULL, api_invitations},
    {"POST", TEAM "/invitations", ACCOUNTS_ADMIN, API_BODY_BYTES, NULL, api_create_invitation},
    {"DELETE", TEAM "/invitations/{invitation}", ACCOUNTS_ADMIN, 0, NULL, api_revoke_invitation},
    {"POST", V1 "/invitations/look", 0, API_BODY_BYTES, NULL, api_look_at_invitation},
    {"POST", V1 "/invitations/accept", 0, API_BODY_BYTES, NULL, api_accept_invitation},
    {"GET", PROJECT, ACCOUNTS_READ, 0, NULL, api_project},
    {"PATCH", PROJECT, ACCOUNTS_ADMIN, API_BODY_BYTES, NULL, api_change_project},
    {"DELETE", PROJECT, ACCOUNTS_ADMIN, 0, NULL, api_delete_project},
    {"GET", PROJECT "/chosen", ACCOUNTS_READ, 0, NULL, api_chosen},
    {"PUT", PROJECT "/chosen/{account}", ACCOUNTS_ADMIN, 0, NULL, api_choose},
    {"DELETE", PROJECT "/chosen/{account}", ACCOUNTS_ADMIN, 0, NULL, api_unchoose},
    {"GET", PROJECT "/retention", ACCOUNTS_READ, 0, ",archive_days,delete_days,", api_retention},
    {"POST", PROJECT "/purge", ACCOUNTS_ADMIN, 0, NULL, api_purge_project},
    {"POST", V1 "/telemetry", 0, API_TELEMETRY_BYTES, NULL, api_take_telemetry},
    {"GET", V1 "/telemetry", ACCOUNTS_SELF, 0, ",from,to,", api_telemetry},
    {"POST", MLFLOW "/experiments/create", ACCOUNTS_INGEST, API_BATCH_BYTES, NULL, mlflow_create_experiment},
    {"GET", MLFLOW "/experiments/get", ACCOUNTS_READ, 0, API_ANY, mlflow_experiment},
    {"GET", MLFLOW "/experiments/get-by-name", ACCOUNTS_READ, 0, API_ANY, mlflow_experiment_by_name},
    {"POST", MLFLOW "/experiments/search", ACCOUNTS_READ, API_BODY_BYTES, NULL, mlflow_search_experiments},
    {"POST", MLFLOW "/runs/create", ACCOUNTS_INGEST, API_BATCH_BYTES, NULL, mlflow_create_run},
    {"GET", MLFLOW "/runs/get", ACCOUNTS_READ, 0, API_ANY, mlflow_run},
    {"POST", MLFLOW "/runs/search", ACCOUNTS_READ, API_BODY_BYTES, NULL, mlflow_search_runs},
    {"POST", MLFLOW "/runs/update", ACCOUNTS_INGEST, API_BODY_BYTES, NULL, mlflow_update_run},
    {"POST", MLFLOW "/runs/delete", ACCOUNTS_ADMIN, API_BODY_BYTES, NULL, mlflow_delete_run},
    {"POST", MLFLOW "/runs/restore", ACCOUNTS_ADMIN, API_BODY_BYTES, NULL, mlflow_restore_run},
    {"POST", MLFLOW "/runs/log-metric", ACCOUNTS_INGEST, API_BODY_BYTES, NULL, mlflow_log_metric},
    {"POST", MLFLOW "/runs/log-parameter", ACCOUNTS_INGEST, API_BODY_BYTES, NULL, mlflow_log_parameter},
    {"POST", MLFLOW "/runs/log-batch", ACCOUNTS_INGEST, API_BATCH_BYTES, NULL, mlflow_log_batch},
    {"POST", MLFLOW "/runs/set-tag", ACCOUNTS_INGEST, API_BODY_BYTES, NULL, mlflow_set_tag},
    {"POST", MLFLOW "/runs/delete-tag", ACCOUNTS_INGEST, API_BODY_BYTES, NULL, mlflow_delete_tag},
    {"GET", MLFLOW "/metrics/get-history", ACCOUNTS_READ, 0, API_ANY, mlflow_history},
    {"GET", "/healthz", 0, 0, NULL, api_healthz},
    {"GET", "/readyz", 0, 0, NULL, api_readyz},
    {"GET", "/metrics", ACCOUNTS_READ, 0, NULL, api_metrics},
};
const size_t api_route_count = API_COUNT(api_routes);

_Static_assert(API_COUNT(api_routes) <= API_MOST_ROUTES, "API_MOST_ROUTES is too small");

void api_list_routes(void (*write)(void *user, const char *method, const char *path), void *user)
{
    for (size_t i = 0; i < api_route_count; i++)
        write(user, api_routes[i].method, api_routes[i].path);
}

/* ---- finding a route ------------------------------------------------------------------------- */

static bool fits(const api_route *route, const http_target *target, const char **values)
{
    const char *at = route->path;
    uint32_t value = 0;
    uint32_t i;

    for (i = 0; i < target->segment_count && *at == '/'; i++) {
        size_t bytes = strcspn(++at, "/");

        if (*at == '{')
            values[value++] = target->segments[i];
        else if (strlen(target->segments[i]) != bytes || memcmp(at, target->segments[i], bytes) != 0)
            return false;
        at += bytes;
    }
    return i == target->segment_count && *at == '\0';
}

static bool is_method(const char *sent, const char *method)
{
    return strcmp(sent, method) == 0 || (strcmp(sent, "HEAD") == 0 && strcmp(method, "GET") == 0);
}

/* NULL: none; `allow` lists the methods that the path has. */
static const api_route *find_route(api_call *call, char *allow, size_t room)
{
    const char *sent = call->request->method;
    size_t length = 0;

    allow[0] = '\0';
    for (size_t i = 0; i < api_route_count; i++) {
        const char *values[2] = {NULL, NULL};

        if (!fits(&api_routes[i], &call->request->target, values))
            continue;
        memcpy(call->path_values, values, sizeof values);
        if (is_method(sent, api_routes[i].method))
            return &api_routes[i];
        length += (size_t)snprintf(allow + length, room - length, "%s%s", length == 0 ? "" : ", ",
                                   api_routes[i].method);
        MSC__ASSERT(length < room);
    }
    return NULL;
}

/* Paths that the page draws itself from its first file. */
static bool is_drawn(const http_target *target)
{
    static const char *const drawn[] = {"setup",   "login", "projects", "runs", "tokens", "accounts",
                                        "compare", "teams", "audit",    "join", "reset"};

    if (target->segment_count == 0)
        return true;
    for (size_t i = 0; i < API_COUNT(drawn); i++)
        if (strcmp(target->segments[0], drawn[i]) == 0)
            return true;
    return false;
}

/* Nothing of ours answers to this path: a file, then. */
static void answer_page(api_call *call, char *allow)
{
    const http_target *target = &call->request->target;
    const http_page *page = call->it->parts.page;
    bool reads = is_method(call->request->method, "GET");
    char *kept;

    if (*allow == '\0' && reads && http_page_find(page, target, call->reply))
        return;
    if (*allow == '\0' && reads && is_drawn(target) && http_page_index(page, call->reply))
        return;
    if (*allow == '\0') {
        api_not_found(call);
        return;
    }
    kept = http_memory_get(&call->request->memory, METHODS_BYTES);
    api_refuse(call, &(const api_fault){.status = 405,
                                        .code = "not_allowed",
                                        .message = "the path does not have this method",
                                        .value = call->request->method,
                                        .allowed = allow});
    if (kept != NULL)
        call->reply->allow = memcpy(kept, allow, METHODS_BYTES);
}

static bool check_parameters(api_call *call)
{
    const http_target *target = &call->request->target;
    const char *known = call->route->parameters == NULL ? "" : call->route->parameters;

    for (uint32_t i = 0; i < target->parameter_count && strcmp(known, API_ANY) != 0; i++) {
        const char *name = target->parameters[i].name;
        char marked[64];
        bool again =
            http_target_find(target, name) != target->parameters[i].value && strcmp(name, "series") != 0;

        (void)snprintf(marked, sizeof marked, ",%.50s,", name);
        if (strlen(name) > 50 || strchr(name, ',') != NULL || strstr(known, marked) == NULL || again)
            return api_invalid(call, name, target->parameters[i].value,
                               *known == '\0' ? "no parameters" : known);
    }
    return true;
}

/* ---- the handler of http --------------------------------------------------------------------- */

static int64_t system_now_ms(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void count(api_call *call)
{
    api *it = call->it;
    size_t route = call->route == NULL ? API_MOST_ROUTES : (size_t)(call->route - api_routes);
    unsigned class_of = call->reply->status / 100;

    MSC__ASSERT(class_of >= 2 && class_of <= 5);
    atomic_fetch_add(&it->answered[route][class_of - 2], 1);
    atomic_fetch_add(&it->answer_ns, (uint64_t)(msc__clock_ns() - call->begin_ns));
}

static uint64_t begin(void *user, http_request *request, http_reply *reply)
{
    api_call *call = http_memory_get(&request->memory, sizeof *call);
    char allow[METHODS_BYTES] = "";

    if (call == NULL) {
        http_refuse(request, (http_refusal){503, "later", "the server is short of memory"}, reply);
        return 0;
    }
    *call = (api_call){.it = user, .request = request, .reply = reply};
    call->begin_ns = msc__clock_ns();
    call->now_ms = call->it->parts.now_ms();
    request->user = call;
    call->route = find_route(call, allow, sizeof allow);
    if (call->route == NULL)
        answer_page(call, allow);
    else if (check_parameters(call) && api_authenticate(call))
        (void)api_is_same_origin(call);
    if (reply->status != 0)
        count(call);
    return call->route == NULL ? 0 : call->route->body_bytes;
}

static void answer(void *user, http_request *request, http_reply *reply)
{
    api_call *call = request->user;

    (void)user;
    MSC__ASSERT(call->reply == reply && call->route != NULL);
    call->begin_ns = msc__clock_ns();
    if (call->route->body_bytes == 0 || api_read_body(call))
        call->route->answer(call);
    json_decref(call->body);
    call->body = NULL;
    count(call);
}

static void streams(void *user, http_request *request, http_stream *stream)
{
    (void)user;
    api_live_stream(request, stream);
}

static void tick(void *user)
{
    api *it = user;

    live_tick(it->parts.live);
    api_telemetry_tick(it);
}

http_handler api_handler(api *it)
{
    return (http_handler){it, begin, answer, streams, tick};
}

msc_status api_create(const api_parts *parts, api **out, msc_error *err)
{
    msc_context_options options = msc_context_options_default();
    msc_context *ctx = NULL;
    msc_status status;

    *out = NULL;
    api_watch_memory();
    options.allocator = parts->allocator;
    status = msc_context_create(&options, &ctx, err);
    if (status != MSC_OK)
        return status;
    *out = msc__alloc(ctx, sizeof **out);
    if (*out == NULL) {
        msc_context_destroy(ctx);
        return msc__fail_memory(err, "the API", sizeof **out);
    }
    (*out)->parts = *parts;
    (*out)->ctx = ctx;
    status = msc__mutex_init(&(*out)->documents, err);
    if (status != MSC_OK) {
        msc__free(ctx, *out, sizeof **out);
        *out = NULL;
        msc_context_destroy(ctx);
        return status;
    }
    if (parts->now_ms == NULL)
        (*out)->parts.now_ms = system_now_ms;
    return MSC_OK;
}

void api_destroy(api *it)
{
    msc_context *ctx = it == NULL ? NULL : it->ctx;

    if (it != NULL) {
        msc__mutex_fini(&it->documents);
        msc__free(ctx, it, sizeof *it);
    }
    msc_context_destroy(ctx);
}
