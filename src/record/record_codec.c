/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of a spool, written and read. Nothing here believes a length before it has compared it with what
 * is there.
 */
#include "record/record_codec.h"

#include <string.h>

#include "base/error.h"
#include "base/invariant.h"

#define RECORD_MARK 0x5c4du
#define ROW_BYTES 18u   /* before the values */
#define VALUE_BYTES 10u /* before its name */

static const char MAGIC[8] = {'M', 'S', 'C', 'S', 'P', 'O', 'O', 'L'};

/* The polynomial 0x1EDC6F41 in reflected form, for four bits at a time. */
static const uint32_t CRC_OF_NIBBLE[16] = {
    0x00000000u, 0x105ec76fu, 0x20bd8edeu, 0x30e349b1u, 0x417b1dbcu, 0x5125dad3u, 0x61c69362u, 0x7198540du,
    0x82f63b78u, 0x92a8fc17u, 0xa24bb5a6u, 0xb21572c9u, 0xc38d26c4u, 0xd3d3e1abu, 0xe330a81au, 0xf36e6f75u,
};

uint32_t msc__crc32c(uint32_t crc, const void *bytes, size_t count)
{
    const uint8_t *at = bytes;
    size_t i;

    crc = ~crc;
    for (i = 0; i < count; i++) {
        crc ^= at[i];
        crc = (crc >> 4) ^ CRC_OF_NIBBLE[crc & 15u];
        crc = (crc >> 4) ^ CRC_OF_NIBBLE[crc & 15u];
    }
    return ~crc;
}

/* ---- numbers ------------------------------------------------------------------------------------------ */

static void put_u16(uint8_t *out, uint32_t value)
{
    out[0] = (uint8_t)value;
    out[1] = (uint8_t)(value >> 8);
}

static void put_u32(uint8_t *out, uint32_t value)
{
    put_u16(out, value);
    put_u16(out + 2, value >> 16);
}

static void put_u64(uint8_t *out, uint64_t value)
{
    put_u32(out, (uint32_t)value);
    put_u32(out + 4, (uint32_t)(value >> 32));
}

static uint32_t get_u16(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8;
}

static uint32_t get_u32(const uint8_t *at)
{
    return get_u16(at) | get_u16(at + 2) << 16;
}

static uint64_t get_u64(const uint8_t *at)
{
    return get_u32(at) | (uint64_t)get_u32(at + 4) << 32;
}

/* ---- headers ------------------------------------------------------------------------------------------ */

void msc__spool_put_header(uint8_t *out, uint32_t level, uint32_t number)
{
    memset(out, 0, MSC__SPOOL_HEADER_BYTES);
    memcpy(out, MAGIC, sizeof MAGIC);
    put_u32(out + 8, MSC__SPOOL_VERSION);
    put_u32(out + 12, level);
    put_u32(out + 16, number);
    put_u32(out + 24, msc__crc32c(0, out, 24));
}

msc_status msc__spool_get_header(const uint8_t *bytes, size_t count, uint32_t *level, msc_error *err)
{
    if (count < MSC__SPOOL_HEADER_BYTES || memcmp(bytes, MAGIC, sizeof MAGIC) != 0)
        return msc__fail(err, MSC_EFORMAT, "this is no file of a spool");
    if (get_u32(bytes + 8) != MSC__SPOOL_VERSION)
        return msc__fail(err, MSC_EVERSION, "the spool has version %u, this library reads %u",
                         get_u32(bytes + 8), MSC__SPOOL_VERSION);
    if (get_u32(bytes + 24) != msc__crc32c(0, bytes, 24))
        return msc__fail(err, MSC_EFORMAT, "the header of the spool's file is damaged");
    *level = get_u32(bytes + 12);
    return MSC_OK;
}

/* ---- records ------------------------------------------------------------------------------------------ */

void msc__spool_put(uint8_t *out, const msc__spool_record *record)
{
    uint32_t bytes = record->payload_bytes;

    MSC__ASSERT(bytes <= MSC__SPOOL_MOST_PAYLOAD);
    memset(out + msc__spool_size(bytes) - 8, 0, 8);
    put_u32(out + 4, bytes);
    put_u32(out + 8, record->batch);
    put_u16(out + 12, (uint32_t)record->kind);
    put_u16(out + 14, RECORD_MARK);
    if (bytes > 0)
        memcpy(out + MSC__SPOOL_RECORD_BYTES, record->payload, bytes);
    put_u32(out, msc__crc32c(0, out + 4, MSC__SPOOL_RECORD_BYTES - 4 + bytes));
}

