/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan: a sorted list of choices and a summary.
 *
 *      choices   module 1    module 4    module 5        ids rise strictly
 *                checkpoint  keep        checkpoint
 *                chosen      not-needed  chosen
 *
 * Whoever makes a plan appends choices in module order, so a lookup is a binary search and equal plans
 * have equal texts. The plan does not check itself against a graph; it remembers the digest of the graph
 * it was made for, and whoever applies it compares.
 */
#include "plan/plan_internal.h"

#include "base/alloc.h"
#include "base/error.h"

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
    msc__array_fini(ctx, &plan->choices, sizeof(msc_choice));
    msc__free(ctx, plan, sizeof *plan);
}

static uint32_t last_module(const msc_plan *plan)
{
    return ((const msc_choice *)plan->choices.items)[plan->choices.count - 1].module;
}

msc_status msc_plan_add(msc_plan *plan, const msc_choice *choice, msc_error *err)
{
    if (choice == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot add a choice: it is NULL");
    if (choice->module == MSC_NONE)
        return msc__fail(err, MSC_EINVAL, "cannot add a choice: it names no module");
    if (choice->action >= MSC_ACTION_COUNT)
        return msc__fail(err, MSC_EINVAL, "module %u: there is no action %u", choice->module, choice->action);
    if (choice->rule >= MSC_RULE_COUNT)
        return msc__fail(err, MSC_EINVAL, "module %u: there is no rule %u", choice->module, choice->rule);
    if (choice->cost_ns < 0)
        return msc__fail(err, MSC_EINVAL, "module %u: its cost is negative", choice->module);
    if (plan->choices.count > 0 && choice->module <= last_module(plan))
        return msc__fail(err, MSC_EINVAL, "module %u cannot follow module %u: ids must rise", choice->module,
                         last_module(plan));
    return msc__array_push(plan->ctx, &plan->choices, sizeof *choice, choice, err);
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

msc_action msc_plan_action(const msc_plan *plan, uint32_t module)
{
    const msc_choice *choices = plan->choices.items;
    uint32_t low = 0;
    uint32_t high = plan->choices.count;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (choices[middle].module < module)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < plan->choices.count && choices[low].module == module)
        return (msc_action)choices[low].action;
    return MSC_ACTION_KEEP;
}

const char *msc_action_name(msc_action action)
{
    static const char *const names[] = {"keep", "checkpoint"};
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
