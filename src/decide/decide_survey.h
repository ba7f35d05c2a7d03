/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_survey.h
 * What the graph says against recomputing calls, and what finds the candidates by it: decide_survey.c,
 * decide_candidates.c, decide_chains.c, decide_variants.c, decide_offload.c and decide_overlaps.c.
 */
#ifndef MSC_DECIDE_SURVEY_H
#define MSC_DECIDE_SURVEY_H

#include "decide/decide_model.h"

/** Notes on a call. */
enum {
    MSC__NOTE_SAVES = 1u << 0,          /**< something is saved inside */
    MSC__NOTE_USED = 1u << 1,           /**< something saved inside is used in backward */
    MSC__NOTE_WRITES_OUTSIDE = 1u << 2, /**< something from outside is changed inside */
    MSC__NOTE_INPUT_CHANGED = 1u << 3   /**< something from outside that it reads changes before the redo */
};

/** What the graph says of calls; gone when the candidates are known. */
typedef struct msc__survey {
    msc__scratch scratch;
    uint8_t *notes;      /**< per call: MSC__NOTE_… */
    uint32_t *flags;     /**< per call: MSC_MODULE_… of the modules called inside it */
    msc__buckets writes; /**< indices of writes, by buffer, in program order; module buffers left out */
    msc__buckets calls;  /**< outermost calls by module */
} msc__survey;

/** Fills the survey. `msc__survey_fini` is due in any case. Errors: ENOMEM. */
msc_status msc__survey_init(msc__survey *s, const msc__model *model, msc_error *err);
void msc__survey_fini(msc__survey *s);

/** Whether a buffer is written in operations from … to - 1. */
bool msc__is_written(const msc__model *model, const msc__survey *s, uint32_t buffer, uint32_t from,
                     uint32_t to);

/** What speaks for and against running a region again: MSC__NOTE_…. Cost: its operations and saves. */
uint8_t msc__survey_region(const msc__model *model, const msc__survey *s, const msc__region *region);

/** Appends a candidate and its regions; what follows from the regions is filled in. Errors: ENOMEM. */
msc_status msc__model_add(msc__model *model, const msc__candidate *candidate, const msc__region *regions,
                          msc_error *err);

/** Notes all saves inside a region that a candidate drops, and settles it. */
void msc__model_fill_region(const msc__model *model, const msc__candidate *candidate, msc__region *region);

/** Adds the runs of siblings that may be checkpointed as one. Errors: ENOMEM. */
msc_status msc__model_add_runs(msc__model *model, const msc__survey *s, msc_error *err);

/** Adds, per candidate, ways to keep some outputs. Errors: ENOMEM. */
msc_status msc__model_add_variants(msc__model *model, const msc__survey *s, msc_error *err);

/** Adds, per candidate, the one that moves its boundary, and per module the one that moves what it saves.
 *  Errors: ENOMEM. */
msc_status msc__model_add_offloads(msc__model *model, const msc__survey *s, const msc_decide_options *options,
                                   msc_error *err);

/** Fills `above` and `below`. Errors: ENOMEM. */
msc_status msc__model_pair(msc__model *model, const msc__survey *s, msc_error *err);

#endif /* MSC_DECIDE_SURVEY_H */
