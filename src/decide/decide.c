/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decision: from a graph and a budget to a plan.
 *
 *      options checked -> model -> fit -> search -> frontier --budget--> one set -> trace, replay -> plan
 *
 * Everything left of the budget is the same for every budget, which is what makes a lower budget never give a
 * higher peak or a faster step. For a HOST allocator the frontier's peaks are the replayed ones already. For
 * CUDA they are lower bounds: the allocator reserves at least what is allocated. There, plans of the frontier
 * are traced and replayed until the answer is certain, with a simulator of unlimited capacity, so that a peak
 * is what the plan asks for and not what a full card forces.
 *
 * The plan that is returned has been traced and replayed in any case. For HOST that must give the very peak
 * that the fit computed; if it did not, the call fails, since a peak that cannot be trusted is worse than
 * none.
 */
#include <string.h>

#include "base/error.h"
#include "decide/decide_internal.h"
#include "sim/sim_trace.h"

/* CUDA: plans of the frontier that are kept, since each may have to be replayed. */
#define MOST_CUDA_PLANS 48u

/* One decision under way. */
typedef struct decision {
    msc_context *ctx;
    const msc_graph *graph;
    const msc_decide_options *options;
    msc__model model;
    msc__fit fit;
    msc__frontier frontier;
    msc_sim *sim;
    msc__scratch scratch;
    uint64_t *peak_bytes; /* per plan of the frontier: replayed, 0: not yet */
} decision;

msc_rates msc_rates_default(void)
{
    msc_rates rates;

    memset(&rates, 0, sizeof rates);
    rates.struct_bytes = sizeof rates;
    rates.flops_per_us = 100000;
    rates.moved_bytes_per_us = 20000;
    rates.launch_ns = 5000;
    rates.recompute_ns = 60000;
    return rates;
}

msc_decide_options msc_decide_options_default(void)
{
    msc_decide_options options;

    memset(&options, 0, sizeof options);
    options.struct_bytes = sizeof options;
    options.budget_bytes = UINT64_MAX;
    options.sim = msc_sim_options_default(MSC_SIM_HOST);
    options.rates = msc_rates_default();
    options.allow_checkpoint = 1;
    return options;
}

/* ---- options -------------------------------------------------------------------------------------- */

static msc_status check_rates(const msc_rates *rates, msc_error *err)
{
    if (rates->struct_bytes != sizeof *rates)
        return msc__fail(err, MSC_EINVAL, "rates.struct_bytes is %zu, this library knows %zu",
                         rates->struct_bytes, sizeof *rates);
    if (rates->flops_per_us == 0)
        return msc__fail(err, MSC_EINVAL, "rates.flops_per_us is 0, it must be above");
    if (rates->moved_bytes_per_us == 0)
        return msc__fail(err, MSC_EINVAL, "rates.moved_bytes_per_us is 0, it must be above");
    if (rates->launch_ns <= 0)
        return msc__fail(err, MSC_EINVAL, "rates.launch_ns is %lld, it must be above 0",
                         (long long)rates->launch_ns);
    if (rates->recompute_ns <= 0)
        return msc__fail(err, MSC_EINVAL, "rates.recompute_ns is %lld, it must be above 0",
                         (long long)rates->recompute_ns);
    return MSC_OK;
}

