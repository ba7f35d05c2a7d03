/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run as one file, in as much memory as one block takes, however many points there are.
 *
 *      csv     series,unit,step,time_ms,value
 *      json    {"run": …, "documents": {…}, "events": […],
 *               "series": [{"name": …, "unit": …, "points": [[step, time_ms, value], …]}]}
 *
 * The source writes a part into its buffer when that is empty: the start, a page of events, a block. The list
 * of series is made at the beginning; what is added meanwhile to the last block of one may be in the file or
 * not.
 */
#include <string.h>

#include "api/api_internal.h"

#define EVENTS_AT_ONCE 100u

typedef enum export_part { PART_START, PART_EVENTS, PART_SERIES, PART_END, PART_OVER } export_part;

typedef struct export_source {
    http_source source;
    store *store;
    store_run run;
    bool is_csv;
    export_part part;
    store_series *series;
    uint32_t series_count;
    uint32_t series_room;
    uint32_t at; /* series that is written */
    int64_t block;
    int64_t last_event;
    uint32_t event_count; /* of the page */
    json_out out;
    size_t given;
    block_point points[BLOCK_POINTS];
    char file_name[STORE_ID_BYTES + 8];
} export_source;

/* ---- parts ----------------------------------------------------------------------------------- */

static bool write_document(void *user, const store_document *document, int64_t updated_ms)
{
    export_source *it = user;

    (void)updated_ms;
    out_begin(&it->out, document->name);
    out_raw_bytes(&it->out, document->text, document->bytes);
    return !it->out.failed;
}

typedef struct name_list {
    char names[STORE_DOCUMENTS][STORE_KIND_BYTES + 1];
    uint32_t count;
} name_list;

static bool note_name(void *user, const store_document *document, int64_t updated_ms)
{
    name_list *list = user;

    (void)updated_ms;
    if (list->count < STORE_DOCUMENTS)
        (void)snprintf(list->names[list->count++], sizeof list->names[0], "%s", document->name);
    return true;
}

static store_result write_documents(export_source *it)
{
    name_list list = {.count = 0};
    store_result result = store_documents(it->store, it->run.key, NULL, note_name, &list);

    out_open(&it->out, "documents", '{');
    for (uint32_t i = 0; i < list.count && result == STORE_OK; i++)
        result = store_documents(it->store, it->run.key, list.names[i], write_document, it);
    out_close(&it->out, '}');
    return result;
}

static store_result write_start(export_source *it)
{
    store_result result = STORE_OK;

    if (it->is_csv) {
        out_raw(&it->out, "series,unit,step,time_ms,value\r\n");
        it->part = PART_SERIES;
        return result;
    }
    out_raw(&it->out, "{\"run\": ");
    api_write_run(&it->out, &it->run, true);
    result = write_documents(it);
    out_open(&it->out, "events", '[');
    it->part = PART_EVENTS;
    return result;
}

static bool write_event(void *user, const store_event *event)
{
    export_source *it = user;
    json_out *out = &it->out;

    if (it->last_event > 0 && it->event_count == 0)
        out_raw(out, ", "); /* the page before ended in another buffer */
    it->event_count++;
    it->last_event = event->id;
    out_open(out, NULL, '{');
    out_text(out, "kind", event->kind);
    if (event->step != STORE_NO_TIME)
        out_integer(out, "step", event->step);
    out_integer(out, "time_ms", event->time_ms);
    out_text(out, "text", event->text);
    if (event->data != NULL) {
        out_begin(out, "data");
        out_raw(out, event->data);
    }
    out_close(out, '}');
    return !out->failed;
}

static store_result write_events(export_source *it)
{
    store_result result;

    it->event_count = 0;
    result = store_events(it->store, it->run.key, NULL, it->last_event, EVENTS_AT_ONCE, write_event, it);
    if (it->event_count < EVENTS_AT_ONCE) {
        out_raw(&it->out, "], \"series\": [");
        it->part = PART_SERIES;
    }
    return result;
}

