/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file device_internal.h
 * What a backend must provide, and the calls that the engines make.
 *
 * Rules for every slot: result pointers are never NULL; `err` may be; nothing is allocated except where the
 * name says create; every slot may be called from any thread at any time, and slots of one device from several
 * threads at once (a stream by one thread at a time). An error leaves the device usable. A backend makes its
 * own context current where its driver needs that, and puts back what was.
 *
 * Memory: create and destroy use the device's msc_context, which one thread uses at a time. No other slot does.
 *
 * Streams that a program hands over (`void *`, NULL: default) are never destroyed here. Streams and events that
 * are created here are used only with the device that created them.
 *
 * Failures that show late: a copy that was submitted may fail. The first event recorded behind it on its stream
 * says so, each time it is asked, until it is recorded again; a wait for that event only orders. So a caller that
 * wants to know about a copy asks an event that was recorded behind it with no other record between. A card
 * that fails in such a way mostly fails in everything that follows.
 *
 * Fork: a child process has neither the threads nor the driver's state of its parent. There, every slot that
 * returns a status returns ESTATE, and those that destroy give back memory of the process and nothing else.
 */
#ifndef MSC_DEVICE_INTERNAL_H
#define MSC_DEVICE_INTERNAL_H

#include "memscale/device.h"

/** Where a copy goes: from the device, or to it. The host device does the same for both. */
typedef enum msc_copy_kind { MSC_COPY_OUT, MSC_COPY_IN } msc_copy_kind;

/** A text for a device to compile. Both strings live as long as the program does: for ever, where they are constants. */
typedef struct msc_program_text {
    const char *name; /* for the compiler's messages */
    const char *text;
} msc_program_text;

/** A kernel to run: `groups` times `threads` threads, which get one argument. */
typedef struct msc_launch {
    void *kernel;
    uint32_t groups; /* 1 … 2^31 - 1 */
    uint32_t threads;
    const void *argument; /* as the kernel declares it; read before the call returns */
} msc_launch;

/** The slots of a backend. All are required, except where a default is named. */
typedef struct msc_device_ops {
    /** Gives everything back. The streams and events are gone by then. */
    void (*destroy)(msc_device *device);

    msc_status (*memory_now)(msc_device *device, msc_device_memory *out, msc_error *err);

    /** Device memory, aligned to 512 bytes; for tests and arenas. EDEVMEM where there is none. */
    msc_status (*memory_create)(msc_device *device, uint64_t bytes, void **out, msc_error *err);
    void (*memory_destroy)(msc_device *device, void *memory, uint64_t bytes);

    /**
     * Page-locks host memory, so that copies run beside the program and at the link's full speed. `start` is
     * aligned to a page. ENOMEM with the reason and the limit (`ulimit -l`) where the system refuses.
     * `unpin` gets what `pin` got. Default NULL: EUNSUPPORTED.
     */
    msc_status (*pin)(msc_device *device, void *start, uint64_t bytes, msc_error *err);
    void (*unpin)(msc_device *device, void *start, uint64_t bytes);

    /** A stream of our own that does not wait for the default stream. `stream_destroy` ends its work first. */
    msc_status (*stream_create)(msc_device *device, void **out, msc_error *err);
    void (*stream_destroy)(msc_device *device, void *stream);

    /** Blocks until all that `stream` was given is over, done or failed. For where memory of a copy is about to go and
        no event could be recorded behind it, or waited for. From any thread. NULL: the default one. */
    void (*stream_finish)(msc_device *device, void *stream);

    /** An event without timing. An event that was never recorded counts as complete. */
    msc_status (*event_create)(msc_device *device, void **out, msc_error *err);
    void (*event_destroy)(msc_device *device, void *event);

    /** The event is complete when all that `stream` was given before this call is. May be recorded again. */
    msc_status (*event_record)(msc_device *device, void *event, void *stream, msc_error *err);

    /** What `stream` gets after this call waits for the event's last record before this call: a record that
        comes later changes nothing. Does not block the caller, except on the host's default stream, which is the
        caller. */
    msc_status (*stream_wait)(msc_device *device, void *stream, void *event, msc_error *err);

    /** MSC_OK: complete; MSC_EAGAIN (without a message): not yet; otherwise why work before it failed. */
    msc_status (*event_query)(msc_device *device, void *event, msc_error *err);

    /** Blocks until the event is complete; then as `event_query`. */
    msc_status (*event_wait)(msc_device *device, void *event, msc_error *err);

    /**
     * Submits a copy of `bytes` > 0 to a stream of our own. Both places must stay as they are until an event
     * recorded behind it is complete. A copy from or to host memory that is not pinned may block the caller;
     * so may one to a stream whose queue is full.
     */
    msc_status (*copy)(msc_device *device, void *to, const void *from, uint64_t bytes, msc_copy_kind kind,
                       void *stream, msc_error *err);

    /**
     * Compiles a text and loads it, each operation of floats rounded once and none fused; or finds what it has made of the
     * same text (the same address) before. The program stays until the device goes.
     * EUNSUPPORTED where the compiler is missing or too old, with what to install. Default NULL: EUNSUPPORTED.
     */
    msc_status (*program_create)(msc_device *device, const msc_program_text *text, void **out,
                                 msc_error *err);

    /** The kernel of that name, which goes with its program. With `program_create`, as is `launch`. */
    msc_status (*kernel_find)(msc_device *device, void *program, const char *name, void **out,
                              msc_error *err);

    /** Submits a kernel to a stream; NULL: the default one. */
    msc_status (*launch)(msc_device *device, const msc_launch *what, void *stream, msc_error *err);
} msc_device_ops;

/** Every backend's object begins with this. */
struct msc_device {
    const msc_device_ops *ops;
    msc_context *ctx;
    msc_device_kind kind;
    uint32_t process; /* `msc__fork_count` where it was created */
    char name[256];
};

/** Fills the common part; the object is zeroed otherwise. */
void msc__device_init(msc_device *device, const msc_device_ops *ops, msc_context *ctx, msc_device_kind kind);

/** MSC_OK in the process that created the device, ESTATE in one that was forked from it. */
msc_status msc__device_check_process(const msc_device *device, msc_error *err);

/** Opens the backends. `options` are checked. */
msc_status msc__device_host_create(msc_context *ctx, const msc_device_options *options, msc_device **out,
                                   msc_error *err);
msc_status msc__device_cuda_create(msc_context *ctx, const msc_device_options *options, msc_device **out,
                                   msc_error *err);

#endif /* MSC_DEVICE_INTERNAL_H */