static msc_status check_options(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                                msc_error *err)
{
    size_t i;

    if (ctx == NULL || graph == NULL || options == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot decide: context, graph or options is NULL");
    if (!msc_graph_is_finished(graph))
        return msc__fail(err, MSC_ESTATE, "cannot decide: the graph is not finished");
    if (options->struct_bytes != sizeof *options)
        return msc__fail(err, MSC_EINVAL, "options.struct_bytes is %zu, this library knows %zu",
                         options->struct_bytes, sizeof *options);
    if (options->allow_checkpoint > 1)
        return msc__fail(err, MSC_EINVAL, "options.allow_checkpoint is %u, not 0 or 1",
                         options->allow_checkpoint);
    if (options->force > 1)
        return msc__fail(err, MSC_EINVAL, "options.force is %u, not 0 or 1", options->force);
    for (i = 0; i < sizeof options->pad; i++)
        if (options->pad[i] != 0)
            return msc__fail(err, MSC_EINVAL, "options.pad is not zero");
    return check_rates(&options->rates, err);
}

/* ---- the frontier --------------------------------------------------------------------------------- */

/* What each candidate would free between forward and backward; those that would free nothing are out. */
static void weigh_candidates(decision *d)
{
    uint32_t segment = msc__fit_segment_at(&d->fit, d->model.forward_end);
    uint32_t i;

    for (i = 0; i < d->model.candidate_count; i++) {
        msc__candidate *candidate = &d->model.candidates[i];
        int64_t freed;
        msc__fit_set(&d->fit, i, true);
        freed = msc__fit_freed(&d->fit, segment);
        msc__fit_set(&d->fit, i, false);
        candidate->saved_bytes = freed > 0 ? (uint64_t)freed : 0;
        candidate->usable = freed > 0 && d->options->allow_checkpoint;
        if (freed <= 0)
            d->model.subjects[candidate->module].rule = MSC_RULE_NO_SAVING;
    }
}

static msc_status create_simulator(decision *d, msc_error *err)
{
    msc_sim_options options = d->options->sim;

    options.capacity_bytes = UINT64_MAX;
    return msc_sim_create(d->ctx, &options, &d->sim, err);
}

static msc_status decision_init(decision *d, msc_error *err)
{
    msc_status status = create_simulator(d, err);

    if (status == MSC_OK)
        status = msc__model_init(&d->model, d->ctx, d->graph, d->options, err);
    if (status == MSC_OK)
        status = msc__fit_init(&d->fit, &d->model, err);
    if (status != MSC_OK)
        return status;
    weigh_candidates(d);
    status = msc__model_group(&d->model, err);
    if (status != MSC_OK)
        return status;
    msc__frontier_init(&d->frontier, d->ctx, d->model.candidate_count);
    status = msc__search(&d->model, &d->fit, &d->frontier, err);
    if (status != MSC_OK)
        return status;
    if (d->options->sim.kind == MSC_SIM_CUDA)
        msc__frontier_thin(&d->frontier, MOST_CUDA_PLANS);
    d->peak_bytes = msc__scratch_take(&d->scratch, d->frontier.plans.count, sizeof *d->peak_bytes);
    return msc__scratch_check(&d->scratch, "a decision", err);
}

static void decision_fini(decision *d)
{
    msc__scratch_fini(&d->scratch);
    msc__frontier_fini(&d->frontier);
    msc__fit_fini(&d->fit);
    msc__model_fini(&d->model);
    msc_sim_destroy(d->sim);
}

/* ---- replayed peaks ------------------------------------------------------------------------------- */

static msc_status replay_plan(decision *d, const msc_plan *plan, msc_trace **trace, msc_replay *replay,
                              msc_error *err)
{
    msc_status status = msc_trace_create(d->ctx, d->graph, plan, trace, err);

    return status == MSC_OK ? msc_trace_replay(*trace, d->sim, NULL, 0, replay, err) : status;
}

/* A plan with nothing but a set's actions. */
static msc_status bare_plan(const decision *d, uint32_t index, msc_plan **plan, msc_error *err)
{
    const uint64_t *set = msc__frontier_set(&d->frontier, index);
    msc_status status = msc_plan_create(d->ctx, plan, err);
    uint32_t i;

    for (i = 0; i < d->model.candidate_count && status == MSC_OK; i++) {
        msc_choice choice = {.module = d->model.candidates[i].module,
                             .action = MSC_ACTION_CHECKPOINT,
                             .rule = MSC_RULE_CHOSEN};
        if (msc__set_has(set, i))
            status = msc_plan_add(*plan, &choice, err);
    }
    return status;
}

/* Reserved peak of a plan of the frontier; a value above `most_bytes` when it is more than that. */
static msc_status replay_peak(decision *d, uint32_t index, uint64_t most_bytes, uint64_t *peak_bytes,
                              msc_error *err)
{
    msc_plan *plan = NULL;
    msc_trace *trace = NULL;
    msc_status status = bare_plan(d, index, &plan, err);

    if (status == MSC_OK)
        status = msc_trace_create(d->ctx, d->graph, plan, &trace, err);
    if (status == MSC_OK)
        status = msc__trace_reserved_peak(trace, d->sim, most_bytes, peak_bytes, err);
    msc_trace_destroy(trace);
    msc_plan_destroy(plan);
    return status;
}

/* Peak of a plan of the frontier as the simulator sees it: replayed once, then remembered; only as far as to
 * see that it is above `most_bytes`, where that is enough. */
static msc_status peak_of(decision *d, uint32_t index, uint64_t most_bytes, uint64_t *peak_bytes,
                          msc_error *err)
{
    msc_status status = MSC_OK;

    if (d->options->sim.kind == MSC_SIM_HOST)
        d->peak_bytes[index] = msc__frontier_plans(&d->frontier)[index].peak_bytes;
    *peak_bytes = d->peak_bytes[index];
    if (*peak_bytes != 0)
        return MSC_OK;
    status = replay_peak(d, index, most_bytes, peak_bytes, err);
    if (status == MSC_OK && *peak_bytes <= most_bytes)
        d->peak_bytes[index] = *peak_bytes;
    return status;
}

/* The plan with the smallest peak, and that peak. What is allocated bounds what is reserved, so the search
 * from the end stops where even the allocated bytes are no better. */
static msc_status find_smallest(decision *d, uint32_t *index, uint64_t *smallest_bytes, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    *smallest_bytes = UINT64_MAX;
    for (i = d->frontier.plans.count; i-- > 0 && status == MSC_OK;) {
        uint64_t peak_bytes = 0;
        if (msc__frontier_plans(&d->frontier)[i].peak_bytes >= *smallest_bytes)
            break;
        status = peak_of(d, i, *smallest_bytes, &peak_bytes, err);
        if (peak_bytes <= *smallest_bytes) {
            *smallest_bytes = peak_bytes;
            *index = i;
        }
    }
    return status;
}

/* The fastest plan within a budget; MSC_NONE in `index` when there is none. */
static msc_status find_fastest(decision *d, uint64_t budget_bytes, uint32_t *index, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    *index = MSC_NONE;
    for (i = 0; i < d->frontier.plans.count && status == MSC_OK && *index == MSC_NONE; i++) {
        uint64_t peak_bytes;
        if (msc__frontier_plans(&d->frontier)[i].peak_bytes > budget_bytes)
            continue;
        status = peak_of(d, i, budget_bytes, &peak_bytes, err);
        if (status == MSC_OK && peak_bytes <= budget_bytes)
            *index = i;
    }
    return status;
}

/* ---- the plan ------------------------------------------------------------------------------------- */

static bool any_in(const uint64_t *set, const msc__buckets *lists, uint32_t candidate)
{
    uint32_t i;

    for (i = lists->first[candidate]; i < lists->first[candidate + 1]; i++)
        if (msc__set_has(set, lists->items[i]))
            return true;
    return false;
}

/* Rule of a candidate that is kept or chosen. */
static msc_rule candidate_rule(const decision *d, const uint64_t *set, uint32_t candidate, bool fits)
{
    if (msc__set_has(set, candidate))
        return fits ? MSC_RULE_CHOSEN : MSC_RULE_SMALLEST;
    if (!d->options->allow_checkpoint)
        return MSC_RULE_DISABLED;
    if (any_in(set, &d->model.above, candidate))
        return MSC_RULE_COVERED;
    if (any_in(set, &d->model.below, candidate))
        return MSC_RULE_SPLIT;
    /* When the budget is not met, nothing is left out that would have helped. */
    return fits ? MSC_RULE_NOT_NEEDED : MSC_RULE_NO_SAVING;
}

static msc_choice make_choice(const decision *d, const uint64_t *set, uint32_t module, bool fits)
{
    const msc__subject *subject = &d->model.subjects[module];
    msc_choice choice = {.module = module, .action = MSC_ACTION_KEEP, .rule = subject->rule};

    choice.call_count = subject->call_count > UINT16_MAX ? UINT16_MAX : (uint16_t)subject->call_count;
    if (subject->candidate == MSC_NONE)
        return choice;
    choice.saved_bytes = d->model.candidates[subject->candidate].saved_bytes;
    choice.cost_ns = d->model.candidates[subject->candidate].cost_ns;
    if (subject->rule == MSC_RULE_NOT_NEEDED)
        choice.rule = (uint8_t)candidate_rule(d, set, subject->candidate, fits);
    if (msc__set_has(set, subject->candidate))
        choice.action = MSC_ACTION_CHECKPOINT;
    return choice;
}

static msc_status add_choices(const decision *d, uint32_t index, bool fits, msc_plan *plan, msc_error *err)
{
    const uint64_t *set = msc__frontier_set(&d->frontier, index);
    msc_status status = MSC_OK;
    uint32_t m;

    for (m = 0; m < d->model.module_count && status == MSC_OK; m++) {
        msc_choice choice = make_choice(d, set, m, fits);
        if (d->model.subjects[m].has_saves)
            status = msc_plan_add(plan, &choice, err);
    }
    return status;
}

/* A peak inside a recompute is told by the operation that the recompute precedes. */
static void place_peak(const msc_trace *trace, const msc_replay *replay, msc_plan_summary *summary,
                       uint32_t op_count)
{
    const msc_event *events = msc_trace_events(trace);
    uint64_t i;

    summary->peak_op = replay->peak_op;
    summary->peak_in_recompute = replay->peak_in_recompute;
    if (!replay->peak_in_recompute)
        return;
    summary->peak_op = op_count;
    for (i = replay->peak_event; i < msc_trace_event_count(trace); i++) {
        if (events[i].kind == MSC_EVENT_OP) {
            summary->peak_op = events[i].id;
            return;
        }
    }
}

static msc_status fill_times(const decision *d, uint32_t index, msc_plan_summary *summary, msc_error *err)
{
    int64_t least_added_ns = 0;
    msc_status status = MSC_OK;

    summary->plain_step_ns = d->model.time_before_ns[d->model.op_count];
    summary->step_ns = summary->plain_step_ns + msc__frontier_plans(&d->frontier)[index].added_ns;
    if (summary->fits && index > 0) {
        status = msc__bound_added_ns(&d->model, &d->fit, summary->budget_bytes, &least_added_ns, err);
        summary->time_bound_ppm = msc__bound_ppm(summary->step_ns, summary->plain_step_ns + least_added_ns);
    }
    return status;
}

/* Traces and replays the finished choices, and writes down what that shows. */
static msc_status fill_summary(decision *d, uint32_t index, msc_plan *plan, msc_plan_summary *summary,
                               msc_error *err)
{
    uint64_t expected_bytes = msc__frontier_plans(&d->frontier)[index].peak_bytes;
    msc_trace *trace = NULL;
    msc_replay replay;
    msc_status status = replay_plan(d, plan, &trace, &replay, err);

    if (status == MSC_OK && d->options->sim.kind == MSC_SIM_HOST && replay.peak_bytes != expected_bytes)
        status =
            msc__fail(err, MSC_EINTERNAL, "the plan was computed to peak at %llu bytes and replays at %llu",
                      (unsigned long long)expected_bytes, (unsigned long long)replay.peak_bytes);
    if (status == MSC_OK) {
        summary->peak_bytes = replay.peak_bytes;
        summary->graph_digest = msc_graph_digest(d->graph);
        place_peak(trace, &replay, summary, d->model.op_count);
        status = fill_times(d, index, summary, err);
    }
    msc_trace_destroy(trace);
    return status == MSC_OK ? msc_plan_set_summary(plan, summary, err) : status;
}

/* Chooses; fills what the summary says of budget and frontier. */
static msc_status choose(decision *d, uint32_t *index, msc_plan_summary *summary, msc_error *err)
{
    uint64_t budget_bytes = d->options->budget_bytes;
    uint32_t smallest = 0;
    msc_status status = peak_of(d, 0, UINT64_MAX, &summary->plain_peak_bytes, err);

    if (status == MSC_OK)
        status = find_smallest(d, &smallest, &summary->smallest_peak_bytes, err);
    if (status != MSC_OK)
        return status;
    if (d->options->force && summary->plain_peak_bytes <= budget_bytes)
        budget_bytes =
            summary->smallest_peak_bytes + (summary->plain_peak_bytes - summary->smallest_peak_bytes) / 4;
    status = find_fastest(d, budget_bytes, index, err);
    summary->budget_bytes = budget_bytes;
    summary->fits = *index != MSC_NONE;
    if (*index == MSC_NONE)
        *index = smallest;
    return status;
}

static msc_status make_plan(decision *d, msc_plan **plan, msc_error *err)
{
    msc_plan_summary summary = {0};
    uint32_t index;
    msc_status status = choose(d, &index, &summary, err);

    if (status == MSC_OK)
        status = msc_plan_create(d->ctx, plan, err);
    if (status == MSC_OK)
        status = add_choices(d, index, summary.fits, *plan, err);
    if (status == MSC_OK)
        status = fill_summary(d, index, *plan, &summary, err);
    return status;
}

/* ---- public calls --------------------------------------------------------------------------------- */

msc_status msc_decide(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                      msc_plan **out, msc_error *err)
{
    decision d = {.ctx = ctx, .graph = graph, .options = options, .scratch = {.ctx = ctx}};
    msc_plan *plan = NULL;
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot decide: out is NULL");
    *out = NULL;
    status = check_options(ctx, graph, options, err);
    if (status != MSC_OK)
        return status;
    status = decision_init(&d, err);
    if (status == MSC_OK)
        status = make_plan(&d, &plan, err);
    decision_fini(&d);
    if (status != MSC_OK) {
        msc_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return MSC_OK;
}

/* Replayed peaks need not fall where allocated ones do: a plan that is slower without a lower peak is left
 * out. */
static msc_status write_points(decision *d, msc_frontier_point *points, size_t capacity, size_t *count,
                               msc_error *err)
{
    uint64_t least_bytes = UINT64_MAX;
    msc_status status = MSC_OK;
    uint32_t i;

    for (i = 0; i < d->frontier.plans.count && status == MSC_OK; i++) {
        uint64_t peak_bytes = 0;
        status = peak_of(d, i, UINT64_MAX, &peak_bytes, err);
        if (i > 0 && peak_bytes >= least_bytes)
            continue;
        least_bytes = peak_bytes;
        if (*count < capacity) {
            points[*count].peak_bytes = peak_bytes;
            points[*count].step_ns =
                d->model.time_before_ns[d->model.op_count] + msc__frontier_plans(&d->frontier)[i].added_ns;
        }
        ++*count;
    }
    return status;
}

msc_status msc_decide_frontier(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                               msc_frontier_point *points, size_t capacity, size_t *count, msc_error *err)
{
    decision d = {.ctx = ctx, .graph = graph, .options = options, .scratch = {.ctx = ctx}};
    size_t found = 0;
    msc_status status;

    if (count == NULL || (points == NULL && capacity > 0))
        return msc__fail(err, MSC_EINVAL, "cannot write a frontier: count or points is NULL");
    *count = 0;
    status = check_options(ctx, graph, options, err);
    if (status != MSC_OK)
        return status;
    status = decision_init(&d, err);
    if (status == MSC_OK)
        status = write_points(&d, points, capacity, &found, err);
    decision_fini(&d);
    if (status == MSC_OK)
        *count = found;
    return status;
}
