/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls: what a plan promises, and what it refuses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "figures.h"
#include "memscale/memscale.h"
#include "oom/failing_alloc.h"
#include "synth.h"

#define FEW 15u /* allocations that fail, with MEMSCALE_OOM=few */

static msc_plan *decide(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options)
{
    msc_plan *plan;
    msc_error err = {0};
    msc_status status = msc_decide(ctx, graph, options, &plan, &err);

    if (status != MSC_OK)
        fail_msg("%s: %s", msc_status_name(status), err.message);
    return plan;
}

static uint64_t replayed_peak(msc_context *ctx, const msc_graph *graph, const msc_plan *plan,
                              msc_sim_kind kind)
{
    msc_sim_options options = msc_sim_options_default(kind);
    msc_trace *trace;
    msc_sim *sim;
    msc_replay replay;

    assert_int_equal(msc_sim_create(ctx, &options, &sim, NULL), MSC_OK);
    assert_int_equal(msc_trace_create(ctx, graph, plan, &trace, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(trace, sim, NULL, 0, &replay, NULL), MSC_OK);
    msc_trace_destroy(trace);
    msc_sim_destroy(sim);
    return replay.peak_bytes;
}

static uint32_t count_rule(const msc_plan *plan, msc_rule rule)
{
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(plan); i++)
        count += msc_plan_choices(plan)[i].rule == rule;
    return count;
}

static void plain_fits(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_transformer(ctx, 4);
    const msc_decide_options options = msc_decide_options_default();
    msc_plan *plan = decide(ctx, graph, &options);
    const msc_plan_summary *s = msc_plan_get_summary(plan);

    (void)state;
    assert_int_equal(s->fits, 1);
    assert_int_equal(s->peak_bytes, s->plain_peak_bytes);
    assert_int_equal(s->peak_bytes, replayed_peak(ctx, graph, NULL, MSC_SIM_HOST));
    assert_int_equal(s->step_ns, s->plain_step_ns);
    assert_int_equal(s->time_bound_ppm, 0);
    assert_true(s->graph_digest == msc_graph_digest(graph));
    assert_int_equal(count_rule(plan, MSC_RULE_CHOSEN), 0);
    assert_true(count_rule(plan, MSC_RULE_NOT_NEEDED) > 8);
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* Without any one of the choices the budget would not be met; and no other single choice is faster within it. */
static void check_no_better(const msc_plan *plan)
{
    const msc_plan_summary *s = msc_plan_get_summary(plan);
    const msc_choice *choices = msc_plan_choices(plan);
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(plan); i++)
        if (choices[i].other_peak_bytes > 0 && choices[i].other_step_ns < s->step_ns)
            assert_true(choices[i].other_peak_bytes > s->budget_bytes);
}

