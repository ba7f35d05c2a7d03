/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file snapshot_history.h
 * The trace of a device as allocations with a beginning and an end.
 */
#ifndef MSC_SNAPSHOT_SNAPSHOT_HISTORY_H
#define MSC_SNAPSHOT_SNAPSHOT_HISTORY_H

#include "base/invariant.h"
#include "snapshot/snapshot_internal.h"

/** Instead of an event: it happened before the trace begins. */
#define MSC__BEFORE (MSC_NONE - 1)

/** One allocation: 40 bytes. Its life is `[alloc, request)` for the program, `[alloc, complete)` in all. */
typedef struct msc__allocation {
    uint64_t address;
    uint64_t requested_bytes;
    uint32_t stack;    /**< where it was made; 0: unknown */
    uint32_t alloc;    /**< event, or MSC__BEFORE */
    uint32_t request;  /**< event, MSC__BEFORE, or MSC_NONE: alive at the end */
    uint32_t complete; /**< event, or MSC_NONE: not free at the end */
    uint32_t block;    /**< block of the snapshot that holds it at the end, or MSC_NONE */
    uint32_t pad;
} msc__allocation;

/** A zeroed one is empty. */
typedef struct msc__history {
    const msc_snapshot *snapshot;
    const msc_snapshot_event *events;
    uint32_t event_count;
    uint32_t device;
    uint32_t first_event;   /**< what lies before it does not lead to what follows: events are missing */
    bool ends_in_blocks;    /**< the trace leads to the blocks of the snapshot */
    msc__array allocations; /**< of msc__allocation: those of before first, then by event */
    msc__array of_event;    /**< of uint32_t: allocation of an event from first_event on, or MSC_NONE */
} msc__history;

/** Reads the trace of a device from an event on. Errors: EINVAL (no such device), ENOMEM, EOVERFLOW. */
msc_status msc__history_init(msc__history *history, const msc_snapshot *snapshot, uint32_t device,
                             uint32_t first_event, msc_error *err);
void msc__history_fini(msc__history *history);

static inline msc__allocation *msc__history_at(const msc__history *history, uint32_t allocation)
{
    MSC__ASSERT(allocation < history->allocations.count);
    return (msc__allocation *)history->allocations.items + allocation;
}

/** Allocation that an event, which must be one of the three kinds, belongs to, or MSC_NONE. */
static inline uint32_t msc__history_of(const msc__history *history, uint32_t event)
{
    MSC__ASSERT(event < history->event_count);
    return event < history->first_event
               ? MSC_NONE
               : ((const uint32_t *)history->of_event.items)[event - history->first_event];
}

/**
 * Most requested bytes that the program held at once, and the event from which on it did; event count when
 * that was so before the first.
 */
void msc__history_peak(const msc__history *history, uint64_t *bytes, uint32_t *event);

/** Most reserved bytes within the trace, walked back from the segments. */
uint64_t msc__history_reserved_peak(const msc__history *history);

#endif /* MSC_SNAPSHOT_SNAPSHOT_HISTORY_H */
