/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dicts of a snapshot, recognised by their keys and turned into records.
 *
 *     action                                an entry of a trace
 *     blocks                                a segment
 *     state                                 a block
 *     filename                              a frame
 *     segments, device_traces               the whole
 *     expandable_segments, max_split_size   the settings
 *     device, time_us                       an annotation
 *     "1", "2", "4" ...                     the divisions of roundup_power2_divisions
 *
 * Keys that no record knows are ignored, and so is a dict that is none of these: a later PyTorch may add
 * both. A known key must hold what it should; what a record cannot do without must be there.
 */
#include <inttypes.h>
#include <string.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"
#include "snapshot/snapshot_pickle.h"

#define KEY_LIST(X)                                                                                          \
    X(action)                                                                                                \
    X(addr)                                                                                                  \
    X(address)                                                                                               \
    X(size)                                                                                                  \
    X(stream)                                                                                                \
    X(time_us)                                                                                               \
    X(device_free)                                                                                           \
    X(frames)                                                                                                \
    X(compile_context)                                                                                       \
    X(user_metadata)                                                                                         \
    X(requested_size)                                                                                        \
    X(state)                                                                                                 \
    X(device)                                                                                                \
    X(total_size)                                                                                            \
    X(allocated_size)                                                                                        \
    X(active_size)                                                                                           \
    X(segment_type)                                                                                          \
    X(segment_pool_id)                                                                                       \
    X(is_expandable)                                                                                         \
    X(blocks)                                                                                                \
    X(filename)                                                                                              \
    X(name)                                                                                                  \
    X(line)                                                                                                  \
    X(stage)                                                                                                 \
    X(segments)                                                                                              \
    X(device_traces)                                                                                         \
    X(allocator_settings)                                                                                    \
    X(external_annotations)                                                                                  \
    X(PYTORCH_CUDA_ALLOC_CONF)                                                                               \
    X(PYTORCH_ALLOC_CONF)                                                                                    \
    X(last_allocator_settings)                                                                               \
    X(max_split_size)                                                                                        \
    X(garbage_collection_threshold)                                                                          \
    X(expandable_segments)                                                                                   \
    X(roundup_power2_divisions)

/* Ids of these strings, since they are the first that are entered. */
typedef enum key {
#define KEY_ENUM(name) KEY_##name,
    KEY_LIST(KEY_ENUM)
#undef KEY_ENUM
        KEY_COUNT
} key;

static const char *const key_names[KEY_COUNT] = {
#define KEY_NAME(name) #name,
    KEY_LIST(KEY_NAME)
#undef KEY_NAME
};

_Static_assert(KEY_COUNT <= 64, "a bit for every key");

/* A dict by known keys. */
typedef struct fields {
    msc__pickle *pickle;
    uint64_t present; /* bit per key */
    msc__value at[KEY_COUNT];
} fields;

msc_status msc__pickle_enter_keys(msc_snapshot *snapshot, msc_error *err)
{
    uint32_t i;
    uint32_t id;
    msc_status status = MSC_OK;

    for (i = 0; i < KEY_COUNT && status == MSC_OK; i++)
        status = msc__snapshot_intern_string(snapshot, key_names[i], strlen(key_names[i]), &id, err);
    MSC__ASSERT(status != MSC_OK || snapshot->strings.count == KEY_COUNT);
    return status;
}

/* ---- fields ------------------------------------------------------------------------------------- */

static bool has(const fields *f, key k)
{
    return (f->present >> k & 1) != 0;
}

static bool refuse(const fields *f, key k, const char *wanted)
{
    char problem[128];
    msc_error scratch;

    (void)msc__fail(&scratch, MSC_EFORMAT, "%s must be %s", key_names[k], wanted);
    memcpy(problem, scratch.message, sizeof problem - 1);
    problem[sizeof problem - 1] = '\0';
    return msc__pickle_fail(f->pickle, MSC_EFORMAT, problem);
}

static bool is_none(msc__value value)
{
    return value == msc__value_make(MSC__TAG_CONSTANT, MSC__CONSTANT_NONE);
}

/* Readers leave `*out` as it is where the key is missing. */
static bool read_u64(const fields *f, key k, uint64_t *out)
{
    return !has(f, k) || msc__pickle_to_u64(f->pickle, f->at[k], out) ||
           refuse(f, k, "an integer from 0 to 2^64 - 1");
}

