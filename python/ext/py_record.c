/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `Recorder`: what a run records, into a ring that one thread of the core writes to disk.
 *
 *     Recorder(folder, client)
 *        │ row, event, document, end        copy, hold the GIL, return whether there was room
 *        └ flush, close                     wait for the disk, without the GIL
 *
 * A closed one takes nothing and is no error: a program that is about to end calls in any order.
 */
#include "py_record.h"

#include <string.h>

#include "convert.h"
#include "error.h"
#include "memscale/record.h"

#define SECOND_NS 1e9
#define MOST_SECONDS 3600.0

typedef struct recorder {
    PyObject_HEAD msc_context *ctx;
    msc_record *record; /* NULL: closed */
    uint32_t waiting;   /* threads in `flush`, which have let go of the GIL */
    bool closes;        /* the last of them closes */
} recorder;

static PyObject *from_bool(bool value)
{
    return Py_NewRef(value ? Py_True : Py_False);
}

/** Whether it was taken. No room, and a run that has ended, are no errors. */
static PyObject *taken(msc_status status, const msc_error *err)
{
    if (status == MSC_OK || status == MSC_EAGAIN || status == MSC_ESTATE)
        return from_bool(status == MSC_OK);
    return msc__py_raise(err);
}

/* ---- life --------------------------------------------------------------------------------------- */

static PyObject *recorder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"directory", "client",        "ring_bytes", "segment_bytes",
                            "cap_bytes", "batch_seconds", NULL};
    msc_record_options options = msc_record_options_default();
    PyObject *path = NULL;
    PyObject *ring = NULL, *segment = NULL, *cap = NULL;
    double batch_seconds = (double)options.batch_ns / SECOND_NS;
    msc_error err;
    recorder *self;
    msc_status status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&s|$OOOd:Recorder", names, PyUnicode_FSConverter, &path,
                                     &options.client, &ring, &segment, &cap, &batch_seconds))
        return NULL;
    self = NULL;
    if (!(batch_seconds > 0 && batch_seconds <= MOST_SECONDS)) {
        msc__py_refuse("batch_seconds must be above 0 and at most %d", (int)MOST_SECONDS);
        goto done;
    }
    options.batch_ns = (int64_t)(batch_seconds * SECOND_NS);
    if (!msc__py_to_u64(ring, "ring_bytes", &options.ring_bytes) ||
        !msc__py_to_u64(segment, "segment_bytes", &options.segment_bytes) ||
        !msc__py_to_u64(cap, "cap_bytes", &options.cap_bytes))
        goto done;
    options.directory = PyBytes_AsString(path);
    self = (recorder *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        goto done;
    status = msc_context_create(NULL, &self->ctx, &err);
    if (status == MSC_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = msc_record_create(self->ctx, &options, &self->record, &err);
        Py_END_ALLOW_THREADS
    }
    if (status != MSC_OK) {
        Py_CLEAR(self);
        msc__py_raise(&err);
    }
done:
    Py_XDECREF(path);
    return (PyObject *)self;
}

/** Ends the thread, once nobody waits for it any more. */
static void end(recorder *self)
{
    msc_record *record = self->record;

    self->closes = true;
    if (record == NULL || self->waiting > 0)
        return;
    self->record = NULL;
    Py_BEGIN_ALLOW_THREADS
    msc_record_destroy(record);
    Py_END_ALLOW_THREADS
}

static void recorder_dealloc(PyObject *object)
{
    recorder *self = (recorder *)object;
    PyTypeObject *type = Py_TYPE(object);

    end(self);
    msc_context_destroy(self->ctx);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *recorder_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    end((recorder *)object);
    return Py_NewRef(Py_None);
}

