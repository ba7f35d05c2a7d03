/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Combinations of a small graph, for a caching allocator: every one, or those around the frontier.
 *
 * What a set reserves only a replay tells, and a neighbour of a good set may be a bad one: a segment more or
 * less hangs on the order of sizes. So where a graph has few combinations, all are listed, each with its
 * exact time and its allocated bytes, rounded up to whole segments: a lower bound of what it reserves.
 *
 *      by bound    7 MiB   8      8      10     10     12 …      replayed from the least bound on until no
 *      reserved    12      11     11     10     ?      ?         bound is below the least: 10 is proven
 *
 * The order and the number of replays depend on the graph alone, not on a budget. A replay that passes the
 * least so far is broken off; what was reserved by then is a better bound.
 *
 * Where there are too many combinations to list, those on the frontier are, what one change makes of each,
 * and what one change makes of the smallest of these. Nothing is proven then.
 *
 * What the frontier receives is again all that were listed, in order of time; or, where to replay each could
 * take too long, those that are nearest to the allocated bytes of the fastest below them, and the one that
 * is known to reserve least. A choice for a budget takes the first that fits.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "decide/decide_reserved.h"

/* Combinations that are listed, and candidates that do not overlap. */
#define MOST_SETS ((uint32_t)1 << 15)
#define MOST_INDEPENDENT 15u
#define MOST_WORDS (1u << 20)            /* of their sets */
#define MOST_RECORDS ((uint64_t)1 << 13) /* of one replay */
/* Records × replays: until the least is proven; of all that may have to be replayed for a budget. */
#define PROOF_RECORDS ((uint64_t)1 << 23)
#define CHOICE_RECORDS ((uint64_t)1 << 22)
/* Likewise where not all combinations are listed. */
#define MOST_GATHERED ((uint32_t)1 << 13)
#define GATHERED_PLANS 48u
#define GATHERED_SMALLEST 16u
#define SEARCH_RECORDS ((uint64_t)1 << 19)
#define SEARCH_CHOICE_RECORDS ((uint64_t)1 << 20)

typedef struct combination {
    uint64_t allocated_bytes;
    uint64_t lower_bytes;    /* of what it reserves */
    uint64_t reserved_bytes; /* 0: not known */
    uint64_t over_bytes; /* allocated, above the least of those that take no longer; 0: is wanted anyway */
    uint64_t hash;       /* of the set; 0 where no set is listed twice */
    int64_t added_ns;
    uint32_t set; /* place in the order of listing, in which `sets` are; 0: the plain step */
} combination;

typedef struct every {
    const msc__reserving *r;
    const msc__model *model;
    msc__scratch scratch;
    uint32_t *blocked; /* per candidate: members of the present set that it overlaps */
    uint32_t *stack;   /* the present set, in order */
    uint64_t *present; /* the same, as bits */
    uint64_t *sets;    /* `words` each */
    combination *all;
    uint32_t count;
    uint32_t most; /* room in `all` and `sets` */
    uint32_t words;
    bool usable_only;
    bool is_part;     /* not all combinations are listed */
    int64_t added_ns; /* of the present set */
} every;

/* ---- listing --------------------------------------------------------------------------------------- */

static void block(every *e, const msc__buckets *lists, uint32_t candidate, uint32_t step)
{
    uint32_t i;

    for (i = lists->first[candidate]; i < lists->first[candidate + 1]; i++) {
        MSC__ASSERT(step == 1 || e->blocked[lists->items[i]] > 0);
        e->blocked[lists->items[i]] += step;
    }
}

static bool may_join(const every *e, uint32_t candidate)
{
    return e->blocked[candidate] == 0 && (!e->usable_only || e->model->candidates[candidate].usable);
}

/* The next candidate from `next` on that may join the present set, or the candidate count. */
static uint32_t next_free(const every *e, uint32_t next)
{
    while (next < e->model->candidate_count && !may_join(e, next))
        next++;
    return next;
}

