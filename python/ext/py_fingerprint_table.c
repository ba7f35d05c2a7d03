/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The types `FingerprintTable` and `KeptFingerprint`. A kept fingerprint is a slot, which goes back with the object: no
 * `__del__` of Python is needed, in which an interrupt would be lost.
 *
 * Calls that submit to the card run without the GIL: one that waits for another thread's read would hold all of Python.
 */
#include "py_fingerprint_table.h"

#include "convert.h"
#include "dlpack_types.h"
#include "error.h"
#include "memscale/fingerprint.h"
#include "module_state.h"
#include "py_fingerprint.h"
#include "py_optim_card.h"

typedef struct table_object {
    PyObject_HEAD msc_context *ctx;
    msc_fingerprint_table *table;
    PyObject *card; /* outlives `table` */
    uint32_t slots;
} table_object;

typedef struct kept_object {
    PyObject_HEAD table_object *of; /* a reference */
    uint32_t slot;
    uint32_t one_in;
} kept_object;

/** A tensor of the table's card. False with an exception. */
static bool read_tensor(PyTypeObject *type, const table_object *table, PyObject *tensor, msc__py_layout *out)
{
    msc__py_state *state = PyType_GetModuleState(type);

    if (state == NULL || !msc__py_read_layout(state, tensor, out))
        return false;
    if (out->device == MSC_DL_CUDA && (uint32_t)out->ordinal == msc__py_card_ordinal(table->card))
        return true;
    (void)PyErr_Format(PyExc_ValueError, "the table is another device's: %R is not on its card",
                       (PyObject *)Py_TYPE(tensor));
    return false;
}

static bool read_stream(PyObject *value, void **out)
{
    uint64_t stream = 0;
    bool read = msc__py_to_u64(value, "stream", &stream);

    *out = (void *)(uintptr_t)stream; // NOLINT(performance-no-int-to-ptr): as PyTorch has it
    return read;
}

/* ---- KeptFingerprint ---------------------------------------------------------------------------- */

static void kept_dealloc(PyObject *object)
{
    kept_object *self = (kept_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->of != NULL)
        msc_fingerprint_release(self->of->table, self->slot);
    Py_XDECREF((PyObject *)self->of);
    PyObject_Free(object);
    Py_DECREF(type);
}

MSC_PY_SIGNATURE(compare, 3, 3, "tensor", "tag", "stream");

MSC_PY_FASTCALL(kept_compare)
{
    kept_object *kept = (kept_object *)self;
    PyObject *values[3];
    uint64_t tag = 0;
    void *stream = NULL;
    msc__py_layout found;
    msc_status status = MSC_OK;
    msc_error err;

    if (!msc__py_bind(&compare_signature, args, nargs, kwnames, values) ||
        !msc__py_to_u64(values[1], "tag", &tag) || !read_stream(values[2], &stream) ||
        !read_tensor(Py_TYPE(self), kept->of, values[0], &found))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status =
        msc_fingerprint_compare(kept->of->table, kept->slot, &found.tensor, kept->one_in, tag, stream, &err);
    Py_END_ALLOW_THREADS
    return status == MSC_OK ? Py_NewRef(Py_None) : msc__py_raise_of_device(&err);
}

static PyObject *kept_value(PyObject *self, PyObject *unused)
{
    kept_object *kept = (kept_object *)self;
    uint64_t value = 0;
    msc_status status = MSC_OK;
    msc_error err;

    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    status = msc_fingerprint_value(kept->of->table, kept->slot, &value, &err);
    Py_END_ALLOW_THREADS
    return status == MSC_OK ? PyLong_FromUnsignedLongLong(value) : msc__py_raise_of_device(&err);
}

