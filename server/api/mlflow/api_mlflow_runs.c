/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MLflow's runs: they are made and changed, and read one at a time.
 *
 * Params stay as they were logged first; tags are what was said last. The run's name is the tag that MLflow
 * has for it, too. A lost run is RUNNING to MLflow, whose clients give no sign of life.
 */
#include <sodium.h>
#include <string.h>

#include "api/mlflow/api_mlflow.h"

#define ID_BYTES 16u
#define HISTORY 25000

const char *mlflow_status(const store_run *run)
{
    return run->state == STORE_FINISHED ? "FINISHED" : run->state == STORE_ENDED_BADLY ? "FAILED" : "RUNNING";
}

/* ---- a run as it is read --------------------------------------------------------------------- */

typedef struct loaded_document {
    json_t *object;
    bool failed;
} loaded_document;

static bool load_text(void *user, const store_document *document, int64_t updated_ms)
{
    loaded_document *into = user;

    (void)updated_ms;
    json_decref(into->object);
    into->object = json_loadb(document->text, document->bytes, 0, NULL);
    into->failed = into->object == NULL; /* it was JSON when it was stored */
    return !into->failed;
}

json_t *mlflow_load(api_call *call, int64_t run, const char *name, store_result *result)
{
    loaded_document into = {json_object(), false};

    *result = into.object == NULL ? STORE_NO_MEMORY
                                  : store_documents(call->it->parts.store, run, name, load_text, &into);
    if (*result == STORE_NOT_FOUND)
        *result = STORE_OK;
    if (into.failed)
        *result = STORE_NO_MEMORY;
    if (*result == STORE_OK && !json_is_object(into.object)) { /* of another client, which has another form */
        json_decref(into.object);
        into.object = json_object();
        *result = into.object == NULL ? STORE_NO_MEMORY : STORE_OK;
    }
    if (*result != STORE_OK) {
        json_decref(into.object);
        into.object = NULL;
    }
    return into.object;
}

/* Values that are no texts, as our own clients send them, are written as JSON. */
static void write_pair(api_call *call, json_out *out, const char *key, const json_t *value)
{
    size_t bytes = json_is_string(value) ? 0 : json_dumpb(value, NULL, 0, JSON_COMPACT | JSON_ENCODE_ANY);
    char *text = bytes == 0 ? NULL : http_memory_get(&call->request->memory, bytes + 1);

    if (text != NULL)
        bytes = json_dumpb(value, text, bytes, JSON_COMPACT | JSON_ENCODE_ANY);
    out->failed |= !json_is_string(value) && (text == NULL || bytes == 0);
    out_open(out, NULL, '{');
    out_text(out, "key", key);
    out_text(out, "value", json_is_string(value) ? json_string_value(value) : text == NULL ? "" : text);
    out_close(out, '}');
    http_memory_drop(&call->request->memory, text);
}

static store_result write_pairs(api_call *call, json_out *out, const char *name, const store_run *run)
{
    bool tags = strcmp(name, "tags") == 0;
    store_result result;
    json_t *object = mlflow_load(call, run->key, name, &result);
    const char *key;
    json_t *value;

    out_open(out, name, '[');
    if (tags) {
        out_open(out, NULL, '{');
        out_text(out, "key", MLFLOW_RUN_NAME);
        out_text(out, "value", run->name);
        out_close(out, '}');
    }
    json_object_foreach(object, key, value)
    {
        if (!tags || strcmp(key, MLFLOW_RUN_NAME) != 0)
            write_pair(call, out, key, value);
    }
    out_close(out, ']');
    json_decref(object);
    return result;
}

static bool write_metric(void *user, const store_series *series)
{
    json_out *out = user;

    out_open(out, NULL, '{');
    out_text(out, "key", series->name);
    out_number(out, "value", series->summary.last);
    out_integer(out, "timestamp", series->summary.last_time_ms);
    out_integer(out, "step", series->summary.last_step);
    out_close(out, '}');
    return !out->failed;
}

static void write_info(json_out *out, const char *key, const store_run *run)
{
    char text[STORE_ID_BYTES + 64];

    out_open(out, key, '{');
    out_text(out, "run_id", run->id);
    out_text(out, "run_uuid", run->id);
    out_text(out, "run_name", run->name);
    (void)snprintf(text, sizeof text, "%lld", (long long)run->project);
    out_text(out, "experiment_id", text);
    out_text(out, "user_id", "");
    out_text(out, "status", mlflow_status(run));
    out_integer(out, "start_time", run->created_ms);
    if (run->ended_ms != STORE_NO_TIME)
        out_integer(out, "end_time", run->ended_ms);
    (void)snprintf(text, sizeof text, "mlflow-artifacts:/%lld/%s/artifacts", (long long)run->project,
                   run->id);
    out_text(out, "artifact_uri", text);
    out_text(out, "lifecycle_stage", run->archived ? "deleted" : "active");
    out_close(out, '}');
}

