/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels on a card: compiled when they are first asked for, loaded into the card's context, and kept with the device,
 * so that who asks again, for another stream, waits for neither compiler nor driver.
 *
 *      text ──► msc__rtc_compile ──► image ──► cuModuleLoadData ──► module ──► kernels
 *               (host, half a second)          (card)
 *
 * Programs are made and ended with their device, so one thread at a time goes through their list.
 */
#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "device/cuda_rtc.h"
#include "device/device_cuda.h"

/* 90 for a card of compute capability 9.0, and the CUDA that the driver is of. */
static msc_status ask_card(const msc__cuda *self, int *capability, int *driver_major, msc_error *err)
{
    const msc__cuda_driver *driver = &self->driver;
    int major = 0;
    int minor = 0;
    int version = 0;
    msc_status status =
        msc__cuda_check(driver, driver->device_attribute(&major, MSC__CU_CAPABILITY_MAJOR, self->card), err,
                        "ask %s for its compute capability", self->device.name);

    if (status == MSC_OK)
        status =
            msc__cuda_check(driver, driver->device_attribute(&minor, MSC__CU_CAPABILITY_MINOR, self->card),
                            err, "ask %s for its compute capability", self->device.name);
    if (status == MSC_OK)
        status =
            msc__cuda_check(driver, driver->driver_version(&version), err, "ask the driver for its version");
    MSC__ASSERT(status != MSC_OK || (major >= 0 && minor >= 0));
    *capability = 10 * major + minor;
    *driver_major = version / 1000;
    return status;
}

static msc_status compile(const msc__cuda *self, const msc_program_text *text, msc__rtc_image *image,
                          msc_error *err)
{
    int capability = 0;
    int driver_major = 0;
    msc__rtc rtc;
    msc_status status = ask_card(self, &capability, &driver_major, err);

    if (status == MSC_OK)
        status = msc__rtc_open(&rtc, self->compiler, driver_major, err);
    if (status == MSC_OK)
        status = msc__rtc_compile(&rtc, self->device.ctx, text, capability, image, err);
    return status;
}

/* Fills a program that is in no list yet. */
static msc_status load(const msc__cuda *self, const msc_program_text *text, msc__cuda_program *program,
                       msc_error *err)
{
    msc__rtc_image image = {NULL, 0};
    msc_status status = compile(self, text, &image, err);

    if (status != MSC_OK)
        return status;
    MSC__ASSERT(image.bytes != NULL && image.byte_count > 0);
    status = msc__cuda_enter(self, err);
    if (status == MSC_OK) {
        status =
            msc__cuda_check(&self->driver, self->driver.module_load(&program->module, image.bytes), err,
                            "load %s (%zu bytes) into %s", text->name, image.byte_count, self->device.name);
        msc__cuda_leave(self);
    }
    msc__rtc_image_end(self->device.ctx, &image);
    return status;
}

msc_status msc__cuda_program_create(msc_device *device, const msc_program_text *text, void **out,
                                    msc_error *err)
{
    msc__cuda *self = (msc__cuda *)device;
    msc__cuda_program *program = self->programs;
    msc_status status = msc__device_check_process(device, err);

    *out = NULL;
    if (status != MSC_OK)
        return status;
    while (program != NULL && program->text != text->text)
        program = program->next;
    if (program != NULL) {
        *out = program;
        return MSC_OK;
    }
    program = msc__alloc(device->ctx, sizeof *program);
    if (program == NULL)
        return msc__fail_memory(err, "a program", sizeof *program);
    status = load(self, text, program, err);
    if (status != MSC_OK) {
        msc__free(device->ctx, program, sizeof *program);
        return status;
    }
    MSC__ASSERT(program->next == NULL && program->text == NULL);
    program->text = text->text;
    program->next = self->programs;
    self->programs = program;
    *out = program;
    return MSC_OK;
}

msc_status msc__cuda_kernel_find(msc_device *device, void *program, const char *name, void **out,
                                 msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    const msc__cuda_program *loaded = program;
    msc__cu_function function = NULL;
    msc_status status = msc__cuda_enter(self, err);

    *out = NULL;
    if (status != MSC_OK)
        return status;
    status = msc__cuda_check(&self->driver, self->driver.module_function(&function, loaded->module, name),
                             err, "find the kernel %s", name);
    msc__cuda_leave(self);
    if (status == MSC_OK)
        *out = function;
    return status;
}

msc_status msc__cuda_launch(msc_device *device, const msc_launch *what, void *stream, msc_error *err)
{
    const msc__cuda *self = (const msc__cuda *)device;
    void *argument; /* the driver only reads what is there, and does not say so */
    msc_status status = msc__cuda_enter(self, err);

    if (status != MSC_OK)
        return status;
    MSC__ASSERT(what->kernel != NULL && what->groups > 0 && what->threads > 0);
    memcpy(&argument, &what->argument, sizeof argument);
    status = msc__cuda_check(&self->driver,
                             self->driver.launch(what->kernel, what->groups, 1, 1, what->threads, 1, 1, 0,
                                                 stream, &argument, NULL),
                             err, "run a kernel of %u groups of %u threads on stream %p", what->groups,
                             what->threads, stream);
    msc__cuda_leave(self);
    return status;
}

void msc__cuda_programs_end(msc__cuda *self)
{
    bool inside = self->programs != NULL && msc__cuda_enter(self, NULL) == MSC_OK;

    while (self->programs != NULL) {
        msc__cuda_program *program = self->programs;

        self->programs = program->next;
        if (inside)
            (void)self->driver.module_unload(program->module);
        msc__free(self->device.ctx, program, sizeof *program);
    }
    if (inside)
        msc__cuda_leave(self);
}
