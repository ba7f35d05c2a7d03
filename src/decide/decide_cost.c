/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time, as the decision sees it.
 *
 * An operation either computes or waits for memory, whichever takes longer, after a fixed launch:
 *
 *      time = launch + max(flops / flops rate, moved bytes / byte rate) + fresh bytes / fresh rate
 *
 * That is the roofline, with the rates of the operation's class: on one host, a copy moves 100 GB/s, tanh 6
 * and a dropout's mask 1, so a single bandwidth would be wrong for all of them. The last term is of the
 * memory and not of the operation. The C library gives large buffers back to the system at once; their pages
 * are made anew for the next one, at the first touch, and that costs ten times what a copy of as many bytes
 * does. Times are whole nanoseconds.
 *
 * Sums must never overflow, whatever a graph claims: within a step, each operation counts for at most
 * 2^60 / (operations + 1) ns, each region's overhead, and its transfers, for at most 2^60 / (calls + 1) ns, and an
 * operation that
 * is looked at for half of what it may count. A plan repeats an operation at most once and looks at it twice,
 * moves at most once for each call, so every step stays below 2^63. For an honest graph of a million operations the limit is 19 minutes an
 * operation.
 */
#include "decide/decide_cost.h"

#include <string.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"

#define MOST_STEP_NS ((int64_t)1 << 60)

/* amount × 1000 / rate, or INT64_MAX. */
static int64_t time_ns(uint64_t amount, uint64_t per_us)
{
    uint64_t whole;
    uint64_t part;

    if (per_us == 0 || !msc__mul_u64(amount / per_us, 1000, &whole))
        return INT64_MAX;
    if (!msc__mul_u64(amount % per_us, 1000, &part))
        part = (amount % per_us) / (per_us / 1000); /* per_us is above 2^54 here */
    else
        part /= per_us;
    return whole > (uint64_t)INT64_MAX - 1000 ? INT64_MAX : (int64_t)(whole + part);
}

/* ---- rates ---------------------------------------------------------------------------------------- */

void msc_rates_init(msc_rates *out, size_t struct_bytes)
{
    msc_rates rates;
    uint32_t i;

    memset(&rates, 0, sizeof rates);
    for (i = 0; i < MSC_RATE_COUNT; i++) {
        rates.flops_per_us[i] = 100000;
        rates.moved_bytes_per_us[i] = 20000;
    }
    rates.fresh_from_bytes = UINT64_MAX;
    rates.fresh_bytes_per_us = 20000;
    rates.launch_ns = 5000;
    rates.recompute_ns = 60000;
    rates.intercept_ns = 15000;
    msc__sized_init(out, struct_bytes, &rates, sizeof rates);
}

const char *msc_rate_name(uint32_t rate)
{
    static const char *const names[MSC_RATE_COUNT] = {
        "other",
        "move",
        "math",
        "slow_math",
        "reduce",
        "channel",
        "select",
        "window",
        "random",
        "gather",
        "matrix",
        "batch",
        "attention",
        "convolution",
        "grouped",
        "grouped_gradient",
        "recurrent",
        "other_half",
        "move_half",
        "math_half",
        "slow_math_half",
        "reduce_half",
        "channel_half",
        "select_half",
        "window_half",
        "random_half",
        "gather_half",
        "matrix_half",
        "batch_half",
        "attention_half",
        "convolution_half",
        "grouped_half",
        "grouped_gradient_half",
        "recurrent_half",
    };

    return rate < MSC_RATE_COUNT ? names[rate] : "";
}

static msc_status check_above_0(const char *name, int64_t value, msc_error *err)
{
    if (value > 0)
        return MSC_OK;
    return msc__fail(err, MSC_EINVAL, "rates.%s is %lld, it must be above 0", name, (long long)value);
}

static msc_status check_kinds(const char *name, const uint64_t *per_us, msc_error *err)
{
    uint32_t i;

    for (i = 0; i < MSC_RATE_COUNT; i++)
        if (per_us[i] == 0)
            return msc__fail(err, MSC_EINVAL, "rates.%s of %s is 0, it must be above", name,
                             msc_rate_name(i));
    return MSC_OK;
}

