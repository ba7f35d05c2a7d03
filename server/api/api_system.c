/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the server is: /healthz, /readyz, and /metrics in Prometheus' text form. Figures carry no names of
 * runs, users or projects.
 */
#include <string.h>

#include "api/api_internal.h"

static void send_text(api_call *call, const char *text)
{
    call->reply->status = 200;
    call->reply->type = "text/plain; charset=utf-8";
    call->reply->body = text;
    call->reply->body_bytes = strlen(text);
}

void api_healthz(api_call *call)
{
    send_text(call, "ok\n");
}

void api_readyz(api_call *call)
{
    if (store_is_ready(call->it->parts.store))
        send_text(call, "ready\n");
    else
        api_refuse(call, &(const api_fault){.status = 503,
                                            .code = "later",
                                            .message = "the last write failed; see the space on the disk",
                                            .retry_after_s = 5});
}

static void head(json_out *out, const char *name, const char *type, const char *help)
{
    out_raw(out, "# HELP memscale_server_");
    out_raw(out, name);
    out_raw(out, " ");
    out_raw(out, help);
    out_raw(out, "\n# TYPE memscale_server_");
    out_raw(out, name);
    out_raw(out, " ");
    out_raw(out, type);
    out_raw(out, "\n");
}

static void figure(json_out *out, const char *name, const char *type, const char *help, double value)
{
    char text[160];

    head(out, name, type, help);
    (void)snprintf(text, sizeof text, "memscale_server_%s %.17g\n", name, value);
    out_raw(out, text);
}

static void write_requests(json_out *out, api *it)
{
    head(out, "http_requests_total", "counter", "Requests that were answered, by route and class of status.");
    for (size_t i = 0; i <= API_MOST_ROUTES; i++) {
        const api_route *route = i < api_route_count ? &api_routes[i] : NULL;

        for (unsigned k = 0; k < API_CLASSES; k++) {
            uint64_t count = atomic_load(&it->answered[i][k]);
            char text[200];

            if (count == 0)
                continue;
            (void)snprintf(
                text, sizeof text,
                "memscale_server_http_requests_total{method=\"%s\",route=\"%s\",code=\"%uxx\"} %llu\n",
                route == NULL ? "" : route->method, route == NULL ? "" : route->path, k + 2,
                (unsigned long long)count);
            out_raw(out, text);
        }
    }
}

void api_metrics(api_call *call)
{
    store_figures figures = store_count(call->it->parts.store);
    json_out out = api_json(call);

    head(&out, "build_info", "gauge", "Version of the server.");
    out_raw(&out, "memscale_server_build_info{version=\"" MSC_VERSION_TEXT "\"} 1\n");
    write_requests(&out, call->it);
    figure(&out, "http_request_seconds_total", "counter", "Time spent in answering.",
           (double)atomic_load(&call->it->answer_ns) * 1e-9);
    figure(&out, "ingest_points_total", "counter", "Points that were kept.", (double)figures.points);
    figure(&out, "ingest_batches_total", "counter", "Batches that were kept, duplicates not counted.",
           (double)figures.batches);
    figure(&out, "db_commits_total", "counter", "Transactions that were committed.", (double)figures.commits);
    figure(&out, "db_commit_seconds_total", "counter", "Time spent in commits.",
           (double)figures.commit_ns * 1e-9);
    figure(&out, "db_jobs_total", "counter", "Writes that were asked for.", (double)figures.jobs);
    figure(&out, "sse_clients", "gauge", "Clients that watch a run.",
           (double)live_count(call->it->parts.live));
    if (out.failed) {
        api_refuse_store(call, STORE_NO_MEMORY);
        return;
    }
    send_text(call, out.text);
    call->reply->type = "text/plain; version=0.0.4; charset=utf-8";
}
