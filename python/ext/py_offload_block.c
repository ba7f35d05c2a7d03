/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `Block`: one tensor's bytes in the engine, with the calls of memscale/offload.h and no policy of its own.
 *
 *      put ──► settle ──► … ──► get ──► arrive ──► … ──► drop
 *
 * A block refers to its source until it is settled and to its destination until that has arrived, so neither can go
 * while a lane touches it. Guarded by the GIL, which is released while waiting; a thread that waited looks again.
 */
#include "error.h"
#include "module_state.h"
#include "py_offload_store.h"

struct msc__py_block {
    PyObject_HEAD msc__py_engine *engine; /* a reference */
    msc_ticket ticket;                    /* 0: dropped, or the engine is closed */
    uint64_t bytes;
    PyObject *source;      /* NULL: settled */
    PyObject *destination; /* NULL: none is awaited */
    msc__py_block *next, *before;
};

/* ---- life --------------------------------------------------------------------------------------- */

static void enter_list(msc__py_block *self)
{
    msc__py_engine *engine = self->engine;

    self->next = engine->blocks;
    if (self->next != NULL)
        self->next->before = self;
    engine->blocks = self;
}

static void leave_list(msc__py_block *self)
{
    if (self->before != NULL)
        self->before->next = self->next;
    else
        self->engine->blocks = self->next;
    if (self->next != NULL)
        self->next->before = self->before;
    self->next = self->before = NULL;
}

/* The block is no longer in the engine: its tensors are nobody's but their owners'. */
static void let_go(msc__py_block *self)
{
    PyObject *source = self->source;
    PyObject *destination = self->destination;

    self->source = self->destination = NULL;
    Py_XDECREF(source);
    Py_XDECREF(destination);
}

void msc__py_blocks_close(msc__py_engine *engine, msc_offload *offload)
{
    msc__py_block *self;

    while ((self = engine->blocks) != NULL) {
        msc_ticket ticket = self->ticket;

        Py_INCREF((PyObject *)self);
        self->ticket = 0;
        leave_list(self);
        msc_offload_drop(offload, ticket);
        let_go(self);
        Py_DECREF((PyObject *)self);
    }
}

