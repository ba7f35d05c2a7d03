/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file fake_kernels.h
 * The library's kernels on a fake card: their text compiled for the host, and launches that happen as late as a stream
 * allows.
 */
#ifndef MSC_FAKE_KERNELS_H
#define MSC_FAKE_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fake_kernel {
    const char *name;
    size_t argument_bytes;
    /** Every group of threads, one after another. */
    void (*run)(const void *argument, uint32_t groups);
    /** Why a card would fault at what the argument names, or NULL. */
    const char *(*fault)(const void *argument, int card);
} fake_kernel;

/** Threads that every kernel was compiled for. */
extern const uint32_t fake_kernel_threads;

/** The kernel of src/fingerprint/cuda (fake_fingerprint.c); the others are in fake_kernels.c. */
extern const fake_kernel fake_fingerprint_kernel;

/** Why a card would fault at `count` numbers of `each` bytes, or NULL. None of 0 bytes does. */
const char *fake_fault_at(const void *at, uint64_t count, uint32_t each, int card);

/** NULL: there is none of that name. */
const fake_kernel *fake_kernel_named(const char *name);

/** Keeps a launch, with a copy of its argument, until something else happens on the stream. */
void fake_launch_add(void *host_stream, const fake_kernel *kernel, uint32_t groups, const void *argument);

/**
 * Keeps the record of an event, if launches are kept that come before it; else false. Who asks for the event, or lets a
 * stream wait for it, flushes it first.
 */
bool fake_launch_add_record(void *host_stream, void *host_event);

/** What the fake driver does for a kept record, and to end what a stream had before a launch. */
typedef struct fake_launch_calls {
    void (*finish)(int card, void *host_stream);
    void (*record)(int card, void *host_stream, void *host_event);
} fake_launch_calls;

/** Runs what is kept of a stream, in order. */
void fake_launch_flush(int card, void *host_stream, const fake_launch_calls *calls);

/** Runs what is kept of the stream that has a record of the event. */
void fake_launch_flush_event(int card, const void *host_event, const fake_launch_calls *calls);

#endif /* MSC_FAKE_KERNELS_H */
