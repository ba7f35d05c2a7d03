/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a graph and a plan to the events of a step.
 *
 * WHAT A CHECKPOINT DOES TO LIFETIMES. These rules are normative; the decision and the executor follow them.
 * Positions are those of graph.h, n is the number of operations.
 *
 *      position      fb        stop  fe                    rb        until
 *      forward       [ region R      )                     |           |
 *      internal save      P- - - x dropped                 |U- - - - -R|
 *      its buffer      [====) forward instance             |           |
 *      kept buffer         [===============================|           |
 *      recompute                                     [fb..stop-1]      |
 *                                                       [==instance====)
 *      input of R    ==|=======================================held====)
 *      state of R      [=======================================held====)
 *      its second instance                           [ recompute )
 *
 *  What an OFFLOAD does, and a checkpoint whose boundary is offloaded, is written at the top of sim_moves.c. The
 *  region of an OFFLOAD is no region in what follows; but what lies inside it is not treated either.
 *
 *  Regions. Every call of a module whose choice is not KEEP is a region, unless it lies inside another one:
 *  regions do not nest, the outermost call is the region. A joined choice's call goes on with the region of
 *  its siblings that ends where it begins; where there is none, it is a region of its own. A save lies inside
 *  R when it was packed by a call of R or by a call inside one.
 *
 *  Kept operations. A SELECTIVE choice names operations by their offset from fb. What they make is *kept*.
 *
 *  Saves. A save inside R is *internal* when its buffer was made inside R (fb <= begin < fe, not resident),
 *  is not kept, and its release lies beyond fe. The others are *external*. An internal save that is never
 * used (unpack and release both at n) counts for `stop`, and for nothing else below. When no internal save is
 *  used, R does nothing and is treated as kept as a whole.
 *
 *  Numbers. rb = least unpack of the used internal saves, but not before fe. until = their latest release.
 *  stop = latest pack of the internal saves, and behind what makes their buffers: nothing later is needed.
 *
 *  Forward. Internal saves hold nothing. A buffer's forward instance lives until the latest of its natural
 *  end, the releases of all saves on it that are not internal saves of the region it was made in, and
 *  `until` of every region made elsewhere that one of its outermost calls has it as an input of. External
 * saves hold as in the plain step. What is kept lives at least until the recompute of its region is over.
 *
 *  State. One instance per region, as large as state_bytes of the modules of its outermost calls together, of
 *  category TEMPORARY, made when operation fb starts and alive until `until`. A recompute changes what the state is
 *  of (generators, buffers) and puts the present one back: from its first operation to its end there is a second
 *  instance.
 *
 *  Recompute. At position rb, after the frees of that position and right before operation rb (at the end of
 *  the step when rb = n), operations fb … stop-1 are executed again, except kept ones. Each buffer that
 * begins with one of them gets a fresh instance at its operation, and scratch is used as in forward. What is
 *  resident, kept or was made before fb is not made again; nor is a buffer of category PARAMETER, for weights that
 *  come while a module runs are found by its recompute: such a buffer counts as one from outside.
 *   - An instance without used internal saves is freed at its natural end when that lies before stop,
 *     otherwise when the recompute ends.
 *   - An instance with used internal saves lives until the latest of their releases, in real backward time;
 *     when that is not beyond rb, until the recompute ends.
 *   - When the recompute ends, forward instances of kept buffers that nothing else holds go as well.
 *  Regions with equal rb recompute one after the other, the later call first.
 *
 *  Staging. A plan's `staging_bytes` are one instance of category WORKSPACE, behind the residents, which stays.
 *
 *  Everything else is as in the plain step. At any position, frees come in buffer order, the forward instance
 *  of a buffer before its recomputed one, then states, in region order, then what came back. What comes back there
 *  follows the frees, and precedes a recompute.
 *
 * HOW. One walk over the positions emits the events. It runs twice: first it only counts, then it writes into
 * arrays of exactly the right size. What happens at which position is prepared by sim_derive.c.
 * Cost: operations + buffers + saves × nesting depth + events.
 */
#include "sim/sim_trace.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "memscale/replay.h"
#include "sim/sim_derive.h"

struct msc_trace {
    msc_context *ctx;
    msc_event *events;
    msc_instance *instances;
    uint64_t event_count;
    uint64_t op_event_count;
    uint32_t instance_count;
    uint32_t op_count;
};

/* Where events and instances go. While counting, both are NULL. */
typedef struct emitter {
    msc_event *events;
    msc_instance *instances;
    uint64_t count;
    uint64_t op_events;
    uint32_t *ids; /* per object: its instance */
    uint32_t next_id;
    uint32_t op; /* that runs; op count before the first */
    uint8_t recomputed;
    uint8_t returned;
} emitter;

