/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Handles and operations of the file.
 *
 *      msc__file ──► msc__file_body      the file: descriptors, what is reserved; shared by its handles
 *          │
 *          ├──► slots                    one per operation in flight
 *          └──► mover                    io_uring or threads: begins operations, knows when they are over
 *
 * An operation is moved in attempts. Each asks for what is left, at most ATTEMPT_MOST, on the descriptor that
 * suits what is left; the system may do less of it or be interrupted, and then there is another. Both
 * movers use `msc__file_attempt` and `msc__file_account`, so they differ only in how the system is asked.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "offload/file/offload_file_internal.h"

/* The system moves at most 2^31 bytes less a page at once; a power of two below keeps the rest aligned. */
#define ATTEMPT_MOST (UINT64_C(1) << 30)

/* ---- attempts ------------------------------------------------------------------------------------- */

static bool is_aligned(const msc__file_body *body, const msc__file_slot *slot)
{
    uint64_t mask = body->alignment - 1;

    return slot->offset % MSC__FILE_PAGE == 0 && (slot->left & mask) == 0 &&
           ((uintptr_t)slot->memory & (uintptr_t)mask) == 0;
}

bool msc__file_attempt(const msc__file *file, msc__file_slot *slot, int *fd, size_t *bytes)
{
    const msc__file_body *body = file->body;
    uint64_t wanted = slot->left < ATTEMPT_MOST ? slot->left : ATTEMPT_MOST;
    int64_t asked;

    do
        asked = msc__file_ask(body, slot->writes ? MSC__FILE_WISH_WRITE : MSC__FILE_WISH_READ, wanted,
                              slot->offset);
    while (asked < 0 && msc__file_account(slot, asked));
    if (asked < 0)
        return false;
    MSC__ASSERT(asked > 0 && (uint64_t)asked <= wanted);
    *bytes = (size_t)asked;
    *fd = body->fd;
    if (body->direct_fd >= 0 && is_aligned(body, slot) && (*bytes & (body->alignment - 1)) == 0)
        *fd = body->direct_fd;
    return true;
}

bool msc__file_account(msc__file_slot *slot, int64_t result)
{
    if (result == -EINTR || result == -EAGAIN)
        return true;
    if (result <= 0) {
        slot->number = result == 0 ? EIO : (int)-result; /* 0: the file is shorter than what was reserved */
        return false;
    }
    MSC__ASSERT((uint64_t)result <= slot->left);
    slot->memory += result;
    slot->offset += (uint64_t)result;
    slot->left -= (uint64_t)result;
    return slot->left > 0;
}

void msc__file_run(const msc__file *file, msc__file_slot *slot)
{
    ssize_t result;
    size_t bytes;
    int fd;

    do {
        if (!msc__file_attempt(file, slot, &fd, &bytes))
            return;
        result = slot->writes ? pwrite(fd, slot->memory, bytes, (off_t)slot->offset)
                              : pread(fd, slot->memory, bytes, (off_t)slot->offset);
    } while (msc__file_account(slot, result < 0 ? -errno : result));
}

/* ---- handles -------------------------------------------------------------------------------------- */

/* The way that was asked for; or io_uring, and threads where there is none. */
static msc_status start_mover(msc__file *file, msc_error *err)
{
    msc_error reason;
    msc_status status;

    if (file->way != MSC__FILE_THREADS) {
        file->mover = &msc__file_ring;
        status = file->mover->create(file, &reason);
        if (status != MSC_EUNSUPPORTED || file->way == MSC__FILE_RING) {
            if (status != MSC_OK && err != NULL)
                *err = reason;
            return status;
        }
    }
    file->mover = &msc__file_threads;
    return file->mover->create(file, err);
}

/* A handle on `body`, with a share of it from then on, even when it fails. */
static msc_status make_handle(msc__file_body *body, uint32_t depth, msc__file_way way, msc__file **out,
                              msc_error *err)
{
    msc__file *file = msc__alloc(body->ctx, sizeof *file);
    msc_status status;

    if (file == NULL) {
        msc__file_body_destroy(body);
        return msc__fail_memory(err, "a file", sizeof *file);
    }
    file->body = body;
    file->depth = depth;
    file->way = way;
    file->slots = msc__alloc(body->ctx, depth * sizeof *file->slots);
    if (file->slots == NULL)
        status = msc__fail_memory(err, "a file", depth * sizeof *file->slots);
    else
        status = start_mover(file, err);
    if (status != MSC_OK) {
        file->mover = NULL; /* it has nothing to end */
        msc__file_destroy(file);
        return status;
    }
    *out = file;
    return MSC_OK;
}

