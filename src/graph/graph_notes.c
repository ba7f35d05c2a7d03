/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notes: what a reader of a report wants to know about an operation or a buffer, and nobody else.
 *
 *      op_notes      [ 0 - "gpt2.py:310" ]  [ 1 - "gpt2.py:311" ]  [ 7 5 "gpt2.py:310" ]     by op
 *      buffer_notes  [ 0 2 "float32[8] ln.weight" ]  [ 3 - "float32[4, 8]" ]                 by buffer
 *
 * They are sparse, for a graph may have none, and apart from the records, for the search reads records a
 * thousand times and notes never. A note on an operation is given right after it, so these are in order by
 * construction. A note on a buffer may come at any time and more than once (it is known to be a gradient
 * only at the end of backward): they are brought in order at the end, and the last of each buffer stays.
 *
 * The digest leaves notes out: to move a line of the program is no other step.
 */
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/search.h"
#include "graph/graph_internal.h"

static msc_status check_note(const msc_graph *graph, uint32_t module, const char *text, msc_error *err)
{
    if (graph->finished)
        return msc__fail(err, MSC_ESTATE, "cannot add a note: the graph is finished");
    if (text == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot add a note: its text is NULL");
    if (module != MSC_NONE && module >= graph->modules.count)
        return msc__fail(err, MSC_EINVAL, "there is no module %u, only %u", module, graph->modules.count);
    return MSC_OK;
}

static msc_status push_note(msc_graph *graph, msc__array *notes, msc_note note, const char *text,
                            msc_error *err)
{
    msc_status status;

    if (note.module == MSC_NONE && text[0] == '\0')
        return MSC_OK; /* says nothing */
    status = msc__graph_intern(graph, text, strlen(text), &note.text, err);
    if (status == MSC_OK)
        status = msc__array_push(graph->ctx, notes, sizeof note, &note, err);
    return status;
}

msc_status msc_graph_note_op(msc_graph *graph, uint32_t module, const char *source, msc_error *err)
{
    const msc_note *notes = graph->op_notes.items;
    msc_note note = {.item = graph->ops.count - 1, .module = module};
    msc_status status = check_note(graph, module, source, err);

    if (status != MSC_OK)
        return status;
    if (graph->ops.count == 0)
        return msc__fail(err, MSC_EINVAL, "cannot note an operation: there is none yet");
    if (graph->op_notes.count > 0 && notes[graph->op_notes.count - 1].item == note.item)
        return msc__fail(err, MSC_EINVAL, "operation %u has a note", note.item);
    MSC__ASSERT(graph->op_notes.count == 0 || notes[graph->op_notes.count - 1].item < note.item);
    return push_note(graph, &graph->op_notes, note, source, err);
}

msc_status msc_graph_note_buffer(msc_graph *graph, uint32_t buffer, uint32_t module, const char *what,
                                 msc_error *err)
{
    msc_note note = {.item = buffer, .module = module};
    msc_status status = check_note(graph, module, what, err);

    if (status != MSC_OK)
        return status;
    if (buffer >= graph->buffers.count)
        return msc__fail(err, MSC_EINVAL, "there is no buffer %u, only %u", buffer, graph->buffers.count);
    return push_note(graph, &graph->buffer_notes, note, what, err);
}

msc_status msc__graph_sort_notes(msc_graph *graph, msc_error *err)
{
    msc_note *notes = graph->buffer_notes.items;
    size_t bytes = graph->buffers.count * sizeof(msc_note);
    msc_note *last; /* per buffer; `item` MSC_NONE: none */
    uint32_t kept = 0;
    uint32_t i;

    if (graph->buffer_notes.count == 0)
        return MSC_OK;
    last = msc__alloc(graph->ctx, bytes);
    if (last == NULL)
        return msc__fail_memory(err, "sorting notes", bytes);
    for (i = 0; i < graph->buffers.count; i++)
        last[i].item = MSC_NONE;
    for (i = 0; i < graph->buffer_notes.count; i++) {
        MSC__ASSERT(notes[i].item < graph->buffers.count);
        last[notes[i].item] = notes[i];
    }
    for (i = 0; i < graph->buffers.count; i++) {
        if (last[i].item != MSC_NONE)
            notes[kept++] = last[i];
    }
    MSC__ASSERT(kept > 0 && kept <= graph->buffer_notes.count);
    graph->buffer_notes.count = kept;
    msc__free(graph->ctx, last, bytes);
    return MSC_OK;
}

bool msc__graph_has_notes(const msc_graph *graph)
{
    return graph->op_notes.count > 0 || graph->buffer_notes.count > 0;
}

/* ---- reading ------------------------------------------------------------------------------------- */

uint32_t msc_graph_op_note_count(const msc_graph *graph)
{
    return graph->op_notes.count;
}

uint32_t msc_graph_buffer_note_count(const msc_graph *graph)
{
    return graph->buffer_notes.count;
}

const msc_note *msc_graph_op_notes(const msc_graph *graph)
{
    return graph->op_notes.items;
}

const msc_note *msc_graph_buffer_notes(const msc_graph *graph)
{
    return graph->buffer_notes.items;
}

static const msc_note *find_note(const msc__array *array, uint32_t item)
{
    const msc_note *notes = array->items;
    uint32_t at = MSC__LOWER_BOUND(msc_note, item, notes, array->count, item);

    return at < array->count && notes[at].item == item ? &notes[at] : NULL;
}

const msc_note *msc_graph_op_note(const msc_graph *graph, uint32_t op)
{
    return graph->finished ? find_note(&graph->op_notes, op) : NULL;
}

const msc_note *msc_graph_buffer_note(const msc_graph *graph, uint32_t buffer)
{
    return graph->finished ? find_note(&graph->buffer_notes, buffer) : NULL;
}

uint32_t msc_graph_module_of_op(const msc_graph *graph, uint32_t op)
{
    const msc_note *note = msc_graph_op_note(graph, op);
    const msc_op *ops = graph->ops.items;
    const msc_call *calls = graph->calls.items;

    if (op >= graph->ops.count)
        return MSC_NONE;
    if (note != NULL && note->module != MSC_NONE)
        return note->module;
    return ops[op].call == MSC_NONE ? MSC_NONE : calls[ops[op].call].module;
}

uint32_t msc_graph_module_of_buffer(const msc_graph *graph, uint32_t buffer)
{
    const msc_note *note = msc_graph_buffer_note(graph, buffer);
    const msc_buffer *buffers = graph->buffers.items;

    if (note != NULL && note->module != MSC_NONE)
        return note->module;
    if (buffer >= graph->buffers.count || buffers[buffer].resident)
        return MSC_NONE;
    return msc_graph_module_of_op(graph, buffers[buffer].begin);
}
