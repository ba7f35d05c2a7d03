/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A recorded trace, played into the simulator.
 *
 *     recorded   segment_free  segment_free  segment_alloc  ALLOC   FREE_REQUESTED  FREE_COMPLETED
 *                └──── what the request below caused ────┘    │
 *     simulated  free, free, alloc              ◄── msc_sim_alloc_in
 *
 * Only requests and frees are played. The segment events between two of them must be those that the
 * simulator has made meanwhile: same kind, order, address and size. New segments are put where the card put
 * them, so that ties between equal blocks fall alike.
 *
 * A trace does not tell why memory was given back. Where a limit is known, a request that would cross it
 * releases by itself, and so does garbage collection; that is predicted. What is left is a call of
 * empty_cache, or a retry at a limit that is not known: the simulator releases, and what it
 * releases is compared all the same.
 */
#include "snapshot/snapshot_replay.h"

#include <string.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/sized.h"

/* Lets the text of a configuration name a fraction of memory that is not known; the result is dropped. */
#define ANY_TOTAL_BYTES (UINT64_C(1) << 40)

/* ---- recorded and simulated --------------------------------------------------------------------- */

static bool is_segment_event(uint8_t action)
{
    return action >= MSC_SNAPSHOT_ACTION_SEGMENT_ALLOC && action <= MSC_SNAPSHOT_ACTION_SEGMENT_UNMAP;
}

static bool gives_back(uint8_t action)
{
    return action == MSC_SNAPSHOT_ACTION_SEGMENT_FREE || action == MSC_SNAPSHOT_ACTION_SEGMENT_UNMAP;
}

static msc_snapshot_finding finding_of(const msc_snapshot_event *event)
{
    msc_snapshot_finding finding = {0};

    if (event != NULL) {
        finding.address = event->address;
        finding.size_bytes = event->size_bytes;
        finding.is_there = 1;
        finding.action = event->action;
    }
    return finding;
}

static msc_snapshot_finding finding_of_sim(const msc_sim_segment_event *event)
{
    static const uint8_t actions[MSC_SIM_SEGMENT_KIND_COUNT] = {
        [MSC_SIM_SEGMENT_ALLOC] = MSC_SNAPSHOT_ACTION_SEGMENT_ALLOC,
        [MSC_SIM_SEGMENT_FREE] = MSC_SNAPSHOT_ACTION_SEGMENT_FREE,
        [MSC_SIM_SEGMENT_MAP] = MSC_SNAPSHOT_ACTION_SEGMENT_MAP,
        [MSC_SIM_SEGMENT_UNMAP] = MSC_SNAPSHOT_ACTION_SEGMENT_UNMAP,
    };
    msc_snapshot_finding finding = {0};

    if (event != NULL) {
        MSC__ASSERT((unsigned)event->kind < MSC_SIM_SEGMENT_KIND_COUNT);
        finding.address = event->address;
        finding.size_bytes = event->size_bytes;
        finding.is_there = 1;
        finding.action = actions[event->kind];
    }
    return finding;
}

/* Counts a difference and keeps the first. */
static void differ(msc__replay *replay, uint32_t event, msc_snapshot_difference what,
                   const msc_snapshot_finding *expected, const msc_snapshot_finding *got)
{
    msc_snapshot_replay_result *result = replay->result;

    MSC__ASSERT(what != MSC_SNAPSHOT_DIFFERENCE_NONE && event <= replay->history.event_count);
    result->difference_count++;
    if (result->difference != MSC_SNAPSHOT_DIFFERENCE_NONE)
        return;
    result->difference = (uint8_t)what;
    result->difference_event = event;
    result->expected = *expected;
    result->got = *got;
}

/* Next recorded segment event from `*at` on, before `end`, or NULL. */
static const msc_snapshot_event *next_recorded(const msc__replay *replay, uint32_t *at, uint32_t end)
{
    const msc_snapshot_event *events = replay->history.events;

    MSC__ASSERT(end <= replay->history.event_count);
    while (*at < end && !is_segment_event(events[*at].action))
        ++*at;
    return *at < end ? &events[*at] : NULL;
}

