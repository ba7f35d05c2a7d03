/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Canonical text of a plan: golden, read back byte for byte, hostile text refused with the line.
 */
#include <stdio.h>

#include "plan_fixture.h"

#define MOST_REQUESTS 100u
#define MOST_TEXT_BYTES 4096u

#define TEXT_HEAD                                                                                            \
    "memscale-plan 4\n"                                                                                      \
    "graph 0123456789abcdef\n"                                                                               \
    "budget 8000\n"                                                                                          \
    "plain 10000 500000\n"                                                                                   \
    "planned 7000 570000\n"                                                                                  \
    "smallest 6000\n"                                                                                        \
    "bound 1234\n"                                                                                           \
    "peak 17 1\n"                                                                                            \
    "fits 1\n"                                                                                               \
    "offload 4096 8192 65536\n"

static const char plan_text[] = TEXT_HEAD "choices 7\n"
                                          "choice 2 checkpoint chosen 1 4096 70000 9000 500001 0 0\n"
                                          "choice 3 checkpoint chosen 1 4096 70000 9000 500001 1 0\n"
                                          "choice 5 keep not-needed 1 4096 70000 0 0 0 0\n"
                                          "choice 6 selective chosen 1 4096 70000 9000 500001 0 0\n"
                                          "kept 3 0 4 17\n"
                                          "choice 9 selective chosen 1 4096 70000 9000 500001 0 0\n"
                                          "kept 0\n"
                                          "choice 11 offload chosen 1 4096 70000 9000 500001 0 0\n"
                                          "moved 3000 2 500 4096 3 0 1 7\n"
                                          "choice 12 selective chosen 1 4096 70000 9000 500001 0 1\n"
                                          "kept 1 2\n"
                                          "moved 1000 1 20 0 1 0\n"
                                          "end\n";

static void build(plan_fixture *f)
{
    msc_plan_summary summary = some_summary();
    msc_choice choice = checkpoint_of(2);

    assert_int_equal(msc_plan_set_summary(f->plan, &summary, &f->err), MSC_OK);
    add_choice(f, choice);
    choice.module = 3;
    choice.joined = 1;
    add_choice(f, choice);
    choice = checkpoint_of(5);
    choice.action = MSC_ACTION_KEEP;
    choice.rule = MSC_RULE_NOT_NEEDED;
    choice.other_peak_bytes = 0;
    choice.other_step_ns = 0;
    add_choice(f, choice);
    add_choice(f, selective_of(6));
    keep_op(f, 0);
    keep_op(f, 4);
    keep_op(f, 17);
    add_choice(f, selective_of(9));
    add_choice(f, offload_of(11));
    move_tensor(f, 0);
    move_tensor(f, 1);
    move_tensor(f, 7);
    choice = selective_of(12);
    choice.boundary = 1;
    choice.moved_bytes = 1000;
    choice.moved_count = 1;
    choice.transfer_ns = 20;
    add_choice(f, choice);
    keep_op(f, 2);
    move_tensor(f, 0);
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
    const uint32_t *kept;
    uint32_t count;

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
    assert_int_equal(msc_plan_choices(plan)[2].rule, MSC_RULE_NOT_NEEDED);
    assert_int_equal(msc_plan_choices(plan)[1].joined, 1);
    assert_int_equal(msc_plan_choices(plan)[1].other_peak_bytes, 9000);
    assert_int_equal(msc_plan_choices(plan)[1].other_step_ns, 500001);
    kept = msc_plan_kept(plan, 3, &count);
    assert_int_equal(count, 3);
    assert_int_equal(kept[2], 17);
    assert_null(msc_plan_kept(plan, 4, &count));
    assert_int_equal(summary->window_out_bytes, 4096);
    assert_int_equal(summary->window_in_bytes, 8192);
    assert_int_equal(summary->away_peak_bytes, 65536);
    assert_int_equal(msc_plan_action(plan, 11), MSC_ACTION_OFFLOAD);
    assert_int_equal(msc_plan_choices(plan)[5].moved_bytes, 3000);
    assert_int_equal(msc_plan_choices(plan)[5].moved_count, 2);
    assert_int_equal(msc_plan_choices(plan)[5].transfer_ns, 500);
    assert_int_equal(msc_plan_choices(plan)[5].ahead_bytes, 4096);
    kept = msc_plan_moved(plan, 5, &count);
    assert_int_equal(count, 3);
    assert_int_equal(kept[2], 7);
    assert_int_equal(msc_plan_choices(plan)[6].boundary, 1);
    assert_non_null(msc_plan_moved(plan, 6, &count));
    assert_null(msc_plan_moved(plan, 0, &count));
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
                                .graph_digest = UINT64_MAX,
                                .window_out_bytes = UINT64_MAX,
                                .window_in_bytes = UINT64_MAX,
                                .away_peak_bytes = UINT64_MAX};
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
                             .cost_ns = INT64_MAX,
                             .other_peak_bytes = UINT64_MAX,
                             .other_step_ns = INT64_MAX,
                             .joined = i % MSC_ACTION_COUNT == MSC_ACTION_CHECKPOINT};
        if (choice.action == MSC_ACTION_OFFLOAD) {
            choice.moved_bytes = UINT64_MAX;
            choice.moved_count = UINT32_MAX;
            choice.transfer_ns = INT64_MAX;
            choice.ahead_bytes = UINT64_MAX;
        }
        add_choice(f, choice);
        if (choice.action == MSC_ACTION_SELECTIVE)
            keep_op(f, MSC_NONE - 1);
        if (choice.action == MSC_ACTION_OFFLOAD)
            move_tensor(f, MSC_NONE - 1);
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

