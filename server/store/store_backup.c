/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies of a folder, and folders from copies.
 *
 *      backup     DIR/memscale.db ──one read transaction──► FILE.part   checked, marked whole, synced ──► FILE
 *      restore    FILE ───────────────────────────────────► DIR/memscale.db.part   checked, synced ──► DIR/memscale.db
 *
 * SQLite's online copy reads all pages in one transaction, so writers of another process go on and their later
 * commits are not in it; what they had committed before is. A copy that was cut off stays a .part, which the
 * next one replaces.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "store/store_internal.h"

#define PATH_BYTES (STORE_FOLDER_BYTES + 32u)

/* All pages of one file into another, which is empty. */
static msc_status copy_pages(store_db *from, store_db *to, msc_error *err)
{
    sqlite3_backup *copy = sqlite3_backup_init(to->it, "main", from->it, "main");
    int code = SQLITE_ERROR;

    if (copy != NULL) {
        do
            code = sqlite3_backup_step(copy, -1);
        while (code == SQLITE_BUSY || code == SQLITE_LOCKED);
        (void)sqlite3_backup_finish(copy);
    }
    if (code == SQLITE_DONE)
        return MSC_OK;
    return msc__fail(err, store_meaning(code) == STORE_NO_MEMORY ? MSC_ENOMEM : MSC_EIO,
                     "cannot copy the data: %s",
                     copy == NULL ? sqlite3_errmsg(to->it) : sqlite3_errstr(code));
}

/* Whether a copy is ours and whole; then it is marked so, and needs no files beside it. */
static msc_status check_copy(store_db *db, msc_error *err)
{
    char said[64];
    msc_status status = store_check_file(db, err);

    if (status != MSC_OK)
        return status;
    store_ask(db, "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name IN ('meta', 'run')", said,
              sizeof said);
    if (strcmp(said, "2") != 0)
        return msc__fail(err, MSC_EIO, "the file has no data of memscale-server");
    store_ask(db, "PRAGMA user_version", said, sizeof said);
    if (strtoul(said, NULL, 10) > store_migration_count())
        return msc__fail(err, MSC_EVERSION, "the data is of form %s, this server knows forms up to %u", said,
                         (unsigned)store_migration_count());
    store_ask(db, "PRAGMA journal_mode = DELETE", said, sizeof said);
    return store_mark_clean(db, true, err);
}

static msc_status sync_file(const char *path, msc_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool failed = fd < 0 || fsync(fd) != 0;
    msc_status status = failed ? store_fail_io("sync", path, err) : MSC_OK;

    if (fd >= 0)
        (void)close(fd);
    return status;
}

/* The folder that a file is in. */
static msc_status sync_parent(const char *path, msc_error *err)
{
    char folder[PATH_BYTES];
    char *slash;

    (void)snprintf(folder, sizeof folder, "%s", path);
    slash = strrchr(folder, '/');
    if (slash == NULL)
        return store_sync_folder(".", err);
    slash[slash == folder] = '\0';
    return store_sync_folder(folder, err);
}

/* An empty file that nobody else may read, in place of one that a copy before has left. */
static msc_status make_part(const char *path, msc_error *err)
{
    int fd;

    if (unlink(path) != 0 && errno != ENOENT)
        return store_fail_io("remove", path, err);
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return store_fail_io("make", path, err);
    (void)close(fd);
    return MSC_OK;
}

static msc_status copy_file(const char *from_path, const char *to_path, msc_error *err)
{
    char part[PATH_BYTES + 8];
    store_db from = {0};
    store_db to = {0};
    msc_status status;

    if (access(to_path, F_OK) == 0)
        return msc__fail(err, MSC_EIO, "%s is there already: choose another, or remove it", to_path);
    if (access(from_path, R_OK) != 0)
        return store_fail_io("read", from_path, err);
    (void)snprintf(part, sizeof part, "%s.part", to_path);
    status = make_part(part, err);
    if (status == MSC_OK)
        status = store_db_open(&from, from_path, true, err);
    if (status == MSC_OK)
        status = store_db_open(&to, part, false, err);
    if (status == MSC_OK)
        status = copy_pages(&from, &to, err);
    if (status == MSC_OK)
        status = check_copy(&to, err);
    store_db_close(&to);
    store_db_close(&from);
    if (status == MSC_OK)
        status = sync_file(part, err);
    if (status == MSC_OK && rename(part, to_path) != 0)
        status = store_fail_io("rename", part, err);
    if (status != MSC_OK) {
        (void)unlink(part);
        return status;
    }
    return sync_parent(to_path, err);
}

static msc_status check_length(const char *path, msc_error *err)
{
    return strlen(path) <= STORE_FOLDER_BYTES
               ? MSC_OK
               : msc__fail(err, MSC_EINVAL, "a path is longer than %u bytes", STORE_FOLDER_BYTES);
}

msc_status store_backup(const char *folder, const char *file, msc_error *err)
{
    char path[PATH_BYTES];
    msc_status status = check_length(folder, err);

    if (status == MSC_OK)
        status = check_length(file, err);
    if (status != MSC_OK)
        return status;
    (void)snprintf(path, sizeof path, "%s%s", folder, STORE_FILE_NAME);
    return copy_file(path, file, err);
}

msc_status store_restore(const char *folder, const char *file, msc_error *err)
{
    char path[PATH_BYTES];
    int lock = -1;
    msc_status status = check_length(folder, err);

    if (status == MSC_OK)
        status = check_length(file, err);
    if (status == MSC_OK)
        status = store_claim(folder, &lock, err);
    if (status == MSC_OK) {
        (void)snprintf(path, sizeof path, "%s%s", folder, STORE_FILE_NAME);
        status = copy_file(file, path, err);
    }
    if (lock >= 0)
        (void)close(lock);
    return status;
}
