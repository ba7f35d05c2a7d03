/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file store_keep.h What is kept for how long, and copies of all of it. A part of the door store.h, which
 * brings it.
 */
#ifndef MSC_SERVER_STORE_KEEP_H
#define MSC_SERVER_STORE_KEEP_H

#define STORE_MOST_DAYS 36500

/* ---- retention ------------------------------------------------------------------------------- */

/**
 * The age of a run counts from its last sign of life, so one that sends is never old. Pinned ones stay.
 */
typedef struct store_retention {
    int64_t archives; /**< runs that the project's rule would archive now */
    int64_t deletes;  /**< runs that it would delete now */
    int64_t pinned;   /**< runs that are old enough for either, and stay */
} store_retention;

/** A rule that is asked about. */
typedef struct store_rule {
    int64_t project;
    int64_t archive_days; /**< 0: never; -1: as the project has it */
    int64_t delete_days;  /**< 0: never; -1: as the project has it */
} store_rule;

/** What a rule would do now. Changes nothing. */
store_result store_retention_preview(store *it, store_act act, const store_rule *rule, store_retention *out);
/** Some of the runs that it would archive, or delete: the oldest first. */
store_result store_retention_runs(store *it, store_act act, const store_rule *rule, bool deletes,
                                  uint32_t limit, store_run_each *each, void *user);

/**
 * A step of what projects' rules, purges and deletions ask for: at most 100 runs, so that no writer waits
 * long. `altered`, `gone`: told of each run after the commit; may be NULL. `*more`: there is more to do.
 */
store_result store_keep_step(store *it, int64_t now_ms, store_changed *altered, store_changed *gone,
                             void *user, bool *more);

/* ---- copies ---------------------------------------------------------------------------------- */

/**
 * Writes all of a folder, as it is at this moment, into a new file; a server may be at work in it. The file
 * is checked, and appears only when it is whole. Errors: EIO with what to do about it, ENOMEM.
 */
MSC_NODISCARD msc_status store_backup(const char *folder, const char *file, msc_error *err);
/**
 * Makes a folder of such a file. Errors: EIO: the folder has data, or the file is damaged or none of ours;
 * EVERSION: of a newer server.
 */
MSC_NODISCARD msc_status store_restore(const char *folder, const char *file, msc_error *err);

#endif /* MSC_SERVER_STORE_KEEP_H */
