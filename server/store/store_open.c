/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening and closing a folder, and the connections that read.
 *
 *      DIR/lock           locked as long as a server has the folder
 *      DIR/memscale.db    everything, with SQLite's own -wal and -shm beside it
 *
 * `meta.clean` is 0 while a server runs. If it is 0 when one starts, the one before was killed or the machine
 * lost power: SQLite's log brings back what was committed, and the whole file is checked before anything is
 * built on it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/error.h"
#include "base/invariant.h"
#include "store/store_internal.h"

#define LOCK_NAME "/lock"
#define READ_SECONDS 5
#define SECOND_NS INT64_C(1000000000)
#define PAGE_BYTES 4096u

msc_status store_fail_io(const char *what, const char *path, msc_error *err)
{
    int number = errno;

    msc__ignore(msc__fail(err, MSC_EIO, "cannot %s %s: %s", what, path, strerror(number)));
    if (err != NULL)
        err->driver_code = number;
    return MSC_EIO;
}

/* A lock or a shared map of a network file system is not what SQLite relies on. */
static bool is_remote(const char *folder)
{
    static const uint32_t kinds[] = {
        0x6969,     /* NFS */
        0x517b,     /* SMB */
        0xfe534d42, /* SMB 2 */
        0xff534d42, /* CIFS */
        0x01021997, /* 9P */
        0x73757245, /* Coda */
        0x5346414f, /* AFS */
        0x00c36400, /* Ceph */
        0x0bd00bd0, /* Lustre */
    };
    struct statfs info;
    size_t i;

    if (statfs(folder, &info) != 0)
        return false;
    for (i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if ((uint32_t)info.f_type == kinds[i])
            return true;
    return false;
}

msc_status store_sync_folder(const char *folder, msc_error *err)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int failed = fd < 0 || fsync(fd) != 0;
    msc_status status = failed ? store_fail_io("sync", folder, err) : MSC_OK;

    if (fd >= 0)
        (void)close(fd);
    return status;
}

msc_status store_claim(const char *folder, int *lock, msc_error *err)
{
    char path[STORE_FOLDER_BYTES + 16];

    if (mkdir(folder, 0700) != 0 && errno != EEXIST)
        return store_fail_io("make", folder, err);
    if (is_remote(folder))
        return msc__fail(
            err, MSC_EIO,
            "%s is on a network file system, where a database can be damaged: choose a local folder", folder);
    (void)snprintf(path, sizeof path, "%s%s", folder, LOCK_NAME);
    *lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (*lock < 0)
        return store_fail_io("open", path, err);
    if (flock(*lock, LOCK_EX | LOCK_NB) != 0)
        return errno == EWOULDBLOCK ? msc__fail(err, MSC_EIO, "another server has %s", folder)
                                    : store_fail_io("lock", path, err);
    return MSC_OK;
}

void store_ask(store_db *db, const char *question, char *into, size_t room)
{
    sqlite3_stmt *statement = NULL;

    (void)snprintf(into, room, "nothing");
    if (sqlite3_prepare_v2(db->it, question, -1, &statement, NULL) == SQLITE_OK && store_row(statement))
        store_column_text(statement, 0, into, room);
    (void)sqlite3_finalize(statement);
}

static msc_status set_up(store_db *db, uint64_t most_bytes, msc_error *err)
{
    char text[256];

    /* auto_vacuum counts only before the first table is made. */
    (void)sqlite3_snprintf(
        sizeof text, text,
        "PRAGMA page_size = %u; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;"
        "PRAGMA synchronous = FULL; PRAGMA journal_size_limit = 67108864;"
        "PRAGMA max_page_count = %lld;",
        PAGE_BYTES, (long long)(most_bytes == 0 ? 0xfffffffe : most_bytes / PAGE_BYTES));
    if (sqlite3_exec(db->it, text, NULL, NULL, NULL) != SQLITE_OK)
        return msc__fail(err, store_db_failed(db) == STORE_NO_MEMORY ? MSC_ENOMEM : MSC_EIO,
                         "cannot set up the data: %s", sqlite3_errmsg(db->it));
    store_ask(db, "PRAGMA journal_mode", text, sizeof text);
    if (strcmp(text, "wal") != 0)
        return msc__fail(err, MSC_EIO, "the folder cannot hold a write-ahead log (SQLite is in mode %s)",
                         text);
    return MSC_OK;
}

