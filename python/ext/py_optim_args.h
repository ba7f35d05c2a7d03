/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file py_optim_args.h
 * Arguments of `Optim`: rules as dicts, arrays as addresses with their bytes.
 *
 * Every array comes with its bytes, and they must be those that the rule asks for: the core believes its caller, and a
 * tensor that has been given other data must not make it write beyond the end. Functions that return bool give false
 * with a Python exception set.
 */
#ifndef MSC_EXT_PY_OPTIM_ARGS_H
#define MSC_EXT_PY_OPTIM_ARGS_H

#include "pydoor.h"

#include "memscale/optim.h"

/** A dict: "kind" is required, whatever else is left out has the kind's default. */
bool msc__py_to_rule_of_optim(PyObject *value, msc_optim_rule *out);

/** One of `count` names. */
bool msc__py_to_name(PyObject *value, const char *what, const char *const *names, uint32_t count,
                     uint32_t *out);

/** Names of `msc_optim_weights`: "fp32", "master_fp32", "master_rest16", "master_rest8". */
bool msc__py_to_form(PyObject *value, msc_optim_weights *out);

/** What a call works on; PyMem_Free. */
typedef struct msc__py_tensors {
    msc_optim_tensor *items;
    Py_ssize_t count;
} msc__py_tensors;

/**
 * A tensor: (count, first, step) and then (address, bytes) of gradient, weight, master, moment1, moment2, scale1, scale2.
 * @param moments_only whether gradient, weight and master are not looked at.
 */
bool msc__py_to_optim_tensor(PyObject *value, const msc_optim_rule *rule, Py_ssize_t index, bool moments_only,
                             msc_optim_tensor *out);

/** A list of tensors. `out->items` is the caller's also where it fails. */
bool msc__py_to_optim_tensors(PyObject *value, const msc_optim_rule *rule, msc__py_tensors *out);

/** (address, bytes). */
bool msc__py_to_span(PyObject *value, const char *what, void **at, uint64_t *bytes);

/** (address, bytes), where the bytes must be `bytes`. */
bool msc__py_to_span_of(PyObject *value, const char *what, uint64_t bytes, void **at);

/** (address, bytes, type): "fp32", "bf16" or "fp16". */
bool msc__py_to_optim_array(PyObject *value, const char *what, msc_optim_array *out);

uint64_t msc__py_float_bytes(msc_optim_float type);

#endif /* MSC_EXT_PY_OPTIM_ARGS_H */
