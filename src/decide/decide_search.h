/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_search.h
 * The walks that fill the frontier, and how far from the best possible time its plans can be.
 */
#ifndef MSC_DECIDE_SEARCH_H
#define MSC_DECIDE_SEARCH_H

#include "decide/decide_fit.h"
#include "decide/decide_frontier.h"

/** Walks from the plain step and offers every set on the way. The fit's set is empty before and after. */
msc_status msc__search(const msc__model *model, msc__fit *fit, msc__frontier *frontier, msc_error *err);

/** Lower bound of the time added by any set whose peak is within a budget. Errors: ENOMEM. */
msc_status msc__bound_added_ns(const msc__model *model, const msc__fit *fit, uint64_t budget_bytes,
                               int64_t *added_ns, msc_error *err);

/** By how much `step_ns` can exceed the best, in parts per million, rounded up. */
uint32_t msc__bound_ppm(int64_t step_ns, int64_t lower_ns);

#endif /* MSC_DECIDE_SEARCH_H */
