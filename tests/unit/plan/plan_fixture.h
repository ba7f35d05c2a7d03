/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file plan_fixture.h
 * What the plan's tests share: a context that keeps the books, and a small plan.
 */
#ifndef MSC_TEST_PLAN_FIXTURE_H
#define MSC_TEST_PLAN_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdbool.h>
#include <string.h>

#include "memscale/plan.h"
#include "oom/failing_alloc.h"

typedef struct plan_fixture {
    failing_alloc heap;
    msc_context *ctx;
    msc_plan *plan; /**< empty after setup */
    msc_error err;
} plan_fixture;

static inline void plan_fixture_open(plan_fixture *f)
{
    memset(f, 0, sizeof *f);
    failing_alloc_init(&f->heap, FAILING_ALLOC_NEVER);
    f->ctx = failing_alloc_context(&f->heap);
    assert_non_null(f->ctx);
    assert_int_equal(msc_plan_create(f->ctx, &f->plan, &f->err), MSC_OK);
}

/** Ends everything and requires that no byte is left. */
static inline void plan_fixture_close(plan_fixture *f)
{
    msc_plan_destroy(f->plan);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
    assert_true(failing_alloc_is_clean(&f->heap));
}

static inline int plan_fixture_setup(void **state)
{
    static plan_fixture fixture;

    plan_fixture_open(&fixture);
    *state = &fixture;
    return 0;
}

static inline int plan_fixture_teardown(void **state)
{
    plan_fixture_close(*state);
    return 0;
}

static inline msc_choice checkpoint_of(uint32_t module)
{
    return (msc_choice){.module = module,
                        .action = MSC_ACTION_CHECKPOINT,
                        .rule = MSC_RULE_CHOSEN,
                        .call_count = 1,
                        .saved_bytes = 4096,
                        .cost_ns = 70000,
                        .other_peak_bytes = 9000,
                        .other_step_ns = 500001};
}

static inline msc_choice selective_of(uint32_t module)
{
    msc_choice choice = checkpoint_of(module);

    choice.action = MSC_ACTION_SELECTIVE;
    return choice;
}

static inline msc_choice offload_of(uint32_t module)
{
    msc_choice choice = checkpoint_of(module);

    choice.action = MSC_ACTION_OFFLOAD;
    choice.moved_bytes = 3000;
    choice.moved_count = 2;
    choice.transfer_ns = 500;
    choice.ahead_bytes = 4096;
    return choice;
}

/** Adds a choice that must be accepted. */
static inline void add_choice(plan_fixture *f, msc_choice choice)
{
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_OK);
}

/** Lets the choice that was added last keep an operation. */
static inline void keep_op(plan_fixture *f, uint32_t offset)
{
    assert_int_equal(msc_plan_keep(f->plan, offset, &f->err), MSC_OK);
}

/** Lets the choice that was added last move a tensor. */
static inline void move_tensor(plan_fixture *f, uint32_t ordinal)
{
    assert_int_equal(msc_plan_move(f->plan, ordinal, &f->err), MSC_OK);
}

static inline msc_plan_summary some_summary(void)
{
    return (msc_plan_summary){.budget_bytes = 8000,
                              .plain_peak_bytes = 10000,
                              .peak_bytes = 7000,
                              .smallest_peak_bytes = 6000,
                              .plain_step_ns = 500000,
                              .step_ns = 570000,
                              .time_bound_ppm = 1234,
                              .peak_op = 17,
                              .peak_in_recompute = 1,
                              .fits = 1,
                              .graph_digest = 0x0123456789abcdef,
                              .window_out_bytes = 4096,
                              .window_in_bytes = 8192,
                              .away_peak_bytes = 65536};
}

/** A test case with a fresh fixture. */
#define PLAN_CASE(name, function)                                                                            \
    {                                                                                                        \
        name, function, plan_fixture_setup, plan_fixture_teardown, NULL                                      \
    }

#endif /* MSC_TEST_PLAN_FIXTURE_H */
