/* SPDX-License-Identifier: Apache-2.0 */
/** @file plan_internal.h  The plan's own structure, shared by plan.c and plan_io.c. */
#ifndef MSC_PLAN_INTERNAL_H
#define MSC_PLAN_INTERNAL_H

#include "base/array.h"
#include "memscale/plan.h"

struct msc_plan {
    msc_context *ctx;
    msc__array choices;      /**< msc_choice, module ids rising */
    msc__array kept_begins;  /**< uint32_t, one per choice: where its kept operations begin in `kept` */
    msc__array kept;         /**< uint32_t, offsets of kept operations; those of a choice rise */
    msc__array moved_begins; /**< uint32_t, one per choice: likewise in `moved` */
    msc__array moved;        /**< uint32_t, ordinals of what is offloaded; those of a choice rise */
    msc_plan_summary summary;
};

#endif /* MSC_PLAN_INTERNAL_H */
