/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replay: a trace played into a simulator.
 *
 * The simulator counts bytes; the replay remembers where in the step they were highest and of which
 * categories they were. Each event is one call into the simulator, whose instance ids are the trace's own:
 *
 *      event        OP 4  ALLOC  ALLOC  FREE  OP 5  ALLOC
 *      allocated      10     30     35    20    20     60
 *      live[]       [ 35 .................. ] [ 60 ...
 *      peak               first seen here, operation 5 -^
 *
 * Category bytes are those of the trace, as requested; what the simulator adds by rounding is the difference
 * between their sum and its allocated bytes. When the simulator runs out of device memory, the replay stops
 * there, and `out` describes the step up to that point.
 *
 * Nothing is allocated here; the simulator may grow its tables.
 */
#include <string.h>

#include "base/error.h"
#include "memscale/sim.h"

typedef struct player {
    msc_sim *sim;
    msc_replay *out;
    uint64_t *live;
    size_t live_count;
    uint64_t op_events; /* OP and RECOMPUTE events so far */
    uint64_t peak_allocated_bytes;
    uint64_t category_bytes[MSC_CATEGORY_COUNT];
    uint32_t op;
    uint8_t in_recompute;
} player;

static void note_live(player *p, uint64_t allocated_bytes)
{
    size_t i = (size_t)p->op_events;

    if (i > 0 && i <= p->live_count && p->live[i - 1] < allocated_bytes)
        p->live[i - 1] = allocated_bytes;
}

static void note_alloc(player *p, uint64_t index, uint64_t allocated_bytes)
{
    note_live(p, allocated_bytes);
    if (allocated_bytes <= p->peak_allocated_bytes)
        return;
    p->peak_allocated_bytes = allocated_bytes;
    p->out->peak_event = index;
    p->out->peak_op = p->op;
    p->out->peak_in_recompute = p->in_recompute;
    memcpy(p->out->category_peak_bytes, p->category_bytes, sizeof p->category_bytes);
}

static void start_op(player *p, const msc_event *event)
{
    p->op = event->id;
    p->in_recompute = event->kind == MSC_EVENT_RECOMPUTE;
    if (p->op_events < p->live_count)
        p->live[p->op_events] = 0;
    p->op_events++;
    note_live(p, msc_sim_get_stats(p->sim).allocated_now_bytes);
}

static msc_status play(player *p, const msc_event *event, uint64_t index, msc_error *err)
{
    msc_status status = MSC_OK;

    switch (event->kind) {
    case MSC_EVENT_ALLOC:
        status = msc_sim_alloc(p->sim, event->id, event->size_bytes, 0, err);
        if (status == MSC_OK) {
            p->category_bytes[event->category] += event->size_bytes;
            note_alloc(p, index, msc_sim_get_stats(p->sim).allocated_now_bytes);
        }
        break;
    case MSC_EVENT_FREE:
        status = msc_sim_free(p->sim, event->id, err);
        p->category_bytes[event->category] -= event->size_bytes;
        break;
    default:
        start_op(p, event);
        break;
    }
    return status;
}

/* Operations that the trace runs for real: what "before the first" is called in `peak_op`. */
static uint32_t plain_op_count(const msc_event *events, uint64_t count)
{
    uint32_t ops = 0;
    uint64_t i;

    for (i = 0; i < count; i++)
        ops += events[i].kind == MSC_EVENT_OP;
    return ops;
}

msc_status msc_trace_replay(const msc_trace *trace, msc_sim *sim, uint64_t *live, size_t live_count,
                            msc_replay *out, msc_error *err)
{
    const msc_event *events;
    player p = {.sim = sim, .out = out, .live = live, .live_count = live == NULL ? 0 : live_count};
    uint64_t count;
    uint64_t i;
    msc_status status = MSC_OK;

    if (trace == NULL || sim == NULL || out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot replay: trace, simulator or out is NULL");
    events = msc_trace_events(trace);
    count = msc_trace_event_count(trace);
    memset(out, 0, sizeof *out);
    p.op = plain_op_count(events, count);
    out->peak_op = p.op;
    msc_sim_reset(sim);
    for (i = 0; i < count && status == MSC_OK; i++)
        status = play(&p, &events[i], i, err);
    out->stats = msc_sim_get_stats(sim);
    /* For HOST both are equal. */
    out->peak_bytes = out->stats.reserved_peak_bytes;
    return status;
}
