/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file offload_file.h
 * The file tier's file: reads and writes of chunks, several at a time, without waiting for each.
 *
 * The file has no name: it is opened with O_TMPFILE, or unlinked as soon as it is open where the file system
 * cannot do that, so nothing is left when the process dies. Space is reserved before it is written
 * (`msc__file_reserve`), so a full disk is known before any byte is given up, and not in the middle of a step.
 *
 * Two ways to move the bytes, one contract: io_uring where the system allows it, threads with `pread` and `pwrite`
 * elsewhere. Where the file system takes O_DIRECT and the chunk is aligned, the page cache is passed by: an
 * offloaded activation that lands in the page cache has not left the memory.
 *
 * A page of the file must not be shared by two operations if one is not aligned: give out places in the file
 * in units of MSC__FILE_PAGE. Operations in flight must not overlap.
 *
 * `write` and `read` never wait for the disk: with all `depth` slots taken they say EAGAIN. Short reads and writes
 * and EINTR are continued inside.
 *
 * Threads: write, read, wait and done may be called from one thread at a time; `reserve` from another. A second
 * thread that moves bytes of the same file has a handle of its own (`msc__file_share`).
 */
#ifndef MSC_OFFLOAD_FILE_H
#define MSC_OFFLOAD_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include "memscale/base.h"

/** What is direct begins at a multiple of this in the file; a page of every machine that we build for. */
#define MSC__FILE_PAGE 4096u

/** Operations in flight at most, for one handle. */
#define MSC__FILE_DEPTH_MOST 256u

typedef struct msc__file msc__file;

/** How the bytes are moved. */
typedef enum msc__file_way { MSC__FILE_ANY, MSC__FILE_RING, MSC__FILE_THREADS } msc__file_way;

typedef struct msc__file_options {
    const char *directory; /* where the file lies; must exist */
    uint32_t depth;        /* operations in flight at most, 1 … 256 */
    msc__file_way way;     /* ANY: io_uring where there is one */
    bool buffered;         /* true: through the page cache, even where O_DIRECT works */
} msc__file_options;

/** What it turned out to be. */
typedef struct msc__file_facts {
    uint64_t reserved_bytes;
    uint32_t alignment; /* of memory and size, for the direct way; 1 where there is none */
    bool direct;
    bool ring;
    bool held; /* the space reserved is the file's own. False: the file system reserves none (some network and
                  FUSE file systems); the file is only made longer, and a full disk shows as EIO of a write */
} msc__file_facts;

/**
 * Errors: EINVAL (names the field), EIO (the directory: what the system said, with its number), ENOMEM,
 * EUNSUPPORTED (way RING, and there is none: too old, forbidden, or a limit on locked memory).
 */
msc_status msc__file_create(msc_context *ctx, const msc__file_options *options, msc__file **out,
                            msc_error *err);

/**
 * A second handle on the same file, with operations and slots of its own, so that one thread writes while
 * another reads. What one of them reserved, both may use. The file lives until both handles are destroyed, in any
 * order. Errors: ENOMEM, EIO.
 */
msc_status msc__file_share(msc__file *file, msc__file **out, msc_error *err);

/** Waits for what is in flight, then closes. NULL is accepted. */
void msc__file_destroy(msc__file *file);

/** For a child of fork: closes its descriptors of the file, so that it does not keep the space, and touches nothing
    else. The handle is good for nothing afterwards, and may be abandoned again. */
void msc__file_abandon(msc__file *file);

/**
 * Makes the file at least `bytes` long, with its space taken from the file system.
 * Never writes zeros to get it, which would take as long as filling the disk; see `held`.
 * Errors: EIO with ENOSPC, EDQUOT or EFBIG in `driver_code`: nothing was reserved.
 */
msc_status msc__file_reserve(msc__file *file, uint64_t bytes, msc_error *err);

/**
 * Starts to write or read `bytes` > 0 at `offset`, within what is reserved. `memory` must stay until the operation
 * is over. What is not aligned goes through the page cache.
 *
 * @param slot names the operation, 0 … depth − 1, until it is waited for.
 * Errors: EAGAIN (no slot; no message), EINVAL (not within what is reserved).
 */
msc_status msc__file_write(msc__file *file, const void *memory, uint64_t bytes, uint64_t offset,
                           uint32_t *slot, msc_error *err);
msc_status msc__file_read(msc__file *file, void *memory, uint64_t bytes, uint64_t offset, uint32_t *slot,
                          msc_error *err);

/** Blocks until the operation is over, and frees its slot. Errors: EIO with the system's number. */
msc_status msc__file_wait(msc__file *file, uint32_t slot, msc_error *err);

/** Whether the operation is over; `msc__file_wait`, which is still due, then returns at once. */
bool msc__file_done(msc__file *file, uint32_t slot);

msc__file_facts msc__file_facts_of(const msc__file *file);

#endif /* MSC_OFFLOAD_FILE_H */
