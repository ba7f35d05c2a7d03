/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The search: walks over sets of candidates that leave a good frontier behind.
 *
 * No walk knows the budget. Each moves from set to set, and every set that is looked at, also one that is not
 * taken, is offered to the frontier with its exact peak and time. The walks complement each other:
 *
 *  forward     from the plain step, always the move with the most peak bytes per nanosecond. A move takes one
 *              more candidate, in place of what overlaps it. Of a group of interchangeable candidates only the
 *              first and the last are tried. When no move lowers the peak (it is reached at several moments,
 *              say), the move that best lowers bytes above a level just under it.
 *  whole       whole groups at a time, added or split into what lies inside, towards the smallest peak: the
 *              shape of good plans for repeated blocks, whose peaks all have to fall before the peak does.
 *  polish      from the smallest plan so far: any change of one candidate that makes the peak smaller still.
 *  backward    from the smallest plan: as the target rises in steps, drop what costs most time, or keep more
 *              of what it recomputes, while the peak stays below the target.
 *  sweep       of each group the first k, the last k, k evenly spaced; on the plain step and on the smallest.
 *  improve     the neighbours of every plan of the frontier, and theirs (decide_improve.c).
 *  everywhere  every antichain, when there are few.
 *
 * All is deterministic: order is by group and module, ties go to what comes first, and the effort is limited
 * by a count of work, not by a clock. Each walk has its share of that, so that on a huge graph none takes from
 * the others what they need. Groups of very many members are walked in larger steps. Walks never recurse.
 * Sets are rows of bits; `covered` and `split` count, per candidate, the active candidates above and below it.
 *
 * Cost: at most MOST_WORK, about a second; of most graphs much less.
 */
#include "decide/decide_search.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "decide/decide_cost.h"
#include "decide/decide_walker.h"

#define EXHAUSTIVE_SETS 4096u
#define EXHAUSTIVE_MOVES 32768u /* where something may move: small graphs have many more ways then */
#define MOST_SWEEPS 32u         /* numbers k that a sweep tries */
#define BACKWARD_TARGETS 24u
#define POLISH_EVALUATIONS 2048u
#define MOST_WORK ((uint64_t)5 << 26) /* blocks of the fit visited: about a second */
#define LEAST_EVALUATIONS 4096u
/* The frontier may hold as many bytes per operation as the graph does. */
#define PLAN_WORDS_PER_OPERATION 8u
#define LEAST_PLANS 1024u
#define MANY_MEMBERS 128u /* groups of more are walked in larger steps */

static void go_to_smallest(msc__walker *s)
{
    msc__walker_note_smallest(s);
    msc__walker_go_to(s, s->start);
}

/* ---- forward --------------------------------------------------------------------------------------- */

/* The best move so far of one forward step. */
typedef struct contest {
    msc__move best;
    uint64_t gain;
    uint64_t cost_ns;
    uint64_t before; /* measure before the move */
    int64_t before_ns;
    uint64_t level_bytes; /* UINT64_MAX: the measure is the peak; otherwise bytes above this */
} contest;

static uint64_t measure(msc__walker *s, const contest *c)
{
    uint64_t peak_bytes = msc__walker_evaluate(s);

    return c->level_bytes == UINT64_MAX || peak_bytes == MSC__FIT_NO_PEAK
               ? peak_bytes
               : msc__fit_excess(s->fit, c->level_bytes);
}

static void try_move(msc__walker *s, contest *c, msc__move m)
{
    uint64_t after;
    int64_t cost_ns;
    uint64_t gain;

    msc__walker_make(s, m);
    after = measure(s, c);
    cost_ns = s->added_ns - c->before_ns;
    msc__walker_undo(s);
    MSC__ASSERT(s->added_ns == c->before_ns);
    if (after >= c->before)
        return;
    gain = c->before - after;
    if (cost_ns < 1)
        cost_ns = 1;
    if (c->best.kind == MSC__MOVE_NONE ||
        msc__cost_compare(gain, (uint64_t)cost_ns, c->gain, c->cost_ns) > 0) {
        c->best = m;
        c->gain = gain;
        c->cost_ns = (uint64_t)cost_ns;
    }
}

