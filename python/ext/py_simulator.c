/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `Simulator`: the allocator simulator, driven from Python request by request.
 *
 *     Simulator("cuda", "expandable_segments:True", 24 << 30)
 *        │ alloc, free, free_request, free_complete, empty_cache, …        one call into the core each
 *        └ stats, segments, segment_events                                  copies, under PyTorch's names
 *
 * What it shows has the names of torch.cuda.memory_stats, memory_snapshot and the trace in a snapshot, so
 * that either can be compared with the other by `==` on the parts that both have.
 *
 * Calls hold the GIL: each takes less time than releasing it would.
 */
#include "py_simulator.h"

#include <string.h>

#include "convert.h"
#include "error.h"
#include "memscale/sim.h"
#include "py_sim.h"

typedef struct simulator {
    PyObject_HEAD msc_context *ctx;
    msc_sim *sim;
} simulator;

static msc_sim *self_sim(PyObject *self)
{
    return ((simulator *)self)->sim;
}

/** None, or the exception of a status. */
static PyObject *done(msc_status status, const msc_error *err)
{
    return status == MSC_OK ? Py_NewRef(Py_None) : msc__py_raise(err);
}

/* ---- life --------------------------------------------------------------------------------------- */

static bool to_limit(PyObject *value, const char *what, uint64_t *out)
{
    *out = UINT64_MAX;
    return value == NULL || value == Py_None || msc__py_to_u64(value, what, out);
}

/** Arguments of `Simulator`, in order; NULL where none was given. */
typedef struct arguments {
    PyObject *kind, *alloc_conf, *capacity_bytes, *device_total_bytes, *allowed_bytes, *record_segments;
} arguments;

static bool to_options(const arguments *given, msc_sim_options *out)
{
    const char *conf = "";
    uint64_t total_bytes;
    uint64_t allowed_bytes;
    msc_sim_kind kind = MSC_SIM_CUDA;
    msc_error err;

    if (!msc__py_to_sim_kind(given->kind, &kind))
        return false;
    *out = msc_sim_options_default(kind);
    if ((given->alloc_conf != NULL && !msc__py_to_string(given->alloc_conf, "alloc_conf", &conf)) ||
        !to_limit(given->capacity_bytes, "capacity_bytes", &out->capacity_bytes) ||
        !to_limit(given->device_total_bytes, "device_total_bytes", &total_bytes) ||
        !to_limit(given->allowed_bytes, "allowed_bytes", &allowed_bytes) ||
        !msc__py_to_bool(given->record_segments, "record_segments", &out->record_segments))
        return false;
    out->device_total_bytes = total_bytes == UINT64_MAX ? out->capacity_bytes : total_bytes;
    if (conf[0] != '\0' && msc_sim_options_parse(conf, out->device_total_bytes, out, &err) != MSC_OK) {
        msc__py_raise(&err);
        return false;
    }
    if (allowed_bytes != UINT64_MAX)
        out->allowed_bytes = allowed_bytes;
    return true;
}

static PyObject *simulator_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "kind", "alloc_conf", "capacity_bytes", "device_total_bytes", "allowed_bytes", "record_segments",
        NULL};
    arguments given = {0};
    msc_sim_options options;
    msc_error err;
    simulator *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO$OOO:Simulator", names, &given.kind,
                                     &given.alloc_conf, &given.capacity_bytes, &given.device_total_bytes,
                                     &given.allowed_bytes, &given.record_segments) ||
        !to_options(&given, &options))
        return NULL;
    self = (simulator *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    if (msc_context_create(NULL, &self->ctx, &err) != MSC_OK ||
        msc_sim_create(self->ctx, &options, &self->sim, &err) != MSC_OK) {
        Py_DECREF(self);
        return msc__py_raise(&err);
    }
    return (PyObject *)self;
}

