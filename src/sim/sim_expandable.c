/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Expandable segments: address space that is backed by memory page by page.
 *
 *     |<------------------------- address space of one segment ------------------------->|
 *     [ A ][ free ][  A  ][ free ][                      unmapped                         ]
 *     |  page  |  page  |  page  |
 *
 * Each (stream, pool) has its own segments, with pages of 2 MiB for the small pool and of one large segment
 * for the large pool. A request that no cached block fits takes the lowest unmapped block, with the free
 * block right below it if there is one, and maps pages for what is missing. Releasing unmaps the pages
 * that lie wholly inside a free block; the ends that share a page with a neighbour stay.
 *
 * A segment is its list of blocks, and it is gone when it is one unmapped block, so there is no record of
 * it. Its pages begin at its first address. That is a multiple of the page, unless the caller has placed it
 * elsewhere; each block knows how far the borders of its pages are off the multiples, its phase.
 *
 * Unmapped blocks are few (one per segment, more after a release), so a list by address serves them; its
 * links are the block's tree links, unused there.
 *
 * How many blocks can frees and releases lead to? They must not need host memory, so room is reserved when
 * a request comes. Unmapping leaves a block beside the pages only where a free block shares a page with its
 * neighbour, which then is active: once for each side of an active block, so used + 2 active is an upper
 * bound. And it leaves at most two for the pages it takes: used + 2 mapped pages is another. Both
 * survive frees and releases; the smaller counts.
 */
#include "base/bytes.h"
#include "base/invariant.h"
#include "sim/sim_pools.h"

/* Address space of one segment: 9/8 of the device as in PyTorch, and 4 TiB where the device has no limit. */
#define MOST_SPACE_BYTES (UINT64_C(1) << 42)

/* Two attempts to grow (a segment and a cut each), the new block with its two sides and the rest it was
 * split from, and two cuts that have not merged yet. */
#define PASSING_BLOCKS 10u

static msc__sim_block *block_at(const msc__sim_pools *pools, uint32_t slot)
{
    return msc__sim_block_at(&pools->blocks, slot);
}

static uint64_t page_count(uint64_t bytes, uint64_t page_bytes)
{
    return bytes / page_bytes + (bytes % page_bytes != 0 ? 1 : 0);
}

uint64_t msc__sim_expandable_to_border(const msc__sim_pools *pools, const msc__sim_block *block,
                                       uint64_t address)
{
    uint64_t page_bytes = msc__sim_page_bytes(&pools->options, block->set_index);
    uint64_t past = (address - (uint64_t)block->phase * MSC__SIM_GRANULE_BYTES) % page_bytes;

    return past == 0 ? 0 : page_bytes - past;
}

uint64_t msc__sim_expandable_size(const msc__sim_pools *pools, uint32_t slot)
{
    const msc__sim_block *block = block_at(pools, slot);
    const msc__sim_block *next = block_at(pools, block->next);
    bool grows = block->next != 0 && next->state == MSC__SIM_UNMAPPED;

    return block->size_bytes + (grows ? next->size_bytes : 0);
}

uint64_t msc__sim_expandable_spare(const msc__sim_pools *pools, uint64_t new_page_count)
{
    uint64_t by_sides = 2 * (uint64_t)pools->active_count;
    uint64_t by_pages = 2 * (pools->mapped_page_count + new_page_count);

    return by_sides < by_pages ? by_sides : by_pages;
}

uint64_t msc__sim_expandable_room(const msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    uint64_t wanted = page_count(rounded_bytes, msc__sim_page_bytes(&pools->options, set_index)) + 1;

    return pools->blocks.used_count + PASSING_BLOCKS + msc__sim_expandable_spare(pools, 2 * wanted);
}

/* ---- unmapped blocks by address ----------------------------------------------------------------- */

/* Searched from the end: what is unmapped or created lies high more often than not. */
void msc__sim_expandable_add_unmapped(msc__sim_pools *pools, uint32_t slot)
{
    msc__sim_block *block = block_at(pools, slot);
    msc__sim_set *set = msc__sim_set_at(pools, block->set_index);
    uint32_t below = set->unmapped_last;
    uint32_t above = 0;

    MSC__ASSERT(block->state == MSC__SIM_UNMAPPED);
    MSC__ASSERT(block->size_bytes % msc__sim_page_bytes(&pools->options, block->set_index) == 0);
    while (below != 0 && block_at(pools, below)->address > block->address) {
        above = below;
        below = block_at(pools, below)->use.link.left;
    }
    block->use.link.left = below;
    block->use.link.right = above;
    *(below != 0 ? &block_at(pools, below)->use.link.right : &set->unmapped_first) = slot;
    *(above != 0 ? &block_at(pools, above)->use.link.left : &set->unmapped_last) = slot;
}

