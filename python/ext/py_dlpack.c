/* SPDX-License-Identifier: Apache-2.0 */
/* Finding PyTorch's DLPack table. */
#include "py_dlpack.h"

const msc_dl_api *msc__py_dlpack(PyObject *tensor_type)
{
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    const msc_dl_api *api = NULL;

    if (capsule != NULL && PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule); /* the table is PyTorch's and lives as long as the process */
    PyErr_Clear();
    return api != NULL && api->header.version.major == MSC_DL_MAJOR ? api : NULL;
}
