/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a set of candidates to the choices of a plan.
 *
 * Every module in which something is saved gets a choice. Which candidate treats it is looked up in a table
 * over modules, since a run treats several:
 *
 *      set         { block 3 keeping two outputs,  run of layers 5, 6, 7 }
 *      module      …  3: selective   4: keep   5: checkpoint   6: checkpoint, joined   7: checkpoint, joined
 *
 * What the other way round would bring is computed with the fit: the set, with one candidate taken out or put
 * in place of what it overlaps.
 */
#include "decide/decide_plan.h"

#include "base/error.h"
#include "base/invariant.h"
#include "decide/decide_cost.h"

/* Which active candidate treats a module, plus 1; 0: none. */
typedef struct table {
    msc__scratch scratch;
    uint32_t *active;
    uint8_t *joined;
} table;

static void enter(const msc__model *model, table *t, uint32_t c)
{
    const msc__candidate *candidate = &model->candidates[c];
    const msc__region *region = &model->regions[candidate->first_region];
    uint32_t call;

    MSC__ASSERT(t->active[candidate->module] == 0); /* or two candidates treat it */
    t->active[candidate->module] = c + 1;
    if (!candidate->is_run)
        return;
    for (call = region->first_call; call <= region->last_call; call = model->last_call[call] + 1) {
        MSC__ASSERT(t->active[model->calls[call].module] == 0 || call == region->first_call);
        t->active[model->calls[call].module] = c + 1;
        t->joined[model->calls[call].module] = call != region->first_call;
    }
}

static msc_status table_init(table *t, const msc__model *model, const uint64_t *set, msc_error *err)
{
    uint32_t i;

    *t = (table){.scratch = {.ctx = model->scratch.ctx}};
    t->active = msc__scratch_take(&t->scratch, model->module_count, sizeof *t->active);
    t->joined = msc__scratch_take(&t->scratch, model->module_count, sizeof *t->joined);
    if (t->scratch.failed_bytes > 0)
        return msc__scratch_check(&t->scratch, "a plan", err);
    for (i = 0; i < model->candidate_count; i++)
        if (msc__set_has(set, i))
            enter(model, t, i);
    return MSC_OK;
}

static msc_status add_kept(const msc__model *model, const msc__candidate *candidate, msc_plan *plan,
                           msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = 0; i < candidate->kept_count && status == MSC_OK; i++)
        status = msc_plan_keep(plan, msc__kept_of(model, candidate)[i], err);
    return status;
}

static msc_status add_moved(const msc__model *model, const msc__candidate *candidate, msc_plan *plan,
                            msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = 0; i < candidate->moved_count && status == MSC_OK; i++)
        status = msc_plan_move(plan, model->moved[candidate->first_moved + i], err);
    return status;
}

/* Adds a choice, and what the candidate behind it (NULL: none) keeps and moves. */
static msc_status add_choice(const msc__model *model, const msc__candidate *candidate,
                             const msc_choice *choice, msc_plan *plan, msc_error *err)
{
    msc_status status = msc_plan_add(plan, choice, err);

    if (status == MSC_OK && candidate != NULL)
        status = add_kept(model, candidate, plan, err);
    if (status == MSC_OK && candidate != NULL && !choice->joined)
        status = add_moved(model, candidate, plan, err);
    return status;
}

static msc_action action_of(const msc__candidate *candidate)
{
    if (candidate->offload)
        return MSC_ACTION_OFFLOAD;
    return candidate->kept_count > 0 ? MSC_ACTION_SELECTIVE : MSC_ACTION_CHECKPOINT;
}

/* ---- windows --------------------------------------------------------------------------------------- */

void msc__plan_windows(const msc__model *model, const uint64_t *set, msc_plan_summary *summary)
{
    bool moves = false;
    bool reruns = false;
    uint32_t i;

    for (i = 0; i < model->candidate_count; i++) {
        moves |= msc__set_has(set, i) && msc__moves(&model->candidates[i]);
        reruns |= msc__set_has(set, i) && msc__reruns(&model->candidates[i]);
    }
    summary->staging_bytes = (moves ? model->link.staging_bytes : 0) + (reruns ? model->rerun_bytes : 0);
    if (!moves)
        return;
    summary->window_out_bytes = model->link.window_out_bytes;
    summary->window_in_bytes = model->link.window_in_bytes;
}

static msc_status set_windows(const msc__model *model, const uint64_t *set, msc_plan *plan, msc_error *err)
{
    msc_plan_summary summary = {0};

    msc__plan_windows(model, set, &summary);
    return msc_plan_set_summary(plan, &summary, err);
}

/* ---- a plan to be replayed ------------------------------------------------------------------------- */

