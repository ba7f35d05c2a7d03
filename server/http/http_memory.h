/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file http_memory.h Memory that ends all at once: what one request takes from its context. Part of the door
 * of `http`.
 */
#ifndef MSC_SERVER_HTTP_MEMORY_H
#define MSC_SERVER_HTTP_MEMORY_H

#include <stdbool.h>

#include "memscale/base.h"

typedef struct http_block http_block;

/** Zeroed but for `ctx` it is empty. Used by one thread at a time. */
typedef struct http_memory {
    msc_context *ctx;
    http_block *first;
} http_memory;

/**
 * Zeroed memory, aligned for any type; NULL: there is none, or the context's limit is reached. `bytes` 0
 * counts as 1.
 */
void *http_memory_get(http_memory *memory, size_t bytes);
/**
 * Grows what `http_memory_get` gave, to more bytes than it has; new bytes are not zeroed. NULL leaves it as
 * it was.
 */
void *http_memory_grow(http_memory *memory, void *old, size_t bytes);
/** Gives one back before the end. NULL is accepted. */
void http_memory_drop(http_memory *memory, void *old);
/** Gives all back. */
void http_memory_end(http_memory *memory);

#endif /* MSC_SERVER_HTTP_MEMORY_H */
