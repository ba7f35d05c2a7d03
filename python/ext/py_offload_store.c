/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records of storages, and the memory that fetched ones lie in.
 *
 * Memory on the device is PyTorch's own (its allocator makes it, and counts it), as a managed DLPack tensor of
 * bytes. Tensors on it are made over DLPack too: each owns a reference to the memory, whose count is atomic
 * because autograd lets go of tensors on its own threads, without the GIL.
 *
 * A record may be released while its caller waits without the GIL, hence the references that are not `Saved`.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "py_offload_store.h"

/* ---- memory ------------------------------------------------------------------------------------- */

struct msc__py_memory {
    atomic_uint references; /* released with acq_rel, so the last one sees what the others did */
    msc_dl_managed *managed;
};

static void memory_release(msc__py_memory *memory)
{
    if (atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) != 1)
        return;
    if (memory->managed->deleter != NULL)
        memory->managed->deleter(memory->managed);
    free(memory);
}

/* Takes `managed`; NULL without memory, `managed` is gone then too. */
static msc__py_memory *memory_new(msc_dl_managed *managed)
{
    msc__py_memory *memory = malloc(sizeof *memory);

    if (memory == NULL) {
        managed->deleter(managed);
        return NULL;
    }
    atomic_init(&memory->references, 1);
    memory->managed = managed;
    return memory;
}

typedef struct view {
    msc_dl_managed managed;
    msc__py_memory *memory;
    int64_t extents[];
} view;

/* Called by PyTorch when the tensor ends, on any thread. */
static void view_delete(msc_dl_managed *managed)
{
    view *self = (view *)(void *)managed;

    memory_release(self->memory);
    free(self);
}

static PyObject *view_new(const msc__py_engine *engine, msc__py_memory *memory, char *base,
                          const msc__py_look *look)
{
    size_t extents_bytes = 2 * (size_t)look->dim_count * sizeof(int64_t);
    view *self = calloc(1, sizeof *self + extents_bytes);
    void *tensor = NULL;

    if (self == NULL)
        return PyErr_NoMemory();
    memcpy(self->extents, look->extents, extents_bytes);
    atomic_fetch_add_explicit(&memory->references, 1, memory_order_relaxed);
    self->memory = memory;
    self->managed.version = engine->api->header.version;
    self->managed.owner = self;
    self->managed.deleter = view_delete;
    self->managed.tensor.data = base + look->byte_offset;
    self->managed.tensor.device.type = engine->device_type;
    self->managed.tensor.device.ordinal = engine->device_ordinal;
    self->managed.tensor.dim_count = look->dim_count;
    self->managed.tensor.dtype = look->dtype;
    self->managed.tensor.sizes = self->extents;
    self->managed.tensor.strides = self->extents + look->dim_count;
    if (engine->api->to_object(&self->managed, &tensor) != 0)
        return NULL; /* PyTorch took it over all the same */
    return tensor;
}

/* ---- records ------------------------------------------------------------------------------------ */

static bool make_room(msc__py_engine *engine, uint32_t index)
{
    uint32_t capacity = engine->record_capacity < 64 ? 64 : engine->record_capacity;
    msc__py_store **records;

    if (index < engine->record_capacity)
        return true;
    while (capacity <= index)
        capacity *= 2;
    records = PyMem_Realloc(engine->records, capacity * sizeof *records);
    if (records == NULL)
        return false;
    memset(records + engine->record_capacity, 0, (capacity - engine->record_capacity) * sizeof *records);
    engine->records = records;
    engine->record_capacity = capacity;
    return true;
}

msc__py_store *msc__py_store_new(msc__py_engine *engine, msc_ticket ticket, PyObject *source)
{
    uint32_t index = (uint32_t)ticket;
    msc__py_store *store = make_room(engine, index) ? PyMem_Calloc(1, sizeof *store) : NULL;

    if (store == NULL) {
        Py_DECREF(source);
        PyErr_NoMemory();
        return NULL;
    }
    Py_INCREF((PyObject *)engine);
    store->engine = engine;
    store->ticket = ticket;
    store->source = source;
    store->references = 1; /* the flying list's */
    engine->records[index] = store;
    if (engine->flying_last != NULL)
        engine->flying_last->next = store;
    else
        engine->flying_first = store;
    engine->flying_last = store;
    return store;
}

