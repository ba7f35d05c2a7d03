/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes of a pickle.
 *
 *     file    |......................................................|
 *     buffer              [ used |  at ... end  |  room  ]
 *
 * The buffer grows only when one string is longer than it, and only as its bytes really come: a length that
 * a file announces never makes memory by itself. Where the size of the file is known, such a length is
 * compared with what is left before anything is read.
 */
#include "snapshot/snapshot_source.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"

#define FIRST_BUFFER_BYTES 65536u
#define REASON_BYTES 128u

void msc__source_init_memory(msc__source *source, const void *bytes, size_t size_bytes)
{
    memset(source, 0, sizeof *source);
    source->at = bytes;
    source->end = source->at + size_bytes;
    source->end_offset = size_bytes;
    source->total_bytes = size_bytes;
}

/* A pipe has no size. */
static uint64_t size_of(FILE *file)
{
    long size;

    if (fseek(file, 0, SEEK_END) != 0)
        return UINT64_MAX;
    size = ftell(file);
    if (size < 0 || fseek(file, 0, SEEK_SET) != 0)
        return UINT64_MAX;
    return (uint64_t)size;
}

void msc__source_init_file(msc__source *source, msc_context *ctx, FILE *file)
{
    memset(source, 0, sizeof *source);
    source->ctx = ctx;
    source->file = file;
    source->total_bytes = size_of(file);
}

void msc__source_fini(msc__source *source)
{
    msc__free(source->ctx, source->buffer, source->buffer_bytes);
    source->buffer = NULL;
}

uint64_t msc__source_left(const msc__source *source)
{
    uint64_t offset = msc__source_offset(source);

    return source->total_bytes > offset ? source->total_bytes - offset : 0;
}

/* Room for more after `end`: what was used goes, and when that is not enough the buffer doubles. */
static msc_status make_room(msc__source *source, msc_error *err)
{
    size_t have = (size_t)(source->end - source->at);
    size_t bytes = source->buffer_bytes == 0 ? FIRST_BUFFER_BYTES : source->buffer_bytes * 2;
    uint8_t *grown;

    MSC__ASSERT(source->file != NULL && have <= source->buffer_bytes);
    if (have > 0)
        memmove(source->buffer, source->at, have);
    if (have > source->buffer_bytes / 2 || source->buffer == NULL) {
        grown = msc__resize(source->ctx, source->buffer, source->buffer_bytes, bytes);
        if (grown == NULL)
            return msc__fail_memory(err, "the buffer of a snapshot", bytes);
        source->buffer = grown;
        source->buffer_bytes = bytes;
    }
    source->at = source->buffer;
    source->end = source->buffer + have;
    return MSC_OK;
}

msc_status msc__source_fail(msc_error *err, const char *attempt, const char *path)
{
    int number = errno;
    char reason[REASON_BYTES];

    if (strerror_r(number, reason, sizeof reason) != 0)
        memcpy(reason, "unknown", sizeof "unknown");
    msc__fail(err, MSC_EIO, "cannot %s %s: %s", attempt, path, reason);
    if (err != NULL)
        err->driver_code = number;
    return MSC_EIO;
}

/* Reads at least one byte more. */
static msc_status read_more(msc__source *source, msc_error *err)
{
    size_t got;
    msc_status status;

    if (source->file == NULL)
        return msc__fail(err, MSC_EFORMAT, "the file ends here");
    status = make_room(source, err);
    if (status != MSC_OK)
        return status;
    MSC__ASSERT(source->end < source->buffer + source->buffer_bytes);
    got = fread(source->buffer + (source->end - source->buffer), 1,
                source->buffer_bytes - (size_t)(source->end - source->buffer), source->file);
    if (got == 0 && ferror(source->file))
        return msc__source_fail(err, "read", "the snapshot");
    if (got == 0)
        return msc__fail(err, MSC_EFORMAT, "the file ends here");
    source->end += got;
    source->end_offset += got;
    return MSC_OK;
}

msc_status msc__source_fill(msc__source *source, size_t bytes, msc_error *err)
{
    msc_status status = MSC_OK;

    while (status == MSC_OK && (size_t)(source->end - source->at) < bytes)
        status = read_more(source, err);
    MSC__ASSERT(status != MSC_OK || (size_t)(source->end - source->at) >= bytes);
    return status;
}

msc_status msc__source_fill_line(msc__source *source, size_t *bytes, msc_error *err)
{
    size_t seen = 0;
    msc_status status;

    for (;;) {
        size_t have = (size_t)(source->end - source->at);
        const uint8_t *newline = have > seen ? memchr(source->at + seen, '\n', have - seen) : NULL;
        MSC__ASSERT(seen <= have);
        if (newline != NULL) {
            *bytes = (size_t)(newline - source->at);
            return MSC_OK;
        }
        seen = have;
        status = read_more(source, err);
        if (status != MSC_OK)
            return status;
    }
}
