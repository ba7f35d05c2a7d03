/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which candidates exclude each other, and which are interchangeable.
 *
 * Two candidates exclude each other when calls of one lie inside calls of the other, or overlap them. The
 * lists `above` and `below` hold that relation, the wider one above; of two that cover the same calls, or
 * that overlap without one containing the other, the first one is above. Every set that the search visits is
 * an antichain of it.
 *
 * All outermost calls of a module count, even those that recompute nothing: they, too, would be the region
 * that what lies inside belongs to.
 *
 *      candidate a   [-----------------]
 *      candidate b       [-----]            starts inside a: below it
 *      candidate c                [-------] starts inside a: below it, though it ends later
 *
 * Of two intervals that overlap, one starts inside the other, so it is enough to look at what starts inside.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "decide/decide_survey.h"

/* ---- who excludes whom ---------------------------------------------------------------------------- */

/* Calls of all candidates: candidate i covers spans[first[i]] … spans[first[i + 1] - 1]. */
typedef struct spans {
    msc__scratch scratch;
    uint32_t *first;
    uint32_t *from;
    uint32_t *to;
    msc__buckets starts; /* candidates by the call that a span of theirs begins with */
    uint32_t *stamps;    /* per candidate: last one that it was paired with, plus 1 */
} spans;

static uint32_t span_count(const msc__model *model, const msc__survey *s, uint32_t candidate)
{
    uint32_t module = model->candidates[candidate].module;

    return model->candidates[candidate].is_run ? 1 : s->calls.first[module + 1] - s->calls.first[module];
}

static void fill_spans(const msc__model *model, const msc__survey *s, spans *all)
{
    uint32_t next = 0;
    uint32_t i;
    uint32_t k;

    for (i = 0; i < model->candidate_count; i++) {
        const msc__candidate *candidate = &model->candidates[i];
        const msc__region *region = &model->regions[candidate->first_region];
        all->first[i] = next;
        for (k = 0; k < span_count(model, s, i); k++, next++) {
            uint32_t call = candidate->is_run ? region->first_call
                                              : s->calls.items[s->calls.first[candidate->module] + k];
            all->from[next] = call;
            all->to[next] = candidate->is_run ? region->last_call : model->last_call[call];
            MSC__ASSERT(k == 0 || all->from[next] > all->to[next - 1]); /* in order, and disjoint */
        }
    }
    all->first[i] = next;
}

static msc_status spans_init(spans *all, const msc__model *model, const msc__survey *s, msc_error *err)
{
    size_t count = 0;
    int pass;
    uint32_t i;
    uint32_t k;

    for (i = 0; i < model->candidate_count; i++)
        count += span_count(model, s, i);
    all->first = msc__scratch_take(&all->scratch, (size_t)model->candidate_count + 1, sizeof *all->first);
    all->from = msc__scratch_take(&all->scratch, count, sizeof *all->from);
    all->to = msc__scratch_take(&all->scratch, count, sizeof *all->to);
    all->stamps = msc__scratch_take(&all->scratch, model->candidate_count, sizeof *all->stamps);
    if (all->scratch.failed_bytes > 0)
        return msc__scratch_check(&all->scratch, "candidates", err);
    fill_spans(model, s, all);
    msc__buckets_init(&all->scratch, &all->starts, model->call_count);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < model->candidate_count; i++)
            for (k = all->first[i]; k < all->first[i + 1]; k++)
                msc__buckets_add(&all->starts, all->from[k], i);
        if (pass == 0)
            msc__buckets_place(&all->scratch, &all->starts);
    }
    return msc__scratch_check(&all->scratch, "candidates", err);
}

/* Where the span of `other` that begins with a call ends. */
static uint32_t end_of(const spans *all, uint32_t other, uint32_t call)
{
    uint32_t k = all->first[other];

    while (all->from[k] != call)
        k++;
    MSC__ASSERT(k < all->first[other + 1]);
    return all->to[k];
}

/* Whether a span of `upper` begins inside one of `lower`, behind its begin. Spans of a candidate are disjoint
 * and in order. */
static bool begins_inside(const spans *all, uint32_t upper, uint32_t lower)
{
    uint32_t k = all->first[upper];
    uint32_t i = all->first[lower];

    while (k < all->first[upper + 1] && i < all->first[lower + 1]) {
        if (all->from[k] <= all->from[i])
            k++;
        else if (all->from[k] <= all->to[i])
            return true;
        else
            i++;
    }
    return false;
}

/* Pairs of a candidate with all that start inside one of its spans, once each. One that starts with it goes
 * below if it is shorter, or as long and later. Of two that each lie inside the other somewhere, as modules that
 * call each other do, the first one is above. */
static void add_pairs(msc__model *model, spans *all, uint32_t upper)
{
    uint32_t k;
    uint32_t c;
    uint32_t i;

    for (k = all->first[upper]; k < all->first[upper + 1]; k++) {
        for (c = all->from[k]; c <= all->to[k]; c++) {
            for (i = all->starts.first[c]; i < all->starts.first[c + 1]; i++) {
                uint32_t lower = all->starts.items[i];
                uint32_t end = c == all->from[k] ? end_of(all, lower, c) : 0;
                if (lower == upper || all->stamps[lower] == upper + 1 || end > all->to[k] ||
                    (c == all->from[k] && end == all->to[k] && lower < upper) ||
                    (lower < upper && begins_inside(all, upper, lower)))
                    continue;
                all->stamps[lower] = upper + 1;
                msc__buckets_add(&model->below, upper, lower);
                msc__buckets_add(&model->above, lower, upper);
            }
        }
    }
}

