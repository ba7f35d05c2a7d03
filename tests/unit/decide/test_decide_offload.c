/* SPDX-License-Identifier: Apache-2.0 */
/* What leaves the device: when it pays and when not, its limit, and what never moves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "decide/decide_cost.h"
#include "figures.h"
#include "synth.h"

#define FAST 100000u /* bytes per microsecond */
#define SLOW 5u

static msc_decide_options offloads(uint64_t bytes_per_us)
{
    msc_decide_options options = msc_decide_options_default();

    options.allow_offload = 1;
    options.link.out_bytes_per_us = bytes_per_us;
    options.link.in_bytes_per_us = bytes_per_us;
    options.link.least_bytes = 4096;
    options.link.window_out_bytes = 1 << 20;
    options.link.window_in_bytes = 1 << 20;
    return options;
}

static msc_plan *decide(msc_context *ctx, const msc_graph *graph, const msc_decide_options *options)
{
    msc_plan *plan;
    msc_error err;

    if (msc_decide(ctx, graph, options, &plan, &err) != MSC_OK)
        fail_msg("%s", err.message);
    return plan;
}

/* A budget between the smallest and the plain peak of a plan without offloads. */
static uint64_t budget_of(msc_context *ctx, const msc_graph *graph, uint32_t percent)
{
    const msc_decide_options options = msc_decide_options_default();
    msc_plan_summary s = figures_decide(ctx, graph, &options, UINT64_MAX);

    return s.smallest_peak_bytes + (s.plain_peak_bytes - s.smallest_peak_bytes) / 100 * percent;
}

typedef struct sums {
    uint32_t offloads;
    uint32_t boundaries;
    uint32_t checkpoints;
    uint32_t moved_count;
    uint64_t moved_bytes;
    int64_t cost_ns;
} sums;

static sums add_up(const msc_plan *plan)
{
    sums sum = {0};
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(plan); i++) {
        const msc_choice *c = &msc_plan_choices(plan)[i];
        sum.offloads += c->action == MSC_ACTION_OFFLOAD;
        sum.checkpoints += c->action == MSC_ACTION_CHECKPOINT || c->action == MSC_ACTION_SELECTIVE;
        sum.boundaries += c->boundary;
        sum.moved_count += c->moved_count;
        sum.moved_bytes += c->moved_bytes;
        assert_true(c->transfer_ns <= c->cost_ns);
        if (c->action != MSC_ACTION_KEEP && !c->joined)
            sum.cost_ns += c->cost_ns;
    }
    return sum;
}