static void unmapped_erase(msc__sim_pools *pools, uint32_t slot)
{
    const msc__sim_block *block = block_at(pools, slot);
    msc__sim_set *set = msc__sim_set_at(pools, block->set_index);
    uint32_t below = block->use.link.left;
    uint32_t above = block->use.link.right;

    MSC__ASSERT(block->state == MSC__SIM_UNMAPPED);
    MSC__ASSERT(below == 0 ? set->unmapped_first == slot : block_at(pools, below)->use.link.right == slot);
    *(below != 0 ? &block_at(pools, below)->use.link.right : &set->unmapped_first) = above;
    *(above != 0 ? &block_at(pools, above)->use.link.left : &set->unmapped_last) = below;
}

/* Merges a neighbour of the same state, free or unmapped, into a block that is in no set. */
static void absorb_alike(msc__sim_pools *pools, uint32_t slot, uint32_t other)
{
    msc__sim_set *set = msc__sim_set_at(pools, block_at(pools, slot)->set_index);

    MSC__ASSERT(!msc__sim_is_active(block_at(pools, slot)));
    if (other == 0 || block_at(pools, other)->state != block_at(pools, slot)->state)
        return;
    if (block_at(pools, other)->state == MSC__SIM_FREE)
        msc__sim_set_erase(&pools->blocks, set, other);
    else
        unmapped_erase(pools, other);
    msc__sim_blocks_absorb(&pools->blocks, slot, other);
}

/* ---- growing ------------------------------------------------------------------------------------ */

/* Whether blocks that are not active, from `slot` on, make up `bytes`. */
static bool has_space(const msc__sim_pools *pools, uint32_t slot, uint64_t bytes)
{
    uint64_t found = 0;

    while (found < bytes && slot != 0 && !msc__sim_is_active(block_at(pools, slot))) {
        found += block_at(pools, slot)->size_bytes;
        slot = block_at(pools, slot)->next;
    }
    return found >= bytes;
}

static uint32_t add_space(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    uint64_t page_bytes = msc__sim_page_bytes(&pools->options, set_index);
    uint64_t device = pools->options.device_total_bytes;
    uint64_t bytes = device < MOST_SPACE_BYTES ? device + device / 8 : MOST_SPACE_BYTES;
    uint64_t address;
    uint32_t slot;
    msc__sim_block *block;

    if (bytes < rounded_bytes)
        bytes = rounded_bytes;
    bytes = page_count(bytes, page_bytes) * page_bytes;
    MSC__ASSERT(bytes >= rounded_bytes && bytes % page_bytes == 0);
    address = msc__sim_pools_place(pools, bytes, page_bytes);
    if (address == 0)
        return 0;
    slot = msc__sim_blocks_take(&pools->blocks);
    block = block_at(pools, slot);
    block->address = address;
    block->size_bytes = bytes;
    block->set_index = set_index;
    block->phase = (uint32_t)(address % page_bytes / MSC__SIM_GRANULE_BYTES);
    block->state = MSC__SIM_UNMAPPED;
    msc__sim_expandable_add_unmapped(pools, slot);
    return slot;
}

/* Lowest place that can grow to hold a request: an unmapped block or the free block below one. */
static uint32_t find_space(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    uint32_t slot = msc__sim_set_at(pools, set_index)->unmapped_first;

    for (; slot != 0; slot = block_at(pools, slot)->use.link.right) {
        uint32_t prev = block_at(pools, slot)->prev;
        uint32_t start = prev != 0 && !msc__sim_is_active(block_at(pools, prev)) ? prev : slot;
        if (has_space(pools, start, rounded_bytes))
            return start;
    }
    return add_space(pools, set_index, rounded_bytes);
}

