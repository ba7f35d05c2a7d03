/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs of host memory.
 *
 *      slabs      0: shared          1: large         2: (gone)     3: large
 *               [##.#####..#....]   [##########]      empty        [......]
 *                 small blocks       one block                      room for one as large
 *
 * Two kinds, so that neither spoils the other. A small block (SMALL_MOST at most) shares a slab of SLAB_BYTES with
 * others; what is left over at a slab's end is smaller than one block, an eighth of the slab at worst. A large
 * block gets a slab of its own size, to the page, and leaves nothing over; where its slab stays behind empty, the
 * next block of the size fits again, which small ones in it would prevent. Only when there is no new slab to be had does a
 * block go wherever it fits.
 *
 * `room` is a bound: no range of more bytes is free in the slab. It is lowered when a slab had to refuse, and lifted
 * to the whole slab when a block comes back. So most slabs are passed over with one comparison.
 *
 * How the memory is mapped:
 *   - private and anonymous, and without MAP_NORESERVE: under strict overcommit the system refuses now, with an
 *     error that reaches the user, and not later by ending the process;
 *   - without MAP_POPULATE: it hides failure, and pinning brings all pages in anyway; unpinned memory is brought in
 *     by the first step's copies, and only as far as blocks reach;
 *   - huge pages, if the system gives any: a slab is 32 of them instead of 16,384 small pages, which made its
 *     first touch seven times as fast where it was tried (about 10 ms instead of 75);
 *   - not in forked children, such as the workers of a data loader: copy-on-write would give one of the two
 *     processes other pages than those which the device knows, and a fork need not copy the tables of memory
 *     that only we use.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#endif
#include "offload/offload_slabs.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/array.h"
#include "base/bytes.h"
#include "base/error.h"
#include "offload/offload_ranges.h"

/*
 * Large enough that the fixed cost of a mapping and of a slab's records (8 KiB, 0.01 %) vanishes and that
 * 100 GB of small blocks are 1,500 slabs to look through; small enough that a program which offloads little loses
 * little, and that pinning one, some 10 ms, does not show in a step. A multiple of a huge page.
 */
#define SLAB_BYTES (UINT64_C(64) << 20)
#define SMALL_MOST (SLAB_BYTES / 8)

typedef struct slab {
    char *memory; /* NULL: this number is free */
    msc__ranges *ranges;
    uint64_t bytes;
    uint64_t room; /* no free range is larger */
    bool shared;   /* for small blocks */
} slab;

struct msc__slabs {
    msc_context *ctx;
    msc_device *device; /* NULL: pageable */
    uint64_t limit_bytes;
    uint64_t page_bytes;
    msc__array table; /* of slab, by number */
    bool stopped;     /* no new slabs */
    msc__slabs_use use;
};

static slab *at(const msc__slabs *slabs, uint32_t i)
{
    return (slab *)slabs->table.items + i;
}

/* ---- slabs --------------------------------------------------------------------------------------- */

static msc_status map(msc__slabs *slabs, slab *one, msc_error *err)
{
    void *memory;
    msc_status status;
    int reason;

    memory = mmap(NULL, (size_t)one->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        reason = errno;
        status =
            msc__fail(err, MSC_ENOMEM,
                      "cannot map %llu bytes of host memory, %llu are mapped: the system said %d; lower the "
                      "limit of host memory for offloading",
                      (unsigned long long)one->bytes, (unsigned long long)slabs->use.mapped_bytes, reason);
        if (err != NULL)
            err->driver_code = reason;
        return status;
    }
#ifdef MADV_HUGEPAGE
    (void)madvise(memory, (size_t)one->bytes, MADV_HUGEPAGE); /* a wish */
#endif
#ifdef MADV_DONTFORK
    (void)madvise(memory, (size_t)one->bytes, MADV_DONTFORK);
#endif
    if (slabs->device != NULL) {
        status = slabs->device->ops->pin(slabs->device, memory, one->bytes, err);
        if (status != MSC_OK) {
            (void)munmap(memory, (size_t)one->bytes);
            return status;
        }
    }
    one->memory = memory;
    return MSC_OK;
}

static void unmap(msc__slabs *slabs, slab *one)
{
    if (one->memory != NULL) {
        if (slabs->device != NULL)
            slabs->device->ops->unpin(slabs->device, one->memory, one->bytes);
        (void)munmap(one->memory, (size_t)one->bytes);
        slabs->use.mapped_bytes -= one->bytes;
    }
    msc__ranges_destroy(one->ranges);
    *one = (slab){.memory = NULL};
}

/* A number that no slab has, with a place in the table. */
static msc_status free_number(msc__slabs *slabs, uint32_t *number, msc_error *err)
{
    uint32_t i;

    for (i = 0; i < slabs->table.count; i++)
        if (at(slabs, i)->memory == NULL)
            break;
    *number = i;
    if (i < slabs->table.count)
        return MSC_OK;
    return msc__array_push(slabs->ctx, &slabs->table, sizeof(slab), &(slab){.memory = NULL}, err);
}

/* A new slab with room for `bytes`. EAGAIN: the limit leaves less, or there shall be no more. */
static msc_status add_slab(msc__slabs *slabs, uint64_t bytes, uint32_t *number, msc_error *err)
{
    uint64_t left = slabs->limit_bytes - slabs->use.mapped_bytes;
    slab made = {.bytes = msc__round_up_u64(bytes, slabs->page_bytes), .shared = bytes <= SMALL_MOST};
    msc_status status;

    if (slabs->stopped || made.bytes > left)
        return MSC_EAGAIN;
    if (made.shared)
        made.bytes = left < SLAB_BYTES ? left : SLAB_BYTES;
    made.room = made.bytes;
    status = free_number(slabs, number, err);
    if (status == MSC_OK)
        status = msc__ranges_create(slabs->ctx, made.bytes, MSC__SLAB_ALIGNMENT, &made.ranges, err);
    if (status == MSC_OK)
        status = map(slabs, &made, err);
    if (status != MSC_OK) {
        msc__ranges_destroy(made.ranges);
        return status;
    }
    *at(slabs, *number) = made;
    slabs->use.mapped_bytes += made.bytes;
    if (slabs->use.mapped_bytes > slabs->use.mapped_peak_bytes)
        slabs->use.mapped_peak_bytes = slabs->use.mapped_bytes;
    return MSC_OK;
}

/* ---- blocks -------------------------------------------------------------------------------------- */

/* Takes a block out of one slab. EAGAIN: it has no room, which is remembered. */
static msc_status take_from(msc__slabs *slabs, uint32_t number, uint64_t bytes, msc__slab_block *out,
                            msc_error *err)
{
    slab *one = at(slabs, number);
    uint64_t start;
    uint32_t range;
    msc_status status = msc__ranges_take(one->ranges, bytes, &start, &range, err);

    if (status == MSC_EAGAIN)
        one->room = bytes - 1;
    if (status != MSC_OK)
        return status;
    *out = (msc__slab_block){.memory = one->memory + start, .slab = number, .range = range};
    slabs->use.taken_bytes += msc__ranges_size_of(one->ranges, range);
    if (slabs->use.taken_bytes > slabs->use.taken_peak_bytes)
        slabs->use.taken_peak_bytes = slabs->use.taken_bytes;
    slabs->use.block_count++;
    return MSC_OK;
}

/* The smallest slab that may have room, the first among equals; of the right kind, or of any. */
static uint32_t candidate(const msc__slabs *slabs, uint64_t bytes, bool any_kind)
{
    bool small = bytes <= SMALL_MOST;
    uint32_t best = MSC_NONE;
    uint32_t i;

    for (i = 0; i < slabs->table.count; i++) {
        const slab *one = at(slabs, i);
        if (one->memory == NULL || one->room < bytes || (!any_kind && one->shared != small))
            continue;
        if (best == MSC_NONE || one->bytes < at(slabs, best)->bytes)
            best = i;
    }
    return best;
}

/* Tries the slabs that are there. Each that refuses is no candidate any more, so this ends. */
static msc_status take_somewhere(msc__slabs *slabs, uint64_t bytes, bool any_kind, msc__slab_block *out,
                                 msc_error *err)
{
    for (;;) {
        uint32_t number = candidate(slabs, bytes, any_kind);
        msc_status status = number == MSC_NONE ? MSC_EAGAIN : take_from(slabs, number, bytes, out, err);
        if (number == MSC_NONE || status != MSC_EAGAIN)
            return status;
    }
}

/* ---- what the header offers ---------------------------------------------------------------------- */

msc_status msc__slabs_create(msc_context *ctx, msc_device *device, uint64_t limit_bytes, msc__slabs **out,
                             msc_error *err)
{
    msc__slabs *slabs;

    *out = NULL;
    if (device != NULL && device->ops->pin == NULL)
        return msc__fail(err, MSC_EUNSUPPORTED, "device %s cannot pin host memory", device->name);
    slabs = msc__alloc(ctx, sizeof *slabs);
    if (slabs == NULL)
        return msc__fail_memory(err, "slabs", sizeof *slabs);
    slabs->ctx = ctx;
    slabs->device = device;
    slabs->page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    slabs->limit_bytes = limit_bytes - limit_bytes % slabs->page_bytes;
    *out = slabs;
    return MSC_OK;
}

void msc__slabs_destroy(msc__slabs *slabs)
{
    uint32_t i;

    if (slabs == NULL)
        return;
    for (i = 0; i < slabs->table.count; i++)
        unmap(slabs, at(slabs, i));
    msc__array_fini(slabs->ctx, &slabs->table, sizeof(slab));
    msc__free(slabs->ctx, slabs, sizeof *slabs);
}

msc_status msc__slabs_take(msc__slabs *slabs, uint64_t bytes, msc__slab_block *out, msc_error *err)
{
    msc_error reason; /* why there is no new slab; of no interest if there is room elsewhere */
    uint32_t number;
    msc_status status;

    *out = (msc__slab_block){.memory = NULL};
    if (bytes == 0)
        return msc__fail(err, MSC_EINVAL, "a block of 0 bytes");
    status = take_somewhere(slabs, bytes, false, out, err);
    if (status != MSC_EAGAIN)
        return status;
    status = add_slab(slabs, bytes, &number, &reason);
    if (status == MSC_OK)
        return take_from(slabs, number, bytes, out, err);
    if (take_somewhere(slabs, bytes, true, out, NULL) == MSC_OK)
        return MSC_OK;
    if (status != MSC_EAGAIN && err != NULL)
        *err = reason;
    return status;
}

void msc__slabs_stop(msc__slabs *slabs)
{
    slabs->stopped = true;
}

void msc__slabs_give(msc__slabs *slabs, msc__slab_block block)
{
    slab *one = at(slabs, block.slab);

    slabs->use.taken_bytes -= msc__ranges_size_of(one->ranges, block.range);
    slabs->use.block_count--;
    msc__ranges_give(one->ranges, block.range);
    one->room = one->bytes;
}

uint64_t msc__slabs_trim(msc__slabs *slabs)
{
    uint64_t before = slabs->use.mapped_bytes;
    uint32_t i;

    for (i = 0; i < slabs->table.count; i++) {
        slab *one = at(slabs, i);
        if (one->memory != NULL && msc__ranges_in_use(one->ranges).count == 0)
            unmap(slabs, one);
    }
    return before - slabs->use.mapped_bytes;
}

msc__slabs_use msc__slabs_in_use(const msc__slabs *slabs)
{
    return slabs->use;
}
