/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What must hold in a finished graph.
 *
 * The builders make most of this true by construction; text does not. Everything that reads a graph
 * relies on these rules and checks nothing again, so this is the one place where hostile numbers stop.
 *
 *  - every index names a record that exists; parents come before their children
 *  - calls appear in order of entry and nest: a call's parent is a call that is still open
 *  - an operation's call is the innermost one around it; phases never go back
 *  - 0 <= begin <= end <= n + 1 for buffers; what is made by an operation is made by one of the n
 *  - begin of the buffer <= pack <= unpack <= release <= n for saves
 *  - inputs are sorted by call, writes by operation, and the buffer exists by then
 *  - notes are sorted by item, one per item, and say something
 *  - all buffers together stay below 2^62 bytes, so that sums of a few such totals cannot overflow
 *
 * Every check is one linear pass without memory. The checks run in the order of the records they depend
 * on, so each may trust the records before it. They return the first problem.
 */
#include "graph/graph_internal.h"

#include "base/invariant.h"

static msc__graph_problem no_problem(void)
{
    return (msc__graph_problem){.status = MSC_OK, .record = MSC__GRAPH_MODULE, .index = 0, .text = ""};
}

static msc__graph_problem problem(msc__graph_record record, uint32_t index, const char *text)
{
    MSC__ASSERT(record < MSC__GRAPH_RECORD_COUNT && text[0] != '\0');
    return (msc__graph_problem){.status = MSC_EFORMAT, .record = record, .index = index, .text = text};
}

static bool is_id_or_none(uint32_t id, uint32_t count)
{
    return id == MSC_NONE || id < count;
}

static msc__graph_problem check_modules(const msc_graph *graph)
{
    const msc_module *modules = graph->modules.items;
    uint32_t i;

    for (i = 0; i < graph->modules.count; i++) {
        if (!is_id_or_none(modules[i].parent, i))
            return problem(MSC__GRAPH_MODULE, i, "the parent does not come before it");
        if ((modules[i].flags & ~MSC__GRAPH_MODULE_FLAGS) != 0)
            return problem(MSC__GRAPH_MODULE, i, "unknown flags");
    }
    return no_problem();
}

/*
 * The call before call i, or one of its ancestors, must be the parent of call i, and all that lies below
 * the parent must have ended. Each step up closes a call for good, so the pass is linear.
 */
static const char *check_nesting(const msc_call *calls, uint32_t i)
{
    uint32_t open = i == 0 ? MSC_NONE : i - 1;

    while (open != calls[i].parent) {
        if (open == MSC_NONE)
            return "the parent is not an open call";
        if (calls[open].end > calls[i].begin)
            return "overlaps a call that does not enclose it";
        open = calls[open].parent;
    }
    if (open == MSC_NONE)
        return NULL;
    if (calls[i].begin < calls[open].begin || calls[i].end > calls[open].end)
        return "does not lie inside its parent";
    return NULL;
}

static msc__graph_problem check_calls(const msc_graph *graph)
{
    const msc_call *calls = graph->calls.items;
    uint32_t i;

    for (i = 0; i < graph->calls.count; i++) {
        const char *text;
        if (calls[i].module >= graph->modules.count)
            return problem(MSC__GRAPH_CALL, i, "no such module");
        if (!is_id_or_none(calls[i].parent, i))
            return problem(MSC__GRAPH_CALL, i, "the parent does not come before it");
        if (calls[i].begin > calls[i].end || calls[i].end > graph->ops.count)
            return problem(MSC__GRAPH_CALL, i, "begin <= end <= operations does not hold");
        if (i > 0 && calls[i].begin < calls[i - 1].begin)
            return problem(MSC__GRAPH_CALL, i, "begins before the call listed before it");
        text = check_nesting(calls, i);
        if (text != NULL)
            return problem(MSC__GRAPH_CALL, i, text);
    }
    return no_problem();
}

/* Follows the operations with a cursor: `next` is the next call to enter, `inner` the innermost open. */
static msc__graph_problem check_ops(const msc_graph *graph)
{
    const msc_op *ops = graph->ops.items;
    const msc_call *calls = graph->calls.items;
    uint32_t inner = MSC_NONE;
    uint32_t next = 0;
    uint32_t i;

    for (i = 0; i < graph->ops.count; i++) {
        while (next < graph->calls.count && calls[next].begin <= i)
            inner = next++;
        while (inner != MSC_NONE && calls[inner].end <= i)
            inner = calls[inner].parent;
        if (ops[i].call != inner)
            return problem(MSC__GRAPH_OP, i, "its call is not the innermost one around it");
        if (ops[i].phase >= MSC_PHASE_COUNT)
            return problem(MSC__GRAPH_OP, i, "no such phase");
        if (i > 0 && ops[i].phase < ops[i - 1].phase)
            return problem(MSC__GRAPH_OP, i, "the phase goes back");
        if ((ops[i].flags & ~MSC__GRAPH_OP_FLAGS) != 0)
            return problem(MSC__GRAPH_OP, i, "unknown flags");
        if (ops[i].work >= MSC_WORK_COUNT)
            return problem(MSC__GRAPH_OP, i, "no such class of work");
    }
    return no_problem();
}

static const char *check_buffer(const msc_buffer *buffer, uint32_t op_count)
{
    if (buffer->category >= MSC_CATEGORY_COUNT)
        return "no such category";
    if (buffer->resident > 1)
        return "resident is neither 0 nor 1";
    /* What was to appear with an operation that never came appears at the end. */
    if (buffer->begin > op_count || (buffer->resident == 0 && buffer->begin == op_count))
        return "no such operation makes it";
    if (buffer->begin > buffer->end || buffer->end > op_count + 1)
        return "begin <= end <= operations + 1 does not hold";
    return NULL;
}

