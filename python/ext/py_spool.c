/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `Spool`: a file of a recorder, batch by batch, each as the request that a server takes.
 *
 * Reading and making the text of a request happen without the GIL, so a thread that sends takes none of the
 * time of one that trains. One thread uses an object at a time; another one is refused.
 */
#include "py_record.h"

#include <string.h>

#include "convert.h"
#include "error.h"
#include "memscale/record.h"

typedef struct spool {
    PyObject_HEAD msc_context *ctx;
    msc_spool *spool;
    msc_spool_batch batch; /* the one that was given last */
    bool has_batch, is_used;
} spool;

static PyObject *spool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", "offset", NULL};
    unsigned long long offset = 0;
    PyObject *path = NULL;
    msc_error err;
    msc_status status;
    spool *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|K:Spool", names, PyUnicode_FSConverter, &path,
                                     &offset))
        return NULL;
    self = (spool *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        Py_DECREF(path);
        return NULL;
    }
    status = msc_context_create(NULL, &self->ctx, &err);
    if (status == MSC_OK) {
        const char *text = PyBytes_AsString(path);

        Py_BEGIN_ALLOW_THREADS
        status = msc_spool_load(self->ctx, text, offset, &self->spool, &err);
        Py_END_ALLOW_THREADS
    }
    Py_DECREF(path);
    if (status == MSC_OK)
        return (PyObject *)self;
    Py_DECREF(self);
    return msc__py_raise(&err);
}

static void spool_dealloc(PyObject *object)
{
    spool *self = (spool *)object;
    PyTypeObject *type = Py_TYPE(object);

    msc_spool_destroy(self->spool);
    msc_context_destroy(self->ctx);
    PyObject_Free(object);
    Py_DECREF(type);
}

/** Whether nobody else is in a call. Raises otherwise. */
static bool is_free(const spool *self)
{
    if (self->is_used)
        PyErr_SetString(PyExc_RuntimeError, "another thread uses this spool");
    return !self->is_used;
}

static PyObject *spool_next(PyObject *object, PyObject *unused)
{
    spool *self = (spool *)object;
    const msc_spool_batch *batch = &self->batch;

    (void)unused;
    if (!is_free(self))
        return NULL;
    self->is_used = true;
    Py_BEGIN_ALLOW_THREADS
    self->has_batch = msc_spool_next(self->spool, &self->batch) != 0;
    Py_END_ALLOW_THREADS
    self->is_used = false;
    if (!self->has_batch)
        return Py_NewRef(Py_None);
    return Py_BuildValue("{s:K,s:K,s:I,s:I,s:I,s:I,s:N,s:i}", "begin", (unsigned long long)batch->begin,
                         "end", (unsigned long long)batch->end, "sequence", (unsigned)batch->sequence,
                         "values", (unsigned)batch->value_count, "events", (unsigned)batch->event_count,
                         "documents", (unsigned)batch->document_count, "is_complete",
                         PyBool_FromLong(batch->is_complete), "end_state", (int)batch->end_state);
}

static PyObject *spool_body(PyObject *object, PyObject *client)
{
    spool *self = (spool *)object;
    const char *name = NULL;
    const char *text = NULL;
    size_t bytes = 0;
    msc_error err;
    msc_status status;
    PyObject *result;

    if (!msc__py_to_string(client, "client", &name) || !is_free(self))
        return NULL;
    if (!self->has_batch) {
        PyErr_SetString(PyExc_RuntimeError, "next() has given no batch");
        return NULL;
    }
    self->is_used = true;
    Py_BEGIN_ALLOW_THREADS
    status = msc_spool_body(self->spool, &self->batch, name, &text, &bytes, &err);
    Py_END_ALLOW_THREADS
    result = status == MSC_OK ? PyBytes_FromStringAndSize(text, (Py_ssize_t)bytes) : msc__py_raise(&err);
    self->is_used = false;
    return result;
}

static PyObject *spool_level(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(msc_spool_level(((spool *)self)->spool));
}

static PyObject *spool_damaged_bytes(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(msc_spool_damaged_bytes(((spool *)self)->spool));
}

static PyMethodDef spool_methods[] = {
    {"next", spool_next, METH_NOARGS, "next($self, /)\n--\n\nThe next batch; None: there is none."},
    {"body", spool_body, METH_O, "body($self, client, /)\n--\n\nThe batch that `next` gave, as a request."},
    {"level", spool_level, METH_NOARGS, "level($self, /)\n--\n\nHow often every second row was removed."},
    {"damaged_bytes", spool_damaged_bytes, METH_NOARGS,
     "damaged_bytes($self, /)\n--\n\nBytes that are not what was written."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot spool_slots[] = {
    {Py_tp_doc, "Spool(path, offset=0)\n--\n\nA file that a `Recorder` has written, batch by batch."},
    {Py_tp_new, spool_new},
    {Py_tp_dealloc, spool_dealloc},
    {Py_tp_methods, spool_methods},
    {0, NULL},
};

static PyType_Spec spool_spec = {
    .name = "memscale._core.Spool",
    .basicsize = sizeof(spool),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = spool_slots,
};

PyTypeObject *msc__py_spool_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spool_spec, NULL);
}