/* ---- the walk ------------------------------------------------------------------------------------ */

static void emit(emitter *e, msc_event_kind kind, uint32_t id, uint64_t size_bytes, uint8_t category)
{
    if (e->events != NULL) {
        msc_event *event = &e->events[e->count];
        event->size_bytes = size_bytes;
        event->id = id;
        event->kind = (uint8_t)kind;
        event->category = category;
        event->pad = 0;
    }
    e->count++;
    e->op_events += kind == MSC_EVENT_OP || kind == MSC_EVENT_RECOMPUTE;
}

static void object_facts(const msc__derivation *d, uint32_t object, uint64_t *size_bytes, uint8_t *category)
{
    uint32_t states = 2 * d->buffer_count;

    MSC__ASSERT(object < states + d->plan.count + d->plan.move_count);
    if (object >= states + d->plan.count)
        object = d->plan.moves[object - states - d->plan.count].buffer;
    if (object >= states) {
        *size_bytes = d->plan.regions[object - 2 * d->buffer_count].state_bytes;
        *category = MSC_CATEGORY_TEMPORARY;
    } else {
        const msc_buffer *buffer = &d->buffers[object % d->buffer_count];
        *size_bytes = buffer->size_bytes;
        *category = buffer->category;
    }
}

/* With which operation of the first step a buffer appears that later steps find. */
static uint32_t appearance(const msc__derivation *d, uint32_t buffer)
{
    if (buffer == MSC_NONE || !d->buffers[buffer].resident || d->buffers[buffer].begin == 0)
        return MSC_NONE;
    return d->buffers[buffer].begin;
}

/* Hands out the next instance id. */
static uint32_t new_instance(emitter *e, const msc__derivation *d, uint32_t buffer)
{
    if (e->instances != NULL) {
        msc_instance *instance = &e->instances[e->next_id];
        instance->buffer = buffer;
        instance->op = e->op;
        instance->appears = appearance(d, buffer);
        instance->recomputed = e->recomputed;
        instance->returned = e->returned;
    }
    return e->next_id++;
}

/* Buffer that an object is an instance of, or MSC_NONE. */
static uint32_t buffer_of(const msc__derivation *d, uint32_t object)
{
    uint32_t states = 2 * d->buffer_count;

    if (object >= states + d->plan.count)
        return d->plan.moves[object - states - d->plan.count].buffer;
    return object >= states ? MSC_NONE : object % d->buffer_count;
}

static void emit_alloc(emitter *e, const msc__derivation *d, uint32_t object)
{
    uint32_t buffer = buffer_of(d, object);
    uint64_t size_bytes;
    uint8_t category;

    object_facts(d, object, &size_bytes, &category);
    e->ids[object] = new_instance(e, d, buffer);
    emit(e, MSC_EVENT_ALLOC, e->ids[object], size_bytes, category);
}

static void emit_free(emitter *e, const msc__derivation *d, uint32_t object)
{
    uint64_t size_bytes;
    uint8_t category;

    object_facts(d, object, &size_bytes, &category);
    emit(e, MSC_EVENT_FREE, e->ids[object], size_bytes, category);
}

static void emit_scratch(emitter *e, const msc__derivation *d, uint32_t op)
{
    uint64_t scratch_bytes = d->ops[op].scratch_bytes;
    uint32_t id;

    if (scratch_bytes == 0)
        return;
    id = new_instance(e, d, MSC_NONE);
    emit(e, MSC_EVENT_ALLOC, id, scratch_bytes, MSC_CATEGORY_TEMPORARY);
    emit(e, MSC_EVENT_FREE, id, scratch_bytes, MSC_CATEGORY_TEMPORARY);
}

/* Outputs of an operation: forward instances with `shift` 0, recomputed ones with the buffer count. */
static void emit_outputs(emitter *e, const msc__derivation *d, uint32_t op, uint32_t shift)
{
    uint32_t i;

    for (i = d->begins.first[op]; i < d->begins.first[op + 1]; i++)
        emit_alloc(e, d, shift + d->begins.items[i]);
    emit_scratch(e, d, op);
}

static void emit_frees(emitter *e, const msc__derivation *d, uint32_t position)
{
    uint32_t i;

    for (i = d->frees.first[position]; i < d->frees.first[position + 1]; i++)
        emit_free(e, d, d->frees.items[i]);
}

/* Bytes that leave the device, or are no longer away. */
static void emit_moves(emitter *e, const msc__derivation *d, const msc__buckets *moves, uint32_t position,
                       msc_event_kind kind)
{
    uint32_t i;

    for (i = moves->first[position]; i < moves->first[position + 1]; i++) {
        const msc__moved *move = &d->plan.moves[moves->items[i]];
        emit(e, kind, e->ids[move->buffer], move->size_bytes, d->buffers[move->buffer].category);
    }
}

