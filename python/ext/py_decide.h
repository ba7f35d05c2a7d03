/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_decide.h  `decide`, `frontier`, `op_times_ns`. `self` is the module; see _core.pyi. */
#ifndef MSC_EXT_PY_DECIDE_H
#define MSC_EXT_PY_DECIDE_H

#include "pydoor.h"

PyObject *msc__py_decide(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *msc__py_frontier(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *msc__py_op_times_ns(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);

#endif /* MSC_EXT_PY_DECIDE_H */