msc_status store_check_file(store_db *db, msc_error *err)
{
    char said[256];

    store_ask(db, "PRAGMA integrity_check(1)", said, sizeof said);
    if (strcmp(said, "ok") == 0)
        return MSC_OK;
    return msc__fail(err, MSC_EIO, "the data is damaged; restore a backup. SQLite says: %s", said);
}

msc_status store_mark_clean(store_db *db, bool clean, msc_error *err)
{
    return STORE_RUN(db, META_SET, "ti", "clean", (int64_t)clean) == STORE_OK
               ? MSC_OK
               : msc__fail(err, MSC_EIO, "cannot write to the data: %s", sqlite3_errmsg(db->it));
}

static msc_status take_up(store *it, const store_options *options, msc_error *err)
{
    store_db *db = &it->writer;
    msc_status status = set_up(db, options->most_bytes, err);
    sqlite3_stmt *row;
    bool unclean;

    if (status == MSC_OK)
        status = store_migrate(db, err);
    if (status != MSC_OK)
        return status;
    row = store_sql(db, SQL_META_GET);
    unclean = store_bind(row, "t", "clean") && store_row(row) && sqlite3_column_int64(row, 0) == 0;
    if (store_row_end(db, row, STORE_OK) != STORE_OK)
        return msc__fail(err, MSC_EIO, "cannot read the data: %s", sqlite3_errmsg(db->it));
    if (unclean)
        status = store_check_file(db, err);
    if (status == MSC_OK)
        status = store_mark_clean(db, false, err);
    if (status == MSC_OK)
        status = store_sync_folder(options->folder, err);
    return status;
}

static msc_status open_readers(store *it, uint32_t count, msc_error *err)
{
    msc_status status = MSC_OK;

    it->readers = msc__alloc(it->ctx, count * sizeof *it->readers);
    if (it->readers == NULL)
        return msc__fail_memory(err, "connections", count * sizeof *it->readers);
    it->reader_count = count;
    for (uint32_t i = 0; i < count && status == MSC_OK; i++)
        status = store_db_open(&it->readers[i].db, it->path, true, err);
    return status;
}

static msc_status open_all(store *it, const store_options *options, msc_error *err)
{
    msc_status status = store_claim(options->folder, &it->lock, err);

    if (status != MSC_OK)
        return status;
    it->path_bytes = strlen(options->folder) + sizeof STORE_FILE_NAME;
    it->path = msc__alloc(it->ctx, it->path_bytes);
    if (it->path == NULL)
        return msc__fail_memory(err, "a path", it->path_bytes);
    (void)snprintf(it->path, it->path_bytes, "%s%s", options->folder, STORE_FILE_NAME);
    status = store_db_open(&it->writer, it->path, false, err);
    if (status == MSC_OK)
        status = take_up(it, options, err);
    if (status == MSC_OK)
        status = open_readers(it, options->readers, err);
    if (status == MSC_OK)
        status = msc__thread_start(&it->thread, "store-writer", store_writer_run, it, err);
    return status;
}

