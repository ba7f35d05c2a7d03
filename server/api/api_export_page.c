/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run as one page that needs no network, no server and no script: charts are drawings in it.
 *
 * Every text of a run is written with its signs of markup as entities, and the page forbids itself to load or
 * run anything. A chart has the mean of each bucket as a line and minimum to maximum as a band behind it, so a
 * peak of one step shows. Series that share all but the last part of their name are in one chart.
 */
#include "api/api_export.h"

#include <math.h>
#include <string.h>
#include <time.h>

#define BUCKETS 300u
#define LINES 8u
#define WIDTH 760.0
#define HEIGHT 230.0
#define LEFT 84.0
#define RIGHT 750.0
#define TOP 10.0
#define BOTTOM 205.0
#define TICKS 4

typedef struct chart {
    const store_series *series; /* `count` of them */
    uint32_t count;
    int64_t first; /* step */
    int64_t last;
    double low;
    double high;
    store_buckets buckets[LINES];
    block_summary room[LINES][BUCKETS];
} chart;

static const char head[] =
    "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
    "'unsafe-inline'\">\n"
    "<meta name=\"viewport\" content=\"width=device-width\">\n"
    "<style>\n"
    ":root { color-scheme: light dark; --ink: #1b1f24; --quiet: #59636e; --rule: #d0d7de; --paper: #fff;\n"
    "  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --c4: #bf3989; --c5: #7d4e00; --c6: "
    "#1b7c83; --c7: #cf222e }\n"
    "@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --quiet: #9198a1; --rule: #3d444d; "
    "--paper: #0d1117;\n"
    "  --c0: #4493f8; --c1: #f0883e; --c2: #3fb950; --c3: #ab7df8; --c4: #f778ba; --c5: #d29922; --c6: "
    "#39c5cf; --c7: #f85149 } }\n"
    "body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: "
    "800px; margin: 2rem auto; padding: 0 1rem }\n"
    "h2 { font-size: 1rem; margin: 2rem 0 .3rem } svg { width: 100%; height: auto } svg text { font-size: "
    "11px; fill: var(--quiet) }\n"
    "table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .2rem .6rem .2rem "
    "0; border-bottom: 1px solid var(--rule); vertical-align: top }\n"
    "pre { overflow: auto; max-height: 24rem } ul { list-style: none; padding: 0; margin: 0 } li { display: "
    "inline-block; margin-right: 1.2rem; color: var(--quiet) }\n"
    ".grid { stroke: var(--rule) } .line { fill: none; stroke-width: 1.5 } .band { stroke: none; opacity: .2 "
    "}\n"
    "</style>\n";

/* ---- texts ----------------------------------------------------------------------------------- */

/* Signs of markup become entities, and control characters one that shows. */
static void put_text(json_out *out, const char *text, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        char code[12];

        if (c == '<' || c == '>' || c == '&' || c == '"' || c == '\'') {
            (void)snprintf(code, sizeof code, "&#%u;", c);
            out_raw(out, code);
        } else if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7f) {
            out_raw(out, "&#xfffd;");
        } else {
            out_raw_bytes(out, &text[i], 1);
        }
    }
}

static void put(json_out *out, const char *text)
{
    put_text(out, text, strlen(text));
}

static void put_time(json_out *out, int64_t ms)
{
    time_t seconds = (time_t)(ms / 1000);
    struct tm parts;
    char text[40] = "";

    if (gmtime_r(&seconds, &parts) != NULL &&
        strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts) > 0)
        out_raw(out, text);
}

static void put_row(json_out *out, const char *name, const char *value)
{
    out_raw(out, "<tr><th scope=\"row\">");
    put(out, name);
    out_raw(out, "<td>");
    put(out, value);
    out_raw(out, "\n");
}

