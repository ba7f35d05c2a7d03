/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_simulator.h  The type `Simulator`: an allocator driven request by request. */
#ifndef MSC_EXT_PY_SIMULATOR_H
#define MSC_EXT_PY_SIMULATOR_H

#include "pydoor.h"

PyTypeObject *msc__py_simulator_type_new(PyObject *module);

#endif /* MSC_EXT_PY_SIMULATOR_H */
