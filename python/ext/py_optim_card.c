/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `Card`. It opens the driver when it is made; kernels are compiled when an `Optim` or a
 * `FingerprintTable` first needs them, and are kept with it, so one object serves all streams of a card.
 */
#include "py_optim_card.h"

#include "convert.h"
#include "error.h"

typedef struct card_object {
    PyObject_HEAD msc_context *ctx;
    msc_device *device;
    uint32_t ordinal;
} card_object;

msc_device *msc__py_card_device(PyObject *card)
{
    return ((card_object *)card)->device;
}

uint32_t msc__py_card_ordinal(PyObject *card)
{
    return ((card_object *)card)->ordinal;
}

/** A file name; None and NULL: the system's. */
static bool read_name(PyObject *value, const char *what, const char **out)
{
    *out = NULL;
    return value == NULL || value == Py_None || msc__py_to_string(value, what, out);
}

static PyObject *card_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ordinal", "compiler", "library", NULL};
    PyObject *ordinal = NULL;
    PyObject *compiler = NULL;
    PyObject *library = NULL;
    msc_device_options options = msc_device_options_default();
    card_object *self;
    msc_status status;
    msc_error err;

    options.kind = MSC_DEVICE_CUDA;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OOO:Card", names, &ordinal, &compiler, &library) ||
        !msc__py_to_u32(ordinal, "ordinal", INT32_MAX, &options.ordinal) ||
        !read_name(compiler, "compiler", &options.compiler) ||
        !read_name(library, "library", &options.library))
        return NULL;
    self = (card_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->ordinal = options.ordinal;
    status = msc_context_create(NULL, &self->ctx, &err);
    if (status == MSC_OK) {
        Py_BEGIN_ALLOW_THREADS /* the driver may have to start */
        status = msc_device_create(self->ctx, &options, &self->device, &err);
        Py_END_ALLOW_THREADS
    }
    if (status == MSC_OK)
        return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return msc__py_raise_of_device(&err);
}

static void card_dealloc(PyObject *object)
{
    card_object *self = (card_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    msc_device_destroy(self->device);
    msc_context_destroy(self->ctx);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *card_name(PyObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(msc_device_name(msc__py_card_device(self)));
}

static PyGetSetDef card_values[] = {
    {"name", card_name, NULL, "What the driver calls it.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot card_slots[] = {
    {Py_tp_new, card_new},
    {Py_tp_dealloc, card_dealloc},
    {Py_tp_getset, card_values},
    {Py_tp_doc, "Card(ordinal=0, compiler=None, library=None)\n--\n\n"
                "An NVIDIA card in the context that PyTorch uses, for an `Optim` or a `FingerprintTable`."},
    {0, NULL},
};

static PyType_Spec card_spec = {
    .name = "memscale._core.Card",
    .basicsize = sizeof(card_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = card_slots,
};

PyTypeObject *msc__py_card_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &card_spec, NULL);
}
