/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decision: arguments in, `msc_decide` without the GIL, a Plan out.
 *
 * A decision takes from milliseconds to seconds, so the GIL is released: several can run at once, on one
 * graph too, since a finished graph is immutable and every decision works in a context of its own (that
 * of the Plan it makes).
 */
#include "py_decide.h"

#include <string.h>

#include "convert.h"
#include "error.h"
#include "memscale/decide.h"
#include "module.h"
#include "py_graph.h"
#include "py_plan.h"
#include "py_sim.h"

#define RATE_FIELD(name, kind)                                                                               \
    {                                                                                                        \
#name, kind, offsetof(msc_rates, name)                                                               \
    }

static const msc__py_field rate_fields[] = {
    RATE_FIELD(flops_per_us, MSC_PY_U64_ABOVE_0),
    RATE_FIELD(moved_bytes_per_us, MSC_PY_U64_ABOVE_0),
    RATE_FIELD(launch_ns, MSC_PY_I64_ABOVE_0),
    RATE_FIELD(recompute_ns, MSC_PY_I64_ABOVE_0),
};

static const msc__py_record rate_record = {"rates", rate_fields, MSC_PY_COUNT(rate_fields)};

/** Default options with what `sim` and `rates` say. */
static bool to_options(PyObject *sim, PyObject *rates, msc_decide_options *out)
{
    *out = msc_decide_options_default();
    return msc__py_to_sim_options(sim, &out->sim) &&
           msc__py_record_from_dict(&rate_record, rates, &out->rates);
}

/* ---- decide ------------------------------------------------------------------------------------- */

MSC_PY_SIGNATURE(decide, 2, 2, "graph", "budget_bytes", "sim", "rates", "allow_checkpoint", "force");

PyObject *msc__py_decide(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    const msc__py_state *state = msc__py_module_state(self);
    PyObject *values[6];
    const msc_graph *graph = NULL;
    msc__py_plan *plan = NULL;
    PyThreadState *thread;
    msc_decide_options options;
    msc_error err;
    msc_status status;

    if (!msc__py_bind(&decide_signature, args, nargs, kwnames, values))
        return NULL;
    graph = msc__py_finished_graph_of(state, values[0]);
    if (graph == NULL || !to_options(values[2], values[3], &options) ||
        !msc__py_to_u64(values[1], "budget_bytes", &options.budget_bytes) ||
        !msc__py_to_bool(values[4], "allow_checkpoint", &options.allow_checkpoint) ||
        !msc__py_to_bool(values[5], "force", &options.force))
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

MSC_PY_SIGNATURE(frontier, 1, 1, "graph", "sim", "rates");

PyObject *msc__py_frontier(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *values[3];
    const msc_graph *graph = NULL;
    msc_decide_options options;

    if (!msc__py_bind(&frontier_signature, args, nargs, kwnames, values))
        return NULL;
    graph = msc__py_finished_graph_of(msc__py_module_state(self), values[0]);
    if (graph == NULL || !to_options(values[1], values[2], &options))
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
    PyObject *result = NULL;
    char *at = NULL;

    if (!msc__py_bind(&op_times_ns_signature, args, nargs, kwnames, values))
        return NULL;
    graph = msc__py_graph_of(msc__py_module_state(self), values[0]);
    if (graph == NULL || !msc__py_record_from_dict(&rate_record, values[1], &rates))
        return NULL;
    result =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)((size_t)msc_graph_op_count(graph) * sizeof(int64_t)));
    if (result == NULL)
        return NULL;
    at = PyBytes_AsString(result);
    for (uint32_t i = 0; i < msc_graph_op_count(graph); i++) {
        int64_t time_ns = msc_op_time_ns(&msc_graph_ops(graph)[i], &rates);

        memcpy(at + i * sizeof(time_ns), &time_ns, sizeof(time_ns));
    }
    return result;
}
