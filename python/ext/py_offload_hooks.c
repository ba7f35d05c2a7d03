/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hooks: what autograd saves goes in, what backward needs comes out.
 *
 * pack    decides whether a saved tensor leaves. Those that stay: parameters and views of them; copies of
 *         parameters that autocast made (they live in its cache anyway), unless a plan names them; subclasses of
 *         Tensor, fakes among them; tensors of another device; lazy conjugates and negatives; storages that are too
 *         small to be worth it; and whatever no tier has room for. What stays is handed back with its version:
 *         autograd checks no version where there are hooks, so both kinds are checked here.
 * unpack  finds the tensor's storage here, on its way, or away, starts what is needed next, and makes a tensor
 *         with the old dtype, sizes and strides on it.
 *
 * Nothing that is handed to autograd may refer to the node that saves: that would be a cycle through C++, which
 * nobody collects. A node refers to its inputs' nodes and is referred to by its outputs. So what has no graph
 * stays itself, and so do views of parameters, whose graph ends there; everything else stays as an alias without one.
 */
#include <string.h>

#include "error.h"
#include "py_offload_store.h"

#define MOST_SOON 16u

/* How much may be put before the engine is asked what has settled: a question costs as much as a small save. */
#define UNSEEN_COUNT 16u
#define UNSEEN_SHARE 8u /* of the window */

