/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_fit_build.h
 * The fit under construction: what its building files share.
 *
 * decide_fit_build.c    slots, the plain step, segments
 * decide_fit_lists.c    what holds buffers, and which buffers a region touches
 * decide_fit_points.c   what a region changes by itself
 */
#ifndef MSC_DECIDE_FIT_BUILD_H
#define MSC_DECIDE_FIT_BUILD_H

#include "base/invariant.h"
#include "decide/decide_fit.h"

/** In is_region: the call lies in a run, and any save of it may be dropped. */
#define MSC__IN_RUN 2u

/** Working arrays, gone when the tables are built. */
typedef struct msc__fit_builder {
    msc__fit *fit;
    const msc__model *model;
    msc__scratch scratch;
    int64_t *live_bytes;          /**< per slot */
    uint8_t *marks;               /**< per slot: a segment begins here */
    uint8_t *is_region;           /**< per call: it lies in a candidate's region, or is one */
    uint32_t *index_of;           /**< per buffer: in fit->buffers, plus 1; 0: its end is fixed */
    uint32_t *stamps;             /**< per buffer: last region that listed it, plus 1 */
    uint32_t *owner;              /**< per region: its candidate */
    uint32_t *redo_end;           /**< per buffer: while one region is looked at */
    uint64_t *expire_bytes;       /**< per position: likewise */
    msc__buckets saves_by_buffer; /**< all saves, by buffer */
    msc__buckets holders;         /**< regions that have the buffer as an input, by buffer */
    msc__buckets keepers;         /**< regions that keep the buffer, by buffer */
    msc__buckets movers;          /**< regions that move the buffer, by buffer */
    msc__buckets by_call;         /**< regions by the call that they begin with */
} msc__fit_builder;

/** Slot at which a position begins: behind the operation before it and the frees of the position. */
static inline uint32_t msc__fit_slot_at(const msc__fit_builder *b, uint32_t position)
{
    MSC__ASSERT(position <= b->model->op_count + 1);
    return position == 0 ? 1 : b->fit->op_slot[position - 1] + 1;
}

static inline int64_t msc__fit_size_of(const msc__fit_builder *b, uint32_t buffer)
{
    return (int64_t)msc__model_bytes(b->model, b->model->buffers[buffer].size_bytes);
}

/** The candidate that a region belongs to. */
static inline const msc__candidate *msc__fit_owner(const msc__fit_builder *b, uint32_t region)
{
    MSC__ASSERT(region < b->model->region_count);
    return &b->model->candidates[b->owner[region]];
}

/** Whether a region keeps a buffer: made inside it by an operation that it keeps. */
static inline bool msc__fit_keeps(const msc__fit_builder *b, uint32_t r, uint32_t buffer)
{
    const msc__region *region = &b->model->regions[r];

    return msc__is_made_inside(&b->model->buffers[buffer], region) &&
           msc__keeps(b->model, msc__fit_owner(b, r), region, b->model->buffers[buffer].begin);
}

/** Fills `saves_by_buffer`, `holders` and `keepers`. A failure shows in `scratch`. */
void msc__fit_count_holds(msc__fit_builder *b);

/** Lists each buffer whose end a set can change, with its holds, whose segments are slots for now. */
msc_status msc__fit_add_buffers(msc__fit_builder *b, const uint32_t *plain_ends, msc_error *err);

/** Lists the touched buffers of each region. After the buffers. */
msc_status msc__fit_add_touches(msc__fit_builder *b, msc_error *err);

/** Lists the points of each region, at slots for now. */
msc_status msc__fit_add_points(msc__fit_builder *b, msc_error *err);

#endif /* MSC_DECIDE_FIT_BUILD_H */
