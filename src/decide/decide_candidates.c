/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Candidates: the modules whose calls may be recomputed without changing anything.
 *
 * A technique applies to all calls of a module, so what the survey noted of its calls is collected. A call
 * that lies inside another call of the same module is part of that one. The reasons against a module, in the
 * order in which they are given when several apply, are the rows of `judge`.
 *
 * Runs of siblings (decide_chains.c) and ways to keep some outputs (decide_variants.c) are added behind the
 * modules, and behind these what may leave the device (decide_offload.c).
 */
#include "base/error.h"
#include "base/invariant.h"
#include "decide/decide_cost.h"
#include "decide/decide_survey.h"

/* ---- what follows for modules --------------------------------------------------------------------- */

/* Everything that counts against a module, over its calls. */
typedef struct evidence {
    uint32_t own; /* flags of the module itself */
    uint32_t flags;
    uint8_t notes;
    bool live;  /* a call has a region that recomputes */
    bool early; /* a call's saves are used before it ends */
    bool late;  /* a call does not lie in forward */
} evidence;

static evidence collect(const msc__model *model, const msc__survey *s, uint32_t module)
{
    evidence found = {.own = model->modules[module].flags, .flags = model->modules[module].flags};
    uint32_t i;

    for (i = s->calls.first[module]; i < s->calls.first[module + 1]; i++) {
        uint32_t c = s->calls.items[i];
        found.flags |= s->flags[c] & ~(uint32_t)MSC_MODULE_ROOT;
        found.notes |= s->notes[c];
        found.live |= model->call_regions[c].live;
        found.early |= model->call_regions[c].early;
        found.late |= model->call_regions[c].end > model->forward_end;
    }
    return found;
}

static msc_rule judge(const evidence *found)
{
    const struct {
        bool applies;
        msc_rule rule;
    } rows[] = {
        {(found->flags & MSC_MODULE_ROOT) != 0, MSC_RULE_ROOT},
        {(found->own & (MSC_MODULE_EXCLUDED | MSC_MODULE_LEFT_OUT)) != 0, MSC_RULE_EXCLUDED},
        {(found->flags & MSC_MODULE_EXCLUDED) != 0, MSC_RULE_HOLDS_EXCLUDED},
        {(found->flags & MSC_MODULE_DIFFERED) != 0, MSC_RULE_DIFFERED},
        {(found->flags & MSC_MODULE_NO_FORWARD) != 0, MSC_RULE_NO_FORWARD},
        {(found->flags & MSC_MODULE_SCRIPTED) != 0, MSC_RULE_SCRIPTED},
        {(found->flags & MSC_MODULE_PYTHON_STATE) != 0, MSC_RULE_PYTHON_STATE},
        {(found->flags & MSC_MODULE_NOT_TENSORS) != 0, MSC_RULE_NOT_TENSORS},
        {(found->flags & MSC_MODULE_HOOKED) != 0, MSC_RULE_HOOKED},
        {(found->flags & MSC_MODULE_NO_ROOM) != 0, MSC_RULE_NO_ROOM},
        {found->late, MSC_RULE_NO_FORWARD},
        {(found->notes & MSC__NOTE_WRITES_OUTSIDE) != 0, MSC_RULE_WRITES_OUTSIDE},
        {(found->notes & MSC__NOTE_INPUT_CHANGED) != 0, MSC_RULE_INPUT_CHANGED},
        {(found->flags & MSC_MODULE_INPUT_CHANGED) != 0, MSC_RULE_INPUT_CHANGED},
        {(found->notes & MSC__NOTE_USED) == 0, MSC_RULE_NO_BACKWARD},
        {!found->live || found->early, MSC_RULE_NO_SAVING},
    };
    size_t i;

    for (i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].applies)
            return rows[i].rule;
    return MSC_RULE_NOT_NEEDED;
}

/* ---- the list of candidates ----------------------------------------------------------------------- */

void msc__model_fill_region(const msc__model *model, const msc__candidate *candidate, msc__region *region)
{
    uint32_t i;

    for (i = model->saves_by_call.first[region->first_call];
         i < model->saves_by_call.first[region->last_call + 1]; i++) {
        const msc_save *save = &model->saves[model->saves_by_call.items[i]];
        const msc_buffer *buffer = &model->buffers[save->buffer];
        if (!msc__is_made_inside(buffer, region) || !msc__keeps(model, candidate, region, buffer->begin))
            msc__region_note(region, save, buffer, model->op_count);
    }
    msc__region_settle(region);
}

