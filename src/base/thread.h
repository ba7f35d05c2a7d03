/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file thread.h
 * Threads, mutexes, condition variables and the clock, for the modules that move bytes. POSIX underneath: its
 * calls are what sanitizers and valgrind understand, which C11's threads.h is not.
 *
 * In-place objects: `_init` and `_fini`. Locks are never held while another thread's progress is awaited, except
 * in `msc__cond_wait`, which releases its mutex.
 */
#ifndef MSC_BASE_THREAD_H
#define MSC_BASE_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "memscale/status.h"

typedef struct msc__mutex {
    pthread_mutex_t it;
} msc__mutex;

typedef struct msc__cond {
    pthread_cond_t it;
} msc__cond;

typedef struct msc__thread {
    pthread_t it;
    bool started;
} msc__thread;

/** Errors of the `_init`s: ENOMEM; EINTERNAL with the system's number. */
msc_status msc__mutex_init(msc__mutex *mutex, msc_error *err);
void msc__mutex_fini(msc__mutex *mutex);
void msc__mutex_lock(msc__mutex *mutex);
void msc__mutex_unlock(msc__mutex *mutex);

msc_status msc__cond_init(msc__cond *cond, msc_error *err);
void msc__cond_fini(msc__cond *cond);
void msc__cond_wait(msc__cond *cond, msc__mutex *mutex);
void msc__cond_signal(msc__cond *cond);
void msc__cond_broadcast(msc__cond *cond);

/**
 * Starts a thread that receives no signals: they are the program's. Those that a thread brings upon itself, such as
 * SIGSEGV, are not held back, so a crash handler sees them. `name` (at most 15 characters) shows in debuggers
 * and `top`. A thread that was not started may be joined.
 *
 * Threads do not survive a fork: the child has none of those that the parent started.
 *
 * Errors: EINTERNAL with the system's number: it has no more threads to give.
 */
msc_status msc__thread_start(msc__thread *thread, const char *name, void *(*run)(void *), void *argument,
                             msc_error *err);
void msc__thread_join(msc__thread *thread);

/**
 * A number that is another one in every child of a fork: an object that belongs to one process remembers it. Unlike
 * `getpid` it costs no system call.
 */
uint32_t msc__fork_count(void);

/** Monotonic time in nanoseconds. */
int64_t msc__clock_ns(void);
void msc__sleep_ns(int64_t ns);

#endif /* MSC_BASE_THREAD_H */
