/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Canonical text of a plan: golden, read back byte for byte, hostile text refused with the line.
 */
#include "plan_fixture.h"

#define MOST_REQUESTS 100u
#define MOST_TEXT_BYTES 4096u

#define TEXT_HEAD                                                                                            \
    "memscale-plan 1\n"                                                                                      \
    "graph 0123456789abcdef\n"                                                                               \
    "budget 8000\n"                                                                                          \
    "plain 10000 500000\n"                                                                                   \
    "planned 7000 570000\n"                                                                                  \
    "smallest 6000\n"                                                                                        \
    "bound 1234\n"                                                                                           \
    "peak 17 1\n"                                                                                            \
    "fits 1\n"

static const char plan_text[] = TEXT_HEAD "choices 2\n"
                                          "choice 2 checkpoint chosen 1 4096 70000\n"
                                          "choice 5 keep not-needed 1 4096 70000\n"
                                          "end\n";

static void build(plan_fixture *f)
{
    msc_plan_summary summary = some_summary();
    msc_choice choice = checkpoint_of(2);

    assert_int_equal(msc_plan_set_summary(f->plan, &summary, &f->err), MSC_OK);
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_OK);
    choice.module = 5;
    choice.action = MSC_ACTION_KEEP;
    choice.rule = MSC_RULE_NOT_NEEDED;
    assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_OK);
}

static uint64_t fnv1a(const char *text)
{
    uint64_t digest = 14695981039346656037u;

    for (; *text != '\0'; text++)
        digest = (digest ^ (unsigned char)*text) * 1099511628211u;
    return digest;
}

static void assert_refused(plan_fixture *f, const char *text, msc_status status, const char *message)
{
    msc_plan *plan = f->plan;

    memset(&f->err, 0, sizeof f->err);
    assert_int_equal(msc_plan_parse(f->ctx, text, strlen(text), &plan, &f->err), status);
    assert_null(plan);
    assert_int_equal(f->err.status, status);
    assert_string_equal(f->err.message, message);
}

static void test_format(void **state)
{
    plan_fixture *f = *state;
    char text[MOST_TEXT_BYTES];
    size_t needed = 0;

    build(f);
    assert_int_equal(msc_plan_format(f->plan, text, sizeof text, &needed, &f->err), MSC_OK);
    assert_string_equal(text, plan_text);
    assert_int_equal(needed, strlen(plan_text));
    assert_int_equal(msc_plan_digest(f->plan), fnv1a(plan_text));
    assert_int_equal(msc_plan_format(f->plan, NULL, 1, &needed, &f->err), MSC_EINVAL);
    assert_int_equal(msc_plan_format(f->plan, text, 4, NULL, &f->err), MSC_OK);
    assert_string_equal(text, "mem");
}

static void test_parse(void **state)
{
    plan_fixture *f = *state;
    char text[MOST_TEXT_BYTES];
    msc_plan *plan = NULL;
    const msc_plan_summary *summary;

    assert_int_equal(msc_plan_parse(f->ctx, plan_text, strlen(plan_text), &plan, &f->err), MSC_OK);
    assert_int_equal(msc_plan_format(plan, text, sizeof text, NULL, &f->err), MSC_OK);
    assert_string_equal(text, plan_text);
    summary = msc_plan_get_summary(plan);
    assert_int_equal(summary->budget_bytes, 8000);
    assert_int_equal(summary->plain_step_ns, 500000);
    assert_int_equal(summary->step_ns, 570000);
    assert_int_equal(summary->peak_in_recompute, 1);
    assert_int_equal(msc_plan_action(plan, 2), MSC_ACTION_CHECKPOINT);
    assert_int_equal(msc_plan_action(plan, 5), MSC_ACTION_KEEP);
    assert_int_equal(msc_plan_choices(plan)[1].rule, MSC_RULE_NOT_NEEDED);
    msc_plan_destroy(plan);
}

/* Every word of every enumeration survives a round trip, and so do the largest numbers. */
static void test_every_rule_and_extremes(void **state)
{
    plan_fixture *f = *state;
    msc_plan_summary summary = {.budget_bytes = UINT64_MAX,
                                .plain_step_ns = INT64_MAX,
                                .time_bound_ppm = UINT32_MAX,
                                .peak_op = UINT32_MAX,
                                .graph_digest = UINT64_MAX};
    msc_plan *plan = NULL;
    char text[MOST_TEXT_BYTES];
    uint32_t i;

    assert_int_equal(msc_plan_set_summary(f->plan, &summary, &f->err), MSC_OK);
    for (i = 0; i < MSC_RULE_COUNT; i++) {
        msc_choice choice = {.module = i,
                             .action = (uint8_t)(i % MSC_ACTION_COUNT),
                             .rule = (uint8_t)i,
                             .call_count = UINT16_MAX,
                             .saved_bytes = UINT64_MAX,
                             .cost_ns = INT64_MAX};
        assert_int_equal(msc_plan_add(f->plan, &choice, &f->err), MSC_OK);
    }
    assert_int_equal(msc_plan_format(f->plan, text, sizeof text, NULL, &f->err), MSC_OK);
    assert_int_equal(msc_plan_parse(f->ctx, text, strlen(text), &plan, &f->err), MSC_OK);
    assert_int_equal(msc_plan_digest(plan), msc_plan_digest(f->plan));
    msc_plan_destroy(plan);
}

static void test_empty_plan(void **state)
{
    plan_fixture *f = *state;
    msc_plan *plan = NULL;
    char text[MOST_TEXT_BYTES];

    assert_int_equal(msc_plan_format(f->plan, text, sizeof text, NULL, &f->err), MSC_OK);
    assert_int_equal(msc_plan_parse(f->ctx, text, strlen(text), &plan, &f->err), MSC_OK);
    assert_int_equal(msc_plan_choice_count(plan), 0);
    assert_int_equal(msc_plan_digest(plan), msc_plan_digest(f->plan));
    msc_plan_destroy(plan);
}

