/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MLflow's tracking API: its errors, its input, and experiments.
 *
 * What is behind it are our own projects and runs, so a run that was logged by either API is read by both.
 * Keys that we do not know are passed over, as MLflow does: its clients add some with each version. Addresses
 * of artifacts are never followed, and none may be named.
 */
#include <string.h>

#include "api/mlflow/api_mlflow.h"

#define DEFAULT "Default" /* the project of experiment 0 */
#define PAGE 1000

/* ---- errors ---------------------------------------------------------------------------------- */

bool api_is_mlflow(const api_call *call)
{
    const http_target *target = &call->request->target;

    return target->segment_count > 2 && strcmp(target->segments[0], "api") == 0 &&
           (strcmp(target->segments[1], "2.0") == 0 || strcmp(target->segments[1], "3.0") == 0);
}

static bool is_of_artifacts(const api_call *call)
{
    const http_target *target = &call->request->target;

    return strcmp(target->segments[2], "mlflow-artifacts") == 0 ||
           (target->segment_count > 3 && strcmp(target->segments[3], "artifacts") == 0);
}

static const char *code_of(const api_call *call, const api_fault *fault)
{
    static const struct {
        const char *ours;
        const char *theirs;
    } codes[] = {{"invalid", "INVALID_PARAMETER_VALUE"},  {"unauthenticated", "UNAUTHENTICATED"},
                 {"forbidden", "PERMISSION_DENIED"},      {"not_allowed", "ENDPOINT_NOT_FOUND"},
                 {"conflict", "RESOURCE_ALREADY_EXISTS"}, {"later", "TEMPORARILY_UNAVAILABLE"},
                 {"full", "RESOURCE_EXHAUSTED"}};

    if (strcmp(fault->code, "not_found") == 0)
        return call->route == NULL ? "ENDPOINT_NOT_FOUND" : "RESOURCE_DOES_NOT_EXIST";
    if (fault->status == 429)
        return "REQUEST_LIMIT_EXCEEDED";
    for (size_t i = 0; i < API_COUNT(codes); i++)
        if (strcmp(codes[i].ours, fault->code) == 0)
            return codes[i].theirs;
    return "INTERNAL_ERROR";
}

/* One sentence has all: their clients show nothing else. */
static void write_message(json_out *out, const api_fault *fault)
{
    char text[640];

    (void)snprintf(text, sizeof text, "%s%s%.120s%s%.64s%s%.250s", fault->message,
                   fault->field == NULL ? "" : ": ", fault->field == NULL ? "" : fault->field,
                   fault->value == NULL ? "" : " is ", fault->value == NULL ? "" : fault->value,
                   fault->allowed == NULL ? "" : "; allowed: ", fault->allowed == NULL ? "" : fault->allowed);
    /* A value may have been cut within a character. */
    out_text(out, "message", http_is_utf8(text) ? text : fault->message);
}

void api_refuse_mlflow(api_call *call, const api_fault *fault)
{
    static const api_fault no_artifacts = {
        .status = 501,
        .code = "not_implemented",
        .message = "memscale-server keeps metrics, params and tags, but no artifacts: keep files elsewhere"};
    bool artifacts = call->route == NULL && fault->status >= 404 && is_of_artifacts(call);
    json_out out = api_json(call);
    unsigned status = fault->status == 409 ? 400 : fault->status;

    if (artifacts)
        fault = &no_artifacts;
    out_open(&out, NULL, '{');
    out_text(&out, "error_code", artifacts ? "NOT_IMPLEMENTED" : code_of(call, fault));
    write_message(&out, fault);
    out_close(&out, '}');
    api_send(call, artifacts ? 501 : status, &out);
    if (fault->retry_after_s > 0)
        call->reply->retry_after_s = fault->retry_after_s;
}

bool mlflow_invalid(api_call *call, const char *field, const char *value, const char *allowed)
{
    return api_invalid(call, field, value, allowed);
}

void mlflow_send_nothing(api_call *call)
{
    json_out out = api_json(call);

    out_raw(&out, "{}");
    api_send(call, 200, &out);
}

/* ---- input ----------------------------------------------------------------------------------- */

bool mlflow_text(api_call *call, const char *name, size_t least, size_t most, const char **out)
{
    const json_t *value = call->body == NULL ? NULL : json_object_get(call->body, name);
    char allowed[64];

    *out = call->body == NULL ? http_target_find(&call->request->target, name) : json_string_value(value);
    (void)snprintf(allowed, sizeof allowed, "a text of %zu to %zu bytes", least, most);
    if (*out == NULL && value != NULL && !json_is_null(value))
        return mlflow_invalid(call, name, NULL, allowed);
    if ((*out == NULL && least > 0) || (*out != NULL && (strlen(*out) < least || strlen(*out) > most)))
        return mlflow_invalid(call, name, *out, allowed);
    return true;
}

