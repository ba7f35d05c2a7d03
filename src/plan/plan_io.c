/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Canonical text of a plan, and back.
 *
 *      memscale-plan 4
 *      graph <digest>
 *      budget <bytes>
 *      plain <peak bytes> <step ns>
 *      planned <peak bytes> <step ns>
 *      smallest <peak bytes>
 *      bound <ppm>
 *      peak <operation> <in recompute>
 *      fits <0 or 1>
 *      offload <window out> <window in> <away peak>
 *      staging <bytes>                                     where they are not 0
 *      choices <count>
 *      choice <module> <action> <rule> <calls> <saved> <cost> <other peak> <other step> <joined> <boundary>
 *      kept <count> <offset> <offset> ...                  after each selective choice
 *      moved <bytes> <tensors> <ns> <ahead> <count> <ordinal> ...  after each choice that offloads
 *      end
 *
 * docs/formats/plan.md describes the fields. Actions and rules stand as words, which stay valid when the
 * enumerations grow. The parser builds through msc_plan_add and msc_plan_set_summary, so a plan that was
 * read obeys the same rules as one that was made; it appends choices as their lines come, so the count
 * that the text claims costs nothing. Only canonical text of this version is accepted.
 */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/reader.h"
#include "base/text.h"
#include "plan/plan_internal.h"

/* ---- writing ------------------------------------------------------------------------------------- */

static void put_field(msc__text *text, uint64_t value)
{
    msc__text_put_char(text, ' ');
    msc__text_put_u64(text, value);
}

static void put_line(msc__text *text, const char *word, uint64_t value)
{
    msc__text_put(text, word);
    put_field(text, value);
    msc__text_put_char(text, '\n');
}

static void put_line_2(msc__text *text, const char *word, uint64_t first, uint64_t second)
{
    msc__text_put(text, word);
    put_field(text, first);
    put_field(text, second);
    msc__text_put_char(text, '\n');
}

static void put_summary(msc__text *text, const msc_plan_summary *summary)
{
    MSC__ASSERT(summary->plain_step_ns >= 0 && summary->step_ns >= 0 && summary->fits <= 1);
    msc__text_put(text, "graph ");
    msc__text_put_hex64(text, summary->graph_digest);
    msc__text_put_char(text, '\n');
    put_line(text, "budget", summary->budget_bytes);
    put_line_2(text, "plain", summary->plain_peak_bytes, (uint64_t)summary->plain_step_ns);
    put_line_2(text, "planned", summary->peak_bytes, (uint64_t)summary->step_ns);
    put_line(text, "smallest", summary->smallest_peak_bytes);
    put_line(text, "bound", summary->time_bound_ppm);
    put_line_2(text, "peak", summary->peak_op, summary->peak_in_recompute);
    put_line(text, "fits", summary->fits);
    msc__text_put(text, "offload");
    put_field(text, summary->window_out_bytes);
    put_field(text, summary->window_in_bytes);
    put_field(text, summary->away_peak_bytes);
    msc__text_put_char(text, '\n');
    if (summary->staging_bytes > 0)
        put_line(text, "staging", summary->staging_bytes);
}

static void put_choice(msc__text *text, const msc_choice *choice)
{
    MSC__ASSERT(choice->cost_ns >= 0 && choice->other_step_ns >= 0);
    MSC__ASSERT(choice->joined == 0 || choice->action == MSC_ACTION_CHECKPOINT);
    msc__text_put(text, "choice");
    put_field(text, choice->module);
    msc__text_put_char(text, ' ');
    msc__text_put(text, msc_action_name((msc_action)choice->action));
    msc__text_put_char(text, ' ');
    msc__text_put(text, msc_rule_key((msc_rule)choice->rule));
    put_field(text, choice->call_count);
    put_field(text, choice->saved_bytes);
    put_field(text, (uint64_t)choice->cost_ns);
    put_field(text, choice->other_peak_bytes);
    put_field(text, (uint64_t)choice->other_step_ns);
    put_field(text, choice->joined);
    put_field(text, choice->boundary);
    msc__text_put_char(text, '\n');
}

/* A list with its length, up to the end of the line. */
static void put_list(msc__text *text, const uint32_t *items, uint32_t count)
{
    uint32_t i;

    MSC__ASSERT(items != NULL || count == 0);
    put_field(text, count);
    for (i = 0; i < count; i++) {
        MSC__ASSERT(i == 0 || items[i] > items[i - 1]);
        put_field(text, items[i]);
    }
    msc__text_put_char(text, '\n');
}

