/* SPDX-License-Identifier: Apache-2.0 */
/** @file cuda_dl.h  The driver library, opened at run time: nothing of it is linked, nothing happens at load time. */
#ifndef MSC_CUDA_DL_H
#define MSC_CUDA_DL_H

#include "device/cuda_syms.h"
#include "device/cuda_types.h"
#include "memscale/status.h"

/** The driver's functions. */
typedef struct msc__cuda_driver {
#define MSC__CUDA_MEMBER(member, symbol, parameters) msc__cu_result(*member) parameters;
    MSC__CUDA_SYMBOLS(MSC__CUDA_MEMBER)
#undef MSC__CUDA_MEMBER
} msc__cuda_driver;

/**
 * Opens the library and finds every function. The library then stays in the process.
 *
 * @param library file name; NULL: the system's.
 * Errors: ENODEV (no such library, or a function that it lacks).
 */
msc_status msc__cuda_open(msc__cuda_driver *driver, const char *library, msc_error *err);

/**
 * MSC_OK for success; otherwise fills `err` with what was attempted and the driver's name of the result.
 *
 * @param format what was attempted, so that "cannot " may stand before it.
 * Errors: EDEVMEM (out of memory), ENODEV (no device, no such device), EDRIVER.
 */
msc_status msc__cuda_check(const msc__cuda_driver *driver, msc__cu_result result, msc_error *err,
                           const char *format, ...);

#endif /* MSC_CUDA_DL_H */
