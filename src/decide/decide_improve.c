/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Local improvement of the frontier, and the walk that leaves nothing out.
 *
 * Improvement takes each plan of the frontier and looks at what one change makes of it: a candidate added,
 * dropped, split into those inside it, or swapped for another. What that puts on the frontier is improved in
 * turn, until nothing is new or the effort is used up. With many candidates only the first and last members
 * of groups are tried, since members are alike.
 */
#include <string.h>

#include "base/invariant.h"
#include "decide/decide_walker.h"

#define IMPROVE_WORK ((uint64_t)1 << 22) /* some milliseconds */

/* ---- improve --------------------------------------------------------------------------------------- */

/* Candidates that single moves from the present set are about: all, or the ends of groups. */
static uint32_t list_ends(msc__walker *s, bool active)
{
    uint32_t *list = active ? s->leaving : s->entering;
    uint32_t count = 0;
    uint32_t i;

    if (s->model->usable_count <= MSC__FEW_CANDIDATES) {
        for (i = 0; i < s->model->usable_count; i++)
            if (msc__walker_has(s, s->by_cost[i]) == active)
                list[count++] = s->by_cost[i];
        return count;
    }
    for (i = 0; i < s->model->group_count && i < MSC__MOST_GROUPS; i++) {
        uint32_t first = msc__walker_end_member(s, s->by_merit[i], active, false);
        uint32_t last = msc__walker_end_member(s, s->by_merit[i], active, true);
        if (first != MSC_NONE)
            list[count++] = first;
        if (last != first)
            list[count++] = last;
    }
    MSC__ASSERT(count <= 2 * MSC__MOST_GROUPS);
    return count;
}

static void try_swaps(msc__walker *s, uint32_t leaving, uint32_t entering_count)
{
    uint32_t i;

    for (i = 0; i < entering_count && msc__walker_may_go_on(s); i++) {
        msc__walker_make(s, (msc__move){MSC__MOVE_DROP, leaving});
        msc__walker_extend(s, (msc__move){MSC__MOVE_ADD, s->entering[i]});
        msc__walker_evaluate(s);
        msc__walker_undo(s);
    }
}

/* The way to treat a module that comes after another: first those that move nothing, then the others. */
static uint32_t next_way(const msc__model *model, uint32_t way)
{
    const msc__candidate *c = &model->candidates[way];

    MSC__ASSERT(c->next != way && c->also != way);
    if (msc__moves(c))
        return c->also;
    return c->next != MSC_NONE ? c->next : model->candidates[c->base].also;
}

/* The other ways to treat the module of an active candidate. */
static void try_ways(msc__walker *s, uint32_t active)
{
    uint32_t way = s->model->candidates[active].base;

    for (; way != MSC_NONE && msc__walker_may_go_on(s); way = next_way(s->model, way)) {
        if (way == active || !s->model->candidates[way].usable)
            continue;
        msc__walker_make(s, (msc__move){MSC__MOVE_ADD, way});
        msc__walker_evaluate(s);
        msc__walker_undo(s);
    }
}

static void try_neighbours(msc__walker *s)
{
    uint32_t leaving_count = list_ends(s, true);
    uint32_t entering_count = list_ends(s, false);
    uint32_t i;

    for (i = 0; i < entering_count && msc__walker_may_go_on(s); i++) {
        msc__walker_make(s, (msc__move){MSC__MOVE_ADD, s->entering[i]});
        msc__walker_evaluate(s);
        msc__walker_undo(s);
    }
    for (i = 0; i < leaving_count && msc__walker_may_go_on(s); i++) {
        msc__walker_make(s, (msc__move){MSC__MOVE_DROP, s->leaving[i]});
        msc__walker_evaluate(s);
        msc__walker_undo(s);
        msc__walker_make(s, (msc__move){MSC__MOVE_SPLIT, s->leaving[i]});
        msc__walker_evaluate(s);
        msc__walker_undo(s);
        try_ways(s, s->leaving[i]);
        try_swaps(s, s->leaving[i], entering_count);
    }
}

