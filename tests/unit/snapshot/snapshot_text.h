/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Snapshots as pickles of protocol 0, which is text: short enough to be written by hand.
 *
 * One segment of 2 MiB on device 0 with a block in use and the rest free; a trace that a test gives.
 */
#ifndef MSC_TESTS_SNAPSHOT_TEXT_H
#define MSC_TESTS_SNAPSHOT_TEXT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "memscale/snapshot.h"

#define KEY(name) "V" name "\n"
#define NUMBER(name, value) KEY(name) "I" value "\ns"
#define TEXT(name, value) KEY(name) "V" value "\ns"

/* An entry of a trace; the address and size as decimal texts. */
#define EVENT(action, address, size)                                                                         \
    "(d" TEXT("action", action) NUMBER("addr", address) NUMBER("size", size) NUMBER("stream", "0")           \
        NUMBER("time_us", "7") "a"

#define BLOCK(address, size, requested, state)                                                               \
    "(d" NUMBER("address", address) NUMBER("size", size) NUMBER("requested_size", requested)                 \
        TEXT("state", state) "a"

/* A segment at 2 MiB whose blocks follow; the caller closes it with SEGMENT_END. */
#define SEGMENT_BEGIN                                                                                        \
    "(d" NUMBER("device", "0") NUMBER("address", "2097152") NUMBER("total_size", "2097152")                  \
        NUMBER("stream", "0") TEXT("segment_type", "small")                                                  \
            KEY("segment_pool_id") "(I0\nI0\nts"                                                             \
                                   "Vis_expandable\nI00\ns" KEY("blocks") "(l"
#define SEGMENT_END "sa"

#define SNAPSHOT_BEGIN "(d" KEY("segments") "(l"
#define TRACES "s" KEY("device_traces") "(l(l"
#define SNAPSHOT_END "as."

/* The blocks that most tests end with: 1,000 bytes in use, the rest free. */
#define ONE_BLOCK                                                                                            \
    BLOCK("2097152", "1024", "1000", "active_allocated") BLOCK("2098176", "2096128", "0", "inactive")

static msc_context *test_context;

static inline msc_status read_bytes(const void *bytes, size_t size_bytes, msc_snapshot **out, msc_error *err)
{
    return msc_snapshot_parse(test_context, bytes, size_bytes, out, err);
}

/* Reads a text that must be a snapshot. */
static inline msc_snapshot *read_text(const char *text)
{
    msc_snapshot *snapshot = NULL;
    msc_error err = {0};

    if (read_bytes(text, strlen(text), &snapshot, &err) != MSC_OK)
        fail_msg("%s", err.message);
    assert_non_null(snapshot);
    return snapshot;
}

/* Reads bytes that must be refused with a message that holds `wanted`. */
static inline void refuse_bytes(const void *bytes, size_t size_bytes, const char *wanted)
{
    msc_snapshot *snapshot = (void *)&test_context;
    msc_error err = {0};

    assert_int_equal(read_bytes(bytes, size_bytes, &snapshot, &err), MSC_EFORMAT);
    assert_null(snapshot);
    if (strstr(err.message, wanted) == NULL)
        fail_msg("'%s' is not in '%s'", wanted, err.message);
    assert_int_equal(msc_context_held_bytes(test_context), 0);
}

#define REFUSE(text, wanted) refuse_bytes(text, sizeof(text) - 1, wanted)

static inline int open_context(void **state)
{
    (void)state;
    return msc_context_create(NULL, &test_context, NULL) == MSC_OK ? 0 : -1;
}

static inline int close_context(void **state)
{
    (void)state;
    if (msc_context_held_bytes(test_context) != 0)
        return -1;
    msc_context_destroy(test_context);
    return 0;
}

#define CASE(name, function)                                                                                 \
    {                                                                                                        \
        name, function, open_context, close_context, NULL                                                    \
    }

#endif /* MSC_TESTS_SNAPSHOT_TEXT_H */
