/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks of simulated memory.
 *
 * The table is one array of 48-byte records. Slots given back form a list through `next`. Room is
 * reserved before a call changes anything, so taking a slot cannot fail and pointers stay valid.
 *
 * A free set must answer "the smallest block of at least s bytes, the lowest address among equals" exactly:
 * an approximate fit would predict other segments than PyTorch makes. It has two levels:
 *
 *     summary   0 1 0 ...                one bit per word
 *     words     ..0100..  ..             one bit per size class, 16 classes per power of two
 *     roots     [class] -> tree          ordered by (size, address, slot)
 *
 * The bitmap finds the class in a few instructions; in real streams a class holds a handful of blocks, so
 * the tree is nearly always shallow. It is a treap, because that bounds the hostile case (all blocks in
 * one class) by O(log n) without parent links or rebalancing state. Priorities are a hash of the slot: the
 * shape is the same in every run, and no result depends on it. The slot ends the order, because a caller may
 * place two segments at one address; a set must survive that.
 *
 * Invariants: a class bit is set iff its root is not 0, a summary bit iff its word is not 0; in a tree
 * left < node < right, and no child has a higher priority than its parent.
 */
#include "sim/sim_blocks.h"

#include <stdbool.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"

#define CLASS_BITS 4u /* log2 of the classes per power of two */

/* ---- table -------------------------------------------------------------------------------------- */

msc_status msc__sim_blocks_reserve(msc_context *ctx, msc__sim_blocks *blocks, uint64_t total, msc_error *err)
{
    uint64_t extra;

    if (total < blocks->slots.capacity) /* slot 0 is the one more */
        return MSC_OK;
    extra = total + 1 - blocks->slots.count;
    if (extra > UINT32_MAX)
        return msc__fail(err, MSC_EOVERFLOW, "too many blocks for one simulator");
    return msc__array_reserve(ctx, &blocks->slots, sizeof(msc__sim_block), (uint32_t)extra, err);
}

/* Finalizer of MurmurHash3: neighbouring slots get unrelated priorities. */
static uint16_t priority_of(uint32_t slot)
{
    slot ^= slot >> 16;
    slot *= 0x85ebca6bu;
    slot ^= slot >> 13;
    slot *= 0xc2b2ae35u;
    return (uint16_t)(slot >> 16);
}

uint32_t msc__sim_blocks_take(msc__sim_blocks *blocks)
{
    uint32_t slot = blocks->empty_first;
    msc__sim_block *block;

    if (slot != 0) {
        blocks->empty_first = msc__sim_block_at(blocks, slot)->next;
        MSC__ASSERT(msc__sim_block_at(blocks, slot)->state == MSC__SIM_EMPTY);
    } else {
        if (blocks->slots.count == 0)
            memset(msc__sim_block_at(blocks, blocks->slots.count++), 0, sizeof *block);
        MSC__ASSERT(blocks->slots.count < blocks->slots.capacity);
        slot = blocks->slots.count++;
    }
    block = msc__sim_block_at(blocks, slot);
    memset(block, 0, sizeof *block);
    block->priority = priority_of(slot);
    blocks->used_count++;
    MSC__ASSERT(blocks->used_count < blocks->slots.count);
    return slot;
}

void msc__sim_blocks_give(msc__sim_blocks *blocks, uint32_t slot)
{
    msc__sim_block *block = msc__sim_block_at(blocks, slot);

    MSC__ASSERT(slot != 0 && slot < blocks->slots.count && blocks->used_count > 0);
    MSC__ASSERT(block->state != MSC__SIM_EMPTY);
    block->state = MSC__SIM_EMPTY;
    block->next = blocks->empty_first;
    blocks->empty_first = slot;
    blocks->used_count--;
}

void msc__sim_blocks_clear(msc__sim_blocks *blocks)
{
    blocks->slots.count = 0;
    blocks->empty_first = 0;
    blocks->used_count = 0;
}

void msc__sim_blocks_fini(msc_context *ctx, msc__sim_blocks *blocks)
{
    msc__array_fini(ctx, &blocks->slots, sizeof(msc__sim_block));
    memset(blocks, 0, sizeof *blocks);
}

/* ---- neighbours --------------------------------------------------------------------------------- */