static void emit_returns(emitter *e, const msc__derivation *d, uint32_t position)
{
    uint32_t i;

    MSC__ASSERT(!e->returned && !e->recomputed);
    e->returned = 1;
    for (i = d->returns.first[position]; i < d->returns.first[position + 1]; i++)
        emit_alloc(e, d, msc__returned_object(d, d->returns.items[i]));
    e->returned = 0;
}

/* What goes when a recompute is over: fresh instances that no save holds, and what was kept for it. */
static void emit_recompute_end(emitter *e, const msc__derivation *d, const msc__region *region)
{
    uint32_t i;

    for (i = d->begins.first[region->begin]; i < d->begins.first[region->end]; i++) {
        uint32_t b = d->begins.items[i];
        if (msc__op_is_kept(d, d->buffers[b].begin)) {
            if (d->end[b] == MSC__WITH_RECOMPUTE)
                emit_free(e, d, b);
        } else if (d->buffers[b].begin < region->stop && !msc__redo_is_held(d, b) &&
                   !msc__redo_expires_inside(d, b, region)) {
            emit_free(e, d, d->buffer_count + b);
        }
    }
}

/* One operation is recomputed. With the first one, what the region's state is of is put aside as it is at present. */
static void emit_again(emitter *e, const msc__derivation *d, const msc__region *region, uint32_t op,
                       uint32_t *aside)
{
    MSC__ASSERT(op >= region->begin && op < region->stop);
    e->op = op;
    emit(e, MSC_EVENT_RECOMPUTE, op, 0, 0);
    if (*aside == MSC_NONE && region->state_bytes > 0) {
        *aside = new_instance(e, d, MSC_NONE);
        emit(e, MSC_EVENT_ALLOC, *aside, region->state_bytes, MSC_CATEGORY_TEMPORARY);
    }
    emit_outputs(e, d, op, d->buffer_count);
}

static void emit_recompute(emitter *e, const msc__derivation *d, const msc__region *region)
{
    uint32_t aside = MSC_NONE;
    uint32_t t;
    uint32_t i;

    MSC__ASSERT(!e->recomputed && region->live && region->stop <= region->end);
    e->recomputed = 1;
    for (t = region->begin; t < region->stop; t++) {
        if (!msc__op_is_kept(d, t))
            emit_again(e, d, region, t, &aside);
        for (i = d->expires.first[t + 1]; i < d->expires.first[t + 2]; i++)
            emit_free(e, d, d->buffer_count + d->expires.items[i]);
    }
    emit_recompute_end(e, d, region);
    if (aside != MSC_NONE)
        emit(e, MSC_EVENT_FREE, aside, region->state_bytes, MSC_CATEGORY_TEMPORARY);
    e->recomputed = 0;
}

static void emit_op(emitter *e, const msc__derivation *d, uint32_t op)
{
    uint32_t i;

    e->op = op;
    emit(e, MSC_EVENT_OP, op, 0, 0);
    for (i = d->starts.first[op]; i < d->starts.first[op + 1]; i++)
        if (d->plan.regions[d->starts.items[i]].state_bytes > 0)
            emit_alloc(e, d, 2 * d->buffer_count + d->starts.items[i]);
    for (i = d->arrivals.first[op]; i < d->arrivals.first[op + 1]; i++)
        emit_alloc(e, d, d->arrivals.items[i]);
    emit_outputs(e, d, op, 0);
}

static void walk(emitter *e, const msc__derivation *d)
{
    uint32_t p;
    uint32_t i;

    e->op = d->op_count;
    for (i = 0; i < d->buffer_count; i++)
        if (d->buffers[i].resident)
            emit_alloc(e, d, i);
    if (d->staging_bytes > 0)
        emit(e, MSC_EVENT_ALLOC, new_instance(e, d, MSC_NONE), d->staging_bytes, MSC_CATEGORY_WORKSPACE);
    for (p = 0; p <= d->op_count; p++) {
        emit_moves(e, d, &d->drops, p, MSC_EVENT_DROP);
        emit_moves(e, d, &d->puts, p, MSC_EVENT_PUT);
        emit_frees(e, d, p);
        emit_returns(e, d, p);
        for (i = d->redos.first[p]; i < d->redos.first[p + 1]; i++)
            emit_recompute(e, d, &d->plan.regions[d->redos.items[i]]);
        if (p < d->op_count)
            emit_op(e, d, p);
    }
}

/* ---- arrays of the right size --------------------------------------------------------------------- */

