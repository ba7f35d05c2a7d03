/* SPDX-License-Identifier: Apache-2.0 */
/* Graphs with the shape of real models, built with a tape. */
#include "synth.h"

#include <stdio.h>

#include "synth_tape.h"

/* ---- transformer ----------------------------------------------------------------------------------- */

enum { WIDTH_BYTES = 1 << 20, SMALL_OPS = 14 };

/* Modules of one block. */
typedef struct block {
    uint32_t self, attention, norm1, qkv, softmax, output, norm2, mlp, up, gelu, down;
} block;

static void add_block(tape *t, block *b, uint32_t parent, uint32_t index)
{
    char path[64];
    struct {
        uint32_t *id;
        const char *name;
        uint32_t *parent;
        uint64_t state;
    } rows[] = {{&b->norm1, "norm1", &b->self, 0},
                {&b->attention, "attention", &b->self, 5056},
                {&b->qkv, "attention.qkv", &b->attention, 0},
                {&b->softmax, "attention.softmax", &b->attention, 5056},
                {&b->output, "attention.output", &b->attention, 0},
                {&b->norm2, "norm2", &b->self, 0},
                {&b->mlp, "mlp", &b->self, 0},
                {&b->up, "mlp.up", &b->mlp, 0},
                {&b->gelu, "mlp.gelu", &b->mlp, 0},
                {&b->down, "mlp.down", &b->mlp, 0}};
    size_t i;

    snprintf(path, sizeof path, "blocks.%u", index);
    b->self = tape_add_module(t, path, parent, 100, 5056);
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        snprintf(path, sizeof path, "blocks.%u.%s", index, rows[i].name);
        *rows[i].id = tape_add_module(t, path, *rows[i].parent, 101 + i, rows[i].state);
    }
}

static uint32_t run_block(tape *t, const block *b, uint32_t x)
{
    const uint64_t w = WIDTH_BYTES;
    const layer norm = {.name = "norm",
                        .in_bytes = w,
                        .out_bytes = w,
                        .parameter_bytes = 8192,
                        .save_in = 1,
                        .save_extra = 1,
                        .small_ops = SMALL_OPS};
    const layer qkv = {.name = "qkv",
                       .in_bytes = w,
                       .out_bytes = 3 * w,
                       .parameter_bytes = 3 * w / 8,
                       .save_in = 1,
                       .end_in = 1,
                       .small_ops = SMALL_OPS};
    const layer softmax = {.name = "softmax",
                           .in_bytes = 3 * w,
                           .out_bytes = 2 * w,
                           .save_in = 1,
                           .save_out = 1,
                           .save_extra = 1,
                           .end_in = 1,
                           .small_ops = 2 * SMALL_OPS};
    const layer output = {.name = "output",
                          .in_bytes = 2 * w,
                          .out_bytes = w,
                          .parameter_bytes = w / 8,
                          .save_in = 1,
                          .end_in = 1,
                          .small_ops = SMALL_OPS};
    const layer up = {.name = "up",
                      .in_bytes = w,
                      .out_bytes = 4 * w,
                      .parameter_bytes = w / 2,
                      .save_in = 1,
                      .end_in = 1,
                      .small_ops = SMALL_OPS};
    const layer gelu = {.name = "gelu",
                        .in_bytes = 4 * w,
                        .out_bytes = 4 * w,
                        .save_in = 1,
                        .end_in = 1,
                        .small_ops = SMALL_OPS};
    const layer down = {.name = "down",
                        .in_bytes = 4 * w,
                        .out_bytes = w,
                        .parameter_bytes = w / 2,
                        .save_in = 1,
                        .save_extra = 1,
                        .end_in = 1,
                        .small_ops = SMALL_OPS};
    uint32_t self = tape_begin_call(t, b->self, x);
    uint32_t h = tape_call_layer(t, b->norm1, &norm, x);
    uint32_t call = tape_begin_call(t, b->attention, h);

    h = tape_call_layer(t, b->qkv, &qkv, h);
    h = tape_call_layer(t, b->softmax, &softmax, h);
    h = tape_call_layer(t, b->output, &output, h);
    tape_end_call(t, call);
    x = tape_run_sum(t, x, h, WIDTH_BYTES);
    h = tape_call_layer(t, b->norm2, &norm, x);
    call = tape_begin_call(t, b->mlp, h);
    h = tape_call_layer(t, b->up, &up, h);
    h = tape_call_layer(t, b->gelu, &gelu, h);
    h = tape_call_layer(t, b->down, &down, h);
    tape_end_call(t, call);
    x = tape_run_sum(t, x, h, WIDTH_BYTES);
    tape_end_call(t, self);
    return x;
}

