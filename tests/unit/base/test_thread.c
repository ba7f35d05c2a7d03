/* SPDX-License-Identifier: Apache-2.0 */
/* Threads and locks: what holds while one has them, what wakes whom, and whose the signals are. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_setattr_default_np */
#endif
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"

#define THREADS 4
#define ROUNDS 2000
#define MS_NS INT64_C(1000000)

typedef struct shared {
    msc__mutex mutex;
    msc__cond changed;
    int count;
    bool open;
} shared;

static void shared_init(shared *it)
{
    memset(it, 0, sizeof *it);
    assert_int_equal(msc__mutex_init(&it->mutex, NULL), MSC_OK);
    assert_int_equal(msc__cond_init(&it->changed, NULL), MSC_OK);
}

static void shared_fini(shared *it)
{
    msc__cond_fini(&it->changed);
    msc__mutex_fini(&it->mutex);
}

static void *count_up(void *argument)
{
    shared *it = argument;
    int i;

    for (i = 0; i < ROUNDS; i++) {
        int seen;

        msc__mutex_lock(&it->mutex);
        seen = it->count;
        if (i % 16 == 0)
            (void)sched_yield(); /* a moment in which others would get in */
        it->count = seen + 1;
        msc__mutex_unlock(&it->mutex);
    }
    return NULL;
}

static void mutual_exclusion(void **state)
{
    msc__thread threads[THREADS];
    shared it;
    int i;

    (void)state;
    shared_init(&it);
    for (i = 0; i < THREADS; i++)
        assert_int_equal(msc__thread_start(&threads[i], "counter", count_up, &it, NULL), MSC_OK);
    for (i = 0; i < THREADS; i++)
        msc__thread_join(&threads[i]);
    assert_int_equal(it.count, THREADS * ROUNDS);
    shared_fini(&it);
}

static void *pass_gate(void *argument)
{
    shared *it = argument;

    msc__mutex_lock(&it->mutex);
    while (!it->open)
        msc__cond_wait(&it->changed, &it->mutex);
    it->count++;
    msc__mutex_unlock(&it->mutex);
    return NULL;
}

/* A broadcast wakes all who wait, and a wait gives the mutex up meanwhile. */
static void broadcast(void **state)
{
    msc__thread threads[THREADS];
    shared it;
    int i;

    (void)state;
    shared_init(&it);
    for (i = 0; i < THREADS; i++)
        assert_int_equal(msc__thread_start(&threads[i], "gate", pass_gate, &it, NULL), MSC_OK);
    msc__sleep_ns(2 * MS_NS);
    msc__mutex_lock(&it.mutex);
    assert_int_equal(it.count, 0);
    it.open = true;
    msc__cond_broadcast(&it.changed);
    msc__mutex_unlock(&it.mutex);
    for (i = 0; i < THREADS; i++)
        msc__thread_join(&threads[i]);
    assert_int_equal(it.count, THREADS);
    shared_fini(&it);
}

static void open_gate(shared *it)
{
    msc__mutex_lock(&it->mutex);
    it->open = true;
    msc__cond_signal(&it->changed);
    msc__mutex_unlock(&it->mutex);
}

static void *read_mask(void *argument)
{
    (void)pthread_sigmask(SIG_SETMASK, NULL, argument);
    return NULL;
}

/* Signals go to the program's threads; its own mask is as before. */
static void signals(void **state)
{
    msc__thread thread;
    sigset_t before;
    sigset_t after;
    sigset_t inside;

    (void)state;
    (void)sigemptyset(&inside);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &before);
    assert_int_equal(msc__thread_start(&thread, "mask", read_mask, &inside, NULL), MSC_OK);
    msc__thread_join(&thread);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &after);
    assert_int_equal(sigismember(&inside, SIGINT), 1);
    assert_int_equal(sigismember(&inside, SIGTERM), 1);
    assert_int_equal(sigismember(&inside, SIGALRM), 1);
    assert_int_equal(sigismember(&inside, SIGSEGV), 0);
    assert_int_equal(sigismember(&before, SIGINT), sigismember(&after, SIGINT));
    assert_int_equal(sigismember(&after, SIGTERM), 0);
}

static void *wait_for_name(void *argument)
{
    shared *it = argument;
    FILE *file;

    (void)pass_gate(it); /* the name is given after the start */
    file = fopen("/proc/thread-self/comm", "r");
    if (file != NULL) {
        char name[32] = "";

        it->count += fgets(name, sizeof name, file) != NULL && strcmp(name, "msc-test\n") == 0;
        (void)fclose(file);
    } else {
        it->count++; /* not Linux */
    }
    return NULL;
}

