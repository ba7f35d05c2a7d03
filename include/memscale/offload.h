/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file offload.h
 * The offload engine: bytes leave the device during forward, and are back before backward needs them.
 *
 * A **block** is the copy of one piece of memory. Its life, and what the program does at each point:
 *
 *     put ──► the copy out runs ──► settle: the source may go ──► … ──► get ──► the copy back runs ──► arrive ──► drop
 *
 *   put      returns a ticket at once; the copy begins when the program's stream has made the source.
 *   settle   until then the source has to stay as it is, afterwards it may be freed or written.
 *   get      starts to copy the block back into memory that the program made.
 *   arrive   until then the destination is not to be read.
 *   drop     ends the block; its place is free again.
 *
 * A block lies in one of three **tiers**, the first that has room: pinned host memory, pageable host
 * memory, a file without a name. Each has a limit in bytes that holds at every moment, counted as what the
 * machine lost (mapped and pinned memory, reserved disk space), staging buffers included. On the host device
 * the file is the tier that saves memory; the others serve tests.
 *
 * **Nothing is lost.** A source is not settled before its copy is complete in its tier, so when a disk fails
 * the block moves to host memory if that has room, or else `settle` says EIO and the program still has its
 * tensor. A full disk shows when space is reserved, before a copy begins. Only a read that fails loses a block;
 * `arrive` says so.
 *
 * **Order.** Streams are those of device.h. The engine's copies wait for what the program's stream had been
 * given before `put` and `get`, and the program's stream waits in `settle` and `arrive`; no other ordering is
 * needed, and a block is never read before it is written, however soon it is asked for. Any number of threads may call.
 *
 * **Prefetch.** `msc_offload_use` tells the engine that the program is about to need a block, and returns the
 * blocks to get now so that they are there in time. The order is that of the step before; in the first step,
 * and where a step differs, it is the reverse of the order of puts.
 *
 * @code
 *     msc_ticket ticket, soon[8];
 *
 *     msc_offload_put(engine, tensor, bytes, stream, &ticket, NULL);      // forward
 *     msc_offload_settle(engine, ticket, stream, NULL);                   // some layers later
 *     free_in_stream_order(tensor);
 *
 *     count = msc_offload_use(engine, ticket, soon, 8);                   // backward, for each block in turn
 *     for (i = 0; i < count; i++)
 *         msc_offload_get(engine, soon[i], destination_of(soon[i]), stream, NULL);
 *     msc_offload_arrive(engine, ticket, stream, NULL);                   // the destination has the bytes
 *     msc_offload_drop(engine, ticket);
 * @endcode
 */
#ifndef MEMSCALE_OFFLOAD_H
#define MEMSCALE_OFFLOAD_H

#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Where a block lies, fastest first. */
typedef enum msc_tier {
    MSC_TIER_PINNED, /**< pinned host memory: copies run beside the program */
    MSC_TIER_HOST,   /**< pageable host memory, through pinned staging buffers on a card */
    MSC_TIER_FILE,   /**< a file that no directory lists, gone with the process */
    MSC_TIER_COUNT
} msc_tier;

/** Names a block; 0 names none. A ticket is never used twice. */
typedef uint64_t msc_ticket;

/** Options of an engine. */
typedef struct msc_offload_options {
    size_t struct_bytes;                  /**< sizeof(msc_offload_options) */
    uint64_t limit_bytes[MSC_TIER_COUNT]; /**< most that each tier may take from the machine; 0: not used.
                                               Default: 0 all */
    const char *directory;                /**< where the file lies; NULL: /tmp. Copied */
    uint64_t chunk_bytes;                 /**< blocks pass staging in pieces of this size, a multiple of 4096.
                                               Default 2 MiB: larger ones gained nothing (bench/c/bench_offload.c) */
    uint32_t staging_count;               /**< staging buffers in each direction, 2 … 64. Default 4. They
                                               count for the pinned limit on a card, for the host limit elsewhere,
                                               where these are not 0 */
    uint32_t prefetch_count; /**< blocks on their way back at most, 0 … 1024. Default 8; 0: none before
                                               it is needed */
    uint64_t prefetch_bytes; /**< bytes on their way back at most. Default: 256 MiB */
    uint32_t trace_count;    /**< events kept for `msc_offload_trace`. Default 0: none */
    uint32_t debug;          /**< not 0: places are overwritten when they are freed, and blocks
                                               have checksums that are compared when they come back */
} msc_offload_options;