store_result mlflow_write_run(api_call *call, json_out *out, const char *key, const store_run *run)
{
    store_result result;

    out_open(out, key, '{');
    write_info(out, "info", run);
    out_open(out, "data", '{');
    out_open(out, "metrics", '[');
    result = store_series_list(call->it->parts.store, run->key, write_metric, out);
    out_close(out, ']');
    if (result == STORE_OK)
        result = write_pairs(call, out, "params", run);
    if (result == STORE_OK)
        result = write_pairs(call, out, "tags", run);
    out_close(out, '}');
    out_close(out, '}');
    return result;
}

static void send_run(api_call *call, const store_run *run)
{
    json_out out = api_json(call);
    store_result result;

    out_open(&out, NULL, '{');
    result = mlflow_write_run(call, &out, "run", run);
    out_close(&out, '}');
    if (result == STORE_OK)
        api_send(call, 200, &out);
    else
        api_refuse_store(call, result);
}

void mlflow_run(api_call *call)
{
    store_run run;

    if (mlflow_find_run(call, &run))
        send_run(call, &run);
}

/* ---- a run that is made ---------------------------------------------------------------------- */

typedef struct new_run {
    char id[2 * ID_BYTES + 1];
    char project[STORE_NAME_BYTES + 1];
    int64_t project_id; /* 0: whichever has the name */
    char name[STORE_NAME_BYTES + 1];
    int64_t start_ms;
} new_run;

/* The tag, where the field is not given. */
static const char *tagged_name(const json_t *tags)
{
    for (size_t i = 0; i < json_array_size(tags); i++) {
        const json_t *tag = json_array_get(tags, i);
        const char *key = json_string_value(json_object_get(tag, "key"));

        if (key != NULL && strcmp(key, MLFLOW_RUN_NAME) == 0)
            return json_string_value(json_object_get(tag, "value"));
    }
    return NULL;
}

static bool read_new_run(api_call *call, new_run *out)
{
    const json_t *number = json_object_get(call->body, "experiment_id");
    const char *experiment = NULL;
    const char *name = NULL;
    uint8_t bytes[ID_BYTES];
    char digits[24];

    randombytes_buf(bytes, sizeof bytes);
    (void)sodium_bin2hex(out->id, sizeof out->id, bytes, sizeof bytes);
    out->start_ms = call->now_ms;
    if (json_is_integer(number)) {
        (void)snprintf(digits, sizeof digits, "%lld", (long long)json_integer_value(number));
        experiment = digits;
    } else if (!mlflow_text(call, "experiment_id", 0, 24, &experiment)) {
        return false;
    }
    if (!mlflow_text(call, "run_name", 0, STORE_NAME_BYTES, &name) ||
        !mlflow_integer(call, call->body, "start_time", 0, API_EXACT, &out->start_ms))
        return false;
    if (name == NULL || *name == '\0')
        name = tagged_name(json_object_get(call->body, "tags"));
    if (name != NULL && *name != '\0' && !api_is_name(name, 1, STORE_NAME_BYTES))
        return mlflow_invalid(call, "run_name", name, "1 to 128 bytes without control characters");
    if (name != NULL && *name != '\0')
        (void)snprintf(out->name, sizeof out->name, "%s", name);
    else
        (void)snprintf(out->name, sizeof out->name, "run-%.8s", out->id);
    return mlflow_project(call, experiment == NULL ? "0" : experiment, out->project, &out->project_id);
}

void mlflow_create_run(api_call *call)
{
    json_t *tags = json_object_get(call->body, "tags");
    new_run from;
    store_new_run fresh;
    store_run_ref ref;
    store_run run;
    store_result result;
    bool made;

    if (!read_new_run(call, &from) || !mlflow_check_pairs(call, "tags", tags))
        return;
    fresh = (store_new_run){.project = from.project, .name = from.name, .created_ms = from.start_ms};
    ref = mlflow_ref(call, from.id);
    if (from.project_id != 0)
        ref.project = from.project_id; /* of several with a name, this one */
    result = store_run_add(call->it->parts.store, ref, &fresh, &run, &made);
    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    if (mlflow_keep_pairs(call, &run, NULL, tags))
        send_run(call, &run);
}

/* ---- a run that is changed ------------------------------------------------------------------- */

/* Answered where it fails. `run` is filled anew. */
static bool alter(api_call *call, const char *id, int64_t at_ms, store_run_change *change, store_run *run)
{
    store_run_ref ref = mlflow_ref(call, id);
    store_result result;

    ref.now_ms = at_ms;
    change->after = api_say_run;
    change->user = call;
    result = store_run_alter(call->it->parts.store, ref, change, run);
    if (result == STORE_OK && change->state == STORE_RUNNING)
        result = store_run_alive(call->it->parts.store, mlflow_ref(call, id));
    if (result != STORE_OK)
        api_refuse_store(call, result);
    return result == STORE_OK;
}

bool mlflow_rename(api_call *call, store_run *run, const char *name)
{
    store_run_change change = {.name = name, .archived = -1, .state = STORE_ANY};
    char id[STORE_ID_BYTES + 1];

    if (!api_is_name(name, 1, STORE_NAME_BYTES))
        return mlflow_invalid(call, "run_name", name, "1 to 128 bytes without control characters");
    memcpy(id, run->id, sizeof id);
    return strcmp(name, run->name) == 0 || alter(call, id, call->now_ms, &change, run);
}

