/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hooks: what autograd saves goes in, what backward needs comes out.
 *
 * pack    decides whether a saved tensor leaves. Those that stay: parameters and views of them; copies of
 *         parameters that autocast made (they live in its cache anyway); subclasses of Tensor, fakes among
 *         them; tensors of another device; storages that are too small to be worth it; and whatever no tier has
 *         room for. What stays is handed back as a detached alias with its version: autograd checks no version
 *         where there are hooks, so both kinds are checked here.
 * unpack  finds the tensor's storage here, on its way, or away, starts what is needed next, and makes a tensor
 *         with the old dtype, sizes and strides on it.
 *
 * Nothing that is handed to autograd refers to the tensor that was saved: that would be a cycle through its node.
 */
#include <string.h>

#include "error.h"
#include "py_offload_store.h"

#define MOST_SOON 16u

typedef struct saved {
    PyObject_VAR_HEAD msc__py_store *store; /* NULL: it stayed */
    PyObject *kept;
    long long version; /* of `kept`; -1: it has none */
    uint32_t round;    /* the fetch that it was unpacked from last */
    int32_t dim_count;
    uint64_t byte_offset;
    msc_dl_dtype dtype;
    int64_t extents[];
} saved;

/* ---- Saved -------------------------------------------------------------------------------------- */

static saved *saved_new(const msc__py_engine *engine, int32_t dim_count)
{
    return (saved *)PyType_GenericAlloc(engine->saved_type, 2 * (Py_ssize_t)dim_count);
}

static void saved_dealloc(PyObject *object)
{
    saved *self = (saved *)object;
    PyTypeObject *type = Py_TYPE(object);

    if (self->store != NULL)
        msc__py_store_unsave(self->store);
    Py_XDECREF(self->kept);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyType_Slot saved_slots[] = {
    {Py_tp_dealloc, saved_dealloc},
    {Py_tp_doc,
     "What autograd holds in place of a tensor that it saved; OffloadEngine.unpack gives the tensor."},
    {0, NULL},
};

static PyType_Spec saved_spec = {
    .name = "memscale._core.Saved",
    .basicsize = sizeof(saved),
    .itemsize = sizeof(int64_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = saved_slots,
};

PyTypeObject *msc__py_saved_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &saved_spec, NULL);
}

/* ---- what stays --------------------------------------------------------------------------------- */

static long long version_of(const msc__py_engine *engine, PyObject *tensor)
{
    PyObject *version = PyObject_GetAttr(tensor, engine->names.version);
    long long value = version != NULL ? PyLong_AsLongLong(version) : -1;

    Py_XDECREF(version);
    PyErr_Clear(); /* tensors of inference mode have none */
    return value;
}

static PyObject *keep(msc__py_engine *engine, PyObject *tensor)
{
    saved *self = saved_new(engine, 0);

    if (self == NULL)
        return NULL;
    self->version = version_of(engine, tensor);
    self->kept = PyObject_CallMethodObjArgs(tensor, engine->names.detach, NULL);
    if (self->kept == NULL) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    engine->kept_count++;
    return (PyObject *)self;
}

/* A leaf stays itself: it holds no graph, and backward may ask for its identity. */
static PyObject *keep_leaf(msc__py_engine *engine, PyObject *tensor)
{
    saved *self = saved_new(engine, 0);

    if (self == NULL)
        return NULL;
    self->version = version_of(engine, tensor);
    self->kept = Py_NewRef(tensor);
    engine->kept_count++;
    return (PyObject *)self;
}

static bool is_half(msc_dl_dtype dtype)
{
    return dtype.bits == 16;
}

