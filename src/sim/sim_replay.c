/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replay: a trace played into a simulator.
 *
 * The simulator counts bytes; the replay remembers where in the step they were highest, and what
 * categories they were. Each event is one call into the simulator, whose instance ids are the trace's own:
 *
 *      event        OP 4  ALLOC  ALLOC  FREE  OP 5  ALLOC
 *      allocated      10     30     35    20    20     60
 *      live[]       [ 35 .................. ] [ 60 ...
 *      peak               first seen here, operation 5 -^
 *
 * For CUDA the same events are played several times, because a caching allocator has a memory:
 *
 *      step 1   residents  | forward | backward | optimizer state appears, optimizer | gradients end
 *      step 2              | forward | backward |                          optimizer     what is reported
 *
 * What the first step leaves in the caches, between the blocks that stay, decides which block a later request
 * gets, and so what is reserved.
 *
 * Category bytes are those of the trace, as requested; what the simulator adds by rounding is the difference
 * between their sum and its allocated bytes. When the simulator runs out of device memory, the replay stops
 * there, and `out` describes the step up to that point.
 *
 * Nothing is allocated here; the simulator may grow its tables.
 */
#include <stdbool.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"
#include "memscale/replay.h"
#include "sim/sim_trace.h"

typedef struct player {
    const msc_trace *trace;
    msc_sim *sim;
    msc_replay *out;
    uint64_t *live;
    size_t live_count;
    uint64_t op_events; /* OP and RECOMPUTE events so far */
    uint64_t peak_allocated_bytes;
    uint64_t category_bytes[MSC_CATEGORY_COUNT];
    uint64_t away_bytes;
    uint32_t op;
    uint32_t late_op; /* first step: the next operation with which residents appear, or MSC_NONE */
    uint8_t in_recompute;
} player;

static void note_live(player *p, uint64_t allocated_bytes)
{
    size_t i = (size_t)p->op_events;

    if (i > 0 && i <= p->live_count && p->live[i - 1] < allocated_bytes)
        p->live[i - 1] = allocated_bytes;
}

/* What comes back does so between two operations, and counts for the one that follows. */
static void note_alloc(player *p, uint64_t index, uint64_t allocated_bytes)
{
    const msc_event *event = &msc_trace_events(p->trace)[index];

    if (!msc_trace_instances(p->trace)[event->id].returned)
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
    MSC__ASSERT(event->kind == MSC_EVENT_OP || event->kind == MSC_EVENT_RECOMPUTE);
    p->op = event->id;
    p->in_recompute = event->kind == MSC_EVENT_RECOMPUTE;
    if (p->op_events < p->live_count)
        p->live[p->op_events] = 0;
    p->op_events++;
    note_live(p, msc_sim_get_stats(p->sim).allocated_now_bytes);
}

static void note_put(player *p, const msc_event *event)
{
    p->away_bytes += event->size_bytes;
    p->out->moved_bytes += event->size_bytes;
    p->out->moved_count++;
    MSC__ASSERT(p->away_bytes >= event->size_bytes);
    if (p->away_bytes <= p->out->away_peak_bytes)
        return;
    p->out->away_peak_bytes = p->away_bytes;
    p->out->away_peak_op = p->op;
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
        MSC__ASSERT(p->category_bytes[event->category] >= event->size_bytes);
        p->category_bytes[event->category] -= event->size_bytes;
        break;
    case MSC_EVENT_PUT:
        note_put(p, event);
        break;
    case MSC_EVENT_DROP:
        MSC__ASSERT(p->away_bytes >= event->size_bytes);
        p->away_bytes -= event->size_bytes;
        break;
    default:
        start_op(p, event);
        break;
    }
    return status;
}

/* ---- steps before the last ----------------------------------------------------------------------- */

static bool is_resident(const player *p, uint32_t id)
{
    return msc_trace_instances(p->trace)[id].op == msc__trace_op_count(p->trace);
}

/* The next operation from `from` on with which something appears. Few operations do, so a scan is enough. */
static uint32_t next_late(const player *p, uint64_t from)
{
    const msc_instance *instances = msc_trace_instances(p->trace);
    uint32_t next = MSC_NONE;
    uint32_t id;

    for (id = 0; id < msc_trace_instance_count(p->trace) && is_resident(p, id); id++)
        if (instances[id].appears >= from && instances[id].appears < next)
            next = instances[id].appears;
    return next;
}

/*
 * What appears with the operation at hand: optimizer state before its results, as the optimizer makes its
 * state before it works; anything else after them, as a library takes its workspace in the midst of the work.
 * Residents are the first events of a trace: their ids are 0, 1, 2 … and so are their places.
 */
static msc_status appear(player *p, bool is_state, msc_error *err)
{
    const msc_instance *instances = msc_trace_instances(p->trace);
    const msc_event *events = msc_trace_events(p->trace);
    msc_status status = MSC_OK;
    uint32_t id;

    for (id = 0; id < msc_trace_instance_count(p->trace) && is_resident(p, id) && status == MSC_OK; id++)
        if (instances[id].appears == p->op &&
            (events[id].category == MSC_CATEGORY_OPTIMIZER_STATE) == is_state)
            status = msc_sim_alloc(p->sim, id, events[id].size_bytes, 0, err);
    return status;
}

/* The results of the operation at hand are there. */
static msc_status flush(player *p, msc_error *err)
{
    if (p->op != p->late_op)
        return MSC_OK;
    p->late_op = next_late(p, (uint64_t)p->op + 1);
    return appear(p, false, err);
}