static void block_dealloc(PyObject *object)
{
    msc__py_block *self = (msc__py_block *)object;
    PyTypeObject *type = Py_TYPE(object);
    msc_ticket ticket = self->ticket;

    if (ticket != 0) {
        self->ticket = 0;
        leave_list(self);
        msc_offload_drop(self->engine->offload, ticket);
    }
    let_go(self);
    Py_DECREF((PyObject *)self->engine);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* ---- tensors ------------------------------------------------------------------------------------ */

static uint64_t item_bytes(msc_dl_dtype dtype)
{
    return ((uint64_t)dtype.bits * dtype.lanes + 7) / 8;
}

/* Elements, where they fill the memory from the first to the last in whatever order of dimensions; 0 where not. */
static uint64_t dense_count(const msc_dl_tensor *tensor)
{
    uint64_t count = 1;
    uint64_t span = 1;

    for (int32_t i = 0; i < tensor->dim_count; i++) {
        uint64_t size = (uint64_t)tensor->sizes[i];

        if (size > 1 && tensor->strides != NULL)
            span += (size - 1) * (uint64_t)tensor->strides[i];
        count *= size;
    }
    return tensor->strides == NULL || span == count ? count : 0;
}

/*
 * A tensor's memory. False with an exception.
 *
 * on_host  tells whether it is the host's where the engine is a card's; NULL: it must not be.
 */
static bool memory_of(const msc__py_engine *engine, PyObject *tensor, void **out, uint64_t *bytes,
                      bool *on_host)
{
    const msc__py_torch *torch = &engine->torch;
    const char *wanted = on_host != NULL
                             ? "a plain tensor with dense memory on the engine's device or the host"
                             : "a plain tensor with dense memory on the engine's device";
    msc__py_look look;
    bool beside;
    msc__py_span span;
    bool fits;

    if ((Py_TYPE(tensor) != torch->tensor_type && Py_TYPE(tensor) != torch->parameter_type) ||
        !msc__py_look_at(torch, tensor, &look)) {
        (void)msc__py_refuse_type("tensor", wanted, tensor);
        return false;
    }
    *out = (char *)look.tensor.data + look.tensor.byte_offset;
    *bytes = dense_count(&look.tensor) * item_bytes(look.tensor.dtype);
    beside = on_host != NULL && torch->device_type != MSC_DL_CPU && look.tensor.device.type == MSC_DL_CPU;
    if (on_host != NULL)
        *on_host = beside;
    fits = look.tensor.data != NULL && *bytes > 0 &&
           (beside || (look.tensor.device.type == torch->device_type &&
                       look.tensor.device.ordinal == torch->device_ordinal)) &&
           msc__py_span_of(torch, tensor, &look, &span) && span.verbatim;
    msc__py_look_end(&look);
    if (!fits)
        (void)msc__py_refuse("tensor must be %s", wanted);
    return fits;
}

static PyObject *refuse_ended(void)
{
    return PyErr_Format(PyExc_RuntimeError, "this block is dropped, or its engine is closed");
}

/* A block on a ticket, which it takes. NULL with an exception. */
static PyObject *block_new(msc__py_engine *engine, msc_ticket ticket, uint64_t bytes, PyObject *source)
{
    msc__py_block *self = (msc__py_block *)PyType_GenericAlloc(engine->block_type, 0);

    if (self == NULL) {
        msc_offload_drop(engine->offload, ticket);
        return NULL;
    }
    self->engine = (msc__py_engine *)Py_NewRef((PyObject *)engine);
    self->ticket = ticket;
    self->bytes = bytes;
    self->source = Py_NewRef(source);
    enter_list(self);
    return (PyObject *)self;
}

PyObject *msc__py_engine_put(PyObject *object, PyObject *tensor)
{
    msc__py_engine *engine = (msc__py_engine *)object;
    msc__py_source what;
    msc_status status;
    msc_ticket ticket;
    msc_error err;

    if (!memory_of(engine, tensor, &what.memory, &what.bytes, NULL) ||
        !msc__py_current_stream(&engine->torch, &what.stream))
        return NULL;
    if (engine->offload == NULL)
        return msc__py_refuse("this engine is closed");
    status = msc__py_engine_copy_out(engine, &what, &ticket, &err);
    if (status == MSC_ECANCELED)
        return msc__py_refuse("this engine is closed");
    if (status != MSC_OK)
        return status == MSC_EAGAIN ? Py_NewRef(Py_None) : msc__py_raise(&err);
    return block_new(engine, ticket, what.bytes, tensor);
}

/* ---- methods ------------------------------------------------------------------------------------ */

typedef msc_status (*wait_function)(msc_offload *engine, msc_ticket ticket, void *stream, msc_error *err);

/* Waits without the GIL. False with an exception; also one that a signal's handler raised meanwhile. */
static bool wait_for(msc__py_block *self, wait_function wait)
{
    msc__py_engine *engine = self->engine;
    msc_ticket ticket = self->ticket;
    msc_offload *offload;
    msc_status status;
    msc_error err;
    void *stream;

    if (!msc__py_current_stream(&engine->torch, &stream))
        return false;
    if (ticket == 0) {
        (void)refuse_ended();
        return false;
    }
    offload = msc__py_engine_enter(engine);
    Py_BEGIN_ALLOW_THREADS
    status = wait(offload, ticket, stream, &err);
    Py_END_ALLOW_THREADS
    msc__py_engine_leave(engine);
    if (self->ticket == 0) {
        (void)refuse_ended();
        return false;
    }
    if (status != MSC_OK)
        (void)msc__py_raise(&err);
    return status == MSC_OK;
}

static PyObject *block_settle(PyObject *object, PyObject *unused)
{
    msc__py_block *self = (msc__py_block *)object;

    (void)unused;
    Py_INCREF(object);
    if (wait_for(self, msc_offload_settle))
        Py_CLEAR(self->source);
    Py_DECREF(object);
    return PyErr_Occurred() == NULL && PyErr_CheckSignals() == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *block_settled(PyObject *object, PyObject *unused)
{
    msc__py_block *self = (msc__py_block *)object;
    msc_status status;
    msc_error err;

    (void)unused;
    if (self->ticket == 0)
        return refuse_ended();
    status = msc_offload_settled(self->engine->offload, self->ticket, &err);
    if (status != MSC_OK && status != MSC_EAGAIN)
        return msc__py_raise(&err);
    Py_INCREF(object);
    if (status == MSC_OK)
        Py_CLEAR(self->source);
    Py_DECREF(object);
    return PyBool_FromLong(status == MSC_OK);
}

static PyObject *block_arrive(PyObject *object, PyObject *unused)
{
    msc__py_block *self = (msc__py_block *)object;

    (void)unused;
    Py_INCREF(object);
    if (wait_for(self, msc_offload_arrive))
        Py_CLEAR(self->destination);
    Py_DECREF(object);
    return PyErr_Occurred() == NULL && PyErr_CheckSignals() == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *block_get(PyObject *object, PyObject *tensor)
{
    msc__py_block *self = (msc__py_block *)object;
    msc__py_engine *engine = self->engine;
    PyObject *former;
    void *memory;
    void *stream;
    msc_status status;
    uint64_t bytes;
    bool to_host;
    msc_error err;

    if (!memory_of(engine, tensor, &memory, &bytes, &to_host) ||
        !msc__py_current_stream(&engine->torch, &stream))
        return NULL;
    if (bytes != self->bytes)
        return msc__py_refuse("tensor has %llu bytes, the block has %llu", (unsigned long long)bytes,
                              (unsigned long long)self->bytes);
    if (self->ticket == 0)
        return refuse_ended();
    status = to_host ? msc_offload_get_to_host(engine->offload, self->ticket, memory, &err)
                     : msc_offload_get(engine->offload, self->ticket, memory, stream, &err);
    if (status != MSC_OK)
        return msc__py_raise(&err);
    former = self->destination; /* read now: code of Python has run above, and may have taken it away */
    self->destination = Py_NewRef(tensor);
    Py_XDECREF(former);
    return Py_NewRef(Py_None);
}

static PyObject *block_drop(PyObject *object, PyObject *unused)
{
    msc__py_block *self = (msc__py_block *)object;
    msc_ticket ticket = self->ticket;
    msc_offload *offload;

    (void)unused;
    if (ticket == 0)
        return Py_NewRef(Py_None);
    self->ticket = 0;
    leave_list(self);
    Py_INCREF(object);
    offload = msc__py_engine_enter(self->engine);
    Py_BEGIN_ALLOW_THREADS
    msc_offload_drop(offload, ticket);
    Py_END_ALLOW_THREADS
    msc__py_engine_leave(self->engine);
    let_go(self);
    Py_DECREF(object);
    return Py_NewRef(Py_None);
}

static PyObject *block_nbytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((msc__py_block *)object)->bytes);
}

/* ---- type --------------------------------------------------------------------------------------- */

static PyMethodDef block_methods[] = {
    {"settle", block_settle, METH_NOARGS,
     "settle($self, /)\n--\n\nWaits until the bytes are in their tier; the source may go then."},
    {"settled", block_settled, METH_NOARGS, "settled($self, /)\n--\n\nWhether they are, without waiting."},
    {"get", block_get, METH_O, "get($self, tensor, /)\n--\n\nStarts the copy back into a tensor."},
    {"arrive", block_arrive, METH_NOARGS,
     "arrive($self, /)\n--\n\nWaits until the tensor of the latest get has the bytes."},
    {"drop", block_drop, METH_NOARGS, "drop($self, /)\n--\n\nEnds the block; its place is free again."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef block_values[] = {
    {"nbytes", block_nbytes, NULL, "Bytes that were put.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot block_slots[] = {
    {Py_tp_dealloc, block_dealloc},
    {Py_tp_methods, block_methods},
    {Py_tp_getset, block_values},
    {Py_tp_doc, "A tensor's bytes in an OffloadEngine; OffloadEngine.put makes it."},
    {0, NULL},
};

static PyType_Spec block_spec = {
    .name = "memscale._core.Block",
    .basicsize = sizeof(msc__py_block),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = block_slots,
};

PyTypeObject *msc__py_block_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &block_spec, NULL);
}
