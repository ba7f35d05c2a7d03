/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_restore.h
 * Putting a simulator of kind CUDA into a state that was seen elsewhere, for the replay of a trace that does
 * not begin at the beginning.
 */
#ifndef MSC_SIM_SIM_RESTORE_H
#define MSC_SIM_SIM_RESTORE_H

#include "memscale/sim.h"
#include "sim/sim_blocks.h"

/** A block to restore, in order of address; the first begins where its segment does. */
typedef struct msc__sim_restored_block {
    uint64_t size_bytes;      /**< a multiple of 512 */
    uint64_t requested_bytes; /**< ALLOCATED, AWAITING */
    uint32_t id;              /**< ALLOCATED, AWAITING */
    uint32_t state;           /**< msc__sim_state; UNMAPPED: whole pages of an expandable segment */
} msc__sim_restored_block;

/** A segment to restore. Of an expandable one: all its address space, from its first page on. */
typedef struct msc__sim_restored_segment {
    uint64_t address;
    msc_sim_place place;
    uint32_t is_large;
    uint32_t block_count;
    const msc__sim_restored_block *blocks;
} msc__sim_restored_segment;

/**
 * Adds a segment with its blocks. Sums and peaks count it as if it had been obtained; no event is recorded.
 *
 * Two free blocks side by side, or two unmapped ones, must have been merged by the caller. With expandable
 * segments on, every segment is one; otherwise none is.
 * Errors: EINVAL (sizes, an id in use), ENOMEM, EOVERFLOW. After an error the simulator can only be
 * destroyed.
 */
msc_status msc__sim_restore(msc_sim *sim, const msc__sim_restored_segment *segment, msc_error *err);

#endif /* MSC_SIM_SIM_RESTORE_H */
