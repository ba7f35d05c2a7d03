/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public face of snapshots: reading, lifecycle, queries.
 *
 *     bytes ─► source ─► pickle machine ─► tables ─► finish: devices, order of segments, exact arrays
 *
 * After reading, the segments are sorted by device and address and every array is cut to its size; from
 * then on nothing changes. The pickle machine and all that it needed is gone by the time the caller sees
 * the result.
 */
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/search.h"
#include "base/sized.h"
#include "snapshot/snapshot_pickle.h"

static const char *const action_names[MSC_SNAPSHOT_ACTION_COUNT] = {
    "alloc",        "free_requested",     "free_completed", "segment_alloc",
    "segment_free", "segment_map",        "segment_unmap",  "snapshot",
    "oom",          "workspace_snapshot", "other",
};

static const char *const state_names[MSC_SNAPSHOT_STATE_COUNT] = {"inactive", "active_allocated",
                                                                  "active_pending_free"};

const char *msc_snapshot_action_name(msc_snapshot_action action)
{
    return action_names[(unsigned)action < MSC_SNAPSHOT_ACTION_COUNT ? action : MSC_SNAPSHOT_ACTION_OTHER];
}

const char *msc_snapshot_state_name(msc_snapshot_state state)
{
    return state_names[(unsigned)state < MSC_SNAPSHOT_STATE_COUNT ? state : MSC_SNAPSHOT_STATE_INACTIVE];
}

/* ---- lifecycle ---------------------------------------------------------------------------------- */

static msc_status create_empty(msc_context *ctx, msc_snapshot **out, msc_error *err)
{
    static const msc__snapshot_range empty_stack = {0, 0};
    msc_snapshot *snapshot = msc__alloc(ctx, sizeof *snapshot);
    msc_status status;

    *out = NULL;
    if (snapshot == NULL)
        return msc__fail_memory(err, "a snapshot", sizeof *snapshot);
    snapshot->ctx = ctx;
    snapshot->settings.max_split_bytes = UINT64_MAX;
    snapshot->settings.conf = MSC_NONE;
    status = msc__array_push(ctx, &snapshot->stacks, sizeof empty_stack, &empty_stack, err);
    if (status == MSC_OK)
        status = msc__pickle_enter_keys(snapshot, err);
    MSC__ASSERT(status != MSC_OK || snapshot->stacks.count == 1);
    if (status != MSC_OK) {
        msc_snapshot_destroy(snapshot);
        return status;
    }
    *out = snapshot;
    return MSC_OK;
}

void msc_snapshot_destroy(msc_snapshot *snapshot)
{
    msc_context *ctx;

    if (snapshot == NULL)
        return;
    ctx = snapshot->ctx;
    msc__array_fini(ctx, &snapshot->chars, 1);
    msc__array_fini(ctx, &snapshot->strings, sizeof(uint32_t));
    msc__array_fini(ctx, &snapshot->frames, sizeof(msc_snapshot_frame));
    msc__array_fini(ctx, &snapshot->stack_frames, sizeof(uint32_t));
    msc__array_fini(ctx, &snapshot->stacks, sizeof(msc__snapshot_range));
    msc__array_fini(ctx, &snapshot->segments, sizeof(msc_snapshot_segment));
    msc__array_fini(ctx, &snapshot->blocks, sizeof(msc_snapshot_block));
    msc__array_fini(ctx, &snapshot->events, sizeof(msc_snapshot_event));
    msc__array_fini(ctx, &snapshot->annotations, sizeof(msc_snapshot_annotation));
    msc__array_fini(ctx, &snapshot->traces, sizeof(msc__snapshot_range));
    msc__hash_index_fini(ctx, &snapshot->string_table);
    msc__hash_index_fini(ctx, &snapshot->frame_table);
    msc__hash_index_fini(ctx, &snapshot->stack_table);
    msc__free(ctx, snapshot, sizeof *snapshot);
}

/* ---- finishing ---------------------------------------------------------------------------------- */

static int compare_segments(const void *a, const void *b)
{
    const msc_snapshot_segment *x = a;
    const msc_snapshot_segment *y = b;

    if (x->device != y->device)
        return x->device < y->device ? -1 : 1;
    if (x->address != y->address)
        return x->address < y->address ? -1 : 1;
    return (x->first_block > y->first_block) - (x->first_block < y->first_block);
}

