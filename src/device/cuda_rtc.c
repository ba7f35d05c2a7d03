/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compiling at run time: text ──► NVRTC ──► machine code for the card at hand, which the driver loads.
 *
 * The options are a promise (device_internal.h): products and sums are not fused, quotients and roots are rounded
 * correctly, denormal numbers are numbers. Bits are then those of any other machine that keeps to IEEE 754.
 *
 * A card that is newer than the compiler gets PTX, which names each rounding and so means the same. The other way
 * round, machine code of a newer major version of the compiler than the driver's may be refused, so such a compiler is
 * not opened; who names one by file has chosen.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif

#include "device/cuda_rtc.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"

#define ADVICE                                                                                               \
    "install NVIDIA's compiler (pip install nvidia-cuda-nvrtc-cu12, or the CUDA toolkit, 11.7 or newer) "    \
    "and let "                                                                                               \
    "LD_LIBRARY_PATH or msc_device_options.compiler say where it is"

#define MOST_ARCHS 64
#define LEAST_CAPABILITY 70 /* of cards whose kernels take constants by reference */
#define FOLDER_BYTES 1024
#define LOG_SHOWN 300 /* characters of the compiler's messages that fit into an error */

typedef struct entry {
    const char *symbol;
    size_t offset; /* in msc__rtc */
} entry;

static const entry entries[] = {{"nvrtcGetErrorString", offsetof(msc__rtc, error_text)},
#define ENTRY(member, symbol, parameters) {#symbol, offsetof(msc__rtc, member)},
                                MSC__RTC_SYMBOLS(ENTRY)
#undef ENTRY
};

/* Files that the library is in, newest first, and the version that a driver must have for it. */
static const struct {
    const char *name;
    int major;
} candidates[] = {
    {"libnvrtc.so.13", 13},
    {"libnvrtc.so.12", 12},
    {"libnvrtc.so.11.2", 11},
};

static void *open_any(const char *library, int driver_major)
{
    void *opened = NULL;
    size_t i;

    if (library != NULL)
        return dlopen(library, RTLD_NOW | RTLD_LOCAL);
    for (i = 0; opened == NULL && i < sizeof candidates / sizeof candidates[0]; i++)
        if (candidates[i].major <= driver_major)
            opened = dlopen(candidates[i].name, RTLD_NOW | RTLD_LOCAL);
    return opened;
}

/* Folder of a library that is loaded, with the slash; "" where the loader does not say. */
static void folder_of(void *function, char out[FOLDER_BYTES])
{
    const char *slash;
    Dl_info info;

    out[0] = '\0';
    if (dladdr(function, &info) == 0 || info.dli_fname == NULL)
        return;
    slash = strrchr(info.dli_fname, '/');
    if (slash != NULL && (size_t)(slash - info.dli_fname) + 2 <= FOLDER_BYTES)
        (void)snprintf(out, FOLDER_BYTES, "%.*s", (int)(slash - info.dli_fname) + 1, info.dli_fname);
}

/*
 * Opens the compiler's second library, which it asks the loader for by its bare name when it compiles: one that is loaded is
 * found, from wherever. If this finds none, the compiler may; and if not, it says so in its own words.
 */
