/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time, as the decision sees it.
 *
 * An operation either computes or waits for memory, whichever takes longer, after a fixed launch. That is the
 * roofline; it ranks candidates well because what is compared, operations of one model on one machine, is
 * alike. Times are whole nanoseconds.
 *
 * Sums must never overflow, whatever a graph claims: within a step, each operation counts for at most
 * 2^60 / (operations + 1) ns and each region's overhead for at most 2^60 / (calls + 1) ns. A plan repeats an
 * operation at most once, so every step stays below 2^62. For an honest graph of a million operations the
 * limit is 19 minutes an operation.
 */
#include "base/bytes.h"
#include "decide/decide_internal.h"

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

int64_t msc_op_time_ns(const msc_op *op, const msc_rates *rates)
{
    int64_t compute_ns = time_ns(op->flops, rates->flops_per_us);
    int64_t move_ns = time_ns(op->moved_bytes, rates->moved_bytes_per_us);
    int64_t longer_ns = compute_ns > move_ns ? compute_ns : move_ns;

    return rates->launch_ns > INT64_MAX - longer_ns ? INT64_MAX : rates->launch_ns + longer_ns;
}

void msc__cost_times(msc__model *model, const msc_rates *rates)
{
    int64_t most_ns = MOST_STEP_NS / ((int64_t)model->op_count + 1);
    int64_t most_call_ns = MOST_STEP_NS / ((int64_t)model->call_count + 1);
    uint32_t i;

    for (i = 0; i < model->op_count; i++) {
        int64_t op_ns = msc_op_time_ns(&model->ops[i], rates);
        model->time_before_ns[i + 1] = model->time_before_ns[i] + (op_ns < most_ns ? op_ns : most_ns);
    }
    model->call_overhead_ns = rates->recompute_ns < most_call_ns ? rates->recompute_ns : most_call_ns;
}

int64_t msc__cost_candidate(const msc__model *model, const msc__candidate *candidate)
{
    int64_t sum_ns = 0;
    uint32_t i;

    for (i = 0; i < candidate->region_count; i++) {
        const msc__region *region = &model->regions[model->region_calls[candidate->first_region + i]];
        sum_ns += model->time_before_ns[region->stop] - model->time_before_ns[region->begin];
        sum_ns += model->call_overhead_ns;
    }
    return sum_ns;
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

    multiply(a, d, &left_high, &left_low);
    multiply(c, b, &right_high, &right_low);
    if (left_high != right_high)
        return left_high < right_high ? -1 : 1;
    if (left_low != right_low)
        return left_low < right_low ? -1 : 1;
    return 0;
}