static void test_every_truncation_is_refused(void **state)
{
    plan_fixture *f = *state;
    size_t length;

    for (length = 0; length < strlen(plan_text); length++) {
        msc_plan *plan = f->plan;
        char *copy = malloc(length == 0 ? 1 : length);
        assert_non_null(copy);
        memcpy(copy, plan_text, length);
        assert_int_equal(msc_plan_parse(f->ctx, copy, length, &plan, &f->err), MSC_EFORMAT);
        assert_null(plan);
        free(copy);
    }
}

static void test_every_changed_byte(void **state)
{
    static const char bytes[] = {' ', '\n', '0', '9', '-', 'x', '\0'};
    plan_fixture *f = *state;
    char text[sizeof plan_text];
    char again[MOST_TEXT_BYTES];
    uint32_t accepted = 0;
    size_t i;
    size_t k;

    for (i = 0; i < strlen(plan_text); i++) {
        for (k = 0; k < sizeof bytes; k++) {
            msc_plan *plan = NULL;
            memcpy(text, plan_text, sizeof text);
            text[i] = bytes[k];
            if (msc_plan_parse(f->ctx, text, strlen(plan_text), &plan, &f->err) != MSC_OK)
                continue;
            assert_int_equal(msc_plan_format(plan, again, sizeof again, NULL, &f->err), MSC_OK);
            assert_memory_equal(again, text, sizeof text);
            msc_plan_destroy(plan);
            accepted++;
        }
    }
    assert_in_range(accepted, 50, 1000);
}

static void test_bad_lines(void **state)
{
    plan_fixture *f = *state;

    assert_refused(f, "memscale-graph 1\n", MSC_EFORMAT, "plan, line 1: an unexpected word");
    assert_refused(f, "memscale-plan 7\n", MSC_EVERSION, "plan, line 1: a version other than 1");
    assert_refused(f, "memscale-plan 1\ngraph 0123456789ABCDEF\n", MSC_EFORMAT,
                   "plan, line 2: not 16 hexadecimal digits");
    assert_refused(f, TEXT_HEAD "choices 1\nchoice 2 explode chosen 1 1 1\nend\n", MSC_EFORMAT,
                   "plan, line 11: an unknown action");
    assert_refused(f, TEXT_HEAD "choices 1\nchoice 2 keep whim 1 1 1\nend\n", MSC_EFORMAT,
                   "plan, line 11: an unknown rule");
    assert_refused(f, TEXT_HEAD "choices 1\nchoice 2 keep chosen 65536 1 1\nend\n", MSC_EFORMAT,
                   "plan, line 11: a number out of range");
    assert_refused(f, TEXT_HEAD "choices 1\nchoice 2 keep chosen 1 1 -1\nend\n", MSC_EFORMAT,
                   "plan, line 11: not a decimal number");
    assert_refused(f, TEXT_HEAD "choices 1\nchoice 2 keep chosen 1 1 9223372036854775808\nend\n", MSC_EFORMAT,
                   "plan, line 11: a number out of range");
    assert_refused(f, TEXT_HEAD "choices 2\nchoice 2 keep chosen 1 1 1\nchoice 2 keep chosen 1 1 1\nend\n",
                   MSC_EFORMAT, "plan, line 12: module 2 cannot follow module 2: ids must rise");
    assert_refused(f, TEXT_HEAD "choices 4294967294\nend\n", MSC_EFORMAT,
                   "plan, line 11: an unexpected word");
    assert_refused(f, TEXT_HEAD "choices 0\nend\nend\n", MSC_EFORMAT, "plan, line 12: text after the end");
}

static void test_arguments(void **state)
{
    plan_fixture *f = *state;
    msc_plan *plan = f->plan;

    assert_int_equal(msc_plan_parse(f->ctx, "", 0, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_plan_parse(f->ctx, NULL, 0, &plan, &f->err), MSC_EINVAL);
    assert_null(plan);
}

static void test_parse_without_memory(void **state)
{
    plan_fixture *f = *state;
    uint64_t held = msc_context_held_bytes(f->ctx);
    msc_status status = MSC_ENOMEM;
    uint64_t request;

    for (request = 0; request < MOST_REQUESTS && status != MSC_OK; request++) {
        msc_plan *plan = f->plan;
        f->heap.fail_at = f->heap.request_count + request;
        status = msc_plan_parse(f->ctx, plan_text, strlen(plan_text), &plan, &f->err);
        if (status != MSC_OK) {
            assert_int_equal(status, MSC_ENOMEM);
            assert_int_equal(f->err.status, MSC_ENOMEM);
            assert_null(plan);
        }
        msc_plan_destroy(plan);
        assert_int_equal(msc_context_held_bytes(f->ctx), held);
    }
    assert_int_equal(status, MSC_OK);
    assert_in_range(request, 3, MOST_REQUESTS - 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        PLAN_CASE("format/golden", test_format),
        PLAN_CASE("parse/round-trip", test_parse),
        PLAN_CASE("parse/every-rule-and-extremes", test_every_rule_and_extremes),
        PLAN_CASE("parse/empty-plan", test_empty_plan),
        PLAN_CASE("parse/every-truncation", test_every_truncation_is_refused),
        PLAN_CASE("parse/every-changed-byte", test_every_changed_byte),
        PLAN_CASE("parse/bad-lines", test_bad_lines),
        PLAN_CASE("arguments", test_arguments),
        PLAN_CASE("memory/parse", test_parse_without_memory),
    };
    return cmocka_run_group_tests_name("plan_io", tests, NULL, NULL);
}
