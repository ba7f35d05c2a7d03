/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes moved by io_uring, through two system calls and the two rings that the kernel shares with us:
 *
 *      we    ──► entries[tail] ──► kernel        what shall be done; `tail` is ours, `head` the kernel's
 *      we    ◄── results[head] ◄── kernel        what was done; `head` is ours, `tail` the kernel's
 *
 * There is no library in between: what is needed of it is this page, and a package that was built where the
 * library is would not load where it is not. READV and WRITEV are used because every kernel with io_uring has them.
 *
 * Both rings have room for `depth`, so neither can be full: an operation has one entry or one result at a time.
 * Entries are handed over one by one, which costs a system call for each; of operations of a megabyte that is
 * nothing. The kernel passes on to its own threads what it could not do at once, so nobody waits for the disk here.
 *
 * A wait that the kernel refuses for good (a filter that came later, a descriptor that somebody closed) ends: results
 * still come into the shared ring by themselves, so they are looked for a while, without a call. After PATIENCE_NS
 * what is under way has failed with the kernel's number, and all that follows takes the plain way.
 *
 * Where the kernel's headers are too old to know it, and where the kernel refuses, the way is EUNSUPPORTED.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* syscall */
#endif
#include <errno.h>
#include <sys/syscall.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "offload/file/offload_file_internal.h"

#ifdef __NR_io_uring_setup
#include "base/thread.h"
#include <linux/io_uring.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PATIENCE_NS INT64_C(2000000000)
#define PAUSE_NS INT64_C(1000000)

typedef struct mapping {
    char *at;
    size_t bytes;
} mapping;

typedef struct ring {
    int fd;
    mapping submit, complete, entries_map;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *results;
    unsigned *submit_tail, *submit_array;
    unsigned submit_mask;
    unsigned *complete_head, *complete_tail;
    unsigned complete_mask;
    int broken; /* not 0: `enter` failed for good with this number, and nothing more is given to the ring */
} ring;

/* Returns what the system says, or the negative number of an error. */
static int enter(const ring *own, unsigned submit, unsigned complete)
{
    unsigned flags = complete > 0 ? IORING_ENTER_GETEVENTS : 0;
    long result = syscall(__NR_io_uring_enter, own->fd, submit, complete, flags, NULL, 0);

    return result < 0 ? -errno : (int)result;
}

/* ---- operations ----------------------------------------------------------------------------------- */

/* Hands an entry over. Returns 0, or the system's number where the kernel does not take it now. */
static int submit(ring *own, const struct io_uring_sqe *entry)
{
    unsigned tail = *own->submit_tail; /* plain: nobody else writes it */
    int result;

    own->entries[tail & own->submit_mask] = *entry;
    own->submit_array[tail & own->submit_mask] = tail & own->submit_mask;
    /* Release, partner: the kernel's acquire of the tail; it must see the entry. */
    __atomic_store_n(own->submit_tail, tail + 1, __ATOMIC_RELEASE);
    do
        result = enter(own, 1, 0);
    while (result == -EINTR);
    if (result == 1)
        return 0;
    /* The kernel looks at the ring only in `enter`, so what it did not take can be taken back. */
    __atomic_store_n(own->submit_tail, tail, __ATOMIC_RELEASE);
    return result < 0 ? -result : EAGAIN;
}

/* Hands an attempt over. False: the kernel does not take it now. */
static bool submit_attempt(ring *own, msc__file_slot *slot, uint32_t number, int fd, size_t bytes)
{
    struct io_uring_sqe entry;

    if (own->broken != 0)
        return false;
    slot->vector = (struct iovec){.iov_base = slot->memory, .iov_len = bytes};
    memset(&entry, 0, sizeof entry);
    entry.opcode = slot->writes ? IORING_OP_WRITEV : IORING_OP_READV;
    entry.fd = fd;
    entry.off = slot->offset;
    entry.addr = (uint64_t)(uintptr_t)&slot->vector;
    entry.len = 1;
    entry.user_data = number;
    return submit(own, &entry) == 0;
}

/* Goes on with an operation until an attempt is under way or it is over. */
static void proceed(msc__file *file, uint32_t number)
{
    msc__file_slot *slot = &file->slots[number];
    size_t bytes;
    int fd;

    if (msc__file_attempt(file, slot, &fd, &bytes)) {
        if (submit_attempt(file->mover_state, slot, number, fd, bytes))
            return;
        /* The kernel has no memory for it. Slow is better than lost. */
        msc__file_run(file, slot);
    }
    slot->over = true;
}

/* Takes a result. False: there is none. */
static bool take_result(ring *own, struct io_uring_cqe *out)
{
    unsigned head = *own->complete_head; /* plain: nobody else writes it */

    /* Acquire, partner: the kernel's release of the tail; the result, and the bytes it stands for, must be seen. */
    if (head == __atomic_load_n(own->complete_tail, __ATOMIC_ACQUIRE))
        return false;
    *out = own->results[head & own->complete_mask];
    /* Release, partner: the kernel's acquire of the head; it must not fill the place before we have read. */
    __atomic_store_n(own->complete_head, head + 1, __ATOMIC_RELEASE);
    return true;
}

/* Takes the results that are there. */
static void reap(msc__file *file)
{
    struct io_uring_cqe result;

    while (take_result(file->mover_state, &result)) {
        uint32_t number = (uint32_t)result.user_data;

        MSC__ASSERT(number < file->depth && file->slots[number].taken && !file->slots[number].over);
        if (msc__file_account(&file->slots[number], result.res))
            proceed(file, number);
        else
            file->slots[number].over = true;
    }
}

static void ring_begin(msc__file *file, uint32_t slot)
{
    proceed(file, slot);
}