msc_status msc__model_pair(msc__model *model, const msc__survey *s, msc_error *err)
{
    spans all = {.scratch = {.ctx = model->scratch.ctx}};
    msc_status status = spans_init(&all, model, s, err);
    int pass;
    uint32_t i;

    msc__buckets_init(&model->scratch, &model->above, model->candidate_count);
    msc__buckets_init(&model->scratch, &model->below, model->candidate_count);
    for (pass = 0; pass < 2 && status == MSC_OK; pass++) {
        memset(all.stamps, 0, model->candidate_count * sizeof *all.stamps);
        for (i = 0; i < model->candidate_count; i++)
            add_pairs(model, &all, i);
        if (pass == 0) {
            msc__buckets_place(&model->scratch, &model->above);
            msc__buckets_place(&model->scratch, &model->below);
        }
    }
    msc__scratch_fini(&all.scratch);
    return status == MSC_OK ? msc__scratch_check(&model->scratch, "candidates", err) : status;
}

/* ---- groups --------------------------------------------------------------------------------------- */

/* A candidate on its way into a group. */
typedef struct keyed {
    uint64_t key;
    uint32_t first_call;
    uint32_t candidate;
} keyed;

static int compare_keyed(const void *left, const void *right)
{
    const keyed *a = left;
    const keyed *b = right;

    if (a->key != b->key)
        return a->key < b->key ? -1 : 1;
    if (a->first_call != b->first_call)
        return a->first_call < b->first_call ? -1 : 1;
    return (a->candidate > b->candidate) - (a->candidate < b->candidate);
}

/* splitmix64's finisher: spreads small differences over all bits. */
static uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

/* Per module a number that is equal for modules of equal structure below parents of equal numbers. A module
 * of unknown structure is like no other. Two numbers that are equal by accident cost quality, not truth: a
 * group only says which moves are tried first. */
static void fill_chains(const msc__model *model, uint64_t *chains)
{
    uint32_t m;

    for (m = 0; m < model->module_count; m++) {
        const msc_module *module = &model->modules[m];
        uint64_t above = module->parent == MSC_NONE ? 0 : chains[module->parent];
        uint64_t own = module->structure != 0 ? mix(module->structure) : ~(uint64_t)m;
        MSC__ASSERT(module->parent == MSC_NONE || module->parent < m);
        chains[m] = mix(above + own);
    }
}

/* What a candidate is, whatever block it belongs to: the modules that its first region calls, and what it
 * keeps. */
static uint64_t key_of(const msc__model *model, const msc__candidate *candidate, const uint64_t *chains)
{
    const msc__region *region = &model->regions[candidate->first_region];
    uint64_t key = chains[candidate->module];
    uint32_t call;
    uint32_t i;

    if (candidate->is_run)
        for (call = region->first_call; call <= region->last_call; call = model->last_call[call] + 1)
            key = mix(key + chains[model->calls[call].module]);
    if (msc__moves(candidate))
        key = mix(key + 1 + candidate->offload);
    for (i = 0; i < candidate->kept_count; i++)
        key = mix(key + msc__kept_of(model, candidate)[i] + 1);
    return key;
}

static uint32_t sort_usable(const msc__model *model, const uint64_t *chains, keyed *list)
{
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < model->candidate_count; i++) {
        const msc__candidate *candidate = &model->candidates[i];
        if (!candidate->usable)
            continue;
        list[count].key = key_of(model, candidate, chains);
        list[count].first_call = model->regions[candidate->first_region].first_call;
        list[count].candidate = i;
        count++;
    }
    if (count > 0)
        qsort(list, count, sizeof *list, compare_keyed);
    return count;
}

msc_status msc__model_group(msc__model *model, msc_error *err)
{
    msc__scratch *scratch = &model->scratch;
    uint64_t *chains = msc__scratch_take(scratch, model->module_count, sizeof *chains);
    keyed *list = msc__scratch_take(scratch, model->candidate_count, sizeof *list);
    int pass;
    uint32_t i;

    if (scratch->failed_bytes > 0)
        return msc__scratch_check(scratch, "groups of candidates", err);
    fill_chains(model, chains);
    model->usable_count = sort_usable(model, chains, list);
    model->group_count = 0;
    for (i = 0; i < model->usable_count; i++) {
        if (i == 0 || list[i].key != list[i - 1].key)
            model->group_count++;
        model->candidates[list[i].candidate].group = model->group_count - 1;
    }
    MSC__ASSERT(model->group_count <= model->usable_count);
    msc__buckets_init(scratch, &model->members, model->group_count);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < model->usable_count; i++)
            msc__buckets_add(&model->members, model->candidates[list[i].candidate].group, list[i].candidate);
        if (pass == 0)
            msc__buckets_place(scratch, &model->members);
    }
    return msc__scratch_check(scratch, "groups of candidates", err);
}
