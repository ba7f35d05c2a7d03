/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file status.h
 * Status codes and the caller-owned error record.
 *
 * A function that can fail returns one of these codes. When the caller passes an `msc_error`, it also
 * receives what was attempted, with which values, and what to do about it. A success leaves the record
 * untouched, so one record can serve a whole sequence of calls.
 */
#ifndef MEMSCALE_STATUS_H
#define MEMSCALE_STATUS_H

#include <stdint.h>

/**
 * The codes, as X(name, text). Values are stable and start at 0; new codes are appended.
 *
 * EDEVMEM is its own code because running out of device memory is this library's subject: it must never
 * be mistaken for the host's ENOMEM.
 */
#define MSC_STATUS_LIST(X)                                                                                   \
    X(OK, "success")                                                                                         \
    X(EINVAL, "invalid argument")                                                                            \
    X(ENOMEM, "out of host memory")                                                                          \
    X(EDEVMEM, "out of device memory")                                                                       \
    X(ENODEV, "no such device")                                                                              \
    X(EUNSUPPORTED, "not supported here")                                                                    \
    X(EAGAIN, "try again")                                                                                   \
    X(ETIMEDOUT, "timed out")                                                                                \
    X(ECANCELED, "canceled")                                                                                 \
    X(EOVERFLOW, "arithmetic overflow")                                                                      \
    X(EFORMAT, "malformed input")                                                                            \
    X(EVERSION, "unknown format version")                                                                    \
    X(EIO, "input or output failed")                                                                         \
    X(ESTATE, "call not allowed in this state")                                                              \
    X(EDRIVER, "device driver error")                                                                        \
    X(EINTERNAL, "internal error")

typedef enum msc_status {
#define MSC_STATUS_ENUM(name, text) MSC_##name,
    MSC_STATUS_LIST(MSC_STATUS_ENUM)
#undef MSC_STATUS_ENUM
        MSC_STATUS_COUNT
} msc_status;

/** Size of `msc_error.message`, terminator included. */
#define MSC_ERROR_MESSAGE_BYTES 512

/** What went wrong. Owned by the caller; valid only after a call returned something other than MSC_OK. */
typedef struct msc_error {
    msc_status status;
    int32_t driver_code;                   /**< the driver's or the operating system's own number, or 0 */
    char message[MSC_ERROR_MESSAGE_BYTES]; /**< one sentence, always terminated */
} msc_error;

/** Marks what the shared library exports. */
#if defined(__GNUC__) && !defined(_WIN32)
#define MSC_API __attribute__((visibility("default")))
#else
#define MSC_API
#endif

/** Marks what says whether it worked: who calls it looks. A call that is meant to be ignored says so to the compiler. */
#ifndef MSC_NODISCARD
#if defined(__GNUC__) || defined(__clang__)
#define MSC_NODISCARD __attribute__((warn_unused_result))
#else
#define MSC_NODISCARD
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** Name of a code without prefix, such as "EINVAL". Never NULL. */
MSC_API const char *msc_status_name(msc_status status);

/** Short description of a code. Never NULL. */
MSC_API const char *msc_status_text(msc_status status);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_STATUS_H */