msc_graph *synth_transformer(msc_context *ctx, uint32_t block_count)
{
    const layer embed = {.name = "embedding",
                         .in_bytes = 65536,
                         .out_bytes = WIDTH_BYTES,
                         .parameter_bytes = 2 * WIDTH_BYTES,
                         .save_in = 1,
                         .small_ops = SMALL_OPS};
    const layer head = {.name = "head",
                        .in_bytes = WIDTH_BYTES,
                        .out_bytes = 8 * WIDTH_BYTES,
                        .save_in = 1,
                        .save_out = 1,
                        .end_in = 1,
                        .small_ops = SMALL_OPS};
    tape *t = tape_start(ctx);
    block b;
    uint32_t root;
    uint32_t list;
    uint32_t call;
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    root = tape_add_root(t, 0);
    list = tape_add_module(t, "blocks", root, 0, 0);
    x = tape_add_resident(t, 65536, MSC_CATEGORY_INPUT);
    call = tape_begin_call(t, root, x);
    x = tape_call_layer(t, tape_add_module(t, "embedding", root, 50, 0), &embed, x);
    for (i = 0; i < block_count; i++) {
        add_block(t, &b, list, i);
        x = run_block(t, &b, x);
    }
    x = tape_call_layer(t, tape_add_module(t, "head", root, 60, 0), &head, x);
    tape_end_call(t, call);
    return tape_finish(t, x);
}

/* ---- small ones ------------------------------------------------------------------------------------ */

msc_graph *synth_chain(msc_context *ctx)
{
    static const uint32_t kib[] = {512, 96, 700, 40, 1300, 220, 64, 2048, 333, 150, 900, 75, 610, 480};
    tape *t = tape_start(ctx);
    uint32_t root;
    uint32_t call;
    uint32_t x;
    size_t i;

    if (t == NULL)
        return NULL;
    root = tape_add_root(t, 0);
    x = tape_add_resident(t, 65536, MSC_CATEGORY_INPUT);
    call = tape_begin_call(t, root, x);
    for (i = 0; i + 1 < sizeof kib / sizeof kib[0]; i++) {
        char path[32];
        layer l = {.name = "layer",
                   .in_bytes = kib[i] * 1024u,
                   .out_bytes = kib[i + 1] * 1024u,
                   .parameter_bytes = 4096,
                   .save_in = 1,
                   .save_out = i % 2 == 0,
                   .save_extra = i % 3 == 0,
                   .end_in = i > 0,
                   .small_ops = 1};
        uint32_t outer = root;
        uint32_t outer_call = 0;
        snprintf(path, sizeof path, "wrapper%u", (unsigned)i);
        if (i % 3 == 2) {
            outer = tape_add_module(t, path, root, 0, 0);
            outer_call = tape_begin_call(t, outer, x);
        }
        snprintf(path, sizeof path, "layer%u", (unsigned)i);
        x = tape_call_layer(t, tape_add_module(t, path, outer, 0, i % 5 == 4 ? 5056 : 0), &l, x);
        if (i % 3 == 2)
            tape_end_call(t, outer_call);
    }
    tape_end_call(t, call);
    return tape_finish(t, x);
}

static const layer plain_layer = {.name = "layer",
                                  .in_bytes = 1 << 16,
                                  .out_bytes = 1 << 16,
                                  .parameter_bytes = 1024,
                                  .save_in = 1,
                                  .save_out = 1,
                                  .save_extra = 1,
                                  .end_in = 1};