typedef struct saved {
    PyObject_VAR_HEAD msc__py_store *store; /* NULL: it stayed */
    msc__py_engine *engine;                 /* a reference, where it stayed */
    msc__py_alias kept;
    PyObject *guard;   /* asked before it is unpacked, or NULL */
    long long version; /* of `kept`; -1: it has none */
    uint32_t round;    /* the fetch that it was unpacked from last */
    bool first;        /* the record was made for it: memory has its form, if it has one */
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
        msc__py_store_unsave(self->store, self->round);
    Py_XDECREF(self->guard);
    if (self->engine != NULL) {
        msc__py_alias_clear(&self->engine->torch, &self->kept);
        Py_DECREF((PyObject *)self->engine);
    }
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *saved_left(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(((saved *)object)->store != NULL);
}

static PyObject *saved_set_guard(PyObject *object, PyObject *guard)
{
    saved *self = (saved *)object;
    PyObject *before = self->guard;

    self->guard = Py_NewRef(guard);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyGetSetDef saved_attributes[] = {
    {"left", saved_left, NULL, "Whether the tensor left the device, or is on its way.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef saved_methods[] = {
    {"guard", saved_set_guard, METH_O,
     "Has a function called before each unpack; what it raises ends the unpack."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot saved_slots[] = {
    {Py_tp_dealloc, saved_dealloc},
    {Py_tp_getset, saved_attributes},
    {Py_tp_methods, saved_methods},
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

/* Takes `kept`. */
static PyObject *keep(msc__py_engine *engine, msc__py_alias kept, long long version)
{
    saved *self = saved_new(engine, 0);

    if (self == NULL) {
        msc__py_alias_clear(&engine->torch, &kept);
        return NULL;
    }
    self->engine = (msc__py_engine *)Py_NewRef((PyObject *)engine);
    self->version = version;
    self->kept = kept;
    engine->kept_count++;
    return (PyObject *)self;
}

static PyObject *keep_itself(msc__py_engine *engine, PyObject *tensor, const msc__py_look *look)
{
    msc__py_alias kept = {Py_NewRef(tensor), NULL};

    return keep(engine, kept, msc__py_version_of(&engine->torch, tensor, look));
}

/* `base` is what the tensor is a view of, or NULL: a view refers to it. */
static PyObject *stay(msc__py_engine *engine, PyObject *tensor, PyObject *base, const msc__py_look *look)
{
    const msc__py_torch *torch = &engine->torch;
    msc__py_alias kept;

    if (msc__py_has_no_graph(torch, tensor, look) &&
        (base == NULL || msc__py_has_no_graph(torch, base, NULL)))
        return keep_itself(engine, tensor, look);
    if (!msc__py_alias_new(torch, tensor, look, &kept))
        return NULL;
    return keep(engine, kept, msc__py_version_of(torch, tensor, look));
}

/* Subclasses of Tensor, which detach in their own way. Backward may ask for the identity of a leaf. */
static PyObject *stay_subclass(msc__py_engine *engine, PyObject *tensor)
{
    const msc__py_torch *torch = &engine->torch;
    msc__py_alias kept = {NULL, NULL};

    if (!msc__py_is_parameter(torch, tensor))
        engine->ordinal++;
    if (msc__py_has_no_graph(torch, tensor, NULL))
        return keep_itself(engine, tensor, NULL);
    kept.object = PyObject_CallMethod(tensor, "detach", NULL);
    return kept.object != NULL ? keep(engine, kept, msc__py_version_of(torch, kept.object, NULL)) : NULL;
}

/* A view of a parameter. */
static PyObject *stay_view(msc__py_engine *engine, PyObject *tensor, PyObject *parameter,
                           const msc__py_look *look)
{
    if (msc__py_has_no_graph(&engine->torch, parameter, NULL))
        return keep_itself(engine, tensor, look);
    return stay(engine, tensor, parameter, look);
}

static bool has_name(PyObject *node, const char *name)
{
    PyObject *its = PyObject_CallMethod(node, "name", NULL);
    bool has = its != NULL && PyUnicode_CompareWithASCIIString(its, name) == 0;

    Py_XDECREF(its);
    return has;
}

/* Whether the node before a cast is a leaf's. */
static bool is_from_leaf(PyObject *cast)
{
    PyObject *next = PyObject_GetAttrString(cast, "next_functions");
    PyObject *first = next != NULL ? PySequence_GetItem(next, 0) : NULL;
    PyObject *leaf = first != NULL ? PySequence_GetItem(first, 0) : NULL;
    bool result = leaf != NULL && leaf != Py_None && has_name(leaf, "torch::autograd::AccumulateGrad");

    Py_XDECREF(leaf);
    Py_XDECREF(first);
    Py_XDECREF(next);
    return result;
}

/*
 * Whether a tensor comes from a node that casts a leaf: what autocast makes of a parameter. Every half-precision
 * tensor is asked, so types of other nodes are remembered. PyTorch's own live as long as the process: an address
 * that is remembered never becomes that of the node that casts.
 */
static bool is_cast_of_leaf(msc__py_engine *engine, PyObject *tensor)
{
    PyObject *node = msc__py_attribute_of(&engine->torch, &engine->torch.grad_fn, tensor);
    const void **remembered;
    bool result = false;

    if (node != NULL && node != Py_None) {
        remembered = &engine->other_nodes[((uintptr_t)Py_TYPE(node) >> 4) % MSC_PY_NODE_TYPES];
        if (*remembered != Py_TYPE(node)) {
            if (has_name(node, "ToCopyBackward0"))
                result = is_from_leaf(node);
            else
                *remembered = Py_TYPE(node);
        }
    }
    msc__py_clear_error();
    Py_XDECREF(node);
    return result;
}

/* Whether the save is one of those that leave. Each save counts that is no parameter's. */
static bool is_chosen(msc__py_engine *engine)
{
    uint32_t ordinal = engine->ordinal++;

    return !engine->chooses || (ordinal < engine->chosen_count && engine->chosen[ordinal] != 0);
}

/* ---- pack --------------------------------------------------------------------------------------- */

static PyObject *saved_on(msc__py_store *store, const msc_dl_tensor *tensor, bool first)
{
    saved *self = saved_new(store->engine, tensor->dim_count);
    size_t count = (size_t)tensor->dim_count;

    if (self == NULL)
        return NULL;
    self->store = store;
    self->first = first;
    self->byte_offset = (uint64_t)((char *)tensor->data + tensor->byte_offset - store->base);
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

static void clear_origin(const msc__py_engine *engine, msc__py_origin *origin)
{
    msc__py_alias_clear(&engine->torch, &origin->source);
    msc__py_alias_clear(&engine->torch, &origin->counter);
    Py_XDECREF(origin->owner_alive);
}

/* In debug mode: a tensor that goes on sharing the version counter, and lets the memory go. */
static bool make_counter(const msc__py_engine *engine, PyObject *tensor, msc__py_alias *out)
{
    PyObject *nothing = PyObject_CallMethod(tensor, "new_empty", "i", 0);

    if (nothing != NULL && msc__py_alias_new(&engine->torch, tensor, NULL, out) &&
        PyObject_SetAttrString(out->object, "data", nothing) != 0)
        msc__py_alias_clear(&engine->torch, out);
    Py_XDECREF(nothing);
    return msc__py_alias_is(out);
}

/* What only PyTorch can make of a record. False with an exception. */
static bool make_origin(const msc__py_engine *engine, PyObject *tensor, const msc__py_look *look,
                        PyObject *owner, msc__py_origin *origin)
{
    origin->owner = owner;
    origin->owner_alive = PyWeakref_NewRef(owner, NULL);
    return origin->owner_alive != NULL && msc__py_alias_new(&engine->torch, tensor, look, &origin->source) &&
           (!engine->debug || origin->version < 0 || make_counter(engine, tensor, &origin->counter));
}

/* Starts the copy of a storage. NULL with an exception, or without one where no tier has room. */
static msc__py_store *put(msc__py_engine *engine, const msc__py_origin *origin)
{
    msc__py_source what = {origin->span.base, origin->span.bytes, origin->stream};
    msc_error err;
    msc_status status;
    msc_ticket ticket;
    msc__py_store *store;

    if (engine->offload == NULL)
        return NULL; /* closed meanwhile */
    status = msc__py_engine_copy_out(engine, &what, &ticket, &err);
    if (status != MSC_OK) {
        if (status != MSC_EAGAIN && status != MSC_ECANCELED)
            msc__py_raise_of_device(&err);
        return NULL;
    }
    store = msc__py_store_new(engine, ticket, origin);
    if (store == NULL)
        msc_offload_drop(engine->offload, ticket);
    return store;
}

/* Ends a record that has no Saved. */
static void abandon(msc__py_store *store)
{
    msc__py_store_hold(store);
    store->saved_count++;
    msc__py_store_unsave(store, store->round);
}

/* The storage leaves; a `Saved` for the tensor, or as `put`. */
static PyObject *move(msc__py_engine *engine, msc__py_origin *origin)
{
    msc__py_store *store = NULL;
    PyObject *result;

    if (msc__py_current_stream(&engine->torch, &origin->stream))
        store = put(engine, origin);
    if (store == NULL) {
        clear_origin(engine, origin);
        return NULL;
    }
    engine->moved_count++;
    result = saved_on(store, &origin->look->tensor, true);
    if (result == NULL)
        abandon(store);
    msc__py_store_release(store);
    return result;
}

/* Lets go of what has been copied, now and then, and waits where too much has not. */
static bool pass_window(msc__py_engine *engine)
{
    if (engine->flying_bytes <= engine->window_bytes && engine->unseen_count < UNSEEN_COUNT &&
        engine->unseen_bytes < engine->window_bytes / UNSEEN_SHARE)
        return true;
    return msc__py_store_settle(engine, engine->window_bytes);
}

/* As `move`, or a `Saved` on a record that is there. */
static PyObject *send(msc__py_engine *engine, PyObject *tensor, PyObject *owner, const msc__py_look *look,
                      const msc__py_span *span)
{
    msc__py_origin origin = {
        .look = look, .version = msc__py_version_of(&engine->torch, tensor, look), .span = *span};
    msc__py_store *store = msc__py_store_find(engine, owner, origin.version, span);
    PyObject *result;

    if (store != NULL) {
        engine->shared_count++;
        return saved_on(store, &look->tensor, false);
    }
    if (!make_origin(engine, tensor, look, owner, &origin)) {
        clear_origin(engine, &origin);
        return NULL;
    }
    result = move(engine, &origin);
    if (result != NULL && !pass_window(engine))
        Py_CLEAR(result);
    return result;
}

/* Whether a plain tensor's storage is one that the engine moves. */
static bool can_leave(msc__py_engine *engine, PyObject *tensor, PyObject *owner, const msc__py_look *look,
                      msc__py_span *span)
{
    const msc__py_torch *torch = &engine->torch;

    return Py_TYPE(owner) == torch->tensor_type && look->tensor.data != NULL &&
           look->tensor.device.type == torch->device_type &&
           look->tensor.device.ordinal == torch->device_ordinal &&
           msc__py_span_of(torch, tensor, look, span) && span->bytes >= engine->least_bytes &&
           span->bytes > 0 && span->base != NULL && span->verbatim &&
           (engine->chooses || look->tensor.dtype.bits != 16 || !is_cast_of_leaf(engine, owner));
}

static PyObject *pack(msc__py_engine *engine, PyObject *tensor, PyObject *base, const msc__py_look *look)
{
    PyObject *owner = base != NULL ? base : tensor; /* tensors of unsafe_chunk share memory, and no version */
    PyObject *result = NULL;
    msc__py_span span;

    if (base != NULL && msc__py_is_parameter(&engine->torch, base))
        return stay_view(engine, tensor, base, look);
    if (is_chosen(engine) && can_leave(engine, tensor, owner, look, &span))
        result = send(engine, tensor, owner, look, &span);
    return result != NULL || PyErr_Occurred() != NULL ? result : stay(engine, tensor, base, look);
}

PyObject *msc__py_engine_pack(PyObject *object, PyObject *tensor)
{
    msc__py_engine *engine = (msc__py_engine *)object;
    const msc__py_torch *torch = &engine->torch;
    msc__py_look look;
    PyObject *base;
    PyObject *result;

    if (engine->offload == NULL)
        return msc__py_refuse("this engine is closed");
    if (Py_TYPE(tensor) != torch->tensor_type)
        return stay_subclass(engine, tensor);
    if (msc__py_look_at(torch, tensor, &look)) {
        base = msc__py_base_of(torch, tensor, &look);
        result = pack(engine, tensor, base, &look);
        msc__py_look_end(&look);
    } else { /* sparse, meta and others without plain memory */
        base = msc__py_base_of(torch, tensor, NULL);
        result = stay(engine, tensor, base, NULL);
    }
    Py_XDECREF(base);
    return result;
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

static PyObject *refuse_closed(void)
{
    return PyErr_Format(PyExc_RuntimeError, "the offload engine that holds this saved tensor is closed");
}

static PyObject *give_kept(const saved *self)
{
    const msc__py_engine *engine = self->engine;

    if (self->version >= 0 && msc__py_alias_version(&engine->torch, &self->kept) != self->version)
        return refuse_modified(self->version);
    return msc__py_alias_object(&engine->torch, &self->kept);
}

static bool is_away(const msc__py_store *store)
{
    return store->memory == NULL && !msc__py_alias_is(&store->source);
}

/* Tells the engine what is used. What was fetched, and was claimed for the present stream, may be here already. */
static uint32_t use(const msc__py_engine *engine, msc__py_store *store, msc_ticket *soon)
{
    uint32_t here;
    uint32_t count;

    if (store->memory == NULL)
        return msc_offload_use(engine->offload, store->ticket, soon, MOST_SOON);
    count = msc_offload_use_on(engine->offload, store->ticket, store->fetch_stream, soon, MOST_SOON, &here);
    store->here = here != 0;
    return count;
}

/* Starts what the engine wants to have here soon. Without room on the device for it, it is fetched when it is used. */
static bool fetch_soon(msc__py_engine *engine, msc__py_store *needed)
{
    msc_ticket soon[MOST_SOON];
    uint32_t count = use(engine, needed, soon);
    msc_error err;
    uint32_t i;

    for (i = 0; i < count; i++) {
        msc__py_store *store = msc__py_store_of(engine, soon[i]);
        bool fetched;

        if (store == NULL || !is_away(store))
            continue;
        msc__py_store_hold(store);
        fetched = msc__py_store_fetch(store, &err);
        msc__py_store_release(store);
        if (!fetched && store == needed) {
            msc__py_raise_of_device(&err);
            return false;
        }
    }
    return true;
}

/* The storage is here afterwards, as its source, or as memory that the caller gets a reference to and waits for. */
static bool bring(msc__py_engine *engine, msc__py_store *store, msc__py_memory **out)
{
    msc_error err;

    *out = NULL;
    if (!msc__py_store_claim(store))
        return false;
    if ((!store->announced || is_away(store)) && !fetch_soon(engine, store))
        return false;
    if (is_away(store) && store->ticket != 0 && !msc__py_store_fetch(store, &err)) {
        msc__py_raise_of_device(&err);
        return false;
    }
    if (is_away(store)) {
        (void)refuse_closed();
        return false;
    }
    store->announced = true;
    if (msc__py_alias_is(&store->source))
        return true;
    *out = store->memory;
    msc__py_memory_hold(*out);
    return true;
}

/* A tensor on the source, whose copy out is still on its way or has failed. */
static PyObject *view_source(msc__py_engine *engine, const msc__py_store *store, const msc__py_shape *shape)
{
    const msc__py_torch *torch = &engine->torch;
    PyObject *source = msc__py_alias_object(torch, &store->source);
    msc__py_memory *memory = source != NULL ? msc__py_memory_of(torch, source) : NULL;
    PyObject *tensor = NULL;

    engine->forwarded_count++;
    if (memory != NULL) {
        tensor = msc__py_memory_view(torch, memory, store->base, shape);
        msc__py_memory_release(memory);
    }
    Py_XDECREF(source);
    return tensor;
}

/* A tensor on memory that has arrived. The last one who needs it gets the memory itself, if it has its form. */
static PyObject *view_memory(const msc__py_engine *engine, const saved *self, msc__py_memory *memory,
                             const msc__py_shape *shape)
{
    PyObject *tensor = self->first ? msc__py_memory_become(&engine->torch, memory) : NULL;

    return tensor != NULL ? tensor
                          : msc__py_memory_view(&engine->torch, memory, msc__py_memory_data(memory), shape);
}

static PyObject *tensor_of(msc__py_engine *engine, saved *self, msc__py_store *store)
{
    msc__py_shape shape = {self->byte_offset, self->dtype, self->dim_count, self->extents};
    msc__py_memory *memory;
    PyObject *tensor = NULL;

    if (!bring(engine, store, &memory))
        return NULL;
    if (memory == NULL)
        return view_source(engine, store, &shape);
    if (msc__py_store_arrive(store)) {
        if (store->memory == memory && self->round != store->round) {
            self->round = store->round;
            msc__py_store_served(store);
        }
        tensor = view_memory(engine, self, memory, &shape);
    }
    msc__py_memory_release(memory);
    return tensor;
}

/* Whether nobody speaks against the bytes that left; false with an exception. */
static bool is_as_saved(const saved *self)
{
    PyObject *guard = Py_XNewRef(self->guard);
    PyObject *answer = guard != NULL ? PyObject_CallNoArgs(guard) : NULL;
    bool is = guard == NULL || answer != NULL;

    Py_XDECREF(answer);
    Py_XDECREF(guard);
    return is;
}

PyObject *msc__py_engine_unpack(PyObject *object, PyObject *value)
{
    msc__py_engine *engine = (msc__py_engine *)object;
    saved *self = (saved *)value;
    msc__py_store *store;
    PyObject *tensor = NULL;

    if (Py_TYPE(value) != engine->saved_type)
        return msc__py_refuse_type("saved", "what pack returned", value);
    store = self->store;
    if (store == NULL)
        return give_kept(self);
    if (engine->offload == NULL || store->ticket == 0)
        return refuse_closed();
    if (!msc__py_store_check(store))
        return refuse_modified(store->version);
    Py_INCREF(value);
    msc__py_store_hold(store);
    if (is_as_saved(self))
        tensor = tensor_of(engine, self, store);
    msc__py_store_release(store);
    Py_DECREF(value);
    return tensor;
}