static bool read_status(api_call *call, const char *text, store_state *state)
{
    static const struct {
        const char *name;
        store_state state;
    } names[] = {{"RUNNING", STORE_RUNNING},
                 {"SCHEDULED", STORE_RUNNING},
                 {"FINISHED", STORE_FINISHED},
                 {"FAILED", STORE_ENDED_BADLY},
                 {"KILLED", STORE_ENDED_BADLY}};
    const json_t *value = json_object_get(call->body, "status");

    *state = STORE_ANY;
    for (size_t i = 0; i < API_COUNT(names); i++) /* older clients send the number, from 1 on */
        if ((text != NULL && strcmp(names[i].name, text) == 0) ||
            (json_is_integer(value) && json_integer_value(value) == (json_int_t)i + 1))
            *state = names[i].state;
    return *state != STORE_ANY || (text == NULL && value == NULL) ||
           mlflow_invalid(call, "status", text, "RUNNING, SCHEDULED, FINISHED, FAILED, KILLED");
}

void mlflow_update_run(api_call *call)
{
    store_run_change change = {.archived = -1, .state = STORE_ANY};
    const json_t *status = json_object_get(call->body, "status");
    const char *text = json_string_value(status);
    const char *name = NULL;
    int64_t end_ms = call->now_ms;
    json_out out = api_json(call);
    char id[STORE_ID_BYTES + 1];
    store_run run;

    if (!mlflow_find_run(call, &run) || !read_status(call, text, &change.state) ||
        !mlflow_text(call, "run_name", 0, STORE_NAME_BYTES, &name) ||
        !mlflow_integer(call, call->body, "end_time", 0, API_EXACT, &end_ms))
        return;
    if (name != NULL && *name != '\0' && !mlflow_rename(call, &run, name))
        return;
    memcpy(id, run.id, sizeof id);
    if (change.state != STORE_ANY && !alter(call, id, end_ms, &change, &run))
        return;
    out_open(&out, NULL, '{');
    write_info(&out, "run_info", &run);
    out_close(&out, '}');
    api_send(call, 200, &out);
}

static void archive(api_call *call, bool archived)
{
    store_run_change change = {.archived = archived, .state = STORE_ANY};
    char id[STORE_ID_BYTES + 1];
    store_run run;

    if (!mlflow_find_run(call, &run))
        return;
    memcpy(id, run.id, sizeof id);
    if (alter(call, id, call->now_ms, &change, &run))
        mlflow_send_nothing(call);
}

void mlflow_delete_run(api_call *call)
{
    archive(call, true);
}

void mlflow_restore_run(api_call *call)
{
    archive(call, false);
}

/* ---- history --------------------------------------------------------------------------------- */

static void write_point(json_out *out, const char *key, const block_point *point)
{
    out_open(out, NULL, '{');
    out_text(out, "key", key);
    out_number(out, "value", point->value);
    out_integer(out, "timestamp", point->time_ms);
    out_integer(out, "step", point->step);
    out_close(out, '}');
}

/* Points from number `begin` on, by blocks, which are full up to the last. */
static store_result write_history(api_call *call, const store_series *series, int64_t begin, int64_t limit,
                                  json_out *out)
{
    block_point *points = http_memory_get(&call->request->memory, BLOCK_POINTS * sizeof *points);
    int64_t end = begin > series->summary.count - limit ? series->summary.count : begin + limit;
    store_result result = points == NULL ? STORE_NO_MEMORY : STORE_OK;

    for (int64_t at = begin; at < end && result == STORE_OK;) {
        int64_t block = at / BLOCK_POINTS;
        uint32_t count = 0;

        result = store_read_block(call->it->parts.store, series->key, block, points, &count);
        if (at - block * BLOCK_POINTS >= count)
            break;
        for (; at < end && at - block * BLOCK_POINTS < count; at++)
            write_point(out, series->name, &points[at - block * BLOCK_POINTS]);
    }
    return result == STORE_NOT_FOUND ? STORE_OK : result;
}

void mlflow_history(api_call *call)
{
    const char *key;
    int64_t begin;
    int64_t limit;
    json_out out = api_json(call);
    store_series series;
    store_result result;
    store_run run;

    if (!mlflow_find_run(call, &run) || !mlflow_text(call, "metric_key", 1, STORE_NAME_BYTES, &key) ||
        !mlflow_page(call, HISTORY, &begin, &limit))
        return;
    result = store_series_find(call->it->parts.store, run.key, key, &series);
    out_open(&out, NULL, '{');
    out_open(&out, "metrics", '[');
    if (result == STORE_OK)
        result = write_history(call, &series, begin, limit, &out);
    else if (result == STORE_NOT_FOUND) { /* none were logged */
        series.summary.count = 0;
        result = STORE_OK;
    }
    out_close(&out, ']');
    mlflow_write_next(&out, begin + limit, begin + limit < series.summary.count);
    out_close(&out, '}');
    if (result == STORE_OK)
        api_send(call, 200, &out);
    else
        api_refuse_store(call, result);
}
