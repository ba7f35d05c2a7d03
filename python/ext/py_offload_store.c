/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records of storages: found by their owner, flying until their copy out is complete, fetched when they are needed.
 *
 * Two saves share a record if nothing was written between them, which the version says if it is the same counter:
 * hence the owner, the tensor itself or what it is a view of. The owner lives as long as its weak reference says
 * so. It may have been given another storage (`tensor.data = ...`), so the storage must be the same too: as long as
 * the record holds it, or a weak reference says that it lives, no other can have its address. That reference is
 * made when the source goes, and only if the owner has not gone by then, which is seldom.
 *
 * Whatever runs other code (releasing a tensor, asking PyTorch, waiting) may end in another call on the same
 * record, so a reference is held across it, and nothing is assumed afterwards.
 */
#include <string.h>

#include "error.h"
#include "py_offload_store.h"

#define ASKED_MOST 16u /* sources, in one question: as many as are put before one */

/* ---- the list of those that fly ----------------------------------------------------------------- */

static void start_flying(msc__py_store *store)
{
    msc__py_engine *engine = store->engine;

    store->before = engine->flying_last;
    if (engine->flying_last != NULL)
        engine->flying_last->next = store;
    else
        engine->flying_first = store;
    engine->flying_last = store;
    store->flying = true;
    engine->flying_bytes += store->bytes;
    engine->unseen_bytes += store->bytes;
    engine->unseen_count++;
}

/* The list's reference is the caller's. */
static void stop_flying(msc__py_store *store)
{
    msc__py_engine *engine = store->engine;

    if (store->before != NULL)
        store->before->next = store->next;
    else
        engine->flying_first = store->next;
    if (store->next != NULL)
        store->next->before = store->before;
    else
        engine->flying_last = store->before;
    store->next = store->before = NULL;
    store->flying = false;
    engine->flying_bytes -= store->bytes;
}

/* ---- finding ------------------------------------------------------------------------------------ */

static msc__py_store **bucket_of(msc__py_engine *engine, const PyObject *owner)
{
    return &engine->buckets[((uintptr_t)owner >> 4) * 0x9E3779B1u % MSC_PY_STORE_BUCKETS];
}

static void enter_bucket(msc__py_store *store)
{
    msc__py_store **bucket = bucket_of(store->engine, store->owner);

    store->same_bucket = *bucket;
    *bucket = store;
    store->known = true;
}

static void leave_bucket(msc__py_store *store)
{
    msc__py_store **at = bucket_of(store->engine, store->owner);

    if (!store->known)
        return;
    while (*at != store)
        at = &(*at)->same_bucket;
    *at = store->same_bucket;
    store->known = false;
}

static bool is_alive(PyObject *reference)
{
    return reference != NULL && PyWeakref_GetObject(reference) != Py_None;
}

msc__py_store *msc__py_store_find(const msc__py_engine *engine, const PyObject *owner, long long version,
                                  const msc__py_span *span)
{
    msc__py_store *store = *bucket_of((msc__py_engine *)engine, owner);

    for (; store != NULL; store = store->same_bucket)
        if (store->owner == owner && store->version == version && store->base == span->base &&
            store->bytes == span->bytes && is_alive(store->owner_alive) &&
            (msc__py_alias_is(&store->source) || is_alive(store->storage_alive)))
            return store;
    return NULL;
}

/* Before the source goes: other saves go on finding the record if they can. */
static void stay_findable(msc__py_store *store)
{
    const msc__py_torch *torch = &store->engine->torch;
    PyObject *source;
    PyObject *storage;
    PyObject *alive = NULL;

    if (!store->known)
        return;
    if (!is_alive(store->owner_alive)) {
        leave_bucket(store);
        return;
    }
    source = msc__py_alias_object(torch, &store->source);
    storage = source != NULL ? PyObject_CallFunctionObjArgs(torch->untyped_storage, source, NULL) : NULL;
    if (storage != NULL)
        alive = PyWeakref_NewRef(storage, NULL);
    Py_XDECREF(storage);
    Py_XDECREF(source);
    if (alive == NULL) {
        msc__py_clear_error();
        leave_bucket(store);
    }
    Py_XDECREF(store->storage_alive);
    store->storage_alive = alive;
}

