/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What MLflow's clients log: metrics into series, params and tags into documents.
 *
 * Their requests have no numbers, and are sent again when an answer was lost. The sequence of a batch of
 * metrics is therefore a hash of its request, so that one that comes twice counts once; MLflow itself takes
 * equal points for one. Documents are read, changed and written with a lock held: two requests at once lose
 * nothing of each other.
 */
#include <sodium.h>
#include <string.h>

#include "api/mlflow/api_mlflow.h"

#define CLIENT "mlflow"
#define MOST_METRICS 1000u
#define MOST_PAIRS 100u
#define DOCUMENT_BYTES ((size_t)1 << 20)

/* ---- metrics --------------------------------------------------------------------------------- */

typedef struct metric_list {
    store_new_points *series;
    uint32_t count;
    block_point *points; /* room of all for each series is too much: they share it */
    uint32_t *of;        /* the series of each metric */
} metric_list;

static int64_t sequence_of_request(const http_request *request)
{
    uint64_t hash = 0;

    (void)crypto_generichash((uint8_t *)&hash, sizeof hash, request->body, request->body_bytes, NULL, 0);
    return (int64_t)(hash >> 1);
}

static uint32_t series_at(metric_list *list, const char *key)
{
    uint32_t i = list->count;

    while (i > 0) /* mostly the one before */
        if (strcmp(list->series[--i].series, key) == 0)
            return i;
    list->series[list->count] = (store_new_points){.series = key, .unit = ""};
    return list->count++;
}

static bool read_metric(api_call *call, const json_t *from, size_t index, metric_list *list,
                        block_point *point)
{
    const char *key = json_string_value(json_object_get(from, "key"));
    const json_t *value = json_object_get(from, "value");
    char where[64];

    (void)snprintf(where, sizeof where, "metrics[%zu].key", index);
    if (key == NULL || !api_is_name(key, 1, STORE_NAME_BYTES))
        return mlflow_invalid(call, where, key, "1 to 128 bytes without control characters");
    (void)snprintf(where, sizeof where, "metrics[%zu].value", index);
    if (value == NULL || !api_read_double(value, &point->value))
        return mlflow_invalid(call, where, json_string_value(value),
                              "a number, \"NaN\", \"Infinity\" or \"-Infinity\"");
    point->step = 0;
    point->time_ms = call->now_ms;
    if (!mlflow_integer(call, from, "timestamp", 0, API_EXACT, &point->time_ms) ||
        !mlflow_integer(call, from, "step", -API_EXACT, API_EXACT, &point->step))
        return false;
    list->of[index] = series_at(list, key);
    list->series[list->of[index]].count++;
    return true;
}

/* Points of a series beside each other, in their order. */
static void sort_points(metric_list *list, const block_point *from, size_t count)
{
    uint32_t begin = 0;

    for (uint32_t i = 0; i < list->count; i++) {
        list->series[i].points = &list->points[begin];
        begin += list->series[i].count;
        list->series[i].count = 0;
    }
    for (size_t i = 0; i < count; i++) {
        store_new_points *series = &list->series[list->of[i]];
        size_t at = (size_t)(series->points - list->points) + series->count++;

        list->points[at] = from[i];
    }
}

static bool read_metrics(api_call *call, const json_t *metrics, metric_list *list)
{
    size_t count = json_array_size(metrics);
    http_memory *memory = &call->request->memory;
    block_point *read = http_memory_get(memory, count * sizeof *read);

    list->points = http_memory_get(memory, count * sizeof *list->points);
    list->series = http_memory_get(memory, count * sizeof *list->series);
    list->of = http_memory_get(memory, count * sizeof *list->of);
    if (read == NULL || list->points == NULL || list->series == NULL || list->of == NULL) {
        api_refuse_store(call, STORE_NO_MEMORY);
        return false;
    }
    for (size_t i = 0; i < count; i++)
        if (!read_metric(call, json_array_get(metrics, i), i, list, &read[i]))
            return false;
    sort_points(list, read, count);
    return true;
}

static bool keep_metrics(api_call *call, const store_run *run, const metric_list *list)
{
    store_batch batch = {.client = CLIENT,
                         .sequence = sequence_of_request(call->request),
                         .series = list->series,
                         .series_count = list->count};
    store_ingested done;
    store_result result =
        list->count == 0 ? STORE_OK : api_keep_batch(call, mlflow_ref(call, run->id), &batch, &done);

    if (result != STORE_OK)
        api_refuse_store(call, result);
    return result == STORE_OK;
}