/* Compares the recorded segment events before `end` with those that the simulator has made since. */
static void compare_segments_before(msc__replay *replay, uint32_t end)
{
    uint64_t made;
    const msc_sim_segment_event *sim_events = msc_sim_segment_events(replay->sim, &made);
    uint32_t at = replay->pending;

    MSC__ASSERT(replay->pending <= end && replay->seen_count <= made);
    for (;;) {
        const msc_snapshot_event *event = next_recorded(replay, &at, end);
        const msc_sim_segment_event *sim_event =
            replay->seen_count < made ? &sim_events[replay->seen_count] : NULL;
        msc_snapshot_finding expected = finding_of(event);
        msc_snapshot_finding got = finding_of_sim(sim_event);
        if (event == NULL && sim_event == NULL)
            break;
        if (memcmp(&expected, &got, sizeof got) != 0)
            differ(replay, event != NULL ? at : end, MSC_SNAPSHOT_DIFFERENCE_SEGMENT, &expected, &got);
        replay->result->segment_count += event != NULL;
        replay->seen_count += sim_event != NULL;
        at += event != NULL;
    }
    MSC__ASSERT(replay->seen_count == made);
    replay->pending = end;
}

/* ---- releases ----------------------------------------------------------------------------------- */

/* One past the last event played that gave memory back and is not compared; `pending`: there is none. */
static uint32_t end_of_releases(const msc__replay *replay)
{
    return replay->last_release > replay->pending ? replay->last_release : replay->pending;
}

/* First recorded event of two positions that obtained or gave back memory, or NULL. */
static const msc_snapshot_event *first_segment_event(const msc__replay *replay, uint32_t begin, uint32_t end)
{
    return next_recorded(replay, &begin, end);
}

/* Whether the request at `index`, which obtained memory if it did, released by itself what was given back. */
static bool releases_itself(const msc__replay *replay, uint32_t index, const msc_snapshot_event *obtained)
{
    uint64_t reserved = msc_sim_get_stats(replay->sim).reserved_now_bytes;

    if (replay->limit_bytes == UINT64_MAX)
        return false;
    if (replay->history.events[index].action == MSC_SNAPSHOT_ACTION_OOM)
        return true;
    if (obtained == NULL)
        return false;
    return replay->sim_options.garbage_collection_threshold > 0 ||
           msc__sat_add_u64(reserved, obtained->size_bytes) > replay->limit_bytes;
}

/* Releases as the trace shows before `end`, if it does, and compares up to there. */
static void follow_releases(msc__replay *replay, uint32_t end)
{
    uint32_t last = end_of_releases(replay);

    if (last == replay->pending || last > end)
        return;
    msc_sim_empty_cache(replay->sim);
    replay->result->release_count++;
    compare_segments_before(replay, last);
}

/* ---- events ------------------------------------------------------------------------------------- */

/* Puts the next segment where the card put it. An address that cannot be is left to the comparison. */
static void place_segment(msc__replay *replay, const msc_snapshot_event *obtained)
{
    msc__ignore(msc_sim_place_next_segment(replay->sim, obtained == NULL ? 0 : obtained->address, NULL));
}

/* Plays a request; `id` MSC_NONE for one that failed, which uses an id beyond those of allocations. */
static msc_status play_request(msc__replay *replay, uint32_t index, uint32_t id)
{
    const msc_snapshot_event *event = &replay->history.events[index];
    const msc_snapshot_event *obtained = first_segment_event(replay, end_of_releases(replay), index);
    bool failed = id == MSC_NONE;
    msc_sim_place place = msc__replay_place(replay, failed ? 0 : event->address, event->stream);
    uint32_t used = failed ? replay->history.allocations.count : id;
    msc_snapshot_finding expected = finding_of(event);
    msc_snapshot_finding got = {0};
    msc_status status;

    MSC__ASSERT(failed || id < replay->history.allocations.count);
    if (!releases_itself(replay, index, obtained))
        follow_releases(replay, index);
    place_segment(replay, obtained);
    status = msc_sim_alloc_in(replay->sim, used, event->size_bytes, &place, replay->err);
    if (status != MSC_OK && status != MSC_EDEVMEM)
        return status;
    compare_segments_before(replay, index);
    replay->result->replayed_count++;
    replay->result->oom_count += failed;
    if ((status == MSC_EDEVMEM) != failed)
        differ(replay, index, MSC_SNAPSHOT_DIFFERENCE_REQUEST, &expected, &got);
    if (failed && status == MSC_OK)
        return msc_sim_free(replay->sim, used, replay->err);
    return MSC_OK;
}