static msc__py_store **bucket_of(msc__py_engine *engine, const void *storage)
{
    return &engine->buckets[((uintptr_t)storage >> 4) * 0x9E3779B1u % MSC_PY_STORE_BUCKETS];
}

bool msc__py_store_enter(msc__py_store *store, PyObject *storage, PyObject *owner, long long version)
{
    msc__py_store **bucket = bucket_of(store->engine, storage);

    store->alive = PyWeakref_NewRef(storage, NULL);
    store->owner = store->alive != NULL ? PyWeakref_NewRef(owner, NULL) : NULL;
    if (store->owner == NULL)
        return false;
    store->storage = storage;
    store->version = version;
    store->same_bucket = *bucket;
    *bucket = store;
    return true;
}

static void leave_bucket(msc__py_store *store)
{
    msc__py_store **at = bucket_of(store->engine, store->storage);

    while (*at != NULL && *at != store)
        at = &(*at)->same_bucket;
    if (*at != NULL)
        *at = store->same_bucket;
}

msc__py_store *msc__py_store_find(const msc__py_engine *engine, const void *storage, const PyObject *owner,
                                  long long version)
{
    msc__py_store *store = *bucket_of((msc__py_engine *)engine, storage);

    for (; store != NULL; store = store->same_bucket)
        if (store->storage == storage && store->version == version &&
            PyWeakref_GetObject(store->alive) == storage && PyWeakref_GetObject(store->owner) == owner)
            return store;
    return NULL;
}

msc__py_store *msc__py_store_of(msc__py_engine *engine, msc_ticket ticket)
{
    uint32_t index = (uint32_t)ticket;
    msc__py_store *store = index < engine->record_capacity ? engine->records[index] : NULL;

    return store != NULL && store->ticket == ticket ? store : NULL;
}

void msc__py_store_hold(msc__py_store *store)
{
    store->references++;
}

void msc__py_store_release(msc__py_store *store)
{
    msc__py_engine *engine = store->engine;

    if (--store->references > 0)
        return;
    msc__py_store_forget(store);
    Py_XDECREF(store->source);
    Py_XDECREF(store->alive);
    Py_XDECREF(store->owner);
    PyMem_Free(store);
    Py_DECREF((PyObject *)engine);
}

static bool is_flying(const msc__py_store *store)
{
    return store->next != NULL || store->engine->flying_last == store;
}

/* Out of the flying list, wherever it stands; the list's reference is the caller's. */
static void unlink_flying(msc__py_store *store)
{
    msc__py_engine *engine = store->engine;
    msc__py_store *before = NULL;
    msc__py_store *at;

    for (at = engine->flying_first; at != store; at = at->next)
        before = at;
    if (before != NULL)
        before->next = store->next;
    else
        engine->flying_first = store->next;
    if (engine->flying_last == store)
        engine->flying_last = before;
    store->next = NULL;
    engine->flying_bytes -= store->bytes;
}

void msc__py_store_land(msc__py_store *store)
{
    if (!is_flying(store))
        return;
    unlink_flying(store);
    Py_CLEAR(store->source);
    msc__py_store_release(store);
}

void msc__py_store_unsave(msc__py_store *store)
{
    msc__py_engine *engine = store->engine;

    if (--store->saved_count == 0 && store->ticket != 0) {
        leave_bucket(store);
        engine->records[(uint32_t)store->ticket] = NULL;
        msc_offload_drop(engine->offload, store->ticket);
        store->ticket = 0;
        msc__py_store_land(store);
        msc__py_store_forget(store);
    }
    msc__py_store_release(store);
}

bool msc__py_store_check(msc__py_store *store)
{
    PyObject *version;

    if (store->modified || store->version < 0 || store->source == NULL)
        return !store->modified;
    version = PyObject_GetAttr(store->source, store->engine->names.version);
    if (version != NULL)
        store->modified = PyLong_AsLongLong(version) != store->version;
    Py_XDECREF(version);
    PyErr_Clear();
    return !store->modified;
}

bool msc__py_current_stream(const msc__py_engine *engine, void **out)
{
    *out = NULL;
    return engine->device_type == MSC_DL_CPU ||
           engine->api->current_stream(engine->device_type, engine->device_ordinal, out) == 0;
}

