/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decision: arguments in, `msc_decide` without the GIL, a Plan out.
 *
 * A decision takes from milliseconds to seconds, so the GIL is released: several can run at once, on one
 * graph too, since a finished graph is immutable and every decision works in a context of its own (that
 * of the Plan it makes).
 */
#include "py_decide.h"

#include "convert.h"
#include "error.h"
#include "memscale/decide.h"
#include "module_state.h"
#include "py_graph.h"
#include "py_plan.h"
#include "py_sim.h"

#define RATE_FIELD(name, kind)                                                                               \
    {                                                                                                        \
#name, kind, offsetof(msc_rates, name)                                                               \
    }

static const msc__py_field rate_fields[] = {
    RATE_FIELD(fresh_from_bytes, MSC_PY_U64_ABOVE_0), RATE_FIELD(fresh_bytes_per_us, MSC_PY_U64_ABOVE_0),
    RATE_FIELD(launch_ns, MSC_PY_I64_ABOVE_0),        RATE_FIELD(recompute_ns, MSC_PY_I64_ABOVE_0),
    RATE_FIELD(intercept_ns, MSC_PY_I64_ABOVE_0),
};

static const msc__py_record rate_record = {"rates", rate_fields, MSC_PY_COUNT(rate_fields)};

#define LINK_FIELD(name, kind)                                                                               \
    {                                                                                                        \
#name, kind, offsetof(msc_link, name)                                                                \
    }

static const msc__py_field link_fields[] = {
    LINK_FIELD(out_bytes_per_us, MSC_PY_U64_ABOVE_0),
    LINK_FIELD(in_bytes_per_us, MSC_PY_U64_ABOVE_0),
    LINK_FIELD(offload_ns, MSC_PY_I64),
    LINK_FIELD(least_bytes, MSC_PY_U64_ABOVE_0),
    LINK_FIELD(limit_bytes, MSC_PY_U64_LIMIT),
    LINK_FIELD(window_out_bytes, MSC_PY_U64),
    LINK_FIELD(window_in_bytes, MSC_PY_U64),
    LINK_FIELD(staging_bytes, MSC_PY_U64),
};

static const msc__py_record link_record = {"offload", link_fields, MSC_PY_COUNT(link_fields)};

/* ---- rates -------------------------------------------------------------------------------------- */

/** The rates of one dimension, one per kind, as a record whose fields are the kinds. */
static bool kinds_from_dict(const char *what, PyObject *dict, uint64_t *per_us)
{
    msc__py_field fields[MSC_RATE_COUNT];
    const msc__py_record record = {what, fields, MSC_RATE_COUNT};

    for (uint32_t i = 0; i < MSC_RATE_COUNT; i++)
        fields[i] = (msc__py_field){msc_rate_name(i), MSC_PY_U64_ABOVE_0, i * sizeof(*per_us)};
    return msc__py_record_from_dict(&record, dict, per_us);
}

/** A number for every kind, or a dict with those that differ from the default. `value` NULL: all do not. */
static bool to_kinds(const char *what, PyObject *value, uint64_t *per_us)
{
    const msc__py_field whole = {what, MSC_PY_U64_ABOVE_0, 0};
    const msc__py_record record = {"rates", &whole, 1};
    PyObject *dict = NULL;
    bool ok;

    if (value == NULL || PyDict_Check(value))
        return kinds_from_dict(what, value, per_us);
    dict = PyDict_New();
    ok = dict != NULL && PyDict_SetItemString(dict, what, value) == 0 &&
         msc__py_record_from_dict(&record, dict, &per_us[0]);
    Py_XDECREF(dict);
    for (uint32_t i = 1; ok && i < MSC_RATE_COUNT; i++)
        per_us[i] = per_us[0];
    return ok;
}

/** Takes `what` out of `dict` and reads it. */
static bool take_kinds(PyObject *dict, const char *what, uint64_t *per_us)
{
    PyObject *key = PyUnicode_FromString(what);
    PyObject *value = NULL;
    bool ok = key != NULL;

    if (ok)
        value = PyDict_GetItemWithError(dict, key);
    ok = ok && (value != NULL || PyErr_Occurred() == NULL);
    Py_XINCREF(value);
    ok = ok && (value == NULL || PyDict_DelItem(dict, key) == 0) && to_kinds(what, value, per_us);
    Py_XDECREF(value);
    Py_XDECREF(key);
    return ok;
}

/** Sets the rates that a dict, or None, names. */
static bool to_rates(PyObject *value, msc_rates *out)
{
    PyObject *dict = NULL;
    bool ok;

    if (value == NULL || value == Py_None || !PyDict_Check(value))
        return msc__py_record_from_dict(&rate_record, value, out);
    dict = PyDict_Copy(value);
    ok = dict != NULL && take_kinds(dict, "flops_per_us", out->flops_per_us) &&
         take_kinds(dict, "moved_bytes_per_us", out->moved_bytes_per_us) &&
         msc__py_record_from_dict(&rate_record, dict, out);
    Py_XDECREF(dict);
    return ok;
}

/** Default options with what `sim`, `rates`, `offload` and `rerun_bytes` say; each may be NULL or None. */
static bool to_options(PyObject *sim, PyObject *rates, PyObject *offload, PyObject *rerun_bytes,
                       msc_decide_options *out)
{
    *out = msc_decide_options_default();
    out->allow_offload = offload != NULL && offload != Py_None;
    return msc__py_to_sim_options(sim, &out->sim) && to_rates(rates, &out->rates) &&
           msc__py_record_from_dict(&link_record, offload, &out->link) &&
           (rerun_bytes == NULL || msc__py_to_u64(rerun_bytes, "rerun_bytes", &out->rerun_bytes));
}

