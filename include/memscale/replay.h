/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file replay.h
 * A step as a sequence of allocations and frees, and its replay.
 *
 * `msc_trace` turns a graph and a plan into the allocations and frees that a step under that plan performs.
 * It is the only place that knows what a technique does to lifetimes. Playing it into a simulator (sim.h)
 * gives the peak: prediction, decision and explanation all rest on this one replay.
 */
#ifndef MEMSCALE_REPLAY_H
#define MEMSCALE_REPLAY_H

#include "base.h"
#include "graph.h"
#include "plan.h"
#include "sim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- a step as events --------------------------------------------------------------------------- */

typedef enum msc_event_kind {
    MSC_EVENT_ALLOC,
    MSC_EVENT_FREE,
    MSC_EVENT_OP,        /**< an operation starts; `id` is its index in the graph */
    MSC_EVENT_RECOMPUTE, /**< the same, inside a recompute */
    MSC_EVENT_PUT,  /**< the copy of an instance out of the device begins: so many bytes more are offloaded */
    MSC_EVENT_DROP, /**< that copy is needed no longer: so many bytes fewer are offloaded */
    MSC_EVENT_KIND_COUNT
} msc_event_kind;

/** One event of a derived step: 16 bytes. */
typedef struct msc_event {
    uint64_t size_bytes; /**< OP, RECOMPUTE: 0; otherwise size */
    uint32_t id;         /**< OP, RECOMPUTE: operation index; otherwise instance id, dense from 0 */
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
 * follow it in buffer order. What a checkpoint does is written at the top of src/sim/sim_trace.c, what an offload
 * does at the top of src/sim/sim_moves.c; its windows are those of the plan's summary. Buffers
 * that outlive the step are not freed.
 *
 * @param plan NULL for the plain step.
 * Errors: ESTATE (graph not finished), EINVAL (the plan names a module that the graph has not), ENOMEM,
 * EOVERFLOW.
 */
MSC_API MSC_NODISCARD msc_status msc_trace_create(msc_context *ctx, const msc_graph *graph,
                                                  const msc_plan *plan, msc_trace **out, msc_error *err);
MSC_API void msc_trace_destroy(msc_trace *trace);
MSC_API const msc_event *msc_trace_events(const msc_trace *trace);
MSC_API uint64_t msc_trace_event_count(const msc_trace *trace);
MSC_API uint32_t msc_trace_instance_count(const msc_trace *trace); /**< ids are below it */

/** What an instance id of a trace stands for. */
typedef struct msc_instance {
    uint32_t buffer;  /**< graph buffer; MSC_NONE: scratch of an operation, or state of a checkpointed call */
    uint32_t op;      /**< operation that made it; op count: alive before the first */
    uint32_t appears; /**< alive before the first: operation with which it appears in the first step of a
                           run, or MSC_NONE: there from the start. Optimizer state appears before the
                           operation's results, any other buffer after them */
    uint8_t recomputed; /**< 1: made by a recompute */
    uint8_t returned;   /**< 1: the copy of one that had left the device; `op` is the one before it came */
    uint8_t pad[2];     /**< zero */
} msc_instance;

/** One entry per instance, `msc_trace_instance_count` of them. */
MSC_API const msc_instance *msc_trace_instances(const msc_trace *trace);

/** Something that is alive at one moment of a trace. */
typedef struct msc_live {
    uint64_t size_bytes;
    uint32_t buffer; /**< as in msc_instance */
    uint32_t op;     /**< as in msc_instance */
    uint32_t module; /**< that it belongs to, or MSC_NONE */
    uint8_t category;
    uint8_t recomputed;
    uint8_t returned; /**< as in msc_instance */
    uint8_t pad;      /**< zero */
} msc_live;

/**
 * What is alive right after an event, such as `peak_event` of a replay, in order of allocation.
 *
 * @param graph      that the trace was made from.
 * @param live       `capacity` entries; NULL with 0 asks for the count alone.
 * @param count      how many are alive; the first `capacity` of them are written.
 * Errors: EINVAL (no such event, another graph), ENOMEM.
 * Cost: the events up to there.
 */
MSC_API MSC_NODISCARD msc_status msc_trace_live_at(const msc_trace *trace, const msc_graph *graph,
                                                   uint64_t event, msc_live *live, uint32_t capacity,
                                                   uint32_t *count, msc_error *err);

/** Steps that a replay plays for CUDA. What the second reserves, all later ones have been seen to reserve. */
#define MSC_REPLAY_STEPS 2

/** Where a replay peaked and what it saw on the way. */
typedef struct msc_replay {
    msc_sim_stats stats; /**< after the last event */
    uint64_t peak_bytes; /**< HOST: allocated peak; CUDA: reserved peak */
    uint64_t peak_event; /**< index of the ALLOC at which allocated bytes peaked first */
    uint32_t peak_op;    /**< operation running then; op count: before the first */
    uint8_t peak_in_recompute;
    uint8_t pad[3];
    uint64_t category_peak_bytes[MSC_CATEGORY_COUNT]; /**< live bytes per category at that moment */
    uint64_t away_peak_bytes;                         /**< most bytes off the device at once */
    uint64_t moved_bytes;                             /**< that leave the device in a step */
    uint32_t moved_count;                             /**< in so many pieces */
    uint32_t away_peak_op; /**< operation that ran before the first moment with the most bytes away; op count:
                                   nothing is moved */
} msc_replay;

/**
 * Plays a trace into a simulator, which is reset first.
 *
 * A HOST allocator keeps nothing, so one step tells all. What a caching allocator reserves depends on what
 * the steps before have left in its caches: for CUDA the first MSC_REPLAY_STEPS steps of a run are played, in
 * which the first does not find what appears late (see msc_graph_make_late), and gradients end with each.
 * Peaks are those of all steps; everything else in `out`, and `live`, tells of the last.
 *
 * @param out      a struct of `out_bytes`.
 * @param live     optional: allocated bytes while each OP or RECOMPUTE event ran (its highest value), in
 *                 event order; `live_count` entries at most are written.
 * Errors: EDEVMEM (capacity), ENOMEM.
 */
MSC_API MSC_NODISCARD msc_status msc_trace_replay_into(const msc_trace *trace, msc_sim *sim, uint64_t *live,
                                                       size_t live_count, msc_replay *out, size_t out_bytes,
                                                       msc_error *err);

/** The same for the struct of this header. */
MSC_NODISCARD static inline msc_status msc_trace_replay(const msc_trace *trace, msc_sim *sim, uint64_t *live,
                                                        size_t live_count, msc_replay *out, msc_error *err)
{
    return msc_trace_replay_into(trace, sim, live, live_count, out, sizeof *out, err);
}

/** Number of OP and RECOMPUTE events, the length that `live` needs. */
MSC_API uint64_t msc_trace_op_event_count(const msc_trace *trace);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_REPLAY_H */
