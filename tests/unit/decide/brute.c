/* SPDX-License-Identifier: Apache-2.0 */
/* Plain recursion: each set is followed by those with one more candidate that comes later. */
#include "brute.h"

#include <stdlib.h>
#include <string.h>

/* ---- overlaps -------------------------------------------------------------------------------------- */

static bool lies_in(const msc_call *calls, uint32_t call, uint32_t outer)
{
    while (call != outer && call != MSC_NONE)
        call = calls[call].parent;
    return call == outer;
}

/* Whether a candidate treats a call: one of its modules' calls, or what lies inside. */
static bool treats(const msc__model *m, uint32_t candidate, uint32_t call)
{
    const msc__candidate *c = &m->candidates[candidate];
    const msc__region *run = &m->regions[c->first_region];
    uint32_t i;

    if (c->is_run)
        return call >= run->first_call && call <= run->last_call;
    for (i = 0; i < m->call_count; i++)
        if (m->calls[i].module == c->module && lies_in(m->calls, call, i))
            return true;
    return false;
}

static void fill_excludes(brute *b, const uint8_t *treated)
{
    uint32_t n = b->model.candidate_count;
    uint32_t calls = b->model.call_count;
    uint32_t i;
    uint32_t k;
    uint32_t c;

    for (i = 0; i < n; i++)
        for (k = 0; k < n; k++)
            for (c = 0; c < calls && !b->excludes[i * n + k]; c++)
                b->excludes[i * n + k] = treated[i * calls + c] && treated[k * calls + c];
}

bool brute_init(brute *b, msc_context *ctx, const msc_graph *graph, const msc_decide_options *options)
{
    uint8_t *treated;
    uint32_t n;
    uint32_t i;
    uint32_t c;

    memset(b, 0, sizeof *b);
    b->ctx = ctx;
    if (msc__model_init(&b->model, ctx, graph, options, NULL) != MSC_OK ||
        msc__fit_init(&b->fit, &b->model, NULL) != MSC_OK)
        return false;
    n = b->model.candidate_count;
    b->excludes = calloc((size_t)n * n + 1, 1);
    b->blocked = calloc((size_t)n + 1, sizeof *b->blocked);
    treated = calloc((size_t)n * b->model.call_count + 1, 1);
    if (n > BRUTE_MOST_CANDIDATES || b->excludes == NULL || b->blocked == NULL || treated == NULL) {
        free(treated);
        return false;
    }
    for (i = 0; i < n; i++)
        for (c = 0; c < b->model.call_count; c++)
            treated[i * b->model.call_count + c] = treats(&b->model, i, c);
    fill_excludes(b, treated);
    free(treated);
    return true;
}

void brute_fini(brute *b)
{
    free(b->excludes);
    free(b->blocked);
    msc__fit_fini(&b->fit);
    msc__model_fini(&b->model);
}

bool brute_overlap(const brute *b, uint32_t one, uint32_t other)
{
    return b->excludes[one * b->model.candidate_count + other] != 0;
}

/* ---- combinations ---------------------------------------------------------------------------------- */

static void block_later(brute *b, uint32_t candidate, uint32_t step)
{
    uint32_t i;

    for (i = candidate + 1; i < b->model.candidate_count; i++)
        if (brute_overlap(b, candidate, i))
            b->blocked[i] += step;
}

static void count_from(brute *b, uint32_t from)
{
    uint32_t c;

    b->sets++;
    for (c = from; c < b->model.candidate_count && b->sets < b->most_sets; c++) {
        if (b->blocked[c] > 0)
            continue;
        block_later(b, c, 1);
        count_from(b, c + 1);
        block_later(b, c, UINT32_MAX);
    }
}

uint64_t brute_count(brute *b, uint64_t most)
{
    b->sets = 0;
    b->most_sets = most;
    count_from(b, 0);
    return b->sets;
}

static void look(brute *b, int64_t added_ns)
{
    uint64_t peak_bytes = msc__fit_peak(&b->fit);
    uint32_t i;

    b->sets++;
    if (peak_bytes == MSC__FIT_NO_PEAK)
        return;
    peak_bytes += msc__fit_staging(&b->fit);
    if (peak_bytes < b->smallest_bytes)
        b->smallest_bytes = peak_bytes;
    for (i = 0; i < b->best_count; i++)
        if (peak_bytes <= b->best[i].budget_bytes && added_ns < b->best[i].added_ns)
            b->best[i].added_ns = added_ns;
    if (b->watch != NULL)
        b->watch(b, peak_bytes, b->watch_state);
}

static void look_from(brute *b, uint32_t from, int64_t added_ns)
{
    uint32_t c;

    look(b, added_ns);
    for (c = from; c < b->model.candidate_count; c++) {
        if (b->blocked[c] > 0)
            continue;
        block_later(b, c, 1);
        msc__fit_set(&b->fit, c, true);
        b->set[c / 64] ^= (uint64_t)1 << c % 64;
        look_from(b, c + 1, added_ns + b->model.candidates[c].cost_ns);
        b->set[c / 64] ^= (uint64_t)1 << c % 64;
        msc__fit_set(&b->fit, c, false);
        block_later(b, c, UINT32_MAX);
    }
}

void brute_solve(brute *b, brute_best *best, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        best[i].added_ns = INT64_MAX;
    b->best = best;
    b->best_count = count;
    b->sets = 0;
    b->smallest_bytes = UINT64_MAX;
    look_from(b, 0, 0);
}
