/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `Plan`: what shall be done with each module, as `decide` chose it, as text says it, or as
 * `Plan.build` takes.
 *
 * A Plan never changes once Python can see it, so it can be read without the GIL and from any thread.
 * Actions and rules appear by name and key, never by number: those are what texts and reports show, and
 * they stay when an enum grows.
 */
#include "py_plan.h"

#include <string.h>

#include "convert.h"
#include "error.h"

/* ---- records ------------------------------------------------------------------------------------ */

#define SUMMARY_FIELD(name, kind)                                                                            \
    {                                                                                                        \
#name, kind, offsetof(msc_plan_summary, name)                                                        \
    }

static const msc__py_field summary_fields[] = {
    SUMMARY_FIELD(budget_bytes, MSC_PY_U64),       SUMMARY_FIELD(plain_peak_bytes, MSC_PY_U64),
    SUMMARY_FIELD(peak_bytes, MSC_PY_U64),         SUMMARY_FIELD(smallest_peak_bytes, MSC_PY_U64),
    SUMMARY_FIELD(plain_step_ns, MSC_PY_I64),      SUMMARY_FIELD(step_ns, MSC_PY_I64),
    SUMMARY_FIELD(time_bound_ppm, MSC_PY_U32),     SUMMARY_FIELD(peak_op, MSC_PY_U32),
    SUMMARY_FIELD(peak_in_recompute, MSC_PY_BOOL), SUMMARY_FIELD(fits, MSC_PY_BOOL),
    SUMMARY_FIELD(graph_digest, MSC_PY_HEX64),     SUMMARY_FIELD(window_out_bytes, MSC_PY_U64),
    SUMMARY_FIELD(window_in_bytes, MSC_PY_U64),    SUMMARY_FIELD(away_peak_bytes, MSC_PY_U64),
    SUMMARY_FIELD(staging_bytes, MSC_PY_U64),
};

static const msc__py_record summary_record = {"summary", summary_fields, MSC_PY_COUNT(summary_fields)};

bool msc__py_to_rule(PyObject *value, const char *what, msc_rule *out)
{
    const char *key = NULL;

    if (!msc__py_to_string(value, what, &key))
        return false;
    for (int i = 0; i < MSC_RULE_COUNT; i++) {
        if (strcmp(key, msc_rule_key((msc_rule)i)) == 0) {
            *out = (msc_rule)i;
            return true;
        }
    }
    msc__py_refuse("%s must be the key of a rule, not %R", what, value);
    return false;
}

static bool to_action(PyObject *value, const char *what, msc_action *out)
{
    const char *name = NULL;

    if (!msc__py_to_string(value, what, &name))
        return false;
    for (int i = 0; i < MSC_ACTION_COUNT; i++) {
        if (strcmp(name, msc_action_name((msc_action)i)) == 0) {
            *out = (msc_action)i;
            return true;
        }
    }
    msc__py_refuse("%s must be 'keep', 'checkpoint', 'selective' or 'offload', not %R", what, value);
    return false;
}

/* A choice in Python: shorter forms are its first 6 or 10 elements, the rest is then zero and empty. */
enum { SHORT_CHOICE = 6, STAYING_CHOICE = 10, WHOLE_CHOICE = 16, KEPT_OFFSETS = 9, MOVED_ORDINALS = 14 };

/** Reads (module, action, rule, call_count, saved_bytes, cost_ns). */
static bool to_short_choice(PyObject *tuple, msc_choice *out)
{
    msc_action action = MSC_ACTION_KEEP;
    msc_rule rule = MSC_RULE_NOT_NEEDED;
    uint32_t call_count = 0;

    if (!msc__py_to_id(PyTuple_GetItem(tuple, 0), "module", &out->module) ||
        !to_action(PyTuple_GetItem(tuple, 1), "action", &action) ||
        !msc__py_to_rule(PyTuple_GetItem(tuple, 2), "rule", &rule) ||
        !msc__py_to_u32(PyTuple_GetItem(tuple, 3), "call_count", UINT16_MAX, &call_count) ||
        !msc__py_to_u64(PyTuple_GetItem(tuple, 4), "saved_bytes", &out->saved_bytes) ||
        !msc__py_to_i64(PyTuple_GetItem(tuple, 5), "cost_ns", &out->cost_ns))
        return false;
    out->action = (uint8_t)action;
    out->rule = (uint8_t)rule;
    out->call_count = (uint16_t)call_count;
    return true;
}