/* ---- life --------------------------------------------------------------------------------------- */

static bool make_room(msc__py_engine *engine, uint32_t index)
{
    uint32_t capacity = engine->record_capacity < 64 ? 64 : engine->record_capacity;
    msc__py_store **records;

    if (index < engine->record_capacity)
        return true;
    while (capacity <= index)
        capacity *= 2;
    records = PyMem_Realloc(engine->records, capacity * sizeof(msc__py_store *));
    if (records == NULL)
        return false;
    memset(records + engine->record_capacity, 0,
           (capacity - engine->record_capacity) * sizeof(msc__py_store *));
    engine->records = records;
    engine->record_capacity = capacity;
    return true;
}

/* A record that remembers the tensor's shape, if that fills the storage. */
static msc__py_store *make_record(const msc__py_engine *engine, const msc__py_origin *origin)
{
    const msc_dl_tensor *tensor = &origin->look->tensor;
    int32_t scalar_type;
    bool fills = msc__py_fills(&engine->torch, origin->look, origin->span.bytes, &scalar_type);
    size_t count = fills ? (size_t)tensor->dim_count : 0;
    msc__py_store *store = PyMem_Calloc(1, sizeof *store + 2 * count * sizeof(int64_t));

    if (store == NULL)
        return NULL;
    store->dim_count = -1;
    if (!fills)
        return store;
    store->scalar_type = scalar_type;
    store->dim_count = tensor->dim_count;
    store->dtype = tensor->dtype;
    memcpy(store->extents, tensor->sizes, count * sizeof(int64_t));
    memcpy(store->extents + count, tensor->strides, count * sizeof(int64_t));
    return store;
}