/* A node that casts a leaf: what autocast makes of a parameter. */
static bool is_cast_of_leaf(const msc__py_engine *engine, PyObject *tensor)
{
    PyObject *node = PyObject_GetAttr(tensor, engine->names.grad_fn);
    PyObject *name = NULL;
    PyObject *next = NULL;
    PyObject *first = NULL;
    PyObject *leaf = NULL;
    PyObject *leaf_name = NULL;
    bool result = false;

    if (node == NULL || node == Py_None)
        goto done;
    name = PyObject_CallMethodObjArgs(node, engine->names.name, NULL);
    if (name == NULL || PyUnicode_CompareWithASCIIString(name, "ToCopyBackward0") != 0)
        goto done;
    next = PyObject_GetAttr(node, engine->names.next_functions);
    first = next != NULL ? PySequence_GetItem(next, 0) : NULL;
    leaf = first != NULL ? PySequence_GetItem(first, 0) : NULL;
    leaf_name =
        leaf != NULL && leaf != Py_None ? PyObject_CallMethodObjArgs(leaf, engine->names.name, NULL) : NULL;
    result = leaf_name != NULL &&
             PyUnicode_CompareWithASCIIString(leaf_name, "torch::autograd::AccumulateGrad") == 0;
done:
    PyErr_Clear();
    Py_XDECREF(leaf_name);
    Py_XDECREF(leaf);
    Py_XDECREF(first);
    Py_XDECREF(next);
    Py_XDECREF(name);
    Py_XDECREF(node);
    return result;
}

static bool is_parameter(const msc__py_engine *engine, PyObject *tensor)
{
    int is = Py_TYPE(tensor) == engine->tensor_type
                 ? 0
                 : PyObject_IsInstance(tensor, (PyObject *)engine->parameter_type);

    PyErr_Clear();
    return is != 0; /* what cannot be asked stays */
}

/* What a tensor is a view of, a new reference; NULL where it is none. */
static PyObject *base_of(const msc__py_engine *engine, PyObject *tensor)
{
    PyObject *base = PyObject_GetAttr(tensor, engine->names.base);

    PyErr_Clear();
    if (base != Py_None)
        return base;
    Py_DECREF(base);
    return NULL;
}

/* Whether the save is one of those that leave. Each save counts that is no parameter's. */
static bool is_chosen(msc__py_engine *engine)
{
    uint32_t ordinal = engine->ordinal++;

    return !engine->chooses || (ordinal < engine->chosen_count && engine->chosen[ordinal] != 0);
}

/* Whether a plain tensor may leave: it was chosen, and is no copy that autocast made of a parameter. */
static bool may_leave(msc__py_engine *engine, PyObject *tensor, const msc_dl_tensor *look)
{
    PyObject *base = base_of(engine, tensor);
    bool leaves = false;

    if (base == NULL || !is_parameter(engine, base))
        leaves = is_chosen(engine) && (base == NULL || Py_TYPE(base) == engine->tensor_type) &&
                 !(is_half(look->dtype) && is_cast_of_leaf(engine, base != NULL ? base : tensor));
    Py_XDECREF(base);
    return leaves && look->data != NULL && look->device.type == engine->device_type &&
           look->device.ordinal == engine->device_ordinal;
}

/* Subclasses of Tensor stay. A leaf stays itself: it holds no graph. */
static PyObject *keep_subclass(msc__py_engine *engine, PyObject *tensor)
{
    PyObject *leaf = PyObject_GetAttrString(tensor, "is_leaf");
    bool is_leaf = leaf == Py_True;

    Py_XDECREF(leaf);
    PyErr_Clear();
    if (!is_parameter(engine, tensor))
        engine->ordinal++;
    return is_leaf ? keep_leaf(engine, tensor) : keep(engine, tensor);
}

/* ---- pack --------------------------------------------------------------------------------------- */

/* A number that a method of a storage returns. False with an exception. */
static bool ask(PyObject *object, PyObject *method, uint64_t *out)
{
    PyObject *value = PyObject_CallMethodObjArgs(object, method, NULL);
    unsigned long long number = value != NULL ? PyLong_AsUnsignedLongLong(value) : 0;

    Py_XDECREF(value);
    *out = number;
    return PyErr_Occurred() == NULL;
}

/* The tensor's storage, a new reference, with its size and first byte. NULL with an exception. */
static PyObject *read_storage(const msc__py_engine *engine, PyObject *tensor, uint64_t *bytes, char **base)
{
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, engine->names.untyped_storage, NULL);
    uint64_t address = 0;

    if (storage != NULL &&
        (!ask(storage, engine->names.nbytes, bytes) || !ask(storage, engine->names.data_ptr, &address)))
        Py_CLEAR(storage);
    *base = (char *)(uintptr_t)address; // NOLINT(performance-no-int-to-ptr): that is how Python shows it
    return storage;
}

