/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_fit.h
 * The exact host peak of a set of candidates, kept up to date as the set changes.
 *
 * decide_fit.c         the set, its peak, what it frees
 * decide_fit_build.c   the tables, with decide_fit_lists.c and decide_fit_points.c
 */
#ifndef MSC_DECIDE_FIT_H
#define MSC_DECIDE_FIT_H

#include "decide/decide_model.h"

#define MSC__FIT_BLOCK 64u /* segments per block */

/** A change of live bytes at a segment. */
typedef struct msc__fit_point {
    uint32_t segment;
    int64_t delta_bytes;
} msc__fit_point;

/** What may end a buffer late: the latest that applies does. */
typedef struct msc__fit_hold {
    uint32_t segment; /**< end of the buffer if this applies */
    uint32_t by;      /**< SAVE: the call that it was packed in; REGION: the region that holds it */
    uint32_t release; /**< SAVE: position */
    uint32_t kind;    /**< msc__fit_hold_kind */
} msc__fit_hold;

typedef enum msc__fit_hold_kind {
    MSC__FIT_ALWAYS,
    MSC__FIT_SAVE,  /**< unless the region that the buffer is made in drops the save, or another moves it */
    MSC__FIT_REGION /**< while the region is in the set, as an input of it, kept by it or on its way out */
} msc__fit_hold_kind;

/** A buffer whose end depends on the set. */
typedef struct msc__fit_buffer {
    int64_t size_bytes;
    uint32_t first_hold; /**< latest end first; the last one always applies */
    uint32_t end;        /**< segment at present */
    uint32_t plain_end;  /**< segment in the plain step */
    uint32_t home;       /**< active region that it is made in and does not keep it, or MSC_NONE */
    uint32_t mover;      /**< active region that moves it, with all saves on it, or MSC_NONE */
} msc__fit_buffer;

/** A region's part: fixed changes, and the buffers whose ends it affects. */
typedef struct msc__fit_region {
    uint32_t first_point;
    uint32_t point_count;
    uint32_t
        first_touch; /**< the first `home_count` are made and dropped in the region, the next `moved_count`
                               are moved, the rest are held */
    uint32_t touch_count;
    uint32_t home_count;
    uint32_t moved_count;
    uint32_t first_away; /**< of `away`: when its moves are off the device */
    uint32_t away_count;
    uint64_t moved_bytes; /**< of all its moves */
} msc__fit_region;

/** What a block has above a level, remembered. */
typedef struct msc__fit_excess_of {
    int64_t sum; /**< changes before the block, less the level */
    uint64_t value;
    uint8_t known; /**< 0: the block has changed since */
} msc__fit_excess_of;

/** See decide_fit.c. */
typedef struct msc__fit {
    msc__scratch scratch; /**< owns every array below */
    const msc__model *model;
    uint32_t *op_slot;    /**< per position 0 … op count */
    uint32_t *redo_slot;  /**< per region */
    uint32_t *segment_of; /**< per slot, and one beyond the last */
    uint32_t slot_count;
    uint32_t segment_count;
    uint32_t block_count;
    uint32_t plain_peak_segment;
    uint64_t plain_peak_bytes;
    int64_t *base_bytes;  /**< per segment: highest live bytes of the plain step */
    uint32_t *width;      /**< per segment: operations in it */
    int64_t *delta_bytes; /**< per segment: change against the one before it, by the set */
    int64_t *block_delta_bytes;
    int64_t *block_peak_bytes; /**< highest base + change, from the block's begin */
    uint8_t *block_stale;
    msc__fit_excess_of *block_excess;
    uint64_t floor_bytes;     /**< no set peaks below it */
    uint32_t excess_shift;    /**< keeps sums of bytes × operations within 64 bits */
    msc__array points;        /**< msc__fit_point */
    msc__array away;          /**< msc__fit_point: changes of what is off the device */
    int64_t *away_bytes;      /**< per segment: its change, by the set; NULL: nothing can be moved */
    uint64_t moved_bytes;     /**< by the set: at least the most that are offloaded at once */
    uint32_t rerun_count;     /**< candidates of the set that recompute anything */
    msc__array holds;         /**< msc__fit_hold */
    msc__array buffers;       /**< msc__fit_buffer */
    msc__array touches;       /**< uint32_t: index into `buffers` */
    msc__fit_region *regions; /**< parallel to the model's regions */
    uint8_t *active;          /**< per region: 1 while it is in the set */
} msc__fit;

/** Builds the tables for the empty set. `msc__fit_fini` is due in any case. Errors: ENOMEM, EOVERFLOW. */
msc_status msc__fit_init(msc__fit *fit, const msc__model *model, msc_error *err);
void msc__fit_fini(msc__fit *fit);

/** Adds a candidate to the set or takes it away. It must not be in already (or be in), nor overlap another.
 */
void msc__fit_set(msc__fit *fit, uint32_t candidate, bool active);

/** Instead of a peak: the set moves more than may be off the device at once. */
#define MSC__FIT_NO_PEAK UINT64_MAX

/** Highest live bytes of the step under the present set, staging not included, or MSC__FIT_NO_PEAK. */
uint64_t msc__fit_peak(msc__fit *fit);

/** What the present set holds all the time, on top of its peak: for what it moves, and for what it recomputes. */
static inline uint64_t msc__fit_staging(const msc__fit *fit)
{
    return (fit->moved_bytes > 0 ? fit->model->link.staging_bytes : 0) +
           (fit->rerun_count > 0 ? fit->model->rerun_bytes : 0);
}

/** Most bytes off the device at once under the present set. Cost: the segments. */
uint64_t msc__fit_away(const msc__fit *fit);

/** Bytes above a level, summed over operations, scaled. */
uint64_t msc__fit_excess(msc__fit *fit, uint64_t level_bytes);

/** By how much the set lowers live bytes at the begin of a segment; negative: it raises them. */
int64_t msc__fit_freed(const msc__fit *fit, uint32_t segment);

/** Whether what has been set since the peak was last asked for, with an empty set, lowers live bytes anywhere.
 */
bool msc__fit_lowers(const msc__fit *fit);

/** Most that a region, in whatever set, can take off the live bytes of a segment. */
int64_t msc__fit_most_freed(const msc__fit *fit, uint32_t region, uint32_t segment);

#endif /* MSC_DECIDE_FIT_H */