static PyObject *recorder_flush(PyObject *object, PyObject *seconds)
{
    recorder *self = (recorder *)object;
    double wanted = PyFloat_AsDouble(seconds);
    msc_error err;
    msc_status status;

    if (wanted == -1.0 && PyErr_Occurred() != NULL)
        return NULL;
    if (!(wanted >= 0 && wanted <= MOST_SECONDS))
        return msc__py_refuse("seconds must be from 0 to %d", (int)MOST_SECONDS);
    if (self->record == NULL || self->closes)
        return from_bool(false);
    self->waiting++;
    Py_BEGIN_ALLOW_THREADS
    status = msc_record_flush(self->record, (int64_t)(wanted * SECOND_NS), &err);
    Py_END_ALLOW_THREADS
    self->waiting--;
    if (self->closes)
        end(self);
    return from_bool(status == MSC_OK);
}

/* ---- putting ------------------------------------------------------------------------------------ */

MSC_PY_SIGNATURE(row, 3, 4, "step", "time_ms", "values", "unit");

/** Names and numbers of a dict. The names belong to it. */
static bool to_values(PyObject *dict, const char *unit, msc_record_value *values, uint32_t *count)
{
    PyObject *key = NULL;
    PyObject *value = NULL;
    Py_ssize_t at = 0;

    *count = 0;
    while (PyDict_Next(dict, &at, &key, &value)) {
        msc_record_value *out = &values[*count];

        if (*count == MSC_RECORD_ROW_VALUES) {
            msc__py_refuse("values has more than %d numbers", (int)MSC_RECORD_ROW_VALUES);
            return false;
        }
        if (!msc__py_to_string(key, "values", &out->name))
            return false;
        out->value = PyFloat_Check(value) || PyLong_Check(value) ? PyFloat_AsDouble(value) : -1.0;
        if (!PyFloat_Check(value) && !PyLong_Check(value)) {
            msc__py_refuse_type("a value", "int or float", value);
            return false;
        }
        if (out->value == -1.0 && PyErr_Occurred() != NULL)
            return false;
        out->unit = unit;
        (*count)++;
    }
    return true;
}

MSC_PY_FASTCALL(recorder_row)
{
    msc_record_value row[MSC_RECORD_ROW_VALUES];
    PyObject *values[4];
    const char *unit = "";
    int64_t step = 0;
    int64_t time_ms = 0;
    uint32_t count = 0;
    msc_error err;
    msc_record *record = ((recorder *)self)->record;

    if (!msc__py_bind(&row_signature, args, nargs, kwnames, values) ||
        !msc__py_to_i64(values[0], "step", &step) || !msc__py_to_i64(values[1], "time_ms", &time_ms) ||
        (values[3] != NULL && !msc__py_to_string(values[3], "unit", &unit)))
        return NULL;
    if (!PyDict_Check(values[2]))
        return msc__py_refuse_type("values", "a dict of names and numbers", values[2]);
    if (!to_values(values[2], unit, row, &count))
        return NULL;
    if (record == NULL)
        return from_bool(false);
    return taken(msc_record_row(record, step, time_ms, row, count, &err), &err);
}

static PyObject *recorder_event(PyObject *self, PyObject *json)
{
    msc_record *record = ((recorder *)self)->record;
    PyObject *owner = NULL;
    const char *text = NULL;
    size_t bytes = 0;
    msc_error err;
    PyObject *result;

    if (!msc__py_to_text(json, &owner, &text, &bytes))
        return NULL;
    result = record == NULL ? from_bool(false) : taken(msc_record_event(record, text, bytes, &err), &err);
    Py_DECREF(owner);
    return result;
}

MSC_PY_SIGNATURE(document, 2, 2, "name", "json");

MSC_PY_FASTCALL(recorder_document)
{
    msc_record *record = ((recorder *)self)->record;
    PyObject *values[2];
    PyObject *owner = NULL;
    const char *name = NULL;
    const char *text = NULL;
    size_t bytes = 0;
    msc_error err;
    PyObject *result;

    if (!msc__py_bind(&document_signature, args, nargs, kwnames, values) ||
        !msc__py_to_string(values[0], "name", &name) || !msc__py_to_text(values[1], &owner, &text, &bytes))
        return NULL;
    result =
        record == NULL ? from_bool(false) : taken(msc_record_document(record, name, text, bytes, &err), &err);
    Py_DECREF(owner);
    return result;
}