bool mlflow_integer(api_call *call, const json_t *object, const char *name, int64_t least, int64_t most,
                    int64_t *out)
{
    const json_t *value = object == NULL ? NULL : json_object_get(object, name);
    const char *text =
        object == NULL ? http_target_find(&call->request->target, name) : json_string_value(value);
    char allowed[64];

    if (text == NULL && (value == NULL || json_is_null(value)))
        return true;
    if (json_is_integer(value)) {
        *out = json_integer_value(value);
        if (*out >= least && *out <= most)
            return true;
    } else if (text != NULL && api_parse_integer(text, least, most, out)) {
        return true;
    }
    (void)snprintf(allowed, sizeof allowed, "an integer from %lld to %lld", (long long)least,
                   (long long)most);
    return mlflow_invalid(call, name, text, allowed);
}

store_run_ref mlflow_ref(const api_call *call, const char *id)
{
    return (store_run_ref){call->caller.account.id, id, call->now_ms, call->caller.team,
                           call->caller.project};
}

bool mlflow_find_run(api_call *call, store_run *run)
{
    const char *id = NULL;
    store_result result;

    if (!mlflow_text(call, "run_id", 0, STORE_ID_BYTES, &id) ||
        (id == NULL && !mlflow_text(call, "run_uuid", 1, STORE_ID_BYTES, &id)))
        return false;
    result = store_run_find(call->it->parts.store, mlflow_ref(call, id), run);
    if (result == STORE_NOT_FOUND)
        api_refuse(call, &(const api_fault){.status = 404,
                                            .code = "not_found",
                                            .message = "there is no such run of yours",
                                            .field = "run_id",
                                            .value = id});
    else if (result != STORE_OK)
        api_refuse_store(call, result);
    return result == STORE_OK;
}

bool mlflow_page(api_call *call, int64_t most, int64_t *begin, int64_t *limit)
{
    const char *token = NULL;

    *begin = 0;
    *limit = most;
    if (!mlflow_integer(call, call->body, "max_results", 1, API_EXACT, limit) ||
        !mlflow_text(call, "page_token", 0, 32, &token))
        return false;
    if (*limit > most)
        *limit = most;
    if (token != NULL && *token != '\0' && !api_parse_integer(token, 0, API_EXACT, begin))
        return mlflow_invalid(call, "page_token", token, "next_page_token of the page before");
    return true;
}

void mlflow_write_next(json_out *out, int64_t next, bool has_next)
{
    char token[24];

    (void)snprintf(token, sizeof token, "%lld", (long long)next);
    if (has_next)
        out_text(out, "next_page_token", token);
}

/* ---- experiments ----------------------------------------------------------------------------- */

static void write_experiment(json_out *out, const char *key, const store_project *project)
{
    char text[64];

    out_open(out, key, '{');
    (void)snprintf(text, sizeof text, "%lld", (long long)project->id);
    out_text(out, "experiment_id", text);
    out_text(out, "name", project->name);
    (void)snprintf(text, sizeof text, "mlflow-artifacts:/%lld", (long long)project->id);
    out_text(out, "artifact_location", text);
    out_text(out, "lifecycle_stage", "active");
    out_integer(out, "creation_time", project->created_ms);
    out_integer(out, "last_update_time", project->created_ms);
    out_close(out, '}');
}

typedef struct experiment_search {
    int64_t id; /* 0: by name */
    const char *name;
    store_project found;
    bool is_found;
} experiment_search;

static bool match_experiment(void *user, const store_project *project)
{
    experiment_search *search = user;

    if (search->id != 0 ? project->id != search->id : strcmp(project->name, search->name) != 0)
        return true;
    search->found = *project;
    search->is_found = true;
    return false;
}

/* False: answered. */
static bool find_experiment(api_call *call, experiment_search *search)
{
    store_result result = store_projects(call->it->parts.store, api_who(call), 0, match_experiment, search);

    if (search->is_found)
        return true;
    if (result != STORE_OK)
        api_refuse_store(call, result);
    else
        api_refuse(call, &(const api_fault){.status = 404,
                                            .code = "not_found",
                                            .message = "there is no such experiment of yours",
                                            .field = search->id != 0 ? "experiment_id" : "experiment_name",
                                            .value = search->id != 0 ? NULL : search->name});
    return false;
}

static bool parse_id(api_call *call, const char *id, experiment_search *search)
{
    if (!api_parse_integer(id, 0, INT64_MAX, &search->id))
        return mlflow_invalid(call, "experiment_id", id, "an experiment's id, digits");
    search->name = DEFAULT; /* for 0 */
    return true;
}

bool mlflow_experiment_id(api_call *call, const char *id, int64_t *project)
{
    experiment_search search = {.id = 0};
    store_result result = STORE_OK;

    if (!parse_id(call, id, &search))
        return false;
    if (search.id == 0)
        result = store_projects(call->it->parts.store, api_who(call), 0, match_experiment, &search);
    *project = search.is_found ? search.found.id : search.id;
    if (result != STORE_OK && !search.is_found)
        api_refuse_store(call, result);
    return result == STORE_OK || search.is_found;
}