msc_status store_open(const store_options *options, store **out, msc_error *err)
{
    msc_context_options context = msc_context_options_default();
    msc_context *ctx = NULL;
    msc_status status;
    store *it;

    *out = NULL;
    if (strlen(options->folder) > STORE_FOLDER_BYTES || options->readers == 0)
        return msc__fail(err, MSC_EINVAL, "the folder's path is longer than %u bytes", STORE_FOLDER_BYTES);
    context.allocator = options->allocator;
    status = msc_context_create(&context, &ctx, err);
    if (status != MSC_OK)
        return status;
    it = msc__alloc(ctx, sizeof *it);
    if (it == NULL) {
        msc_context_destroy(ctx);
        return msc__fail_memory(err, "the store", sizeof *it);
    }
    it->ctx = ctx;
    it->lock = -1;
    it->last = &it->first;
    it->purges = true;
    if (msc__mutex_init(&it->mutex, NULL) != MSC_OK || msc__cond_init(&it->jobs_changed, NULL) != MSC_OK ||
        msc__cond_init(&it->jobs_done, NULL) != MSC_OK || msc__cond_init(&it->reader_free, NULL) != MSC_OK)
        status = msc__fail_memory(err, "locks", sizeof *it);
    else
        status = open_all(it, options, err);
    if (status != MSC_OK)
        store_close(it);
    else
        *out = it;
    return status;
}

void store_close(store *it)
{
    msc_context *ctx;
    bool ran;

    if (it == NULL)
        return;
    ran = it->thread.started;
    msc__mutex_lock(&it->mutex);
    it->stops = true;
    msc__cond_broadcast(&it->jobs_changed);
    msc__mutex_unlock(&it->mutex);
    msc__thread_join(&it->thread);
    for (uint32_t i = 0; i < it->reader_count; i++)
        store_db_close(&it->readers[i].db);
    if (ran) /* what fails here costs a check at the next start */
        msc__ignore(store_mark_clean(&it->writer, true, NULL));
    store_db_close(&it->writer);
    if (it->lock >= 0)
        (void)close(it->lock);
    msc__cond_fini(&it->reader_free);
    msc__cond_fini(&it->jobs_done);
    msc__cond_fini(&it->jobs_changed);
    msc__mutex_fini(&it->mutex);
    msc__free(it->ctx, it->readers, it->reader_count * sizeof *it->readers);
    msc__free(it->ctx, it->path, it->path_bytes);
    ctx = it->ctx;
    msc__free(ctx, it, sizeof *it);
    MSC__ASSERT(msc_context_held_bytes(ctx) == 0);
    msc_context_destroy(ctx);
}

store_db *store_reader_get(store *it)
{
    store_reader *found = NULL;

    msc__mutex_lock(&it->mutex);
    while (found == NULL) {
        for (uint32_t i = 0; i < it->reader_count && found == NULL; i++) {
            if (!it->readers[i].used)
                found = &it->readers[i];
        }
        if (found == NULL)
            msc__cond_wait(&it->reader_free, &it->mutex);
    }
    found->used = true;
    msc__mutex_unlock(&it->mutex);
    found->db.deadline_ns = msc__clock_ns() + READ_SECONDS * SECOND_NS;
    return &found->db;
}

void store_reader_put(store *it, store_db *db)
{
    store_reader *reader = (store_reader *)(void *)db; /* its first field */

    db->deadline_ns = 0;
    msc__mutex_lock(&it->mutex);
    MSC__ASSERT(reader->used);
    reader->used = false;
    msc__cond_signal(&it->reader_free);
    msc__mutex_unlock(&it->mutex);
}

static store_result write_anything(store_db *db, void *user)
{
    (void)user;
    return STORE_RUN(db, META_SET, "ti", "clean", (int64_t)0);
}

bool store_is_ready(store *it)
{
    int64_t count;
    bool failed;

    msc__mutex_lock(&it->mutex);
    failed = it->write_failed;
    msc__mutex_unlock(&it->mutex);
    if (failed) /* there may be room by now */
        failed = store_write(it, write_anything, NULL, NULL) != STORE_OK;
    return !failed && store_account_count(it, &count) == STORE_OK;
}

store_figures store_count(store *it)
{
    store_figures figures;

    msc__mutex_lock(&it->mutex);
    figures = it->figures;
    msc__mutex_unlock(&it->mutex);
    return figures;
}
