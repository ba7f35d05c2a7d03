/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file record.h
 * What a training run records: numbers by step, events and documents, on disk without ever waiting.
 *
 *     put ──► ring, fixed size ──► one thread ──► spool: segment files of one process in a folder
 *             copies and returns                  │ fsync by time; a cap on all of them
 *                                                 └──► msc_spool reads them, batch by batch, as JSON
 *
 * **Putting** copies into the ring and returns: no lock, no allocation, no system call but one that wakes the
 * thread where the ring is half full. Where there is no room, values are refused and counted: above half of
 * the ring every second row, above three quarters all of them. The last quarter is for events and documents.
 *
 * **The spool** is a file `<client>-<number>.spool` after another. Each record has its length and a CRC32C,
 * so that a file that ends anywhere is read up to the last whole record: a process that is killed loses only
 * what was still in the ring (at most 0.1 s). Where the disk refuses, the thread tries again each second, and
 * what does not fit the ring meanwhile is counted. At `cap_bytes` of all segments every second row of the
 * oldest is removed, and again; events and documents stay.
 *
 * **A batch** is what is sent at once. Its number is in its records, so it is cut the same way by every
 * reader, however often: with the client's name, a server can see what it already has. It fits one request (1
 * MiB of JSON, 1,024 series, 1,024 events, 16 documents) and one segment.
 *
 * A child of a fork has no thread: there, putting does nothing and `msc_record_destroy` only lets go.
 */
#ifndef MEMSCALE_RECORD_H
#define MEMSCALE_RECORD_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Most bytes of a series' name, and of its unit. */
#define MSC_RECORD_NAME_BYTES 128u
#define MSC_RECORD_UNIT_BYTES 16u

/** Most values of a row, and bytes of an event or document. */
#define MSC_RECORD_ROW_VALUES 256u
#define MSC_RECORD_MOST_BYTES (512u << 10)

/** Most bytes of a client's name: letters, digits, `_` and `-`. */
#define MSC_RECORD_CLIENT_BYTES 64u

typedef struct msc_record_options {
    size_t struct_bytes;
    const char *directory;  /**< exists; the spool's files are made in it */
    const char *client;     /**< name of this process, which no other has in this folder */
    uint64_t ring_bytes;    /**< a power of two, at least 1 MiB; 4 MiB if not set */
    uint64_t segment_bytes; /**< of a file, about; 4 MiB if not set */
    uint64_t cap_bytes;     /**< of all files, at least 4 segments; 256 MiB if not set */
    int64_t batch_ns;       /**< how long a batch waits for more; 2 s if not set */
    int64_t sync_ns;        /**< between two fsyncs; 1 s if not set */
} msc_record_options;

/** A number of a row. */
typedef struct msc_record_value {
    const char *name; /**< UTF-8 of 1 to MSC_RECORD_NAME_BYTES bytes without control characters */
    const char *unit; /**< "bytes", "ns" or "", at most MSC_RECORD_UNIT_BYTES */
    double value;
} msc_record_value;

/** What became of what was put. */
typedef struct msc_record_figures {
    uint64_t row_count;     /**< rows that were taken */
    uint64_t event_count;   /**< events and documents that were taken */
    uint64_t dropped_rows;  /**< not taken for lack of room in ring or spool, or removed from the spool */
    uint64_t dropped_count; /**< events and documents that were not taken */
    uint64_t written_bytes; /**< to the spool, in all */
    uint64_t held_bytes;    /**< of the spool's files, when it was looked at last */
    uint64_t failures;      /**< writes that the system refused, in all */
    int32_t system_error;   /**< errno of the write that is being tried again; 0: none is */
    uint32_t segment;       /**< number of the file that is written */
} msc_record_figures;

typedef struct msc_record msc_record;

