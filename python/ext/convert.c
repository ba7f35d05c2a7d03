/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Conversions between Python objects and the plain C values of the core.
 *
 * Three groups, as in the header:
 *
 *  - `bind` and the `to_` functions stand on the hot path of a trace, where one step makes 10^5 calls of
 *    the graph builder. They work on borrowed references and allocate only to raise.
 *  - `from_` functions make results.
 *  - A record is a table of (name, kind, offset) that reads and writes a C struct as a dict. It is what
 *    makes options, summaries and statistics appear under their C names, without one line per field.
 *
 * An integer out of range is a ValueError with the parameter's name and the allowed range, not Python's
 * nameless OverflowError.
 */
#include "convert.h"

#include <string.h>

#include "error.h"
#include "memscale/sim.h"

/* ---- arguments ---------------------------------------------------------------------------------- */

static bool bind_keyword(const msc__py_signature *signature, PyObject *name, PyObject *value,
                         PyObject **values)
{
    for (uint8_t i = 0; i < signature->count; i++) {
        if (PyUnicode_CompareWithASCIIString(name, signature->names[i]) != 0)
            continue;
        if (values[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'", signature->function,
                         signature->names[i]);
            return false;
        }
        values[i] = value;
        return true;
    }
    PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", signature->function, name);
    return false;
}

bool msc__py_bind(const msc__py_signature *signature, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames, PyObject **values)
{
    Py_ssize_t keyword_count = kwnames == NULL ? 0 : PyTuple_Size(kwnames);

    if (nargs > signature->positional) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d positional arguments (%zd given)",
                     signature->function, (int)signature->positional, nargs);
        return false;
    }
    for (uint8_t i = 0; i < signature->count; i++)
        values[i] = i < nargs ? args[i] : NULL;
    for (Py_ssize_t i = 0; i < keyword_count; i++) {
        if (!bind_keyword(signature, PyTuple_GetItem(kwnames, i), args[nargs + i], values))
            return false;
    }
    for (uint8_t i = 0; i < signature->required; i++) {
        if (values[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'", signature->function,
                         signature->names[i]);
            return false;
        }
    }
    return true;
}

/** After a failed fast path: an int object for `value`, or NULL with TypeError. New reference. */
static PyObject *as_int(PyObject *value, const char *what)
{
    PyErr_Clear();
    if (!PyIndex_Check(value)) {
        msc__py_refuse_type(what, "an int", value);
        return NULL;
    }
    return PyNumber_Index(value);
}

/** Replaces an OverflowError by a ValueError that names the range. Always false. */
static bool refuse_range(const char *what, PyObject *value, const char *range)
{
    PyErr_Clear();
    msc__py_refuse("%s must be in %s, not %S", what, range, value);
    return false;
}

#define U64_RANGE "0 to 18446744073709551615"
#define I64_RANGE "-9223372036854775808 to 9223372036854775807"

bool msc__py_to_u64(PyObject *value, const char *what, uint64_t *out)
{
    unsigned long long number;
    PyObject *integer;

    if (value == NULL)
        return true;
    number = PyLong_AsUnsignedLongLong(value);
    if (number == ULLONG_MAX && PyErr_Occurred() != NULL) {
        integer = as_int(value, what);
        if (integer == NULL)
            return false;
        number = PyLong_AsUnsignedLongLong(integer);
        Py_DECREF(integer);
        if (number == ULLONG_MAX && PyErr_Occurred() != NULL)
            return refuse_range(what, value, U64_RANGE);
    }
    *out = number;
    return true;
}

bool msc__py_to_i64(PyObject *value, const char *what, int64_t *out)
{
    long long number;
    PyObject *integer;

    if (value == NULL)
        return true;
    number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred() != NULL) {
        integer = as_int(value, what);
        if (integer == NULL)
            return false;
        number = PyLong_AsLongLong(integer);
        Py_DECREF(integer);
        if (number == -1 && PyErr_Occurred() != NULL)
            return refuse_range(what, value, I64_RANGE);
    }
    *out = number;
    return true;
}

bool msc__py_to_u32(PyObject *value, const char *what, uint32_t max, uint32_t *out)
{
    uint64_t number = 0;

    if (value == NULL)
        return true;
    if (!msc__py_to_u64(value, what, &number))
        return false;
    if (number > max) {
        msc__py_refuse("%s must be in 0 to %lu, not %S", what, (unsigned long)max, value);
        return false;
    }
    *out = (uint32_t)number;
    return true;
}