/* ---- decide ------------------------------------------------------------------------------------- */

MSC_PY_SIGNATURE(decide, 2, 2, "graph", "budget_bytes", "sim", "rates", "allow_checkpoint", "allow_selective",
                 "force", "offload", "rerun_bytes");

PyObject *msc__py_decide(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    const msc__py_state *state = msc__py_module_state(self);
    PyObject *values[9];
    const msc_graph *graph = NULL;
    msc__py_plan *plan = NULL;
    PyThreadState *thread;
    msc_decide_options options;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&decide_signature, args, nargs, kwnames, values))
        return NULL;
    graph = msc__py_finished_graph_of(state, values[0]);
    if (graph == NULL || !to_options(values[2], values[3], values[7], values[8], &options) ||
        !msc__py_to_u64(values[1], "budget_bytes", &options.budget_bytes) ||
        !msc__py_to_bool(values[4], "allow_checkpoint", &options.allow_checkpoint) ||
        !msc__py_to_bool(values[5], "allow_selective", &options.allow_selective) ||
        !msc__py_to_bool(values[6], "force", &options.force))
        return NULL;
    plan = msc__py_plan_alloc(state->plan_type);
    if (plan == NULL)
        return NULL;
    thread = PyEval_SaveThread();
    status = msc_decide(plan->ctx, graph, &options, &plan->plan, &err);
    PyEval_RestoreThread(thread);
    if (status != MSC_OK) {
        msc__py_raise(&err);
        Py_CLEAR(plan);
    }
    return (PyObject *)plan;
}

/* ---- frontier ----------------------------------------------------------------------------------- */

/** Room for the points of a first attempt; a longer frontier costs a second search. */
#define FRONTIER_POINTS 512

static msc_status search(const msc_graph *graph, const msc_decide_options *options,
                         msc_frontier_point *points, size_t capacity, size_t *count, msc_error *err)
{
    msc_context *ctx = NULL;
    msc_status status = msc_context_create(NULL, &ctx, err);

    if (status == MSC_OK)
        status = msc_decide_frontier(ctx, graph, options, points, capacity, count, err);
    msc_context_destroy(ctx);
    return status;
}

static PyObject *from_points(const msc_frontier_point *points, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);

    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *tuple =
            Py_BuildValue("(KL)", (unsigned long long)points[i].peak_bytes, (long long)points[i].step_ns);

        if (tuple == NULL || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *frontier(const msc_graph *graph, const msc_decide_options *options)
{
    msc_frontier_point *points = NULL;
    size_t capacity = 0;
    size_t count = FRONTIER_POINTS;
    PyObject *list = NULL;
    PyThreadState *thread;
    msc_error err;
    msc_status status = MSC_OK;

    while (status == MSC_OK && count > capacity) {
        capacity = count;
        PyMem_Free(points);
        points = PyMem_Malloc(capacity * sizeof(*points));
        if (points == NULL)
            return PyErr_NoMemory();
        thread = PyEval_SaveThread();
        status = search(graph, options, points, capacity, &count, &err);
        PyEval_RestoreThread(thread);
    }
    list = status == MSC_OK ? from_points(points, count) : msc__py_raise(&err);
    PyMem_Free(points);
    return list;
}

MSC_PY_SIGNATURE(frontier, 1, 1, "graph", "sim", "rates", "allow_selective", "allow_checkpoint", "offload",
                 "rerun_bytes");

PyObject *msc__py_frontier(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *values[7];
    const msc_graph *graph = NULL;
    msc_decide_options options;

    if (!msc__py_bind(&frontier_signature, args, nargs, kwnames, values))
        return NULL;
    graph = msc__py_finished_graph_of(msc__py_module_state(self), values[0]);
    if (graph == NULL || !to_options(values[1], values[2], values[5], values[6], &options) ||
        !msc__py_to_bool(values[3], "allow_selective", &options.allow_selective) ||
        !msc__py_to_bool(values[4], "allow_checkpoint", &options.allow_checkpoint))
        return NULL;
    return frontier(graph, &options);
}

/* ---- times -------------------------------------------------------------------------------------- */

MSC_PY_SIGNATURE(op_times_ns, 1, 2, "graph", "rates");

PyObject *msc__py_op_times_ns(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *values[2];
    const msc_graph *graph = NULL;
    msc_rates rates = msc_rates_default();
    int64_t *times_ns = NULL;
    PyObject *result = NULL;
    size_t bytes;

    if (!msc__py_bind(&op_times_ns_signature, args, nargs, kwnames, values))
        return NULL;
    graph = msc__py_graph_of(msc__py_module_state(self), values[0]);
    if (graph == NULL || !to_rates(values[1], &rates))
        return NULL;
    bytes = (size_t)msc_graph_op_count(graph) * sizeof(*times_ns);
    times_ns = PyMem_Malloc(bytes);
    if (times_ns == NULL)
        return PyErr_NoMemory();
    msc_op_times_ns(graph, &rates, times_ns);
    result = PyBytes_FromStringAndSize((const char *)times_ns, (Py_ssize_t)bytes);
    PyMem_Free(times_ns);
    return result;
}
