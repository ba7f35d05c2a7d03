/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The function `fingerprint`.
 *
 * It is called for each tensor that a recompute makes, so what it costs beside the bytes counts: sizes and strides are
 * borrowed from the tensor by PyTorch's table of functions. A PyTorch without that table, and tensors that the table refuses
 * (the type has a dtype that DLPack does not know), are asked by their attributes.
 *
 * While a large tensor is read, other threads run Python. The caller holds the tensor, so it stays; who changes it in place
 * meanwhile gets some fingerprint, as with any function of PyTorch.
 */
#include "py_fingerprint.h"

#include "convert.h"
#include "error.h"
#include "py_torch.h"

/* Reading fewer bytes takes less time than another thread would need to take over. */
#define GIL_BYTES (UINT64_C(1) << 18)

/* ---- PyTorch ------------------------------------------------------------------------------------ */

/** False with an exception. */
static bool find_door(msc__py_tensor_door *door)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *type = torch != NULL ? PyObject_GetAttrString(torch, "Tensor") : NULL;

    Py_XDECREF(torch);
    if (type == NULL)
        return false;
    door->table = msc__py_find_table((PyTypeObject *)type);
    Py_XDECREF((PyObject *)door->type); /* an import may have run this function */
    door->type = (PyTypeObject *)type;
    return true;
}

/** Replaces what PyTorch said about memory that it does not have, but not an interrupt. False. */
static bool refuse(PyObject *tensor, const char *why)
{
    if (PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception))
        return false;
    PyErr_Clear();
    (void)PyErr_Format(PyExc_ValueError, "a fingerprint needs bytes in memory, and %R %s",
                       (PyObject *)Py_TYPE(tensor), why);
    return false;
}

/* ---- reading ------------------------------------------------------------------------------------ */

/** False, and no exception: the table does not read this one. */
static bool read_table(const msc_dl_api *table, PyObject *tensor, msc__py_layout *out)
{
    msc_dl_tensor found;

    if (table == NULL)
        return false;
    if (table->read(tensor, &found) != 0) {
        if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
            PyErr_Clear();
        return false;
    }
    out->tensor.data = found.data != NULL ? (const char *)found.data + found.byte_offset : NULL;
    out->tensor.item_bytes = msc_dl_item_bytes(found.dtype);
    out->tensor.dim_count = (uint32_t)found.dim_count;
    out->tensor.sizes = found.sizes;
    out->tensor.strides = found.strides;
    out->device = found.device.type;
    out->ordinal = found.device.ordinal;
    return true;
}

