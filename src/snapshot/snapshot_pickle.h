/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file snapshot_pickle.h
 * The machine that runs a pickle, and the containers that it makes.
 *
 * A value is one word, a tag in its low bits. Numbers that do not fit beside the tag lie in `wide`. A
 * container is an object; its contents are kept only until it is put into another container, when it is
 * *settled*: recognised as a frame, an event, a list of blocks …, turned into a record of the snapshot, and
 * its contents dropped. What is not recognised becomes OTHER and takes no memory.
 */
#ifndef MSC_SNAPSHOT_PICKLE_H
#define MSC_SNAPSHOT_PICKLE_H

#include "snapshot/snapshot_internal.h"
#include "snapshot/snapshot_source.h"

typedef enum msc__tag {
    MSC__TAG_INT,      /**< 61 bits, signed */
    MSC__TAG_WIDE,     /**< unsigned, index into `wide` */
    MSC__TAG_NEGATIVE, /**< negative, its two's complement in `wide` */
    MSC__TAG_FLOAT,    /**< bits of a double in `wide` */
    MSC__TAG_STRING,   /**< id */
    MSC__TAG_OBJECT,   /**< index into `objects` */
    MSC__TAG_CONSTANT, /**< msc__constant */
    MSC__TAG_BYTES     /**< contents dropped */
} msc__tag;

typedef enum msc__constant {
    MSC__CONSTANT_NONE,
    MSC__CONSTANT_FALSE,
    MSC__CONSTANT_TRUE,
    MSC__CONSTANT_UNSET /**< memo: nothing was put here */
} msc__constant;

typedef uint64_t msc__value;

static inline msc__value msc__value_make(msc__tag tag, uint64_t payload)
{
    return payload << 3 | (uint64_t)tag;
}

static inline msc__tag msc__value_tag(msc__value value)
{
    return (msc__tag)(value & 7);
}

static inline uint64_t msc__value_payload(msc__value value)
{
    return value >> 3;
}

typedef enum msc__kind {
    MSC__KIND_LIST, /**< not settled, as the next two; a tuple is settled when it is made */
    MSC__KIND_DICT,
    MSC__KIND_SET,
    MSC__KIND_OTHER, /**< settled from here on */
    MSC__KIND_EMPTY,
    MSC__KIND_FRAME,       /**< payload: frame */
    MSC__KIND_STACK,       /**< stack */
    MSC__KIND_BLOCK,       /**< index */
    MSC__KIND_BLOCKS,      /**< index into `ranges` */
    MSC__KIND_SEGMENT,     /**< index */
    MSC__KIND_SEGMENTS,    /**< index into `ranges` */
    MSC__KIND_EVENT,       /**< index */
    MSC__KIND_EVENTS,      /**< index into `ranges` */
    MSC__KIND_TRACES,      /**< index into `ranges`, a range of snapshot->traces */
    MSC__KIND_ANNOTATION,  /**< index */
    MSC__KIND_ANNOTATIONS, /**< index into `ranges` */
    MSC__KIND_PAIR,        /**< first of two words in `wide` */
    MSC__KIND_DIVISIONS,   /**< first of MSC_SNAPSHOT_DIVISION_COUNT words in `wide` */
    MSC__KIND_SETTINGS,    /**< the settings are in the snapshot */
    MSC__KIND_TOP,         /**< first of three in `ranges`: segments, traces, annotations */
    MSC__KIND_COUNT
} msc__kind;

/** One container: 8 bytes. */
typedef struct msc__object {
    uint32_t payload; /**< not settled: slot in `open` + 1, 0: no contents yet */
    uint8_t kind;     /**< msc__kind */
    uint8_t pad[3];
} msc__object;

