/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_optim_card.h  The type `Card`: an NVIDIA card that runs kernels of ours. */
#ifndef MSC_EXT_PY_OPTIM_CARD_H
#define MSC_EXT_PY_OPTIM_CARD_H

#include "pydoor.h"

#include "memscale/optim.h"

PyTypeObject *msc__py_card_type_new(PyObject *module);

/** The device of a `Card`, which lives as long as the object. */
msc_device *msc__py_card_device(PyObject *card);

/** Its number, as PyTorch and the driver count. */
uint32_t msc__py_card_ordinal(PyObject *card);

#endif /* MSC_EXT_PY_OPTIM_CARD_H */