static void names(void **state)
{
    msc__thread thread;
    shared it;

    (void)state;
    shared_init(&it);
    assert_int_equal(msc__thread_start(&thread, "msc-test", wait_for_name, &it, NULL), MSC_OK);
    open_gate(&it);
    msc__thread_join(&thread);
    assert_int_equal(it.count, 2);
    shared_fini(&it);
}

static void joins(void **state)
{
    msc__thread never = {0};
    shared it;

    (void)state;
    msc__thread_join(&never);
    shared_init(&it);
    assert_int_equal(msc__thread_start(&never, "twice", count_up, &it, NULL), MSC_OK);
    msc__thread_join(&never);
    assert_false(never.started);
    msc__thread_join(&never);
    assert_int_equal(it.count, ROUNDS);
    shared_fini(&it);
}

static void on_signal(int number)
{
    (void)number;
}

/* Threads of such a stack are nowhere to be had. */
static void refused_start(void **state)
{
    pthread_attr_t usual;
    pthread_attr_t huge;
    msc__thread thread = {.started = true};
    msc_error err;

    (void)state;
    memset(&err, 0, sizeof err);
    assert_int_equal(pthread_getattr_default_np(&usual), 0);
    assert_int_equal(pthread_getattr_default_np(&huge), 0);
    assert_int_equal(pthread_attr_setstacksize(&huge, (size_t)1 << 50), 0);
    assert_int_equal(pthread_setattr_default_np(&huge), 0);
    assert_int_equal(msc__thread_start(&thread, "huge", read_mask, NULL, &err), MSC_EINTERNAL);
    assert_int_equal(pthread_setattr_default_np(&usual), 0);
    assert_int_not_equal(err.driver_code, 0); /* which number it is depends on how the system sees it */
    assert_non_null(strstr(err.message, "'huge'"));
    assert_false(thread.started);
    msc__thread_join(&thread);
}

static void *disturb(void *argument)
{
    const pthread_t *sleeper = argument;

    msc__sleep_ns(3 * MS_NS);
    (void)pthread_kill(*sleeper, SIGUSR1);
    return NULL;
}

/* A signal does not cut a sleep short. */
static void sleeps(void **state)
{
    int64_t start_ns = msc__clock_ns();
    pthread_t self = pthread_self();
    struct sigaction action;
    struct sigaction before;
    msc__thread thread;

    (void)state;
    msc__sleep_ns(-5);
    msc__sleep_ns(0);
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    assert_int_equal(sigaction(SIGUSR1, &action, &before), 0);
    assert_int_equal(msc__thread_start(&thread, "disturber", disturb, &self, NULL), MSC_OK);
    msc__sleep_ns(20 * MS_NS);
    assert_true(msc__clock_ns() - start_ns >= 20 * MS_NS);
    msc__thread_join(&thread);
    assert_int_equal(sigaction(SIGUSR1, &before, NULL), 0);
}

/* Runs `check` in a child; whether it said yes. */
static bool in_a_child(bool (*check)(uint32_t), uint32_t count)
{
    int status = -1;
    pid_t child = fork();

    if (child == 0)
        _exit(check(count) ? 0 : 1);
    assert_true(child > 0);
    assert_true(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static bool is_another(uint32_t count)
{
    return msc__fork_count() != count && msc__fork_count() == msc__fork_count();
}

static bool is_another_for_the_next(uint32_t count)
{
    return is_another(count) && in_a_child(is_another, msc__fork_count());
}

static void forks(void **state)
{
    uint32_t count = msc__fork_count();

    (void)state;
    assert_true(in_a_child(is_another, count));
    assert_true(in_a_child(is_another_for_the_next, count));
    assert_int_equal(msc__fork_count(), count);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"thread/mutual-exclusion", mutual_exclusion, NULL, NULL, NULL},
        {"thread/broadcast", broadcast, NULL, NULL, NULL},
        {"thread/signals", signals, NULL, NULL, NULL},
        {"thread/names", names, NULL, NULL, NULL},
        {"thread/joins", joins, NULL, NULL, NULL},
        {"thread/refused-start", refused_start, NULL, NULL, NULL},
        {"thread/sleeps", sleeps, NULL, NULL, NULL},
        {"thread/forks", forks, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
