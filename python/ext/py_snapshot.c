/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `Snapshot`: a memory snapshot of PyTorch, read by the core.
 *
 * The file is read without the GIL; it is the only part that takes seconds. Everything else keeps the GIL,
 * because the core's queries take memory from the snapshot's context, which is for one thread at a time.
 * Nothing of the file becomes a Python object before it is asked for.
 */
#include "py_snapshot.h"

#include <string.h>

#include "convert.h"
#include "error.h"
#include "memscale/snapshot.h"

#define DEFAULT_SITES 10u
#define MOST_SITES 100000u

typedef struct snapshot_object {
    PyObject_HEAD msc_context *ctx;
    msc_snapshot *snapshot;
} snapshot_object;

static const msc_snapshot *self_snapshot(PyObject *self)
{
    return ((snapshot_object *)self)->snapshot;
}

/* ---- lifecycle ---------------------------------------------------------------------------------- */

static bool load(snapshot_object *self, const char *path)
{
    msc_error err;
    msc_status status;

    Py_BEGIN_ALLOW_THREADS
    status = msc_context_create(NULL, &self->ctx, &err);
    if (status == MSC_OK)
        status = msc_snapshot_load(self->ctx, path, &self->snapshot, &err);
    Py_END_ALLOW_THREADS
    if (status != MSC_OK)
        msc__py_raise(&err);
    return status == MSC_OK;
}

static PyObject *snapshot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path", NULL};
    PyObject *path = NULL;
    snapshot_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:Snapshot", names, PyUnicode_FSConverter, &path))
        return NULL;
    self = (snapshot_object *)PyType_GenericAlloc(type, 0);
    if (self != NULL && !load(self, PyBytes_AsString(path)))
        Py_CLEAR(self);
    Py_DECREF(path);
    return (PyObject *)self;
}