static void simulator_dealloc(PyObject *object)
{
    simulator *self = (simulator *)object;
    PyTypeObject *type = Py_TYPE(object);

    msc_sim_destroy(self->sim);
    msc_context_destroy(self->ctx);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* ---- requests ----------------------------------------------------------------------------------- */

MSC_PY_SIGNATURE(alloc, 2, 4, "id", "size_bytes", "stream", "pool");

MSC_PY_FASTCALL(simulator_alloc)
{
    PyObject *values[4];
    uint32_t id = 0;
    uint64_t size_bytes = 0;
    msc_sim_place place = {0};
    msc_error err;

    if (!msc__py_bind(&alloc_signature, args, nargs, kwnames, values) ||
        !msc__py_to_id(values[0], "id", &id) || !msc__py_to_u64(values[1], "size_bytes", &size_bytes) ||
        !msc__py_to_u32(values[2], "stream", UINT32_MAX, &place.stream) ||
        !msc__py_to_u32(values[3], "pool", UINT32_MAX, &place.pool))
        return NULL;
    return done(msc_sim_alloc_in(self_sim(self), id, size_bytes, &place, &err), &err);
}

typedef msc_status (*id_call)(msc_sim *sim, uint32_t id, msc_error *err);

/** A call that takes a number and nothing else. */
static PyObject *call_with_id(PyObject *self, PyObject *value, const char *what, id_call call)
{
    uint32_t id = 0;
    msc_error err;

    if (!msc__py_to_id(value, what, &id))
        return NULL;
    return done(call(self_sim(self), id, &err), &err);
}

static PyObject *simulator_free(PyObject *self, PyObject *id)
{
    return call_with_id(self, id, "id", msc_sim_free);
}

static PyObject *simulator_free_request(PyObject *self, PyObject *id)
{
    return call_with_id(self, id, "id", msc_sim_free_request);
}

static PyObject *simulator_free_complete(PyObject *self, PyObject *id)
{
    return call_with_id(self, id, "id", msc_sim_free_complete);
}

static PyObject *simulator_release_pool(PyObject *self, PyObject *pool)
{
    return call_with_id(self, pool, "pool", msc_sim_release_pool);
}

static PyObject *simulator_set_capturing(PyObject *self, PyObject *value)
{
    uint8_t capturing = 0;

    if (!msc__py_to_bool(value, "capturing", &capturing))
        return NULL;
    msc_sim_set_capturing(self_sim(self), capturing);
    return Py_NewRef(Py_None);
}

static PyObject *simulator_place_next_segment(PyObject *self, PyObject *value)
{
    uint64_t address = 0;
    msc_error err;

    if (!msc__py_to_u64(value, "address", &address))
        return NULL;
    return done(msc_sim_place_next_segment(self_sim(self), address, &err), &err);
}

static PyObject *simulator_empty_cache(PyObject *self, PyObject *unused)
{
    (void)unused;
    msc_sim_empty_cache(self_sim(self));
    return Py_NewRef(Py_None);
}

static PyObject *simulator_reset(PyObject *self, PyObject *unused)
{
    (void)unused;
    msc_sim_reset(self_sim(self));
    return Py_NewRef(Py_None);
}

static PyObject *simulator_reset_peaks(PyObject *self, PyObject *unused)
{
    (void)unused;
    msc_sim_reset_peaks(self_sim(self));
    return Py_NewRef(Py_None);
}

static PyObject *simulator_reset_accumulated(PyObject *self, PyObject *unused)
{
    (void)unused;
    msc_sim_reset_accumulated(self_sim(self));
    return Py_NewRef(Py_None);
}

static PyObject *simulator_validate(PyObject *self, PyObject *unused)
{
    msc_error err;

    (void)unused;
    return done(msc_sim_validate(self_sim(self), &err), &err);
}

/* ---- statistics --------------------------------------------------------------------------------- */

#define STAT(name)                                                                                           \
    {                                                                                                        \
#name, offsetof(msc_sim_memory_stats, name)                                                          \
    }

/** A figure and where it stands. */
typedef struct named_stat {
    const char *name;
    size_t offset;
} named_stat;

/** One `msc_sim_stat` per pool each. */
static const named_stat pool_stats[] = {
    STAT(active),          STAT(active_bytes),   STAT(allocated_bytes),
    STAT(allocation),      STAT(inactive_split), STAT(inactive_split_bytes),
    STAT(requested_bytes), STAT(reserved_bytes), STAT(segment),
};

static const named_stat single_stats[] = {STAT(oversize_allocations), STAT(oversize_segments)};

static const named_stat counts[] = {
    STAT(num_alloc_retries), STAT(num_device_alloc),     STAT(num_device_free),
    STAT(num_ooms),          STAT(num_sync_all_streams),
};

static const char *const POOL_NAMES[] = {
    [MSC_SIM_STAT_ALL] = ".all",
    [MSC_SIM_STAT_SMALL_POOL] = ".small_pool",
    [MSC_SIM_STAT_LARGE_POOL] = ".large_pool",
};
_Static_assert(MSC_PY_COUNT(POOL_NAMES) == MSC_SIM_STAT_POOL_COUNT, "a name for every pool");

/** Sets `dict[<name><pool>.<part>]`. Takes the reference to `value`, which may be NULL after a failure. */
static bool set_stat(PyObject *dict, const char *name, const char *pool, const char *part, PyObject *value)
{
    PyObject *key = PyUnicode_FromFormat("%s%s%s", name, pool, part);
    bool ok = key != NULL && value != NULL && PyDict_SetItem(dict, key, value) == 0;

    Py_XDECREF(key);
    Py_XDECREF(value);
    return ok;
}

static bool set_parts(PyObject *dict, const char *name, const char *pool, const msc_sim_stat *stat)
{
    return set_stat(dict, name, pool, ".allocated", PyLong_FromUnsignedLongLong(stat->allocated)) &&
           set_stat(dict, name, pool, ".current", PyLong_FromUnsignedLongLong(stat->current)) &&
           set_stat(dict, name, pool, ".freed", PyLong_FromUnsignedLongLong(stat->freed)) &&
           set_stat(dict, name, pool, ".peak", PyLong_FromUnsignedLongLong(stat->peak));
}

static bool fill_stats(PyObject *dict, const msc_sim_memory_stats *stats)
{
    const char *base = (const char *)stats;
    bool is_limited = stats->max_split_size != UINT64_MAX;
    bool ok = true;

    for (size_t i = 0; ok && i < MSC_PY_COUNT(pool_stats); i++) {
        const msc_sim_stat *stat = (const msc_sim_stat *)(const void *)(base + pool_stats[i].offset);

        for (int pool = 0; ok && pool < MSC_SIM_STAT_POOL_COUNT; pool++)
            ok = set_parts(dict, pool_stats[i].name, POOL_NAMES[pool], &stat[pool]);
    }
    for (size_t i = 0; ok && i < MSC_PY_COUNT(single_stats); i++)
        ok = set_parts(dict, single_stats[i].name, "",
                       (const msc_sim_stat *)(const void *)(base + single_stats[i].offset));
    for (size_t i = 0; ok && i < MSC_PY_COUNT(counts); i++) {
        uint64_t count;

        memcpy(&count, base + counts[i].offset, sizeof count);
        ok = set_stat(dict, counts[i].name, "", "", PyLong_FromUnsignedLongLong(count));
    }
    return ok &&
           set_stat(dict, "max_split_size", "", "",
                    is_limited ? PyLong_FromUnsignedLongLong(stats->max_split_size) : PyLong_FromLong(-1));
}

static PyObject *simulator_stats(PyObject *self, PyObject *unused)
{
    msc_sim_memory_stats stats;
    PyObject *dict = PyDict_New();

    (void)unused;
    msc_sim_get_memory_stats(self_sim(self), &stats);
    if (dict != NULL && !fill_stats(dict, &stats))
        Py_CLEAR(dict);
    return dict;
}

/* ---- segments ----------------------------------------------------------------------------------- */

static const char *const BLOCK_STATES[] = {
    [MSC_SIM_BLOCK_FREE] = "inactive",
    [MSC_SIM_BLOCK_ALLOCATED] = "active_allocated",
    [MSC_SIM_BLOCK_AWAITING] = "active_pending_free",
};
_Static_assert(MSC_PY_COUNT(BLOCK_STATES) == MSC_SIM_BLOCK_STATE_COUNT, "a name for every state");

static const char *const ACTIONS[] = {
    [MSC_SIM_SEGMENT_ALLOC] = "segment_alloc",
    [MSC_SIM_SEGMENT_FREE] = "segment_free",
    [MSC_SIM_SEGMENT_MAP] = "segment_map",
    [MSC_SIM_SEGMENT_UNMAP] = "segment_unmap",
};
_Static_assert(MSC_PY_COUNT(ACTIONS) == MSC_SIM_SEGMENT_KIND_COUNT, "a name for every kind of event");

static const char *segment_type(uint8_t is_large)
{
    return is_large ? "large" : "small";
}

static PyObject *from_block(const msc_sim_block *block)
{
    return Py_BuildValue("{s:K,s:K,s:K,s:s,s:L}", "address", (unsigned long long)block->address, "size",
                         (unsigned long long)block->size_bytes, "requested_size",
                         (unsigned long long)block->requested_bytes, "state", BLOCK_STATES[block->state],
                         "id", msc__py_id(block->id));
}

static PyObject *from_blocks(const msc_sim_segment *segment, const msc_sim_block *blocks)
{
    PyObject *list = PyList_New((Py_ssize_t)(segment->block_end - segment->block_begin));

    for (uint32_t i = segment->block_begin; list != NULL && i < segment->block_end; i++) {
        PyObject *block = from_block(&blocks[i]);

        if (block == NULL || PyList_SetItem(list, (Py_ssize_t)(i - segment->block_begin), block) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *from_segment(const msc_sim_segment *segment, const msc_sim_block *blocks)
{
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:I,s:I,s:s,s:N,s:N}", "address", (unsigned long long)segment->address,
        "total_size", (unsigned long long)segment->size_bytes, "allocated_size",
        (unsigned long long)segment->allocated_bytes, "active_size",
        (unsigned long long)segment->active_bytes, "requested_size",
        (unsigned long long)segment->requested_bytes, "stream", (unsigned)segment->stream, "pool",
        (unsigned)segment->pool, "segment_type", segment_type(segment->is_large), "is_expandable",
        PyBool_FromLong(segment->is_expandable), "blocks", from_blocks(segment, blocks));
}

static PyObject *simulator_segments(PyObject *self, PyObject *unused)
{
    msc_sim_map *map = NULL;
    const msc_sim_segment *segments;
    const msc_sim_block *blocks;
    uint32_t count = 0;
    uint32_t block_count = 0;
    msc_error err;
    PyObject *list;

    (void)unused;
    if (msc_sim_map_create(self_sim(self), &map, &err) != MSC_OK)
        return msc__py_raise(&err);
    segments = msc_sim_map_segments(map, &count);
    blocks = msc_sim_map_blocks(map, &block_count);
    list = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *segment = from_segment(&segments[i], blocks);

        if (segment == NULL || PyList_SetItem(list, (Py_ssize_t)i, segment) < 0)
            Py_CLEAR(list);
    }
    msc_sim_map_destroy(map);
    return list;
}

static PyObject *from_event(const msc_sim_segment_event *event)
{
    return Py_BuildValue("{s:s,s:K,s:K,s:I,s:I,s:s,s:K}", "action", ACTIONS[event->kind], "addr",
                         (unsigned long long)event->address, "size", (unsigned long long)event->size_bytes,
                         "stream", (unsigned)event->stream, "pool", (unsigned)event->pool, "segment_type",
                         segment_type(event->is_large), "call", (unsigned long long)event->call);
}

static PyObject *simulator_segment_events(PyObject *self, PyObject *unused)
{
    uint64_t count = 0;
    const msc_sim_segment_event *events = msc_sim_segment_events(self_sim(self), &count);
    PyObject *list = PyList_New((Py_ssize_t)count);

    (void)unused;
    for (uint64_t i = 0; list != NULL && i < count; i++) {
        PyObject *event = from_event(&events[i]);

        if (event == NULL || PyList_SetItem(list, (Py_ssize_t)i, event) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* ---- type --------------------------------------------------------------------------------------- */

static PyMethodDef simulator_methods[] = {
    MSC_PY_METHOD("alloc", simulator_alloc, 0,
                  "alloc($self, /, id, size_bytes, stream=0, pool=0)\n--\n\nAllocates under an unused id."),
    {"free", simulator_free, METH_O, "free($self, id, /)\n--\n\nFrees an id at once."},
    {"free_request", simulator_free_request, METH_O,
     "free_request($self, id, /)\n--\n\nFrees an id that another stream still uses."},
    {"free_complete", simulator_free_complete, METH_O,
     "free_complete($self, id, /)\n--\n\nThe streams that used a freed id have finished."},
    {"empty_cache", simulator_empty_cache, METH_NOARGS,
     "empty_cache($self, /)\n--\n\nGives every unused segment back."},
    {"release_pool", simulator_release_pool, METH_O,
     "release_pool($self, pool, /)\n--\n\nThe last user of a private pool is gone."},
    {"set_capturing", simulator_set_capturing, METH_O,
     "set_capturing($self, capturing, /)\n--\n\nWhether a CUDA graph is being captured."},
    {"reset", simulator_reset, METH_NOARGS, "reset($self, /)\n--\n\nForgets everything but the options."},
    {"reset_peaks", simulator_reset_peaks, METH_NOARGS,
     "reset_peaks($self, /)\n--\n\nStarts peaks anew from the present values."},
    {"reset_accumulated", simulator_reset_accumulated, METH_NOARGS,
     "reset_accumulated($self, /)\n--\n\nStarts sums and event counts anew at 0."},
    {"place_next_segment", simulator_place_next_segment, METH_O,
     "place_next_segment($self, address, /)\n--\n\nThe address of the segment obtained next."},
    {"stats", simulator_stats, METH_NOARGS,
     "stats($self, /)\n--\n\nStatistics under the names of torch.cuda.memory_stats."},
    {"segments", simulator_segments, METH_NOARGS,
     "segments($self, /)\n--\n\nWhat is reserved, as torch.cuda.memory_snapshot."},
    {"segment_events", simulator_segment_events, METH_NOARGS,
     "segment_events($self, /)\n--\n\nSegment events so far."},
    {"validate", simulator_validate, METH_NOARGS,
     "validate($self, /)\n--\n\nChecks every invariant of the simulator."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot simulator_slots[] = {
    {Py_tp_doc, "Simulator(kind, alloc_conf='', capacity_bytes=None, *, device_total_bytes=None,\n"
                "          allowed_bytes=None, record_segments=False)\n--\n\n"
                "An allocator without memory, driven request by request."},
    {Py_tp_new, simulator_new},
    {Py_tp_dealloc, simulator_dealloc},
    {Py_tp_methods, simulator_methods},
    {0, NULL},
};

static PyType_Spec simulator_spec = {
    .name = "memscale._core.Simulator",
    .basicsize = sizeof(simulator),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = simulator_slots,
};

PyTypeObject *msc__py_simulator_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &simulator_spec, NULL);
}
