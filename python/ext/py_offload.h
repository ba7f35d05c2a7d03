/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file py_offload.h
 * `OffloadEngine`: the offload engine with the two hooks that autograd calls, and `Saved`, what they hand over.
 *
 *      torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack)
 *
 * A **record** stands for one storage that was put into the engine. All tensors on that storage that autograd saves
 * before it is written again share the record; each has a `Saved` of its own with its dtype, sizes, strides and place
 * in the storage:
 *
 *      Saved ─┐
 *      Saved ─┼─► record ──► source       a detached tensor, until the copy out is complete
 *      Saved ─┘         ├──► ticket       the block in the engine
 *                       └──► memory       on the device again, from its fetch until every `Saved` has been unpacked
 *
 * All of this is guarded by the GIL, which is released only while waiting for a copy.
 */
#ifndef MSC_EXT_PY_OFFLOAD_H
#define MSC_EXT_PY_OFFLOAD_H

#include "pydoor.h"

#include "memscale/offload.h"
#include "py_dlpack.h"

/** Names that the hooks look up, made once. */
typedef struct msc__py_names {
    PyObject *base, *version, *untyped_storage, *nbytes, *data_ptr, *detach, *grad_fn, *name, *next_functions;
} msc__py_names;

/** Memory on the device that several tensors lie on; ends with the last of them, on any thread. */
typedef struct msc__py_memory msc__py_memory;

typedef struct msc__py_store msc__py_store;

/** A step of a large model has some thousand saved storages. */
#define MSC_PY_STORE_BUCKETS 1024u

typedef struct msc__py_engine {
    PyObject_HEAD msc_context *ctx;
    msc_context *device_ctx;
    msc_device *device;
    msc_offload *offload; /* NULL: closed */
    const msc_dl_api *api;
    PyTypeObject *tensor_type; /* torch.Tensor */
    PyTypeObject *saved_type;
    msc__py_names names;
    int32_t device_type; /* as DLPack has it */
    int32_t device_ordinal;
    PyTypeObject *parameter_type;
    bool chooses;          /* only the saves that are marked in `chosen` leave */
    uint8_t *chosen;       /* by ordinal in the region */
    uint32_t chosen_count; /* entries of `chosen` that count */
    uint32_t chosen_room;
    uint32_t ordinal;      /* of the next save in the region */
    uint64_t least_bytes;  /* smaller storages stay */
    uint64_t window_bytes; /* sources that wait for their copy, at most */

    msc__py_store **records; /* by the index of their ticket */
    uint32_t record_capacity;
    msc__py_store *buckets[MSC_PY_STORE_BUCKETS]; /* by the identity of their storage */
    msc__py_store *flying_first, *flying_last;    /* those that have a source whose copy is on its way */
    uint64_t flying_bytes;
    uint64_t kept_count, moved_count, shared_count, forwarded_count; /* saves, by what became of them */
} msc__py_engine;

PyTypeObject *msc__py_engine_type_new(PyObject *module);
PyTypeObject *msc__py_saved_type_new(PyObject *module);

/** The hooks. */
PyObject *msc__py_engine_pack(PyObject *self, PyObject *tensor);
PyObject *msc__py_engine_unpack(PyObject *self, PyObject *saved);

/** Waits until no source is held any more. False with an exception. */
bool msc__py_engine_settle_all(msc__py_engine *engine);

/** Gives up all records' sources and memory and the engine; what was saved cannot be unpacked any more. */
void msc__py_engine_close(msc__py_engine *engine);

#endif /* MSC_EXT_PY_OFFLOAD_H */