/* Handles of streams are printed as signed numbers. */
static bool read_bits(const fields *f, key k, uint64_t *out)
{
    int64_t number;

    if (!has(f, k) || msc__pickle_to_u64(f->pickle, f->at[k], out))
        return true;
    if (!msc__pickle_to_i64(f->pickle, f->at[k], &number))
        return refuse(f, k, "an integer of 64 bits");
    *out = (uint64_t)number;
    return true;
}

static bool read_u32(const fields *f, key k, uint32_t *out)
{
    uint64_t number = *out;

    if (!read_u64(f, k, &number))
        return false;
    if (number > UINT32_MAX)
        return refuse(f, k, "an integer from 0 to 2^32 - 1");
    *out = (uint32_t)number;
    return true;
}

static bool read_device(const fields *f, uint32_t *out)
{
    return read_u32(f, KEY_device, out) &&
           (*out < MSC__SNAPSHOT_MOST_DEVICES || refuse(f, KEY_device, "below 1024"));
}

static bool read_bool(const fields *f, key k, uint8_t *out)
{
    uint64_t number = *out;

    if (!read_u64(f, k, &number))
        return false;
    *out = number != 0;
    return true;
}

static bool read_i64(const fields *f, key k, int64_t *out)
{
    return !has(f, k) || msc__pickle_to_i64(f->pickle, f->at[k], out) ||
           refuse(f, k, "an integer of 64 bits");
}

static bool read_string(const fields *f, key k, uint32_t *out)
{
    if (!has(f, k) || is_none(f->at[k]))
        return true;
    if (msc__value_tag(f->at[k]) != MSC__TAG_STRING)
        return refuse(f, k, "a string");
    *out = (uint32_t)msc__value_payload(f->at[k]);
    MSC__ASSERT(*out < f->pickle->snapshot->strings.count);
    return true;
}

/* Remarks that nothing depends on: what is no string is left out. */
static void read_remark(const fields *f, key k, uint32_t *out)
{
    if (has(f, k) && msc__value_tag(f->at[k]) == MSC__TAG_STRING)
        *out = (uint32_t)msc__value_payload(f->at[k]);
}

static bool read_stack(const fields *f, uint32_t *out)
{
    msc__object object;

    if (!has(f, KEY_frames) || is_none(f->at[KEY_frames]))
        return true;
    object = msc__pickle_object(f->pickle, f->at[KEY_frames]);
    if (object.kind == MSC__KIND_STACK)
        *out = object.payload;
    MSC__ASSERT(*out < f->pickle->snapshot->stacks.count);
    return object.kind == MSC__KIND_STACK || object.kind == MSC__KIND_EMPTY ||
           refuse(f, KEY_frames, "a list of frames");
}

/* A list of records; one that is missing, None or empty gives an empty range. */
static bool read_range(const fields *f, key k, msc__kind kind, const char *wanted, msc__snapshot_range *out)
{
    msc__object object;

    *out = (msc__snapshot_range){0, 0};
    if (!has(f, k) || is_none(f->at[k]))
        return true;
    object = msc__pickle_object(f->pickle, f->at[k]);
    MSC__ASSERT(object.kind != kind || object.payload < f->pickle->ranges.count);
    if (object.kind == kind)
        *out = ((const msc__snapshot_range *)f->pickle->ranges.items)[object.payload];
    return object.kind == kind || object.kind == MSC__KIND_EMPTY || refuse(f, k, wanted);
}

static bool require(const fields *f, key k, const char *of)
{
    char problem[128];
    msc_error scratch;

    if (has(f, k))
        return true;
    (void)msc__fail(&scratch, MSC_EFORMAT, "%s has no %s", of, key_names[k]);
    memcpy(problem, scratch.message, sizeof problem - 1);
    problem[sizeof problem - 1] = '\0';
    return msc__pickle_fail(f->pickle, MSC_EFORMAT, problem);
}

/* Whether the field is this very string. */
static bool is_text(const fields *f, key k, const char *text)
{
    return has(f, k) && msc__value_tag(f->at[k]) == MSC__TAG_STRING &&
           strcmp(msc_snapshot_string(f->pickle->snapshot, (uint32_t)msc__value_payload(f->at[k])), text) ==
               0;
}