msc_status msc__read_rates(const msc_rates *given, msc_rates *out, msc_error *err)
{
    msc_rates_init(out, sizeof *out);
    return MSC__READ_OPTIONS("rates.", msc_rates, moved_bytes_per_us, given, out, err);
}

msc_status msc__check_rates(const msc_rates *rates, msc_error *err)
{
    msc_status status;

    if (rates->fresh_from_bytes == 0 || rates->fresh_bytes_per_us == 0)
        return msc__fail(err, MSC_EINVAL, "rates.%s is 0, it must be above",
                         rates->fresh_from_bytes == 0 ? "fresh_from_bytes" : "fresh_bytes_per_us");
    status = check_kinds("flops_per_us", rates->flops_per_us, err);
    if (status == MSC_OK)
        status = check_kinds("moved_bytes_per_us", rates->moved_bytes_per_us, err);
    if (status == MSC_OK)
        status = check_above_0("launch_ns", rates->launch_ns, err);
    if (status == MSC_OK)
        status = check_above_0("recompute_ns", rates->recompute_ns, err);
    return status == MSC_OK ? check_above_0("intercept_ns", rates->intercept_ns, err) : status;
}

msc_link msc_link_default(void)
{
    const uint64_t mib = (uint64_t)1 << 20;

    return (msc_link){.out_bytes_per_us = 10000,
                      .in_bytes_per_us = 10000,
                      .offload_ns = 20000,
                      .least_bytes = mib,
                      .limit_bytes = UINT64_MAX,
                      .window_out_bytes = 64 * mib,
                      .window_in_bytes = 64 * mib};
}

msc_status msc__check_link(const msc_link *link, msc_error *err)
{
    if (link->out_bytes_per_us == 0 || link->in_bytes_per_us == 0)
        return msc__fail(err, MSC_EINVAL, "link.%s is 0, it must be above",
                         link->out_bytes_per_us == 0 ? "out_bytes_per_us" : "in_bytes_per_us");
    if (link->least_bytes == 0)
        return msc__fail(err, MSC_EINVAL, "link.least_bytes is 0, it must be above");
    if (link->offload_ns < 0)
        return msc__fail(err, MSC_EINVAL, "link.offload_ns is %lld, it must not be below 0",
                         (long long)link->offload_ns);
    if (link->staging_bytes > INT64_MAX)
        return msc__fail(err, MSC_EINVAL, "link.staging_bytes is %llu, at most %lld are allowed",
                         (unsigned long long)link->staging_bytes, (long long)INT64_MAX);
    return MSC_OK;
}

/* ---- operations ----------------------------------------------------------------------------------- */

/* Of two times that are not negative. */
static int64_t sum_ns(int64_t a, int64_t b)
{
    MSC__ASSERT(a >= 0 && b >= 0);
    return a > INT64_MAX - b ? INT64_MAX : a + b;
}

static int64_t fresh_ns(uint64_t size_bytes, const msc_rates *rates)
{
    return size_bytes < rates->fresh_from_bytes ? 0 : time_ns(size_bytes, rates->fresh_bytes_per_us);
}

static int64_t op_time_ns(const msc_op *op, const msc_rates *rates)
{
    uint32_t kind = (uint32_t)MSC_RATE_OF(op);
    int64_t compute_ns = time_ns(op->flops, rates->flops_per_us[kind]);
    int64_t move_ns = time_ns(op->moved_bytes, rates->moved_bytes_per_us[kind]);
    int64_t longer_ns = compute_ns > move_ns ? compute_ns : move_ns;

    return sum_ns(rates->launch_ns, sum_ns(longer_ns, fresh_ns(op->scratch_bytes, rates)));
}

int64_t msc_op_time_ns(const msc_op *op, const msc_rates *rates)
{
    msc_rates used;

    (void)msc__read_rates(rates, &used, NULL);
    return op_time_ns(op, &used);
}

