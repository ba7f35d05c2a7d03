/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_sim.h  `replay`, the allocator options, and the names of the categories. */
#ifndef MSC_EXT_PY_SIM_H
#define MSC_EXT_PY_SIM_H

#include "pydoor.h"

#include "memscale/sim.h"

/** The kind of a simulator, `'host'` or `'cuda'`. False with an exception. */
bool msc__py_to_sim_kind(PyObject *value, msc_sim_kind *out);

/**
 * Options of the simulator: defaults of the kind that `dict` names (HOST when it names none), and what
 * else it says; its `alloc_conf` is read first. `dict` NULL or None: HOST. False with an exception.
 */
bool msc__py_to_sim_options(PyObject *dict, msc_sim_options *out);

/** Lower-case name of a category, which must be valid. */
const char *msc__py_category_name(int category);

/** `replay(graph, plan=None, *, sim=None)`. `self` is the module. */
PyObject *msc__py_replay(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);

#endif /* MSC_EXT_PY_SIM_H */
