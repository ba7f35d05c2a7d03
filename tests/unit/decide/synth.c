/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Graphs with the shape of real models, built through the public builders.
 *
 * A `tape` plays autograd: each layer notes its saves, backward plays the notes in reverse. Values are
 * buffers; a layer ends its input when told that nobody else needs it.
 */
#include "synth.h"

#include <stdio.h>
#include <string.h>

#define MOST_NODES 4096
#define MOST_PARAMETERS 4096
#define FLOPS_PER_BYTE 50

/* One layer, as backward will need it. */
typedef struct node {
    uint32_t saves[4];
    uint32_t save_count;
    uint64_t in_bytes;
    uint64_t parameter_bytes; /* 0: none */
    uint32_t small_ops;       /* operations without lasting output, as views and casts are */
} node;

typedef struct tape {
    msc_graph *graph;
    int failed;
    uint32_t node_count;
    uint32_t parameter_count;
    uint32_t parameters[MOST_PARAMETERS];
    uint32_t gradients[MOST_PARAMETERS];
    uint32_t gradient_count;
    node nodes[MOST_NODES];
} tape;

/* What a layer does. */
typedef struct layer {
    const char *name;
    uint64_t in_bytes;
    uint64_t out_bytes;
    uint64_t parameter_bytes;
    int save_in;
    int save_out;
    int save_extra; /* a quarter of the output, made by the layer for backward only */
    int end_in;
    uint32_t small_ops;
} layer;

static tape the_tape; /* too large for the stack */

static void check(tape *t, msc_status status)
{
    if (status != MSC_OK)
        t->failed = 1;
}

static tape *start(msc_context *ctx)
{
    memset(&the_tape, 0, sizeof the_tape);
    check(&the_tape, msc_graph_create(ctx, &the_tape.graph, NULL));
    return the_tape.graph == NULL ? NULL : &the_tape;
}

static uint32_t add_op(tape *t, const char *name, uint64_t bytes, uint64_t scratch_bytes)
{
    msc_op op = {.flops = bytes * FLOPS_PER_BYTE, .moved_bytes = 3 * bytes, .scratch_bytes = scratch_bytes};
    uint32_t id = 0;

    check(t, msc_graph_add_op(t->graph, name, &op, &id, NULL));
    return id;
}

static uint32_t add_buffer(tape *t, uint64_t bytes, msc_category category)
{
    uint32_t id = 0;

    check(t, msc_graph_add_buffer(t->graph, bytes, category, &id, NULL));
    return id;
}

static uint32_t add_resident(tape *t, uint64_t bytes, msc_category category)
{
    uint32_t id = 0;

    check(t, msc_graph_add_resident(t->graph, bytes, category, &id, NULL));
    return id;
}

static uint32_t add_parameter(tape *t, uint64_t bytes)
{
    uint32_t id = add_resident(t, bytes, MSC_CATEGORY_PARAMETER);

    add_resident(t, 2 * bytes, MSC_CATEGORY_OPTIMIZER_STATE);
    t->parameters[t->parameter_count++] = id;
    return id;
}

static uint32_t add_module(tape *t, const char *path, uint32_t parent, uint64_t structure,
                           uint64_t state_bytes)
{
    msc_module module = {.parent = parent, .structure = structure, .state_bytes = state_bytes};
    uint32_t id = 0;

    check(t, msc_graph_add_module(t->graph, path, "Module", &module, &id, NULL));
    return id;
}

static uint32_t begin_call(tape *t, uint32_t module, uint32_t input)
{
    uint32_t call = 0;

    check(t, msc_graph_begin_call(t->graph, module, &call, NULL));
    check(t, msc_graph_add_input(t->graph, call, input, NULL));
    return call;
}

static void end_call(tape *t, uint32_t call)
{
    check(t, msc_graph_end_call(t->graph, call, NULL));
}

static void end_buffer(tape *t, uint32_t buffer)
{
    check(t, msc_graph_end_buffer(t->graph, buffer, NULL));
}

static void save(tape *t, node *n, uint32_t buffer)
{
    check(t, msc_graph_add_save(t->graph, buffer, &n->saves[n->save_count++], NULL));
}

static void add_small_ops(tape *t, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        add_op(t, "view", 64, 0);
}

static uint32_t run_layer(tape *t, const layer *l, uint32_t in, uint32_t parameter)
{
    node *n = &t->nodes[t->node_count++];
    uint32_t out;
    uint32_t extra;

    n->in_bytes = l->in_bytes;
    n->parameter_bytes = l->parameter_bytes;
    n->small_ops = l->small_ops;
    add_small_ops(t, l->small_ops);
    if (l->save_in)
        save(t, n, in);
    if (l->parameter_bytes > 0)
        save(t, n, parameter);
    add_op(t, l->name, l->in_bytes + l->out_bytes, l->out_bytes / 8);
    out = add_buffer(t, l->out_bytes, MSC_CATEGORY_ACTIVATION);
    if (l->save_extra) {
        extra = add_buffer(t, l->out_bytes / 4 + 1, MSC_CATEGORY_ACTIVATION);
        save(t, n, extra);
        end_buffer(t, extra);
    }
    if (l->save_out)
        save(t, n, out);
    if (l->end_in)
        end_buffer(t, in);
    return out;
}