/* Two layers in one module. */
static uint32_t call_pair(tape *t, uint32_t module, uint32_t x, uint32_t parameter)
{
    uint32_t call = tape_begin_call(t, module, x);

    x = tape_run_layer(t, &plain_layer, x, parameter);
    x = tape_run_layer(t, &plain_layer, x, parameter);
    tape_end_call(t, call);
    return x;
}

static uint32_t first_value(tape *t)
{
    tape_add_op(t, "load", 1 << 16, 0);
    return tape_add_buffer(t, 1 << 16, MSC_CATEGORY_INPUT);
}

msc_graph *synth_shared(msc_context *ctx)
{
    tape *t = tape_start(ctx);
    uint32_t left;
    uint32_t right;
    uint32_t shared;
    uint32_t parameter;
    uint32_t call;
    uint32_t x;

    if (t == NULL)
        return NULL;
    left = tape_add_module(t, "left", MSC_NONE, 7, 0);
    right = tape_add_module(t, "right", MSC_NONE, 7, 0);
    shared = tape_add_module(t, "left.shared", left, 8, 100);
    parameter = tape_add_parameter(t, 1024);
    x = first_value(t);
    call = tape_begin_call(t, left, x);
    x = tape_run_layer(t, &plain_layer, x, parameter);
    x = call_pair(t, shared, x, parameter);
    tape_end_call(t, call);
    call = tape_begin_call(t, right, x);
    x = call_pair(t, shared, x, parameter);
    x = tape_run_layer(t, &plain_layer, x, parameter);
    tape_end_call(t, call);
    x = tape_run_layer(t, &plain_layer, x, parameter);
    return tape_finish(t, x);
}

msc_graph *synth_nothing(msc_context *ctx)
{
    const layer linear = {.name = "linear",
                          .in_bytes = 1 << 16,
                          .out_bytes = 1 << 16,
                          .parameter_bytes = 1024,
                          .save_in = 1,
                          .end_in = 1};
    tape *t = tape_start(ctx);
    uint32_t unused;
    uint32_t call;
    uint32_t made;
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    unused = tape_add_module(t, "unused", MSC_NONE, 0, 0);
    x = first_value(t);
    for (i = 0; i < 4; i++) {
        char path[32];
        snprintf(path, sizeof path, "linear%u", i);
        x = tape_call_layer(t, tape_add_module(t, path, MSC_NONE, 1, 0), &linear, x);
    }
    call = tape_begin_call(t, unused, x);
    tape_add_op(t, "probe", 1 << 16, 0);
    made = tape_add_buffer(t, 1 << 16, MSC_CATEGORY_ACTIVATION);
    tape_check(t, msc_graph_add_save(t->graph, made, NULL, NULL));
    tape_end_buffer(t, made);
    tape_end_call(t, call);
    return tape_finish(t, x);
}

msc_graph *synth_huge(msc_context *ctx)
{
    tape *t = tape_start(ctx);
    uint32_t parameter;
    uint32_t huge;
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    parameter = tape_add_parameter(t, 1024);
    x = first_value(t);
    for (i = 0; i < 6; i++) {
        char path[32];
        uint32_t module;
        snprintf(path, sizeof path, "pair%u", i);
        module = tape_add_module(t, path, MSC_NONE, 9, 0);
        x = call_pair(t, module, x, parameter);
        if (i == 2) {
            tape_add_op(t, "huge", 1 << 16, 1u << 30);
            huge = tape_add_buffer(t, 1u << 30, MSC_CATEGORY_TEMPORARY);
            tape_end_buffer(t, huge);
        }
    }
    return tape_finish(t, x);
}

/* ---- reasons --------------------------------------------------------------------------------------- */

static uint32_t call_barred(tape *t, const char *path, uint32_t flags, uint32_t x, uint32_t parameter)
{
    uint32_t module = tape_add_module(t, path, MSC_NONE, 0, 0);

    tape_check(t, msc_graph_mark_module(t->graph, module, flags, 0, NULL));
    return call_pair(t, module, x, parameter);
}

