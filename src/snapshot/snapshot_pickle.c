/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pickle machine: protocols 0 to 5, as far as plain data goes.
 *
 *     opcode ──► stack   [ dict, MARK, key, value, ... ]      marks   heights at which a MARK stands
 *                memo    [ value, value, unset, ... ]         what GET pushes again
 *
 * A pickle is a program. Its dangerous half imports names and calls them: GLOBAL, REDUCE, BUILD, NEWOBJ,
 * INST, OBJ, EXT, persistent ids, out-of-band buffers. Snapshots hold none of these, so each is refused by
 * name, and nothing that a file says is ever executed.
 *
 * Bounds: a length is compared with what is left of the file before it is used; the memo is no longer than
 * the file up to there, since each entry costs an opcode; the machine does not recurse. So memory is a small
 * multiple of the file, whatever its numbers say.
 */
#include "snapshot/snapshot_pickle.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"

#define MOST_PROTOCOL 5

/* Opcodes that are understood, by their names in Python's pickletools. */
enum {
    OP_MARK = '(',
    OP_STOP = '.',
    OP_POP = '0',
    OP_POP_MARK = '1',
    OP_DUP = '2',
    OP_FLOAT = 'F',
    OP_INT = 'I',
    OP_BININT = 'J',
    OP_BININT1 = 'K',
    OP_LONG = 'L',
    OP_BININT2 = 'M',
    OP_NONE = 'N',
    OP_BINSTRING = 'T',
    OP_SHORT_BINSTRING = 'U',
    OP_UNICODE = 'V',
    OP_BINUNICODE = 'X',
    OP_APPEND = 'a',
    OP_DICT = 'd',
    OP_EMPTY_DICT = '}',
    OP_APPENDS = 'e',
    OP_GET = 'g',
    OP_BINGET = 'h',
    OP_LONG_BINGET = 'j',
    OP_LIST = 'l',
    OP_EMPTY_LIST = ']',
    OP_PUT = 'p',
    OP_BINPUT = 'q',
    OP_LONG_BINPUT = 'r',
    OP_SETITEM = 's',
    OP_TUPLE = 't',
    OP_EMPTY_TUPLE = ')',
    OP_SETITEMS = 'u',
    OP_BINFLOAT = 'G',
    OP_BINBYTES = 'B',
    OP_SHORT_BINBYTES = 'C',
    OP_PROTO = 0x80,
    OP_TUPLE1 = 0x85,
    OP_TUPLE2 = 0x86,
    OP_TUPLE3 = 0x87,
    OP_NEWTRUE = 0x88,
    OP_NEWFALSE = 0x89,
    OP_LONG1 = 0x8a,
    OP_LONG4 = 0x8b,
    OP_SHORT_BINUNICODE = 0x8c,
    OP_BINUNICODE8 = 0x8d,
    OP_BINBYTES8 = 0x8e,
    OP_EMPTY_SET = 0x8f,
    OP_ADDITEMS = 0x90,
    OP_FROZENSET = 0x91,
    OP_MEMOIZE = 0x94,
    OP_FRAME = 0x95,
    OP_BYTEARRAY8 = 0x96
};

/* What is refused, by name. */
static const struct {
    uint8_t opcode;
    const char *name;
} refused[] = {
    {'P', "PERSID"},     {'Q', "BINPERSID"},     {'R', "REDUCE"},       {'S', "STRING"},
    {'b', "BUILD"},      {'c', "GLOBAL"},        {'i', "INST"},         {'o', "OBJ"},
    {0x81, "NEWOBJ"},    {0x82, "EXT1"},         {0x83, "EXT2"},        {0x84, "EXT4"},
    {0x92, "NEWOBJ_EX"}, {0x93, "STACK_GLOBAL"}, {0x97, "NEXT_BUFFER"}, {0x98, "READONLY_BUFFER"},
};

/* ---- failure ------------------------------------------------------------------------------------ */

bool msc__pickle_fail(msc__pickle *pickle, msc_status status, const char *problem)
{
    MSC__ASSERT(status != MSC_OK);
    pickle->status =
        msc__fail(pickle->err, status, "cannot read the snapshot: at offset %" PRIu64 ", opcode 0x%02x: %s",
                  pickle->opcode_offset, pickle->opcode, problem);
    return false;
}

