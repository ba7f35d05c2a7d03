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
#include "decide/decide_internal.h"

#define FEW_CANDIDATES 24u /* up to here forward tries every candidate, not only the ends of groups */
#define EXHAUSTIVE_CANDIDATES 12u
#define MOST_GROUPS 24u /* groups that one forward step tries, the most rewarding ones */
#define MOST_SWEEPS 32u /* numbers k that a sweep tries */
#define BACKWARD_TARGETS 24u
#define POLISH_EVALUATIONS 2048u
/* Evaluations, times blocks of the fit: about a second of work. */
#define MOST_BLOCK_VISITS ((uint64_t)1 << 28)
#define LEAST_EVALUATIONS 4096u

typedef enum move_kind { MOVE_NONE, MOVE_ADD, MOVE_DROP, MOVE_SPLIT, MOVE_GROUP } move_kind;

typedef struct move {
    move_kind kind;
    uint32_t id; /* candidate, or group */
} move;

typedef struct search {
    const msc__model *model;
    msc__fit *fit;
    msc__frontier *frontier;
    msc_error *err;
    msc_status status;      /* the first failure; everything does nothing after it */
    uint64_t *set;          /* the present set */
    uint64_t *start;        /* a set to come back to */
    uint32_t *covered;      /* per candidate: active ones above it */
    uint32_t *split;        /* per candidate: active ones below it */
    uint32_t *log;          /* candidates changed by the present move */
    uint32_t *by_cost;      /* usable candidates, dearest first, then in module order */
    uint32_t *by_cost_late; /* likewise, but of equal ones the last module first */
    uint32_t *by_merit;     /* groups, most saved bytes per nanosecond first */
    uint32_t log_count;
    int64_t added_ns;     /* of the present set */
    uint64_t peak_bytes;  /* of the set evaluated last */
    uint64_t evaluations; /* still allowed */
} search;

/* ---- the present set ------------------------------------------------------------------------------- */

static bool is_active(const search *s, uint32_t candidate)
{
    return msc__set_has(s->set, candidate);
}

static void flip(search *s, uint32_t candidate)
{
    const msc__model *model = s->model;
    bool active = !is_active(s, candidate);
    uint32_t step = active ? 1 : UINT32_MAX; /* adding UINT32_MAX takes one away */
    uint32_t i;

    s->set[candidate / 64] ^= (uint64_t)1 << (candidate % 64);
    s->added_ns += active ? model->candidates[candidate].cost_ns : -model->candidates[candidate].cost_ns;
    for (i = model->below.first[candidate]; i < model->below.first[candidate + 1]; i++)
        s->covered[model->below.items[i]] += step;
    for (i = model->above.first[candidate]; i < model->above.first[candidate + 1]; i++)
        s->split[model->above.items[i]] += step;
    msc__fit_set(s->fit, candidate, active);
}

static void flip_logged(search *s, uint32_t candidate)
{
    s->log[s->log_count++] = candidate;
    flip(s, candidate);
}

static void undo(search *s)
{
    while (s->log_count > 0)
        flip(s, s->log[--s->log_count]);
}

/* Peak of the present set, which is offered to the frontier. */
static uint64_t evaluate(search *s)
{
    s->peak_bytes = msc__fit_peak(s->fit);
    if (s->evaluations > 0)
        s->evaluations--;
    if (s->status == MSC_OK)
        s->status = msc__frontier_offer(s->frontier, s->peak_bytes, s->added_ns, s->set, s->err);
    return s->peak_bytes;
}

/* Goes to another set; what leaves goes first, so that no two active candidates ever overlap. */
static void go_to(search *s, const uint64_t *target)
{
    uint32_t i;
    uint32_t c;

    for (i = 0; i < s->model->usable_count; i++) {
        c = s->by_cost[i];
        if (is_active(s, c) && (target == NULL || !msc__set_has(target, c)))
            flip(s, c);
    }
    for (i = 0; i < s->model->usable_count && target != NULL; i++) {
        c = s->by_cost[i];
        if (!is_active(s, c) && msc__set_has(target, c))
            flip(s, c);
    }
    s->log_count = 0;
}

/* Notes the smallest plan in `start`; the empty set when memory ran out before there was one. */
static void note_smallest(search *s)
{
    uint32_t count = s->frontier->plans.count;

    memset(s->start, 0, s->frontier->word_count * sizeof *s->start);
    if (count > 0)
        memcpy(s->start, msc__frontier_set(s->frontier, count - 1),
               s->frontier->word_count * sizeof *s->start);
}

