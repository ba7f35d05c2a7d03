/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file sim_buckets.h
 * Working memory of one computation, and lists of items per position.
 *
 * `msc__scratch` hands out zeroed arrays and takes all of them back at once. A failure is remembered, so that
 * a caller can ask for everything it needs and look once:
 *
 *      ends = msc__scratch_take(&scratch, count, sizeof *ends);
 *      cover = msc__scratch_take(&scratch, calls, sizeof *cover);
 *      if (scratch.failed_bytes > 0) goto cleanup;
 *
 * `msc__buckets` is a counting sort that keeps its counts: `first[p] .. first[p + 1]` are the items of
 * position p, in the order in which they were added. Items are added twice, once to count, once to place:
 *
 *      for (pass = 0; pass < 2; pass++) {
 *          for (...) msc__buckets_add(&buckets, position, item);
 *          if (pass == 0) msc__buckets_place(&scratch, &buckets);
 *      }
 */
#ifndef MSC_SIM_BUCKETS_H
#define MSC_SIM_BUCKETS_H

#include "memscale/base.h"

/** Most arrays of one `msc__scratch`. */
#define MSC__SCRATCH_MOST 64u

typedef struct msc__scratch {
    msc_context *ctx;
    uint64_t failed_bytes; /**< size of the first request that failed; 0: none did */
    uint32_t count;
    void *at[MSC__SCRATCH_MOST];
    size_t bytes[MSC__SCRATCH_MOST];
} msc__scratch;

/** Zeroed room for `count` items, for one when it is 0. NULL, and `failed_bytes` set, when there is none. */
void *msc__scratch_take(msc__scratch *scratch, size_t count, size_t item_bytes);

/** MSC_OK, or MSC_ENOMEM when a request failed. */
msc_status msc__scratch_check(const msc__scratch *scratch, const char *what, msc_error *err);

/** Gives everything back; the scratch can be used again. */
void msc__scratch_fini(msc__scratch *scratch);

typedef struct msc__buckets {
    uint32_t *first; /**< positions + 2 entries */
    uint32_t *items; /**< NULL while counting */
    uint32_t position_count;
    uint32_t item_count;
} msc__buckets;

/** Starts counting for positions 0 … position_count - 1. A failure shows in `scratch`. */
void msc__buckets_init(msc__scratch *scratch, msc__buckets *buckets, uint32_t position_count);

/** Counts or places one item. Does nothing after a failure. */
void msc__buckets_add(msc__buckets *buckets, uint32_t position, uint32_t item);

/** Ends counting, starts placing. */
void msc__buckets_place(msc__scratch *scratch, msc__buckets *buckets);

#endif /* MSC_SIM_BUCKETS_H */
