/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file cuda_syms.h
 * The driver functions that are used, as X(member, symbol, parameters). All return a result code.
 *
 * A symbol's suffix belongs to its meaning: cuMemAlloc without _v2 still exists and takes 32-bit sizes. cuda.h
 * hides that behind macros; who opens the library by name must write the suffix. All of these have been in
 * every driver since CUDA 11.0.
 *
 * Include cuda_types.h first.
 */
#ifndef MSC_CUDA_SYMS_H
#define MSC_CUDA_SYMS_H

/** More than a function of ours would have. */
#define MSC__CUDA_LAUNCH_PARAMETERS                                                                          \
    (msc__cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,         \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, msc__cu_stream stream, void **arguments,     \
     void **extra)

#define MSC__CUDA_SYMBOLS(X)                                                                                 \
    X(init, cuInit, (unsigned flags))                                                                        \
    X(error_name, cuGetErrorName, (msc__cu_result result, const char **name))                                \
    X(error_text, cuGetErrorString, (msc__cu_result result, const char **text))                              \
    X(driver_version, cuDriverGetVersion, (int *version))                                                    \
    X(device_count, cuDeviceGetCount, (int *count))                                                          \
    X(device_at, cuDeviceGet, (msc__cu_device * device, int ordinal))                                        \
    X(device_name, cuDeviceGetName, (char *name, int bytes, msc__cu_device device))                          \
    X(device_attribute, cuDeviceGetAttribute,                                                                \
      (int *value, msc__cu_attribute attribute, msc__cu_device device))                                      \
    X(context_retain, cuDevicePrimaryCtxRetain, (msc__cu_context * context, msc__cu_device device))          \
    X(context_release, cuDevicePrimaryCtxRelease_v2, (msc__cu_device device))                                \
    X(context_push, cuCtxPushCurrent_v2, (msc__cu_context context))                                          \
    X(context_pop, cuCtxPopCurrent_v2, (msc__cu_context * context))                                          \
    X(memory_info, cuMemGetInfo_v2, (size_t * free_bytes, size_t * total_bytes))                             \
    X(memory_alloc, cuMemAlloc_v2, (msc__cu_pointer * out, size_t bytes))                                    \
    X(memory_free, cuMemFree_v2, (msc__cu_pointer memory))                                                   \
    X(host_register, cuMemHostRegister_v2, (void *start, size_t bytes, unsigned flags))                      \
    X(host_unregister, cuMemHostUnregister, (void *start))                                                   \
    X(stream_create, cuStreamCreate, (msc__cu_stream * out, unsigned flags))                                 \
    X(stream_destroy, cuStreamDestroy_v2, (msc__cu_stream stream))                                           \
    X(stream_wait, cuStreamWaitEvent, (msc__cu_stream stream, msc__cu_event event, unsigned flags))          \
    X(stream_finish, cuStreamSynchronize, (msc__cu_stream stream))                                           \
    X(event_create, cuEventCreate, (msc__cu_event * out, unsigned flags))                                    \
    X(event_destroy, cuEventDestroy_v2, (msc__cu_event event))                                               \
    X(event_record, cuEventRecord, (msc__cu_event event, msc__cu_stream stream))                             \
    X(event_query, cuEventQuery, (msc__cu_event event))                                                      \
    X(event_wait, cuEventSynchronize, (msc__cu_event event))                                                 \
    X(copy_out, cuMemcpyDtoHAsync_v2, (void *to, msc__cu_pointer from, size_t bytes, msc__cu_stream stream)) \
    X(copy_in, cuMemcpyHtoDAsync_v2,                                                                         \
      (msc__cu_pointer to, const void *from, size_t bytes, msc__cu_stream stream))                           \
    X(module_load, cuModuleLoadData, (msc__cu_module * out, const void *image))                              \
    X(module_unload, cuModuleUnload, (msc__cu_module module))                                                \
    X(module_function, cuModuleGetFunction,                                                                  \
      (msc__cu_function * out, msc__cu_module module, const char *name))                                     \
    X(launch, cuLaunchKernel, MSC__CUDA_LAUNCH_PARAMETERS)

#endif /* MSC_CUDA_SYMS_H */