/* ---- waiting ------------------------------------------------------------------------------------ */

bool msc__py_store_settle_oldest(msc__py_engine *engine)
{
    msc__py_store *store = engine->flying_first;
    msc_offload *offload = engine->offload;
    msc_ticket ticket = store->ticket;
    void *stream;
    msc_status status;
    msc_error err;

    if (!msc__py_current_stream(engine, &stream))
        return false;
    status = msc_offload_settled(offload, ticket, &err);
    if (status == MSC_EAGAIN) {
        msc__py_store_hold(store);
        Py_BEGIN_ALLOW_THREADS status = msc_offload_settle(offload, ticket, stream, &err);
        Py_END_ALLOW_THREADS if (store->ticket != ticket || !is_flying(store))
        { /* its last Saved ended, or another thread was faster */
            msc__py_store_release(store);
            return true;
        }
        msc__py_store_release(store);
    }
    (void)msc__py_store_check(store);
    if (status == MSC_OK) {
        msc__py_store_land(store);
    } else { /* the copy failed: the source is all there is, and stays */
        unlink_flying(store);
        msc__py_store_release(store);
    }
    return true;
}

static void note_error(void *context, const char *kind, const char *message)
{
    msc_error *err = context;

    (void)snprintf(err->message, sizeof err->message, "%s: %s", kind, message);
}

/* Bytes from PyTorch's allocator. */
static msc__py_memory *allocate(const msc__py_engine *engine, uint64_t bytes, msc_error *err)
{
    int64_t size = (int64_t)bytes;
    int64_t stride = 1;
    msc_dl_tensor prototype = {.device = {engine->device_type, engine->device_ordinal},
                               .dim_count = 1,
                               .dtype = {.code = 1, .bits = 8, .lanes = 1},
                               .sizes = &size,
                               .strides = &stride};
    msc_dl_managed *managed = NULL;

    err->status = MSC_EDEVMEM;
    err->driver_code = 0;
    err->message[0] = '\0';
    if (engine->api->allocate(&prototype, &managed, err, note_error) != 0 || managed == NULL) {
        PyErr_Clear();
        return NULL;
    }
    return memory_new(managed);
}

bool msc__py_store_fetch(msc__py_store *store, msc_error *err)
{
    msc__py_engine *engine = store->engine;
    void *stream;

    store->memory = allocate(engine, store->bytes, err);
    if (store->memory == NULL)
        return false;
    if (!msc__py_current_stream(engine, &stream)) {
        PyErr_Clear();
        stream = NULL;
    }
    if (msc_offload_get(engine->offload, store->ticket, store->memory->managed->tensor.data, stream, err) !=
        MSC_OK) {
        memory_release(store->memory);
        store->memory = NULL;
        return false;
    }
    store->announced = false;
    store->round++;
    store->waiting = store->saved_count;
    return true;
}

bool msc__py_store_arrive(msc__py_store *store)
{
    msc_offload *offload = store->engine->offload;
    msc_ticket ticket = store->ticket;
    void *stream;
    msc_status status;
    msc_error err;

    if (!msc__py_current_stream(store->engine, &stream))
        return false;
    Py_BEGIN_ALLOW_THREADS status = msc_offload_arrive(offload, ticket, stream, &err);
    Py_END_ALLOW_THREADS if (status == MSC_OK) return true;
    msc__py_raise(&err);
    return false;
}

PyObject *msc__py_store_view(msc__py_store *store, const msc__py_look *look)
{
    msc__py_memory *memory = store->memory;
    char *base;
    PyObject *tensor;

    if (memory != NULL)
        return view_new(store->engine, memory, memory->managed->tensor.data, look);
    base = store->base;
    if (store->source == NULL)
        return PyErr_Format(PyExc_RuntimeError, "a saved tensor is neither here nor away");
    msc_dl_managed *managed = NULL;
    if (store->engine->api->from_object(store->source, &managed) != 0)
        return NULL;
    memory = memory_new(managed);
    if (memory == NULL)
        return PyErr_NoMemory();
    tensor = view_new(store->engine, memory, base, look);
    memory_release(memory);
    return tensor;
}

void msc__py_store_forget(msc__py_store *store)
{
    if (store->memory != NULL)
        memory_release(store->memory);
    store->memory = NULL;
}
