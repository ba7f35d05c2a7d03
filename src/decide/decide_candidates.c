/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Candidates: the modules whose calls may be executed a second time without changing anything.
 *
 * What disqualifies is first noted per call, by letting each record climb from its call to the outermost
 * one, and then collected per module over all its calls, since a technique applies to all of them:
 *
 *      records            call 0   call 1   call 2            module of calls 1 and 2
 *      write, outside 1     .        X        .       ---->   X: writes-outside
 *      flag inside 2        f        .        f       ---->   f: comes first
 *
 * A module's call that lies inside another call of the same module is part of that one. The reasons, in the
 * order in which they are given when several apply, are the rows of `judge`.
 *
 * Two candidates exclude each other when a call of one lies inside a call of the other. The lists `above` and
 * `below` hold that relation, so every set that the search visits is an antichain of it.
 *
 * Cost: (saves + inputs + writes + calls) × nesting depth.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/error.h"
#include "decide/decide_internal.h"

/* Notes on a call. */
enum {
    NOTE_SAVES = 1u << 0,          /* something is saved inside */
    NOTE_USED = 1u << 1,           /* something saved inside is used in backward */
    NOTE_WRITES_OUTSIDE = 1u << 2, /* something from outside is changed inside */
    NOTE_INPUT_CHANGED = 1u << 3   /* something from outside that it reads changes before the recompute */
};

/* Working arrays of one build. */
typedef struct survey {
    uint8_t *notes;      /* per call: NOTE_… */
    uint32_t *flags;     /* per call: MSC_MODULE_… of the modules called inside it */
    msc__buckets writes; /* indices of writes, by buffer, in program order */
    msc__buckets calls;  /* outermost calls by module */
} survey;

/* ---- what the graph says of calls ------------------------------------------------------------------ */

static bool counts_as_write(const msc__model *model, uint32_t buffer)
{
    /* Module buffers are set aside and put back by whoever recomputes. */
    return model->buffers[buffer].category != MSC_CATEGORY_BUFFER;
}

static void note_writes(const msc__model *model, survey *s)
{
    uint32_t i;
    uint32_t c;

    for (i = 0; i < model->write_count; i++) {
        const msc_write *write = &model->writes[i];
        if (!counts_as_write(model, write->buffer))
            continue;
        for (c = model->ops[write->op].call; c != MSC_NONE; c = model->calls[c].parent)
            if (!msc__is_made_inside(&model->buffers[write->buffer], &model->regions[c]))
                s->notes[c] |= NOTE_WRITES_OUTSIDE;
    }
}

/* Whether a buffer is written in operations from … to - 1. */
static bool is_written(const msc__model *model, const survey *s, uint32_t buffer, uint32_t from, uint32_t to)
{
    uint32_t low = s->writes.first[buffer];
    uint32_t high = s->writes.first[buffer + 1];
    uint32_t end = high;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (model->writes[s->writes.items[middle]].op < from)
            low = middle + 1;
        else
            high = middle;
    }
    return low < end && model->writes[s->writes.items[low]].op < to;
}

/* A buffer is read inside a call: does it reach the call's recompute unchanged? */
static void note_read(const msc__model *model, survey *s, uint32_t buffer, uint32_t call)
{
    uint32_t c;

    if (s->writes.first[buffer] == s->writes.first[buffer + 1])
        return;
    for (c = call; c != MSC_NONE; c = model->calls[c].parent) {
        const msc__region *region = &model->regions[c];
        if (region->live && !msc__is_made_inside(&model->buffers[buffer], region) &&
            is_written(model, s, buffer, region->begin, region->redo))
            s->notes[c] |= NOTE_INPUT_CHANGED;
    }
}

static void note_saves(const msc__model *model, survey *s)
{
    uint32_t i;
    uint32_t c;

    for (i = 0; i < model->save_count; i++) {
        const msc_save *save = &model->saves[i];
        bool used = !msc__save_is_unused(save, model->op_count);
        note_read(model, s, save->buffer, save->call);
        for (c = save->call; c != MSC_NONE; c = model->calls[c].parent)
            s->notes[c] |= (uint8_t)(NOTE_SAVES | (used ? NOTE_USED : 0));
    }
    for (i = 0; i < model->input_count; i++)
        note_read(model, s, model->inputs[i].buffer, model->inputs[i].call);
}

static void note_flags(const msc__model *model, survey *s)
{
    uint32_t c;

    for (c = model->call_count; c-- > 0;) {
        s->flags[c] |= model->modules[model->calls[c].module].flags;
        if (model->calls[c].parent != MSC_NONE)
            s->flags[model->calls[c].parent] |= s->flags[c];
    }
}

static bool is_outermost(const msc__model *model, uint32_t call)
{
    uint32_t c;

    for (c = model->calls[call].parent; c != MSC_NONE; c = model->calls[c].parent)
        if (model->calls[c].module == model->calls[call].module)
            return false;
    return true;
}