/* ---- params and tags ------------------------------------------------------------------------- */

bool mlflow_check_pairs(api_call *call, const char *name, const json_t *pairs)
{
    size_t count = json_array_size(pairs);
    char where[64];

    if (pairs != NULL && !json_is_array(pairs) && !json_is_null(pairs))
        return mlflow_invalid(call, name, NULL, "a list of {key, value}");
    if (count > MOST_PAIRS)
        return mlflow_invalid(call, name, NULL, "at most 100");
    for (size_t i = 0; i < count; i++) {
        const json_t *pair = json_array_get(pairs, i);
        const char *key = json_string_value(json_object_get(pair, "key"));
        const char *value = json_string_value(json_object_get(pair, "value"));

        (void)snprintf(where, sizeof where, "%s[%zu].key", name, i);
        if (key == NULL || !api_is_name(key, 1, MLFLOW_KEY_BYTES))
            return mlflow_invalid(call, where, key, "1 to 250 bytes without control characters");
        (void)snprintf(where, sizeof where, "%s[%zu].value", name, i);
        if (json_object_get(pair, "value") != NULL && value == NULL)
            return mlflow_invalid(call, where, NULL, "a text");
        if (value != NULL && strlen(value) > MLFLOW_TEXT_BYTES)
            return mlflow_invalid(call, where, NULL, "at most 8000 bytes");
    }
    return true;
}

/* Puts pairs into a document. False: answered. */
static bool put_pairs(api_call *call, json_t *document, const json_t *pairs, bool may_change)
{
    for (size_t i = 0; i < json_array_size(pairs); i++) {
        const json_t *pair = json_array_get(pairs, i);
        const char *key = json_string_value(json_object_get(pair, "key"));
        json_t *value = json_object_get(pair, "value");
        json_t *fresh = value == NULL ? json_string("") : json_incref(value);
        const json_t *before = json_object_get(document, key);

        if (!may_change && before != NULL && fresh != NULL && !json_equal(before, fresh)) {
            json_decref(fresh);
            return mlflow_invalid(call, key, json_string_value(value),
                                  "the value that the param has: params do not change");
        }
        if (fresh == NULL || json_object_set_new(document, key, fresh) != 0) {
            api_refuse_store(call, STORE_NO_MEMORY);
            return false;
        }
    }
    return true;
}

/* A document as text in the request's memory. */
static bool write_document(api_call *call, const char *name, const json_t *object, store_document *out)
{
    size_t bytes = json_dumpb(object, NULL, 0, JSON_COMPACT);
    char *text = bytes == 0 ? NULL : http_memory_get(&call->request->memory, bytes + 1);

    if (text == NULL || json_dumpb(object, text, bytes, JSON_COMPACT) != bytes) {
        api_refuse_store(call, STORE_NO_MEMORY);
        return false;
    }
    *out = (store_document){name, text, bytes};
    return bytes <= DOCUMENT_BYTES || mlflow_invalid(call, name, NULL, "1 MiB of a run's in all");
}

static bool keep_documents(api_call *call, const store_run *run, const store_document *documents,
                           uint32_t count)
{
    store_batch batch = {.client = CLIENT, .documents = documents, .document_count = count};
    store_ingested done;
    store_result result;

    randombytes_buf(&batch.sequence, sizeof batch.sequence);
    batch.sequence &= INT64_MAX; /* what is said again counts again */
    result = api_keep_batch(call, mlflow_ref(call, run->id), &batch, &done);
    if (result != STORE_OK)
        api_refuse_store(call, result);
    return result == STORE_OK;
}

typedef struct pair_document {
    const char *name;
    const json_t *pairs;
    const char *removed; /* a key, or NULL */
    bool may_change;
} pair_document;

/* Reads a document, changes it, and has it as text. False: answered. */
static bool change_document(api_call *call, const store_run *run, const pair_document *change,
                            store_document *out)
{
    store_result result;
    json_t *object = mlflow_load(call, run->key, change->name, &result);
    bool good = object != NULL;

    if (!good)
        api_refuse_store(call, result);
    if (good && change->removed != NULL && json_object_del(object, change->removed) != 0) {
        good = false;
        api_refuse(call, &(const api_fault){.status = 404,
                                            .code = "not_found",
                                            .message = "the run has no such tag",
                                            .field = "key",
                                            .value = change->removed});
    }
    good = good && put_pairs(call, object, change->pairs, change->may_change) &&
           write_document(call, change->name, object, out);
    json_decref(object);
    return good;
}

