/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file snapshot_source.h
 * Bytes of a pickle, from memory or from a file, with the offset of the next one.
 */
#ifndef MSC_SNAPSHOT_SOURCE_H
#define MSC_SNAPSHOT_SOURCE_H

#include <stdbool.h>
#include <stdio.h>

#include "base/invariant.h"
#include "memscale/base.h"

typedef struct msc__source {
    const uint8_t *at;    /**< next byte */
    const uint8_t *end;   /**< end of what is in memory */
    uint64_t end_offset;  /**< offset of `end` in the whole */
    uint64_t total_bytes; /**< of the whole; UINT64_MAX: not known */
    msc_context *ctx;
    FILE *file;      /**< NULL: all is in memory */
    uint8_t *buffer; /**< of a file */
    size_t buffer_bytes;
} msc__source;

void msc__source_init_memory(msc__source *source, const void *bytes, size_t size_bytes);
/** Reads from where `file` stands. Nothing is read yet. */
void msc__source_init_file(msc__source *source, msc_context *ctx, FILE *file);
void msc__source_fini(msc__source *source);

/** Offset of the next byte. */
static inline uint64_t msc__source_offset(const msc__source *source)
{
    MSC__ASSERT(source->at <= source->end && (uint64_t)(source->end - source->at) <= source->end_offset);
    return source->end_offset - (uint64_t)(source->end - source->at);
}

/** Most bytes that can still come. */
uint64_t msc__source_left(const msc__source *source);

/**
 * Makes `bytes` bytes, which must not be more than are left, lie at `at`.
 * Errors: EFORMAT (the file is shorter), EIO, ENOMEM: the message is without an offset.
 */
msc_status msc__source_fill(msc__source *source, size_t bytes, msc_error *err);

/** Makes a line, without its end, lie at `at`; `*bytes` is its length. Errors: as fill. */
msc_status msc__source_fill_line(msc__source *source, size_t *bytes, msc_error *err);

/** Errors of the operating system: `cannot <attempt> <path>: <reason of errno>`. Returns MSC_EIO. */
msc_status msc__source_fail(msc_error *err, const char *attempt, const char *path);

#endif /* MSC_SNAPSHOT_SOURCE_H */
