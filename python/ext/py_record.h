/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_record.h  The types `Recorder`, which writes a spool, and `Spool`, which reads one. */
#ifndef MSC_EXT_PY_RECORD_H
#define MSC_EXT_PY_RECORD_H

#include "pydoor.h"

PyTypeObject *msc__py_recorder_type_new(PyObject *module);
PyTypeObject *msc__py_spool_type_new(PyObject *module);

#endif /* MSC_EXT_PY_RECORD_H */
