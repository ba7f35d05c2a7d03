/* SPDX-License-Identifier: Apache-2.0 */
/** @file alloc.h  Memory of a context: the only way to obtain any. Sizes are given back on release. */
#ifndef MSC_BASE_ALLOC_H
#define MSC_BASE_ALLOC_H

#include "memscale/base.h"

/** Zeroed memory, or NULL. `bytes` 0 gives NULL. */
void *msc__alloc(msc_context *ctx, size_t bytes);

/** Grows or shrinks; new bytes are not zeroed. NULL leaves `old` as it was. `new_bytes` must not be 0. */
void *msc__resize(msc_context *ctx, void *old, size_t old_bytes, size_t new_bytes);

/** Releases `bytes` at `old`. NULL is accepted. */
void msc__free(msc_context *ctx, void *old, size_t bytes);

#endif /* MSC_BASE_ALLOC_H */