/* NULL and OK for an empty array. */
static msc_status take(msc_trace *trace, uint64_t count, size_t item_bytes, void **out, msc_error *err)
{
    size_t bytes = SIZE_MAX;

    *out = NULL;
    if (count == 0)
        return MSC_OK;
    if (count <= SIZE_MAX && msc__mul_size((size_t)count, item_bytes, &bytes))
        *out = msc__alloc(trace->ctx, bytes);
    return *out == NULL ? msc__fail_memory(err, "a trace", bytes) : MSC_OK;
}

static msc_status take_arrays(msc_trace *trace, const emitter *e, msc_error *err)
{
    void *events = NULL;
    void *instances = NULL;
    msc_status status = take(trace, e->count, sizeof(msc_event), &events, err);

    trace->events = events;
    trace->event_count = e->count;
    if (status == MSC_OK)
        status = take(trace, e->next_id, sizeof(msc_instance), &instances, err);
    trace->instances = instances;
    trace->instance_count = e->next_id;
    trace->op_event_count = e->op_events;
    return status;
}

/* ---- lifecycle ----------------------------------------------------------------------------------- */

static msc_status write_events(msc_trace *trace, const msc__derivation *d, msc__scratch *scratch,
                               msc_error *err)
{
    emitter e = {0};
    msc_status status;

    e.ids = msc__scratch_take(scratch, (size_t)d->buffer_count * 2 + d->plan.count + d->plan.move_count,
                              sizeof *e.ids);
    if (e.ids == NULL)
        return msc__scratch_check(scratch, "a trace", err);
    walk(&e, d);
    if (e.count > UINT32_MAX)
        return msc__fail(err, MSC_EOVERFLOW, "a step of %llu events", (unsigned long long)e.count);
    status = take_arrays(trace, &e, err);
    if (status != MSC_OK)
        return status;
    e.events = trace->events;
    e.instances = trace->instances;
    e.count = 0;
    e.next_id = 0;
    walk(&e, d);
    MSC__ASSERT(e.count == trace->event_count && e.next_id == trace->instance_count);
    return MSC_OK;
}

static msc_status check_plan(const msc_graph *graph, const msc_plan *plan, msc_error *err)
{
    const msc_choice *choices = plan == NULL ? NULL : msc_plan_choices(plan);
    uint32_t count = plan == NULL ? 0 : msc_plan_choice_count(plan);

    if (count > 0 && choices[count - 1].module >= msc_graph_module_count(graph))
        return msc__fail(err, MSC_EINVAL, "the plan names module %u, the graph has %u",
                         choices[count - 1].module, msc_graph_module_count(graph));
    return MSC_OK;
}

msc_status msc_trace_create(msc_context *ctx, const msc_graph *graph, const msc_plan *plan, msc_trace **out,
                            msc_error *err)
{
    msc__scratch scratch = {.ctx = ctx};
    msc__derivation d = {0};
    msc_trace *trace = NULL;
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot create a trace: out is NULL");
    *out = NULL;
    if (ctx == NULL || graph == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot create a trace: context or graph is NULL");
    if (!msc_graph_is_finished(graph))
        return msc__fail(err, MSC_ESTATE, "cannot create a trace: the graph is not finished");
    status = check_plan(graph, plan, err);
    if (status != MSC_OK)
        return status;
    trace = msc__alloc(ctx, sizeof *trace);
    if (trace == NULL)
        return msc__fail_memory(err, "a trace", sizeof *trace);
    trace->ctx = ctx;
    trace->op_count = msc_graph_op_count(graph);
    status = msc__derive(&d, &scratch, graph, plan, err);
    if (status == MSC_OK)
        status = write_events(trace, &d, &scratch, err);
    msc__scratch_fini(&scratch);
    if (status != MSC_OK) {
        msc_trace_destroy(trace);
        return status;
    }
    *out = trace;
    return MSC_OK;
}

void msc_trace_destroy(msc_trace *trace)
{
    if (trace == NULL)
        return;
    msc__free(trace->ctx, trace->events, (size_t)trace->event_count * sizeof(msc_event));
    msc__free(trace->ctx, trace->instances, (size_t)trace->instance_count * sizeof(msc_instance));
    msc__free(trace->ctx, trace, sizeof *trace);
}

uint32_t msc__trace_op_count(const msc_trace *trace)
{
    return trace->op_count;
}

msc_context *msc__trace_context(const msc_trace *trace)
{
    return trace->ctx;
}

const msc_event *msc_trace_events(const msc_trace *trace)
{
    return trace->events;
}

uint64_t msc_trace_event_count(const msc_trace *trace)
{
    return trace->event_count;
}

uint32_t msc_trace_instance_count(const msc_trace *trace)
{
    return trace->instance_count;
}

const msc_instance *msc_trace_instances(const msc_trace *trace)
{
    return trace->instances;
}

uint64_t msc_trace_op_event_count(const msc_trace *trace)
{
    return trace->op_event_count;
}
