/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_fingerprint.h  `fingerprint`: a tensor in host memory as 64 bits. */
#ifndef MSC_EXT_PY_FINGERPRINT_H
#define MSC_EXT_PY_FINGERPRINT_H

#include "pydoor.h"

PyObject *msc__py_fingerprint(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);

#endif /* MSC_EXT_PY_FINGERPRINT_H */