msc_status msc__plan_of_set(const msc__model *model, const uint64_t *set, msc_plan **plan, msc_error *err)
{
    table t;
    msc_status status = table_init(&t, model, set, err);
    uint32_t m;

    if (status == MSC_OK)
        status = msc_plan_create(model->scratch.ctx, plan, err);
    for (m = 0; m < model->module_count && status == MSC_OK; m++) {
        const msc__candidate *candidate;
        msc_choice choice = {.module = m, .rule = MSC_RULE_CHOSEN, .joined = t.joined[m]};
        if (t.active[m] == 0)
            continue;
        candidate = &model->candidates[t.active[m] - 1];
        MSC__ASSERT(t.active[m] <= model->candidate_count);
        choice.action = (uint8_t)action_of(candidate);
        choice.boundary = candidate->boundary && !choice.joined;
        status = add_choice(model, candidate, &choice, *plan, err);
    }
    if (status == MSC_OK)
        status = set_windows(model, set, *plan, err);
    msc__scratch_fini(&t.scratch);
    return status;
}

/* ---- a plan to be explained ------------------------------------------------------------------------ */

static bool any_in(const uint64_t *set, const msc__buckets *lists, uint32_t candidate)
{
    uint32_t i;

    for (i = lists->first[candidate]; i < lists->first[candidate + 1]; i++)
        if (msc__set_has(set, lists->items[i]))
            return true;
    return false;
}

/* The least bytes per time that any active candidate frees, as a candidate; MSC_NONE: none is active. */
static uint32_t least_rewarding(const msc__model *model, const uint64_t *set)
{
    uint32_t least = MSC_NONE;
    uint32_t i;

    for (i = 0; i < model->candidate_count; i++) {
        const msc__candidate *a = &model->candidates[i];
        const msc__candidate *b = least == MSC_NONE ? NULL : &model->candidates[least];
        if (msc__set_has(set, i) && a->cost_ns > 0 &&
            (b == NULL || msc__cost_compare(a->saved_bytes, (uint64_t)a->cost_ns, b->saved_bytes,
                                            (uint64_t)b->cost_ns) < 0))
            least = i;
    }
    return least;
}

static bool is_costlier(const msc__explained *e, const msc__candidate *a)
{
    const msc__candidate *b = e->least == MSC_NONE ? NULL : &e->model->candidates[e->least];

    return b != NULL && a->cost_ns > 0 && a->saved_bytes > 0 &&
           msc__cost_compare(a->saved_bytes, (uint64_t)a->cost_ns, b->saved_bytes, (uint64_t)b->cost_ns) < 0;
}

/* Rule of a candidate that is not in the set. */
static msc_rule rule_against(const msc__explained *e, uint32_t candidate)
{
    const msc__model *model = e->model;

    if (!e->allow_checkpoint && !model->candidates[candidate].offload)
        return MSC_RULE_DISABLED;
    if (any_in(e->set, &model->above, candidate))
        return MSC_RULE_COVERED;
    if (any_in(e->set, &model->below, candidate))
        return MSC_RULE_SPLIT;
    /* When the budget is not met, nothing is left out that would have helped. */
    if (!e->fits)
        return MSC_RULE_NO_SAVING;
    return is_costlier(e, &model->candidates[candidate]) ? MSC_RULE_COSTLIER : MSC_RULE_NOT_NEEDED;
}

/* Puts everything that a candidate overlaps out of the fit, or back. */
static int64_t set_overlapping(const msc__explained *e, uint32_t candidate, bool active)
{
    const msc__buckets *lists[] = {&e->model->above, &e->model->below};
    int64_t sum_ns = 0;
    uint32_t k;
    uint32_t i;

    for (k = 0; k < 2; k++) {
        for (i = lists[k]->first[candidate]; i < lists[k]->first[candidate + 1]; i++) {
            uint32_t c = lists[k]->items[i];
            if (!msc__set_has(e->set, c))
                continue;
            msc__fit_set(e->fit, c, active);
            sum_ns += e->model->candidates[c].cost_ns;
        }
    }
    return sum_ns;
}

/* Peak and time if a candidate were the other way round. */
static void fill_other(const msc__explained *e, uint32_t candidate, msc_choice *choice)
{
    bool in = msc__set_has(e->set, candidate);
    int64_t cost_ns = e->model->candidates[candidate].cost_ns;

    choice->other_step_ns = e->step_ns + (in ? -cost_ns : cost_ns);
    if (!in)
        choice->other_step_ns -= set_overlapping(e, candidate, false);
    MSC__ASSERT(choice->other_step_ns >= 0);
    msc__fit_set(e->fit, candidate, !in);
    choice->other_peak_bytes = msc__fit_peak(e->fit);
    if (choice->other_peak_bytes == MSC__FIT_NO_PEAK) {
        choice->other_peak_bytes = 0;
        choice->other_step_ns = 0;
    } else {
        choice->other_peak_bytes += msc__fit_staging(e->fit);
    }
    msc__fit_set(e->fit, candidate, in);
    if (!in)
        (void)set_overlapping(e, candidate, true);
}

