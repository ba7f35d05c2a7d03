/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far from the best possible time a plan can be.
 *
 * Let t be any moment of the step, and X = live bytes of the plain step at t − budget. Any set A whose peak
 * is within the budget has at most `budget` bytes alive at t, so it takes at least X bytes away there. A
 * buffer that is alive at t in the plain step and not under A was made in a region of A: only the region that
 * a buffer is made in can drop it. Regions of A do not overlap, so each such buffer belongs to exactly one,
 * and
 *
 *      X  <=  bytes gone at t  <=  sum over regions r of A of w(r)
 *
 * where w(r) counts what r could drop at t if nothing else held it, less what r itself certainly adds there
 * (recomputed instances, state). What else A adds by holding inputs and kept outputs only makes it harder.
 * So for every price λ >= 0 of a byte,
 *
 *      time added by A  >=  λ X + sum over r in A of (cost(r) − λ w(r))
 *                       >=  λ X + the least such sum over all sets of regions that do not overlap  =  L(λ)
 *
 * Regions are intervals of calls, so the least sum is a walk over the calls: up to call k, either k is in no
 * region, or a region ends with it and the sum before its begin is added. The calls of one module are
 * allowed to be taken one without the other, which can only lower the bound.
 *
 * L is concave in λ, and any λ gives a true bound; the best one is found by halving. A few moments are tried,
 * those at which the plain step has most alive, and the largest bound counts.
 *
 * Integers: bytes are scaled down to 31 bits, w rounded up and X down; λ is a multiple of 2^-shift; every
 * term is rounded to the side that lowers the bound.
 *
 * Cost: moments × halvings × (calls + regions).
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "decide/decide_cost.h"
#include "decide/decide_search.h"

#define PPM 1000000
#define MOST_MOMENTS 8u
#define HALVINGS 24u
#define PRICE_BITS 31u
/* Regions × moments: some milliseconds of work. */
#define MOST_VISITS (1u << 16)

/* Working memory of one bound. */
typedef struct bounding {
    const msc__model *model;
    const msc__fit *fit;
    msc__scratch scratch;
    msc__buckets ends; /* regions by the call that they end with */
    int64_t *cost_ns;  /* per region */
    uint64_t *weights; /* per region: w, scaled */
    int64_t *least_ns; /* per call: least sum before it */
    uint64_t *gone;    /* per call: w of the regions in that sum */
    uint64_t missing;  /* X, scaled */
    unsigned shift;    /* of prices */
} bounding;

/* ---- one moment ------------------------------------------------------------------------------------ */

/* λ w, rounded up. Both factors are below 2^32. */
static int64_t worth_ns(const bounding *b, uint64_t weight, uint64_t price)
{
    uint64_t product = weight * price;

    MSC__ASSERT(weight >> 32 == 0 && price >> 32 == 0);

    return (int64_t)((product >> b->shift) + ((product & (((uint64_t)1 << b->shift) - 1)) != 0));
}

/* L(λ), and in `gone` the bytes of the regions that it takes. */
static int64_t lagrangian(bounding *b, uint64_t price, uint64_t *gone)
{
    const msc__model *model = b->model;
    uint32_t c;
    uint32_t i;

    for (c = 0; c < model->call_count; c++) {
        int64_t least_ns = b->least_ns[c];
        uint64_t taken = b->gone[c];
        for (i = b->ends.first[c]; i < b->ends.first[c + 1]; i++) {
            uint32_t r = b->ends.items[i];
            uint32_t from = model->regions[r].first_call;
            int64_t sum_ns = b->least_ns[from] + b->cost_ns[r] - worth_ns(b, b->weights[r], price);
            MSC__ASSERT(from <= c && model->regions[r].last_call == c);
            if (sum_ns < least_ns) {
                least_ns = sum_ns;
                taken = b->gone[from] + b->weights[r];
            }
        }
        b->least_ns[c + 1] = least_ns;
        b->gone[c + 1] = taken;
    }
    MSC__ASSERT(b->least_ns[0] == 0 && b->gone[0] == 0);
    *gone = b->gone[model->call_count];
    return b->least_ns[model->call_count] + (int64_t)(b->missing * price >> b->shift);
}

/* The price above which every region that frees anything is worth its cost, in bits behind the point. */
static void choose_shift(bounding *b)
{
    uint64_t most = 1;
    uint32_t r;

    for (r = 0; r < b->model->region_count; r++)
        if (b->weights[r] > 0 && (uint64_t)b->cost_ns[r] / b->weights[r] + 1 > most)
            most = (uint64_t)b->cost_ns[r] / b->weights[r] + 1;
    for (b->shift = 0; b->shift < PRICE_BITS && most << (b->shift + 1) < (uint64_t)1 << PRICE_BITS;
         b->shift++) {
    }
}