/* The line is there where there is staging, and only there. */
static void test_staging(void **state)
{
    static const char with[] = TEXT_HEAD "staging 4096\nchoices 0\nend\n";
    plan_fixture *f = *state;
    char text[MOST_TEXT_BYTES];
    msc_plan_summary summary;
    msc_plan *plan = NULL;

    assert_int_equal(msc_plan_parse(f->ctx, with, strlen(with), &plan, &f->err), MSC_OK);
    summary = *msc_plan_get_summary(plan);
    assert_int_equal(summary.staging_bytes, 4096);
    assert_int_equal(msc_plan_format(plan, text, sizeof text, NULL, &f->err), MSC_OK);
    assert_string_equal(text, with);
    assert_int_equal(msc_plan_digest(plan), fnv1a(with));
    summary.staging_bytes = 0;
    assert_int_equal(msc_plan_set_summary(plan, &summary, &f->err), MSC_OK);
    assert_int_equal(msc_plan_format(plan, text, sizeof text, NULL, &f->err), MSC_OK);
    assert_string_equal(text, TEXT_HEAD "choices 0\nend\n");
    msc_plan_destroy(plan);
    assert_refused(f, TEXT_HEAD "staging 0\nchoices 0\nend\n", MSC_EFORMAT,
                   "plan, line 12: a line that says that there is no staging");
    assert_refused(f, TEXT_HEAD "staged 1\nchoices 0\nend\n", MSC_EFORMAT,
                   "plan, line 11: an unexpected word");
    assert_refused(f, TEXT_HEAD "staging 1\nend\n", MSC_EFORMAT, "plan, line 12: an unexpected word");
}

static void test_bad_lines(void **state)
{
    plan_fixture *f = *state;

    assert_refused(f, "memscale-graph 1\n", MSC_EFORMAT, "plan, line 1: an unexpected word");
    assert_refused(f, "memscale-plan 2\n", MSC_EVERSION,
                   "plan, line 1: a version other than 4, the only readable one");
    assert_refused(f, "memscale-plan 5\n", MSC_EVERSION,
                   "plan, line 1: a version other than 4, the only readable one");
    assert_refused(f, "memscale-plan 4\ngraph 0123456789ABCDEF\n", MSC_EFORMAT,
                   "plan, line 2: not 16 hexadecimal digits");
    assert_refused(f, TEXT_HEAD "choices 4294967294\nend\n", MSC_EFORMAT,
                   "plan, line 12: an unexpected word");
    assert_refused(f, TEXT_HEAD "choices 0\nend\nend\n", MSC_EFORMAT, "plan, line 13: text after the end");
}