/* Two segments of a device share no byte, and none ends beyond the address space. */
static msc_status check_segments(const msc_snapshot *snapshot, msc_error *err)
{
    const msc_snapshot_segment *segments = snapshot->segments.items;
    uint32_t i;

    for (i = 0; i < snapshot->segments.count; i++) {
        const msc_snapshot_segment *segment = &segments[i];
        const msc_snapshot_segment *next = &segments[i + 1];
        MSC__ASSERT(i + 1 == snapshot->segments.count || compare_segments(segment, next) <= 0);
        if (segment->total_bytes > UINT64_MAX - segment->address)
            return msc__fail(err, MSC_EFORMAT,
                             "cannot read the snapshot: segment %u leaves the address space", i);
        if (i + 1 < snapshot->segments.count && next->device == segment->device &&
            segment->address + segment->total_bytes > next->address)
            return msc__fail(err, MSC_EFORMAT, "cannot read the snapshot: segments %u and %u overlap", i,
                             i + 1);
    }
    return MSC_OK;
}

/* Gives back what an array has room for but does not hold. A refusal leaves it as it is. */
static void shrink(msc_context *ctx, msc__array *array, size_t item_bytes)
{
    void *items;

    MSC__ASSERT(array->count <= array->capacity);
    if (array->count == array->capacity)
        return;
    if (array->count == 0) {
        msc__array_fini(ctx, array, item_bytes);
        return;
    }
    items = msc__resize(ctx, array->items, array->capacity * item_bytes, array->count * item_bytes);
    if (items != NULL) {
        array->items = items;
        array->capacity = array->count;
    }
}

static void shrink_all(msc_snapshot *snapshot)
{
    msc_context *ctx = snapshot->ctx;

    shrink(ctx, &snapshot->chars, 1);
    shrink(ctx, &snapshot->strings, sizeof(uint32_t));
    shrink(ctx, &snapshot->frames, sizeof(msc_snapshot_frame));
    shrink(ctx, &snapshot->stack_frames, sizeof(uint32_t));
    shrink(ctx, &snapshot->stacks, sizeof(msc__snapshot_range));
    shrink(ctx, &snapshot->segments, sizeof(msc_snapshot_segment));
    shrink(ctx, &snapshot->blocks, sizeof(msc_snapshot_block));
    shrink(ctx, &snapshot->events, sizeof(msc_snapshot_event));
    shrink(ctx, &snapshot->annotations, sizeof(msc_snapshot_annotation));
    msc__hash_index_fini(ctx, &snapshot->string_table);
    msc__hash_index_fini(ctx, &snapshot->frame_table);
    msc__hash_index_fini(ctx, &snapshot->stack_table);
}

static msc_status finish(msc_snapshot *snapshot, msc_error *err)
{
    const msc_snapshot_segment *segments;
    uint32_t count = snapshot->segments.count;

    if (count > 0)
        qsort(snapshot->segments.items, count, sizeof *segments, compare_segments);
    segments = snapshot->segments.items;
    snapshot->device_count = snapshot->traces.count;
    if (count > 0 && segments[count - 1].device >= snapshot->device_count)
        snapshot->device_count = segments[count - 1].device + 1;
    MSC__ASSERT(snapshot->device_count <= MSC__SNAPSHOT_MOST_DEVICES);
    shrink_all(snapshot);
    return check_segments(snapshot, err);
}

/* ---- reading ------------------------------------------------------------------------------------ */

/* Runs the machine over a source that it takes over. */
static msc_status read_source(msc_context *ctx, const msc__source *source, msc_snapshot **out, msc_error *err)
{
    msc__pickle pickle;
    msc_status status;

    memset(&pickle, 0, sizeof pickle);
    pickle.ctx = ctx;
    pickle.err = err;
    pickle.source = *source;
    status = create_empty(ctx, &pickle.snapshot, err);
    if (status == MSC_OK)
        status = msc__pickle_run(&pickle);
    msc__pickle_fini(&pickle);
    if (status == MSC_OK)
        status = finish(pickle.snapshot, err);
    if (status == MSC_OK)
        *out = pickle.snapshot;
    else
        msc_snapshot_destroy(pickle.snapshot);
    return status;
}

