/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A batch: columns of JSON into points, events and documents that the store takes, and the message that those
 * who watch the run will read.
 *
 * All is checked before the store hears of it. The message is made here as well, by the thread of this
 * request, so that the writer only has to pass it on.
 */
#include <math.h>
#include <string.h>

#include "api/api_internal.h"

#define MOST_ITEMS 1024u
#define MOST_TEXT 4096u
#define WHERE 48

typedef struct batch_input {
    store_batch batch;
    store_new_points *series;
    store_event *events;
    store_document *documents;
} batch_input;

static void *take(api_call *call, size_t count, size_t bytes)
{
    void *memory = http_memory_get(&call->request->memory, count * bytes);

    if (memory == NULL)
        api_refuse_store(call, STORE_NO_MEMORY);
    return memory;
}

bool api_read_double(const json_t *value, double *out)
{
    const char *name = json_string_value(value);

    if (json_is_number(value))
        *out = json_number_value(value);
    else if (name != NULL && strcmp(name, "NaN") == 0)
        *out = (double)NAN;
    else if (name != NULL && strcmp(name, "Infinity") == 0)
        *out = (double)INFINITY;
    else if (name != NULL && strcmp(name, "-Infinity") == 0)
        *out = -(double)INFINITY;
    else
        return false;
    return true;
}

static bool read_exact(const json_t *value, int64_t *out)
{
    if (!json_is_integer(value))
        return false;
    *out = json_integer_value(value);
    return *out >= -API_EXACT && *out <= API_EXACT;
}

static bool bad_item(api_call *call, const char *where, const char *column, size_t index, const char *allowed)
{
    char field[2 * WHERE];

    (void)snprintf(field, sizeof field, "%s.%s[%zu]", where, column, index);
    return api_invalid(call, field, NULL, allowed);
}

/* Three columns into points. */
static bool read_columns(api_call *call, const char *where, json_t *const *given, block_point *points)
{
    size_t count = json_array_size(given[2]);
    size_t i;

    for (i = 0; i < count; i++) {
        points[i].time_ms = call->now_ms;
        if (!read_exact(json_array_get(given[2], i), &points[i].step))
            return bad_item(call, where, "steps", i, "an integer up to 2^53");
        if (given[3] != NULL && !read_exact(json_array_get(given[3], i), &points[i].time_ms))
            return bad_item(call, where, "times_ms", i, "milliseconds since 1970");
        if (!api_read_double(json_array_get(given[4], i), &points[i].value))
            return bad_item(call, where, "values", i, "a number, \"NaN\", \"Infinity\", \"-Infinity\"");
    }
    return true;
}

static bool read_series(api_call *call, json_t *from, size_t index, store_new_points *out)
{
    static const api_field fields[] = {{"series", JSON_STRING, true},
                                       {"unit", JSON_STRING, false},
                                       {"steps", JSON_ARRAY, true},
                                       {"times_ms", JSON_ARRAY, false},
                                       {"values", JSON_ARRAY, true}};
    json_t *given[API_COUNT(fields)];
    char where[WHERE];
    block_point *points;
    size_t count;

    (void)snprintf(where, sizeof where, "points[%zu]", index);
    if (!api_fields(call, from, where, fields, API_COUNT(fields), given) ||
        !api_check_name(call, "series", given[0], 1, STORE_NAME_BYTES) ||
        (given[1] != NULL && !api_check_name(call, "unit", given[1], 0, STORE_UNIT_BYTES)))
        return false;
    count = json_array_size(given[2]);
    if (json_array_size(given[4]) != count || (given[3] != NULL && json_array_size(given[3]) != count))
        return api_invalid(call, where, NULL, "steps, times_ms and values of the same length");
    points = take(call, count, sizeof *points);
    if (points == NULL || !read_columns(call, where, given, points))
        return false;
    *out = (store_new_points){json_string_value(given[0]),
                              given[1] == NULL ? "" : json_string_value(given[1]), points, (uint32_t)count};
    return true;
}