static void test_bad_choice_lines(void **state)
{
    static const struct {
        const char *line;
        const char *message;
    } cases[] = {
        {"choice 2 explode chosen 1 1 1 0 0 0 0", "plan, line 12: an unknown action"},
        {"choice 2 keep whim 1 1 1 0 0 0 0", "plan, line 12: an unknown rule"},
        {"choice 2 keep chosen 65536 1 1 0 0 0 0", "plan, line 12: a number out of range"},
        {"choice 2 keep chosen 1 1 -1 0 0 0 0", "plan, line 12: not a decimal number"},
        {"choice 2 keep chosen 1 1 9223372036854775808 0 0 0 0", "plan, line 12: a number out of range"},
        {"choice 2 keep chosen 1 1 1 0 9223372036854775808 0 0", "plan, line 12: a number out of range"},
        {"choice 2 keep chosen 1 1 1 0 0 2 0", "plan, line 12: a number out of range"},
        {"choice 2 keep chosen 1 1 1 0 0 1 0",
         "plan, line 12: module 2: only a checkpoint can be joined, not the action keep"},
        {"choice 2 keep chosen 1 1 1", "plan, line 12: a word is missing"},
        {"choice 2 keep chosen 1 1 1 0 0 0 0\nchoice 2 keep chosen 1 1 1 0 0 0 0",
         "plan, line 13: module 2 cannot follow module 2: ids must rise"},
        {"choice 2 keep chosen 1 1 1 0 0 0 0\nkept 0", "plan, line 13: an unexpected word"},
        {"choice 2 selective chosen 1 1 1 0 0 0 0", "plan, line 13: an unexpected word"},
        {"choice 2 selective chosen 1 1 1 0 0 0 0\nkept 2 5", "plan, line 13: a word is missing"},
        {"choice 2 selective chosen 1 1 1 0 0 0 0\nkept 1 5 6",
         "plan, line 13: a space at the end of the line"},
        {"choice 2 selective chosen 1 1 1 0 0 0 0\nkept 2 5 5",
         "plan, line 13: module 2: kept operation 5 cannot follow 5: offsets must rise"},
        {"choice 2 selective chosen 1 1 1 0 0 0 0\nkept 1 4294967295",
         "plan, line 13: a number out of range"},
        {"choice 2 selective chosen 1 1 1 0 0 0 0\nkept 4294967294 1", "plan, line 13: a word is missing"},
        {"choice 2 keep chosen 1 1 1 0 0 0 1", "plan, line 12: module 2: the action keep has no boundary"},
        {"choice 2 checkpoint chosen 1 1 1 0 0 1 1",
         "plan, line 12: module 2: only the first choice of a region has its boundary"},
        {"choice 2 checkpoint chosen 1 1 1 0 0 0 2", "plan, line 12: a number out of range"},
        {"choice 2 offload chosen 1 1 1 0 0 0 0", "plan, line 13: an unexpected word"},
        {"choice 2 checkpoint chosen 1 1 1 0 0 0 0\nmoved 1 1 1 0 0", "plan, line 13: an unexpected word"},
        {"choice 2 selective chosen 1 1 1 0 0 0 1\nmoved 1 1 1 0 0", "plan, line 13: an unexpected word"},
        {"choice 2 offload chosen 1 1 1 0 0 0 0\nmoved 1 4294967296 1 0 0",
         "plan, line 13: a number out of range"},
        {"choice 2 offload chosen 1 1 1 0 0 0 0\nmoved 1 1 9223372036854775808 0 0",
         "plan, line 13: a number out of range"},
        {"choice 2 offload chosen 1 1 1 0 0 0 0\nmoved 1 1 1 0 2 5 5",
         "plan, line 13: module 2: moved tensor 5 cannot follow 5: ordinals must rise"},
        {"choice 2 offload chosen 1 1 1 0 0 0 0\nmoved 1 1 1 0 2 5", "plan, line 13: a word is missing"},
    };
    plan_fixture *f = *state;
    char text[MOST_TEXT_BYTES];
    size_t i;

    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        (void)snprintf(text, sizeof text, TEXT_HEAD "choices 2\n%s\nend\n", cases[i].line);
        assert_refused(f, text, MSC_EFORMAT, cases[i].message);
    }
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
    assert_in_range(request, 5, MOST_REQUESTS - 1);
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
        PLAN_CASE("parse/staging", test_staging),
        PLAN_CASE("parse/bad-lines", test_bad_lines),
        PLAN_CASE("parse/bad-choice-lines", test_bad_choice_lines),
        PLAN_CASE("arguments", test_arguments),
        PLAN_CASE("memory/parse", test_parse_without_memory),
    };
    return cmocka_run_group_tests_name("plan_io", tests, NULL, NULL);
}