static void go_to_smallest(search *s)
{
    note_smallest(s);
    go_to(s, s->start);
}

static bool may_go_on(const search *s)
{
    return s->status == MSC_OK && s->evaluations > 0;
}

/* ---- moves ----------------------------------------------------------------------------------------- */

static void drop_listed(search *s, const msc__buckets *lists, uint32_t candidate)
{
    uint32_t i;

    for (i = lists->first[candidate]; i < lists->first[candidate + 1]; i++)
        if (is_active(s, lists->items[i]))
            flip_logged(s, lists->items[i]);
}

/* Adds a candidate in place of everything that overlaps it. */
static void add(search *s, uint32_t candidate)
{
    if (is_active(s, candidate))
        return;
    if (s->split[candidate] > 0)
        drop_listed(s, &s->model->below, candidate);
    if (s->covered[candidate] > 0)
        drop_listed(s, &s->model->above, candidate);
    flip_logged(s, candidate);
}

/* Puts the outermost usable candidates inside a candidate in its place. */
static void split_candidate(search *s, uint32_t candidate)
{
    const msc__model *model = s->model;
    uint32_t i;

    flip_logged(s, candidate);
    for (i = model->below.first[candidate]; i < model->below.first[candidate + 1]; i++) {
        uint32_t c = model->below.items[i];
        if (model->candidates[c].usable && s->covered[c] == 0 && s->split[c] == 0 && !is_active(s, c))
            flip_logged(s, c);
    }
}

static void make_move(search *s, move m)
{
    const msc__model *model = s->model;
    uint32_t i;

    s->log_count = 0;
    switch (m.kind) {
    case MOVE_ADD:
        add(s, m.id);
        break;
    case MOVE_DROP:
        flip_logged(s, m.id);
        break;
    case MOVE_SPLIT:
        split_candidate(s, m.id);
        break;
    case MOVE_GROUP:
        for (i = model->members.first[m.id]; i < model->members.first[m.id + 1]; i++)
            add(s, model->members.items[i]);
        break;
    case MOVE_NONE:
        break;
    }
}

/* ---- forward --------------------------------------------------------------------------------------- */

/* The best move so far of one forward step. */
typedef struct contest {
    move best;
    uint64_t gain;
    uint64_t cost_ns;
    uint64_t before; /* measure before the move */
    int64_t before_ns;
    uint64_t level_bytes; /* UINT64_MAX: the measure is the peak; otherwise bytes above this */
} contest;

static uint64_t measure(search *s, const contest *c)
{
    uint64_t peak_bytes = evaluate(s);

    return c->level_bytes == UINT64_MAX ? peak_bytes : msc__fit_excess(s->fit, c->level_bytes);
}

static void try_move(search *s, contest *c, move m)
{
    uint64_t after;
    int64_t cost_ns;
    uint64_t gain;

    make_move(s, m);
    after = measure(s, c);
    cost_ns = s->added_ns - c->before_ns;
    undo(s);
    if (after >= c->before)
        return;
    gain = c->before - after;
    if (cost_ns < 1)
        cost_ns = 1;
    if (c->best.kind == MOVE_NONE || msc__cost_compare(gain, (uint64_t)cost_ns, c->gain, c->cost_ns) > 0) {
        c->best = m;
        c->gain = gain;
        c->cost_ns = (uint64_t)cost_ns;
    }
}

/* First or last member of a group that is neither active nor covered, or MSC_NONE. */
static uint32_t free_member(const search *s, uint32_t group, bool last)
{
    const msc__buckets *members = &s->model->members;
    uint32_t first = members->first[group];
    uint32_t count = members->first[group + 1] - first;
    uint32_t i;

    for (i = 0; i < count; i++) {
        uint32_t c = members->items[last ? first + count - 1 - i : first + i];
        if (!is_active(s, c) && s->covered[c] == 0)
            return c;
    }
    return MSC_NONE;
}

static void try_ends_of_groups(search *s, contest *c)
{
    uint32_t tried = 0;
    uint32_t i;

    for (i = 0; i < s->model->group_count && tried < MOST_GROUPS; i++) {
        uint32_t first = free_member(s, s->by_merit[i], false);
        uint32_t last = free_member(s, s->by_merit[i], true);
        if (first == MSC_NONE)
            continue;
        try_move(s, c, (move){MOVE_ADD, first});
        if (last != first)
            try_move(s, c, (move){MOVE_ADD, last});
        tried++;
    }
}

