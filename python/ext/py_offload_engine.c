/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `OffloadEngine`: life, limits, counters. Its hooks are in py_offload_hooks.c.
 *
 * The engine's threads never touch Python. Calls that wait for them release the GIL; `Saved` objects that end
 * may wait for a copy under way with the GIL held, which no copy needs.
 */
#include "py_offload.h"

#include <string.h>

#include "convert.h"
#include "error.h"
#include "module_state.h"
#include "py_offload_store.h"

/* ---- arguments ---------------------------------------------------------------------------------- */

typedef struct settings {
    msc_offload_options offload;
    msc_device_options device;
    uint64_t least_bytes;
    uint64_t window_bytes;
    uint8_t debug;
    uint8_t cuda;
    uint64_t delay_most_ns, fault_bytes_per_second, seed, pin_limit_bytes;
    uint32_t split_ppm, fail_ppm, pin_delay_us;
    uint8_t refuse_pins;
    uint8_t capsules;
    uint8_t no_library;
} settings;

#define FIELD(name, kind, member)                                                                            \
    {                                                                                                        \
        name, kind, offsetof(settings, member)                                                               \
    }

static const msc__py_field setting_fields[] = {
    FIELD("pinned_bytes", MSC_PY_U64, offload.limit_bytes[MSC_TIER_PINNED]),
    FIELD("host_bytes", MSC_PY_U64, offload.limit_bytes[MSC_TIER_HOST]),
    FIELD("file_bytes", MSC_PY_U64, offload.limit_bytes[MSC_TIER_FILE]),
    FIELD("chunk_bytes", MSC_PY_U64, offload.chunk_bytes),
    FIELD("staging_count", MSC_PY_U32, offload.staging_count),
    FIELD("prefetch_count", MSC_PY_U32, offload.prefetch_count),
    FIELD("prefetch_bytes", MSC_PY_U64, offload.prefetch_bytes),
    FIELD("trace_count", MSC_PY_U32, offload.trace_count),
    FIELD("debug", MSC_PY_BOOL, debug),
    FIELD("cuda", MSC_PY_BOOL, cuda),
    FIELD("ordinal", MSC_PY_U32, device.ordinal),
    FIELD("least_bytes", MSC_PY_U64, least_bytes),
    FIELD("window_bytes", MSC_PY_U64, window_bytes),
    FIELD("fault_seed", MSC_PY_U64, seed),
    FIELD("fault_delay_most_ns", MSC_PY_U64, delay_most_ns),
    FIELD("fault_bytes_per_second", MSC_PY_U64, fault_bytes_per_second),
    FIELD("fault_split_ppm", MSC_PY_U32, split_ppm),
    FIELD("fault_fail_ppm", MSC_PY_U32, fail_ppm),
    FIELD("fault_pin_limit_bytes", MSC_PY_U64, pin_limit_bytes),
    FIELD("fault_pin_delay_us", MSC_PY_U32, pin_delay_us),
    FIELD("fault_refuse_pins", MSC_PY_BOOL, refuse_pins),
    FIELD("fault_capsules", MSC_PY_BOOL, capsules),
    FIELD("fault_no_library", MSC_PY_BOOL, no_library),
    FIELD("no_library", MSC_PY_BOOL, no_library),
};

static const msc__py_record setting_record = {"options", setting_fields, MSC_PY_COUNT(setting_fields)};

static bool read_settings(PyObject *options, PyObject *directory, settings *out)
{
    memset(out, 0, sizeof *out);
    out->offload = msc_offload_options_default();
    out->device = msc_device_options_default();
    out->least_bytes = 1u << 20;
    out->window_bytes = 64u << 20;
    if (!msc__py_record_from_dict(&setting_record, options, out))
        return false;
    if (directory != NULL && directory != Py_None &&
        !msc__py_to_string(directory, "directory", &out->offload.directory))
        return false;
    out->offload.debug = out->debug;
    out->device.kind = out->cuda ? MSC_DEVICE_CUDA : MSC_DEVICE_HOST;
    out->device.faults.seed = out->seed;
    out->device.faults.delay_most_ns = (int64_t)out->delay_most_ns;
    out->device.faults.bytes_per_second = out->fault_bytes_per_second;
    out->device.faults.split_ppm = out->split_ppm;
    out->device.faults.fail_ppm = out->fail_ppm;
    out->device.faults.pin_limit_bytes = out->pin_limit_bytes;
    out->device.faults.refuse_pins = out->refuse_pins;
    out->device.faults.pin_delay_us = out->pin_delay_us;
    return true;
}

