/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_plan.h
 * The plan that comes out: choices, rules, what the other way round would bring.
 */
#ifndef MSC_DECIDE_PLAN_H
#define MSC_DECIDE_PLAN_H

#include "decide/decide_fit.h"

/** A plan with nothing but a set's actions, and windows in its summary. The caller owns it, also when the call fails. Errors: ENOMEM. */
msc_status msc__plan_of_set(const msc__model *model, const uint64_t *set, msc_plan **plan, msc_error *err);

/** Fills in the windows within which a set moves anything; leaves them where it moves nothing. */
void msc__plan_windows(const msc__model *model, const uint64_t *set, msc_plan_summary *summary);

/** What a set's choices are explained with. */
typedef struct msc__explained {
    const msc__model *model;
    msc__fit *fit; /**< its set is empty before and after */
    const uint64_t *set;
    int64_t step_ns; /**< under the set */
    uint32_t least;  /**< filled in: the active candidate that frees least per time, or MSC_NONE */
    bool fits;
    bool allow_checkpoint;
} msc__explained;

/** A plan with a choice per module in which something is saved; the summary has windows only. Otherwise as above.
 */
msc_status msc__plan_explain(msc__explained *explained, msc_plan **plan, msc_error *err);

#endif /* MSC_DECIDE_PLAN_H */