/* A value with its unit, in four digits. */
static void name_value(char *into, size_t room, double value, const char *unit)
{
    static const char *const bytes[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    static const char *const times[] = {"ns", "µs", "ms", "s"};
    bool is_bytes = strcmp(unit, "B") == 0 || strcmp(unit, "bytes") == 0;
    bool is_time = strcmp(unit, "ns") == 0;
    size_t most = is_bytes ? API_COUNT(bytes) : API_COUNT(times);
    double each = is_bytes ? 1024.0 : 1000.0;
    size_t scale = 0;

    while ((is_bytes || is_time) && fabs(value) >= each && scale + 1 < most) {
        value /= each;
        scale++;
    }
    (void)snprintf(into, room, "%.4g%s%s", value, *unit == '\0' ? "" : " ",
                   is_bytes  ? bytes[scale]
                   : is_time ? times[scale]
                             : unit);
}

/* ---- the parts before the charts ------------------------------------------------------------- */

static bool write_document(void *user, const store_document *document, int64_t updated_ms)
{
    export_source *it = user;

    (void)updated_ms;
    out_raw(&it->out, "<details><summary>");
    put(&it->out, document->name);
    out_raw(&it->out, "</summary>\n<pre>");
    put_text(&it->out, document->text, document->bytes);
    out_raw(&it->out, "</pre></details>\n");
    return !it->out.failed;
}

static store_result start(export_source *it)
{
    static const char *const states[] = {[STORE_RUNNING] = "running",
                                         [STORE_FINISHED] = "finished",
                                         [STORE_ENDED_BADLY] = "failed",
                                         [STORE_LOST] = "lost"};
    json_out *out = &it->out;
    store_result result;

    it->own = http_memory_get(out->memory, sizeof(chart));
    if (it->own == NULL)
        return STORE_NO_MEMORY;
    out_raw(out, head);
    out_raw(out, "<title>");
    put(out, it->run.name);
    out_raw(out, "</title>\n</head>\n<body>\n<h1>");
    put(out, it->run.name);
    out_raw(out, "</h1>\n<table>\n");
    put_row(out, "Run", it->run.id);
    put_row(out, "State", states[it->run.state]);
    out_raw(out, "<tr><th scope=\"row\">Begun<td>");
    put_time(out, it->run.created_ms);
    if (it->run.ended_ms != STORE_NO_TIME) {
        out_raw(out, "\n<tr><th scope=\"row\">Ended<td>");
        put_time(out, it->run.ended_ms);
    }
    out_raw(out, "\n</table>\n<h2>Documents</h2>\n");
    result = export_documents(it, write_document);
    out_raw(out, "<h2>Events</h2>\n<details><summary>all of "
                 "them</summary>\n<table>\n<tr><th>Time<th>Step<th>Kind<th>Text\n");
    return result;
}

static void write_event(export_source *it, const store_event *event)
{
    json_out *out = &it->out;
    char step[32] = "";

    if (event->step != STORE_NO_TIME)
        (void)snprintf(step, sizeof step, "%lld", (long long)event->step);
    out_raw(out, "<tr><td>");
    put_time(out, event->time_ms);
    out_raw(out, "<td>");
    out_raw(out, step);
    out_raw(out, "<td>");
    put(out, event->kind);
    out_raw(out, "<td>");
    put(out, event->text);
    out_raw(out, "\n");
}

static void end_events(export_source *it)
{
    out_raw(&it->out, "</table></details>\n");
}

/* ---- a chart --------------------------------------------------------------------------------- */

/* Bytes of a name up to its last slash; 0: it has none. */
static size_t stem_of(const store_series *series)
{
    const char *slash = strrchr(series->name, '/');

    return slash == NULL ? 0 : (size_t)(slash - series->name);
}

static bool share_chart(const store_series *one, const store_series *other)
{
    size_t stem = stem_of(one);

    return stem > 0 && stem == stem_of(other) && memcmp(one->name, other->name, stem) == 0 &&
           strcmp(one->unit, other->unit) == 0;
}

static void take_series(export_source *it, chart *into)
{
    into->series = &it->series[it->at];
    into->count = 1;
    while (into->count < LINES && it->at + into->count < it->series_count &&
           share_chart(into->series, &into->series[into->count]))
        into->count++;
    it->at += into->count;
    into->first = INT64_MAX;
    into->last = INT64_MIN;
    for (uint32_t i = 0; i < into->count; i++) {
        const block_summary *summary = &into->series[i].summary;

        if (summary->count == 0)
            continue;
        into->first = summary->first_step < into->first ? summary->first_step : into->first;
        into->last = summary->last_step > into->last ? summary->last_step : into->last;
    }
}

static void widen(chart *it, const block_summary *bucket)
{
    if (isfinite(bucket->min) && bucket->min < it->low)
        it->low = bucket->min;
    if (isfinite(bucket->max) && bucket->max > it->high)
        it->high = bucket->max;
}

static store_result read_buckets(store *from, chart *it)
{
    uint64_t span = (uint64_t)(it->last - it->first) + 1;
    uint64_t width = (span + BUCKETS - 1) / BUCKETS;
    store_result result = STORE_OK;

    it->low = (double)INFINITY;
    it->high = -(double)INFINITY;
    for (uint32_t i = 0; i < it->count && result == STORE_OK; i++) {
        store_buckets *buckets = &it->buckets[i];

        *buckets =
            (store_buckets){it->first, it->last, width, (uint32_t)((span + width - 1) / width), it->room[i]};
        for (uint32_t k = 0; k < buckets->count; k++)
            buckets->at[k] = block_summary_empty();
        result = store_read_buckets(from, it->series[i].key, buckets);
        for (uint32_t k = 0; k < buckets->count; k++)
            if (buckets->at[k].count > 0)
                widen(it, &buckets->at[k]);
    }
    if (it->low >= 0.0 && it->low < it->high / 2.0)
        it->low = 0.0;
    if (it->low == it->high) {
        it->low -= it->low == 0.0 ? 1.0 : fabs(it->low) / 10.0;
        it->high += it->high == 0.0 ? 1.0 : fabs(it->high) / 10.0;
    }
    return result;
}

static double x_of(const chart *it, const store_buckets *buckets, uint32_t k)
{
    double span = (double)(it->last - it->first);
    double at = ((double)k + 0.5) * (double)buckets->width - 0.5;

    return span <= 0.0 ? (LEFT + RIGHT) / 2.0 : LEFT + (RIGHT - LEFT) * fmin(at, span) / span;
}

static double y_of(const chart *it, double value)
{
    return BOTTOM - (BOTTOM - TOP) * (value / 2.0 - it->low / 2.0) / (it->high / 2.0 - it->low / 2.0);
}

static void put_point(json_out *out, double x, double y, bool is_first)
{
    char text[64];

    (void)snprintf(text, sizeof text, "%s%.1f %.1f", is_first ? "M" : "L", x, y);
    out_raw(out, text);
}

static bool is_drawn(const block_summary *bucket)
{
    return bucket->count > 0 && isfinite(bucket->min) && isfinite(bucket->max) &&
           isfinite(block_summary_mean(bucket));
}

/* Along the maxima, and back along the minima. */
static void put_band(json_out *out, const chart *it, uint32_t line)
{
    const store_buckets *buckets = &it->buckets[line];
    bool is_first = true;
    char text[80];

    (void)snprintf(text, sizeof text, "<path class=\"band\" style=\"fill: var(--c%u)\" d=\"", line);
    out_raw(out, text);
    for (uint32_t k = 0; k < buckets->count; k++) {
        if (!is_drawn(&buckets->at[k]))
            continue;
        put_point(out, x_of(it, buckets, k), y_of(it, buckets->at[k].max), is_first);
        is_first = false;
    }
    for (uint32_t k = buckets->count; k-- > 0;)
        if (is_drawn(&buckets->at[k]))
            put_point(out, x_of(it, buckets, k), y_of(it, buckets->at[k].min), false);
    out_raw(out, "\"/>\n");
}

static void put_line(json_out *out, const chart *it, uint32_t line)
{
    const store_buckets *buckets = &it->buckets[line];
    bool is_first = true;
    char text[80];

    (void)snprintf(text, sizeof text, "<path class=\"line\" style=\"stroke: var(--c%u)\" d=\"", line);
    out_raw(out, text);
    for (uint32_t k = 0; k < buckets->count; k++) {
        if (!is_drawn(&buckets->at[k]))
            continue;
        put_point(out, x_of(it, buckets, k), y_of(it, block_summary_mean(&buckets->at[k])), is_first);
        if (is_first) /* so that one alone shows */
            put_point(out, x_of(it, buckets, k) + 1.0, y_of(it, block_summary_mean(&buckets->at[k])), false);
        is_first = false;
    }
    out_raw(out, "\"/>\n");
}

static void put_axes(json_out *out, const chart *it)
{
    char text[200];

    for (int i = 0; i <= TICKS; i++) {
        double value = it->low + (it->high / TICKS - it->low / TICKS) * i;
        char name[64];

        (void)snprintf(text, sizeof text, "<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/>", LEFT,
                       y_of(it, value), RIGHT);
        out_raw(out, text);
        name_value(name, sizeof name, value, it->series->unit);
        (void)snprintf(text, sizeof text, "<text text-anchor=\"end\" x=\"%.1f\" y=\"%.1f\">", LEFT - 6.0,
                       y_of(it, value) + 4.0);
        out_raw(out, text);
        put(out, name);
        out_raw(out, "</text>\n");
    }
    (void)snprintf(text, sizeof text,
                   "<text x=\"%.1f\" y=\"%.1f\">step %lld</text><text text-anchor=\"end\" x=\"%.1f\" "
                   "y=\"%.1f\">%lld</text>\n",
                   LEFT, BOTTOM + 18.0, (long long)it->first, RIGHT, BOTTOM + 18.0, (long long)it->last);
    out_raw(out, text);
}

static void put_legend(json_out *out, const chart *it)
{
    char value[64];
    char text[80];

    out_raw(out, "<ul>\n");
    for (uint32_t i = 0; i < it->count; i++) {
        const store_series *series = &it->series[i];
        size_t stem = it->count == 1 ? 0 : stem_of(series) + 1;

        (void)snprintf(text, sizeof text, "<li><span style=\"color: var(--c%u)\">&#9632;</span> ", i);
        out_raw(out, text);
        put(out, series->name + stem);
        out_raw(out, ": last ");
        name_value(value, sizeof value, series->summary.last, series->unit);
        put(out, value);
        out_raw(out, ", at most ");
        name_value(value, sizeof value, series->summary.max, series->unit);
        put(out, value);
        out_raw(out, "\n");
    }
    out_raw(out, "</ul>\n");
}

static void put_chart(json_out *out, const chart *it)
{
    const store_series *first = it->series;
    size_t title = it->count == 1 ? strlen(first->name) : stem_of(first);
    char text[96];

    out_raw(out, "<h2>");
    put_text(out, first->name, title);
    out_raw(out, "</h2>\n");
    put_legend(out, it);
    if (!isfinite(it->low) || !isfinite(it->high)) {
        out_raw(out, "<p>No finite values.</p>\n");
        return;
    }
    (void)snprintf(text, sizeof text, "<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"", WIDTH,
                   HEIGHT);
    out_raw(out, text);
    put_text(out, first->name, title);
    out_raw(out, " over steps\">\n");
    put_axes(out, it);
    for (uint32_t i = 0; i < it->count; i++) {
        put_band(out, it, i);
        put_line(out, it, i);
    }
    out_raw(out, "</svg>\n");
}

static store_result write_series(export_source *it)
{
    chart *next = it->own;
    store_result result;

    take_series(it, next);
    if (next->first > next->last)
        return STORE_OK; /* there are no points yet */
    result = read_buckets(it->store, next);
    if (result == STORE_OK)
        put_chart(&it->out, next);
    return result;
}

static void end(export_source *it)
{
    out_raw(&it->out, "</body>\n</html>\n");
}

const export_form export_page = {
    "html", "text/html; charset=utf-8", "html", start, write_event, end_events, write_series, end};
