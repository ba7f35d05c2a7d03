/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_trace.h
 * What the files of this folder know of a trace, and a replay of its simulator, beyond their public faces.
 */
#ifndef MSC_SIM_TRACE_H
#define MSC_SIM_TRACE_H

#include <stdbool.h>

#include "memscale/replay.h"

/** The context that the trace lives in. */
msc_context *msc__trace_context(const msc_trace *trace);

/** Operations of the graph: the `op` of an instance that is alive before the first. */
uint32_t msc__trace_op_count(const msc_trace *trace);

/** Whether an id is allocated, or freed and awaited. */
bool msc__sim_has(const msc_sim *sim, uint32_t id);

/** Reserved bytes at the moment. */
uint64_t msc__sim_reserved_now(const msc_sim *sim);

/**
 * Reserved peak of the steps that `msc_trace_replay` plays for CUDA, and nothing else: for a search that asks
 * this of many plans. Stops when the peak exceeds `most_bytes`; `peak_bytes` is then a value above it.
 * Errors: EDEVMEM (capacity), ENOMEM.
 */
msc_status msc__trace_reserved_peak(const msc_trace *trace, msc_sim *sim, uint64_t most_bytes,
                                    uint64_t *peak_bytes, msc_error *err);

/** Whether freed memory stays with the allocator, so that a step depends on the steps before. */
bool msc__sim_is_caching(const msc_sim *sim);

#endif /* MSC_SIM_TRACE_H */
