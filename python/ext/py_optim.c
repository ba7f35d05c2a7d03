/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The type `Optim`. Work on arrays runs without the GIL; the caller keeps the tensors alive that they belong to, with a
 * card until the stream has done the work: PyTorch's allocator does that for tensors of the stream's device.
 */
#include "py_optim.h"

#include "convert.h"
#include "error.h"
#include "memscale/optim.h"
#include "module_state.h"
#include "py_optim_args.h"
#include "py_optim_card.h"

typedef struct optim_object {
    PyObject_HEAD msc_context *ctx;
    msc_optim *optim;
    PyObject *card; /* or NULL; outlives `optim` */
    uint32_t threads;
} optim_object;

static msc_optim *optim_of(PyObject *self)
{
    return ((optim_object *)self)->optim;
}

/* Ends a call that worked without the GIL. */
static PyObject *none_or_raise(msc_status status, const msc_error *err)
{
    if (status != MSC_OK)
        return msc__py_raise_of_device(err);
    return Py_NewRef(Py_None);
}

/* ---- life --------------------------------------------------------------------------------------- */

static const char *const isa_names[] = {"any", "scalar", "avx2", "avx512"};
_Static_assert(MSC_PY_COUNT(isa_names) == MSC_OPTIM_ISA_COUNT, "a name for every instruction set");

enum { ARG_THREADS, ARG_ISA, ARG_CARD, ARG_STREAM, ARG_COUNT };

static bool read_card(const PyTypeObject *card_type, PyObject *const *values, msc_optim_options *options)
{
    PyObject *card = values[ARG_CARD];
    uint64_t stream = 0;

    if (!msc__py_to_u64(values[ARG_STREAM], "stream", &stream))
        return false;
    if (card != NULL && card != Py_None) {
        if (Py_TYPE(card) != card_type) {
            msc__py_refuse_type("card", "a Card", card);
            return false;
        }
        options->device = msc__py_card_device(card);
    }
    options->stream = (void *)(uintptr_t)stream;
    return true;
}

static bool read_options(const PyTypeObject *card_type, PyObject *const *values, msc_optim_options *options)
{
    PyObject *isa = values[ARG_ISA];
    uint32_t number = MSC_OPTIM_ISA_ANY;

    *options = msc_optim_options_default();
    if (!msc__py_to_u32(values[ARG_THREADS], "threads", UINT32_MAX, &options->thread_count) ||
        (isa != NULL && !msc__py_to_name(isa, "isa", isa_names, MSC_OPTIM_ISA_COUNT, &number)))
        return false;
    options->isa = (msc_optim_isa)number;
    return read_card(card_type, values, options);
}

static msc_status create(optim_object *self, const msc_optim_options *options, msc_error *err)
{
    msc_status status = msc_context_create(NULL, &self->ctx, err);

    if (status != MSC_OK)
        return status;
    Py_BEGIN_ALLOW_THREADS /* compiling for a card takes its time */
    status = msc_optim_create(self->ctx, options, &self->optim, err);
    Py_END_ALLOW_THREADS
    return status;
}

static PyObject *optim_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"threads", "isa", "card", "stream", NULL};
    const msc__py_state *state = PyType_GetModuleState(type);
    PyObject *values[ARG_COUNT] = {NULL};
    msc_optim_options options;
    optim_object *self;
    msc_error err;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "|OO$OO:Optim", names, &values[ARG_THREADS],
                                     &values[ARG_ISA], &values[ARG_CARD], &values[ARG_STREAM]) ||
        !read_options(state->card_type, values, &options))
        return NULL;
    self = (optim_object *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->threads = options.thread_count;
    self->card = options.device == NULL ? NULL : Py_NewRef(values[ARG_CARD]);
    if (create(self, &options, &err) != MSC_OK) {
        Py_DECREF((PyObject *)self);
        return msc__py_raise_of_device(&err);
    }
    return (PyObject *)self;
}

