/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_stats.h
 * Counters behind `torch.cuda.memory_stats`.
 *
 * A figure exists for the small pool, the large pool and both together. Only the peak of both together is
 * no sum of the parts, so that is all that is kept for it; and decreases follow from the rest:
 * `freed = allocated + base - current`. An allocation thus touches five counters, a free five more.
 */
#ifndef MSC_SIM_SIM_STATS_H
#define MSC_SIM_SIM_STATS_H

#include "base/invariant.h"
#include "memscale/sim.h"

/** The figures. The first five change with every request. */
typedef enum msc__sim_metric {
    MSC__SIM_ALLOCATION,
    MSC__SIM_ALLOCATED_BYTES,
    MSC__SIM_ACTIVE,
    MSC__SIM_ACTIVE_BYTES,
    MSC__SIM_REQUESTED_BYTES,
    MSC__SIM_SEGMENT,
    MSC__SIM_RESERVED_BYTES,
    MSC__SIM_INACTIVE_SPLIT,
    MSC__SIM_INACTIVE_SPLIT_BYTES,
    MSC__SIM_METRIC_COUNT
} msc__sim_metric;

/** Indices of the pools, as in the lowest bit of a set index. */
#define MSC__SIM_SMALL 0u
#define MSC__SIM_LARGE 1u

typedef struct msc__sim_counter {
    uint64_t current;
    uint64_t peak;
    uint64_t allocated; /**< increases since the sums started anew */
    uint64_t base;      /**< current when the sums started anew */
} msc__sim_counter;

typedef struct msc__sim_counters {
    msc__sim_counter pools[2][MSC__SIM_METRIC_COUNT]; /**< small, large */
    uint64_t peaks[MSC__SIM_METRIC_COUNT];            /**< of both together */
    msc__sim_counter oversize_allocations;
    msc__sim_counter oversize_segments;
    uint64_t alloc_retry_count;
    uint64_t oom_count;
    uint64_t sync_count;
    uint64_t device_alloc_count;
    uint64_t device_free_count;
} msc__sim_counters;

static inline void msc__sim_counter_add(msc__sim_counter *counter, uint64_t amount)
{
    counter->current += amount;
    MSC__ASSERT(counter->current >= amount);
    counter->allocated += amount;
    if (counter->current > counter->peak)
        counter->peak = counter->current;
}

/** Adds to a figure. `pool` is MSC__SIM_SMALL or MSC__SIM_LARGE. */
static inline void msc__sim_count_up(msc__sim_counters *counters, uint32_t pool, msc__sim_metric metric,
                                     uint64_t amount)
{
    uint64_t both;

    MSC__ASSERT(pool <= MSC__SIM_LARGE && metric < MSC__SIM_METRIC_COUNT);
    msc__sim_counter_add(&counters->pools[pool][metric], amount);
    both = counters->pools[0][metric].current + counters->pools[1][metric].current;
    if (both > counters->peaks[metric])
        counters->peaks[metric] = both;
}

static inline void msc__sim_count_down(msc__sim_counters *counters, uint32_t pool, msc__sim_metric metric,
                                       uint64_t amount)
{
    MSC__ASSERT(counters->pools[pool][metric].current >= amount);
    counters->pools[pool][metric].current -= amount;
}

/** Present value of a figure over both pools. */
static inline uint64_t msc__sim_now(const msc__sim_counters *counters, msc__sim_metric metric)
{
    return counters->pools[0][metric].current + counters->pools[1][metric].current;
}

/** A block of `block_bytes` was given to a request. */
static inline void msc__sim_count_allocated(msc__sim_counters *counters, uint32_t pool, uint64_t block_bytes,
                                            uint64_t requested_bytes)
{
    MSC__ASSERT(requested_bytes <= block_bytes);
    msc__sim_count_up(counters, pool, MSC__SIM_ALLOCATION, 1);
    msc__sim_count_up(counters, pool, MSC__SIM_ALLOCATED_BYTES, block_bytes);
    msc__sim_count_up(counters, pool, MSC__SIM_ACTIVE, 1);
    msc__sim_count_up(counters, pool, MSC__SIM_ACTIVE_BYTES, block_bytes);
    msc__sim_count_up(counters, pool, MSC__SIM_REQUESTED_BYTES, requested_bytes);
}

/** The program gave it back … */
static inline void msc__sim_count_requested(msc__sim_counters *counters, uint32_t pool, uint64_t block_bytes)
{
    msc__sim_count_down(counters, pool, MSC__SIM_ALLOCATION, 1);
    msc__sim_count_down(counters, pool, MSC__SIM_ALLOCATED_BYTES, block_bytes);
}

/** … and no stream uses it any more. */
static inline void msc__sim_count_completed(msc__sim_counters *counters, uint32_t pool, uint64_t block_bytes,
                                            uint64_t requested_bytes)
{
    msc__sim_count_down(counters, pool, MSC__SIM_ACTIVE, 1);
    msc__sim_count_down(counters, pool, MSC__SIM_ACTIVE_BYTES, block_bytes);
    msc__sim_count_down(counters, pool, MSC__SIM_REQUESTED_BYTES, requested_bytes);
    MSC__ASSERT(counters->pools[pool][MSC__SIM_ACTIVE_BYTES].current >=
                counters->pools[pool][MSC__SIM_ALLOCATED_BYTES].current);
}

msc_sim_stats msc__sim_counters_summary(const msc__sim_counters *counters);
/** Fills everything but `max_split_size`. */
void msc__sim_counters_read(const msc__sim_counters *counters, msc_sim_memory_stats *out);
void msc__sim_counters_reset_peaks(msc__sim_counters *counters);
void msc__sim_counters_reset_accumulated(msc__sim_counters *counters);

#endif /* MSC_SIM_SIM_STATS_H */
