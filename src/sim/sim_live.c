/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is alive at one moment of a trace, and whose it is.
 *
 *      events     A0  A1  OP  A2  F1  A3 | F0 ...
 *                                        ^ moment
 *      alive       0           2      3        in order of allocation, which is that of the ids
 *
 * Ids are handed out in order of allocation and each is used once, so a byte per instance says all: it is
 * set by the ALLOC and cleared by the FREE. Sizes come from the events, everything else from the table of
 * instances and the graph.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "sim/sim_trace.h"

/* What is known of an instance. */
typedef struct mark {
    uint64_t size_bytes;
    uint8_t category;
    uint8_t alive;
} mark;

static void mark_until(const msc_trace *trace, uint64_t event, mark *marks)
{
    const msc_event *events = msc_trace_events(trace);
    uint64_t i;

    for (i = 0; i <= event; i++) {
        if (events[i].kind == MSC_EVENT_ALLOC) {
            MSC__ASSERT(marks[events[i].id].size_bytes == 0 &&
                        !marks[events[i].id].alive); /* each id is used once */
            marks[events[i].id].size_bytes = events[i].size_bytes;
            marks[events[i].id].category = events[i].category;
            marks[events[i].id].alive = 1;
        } else if (events[i].kind == MSC_EVENT_FREE) {
            MSC__ASSERT(marks[events[i].id].alive && marks[events[i].id].size_bytes == events[i].size_bytes);
            marks[events[i].id].alive = 0;
        }
    }
}

static msc_live describe(const msc_graph *graph, const msc_instance *instance, const mark *seen)
{
    msc_live live = {.size_bytes = seen->size_bytes,
                     .buffer = instance->buffer,
                     .op = instance->op,
                     .category = seen->category,
                     .recomputed = instance->recomputed,
                     .returned = instance->returned};

    live.module = live.buffer == MSC_NONE ? msc_graph_module_of_op(graph, live.op)
                                          : msc_graph_module_of_buffer(graph, live.buffer);
    return live;
}

msc_status msc_trace_live_at(const msc_trace *trace, const msc_graph *graph, uint64_t event, msc_live *live,
                             uint32_t capacity, uint32_t *count, msc_error *err)
{
    const msc_instance *instances;
    mark *marks = NULL;
    uint32_t found = 0;
    size_t bytes;
    uint32_t i;

    if (trace == NULL || graph == NULL || count == NULL || (live == NULL && capacity > 0))
        return msc__fail(err, MSC_EINVAL, "cannot list what is alive: trace, graph, live or count is NULL");
    if (event >= msc_trace_event_count(trace))
        return msc__fail(err, MSC_EINVAL, "cannot list what is alive: there is no event %llu, only %llu",
                         (unsigned long long)event, (unsigned long long)msc_trace_event_count(trace));
    instances = msc_trace_instances(trace);
    *count = 0;
    if (msc_trace_instance_count(trace) == 0)
        return MSC_OK;
    bytes = (size_t)msc_trace_instance_count(trace) * sizeof *marks;
    marks = msc__alloc(msc__trace_context(trace), bytes);
    if (marks == NULL)
        return msc__fail_memory(err, "what is alive", bytes);
    mark_until(trace, event, marks);
    for (i = 0; i < msc_trace_instance_count(trace); i++) {
        if (!marks[i].alive)
            continue;
        if (found < capacity)
            live[found] = describe(graph, &instances[i], &marks[i]);
        found++;
    }
    *count = found;
    msc__free(msc__trace_context(trace), marks, bytes);
    return MSC_OK;
}