/* Adds a record to its table and makes it what the dict is. */
static bool add_record(const fields *f, msc__array *table, size_t item_bytes, const void *item,
                       msc__kind kind, msc__object *object)
{
    object->payload = table->count;
    object->kind = (uint8_t)kind;
    MSC__ASSERT(kind > MSC__KIND_SET && kind < MSC__KIND_COUNT);
    return msc__pickle_check(f->pickle,
                             msc__array_push(f->pickle->ctx, table, item_bytes, item, f->pickle->err));
}

/* ---- records ------------------------------------------------------------------------------------ */

static bool settle_event(const fields *f, msc__object *object)
{
    msc_snapshot_event event = {0};
    uint32_t i;

    event.compile_context = MSC_NONE;
    event.user_metadata = MSC_NONE;
    event.action = MSC_SNAPSHOT_ACTION_OTHER;
    for (i = 0; i < MSC_SNAPSHOT_ACTION_OTHER; i++) {
        if (is_text(f, KEY_action, msc_snapshot_action_name((msc_snapshot_action)i)))
            event.action = (uint8_t)i;
    }
    if (event.action <= MSC_SNAPSHOT_ACTION_SEGMENT_UNMAP &&
        !(require(f, KEY_addr, "an entry of a trace") && require(f, KEY_size, "an entry of a trace")))
        return false;
    if (!read_u64(f, KEY_addr, &event.address) || !read_u64(f, KEY_device_free, &event.address) ||
        !read_u64(f, KEY_size, &event.size_bytes) || !read_bits(f, KEY_stream, &event.stream) ||
        !read_i64(f, KEY_time_us, &event.time_us) || !read_stack(f, &event.stack))
        return false;
    if (event.size_bytes > UINT64_MAX - event.address && event.action <= MSC_SNAPSHOT_ACTION_SEGMENT_UNMAP)
        return refuse(f, KEY_size, "within the 64 bits of an address");
    read_remark(f, KEY_compile_context, &event.compile_context);
    read_remark(f, KEY_user_metadata, &event.user_metadata);
    return add_record(f, &f->pickle->snapshot->events, sizeof event, &event, MSC__KIND_EVENT, object);
}

static bool settle_block(const fields *f, msc__object *object)
{
    msc_snapshot_block block = {0};

    if (!require(f, KEY_size, "a block") || !read_u64(f, KEY_size, &block.size_bytes))
        return false;
    block.requested_bytes = block.size_bytes;
    if (is_text(f, KEY_state, "active_allocated"))
        block.state = MSC_SNAPSHOT_STATE_ALLOCATED;
    else if (is_text(f, KEY_state, "active_pending_free") || is_text(f, KEY_state, "active_awaiting_free"))
        block.state = MSC_SNAPSHOT_STATE_PENDING;
    else if (is_text(f, KEY_state, "inactive"))
        block.state = MSC_SNAPSHOT_STATE_INACTIVE;
    else
        return refuse(f, KEY_state, "active_allocated, active_pending_free or inactive");
    return read_u64(f, KEY_address, &block.address) &&
           read_u64(f, KEY_requested_size, &block.requested_bytes) && read_stack(f, &block.stack) &&
           add_record(f, &f->pickle->snapshot->blocks, sizeof block, &block, MSC__KIND_BLOCK, object);
}

static bool read_pool(const fields *f, uint64_t pool[2])
{
    msc__object object;

    if (!has(f, KEY_segment_pool_id))
        return true;
    object = msc__pickle_object(f->pickle, f->at[KEY_segment_pool_id]);
    if (object.kind != MSC__KIND_PAIR)
        return refuse(f, KEY_segment_pool_id, "a pair of integers");
    MSC__ASSERT(object.payload + 2 <= f->pickle->wide.count);
    memcpy(pool, (const uint64_t *)f->pickle->wide.items + object.payload, 2 * sizeof *pool);
    return true;
}