/** Reads (boundary, moved_bytes, moved_count, transfer_ns), and ahead_bytes behind what it moves. */
static bool to_moves(PyObject *tuple, msc_choice *out)
{
    return msc__py_to_bool(PyTuple_GetItem(tuple, 10), "boundary", &out->boundary) &&
           msc__py_to_u64(PyTuple_GetItem(tuple, 11), "moved_bytes", &out->moved_bytes) &&
           msc__py_to_u32(PyTuple_GetItem(tuple, 12), "moved_count", UINT32_MAX, &out->moved_count) &&
           msc__py_to_i64(PyTuple_GetItem(tuple, 13), "transfer_ns", &out->transfer_ns) &&
           msc__py_to_u64(PyTuple_GetItem(tuple, 15), "ahead_bytes", &out->ahead_bytes);
}

/** Reads a choice but for its kept operations and what it moves. */
static bool to_choice(PyObject *tuple, msc_choice *out)
{
    Py_ssize_t count = PyTuple_Size(tuple);

    if (count != SHORT_CHOICE && count != STAYING_CHOICE && count != WHOLE_CHOICE) {
        msc__py_refuse("a choice must have %d, %d or %d elements, not %zd", SHORT_CHOICE, STAYING_CHOICE,
                       WHOLE_CHOICE, count);
        return false;
    }
    if (!to_short_choice(tuple, out))
        return false;
    if (count > SHORT_CHOICE &&
        (!msc__py_to_u64(PyTuple_GetItem(tuple, 6), "other_peak_bytes", &out->other_peak_bytes) ||
         !msc__py_to_i64(PyTuple_GetItem(tuple, 7), "other_step_ns", &out->other_step_ns) ||
         !msc__py_to_bool(PyTuple_GetItem(tuple, 8), "joined", &out->joined)))
        return false;
    return count < WHOLE_CHOICE || to_moves(tuple, out);
}

