/* SPDX-License-Identifier: Apache-2.0 */
/** @file kernels.h  MemScale's own kernels (src/optim/cuda, src/fingerprint/cuda), compiled for the host: those that the driver can launch. */
#ifndef STANDIN_KERNELS_H
#define STANDIN_KERNELS_H

#include "streams.h"

#include <stdbool.h>
#include <stdint.h>

/** NULL: there is none of that name. */
const void *kernel_named(const char *name);

/** Submits a launch. False: not such a launch, or the argument names memory that is not the card's; stderr says why. */
bool kernel_launch(const void *kernel, uint32_t groups, uint32_t threads, const void *argument,
                   card_stream *stream);

#endif
