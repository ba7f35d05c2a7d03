/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_fingerprint.h  `fingerprint`: a tensor in host memory as 64 bits; and how tensors lie. */
#ifndef MSC_EXT_PY_FINGERPRINT_H
#define MSC_EXT_PY_FINGERPRINT_H

#include "pydoor.h"

#include "memscale/fingerprint.h"
#include "module_state.h"

/** A tensor's layout, and room for what is not borrowed. The tensor must stay. */
typedef struct msc__py_layout {
    msc_fingerprint_tensor tensor;
    int64_t sizes[MSC_FINGERPRINT_DIMS];
    int64_t strides[MSC_FINGERPRINT_DIMS];
    int32_t device;  /* MSC_DL_CPU, MSC_DL_CUDA, or another one of DLPack's */
    int32_t ordinal; /* on the host 0 */
} msc__py_layout;

/**
 * How a `torch.Tensor` lies in the memory of its device.
 * Errors: TypeError (no tensor); ValueError (sparse, nested, fake, inside of a transform).
 */
bool msc__py_read_layout(msc__py_state *state, PyObject *tensor, msc__py_layout *out);

PyObject *msc__py_fingerprint(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);

#endif /* MSC_EXT_PY_FINGERPRINT_H */
