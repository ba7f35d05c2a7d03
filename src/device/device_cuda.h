/* SPDX-License-Identifier: Apache-2.0 */
/** @file device_cuda.h  Inside the CUDA device: the card, its context, and the programs that it has loaded. */
#ifndef MSC_DEVICE_CUDA_H
#define MSC_DEVICE_CUDA_H

#include "device/cuda_dl.h"
#include "device/device_internal.h"

/** A text that was compiled and loaded. */
typedef struct msc__cuda_program {
    struct msc__cuda_program *next;
    const char *text; /* its address names it */
    msc__cu_module module;
} msc__cuda_program;

typedef struct msc__cuda {
    msc_device device; /* first */
    msc__cuda_driver driver;
    msc__cu_device card;
    msc__cu_context context; /* NULL: not retained */
    char *compiler;          /* file name; NULL: the system's */
    size_t compiler_bytes;
    msc__cuda_program *programs;
} msc__cuda;

/** Makes the card's context current; `leave` puts back what was. Errors: ESTATE, EDRIVER. */
msc_status msc__cuda_enter(const msc__cuda *self, msc_error *err);
void msc__cuda_leave(const msc__cuda *self);

/* device_cuda_program.c: slots of the vtable, and the end of all programs */
msc_status msc__cuda_program_create(msc_device *device, const msc_program_text *text, void **out,
                                    msc_error *err);
msc_status msc__cuda_kernel_find(msc_device *device, void *program, const char *name, void **out,
                                 msc_error *err);
msc_status msc__cuda_launch(msc_device *device, const msc_launch *what, void *stream, msc_error *err);
void msc__cuda_programs_end(msc__cuda *self);

#endif /* MSC_DEVICE_CUDA_H */