static void write_point(export_source *it, const store_series *series, const block_point *point)
{
    json_out *out = &it->out;

    if (!it->is_csv) {
        out_open(out, NULL, '[');
        out_integer(out, NULL, point->step);
        out_integer(out, NULL, point->time_ms);
        out_number(out, NULL, point->value);
        out_close(out, ']');
        return;
    }
    out_csv_text(out, series->name);
    out_raw(out, ",");
    out_csv_text(out, series->unit);
    out_csv_integer(out, point->step);
    out_csv_integer(out, point->time_ms);
    out_csv_number(out, point->value);
    out_raw(out, "\r\n");
}

/* The block that is due; the end of a series where there is none. */
static store_result write_block(export_source *it)
{
    const store_series *series = &it->series[it->at];
    uint32_t count = 0;
    store_result result = store_read_block(it->store, series->key, it->block, it->points, &count);

    if (it->block == 0 && !it->is_csv) {
        out_raw(&it->out, it->at == 0 ? "{" : ", {");
        out_text(&it->out, "name", series->name);
        out_text(&it->out, "unit", series->unit);
        out_open(&it->out, "points", '[');
    } else if (count > 0 && !it->is_csv) {
        out_raw(&it->out, ", ");
    }
    for (uint32_t i = 0; i < count; i++)
        write_point(it, series, &it->points[i]);
    it->block++;
    if (result == STORE_NOT_FOUND) {
        out_raw(&it->out, it->is_csv ? "" : "]}");
        it->at++;
        it->block = 0;
        return STORE_OK;
    }
    return result;
}

static store_result write_part(export_source *it)
{
    switch (it->part) {
    case PART_START:
        return write_start(it);
    case PART_EVENTS:
        return write_events(it);
    case PART_SERIES:
        if (it->at < it->series_count)
            return write_block(it);
        it->part = PART_END;
        return STORE_OK;
    default:
        out_raw(&it->out, it->is_csv ? "" : "]}\n");
        it->part = PART_OVER;
        return STORE_OK;
    }
}

/* ---- the source ------------------------------------------------------------------------------ */

/* A failure in the middle ends the connection without the last chunk, so that nobody takes half a file for
   a whole one. */
static int64_t pull(void *self, char *into, size_t room)
{
    export_source *it = self;
    size_t bytes;

    while (it->given == it->out.bytes) {
        it->given = it->out.bytes = 0;
        if (it->part == PART_OVER)
            return HTTP_SOURCE_END;
        if (write_part(it) != STORE_OK || it->out.failed)
            return HTTP_SOURCE_FAILED;
    }
    bytes = it->out.bytes - it->given < room ? it->out.bytes - it->given : room;
    memcpy(into, it->out.text + it->given, bytes);
    it->given += bytes;
    return (int64_t)bytes;
}

static bool note_series(void *user, const store_series *series)
{
    export_source *it = user;

    if (it->series_count == it->series_room) {
        uint32_t room = it->series_room == 0 ? 16 : 2 * it->series_room;
        store_series *grown = http_memory_grow(it->out.memory, it->series, room * sizeof *grown);

        if (grown == NULL)
            return false;
        it->series = grown;
        it->series_room = room;
    }
    it->series[it->series_count++] = *series;
    return true;
}

void api_export(api_call *call)
{
    const char *format = http_target_find(&call->request->target, "format");
    export_source *it = http_memory_get(&call->request->memory, sizeof *it);
    store_result result;

    if (format == NULL || (strcmp(format, "csv") != 0 && strcmp(format, "json") != 0)) {
        (void)api_invalid(call, "format", format, "csv, json");
        return;
    }
    if (it == NULL) {
        api_refuse_store(call, STORE_NO_MEMORY);
        return;
    }
    if (!api_find_run(call, &it->run))
        return;
    it->out = api_json(call);
    it->store = call->it->parts.store;
    it->is_csv = *format == 'c';
    result = store_series_list(it->store, it->run.key, note_series, it);
    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    it->source = (http_source){pull, NULL, it};
    (void)snprintf(it->file_name, sizeof it->file_name, "%s.%s", it->run.id, format);
    call->reply->status = 200;
    call->reply->type = it->is_csv ? "text/csv; charset=utf-8" : "application/json";
    call->reply->file_name = it->file_name;
    call->reply->source = &it->source;
}
