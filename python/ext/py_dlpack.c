/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory on the device, and tensors on it.
 *
 * The memory is PyTorch's own (its allocator makes it, and counts it), as a managed DLPack tensor of bytes. Tensors
 * on it are made over DLPack too: each owns a reference to the memory, whose count is atomic because autograd lets
 * go of tensors on its own threads, without the GIL.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "py_torch.h"

#define CAPSULE "dltensor"
#define USED_CAPSULE "used_dltensor"

/* ---- capsules ----------------------------------------------------------------------------------- */

msc_dl_legacy *msc__py_take_capsule(const msc__py_torch *torch, PyObject *tensor)
{
    PyObject *capsule = PyObject_CallFunctionObjArgs(torch->to_capsule, tensor, NULL);
    msc_dl_legacy *managed = capsule != NULL ? PyCapsule_GetPointer(capsule, CAPSULE) : NULL;

    if (managed != NULL && PyCapsule_SetName(capsule, USED_CAPSULE) != 0)
        managed = NULL; /* the capsule ends it */
    Py_XDECREF(capsule);
    return managed;
}

/* ---- memory ------------------------------------------------------------------------------------- */

struct msc__py_memory {
    atomic_uint references; /* released with acq_rel, so the last one sees what the others did */
    char *data;
    msc_dl_managed *managed; /* one of the three, by the route */
    msc_dl_legacy *legacy;
    msc__py_handle *cell; /* a tensor of PyTorch's library, of the dtype below */
    int32_t (*delete_cell)(msc__py_handle *cell);
    msc_dl_dtype dtype;
};

static void end_managed(msc_dl_managed *managed, msc_dl_legacy *legacy)
{
    if (managed != NULL && managed->deleter != NULL)
        managed->deleter(managed);
    if (legacy != NULL && legacy->deleter != NULL)
        legacy->deleter(legacy);
}

static char *data_of(const msc_dl_tensor *tensor)
{
    return (char *)tensor->data + tensor->byte_offset;
}

/* Takes one of the two; NULL without memory, and that is gone then too. */
static msc__py_memory *make_memory(msc_dl_managed *managed, msc_dl_legacy *legacy)
{
    msc__py_memory *memory = malloc(sizeof *memory);

    if (memory == NULL) {
        end_managed(managed, legacy);
        return NULL;
    }
    atomic_init(&memory->references, 1);
    memory->data = managed != NULL ? data_of(&managed->tensor) : NULL;
    if (legacy != NULL)
        memory->data = data_of(&legacy->tensor);
    memory->managed = managed;
    memory->legacy = legacy;
    memory->cell = NULL;
    return memory;
}

/* Takes a tensor of the library; NULL without memory, and that is gone then too. */
static msc__py_memory *make_memory_of_cell(const msc__py_torch *torch, msc__py_handle *cell,
                                           msc_dl_dtype dtype)
{
    msc__py_memory *memory = malloc(sizeof *memory);
    void *data = NULL;

    if (memory == NULL || torch->library.data(cell, &data) != 0) {
        free(memory);
        (void)torch->library.delete_cell(cell);
        return NULL;
    }
    *memory = (msc__py_memory){
        .data = data, .cell = cell, .delete_cell = torch->library.delete_cell, .dtype = dtype};
    atomic_init(&memory->references, 1);
    return memory;
}

char *msc__py_memory_data(const msc__py_memory *memory)
{
    return memory->data;
}

void msc__py_memory_hold(msc__py_memory *memory)
{
    (void)atomic_fetch_add_explicit(&memory->references, 1, memory_order_relaxed);
}

void msc__py_memory_release(msc__py_memory *memory)
{
    if (atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) != 1)
        return;
    end_managed(memory->managed, memory->legacy);
    if (memory->cell != NULL)
        (void)memory->delete_cell(memory->cell);
    free(memory);
}

/* PyTorch raises one kind of exception here whatever the reason, so its words decide. */
static void note_reason(msc_error *err)
{
    static const char *const shortages[] = {"out of memory", "not enough memory", "can't allocate memory",
                                            "bad_alloc", "bad allocation"};

    err->status = err->message[0] == '\0' ? MSC_EDEVMEM : MSC_EDRIVER;
    for (size_t i = 0; i < MSC_PY_COUNT(shortages); i++)
        if (strstr(err->message, shortages[i]) != NULL)
            err->status = MSC_EDEVMEM;
}

static void note_error(void *context, const char *kind, const char *message)
{
    msc_error *err = context;

    (void)snprintf(err->message, sizeof err->message, "%s: %s", kind, message);
    note_reason(err);
}

