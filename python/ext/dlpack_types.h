/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file dlpack_types.h
 * Types of DLPack (dlpack.h, version 1.2), as PyTorch's tensors are shown in them. Needs the GIL.
 */
#ifndef MSC_EXT_DLPACK_TYPES_H
#define MSC_EXT_DLPACK_TYPES_H

#include "pydoor.h"

#define MSC_DL_MAJOR 1
#define MSC_DL_CPU 1
#define MSC_DL_CUDA 2

typedef struct msc_dl_version {
    uint32_t major, minor;
} msc_dl_version;

typedef struct msc_dl_device {
    int32_t type, ordinal;
} msc_dl_device;

typedef struct msc_dl_dtype {
    uint8_t code, bits;
    uint16_t lanes;
} msc_dl_dtype;

static inline uint64_t msc_dl_item_bytes(msc_dl_dtype dtype)
{
    return ((uint64_t)dtype.bits * dtype.lanes + 7) / 8; /* lanes: two numbers of four bits are one item */
}

typedef struct msc_dl_tensor {
    void *data;
    msc_dl_device device;
    int32_t dim_count;
    msc_dl_dtype dtype;
    int64_t *sizes;
    int64_t *strides; /* in elements; NULL: contiguous */
    uint64_t byte_offset;
} msc_dl_tensor;

typedef struct msc_dl_managed {
    msc_dl_version version;
    void *owner;
    void (*deleter)(struct msc_dl_managed *self);
    uint64_t flags;
    msc_dl_tensor tensor;
} msc_dl_managed;

/** What a capsule "dltensor" holds. */
typedef struct msc_dl_legacy {
    msc_dl_tensor tensor;
    void *owner;
    void (*deleter)(struct msc_dl_legacy *self);
} msc_dl_legacy;

typedef void (*msc_dl_set_error)(void *context, const char *kind, const char *message);

typedef struct msc_dl_header {
    msc_dl_version version;
    struct msc_dl_header *previous;
} msc_dl_header;

/** Functions return 0, or -1 with a Python exception set. They need the GIL. */
typedef struct msc_dl_api {
    msc_dl_header header;
    int (*allocate)(msc_dl_tensor *prototype, msc_dl_managed **out, void *context,
                    msc_dl_set_error set_error);
    int (*from_object)(void *object, msc_dl_managed **out);
    int (*to_object)(msc_dl_managed *tensor, void **out); /* takes the tensor over */
    int (*read)(void *object, msc_dl_tensor *out);        /* borrowed, valid while the object lives */
    int (*current_stream)(int32_t device_type, int32_t ordinal, void **out);
} msc_dl_api;

#endif /* MSC_EXT_DLPACK_TYPES_H */