/* Whether the simulator holds an id: a request that failed here, and not there, left nothing to free. */
static msc_status forgive(msc_status status)
{
    return status == MSC_EINVAL ? MSC_OK : status;
}

static msc_status play_free_requested(msc__replay *replay, uint32_t index)
{
    follow_releases(replay, index);
    compare_segments_before(replay, index);
    replay->result->replayed_count++;
    return forgive(msc_sim_free_request(replay->sim, msc__history_of(&replay->history, index), replay->err));
}

/* Finds the call that the free completed at `index` belongs to, and whether it releases by itself. */
static void find_cause(msc__replay *replay, uint32_t index)
{
    const msc_snapshot_event *events = replay->history.events;
    uint32_t released = end_of_releases(replay);
    uint32_t i = index;

    while (i < replay->history.event_count &&
           (is_segment_event(events[i].action) || events[i].action == MSC_SNAPSHOT_ACTION_FREE_COMPLETED)) {
        i++;
        if (gives_back(events[i - 1].action))
            released = i;
    }
    MSC__ASSERT(i > index && i <= replay->history.event_count);
    replay->cause = i;
    replay->cause_releases = i < replay->history.event_count &&
                             releases_itself(replay, i, first_segment_event(replay, released, i));
}

/*
 * A free completes on its own, or inside a request that looks for memory: before anything else, and again
 * before it releases the whole cache. What was given back before it is followed, unless the request does so.
 */
static msc_status play_free_completed(msc__replay *replay, uint32_t index)
{
    uint32_t id = msc__history_of(&replay->history, index);
    const msc__allocation *allocation = msc__history_at(&replay->history, id);

    MSC__ASSERT(allocation->complete == index);
    if (index >= replay->cause)
        find_cause(replay, index);
    if (!replay->cause_releases)
        follow_releases(replay, index);
    replay->result->replayed_count++;
    if (allocation->request == index) /* the request itself was not recorded */
        return forgive(msc_sim_free(replay->sim, id, replay->err));
    return forgive(msc_sim_free_complete(replay->sim, id, replay->err));
}

static msc_status play_event(msc__replay *replay, uint32_t index)
{
    switch (replay->history.events[index].action) {
    case MSC_SNAPSHOT_ACTION_ALLOC:
        return play_request(replay, index, msc__history_of(&replay->history, index));
    case MSC_SNAPSHOT_ACTION_FREE_REQUESTED:
        return play_free_requested(replay, index);
    case MSC_SNAPSHOT_ACTION_FREE_COMPLETED:
        return play_free_completed(replay, index);
    case MSC_SNAPSHOT_ACTION_OOM:
        if (replay->limit_bytes != UINT64_MAX)
            return play_request(replay, index, MSC_NONE);
        replay->result->oom_count++;
        follow_releases(replay, index);
        return MSC_OK;
    default:
        return MSC_OK;
    }
}

static msc_status play_all(msc__replay *replay)
{
    uint32_t count = replay->history.event_count;
    uint32_t i;
    msc_status status = MSC_OK;

    replay->pending = replay->history.first_event;
    for (i = replay->history.first_event; i < count && status == MSC_OK; i++) {
        if (gives_back(replay->history.events[i].action))
            replay->last_release = i + 1;
        status = play_event(replay, i);
    }
    if (status != MSC_OK)
        return status;
    follow_releases(replay, count);
    compare_segments_before(replay, count);
    MSC__ASSERT(replay->pending == count);
    return MSC_OK;
}

/* ---- the map at the end ------------------------------------------------------------------------- */

static msc_snapshot_finding finding_of_block(const msc_snapshot_block *block)
{
    msc_snapshot_finding finding = {0};

    if (block != NULL) {
        finding.address = block->address;
        finding.size_bytes = block->size_bytes;
        finding.is_there = 1;
        finding.action = block->state;
    }
    return finding;
}