/** Every default, for a struct of `struct_bytes`. */
MSC_API void msc_record_options_init(msc_record_options *options, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_record_options msc_record_options_default(void)
{
    msc_record_options options;

    msc_record_options_init(&options, sizeof options);
    return options;
}

/**
 * Opens a spool and starts its thread.
 *
 * @param ctx the recorder's own until it ends: nothing else may use it meanwhile.
 * @param out the caller owns the result and ends it with `msc_record_destroy`.
 * Errors: EINVAL (names the field), EIO (the folder cannot be written to; driver_code is errno), ENOMEM,
 * EINTERNAL.
 */
MSC_API MSC_NODISCARD msc_status msc_record_create(msc_context *ctx, const msc_record_options *options,
                                                   msc_record **out, msc_error *err);

/**
 * Writes what is in the ring, ends the thread, closes the files. NULL is accepted. Waits for one write and
 * fsync.
 */
MSC_API void msc_record_destroy(msc_record *record);

/**
 * Records values of a step.
 *
 * @param time_ms since 1970.
 * Errors: EINVAL (a name, a unit, the count), EAGAIN (no room; counted), ESTATE (after `msc_record_end`, or
 * in a child of a fork). Threads: any. Cost: a copy of some 30 bytes a value and its name.
 */
MSC_API MSC_NODISCARD msc_status msc_record_row(msc_record *record, int64_t step, int64_t time_ms,
                                                const msc_record_value *values, uint32_t value_count,
                                                msc_error *err);

/** Records an event: a JSON object as the server's API takes it. Errors and threads as above. */
MSC_API MSC_NODISCARD msc_status msc_record_event(msc_record *record, const char *json, size_t json_bytes,
                                                  msc_error *err);

/** Records a document: JSON under a name, in the place of an earlier one. Errors and threads as above. */
MSC_API MSC_NODISCARD msc_status msc_record_document(msc_record *record, const char *name, const char *json,
                                                     size_t json_bytes, msc_error *err);

/** The run has ended: `state` is "finished" or "failed". Nothing can be put any more. Errors as above. */
MSC_API MSC_NODISCARD msc_status msc_record_end(msc_record *record, const char *state, msc_error *err);

/**
 * Waits until what was put before is in the spool's files and its batch is complete.
 *
 * Errors: ETIMEDOUT, EIO (the system refuses; driver_code is errno).
 */
MSC_API MSC_NODISCARD msc_status msc_record_flush(msc_record *record, int64_t timeout_ns, msc_error *err);

/** Figures, for a struct of `out_bytes`. Threads: any. */
MSC_API void msc_record_figures_read(const msc_record *record, msc_record_figures *out, size_t out_bytes);

/* ---- reading ------------------------------------------------------------------------------------------ */

/** A file of a spool, or a part of it, in memory. */
typedef struct msc_spool msc_spool;

typedef struct msc_spool_batch {
    uint64_t begin; /**< offset in the file; where the next one begins is `end` */
    uint64_t end;
    uint32_t sequence;    /**< number of the batch */
    uint32_t value_count; /**< numbers in its rows */
    uint32_t event_count;
    uint32_t document_count;
    uint8_t is_complete; /**< another one follows; else more may be added to it while its writer lives */
    uint8_t end_state;   /**< the run has ended in it: 1 finished, 2 failed; else 0 */
    uint8_t pad[6];      /**< zero */
} msc_spool_batch;

/**
 * Reads a file from an offset on.
 *
 * @param offset 0, or where a batch begins.
 * @param most_bytes 0: to the end.
 * Errors: EFORMAT (not such a file), EVERSION, EIO, ENOMEM.
 */
MSC_API MSC_NODISCARD msc_status msc_spool_load(msc_context *ctx, const char *path, uint64_t offset,
                                                msc_spool **out, msc_error *err);

/** The same of a file's bytes, from its beginning. They are copied. */
MSC_API MSC_NODISCARD msc_status msc_spool_parse(msc_context *ctx, const void *bytes, size_t byte_count,
                                                 msc_spool **out, msc_error *err);

MSC_API void msc_spool_destroy(msc_spool *spool);

/** How often every second row was removed from the file. */
MSC_API uint32_t msc_spool_level(const msc_spool *spool);

/**
 * Bytes that were passed over because they are not what was written. A record that is cut off at the end is
 * none.
 */
MSC_API uint64_t msc_spool_damaged_bytes(const msc_spool *spool);

/**
 * The next batch that holds anything; 0 if there is none. The tick that ends a file has the number of the
 * next file's.
 */
MSC_API int msc_spool_next(msc_spool *spool, msc_spool_batch *out);

/**
 * A batch as JSON: `{"client":…,"sequence":…,"points":[…],"events":[…],"documents":{…}}`, as the server's API
 * takes it. Of documents of one name the last.
 *
 * @param batch that `msc_spool_next` gave last.
 * @param client see `msc_record_options`.
 * @param text valid until the next call with this spool.
 * Errors: EINVAL (the client's name), ENOMEM.
 */
MSC_API MSC_NODISCARD msc_status msc_spool_body(msc_spool *spool, const msc_spool_batch *batch,
                                                const char *client, const char **text, size_t *text_bytes,
                                                msc_error *err);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_RECORD_H */
