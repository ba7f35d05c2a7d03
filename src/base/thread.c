/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads over POSIX.
 *
 * Locking, unlocking and signalling cannot fail on objects that `_init` made and that are used as the header
 * says, so their results are not looked at: a wrong use is a bug, which the sanitizers name better than a
 * status could.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_setname_np */
#endif
#include "base/thread.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"

#define SECOND_NS 1000000000

static pthread_once_t forks_watched = PTHREAD_ONCE_INIT;
static atomic_uint forks;
static bool counts_forks;

/* Turns what a pthread call returned into a status; `what` completes "cannot make ...". */
static msc_status check(int system_number, const char *what, msc_error *err)
{
    msc_status status;

    if (system_number == 0)
        return MSC_OK;
    status = msc__fail(err, system_number == ENOMEM ? MSC_ENOMEM : MSC_EINTERNAL,
                       "cannot make %s: the system said %d", what, system_number);
    if (err != NULL)
        err->driver_code = system_number;
    return status;
}

msc_status msc__mutex_init(msc__mutex *mutex, msc_error *err)
{
    return check(pthread_mutex_init(&mutex->it, NULL), "a mutex", err);
}

void msc__mutex_fini(msc__mutex *mutex)
{
    (void)pthread_mutex_destroy(&mutex->it);
}

void msc__mutex_lock(msc__mutex *mutex)
{
    (void)pthread_mutex_lock(&mutex->it);
}

void msc__mutex_unlock(msc__mutex *mutex)
{
    (void)pthread_mutex_unlock(&mutex->it);
}

msc_status msc__cond_init(msc__cond *cond, msc_error *err)
{
    return check(pthread_cond_init(&cond->it, NULL), "a condition variable", err);
}

void msc__cond_fini(msc__cond *cond)
{
    (void)pthread_cond_destroy(&cond->it);
}

void msc__cond_wait(msc__cond *cond, msc__mutex *mutex)
{
    (void)pthread_cond_wait(&cond->it, &mutex->it);
}

static struct timespec to_timespec(int64_t ns)
{
    struct timespec time;

    if (ns < 0)
        ns = 0;
    time.tv_sec = (time_t)(ns / SECOND_NS);
    time.tv_nsec = (long)(ns % SECOND_NS);
    return time;
}

void msc__cond_signal(msc__cond *cond)
{
    (void)pthread_cond_signal(&cond->it);
}

void msc__cond_broadcast(msc__cond *cond)
{
    (void)pthread_cond_broadcast(&cond->it);
}

/* All signals but those that a thread brings upon itself: held back, they would end the process past any handler. */
static void fill_held_back(sigset_t *set)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
    size_t i;

    (void)sigfillset(set);
    for (i = 0; i < sizeof own / sizeof own[0]; i++)
        (void)sigdelset(set, own[i]);
}

msc_status msc__thread_start(msc__thread *thread, const char *name, void *(*run)(void *), void *argument,
                             msc_error *err)
{
    msc_status status;
    sigset_t held_back;
    sigset_t before;
    int result;

    /* A thread inherits the mask of the one that creates it, so there is no moment at which it has another. */
    fill_held_back(&held_back);
    (void)pthread_sigmask(SIG_SETMASK, &held_back, &before);
    result = pthread_create(&thread->it, NULL, run, argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    thread->started = result == 0;
    if (result != 0) {
        status =
            msc__fail(err, MSC_EINTERNAL,
                      "cannot start thread '%s': the system said %d; look at `ulimit -u` and at the limits "
                      "of the container",
                      name, result);
        if (err != NULL)
            err->driver_code = result;
        return status;
    }
#ifdef __linux__
    (void)pthread_setname_np(thread->it, name); /* a name that is too long is no reason to fail */
#endif
    return MSC_OK;
}

void msc__thread_join(msc__thread *thread)
{
    if (thread->started)
        (void)pthread_join(thread->it, NULL);
    thread->started = false;
}

static void count_fork(void)
{
    (void)atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
}

static void watch_forks(void)
{
    counts_forks = pthread_atfork(NULL, NULL, count_fork) == 0;
}

uint32_t msc__fork_count(void)
{
    (void)pthread_once(&forks_watched, watch_forks);
    return counts_forks ? atomic_load_explicit(&forks, memory_order_relaxed) : (uint32_t)getpid();
}

int64_t msc__clock_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * SECOND_NS + now.tv_nsec;
}

void msc__sleep_ns(int64_t ns)
{
    struct timespec rest = to_timespec(ns);

    while (nanosleep(&rest, &rest) != 0 && errno == EINTR) {
    }
}