/* Why PyTorch has no memory, out of the exception that it raised. */
static void note_exception(msc_error *err)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
    PyObject *text;
    const char *words;
    bool interrupted;

    PyErr_Fetch(&type, &value, &traceback);
    interrupted = type != NULL && PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt) != 0;
    text = value != NULL ? PyObject_Str(value) : NULL;
    words = text != NULL ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    if (words != NULL)
        (void)snprintf(err->message, sizeof err->message, "%s", words);
    note_reason(err);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    PyErr_Clear();
    if (interrupted)
        PyErr_SetInterrupt();
}

static msc_dl_legacy *allocate_capsule(const msc__py_torch *torch, uint64_t bytes, msc_error *err)
{
    PyObject *arguments = Py_BuildValue("(K)", (unsigned long long)bytes);
    PyObject *tensor =
        arguments != NULL ? PyObject_Call(torch->empty, arguments, torch->empty_options) : NULL;
    msc_dl_legacy *legacy = tensor != NULL ? msc__py_take_capsule(torch, tensor) : NULL;

    Py_XDECREF(tensor);
    Py_XDECREF(arguments);
    if (legacy == NULL)
        note_exception(err);
    return legacy;
}

static msc_dl_managed *allocate_managed(const msc__py_torch *torch, uint64_t bytes, msc_error *err)
{
    int64_t size = (int64_t)bytes;
    int64_t stride = 1;
    msc_dl_tensor prototype = {.device = {torch->device_type, torch->device_ordinal},
                               .dim_count = 1,
                               .dtype = {.code = 1, .bits = 8, .lanes = 1},
                               .sizes = &size,
                               .strides = &stride};
    msc_dl_managed *managed = NULL;

    if (torch->table->allocate(&prototype, &managed, err, note_error) == 0)
        return managed;
    msc__py_clear_error();
    return NULL;
}

/* Items from the first to the last one, in memory; 0: there are none. */
static uint64_t reach(const msc_dl_tensor *tensor)
{
    uint64_t items = 1;

    for (int32_t i = 0; i < tensor->dim_count; i++) {
        if (tensor->sizes[i] == 0)
            return 0;
        items += (uint64_t)(tensor->sizes[i] - 1) * (uint64_t)tensor->strides[i];
    }
    return items;
}

bool msc__py_fills(const msc__py_torch *torch, const msc__py_look *look, uint64_t bytes, int32_t *scalar_type)
{
    const msc_dl_tensor *tensor = &look->tensor;
    int64_t offset;

    return look->handle != NULL && torch->device_type == MSC_DL_CPU && tensor->strides != NULL &&
           reach(tensor) * msc_dl_item_bytes(tensor->dtype) == bytes &&
           torch->library.storage_offset(&look->handle, &offset) == 0 && offset == 0 &&
           torch->library.scalar_type(&look->handle, scalar_type) == 0;
}

/*
 * Memory as a tensor that fills it, without the dispatcher and without what DLPack has around a tensor. NULL: it is asked
 * for in the other way, which tells reasons, and which a dispatch mode sees.
 */
static msc__py_memory *allocate_cell(const msc__py_torch *torch, const msc__py_form *form)
{
    const msc__py_library *library = &torch->library;
    const int64_t *sizes = form->shape.extents;
    int32_t count = form->shape.dim_count;
    msc__py_handle *cell = NULL;

    if (library->mode_count() != 0 ||
        library->empty(count, sizes, sizes + count, form->scalar_type, 0, 0, &cell) != 0)
        return NULL;
    return make_memory_of_cell(torch, cell, form->shape.dtype);
}

msc__py_memory *msc__py_memory_new(const msc__py_torch *torch, uint64_t bytes, const msc__py_form *form,
                                   msc_error *err)
{
    msc_dl_managed *managed = NULL;
    msc_dl_legacy *legacy = NULL;
    msc__py_memory *memory = form != NULL ? allocate_cell(torch, form) : NULL;

    if (memory != NULL)
        return memory;
    err->status = MSC_EDEVMEM;
    err->driver_code = 0;
    err->message[0] = '\0';
    if (torch->table != NULL)
        managed = allocate_managed(torch, bytes, err);
    else
        legacy = allocate_capsule(torch, bytes, err);
    return managed != NULL || legacy != NULL ? make_memory(managed, legacy) : NULL;
}

msc__py_memory *msc__py_memory_of(const msc__py_torch *torch, PyObject *tensor)
{
    msc_dl_managed *managed = NULL;
    msc_dl_legacy *legacy = NULL;
    msc__py_memory *memory;

    if (torch->table != NULL ? torch->table->from_object(tensor, &managed) != 0
                             : (legacy = msc__py_take_capsule(torch, tensor)) == NULL)
        return NULL;
    memory = make_memory(managed, legacy);
    if (memory == NULL)
        (void)PyErr_NoMemory();
    return memory;
}

