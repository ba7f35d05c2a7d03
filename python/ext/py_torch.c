/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the hooks ask of PyTorch: finding it, and asking.
 *
 * Functions of PyTorch's library are called by the address of a tensor's implementation, which `_cdata` tells. What
 * they are called by is part of the C shim for compiled models, or the name of a C++ function whose arguments C can
 * write: the name tells the types of the arguments, so another version's function would have another name. That they
 * tell the truth is tried on one tensor all the same, before they are used. None of them raises for what has plain
 * memory. The shim is used where it has the function; for conjugates, views, versions and the like it has only calls
 * through the dispatcher, which modes see. `no_library` (MEMSCALE_TORCH_SYMBOLS=off) leaves all of them out: Python is
 * asked then, as on a PyTorch that does not have them.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_NOLOAD */
#endif
#include "py_torch.h"

#include <dlfcn.h>
#include <string.h>

/* ---- finding it --------------------------------------------------------------------------------- */

void msc__py_clear_error(void)
{
    bool interrupted = PyErr_Occurred() != NULL && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);

    PyErr_Clear();
    if (interrupted)
        PyErr_SetInterrupt();
}

const msc_dl_api *msc__py_find_table(PyTypeObject *tensor_type)
{
    PyObject *capsule = PyObject_GetAttrString((PyObject *)tensor_type, "__dlpack_c_exchange_api__");
    const msc_dl_api *api = NULL;

    if (capsule != NULL && PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule); /* the table is PyTorch's and lives as long as the process */
    msc__py_clear_error();
    return api != NULL && api->header.version.major == MSC_DL_MAJOR ? api : NULL;
}

static bool find_attribute(PyTypeObject *type, const char *name, msc__py_attribute *out)
{
    out->name = PyUnicode_InternFromString(name);
    out->descriptor = out->name != NULL ? PyObject_GetAttr((PyObject *)type, out->name) : NULL;
    if (out->descriptor == NULL)
        return false;
    out->get = (descrgetfunc)PyType_GetSlot(Py_TYPE(out->descriptor), Py_tp_descr_get);
    return true;
}

static bool find(PyObject *object, const char *name, PyObject **out)
{
    *out = object != NULL ? PyObject_GetAttrString(object, name) : NULL;
    return *out != NULL;
}

/* What takes the place of the table. */
static bool find_capsules(msc__py_torch *self, PyObject *c_module)
{
    PyObject *module = PyImport_ImportModule("torch");
    PyObject *bytes = NULL;
    PyObject *device = NULL;
    PyObject *cuda = NULL;
    bool found = find(c_module, "_to_dlpack", &self->to_capsule) &&
                 find(c_module, "_from_dlpack", &self->from_capsule) && find(module, "empty", &self->empty) &&
                 find(module, "uint8", &bytes) && find(module, "cuda", &cuda) &&
                 find(cuda, "current_stream", &self->current_stream);

    if (found) {
        device = self->device_type == MSC_DL_CUDA ? PyUnicode_FromFormat("cuda:%d", (int)self->device_ordinal)
                                                  : PyUnicode_FromString("cpu");
        if (device != NULL)
            self->empty_options = Py_BuildValue("{sOsO}", "dtype", bytes, "device", device);
    }
    Py_XDECREF(device);
    Py_XDECREF(cuda);
    Py_XDECREF(bytes);
    Py_XDECREF(module);
    return self->empty_options != NULL;
}

/* Takes a function's address out of the library; ISO C has no cast from an object to a function. */
static bool find_function(void *library, const char *name, void *out)
{
    void *address = dlsym(library, name);

    memcpy(out, &address, sizeof address);
    return address != NULL;
}

