/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What comes back early.
 *
 *      backward     | use of R      |  …       | use of Q
 *      live         |~~~\__/~~\____/~\________/|~~~            below the step's peak in between
 *      early        |==========================|               of Q: as much as fits under that peak
 *
 * Q's copies then hide behind R's backward, instead of being waited for with Q's first use, and the step peaks where
 * it peaked before. How much that is, is one number per choice: of a module that is called more than once, the least.
 *
 * Between two neighbours the bytes of one pair are the only early ones, so pairs are looked at each for itself.
 */
#include "sim/sim_ahead.h"

#include "base/error.h"
#include "base/invariant.h"
#include "sim/sim_derive.h"

/* ---- what follows what ----------------------------------------------------------------------------- */

static bool brings_back(const msc__plan_regions *plan, const msc__region *region, msc__follow *out)
{
    uint32_t i;

    *out = (msc__follow){.next = MSC_NONE, .first_use = MSC_NONE};
    MSC__ASSERT(region->first_move + region->move_count <= plan->move_count);
    for (i = region->first_move; i < region->first_move + region->move_count; i++) {
        if (plan->moves[i].use < out->first_use)
            out->first_use = plan->moves[i].use;
        if (plan->moves[i].use != MSC_NONE && plan->moves[i].use > out->next_use)
            out->next_use = plan->moves[i].use;
    }
    return out->first_use != MSC_NONE;
}

/*
 * Entry i follows entry i + 1 if backward uses them in the opposite order of forward, without overlap: all uses of
 * later regions are over with the first one of i + 1, and its own with the first one of i, which comes before all
 * of earlier regions. Here `next_use` is the last use still.
 */
static void link_follows(msc__follow *follows, uint32_t count)
{
    uint32_t least = MSC_NONE; /* first use of all entries before i */
    uint32_t most = 0;         /* last use of all entries behind i + 1 */
    uint32_t i;

    for (i = 0; i + 1 < count; i++) {
        MSC__ASSERT(follows[i].region < follows[i + 1].region);
        follows[i + 1].uncertain |=
            least < follows[i].first_use || follows[i + 1].next_use > follows[i].first_use;
        least = follows[i].first_use < least ? follows[i].first_use : least;
    }
    for (i = count; i-- > 1;) {
        uint32_t last_use = follows[i].next_use;
        follows[i].uncertain |= most > follows[i].first_use;
        most = last_use > most ? last_use : most;
        follows[i].next = follows[i - 1].region;
        follows[i].next_use = follows[i - 1].first_use;
    }
}

uint32_t msc__follows_of_plan(const msc__plan_regions *plan, msc__follow *out)
{
    uint32_t count = 0;
    uint8_t uncertain = 0;
    uint32_t r;

    for (r = 0; r < plan->count; r++) {
        if (!brings_back(plan, &plan->regions[r], &out[count])) {
            uncertain |= plan->regions[r].move_count > 0;
            continue;
        }
        out[count].region = r;
        out[count++].uncertain = uncertain;
        uncertain = 0;
    }
    link_follows(out, count);
    return count;
}

/* ---- the rule of replays --------------------------------------------------------------------------- */

static uint64_t rounded(uint64_t bytes, uint64_t granule_bytes)
{
    return (bytes + granule_bytes - 1) / granule_bytes * granule_bytes;
}

/* How many of a region's moves, which are in order of use, may be early: they come back with the first use, and fit. */
static uint32_t count_early(const msc__moved *moves, uint32_t count, uint64_t most_bytes,
                            uint64_t granule_bytes)
{
    uint64_t taken = 0;
    uint32_t i;

    for (i = 0; i < count && moves[i].back == moves[0].use; i++) {
        MSC__ASSERT(i == 0 || moves[i].use >= moves[i - 1].use);
        taken += rounded(moves[i].size_bytes, granule_bytes);
        if (taken > most_bytes)
            break;
    }
    return i;
}

void msc__moves_bring_early(const msc_graph *graph, const msc_plan *plan, msc__plan_regions *regions,
                            msc__follow *follows)
{
    const msc_call *calls = msc_graph_calls(graph);
    uint32_t count = msc__follows_of_plan(regions, follows);
    uint32_t i;

    for (i = 0; i < count; i++) {
        const msc__region *region = &regions->regions[follows[i].region];
        const msc__region *next = &regions->regions[follows[i].next == MSC_NONE ? 0 : follows[i].next];
        msc__moved *moves = regions->moves + next->first_move;
        uint32_t choice = msc_plan_find(plan, calls[region->first_call].module);
        uint32_t early;
        if (follows[i].next == MSC_NONE || follows[i].uncertain ||
            msc_plan_choices(plan)[choice].ahead_bytes == 0)
            continue;
        MSC__ASSERT(choice < msc_plan_choice_count(plan) && next < region);
        msc__moves_by_use(moves, next->move_count);
        early = count_early(moves, next->move_count, msc_plan_choices(plan)[choice].ahead_bytes, 1);
        while (early-- > 0)
            moves[early].back = follows[i].first_use;
        msc__moves_by_order(moves, next->move_count);
    }
}

/* ---- how much --------------------------------------------------------------------------------------- */

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
            live_bytes += rounded(event->size_bytes, o->granule_bytes);
        else if (event->kind == MSC_EVENT_FREE)
            live_bytes -= rounded(event->size_bytes, o->granule_bytes);
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
    count = count_early(moves, next->move_count, most, o->granule_bytes);
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
