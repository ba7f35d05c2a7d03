/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes become a valid graph: they are read as commands to the builders, and a command that the builders
 * refuse changes nothing. When the bytes run out, zeros follow for the few decisions that are left.
 */
#include "synth.h"

#include <stdio.h>

#define MOST_OPS 160u
#define MOST_DEPTH 5u

typedef struct source {
    const uint8_t *at;
    size_t left;
    msc_graph *graph;
    uint32_t module_count;
    uint32_t buffer_count;
    uint32_t save_count;
    uint32_t op_count;
    uint32_t depth;
    uint32_t calls[MOST_DEPTH];
    uint32_t free_modules; /* the first modules: called by anyone, the others by chains, once */
    uint32_t next_module;  /* of the others */
    int failed;
} source;

static uint32_t next(source *s)
{
    if (s->left == 0)
        return 0;
    s->left--;
    return *s->at++;
}

static uint32_t below(source *s, uint32_t limit)
{
    return limit == 0 ? 0 : next(s) % limit;
}

/* Refusals are part of the game, lack of memory is not. */
static int accepted(source *s, msc_status status)
{
    s->failed |= status == MSC_ENOMEM;
    return status == MSC_OK;
}

/* Recent ids are likelier. */
static uint32_t pick(source *s, uint32_t count)
{
    uint32_t back = below(s, 4) == 0 ? below(s, count) : below(s, count < 6 ? count : 6);
    return count == 0 ? 0 : count - 1 - back;
}

static uint64_t pick_bytes(source *s)
{
    uint32_t byte = next(s);
    return byte % 16 == 0 ? 0 : (uint64_t)byte << (byte % 5 * 3);
}

static void add_modules(source *s)
{
    uint32_t count = 1 + below(s, 19);
    uint32_t i;

    for (i = 0; i < count; i++) {
        char path[16];
        uint32_t byte = next(s);
        msc_module module = {.parent = byte % 3 == 0 || i == 0 ? MSC_NONE : byte % i,
                             .flags = byte > 245     ? 1u << byte % 5
                                      : byte % 4 < 3 ? MSC_MODULE_CHAIN
                                                     : 0,
                             .structure = byte % 4,
                             .state_bytes = byte % 7 == 0 ? byte : 0};
        snprintf(path, sizeof path, "m%u", i);
        s->module_count +=
            (uint32_t)accepted(s, msc_graph_add_module(s->graph, path, "T", &module, NULL, NULL));
    }
}

static void divide_modules(source *s)
{
    s->free_modules = s->module_count > 4 ? s->module_count / 3 : s->module_count;
    s->next_module = s->free_modules;
}

static void add_residents(source *s)
{
    static const msc_category categories[] = {MSC_CATEGORY_PARAMETER, MSC_CATEGORY_BUFFER,
                                              MSC_CATEGORY_INPUT};
    uint32_t count = below(s, 4);
    uint32_t i;

    for (i = 0; i < count; i++)
        s->buffer_count += (uint32_t)accepted(
            s, msc_graph_add_resident(s->graph, pick_bytes(s), categories[i % 3], NULL, NULL));
}

static void begin_call(source *s)
{
    uint32_t inputs = below(s, 3);
    uint32_t i;

    if (s->depth == MOST_DEPTH || s->module_count == 0)
        return;
    if (!accepted(s, msc_graph_begin_call(s->graph, below(s, s->free_modules), &s->calls[s->depth], NULL)))
        return;
    for (i = 0; i < inputs && s->buffer_count > 0; i++)
        accepted(s, msc_graph_add_input(s->graph, s->calls[s->depth], pick(s, s->buffer_count), NULL));
    s->depth++;
}

static void end_call(source *s)
{
    if (s->depth > 0 && accepted(s, msc_graph_end_call(s->graph, s->calls[s->depth - 1], NULL)))
        s->depth--;
}

/* Kinds of operations: most are plain, some draw random numbers, some are casts. */
static const char *op_name(uint32_t byte)
{
    return byte % 9 == 8 ? "_to_copy" : byte % 2 == 0 ? "op" : "other";
}

static void add_op(source *s)
{
    static const msc_category categories[] = {MSC_CATEGORY_ACTIVATION, MSC_CATEGORY_TEMPORARY,
                                              MSC_CATEGORY_GRADIENT, MSC_CATEGORY_PARAMETER};
    uint32_t byte = next(s);
    msc_op op = {.flops = (uint64_t)byte << byte % 20,
                 .moved_bytes = (uint64_t)byte << byte % 11,
                 .flags = byte % 10 == 9 ? MSC_OP_RANDOM : 0,
                 .scratch_bytes = byte % 5 == 0 ? pick_bytes(s) : 0};
    uint32_t outputs = (byte >> 4) % 3;
    uint32_t i;

    if (s->op_count == MOST_OPS || !accepted(s, msc_graph_add_op(s->graph, op_name(byte), &op, NULL, NULL)))
        return;
    s->op_count++;
    for (i = 0; i < outputs; i++)
        s->buffer_count += (uint32_t)accepted(
            s, msc_graph_add_buffer(s->graph, pick_bytes(s), categories[byte % 4], NULL, NULL));
}

static void add_save(source *s)
{
    if (s->buffer_count > 0)
        s->save_count +=
            (uint32_t)accepted(s, msc_graph_add_save(s->graph, pick(s, s->buffer_count), NULL, NULL));
}

