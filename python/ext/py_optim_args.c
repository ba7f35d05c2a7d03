/* SPDX-License-Identifier: Apache-2.0 */
#include "py_optim_args.h"

#include <string.h>

#include "convert.h"
#include "error.h"

static const char *const kind_names[] = {"adamw", "adam", "sgd", "lion"};
_Static_assert(MSC_PY_COUNT(kind_names) == MSC_OPTIM_KIND_COUNT, "a name for every kind");
static const char *const float_names[] = {"fp32", "bf16", "fp16"};
_Static_assert(MSC_PY_COUNT(float_names) == MSC_OPTIM_FLOAT_COUNT, "a name for every type");
static const char *const weight_names[] = {"fp32", "master_fp32", "master_rest16", "master_rest8"};
_Static_assert(MSC_PY_COUNT(weight_names) == MSC_OPTIM_WEIGHTS_COUNT, "a name for every form");
static const char *const moment_names[] = {"fp32", "bf16", "code8"};
_Static_assert(MSC_PY_COUNT(moment_names) == MSC_OPTIM_MOMENTS_COUNT, "a name for every form");

/* ---- names and numbers -------------------------------------------------------------------------- */

bool msc__py_to_name(PyObject *value, const char *what, const char *const *names, uint32_t count,
                     uint32_t *out)
{
    const char *text = NULL;
    PyObject *allowed;

    if (!msc__py_to_string(value, what, &text))
        return false;
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = i;
            return true;
        }
    }
    allowed = PyUnicode_FromString(names[0]);
    for (uint32_t i = 1; allowed != NULL && i < count; i++) {
        PyObject *longer = PyUnicode_FromFormat("%U, %s", allowed, names[i]);

        Py_DECREF(allowed);
        allowed = longer;
    }
    if (allowed != NULL)
        msc__py_refuse("%s is %R, allowed are %U", what, value, allowed);
    Py_XDECREF(allowed);
    return false;
}

bool msc__py_to_form(PyObject *value, msc_optim_weights *out)
{
    uint32_t number = 0;

    if (!msc__py_to_name(value, "form", weight_names, MSC_OPTIM_WEIGHTS_COUNT, &number))
        return false;
    *out = (msc_optim_weights)number;
    return true;
}

static bool to_double(PyObject *value, const char *what, double *out)
{
    double number = PyFloat_AsDouble(value);

    if (number == -1.0 && PyErr_Occurred() != NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            msc__py_refuse_type(what, "a number", value);
        }
        return false;
    }
    *out = number;
    return true;
}

/* ---- rules -------------------------------------------------------------------------------------- */

typedef enum rule_field_kind { RULE_NAME, RULE_DOUBLE, RULE_FLAG } rule_field_kind;

typedef struct rule_field {
    const char *name;
    rule_field_kind kind;
    size_t offset;
    const char *const *names;
    uint32_t name_count;
} rule_field;

#define NAMED(field, list)                                                                                   \
    {                                                                                                        \
#field, RULE_NAME, offsetof(msc_optim_rule, field), list, MSC_PY_COUNT(list)                         \
    }
#define PLAIN(field, kind)                                                                                   \
    {                                                                                                        \
#field, kind, offsetof(msc_optim_rule, field), NULL, 0                                               \
    }

static const rule_field rule_fields[] = {
    NAMED(kind, kind_names),      NAMED(gradient, float_names),      NAMED(weights, weight_names),
    NAMED(moments, moment_names), PLAIN(learning_rate, RULE_DOUBLE), PLAIN(beta1, RULE_DOUBLE),
    PLAIN(beta2, RULE_DOUBLE),    PLAIN(epsilon, RULE_DOUBLE),       PLAIN(weight_decay, RULE_DOUBLE),
    PLAIN(momentum, RULE_DOUBLE), PLAIN(dampening, RULE_DOUBLE),     PLAIN(nesterov, RULE_FLAG),
    PLAIN(maximize, RULE_FLAG),
};

