/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file device_fixture.h
 * A device to test, of either kind, with page-locked buffers and patterns to recognise bytes by. Calls that must
 * succeed are asserted here, so that a case shows only its order of calls.
 */
#ifndef MSC_TEST_DEVICE_FIXTURE_H
#define MSC_TEST_DEVICE_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "device/device_internal.h"

#define FIXTURE_STREAMS 3
#define FIXTURE_PAGE_BYTES ((size_t)65536)        /* the largest page that is in use */
#define FIXTURE_LIMIT_BYTES (UINT64_C(256) << 20) /* of the host's device memory */

/** What a case works with. Opened anew for each. */
typedef struct fixture {
    msc_context *ctx;
    msc_device *device;
    const msc_device_ops *ops;
    void *streams[FIXTURE_STREAMS];
    msc_error err;
} fixture;

/** The call succeeds, or the test fails with its message. */
#define OK(fix, call)                                                                                        \
    do {                                                                                                     \
        if ((call) != MSC_OK)                                                                                \
            fail_msg("%s: %s", #call, (fix)->err.message);                                                   \
    } while (0)

/** Opens device and streams. */
static inline void fixture_open(fixture *fix, const msc_device_options *options)
{
    msc_context_options context = msc_context_options_default();
    int i;

    memset(fix, 0, sizeof *fix);
    context.memory_limit_bytes = FIXTURE_LIMIT_BYTES;
    OK(fix, msc_context_create(&context, &fix->ctx, &fix->err));
    OK(fix, msc_device_create(fix->ctx, options, &fix->device, &fix->err));
    fix->ops = fix->device->ops;
    for (i = 0; i < FIXTURE_STREAMS; i++)
        OK(fix, fix->ops->stream_create(fix->device, &fix->streams[i], &fix->err));
}

/** Closes everything; nothing may be left. */
static inline void fixture_close(fixture *fix)
{
    int i;

    for (i = 0; i < FIXTURE_STREAMS; i++)
        fix->ops->stream_destroy(fix->device, fix->streams[i]);
    msc_device_destroy(fix->device);
    assert_int_equal(msc_context_held_bytes(fix->ctx), 0);
    msc_context_destroy(fix->ctx);
}

static inline size_t fixture_pages(size_t bytes)
{
    return (bytes + FIXTURE_PAGE_BYTES - 1) / FIXTURE_PAGE_BYTES * FIXTURE_PAGE_BYTES;
}

/** Pinned host memory. */
static inline unsigned char *fixture_host(fixture *fix, size_t bytes)
{
    void *memory = aligned_alloc(FIXTURE_PAGE_BYTES, fixture_pages(bytes));

    assert_non_null(memory);
    OK(fix, fix->ops->pin(fix->device, memory, fixture_pages(bytes), &fix->err));
    return memory;
}

static inline void fixture_host_end(fixture *fix, unsigned char *memory, size_t bytes)
{
    fix->ops->unpin(fix->device, memory, fixture_pages(bytes));
    free(memory);
}

static inline unsigned char *fixture_memory(fixture *fix, size_t bytes)
{
    void *memory;

    OK(fix, fix->ops->memory_create(fix->device, bytes, &memory, &fix->err));
    return memory;
}

static inline void *fixture_event(fixture *fix)
{
    void *event;

    OK(fix, fix->ops->event_create(fix->device, &event, &fix->err));
    return event;
}

static inline void fixture_copy(fixture *fix, void *to, const void *from, size_t bytes, msc_copy_kind kind,
                                int stream)
{
    OK(fix, fix->ops->copy(fix->device, to, from, bytes, kind, fix->streams[stream], &fix->err));
}

static inline void fixture_record(fixture *fix, void *event, int stream)
{
    OK(fix, fix->ops->event_record(fix->device, event, fix->streams[stream], &fix->err));
}

static inline void fixture_wait(fixture *fix, int stream, void *event)
{
    OK(fix, fix->ops->stream_wait(fix->device, fix->streams[stream], event, &fix->err));
}

static inline void fixture_await(fixture *fix, void *event)
{
    OK(fix, fix->ops->event_wait(fix->device, event, &fix->err));
}

/** Bytes that tell which pattern they are of, and where in it. */
static inline void fixture_fill(unsigned char *memory, size_t bytes, uint64_t pattern)
{
    size_t at;

    for (at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word = (pattern + 1) * 0x9e3779b97f4a7c15u ^ (at * 0xd1342543de82ef95u);
        size_t rest = bytes - at < sizeof word ? bytes - at : sizeof word;

        memcpy(memory + at, &word, rest);
    }
}

static inline bool fixture_holds(const unsigned char *memory, size_t bytes, uint64_t pattern)
{
    size_t at;

    for (at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word = (pattern + 1) * 0x9e3779b97f4a7c15u ^ (at * 0xd1342543de82ef95u);
        size_t rest = bytes - at < sizeof word ? bytes - at : sizeof word;

        if (memcmp(memory + at, &word, rest) != 0)
            return false;
    }
    return true;
}

#endif /* MSC_TEST_DEVICE_FIXTURE_H */
