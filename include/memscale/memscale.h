/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file memscale.h
 * Everything libmemscale offers: record or load a memory graph, replay it, decide a plan under a budget.
 *
 * A first program is examples/c/01_plan.c.
 */
#ifndef MEMSCALE_MEMSCALE_H
#define MEMSCALE_MEMSCALE_H

#include "base.h"
#include "decide.h"
#include "device.h"
#include "fingerprint.h"
#include "graph.h"
#include "offload.h"
#include "optim.h"
#include "plan.h"
#include "record.h"
#include "replay.h"
#include "sim.h"
#include "snapshot.h"
#include "status.h"

#endif /* MEMSCALE_MEMSCALE_H */
