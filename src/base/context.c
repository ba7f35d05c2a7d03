/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The context: an allocator with a running total.
 *
 * Everything that the library holds goes through msc__alloc, msc__resize and msc__free. They keep the sum
 * of what is held and its peak, refuse what would exceed the context's limit, and hand the caller's
 * allocator the old size, so that it needs no headers. There is no lock: a context is used by one thread
 * at a time.
 */
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"

struct msc_context {
    msc_allocator allocator;
    uint64_t limit_bytes; /* UINT64_MAX: none */
    uint64_t held_bytes;  /* the context itself not counted */
    uint64_t peak_bytes;
};

static void *libc_resize(void *user, void *old, size_t old_bytes, size_t new_bytes)
{
    (void)user;
    (void)old_bytes;
    if (new_bytes == 0) {
        free(old);
        return NULL;
    }
    return realloc(old, new_bytes);
}

void msc_context_options_init(msc_context_options *out, size_t struct_bytes)
{
    msc_context_options options;
    memset(&options, 0, sizeof options);
    msc__sized_init(out, struct_bytes, &options, sizeof options);
}

msc_status msc_context_create(const msc_context_options *options, msc_context **out, msc_error *err)
{
    msc_context_options used = msc_context_options_default();
    msc_context *ctx;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "out is NULL");
    *out = NULL;
    if (options != NULL) {
        msc_status status = MSC__READ_OPTIONS("", msc_context_options, allocator, options, &used, err);

        if (status != MSC_OK)
            return status;
    }
    if (used.allocator.resize == NULL)
        used.allocator.resize = libc_resize;
    ctx = used.allocator.resize(used.allocator.user, NULL, 0, sizeof *ctx);
    if (ctx == NULL)
        return msc__fail_memory(err, "a context", sizeof *ctx);
    memset(ctx, 0, sizeof *ctx);
    ctx->allocator = used.allocator;
    ctx->limit_bytes = used.memory_limit_bytes == 0 ? UINT64_MAX : used.memory_limit_bytes;
    *out = ctx;
    return MSC_OK;
}

void msc_context_destroy(msc_context *ctx)
{
    if (ctx != NULL)
        (void)ctx->allocator.resize(ctx->allocator.user, ctx, sizeof *ctx, 0);
}

uint64_t msc_context_held_bytes(const msc_context *ctx)
{
    return ctx->held_bytes;
}

uint64_t msc_context_peak_bytes(const msc_context *ctx)
{
    return ctx->peak_bytes;
}

void *msc__resize(msc_context *ctx, void *old, size_t old_bytes, size_t new_bytes)
{
    uint64_t rest = ctx->held_bytes - old_bytes;
    void *result;

    MSC__ASSERT(old_bytes <= ctx->held_bytes && (old != NULL || old_bytes == 0));
    if (new_bytes > ctx->limit_bytes || rest > ctx->limit_bytes - new_bytes)
        return NULL;
    result = ctx->allocator.resize(ctx->allocator.user, old, old_bytes, new_bytes);
    if (result == NULL)
        return NULL;
    ctx->held_bytes = rest + new_bytes;
    if (ctx->held_bytes > ctx->peak_bytes)
        ctx->peak_bytes = ctx->held_bytes;
    MSC__ASSERT(ctx->held_bytes <= ctx->limit_bytes);
    return result;
}

void *msc__alloc(msc_context *ctx, size_t bytes)
{
    void *result;

    if (bytes == 0)
        return NULL;
    result = msc__resize(ctx, NULL, 0, bytes);
    if (result != NULL)
        memset(result, 0, bytes);
    return result;
}

void msc__free(msc_context *ctx, void *old, size_t bytes)
{
    if (old == NULL)
        return;
    MSC__ASSERT(bytes > 0 && bytes <= ctx->held_bytes); /* what it was made with */
    (void)ctx->allocator.resize(ctx->allocator.user, old, bytes, 0);
    ctx->held_bytes -= bytes;
}
