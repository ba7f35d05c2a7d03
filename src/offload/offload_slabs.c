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
 * block go into what is left of others; and only when it fits into none do empty slabs of other sizes go, as few as it needs.
 *
 * One slab grows at a time. Its memory is mapped and pinned, and that of the empty ones given back, without the mutex: the
 * slab is entered in the table afterwards, and the empty ones are no candidates meanwhile. Only the thread that lets a
 * slab grow moves the table or reads `leaving` without the mutex.
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
#include "base/invariant.h"
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
    uint32_t block_count;
    bool shared;  /* for small blocks */
    bool leaving; /* empty, and about to be unmapped */
} slab;

/* A slab that is being made, and what its place costs. */
typedef struct growth {
    slab made;
    uint64_t freed_bytes; /* of the slabs that leave */
} growth;

struct msc__slabs {
    msc_context *ctx;
    msc_device *device; /* NULL: pageable */
    uint64_t limit_bytes;
    uint64_t page_bytes;
    msc__mutex *mutex;  /* released while the system is asked; NULL: one thread has all this */
    msc__cond *changed; /* broadcast when a slab has grown */
    bool growing;       /* a thread is asking the system */
    msc__array table;   /* of slab, by number */
    msc__slabs_use use;
};

static slab *at(const msc__slabs *slabs, uint32_t i)
{
    MSC__ASSERT(i < slabs->table.count);
    return (slab *)slabs->table.items + i;
}

/* ---- slabs --------------------------------------------------------------------------------------- */

static msc_status fail_to_map(const msc__slabs *slabs, uint64_t bytes, int reason, msc_error *err)
{
    msc_status status =
        msc__fail(err, MSC_ENOMEM,
                  "cannot map %llu bytes of host memory, %llu are mapped: the system said %d; lower the "
                  "limit of host memory for offloading",
                  (unsigned long long)bytes, (unsigned long long)slabs->use.mapped_bytes, reason);

    if (err != NULL)
        err->driver_code = reason;
    return status;
}

