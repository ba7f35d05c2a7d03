/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs: siblings that a chain calls one after another, checkpointed as one.
 *
 * A layer that saves little but its input gains nothing from a checkpoint of its own, for that holds the same
 * input. Several such layers together hold one input and free the rest:
 *
 *      chain       [ l0 ][ l1 ][ l2 ][ l3 ][ l4 ][ l5 ][ l6 ][ l7 ]
 *      runs of 2   [     |     ][    |     ][    |     ][    |     ]
 *      runs of 3   [     |      |    ][    |      |    ][    |     ]
 *      …
 *
 * Of a short chain every run is a candidate; of a long one those of some lengths, each at multiples of its
 * length: together they hold every even division, and mixtures of them. What must not run twice splits the
 * chain. A chain that is called more than once is left alone, and so are children that are called elsewhere.
 *
 * Cost: n log n regions for n children, each as long as it is.
 */
#include "base/error.h"
#include "base/invariant.h"
#include "decide/decide_survey.h"

#define SHORT_CHAIN 12u /* children: n (n - 1) / 2 runs */

#define BARS_RUN                                                                                             \
    (MSC_MODULE_PYTHON_STATE | MSC_MODULE_NO_FORWARD | MSC_MODULE_NOT_TENSORS | MSC_MODULE_EXCLUDED |        \
     MSC_MODULE_HOOKED | MSC_MODULE_NO_ROOM | MSC_MODULE_INPUT_CHANGED | MSC_MODULE_LEFT_OUT |               \
     MSC_MODULE_DIFFERED | MSC_MODULE_SCRIPTED)

/* Children of one chain that may be run together: calls[0 .. count - 1] follow each other without a gap. */
typedef struct part {
    const uint32_t *calls;
    uint32_t count;
} part;

static msc_status add_run(msc__model *model, const msc__survey *s, const part *p, uint32_t first,
                          uint32_t length, msc_error *err)
{
    msc__candidate candidate = {
        .base = MSC_NONE, .next = MSC_NONE, .also = MSC_NONE, .region_count = 1, .is_run = 1};
    msc__region region =
        msc__region_of_call(model->graph, p->calls[first], model->last_call[p->calls[first]]);
    uint8_t notes;
    uint32_t i;

    MSC__ASSERT(length >= 2 && first + length <= p->count);
    for (i = 1; i < length; i++) {
        uint32_t call = p->calls[first + i];
        msc__region_extend(&region, model->graph, call, model->last_call[call]);
    }
    msc__model_fill_region(model, &candidate, &region);
    if (!region.live || region.early)
        return MSC_OK;
    notes = msc__survey_region(model, s, &region);
    if ((notes & (MSC__NOTE_WRITES_OUTSIDE | MSC__NOTE_INPUT_CHANGED)) != 0)
        return MSC_OK;
    candidate.module = model->calls[p->calls[first]].module;
    return msc__model_add(model, &candidate, &region, err);
}

static msc_status add_all(msc__model *model, const msc__survey *s, const part *p, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t length;
    uint32_t first;

    for (length = 2; length <= p->count; length++)
        for (first = 0; first + length <= p->count && status == MSC_OK; first++)
            status = add_run(model, s, p, first, length, err);
    return status;
}

/* 2, 3, 4, 6, 8, 12, 16, … */
static uint32_t next_length(uint32_t length)
{
    return (length & (length - 1)) == 0 && length > 2 ? length / 2 * 3 : length == 2 ? 3 : length / 3 * 4;
}

static msc_status add_some(msc__model *model, const msc__survey *s, const part *p, msc_error *err)
{
    msc_status status = MSC_OK;
    uint32_t length;
    uint32_t first;

    for (length = 2; length <= p->count / 2; length = next_length(length))
        for (first = 0; first + 1 < p->count && status == MSC_OK; first += length)
            status = add_run(model, s, p, first, length < p->count - first ? length : p->count - first, err);
    return status;
}

static bool may_join(const msc__model *model, const msc__survey *s, uint32_t call)
{
    return (s->flags[call] & BARS_RUN) == 0 && model->calls[call].end <= model->forward_end &&
           model->subjects[model->calls[call].module].call_count == 1;
}

/* Splits the children of a chain's call into parts. */
static msc_status add_chain(msc__model *model, const msc__survey *s, uint32_t chain, uint32_t *room,
                            msc_error *err)
{
    part p = {.calls = room};
    msc_status status = MSC_OK;
    uint32_t c;

    for (c = chain + 1; c <= model->last_call[chain] && status == MSC_OK; c = model->last_call[c] + 1) {
        bool fits = may_join(model, s, c);
        bool follows = p.count > 0 && model->calls[room[p.count - 1]].end == model->calls[c].begin;
        if (p.count > 0 && (!fits || !follows)) {
            status = p.count <= SHORT_CHAIN ? add_all(model, s, &p, err) : add_some(model, s, &p, err);
            p.count = 0;
        }
        if (fits)
            room[p.count++] = c;
    }
    if (status == MSC_OK && p.count > 1)
        status = p.count <= SHORT_CHAIN ? add_all(model, s, &p, err) : add_some(model, s, &p, err);
    return status;
}

msc_status msc__model_add_runs(msc__model *model, const msc__survey *s, msc_error *err)
{
    msc__scratch scratch = {.ctx = model->scratch.ctx};
    uint32_t *room = msc__scratch_take(&scratch, model->call_count, sizeof *room);
    msc_status status = msc__scratch_check(&scratch, "runs of siblings", err);
    uint32_t m;

    for (m = 0; m < model->module_count && status == MSC_OK; m++) {
        uint32_t flags = model->modules[m].flags;
        if ((flags & MSC_MODULE_CHAIN) == 0 || (flags & MSC_MODULE_HOOKED) != 0 ||
            model->subjects[m].call_count != 1)
            continue;
        status = add_chain(model, s, s->calls.items[s->calls.first[m]], room, err);
    }
    msc__scratch_fini(&scratch);
    return status;
}
