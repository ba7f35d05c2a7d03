/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Containers of a pickle, and what lists become.
 *
 *     (  }  "line" 7  "name" "f"  u        the dict is made empty, then filled
 *     ]  ( <dict> <dict>  e                putting it into the list settles it: now it is frame 3
 *     "frames" <list>  s                   putting the list into a dict settles that: stack 5
 *
 * A pickler fills a container before it puts it anywhere, unless the container holds itself. So contents
 * live from the first item to the moment of use, in an array that the next container takes over, and a
 * snapshot of a gigabyte needs the contents of some ten containers at a time. A container that is changed
 * after it was settled holds itself or was made by hand; it is refused.
 *
 * Nothing here recurses: what is inside a container is settled already.
 *
 * Records of one list are expected to lie side by side in their table, since they were settled one after
 * the other. Where they do not, because the list names one of them twice, they are copied to the end.
 */
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "snapshot/snapshot_pickle.h"

/* Contents that held more are given back, so that one large list does not stay for good. */
#define MOST_KEPT_ITEMS 1024u

static msc__object *object_at(const msc__pickle *pickle, msc__value value)
{
    MSC__ASSERT(msc__value_tag(value) == MSC__TAG_OBJECT);
    MSC__ASSERT(msc__value_payload(value) < pickle->objects.count);
    return (msc__object *)pickle->objects.items + msc__value_payload(value);
}

static msc__array *contents_at(const msc__pickle *pickle, uint32_t payload)
{
    MSC__ASSERT(payload > 0 && payload <= pickle->open.count);
    return (msc__array *)pickle->open.items + (payload - 1);
}

msc__object msc__pickle_object(const msc__pickle *pickle, msc__value value)
{
    static const msc__object none = {0, MSC__KIND_OTHER, {0}};

    return msc__value_tag(value) == MSC__TAG_OBJECT ? *object_at(pickle, value) : none;
}

bool msc__pickle_push_object(msc__pickle *pickle, msc__kind kind)
{
    msc__object object = {0, (uint8_t)kind, {0}};
    uint32_t index = pickle->objects.count;

    return msc__pickle_check(
               pickle, msc__array_push(pickle->ctx, &pickle->objects, sizeof object, &object, pickle->err)) &&
           msc__pickle_push(pickle, msc__value_make(MSC__TAG_OBJECT, index));
}

/* ---- contents ----------------------------------------------------------------------------------- */

/* Gives a container an array for its contents. */
static bool take_contents(msc__pickle *pickle, msc__object *object)
{
    static const msc__array empty = {0};

    MSC__ASSERT(object->payload == 0 && pickle->spare.count <= pickle->open.count);
    if (pickle->spare.count > 0) {
        object->payload = ((uint32_t *)pickle->spare.items)[--pickle->spare.count];
        return true;
    }
    /* Room to give every slot back is made now: giving back must not fail. */
    if (!msc__pickle_check(pickle, msc__array_reserve(pickle->ctx, &pickle->spare, sizeof(uint32_t),
                                                      pickle->open.count + 1, pickle->err)) ||
        !msc__pickle_check(pickle,
                           msc__array_push(pickle->ctx, &pickle->open, sizeof empty, &empty, pickle->err)))
        return false;
    object->payload = pickle->open.count;
    return true;
}

static void give_contents(msc__pickle *pickle, uint32_t payload)
{
    msc__array *contents = contents_at(pickle, payload);

    contents->count = 0;
    if (contents->capacity > MOST_KEPT_ITEMS)
        msc__array_fini(pickle->ctx, contents, sizeof(msc__value));
    MSC__ASSERT(pickle->spare.count < pickle->spare.capacity);
    ((uint32_t *)pickle->spare.items)[pickle->spare.count++] = payload;
}

bool msc__pickle_extend(msc__pickle *pickle, msc__value container, const msc__value *items, uint32_t count)
{
    msc__array *contents;
    uint32_t i;

    if (msc__value_tag(container) != MSC__TAG_OBJECT)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a container is expected");
    for (i = 0; i < count; i++) {
        if (msc__pickle_object(pickle, items[i]).kind <= MSC__KIND_SET &&
            !msc__pickle_settle(pickle, items[i]))
            return false;
    }
    if (object_at(pickle, container)->kind > MSC__KIND_SET)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a container holds itself or changes after its use");
    if (count == 0 || object_at(pickle, container)->kind == MSC__KIND_SET)
        return true;
    if (object_at(pickle, container)->payload == 0 && !take_contents(pickle, object_at(pickle, container)))
        return false;
    contents = contents_at(pickle, object_at(pickle, container)->payload);
    if (!msc__pickle_check(pickle,
                           msc__array_reserve(pickle->ctx, contents, sizeof *items, count, pickle->err)))
        return false;
    MSC__ASSERT(contents->count + count <= contents->capacity);
    memcpy((msc__value *)contents->items + contents->count, items, count * sizeof *items);
    contents->count += count;
    return true;
}

/* ---- lists -------------------------------------------------------------------------------------- */

bool msc__pickle_add_range(msc__pickle *pickle, uint32_t first, uint32_t count, uint32_t *index)
{
    msc__snapshot_range range = {first, count};

    *index = pickle->ranges.count;
    return msc__pickle_check(
        pickle, msc__array_push(pickle->ctx, &pickle->ranges, sizeof range, &range, pickle->err));
}

static bool are_side_by_side(const msc__pickle *pickle, const msc__value *items, uint32_t count)
{
    uint32_t first = msc__pickle_object(pickle, items[0]).payload;
    uint32_t i;

    for (i = 1; i < count; i++) {
        if (msc__pickle_object(pickle, items[i]).payload != first + i)
            return false;
    }
    return true;
}

/* The records of a list as a range of their table. */
static bool settle_records(msc__pickle *pickle, msc__array *table, size_t item_bytes, const msc__value *items,
                           uint32_t count, uint32_t *index)
{
    uint32_t first = msc__pickle_object(pickle, items[0]).payload;
    uint32_t i;

    if (!are_side_by_side(pickle, items, count)) {
        first = table->count;
        if (!msc__pickle_check(pickle,
                               msc__array_reserve(pickle->ctx, table, item_bytes, count, pickle->err)))
            return false;
        for (i = 0; i < count; i++) {
            size_t from = msc__pickle_object(pickle, items[i]).payload * item_bytes;
            MSC__ASSERT(table->count < table->capacity && from < table->count * item_bytes);
            memcpy((char *)table->items + table->count++ * item_bytes, (char *)table->items + from,
                   item_bytes);
        }
    }
    MSC__ASSERT(first + count <= table->count);
    return msc__pickle_add_range(pickle, first, count, index);
}

static bool settle_stack(msc__pickle *pickle, const msc__value *items, uint32_t count, uint32_t *stack)
{
    uint32_t *frames;
    uint32_t i;

    if (count > UINT32_MAX / sizeof *frames)
        return msc__pickle_fail(pickle, MSC_EOVERFLOW, "a stack is too long");
    pickle->scratch.count = 0;
    if (!msc__pickle_check(pickle, msc__array_reserve(pickle->ctx, &pickle->scratch, 1,
                                                      count * (uint32_t)sizeof *frames, pickle->err)))
        return false;
    frames = pickle->scratch.items;
    for (i = 0; i < count; i++) {
        frames[i] = msc__pickle_object(pickle, items[i]).payload;
        MSC__ASSERT(frames[i] < pickle->snapshot->frames.count);
    }
    return msc__pickle_check(pickle,
                             msc__snapshot_intern_stack(pickle->snapshot, frames, count, stack, pickle->err));
}

/* Traces of all devices, which may be empty. */
static bool settle_traces(msc__pickle *pickle, const msc__value *items, uint32_t count, uint32_t *index)
{
    const msc__snapshot_range none = {0, 0};
    msc__array *traces = &pickle->snapshot->traces;
    uint32_t first = traces->count;
    uint32_t i;

    for (i = 0; i < count; i++) {
        msc__object object = msc__pickle_object(pickle, items[i]);
        const msc__snapshot_range *range = &none;
        MSC__ASSERT(object.kind != MSC__KIND_EVENTS || object.payload < pickle->ranges.count);
        if (object.kind == MSC__KIND_EVENTS)
            range = (const msc__snapshot_range *)pickle->ranges.items + object.payload;
        if (!msc__pickle_check(pickle,
                               msc__array_push(pickle->ctx, traces, sizeof *range, range, pickle->err)))
            return false;
    }
    return msc__pickle_add_range(pickle, first, count, index);
}

static bool settle_pair(msc__pickle *pickle, const msc__value *items, msc__object *object)
{
    uint32_t index = pickle->wide.count;
    uint64_t words[2];

    if (!msc__pickle_to_u64(pickle, items[0], &words[0]) || !msc__pickle_to_u64(pickle, items[1], &words[1]))
        return true;
    if (!msc__pickle_check(
            pickle, msc__array_push(pickle->ctx, &pickle->wide, sizeof words[0], &words[0], pickle->err)) ||
        !msc__pickle_check(
            pickle, msc__array_push(pickle->ctx, &pickle->wide, sizeof words[1], &words[1], pickle->err)))
        return false;
    MSC__ASSERT(pickle->wide.count == index + 2);
    object->payload = index;
    object->kind = MSC__KIND_PAIR;
    return true;
}

/* Kind that all items have, where EMPTY counts as EVENTS; OTHER when they differ. */
static msc__kind common_kind(const msc__pickle *pickle, const msc__value *items, uint32_t count)
{
    msc__kind common = (msc__kind)msc__pickle_object(pickle, items[0]).kind;
    uint32_t i;

    for (i = 0; i < count; i++) {
        msc__kind kind = (msc__kind)msc__pickle_object(pickle, items[i]).kind;
        bool alike = kind == common || (kind == MSC__KIND_EVENTS && common == MSC__KIND_EMPTY) ||
                     (kind == MSC__KIND_EMPTY && common == MSC__KIND_EVENTS);
        if (!alike)
            return MSC__KIND_OTHER;
        if (kind == MSC__KIND_EVENTS)
            common = kind;
    }
    return common;
}

/* Recognises a list or tuple, which is not empty, by what it holds. */
static bool settle_list(msc__pickle *pickle, const msc__value *items, uint32_t count, msc__object *object)
{
    msc_snapshot *snapshot = pickle->snapshot;

    MSC__ASSERT(count > 0);
    switch (common_kind(pickle, items, count)) {
    case MSC__KIND_FRAME:
        object->kind = MSC__KIND_STACK;
        return settle_stack(pickle, items, count, &object->payload);
    case MSC__KIND_BLOCK:
        object->kind = MSC__KIND_BLOCKS;
        return settle_records(pickle, &snapshot->blocks, sizeof(msc_snapshot_block), items, count,
                              &object->payload);
    case MSC__KIND_SEGMENT:
        object->kind = MSC__KIND_SEGMENTS;
        return settle_records(pickle, &snapshot->segments, sizeof(msc_snapshot_segment), items, count,
                              &object->payload);
    case MSC__KIND_EVENT:
        object->kind = MSC__KIND_EVENTS;
        return settle_records(pickle, &snapshot->events, sizeof(msc_snapshot_event), items, count,
                              &object->payload);
    case MSC__KIND_ANNOTATION:
        object->kind = MSC__KIND_ANNOTATIONS;
        return settle_records(pickle, &snapshot->annotations, sizeof(msc_snapshot_annotation), items, count,
                              &object->payload);
    case MSC__KIND_EVENTS:
    case MSC__KIND_EMPTY:
        object->kind = MSC__KIND_TRACES;
        return settle_traces(pickle, items, count, &object->payload);
    default:
        return count != 2 || settle_pair(pickle, items, object);
    }
}

/* ---- settling ----------------------------------------------------------------------------------- */

bool msc__pickle_settle(msc__pickle *pickle, msc__value value)
{
    msc__object settled = {0, MSC__KIND_OTHER, {0}};
    msc__object before = msc__pickle_object(pickle, value);
    const msc__array *contents;
    bool ok = true;

    if (before.kind > MSC__KIND_SET)
        return true;
    if (before.payload == 0) {
        settled.kind = before.kind == MSC__KIND_SET ? MSC__KIND_OTHER : MSC__KIND_EMPTY;
    } else {
        contents = contents_at(pickle, before.payload);
        MSC__ASSERT(before.kind != MSC__KIND_DICT || contents->count % 2 == 0);
        if (before.kind == MSC__KIND_DICT)
            ok = msc__pickle_settle_dict(pickle, contents->items, contents->count / 2, &settled);
        else
            ok = settle_list(pickle, contents->items, contents->count, &settled);
        give_contents(pickle, before.payload);
    }
    MSC__ASSERT(settled.kind > MSC__KIND_SET && settled.kind < MSC__KIND_COUNT);
    *object_at(pickle, value) = settled;
    return ok;
}