static void op_times_ns(const msc_graph *graph, const msc_rates *rates, int64_t *out)
{
    const msc_op *ops = msc_graph_ops(graph);
    const msc_buffer *buffers = msc_graph_buffers(graph);
    uint32_t op_count = msc_graph_op_count(graph);
    uint32_t buffer_count = msc_graph_buffer_count(graph);
    uint32_t i;

    for (i = 0; i < op_count; i++)
        out[i] = op_time_ns(&ops[i], rates);
    for (i = 0; i < buffer_count; i++)
        if (!buffers[i].resident)
            out[buffers[i].begin] = sum_ns(out[buffers[i].begin], fresh_ns(buffers[i].size_bytes, rates));
}

void msc_op_times_ns(const msc_graph *graph, const msc_rates *rates, int64_t *out)
{
    msc_rates used;

    (void)msc__read_rates(rates, &used, NULL);
    op_times_ns(graph, &used, out);
}

/* ---- regions and candidates ----------------------------------------------------------------------- */

static int64_t at_most(int64_t value, int64_t most)
{
    return value < most ? value : most;
}

void msc__cost_times(msc__model *model, const msc_rates *rates)
{
    int64_t most_ns = MOST_STEP_NS / ((int64_t)model->op_count + 1);
    int64_t most_call_ns = MOST_STEP_NS / ((int64_t)model->call_count + 1);
    uint32_t i;

    op_times_ns(model->graph, rates, model->time_before_ns + 1);
    for (i = 0; i < model->op_count; i++)
        model->time_before_ns[i + 1] =
            model->time_before_ns[i] + at_most(model->time_before_ns[i + 1], most_ns);
    MSC__ASSERT(model->time_before_ns[model->op_count] <= MOST_STEP_NS);
    model->most_call_ns = most_call_ns;
    model->call_overhead_ns = at_most(rates->recompute_ns, most_call_ns);
    model->intercept_ns = at_most(rates->intercept_ns, most_ns / 2);
}

/* What of a copy that takes so long does not hide behind compute. */
static int64_t beyond_ns(int64_t copy_ns, int64_t compute_ns)
{
    return copy_ns > compute_ns ? copy_ns - compute_ns : 0;
}

/* What the region's own backward may hide: the time from the first use of what it moves to the last release, but
 * not more than twice its forward, since other work may lie between the two. */
static int64_t backward_ns(const msc__model *model, const msc__region *region, int64_t forward_ns)
{
    const msc__moved *moves = model->moves + region->first_move;
    uint32_t from = region->offload ? MSC_NONE : region->redo;
    uint32_t until = 0;
    int64_t between_ns;
    uint32_t i;

    for (i = 0; i < region->move_count; i++) {
        from = moves[i].use < from ? moves[i].use : from;
        until = moves[i].release > until ? moves[i].release : until;
    }
    MSC__ASSERT(until <= model->op_count);
    between_ns = until > from ? model->time_before_ns[until] - model->time_before_ns[from] : 0;
    return at_most(between_ns, 2 * forward_ns);
}

/* What is recomputed. */
static int64_t recompute_ns(const msc__model *model, const msc__candidate *candidate,
                            const msc__region *region)
{
    const int64_t *before_ns = model->time_before_ns;
    const uint32_t *kept = msc__kept_of(model, candidate);
    int64_t sum_ns = before_ns[region->stop] - before_ns[region->begin];
    uint32_t i;

    for (i = 0; i < candidate->kept_count && kept[i] < region->stop - region->begin; i++)
        sum_ns -= before_ns[region->begin + kept[i] + 1] - before_ns[region->begin + kept[i]];
    MSC__ASSERT(sum_ns >= 0 && region->stop <= region->end);
    return sum_ns;
}

/* What is waited for before anything can hide it: all that the region uses first. Of a boundary that is all. */
static uint64_t first_used_bytes(const msc__model *model, const msc__region *region)
{
    const msc__moved *moves = model->moves + region->first_move;
    uint64_t bytes = 0;
    uint32_t first = MSC_NONE;
    uint32_t i;

    for (i = 0; i < region->move_count; i++) {
        if (moves[i].use == MSC_NONE || moves[i].use > first)
            continue;
        bytes = moves[i].use < first ? moves[i].size_bytes : bytes + moves[i].size_bytes;
        first = moves[i].use;
    }
    return bytes;
}