/* JSON as text once more; NULL: no memory, which jansson says by writing nothing. */
static const char *dump(api_call *call, const json_t *value, size_t *bytes)
{
    const size_t flags = JSON_COMPACT | JSON_ENCODE_ANY;
    char *text;

    *bytes = json_dumpb(value, NULL, 0, flags);
    if (*bytes > 0 && (text = http_memory_get(&call->request->memory, *bytes + 1)) != NULL &&
        json_dumpb(value, text, *bytes, flags) == *bytes)
        return text;
    api_refuse_store(call, STORE_NO_MEMORY);
    return NULL;
}

static bool read_event(api_call *call, json_t *from, size_t index, store_event *out)
{
    static const api_field fields[] = {{"kind", JSON_STRING, true},
                                       {"step", JSON_INTEGER, false},
                                       {"time_ms", JSON_INTEGER, false},
                                       {"text", JSON_STRING, false},
                                       {"data", JSON_OBJECT, false}};
    json_t *given[API_COUNT(fields)];
    char where[WHERE];

    (void)snprintf(where, sizeof where, "events[%zu]", index);
    if (!api_fields(call, from, where, fields, API_COUNT(fields), given))
        return false;
    *out = (store_event){.kind = json_string_value(given[0]),
                         .step = STORE_NO_TIME,
                         .time_ms = call->now_ms,
                         .text = given[3] == NULL ? "" : json_string_value(given[3])};
    if (!api_is_kind(out->kind))
        return api_invalid(call, "kind", out->kind, "1 to 32 of a-z, 0-9 and underscore; a letter first");
    if ((given[1] != NULL && !read_exact(given[1], &out->step)) ||
        (given[2] != NULL && !read_exact(given[2], &out->time_ms)))
        return api_invalid(call, where, NULL, "step and time_ms up to 2^53");
    if (strlen(out->text) > MOST_TEXT)
        return api_invalid(call, "text", out->text, "at most 4096 bytes");
    if (given[4] != NULL) {
        size_t bytes;

        out->data = dump(call, given[4], &bytes);
        return out->data != NULL;
    }
    return true;
}

static bool read_document(api_call *call, const char *name, const json_t *value, store_document *out)
{
    if (!api_is_kind(name))
        return api_invalid(call, "documents", name,
                           "names of 1 to 32 of a-z, 0-9 and underscore; a letter first");
    *out = (store_document){.name = name};
    out->text = dump(call, value, &out->bytes);
    return out->text != NULL;
}

static bool check_size(api_call *call, const char *field, size_t count, size_t most)
{
    char allowed[32];

    if (count <= most)
        return true;
    (void)snprintf(allowed, sizeof allowed, "at most %zu", most);
    return api_invalid(call, field, NULL, allowed);
}

static bool read_points(api_call *call, const json_t *list, batch_input *into)
{
    size_t count = json_array_size(list);

    if (!check_size(call, "points", count, MOST_ITEMS) ||
        (into->series = take(call, count, sizeof *into->series)) == NULL)
        return false;
    for (size_t i = 0; i < count; i++)
        if (!read_series(call, json_array_get(list, i), i, &into->series[i]))
            return false;
    into->batch.series = into->series;
    into->batch.series_count = (uint32_t)count;
    return true;
}

static bool read_rest(api_call *call, const json_t *events, json_t *documents, batch_input *into)
{
    size_t event_count = json_array_size(events);
    size_t document_count = json_object_size(documents);
    const char *name;
    json_t *value;

    if (!check_size(call, "events", event_count, MOST_ITEMS) ||
        !check_size(call, "documents", document_count, STORE_DOCUMENTS) ||
        (into->events = take(call, event_count, sizeof *into->events)) == NULL ||
        (into->documents = take(call, document_count, sizeof *into->documents)) == NULL)
        return false;
    for (size_t i = 0; i < event_count; i++)
        if (!read_event(call, json_array_get(events, i), i, &into->events[i]))
            return false;
    json_object_foreach(documents, name, value)
    {
        if (!read_document(call, name, value, &into->documents[into->batch.document_count++]))
            return false;
    }
    into->batch.events = into->events;
    into->batch.event_count = (uint32_t)event_count;
    into->batch.documents = into->documents;
    return true;
}

