/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tape: plays autograd through the public builders of a graph. Each layer notes its saves, backward plays
 * the notes in reverse. Values are buffers; a layer ends its input when told that nobody else needs it.
 */
#include "synth_tape.h"

#include <string.h>

#define FLOPS_PER_BYTE 50

static tape the_tape; /* too large for the stack */

void tape_check(tape *t, msc_status status)
{
    if (status != MSC_OK)
        t->failed = 1;
}

tape *tape_start(msc_context *ctx)
{
    the_tape.graph = NULL;
    the_tape.failed = 0;
    the_tape.node_count = the_tape.parameter_count = the_tape.gradient_count = 0;
    tape_check(&the_tape, msc_graph_create(ctx, &the_tape.graph, NULL));
    return the_tape.graph == NULL ? NULL : &the_tape;
}

uint32_t tape_add_op(tape *t, const char *name, uint64_t bytes, uint64_t scratch_bytes)
{
    msc_op op = {.flops = bytes * FLOPS_PER_BYTE, .moved_bytes = 3 * bytes, .scratch_bytes = scratch_bytes};
    uint32_t id = 0;

    tape_check(t, msc_graph_add_op(t->graph, name, &op, &id, NULL));
    return id;
}

uint32_t tape_add_buffer(tape *t, uint64_t bytes, msc_category category)
{
    uint32_t id = 0;

    tape_check(t, msc_graph_add_buffer(t->graph, bytes, category, &id, NULL));
    return id;
}

uint32_t tape_add_resident(tape *t, uint64_t bytes, msc_category category)
{
    uint32_t id = 0;

    tape_check(t, msc_graph_add_resident(t->graph, bytes, category, &id, NULL));
    return id;
}

uint32_t tape_add_parameter(tape *t, uint64_t bytes)
{
    uint32_t id = tape_add_resident(t, bytes, MSC_CATEGORY_PARAMETER);

    tape_add_resident(t, 2 * bytes, MSC_CATEGORY_OPTIMIZER_STATE);
    t->parameters[t->parameter_count++] = id;
    return id;
}

uint32_t tape_add_module(tape *t, const char *path, uint32_t parent, uint64_t structure, uint64_t state_bytes)
{
    msc_module module = {.parent = parent, .structure = structure, .state_bytes = state_bytes};
    uint32_t id = 0;

    tape_check(t, msc_graph_add_module(t->graph, path, "Module", &module, &id, NULL));
    return id;
}

uint32_t tape_add_root(tape *t, uint32_t flags)
{
    uint32_t root = tape_add_module(t, "", MSC_NONE, 0, 0);

    tape_check(t, msc_graph_mark_module(t->graph, root, MSC_MODULE_ROOT | flags, 0, NULL));
    return root;
}

uint32_t tape_begin_call(tape *t, uint32_t module, uint32_t input)
{
    uint32_t call = 0;

    tape_check(t, msc_graph_begin_call(t->graph, module, &call, NULL));
    tape_check(t, msc_graph_add_input(t->graph, call, input, NULL));
    return call;
}

void tape_end_call(tape *t, uint32_t call)
{
    tape_check(t, msc_graph_end_call(t->graph, call, NULL));
}

void tape_end_buffer(tape *t, uint32_t buffer)
{
    tape_check(t, msc_graph_end_buffer(t->graph, buffer, NULL));
}

static void save(tape *t, node *n, uint32_t buffer)
{
    tape_check(t, msc_graph_add_save(t->graph, buffer, &n->saves[n->save_count++], NULL));
}

static void add_small_ops(tape *t, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        tape_add_op(t, "view", 64, 0);
}

/* What the layer saves before it runs. */
static void save_before(tape *t, node *n, const layer *l, uint32_t in, uint32_t parameter)
{
    if (l->save_in)
        save(t, n, in);
    if (l->parameter_bytes > 0 && !l->no_backward)
        save(t, n, parameter);
}

static void run_operation(tape *t, const layer *l)
{
    uint64_t bytes = l->in_bytes + l->out_bytes;
    const msc_op op = {.flops = l->flops > 0 ? l->flops : bytes * FLOPS_PER_BYTE,
                       .moved_bytes = 3 * bytes,
                       .flags = l->flags,
                       .scratch_bytes = l->out_bytes / 8};

    tape_check(t, msc_graph_add_op(t->graph, l->name, &op, NULL, NULL));
}