static void fill_survey_buckets(msc__model *model, survey *s)
{
    msc__scratch *scratch = &model->scratch;
    int pass;
    uint32_t i;

    msc__buckets_init(scratch, &s->writes, model->buffer_count);
    msc__buckets_init(scratch, &s->calls, model->module_count);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < model->write_count; i++)
            if (counts_as_write(model, model->writes[i].buffer))
                msc__buckets_add(&s->writes, model->writes[i].buffer, i);
        for (i = 0; i < model->call_count; i++)
            if (is_outermost(model, i))
                msc__buckets_add(&s->calls, model->calls[i].module, i);
        if (pass == 0) {
            msc__buckets_place(scratch, &s->writes);
            msc__buckets_place(scratch, &s->calls);
        }
    }
}

static msc_status survey_graph(msc__model *model, survey *s, msc_error *err)
{
    s->notes = msc__scratch_take(&model->scratch, model->call_count, sizeof *s->notes);
    s->flags = msc__scratch_take(&model->scratch, model->call_count, sizeof *s->flags);
    fill_survey_buckets(model, s);
    if (model->scratch.failed_bytes > 0)
        return msc__scratch_check(&model->scratch, "candidates", err);
    note_writes(model, s);
    note_saves(model, s);
    note_flags(model, s);
    return MSC_OK;
}

/* ---- what follows for modules --------------------------------------------------------------------- */

/* Everything that counts against a module, over its calls. */
typedef struct evidence {
    uint32_t flags;
    uint8_t notes;
    bool live;  /* a call has a region that recomputes */
    bool early; /* a call's saves are used before it ends */
    bool late;  /* a call does not lie in forward */
} evidence;

static evidence collect(const msc__model *model, const survey *s, uint32_t module)
{
    evidence found = {.flags = model->modules[module].flags};
    uint32_t i;

    for (i = s->calls.first[module]; i < s->calls.first[module + 1]; i++) {
        uint32_t c = s->calls.items[i];
        found.flags |= s->flags[c] & ~(uint32_t)MSC_MODULE_ROOT;
        found.notes |= s->notes[c];
        found.live |= model->regions[c].live;
        found.early |= model->regions[c].early;
        found.late |= model->regions[c].end > model->forward_end;
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
        {(found->flags & MSC_MODULE_EXCLUDED) != 0, MSC_RULE_EXCLUDED},
        {(found->flags & MSC_MODULE_NO_FORWARD) != 0, MSC_RULE_NO_FORWARD},
        {(found->flags & MSC_MODULE_PYTHON_STATE) != 0, MSC_RULE_PYTHON_STATE},
        {(found->flags & MSC_MODULE_NOT_TENSORS) != 0, MSC_RULE_NOT_TENSORS},
        {(found->flags & MSC_MODULE_HOOKED) != 0, MSC_RULE_HOOKED},
        {found->late, MSC_RULE_NO_FORWARD},
        {(found->notes & NOTE_WRITES_OUTSIDE) != 0, MSC_RULE_WRITES_OUTSIDE},
        {(found->notes & NOTE_INPUT_CHANGED) != 0, MSC_RULE_INPUT_CHANGED},
        {(found->notes & NOTE_USED) == 0, MSC_RULE_NO_BACKWARD},
        {!found->live || found->early, MSC_RULE_NO_SAVING},
    };
    size_t i;

    for (i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].applies)
            return rows[i].rule;
    return MSC_RULE_NOT_NEEDED;
}

static void add_candidate(msc__model *model, const survey *s, uint32_t module)
{
    msc__candidate *candidate = &model->candidates[model->candidate_count];
    uint32_t i;

    candidate->module = module;
    candidate->first_region = model->region_count;
    for (i = s->calls.first[module]; i < s->calls.first[module + 1]; i++)
        if (model->regions[s->calls.items[i]].live)
            model->region_calls[model->region_count++] = s->calls.items[i];
    candidate->region_count = model->region_count - candidate->first_region;
    candidate->cost_ns = msc__cost_candidate(model, candidate);
    candidate->usable = 1;
    model->subjects[module].candidate = model->candidate_count++;
}

static void judge_modules(msc__model *model, const survey *s)
{
    uint32_t m;

    for (m = 0; m < model->call_count; m++)
        model->subjects[model->calls[m].module].call_count++;
    for (m = 0; m < model->module_count; m++) {
        msc__subject *subject = &model->subjects[m];
        evidence found = collect(model, s, m);
        subject->candidate = MSC_NONE;
        subject->has_saves = (found.notes & NOTE_SAVES) != 0;
        subject->rule = (uint8_t)judge(&found);
        if (subject->rule == MSC_RULE_NOT_NEEDED)
            add_candidate(model, s, m);
    }
}

/* ---- who contains whom ---------------------------------------------------------------------------- */

/* Pairs of `upper` with every candidate below it, once each, by stamping. All calls of the module count, even
 * those that recompute nothing: they, too, would be the region that what lies inside belongs to. */