static void optim_dealloc(PyObject *object)
{
    optim_object *self = (optim_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    msc_optim_destroy(self->optim);
    msc_context_destroy(self->ctx);
    Py_XDECREF(self->card);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *optim_threads(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(((optim_object *)self)->threads);
}

static PyObject *optim_isa(PyObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(msc_optim_isa_name(msc_optim_isa_used(optim_of(self))));
}

/* ---- steps -------------------------------------------------------------------------------------- */

MSC_PY_SIGNATURE(step, 2, 2, "rule", "tensors");

MSC_PY_FASTCALL(optim_step)
{
    PyObject *values[2];
    msc__py_tensors tensors;
    msc_optim_rule rule;
    msc_status status = MSC_OK;
    msc_error err;

    if (!msc__py_bind(&step_signature, args, nargs, kwnames, values) ||
        !msc__py_to_rule_of_optim(values[0], &rule))
        return NULL;
    if (!msc__py_to_optim_tensors(values[1], &rule, &tensors)) {
        PyMem_Free(tensors.items);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = msc_optim_step(optim_of(self), &rule, tensors.items, (uint64_t)tensors.count, &err);
    Py_END_ALLOW_THREADS
    PyMem_Free(tensors.items);
    return none_or_raise(status, &err);
}

MSC_PY_SIGNATURE(sizes, 2, 2, "rule", "count");

#define SIZE(name)                                                                                           \
    {                                                                                                        \
#name, MSC_PY_U64, offsetof(msc_optim_sizes, name)                                                   \
    }

static const msc__py_field size_fields[] = {
    SIZE(gradient_bytes), SIZE(weight_bytes), SIZE(master_bytes), SIZE(moment1_bytes),
    SIZE(moment2_bytes),  SIZE(scale1_bytes), SIZE(scale2_bytes),
};

static const msc__py_record size_record = {"sizes", size_fields, MSC_PY_COUNT(size_fields)};

MSC_PY_FASTCALL(optim_sizes)
{
    PyObject *values[2];
    msc_optim_rule rule;
    msc_optim_sizes sizes;
    uint64_t count = 0;
    msc_error err;

    (void)self;
    if (!msc__py_bind(&sizes_signature, args, nargs, kwnames, values) ||
        !msc__py_to_rule_of_optim(values[0], &rule) || !msc__py_to_u64(values[1], "count", &count))
        return NULL;
    if (msc_optim_tensor_sizes(&rule, count, &sizes, &err) != MSC_OK)
        return msc__py_raise_of_device(&err);
    return msc__py_record_to_dict(&size_record, &sizes);
}

/* ---- gradients ---------------------------------------------------------------------------------- */

static bool read_arrays(PyObject *list, msc_optim_array **out, Py_ssize_t *count)
{
    if (!PyList_Check(list)) {
        msc__py_refuse_type("arrays", "a list", list);
        return false;
    }
    *count = PyList_Size(list);
    *out = PyMem_Malloc((size_t)(*count + 1) * sizeof **out);
    if (*out == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < *count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        bool ok;

        if (item == NULL)
            return false;
        Py_INCREF(item);
        ok = msc__py_to_optim_array(item, "an array", &(*out)[i]);
        Py_DECREF(item);
        if (!ok)
            return false;
    }
    return true;
}

MSC_PY_SIGNATURE(norm, 1, 2, "arrays", "scale");

MSC_PY_FASTCALL(optim_norm)
{
    PyObject *values[2];
    msc_optim_array *arrays = NULL;
    msc_optim_norm_result result = {0};
    Py_ssize_t count = 0;
    double scale = 1.0;
    msc_status status = MSC_OK;
    msc_error err;

    if (!msc__py_bind(&norm_signature, args, nargs, kwnames, values))
        return NULL;
    if (values[1] != NULL)
        scale = PyFloat_AsDouble(values[1]);
    if (PyErr_Occurred() != NULL)
        return NULL;
    if (!read_arrays(values[0], &arrays, &count)) {
        PyMem_Free(arrays);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = msc_optim_norm(optim_of(self), arrays, (uint64_t)count, (float)scale, &result, &err);
    Py_END_ALLOW_THREADS
    PyMem_Free(arrays);
    if (status != MSC_OK)
        return msc__py_raise_of_device(&err);
    return Py_BuildValue("(dK)", result.sum_of_squares, (unsigned long long)result.nonfinite_count);
}

static PyObject *optim_clip_factor(PyObject *unused, PyObject *args)
{
    double sum_of_squares = 0.0;
    double max_norm = 0.0;

    (void)unused;
    if (!PyArg_ParseTuple(args, "dd:clip_factor", &sum_of_squares, &max_norm))
        return NULL;
    return PyFloat_FromDouble((double)msc_optim_clip_factor(sum_of_squares, max_norm));
}

MSC_PY_SIGNATURE(accumulate, 2, 2, "sums", "gradient");

MSC_PY_FASTCALL(optim_accumulate)
{
    PyObject *values[2];
    msc_optim_array gradient = {0};
    void *sums = NULL;
    msc_status status = MSC_OK;
    msc_error err;

    if (!msc__py_bind(&accumulate_signature, args, nargs, kwnames, values) ||
        !msc__py_to_optim_array(values[1], "gradient", &gradient) ||
        !msc__py_to_span_of(values[0], "sums", 4 * gradient.count, &sums))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = msc_optim_accumulate(optim_of(self), sums, &gradient, &err);
    Py_END_ALLOW_THREADS
    return none_or_raise(status, &err);
}

MSC_PY_SIGNATURE(convert, 2, 2, "target", "source");

MSC_PY_FASTCALL(optim_convert)
{
    PyObject *values[2];
    msc_optim_array target = {0};
    msc_optim_array source = {0};
    msc_status status = MSC_OK;
    msc_error err;

    if (!msc__py_bind(&convert_signature, args, nargs, kwnames, values) ||
        !msc__py_to_optim_array(values[0], "target", &target) ||
        !msc__py_to_optim_array(values[1], "source", &source))
        return NULL;
    if (target.count != source.count)
        return msc__py_refuse("target has %llu elements, it must have %llu", (unsigned long long)target.count,
                              (unsigned long long)source.count);
    Py_BEGIN_ALLOW_THREADS
    status = msc_optim_convert(optim_of(self), (void *)(uintptr_t)target.values, target.type, &source, &err);
    Py_END_ALLOW_THREADS
    return none_or_raise(status, &err);
}

/* ---- masters ------------------------------------------------------------------------------------ */

/** The arrays of a split or a join. */
typedef struct parts {
    msc_optim_weights form;
    uint64_t count;
    void *whole;
    void *weight;
    void *master;
} parts;

static bool read_parts(PyObject *form, PyObject *whole, PyObject *weight, PyObject *master, parts *out)
{
    uint64_t bytes = 0;
    uint64_t each;

    if (!msc__py_to_form(form, &out->form) || !msc__py_to_span(whole, "whole", &out->whole, &bytes))
        return false;
    if (bytes % 4 != 0) {
        msc__py_refuse("whole has %llu bytes, which are no whole number of fp32", (unsigned long long)bytes);
        return false;
    }
    out->count = bytes / 4;
    each = out->form == MSC_OPTIM_WEIGHTS_MASTER_REST8    ? 1
           : out->form == MSC_OPTIM_WEIGHTS_MASTER_REST16 ? 2
                                                          : 4;
    return msc__py_to_span_of(weight, "weight", 2 * out->count, &out->weight) &&
           msc__py_to_span_of(master, "master", each * out->count, &out->master);
}

MSC_PY_SIGNATURE(split, 4, 4, "form", "whole", "weight", "master");

MSC_PY_FASTCALL(optim_split)
{
    PyObject *values[4];
    parts p = {0};
    msc_status status = MSC_OK;
    msc_error err;

    if (!msc__py_bind(&split_signature, args, nargs, kwnames, values) ||
        !read_parts(values[0], values[1], values[2], values[3], &p))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = msc_optim_split(optim_of(self), p.form, p.whole, p.count, p.weight, p.master, &err);
    Py_END_ALLOW_THREADS
    return none_or_raise(status, &err);
}

MSC_PY_SIGNATURE(join, 4, 4, "form", "weight", "master", "whole");

MSC_PY_FASTCALL(optim_join)
{
    PyObject *values[4];
    parts p = {0};
    msc_status status = MSC_OK;
    msc_error err;

    if (!msc__py_bind(&join_signature, args, nargs, kwnames, values) ||
        !read_parts(values[0], values[3], values[1], values[2], &p))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = msc_optim_join(optim_of(self), p.form, p.weight, p.master, p.count, p.whole, &err);
    Py_END_ALLOW_THREADS
    return none_or_raise(status, &err);
}

/* ---- moments ------------------------------------------------------------------------------------ */

MSC_PY_SIGNATURE(moments_read, 4, 4, "rule", "tensor", "moment1", "moment2");
MSC_PY_SIGNATURE(moments_write, 4, 4, "rule", "tensor", "moment1", "moment2");

/** None: the rule has no such moment, or has to do without. */
static bool read_moment(PyObject *value, const char *what, uint64_t count, void **at)
{
    *at = NULL;
    return value == Py_None || msc__py_to_span_of(value, what, 4 * count, at);
}

static PyObject *move_moments(PyObject *self, const msc__py_signature *signature, PyObject *const *args,
                              Py_ssize_t nargs, PyObject *kwnames, bool writes)
{
    PyObject *values[4];
    msc_optim_rule rule;
    msc_optim_tensor tensor;
    void *moment1 = NULL;
    void *moment2 = NULL;
    msc_status status = MSC_OK;
    msc_error err;

    if (!msc__py_bind(signature, args, nargs, kwnames, values) ||
        !msc__py_to_rule_of_optim(values[0], &rule) ||
        !msc__py_to_optim_tensor(values[1], &rule, 0, true, &tensor) ||
        !read_moment(values[2], "moment1", tensor.count, &moment1) ||
        !read_moment(values[3], "moment2", tensor.count, &moment2))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = writes ? msc_optim_moments_write(optim_of(self), &rule, &tensor, moment1, moment2, &err)
                    : msc_optim_moments_read(optim_of(self), &rule, &tensor, moment1, moment2, &err);
    Py_END_ALLOW_THREADS
    return none_or_raise(status, &err);
}

MSC_PY_FASTCALL(optim_moments_read)
{
    return move_moments(self, &moments_read_signature, args, nargs, kwnames, false);
}

MSC_PY_FASTCALL(optim_moments_write)
{
    return move_moments(self, &moments_write_signature, args, nargs, kwnames, true);
}

/* ---- type --------------------------------------------------------------------------------------- */

static PyMethodDef optim_methods[] = {
    MSC_PY_METHOD("step", optim_step, 0, "step($self, /, rule, tensors)\n--\n\nOne step of all tensors."),
    MSC_PY_METHOD("sizes", optim_sizes, METH_STATIC,
                  "sizes(rule, count)\n--\n\nBytes of each array of a tensor of so many elements."),
    MSC_PY_METHOD("norm", optim_norm, 0,
                  "norm($self, /, arrays, scale=1.0)\n--\n\n"
                  "(sum of squares of the finite elements, how many are not finite)."),
    {"clip_factor", optim_clip_factor, METH_VARARGS | METH_STATIC,
     "clip_factor(sum_of_squares, max_norm, /)\n--\n\nWhat clip_grad_norm_ multiplies with."},
    MSC_PY_METHOD("accumulate", optim_accumulate, 0,
                  "accumulate($self, /, sums, gradient)\n--\n\nAdds a gradient to sums in FP32."),
    MSC_PY_METHOD("convert", optim_convert, 0,
                  "convert($self, /, target, source)\n--\n\nConverts an array to another type."),
    MSC_PY_METHOD("split", optim_split, 0,
                  "split($self, /, form, whole, weight, master)\n--\n\nFP32 masters into weights and rests."),
    MSC_PY_METHOD("join", optim_join, 0,
                  "join($self, /, form, weight, master, whole)\n--\n\nThe masters of weights and rests."),
    MSC_PY_METHOD("moments_read", optim_moments_read, 0,
                  "moments_read($self, /, rule, tensor, moment1, moment2)\n--\n\nMoments as FP32."),
    MSC_PY_METHOD("moments_write", optim_moments_write, 0,
                  "moments_write($self, /, rule, tensor, moment1, moment2)\n--\n\nMoments from FP32."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef optim_values[] = {
    {"threads", optim_threads, NULL, "Threads that work in a call.", NULL},
    {"isa", optim_isa, NULL, "Instruction set that was chosen.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot optim_slots[] = {
    {Py_tp_new, optim_new},
    {Py_tp_dealloc, optim_dealloc},
    {Py_tp_methods, optim_methods},
    {Py_tp_getset, optim_values},
    {Py_tp_doc,
     "Optim(threads=1, isa='any', *, card=None, stream=0)\n--\n\n"
     "Optimizer steps on arrays in this host's memory, and the threads that run them; or on a card."},
    {0, NULL},
};

static PyType_Spec optim_spec = {
    .name = "memscale._core.Optim",
    .basicsize = sizeof(optim_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = optim_slots,
};

PyTypeObject *msc__py_optim_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &optim_spec, NULL);
}
