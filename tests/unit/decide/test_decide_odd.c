/* SPDX-License-Identifier: Apache-2.0 */
/* Odd input: whatever the graph, a sensible plan or a clear answer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "memscale/memscale.h"
#include "synth.h"

typedef struct fixture {
    msc_context *ctx;
    msc_graph *graph;
    msc_decide_options options;
    msc_plan *plan;
    msc_plan_summary summary; /* of `plan` */
} fixture;

static void start(fixture *f)
{
    memset(f, 0, sizeof *f);
    f->options = msc_decide_options_default();
    assert_int_equal(msc_context_create(NULL, &f->ctx, NULL), MSC_OK);
}

static void load(fixture *f, msc_graph *graph)
{
    assert_non_null(graph);
    f->graph = graph;
}

static void decide(fixture *f, uint64_t budget_bytes)
{
    msc_error err = {0};
    msc_status status;

    msc_plan_destroy(f->plan);
    f->options.budget_bytes = budget_bytes;
    status = msc_decide(f->ctx, f->graph, &f->options, &f->plan, &err);
    if (status != MSC_OK)
        fail_msg("%s: %s", msc_status_name(status), err.message);
    f->summary = *msc_plan_get_summary(f->plan);
    assert_int_equal(f->summary.fits, f->summary.peak_bytes <= budget_bytes);
    assert_true(f->summary.smallest_peak_bytes <= f->summary.peak_bytes);
    assert_true(f->summary.peak_bytes <= f->summary.plain_peak_bytes);
    assert_true(f->summary.plain_step_ns >= 0 && f->summary.step_ns >= f->summary.plain_step_ns);
}

static void stop(fixture *f)
{
    msc_plan_destroy(f->plan);
    msc_graph_destroy(f->graph);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
}

static uint32_t count_actions(const fixture *f)
{
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(f->plan); i++)
        count += msc_plan_choices(f->plan)[i].action != MSC_ACTION_KEEP;
    return count;
}

static uint32_t count_rule(const fixture *f, msc_rule rule)
{
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(f->plan); i++)
        count += msc_plan_choices(f->plan)[i].rule == rule;
    return count;
}

/* ---- few things ------------------------------------------------------------------------------------ */

/* Nothing is saved, so there is nothing to choose. */
static void no_backward(void **state)
{
    fixture f;

    (void)state;
    start(&f);
    load(&f, synth_frozen(f.ctx, 8));
    decide(&f, 1);
    assert_int_equal(f.summary.fits, 0);
    assert_int_equal(msc_plan_choice_count(f.plan), 0);
    assert_true(f.summary.peak_bytes == f.summary.plain_peak_bytes);
    decide(&f, UINT64_MAX);
    assert_int_equal(f.summary.fits, 1);
    stop(&f);
}

/* One layer saves what comes from outside: running it again frees nothing. */
static void one_layer(void **state)
{
    fixture f;

    (void)state;
    start(&f);
    load(&f, synth_sequence(f.ctx, 1, 0));
    decide(&f, 1);
    assert_int_equal(f.summary.fits, 0);
    assert_int_equal(count_actions(&f), 0);
    assert_int_equal(count_rule(&f, MSC_RULE_NO_SAVING), 1);
    assert_int_equal(count_rule(&f, MSC_RULE_ROOT), 1);
    stop(&f);
}

