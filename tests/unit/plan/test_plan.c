/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan as a list of choices: order, lookup, kept operations, summary, words.
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

static void assert_choice_refused(plan_fixture *f, msc_choice choice, const char *message)
{
    uint32_t count = msc_plan_choice_count(f->plan);

    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_EINVAL);
    assert_string_equal(f->err.message, message);
    assert_int_equal(msc_plan_choice_count(f->plan), count);
}

static void test_bad_choices(void **state)
{
    plan_fixture *f = *state;
    msc_choice choice = checkpoint_of(MSC_NONE);

    assert_int_equal(msc_plan_add(f->plan, NULL, &f->err), MSC_EINVAL);
    assert_choice_refused(f, choice, "cannot add a choice: it names no module");
    choice = checkpoint_of(0);
    choice.action = MSC_ACTION_COUNT;
    assert_choice_refused(f, choice, "module 0: there is no action 4");
    choice = checkpoint_of(0);
    choice.rule = 200;
    assert_choice_refused(f, choice, "module 0: there is no rule 200");
    choice = checkpoint_of(0);
    choice.cost_ns = -1;
    assert_choice_refused(f, choice, "module 0: its cost is negative");
    choice = checkpoint_of(0);
    choice.other_step_ns = -1;
    assert_choice_refused(f, choice, "module 0: the step time the other way round is negative");
    choice = checkpoint_of(7);
    choice.pad[sizeof choice.pad - 1] = 1;
    assert_choice_refused(f, choice, "module 7: the pad is not zero");
}

static void test_joined(void **state)
{
    plan_fixture *f = *state;
    msc_choice choice = checkpoint_of(2);

    choice.joined = 2;
    assert_choice_refused(f, choice, "module 2: joined is neither 0 nor 1");
    choice.joined = 1;
    choice.action = MSC_ACTION_KEEP;
    assert_choice_refused(f, choice, "module 2: only a checkpoint can be joined, not the action keep");
    choice.action = MSC_ACTION_SELECTIVE;
    assert_choice_refused(f, choice, "module 2: only a checkpoint can be joined, not the action selective");
    add_choice(f, checkpoint_of(1));
    choice.action = MSC_ACTION_CHECKPOINT;
    add_choice(f, choice);
    assert_int_equal(msc_plan_choices(f->plan)[0].joined, 0);
    assert_int_equal(msc_plan_choices(f->plan)[1].joined, 1);
    assert_int_equal(msc_plan_action(f->plan, 2), MSC_ACTION_CHECKPOINT);
}

static void assert_kept(const msc_plan *plan, uint32_t choice, const uint32_t *offsets, uint32_t count)
{
    uint32_t found = MSC_NONE;
    const uint32_t *kept = msc_plan_kept(plan, choice, &found);

    assert_int_equal(found, count);
    if (count == 0)
        assert_null(kept);
    else
        assert_memory_equal(kept, offsets, count * sizeof *offsets);
}

/* Choices with and without kept operations alternate; each must know its own. */
static void test_kept_operations(void **state)
{
    static const uint32_t first[] = {0, 7};
    static const uint32_t second[] = {3, 4, MSC_NONE - 1};
    plan_fixture *f = *state;
    size_t i;

    assert_kept(f->plan, 0, NULL, 0);
    add_choice(f, checkpoint_of(1));
    add_choice(f, selective_of(2));
    for (i = 0; i < sizeof first / sizeof *first; i++)
        keep_op(f, first[i]);
    add_choice(f, checkpoint_of(3));
    add_choice(f, selective_of(4));
    add_choice(f, selective_of(6));
    for (i = 0; i < sizeof second / sizeof *second; i++)
        keep_op(f, second[i]);
    assert_kept(f->plan, 0, NULL, 0);
    assert_kept(f->plan, 1, first, 2);
    assert_kept(f->plan, 2, NULL, 0);
    assert_kept(f->plan, 3, NULL, 0);
    assert_kept(f->plan, 4, second, 3);
    assert_kept(f->plan, 5, NULL, 0);
    assert_kept(f->plan, MSC_NONE, NULL, 0);
}

