/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_fingerprint_table.h  The types `FingerprintTable` and `KeptFingerprint`: fingerprints that stay on a card. */
#ifndef MSC_EXT_PY_FINGERPRINT_TABLE_H
#define MSC_EXT_PY_FINGERPRINT_TABLE_H

#include "pydoor.h"

PyTypeObject *msc__py_fingerprint_table_type_new(PyObject *module);
PyTypeObject *msc__py_kept_fingerprint_type_new(PyObject *module);

#endif /* MSC_EXT_PY_FINGERPRINT_TABLE_H */
