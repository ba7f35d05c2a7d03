/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file snapshot_replay.h
 * A replay in progress: between snapshot_replay.c, which plays and compares, and snapshot_start.c, which
 * puts in place what the trace does not begin with.
 */
#ifndef MSC_SNAPSHOT_SNAPSHOT_REPLAY_H
#define MSC_SNAPSHOT_SNAPSHOT_REPLAY_H

#include "snapshot/snapshot_history.h"

/** Streams and private pools by the number that the simulator knows them by: their index. */
typedef struct msc__numbering {
    msc__array streams; /**< of uint64_t, ascending: stream 0 comes first, as in the real sets */
    msc__array pools;   /**< of uint64_t pairs, ascending; the default pool 0, 0 comes first */
} msc__numbering;

typedef struct msc__replay {
    const msc_snapshot *snapshot;
    msc__history history;
    msc__numbering numbering;
    msc_sim *sim;
    msc_sim_options sim_options;
    uint64_t limit_bytes;  /**< of reserved memory; UINT64_MAX: not known */
    uint64_t seen_count;   /**< segment events of the simulator that were compared */
    uint32_t pending;      /**< first recorded event whose segment events were not compared */
    uint32_t last_release; /**< one past the last event played that gave memory back */
    uint32_t cause;        /**< call that the next completed frees belong to */
    bool cause_releases;   /**< that call releases memory by itself */
    msc_snapshot_replay_result *result;
    msc_error *err;
} msc__replay;

/** Collects the streams and pools of a device. Errors: ENOMEM, EOVERFLOW. */
msc_status msc__numbering_init(msc__numbering *numbering, const msc__history *history, msc_error *err);
void msc__numbering_fini(msc_context *ctx, msc__numbering *numbering);
uint32_t msc__numbering_stream(const msc__numbering *numbering, uint64_t stream);
uint32_t msc__numbering_pool(const msc__numbering *numbering, const uint64_t pool[2]);

/** Where memory at an address is taken from, as far as the segments at the end tell. */
msc_sim_place msc__replay_place(const msc__replay *replay, uint64_t address, uint64_t stream);

/** Puts the segments and blocks that were there before the first event into the simulator, which is empty.
 * Errors: EUNSUPPORTED (they cannot be derived), ENOMEM. */
msc_status msc__replay_start(msc__replay *replay);

#endif /* MSC_SNAPSHOT_SNAPSHOT_REPLAY_H */