bool msc__py_to_id(PyObject *value, const char *what, uint32_t *out)
{
    return msc__py_to_u32(value, what, MSC_NONE - 1, out);
}

bool msc__py_to_bool(PyObject *value, const char *what, uint8_t *out)
{
    if (value == NULL)
        return true;
    if (value != Py_True && value != Py_False) {
        msc__py_refuse_type(what, "a bool", value);
        return false;
    }
    *out = value == Py_True;
    return true;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return -1;
}

bool msc__py_to_hex64(PyObject *value, const char *what, uint64_t *out)
{
    const char *text = NULL;
    uint64_t number = 0;

    if (value == NULL)
        return true;
    if (!msc__py_to_string(value, what, &text))
        return false;
    for (size_t i = 0; i < 16; i++) {
        int digit = hex_digit(text[i]);

        if (digit < 0)
            goto refuse;
        number = number << 4 | (uint64_t)digit;
    }
    if (text[16] != '\0')
        goto refuse;
    *out = number;
    return true;
refuse:
    msc__py_refuse("%s must be 16 lower-case hexadecimal digits, not %R", what, value);
    return false;
}

bool msc__py_to_string(PyObject *value, const char *what, const char **out)
{
    Py_ssize_t length = 0;
    const char *text;

    if (!PyUnicode_Check(value)) {
        msc__py_refuse_type(what, "a str", value);
        return false;
    }
    text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == NULL)
        return false;
    if (strlen(text) != (size_t)length) {
        msc__py_refuse("%s must not contain a null character: %R", what, value);
        return false;
    }
    *out = text;
    return true;
}

bool msc__py_to_text(PyObject *value, PyObject **owner, const char **text, size_t *text_bytes)
{
    char *bytes = NULL;
    Py_ssize_t length = 0;

    if (PyUnicode_Check(value)) {
        *owner = PyUnicode_AsEncodedString(value, "utf-8", "surrogateescape");
    } else if (PyBytes_Check(value)) {
        Py_INCREF(value);
        *owner = value;
    } else {
        msc__py_refuse_type("text", "a str or bytes", value);
        *owner = NULL;
    }
    if (*owner == NULL)
        return false;
    if (PyBytes_AsStringAndSize(*owner, &bytes, &length) < 0) {
        Py_CLEAR(*owner);
        return false;
    }
    *text = bytes;
    *text_bytes = (size_t)length;
    return true;
}

/* ---- results ------------------------------------------------------------------------------------ */

PyObject *msc__py_from_hex64(uint64_t value)
{
    static const char digits[] = "0123456789abcdef";
    char text[16];

    for (int i = 15; i >= 0; i--) {
        text[i] = digits[value & 15];
        value >>= 4;
    }
    return PyUnicode_FromStringAndSize(text, sizeof(text));
}

long long msc__py_id(uint32_t id)
{
    return id == MSC_NONE ? -1 : (long long)id;
}

PyObject *msc__py_from_text(const char *text, size_t text_bytes)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)text_bytes, "surrogateescape");
}

PyObject *msc__py_format(msc__py_formatter format, const void *object)
{
    size_t needed_bytes = 0;
    char *buffer = NULL;
    PyObject *result = NULL;

    if (!format(object, NULL, 0, &needed_bytes))
        return NULL;
    buffer = PyMem_Malloc(needed_bytes + 1);
    if (buffer == NULL)
        return PyErr_NoMemory();
    if (format(object, buffer, needed_bytes + 1, &needed_bytes))
        result = msc__py_from_text(buffer, needed_bytes);
    PyMem_Free(buffer);
    return result;
}

/* ---- records as dicts --------------------------------------------------------------------------- */

static const char *const SIM_KINDS[] = {"host", "cuda"};
_Static_assert(MSC_PY_COUNT(SIM_KINDS) == MSC_SIM_KIND_COUNT, "a name for every kind of simulator");

