/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streaming builders of the memory graph.
 *
 * The tracer reports what happens, in program order, and never a position: the position is always the
 * number of operations so far. That makes most mistakes impossible to express, and the rest are refused
 * here, record by record, with the graph left as it was.
 *
 *      add_op  add_op  begin_call  add_op  add_save  end_buffer
 *      |  0   |   1   |           |  2   | at 3     at 3
 *
 * Every builder follows one pattern: check the arguments, make room in every array and table that will
 * grow, then change. Nothing can fail after the first change. A string that was interned for a record
 * that then could not be added stays in the pool; it is not part of the graph, since neither the records
 * nor the text refer to it.
 *
 * Until they are known, the end of a buffer and the unpack and release of a save are MSC_NONE; finish
 * replaces them. Every builder is amortised O(1), apart from the length of strings.
 */
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "graph/graph_internal.h"

#define MIX_64 0x9e3779b97f4a7c15u /* 2^64 / golden ratio: spreads consecutive keys */

static msc_status require_open(const msc_graph *graph, const char *action, msc_error *err)
{
    if (graph->finished)
        return msc__fail(err, MSC_ESTATE, "cannot %s: the graph is finished", action);
    return MSC_OK;
}

static msc_status require_index(uint32_t index, uint32_t count, const char *what, msc_error *err)
{
    if (index >= count)
        return msc__fail(err, MSC_EINVAL, "there is no %s %u, only %u", what, index, count);
    return MSC_OK;
}

/* Most builders need an open graph and one known id. */
static msc_status require(const msc_graph *graph, msc__graph_record record, uint32_t index, msc_error *err)
{
    msc_status status = require_open(graph, "change it", err);

    if (status != MSC_OK)
        return status;
    return require_index(index, msc__graph_record_count(graph, record), msc__graph_record_word(record), err);
}

static void store(uint32_t *out, uint32_t id)
{
    if (out != NULL)
        *out = id;
}

static msc_status intern_text(msc_graph *graph, const char *string, uint32_t *out, msc_error *err)
{
    if (string == NULL)
        return msc__fail(err, MSC_EINVAL, "a name is NULL");
    return msc__graph_intern(graph, string, strlen(string), out, err);
}

/* ---- modules and calls --------------------------------------------------------------------------- */

