/* SPDX-License-Identifier: Apache-2.0 */
/** @file cuda_rtc.h  NVRTC, NVIDIA's compiler as a library, opened at run time. It needs neither a card nor a context. */
#ifndef MSC_CUDA_RTC_H
#define MSC_CUDA_RTC_H

#include <stddef.h>

#include "device/device_internal.h"

typedef int msc__rtc_result;                              /* nvrtcResult, an enum; 0 is success */
#define MSC__RTC_OUT_OF_MEMORY 1                          /* of the host's */
typedef struct msc__rtc_program_object *msc__rtc_program; /* nvrtcProgram */

/** The functions that are used, as X(member, symbol, parameters); all of them since CUDA 11.2. */
#define MSC__RTC_SYMBOLS(X)                                                                                  \
    X(version, nvrtcVersion, (int *major, int *minor))                                                       \
    X(arch_count, nvrtcGetNumSupportedArchs, (int *count))                                                   \
    X(archs, nvrtcGetSupportedArchs, (int *archs))                                                           \
    X(create, nvrtcCreateProgram,                                                                            \
      (msc__rtc_program * out, const char *text, const char *name, int header_count,                         \
       const char *const *headers, const char *const *header_names))                                         \
    X(compile, nvrtcCompileProgram, (msc__rtc_program program, int count, const char *const *options))       \
    X(destroy, nvrtcDestroyProgram, (msc__rtc_program * program))                                            \
    X(log_bytes, nvrtcGetProgramLogSize, (msc__rtc_program program, size_t * bytes))                         \
    X(log, nvrtcGetProgramLog, (msc__rtc_program program, char *log))                                        \
    X(cubin_bytes, nvrtcGetCUBINSize, (msc__rtc_program program, size_t * bytes))                            \
    X(cubin, nvrtcGetCUBIN, (msc__rtc_program program, char *cubin))                                         \
    X(ptx_bytes, nvrtcGetPTXSize, (msc__rtc_program program, size_t * bytes))                                \
    X(ptx, nvrtcGetPTX, (msc__rtc_program program, char *ptx))

typedef struct msc__rtc {
    const char *(*error_text)(msc__rtc_result result); /* nvrtcGetErrorString */
#define MSC__RTC_MEMBER(member, symbol, parameters) msc__rtc_result(*member) parameters;
    MSC__RTC_SYMBOLS(MSC__RTC_MEMBER)
#undef MSC__RTC_MEMBER
} msc__rtc;

/** What a driver loads: machine code, or text of a virtual machine, with a zero at its end. */
typedef struct msc__rtc_image {
    char *bytes; /* of the context */
    size_t byte_count;
} msc__rtc_image;

/**
 * Opens the compiler, and libnvrtc-builtins beside it, which the loader would not find in a folder of Python packages.
 * They then stay in the process.
 *
 * @param library      file name; NULL: the system's, or one that is loaded already, the newest that the driver can take
 *                     machine code from.
 * @param driver_major CUDA's version that the driver belongs to.
 * Errors: EUNSUPPORTED (none there, or it lacks a function), with what to install.
 */
msc_status msc__rtc_open(msc__rtc *rtc, const char *library, int driver_major, msc_error *err);

/**
 * Compiles for a card: machine code, where the compiler knows the card; else PTX of the newest one before it, from which
 * the driver makes machine code.
 *
 * @param capability the card's, 90 for 9.0.
 * @param out        the caller ends it with `msc__rtc_image_end`.
 * Errors: EUNSUPPORTED (the compiler knows no card as old), ENOMEM, EDRIVER (the compiler's messages are in the error).
 */
msc_status msc__rtc_compile(const msc__rtc *rtc, msc_context *ctx, const msc_program_text *text,
                            int capability, msc__rtc_image *out, msc_error *err);

void msc__rtc_image_end(msc_context *ctx, msc__rtc_image *image);

#endif /* MSC_CUDA_RTC_H */
