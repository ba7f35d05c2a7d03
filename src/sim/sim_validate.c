/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole-structure check of a simulator.
 *
 * In this order, so that later checks may rely on earlier ones:
 *
 *   1. blocks      states, sizes, neighbours: linked both ways, addresses without a gap, no two free ones
 *                  or unmapped ones side by side
 *   2. segments    each list of blocks has a size that the device would have given
 *   3. free sets   bitmap, order, heap; exactly the free blocks, each in the set of its place and pool
 *   4. lists       places in order; awaiting blocks
 *   5. conservation: active + free = reserved, and every present figure equals its recomputation; limits
 *      hold, and the tables have room for what a release may add
 *
 * The check allocates nothing and changes nothing. Its cost is linear in the blocks.
 */
#include <inttypes.h>

#include "base/error.h"
#include "sim/sim_pools.h"

#define DEEPEST_TREE 256 /* a treap of 2^31 nodes is deeper with negligible probability */

/* What a walk over all blocks adds up to. */
typedef struct sums {
    uint64_t figures[2][MSC__SIM_METRIC_COUNT]; /* of the small and the large pool */
    uint64_t oversize_blocks;
    uint64_t oversize_segments;
    uint64_t page_count;
    uint32_t awaiting_count;
    uint32_t active_count;
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
    if (next->phase != block->phase)
        return "the neighbour above has other page borders";
    if (next->state == block->state && !msc__sim_is_active(block))
        return "not merged with the neighbour above";
    return NULL;
}

static const char *block_rule(const msc__sim_pools *pools, uint32_t slot)
{
    const msc__sim_block *block = msc__sim_block_at(&pools->blocks, slot);

    if (block->size_bytes == 0 || block->size_bytes % MSC__SIM_GRANULE_BYTES != 0)
        return "the size is no multiple of the granule";
    if (block->set_index / 2 >= pools->places.count)
        return "its place is unknown";
    if (msc__sim_is_active(block) &&
        (block->use.requested_bytes == 0 || block->use.requested_bytes > block->size_bytes))
        return "smaller than the request";
    if (block->state == MSC__SIM_UNMAPPED) {
        uint64_t page_bytes = msc__sim_page_bytes(&pools->options, block->set_index);
        if (msc__sim_expandable_to_border(pools, block, block->address) != 0 ||
            block->size_bytes % page_bytes != 0)
            return "unmapped, but not whole pages";
        if (!pools->options.expandable_segments)
            return "unmapped without expandable segments";
    }
    return neighbour_rule(&pools->blocks, slot);
}

static void add_active(const msc__sim_pools *pools, const msc__sim_block *block, uint64_t *figures, sums *sum)
{
    sum->active_count++;
    figures[MSC__SIM_ACTIVE]++;
    figures[MSC__SIM_ACTIVE_BYTES] += block->size_bytes;
    figures[MSC__SIM_REQUESTED_BYTES] += block->use.requested_bytes;
    figures[MSC__SIM_RESERVED_BYTES] += block->size_bytes;
    if (block->state == MSC__SIM_AWAITING) {
        sum->awaiting_count++;
        return;
    }
    figures[MSC__SIM_ALLOCATION]++;
    figures[MSC__SIM_ALLOCATED_BYTES] += block->size_bytes;
    if (pools->options.kind == MSC_SIM_CUDA && block->size_bytes >= pools->options.max_split_bytes)
        sum->oversize_blocks++;
}

