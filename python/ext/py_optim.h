/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_optim.h  The type `Optim`: optimizer steps on the arrays of tensors, in this host's memory or a card's. */
#ifndef MSC_EXT_PY_OPTIM_H
#define MSC_EXT_PY_OPTIM_H

#include "pydoor.h"

PyTypeObject *msc__py_optim_type_new(PyObject *module);

#endif /* MSC_EXT_PY_OPTIM_H */
