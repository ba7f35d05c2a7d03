/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `Graph`: a memory graph, built call by call while a step is traced, or read from text.
 *
 *     Graph object ── ctx ──► msc_context      every Graph has its own, so two threads that build two
 *                 └── graph ► msc_graph        graphs share nothing
 *
 * The builder methods are what a trace does 10^5 times. Each is argument parsing, one call of the core,
 * and one int; nothing else is allocated. The error record stays uninitialised, since the core writes it
 * only when it fails.
 *
 * All methods hold the GIL, which is what serialises the changes of one graph. The type is final and its
 * instances hold no Python objects, so it needs no garbage collection.
 */
#include "py_graph.h"

#include "convert.h"
#include "error.h"

typedef struct graph_object {
    PyObject_HEAD msc_context *ctx;
    msc_graph *graph; /**< NULL only while the object is being made */
} graph_object;

msc_graph *msc__py_graph_self(PyObject *self)
{
    return ((graph_object *)self)->graph;
}

const msc_graph *msc__py_graph_of(const msc__py_state *state, PyObject *value)
{
    if (!PyObject_TypeCheck(value, state->graph_type)) {
        msc__py_refuse_type("graph", "a memscale._core.Graph", value);
        return NULL;
    }
    return msc__py_graph_self(value);
}

const msc_graph *msc__py_finished_graph_of(const msc__py_state *state, PyObject *value)
{
    static const msc_error open = {MSC_ESTATE, 0, "the graph is still open: call finish() first"};
    const msc_graph *graph = msc__py_graph_of(state, value);

    if (graph != NULL && !msc_graph_is_finished(graph)) {
        msc__py_raise(&open);
        return NULL;
    }
    return graph;
}

/* ---- lifecycle ---------------------------------------------------------------------------------- */

/** An object with a context and no graph yet. */
static graph_object *graph_alloc(PyTypeObject *type)
{
    msc_error err;
    graph_object *self = (graph_object *)PyType_GenericAlloc(type, 0);

    if (self != NULL && msc_context_create(NULL, &self->ctx, &err) != MSC_OK) {
        msc__py_raise(&err);
        Py_CLEAR(self);
    }
    return self;
}