msc_status msc__model_add(msc__model *model, const msc__candidate *candidate, const msc__region *regions,
                          msc_error *err)
{
    msc_context *ctx = model->scratch.ctx;
    msc__candidate added = *candidate;
    msc_status status =
        msc__array_reserve(ctx, &model->region_list, sizeof *regions, candidate->region_count, err);
    uint32_t i;

    added.first_region = model->region_list.count;
    for (i = 0; i < added.region_count && status == MSC_OK; i++)
        status = msc__array_push(ctx, &model->region_list, sizeof *regions, &regions[i], err);
    model->regions = model->region_list.items;
    model->region_count = model->region_list.count;
    if (status != MSC_OK)
        return status;
    if (added.base == MSC_NONE)
        added.base = model->candidate_list.count;
    MSC__ASSERT(added.region_count > 0 && added.base <= model->candidate_list.count);
    added.cost_ns = msc__cost_candidate(model, &added);
    added.usable = 1;
    status = msc__array_push(ctx, &model->candidate_list, sizeof added, &added, err);
    model->candidates = model->candidate_list.items;
    model->candidate_count = model->candidate_list.count;
    return status;
}

/* The regions of a module are those of its calls that recompute something. */
static msc_status add_module(msc__model *model, const msc__survey *s, uint32_t module, msc__region *regions,
                             msc_error *err)
{
    msc__candidate candidate = {.module = module, .base = MSC_NONE, .next = MSC_NONE, .also = MSC_NONE};
    uint32_t i;

    for (i = s->calls.first[module]; i < s->calls.first[module + 1]; i++)
        if (model->call_regions[s->calls.items[i]].live)
            regions[candidate.region_count++] = model->call_regions[s->calls.items[i]];
    MSC__ASSERT(candidate.region_count > 0 && model->subjects[module].candidate == MSC_NONE);
    model->subjects[module].candidate = model->candidate_count;
    return msc__model_add(model, &candidate, regions, err);
}

static msc_status judge_modules(msc__model *model, msc__survey *s, msc_error *err)
{
    msc__region *regions = msc__scratch_take(&s->scratch, model->call_count, sizeof *regions);
    msc_status status = msc__scratch_check(&s->scratch, "candidates", err);
    uint32_t m;

    for (m = 0; m < model->call_count; m++)
        model->subjects[model->calls[m].module].call_count++;
    for (m = 0; m < model->module_count && status == MSC_OK; m++) {
        msc__subject *subject = &model->subjects[m];
        evidence found = collect(model, s, m);
        subject->candidate = MSC_NONE;
        subject->offload = MSC_NONE;
        subject->has_saves = (found.notes & MSC__NOTE_SAVES) != 0;
        subject->rule = (uint8_t)judge(&found);
        if (subject->rule == MSC_RULE_NOT_NEEDED)
            status = add_module(model, s, m, regions, err);
    }
    return status;
}

/* Fills subjects, candidates and their relations. */
static msc_status find_candidates(msc__model *model, const msc_decide_options *options, msc_error *err)
{
    msc__survey s;
    msc_status status = msc__survey_init(&s, model, err);

    if (status == MSC_OK)
        status = judge_modules(model, &s, err);
    if (status == MSC_OK && options->allow_checkpoint)
        status = msc__model_add_runs(model, &s, err);
    if (status == MSC_OK && options->allow_selective)
        status = msc__model_add_variants(model, &s, err);
    if (status == MSC_OK && options->allow_offload)
        status = msc__model_add_offloads(model, &s, options, err);
    if (status == MSC_OK)
        status = msc__model_pair(model, &s, err);
    msc__survey_fini(&s);
    return status;
}

msc_status msc__model_init(msc__model *model, msc_context *ctx, const msc_graph *graph,
                           const msc_decide_options *options, msc_error *err)
{
    msc_status status = msc__model_read(model, ctx, graph, options, err);

    if (status != MSC_OK)
        return status;
    msc__cost_times(model, &options->rates);
    return find_candidates(model, options, err);
}
