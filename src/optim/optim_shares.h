/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim_shares.h
 * How the items of one job are divided among threads: those whose memory lies on a thread's own node come first, then those
 * of the other nodes, so that nobody waits while there is work.
 */
#ifndef MSC_OPTIM_SHARES_H
#define MSC_OPTIM_SHARES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "optim/optim_nodes.h"

/** An address that item `item` of a job works on, of the array with most of its bytes; NULL: anywhere. */
typedef const void *(*msc__shares_where)(const void *job, uint64_t item);

/** Runs of neighbouring chunks that lie on one node; chunks are taken in order. */
typedef struct msc__share {
    /* First chunk that nobody has taken. Relaxed: who joins a job, and who ends it, is ordered by other means. */
    _Atomic uint64_t next;
    uint64_t chunks;    /* all of them, also those of a last run that is not full */
    uint32_t first_run; /* in `runs` */
    char apart[44];     /* a cache line each */
} msc__share;

typedef struct msc__shares {
    uint64_t items;
    uint64_t chunk;      /* items that are taken at a time */
    uint64_t run_chunks; /* chunks of a run */
    uint32_t node_count;
    uint16_t runs[MSC__PLACES_MOST]; /* numbers of runs, by node */
    msc__share of[MSC__NODES_MOST];
} msc__shares;

/**
 * Begins a job of `items` (at least 1) in chunks of `chunk`. Nobody takes any yet.
 *
 * @param where NULL: all items lie anywhere.
 */
void msc__shares_begin(msc__shares *shares, const msc__nodes *nodes, uint64_t items, uint64_t chunk,
                       msc__shares_where where, const void *job);

/** Takes items [begin, end) for a thread on `node`; false: none are left. Any number of threads at once. */
bool msc__shares_take(msc__shares *shares, uint32_t node, uint64_t *begin, uint64_t *end);

#endif /* MSC_OPTIM_SHARES_H */
