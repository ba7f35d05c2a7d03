/* SPDX-License-Identifier: Apache-2.0 */
/** @file pydoor.h  Python.h as every file here must see it: limited API of CPython 3.10. Include first. */
#ifndef MSC_EXT_PYDOOR_H
#define MSC_EXT_PYDOOR_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Number of elements of an array. */
#define MSC_PY_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/** Head of a function that takes arguments by METH_FASTCALL | METH_KEYWORDS. */
#define MSC_PY_FASTCALL(function)                                                                            \
    static PyObject *function(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)

/** Entry of a method table for such a function; `extra` is 0 or METH_CLASS. */
#define MSC_PY_METHOD(name, function, extra, doc)                                                            \
    {                                                                                                        \
        name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS | (extra), doc          \
    }

#endif /* MSC_EXT_PYDOOR_H */
