/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Launches of MemScale's own kernels. Their text, compiled for the host, and the check of what they are given are those
 * of the C tests (tests/fake_cuda/fake_kernels.c, fake_fingerprint.c), which ask for blocks of a card by the two functions below.
 */
#include "kernels.h"

#include "card.h"
#include "fake_cuda/fake_kernels.h"
#include "fake_cuda/fake_objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct launch {
    const fake_kernel *kernel;
    uint32_t groups;
    _Alignas(16) unsigned char argument[];
} launch;

static _Thread_local const launch *noting; /* whose arrays are noted as it is submitted */
static _Thread_local card_stream *noting_stream;

/* What holds these bytes: any address but NULL will do. The check of an argument asks for each array of it, so the arrays
 * are known here, but not which of them are only read. */
void *fake_holder(fake_kind kind, const void *at, uint64_t bytes)
{
    bool held = card_holds(at, bytes);

    (void)kind;
    if (held && noting != NULL) {
        held = card_submit_access(noting_stream, noting->kernel->name, at, bytes, true);
    }
    return held ? (void *)(uintptr_t)at : NULL;
}

bool fake_find(const void *handle, fake_kind kind, int which, fake_object *out)
{
    (void)kind;
    (void)which;
    (void)out;
    return handle != NULL;
}

static void do_nothing(const void *argument, uint32_t groups)
{
    (void)argument;
    (void)groups;
}

static const char *no_fault(const void *argument, int card)
{
    (void)argument;
    (void)card;
    return NULL;
}

/* One that PyTorch compiles at run time: as all of its kernels, it does nothing. */
static const fake_kernel of_pytorch = {"a kernel of PyTorch", 0, do_nothing, no_fault};

const void *kernel_named(const char *name)
{
    const fake_kernel *ours = fake_kernel_named(name);

    return ours != NULL || strncmp(name, "msc_", 4) == 0 ? ours : &of_pytorch;
}

static void run(void *argument)
{
    const launch *what = argument;

    what->kernel->run(what->argument, what->groups);
}

bool kernel_launch(const void *kernel, uint32_t groups, uint32_t threads, const void *argument,
                   card_stream *stream)
{
    const fake_kernel *known = kernel;
    bool sized = known == &of_pytorch || (threads == fake_kernel_threads && groups > 0);
    const char *fault = sized ? known->fault(argument, 0) : "wrong size";
    size_t bytes = sizeof(launch) + known->argument_bytes;
    launch *what;

    if (fault != NULL) {
        fprintf(stderr, "stand-in CUDA: launch of %s: %s\n", known->name, fault);
        return false;
    }
    what = aligned_alloc(16, (bytes + 15) / 16 * 16);
    what->kernel = known;
    what->groups = groups;
    memcpy(what->argument, argument, known->argument_bytes);
    card_submit_call(stream, run, what, bytes);
    noting = what;
    noting_stream = stream;
    fault = known->fault(argument, 0);
    noting = NULL;
    free(what);
    return fault == NULL;
}
