/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decision: from a graph and a budget to a plan.
 *
 *      options checked -> model -> fit -> search -> frontier --budget--> one set -> trace, replay -> plan
 *
 * Everything left of the budget is the same for every budget, which is what makes a lower budget never give
 * a higher peak or a faster step. For a HOST allocator the frontier's peaks are the replayed ones already.
 * For CUDA they are lower bounds: the allocator reserves at least what is allocated. There, the frontier
 * becomes a list in order of time (decide_every.c, decide_reserved.c); its plans are traced and
 * replayed until the answer is certain, with a simulator of unlimited capacity, so that a peak is what the
 * plan asks for and not what a full card forces. What a replay shows is remembered in the list; it never
 * changes which plan is the first that fits.
 *
 * The plan that is returned has been traced and replayed in any case. For HOST that must give the very peak
 * that the fit computed; if it did not, the call fails, since a peak that cannot be trusted is worse than
 * none.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"
#include "decide/decide_cost.h"
#include "decide/decide_plan.h"
#include "decide/decide_reserved.h"
#include "decide/decide_search.h"
#include "sim/sim_look_ahead.h"
#include "sim/sim_options.h"
#include "sim/sim_trace.h"

/* CUDA's caching allocator hands out multiples of it. */
#define CARD_GRANULE_BYTES 512u

/* One decision under way. */
typedef struct decision {
    msc_context *ctx;
    const msc_graph *graph;
    msc_decide_options given;
    const msc_decide_options *options; /* `given` */
    msc__model model;
    msc__fit fit;
    msc__frontier frontier;
    msc_sim *sim;
    msc__reserving reserving;
} decision;

void msc_decide_options_init(msc_decide_options *out, size_t struct_bytes)
{
    msc_decide_options options;

    memset(&options, 0, sizeof options);
    options.budget_bytes = UINT64_MAX;
    options.sim = msc_sim_options_default(MSC_SIM_HOST);
    options.rates = msc_rates_default();
    options.link = msc_link_default();
    options.allow_checkpoint = 1;
    options.allow_selective = 1;
    msc__sized_init(out, struct_bytes, &options, sizeof options);
}

/* ---- options -------------------------------------------------------------------------------------- */

static msc_status check_options(const msc_decide_options *options, msc_error *err)
{
    msc_status status;
    size_t i;

    if (options->allow_checkpoint > 1)
        return msc__fail(err, MSC_EINVAL, "options.allow_checkpoint is %u, not 0 or 1",
                         options->allow_checkpoint);
    if (options->allow_selective > 1)
        return msc__fail(err, MSC_EINVAL, "options.allow_selective is %u, not 0 or 1",
                         options->allow_selective);
    if (options->force > 1)
        return msc__fail(err, MSC_EINVAL, "options.force is %u, not 0 or 1", options->force);
    if (options->allow_offload > 1)
        return msc__fail(err, MSC_EINVAL, "options.allow_offload is %u, not 0 or 1", options->allow_offload);
    for (i = 0; i < sizeof options->pad; i++)
        if (options->pad[i] != 0)
            return msc__fail(err, MSC_EINVAL, "options.pad is not zero");
    if (options->rerun_bytes > INT64_MAX)
        return msc__fail(err, MSC_EINVAL, "options.rerun_bytes is %llu, at most %lld are allowed",
                         (unsigned long long)options->rerun_bytes, (long long)INT64_MAX);
    status = msc__check_rates(&options->rates, err);
    if (status == MSC_OK && options->allow_offload)
        status = msc__check_link(&options->link, err);
    if (status == MSC_OK && options->allow_offload && options->link.staging_bytes > 0 &&
        options->sim.kind != MSC_SIM_HOST)
        return msc__fail(
            err, MSC_EINVAL,
            "link.staging_bytes is %llu, it must be 0: copies of a card pass through host memory",
            (unsigned long long)options->link.staging_bytes);
    return status;
}

