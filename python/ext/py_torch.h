/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file py_torch.h
 * PyTorch's tensors from C, without PyTorch's headers: how they are read and made.
 *
 * There are two routes, found by what this PyTorch has:
 *
 *   table      `torch.Tensor.__dlpack_c_exchange_api__` is a capsule with a table of functions (PyTorch 2.10 and
 *              later).
 *   capsules   the functions of `torch.utils.dlpack`, which every PyTorch has: a Python object each time.
 *
 * What DLPack does not tell is asked of attributes, at 40 ns each and more. Where functions of PyTorch's library can
 * be called by name instead, they are: a tensor is asked six things whenever autograd saves it.
 */
#ifndef MSC_EXT_PY_TORCH_H
#define MSC_EXT_PY_TORCH_H

#include "pydoor.h"

#include "dlpack_types.h"
#include "memscale/status.h"

/* ---- what is asked of PyTorch ------------------------------------------------------------------- */

/** An attribute of torch.Tensor that C code computes: asking its descriptor spares the look-up. */
typedef struct msc__py_attribute {
    PyObject *name;
    PyObject *descriptor;
    descrgetfunc get;
} msc__py_attribute;

/** `at::Tensor` is one word, the address of its implementation; the library takes a tensor as a pointer to it. */
typedef void *msc__py_handle;

/** A C++ object that a function returns where its caller says, as C does it for what is as large as this. */
typedef struct msc__py_returned {
    void *words[4]; /* an at::Tensor writes the first one */
} msc__py_returned;

/** Functions of PyTorch's library that raise nothing. All of them are there, or none is used. */
typedef struct msc__py_library {
    /* torch/csrc/inductor/aoti_torch/c/shim.h */
    int32_t (*storage_bytes)(const msc__py_handle *tensor, int64_t *out);
    int32_t (*storage_offset)(const msc__py_handle *tensor, int64_t *out);
    /* at::native */
    bool (*is_conjugate)(const msc__py_handle *tensor);
    bool (*is_negative)(const msc__py_handle *tensor);
    bool (*is_inference)(const msc__py_handle *tensor);
    bool (*is_leaf)(const msc__py_handle *tensor);
    int64_t (*version)(const msc__py_handle *tensor); /* not of one of inference mode */
    /* at::TensorBase */
    bool (*is_view)(const msc__py_handle *tensor);
    msc__py_returned (*tensor_data)(const msc__py_handle *tensor);
    /* likewise of the shim: the number of a dtype; the first item; a tensor on memory of its own, and one on a part of
       another's, each on the heap */
    int32_t (*scalar_type)(const msc__py_handle *tensor, int32_t *out);
    int32_t (*data)(const msc__py_handle *tensor, void **out);
    int32_t (*empty)(int64_t dim_count, const int64_t *sizes, const int64_t *strides, int32_t scalar_type,
                     int32_t device_type, int32_t ordinal, msc__py_handle **out);
    int32_t (*part)(const msc__py_handle *whole, int64_t dim_count, const int64_t *sizes,
                    const int64_t *strides, int64_t offset, msc__py_handle **out);
    /* a tensor on the heap, undefined at first, and its end */
    int32_t (*new_cell)(msc__py_handle **out);
    int32_t (*delete_cell)(msc__py_handle *cell);
    PyObject *(*wrap)(const msc__py_handle *tensor); /* THPVariable_Wrap */
    int64_t (*mode_count)(void);                     /* c10::impl::TorchDispatchModeTLS::stack_len */
} msc__py_library;

/** The types and functions of the PyTorch at hand. Everything needs the GIL, if it does not say otherwise. */
typedef struct msc__py_torch {
    PyTypeObject *tensor_type;
    PyTypeObject *parameter_type;
    int32_t device_type; /* as DLPack has it: of the tensors that are made */
    int32_t device_ordinal;
    const msc_dl_api *table; /* NULL: capsules */
    bool has_library;
    msc__py_library library;
    size_t
        handle_offset; /* of the implementation's address in a tensor's Python object; 0: `_cdata` is asked */
    msc__py_attribute base, version, grad_fn, address;
    PyObject *detach, *untyped_storage, *is_conjugate, *is_negative, *strides; /* methods of torch.Tensor */
    PyObject *to_capsule, *from_capsule, *empty, *empty_options, *current_stream;
} msc__py_torch;

/**
 * @param self     all zero but for the device.
 * @param table   whether the table may be used.
 * @param library whether PyTorch's library may be asked.
 * False with an exception: something is missing. `msc__py_torch_clear` ends it in either case.
 */
bool msc__py_torch_init(msc__py_torch *self, PyTypeObject *tensor_type, PyTypeObject *parameter_type,
                        bool table, bool library);
void msc__py_torch_clear(msc__py_torch *self);

/** The table that a type of tensors has, or NULL. Leaves no exception. */
const msc_dl_api *msc__py_find_table(PyTypeObject *tensor_type);

/* Drops the error that is set, if any. Python that has run may have been interrupted: then the program hears of
   it a little later. */
void msc__py_clear_error(void);

/** An attribute, a new reference; NULL with an exception. */
PyObject *msc__py_attribute_of(const msc__py_torch *torch, const msc__py_attribute *attribute,
                               PyObject *tensor);

/** Whether a tensor is, or may be, a parameter. Leaves no exception. */
bool msc__py_is_parameter(const msc__py_torch *torch, PyObject *tensor);