static void assert_keep_refused(plan_fixture *f, uint32_t offset, const char *message)
{
    assert_int_equal(msc_plan_keep(f->plan, offset, &f->err), MSC_EINVAL);
    assert_string_equal(f->err.message, message);
}

static void test_bad_kept_operations(void **state)
{
    static const uint32_t kept[] = {5, 6};
    plan_fixture *f = *state;

    assert_keep_refused(f, 1, "cannot keep operation 1: the plan has no choice yet");
    add_choice(f, checkpoint_of(1));
    assert_keep_refused(f, 1, "module 1: the action checkpoint keeps no operation");
    add_choice(f, selective_of(2));
    assert_keep_refused(f, MSC_NONE, "module 2: no operation is named");
    keep_op(f, 5);
    assert_keep_refused(f, 5, "module 2: kept operation 5 cannot follow 5: offsets must rise");
    assert_keep_refused(f, 0, "module 2: kept operation 0 cannot follow 5: offsets must rise");
    keep_op(f, 6);
    assert_kept(f->plan, 1, kept, 2);
    add_choice(f, selective_of(3));
    keep_op(f, 0);
}

static void assert_move_refused(plan_fixture *f, uint32_t ordinal, const char *message)
{
    assert_int_equal(msc_plan_move(f->plan, ordinal, &f->err), MSC_EINVAL);
    assert_string_equal(f->err.message, message);
}

static void test_moved(void **state)
{
    plan_fixture *f = *state;
    msc_choice choice = checkpoint_of(1);
    const uint32_t *moved;
    uint32_t count = 7;

    assert_move_refused(f, 0, "cannot move tensor 0: the plan has no choice yet");
    add_choice(f, choice);
    assert_move_refused(f, 0, "module 1: the action checkpoint moves nothing");
    add_choice(f, offload_of(2));
    move_tensor(f, 3);
    assert_move_refused(f, 3, "module 2: moved tensor 3 cannot follow 3: ordinals must rise");
    assert_move_refused(f, MSC_NONE, "module 2: no tensor is named");
    move_tensor(f, 9);
    choice = selective_of(4);
    choice.boundary = 1;
    add_choice(f, choice);
    keep_op(f, 5);
    move_tensor(f, 0);
    moved = msc_plan_moved(f->plan, 1, &count);
    assert_int_equal(count, 2);
    assert_int_equal(moved[1], 9);
    assert_int_equal(*msc_plan_moved(f->plan, 2, &count), 0);
    assert_int_equal(*msc_plan_kept(f->plan, 2, &count), 5);
    assert_null(msc_plan_moved(f->plan, 0, &count));
    assert_int_equal(count, 0);
    assert_null(msc_plan_moved(f->plan, 3, &count));
}

static void test_bad_moves(void **state)
{
    plan_fixture *f = *state;
    msc_choice choice = offload_of(0);

    choice.boundary = 1;
    assert_choice_refused(f, choice, "module 0: the action offload has no boundary");
    choice.boundary = 2;
    assert_choice_refused(f, choice, "module 0: boundary is neither 0 nor 1");
    choice = offload_of(0);
    choice.transfer_ns = -1;
    assert_choice_refused(f, choice, "module 0: the time of its transfers is negative");
    choice.transfer_ns = 0;
    choice.joined = 1;
    assert_choice_refused(f, choice, "module 0: only a checkpoint can be joined, not the action offload");
    choice = checkpoint_of(0);
    choice.boundary = 1;
    choice.joined = 1;
    assert_choice_refused(f, choice, "module 0: only the first choice of a region has its boundary");
    choice = checkpoint_of(0);
    choice.moved_count = 1;
    assert_choice_refused(f, choice, "module 0: bytes are moved, but nothing is offloaded");
    choice = checkpoint_of(0);
    choice.ahead_bytes = 1;
    assert_choice_refused(f, choice, "module 0: bytes are moved, but nothing is offloaded");
}