static void open_builtins(const msc__rtc *rtc, void *function)
{
    char folder[FOLDER_BYTES];
    char path[FOLDER_BYTES + 64];
    int major = 0;
    int minor = 0;

    if (rtc->version(&major, &minor) != 0)
        return;
    folder_of(function, folder);
    (void)snprintf(path, sizeof path, "%slibnvrtc-builtins.so.%d.%d", folder, major, minor);
    (void)dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

msc_status msc__rtc_open(msc__rtc *rtc, const char *library, int driver_major, msc_error *err)
{
    void *opened = open_any(library, driver_major);
    void *found = NULL;
    size_t i;

    if (opened == NULL)
        return msc__fail(err, MSC_EUNSUPPORTED, "cannot open %s for a driver of CUDA %d: " ADVICE,
                         library != NULL ? library : "libnvrtc", driver_major);
    for (i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        found = dlsym(opened, entries[i].symbol);
        if (found == NULL) {
            (void)dlclose(opened);
            return msc__fail(err, MSC_EUNSUPPORTED, "%s has no %s: " ADVICE,
                             library != NULL ? library : "libnvrtc", entries[i].symbol);
        }
        memcpy((char *)rtc + entries[i].offset, &found, sizeof found);
    }
    open_builtins(rtc, found);
    return MSC_OK;
}

static msc_status check(const msc__rtc *rtc, msc__rtc_result result, const char *attempt, msc_error *err)
{
    msc_status status;

    if (result == 0)
        return MSC_OK;
    status = msc__fail(err, result == MSC__RTC_OUT_OF_MEMORY ? MSC_ENOMEM : MSC_EDRIVER, "cannot %s: %s",
                       attempt, rtc->error_text(result));
    if (err != NULL)
        err->driver_code = result;
    return status;
}

/* ---- for which card -------------------------------------------------------------------------------------- */

/* `--gpu-architecture=…`, and whether that gives machine code. */
static msc_status choose(const msc__rtc *rtc, int capability, char option[48], bool *machine_code,
                         msc_error *err)
{
    int archs[MOST_ARCHS];
    int count = 0;
    int best = 0;
    int i;
    msc_status status = check(rtc, rtc->arch_count(&count), "ask NVRTC for the cards that it knows", err);

    if (capability < LEAST_CAPABILITY)
        return msc__fail(err, MSC_EUNSUPPORTED,
                         "kernels need a card of compute capability 7.0, and this one has %d.%d",
                         capability / 10, capability % 10);
    if (status == MSC_OK && count > MOST_ARCHS)
        return msc__fail(err, MSC_EUNSUPPORTED, "NVRTC knows %d kinds of cards, here is room for %d", count,
                         MOST_ARCHS);
    if (status == MSC_OK)
        status = check(rtc, rtc->archs(archs), "ask NVRTC for the cards that it knows", err);
    if (status != MSC_OK)
        return status;
    for (i = 0; i < count; i++)
        if (archs[i] <= capability && archs[i] > best)
            best = archs[i];
    if (best == 0)
        return msc__fail(
            err, MSC_EUNSUPPORTED,
            "this NVRTC compiles for no card as old as one of compute capability %d.%d: use an older one",
            capability / 10, capability % 10);
    MSC__ASSERT(best > 0 && best <= capability && count <= MOST_ARCHS);
    *machine_code = best == capability;
    (void)snprintf(option, 48, "--gpu-architecture=%s_%d", *machine_code ? "sm" : "compute", best);
    return MSC_OK;
}

/* ---- compiling -------------------------------------------------------------------------------------------- */

/* Why a text was refused, in the compiler's words. */
static msc_status refuse(const msc__rtc *rtc, msc_context *ctx, msc__rtc_program program,
                         const msc_program_text *text, msc__rtc_result result, msc_error *err)
{
    char *log = NULL;
    size_t bytes = 0;
    msc_status status;

    MSC__ASSERT(result != 0);
    if (rtc->log_bytes(program, &bytes) == 0 && bytes > 0)
        log = msc__alloc(ctx, bytes);
    if (log != NULL && rtc->log(program, log) != 0)
        log[0] = '\0';
    status = msc__fail(err, result == MSC__RTC_OUT_OF_MEMORY ? MSC_ENOMEM : MSC_EDRIVER,
                       "cannot compile %s: %s: %.*s", text->name, rtc->error_text(result), LOG_SHOWN,
                       log != NULL ? log : "");
    if (err != NULL)
        err->driver_code = result;
    msc__free(ctx, log, bytes);
    return status;
}

static msc_status take_image(const msc__rtc *rtc, msc_context *ctx, msc__rtc_program program,
                             bool machine_code, msc__rtc_image *out, msc_error *err)
{
    const char *what = "take what NVRTC has compiled";
    size_t bytes = 0;
    msc_status status = check(
        rtc, machine_code ? rtc->cubin_bytes(program, &bytes) : rtc->ptx_bytes(program, &bytes), what, err);

    MSC__ASSERT(out->bytes == NULL && out->byte_count == 0);
    if (status != MSC_OK)
        return status;
    out->bytes = msc__alloc(ctx, bytes);
    if (out->bytes == NULL)
        return msc__fail_memory(err, "compiled kernels", bytes);
    out->byte_count = bytes;
    status =
        check(rtc, machine_code ? rtc->cubin(program, out->bytes) : rtc->ptx(program, out->bytes), what, err);
    if (status != MSC_OK)
        msc__rtc_image_end(ctx, out);
    return status;
}

msc_status msc__rtc_compile(const msc__rtc *rtc, msc_context *ctx, const msc_program_text *text,
                            int capability, msc__rtc_image *out, msc_error *err)
{
    char architecture[48];
    const char *const options[] = {
        architecture,
        "--std=c++17",
        "--fmad=false",
        "--prec-div=true",
        "--prec-sqrt=true",
        "--ftz=false",
        "--device-as-default-execution-space", /* declarations of the library's headers are nobody's */
    };
    msc__rtc_program program = NULL;
    bool machine_code = false;
    msc__rtc_result result;
    msc_status status = choose(rtc, capability, architecture, &machine_code, err);

    memset(out, 0, sizeof *out);
    if (status == MSC_OK)
        status = check(rtc, rtc->create(&program, text->text, text->name, 0, NULL, NULL), "hand NVRTC a text",
                       err);
    if (status != MSC_OK)
        return status;
    result = rtc->compile(program, (int)(sizeof options / sizeof options[0]), options);
    if (result != 0)
        status = refuse(rtc, ctx, program, text, result, err);
    else
        status = take_image(rtc, ctx, program, machine_code, out, err);
    MSC__ASSERT((status == MSC_OK) == (out->bytes != NULL));
    (void)rtc->destroy(&program);
    return status;
}

void msc__rtc_image_end(msc_context *ctx, msc__rtc_image *image)
{
    MSC__ASSERT(image->bytes != NULL || image->byte_count == 0);
    msc__free(ctx, image->bytes, image->byte_count);
    memset(image, 0, sizeof *image);
}
