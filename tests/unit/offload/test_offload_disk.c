/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine when the disk fails: in the middle of a block, while it reads, when it is full. Bytes that the program has
 * given up come back or are told to be lost; bytes whose copy failed are still the program's.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "offload_training.h"

#include "offload/file/offload_file_internal.h"
#include "offload/offload_engine.h"

#define BYTES ((1u << 20) - 300u)
#define CHUNK (64u << 10)

/* Answers requests of one kind with an error, from the `first` on, `count` of them. */
typedef struct trouble {
    msc__file_wish wish;
    int number;
    uint32_t first; /* from 1 */
    uint32_t count;
    atomic_uint asked;
    atomic_bool waits; /* writes wait until this is false */
    atomic_bool waiting;
    bool odd_are_slow; /* reads of every other chunk of the file: a page at a time */
} trouble;

typedef struct fixture {
    training t;
    trouble trouble;
    msc__file_censor censor;
    unsigned char *source;
    unsigned char *back;
} fixture;

static msc_error err;

static int64_t ask(void *user, msc__file_wish wish, uint64_t bytes, uint64_t offset)
{
    trouble *t = user;
    uint32_t asked;

    while (wish == MSC__FILE_WISH_WRITE && atomic_load(&t->waits)) {
        atomic_store(&t->waiting, true);
        msc__sleep_ns(100000);
    }
    if (wish == MSC__FILE_WISH_READ && t->odd_are_slow && offset / CHUNK % 2 == 1 && bytes > MSC__FILE_PAGE)
        return MSC__FILE_PAGE;
    if (wish != t->wish)
        return (int64_t)bytes;
    asked = atomic_fetch_add(&t->asked, 1) + 1;
    return asked >= t->first && asked - t->first < t->count ? -t->number : (int64_t)bytes;
}

static void open_fixture(fixture *f, uint64_t host_bytes)
{
    msc_offload_options options = training_options(MSC_TIER_FILE);

    memset(f, 0, sizeof *f);
    options.limit_bytes[MSC_TIER_FILE] = 1ull << 40;
    options.limit_bytes[MSC_TIER_HOST] = host_bytes;
    options.chunk_bytes = CHUNK;
    training_open(&f->t, &options, NULL);
    f->censor = (msc__file_censor){.user = &f->trouble, .ask = ask};
    f->t.engine->file->body->censor = &f->censor; /* nothing is under way yet */
    f->source = malloc(BYTES);
    f->back = malloc(BYTES);
    assert_true(f->source != NULL && f->back != NULL);
    training_fill(f->source, BYTES, 5);
}

static void close_fixture(fixture *f)
{
    training_close(&f->t);
    free(f->source);
    free(f->back);
}

static void fail_from(fixture *f, msc__file_wish wish, int number, uint32_t first, uint32_t count)
{
    f->trouble.wish = wish;
    f->trouble.number = number;
    f->trouble.first = first;
    f->trouble.count = count;
    atomic_store(&f->trouble.asked, 0);
}

static msc_ticket put(fixture *f)
{
    msc_ticket ticket;

    assert_int_equal(msc_offload_put(f->t.engine, f->source, BYTES, NULL, &ticket, &err), MSC_OK);
    return ticket;
}

static msc_status fetch(fixture *f, msc_ticket ticket)
{
    memset(f->back, 0, BYTES);
    assert_int_equal(msc_offload_get(f->t.engine, ticket, f->back, NULL, &err), MSC_OK);
    return msc_offload_arrive(f->t.engine, ticket, NULL, &err);
}

static void comes_back(fixture *f, msc_ticket ticket)
{
    assert_int_equal(fetch(f, ticket), MSC_OK);
    assert_true(training_is(f->back, BYTES, 5));
}