bool msc__pickle_check(msc__pickle *pickle, msc_status status)
{
    if (status != MSC_OK)
        pickle->status = status;
    return status == MSC_OK;
}

static bool fail_refused(msc__pickle *pickle)
{
    const char *name = NULL;
    size_t i;

    for (i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        if (refused[i].opcode == pickle->opcode)
            name = refused[i].name;
    }
    if (name == NULL)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "there is no such opcode in a pickle");
    pickle->status =
        msc__fail(pickle->err, MSC_EFORMAT,
                  "cannot read the snapshot: at offset %" PRIu64
                  ", opcode 0x%02x: %s is refused, since a snapshot is plain data and nothing is executed",
                  pickle->opcode_offset, pickle->opcode, name);
    return false;
}

/* ---- input -------------------------------------------------------------------------------------- */

static bool check_source(msc__pickle *pickle, msc_status status)
{
    if (status == MSC_EFORMAT)
        return msc__pickle_fail(pickle, status, "the file ends here");
    return msc__pickle_check(pickle, status);
}

/* The next `bytes` bytes, or NULL. */
static const uint8_t *take(msc__pickle *pickle, uint64_t bytes)
{
    msc__source *source = &pickle->source;
    const uint8_t *at;

    if ((uint64_t)(source->end - source->at) < bytes) {
        if (bytes > msc__source_left(source) || bytes > SIZE_MAX / 4) {
            (void)msc__pickle_fail(pickle, MSC_EFORMAT, "more bytes are announced than the file has left");
            return NULL;
        }
        if (!check_source(pickle, msc__source_fill(source, (size_t)bytes, pickle->err)))
            return NULL;
    }
    at = source->at;
    MSC__ASSERT((uint64_t)(source->end - at) >= bytes);
    source->at += bytes;
    return at;
}

static uint64_t little_endian(const uint8_t *at, size_t bytes)
{
    uint64_t number = 0;
    size_t i;

    MSC__ASSERT(bytes <= sizeof number);
    for (i = bytes; i-- > 0;)
        number = number << 8 | at[i];
    return number;
}

/* An unsigned number of `bytes` bytes. */
static bool take_number(msc__pickle *pickle, size_t bytes, uint64_t *number)
{
    const uint8_t *at = take(pickle, bytes);

    if (at != NULL)
        *number = little_endian(at, bytes);
    return at != NULL;
}

/* Bytes behind their length, which has `length_bytes` bytes. */
static const uint8_t *take_counted(msc__pickle *pickle, size_t length_bytes, uint64_t *length)
{
    return take_number(pickle, length_bytes, length) ? take(pickle, *length) : NULL;
}

static const uint8_t *take_line(msc__pickle *pickle, size_t *bytes)
{
    const uint8_t *at;

    if (!check_source(pickle, msc__source_fill_line(&pickle->source, bytes, pickle->err)))
        return NULL;
    at = pickle->source.at;
    MSC__ASSERT((size_t)(pickle->source.end - at) > *bytes && at[*bytes] == '\n');
    pickle->source.at += *bytes + 1;
    if (*bytes > 0 && at[*bytes - 1] == '\r')
        --*bytes;
    return at;
}

/* ---- stack -------------------------------------------------------------------------------------- */

static msc__value *values(const msc__pickle *pickle)
{
    return pickle->stack.items;
}

/* Height below which a value belongs to what stood before the last MARK. */
static uint32_t floor_of(const msc__pickle *pickle)
{
    return pickle->marks.count == 0 ? 0 : ((const uint32_t *)pickle->marks.items)[pickle->marks.count - 1];
}

/* Whether `count` values stand above the last MARK. */
static bool need(msc__pickle *pickle, uint32_t count)
{
    MSC__ASSERT(floor_of(pickle) <= pickle->stack.count);
    return pickle->stack.count - floor_of(pickle) >= count ||
           msc__pickle_fail(pickle, MSC_EFORMAT, "more values are expected on the stack");
}

