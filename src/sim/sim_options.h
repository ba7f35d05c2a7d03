/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_options.h
 * Sizes of the caching allocator: its constants and what the options make of a request.
 */
#ifndef MSC_SIM_SIM_OPTIONS_H
#define MSC_SIM_SIM_OPTIONS_H

#include "base/bytes.h"
#include "memscale/sim.h"
#include "sim/sim_blocks.h"

#define MSC__SIM_MIB (UINT64_C(1) << 20)
#define MSC__SIM_SMALL_BYTES MSC__SIM_MIB               /**< largest size of the small pool; kSmallSize */
#define MSC__SIM_SMALL_SEGMENT_BYTES (2 * MSC__SIM_MIB) /**< kSmallBuffer */
#define MSC__SIM_OWN_SEGMENT_BYTES (10 * MSC__SIM_MIB)  /**< from here on, a segment each; kMinLargeAlloc */
#define MSC__SIM_OWN_ROUND_BYTES (2 * MSC__SIM_MIB)     /**< granule of such segments; kRoundLarge */
#define MSC__SIM_MOST_PAGE_BYTES (UINT64_C(1) << 40)    /**< a phase then fits 32 bits of granules */

/** What a caller has given, whole, and checked. `prefix`: in messages. Errors: EINVAL, names the field. */
msc_status msc__sim_options_read(const char *prefix, const msc_sim_options *given, msc_sim_options *out,
                                 msc_error *err);

/** Reserved bytes above which garbage is collected; 0: never. */
uint64_t msc__sim_garbage_limit(const msc_sim_options *options);

/** Divisions between two powers of two for a request, which is at least 1 byte. */
static inline uint32_t msc__sim_divisions_of(const msc_sim_options *options, uint64_t size_bytes)
{
    uint32_t high = 63u - (uint32_t)__builtin_clzll(size_bytes);
    uint32_t interval = high < 20 ? 0 : high - 20; /* intervals start at 1 MiB */

    return options
        ->roundup_power2_divisions[interval < MSC_SIM_ROUNDUP_INTERVALS ? interval
                                                                        : MSC_SIM_ROUNDUP_INTERVALS - 1];
}

/** The request as the allocator sees it: at most MSC__SIM_MOST_BYTES, which no device can serve. */
static inline uint64_t msc__sim_round_size(const msc_sim_options *options, uint64_t size_bytes)
{
    uint32_t divisions;

    if (size_bytes >= MSC__SIM_MOST_BYTES)
        return MSC__SIM_MOST_BYTES;
    if (size_bytes <= MSC__SIM_GRANULE_BYTES)
        return MSC__SIM_GRANULE_BYTES;
    divisions = msc__sim_divisions_of(options, size_bytes);
    if (divisions > 1 && size_bytes > (uint64_t)MSC__SIM_GRANULE_BYTES * divisions) {
        uint64_t power = UINT64_C(1) << (63 - __builtin_clzll(size_bytes));
        return msc__round_up_u64(size_bytes, power / divisions);
    }
    return msc__round_up_u64(size_bytes, MSC__SIM_GRANULE_BYTES);
}

/** Bytes asked from the device for a rounded request, without expandable segments. */
static inline uint64_t msc__sim_segment_bytes(const msc_sim_options *options, uint64_t rounded_bytes)
{
    if (rounded_bytes <= MSC__SIM_SMALL_BYTES)
        return MSC__SIM_SMALL_SEGMENT_BYTES;
    if (rounded_bytes < MSC__SIM_OWN_SEGMENT_BYTES)
        return options->large_segment_bytes;
    return msc__round_up_u64(rounded_bytes, MSC__SIM_OWN_ROUND_BYTES);
}

/** Bytes per page of expandable segments of a pool. */
static inline uint64_t msc__sim_page_bytes(const msc_sim_options *options, uint32_t set_index)
{
    return set_index % 2 == 0 ? MSC__SIM_SMALL_SEGMENT_BYTES : options->large_segment_bytes;
}

#endif /* MSC_SIM_SIM_OPTIONS_H */