static PyObject *saved_on(msc__py_store *store, const char *base, const msc_dl_tensor *tensor)
{
    saved *self = saved_new(store->engine, tensor->dim_count);
    size_t count = (size_t)tensor->dim_count;

    if (self == NULL)
        return NULL;
    self->store = store;
    self->byte_offset = (uint64_t)((char *)tensor->data + tensor->byte_offset - base);
    self->dtype = tensor->dtype;
    self->dim_count = tensor->dim_count;
    memcpy(self->extents, tensor->sizes, count * sizeof(int64_t));
    memcpy(self->extents + count, tensor->strides, count * sizeof(int64_t));
    msc__py_store_hold(store);
    store->saved_count++;
    self->round = store->round - 1; /* not unpacked from the present fetch */
    if (store->memory != NULL)
        store->waiting++;
    return (PyObject *)self;
}

static msc__py_store *put(msc__py_engine *engine, PyObject *tensor, uint64_t bytes, char *base,
                          msc_error *err)
{
    PyObject *source = PyObject_CallMethodObjArgs(tensor, engine->names.detach, NULL);
    msc_ticket ticket;
    void *stream;
    msc__py_store *store;

    err->status = MSC_OK;
    if (source == NULL || !msc__py_current_stream(engine, &stream)) {
        Py_XDECREF(source);
        return NULL;
    }
    if (msc_offload_put(engine->offload, base, bytes, stream, &ticket, err) != MSC_OK) {
        Py_DECREF(source);
        return NULL;
    }
    store = msc__py_store_new(engine, ticket, source);
    if (store == NULL) {
        msc_offload_drop(engine->offload, ticket);
        return NULL;
    }
    store->base = base;
    store->bytes = bytes;
    engine->flying_bytes += bytes;
    return store;
}

/* Lets go of what has been copied, and waits where too much has not. */
static bool pass_window(msc__py_engine *engine)
{
    while (engine->flying_first != NULL &&
           (engine->flying_bytes > engine->window_bytes ||
            msc_offload_settled(engine->offload, engine->flying_first->ticket, NULL) == MSC_OK))
        if (!msc__py_store_settle_oldest(engine))
            return false;
    return true;
}

/* Ends a record that no Saved has. */
static void abandon(msc__py_store *store)
{
    msc__py_store_hold(store);
    store->saved_count++;
    msc__py_store_unsave(store);
}

/* The storage leaves. NULL with an exception, or without one where no tier has room. */
static msc__py_store *move(msc__py_engine *engine, PyObject *tensor, PyObject *owner, PyObject *storage,
                           uint64_t bytes, char *base)
{
    msc_error err;
    msc__py_store *store = put(engine, tensor, bytes, base, &err);

    if (store == NULL) {
        if (PyErr_Occurred() == NULL && err.status != MSC_EAGAIN)
            msc__py_raise(&err);
        return NULL;
    }
    if (!msc__py_store_enter(store, storage, owner, version_of(engine, tensor))) {
        abandon(store);
        return NULL;
    }
    engine->moved_count++;
    return store;
}

static PyObject *send(msc__py_engine *engine, PyObject *tensor, const msc_dl_tensor *look)
{
    uint64_t bytes = 0;
    char *base;
    PyObject *storage = read_storage(engine, tensor, &bytes, &base);
    PyObject *viewed = base_of(engine, tensor);
    PyObject *owner =
        viewed != NULL ? viewed : tensor; /* tensors of unsafe_chunk share memory, and no version */
    msc__py_store *store = NULL;
    PyObject *result = NULL;

    PyErr_Clear(); /* what has no plain storage stays */
    if (storage != NULL && bytes >= engine->least_bytes) {
        store = msc__py_store_find(engine, storage, owner, version_of(engine, tensor));
        if (store != NULL)
            engine->shared_count++;
        else
            store = move(engine, tensor, owner, storage, bytes, base);
    }
    Py_XDECREF(viewed);
    Py_XDECREF(storage);
    if (store == NULL)
        return PyErr_Occurred() != NULL ? NULL : keep(engine, tensor);
    result = saved_on(store, base, look);
    if (result == NULL && store->saved_count == 0)
        abandon(store);
    if (result != NULL && !pass_window(engine))
        Py_CLEAR(result);
    return result;
}

