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

/** What the caller forbids, and what differed in a recompute, each inside a module that nothing else speaks against. */
msc_graph *synth_left_out(msc_context *ctx);

/** Details of `synth_blocks`, to be added up. */
enum {
    SYNTH_HALVES = 1, /**< attention and MLP of a block are modules */
    SYNTH_LAYERS = 2  /**< so is every layer */
};

/** A transformer whose products are dear and whose element-wise operations are cheap, with dropout and views.
 * Blocks are modules, and what `detail` says. */
msc_graph *synth_blocks(msc_context *ctx, uint32_t count, unsigned detail);

/** Kinds of `synth_sequence`, to be added up. */
enum {
    SYNTH_UNEQUAL = 1, /**< sizes differ, else all are equal */
    SYNTH_IN_PLACE = 2 /**< activations change their input */
};

/** A chain of `count` layers without anything around them: products and activations in turn. The root is the
 * chain. */
msc_graph *synth_sequence(msc_context *ctx, uint32_t count, unsigned kind);

/** Blocks in a row of which no two are alike in size or time, whatever the seed. */
msc_graph *synth_unequal(msc_context *ctx, uint32_t count, uint32_t seed);

/** Rounds of two blocks each: the second is the same module in every round, the first in every other. */
msc_graph *synth_tied(msc_context *ctx, uint32_t rounds);

/** Modules nested in each other, each with one layer of its own. */
msc_graph *synth_deep(msc_context *ctx, uint32_t depth);

/** Layers without backward: nothing is saved, nothing has a gradient. */
msc_graph *synth_frozen(msc_context *ctx, uint32_t count);

/** A valid graph from any bytes; equal bytes give equal graphs. NULL when memory runs out. */
msc_graph *synth_bytes(msc_context *ctx, const uint8_t *bytes, size_t count);

#endif /* MSC_TEST_SYNTH_H */