static void put_kept(msc__text *text, const msc_plan *plan, uint32_t choice)
{
    uint32_t count;
    const uint32_t *kept = msc_plan_kept(plan, choice, &count);

    msc__text_put(text, "kept");
    put_list(text, kept, count);
}

static void put_moved(msc__text *text, const msc_plan *plan, uint32_t choice)
{
    const msc_choice *of = &msc_plan_choices(plan)[choice];
    uint32_t count;
    const uint32_t *moved = msc_plan_moved(plan, choice, &count);

    MSC__ASSERT(of->transfer_ns >= 0 && (of->action != MSC_ACTION_KEEP || count == 0));
    msc__text_put(text, "moved");
    put_field(text, of->moved_bytes);
    put_field(text, of->moved_count);
    put_field(text, (uint64_t)of->transfer_ns);
    put_field(text, of->ahead_bytes);
    put_list(text, moved, count);
}

static bool moves(const msc_choice *choice)
{
    return choice->action == MSC_ACTION_OFFLOAD || choice->boundary != 0;
}

static void put_plan(msc__text *text, const msc_plan *plan)
{
    const msc_choice *choices = msc_plan_choices(plan);
    uint32_t i;

    msc__text_put(text, "memscale-plan 4\n");
    put_summary(text, &plan->summary);
    put_line(text, "choices", plan->choices.count);
    for (i = 0; i < plan->choices.count; i++) {
        MSC__ASSERT(i == 0 || choices[i].module > choices[i - 1].module);
        put_choice(text, &choices[i]);
        if (choices[i].action == MSC_ACTION_SELECTIVE)
            put_kept(text, plan, i);
        if (moves(&choices[i]))
            put_moved(text, plan, i);
    }
    msc__text_put(text, "end\n");
    msc__text_end(text);
}

uint64_t msc_plan_digest(const msc_plan *plan)
{
    msc__text text;

    msc__text_init(&text, NULL, 0);
    put_plan(&text, plan);
    return text.digest;
}

msc_status msc_plan_format(const msc_plan *plan, char *buffer, size_t buffer_bytes, size_t *needed_bytes,
                           msc_error *err)
{
    msc__text text;

    if (buffer == NULL && buffer_bytes > 0)
        return msc__fail(err, MSC_EINVAL, "cannot format the plan: buffer is NULL, its size %zu",
                         buffer_bytes);
    msc__text_init(&text, buffer, buffer_bytes);
    put_plan(&text, plan);
    if (needed_bytes != NULL)
        *needed_bytes = text.length;
    return MSC_OK;
}

/* ---- reading ------------------------------------------------------------------------------------- */

/* The reader takes a space after each word; at the end of a line there must be none. */
static bool read_line_end(msc__reader *reader)
{
    if (reader->status == MSC_OK && reader->at[-1] == ' ')
        return msc__reader_fail(reader, MSC_EFORMAT, "a space at the end of the line");
    return msc__reader_line_end(reader);
}

static bool read_line(msc__reader *reader, const char *word, uint64_t max, uint64_t *value)
{
    return msc__reader_expect(reader, word) && msc__reader_u64(reader, max, value) && read_line_end(reader);
}

static bool read_line_2(msc__reader *reader, const char *word, const uint64_t max[2], uint64_t value[2])
{
    return msc__reader_expect(reader, word) && msc__reader_u64(reader, max[0], &value[0]) &&
           msc__reader_u64(reader, max[1], &value[1]) && read_line_end(reader);
}

static bool read_version(msc__reader *reader)
{
    uint64_t version = 0;

    if (!msc__reader_expect(reader, "memscale-plan") || !msc__reader_u64(reader, UINT64_MAX, &version))
        return false;
    if (version != 4)
        return msc__reader_fail(reader, MSC_EVERSION, "a version other than 4, the only readable one");
    return read_line_end(reader);
}

static bool read_offload(msc__reader *reader, msc_plan_summary *summary)
{
    return msc__reader_expect(reader, "offload") &&
           msc__reader_u64(reader, UINT64_MAX, &summary->window_out_bytes) &&
           msc__reader_u64(reader, UINT64_MAX, &summary->window_in_bytes) &&
           msc__reader_u64(reader, UINT64_MAX, &summary->away_peak_bytes) && read_line_end(reader);
}

