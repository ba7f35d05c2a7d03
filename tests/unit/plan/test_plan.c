/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan as a list of choices: order, lookup, summary, words.
 */
#include "plan_fixture.h"

static void test_choices_in_order(void **state)
{
    plan_fixture *f = *state;
    msc_choice choice = checkpoint_of(4);

    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_OK);
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_EINVAL);
    choice.module = 3;
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_EINVAL);
    assert_string_equal(f->err.message, "module 3 cannot follow module 4: ids must rise");
    choice.module = 9;
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_OK);
    assert_int_equal(msc_plan_choice_count(f->plan), 2);
    assert_int_equal(msc_plan_choices(f->plan)[0].module, 4);
    assert_int_equal(msc_plan_choices(f->plan)[1].module, 9);
    assert_int_equal(msc_plan_choices(f->plan)[1].saved_bytes, 4096);
}

static void test_bad_choices(void **state)
{
    plan_fixture *f = *state;
    msc_choice choice = checkpoint_of(MSC_NONE);

    assert_int_equal(msc_plan_add(f->plan, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_EINVAL);
    choice = checkpoint_of(0);
    choice.action = MSC_ACTION_COUNT;
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_EINVAL);
    choice = checkpoint_of(0);
    choice.rule = MSC_RULE_COUNT;
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_EINVAL);
    choice = checkpoint_of(0);
    choice.cost_ns = -1;
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_EINVAL);
    assert_int_equal(msc_plan_choice_count(f->plan), 0);
}

static void test_action_lookup(void **state)
{
    plan_fixture *f = *state;
    uint32_t module;

    assert_int_equal(msc_plan_action(f->plan, 0), MSC_ACTION_KEEP);
    for (module = 1; module < 100; module += 3) {
        msc_choice choice = checkpoint_of(module);
        assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_OK);
    }
    for (module = 0; module < 102; module++)
        assert_int_equal(msc_plan_action(f->plan, module),
                         module % 3 == 1 && module < 100 ? MSC_ACTION_CHECKPOINT : MSC_ACTION_KEEP);
    assert_int_equal(msc_plan_action(f->plan, MSC_NONE), MSC_ACTION_KEEP);
}

static void test_kept_choice(void **state)
{
    plan_fixture *f = *state;
    msc_choice choice = checkpoint_of(2);

    choice.action = MSC_ACTION_KEEP;
    choice.rule = MSC_RULE_NOT_NEEDED;
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_OK);
    assert_int_equal(msc_plan_action(f->plan, 2), MSC_ACTION_KEEP);
}

static void test_summary(void **state)
{
    plan_fixture *f = *state;
    msc_plan_summary summary = some_summary();

    summary.pad = 7;
    assert_int_equal(msc_plan_set_summary(f->plan, &summary, &f->err), MSC_OK);
    assert_int_equal(msc_plan_get_summary(f->plan)->peak_bytes, 7000);
    assert_int_equal(msc_plan_get_summary(f->plan)->pad, 0);
    assert_int_equal(msc_plan_set_summary(f->plan, NULL, &f->err), MSC_EINVAL);
    summary.fits = 2;
    assert_int_equal(msc_plan_set_summary(f->plan, &summary, &f->err), MSC_EINVAL);
    summary.fits = 1;
    summary.step_ns = -1;
    assert_int_equal(msc_plan_set_summary(f->plan, &summary, &f->err), MSC_EINVAL);
    assert_int_equal(msc_plan_get_summary(f->plan)->step_ns, 570000);
}

static void test_words(void **state)
{
    unsigned a;
    unsigned b;

    (void)state;
    assert_string_equal(msc_action_name(MSC_ACTION_CHECKPOINT), "checkpoint");
    assert_string_equal(msc_action_name(MSC_ACTION_COUNT), "unknown");
    assert_string_equal(msc_rule_key(MSC_RULE_NOT_NEEDED), "not-needed");
    assert_string_equal(msc_rule_key((msc_rule)-1), "unknown");
    assert_string_equal(msc_rule_text(MSC_RULE_EXCLUDED), "excluded by the caller");
    assert_string_equal(msc_rule_text(MSC_RULE_COUNT), "unknown rule");
    for (a = 0; a < MSC_RULE_COUNT; a++)
        for (b = 0; b < a; b++)
            assert_string_not_equal(msc_rule_key((msc_rule)a), msc_rule_key((msc_rule)b));
}

static void test_create_arguments(void **state)
{
    plan_fixture *f = *state;
    msc_plan *plan = f->plan;

    assert_int_equal(msc_plan_create(f->ctx, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_plan_create(NULL, &plan, &f->err), MSC_EINVAL);
    assert_null(plan);
    msc_plan_destroy(NULL);
}

static void test_without_memory(void **state)
{
    plan_fixture *f = *state;
    msc_plan *plan = f->plan;
    msc_choice choice = checkpoint_of(1);

    f->heap.fail_at = f->heap.request_count;
    assert_int_equal(msc_plan_create(f->ctx, &plan, &f->err), MSC_ENOMEM);
    assert_null(plan);
    f->heap.fail_at = f->heap.request_count;
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_ENOMEM);
    assert_int_equal(msc_plan_choice_count(f->plan), 0);
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_OK);
    assert_int_equal(msc_plan_choice_count(f->plan), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        PLAN_CASE("choice/order", test_choices_in_order),
        PLAN_CASE("choice/refused", test_bad_choices),
        PLAN_CASE("choice/kept", test_kept_choice),
        PLAN_CASE("action/lookup", test_action_lookup),
        PLAN_CASE("summary", test_summary),
        PLAN_CASE("words", test_words),
        PLAN_CASE("create/arguments", test_create_arguments),
        PLAN_CASE("memory/refused", test_without_memory),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