static bool set_rule_field(const rule_field *field, PyObject *value, msc_optim_rule *rule)
{
    char *at = (char *)rule + field->offset;
    uint32_t number = 0;
    uint8_t flag = 0;

    switch (field->kind) {
    case RULE_NAME: /* enumerations of the C API are unsigned int wide */
        if (!msc__py_to_name(value, field->name, field->names, field->name_count, &number))
            return false;
        memcpy(at, &number, sizeof number);
        return true;
    case RULE_DOUBLE:
        return to_double(value, field->name, (double *)(void *)at);
    case RULE_FLAG:
        if (!msc__py_to_bool(value, field->name, &flag))
            return false;
        *(uint32_t *)(void *)at = flag;
        return true;
    }
    return false;
}
_Static_assert(sizeof(msc_optim_kind) == sizeof(uint32_t), "names are stored as uint32_t");

static bool set_rule_item(PyObject *key, PyObject *value, msc_optim_rule *rule)
{
    double scale = 1.0;

    for (size_t i = 0; PyUnicode_Check(key) && i < MSC_PY_COUNT(rule_fields); i++) {
        if (PyUnicode_CompareWithASCIIString(key, rule_fields[i].name) == 0)
            return set_rule_field(&rule_fields[i], value, rule);
    }
    if (PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, "gradient_scale") == 0) {
        if (!to_double(value, "gradient_scale", &scale))
            return false;
        rule->gradient_scale = (float)scale;
        return true;
    }
    msc__py_refuse("rule has no key %R", key);
    return false;
}

bool msc__py_to_rule_of_optim(PyObject *value, msc_optim_rule *out)
{
    PyObject *kind;
    PyObject *key = NULL;
    PyObject *item = NULL;
    Py_ssize_t at = 0;
    uint32_t number = 0;
    bool ok = true;

    if (!PyDict_Check(value)) {
        msc__py_refuse_type("rule", "a dict", value);
        return false;
    }
    kind = PyDict_GetItemString(value, "kind");
    if (kind == NULL) {
        msc__py_refuse("rule has no kind, which is required");
        return false;
    }
    if (!msc__py_to_name(kind, "kind", kind_names, MSC_OPTIM_KIND_COUNT, &number))
        return false;
    *out = msc_optim_rule_default((msc_optim_kind)number);
    while (ok && PyDict_Next(value, &at, &key, &item)) {
        Py_INCREF(key); /* borrowed, and `__float__` of a value may change the dict */
        Py_INCREF(item);
        ok = set_rule_item(key, item, out);
        Py_DECREF(item);
        Py_DECREF(key);
    }
    return ok;
}

/* ---- arrays ------------------------------------------------------------------------------------- */

uint64_t msc__py_float_bytes(msc_optim_float type)
{
    return type == MSC_OPTIM_FLOAT_FP32 ? 4 : 2;
}

static bool to_tuple(PyObject *value, const char *what, Py_ssize_t size)
{
    if (PyTuple_Check(value) && PyTuple_Size(value) == size)
        return true;
    PyErr_Format(PyExc_TypeError, "%s must be a tuple of %zd, not %R", what, size, value);
    return false;
}

/* An address is any number that fits a pointer: nothing can be said about it here. */
static bool to_address(PyObject *value, const char *what, void **out)
{
    uint64_t number = 0;

    if (!msc__py_to_u64(value, what, &number))
        return false;
    if (number > UINTPTR_MAX) {
        msc__py_refuse("%s is %R, which is no address", what, value);
        return false;
    }
    *out = (void *)(uintptr_t)number;
    return true;
}

static bool to_pair(PyObject *tuple, Py_ssize_t at, const char *what, void **address, uint64_t *bytes)
{
    return to_address(PyTuple_GetItem(tuple, at), what, address) &&
           msc__py_to_u64(PyTuple_GetItem(tuple, at + 1), what, bytes);
}

bool msc__py_to_span(PyObject *value, const char *what, void **at, uint64_t *bytes)
{
    return to_tuple(value, what, 2) && to_pair(value, 0, what, at, bytes);
}

bool msc__py_to_span_of(PyObject *value, const char *what, uint64_t bytes, void **at)
{
    uint64_t given = 0;

    if (!msc__py_to_span(value, what, at, &given))
        return false;
    if (given != bytes) {
        msc__py_refuse("%s has %llu bytes, it must have %llu", what, (unsigned long long)given,
                       (unsigned long long)bytes);
        return false;
    }
    return true;
}

