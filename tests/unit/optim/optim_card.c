/* SPDX-License-Identifier: Apache-2.0 */
#include "optim_card.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD 0xA5
#define GUARD_BYTES 5u

msc_optim *card_optim;
msc_device *card_device;
void *card_stream;

static msc_context *ctx;
static unsigned char *image;
static unsigned char *guards; /* not 0: a byte between arrays */
static unsigned char *there;
static size_t used;
static void *event;
static msc_error err;

static void must(msc_status status)
{
    if (status != MSC_OK)
        fail_msg("%s: %s", msc_status_name(status), err.message);
}

static int give_up(const char *what)
{
    print_message("%s: %s\n", what, err.message);
    return CARD_SKIPPED;
}

int card_open(const char *library, const char *compiler)
{
    msc_device_options device = msc_device_options_default();
    msc_optim_options options = msc_optim_options_default();
    void *memory = NULL;
    msc_status status;

    device.kind = MSC_DEVICE_CUDA;
    device.library = library;
    device.compiler = compiler;
    if (msc_context_create(NULL, &ctx, &err) != MSC_OK)
        return 1;
    status = msc_device_create(ctx, &device, &card_device, &err);
    if (status == MSC_ENODEV && library == NULL)
        return give_up("no card");
    if (status != MSC_OK || card_device->ops->stream_create(card_device, &card_stream, &err) != MSC_OK)
        return fprintf(stderr, "%s\n", err.message) > 0;
    options.device = card_device;
    options.stream = card_stream;
    status = msc_optim_create(ctx, &options, &card_optim, &err);
    if (status == MSC_EUNSUPPORTED && library == NULL)
        return give_up("no compiler");
    if (status != MSC_OK ||
        card_device->ops->memory_create(card_device, CARD_BYTES, &memory, &err) != MSC_OK ||
        card_device->ops->event_create(card_device, &event, &err) != MSC_OK)
        return fprintf(stderr, "%s\n", err.message) > 0;
    there = memory;
    image = malloc(CARD_BYTES);
    guards = malloc(CARD_BYTES);
    return image == NULL || guards == NULL;
}

void card_close(void)
{
    msc_optim_destroy(card_optim);
    card_device->ops->event_destroy(card_device, event);
    card_device->ops->memory_destroy(card_device, there, CARD_BYTES);
    card_device->ops->stream_destroy(card_device, card_stream);
    msc_device_destroy(card_device);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    free(image);
    free(guards);
}

static void guard(size_t to)
{
    assert_true(to <= CARD_BYTES);
    memset(image + used, GUARD, to - used);
    memset(guards + used, 1, to - used);
    used = to;
}

void card_clear(void)
{
    used = 0;
}

void *card_place(const void *from, uint64_t count, uint32_t each)
{
    size_t bytes = (size_t)count * each;
    unsigned char *at;

    if (each == 0)
        return NULL;
    /* an odd number of numbers behind a boundary of 64 bytes */
    guard((used + GUARD_BYTES + 63) / 64 * 64 + (size_t)each * (1 + 2 * (used / 64 % 4)));
    assert_true(bytes + GUARD_BYTES <= CARD_BYTES - used);
    at = image + used;
    if (from != NULL)
        memcpy(at, from, bytes);
    else
        memset(at, 0, bytes);
    memset(guards + used, 0, bytes);
    used += bytes;
    guard(used + GUARD_BYTES);
    return at;
}

void *card_address(const void *at)
{
    return at != NULL ? there + ((const unsigned char *)at - image) : NULL;
}

static void wait_for_all(void)
{
    must(card_device->ops->event_record(card_device, event, card_stream, &err));
    must(card_device->ops->event_wait(card_device, event, &err));
}

void card_send(void)
{
    must(card_device->ops->copy(card_device, there, image, used, MSC_COPY_IN, card_stream, &err));
    wait_for_all();
}

void card_fetch(void)
{
    size_t i;

    must(card_device->ops->copy(card_device, image, there, used, MSC_COPY_OUT, card_stream, &err));
    wait_for_all();
    for (i = 0; i < used; i++)
        if (guards[i] != 0 && image[i] != GUARD)
            fail_msg("byte %zu of %zu, between arrays, has changed", i, used);
}

/* ---- tensors ------------------------------------------------------------------------------------------------ */

static void *mirror(const void *from, uint64_t bytes, uint64_t count)
{
    return card_place(from, bytes > 0 ? count : 0, bytes > 0 ? (uint32_t)(bytes / count) : 0);
}

fixture card_mirror(const fixture *of)
{
    fixture copy = *of;
    uint64_t blocks = (of->tensor.count + MSC_OPTIM_BLOCK - 1) / MSC_OPTIM_BLOCK;

    copy.tensor.gradient = mirror(of->tensor.gradient, of->sizes.gradient_bytes, of->tensor.count);
    copy.tensor.weight = mirror(of->tensor.weight, of->sizes.weight_bytes, of->tensor.count);
    copy.tensor.master = mirror(of->tensor.master, of->sizes.master_bytes, of->tensor.count);
    copy.tensor.moment1 = mirror(of->tensor.moment1, of->sizes.moment1_bytes, of->tensor.count);
    copy.tensor.moment2 = mirror(of->tensor.moment2, of->sizes.moment2_bytes, of->tensor.count);
    copy.tensor.scale1 = mirror(of->tensor.scale1, of->sizes.scale1_bytes, blocks);
    copy.tensor.scale2 = mirror(of->tensor.scale2, of->sizes.scale2_bytes, blocks);
    return copy;
}

msc_optim_tensor card_tensor(const fixture *mirror_of)
{
    msc_optim_tensor tensor = mirror_of->tensor;

    tensor.gradient = card_address(tensor.gradient);
    tensor.weight = card_address(tensor.weight);
    tensor.master = card_address(tensor.master);
    tensor.moment1 = card_address(tensor.moment1);
    tensor.moment2 = card_address(tensor.moment2);
    tensor.scale1 = card_address(tensor.scale1);
    tensor.scale2 = card_address(tensor.scale2);
    return tensor;
}
