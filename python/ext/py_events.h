/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_events.h  `step_events`: a derived step, event by event. */
#ifndef MSC_EXT_PY_EVENTS_H
#define MSC_EXT_PY_EVENTS_H

#include "pydoor.h"

/** `step_events(graph, plan=None)`. `self` is the module. */
PyObject *msc__py_step_events(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);

#endif /* MSC_EXT_PY_EVENTS_H */