static void snapshot_dealloc(PyObject *object)
{
    snapshot_object *self = (snapshot_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    msc_snapshot_destroy(self->snapshot);
    msc_context_destroy(self->ctx);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *snapshot_repr(PyObject *self)
{
    const msc_snapshot *snapshot = self_snapshot(self);
    unsigned long events = 0;

    for (uint32_t device = 0; device < msc_snapshot_device_count(snapshot); device++) {
        uint32_t count = 0;

        (void)msc_snapshot_events(snapshot, device, &count);
        events += count;
    }
    return PyUnicode_FromFormat("<Snapshot: %lu devices, %lu events>",
                                (unsigned long)msc_snapshot_device_count(snapshot), events);
}

/* ---- records ------------------------------------------------------------------------------------ */

#define TOTAL(name)                                                                                          \
    {                                                                                                        \
#name, MSC_PY_U64, offsetof(msc_snapshot_totals, name)                                               \
    }

static const msc__py_field total_fields[] = {
    TOTAL(reserved_bytes),       TOTAL(allocated_bytes), TOTAL(active_bytes),
    TOTAL(requested_bytes),      TOTAL(segment_count),   TOTAL(block_count),
    TOTAL(reserved_peak_bytes),  TOTAL(event_count),     TOTAL(requested_peak_bytes),
    TOTAL(requested_peak_event),
};

static const msc__py_record total_record = {"device", total_fields, MSC_PY_COUNT(total_fields)};

#define RESULT(name, kind)                                                                                   \
    {                                                                                                        \
#name, kind, offsetof(msc_snapshot_replay_result, name)                                              \
    }

static const msc__py_field result_fields[] = {
    RESULT(first_event, MSC_PY_U32),
    RESULT(replayed_count, MSC_PY_U32),
    RESULT(segment_count, MSC_PY_U32),
    RESULT(difference_count, MSC_PY_U32),
    RESULT(release_count, MSC_PY_U32),
    RESULT(retry_count, MSC_PY_U32),
    RESULT(oom_count, MSC_PY_U32),
    RESULT(start_block_count, MSC_PY_U32),
    RESULT(map_block_count, MSC_PY_U32),
    RESULT(map_compared, MSC_PY_BOOL),
    RESULT(reserved_peak_bytes, MSC_PY_U64),
    RESULT(recorded_reserved_peak_bytes, MSC_PY_U64),
    RESULT(requested_peak_bytes, MSC_PY_U64),
    RESULT(recorded_requested_peak_bytes, MSC_PY_U64),
    RESULT(allocated_peak_bytes, MSC_PY_U64),
    RESULT(active_peak_bytes, MSC_PY_U64),
};

static const msc__py_record result_record = {"replay", result_fields, MSC_PY_COUNT(result_fields)};

#define LIMIT(name)                                                                                          \
    {                                                                                                        \
#name, MSC_PY_U64_LIMIT, offsetof(msc_snapshot_replay_options, name)                                 \
    }

static const msc__py_field limit_fields[] = {LIMIT(device_total_bytes), LIMIT(capacity_bytes),
                                             LIMIT(allowed_bytes)};

static const msc__py_record limit_record = {"limits", limit_fields, MSC_PY_COUNT(limit_fields)};

/* Adds a value, which it takes over, to a dict. */
static bool put(PyObject *dict, const char *name, PyObject *value)
{
    bool ok = value != NULL && PyDict_SetItemString(dict, name, value) == 0;

    Py_XDECREF(value);
    return ok;
}

static PyObject *text_of(const msc_snapshot *snapshot, uint32_t string)
{
    const char *text = msc_snapshot_string(snapshot, string);

    return msc__py_from_text(text, strlen(text));
}

/* ---- devices ------------------------------------------------------------------------------------ */

static PyObject *device_dict(const msc_snapshot *snapshot, uint32_t device)
{
    msc_snapshot_totals totals;
    msc_error err;
    PyObject *dict;

    if (msc_snapshot_get_totals(snapshot, device, &totals, &err) != MSC_OK)
        return msc__py_raise(&err);
    dict = msc__py_record_to_dict(&total_record, &totals);
    if (dict != NULL && !put(dict, "device", PyLong_FromUnsignedLong(device)))
        Py_CLEAR(dict);
    return dict;
}

static PyObject *get_devices(PyObject *self, void *closure)
{
    const msc_snapshot *snapshot = self_snapshot(self);
    uint32_t count = msc_snapshot_device_count(snapshot);
    PyObject *list = PyList_New((Py_ssize_t)count);

    (void)closure;
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *dict = device_dict(snapshot, i);

        if (dict == NULL || PyList_SetItem(list, (Py_ssize_t)i, dict) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *get_settings(PyObject *self, void *closure)
{
    const msc_snapshot *snapshot = self_snapshot(self);
    msc_snapshot_settings settings = msc_snapshot_get_settings(snapshot);
    PyObject *dict = PyDict_New();

    (void)closure;
    if (dict != NULL && (!put(dict, "recorded", PyBool_FromLong(settings.is_recorded)) ||
                         !put(dict, "conf", text_of(snapshot, settings.conf)) ||
                         !put(dict, "max_split_bytes",
                              settings.max_split_bytes == UINT64_MAX
                                  ? Py_NewRef(Py_None)
                                  : PyLong_FromUnsignedLongLong(settings.max_split_bytes)) ||
                         !put(dict, "garbage_collection_threshold",
                              PyFloat_FromDouble(settings.garbage_collection_ppm / 1e6)) ||
                         !put(dict, "expandable_segments", PyBool_FromLong(settings.expandable_segments))))
        Py_CLEAR(dict);
    return dict;
}

/* Reads the device, which every method takes; false with an exception. */
static bool to_device(PyObject *self, PyObject *value, uint32_t *device)
{
    uint32_t count = msc_snapshot_device_count(self_snapshot(self));

    *device = 0;
    if (!msc__py_to_u32(value, "device", UINT32_MAX, device))
        return false;
    if (*device >= count)
        msc__py_refuse("the snapshot has no device %lu, it has %lu", (unsigned long)*device,
                       (unsigned long)count);
    return *device < count;
}

/* ---- segments ----------------------------------------------------------------------------------- */

static PyObject *block_list(const msc_snapshot *snapshot, const msc_snapshot_segment *segment)
{
    uint32_t unused;
    const msc_snapshot_block *blocks = msc_snapshot_blocks(snapshot, &unused);
    PyObject *list = PyList_New((Py_ssize_t)segment->block_count);

    for (uint32_t i = 0; list != NULL && i < segment->block_count; i++) {
        const msc_snapshot_block *block = &blocks[segment->first_block + i];
        PyObject *tuple =
            Py_BuildValue("(KKKs)", (unsigned long long)block->address, (unsigned long long)block->size_bytes,
                          (unsigned long long)block->requested_bytes,
                          msc_snapshot_state_name((msc_snapshot_state)block->state));

        if (tuple == NULL || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *segment_dict(const msc_snapshot *snapshot, const msc_snapshot_segment *segment)
{
    PyObject *blocks = block_list(snapshot, segment);

    if (blocks == NULL)
        return NULL;
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:(KK),s:N,s:N,s:N}", "address",
                         (unsigned long long)segment->address, "total_bytes",
                         (unsigned long long)segment->total_bytes, "allocated_bytes",
                         (unsigned long long)segment->allocated_bytes, "active_bytes",
                         (unsigned long long)segment->active_bytes, "requested_bytes",
                         (unsigned long long)segment->requested_bytes, "stream",
                         (unsigned long long)segment->stream, "pool", (unsigned long long)segment->pool[0],
                         (unsigned long long)segment->pool[1], "is_large", PyBool_FromLong(segment->is_large),
                         "is_expandable", PyBool_FromLong(segment->is_expandable), "blocks", blocks);
}

MSC_PY_SIGNATURE(segments, 0, 1, "device");

MSC_PY_FASTCALL(snapshot_segments)
{
    const msc_snapshot *snapshot = self_snapshot(self);
    const msc_snapshot_segment *segments;
    PyObject *values[1];
    PyObject *list;
    uint32_t device;
    uint32_t count;

    if (!msc__py_bind(&segments_signature, args, nargs, kwnames, values) ||
        !to_device(self, values[0], &device))
        return NULL;
    segments = msc_snapshot_segments(snapshot, device, &count);
    list = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *dict = segment_dict(snapshot, &segments[i]);

        if (dict == NULL || PyList_SetItem(list, (Py_ssize_t)i, dict) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* ---- events ------------------------------------------------------------------------------------- */

MSC_PY_SIGNATURE(events, 0, 1, "device");

MSC_PY_FASTCALL(snapshot_events)
{
    PyObject *values[1];
    PyObject *dict;
    uint32_t device;
    msc_snapshot_totals totals;
    msc_error err;

    if (!msc__py_bind(&events_signature, args, nargs, kwnames, values) ||
        !to_device(self, values[0], &device))
        return NULL;
    if (msc_snapshot_get_totals(self_snapshot(self), device, &totals, &err) != MSC_OK)
        return msc__py_raise(&err);
    dict = PyDict_New();
    for (int i = 0; dict != NULL && i < MSC_SNAPSHOT_ACTION_COUNT; i++) {
        if (!put(dict, msc_snapshot_action_name((msc_snapshot_action)i),
                 PyLong_FromUnsignedLongLong(totals.action_count[i])))
            Py_CLEAR(dict);
    }
    return dict;
}

/* ---- replay ------------------------------------------------------------------------------------- */

static PyObject *finding_of(const msc_snapshot_replay_result *result, const msc_snapshot_finding *finding)
{
    const char *what = result->difference == MSC_SNAPSHOT_DIFFERENCE_MAP
                           ? msc_snapshot_state_name((msc_snapshot_state)finding->action)
                           : msc_snapshot_action_name((msc_snapshot_action)finding->action);

    if (!finding->is_there)
        return Py_NewRef(Py_None);
    return Py_BuildValue("(sKK)", what, (unsigned long long)finding->address,
                         (unsigned long long)finding->size_bytes);
}

/* The first difference as a dict, or None. */
static PyObject *difference_of(const msc_snapshot_replay_result *result)
{
    static const char *const kinds[MSC_SNAPSHOT_DIFFERENCE_COUNT] = {"none", "segment", "request", "map"};
    PyObject *expected;
    PyObject *got;

    if (result->difference == MSC_SNAPSHOT_DIFFERENCE_NONE)
        return Py_NewRef(Py_None);
    expected = finding_of(result, &result->expected);
    got = finding_of(result, &result->got);
    if (expected == NULL || got == NULL) {
        Py_XDECREF(expected);
        Py_XDECREF(got);
        return NULL;
    }
    return Py_BuildValue("{s:s,s:I,s:N,s:N}", "kind", kinds[result->difference], "event",
                         (unsigned)result->difference_event, "expected", expected, "got", got);
}

MSC_PY_SIGNATURE(replay, 0, 1, "device", "limits");

MSC_PY_FASTCALL(snapshot_replay)
{
    msc_snapshot_replay_options options = msc_snapshot_replay_options_default();
    msc_snapshot_replay_result result;
    PyObject *values[2];
    PyObject *dict;
    uint32_t device;
    msc_error err;

    if (!msc__py_bind(&replay_signature, args, nargs, kwnames, values) ||
        !to_device(self, values[0], &device) || !msc__py_record_from_dict(&limit_record, values[1], &options))
        return NULL;
    if (msc_snapshot_replay(self_snapshot(self), device, &options, NULL, &result, &err) != MSC_OK)
        return msc__py_raise(&err);
    dict = msc__py_record_to_dict(&result_record, &result);
    if (dict != NULL && (!put(dict, "exact", PyBool_FromLong(result.difference_count == 0)) ||
                         !put(dict, "difference", difference_of(&result))))
        Py_CLEAR(dict);
    return dict;
}

/* ---- sites -------------------------------------------------------------------------------------- */

static PyObject *site_tuple(const msc_snapshot *snapshot, const msc_snapshot_site *site)
{
    msc_snapshot_frame frame = {MSC_NONE, MSC_NONE, 0};
    PyObject *file;
    PyObject *function;

    if (site->frame != MSC_NONE)
        frame = msc_snapshot_frame_at(snapshot, site->frame);
    file = text_of(snapshot, frame.file);
    function = text_of(snapshot, frame.function);
    if (file == NULL || function == NULL) {
        Py_XDECREF(file);
        Py_XDECREF(function);
        return NULL;
    }
    return Py_BuildValue("(NINKK)", file, (unsigned)frame.line, function,
                         (unsigned long long)site->requested_bytes,
                         (unsigned long long)site->allocation_count);
}

static PyObject *site_list(const msc_snapshot *snapshot, const msc_snapshot_site *sites, uint32_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);

    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *tuple = site_tuple(snapshot, &sites[i]);

        if (tuple == NULL || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    return list;
}

MSC_PY_SIGNATURE(top_frames, 0, 1, "device", "at_peak", "count");

MSC_PY_FASTCALL(snapshot_top_frames)
{
    const msc_snapshot *snapshot = self_snapshot(self);
    PyObject *values[3];
    PyObject *list = NULL;
    msc_snapshot_site *sites;
    uint8_t at_peak = 0;
    uint32_t device;
    uint32_t count = DEFAULT_SITES;
    uint32_t found = 0;
    msc_error err;

    if (!msc__py_bind(&top_frames_signature, args, nargs, kwnames, values) ||
        !to_device(self, values[0], &device) || !msc__py_to_bool(values[1], "at_peak", &at_peak) ||
        !msc__py_to_u32(values[2], "count", MOST_SITES, &count))
        return NULL;
    sites = PyMem_Malloc((count + (size_t)1) * sizeof *sites);
    if (sites == NULL)
        return PyErr_NoMemory();
    if (msc_snapshot_sites(snapshot, device, at_peak ? MSC_SNAPSHOT_MOMENT_PEAK : MSC_SNAPSHOT_MOMENT_END,
                           sites, count, &found, &err) == MSC_OK)
        list = site_list(snapshot, sites, found < count ? found : count);
    else
        msc__py_raise(&err);
    PyMem_Free(sites);
    return list;
}

/* ---- type --------------------------------------------------------------------------------------- */

static PyMethodDef snapshot_methods[] = {
    MSC_PY_METHOD("segments", snapshot_segments, 0,
                  "segments($self, /, device=0)\n--\n\nSegments of a device by address, with their blocks."),
    MSC_PY_METHOD("events", snapshot_events, 0,
                  "events($self, /, device=0)\n--\n\nHow many events of each action the trace has."),
    MSC_PY_METHOD("replay", snapshot_replay, 0,
                  "replay($self, /, device=0, *, limits=None)\n--\n\n"
                  "Plays the trace into the allocator simulator and compares."),
    MSC_PY_METHOD("top_frames", snapshot_top_frames, 0,
                  "top_frames($self, /, device=0, *, at_peak=False, count=10)\n--\n\n"
                  "(file, line, function, requested_bytes, allocations), most bytes first."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef snapshot_properties[] = {
    {"devices", get_devices, NULL, "Sums and peaks of each device.", NULL},
    {"settings", get_settings, NULL, "Settings of the allocator when the snapshot was taken.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot snapshot_slots[] = {
    {Py_tp_doc,
     "Snapshot(path)\n--\n\nA file of torch.cuda.memory._dump_snapshot, read without executing it."},
    {Py_tp_new, snapshot_new},
    {Py_tp_dealloc, snapshot_dealloc},
    {Py_tp_repr, snapshot_repr},
    {Py_tp_methods, snapshot_methods},
    {Py_tp_getset, snapshot_properties},
    {0, NULL},
};

static PyType_Spec snapshot_spec = {
    .name = "memscale._core.Snapshot",
    .basicsize = sizeof(snapshot_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = snapshot_slots,
};

PyTypeObject *msc__py_snapshot_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &snapshot_spec, NULL);
}