/** The integers of a tuple, which has `count` of them if that is not NONE. False with or without an exception. */
static bool read_tuple(PyObject *tensor, const char *method, int64_t *to, uint32_t *count)
{
    PyObject *tuple = PyObject_CallMethod(tensor, method, NULL);
    Py_ssize_t size = tuple != NULL && PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    bool read = size >= 0 && size <= (Py_ssize_t)MSC_FINGERPRINT_DIMS &&
                (*count == MSC_NONE || size == (Py_ssize_t)*count);

    for (Py_ssize_t i = 0; read && i < size; i++) {
        to[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        read = PyErr_Occurred() == NULL;
    }
    if (read)
        *count = (uint32_t)size;
    Py_XDECREF(tuple);
    return read;
}

/** What a method gives, as an unsigned number. False with an exception. */
static bool read_number(PyObject *tensor, const char *method, unsigned long long *out)
{
    PyObject *value = PyObject_CallMethod(tensor, method, NULL);

    *out = value != NULL ? PyLong_AsUnsignedLongLong(value) : 0;
    Py_XDECREF(value);
    return PyErr_Occurred() == NULL;
}

static bool is_true(PyObject *tensor, const char *attribute)
{
    PyObject *is = PyObject_GetAttrString(tensor, attribute);

    Py_XDECREF(is);
    return is == Py_True;
}

/** Where it lies. False with an exception. */
static bool read_device(PyObject *tensor, msc__py_layout *out)
{
    PyObject *ordinal;

    out->ordinal = 0;
    out->device = is_true(tensor, "is_cpu") ? MSC_DL_CPU : 0;
    if (out->device != MSC_DL_CPU && PyErr_Occurred() == NULL && is_true(tensor, "is_cuda")) {
        ordinal = PyObject_CallMethod(tensor, "get_device", NULL);
        out->device = MSC_DL_CUDA;
        out->ordinal = ordinal != NULL ? (int32_t)PyLong_AsLong(ordinal) : 0;
        Py_XDECREF(ordinal);
    }
    return PyErr_Occurred() == NULL;
}

/** False with or without an exception. */
static bool read_attributes(PyObject *tensor, msc__py_layout *out)
{
    unsigned long long address = 0;
    unsigned long long bytes = 0;
    uint32_t count = MSC_NONE;

    if (!read_tuple(tensor, "size", out->sizes, &count) ||
        !read_tuple(tensor, "stride", out->strides, &count) || !read_number(tensor, "element_size", &bytes) ||
        !read_number(tensor, "data_ptr", &address))
        return false;
    out->tensor.data =
        (const void *)(uintptr_t)address; // NOLINT(performance-no-int-to-ptr): as Python shows it
    out->tensor.item_bytes = bytes;
    out->tensor.dim_count = count;
    out->tensor.sizes = out->sizes;
    out->tensor.strides = out->strides;
    return read_device(tensor, out);
}

static bool has_elements(const msc_fingerprint_tensor *tensor)
{
    for (uint32_t i = 0; i < tensor->dim_count; i++)
        if (tensor->sizes[i] == 0)
            return false;
    return true;
}

bool msc__py_read_layout(msc__py_state *state, PyObject *tensor, msc__py_layout *out)
{
    msc__py_tensor_door *door = &state->tensors;

    if (door->type == NULL && !find_door(door))
        return false;
    if (Py_TYPE(tensor) != door->type && !PyObject_TypeCheck(tensor, door->type)) {
        (void)PyErr_Format(PyExc_TypeError, "tensor must be a torch.Tensor, not %R",
                           (PyObject *)Py_TYPE(tensor));
        return false;
    }
    if (!read_table(door->table, tensor, out) && (PyErr_Occurred() != NULL || !read_attributes(tensor, out)))
        return refuse(tensor, "shows none: it is sparse, nested or inside of a transform");
    if (out->tensor.data == NULL && has_elements(&out->tensor))
        return refuse(tensor, "has no data: it is fake");
    return true;
}

/* ---- hashing ------------------------------------------------------------------------------------ */

/** Whether reading takes long enough to let others run meanwhile. */
static bool is_large(const msc_fingerprint_tensor *tensor, uint32_t one_in)
{
    uint64_t bytes = tensor->item_bytes;

    for (uint32_t i = 0; i < tensor->dim_count; i++)
        if (tensor->strides == NULL || tensor->strides[i] != 0) /* what repeats is read once */
            bytes *= (uint64_t)tensor->sizes[i];
    return bytes / one_in >= GIL_BYTES;
}

static PyObject *fingerprint_of(const msc_fingerprint_tensor *tensor, uint32_t one_in)
{
    PyThreadState *thread = is_large(tensor, one_in) ? PyEval_SaveThread() : NULL;
    uint64_t value = 0;
    msc_error err;
    msc_status status = msc_fingerprint(tensor, one_in, 0, &value, &err);

    if (thread != NULL)
        PyEval_RestoreThread(thread);
    return status == MSC_OK ? PyLong_FromUnsignedLongLong(value) : msc__py_raise(&err);
}

/* ---- the function ------------------------------------------------------------------------------- */

MSC_PY_SIGNATURE(fingerprint, 1, 2, "tensor", "sampled");

PyObject *msc__py_fingerprint(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *values[2];
    uint8_t sampled = 0;
    msc__py_layout found;

    if (!msc__py_bind(&fingerprint_signature, args, nargs, kwnames, values) ||
        !msc__py_to_bool(values[1], "sampled", &sampled) ||
        !msc__py_read_layout(msc__py_module_state(self), values[0], &found))
        return NULL;
    if (found.device != MSC_DL_CPU)
        return PyErr_Format(PyExc_ValueError,
                            "a fingerprint needs bytes in host memory, and %R on another device "
                            "has none",
                            (PyObject *)Py_TYPE(values[0]));
    return fingerprint_of(&found.tensor, sampled != 0 ? MSC_FINGERPRINT_SAMPLE : MSC_FINGERPRINT_WHOLE);
}