static bool find_functions(void *library, msc__py_library *out)
{
    const struct {
        const char *name;
        void *function;
    } all[] = {
        {"aoti_torch_get_storage_size", &out->storage_bytes},
        {"aoti_torch_get_storage_offset", &out->storage_offset},
        {"aoti_torch_get_dtype", &out->scalar_type},
        {"aoti_torch_get_data_ptr", &out->data},
        {"aoti_torch_empty_strided", &out->empty},
        {"aoti_torch__reinterpret_tensor", &out->part},
        {"aoti_torch_new_uninitialized_tensor", &out->new_cell},
        {"aoti_torch_delete_tensor_object", &out->delete_cell},
        {"_ZN2at6native7is_conjERKNS_6TensorE", &out->is_conjugate},
        {"_ZN2at6native6is_negERKNS_6TensorE", &out->is_negative},
        {"_ZN2at6native12is_inferenceERKNS_6TensorE", &out->is_inference},
        {"_ZN2at6native7is_leafERKNS_6TensorE", &out->is_leaf},
        {"_ZN2at6native8_versionERKNS_6TensorE", &out->version},
        {"_ZNK2at10TensorBase7is_viewEv", &out->is_view},
        {"_ZNK2at10TensorBase11tensor_dataEv", &out->tensor_data},
        {"_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", &out->mode_count},
        {"_Z16THPVariable_WrapRKN2at10TensorBaseE", &out->wrap},
    };

    for (size_t i = 0; i < MSC_PY_COUNT(all); i++)
        if (!find_function(library, all[i].name, all[i].function))
            return false;
    return true;
}

static bool find_library(PyObject *c_module, msc__py_library *out)
{
    PyObject *file = PyObject_GetAttrString(c_module, "__file__");
    const char *path = file != NULL ? PyUnicode_AsUTF8AndSize(file, NULL) : NULL;
    void *library = path != NULL ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    bool found = library != NULL && find_functions(library, out);

    if (library != NULL)
        (void)dlclose(library); /* it stays: Python holds it */
    Py_XDECREF(file);
    msc__py_clear_error();
    return found;
}

static bool handle_of(const msc__py_torch *torch, PyObject *tensor, msc__py_handle *out)
{
    PyObject *address;

    if (torch->handle_offset != 0 && Py_TYPE(tensor) == torch->tensor_type) {
        memcpy(out, (const char *)tensor + torch->handle_offset, sizeof *out);
        return *out != NULL;
    }
    address = msc__py_attribute_of(torch, &torch->address, tensor);
    *out = address != NULL ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    return *out != NULL;
}

/* Whether the library's functions tell the truth about the items 5 … 7 of 48, written to twice. */
static bool agrees_on(const msc__py_library *library, const msc__py_handle *part)
{
    int64_t bytes = 0;
    int64_t offset = 0;

    return library->storage_bytes(part, &bytes) == 0 && library->storage_offset(part, &offset) == 0 &&
           bytes == 48 && offset == 5 && !library->is_conjugate(part) && !library->is_negative(part) &&
           !library->is_inference(part) && library->is_leaf(part) && library->is_view(part) &&
           library->version(part) == 2;
}

/* Whether an alias that was made before is what it should be. */
static bool agrees_on_alias(const msc__py_torch *torch, const msc__py_alias *alias)
{
    PyObject *object = alias->cell != NULL ? msc__py_alias_object(torch, alias) : NULL;
    msc__py_handle handle;
    bool agree = object != NULL && Py_TYPE(object) == torch->tensor_type &&
                 msc__py_alias_version(torch, alias) == 2 && handle_of(torch, object, &handle) &&
                 handle == *alias->cell && torch->library.is_leaf(&handle);

    Py_XDECREF(object);
    return agree;
}

/* A tensor of 48 bytes; NULL with or without an exception. */
static PyObject *make_sample(const msc__py_torch *torch)
{
    static const int64_t extents[] = {48, 1};
    msc__py_shape shape = {.dtype = {.code = 1, .bits = 8, .lanes = 1}, .dim_count = 1, .extents = extents};
    msc_error err;
    msc__py_memory *memory = msc__py_memory_new(torch, 48, NULL, &err);
    PyObject *sample = NULL;

    if (memory != NULL) {
        sample = msc__py_memory_view(torch, memory, msc__py_memory_data(memory), &shape);
        msc__py_memory_release(memory);
    }
    return sample;
}