static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *no_names[] = {NULL};
    msc_error err;
    graph_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Graph", no_names))
        return NULL;
    self = graph_alloc(type);
    if (self != NULL && msc_graph_create(self->ctx, &self->graph, &err) != MSC_OK) {
        msc__py_raise(&err);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void graph_dealloc(PyObject *object)
{
    graph_object *self = (graph_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    msc_graph_destroy(self->graph);
    msc_context_destroy(self->ctx);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *graph_repr(PyObject *self)
{
    const msc_graph *graph = msc__py_graph_self(self);

    return PyUnicode_FromFormat(
        "<Graph: %lu ops, %lu buffers, %lu saves, %s>", (unsigned long)msc_graph_op_count(graph),
        (unsigned long)msc_graph_buffer_count(graph), (unsigned long)msc_graph_save_count(graph),
        msc_graph_is_finished(graph) ? "finished" : "open");
}

/* ---- building ----------------------------------------------------------------------------------- */

/** The id that a builder call gave, or the exception for its failure. */
static PyObject *id_result(msc_status status, uint32_t id, const msc_error *err)
{
    return status == MSC_OK ? PyLong_FromUnsignedLong(id) : msc__py_raise(err);
}

static PyObject *none_result(msc_status status, const msc_error *err)
{
    return status == MSC_OK ? Py_NewRef(Py_None) : msc__py_raise(err);
}

/** An id, or -1 for MSC_NONE. */
static bool optional_id(PyObject *value, const char *what, uint32_t *out)
{
    int64_t number = -1;

    *out = MSC_NONE;
    if (!msc__py_to_i64(value, what, &number))
        return false;
    if (number < -1 || number >= MSC_NONE) {
        msc__py_refuse("%s must be -1 or an id, not %S", what, value);
        return false;
    }
    if (number >= 0)
        *out = (uint32_t)number;
    return true;
}

MSC_PY_SIGNATURE(add_module, 2, 6, "path", "type", "parent", "flags", "structure", "state_bytes");

MSC_PY_FASTCALL(graph_add_module)
{
    PyObject *values[6];
    const char *path = NULL;
    const char *type = NULL;
    msc_module module = {0};
    msc_error err;
    uint32_t id = MSC_NONE;
    msc_status status;

    if (!msc__py_bind(&add_module_signature, args, nargs, kwnames, values) ||
        !msc__py_to_string(values[0], "path", &path) || !msc__py_to_string(values[1], "type", &type) ||
        !optional_id(values[2], "parent", &module.parent) ||
        !msc__py_to_u32(values[3], "flags", UINT32_MAX, &module.flags) ||
        !msc__py_to_u64(values[4], "structure", &module.structure) ||
        !msc__py_to_u64(values[5], "state_bytes", &module.state_bytes))
        return NULL;
    status = msc_graph_add_module(msc__py_graph_self(self), path, type, &module, &id, &err);
    return id_result(status, id, &err);
}

MSC_PY_SIGNATURE(mark_module, 2, 3, "module", "flags", "state_bytes");

MSC_PY_FASTCALL(graph_mark_module)
{
    PyObject *values[3];
    uint32_t module = 0;
    uint32_t flags = 0;
    uint64_t state_bytes = 0;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&mark_module_signature, args, nargs, kwnames, values) ||
        !msc__py_to_id(values[0], "module", &module) ||
        !msc__py_to_u32(values[1], "flags", UINT32_MAX, &flags) ||
        !msc__py_to_u64(values[2], "state_bytes", &state_bytes))
        return NULL;
    status = msc_graph_mark_module(msc__py_graph_self(self), module, flags, state_bytes, &err);
    return none_result(status, &err);
}

MSC_PY_SIGNATURE(set_phase, 1, 1, "phase");

MSC_PY_FASTCALL(graph_set_phase)
{
    PyObject *values[1];
    uint32_t phase = 0;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&set_phase_signature, args, nargs, kwnames, values) ||
        !msc__py_to_u32(values[0], "phase", MSC_PHASE_COUNT - 1, &phase))
        return NULL;
    status = msc_graph_set_phase(msc__py_graph_self(self), (msc_phase)phase, &err);
    return none_result(status, &err);
}

MSC_PY_SIGNATURE(begin_call, 1, 1, "module");

MSC_PY_FASTCALL(graph_begin_call)
{
    PyObject *values[1];
    uint32_t module = 0;
    uint32_t id = MSC_NONE;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&begin_call_signature, args, nargs, kwnames, values) ||
        !msc__py_to_id(values[0], "module", &module))
        return NULL;
    status = msc_graph_begin_call(msc__py_graph_self(self), module, &id, &err);
    return id_result(status, id, &err);
}

MSC_PY_SIGNATURE(add_input, 2, 2, "call", "buffer");

MSC_PY_FASTCALL(graph_add_input)
{
    PyObject *values[2];
    uint32_t call = 0;
    uint32_t buffer = 0;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&add_input_signature, args, nargs, kwnames, values) ||
        !msc__py_to_id(values[0], "call", &call) || !msc__py_to_id(values[1], "buffer", &buffer))
        return NULL;
    status = msc_graph_add_input(msc__py_graph_self(self), call, buffer, &err);
    return none_result(status, &err);
}

MSC_PY_SIGNATURE(add_op, 3, 6, "name", "flops", "moved_bytes", "scratch_bytes", "flags", "work");

MSC_PY_FASTCALL(graph_add_op)
{
    PyObject *values[6];
    const char *name = NULL;
    msc_op op = {0};
    uint32_t flags = 0;
    uint32_t work = MSC_WORK_OTHER;
    uint32_t id = MSC_NONE;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&add_op_signature, args, nargs, kwnames, values) ||
        !msc__py_to_string(values[0], "name", &name) || !msc__py_to_u64(values[1], "flops", &op.flops) ||
        !msc__py_to_u64(values[2], "moved_bytes", &op.moved_bytes) ||
        !msc__py_to_u64(values[3], "scratch_bytes", &op.scratch_bytes) ||
        !msc__py_to_u32(values[4], "flags", UINT8_MAX, &flags) ||
        !msc__py_to_u32(values[5], "work", MSC_WORK_COUNT - 1, &work))
        return NULL;
    op.flags = (uint8_t)flags;
    op.work = (uint8_t)work;
    status = msc_graph_add_op(msc__py_graph_self(self), name, &op, &id, &err);
    return id_result(status, id, &err);
}