/* One pass over the frontier, which changes underneath. True when a plan was there that had not been seen. */
static bool improve_every(msc__walker *s, uint32_t stride)
{
    bool found = false;
    uint32_t i;

    for (i = 0; i < s->frontier->plans.count && msc__walker_may_go_on(s); i += stride) {
        msc__frontier_plan *plan = (msc__frontier_plan *)s->frontier->plans.items + i;
        if (plan->seen)
            continue;
        plan->seen = 1;
        found = true;
        memcpy(s->start, msc__frontier_set(s->frontier, i), s->frontier->word_count * sizeof *s->start);
        msc__walker_go_to(s, s->start);
        try_neighbours(s);
    }
    return found;
}

/* Coarse passes first, so that a limit leaves the frontier equally good everywhere. */
void msc__walk_improve(msc__walker *s)
{
    uint64_t held = msc__walker_hold(s, IMPROVE_WORK);
    uint32_t stride;

    for (stride = 64; stride > 1; stride /= 4)
        (void)improve_every(s, stride);
    while (improve_every(s, 1) && msc__walker_may_go_on(s)) {
    }
    s->work += held;
}

/* ---- exhaustive ------------------------------------------------------------------------------------ */

#define WORD 64u

/* Per candidate of `by_cost`, as bits: itself and those that it overlaps. */
static void fill_overlaps(const msc__walker *s, uint64_t *overlaps)
{
    uint32_t count = s->model->usable_count;
    uint32_t i;
    uint32_t k;
    uint32_t n;

    MSC__ASSERT(count <= WORD);
    for (i = 0; i < count; i++) {
        const msc__buckets *lists = &s->model->below;
        overlaps[i] |= (uint64_t)1 << i;
        for (n = lists->first[s->by_cost[i]]; n < lists->first[s->by_cost[i] + 1]; n++) {
            for (k = 0; k < count; k++) {
                if (s->by_cost[k] == lists->items[n]) {
                    overlaps[i] |= (uint64_t)1 << k;
                    overlaps[k] |= (uint64_t)1 << i;
                }
            }
        }
    }
}

/* Next candidate from `next` on that overlaps none of the present set; `count`: none. */
static uint32_t next_free(const uint64_t *overlaps, uint64_t set, uint32_t next, uint32_t count)
{
    while (next < count && (overlaps[next] & set) != 0)
        next++;
    return next;
}

/* Depth first over all antichains, in the order of `by_cost`: from each set, the sets with one more candidate
 * that comes later and overlaps none. Looks at them, or only counts them, up to `most`. */
static uint64_t visit_antichains(msc__walker *s, const uint64_t *overlaps, uint64_t most, bool look)
{
    uint32_t count = s->model->usable_count;
    uint32_t stack[WORD];
    uint64_t set = 0;
    uint64_t seen = 0;
    uint32_t depth = 0;
    uint32_t next = next_free(overlaps, 0, 0, count);

    while (s->status == MSC_OK && seen < most && (next < count || depth > 0)) {
        if (next < count) {
            MSC__ASSERT(depth < WORD && (overlaps[next] & set) == 0);
            set |= (uint64_t)1 << next;
            seen++;
            stack[depth++] = next;
        } else {
            next = stack[--depth];
            set ^= (uint64_t)1 << next;
        }
        if (look && (set >> next & 1) == 0)
            msc__walker_make(s, (msc__move){MSC__MOVE_DROP, s->by_cost[next]});
        if (look && (set >> next & 1) != 0) {
            msc__walker_make(s, (msc__move){MSC__MOVE_ADD, s->by_cost[next]});
            msc__walker_evaluate(s);
        }
        next = next_free(overlaps, set, next + 1, count);
    }
    return seen;
}

void msc__walk_everywhere(msc__walker *s, uint64_t most)
{
    uint64_t overlaps[WORD] = {0};

    if (s->model->usable_count > WORD)
        return;
    fill_overlaps(s, overlaps);
    if (visit_antichains(s, overlaps, most + 1, false) > most)
        return;
    msc__walker_go_to(s, NULL);
    (void)visit_antichains(s, overlaps, most + 1, true);
}