static void try_ends_of_groups(msc__walker *s, contest *c)
{
    uint32_t tried = 0;
    uint32_t i;

    for (i = 0; i < s->model->group_count && tried < MSC__MOST_GROUPS; i++) {
        uint32_t first = msc__walker_end_member(s, s->by_merit[i], false, false);
        uint32_t last = msc__walker_end_member(s, s->by_merit[i], false, true);
        if (first == MSC_NONE)
            continue;
        try_move(s, c, (msc__move){MSC__MOVE_ADD, first});
        if (last != first)
            try_move(s, c, (msc__move){MSC__MOVE_ADD, last});
        tried++;
    }
}

static void try_all(msc__walker *s, contest *c)
{
    uint32_t i;

    for (i = 0; i < s->model->candidate_count; i++)
        if (s->model->candidates[i].usable && !msc__walker_has(s, i) && s->covered[i] == 0)
            try_move(s, c, (msc__move){MSC__MOVE_ADD, i});
}

/* What was best for one member of a very large group is done with the next few at the same end, too. */
static void go_on(msc__walker *s, const contest *c)
{
    const msc__buckets *members = &s->model->members;
    uint32_t group = s->model->candidates[c->best.id].group;
    uint32_t more = (members->first[group + 1] - members->first[group]) / MANY_MEMBERS;
    uint64_t before = measure(s, c);
    bool last = msc__walker_end_member(s, group, true, false) != c->best.id;

    for (; more > 0 && msc__walker_may_go_on(s); more--) {
        uint32_t member = msc__walker_end_member(s, group, false, last);
        uint64_t after;
        if (member == MSC_NONE)
            return;
        msc__walker_make(s, (msc__move){MSC__MOVE_ADD, member});
        after = measure(s, c);
        if (after >= before) {
            msc__walker_undo(s);
            return;
        }
        before = after;
    }
}

static bool step_forward(msc__walker *s, uint64_t level_bytes)
{
    contest c = {.level_bytes = level_bytes, .before_ns = s->added_ns};

    c.before = measure(s, &c);
    if (s->model->usable_count <= MSC__FEW_CANDIDATES)
        try_all(s, &c);
    else
        try_ends_of_groups(s, &c);
    MSC__ASSERT(c.best.kind == MSC__MOVE_NONE || (c.gain > 0 && c.cost_ns > 0));
    msc__walker_make(s, c.best);
    if (c.best.kind != MSC__MOVE_NONE)
        go_on(s, &c);
    s->log_count = 0;
    return c.best.kind != MSC__MOVE_NONE;
}

/* Every step adds a candidate that nothing covers and that no later step takes away but for one above it, so
 * there are at most as many steps as candidates. */
static void walk_forward(msc__walker *s)
{
    static const unsigned shifts[] = {8, 5, 3, 1};
    bool moved = true;
    size_t i;

    while (moved && msc__walker_may_go_on(s)) {
        uint64_t peak_bytes = msc__walker_evaluate(s);
        if (peak_bytes <= s->fit->floor_bytes)
            return;
        moved = step_forward(s, UINT64_MAX);
        for (i = 0; i < sizeof shifts / sizeof shifts[0] && !moved; i++)
            moved = step_forward(s, peak_bytes - (peak_bytes >> shifts[i]));
    }
}

/* ---- towards the smallest peak --------------------------------------------------------------------- */

/* Takes the move when the peak becomes smaller, or the time at an equal peak. */
static bool take_if_smaller(msc__walker *s, msc__move m)
{
    uint64_t before_bytes = s->peak_bytes;
    int64_t before_ns = s->added_ns;

    msc__walker_make(s, m);
    msc__walker_evaluate(s);
    if (s->peak_bytes < before_bytes || (s->peak_bytes == before_bytes && s->added_ns < before_ns)) {
        s->log_count = 0;
        return true;
    }
    msc__walker_undo(s);
    MSC__ASSERT(s->added_ns == before_ns);
    s->peak_bytes = before_bytes;
    return false;
}