/* What a caller has given, whole, with the structs in it, and checked. */
static msc_status read_options(decision *d, const msc_decide_options *given, msc_error *err)
{
    msc_decide_options *used = &d->given;
    msc_sim_options sim;
    msc_rates rates;
    msc_status status;

    if (d->ctx == NULL || d->graph == NULL || given == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot decide: context, graph or options is NULL");
    if (!msc_graph_is_finished(d->graph))
        return msc__fail(err, MSC_ESTATE, "cannot decide: the graph is not finished");
    msc_decide_options_init(used, sizeof *used);
    status = MSC__READ_OPTIONS("options.", msc_decide_options, rates, given, used, err);
    if (status == MSC_OK)
        status = msc__read_rates(&used->rates, &rates, err);
    if (status == MSC_OK)
        status = msc__sim_options_read("sim.", &used->sim, &sim, err);
    if (status != MSC_OK)
        return status;
    used->rates = rates;
    used->sim = sim;
    d->options = used;
    return check_options(used, err);
}

/* ---- the frontier --------------------------------------------------------------------------------- */

/* What a candidate alone would free at the plain peak. Those that would free nothing anywhere are out: in company
 * with others a candidate frees no more than alone. */
static void weigh_candidates(decision *d)
{
    uint32_t i;

    for (i = 0; i < d->model.candidate_count; i++) {
        msc__candidate *candidate = &d->model.candidates[i];
        int64_t at_peak;
        bool is_allowed;
        bool lowers;
        (void)msc__fit_peak(&d->fit);
        msc__fit_set(&d->fit, i, true);
        is_allowed = msc__fit_away(&d->fit) <= d->model.link.limit_bytes;
        at_peak = msc__fit_freed(&d->fit, d->fit.plain_peak_segment);
        lowers = msc__fit_lowers(&d->fit);
        msc__fit_set(&d->fit, i, false);
        MSC__ASSERT(d->fit.moved_bytes == 0 && d->fit.rerun_count == 0);
        candidate->saved_bytes = at_peak > 0 ? (uint64_t)at_peak : 0;
        candidate->usable = lowers && is_allowed && (candidate->offload || d->options->allow_checkpoint);
        if (candidate->base == i && !candidate->is_run && !candidate->offload && !lowers)
            d->model.subjects[candidate->module].rule = MSC_RULE_NO_SAVING;
    }
}

static msc_status create_simulator(decision *d, msc_error *err)
{
    /* msc_decide has set it. NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    msc_sim_options options = d->options->sim;

    options.capacity_bytes = UINT64_MAX;
    return msc_sim_create(d->ctx, &options, &d->sim, err);
}

/* Segments and pages are multiples of 2 MiB, but for large ones of an odd number of MiB. */
static uint64_t reserved_unit(const msc_sim_options *sim)
{
    const uint64_t mib = (uint64_t)1 << 20;

    return sim->large_segment_bytes % (2 * mib) == 0 ? 2 * mib : mib;
}

static msc_status search_usable(decision *d, msc_error *err)
{
    msc_status status = msc__model_group(&d->model, err);

    return status == MSC_OK ? msc__search(&d->model, &d->fit, &d->frontier, err) : status;
}

/* Where something can be moved, first without it, so that more ways never make a plan worse; then with all. */
static msc_status search(decision *d, msc_error *err)
{
    msc__model *model = &d->model;
    msc__scratch scratch = {.ctx = d->ctx};
    uint8_t *usable = msc__scratch_take(&scratch, model->candidate_count, sizeof *usable);
    msc_status status = msc__scratch_check(&scratch, "a search", err);
    bool moves = false;
    uint32_t i;

    for (i = 0; i < model->candidate_count && status == MSC_OK; i++) {
        usable[i] = model->candidates[i].usable;
        moves |= usable[i] && msc__moves(&model->candidates[i]);
        if (msc__moves(&model->candidates[i]))
            model->candidates[i].usable = 0;
    }
    if (status == MSC_OK)
        status = search_usable(d, err);
    for (i = 0; i < model->candidate_count && status == MSC_OK; i++)
        model->candidates[i].usable = usable[i];
    if (status == MSC_OK && moves)
        status = search_usable(d, err);
    msc__scratch_fini(&scratch);
    return status;
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
    msc__frontier_init(&d->frontier, d->ctx, d->model.candidate_count);
    status = search(d, err);
    if (status != MSC_OK)
        return status;
    /* The plain step leads the list: it takes the least time. */
    MSC__ASSERT(d->frontier.plans.count > 0 && msc__frontier_plans(&d->frontier)[0].added_ns == 0);
    if (d->options->sim.kind == MSC_SIM_HOST)
        return MSC_OK;
    d->reserving = (msc__reserving){.model = &d->model,
                                    .fit = &d->fit,
                                    .sim = d->sim,
                                    .unit_bytes = reserved_unit(&d->options->sim),
                                    .allow_checkpoint = d->options->allow_checkpoint != 0};
    return msc__reserve(&d->reserving, &d->frontier, err);
}

static void decision_fini(decision *d)
{
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

/* Peak of a plan of the frontier as the simulator sees it: replayed once, then remembered; only as far as to
 * see that it is above `most_bytes`, where that is enough. */
static msc_status peak_of(decision *d, uint32_t index, uint64_t most_bytes, uint64_t *peak_bytes,
                          msc_error *err)
{
    MSC__ASSERT(index < d->frontier.plans.count);
    *peak_bytes = msc__frontier_plans(&d->frontier)[index].peak_bytes;
    if (d->options->sim.kind == MSC_SIM_HOST)
        return MSC_OK;
    return msc__reserved_of_plan(&d->reserving, &d->frontier, index, most_bytes, peak_bytes, err);
}

/* The smallest peak. What could be smaller by its lower bound is replayed; mostly that has been done. */
static msc_status find_smallest(decision *d, uint64_t *smallest_bytes, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t i;

    *smallest_bytes = UINT64_MAX;
    for (i = d->frontier.plans.count; i-- > 0 && status == MSC_OK;) {
        uint64_t peak_bytes = UINT64_MAX;
        if (msc__frontier_plans(&d->frontier)[i].peak_bytes < *smallest_bytes)
            status = peak_of(d, i, *smallest_bytes, &peak_bytes, err);
        *smallest_bytes = peak_bytes < *smallest_bytes ? peak_bytes : *smallest_bytes;
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

/* Step time of a plan of the frontier. */
static int64_t step_ns(const decision *d, uint32_t index)
{
    MSC__ASSERT(index < d->frontier.plans.count && msc__frontier_plans(&d->frontier)[index].added_ns >= 0);
    return d->model.time_before_ns[d->model.op_count] + msc__frontier_plans(&d->frontier)[index].added_ns;
}

/* A peak inside a recompute is named by the operation that the recompute precedes. */
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

/*
 * Lets groups come back early where the step's peak is not reached. No peak may rise by it, neither of what is allocated
 * nor of what is reserved: else nothing is early. Trace and replay are of the plan before and of the plan after.
 */
static msc_status look_ahead(decision *d, msc_plan *plan, msc_trace **trace, msc_replay *replay,
                             msc_error *err)
{
    uint64_t granule_bytes = d->options->sim.kind == MSC_SIM_HOST ? 1 : CARD_GRANULE_BYTES;
    msc_trace *after = NULL;
    msc_replay seen;
    msc_status status;

    if (replay->moved_count == 0)
        return MSC_OK;
    status = msc__plan_look_ahead(d->ctx, d->graph, plan, *trace, granule_bytes, err);
    if (status == MSC_OK)
        status = replay_plan(d, plan, &after, &seen, err);
    if (status == MSC_OK && (seen.peak_bytes > replay->peak_bytes ||
                             seen.stats.allocated_peak_bytes > replay->stats.allocated_peak_bytes)) {
        msc__plan_forget_ahead(plan);
    } else if (status == MSC_OK) {
        msc_trace_destroy(*trace);
        *trace = after;
        *replay = seen;
        after = NULL;
    }
    msc_trace_destroy(after);
    return status;
}

static msc_status fill_times(const decision *d, uint32_t index, msc_plan_summary *summary, msc_error *err)
{
    int64_t least_added_ns = 0;
    msc_status status = MSC_OK;

    summary->plain_step_ns = d->model.time_before_ns[d->model.op_count];
    summary->step_ns = step_ns(d, index);
    if (summary->fits && index > 0) {
        status = msc__bound_added_ns(&d->model, &d->fit, summary->budget_bytes, &least_added_ns, err);
        MSC__ASSERT(status != MSC_OK || summary->plain_step_ns + least_added_ns <= summary->step_ns);
        summary->time_bound_ppm = msc__bound_ppm(summary->step_ns, summary->plain_step_ns + least_added_ns);
    }
    MSC__ASSERT(summary->plain_step_ns <= summary->step_ns);
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

    if (status == MSC_OK)
        status = look_ahead(d, plan, &trace, &replay, err);
    if (status == MSC_OK && d->options->sim.kind == MSC_SIM_HOST && replay.peak_bytes != expected_bytes)
        status =
            msc__fail(err, MSC_EINTERNAL, "the plan was computed to peak at %llu bytes and replays at %llu",
                      (unsigned long long)expected_bytes, (unsigned long long)replay.peak_bytes);
    if (status == MSC_OK && replay.moved_count > 0 && replay.away_peak_bytes > d->model.link.limit_bytes)
        status = msc__fail(err, MSC_EINTERNAL, "the plan was to have %llu bytes away at most and has %llu",
                           (unsigned long long)d->model.link.limit_bytes,
                           (unsigned long long)replay.away_peak_bytes);
    if (status == MSC_OK) {
        msc__plan_windows(&d->model, msc__frontier_set(&d->frontier, index), summary);
        summary->away_peak_bytes = replay.away_peak_bytes;
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
    msc_status status = peak_of(d, 0, UINT64_MAX, &summary->plain_peak_bytes, err);

    if (status == MSC_OK)
        status = find_smallest(d, &summary->smallest_peak_bytes, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(summary->smallest_peak_bytes <= summary->plain_peak_bytes);
    if (d->options->force && summary->plain_peak_bytes <= budget_bytes)
        budget_bytes =
            summary->smallest_peak_bytes + (summary->plain_peak_bytes - summary->smallest_peak_bytes) / 4;
    status = find_fastest(d, budget_bytes, index, err);
    summary->budget_bytes = budget_bytes;
    summary->fits = *index != MSC_NONE;
    if (status == MSC_OK && *index == MSC_NONE)
        status = find_fastest(d, summary->smallest_peak_bytes, index, err);
    MSC__ASSERT(status != MSC_OK || *index < d->frontier.plans.count);
    return status;
}

static msc_status make_plan(decision *d, msc_plan **plan, msc_error *err)
{
    msc__explained explained = {
        .model = &d->model, .fit = &d->fit, .allow_checkpoint = d->options->allow_checkpoint != 0};
    msc_plan_summary summary = {0};
    uint32_t index;
    msc_status status = choose(d, &index, &summary, err);

    if (status != MSC_OK)
        return status;
    explained.set = msc__frontier_set(&d->frontier, index);
    explained.step_ns = step_ns(d, index);
    explained.fits = summary.fits;
    status = msc__plan_explain(&explained, plan, err);
    return status == MSC_OK ? fill_summary(d, index, *plan, &summary, err) : status;
}

/* ---- public calls --------------------------------------------------------------------------------- */

msc_status msc_decide(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                      msc_plan **out, msc_error *err)
{
    decision d = {.ctx = ctx, .graph = graph};
    msc_plan *plan = NULL;
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot decide: out is NULL");
    *out = NULL;
    status = read_options(&d, options, err);
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
        if (msc__frontier_plans(&d->frontier)[i].peak_bytes >= least_bytes)
            continue;
        status = peak_of(d, i, least_bytes - 1, &peak_bytes, err);
        if (peak_bytes >= least_bytes)
            continue;
        least_bytes = peak_bytes;
        if (*count < capacity) {
            points[*count].peak_bytes = peak_bytes;
            points[*count].step_ns = step_ns(d, i);
        }
        ++*count;
    }
    return status;
}

msc_status msc_decide_frontier(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                               msc_frontier_point *points, size_t capacity, size_t *count, msc_error *err)
{
    decision d = {.ctx = ctx, .graph = graph};
    size_t found = 0;
    msc_status status;

    if (count == NULL || (points == NULL && capacity > 0))
        return msc__fail(err, MSC_EINVAL, "cannot write a frontier: count or points is NULL");
    *count = 0;
    status = read_options(&d, options, err);
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
