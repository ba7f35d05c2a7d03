/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Status codes as text, and the one place that fills an msc_error.
 */
#include <stdarg.h>
#include <stdio.h>

#include "base/error.h"
#include "memscale/base.h"

const char *msc_status_name(msc_status status)
{
    static const char *const names[] = {
#define NAME(name, text) #name,
        MSC_STATUS_LIST(NAME)
#undef NAME
    };
    return (unsigned)status < MSC_STATUS_COUNT ? names[status] : "UNKNOWN";
}

const char *msc_status_text(msc_status status)
{
    static const char *const texts[] = {
#define TEXT(name, text) text,
        MSC_STATUS_LIST(TEXT)
#undef TEXT
    };
    return (unsigned)status < MSC_STATUS_COUNT ? texts[status] : "unknown status";
}

const char *msc_version(void)
{
    return MSC_VERSION_TEXT;
}

msc_status msc__fail(msc_error *err, msc_status status, const char *format, ...)
{
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        err->status = status;
        err->driver_code = 0;
        (void)vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
    }
    return status;
}

msc_status msc__fail_memory(msc_error *err, const char *what, uint64_t bytes)
{
    return msc__fail(err, MSC_ENOMEM, "cannot get %llu bytes of host memory for %s",
                     (unsigned long long)bytes, what);
}