static void walk_whole(msc__walker *s)
{
    bool moved = true;
    uint32_t i;

    msc__walker_evaluate(s);
    while (moved && msc__walker_may_go_on(s)) {
        moved = false;
        for (i = 0; i < s->model->group_count && msc__walker_may_go_on(s); i++)
            moved |= take_if_smaller(s, (msc__move){MSC__MOVE_GROUP, s->by_merit[i]}) ||
                     take_if_smaller(s, (msc__move){MSC__MOVE_SPLIT_GROUP, s->by_merit[i]});
    }
}

static msc__move polish_move(const msc__walker *s, uint32_t candidate, uint32_t round)
{
    if (!msc__walker_has(s, candidate))
        return (msc__move){round == 0 ? MSC__MOVE_ADD : MSC__MOVE_NONE, candidate};
    return (msc__move){round == 0 ? MSC__MOVE_DROP : MSC__MOVE_SPLIT, candidate};
}

static void polish(msc__walker *s)
{
    uint64_t held = msc__walker_hold(s, POLISH_EVALUATIONS * msc__walker_visit(s));
    bool moved = true;
    uint32_t round;
    uint32_t i;

    msc__walker_evaluate(s);
    while (moved && msc__walker_may_go_on(s)) {
        moved = false;
        for (round = 0; round < 2; round++) {
            for (i = 0; i < s->model->usable_count && msc__walker_may_go_on(s); i++) {
                msc__move m = polish_move(s, s->by_cost[i], round);
                if (m.kind != MSC__MOVE_NONE)
                    moved |= take_if_smaller(s, m);
            }
        }
    }
    s->work += held;
}

/* ---- backward -------------------------------------------------------------------------------------- */

/* Makes a move unless the peak then exceeds a target. */
static bool take_under(msc__walker *s, msc__move m, uint64_t target_bytes)
{
    bool taken;

    msc__walker_make(s, m);
    taken = msc__walker_evaluate(s) <= target_bytes;
    if (!taken)
        msc__walker_undo(s);
    s->log_count = 0;
    return taken;
}

/* Of an active candidate, keeps more and more as long as the peak stays below the target. */
static void relax_under(msc__walker *s, uint32_t candidate, uint64_t target_bytes)
{
    uint32_t way = s->model->candidates[candidate].next;

    for (; way != MSC_NONE && msc__walker_may_go_on(s); way = s->model->candidates[way].next)
        if (s->model->candidates[way].usable && !take_under(s, (msc__move){MSC__MOVE_ADD, way}, target_bytes))
            return;
}

/* Drops what can be dropped with the peak at most `target_bytes`, and relaxes the rest. */
static void drop_under(msc__walker *s, uint64_t target_bytes, const uint32_t *order)
{
    uint32_t i;

    for (i = 0; i < s->model->usable_count && msc__walker_may_go_on(s); i++) {
        if (!msc__walker_has(s, order[i]))
            continue;
        if (!take_under(s, (msc__move){MSC__MOVE_DROP, order[i]}, target_bytes))
            relax_under(s, order[i], target_bytes);
    }
}

static void walk_backward(msc__walker *s, const uint32_t *order)
{
    uint64_t plain_bytes = s->fit->plain_peak_bytes;
    uint64_t smallest_bytes;
    uint32_t i;

    go_to_smallest(s);
    smallest_bytes = msc__walker_evaluate(s);
    MSC__ASSERT(smallest_bytes <= plain_bytes);
    for (i = 0; i < BACKWARD_TARGETS && msc__walker_may_go_on(s); i++)
        drop_under(s, smallest_bytes + (plain_bytes - smallest_bytes) / BACKWARD_TARGETS * i, order);
}

/* ---- sweeps ---------------------------------------------------------------------------------------- */

static void clear_group(msc__walker *s, uint32_t group)
{
    const msc__buckets *members = &s->model->members;
    uint32_t i;

    for (i = members->first[group]; i < members->first[group + 1]; i++)
        if (msc__walker_has(s, members->items[i]))
            msc__walker_make(s, (msc__move){MSC__MOVE_DROP, members->items[i]});
}

