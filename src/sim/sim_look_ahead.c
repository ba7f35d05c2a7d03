/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much may come back early.
 *
 *      backward     | use of R      |  …       | use of Q
 *      live         |~~~\__/~~\____/~\________/|~~~            below the step's peak in between
 *      early        |==========================|               of Q: as much as fits under that peak
 *
 * The step peaks where it peaked before. It is one number per choice: of a module that is called more than once, the least.
 *
 * Between two neighbours the bytes of one pair are the only early ones, so pairs are looked at each for itself.
 */
#include "sim/sim_look_ahead.h"

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "sim/sim_ahead.h"
#include "sim/sim_derive.h"

/* What the search for it works on. */
typedef struct outlook {
    msc__scratch scratch;
    msc__derivation derivation;
    msc__follow *follows;
    uint64_t
        *level; /* per position: most bytes that are live from what comes back there on, up to the next */
    uint64_t *ahead_bytes; /* per choice; UINT64_MAX: nothing is known against any number */
    uint64_t peak_bytes;
    uint64_t granule_bytes;
    uint64_t window_bytes; /* more than that does not come back ahead of its use */
} outlook;

static void note_level(outlook *o, uint32_t position, uint64_t live_bytes)
{
    MSC__ASSERT(position < o->derivation.op_count + 2);
    if (o->level[position] < live_bytes)
        o->level[position] = live_bytes;
    if (o->peak_bytes < live_bytes)
        o->peak_bytes = live_bytes;
}

/* A position begins with what comes back there; frees before that are still of the one before. */
static void find_levels(outlook *o, const msc_trace *trace)
{
    const msc_event *events = msc_trace_events(trace);
    const msc_instance *instances = msc_trace_instances(trace);
    uint64_t live_bytes = 0;
    uint32_t position = 0;
    uint32_t next = 0;
    uint64_t i;

    for (i = 0; i < msc_trace_event_count(trace); i++) {
        const msc_event *event = &events[i];
        if (event->kind == MSC_EVENT_OP)
            next = event->id + 1;
        if (event->kind == MSC_EVENT_OP)
            position = event->id;
        else if (event->kind == MSC_EVENT_RECOMPUTE ||
                 (event->kind == MSC_EVENT_ALLOC && instances[event->id].returned))
            position = next;
        if (event->kind == MSC_EVENT_ALLOC)
            live_bytes += msc__round_up_u64(event->size_bytes, o->granule_bytes);
        else if (event->kind == MSC_EVENT_FREE)
            live_bytes -= msc__round_up_u64(event->size_bytes, o->granule_bytes);
        note_level(o, position, live_bytes);
    }
}

/* How much of what follows may be early where a region is used. */
static uint64_t bytes_after(outlook *o, const msc__follow *follow)
{
    const msc__region *next;
    msc__moved *moves;
    uint64_t bytes = 0;
    uint64_t most = 0;
    uint32_t count;
    uint32_t i;

    if (follow->next == MSC_NONE)
        return UINT64_MAX;
    if (follow->uncertain)
        return 0;
    MSC__ASSERT(follow->first_use <= follow->next_use && follow->next_use <= o->derivation.op_count);
    for (i = follow->first_use; i < follow->next_use; i++)
        most = o->level[i] > most ? o->level[i] : most;
    MSC__ASSERT(most <= o->peak_bytes);
    next = &o->derivation.plan.regions[follow->next];
    moves = o->derivation.plan.moves + next->first_move;
    msc__moves_by_use(moves, next->move_count);
    most = o->peak_bytes - most < o->window_bytes ? o->peak_bytes - most : o->window_bytes;
    count = msc__count_early(moves, next->move_count, most, o->granule_bytes);
    for (i = 0; i < count; i++)
        bytes += moves[i].size_bytes;
    return bytes;
}

static void find_bytes(outlook *o, const msc_graph *graph, const msc_plan *plan)
{
    uint32_t count = msc__follows_of_plan(&o->derivation.plan, o->follows);
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(plan); i++)
        o->ahead_bytes[i] = UINT64_MAX;
    for (i = 0; i < count; i++) {
        const msc__region *region = &o->derivation.plan.regions[o->follows[i].region];
        uint32_t choice = msc_plan_find(plan, msc_graph_calls(graph)[region->first_call].module);
        uint64_t bytes = bytes_after(o, &o->follows[i]);
        MSC__ASSERT(choice < msc_plan_choice_count(plan));
        if (bytes < o->ahead_bytes[choice])
            o->ahead_bytes[choice] = bytes;
    }
}

static msc_status outlook_init(outlook *o, const msc_graph *graph, const msc_plan *plan, msc_error *err)
{
    msc_status status = msc__derive(&o->derivation, &o->scratch, graph, plan, err);

    if (status != MSC_OK)
        return status;
    o->follows = msc__scratch_take(&o->scratch, o->derivation.plan.count, sizeof *o->follows);
    o->level = msc__scratch_take(&o->scratch, (size_t)o->derivation.op_count + 2, sizeof *o->level);
    o->ahead_bytes = msc__scratch_take(&o->scratch, msc_plan_choice_count(plan), sizeof *o->ahead_bytes);
    return msc__scratch_check(&o->scratch, "what comes back early", err);
}

msc_status msc__plan_look_ahead(msc_context *ctx, const msc_graph *graph, msc_plan *plan,
                                const msc_trace *trace, uint64_t granule_bytes, msc_error *err)
{
    outlook o = {.scratch = {.ctx = ctx},
                 .granule_bytes = granule_bytes,
                 .window_bytes = msc_plan_get_summary(plan)->window_in_bytes};
    msc_status status = outlook_init(&o, graph, plan, err);
    uint32_t i;

    if (status == MSC_OK) {
        find_levels(&o, trace);
        find_bytes(&o, graph, plan);
    }
    for (i = 0; i < msc_plan_choice_count(plan) && status == MSC_OK; i++)
        if (o.ahead_bytes[i] > 0 && o.ahead_bytes[i] != UINT64_MAX)
            status = msc_plan_set_ahead(plan, i, o.ahead_bytes[i], err);
    msc__scratch_fini(&o.scratch);
    return status;
}

void msc__plan_forget_ahead(msc_plan *plan)
{
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(plan); i++)
        if (msc_plan_choices(plan)[i].ahead_bytes > 0)
            msc__ignore(msc_plan_set_ahead(plan, i, 0, NULL));
}