static void try_all(search *s, contest *c)
{
    uint32_t i;

    for (i = 0; i < s->model->candidate_count; i++)
        if (s->model->candidates[i].usable && !is_active(s, i) && s->covered[i] == 0)
            try_move(s, c, (move){MOVE_ADD, i});
}

static bool step_forward(search *s, uint64_t level_bytes)
{
    contest c = {.level_bytes = level_bytes, .before_ns = s->added_ns};

    c.before = measure(s, &c);
    if (s->model->usable_count <= FEW_CANDIDATES)
        try_all(s, &c);
    else
        try_ends_of_groups(s, &c);
    make_move(s, c.best);
    s->log_count = 0;
    return c.best.kind != MOVE_NONE;
}

/* Every step adds a candidate that nothing covers and that no later step takes away but for one above it, so
 * there are at most as many steps as candidates. */
static void walk_forward(search *s)
{
    static const unsigned shifts[] = {8, 5, 3, 1};
    bool moved = true;
    size_t i;

    while (moved && may_go_on(s)) {
        uint64_t peak_bytes = evaluate(s);
        moved = step_forward(s, UINT64_MAX);
        for (i = 0; i < sizeof shifts / sizeof shifts[0] && !moved; i++)
            moved = step_forward(s, peak_bytes - (peak_bytes >> shifts[i]));
    }
}

/* ---- towards the smallest peak --------------------------------------------------------------------- */

/* Takes the move when the peak becomes smaller, or the time at an equal peak. */
static bool take_if_smaller(search *s, move m)
{
    uint64_t before_bytes = s->peak_bytes;
    int64_t before_ns = s->added_ns;

    make_move(s, m);
    evaluate(s);
    if (s->peak_bytes < before_bytes || (s->peak_bytes == before_bytes && s->added_ns < before_ns)) {
        s->log_count = 0;
        return true;
    }
    undo(s);
    s->peak_bytes = before_bytes;
    return false;
}

static void walk_whole(search *s)
{
    bool moved = true;
    uint32_t i;

    evaluate(s);
    while (moved && may_go_on(s)) {
        moved = false;
        for (i = 0; i < s->model->group_count && may_go_on(s); i++)
            moved |= take_if_smaller(s, (move){MOVE_GROUP, s->by_merit[i]});
    }
}

static move polish_move(const search *s, uint32_t candidate, uint32_t round)
{
    if (!is_active(s, candidate))
        return (move){round == 0 ? MOVE_ADD : MOVE_NONE, candidate};
    return (move){round == 0 ? MOVE_DROP : MOVE_SPLIT, candidate};
}