bool mlflow_project(api_call *call, const char *id, char name[STORE_NAME_BYTES + 1], int64_t *project)
{
    experiment_search search = {.id = 0};

    if (!parse_id(call, id, &search) || (search.id != 0 && !find_experiment(call, &search)))
        return false;
    (void)snprintf(name, STORE_NAME_BYTES + 1, "%s", search.id == 0 ? DEFAULT : search.found.name);
    *project = search.found.id;
    return true;
}

static void send_experiment(api_call *call, const store_project *project)
{
    json_out out = api_json(call);

    out_open(&out, NULL, '{');
    write_experiment(&out, "experiment", project);
    out_close(&out, '}');
    api_send(call, 200, &out);
}

void mlflow_create_experiment(api_call *call)
{
    const char *name;
    const char *location;
    json_out out = api_json(call);
    store_project project;
    store_result result;
    char id[24];
    bool made;

    if (!mlflow_text(call, "name", 1, STORE_NAME_BYTES, &name) ||
        !mlflow_text(call, "artifact_location", 0, MLFLOW_TEXT_BYTES, &location))
        return;
    if (location != NULL && *location != '\0') {
        (void)mlflow_invalid(call, "artifact_location", location, "none: artifacts are not kept here");
        return;
    }
    if (!api_is_name(name, 1, STORE_NAME_BYTES)) {
        (void)mlflow_invalid(call, "name", name, "1 to 128 bytes without control characters");
        return;
    }
    if (json_array_size(json_object_get(call->body, "tags")) > 0) {
        (void)mlflow_invalid(call, "tags", NULL, "none: experiments have no tags here");
        return;
    }
    result = store_project_add(call->it->parts.store, api_act(call), 0, name, &project, &made);
    if (result != STORE_OK || !made) {
        api_refuse_store(call, result == STORE_OK ? STORE_CONFLICT : result);
        return;
    }
    (void)snprintf(id, sizeof id, "%lld", (long long)project.id);
    out_open(&out, NULL, '{');
    out_text(&out, "experiment_id", id);
    out_close(&out, '}');
    api_send(call, 200, &out);
}

void mlflow_experiment(api_call *call)
{
    experiment_search search = {.id = 0};
    const char *id;

    if (mlflow_text(call, "experiment_id", 1, 24, &id) && parse_id(call, id, &search) &&
        find_experiment(call, &search))
        send_experiment(call, &search.found);
}

void mlflow_experiment_by_name(api_call *call)
{
    experiment_search search = {.id = 0};

    if (mlflow_text(call, "experiment_name", 1, MLFLOW_TEXT_BYTES, &search.name) &&
        find_experiment(call, &search))
        send_experiment(call, &search.found);
}

typedef struct experiment_page {
    json_out out;
    mlflow_filter filter;
    int64_t begin;
    int64_t limit;
    int64_t count; /* that match */
} experiment_page;

static bool write_match(void *user, const store_project *project)
{
    experiment_page *page = user;

    for (uint32_t i = 0; i < page->filter.count; i++)
        if (!mlflow_holds_text(&page->filter.at[i], project->name))
            return true;
    page->count++;
    if (page->count > page->begin && page->count <= page->begin + page->limit)
        write_experiment(&page->out, NULL, project);
    return !page->out.failed;
}

/* The filter of experiments knows their name alone. */
static bool read_name_filter(api_call *call, mlflow_filter *filter)
{
    const char *text;
    const char *wrong;

    if (!mlflow_text(call, "filter", 0, MLFLOW_TEXT_BYTES, &text))
        return false;
    wrong = mlflow_filter_read(text == NULL ? "" : text, filter);
    for (uint32_t i = 0; i < filter->count && wrong == NULL; i++)
        if (filter->at[i].name.kind != MLFLOW_ATTRIBUTE || strcmp(filter->at[i].name.key, "name") != 0)
            wrong = "clauses about name";
    return wrong == NULL || mlflow_invalid(call, "filter", text, wrong);
}

void mlflow_search_experiments(api_call *call)
{
    experiment_page *page = http_memory_get(&call->request->memory, sizeof *page);
    const char *view;
    store_result result = STORE_OK;

    if (page == NULL) {
        api_refuse_store(call, STORE_NO_MEMORY);
        return;
    }
    page->out = api_json(call);
    if (!mlflow_page(call, PAGE, &page->begin, &page->limit) || !read_name_filter(call, &page->filter) ||
        !mlflow_text(call, "view_type", 0, 32, &view))
        return;
    out_open(&page->out, NULL, '{');
    out_open(&page->out, "experiments", '[');
    if (view == NULL || strcmp(view, "DELETED_ONLY") != 0) /* projects are not deleted */
        result = store_projects(call->it->parts.store, api_who(call), 0, write_match, page);
    out_close(&page->out, ']');
    mlflow_write_next(&page->out, page->begin + page->limit, page->count > page->begin + page->limit);
    out_close(&page->out, '}');
    if (result == STORE_OK)
        api_send(call, 200, &page->out);
    else
        api_refuse_store(call, result);
}
