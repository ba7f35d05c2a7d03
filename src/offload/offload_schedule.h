/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file offload_schedule.h
 * In which order blocks come back: recorded in one step, expected in the next.
 *
 * A block is known by its ordinal, the number of puts before it in its step: steps of a training run put the
 * same things in the same order. What was used when is recorded, and becomes the expectation of the next step:
 *
 *      step 1    puts 0 1 2 3    used 3 1 2 0    expected 3 2 1 0, the reverse of the puts
 *      step 2    puts 0 1 2 3    used …          expected 3 1 2 0
 *
 * A step whose puts differ in size, or in number at the first use, from those of the step before (another batch,
 * another branch) is expected in reverse again. Puts may follow uses: gradients, which leave in backward. A use that
 * was not expected is followed from where it stands in the expectation.
 *
 * Nothing depends on a right guess except time. Threads: one at a time; the engine holds its mutex.
 */
#ifndef MSC_OFFLOAD_SCHEDULE_H
#define MSC_OFFLOAD_SCHEDULE_H

#include <stdbool.h>

#include "base/array.h"

/** All zero: nothing recorded. */
typedef struct msc__schedule {
    msc__array bytes;  /* uint64_t: ordinal → size, this step */
    msc__array uses;   /* uint32_t: position → ordinal, this step */
    msc__array known;  /* uint64_t: ordinal → size, the step before */
    msc__array order;  /* uint32_t: position → ordinal, the step before */
    msc__array places; /* uint32_t: ordinal → its first position in `order`, or MSC_NONE */
    uint32_t position; /* in `order`: what is expected next */
    uint32_t before;   /* puts before the first use, this step */
    uint32_t expected; /* and in the step before */
    bool differs;      /* the puts of this step are not those of the step before */
    bool surprised;    /* a use was not the expected one */
} msc__schedule;

void msc__schedule_fini(msc_context *ctx, msc__schedule *schedule);

/** A block is put. Returns its ordinal in `ordinal`. Errors: ENOMEM, with nothing changed. */
msc_status msc__schedule_put(msc_context *ctx, msc__schedule *schedule, uint64_t bytes, uint32_t *ordinal,
                             msc_error *err);

/** A block is used. Without memory for the record, the next step expects the reverse order. */
void msc__schedule_use(msc_context *ctx, msc__schedule *schedule, uint32_t ordinal);

/** A walk along what is expected after the latest use. Before the first use it begins with what is expected first. */
typedef struct msc__schedule_walk {
    const uint32_t *order; /* NULL: down to ordinal 0 */
    uint32_t left;
} msc__schedule_walk;

/** Begins a walk, which lasts until the schedule changes. */
msc__schedule_walk msc__schedule_ahead(const msc__schedule *schedule);

/** The next ordinal; MSC_NONE at the end. */
static inline uint32_t msc__schedule_next(msc__schedule_walk *walk)
{
    if (walk->left == 0)
        return MSC_NONE;
    walk->left--;
    return walk->order != NULL ? *walk->order++ : walk->left;
}

/** A step begins. Returns whether the step that ended was as expected. */
bool msc__schedule_step(msc_context *ctx, msc__schedule *schedule);

/** A step begins, and what was put since the one before was no step: its order stays the expected one. */
void msc__schedule_forget(msc__schedule *schedule);

#endif /* MSC_OFFLOAD_SCHEDULE_H */
