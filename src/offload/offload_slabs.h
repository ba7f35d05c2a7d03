/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file offload_slabs.h
 * Host memory for what left the device: slabs from the operating system, pinned or not, cut into blocks of
 * exact size (offload_ranges.h).
 *
 * A slab is mapped when no other has room. Blocks of up to 8 MiB share slabs of 64 MiB, or of what the limit
 * leaves; a larger block has one of its own size, to the page. The limit counts what is mapped, not what is used,
 * because that is what the machine lost; when no new slab can be had, a block goes wherever it fits. Slabs stay
 * until `_destroy`, because pinning costs milliseconds, or until a block would be refused: then empty ones go, as few as
 * it needs.
 *
 * The memory of slabs comes from the operating system and not from the context: `msc__slabs_in_use` counts it,
 * `msc_context_held_bytes` does not. Nothing is taken from the context either while no new slab is mapped and no
 * slab holds more blocks than it ever did.
 *
 * Blocks are aligned to MSC__SLAB_ALIGNMENT, so copies out of them and direct file access can use their full width.
 *
 * Threads: one at a time, which holds the mutex (`msc__slabs_share`). `msc__slabs_take` releases it while it asks the
 * system, which takes milliseconds for a large slab.
 */
#ifndef MSC_OFFLOAD_SLABS_H
#define MSC_OFFLOAD_SLABS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/thread.h"
#include "device/device_internal.h"

/** Alignment of blocks; PyTorch's own allocator for cards gives the same. */
#define MSC__SLAB_ALIGNMENT 512

typedef struct msc__slabs msc__slabs;

/** A block of a slab. All zero: none. */
typedef struct msc__slab_block {
    void *memory;
    uint32_t slab;
    uint32_t range;
} msc__slab_block;

/** What a set of slabs holds. */
typedef struct msc__slabs_use {
    uint64_t mapped_bytes; /* never above the limit */
    uint64_t taken_bytes;  /* in units of MSC__SLAB_ALIGNMENT */
    uint64_t mapped_peak_bytes;
    uint64_t taken_peak_bytes;
    uint32_t block_count;
} msc__slabs_use;

/**
 * @param device      pins slabs; NULL: pageable memory.
 * @param limit_bytes most that may be mapped; what it has beyond whole pages is never used.
 * Errors: EUNSUPPORTED (the device pins nothing), ENOMEM.
 */
msc_status msc__slabs_create(msc_context *ctx, msc_device *device, uint64_t limit_bytes, msc__slabs **out,
                             msc_error *err);
void msc__slabs_destroy(msc__slabs *slabs);

/** Several threads use the slabs from now on, each with `mutex` held. `changed` is broadcast when a slab has grown. */
void msc__slabs_share(msc__slabs *slabs, msc__mutex *mutex, msc__cond *changed);

/**
 * Takes a block of `bytes` > 0. The mutex is free for a time where the system is asked for a slab, or another thread
 * asks it.
 *
 * Errors: EINVAL (0 bytes); EAGAIN (the limit leaves no room; no message); ENOMEM (the system refused to map or to
 * pin: the reason, and what to do about it; nothing is mapped, and the next call asks the system again).
 * Cost: one comparison for each slab, and constant time; a new slab takes about 10 ms.
 */
msc_status msc__slabs_take(msc__slabs *slabs, uint64_t bytes, msc__slab_block *out, msc_error *err);

/** As `msc__slabs_take` where that need not ask the system. ETIMEDOUT (no message): it has to. */
msc_status msc__slabs_take_now(msc__slabs *slabs, uint64_t bytes, msc__slab_block *out, msc_error *err);

/** What is mapped is the limit from now on: what was refused once is not asked for at every block. */
void msc__slabs_stop(msc__slabs *slabs);

/** Gives a block back. */
void msc__slabs_give(msc__slabs *slabs, msc__slab_block block);

msc__slabs_use msc__slabs_in_use(const msc__slabs *slabs);

#endif /* MSC_OFFLOAD_SLABS_H */
