/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_trace.h
 * What the files of this folder know of a trace beyond its public face.
 */
#ifndef MSC_SIM_TRACE_H
#define MSC_SIM_TRACE_H

#include "memscale/sim.h"

/** The context that the trace lives in. */
msc_context *msc__trace_context(const msc_trace *trace);

#endif /* MSC_SIM_TRACE_H */
