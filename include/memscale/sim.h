/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim.h
 * The allocator simulator and the replay of a step.
 *
 * Two parts:
 *
 *  1. `msc_sim` behaves like an allocator without owning memory. Kind HOST is the CPU: live bytes and
 *     nothing else. Kind CUDA follows the rules of PyTorch's CUDA caching allocator: rounding, small and
 *     large pools, segments, best fit, splitting, coalescing, release and retry at the limit.
 *  2. `msc_trace` turns a graph and a plan into the sequence of allocations and frees that a step under
 *     that plan performs. It is the only place that knows what a technique does to lifetimes.
 *
 * Feeding 2 into 1 gives the peak. Prediction, decision and explanation all rest on this one replay.
 */
#ifndef MEMSCALE_SIM_H
#define MEMSCALE_SIM_H

#include "base.h"
#include "graph.h"
#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- allocator simulator ------------------------------------------------------------------------ */

typedef enum msc_sim_kind {
    MSC_SIM_HOST, /**< live bytes, exact sizes, no caching */
    MSC_SIM_CUDA, /**< PyTorch's CUDA caching allocator */
    MSC_SIM_KIND_COUNT
} msc_sim_kind;

/** Options of a simulator. The CUDA fields are those of PYTORCH_ALLOC_CONF. */
typedef struct msc_sim_options {
    size_t struct_bytes;
    msc_sim_kind kind;
    uint64_t capacity_bytes;               /**< device memory it may reserve; UINT64_MAX: no limit */
    uint64_t max_split_bytes;              /**< UINT64_MAX: unlimited (the default) */
    uint64_t max_non_split_rounding_bytes; /**< 20 MiB by default */
    uint64_t large_segment_bytes;          /**< 20 MiB by default */
    uint32_t roundup_power2_divisions;     /**< 0 or 1: off; otherwise a power of two, for every interval */
    uint8_t expandable_segments;           /**< 0 or 1 */
    uint8_t pad[3];                        /**< zero */
} msc_sim_options;

/** Statistics, named as in `torch.cuda.memory_stats`. For HOST, reserved equals allocated. */
typedef struct msc_sim_stats {
    uint64_t allocated_now_bytes;
    uint64_t allocated_peak_bytes;
    uint64_t reserved_now_bytes;
    uint64_t reserved_peak_bytes;
    uint64_t requested_now_bytes;
    uint64_t requested_peak_bytes;
    uint64_t inactive_split_now_bytes;
    uint64_t segment_now_count;
    uint64_t segment_peak_count;
    uint64_t device_alloc_count;
    uint64_t device_free_count;
    uint64_t alloc_retry_count;
    uint64_t oom_count;
} msc_sim_stats;

typedef struct msc_sim msc_sim;

MSC_API msc_sim_options msc_sim_options_default(msc_sim_kind kind);

/** Creates an empty simulator. Errors: EINVAL (names the field), ENOMEM. */
MSC_API msc_status msc_sim_create(msc_context *ctx, const msc_sim_options *options, msc_sim **out,
                                  msc_error *err);
MSC_API void msc_sim_destroy(msc_sim *sim);

/** Forgets everything but the options; keeps its memory for the next run. */
MSC_API void msc_sim_reset(msc_sim *sim);

/**
 * Allocates `size_bytes` under the caller's `id`, which must not be in use.
 *
 * Ids index a table, so they should be dense. Zero bytes is a success that takes no memory.
 * Errors: EDEVMEM (capacity; the message names request, reserved and capacity; the state is as after
 * PyTorch's own failed attempt, caches released), EINVAL (id in use), ENOMEM.
 * Cost: a few ten nanoseconds; allocates host memory only to grow tables.
 */
MSC_API msc_status msc_sim_alloc(msc_sim *sim, uint32_t id, uint64_t size_bytes, uint32_t stream,
                                 msc_error *err);