static bool read_summary(msc__reader *reader, msc_plan_summary *summary)
{
    static const uint64_t peak_and_time[2] = {UINT64_MAX, INT64_MAX};
    static const uint64_t op_and_flag[2] = {UINT32_MAX, 1};
    uint64_t plain[2] = {0};
    uint64_t planned[2] = {0};
    uint64_t peak[2] = {0};
    uint64_t bound = 0;
    uint64_t fits = 0;

    if (!msc__reader_expect(reader, "graph") || !msc__reader_hex64(reader, &summary->graph_digest) ||
        !read_line_end(reader) || !read_line(reader, "budget", UINT64_MAX, &summary->budget_bytes) ||
        !read_line_2(reader, "plain", peak_and_time, plain) ||
        !read_line_2(reader, "planned", peak_and_time, planned) ||
        !read_line(reader, "smallest", UINT64_MAX, &summary->smallest_peak_bytes) ||
        !read_line(reader, "bound", UINT32_MAX, &bound) || !read_line_2(reader, "peak", op_and_flag, peak) ||
        !read_line(reader, "fits", 1, &fits) || !read_offload(reader, summary))
        return false;
    summary->plain_peak_bytes = plain[0];
    summary->plain_step_ns = (int64_t)plain[1];
    summary->peak_bytes = planned[0];
    summary->step_ns = (int64_t)planned[1];
    summary->time_bound_ppm = (uint32_t)bound;
    summary->peak_op = (uint32_t)peak[0];
    summary->peak_in_recompute = (uint8_t)peak[1];
    summary->fits = (uint8_t)fits;
    return true;
}

static bool word_is(const char *word, size_t word_bytes, const char *expected)
{
    return strlen(expected) == word_bytes && memcmp(word, expected, word_bytes) == 0;
}

static bool read_action(msc__reader *reader, uint8_t *action)
{
    const char *word;
    size_t bytes;

    if (!msc__reader_word(reader, &word, &bytes))
        return false;
    for (*action = 0; *action < MSC_ACTION_COUNT; ++*action) {
        if (word_is(word, bytes, msc_action_name((msc_action)*action)))
            return true;
    }
    return msc__reader_fail(reader, MSC_EFORMAT, "an unknown action");
}

static bool read_rule(msc__reader *reader, uint8_t *rule)
{
    const char *word;
    size_t bytes;

    if (!msc__reader_word(reader, &word, &bytes))
        return false;
    for (*rule = 0; *rule < MSC_RULE_COUNT; ++*rule) {
        if (word_is(word, bytes, msc_rule_key((msc_rule)*rule)))
            return true;
    }
    return msc__reader_fail(reader, MSC_EFORMAT, "an unknown rule");
}

/* What the plan refuses is an error of the text. */
static bool take(msc__reader *reader, msc_status status, const msc_error *problem)
{
    if (status == MSC_OK)
        return true;
    return msc__reader_fail(reader, status == MSC_EINVAL ? MSC_EFORMAT : status, problem->message);
}

static bool read_numbers(msc__reader *reader, msc_choice *choice)
{
    uint64_t calls = 0;
    uint64_t cost = 0;
    uint64_t other_step = 0;
    uint64_t joined = 0;
    uint64_t boundary = 0;

    if (!msc__reader_u64(reader, UINT16_MAX, &calls) ||
        !msc__reader_u64(reader, UINT64_MAX, &choice->saved_bytes) ||
        !msc__reader_u64(reader, INT64_MAX, &cost) ||
        !msc__reader_u64(reader, UINT64_MAX, &choice->other_peak_bytes) ||
        !msc__reader_u64(reader, INT64_MAX, &other_step) || !msc__reader_u64(reader, 1, &joined) ||
        !msc__reader_u64(reader, 1, &boundary))
        return false;
    choice->call_count = (uint16_t)calls;
    choice->cost_ns = (int64_t)cost;
    choice->other_step_ns = (int64_t)other_step;
    choice->joined = (uint8_t)joined;
    choice->boundary = (uint8_t)boundary;
    return true;
}

typedef msc_status push_item(msc_plan *plan, uint32_t item, msc_error *err);