uint32_t msc__spool_get(const uint8_t *bytes, uint64_t count, msc__spool_record *out)
{
    uint32_t payload_bytes;
    uint32_t kind;

    if (count < MSC__SPOOL_RECORD_BYTES || get_u16(bytes + 14) != RECORD_MARK)
        return 0;
    payload_bytes = get_u32(bytes + 4);
    kind = get_u16(bytes + 12);
    if (payload_bytes > MSC__SPOOL_MOST_PAYLOAD || msc__spool_size(payload_bytes) > count || kind == 0 ||
        kind >= MSC__SPOOL_KIND_END)
        return 0;
    if (get_u32(bytes) != msc__crc32c(0, bytes + 4, MSC__SPOOL_RECORD_BYTES - 4 + payload_bytes))
        return 0;
    out->kind = (msc__spool_kind)kind;
    out->batch = get_u32(bytes + 8);
    out->payload = bytes + MSC__SPOOL_RECORD_BYTES;
    out->payload_bytes = payload_bytes;
    return msc__spool_size(payload_bytes);
}

/* ---- payloads ----------------------------------------------------------------------------------------- */

bool msc__record_is_name(const char *text, size_t bytes, size_t most)
{
    size_t i;

    if (bytes == 0 || bytes > most)
        return false;
    for (i = 0; i < bytes; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
            return false;
    return true;
}

uint32_t msc__spool_row_bytes(const msc_record_value *values, uint32_t value_count)
{
    uint32_t bytes = ROW_BYTES;
    uint32_t i;

    if (value_count == 0 || value_count > MSC_RECORD_ROW_VALUES)
        return 0;
    for (i = 0; i < value_count; i++) {
        size_t name_bytes = values[i].name == NULL ? 0 : strlen(values[i].name);
        size_t unit_bytes = values[i].unit == NULL ? 0 : strlen(values[i].unit);

        if (!msc__record_is_name(values[i].name, name_bytes, MSC_RECORD_NAME_BYTES) ||
            (unit_bytes > 0 && !msc__record_is_name(values[i].unit, unit_bytes, MSC_RECORD_UNIT_BYTES)))
            return 0;
        bytes += VALUE_BYTES + (uint32_t)(name_bytes + unit_bytes);
    }
    return bytes;
}

void msc__spool_put_row(uint8_t *out, int64_t step, int64_t time_ms, const msc_record_value *values,
                        uint32_t value_count)
{
    uint32_t i;

    put_u64(out, (uint64_t)step);
    put_u64(out + 8, (uint64_t)time_ms);
    put_u16(out + 16, value_count);
    out += ROW_BYTES;
    for (i = 0; i < value_count; i++) {
        size_t name_bytes = strlen(values[i].name);
        size_t unit_bytes = values[i].unit == NULL ? 0 : strlen(values[i].unit);
        uint64_t bits;

        memcpy(&bits, &values[i].value, sizeof bits);
        put_u64(out, bits);
        out[8] = (uint8_t)name_bytes;
        out[9] = (uint8_t)unit_bytes;
        memcpy(out + VALUE_BYTES, values[i].name, name_bytes);
        if (unit_bytes > 0)
            memcpy(out + VALUE_BYTES + name_bytes, values[i].unit, unit_bytes);
        out += VALUE_BYTES + name_bytes + unit_bytes;
    }
}

bool msc__spool_row_begin(const uint8_t *payload, uint32_t payload_bytes, msc__spool_row *out)
{
    if (payload_bytes < ROW_BYTES)
        return false;
    out->step = (int64_t)get_u64(payload);
    out->time_ms = (int64_t)get_u64(payload + 8);
    out->left = get_u16(payload + 16);
    out->at = payload + ROW_BYTES;
    out->end = payload + payload_bytes;
    return out->left > 0 && out->left <= MSC_RECORD_ROW_VALUES;
}

bool msc__spool_row_next(msc__spool_row *row, msc__spool_value *out)
{
    uint64_t bits;

    if (row->left == 0 || row->end - row->at < (ptrdiff_t)VALUE_BYTES)
        return false;
    bits = get_u64(row->at);
    memcpy(&out->value, &bits, sizeof bits);
    out->name_bytes = row->at[8];
    out->unit_bytes = row->at[9];
    if (row->end - row->at < (ptrdiff_t)(VALUE_BYTES + out->name_bytes + out->unit_bytes))
        return false;
    out->name = (const char *)row->at + VALUE_BYTES;
    out->unit = out->name + out->name_bytes;
    if (!msc__record_is_name(out->name, out->name_bytes, MSC_RECORD_NAME_BYTES) ||
        (out->unit_bytes > 0 && !msc__record_is_name(out->unit, out->unit_bytes, MSC_RECORD_UNIT_BYTES)))
        return false;
    row->at += VALUE_BYTES + out->name_bytes + out->unit_bytes;
    row->left--;
    return true;
}

bool msc__spool_document_name(const uint8_t *payload, uint32_t payload_bytes, const char **name,
                              uint32_t *name_bytes)
{
    if (payload_bytes < 1 || payload_bytes - 1 <= payload[0])
        return false;
    *name = (const char *)payload + 1;
    *name_bytes = payload[0];
    return msc__record_is_name(*name, *name_bytes, MSC_RECORD_NAME_BYTES);
}