static void no_operations(void **state)
{
    const msc_module module = {.parent = MSC_NONE};
    fixture f;
    uint32_t id;
    uint32_t call;

    (void)state;
    start(&f);
    assert_int_equal(msc_graph_create(f.ctx, &f.graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_module(f.graph, "m", "M", &module, &id, NULL), MSC_OK);
    assert_int_equal(msc_graph_begin_call(f.graph, id, &call, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_call(f.graph, call, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_resident(f.graph, 100, MSC_CATEGORY_PARAMETER, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_finish(f.graph, NULL), MSC_OK);
    decide(&f, 99);
    assert_int_equal(f.summary.fits, 0);
    assert_int_equal(f.summary.peak_bytes, 100);
    assert_int_equal(f.summary.step_ns, 0);
    decide(&f, 100);
    assert_int_equal(f.summary.fits, 1);
    stop(&f);
}

/* ---- nothing helps --------------------------------------------------------------------------------- */

/* An operation in the middle that alone takes more than the budget. */
static void one_huge_operation(void **state)
{
    fixture f;

    (void)state;
    start(&f);
    load(&f, synth_huge(f.ctx));
    decide(&f, 1u << 30);
    assert_int_equal(f.summary.fits, 0);
    assert_true(f.summary.peak_bytes >= 2u << 30); /* its output and its scratch */
    assert_int_equal(count_rule(&f, MSC_RULE_CHOSEN), 0);
    stop(&f);
}

/* Below what is resident: no plan can help, the smallest one is given. */
static void below_weights(void **state)
{
    uint64_t resident = 0;
    fixture f;
    uint32_t i;

    (void)state;
    start(&f);
    load(&f, synth_blocks(f.ctx, 4, SYNTH_HALVES));
    for (i = 0; i < msc_graph_buffer_count(f.graph); i++)
        resident += msc_graph_buffers(f.graph)[i].resident ? msc_graph_buffers(f.graph)[i].size_bytes : 0;
    decide(&f, resident - 1);
    assert_int_equal(f.summary.fits, 0);
    assert_true(f.summary.peak_bytes == f.summary.smallest_peak_bytes);
    assert_true(f.summary.smallest_peak_bytes > resident);
    assert_true(count_rule(&f, MSC_RULE_SMALLEST) > 0);
    decide(&f, 0);
    assert_int_equal(f.summary.fits, 0);
    stop(&f);
}

/* Every module is refused, and each says why. */
static void all_refused(void **state)
{
    fixture f;
    uint32_t module;
    uint32_t i;

    (void)state;
    start(&f);
    assert_int_equal(msc_graph_create(f.ctx, &f.graph, NULL), MSC_OK);
    for (i = 0; i < 6; i++) {
        const msc_module desc = {.parent = MSC_NONE, .flags = 1u << i};
        char path[8];
        uint32_t call;
        uint32_t buffer;
        snprintf(path, sizeof path, "m%u", i);
        assert_int_equal(msc_graph_add_module(f.graph, path, "M", &desc, &module, NULL), MSC_OK);
        assert_int_equal(msc_graph_begin_call(f.graph, module, &call, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_op(f.graph, "op", &(msc_op){0}, NULL, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_buffer(f.graph, 1000, MSC_CATEGORY_ACTIVATION, &buffer, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_save(f.graph, buffer, NULL, NULL), MSC_OK);
        assert_int_equal(msc_graph_end_buffer(f.graph, buffer, NULL), MSC_OK);
        assert_int_equal(msc_graph_end_call(f.graph, call, NULL), MSC_OK);
    }
    assert_int_equal(msc_graph_set_phase(f.graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    for (i = 6; i-- > 0;) {
        assert_int_equal(msc_graph_unpack(f.graph, i, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_op(f.graph, "back", &(msc_op){0}, NULL, NULL), MSC_OK);
        assert_int_equal(msc_graph_release(f.graph, i, NULL), MSC_OK);
    }
    assert_int_equal(msc_graph_finish(f.graph, NULL), MSC_OK);
    decide(&f, 1);
    assert_int_equal(msc_plan_choice_count(f.plan), 6);
    assert_int_equal(count_actions(&f), 0);
    assert_int_equal(count_rule(&f, MSC_RULE_NO_SAVING), 0);
    assert_int_equal(f.summary.peak_bytes, 6000);
    stop(&f);
}

/* Everything is saved outside the modules. */
static void saved_outside(void **state)
{
    const msc_module desc = {.parent = MSC_NONE};
    uint32_t saves[8];
    fixture f;
    uint32_t i;

    (void)state;
    start(&f);
    assert_int_equal(msc_graph_create(f.ctx, &f.graph, NULL), MSC_OK);
    for (i = 0; i < 8; i++) {
        char path[8];
        uint32_t module;
        uint32_t call;
        uint32_t buffer;
        snprintf(path, sizeof path, "m%u", i);
        assert_int_equal(msc_graph_add_module(f.graph, path, "M", &desc, &module, NULL), MSC_OK);
        assert_int_equal(msc_graph_begin_call(f.graph, module, &call, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_op(f.graph, "op", &(msc_op){0}, NULL, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_buffer(f.graph, 1000, MSC_CATEGORY_ACTIVATION, &buffer, NULL), MSC_OK);
        assert_int_equal(msc_graph_end_call(f.graph, call, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_save(f.graph, buffer, &saves[i], NULL), MSC_OK);
        assert_int_equal(msc_graph_end_buffer(f.graph, buffer, NULL), MSC_OK);
    }
    assert_int_equal(msc_graph_set_phase(f.graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    for (i = 8; i-- > 0;) {
        assert_int_equal(msc_graph_unpack(f.graph, saves[i], NULL), MSC_OK);
        assert_int_equal(msc_graph_add_op(f.graph, "back", &(msc_op){0}, NULL, NULL), MSC_OK);
        assert_int_equal(msc_graph_release(f.graph, saves[i], NULL), MSC_OK);
    }
    assert_int_equal(msc_graph_finish(f.graph, NULL), MSC_OK);
    decide(&f, 1);
    assert_int_equal(f.summary.fits, 0);
    assert_int_equal(msc_plan_choice_count(f.plan), 0);
    assert_int_equal(f.summary.peak_bytes, 8000);
    stop(&f);
}

/* ---- extreme numbers ------------------------------------------------------------------------------- */

/* A block of three operations of so many bytes and so much work each, two of which are saved. */
static void build_extreme(fixture *f, uint64_t bytes, const msc_op *op)
{
    const msc_module desc = {.parent = MSC_NONE};
    uint32_t saves[2];
    uint32_t module;
    uint32_t call;
    uint32_t i;

    start(f);
    assert_int_equal(msc_graph_create(f->ctx, &f->graph, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_module(f->graph, "m", "M", &desc, &module, NULL), MSC_OK);
    assert_int_equal(msc_graph_begin_call(f->graph, module, &call, NULL), MSC_OK);
    for (i = 0; i < 3; i++) {
        assert_int_equal(msc_graph_add_op(f->graph, "op", op, NULL, NULL), MSC_OK);
        assert_int_equal(msc_graph_add_buffer(f->graph, bytes, MSC_CATEGORY_ACTIVATION, NULL, NULL), MSC_OK);
        if (i < 2)
            assert_int_equal(msc_graph_add_save(f->graph, i, &saves[i], NULL), MSC_OK);
        if (i > 0)
            assert_int_equal(msc_graph_end_buffer(f->graph, i - 1, NULL), MSC_OK);
    }
    assert_int_equal(msc_graph_end_call(f->graph, call, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_op(f->graph, "loss", op, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_end_buffer(f->graph, 2, NULL), MSC_OK);
    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    for (i = 2; i-- > 0;) {
        assert_int_equal(msc_graph_unpack(f->graph, saves[i], NULL), MSC_OK);
        assert_int_equal(msc_graph_add_op(f->graph, "back", op, NULL, NULL), MSC_OK);
        assert_int_equal(msc_graph_release(f->graph, saves[i], NULL), MSC_OK);
    }
}

static void no_bytes(void **state)
{
    fixture f;

    (void)state;
    build_extreme(&f, 0, &(msc_op){0});
    assert_int_equal(msc_graph_finish(f.graph, NULL), MSC_OK);
    decide(&f, 0);
    assert_int_equal(f.summary.fits, 1);
    assert_int_equal(f.summary.peak_bytes, 0);
    assert_int_equal(count_actions(&f), 0);
    stop(&f);
}

/* Three buffers of 2^57 bytes are planned. Larger ones are either planned or refused, for either allocator. */
static void huge_sizes(void **state)
{
    static const msc_sim_kind kinds[] = {MSC_SIM_HOST, MSC_SIM_CUDA};
    unsigned shift;
    size_t k;

    (void)state;
    for (shift = 55; shift <= 60; shift++) {
        for (k = 0; k < 2; k++) {
            msc_error err = {0};
            msc_status status;
            fixture f;
            build_extreme(&f, ((uint64_t)1 << shift) - 1, &(msc_op){0});
            status = msc_graph_finish(f.graph, &err);
            f.options.sim = msc_sim_options_default(kinds[k]);
            f.options.budget_bytes = (uint64_t)1 << shift;
            if (status == MSC_OK)
                status = msc_decide(f.ctx, f.graph, &f.options, &f.plan, &err);
            if (status == MSC_OK)
                assert_true(msc_plan_get_summary(f.plan)->plain_peak_bytes >=
                            3 * (((uint64_t)1 << shift) - 1));
            else
                assert_true(status == MSC_EOVERFLOW && err.message[0] != '\0');
            assert_true(shift > 57 || status == MSC_OK);
            stop(&f);
        }
    }
}

/* Times stay positive and in order, whatever the operations claim. */
static void endless_operations(void **state)
{
    const msc_op endless = {.flops = UINT64_MAX, .moved_bytes = UINT64_MAX};
    fixture f;
    uint64_t budget;

    (void)state;
    build_extreme(&f, 1000, &endless);
    assert_int_equal(msc_graph_finish(f.graph, NULL), MSC_OK);
    f.options.rates.flops_per_us[0] = 1;
    f.options.rates.moved_bytes_per_us[0] = 1;
    f.options.rates.launch_ns = INT64_MAX;
    f.options.rates.recompute_ns = INT64_MAX;
    f.options.rates.intercept_ns = INT64_MAX;
    for (budget = 0; budget <= 3000; budget += 500) {
        decide(&f, budget);
        assert_true(f.summary.step_ns < INT64_MAX / 2);
    }
    stop(&f);
    build_extreme(&f, 1000, &(msc_op){0});
    assert_int_equal(msc_graph_finish(f.graph, NULL), MSC_OK);
    f.options.rates.flops_per_us[0] = UINT64_MAX;
    f.options.rates.moved_bytes_per_us[0] = UINT64_MAX;
    f.options.rates.launch_ns = 1;
    f.options.rates.recompute_ns = 1;
    f.options.rates.intercept_ns = 1;
    decide(&f, 0);
    stop(&f);
}

/* ---- many things ----------------------------------------------------------------------------------- */

/* The second of two, far below the plain peak, is a real plan. */
static void check_large(fixture *f, uint32_t percent)
{
    decide(f, UINT64_MAX);
    assert_int_equal(count_actions(f), 0);
    decide(f, f->summary.plain_peak_bytes / 100 * percent);
    assert_int_equal(f->summary.fits, 1);
    assert_true(count_actions(f) > 100);
    stop(f);
}

static void many_layers(void **state)
{
    fixture f;

    (void)state;
    start(&f);
    load(&f, synth_sequence(f.ctx, 10000, SYNTH_UNEQUAL));
    check_large(&f, 60);
}

/* Fewer operations than candidates have pairs: each module lies inside all those before it. */
static void deep_nesting(void **state)
{
    fixture f;

    (void)state;
    start(&f);
    load(&f, synth_deep(f.ctx, 1000));
    decide(&f, UINT64_MAX);
    assert_int_equal(f.summary.fits, 1);
    decide(&f, 1);
    assert_int_equal(f.summary.fits, 0);
    stop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"odd/no-backward", no_backward, NULL, NULL, NULL},
        {"odd/one-layer", one_layer, NULL, NULL, NULL},
        {"odd/no-operations", no_operations, NULL, NULL, NULL},
        {"odd/one-huge-operation", one_huge_operation, NULL, NULL, NULL},
        {"odd/budget-below-the-weights", below_weights, NULL, NULL, NULL},
        {"odd/all-modules-refused", all_refused, NULL, NULL, NULL},
        {"odd/saved-outside-modules", saved_outside, NULL, NULL, NULL},
        {"odd/no-bytes", no_bytes, NULL, NULL, NULL},
        {"odd/huge-sizes", huge_sizes, NULL, NULL, NULL},
        {"odd/endless-operations", endless_operations, NULL, NULL, NULL},
        {"odd/10000-layers", many_layers, NULL, NULL, NULL},
        {"odd/deep-nesting", deep_nesting, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