/* Budgets from the plain peak down: each is kept, peaks never rise, times never fall. Ends graph and context. */
static void check_budgets(msc_context *ctx, msc_graph *graph, msc_sim_kind kind)
{
    msc_decide_options options = msc_decide_options_default();
    uint64_t peak = UINT64_MAX;
    int64_t step_ns = 0;
    uint64_t plain;
    uint64_t smallest;
    uint32_t i;
    msc_plan *plan;

    options.sim = msc_sim_options_default(kind);
    plan = decide(ctx, graph, &options);
    plain = msc_plan_get_summary(plan)->plain_peak_bytes;
    smallest = msc_plan_get_summary(plan)->smallest_peak_bytes;
    msc_plan_destroy(plan);
    assert_true(smallest < plain);
    for (i = 0; i <= 20; i++) {
        const msc_plan_summary *s;
        options.budget_bytes = plain - (plain - smallest) / 20 * i - (i == 20 ? (plain - smallest) % 20 : 0);
        plan = decide(ctx, graph, &options);
        s = msc_plan_get_summary(plan);
        assert_int_equal(s->fits, 1);
        assert_true(s->peak_bytes <= options.budget_bytes);
        assert_true(s->peak_bytes <= peak);
        assert_true(s->step_ns >= step_ns);
        assert_true(s->peak_bytes == replayed_peak(ctx, graph, plan, kind));
        assert_true(s->smallest_peak_bytes == smallest);
        assert_int_equal(count_rule(plan, MSC_RULE_SMALLEST), 0);
        if (kind == MSC_SIM_HOST)
            check_no_better(plan);
        peak = s->peak_bytes;
        step_ns = s->step_ns;
        msc_plan_destroy(plan);
    }
    assert_true(peak == smallest);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

static void check_all_budgets(msc_sim_kind kind)
{
    msc_context *ctx = figures_start();

    check_budgets(ctx, synth_transformer(ctx, 4), kind);
    ctx = figures_start();
    check_budgets(ctx, synth_blocks(ctx, 12, SYNTH_HALVES), kind);
    ctx = figures_start();
    check_budgets(ctx, synth_sequence(ctx, 30, SYNTH_UNEQUAL), kind);
}

static void budgets_host(void **state)
{
    (void)state;
    check_all_budgets(MSC_SIM_HOST);
}

static void budgets_cuda(void **state)
{
    (void)state;
    check_all_budgets(MSC_SIM_CUDA);
}

static void impossible(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_transformer(ctx, 2);
    msc_decide_options options = msc_decide_options_default();
    const msc_plan_summary *s;
    msc_plan *plan;

    (void)state;
    options.budget_bytes = 1;
    plan = decide(ctx, graph, &options);
    s = msc_plan_get_summary(plan);
    assert_int_equal(s->fits, 0);
    assert_true(s->peak_bytes == s->smallest_peak_bytes);
    assert_true(s->peak_bytes < s->plain_peak_bytes);
    assert_int_equal(count_rule(plan, MSC_RULE_CHOSEN), 0);
    assert_int_equal(count_rule(plan, MSC_RULE_NOT_NEEDED), 0);
    assert_true(count_rule(plan, MSC_RULE_SMALLEST) > 0);
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

static void force(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_transformer(ctx, 3);
    msc_decide_options options = msc_decide_options_default();
    const msc_plan_summary *s;
    msc_plan *plan;

    (void)state;
    options.force = 1;
    plan = decide(ctx, graph, &options);
    s = msc_plan_get_summary(plan);
    assert_int_equal(s->fits, 1);
    assert_true(s->budget_bytes ==
                s->smallest_peak_bytes + (s->plain_peak_bytes - s->smallest_peak_bytes) / 4);
    assert_true(s->peak_bytes <= s->budget_bytes);
    assert_true(count_rule(plan, MSC_RULE_CHOSEN) > 0);
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

static void disabled(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_transformer(ctx, 2);
    msc_decide_options options = msc_decide_options_default();
    msc_plan *plan;

    (void)state;
    options.allow_checkpoint = 0;
    options.budget_bytes = 1;
    plan = decide(ctx, graph, &options);
    assert_true(count_rule(plan, MSC_RULE_DISABLED) > 4);
    assert_int_equal(count_rule(plan, MSC_RULE_SMALLEST), 0);
    assert_true(msc_plan_get_summary(plan)->peak_bytes == msc_plan_get_summary(plan)->plain_peak_bytes);
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* Every inactive candidate of a plan is told apart: covered, split, or not needed. */
static void rules_of_kept(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_transformer(ctx, 3);
    msc_decide_options options = msc_decide_options_default();
    const msc_choice *choices;
    msc_plan *plan;
    uint32_t i;

    (void)state;
    options.force = 1;
    plan = decide(ctx, graph, &options);
    choices = msc_plan_choices(plan);
    for (i = 0; i < msc_plan_choice_count(plan); i++) {
        const msc_module *modules = msc_graph_modules(graph);
        uint32_t m;
        int covered = 0;
        for (m = modules[choices[i].module].parent; m != MSC_NONE; m = modules[m].parent)
            covered |= msc_plan_action(plan, m) != MSC_ACTION_KEEP;
        if (choices[i].rule == MSC_RULE_COVERED)
            assert_true(covered);
        if (choices[i].rule == MSC_RULE_NOT_NEEDED)
            assert_false(covered);
        assert_int_equal(choices[i].action != MSC_ACTION_KEEP, choices[i].rule == MSC_RULE_CHOSEN);
        assert_false(covered && choices[i].action != MSC_ACTION_KEEP);
    }
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

static void frontier(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_transformer(ctx, 3);
    msc_decide_options options = msc_decide_options_default();
    msc_frontier_point points[512];
    msc_frontier_point few[3];
    size_t count;
    size_t i;

    (void)state;
    assert_int_equal(msc_decide_frontier(ctx, graph, &options, points, 512, &count, NULL), MSC_OK);
    assert_in_range(count, 4, 512);
    for (i = 0; i < count; i++) {
        msc_plan *plan;
        if (i > 0) {
            assert_true(points[i].peak_bytes < points[i - 1].peak_bytes);
            assert_true(points[i].step_ns > points[i - 1].step_ns);
        }
        options.budget_bytes = points[i].peak_bytes;
        plan = decide(ctx, graph, &options);
        assert_true(msc_plan_get_summary(plan)->peak_bytes == points[i].peak_bytes);
        assert_true(msc_plan_get_summary(plan)->step_ns == points[i].step_ns);
        msc_plan_destroy(plan);
    }
    assert_int_equal(msc_decide_frontier(ctx, graph, &options, few, 3, &i, NULL), MSC_OK);
    assert_int_equal(i, count);
    assert_memory_equal(few, points, sizeof few);
    assert_int_equal(msc_decide_frontier(ctx, graph, &options, NULL, 0, &i, NULL), MSC_OK);
    assert_int_equal(i, count);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

static void same_twice(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_transformer(ctx, 6);
    msc_decide_options options = msc_decide_options_default();
    msc_plan *first;
    msc_plan *second;

    (void)state;
    options.force = 1;
    first = decide(ctx, graph, &options);
    second = decide(ctx, graph, &options);
    assert_true(msc_plan_digest(first) == msc_plan_digest(second));
    msc_plan_destroy(first);
    msc_plan_destroy(second);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

static void check_refused(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                          const char *named)
{
    msc_error err = {0};
    msc_plan *plan = NULL;

    assert_int_equal(msc_decide(ctx, graph, options, &plan, &err), MSC_EINVAL);
    assert_null(plan);
    assert_non_null(strstr(err.message, named));
}

static void errors(void **state)
{
    const msc_decide_options good = msc_decide_options_default();
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_nothing(ctx);
    msc_graph *open;
    msc_decide_options options;
    msc_plan *plan;

    (void)state;
    options = good;
    options.struct_bytes = 3;
    check_refused(ctx, graph, &options, "struct_bytes");
    options = good;
    options.rates.struct_bytes = 0;
    check_refused(ctx, graph, &options, "rates.struct_bytes");
    options = good;
    options.rates.flops_per_us[MSC_WORK_MATRIX] = 0;
    check_refused(ctx, graph, &options, "flops_per_us of matrix is");
    options = good;
    options.rates.moved_bytes_per_us[MSC_WORK_COUNT] = 0;
    check_refused(ctx, graph, &options, "moved_bytes_per_us of other_half is");
    options = good;
    options.rates.fresh_from_bytes = 0;
    check_refused(ctx, graph, &options, "fresh_from_bytes");
    options = good;
    options.rates.fresh_bytes_per_us = 0;
    check_refused(ctx, graph, &options, "fresh_bytes_per_us");
    options = good;
    options.rates.intercept_ns = 0;
    check_refused(ctx, graph, &options, "intercept_ns");
    options = good;
    options.rates.launch_ns = 0;
    check_refused(ctx, graph, &options, "launch_ns");
    options = good;
    options.rates.recompute_ns = -1;
    check_refused(ctx, graph, &options, "recompute_ns");
    options = good;
    options.allow_checkpoint = 2;
    check_refused(ctx, graph, &options, "allow_checkpoint");
    options = good;
    options.force = 2;
    check_refused(ctx, graph, &options, "force");
    options = good;
    options.rerun_bytes = (uint64_t)INT64_MAX + 1;
    check_refused(ctx, graph, &options, "rerun_bytes");
    options = good;
    options.pad[3] = 1;
    check_refused(ctx, graph, &options, "pad");
    check_refused(ctx, graph, NULL, "NULL");
    check_refused(ctx, NULL, &good, "NULL");
    assert_int_equal(msc_decide(ctx, graph, &good, NULL, NULL), MSC_EINVAL);
    assert_int_equal(msc_graph_create(ctx, &open, NULL), MSC_OK);
    assert_int_equal(msc_decide(ctx, open, &good, &plan, NULL), MSC_ESTATE);
    msc_graph_destroy(open);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

static void overflow(void **state)
{
    const msc_decide_options options = msc_decide_options_default();
    msc_context *ctx = figures_start();
    msc_graph *graph;
    msc_plan *plan;

    (void)state;
    assert_int_equal(msc_graph_create(ctx, &graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(graph, "op", &(msc_op){.scratch_bytes = UINT64_MAX}, NULL, NULL),
                     MSC_OK);
    assert_int_equal(msc_graph_finish(graph, NULL), MSC_OK);
    assert_int_equal(msc_decide(ctx, graph, &options, &plan, NULL), MSC_EOVERFLOW);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

static void empty_graph(void **state)
{
    const msc_decide_options options = msc_decide_options_default();
    msc_context *ctx = figures_start();
    msc_graph *graph;
    msc_plan *plan;

    (void)state;
    assert_int_equal(msc_graph_create(ctx, &graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_finish(graph, NULL), MSC_OK);
    plan = decide(ctx, graph, &options);
    assert_int_equal(msc_plan_choice_count(plan), 0);
    assert_int_equal(msc_plan_get_summary(plan)->peak_bytes, 0);
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* Ends the graph and its context. Every allocation fails once; of more than `every`, only about that many: of fewer with
   MEMSCALE_OOM=few. */
static void check_out_of_memory(msc_context *owner, msc_graph *graph, msc_sim_kind kind, uint64_t every)
{
    static failing_alloc heap;
    msc_decide_options options = msc_decide_options_default();
    uint64_t n;

    if (failing_alloc_wanted("few"))
        every = FEW;
    options.sim = msc_sim_options_default(kind);
    options.force = 1;
    for (n = 1;; n += n / every + 1) {
        msc_context *ctx;
        msc_plan *plan = NULL;
        msc_status status;
        failing_alloc_init(&heap, n);
        ctx = failing_alloc_context(&heap);
        assert_non_null(ctx);
        status = msc_decide(ctx, graph, &options, &plan, NULL);
        assert_int_equal(status, heap.failed_count > 0 ? MSC_ENOMEM : MSC_OK);
        assert_true((plan == NULL) == (heap.failed_count > 0));
        msc_plan_destroy(plan);
        assert_int_equal(msc_context_held_bytes(ctx), 0);
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(&heap));
        if (heap.failed_count == 0)
            break;
    }
    assert_true(n > 40);
    msc_graph_destroy(graph);
    figures_stop(owner);
}

static void out_of_memory(void **state)
{
    msc_context *owner;

    (void)state;
    owner = figures_start();
    check_out_of_memory(owner, synth_transformer(owner, 2), MSC_SIM_HOST, UINT64_MAX);
    owner = figures_start();
    check_out_of_memory(owner, synth_transformer(owner, 2), MSC_SIM_CUDA, 40);
    owner = figures_start();
    check_out_of_memory(owner, synth_blocks(owner, 2, SYNTH_HALVES), MSC_SIM_HOST, UINT64_MAX);
    owner = figures_start();
    check_out_of_memory(owner, synth_sequence(owner, 8, SYNTH_UNEQUAL), MSC_SIM_HOST, UINT64_MAX);
    owner = figures_start();
    check_out_of_memory(owner, synth_sequence(owner, 6, 0), MSC_SIM_CUDA, UINT64_MAX);
    owner = figures_start();
    check_out_of_memory(owner, synth_sequence(owner, 14, 0), MSC_SIM_CUDA, 40);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"decide/plain-fits", plain_fits, NULL, NULL, NULL},
        {"decide/budgets-host", budgets_host, NULL, NULL, NULL},
        {"decide/budgets-cuda", budgets_cuda, NULL, NULL, NULL},
        {"decide/impossible-budget", impossible, NULL, NULL, NULL},
        {"decide/force", force, NULL, NULL, NULL},
        {"decide/disabled", disabled, NULL, NULL, NULL},
        {"decide/rules-of-what-is-kept", rules_of_kept, NULL, NULL, NULL},
        {"decide/frontier", frontier, NULL, NULL, NULL},
        {"decide/same-twice", same_twice, NULL, NULL, NULL},
        {"decide/errors", errors, NULL, NULL, NULL},
        {"decide/overflow", overflow, NULL, NULL, NULL},
        {"decide/empty-graph", empty_graph, NULL, NULL, NULL},
        {"decide/out-of-memory", out_of_memory, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
