/* SPDX-License-Identifier: Apache-2.0 */
/** @file error.h  Filling the caller's error record. */
#ifndef MSC_BASE_ERROR_H
#define MSC_BASE_ERROR_H

#include "memscale/status.h"

#if defined(__GNUC__) || defined(__clang__)
#define MSC__PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define MSC__PRINTF(text, first)
#endif

/** Fills `err`, if there is one, and returns `status`, so that a failure is one statement. */
msc_status msc__fail(msc_error *err, msc_status status, const char *format, ...) MSC__PRINTF(3, 4);

/** For a call whose outcome does not matter: it cannot fail there, or there is nothing to be done about it. */
static inline void msc__ignore(msc_status status)
{
    (void)status;
}

/** The usual sentence for host memory: `cannot get <bytes> bytes for <what>`. Returns MSC_ENOMEM. */
msc_status msc__fail_memory(msc_error *err, const char *what, uint64_t bytes);

#endif /* MSC_BASE_ERROR_H */
