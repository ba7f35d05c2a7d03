/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `replay`: the step under a plan, played into the allocator simulator.
 *
 *     graph, plan ─► msc_trace ─► msc_sim ─► peak, statistics      as ints in a dict
 *                       │            └─────► live[op event]        uint64, bytes object
 *                       ├──────────────────► ops, recompute        uint32 and uint8, bytes objects
 *                       └──────────────────► peak_live             a tuple per buffer alive at the peak
 *
 * The three series have one entry per OP or RECOMPUTE event and are handed over as raw native numbers:
 * a report wraps them in array.array or numpy without 10^5 Python ints in between.
 *
 * The work of the core is done without the GIL, in two stretches: deriving the trace gives the length of
 * the series, their objects are made with the GIL, and the replay fills `live` in place, which nobody
 * else can see yet. Everything of one replay lives in a context of its own.
 */
#include "py_sim.h"

#include <string.h>

#include "convert.h"
#include "error.h"
#include "memscale/replay.h"
#include "py_graph.h"
#include "py_plan.h"

static const char *const CATEGORY_NAMES[] = {
    [MSC_CATEGORY_PARAMETER] = "parameter", [MSC_CATEGORY_BUFFER] = "buffer",
    [MSC_CATEGORY_GRADIENT] = "gradient",   [MSC_CATEGORY_OPTIMIZER_STATE] = "optimizer_state",
    [MSC_CATEGORY_INPUT] = "input",         [MSC_CATEGORY_ACTIVATION] = "activation",
    [MSC_CATEGORY_TEMPORARY] = "temporary", [MSC_CATEGORY_WORKSPACE] = "workspace",
};
_Static_assert(MSC_PY_COUNT(CATEGORY_NAMES) == MSC_CATEGORY_COUNT, "a name for every category");

const char *msc__py_category_name(int category)
{
    return CATEGORY_NAMES[category];
}

/* ---- records ------------------------------------------------------------------------------------ */

/** Options as a dict gives them. */
typedef struct given_options {
    msc_sim_options options;
    uint32_t roundup_power2_divisions; /**< for every interval; UINT32_MAX: not given */
} given_options;

#define OPTION_FIELD(name, kind)                                                                             \
    {                                                                                                        \
#name, kind, offsetof(given_options, options.name)                                                   \
    }

static const msc__py_field option_fields[] = {
    OPTION_FIELD(kind, MSC_PY_SIM_KIND),
    OPTION_FIELD(capacity_bytes, MSC_PY_U64_LIMIT),
    OPTION_FIELD(device_total_bytes, MSC_PY_U64_LIMIT),
    OPTION_FIELD(allowed_bytes, MSC_PY_U64_LIMIT),
    OPTION_FIELD(max_split_bytes, MSC_PY_U64_LIMIT),
    OPTION_FIELD(max_non_split_rounding_bytes, MSC_PY_U64),
    OPTION_FIELD(large_segment_bytes, MSC_PY_U64),
    {"roundup_power2_divisions", MSC_PY_U32, offsetof(given_options, roundup_power2_divisions)},
    OPTION_FIELD(expandable_segments, MSC_PY_BOOL),
};

static const msc__py_record option_record = {"sim", option_fields, MSC_PY_COUNT(option_fields)};
static const msc__py_record kind_record = {"sim", option_fields, 1};

#define STATS_FIELD(name)                                                                                    \
    {                                                                                                        \
#name, MSC_PY_U64, offsetof(msc_sim_stats, name)                                                     \
    }

static const msc__py_field stats_fields[] = {
    STATS_FIELD(allocated_now_bytes),
    STATS_FIELD(allocated_peak_bytes),
    STATS_FIELD(reserved_now_bytes),
    STATS_FIELD(reserved_peak_bytes),
    STATS_FIELD(requested_now_bytes),
    STATS_FIELD(requested_peak_bytes),
    STATS_FIELD(inactive_split_now_bytes),
    STATS_FIELD(segment_now_count),
    STATS_FIELD(segment_peak_count),
    STATS_FIELD(device_alloc_count),
    STATS_FIELD(device_free_count),
    STATS_FIELD(alloc_retry_count),
    STATS_FIELD(oom_count),
};

static const msc__py_record stats_record = {"stats", stats_fields, MSC_PY_COUNT(stats_fields)};

bool msc__py_to_sim_kind(PyObject *value, msc_sim_kind *out)
{
    given_options given = {0};
    PyObject *only = Py_BuildValue("{s:O}", "kind", value);
    bool ok = only != NULL && msc__py_record_from_dict(&kind_record, only, &given);

    *out = given.options.kind;
    Py_XDECREF(only);
    return ok;
}

/**
 * Reads `alloc_conf` into options of the right kind. The device's memory, part of it by a fraction, is
 * among the other fields.
 */