/* A layer that is a module of its own. */
static uint32_t call_layer(tape *t, uint32_t module, const layer *l, uint32_t in)
{
    uint32_t parameter = l->parameter_bytes > 0 ? add_parameter(t, l->parameter_bytes) : 0;
    uint32_t call = begin_call(t, module, in);
    uint32_t out = run_layer(t, l, in, parameter);

    end_call(t, call);
    return out;
}

static uint32_t run_node_backward(tape *t, const node *n, uint32_t gradient)
{
    uint32_t next;
    uint32_t i;

    for (i = 0; i < n->save_count; i++)
        check(t, msc_graph_unpack(t->graph, n->saves[i], NULL));
    add_small_ops(t, n->small_ops);
    add_op(t, "backward", 2 * n->in_bytes, n->in_bytes / 8);
    next = add_buffer(t, n->in_bytes, MSC_CATEGORY_TEMPORARY);
    if (n->parameter_bytes > 0) {
        add_op(t, "weight_gradient", n->in_bytes, 0);
        t->gradients[t->gradient_count++] = add_buffer(t, n->parameter_bytes, MSC_CATEGORY_GRADIENT);
    }
    end_buffer(t, gradient);
    for (i = 0; i < n->save_count; i++)
        check(t, msc_graph_release(t->graph, n->saves[i], NULL));
    return next;
}

static void run_optimizer(tape *t)
{
    uint32_t i;

    check(t, msc_graph_set_phase(t->graph, MSC_PHASE_OPTIMIZER, NULL));
    for (i = 0; i < t->parameter_count; i++) {
        add_op(t, "moments", 64, 0);
        add_op(t, "update", 64, 0);
        check(t, msc_graph_add_write(t->graph, t->parameters[i], NULL));
    }
}

/* Backward from the last value, optimizer, finish. */
static msc_graph *finish(tape *t, uint32_t last)
{
    uint32_t gradient;
    uint32_t i;

    check(t, msc_graph_set_phase(t->graph, MSC_PHASE_BACKWARD, NULL));
    add_op(t, "loss_gradient", 64, 0);
    gradient = add_buffer(t, 64, MSC_CATEGORY_TEMPORARY);
    end_buffer(t, last);
    for (i = t->node_count; i-- > 0;)
        gradient = run_node_backward(t, &t->nodes[i], gradient);
    end_buffer(t, gradient);
    run_optimizer(t);
    check(t, msc_graph_finish(t->graph, NULL));
    if (t->failed) {
        msc_graph_destroy(t->graph);
        return NULL;
    }
    return t->graph;
}

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
    b->self = add_module(t, path, parent, 100, 5056);
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        snprintf(path, sizeof path, "blocks.%u.%s", index, rows[i].name);
        *rows[i].id = add_module(t, path, *rows[i].parent, 101 + i, rows[i].state);
    }
}

/* a + b, which saves nothing. */
static uint32_t run_sum(tape *t, uint32_t a, uint32_t b)
{
    uint32_t out;

    add_op(t, "add", 2 * WIDTH_BYTES, 0);
    out = add_buffer(t, WIDTH_BYTES, MSC_CATEGORY_ACTIVATION);
    end_buffer(t, a);
    end_buffer(t, b);
    return out;
}

static uint32_t run_block(tape *t, const block *b, uint32_t x)
{
    const uint64_t w = WIDTH_BYTES;
    const layer norm = {"norm", w, w, 8192, 1, 0, 1, 0, SMALL_OPS};
    const layer qkv = {"qkv", w, 3 * w, 3 * w / 8, 1, 0, 0, 1, SMALL_OPS};
    const layer softmax = {"softmax", 3 * w, 2 * w, 0, 1, 1, 1, 1, 2 * SMALL_OPS};
    const layer output = {"output", 2 * w, w, w / 8, 1, 0, 0, 1, SMALL_OPS};
    const layer up = {"up", w, 4 * w, w / 2, 1, 0, 0, 1, SMALL_OPS};
    const layer gelu = {"gelu", 4 * w, 4 * w, 0, 1, 0, 0, 1, SMALL_OPS};
    const layer down = {"down", 4 * w, w, w / 2, 1, 0, 1, 1, SMALL_OPS};
    uint32_t self = begin_call(t, b->self, x);
    uint32_t h = call_layer(t, b->norm1, &norm, x);
    uint32_t call = begin_call(t, b->attention, h);

    h = call_layer(t, b->qkv, &qkv, h);
    h = call_layer(t, b->softmax, &softmax, h);
    h = call_layer(t, b->output, &output, h);
    end_call(t, call);
    x = run_sum(t, x, h);
    h = call_layer(t, b->norm2, &norm, x);
    call = begin_call(t, b->mlp, h);
    h = call_layer(t, b->up, &up, h);
    h = call_layer(t, b->gelu, &gelu, h);
    h = call_layer(t, b->down, &down, h);
    end_call(t, call);
    x = run_sum(t, x, h);
    end_call(t, self);
    return x;
}