/** A builder function of the core that takes size and category and gives an id. */
typedef msc_status (*buffer_function)(msc_graph *graph, uint64_t size_bytes, msc_category category,
                                      uint32_t *out, msc_error *err);

/** Converts the two parameters and runs one. */
static PyObject *with_size(buffer_function function, msc_graph *graph, PyObject *const *values)
{
    uint64_t size_bytes = 0;
    uint32_t category = 0;
    uint32_t id = MSC_NONE;
    msc_error err;
    msc_status status;

    if (!msc__py_to_u64(values[0], "size_bytes", &size_bytes) ||
        !msc__py_to_u32(values[1], "category", MSC_CATEGORY_COUNT - 1, &category))
        return NULL;
    status = function(graph, size_bytes, (msc_category)category, &id, &err);
    return id_result(status, id, &err);
}

#define BUFFER_METHOD(name)                                                                                  \
    MSC_PY_SIGNATURE(name, 2, 2, "size_bytes", "category");                                                  \
    MSC_PY_FASTCALL(graph_##name)                                                                            \
    {                                                                                                        \
        PyObject *values[2];                                                                                 \
                                                                                                             \
        if (!msc__py_bind(&name##_signature, args, nargs, kwnames, values))                                  \
            return NULL;                                                                                     \
        return with_size(msc_graph_##name, msc__py_graph_self(self), values);                                \
    }

BUFFER_METHOD(add_buffer)
BUFFER_METHOD(add_resident)
BUFFER_METHOD(add_late)

MSC_PY_SIGNATURE(set_category, 2, 2, "buffer", "category");

MSC_PY_FASTCALL(graph_set_category)
{
    PyObject *values[2];
    uint32_t buffer = 0;
    uint32_t category = 0;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&set_category_signature, args, nargs, kwnames, values) ||
        !msc__py_to_id(values[0], "buffer", &buffer) ||
        !msc__py_to_u32(values[1], "category", MSC_CATEGORY_COUNT - 1, &category))
        return NULL;
    status = msc_graph_set_category(msc__py_graph_self(self), buffer, (msc_category)category, &err);
    return none_result(status, &err);
}

MSC_PY_SIGNATURE(set_size, 2, 2, "buffer", "size_bytes");

MSC_PY_FASTCALL(graph_set_size)
{
    PyObject *values[2];
    uint32_t buffer = 0;
    uint64_t size_bytes = 0;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&set_size_signature, args, nargs, kwnames, values) ||
        !msc__py_to_id(values[0], "buffer", &buffer) || !msc__py_to_u64(values[1], "size_bytes", &size_bytes))
        return NULL;
    status = msc_graph_set_size(msc__py_graph_self(self), buffer, size_bytes, &err);
    return none_result(status, &err);
}

MSC_PY_SIGNATURE(add_save, 1, 1, "buffer");

MSC_PY_FASTCALL(graph_add_save)
{
    PyObject *values[1];
    uint32_t buffer = 0;
    uint32_t id = MSC_NONE;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&add_save_signature, args, nargs, kwnames, values) ||
        !msc__py_to_id(values[0], "buffer", &buffer))
        return NULL;
    status = msc_graph_add_save(msc__py_graph_self(self), buffer, &id, &err);
    return id_result(status, id, &err);
}

MSC_PY_SIGNATURE(note_op, 2, 2, "module", "source");

MSC_PY_FASTCALL(graph_note_op)
{
    PyObject *values[2];
    uint32_t module = MSC_NONE;
    const char *source = NULL;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&note_op_signature, args, nargs, kwnames, values) ||
        !optional_id(values[0], "module", &module) || !msc__py_to_string(values[1], "source", &source))
        return NULL;
    status = msc_graph_note_op(msc__py_graph_self(self), module, source, &err);
    return none_result(status, &err);
}

MSC_PY_SIGNATURE(note_buffer, 3, 3, "buffer", "module", "what");

