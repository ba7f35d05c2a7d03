/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file snapshot_internal.h
 * The snapshot in memory: tables of records, each thing stored once.
 *
 *     chars     "a.py\0 forward\0 ..."         strings   offset of each
 *     frames    (file, function, line)          known by their contents
 *     stack_frames  [f f f][f f] ...            stacks    offset of each, known by its contents
 *     segments ─► blocks                        events    traces: one range per device
 */
#ifndef MSC_SNAPSHOT_SNAPSHOT_INTERNAL_H
#define MSC_SNAPSHOT_SNAPSHOT_INTERNAL_H

#include <stdbool.h>

#include "base/array.h"
#include "base/hash_index.h"
#include "memscale/snapshot.h"

/** Most devices that a snapshot may have. */
#define MSC__SNAPSHOT_MOST_DEVICES 1024u

/* ---- the snapshot ------------------------------------------------------------------------------- */

/** `count` records from `first` on. */
typedef struct msc__snapshot_range {
    uint32_t first;
    uint32_t count;
} msc__snapshot_range;

struct msc_snapshot {
    msc_context *ctx;
    msc__array chars;        /**< of char */
    msc__array strings;      /**< of uint32_t, offset of each */
    msc__array frames;       /**< of msc_snapshot_frame */
    msc__array stack_frames; /**< of uint32_t */
    msc__array stacks;       /**< of msc__snapshot_range; stack 0 is empty */
    msc__array segments;     /**< of msc_snapshot_segment, by device and address once read */
    msc__array blocks;       /**< of msc_snapshot_block */
    msc__array events;       /**< of msc_snapshot_event */
    msc__array annotations;  /**< of msc_snapshot_annotation */
    msc__array traces;       /**< of msc__snapshot_range, by device once read */
    msc__hash_index string_table;
    msc__hash_index frame_table;
    msc__hash_index stack_table;
    msc_snapshot_settings settings;
    uint32_t device_count;
};

/** Id of a string, frame or stack that is equal, made if there is none. Errors: ENOMEM, EOVERFLOW. */
msc_status msc__snapshot_intern_string(msc_snapshot *snapshot, const void *bytes, size_t size_bytes,
                                       uint32_t *out, msc_error *err);
msc_status msc__snapshot_intern_frame(msc_snapshot *snapshot, const msc_snapshot_frame *frame, uint32_t *out,
                                      msc_error *err);
msc_status msc__snapshot_intern_stack(msc_snapshot *snapshot, const uint32_t *frames, uint32_t count,
                                      uint32_t *out, msc_error *err);

#endif /* MSC_SNAPSHOT_SNAPSHOT_INTERNAL_H */
