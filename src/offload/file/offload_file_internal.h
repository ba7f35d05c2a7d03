/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file offload_file_internal.h
 * Inside the file: what its parts share.
 *
 *      offload_file_handles.c   handles, slots, what offload_file.h offers
 *      offload_file_open.c      the file itself: how it is opened, whether it can be direct, its space
 *      offload_file_threads.c   bytes moved by threads
 *      offload_file_ring.c      bytes moved by io_uring
 */
#ifndef MSC_OFFLOAD_FILE_INTERNAL_H
#define MSC_OFFLOAD_FILE_INTERNAL_H

#include <stdatomic.h>
#include <sys/uio.h>

#include "offload/file/offload_file.h"

/* ---- for tests ------------------------------------------------------------------------------------ */

/** What the system is about to be asked for. */
typedef enum msc__file_wish {
    MSC__FILE_WISH_UNNAMED, /* a file without a name */
    MSC__FILE_WISH_DIRECT,  /* a direct write and read of `bytes` */
    MSC__FILE_WISH_SPACE,   /* room for `bytes` from `offset` on */
    MSC__FILE_WISH_RING,    /* an io_uring for `bytes` operations */
    MSC__FILE_WISH_WRITE,
    MSC__FILE_WISH_READ
} msc__file_wish;

/**
 * Stands between the file and the system. `ask` returns how many of the bytes the system shall be asked for: all,
 * fewer (the operation is then really a short one), or the negative number of an error, and then the system is
 * not asked. It may take its time where threads move the bytes. Called from several threads at once.
 */
typedef struct msc__file_censor {
    void *user;
    int64_t (*ask)(void *user, msc__file_wish wish, uint64_t bytes, uint64_t offset);
} msc__file_censor;

/** As `msc__file_create`. The censor must live as long as the file; NULL: the system alone decides. */
msc_status msc__file_create_censored(msc_context *ctx, const msc__file_options *options,
                                     const msc__file_censor *censor, msc__file **out, msc_error *err);

/* ---- the file ------------------------------------------------------------------------------------- */

/** One file, shared by its handles. */
typedef struct msc__file_body {
    msc_context *ctx;
    const msc__file_censor *censor; /* NULL in production */
    uint32_t handle_count;
    int fd;             /* through the page cache */
    int direct_fd;      /* past it; -1: there is no such way */
    uint32_t alignment; /* of memory and size on `direct_fd` */
    _Atomic uint64_t
        reserved;        /* partners: the checks in write and read; release and acquire, so that a thread that
                                  sees the size also finds the file that long */
    atomic_bool held;    /* see msc__file_facts; relaxed, it is only told */
    char directory[256]; /* for messages; cut off */
} msc__file_body;

/** Opens the file. Errors: EIO, ENOMEM. */
msc_status msc__file_body_create(msc_context *ctx, const msc__file_options *options,
                                 const msc__file_censor *censor, msc__file_body **out, msc_error *err);
void msc__file_body_destroy(msc__file_body *body);

/** Closes both descriptors. */
void msc__file_body_close(msc__file_body *body);

msc_status msc__file_body_reserve(msc__file_body *body, uint64_t bytes, msc_error *err);

/** Asks the censor, if there is one. */
int64_t msc__file_ask(const msc__file_body *body, msc__file_wish wish, uint64_t bytes, uint64_t offset);

/** `MSC_EIO`: "cannot <what> in <directory>: <the system's words> (<number>)", the number in `driver_code`. */
msc_status msc__file_fail(const msc__file_body *body, int number, const char *what, msc_error *err);

/* ---- operations ----------------------------------------------------------------------------------- */

/** One operation. */
typedef struct msc__file_slot {
    char *memory; /* what is left to be moved */
    uint64_t left;
    uint64_t offset;
    uint64_t bytes;      /* of the whole operation, for messages */
    struct iovec vector; /* io_uring: where the system looks while it works */
    int number;          /* the system's, of what went wrong; 0: nothing */
    bool writes;
    bool taken;
    bool over; /* threads: under their mutex */
} msc__file_slot;

/** A way to move bytes. */
typedef struct msc__file_mover {
    msc_status (*create)(msc__file *file, msc_error *err);
    void (*destroy)(msc__file *file);              /* nothing is in flight */
    void (*begin)(msc__file *file, uint32_t slot); /* what goes wrong shows when it is over */
    bool (*is_over)(msc__file *file, uint32_t slot);
    void (*wait)(msc__file *file, uint32_t slot);
} msc__file_mover;

/** A handle. */
struct msc__file {
    msc__file_body *body;
    const msc__file_mover *mover;
    void *mover_state;
    msc__file_slot *slots;
    uint32_t depth;
    uint32_t taken_count;
    msc__file_way way;
};

extern const msc__file_mover msc__file_threads;
extern const msc__file_mover msc__file_ring;

/**
 * Begins the next attempt of an operation: how many bytes, and on which descriptor. False: the operation is over
 * before it was tried.
 */
bool msc__file_attempt(const msc__file *file, msc__file_slot *slot, int *fd, size_t *bytes);

/** Ends an attempt: the bytes moved, or the negative number of an error. True: there must be another. */
bool msc__file_account(msc__file_slot *slot, int64_t result);

/** Does the whole operation on this thread. */
void msc__file_run(const msc__file *file, msc__file_slot *slot);

#endif /* MSC_OFFLOAD_FILE_INTERNAL_H */
