/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file ring_model.h
 * All that can happen in a small ring: every interleaving of its threads' steps, with every old value that a load
 * may still return.
 *
 * The algorithm of src/offload/offload_ring.c is written again here as five steps, each with one access to shared
 * memory (it is a model: whoever changes the ring changes it too):
 *
 *      GUESS   at = counter                          relaxed
 *      LOOK    turn of at's cell: mine, other side's (begin again later), past (begin again)      acquire
 *      CLAIM   compare-and-swap counter at -> at + 1 relaxed; where it fails, LOOK with what was found
 *      USE     the cell's entry is written or read   not atomic
 *      PASS    the cell's turn is stored             release
 *
 * Memory is that of C11 without its fences: an atomic place is the list of the values that were stored there, a
 * thread may load any that is not older than one it knows of, an acquiring load of a releasing store takes over
 * what its writer knew, and a swap acts on the newest. (Stores enter the list in the order in which they
 * happen, which loses nothing here: the turn of a cell is stored by one thread at a time, and a thread that
 * knew less would have been caught at the entry before.) Two accesses to an entry, one of them a write, of
 * which the second thread does not know that the first is over, are a data race.
 */
#ifndef MSC_TEST_RING_MODEL_H
#define MSC_TEST_RING_MODEL_H

#include <stdbool.h>
#include <stdint.h>

/** Who takes part, and what is left out of the algorithm. All the `no_` false: as it is. */
typedef struct ring_model {
    uint32_t writers;  /* the first of the threads */
    uint32_t threads;  /* writers and readers, at most 4 */
    uint32_t turns[4]; /* by thread: entries that it pushes or takes; both sums are the same, at most 6 */
    bool no_writer_release; /* PASS of writers relaxed */
    bool no_reader_release;
    bool no_writer_acquire; /* LOOK of writers relaxed */
    bool no_reader_acquire;
    bool writer_passes_first; /* PASS before USE: the turn is stored before the entry */
    bool reader_passes_first; /* PASS before USE: the cell is given away before it was read */
    bool no_compare;          /* CLAIM stores at + 1, whatever the counter is now */
    bool short_turn;          /* readers pass the cell to the next reader instead of the next writer */
    bool blind;               /* data races are let pass, to see what comes of them */
} ring_model;

typedef enum ring_verdict {
    RING_RIGHT, /* in every run each entry comes out once, in order */
    RING_RACE,  /* a data race on an entry */
    RING_WRONG, /* an entry is lost, doubled or out of order */
    RING_STUCK, /* nobody is at work, and a cell waits for nobody */
} ring_verdict;

/** @param states receives how many different states there are. */
ring_verdict ring_model_run(const ring_model *model, uint64_t *states);

#endif /* MSC_TEST_RING_MODEL_H */