/* ---- life --------------------------------------------------------------------------------------- */

/* Nobody else has the engine yet; its buffers are pinned without the GIL. */
static bool open_engine(msc__py_engine *self, const settings *set)
{
    bool opened;
    msc_error err;

    Py_BEGIN_ALLOW_THREADS
    opened = msc_context_create(NULL, &self->ctx, &err) == MSC_OK &&
             msc_context_create(NULL, &self->device_ctx, &err) == MSC_OK &&
             msc_device_create(self->device_ctx, &set->device, &self->device, &err) == MSC_OK &&
             msc_offload_create(self->ctx, self->device, &set->offload, &self->offload, &err) == MSC_OK;
    Py_END_ALLOW_THREADS
    if (!opened) {
        msc__py_raise_of_device(&err);
        return false;
    }
    self->debug = set->debug != 0;
    self->least_bytes = set->least_bytes;
    self->window_bytes = set->window_bytes;
    return true;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensor_type", "parameter_type", "directory", "options", NULL};
    PyObject *tensor_type;
    PyObject *parameter_type;
    PyObject *directory = NULL;
    PyObject *options = NULL;
    PyObject *module;
    msc__py_engine *self;
    settings set;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OO:OffloadEngine", names, &tensor_type,
                                     &parameter_type, &directory, &options) ||
        !read_settings(options, directory, &set))
        return NULL;
    if (!PyType_Check(tensor_type))
        return msc__py_refuse_type("tensor_type", "torch.Tensor", tensor_type);
    if (!PyType_Check(parameter_type))
        return msc__py_refuse_type("parameter_type", "torch.nn.Parameter", parameter_type);
    self = (msc__py_engine *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->torch.device_type = set.cuda ? MSC_DL_CUDA : MSC_DL_CPU;
    self->torch.device_ordinal = set.cuda ? (int32_t)set.device.ordinal : 0;
    module = PyType_GetModule(type);
    if (module != NULL) {
        self->saved_type = (PyTypeObject *)Py_NewRef((PyObject *)msc__py_module_state(module)->saved_type);
        self->block_type = (PyTypeObject *)Py_NewRef((PyObject *)msc__py_module_state(module)->block_type);
    }
    if (module == NULL ||
        !msc__py_torch_init(&self->torch, (PyTypeObject *)tensor_type, (PyTypeObject *)parameter_type,
                            !set.capsules, !set.no_library) ||
        !open_engine(self, &set)) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Takes the records out of the engine, a list of those whose references are the caller's. Runs no other code. */
static msc__py_store *take_records(msc__py_engine *engine, msc_offload *offload)
{
    msc__py_store *taken = NULL;
    uint32_t i;

    for (i = 0; i < engine->record_capacity; i++) {
        msc__py_store *store = engine->records[i];

        if (store == NULL)
            continue;
        engine->records[i] = NULL;
        msc_offload_drop(offload, store->ticket);
        store->ticket = 0;
        store->known = false; /* the buckets go as a whole */
        msc__py_store_hold(store);
        store->same_bucket = taken;
        taken = store;
    }
    memset(engine->buckets, 0, sizeof engine->buckets);
    return taken;
}

void msc__py_engine_close(msc__py_engine *engine)
{
    msc_offload *offload = engine->offload;
    msc__py_store *store;

    if (offload == NULL)
        return;
    engine->offload =
        NULL; /* from now on every call says that it is closed, also one from a tensor that ends */
    store = take_records(engine, offload);
    msc__py_blocks_close(engine, offload);
    if (engine->inside > 0)
        engine->condemned = offload;
    else
        msc_offload_destroy(offload);
    while (store != NULL) {
        msc__py_store *next = store->same_bucket;

        msc__py_store_land(store);
        msc__py_store_forget(store);
        msc__py_store_release(store);
        store = next;
    }
}

static void engine_dealloc(PyObject *object)
{
    msc__py_engine *self = (msc__py_engine *)object;
    PyTypeObject *type = Py_TYPE(object);

    msc__py_engine_close(self); /* records hold the engine, so there are none */
    msc_device_destroy(self->device);
    msc_context_destroy(self->device_ctx);
    msc_context_destroy(self->ctx);
    PyMem_Free(self->records);
    PyMem_Free(self->chosen);
    msc__py_torch_clear(&self->torch);
    Py_XDECREF((PyObject *)self->saved_type);
    Py_XDECREF((PyObject *)self->block_type);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* ---- methods ------------------------------------------------------------------------------------ */

static msc__py_engine *opened(PyObject *object)
{
    msc__py_engine *self = (msc__py_engine *)object;

    if (self->offload == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this engine is closed");
        return NULL;
    }
    return self;
}

static PyObject *engine_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    msc__py_engine_close((msc__py_engine *)object);
    return Py_NewRef(Py_None);
}

static PyObject *engine_settle(PyObject *object, PyObject *unused)
{
    msc__py_engine *self = opened(object);

    (void)unused;
    return self != NULL && msc__py_store_settle(self, 0) ? Py_NewRef(Py_None) : NULL;
}

/* Room for the marks of `count` ordinals, all cleared. */
static bool make_marks(msc__py_engine *self, uint32_t count)
{
    if (count > self->chosen_room) {
        uint8_t *chosen = PyMem_Realloc(self->chosen, count);

        if (chosen == NULL) {
            PyErr_NoMemory();
            return false;
        }
        self->chosen = chosen;
        self->chosen_room = count;
    }
    if (count > 0)
        memset(self->chosen, 0, count);
    self->chosen_count = count;
    return true;
}

/* A tuple of rising ordinals as marks. */
static bool choose(msc__py_engine *self, PyObject *ordinals)
{
    Py_ssize_t count = PyTuple_Size(ordinals);
    uint32_t ordinal = 0;

    if (count < 0 ||
        (count > 0 && !msc__py_to_id(PyTuple_GetItem(ordinals, count - 1), "ordinals", &ordinal)))
        return false;
    if (!make_marks(self, count > 0 ? ordinal + 1 : 0))
        return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!msc__py_to_u32(PyTuple_GetItem(ordinals, i), "ordinals", self->chosen_count - 1, &ordinal))
            return false;
        self->chosen[ordinal] = 1;
    }
    return true;
}

