/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening: every older form is brought to the newest, a newer one is refused; one server a folder; what is damaged is seen.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "samples.h"
#include "store/store_internal.h"

static msc_status try_open(const char *folder, msc_error *err)
{
    const store_options options = {.folder = folder, .readers = 1};
    store *it = NULL;
    msc_status status = store_open(&options, &it, err);

    assert_true((status == MSC_OK) == (it != NULL));
    store_close(it);
    return status;
}

static void file_of(const char *folder, char path[256])
{
    (void)snprintf(path, 256, "%s/memscale.db", folder);
}

static void test_every_older_form(void **state)
{
    (void)state;
    for (uint32_t version = 0; version <= store_migration_count(); version++) {
        char folder[SAMPLE_PATH];
        char path[256];
        store_db db;

        sample_folder(folder);
        file_of(folder, path);
        assert_int_equal(store_db_open(&db, path, false, NULL), MSC_OK);
        assert_int_equal(store_migrate_to(&db, version, NULL), MSC_OK);
        if (version > 0)
            assert_int_equal(
                sqlite3_exec(
                    db.it,
                    "INSERT INTO account(id, name, password, admin, created_ms) VALUES(1, 'old', 'x', 1, 5)",
                    NULL, NULL, NULL),
                SQLITE_OK);
        store_db_close(&db);
        {
            store *it = sample_store(folder);
            store_account account;

            assert_int_equal(store_account_find(it, "old", &account),
                             version > 0 ? STORE_OK : STORE_NOT_FOUND);
            store_close(it);
        }
        sample_remove(folder);
    }
}

static void test_a_newer_form_is_refused(void **state)
{
    char folder[SAMPLE_PATH];
    char path[256];
    msc_error err = {0};
    store_db db;

    (void)state;
    sample_folder(folder);
    file_of(folder, path);
    assert_int_equal(store_db_open(&db, path, false, NULL), MSC_OK);
    assert_int_equal(sqlite3_exec(db.it, "PRAGMA user_version = 99", NULL, NULL, NULL), SQLITE_OK);
    store_db_close(&db);
    assert_int_equal(try_open(folder, &err), MSC_EVERSION);
    assert_non_null(strstr(err.message, "newer server"));
    sample_remove(folder);
}

static void test_one_server_a_folder(void **state)
{
    char folder[SAMPLE_PATH];
    msc_error err = {0};
    store *it;

    (void)state;
    sample_folder(folder);
    it = sample_store(folder);
    assert_int_equal(try_open(folder, &err), MSC_EIO);
    assert_non_null(strstr(err.message, "another server"));
    store_close(it);
    assert_int_equal(try_open(folder, &err), MSC_OK);
    sample_remove(folder);
}

/* Overwrites a page in the middle of the file, as a failing disk might. */
static void damage(const char *path)
{
    int fd = open(path, O_RDWR);
    char junk[4096];
    off_t bytes = lseek(fd, 0, SEEK_END);

    assert_true(fd >= 0 && bytes >= 8 * (off_t)sizeof junk);
    memset(junk, 0x5a, sizeof junk);
    assert_int_equal(pwrite(fd, junk, sizeof junk, 5 * (off_t)sizeof junk), sizeof junk);
    (void)close(fd);
}

static void test_damage_is_seen_after_an_unclean_stop(void **state)
{
    char folder[SAMPLE_PATH];
    char path[256];
    msc_error err = {0};
    store_db db;

    (void)state;
    sample_folder(folder);
    file_of(folder, path);
    store_close(sample_store(folder));
    assert_int_equal(store_db_open(&db, path, false, NULL), MSC_OK);
    assert_int_equal(
        sqlite3_exec(db.it, "UPDATE meta SET value = 0; PRAGMA wal_checkpoint(TRUNCATE)", NULL, NULL, NULL),
        SQLITE_OK);
    store_db_close(&db);
    assert_int_equal(try_open(folder, &err), MSC_OK); /* unclean, but whole */
    assert_int_equal(store_db_open(&db, path, false, NULL), MSC_OK);
    assert_int_equal(
        sqlite3_exec(db.it, "UPDATE meta SET value = 0; PRAGMA wal_checkpoint(TRUNCATE)", NULL, NULL, NULL),
        SQLITE_OK);
    store_db_close(&db);
    damage(path);
    assert_int_equal(try_open(folder, &err), MSC_EIO);
    assert_non_null(strstr(err.message, "damaged"));
    sample_remove(folder);
}

static void test_folders_that_cannot_be(void **state)
{
    msc_error err = {0};
    char folder[SAMPLE_PATH];

    (void)state;
    assert_int_equal(try_open("/nowhere/at/all", &err), MSC_EIO);
    sample_folder(folder);
    strcat(folder, "/new");
    assert_int_equal(try_open(folder, &err), MSC_OK); /* is made */
    sample_remove(folder);
    *strrchr(folder, '/') = '\0';
    sample_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_older_form),
        cmocka_unit_test(test_a_newer_form_is_refused),
        cmocka_unit_test(test_one_server_a_folder),
        cmocka_unit_test(test_damage_is_seen_after_an_unclean_stop),
        cmocka_unit_test(test_folders_that_cannot_be),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
