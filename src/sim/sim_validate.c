/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole-structure check of a simulator.
 *
 * In this order, so that later checks may rely on earlier ones:
 *
 *   1. blocks      states, sizes, neighbours: linked both ways, addresses without a gap, no two free ones
 *                  or unmapped ones side by side
 *   2. segments    each list of blocks has a size that the device would have given
 *   3. free sets   bitmap, order, heap; exactly the free blocks, each in the set of its stream and pool
 *   4. conservation: allocated + free = reserved, and every "now" statistic equals its recomputation; the
 *      table has room for what a release may add
 *
 * The check allocates nothing and changes nothing. Its cost is linear in the blocks.
 */
#include <inttypes.h>

#include "base/error.h"
#include "sim/sim_pools.h"

#define DEEPEST_TREE 256 /* a treap of 2^31 nodes is deeper with negligible probability */

/* What a walk over all blocks adds up to. */
typedef struct sums {
    uint64_t allocated_bytes;
    uint64_t requested_bytes;
    uint64_t free_bytes;
    uint64_t inactive_split_bytes;
    uint64_t page_count;
    uint32_t allocated_count;
    uint32_t free_count;
    uint32_t unmapped_count;
    uint32_t segment_count;
} sums;

static msc_status broken(msc_error *err, uint32_t slot, const char *rule)
{
    return msc__fail(err, MSC_EINTERNAL, "block %" PRIu32 ": %s", slot, rule);
}

/* ---- 1. blocks ---------------------------------------------------------------------------------- */

static const char *neighbour_rule(const msc__sim_blocks *blocks, uint32_t slot)
{
    const msc__sim_block *block = msc__sim_block_at(blocks, slot);
    const msc__sim_block *next;

    if (block->prev >= blocks->slots.count || block->next >= blocks->slots.count)
        return "a neighbour is outside the table";
    if (block->prev != 0 && msc__sim_block_at(blocks, block->prev)->next != slot)
        return "the neighbour below does not link back";
    if (block->next == 0)
        return NULL;
    next = msc__sim_block_at(blocks, block->next);
    if (next->prev != slot)
        return "the neighbour above does not link back";
    if (next->state == MSC__SIM_EMPTY)
        return "the neighbour above is an empty slot";
    if (next->address != block->address + block->size_bytes)
        return "a gap before the neighbour above";
    if (next->set_index != block->set_index)
        return "the neighbour above belongs to another stream or pool";
    if (next->state == block->state && block->state != MSC__SIM_ALLOCATED)
        return "not merged with the neighbour above";
    return NULL;
}

static const char *block_rule(const msc__sim_pools *pools, uint32_t slot)
{
    const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);

    if (block->size_bytes == 0 || block->size_bytes % MSC__SIM_GRANULE_BYTES != 0)
        return "the size is no multiple of the granule";
    if (block->set_index / 2 >= pools->streams.count)
        return "the stream is unknown";
    if (block->state == MSC__SIM_ALLOCATED &&
        (block->use.requested_bytes == 0 || block->use.requested_bytes > block->size_bytes))
        return "smaller than the request";
    if (block->state == MSC__SIM_UNMAPPED) {
        uint64_t page_bytes = msc__sim_page_bytes(&pools->options, block->set_index);
        if (block->address % page_bytes != 0 || block->size_bytes % page_bytes != 0)
            return "unmapped, but not whole pages";
        if (!pools->options.expandable_segments)
            return "unmapped without expandable segments";
    }
    return neighbour_rule(&pools->blocks, slot);
}

static void add_block(const msc__sim_pools *pools, const msc__sim_block *block, sums *sum)
{
    switch ((msc__sim_state)block->state) {
    case MSC__SIM_ALLOCATED:
        sum->allocated_bytes += block->size_bytes;
        sum->requested_bytes += block->use.requested_bytes;
        sum->allocated_count++;
        break;
    case MSC__SIM_FREE:
        sum->free_bytes += block->size_bytes;
        sum->free_count++;
        if (!pools->options.expandable_segments && (block->prev != 0 || block->next != 0))
            sum->inactive_split_bytes += block->size_bytes;
        break;
    case MSC__SIM_UNMAPPED:
        sum->unmapped_count++;
        break;
    case MSC__SIM_EMPTY:
        break;
    }
}

/* ---- 2. segments -------------------------------------------------------------------------------- */