static void test_what_may_come_back_early(void **state)
{
    plan_fixture *f = *state;

    add_choice(f, checkpoint_of(0));
    add_choice(f, offload_of(3));
    assert_int_equal(msc_plan_set_ahead(f->plan, 1, 77, &f->err), MSC_OK);
    assert_int_equal(msc_plan_choices(f->plan)[1].ahead_bytes, 77);
    assert_int_equal(msc_plan_set_ahead(f->plan, 0, 77, &f->err), MSC_EINVAL);
    assert_string_equal(f->err.message, "module 0: nothing comes back early, since nothing is offloaded");
    assert_int_equal(msc_plan_set_ahead(f->plan, 2, 77, &f->err), MSC_EINVAL);
    assert_string_equal(f->err.message, "there is no choice 2, only 2");
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
    for (module = 0; module < 102; module++) {
        bool known = module % 3 == 1 && module < 100;
        assert_int_equal(msc_plan_action(f->plan, module), known ? MSC_ACTION_CHECKPOINT : MSC_ACTION_KEEP);
        assert_int_equal(msc_plan_find(f->plan, module), known ? module / 3 : MSC_NONE);
    }
    assert_int_equal(msc_plan_action(f->plan, MSC_NONE), MSC_ACTION_KEEP);
    assert_int_equal(msc_plan_find(f->plan, MSC_NONE), MSC_NONE);
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
    assert_string_equal(msc_action_name(MSC_ACTION_SELECTIVE), "selective");
    assert_string_equal(msc_action_name(MSC_ACTION_OFFLOAD), "offload");
    assert_string_equal(msc_action_name(MSC_ACTION_COUNT), "unknown");
    assert_string_equal(msc_rule_key(MSC_RULE_NOT_NEEDED), "not-needed");
    assert_string_equal(msc_rule_key((msc_rule)-1), "unknown");
    assert_string_equal(msc_rule_text(MSC_RULE_EXCLUDED), "excluded by configuration");
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
    add_choice(f, selective_of(2));
    f->heap.fail_at = f->heap.request_count;
    assert_int_equal(msc_plan_keep(f->plan, 3, &f->err), MSC_ENOMEM);
    assert_kept(f->plan, 1, NULL, 0);
    keep_op(f, 3);
}

/* Whichever request for room is refused, choices and what they keep stay in step. */
static void test_growth_without_memory(void **state)
{
    plan_fixture *f = *state;
    uint32_t added = 0;
    uint32_t refused = 0;

    while (added < 200) {
        const uint32_t offset = added;
        msc_choice choice = selective_of(added);
        f->heap.fail_at = f->heap.request_count + refused % 2;
        if (msc_plan_add(f->plan, &choice, &f->err) != MSC_OK) {
            assert_int_equal(f->err.status, MSC_ENOMEM);
            assert_int_equal(msc_plan_choice_count(f->plan), added);
            refused++;
            f->heap.fail_at = FAILING_ALLOC_NEVER;
            add_choice(f, choice);
        }
        f->heap.fail_at = FAILING_ALLOC_NEVER;
        keep_op(f, offset);
        assert_kept(f->plan, added++, &offset, 1);
    }
    assert_in_range(refused, 3, 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        PLAN_CASE("choice/order", test_choices_in_order),
        PLAN_CASE("choice/refused", test_bad_choices),
        PLAN_CASE("choice/joined", test_joined),
        PLAN_CASE("choice/kept", test_kept_choice),
        PLAN_CASE("kept/ranges", test_kept_operations),
        PLAN_CASE("kept/refused", test_bad_kept_operations),
        PLAN_CASE("moved/lists", test_moved),
        PLAN_CASE("moved/refused", test_bad_moves),
        PLAN_CASE("moves/early", test_what_may_come_back_early),
        PLAN_CASE("action/lookup", test_action_lookup),
        PLAN_CASE("summary", test_summary),
        PLAN_CASE("words", test_words),
        PLAN_CASE("create/arguments", test_create_arguments),
        PLAN_CASE("memory/refused", test_without_memory),
        PLAN_CASE("memory/growth", test_growth_without_memory),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
