/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_offload_store.h  Records of storages (py_offload.h), for the two files that use them. Needs the GIL. */
#ifndef MSC_EXT_PY_OFFLOAD_STORE_H
#define MSC_EXT_PY_OFFLOAD_STORE_H

#include "py_offload.h"

struct msc__py_store {
    msc__py_engine *engine; /* a reference */
    msc_ticket ticket;      /* 0: the engine is closed, or the block is gone */
    PyObject *source;       /* detached; NULL: its copy is complete */
    void *storage;          /* identity of the storage, for as long as `alive` refers to it */
    PyObject *owner;        /* weak reference to the tensor whose version counter the saves share */
    PyObject *alive;        /* weak reference to it */
    char *base;             /* its first byte, valid while `source` is there */
    uint64_t bytes;
    long long version;      /* of the source when it was saved; -1: it has none */
    msc__py_memory *memory; /* NULL: away */
    uint32_t references;    /* Saved objects, the flying list, callers that wait */
    uint32_t saved_count;   /* Saved objects */
    uint32_t waiting;       /* of them, those not unpacked since the fetch */
    uint32_t round;         /* of fetches */
    bool announced;         /* the engine knows that this fetch, or the source, is in use */
    bool modified;          /* the source changed before its copy was complete */
    msc__py_store *next;    /* flying */
    msc__py_store *same_bucket;
};

/** What a tensor on a storage looks like. Sizes first, then strides, `dim_count` of each. */
typedef struct msc__py_look {
    uint64_t byte_offset;
    msc_dl_dtype dtype;
    int32_t dim_count;
    const int64_t *extents;
} msc__py_look;

/** A new record for a storage that was put; takes `source`. NULL with MemoryError; the ticket is the caller's then. */
msc__py_store *msc__py_store_new(msc__py_engine *engine, msc_ticket ticket, PyObject *source);

/** Makes the record known by its storage, an UntypedStorage, and the version of the tensor that was saved. */
bool msc__py_store_enter(msc__py_store *store, PyObject *storage, PyObject *owner, long long version);

/** The record of a storage that has not been written since, or NULL. */
msc__py_store *msc__py_store_find(const msc__py_engine *engine, const void *storage, const PyObject *owner,
                                  long long version);

/** The record of a ticket, or NULL. */
msc__py_store *msc__py_store_of(msc__py_engine *engine, msc_ticket ticket);

void msc__py_store_hold(msc__py_store *store);
void msc__py_store_release(msc__py_store *store);

/** One `Saved` less; the last one ends the block. */
void msc__py_store_unsave(msc__py_store *store);

/** Ends flying: the source is let go, unless it is all there is. */
void msc__py_store_land(msc__py_store *store);

/** Whether the source is as it was when it was saved; notes it if not. */
bool msc__py_store_check(msc__py_store *store);

/** Waits, without the GIL, until the oldest flying record may give up its source. False with an exception. */
bool msc__py_store_settle_oldest(msc__py_engine *engine);

/** Starts to fetch. False without room on the device, with the reason in `err`. */
bool msc__py_store_fetch(msc__py_store *store, msc_error *err);

/** Waits, without the GIL, until the memory has the bytes. False with an exception. */
bool msc__py_store_arrive(msc__py_store *store);

/** A tensor on the memory, or on the source where that is still there; NULL with an exception. */
PyObject *msc__py_store_view(msc__py_store *store, const msc__py_look *look);

/** Lets go of the memory. */
void msc__py_store_forget(msc__py_store *store);

/** The stream that the program works on now. False with an exception. */
bool msc__py_current_stream(const msc__py_engine *engine, void **out);

#endif /* MSC_EXT_PY_OFFLOAD_STORE_H */
