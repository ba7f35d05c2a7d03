/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run as one file, in as much memory as one block takes, however many points there are.
 *
 *      csv       series,unit,step,time_ms,value
 *      json      {"run": …, "documents": {…}, "events": […],
 *                 "series": [{"name": …, "unit": …, "points": [[step, time_ms, value], …]}]}
 *      perfetto  a trace of counters and events (api_export_trace.c)
 *      html      a page that needs nothing else (api_export_page.c)
 *
 * The source writes a part into its buffer when that is empty: the start, a page of events, a block. The list
 * of series is made at the beginning; what is added meanwhile to the last block of one may be in the file or
 * not.
 */
#include "api/api_export.h"

#include <string.h>

#define EVENTS_AT_ONCE 100u

/* ---- what forms read ------------------------------------------------------------------------- */

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

store_result export_documents(export_source *it, store_document_each *each)
{
    name_list list = {.count = 0};
    store_result result = store_documents(it->store, it->run.key, NULL, note_name, &list);

    for (uint32_t i = 0; i < list.count && result == STORE_OK; i++)
        result = store_documents(it->store, it->run.key, list.names[i], each, it);
    return result;
}

store_result export_block(export_source *it, uint32_t *count)
{
    store_result result;

    *count = 0;
    result = store_read_block(it->store, it->series[it->at].key, it->block++, it->points, count);
    if (result == STORE_NOT_FOUND) {
        it->at++;
        it->block = 0;
    }
    return result;
}

/* ---- csv ------------------------------------------------------------------------------------- */

static store_result start_csv(export_source *it)
{
    out_raw(&it->out, "series,unit,step,time_ms,value\r\n");
    return STORE_OK;
}

static store_result write_csv(export_source *it)
{
    const store_series *series = &it->series[it->at];
    json_out *out = &it->out;
    uint32_t count;
    store_result result = export_block(it, &count);

    for (uint32_t i = 0; i < count; i++) {
        out_csv_text(out, series->name);
        out_raw(out, ",");
        out_csv_text(out, series->unit);
        out_csv_integer(out, it->points[i].step);
        out_csv_integer(out, it->points[i].time_ms);
        out_csv_number(out, it->points[i].value);
        out_raw(out, "\r\n");
    }
    return result;
}

static void end_csv(export_source *it)
{
    (void)it;
}

/* ---- json ------------------------------------------------------------------------------------ */

static bool write_document(void *user, const store_document *document, int64_t updated_ms)
{
    export_source *it = user;

    (void)updated_ms;
    out_begin(&it->out, document->name);
    out_raw_bytes(&it->out, document->text, document->bytes);
    return !it->out.failed;
}

static store_result start_json(export_source *it)
{
    store_result result;

    out_raw(&it->out, "{\"run\": ");
    api_write_run(&it->out, &it->run, true);
    out_open(&it->out, "documents", '{');
    result = export_documents(it, write_document);
    out_close(&it->out, '}');
    out_open(&it->out, "events", '[');
    return result;
}

static void write_json_event(export_source *it, const store_event *event)
{
    json_out *out = &it->out;

    if (it->events > 0 && it->event_count == 0)
        out_raw(out, ", "); /* the page before ended in another buffer */
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
}

static void end_json_events(export_source *it)
{
    out_raw(&it->out, "], \"series\": [");
}

static store_result write_json_series(export_source *it)
{
    const store_series *series = &it->series[it->at];
    json_out *out = &it->out;
    bool is_first = it->block == 0;
    uint32_t count;
    store_result result;

    if (is_first) {
        out_raw(out, it->at == 0 ? "{" : ", {");
        out_text(out, "name", series->name);
        out_text(out, "unit", series->unit);
        out_open(out, "points", '[');
    }
    result = export_block(it, &count);
    if (count > 0 && !is_first)
        out_raw(out, ", ");
    for (uint32_t i = 0; i < count; i++) {
        out_open(out, NULL, '[');
        out_integer(out, NULL, it->points[i].step);
        out_integer(out, NULL, it->points[i].time_ms);
        out_number(out, NULL, it->points[i].value);
        out_close(out, ']');
    }
    if (result == STORE_NOT_FOUND)
        out_raw(out, "]}");
    return result;
}

static void end_json(export_source *it)
{
    out_raw(&it->out, "]}\n");
}

static const export_form export_csv = {
    "csv", "text/csv; charset=utf-8", "csv", start_csv, NULL, NULL, write_csv, end_csv};
static const export_form export_json = {
    "json",          "application/json", "json",  start_json, write_json_event,
    end_json_events, write_json_series,  end_json};
static const export_form *const forms[] = {&export_csv, &export_json, &export_trace, &export_page};

/* ---- parts ----------------------------------------------------------------------------------- */

static bool write_event(void *user, const store_event *event)
{
    export_source *it = user;

    it->form->event(it, event);
    it->event_count++;
    it->events++;
    it->last_event = event->id;
    return !it->out.failed;
}

static store_result write_events(export_source *it)
{
    store_result result = STORE_OK;

    it->event_count = 0;
    if (it->form->event != NULL)
        result = store_events(it->store, it->run.key, NULL, it->last_event, EVENTS_AT_ONCE, write_event, it);
    if (it->event_count < EVENTS_AT_ONCE) {
        if (it->form->event != NULL)
            it->form->events_end(it);
        it->part = PART_SERIES;
    }
    return result;
}

static store_result write_part(export_source *it)
{
    store_result result = STORE_OK;

    switch (it->part) {
    case PART_START:
        it->part = PART_EVENTS;
        return it->form->start(it);
    case PART_EVENTS:
        return write_events(it);
    case PART_SERIES:
        if (it->at < it->series_count)
            result = it->form->series(it);
        else
            it->part = PART_END;
        return result == STORE_NOT_FOUND ? STORE_OK : result; /* of one */
    default:
        it->form->end(it);
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
    const export_form *form = NULL;
    store_result result;

    for (size_t i = 0; i < API_COUNT(forms) && format != NULL; i++)
        if (strcmp(forms[i]->name, format) == 0)
            form = forms[i];
    if (form == NULL) {
        (void)api_invalid(call, "format", format, "csv, json, perfetto, html");
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
    it->form = form;
    result = store_series_list(it->store, it->run.key, note_series, it);
    if (result != STORE_OK) {
        api_refuse_store(call, result);
        return;
    }
    it->source = (http_source){pull, NULL, it};
    (void)snprintf(it->file_name, sizeof it->file_name, "%s.%s", it->run.id, form->suffix);
    call->reply->status = 200;
    call->reply->type = form->type;
    call->reply->file_name = it->file_name;
    call->reply->source = &it->source;
}