msc_status msc__file_create_censored(msc_context *ctx, const msc__file_options *options,
                                     const msc__file_censor *censor, msc__file **out, msc_error *err)
{
    msc__file_body *body;
    msc_status status;

    *out = NULL;
    if (options->directory == NULL)
        return msc__fail(err, MSC_EINVAL, "directory is NULL");
    if (options->depth == 0 || options->depth > MSC__FILE_DEPTH_MOST)
        return msc__fail(err, MSC_EINVAL, "depth is %u, must be 1 to %u", options->depth,
                         MSC__FILE_DEPTH_MOST);
    if (options->way > MSC__FILE_THREADS)
        return msc__fail(err, MSC_EINVAL, "way is %u", (unsigned)options->way);
    status = msc__file_body_create(ctx, options, censor, &body, err);
    return status == MSC_OK ? make_handle(body, options->depth, options->way, out, err) : status;
}

msc_status msc__file_create(msc_context *ctx, const msc__file_options *options, msc__file **out,
                            msc_error *err)
{
    return msc__file_create_censored(ctx, options, NULL, out, err);
}

msc_status msc__file_share(msc__file *file, msc__file **out, msc_error *err)
{
    *out = NULL;
    file->body->handle_count++;
    return make_handle(file->body, file->depth, file->way, out, err);
}

void msc__file_destroy(msc__file *file)
{
    msc_context *ctx;
    uint32_t i;

    if (file == NULL)
        return;
    ctx = file->body->ctx;
    if (file->mover != NULL) {
        for (i = 0; i < file->depth; i++)
            if (file->slots[i].taken)
                file->mover->wait(file, i);
        file->mover->destroy(file);
    }
    msc__free(ctx, file->slots, file->depth * sizeof *file->slots);
    msc__file_body_destroy(file->body);
    msc__free(ctx, file, sizeof *file);
}

void msc__file_abandon(msc__file *file)
{
    msc__file_body_close(file->body);
}

msc_status msc__file_reserve(msc__file *file, uint64_t bytes, msc_error *err)
{
    return msc__file_body_reserve(file->body, bytes, err);
}

msc__file_facts msc__file_facts_of(const msc__file *file)
{
    return (msc__file_facts){
        .reserved_bytes = atomic_load_explicit(&file->body->reserved, memory_order_acquire),
        .alignment = file->body->alignment,
        .direct = file->body->direct_fd >= 0,
        .ring = file->mover == &msc__file_ring,
        .held = atomic_load_explicit(&file->body->held, memory_order_relaxed),
    };
}

/* ---- operations ----------------------------------------------------------------------------------- */

static msc_status begin(msc__file *file, msc__file_slot wanted, uint32_t *slot, msc_error *err)
{
    uint64_t reserved = atomic_load_explicit(&file->body->reserved, memory_order_acquire);
    uint32_t i;

    if (wanted.bytes == 0 || wanted.offset > reserved || wanted.bytes > reserved - wanted.offset)
        return msc__fail(err, MSC_EINVAL, "%llu bytes at %llu are not within the %llu bytes reserved",
                         (unsigned long long)wanted.bytes, (unsigned long long)wanted.offset,
                         (unsigned long long)reserved);
    if (file->taken_count == file->depth)
        return MSC_EAGAIN;
    for (i = 0; file->slots[i].taken; i++)
        MSC__ASSERT(i + 1 < file->depth);
    wanted.left = wanted.bytes;
    wanted.taken = true;
    file->slots[i] = wanted;
    file->taken_count++;
    *slot = i;
    file->mover->begin(file, i);
    return MSC_OK;
}

msc_status msc__file_write(msc__file *file, const void *memory, uint64_t bytes, uint64_t offset,
                           uint32_t *slot, msc_error *err)
{
    /* The memory is only read, but the slot serves both directions. */
    msc__file_slot wanted = {.memory = (char *)memory, .bytes = bytes, .offset = offset, .writes = true};

    return begin(file, wanted, slot, err);
}

msc_status msc__file_read(msc__file *file, void *memory, uint64_t bytes, uint64_t offset, uint32_t *slot,
                          msc_error *err)
{
    msc__file_slot wanted = {.memory = memory, .bytes = bytes, .offset = offset, .writes = false};

    return begin(file, wanted, slot, err);
}

bool msc__file_done(msc__file *file, uint32_t slot)
{
    MSC__ASSERT(slot < file->depth && file->slots[slot].taken);
    return file->mover->is_over(file, slot);
}

msc_status msc__file_wait(msc__file *file, uint32_t slot, msc_error *err)
{
    msc__file_slot *one;
    char what[64];

    if (slot >= file->depth || !file->slots[slot].taken)
        return msc__fail(err, MSC_EINVAL, "slot %u has no operation", slot);
    one = &file->slots[slot];
    file->mover->wait(file, slot);
    MSC__ASSERT(file->taken_count > 0 && (one->number != 0 || one->left == 0));
    one->taken = false;
    file->taken_count--;
    if (one->number == 0)
        return MSC_OK;
    (void)snprintf(what, sizeof what, "%s %llu bytes", one->writes ? "write" : "read",
                   (unsigned long long)one->bytes);
    return msc__file_fail(file->body, one->number, what, err);
}
