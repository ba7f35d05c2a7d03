/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums of a device, and live bytes by the line of the program that allocated them.
 *
 *     stack   [ at::empty  c10::...  forward (model.py:7)  main (train.py:3) ]
 *                                    └ the site: innermost frame of Python code
 *
 * With stacks="all" the innermost frames are PyTorch's own C++, the same for every allocation; that is why a
 * site is a line of Python where there is one. Autograd's threads have none; there the innermost frame beyond
 * the recorder and the allocator must do.
 */
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"
#include "snapshot/snapshot_history.h"

/* ---- totals ------------------------------------------------------------------------------------- */

static void sum_segments(const msc_snapshot *snapshot, uint32_t device, msc_snapshot_totals *out)
{
    uint32_t count;
    uint32_t i;
    const msc_snapshot_segment *segments = msc_snapshot_segments(snapshot, device, &count);

    out->segment_count = count;
    for (i = 0; i < count; i++) {
        out->reserved_bytes = msc__sat_add_u64(out->reserved_bytes, segments[i].total_bytes);
        out->allocated_bytes = msc__sat_add_u64(out->allocated_bytes, segments[i].allocated_bytes);
        out->active_bytes = msc__sat_add_u64(out->active_bytes, segments[i].active_bytes);
        out->requested_bytes = msc__sat_add_u64(out->requested_bytes, segments[i].requested_bytes);
        out->block_count += segments[i].block_count;
    }
}

msc_status msc_snapshot_totals_read(const msc_snapshot *snapshot, uint32_t device, msc_snapshot_totals *out,
                                    size_t out_bytes, msc_error *err)
{
    msc_snapshot_totals totals = {0};
    msc__history history;
    uint32_t event;
    uint32_t i;
    msc_status status;

    msc__sized_copy(out, out_bytes, NULL, 0);
    status = msc__history_init(&history, snapshot, device, 0, err);
    if (status != MSC_OK)
        return status;
    sum_segments(snapshot, device, &totals);
    totals.event_count = history.event_count;
    for (i = 0; i < history.event_count; i++)
        totals.action_count[history.events[i].action]++;
    totals.reserved_peak_bytes = msc__history_reserved_peak(&history);
    msc__history_peak(&history, &totals.requested_peak_bytes, &event);
    totals.requested_peak_event = event;
    msc__history_fini(&history);
    msc__sized_copy(out, out_bytes, &totals, sizeof totals);
    return MSC_OK;
}

/* ---- sites -------------------------------------------------------------------------------------- */

static bool is_python(const msc_snapshot *snapshot, uint32_t frame)
{
    const char *file = msc_snapshot_string(snapshot, msc_snapshot_frame_at(snapshot, frame).file);
    size_t length = strlen(file);

    return file[0] == '<' || (length > 3 && strcmp(file + length - 3, ".py") == 0);
}

/* Whether a frame of C++ is the recorder, the allocator, or how tensors come to it. */
static bool is_machinery(const msc_snapshot *snapshot, uint32_t frame)
{
    static const char *const prefixes[] = {"torch::unwind", "torch::CapturedTraceback",
                                           "torch::cuda::", "c10::", "at::detail::"};
    const char *name = msc_snapshot_string(snapshot, msc_snapshot_frame_at(snapshot, frame).function);
    size_t i;

    for (i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0)
            return true;
    }
    return false;
}

/* MSC_NONE for an empty stack. */
static uint32_t site_of_stack(const msc_snapshot *snapshot, uint32_t stack)
{
    uint32_t count;
    const uint32_t *frames = msc_snapshot_stack(snapshot, stack, &count);
    uint32_t i;

    for (i = 0; i < count; i++) {
        if (is_python(snapshot, frames[i]))
            return frames[i];
    }
    for (i = 0; i < count; i++) {
        if (!is_machinery(snapshot, frames[i]))
            return frames[i];
    }
    return count > 0 ? frames[0] : MSC_NONE;
}

static void add_to_site(msc_snapshot_site *sums, uint32_t frame, uint32_t frame_count, uint64_t bytes)
{
    msc_snapshot_site *site = &sums[frame == MSC_NONE ? frame_count : frame];

    MSC__ASSERT(frame == MSC_NONE || frame < frame_count);
    site->frame = frame;
    site->allocation_count++;
    site->requested_bytes = msc__sat_add_u64(site->requested_bytes, bytes);
}