msc_status msc_graph_add_module(msc_graph *graph, const char *path, const char *type, const msc_module *desc,
                                uint32_t *out, msc_error *err)
{
    msc_module module;
    msc_status status = require_open(graph, "add a module", err);

    if (status != MSC_OK)
        return status;
    if (desc == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot add a module: desc is NULL");
    module = *desc;
    if (module.parent != MSC_NONE && module.parent >= graph->modules.count)
        return msc__fail(err, MSC_EINVAL, "cannot add a module: its parent %u is unknown", module.parent);
    if ((module.flags & ~MSC__GRAPH_MODULE_FLAGS) != 0)
        return msc__fail(err, MSC_EINVAL, "cannot add a module: unknown flags in %u", module.flags);
    status = msc__array_reserve(graph->ctx, &graph->modules, sizeof module, 1, err);
    if (status == MSC_OK)
        status = intern_text(graph, path, &module.path, err);
    if (status == MSC_OK)
        status = intern_text(graph, type, &module.type, err);
    if (status != MSC_OK)
        return status;
    store(out, graph->modules.count);
    return msc__array_push(graph->ctx, &graph->modules, sizeof module, &module, err);
}

msc_status msc_graph_mark_module(msc_graph *graph, uint32_t module, uint32_t flags, uint64_t state_bytes,
                                 msc_error *err)
{
    msc_module *marked = graph->modules.items;
    uint64_t sum;
    msc_status status = require(graph, MSC__GRAPH_MODULE, module, err);

    if (status != MSC_OK)
        return status;
    marked += module;
    if ((flags & ~MSC__GRAPH_MODULE_FLAGS) != 0)
        return msc__fail(err, MSC_EINVAL, "cannot mark module %u: unknown flags in %u", module, flags);
    if (!msc__add_u64(marked->state_bytes, state_bytes, &sum))
        return msc__fail(err, MSC_EINVAL, "cannot mark module %u: its state exceeds 64 bits", module);
    marked->flags |= flags;
    marked->state_bytes = sum;
    return MSC_OK;
}

msc_status msc_graph_set_phase(msc_graph *graph, msc_phase phase, msc_error *err)
{
    msc_status status = require_open(graph, "set the phase", err);

    if (status != MSC_OK)
        return status;
    if ((unsigned)phase >= MSC_PHASE_COUNT)
        return msc__fail(err, MSC_EINVAL, "there is no phase %u", (unsigned)phase);
    if ((unsigned)phase < graph->phase)
        return msc__fail(err, MSC_EINVAL, "phase %u cannot follow phase %u", (unsigned)phase, graph->phase);
    graph->phase = (uint8_t)phase;
    return MSC_OK;
}

msc_status msc_graph_begin_call(msc_graph *graph, uint32_t module, uint32_t *out, msc_error *err)
{
    msc_call call = {
        .module = module, .parent = graph->open_call, .begin = graph->ops.count, .end = MSC_NONE};
    msc_status status = require(graph, MSC__GRAPH_MODULE, module, err);

    if (status == MSC_OK)
        status = msc__array_push(graph->ctx, &graph->calls, sizeof call, &call, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(call.parent == MSC_NONE || call.parent + 1 < graph->calls.count);
    graph->open_call = graph->calls.count - 1;
    store(out, graph->open_call);
    return MSC_OK;
}

msc_status msc_graph_end_call(msc_graph *graph, uint32_t call, msc_error *err)
{
    msc_call *left = graph->calls.items;
    msc_status status = require(graph, MSC__GRAPH_CALL, call, err);

    if (status != MSC_OK)
        return status;
    if (call != graph->open_call)
        return msc__fail(err, MSC_EINVAL, "cannot end call %u: it is not the innermost open one", call);
    left += call;
    MSC__ASSERT(left->end == MSC_NONE && left->begin <= graph->ops.count);
    left->end = graph->ops.count;
    graph->open_call = left->parent;
    return MSC_OK;
}

static uint32_t hash_input(msc_input input)
{
    return (uint32_t)((((uint64_t)input.call << 32 | input.buffer) * MIX_64) >> 32);
}

msc_status msc__graph_push_input(msc_graph *graph, msc_input input, bool *added, msc_error *err)
{
    uint32_t hash = hash_input(input);
    uint32_t probe = hash;
    uint32_t found;
    msc_status status;

    *added = false;
    while ((found = msc__hash_index_next(&graph->input_table, hash, &probe)) != MSC_NONE) {
        const msc_input *known = (const msc_input *)graph->inputs.items + found;
        if (known->call == input.call && known->buffer == input.buffer)
            return MSC_OK;
    }
    status = msc__hash_index_reserve(graph->ctx, &graph->input_table, "inputs", err);
    if (status == MSC_OK)
        status = msc__array_push(graph->ctx, &graph->inputs, sizeof input, &input, err);
    if (status != MSC_OK)
        return status;
    msc__hash_index_insert(&graph->input_table, hash, graph->inputs.count - 1);
    *added = true;
    return MSC_OK;
}

msc_status msc_graph_add_input(msc_graph *graph, uint32_t call, uint32_t buffer, msc_error *err)
{
    const msc_call *calls = graph->calls.items;
    bool added;
    msc_status status = require(graph, MSC__GRAPH_CALL, call, err);

    if (status == MSC_OK)
        status = require(graph, MSC__GRAPH_BUFFER, buffer, err);
    if (status != MSC_OK)
        return status;
    if (calls[call].end != MSC_NONE)
        return msc__fail(err, MSC_EINVAL, "cannot add an input to call %u: it has ended", call);
    return msc__graph_push_input(graph, (msc_input){.call = call, .buffer = buffer}, &added, err);
}

/* ---- operations, buffers, saves ------------------------------------------------------------------ */

msc_status msc_graph_add_op(msc_graph *graph, const char *name, const msc_op *desc, uint32_t *out,
                            msc_error *err)
{
    msc_op op;
    msc_status status = require_open(graph, "add an operation", err);

    if (status != MSC_OK)
        return status;
    if (desc == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot add an operation: desc is NULL");
    op = *desc;
    if ((op.flags & ~MSC__GRAPH_OP_FLAGS) != 0)
        return msc__fail(err, MSC_EINVAL, "cannot add an operation: unknown flags in %u", op.flags);
    if (op.work >= MSC_WORK_COUNT)
        return msc__fail(err, MSC_EINVAL, "cannot add an operation: there is no class of work %u", op.work);
    status = msc__array_reserve(graph->ctx, &graph->ops, sizeof op, 1, err);
    if (status == MSC_OK)
        status = intern_text(graph, name, &op.name, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(graph->open_call == MSC_NONE || graph->open_call < graph->calls.count);
    op.call = graph->open_call;
    op.phase = graph->phase;
    op.pad = 0;
    op.pad2 = 0;
    store(out, graph->ops.count);
    return msc__array_push(graph->ctx, &graph->ops, sizeof op, &op, err);
}

/* Whether a buffer of `size_bytes` may stand beside buffers of `others` bytes. */
static msc_status require_room(uint64_t others, uint64_t size_bytes, msc_error *err)
{
    MSC__ASSERT(others <= MSC__GRAPH_MOST_BUFFER_BYTES);
    if (size_bytes > MSC__GRAPH_MOST_BUFFER_BYTES - others)
        return msc__fail(err, MSC_EOVERFLOW, "cannot add a buffer of %llu bytes: all would exceed 2^62 bytes",
                         (unsigned long long)size_bytes);
    return MSC_OK;
}

static msc_status push_buffer(msc_graph *graph, const msc_buffer *buffer, uint32_t *out, msc_error *err)
{
    msc_status status = require_open(graph, "add a buffer", err);

    if (status != MSC_OK)
        return status;
    if (buffer->category >= MSC_CATEGORY_COUNT)
        return msc__fail(err, MSC_EINVAL, "there is no such category of buffers");
    status = require_room(graph->buffer_bytes, buffer->size_bytes, err);
    if (status != MSC_OK)
        return status;
    status = msc__array_push(graph->ctx, &graph->buffers, sizeof *buffer, buffer, err);
    if (status != MSC_OK)
        return status;
    graph->buffer_bytes += buffer->size_bytes;
    MSC__ASSERT(graph->buffer_bytes <= MSC__GRAPH_MOST_BUFFER_BYTES);
    store(out, graph->buffers.count - 1);
    return MSC_OK;
}

/* Anything that is no category becomes MSC_CATEGORY_COUNT, so that narrowing cannot make it valid. */
static uint8_t narrow_category(msc_category category)
{
    return (uint8_t)((unsigned)category < MSC_CATEGORY_COUNT ? category : MSC_CATEGORY_COUNT);
}

msc_status msc_graph_add_buffer(msc_graph *graph, uint64_t size_bytes, msc_category category, uint32_t *out,
                                msc_error *err)
{
    msc_buffer buffer = {.size_bytes = size_bytes,
                         .begin = graph->ops.count == 0 ? 0 : graph->ops.count - 1,
                         .end = MSC_NONE,
                         .category = narrow_category(category),
                         .resident = graph->ops.count == 0};
    return push_buffer(graph, &buffer, out, err);
}

msc_status msc_graph_add_resident(msc_graph *graph, uint64_t size_bytes, msc_category category, uint32_t *out,
                                  msc_error *err)
{
    msc_buffer buffer = {.size_bytes = size_bytes,
                         .begin = 0,
                         .end = MSC_NONE,
                         .category = narrow_category(category),
                         .resident = 1};
    return push_buffer(graph, &buffer, out, err);
}

msc_status msc_graph_add_late(msc_graph *graph, uint64_t size_bytes, msc_category category, uint32_t *out,
                              msc_error *err)
{
    msc_buffer buffer = {
        .size_bytes = size_bytes, .end = MSC_NONE, .category = narrow_category(category), .resident = 1};

    if (graph->ops.count == 0)
        return msc__fail(err, MSC_ESTATE, "a buffer cannot appear with an operation before there is one");
    buffer.begin = graph->ops.count - 1;
    return push_buffer(graph, &buffer, out, err);
}

msc_status msc_graph_make_late(msc_graph *graph, uint32_t buffer, msc_error *err)
{
    msc_status status = require(graph, MSC__GRAPH_BUFFER, buffer, err);
    msc_buffer *late;

    if (status != MSC_OK)
        return status;
    late = (msc_buffer *)graph->buffers.items + buffer;
    if (!late->resident)
        return msc__fail(err, MSC_EINVAL, "buffer %u is not resident: it cannot appear late", buffer);
    late->begin = graph->ops.count;
    return MSC_OK;
}

msc_status msc_graph_set_category(msc_graph *graph, uint32_t buffer, msc_category category, msc_error *err)
{
    msc_status status = require(graph, MSC__GRAPH_BUFFER, buffer, err);

    if (status != MSC_OK)
        return status;
    if ((unsigned)category >= MSC_CATEGORY_COUNT)
        return msc__fail(err, MSC_EINVAL, "there is no category %u", (unsigned)category);
    ((msc_buffer *)graph->buffers.items)[buffer].category = (uint8_t)category;
    return MSC_OK;
}

msc_status msc_graph_set_size(msc_graph *graph, uint32_t buffer, uint64_t size_bytes, msc_error *err)
{
    msc_status status = require(graph, MSC__GRAPH_BUFFER, buffer, err);
    uint64_t *size;
    uint64_t others;

    if (status != MSC_OK)
        return status;
    size = &((msc_buffer *)graph->buffers.items)[buffer].size_bytes;
    MSC__ASSERT(*size <= graph->buffer_bytes);
    others = graph->buffer_bytes - *size;
    status = require_room(others, size_bytes, err);
    if (status != MSC_OK)
        return status;
    *size = size_bytes;
    graph->buffer_bytes = others + size_bytes;
    return MSC_OK;
}

msc_status msc_graph_end_buffer(msc_graph *graph, uint32_t buffer, msc_error *err)
{
    msc_buffer *ended = graph->buffers.items;
    msc_status status = require(graph, MSC__GRAPH_BUFFER, buffer, err);

    if (status != MSC_OK)
        return status;
    ended += buffer;
    if (ended->end != MSC_NONE)
        return msc__fail(err, MSC_EINVAL, "cannot end buffer %u: it ended at position %u", buffer,
                         ended->end);
    MSC__ASSERT(ended->resident || ended->begin <= graph->ops.count);
    ended->end = graph->ops.count;
    return MSC_OK;
}

msc_status msc_graph_add_write(msc_graph *graph, uint32_t buffer, msc_error *err)
{
    msc_write write = {.op = graph->ops.count - 1, .buffer = buffer};
    msc_status status = require(graph, MSC__GRAPH_BUFFER, buffer, err);

    if (status != MSC_OK)
        return status;
    if (graph->ops.count == 0)
        return msc__fail(err, MSC_EINVAL, "cannot add a write to buffer %u: there is no operation yet",
                         buffer);
    return msc__array_push(graph->ctx, &graph->writes, sizeof write, &write, err);
}

msc_status msc_graph_add_save(msc_graph *graph, uint32_t buffer, uint32_t *out, msc_error *err)
{
    msc_save save = {.buffer = buffer,
                     .call = graph->open_call,
                     .pack = graph->ops.count,
                     .unpack = MSC_NONE,
                     .release = MSC_NONE};
    msc_status status = require(graph, MSC__GRAPH_BUFFER, buffer, err);

    if (status == MSC_OK)
        status = msc__array_push(graph->ctx, &graph->saves, sizeof save, &save, err);
    if (status != MSC_OK)
        return status;
    store(out, graph->saves.count - 1);
    return MSC_OK;
}

msc_status msc_graph_unpack(msc_graph *graph, uint32_t save, msc_error *err)
{
    msc_save *used = graph->saves.items;
    msc_status status = require(graph, MSC__GRAPH_SAVE, save, err);

    if (status != MSC_OK)
        return status;
    used += save;
    if (used->release != MSC_NONE)
        return msc__fail(err, MSC_EINVAL, "cannot unpack save %u: it was released at position %u", save,
                         used->release);
    MSC__ASSERT(used->pack <= graph->ops.count);
    if (used->unpack == MSC_NONE)
        used->unpack = graph->ops.count;
    return MSC_OK;
}

/* A save that nobody unpacked counts as unpacked where it is released. */
static void release_at(msc_save *save, uint32_t position)
{
    MSC__ASSERT(save->release == MSC_NONE && save->pack <= position);
    save->release = position;
    if (save->unpack == MSC_NONE)
        save->unpack = position;
    MSC__ASSERT(save->unpack >= save->pack && save->unpack <= save->release);
}

msc_status msc_graph_release(msc_graph *graph, uint32_t save, msc_error *err)
{
    msc_save *released = graph->saves.items;
    msc_status status = require(graph, MSC__GRAPH_SAVE, save, err);

    if (status != MSC_OK)
        return status;
    released += save;
    if (released->release != MSC_NONE)
        return msc__fail(err, MSC_EINVAL, "cannot release save %u: it was released at position %u", save,
                         released->release);
    release_at(released, graph->ops.count);
    return MSC_OK;
}

/* ---- finish -------------------------------------------------------------------------------------- */

static bool inputs_are_sorted(const msc_graph *graph)
{
    const msc_input *inputs = graph->inputs.items;
    uint32_t i;

    for (i = 1; i < graph->inputs.count; i++) {
        if (inputs[i].call < inputs[i - 1].call)
            return false;
    }
    return true;
}

/* A counting sort by call: stable, and linear whatever the tracer did. */
static msc_status sort_inputs(msc_graph *graph, msc_error *err)
{
    msc_input *inputs = graph->inputs.items;
    size_t next_bytes = ((size_t)graph->calls.count + 1) * sizeof(uint32_t);
    size_t copy_bytes = graph->inputs.count * sizeof(msc_input);
    uint32_t *next = NULL;
    msc_input *copy = NULL;
    msc_status status = MSC_OK;
    uint32_t i;

    if (inputs_are_sorted(graph))
        return MSC_OK;
    next = msc__alloc(graph->ctx, next_bytes);
    copy = msc__alloc(graph->ctx, copy_bytes);
    if (next == NULL || copy == NULL) {
        status = msc__fail_memory(err, "sorting inputs", (uint64_t)next_bytes + copy_bytes);
        goto cleanup;
    }
    memcpy(copy, inputs, copy_bytes);
    for (i = 0; i < graph->inputs.count; i++)
        next[copy[i].call + 1]++;
    for (i = 0; i < graph->calls.count; i++)
        next[i + 1] += next[i];
    for (i = 0; i < graph->inputs.count; i++)
        inputs[next[copy[i].call]++] = copy[i];
    MSC__ASSERT(inputs_are_sorted(graph));

cleanup:
    msc__free(graph->ctx, next, next_bytes);
    msc__free(graph->ctx, copy, copy_bytes);
    return status;
}

static void close_open_records(msc_graph *graph)
{
    msc_call *calls = graph->calls.items;
    msc_buffer *buffers = graph->buffers.items;
    msc_save *saves = graph->saves.items;
    uint32_t position = graph->ops.count;
    uint32_t i;

    for (; graph->open_call != MSC_NONE; graph->open_call = calls[graph->open_call].parent) {
        MSC__ASSERT(calls[graph->open_call].end == MSC_NONE && calls[graph->open_call].begin <= position);
        calls[graph->open_call].end = position;
    }
    for (i = 0; i < graph->buffers.count; i++) {
        if (buffers[i].end == MSC_NONE)
            buffers[i].end = position + 1;
    }
    for (i = 0; i < graph->saves.count; i++) {
        if (saves[i].release == MSC_NONE)
            release_at(&saves[i], position);
    }
}

void msc__graph_freeze(msc_graph *graph)
{
    MSC__ASSERT(!graph->finished && graph->open_call == MSC_NONE);
    MSC__ASSERT(graph->buffer_bytes <= MSC__GRAPH_MOST_BUFFER_BYTES);
    msc__hash_index_fini(graph->ctx, &graph->input_table);
    graph->finished = 1;
    graph->digest = msc__graph_text_digest(graph);
}

msc_status msc_graph_finish(msc_graph *graph, msc_error *err)
{
    msc__graph_problem problem;
    msc_status status = require_open(graph, "finish", err);

    if (status == MSC_OK)
        status = sort_inputs(graph, err);
    if (status == MSC_OK)
        status = msc__graph_sort_notes(graph, err);
    if (status != MSC_OK)
        return status;
    close_open_records(graph);
    problem = msc__graph_validate(graph);
    if (problem.status != MSC_OK)
        return msc__fail(err, problem.status, "%s %u: %s", msc__graph_record_word(problem.record),
                         problem.index, problem.text);
    msc__graph_freeze(graph);
    return MSC_OK;
}