static void turn(every *e, uint32_t candidate, bool active, bool look)
{
    int64_t cost_ns = e->model->candidates[candidate].cost_ns;
    uint32_t step = active ? 1 : UINT32_MAX; /* adding UINT32_MAX takes one away */

    MSC__ASSERT(e->blocked[candidate] == 0);
    block(e, &e->model->above, candidate, step);
    block(e, &e->model->below, candidate, step);
    if (!look)
        return;
    e->present[candidate / 64] ^= (uint64_t)1 << (candidate % 64);
    e->added_ns += active ? cost_ns : -cost_ns;
    MSC__ASSERT(e->added_ns >= 0);
    msc__fit_set(e->r->fit, candidate, active);
}

static void look_at(every *e)
{
    uint64_t peak_bytes = msc__fit_peak(e->r->fit);
    uint64_t hash = 0;
    uint32_t i;

    if (e->count == e->most || peak_bytes == MSC__FIT_NO_PEAK)
        return;
    for (i = 0; i < e->words && e->is_part; i++)
        hash = (hash ^ e->present[i]) * 0x9e3779b97f4a7c15u;
    e->all[e->count] = (combination){.allocated_bytes = peak_bytes,
                                     .lower_bytes = msc__reserving_lower(e->r, peak_bytes),
                                     .hash = hash ^ hash >> 32,
                                     .added_ns = e->added_ns,
                                     .set = e->count};
    memcpy(e->sets + (size_t)e->count * e->words, e->present, e->words * sizeof *e->sets);
    e->count++;
}

/* Depth first over all combinations, the empty one first: from each, those with one more candidate that comes
 * later. Looks at them, or only counts them, up to one more than `most`. */
static uint32_t visit(every *e, uint32_t most, bool look)
{
    uint32_t count = e->model->candidate_count;
    uint32_t next = next_free(e, 0);
    uint32_t depth = 0;
    uint32_t seen = 1;

    if (look)
        look_at(e);
    while (seen <= most && (next < count || depth > 0)) {
        bool enters = next < count;
        if (enters)
            e->stack[depth++] = next;
        else
            next = e->stack[--depth];
        turn(e, next, enters, look);
        seen += enters;
        if (enters && look)
            look_at(e);
        next = next_free(e, next + 1);
    }
    while (depth > 0)
        turn(e, e->stack[--depth], false, look);
    MSC__ASSERT(!look || e->added_ns == 0);
    return seen;
}

/* Whether so many candidates do not overlap that their combinations alone are too many. Takes as they come. */
static bool has_many(every *e)
{
    uint32_t depth = 0;
    uint32_t next;

    for (next = next_free(e, 0); next < e->model->candidate_count && depth <= MOST_INDEPENDENT;
         next = next_free(e, next + 1)) {
        e->stack[depth++] = next;
        turn(e, next, true, false);
    }
    next = depth;
    while (depth > 0)
        turn(e, e->stack[--depth], false, false);
    return next > MOST_INDEPENDENT;
}

/* Number of combinations; 0: too many. */
static uint32_t count_sets(every *e)
{
    uint32_t count = has_many(e) ? 0 : visit(e, MOST_SETS, false);

    return count > MOST_SETS || (uint64_t)count * e->words > MOST_WORDS ? 0 : count;
}

static msc_status take_room(every *e, uint32_t most, msc_error *err)
{
    e->most = most;
    e->sets = msc__scratch_take(&e->scratch, ((size_t)most + 1) * e->words, sizeof *e->sets);
    e->all = msc__scratch_take(&e->scratch, (size_t)most + 1, sizeof *e->all);
    return msc__scratch_check(&e->scratch, "combinations", err);
}

/* Lists all combinations; none, when there are too many. What frees nothing that is allocated may still change
 * what is reserved, and is left out only if there are too many with it. */
static msc_status list_all(every *e, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t count;

    e->usable_only = !e->r->allow_checkpoint;
    count = count_sets(e);
    if (count == 0 && !e->usable_only) {
        e->usable_only = true;
        count = count_sets(e);
    }
    if (count == 0)
        return MSC_OK;
    status = take_room(e, count, err);
    if (status == MSC_OK)
        (void)visit(e, MOST_SETS, true);
    return status;
}

