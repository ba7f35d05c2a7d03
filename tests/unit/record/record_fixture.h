/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file record_fixture.h
 * A folder of its own for each test, as its state with a context; both are looked at and removed at its end.
 */
#ifndef MSC_TEST_RECORD_FIXTURE_H
#define MSC_TEST_RECORD_FIXTURE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mkdtemp */
#endif
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memscale/record.h"

#define SECONDS_NS INT64_C(30000000000)

typedef struct place {
    msc_context *ctx;
    char folder[64];
} place;

static inline int place_setup(void **state)
{
    static place here;

    memset(&here, 0, sizeof here);
    (void)snprintf(here.folder, sizeof here.folder, "/tmp/test_record.XXXXXX");
    if (mkdtemp(here.folder) == NULL)
        return -1;
    *state = &here;
    return msc_context_create(NULL, &here.ctx, NULL) == MSC_OK ? 0 : -1;
}

static inline void path_in(const place *here, const char *name, char path[512])
{
    (void)snprintf(path, 512, "%s/%s", here->folder, name);
}

static inline int place_teardown(void **state)
{
    place *here = *state;
    DIR *folder = opendir(here->folder);
    const struct dirent *entry;
    char path[512];

    (void)chmod(here->folder, 0700);
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        path_in(here, entry->d_name, path);
        (void)unlink(path);
    }
    if (folder != NULL)
        (void)closedir(folder);
    (void)rmdir(here->folder);
    assert_int_equal(msc_context_held_bytes(here->ctx), 0);
    msc_context_destroy(here->ctx);
    return 0;
}

#define place_test(test) cmocka_unit_test_setup_teardown(test, place_setup, place_teardown)

static inline msc_record_options options_for(const place *here)
{
    msc_record_options options = msc_record_options_default();

    options.directory = here->folder;
    options.client = "1-test";
    return options;
}

static inline msc_record *opened(const place *here)
{
    msc_record_options options = options_for(here);
    msc_record *record = NULL;

    assert_int_equal(msc_record_create(here->ctx, &options, &record, NULL), MSC_OK);
    return record;
}

/** Path of a file of the client of `options_for`. */
static inline void spool_path(const place *here, unsigned number, char path[512])
{
    char name[64];

    (void)snprintf(name, sizeof name, "1-test-%08u.spool", number);
    path_in(here, name, path);
}

static inline bool exists(const char *path)
{
    struct stat found;

    return stat(path, &found) == 0;
}

static inline uint64_t size_of_file(const char *path)
{
    struct stat found;

    assert_int_equal(stat(path, &found), 0);
    return (uint64_t)found.st_size;
}

#endif /* MSC_TEST_RECORD_FIXTURE_H */
