/* SPDX-License-Identifier: Apache-2.0 */
/** @file fork_probe.h  Runs a check in a forked child and brings back the number of the first thing that was wrong. */
#ifndef MSC_TEST_FORK_PROBE_H
#define MSC_TEST_FORK_PROBE_H

#include <stdint.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device_fixture.h"

/** The slots, in a process that did not open the device: 0, or which of them forgot to look. */
static inline int fork_probe_slots(fixture *fix, void *event, void *there)
{
    const msc_device_ops *ops = fix->ops;
    msc_device *device = fix->device;
    msc_device_memory memory;
    char here[8];
    void *made = NULL;
    const msc_status said[] = {
        ops->event_query(device, event, &fix->err),
        ops->event_wait(device, event, NULL),
        ops->event_record(device, event, fix->streams[0], NULL),
        ops->stream_wait(device, fix->streams[0], event, NULL),
        ops->stream_create(device, &made, NULL),
        ops->event_create(device, &made, NULL),
        ops->pin(device, (void *)(uintptr_t)FIXTURE_PAGE_BYTES, 8, NULL),
        ops->copy(device, here, there, 8, MSC_COPY_OUT, fix->streams[0], NULL),
        ops->memory_now(device, &memory, NULL),
        ops->memory_create(device, 8, &made, NULL),
    };
    size_t i;

    for (i = 0; i < sizeof said / sizeof said[0]; i++)
        if (said[i] != MSC_ESTATE)
            return (int)i + 1;
    if (made != NULL || strstr(fix->err.message, "forked") == NULL)
        return 100;
    /* What a child does when it ends: it must not wait for threads that it does not have. */
    ops->unpin(device, here, 8);
    ops->event_destroy(device, event);
    for (i = 0; i < FIXTURE_STREAMS; i++)
        ops->stream_destroy(device, fix->streams[i]);
    msc_device_destroy(device);
    return 0;
}

/**
 * What the child found. By a pipe, not by the exit status: checkers of memory give a child their own.
 *
 * @param more asked in the child after the slots; NULL: nothing.
 */
static inline int fork_probe(fixture *fix, void *event, void *there, int (*more)(void))
{
    int found = -1;
    int ends[2];
    pid_t child;

    assert_int_equal(pipe(ends), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        found = fork_probe_slots(fix, event, there);
        if (found == 0 && more != NULL)
            found = more();
        _exit(write(ends[1], &found, sizeof found) == (ssize_t)sizeof found ? 0 : 1);
    }
    (void)close(ends[1]);
    assert_int_equal(read(ends[0], &found, sizeof found), sizeof found);
    (void)close(ends[0]);
    assert_int_equal(waitpid(child, NULL, 0), child);
    return found;
}

#endif /* MSC_TEST_FORK_PROBE_H */