/* ---- orders ---------------------------------------------------------------------------------------- */

static int compare_u64(uint64_t a, uint64_t b)
{
    return (a > b) - (a < b);
}

static int compare_bounds(const void *left, const void *right)
{
    const combination *a = left;
    const combination *b = right;
    int order = compare_u64(a->lower_bytes, b->lower_bytes);

    if (order == 0)
        order = (a->added_ns > b->added_ns) - (a->added_ns < b->added_ns);
    if (order == 0)
        order = compare_u64(a->hash, b->hash);
    return order != 0 ? order : (a->set > b->set) - (a->set < b->set);
}

/* The plain step, which is listed first, stays first. */
static int compare_times(const void *left, const void *right)
{
    const combination *a = left;
    const combination *b = right;
    int order = (a->added_ns > b->added_ns) - (a->added_ns < b->added_ns);

    if (a->set == 0 || b->set == 0)
        return (a->set > 0) - (b->set > 0);
    if (order == 0)
        order = compare_u64(a->lower_bytes, b->lower_bytes);
    return order != 0 ? order : (a->set > b->set) - (a->set < b->set);
}

/* The nearest to the best allocated bytes first. */
static int compare_promise(const void *left, const void *right)
{
    const combination *a = left;
    const combination *b = right;
    int order = compare_u64(a->over_bytes, b->over_bytes);

    return order != 0 ? order : compare_times(left, right);
}

/* ---- gathering ------------------------------------------------------------------------------------- */

static const uint64_t *set_of(const every *e, const combination *c)
{
    return e->sets + (size_t)c->set * e->words;
}

/* Goes to a set; what leaves goes first, since active candidates must not overlap. */
static void go_to(every *e, const uint64_t *target)
{
    uint32_t i;

    for (i = 0; i < e->model->candidate_count; i++)
        if (msc__set_has(e->present, i) && (target == NULL || !msc__set_has(target, i)))
            turn(e, i, false, true);
    for (i = 0; i < e->model->candidate_count && target != NULL; i++)
        if (!msc__set_has(e->present, i) && msc__set_has(target, i))
            turn(e, i, true, true);
}

static void drop_listed(every *e, const msc__buckets *lists, uint32_t candidate)
{
    uint32_t i;

    for (i = lists->first[candidate]; i < lists->first[candidate + 1]; i++)
        if (msc__set_has(e->present, lists->items[i]))
            turn(e, lists->items[i], false, true);
}

/* Looks at a set, and at what one change makes of it: one candidate dropped, or added in place of what it
 * overlaps. */
static void look_around(every *e, const uint64_t *set)
{
    uint32_t i;

    go_to(e, set);
    look_at(e);
    for (i = 0; i < e->model->candidate_count && e->count < e->most; i++) {
        bool active = msc__set_has(set, i);
        if (!e->model->candidates[i].usable)
            continue;
        if (!active) {
            drop_listed(e, &e->model->above, i);
            drop_listed(e, &e->model->below, i);
        }
        turn(e, i, !active, true);
        look_at(e);
        go_to(e, set);
    }
}

/* Sorts by bound and takes out what is there more than once. */
static void sort_once(every *e)
{
    uint32_t kept = 0;
    uint32_t i;

    qsort(e->all, e->count, sizeof *e->all, compare_bounds);
    for (i = 0; i < e->count; i++) {
        const combination *c = &e->all[i];
        const combination *before = kept == 0 ? NULL : &e->all[kept - 1];
        if (before == NULL || c->hash != before->hash || c->added_ns != before->added_ns ||
            c->lower_bytes != before->lower_bytes ||
            memcmp(set_of(e, c), set_of(e, before), e->words * sizeof *e->sets) != 0)
            e->all[kept++] = *c;
    }
    MSC__ASSERT(kept > 0 && kept <= e->count);
    e->count = kept;
}

