/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file py_offload.h
 * `OffloadEngine`: the offload engine with the two hooks that autograd calls, and `Saved`, what they hand over; and
 * `Block`, one tensor's bytes for those who ask for them themselves.
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
 *                       ├──► memory       on the device again, from its fetch until every `Saved` has been unpacked
 *                       └──► counter      in debug mode: an empty tensor with the version of the source
 *
 * All of this is guarded by the GIL. It is released while waiting for a copy, and PyTorch's functions may release it
 * or run any code when a tensor ends: their caller holds a reference to its record, and looks again afterwards.
 */
#ifndef MSC_EXT_PY_OFFLOAD_H
#define MSC_EXT_PY_OFFLOAD_H

#include "pydoor.h"

#include "memscale/offload.h"
#include "py_torch.h"

typedef struct msc__py_store msc__py_store;
typedef struct msc__py_block msc__py_block;

/** A step of a large model has some thousand saved storages. */
#define MSC_PY_STORE_BUCKETS 1024u

/** Types of autograd nodes that are remembered. */
#define MSC_PY_NODE_TYPES 64u

typedef struct msc__py_engine {
    PyObject_HEAD msc_context *ctx;
    msc_context *device_ctx;
    msc_device *device;
    msc_offload *offload;   /* NULL: closed */
    msc_offload *condemned; /* closed while calls were inside: the last of them ends it */
    uint32_t inside;        /* calls that wait in the engine without the GIL */
    msc__py_torch torch;
    PyTypeObject *saved_type;
    PyTypeObject *block_type;
    msc__py_block *blocks;                      /* all that are not dropped */
    const void *other_nodes[MSC_PY_NODE_TYPES]; /* types of nodes that cast nothing, by their address */
    bool debug;
    bool chooses;          /* only the saves that are marked in `chosen` leave */
    uint8_t *chosen;       /* by ordinal in the region */
    uint32_t chosen_count; /* entries of `chosen` that count */
    uint32_t chosen_room;
    uint32_t ordinal;      /* of the next save in the region */
    uint64_t least_bytes;  /* smaller storages stay */
    uint64_t window_bytes; /* sources that wait for their copy, at most */

    msc__py_store **records; /* by the index of their ticket */
    uint32_t record_capacity;
    msc__py_store *buckets[MSC_PY_STORE_BUCKETS]; /* by their owner */
    msc__py_store *flying_first, *flying_last;    /* those that have a source whose copy is on its way */
    uint64_t flying_bytes;
    uint64_t unseen_bytes; /* of those that were put since the engine was last asked what has settled */
    uint32_t unseen_count;
    uint64_t kept_count, moved_count, shared_count, forwarded_count; /* saves, by what became of them */
} msc__py_engine;

PyTypeObject *msc__py_engine_type_new(PyObject *module);
PyTypeObject *msc__py_saved_type_new(PyObject *module);
PyTypeObject *msc__py_block_type_new(PyObject *module);

/** The hooks. */
PyObject *msc__py_engine_pack(PyObject *self, PyObject *tensor);
PyObject *msc__py_engine_unpack(PyObject *self, PyObject *saved);

/** Starts to copy a tensor's bytes out: a new Block. */
PyObject *msc__py_engine_put(PyObject *self, PyObject *tensor);

/** Around calls without the GIL: a close meanwhile leaves the engine's end to the last of them. */
msc_offload *msc__py_engine_enter(msc__py_engine *engine);
void msc__py_engine_leave(msc__py_engine *engine);

/** Memory to copy out, and the stream that made it. */
typedef struct msc__py_source {
    void *memory;
    uint64_t bytes;
    void *stream;
} msc__py_source;

/**
 * As `msc_offload_put`, for an engine that is open; without the GIL where the system is asked for room, which takes
 * milliseconds. ECANCELED (no message): it was closed meanwhile.
 */
msc_status msc__py_engine_copy_out(msc__py_engine *engine, const msc__py_source *what, msc_ticket *out,
                                   msc_error *err);

/** Drops all blocks of an engine that closes. */
void msc__py_blocks_close(msc__py_engine *engine, msc_offload *offload);

/** Gives up all records' sources and memory, all blocks, and the engine; what was saved cannot be unpacked any more. */
void msc__py_engine_close(msc__py_engine *engine);

#endif /* MSC_EXT_PY_OFFLOAD_H */
