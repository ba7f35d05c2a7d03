/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Graphs in which it matters what is run again: products are dear, element-wise operations cheap, masks are
 * drawn, views make nothing; and chains of layers that gain nothing one by one.
 */
#include "synth.h"

#include <stdio.h>

#include "synth_tape.h"

/* ---- transformer of 512 × 4 tokens, 768 wide ------------------------------------------------------- */

enum { TOKENS = 2048, WIDTH = 768, LENGTH = 512 };

#define VALUE_BYTES ((uint64_t)TOKENS * WIDTH * 4)
#define PRODUCT(out, in) (2 * (uint64_t)TOKENS * (out) * (in))
#define CHEAP(bytes) ((bytes)*2)

/* Modules of a block; those that are not wanted are MSC_NONE. */
typedef struct parts {
    uint32_t self, attention, mlp, norm1, qkv, sdpa, output, norm2, up, gelu, down;
} parts;

static uint32_t add_part(tape *t, uint32_t block, const char *name, uint32_t parent, uint64_t structure)
{
    char path[64];

    snprintf(path, sizeof path, "blocks.%u.%s", block, name);
    return tape_add_module(t, path, parent, structure, 0);
}

static parts add_parts(tape *t, uint32_t block, uint32_t list, unsigned detail)
{
    parts p;
    uint32_t *all[] = {&p.self,   &p.attention, &p.mlp, &p.norm1, &p.qkv, &p.sdpa,
                       &p.output, &p.norm2,     &p.up,  &p.gelu,  &p.down};
    char path[32];
    size_t i;

    for (i = 0; i < sizeof all / sizeof all[0]; i++)
        *all[i] = MSC_NONE;
    snprintf(path, sizeof path, "blocks.%u", block);
    p.self = tape_add_module(t, path, list, 200, 5056);
    if ((detail & SYNTH_HALVES) != 0) {
        p.attention = add_part(t, block, "attention", p.self, 201);
        p.mlp = add_part(t, block, "mlp", p.self, 202);
    }
    if ((detail & SYNTH_LAYERS) != 0) {
        uint32_t a = p.attention == MSC_NONE ? p.self : p.attention;
        uint32_t m = p.mlp == MSC_NONE ? p.self : p.mlp;
        p.norm1 = add_part(t, block, "norm1", p.self, 203);
        p.qkv = add_part(t, block, "qkv", a, 204);
        p.sdpa = add_part(t, block, "sdpa", a, 205);
        p.output = add_part(t, block, "output", a, 206);
        p.norm2 = add_part(t, block, "norm2", p.self, 203);
        p.up = add_part(t, block, "up", m, 207);
        p.gelu = add_part(t, block, "gelu", m, 208);
        p.down = add_part(t, block, "down", m, 209);
    }
    return p;
}

/* Enters a module if it is wanted. */
static uint32_t enter(tape *t, uint32_t module, uint32_t x)
{
    return module == MSC_NONE ? MSC_NONE : tape_begin_call(t, module, x);
}

static void leave(tape *t, uint32_t call)
{
    if (call != MSC_NONE)
        tape_end_call(t, call);
}

static uint32_t run_part(tape *t, uint32_t module, const layer *l, uint32_t x)
{
    uint32_t parameter = l->parameter_bytes > 0 ? tape_add_parameter(t, l->parameter_bytes) : 0;
    uint32_t call = enter(t, module, x);

    x = tape_run_layer(t, l, x, parameter);
    leave(t, call);
    return x;
}

/* Features in and out, as they are multiplied. */
static layer product(uint64_t in, uint64_t out)
{
    return (layer){.name = "addmm",
                   .in_bytes = in / WIDTH * VALUE_BYTES,
                   .out_bytes = out / WIDTH * VALUE_BYTES,
                   .save_in = 1,
                   .end_in = 1,
                   .parameter_bytes = 4 * in * out,
                   .flops = PRODUCT(out, in)};
}