static msc__graph_problem check_buffers(const msc_graph *graph)
{
    const msc_buffer *buffers = graph->buffers.items;
    uint64_t sum = 0;
    uint32_t i;

    for (i = 0; i < graph->buffers.count; i++) {
        const char *text = check_buffer(&buffers[i], graph->ops.count);
        if (text != NULL)
            return problem(MSC__GRAPH_BUFFER, i, text);
        if (buffers[i].size_bytes > MSC__GRAPH_MOST_BUFFER_BYTES - sum) {
            msc__graph_problem overflow = problem(MSC__GRAPH_BUFFER, i, "all buffers exceed 2^62 bytes");
            overflow.status = MSC_EOVERFLOW;
            return overflow;
        }
        sum += buffers[i].size_bytes;
    }
    return no_problem();
}

static const char *check_save(const msc_graph *graph, const msc_save *save)
{
    const msc_call *call;

    if (save->buffer >= graph->buffers.count)
        return "no such buffer";
    if (save->pack < ((const msc_buffer *)graph->buffers.items)[save->buffer].begin)
        return "is packed before its buffer begins";
    if (save->pack > save->unpack || save->unpack > save->release || save->release > graph->ops.count)
        return "pack <= unpack <= release <= operations does not hold";
    if (!is_id_or_none(save->call, graph->calls.count))
        return "no such call";
    if (save->call == MSC_NONE)
        return NULL;
    call = (const msc_call *)graph->calls.items + save->call;
    return save->pack < call->begin || save->pack > call->end ? "is packed outside its call" : NULL;
}

static msc__graph_problem check_saves(const msc_graph *graph)
{
    const msc_save *saves = graph->saves.items;
    uint32_t i;

    for (i = 0; i < graph->saves.count; i++) {
        const char *text = check_save(graph, &saves[i]);
        if (text != NULL)
            return problem(MSC__GRAPH_SAVE, i, text);
    }
    return no_problem();
}

static msc__graph_problem check_inputs(const msc_graph *graph)
{
    const msc_input *inputs = graph->inputs.items;
    const msc_call *calls = graph->calls.items;
    const msc_buffer *buffers = graph->buffers.items;
    uint32_t i;

    for (i = 0; i < graph->inputs.count; i++) {
        if (inputs[i].call >= graph->calls.count)
            return problem(MSC__GRAPH_INPUT, i, "no such call");
        if (inputs[i].buffer >= graph->buffers.count)
            return problem(MSC__GRAPH_INPUT, i, "no such buffer");
        if (i > 0 && inputs[i].call < inputs[i - 1].call)
            return problem(MSC__GRAPH_INPUT, i, "inputs are not sorted by call");
        if (buffers[inputs[i].buffer].begin > calls[inputs[i].call].end)
            return problem(MSC__GRAPH_INPUT, i, "the buffer begins after the call");
    }
    return no_problem();
}

static msc__graph_problem check_writes(const msc_graph *graph)
{
    const msc_write *writes = graph->writes.items;
    const msc_buffer *buffers = graph->buffers.items;
    uint32_t i;

    for (i = 0; i < graph->writes.count; i++) {
        if (writes[i].op >= graph->ops.count)
            return problem(MSC__GRAPH_WRITE, i, "no such operation");
        if (writes[i].buffer >= graph->buffers.count)
            return problem(MSC__GRAPH_WRITE, i, "no such buffer");
        if (i > 0 && writes[i].op < writes[i - 1].op)
            return problem(MSC__GRAPH_WRITE, i, "writes are not in program order");
        if (writes[i].op < buffers[writes[i].buffer].begin)
            return problem(MSC__GRAPH_WRITE, i, "the buffer begins after the operation");
    }
    return no_problem();
}

static const char *check_note(const msc_graph *graph, const msc__array *array, uint32_t i, uint32_t items)
{
    const msc_note *notes = array->items;

    if (notes[i].item >= items)
        return "no such item";
    if (i > 0 && notes[i].item <= notes[i - 1].item)
        return "notes are not sorted, or two are on one item";
    if (!is_id_or_none(notes[i].module, graph->modules.count))
        return "no such module";
    if (notes[i].module == MSC_NONE && msc_graph_string(graph, notes[i].text)[0] == '\0')
        return "says nothing";
    return NULL;
}

static msc__graph_problem check_op_notes(const msc_graph *graph)
{
    uint32_t i;

    for (i = 0; i < graph->op_notes.count; i++) {
        const char *text = check_note(graph, &graph->op_notes, i, graph->ops.count);
        if (text != NULL)
            return problem(MSC__GRAPH_OP_NOTE, i, text);
    }
    return no_problem();
}

static msc__graph_problem check_buffer_notes(const msc_graph *graph)
{
    uint32_t i;

    for (i = 0; i < graph->buffer_notes.count; i++) {
        const char *text = check_note(graph, &graph->buffer_notes, i, graph->buffers.count);
        if (text != NULL)
            return problem(MSC__GRAPH_BUFFER_NOTE, i, text);
    }
    return no_problem();
}

msc__graph_problem msc__graph_validate(const msc_graph *graph)
{
    static msc__graph_problem (*const checks[])(const msc_graph *) = {
        check_modules, check_calls,  check_ops,      check_buffers,     check_saves,
        check_inputs,  check_writes, check_op_notes, check_buffer_notes};
    msc__graph_problem found = no_problem();
    size_t i;

    _Static_assert(sizeof checks / sizeof checks[0] == MSC__GRAPH_RECORD_COUNT,
                   "one for each kind of record");
    for (i = 0; i < sizeof checks / sizeof checks[0] && found.status == MSC_OK; i++)
        found = checks[i](graph);
    return found;
}