/** What an engine has done since it was created; bytes are those of blocks, not of staging. */
typedef struct msc_offload_counters {
    uint64_t put_count[MSC_TIER_COUNT];
    uint64_t out_bytes[MSC_TIER_COUNT];  /**< that arrived in the tier */
    uint64_t in_bytes[MSC_TIER_COUNT];   /**< that came back from it */
    uint64_t held_bytes[MSC_TIER_COUNT]; /**< blocks in the tier now */
    uint64_t held_peak_bytes[MSC_TIER_COUNT];
    uint64_t taken_bytes[MSC_TIER_COUNT]; /**< taken from the machine now; never above the limit */
    uint64_t staging_bytes;               /**< host memory of the staging buffers, part of `taken_bytes` */
    uint64_t table_bytes;                 /**< host memory of the engine's tables: blocks, queues, events */
    uint64_t refused_count;               /**< puts that no tier had room for */
    uint64_t moved_count;                 /**< blocks that went to host memory because the file failed */
    uint64_t failed_count;                /**< blocks whose copy out failed; the program kept the source */
    uint64_t lost_count;                  /**< blocks that could not be read back */
    uint64_t prefetched_count;            /**< blocks that were there when they were used */
    uint64_t late_count;                  /**< blocks that were asked for in time and not there yet */
    uint64_t missed_count;                /**< blocks that nobody had asked for before they were used */
    uint64_t settle_wait_ns;              /**< that callers spent waiting for copies out */
    uint64_t arrive_wait_ns;              /**< that callers spent waiting for copies back */
    uint64_t step_count;
    uint64_t reorder_count; /**< steps whose order was not that of the step before */
    uint32_t block_count;   /**< blocks now */
} msc_offload_counters;

/** What happened between two moments. */
typedef enum msc_offload_event_kind {
    MSC_OFFLOAD_OUT,         /**< copy out, from its beginning until it is in its tier */
    MSC_OFFLOAD_IN,          /**< copy back, likewise */
    MSC_OFFLOAD_WAIT_SETTLE, /**< the program waited for a copy out */
    MSC_OFFLOAD_WAIT_ARRIVE, /**< the program waited for a copy back */
    MSC_OFFLOAD_DROP,        /**< the block ended and its place is free; takes no time */
    MSC_OFFLOAD_EVENT_COUNT
} msc_offload_event_kind;

typedef struct msc_offload_event {
    int64_t begin_ns; /**< since the engine was created */
    int64_t end_ns;
    uint64_t bytes;
    msc_ticket ticket;
    msc_offload_event_kind kind;
    msc_tier tier;
} msc_offload_event;

typedef struct msc_offload msc_offload;