uint32_t msc__sim_blocks_split(msc__sim_blocks *blocks, uint32_t slot, uint64_t size_bytes)
{
    uint32_t rest_slot = msc__sim_blocks_take(blocks);
    msc__sim_block *block = msc__sim_block_at(blocks, slot);
    msc__sim_block *rest = msc__sim_block_at(blocks, rest_slot);

    MSC__ASSERT(size_bytes > 0 && size_bytes < block->size_bytes);
    rest->address = block->address + size_bytes;
    rest->size_bytes = block->size_bytes - size_bytes;
    rest->set_index = block->set_index;
    rest->phase = block->phase;
    rest->state = block->state;
    rest->prev = slot;
    rest->next = block->next;
    if (rest->next != 0)
        msc__sim_block_at(blocks, rest->next)->prev = rest_slot;
    block->next = rest_slot;
    block->size_bytes = size_bytes;
    return rest_slot;
}

void msc__sim_blocks_absorb(msc__sim_blocks *blocks, uint32_t slot, uint32_t other_slot)
{
    msc__sim_block *block = msc__sim_block_at(blocks, slot);
    const msc__sim_block *other = msc__sim_block_at(blocks, other_slot);

    MSC__ASSERT(block->prev == other_slot || block->next == other_slot);
    MSC__ASSERT(block->set_index == other->set_index);
    if (block->prev == other_slot) {
        MSC__ASSERT(other->address + other->size_bytes == block->address);
        block->address = other->address;
        block->prev = other->prev;
        if (block->prev != 0)
            msc__sim_block_at(blocks, block->prev)->next = slot;
    } else {
        MSC__ASSERT(block->address + block->size_bytes == other->address);
        block->next = other->next;
        if (block->next != 0)
            msc__sim_block_at(blocks, block->next)->prev = slot;
    }
    block->size_bytes += other->size_bytes;
    msc__sim_blocks_give(blocks, other_slot);
}

/* ---- free sets ---------------------------------------------------------------------------------- */

/*
 * Below 16 granules a class is one size. Above, it is the position of the highest bit and the four bits
 * that follow it: 16 granules give class 16, so the numbering has no gap.
 */
uint32_t msc__sim_class_of(uint64_t size_bytes)
{
    uint64_t granules = size_bytes / MSC__SIM_GRANULE_BYTES;
    uint32_t high;

    if (granules < (1u << CLASS_BITS))
        return (uint32_t)granules;
    high = 63u - (uint32_t)__builtin_clzll(granules);
    MSC__ASSERT(high < 54); /* at most MSC__SIM_MOST_BYTES: 2^53 granules */
    return ((high - CLASS_BITS + 1) << CLASS_BITS) +
           (uint32_t)((granules >> (high - CLASS_BITS)) & ((1u << CLASS_BITS) - 1));
}

static inline bool is_below(const msc__sim_block *block, uint32_t slot, const msc__sim_key *key)
{
    if (block->size_bytes != key->size_bytes)
        return block->size_bytes < key->size_bytes;
    if (block->address != key->address)
        return block->address < key->address;
    return slot < key->slot;
}

void msc__sim_set_insert(msc__sim_blocks *blocks, msc__sim_set *set, uint32_t slot)
{
    msc__sim_block *block = msc__sim_block_at(blocks, slot);
    const msc__sim_key key = msc__sim_key_of(blocks, slot);
    uint32_t class_index = msc__sim_class_of(block->size_bytes);
    uint32_t *link = &set->roots[class_index];
    uint32_t *below = &block->use.link.left;
    uint32_t *above = &block->use.link.right;
    uint32_t at;

    MSC__ASSERT(block->state == MSC__SIM_FREE && block->size_bytes % MSC__SIM_GRANULE_BYTES == 0);
    set->words[class_index / 64] |= UINT64_C(1) << (class_index % 64);
    set->summary |= UINT64_C(1) << (class_index / 64);
    for (at = *link; at != 0; at = *link) {
        msc__sim_block *node = msc__sim_block_at(blocks, at);
        if (node->priority < block->priority)
            break;
        link = is_below(node, at, &key) ? &node->use.link.right : &node->use.link.left;
    }
    *link = slot;
    while (at != 0) { /* deal the subtree that the block displaces out to its two sides */
        msc__sim_block *node = msc__sim_block_at(blocks, at);
        if (is_below(node, at, &key)) {
            *below = at;
            below = &node->use.link.right;
            at = *below;
        } else {
            *above = at;
            above = &node->use.link.left;
            at = *above;
        }
    }
    *below = 0;
    *above = 0;
}