/* Follows the list from its first block. Steps are bounded, for a broken list may be a ring. */
static const char *segment_rule(const msc__sim_pools *pools, uint32_t slot, sums *sum)
{
    const msc_sim_options *options = &pools->options;
    const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
    uint64_t page_bytes = msc__sim_page_bytes(options, block->set_index);
    uint64_t start = block->address;
    uint64_t mapped = 0;
    uint64_t total = 0;
    uint32_t steps = 0;

    for (; slot != 0; slot = block->next) {
        block = msc__sim_block_at(&pools->blocks, slot);
        total += block->size_bytes;
        mapped += block->state == MSC__SIM_UNMAPPED ? 0 : block->size_bytes;
        if (steps++ > pools->blocks.used_count)
            return "its list of neighbours does not end";
    }
    if (options->expandable_segments) {
        sum->page_count += mapped / page_bytes;
        return start % page_bytes != 0 || total % page_bytes != 0 || mapped % page_bytes != 0
                   ? "an expandable segment that is not whole pages"
                   : NULL;
    }
    if (block->set_index % 2 == 0)
        return total == MSC__SIM_SMALL_SEGMENT_BYTES ? NULL : "a small segment of wrong size";
    if (total == options->large_segment_bytes)
        return NULL;
    return total < MSC__SIM_OWN_SEGMENT_BYTES || total % MSC__SIM_OWN_ROUND_BYTES != 0
               ? "a large segment of wrong size"
               : NULL;
}

static msc_status check_blocks(const msc__sim_pools *pools, sums *sum, msc_error *err)
{
    const char *rule;
    uint32_t slot;

    for (slot = 1; slot < pools->blocks.slots.count; slot++) {
        const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
        if (block->state == MSC__SIM_EMPTY)
            continue;
        rule = block_rule(pools, slot);
        if (rule != NULL)
            return broken(err, slot, rule);
        add_block(pools, block, sum);
    }
    for (slot = 1; slot < pools->blocks.slots.count; slot++) {
        const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
        if (block->state == MSC__SIM_EMPTY || block->prev != 0)
            continue;
        sum->segment_count++;
        rule = segment_rule(pools, slot, sum);
        if (rule != NULL)
            return broken(err, slot, rule);
    }
    return MSC_OK;
}

/* ---- 3. free sets ------------------------------------------------------------------------------- */

/* A walk through one tree in order. */
typedef struct tree_walk {
    const msc__sim_blocks *blocks;
    uint32_t set_index;
    uint32_t class_index;
    uint32_t last;  /* block visited before */
    uint32_t count; /* blocks visited */
} tree_walk;

static const char *node_rule(const tree_walk *walk, uint32_t slot, const msc__sim_block *parent)
{
    const msc__sim_block *node = msc__sim_block_at(walk->blocks, slot);
    const msc__sim_block *last = msc__sim_block_at(walk->blocks, walk->last);

    if (node->state != MSC__SIM_FREE || node->set_index != walk->set_index)
        return "in a free set where it does not belong";
    if (msc__sim_class_of(node->size_bytes) != walk->class_index)
        return "in the tree of another size class";
    if (parent != NULL && node->priority > parent->priority)
        return "priority above the parent's";
    if (walk->last != 0 && (last->size_bytes > node->size_bytes ||
                            (last->size_bytes == node->size_bytes && last->address >= node->address)))
        return "out of order in its tree";
    return NULL;
}

static msc_status check_tree(tree_walk *walk, uint32_t slot, const msc__sim_block *parent, int depth,
                             msc_error *err)
{
    const msc__sim_block *node;
    const char *rule;
    msc_status status;

    if (slot == 0)
        return MSC_OK;
    node = msc__sim_block_at(walk->blocks, slot);
    if (slot >= walk->blocks->slots.count || depth == DEEPEST_TREE)
        return broken(err, slot, "its tree is damaged");
    status = check_tree(walk, node->use.link.left, node, depth + 1, err);
    if (status != MSC_OK)
        return status;
    rule = node_rule(walk, slot, parent);
    if (rule != NULL)
        return broken(err, slot, rule);
    walk->last = slot;
    walk->count++;
    return check_tree(walk, node->use.link.right, node, depth + 1, err);
}

static msc_status check_set(const msc__sim_pools *pools, uint32_t set_index, uint32_t *count, msc_error *err)
{
    const msc__sim_set *set = msc__sim_set_at(pools, set_index);
    uint32_t i;

    for (i = 0; i < MSC__SIM_CLASS_COUNT; i++) {
        tree_walk walk = {&pools->blocks, set_index, i, 0, 0};
        bool bit = (set->words[i / 64] >> (i % 64) & 1) != 0;
        msc_status status;
        if (bit != (set->roots[i] != 0) ||
            (set->summary >> (i / 64) & 1) != (set->words[i / 64] != 0 ? 1u : 0u))
            return msc__fail(err, MSC_EINTERNAL, "set %" PRIu32 ": the bitmap is wrong at class %" PRIu32,
                             set_index, i);
        status = check_tree(&walk, set->roots[i], NULL, 0, err);
        if (status != MSC_OK)
            return status;
        *count += walk.count;
    }
    return MSC_OK;
}