/* The plan's own replay tells the same as its choices and its summary; treated modules do not nest. */
static void check_plan(msc_context *ctx, const msc_graph *graph, const msc_plan *plan, msc_sim_kind kind)
{
    const msc_sim_options sim_options = msc_sim_options_default(kind);
    const msc_plan_summary *s = msc_plan_get_summary(plan);
    const msc_module *modules = msc_graph_modules(graph);
    sums sum = add_up(plan);
    msc_trace *trace;
    msc_sim *sim;
    msc_replay replay;
    uint32_t i;
    uint32_t m;

    assert_int_equal(msc_trace_create(ctx, graph, plan, &trace, NULL), MSC_OK);
    assert_int_equal(msc_sim_create(ctx, &sim_options, &sim, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(trace, sim, NULL, 0, &replay, NULL), MSC_OK);
    assert_true(replay.peak_bytes == s->peak_bytes);
    assert_true(replay.away_peak_bytes == s->away_peak_bytes);
    assert_true(replay.moved_bytes == sum.moved_bytes);
    assert_int_equal(replay.moved_count, sum.moved_count);
    assert_true(s->step_ns == s->plain_step_ns + sum.cost_ns);
    for (i = 0; i < msc_plan_choice_count(plan); i++) {
        if (msc_plan_choices(plan)[i].action == MSC_ACTION_KEEP)
            continue;
        for (m = modules[msc_plan_choices(plan)[i].module].parent; m != MSC_NONE; m = modules[m].parent)
            assert_int_equal(msc_plan_action(plan, m), MSC_ACTION_KEEP);
    }
    msc_sim_destroy(sim);
    msc_trace_destroy(trace);
}

/* Over a fast link everything that is needed leaves and costs next to nothing; over a slow one nothing does, and the
 * plan is the one without offloads. */
static void pays_or_not(void **state)
{
    static const msc_sim_kind kinds[] = {MSC_SIM_HOST, MSC_SIM_CUDA};
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_blocks(ctx, 6, SYNTH_HALVES);
    uint64_t budget_bytes = budget_of(ctx, graph, 60);
    size_t i;

    (void)state;
    for (i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        msc_decide_options none = msc_decide_options_default();
        msc_decide_options fast = offloads(FAST);
        msc_decide_options slow = offloads(SLOW);
        msc_plan *plans[3];
        none.budget_bytes = fast.budget_bytes = slow.budget_bytes = budget_bytes;
        none.sim = fast.sim = slow.sim = msc_sim_options_default(kinds[i]);
        plans[0] = decide(ctx, graph, &none);
        plans[1] = decide(ctx, graph, &fast);
        plans[2] = decide(ctx, graph, &slow);
        check_plan(ctx, graph, plans[1], kinds[i]);
        assert_true(add_up(plans[1]).offloads > 0);
        assert_true(msc_plan_get_summary(plans[1])->window_out_bytes == 1 << 20);
        assert_true(msc_plan_get_summary(plans[1])->step_ns < msc_plan_get_summary(plans[0])->step_ns);
        assert_int_equal(add_up(plans[2]).moved_count, 0);
        assert_true(msc_plan_get_summary(plans[2])->window_out_bytes == 0);
        if (kinds[i] == MSC_SIM_HOST)
            assert_true(msc_plan_get_summary(plans[2])->step_ns == msc_plan_get_summary(plans[0])->step_ns);
        msc_plan_destroy(plans[0]);
        msc_plan_destroy(plans[1]);
        msc_plan_destroy(plans[2]);
    }
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* Also where copies cost more than anything, a budget that nothing else meets has them. */
static void reaches_lower(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_blocks(ctx, 12, 0);
    msc_decide_options options = offloads(FAST);
    msc_decide_options none = msc_decide_options_default();
    msc_plan *plan;

    (void)state;
    options.link.offload_ns = (int64_t)1 << 40; /* a checkpoint is cheaper than any copy */
    options.budget_bytes = 1;
    plan = decide(ctx, graph, &options);
    check_plan(ctx, graph, plan, MSC_SIM_HOST);
    assert_true(add_up(plan).moved_count > 0);
    assert_true(msc_plan_get_summary(plan)->smallest_peak_bytes <
                figures_decide(ctx, graph, &none, 1).smallest_peak_bytes);
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* That something may leave never makes a plan slower, nor an attainable budget unattainable. */
static void never_worse(void **state)
{
    static const uint64_t rates[] = {FAST, 1000, 60, SLOW};
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_blocks(ctx, 6, SYNTH_HALVES | SYNTH_LAYERS);
    const msc_decide_options none = msc_decide_options_default();
    uint32_t percent;
    size_t i;

    (void)state;
    for (percent = 0; percent <= 100; percent += 20) {
        uint64_t budget_bytes = budget_of(ctx, graph, percent);
        msc_plan_summary without = figures_decide(ctx, graph, &none, budget_bytes);
        assert_int_equal(without.fits, 1);
        for (i = 0; i < sizeof rates / sizeof rates[0]; i++) {
            const msc_decide_options options = offloads(rates[i]);
            msc_plan_summary with = figures_decide(ctx, graph, &options, budget_bytes);
            assert_int_equal(with.fits, 1);
            assert_true(with.step_ns <= without.step_ns);
            assert_true(with.smallest_peak_bytes <= without.smallest_peak_bytes);
        }
    }
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* No plan ever has more offloaded than it may, and with nothing allowed it is the plan without offloads. */
static void limit(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_unequal(ctx, 12, 2);
    msc_decide_options options = offloads(FAST);
    uint64_t before = UINT64_MAX;
    uint64_t percent;
    uint64_t all;

    (void)state;
    options.budget_bytes = budget_of(ctx, graph, 10);
    all = figures_decide(ctx, graph, &options, options.budget_bytes).away_peak_bytes;
    assert_true(all > 0);
    for (percent = 90; percent <= 90; percent -= 30) {
        msc_plan *plan;
        options.link.limit_bytes = all / 100 * percent;
        plan = decide(ctx, graph, &options);
        check_plan(ctx, graph, plan, MSC_SIM_HOST);
        assert_true(msc_plan_get_summary(plan)->away_peak_bytes <= options.link.limit_bytes);
        assert_true(msc_plan_get_summary(plan)->away_peak_bytes <= before);
        before = msc_plan_get_summary(plan)->away_peak_bytes;
        msc_plan_destroy(plan);
    }
    assert_true(before == 0 && percent > 90);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* Staging is part of the peak of whatever moves anything, and of nothing else; a plan without is taken where that is
 * better. Whatever it is, more of it never makes a plan faster or smaller. */
static void staging(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_unequal(ctx, 12, 2);
    msc_decide_options options = offloads(FAST);
    const msc_decide_options none = msc_decide_options_default();
    msc_plan_summary before = {0};
    uint64_t staged = 0;
    uint32_t moving = 0;

    (void)state;
    options.budget_bytes = budget_of(ctx, graph, 40);
    for (; staged <= options.budget_bytes; staged += options.budget_bytes / 8) {
        msc_plan *plan;
        msc_plan_summary s;
        options.link.staging_bytes = staged;
        plan = decide(ctx, graph, &options);
        check_plan(ctx, graph, plan, MSC_SIM_HOST);
        s = *msc_plan_get_summary(plan);
        assert_int_equal(s.staging_bytes, s.away_peak_bytes > 0 ? staged : 0);
        assert_true(s.fits && s.peak_bytes <= options.budget_bytes);
        assert_true(s.step_ns >= before.step_ns && s.smallest_peak_bytes >= before.smallest_peak_bytes);
        moving += staged > 0 && s.away_peak_bytes > 0;
        before = s;
        msc_plan_destroy(plan);
    }
    assert_true(moving > 0 && before.away_peak_bytes == 0);
    assert_true(before.step_ns == figures_decide(ctx, graph, &none, options.budget_bytes).step_ns);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* Whether a plan offloads the module at a path. */
static bool is_moved(const msc_plan *plan, const msc_graph *graph, const char *path)
{
    const msc_module *modules = msc_graph_modules(graph);
    uint32_t m;

    for (m = 0; m < msc_graph_module_count(graph); m++)
        if (strcmp(msc_graph_string(graph, modules[m].path), path) == 0)
            return msc_plan_action(plan, m) == MSC_ACTION_OFFLOAD;
    fail_msg("no module %s", path);
    return false;
}

/* Modules that must not run twice are offloaded all the same, but for those that nobody may touch. */
static void runs_once(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_barred(ctx);
    msc_decide_options options = offloads(FAST);
    uint32_t barred = 0;
    msc_plan *plan;
    uint32_t m;

    (void)state;
    options.budget_bytes = 1;
    options.allow_checkpoint = 0;
    plan = decide(ctx, graph, &options);
    check_plan(ctx, graph, plan, MSC_SIM_HOST);
    assert_int_equal(add_up(plan).checkpoints, 0);
    for (m = 0; m < msc_graph_module_count(graph); m++) {
        uint32_t flags = msc_graph_modules(graph)[m].flags;
        bool moves = msc_plan_action(plan, m) == MSC_ACTION_OFFLOAD;
        barred += moves && (flags & (MSC_MODULE_PYTHON_STATE | MSC_MODULE_NOT_TENSORS)) != 0;
        assert_false(moves && (flags & (MSC_MODULE_EXCLUDED | MSC_MODULE_NO_FORWARD)) != 0);
    }
    assert_true(barred >= 2);
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* What the caller forbids stays, with all around it or by itself; what differed in a recompute runs once here. */
static void left_out(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_left_out(ctx);
    msc_decide_options options = offloads(FAST);
    msc_plan *plan;

    (void)state;
    options.budget_bytes = 1;
    plan = decide(ctx, graph, &options);
    check_plan(ctx, graph, plan, MSC_SIM_HOST);
    assert_false(is_moved(plan, graph, "parent_of_excluded"));
    assert_false(is_moved(plan, graph, "parent_of_excluded.excluded"));
    assert_false(is_moved(plan, graph, "parent_of_left_out.left_out"));
    assert_true(is_moved(plan, graph, "parent_of_differed") ||
                is_moved(plan, graph, "parent_of_differed.differed"));
    msc_plan_destroy(plan);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* ---- what moves ------------------------------------------------------------------------------------ */

/* Module m, called once: op 0 makes a (saved), op 1 makes b (saved), op 2 makes c (saved twice), op 3 follows. Then
 * what a case adds; backward uses c, b, a in turn. */
typedef struct making {
    msc_graph *graph;
    uint32_t saves[5];
    uint32_t save_count;
} making;

static uint32_t make(making *m, uint64_t bytes)
{
    const msc_op op = {.flops = 100000000, .moved_bytes = bytes};
    uint32_t buffer;

    assert_int_equal(msc_graph_add_op(m->graph, "op", &op, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(m->graph, bytes, MSC_CATEGORY_ACTIVATION, &buffer, NULL), MSC_OK);
    return buffer;
}

static void save(making *m, uint32_t buffer)
{
    assert_int_equal(msc_graph_add_save(m->graph, buffer, &m->saves[m->save_count++], NULL), MSC_OK);
}

enum { AS_IT_IS, SAVED_OUTSIDE, WRITTEN_LATER, NAMED, TOO_SMALL };

static msc_graph *make_case(msc_context *ctx, int kind)
{
    const msc_module root = {.parent = MSC_NONE, .flags = MSC_MODULE_ROOT};
    const msc_module inner = {.parent = 0};
    making m = {0};
    uint32_t call[2];
    uint32_t a, b, c;
    uint32_t i;

    assert_int_equal(msc_graph_create(ctx, &m.graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_module(m.graph, "", "Model", &root, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_module(m.graph, "m", "M", &inner, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_begin_call(m.graph, 0, &call[0], NULL), MSC_OK);
    assert_int_equal(msc_graph_begin_call(m.graph, 1, &call[1], NULL), MSC_OK);
    a = make(&m, 100000);
    save(&m, a);
    b = make(&m, kind == TOO_SMALL ? 1000 : 200000);
    save(&m, b);
    assert_int_equal(msc_graph_end_buffer(m.graph, a, NULL), MSC_OK);
    c = make(&m, 400000);
    save(&m, c);
    save(&m, c);
    if (kind != NAMED)
        assert_int_equal(msc_graph_end_buffer(m.graph, b, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_buffer(m.graph, c, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_call(m.graph, call[1], NULL), MSC_OK);
    (void)make(&m, 10);
    if (kind == SAVED_OUTSIDE)
        save(&m, b);
    if (kind == WRITTEN_LATER)
        assert_int_equal(msc_graph_add_write(m.graph, b, NULL), MSC_OK);
    (void)make(&m, 900000);
    assert_int_equal(msc_graph_end_call(m.graph, call[0], NULL), MSC_OK);
    assert_int_equal(msc_graph_set_phase(m.graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    (void)make(&m, 10);
    for (i = m.save_count; i-- > 0;) {
        assert_int_equal(msc_graph_unpack(m.graph, m.saves[i], NULL), MSC_OK);
        (void)make(&m, 10);
        assert_int_equal(msc_graph_release(m.graph, m.saves[i], NULL), MSC_OK);
    }
    assert_int_equal(msc_graph_finish(m.graph, NULL), MSC_OK);
    return m.graph;
}

/* Ordinals of what module m moves as text, "-" for nothing. */
static void write_moved(msc_context *ctx, const msc_graph *graph, char *text)
{
    const msc_decide_options options = offloads(FAST);
    msc__model model;
    uint32_t c;
    uint32_t i;

    assert_int_equal(msc__model_init(&model, ctx, graph, &options, NULL), MSC_OK);
    c = model.subjects[1].offload;
    for (i = 0; c != MSC_NONE && i < model.candidates[c].moved_count; i++)
        *text++ = (char)('0' + model.moved[model.candidates[c].first_moved + i]);
    *text = '\0';
    msc__model_fini(&model);
}

static void what_moves(void **state)
{
    static const char *const expected[] = {"0123", "023", "023", "023", "023"};
    msc_context *ctx = figures_start();
    int kind;

    (void)state;
    for (kind = AS_IT_IS; kind <= TOO_SMALL; kind++) {
        msc_graph *graph = make_case(ctx, kind);
        char text[8];
        write_moved(ctx, graph, text);
        assert_string_equal(text, expected[kind]);
        msc_graph_destroy(graph);
    }
    figures_stop(ctx);
}

/* Three storages of 700,000 bytes, 400,000 of which are used first and come back before anything can hide them; m computes for 3 × 1,005 µs (flops 1 ms, launch 5 µs) forward, and its backward is
 * three operations of about as long, of which those between first use and last release hide the way back. */
static void transfer_time(void **state)
{
    static const struct {
        uint64_t bytes_per_us;
        int64_t ns;
    } cases[] = {
        {1000, 3 * 2 * 20000 + 400 * 1000},                        /* 700 µs hide */
        {100, 3 * 2 * 20000 + (7000 - 3015) * 1000 + 4000 * 1000}, /* 7 ms do not; in, less than the first */
        {40, 3 * 2 * 20000 + (17500 - 3015) * 1000 + (17500 - 4020) * 1000}, /* nor do 17.5 ms, both ways */
    };
    msc_context *ctx = figures_start();
    msc_graph *graph = make_case(ctx, AS_IT_IS);
    size_t i;

    (void)state;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const msc_decide_options options = offloads(cases[i].bytes_per_us);
        msc__model model;
        const msc__candidate *c;
        assert_int_equal(msc__model_init(&model, ctx, graph, &options, NULL), MSC_OK);
        c = &model.candidates[model.subjects[1].offload];
        assert_in_range(c->cost_ns, cases[i].ns - 100000, cases[i].ns + 100000);
        assert_true(msc__cost_transfers(&model, c) == c->cost_ns);
        msc__model_fini(&model);
    }
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

/* Peak of a plan whose allowances are all set to a number. */
static uint64_t peak_with(msc_context *ctx, const msc_graph *graph, msc_plan *plan, uint64_t ahead_bytes)
{
    const msc_sim_options options = msc_sim_options_default(MSC_SIM_HOST);
    msc_trace *trace;
    msc_sim *sim;
    msc_replay replay;
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(plan); i++)
        if (msc_plan_choices(plan)[i].moved_count > 0)
            assert_int_equal(msc_plan_set_ahead(plan, i, ahead_bytes, NULL), MSC_OK);
    assert_int_equal(msc_trace_create(ctx, graph, plan, &trace, NULL), MSC_OK);
    assert_int_equal(msc_sim_create(ctx, &options, &sim, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(trace, sim, NULL, 0, &replay, NULL), MSC_OK);
    msc_sim_destroy(sim);
    msc_trace_destroy(trace);
    return replay.peak_bytes;
}

/* As much comes back early as fits below the peak that there is without: some does, and all would raise a peak. */
static void comes_back_early(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_blocks(ctx, 8, SYNTH_HALVES);
    uint32_t early = 0;
    uint32_t raised = 0;
    uint32_t percent;

    (void)state;
    for (percent = 10; percent <= 90; percent += 10) {
        msc_decide_options options = offloads(FAST);
        msc_plan *plan;
        uint64_t peak_bytes;
        uint32_t i;
        options.link.window_in_bytes = (uint64_t)1 << 30;
        options.budget_bytes = budget_of(ctx, graph, percent);
        plan = decide(ctx, graph, &options);
        peak_bytes = msc_plan_get_summary(plan)->peak_bytes;
        for (i = 0; i < msc_plan_choice_count(plan); i++)
            early += msc_plan_choices(plan)[i].ahead_bytes > 0;
        check_plan(ctx, graph, plan, MSC_SIM_HOST);
        assert_true(peak_with(ctx, graph, plan, 0) == peak_bytes);
        raised += peak_with(ctx, graph, plan, UINT64_MAX) > peak_bytes;
        msc_plan_destroy(plan);
    }
    assert_true(early > 0);
    assert_true(raised > 0);
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

static void refuses_options(void **state)
{
    msc_context *ctx = figures_start();
    msc_graph *graph = synth_chain(ctx);
    msc_decide_options options[7];
    size_t i;

    (void)state;
    for (i = 0; i < 7; i++)
        options[i] = offloads(FAST);
    options[0].link.out_bytes_per_us = 0;
    options[1].link.in_bytes_per_us = 0;
    options[2].link.least_bytes = 0;
    options[3].link.offload_ns = -1;
    options[4].allow_offload = 2;
    options[5].link.staging_bytes = (uint64_t)INT64_MAX + 1;
    options[6].link.staging_bytes = 1;
    options[6].sim = msc_sim_options_default(MSC_SIM_CUDA);
    for (i = 0; i < 7; i++) {
        msc_plan *plan;
        msc_error err;
        assert_int_equal(msc_decide(ctx, graph, &options[i], &plan, &err), MSC_EINVAL);
        assert_non_null(strstr(err.message, i == 4 ? "allow_offload" : "link."));
        options[i].allow_offload = 0;
        assert_int_equal(msc_decide(ctx, graph, &options[i], &plan, &err), MSC_OK); /* of no effect */
        msc_plan_destroy(plan);
    }
    msc_graph_destroy(graph);
    figures_stop(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"offload/pays-or-not", pays_or_not, NULL, NULL, NULL},
        {"offload/reaches-lower", reaches_lower, NULL, NULL, NULL},
        {"offload/never-worse", never_worse, NULL, NULL, NULL},
        {"offload/limit", limit, NULL, NULL, NULL},
        {"offload/staging", staging, NULL, NULL, NULL},
        {"offload/runs-once", runs_once, NULL, NULL, NULL},
        {"offload/left-out", left_out, NULL, NULL, NULL},
        {"offload/what-moves", what_moves, NULL, NULL, NULL},
        {"offload/transfer-time", transfer_time, NULL, NULL, NULL},
        {"offload/comes-back-early", comes_back_early, NULL, NULL, NULL},
        {"offload/refuses-options", refuses_options, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