/* Whether a tensor is one of bytes with two sizes and strides, where it should lie. Takes it. */
static bool is_sheet(const msc__py_torch *torch, PyObject *tensor, const char *data, const int64_t *extents)
{
    msc__py_look look;
    bool is =
        tensor != NULL && Py_TYPE(tensor) == torch->tensor_type && msc__py_look_at(torch, tensor, &look);

    if (is) {
        is = (char *)look.tensor.data + look.tensor.byte_offset == data && look.tensor.dim_count == 2 &&
             look.tensor.dtype.code == 1 && look.tensor.dtype.bits == 8 && look.tensor.dtype.lanes == 1 &&
             memcmp(look.tensor.sizes, extents, 2 * sizeof *extents) == 0 &&
             memcmp(look.tensor.strides, extents + 2, 2 * sizeof *extents) == 0 &&
             torch->library.is_leaf(&look.handle) && !torch->library.is_view(&look.handle) &&
             torch->library.version(&look.handle) == 0;
        msc__py_look_end(&look);
    }
    Py_XDECREF(tensor);
    return is;
}

/* Whether tensors that the library makes are what was asked for: 3 x 5 bytes in columns, and a part of them. */
static bool agrees_on_memory(const msc__py_torch *torch, const msc__py_handle *bytes)
{
    static const int64_t whole[] = {3, 5, 1, 3};
    static const int64_t part[] = {2, 2, 1, 6};
    msc__py_shape shape = {.dtype = {.code = 1, .bits = 8, .lanes = 1}, .dim_count = 2, .extents = whole};
    msc__py_form form = {.shape = shape};
    msc__py_memory *memory;
    msc_error err;
    char *data;
    bool agree;

    if (torch->device_type != MSC_DL_CPU)
        return true; /* they are not used there */
    if (torch->library.scalar_type(bytes, &form.scalar_type) != 0)
        return false;
    memory = msc__py_memory_new(torch, 15, &form, &err);
    if (memory == NULL)
        return false;
    data = msc__py_memory_data(memory);
    shape.byte_offset = 4;
    shape.extents = part;
    agree = is_sheet(torch, msc__py_memory_view(torch, memory, data, &shape), data + 4, part) &&
            is_sheet(torch, msc__py_memory_become(torch, memory), data, whole);
    msc__py_memory_release(memory);
    return agree;
}

/* Tries what `has_library` promises. */
static bool agrees(const msc__py_torch *torch)
{
    PyObject *whole = make_sample(torch);
    PyObject *part = whole != NULL ? PyObject_CallMethod(whole, "narrow", "iii", 0, 5, 3) : NULL;
    msc__py_look look = {.handle = NULL};
    msc__py_alias alias = {NULL, NULL};
    bool agree = false;

    if (part != NULL && handle_of(torch, part, &look.handle) &&
        msc__py_alias_new(torch, part, &look, &alias)) {
        for (int i = 0; i < 2; i++)
            Py_XDECREF(PyObject_CallMethod(whole, "zero_", NULL));
        agree = PyErr_Occurred() == NULL && agrees_on(&torch->library, &look.handle) &&
                agrees_on_alias(torch, &alias) && agrees_on_memory(torch, &look.handle);
        msc__py_alias_clear(torch, &alias);
    }
    Py_XDECREF(part);
    Py_XDECREF(whole);
    msc__py_clear_error();
    return agree;
}

/* Where two tensors have what `_cdata` tells of them, if that is one place; 0: it is none, or more than one. */
static size_t find_place(const msc__py_torch *torch, PyObject *first, PyObject *second)
{
    PyObject *size = PyObject_GetAttrString((PyObject *)torch->tensor_type, "__basicsize__");
    size_t end = size != NULL ? PyLong_AsSize_t(size) : 0;
    msc__py_handle handles[2];
    size_t place = 0;
    bool known = end <= 4096 && handle_of(torch, first, &handles[0]) && handle_of(torch, second, &handles[1]);

    for (size_t at = sizeof(PyObject); known && at + sizeof handles[0] <= end; at += sizeof handles[0]) {
        if (memcmp((char *)first + at, &handles[0], sizeof handles[0]) != 0 ||
            memcmp((char *)second + at, &handles[1], sizeof handles[1]) != 0)
            continue;
        known = place == 0;
        place = at;
    }
    Py_XDECREF(size);
    return known ? place : 0;
}

