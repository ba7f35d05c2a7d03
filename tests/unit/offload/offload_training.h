/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file offload_training.h
 * Training steps in miniature, for the tests of the engine: blocks of known bytes leave in forward, their sources
 * are overwritten as soon as the engine allows it, and in backward every byte is compared.
 *
 * Memory of the program is the host's. Whatever comes back wrong, too early or too late shows as other bytes.
 */
#ifndef MSC_TEST_OFFLOAD_TRAINING_H
#define MSC_TEST_OFFLOAD_TRAINING_H

#include <stdbool.h>

#include "memscale/offload.h"
#include "oom/failing_alloc.h"

#define TRAINING_MOST_BLOCKS 64u

/** An engine on the host device, with the heap that both stand on. */
typedef struct training {
    failing_alloc heap; /**< the engine's */
    failing_alloc device_heap;
    msc_context *ctx;
    msc_context *device_ctx;
    msc_device *device;
    msc_offload *engine;
    msc_offload_options options;
    msc_device_faults faults;
} training;

/** How a step goes. */
typedef struct training_step {
    uint64_t seed;        /**< decides sizes, bytes and order */
    uint32_t block_count; /**< up to TRAINING_MOST_BLOCKS */
    uint64_t most_bytes;  /**< of a block */
    uint32_t behind;      /**< puts between a put and its settle */
    uint32_t group_size;  /**< puts of a group; 0: all are of one */
    uint64_t ahead_bytes; /**< what the groups allow of the next one */
    bool shuffled;        /**< backward in an order of its own, else reversed */
    bool twice;           /**< every block is fetched a second time, as with retain_graph */
    bool same_sizes;      /**< sizes do not depend on the seed */
    bool ends_early;      /**< an exception: all is dropped in the middle of backward */
    bool may_be_refused;  /**< limits may be too small: a refused source is kept */
    bool copies_fail;     /**< failing copies are expected: the source is kept, a copy back is tried again */
} training_step;

/** Options for blocks in one tier. The limit is large enough for any step here. */
msc_offload_options training_options(msc_tier tier);

/** Opens device and engine; fails the test if that does not work. */
void training_open(training *t, const msc_offload_options *options, const msc_device_faults *faults);

/** Closes both, and fails the test if a byte is still out. */
void training_close(training *t);

/** One step. Returns how many blocks came back right; fails the test on any wrong byte. */
uint32_t training_run(training *t, const training_step *step);

/** Random numbers that depend on the seed alone. */
uint64_t training_random(uint64_t *seed);

/** Fills with bytes that depend on `seed`, and compares with them. */
void training_fill(void *memory, uint64_t bytes, uint64_t seed);
bool training_is(const void *memory, uint64_t bytes, uint64_t seed);

#endif /* MSC_TEST_OFFLOAD_TRAINING_H */
