/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The walker's set and its moves.
 *
 * A set is a row of bits, and everything that follows from it is kept up to date by `flip`, the only place
 * that changes it: added time, the fit, and for each candidate how many active ones lie above it (`covered`)
 * and below it (`split`). A move is a few flips in an order that never lets two active candidates overlap.
 * Undoing plays the log backwards. One move flips each candidate at most three times: out, in, and out again
 * for a later member of the group.
 */
#include "decide/decide_walker.h"

#include <string.h>

#include "base/invariant.h"

static void charge(msc__walker *s, uint64_t work)
{
    s->work -= work < s->work ? work : s->work;
}

/* A change takes about as long as visiting two blocks. */
static void charge_flip(msc__walker *s, uint32_t candidate)
{
    const msc__candidate *c = &s->model->candidates[candidate];
    const msc__buckets *above = &s->model->above;
    const msc__buckets *below = &s->model->below;
    uint64_t changes = 1;
    uint32_t i;

    for (i = 0; i < c->region_count; i++) {
        const msc__fit_region *region = &s->fit->regions[c->first_region + i];
        changes += (uint64_t)region->point_count + region->touch_count;
    }
    charge(s, 2 * changes + (above->first[candidate + 1] - above->first[candidate]) +
                  (below->first[candidate + 1] - below->first[candidate]));
}

static void flip(msc__walker *s, uint32_t candidate)
{
    const msc__model *model = s->model;
    bool active = !msc__walker_has(s, candidate);
    uint32_t step = active ? 1 : UINT32_MAX; /* adding UINT32_MAX takes one away */
    uint32_t i;

    /* An antichain: nothing above or below what joins is active. */
    MSC__ASSERT(!active || (s->covered[candidate] == 0 && s->split[candidate] == 0));
    s->set[candidate / 64] ^= (uint64_t)1 << (candidate % 64);
    s->added_ns += active ? model->candidates[candidate].cost_ns : -model->candidates[candidate].cost_ns;
    MSC__ASSERT(s->added_ns >= 0);
    for (i = model->below.first[candidate]; i < model->below.first[candidate + 1]; i++)
        s->covered[model->below.items[i]] += step;
    for (i = model->above.first[candidate]; i < model->above.first[candidate + 1]; i++)
        s->split[model->above.items[i]] += step;
    msc__fit_set(s->fit, candidate, active);
    charge_flip(s, candidate);
}

static void flip_logged(msc__walker *s, uint32_t candidate)
{
    MSC__ASSERT(s->log_count <= 3 * s->model->candidate_count);
    s->log[s->log_count++] = candidate;
    flip(s, candidate);
}

void msc__walker_undo(msc__walker *s)
{
    while (s->log_count > 0)
        flip(s, s->log[--s->log_count]);
}

uint64_t msc__walker_evaluate(msc__walker *s)
{
    s->peak_bytes = msc__fit_peak(s->fit);
    MSC__ASSERT(s->peak_bytes >= s->fit->floor_bytes);
    charge(s, msc__walker_visit(s));
    if (s->peak_bytes == MSC__FIT_NO_PEAK)
        return s->peak_bytes;
    if (s->status == MSC_OK)
        s->status = msc__frontier_offer(s->frontier, s->peak_bytes + msc__fit_staging(s->fit), s->added_ns,
                                        s->set, s->err);
    if (s->frontier->plans.count > s->most_plans)
        msc__frontier_thin(s->frontier, s->most_plans / 2);
    return s->peak_bytes;
}

/* Goes to another set; what leaves goes first, so that no two active candidates ever overlap. */
void msc__walker_go_to(msc__walker *s, const uint64_t *target)
{
    uint32_t i;
    uint32_t c;

    for (i = 0; i < s->model->usable_count; i++) {
        c = s->by_cost[i];
        if (msc__walker_has(s, c) && (target == NULL || !msc__set_has(target, c)))
            flip(s, c);
    }
    for (i = 0; i < s->model->usable_count && target != NULL; i++) {
        c = s->by_cost[i];
        if (!msc__walker_has(s, c) && msc__set_has(target, c))
            flip(s, c);
    }
    MSC__ASSERT(target != NULL || s->added_ns == 0);
    s->log_count = 0;
}