/* ---- tensors on memory -------------------------------------------------------------------------- */

typedef struct view {
    union {
        msc_dl_managed managed;
        msc_dl_legacy legacy;
    } as;
    msc__py_memory *memory;
    int64_t extents[];
} view;

static void end_view(view *self)
{
    msc__py_memory_release(self->memory);
    free(self);
}

/* Called by PyTorch when the tensor ends, on any thread. */
static void view_delete(msc_dl_managed *managed)
{
    end_view(managed->owner);
}

static void view_delete_legacy(msc_dl_legacy *legacy)
{
    end_view(legacy->owner);
}

static void end_unused_capsule(PyObject *capsule)
{
    msc_dl_legacy *legacy;

    if (!PyCapsule_IsValid(capsule, CAPSULE))
        return; /* PyTorch took it over */
    legacy = PyCapsule_GetPointer(capsule, CAPSULE);
    legacy->deleter(legacy);
}

static PyObject *give_view(const msc__py_torch *torch, view *self, const msc_dl_tensor *tensor)
{
    PyObject *capsule;
    void *object = NULL;

    if (torch->table != NULL) {
        self->as.managed.version = torch->table->header.version;
        self->as.managed.owner = self;
        self->as.managed.deleter = view_delete;
        self->as.managed.tensor = *tensor;
        return torch->table->to_object(&self->as.managed, &object) == 0 ? object : NULL;
    }
    self->as.legacy.owner = self;
    self->as.legacy.deleter = view_delete_legacy;
    self->as.legacy.tensor = *tensor;
    capsule = PyCapsule_New(&self->as.legacy, CAPSULE, end_unused_capsule);
    if (capsule == NULL) {
        end_view(self);
        return NULL;
    }
    object = PyObject_CallFunctionObjArgs(torch->from_capsule, capsule, NULL);
    Py_DECREF(capsule);
    return object;
}

PyObject *msc__py_memory_become(const msc__py_torch *torch, msc__py_memory *memory)
{
    PyObject *tensor;

    if (memory->cell == NULL || torch->library.mode_count() != 0 ||
        atomic_load_explicit(&memory->references, memory_order_acquire) != 1)
        return NULL;
    tensor = torch->library.wrap(memory->cell);
    if (tensor == NULL) {
        msc__py_clear_error();
        return NULL;
    }
    (void)memory->delete_cell(memory->cell);
    memory->cell = NULL;
    return tensor;
}

/* A tensor on a part of one of the library's. NULL, without an exception: it is to be made in the other way. */
static PyObject *view_of_cell(const msc__py_torch *torch, const msc__py_memory *memory, const char *base,
                              const msc__py_shape *shape)
{
    const msc__py_library *library = &torch->library;
    const int64_t *sizes = shape->extents;
    uint64_t item = msc_dl_item_bytes(shape->dtype);
    msc__py_handle *part = NULL;
    PyObject *tensor;

    if (memory->cell == NULL || base != memory->data ||
        memcmp(&shape->dtype, &memory->dtype, sizeof(msc_dl_dtype)) != 0 || shape->byte_offset % item != 0 ||
        library->mode_count() != 0 ||
        library->part(memory->cell, shape->dim_count, sizes, sizes + shape->dim_count,
                      (int64_t)(shape->byte_offset / item), &part) != 0)
        return NULL;
    tensor = library->wrap(part);
    (void)library->delete_cell(part);
    if (tensor == NULL)
        msc__py_clear_error();
    return tensor;
}

static PyObject *view_over_dlpack(const msc__py_torch *torch, msc__py_memory *memory, char *base,
                                  const msc__py_shape *shape)
{
    size_t extents_bytes = 2 * (size_t)shape->dim_count * sizeof(int64_t);
    view *self = calloc(1, sizeof *self + extents_bytes);
    msc_dl_tensor tensor = {.data = base + shape->byte_offset,
                            .device = {torch->device_type, torch->device_ordinal},
                            .dim_count = shape->dim_count,
                            .dtype = shape->dtype};

    if (self == NULL)
        return PyErr_NoMemory();
    memcpy(self->extents, shape->extents, extents_bytes);
    msc__py_memory_hold(memory);
    self->memory = memory;
    tensor.sizes = self->extents;
    tensor.strides = self->extents + shape->dim_count;
    return give_view(torch, self, &tensor);
}

PyObject *msc__py_memory_view(const msc__py_torch *torch, msc__py_memory *memory, char *base,
                              const msc__py_shape *shape)
{
    PyObject *tensor = view_of_cell(torch, memory, base, shape);

    return tensor != NULL ? tensor : view_over_dlpack(torch, memory, base, shape);
}