/** Frees an id. Errors: EINVAL (not in use). */
MSC_API msc_status msc_sim_free(msc_sim *sim, uint32_t id, msc_error *err);

/** Gives every unused segment back, as `torch.cuda.empty_cache`. */
MSC_API void msc_sim_empty_cache(msc_sim *sim);

/** Starts peaks anew from the present values, as `reset_peak_memory_stats`. */
MSC_API void msc_sim_reset_peaks(msc_sim *sim);

MSC_API msc_sim_stats msc_sim_get_stats(const msc_sim *sim);

/** Checks every invariant of the whole structure; the message names the first that fails. Errors: EINTERNAL.
 */
MSC_API msc_status msc_sim_validate(const msc_sim *sim, msc_error *err);

/* ---- a step as events --------------------------------------------------------------------------- */

typedef enum msc_event_kind {
    MSC_EVENT_ALLOC,
    MSC_EVENT_FREE,
    MSC_EVENT_OP,        /**< an operation starts; `id` is its index in the graph */
    MSC_EVENT_RECOMPUTE, /**< the same, inside a recompute */
    MSC_EVENT_KIND_COUNT
} msc_event_kind;

/** One event of a derived step: 16 bytes. */
typedef struct msc_event {
    uint64_t size_bytes; /**< ALLOC, FREE: size; otherwise 0 */
    uint32_t id;         /**< ALLOC, FREE: instance id, dense from 0; otherwise operation index */
    uint8_t kind;        /**< msc_event_kind */
    uint8_t category;    /**< msc_category of the instance */
    uint16_t pad;        /**< zero */
} msc_event;

typedef struct msc_trace msc_trace;

/**
 * Derives the events of one step under a plan.
 *
 * What is resident is allocated first, in buffer order. Each operation then gives its event, the
 * allocation of its outputs in buffer order, allocation and free of its scratch, and the frees that
 * follow it in buffer order. What a checkpoint does is written at the top of src/sim/sim_trace.c. Buffers
 * that outlive the step are not freed.
 *
 * @param plan NULL for the plain step.
 * Errors: ESTATE (graph not finished), EINVAL (the plan names a module that the graph has not), ENOMEM,
 * EOVERFLOW.
 */
MSC_API msc_status msc_trace_create(msc_context *ctx, const msc_graph *graph, const msc_plan *plan,
                                    msc_trace **out, msc_error *err);
MSC_API void msc_trace_destroy(msc_trace *trace);
MSC_API const msc_event *msc_trace_events(const msc_trace *trace);
MSC_API uint64_t msc_trace_event_count(const msc_trace *trace);
MSC_API uint32_t msc_trace_instance_count(const msc_trace *trace); /**< ids are below it */

/** Where a replay peaked and what it saw on the way. */
typedef struct msc_replay {
    msc_sim_stats stats; /**< after the last event */
    uint64_t peak_bytes; /**< HOST: allocated peak; CUDA: reserved peak */
    uint64_t peak_event; /**< index of the ALLOC at which allocated bytes peaked first */
    uint32_t peak_op;    /**< operation running then; op count: before the first */
    uint8_t peak_in_recompute;
    uint8_t pad[3];
    uint64_t category_peak_bytes[MSC_CATEGORY_COUNT]; /**< live bytes per category at that moment */
} msc_replay;

/**
 * Plays a trace into a simulator, which is reset first.
 *
 * @param live     optional: allocated bytes while each OP or RECOMPUTE event ran (its highest value), in
 *                 event order; `live_count` entries at most are written.
 * Errors: EDEVMEM (capacity), ENOMEM.
 */
MSC_API msc_status msc_trace_replay(const msc_trace *trace, msc_sim *sim, uint64_t *live, size_t live_count,
                                    msc_replay *out, msc_error *err);

/** Number of OP and RECOMPUTE events, the length that `live` needs. */
MSC_API uint64_t msc_trace_op_event_count(const msc_trace *trace);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_SIM_H */
