/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sums_core.h
 * The order in which the norm adds, for whatever computes it: strips are numbered through all arrays and divided evenly
 * into segments, which are added up each by itself.
 */
#ifndef MSC_OPTIM_SUMS_CORE_H
#define MSC_OPTIM_SUMS_CORE_H

#include "optim/convert_core.h"

/** A power of two; as many as the most threads that a pool has. */
#define MSC__SEGMENTS 256u

/** First strip of a segment. */
MSC__CORE uint64_t msc__segment_begin(uint64_t strips, uint64_t segment)
{
    return strips / MSC__SEGMENTS * segment + strips % MSC__SEGMENTS * segment / MSC__SEGMENTS;
}

#endif /* MSC_OPTIM_SUMS_CORE_H */
