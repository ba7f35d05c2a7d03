/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The survey: what the graph says against recomputing calls.
 *
 * Each record climbs from its call to the outermost one and leaves a note on every call that it concerns:
 *
 *      records            call 0   call 1   call 2
 *      write, outside 1     .        X        .        writes-outside for call 1 alone
 *      flag inside 2        f        .        f        for call 2 and what contains it, but for MSC_MODULE_LEFT_OUT
 *
 * Regions that are more than a call, or that keep parts, are looked at one by one.
 *
 * Cost: (saves + inputs + writes + calls) × nesting depth.
 */
#include "decide/decide_survey.h"

#include "base/error.h"
#include "base/invariant.h"

/* Flags that say nothing against the modules around. */
#define OF_ITSELF ((uint32_t)MSC_MODULE_LEFT_OUT)

/* ---- what the graph says of calls ------------------------------------------------------------------ */

static bool counts_as_write(const msc__model *model, uint32_t buffer)
{
    /* Module buffers are set aside and put back by the recompute. */
    return model->buffers[buffer].category != MSC_CATEGORY_BUFFER;
}

static void note_writes(const msc__model *model, msc__survey *s)
{
    uint32_t i;
    uint32_t c;

    for (i = 0; i < model->write_count; i++) {
        const msc_write *write = &model->writes[i];
        if (!counts_as_write(model, write->buffer))
            continue;
        for (c = model->ops[write->op].call; c != MSC_NONE; c = model->calls[c].parent)
            if (!msc__is_made_inside(&model->buffers[write->buffer], &model->call_regions[c]))
                s->notes[c] |= MSC__NOTE_WRITES_OUTSIDE;
    }
}

/* Whether a buffer is written in operations from … to - 1. */
bool msc__is_written(const msc__model *model, const msc__survey *s, uint32_t buffer, uint32_t from,
                     uint32_t to)
{
    uint32_t low = s->writes.first[buffer];
    uint32_t high = s->writes.first[buffer + 1];
    uint32_t end = high;

    MSC__ASSERT(from <= to && low <= high);
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
static void note_read(const msc__model *model, msc__survey *s, uint32_t buffer, uint32_t call)
{
    uint32_t c;

    if (s->writes.first[buffer] == s->writes.first[buffer + 1])
        return;
    for (c = call; c != MSC_NONE; c = model->calls[c].parent) {
        const msc__region *region = &model->call_regions[c];
        if (region->live && !msc__is_made_inside(&model->buffers[buffer], region) &&
            msc__is_written(model, s, buffer, region->begin, region->redo))
            s->notes[c] |= MSC__NOTE_INPUT_CHANGED;
    }
}

static void note_saves(const msc__model *model, msc__survey *s)
{
    uint32_t i;
    uint32_t c;

    for (i = 0; i < model->save_count; i++) {
        const msc_save *save = &model->saves[i];
        bool used = !msc__save_is_unused(save, model->op_count);
        note_read(model, s, save->buffer, save->call);
        for (c = save->call; c != MSC_NONE; c = model->calls[c].parent)
            s->notes[c] |= (uint8_t)(MSC__NOTE_SAVES | (used ? MSC__NOTE_USED : 0));
    }
    for (i = 0; i < model->input_count; i++)
        note_read(model, s, model->inputs[i].buffer, model->inputs[i].call);
}

static void note_flags(const msc__model *model, msc__survey *s)
{
    uint32_t c;

    for (c = model->call_count; c-- > 0;) {
        MSC__ASSERT(model->calls[c].parent == MSC_NONE || model->calls[c].parent < c);
        s->flags[c] |= model->modules[model->calls[c].module].flags;
        if (model->calls[c].parent != MSC_NONE)
            s->flags[model->calls[c].parent] |= s->flags[c] & ~OF_ITSELF;
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

static void fill_buckets(const msc__model *model, msc__survey *s)
{
    int pass;
    uint32_t i;

    msc__buckets_init(&s->scratch, &s->writes, model->buffer_count);
    msc__buckets_init(&s->scratch, &s->calls, model->module_count);
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < model->write_count; i++)
            if (counts_as_write(model, model->writes[i].buffer))
                msc__buckets_add(&s->writes, model->writes[i].buffer, i);
        for (i = 0; i < model->call_count; i++)
            if (is_outermost(model, i))
                msc__buckets_add(&s->calls, model->calls[i].module, i);
        if (pass == 0) {
            msc__buckets_place(&s->scratch, &s->writes);
            msc__buckets_place(&s->scratch, &s->calls);
        }
    }
}

msc_status msc__survey_init(msc__survey *s, const msc__model *model, msc_error *err)
{
    *s = (msc__survey){.scratch = {.ctx = model->scratch.ctx}};
    s->notes = msc__scratch_take(&s->scratch, model->call_count, sizeof *s->notes);
    s->flags = msc__scratch_take(&s->scratch, model->call_count, sizeof *s->flags);
    fill_buckets(model, s);
    if (s->scratch.failed_bytes > 0)
        return msc__scratch_check(&s->scratch, "candidates", err);
    note_writes(model, s);
    note_saves(model, s);
    note_flags(model, s);
    return MSC_OK;
}

void msc__survey_fini(msc__survey *s)
{
    msc__scratch_fini(&s->scratch);
}

/* ---- one region ----------------------------------------------------------------------------------- */

static bool writes_outside(const msc__model *model, const msc__region *region)
{
    uint32_t i;

    for (i = msc__first_write(model, region->begin);
         i < model->write_count && model->writes[i].op < region->end; i++)
        if (counts_as_write(model, model->writes[i].buffer) &&
            !msc__is_made_inside(&model->buffers[model->writes[i].buffer], region))
            return true;
    return false;
}

static bool changes_before_redo(const msc__model *model, const msc__survey *s, const msc__region *region,
                                uint32_t buffer)
{
    return !msc__is_made_inside(&model->buffers[buffer], region) &&
           msc__is_written(model, s, buffer, region->begin, region->redo);
}

uint8_t msc__survey_region(const msc__model *model, const msc__survey *s, const msc__region *region)
{
    uint8_t notes = writes_outside(model, region) ? MSC__NOTE_WRITES_OUTSIDE : 0;
    uint32_t i;

    MSC__ASSERT(region->first_call <= region->last_call && region->end <= region->redo);
    for (i = model->saves_by_call.first[region->first_call];
         i < model->saves_by_call.first[region->last_call + 1]; i++) {
        const msc_save *save = &model->saves[model->saves_by_call.items[i]];
        notes |= MSC__NOTE_SAVES;
        if (!msc__save_is_unused(save, model->op_count))
            notes |= MSC__NOTE_USED;
        if (changes_before_redo(model, s, region, save->buffer))
            notes |= MSC__NOTE_INPUT_CHANGED;
    }
    for (i = msc__first_input(model, region->first_call);
         i < model->input_count && model->inputs[i].call <= region->last_call; i++)
        if (changes_before_redo(model, s, region, model->inputs[i].buffer))
            notes |= MSC__NOTE_INPUT_CHANGED;
    return notes;
}
