/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim.h
 * The allocator simulator.
 *
 * `msc_sim` behaves like an allocator without owning memory. Kind HOST is the CPU: live bytes and nothing
 * else. Kind CUDA follows the rules of PyTorch's CUDA caching allocator: rounding, small and large pools,
 * streams, private pools, segments, best fit, splitting, coalescing, `record_stream`, garbage collection,
 * release and retry at the limit.
 *
 * What a step allocates and frees, and what that comes to, is in replay.h.
 */
#ifndef MEMSCALE_SIM_H
#define MEMSCALE_SIM_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- allocator simulator ------------------------------------------------------------------------ */

typedef enum msc_sim_kind {
    MSC_SIM_HOST, /**< live bytes, exact sizes, no caching */
    MSC_SIM_CUDA, /**< PyTorch's CUDA caching allocator */
    MSC_SIM_KIND_COUNT
} msc_sim_kind;

/** Intervals of `roundup_power2_divisions`: requests below 2 MiB, below 4 MiB and so on, from 32 GiB on. */
#define MSC_SIM_ROUNDUP_INTERVALS 16

/**
 * Options of a simulator. HOST reads `kind` and `capacity_bytes` only; the other fields are the settings of
 * PYTORCH_ALLOC_CONF and what surrounds them.
 */
typedef struct msc_sim_options {
    size_t struct_bytes;
    msc_sim_kind kind;
    uint64_t capacity_bytes;               /**< most that the driver gives; UINT64_MAX: no limit */
    uint64_t device_total_bytes;           /**< all memory of the device, which sets the address space of an
                                                expandable segment; UINT64_MAX: as capacity_bytes */
    uint64_t allowed_bytes;                /**< the memory fraction in bytes; UINT64_MAX: none is set */
    double garbage_collection_threshold;   /**< share of allowed_bytes, below 1; 0: off */
    uint64_t max_split_bytes;              /**< UINT64_MAX: unlimited (the default) */
    uint64_t max_non_split_rounding_bytes; /**< 20 MiB by default */
    uint64_t large_segment_bytes;          /**< 20 MiB by default */
    uint32_t roundup_power2_divisions[MSC_SIM_ROUNDUP_INTERVALS]; /**< 0, 1: off; else a power of two */
    uint8_t expandable_segments;                                  /**< 0 or 1 */
    uint8_t record_segments; /**< 0 or 1: keep segment events, see msc_sim_segment_events */
    uint8_t pad[6];          /**< zero */
} msc_sim_options;

/** The statistics that most callers want. For HOST, reserved equals allocated. */
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

/** One figure of `torch.cuda.memory_stats`. */
typedef struct msc_sim_stat {
    uint64_t current;
    uint64_t peak;
    uint64_t allocated; /**< sum of all increases, modulo 2^64 */
    uint64_t freed;     /**< sum of all decreases, modulo 2^64 */
} msc_sim_stat;

/** Which blocks a figure counts. */
typedef enum msc_sim_stat_pool {
    MSC_SIM_STAT_ALL,
    MSC_SIM_STAT_SMALL_POOL, /**< rounded size up to 1 MiB; never for HOST */
    MSC_SIM_STAT_LARGE_POOL,
    MSC_SIM_STAT_POOL_COUNT
} msc_sim_stat_pool;

/** Everything in `torch.cuda.memory_stats`, under its names there. */
typedef struct msc_sim_memory_stats {
    msc_sim_stat allocation[MSC_SIM_STAT_POOL_COUNT];
    msc_sim_stat segment[MSC_SIM_STAT_POOL_COUNT]; /**< not the expandable ones */
    msc_sim_stat active[MSC_SIM_STAT_POOL_COUNT];  /**< allocated, or freed and awaited by a stream */
    msc_sim_stat inactive_split[MSC_SIM_STAT_POOL_COUNT];
    msc_sim_stat allocated_bytes[MSC_SIM_STAT_POOL_COUNT];
    msc_sim_stat reserved_bytes[MSC_SIM_STAT_POOL_COUNT];
    msc_sim_stat active_bytes[MSC_SIM_STAT_POOL_COUNT];
    msc_sim_stat inactive_split_bytes[MSC_SIM_STAT_POOL_COUNT];
    msc_sim_stat requested_bytes[MSC_SIM_STAT_POOL_COUNT]; /**< of active blocks, before rounding */
    msc_sim_stat oversize_allocations;                     /**< of max_split_bytes and more */
    msc_sim_stat oversize_segments;
    uint64_t num_alloc_retries;
    uint64_t num_ooms;
    uint64_t num_sync_all_streams;
    uint64_t num_device_alloc;
    uint64_t num_device_free;
    uint64_t max_split_size; /**< UINT64_MAX: unlimited, which PyTorch shows as -1 */
} msc_sim_memory_stats;