static bool push_mark(msc__pickle *pickle)
{
    return msc__pickle_check(pickle, msc__array_push(pickle->ctx, &pickle->marks, sizeof(uint32_t),
                                                     &pickle->stack.count, pickle->err));
}

/* Takes the last MARK away and gives its height. */
static bool pop_mark(msc__pickle *pickle, uint32_t *height)
{
    *height = floor_of(pickle);
    if (pickle->marks.count == 0)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a MARK is expected on the stack");
    pickle->marks.count--;
    return true;
}

/* ---- containers --------------------------------------------------------------------------------- */

/* Puts the values from `height` on into the container below them. `unit` is 2 for dicts. */
static bool extend_below(msc__pickle *pickle, uint32_t height, uint32_t unit)
{
    uint32_t count = pickle->stack.count - height;
    msc__value container;

    MSC__ASSERT(height <= pickle->stack.count && floor_of(pickle) <= pickle->stack.count);
    if (height <= floor_of(pickle))
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a container is expected on the stack");
    if (count % unit != 0)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a value for every key is expected");
    container = values(pickle)[height - 1];
    if ((msc__pickle_object(pickle, container).kind == MSC__KIND_DICT) != (unit == 2) &&
        msc__pickle_object(pickle, container).kind <= MSC__KIND_SET)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a container of another kind is expected");
    if (!msc__pickle_extend(pickle, container, values(pickle) + height, count))
        return false;
    pickle->stack.count = height;
    return true;
}

static bool extend_marked(msc__pickle *pickle, uint32_t unit)
{
    uint32_t height;

    return pop_mark(pickle, &height) && extend_below(pickle, height, unit);
}

/* Replaces the values from `height` on by a container that holds them; `settled` for a tuple. */
static bool collect(msc__pickle *pickle, uint32_t height, msc__kind kind, bool settled)
{
    uint32_t count = pickle->stack.count - height;
    uint32_t index = pickle->objects.count;
    msc__value container = msc__value_make(MSC__TAG_OBJECT, index);

    MSC__ASSERT(floor_of(pickle) <= height && height <= pickle->stack.count);
    if (kind == MSC__KIND_DICT && count % 2 != 0)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a value for every key is expected");
    if (!msc__pickle_push_object(pickle, kind) ||
        !msc__pickle_extend(pickle, container, values(pickle) + height, count) ||
        (settled && !msc__pickle_settle(pickle, container)))
        return false;
    MSC__ASSERT(pickle->stack.count == height + count + 1);
    values(pickle)[height] = container;
    pickle->stack.count = height + 1;
    return true;
}

static bool collect_marked(msc__pickle *pickle, msc__kind kind, bool settled)
{
    uint32_t height;

    return pop_mark(pickle, &height) && collect(pickle, height, kind, settled);
}

static bool collect_top(msc__pickle *pickle, uint32_t count)
{
    return need(pickle, count) && collect(pickle, pickle->stack.count - count, MSC__KIND_LIST, true);
}

/* ---- memo --------------------------------------------------------------------------------------- */

static bool put(msc__pickle *pickle, uint64_t index)
{
    const msc__value unset = msc__value_make(MSC__TAG_CONSTANT, MSC__CONSTANT_UNSET);
    msc__array *memo = &pickle->memo;

    if (!need(pickle, 1))
        return false;
    if (index > pickle->opcode_offset)
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a smaller number of the memo is expected");
    while (memo->count <= index) {
        if (!msc__pickle_check(pickle, msc__array_push(pickle->ctx, memo, sizeof unset, &unset, pickle->err)))
            return false;
    }
    MSC__ASSERT(index < memo->count);
    ((msc__value *)memo->items)[index] = values(pickle)[pickle->stack.count - 1];
    return true;
}

static bool get(msc__pickle *pickle, uint64_t index)
{
    msc__value value;

    if (index < pickle->memo.count) {
        value = ((const msc__value *)pickle->memo.items)[index];
        if (value != msc__value_make(MSC__TAG_CONSTANT, MSC__CONSTANT_UNSET))
            return msc__pickle_push(pickle, value);
    }
    return msc__pickle_fail(pickle, MSC_EFORMAT, "a number that is in the memo is expected");
}