uint32_t tape_run_layer(tape *t, const layer *l, uint32_t in, uint32_t parameter)
{
    node unused;
    node *n = l->no_backward || t->node_count == TAPE_MOST_NODES ? &unused : &t->nodes[t->node_count++];
    uint32_t out = in;

    memset(n, 0, sizeof *n);
    n->in_bytes = l->in_bytes;
    n->parameter_bytes = l->frozen ? 0 : l->parameter_bytes;
    n->flops = l->flops;
    n->small_ops = l->small_ops;
    add_small_ops(t, l->small_ops);
    save_before(t, n, l, in, parameter);
    run_operation(t, l);
    if (l->in_place)
        tape_check(t, msc_graph_add_write(t->graph, in, NULL));
    else
        out = tape_add_buffer(t, l->out_bytes, MSC_CATEGORY_ACTIVATION);
    if (l->save_extra) {
        uint32_t extra = tape_add_buffer(t, l->out_bytes / 4 + 1, MSC_CATEGORY_ACTIVATION);
        save(t, n, extra);
        tape_end_buffer(t, extra);
    }
    if (l->save_out)
        save(t, n, out);
    if (l->end_in && !l->in_place)
        tape_end_buffer(t, in);
    return out;
}

uint32_t tape_run_sum(tape *t, uint32_t a, uint32_t b, uint64_t bytes)
{
    uint32_t out;

    tape_add_op(t, "add", 2 * bytes, 0);
    out = tape_add_buffer(t, bytes, MSC_CATEGORY_ACTIVATION);
    tape_end_buffer(t, a);
    tape_end_buffer(t, b);
    return out;
}

/* A layer that is a module of its own. */
uint32_t tape_call_layer(tape *t, uint32_t module, const layer *l, uint32_t in)
{
    uint32_t parameter = l->parameter_bytes > 0 ? tape_add_parameter(t, l->parameter_bytes) : 0;
    uint32_t call = tape_begin_call(t, module, in);
    uint32_t out = tape_run_layer(t, l, in, parameter);

    tape_end_call(t, call);
    return out;
}

/* An operation of backward over a layer's input. */
static void add_backward(tape *t, const node *n, const char *name, uint64_t bytes, uint64_t scratch_bytes)
{
    const msc_op op = {.flops = n->flops > 0 ? n->flops : bytes * FLOPS_PER_BYTE,
                       .moved_bytes = 3 * bytes,
                       .scratch_bytes = scratch_bytes};

    tape_check(t, msc_graph_add_op(t->graph, name, &op, NULL, NULL));
}

static uint32_t run_node_backward(tape *t, const node *n, uint32_t gradient)
{
    uint32_t next;
    uint32_t i;

    for (i = 0; i < n->save_count; i++)
        tape_check(t, msc_graph_unpack(t->graph, n->saves[i], NULL));
    add_small_ops(t, n->small_ops);
    add_backward(t, n, "backward", 2 * n->in_bytes, n->in_bytes / 8);
    next = tape_add_buffer(t, n->in_bytes, MSC_CATEGORY_TEMPORARY);
    if (n->parameter_bytes > 0) {
        add_backward(t, n, "weight_gradient", n->in_bytes, 0);
        t->gradients[t->gradient_count++] = tape_add_buffer(t, n->parameter_bytes, MSC_CATEGORY_GRADIENT);
    }
    tape_end_buffer(t, gradient);
    for (i = 0; i < n->save_count; i++)
        tape_check(t, msc_graph_release(t->graph, n->saves[i], NULL));
    return next;
}

static void run_optimizer(tape *t)
{
    uint32_t i;

    tape_check(t, msc_graph_set_phase(t->graph, MSC_PHASE_OPTIMIZER, NULL));
    for (i = 0; i < t->parameter_count; i++) {
        tape_add_op(t, "moments", 64, 0);
        tape_add_op(t, "update", 64, 0);
        tape_check(t, msc_graph_add_write(t->graph, t->parameters[i], NULL));
    }
}

/* Backward from the last value, optimizer, finish. */
msc_graph *tape_finish(tape *t, uint32_t last)
{
    uint32_t gradient;
    uint32_t i;

    tape_check(t, msc_graph_set_phase(t->graph, MSC_PHASE_BACKWARD, NULL));
    tape_add_op(t, "loss_gradient", 64, 0);
    gradient = tape_add_buffer(t, 64, MSC_CATEGORY_TEMPORARY);
    tape_end_buffer(t, last);
    for (i = t->node_count; i-- > 0;)
        gradient = run_node_backward(t, &t->nodes[i], gradient);
    tape_end_buffer(t, gradient);
    run_optimizer(t);
    tape_check(t, msc_graph_finish(t->graph, NULL));
    if (t->failed) {
        msc_graph_destroy(t->graph);
        return NULL;
    }
    return t->graph;
}