msc_graph *synth_transformer(msc_context *ctx, uint32_t block_count)
{
    const layer embed = {"embedding", 65536, WIDTH_BYTES, 2 * WIDTH_BYTES, 1, 0, 0, 0, SMALL_OPS};
    const layer head = {"head", WIDTH_BYTES, 8 * WIDTH_BYTES, 0, 1, 1, 0, 1, SMALL_OPS};
    tape *t = start(ctx);
    block b;
    uint32_t root;
    uint32_t list;
    uint32_t call;
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    root = add_module(t, "", MSC_NONE, 0, 0);
    check(t, msc_graph_mark_module(t->graph, root, MSC_MODULE_ROOT, 0, NULL));
    list = add_module(t, "blocks", root, 0, 0);
    x = add_resident(t, 65536, MSC_CATEGORY_INPUT);
    call = begin_call(t, root, x);
    x = call_layer(t, add_module(t, "embedding", root, 50, 0), &embed, x);
    for (i = 0; i < block_count; i++) {
        add_block(t, &b, list, i);
        x = run_block(t, &b, x);
    }
    x = call_layer(t, add_module(t, "head", root, 60, 0), &head, x);
    end_call(t, call);
    return finish(t, x);
}

/* ---- small ones ------------------------------------------------------------------------------------ */

msc_graph *synth_chain(msc_context *ctx)
{
    static const uint32_t kib[] = {512, 96, 700, 40, 1300, 220, 64, 2048, 333, 150, 900, 75, 610, 480};
    tape *t = start(ctx);
    uint32_t root;
    uint32_t call;
    uint32_t x;
    size_t i;

    if (t == NULL)
        return NULL;
    root = add_module(t, "", MSC_NONE, 0, 0);
    check(t, msc_graph_mark_module(t->graph, root, MSC_MODULE_ROOT, 0, NULL));
    x = add_resident(t, 65536, MSC_CATEGORY_INPUT);
    call = begin_call(t, root, x);
    for (i = 0; i + 1 < sizeof kib / sizeof kib[0]; i++) {
        char path[32];
        layer l = {"layer", kib[i] * 1024u, kib[i + 1] * 1024u, 4096, 1, i % 2 == 0, i % 3 == 0, i > 0, 1};
        uint32_t outer = root;
        uint32_t outer_call = 0;
        snprintf(path, sizeof path, "wrapper%u", (unsigned)i);
        if (i % 3 == 2) {
            outer = add_module(t, path, root, 0, 0);
            outer_call = begin_call(t, outer, x);
        }
        snprintf(path, sizeof path, "layer%u", (unsigned)i);
        x = call_layer(t, add_module(t, path, outer, 0, i % 5 == 4 ? 5056 : 0), &l, x);
        if (i % 3 == 2)
            end_call(t, outer_call);
    }
    end_call(t, call);
    return finish(t, x);
}

static const layer plain_layer = {"layer", 1 << 16, 1 << 16, 1024, 1, 1, 1, 1, 0};

/* Two layers in one module. */
static uint32_t call_pair(tape *t, uint32_t module, uint32_t x, uint32_t parameter)
{
    uint32_t call = begin_call(t, module, x);

    x = run_layer(t, &plain_layer, x, parameter);
    x = run_layer(t, &plain_layer, x, parameter);
    end_call(t, call);
    return x;
}

static uint32_t first_value(tape *t)
{
    add_op(t, "load", 1 << 16, 0);
    return add_buffer(t, 1 << 16, MSC_CATEGORY_INPUT);
}

msc_graph *synth_shared(msc_context *ctx)
{
    tape *t = start(ctx);
    uint32_t left;
    uint32_t right;
    uint32_t shared;
    uint32_t parameter;
    uint32_t call;
    uint32_t x;

    if (t == NULL)
        return NULL;
    left = add_module(t, "left", MSC_NONE, 7, 0);
    right = add_module(t, "right", MSC_NONE, 7, 0);
    shared = add_module(t, "left.shared", left, 8, 100);
    parameter = add_parameter(t, 1024);
    x = first_value(t);
    call = begin_call(t, left, x);
    x = run_layer(t, &plain_layer, x, parameter);
    x = call_pair(t, shared, x, parameter);
    end_call(t, call);
    call = begin_call(t, right, x);
    x = call_pair(t, shared, x, parameter);
    x = run_layer(t, &plain_layer, x, parameter);
    end_call(t, call);
    x = run_layer(t, &plain_layer, x, parameter);
    return finish(t, x);
}

