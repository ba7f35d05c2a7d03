/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a Graph shows: each kind of record as a list of tuples.
 *
 * Tuples and not objects with attributes: these lists exist for reports and tests, have up to 10^6
 * entries, and are read once. "No such id" is -1, which Python code can compare without a constant.
 */
#include "py_graph.h"

#include <string.h>

#include "convert.h"

/** Makes the i-th tuple of a list. New reference, or NULL with an exception. */
typedef PyObject *(*row_function)(const msc_graph *graph, uint32_t i);

static PyObject *rows(const msc_graph *graph, uint32_t count, row_function row)
{
    PyObject *list = PyList_New((Py_ssize_t)count);

    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *tuple = row(graph, i);

        if (tuple == NULL || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *string(const msc_graph *graph, uint32_t index)
{
    const char *text = msc_graph_string(graph, index);

    return msc__py_from_text(text, strlen(text));
}

static PyObject *op_row(const msc_graph *graph, uint32_t i)
{
    const msc_op *op = &msc_graph_ops(graph)[i];

    return Py_BuildValue("(NLIIKKKI)", string(graph, op->name), msc__py_id(op->call), (unsigned)op->phase,
                         (unsigned)op->flags, (unsigned long long)op->flops,
                         (unsigned long long)op->moved_bytes, (unsigned long long)op->scratch_bytes,
                         (unsigned)op->work);
}

static PyObject *buffer_row(const msc_graph *graph, uint32_t i)
{
    const msc_buffer *buffer = &msc_graph_buffers(graph)[i];

    return Py_BuildValue("(KLLIN)", (unsigned long long)buffer->size_bytes, msc__py_id(buffer->begin),
                         msc__py_id(buffer->end), (unsigned)buffer->category,
                         PyBool_FromLong(buffer->resident));
}

static PyObject *save_row(const msc_graph *graph, uint32_t i)
{
    const msc_save *save = &msc_graph_saves(graph)[i];

    return Py_BuildValue("(LLLLL)", msc__py_id(save->buffer), msc__py_id(save->call), msc__py_id(save->pack),
                         msc__py_id(save->unpack), msc__py_id(save->release));
}

static PyObject *module_row(const msc_graph *graph, uint32_t i)
{
    const msc_module *module = &msc_graph_modules(graph)[i];

    return Py_BuildValue("(NNLIKK)", string(graph, module->path), string(graph, module->type),
                         msc__py_id(module->parent), (unsigned)module->flags,
                         (unsigned long long)module->structure, (unsigned long long)module->state_bytes);
}

static PyObject *call_row(const msc_graph *graph, uint32_t i)
{
    const msc_call *call = &msc_graph_calls(graph)[i];

    return Py_BuildValue("(LLLL)", msc__py_id(call->module), msc__py_id(call->parent),
                         msc__py_id(call->begin), msc__py_id(call->end));
}

static PyObject *note_row(const msc_graph *graph, const msc_note *note)
{
    return Py_BuildValue("(LLN)", msc__py_id(note->item), msc__py_id(note->module),
                         string(graph, note->text));
}

static PyObject *op_note_row(const msc_graph *graph, uint32_t i)
{
    return note_row(graph, &msc_graph_op_notes(graph)[i]);
}

static PyObject *buffer_note_row(const msc_graph *graph, uint32_t i)
{
    return note_row(graph, &msc_graph_buffer_notes(graph)[i]);
}

PyObject *msc__py_graph_ops(PyObject *self, PyObject *unused)
{
    const msc_graph *graph = msc__py_graph_self(self);

    (void)unused;
    return rows(graph, msc_graph_op_count(graph), op_row);
}

PyObject *msc__py_graph_buffers(PyObject *self, PyObject *unused)
{
    const msc_graph *graph = msc__py_graph_self(self);

    (void)unused;
    return rows(graph, msc_graph_buffer_count(graph), buffer_row);
}

PyObject *msc__py_graph_saves(PyObject *self, PyObject *unused)
{
    const msc_graph *graph = msc__py_graph_self(self);

    (void)unused;
    return rows(graph, msc_graph_save_count(graph), save_row);
}

PyObject *msc__py_graph_modules(PyObject *self, PyObject *unused)
{
    const msc_graph *graph = msc__py_graph_self(self);

    (void)unused;
    return rows(graph, msc_graph_module_count(graph), module_row);
}

PyObject *msc__py_graph_calls(PyObject *self, PyObject *unused)
{
    const msc_graph *graph = msc__py_graph_self(self);

    (void)unused;
    return rows(graph, msc_graph_call_count(graph), call_row);
}

PyObject *msc__py_graph_op_notes(PyObject *self, PyObject *unused)
{
    const msc_graph *graph = msc__py_graph_self(self);

    (void)unused;
    return rows(graph, msc_graph_op_note_count(graph), op_note_row);
}

PyObject *msc__py_graph_buffer_notes(PyObject *self, PyObject *unused)
{
    const msc_graph *graph = msc__py_graph_self(self);

    (void)unused;
    return rows(graph, msc_graph_buffer_note_count(graph), buffer_note_row);
}
