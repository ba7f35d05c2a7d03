/* SPDX-License-Identifier: Apache-2.0 */
/* Which modules may be checkpointed, and the reasons why others may not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "memscale/memscale.h"
#include "synth.h"

typedef struct fixture {
    msc_context *ctx;
    msc_graph *graph;
    msc_plan *plan;
} fixture;

static void start(fixture *f, msc_graph *(*make)(msc_context *))
{
    const msc_decide_options options = msc_decide_options_default();

    assert_int_equal(msc_context_create(NULL, &f->ctx, NULL), MSC_OK);
    f->graph = make(f->ctx);
    assert_non_null(f->graph);
    assert_int_equal(msc_decide(f->ctx, f->graph, &options, &f->plan, NULL), MSC_OK);
}

static void stop(fixture *f)
{
    msc_plan_destroy(f->plan);
    msc_graph_destroy(f->graph);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
}

/* Choice of the module at a path, or NULL. */
static const msc_choice *choice_of(const fixture *f, const char *path)
{
    const msc_module *modules = msc_graph_modules(f->graph);
    const msc_choice *choices = msc_plan_choices(f->plan);
    uint32_t i;

    for (i = 0; i < msc_plan_choice_count(f->plan); i++)
        if (strcmp(msc_graph_string(f->graph, modules[choices[i].module].path), path) == 0)
            return &choices[i];
    return NULL;
}

static void check_rule(const fixture *f, const char *path, msc_rule rule)
{
    const msc_choice *choice = choice_of(f, path);

    assert_non_null(choice);
    assert_string_equal(msc_rule_key((msc_rule)choice->rule), msc_rule_key(rule));
}

static void reasons(void **state)
{
    fixture f;

    (void)state;
    start(&f, synth_barred);
    check_rule(&f, "free", MSC_RULE_NOT_NEEDED);
    check_rule(&f, "python_state", MSC_RULE_PYTHON_STATE);
    check_rule(&f, "not_tensors", MSC_RULE_NOT_TENSORS);
    check_rule(&f, "no_forward", MSC_RULE_NO_FORWARD);
    check_rule(&f, "excluded", MSC_RULE_EXCLUDED);
    check_rule(&f, "hooked", MSC_RULE_HOOKED);
    check_rule(&f, "no_room", MSC_RULE_NO_ROOM);
    check_rule(&f, "buffer_changed", MSC_RULE_INPUT_CHANGED);
    check_rule(&f, "parent_of_excluded", MSC_RULE_HOLDS_EXCLUDED);
    check_rule(&f, "writes_outside", MSC_RULE_WRITES_OUTSIDE);
    check_rule(&f, "writes_buffer", MSC_RULE_NOT_NEEDED);
    check_rule(&f, "input_changed", MSC_RULE_INPUT_CHANGED);
    check_rule(&f, "last", MSC_RULE_NOT_NEEDED);
    stop(&f);
}

/* What the caller forbids, and which of that speaks against the module around. */
static void left_out(void **state)
{
    fixture f;

    (void)state;
    start(&f, synth_left_out);
    check_rule(&f, "parent_of_excluded", MSC_RULE_HOLDS_EXCLUDED);
    check_rule(&f, "parent_of_excluded.excluded", MSC_RULE_EXCLUDED);
    check_rule(&f, "parent_of_left_out", MSC_RULE_NOT_NEEDED);
    check_rule(&f, "parent_of_left_out.left_out", MSC_RULE_EXCLUDED);
    check_rule(&f, "parent_of_differed", MSC_RULE_DIFFERED);
    check_rule(&f, "parent_of_differed.differed", MSC_RULE_DIFFERED);
    check_rule(&f, "parent_of_scripted", MSC_RULE_SCRIPTED);
    check_rule(&f, "parent_of_scripted.scripted", MSC_RULE_SCRIPTED);
    stop(&f);
}

static void nothing_to_save(void **state)
{
    fixture f;

    (void)state;
    start(&f, synth_nothing);
    check_rule(&f, "linear0", MSC_RULE_NO_SAVING);
    check_rule(&f, "unused", MSC_RULE_NO_BACKWARD);
    assert_int_equal(msc_plan_get_summary(f.plan)->smallest_peak_bytes,
                     msc_plan_get_summary(f.plan)->plain_peak_bytes);
    stop(&f);
}

static void shared(void **state)
{
    fixture f;
    const msc_choice *choice;

    (void)state;
    start(&f, synth_shared);
    choice = choice_of(&f, "left.shared");
    assert_non_null(choice);
    assert_int_equal(choice->call_count, 2);
    assert_int_equal(choice->rule, MSC_RULE_NOT_NEEDED);
    assert_true(choice->saved_bytes > 0);
    assert_true(choice->cost_ns > choice_of(&f, "left")->cost_ns / 2);
    stop(&f);
}

static msc_graph *small_transformer(msc_context *ctx)
{
    return synth_transformer(ctx, 2);
}

static void root_and_containers(void **state)
{
    fixture f;

    (void)state;
    start(&f, small_transformer);
    check_rule(&f, "", MSC_RULE_ROOT);
    assert_null(choice_of(&f, "blocks")); /* a list, never called */
    check_rule(&f, "blocks.0", MSC_RULE_NOT_NEEDED);
    check_rule(&f, "blocks.1.mlp", MSC_RULE_NOT_NEEDED);
    check_rule(&f, "blocks.1.mlp.up", MSC_RULE_NO_SAVING); /* saves its input and weight only */
    stop(&f);
}

/* Saved bytes of a block: what it alone takes off between forward and backward. */
static void saved_bytes(void **state)
{
    fixture f;
    const msc_choice *block;
    const msc_choice *mlp;

    (void)state;
    start(&f, small_transformer);
    block = choice_of(&f, "blocks.0");
    mlp = choice_of(&f, "blocks.0.mlp");
    /* up's output saved by gelu 4 MiB, gelu's by down 4 MiB, a quarter of norm2's extra 1 is the norm's own.
     */
    assert_int_equal(mlp->saved_bytes, (8 << 20) + ((1 << 18) + 1));
    assert_true(block->saved_bytes > 2 * mlp->saved_bytes);
    assert_true(block->cost_ns > mlp->cost_ns);
    stop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"candidates/reasons", reasons, NULL, NULL, NULL},
        {"candidates/left-out", left_out, NULL, NULL, NULL},
        {"candidates/nothing-to-save", nothing_to_save, NULL, NULL, NULL},
        {"candidates/shared-module", shared, NULL, NULL, NULL},
        {"candidates/root-and-containers", root_and_containers, NULL, NULL, NULL},
        {"candidates/saved-bytes", saved_bytes, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