/* Lists the plain step, the frontier from its smallest plan on, and what is around; then what is around the
 * smallest of these. Half of the room is for each. */
static msc_status gather(every *e, msc__frontier *frontier, msc_error *err)
{
    uint32_t starts[GATHERED_SMALLEST];
    uint32_t most = MOST_WORDS / e->words < MOST_GATHERED ? (uint32_t)(MOST_WORDS / e->words) : MOST_GATHERED;
    msc_status status = take_room(e, most, err);
    uint32_t count;
    uint32_t i;

    if (status != MSC_OK)
        return status;
    e->is_part = true;
    e->most = most / 2;
    msc__frontier_thin(frontier, GATHERED_PLANS);
    look_at(e);
    for (i = frontier->plans.count; i-- > 0;) {
        go_to(e, msc__frontier_set(frontier, i));
        look_at(e);
    }
    for (i = frontier->plans.count; i-- > 0;)
        look_around(e, msc__frontier_set(frontier, i));
    qsort(e->all, e->count, sizeof *e->all, compare_bounds);
    count = e->count < GATHERED_SMALLEST ? e->count : GATHERED_SMALLEST;
    for (i = 0; i < count; i++)
        starts[i] = e->all[i].set;
    e->most = most;
    for (i = 0; i < count; i++)
        look_around(e, e->sets + (size_t)starts[i] * e->words);
    go_to(e, NULL);
    MSC__ASSERT(e->added_ns == 0 && e->count > 0);
    sort_once(e);
    return MSC_OK;
}

/* ---- the least that can be reserved ---------------------------------------------------------------- */

/* Replays from the least bound on those listed first, until the least is known or that has taken `records`. */
static msc_status find_least(every *e, uint32_t listed, uint64_t records, uint64_t *least_bytes,
                             msc_error *err)
{
    uint64_t left = records / msc__reserving_records(e->model);
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = 0; i < e->count && left > 0 && status == MSC_OK; i++) {
        combination *c = &e->all[i];
        uint64_t found_bytes = 0;
        if (c->lower_bytes >= *least_bytes || c->reserved_bytes != 0 || c->set >= listed)
            continue;
        status = msc__reserved_peak(e->r, set_of(e, c), *least_bytes, &found_bytes, err);
        MSC__ASSERT(status != MSC_OK || found_bytes >= c->lower_bytes);
        c->lower_bytes = found_bytes;
        if (found_bytes <= *least_bytes)
            *least_bytes = c->reserved_bytes = found_bytes;
        left--;
    }
    return status;
}

/* Improves the one that reserves least, where not all are listed. */
static msc_status improve_least(every *e, uint64_t *least_bytes, msc_error *err)
{
    combination found = {.reserved_bytes = *least_bytes, .set = e->most};
    uint64_t *set = e->sets + (size_t)e->most * e->words; /* one more than `most` have room */
    msc_status status;
    uint32_t i = 0;

    while (e->all[i].reserved_bytes != *least_bytes)
        i++;
    MSC__ASSERT(i < e->count);
    memcpy(set, set_of(e, &e->all[i]), e->words * sizeof *set);
    status = msc__reserve_less(e->r, set, &found.reserved_bytes, err);
    if (status != MSC_OK || found.reserved_bytes == *least_bytes)
        return status;
    go_to(e, set);
    found.allocated_bytes = msc__fit_peak(e->r->fit);
    found.added_ns = e->added_ns;
    go_to(e, NULL);
    found.lower_bytes = *least_bytes = found.reserved_bytes;
    MSC__ASSERT(e->count <= e->most && found.reserved_bytes >= found.allocated_bytes);
    e->all[e->count++] = found;
    return MSC_OK;
}

