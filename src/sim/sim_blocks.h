/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_blocks.h
 * Blocks of simulated memory: the table that holds them, the lists of neighbours, the sets of free ones.
 *
 * A block is named by its slot, an index into the table that stays valid while the table grows. Slot 0 is
 * never given out and means "none", so zeroed records are valid.
 */
#ifndef MSC_SIM_SIM_BLOCKS_H
#define MSC_SIM_SIM_BLOCKS_H

#include <stdbool.h>

#include "base/array.h"

/** Granule of every size in a set; PyTorch's kMinBlockSize. */
#define MSC__SIM_GRANULE_BYTES 512u

/** No block is this large or larger, so sums of two sizes cannot overflow. */
#define MSC__SIM_MOST_BYTES (UINT64_C(1) << 62)

/** Size classes: 16 for each power of two of granules, from 1 to 2^53 granules, rounded up to whole words. */
#define MSC__SIM_CLASS_COUNT 832u
#define MSC__SIM_CLASS_WORDS (MSC__SIM_CLASS_COUNT / 64u)

typedef enum msc__sim_state {
    MSC__SIM_EMPTY,     /**< the slot holds no block */
    MSC__SIM_ALLOCATED, /**< in use by the program */
    MSC__SIM_AWAITING,  /**< freed by the program, awaited by a stream: not to be reused yet */
    MSC__SIM_FREE,      /**< cached: in the free set of its stream and pool */
    MSC__SIM_UNMAPPED   /**< address space without memory, in expandable segments only */
} msc__sim_state;

/** One block: 48 bytes. */
typedef struct msc__sim_block {
    uint64_t address;
    uint64_t size_bytes;
    uint32_t prev; /**< neighbour below in the same segment */
    uint32_t next; /**< neighbour above; of an empty slot: the next empty one */
    union {
        struct {
            uint32_t left;  /**< FREE: tree children; UNMAPPED: list neighbours by address */
            uint32_t right; /**< see left */
        } link;
        uint64_t requested_bytes; /**< ALLOCATED, AWAITING: what the program asked for */
    } use;
    uint32_t set_index; /**< place and pool, see sim_pools.h */
    uint32_t tag;       /**< ALLOCATED, AWAITING: the id; FREE: requests counted when it became free */
    uint32_t phase;     /**< granules from a multiple of the page to the pages' borders; 0: not expandable */
    uint16_t priority;  /**< heap order in the tree; belongs to the slot, not to the block */
    uint8_t state;      /**< msc__sim_state */
    uint8_t pad;
} msc__sim_block;

/** The table. A zeroed one is empty. */
typedef struct msc__sim_blocks {
    msc__array slots;     /**< of msc__sim_block; index 0 unused */
    uint32_t empty_first; /**< list of slots given back */
    uint32_t used_count;  /**< blocks in the table */
} msc__sim_blocks;

/** Free blocks of one place and pool, ordered by size, then address. A zeroed one is empty. */
typedef struct msc__sim_set {
    uint64_t summary;                       /**< bit w: word w is not zero */
    uint64_t words[MSC__SIM_CLASS_WORDS];   /**< bit c: class c is not empty */
    uint32_t roots[MSC__SIM_CLASS_COUNT];   /**< tree of each class */
    uint32_t unmapped_first, unmapped_last; /**< unmapped blocks by address, see sim_expandable.c */
} msc__sim_set;

static inline msc__sim_block *msc__sim_block_at(const msc__sim_blocks *blocks, uint32_t slot)
{
    return (msc__sim_block *)blocks->slots.items + slot;
}

/** Whether a block may neither be reused nor merged. */
static inline bool msc__sim_is_active(const msc__sim_block *block)
{
    return block->state == MSC__SIM_ALLOCATED || block->state == MSC__SIM_AWAITING;
}

/* ---- table -------------------------------------------------------------------------------------- */

/** Makes sure that the table can hold `total` blocks at once. Errors: ENOMEM, EOVERFLOW; unchanged then. */
msc_status msc__sim_blocks_reserve(msc_context *ctx, msc__sim_blocks *blocks, uint64_t total, msc_error *err);
/** A new block, zeroed but for its priority. The room must have been reserved. Cost: constant. */
uint32_t msc__sim_blocks_take(msc__sim_blocks *blocks);
void msc__sim_blocks_give(msc__sim_blocks *blocks, uint32_t slot);
/** Forgets every block and keeps the memory. */
void msc__sim_blocks_clear(msc__sim_blocks *blocks);
void msc__sim_blocks_fini(msc_context *ctx, msc__sim_blocks *blocks);

/* ---- neighbours --------------------------------------------------------------------------------- */

/**
 * Cuts a block: `slot` keeps the first `size_bytes`, the result is the rest, of the same segment, set and
 * state. Takes one slot, which must have been reserved. Neither part is entered into a set.
 */
uint32_t msc__sim_blocks_split(msc__sim_blocks *blocks, uint32_t slot, uint64_t size_bytes);
/** Adds `other`, a neighbour of `slot`, to it and gives its slot back. Neither may be in a set. */
void msc__sim_blocks_absorb(msc__sim_blocks *blocks, uint32_t slot, uint32_t other);

/* ---- free sets ---------------------------------------------------------------------------------- */

/** Where a block stands in the order of a set. The slot tells apart what a caller put at one address. */
typedef struct msc__sim_key {
    uint64_t size_bytes;
    uint64_t address;
    uint32_t slot;
} msc__sim_key;

static inline msc__sim_key msc__sim_key_of(const msc__sim_blocks *blocks, uint32_t slot)
{
    const msc__sim_block *block = msc__sim_block_at(blocks, slot);
    msc__sim_key key = {block->size_bytes, block->address, slot};

    return key;
}

uint32_t msc__sim_class_of(uint64_t size_bytes);
void msc__sim_set_insert(msc__sim_blocks *blocks, msc__sim_set *set, uint32_t slot);
/** Takes out a block that is in the set. */
void msc__sim_set_erase(msc__sim_blocks *blocks, msc__sim_set *set, uint32_t slot);
/** First block that is not below (size, address), or 0. With address 0 this is the best fit. */
uint32_t msc__sim_set_lower_bound(const msc__sim_blocks *blocks, const msc__sim_set *set, uint64_t size_bytes,
                                  uint64_t address);
/** First block above a key, or 0. To walk a set while its blocks come and go, take each key before. */
uint32_t msc__sim_set_after(const msc__sim_blocks *blocks, const msc__sim_set *set, const msc__sim_key *key);
/** Last block of the order, or 0. */
uint32_t msc__sim_set_largest(const msc__sim_blocks *blocks, const msc__sim_set *set);

#endif /* MSC_SIM_SIM_BLOCKS_H */
