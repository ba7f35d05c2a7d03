/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file itself: opened so that nothing of it remains, tried for direct access, and made longer.
 *
 * Two descriptors lead to it. `fd` goes through the page cache and takes everything; `direct_fd` passes it by
 * and takes what is aligned. The system keeps the two in step as long as no page is half of one and half of
 * the other at a time (offload_file.h says what that asks of the callers).
 *
 * Whether direct access works, and from which alignment on, is found by doing it: a block is written and read
 * back with 512 bytes, then with 4096. What file systems say about themselves is neither complete (it takes a
 * newer kernel than we do) nor always true of what lies below them.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* O_TMPFILE, O_DIRECT, fallocate, mkostemp */
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "offload/file/offload_file_internal.h"

#define PATH_BYTES 4096

/* Space is asked for in pieces, so that a signal repeats one piece and not the whole. */
#define PIECE_BYTES (UINT64_C(256) << 20)

/* ---- what went wrong ------------------------------------------------------------------------------ */

/* The system's own words are not to be had by threads in a portable way; these are the usual reasons. */
static const char *words_for(int number)
{
    switch (number) {
    case ENOSPC:
        return "the disk is full";
    case EDQUOT:
        return "the quota is used up";
    case EFBIG:
        return "the file is too large for the file system or for ulimit -f";
    case EIO:
        return "the disk failed";
    case ENOENT:
        return "there is no such directory";
    case ENOTDIR:
        return "this is not a directory";
    case EACCES:
    case EPERM:
        return "not allowed";
    case EROFS:
        return "the file system is read-only";
    case EMFILE:
    case ENFILE:
        return "too many files are open (ulimit -n)";
    default:
        return "refused by the system";
    }
}

msc_status msc__file_fail(const msc__file_body *body, int number, const char *what, msc_error *err)
{
    (void)msc__fail(err, MSC_EIO, "cannot %s in %s: %s (%d)", what, body->directory, words_for(number),
                    number);
    if (err != NULL)
        err->driver_code = number;
    return MSC_EIO;
}

int64_t msc__file_ask(const msc__file_body *body, msc__file_wish wish, uint64_t bytes, uint64_t offset)
{
    if (body->censor == NULL)
        return (int64_t)bytes;
    return body->censor->ask(body->censor->user, wish, bytes, offset);
}

/* ---- opening -------------------------------------------------------------------------------------- */

/* A file with a name for a moment, where the file system knows no other. Returns 0 or the system's number. */
static int open_and_unlink(msc__file_body *body, const char *directory)
{
    char path[PATH_BYTES];
    int length = snprintf(path, sizeof path, "%s/memscale-XXXXXX", directory);

    if (length < 0 || (size_t)length >= sizeof path)
        return ENAMETOOLONG;
    body->fd = mkostemp(path, O_CLOEXEC);
    if (body->fd < 0)
        return errno;
    return unlink(path) == 0 ? 0 : errno;
}

static int open_unnamed(msc__file_body *body, const char *directory)
{
    int64_t asked = msc__file_ask(body, MSC__FILE_WISH_UNNAMED, 0, 0);
    int number = (int)-asked;

    if (asked >= 0) {
        body->fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
        if (body->fd >= 0)
            return 0;
        number = errno;
    }
    /* Not in this file system; or not in this kernel, which then takes it for the directory itself. */
    if (number == EOPNOTSUPP || number == EISDIR || number == EINVAL)
        return open_and_unlink(body, directory);
    return number;
}

/* Whether a file so long is within `ulimit -f`. To go beyond would bring the program a signal that ends it. */
static bool is_allowed(uint64_t bytes)
{
    struct rlimit limit;

    return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur;
}

/* Writes one block past the page cache and reads it back. */
static bool direct_works(const msc__file_body *body, int fd, uint32_t alignment)
{
    char room[2 * 2 * 4096];
    /* Aligned to this and to no more: what works here must not have worked by luck. */
    char *block =
        room + (2 * (size_t)alignment - (uintptr_t)room % (2 * alignment)) % (2 * alignment) + alignment;
    bool works;

    if (!is_allowed(alignment) || msc__file_ask(body, MSC__FILE_WISH_DIRECT, alignment, 0) < 0)
        return false;
    MSC__ASSERT((uintptr_t)block % alignment == 0 && (uintptr_t)block % (2 * alignment) != 0);
    MSC__ASSERT(block >= room && block + alignment <= room + sizeof room);
    memset(block, 0x5a, alignment);
    works = pwrite(fd, block, alignment, 0) == (ssize_t)alignment;
    memset(block, 0, alignment);
    works = works && pread(fd, block, alignment, 0) == (ssize_t)alignment;
    works = works && block[0] == 0x5a && memcmp(block, block + 1, alignment - 1) == 0;
    return ftruncate(fd, 0) == 0 && works;
}

