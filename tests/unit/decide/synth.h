/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file synth.h
 * Graphs for tests: a few with the shape of real models, and any number of odd ones made from bytes.
 */
#ifndef MSC_TEST_SYNTH_H
#define MSC_TEST_SYNTH_H

#include <stddef.h>
#include <stdint.h>

#include "memscale/memscale.h"

/** A transformer: embedding, blocks of attention and MLP, head, loss; backward; AdamW. About 8 modules and,
 * with forward, backward and optimizer, 480 operations a block. NULL when memory runs out. */
msc_graph *synth_transformer(msc_context *ctx, uint32_t block_count);

/** Layers of all sizes in a row, no two alike, every third one inside a wrapper. */
msc_graph *synth_chain(msc_context *ctx);

/** A block that is called twice, by two parents. */
msc_graph *synth_shared(msc_context *ctx);

/** Modules that save only their inputs and parameters, or nothing that backward uses. */
msc_graph *synth_nothing(msc_context *ctx);

/** A small chain in which one operation's output dwarfs everything else. */
msc_graph *synth_huge(msc_context *ctx);

/** Modules that may not be run again, one for each reason. */
msc_graph *synth_barred(msc_context *ctx);

/** A valid graph from any bytes; equal bytes give equal graphs. NULL when memory runs out. */
msc_graph *synth_bytes(msc_context *ctx, const uint8_t *bytes, size_t count);

#endif /* MSC_TEST_SYNTH_H */