/** Every default, for a struct of `struct_bytes`. */
MSC_API void msc_offload_options_init(msc_offload_options *options, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_offload_options msc_offload_options_default(void)
{
    msc_offload_options options;

    msc_offload_options_init(&options, sizeof options);
    return options;
}

/**
 * Creates an engine and its two threads, one for each direction.
 *
 * @param ctx     the engine's own until it ends: nothing else may use it meanwhile.
 * @param device  outlives the engine.
 * @param out     the caller owns the result and ends it with `msc_offload_destroy`.
 * Errors: EINVAL (names the field), EIO (the directory), ENOMEM, EDRIVER.
 * Threads: all other functions may be called from any number of threads, except `destroy`. A child of
 * `fork` must not use its parent's engine: calls say ESTATE there, and `destroy` closes the child's descriptors of
 * the file and leaves all else alone. A child that lives on without it keeps the file's space taken.
 */
MSC_API MSC_NODISCARD msc_status msc_offload_create(msc_context *ctx, msc_device *device,
                                                    const msc_offload_options *options, msc_offload **out,
                                                    msc_error *err);

/** Ends the copies under way, forgets all blocks, gives everything back. NULL is accepted. */
MSC_API void msc_offload_destroy(msc_offload *engine);

/**
 * Starts to copy `bytes` > 0 at `source` out of the device; a few small blocks may wait until one of them is asked for.
 *
 * @param stream where the source was made; the copy waits for what it was given before this call.
 * @param out    names the block.
 * Errors: EINVAL; EAGAIN (no tier has room for it, and `err` says which limit: keep the source, nothing has
 * happened); ESTATE. Where the system refuses to pin or the disk is full, later tiers are tried.
 * Cost: does not wait for copies and, once a step has run, allocates nothing. Where a tier grows, it asks the system
 * for memory or disk space, which takes milliseconds: other calls go on meanwhile.
 */
MSC_API MSC_NODISCARD msc_status msc_offload_put(msc_offload *engine, const void *source, uint64_t bytes,
                                                 void *stream, msc_ticket *out, msc_error *err);

/**
 * As `put`, for a caller that holds a lock of its own, where that need not ask the system.
 * Errors: as `put`; ETIMEDOUT (no message: it has to, and nothing has happened: call `put`, without that lock).
 */
MSC_API MSC_NODISCARD msc_status msc_offload_put_now(msc_offload *engine, const void *source, uint64_t bytes,
                                                     void *stream, msc_ticket *out, msc_error *err);

/**
 * Makes `stream` wait until the block is in its tier. After that, in stream order, the source may be freed.
 *
 * Blocks the caller where the tier is not pinned memory, and on the host.
 * Errors: EIO, EDRIVER (the copy failed and the source is all there is; the block is only good for `drop`);
 * EINVAL (no such block); ESTATE.
 */
MSC_API MSC_NODISCARD msc_status msc_offload_settle(msc_offload *engine, msc_ticket ticket, void *stream,
                                                    msc_error *err);

/** As `settle`, without waiting and for no stream: MSC_OK means that the source may be freed by anybody.
    EAGAIN (no message): not yet. */
MSC_API MSC_NODISCARD msc_status msc_offload_settled(msc_offload *engine, msc_ticket ticket, msc_error *err);

/** As `settled` for each of `count` tickets up to the first that is not: returns how many are. */
MSC_API uint32_t msc_offload_settled_of(msc_offload *engine, const msc_ticket *tickets, uint32_t count);

/**
 * Starts to copy a block back; a few small blocks may wait until one of them is asked for, while others that were
 * asked for ahead of their use are not used yet.
 *
 * @param destination as many bytes as were put.
 * @param stream      where the destination was made; the copy waits for what it was given before this call.
 * Errors: EINVAL; ESTATE (an earlier `get` of the block has not arrived; its copy out failed; fork).
 * Cost: does not wait, allocates nothing.
 */
MSC_API MSC_NODISCARD msc_status msc_offload_get(msc_offload *engine, msc_ticket ticket, void *destination,
                                                 void *stream, msc_error *err);

/**
 * As `get`, into host memory of any kind, for a program that computes there what left a device. The lane copies it when
 * the block is in its tier, and nothing passes the device.
 *
 * @param destination as many bytes as were put, the caller's again after `arrive`, whose stream does not matter then.
 * Errors: as `get`.
 */
MSC_API MSC_NODISCARD msc_status msc_offload_get_to_host(msc_offload *engine, msc_ticket ticket,
                                                         void *destination, msc_error *err);

/**
 * Makes `stream` wait until the latest `get` has filled its destination; on the host the caller waits. A block
 * may be got again afterwards, any number of times.
 * Errors: EIO, EDRIVER (the bytes could not be read: the destination is not to be used); ESTATE (no `get`).
 */
MSC_API MSC_NODISCARD msc_status msc_offload_arrive(msc_offload *engine, msc_ticket ticket, void *stream,
                                                    msc_error *err);

/** As `arrive`, without waiting on the host. EAGAIN (no message): not yet. */
MSC_API MSC_NODISCARD msc_status msc_offload_arrived(msc_offload *engine, msc_ticket ticket, void *stream,
                                                     msc_error *err);

/**
 * Ends a block. What has not begun is not done any more; what is running, or begins together with what is (small
 * blocks, 256 KiB of them at most), is waited for, so source and
 * destination may go after this call in the order of no stream in particular. 0 and old tickets are accepted.
 */
MSC_API void msc_offload_drop(msc_offload *engine, msc_ticket ticket);

/**
 * Tells that the program is about to use a block, and asks what to get now.
 *
 * @param soon up to `most` tickets, soonest first, each to be passed to `msc_offload_get`: `ticket` itself, if it
 *             was not asked for yet, and those that follow within the prefetch window.
 * @return how many there are.
 */
MSC_API uint32_t msc_offload_use(msc_offload *engine, msc_ticket ticket, msc_ticket *soon, uint32_t most);

/**
 * As `msc_offload_use`; and, where the block was got ahead of this use, as `msc_offload_arrived`.
 *
 * @param stream as in `arrive`.
 * @param here   not 0: arrived; 0: it has to be got, or `arrive` tells more.
 */
MSC_API uint32_t msc_offload_use_on(msc_offload *engine, msc_ticket ticket, void *stream, msc_ticket *soon,
                                    uint32_t most, uint32_t *here);

/**
 * The blocks that are put from now on belong together, such as those of one module's forward. Prefetch does not go
 * beyond the group of the block in use, so nothing is back on the device before its group is needed.
 */
MSC_API void msc_offload_group(msc_offload *engine);

/**
 * As `msc_offload_group`, and prefetch may go into one group more: while a block of the group that begins here is the
 * latest one used, blocks of the group that is expected to be used next may come back early, `ahead_bytes` of them at
 * most. 0: as `msc_offload_group`.
 *
 * What a plan can count on: `use` names a block of the next group only if it fits into the `ahead_bytes` of the group in
 * use, together with all blocks of other groups that were named and are not yet used or dropped. So what was named
 * before its group began to be used is never more than the largest `ahead_bytes`, in whatever order blocks are used;
 * and while the order is the expected one, never more than those of the group in use. What a program leaves
 * behind when it goes on elsewhere counts until it is used or dropped. Nothing is named of the group after the
 * next, and prefetch_count and prefetch_bytes are over all.
 */
MSC_API void msc_offload_group_ahead(msc_offload *engine, uint64_t ahead_bytes);

/** A training step begins. Without this call a step begins with the first put after all blocks were dropped. Where
    no block was used since the last one (an evaluation, an exception in forward), the expected order stays. */
MSC_API void msc_offload_step(msc_offload *engine);

/** Bytes of a block; 0 if there is no such block. */
MSC_API uint64_t msc_offload_bytes_of(msc_offload *engine, msc_ticket ticket);

/** Counters now, for a struct of `out_bytes`. */
MSC_API void msc_offload_counters_read(msc_offload *engine, msc_offload_counters *out, size_t out_bytes);

/** The same for the struct of this header. */
static inline msc_offload_counters msc_offload_counters_now(msc_offload *engine)
{
    msc_offload_counters counters;

    msc_offload_counters_read(engine, &counters, sizeof counters);
    return counters;
}

/**
 * Copies the latest events, oldest first, at most `most` and `trace_count`. Returns how many. The same events are
 * returned again by the next call.
 */
MSC_API uint32_t msc_offload_trace(msc_offload *engine, msc_offload_event *out, uint32_t most);

/** One line about a tier that is not used although it was asked for, such as memory that cannot be pinned;
    "" if there is nothing to say. Lives as long as the engine. */
MSC_API const char *msc_offload_note(msc_offload *engine, msc_tier tier);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_OFFLOAD_H */