/* A second descriptor that passes the page cache by, if that can be. */
static void open_direct(msc__file_body *body)
{
    static const uint32_t alignments[] = {512, 4096};
    char path[64];
    size_t i;
    int fd;

    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", body->fd); /* the file has no other name */
    fd = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
    if (fd < 0)
        return;
    for (i = 0; i < sizeof alignments / sizeof alignments[0]; i++) {
        if (direct_works(body, fd, alignments[i])) {
            body->direct_fd = fd;
            body->alignment = alignments[i];
            return;
        }
    }
    (void)close(fd);
}

msc_status msc__file_body_create(msc_context *ctx, const msc__file_options *options,
                                 const msc__file_censor *censor, msc__file_body **out, msc_error *err)
{
    msc__file_body *body = msc__alloc(ctx, sizeof *body);
    msc_status status;
    int number;

    *out = NULL;
    if (body == NULL)
        return msc__fail_memory(err, "a file", sizeof *body);
    body->ctx = ctx;
    body->censor = censor;
    body->handle_count = 1;
    body->fd = -1;
    body->direct_fd = -1;
    body->alignment = 1;
    atomic_init(&body->reserved, 0);
    atomic_init(&body->held, true);
    (void)snprintf(body->directory, sizeof body->directory, "%s", options->directory);
    number = open_unnamed(body, options->directory);
    if (number != 0) {
        status = msc__file_fail(body, number, "make a file", err);
        msc__file_body_destroy(body);
        return status;
    }
    if (!options->buffered)
        open_direct(body);
    *out = body;
    return MSC_OK;
}

void msc__file_body_close(msc__file_body *body)
{
    if (body->direct_fd >= 0)
        (void)close(body->direct_fd);
    if (body->fd >= 0)
        (void)close(body->fd);
    body->direct_fd = body->fd = -1;
}

void msc__file_body_destroy(msc__file_body *body)
{
    if (body == NULL || --body->handle_count > 0)
        return;
    msc__file_body_close(body);
    msc__free(body->ctx, body, sizeof *body);
}

/* ---- space ---------------------------------------------------------------------------------------- */

/* Takes [from, to) from the file system. Returns 0 or the system's number. */
static int allocate(const msc__file_body *body, uint64_t from, uint64_t to)
{
    while (from < to) {
        uint64_t bytes = to - from < PIECE_BYTES ? to - from : PIECE_BYTES;
        int64_t asked = msc__file_ask(body, MSC__FILE_WISH_SPACE, bytes, from);
        int number = asked < 0 ? (int)-asked : 0;

        if (number == 0 && fallocate(body->fd, 0, (off_t)from, (off_t)bytes) != 0)
            number = errno;
        if (number == EINTR)
            continue;
        if (number != 0)
            return number;
        from += bytes;
    }
    return 0;
}

msc_status msc__file_body_reserve(msc__file_body *body, uint64_t bytes, msc_error *err)
{
    /* Relaxed: this thread is the only one that stores it. */
    uint64_t reserved = atomic_load_explicit(&body->reserved, memory_order_relaxed);
    int number = EFBIG;

    if (bytes <= reserved)
        return MSC_OK;
    if (bytes <= INT64_MAX && is_allowed(bytes))
        number = allocate(body, reserved, bytes);
    if (number == EOPNOTSUPP || number == ENOSYS) {
        number = ftruncate(body->fd, (off_t)bytes) == 0 ? 0 : errno;
        if (number == 0)
            atomic_store_explicit(&body->held, false, memory_order_relaxed);
    }
    if (number != 0) {
        /* Gives back the pieces that were had. If even that fails, nothing else can. */
        (void)!ftruncate(body->fd, (off_t)reserved);
        return msc__file_fail(body, number, "reserve space", err);
    }
    atomic_store_explicit(&body->reserved, bytes, memory_order_release);
    return MSC_OK;
}
