/* SPDX-License-Identifier: Apache-2.0 */
/* Options: defaults, and what must hold of them. The text of PYTORCH_ALLOC_CONF is read by sim_conf.c. */
#include "sim/sim_options.h"

#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "base/sized.h"

void msc_sim_options_init(msc_sim_kind kind, msc_sim_options *out, size_t struct_bytes)
{
    msc_sim_options options;

    memset(&options, 0, sizeof options);
    options.kind = kind;
    options.capacity_bytes = UINT64_MAX;
    options.device_total_bytes = UINT64_MAX;
    options.allowed_bytes = UINT64_MAX;
    options.max_split_bytes = UINT64_MAX;
    options.max_non_split_rounding_bytes = 20 * MSC__SIM_MIB;
    options.large_segment_bytes = 20 * MSC__SIM_MIB;
    msc__sized_init(out, struct_bytes, &options, sizeof options);
}

/* A smaller large segment could not hold every request that is put into one; PyTorch sets it in MiB. */
static msc_status check_sizes(const msc_sim_options *options, msc_error *err)
{
    uint64_t segment = options->large_segment_bytes;

    if (segment < MSC__SIM_OWN_SEGMENT_BYTES || segment % MSC__SIM_MIB != 0 ||
        segment > MSC__SIM_MOST_PAGE_BYTES)
        return msc__fail(
            err, MSC_EINVAL,
            "large_segment_bytes is %" PRIu64 ", must be a multiple of 1 MiB from 10 MiB to 1 TiB", segment);
    if (options->max_split_bytes < segment)
        return msc__fail(err, MSC_EINVAL,
                         "max_split_bytes is %" PRIu64 ", must be at least large_segment_bytes, %" PRIu64,
                         options->max_split_bytes, segment);
    if (!(options->garbage_collection_threshold >= 0 && options->garbage_collection_threshold < 1))
        return msc__fail(err, MSC_EINVAL,
                         "garbage_collection_threshold is %g, must be at least 0 and below 1",
                         options->garbage_collection_threshold);
    return MSC_OK;
}

static msc_status check_flags(const msc_sim_options *options, msc_error *err)
{
    uint32_t i;

    for (i = 0; i < MSC_SIM_ROUNDUP_INTERVALS; i++) {
        uint32_t divisions = options->roundup_power2_divisions[i];
        if ((divisions & (divisions - 1)) != 0)
            return msc__fail(err, MSC_EINVAL,
                             "roundup_power2_divisions[%" PRIu32 "] is %" PRIu32
                             ", must be 0 or a power of two",
                             i, divisions);
    }
    if (options->expandable_segments > 1)
        return msc__fail(err, MSC_EINVAL, "expandable_segments is %u, must be 0 or 1",
                         (unsigned)options->expandable_segments);
    if (options->record_segments > 1)
        return msc__fail(err, MSC_EINVAL, "record_segments is %u, must be 0 or 1",
                         (unsigned)options->record_segments);
    for (i = 0; i < sizeof options->pad; i++)
        if (options->pad[i] != 0)
            return msc__fail(err, MSC_EINVAL, "pad must be zero");
    return MSC_OK;
}

static msc_status check(const msc_sim_options *options, msc_error *err)
{
    msc_status status;

    if ((uint32_t)options->kind >= MSC_SIM_KIND_COUNT)
        return msc__fail(err, MSC_EINVAL, "kind is %u, must be below %u", (unsigned)options->kind,
                         (unsigned)MSC_SIM_KIND_COUNT);
    status = check_flags(options, err);
    return status == MSC_OK ? check_sizes(options, err) : status;
}

msc_status msc__sim_options_read(const char *prefix, const msc_sim_options *given, msc_sim_options *out,
                                 msc_error *err)
{
    msc_status status;

    msc_sim_options_init(MSC_SIM_HOST, out, sizeof *out); /* defaults are those of any kind */
    status = MSC__READ_OPTIONS(prefix, msc_sim_options, capacity_bytes, given, out, err);
    return status == MSC_OK ? check(out, err) : status;
}

/* The product is below 2^64: the threshold is below 1. That 0 becomes 1 makes no difference to granules. */
uint64_t msc__sim_garbage_limit(const msc_sim_options *options)
{
    uint64_t bytes;

    if (options->allowed_bytes == UINT64_MAX || !(options->garbage_collection_threshold > 0))
        return 0;
    bytes = (uint64_t)(options->garbage_collection_threshold * (double)options->allowed_bytes);
    return bytes > 0 ? bytes : 1;
}