msc_status msc_snapshot_parse(msc_context *ctx, const void *bytes, size_t size_bytes, msc_snapshot **out,
                              msc_error *err)
{
    msc__source source;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot read a snapshot: out is NULL");
    *out = NULL;
    if (ctx == NULL || bytes == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot read a snapshot: context or bytes is NULL");
    msc__source_init_memory(&source, bytes, size_bytes);
    MSC__ASSERT(msc__source_offset(&source) == 0);
    return read_source(ctx, &source, out, err);
}

msc_status msc_snapshot_load(msc_context *ctx, const char *path, msc_snapshot **out, msc_error *err)
{
    msc__source source;
    FILE *file;
    msc_status status;

    if (out == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot read a snapshot: out is NULL");
    *out = NULL;
    if (ctx == NULL || path == NULL)
        return msc__fail(err, MSC_EINVAL, "cannot read a snapshot: context or path is NULL");
    file = fopen(path, "rb");
    if (file == NULL)
        return msc__source_fail(err, "open", path);
    msc__source_init_file(&source, ctx, file);
    status = read_source(ctx, &source, out, err);
    (void)fclose(file);
    return status;
}

/* ---- queries ------------------------------------------------------------------------------------ */

uint32_t msc_snapshot_device_count(const msc_snapshot *snapshot)
{
    return snapshot->device_count;
}

/* First segment of a device or a later one. */
static uint32_t first_segment(const msc_snapshot *snapshot, uint32_t device)
{
    return MSC__LOWER_BOUND(msc_snapshot_segment, device, snapshot->segments.items, snapshot->segments.count,
                            device);
}

const msc_snapshot_segment *msc_snapshot_segments(const msc_snapshot *snapshot, uint32_t device,
                                                  uint32_t *count)
{
    uint32_t first = 0;

    *count = 0;
    if (device < snapshot->device_count) {
        first = first_segment(snapshot, device);
        *count = first_segment(snapshot, device + 1) - first;
        MSC__ASSERT(first + *count <= snapshot->segments.count);
    }
    return *count == 0 ? NULL : (const msc_snapshot_segment *)snapshot->segments.items + first;
}

const msc_snapshot_block *msc_snapshot_blocks(const msc_snapshot *snapshot, uint32_t *count)
{
    *count = snapshot->blocks.count;
    return snapshot->blocks.items;
}

const msc_snapshot_event *msc_snapshot_events(const msc_snapshot *snapshot, uint32_t device, uint32_t *count)
{
    const msc__snapshot_range *traces = snapshot->traces.items;

    *count = 0;
    if (device >= snapshot->traces.count || traces[device].count == 0)
        return NULL;
    *count = traces[device].count;
    MSC__ASSERT(traces[device].first + traces[device].count <= snapshot->events.count);
    return (const msc_snapshot_event *)snapshot->events.items + traces[device].first;
}

const msc_snapshot_annotation *msc_snapshot_annotations(const msc_snapshot *snapshot, uint32_t *count)
{
    *count = snapshot->annotations.count;
    return snapshot->annotations.items;
}

const uint32_t *msc_snapshot_stack(const msc_snapshot *snapshot, uint32_t stack, uint32_t *count)
{
    const msc__snapshot_range *range = (const msc__snapshot_range *)snapshot->stacks.items + stack;

    *count = range->count;
    MSC__ASSERT(range->first + range->count <= snapshot->stack_frames.count);
    return range->count == 0 ? NULL : (const uint32_t *)snapshot->stack_frames.items + range->first;
}

uint32_t msc_snapshot_stack_count(const msc_snapshot *snapshot)
{
    return snapshot->stacks.count;
}

msc_snapshot_frame msc_snapshot_frame_at(const msc_snapshot *snapshot, uint32_t frame)
{
    return ((const msc_snapshot_frame *)snapshot->frames.items)[frame];
}

uint32_t msc_snapshot_frame_count(const msc_snapshot *snapshot)
{
    return snapshot->frames.count;
}

const char *msc_snapshot_string(const msc_snapshot *snapshot, uint32_t string)
{
    if (string >= snapshot->strings.count)
        return "";
    MSC__ASSERT(((const uint32_t *)snapshot->strings.items)[string] < snapshot->chars.count);
    return (const char *)snapshot->chars.items + ((const uint32_t *)snapshot->strings.items)[string];
}

void msc_snapshot_settings_read(const msc_snapshot *snapshot, msc_snapshot_settings *out, size_t out_bytes)
{
    msc__sized_copy(out, out_bytes, &snapshot->settings, sizeof snapshot->settings);
}