static msc_status check_unmapped(const msc__sim_pools *pools, uint32_t set_index, uint32_t *count,
                                 msc_error *err)
{
    const msc__sim_set *set = msc__sim_set_at(pools, set_index);
    uint32_t last = 0;
    uint32_t slot;

    for (slot = set->unmapped_first; slot != 0;
         slot = msc__sim_block_at(&pools->blocks, slot)->use.link.right) {
        const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);
        if (block->state != MSC__SIM_UNMAPPED || block->set_index != set_index)
            return broken(err, slot, "in a list of unmapped blocks where it does not belong");
        if (block->use.link.left != last)
            return broken(err, slot, "the list of unmapped blocks does not link back");
        if (last != 0 && msc__sim_block_at(&pools->blocks, last)->address >= block->address)
            return broken(err, slot, "out of order in the list of unmapped blocks");
        last = slot;
        (*count)++;
    }
    return last == set->unmapped_last ? MSC_OK : broken(err, last, "not the end of the unmapped list");
}

static msc_status check_sets(const msc__sim_pools *pools, const sums *sum, msc_error *err)
{
    uint32_t free_count = 0;
    uint32_t unmapped_count = 0;
    uint32_t i;

    for (i = 0; i < 2 * pools->streams.count; i++) {
        msc_status status = check_set(pools, i, &free_count, err);
        if (status == MSC_OK)
            status = check_unmapped(pools, i, &unmapped_count, err);
        if (status != MSC_OK)
            return status;
    }
    if (free_count != sum->free_count || unmapped_count != sum->unmapped_count)
        return msc__fail(err, MSC_EINTERNAL,
                         "sets hold %" PRIu32 " free and %" PRIu32 " unmapped blocks of %" PRIu32
                         " and %" PRIu32,
                         free_count, unmapped_count, sum->free_count, sum->unmapped_count);
    return MSC_OK;
}

/* ---- 4. conservation ---------------------------------------------------------------------------- */

static msc_status check_equal(const char *what, uint64_t kept, uint64_t counted, msc_error *err)
{
    if (kept == counted)
        return MSC_OK;
    return msc__fail(err, MSC_EINTERNAL, "%s is %" PRIu64 ", the blocks say %" PRIu64, what, kept, counted);
}

static msc_status check_stats(const msc__sim_pools *pools, const sums *sum, msc_error *err)
{
    const msc_sim_stats *stats = &pools->stats;
    bool plain = pools->options.kind == MSC_SIM_CUDA && !pools->options.expandable_segments;
    const struct {
        const char *what;
        uint64_t kept;
        uint64_t counted;
    } pairs[] = {
        {"reserved_now_bytes", stats->reserved_now_bytes, sum->allocated_bytes + sum->free_bytes},
        {"allocated_now_bytes", stats->allocated_now_bytes, sum->allocated_bytes},
        {"requested_now_bytes", stats->requested_now_bytes, sum->requested_bytes},
        {"inactive_split_now_bytes", stats->inactive_split_now_bytes, sum->inactive_split_bytes},
        {"segment_now_count", stats->segment_now_count, plain ? sum->segment_count : 0},
        {"the count of segments", pools->segment_count, sum->segment_count},
        {"the count of mapped pages", pools->mapped_page_count, sum->page_count},
        {"the count of allocated blocks", pools->allocated_count, sum->allocated_count},
        {"the count of blocks", pools->blocks.used_count,
         (uint64_t)sum->allocated_count + sum->free_count + sum->unmapped_count},
    };
    size_t i;

    for (i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        msc_status status = check_equal(pairs[i].what, pairs[i].kept, pairs[i].counted, err);
        if (status != MSC_OK)
            return status;
    }
    if (stats->allocated_peak_bytes < stats->allocated_now_bytes ||
        stats->reserved_peak_bytes < stats->reserved_now_bytes ||
        stats->requested_peak_bytes < stats->requested_now_bytes ||
        stats->segment_peak_count < stats->segment_now_count)
        return msc__fail(err, MSC_EINTERNAL, "a peak is below the present value");
    if (stats->reserved_now_bytes > pools->options.capacity_bytes)
        return msc__fail(err, MSC_EINTERNAL, "more is reserved than the capacity");
    if (pools->options.expandable_segments && pools->blocks.slots.count != 0 &&
        pools->blocks.slots.capacity <= pools->blocks.used_count + msc__sim_expandable_spare(pools, 0))
        return msc__fail(err, MSC_EINTERNAL, "no room for the blocks that a release may add");
    return MSC_OK;
}

/* HOST blocks have neither addresses nor neighbours: only the sums are left to check. */
static void sum_host(const msc__sim_pools *pools, sums *sum)
{
    uint32_t slot;

    for (slot = 1; slot < pools->blocks.slots.count; slot++)
        add_block(pools, msc__sim_block_at(&pools->blocks, slot), sum);
}

msc_status msc__sim_pools_validate(const msc__sim_pools *pools, msc_error *err)
{
    sums sum = {0};
    msc_status status;

    if (pools->options.kind == MSC_SIM_HOST) {
        sum_host(pools, &sum);
        return check_stats(pools, &sum, err);
    }
    status = check_blocks(pools, &sum, err);
    if (status == MSC_OK)
        status = check_sets(pools, &sum, err);
    if (status == MSC_OK)
        status = check_stats(pools, &sum, err);
    return status;
}