static PyObject *recorder_end(PyObject *self, PyObject *state)
{
    msc_record *record = ((recorder *)self)->record;
    const char *text = NULL;
    msc_error err;

    if (!msc__py_to_string(state, "state", &text))
        return NULL;
    return record == NULL ? from_bool(false) : taken(msc_record_end(record, text, &err), &err);
}

/* ---- figures ------------------------------------------------------------------------------------ */

static PyObject *recorder_figures(PyObject *self, PyObject *unused)
{
    static const msc__py_field fields[] = {
        {"rows", MSC_PY_U64, offsetof(msc_record_figures, row_count)},
        {"events", MSC_PY_U64, offsetof(msc_record_figures, event_count)},
        {"dropped_rows", MSC_PY_U64, offsetof(msc_record_figures, dropped_rows)},
        {"dropped_events", MSC_PY_U64, offsetof(msc_record_figures, dropped_count)},
        {"written_bytes", MSC_PY_U64, offsetof(msc_record_figures, written_bytes)},
        {"held_bytes", MSC_PY_U64, offsetof(msc_record_figures, held_bytes)},
        {"failures", MSC_PY_U64, offsetof(msc_record_figures, failures)},
        {"system_error", MSC_PY_U32, offsetof(msc_record_figures, system_error)},
        {"segment", MSC_PY_U32, offsetof(msc_record_figures, segment)},
    };
    static const msc__py_record shape = {"figures", fields, MSC_PY_COUNT(fields)};
    msc_record *record = ((recorder *)self)->record;
    msc_record_figures figures;

    (void)unused;
    memset(&figures, 0, sizeof figures);
    if (record != NULL)
        msc_record_figures_read(record, &figures, sizeof figures);
    return msc__py_record_to_dict(&shape, &figures);
}

/* ---- type --------------------------------------------------------------------------------------- */

static PyMethodDef recorder_methods[] = {
    MSC_PY_METHOD("row", recorder_row, 0,
                  "row($self, /, step, time_ms, values, unit='')\n--\n\nRecords numbers of a step."),
    {"event", recorder_event, METH_O, "event($self, json, /)\n--\n\nRecords an event."},
    MSC_PY_METHOD("document", recorder_document, 0,
                  "document($self, /, name, json)\n--\n\nRecords a document in the place of an earlier one."),
    {"end", recorder_end, METH_O, "end($self, state, /)\n--\n\nThe run has ended."},
    {"flush", recorder_flush, METH_O,
     "flush($self, seconds, /)\n--\n\nWaits until what was recorded is on disk, so long at most."},
    {"figures", recorder_figures, METH_NOARGS, "figures($self, /)\n--\n\nWhat became of what was recorded."},
    {"close", recorder_close, METH_NOARGS, "close($self, /)\n--\n\nWrites the rest and ends the thread."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot recorder_slots[] = {
    {Py_tp_doc, "Recorder(directory, client, *, ring_bytes=4194304, segment_bytes=4194304,\n"
                "         cap_bytes=268435456, batch_seconds=2.0)\n--\n\n"
                "Records what a run does, into files of a folder, without waiting for them."},
    {Py_tp_new, recorder_new},
    {Py_tp_dealloc, recorder_dealloc},
    {Py_tp_methods, recorder_methods},
    {0, NULL},
};

static PyType_Spec recorder_spec = {
    .name = "memscale._core.Recorder",
    .basicsize = sizeof(recorder),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = recorder_slots,
};

PyTypeObject *msc__py_recorder_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &recorder_spec, NULL);
}