/* The empty set, when memory ran out before there was any plan. */
void msc__walker_note_smallest(msc__walker *s)
{
    uint32_t count = s->frontier->plans.count;

    memset(s->start, 0, s->frontier->word_count * sizeof *s->start);
    if (count > 0)
        memcpy(s->start, msc__frontier_set(s->frontier, count - 1),
               s->frontier->word_count * sizeof *s->start);
}

/* ---- moves ----------------------------------------------------------------------------------------- */

static void drop_listed(msc__walker *s, const msc__buckets *lists, uint32_t candidate)
{
    uint32_t i;

    for (i = lists->first[candidate]; i < lists->first[candidate + 1]; i++)
        if (msc__walker_has(s, lists->items[i]))
            flip_logged(s, lists->items[i]);
}

/* Adds a candidate in place of everything that overlaps it. */
static void add(msc__walker *s, uint32_t candidate)
{
    MSC__ASSERT(s->model->candidates[candidate].usable);
    if (msc__walker_has(s, candidate))
        return;
    if (s->split[candidate] > 0)
        drop_listed(s, &s->model->below, candidate);
    if (s->covered[candidate] > 0)
        drop_listed(s, &s->model->above, candidate);
    MSC__ASSERT(s->split[candidate] == 0 && s->covered[candidate] == 0);
    flip_logged(s, candidate);
}

/* Puts the outermost usable modules inside a candidate in its place, all of them recomputed as a whole, or offloaded
 * as it was. */
static void split_candidate(msc__walker *s, uint32_t candidate)
{
    const msc__model *model = s->model;
    uint32_t base = model->candidates[candidate].base;
    uint32_t i;

    MSC__ASSERT(msc__walker_has(s, candidate));
    flip_logged(s, candidate);
    for (i = model->below.first[base]; i < model->below.first[base + 1]; i++) {
        uint32_t c = model->below.items[i];
        const msc__candidate *inside = &model->candidates[c];
        if (inside->usable && inside->kept_count == 0 && inside->base != base && !inside->boundary &&
            inside->offload == model->candidates[candidate].offload && s->covered[c] == 0 &&
            s->split[c] == 0 && !msc__walker_has(s, c))
            flip_logged(s, c);
    }
}

void msc__walker_extend(msc__walker *s, msc__move m)
{
    const msc__model *model = s->model;
    uint32_t i;

    switch (m.kind) {
    case MSC__MOVE_ADD:
        add(s, m.id);
        break;
    case MSC__MOVE_DROP:
        MSC__ASSERT(msc__walker_has(s, m.id));
        flip_logged(s, m.id);
        break;
    case MSC__MOVE_SPLIT:
        split_candidate(s, m.id);
        break;
    case MSC__MOVE_GROUP:
        for (i = model->members.first[m.id]; i < model->members.first[m.id + 1]; i++)
            add(s, model->members.items[i]);
        break;
    case MSC__MOVE_SPLIT_GROUP:
        for (i = model->members.first[m.id]; i < model->members.first[m.id + 1]; i++)
            if (msc__walker_has(s, model->members.items[i]))
                split_candidate(s, model->members.items[i]);
        break;
    case MSC__MOVE_NONE:
        break;
    }
}

void msc__walker_make(msc__walker *s, msc__move m)
{
    s->log_count = 0;
    msc__walker_extend(s, m);
}

uint32_t msc__walker_end_member(const msc__walker *s, uint32_t group, bool active, bool last)
{
    const msc__buckets *members = &s->model->members;
    uint32_t first = members->first[group];
    uint32_t count = members->first[group + 1] - first;
    uint32_t i;

    MSC__ASSERT(group < s->model->group_count && count > 0);
    for (i = 0; i < count; i++) {
        uint32_t c = members->items[last ? first + count - 1 - i : first + i];
        if (msc__walker_has(s, c) == active && s->covered[c] == 0)
            return c;
    }
    return MSC_NONE;
}
