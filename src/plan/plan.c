/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan: a sorted list of choices, the operations that selective ones keep, what is offloaded, and a summary.
 *
 *      choices       module 1    module 4    module 5        ids rise strictly
 *                    selective   keep        selective
 *                    chosen      not-needed  chosen
 *      kept begins   0           2           2
 *      kept          0  7 |                  3  4  9         offsets rise within a choice
 *
 * What is offloaded lies in two arrays more, of the same form. The maker of a plan appends choices in module
 * order, each followed by what it keeps and moves. So a lookup is a
 * binary search, the kept operations of a choice end where those of the next begin, and equal plans have
 * equal texts. The plan does not check itself against a graph; it remembers the digest of the graph
 * it was made for, and its user compares.
 */
#include "plan/plan_internal.h"

#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/search.h"

msc_status msc_plan_create(msc_context *ctx, msc_plan **out, msc_error *err)
{
    msc_plan *plan;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot create a plan: out is NULL");
    *out = NULL;
    if (ctx == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot create a plan: the context is NULL");
    plan = msc__alloc(ctx, sizeof *plan);
    if (plan == NULL)
        return msc__fail_memory(err, "a plan", sizeof *plan);
    plan->ctx = ctx;
    *out = plan;
    return MSC_OK;
}

void msc_plan_destroy(msc_plan *plan)
{
    msc_context *ctx;

    if (plan == NULL)
        return;
    ctx = plan->ctx;
    msc__array_fini(ctx, &plan->moved, sizeof(uint32_t));
    msc__array_fini(ctx, &plan->moved_begins, sizeof(uint32_t));
    msc__array_fini(ctx, &plan->kept, sizeof(uint32_t));
    msc__array_fini(ctx, &plan->kept_begins, sizeof(uint32_t));
    msc__array_fini(ctx, &plan->choices, sizeof(msc_choice));
    msc__free(ctx, plan, sizeof *plan);
}

static const msc_choice *choice_at(const msc_plan *plan, uint32_t choice)
{
    MSC__ASSERT(choice < plan->choices.count);
    return (const msc_choice *)plan->choices.items + choice;
}

static const msc_choice *last_choice(const msc_plan *plan)
{
    return plan->choices.count == 0 ? NULL : choice_at(plan, plan->choices.count - 1);
}

static bool has_pad(const msc_choice *choice)
{
    static const uint8_t zero[sizeof choice->pad];
    return memcmp(choice->pad, zero, sizeof zero) != 0;
}

static bool moves(const msc_choice *choice)
{
    return choice->action == MSC_ACTION_OFFLOAD || choice->boundary != 0;
}

static msc_status check_moves(const msc_choice *choice, msc_error *err)
{
    if (choice->boundary > 1)
        return msc__fail(err, MSC_EINVAL, "module %u: boundary is neither 0 nor 1", choice->module);
    if (choice->boundary == 1 && choice->action != MSC_ACTION_CHECKPOINT &&
        choice->action != MSC_ACTION_SELECTIVE)
        return msc__fail(err, MSC_EINVAL, "module %u: the action %s has no boundary", choice->module,
                         msc_action_name((msc_action)choice->action));
    if (choice->boundary == 1 && choice->joined == 1)
        return msc__fail(err, MSC_EINVAL, "module %u: only the first choice of a region has its boundary",
                         choice->module);
    MSC__ASSERT(choice->boundary == 0 || choice->action != MSC_ACTION_OFFLOAD);
    if (choice->transfer_ns < 0)
        return msc__fail(err, MSC_EINVAL, "module %u: the time of its transfers is negative", choice->module);
    if (!moves(choice) && (choice->moved_bytes > 0 || choice->moved_count > 0 || choice->transfer_ns > 0 ||
                           choice->ahead_bytes > 0))
        return msc__fail(err, MSC_EINVAL, "module %u: bytes are moved, but nothing is offloaded",
                         choice->module);
    return MSC_OK;
}

static msc_status check_choice(const msc_choice *choice, msc_error *err)
{
    if (choice->module == MSC_NONE)
        return msc__fail(err, MSC_EINVAL, "cannot add a choice: it names no module");
    if (choice->action >= MSC_ACTION_COUNT)
        return msc__fail(err, MSC_EINVAL, "module %u: there is no action %u", choice->module, choice->action);
    if (choice->rule >= MSC_RULE_COUNT)
        return msc__fail(err, MSC_EINVAL, "module %u: there is no rule %u", choice->module, choice->rule);
    if (choice->cost_ns < 0)
        return msc__fail(err, MSC_EINVAL, "module %u: its cost is negative", choice->module);
    if (choice->other_step_ns < 0)
        return msc__fail(err, MSC_EINVAL, "module %u: the step time the other way round is negative",
                         choice->module);
    if (choice->joined > 1)
        return msc__fail(err, MSC_EINVAL, "module %u: joined is neither 0 nor 1", choice->module);
    if (choice->joined == 1 && choice->action != MSC_ACTION_CHECKPOINT)
        return msc__fail(err, MSC_EINVAL, "module %u: only a checkpoint can be joined, not the action %s",
                         choice->module, msc_action_name((msc_action)choice->action));
    if (has_pad(choice))
        return msc__fail(err, MSC_EINVAL, "module %u: the pad is not zero", choice->module);
    return check_moves(choice, err);
}

msc_status msc_plan_add(msc_plan *plan, const msc_choice *choice, msc_error *err)
{
    const msc_choice *last = last_choice(plan);
    msc_status status;

    if (choice == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot add a choice: it is NULL");
    status = check_choice(choice, err);
    if (status != MSC_OK)
        return status;
    if (last != NULL && choice->module <= last->module)
        return msc__fail(err, MSC_EINVAL, "module %u cannot follow module %u: ids must rise", choice->module,
                         last->module);
    /* Room first: then the three arrays grow together or not at all. */
    status = msc__array_reserve(plan->ctx, &plan->choices, sizeof *choice, 1, err);
    if (status == MSC_OK)
        status = msc__array_reserve(plan->ctx, &plan->moved_begins, sizeof(uint32_t), 1, err);
    if (status == MSC_OK)
        status = msc__array_push(plan->ctx, &plan->kept_begins, sizeof(uint32_t), &plan->kept.count, err);
    if (status == MSC_OK)
        status = msc__array_push(plan->ctx, &plan->moved_begins, sizeof(uint32_t), &plan->moved.count, err);
    if (status == MSC_OK)
        status = msc__array_push(plan->ctx, &plan->choices, sizeof *choice, choice, err);
    MSC__ASSERT(plan->kept_begins.count == plan->choices.count &&
                plan->moved_begins.count == plan->choices.count);
    return status;
}

msc_status msc_plan_keep(msc_plan *plan, uint32_t offset, msc_error *err)
{
    const msc_choice *last = last_choice(plan);
    const uint32_t *kept;
    uint32_t count = 0;

    if (last == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot keep operation %u: the plan has no choice yet", offset);
    if (last->action != MSC_ACTION_SELECTIVE)
        return msc__fail(err, MSC_EINVAL, "module %u: the action %s keeps no operation", last->module,
                         msc_action_name((msc_action)last->action));
    if (offset == MSC_NONE)
        return msc__fail(err, MSC_EINVAL, "module %u: no operation is named", last->module);
    kept = msc_plan_kept(plan, plan->choices.count - 1, &count);
    if (count > 0 && offset <= kept[count - 1])
        return msc__fail(err, MSC_EINVAL, "module %u: kept operation %u cannot follow %u: offsets must rise",
                         last->module, offset, kept[count - 1]);
    return msc__array_push(plan->ctx, &plan->kept, sizeof offset, &offset, err);
}

msc_status msc_plan_move(msc_plan *plan, uint32_t ordinal, msc_error *err)
{
    const msc_choice *last = last_choice(plan);
    const uint32_t *moved;
    uint32_t count = 0;

    if (last == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot move tensor %u: the plan has no choice yet", ordinal);
    if (!moves(last))
        return msc__fail(err, MSC_EINVAL, "module %u: the action %s moves nothing", last->module,
                         msc_action_name((msc_action)last->action));
    if (ordinal == MSC_NONE)
        return msc__fail(err, MSC_EINVAL, "module %u: no tensor is named", last->module);
    moved = msc_plan_moved(plan, plan->choices.count - 1, &count);
    if (count > 0 && ordinal <= moved[count - 1])
        return msc__fail(err, MSC_EINVAL, "module %u: moved tensor %u cannot follow %u: ordinals must rise",
                         last->module, ordinal, moved[count - 1]);
    return msc__array_push(plan->ctx, &plan->moved, sizeof ordinal, &ordinal, err);
}

/* The part of `all` that belongs to a choice. */
static const uint32_t *part_of(const msc_plan *plan, const msc__array *all, const msc__array *begins_array,
                               uint32_t choice, uint32_t *count)
{
    const uint32_t *begins = begins_array->items;
    uint32_t end;

    *count = 0;
    if (choice >= plan->choices.count)
        return NULL;
    end = choice + 1 < plan->choices.count ? begins[choice + 1] : all->count;
    MSC__ASSERT(begins_array->count == plan->choices.count && begins[choice] <= end && end <= all->count);
    *count = end - begins[choice];
    return *count == 0 ? NULL : (const uint32_t *)all->items + begins[choice];
}

const uint32_t *msc_plan_kept(const msc_plan *plan, uint32_t choice, uint32_t *count)
{
    return part_of(plan, &plan->kept, &plan->kept_begins, choice, count);
}

const uint32_t *msc_plan_moved(const msc_plan *plan, uint32_t choice, uint32_t *count)
{
    return part_of(plan, &plan->moved, &plan->moved_begins, choice, count);
}

msc_status msc_plan_set_ahead(msc_plan *plan, uint32_t choice, uint64_t ahead_bytes, msc_error *err)
{
    msc_choice *choices = plan->choices.items;

    if (choice >= plan->choices.count)
        return msc__fail(err, MSC_EINVAL, "there is no choice %u, only %u", choice, plan->choices.count);
    if (!moves(&choices[choice]))
        return msc__fail(err, MSC_EINVAL, "module %u: nothing comes back early, since nothing is offloaded",
                         choices[choice].module);
    MSC__ASSERT(choices[choice].action != MSC_ACTION_KEEP);
    choices[choice].ahead_bytes = ahead_bytes;
    return MSC_OK;
}

msc_status msc_plan_set_summary(msc_plan *plan, const msc_plan_summary *summary, msc_error *err)
{
    if (summary == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot set the summary: it is NULL");
    if (summary->plain_step_ns < 0 || summary->step_ns < 0)
        return msc__fail(err, MSC_EINVAL, "cannot set the summary: a step time is negative");
    if (summary->fits > 1 || summary->peak_in_recompute > 1)
        return msc__fail(err, MSC_EINVAL, "cannot set the summary: a yes or no is neither 0 nor 1");
    plan->summary = *summary;
    plan->summary.pad = 0;
    plan->summary.pad2 = 0;
    return MSC_OK;
}

uint32_t msc_plan_choice_count(const msc_plan *plan)
{
    return plan->choices.count;
}

const msc_choice *msc_plan_choices(const msc_plan *plan)
{
    return plan->choices.items;
}

const msc_plan_summary *msc_plan_get_summary(const msc_plan *plan)
{
    return &plan->summary;
}

uint32_t msc_plan_find(const msc_plan *plan, uint32_t module)
{
    uint32_t count = plan->choices.count;
    uint32_t at = MSC__LOWER_BOUND(msc_choice, module, plan->choices.items, count, module);

    MSC__ASSERT(at == 0 || choice_at(plan, at - 1)->module < module);
    return at < count && choice_at(plan, at)->module == module ? at : MSC_NONE;
}

msc_action msc_plan_action(const msc_plan *plan, uint32_t module)
{
    uint32_t choice = msc_plan_find(plan, module);
    return choice == MSC_NONE ? MSC_ACTION_KEEP : (msc_action)choice_at(plan, choice)->action;
}

const char *msc_action_name(msc_action action)
{
    static const char *const names[] = {"keep", "checkpoint", "selective", "offload"};
    return (unsigned)action < MSC_ACTION_COUNT ? names[action] : "unknown";
}

const char *msc_rule_key(msc_rule rule)
{
    static const char *const keys[] = {
#define KEY(name, key, text) key,
        MSC_RULE_LIST(KEY)
#undef KEY
    };
    return (unsigned)rule < MSC_RULE_COUNT ? keys[rule] : "unknown";
}

const char *msc_rule_text(msc_rule rule)
{
    static const char *const texts[] = {
#define TEXT(name, key, text) text,
        MSC_RULE_LIST(TEXT)
#undef TEXT
    };
    return (unsigned)rule < MSC_RULE_COUNT ? texts[rule] : "unknown rule";
}