/*
 * A stack of forty frames is forty LONG_BINGET in a row, most of the file. They are run here as long as
 * everything they need is at hand; whatever is not goes the usual way.
 */
static void get_many(msc__pickle *pickle)
{
    msc__source *source = &pickle->source;
    const msc__value *memo = pickle->memo.items;
    const uint8_t *at = source->at;
    msc__value *to;
    const msc__value *end;

    if (pickle->stack.items == NULL || memo == NULL)
        return;
    MSC__ASSERT(pickle->stack.count <= pickle->stack.capacity);
    to = values(pickle) + pickle->stack.count;
    end = values(pickle) + pickle->stack.capacity;
    while (source->end - at >= 5 && *at == OP_LONG_BINGET && to < end) {
        uint64_t index = little_endian(at + 1, 4);
        if (index >= pickle->memo.count ||
            memo[index] == msc__value_make(MSC__TAG_CONSTANT, MSC__CONSTANT_UNSET))
            break;
        *to++ = memo[index];
        at += 5;
    }
    pickle->stack.count = (uint32_t)(to - values(pickle));
    MSC__ASSERT(at <= source->end && pickle->stack.count <= pickle->stack.capacity);
    source->at = at;
}

static bool put_number(msc__pickle *pickle, size_t bytes)
{
    uint64_t index;

    return take_number(pickle, bytes, &index) && put(pickle, index);
}

static bool get_number(msc__pickle *pickle, size_t bytes)
{
    uint64_t index;

    return take_number(pickle, bytes, &index) && get(pickle, index);
}

/* PUT and GET: the number as a line of text. The parsed number passes over the stack. */
static bool memo_line(msc__pickle *pickle, bool is_put)
{
    size_t bytes;
    const uint8_t *at = take_line(pickle, &bytes);
    uint64_t index;

    if (at == NULL || !msc__pickle_push_decimal(pickle, at, bytes))
        return false;
    if (!msc__pickle_to_u64(pickle, values(pickle)[--pickle->stack.count], &index))
        return msc__pickle_fail(pickle, MSC_EFORMAT, "a number of the memo is expected");
    return is_put ? put(pickle, index) : get(pickle, index);
}

/* ---- scalars ------------------------------------------------------------------------------------ */

static bool push_constant(msc__pickle *pickle, msc__constant constant)
{
    return msc__pickle_push(pickle, msc__value_make(MSC__TAG_CONSTANT, constant));
}

static bool push_counted_string(msc__pickle *pickle, size_t length_bytes)
{
    uint64_t length;
    const uint8_t *at = take_counted(pickle, length_bytes, &length);

    return at != NULL && msc__pickle_push_string(pickle, at, (size_t)length);
}

static bool push_counted_bytes(msc__pickle *pickle, size_t length_bytes)
{
    uint64_t length;

    return take_counted(pickle, length_bytes, &length) != NULL &&
           msc__pickle_push(pickle, msc__value_make(MSC__TAG_BYTES, 0));
}

static bool push_counted_long(msc__pickle *pickle, size_t length_bytes)
{
    uint64_t length;
    const uint8_t *at = take_counted(pickle, length_bytes, &length);

    return at != NULL && msc__pickle_push_long(pickle, at, (size_t)length);
}

static bool push_unsigned(msc__pickle *pickle, size_t bytes)
{
    uint64_t number;

    return take_number(pickle, bytes, &number) && msc__pickle_push_u64(pickle, number);
}

static bool push_int32(msc__pickle *pickle)
{
    uint64_t number;

    return take_number(pickle, 4, &number) && msc__pickle_push_i64(pickle, (int32_t)(uint32_t)number);
}

static bool push_double(msc__pickle *pickle)
{
    const uint8_t *at = take(pickle, 8);
    uint64_t bits = 0;
    size_t i;

    for (i = 0; at != NULL && i < 8; i++)
        bits = bits << 8 | at[i];
    return at != NULL && msc__pickle_push_float(pickle, bits);
}