msc_graph *synth_nothing(msc_context *ctx)
{
    const layer linear = {"linear", 1 << 16, 1 << 16, 1024, 1, 0, 0, 1, 0};
    tape *t = start(ctx);
    uint32_t unused;
    uint32_t call;
    uint32_t made;
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    unused = add_module(t, "unused", MSC_NONE, 0, 0);
    x = first_value(t);
    for (i = 0; i < 4; i++) {
        char path[32];
        snprintf(path, sizeof path, "linear%u", i);
        x = call_layer(t, add_module(t, path, MSC_NONE, 1, 0), &linear, x);
    }
    call = begin_call(t, unused, x);
    add_op(t, "probe", 1 << 16, 0);
    made = add_buffer(t, 1 << 16, MSC_CATEGORY_ACTIVATION);
    check(t, msc_graph_add_save(t->graph, made, NULL, NULL));
    end_buffer(t, made);
    end_call(t, call);
    return finish(t, x);
}

msc_graph *synth_huge(msc_context *ctx)
{
    tape *t = start(ctx);
    uint32_t parameter;
    uint32_t huge;
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    parameter = add_parameter(t, 1024);
    x = first_value(t);
    for (i = 0; i < 6; i++) {
        char path[32];
        uint32_t module;
        snprintf(path, sizeof path, "pair%u", i);
        module = add_module(t, path, MSC_NONE, 9, 0);
        x = call_pair(t, module, x, parameter);
        if (i == 2) {
            add_op(t, "huge", 1 << 16, 1u << 30);
            huge = add_buffer(t, 1u << 30, MSC_CATEGORY_TEMPORARY);
            end_buffer(t, huge);
        }
    }
    return finish(t, x);
}

/* ---- reasons --------------------------------------------------------------------------------------- */

static uint32_t call_barred(tape *t, const char *path, uint32_t flags, uint32_t x, uint32_t parameter)
{
    uint32_t module = add_module(t, path, MSC_NONE, 0, 0);

    check(t, msc_graph_mark_module(t->graph, module, flags, 0, NULL));
    return call_pair(t, module, x, parameter);
}

msc_graph *synth_barred(msc_context *ctx)
{
    tape *t = start(ctx);
    uint32_t parameter;
    uint32_t outside;
    uint32_t counter;
    uint32_t module;
    uint32_t call;
    uint32_t x;

    if (t == NULL)
        return NULL;
    parameter = add_parameter(t, 1024);
    outside = add_resident(t, 4096, MSC_CATEGORY_ACTIVATION);
    counter = add_resident(t, 4096, MSC_CATEGORY_BUFFER);
    x = first_value(t);
    x = call_barred(t, "free", 0, x, parameter);
    x = call_barred(t, "python_state", MSC_MODULE_PYTHON_STATE, x, parameter);
    x = call_barred(t, "not_tensors", MSC_MODULE_NOT_TENSORS, x, parameter);
    x = call_barred(t, "no_forward", MSC_MODULE_NO_FORWARD, x, parameter);
    x = call_barred(t, "excluded", MSC_MODULE_EXCLUDED, x, parameter);
    x = call_barred(t, "hooked", MSC_MODULE_HOOKED, x, parameter);
    module = add_module(t, "parent_of_excluded", MSC_NONE, 0, 0);
    call = begin_call(t, module, x);
    x = run_layer(t, &plain_layer, x, parameter);
    x = call_barred(t, "parent_of_excluded.excluded", MSC_MODULE_EXCLUDED, x, parameter);
    end_call(t, call);
    module = add_module(t, "writes_outside", MSC_NONE, 0, 0);
    call = begin_call(t, module, x);
    x = run_layer(t, &plain_layer, x, parameter);
    check(t, msc_graph_add_write(t->graph, outside, NULL));
    end_call(t, call);
    module = add_module(t, "writes_buffer", MSC_NONE, 0, 0);
    call = begin_call(t, module, x);
    x = run_layer(t, &plain_layer, x, parameter);
    check(t, msc_graph_add_write(t->graph, counter, NULL));
    end_call(t, call);
    module = add_module(t, "input_changed", MSC_NONE, 0, 0);
    call = begin_call(t, module, outside);
    x = run_layer(t, &plain_layer, x, parameter);
    end_call(t, call);
    add_op(t, "add_", 4096, 0);
    check(t, msc_graph_add_write(t->graph, outside, NULL));
    x = call_barred(t, "last", 0, x, parameter);
    return finish(t, x);
}
