/* SPDX-License-Identifier: Apache-2.0 */
/** @file cudart.h  What the files of the runtime share. */
#ifndef STANDIN_CUDART_H
#define STANDIN_CUDART_H

#include <driver_types.h>

typedef cudaStream_t stream;

/** Keeps an error for cudaGetLastError, and returns it. */
cudaError_t note(cudaError_t error);

#endif
