/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file record_codec.h
 * The bytes of a spool. All numbers are little-endian.
 *
 *     file    "MSCSPOOL"  version u32  level u32  number u32  zero u32  crc u32  zero u32      32 bytes
 *     record  crc u32  length u32  batch u32  kind u16  mark u16  payload  zeros to a multiple of 8
 *
 *     row       step i64  time i64  count u16  { value f64  name u8  unit u8  its name  its unit } …
 *     event     a JSON object
 *     document  name u8  its name  JSON
 *     tick      nothing: the batches before it are complete
 *     end       state u8
 *
 * A checksum covers all of a record but itself and the zeros at its end. Batches are numbered from 0 and
 * rise.
 */
#ifndef MSC_RECORD_CODEC_H
#define MSC_RECORD_CODEC_H

#include <stdbool.h>

#include "memscale/record.h"

#define MSC__SPOOL_VERSION 1u
#define MSC__SPOOL_HEADER_BYTES 32u
#define MSC__SPOOL_RECORD_BYTES 16u /* before the payload */
#define MSC__SPOOL_MOST_PAYLOAD (MSC_RECORD_MOST_BYTES + MSC_RECORD_NAME_BYTES + 1u)

typedef enum msc__spool_kind {
    MSC__SPOOL_ROW = 1,
    MSC__SPOOL_EVENT,
    MSC__SPOOL_DOCUMENT,
    MSC__SPOOL_TICK,
    MSC__SPOOL_END,
    MSC__SPOOL_KIND_END
} msc__spool_kind;

/** A record as it lies in memory. */
typedef struct msc__spool_record {
    msc__spool_kind kind;
    uint32_t batch;
    const uint8_t *payload;
    uint32_t payload_bytes;
} msc__spool_record;

/** A value of a row: what it points to lies in the payload, without terminators. */
typedef struct msc__spool_value {
    const char *name;
    const char *unit;
    double value;
    uint8_t name_bytes;
    uint8_t unit_bytes;
} msc__spool_value;

/** Where one is in a row's values. */
typedef struct msc__spool_row {
    int64_t step;
    int64_t time_ms;
    uint32_t left; /* values that are still to come */
    const uint8_t *at;
    const uint8_t *end;
} msc__spool_row;

/** CRC32C (Castagnoli), going on from `crc`; 0 to begin. */
uint32_t msc__crc32c(uint32_t crc, const void *bytes, size_t count);

static inline uint32_t msc__spool_size(uint32_t payload_bytes)
{
    return (MSC__SPOOL_RECORD_BYTES + payload_bytes + 7u) & ~7u;
}

void msc__spool_put_header(uint8_t *out, uint32_t level, uint32_t number);
/** Errors: EFORMAT, EVERSION. */
msc_status msc__spool_get_header(const uint8_t *bytes, size_t count, uint32_t *level, msc_error *err);

/** Writes a record of `msc__spool_size(payload_bytes)` bytes. */
void msc__spool_put(uint8_t *out, const msc__spool_record *record);

/** Reads one. Bytes it takes; 0: there is no whole and sound one. `payload` points into `bytes`. */
uint32_t msc__spool_get(const uint8_t *bytes, uint64_t count, msc__spool_record *out);

/** Bytes of a row's payload; 0 where a value is not as the header says. */
uint32_t msc__spool_row_bytes(const msc_record_value *values, uint32_t value_count);
void msc__spool_put_row(uint8_t *out, int64_t step, int64_t time_ms, const msc_record_value *values,
                        uint32_t value_count);

/** Begins to read a row. False: it is none. */
bool msc__spool_row_begin(const uint8_t *payload, uint32_t payload_bytes, msc__spool_row *out);
/** The next value. False: there is none, or (`left` above 0) the row is not as it should be. */
bool msc__spool_row_next(msc__spool_row *row, msc__spool_value *out);

/** The name of a document; its JSON follows. False: there is none. */
bool msc__spool_document_name(const uint8_t *payload, uint32_t payload_bytes, const char **name,
                              uint32_t *name_bytes);

/** Whether a text of `bytes` is a name: no control characters, 1 to `most` bytes. */
bool msc__record_is_name(const char *text, size_t bytes, size_t most);

#endif /* MSC_RECORD_CODEC_H */
