/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading what a run sent: series, buckets, events, documents.
 */
#include <string.h>

#include "api/api_internal.h"

#define MOST_SERIES 32u
#define MOST_BUCKETS 4000
#define BUCKETS 400
#define EVENTS 100
#define MOST_EVENTS 500

static bool write_series(void *user, const store_series *series)
{
    json_out *out = user;
    const block_summary *summary = &series->summary;

    out_open(out, NULL, '{');
    out_text(out, "name", series->name);
    out_text(out, "unit", series->unit);
    out_integer(out, "count", summary->count);
    out_integer(out, "first_step", summary->first_step);
    out_integer(out, "last_step", summary->last_step);
    out_integer(out, "last_time_ms", summary->last_time_ms);
    out_number(out, "min", summary->min);
    out_number(out, "max", summary->max);
    out_number(out, "last", summary->last);
    out_close(out, '}');
    return !out->failed;
}

void api_series(api_call *call)
{
    json_out out = api_json(call);
    store_result result;
    store_run run;

    if (!api_find_run(call, &run))
        return;
    out_open(&out, NULL, '{');
    out_open(&out, "series", '[');
    result = store_series_list(call->it->parts.store, run.key, write_series, &out);
    api_send_list(call, result, &out);
}

/* ---- buckets --------------------------------------------------------------------------------- */

/* The series that are named, and the range of steps that is asked for or that they have. */
typedef struct points_query {
    store_series series[MOST_SERIES];
    uint32_t count;
    bool has_range;
    store_buckets buckets;
} points_query;

static bool find_series(api_call *call, int64_t run, points_query *query)
{
    const http_target *target = &call->request->target;

    for (uint32_t i = 0; i < target->parameter_count; i++) {
        const char *name = target->parameters[i].value;
        store_result result;

        if (strcmp(target->parameters[i].name, "series") != 0)
            continue;
        if (query->count == MOST_SERIES)
            return api_invalid(call, "series", name, "at most 32 names");
        result = strlen(name) > STORE_NAME_BYTES
                     ? STORE_NOT_FOUND
                     : store_series_find(call->it->parts.store, run, name, &query->series[query->count]);
        if (result != STORE_OK) {
            api_refuse_store(call, result);
            return false;
        }
        query->count++;
    }
    return query->count > 0 || api_invalid(call, "series", NULL, "1 to 32 names");
}

static bool read_range(api_call *call, points_query *query)
{
    store_buckets *buckets = &query->buckets;
    int64_t wanted = BUCKETS;
    uint64_t span;

    buckets->from = INT64_MAX;
    buckets->to = INT64_MIN;
    for (uint32_t i = 0; i < query->count; i++) {
        const block_summary *summary = &query->series[i].summary;

        buckets->from = summary->first_step < buckets->from ? summary->first_step : buckets->from;
        buckets->to = summary->last_step > buckets->to ? summary->last_step : buckets->to;
    }
    if (!api_parameter(call, "buckets", 1, MOST_BUCKETS, &wanted) ||
        !api_parameter(call, "from", -API_EXACT, API_EXACT, &buckets->from) ||
        !api_parameter(call, "to", -API_EXACT, API_EXACT, &buckets->to))
        return false;
    query->has_range = buckets->from <= buckets->to;
    if (!query->has_range)
        return true;
    span = (uint64_t)(buckets->to - buckets->from) + 1;
    buckets->width = (span + (uint64_t)wanted - 1) / (uint64_t)wanted;
    buckets->count = (uint32_t)((span + buckets->width - 1) / buckets->width);
    buckets->at = http_memory_get(&call->request->memory, buckets->count * sizeof *buckets->at);
    if (buckets->at == NULL)
        api_refuse_store(call, STORE_NO_MEMORY);
    return buckets->at != NULL;
}

/* One column of the buckets that have points. */
typedef enum column {
    COLUMN_INDEX,
    COLUMN_FROM,
    COLUMN_TO,
    COLUMN_COUNT,
    COLUMN_NANS,
    COLUMN_MIN,
    COLUMN_MAX,
    COLUMN_MEAN,
    COLUMN_LAST
} column;
static const char *const column_names[] = {"index", "from", "to",   "count", "nans",
                                           "min",   "max",  "mean", "last"};

static void write_cell(json_out *out, column which, uint32_t index, const block_summary *of)
{
    switch (which) {
    case COLUMN_INDEX:
        out_integer(out, NULL, index);
        return;
    case COLUMN_FROM:
        out_integer(out, NULL, of->first_step);
        return;
    case COLUMN_TO:
        out_integer(out, NULL, of->last_step);
        return;
    case COLUMN_COUNT:
        out_integer(out, NULL, of->count);
        return;
    case COLUMN_NANS:
        out_integer(out, NULL, of->nans);
        return;
    case COLUMN_MIN:
        out_number(out, NULL, of->min);
        return;
    case COLUMN_MAX:
        out_number(out, NULL, of->max);
        return;
    case COLUMN_MEAN:
        out_number(out, NULL, block_summary_mean(of));
        return;
    default:
        out_number(out, NULL, of->last);
    }
}

