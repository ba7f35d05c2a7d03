/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memscale._core: the door between Python and libmemscale.
 *
 *     python/memscale ──► _core ──► include/memscale/ *.h          nothing else of the core is visible here
 *
 *     module     this file: types, functions, constants
 *     py_graph   Graph, and py_graph_read what it shows      py_plan   Plan
 *     py_sim     replay, options of a simulator              py_simulator Simulator
 *     py_decide  decide, frontier, op_times_ns
 *     py_snapshot Snapshot                                   py_offload OffloadEngine: hooks, store, Block
 *     py_optim    Optim, and py_optim_args its arguments     py_optim_card Card
 *     py_fingerprint fingerprint                         py_fingerprint_table FingerprintTable
 *     py_entries Entries
 *     py_record  Recorder                                    py_spool Spool
 *     convert    arguments and records                       error     status to exception
 *
 * Built against the limited API of CPython 3.10, so one binary serves every later version. It is
 * initialised in several phases and keeps its types in the module's state, not in globals.
 *
 * The bindings think nothing: parse, call, convert. What must be decided is decided in the core, where C
 * callers get it too. _core.pyi is the manual; the doc strings here are its first lines.
 */
#include "module_state.h"

#include "convert.h"
#include "memscale/base.h"
#include "memscale/decide.h"
#include "memscale/optim.h"
#include "memscale/replay.h"
#include "py_decide.h"
#include "py_entries.h"
#include "py_events.h"
#include "py_fingerprint.h"
#include "py_fingerprint_table.h"
#include "py_graph.h"
#include "py_offload.h"
#include "py_optim.h"
#include "py_optim_card.h"
#include "py_plan.h"
#include "py_record.h"
#include "py_sim.h"
#include "py_simulator.h"
#include "py_snapshot.h"

/* ---- functions ---------------------------------------------------------------------------------- */

MSC_PY_SIGNATURE(rule_text, 1, 1, "key");

MSC_PY_FASTCALL(core_rule_text)
{
    PyObject *values[1];
    msc_rule rule = MSC_RULE_CHOSEN;

    (void)self;
    if (!msc__py_bind(&rule_text_signature, args, nargs, kwnames, values) ||
        !msc__py_to_rule(values[0], "key", &rule))
        return NULL;
    return PyUnicode_FromString(msc_rule_text(rule));
}

static PyObject *core_version(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    return PyUnicode_FromString(msc_version());
}

static PyMethodDef core_functions[] = {
    MSC_PY_METHOD("decide", msc__py_decide, 0,
                  "decide($module, /, graph, budget_bytes, *, sim=None, rates=None, allow_checkpoint=True,\n"
                  "       allow_selective=True, force=False, offload=None, rerun_bytes=0)\n--\n\n"
                  "The fastest plan whose replayed peak is within a budget."),
    MSC_PY_METHOD("frontier", msc__py_frontier, 0,
                  "frontier($module, /, graph, *, sim=None, rates=None, allow_selective=True,\n"
                  "         allow_checkpoint=True, offload=None, rerun_bytes=0)\n--\n\n"
                  "(peak_bytes, step_ns) of every plan that decide chooses from, fastest first."),
    MSC_PY_METHOD("replay", msc__py_replay, 0,
                  "replay($module, /, graph, plan=None, *, sim=None)\n--\n\n"
                  "Plays the step under a plan into the allocator simulator."),
    MSC_PY_METHOD("step_events", msc__py_step_events, 0,
                  "step_events($module, /, graph, plan=None)\n--\n\n"
                  "What a step under a plan allocates, frees and runs, in order."),
    MSC_PY_METHOD("fingerprint", msc__py_fingerprint, 0,
                  "fingerprint($module, /, tensor, sampled=False)\n--\n\n"
                  "64 bits that differ where the bytes of two tensors do."),
    MSC_PY_METHOD("op_times_ns", msc__py_op_times_ns, 0,
                  "op_times_ns($module, /, graph, rates=None)\n--\n\n"
                  "Time of each operation by the cost model: native int64 values."),
    MSC_PY_METHOD("rule_text", core_rule_text, 0,
                  "rule_text($module, /, key)\n--\n\nOne clause of English for the key of a rule."),
    {"version", core_version, METH_NOARGS, "version($module, /)\n--\n\nVersion of the C library."},
    {NULL, NULL, 0, NULL},
};

