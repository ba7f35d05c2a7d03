/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_look_ahead.h
 * How much of what is offloaded a plan lets come back early, seen from the trace of its step.
 */
#ifndef MSC_SIM_LOOK_AHEAD_H
#define MSC_SIM_LOOK_AHEAD_H

#include "memscale/replay.h"

/**
 * Gives each choice of a plan the most bytes that may come back early while no moment of the step takes more than
 * the step's peak.
 *
 * @param trace         of the plan as it is, its choices without such bytes.
 * @param granule_bytes of the allocator: sizes count as multiples of it.
 * Errors: ENOMEM.
 * Cost: events + moves.
 */
msc_status msc__plan_look_ahead(msc_context *ctx, const msc_graph *graph, msc_plan *plan,
                                const msc_trace *trace, uint64_t granule_bytes, msc_error *err);

/** Takes that away again. */
void msc__plan_forget_ahead(msc_plan *plan);

#endif /* MSC_SIM_LOOK_AHEAD_H */