/* First the frontier, then what is near the best of it, then all that was gathered. */
static msc_status search_least(every *e, uint32_t listed, uint64_t *least_bytes, msc_error *err)
{
    msc_status status = find_least(e, listed, SEARCH_RECORDS, least_bytes, err);

    if (status == MSC_OK)
        status = improve_least(e, least_bytes, err);
    if (status == MSC_OK)
        status = find_least(e, e->most, SEARCH_RECORDS, least_bytes, err);
    return status;
}

static msc_status prove_least(every *e, uint64_t *least_bytes, msc_error *err)
{
    qsort(e->all, e->count, sizeof *e->all, compare_bounds);
    return find_least(e, e->count, PROOF_RECORDS, least_bytes, err);
}

/* ---- what a choice is made from -------------------------------------------------------------------- */

/* Sorts by time and fills in how far from the best allocated bytes each is. The plain step and the fastest that
 * is known to reserve least are wanted in any case. */
static void rate(every *e, uint64_t least_bytes)
{
    uint64_t best_bytes = UINT64_MAX;
    bool has_least = false;
    uint32_t i;

    qsort(e->all, e->count, sizeof *e->all, compare_times);
    MSC__ASSERT(e->count > 0 && e->all[0].set == 0 && e->all[0].added_ns == 0);
    for (i = 0; i < e->count; i++) {
        combination *c = &e->all[i];
        /* Of those that allocate the same, the first goes before all others. */
        c->over_bytes = c->allocated_bytes < best_bytes ? 1 : c->allocated_bytes - best_bytes + 2;
        best_bytes = c->allocated_bytes < best_bytes ? c->allocated_bytes : best_bytes;
        if (c->set == 0)
            c->over_bytes = 0;
        if (!has_least && c->reserved_bytes == least_bytes) {
            c->over_bytes = 0;
            has_least = true;
        }
    }
}

static msc_status fill(every *e, uint64_t least_bytes, msc__frontier *frontier, msc_error *err)
{
    uint64_t most = (e->is_part ? SEARCH_CHOICE_RECORDS : CHOICE_RECORDS) / msc__reserving_records(e->model);
    msc_status status = MSC_OK;
    uint32_t i;

    rate(e, least_bytes);
    if (e->count > most) {
        qsort(e->all, e->count, sizeof *e->all, compare_promise);
        e->count = (uint32_t)most;
        qsort(e->all, e->count, sizeof *e->all, compare_times);
    }
    msc__frontier_clear(frontier);
    for (i = 0; i < e->count && status == MSC_OK; i++) {
        const combination *c = &e->all[i];
        msc__frontier_plan plan = {
            .peak_bytes = c->lower_bytes, .reserved_bytes = c->reserved_bytes, .added_ns = c->added_ns};
        status = msc__frontier_insert(frontier, &plan, set_of(e, c), err);
    }
    return status;
}

msc_status msc__reserve_every(const msc__reserving *r, msc__frontier *frontier, bool *done, msc_error *err)
{
    every e = {.r = r, .model = r->model, .scratch = {.ctx = r->model->scratch.ctx}};
    size_t candidates = r->model->candidate_count;
    uint64_t least_bytes = UINT64_MAX;
    msc_status status;

    *done = msc__reserving_records(r->model) <= MOST_RECORDS;
    if (!*done)
        return MSC_OK;
    e.words = frontier->word_count;
    e.blocked = msc__scratch_take(&e.scratch, candidates, sizeof *e.blocked);
    e.stack = msc__scratch_take(&e.scratch, candidates, sizeof *e.stack);
    e.present = msc__scratch_take(&e.scratch, e.words, sizeof *e.present);
    status = msc__scratch_check(&e.scratch, "combinations", err);
    if (status == MSC_OK)
        status = list_all(&e, err);
    if (status == MSC_OK && e.count == 0)
        status = gather(&e, frontier, err);
    if (status == MSC_OK)
        status = e.is_part ? search_least(&e, frontier->plans.count + 1, &least_bytes, err)
                           : prove_least(&e, &least_bytes, err);
    if (status == MSC_OK)
        status = fill(&e, least_bytes, frontier, err);
    msc__scratch_fini(&e.scratch);
    return status;
}