static void sum_at_end(const msc_snapshot *snapshot, uint32_t device, const uint32_t *frame_of_stack,
                       msc_snapshot_site *sums)
{
    const msc_snapshot_block *blocks = snapshot->blocks.items;
    uint32_t count;
    const msc_snapshot_segment *segments = msc_snapshot_segments(snapshot, device, &count);
    uint32_t i, j;

    for (i = 0; i < count; i++) {
        for (j = 0; j < segments[i].block_count; j++) {
            const msc_snapshot_block *block = &blocks[segments[i].first_block + j];
            MSC__ASSERT(block->stack < snapshot->stacks.count);
            if (block->state == MSC_SNAPSHOT_STATE_ALLOCATED)
                add_to_site(sums, frame_of_stack[block->stack], snapshot->frames.count,
                            block->requested_bytes);
        }
    }
}

static void sum_at_peak(const msc__history *history, const uint32_t *frame_of_stack, msc_snapshot_site *sums)
{
    uint64_t bytes;
    uint32_t peak;
    uint32_t i;

    msc__history_peak(history, &bytes, &peak);
    for (i = 0; i < history->allocations.count; i++) {
        const msc__allocation *allocation = msc__history_at(history, i);
        bool before = allocation->alloc == MSC__BEFORE;
        bool alive = before && allocation->request != MSC__BEFORE;
        if (peak < history->event_count) /* MSC__BEFORE as a request ended it already; MSC_NONE is beyond */
            alive = (before || allocation->alloc <= peak) && allocation->request > peak &&
                    allocation->request != MSC__BEFORE;
        MSC__ASSERT(allocation->stack < history->snapshot->stacks.count);
        if (alive)
            add_to_site(sums, frame_of_stack[allocation->stack], history->snapshot->frames.count,
                        allocation->requested_bytes);
    }
}

static int compare_sites(const void *a, const void *b)
{
    const msc_snapshot_site *x = a;
    const msc_snapshot_site *y = b;

    if (x->requested_bytes != y->requested_bytes)
        return x->requested_bytes > y->requested_bytes ? -1 : 1;
    return (x->frame > y->frame) - (x->frame < y->frame);
}

/* Moves the sums that are not empty to the front, largest first. */
static uint32_t sort_sites(msc_snapshot_site *sums, uint32_t count)
{
    uint32_t used = 0;
    uint32_t i;

    for (i = 0; i < count; i++) {
        if (sums[i].allocation_count > 0)
            sums[used++] = sums[i];
    }
    if (used > 0)
        qsort(sums, used, sizeof *sums, compare_sites);
    return used;
}

msc_status msc_snapshot_sites(const msc_snapshot *snapshot, uint32_t device, msc_snapshot_moment moment,
                              msc_snapshot_site *sites, uint32_t site_count, uint32_t *found, msc_error *err)
{
    msc__history history;
    msc_snapshot_site *sums = NULL;
    uint32_t *frame_of_stack = NULL;
    size_t sum_count = (size_t)snapshot->frames.count + 1;
    size_t stack_count = snapshot->stacks.count;
    uint32_t used;
    uint32_t i;
    msc_status status = msc__history_init(&history, snapshot, device, 0, err);

    if (status != MSC_OK)
        return status;
    sums = msc__alloc(snapshot->ctx, sum_count * sizeof *sums);
    frame_of_stack = msc__alloc(snapshot->ctx, stack_count * sizeof *frame_of_stack);
    if (sums == NULL || frame_of_stack == NULL) {
        status = msc__fail_memory(err, "the sites of a snapshot", sum_count * sizeof *sums);
        goto cleanup;
    }
    for (i = 0; i < stack_count; i++)
        frame_of_stack[i] = site_of_stack(snapshot, i);
    if (moment == MSC_SNAPSHOT_MOMENT_END)
        sum_at_end(snapshot, device, frame_of_stack, sums);
    else
        sum_at_peak(&history, frame_of_stack, sums);
    used = sort_sites(sums, (uint32_t)sum_count);
    if (found != NULL)
        *found = used;
    if (sites != NULL && used > 0)
        memcpy(sites, sums, (used < site_count ? used : site_count) * sizeof *sums);

cleanup:
    msc__free(snapshot->ctx, sums, sum_count * sizeof *sums);
    msc__free(snapshot->ctx, frame_of_stack, stack_count * sizeof *frame_of_stack);
    msc__history_fini(&history);
    return status;
}
