/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target for memory snapshots: any bytes as a pickle.
 *
 * Properties:
 *
 *  - the reader gives a snapshot or an error with a message, never both, and no memory is left behind
 *  - memory is bounded by the length of the input, whatever numbers it holds
 *  - what was read can be asked for: every index that a record holds leads somewhere
 *  - sums, sites and replay end, with a result or an error
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "memscale/snapshot.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* GET of a segment, 2 bytes, copies a record of 96 bytes into an array that may be half empty. */
#define MOST_BYTES_PER_BYTE 160u
#define MOST_FIXED_BYTES 65536u

static void require(int truth)
{
    if (!truth)
        abort();
}

static void check_stack(const msc_snapshot *snapshot, uint32_t stack)
{
    uint32_t count;
    const uint32_t *frames;
    uint32_t i;

    require(stack < msc_snapshot_stack_count(snapshot));
    frames = msc_snapshot_stack(snapshot, stack, &count);
    for (i = 0; i < count; i++) {
        require(frames[i] < msc_snapshot_frame_count(snapshot));
        require(msc_snapshot_string(snapshot, msc_snapshot_frame_at(snapshot, frames[i]).file) != NULL);
    }
}

static void check_segments(const msc_snapshot *snapshot, uint32_t device)
{
    uint32_t count, block_count, i, j;
    const msc_snapshot_segment *segments = msc_snapshot_segments(snapshot, device, &count);
    const msc_snapshot_block *blocks = msc_snapshot_blocks(snapshot, &block_count);

    for (i = 0; i < count; i++) {
        uint64_t address = segments[i].address;
        require(segments[i].device == device);
        require(i == 0 || segments[i - 1].address + segments[i - 1].total_bytes <= address);
        check_stack(snapshot, segments[i].stack);
        for (j = segments[i].first_block; j < segments[i].first_block + segments[i].block_count; j++) {
            require(j < block_count && blocks[j].address == address);
            require(blocks[j].state < MSC_SNAPSHOT_STATE_COUNT);
            check_stack(snapshot, blocks[j].stack);
            address += blocks[j].size_bytes;
        }
    }
}

static void check_device(const msc_snapshot *snapshot, uint32_t device)
{
    msc_snapshot_replay_result result;
    msc_snapshot_totals totals;
    msc_snapshot_site sites[4];
    msc_error err = {0};
    uint32_t count, i;
    const msc_snapshot_event *events = msc_snapshot_events(snapshot, device, &count);
    msc_status status;

    for (i = 0; i < count; i++) {
        require(events[i].action < MSC_SNAPSHOT_ACTION_COUNT);
        require(msc_snapshot_string(snapshot, events[i].user_metadata) != NULL);
        check_stack(snapshot, events[i].stack);
    }
    check_segments(snapshot, device);
    require(msc_snapshot_get_totals(snapshot, device, &totals, NULL) == MSC_OK);
    require(totals.event_count == count && totals.reserved_peak_bytes >= totals.reserved_bytes);
    require(msc_snapshot_sites(snapshot, device, MSC_SNAPSHOT_MOMENT_END, sites, 4, NULL, NULL) == MSC_OK);
    require(msc_snapshot_sites(snapshot, device, MSC_SNAPSHOT_MOMENT_PEAK, sites, 4, NULL, NULL) == MSC_OK);
    status = msc_snapshot_replay(snapshot, device, NULL, NULL, &result, &err);
    require(status != MSC_EINTERNAL && status != MSC_EDEVMEM);
    require(status == MSC_OK || (err.status == status && err.message[0] != '\0'));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t nothing[1] = {0};
    msc_context *ctx = NULL;
    msc_snapshot *snapshot = NULL;
    msc_error err = {0};
    msc_status status;
    uint32_t device;

    require(msc_context_create(NULL, &ctx, NULL) == MSC_OK);
    status = msc_snapshot_parse(ctx, size == 0 ? nothing : data, size, &snapshot, &err);
    require(msc_context_peak_bytes(ctx) <= MOST_FIXED_BYTES + (uint64_t)size * MOST_BYTES_PER_BYTE);
    require((status == MSC_OK) == (snapshot != NULL));
    require(status == MSC_OK || (err.status == status && err.message[0] != '\0'));
    for (device = 0; snapshot != NULL && device < msc_snapshot_device_count(snapshot) && device < 4; device++)
        check_device(snapshot, device);
    msc_snapshot_destroy(snapshot);
    require(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
    return 0;
}