static void add_block(const msc__sim_pools *pools, const msc__sim_block *block, sums *sum)
{
    bool is_host = pools->options.kind == MSC_SIM_HOST;
    uint64_t *figures = sum->figures[is_host ? MSC__SIM_LARGE : block->set_index % 2];

    switch ((msc__sim_state)block->state) {
    case MSC__SIM_ALLOCATED:
    case MSC__SIM_AWAITING:
        add_active(pools, block, figures, sum);
        break;
    case MSC__SIM_FREE:
        sum->free_count++;
        figures[MSC__SIM_RESERVED_BYTES] += block->size_bytes;
        if (!pools->options.expandable_segments && (block->prev != 0 || block->next != 0)) {
            figures[MSC__SIM_INACTIVE_SPLIT]++;
            figures[MSC__SIM_INACTIVE_SPLIT_BYTES] += block->size_bytes;
        }
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
    bool starts_page = msc__sim_expandable_to_border(pools, block, block->address) == 0;
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
        return !starts_page || total % page_bytes != 0 || mapped % page_bytes != 0
                   ? "an expandable segment that is not whole pages"
                   : NULL;
    }
    sum->figures[block->set_index % 2][MSC__SIM_SEGMENT]++;
    sum->oversize_segments += total >= options->max_split_bytes;
    if (block->set_index % 2 == MSC__SIM_SMALL)
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

static bool is_ordered(const msc__sim_key *a, const msc__sim_key *b)
{
    if (a->size_bytes != b->size_bytes)
        return a->size_bytes < b->size_bytes;
    return a->address != b->address ? a->address < b->address : a->slot < b->slot;
}

static const char *node_rule(const tree_walk *walk, uint32_t slot, const msc__sim_block *parent)
{
    const msc__sim_block *node = msc__sim_block_at(walk->blocks, slot);
    const msc__sim_key key = msc__sim_key_of(walk->blocks, slot);
    const msc__sim_key last = msc__sim_key_of(walk->blocks, walk->last);

    if (node->state != MSC__SIM_FREE || node->set_index != walk->set_index)
        return "in a free set where it does not belong";
    if (msc__sim_class_of(node->size_bytes) != walk->class_index)
        return "in the tree of another size class";
    if (parent != NULL && node->priority > parent->priority)
        return "priority above the parent's";
    if (walk->last != 0 && !is_ordered(&last, &key))
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
        if (last != 0 && msc__sim_block_at(&pools->blocks, last)->address > block->address)
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

    for (i = 0; i < 2 * pools->places.count; i++) {
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

/* ---- 4. lists ----------------------------------------------------------------------------------- */

/* The order names every place once: it rises strictly and is as long as the table. */
static msc_status check_order(const msc__sim_pools *pools, msc_error *err)
{
    uint32_t i;

    if (pools->order.count != pools->places.count)
        return msc__fail(err, MSC_EINTERNAL, "an order of %" PRIu32 " for %" PRIu32 " places",
                         pools->order.count, pools->places.count);
    for (i = 1; i < pools->order.count; i++) {
        const msc__sim_place *a = msc__sim_place_at(pools, msc__sim_places_by_order(pools, i - 1));
        const msc__sim_place *b = msc__sim_place_at(pools, msc__sim_places_by_order(pools, i));
        if (a->pool > b->pool || (a->pool == b->pool && a->stream >= b->stream))
            return msc__fail(err, MSC_EINTERNAL, "place %" PRIu32 " is out of order", i);
        if (a->pool == b->pool && a->released != b->released)
            return msc__fail(err, MSC_EINTERNAL, "pool %" PRIu32 " is released in part", a->pool);
    }
    return MSC_OK;
}

static msc_status check_awaiting(const msc__sim_pools *pools, const sums *sum, msc_error *err)
{
    const uint32_t *slots = pools->awaiting.items;
    uint32_t i;

    if (pools->awaiting.count != sum->awaiting_count)
        return msc__fail(err, MSC_EINTERNAL, "a list of %" PRIu32 " for %" PRIu32 " awaiting blocks",
                         pools->awaiting.count, sum->awaiting_count);
    for (i = 0; i < pools->awaiting.count; i++)
        if (msc__sim_block_at(&pools->blocks, slots[i])->state != MSC__SIM_AWAITING)
            return broken(err, slots[i], "listed as awaiting, but is not");
    return MSC_OK;
}

/* ---- 5. conservation ---------------------------------------------------------------------------- */

static const char *const metric_names[MSC__SIM_METRIC_COUNT] = {
    [MSC__SIM_ALLOCATION] = "allocation",
    [MSC__SIM_ALLOCATED_BYTES] = "allocated_bytes",
    [MSC__SIM_ACTIVE] = "active",
    [MSC__SIM_ACTIVE_BYTES] = "active_bytes",
    [MSC__SIM_REQUESTED_BYTES] = "requested_bytes",
    [MSC__SIM_SEGMENT] = "segment",
    [MSC__SIM_RESERVED_BYTES] = "reserved_bytes",
    [MSC__SIM_INACTIVE_SPLIT] = "inactive_split",
    [MSC__SIM_INACTIVE_SPLIT_BYTES] = "inactive_split_bytes",
};

static msc_status check_equal(const char *what, uint64_t kept, uint64_t counted, msc_error *err)
{
    if (kept == counted)
        return MSC_OK;
    return msc__fail(err, MSC_EINTERNAL, "%s is %" PRIu64 ", the blocks say %" PRIu64, what, kept, counted);
}

/* Present values are what the blocks add up to, and no peak is below them. */
static msc_status check_figures(const msc__sim_counters *counters, const sums *sum, msc_error *err)
{
    uint32_t pool;
    int metric;

    for (metric = 0; metric < MSC__SIM_METRIC_COUNT; metric++) {
        uint64_t peaks = 0;
        for (pool = 0; pool < 2; pool++) {
            const msc__sim_counter *counter = &counters->pools[pool][metric];
            msc_status status =
                check_equal(metric_names[metric], counter->current, sum->figures[pool][metric], err);
            if (status != MSC_OK)
                return status;
            if (counter->peak < counter->current)
                return msc__fail(err, MSC_EINTERNAL, "the peak of %s is below the present value",
                                 metric_names[metric]);
            peaks += counter->peak;
        }
        if (counters->peaks[metric] < msc__sim_now(counters, (msc__sim_metric)metric) ||
            counters->peaks[metric] > peaks)
            return msc__fail(err, MSC_EINTERNAL, "the peak of all %s is impossible", metric_names[metric]);
    }
    return MSC_OK;
}

static msc_status check_counts(const msc__sim_pools *pools, const sums *sum, msc_error *err)
{
    const struct {
        const char *what;
        uint64_t kept;
        uint64_t counted;
    } pairs[] = {
        {"oversize_allocations", pools->counters.oversize_allocations.current, sum->oversize_blocks},
        {"oversize_segments", pools->counters.oversize_segments.current, sum->oversize_segments},
        {"the count of segments", pools->segment_count, sum->segment_count},
        {"the count of mapped pages", pools->mapped_page_count, sum->page_count},
        {"the count of active blocks", pools->active_count, sum->active_count},
        {"the count of blocks", pools->blocks.used_count,
         (uint64_t)sum->active_count + sum->free_count + sum->unmapped_count},
    };
    size_t i;

    for (i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        msc_status status = check_equal(pairs[i].what, pairs[i].kept, pairs[i].counted, err);
        if (status != MSC_OK)
            return status;
    }
    return MSC_OK;
}

/* What the device gave is within its limits; a fraction does not bound the pages of expandable segments. */
static msc_status check_limits(const msc__sim_pools *pools, msc_error *err)
{
    bool is_plain = pools->options.kind == MSC_SIM_CUDA && !pools->options.expandable_segments;

    if (msc__sim_reserved(pools) > pools->options.capacity_bytes ||
        (is_plain && msc__sim_reserved(pools) > pools->options.allowed_bytes))
        return msc__fail(err, MSC_EINTERNAL, "more is reserved than the limit");
    if (pools->options.expandable_segments && pools->blocks.slots.count != 0 &&
        pools->blocks.slots.capacity <= pools->blocks.used_count + msc__sim_expandable_spare(pools, 0))
        return msc__fail(err, MSC_EINTERNAL, "no room for the blocks that a release may add");
    if (!msc__sim_events_have_room(pools))
        return msc__fail(err, MSC_EINTERNAL, "no room for the events that a release may add");
    return MSC_OK;
}

static msc_status check_stats(const msc__sim_pools *pools, const sums *sum, msc_error *err)
{
    msc_status status = check_counts(pools, sum, err);

    if (status == MSC_OK)
        status = check_figures(&pools->counters, sum, err);
    return status == MSC_OK ? check_limits(pools, err) : status;
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
        status = check_order(pools, err);
    if (status == MSC_OK)
        status = check_awaiting(pools, &sum, err);
    if (status == MSC_OK)
        status = check_stats(pools, &sum, err);
    return status;
}