static PyObject *engine_region(PyObject *object, PyObject *args)
{
    msc__py_engine *self = opened(object);
    PyObject *ordinals = NULL;
    PyObject *ahead = NULL;
    uint64_t ahead_bytes = 0;

    if (self == NULL || !PyArg_ParseTuple(args, "O|O:region", &ordinals, &ahead) ||
        (ahead != NULL && !msc__py_to_u64(ahead, "ahead_bytes", &ahead_bytes)))
        return NULL;
    if (ordinals != Py_None && !choose(self, ordinals))
        return NULL;
    self->chooses = ordinals != Py_None;
    self->ordinal = 0;
    msc_offload_group_ahead(self->offload, ahead_bytes);
    return Py_NewRef(Py_None);
}

static PyObject *engine_step(PyObject *object, PyObject *unused)
{
    msc__py_engine *self = opened(object);

    (void)unused;
    if (self == NULL)
        return NULL;
    msc_offload_step(self->offload);
    return Py_NewRef(Py_None);
}

static const char *const tier_names[MSC_TIER_COUNT] = {"pinned", "host", "file"};

static PyObject *engine_notes(PyObject *object, PyObject *unused)
{
    msc__py_engine *self = opened(object);
    PyObject *notes = self != NULL ? PyDict_New() : NULL;

    (void)unused;
    for (int tier = 0; notes != NULL && tier < MSC_TIER_COUNT; tier++) {
        PyObject *text = PyUnicode_FromString(msc_offload_note(self->offload, (msc_tier)tier));

        if (text == NULL || PyDict_SetItemString(notes, tier_names[tier], text) < 0)
            Py_CLEAR(notes);
        Py_XDECREF(text);
    }
    return notes;
}

#define COUNTER(name, member)                                                                                \
    {                                                                                                        \
        name, MSC_PY_U64, offsetof(msc_offload_counters, member)                                             \
    }
#define TIERS(name, member)                                                                                  \
    COUNTER(name "_pinned", member[MSC_TIER_PINNED]), COUNTER(name "_host", member[MSC_TIER_HOST]),          \
        COUNTER(name "_file", member[MSC_TIER_FILE])

static const msc__py_field counter_fields[] = {
    TIERS("put_count", put_count),
    TIERS("out_bytes", out_bytes),
    TIERS("in_bytes", in_bytes),
    TIERS("held_bytes", held_bytes),
    TIERS("held_peak_bytes", held_peak_bytes),
    TIERS("taken_bytes", taken_bytes),
    COUNTER("staging_bytes", staging_bytes),
    COUNTER("table_bytes", table_bytes),
    COUNTER("refused_count", refused_count),
    COUNTER("moved_count", moved_count),
    COUNTER("failed_count", failed_count),
    COUNTER("lost_count", lost_count),
    COUNTER("prefetched_count", prefetched_count),
    COUNTER("late_count", late_count),
    COUNTER("missed_count", missed_count),
    COUNTER("settle_wait_ns", settle_wait_ns),
    COUNTER("arrive_wait_ns", arrive_wait_ns),
    COUNTER("step_count", step_count),
    COUNTER("reorder_count", reorder_count),
    {"block_count", MSC_PY_U32, offsetof(msc_offload_counters, block_count)},
};