static msc_snapshot_finding finding_of_sim_block(const msc_sim_block *block)
{
    static const uint8_t states[MSC_SIM_BLOCK_STATE_COUNT] = {
        [MSC_SIM_BLOCK_FREE] = MSC_SNAPSHOT_STATE_INACTIVE,
        [MSC_SIM_BLOCK_ALLOCATED] = MSC_SNAPSHOT_STATE_ALLOCATED,
        [MSC_SIM_BLOCK_AWAITING] = MSC_SNAPSHOT_STATE_PENDING,
    };
    msc_snapshot_finding finding = {0};

    if (block != NULL) {
        MSC__ASSERT((unsigned)block->state < MSC_SIM_BLOCK_STATE_COUNT);
        finding.address = block->address;
        finding.size_bytes = block->size_bytes;
        finding.is_there = 1;
        finding.action = states[block->state];
    }
    return finding;
}

/* Compares the blocks of a segment; either may be NULL. */
static void compare_blocks(msc__replay *replay, const msc_snapshot_segment *segment,
                           const msc_sim_segment *sim_segment, const msc_sim_block *sim_blocks)
{
    const msc_snapshot_block *blocks = replay->snapshot->blocks.items;
    uint32_t count = segment == NULL ? 0 : segment->block_count;
    uint32_t sim_count = sim_segment == NULL ? 0 : sim_segment->block_end - sim_segment->block_begin;
    uint32_t i;

    MSC__ASSERT(segment == NULL || segment->first_block + count <= replay->snapshot->blocks.count);
    for (i = 0; i < count || i < sim_count; i++) {
        const msc_sim_block *sim_block = i < sim_count ? &sim_blocks[sim_segment->block_begin + i] : NULL;
        const msc_snapshot_block *block = i < count ? &blocks[segment->first_block + i] : NULL;
        msc_snapshot_finding expected = finding_of_block(block);
        msc_snapshot_finding got = finding_of_sim_block(sim_block);
        bool in_use = block != NULL && sim_block != NULL && block->state != MSC_SNAPSHOT_STATE_INACTIVE;
        bool same = memcmp(&expected, &got, sizeof got) == 0 &&
                    (!in_use || block->requested_bytes == sim_block->requested_bytes);
        if (!same)
            differ(replay, replay->history.event_count, MSC_SNAPSHOT_DIFFERENCE_MAP, &expected, &got);
    }
    replay->result->map_block_count += count;
}

static bool is_same_segment(const msc__replay *replay, const msc_snapshot_segment *segment,
                            const msc_sim_segment *sim_segment)
{
    return segment->total_bytes == sim_segment->size_bytes && segment->is_large == sim_segment->is_large &&
           segment->is_expandable == sim_segment->is_expandable &&
           msc__numbering_stream(&replay->numbering, segment->stream) == sim_segment->stream &&
           msc__numbering_pool(&replay->numbering, segment->pool) == sim_segment->pool;
}

/* Segments by address on both sides: each recorded one with the simulated one of the same address. */
static void compare_map(msc__replay *replay, const msc_sim_map *map)
{
    uint32_t count, sim_count, unused;
    const msc_snapshot_segment *segments =
        msc_snapshot_segments(replay->snapshot, replay->history.device, &count);
    const msc_sim_segment *sim_segments = msc_sim_map_segments(map, &sim_count);
    const msc_sim_block *sim_blocks = msc_sim_map_blocks(map, &unused);
    uint32_t i = 0;
    uint32_t j = 0;

    while (i < count || j < sim_count) {
        const msc_snapshot_segment *segment = i < count ? &segments[i] : NULL;
        const msc_sim_segment *sim_segment = j < sim_count ? &sim_segments[j] : NULL;
        if (segment != NULL && sim_segment != NULL && segment->address != sim_segment->address) {
            segment = segment->address < sim_segment->address ? segment : NULL;
            sim_segment = segment == NULL ? sim_segment : NULL;
        }
        MSC__ASSERT(segment != NULL || sim_segment != NULL);
        compare_blocks(replay, segment, sim_segment, sim_blocks);
        if (segment != NULL && sim_segment != NULL && !is_same_segment(replay, segment, sim_segment)) {
            msc_snapshot_finding expected = {segment->address, segment->total_bytes, 1, 0, {0}};
            msc_snapshot_finding got = {sim_segment->address, sim_segment->size_bytes, 1, 0, {0}};
            differ(replay, replay->history.event_count, MSC_SNAPSHOT_DIFFERENCE_MAP, &expected, &got);
        }
        i += segment != NULL;
        j += sim_segment != NULL;
    }
}