/* Joins two trees, all of `low` below all of `high`, and hangs the result at `link`. */
static void join_trees(msc__sim_blocks *blocks, uint32_t *link, uint32_t low, uint32_t high)
{
    while (low != 0 && high != 0) {
        msc__sim_block *low_node = msc__sim_block_at(blocks, low);
        msc__sim_block *high_node = msc__sim_block_at(blocks, high);
        if (low_node->priority >= high_node->priority) {
            *link = low;
            link = &low_node->use.link.right;
            low = *link;
        } else {
            *link = high;
            link = &high_node->use.link.left;
            high = *link;
        }
    }
    *link = low != 0 ? low : high;
}

void msc__sim_set_erase(msc__sim_blocks *blocks, msc__sim_set *set, uint32_t slot)
{
    const msc__sim_block *block = msc__sim_block_at(blocks, slot);
    const msc__sim_key key = msc__sim_key_of(blocks, slot);
    uint32_t class_index = msc__sim_class_of(block->size_bytes);
    uint32_t *link = &set->roots[class_index];

    while (*link != slot) {
        MSC__ASSERT(*link != 0); /* or the block is not in the set */
        msc__sim_block *node = msc__sim_block_at(blocks, *link);
        link = is_below(node, *link, &key) ? &node->use.link.right : &node->use.link.left;
    }
    join_trees(blocks, link, block->use.link.left, block->use.link.right);
    MSC__ASSERT((set->words[class_index / 64] >> (class_index % 64) & 1) != 0);
    if (set->roots[class_index] != 0)
        return;
    set->words[class_index / 64] &= ~(UINT64_C(1) << (class_index % 64));
    if (set->words[class_index / 64] == 0)
        set->summary &= ~(UINT64_C(1) << (class_index / 64));
}

/* First class above `class_index` that is not empty; 0, which no block has, if there is none. */
static uint32_t next_class(const msc__sim_set *set, uint32_t class_index)
{
    uint32_t word = (class_index + 1) / 64;
    uint64_t bits = set->words[word] & (UINT64_MAX << ((class_index + 1) % 64));
    uint64_t later;

    MSC__ASSERT(word < MSC__SIM_CLASS_WORDS);
    if (bits == 0) {
        later = set->summary & (UINT64_MAX << (word + 1));
        if (later == 0)
            return 0;
        word = (uint32_t)__builtin_ctzll(later);
        bits = set->words[word];
    }
    MSC__ASSERT(bits != 0);
    return word * 64 + (uint32_t)__builtin_ctzll(bits);
}

/* First block that is not below a key, or 0. */
static inline uint32_t lower_bound(const msc__sim_blocks *blocks, const msc__sim_set *set,
                                   const msc__sim_key *key)
{
    uint32_t class_index = msc__sim_class_of(key->size_bytes);
    uint32_t best = 0;
    uint32_t at = set->roots[class_index];

    while (at != 0) {
        const msc__sim_block *node = msc__sim_block_at(blocks, at);
        if (is_below(node, at, key)) {
            at = node->use.link.right;
        } else {
            best = at;
            at = node->use.link.left;
        }
    }
    if (best != 0)
        return best;
    class_index = next_class(set, class_index);
    for (at = set->roots[class_index]; at != 0; at = msc__sim_block_at(blocks, at)->use.link.left)
        best = at;
    MSC__ASSERT(best == 0 || !is_below(msc__sim_block_at(blocks, best), best, key));
    return best;
}

uint32_t msc__sim_set_lower_bound(const msc__sim_blocks *blocks, const msc__sim_set *set, uint64_t size_bytes,
                                  uint64_t address)
{
    const msc__sim_key key = {size_bytes, address, 0};

    return lower_bound(blocks, set, &key);
}

uint32_t msc__sim_set_after(const msc__sim_blocks *blocks, const msc__sim_set *set, const msc__sim_key *key)
{
    const msc__sim_key next = {key->size_bytes, key->address, key->slot + 1};

    return lower_bound(blocks, set, &next);
}

uint32_t msc__sim_set_largest(const msc__sim_blocks *blocks, const msc__sim_set *set)
{
    uint32_t word;
    uint32_t at;
    uint32_t best = 0;

    if (set->summary == 0)
        return 0;
    word = 63u - (uint32_t)__builtin_clzll(set->summary);
    MSC__ASSERT(set->words[word] != 0);
    at = set->roots[word * 64 + 63u - (uint32_t)__builtin_clzll(set->words[word])];
    for (; at != 0; at = msc__sim_block_at(blocks, at)->use.link.right)
        best = at;
    return best;
}
