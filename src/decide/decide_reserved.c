/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peaks of a caching allocator, which only a replay can tell.
 *
 * The frontier knows allocated bytes. What is reserved also depends on the order of sizes, in steps of whole
 * segments: a plan that is no better in allocated bytes may reserve a segment less. So the plan with the
 * smallest reserved peak need not be on the frontier. Where replays are short, many combinations beside the
 * frontier are looked at (decide_every.c). Otherwise, and from the best of the frontier there too,
 * neighbours are replayed: the first that reserves less takes the plan's place, and so on, until no
 * neighbour does or the number of replays is used up. That number depends on the graph alone, not on the
 * budget, so that the list of plans is the same for every budget.
 *
 *      neighbour   one candidate dropped; one added in place of what it overlaps
 *
 * Allocated bytes, which the fit tells in no time, are a lower bound: a neighbour that has no fewer of them
 * than the best plan reserves is not replayed.
 */
#include "decide/decide_reserved.h"

#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "decide/decide_plan.h"
#include "sim/sim_trace.h"

/* Plans of the frontier that are kept, since each may have to be replayed. */
#define MOST_PLANS 48u
#define MOST_REPLAYS 64u
/* Records × replays: some milliseconds of work. */
#define MOST_RECORDS ((uint64_t)1 << 18)

msc_status msc__reserved_peak(const msc__reserving *r, const uint64_t *set, uint64_t most_bytes,
                              uint64_t *peak_bytes, msc_error *err)
{
    msc_plan *plan = NULL;
    msc_trace *trace = NULL;
    msc_status status = msc__plan_of_set(r->model, set, &plan, err);

    if (status == MSC_OK)
        status = msc_trace_create(r->model->scratch.ctx, r->model->graph, plan, &trace, err);
    if (status == MSC_OK)
        status = msc__trace_reserved_peak(trace, r->sim, most_bytes, peak_bytes, err);
    msc_trace_destroy(trace);
    msc_plan_destroy(plan);
    return status;
}