static msc_status compare_end(msc__replay *replay)
{
    msc_sim_map *map = NULL;
    msc_status status;

    if (!replay->history.ends_in_blocks)
        return MSC_OK;
    status = msc_sim_map_create(replay->sim, &map, replay->err);
    if (status != MSC_OK)
        return status;
    replay->result->map_compared = 1;
    compare_map(replay, map);
    msc_sim_map_destroy(map);
    return MSC_OK;
}

/* ---- peaks -------------------------------------------------------------------------------------- */

/* Most requested bytes of active blocks, from the first event on. */
static uint64_t recorded_active_peak(const msc__history *history)
{
    uint64_t now = 0;
    uint64_t peak;
    uint32_t i;

    for (i = 0; i < history->allocations.count; i++) {
        const msc__allocation *allocation = msc__history_at(history, i);
        if (allocation->alloc == MSC__BEFORE)
            now = msc__sat_add_u64(now, allocation->requested_bytes);
    }
    peak = now;
    for (i = history->first_event; i < history->event_count; i++) {
        uint32_t index = msc__history_of(history, i);
        if (index == MSC_NONE)
            continue;
        if (msc__history_at(history, index)->alloc == i)
            now = msc__sat_add_u64(now, msc__history_at(history, index)->requested_bytes);
        if (msc__history_at(history, index)->complete == i)
            now = msc__sat_sub_u64(now, msc__history_at(history, index)->requested_bytes);
        peak = now > peak ? now : peak;
    }
    return peak;
}

static void read_peaks(msc__replay *replay)
{
    msc_snapshot_replay_result *result = replay->result;
    msc_sim_memory_stats stats;

    msc_sim_get_memory_stats(replay->sim, &stats);
    result->retry_count =
        stats.num_alloc_retries > UINT32_MAX ? UINT32_MAX : (uint32_t)stats.num_alloc_retries;
    result->reserved_peak_bytes = stats.reserved_bytes[MSC_SIM_STAT_ALL].peak;
    result->requested_peak_bytes = stats.requested_bytes[MSC_SIM_STAT_ALL].peak;
    result->allocated_peak_bytes = stats.allocated_bytes[MSC_SIM_STAT_ALL].peak;
    result->active_peak_bytes = stats.active_bytes[MSC_SIM_STAT_ALL].peak;
    result->recorded_reserved_peak_bytes = msc__history_reserved_peak(&replay->history);
    result->recorded_requested_peak_bytes = recorded_active_peak(&replay->history);
}

/* ---- the whole ---------------------------------------------------------------------------------- */

void msc_snapshot_replay_options_init(msc_snapshot_replay_options *out, size_t struct_bytes)
{
    msc_snapshot_replay_options options = {sizeof options, UINT64_MAX, UINT64_MAX, UINT64_MAX};

    msc__sized_init(out, struct_bytes, &options, sizeof options);
}

/*
 * What the snapshot says in numbers. It is what was in force: the text is only the last one that was set. A
 * threshold is kept as the text has it when the two agree, since the number is rounded.
 */
static void read_numbers(msc_sim_options *options, const msc_snapshot_settings *settings)
{
    uint32_t i;

    if (!settings->has_numbers)
        return;
    options->max_split_bytes = settings->max_split_bytes;
    options->expandable_segments = settings->expandable_segments;
    if (settings->garbage_collection_ppm != (uint32_t)(options->garbage_collection_threshold * 1e6 + 0.5))
        options->garbage_collection_threshold = settings->garbage_collection_ppm / 1e6;
    for (i = 0; i < MSC_SIM_ROUNDUP_INTERVALS && i < MSC_SNAPSHOT_DIVISION_COUNT; i++)
        options->roundup_power2_divisions[i] = settings->divisions[i];
}