/** The stream that the program works on now. False with an exception. */
bool msc__py_current_stream(const msc__py_torch *torch, void **out);

/* ---- reading ------------------------------------------------------------------------------------ */

/** A tensor as it lies in memory; borrowed from the tensor. Ends with `msc__py_look_end`. */
typedef struct msc__py_look {
    msc_dl_tensor tensor;
    int64_t *room;         /* of sizes and strides, where they are not the tensor's own */
    msc__py_handle handle; /* NULL: PyTorch's library is not asked */
} msc__py_look;

/** False, and no exception, for what has no plain memory: sparse and meta tensors and the like. */
bool msc__py_look_at(const msc__py_torch *torch, PyObject *tensor, msc__py_look *out);
void msc__py_look_end(msc__py_look *look);

/* In what follows `look` is that of the tensor, or NULL where there is none. Nothing leaves an exception. */

/** Version of a tensor's memory; -1: it has none, as in inference mode. */
long long msc__py_version_of(const msc__py_torch *torch, PyObject *tensor, const msc__py_look *look);

/** What a tensor is a view of, a new reference; NULL where it is none. */
PyObject *msc__py_base_of(const msc__py_torch *torch, PyObject *tensor, const msc__py_look *look);

/** Whether a tensor refers to no node; no, where that cannot be asked. */
bool msc__py_has_no_graph(const msc__py_torch *torch, PyObject *tensor, const msc__py_look *look);

/** A storage: where it begins and its size. */
typedef struct msc__py_span {
    char *base;
    uint64_t bytes;
    bool verbatim; /* the bytes are the tensor's values, not their conjugates or negatives */
} msc__py_span;

/** The storage that a tensor lies on. False where there is none. */
bool msc__py_span_of(const msc__py_torch *torch, PyObject *tensor, const msc__py_look *look,
                     msc__py_span *out);

/* ---- aliases ------------------------------------------------------------------------------------ */

/** A tensor on the same memory as another with the same version counter, and without a graph; or a tensor itself. */
typedef struct msc__py_alias {
    PyObject *object;     /* one of the two, or none */
    msc__py_handle *cell; /* on the heap, of PyTorch's library */
} msc__py_alias;

static inline bool msc__py_alias_is(const msc__py_alias *alias)
{
    return alias->object != NULL || alias->cell != NULL;
}

/** False with an exception. `look` as above. */
bool msc__py_alias_new(const msc__py_torch *torch, PyObject *tensor, const msc__py_look *look,
                       msc__py_alias *out);

/** Leaves it empty. May run other code. */
void msc__py_alias_clear(const msc__py_torch *torch, msc__py_alias *alias);

/** As `msc__py_version_of`. */
long long msc__py_alias_version(const msc__py_torch *torch, const msc__py_alias *alias);

/** The tensor, a new reference; NULL with an exception. */
PyObject *msc__py_alias_object(const msc__py_torch *torch, const msc__py_alias *alias);

/* ---- making ------------------------------------------------------------------------------------- */

/** Memory on the device that several tensors lie on; ends with the last of them, on any thread. */
typedef struct msc__py_memory msc__py_memory;

/** What a tensor's capsule holds, which is the caller's to end. NULL with an exception. */
msc_dl_legacy *msc__py_take_capsule(const msc__py_torch *torch, PyObject *tensor);

/** What a tensor on a storage looks like. Sizes first, then strides, `dim_count` of each. */
typedef struct msc__py_shape {
    uint64_t byte_offset;
    msc_dl_dtype dtype;
    int32_t dim_count;
    const int64_t *extents;
} msc__py_shape;

/** A tensor that fills its storage: memory can be had as one, in the fewest steps. */
typedef struct msc__py_form {
    msc__py_shape shape;
    int32_t scalar_type; /* PyTorch's number of its dtype */
} msc__py_form;

/** Whether a tensor fills its storage of `bytes`, and memory can be had as one like it. */
bool msc__py_fills(const msc__py_torch *torch, const msc__py_look *look, uint64_t bytes,
                   int32_t *scalar_type);

/**
 * Bytes from PyTorch's allocator. NULL with the reason in `err`, and no exception.
 * @param form what `msc__py_fills` said yes to; NULL: none.
 */
msc__py_memory *msc__py_memory_new(const msc__py_torch *torch, uint64_t bytes, const msc__py_form *form,
                                   msc_error *err);

/** A tensor's own memory. NULL with an exception. */
msc__py_memory *msc__py_memory_of(const msc__py_torch *torch, PyObject *tensor);

/** First byte. */
char *msc__py_memory_data(const msc__py_memory *memory);

void msc__py_memory_hold(msc__py_memory *memory);
/** Threads: any, with or without the GIL. */
void msc__py_memory_release(msc__py_memory *memory);

/**
 * The tensor of its form, which takes the memory over: the caller is the last one who has it, and may only release it
 * afterwards. NULL, without an exception: it is not to be had so.
 */
PyObject *msc__py_memory_become(const msc__py_torch *torch, msc__py_memory *memory);

/**
 * A tensor on memory; NULL with an exception.
 * @param base where the storage begins that `shape` counts from.
 */
PyObject *msc__py_memory_view(const msc__py_torch *torch, msc__py_memory *memory, char *base,
                              const msc__py_shape *shape);

#endif /* MSC_EXT_PY_TORCH_H */
