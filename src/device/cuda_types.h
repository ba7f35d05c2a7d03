/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file cuda_types.h
 * The few types and numbers of NVIDIA's driver interface that are used here, so that no toolkit is needed to
 * build. The interface is stable: a symbol's types and numbers never change, a changed one gets another suffix.
 *
 * Names are the driver's with the project's prefix, so this header can stand beside cuda.h; tests/unit/device
 * compares them with it where there is one.
 */
#ifndef MSC_CUDA_TYPES_H
#define MSC_CUDA_TYPES_H

#include <stddef.h>

typedef int msc__cu_result;                             /* CUresult, an enum */
typedef int msc__cu_device;                             /* CUdevice */
typedef unsigned long long msc__cu_pointer;             /* CUdeviceptr, version 2 */
typedef struct msc__cu_context_object *msc__cu_context; /* CUcontext */
typedef struct msc__cu_stream_object *msc__cu_stream;   /* CUstream; NULL: the legacy default stream */
typedef struct msc__cu_event_object *msc__cu_event;     /* CUevent */
typedef struct msc__cu_module_object *msc__cu_module;   /* CUmodule */
typedef struct msc__cu_kernel_object *msc__cu_function; /* CUfunction */
typedef int msc__cu_attribute;                          /* CUdevice_attribute, an enum */

/** Results that mean something to us; the rest is the driver's to name. */
enum {
    MSC__CU_SUCCESS = 0,
    MSC__CU_INVALID_VALUE = 1,
    MSC__CU_OUT_OF_MEMORY = 2,
    MSC__CU_NOT_INITIALIZED = 3,
    MSC__CU_NO_DEVICE = 100,
    MSC__CU_INVALID_DEVICE = 101,
    MSC__CU_INVALID_IMAGE = 200,
    MSC__CU_INVALID_CONTEXT = 201,
    MSC__CU_NO_BINARY = 209,
    MSC__CU_OPERATING_SYSTEM = 304,
    MSC__CU_INVALID_HANDLE = 400,
    MSC__CU_NOT_FOUND = 500,
    MSC__CU_NOT_READY = 600,
    MSC__CU_ALREADY_REGISTERED = 712,
    MSC__CU_NOT_REGISTERED = 713,
    MSC__CU_NOT_SUPPORTED = 801
};

/** Flags. */
enum {
    MSC__CU_STREAM_NON_BLOCKING = 1, /* does not wait for the legacy default stream, nor it for us */
    MSC__CU_EVENT_BLOCKING_SYNC = 1, /* who waits on the host sleeps */
    MSC__CU_EVENT_DISABLE_TIMING = 2,
    MSC__CU_HOST_REGISTER_PORTABLE = 1 /* pinned for every context, not only for the current one */
};

/** Attributes of a card. */
enum { MSC__CU_CAPABILITY_MAJOR = 75, MSC__CU_CAPABILITY_MINOR = 76 };

#endif /* MSC_CUDA_TYPES_H */
