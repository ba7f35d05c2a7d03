/* SPDX-License-Identifier: Apache-2.0 */
/** @file py_offload_store.h  Records of storages (py_offload.h), for the two files that use them. Needs the GIL. */
#ifndef MSC_EXT_PY_OFFLOAD_STORE_H
#define MSC_EXT_PY_OFFLOAD_STORE_H

#include "py_offload.h"

struct msc__py_store {
    msc__py_engine *engine;  /* a reference */
    msc_ticket ticket;       /* 0: the engine is closed, or the block is gone */
    msc__py_alias source;    /* none: its copy is complete */
    msc__py_alias counter;   /* on no memory, with the version counter of the source; none: no debug mode */
    const PyObject *owner;   /* identity of the tensor whose version counter the saves share */
    PyObject *owner_alive;   /* weak reference to it */
    PyObject *storage_alive; /* weak reference to the storage, once there is no source that holds it */
    char *base;              /* the storage's first byte, while it lives */
    uint64_t bytes;
    void *put_stream;             /* on which the source was made; its memory goes back to that one */
    void *fetch_stream;           /* likewise, of `memory` */
    long long version;            /* of the source when it was saved; -1: it has none */
    msc__py_memory *memory;       /* NULL: away */
    uint32_t references;          /* Saved objects, the flying list, callers */
    uint32_t saved_count;         /* Saved objects */
    uint32_t waiting;             /* of them, those not unpacked since the fetch */
    uint32_t round;               /* of fetches */
    bool here;                    /* the bytes of this fetch have arrived for `fetch_stream` */
    bool announced;               /* the engine knows that this fetch, or the source, is in use */
    bool modified;                /* the source changed before its copy was complete */
    bool flying;                  /* in the list of those with a source whose copy is on its way */
    bool known;                   /* in its bucket: other saves may find it */
    msc__py_store *next, *before; /* flying */
    msc__py_store *same_bucket;
    int32_t scalar_type; /* of the tensor that the record was made for */
    int32_t dim_count;   /* likewise, if it fills the storage; -1: it does not */
    msc_dl_dtype dtype;
    int64_t extents[]; /* likewise */
};

/** What a record is made of; the references are the record's when it was made. */
typedef struct msc__py_origin {
    const msc__py_look *look;
    const PyObject *owner;
    PyObject *owner_alive;
    msc__py_alias source;
    msc__py_alias counter;
    long long version;
    msc__py_span span;
    void *stream; /* present one */
} msc__py_origin;

/**
 * A record for a block that was put, flying, with a reference for the caller. Runs no other code.
 * NULL with MemoryError: ticket and references are the caller's.
 */
msc__py_store *msc__py_store_new(msc__py_engine *engine, msc_ticket ticket, const msc__py_origin *origin);

/** The record of a storage that has not been written since, or NULL. Runs no other code. */
msc__py_store *msc__py_store_find(const msc__py_engine *engine, const PyObject *owner, long long version,
                                  const msc__py_span *span);

/** The record of a ticket, or NULL. */
msc__py_store *msc__py_store_of(msc__py_engine *engine, msc_ticket ticket);

void msc__py_store_hold(msc__py_store *store);
void msc__py_store_release(msc__py_store *store);

/**
 * One `Saved` less; the last one ends the block.
 * @param round the fetch that it was unpacked from last.
 */
void msc__py_store_unsave(msc__py_store *store, uint32_t round);

/** One `Saved` has its tensor from the present fetch; the last of them lets go of the memory. */
void msc__py_store_served(msc__py_store *store);

/** Whether the source is as it was when it was saved; notes it if not. */
bool msc__py_store_check(msc__py_store *store);

/**
 * Lets go of the sources whose copies are complete, oldest first, and waits, without the GIL, while more than
 * `most_bytes` of them are held. False with an exception, also one that a signal's handler raised meanwhile.
 */
bool msc__py_store_settle(msc__py_engine *engine, uint64_t most_bytes);

/** Starts to fetch what is offloaded. False without room on the device, with the reason in `err` and no exception. */
bool msc__py_store_fetch(msc__py_store *store, msc_error *err);

/**
 * Lets go of memory that was fetched on another stream than the present one: PyTorch's allocator gives it back to
 * that stream, which knows nothing of what the present one still reads. False with an exception.
 */
bool msc__py_store_claim(msc__py_store *store);

/**
 * Waits, without the GIL, until the memory has the bytes. False with an exception, also one that a signal's
 * handler raised meanwhile; what could not be read is fetched again by the next use.
 */
bool msc__py_store_arrive(msc__py_store *store);

/** Lets go of the memory. */
void msc__py_store_forget(msc__py_store *store);

/** Lets go of the source, or the block, of a record whose engine closes. */
void msc__py_store_land(msc__py_store *store);

#endif /* MSC_EXT_PY_OFFLOAD_STORE_H */