/* Older files give a block no address; its place in the segment says it. */
static bool place_blocks(const fields *f, msc_snapshot_segment *segment)
{
    msc_snapshot_block *blocks = f->pickle->snapshot->blocks.items;
    uint64_t address = segment->address;
    uint32_t i;

    MSC__ASSERT(segment->first_block + segment->block_count <= f->pickle->snapshot->blocks.count);
    for (i = 0; i < segment->block_count; i++) {
        msc_snapshot_block *block = &blocks[segment->first_block + i];
        if (block->address != 0 && block->address != address)
            return msc__pickle_fail(f->pickle, MSC_EFORMAT, "the blocks of a segment leave a gap or overlap");
        block->address = address;
        if (!msc__add_u64(address, block->size_bytes, &address))
            return refuse(f, KEY_blocks, "within the 64 bits of an address");
    }
    if (segment->block_count > 0 && address - segment->address != segment->total_bytes)
        return msc__pickle_fail(f->pickle, MSC_EFORMAT, "the blocks of a segment do not fill it");
    return true;
}

static bool settle_segment(const fields *f, msc__object *object)
{
    msc_snapshot_segment segment = {0};
    msc__snapshot_range blocks;

    if (!require(f, KEY_address, "a segment") || !require(f, KEY_total_size, "a segment") ||
        !read_u64(f, KEY_address, &segment.address) || !read_u64(f, KEY_total_size, &segment.total_bytes) ||
        !read_u64(f, KEY_allocated_size, &segment.allocated_bytes) ||
        !read_u64(f, KEY_active_size, &segment.active_bytes) ||
        !read_u64(f, KEY_requested_size, &segment.requested_bytes) ||
        !read_bits(f, KEY_stream, &segment.stream) || !read_device(f, &segment.device) ||
        !read_bool(f, KEY_is_expandable, &segment.is_expandable) || !read_pool(f, segment.pool) ||
        !read_stack(f, &segment.stack) ||
        !read_range(f, KEY_blocks, MSC__KIND_BLOCKS, "a list of blocks", &blocks))
        return false;
    segment.is_large = !is_text(f, KEY_segment_type, "small");
    segment.first_block = blocks.first;
    segment.block_count = blocks.count;
    return place_blocks(f, &segment) &&
           add_record(f, &f->pickle->snapshot->segments, sizeof segment, &segment, MSC__KIND_SEGMENT, object);
}

static bool settle_frame(const fields *f, msc__object *object)
{
    msc_snapshot_frame frame = {MSC_NONE, MSC_NONE, 0};
    int64_t line = 0;

    object->kind = MSC__KIND_FRAME;
    if (!read_string(f, KEY_filename, &frame.file) || !read_string(f, KEY_name, &frame.function) ||
        !read_i64(f, KEY_line, &line))
        return false;
    frame.line = line < 0 || line > UINT32_MAX ? 0 : (uint32_t)line;
    return msc__pickle_check(
        f->pickle, msc__snapshot_intern_frame(f->pickle->snapshot, &frame, &object->payload, f->pickle->err));
}

static bool settle_annotation(const fields *f, msc__object *object)
{
    msc_snapshot_annotation annotation = {0};

    annotation.name = MSC_NONE;
    annotation.stage = MSC_NONE;
    read_remark(f, KEY_name, &annotation.name);
    read_remark(f, KEY_stage, &annotation.stage);
    return read_i64(f, KEY_time_us, &annotation.time_us) && read_device(f, &annotation.device) &&
           add_record(f, &f->pickle->snapshot->annotations, sizeof annotation, &annotation,
                      MSC__KIND_ANNOTATION, object);
}

/* ---- settings and the whole --------------------------------------------------------------------- */

/* Bits of a double in millionths, within 0 and 1. */
static uint32_t to_ppm(uint64_t bits)
{
    double number;

    memcpy(&number, &bits, sizeof number);
    if (!(number > 0))
        return 0;
    return number >= 1 ? 1000000 : (uint32_t)(number * 1e6 + 0.5);
}