/* Maps the first pages of an unmapped block, enough for `bytes`; it then is free, merged, and in its set. */
static bool map_pages(msc__sim_pools *pools, uint32_t slot, uint64_t bytes)
{
    msc__sim_block *block = block_at(pools, slot);
    uint64_t page_bytes = msc__sim_page_bytes(&pools->options, block->set_index);
    uint64_t pages = page_count(bytes, page_bytes);
    uint64_t mapped = pages * page_bytes;

    uint64_t address = block->address;

    MSC__ASSERT(block->state == MSC__SIM_UNMAPPED && bytes > 0 && mapped <= block->size_bytes);
    MSC__ASSERT(msc__sim_reserved(pools) <= pools->options.capacity_bytes);
    if (mapped > pools->options.capacity_bytes - msc__sim_reserved(pools))
        return false;
    unmapped_erase(pools, slot);
    if (mapped < block->size_bytes)
        msc__sim_expandable_add_unmapped(pools, msc__sim_blocks_split(&pools->blocks, slot, mapped));
    block->state = MSC__SIM_FREE;
    absorb_alike(pools, slot, block->prev);
    absorb_alike(pools, slot, block->next);
    MSC__ASSERT(block->size_bytes >= mapped);
    msc__sim_pools_insert(pools, slot);
    pools->mapped_page_count += pages;
    msc__sim_count_segment(pools, MSC_SIM_SEGMENT_MAP, block->set_index, address, mapped);
    return true;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

uint32_t msc__sim_expandable_grow(msc__sim_pools *pools, uint32_t set_index, uint64_t rounded_bytes)
{
    uint32_t slot;
    uint64_t have;

    if (rounded_bytes > pools->options.capacity_bytes)
        return 0; /* would only waste address space */
    slot = find_space(pools, set_index, rounded_bytes);
    if (slot == 0)
        return 0;
    if (block_at(pools, slot)->state == MSC__SIM_UNMAPPED &&
        !map_pages(pools, slot, least(block_at(pools, slot)->size_bytes, rounded_bytes)))
        return 0;
    while ((have = block_at(pools, slot)->size_bytes) < rounded_bytes) {
        uint32_t next = block_at(pools, slot)->next; /* unmapped, for free neighbours have merged */
        MSC__ASSERT(next != 0 && block_at(pools, next)->state == MSC__SIM_UNMAPPED);
        if (!map_pages(pools, next, least(block_at(pools, next)->size_bytes, rounded_bytes - have)))
            return 0;
        slot = next; /* it has absorbed the block below */
    }
    MSC__ASSERT(block_at(pools, slot)->state == MSC__SIM_FREE);
    msc__sim_set_erase(&pools->blocks, msc__sim_set_at(pools, set_index), slot);
    return slot;
}

/* ---- shrinking ---------------------------------------------------------------------------------- */

/* Cuts what lies outside the whole pages off a free block, which leaves its set. Returns the pages. */
static uint32_t cut_to_pages(msc__sim_pools *pools, uint32_t slot, uint64_t begin, uint64_t end)
{
    msc__sim_block *block = block_at(pools, slot);

    MSC__ASSERT(begin < end && block->address <= begin && end <= block->address + block->size_bytes);
    msc__sim_set_erase(&pools->blocks, msc__sim_set_at(pools, block->set_index), slot);
    if (block->address < begin) {
        uint32_t upper = msc__sim_blocks_split(&pools->blocks, slot, begin - block->address);
        msc__sim_pools_insert(pools, slot);
        slot = upper;
    }
    if (block_at(pools, slot)->size_bytes > end - begin)
        msc__sim_pools_insert(pools, msc__sim_blocks_split(&pools->blocks, slot, end - begin));
    MSC__ASSERT(block_at(pools, slot)->address == begin && block_at(pools, slot)->size_bytes == end - begin);
    return slot;
}

void msc__sim_expandable_unmap(msc__sim_pools *pools, uint32_t slot)
{
    msc__sim_block *block = block_at(pools, slot);
    uint64_t page_bytes = msc__sim_page_bytes(&pools->options, block->set_index);
    uint64_t begin = msc__sim_expandable_to_border(pools, block, block->address);
    uint64_t bytes = block->size_bytes > begin ? (block->size_bytes - begin) / page_bytes * page_bytes : 0;

    MSC__ASSERT(block->state == MSC__SIM_FREE);
    if (bytes == 0)
        return;
    begin += block->address;
    slot = cut_to_pages(pools, slot, begin, begin + bytes);
    block = block_at(pools, slot);
    block->state = MSC__SIM_UNMAPPED;
    absorb_alike(pools, slot, block->prev);
    absorb_alike(pools, slot, block->next);
    MSC__ASSERT(pools->mapped_page_count >= bytes / page_bytes);
    pools->mapped_page_count -= bytes / page_bytes;
    msc__sim_count_segment(pools, MSC_SIM_SEGMENT_UNMAP, block->set_index, begin, bytes);
    if (block->prev == 0 && block->next == 0) {
        msc__sim_blocks_give(&pools->blocks, slot);
        msc__sim_pools_forget_segment(pools);
    } else {
        msc__sim_expandable_add_unmapped(pools, slot);
    }
}