static int64_t best_price(bounding *b)
{
    uint64_t low = 0;
    uint64_t high = (uint64_t)1 << PRICE_BITS;
    int64_t best_ns = 0;
    uint32_t i;

    for (i = 0; i < HALVINGS && low < high; i++) {
        uint64_t price = low + (high - low) / 2;
        uint64_t gone;
        int64_t bound_ns = lagrangian(b, price, &gone);
        if (bound_ns > best_ns)
            best_ns = bound_ns;
        if (gone >= b->missing)
            high = price;
        else
            low = price + 1;
    }
    MSC__ASSERT(best_ns >= 0);
    return best_ns;
}

/* Bytes of a moment, scaled to 31 bits. False if no set can take enough away, which says nothing of time. */
static bool weigh(bounding *b, uint32_t segment, uint64_t missing)
{
    uint64_t most = missing;
    unsigned scale = 0;
    uint32_t r;

    for (r = 0; r < b->model->region_count; r++) {
        int64_t freed = msc__fit_most_freed(b->fit, r, segment);
        b->weights[r] = freed > 0 ? (uint64_t)freed : 0;
        most = b->weights[r] > most ? b->weights[r] : most;
    }
    while (most >> scale >= (uint64_t)1 << (PRICE_BITS - 1))
        scale++;
    for (r = 0; r < b->model->region_count; r++)
        b->weights[r] = (b->weights[r] >> scale) + ((b->weights[r] & (((uint64_t)1 << scale) - 1)) != 0);
    b->missing = missing >> scale;
    MSC__ASSERT(b->missing < (uint64_t)1 << PRICE_BITS);
    return b->missing > 0;
}

/* ---- moments --------------------------------------------------------------------------------------- */

/* The segments of the highest blocks, highest first: moments far from each other. */
static uint32_t list_moments(const bounding *b, uint32_t *moments)
{
    const msc__fit *fit = b->fit;
    uint32_t most = MOST_VISITS / (b->model->region_count + 1) + 1;
    uint32_t count = 0;
    uint32_t block;
    uint32_t i;

    if (most > MOST_MOMENTS)
        most = MOST_MOMENTS;
    for (block = 0; block < fit->block_count; block++) {
        uint32_t highest = block * MSC__FIT_BLOCK;
        for (i = highest; i < fit->segment_count && i / MSC__FIT_BLOCK == block; i++)
            if (fit->base_bytes[i] > fit->base_bytes[highest])
                highest = i;
        for (i = count; i > 0 && fit->base_bytes[moments[i - 1]] < fit->base_bytes[highest]; i--)
            if (i < most)
                moments[i] = moments[i - 1];
        if (i < most) {
            moments[i] = highest;
            count += count < most;
        }
    }
    MSC__ASSERT(count <= most && most <= MOST_MOMENTS);
    return count;
}

static msc_status prepare(bounding *b, msc_error *err)
{
    const msc__model *model = b->model;
    int pass;
    uint32_t i;
    uint32_t r;

    b->cost_ns = msc__scratch_take(&b->scratch, model->region_count, sizeof *b->cost_ns);
    b->weights = msc__scratch_take(&b->scratch, model->region_count, sizeof *b->weights);
    b->least_ns = msc__scratch_take(&b->scratch, (size_t)model->call_count + 1, sizeof *b->least_ns);
    b->gone = msc__scratch_take(&b->scratch, (size_t)model->call_count + 1, sizeof *b->gone);
    msc__buckets_init(&b->scratch, &b->ends, model->call_count);
    for (pass = 0; pass < 2; pass++) {
        for (r = 0; r < model->region_count; r++)
            msc__buckets_add(&b->ends, model->regions[r].last_call, r);
        if (pass == 0)
            msc__buckets_place(&b->scratch, &b->ends);
    }
    if (b->scratch.failed_bytes > 0)
        return msc__scratch_check(&b->scratch, "a bound", err);
    for (i = 0; i < model->candidate_count; i++)
        for (r = 0; r < model->candidates[i].region_count; r++) {
            uint32_t region = model->candidates[i].first_region + r;
            b->cost_ns[region] = msc__cost_region(model, &model->candidates[i], &model->regions[region]);
        }
    return MSC_OK;
}

msc_status msc__bound_added_ns(const msc__model *model, const msc__fit *fit, uint64_t budget_bytes,
                               int64_t *added_ns, msc_error *err)
{
    bounding b = {.model = model, .fit = fit, .scratch = {.ctx = model->scratch.ctx}};
    uint32_t moments[MOST_MOMENTS];
    msc_status status = prepare(&b, err);
    uint32_t count = status == MSC_OK ? list_moments(&b, moments) : 0;
    uint32_t i;

    *added_ns = 0;
    for (i = 0; i < count; i++) {
        uint64_t live_bytes = (uint64_t)fit->base_bytes[moments[i]];
        int64_t bound_ns = 0;
        if (live_bytes > budget_bytes && weigh(&b, moments[i], live_bytes - budget_bytes)) {
            choose_shift(&b);
            bound_ns = best_price(&b);
        }
        if (bound_ns > *added_ns)
            *added_ns = bound_ns;
    }
    msc__scratch_fini(&b.scratch);
    return status;
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
