/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_fit_build.h
 * The fit under construction: what its two building files share.
 *
 * decide_fit_build.c   slots, the plain step, segments
 * decide_fit_lists.c   what regions change: holds of buffers, points, touches
 */
#ifndef MSC_DECIDE_FIT_BUILD_H
#define MSC_DECIDE_FIT_BUILD_H

#include "decide/decide_internal.h"

/** Working arrays, gone when the tables are built. */
typedef struct msc__fit_builder {
    msc__fit *fit;
    const msc__model *model;
    msc__scratch scratch;
    int64_t *live_bytes;          /**< per slot */
    uint8_t *marks;               /**< per slot: a segment begins here */
    uint8_t *is_region;           /**< per call: it is a candidate's */
    uint32_t *index_of;           /**< per buffer: in fit->buffers, plus 1; 0: its end is fixed */
    uint32_t *stamps;             /**< per buffer: last region that listed it, plus 1 */
    uint32_t *redo_end;           /**< per buffer: while one region is looked at */
    uint64_t *expire_bytes;       /**< per position: likewise */
    msc__buckets saves_by_buffer; /**< all saves, by buffer */
    msc__buckets holders;         /**< regions that have the buffer as an input, by buffer */
} msc__fit_builder;

/** Slot at which a position begins: behind the operation before it and the frees of the position. */
static inline uint32_t msc__fit_slot_at(const msc__fit_builder *b, uint32_t position)
{
    return position == 0 ? 1 : b->fit->op_slot[position - 1] + 1;
}

static inline int64_t msc__fit_size_of(const msc__fit_builder *b, uint32_t buffer)
{
    return (int64_t)msc__model_bytes(b->model, b->model->buffers[buffer].size_bytes);
}

/** Fills `saves_by_buffer` and `holders`. A failure shows in `scratch`. */
void msc__fit_count_holds(msc__fit_builder *b);

/** Lists each buffer whose end a set can change, with its holds, whose segments are slots for now. */
msc_status msc__fit_add_buffers(msc__fit_builder *b, const uint32_t *plain_ends, msc_error *err);

/** Lists the points, at slots for now, and the touched buffers of each region. After the buffers. */
msc_status msc__fit_add_regions(msc__fit_builder *b, msc_error *err);

#endif /* MSC_DECIDE_FIT_BUILD_H */
