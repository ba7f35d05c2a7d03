/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_derive.h
 * What happens at which position of a step under a plan: all that the walk of sim_trace.c reads.
 */
#ifndef MSC_SIM_DERIVE_H
#define MSC_SIM_DERIVE_H

#include "base/invariant.h"
#include "sim/sim_buckets.h"
#include "sim/sim_moves.h"

/** As an end: the instance goes when the recompute ends. */
#define MSC__WITH_RECOMPUTE UINT32_MAX

/** Everything that the walk reads. An *object* is a forward instance (b), a recomputed one (buffers + b), a
 * state (2 × buffers + region) or an instance that came back (2 × buffers + regions + move). */
typedef struct msc__derivation {
    const msc_op *ops;
    const msc_buffer *buffers;
    uint32_t op_count;
    uint32_t buffer_count;
    uint64_t staging_bytes; /**< held from before the step on; 0: none */
    msc__plan_regions plan;
    uint32_t *end;         /**< per buffer: of the forward instance; MSC__WITH_RECOMPUTE: kept until then */
    uint32_t *redo_end;    /**< per buffer: latest release of used internal saves, 0: none */
    msc__buckets begins;   /**< buffers by begin, those that each run makes */
    msc__buckets arrivals; /**< and those that come with an operation's first run, and are not resident */
    msc__buckets frees;    /**< objects by the position at which they are freed */
    msc__buckets expires;  /**< buffers by the position inside the recompute at which they are freed */
    msc__buckets starts;   /**< live regions by begin */
    msc__buckets redos;    /**< live regions by redo, later calls first */
    msc__buckets puts;     /**< moves by put */
    msc__buckets drops;    /**< moves by release */
    msc__buckets returns;  /**< moves by the position at which they come back */
} msc__derivation;

/** Whether an operation's outputs are kept for a recompute, which then leaves it out. */
static inline bool msc__op_is_kept(const msc__derivation *d, uint32_t op)
{
    return d->plan.kept[op] != 0;
}

/** The object of an instance that came back. */
static inline uint32_t msc__returned_object(const msc__derivation *d, uint32_t move)
{
    MSC__ASSERT(move < d->plan.move_count);
    return 2 * d->buffer_count + d->plan.count + move;
}

/** Of a recomputed instance: its saves hold it beyond the recompute. */
static inline bool msc__redo_is_held(const msc__derivation *d, uint32_t buffer)
{
    return d->redo_end[buffer] > 0 && d->redo_end[buffer] != MSC__WITH_RECOMPUTE;
}

/** Of a recomputed instance: it goes while the recompute still runs. */
static inline bool msc__redo_expires_inside(const msc__derivation *d, uint32_t buffer,
                                            const msc__region *region)
{
    return d->redo_end[buffer] == 0 && msc__natural_end(&d->buffers[buffer]) < region->stop &&
           !msc__op_is_kept(d, d->buffers[buffer].begin);
}

/**
 * Fills `*d`, which must be zeroed, from a finished graph and a plan or NULL. The arrays belong to `scratch`.
 * Errors: ENOMEM, EOVERFLOW.
 */
msc_status msc__derive(msc__derivation *d, msc__scratch *scratch, const msc_graph *graph,
                       const msc_plan *plan, msc_error *err);

#endif /* MSC_SIM_DERIVE_H */