static uint32_t run_dropout(tape *t, uint32_t x)
{
    const layer dropout = {.name = "native_dropout",
                           .in_bytes = VALUE_BYTES,
                           .out_bytes = VALUE_BYTES,
                           .save_extra = 1,
                           .end_in = 1,
                           .flops = CHEAP(VALUE_BYTES),
                           .flags = MSC_OP_RANDOM};

    return tape_run_layer(t, &dropout, x, 0);
}

static uint32_t run_attention(tape *t, const parts *p, uint32_t x)
{
    const uint64_t v = VALUE_BYTES;
    layer qkv = product(WIDTH, 3 * WIDTH);
    const layer sdpa = {.name = "attention",
                        .in_bytes = 3 * v,
                        .out_bytes = v,
                        .save_in = 1,
                        .save_out = 1,
                        .end_in = 1,
                        .flops = 2 * PRODUCT(LENGTH, WIDTH),
                        .small_ops = 4};
    const layer output = product(WIDTH, WIDTH);
    uint32_t call = enter(t, p->attention, x);

    qkv.small_ops = 5;
    x = run_part(t, p->qkv, &qkv, x);
    x = run_part(t, p->sdpa, &sdpa, x);
    x = run_part(t, p->output, &output, x);
    x = run_dropout(t, x);
    leave(t, call);
    return x;
}

static uint32_t run_mlp(tape *t, const parts *p, uint32_t x)
{
    const uint64_t v = VALUE_BYTES;
    const layer up = product(WIDTH, 4 * WIDTH);
    const layer gelu = {.name = "gelu",
                        .in_bytes = 4 * v,
                        .out_bytes = 4 * v,
                        .save_in = 1,
                        .end_in = 1,
                        .flops = CHEAP(4 * v)};
    const layer down = product(4 * WIDTH, WIDTH);
    uint32_t call = enter(t, p->mlp, x);

    x = run_part(t, p->up, &up, x);
    x = run_part(t, p->gelu, &gelu, x);
    x = run_part(t, p->down, &down, x);
    x = run_dropout(t, x);
    leave(t, call);
    return x;
}

static uint32_t run_block(tape *t, const parts *p, uint32_t x)
{
    const uint64_t v = VALUE_BYTES;
    const layer norm = {.name = "native_layer_norm",
                        .in_bytes = v,
                        .out_bytes = v,
                        .save_in = 1,
                        .parameter_bytes = 8 * WIDTH,
                        .flops = CHEAP(v)};
    uint32_t call = tape_begin_call(t, p->self, x);
    uint32_t h = run_attention(t, p, run_part(t, p->norm1, &norm, x));

    x = tape_run_sum(t, x, h, v);
    h = run_mlp(t, p, run_part(t, p->norm2, &norm, x));
    x = tape_run_sum(t, x, h, v);
    tape_end_call(t, call);
    return x;
}

msc_graph *synth_blocks(msc_context *ctx, uint32_t count, unsigned detail)
{
    const layer embed = {.name = "embedding",
                         .in_bytes = 8 * TOKENS,
                         .out_bytes = VALUE_BYTES,
                         .save_in = 1,
                         .parameter_bytes = 8 << 20,
                         .flops = 1};
    const layer head = {.name = "loss",
                        .in_bytes = VALUE_BYTES,
                        .out_bytes = VALUE_BYTES / 8,
                        .save_in = 1,
                        .save_out = 1,
                        .end_in = 1,
                        .flops = PRODUCT(WIDTH, WIDTH)};
    tape *t = tape_start(ctx);
    uint32_t root;
    uint32_t list;
    uint32_t call;
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    root = tape_add_root(t, 0);
    list = tape_add_module(t, "blocks", root, 0, 0);
    x = tape_add_resident(t, 8 * TOKENS, MSC_CATEGORY_INPUT);
    call = tape_begin_call(t, root, x);
    x = run_part(t, MSC_NONE, &embed, x);
    for (i = 0; i < count; i++) {
        parts p = add_parts(t, i, list, detail);
        x = run_block(t, &p, x);
    }
    x = run_part(t, MSC_NONE, &head, x);
    tape_end_call(t, call);
    return tape_finish(t, x);
}

/* ---- chains ---------------------------------------------------------------------------------------- */

#define KIB 1024u