/* What layers mostly do: save what they made and let go of what they used. */
static void add_layer(source *s)
{
    uint32_t before = s->buffer_count;
    uint32_t byte = next(s);

    add_op(s);
    if (before < s->buffer_count && byte % 4 != 0)
        s->save_count += (uint32_t)accepted(s, msc_graph_add_save(s->graph, s->buffer_count - 1, NULL, NULL));
    if (before > 0 && byte % 8 != 1)
        accepted(s, msc_graph_end_buffer(s->graph, before - 1, NULL));
}

/* What a block does at one of its layers follows from its module alone. */
static void add_block_layer(source *s, uint32_t module, uint32_t layer)
{
    uint32_t byte = (module * 5 + layer * 7 + 1) * 37 % 251;
    uint64_t bytes = (uint64_t)(byte + 1) << byte % 5 * 2;
    const msc_op op = {.flops = (uint64_t)(byte + 1) << byte % 3 * 9,
                       .flags = byte % 10 == 9 ? MSC_OP_RANDOM : 0};

    accepted(s, msc_graph_add_op(s->graph, op_name(byte), &op, NULL, NULL));
    s->op_count++;
    s->buffer_count +=
        (uint32_t)accepted(s, msc_graph_add_buffer(s->graph, bytes, MSC_CATEGORY_ACTIVATION, NULL, NULL));
    if (byte % 4 != 0)
        s->save_count += (uint32_t)accepted(s, msc_graph_add_save(s->graph, s->buffer_count - 1, NULL, NULL));
    if (layer > 0)
        accepted(s, msc_graph_end_buffer(s->graph, s->buffer_count - 2, NULL));
}

/* A module that does the same whenever it is called, on the value made last. */
static void add_block(source *s, uint32_t module)
{
    uint32_t layers = 2 + module % 4;
    uint32_t depth = s->depth;
    uint32_t i;

    if (depth == MOST_DEPTH || s->buffer_count == 0 || s->op_count + layers > MOST_OPS ||
        !accepted(s, msc_graph_begin_call(s->graph, module, &s->calls[depth], NULL)))
        return;
    accepted(s, msc_graph_add_input(s->graph, s->calls[depth], s->buffer_count - 1, NULL));
    s->depth++;
    for (i = 0; i < layers; i++)
        add_block_layer(s, module, i);
    end_call(s);
}

/* Modules that have not been called as blocks yet, one after another inside the next one: a chain, if that is
 * flagged as one. */
static void add_chain(source *s)
{
    uint32_t count = 2 + below(s, 4);
    uint32_t depth = s->depth;
    uint32_t i;

    if (depth == MOST_DEPTH || s->buffer_count == 0 || s->next_module + count + 1 > s->module_count ||
        !accepted(s, msc_graph_begin_call(s->graph, s->next_module, &s->calls[depth], NULL)))
        return;
    s->next_module++;
    accepted(s, msc_graph_add_input(s->graph, s->calls[depth], s->buffer_count - 1, NULL));
    s->depth++;
    for (i = 0; i < count; i++)
        add_block(s, s->next_module++);
    end_call(s);
}

static void run_forward(source *s)
{
    size_t keep = s->left / 3;

    while (s->left > keep && s->op_count < MOST_OPS) {
        switch (next(s) % 17) {
        case 0:
        case 1:
            begin_call(s);
            break;
        case 2:
        case 3:
            end_call(s);
            break;
        case 4:
            add_op(s);
            break;
        case 5:
        case 6:
        case 7:
            add_layer(s);
            break;
        case 8:
        case 9:
        case 10:
            add_save(s);
            break;
        case 13:
            if (s->module_count > 0)
                add_block(s, below(s, s->free_modules));
            break;
        case 14:
        case 15:
            add_chain(s);
            break;
        case 11:
        case 12:
            if (s->buffer_count > 0)
                accepted(s, msc_graph_end_buffer(s->graph, pick(s, s->buffer_count), NULL));
            break;
        default:
            if (s->buffer_count > 0 && below(s, 4) == 0)
                accepted(s, msc_graph_add_write(s->graph, pick(s, s->buffer_count), NULL));
            else if (s->save_count > 0 && below(s, 8) == 0)
                accepted(s, msc_graph_release(s->graph, pick(s, s->save_count), NULL));
            break;
        }
    }
    while (s->depth > 0)
        end_call(s);
}

static void run_backward(source *s)
{
    uint32_t save;

    accepted(s, msc_graph_set_phase(s->graph, MSC_PHASE_BACKWARD, NULL));
    for (save = s->save_count; save-- > 0;) {
        uint32_t byte = next(s);
        if (byte % 11 == 10)
            continue; /* never used, never released */
        if (byte % 13 != 12)
            accepted(s, msc_graph_unpack(s->graph, save, NULL));
        if (byte % 3 != 0)
            add_op(s);
        if (byte % 17 != 16)
            accepted(s, msc_graph_release(s->graph, save, NULL));
        if (byte % 5 == 4 && s->buffer_count > 0)
            accepted(s, msc_graph_end_buffer(s->graph, pick(s, s->buffer_count), NULL));
        if (byte == 200)
            begin_call(s);
    }
    accepted(s, msc_graph_set_phase(s->graph, MSC_PHASE_OPTIMIZER, NULL));
    add_op(s);
}

msc_graph *synth_bytes(msc_context *ctx, const uint8_t *bytes, size_t count)
{
    source s = {.at = bytes, .left = count};

    if (msc_graph_create(ctx, &s.graph, NULL) != MSC_OK)
        return NULL;
    add_modules(&s);
    divide_modules(&s);
    add_residents(&s);
    run_forward(&s);
    run_backward(&s);
    if (s.failed || msc_graph_finish(s.graph, NULL) != MSC_OK) {
        msc_graph_destroy(s.graph);
        return NULL;
    }
    return s.graph;
}