/* A list with its length, up to the end of the line. */
static bool read_list(msc__reader *reader, msc_plan *plan, push_item *push)
{
    uint64_t count = 0;
    uint64_t item = 0;
    msc_error problem;
    uint64_t i;

    if (!msc__reader_u64(reader, MSC_NONE - 1, &count))
        return false;
    for (i = 0; i < count; i++) {
        if (!msc__reader_u64(reader, MSC_NONE - 1, &item) ||
            !take(reader, push(plan, (uint32_t)item, &problem), &problem))
            return false;
    }
    return read_line_end(reader);
}

/* What a plan says of moves belongs to the choice, which comes first: four numbers are filled in. */
static bool read_moved(msc__reader *reader, msc_plan *plan)
{
    msc_choice *choice = (msc_choice *)plan->choices.items + (plan->choices.count - 1);
    uint64_t count = 0;
    uint64_t transfer = 0;

    if (!msc__reader_expect(reader, "moved") || !msc__reader_u64(reader, UINT64_MAX, &choice->moved_bytes) ||
        !msc__reader_u64(reader, UINT32_MAX, &count) || !msc__reader_u64(reader, INT64_MAX, &transfer) ||
        !msc__reader_u64(reader, UINT64_MAX, &choice->ahead_bytes))
        return false;
    choice->moved_count = (uint32_t)count;
    choice->transfer_ns = (int64_t)transfer;
    return read_list(reader, plan, msc_plan_move);
}

static bool read_choice(msc__reader *reader, msc_plan *plan)
{
    msc_choice choice = {0};
    uint64_t module = 0;
    msc_error problem;

    if (!msc__reader_expect(reader, "choice") || !msc__reader_u64(reader, MSC_NONE - 1, &module) ||
        !read_action(reader, &choice.action) || !read_rule(reader, &choice.rule) ||
        !read_numbers(reader, &choice))
        return false;
    choice.module = (uint32_t)module;
    if (!take(reader, msc_plan_add(plan, &choice, &problem), &problem) || !read_line_end(reader))
        return false;
    if (choice.action == MSC_ACTION_SELECTIVE &&
        (!msc__reader_expect(reader, "kept") || !read_list(reader, plan, msc_plan_keep)))
        return false;
    return !moves(&choice) || read_moved(reader, plan);
}

/* The line of staging, which is only there where there is some, and the number of choices. */
static bool read_staging_and_count(msc__reader *reader, msc_plan_summary *summary, uint64_t *count)
{
    const char *word;
    size_t bytes;

    if (!msc__reader_word(reader, &word, &bytes))
        return false;
    if (word_is(word, bytes, "staging")) {
        if (!msc__reader_u64(reader, UINT64_MAX, &summary->staging_bytes) || !read_line_end(reader))
            return false;
        if (summary->staging_bytes == 0)
            return msc__reader_fail(reader, MSC_EFORMAT, "a line that says that there is no staging");
        return read_line(reader, "choices", MSC_NONE - 1, count);
    }
    if (!word_is(word, bytes, "choices"))
        return msc__reader_fail(reader, MSC_EFORMAT, "an unexpected word");
    return msc__reader_u64(reader, MSC_NONE - 1, count) && read_line_end(reader);
}

static bool read_choices(msc__reader *reader, msc_plan *plan, uint64_t count)
{
    uint64_t i;

    for (i = 0; i < count; i++) {
        if (!read_choice(reader, plan))
            return false;
    }
    if (!msc__reader_expect(reader, "end") || !read_line_end(reader))
        return false;
    if (!msc__reader_at_end(reader))
        return msc__reader_fail(reader, MSC_EFORMAT, "text after the end");
    return true;
}

msc_status msc_plan_parse(msc_context *ctx, const char *text, size_t text_bytes, msc_plan **out,
                          msc_error *err)
{
    msc__reader reader;
    msc_plan_summary summary = {0};
    msc_plan *plan = NULL;
    uint64_t count = 0;
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot parse a plan: out is NULL");
    *out = NULL;
    if (text == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot parse a plan: text is NULL");
    status = msc_plan_create(ctx, &plan, err);
    if (status != MSC_OK)
        return status;
    msc__reader_init(&reader, "plan", text, text_bytes, err);
    (void)(read_version(&reader) && read_summary(&reader, &summary) &&
           read_staging_and_count(&reader, &summary, &count) && read_choices(&reader, plan, count));
    status = reader.status;
    if (status == MSC_OK)
        status = msc_plan_set_summary(plan, &summary, err);
    if (status != MSC_OK) {
        msc_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return MSC_OK;
}