/* The candidate that a module's choice tells of: the one that treats it, else its checkpoint, else, where it may not
 * be recomputed or that would free nothing, its offload. MSC_NONE: there is none. */
static uint32_t told_candidate(const msc__explained *e, const table *t, uint32_t module)
{
    const msc__subject *subject = &e->model->subjects[module];
    bool can_offload = subject->offload != MSC_NONE && e->model->candidates[subject->offload].usable;

    if (t->active[module] > 0)
        return t->active[module] - 1;
    if (can_offload && (subject->rule != MSC_RULE_NOT_NEEDED || !e->allow_checkpoint))
        return subject->offload;
    return subject->candidate;
}

static void tell_moves(const msc__model *model, const msc__candidate *candidate, msc_choice *choice)
{
    uint32_t r;
    uint32_t i;

    choice->boundary = candidate->boundary;
    choice->transfer_ns = msc__cost_transfers(model, candidate);
    for (r = 0; r < candidate->region_count; r++) {
        const msc__region *region = &model->regions[candidate->first_region + r];
        choice->moved_count += region->move_count;
        for (i = 0; i < region->move_count; i++)
            choice->moved_bytes += model->moves[region->first_move + i].size_bytes;
    }
}

static msc_choice make_choice(const msc__explained *e, const table *t, uint32_t module)
{
    const msc__subject *subject = &e->model->subjects[module];
    uint32_t c = told_candidate(e, t, module);
    msc_choice choice = {.module = module, .action = MSC_ACTION_KEEP, .rule = subject->rule};

    choice.call_count = subject->call_count > UINT16_MAX ? UINT16_MAX : (uint16_t)subject->call_count;
    if (t->active[module] > 0) {
        choice.action = (uint8_t)action_of(&e->model->candidates[c]);
        choice.rule = e->fits ? MSC_RULE_CHOSEN : MSC_RULE_SMALLEST;
        choice.joined = t->joined[module];
        if (!choice.joined)
            tell_moves(e->model, &e->model->candidates[c], &choice);
    } else if (c != MSC_NONE && (c == subject->offload || subject->rule == MSC_RULE_NOT_NEEDED)) {
        choice.rule = (uint8_t)rule_against(e, c);
    }
    if (c == MSC_NONE)
        return choice;
    choice.saved_bytes = e->model->candidates[c].saved_bytes;
    choice.cost_ns = e->model->candidates[c].cost_ns;
    if (e->model->candidates[c].usable || t->active[module] > 0)
        fill_other(e, c, &choice);
    return choice;
}

static msc_status add_choices(const msc__explained *e, const table *t, msc_plan *plan, msc_error *err)
{
    const msc__model *model = e->model;
    msc_status status = MSC_OK;
    uint32_t m;

    for (m = 0; m < model->module_count && status == MSC_OK; m++) {
        msc_choice choice;
        if (!model->subjects[m].has_saves && t->active[m] == 0)
            continue;
        choice = make_choice(e, t, m);
        status = add_choice(model, t->active[m] > 0 ? &model->candidates[t->active[m] - 1] : NULL, &choice,
                            plan, err);
    }
    return status == MSC_OK ? set_windows(model, e->set, plan, err) : status;
}

static void set_all(const msc__explained *e, bool active)
{
    uint32_t i;

    for (i = 0; i < e->model->candidate_count; i++)
        if (msc__set_has(e->set, i))
            msc__fit_set(e->fit, i, active);
}

msc_status msc__plan_explain(msc__explained *e, msc_plan **plan, msc_error *err)
{
    table t;
    msc_status status = table_init(&t, e->model, e->set, err);

    e->least = least_rewarding(e->model, e->set);
    if (status == MSC_OK)
        status = msc_plan_create(e->model->scratch.ctx, plan, err);
    if (status == MSC_OK) {
        MSC__ASSERT(e->fit->moved_bytes == 0 && e->fit->rerun_count == 0);
        set_all(e, true);
        status = add_choices(e, &t, *plan, err);
        set_all(e, false);
        MSC__ASSERT(e->fit->moved_bytes == 0 && e->fit->rerun_count == 0);
    }
    msc__scratch_fini(&t.scratch);
    return status;
}