static bool read_conf(PyObject *text, PyObject *fields, msc_sim_options *options)
{
    given_options given = {.options = *options};
    const char *conf = NULL;
    uint64_t total_bytes;
    msc_error err;

    if (!msc__py_to_string(text, "alloc_conf", &conf) ||
        !msc__py_record_from_dict(&option_record, fields, &given))
        return false;
    total_bytes = given.options.device_total_bytes;
    if (total_bytes == UINT64_MAX)
        total_bytes = given.options.capacity_bytes;
    if (conf[0] == '\0' || msc_sim_options_parse(conf, total_bytes, options, &err) == MSC_OK)
        return true;
    msc__py_raise(&err);
    return false;
}

/** Everything but the kind, which has set the defaults. `fields` is ours: it loses `alloc_conf`. */
static bool read_options(PyObject *fields, msc_sim_options *out)
{
    given_options given = {.roundup_power2_divisions = UINT32_MAX};
    PyObject *conf = Py_XNewRef(PyDict_GetItemString(fields, "alloc_conf"));
    bool ok = conf == NULL || PyDict_DelItemString(fields, "alloc_conf") == 0;

    if (ok && conf != NULL && conf != Py_None)
        ok = read_conf(conf, fields, out);
    Py_XDECREF(conf);
    given.options = *out;
    if (!ok || !msc__py_record_from_dict(&option_record, fields, &given))
        return false;
    *out = given.options;
    for (int i = 0; given.roundup_power2_divisions != UINT32_MAX && i < MSC_SIM_ROUNDUP_INTERVALS; i++)
        out->roundup_power2_divisions[i] = given.roundup_power2_divisions;
    return true;
}

bool msc__py_to_sim_options(PyObject *dict, msc_sim_options *out)
{
    msc_sim_kind kind = MSC_SIM_HOST;
    PyObject *fields;
    PyObject *value;
    bool ok;

    *out = msc_sim_options_default(kind);
    if (dict == NULL || dict == Py_None)
        return true;
    if (!PyDict_Check(dict)) {
        msc__py_refuse_type("sim", "a dict", dict);
        return false;
    }
    value = PyDict_GetItemString(dict, "kind"); /* decides the defaults, wherever it stands in the dict */
    if (value != NULL && !msc__py_to_sim_kind(value, &kind))
        return false;
    *out = msc_sim_options_default(kind);
    fields = PyDict_Copy(dict);
    ok = fields != NULL && read_options(fields, out);
    Py_XDECREF(fields);
    return ok;
}

/* ---- replay ------------------------------------------------------------------------------------- */

/** What one replay works with; zeroed, so that it can be ended at any point. */
typedef struct replay_run {
    msc_context *ctx;
    msc_trace *trace;
    msc_sim *sim;
    uint64_t event_count; /**< of OP and RECOMPUTE events */
    PyObject *live;       /**< bytes: uint64 per event */
    PyObject *ops;        /**< bytes: uint32 per event */
    PyObject *recompute;  /**< bytes: 0 or 1 per event */
    msc_replay result;
    msc_live *peak_live; /**< what is alive at the peak */
    uint32_t peak_live_count;
} replay_run;

static void run_end(replay_run *run)
{
    Py_XDECREF(run->live);
    Py_XDECREF(run->ops);
    Py_XDECREF(run->recompute);
    PyMem_Free(run->peak_live);
    msc_sim_destroy(run->sim);
    msc_trace_destroy(run->trace);
    msc_context_destroy(run->ctx);
}

/** Without the GIL: everything up to the length of the series. */
static msc_status run_derive(replay_run *run, const msc_graph *graph, const msc_plan *plan,
                             const msc_sim_options *options, msc_error *err)
{
    msc_status status = msc_context_create(NULL, &run->ctx, err);

    if (status == MSC_OK)
        status = msc_trace_create(run->ctx, graph, plan, &run->trace, err);
    if (status == MSC_OK)
        status = msc_sim_create(run->ctx, options, &run->sim, err);
    if (status == MSC_OK)
        run->event_count = msc_trace_op_event_count(run->trace);
    return status;
}

static PyObject *series(uint64_t count, size_t item_bytes)
{
    if (count > (uint64_t)PY_SSIZE_T_MAX / item_bytes)
        return PyErr_NoMemory();
    return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * item_bytes));
}

static bool run_make_series(replay_run *run)
{
    run->live = series(run->event_count, sizeof(uint64_t));
    run->ops = series(run->event_count, sizeof(uint32_t));
    run->recompute = series(run->event_count, sizeof(uint8_t));
    return run->live != NULL && run->ops != NULL && run->recompute != NULL;
}

/** Which operation each entry of the series stands for. memcpy, since bytes promise no alignment. */
static void fill_ops(const replay_run *run)
{
    const msc_event *events = msc_trace_events(run->trace);
    uint64_t count = msc_trace_event_count(run->trace);
    char *ops = PyBytes_AsString(run->ops);
    char *recompute = PyBytes_AsString(run->recompute);
    size_t at = 0;

    for (uint64_t i = 0; i < count && at < run->event_count; i++) {
        if (events[i].kind != MSC_EVENT_OP && events[i].kind != MSC_EVENT_RECOMPUTE)
            continue;
        memcpy(ops + at * sizeof(uint32_t), &events[i].id, sizeof(uint32_t));
        recompute[at] = events[i].kind == MSC_EVENT_RECOMPUTE;
        at++;
    }
}

