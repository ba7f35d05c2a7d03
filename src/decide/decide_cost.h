/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_cost.h
 * Time of operations, regions and candidates, and the rates that it comes from.
 */
#ifndef MSC_DECIDE_COST_H
#define MSC_DECIDE_COST_H

#include "decide/decide_model.h"

/** Checks every rate; the message names the field, and the kind of rate. Errors: EINVAL. */
msc_status msc__check_rates(const msc_rates *rates, msc_error *err);

/** What a caller has given, whole; on EINVAL the defaults. */
msc_status msc__read_rates(const msc_rates *given, msc_rates *out, msc_error *err);

/** Fills `time_before_ns`, `call_overhead_ns` and `intercept_ns`, limited so that sums never overflow. */
void msc__cost_times(msc__model *model, const msc_rates *rates);

/** Checks what describes the link. Errors: EINVAL. */
msc_status msc__check_link(const msc_link *link, msc_error *err);

/** Time that the moves of all regions of a candidate add: no part of it hides behind compute. */
int64_t msc__cost_transfers(const msc__model *model, const msc__candidate *candidate);

/** Time that one region of a candidate adds. */
int64_t msc__cost_region(const msc__model *model, const msc__candidate *candidate, const msc__region *region);

/** Time that a candidate adds. */
int64_t msc__cost_candidate(const msc__model *model, const msc__candidate *candidate);

/** Sign of a / b − c / d, for b, d > 0, without overflow. */
int msc__cost_compare(uint64_t a, uint64_t b, uint64_t c, uint64_t d);

#endif /* MSC_DECIDE_COST_H */
