/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `step_events`: what a step under a plan allocates, frees and runs, in order, for charts and traces.
 *
 *     graph, plan ─► msc_trace ─┬─► events     kind 0 1 2 3, category, id, size      columns of one length
 *                               └─► instances  buffer, op, recomputed                indexed by an id
 *
 * Each column is a bytes object of native numbers, which array.array reads without a Python int per event.
 * The trace is derived without the GIL in a context of its own; the columns are filled with it, since that
 * is no more than a copy.
 */
#include "py_events.h"

#include <string.h>

#include "convert.h"
#include "error.h"
#include "memscale/replay.h"
#include "py_graph.h"
#include "py_plan.h"

/* A member of a record in an array, to be handed over as a column. */
typedef struct column {
    const char *name;
    size_t offset;
    size_t bytes;
} column;

static const column event_columns[] = {
    {"kind", offsetof(msc_event, kind), sizeof(uint8_t)},
    {"category", offsetof(msc_event, category), sizeof(uint8_t)},
    {"id", offsetof(msc_event, id), sizeof(uint32_t)},
    {"size", offsetof(msc_event, size_bytes), sizeof(uint64_t)},
};

static const column instance_columns[] = {
    {"instance_buffer", offsetof(msc_instance, buffer), sizeof(uint32_t)},
    {"instance_op", offsetof(msc_instance, op), sizeof(uint32_t)},
    {"instance_appears", offsetof(msc_instance, appears), sizeof(uint32_t)},
    {"instance_recomputed", offsetof(msc_instance, recomputed), sizeof(uint8_t)},
    {"instance_returned", offsetof(msc_instance, returned), sizeof(uint8_t)},
};

/* Records of one kind. */
typedef struct rows {
    const void *first;
    size_t stride_bytes;
    uint64_t count;
} rows;

/** One column of the records, as a new bytes object. */
static PyObject *column_bytes(const rows *from, const column *which)
{
    const char *at = from->first;
    PyObject *result;
    char *to;

    if (from->count > (uint64_t)PY_SSIZE_T_MAX / which->bytes)
        return PyErr_NoMemory();
    result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(from->count * which->bytes));
    if (result == NULL)
        return NULL;
    to = PyBytes_AsString(result);
    for (uint64_t i = 0; i < from->count; i++)
        memcpy(to + i * which->bytes, at + i * from->stride_bytes + which->offset, which->bytes);
    return result;
}

static bool add_columns(PyObject *dict, const rows *from, const column *columns, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *bytes = column_bytes(from, &columns[i]);
        int status = bytes == NULL ? -1 : PyDict_SetItemString(dict, columns[i].name, bytes);

        Py_XDECREF(bytes);
        if (status < 0)
            return false;
    }
    return true;
}

static PyObject *columns_of(const msc_trace *trace)
{
    const rows events = {msc_trace_events(trace), sizeof(msc_event), msc_trace_event_count(trace)};
    const rows instances = {msc_trace_instances(trace), sizeof(msc_instance),
                            msc_trace_instance_count(trace)};
    PyObject *dict = PyDict_New();

    if (dict != NULL && (!add_columns(dict, &events, event_columns, MSC_PY_COUNT(event_columns)) ||
                         !add_columns(dict, &instances, instance_columns, MSC_PY_COUNT(instance_columns))))
        Py_CLEAR(dict);
    return dict;
}

MSC_PY_SIGNATURE(step_events, 1, 2, "graph", "plan");

PyObject *msc__py_step_events(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    const msc__py_state *state = msc__py_module_state(self);
    PyObject *values[2];
    const msc_graph *graph = NULL;
    const msc_plan *plan = NULL;
    msc_context *ctx = NULL;
    msc_trace *trace = NULL;
    PyThreadState *thread;
    PyObject *result = NULL;
    msc_status status;
    msc_error err;

    if (!msc__py_bind(&step_events_signature, args, nargs, kwnames, values))
        return NULL;
    graph = msc__py_finished_graph_of(state, values[0]);
    if (graph == NULL)
        return NULL;
    if (values[1] != NULL && values[1] != Py_None) {
        plan = msc__py_plan_of(state, values[1]);
        if (plan == NULL)
            return NULL;
    }
    thread = PyEval_SaveThread();
    status = msc_context_create(NULL, &ctx, &err);
    if (status == MSC_OK)
        status = msc_trace_create(ctx, graph, plan, &trace, &err);
    PyEval_RestoreThread(thread);
    if (status == MSC_OK)
        result = columns_of(trace);
    else
        msc__py_raise(&err);
    msc_trace_destroy(trace);
    msc_context_destroy(ctx);
    return result;
}