typedef struct msc__pickle {
    msc_snapshot *snapshot;
    msc_context *ctx;
    msc_error *err;
    msc_status status;
    uint8_t opcode;
    uint64_t opcode_offset;
    msc__source source;
    msc__array stack;   /**< of msc__value */
    msc__array marks;   /**< of uint32_t: heights of the stack */
    msc__array memo;    /**< of msc__value */
    msc__array wide;    /**< of uint64_t */
    msc__array objects; /**< of msc__object */
    msc__array open;    /**< of msc__array of msc__value: contents of what is not settled */
    msc__array spare;   /**< of uint32_t: slots of `open` without a user */
    msc__array ranges;  /**< of msc__snapshot_range */
    msc__array scratch; /**< of char or uint32_t, for one step */
    msc__value result;
} msc__pickle;

/** Runs the pickle to its end; what it holds goes into the snapshot. */
msc_status msc__pickle_run(msc__pickle *pickle);
void msc__pickle_fini(msc__pickle *pickle);

/** Records a failure with opcode and offset. Returns false. */
bool msc__pickle_fail(msc__pickle *pickle, msc_status status, const char *problem);
/** Keeps the failure of another call; false when there is one. */
bool msc__pickle_check(msc__pickle *pickle, msc_status status);

/* ---- scalars: snapshot_scalar.c ----------------------------------------------------------------- */

bool msc__pickle_push(msc__pickle *pickle, msc__value value);
bool msc__pickle_push_i64(msc__pickle *pickle, int64_t number);
bool msc__pickle_push_u64(msc__pickle *pickle, uint64_t number);
/** `bits` as a double, native. */
bool msc__pickle_push_float(msc__pickle *pickle, uint64_t bits);
bool msc__pickle_push_string(msc__pickle *pickle, const void *bytes, size_t size_bytes);
/** Little-endian two's complement of any length that fits 64 bits. */
bool msc__pickle_push_long(msc__pickle *pickle, const uint8_t *bytes, size_t size_bytes);
/** Decimal integer as text, for LONG with the letter L at its end; INT also knows 00 and 01. */
bool msc__pickle_push_decimal(msc__pickle *pickle, const uint8_t *text, size_t text_bytes);
/** Text of a FLOAT. */
bool msc__pickle_push_float_text(msc__pickle *pickle, const uint8_t *text, size_t text_bytes);
/** Text of a UNICODE: Latin-1 with \u and \U. */
bool msc__pickle_push_escaped(msc__pickle *pickle, const uint8_t *text, size_t text_bytes);
/** An integer that fits; a bool counts as 0 or 1. False without an error for anything else. */
bool msc__pickle_to_u64(const msc__pickle *pickle, msc__value value, uint64_t *out);
bool msc__pickle_to_i64(const msc__pickle *pickle, msc__value value, int64_t *out);

/* ---- containers: snapshot_object.c, snapshot_record.c ------------------------------------------- */

bool msc__pickle_push_object(msc__pickle *pickle, msc__kind kind);
/** Settles `count` values and puts them into a container that is not settled. */
bool msc__pickle_extend(msc__pickle *pickle, msc__value container, const msc__value *items, uint32_t count);
/** Settles the container, if the value is one. */
bool msc__pickle_settle(msc__pickle *pickle, msc__value value);
/** Kind of a settled object; OTHER for a value that is none. */
msc__object msc__pickle_object(const msc__pickle *pickle, msc__value value);
/** Adds a range and gives its index. */
bool msc__pickle_add_range(msc__pickle *pickle, uint32_t first, uint32_t count, uint32_t *index);

/** Recognises a dict by its keys: `pairs` holds key, value, key, value … */
bool msc__pickle_settle_dict(msc__pickle *pickle, const msc__value *pairs, uint32_t pair_count,
                             msc__object *object);
/** Makes the tables of the snapshot those of the pickle's result, which must be settled. */
bool msc__pickle_keep_result(msc__pickle *pickle, msc__value result);
/** Enters the names that records know, so that their ids are those of the keys. Once, first. */
msc_status msc__pickle_enter_keys(msc_snapshot *snapshot, msc_error *err);

#endif /* MSC_SNAPSHOT_PICKLE_H */