/* Sizes that look random, between 1/4 and 4 MiB. */
static uint64_t size_at(uint32_t index, unsigned kind)
{
    uint32_t mixed = (index + 1) * 2654435761u;

    return (kind & SYNTH_UNEQUAL) == 0 ? 1024 * KIB : (256 + (mixed >> 20)) * (uint64_t)KIB;
}

/* Even layers multiply, odd ones are element-wise. */
static layer layer_at(uint32_t index, unsigned kind)
{
    uint64_t in_bytes = size_at(index / 2, kind);
    uint64_t out_bytes = index % 2 == 0 ? size_at(index / 2 + 1, kind) : size_at((index + 1) / 2, kind);
    const layer product = {.name = "addmm",
                           .in_bytes = in_bytes,
                           .out_bytes = out_bytes,
                           .save_in = 1,
                           .end_in = 1,
                           .parameter_bytes = 64 * KIB,
                           .flops = 200 * (in_bytes + out_bytes)};
    layer relu = {.name = "relu",
                  .in_bytes = out_bytes,
                  .out_bytes = out_bytes,
                  .save_out = 1,
                  .end_in = 1,
                  .flops = CHEAP(out_bytes)};

    if ((kind & SYNTH_IN_PLACE) != 0) {
        relu.name = "relu_";
        relu.in_place = 1;
    }
    return index % 2 == 0 ? product : relu;
}

msc_graph *synth_sequence(msc_context *ctx, uint32_t count, unsigned kind)
{
    tape *t = tape_start(ctx);
    uint32_t root;
    uint32_t call;
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    root = tape_add_root(t, MSC_MODULE_CHAIN);
    x = tape_add_resident(t, size_at(0, kind), MSC_CATEGORY_INPUT);
    call = tape_begin_call(t, root, x);
    for (i = 0; i < count; i++) {
        layer l = layer_at(i, kind);
        char path[16];
        snprintf(path, sizeof path, "%u", i);
        l.end_in = i > 0;
        x = tape_call_layer(t, tape_add_module(t, path, root, (kind & SYNTH_UNEQUAL) != 0 ? 0 : 1 + i % 2, 0),
                            &l, x);
    }
    tape_end_call(t, call);
    return tape_finish(t, x);
}

/* ---- depth, and what does not train ---------------------------------------------------------------- */

msc_graph *synth_deep(msc_context *ctx, uint32_t depth)
{
    const layer relu = {
        .name = "relu", .in_bytes = 4 * KIB, .out_bytes = 4 * KIB, .save_out = 1, .end_in = 1};
    tape *t = tape_start(ctx);
    uint32_t module = MSC_NONE;
    uint32_t first = MSC_NONE;
    uint32_t call = 0;
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    tape_add_op(t, "load", 4 * KIB, 0);
    x = tape_add_buffer(t, 4 * KIB, MSC_CATEGORY_INPUT);
    for (i = 0; i < depth; i++) {
        char path[16];
        snprintf(path, sizeof path, "m%u", i);
        module = tape_add_module(t, path, module, 0, 0);
        call = tape_begin_call(t, module, x);
        if (i == 0)
            first = call;
        x = tape_run_layer(t, &relu, x, 0);
    }
    for (i = depth; i-- > 0;)
        tape_end_call(t, first + i);
    return tape_finish(t, x);
}

msc_graph *synth_frozen(msc_context *ctx, uint32_t count)
{
    tape *t = tape_start(ctx);
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    x = tape_add_resident(t, 1024 * KIB, MSC_CATEGORY_INPUT);
    for (i = 0; i < count; i++) {
        layer l = layer_at(i, 0);
        char path[16];
        snprintf(path, sizeof path, "%u", i);
        l.no_backward = 1;
        l.save_in = l.save_out = 0;
        l.end_in = i > 0;
        x = tape_call_layer(t, tape_add_module(t, path, MSC_NONE, 0, 0), &l, x);
    }
    tape_end_buffer(t, x);
    tape_check(t, msc_graph_finish(t->graph, NULL));
    if (t->failed) {
        msc_graph_destroy(t->graph);
        return NULL;
    }
    return t->graph;
}