static void add_pairs(msc__model *model, const survey *s, uint32_t *stamp, uint32_t upper)
{
    uint32_t module = model->candidates[upper].module;
    uint32_t i;
    uint32_t c;

    for (i = s->calls.first[module]; i < s->calls.first[module + 1]; i++) {
        uint32_t call = s->calls.items[i];
        for (c = call + 1; c <= model->last_call[call]; c++) {
            uint32_t lower = model->subjects[model->calls[c].module].candidate;
            if (lower == MSC_NONE || lower == upper || stamp[lower] == upper + 1)
                continue;
            stamp[lower] = upper + 1;
            msc__buckets_add(&model->below, upper, lower);
            msc__buckets_add(&model->above, lower, upper);
        }
    }
}

static msc_status pair_candidates(msc__model *model, const survey *s, msc_error *err)
{
    msc__scratch *scratch = &model->scratch;
    uint32_t *stamp = msc__scratch_take(scratch, model->candidate_count, sizeof *stamp);
    int pass;
    uint32_t i;

    if (stamp == NULL)
        return msc__scratch_check(scratch, "candidates", err);
    msc__buckets_init(scratch, &model->above, model->candidate_count);
    msc__buckets_init(scratch, &model->below, model->candidate_count);
    for (pass = 0; pass < 2; pass++) {
        memset(stamp, 0, model->candidate_count * sizeof *stamp);
        for (i = 0; i < model->candidate_count; i++)
            add_pairs(model, s, stamp, i);
        if (pass == 0) {
            msc__buckets_place(scratch, &model->above);
            msc__buckets_place(scratch, &model->below);
        }
    }
    return msc__scratch_check(scratch, "candidates", err);
}

msc_status msc__model_judge(msc__model *model, msc_error *err)
{
    survey s = {0};
    msc_status status = survey_graph(model, &s, err);

    if (status != MSC_OK)
        return status;
    judge_modules(model, &s);
    return pair_candidates(model, &s, err);
}

/* ---- groups --------------------------------------------------------------------------------------- */

/* A candidate on its way into a group. */
typedef struct keyed {
    uint64_t key;
    uint32_t first_call;
    uint32_t candidate;
} keyed;

static int compare_keyed(const void *left, const void *right)
{
    const keyed *a = left;
    const keyed *b = right;

    if (a->key != b->key)
        return a->key < b->key ? -1 : 1;
    if (a->first_call != b->first_call)
        return a->first_call < b->first_call ? -1 : 1;
    return (a->candidate > b->candidate) - (a->candidate < b->candidate);
}

/* splitmix64's finisher: spreads small differences over all bits. */
static uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

/* Per module a number that is equal for modules of equal structure below parents of equal numbers. A module
 * of unknown structure is like no other. Two numbers that are equal by accident cost quality, not truth: a
 * group only says which moves are tried first. */
static void fill_chains(const msc__model *model, uint64_t *chains)
{
    uint32_t m;

    for (m = 0; m < model->module_count; m++) {
        const msc_module *module = &model->modules[m];
        uint64_t above = module->parent == MSC_NONE ? 0 : chains[module->parent];
        uint64_t own = module->structure != 0 ? mix(module->structure) : ~(uint64_t)m;
        chains[m] = mix(above + own);
    }
}

static uint32_t sort_usable(const msc__model *model, const uint64_t *chains, keyed *list)
{
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < model->candidate_count; i++) {
        const msc__candidate *candidate = &model->candidates[i];
        if (!candidate->usable)
            continue;
        list[count].key = chains[candidate->module];
        list[count].first_call = model->region_calls[candidate->first_region];
        list[count].candidate = i;
        count++;
    }
    if (count > 0)
        qsort(list, count, sizeof *list, compare_keyed);
    return count;
}

msc_status msc__model_group(msc__model *model, msc_error *err)
{
    msc__scratch *scratch = &model->scratch;
    uint64_t *chains = msc__scratch_take(scratch, model->module_count, sizeof *chains);
    keyed *list = msc__scratch_take(scratch, model->candidate_count, sizeof *list);
    int pass;
    uint32_t i;

    if (scratch->failed_bytes > 0)
        return msc__scratch_check(scratch, "groups of candidates", err);
    fill_chains(model, chains);
    model->usable_count = sort_usable(model, chains, list);
    model->group_count = 0;
    for (i = 0; i < model->usable_count; i++) {
        if (i == 0 || list[i].key != list[i - 1].key)
            model->group_count++;
        model->candidates[list[i].candidate].group = model->group_count - 1;
    }
    msc__buckets_init(scratch, &model->members, model->group_count);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < model->usable_count; i++)
            msc__buckets_add(&model->members, model->candidates[list[i].candidate].group, list[i].candidate);
        if (pass == 0)
            msc__buckets_place(scratch, &model->members);
    }
    return msc__scratch_check(scratch, "groups of candidates", err);
}
