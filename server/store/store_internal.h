/* SPDX-License-Identifier: Apache-2.0 */
/** @file store_internal.h  What the files of `store` share: the store itself, jobs of the writer, readers. */
#ifndef MSC_SERVER_STORE_INTERNAL_H
#define MSC_SERVER_STORE_INTERNAL_H

#include "base/thread.h"
#include "store/store_sql.h"

typedef struct store_job store_job;

/**
 * Work of the writer within a transaction. It may be done twice, if the first transaction came to nothing.
 */
typedef store_result store_work(store_db *db, void *job);

struct store_job {
    store_work *work;
    void (*after)(void *job); /**< once it is on disk; may be NULL */
    void *user;
    store_result result;
    bool done;
    store_job *next;
};

typedef struct store_reader {
    store_db db; /* first: a reader is known by it */
    bool used;
} store_reader;

struct store {
    msc_context *ctx; /**< used by open and close alone */
    char *path;       /**< of the file */
    size_t path_bytes;
    int lock; /**< file that is locked, or -1 */

    msc__mutex mutex; /**< of what follows, up to the writer */
    msc__cond jobs_changed;
    msc__cond jobs_done;
    store_job *first;
    store_job **last;
    bool stops;
    bool write_failed; /**< the last one */
    store_figures figures;
    msc__cond reader_free;
    store_reader *readers;
    uint32_t reader_count;

    store_db writer; /**< the writer's own */
    bool purges;     /**< the writer's own: there is something to purge */
    msc__thread thread;
};

/** Has the writer do something and waits until it is on disk or refused. */
store_result store_write(store *it, store_work *work, void (*after)(void *), void *job);
/** The thread. */
void *store_writer_run(void *it);

/** A connection that reads, with its deadline set. Waits until one is free. */
store_db *store_reader_get(store *it);
void store_reader_put(store *it, store_db *db);

/** Brings a file to the newest form. `version`: that it is in then. Errors: EVERSION, EIO. */
msc_status store_migrate(store_db *db, msc_error *err);
/** How many migrations there are. */
uint32_t store_migration_count(void);
/** Up to a version only, for tests of older files. */
msc_status store_migrate_to(store_db *db, uint32_t version, msc_error *err);

/** A step of removing what deleted runs had; `*more` false: nothing is left. */
store_result store_purge_step(store_db *db, bool *more);

/** Blocks of a series are numbered below this, so that series and number make one key. */
#define STORE_BLOCKS (INT64_C(1) << 24)

/** The points of a block. NOT_FOUND: there is none; FAILED: its bytes are not what holds so many. */
store_result store_get_block(store_db *db, int64_t series, int64_t number, block_point *points,
                             uint32_t *count);

/** Columns of an account at the first five columns; a run's at its ten. */
void store_account_row(sqlite3_stmt *row, store_account *out);
void store_run_row(sqlite3_stmt *row, int64_t now_ms, store_run *out);
store_result store_run_get(store_db *db, store_run_ref ref, store_run *out);

#endif /* MSC_SERVER_STORE_INTERNAL_H */