static size_t find_handle_offset(const msc__py_torch *torch)
{
    PyObject *first = make_sample(torch);
    PyObject *second = make_sample(torch);
    size_t place = first != NULL && second != NULL ? find_place(torch, first, second) : 0;

    Py_XDECREF(first);
    Py_XDECREF(second);
    msc__py_clear_error();
    return place;
}

bool msc__py_torch_init(msc__py_torch *self, PyTypeObject *tensor_type, PyTypeObject *parameter_type,
                        bool table, bool library)
{
    PyObject *type = (PyObject *)tensor_type;
    PyObject *c_module = PyImport_ImportModule("torch._C");
    bool found;

    self->tensor_type = (PyTypeObject *)Py_NewRef(type);
    self->parameter_type = (PyTypeObject *)Py_NewRef((PyObject *)parameter_type);
    self->table = table ? msc__py_find_table(tensor_type) : NULL;
    found = c_module != NULL && find_attribute(tensor_type, "_base", &self->base) &&
            find_attribute(tensor_type, "_version", &self->version) &&
            find_attribute(tensor_type, "grad_fn", &self->grad_fn) &&
            find_attribute(tensor_type, "_cdata", &self->address) && find(type, "detach", &self->detach) &&
            find(type, "untyped_storage", &self->untyped_storage) &&
            find(type, "is_conj", &self->is_conjugate) && find(type, "is_neg", &self->is_negative) &&
            find(type, "stride", &self->strides) && (self->table != NULL || find_capsules(self, c_module));
    if (found && library && self->table != NULL) { /* before 2.10 nobody has tried it */
        self->has_library = find_library(c_module, &self->library);
        self->has_library = self->has_library && agrees(self); /* which asks as if it were so */
        self->handle_offset = self->has_library ? find_handle_offset(self) : 0;
    }
    Py_XDECREF(c_module);
    return found;
}

void msc__py_torch_clear(msc__py_torch *self)
{
    PyObject **all[] = {
        &self->base.name,     &self->base.descriptor,    &self->version.name, &self->version.descriptor,
        &self->grad_fn.name,  &self->grad_fn.descriptor, &self->address.name, &self->address.descriptor,
        &self->detach,        &self->untyped_storage,    &self->is_conjugate, &self->is_negative,
        &self->strides,       &self->to_capsule,         &self->from_capsule, &self->empty,
        &self->empty_options, &self->current_stream};

    for (size_t i = 0; i < MSC_PY_COUNT(all); i++)
        Py_CLEAR(*all[i]);
    Py_XDECREF((PyObject *)self->tensor_type);
    Py_XDECREF((PyObject *)self->parameter_type);
    self->tensor_type = self->parameter_type = NULL;
}

/* ---- asking ------------------------------------------------------------------------------------- */

PyObject *msc__py_attribute_of(const msc__py_torch *torch, const msc__py_attribute *attribute,
                               PyObject *tensor)
{
    if (attribute->get == NULL || Py_TYPE(tensor) != torch->tensor_type)
        return PyObject_GetAttr(tensor, attribute->name); /* a subclass may have its own */
    return attribute->get(attribute->descriptor, tensor, (PyObject *)torch->tensor_type);
}

bool msc__py_is_parameter(const msc__py_torch *torch, PyObject *tensor)
{
    int is = Py_TYPE(tensor) == torch->tensor_type
                 ? 0
                 : PyObject_IsInstance(tensor, (PyObject *)torch->parameter_type);

    if (is < 0)
        msc__py_clear_error();
    return is != 0; /* what cannot be asked is treated as one */
}

