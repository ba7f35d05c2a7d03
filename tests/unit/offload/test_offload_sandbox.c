/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file where a sandbox forbids io_uring: to make a ring, or to use one that was made. The bytes then take the
 * other way. In processes of their own, since a filter cannot be taken off; skipped where there are no filters.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* syscall numbers */
#endif
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "offload/file/offload_file_internal.h"

#define BYTES 65536u

enum { RIGHT, NO_FILTER, NO_CONTEXT, RING_WAS_MADE, NO_FILE, IS_A_RING, NOT_MOVED, NOT_TOLD, WRONG_BYTES };

/* The system call returns EPERM from now on. */
static bool forbid(unsigned number)
{
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof rules / sizeof rules[0], .filter = rules};

    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static int move(msc__file *file)
{
    static unsigned char there[BYTES], back[BYTES];
    uint32_t slot;

    memset(there, 7, sizeof there);
    if (msc__file_reserve(file, BYTES, NULL) != MSC_OK ||
        msc__file_write(file, there, BYTES, 0, &slot, NULL) != MSC_OK ||
        msc__file_wait(file, slot, NULL) != MSC_OK ||
        msc__file_read(file, back, BYTES, 0, &slot, NULL) != MSC_OK ||
        msc__file_wait(file, slot, NULL) != MSC_OK)
        return NOT_MOVED;
    return memcmp(there, back, BYTES) == 0 ? RIGHT : WRONG_BYTES;
}

static int live_without(unsigned number)
{
    msc__file_options options = {.directory = "/tmp", .depth = 4, .way = MSC__FILE_RING};
    msc__file *file = NULL;
    msc_context *ctx;
    int result;

    if (!forbid(number))
        return NO_FILTER;
    if (msc_context_create(NULL, &ctx, NULL) != MSC_OK)
        return NO_CONTEXT;
    if (msc__file_create(ctx, &options, &file, NULL) != MSC_EUNSUPPORTED)
        return RING_WAS_MADE;
    options.way = MSC__FILE_ANY;
    if (msc__file_create(ctx, &options, &file, NULL) != MSC_OK)
        return NO_FILE;
    if (msc__file_facts_of(file).ring)
        return IS_A_RING;
    result = move(file);
    msc__file_destroy(file);
    msc_context_destroy(ctx);
    return result;
}

static void in_a_child(int (*live)(void))
{
    pid_t child = fork();
    int status;

    assert_true(child >= 0);
    if (child == 0)
        _exit(live());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == NO_FILTER)
        skip();
    assert_int_equal(WEXITSTATUS(status), RIGHT);
}

#ifdef __NR_io_uring_enter
static int live_without_setup(void)
{
    return live_without(__NR_io_uring_setup);
}

static int live_without_enter(void)
{
    return live_without(__NR_io_uring_enter);
}

static void without_io_uring_setup(void **state)
{
    (void)state;
    in_a_child(live_without_setup);
}

static void without_io_uring_enter(void **state)
{
    (void)state;
    in_a_child(live_without_enter);
}
#endif

#ifdef __NR_io_uring_enter
/* What is under way when the filter comes: its results are in the ring, and are found there. */
static int filter_comes_late(void)
{
    static unsigned char there[BYTES], back[BYTES];
    msc__file_options options = {.directory = "/tmp", .depth = 4, .way = MSC__FILE_RING};
    msc__file *file = NULL;
    msc_context *ctx;
    uint32_t slot;
    int result;

    memset(there, 9, sizeof there);
    if (msc_context_create(NULL, &ctx, NULL) != MSC_OK)
        return NO_CONTEXT;
    if (msc__file_create(ctx, &options, &file, NULL) != MSC_OK)
        return NO_FILTER; /* no ring here */
    if (msc__file_reserve(file, BYTES, NULL) != MSC_OK ||
        msc__file_write(file, there, BYTES, 0, &slot, NULL) != MSC_OK)
        return NOT_MOVED;
    if (!forbid(__NR_io_uring_enter))
        return NO_FILTER;
    if (msc__file_wait(file, slot, NULL) != MSC_OK ||
        msc__file_read(file, back, BYTES, 0, &slot, NULL) != MSC_OK ||
        msc__file_wait(file, slot, NULL) != MSC_OK)
        return NOT_MOVED;
    result = memcmp(there, back, BYTES) == 0 ? move(file) : WRONG_BYTES;
    msc__file_destroy(file);
    msc_context_destroy(ctx);
    return result;
}

/* What never ends, in place of the file: an empty pipe. */
static int never_ends(void)
{
    static unsigned char back[100];
    msc__file_options options = {.directory = "/tmp", .depth = 4, .way = MSC__FILE_RING, .buffered = true};
    static msc__file *file; /* the child ends with it */
    static msc_context *ctx;
    uint32_t slots[2];
    int pipes[2];
    int file_fd;
    msc_error err;
    uint32_t i;

    if (msc_context_create(NULL, &ctx, NULL) != MSC_OK)
        return NO_CONTEXT;
    if (msc__file_create(ctx, &options, &file, NULL) != MSC_OK)
        return NO_FILTER;
    if (msc__file_reserve(file, BYTES, NULL) != MSC_OK || pipe(pipes) != 0)
        return NO_FILE;
    file_fd = file->body->fd;
    file->body->fd = pipes[0];
    for (i = 0; i < 2; i++)
        if (msc__file_read(file, back, sizeof back, 0, &slots[i], NULL) != MSC_OK)
            return NOT_MOVED;
    if (!forbid(__NR_io_uring_enter))
        return NO_FILTER;
    (void)alarm(30); /* it must not wait for ever */
    for (i = 0; i < 2; i++)
        if (msc__file_wait(file, slots[i], &err) != MSC_EIO || err.driver_code != EPERM)
            return NOT_TOLD;
    file->body->fd = file_fd;
    return move(file);
}

static void refused_while_under_way(void **state)
{
    (void)state;
    in_a_child(filter_comes_late);
}

static void refused_for_ever(void **state)
{
    (void)state;
    in_a_child(never_ends);
}
#else
static void nothing_to_forbid(void **state)
{
    (void)state;
    skip();
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifdef __NR_io_uring_enter
        cmocka_unit_test(without_io_uring_setup),
        cmocka_unit_test(without_io_uring_enter),
        cmocka_unit_test(refused_while_under_way),
        cmocka_unit_test(refused_for_ever),
#else
        cmocka_unit_test(nothing_to_forbid),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