msc__py_store *msc__py_store_new(msc__py_engine *engine, msc_ticket ticket, const msc__py_origin *origin)
{
    uint32_t index = (uint32_t)ticket;
    msc__py_store *store = make_room(engine, index) ? make_record(engine, origin) : NULL;

    if (store == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    store->engine = (msc__py_engine *)Py_NewRef((PyObject *)engine);
    store->ticket = ticket;
    store->source = origin->source;
    store->counter = origin->counter;
    store->owner = origin->owner;
    store->owner_alive = origin->owner_alive;
    store->version = origin->version;
    store->put_stream = origin->stream;
    store->base = origin->span.base;
    store->bytes = origin->span.bytes;
    store->references = 2; /* the flying list's, and the caller's */
    engine->records[index] = store;
    enter_bucket(store);
    start_flying(store);
    return store;
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
    leave_bucket(store);
    msc__py_store_forget(store);
    msc__py_alias_clear(&engine->torch, &store->source);
    msc__py_alias_clear(&engine->torch, &store->counter);
    Py_XDECREF(store->owner_alive);
    Py_XDECREF(store->storage_alive);
    PyMem_Free(store);
    Py_DECREF((PyObject *)engine);
}

void msc__py_store_land(msc__py_store *store)
{
    if (!store->flying)
        return;
    stop_flying(store);
    msc__py_alias_clear(&store->engine->torch, &store->source);
    msc__py_store_release(store);
}

void msc__py_store_forget(msc__py_store *store)
{
    msc__py_memory *memory = store->memory;

    store->memory = NULL;
    store->announced = false;
    if (memory != NULL)
        msc__py_memory_release(memory);
}

void msc__py_store_served(msc__py_store *store)
{
    if (--store->waiting == 0)
        msc__py_store_forget(store);
}

/* The block ends. */
static void end_block(msc__py_store *store)
{
    msc__py_engine *engine = store->engine;
    msc_ticket ticket = store->ticket;

    leave_bucket(store);
    engine->records[(uint32_t)ticket] = NULL;
    store->ticket = 0;
    msc_offload_drop(engine->offload, ticket);
    msc__py_store_land(store);
    msc__py_store_forget(store);
}

void msc__py_store_unsave(msc__py_store *store, uint32_t round)
{
    store->saved_count--;
    if (store->saved_count == 0 && store->ticket != 0)
        end_block(store);
    else if (store->memory != NULL && round != store->round)
        msc__py_store_served(store);
    msc__py_store_release(store);
}

bool msc__py_store_check(msc__py_store *store)
{
    const msc__py_alias *watched = msc__py_alias_is(&store->counter) ? &store->counter : &store->source;

    if (!store->modified && store->version >= 0 && msc__py_alias_is(watched))
        store->modified = msc__py_alias_version(&store->engine->torch, watched) != store->version;
    return !store->modified;
}

/* ---- waiting ------------------------------------------------------------------------------------ */

msc_offload *msc__py_engine_enter(msc__py_engine *engine)
{
    engine->inside++;
    return engine->offload;
}

void msc__py_engine_leave(msc__py_engine *engine)
{
    msc_offload *condemned = engine->condemned;

    if (--engine->inside > 0 || condemned == NULL)
        return;
    engine->condemned = NULL;
    msc_offload_destroy(condemned);
}

/* The engine may be closed meanwhile, and its blocks with it. */
static msc_status put_without_gil(msc__py_engine *engine, const msc__py_source *what, msc_ticket *out,
                                  msc_error *err)
{
    msc_offload *offload = msc__py_engine_enter(engine);
    bool closed;
    msc_status status;

    Py_BEGIN_ALLOW_THREADS
    status = msc_offload_put(offload, what->memory, what->bytes, what->stream, out, err);
    Py_END_ALLOW_THREADS
    closed = engine->offload == NULL;
    if (closed && status == MSC_OK)
        msc_offload_drop(offload, *out);
    msc__py_engine_leave(engine);
    return closed ? MSC_ECANCELED : status;
}

msc_status msc__py_engine_copy_out(msc__py_engine *engine, const msc__py_source *what, msc_ticket *out,
                                   msc_error *err)
{
    msc_status status =
        msc_offload_put_now(engine->offload, what->memory, what->bytes, what->stream, out, err);

    return status == MSC_ETIMEDOUT ? put_without_gil(engine, what, out, err) : status;
}

/* The copy out is over. The caller has a reference. */
static void finish(msc__py_store *store, msc_status status)
{
    (void)msc__py_store_check(store);
    if (status == MSC_OK) {
        stay_findable(store);
        msc__py_store_land(store);
    } else if (store->flying) { /* the copy failed: the source is all there is, and stays */
        stop_flying(store);
        msc__py_store_release(store);
    }
}

static bool wait_for_oldest(msc__py_engine *engine)
{
    msc__py_store *store;
    msc_offload *offload;
    msc_ticket ticket;
    msc_status status;
    msc_error err;

    store = engine->flying_first;
    if (store == NULL || engine->offload == NULL)
        return true;
    ticket = store->ticket;
    msc__py_store_hold(store);
    offload = msc__py_engine_enter(engine);
    Py_BEGIN_ALLOW_THREADS
    status = msc_offload_settle(offload, ticket, store->put_stream, &err);
    Py_END_ALLOW_THREADS
    msc__py_engine_leave(engine);
    if (store->flying &&
        store->ticket == ticket) /* or else its last Saved ended, or another thread was faster */
        finish(store, status);
    msc__py_store_release(store);
    return PyErr_CheckSignals() == 0;
}

/* Asks for several at once: a question costs more than an answer. False: there is no more that has settled. */
static bool finish_settled(msc__py_engine *engine)
{
    const msc__py_store *next = engine->flying_first;
    msc_ticket tickets[ASKED_MOST];
    uint32_t count = 0;
    uint32_t i;

    if (engine->offload == NULL)
        return false;
    for (; next != NULL && count < ASKED_MOST; next = next->next)
        tickets[count++] = next->ticket;
    count = msc_offload_settled_of(engine->offload, tickets, count);
    for (i = 0; i < count; i++) {
        msc__py_store *store = msc__py_store_of(engine, tickets[i]);

        if (store == NULL || !store->flying)
            continue;
        msc__py_store_hold(store);
        finish(store, MSC_OK);
        msc__py_store_release(store);
    }
    return count == ASKED_MOST;
}

bool msc__py_store_settle(msc__py_engine *engine, uint64_t most_bytes)
{
    engine->unseen_bytes = 0;
    engine->unseen_count = 0;
    while (finish_settled(engine))
        continue;
    while (engine->flying_first != NULL && engine->offload != NULL) {
        msc__py_store *store = engine->flying_first;
        msc_status status = msc_offload_settled(engine->offload, store->ticket, NULL);

        if (status != MSC_EAGAIN) {
            msc__py_store_hold(store);
            finish(store, status);
            msc__py_store_release(store);
        } else if (engine->flying_bytes <= most_bytes) {
            break;
        } else if (!wait_for_oldest(engine)) {
            return false;
        }
    }
    return true;
}

static msc__py_memory *make_memory(const msc__py_store *store, msc_error *err)
{
    msc__py_form form = {
        .shape = {.dtype = store->dtype, .dim_count = store->dim_count, .extents = store->extents},
        .scalar_type = store->scalar_type};

    return msc__py_memory_new(&store->engine->torch, store->bytes, store->dim_count >= 0 ? &form : NULL, err);
}

bool msc__py_store_fetch(msc__py_store *store, msc_error *err)
{
    msc__py_engine *engine = store->engine;
    msc__py_memory *memory;
    void *stream;

    memory = make_memory(store, err);
    if (memory == NULL)
        return false;
    if (!msc__py_current_stream(&engine->torch, &stream)) {
        msc__py_clear_error();
        msc__py_memory_release(memory);
        return false;
    }
    if (store->ticket == 0 || store->memory != NULL || msc__py_alias_is(&store->source)) {
        msc__py_memory_release(memory); /* another thread was faster, or has closed the engine */
        return true;
    }
    if (msc_offload_get(engine->offload, store->ticket, msc__py_memory_data(memory), stream, err) != MSC_OK) {
        msc__py_memory_release(memory);
        return false;
    }
    store->memory = memory;
    store->fetch_stream = stream;
    store->announced = store->here = false;
    store->round++;
    store->waiting = store->saved_count;
    return true;
}

/* Without the GIL only where there is something to wait for. */
static msc_status arrive(msc__py_engine *engine, msc_ticket ticket, void *stream, msc_error *err)
{
    msc_status status = msc_offload_arrived(engine->offload, ticket, stream, err);
    msc_offload *offload;

    if (status != MSC_EAGAIN)
        return status;
    offload = msc__py_engine_enter(engine);
    Py_BEGIN_ALLOW_THREADS
    status = msc_offload_arrive(offload, ticket, stream, err);
    Py_END_ALLOW_THREADS
    msc__py_engine_leave(engine);
    return status;
}

bool msc__py_store_claim(msc__py_store *store)
{
    msc__py_engine *engine = store->engine;
    const msc__py_memory *memory = store->memory;
    void *stream;
    msc_status status;
    msc_error err;

    if (memory == NULL || store->ticket == 0 || engine->offload == NULL)
        return true;
    if (!msc__py_current_stream(&engine->torch, &stream))
        return false;
    if (stream == store->fetch_stream)
        return true;
    status = arrive(engine, store->ticket, store->fetch_stream, &err);
    if (store->memory == memory)
        msc__py_store_forget(store);
    if (status != MSC_OK)
        msc__py_raise_of_device(&err);
    return status == MSC_OK;
}

bool msc__py_store_arrive(msc__py_store *store)
{
    msc__py_engine *engine = store->engine;
    const msc__py_memory *memory = store->memory;
    void *stream;
    msc_status status;
    msc_error err;

    if (!msc__py_current_stream(&engine->torch, &stream))
        return false;
    if (store->here && stream == store->fetch_stream)
        return true;
    if (engine->offload == NULL || store->ticket == 0) {
        PyErr_SetString(PyExc_RuntimeError, "the offload engine that holds this saved tensor is closed");
        return false;
    }
    status = arrive(engine, store->ticket, stream, &err);
    if (status == MSC_OK) {
        if (store->memory == memory)
            store->here = stream == store->fetch_stream;
        return PyErr_CheckSignals() == 0;
    }
    if (store->memory == memory)
        msc__py_store_forget(store);
    msc__py_raise_of_device(&err);
    return false;
}
