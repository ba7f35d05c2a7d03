/* SPDX-License-Identifier: Apache-2.0 */
/* Distance from the best plan, for the tests that know it (figures.h). */
#include "figures.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "memscale/replay.h"

void figures_enter(figures *f, int64_t step_ns, int64_t best_ns)
{
    uint32_t ppm = (uint32_t)((step_ns - best_ns) * 1000000 / best_ns);

    assert_true(step_ns >= best_ns);
    assert_in_range(f->count, 0, FIGURES_MOST - 1);
    f->ppm[f->count++] = ppm;
    f->worst = ppm > f->worst ? ppm : f->worst;
}

static int compare_u32(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

void figures_check(figures *f)
{
    uint32_t median;

    qsort(f->ppm, f->count, sizeof *f->ppm, compare_u32);
    median = f->ppm[f->count / 2];
    print_message("%u graphs, %u budgets: step above the best: median %u ppm, worst %u ppm\n", f->graphs,
                  f->count, median, f->worst);
    assert_true(median <= 20000);
    assert_true(f->worst <= 50000);
}

msc_context *figures_start(void)
{
    msc_context *ctx;

    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    return ctx;
}

void figures_stop(msc_context *ctx)
{
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
}

msc_decide_options figures_small_costs(msc_sim_kind kind)
{
    msc_decide_options options = msc_decide_options_default();

    options.sim = msc_sim_options_default(kind);
    options.rates.launch_ns = 1000;
    options.rates.recompute_ns = 2000;
    options.rates.intercept_ns = 100;
    return options;
}

msc_plan_summary figures_decide(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options,
                                uint64_t budget_bytes)
{
    msc_decide_options o = *options;
    msc_plan_summary summary;
    msc_plan *plan;

    o.budget_bytes = budget_bytes;
    assert_int_equal(msc_decide(ctx, graph, &o, &plan, NULL), MSC_OK);
    summary = *msc_plan_get_summary(plan);
    msc_plan_destroy(plan);
    return summary;
}

uint64_t figures_replay(const brute *b, msc_sim *sim)
{
    msc_plan *plan = NULL;
    msc_trace *trace;
    msc_replay replay;

    assert_int_equal(msc__plan_of_set(&b->model, b->set, &plan, NULL), MSC_OK);
    assert_int_equal(msc_trace_create(b->ctx, b->model.graph, plan, &trace, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(trace, sim, NULL, 0, &replay, NULL), MSC_OK);
    msc_trace_destroy(trace);
    msc_plan_destroy(plan);
    return replay.peak_bytes;
}
