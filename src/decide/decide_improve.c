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

#include "decide/decide_walker.h"

#define IMPROVE_BLOCK_VISITS ((uint64_t)1 << 20) /* some milliseconds of evaluations */

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
    uint64_t allowed = IMPROVE_BLOCK_VISITS / (s->fit->block_count + 64);
    uint64_t later = s->evaluations > allowed ? s->evaluations - allowed : 0;
    uint32_t stride;

    s->evaluations -= later;
    for (stride = 64; stride > 1; stride /= 4)
        (void)improve_every(s, stride);
    while (improve_every(s, 1) && msc__walker_may_go_on(s)) {
    }
    s->evaluations += later;
}

/* ---- exhaustive ------------------------------------------------------------------------------------ */

/* Gray code: consecutive sets differ in one candidate. Overlapping sets are stepped over. */
void msc__walk_everywhere(msc__walker *s)
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
        msc__walker_go_to(s, s->start);
        msc__walker_evaluate(s);
    }
}