/* ---- constants ---------------------------------------------------------------------------------- */

typedef struct constant {
    const char *name;
    long value;
} constant;

#define CONSTANT(name)                                                                                       \
    {                                                                                                        \
#name, MSC_##name                                                                                    \
    }

static const constant constants[] = {
    CONSTANT(PHASE_FORWARD),
    CONSTANT(PHASE_BACKWARD),
    CONSTANT(PHASE_OPTIMIZER),
    CONSTANT(CATEGORY_PARAMETER),
    CONSTANT(CATEGORY_BUFFER),
    CONSTANT(CATEGORY_GRADIENT),
    CONSTANT(CATEGORY_OPTIMIZER_STATE),
    CONSTANT(CATEGORY_INPUT),
    CONSTANT(CATEGORY_ACTIVATION),
    CONSTANT(CATEGORY_TEMPORARY),
    CONSTANT(CATEGORY_WORKSPACE),
    CONSTANT(REPLAY_STEPS),
    CONSTANT(OP_RANDOM),
    CONSTANT(OP_HALF),
    CONSTANT(MODULE_ROOT),
    CONSTANT(MODULE_PYTHON_STATE),
    CONSTANT(MODULE_NO_FORWARD),
    CONSTANT(MODULE_NOT_TENSORS),
    CONSTANT(MODULE_EXCLUDED),
    CONSTANT(MODULE_HOOKED),
    CONSTANT(MODULE_CHAIN),
    CONSTANT(MODULE_NO_ROOM),
    CONSTANT(MODULE_INPUT_CHANGED),
    CONSTANT(MODULE_LEFT_OUT),
    CONSTANT(MODULE_DIFFERED),
    CONSTANT(MODULE_SCRIPTED),
    CONSTANT(WORK_OTHER),
    CONSTANT(WORK_MOVE),
    CONSTANT(WORK_MATH),
    CONSTANT(WORK_SLOW_MATH),
    CONSTANT(WORK_REDUCE),
    CONSTANT(WORK_CHANNEL),
    CONSTANT(WORK_SELECT),
    CONSTANT(WORK_WINDOW),
    CONSTANT(WORK_RANDOM),
    CONSTANT(WORK_GATHER),
    CONSTANT(WORK_MATRIX),
    CONSTANT(WORK_BATCH),
    CONSTANT(WORK_ATTENTION),
    CONSTANT(WORK_CONVOLUTION),
    CONSTANT(WORK_GROUPED),
    CONSTANT(WORK_GROUPED_GRADIENT),
    CONSTANT(WORK_RECURRENT),
    CONSTANT(WORK_COUNT),
    CONSTANT(OPTIM_STATE_VERSION),
};

static int add_constants(PyObject *module)
{
    for (size_t i = 0; i < MSC_PY_COUNT(constants); i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
            return -1;
    }
    return 0;
}

/** The name of the i-th of some numbered things. */
typedef const char *(*name_function)(uint32_t i);

static const char *category_name(uint32_t i)
{
    return msc__py_category_name((int)i);
}

/** Adds a tuple with the names of `count` things. */
static int add_names(PyObject *module, const char *what, uint32_t count, name_function name_of)
{
    PyObject *names = PyTuple_New((Py_ssize_t)count);
    int result = -1;

    for (uint32_t i = 0; names != NULL && i < count; i++) {
        PyObject *name = PyUnicode_FromString(name_of(i));

        if (name == NULL || PyTuple_SetItem(names, (Py_ssize_t)i, name) < 0)
            Py_CLEAR(names);
    }
    if (names != NULL)
        result = PyModule_AddObjectRef(module, what, names);
    Py_XDECREF(names);
    return result;
}

/* ---- module ------------------------------------------------------------------------------------- */

