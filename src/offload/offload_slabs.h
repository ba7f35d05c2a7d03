/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file offload_slabs.h
 * Host memory for what left the device: slabs from the operating system, page-locked or not, cut into blocks of
 * exact size (offload_ranges.h).
 *
 * A slab is mapped when no other has room. Blocks of up to 8 MiB share slabs of 64 MiB, or of what the limit
 * leaves; a larger block has one of its own size, to the page. The limit counts what is mapped, not what is used,
 * because that is what the machine lost; when no new slab can be had, a block goes wherever it fits. Slabs stay
 * until `msc__slabs_trim` or `_destroy`: pinning costs milliseconds.
 *
 * The memory of slabs comes from the operating system and not from the context: `msc__slabs_in_use` counts it,
 * `msc_context_held_bytes` does not. Nothing is taken from the context either while no new slab is mapped and no
 * slab holds more blocks than it ever did.
 *
 * Blocks are aligned to MSC__SLAB_ALIGNMENT, so copies out of them and direct file access can use their full width.
 *
 * Threads: one at a time; the engine holds its mutex.
 */
#ifndef MSC_OFFLOAD_SLABS_H
#define MSC_OFFLOAD_SLABS_H

#include <stdbool.h>
#include <stdint.h>

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

/**
 * Takes a block of `bytes` > 0.
 *
 * Errors: EINVAL (0 bytes); EAGAIN (the limit leaves no room; no message); ENOMEM (the system refused to map or to
 * pin: the reason, and what to do about it; nothing is mapped, and whoever asks again asks the system again).
 * Cost: one comparison for each slab, and constant time; a new slab takes about 10 ms.
 */
msc_status msc__slabs_take(msc__slabs *slabs, uint64_t bytes, msc__slab_block *out, msc_error *err);

/** Maps no more slabs from now on: what was refused once is not asked for at every block. */
void msc__slabs_stop(msc__slabs *slabs);

/** Gives a block back. */
void msc__slabs_give(msc__slabs *slabs, msc__slab_block block);

/**
 * Unmaps slabs that hold no block. Returns the bytes that the machine got back. Worth a call when `_take` says EAGAIN
 * while much of what is mapped is not taken: slabs of other sizes may be in the way.
 */
uint64_t msc__slabs_trim(msc__slabs *slabs);

msc__slabs_use msc__slabs_in_use(const msc__slabs *slabs);

#endif /* MSC_OFFLOAD_SLABS_H */