static void sweep_end(msc__walker *s, uint32_t group, const uint64_t *ground, bool last)
{
    const msc__buckets *members = &s->model->members;
    uint32_t first = members->first[group];
    uint32_t count = members->first[group + 1] - first;
    uint32_t i;

    msc__walker_go_to(s, ground);
    clear_group(s, group);
    MSC__ASSERT(count > 1);
    for (i = 0; i < count && msc__walker_may_go_on(s); i++) {
        msc__walker_make(
            s, (msc__move){MSC__MOVE_ADD, members->items[last ? first + count - 1 - i : first + i]});
        if (i % (count / MANY_MEMBERS + 1) == 0 || i == count - 1)
            msc__walker_evaluate(s);
    }
}

static void sweep_evenly(msc__walker *s, uint32_t group, const uint64_t *ground)
{
    const msc__buckets *members = &s->model->members;
    uint32_t first = members->first[group];
    uint32_t count = members->first[group + 1] - first;
    uint32_t step = count / MOST_SWEEPS + 1;
    uint32_t k;
    uint32_t i;

    for (k = step; k < count && msc__walker_may_go_on(s); k += step) {
        msc__walker_go_to(s, ground);
        clear_group(s, group);
        for (i = 0; i < k; i++)
            msc__walker_make(s, (msc__move){MSC__MOVE_ADD, members->items[first + (uint64_t)i * count / k]});
        msc__walker_evaluate(s);
    }
}

static void sweep_groups(msc__walker *s, const uint64_t *ground)
{
    uint32_t i;

    for (i = 0; i < s->model->group_count && msc__walker_may_go_on(s); i++) {
        uint32_t g = s->by_merit[i];
        if (s->model->members.first[g + 1] - s->model->members.first[g] < 2)
            continue;
        sweep_end(s, g, ground, false);
        sweep_end(s, g, ground, true);
        sweep_evenly(s, g, ground);
    }
}

/* ---- all of it ------------------------------------------------------------------------------------- */

typedef struct ranked {
    uint64_t bytes; /* 0 when ranked by cost alone */
    uint64_t cost_ns;
    uint32_t id;
} ranked;

static int compare_cost(const void *left, const void *right)
{
    const ranked *a = left;
    const ranked *b = right;

    if (a->cost_ns != b->cost_ns)
        return a->cost_ns > b->cost_ns ? -1 : 1;
    return (a->id > b->id) - (a->id < b->id);
}

static int compare_cost_late(const void *left, const void *right)
{
    const ranked *a = left;
    const ranked *b = right;

    if (a->cost_ns != b->cost_ns)
        return a->cost_ns > b->cost_ns ? -1 : 1;
    return (a->id < b->id) - (a->id > b->id);
}

static int compare_merit(const void *left, const void *right)
{
    const ranked *a = left;
    const ranked *b = right;
    int order = msc__cost_compare(b->bytes, b->cost_ns, a->bytes, a->cost_ns);

    return order != 0 ? order : (a->id > b->id) - (a->id < b->id);
}

static void rank(msc__walker *s, ranked *list)
{
    const msc__model *model = s->model;
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < model->candidate_count; i++)
        if (model->candidates[i].usable)
            list[count++] = (ranked){0, (uint64_t)model->candidates[i].cost_ns, i};
    MSC__ASSERT(count == model->usable_count);
    if (count > 0)
        qsort(list, count, sizeof *list, compare_cost);
    for (i = 0; i < count; i++)
        s->by_cost[i] = list[i].id;
    if (count > 0)
        qsort(list, count, sizeof *list, compare_cost_late);
    for (i = 0; i < count; i++)
        s->by_cost_late[i] = list[i].id;
    for (i = 0; i < model->group_count; i++) {
        MSC__ASSERT(model->members.first[i] < model->members.first[i + 1]);
        const msc__candidate *c = &model->candidates[model->members.items[model->members.first[i]]];
        list[i] = (ranked){c->saved_bytes, (uint64_t)(c->cost_ns > 0 ? c->cost_ns : 1), i};
    }
    if (model->group_count > 0)
        qsort(list, model->group_count, sizeof *list, compare_merit);
    for (i = 0; i < model->group_count; i++)
        s->by_merit[i] = list[i].id;
}