static void write_buckets(json_out *out, const store_series *series, const store_buckets *buckets)
{
    out_open(out, NULL, '{');
    out_text(out, "name", series->name);
    out_text(out, "unit", series->unit);
    for (size_t i = 0; i < API_COUNT(column_names); i++) {
        out_open(out, column_names[i], '[');
        for (uint32_t k = 0; k < buckets->count; k++)
            if (buckets->at[k].count > 0)
                write_cell(out, (column)i, k, &buckets->at[k]);
        out_close(out, ']');
    }
    out_close(out, '}');
}

static void write_range(json_out *out, const points_query *query)
{
    out_open(out, NULL, '{');
    if (query->has_range) {
        out_integer(out, "from", query->buckets.from);
        out_integer(out, "to", query->buckets.to);
    } else {
        out_null(out, "from");
        out_null(out, "to");
    }
    out_integer(out, "buckets", query->buckets.count);
    out_integer(out, "width", (int64_t)query->buckets.width);
}

static store_result write_points(api_call *call, const points_query *query, json_out *out)
{
    const store_buckets *buckets = &query->buckets;
    store_result result = STORE_OK;

    write_range(out, query);
    out_open(out, "series", '[');
    for (uint32_t i = 0; i < query->count && result == STORE_OK; i++) {
        for (uint32_t k = 0; k < buckets->count; k++)
            buckets->at[k] = block_summary_empty();
        if (query->has_range)
            result = store_read_buckets(call->it->parts.store, query->series[i].key, buckets);
        write_buckets(out, &query->series[i], buckets);
    }
    out_close(out, ']');
    out_close(out, '}');
    return result;
}

void api_points(api_call *call)
{
    points_query *query = http_memory_get(&call->request->memory, sizeof *query);
    json_out out = api_json(call);
    store_result result;
    store_run run;

    if (query == NULL) {
        api_refuse_store(call, STORE_NO_MEMORY);
        return;
    }
    if (!api_find_run(call, &run) || !find_series(call, run.key, query) || !read_range(call, query))
        return;
    result = write_points(call, query, &out);
    if (result == STORE_OK)
        api_send(call, 200, &out);
    else
        api_refuse_store(call, result);
}

/* ---- events and documents -------------------------------------------------------------------- */

typedef struct events_page {
    json_out out;
    uint32_t limit;
    uint32_t count;
    int64_t last;
} events_page;

static bool write_event(void *user, const store_event *event)
{
    events_page *page = user;
    json_out *out = &page->out;

    page->count++;
    if (page->count > page->limit)
        return true;
    page->last = event->id;
    out_open(out, NULL, '{');
    out_integer(out, "id", event->id);
    out_text(out, "kind", event->kind);
    if (event->step == STORE_NO_TIME)
        out_null(out, "step");
    else
        out_integer(out, "step", event->step);
    out_integer(out, "time_ms", event->time_ms);
    out_text(out, "text", event->text);
    out_begin(out, "data");
    out_raw(out, event->data == NULL ? "null" : event->data);
    out_close(out, '}');
    return !out->failed;
}

void api_events(api_call *call)
{
    const char *kind = http_target_find(&call->request->target, "kind");
    events_page page = {.out = api_json(call)};
    int64_t limit = EVENTS;
    int64_t after = 0;
    store_result result;
    store_run run;

    if (!api_parameter(call, "limit", 1, MOST_EVENTS, &limit) ||
        !api_parameter(call, "after", 0, INT64_MAX, &after) || !api_find_run(call, &run))
        return;
    page.limit = (uint32_t)limit;
    out_open(&page.out, NULL, '{');
    out_open(&page.out, "events", '[');
    result = store_events(call->it->parts.store, run.key, kind, after, page.limit + 1, write_event, &page);
    out_close(&page.out, ']');
    if (page.count > page.limit)
        out_integer(&page.out, "next", page.last);
    else
        out_null(&page.out, "next");
    out_close(&page.out, '}');
    if (result == STORE_OK)
        api_send(call, 200, &page.out);
    else
        api_refuse_store(call, result);
}

static bool write_text(void *user, const store_document *document, int64_t updated_ms)
{
    json_out *out = user;

    (void)updated_ms;
    out_raw_bytes(out, document->text, document->bytes);
    return !out->failed;
}

void api_document(api_call *call)
{
    json_out out = api_json(call);
    store_result result;
    store_run run;

    if (!api_find_run(call, &run))
        return;
    result = store_documents(call->it->parts.store, run.key, call->path_values[1], write_text, &out);
    if (result == STORE_OK && out.bytes == 0 && !out.failed)
        result = STORE_NOT_FOUND;
    if (result == STORE_OK)
        api_send(call, 200, &out);
    else
        api_refuse_store(call, result);
}