static PyObject *category_dict(const uint64_t *bytes)
{
    PyObject *dict = PyDict_New();

    for (int i = 0; dict != NULL && i < MSC_CATEGORY_COUNT; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(bytes[i]);

        if (value == NULL || PyDict_SetItemString(dict, CATEGORY_NAMES[i], value) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

/** Lists what is alive at the peak; nothing for a step without events. */
static bool run_list_live(replay_run *run, const msc_graph *graph)
{
    uint64_t event = run->result.peak_event;
    msc_error err;
    uint32_t count = 0;

    if (msc_trace_event_count(run->trace) == 0)
        return true;
    if (msc_trace_live_at(run->trace, graph, event, NULL, 0, &count, &err) != MSC_OK) {
        msc__py_raise(&err);
        return false;
    }
    run->peak_live = PyMem_Malloc(((size_t)count + 1) * sizeof *run->peak_live);
    if (run->peak_live == NULL) {
        PyErr_NoMemory();
        return false;
    }
    if (msc_trace_live_at(run->trace, graph, event, run->peak_live, count, &run->peak_live_count, &err) !=
        MSC_OK) {
        msc__py_raise(&err);
        return false;
    }
    return true;
}

static PyObject *live_list(const replay_run *run)
{
    PyObject *list = PyList_New((Py_ssize_t)run->peak_live_count);

    for (uint32_t i = 0; list != NULL && i < run->peak_live_count; i++) {
        const msc_live *live = &run->peak_live[i];
        PyObject *tuple = Py_BuildValue(
            "(KLLLIN)", (unsigned long long)live->size_bytes, msc__py_id(live->buffer), msc__py_id(live->op),
            msc__py_id(live->module), (unsigned)live->category, PyBool_FromLong(live->recomputed));

        if (tuple == NULL || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *run_result(const replay_run *run)
{
    const msc_replay *result = &run->result;

    return Py_BuildValue(
        "{s:K,s:K,s:I,s:N,s:N,s:N,s:N,s:O,s:O,s:O,s:K,s:K,s:K,s:I}", "peak_bytes",
        (unsigned long long)result->peak_bytes, "peak_event", (unsigned long long)result->peak_event,
        "peak_op", (unsigned)result->peak_op, "peak_in_recompute", PyBool_FromLong(result->peak_in_recompute),
        "stats", msc__py_record_to_dict(&stats_record, &result->stats), "category_peak_bytes",
        category_dict(result->category_peak_bytes), "peak_live", live_list(run), "live", run->live, "ops",
        run->ops, "recompute", run->recompute, "event_count", (unsigned long long)run->event_count,
        "away_peak_bytes", (unsigned long long)result->away_peak_bytes, "moved_bytes",
        (unsigned long long)result->moved_bytes, "moved_count", (unsigned)result->moved_count);
}

static PyObject *replay(const msc_graph *graph, const msc_plan *plan, const msc_sim_options *options)
{
    replay_run run = {0};
    PyThreadState *thread;
    msc_error err;
    msc_status status;
    uint64_t *live;
    PyObject *result = NULL;

    thread = PyEval_SaveThread();
    status = run_derive(&run, graph, plan, options, &err);
    PyEval_RestoreThread(thread);
    if (status != MSC_OK) {
        msc__py_raise(&err);
        goto done;
    }
    if (!run_make_series(&run))
        goto done;
    /* A bytes object's data follow four words of header in a block for any type: aligned for uint64. */
    live = (uint64_t *)(void *)PyBytes_AsString(run.live);
    thread = PyEval_SaveThread();
    status = msc_trace_replay(run.trace, run.sim, live, (size_t)run.event_count, &run.result, &err);
    PyEval_RestoreThread(thread);
    if (status != MSC_OK) {
        msc__py_raise(&err);
        goto done;
    }
    if (!run_list_live(&run, graph))
        goto done;
    fill_ops(&run);
    result = run_result(&run);
done:
    run_end(&run);
    return result;
}

MSC_PY_SIGNATURE(replay, 1, 2, "graph", "plan", "sim");

PyObject *msc__py_replay(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    const msc__py_state *state = msc__py_module_state(self);
    PyObject *values[3];
    const msc_graph *graph = NULL;
    const msc_plan *plan = NULL;
    msc_sim_options options;

    if (!msc__py_bind(&replay_signature, args, nargs, kwnames, values))
        return NULL;
    graph = msc__py_finished_graph_of(state, values[0]);
    if (graph == NULL)
        return NULL;
    if (values[1] != NULL && values[1] != Py_None) {
        plan = msc__py_plan_of(state, values[1]);
        if (plan == NULL)
            return NULL;
    }
    if (!msc__py_to_sim_options(values[2], &options))
        return NULL;
    return replay(graph, plan, &options);
}