static void set_limits(msc__walker *s)
{
    uint64_t most_plans = (uint64_t)s->model->op_count * PLAN_WORDS_PER_OPERATION / s->frontier->word_count;

    s->work = LEAST_EVALUATIONS * msc__walker_visit(s);
    if (s->work < MOST_WORK)
        s->work = MOST_WORK;
    if (most_plans < LEAST_PLANS)
        most_plans = LEAST_PLANS;
    s->most_plans = most_plans < UINT32_MAX ? (uint32_t)most_plans : UINT32_MAX;
}

static msc_status prepare(msc__walker *s, msc__scratch *scratch)
{
    size_t count = s->model->candidate_count;
    ranked *list = msc__scratch_take(scratch, count, sizeof *list);

    s->set = msc__scratch_take(scratch, s->frontier->word_count, sizeof *s->set);
    s->start = msc__scratch_take(scratch, s->frontier->word_count, sizeof *s->start);
    s->covered = msc__scratch_take(scratch, count, sizeof *s->covered);
    s->split = msc__scratch_take(scratch, count, sizeof *s->split);
    s->log = msc__scratch_take(scratch, 3 * count + 1, sizeof *s->log);
    s->by_cost = msc__scratch_take(scratch, count, sizeof *s->by_cost);
    s->by_cost_late = msc__scratch_take(scratch, count, sizeof *s->by_cost_late);
    s->entering = msc__scratch_take(scratch, count + 2 * MSC__MOST_GROUPS, sizeof *s->entering);
    s->leaving = msc__scratch_take(scratch, count + 2 * MSC__MOST_GROUPS, sizeof *s->leaving);
    s->by_merit = msc__scratch_take(scratch, count, sizeof *s->by_merit);
    if (scratch->failed_bytes > 0)
        return msc__scratch_check(scratch, "a search", s->err);
    rank(s, list);
    set_limits(s);
    return MSC_OK;
}

static bool moves_anything(const msc__model *model)
{
    uint32_t i;

    for (i = 0; i < model->candidate_count; i++)
        if (model->candidates[i].usable && msc__moves(&model->candidates[i]))
            return true;
    return false;
}

static void walk(msc__walker *s)
{
    const uint64_t share = s->work / 10;
    uint64_t held = msc__walker_hold(s, 3 * share);

    msc__walker_evaluate(s);
    walk_forward(s);
    s->work += held;
    held = msc__walker_hold(s, share);
    walk_whole(s);
    s->work += held;
    held = msc__walker_hold(s, share);
    msc__walker_go_to(s, NULL);
    walk_whole(s);
    go_to_smallest(s);
    polish(s);
    s->work += held;
    held = msc__walker_hold(s, 2 * share);
    walk_backward(s, s->by_cost);
    walk_backward(s, s->by_cost_late);
    s->work += held;
    held = msc__walker_hold(s, share);
    sweep_groups(s, NULL);
    s->work += held;
    held = msc__walker_hold(s, 2 * share);
    msc__walker_note_smallest(s);
    sweep_groups(s, s->start);
    s->work += held;
    msc__walk_improve(s);
    msc__walk_everywhere(s, moves_anything(s->model) ? EXHAUSTIVE_MOVES : EXHAUSTIVE_SETS);
    msc__walker_go_to(s, NULL);
}

msc_status msc__search(const msc__model *model, msc__fit *fit, msc__frontier *frontier, msc_error *err)
{
    msc__walker s = {.model = model, .fit = fit, .frontier = frontier, .err = err};
    msc__scratch scratch = {.ctx = model->scratch.ctx};
    msc_status status = prepare(&s, &scratch);

    MSC__ASSERT(fit->moved_bytes == 0 && fit->rerun_count == 0);
    if (status == MSC_OK) {
        walk(&s);
        MSC__ASSERT(s.added_ns == 0 && fit->moved_bytes == 0 && fit->rerun_count == 0);
        status = s.status;
    }
    msc__scratch_fini(&scratch);
    return status;
}