static PyObject *field_get(const msc__py_field *field, const void *data)
{
    const char *at = (const char *)data + field->offset;
    PyObject *result = NULL;

    switch (field->kind) {
    case MSC_PY_U64:
    case MSC_PY_U64_LIMIT:
    case MSC_PY_U64_ABOVE_0:
        result = PyLong_FromUnsignedLongLong(*(const uint64_t *)(const void *)at);
        break;
    case MSC_PY_I64:
    case MSC_PY_I64_ABOVE_0:
        result = PyLong_FromLongLong(*(const int64_t *)(const void *)at);
        break;
    case MSC_PY_U32:
        result = PyLong_FromUnsignedLong(*(const uint32_t *)(const void *)at);
        break;
    case MSC_PY_BOOL:
        result = PyBool_FromLong(*(const uint8_t *)at);
        break;
    case MSC_PY_HEX64:
        result = msc__py_from_hex64(*(const uint64_t *)(const void *)at);
        break;
    case MSC_PY_SIM_KIND:
        result = PyUnicode_FromString(SIM_KINDS[*(const msc_sim_kind *)(const void *)at]);
        break;
    }
    return result;
}

static bool sim_kind_set(PyObject *value, const char *what, msc_sim_kind *out)
{
    const char *text = NULL;

    if (!msc__py_to_string(value, what, &text))
        return false;
    for (size_t i = 0; i < MSC_PY_COUNT(SIM_KINDS); i++) {
        if (strcmp(text, SIM_KINDS[i]) == 0) {
            *out = (msc_sim_kind)i;
            return true;
        }
    }
    msc__py_refuse("%s must be 'host' or 'cuda', not %R", what, value);
    return false;
}

static bool u64_above_0(PyObject *value, const char *what, uint64_t *out)
{
    if (!msc__py_to_u64(value, what, out))
        return false;
    if (*out == 0)
        msc__py_refuse("%s must be above 0, not 0", what);
    return *out != 0;
}

static bool i64_above_0(PyObject *value, const char *what, int64_t *out)
{
    if (!msc__py_to_i64(value, what, out))
        return false;
    if (*out <= 0)
        msc__py_refuse("%s must be above 0, not %S", what, value);
    return *out > 0;
}

static bool field_set(const msc__py_field *field, PyObject *value, void *data)
{
    void *at = (char *)data + field->offset;

    switch (field->kind) {
    case MSC_PY_U64:
        return msc__py_to_u64(value, field->name, at);
    case MSC_PY_U64_LIMIT:
        if (value == Py_None) {
            *(uint64_t *)at = UINT64_MAX;
            return true;
        }
        return msc__py_to_u64(value, field->name, at);
    case MSC_PY_U64_ABOVE_0:
        return u64_above_0(value, field->name, at);
    case MSC_PY_I64:
        return msc__py_to_i64(value, field->name, at);
    case MSC_PY_I64_ABOVE_0:
        return i64_above_0(value, field->name, at);
    case MSC_PY_U32:
        return msc__py_to_u32(value, field->name, UINT32_MAX, at);
    case MSC_PY_BOOL:
        return msc__py_to_bool(value, field->name, at);
    case MSC_PY_HEX64:
        return msc__py_to_hex64(value, field->name, at);
    case MSC_PY_SIM_KIND:
        return sim_kind_set(value, field->name, at);
    }
    return false;
}

PyObject *msc__py_record_to_dict(const msc__py_record *record, const void *data)
{
    PyObject *dict = PyDict_New();

    for (size_t i = 0; dict != NULL && i < record->field_count; i++) {
        PyObject *value = field_get(&record->fields[i], data);

        if (value == NULL || PyDict_SetItemString(dict, record->fields[i].name, value) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

static const msc__py_field *field_find(const msc__py_record *record, PyObject *key)
{
    for (size_t i = 0; PyUnicode_Check(key) && i < record->field_count; i++) {
        if (PyUnicode_CompareWithASCIIString(key, record->fields[i].name) == 0)
            return &record->fields[i];
    }
    return NULL;
}

bool msc__py_record_from_dict(const msc__py_record *record, PyObject *dict, void *data)
{
    PyObject *key = NULL;
    PyObject *value = NULL;
    Py_ssize_t at = 0;
    bool ok = true;

    if (dict == NULL || dict == Py_None)
        return true;
    if (!PyDict_Check(dict)) {
        msc__py_refuse_type(record->what, "a dict", dict);
        return false;
    }
    while (ok && PyDict_Next(dict, &at, &key, &value)) {
        const msc__py_field *field = field_find(record, key);

        /* Borrowed references, and `__index__` of a value may run code that changes the dict. */
        Py_INCREF(key);
        Py_INCREF(value);
        if (field != NULL) {
            ok = field_set(field, value, data);
        } else {
            ok = false;
            msc__py_refuse("%s has no key %R", record->what, key);
        }
        Py_DECREF(value);
        Py_DECREF(key);
    }
    return ok;
}
