/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading the counters, and starting them anew.
 *
 *     pools[small][metric]  current  peak  allocated  base ┐
 *     pools[large][metric]  current  peak  allocated  base ┴─ sums ─► "all": current, allocated, freed
 *     peaks[metric]         ───────────────────────────────────────► "all": peak
 *
 * Invariants: current <= peak in every counter; the peak of both is at least the sum of the present values
 * and at most the sum of the peaks.
 */
#include "sim/sim_stats.h"

#include <string.h>

#include "base/invariant.h"

static msc_sim_stat read_counter(const msc__sim_counter *counter)
{
    msc_sim_stat stat = {counter->current, counter->peak, counter->allocated, 0};

    MSC__ASSERT(counter->current <= counter->peak);
    MSC__ASSERT(counter->allocated + counter->base >= counter->current);
    stat.freed = counter->allocated + counter->base - counter->current;
    return stat;
}

static void read_metric(const msc__sim_counters *counters, msc__sim_metric metric, msc_sim_stat *out)
{
    msc_sim_stat small = read_counter(&counters->pools[MSC__SIM_SMALL][metric]);
    msc_sim_stat large = read_counter(&counters->pools[MSC__SIM_LARGE][metric]);

    MSC__ASSERT(counters->peaks[metric] >= small.current + large.current);
    MSC__ASSERT(counters->peaks[metric] <= small.peak + large.peak);
    out[MSC_SIM_STAT_SMALL_POOL] = small;
    out[MSC_SIM_STAT_LARGE_POOL] = large;
    out[MSC_SIM_STAT_ALL].current = small.current + large.current;
    out[MSC_SIM_STAT_ALL].peak = counters->peaks[metric];
    out[MSC_SIM_STAT_ALL].allocated = small.allocated + large.allocated;
    out[MSC_SIM_STAT_ALL].freed = small.freed + large.freed;
}

void msc__sim_counters_read(const msc__sim_counters *counters, msc_sim_memory_stats *out)
{
    memset(out, 0, sizeof *out);
    read_metric(counters, MSC__SIM_ALLOCATION, out->allocation);
    read_metric(counters, MSC__SIM_SEGMENT, out->segment);
    read_metric(counters, MSC__SIM_ACTIVE, out->active);
    read_metric(counters, MSC__SIM_INACTIVE_SPLIT, out->inactive_split);
    read_metric(counters, MSC__SIM_ALLOCATED_BYTES, out->allocated_bytes);
    read_metric(counters, MSC__SIM_RESERVED_BYTES, out->reserved_bytes);
    read_metric(counters, MSC__SIM_ACTIVE_BYTES, out->active_bytes);
    read_metric(counters, MSC__SIM_INACTIVE_SPLIT_BYTES, out->inactive_split_bytes);
    read_metric(counters, MSC__SIM_REQUESTED_BYTES, out->requested_bytes);
    out->oversize_allocations = read_counter(&counters->oversize_allocations);
    out->oversize_segments = read_counter(&counters->oversize_segments);
    out->num_alloc_retries = counters->alloc_retry_count;
    out->num_ooms = counters->oom_count;
    out->num_sync_all_streams = counters->sync_count;
    out->num_device_alloc = counters->device_alloc_count;
    out->num_device_free = counters->device_free_count;
}

msc_sim_stats msc__sim_counters_summary(const msc__sim_counters *counters)
{
    msc_sim_stats stats = {
        .allocated_now_bytes = msc__sim_now(counters, MSC__SIM_ALLOCATED_BYTES),
        .allocated_peak_bytes = counters->peaks[MSC__SIM_ALLOCATED_BYTES],
        .reserved_now_bytes = msc__sim_now(counters, MSC__SIM_RESERVED_BYTES),
        .reserved_peak_bytes = counters->peaks[MSC__SIM_RESERVED_BYTES],
        .requested_now_bytes = msc__sim_now(counters, MSC__SIM_REQUESTED_BYTES),
        .requested_peak_bytes = counters->peaks[MSC__SIM_REQUESTED_BYTES],
        .inactive_split_now_bytes = msc__sim_now(counters, MSC__SIM_INACTIVE_SPLIT_BYTES),
        .segment_now_count = msc__sim_now(counters, MSC__SIM_SEGMENT),
        .segment_peak_count = counters->peaks[MSC__SIM_SEGMENT],
        .device_alloc_count = counters->device_alloc_count,
        .device_free_count = counters->device_free_count,
        .alloc_retry_count = counters->alloc_retry_count,
        .oom_count = counters->oom_count,
    };

    return stats;
}

void msc__sim_counters_reset_peaks(msc__sim_counters *counters)
{
    int metric;

    for (metric = 0; metric < MSC__SIM_METRIC_COUNT; metric++) {
        counters->pools[MSC__SIM_SMALL][metric].peak = counters->pools[MSC__SIM_SMALL][metric].current;
        counters->pools[MSC__SIM_LARGE][metric].peak = counters->pools[MSC__SIM_LARGE][metric].current;
        counters->peaks[metric] = msc__sim_now(counters, (msc__sim_metric)metric);
    }
    counters->oversize_allocations.peak = counters->oversize_allocations.current;
    counters->oversize_segments.peak = counters->oversize_segments.current;
}

static void reset_sums(msc__sim_counter *counter)
{
    counter->allocated = 0;
    counter->base = counter->current;
}

void msc__sim_counters_reset_accumulated(msc__sim_counters *counters)
{
    int metric;

    for (metric = 0; metric < MSC__SIM_METRIC_COUNT; metric++) {
        reset_sums(&counters->pools[MSC__SIM_SMALL][metric]);
        reset_sums(&counters->pools[MSC__SIM_LARGE][metric]);
    }
    reset_sums(&counters->oversize_allocations);
    reset_sums(&counters->oversize_segments);
    counters->alloc_retry_count = 0;
    counters->oom_count = 0;
    counters->sync_count = 0;
    counters->device_alloc_count = 0;
    counters->device_free_count = 0;
}