/* What a region's copies back take longer than what they hide behind. The engine fetches from a region's first use on. */
static int64_t waits_ns(const msc__model *model, const msc__candidate *candidate, const msc__region *region,
                        uint64_t bytes, int64_t forward_ns)
{
    int64_t first_ns = time_ns(first_used_bytes(model, region), model->link.in_bytes_per_us);
    int64_t rest_ns =
        beyond_ns(time_ns(bytes, model->link.in_bytes_per_us),
                  backward_ns(model, region, forward_ns) + recompute_ns(model, candidate, region));

    return first_ns > rest_ns ? first_ns : rest_ns;
}

static int64_t cost_of_transfer(const msc__model *model, const msc__candidate *candidate,
                                const msc__region *region)
{
    const msc_link *link = &model->link;
    int64_t forward_ns = model->time_before_ns[region->end] - model->time_before_ns[region->begin];
    int64_t copies = 2 * (int64_t)region->move_count;
    int64_t cost_ns;
    uint64_t bytes = 0;
    uint32_t i;

    if (region->move_count == 0)
        return 0;
    for (i = 0; i < region->move_count; i++)
        bytes += model->moves[region->first_move + i].size_bytes;
    cost_ns = link->offload_ns > INT64_MAX / copies ? INT64_MAX : link->offload_ns * copies;
    cost_ns = sum_ns(cost_ns, beyond_ns(time_ns(bytes, link->out_bytes_per_us), forward_ns));
    cost_ns = sum_ns(cost_ns, waits_ns(model, candidate, region, bytes, forward_ns));
    MSC__ASSERT(cost_ns >= 0);
    return at_most(cost_ns, model->most_call_ns);
}

int64_t msc__cost_transfers(const msc__model *model, const msc__candidate *candidate)
{
    int64_t cost_ns = 0;
    uint32_t i;

    for (i = 0; i < candidate->region_count; i++)
        cost_ns += cost_of_transfer(model, candidate, &model->regions[candidate->first_region + i]);
    return cost_ns;
}

/* What a region's recompute takes, and its moves; of one that keeps something, also the looking at operations, at those of
 * the region when they run first and at those of the recompute, kept or not. */
int64_t msc__cost_region(const msc__model *model, const msc__candidate *candidate, const msc__region *region)
{
    int64_t cost_ns = cost_of_transfer(model, candidate, region);

    if (candidate->offload)
        return cost_ns;
    cost_ns += recompute_ns(model, candidate, region) + model->call_overhead_ns;
    if (candidate->kept_count == 0)
        return cost_ns;
    return cost_ns + model->intercept_ns *
                         ((int64_t)(region->end - region->begin) + (int64_t)(region->stop - region->begin));
}

int64_t msc__cost_candidate(const msc__model *model, const msc__candidate *candidate)
{
    int64_t cost_ns = 0;
    uint32_t i;

    for (i = 0; i < candidate->region_count; i++)
        cost_ns += msc__cost_region(model, candidate, &model->regions[candidate->first_region + i]);
    MSC__ASSERT(cost_ns >= 0);
    return cost_ns;
}

/* 64 × 64 → 128 bits, by halves. */
static void multiply(uint64_t a, uint64_t b, uint64_t *high, uint64_t *low)
{
    uint64_t a_low = a & UINT32_MAX;
    uint64_t a_high = a >> 32;
    uint64_t b_low = b & UINT32_MAX;
    uint64_t b_high = b >> 32;
    uint64_t middle = a_high * b_low + (a_low * b_low >> 32);
    uint64_t middle_low = (middle & UINT32_MAX) + a_low * b_high;

    *high = a_high * b_high + (middle >> 32) + (middle_low >> 32);
    *low = a * b;
}

int msc__cost_compare(uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
    uint64_t left_high;
    uint64_t left_low;
    uint64_t right_high;
    uint64_t right_low;

    MSC__ASSERT(b > 0 && d > 0);
    multiply(a, d, &left_high, &left_low);
    multiply(c, b, &right_high, &right_low);
    if (left_high != right_high)
        return left_high < right_high ? -1 : 1;
    if (left_low != right_low)
        return left_low < right_low ? -1 : 1;
    return 0;
}