bool msc__py_to_optim_array(PyObject *value, const char *what, msc_optim_array *out)
{
    void *at = NULL;
    uint64_t bytes = 0;
    uint32_t type = 0;

    if (!to_tuple(value, what, 3) || !to_pair(value, 0, what, &at, &bytes) ||
        !msc__py_to_name(PyTuple_GetItem(value, 2), what, float_names, MSC_OPTIM_FLOAT_COUNT, &type))
        return false;
    out->values = at;
    out->type = (msc_optim_float)type;
    out->count = bytes / msc__py_float_bytes(out->type);
    if (bytes % msc__py_float_bytes(out->type) != 0) {
        msc__py_refuse("%s has %llu bytes, which are no whole number of %s", what, (unsigned long long)bytes,
                       float_names[type]);
        return false;
    }
    return true;
}

/* ---- tensors ------------------------------------------------------------------------------------ */

enum { TENSOR_ITEMS = 17, ARRAYS_AT = 3, MOMENTS_FROM = 3, ARRAY_COUNT = 7 };

static bool check_bytes(const char *name, Py_ssize_t index, uint64_t given, uint64_t wanted)
{
    if (given == wanted)
        return true;
    msc__py_refuse("%s of tensor %zd has %llu bytes, it must have %llu", name, index,
                   (unsigned long long)given, (unsigned long long)wanted);
    return false;
}

bool msc__py_to_optim_tensor(PyObject *value, const msc_optim_rule *rule, Py_ssize_t index, bool moments_only,
                             msc_optim_tensor *out)
{
    static const char *const names[ARRAY_COUNT] = {"gradient", "weight", "master", "moment1",
                                                   "moment2",  "scale1", "scale2"};
    void *at[ARRAY_COUNT];
    msc_optim_sizes sizes;
    msc_error err;

    memset(out, 0, sizeof *out);
    if (!to_tuple(value, "a tensor", TENSOR_ITEMS) ||
        !msc__py_to_u64(PyTuple_GetItem(value, 0), "count", &out->count) ||
        !msc__py_to_u64(PyTuple_GetItem(value, 1), "first", &out->first) ||
        !msc__py_to_u64(PyTuple_GetItem(value, 2), "step", &out->step))
        return false;
    if (msc_optim_tensor_sizes(rule, out->count, &sizes, &err) != MSC_OK)
        return msc__py_raise(&err) != NULL;
    const uint64_t wanted[ARRAY_COUNT] = {
        sizes.gradient_bytes, sizes.weight_bytes, sizes.master_bytes, sizes.moment1_bytes,
        sizes.moment2_bytes,  sizes.scale1_bytes, sizes.scale2_bytes,
    };
    for (Py_ssize_t i = 0; i < ARRAY_COUNT; i++) {
        uint64_t bytes = 0;

        if (!to_pair(value, ARRAYS_AT + 2 * i, names[i], &at[i], &bytes))
            return false;
        if ((i >= MOMENTS_FROM || !moments_only) && !check_bytes(names[i], index, bytes, wanted[i]))
            return false;
    }
    out->gradient = at[0];
    out->weight = at[1];
    out->master = at[2];
    out->moment1 = at[3];
    out->moment2 = at[4];
    out->scale1 = at[5];
    out->scale2 = at[6];
    return true;
}

bool msc__py_to_optim_tensors(PyObject *value, const msc_optim_rule *rule, msc__py_tensors *out)
{
    out->items = NULL;
    out->count = 0;
    if (!PyList_Check(value)) {
        msc__py_refuse_type("tensors", "a list", value);
        return false;
    }
    out->count = PyList_Size(value);
    out->items = PyMem_Malloc((size_t)(out->count + 1) * sizeof *out->items);
    if (out->items == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < out->count; i++) {
        PyObject *item = PyList_GetItem(value, i);
        bool ok;

        if (item == NULL)
            return false;
        Py_INCREF(item); /* `__index__` of a number may change the list */
        ok = msc__py_to_optim_tensor(item, rule, i, false, &out->items[i]);
        Py_DECREF(item);
        if (!ok)
            return false;
    }
    return true;
}
