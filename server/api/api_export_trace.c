/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run as a trace for ui.perfetto.dev: the JSON form of Chrome's trace events.
 *
 * A series is a counter; those that share all but the last part of their name are one counter of several
 * values, as memory by category is. Steps are slices of their duration, where it was recorded, and events
 * stand as instants. Times are those of the points, from the begin of the run on.
 */
#include "api/api_export.h"

#include <math.h>
#include <string.h>

#define STEP_TIME "time/step" /* in nanoseconds: what our recorder calls it */

static void begin_entry(export_source *it, const char *kind, const char *name)
{
    out_raw(&it->out, ",\n");
    out_open(&it->out, NULL, '{');
    out_text(&it->out, "ph", kind);
    out_text(&it->out, "name", name);
    out_integer(&it->out, "pid", 1);
    out_integer(&it->out, "tid", 1);
}

/* Microseconds. */
static void write_time(export_source *it, const char *key, double us)
{
    out_number(&it->out, key, us);
}

static double since_begin_us(const export_source *it, int64_t time_ms)
{
    return ((double)time_ms - (double)it->run.created_ms) * 1000.0;
}

static store_result start(export_source *it)
{
    json_out *out = &it->out;

    out_open(out, NULL, '{');
    out_text(out, "displayTimeUnit", "ms");
    out_open(out, "otherData", '{');
    out_text(out, "run", it->run.id);
    out_text(out, "name", it->run.name);
    out_integer(out, "created_ms", it->run.created_ms);
    out_close(out, '}');
    out_open(out, "traceEvents", '[');
    out_raw(out, "\n");
    out_open(out, NULL, '{');
    out_text(out, "ph", "M");
    out_text(out, "name", "process_name");
    out_integer(out, "pid", 1);
    out_open(out, "args", '{');
    out_text(out, "name", it->run.name);
    out_close(out, '}');
    out_close(out, '}');
    return STORE_OK;
}

static void write_event(export_source *it, const store_event *event)
{
    json_out *out = &it->out;

    begin_entry(it, "i", event->kind);
    out_text(out, "s", "p");
    write_time(it, "ts", since_begin_us(it, event->time_ms));
    out_open(out, "args", '{');
    out_text(out, "text", event->text);
    if (event->step != STORE_NO_TIME)
        out_integer(out, "step", event->step);
    if (event->data != NULL) {
        out_begin(out, "data");
        out_raw(out, event->data);
    }
    out_close(out, '}');
    out_close(out, '}');
}

static void end_events(export_source *it)
{
    (void)it;
}

static void write_slice(export_source *it, const block_point *point)
{
    double took_us = point->value / 1000.0;
    char name[40];

    (void)snprintf(name, sizeof name, "step %lld", (long long)point->step);
    begin_entry(it, "X", name);
    write_time(it, "ts", since_begin_us(it, point->time_ms) - took_us);
    write_time(it, "dur", took_us);
    out_close(&it->out, '}');
}

/* "memory/category/weights" is the value weights of the counter memory/category. */
static void write_counter(export_source *it, const store_series *series, const block_point *point)
{
    const char *slash = strrchr(series->name, '/');
    char name[STORE_NAME_BYTES + 1];

    (void)snprintf(name, sizeof name, "%.*s",
                   slash == NULL ? (int)strlen(series->name) : (int)(slash - series->name), series->name);
    begin_entry(it, "C", name);
    write_time(it, "ts", since_begin_us(it, point->time_ms));
    out_open(&it->out, "args", '{');
    out_number(&it->out, slash == NULL ? "value" : slash + 1, point->value);
    out_close(&it->out, '}');
    out_close(&it->out, '}');
}

static store_result write_series(export_source *it)
{
    const store_series *series = &it->series[it->at];
    bool is_step = strcmp(series->name, STEP_TIME) == 0 && strcmp(series->unit, "ns") == 0;
    uint32_t count;
    store_result result = export_block(it, &count);

    for (uint32_t i = 0; i < count; i++) {
        if (!isfinite(it->points[i].value)) /* a counter has no such values */
            continue;
        if (is_step && it->points[i].value >= 0.0)
            write_slice(it, &it->points[i]);
        write_counter(it, series, &it->points[i]);
    }
    return result;
}

static void end(export_source *it)
{
    out_raw(&it->out, "\n]}\n");
}

const export_form export_trace = {"perfetto",  "application/json", "trace.json", start,
                                  write_event, end_events,         write_series, end};