static bool change_documents(api_call *call, const store_run *run, const pair_document *changes,
                             uint32_t count)
{
    store_document documents[2];
    uint32_t used = 0;
    bool good = true;

    for (uint32_t i = 0; i < count && good; i++)
        if (json_array_size(changes[i].pairs) > 0 || changes[i].removed != NULL)
            good = change_document(call, run, &changes[i], &documents[used++]);
    return good && (used == 0 || keep_documents(call, run, documents, used));
}

/* The tag that names the run does so here, too. */
static bool rename_by_tag(api_call *call, store_run *run, const json_t *tags)
{
    for (size_t i = 0; i < json_array_size(tags); i++) {
        const json_t *tag = json_array_get(tags, i);
        const char *value = json_string_value(json_object_get(tag, "value"));

        if (strcmp(json_string_value(json_object_get(tag, "key")), MLFLOW_RUN_NAME) == 0 && value != NULL &&
            !mlflow_rename(call, run, value))
            return false;
    }
    return true;
}

bool mlflow_keep_pairs(api_call *call, store_run *run, const json_t *params, const json_t *tags)
{
    const pair_document changes[] = {{"params", params, NULL, false}, {"tags", tags, NULL, true}};
    bool good;

    if (json_array_size(params) == 0 && json_array_size(tags) == 0)
        return true;
    msc__mutex_lock(&call->it->documents);
    good = change_documents(call, run, changes, 2);
    msc__mutex_unlock(&call->it->documents);
    return good && rename_by_tag(call, run, tags);
}

/* ---- requests -------------------------------------------------------------------------------- */

static void log_all(api_call *call, const json_t *metrics, const json_t *params, const json_t *tags)
{
    metric_list list = {.count = 0};
    store_run run;

    if (mlflow_find_run(call, &run) && mlflow_check_pairs(call, "params", params) &&
        mlflow_check_pairs(call, "tags", tags) && read_metrics(call, metrics, &list) &&
        mlflow_keep_pairs(call, &run, params, tags) && keep_metrics(call, &run, &list))
        mlflow_send_nothing(call);
}

void mlflow_log_batch(api_call *call)
{
    const json_t *metrics = json_object_get(call->body, "metrics");

    if (metrics != NULL && !json_is_array(metrics) && !json_is_null(metrics))
        (void)mlflow_invalid(call, "metrics", NULL, "a list of {key, value, timestamp, step}");
    else if (json_array_size(metrics) > MOST_METRICS)
        (void)mlflow_invalid(call, "metrics", NULL, "at most 1000");
    else
        log_all(call, metrics, json_object_get(call->body, "params"), json_object_get(call->body, "tags"));
}

typedef enum single { ONE_METRIC, ONE_PARAM, ONE_TAG } single;

/* A request whose body is the one thing itself. */
static void log_one(api_call *call, single which)
{
    json_t *list = json_array();

    if (list == NULL || json_array_append(list, call->body) != 0)
        api_refuse_store(call, STORE_NO_MEMORY);
    else
        log_all(call, which == ONE_METRIC ? list : NULL, which == ONE_PARAM ? list : NULL,
                which == ONE_TAG ? list : NULL);
    json_decref(list);
}

void mlflow_log_metric(api_call *call)
{
    log_one(call, ONE_METRIC);
}

void mlflow_log_parameter(api_call *call)
{
    log_one(call, ONE_PARAM);
}

void mlflow_set_tag(api_call *call)
{
    log_one(call, ONE_TAG);
}

void mlflow_delete_tag(api_call *call)
{
    pair_document change = {"tags", NULL, NULL, true};
    store_run run;
    bool good;

    if (!mlflow_find_run(call, &run) || !mlflow_text(call, "key", 1, MLFLOW_KEY_BYTES, &change.removed))
        return;
    msc__mutex_lock(&call->it->documents);
    good = change_documents(call, &run, &change, 1);
    msc__mutex_unlock(&call->it->documents);
    if (good)
        mlflow_send_nothing(call);
}
