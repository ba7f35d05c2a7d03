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
    int64_t kept_to; /**< the writer's own: project that `store_keep_step` goes on after */
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

/** The folder is this process's alone as long as `*lock` is open; it is made if it is not there. */
msc_status store_claim(const char *folder, int *lock, msc_error *err);
/** Names of new files are on disk only when their folder is. */
msc_status store_sync_folder(const char *folder, msc_error *err);
msc_status store_fail_io(const char *what, const char *path, msc_error *err);
/** EIO, saying what SQLite's check of the whole file finds. */
msc_status store_check_file(store_db *db, msc_error *err);
/** Whether the server that has it was stopped, not killed. Errors: EIO. */
msc_status store_mark_clean(store_db *db, bool clean, msc_error *err);
/** What a statement of one row says, as text; "nothing" if it fails. */
void store_ask(store_db *db, const char *question, char *into, size_t room);
#define STORE_FILE_NAME "/memscale.db"
#define STORE_FOLDER_BYTES 4000u /**< most of a folder's path */

/** Blocks of a series are numbered below this, so that series and number make one key. */
#define STORE_BLOCKS (INT64_C(1) << 24)

/** The points of a block. NOT_FOUND: there is none; FAILED: its bytes are not what holds so many. */
store_result store_get_block(store_db *db, int64_t series, int64_t number, block_point *points,
                             uint32_t *count);

/** An account at the first columns, STORE_ACCOUNT_COLUMNS of them; a run at its eleven. */
#define STORE_ACCOUNT_WIDTH 6
void store_account_row(sqlite3_stmt *row, store_account *out);
store_result store_account_get(store_db *db, const char *name, store_account *out);
void store_run_row(sqlite3_stmt *row, int64_t now_ms, store_run *out);
store_result store_run_get(store_db *db, store_run_ref ref, store_run *out);
/** The same, and FORBIDDEN if the role in its team, which is given back, is less. */
store_result store_run_get_as(store_db *db, store_run_ref ref, store_role least, store_run *out,
                              int64_t *team);
/** Takes a run away and leaves what it sent to the purge. */
store_result store_run_drop(store_db *db, int64_t key);

/** One project, of those that `who` sees. */
store_result store_project_get(store_db *db, store_who who, int64_t id, store_project *out);
/** The id of the project that a name means, which is made if there is none. */
store_result store_project_obtain(store_db *db, const store_act *act, int64_t team, const char *name,
                                  int64_t *id, bool *made);
store_who store_who_of(store_run_ref ref);

/** NOT_FOUND: not in the team; FORBIDDEN: the role is less. */
store_result store_team_role(store_db *db, store_who who, int64_t team, store_role least, store_role *role);
/** Joins; CONFLICT: is there. */
store_result store_member_join(store_db *db, int64_t team, int64_t account, store_role role, int64_t now_ms);
const char *store_role_name(store_role role);
store_result store_account_insert(store_db *db, store_account *account);
store_result store_password_change(store_db *db, int64_t account, const char *password);

/**
 * A line of the audit log, in the transaction of what it tells. `team` 0: of none; `act->who.account` 0: the
 * server. `detail` may be "".
 */
store_result store_note(store_db *db, const store_act *act, int64_t team, const char *action,
                        const char *thing, const char *detail);

/** Whether a statement that was given its values has a row; its failure in `*result`. */
bool store_has_row(store_db *db, store_sql_id id, bool bound, store_result *result);

#endif /* MSC_SERVER_STORE_INTERNAL_H */
