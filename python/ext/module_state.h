/* SPDX-License-Identifier: Apache-2.0 */
/** @file module_state.h  State of the module `memscale._core`: its types. One per interpreter, no globals. */
#ifndef MSC_EXT_MODULE_STATE_H
#define MSC_EXT_MODULE_STATE_H

#include "pydoor.h"

#include "dlpack_types.h"

/** What functions of the module read tensors with. Found when it is first needed: the package can do without PyTorch. */
typedef struct msc__py_tensor_door {
    PyTypeObject *type;      /* torch.Tensor; NULL: not found yet */
    const msc_dl_api *table; /* NULL: attributes are asked */
} msc__py_tensor_door;

typedef struct msc__py_state {
    PyTypeObject *graph_type;
    PyTypeObject *plan_type;
    PyTypeObject *snapshot_type;
    PyTypeObject *simulator_type;
    PyTypeObject *engine_type;
    PyTypeObject *saved_type;
    PyTypeObject *block_type;
    PyTypeObject *optim_type;
    PyTypeObject *card_type;
    PyTypeObject *fingerprint_table_type;
    PyTypeObject *kept_fingerprint_type;
    PyTypeObject *entries_type;
    PyTypeObject *recorder_type;
    PyTypeObject *spool_type;
    msc__py_tensor_door tensors;
} msc__py_state;

/** State of a module object. Never fails for ours. Inline, because module.c includes everybody who asks for it. */
static inline msc__py_state *msc__py_module_state(PyObject *module)
{
    return PyModule_GetState(module);
}

#endif /* MSC_EXT_MODULE_STATE_H */