/* INT, LONG, FLOAT and UNICODE: a line of text. */
static bool push_line(msc__pickle *pickle)
{
    size_t bytes;
    const uint8_t *at = take_line(pickle, &bytes);

    if (at == NULL)
        return false;
    if (pickle->opcode == OP_UNICODE)
        return msc__pickle_push_escaped(pickle, at, bytes);
    if (pickle->opcode == OP_FLOAT)
        return msc__pickle_push_float_text(pickle, at, bytes);
    if (pickle->opcode == OP_INT && bytes == 2 && at[0] == '0' && (at[1] == '0' || at[1] == '1'))
        return push_constant(pickle, at[1] == '1' ? MSC__CONSTANT_TRUE : MSC__CONSTANT_FALSE);
    if (pickle->opcode == OP_LONG && bytes > 0 && at[bytes - 1] == 'L')
        bytes--;
    return msc__pickle_push_decimal(pickle, at, bytes);
}

/* ---- opcodes ------------------------------------------------------------------------------------ */

static bool run_scalar(msc__pickle *pickle)
{
    switch (pickle->opcode) {
    case OP_NONE:
        return push_constant(pickle, MSC__CONSTANT_NONE);
    case OP_NEWTRUE:
        return push_constant(pickle, MSC__CONSTANT_TRUE);
    case OP_NEWFALSE:
        return push_constant(pickle, MSC__CONSTANT_FALSE);
    case OP_BININT:
        return push_int32(pickle);
    case OP_BININT1:
        return push_unsigned(pickle, 1);
    case OP_BININT2:
        return push_unsigned(pickle, 2);
    case OP_LONG1:
        return push_counted_long(pickle, 1);
    case OP_LONG4:
        return push_counted_long(pickle, 4);
    case OP_BINFLOAT:
        return push_double(pickle);
    case OP_SHORT_BINUNICODE:
    case OP_SHORT_BINSTRING:
        return push_counted_string(pickle, 1);
    case OP_BINUNICODE:
    case OP_BINSTRING:
        return push_counted_string(pickle, 4);
    case OP_BINUNICODE8:
        return push_counted_string(pickle, 8);
    case OP_SHORT_BINBYTES:
        return push_counted_bytes(pickle, 1);
    case OP_BINBYTES:
        return push_counted_bytes(pickle, 4);
    case OP_BINBYTES8:
    case OP_BYTEARRAY8:
        return push_counted_bytes(pickle, 8);
    case OP_INT:
    case OP_LONG:
    case OP_FLOAT:
    case OP_UNICODE:
        return push_line(pickle);
    default:
        return fail_refused(pickle);
    }
}

static bool run_protocol(msc__pickle *pickle)
{
    uint64_t version;

    if (!take_number(pickle, 1, &version))
        return false;
    return version <= MOST_PROTOCOL ||
           msc__pickle_fail(pickle, MSC_EFORMAT, "a protocol from 0 to 5 is expected");
}

/* Frames help a reader that fetches; their length is only checked. */
static bool run_frame(msc__pickle *pickle)
{
    uint64_t length;

    if (!take_number(pickle, 8, &length))
        return false;
    return length <= msc__source_left(&pickle->source) ||
           msc__pickle_fail(pickle, MSC_EFORMAT, "a frame within the file is expected");
}

static bool run_pop(msc__pickle *pickle)
{
    uint32_t height;

    if (pickle->marks.count > 0 && floor_of(pickle) == pickle->stack.count)
        return pop_mark(pickle, &height);
    if (!need(pickle, 1))
        return false;
    pickle->stack.count--;
    return true;
}

static bool run_pop_mark(msc__pickle *pickle)
{
    return pop_mark(pickle, &pickle->stack.count);
}

static bool run_memo(msc__pickle *pickle)
{
    switch (pickle->opcode) {
    case OP_MEMOIZE:
        return put(pickle, pickle->memo.count);
    case OP_BINPUT:
        return put_number(pickle, 1);
    case OP_LONG_BINPUT:
        return put_number(pickle, 4);
    case OP_PUT:
        return memo_line(pickle, true);
    case OP_BINGET:
        return get_number(pickle, 1);
    case OP_LONG_BINGET:
        return get_number(pickle, 4);
    case OP_GET:
        return memo_line(pickle, false);
    case OP_DUP:
        return need(pickle, 1) && msc__pickle_push(pickle, values(pickle)[pickle->stack.count - 1]);
    case OP_POP:
        return run_pop(pickle);
    case OP_POP_MARK:
        return run_pop_mark(pickle);
    case OP_PROTO:
        return run_protocol(pickle);
    case OP_FRAME:
        return run_frame(pickle);
    default:
        return run_scalar(pickle);
    }
}