static PyObject *from_offsets(const uint32_t *offsets, uint32_t count)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);

    for (uint32_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *offset = PyLong_FromUnsignedLong(offsets[i]);

        if (offset == NULL || PyTuple_SetItem(tuple, (Py_ssize_t)i, offset) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *from_choice(const msc_plan *plan, uint32_t i)
{
    const msc_choice *choice = &msc_plan_choices(plan)[i];
    uint32_t kept_count = 0;
    uint32_t moved_count = 0;
    const uint32_t *kept = msc_plan_kept(plan, i, &kept_count);
    const uint32_t *moved = msc_plan_moved(plan, i, &moved_count);

    return Py_BuildValue("(IssIKLKLNNNKILNK)", (unsigned)choice->module,
                         msc_action_name((msc_action)choice->action), msc_rule_key((msc_rule)choice->rule),
                         (unsigned)choice->call_count, (unsigned long long)choice->saved_bytes,
                         (long long)choice->cost_ns, (unsigned long long)choice->other_peak_bytes,
                         (long long)choice->other_step_ns, PyBool_FromLong(choice->joined),
                         from_offsets(kept, kept_count), PyBool_FromLong(choice->boundary),
                         (unsigned long long)choice->moved_bytes, (unsigned)choice->moved_count,
                         (long long)choice->transfer_ns, from_offsets(moved, moved_count),
                         (unsigned long long)choice->ahead_bytes);
}

/* ---- lifecycle ---------------------------------------------------------------------------------- */

msc__py_plan *msc__py_plan_alloc(PyTypeObject *type)
{
    msc_error err;
    msc__py_plan *self = (msc__py_plan *)PyType_GenericAlloc(type, 0);

    if (self != NULL && msc_context_create(NULL, &self->ctx, &err) != MSC_OK) {
        msc__py_raise(&err);
        Py_CLEAR(self);
    }
    return self;
}

static void plan_dealloc(PyObject *object)
{
    msc__py_plan *self = (msc__py_plan *)object;
    PyTypeObject *type = Py_TYPE(object);

    msc_plan_destroy(self->plan);
    msc_context_destroy(self->ctx);
    PyObject_Free(object);
    Py_DECREF(type);
}

const msc_plan *msc__py_plan_of(const msc__py_state *state, PyObject *value)
{
    if (!PyObject_TypeCheck(value, state->plan_type)) {
        msc__py_refuse_type("plan", "a memscale._core.Plan", value);
        return NULL;
    }
    return ((msc__py_plan *)value)->plan;
}

static const msc_plan *self_plan(PyObject *self)
{
    return ((msc__py_plan *)self)->plan;
}

/* ---- making ------------------------------------------------------------------------------------- */

/** True when the core took it; else raises its error. */
static bool taken(msc_status status, const msc_error *err)
{
    if (status != MSC_OK)
        msc__py_raise(err);
    return status == MSC_OK;
}

typedef msc_status push_item(msc_plan *plan, uint32_t item, msc_error *err);

/** Adds numbers to the choice that was added last: what it keeps, or what it moves. */
static bool add_offsets(msc_plan *plan, PyObject *item, const char *what, push_item *push)
{
    PyObject *offsets = PySequence_Tuple(item);
    bool ok = offsets != NULL;
    msc_error err;

    for (Py_ssize_t i = 0; ok && i < PyTuple_Size(offsets); i++) {
        uint32_t offset = 0;

        ok = msc__py_to_id(PyTuple_GetItem(offsets, i), what, &offset) &&
             taken(push(plan, offset, &err), &err);
    }
    Py_XDECREF(offsets);
    return ok;
}

/** Appends one choice given as any sequence. */
static bool add_choice(msc_plan *plan, PyObject *item)
{
    msc_choice choice = {0};
    msc_error err;
    PyObject *tuple = PySequence_Tuple(item);
    bool ok = tuple != NULL && to_choice(tuple, &choice) && taken(msc_plan_add(plan, &choice, &err), &err);

    if (ok && PyTuple_Size(tuple) > SHORT_CHOICE)
        ok = add_offsets(plan, PyTuple_GetItem(tuple, KEPT_OFFSETS), "a kept offset", msc_plan_keep);
    if (ok && PyTuple_Size(tuple) == WHOLE_CHOICE)
        ok = add_offsets(plan, PyTuple_GetItem(tuple, MOVED_ORDINALS), "a moved ordinal", msc_plan_move);
    Py_XDECREF(tuple);
    return ok;
}

static bool add_choices(msc_plan *plan, PyObject *choices)
{
    PyObject *item = NULL;
    PyObject *iterator = PyObject_GetIter(choices);
    bool ok = iterator != NULL;

    while (ok && (item = PyIter_Next(iterator)) != NULL) {
        ok = add_choice(plan, item);
        Py_DECREF(item);
    }
    Py_XDECREF(iterator);
    return ok && PyErr_Occurred() == NULL;
}

static bool set_summary(msc_plan *plan, PyObject *dict)
{
    msc_plan_summary summary = {0};
    msc_error err;

    if (!msc__py_record_from_dict(&summary_record, dict, &summary))
        return false;
    return taken(msc_plan_set_summary(plan, &summary, &err), &err);
}

MSC_PY_SIGNATURE(build, 2, 2, "choices", "summary");

MSC_PY_FASTCALL(plan_build)
{
    PyObject *values[2];
    msc__py_plan *plan = NULL;
    msc_error err;

    if (!msc__py_bind(&build_signature, args, nargs, kwnames, values))
        return NULL;
    plan = msc__py_plan_alloc((PyTypeObject *)self);
    if (plan == NULL)
        return NULL;
    if (msc_plan_create(plan->ctx, &plan->plan, &err) != MSC_OK) {
        msc__py_raise(&err);
        Py_CLEAR(plan);
    } else if (!add_choices(plan->plan, values[0]) || !set_summary(plan->plan, values[1])) {
        Py_CLEAR(plan);
    }
    return (PyObject *)plan;
}

MSC_PY_SIGNATURE(parse, 1, 1, "text");

MSC_PY_FASTCALL(plan_parse)
{
    PyObject *values[1];
    PyObject *owner = NULL;
    msc__py_plan *plan = NULL;
    const char *text = NULL;
    size_t text_bytes = 0;
    msc_error err;

    if (!msc__py_bind(&parse_signature, args, nargs, kwnames, values) ||
        !msc__py_to_text(values[0], &owner, &text, &text_bytes))
        return NULL;
    plan = msc__py_plan_alloc((PyTypeObject *)self);
    if (plan != NULL && msc_plan_parse(plan->ctx, text, text_bytes, &plan->plan, &err) != MSC_OK) {
        msc__py_raise(&err);
        Py_CLEAR(plan);
    }
    Py_DECREF(owner);
    return (PyObject *)plan;
}

/* ---- reading ------------------------------------------------------------------------------------ */

static bool format_plan(const void *object, char *buffer, size_t buffer_bytes, size_t *needed_bytes)
{
    msc_error err;

    if (msc_plan_format(object, buffer, buffer_bytes, needed_bytes, &err) == MSC_OK)
        return true;
    msc__py_raise(&err);
    return false;
}

static PyObject *plan_to_text(PyObject *self, PyObject *unused)
{
    (void)unused;
    return msc__py_format(format_plan, self_plan(self));
}

static PyObject *get_choices(PyObject *self, void *closure)
{
    uint32_t count = msc_plan_choice_count(self_plan(self));
    PyObject *list = PyList_New((Py_ssize_t)count);

    (void)closure;
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *tuple = from_choice(self_plan(self), i);

        if (tuple == NULL || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *get_summary(PyObject *self, void *closure)
{
    (void)closure;
    return msc__py_record_to_dict(&summary_record, msc_plan_get_summary(self_plan(self)));
}

static PyObject *get_digest(PyObject *self, void *closure)
{
    (void)closure;
    return msc__py_from_hex64(msc_plan_digest(self_plan(self)));
}

static PyObject *plan_repr(PyObject *self)
{
    const msc_plan *plan = self_plan(self);
    uint32_t count = msc_plan_choice_count(plan);
    unsigned long treated = 0;

    for (uint32_t i = 0; i < count; i++)
        treated += msc_plan_choices(plan)[i].action != MSC_ACTION_KEEP;
    return PyUnicode_FromFormat("<Plan: %lu of %lu modules checkpointed or offloaded, %s>", treated,
                                (unsigned long)count,
                                msc_plan_get_summary(plan)->fits ? "fits" : "does not fit");
}

/* ---- type --------------------------------------------------------------------------------------- */

static PyMethodDef plan_methods[] = {
    MSC_PY_METHOD("build", plan_build, METH_CLASS,
                  "build($type, /, choices, summary)\n--\n\nMakes a plan from its choices and summary."),
    MSC_PY_METHOD("parse", plan_parse, METH_CLASS,
                  "parse($type, /, text)\n--\n\nReads a plan from canonical text."),
    {"to_text", plan_to_text, METH_NOARGS, "to_text($self, /)\n--\n\nThe canonical text."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef plan_properties[] = {
    {"choices", get_choices, NULL,
     "(module, action, rule, call_count, saved_bytes, cost_ns, other_peak_bytes, other_step_ns, joined, "
     "kept_offsets, boundary, moved_bytes, moved_count, transfer_ns, moved_ordinals, ahead_bytes) per module "
     "considered, "
     "in "
     "module order.",
     NULL},
    {"summary", get_summary, NULL, "The plan as a whole, every field of msc_plan_summary by name.", NULL},
    {"digest", get_digest, NULL, "Digest of the canonical text.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, "What shall be done with each module, and what that is expected to bring."},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_repr, plan_repr},
    {Py_tp_methods, plan_methods},
    {Py_tp_getset, plan_properties},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "memscale._core.Plan",
    .basicsize = sizeof(msc__py_plan),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = plan_slots,
};

PyTypeObject *msc__py_plan_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &plan_spec, NULL);
}
