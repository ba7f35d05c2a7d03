/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The search: walks over sets of candidates that leave a good frontier behind.
 *
 * No walk knows the budget. Each moves from set to set, and every set that is looked at, also one that is not
 * taken, is offered to the frontier with its exact peak and time. The walks complement each other:
 *
 *  forward     from the plain step, always the move with the most peak bytes per nanosecond. A move
 * checkpoints one more module, in place of what is checkpointed inside it. Of a group of interchangeable
 *              modules only the first and the last are tried. When no move lowers the peak (it is reached at
 *              several moments, say), the move that best lowers bytes above a level just under it.
 *  whole       whole groups at a time, towards the smallest peak: the shape of good plans for repeated
 * blocks. polish      from the smallest plan so far: any change of one module that makes the peak smaller
 * still. backward    from the smallest plan: as the target rises in steps, drop what costs most time while
 * the peak stays below the target. sweep       of each group the first k, the last k, k evenly spaced; on the
 * plain step and on the smallest. exhaustive  every antichain, when there are few candidates.
 *
 * All is deterministic: order is by group and module, ties go to what comes first, and the effort is limited
 * by a count of evaluations, not by a clock. Walks never recurse. Sets are rows of bits; `covered` and
 * `split` count, per candidate, the active candidates above and below it.
 *
 * Cost: evaluations × (points of a candidate + blocks of the fit).
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "decide/decide_walker.h"

#define EXHAUSTIVE_CANDIDATES 12u
#define MOST_SWEEPS 32u /* numbers k that a sweep tries */
#define BACKWARD_TARGETS 24u
#define POLISH_EVALUATIONS 2048u
/* Evaluations, times blocks of the fit: about a second of work. */
#define MOST_BLOCK_VISITS ((uint64_t)1 << 28)
#define LEAST_EVALUATIONS 4096u

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

    return c->level_bytes == UINT64_MAX ? peak_bytes : msc__fit_excess(s->fit, c->level_bytes);
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

static bool step_forward(msc__walker *s, uint64_t level_bytes)
{
    contest c = {.level_bytes = level_bytes, .before_ns = s->added_ns};

    c.before = measure(s, &c);
    if (s->model->usable_count <= MSC__FEW_CANDIDATES)
        try_all(s, &c);
    else
        try_ends_of_groups(s, &c);
    msc__walker_make(s, c.best);
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
            moved |= take_if_smaller(s, (msc__move){MSC__MOVE_GROUP, s->by_merit[i]});
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
    uint64_t left = s->evaluations > POLISH_EVALUATIONS ? s->evaluations - POLISH_EVALUATIONS : 0;
    bool moved = true;
    uint32_t round;
    uint32_t i;

    msc__walker_evaluate(s);
    while (moved && msc__walker_may_go_on(s) && s->evaluations > left) {
        moved = false;
        for (round = 0; round < 2; round++) {
            for (i = 0; i < s->model->usable_count && s->evaluations > left && msc__walker_may_go_on(s);
                 i++) {
                msc__move m = polish_move(s, s->by_cost[i], round);
                if (m.kind != MSC__MOVE_NONE)
                    moved |= take_if_smaller(s, m);
            }
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------------- */

/* Drops what can be dropped with the peak at most `target_bytes`. */
static void drop_under(msc__walker *s, uint64_t target_bytes, const uint32_t *order)
{
    uint32_t i;

    for (i = 0; i < s->model->usable_count && msc__walker_may_go_on(s); i++) {
        if (!msc__walker_has(s, order[i]))
            continue;
        msc__walker_make(s, (msc__move){MSC__MOVE_DROP, order[i]});
        if (msc__walker_evaluate(s) > target_bytes)
            msc__walker_undo(s);
        s->log_count = 0;
    }
}

static void walk_backward(msc__walker *s, const uint32_t *order)
{
    uint64_t plain_bytes = s->fit->plain_peak_bytes;
    uint64_t smallest_bytes;
    uint32_t i;

    go_to_smallest(s);
    smallest_bytes = msc__walker_evaluate(s);
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
    for (i = 0; i < count && msc__walker_may_go_on(s); i++) {
        msc__walker_make(
            s, (msc__move){MSC__MOVE_ADD, members->items[last ? first + count - 1 - i : first + i]});
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
    uint32_t g;

    for (g = 0; g < s->model->group_count && msc__walker_may_go_on(s); g++) {
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
    if (count > 0)
        qsort(list, count, sizeof *list, compare_cost);
    for (i = 0; i < count; i++)
        s->by_cost[i] = list[i].id;
    if (count > 0)
        qsort(list, count, sizeof *list, compare_cost_late);
    for (i = 0; i < count; i++)
        s->by_cost_late[i] = list[i].id;
    for (i = 0; i < model->group_count; i++) {
        const msc__candidate *c = &model->candidates[model->members.items[model->members.first[i]]];
        list[i] = (ranked){c->saved_bytes, (uint64_t)(c->cost_ns > 0 ? c->cost_ns : 1), i};
    }
    if (model->group_count > 0)
        qsort(list, model->group_count, sizeof *list, compare_merit);
    for (i = 0; i < model->group_count; i++)
        s->by_merit[i] = list[i].id;
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
    s->evaluations = MOST_BLOCK_VISITS / (s->fit->block_count + 64);
    if (s->evaluations < LEAST_EVALUATIONS)
        s->evaluations = LEAST_EVALUATIONS;
    return MSC_OK;
}

static void walk(msc__walker *s)
{
    msc__walker_evaluate(s);
    walk_forward(s);
    walk_whole(s);
    msc__walker_go_to(s, NULL);
    walk_whole(s);
    go_to_smallest(s);
    polish(s);
    walk_backward(s, s->by_cost);
    walk_backward(s, s->by_cost_late);
    sweep_groups(s, NULL);
    msc__walker_note_smallest(s);
    sweep_groups(s, s->start);
    msc__walk_improve(s);
    if (s->model->usable_count <= EXHAUSTIVE_CANDIDATES)
        msc__walk_everywhere(s);
    msc__walker_go_to(s, NULL);
}

msc_status msc__search(const msc__model *model, msc__fit *fit, msc__frontier *frontier, msc_error *err)
{
    msc__walker s = {.model = model, .fit = fit, .frontier = frontier, .err = err};
    msc__scratch scratch = {.ctx = model->scratch.ctx};
    msc_status status = prepare(&s, &scratch);

    if (status == MSC_OK) {
        walk(&s);
        status = s.status;
    }
    msc__scratch_fini(&scratch);
    return status;
}