/* The text first, then the numbers, then what the caller knows. */
static msc_status read_settings(msc__replay *replay, const msc_snapshot_replay_options *given)
{
    const msc_snapshot_settings *settings = &replay->snapshot->settings;
    msc_sim_options *options = &replay->sim_options;
    bool total_known = given->device_total_bytes != UINT64_MAX;
    msc_status status = MSC_OK;

    *options = msc_sim_options_default(MSC_SIM_CUDA);
    if (settings->conf != MSC_NONE)
        status = msc_sim_options_parse(msc_snapshot_string(replay->snapshot, settings->conf),
                                       total_known ? given->device_total_bytes : ANY_TOTAL_BYTES, options,
                                       replay->err);
    if (status != MSC_OK)
        return status;
    read_numbers(options, settings);
    options->device_total_bytes = given->device_total_bytes;
    options->capacity_bytes = given->capacity_bytes;
    if (given->allowed_bytes != UINT64_MAX || !total_known)
        options->allowed_bytes = given->allowed_bytes;
    options->record_segments = 1;
    replay->limit_bytes =
        options->capacity_bytes < options->allowed_bytes ? options->capacity_bytes : options->allowed_bytes;
    return MSC_OK;
}

/*
 * One past a request that the trace may begin in the middle of: it starts with memory given back, and the
 * first thing after that is a request, which may have given back more before. Otherwise where it begins.
 */
static uint32_t first_whole_event(const msc__history *history)
{
    bool gave_back = false;
    uint32_t i;

    for (i = history->first_event; i < history->event_count; i++) {
        uint8_t action = history->events[i].action;
        gave_back = gave_back || gives_back(action);
        if (gave_back && (action == MSC_SNAPSHOT_ACTION_ALLOC || action == MSC_SNAPSHOT_ACTION_OOM))
            return i + 1;
        if (!is_segment_event(action) && action != MSC_SNAPSHOT_ACTION_FREE_COMPLETED)
            break;
    }
    return history->first_event;
}

static msc_status read_history(msc__replay *replay, uint32_t device)
{
    msc_status status = msc__history_init(&replay->history, replay->snapshot, device, 0, replay->err);
    uint32_t first;

    if (status != MSC_OK)
        return status;
    first = first_whole_event(&replay->history);
    if (first == replay->history.first_event)
        return MSC_OK;
    msc__history_fini(&replay->history);
    return msc__history_init(&replay->history, replay->snapshot, device, first, replay->err);
}

static msc_status run(msc__replay *replay)
{
    msc_status status = msc__numbering_init(&replay->numbering, &replay->history, replay->err);

    if (status == MSC_OK)
        status = msc_sim_create(replay->snapshot->ctx, &replay->sim_options, &replay->sim, replay->err);
    if (status == MSC_OK)
        status = msc__replay_start(replay);
    if (status == MSC_OK)
        status = play_all(replay);
    if (status == MSC_OK)
        status = compare_end(replay);
    if (status == MSC_OK)
        read_peaks(replay);
    return status;
}

msc_status msc_snapshot_replay_into(const msc_snapshot *snapshot, uint32_t device,
                                    const msc_snapshot_replay_options *options, msc_sim_options *sim_options,
                                    msc_snapshot_replay_result *out, size_t out_bytes, msc_error *err)
{
    msc_snapshot_replay_options given = msc_snapshot_replay_options_default();
    msc_snapshot_replay_result result = {0};
    msc__replay replay = {.snapshot = snapshot, .result = &result, .err = err};
    msc_status status = MSC_OK;

    msc__sized_copy(out, out_bytes, NULL, 0);
    if (options != NULL)
        status = MSC__READ_OPTIONS("", msc_snapshot_replay_options, device_total_bytes, options, &given, err);
    if (status != MSC_OK)
        return status;
    status = read_settings(&replay, &given);
    if (status == MSC_OK)
        status = read_history(&replay, device);
    if (status == MSC_OK) {
        result.first_event = replay.history.first_event;
        status = run(&replay);
    }
    if (sim_options != NULL)
        msc__sized_init(sim_options, sim_options->struct_bytes, &replay.sim_options,
                        sizeof replay.sim_options);
    msc_sim_destroy(replay.sim);
    msc__numbering_fini(snapshot->ctx, &replay.numbering);
    msc__history_fini(&replay.history);
    if (status == MSC_OK)
        msc__sized_copy(out, out_bytes, &result, sizeof result);
    return status;
}
