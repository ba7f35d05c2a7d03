/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far from the best possible time a plan can be.
 *
 * Let t* be the moment at which the plain step peaks, and X = plain peak − budget. Any set A whose peak is
 * within the budget has at most `budget` bytes alive at t*, so it takes at least X bytes away there. A buffer
 * that is alive at t* in the plain step and not under A was made in a region of A: only the region that
 * a buffer is made in can drop it. Regions of A do not overlap, so each such buffer belongs to exactly one
 * member of A, and
 *
 *      X  <=  bytes gone at t*  <=  sum over members c of w(c)
 *
 * where w(c) counts what c could drop at t* if nothing else held it, less what c itself certainly adds there
 * (recomputed instances, state). What else A adds by holding inputs only makes it harder. So A is a feasible
 * point of
 *
 *      minimise  sum of cost(c) x(c)   subject to  sum of w(c) x(c) >= X,  0 <= x(c) <= 1
 *
 * and the optimum of that program is a lower bound of A's added time. That A must be an antichain is left
 * out, which can only lower the bound. The program is a fractional knapsack: take candidates by cost per byte
 * until X is reached, the last one in part, rounded down.
 */
#include <stdlib.h>

#include "base/error.h"
#include "decide/decide_internal.h"

#define PPM 1000000

typedef struct piece {
    uint64_t bytes;
    int64_t cost_ns;
    uint32_t candidate;
} piece;

static int compare_pieces(const void *left, const void *right)
{
    const piece *a = left;
    const piece *b = right;
    int order = msc__cost_compare((uint64_t)a->cost_ns, a->bytes, (uint64_t)b->cost_ns, b->bytes);

    return order != 0 ? order : (a->candidate > b->candidate) - (a->candidate < b->candidate);
}

static uint32_t list_pieces(const msc__model *model, const msc__fit *fit, piece *pieces)
{
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < model->candidate_count; i++) {
        int64_t freed = msc__fit_most_freed(fit, i, fit->plain_peak_segment);
        if (freed <= 0)
            continue;
        pieces[count].bytes = (uint64_t)freed;
        pieces[count].cost_ns = model->candidates[i].cost_ns;
        pieces[count].candidate = i;
        count++;
    }
    return count;
}

/* floor(cost × part / whole) for part < whole, bit by bit, since the product may need 128 bits. */
static int64_t scale_down(int64_t cost, uint64_t part, uint64_t whole)
{
    uint64_t quotient = 0;
    uint64_t rest = 0;
    int bit;

    for (bit = 62; bit >= 0; bit--) {
        quotient *= 2;
        rest *= 2; /* below 2 × whole, and whole is below 2^62 */
        if (((uint64_t)cost >> bit & 1) != 0)
            rest += part;
        while (rest >= whole) {
            rest -= whole;
            quotient++;
        }
    }
    return (int64_t)quotient;
}

msc_status msc__bound_added_ns(const msc__model *model, const msc__fit *fit, uint64_t budget_bytes,
                               int64_t *added_ns, msc_error *err)
{
    msc__scratch scratch = {.ctx = model->scratch.ctx};
    uint64_t missing = fit->plain_peak_bytes > budget_bytes ? fit->plain_peak_bytes - budget_bytes : 0;
    piece *pieces = msc__scratch_take(&scratch, model->candidate_count, sizeof *pieces);
    uint32_t count;
    uint32_t i;

    *added_ns = 0;
    if (pieces == NULL)
        return msc__scratch_check(&scratch, "a bound", err);
    count = list_pieces(model, fit, pieces);
    if (count > 0)
        qsort(pieces, count, sizeof *pieces, compare_pieces);
    for (i = 0; i < count && missing > 0; i++) {
        if (pieces[i].bytes > missing) {
            *added_ns += scale_down(pieces[i].cost_ns, missing, pieces[i].bytes);
            missing = 0;
        } else {
            *added_ns += pieces[i].cost_ns;
            missing -= pieces[i].bytes;
        }
    }
    msc__scratch_fini(&scratch);
    return MSC_OK;
}

uint32_t msc__bound_ppm(int64_t step_ns, int64_t lower_ns)
{
    uint64_t excess;
    uint64_t lower;
    uint64_t ppm;

    if (step_ns <= lower_ns || lower_ns <= 0)
        return 0;
    excess = (uint64_t)(step_ns - lower_ns);
    lower = (uint64_t)lower_ns;
    while (excess > UINT64_MAX / 2 / PPM) { /* both halved, each to the cautious side */
        excess = excess / 2 + 1;
        lower /= 2;
    }
    if (lower == 0)
        return UINT32_MAX;
    ppm = (excess * PPM + lower - 1) / lower;
    return ppm > UINT32_MAX ? UINT32_MAX : (uint32_t)ppm;
}
