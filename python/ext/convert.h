/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file convert.h
 * Arguments in, values out: what every binding needs and none should write twice.
 *
 * Functions that return bool give false with a Python exception set. All need the GIL.
 */
#ifndef MSC_EXT_CONVERT_H
#define MSC_EXT_CONVERT_H

#include "pydoor.h"

/* ---- arguments ---------------------------------------------------------------------------------- */

/** Most parameters that a signature may have. */
#define MSC_PY_MAX_PARAMETERS 8

/** The parameters of a function. */
typedef struct msc__py_signature {
    const char *function;     /**< for messages, e.g. "add_op" */
    const char *const *names; /**< `count` of them, in order */
    uint8_t count;
    uint8_t required;   /**< the first so many must be given */
    uint8_t positional; /**< the first so many may be given without their name */
} msc__py_signature;

/** Defines `<function>_signature`: required, positional, then the names. */
#define MSC_PY_SIGNATURE(name, required, positional, ...)                                                    \
    static const char *const name##_names[] = {__VA_ARGS__};                                                 \
    static const msc__py_signature name##_signature = {#name, name##_names, MSC_PY_COUNT(name##_names),      \
                                                       required, positional}

/**
 * Sorts the arguments of a METH_FASTCALL | METH_KEYWORDS call by parameter.
 *
 * @param values one borrowed reference per parameter; NULL where none was given.
 * Errors: TypeError (count, unknown or repeated name), as Python's own functions.
 * Cost: allocates nothing; without keywords, one copy of the pointers.
 */
bool msc__py_bind(const msc__py_signature *signature, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames, PyObject **values);

/**
 * An integer, or anything with `__index__`. `value` NULL (not given) leaves `*out` as it is.
 * @param what the parameter's name for messages.
 * Errors: TypeError; ValueError when out of range.
 * Cost: allocates nothing for an `int` in range.
 */
bool msc__py_to_u64(PyObject *value, const char *what, uint64_t *out);
bool msc__py_to_i64(PyObject *value, const char *what, int64_t *out);
bool msc__py_to_u32(PyObject *value, const char *what, uint32_t max, uint32_t *out);
bool msc__py_to_bool(PyObject *value, const char *what, uint8_t *out);

/** An id: as u32, without MSC_NONE. */
bool msc__py_to_id(PyObject *value, const char *what, uint32_t *out);

/** Exactly 16 lower-case hexadecimal digits. */
bool msc__py_to_hex64(PyObject *value, const char *what, uint64_t *out);

/** UTF-8 of a str without NUL; borrowed from the object. Cost: allocates nothing for an ASCII str. */
bool msc__py_to_string(PyObject *value, const char *what, const char **out);

/**
 * Bytes of a str (UTF-8) or bytes object.
 * @param owner receives a new reference that keeps `*text` alive; the caller drops it.
 */
bool msc__py_to_text(PyObject *value, PyObject **owner, const char **text, size_t *text_bytes);

/* ---- results ------------------------------------------------------------------------------------ */

PyObject *msc__py_from_hex64(uint64_t value);

/** -1 for MSC_NONE. */
long long msc__py_id(uint32_t id);

/** A str; bytes that are not UTF-8 survive as surrogates, and `msc__py_to_text` brings them back. */
PyObject *msc__py_from_text(const char *text, size_t text_bytes);

/** Canonical text of an object, in the manner of `msc_graph_format`; returns false with an exception. */
typedef bool (*msc__py_formatter)(const void *object, char *buffer, size_t buffer_bytes,
                                  size_t *needed_bytes);
PyObject *msc__py_format(msc__py_formatter format, const void *object);

/* ---- records as dicts --------------------------------------------------------------------------- */

/** How a field is stored and shown. */
typedef enum msc__py_field_kind {
    MSC_PY_U64,
    MSC_PY_U64_LIMIT, /**< None and UINT64_MAX mean "no limit" */
    MSC_PY_U64_ABOVE_0,
    MSC_PY_I64,
    MSC_PY_I64_ABOVE_0,
    MSC_PY_U32,
    MSC_PY_BOOL,    /**< uint8_t */
    MSC_PY_HEX64,   /**< uint64_t as 16 digits */
    MSC_PY_SIM_KIND /**< msc_sim_kind as "host" or "cuda" */
} msc__py_field_kind;

/** One field of a C struct. */
typedef struct msc__py_field {
    const char *name;
    msc__py_field_kind kind;
    size_t offset;
} msc__py_field;

/** The fields of one struct. */
typedef struct msc__py_record {
    const char *what; /**< for messages, e.g. "sim" */
    const msc__py_field *fields;
    size_t field_count;
} msc__py_record;

/** A dict with every field. */
PyObject *msc__py_record_to_dict(const msc__py_record *record, const void *data);

/**
 * Sets the fields that a dict names and leaves the others. `dict` NULL or None sets none.
 * Errors: TypeError (not a dict, a field of the wrong type); ValueError (unknown key, out of range).
 */
bool msc__py_record_from_dict(const msc__py_record *record, PyObject *dict, void *data);

#endif /* MSC_EXT_CONVERT_H */
