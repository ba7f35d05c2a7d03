/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run-time compiler without one, for tests: libfake_nvrtc.so has the functions of NVRTC that the library uses
 * (src/device/cuda_rtc.h). It takes the texts of the library's own kernels, which the fake driver has compiled already
 * (fake_kernels.c, fake_fingerprint.c), and only with the options that bits depend on. What it gives names the card that it is for, so that the
 * fake driver can tell whether it would run there.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda_rtc.h"
#include "fake_cuda/fake_cuda.h"
#include "fingerprint/fingerprint_table.h"
#include "optim/optim_cuda.h"

#define INVALID_OPTION 5
#define COMPILATION 6
#define LOG_BYTES 256

struct msc__rtc_program_object {
    bool known; /* its text */
    char log[LOG_BYTES];
    char image[64];
    bool machine_code;
};

static const char *const known_texts[] = {msc__optim_cuda_text, msc__fingerprint_cuda_text};
static const int known_archs[] = {50, 60, 61, 70, 80, 90};
static int live_count;

#define DECLARE(member, symbol, parameters)                                                                  \
    __attribute__((visibility("default"))) msc__rtc_result symbol parameters;
MSC__RTC_SYMBOLS(DECLARE)
#undef DECLARE

__attribute__((visibility("default"))) const char *nvrtcGetErrorString(msc__rtc_result result);
__attribute__((visibility("default"))) fake_nvrtc_live_function fake_nvrtc_live;

int fake_nvrtc_live(void)
{
    return live_count;
}

const char *nvrtcGetErrorString(msc__rtc_result result)
{
    return result == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_OPTION";
}

static bool is_known(const char *text)
{
    size_t i;

    for (i = 0; i < sizeof known_texts / sizeof known_texts[0]; i++)
        if (strcmp(text, known_texts[i]) == 0)
            return true;
    return false;
}

/* Of no release: it has no second library. */
msc__rtc_result nvrtcVersion(int *major, int *minor)
{
    *major = 0;
    *minor = 0;
    return 0;
}

msc__rtc_result nvrtcGetNumSupportedArchs(int *count)
{
    *count = (int)(sizeof known_archs / sizeof known_archs[0]);
    return 0;
}

msc__rtc_result nvrtcGetSupportedArchs(int *archs)
{
    memcpy(archs, known_archs, sizeof known_archs);
    return 0;
}

msc__rtc_result nvrtcCreateProgram(msc__rtc_program *out, const char *text, const char *name,
                                   int header_count, const char *const *headers,
                                   const char *const *header_names)
{
    msc__rtc_program program = calloc(1, sizeof *program);

    (void)name;
    if (program == NULL || header_count != 0 || headers != NULL || header_names != NULL)
        abort();
    program->known = is_known(text);
    live_count++;
    *out = program;
    return 0;
}

msc__rtc_result nvrtcDestroyProgram(msc__rtc_program *program)
{
    live_count--;
    free(*program);
    *program = NULL;
    return 0;
}

/* All that bits depend on is said, and nothing else that they could depend on. */
static const char *wrong_option(int count, const char *const *options)
{
    static const char *const wanted[] = {"--std=c++17",     "--fmad=false",
                                         "--prec-div=true", "--prec-sqrt=true",
                                         "--ftz=false",     "--device-as-default-execution-space"};
    const int wanted_count = (int)(sizeof wanted / sizeof wanted[0]);
    int i, k;

    if (count != wanted_count + 1 || strncmp(options[0], "--gpu-architecture=", 19) != 0)
        return "the options";
    for (i = 0; i < wanted_count; i++) {
        for (k = 1; k < count && strcmp(options[k], wanted[i]) != 0;)
            k++;
        if (k == count)
            return wanted[i];
    }
    return NULL;
}

msc__rtc_result nvrtcCompileProgram(msc__rtc_program program, int count, const char *const *options)
{
    const char *wrong = wrong_option(count, options);
    int arch;

    if (wrong != NULL) {
        (void)snprintf(program->log, LOG_BYTES, "wrong or missing: %s", wrong);
        return INVALID_OPTION;
    }
    if (!program->known) {
        (void)snprintf(program->log, LOG_BYTES, "error: this text is none of those that the stand-in has");
        return COMPILATION;
    }
    program->machine_code = sscanf(options[0], "--gpu-architecture=sm_%d", &arch) == 1;
    if (!program->machine_code && sscanf(options[0], "--gpu-architecture=compute_%d", &arch) != 1)
        return INVALID_OPTION;
    (void)snprintf(program->image, sizeof program->image, "fake %s %d",
                   program->machine_code ? "cubin" : "ptx", arch);
    return 0;
}

msc__rtc_result nvrtcGetProgramLogSize(msc__rtc_program program, size_t *bytes)
{
    *bytes = strlen(program->log) + 1;
    return 0;
}

msc__rtc_result nvrtcGetProgramLog(msc__rtc_program program, char *log)
{
    memcpy(log, program->log, strlen(program->log) + 1);
    return 0;
}

/* The real one has machine code only if it was asked for some. */
msc__rtc_result nvrtcGetCUBINSize(msc__rtc_program program, size_t *bytes)
{
    *bytes = program->machine_code ? strlen(program->image) + 1 : 0;
    return 0;
}

msc__rtc_result nvrtcGetCUBIN(msc__rtc_program program, char *cubin)
{
    memcpy(cubin, program->image, strlen(program->image) + 1);
    return 0;
}

msc__rtc_result nvrtcGetPTXSize(msc__rtc_program program, size_t *bytes)
{
    *bytes = strlen(program->image) + 1;
    return 0;
}

msc__rtc_result nvrtcGetPTX(msc__rtc_program program, char *ptx)
{
    memcpy(ptx, program->image, strlen(program->image) + 1);
    return 0;
}