/* ---- blocks that differ, blocks that are shared ----------------------------------------------------- */

/* A product, an activation that saves its input, a product: what is between them can be dropped. */
static uint32_t run_odd_block(tape *t, uint32_t module, uint32_t x, uint64_t in_bytes, const uint32_t *draw)
{
    uint64_t inner = (64 + draw[0] % 4000) * (uint64_t)KIB;
    uint64_t out = (64 + draw[1] % 2000) * (uint64_t)KIB;
    const layer up = {.name = "addmm",
                      .in_bytes = in_bytes,
                      .out_bytes = inner,
                      .save_in = 1,
                      .end_in = 1,
                      .parameter_bytes = 64 * KIB,
                      .flops = (20 + draw[2] % 1000) * (in_bytes + inner)};
    const layer gelu = {.name = "gelu",
                        .in_bytes = inner,
                        .out_bytes = inner,
                        .save_in = 1,
                        .end_in = 1,
                        .flops = CHEAP(inner)};
    const layer down = {.name = "addmm",
                        .in_bytes = inner,
                        .out_bytes = out,
                        .save_in = 1,
                        .end_in = 1,
                        .parameter_bytes = 64 * KIB,
                        .flops = (20 + draw[3] % 1000) * (out + inner)};
    uint32_t call = tape_begin_call(t, module, x);

    x = tape_run_layer(t, &up, x, 0);
    x = tape_run_layer(t, &gelu, x, 0);
    x = tape_run_layer(t, &down, x, 0);
    tape_end_call(t, call);
    return x;
}

/* The next pseudo-random numbers. */
static void draw_four(uint32_t *state, uint32_t *draw)
{
    int i;

    for (i = 0; i < 4; i++) {
        *state = *state * 1664525u + 1013904223u;
        draw[i] = *state >> 8;
    }
}

msc_graph *synth_unequal(msc_context *ctx, uint32_t count, uint32_t seed)
{
    tape *t = tape_start(ctx);
    uint64_t bytes = 512 * KIB;
    uint32_t draw[4];
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    tape_add_parameter(t, 64 * KIB); /* the one that every product saves */
    tape_add_op(t, "load", bytes, 0);
    x = tape_add_buffer(t, bytes, MSC_CATEGORY_INPUT);
    for (i = 0; i < count; i++) {
        char path[16];
        snprintf(path, sizeof path, "block%u", i);
        draw_four(&seed, draw);
        x = run_odd_block(t, tape_add_module(t, path, MSC_NONE, 0, 0), x, bytes, draw);
        bytes = (64 + draw[1] % 2000) * (uint64_t)KIB;
    }
    return tape_finish(t, x);
}

msc_graph *synth_tied(msc_context *ctx, uint32_t rounds)
{
    const uint32_t draws[3][4] = {{900, 400, 50, 800}, {2000, 400, 600, 30}, {300, 400, 90, 90}};
    const uint64_t bytes = (64 + 400) * (uint64_t)KIB;
    tape *t = tape_start(ctx);
    uint32_t modules[3];
    uint32_t x;
    uint32_t i;

    if (t == NULL)
        return NULL;
    tape_add_parameter(t, 64 * KIB);
    for (i = 0; i < 3; i++) {
        static const char *const paths[] = {"first", "second", "third"};
        modules[i] = tape_add_module(t, paths[i], MSC_NONE, 0, 64);
    }
    tape_add_op(t, "load", bytes, 0);
    x = tape_add_buffer(t, bytes, MSC_CATEGORY_INPUT);
    for (i = 0; i < rounds; i++) {
        char path[16];
        uint32_t outer;
        uint32_t call;
        snprintf(path, sizeof path, "round%u", i);
        outer = tape_add_module(t, path, MSC_NONE, 30 + i % 2, 0);
        call = tape_begin_call(t, outer, x);
        x = run_odd_block(t, modules[i % 2], x, bytes, draws[i % 2]);
        x = run_odd_block(t, modules[2], x, bytes, draws[2]);
        tape_end_call(t, call);
    }
    return tape_finish(t, x);
}
