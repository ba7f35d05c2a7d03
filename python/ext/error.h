/* SPDX-License-Identifier: Apache-2.0 */
/** @file error.h  The one place where a status of the core becomes a Python exception. */
#ifndef MSC_EXT_ERROR_H
#define MSC_EXT_ERROR_H

#include "pydoor.h"

#include "memscale/status.h"

/** Raises what `err` says. Returns NULL, so that a failure is one statement. Threads: needs the GIL. */
PyObject *msc__py_raise(const msc_error *err);

/** As `msc__py_raise`, for what a device that is there has said: EDEVMEM is torch.OutOfMemoryError, which is PyTorch's and
    stays so (memscale/errors.py). That of a simulated one is not. */
PyObject *msc__py_raise_of_device(const msc_error *err);

/**
 * Raises an argument error that the extension found itself: status EINVAL, hence ValueError.
 * @param format as in `PyUnicode_FromFormat`.
 * Returns NULL.
 */
PyObject *msc__py_refuse(const char *format, ...);

/** Raises TypeError: `<what> must be <wanted>, not <type of value>`. Returns NULL. */
PyObject *msc__py_refuse_type(const char *what, const char *wanted, PyObject *value);

#endif /* MSC_EXT_ERROR_H */
