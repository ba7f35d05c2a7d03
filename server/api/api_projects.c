/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Projects: who sees them, how long their runs are kept.
 */
#include <string.h>

#include "api/api_internal.h"

#define RUNS_SHOWN 20u /* of those that a rule would take */

static void write_days(json_out *out, const char *key, int64_t days)
{
    if (days == 0)
        out_null(out, key);
    else
        out_integer(out, key, days);
}

static bool write_project(void *user, const store_project *project)
{
    json_out *out = user;

    out_open(out, NULL, '{');
    out_integer(out, "id", project->id);
    out_text(out, "name", project->name);
    out_integer(out, "created_ms", project->created_ms);
    out_integer(out, "runs", project->runs);
    out_integer(out, "team", project->team);
    out_text(out, "owner", project->owner);
    out_text(out, "visibility", project->is_private ? "private" : "team");
    out_text(out, "role", api_role_name(project->role));
    out_boolean(out, "may_change",
                project->role >= STORE_ADMIN || (project->owned && project->role >= STORE_MEMBER));
    write_days(out, "archive_days", project->archive_days);
    write_days(out, "delete_days", project->delete_days);
    out_close(out, '}');
    return !out->failed;
}

static void send_project(api_call *call, unsigned status, store_result result, const store_project *project)
{
    json_out out = api_json(call);

    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    (void)write_project(&out, project);
    api_send(call, status, &out);
}

void api_projects(api_call *call)
{
    json_out out = api_json(call);
    store_result result;
    int64_t team = 0;

    if (!api_parameter(call, "team", 1, INT64_MAX, &team))
        return;
    out_open(&out, NULL, '{');
    out_open(&out, "projects", '[');
    result = store_projects(call->it->parts.store, api_who(call), team, write_project, &out);
    api_send_list(call, result, &out);
}

void api_create_project(api_call *call)
{
    static const api_field fields[] = {{"name", JSON_STRING, true}, {"team", JSON_INTEGER, false}};
    json_t *given[API_COUNT(fields)];
    store_project project;
    store_result result;
    bool made;

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        !api_check_name(call, "name", given[0], 1, STORE_NAME_BYTES))
        return;
    result = store_project_add(call->it->parts.store, api_act(call),
                               given[1] == NULL ? 0 : json_integer_value(given[1]),
                               json_string_value(given[0]), &project, &made);
    send_project(call, made ? 201 : 200, result, &project);
}

void api_project(api_call *call)
{
    store_project project;
    int64_t id;

    if (api_path_id(call, 0, &id))
        send_project(call, 200, store_project_find(call->it->parts.store, api_who(call), id, &project),
                     &project);
}

static bool read_visibility(api_call *call, const json_t *given, store_project_change *change)
{
    const char *text = json_string_value(given);

    if (given == NULL)
        return true;
    if (strcmp(text, "team") != 0 && strcmp(text, "private") != 0)
        return api_invalid(call, "visibility", text, "team, private");
    change->is_private = *text == 'p';
    return true;
}

/* An integer of days; null, which is present: never. */
static bool read_days(api_call *call, const char *field, int64_t *days)
{
    const json_t *given = json_object_get(call->body, field);

    if (given == NULL)
        return true;
    *days = json_integer_value(given);
    if (json_is_null(given) || (*days >= 1 && *days <= STORE_MOST_DAYS))
        return true;
    return api_invalid(call, field, NULL, "1 to 36500, or null: never");
}

