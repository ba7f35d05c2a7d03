/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our declarations of the driver's interface against NVIDIA's own, where its header is installed. Compiling this
 * is the test: a function that has other parameters, a type of another size or a number that differs is an error.
 */
#include <cuda.h>

#include "device/cuda_types.h"

#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #ours " is not " #theirs)
#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #ours " is not " #theirs)

SAME_SIZE(msc__cu_result, CUresult);
SAME_SIZE(msc__cu_device, CUdevice);
SAME_SIZE(msc__cu_pointer, CUdeviceptr);
SAME_SIZE(msc__cu_context, CUcontext);
SAME_SIZE(msc__cu_stream, CUstream);
SAME_SIZE(msc__cu_event, CUevent);
SAME_SIZE(msc__cu_module, CUmodule);
SAME_SIZE(msc__cu_function, CUfunction);
SAME_SIZE(msc__cu_attribute, CUdevice_attribute);

SAME(MSC__CU_SUCCESS, CUDA_SUCCESS);
SAME(MSC__CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(MSC__CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(MSC__CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(MSC__CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(MSC__CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(MSC__CU_INVALID_IMAGE, CUDA_ERROR_INVALID_IMAGE);
SAME(MSC__CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME(MSC__CU_NO_BINARY, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(MSC__CU_OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM);
SAME(MSC__CU_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(MSC__CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(MSC__CU_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(MSC__CU_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(MSC__CU_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME(MSC__CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);

SAME(MSC__CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(MSC__CU_EVENT_BLOCKING_SYNC, CU_EVENT_BLOCKING_SYNC);
SAME(MSC__CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(MSC__CU_HOST_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);

SAME(MSC__CU_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(MSC__CU_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);

/* From here on our names mean their types, so the table declares what they declare. */
#define msc__cu_result CUresult
#define msc__cu_device CUdevice
#define msc__cu_pointer CUdeviceptr
#define msc__cu_context CUcontext
#define msc__cu_stream CUstream
#define msc__cu_event CUevent
#define msc__cu_module CUmodule
#define msc__cu_function CUfunction
#define msc__cu_attribute CUdevice_attribute
#include "device/cuda_syms.h"

#define DECLARE(member, symbol, parameters) extern CUresult CUDAAPI symbol parameters;
MSC__CUDA_SYMBOLS(DECLARE)
