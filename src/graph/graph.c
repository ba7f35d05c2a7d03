/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lifecycle and queries of the memory graph.
 *
 * A graph is nine arrays of plain records that refer to each other by index, and one pool of strings:
 *
 *      modules <- calls <- ops
 *                   ^       ^
 *                   |       | begin, end
 *      inputs ------+--> buffers <- saves
 *                           ^
 *      writes --------------+              notes: one array for ops, one for buffers
 *
 * There are no pointers between records, so the arrays can grow, be handed to the caller as they are, and
 * be written as text line by line. Queries read and never allocate. A finished graph is never changed
 * again, which is what makes reading it from several threads safe.
 */
#include "graph/graph_internal.h"

#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"

msc_status msc_graph_create(msc_context *ctx, msc_graph **out, msc_error *err)
{
    msc_graph *graph;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot create a graph: out is NULL");
    *out = NULL;
    if (ctx == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot create a graph: the context is NULL");
    graph = msc__alloc(ctx, sizeof *graph);
    if (graph == NULL)
        return msc__fail_memory(err, "a graph", sizeof *graph);
    graph->ctx = ctx;
    graph->open_call = MSC_NONE;
    *out = graph;
    return MSC_OK;
}

void msc_graph_destroy(msc_graph *graph)
{
    msc_context *ctx;

    if (graph == NULL)
        return;
    ctx = graph->ctx;
    msc__array_fini(ctx, &graph->modules, sizeof(msc_module));
    msc__array_fini(ctx, &graph->calls, sizeof(msc_call));
    msc__array_fini(ctx, &graph->ops, sizeof(msc_op));
    msc__array_fini(ctx, &graph->buffers, sizeof(msc_buffer));
    msc__array_fini(ctx, &graph->saves, sizeof(msc_save));
    msc__array_fini(ctx, &graph->inputs, sizeof(msc_input));
    msc__array_fini(ctx, &graph->writes, sizeof(msc_write));
    msc__array_fini(ctx, &graph->op_notes, sizeof(msc_note));
    msc__array_fini(ctx, &graph->buffer_notes, sizeof(msc_note));
    msc__array_fini(ctx, &graph->chars, sizeof(char));
    msc__array_fini(ctx, &graph->strings, sizeof(uint32_t));
    msc__hash_index_fini(ctx, &graph->string_table);
    msc__hash_index_fini(ctx, &graph->input_table);
    msc__free(ctx, graph, sizeof *graph);
}

uint32_t msc_graph_op_count(const msc_graph *graph)
{
    return graph->ops.count;
}

uint32_t msc_graph_buffer_count(const msc_graph *graph)
{
    return graph->buffers.count;
}

uint32_t msc_graph_save_count(const msc_graph *graph)
{
    return graph->saves.count;
}

uint32_t msc_graph_module_count(const msc_graph *graph)
{
    return graph->modules.count;
}

uint32_t msc_graph_call_count(const msc_graph *graph)
{
    return graph->calls.count;
}

uint32_t msc_graph_input_count(const msc_graph *graph)
{
    return graph->inputs.count;
}

uint32_t msc_graph_write_count(const msc_graph *graph)
{
    return graph->writes.count;
}

const msc_op *msc_graph_ops(const msc_graph *graph)
{
    return graph->ops.items;
}

const msc_buffer *msc_graph_buffers(const msc_graph *graph)
{
    return graph->buffers.items;
}

const msc_save *msc_graph_saves(const msc_graph *graph)
{
    return graph->saves.items;
}

const msc_module *msc_graph_modules(const msc_graph *graph)
{
    return graph->modules.items;
}

const msc_call *msc_graph_calls(const msc_graph *graph)
{
    return graph->calls.items;
}

const msc_input *msc_graph_inputs(const msc_graph *graph)
{
    return graph->inputs.items;
}

const msc_write *msc_graph_writes(const msc_graph *graph)
{
    return graph->writes.items;
}

const char *msc_graph_string(const msc_graph *graph, uint32_t index)
{
    if (index >= graph->strings.count)
        return "";
    MSC__ASSERT(((const uint32_t *)graph->strings.items)[index] < graph->chars.count);
    return (const char *)graph->chars.items + ((const uint32_t *)graph->strings.items)[index];
}

int msc_graph_is_finished(const msc_graph *graph)
{
    return graph->finished;
}

uint64_t msc_graph_digest(const msc_graph *graph)
{
    return graph->digest;
}

const char *msc__graph_record_word(msc__graph_record record)
{
    static const char *const words[] = {
#define WORD(name, word) word,
        MSC__GRAPH_RECORD_LIST(WORD)
#undef WORD
    };
    MSC__ASSERT(record < MSC__GRAPH_RECORD_COUNT);
    return words[record];
}

uint32_t msc__graph_record_count(const msc_graph *graph, msc__graph_record record)
{
    const msc__array *const arrays[] = {&graph->modules, &graph->calls,    &graph->ops,
                                        &graph->buffers, &graph->saves,    &graph->inputs,
                                        &graph->writes,  &graph->op_notes, &graph->buffer_notes};
    MSC__ASSERT(record < MSC__GRAPH_RECORD_COUNT);
    return arrays[record]->count;
}