static bool ring_is_over(msc__file *file, uint32_t slot)
{
    const ring *own = file->mover_state;

    if (!file->slots[slot].over && own->broken == 0)
        reap(file);
    return file->slots[slot].over;
}

/* What is under way has failed; a result that comes later is nobody's. */
static void give_up(msc__file *file, int number)
{
    ring *own = file->mover_state;
    uint32_t i;

    MSC__ASSERT(number > 0 && own->broken == 0);
    own->broken = number;
    for (i = 0; i < file->depth; i++) {
        msc__file_slot *slot = &file->slots[i];

        if (!slot->taken || slot->over)
            continue;
        slot->number = number;
        slot->over = true;
    }
}

static void ring_wait(msc__file *file, uint32_t slot)
{
    int64_t refused_ns = 0; /* since when; 0: it is not */

    while (!ring_is_over(file, slot)) {
        int result = enter(file->mover_state, 0, 1);
        int64_t now_ns = result < 0 && result != -EINTR ? msc__clock_ns() : 0;

        if (now_ns != 0 && refused_ns != 0 && now_ns - refused_ns > PATIENCE_NS)
            give_up(file, -result);
        else if (now_ns != 0)
            msc__sleep_ns(PAUSE_NS);
        if (now_ns == 0 || refused_ns == 0)
            refused_ns = now_ns;
    }
}

/* ---- the ring ------------------------------------------------------------------------------------- */

static bool map(ring *own, mapping *out, size_t bytes, uint64_t what)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, own->fd, (off_t)what);

    if (at == MAP_FAILED)
        return false;
    *out = (mapping){.at = at, .bytes = bytes};
    return true;
}

static void unmap(mapping *one)
{
    if (one->at != NULL)
        (void)munmap(one->at, one->bytes);
}

static void ring_destroy(msc__file *file)
{
    ring *own = file->mover_state;

    unmap(&own->submit);
    unmap(&own->complete);
    unmap(&own->entries_map);
    if (own->fd >= 0)
        (void)close(own->fd);
    msc__free(file->body->ctx, own, sizeof *own);
    file->mover_state = NULL;
}

/* Some sandboxes let a ring be made and forbid its use. Returns 0 or the system's number. */
static int try_out(ring *own)
{
    struct io_uring_sqe nothing;
    struct io_uring_cqe result;
    int number;

    memset(&nothing, 0, sizeof nothing);
    nothing.opcode = IORING_OP_NOP;
    number = submit(own, &nothing);
    while (number == 0 && !take_result(own, &result)) {
        number = -enter(own, 0, 1);
        if (number < 0 || number == EINTR)
            number = 0;
    }
    return number != 0 ? number : -result.res;
}

/* Makes the ring and maps its three parts. Returns 0 or the system's number. */
static int set_up(const msc__file *file, ring *own)
{
    int64_t asked = msc__file_ask(file->body, MSC__FILE_WISH_RING, file->depth, 0);
    struct io_uring_params params;

    memset(&params, 0, sizeof params);
    if (asked < 0)
        return (int)-asked;
    own->fd = (int)syscall(__NR_io_uring_setup, file->depth, &params); /* closed on exec by itself */
    if (own->fd < 0)
        return errno;
    if (!map(own, &own->submit, params.sq_off.array + params.sq_entries * sizeof(unsigned),
             IORING_OFF_SQ_RING) ||
        !map(own, &own->complete, params.cq_off.cqes + params.cq_entries * sizeof *own->results,
             IORING_OFF_CQ_RING) ||
        !map(own, &own->entries_map, params.sq_entries * sizeof *own->entries, IORING_OFF_SQES))
        return errno;
    own->entries = (struct io_uring_sqe *)(void *)own->entries_map.at;
    own->results = (struct io_uring_cqe *)(void *)(own->complete.at + params.cq_off.cqes);
    own->submit_tail = (unsigned *)(void *)(own->submit.at + params.sq_off.tail);
    own->submit_array = (unsigned *)(void *)(own->submit.at + params.sq_off.array);
    own->submit_mask = *(unsigned *)(void *)(own->submit.at + params.sq_off.ring_mask);
    own->complete_head = (unsigned *)(void *)(own->complete.at + params.cq_off.head);
    own->complete_tail = (unsigned *)(void *)(own->complete.at + params.cq_off.tail);
    own->complete_mask = *(unsigned *)(void *)(own->complete.at + params.cq_off.ring_mask);
    return try_out(own);
}

static msc_status ring_create(msc__file *file, msc_error *err)
{
    ring *own = msc__alloc(file->body->ctx, sizeof *own);
    int number;

    if (own == NULL)
        return msc__fail_memory(err, "an io_uring", sizeof *own);
    own->fd = -1;
    file->mover_state = own;
    number = set_up(file, own);
    if (number == 0)
        return MSC_OK;
    ring_destroy(file);
    (void)msc__fail(err, MSC_EUNSUPPORTED, "no io_uring for %u operations: the system said %d", file->depth,
                    number);
    if (err != NULL)
        err->driver_code = number;
    return MSC_EUNSUPPORTED;
}

#else /* headers of a kernel without io_uring */

static msc_status ring_create(msc__file *file, msc_error *err)
{
    (void)file;
    return msc__fail(err, MSC_EUNSUPPORTED, "built without io_uring");
}

/* The others are never called where `create` never succeeds. */
#define ring_destroy NULL
#define ring_begin NULL
#define ring_is_over NULL
#define ring_wait NULL

#endif

const msc__file_mover msc__file_ring = {
    .create = ring_create,
    .destroy = ring_destroy,
    .begin = ring_begin,
    .is_over = ring_is_over,
    .wait = ring_wait,
};
