/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From status to exception.
 *
 *     EINVAL EFORMAT EVERSION EOVERFLOW -> ValueError     the caller's data
 *     ENOMEM                            -> MemoryError    the host's memory
 *     ESTATE                            -> RuntimeError   the order of calls
 *     EIO                               -> OSError        with errno, hence FileNotFoundError and so on
 *     EDEVMEM of a device that is there -> torch.OutOfMemoryError
 *     everything else                   -> memscale.errors.MemScaleError
 *
 * Built-in types where Python has one, so that callers need no import to catch them. Whatever the type,
 * the exception has an attribute `status` with the code's name ("EFORMAT"): a caller who must tell a
 * malformed file from a wrong argument reads that and never the message.
 *
 * `memscale.errors` is imported when it is first needed and not when the extension loads: the package
 * imports the extension, so the reverse at load time would be a cycle.
 */
#include "error.h"

#include <stdarg.h>
#include <string.h>

/** An attribute of a module; NULL with an exception set. */
static PyObject *attribute_of_module(const char *name, const char *attribute)
{
    PyObject *module = PyImport_ImportModule(name);
    PyObject *found = module != NULL ? PyObject_GetAttrString(module, attribute) : NULL;

    Py_XDECREF(module);
    return found;
}

/** PyTorch's own: where it lies in every version, and newer ones have it at the top, too. */
static PyObject *out_of_device_memory(void)
{
    return attribute_of_module("torch.cuda", "OutOfMemoryError");
}

/** A new reference to the exception type for `status`; NULL with an exception set. */
static PyObject *exception_type(msc_status status)
{
    PyObject *type = NULL;

    switch (status) {
    case MSC_EINVAL:
    case MSC_EFORMAT:
    case MSC_EVERSION:
    case MSC_EOVERFLOW:
        type = PyExc_ValueError;
        break;
    case MSC_ENOMEM:
        type = PyExc_MemoryError;
        break;
    case MSC_ESTATE:
        type = PyExc_RuntimeError;
        break;
    case MSC_EIO:
        type = PyExc_OSError;
        break;
    default:
        return attribute_of_module("memscale.errors", "MemScaleError");
    }
    return Py_NewRef(type);
}

/** A new exception object, with `status` attached; NULL with another exception set. Takes `type`. */
static PyObject *exception_new(PyObject *type, msc_status status, int32_t driver_code, PyObject *message)
{
    PyObject *exception = NULL;
    PyObject *name = PyUnicode_FromString(msc_status_name(status));

    if (type == NULL || name == NULL)
        goto done;
    if (status == MSC_EIO && driver_code != 0)
        exception = PyObject_CallFunction(type, "iO", (int)driver_code, message);
    else
        exception = PyObject_CallFunctionObjArgs(type, message, NULL);
    if (exception != NULL && PyObject_SetAttrString(exception, "status", name) < 0)
        Py_CLEAR(exception);
done:
    Py_XDECREF(name);
    Py_XDECREF(type);
    return exception;
}

/** Raises with `type` and `message`, which it takes; NULL is accepted and means an exception is set. */
static PyObject *raise_text(PyObject *type, msc_status status, int32_t driver_code, PyObject *message)
{
    PyObject *exception = NULL;

    if (message == NULL) {
        Py_XDECREF(type);
        return NULL;
    }
    exception = exception_new(type, status, driver_code, message);
    Py_DECREF(message);
    if (exception == NULL)
        return NULL;
    PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    Py_DECREF(exception);
    return NULL;
}

/** A message that was cut to its field may end inside a character. */
static PyObject *message_of(const msc_error *err)
{
    return PyUnicode_DecodeUTF8(err->message, (Py_ssize_t)strlen(err->message), "replace");
}

PyObject *msc__py_raise(const msc_error *err)
{
    return raise_text(exception_type(err->status), err->status, err->driver_code, message_of(err));
}

PyObject *msc__py_raise_of_device(const msc_error *err)
{
    PyObject *type = err->status == MSC_EDEVMEM ? out_of_device_memory() : exception_type(err->status);

    return raise_text(type, err->status, err->driver_code, message_of(err));
}

PyObject *msc__py_refuse(const char *format, ...)
{
    PyObject *message;
    va_list values;

    va_start(values, format);
    message = PyUnicode_FromFormatV(format, values);
    va_end(values);
    return raise_text(exception_type(MSC_EINVAL), MSC_EINVAL, 0, message);
}

PyObject *msc__py_refuse_type(const char *what, const char *wanted, PyObject *value)
{
    return PyErr_Format(PyExc_TypeError, "%s must be %s, not %R", what, wanted, (PyObject *)Py_TYPE(value));
}
