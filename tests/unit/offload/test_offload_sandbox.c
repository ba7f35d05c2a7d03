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

#include "offload/offload_file.h"

#define BYTES 65536u

enum { RIGHT, NO_FILTER, NO_CONTEXT, RING_WAS_MADE, NO_FILE, IS_A_RING, NOT_MOVED, WRONG_BYTES };

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

static void without(unsigned number)
{
    pid_t child = fork();
    int status;

    assert_true(child >= 0);
    if (child == 0)
        _exit(live_without(number));
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == NO_FILTER)
        skip();
    assert_int_equal(WEXITSTATUS(status), RIGHT);
}

static void without_io_uring_setup(void **state)
{
    (void)state;
#ifdef __NR_io_uring_setup
    without(__NR_io_uring_setup);
#else
    skip();
#endif
}

static void without_io_uring_enter(void **state)
{
    (void)state;
#ifdef __NR_io_uring_enter
    without(__NR_io_uring_enter);
#else
    skip();
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_io_uring_setup),
        cmocka_unit_test(without_io_uring_enter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