static void a_failed_write_leaves_the_source(void **state)
{
    fixture f;
    msc_ticket ticket;
    uint32_t first;

    (void)state;
    open_fixture(&f, 0);
    for (first = 1; first <= 16; first += 5) { /* the first piece, some in the middle, the last */
        fail_from(&f, MSC__FILE_WISH_WRITE, EIO, first, 1);
        ticket = put(&f);
        assert_int_equal(msc_offload_settle(f.t.engine, ticket, NULL, &err), MSC_EIO);
        assert_non_null(strstr(err.message, "cannot write"));
        assert_int_equal(err.driver_code, EIO);
        assert_int_equal(msc_offload_settled(f.t.engine, ticket, &err), MSC_EIO);
        assert_int_equal(msc_offload_get(f.t.engine, ticket, f.back, NULL, &err), MSC_ESTATE);
        msc_offload_drop(f.t.engine, ticket);
    }
    assert_int_equal(msc_offload_counters_now(f.t.engine).failed_count, 4);
    ticket = put(&f); /* the next block is none the worse */
    assert_int_equal(msc_offload_settle(f.t.engine, ticket, NULL, &err), MSC_OK);
    comes_back(&f, ticket);
    msc_offload_drop(f.t.engine, ticket);
    assert_int_equal(msc_offload_counters_now(f.t.engine).held_bytes[MSC_TIER_FILE], 0);
    close_fixture(&f);
}

/* Lane in has been asked for it already when the copy out fails. */
static void a_get_of_a_block_that_fails(void **state)
{
    fixture f;
    msc_ticket ticket;

    (void)state;
    open_fixture(&f, 0);
    fail_from(&f, MSC__FILE_WISH_WRITE, ENOSPC, 3, 1);
    atomic_store(&f.trouble.waits, true);
    ticket = put(&f);
    assert_int_equal(msc_offload_get(f.t.engine, ticket, f.back, NULL, &err), MSC_OK);
    atomic_store(&f.trouble.waits, false);
    assert_int_equal(msc_offload_arrive(f.t.engine, ticket, NULL, &err), MSC_EIO);
    assert_int_equal(err.driver_code, ENOSPC);
    assert_int_equal(msc_offload_settle(f.t.engine, ticket, NULL, &err), MSC_EIO);
    assert_true(training_is(f.source, BYTES, 5));
    msc_offload_drop(f.t.engine, ticket);
    close_fixture(&f);
}

/* Host memory was full when the block was put, and has room when the disk fails. */
static void a_block_moves_to_memory(void **state)
{
    fixture f;
    msc_offload_counters counters;
    msc_ticket first, second;

    (void)state;
    open_fixture(&f, 8 * CHUNK + (1u << 20)); /* staging, and room for one block */
    first = put(&f);
    assert_int_equal(msc_offload_settle(f.t.engine, first, NULL, &err), MSC_OK);
    fail_from(&f, MSC__FILE_WISH_WRITE, EIO, 7, UINT32_MAX);
    atomic_store(&f.trouble.waits, true);
    second = put(&f);
    while (!atomic_load(&f.trouble.waiting))
        msc__sleep_ns(100000);
    msc_offload_drop(f.t.engine, first);
    atomic_store(&f.trouble.waits, false);
    assert_int_equal(msc_offload_settle(f.t.engine, second, NULL, &err), MSC_OK);
    memset(f.source, 0, BYTES);
    comes_back(&f, second);
    counters = msc_offload_counters_now(f.t.engine);
    assert_int_equal(counters.moved_count, 1);
    assert_int_equal(counters.failed_count, 0);
    assert_int_equal(counters.held_bytes[MSC_TIER_FILE], 0);
    assert_int_equal(counters.held_bytes[MSC_TIER_HOST], BYTES);
    msc_offload_drop(f.t.engine, second);
    close_fixture(&f);
}