static msc_status warm_event(player *p, const msc_event *event, msc_error *err)
{
    msc_status status = MSC_OK;

    if (event->kind == MSC_EVENT_ALLOC)
        return msc_sim_alloc(p->sim, event->id, event->size_bytes, 0, err);
    status = flush(p, err);
    if (status == MSC_OK && event->kind == MSC_EVENT_FREE)
        status = msc_sim_free(p->sim, event->id, err);
    if (event->kind == MSC_EVENT_OP)
        p->op = event->id;
    if (status == MSC_OK && event->kind == MSC_EVENT_OP && p->op == p->late_op)
        status = appear(p, true, err);
    return status;
}

/* What the step does not find from the step before: residents that have ended, or have not appeared yet. */
static msc_status start_step(player *p, uint32_t step, uint64_t *next, msc_error *err)
{
    const msc_event *events = msc_trace_events(p->trace);
    uint64_t count = msc_trace_event_count(p->trace);
    msc_status status = MSC_OK;
    uint64_t i;

    for (i = 0; i < count && events[i].kind == MSC_EVENT_ALLOC && status == MSC_OK; i++) {
        bool waits = step == 0 && msc_trace_instances(p->trace)[i].appears != MSC_NONE;
        MSC__ASSERT(events[i].id == i); /* residents come first, in the order of their ids */
        if (!waits && !msc__sim_has(p->sim, events[i].id))
            status = msc_sim_alloc(p->sim, events[i].id, events[i].size_bytes, 0, err);
    }
    *next = i;
    return status;
}

/* Gradients, and whatever else a step made and kept, end with it. */
static msc_status end_step(player *p, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t id;

    for (id = 0; id < msc_trace_instance_count(p->trace) && status == MSC_OK; id++)
        if (!is_resident(p, id) && msc__sim_has(p->sim, id))
            status = msc_sim_free(p->sim, id, err);
    return status;
}

/* One step without a record, from its first operation to its last, or until more is reserved than allowed. */
static msc_status warm_step(player *p, uint32_t step, uint64_t most_bytes, msc_error *err)
{
    const msc_event *events = msc_trace_events(p->trace);
    uint64_t count = msc_trace_event_count(p->trace);
    msc_status status;
    uint64_t i;

    p->op = msc__trace_op_count(p->trace);
    p->late_op = step == 0 ? next_late(p, 0) : MSC_NONE;
    status = start_step(p, step, &i, err);
    for (; i < count && status == MSC_OK && msc__sim_reserved_now(p->sim) <= most_bytes; i++)
        status = warm_event(p, &events[i], err);
    return status == MSC_OK ? flush(p, err) : status;
}

/* All steps but the last one, and what the last one finds. */
static msc_status warm_up(player *p, uint64_t *next, msc_error *err)
{
    const msc_event *events = msc_trace_events(p->trace);
    msc_status status = MSC_OK;
    uint32_t step;
    uint64_t i;

    for (step = 0; step + 1 < MSC_REPLAY_STEPS && status == MSC_OK; step++) {
        status = warm_step(p, step, UINT64_MAX, err);
        if (status == MSC_OK)
            status = end_step(p, err);
    }
    p->op = msc__trace_op_count(p->trace);
    if (status == MSC_OK)
        status = start_step(p, step, next, err);
    MSC__ASSERT(status != MSC_OK || *next <= msc_trace_event_count(p->trace));
    for (i = 0; i < *next && status == MSC_OK; i++) {
        p->category_bytes[events[i].category] += events[i].size_bytes;
        note_alloc(p, i, msc_sim_get_stats(p->sim).allocated_now_bytes);
    }
    return status;
}

msc_status msc__trace_reserved_peak(const msc_trace *trace, msc_sim *sim, uint64_t most_bytes,
                                    uint64_t *peak_bytes, msc_error *err)
{
    player p = {.trace = trace, .sim = sim};
    msc_status status = MSC_OK;
    uint32_t step;

    msc_sim_reset(sim);
    for (step = 0; step < MSC_REPLAY_STEPS && status == MSC_OK; step++) {
        status = warm_step(&p, step, most_bytes, err);
        if (status == MSC_OK && msc__sim_reserved_now(sim) > most_bytes)
            break;
        if (status == MSC_OK && step + 1 < MSC_REPLAY_STEPS)
            status = end_step(&p, err);
    }
    *peak_bytes = msc_sim_get_stats(sim).reserved_peak_bytes;
    return status;
}

/* ---- the replay ---------------------------------------------------------------------------------- */

msc_status msc_trace_replay_into(const msc_trace *trace, msc_sim *sim, uint64_t *live, size_t live_count,
                                 msc_replay *out, size_t out_bytes, msc_error *err)
{
    msc_replay seen = {0};
    player p = {
        .trace = trace, .sim = sim, .out = &seen, .live = live, .live_count = live == NULL ? 0 : live_count};
    const msc_event *events;
    uint64_t count;
    uint64_t i = 0;
    msc_status status = MSC_OK;

    if (trace == NULL || sim == NULL || out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot replay: trace, simulator or out is NULL");
    events = msc_trace_events(trace);
    count = msc_trace_event_count(trace);
    p.op = msc__trace_op_count(trace);
    seen.peak_op = p.op;
    seen.away_peak_op = p.op;
    msc_sim_reset(sim);
    if (msc__sim_is_caching(sim))
        status = warm_up(&p, &i, err);
    for (; i < count && status == MSC_OK; i++)
        status = play(&p, &events[i], i, err);
    seen.stats = msc_sim_get_stats(sim);
    /* For HOST both are equal. */
    seen.peak_bytes = seen.stats.reserved_peak_bytes;
    msc__sized_copy(out, out_bytes, &seen, sizeof seen);
    return status;
}
