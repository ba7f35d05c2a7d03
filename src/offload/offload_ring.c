/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bounded queue (D. Vyukov, "Bounded MPMC queue", 2010).
 *
 * Positions count entries from the first one on and never wrap in practice (64 bits). Position p lives in cell
 * p mod capacity, and the cell's `turn` says what may happen there next:
 *
 *      turn == p                    a writer that has position p may fill the cell
 *      turn == p + 1                a reader that has position p may empty it
 *      turn == p + capacity         it is empty for the next time round; that is the first line again
 *
 *      capacity 4         tail 6: next position to be filled     head 3: next to be emptied
 *      cell     0     1     2     3
 *      turn     5     6     6     4          cell 1: position 5 is filled, cell 2: position 6 is awaited
 *      position 4     5     6     3
 *
 * A thread gets a position by moving `tail` (or `head`) past it with a compare-and-swap, and from then on the
 * cell is its own until it stores the next turn. So the counters only share out numbers and need no order;
 * all that one thread learns from another goes through `turn`: stored with release after the cell was used,
 * loaded with acquire before. tests/unit/offload/test_offload_ring.c walks through all interleavings of small
 * cases, stale reads included, and shows that each of these steps is needed.
 *
 * A writer that sleeps between taking its position and storing the turn makes readers see an empty ring
 * there, though later cells are full: nobody ever waits, but nobody may overtake either.
 */
#include "offload/offload_ring.h"

#include <stdatomic.h>
#include <stdbool.h>

#include "base/alloc.h"
#include "base/error.h"

#define LINE_BYTES 64u /* a cache line; what writers and readers write lies on lines of their own */
#define CAPACITY_MOST (UINT32_C(1) << 30)

typedef struct cell {
    _Atomic uint64_t turn; /* partners: the stores and loads of `turn` in push and pop */
    uint64_t entry;        /* belongs to whoever has the position that `turn` admits */
} cell;

struct msc__ring {
    msc_context *ctx;
    void *allocation; /* what ctx gave; the ring begins at the first line in it */
    size_t bytes;
    uint64_t mask;                              /* capacity - 1 */
    _Alignas(LINE_BYTES) _Atomic uint64_t tail; /* partners: the other writers; shares out numbers only */
    _Alignas(LINE_BYTES) _Atomic uint64_t head; /* partners: the other readers; shares out numbers only */
    _Alignas(LINE_BYTES) cell cells[];
};

msc_status msc__ring_create(msc_context *ctx, uint32_t capacity, msc__ring **out, msc_error *err)
{
    size_t bytes = sizeof(msc__ring) + (size_t)capacity * sizeof(cell) + LINE_BYTES - 1;
    void *allocation;
    msc__ring *ring;

    *out = NULL;
    if (capacity < 2 || capacity > CAPACITY_MOST || (capacity & (capacity - 1)) != 0)
        return msc__fail(err, MSC_EINVAL, "a ring of %u entries: must be a power of two, 2 to 2^30",
                         capacity);
    allocation = msc__alloc(ctx, bytes);
    if (allocation == NULL)
        return msc__fail_memory(err, "a ring", bytes);
    ring = (msc__ring *)(void *)((char *)allocation + (0 - (uintptr_t)allocation) % LINE_BYTES);
    ring->ctx = ctx;
    ring->allocation = allocation;
    ring->bytes = bytes;
    ring->mask = capacity - 1;
    msc__ring_restart(ring, 0);
    *out = ring;
    return MSC_OK;
}

void msc__ring_destroy(msc__ring *ring)
{
    if (ring != NULL)
        msc__free(ring->ctx, ring->allocation, ring->bytes);
}

void msc__ring_restart(msc__ring *ring, uint64_t first)
{
    uint64_t i;

    /* Relaxed: the ring belongs to one thread here, which hands it to the others by other means. */
    for (i = 0; i <= ring->mask; i++)
        atomic_store_explicit(&ring->cells[(first + i) & ring->mask].turn, first + i, memory_order_relaxed);
    atomic_store_explicit(&ring->tail, first, memory_order_relaxed);
    atomic_store_explicit(&ring->head, first, memory_order_relaxed);
}

/*
 * Takes the next position of a counter, once its cell's turn is `position + lead`; NULL if it is not yet.
 * Writers come with lead 0, readers with 1.
 */
static cell *take_position(msc__ring *ring, _Atomic uint64_t *counter, uint64_t lead, uint64_t *position)
{
    /* Relaxed: a guess, which the compare-and-swap checks. A stale one costs another round. */
    uint64_t at = atomic_load_explicit(counter, memory_order_relaxed);

    for (;;) {
        cell *mine = &ring->cells[at & ring->mask];
        /* Acquire, partner: the release in `pass_turn` of whoever used the cell last. The compare-and-swap
           can be relaxed because what lies in the cell was settled by that store, not by the counter. */
        uint64_t late = atomic_load_explicit(&mine->turn, memory_order_acquire) - (at + lead);

        if (late == 0) {
            if (atomic_compare_exchange_weak_explicit(counter, &at, at + 1, memory_order_relaxed,
                                                      memory_order_relaxed)) {
                *position = at;
                return mine;
            }
        } else if (late >> 63 != 0) {
            return NULL; /* negative: the cell waits for the other side */
        } else {
            at = atomic_load_explicit(counter, memory_order_relaxed); /* others were here first */
        }
    }
}

/* Release, partner: the acquire in `take_position`. The next user sees all that was done to the cell. */
static void pass_turn(cell *mine, uint64_t turn)
{
    atomic_store_explicit(&mine->turn, turn, memory_order_release);
}

msc_status msc__ring_push(msc__ring *ring, uint64_t entry)
{
    uint64_t position;
    cell *mine = take_position(ring, &ring->tail, 0, &position);

    if (mine == NULL)
        return MSC_EAGAIN;
    mine->entry = entry;
    pass_turn(mine, position + 1);
    return MSC_OK;
}

msc_status msc__ring_pop(msc__ring *ring, uint64_t *out)
{
    uint64_t position;
    cell *mine = take_position(ring, &ring->head, 1, &position);

    if (mine == NULL)
        return MSC_EAGAIN;
    *out = mine->entry;
    pass_turn(mine, position + ring->mask + 1);
    return MSC_OK;
}

uint32_t msc__ring_count(const msc__ring *ring)
{
    /* Relaxed: the answer is old by the time it is read, in any order. */
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint64_t count = atomic_load_explicit(&ring->tail, memory_order_relaxed) - head;

    if (count >> 63 != 0)
        return 0; /* a reader moved on between the two loads */
    return count > ring->mask ? (uint32_t)ring->mask + 1 : (uint32_t)count;
}
