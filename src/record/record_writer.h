/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file record_writer.h
 * The files of a spool, as its thread writes them: records into batches, batches into segments, all within a
 * cap.
 *
 * Used by one thread. What the system refuses stays in the buffer, and the same bytes go to the same place
 * when it is tried again.
 */
#ifndef MSC_RECORD_WRITER_H
#define MSC_RECORD_WRITER_H

#include "record/record_codec.h"

#define MSC__WRITER_BUFFER_BYTES (640u << 10)
#define MSC__WRITER_SERIES 1000u /* of a batch; the server takes 1,024 */
#define MSC__WRITER_SERIES_SLOTS 2048u

/** What is in the batch that is being written. */
typedef struct msc__batch_sum {
    uint64_t json_bytes; /* at most, as a request */
    uint32_t record_count;
    uint32_t event_count;
    uint32_t document_count;
    uint32_t series_count;
    uint64_t series[MSC__WRITER_SERIES_SLOTS]; /* hashes of names; 0: free */
} msc__batch_sum;

typedef struct msc__writer {
    msc_context *ctx;
    const char *client;
    uint64_t segment_bytes, cap_bytes;
    int64_t batch_ns, sync_ns;
    int folder; /* descriptor */
    int fd;
    uint32_t first,
        segment;     /* numbers of the oldest file that may be there, and of the one that is written */
    uint64_t offset; /* of the buffer's first byte in the file */
    uint8_t *buffer;
    uint32_t used;
    uint32_t batch; /* its number */
    msc__batch_sum sum;
    int64_t batch_begin_ns, synced_ns, looked_ns;
    bool is_dirty;             /* written since the last fsync */
    bool is_full, is_overfull; /* no more rows; no more events either */
    int failure;               /* errno of what was refused last; 0: it has gone well since */
    uint64_t failures, written_bytes, held_bytes, dropped_rows, dropped_count;
} msc__writer;

/** Opens the folder and the first file. Errors: EIO, ENOMEM. `fini` accepts what failed, and what is zero. */
msc_status msc__writer_init(msc_context *ctx, const msc_record_options *options, const char *client,
                            msc__writer *out, msc_error *err);
void msc__writer_fini(msc__writer *writer);

/**
 * Takes a record. False: the system refuses, try again with the same. Where the spool is full it is counted
 * instead.
 */
bool msc__writer_add(msc__writer *writer, msc__spool_kind kind, const uint8_t *payload,
                     uint32_t payload_bytes, int64_t now_ns);

/** Has the batch complete. False as above. */
bool msc__writer_close_batch(msc__writer *writer);

/** Writes the buffer, closes the batch and syncs where it is time. False as above. */
bool msc__writer_tick(msc__writer *writer, int64_t now_ns);

/** Writes and syncs. False as above. */
bool msc__writer_settle(msc__writer *writer);

/* ---- the cap (record_trim.c) ---- */

/** Name of a file. */
#define MSC__SPOOL_NAME_BYTES (MSC_RECORD_CLIENT_BYTES + 24u)
void msc__writer_name(const msc__writer *writer, uint32_t segment, const char *suffix,
                      char name[MSC__SPOOL_NAME_BYTES]);

/** Looks what is held, and removes rows from complete files until one more fits the cap. */
void msc__writer_trim(msc__writer *writer);

#endif /* MSC_RECORD_WRITER_H */
