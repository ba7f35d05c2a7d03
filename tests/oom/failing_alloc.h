/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file failing_alloc.h
 * An allocator for tests: it fails a chosen allocation and keeps the books.
 *
 * Every block is remembered with its size, so that a block that is given back twice, with a wrong size, or
 * not at all is seen here, whatever the context believes. Requests that ask for memory are numbered from 0;
 * request `fail_at` and, with `fail_rest`, all after it get NULL.
 *
 *      failing_alloc heap;
 *      msc_context *ctx;
 *
 *      failing_alloc_init(&heap, 3);                     fails the fourth request
 *      ctx = failing_alloc_context(&heap);               NULL when the context's own memory was refused
 *      ...
 *      msc_context_destroy(ctx);
 *      assert_true(failing_alloc_is_clean(&heap));
 *
 * The usual loop is `for (n = 0; ; n++)` until a run ends without `heap.failed_count`.
 */
#ifndef MSC_TEST_FAILING_ALLOC_H
#define MSC_TEST_FAILING_ALLOC_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "memscale/base.h"

#define FAILING_ALLOC_NEVER UINT64_MAX
#define FAILING_ALLOC_MOST_BLOCKS 4096u

typedef struct failing_alloc {
    uint64_t fail_at;       /**< number of the request that fails, FAILING_ALLOC_NEVER: none */
    bool fail_rest;         /**< the requests after it fail too */
    uint64_t request_count; /**< requests for memory so far; releases are not counted */
    uint64_t failed_count;
    uint64_t outstanding_bytes;
    uint64_t misuse_count; /**< wrong old size, unknown block, nothing for nothing, table full */
    uint32_t block_count;
    struct {
        void *at;
        size_t bytes;
    } blocks[FAILING_ALLOC_MOST_BLOCKS]; /**< what is out, in no order */
} failing_alloc;

/** Whether MEMSCALE_OOM, which says how many requests fail in a test's runs, is `amount`: "few" or "all". */
static inline bool failing_alloc_wanted(const char *amount)
{
    const char *wanted = getenv("MEMSCALE_OOM");

    return wanted != NULL && strcmp(wanted, amount) == 0;
}

static inline void failing_alloc_init(failing_alloc *heap, uint64_t fail_at)
{
    memset(heap, 0, sizeof *heap);
    heap->fail_at = fail_at;
}

/** Index of the block at `at`, or the block count when it is not out. */
static inline uint32_t failing_alloc_find(const failing_alloc *heap, const void *at)
{
    uint32_t i;

    for (i = 0; i < heap->block_count; i++)
        if (heap->blocks[i].at == at)
            break;
    return i;
}

static inline bool failing_alloc_refuses(failing_alloc *heap)
{
    uint64_t number = heap->request_count++;
    bool refused = number == heap->fail_at || (heap->fail_rest && number > heap->fail_at);

    heap->failed_count += refused;
    return refused;
}

/** Takes the block at `old` off the books; false when it was not on them. */
static inline bool failing_alloc_forget(failing_alloc *heap, const void *old, size_t old_bytes)
{
    uint32_t i = failing_alloc_find(heap, old);

    if (i == heap->block_count || heap->blocks[i].bytes != old_bytes) {
        heap->misuse_count++;
        return false;
    }
    heap->outstanding_bytes -= old_bytes;
    heap->blocks[i] = heap->blocks[--heap->block_count];
    return true;
}

/**
 * The `resize` of an msc_allocator. A block that grows always moves, and what is given back is overwritten,
 * so that a stale pointer shows.
 */
static inline void *failing_alloc_resize(void *user, void *old, size_t old_bytes, size_t new_bytes)
{
    failing_alloc *heap = user;
    void *fresh = NULL;

    heap->misuse_count += old == NULL && new_bytes == 0;
    if (new_bytes > 0) {
        if (failing_alloc_refuses(heap))
            return NULL;
        if (heap->block_count == FAILING_ALLOC_MOST_BLOCKS) {
            heap->misuse_count++;
            return NULL;
        }
        fresh = malloc(new_bytes);
        if (fresh == NULL)
            return NULL;
        memset(fresh, 0xa5, new_bytes);
    }
    if (old != NULL && failing_alloc_forget(heap, old, old_bytes)) {
        if (fresh != NULL)
            memcpy(fresh, old, old_bytes < new_bytes ? old_bytes : new_bytes);
        memset(old, 0x5a, old_bytes);
        free(old);
    }
    if (fresh != NULL) {
        heap->blocks[heap->block_count].at = fresh;
        heap->blocks[heap->block_count].bytes = new_bytes;
        heap->block_count++;
        heap->outstanding_bytes += new_bytes;
    }
    return fresh;
}

/** A context on this heap, or NULL when its own memory is refused. */
static inline msc_context *failing_alloc_context(failing_alloc *heap)
{
    msc_context_options options = msc_context_options_default();
    msc_context *ctx = NULL;

    options.allocator.user = heap;
    options.allocator.resize = failing_alloc_resize;
    if (msc_context_create(&options, &ctx, NULL) != MSC_OK)
        ctx = NULL;
    return ctx;
}

/** True when everything came back, and came back properly. */
static inline bool failing_alloc_is_clean(const failing_alloc *heap)
{
    return heap->outstanding_bytes == 0 && heap->block_count == 0 && heap->misuse_count == 0;
}

#endif /* MSC_TEST_FAILING_ALLOC_H */