/** Where a request goes. Blocks of different streams or pools never mix. */
typedef struct msc_sim_place {
    uint32_t stream; /**< any number; segments are released in ascending order of streams */
    uint32_t pool;   /**< 0: the default pool; otherwise a private one: a CUDA graph's or a MemPool */
} msc_sim_place;

typedef struct msc_sim msc_sim;

/** Every default of a kind, for a struct of `struct_bytes`. */
MSC_API void msc_sim_options_init(msc_sim_kind kind, msc_sim_options *options, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_sim_options msc_sim_options_default(msc_sim_kind kind)
{
    msc_sim_options options;

    msc_sim_options_init(kind, &options, sizeof options);
    return options;
}

/**
 * Reads the text of PYTORCH_ALLOC_CONF into options of kind CUDA, which must have been initialised.
 *
 * Only what the text names changes, and `device_total_bytes`; `max_non_split_rounding_bytes` follows a
 * `large_segment_size_mb` unless it is named itself. Keys that do not change the device's memory (such as
 * `pinned_*`, `release_lock_on_cudamalloc`) are checked and change nothing.
 *
 * @param device_total_bytes memory of the device; `per_process_memory_fraction` takes its share of it;
 *                           UINT64_MAX: unknown, then a fraction below 1 is refused.
 * Errors: EINVAL (unknown key, bad value: the message names key, value and what is allowed), EUNSUPPORTED
 * (another backend). The options are unchanged on error.
 */
MSC_API MSC_NODISCARD msc_status msc_sim_options_parse(const char *text, uint64_t device_total_bytes,
                                                       msc_sim_options *options, msc_error *err);

/** Creates an empty simulator. Errors: EINVAL (names the field), ENOMEM. */
MSC_API MSC_NODISCARD msc_status msc_sim_create(msc_context *ctx, const msc_sim_options *options,
                                                msc_sim **out, msc_error *err);
MSC_API void msc_sim_destroy(msc_sim *sim);

/** Forgets everything but the options; keeps its memory for the next run. */
MSC_API void msc_sim_reset(msc_sim *sim);

/**
 * Allocates `size_bytes` in the default pool under the caller's `id`, which must not be in use.
 *
 * Ids index a table, so they should be dense. Zero bytes is a success that takes no memory.
 * Errors: EDEVMEM (capacity or memory fraction; the message names request, reserved and limit; the state is
 * as after PyTorch's own failed attempt, caches released), EINVAL (id in use), ENOMEM.
 * Cost: a few ten nanoseconds; allocates host memory only to grow tables.
 */
MSC_API MSC_NODISCARD msc_status msc_sim_alloc(msc_sim *sim, uint32_t id, uint64_t size_bytes,
                                               uint32_t stream, msc_error *err);

/** The same in any pool, which exists from its first use on. HOST knows neither streams nor pools. */
MSC_API MSC_NODISCARD msc_status msc_sim_alloc_in(msc_sim *sim, uint32_t id, uint64_t size_bytes,
                                                  const msc_sim_place *place, msc_error *err);

/** Frees an id at once: request and completion in one. Errors: EINVAL (not in use). */
MSC_API MSC_NODISCARD msc_status msc_sim_free(msc_sim *sim, uint32_t id, msc_error *err);

/**
 * Frees an id that another stream still uses (`record_stream`): its bytes stop being allocated, the block
 * stays active and cannot be reused.
 *
 * The id stays taken until `msc_sim_free_complete`, also when a retry or msc_sim_empty_cache has waited for
 * the stream and has taken the memory back already. HOST takes it back now.
 * Errors: EINVAL (not in use, or requested already), ENOMEM (nothing changed).
 */
MSC_API MSC_NODISCARD msc_status msc_sim_free_request(msc_sim *sim, uint32_t id, msc_error *err);

/** The streams have finished: the block becomes free and the id too. Errors: EINVAL (not requested). */
MSC_API MSC_NODISCARD msc_status msc_sim_free_complete(msc_sim *sim, uint32_t id, msc_error *err);

/** Gives every unused segment back, as `torch.cuda.empty_cache`; private pools only once released. */
MSC_API void msc_sim_empty_cache(msc_sim *sim);

/**
 * The last graph of a private pool is gone: from now on its unused segments are given back like those of
 * the default pool. Allocating in it again takes it back into use. Errors: EINVAL (pool 0).
 */
MSC_API MSC_NODISCARD msc_status msc_sim_release_pool(msc_sim *sim, uint32_t pool, msc_error *err);

/**
 * Whether a CUDA graph is being captured: then nothing may synchronise, so a request that fails is not
 * followed by a release of the caches and a retry, and msc_sim_empty_cache leaves the default pool alone.
 */
MSC_API void msc_sim_set_capturing(msc_sim *sim, int capturing);

/** Starts peaks anew from the present values, as `reset_peak_memory_stats`. */
MSC_API void msc_sim_reset_peaks(msc_sim *sim);

/** Starts sums and event counts anew at 0, as `reset_accumulated_memory_stats`. */
MSC_API void msc_sim_reset_accumulated(msc_sim *sim);

MSC_API msc_sim_stats msc_sim_get_stats(const msc_sim *sim);

/** All statistics, for a struct of `out_bytes`. */
MSC_API void msc_sim_memory_stats_read(const msc_sim *sim, msc_sim_memory_stats *out, size_t out_bytes);

/** The same for the struct of this header. */
static inline void msc_sim_get_memory_stats(const msc_sim *sim, msc_sim_memory_stats *out)
{
    msc_sim_memory_stats_read(sim, out, sizeof *out);
}

/** Checks every invariant of the whole structure; the message names the first that fails. Errors: EINTERNAL.
 */
MSC_API MSC_NODISCARD msc_status msc_sim_validate(const msc_sim *sim, msc_error *err);

/* ---- segments and their blocks ------------------------------------------------------------------ */

/** What happened to device memory. */
typedef enum msc_sim_segment_kind {
    MSC_SIM_SEGMENT_ALLOC, /**< a segment of fixed size was obtained */
    MSC_SIM_SEGMENT_FREE,
    MSC_SIM_SEGMENT_MAP, /**< pages of an expandable segment got memory */
    MSC_SIM_SEGMENT_UNMAP,
    MSC_SIM_SEGMENT_KIND_COUNT
} msc_sim_segment_kind;

/** One segment event. */
typedef struct msc_sim_segment_event {
    uint64_t address;
    uint64_t size_bytes;
    uint64_t call; /**< index of the call, since creation or reset, that caused it: each alloc, free,
                        request, completion and empty_cache counts one */
    uint32_t stream;
    uint32_t pool;
    uint8_t kind;     /**< msc_sim_segment_kind */
    uint8_t is_large; /**< 1: of the large pool */
    uint8_t pad[6];   /**< zero */
} msc_sim_segment_event;

/**
 * The segment events since creation or reset, in order; none unless `record_segments` is set.
 * The pointer is valid until the next call that changes the simulator.
 */
MSC_API const msc_sim_segment_event *msc_sim_segment_events(const msc_sim *sim, uint64_t *count);

/**
 * Puts the segment that is obtained next at `address` (of an expandable segment: its first page), so that a
 * replay breaks ties between equal blocks as the real allocator did, by address. 0 takes that back. Without
 * it addresses fall from segment to segment. That segments do not overlap is the caller's business.
 * Errors: EINVAL (not a multiple of 512, or HOST).
 */
MSC_API MSC_NODISCARD msc_status msc_sim_place_next_segment(msc_sim *sim, uint64_t address, msc_error *err);

typedef enum msc_sim_block_state {
    MSC_SIM_BLOCK_FREE,      /**< cached */
    MSC_SIM_BLOCK_ALLOCATED, /**< in use by an id */
    MSC_SIM_BLOCK_AWAITING,  /**< freed by its id, awaited by a stream */
    MSC_SIM_BLOCK_STATE_COUNT
} msc_sim_block_state;

/** One block of a segment. */
typedef struct msc_sim_block {
    uint64_t address;
    uint64_t size_bytes;
    uint64_t requested_bytes; /**< 0: free */
    uint32_t id;              /**< MSC_NONE: free */
    uint8_t state;            /**< msc_sim_block_state */
    uint8_t pad[3];           /**< zero */
} msc_sim_block;

/** One segment; of an expandable one, each contiguous range with memory is an entry of its own. */
typedef struct msc_sim_segment {
    uint64_t address;
    uint64_t size_bytes;
    uint64_t allocated_bytes;
    uint64_t active_bytes;
    uint64_t requested_bytes;
    uint32_t block_begin; /**< its blocks are block_begin … block_end - 1, in order of address */
    uint32_t block_end;
    uint32_t stream;
    uint32_t pool;
    uint8_t is_large;
    uint8_t is_expandable;
    uint8_t pad[6]; /**< zero */
} msc_sim_segment;

typedef struct msc_sim_map msc_sim_map;

/**
 * Lists what is reserved now, as `torch.cuda.memory_snapshot`: segments in order of address. HOST has none.
 * Errors: ENOMEM. Cost: n log n in the blocks.
 */
MSC_API MSC_NODISCARD msc_status msc_sim_map_create(const msc_sim *sim, msc_sim_map **out, msc_error *err);
MSC_API void msc_sim_map_destroy(msc_sim_map *map);
MSC_API const msc_sim_segment *msc_sim_map_segments(const msc_sim_map *map, uint32_t *count);
MSC_API const msc_sim_block *msc_sim_map_blocks(const msc_sim_map *map, uint32_t *count);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_SIM_H */