static void polish(search *s)
{
    uint64_t left = s->evaluations > POLISH_EVALUATIONS ? s->evaluations - POLISH_EVALUATIONS : 0;
    bool moved = true;
    uint32_t round;
    uint32_t i;

    evaluate(s);
    while (moved && may_go_on(s) && s->evaluations > left) {
        moved = false;
        for (round = 0; round < 2; round++) {
            for (i = 0; i < s->model->usable_count && s->evaluations > left && may_go_on(s); i++) {
                move m = polish_move(s, s->by_cost[i], round);
                if (m.kind != MOVE_NONE)
                    moved |= take_if_smaller(s, m);
            }
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------------- */

/* Drops what can be dropped with the peak at most `target_bytes`. */
static void drop_under(search *s, uint64_t target_bytes, const uint32_t *order)
{
    uint32_t i;

    for (i = 0; i < s->model->usable_count && may_go_on(s); i++) {
        if (!is_active(s, order[i]))
            continue;
        make_move(s, (move){MOVE_DROP, order[i]});
        if (evaluate(s) > target_bytes)
            undo(s);
        s->log_count = 0;
    }
}

static void walk_backward(search *s, const uint32_t *order)
{
    uint64_t plain_bytes = s->fit->plain_peak_bytes;
    uint64_t smallest_bytes;
    uint32_t i;

    go_to_smallest(s);
    smallest_bytes = evaluate(s);
    for (i = 0; i < BACKWARD_TARGETS && may_go_on(s); i++)
        drop_under(s, smallest_bytes + (plain_bytes - smallest_bytes) / BACKWARD_TARGETS * i, order);
}

/* ---- sweeps ---------------------------------------------------------------------------------------- */

static void clear_group(search *s, uint32_t group)
{
    const msc__buckets *members = &s->model->members;
    uint32_t i;

    for (i = members->first[group]; i < members->first[group + 1]; i++)
        if (is_active(s, members->items[i]))
            flip(s, members->items[i]);
}

static void sweep_end(search *s, uint32_t group, const uint64_t *ground, bool last)
{
    const msc__buckets *members = &s->model->members;
    uint32_t first = members->first[group];
    uint32_t count = members->first[group + 1] - first;
    uint32_t i;

    go_to(s, ground);
    clear_group(s, group);
    for (i = 0; i < count && may_go_on(s); i++) {
        make_move(s, (move){MOVE_ADD, members->items[last ? first + count - 1 - i : first + i]});
        evaluate(s);
    }
}

static void sweep_evenly(search *s, uint32_t group, const uint64_t *ground)
{
    const msc__buckets *members = &s->model->members;
    uint32_t first = members->first[group];
    uint32_t count = members->first[group + 1] - first;
    uint32_t step = count / MOST_SWEEPS + 1;
    uint32_t k;
    uint32_t i;

    for (k = step; k < count && may_go_on(s); k += step) {
        go_to(s, ground);
        clear_group(s, group);
        for (i = 0; i < k; i++)
            make_move(s, (move){MOVE_ADD, members->items[first + (uint64_t)i * count / k]});
        evaluate(s);
    }
}

static void sweep_groups(search *s, const uint64_t *ground)
{
    uint32_t g;

    for (g = 0; g < s->model->group_count && may_go_on(s); g++) {
        if (s->model->members.first[g + 1] - s->model->members.first[g] < 2)
            continue;
        sweep_end(s, g, ground, false);
        sweep_end(s, g, ground, true);
        sweep_evenly(s, g, ground);
    }
}

/* ---- exhaustive ------------------------------------------------------------------------------------ */

/* Gray code: consecutive sets differ in one candidate. Overlapping sets are stepped over. */
static void visit_all(search *s)
{
    uint32_t count = s->model->usable_count;
    uint64_t target = 0;
    uint64_t i;
    uint32_t k;

    for (i = 1; i < (uint64_t)1 << count && s->status == MSC_OK; i++) {
        bool overlap = false;
        for (k = 0; (i >> k & 1) == 0;)
            k++;
        target ^= (uint64_t)1 << k;
        memset(s->start, 0, s->frontier->word_count * sizeof *s->start);
        for (k = 0; k < count; k++)
            if ((target >> k & 1) != 0)
                s->start[s->by_cost[k] / 64] |= (uint64_t)1 << (s->by_cost[k] % 64);
        for (k = 0; k < count && !overlap; k++) {
            uint32_t c = s->by_cost[k];
            uint32_t j;
            for (j = s->model->below.first[c]; j < s->model->below.first[c + 1] && (target >> k & 1); j++)
                overlap |= msc__set_has(s->start, s->model->below.items[j]);
        }
        if (overlap)
            continue;
        go_to(s, s->start);
        evaluate(s);
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

static void rank(search *s, ranked *list)
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

static msc_status prepare(search *s, msc__scratch *scratch)
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
    s->by_merit = msc__scratch_take(scratch, count, sizeof *s->by_merit);
    if (scratch->failed_bytes > 0)
        return msc__scratch_check(scratch, "a search", s->err);
    rank(s, list);
    s->evaluations = MOST_BLOCK_VISITS / (s->fit->block_count + 64);
    if (s->evaluations < LEAST_EVALUATIONS)
        s->evaluations = LEAST_EVALUATIONS;
    return MSC_OK;
}

static void walk(search *s)
{
    evaluate(s);
    walk_forward(s);
    walk_whole(s);
    go_to(s, NULL);
    walk_whole(s);
    go_to_smallest(s);
    polish(s);
    walk_backward(s, s->by_cost);
    walk_backward(s, s->by_cost_late);
    sweep_groups(s, NULL);
    note_smallest(s);
    sweep_groups(s, s->start);
    if (s->model->usable_count <= EXHAUSTIVE_CANDIDATES)
        visit_all(s);
    go_to(s, NULL);
}

msc_status msc__search(const msc__model *model, msc__fit *fit, msc__frontier *frontier, msc_error *err)
{
    search s = {.model = model, .fit = fit, .frontier = frontier, .err = err};
    msc__scratch scratch = {.ctx = model->scratch.ctx};
    msc_status status = prepare(&s, &scratch);

    if (status == MSC_OK) {
        walk(&s);
        status = s.status;
    }
    msc__scratch_fini(&scratch);
    return status;
}