bool msc__py_current_stream(const msc__py_torch *torch, void **out)
{
    PyObject *stream;
    PyObject *address;

    *out = NULL;
    if (torch->device_type == MSC_DL_CPU)
        return true;
    if (torch->table != NULL)
        return torch->table->current_stream(torch->device_type, torch->device_ordinal, out) == 0;
    stream = PyObject_CallFunction(torch->current_stream, "i", (int)torch->device_ordinal);
    address = stream != NULL ? PyObject_GetAttrString(stream, "cuda_stream") : NULL;
    if (address != NULL)
        *out = PyLong_AsVoidPtr(address);
    Py_XDECREF(address);
    Py_XDECREF(stream);
    return PyErr_Occurred() == NULL;
}

/* ---- reading ------------------------------------------------------------------------------------ */

/* The strides that the tensor has: those of capsules are 1 where the size is 1. */
static bool read_strides(const msc__py_torch *torch, PyObject *tensor, int64_t *out, int32_t count)
{
    PyObject *strides = PyObject_CallFunctionObjArgs(torch->strides, tensor, NULL);
    bool read = strides != NULL && PyTuple_Size(strides) == count;

    for (int32_t i = 0; read && i < count; i++)
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
    Py_XDECREF(strides);
    return read && PyErr_Occurred() == NULL;
}

static bool look_through_capsule(const msc__py_torch *torch, PyObject *tensor, msc__py_look *out)
{
    msc_dl_legacy *managed = msc__py_take_capsule(torch, tensor);
    size_t count = managed != NULL ? (size_t)managed->tensor.dim_count : 0;
    int64_t *room = managed != NULL ? PyMem_Malloc((2 * count + 1) * sizeof *room) : NULL;
    bool read = false;

    if (room != NULL) {
        out->tensor = managed->tensor;
        memcpy(room, managed->tensor.sizes, count * sizeof *room);
        read = read_strides(torch, tensor, room + count, managed->tensor.dim_count);
        out->tensor.sizes = room;
        out->tensor.strides = room + count;
        out->room = room;
    }
    if (managed != NULL)
        managed->deleter(managed);
    if (!read)
        msc__py_look_end(out);
    return read;
}

bool msc__py_look_at(const msc__py_torch *torch, PyObject *tensor, msc__py_look *out)
{
    bool read;

    out->room = NULL;
    out->handle = NULL;
    read = torch->table != NULL ? torch->table->read(tensor, &out->tensor) == 0
                                : look_through_capsule(torch, tensor, out);
    if (!read || (torch->has_library && !handle_of(torch, tensor, &out->handle)))
        msc__py_clear_error();
    return read;
}

void msc__py_look_end(msc__py_look *look)
{
    PyMem_Free(look->room);
    look->room = NULL;
}

long long msc__py_version_of(const msc__py_torch *torch, PyObject *tensor, const msc__py_look *look)
{
    PyObject *version;
    long long value;

    if (look != NULL && look->handle != NULL)
        return torch->library.is_inference(&look->handle) ? -1 : torch->library.version(&look->handle);
    version = msc__py_attribute_of(torch, &torch->version, tensor);
    value = version != NULL ? PyLong_AsLongLong(version) : -1;
    if (value < 0)
        msc__py_clear_error();
    Py_XDECREF(version);
    return value;
}

PyObject *msc__py_base_of(const msc__py_torch *torch, PyObject *tensor, const msc__py_look *look)
{
    PyObject *base;

    if (look != NULL && look->handle != NULL && !torch->library.is_view(&look->handle))
        return NULL;
    base = msc__py_attribute_of(torch, &torch->base, tensor);
    if (base == NULL)
        msc__py_clear_error();
    if (base != Py_None)
        return base;
    Py_DECREF(base);
    return NULL;
}

bool msc__py_has_no_graph(const msc__py_torch *torch, PyObject *tensor, const msc__py_look *look)
{
    PyObject *node;

    if (look != NULL && look->handle != NULL)
        return torch->library.is_leaf(&look->handle);
    node = msc__py_attribute_of(torch, &torch->grad_fn, tensor);
    if (node == NULL)
        msc__py_clear_error();
    Py_XDECREF(node);
    return node == Py_None;
}