msc_status msc__reserved_of_plan(const msc__reserving *r, msc__frontier *frontier, uint32_t plan,
                                 uint64_t most_bytes, uint64_t *peak_bytes, msc_error *err)
{
    msc__frontier_plan *p = (msc__frontier_plan *)frontier->plans.items + plan;
    msc_status status = MSC_OK;

    MSC__ASSERT(plan < frontier->plans.count);
    *peak_bytes = p->reserved_bytes;
    if (p->reserved_bytes != 0)
        return MSC_OK;
    *peak_bytes = p->peak_bytes;
    if (p->peak_bytes > most_bytes)
        return MSC_OK;
    status = msc__reserved_peak(r, msc__frontier_set(frontier, plan), most_bytes, peak_bytes, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(*peak_bytes >= p->peak_bytes);
    p->peak_bytes = *peak_bytes;
    if (*peak_bytes <= most_bytes)
        p->reserved_bytes = *peak_bytes;
    return MSC_OK;
}

static void flip(const msc__reserving *r, uint64_t *set, uint32_t candidate)
{
    set[candidate / 64] ^= (uint64_t)1 << (candidate % 64);
    msc__fit_set(r->fit, candidate, msc__set_has(set, candidate));
}

/* From one set to another; what leaves goes first, since active candidates must not overlap. */
static void go_to(const msc__reserving *r, uint64_t *set, const uint64_t *target)
{
    uint32_t i;

    for (i = 0; i < r->model->candidate_count; i++)
        if (msc__set_has(set, i) && !msc__set_has(target, i))
            flip(r, set, i);
    for (i = 0; i < r->model->candidate_count; i++)
        if (!msc__set_has(set, i) && msc__set_has(target, i))
            flip(r, set, i);
}

static void drop_overlapping(const msc__reserving *r, uint64_t *set, const msc__buckets *lists,
                             uint32_t candidate)
{
    uint32_t i;

    for (i = lists->first[candidate]; i < lists->first[candidate + 1]; i++)
        if (msc__set_has(set, lists->items[i]))
            flip(r, set, lists->items[i]);
}

/* Turns one candidate the other way round. */
static void step(const msc__reserving *r, uint64_t *set, uint32_t candidate)
{
    if (!msc__set_has(set, candidate)) {
        drop_overlapping(r, set, &r->model->above, candidate);
        drop_overlapping(r, set, &r->model->below, candidate);
    }
    flip(r, set, candidate);
}

static uint32_t replays_allowed(const msc__model *model)
{
    uint64_t allowed = MOST_RECORDS / msc__reserving_records(model);

    return allowed > MOST_REPLAYS ? MOST_REPLAYS : (uint32_t)allowed;
}

/* One pass over the candidates. `present` is the fit's set, `best` the one that is improved. */
static msc_status improve(const msc__reserving *r, uint64_t *present, uint64_t *best, uint32_t *replays,
                          uint64_t *peak_bytes, bool *improved, msc_error *err)
{
    size_t bytes = (r->model->candidate_count / 64 + 1) * sizeof *best;
    msc_status status = MSC_OK;
    uint32_t i;

    *improved = false;
    for (i = 0; i<r->model->candidate_count && * replays> 0 && status == MSC_OK; i++) {
        uint64_t found_bytes = UINT64_MAX;
        if (!r->model->candidates[i].usable)
            continue;
        step(r, present, i);
        if (msc__fit_peak(r->fit) < *peak_bytes) {
            --*replays;
            status = msc__reserved_peak(r, present, *peak_bytes - 1, &found_bytes, err);
        }
        if (status == MSC_OK && found_bytes < *peak_bytes) {
            memcpy(best, present, bytes);
            *peak_bytes = found_bytes;
            *improved = true;
        } else {
            go_to(r, present, best);
        }
    }
    return status;
}

msc_status msc__reserve_less(const msc__reserving *r, uint64_t *set, uint64_t *peak_bytes, msc_error *err)
{
    msc__scratch scratch = {.ctx = r->model->scratch.ctx};
    size_t words = r->model->candidate_count / 64 + 1;
    uint64_t *present = msc__scratch_take(&scratch, words, sizeof *present);
    uint64_t *none = msc__scratch_take(&scratch, words, sizeof *none);
    msc_status status = msc__scratch_check(&scratch, "a decision", err);
    uint32_t replays = replays_allowed(r->model);
    bool improved = status == MSC_OK;

    if (improved)
        go_to(r, present, set);
    while (improved && status == MSC_OK && replays > 0)
        status = improve(r, present, set, &replays, peak_bytes, &improved, err);
    if (scratch.failed_bytes == 0)
        go_to(r, present, none);
    MSC__ASSERT(r->fit->moved_bytes == 0 && r->fit->rerun_count == 0);
    msc__scratch_fini(&scratch);
    return status;
}

static int64_t added_ns(const msc__model *model, const uint64_t *set)
{
    int64_t sum_ns = 0;
    uint32_t i;

    for (i = 0; i < model->candidate_count; i++)
        if (msc__set_has(set, i))
            sum_ns += model->candidates[i].cost_ns;
    return sum_ns;
}

/* The plan that reserves least. Allocated bytes fall along the frontier, so the search begins at its end. */
static msc_status find_smallest(const msc__reserving *r, msc__frontier *frontier, uint32_t *index,
                                uint64_t *smallest_bytes, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    *smallest_bytes = UINT64_MAX;
    for (i = frontier->plans.count; i-- > 0 && status == MSC_OK;) {
        uint64_t peak_bytes = 0;
        if (msc__frontier_plans(frontier)[i].peak_bytes >= *smallest_bytes)
            break;
        status = msc__reserved_of_plan(r, frontier, i, *smallest_bytes, &peak_bytes, err);
        if (peak_bytes <= *smallest_bytes) {
            *smallest_bytes = peak_bytes;
            *index = i;
        }
    }
    return status;
}

/* A plan that reserves less than the smallest of the frontier joins it. */
static msc_status add_smaller(const msc__reserving *r, msc__frontier *frontier, msc_error *err)
{
    msc__scratch scratch = {.ctx = r->model->scratch.ctx};
    uint64_t *set = msc__scratch_take(&scratch, frontier->word_count, sizeof *set);
    msc_status status = msc__scratch_check(&scratch, "a decision", err);
    uint64_t smallest_bytes = 0;
    uint32_t index = 0;

    if (status == MSC_OK)
        status = find_smallest(r, frontier, &index, &smallest_bytes, err);
    if (status == MSC_OK) {
        msc__frontier_plan plan = {.reserved_bytes = smallest_bytes};
        MSC__ASSERT(index < frontier->plans.count);
        memcpy(set, msc__frontier_set(frontier, index), frontier->word_count * sizeof *set);
        status = msc__reserve_less(r, set, &plan.reserved_bytes, err);
        plan.peak_bytes = plan.reserved_bytes;
        plan.added_ns = added_ns(r->model, set);
        if (status == MSC_OK && plan.reserved_bytes < smallest_bytes)
            status = msc__frontier_insert(frontier, &plan, set, err);
    }
    msc__scratch_fini(&scratch);
    return status;
}

msc_status msc__reserve(const msc__reserving *r, msc__frontier *frontier, msc_error *err)
{
    bool done = false;
    msc_status status = msc__reserve_every(r, frontier, &done, err);

    if (done || status != MSC_OK)
        return status;
    MSC__ASSERT(frontier->plans.count > 0);
    msc__frontier_thin(frontier, MOST_PLANS);
    return add_smaller(r, frontier, err);
}
