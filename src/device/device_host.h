/* SPDX-License-Identifier: Apache-2.0 */
/** @file device_host.h  Inside the host device: its streams, its faults, the machine's memory. */
#ifndef MSC_DEVICE_HOST_H
#define MSC_DEVICE_HOST_H

#include <stdbool.h>

#include "base/thread.h"
#include "device/device_internal.h"

/** Operations that a stream holds. A submitter waits while there are so many; a power of two. */
#define MSC__HOST_QUEUE 512u

typedef struct msc__host msc__host;
typedef struct msc__host_stream msc__host_stream;

/** A moment of a stream: when its first `position` operations are done. */
typedef struct msc__host_point {
    uint64_t stream;   /* its id; 0: the program's, where everything has happened already */
    uint64_t position; /* counted from 1 */
} msc__host_point;

/** Why a copy failed. Status OK: none did. */
typedef struct msc__host_failure {
    msc_status status;
    msc_copy_kind kind;
    uint64_t bytes;
    uint64_t number; /* of the copy */
} msc__host_failure;

typedef struct msc__host_event {
    msc__host_point point;     /* its last record; all zero: never recorded */
    msc__host_failure failure; /* of the work before that, once it is complete */
} msc__host_event;

typedef struct msc__host_copy {
    void *to;
    const void *from;
    uint64_t bytes;
    uint64_t
        number; /* counts the copies of the device from 0, in the order of submission; chance is drawn from it */
    msc_copy_kind kind;
} msc__host_copy;

/** The host device. */
struct msc__host {
    msc_device device; /* first */
    msc_device_faults faults;
    msc__mutex mutex;          /* over everything below, and over all streams and events */
    msc__cond progress;        /* some stream did an operation, or is gone */
    uint32_t waiting;          /* threads that wait for progress */
    msc__host_stream *streams; /* those that live, in no order */
    uint64_t last_stream;      /* ids given so far */
    uint64_t last_copy;        /* copies submitted so far */
    uint64_t pinned_bytes;
};

/* device_host_stream.c: slots of the vtable, and what they need at the start */
msc_status msc__host_streams_init(msc__host *host, msc_error *err);
void msc__host_streams_fini(msc__host *host);
msc_status msc__host_stream_create(msc_device *device, void **out, msc_error *err);
void msc__host_stream_finish(msc_device *device, void *stream);
void msc__host_stream_destroy(msc_device *device, void *stream);
msc_status msc__host_event_create(msc_device *device, void **out, msc_error *err);
void msc__host_event_destroy(msc_device *device, void *event);
msc_status msc__host_event_record(msc_device *device, void *event, void *stream, msc_error *err);
msc_status msc__host_stream_wait(msc_device *device, void *stream, void *event, msc_error *err);
msc_status msc__host_event_query(msc_device *device, void *event, msc_error *err);
msc_status msc__host_event_wait(msc_device *device, void *event, msc_error *err);
msc_status msc__host_copy_submit(msc_device *device, void *to, const void *from, uint64_t bytes,
                                 msc_copy_kind kind, void *stream, msc_error *err);

/* device_host_copy.c */

/** Whether copies take no time but their own, and none fails. */
bool msc__host_copies_plainly(const msc_device_faults *faults);

/** Copies, with the faults that `seed` and the copy's number decide. `failure` is left alone if it succeeds. */
void msc__host_copy_run(const msc_device_faults *faults, const msc__host_copy *copy,
                        msc__host_failure *failure);

/* device_host_memory.c */

/**
 * Memory of the machine, or of the control group (version 2) that this process is in, if that is less.
 *
 * @param root folder that holds `proc` and `sys`: "" for the machine's.
 * Errors: EIO (there is no meminfo, or it does not say).
 */
msc_status msc__host_memory_read(const char *root, msc_device_memory *out, msc_error *err);

#endif /* MSC_DEVICE_HOST_H */
