/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_entries.h  The type `Entries`: what dictionaries hold, noted to be compared later. */
#ifndef MSC_EXT_PY_ENTRIES_H
#define MSC_EXT_PY_ENTRIES_H

#include "pydoor.h"

/** The type; NULL with an exception. */
PyTypeObject *msc__py_entries_type_new(PyObject *module);

#endif /* MSC_EXT_PY_ENTRIES_H */
