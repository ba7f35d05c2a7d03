/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shares of a job, by memory node.
 *
 *      items   |0  1  2  3 |4  5  6  7 |8  9 10 11 |12 13 14      chunks of 2, runs of 2 chunks
 *      run      0           1           2           3
 *      node     0           1           1           0             where the run's middle lies
 *
 *      runs     0  3 | 1  2       node 0 takes 0-1, 2-3, 12-13, 14, then node 1's; node 1 takes 4-5 … 10-11, then node 0's
 *
 * The system is asked once for a job, for at most MSC__PLACES_MOST addresses. With one node there is one run, and nothing is
 * asked.
 */
#include "optim/optim_shares.h"

#include <stddef.h>

#include "base/invariant.h"

static uint64_t divide_up(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

/* The node of each run, by the address of its middle item. */
static void place_runs(const msc__shares *shares, const msc__nodes *nodes, uint32_t run_count,
                       msc__shares_where where, const void *job, uint8_t *node_of)
{
    uint64_t run_items = shares->run_chunks * shares->chunk;
    void *addresses[MSC__PLACES_MOST];
    uint32_t i;

    for (i = 0; i < run_count; i++) {
        uint64_t left = shares->items - i * run_items;

        MSC__ASSERT(i * run_items < shares->items);
        addresses[i] = (void *)where(job, i * run_items + (left < run_items ? left : run_items) / 2);
    }
    msc__nodes_of(nodes, addresses, run_count, node_of);
}

static void sort_runs(msc__shares *shares, uint32_t run_count, const uint8_t *node_of)
{
    uint32_t placed = 0;
    uint32_t node;
    uint32_t i;

    for (node = 0; node < shares->node_count; node++) {
        msc__share *share = &shares->of[node];

        share->first_run = placed;
        for (i = 0; i < run_count; i++)
            if (node_of[i] == node)
                shares->runs[placed++] = (uint16_t)i;
        share->chunks = (placed - share->first_run) * shares->run_chunks;
        atomic_store_explicit(&share->next, 0, memory_order_relaxed);
    }
    MSC__ASSERT(placed == run_count); /* each run is somebody's */
}

void msc__shares_begin(msc__shares *shares, const msc__nodes *nodes, uint64_t items, uint64_t chunk,
                       msc__shares_where where, const void *job)
{
    bool placed = where != NULL && nodes->count > 1;
    uint8_t node_of[MSC__PLACES_MOST] = {0};
    uint32_t run_count;
    uint64_t chunks;

    MSC__ASSERT(items > 0 && chunk > 0 && nodes->count <= MSC__NODES_MOST);
    chunks = divide_up(items, chunk);
    shares->items = items;
    shares->chunk = chunk;
    shares->node_count = placed ? nodes->count : 1;
    shares->run_chunks = placed ? divide_up(chunks, MSC__PLACES_MOST) : chunks;
    run_count = (uint32_t)divide_up(chunks, shares->run_chunks);
    MSC__ASSERT(run_count > 0 && run_count <= MSC__PLACES_MOST);
    if (placed)
        place_runs(shares, nodes, run_count, where, job, node_of);
    sort_runs(shares, run_count, node_of);
}

/* The next chunk of one node; false: it has none left. */
static bool take_of(msc__shares *shares, msc__share *share, uint64_t *begin, uint64_t *end)
{
    for (;;) {
        uint64_t at = atomic_fetch_add_explicit(&share->next, 1, memory_order_relaxed);
        uint64_t run;

        if (at >= share->chunks)
            return false;
        run = shares->runs[share->first_run + at / shares->run_chunks];
        *begin = (run * shares->run_chunks + at % shares->run_chunks) * shares->chunk;
        if (*begin < shares->items) { /* else the last run ends before */
            uint64_t left = shares->items - *begin;

            *end = *begin + (left < shares->chunk ? left : shares->chunk);
            MSC__ASSERT(*end > *begin && *end <= shares->items);
            return true;
        }
    }
}

bool msc__shares_take(msc__shares *shares, uint32_t node, uint64_t *begin, uint64_t *end)
{
    uint32_t i;

    for (i = 0; i < shares->node_count; i++)
        if (take_of(shares, &shares->of[(node + i) % shares->node_count], begin, end))
            return true;
    return false;
}