static PyMethodDef kept_methods[] = {
    MSC_PY_METHOD("compare", kept_compare, 0,
                  "compare($self, /, tensor, tag, stream)\n--\n\nSubmits a comparison with a tensor."),
    {"value", kept_value, METH_NOARGS, "value($self, /)\n--\n\nThe fingerprint. Waits for the card."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kept_slots[] = {
    {Py_tp_dealloc, kept_dealloc},
    {Py_tp_methods, kept_methods},
    {Py_tp_doc, "A fingerprint on a card, in a slot of a `FingerprintTable`."},
    {0, NULL},
};

static PyType_Spec kept_spec = {
    .name = "memscale._core.KeptFingerprint",
    .basicsize = sizeof(kept_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = kept_slots,
};

PyTypeObject *msc__py_kept_fingerprint_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &kept_spec, NULL);
}

/* ---- FingerprintTable --------------------------------------------------------------------------- */

static bool read_options(const PyTypeObject *card_type, PyObject *card, PyObject *slots,
                         msc_fingerprint_table_options *options)
{
    if (Py_TYPE(card) != card_type) {
        msc__py_refuse_type("card", "a Card", card);
        return false;
    }
    *options = msc_fingerprint_table_options_default();
    options->device = msc__py_card_device(card);
    return msc__py_to_u32(slots, "slots", MSC_FINGERPRINT_MOST_SLOTS, &options->slot_count);
}

static msc_status create(table_object *self, const msc_fingerprint_table_options *options, msc_error *err)
{
    msc_status status = msc_context_create(NULL, &self->ctx, err);

    if (status != MSC_OK)
        return status;
    Py_BEGIN_ALLOW_THREADS /* compiling for a card takes its time */
    status = msc_fingerprint_table_create(self->ctx, options, &self->table, err);
    Py_END_ALLOW_THREADS
    return status;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"card", "slots", NULL};
    const msc__py_state *state = PyType_GetModuleState(type);
    PyObject *card = NULL;
    PyObject *slots = NULL;
    msc_fingerprint_table_options options;
    table_object *self;
    msc_error err;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:FingerprintTable", names, &card, &slots) ||
        !read_options(state->card_type, card, slots, &options))
        return NULL;
    self = (table_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->card = Py_NewRef(card);
    self->slots = options.slot_count;
    if (create(self, &options, &err) != MSC_OK) {
        Py_DECREF((PyObject *)self);
        return msc__py_raise_of_device(&err);
    }
    return (PyObject *)self;
}

static void table_dealloc(PyObject *object)
{
    table_object *self = (table_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    msc_fingerprint_table_destroy(self->table);
    msc_context_destroy(self->ctx);
    Py_XDECREF(self->card);
    PyObject_Free(object);
    Py_DECREF(type);
}

MSC_PY_SIGNATURE(keep, 3, 3, "tensor", "sampled", "stream");

MSC_PY_FASTCALL(table_keep)
{
    table_object *table = (table_object *)self;
    const msc__py_state *state = PyType_GetModuleState(Py_TYPE(self));
    PyObject *values[3];
    uint8_t sampled = 0;
    void *stream = NULL;
    msc__py_layout found;
    kept_object *kept;
    msc_status status = MSC_OK;
    msc_error err;

    if (state == NULL || !msc__py_bind(&keep_signature, args, nargs, kwnames, values) ||
        !msc__py_to_bool(values[1], "sampled", &sampled) || !read_stream(values[2], &stream) ||
        !read_tensor(Py_TYPE(self), table, values[0], &found))
        return NULL;
    kept = (kept_object *)PyType_GenericAlloc(state->kept_fingerprint_type, 0);
    if (kept == NULL)
        return NULL;
    kept->one_in = sampled != 0 ? MSC_FINGERPRINT_SAMPLE : MSC_FINGERPRINT_WHOLE;
    Py_BEGIN_ALLOW_THREADS
    status = msc_fingerprint_keep(table->table, &found.tensor, kept->one_in, stream, &kept->slot, &err);
    Py_END_ALLOW_THREADS
    if (status == MSC_OK) {
        kept->of = (table_object *)Py_NewRef(self);
        return (PyObject *)kept;
    }
    Py_DECREF((PyObject *)kept);
    return status == MSC_EAGAIN ? Py_NewRef(Py_None) : msc__py_raise_of_device(&err);
}

static PyObject *table_read(PyObject *self, PyObject *unused)
{
    msc_fingerprint_differences found = {0};
    msc_status status = MSC_OK;
    msc_error err;

    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    status = msc_fingerprint_read(((table_object *)self)->table, &found, &err);
    Py_END_ALLOW_THREADS
    if (status != MSC_OK)
        return msc__py_raise_of_device(&err);
    if (found.differences == 0)
        return Py_NewRef(Py_None);
    return Py_BuildValue("(KKKK)", (unsigned long long)found.differences, (unsigned long long)found.tag,
                         (unsigned long long)found.kept, (unsigned long long)found.found);
}

static PyObject *table_device_bytes(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(MSC_FINGERPRINT_TABLE_BYTES +
                                       (uint64_t)MSC_FINGERPRINT_SLOT_BYTES * ((table_object *)self)->slots);
}

static PyMethodDef table_methods[] = {
    MSC_PY_METHOD("keep", table_keep, 0,
                  "keep($self, /, tensor, sampled, stream)\n--\n\n"
                  "Submits the fingerprint of a tensor; None: no slot is free."),
    {"read", table_read, METH_NOARGS,
     "read($self, /)\n--\n\nWhat comparisons have found since the last call. Waits for the card."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef table_values[] = {
    {"device_bytes", table_device_bytes, NULL, "What it takes of the card's memory.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_tp_getset, table_values},
    {Py_tp_doc, "FingerprintTable(card, slots=65536)\n--\n\nFingerprints that stay on a card."},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "memscale._core.FingerprintTable",
    .basicsize = sizeof(table_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = table_slots,
};

PyTypeObject *msc__py_fingerprint_table_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &table_spec, NULL);
}
