/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file synth_tape.h
 * A tape that plays autograd: layers are run one after another, then backward and optimizer follow by
 * themselves. What goes wrong on the way (memory, that is) shows when the tape is finished.
 */
#ifndef MSC_TEST_SYNTH_TAPE_H
#define MSC_TEST_SYNTH_TAPE_H

#include "memscale/memscale.h"

#define TAPE_MOST_NODES 65536u
#define TAPE_MOST_PARAMETERS 65536u

/** One layer, as backward will need it. */
typedef struct node {
    uint32_t saves[4];
    uint32_t save_count;
    uint64_t in_bytes;
    uint64_t parameter_bytes; /**< 0: none */
    uint64_t flops;           /**< of backward, and of the weight's gradient; 0: by the bytes */
    uint32_t small_ops;       /**< operations without lasting output, as views and casts are */
} node;

typedef struct tape {
    msc_graph *graph;
    int failed;
    uint32_t node_count;
    uint32_t parameter_count;
    uint32_t gradient_count;
    uint32_t parameters[TAPE_MOST_PARAMETERS];
    uint32_t gradients[TAPE_MOST_PARAMETERS];
    node nodes[TAPE_MOST_NODES];
} tape;

/** What a layer does. */
typedef struct layer {
    const char *name;
    uint64_t in_bytes;
    uint64_t out_bytes;
    uint64_t parameter_bytes;
    int save_in;
    int save_out;
    int save_extra; /**< a quarter of the output, made by the layer for backward only */
    int end_in;
    uint32_t small_ops;
    uint64_t flops;  /**< 0: by the bytes */
    uint8_t flags;   /**< of the operation */
    int in_place;    /**< it changes its input and returns that */
    int frozen;      /**< the parameter has no gradient */
    int no_backward; /**< neither has the layer */
} layer;

void tape_check(tape *t, msc_status status);

/** NULL when memory runs out. There is one tape: a start ends the one before. */
tape *tape_start(msc_context *ctx);

/** An operation whose work follows from its bytes. */
uint32_t tape_add_op(tape *t, const char *name, uint64_t bytes, uint64_t scratch_bytes);
uint32_t tape_add_buffer(tape *t, uint64_t bytes, msc_category category);
uint32_t tape_add_resident(tape *t, uint64_t bytes, msc_category category);

/** A parameter and its optimizer state. */
uint32_t tape_add_parameter(tape *t, uint64_t bytes);
uint32_t tape_add_module(tape *t, const char *path, uint32_t parent, uint64_t structure,
                         uint64_t state_bytes);

/** The whole model, with flags beside MSC_MODULE_ROOT. */
uint32_t tape_add_root(tape *t, uint32_t flags);
uint32_t tape_begin_call(tape *t, uint32_t module, uint32_t input);
void tape_end_call(tape *t, uint32_t call);
void tape_end_buffer(tape *t, uint32_t buffer);

/** Runs a layer on a value and gives the result. */
uint32_t tape_run_layer(tape *t, const layer *l, uint32_t in, uint32_t parameter);

/** The same as a module of its own, with a parameter of its own if it has one. */
uint32_t tape_call_layer(tape *t, uint32_t module, const layer *l, uint32_t in);

/** a + b of equal sizes, which saves nothing; both end. */
uint32_t tape_run_sum(tape *t, uint32_t a, uint32_t b, uint64_t bytes);

/** Backward from the last value, optimizer, finish. NULL if anything went wrong. */
msc_graph *tape_finish(tape *t, uint32_t last);

#endif /* MSC_TEST_SYNTH_TAPE_H */