static int core_exec(PyObject *module)
{
    msc__py_state *state = msc__py_module_state(module);

    state->graph_type = msc__py_graph_type_new(module);
    state->plan_type = msc__py_plan_type_new(module);
    state->snapshot_type = msc__py_snapshot_type_new(module);
    state->simulator_type = msc__py_simulator_type_new(module);
    if (state->graph_type == NULL || state->plan_type == NULL || state->simulator_type == NULL)
        return -1;
    if (PyModule_AddType(module, state->graph_type) < 0 || PyModule_AddType(module, state->plan_type) < 0 ||
        PyModule_AddType(module, state->simulator_type) < 0)
        return -1;
    if (state->snapshot_type == NULL || PyModule_AddType(module, state->snapshot_type) < 0)
        return -1;
    state->saved_type = msc__py_saved_type_new(module);
    state->block_type = msc__py_block_type_new(module);
    state->engine_type = msc__py_engine_type_new(module);
    if (state->saved_type == NULL || state->block_type == NULL || state->engine_type == NULL)
        return -1;
    if (PyModule_AddType(module, state->saved_type) < 0 || PyModule_AddType(module, state->block_type) < 0 ||
        PyModule_AddType(module, state->engine_type) < 0)
        return -1;
    state->optim_type = msc__py_optim_type_new(module);
    state->card_type = msc__py_card_type_new(module);
    if (state->optim_type == NULL || PyModule_AddType(module, state->optim_type) < 0 ||
        state->card_type == NULL || PyModule_AddType(module, state->card_type) < 0)
        return -1;
    state->fingerprint_table_type = msc__py_fingerprint_table_type_new(module);
    state->kept_fingerprint_type = msc__py_kept_fingerprint_type_new(module);
    if (state->fingerprint_table_type == NULL ||
        PyModule_AddType(module, state->fingerprint_table_type) < 0 || state->kept_fingerprint_type == NULL ||
        PyModule_AddType(module, state->kept_fingerprint_type) < 0)
        return -1;
    state->entries_type = msc__py_entries_type_new(module);
    if (state->entries_type == NULL || PyModule_AddType(module, state->entries_type) < 0)
        return -1;
    state->recorder_type = msc__py_recorder_type_new(module);
    state->spool_type = msc__py_spool_type_new(module);
    if (state->recorder_type == NULL || PyModule_AddType(module, state->recorder_type) < 0 ||
        state->spool_type == NULL || PyModule_AddType(module, state->spool_type) < 0)
        return -1;
    if (add_constants(module) < 0)
        return -1;
    if (add_names(module, "CATEGORY_NAMES", MSC_CATEGORY_COUNT, category_name) < 0)
        return -1;
    return add_names(module, "RATE_NAMES", MSC_RATE_COUNT, msc_rate_name);
}

static int core_traverse(PyObject *module, visitproc visit, void *arg)
{
    msc__py_state *state = msc__py_module_state(module);

    Py_VISIT(state->graph_type);
    Py_VISIT(state->plan_type);
    Py_VISIT(state->snapshot_type);
    Py_VISIT(state->simulator_type);
    Py_VISIT(state->engine_type);
    Py_VISIT(state->saved_type);
    Py_VISIT(state->block_type);
    Py_VISIT(state->optim_type);
    Py_VISIT(state->card_type);
    Py_VISIT(state->fingerprint_table_type);
    Py_VISIT(state->kept_fingerprint_type);
    Py_VISIT(state->entries_type);
    Py_VISIT(state->recorder_type);
    Py_VISIT(state->spool_type);
    Py_VISIT(state->tensors.type);
    return 0;
}

static int core_clear(PyObject *module)
{
    msc__py_state *state = msc__py_module_state(module);

    Py_CLEAR(state->graph_type);
    Py_CLEAR(state->plan_type);
    Py_CLEAR(state->snapshot_type);
    Py_CLEAR(state->simulator_type);
    Py_CLEAR(state->engine_type);
    Py_CLEAR(state->saved_type);
    Py_CLEAR(state->block_type);
    Py_CLEAR(state->optim_type);
    Py_CLEAR(state->card_type);
    Py_CLEAR(state->fingerprint_table_type);
    Py_CLEAR(state->kept_fingerprint_type);
    Py_CLEAR(state->entries_type);
    Py_CLEAR(state->recorder_type);
    Py_CLEAR(state->spool_type);
    Py_CLEAR(state->tensors.type);
    return 0;
}

static void core_free(void *module)
{
    core_clear(module);
}

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, core_exec},
    {0, NULL},
};

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_core",
    .m_doc = "The C core of MemScale: memory graphs, replay, and the decision.",
    .m_size = sizeof(msc__py_state),
    .m_methods = core_functions,
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&core_module);
}