static bool run_container(msc__pickle *pickle)
{
    switch (pickle->opcode) {
    case OP_MARK:
        return push_mark(pickle);
    case OP_EMPTY_DICT:
        return msc__pickle_push_object(pickle, MSC__KIND_DICT);
    case OP_EMPTY_LIST:
        return msc__pickle_push_object(pickle, MSC__KIND_LIST);
    case OP_EMPTY_TUPLE:
        return msc__pickle_push_object(pickle, MSC__KIND_EMPTY);
    case OP_EMPTY_SET:
        return msc__pickle_push_object(pickle, MSC__KIND_SET);
    case OP_APPENDS:
    case OP_ADDITEMS:
        return extend_marked(pickle, 1);
    case OP_SETITEMS:
        return extend_marked(pickle, 2);
    case OP_APPEND:
        return need(pickle, 2) && extend_below(pickle, pickle->stack.count - 1, 1);
    case OP_SETITEM:
        return need(pickle, 3) && extend_below(pickle, pickle->stack.count - 2, 2);
    case OP_DICT:
        return collect_marked(pickle, MSC__KIND_DICT, false);
    case OP_LIST:
        return collect_marked(pickle, MSC__KIND_LIST, false);
    case OP_TUPLE:
        return collect_marked(pickle, MSC__KIND_LIST, true);
    case OP_FROZENSET:
        return collect_marked(pickle, MSC__KIND_SET, true);
    case OP_TUPLE1:
        return collect_top(pickle, 1);
    case OP_TUPLE2:
        return collect_top(pickle, 2);
    case OP_TUPLE3:
        return collect_top(pickle, 3);
    default:
        return run_memo(pickle);
    }
}

static bool finish(msc__pickle *pickle)
{
    msc__value result;

    if (!need(pickle, 1))
        return false;
    result = values(pickle)[pickle->stack.count - 1];
    return msc__pickle_settle(pickle, result) && msc__pickle_keep_result(pickle, result);
}

msc_status msc__pickle_run(msc__pickle *pickle)
{
    bool ok = true;

    while (ok) {
        const uint8_t *at;
        get_many(pickle);
        pickle->opcode_offset = msc__source_offset(&pickle->source);
        pickle->opcode = 0;
        at = take(pickle, 1);
        ok = at != NULL;
        if (!ok)
            break;
        pickle->opcode = *at;
        if (pickle->opcode == OP_STOP) {
            ok = finish(pickle);
            break;
        }
        ok = run_container(pickle);
    }
    MSC__ASSERT(ok || pickle->status != MSC_OK);
    return ok ? MSC_OK : pickle->status;
}

void msc__pickle_fini(msc__pickle *pickle)
{
    msc__array *open = pickle->open.items;
    uint32_t i;

    for (i = 0; i < pickle->open.count; i++)
        msc__array_fini(pickle->ctx, &open[i], sizeof(msc__value));
    msc__array_fini(pickle->ctx, &pickle->open, sizeof *open);
    msc__array_fini(pickle->ctx, &pickle->stack, sizeof(msc__value));
    msc__array_fini(pickle->ctx, &pickle->marks, sizeof(uint32_t));
    msc__array_fini(pickle->ctx, &pickle->memo, sizeof(msc__value));
    msc__array_fini(pickle->ctx, &pickle->wide, sizeof(uint64_t));
    msc__array_fini(pickle->ctx, &pickle->objects, sizeof(msc__object));
    msc__array_fini(pickle->ctx, &pickle->spare, sizeof(uint32_t));
    msc__array_fini(pickle->ctx, &pickle->ranges, sizeof(msc__snapshot_range));
    msc__array_fini(pickle->ctx, &pickle->scratch, 1);
    msc__source_fini(&pickle->source);
}