static bool settle_settings(const fields *f, msc__object *object)
{
    msc_snapshot_settings *settings = &f->pickle->snapshot->settings;
    const uint64_t *wide = f->pickle->wide.items;
    msc__value threshold = f->at[KEY_garbage_collection_threshold];
    uint32_t i;

    object->kind = MSC__KIND_SETTINGS;
    settings->is_recorded = 1;
    settings->has_numbers = has(f, KEY_max_split_size) && has(f, KEY_expandable_segments);
    if (has(f, KEY_garbage_collection_threshold) && msc__value_tag(threshold) == MSC__TAG_FLOAT)
        settings->garbage_collection_ppm = to_ppm(wide[msc__value_payload(threshold)]);
    if (has(f, KEY_roundup_power2_divisions)) {
        msc__object divisions = msc__pickle_object(f->pickle, f->at[KEY_roundup_power2_divisions]);
        MSC__ASSERT(divisions.kind != MSC__KIND_DIVISIONS ||
                    divisions.payload + MSC_SNAPSHOT_DIVISION_COUNT <= f->pickle->wide.count);
        for (i = 0; divisions.kind == MSC__KIND_DIVISIONS && i < MSC_SNAPSHOT_DIVISION_COUNT; i++)
            settings->divisions[i] = (uint32_t)wide[divisions.payload + i];
    }
    return read_bits(f, KEY_max_split_size, &settings->max_split_bytes) &&
           read_bool(f, KEY_expandable_segments, &settings->expandable_segments) &&
           read_string(f, KEY_last_allocator_settings, &settings->conf) &&
           read_string(f, KEY_PYTORCH_ALLOC_CONF, &settings->conf) &&
           read_string(f, KEY_PYTORCH_CUDA_ALLOC_CONF, &settings->conf);
}

/* Older files have the text of PYTORCH_CUDA_ALLOC_CONF in the place of the dict. */
static bool read_settings(const fields *f)
{
    msc__kind kind;

    if (!has(f, KEY_allocator_settings) || is_none(f->at[KEY_allocator_settings]))
        return true;
    if (msc__value_tag(f->at[KEY_allocator_settings]) == MSC__TAG_STRING) {
        f->pickle->snapshot->settings.is_recorded = 1;
        return read_string(f, KEY_allocator_settings, &f->pickle->snapshot->settings.conf);
    }
    kind = (msc__kind)msc__pickle_object(f->pickle, f->at[KEY_allocator_settings]).kind;
    return kind == MSC__KIND_SETTINGS || kind == MSC__KIND_EMPTY ||
           refuse(f, KEY_allocator_settings, "the allocator's settings");
}

static bool settle_top(const fields *f, msc__object *object)
{
    msc__snapshot_range segments;
    msc__snapshot_range traces;
    msc__snapshot_range annotations;
    uint32_t index;

    object->kind = MSC__KIND_TOP;
    if (!require(f, KEY_segments, "a snapshot") ||
        !read_range(f, KEY_segments, MSC__KIND_SEGMENTS, "a list of segments", &segments) ||
        !read_range(f, KEY_device_traces, MSC__KIND_TRACES, "a list of traces", &traces) ||
        !read_range(f, KEY_external_annotations, MSC__KIND_ANNOTATIONS, "a list of annotations",
                    &annotations) ||
        !read_settings(f))
        return false;
    if (traces.count > MSC__SNAPSHOT_MOST_DEVICES)
        return refuse(f, KEY_device_traces, "a list of at most 1024 traces");
    return msc__pickle_add_range(f->pickle, segments.first, segments.count, &object->payload) &&
           msc__pickle_add_range(f->pickle, traces.first, traces.count, &index) &&
           msc__pickle_add_range(f->pickle, annotations.first, annotations.count, &index);
}

/* Moves a range to the front of its table and drops the rest, which nothing names any more. */
static void keep_only(msc__array *table, size_t item_bytes, msc__snapshot_range range)
{
    MSC__ASSERT(range.first + range.count <= table->count);
    if (range.count > 0 && range.first > 0)
        memmove(table->items, (char *)table->items + range.first * item_bytes, range.count * item_bytes);
    table->count = range.count;
}

bool msc__pickle_keep_result(msc__pickle *pickle, msc__value result)
{
    static const msc__snapshot_range none = {0, 0};
    msc_snapshot *snapshot = pickle->snapshot;
    const msc__snapshot_range *ranges = pickle->ranges.items;
    msc__object object = msc__pickle_object(pickle, result);

    if (object.kind != MSC__KIND_TOP && object.kind != MSC__KIND_SEGMENTS)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a memory snapshot, a dict with segments, is expected");
    MSC__ASSERT(object.payload + (object.kind == MSC__KIND_TOP ? 3u : 1u) <= pickle->ranges.count);
    ranges += object.payload;
    keep_only(&snapshot->segments, sizeof(msc_snapshot_segment), ranges[0]);
    keep_only(&snapshot->traces, sizeof *ranges, object.kind == MSC__KIND_TOP ? ranges[1] : none);
    keep_only(&snapshot->annotations, sizeof(msc_snapshot_annotation),
              object.kind == MSC__KIND_TOP ? ranges[2] : none);
    return true;
}