/* ---- the message ----------------------------------------------------------------------------- */

static void write_change(json_out *out, const store_new_points *series)
{
    block_summary summary = block_summary_empty();
    uint32_t i;

    for (i = 0; i < series->count; i++)
        block_summary_add(&summary, &series->points[i]);
    out_open(out, NULL, '{');
    out_text(out, "name", series->series);
    out_text(out, "unit", series->unit);
    out_integer(out, "from", summary.first_step);
    out_integer(out, "to", summary.last_step);
    out_integer(out, "count", summary.count);
    out_integer(out, "nans", summary.nans);
    out_number(out, "min", summary.min);
    out_number(out, "max", summary.max);
    out_number(out, "mean", block_summary_mean(&summary));
    out_number(out, "last", summary.last);
    out_close(out, '}');
}

static void write_message(const store_batch *batch, bool whole, json_out *out)
{
    out->bytes = 0;
    out_open(out, NULL, '{');
    out_open(out, "series", '[');
    for (uint32_t i = 0; i < batch->series_count && whole && out->bytes <= LIVE_MESSAGE_BYTES; i++)
        if (batch->series[i].count > 0)
            write_change(out, &batch->series[i]);
    out_close(out, ']');
    out_integer(out, "events", batch->event_count);
    out_open(out, "documents", '[');
    for (uint32_t i = 0; i < batch->document_count; i++)
        out_text(out, NULL, batch->documents[i].name);
    out_close(out, ']');
    if (!whole)
        out_boolean(out, "more", true);
    out_close(out, '}');
}

typedef struct batch_news {
    live *to;
    const char *text;
} batch_news;

static void say_batch(void *user, const store_run *run)
{
    const batch_news *news = user;

    live_say(news->to, run->id, run->version, "batch", news->text);
}

store_result api_keep_batch(api_call *call, store_run_ref ref, const store_batch *batch, store_ingested *done)
{
    json_out message = api_json(call);
    batch_news news = {.to = call->it->parts.live};
    store_batch told = *batch;

    write_message(batch, true, &message);
    if (message.bytes > LIVE_MESSAGE_BYTES)
        write_message(batch, false, &message);
    if (message.failed)
        return STORE_NO_MEMORY;
    news.text = message.text;
    told.after = say_batch;
    told.user = &news;
    return store_ingest(call->it->parts.store, ref, &told, done);
}

/* Stores what was read, and answers. */
static void keep(api_call *call, const batch_input *input)
{
    store_ingested done = {false, 0};
    json_out out = api_json(call);
    store_result result = api_keep_batch(call, api_ref(call), &input->batch, &done);

    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    out_open(&out, NULL, '{');
    out_boolean(&out, "duplicate", done.duplicate);
    out_integer(&out, "version", done.version);
    out_close(&out, '}');
    api_send(call, 200, &out);
}

void api_ingest(api_call *call)
{
    static const api_field fields[] = {{"client", JSON_STRING, true},
                                       {"sequence", JSON_INTEGER, true},
                                       {"points", JSON_ARRAY, false},
                                       {"events", JSON_ARRAY, false},
                                       {"documents", JSON_OBJECT, false}};
    json_t *given[API_COUNT(fields)];
    batch_input input = {0};

    if (!api_fields(call, call->body, "", fields, API_COUNT(fields), given))
        return;
    input.batch.client = json_string_value(given[0]);
    if (!api_is_word(input.batch.client, 1, STORE_ID_BYTES, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_-")) {
        (void)api_invalid(call, "client", input.batch.client,
                          "1 to 64 of A-Z, a-z, 0-9, underscore and hyphen");
        return;
    }
    input.batch.sequence = json_integer_value(given[1]);
    if (input.batch.sequence < 0) {
        (void)api_invalid(call, "sequence", NULL, "an integer from 0");
        return;
    }
    if (read_points(call, given[2], &input) && read_rest(call, given[3], given[4], &input))
        keep(call, &input);
}
