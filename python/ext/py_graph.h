/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_graph.h  The type `Graph`. */
#ifndef MSC_EXT_PY_GRAPH_H
#define MSC_EXT_PY_GRAPH_H

#include "pydoor.h"

#include "memscale/graph.h"
#include "module_state.h"

/** Makes the type. New reference, or NULL with an exception. */
PyTypeObject *msc__py_graph_type_new(PyObject *module);

/** The graph inside `value`, borrowed; NULL with TypeError when it is none. */
const msc_graph *msc__py_graph_of(const msc__py_state *state, PyObject *value);

/**
 * As `msc__py_graph_of`, and finished (RuntimeError otherwise).
 *
 * Only such a graph may be read after the GIL has been released: it cannot change any more, and the
 * caller's reference to `value` keeps it alive.
 */
const msc_graph *msc__py_finished_graph_of(const msc__py_state *state, PyObject *value);

/** Lists of tuples; see _core.pyi. `self` is a Graph. */
PyObject *msc__py_graph_ops(PyObject *self, PyObject *unused);
PyObject *msc__py_graph_buffers(PyObject *self, PyObject *unused);
PyObject *msc__py_graph_saves(PyObject *self, PyObject *unused);
PyObject *msc__py_graph_modules(PyObject *self, PyObject *unused);
PyObject *msc__py_graph_calls(PyObject *self, PyObject *unused);
PyObject *msc__py_graph_op_notes(PyObject *self, PyObject *unused);
PyObject *msc__py_graph_buffer_notes(PyObject *self, PyObject *unused);

/** The graph inside a `self` that is known to be a Graph. */
msc_graph *msc__py_graph_self(PyObject *self);

#endif /* MSC_EXT_PY_GRAPH_H */
