/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_snapshot.h  The type `Snapshot`. */
#ifndef MSC_EXT_PY_SNAPSHOT_H
#define MSC_EXT_PY_SNAPSHOT_H

#include "pydoor.h"

/** Makes the type. New reference, or NULL with an exception. */
PyTypeObject *msc__py_snapshot_type_new(PyObject *module);

#endif /* MSC_EXT_PY_SNAPSHOT_H */