MSC_PY_FASTCALL(graph_note_buffer)
{
    PyObject *values[3];
    uint32_t buffer = 0;
    uint32_t module = MSC_NONE;
    const char *what = NULL;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&note_buffer_signature, args, nargs, kwnames, values) ||
        !msc__py_to_id(values[0], "buffer", &buffer) || !optional_id(values[1], "module", &module) ||
        !msc__py_to_string(values[2], "what", &what))
        return NULL;
    status = msc_graph_note_buffer(msc__py_graph_self(self), buffer, module, what, &err);
    return none_result(status, &err);
}

/** A builder function of the core that takes one id and gives nothing. */
typedef msc_status (*id_function)(msc_graph *graph, uint32_t id, msc_error *err);

/** Parses and runs one; its single parameter names the id. */
static PyObject *with_id(id_function function, msc_graph *graph, PyObject *value, const char *what)
{
    uint32_t id = 0;
    msc_error err;

    if (!msc__py_to_id(value, what, &id))
        return NULL;
    return none_result(function(graph, id, &err), &err);
}

#define ID_METHOD(name, parameter)                                                                           \
    MSC_PY_SIGNATURE(name, 1, 1, parameter);                                                                 \
    MSC_PY_FASTCALL(graph_##name)                                                                            \
    {                                                                                                        \
        PyObject *values[1];                                                                                 \
                                                                                                             \
        if (!msc__py_bind(&name##_signature, args, nargs, kwnames, values))                                  \
            return NULL;                                                                                     \
        return with_id(msc_graph_##name, msc__py_graph_self(self), values[0], parameter);                    \
    }

ID_METHOD(end_call, "call")
ID_METHOD(end_buffer, "buffer")
ID_METHOD(make_late, "buffer")
ID_METHOD(add_write, "buffer")
ID_METHOD(unpack, "save")
ID_METHOD(release, "save")

static PyObject *graph_finish(PyObject *self, PyObject *unused)
{
    msc_error err;
    msc_status status = msc_graph_finish(msc__py_graph_self(self), &err);

    (void)unused;
    return none_result(status, &err);
}

/* ---- text --------------------------------------------------------------------------------------- */

MSC_PY_SIGNATURE(save, 1, 1, "path");

MSC_PY_FASTCALL(graph_save)
{
    PyObject *values[1];
    PyObject *path = NULL;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&save_signature, args, nargs, kwnames, values) ||
        !PyUnicode_FSConverter(values[0], &path))
        return NULL;
    status = msc_graph_save_file(msc__py_graph_self(self), PyBytes_AsString(path), &err);
    Py_DECREF(path);
    return none_result(status, &err);
}

MSC_PY_SIGNATURE(load, 1, 1, "path");

MSC_PY_FASTCALL(graph_load)
{
    PyObject *values[1];
    PyObject *path = NULL;
    graph_object *graph = NULL;
    msc_error err;

    if (!msc__py_bind(&load_signature, args, nargs, kwnames, values) ||
        !PyUnicode_FSConverter(values[0], &path))
        return NULL;
    graph = graph_alloc((PyTypeObject *)self);
    if (graph != NULL &&
        msc_graph_load_file(graph->ctx, PyBytes_AsString(path), &graph->graph, &err) != MSC_OK) {
        msc__py_raise(&err);
        Py_CLEAR(graph);
    }
    Py_DECREF(path);
    return (PyObject *)graph;
}

MSC_PY_SIGNATURE(parse, 1, 1, "text");

MSC_PY_FASTCALL(graph_parse)
{
    PyObject *values[1];
    PyObject *owner = NULL;
    graph_object *graph = NULL;
    const char *text = NULL;
    size_t text_bytes = 0;
    msc_error err;

    if (!msc__py_bind(&parse_signature, args, nargs, kwnames, values) ||
        !msc__py_to_text(values[0], &owner, &text, &text_bytes))
        return NULL;
    graph = graph_alloc((PyTypeObject *)self);
    if (graph != NULL && msc_graph_parse(graph->ctx, text, text_bytes, &graph->graph, &err) != MSC_OK) {
        msc__py_raise(&err);
        Py_CLEAR(graph);
    }
    Py_DECREF(owner);
    return (PyObject *)graph;
}

static bool format_graph(const void *object, char *buffer, size_t buffer_bytes, size_t *needed_bytes)
{
    msc_error err;

    if (msc_graph_format(object, buffer, buffer_bytes, needed_bytes, &err) == MSC_OK)
        return true;
    msc__py_raise(&err);
    return false;
}

static PyObject *graph_to_text(PyObject *self, PyObject *unused)
{
    (void)unused;
    return msc__py_format(format_graph, msc__py_graph_self(self));
}

/* ---- properties --------------------------------------------------------------------------------- */

#define COUNT_PROPERTY(name)                                                                                 \
    static PyObject *get_##name(PyObject *self, void *closure)                                               \
    {                                                                                                        \
        (void)closure;                                                                                       \
        return PyLong_FromUnsignedLong(msc_graph_##name(msc__py_graph_self(self)));                          \
    }

COUNT_PROPERTY(op_count)
COUNT_PROPERTY(buffer_count)
COUNT_PROPERTY(save_count)
COUNT_PROPERTY(module_count)
COUNT_PROPERTY(call_count)

static PyObject *get_finished(PyObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(msc_graph_is_finished(msc__py_graph_self(self)));
}

static PyObject *get_digest(PyObject *self, void *closure)
{
    (void)closure;
    return msc__py_from_hex64(msc_graph_digest(msc__py_graph_self(self)));
}

/* ---- type --------------------------------------------------------------------------------------- */

static PyMethodDef graph_methods[] = {
    MSC_PY_METHOD("add_module", graph_add_module, 0,
                  "add_module($self, /, path, type, parent=-1, flags=0, structure=0, state_bytes=0)\n--\n\n"
                  "Adds a module; returns its id."),
    MSC_PY_METHOD("mark_module", graph_mark_module, 0,
                  "mark_module($self, /, module, flags, state_bytes=0)\n--\n\n"
                  "Adds flags and state bytes to a module."),
    MSC_PY_METHOD("set_phase", graph_set_phase, 0,
                  "set_phase($self, /, phase)\n--\n\nSets the phase of the operations to come."),
    MSC_PY_METHOD("begin_call", graph_begin_call, 0,
                  "begin_call($self, /, module)\n--\n\nEnters a call of a module; returns its id."),
    MSC_PY_METHOD("end_call", graph_end_call, 0,
                  "end_call($self, /, call)\n--\n\nLeaves the innermost open call."),
    MSC_PY_METHOD("add_input", graph_add_input, 0,
                  "add_input($self, /, call, buffer)\n--\n\nSays that a buffer is an argument of a call."),
    MSC_PY_METHOD("add_op", graph_add_op, 0,
                  "add_op($self, /, name, flops, moved_bytes, scratch_bytes=0, flags=0, work=0)\n--\n\n"
                  "Adds an operation; returns its id."),
    MSC_PY_METHOD("add_buffer", graph_add_buffer, 0,
                  "add_buffer($self, /, size_bytes, category)\n--\n\n"
                  "Adds a buffer made by the operation added last; returns its id."),
    MSC_PY_METHOD("add_resident", graph_add_resident, 0,
                  "add_resident($self, /, size_bytes, category)\n--\n\n"
                  "Adds a buffer that is alive before the step; returns its id."),
    MSC_PY_METHOD("add_late", graph_add_late, 0,
                  "add_late($self, /, size_bytes, category)\n--\n\n"
                  "Adds a buffer that only later steps find before they begin; returns its id."),
    MSC_PY_METHOD("make_late", graph_make_late, 0,
                  "make_late($self, /, buffer)\n--\n\n"
                  "Says that a resident buffer appears with the operation to come."),
    MSC_PY_METHOD("note_op", graph_note_op, 0,
                  "note_op($self, /, module, source)\n--\n\nPuts a note on the operation added last."),
    MSC_PY_METHOD("note_buffer", graph_note_buffer, 0,
                  "note_buffer($self, /, buffer, module, what)\n--\n\nPuts a note on a buffer."),
    MSC_PY_METHOD("set_category", graph_set_category, 0,
                  "set_category($self, /, buffer, category)\n--\n\nSets the category of a buffer."),
    MSC_PY_METHOD("set_size", graph_set_size, 0,
                  "set_size($self, /, buffer, size_bytes)\n--\n\nSets the size of a buffer."),
    MSC_PY_METHOD("end_buffer", graph_end_buffer, 0,
                  "end_buffer($self, /, buffer)\n--\n\nEnds a buffer at the present position."),
    MSC_PY_METHOD("add_write", graph_add_write, 0,
                  "add_write($self, /, buffer)\n--\n\n"
                  "Notes an in-place change of a buffer by the operation added last."),
    MSC_PY_METHOD("add_save", graph_add_save, 0,
                  "add_save($self, /, buffer)\n--\n\nPacks a saved tensor; returns its id."),
    MSC_PY_METHOD("unpack", graph_unpack, 0,
                  "unpack($self, /, save)\n--\n\nFirst use of a save in backward."),
    MSC_PY_METHOD("release", graph_release, 0, "release($self, /, save)\n--\n\nRelease of a save."),
    {"finish", graph_finish, METH_NOARGS, "finish($self, /)\n--\n\nValidates and freezes the graph."},
    MSC_PY_METHOD("save", graph_save, 0,
                  "save($self, /, path)\n--\n\nWrites the canonical text to a file, all or nothing."),
    MSC_PY_METHOD("load", graph_load, METH_CLASS, "load($type, /, path)\n--\n\nReads a graph from a file."),
    MSC_PY_METHOD("parse", graph_parse, METH_CLASS,
                  "parse($type, /, text)\n--\n\nReads a graph from canonical text."),
    {"to_text", graph_to_text, METH_NOARGS, "to_text($self, /)\n--\n\nThe canonical text."},
    {"ops", msc__py_graph_ops, METH_NOARGS,
     "ops($self, /)\n--\n\n(name, call, phase, flags, flops, moved_bytes, scratch_bytes, work) per "
     "operation."},
    {"buffers", msc__py_graph_buffers, METH_NOARGS,
     "buffers($self, /)\n--\n\n(size_bytes, begin, end, category, resident) per buffer."},
    {"saves", msc__py_graph_saves, METH_NOARGS,
     "saves($self, /)\n--\n\n(buffer, call, pack, unpack, release) per save."},
    {"modules", msc__py_graph_modules, METH_NOARGS,
     "modules($self, /)\n--\n\n(path, type, parent, flags, structure, state_bytes) per module."},
    {"calls", msc__py_graph_calls, METH_NOARGS,
     "calls($self, /)\n--\n\n(module, parent, begin, end) per call."},
    {"op_notes", msc__py_graph_op_notes, METH_NOARGS,
     "op_notes($self, /)\n--\n\n(op, module, source) per note on an operation."},
    {"buffer_notes", msc__py_graph_buffer_notes, METH_NOARGS,
     "buffer_notes($self, /)\n--\n\n(buffer, module, what) per note on a buffer."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef graph_properties[] = {
    {"op_count", get_op_count, NULL, "Number of operations.", NULL},
    {"buffer_count", get_buffer_count, NULL, "Number of buffers.", NULL},
    {"save_count", get_save_count, NULL, "Number of saved tensors.", NULL},
    {"module_count", get_module_count, NULL, "Number of modules.", NULL},
    {"call_count", get_call_count, NULL, "Number of calls.", NULL},
    {"finished", get_finished, NULL, "Whether finish() has been called.", NULL},
    {"digest", get_digest, NULL, "Digest of the canonical text; all zeros while open.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot graph_slots[] = {
    {Py_tp_doc, "Graph()\n--\n\nThe memory graph of one training step."},
    {Py_tp_new, graph_new},
    {Py_tp_dealloc, graph_dealloc},
    {Py_tp_repr, graph_repr},
    {Py_tp_methods, graph_methods},
    {Py_tp_getset, graph_properties},
    {0, NULL},
};

static PyType_Spec graph_spec = {
    .name = "memscale._core.Graph",
    .basicsize = sizeof(graph_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = graph_slots,
};

PyTypeObject *msc__py_graph_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &graph_spec, NULL);
}