void api_change_project(api_call *call)
{
    static const api_field fields[] = {{"name", JSON_STRING, false},
                                       {"visibility", JSON_STRING, false},
                                       {"archive_days", JSON_INTEGER, false},
                                       {"delete_days", JSON_INTEGER, false}};
    store_project_change change = {.is_private = -1, .archive_days = -1, .delete_days = -1};
    json_t *given[API_COUNT(fields)];
    store_project project;
    int64_t id;

    if (!api_path_id(call, 0, &id) || !api_fields(call, call->body, "", fields, API_COUNT(fields), given) ||
        (given[0] != NULL && !api_check_name(call, "name", given[0], 1, STORE_NAME_BYTES)) ||
        !read_visibility(call, given[1], &change) || !read_days(call, "archive_days", &change.archive_days) ||
        !read_days(call, "delete_days", &change.delete_days))
        return;
    if (json_object_size(call->body) == 0) {
        (void)api_invalid(call, "body", "{}", "name, visibility, archive_days, delete_days");
        return;
    }
    change.name = json_string_value(given[0]);
    send_project(call, 200, store_project_alter(call->it->parts.store, api_act(call), id, &change, &project),
                 &project);
    api_wake_keeper(call);
}

void api_delete_project(api_call *call)
{
    int64_t id;

    if (!api_path_id(call, 0, &id))
        return;
    api_send_done(call, store_project_delete(call->it->parts.store, api_act(call), id));
    api_wake_keeper(call);
}

/* ---- who was chosen -------------------------------------------------------------------------- */

static bool write_name(void *user, const char *name)
{
    json_out *out = user;

    out_text(out, NULL, name);
    return !out->failed;
}

void api_chosen(api_call *call)
{
    json_out out = api_json(call);
    store_result result;
    int64_t id;

    if (!api_path_id(call, 0, &id))
        return;
    out_open(&out, NULL, '{');
    out_open(&out, "chosen", '[');
    result = store_project_chosen(call->it->parts.store, api_who(call), id, write_name, &out);
    api_send_list(call, result, &out);
}

static void choose(api_call *call, bool chosen)
{
    int64_t id;

    if (api_path_id(call, 0, &id))
        api_send_done(call, store_project_choose(call->it->parts.store, api_act(call), id,
                                                 call->path_values[1], chosen));
}

void api_choose(api_call *call)
{
    choose(call, true);
}

void api_unchoose(api_call *call)
{
    choose(call, false);
}

/* ---- retention ------------------------------------------------------------------------------- */

static bool write_run(void *user, const store_run *run)
{
    json_out *out = user;

    api_write_run(out, run, true);
    return !out->failed;
}

static store_result write_retention(api_call *call, const store_rule *rule, json_out *out)
{
    store *it = call->it->parts.store;
    store_retention would;
    store_result result = store_retention_preview(it, api_act(call), rule, &would);

    if (result != STORE_OK)
        return result;
    out_open(out, NULL, '{');
    out_integer(out, "archives", would.archives);
    out_integer(out, "deletes", would.deletes);
    out_integer(out, "pinned", would.pinned);
    out_open(out, "archived_first", '[');
    result = store_retention_runs(it, api_act(call), rule, false, RUNS_SHOWN, write_run, out);
    out_close(out, ']');
    out_open(out, "deleted_first", '[');
    if (result == STORE_OK)
        result = store_retention_runs(it, api_act(call), rule, true, RUNS_SHOWN, write_run, out);
    out_close(out, ']');
    out_close(out, '}');
    return result;
}

void api_retention(api_call *call)
{
    store_rule rule = {.archive_days = -1, .delete_days = -1};
    json_out out = api_json(call);
    store_result result;

    if (!api_path_id(call, 0, &rule.project) ||
        !api_parameter(call, "archive_days", 0, STORE_MOST_DAYS, &rule.archive_days) ||
        !api_parameter(call, "delete_days", 0, STORE_MOST_DAYS, &rule.delete_days))
        return;
    result = write_retention(call, &rule, &out);
    if (result == STORE_OK)
        api_send(call, 200, &out);
    else
        api_refuse_store(call, result);
}

void api_purge_project(api_call *call)
{
    int64_t id;

    if (!api_path_id(call, 0, &id))
        return;
    api_send_done(call, store_project_purge(call->it->parts.store, api_act(call), id));
    api_wake_keeper(call);
}
