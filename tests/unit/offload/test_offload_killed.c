/* SPDX-License-Identifier: Apache-2.0 */
/* A process that is killed while its engine copies into a file leaves nothing: no name, and no space that is held. */
#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "offload_training.h"

#define BLOCKS 8u
#define BYTES (1u << 20)

static char directory[] = "/tmp/memscale-killed-XXXXXX";

static int count_entries(const char *path)
{
    DIR *folder = opendir(path);
    int count = 0;

    assert_non_null(folder);
    while (readdir(folder) != NULL)
        count++;
    (void)closedir(folder);
    return count - 2; /* . and .. */
}

/* Descriptors of a process that lead into the directory, and the bytes that their files hold on the disk. */
static int count_files(const char *process, uint64_t *held_bytes)
{
    char folder[300];
    const struct dirent *entry;
    int count = 0;
    DIR *files;

    (void)snprintf(folder, sizeof folder, "/proc/%s/fd", process);
    files = opendir(folder);
    while (files != NULL && (entry = readdir(files)) != NULL) {
        char path[600];
        char target[600];
        struct stat facts;
        ssize_t length;

        (void)snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        length = readlink(path, target, sizeof target - 1);
        if (length < (ssize_t)strlen(directory) || strncmp(target, directory, strlen(directory)) != 0)
            continue;
        count++;
        if (stat(path, &facts) == 0)
            *held_bytes = (uint64_t)facts.st_blocks * 512;
    }
    if (files != NULL)
        (void)closedir(files);
    return count;
}

static int count_files_of_all(void)
{
    DIR *processes = opendir("/proc");
    const struct dirent *entry;
    uint64_t held_bytes;
    int count = 0;

    assert_non_null(processes);
    while ((entry = readdir(processes)) != NULL)
        if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9')
            count += count_files(entry->d_name, &held_bytes);
    (void)closedir(processes);
    return count;
}

/* The process that will be killed. Slow copies: some block is always on its way, in each direction. */
static void copy_on(int ready)
{
    msc_device_options device_options = msc_device_options_default();
    msc_offload_options options = training_options(MSC_TIER_FILE);
    static unsigned char memory[BYTES];
    msc_ticket tickets[BLOCKS];
    msc_context *ctx, *device_ctx;
    msc_device *device;
    msc_offload *engine;
    uint32_t round, i;

    device_options.faults.bytes_per_second = 100u << 20;
    options.directory = directory;
    if (msc_context_create(NULL, &ctx, NULL) != MSC_OK ||
        msc_context_create(NULL, &device_ctx, NULL) != MSC_OK ||
        msc_device_create(device_ctx, &device_options, &device, NULL) != MSC_OK ||
        msc_offload_create(ctx, device, &options, &engine, NULL) != MSC_OK)
        _exit(1);
    for (round = 0;; round++) {
        for (i = 0; i < BLOCKS; i++)
            if (msc_offload_put(engine, memory, BYTES, NULL, &tickets[i], NULL) != MSC_OK)
                _exit(2);
        for (i = 0; i < BLOCKS; i++)
            if (msc_offload_get(engine, tickets[i], memory, NULL, NULL) != MSC_OK)
                _exit(3);
        if (msc_offload_settle(engine, tickets[2], NULL, NULL) != MSC_OK)
            _exit(4);
        if (round == 1 && write(ready, "!", 1) != 1)
            _exit(5);
        for (i = 0; i < BLOCKS; i++)
            msc_offload_drop(engine, tickets[i]);
    }
}

static void killed(void **state)
{
    uint64_t held_bytes = 0;
    char process[32];
    int ready[2];
    int status;
    pid_t child;
    char byte;

    (void)state;
    assert_non_null(mkdtemp(directory));
    assert_int_equal(pipe(ready), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0)
        copy_on(ready[1]);
    (void)close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    (void)snprintf(process, sizeof process, "%ld", (long)child);
    assert_true(count_files(process, &held_bytes) > 0); /* while it lives, all this can be seen */
    assert_true(held_bytes >= BLOCKS * BYTES);
    assert_int_equal(count_entries(directory), 0);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(count_files_of_all(), 0);
    assert_int_equal(rmdir(directory), 0); /* empty */
    (void)close(ready[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(killed)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