PyObject *msc__py_engine_pack(PyObject *object, PyObject *tensor)
{
    msc__py_engine *engine = (msc__py_engine *)object;
    msc_dl_tensor look;

    if (engine->offload == NULL)
        return msc__py_refuse("this engine is closed");
    if (Py_TYPE(tensor) != engine->tensor_type)
        return keep_subclass(engine, tensor);
    if (engine->api->read(tensor, &look) != 0) { /* sparse, meta and others without plain memory */
        PyErr_Clear();
        return keep(engine, tensor);
    }
    return may_leave(engine, tensor, &look) ? send(engine, tensor, &look) : keep(engine, tensor);
}

/* ---- unpack ------------------------------------------------------------------------------------- */

static PyObject *refuse_modified(long long version)
{
    return PyErr_Format(
        PyExc_RuntimeError,
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation after it was saved at version %lld",
        version);
}

static PyObject *give_kept(const msc__py_engine *engine, const saved *self)
{
    if (self->version >= 0 && version_of(engine, self->kept) != self->version)
        return refuse_modified(self->version);
    return Py_NewRef(self->kept);
}

/* Starts what the engine wants to have here soon. Without room on the device for it, it is fetched when it is used. */
static bool fetch_soon(msc__py_engine *engine, msc__py_store *needed)
{
    msc_ticket soon[MOST_SOON];
    uint32_t count = msc_offload_use(engine->offload, needed->ticket, soon, MOST_SOON);
    msc_error err;
    uint32_t i;

    for (i = 0; i < count; i++) {
        msc__py_store *store = msc__py_store_of(engine, soon[i]);

        if (store == NULL || store->memory != NULL || store->source != NULL)
            continue;
        if (!msc__py_store_fetch(store, &err) && store == needed) {
            msc__py_raise(&err);
            return false;
        }
    }
    return true;
}

/* The storage is here afterwards, as memory or as its source. */
static bool bring(msc__py_engine *engine, msc__py_store *store)
{
    msc_error err;

    if ((store->memory == NULL || !store->announced) && !fetch_soon(engine, store))
        return false;
    store->announced = true;
    if (store->source != NULL) {
        engine->forwarded_count++;
        return true;
    }
    if (store->memory == NULL && !msc__py_store_fetch(store, &err)) {
        msc__py_raise(&err);
        return false;
    }
    return msc__py_store_arrive(store);
}

PyObject *msc__py_engine_unpack(PyObject *object, PyObject *value)
{
    msc__py_engine *engine = (msc__py_engine *)object;
    saved *self = (saved *)value;
    msc__py_store *store;
    msc__py_look look;
    PyObject *tensor = NULL;

    if (Py_TYPE(value) != engine->saved_type)
        return msc__py_refuse_type("saved", "what pack returned", value);
    store = self->store;
    if (store == NULL)
        return give_kept(engine, self);
    if (engine->offload == NULL || store->ticket == 0)
        return PyErr_Format(PyExc_RuntimeError, "the offload engine that holds this saved tensor is closed");
    if (!msc__py_store_check(store))
        return refuse_modified(store->version);
    look.byte_offset = self->byte_offset;
    look.dtype = self->dtype;
    look.dim_count = self->dim_count;
    look.extents = self->extents;
    msc__py_store_hold(store);
    if (bring(engine, store))
        tensor = msc__py_store_view(store, &look);
    if (tensor != NULL && store->memory != NULL && self->round != store->round) {
        self->round = store->round;
        if (--store->waiting == 0) {
            msc__py_store_forget(store);
            store->announced = false;
        }
    }
    msc__py_store_release(store);
    return tensor;
}