static void a_read_that_fails_can_be_tried_again(void **state)
{
    fixture f;
    msc_ticket ticket;
    uint32_t first;

    (void)state;
    open_fixture(&f, 0);
    ticket = put(&f);
    assert_int_equal(msc_offload_settle(f.t.engine, ticket, NULL, &err), MSC_OK);
    for (first = 1; first <= 16; first += 5) {
        fail_from(&f, MSC__FILE_WISH_READ, EIO, first, 1);
        assert_int_equal(fetch(&f, ticket), MSC_EIO);
        assert_non_null(strstr(err.message, "cannot read"));
    }
    assert_int_equal(msc_offload_counters_now(f.t.engine).lost_count, 4);
    comes_back(&f, ticket);
    msc_offload_drop(f.t.engine, ticket);
    close_fixture(&f);
}

/* Pieces go to the program in their order, whichever the disk has read first. */
static void reads_that_overtake(void **state)
{
    fixture f;
    msc_ticket ticket;
    uint32_t i;

    (void)state;
    open_fixture(&f, 0);
    f.trouble.odd_are_slow = true;
    ticket = put(&f);
    assert_int_equal(msc_offload_settle(f.t.engine, ticket, NULL, &err), MSC_OK);
    for (i = 0; i < 10; i++)
        comes_back(&f, ticket);
    msc_offload_drop(f.t.engine, ticket);
    close_fixture(&f);
}

/* A full disk shows in `put`, once; what had been reserved before serves on. */
static void a_disk_that_is_full(void **state)
{
    fixture f;
    msc_ticket ticket, none;
    uint64_t reserved;
    uint32_t i;

    (void)state;
    open_fixture(&f, 0);
    ticket = put(&f);
    assert_int_equal(msc_offload_settle(f.t.engine, ticket, NULL, &err), MSC_OK); /* the lane asks no more */
    reserved = msc_offload_counters_now(f.t.engine).taken_bytes[MSC_TIER_FILE];
    fail_from(&f, MSC__FILE_WISH_SPACE, ENOSPC, 1, UINT32_MAX);
    for (i = 0; i < 3; i++) {
        assert_int_equal(msc_offload_put(f.t.engine, f.source, 1ull << 32, NULL, &none, &err), MSC_EAGAIN);
        assert_int_equal(none, 0);
    }
    assert_int_equal(atomic_load(&f.trouble.asked), 1);
    assert_non_null(strstr(msc_offload_note(f.t.engine, MSC_TIER_FILE), "the disk is full"));
    assert_int_equal(msc_offload_counters_now(f.t.engine).taken_bytes[MSC_TIER_FILE], reserved);
    msc_offload_drop(f.t.engine, ticket);
    ticket = put(&f);
    assert_int_equal(msc_offload_settle(f.t.engine, ticket, NULL, &err), MSC_OK);
    comes_back(&f, ticket);
    close_fixture(&f);
}

/* Nothing of a block goes through the page cache: the last piece, too, is whole pages. */
static void tails_are_aligned(void **state)
{
    fixture f;
    msc_ticket ticket;
    msc__file *file;

    (void)state;
    open_fixture(&f, 0);
    file = f.t.engine->file;
    if (!msc__file_facts_of(file).direct) {
        close_fixture(&f);
        skip();
    }
    msc_offload_drop(f.t.engine, put(&f)); /* reserves space, which is not done directly */
    file->body->fd = -file->body->fd;      /* what is not direct fails */
    ticket = put(&f);
    assert_int_equal(msc_offload_settle(f.t.engine, ticket, NULL, &err), MSC_OK);
    comes_back(&f, ticket);
    file->body->fd = -file->body->fd;
    close_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failed_write_leaves_the_source),
        cmocka_unit_test(a_get_of_a_block_that_fails),
        cmocka_unit_test(a_block_moves_to_memory),
        cmocka_unit_test(a_read_that_fails_can_be_tried_again),
        cmocka_unit_test(reads_that_overtake),
        cmocka_unit_test(a_disk_that_is_full),
        cmocka_unit_test(tails_are_aligned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
