/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening the driver library.
 *
 * It is never closed again once its functions are found: it starts threads and registers work for the end of
 * the process, and PyTorch, which uses the same library, would lose nothing but we could lose everything.
 *
 * dlsym returns an object pointer and ISO C has no way from there to a function; POSIX says that the
 * representation is the same, so the bytes are copied.
 */
#include "device/cuda_dl.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"

#define SYSTEM_LIBRARY "libcuda.so.1"

typedef struct entry {
    const char *symbol;
    size_t offset; /* in msc__cuda_driver */
} entry;

static const entry entries[] = {
#define ENTRY(member, symbol, parameters) {#symbol, offsetof(msc__cuda_driver, member)},
    MSC__CUDA_SYMBOLS(ENTRY)
#undef ENTRY
};

/* The first symbol that the library lacks, or NULL. */
static const char *find_all(msc__cuda_driver *driver, void *library)
{
    size_t i;

    for (i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        void *found = dlsym(library, entries[i].symbol);

        if (found == NULL)
            return entries[i].symbol;
        MSC__ASSERT(entries[i].offset + sizeof found <= sizeof *driver);
        memcpy((char *)driver + entries[i].offset, &found, sizeof found);
    }
    return NULL;
}

msc_status msc__cuda_open(msc__cuda_driver *driver, const char *library, msc_error *err)
{
    const char *name = library != NULL ? library : SYSTEM_LIBRARY;
    void *opened = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    const char *missing;
    msc_status status;

    if (opened == NULL) {
        const char *reason = dlerror();

        return msc__fail(err, MSC_ENODEV, "cannot open NVIDIA's driver library: %s",
                         reason != NULL ? reason : name);
    }
    missing = find_all(driver, opened);
    if (missing == NULL)
        return MSC_OK;
    status = msc__fail(err, MSC_ENODEV, "%s is not a driver library that can be used: it has no %s", name,
                       missing);
    (void)dlclose(opened);
    return status;
}

static msc_status status_of(msc__cu_result result)
{
    MSC__ASSERT(result != MSC__CU_SUCCESS);
    switch (result) {
    case MSC__CU_OUT_OF_MEMORY:
        return MSC_EDEVMEM;
    case MSC__CU_NO_DEVICE:
    case MSC__CU_INVALID_DEVICE:
        return MSC_ENODEV;
    default:
        return MSC_EDRIVER;
    }
}

msc_status msc__cuda_check(const msc__cuda_driver *driver, msc__cu_result result, msc_error *err,
                           const char *format, ...)
{
    char attempt[256];
    const char *name = NULL;
    const char *text = NULL;
    msc_status status;
    va_list args;

    if (result == MSC__CU_SUCCESS)
        return MSC_OK;
    va_start(args, format);
    (void)vsnprintf(attempt, sizeof attempt, format, args);
    va_end(args);
    if (driver->error_name(result, &name) != MSC__CU_SUCCESS || name == NULL)
        name = "an unknown error";
    if (driver->error_text(result, &text) != MSC__CU_SUCCESS || text == NULL)
        text = "the driver has no text for it";
    status = msc__fail(err, status_of(result), "cannot %s: %s (%s)", attempt, name, text);
    if (err != NULL)
        err->driver_code = result;
    return status;
}