/* The mutex is not held. */
static msc_status map(const msc__slabs *slabs, slab *one, int *reason, msc_error *err)
{
    void *memory;
    msc_status status;

    memory = mmap(NULL, (size_t)one->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        *reason = errno;
        return MSC_ENOMEM;
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

/* Gives the memory back, and leaves the record. */
static void unmap(const msc__slabs *slabs, const slab *one)
{
    if (slabs->device != NULL)
        slabs->device->ops->unpin(slabs->device, one->memory, one->bytes);
    (void)munmap(one->memory, (size_t)one->bytes);
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

/* ---- empty slabs --------------------------------------------------------------------------------- */

static bool is_empty(const slab *one)
{
    return one->memory != NULL && !one->leaving && one->block_count == 0;
}

static uint64_t empty_bytes(const msc__slabs *slabs)
{
    uint64_t bytes = 0;
    uint32_t i;

    for (i = 0; i < slabs->table.count; i++)
        bytes += is_empty(at(slabs, i)) ? at(slabs, i)->bytes : 0;
    return bytes;
}

/* The smallest empty slab of `bytes` or more; where there is none, the largest. */
static slab *best_to_leave(const msc__slabs *slabs, uint64_t bytes)
{
    slab *best = NULL;
    uint32_t i;

    for (i = 0; i < slabs->table.count; i++) {
        slab *one = at(slabs, i);
        bool better = best == NULL;

        if (!is_empty(one))
            continue;
        if (!better && best->bytes >= bytes)
            better = one->bytes >= bytes && one->bytes < best->bytes;
        else if (!better)
            better = one->bytes > best->bytes;
        if (better)
            best = one;
    }
    return best;
}

/* Marks empty slabs of `bytes` or more in sum, which there are. Returns what they have. */
static uint64_t let_leave(msc__slabs *slabs, uint64_t bytes)
{
    uint64_t freed = 0;

    while (freed < bytes) {
        slab *one = best_to_leave(slabs, bytes - freed);

        MSC__ASSERT(one != NULL && is_empty(one));
        one->leaving = true;
        freed += one->bytes;
    }
    return freed;
}

/* They stay after all. */
static void keep_leaving(msc__slabs *slabs)
{
    uint32_t i;

    for (i = 0; i < slabs->table.count; i++)
        at(slabs, i)->leaving = false;
}

/* Gives back what leaves. The mutex is not held. */
static void unmap_leaving(const msc__slabs *slabs)
{
    uint32_t i;

    for (i = 0; i < slabs->table.count; i++)
        if (at(slabs, i)->leaving)
            unmap(slabs, at(slabs, i));
}

/* The records of what has left. */
static void forget_leaving(msc__slabs *slabs)
{
    uint32_t i;

    for (i = 0; i < slabs->table.count; i++) {
        slab *one = at(slabs, i);

        if (!one->leaving)
            continue;
        MSC__ASSERT(one->block_count == 0 && slabs->use.mapped_bytes >= one->bytes);
        slabs->use.mapped_bytes -= one->bytes;
        msc__ranges_destroy(one->ranges);
        *one = (slab){.memory = NULL};
    }
}

/* ---- growth -------------------------------------------------------------------------------------- */

/* Without the mutex: what takes milliseconds. */
static msc_status ask_system(msc__slabs *slabs, growth *grown, msc_error *err)
{
    int reason = 0;
    msc_status status;

    MSC__ASSERT(!slabs->growing && grown->made.memory == NULL);
    slabs->growing = true;
    if (slabs->mutex != NULL)
        msc__mutex_unlock(slabs->mutex);
    if (grown->freed_bytes > 0)
        unmap_leaving(slabs);
    status = map(slabs, &grown->made, &reason, err);
    if (slabs->mutex != NULL)
        msc__mutex_lock(slabs->mutex);
    slabs->growing = false;
    if (slabs->changed != NULL)
        msc__cond_broadcast(slabs->changed);
    return reason == 0 ? status : fail_to_map(slabs, grown->made.bytes, reason, err);
}

/*
 * A new slab with room for `bytes`, in the place of empty ones of `freed_bytes` or more. What is counted as mapped
 * meanwhile is the larger of before and after, and the system never has more.
 */
static msc_status grow(msc__slabs *slabs, uint64_t bytes, uint64_t freed_bytes, uint32_t *number,
                       msc_error *err)
{
    uint64_t left = slabs->limit_bytes - slabs->use.mapped_bytes;
    growth grown = {
        .made = {.bytes = msc__round_up_u64(bytes, slabs->page_bytes), .shared = bytes <= SMALL_MOST}};
    uint64_t more;
    msc_status status = freed_bytes > 0 ? MSC_OK : free_number(slabs, number, err);

    if (status == MSC_OK && freed_bytes > 0)
        grown.freed_bytes = let_leave(slabs, freed_bytes);
    left += grown.freed_bytes;
    if (grown.made.shared)
        grown.made.bytes = left < SLAB_BYTES ? left : SLAB_BYTES;
    MSC__ASSERT(grown.made.bytes >= bytes && grown.made.bytes <= left);
    grown.made.room = grown.made.bytes;
    if (status == MSC_OK)
        status =
            msc__ranges_create(slabs->ctx, grown.made.bytes, MSC__SLAB_ALIGNMENT, &grown.made.ranges, err);
    if (status != MSC_OK) {
        keep_leaving(slabs);
        return status;
    }
    more = grown.made.bytes > grown.freed_bytes ? grown.made.bytes - grown.freed_bytes : 0;
    slabs->use.mapped_bytes += more;
    status = ask_system(slabs, &grown, err);
    slabs->use.mapped_bytes -= more;
    forget_leaving(slabs);
    if (status != MSC_OK) {
        msc__ranges_destroy(grown.made.ranges);
        return status;
    }
    (void)free_number(slabs, number, NULL); /* there is one */
    *at(slabs, *number) = grown.made;
    slabs->use.mapped_bytes += grown.made.bytes;
    MSC__ASSERT(slabs->use.mapped_bytes <= slabs->limit_bytes);
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
    MSC__ASSERT(start + bytes <= one->bytes && start % MSC__SLAB_ALIGNMENT == 0);
    *out = (msc__slab_block){.memory = one->memory + start, .slab = number, .range = range};
    slabs->use.taken_bytes += msc__ranges_size_of(one->ranges, range);
    if (slabs->use.taken_bytes > slabs->use.taken_peak_bytes)
        slabs->use.taken_peak_bytes = slabs->use.taken_bytes;
    slabs->use.block_count++;
    one->block_count++;
    return MSC_OK;
}

/* Which slabs a block may go to. */
typedef enum choice {
    CHOICE_FITTING, /* of its kind; an empty one only if the block fills most of it */
    CHOICE_BEGUN,   /* of any kind, with blocks in it: what is left there is of use to nobody else */
    CHOICE_WHEREVER
} choice;

static bool is_eligible(const slab *one, uint64_t bytes, choice which)
{
    if (one->memory == NULL || one->leaving || one->room < bytes)
        return false;
    if (which == CHOICE_BEGUN)
        return one->block_count > 0;
    if (which == CHOICE_WHEREVER)
        return true;
    return one->shared == (bytes <= SMALL_MOST) &&
           (one->shared || one->block_count > 0 || bytes >= one->bytes - one->bytes / 8);
}

/* The smallest slab that may have room, the first among equals. */
static uint32_t candidate(const msc__slabs *slabs, uint64_t bytes, choice which)
{
    uint32_t best = MSC_NONE;
    uint32_t i;

    for (i = 0; i < slabs->table.count; i++) {
        const slab *one = at(slabs, i);

        if (is_eligible(one, bytes, which) && (best == MSC_NONE || one->bytes < at(slabs, best)->bytes))
            best = i;
    }
    return best;
}

/* Tries the slabs that are there. Each that refuses is no candidate any more, so this ends. */
static msc_status take_somewhere(msc__slabs *slabs, uint64_t bytes, choice which, msc__slab_block *out,
                                 msc_error *err)
{
    for (;;) {
        uint32_t number = candidate(slabs, bytes, which);
        msc_status status = number == MSC_NONE ? MSC_EAGAIN : take_from(slabs, number, bytes, out, err);
        if (number == MSC_NONE || status != MSC_EAGAIN)
            return status;
    }
}

/* ---- where a block goes -------------------------------------------------------------------------- */

/* Waits until the thread that asks the system for a slab has its answer. */
static void await_growth(msc__slabs *slabs)
{
    MSC__ASSERT(!slabs->growing || slabs->mutex != NULL); /* else one thread has all this */
    while (slabs->growing)
        msc__cond_wait(slabs->changed, slabs->mutex);
}

/* A block of a new slab, for which empty ones of `freed_bytes` go. */
static msc_status take_from_new(msc__slabs *slabs, uint64_t bytes, uint64_t freed_bytes, msc__slab_block *out,
                                msc_error *err)
{
    uint32_t number;
    msc_status status = grow(slabs, bytes, freed_bytes, &number, err);

    return status == MSC_OK ? take_from(slabs, number, bytes, out, err) : status;
}

/*
 * No fitting slab has room, and no other thread asks the system. EAGAIN: the limit leaves no room.
 *
 *      a new slab ──► what is left in one that has begun ──► a new one in the place of empty ones ──► wherever it fits
 *
 * A large block in an empty slab of twice its size would leave a half that no other one of its size fits into: blocks
 * that a plan has counted would not be placed, because those of the step before were larger.
 */
static msc_status take_elsewhere(msc__slabs *slabs, uint64_t bytes, msc__slab_block *out, msc_error *err)
{
    uint64_t need = msc__round_up_u64(bytes, slabs->page_bytes);
    uint64_t left = slabs->limit_bytes - slabs->use.mapped_bytes;
    uint64_t missing = need > left ? need - left : need; /* or what the system did not have */
    msc_error why;
    msc_status status = need > left ? MSC_EAGAIN : take_from_new(slabs, bytes, 0, out, &why);

    MSC__ASSERT(slabs->use.mapped_bytes <= slabs->limit_bytes);
    if (status == MSC_OK)
        return MSC_OK;
    await_growth(slabs); /* another thread's, since this one had not the mutex */
    if (take_somewhere(slabs, bytes, CHOICE_BEGUN, out, NULL) == MSC_OK)
        return MSC_OK;
    if (empty_bytes(slabs) >= missing)
        status = take_from_new(slabs, bytes, missing, out, &why);
    if (status == MSC_OK)
        return MSC_OK;
    await_growth(slabs);
    if (take_somewhere(slabs, bytes, CHOICE_WHEREVER, out, NULL) == MSC_OK)
        return MSC_OK;
    if (status != MSC_OK && status != MSC_EAGAIN && err != NULL)
        *err = why;
    return status;
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
    for (i = 0; i < slabs->table.count; i++) {
        if (at(slabs, i)->memory == NULL)
            continue;
        unmap(slabs, at(slabs, i));
        msc__ranges_destroy(at(slabs, i)->ranges);
    }
    msc__array_fini(slabs->ctx, &slabs->table, sizeof(slab));
    msc__free(slabs->ctx, slabs, sizeof *slabs);
}

void msc__slabs_share(msc__slabs *slabs, msc__mutex *mutex, msc__cond *changed)
{
    slabs->mutex = mutex;
    slabs->changed = changed;
}

msc_status msc__slabs_take_now(msc__slabs *slabs, uint64_t bytes, msc__slab_block *out, msc_error *err)
{
    uint64_t need = msc__round_up_u64(bytes, slabs->page_bytes);
    uint64_t left = slabs->limit_bytes - slabs->use.mapped_bytes;
    msc_status status;

    *out = (msc__slab_block){.memory = NULL};
    status = take_somewhere(slabs, bytes, CHOICE_FITTING, out, err);
    if (status != MSC_EAGAIN)
        return status;
    if (slabs->growing || need <= left)
        return MSC_ETIMEDOUT;
    status = take_somewhere(slabs, bytes, CHOICE_BEGUN, out, err);
    if (status != MSC_EAGAIN)
        return status;
    if (empty_bytes(slabs) >= need - left)
        return MSC_ETIMEDOUT;
    return take_somewhere(slabs, bytes, CHOICE_WHEREVER, out, err);
}

msc_status msc__slabs_take(msc__slabs *slabs, uint64_t bytes, msc__slab_block *out, msc_error *err)
{
    msc_status status;

    *out = (msc__slab_block){.memory = NULL};
    if (bytes == 0)
        return msc__fail(err, MSC_EINVAL, "a block of 0 bytes");
    for (;;) {
        status = take_somewhere(slabs, bytes, CHOICE_FITTING, out, err);
        if (status != MSC_EAGAIN)
            return status;
        if (!slabs->growing)
            return take_elsewhere(slabs, bytes, out, err);
        await_growth(slabs);
    }
}

void msc__slabs_stop(msc__slabs *slabs)
{
    slabs->limit_bytes = slabs->use.mapped_bytes;
}

void msc__slabs_give(msc__slabs *slabs, msc__slab_block block)
{
    slab *one = at(slabs, block.slab);

    MSC__ASSERT(one->memory != NULL && !one->leaving && one->block_count > 0);
    MSC__ASSERT(slabs->use.taken_bytes >= msc__ranges_size_of(one->ranges, block.range) &&
                slabs->use.block_count > 0);
    slabs->use.taken_bytes -= msc__ranges_size_of(one->ranges, block.range);
    slabs->use.block_count--;
    one->block_count--;
    msc__ranges_give(one->ranges, block.range);
    one->room = one->bytes;
}

msc__slabs_use msc__slabs_in_use(const msc__slabs *slabs)
{
    return slabs->use;
}