static const msc__py_record counter_record = {"counters", counter_fields, MSC_PY_COUNT(counter_fields)};

static bool add_count(PyObject *dict, const char *name, uint64_t value)
{
    PyObject *number = PyLong_FromUnsignedLongLong(value);
    bool added = number != NULL && PyDict_SetItemString(dict, name, number) == 0;

    Py_XDECREF(number);
    return added;
}

static PyObject *engine_counters(PyObject *object, PyObject *unused)
{
    msc__py_engine *self = opened(object);
    msc_offload_counters counters;
    PyObject *dict;

    (void)unused;
    if (self == NULL)
        return NULL;
    counters = msc_offload_counters_now(self->offload);
    dict = msc__py_record_to_dict(&counter_record, &counters);
    if (dict != NULL && (!add_count(dict, "saves_kept", self->kept_count) ||
                         !add_count(dict, "saves_moved", self->moved_count) ||
                         !add_count(dict, "saves_shared", self->shared_count) ||
                         !add_count(dict, "saves_forwarded", self->forwarded_count) ||
                         !add_count(dict, "source_bytes", self->flying_bytes)))
        Py_CLEAR(dict);
    return dict;
}

static const char *const event_names[MSC_OFFLOAD_EVENT_COUNT] = {"out", "in", "wait_settle", "wait_arrive",
                                                                 "drop"};

static PyObject *engine_trace(PyObject *object, PyObject *unused)
{
    msc__py_engine *self = opened(object);
    enum { MOST = 65536 };
    msc_offload_event *events;
    uint32_t count;
    PyObject *list;

    (void)unused;
    if (self == NULL)
        return NULL;
    events = PyMem_Malloc(MOST * sizeof *events);
    if (events == NULL)
        return PyErr_NoMemory();
    count = msc_offload_trace(self->offload, events, MOST);
    list = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        const msc_offload_event *e = &events[i];
        PyObject *item =
            Py_BuildValue("(ssKLLK)", event_names[e->kind], tier_names[e->tier], (unsigned long long)e->bytes,
                          (long long)e->begin_ns, (long long)e->end_ns, (unsigned long long)e->ticket);

        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
            Py_CLEAR(list);
    }
    PyMem_Free(events);
    return list;
}

static PyMethodDef engine_methods[] = {
    {"pack", msc__py_engine_pack, METH_O,
     "pack($self, tensor, /)\n--\n\nWhat autograd holds for a saved tensor."},
    {"unpack", msc__py_engine_unpack, METH_O, "unpack($self, saved, /)\n--\n\nThe tensor, for backward."},
    {"put", msc__py_engine_put, METH_O, "put($self, tensor, /)\n--\n\nStarts to copy a tensor's bytes out."},
    {"region", engine_region, METH_VARARGS,
     "region($self, ordinals, ahead_bytes=0, /)\n--\n\nA forward begins; a tuple says which of its saves may "
     "leave, "
     "None: all."},
    {"settle", engine_settle, METH_NOARGS,
     "settle($self, /)\n--\n\nWaits until no source waits for its copy."},
    {"step", engine_step, METH_NOARGS, "step($self, /)\n--\n\nA training step begins."},
    {"counters", engine_counters, METH_NOARGS, "counters($self, /)\n--\n\nWhat was done so far, by name."},
    {"trace", engine_trace, METH_NOARGS,
     "trace($self, /)\n--\n\nThe latest events: (kind, tier, bytes, begin_ns, end_ns, ticket)."},
    {"notes", engine_notes, METH_NOARGS, "notes($self, /)\n--\n\nPer tier, why it is not used as asked."},
    {"close", engine_close, METH_NOARGS, "close($self, /)\n--\n\nGives everything back."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_doc, "OffloadEngine(tensor_type, parameter_type, directory=None, options=None)\n--\n\n"
                "Saved tensors leave the device and come back before backward needs them."},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "memscale._core.OffloadEngine",
    .basicsize = sizeof(msc__py_engine),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};

PyTypeObject *msc__py_engine_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &engine_spec, NULL);
}