/* A module "parent_of_<what>" whose second half is a call of "parent_of_<what>.<what>", which has the flags. */
static uint32_t call_parent_of(tape *t, const char *what, uint32_t flags, uint32_t x, uint32_t parameter)
{
    char path[64];
    uint32_t module;
    uint32_t call;

    (void)snprintf(path, sizeof path, "parent_of_%s", what);
    module = tape_add_module(t, path, MSC_NONE, 0, 0);
    call = tape_begin_call(t, module, x);
    x = tape_run_layer(t, &plain_layer, x, parameter);
    (void)snprintf(path, sizeof path, "parent_of_%s.%s", what, what);
    x = call_barred(t, path, flags, x, parameter);
    tape_end_call(t, call);
    return x;
}

msc_graph *synth_barred(msc_context *ctx)
{
    tape *t = tape_start(ctx);
    uint32_t parameter;
    uint32_t outside;
    uint32_t counter;
    uint32_t module;
    uint32_t call;
    uint32_t x;

    if (t == NULL)
        return NULL;
    parameter = tape_add_parameter(t, 1024);
    outside = tape_add_resident(t, 4096, MSC_CATEGORY_ACTIVATION);
    counter = tape_add_resident(t, 4096, MSC_CATEGORY_BUFFER);
    x = first_value(t);
    x = call_barred(t, "free", 0, x, parameter);
    x = call_barred(t, "python_state", MSC_MODULE_PYTHON_STATE, x, parameter);
    x = call_barred(t, "not_tensors", MSC_MODULE_NOT_TENSORS, x, parameter);
    x = call_barred(t, "no_forward", MSC_MODULE_NO_FORWARD, x, parameter);
    x = call_barred(t, "excluded", MSC_MODULE_EXCLUDED, x, parameter);
    x = call_barred(t, "hooked", MSC_MODULE_HOOKED, x, parameter);
    x = call_barred(t, "no_room", MSC_MODULE_NO_ROOM, x, parameter);
    x = call_barred(t, "buffer_changed", MSC_MODULE_INPUT_CHANGED, x, parameter);
    x = call_parent_of(t, "excluded", MSC_MODULE_EXCLUDED, x, parameter);
    module = tape_add_module(t, "writes_outside", MSC_NONE, 0, 0);
    call = tape_begin_call(t, module, x);
    x = tape_run_layer(t, &plain_layer, x, parameter);
    tape_check(t, msc_graph_add_write(t->graph, outside, NULL));
    tape_end_call(t, call);
    module = tape_add_module(t, "writes_buffer", MSC_NONE, 0, 0);
    call = tape_begin_call(t, module, x);
    x = tape_run_layer(t, &plain_layer, x, parameter);
    tape_check(t, msc_graph_add_write(t->graph, counter, NULL));
    tape_end_call(t, call);
    module = tape_add_module(t, "input_changed", MSC_NONE, 0, 0);
    call = tape_begin_call(t, module, outside);
    x = tape_run_layer(t, &plain_layer, x, parameter);
    tape_end_call(t, call);
    tape_add_op(t, "add_", 4096, 0);
    tape_check(t, msc_graph_add_write(t->graph, outside, NULL));
    x = call_barred(t, "last", 0, x, parameter);
    return tape_finish(t, x);
}

msc_graph *synth_left_out(msc_context *ctx)
{
    tape *t = tape_start(ctx);
    uint32_t parameter;
    uint32_t x;

    if (t == NULL)
        return NULL;
    parameter = tape_add_parameter(t, 1024);
    x = first_value(t);
    x = call_parent_of(t, "differed", MSC_MODULE_DIFFERED, x, parameter);
    x = call_parent_of(t, "excluded", MSC_MODULE_EXCLUDED, x, parameter);
    x = call_parent_of(t, "left_out", MSC_MODULE_LEFT_OUT, x, parameter);
    x = call_parent_of(t, "scripted", MSC_MODULE_SCRIPTED, x, parameter);
    return tape_finish(t, x);
}