/* ---- recognising -------------------------------------------------------------------------------- */

static bool is_decimal(const char *text)
{
    const char *at = text;

    while (*at >= '0' && *at <= '9')
        at++;
    return at > text && at - text < 10 && *at == '\0';
}

/* Index of the interval that "1", "2", "4" ... names; the count when it is none. */
static uint32_t interval_of(const char *text)
{
    uint32_t number = 0;
    uint32_t i;

    MSC__ASSERT(is_decimal(text));
    for (; *text != '\0'; text++)
        number = number * 10 + (uint32_t)(*text - '0');
    for (i = 0; i < MSC_SNAPSHOT_DIVISION_COUNT && UINT32_C(1) << i != number; i++)
        continue;
    return i;
}

/* A dict whose keys are decimal numbers; anything else in it makes it OTHER. */
static bool settle_divisions(msc__pickle *pickle, const msc__value *pairs, uint32_t count,
                             msc__object *object)
{
    uint64_t words[MSC_SNAPSHOT_DIVISION_COUNT + 1] = {0};
    uint32_t index = pickle->wide.count;
    uint32_t i;

    for (i = 0; i < count; i++) {
        const char *text = "";
        uint64_t number;
        if (msc__value_tag(pairs[2 * i]) == MSC__TAG_STRING)
            text = msc_snapshot_string(pickle->snapshot, (uint32_t)msc__value_payload(pairs[2 * i]));
        if (!is_decimal(text) || !msc__pickle_to_u64(pickle, pairs[2 * i + 1], &number))
            return true;
        words[interval_of(text)] = number > UINT32_MAX ? UINT32_MAX : number;
    }
    for (i = 0; i < MSC_SNAPSHOT_DIVISION_COUNT; i++) {
        if (!msc__pickle_check(
                pickle, msc__array_push(pickle->ctx, &pickle->wide, sizeof words[i], &words[i], pickle->err)))
            return false;
    }
    MSC__ASSERT(pickle->wide.count == index + MSC_SNAPSHOT_DIVISION_COUNT);
    object->payload = index;
    object->kind = MSC__KIND_DIVISIONS;
    return true;
}

static bool settle_fields(const fields *f, msc__object *object)
{
    if (has(f, KEY_action))
        return settle_event(f, object);
    if (has(f, KEY_blocks) || has(f, KEY_total_size))
        return settle_segment(f, object);
    if (has(f, KEY_state))
        return settle_block(f, object);
    if (has(f, KEY_filename))
        return settle_frame(f, object);
    if (has(f, KEY_segments) || has(f, KEY_device_traces))
        return settle_top(f, object);
    if (has(f, KEY_max_split_size) || has(f, KEY_expandable_segments) ||
        has(f, KEY_PYTORCH_CUDA_ALLOC_CONF) || has(f, KEY_PYTORCH_ALLOC_CONF) ||
        has(f, KEY_last_allocator_settings))
        return settle_settings(f, object);
    if (has(f, KEY_device) && has(f, KEY_time_us))
        return settle_annotation(f, object);
    return true;
}

bool msc__pickle_settle_dict(msc__pickle *pickle, const msc__value *pairs, uint32_t pair_count,
                             msc__object *object)
{
    fields f;
    uint32_t i;

    f.pickle = pickle;
    f.present = 0;
    memset(f.at, 0, sizeof f.at);
    for (i = 0; i < pair_count; i++) {
        uint64_t id = msc__value_payload(pairs[2 * i]);
        if (msc__value_tag(pairs[2 * i]) != MSC__TAG_STRING || id >= KEY_COUNT)
            continue;
        f.present |= UINT64_C(1) << id;
        f.at[id] = pairs[2 * i + 1];
    }
    if (f.present == 0)
        return settle_divisions(pickle, pairs, pair_count, object);
    return settle_fields(&f, object);
}