/* A number that a storage tells. False with an exception. */
static bool ask(PyObject *storage, const char *method, uint64_t *out)
{
    PyObject *value = PyObject_CallMethod(storage, method, NULL);

    *out = value != NULL ? PyLong_AsUnsignedLongLong(value) : 0;
    Py_XDECREF(value);
    return PyErr_Occurred() == NULL;
}

static bool is_true(PyObject *method, PyObject *tensor)
{
    PyObject *value = PyObject_CallFunctionObjArgs(method, tensor, NULL);

    Py_XDECREF(value);
    return value != Py_False; /* what cannot be asked is not taken for verbatim */
}

static bool ask_span(const msc__py_torch *torch, PyObject *tensor, msc__py_span *out)
{
    PyObject *storage = PyObject_CallFunctionObjArgs(torch->untyped_storage, tensor, NULL);
    uint64_t address = 0;
    bool known = storage != NULL && ask(storage, "nbytes", &out->bytes) && ask(storage, "data_ptr", &address);

    Py_XDECREF(storage);
    out->verbatim = !is_true(torch->is_conjugate, tensor) && !is_true(torch->is_negative, tensor);
    msc__py_clear_error();
    out->base = (char *)(uintptr_t)address; // NOLINT(performance-no-int-to-ptr): that is how Python shows it
    return known;
}

bool msc__py_span_of(const msc__py_torch *torch, PyObject *tensor, const msc__py_look *look,
                     msc__py_span *out)
{
    const msc__py_library *library = &torch->library;
    const msc__py_handle *handle = &look->handle;
    int64_t bytes;
    int64_t offset;

    if (*handle == NULL)
        return ask_span(torch, tensor, out);
    if (library->storage_bytes(handle, &bytes) != 0 || library->storage_offset(handle, &offset) != 0)
        return false;
    out->base = (char *)look->tensor.data - offset * (int64_t)msc_dl_item_bytes(look->tensor.dtype);
    out->bytes = (uint64_t)bytes;
    out->verbatim = !library->is_conjugate(handle) && !library->is_negative(handle);
    return true;
}

/* ---- aliases ------------------------------------------------------------------------------------ */

/* What PyTorch itself holds of a result that it saves. A dispatch mode wants to see it done, and may refuse. */
static void **make_cell(const msc__py_library *library, const msc__py_look *look)
{
    void **cell = NULL;

    if (library->mode_count() == 0 && library->new_cell(&cell) == 0)
        *cell = library->tensor_data(&look->handle).words[0];
    return cell;
}

bool msc__py_alias_new(const msc__py_torch *torch, PyObject *tensor, const msc__py_look *look,
                       msc__py_alias *out)
{
    out->object = NULL;
    out->cell = look != NULL && look->handle != NULL ? make_cell(&torch->library, look) : NULL;
    if (out->cell == NULL)
        out->object = PyObject_CallFunctionObjArgs(torch->detach, tensor, NULL);
    return msc__py_alias_is(out);
}

void msc__py_alias_clear(const msc__py_torch *torch, msc__py_alias *alias)
{
    msc__py_alias old = *alias;

    alias->object = NULL;
    alias->cell = NULL;
    Py_XDECREF(old.object);
    if (old.cell != NULL)
        (void)torch->library.delete_cell(old.cell);
}

long long msc__py_alias_version(const msc__py_torch *torch, const msc__py_alias *alias)
{
    if (alias->cell == NULL)
        return msc__py_version_of(torch, alias->object, NULL);
    return torch->library.is_inference(alias->cell) ? -1 : torch->library.version(alias->cell);
}

PyObject *msc__py_alias_object(const msc__py_torch *torch, const msc__py_alias *alias)
{
    return alias->cell == NULL ? Py_NewRef(alias->object) : torch->library.wrap(alias->cell);
}
