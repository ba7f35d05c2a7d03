/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_plan.h  The type `Plan`. */
#ifndef MSC_EXT_PY_PLAN_H
#define MSC_EXT_PY_PLAN_H

#include "pydoor.h"

#include "memscale/plan.h"
#include "module_state.h"

/** A Plan and the context that its plan lives in. */
typedef struct msc__py_plan {
    PyObject_HEAD msc_context *ctx;
    msc_plan *plan; /**< NULL only while the object is being made */
} msc__py_plan;

/** Makes the type. New reference, or NULL with an exception. */
PyTypeObject *msc__py_plan_type_new(PyObject *module);

/** A Plan with a context and no plan yet: the caller puts one there or drops the object. */
msc__py_plan *msc__py_plan_alloc(PyTypeObject *type);

/** The plan inside `value`, borrowed; NULL with TypeError when it is none. */
const msc_plan *msc__py_plan_of(const msc__py_state *state, PyObject *value);

/** The rule with this key. False with ValueError. */
bool msc__py_to_rule(PyObject *value, const char *what, msc_rule *out);

#endif /* MSC_EXT_PY_PLAN_H */
