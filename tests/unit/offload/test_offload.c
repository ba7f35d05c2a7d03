/* SPDX-License-Identifier: Apache-2.0 */
/* The engine on the host: every byte comes back, limits hold, calls in a wrong order say so. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "offload_training.h"

#include "offload/offload_engine.h"

static const training_step usual = {
    .seed = 1, .block_count = 24, .most_bytes = 300000, .behind = 3, .same_sizes = true};

static msc_error err;

static void steps_in(msc_tier tier, training_step step, uint32_t debug)
{
    msc_offload_options options = training_options(tier);
    msc_offload_counters counters;
    training t;
    uint32_t run;

    options.debug = debug;
    training_open(&t, &options, NULL);
    for (run = 0; run < 4; run++) {
        step.seed += run;
        assert_int_equal(training_run(&t, &step), step.ends_early ? step.block_count / 2 : step.block_count);
        counters = msc_offload_counters_now(t.engine);
        assert_int_equal(counters.block_count, 0);
        assert_int_equal(counters.held_bytes[tier], 0);
        assert_true(counters.taken_bytes[tier] <= options.limit_bytes[tier]);
    }
    assert_int_equal(counters.put_count[tier], 4 * step.block_count);
    assert_int_equal(counters.lost_count + counters.failed_count + counters.moved_count, 0);
    training_close(&t);
}

static void every_tier(void **state)
{
    msc_tier tier;
    uint32_t debug;

    (void)state;
    for (tier = 0; tier < MSC_TIER_COUNT; tier++)
        for (debug = 0; debug < 2; debug++)
            steps_in(tier, usual, debug);
}

static void every_way_to_go_back(void **state)
{
    msc_tier tier;

    (void)state;
    for (tier = 0; tier < MSC_TIER_COUNT; tier++) {
        training_step step = usual;

        step.shuffled = true;
        steps_in(tier, step, 1);
        step.twice = true;
        steps_in(tier, step, 1);
        step.same_sizes = false;
        steps_in(tier, step, 1);
        step.ends_early = true;
        step.behind = 100;
        steps_in(tier, step, 1);
    }
}

/* From the second step on every block but the first is there, or on its way, when it is used. */
static void prefetches_what_it_has_seen(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    training_step step = usual;
    msc_offload_counters before;
    msc_offload_counters after;
    training t;

    (void)state;
    step.shuffled = true;
    training_open(&t, &options, NULL);
    (void)training_run(&t, &step);
    before = msc_offload_counters_now(t.engine);
    (void)training_run(&t, &step);
    after = msc_offload_counters_now(t.engine);
    assert_int_equal(after.missed_count - before.missed_count, 1);
    assert_int_equal(after.prefetched_count + after.late_count - before.prefetched_count - before.late_count,
                     step.block_count - 1);
    (void)training_run(&t, &step);
    msc_offload_step(t.engine);
    after = msc_offload_counters_now(t.engine);
    assert_int_equal(after.step_count, 3);
    assert_int_equal(after.reorder_count, 1); /* the first */
    training_close(&t);
}

static void without_prefetch_all_are_missed(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    training t;

    (void)state;
    options.prefetch_count = 0;
    training_open(&t, &options, NULL);
    (void)training_run(&t, &usual);
    (void)training_run(&t, &usual);
    assert_int_equal(msc_offload_counters_now(t.engine).missed_count, 2 * usual.block_count);
    training_close(&t);
}

static void a_step_that_repeats_allocates_nothing(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_FILE);
    training_step step = usual;
    uint64_t requests = 0;
    uint64_t device_requests = 0;
    training t;
    int run;

    (void)state;
    step.group_size = 4; /* prefetch within groups and across them */
    step.ahead_bytes = 2 * step.most_bytes;
    training_open(&t, &options, NULL);
    for (run = 0; run < 6; run++) {
        if (run == 1) {
            requests = t.heap.request_count;
            device_requests = t.device_heap.request_count;
        }
        (void)training_run(&t, &step);
    }
    assert_true(msc_offload_counters_now(t.engine).prefetched_count > 0);
    assert_int_equal(t.heap.request_count, requests);
    assert_int_equal(t.device_heap.request_count, device_requests);
    training_close(&t);
}

/* An evaluation between two steps puts and drops, and what the steps taught is still known. Nothing grows. */
static void steps_without_a_use_are_forgotten(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    training_step step = usual;
    char bytes[64] = {1};
    msc_offload_counters before;
    msc_offload_counters after;
    uint64_t requests;
    msc_ticket ticket;
    training t;
    int i;

    (void)state;
    step.shuffled = true;
    training_open(&t, &options, NULL);
    (void)training_run(&t, &step);
    requests = t.heap.request_count;
    for (i = 0; i < 5000; i++) {
        assert_int_equal(msc_offload_put(t.engine, bytes, sizeof bytes, NULL, &ticket, &err), MSC_OK);
        msc_offload_drop(t.engine, ticket);
    }
    assert_int_equal(t.heap.request_count, requests);
    before = msc_offload_counters_now(t.engine);
    (void)training_run(&t, &step);
    after = msc_offload_counters_now(t.engine);
    assert_int_equal(after.missed_count - before.missed_count, 1);
    assert_int_equal(after.step_count, 1);
    assert_int_equal(after.reorder_count, 1); /* the first */
    training_close(&t);
}

/* A block that is held for ever, as by a graph that never has its backward, does not let one step grow for ever. */
static void steps_end_although_a_block_is_held(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    training_step step = {.seed = 1, .block_count = 24, .most_bytes = 64, .same_sizes = true};
    char bytes[64] = {1};
    uint64_t held_bytes = 0;
    msc_ticket ticket;
    training t;
    int run;

    (void)state;
    training_open(&t, &options, NULL);
    assert_int_equal(msc_offload_put(t.engine, bytes, sizeof bytes, NULL, &ticket, &err), MSC_OK);
    msc_offload_group(t.engine); /* the steps' blocks are of another one, so it is not fetched with them */
    for (run = 0; run < 400; run++) {
        assert_int_equal(training_run(&t, &step), step.block_count);
        if (run == 99)
            held_bytes = msc_context_held_bytes(t.ctx);
    }
    assert_true(msc_offload_counters_now(t.engine).step_count > 0);
    assert_int_equal(msc_context_held_bytes(t.ctx), held_bytes);
    msc_offload_drop(t.engine, ticket);
    training_close(&t);
}

/* The record of a block goes when its generations are used up. */
static void no_ticket_is_used_twice(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    char bytes[64] = {1};
    msc_ticket tickets[3];
    msc__block *first;
    training t;

    (void)state;
    training_open(&t, &options, NULL);
    assert_int_equal(msc_offload_put(t.engine, bytes, sizeof bytes, NULL, &tickets[0], &err), MSC_OK);
    msc_offload_drop(t.engine, tickets[0]);
    first = *(msc__block **)t.engine->pages.items;
    assert_int_equal(first->generation, 2);
    first->generation = UINT32_MAX - 1;
    assert_int_equal(msc_offload_put(t.engine, bytes, sizeof bytes, NULL, &tickets[1], &err), MSC_OK);
    assert_int_equal(tickets[1] >> 32, UINT32_MAX);
    msc_offload_drop(t.engine, tickets[1]);
    assert_int_equal(msc_offload_put(t.engine, bytes, sizeof bytes, NULL, &tickets[2], &err), MSC_OK);
    assert_int_equal((uint32_t)tickets[2], 1); /* another record */
    assert_int_equal(msc_offload_bytes_of(t.engine, tickets[0]), 0);
    assert_int_equal(msc_offload_bytes_of(t.engine, tickets[1]), 0);
    msc_offload_drop(t.engine, tickets[2]);
    assert_int_equal(msc_offload_counters_now(t.engine).block_count, 0);
    training_close(&t);
}

/* Blocks fill the first tier, then the next, and are refused where no tier has room. */
static void limits_hold(void **state)
{
    enum { BYTES = 1 << 20, MOST = 16 };
    msc_offload_options options = training_options(MSC_TIER_PINNED);
    msc_offload_counters counters;
    msc_ticket tickets[MOST];
    char *source = malloc(BYTES);
    training t;
    uint32_t count = 0;

    (void)state;
    assert_non_null(source);
    training_fill(source, BYTES, 7);
    options.limit_bytes[MSC_TIER_PINNED] = 3 * BYTES;
    options.limit_bytes[MSC_TIER_HOST] = 3 * BYTES;
    options.limit_bytes[MSC_TIER_FILE] = 2 * BYTES;
    training_open(&t, &options, NULL);
    while (count < MOST && msc_offload_put(t.engine, source, BYTES, NULL, &tickets[count], &err) == MSC_OK)
        count++;
    counters = msc_offload_counters_now(t.engine);
    assert_int_equal(err.status, MSC_EAGAIN);
    assert_non_null(strstr(err.message, "no tier has room for 1048576 bytes"));
    assert_int_equal(tickets[count], 0);
    assert_int_equal(counters.put_count[MSC_TIER_PINNED], 3);
    assert_int_equal(counters.put_count[MSC_TIER_HOST], 2); /* staging has the rest */
    assert_int_equal(counters.put_count[MSC_TIER_FILE], 2);
    assert_int_equal(counters.refused_count, 1);
    for (msc_tier tier = 0; tier < MSC_TIER_COUNT; tier++)
        assert_true(counters.taken_bytes[tier] <= options.limit_bytes[tier]);
    msc_offload_drop(t.engine, tickets[0]);
    assert_int_equal(msc_offload_put(t.engine, source, BYTES, NULL, &tickets[0], &err), MSC_OK);
    while (count > 0)
        msc_offload_drop(t.engine, tickets[--count]);
    training_close(&t);
    free(source);
}

/* A run whose shapes grow: what is empty again makes room for blocks of another size. */
static void shapes_that_grow(void **state)
{
    enum { MIB = 1 << 20, LIMIT = 64 };
    msc_ticket tickets[LIMIT];
    char *source = malloc(LIMIT * (size_t)MIB);

    (void)state;
    assert_non_null(source);
    memset(source, 7, LIMIT * (size_t)MIB);
    for (msc_tier tier = MSC_TIER_PINNED; tier <= MSC_TIER_FILE; tier++) {
        msc_offload_options options = training_options(tier);
        training t;
        uint32_t size;

        options.limit_bytes[tier] = LIMIT * (uint64_t)MIB;
        training_open(&t, &options, NULL);
        for (size = 9; size < 21; size++) {
            uint32_t most = LIMIT / size;
            uint32_t i;

            for (i = 0; i < most; i++)
                assert_int_equal(
                    msc_offload_put(t.engine, source, size * (uint64_t)MIB, NULL, &tickets[i], &err), MSC_OK);
            assert_int_equal(
                msc_offload_put(t.engine, source, size * (uint64_t)MIB, NULL, &tickets[most], &err),
                MSC_EAGAIN);
            assert_true(msc_offload_counters_now(t.engine).taken_bytes[tier] <= options.limit_bytes[tier]);
            for (i = 0; i < most; i++)
                msc_offload_drop(t.engine, tickets[i]);
        }
        training_close(&t);
    }
    free(source);
}

/* What is refused once closes the tier, with one line, and the next tier serves. */
static void pinning_refused(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_PINNED);
    msc_device_faults faults = {.refuse_pins = 1};
    msc_offload_counters counters;
    training t;

    (void)state;
    options.limit_bytes[MSC_TIER_HOST] = 64u << 20;
    training_open(&t, &options, &faults);
    (void)training_run(&t, &usual);
    counters = msc_offload_counters_now(t.engine);
    assert_int_equal(counters.put_count[MSC_TIER_PINNED], 0);
    assert_int_equal(counters.put_count[MSC_TIER_HOST], usual.block_count);
    assert_true(strlen(msc_offload_note(t.engine, MSC_TIER_PINNED)) > 0);
    assert_string_equal(msc_offload_note(t.engine, MSC_TIER_HOST), "");
    training_close(&t);
}

/* More copies than the lanes' rings hold wait behind a slow one. Who puts, and who gets, waits for room. */
static void more_than_the_rings_hold(void **state)
{
    enum { COUNT = 5000, LARGE = 1 << 20 };
    static uint32_t small[COUNT], back[COUNT];
    static char large[2][LARGE];
    static msc_ticket tickets[COUNT];
    msc_device_options device_options = msc_device_options_default();
    msc_offload_options options = training_options(MSC_TIER_HOST);
    msc_context *ctx, *device_ctx;
    msc_device *device;
    msc_offload *engine;
    msc_ticket first;
    uint32_t i;

    (void)state;
    device_options.faults.bytes_per_second = 20u << 20; /* the large one takes 50 ms */
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    assert_int_equal(msc_context_create(NULL, &device_ctx, NULL), MSC_OK);
    assert_int_equal(msc_device_create(device_ctx, &device_options, &device, &err), MSC_OK);
    assert_int_equal(msc_offload_create(ctx, device, &options, &engine, &err), MSC_OK);
    assert_int_equal(msc_offload_put(engine, large[0], LARGE, NULL, &first, &err), MSC_OK);
    for (i = 0; i < COUNT; i++) {
        small[i] = i * 2654435761u;
        assert_int_equal(msc_offload_put(engine, &small[i], sizeof *small, NULL, &tickets[i], &err), MSC_OK);
    }
    assert_int_equal(msc_offload_get(engine, first, large[1], NULL, &err), MSC_OK);
    for (i = 0; i < COUNT; i++)
        assert_int_equal(msc_offload_get(engine, tickets[i], &back[i], NULL, &err), MSC_OK);
    for (i = 0; i < COUNT; i++)
        assert_int_equal(msc_offload_arrive(engine, tickets[i], NULL, &err), MSC_OK);
    assert_memory_equal(small, back, sizeof small);
    msc_offload_destroy(engine);
    msc_device_destroy(device);
    assert_int_equal(msc_context_held_bytes(ctx) + msc_context_held_bytes(device_ctx), 0);
    msc_context_destroy(ctx);
    msc_context_destroy(device_ctx);
}

/* The copy out of the small one is behind that of the large one, and nothing else is in the way of its copy back. */
static void asked_for_at_once(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_PINNED);
    msc_device_faults faults = {.bytes_per_second = 20u << 20};
    static char large[200000], small[64] = "small", back[64];
    msc_ticket tickets[2];
    training t;

    (void)state;
    training_open(&t, &options, &faults);
    assert_int_equal(msc_offload_put(t.engine, large, sizeof large, NULL, &tickets[0], &err), MSC_OK);
    assert_int_equal(msc_offload_put(t.engine, small, sizeof small, NULL, &tickets[1], &err), MSC_OK);
    assert_int_equal(msc_offload_get(t.engine, tickets[1], back, NULL, &err), MSC_OK);
    assert_int_equal(msc_offload_arrive(t.engine, tickets[1], NULL, &err), MSC_OK);
    assert_memory_equal(small, back, sizeof small);
    training_close(&t);
}

/* Tickets of blocks that are gone fill the ring, too; taking them is all that makes room. */
static void dropped_ones_make_room(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    msc_device_faults faults = {.bytes_per_second = 20u << 20};
    static char large[1 << 20];
    msc_ticket first, ticket;
    training t;
    uint32_t i;

    (void)state;
    training_open(&t, &options, &faults);
    assert_int_equal(msc_offload_put(t.engine, large, sizeof large, NULL, &first, &err), MSC_OK);
    for (i = 0; i < 5000; i++) {
        assert_int_equal(msc_offload_put(t.engine, large, 8, NULL, &ticket, &err), MSC_OK);
        msc_offload_drop(t.engine, ticket);
    }
    assert_int_equal(msc_offload_counters_now(t.engine).block_count, 1);
    training_close(&t);
}

static void calls_in_a_wrong_order(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    char bytes[64] = {1};
    char back[64];
    msc_ticket ticket;
    training t;

    (void)state;
    training_open(&t, &options, NULL);
    assert_int_equal(msc_offload_put(t.engine, NULL, 4, NULL, &ticket, &err), MSC_EINVAL);
    assert_int_equal(msc_offload_put(t.engine, bytes, 0, NULL, &ticket, &err), MSC_EINVAL);
    assert_int_equal(msc_offload_settle(t.engine, 77, NULL, &err), MSC_EINVAL);
    assert_int_equal(msc_offload_put(t.engine, bytes, sizeof bytes, NULL, &ticket, &err), MSC_OK);
    assert_int_equal(msc_offload_bytes_of(t.engine, ticket), sizeof bytes);
    assert_int_equal(msc_offload_arrive(t.engine, ticket, NULL, &err), MSC_ESTATE);
    assert_non_null(strstr(err.message, "get comes before arrive"));
    assert_int_equal(msc_offload_get(t.engine, ticket, back, NULL, &err), MSC_OK);
    assert_int_equal(msc_offload_arrive(t.engine, ticket, NULL, &err), MSC_OK);
    assert_memory_equal(back, bytes, sizeof bytes);
    memset(back, 0, sizeof back);
    assert_int_equal(msc_offload_get_to_host(t.engine, ticket, NULL, &err), MSC_EINVAL);
    assert_int_equal(msc_offload_get_to_host(t.engine, ticket, back, &err), MSC_OK);
    assert_int_equal(msc_offload_arrive(t.engine, ticket, NULL, &err), MSC_OK);
    assert_memory_equal(back, bytes, sizeof bytes);
    msc_offload_drop(t.engine, ticket);
    msc_offload_drop(t.engine, ticket);
    msc_offload_drop(t.engine, 0);
    assert_int_equal(msc_offload_get(t.engine, ticket, back, NULL, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "it was dropped"));
    assert_int_equal(msc_offload_use(t.engine, ticket, &ticket, 1), 0);
    training_close(&t);
}

static void put_and_settle(training *t, const char *bytes, msc_ticket *tickets, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++) {
        assert_int_equal(msc_offload_put(t->engine, bytes, 64, NULL, &tickets[i], &err), MSC_OK);
        assert_int_equal(msc_offload_settle(t->engine, tickets[i], NULL, &err), MSC_OK);
    }
}

/* Several are asked about at once: those count that stand before the first that is not settled, or not there. */
static void several_are_settled(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    msc_device_faults slow = {.bytes_per_second = 3200}; /* 64 bytes take 20 ms */
    char bytes[64] = {1};
    msc_ticket tickets[4] = {0};
    training t;

    (void)state;
    training_open(&t, &options, &slow);
    put_and_settle(&t, bytes, tickets, 3);
    assert_int_equal(msc_offload_put(t.engine, bytes, 64, NULL, &tickets[3], &err), MSC_OK);
    assert_int_equal(msc_offload_settled_of(t.engine, tickets, 4), 3);
    assert_int_equal(msc_offload_settled_of(t.engine, tickets, 2), 2);
    assert_int_equal(msc_offload_settled_of(t.engine, tickets + 3, 1), 0);
    assert_int_equal(msc_offload_settled_of(t.engine, tickets, 0), 0);
    assert_int_equal(msc_offload_settle(t.engine, tickets[3], NULL, &err), MSC_OK);
    assert_int_equal(msc_offload_settled_of(t.engine, tickets, 4), 4);
    msc_offload_drop(t.engine, tickets[1]);
    assert_int_equal(msc_offload_settled_of(t.engine, tickets, 4), 1);
    training_close(&t);
}

/* What a use says of the block itself: only what was got ahead of it, and has its bytes, is here. */
static void a_use_says_what_is_here(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    msc_device_faults slow = {.bytes_per_second = 3200};
    char bytes[64] = {1};
    char back[64] = {0};
    msc_ticket tickets[3];
    msc_ticket soon[2];
    uint32_t here = 1;
    training t;

    (void)state;
    training_open(&t, &options, &slow);
    put_and_settle(&t, bytes, tickets, 3);
    assert_int_equal(msc_offload_use_on(t.engine, tickets[2], NULL, soon, 2, &here), 2);
    assert_int_equal(here, 0); /* nobody has got it */
    assert_int_equal(soon[1], tickets[1]);
    assert_int_equal(msc_offload_get(t.engine, tickets[1], back, NULL, &err), MSC_OK);
    assert_int_equal(msc_offload_use_on(t.engine, tickets[1], NULL, soon, 1, &here), 1);
    assert_int_equal(here, 0); /* on its way */
    assert_int_equal(soon[0], tickets[0]);
    assert_int_equal(msc_offload_arrive(t.engine, tickets[1], NULL, &err), MSC_OK);
    assert_int_equal(msc_offload_get(t.engine, tickets[0], back, NULL, &err), MSC_OK);
    while (msc_offload_counters_now(t.engine).in_bytes[MSC_TIER_HOST] < 128)
        msc__sleep_ns(1000000);
    assert_int_equal(msc_offload_use_on(t.engine, tickets[0], NULL, soon, 1, &here), 0);
    assert_int_equal(here, 1);
    assert_memory_equal(back, bytes, sizeof bytes);
    assert_int_equal(msc_offload_use_on(t.engine, tickets[0], NULL, soon, 1, &here), 1);
    assert_int_equal(here, 0); /* used, and to be got anew */
    msc_offload_drop(t.engine, tickets[0]);
    here = 1;
    assert_int_equal(msc_offload_use_on(t.engine, tickets[0], NULL, soon, 1, &here), 0);
    assert_int_equal(here, 0);
    training_close(&t);
}

static void refused_options(void **state)
{
    static const struct {
        msc_offload_options options;
        const char *words;
    } cases[] = {
        {{.struct_bytes = 1}, "struct_bytes is 1"},
        {{.struct_bytes = sizeof(msc_offload_options)}, "limit_bytes are all 0"},
        {{.struct_bytes = sizeof(msc_offload_options), .limit_bytes = {1, 0, 0}, .chunk_bytes = 5000},
         "chunk_bytes is 5000"},
        {{.struct_bytes = sizeof(msc_offload_options),
          .limit_bytes = {1, 0, 0},
          .chunk_bytes = 4096,
          .staging_count = 1},
         "staging_count is 1"},
        {{.struct_bytes = sizeof(msc_offload_options),
          .limit_bytes = {1, 0, 0},
          .chunk_bytes = 4096,
          .staging_count = 4,
          .prefetch_count = 2000},
         "prefetch_count is 2000"},
        {{.struct_bytes = sizeof(msc_offload_options),
          .limit_bytes = {0, 4096, 1 << 20},
          .chunk_bytes = 4096,
          .staging_count = 4},
         "the staging buffers alone take 32768"},
        {{.struct_bytes = sizeof(msc_offload_options),
          .limit_bytes = {0, 0, 1 << 20},
          .chunk_bytes = 4096,
          .staging_count = 4,
          .directory = "/nowhere/at/all"},
         "/nowhere/at/all"},
    };
    msc_offload_options options = training_options(MSC_TIER_HOST);
    msc_offload *engine;
    msc_context *ctx;
    training t;
    size_t i;

    (void)state;
    training_open(&t, &options, NULL);
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        engine = (void *)&t;
        assert_int_not_equal(msc_offload_create(ctx, t.device, &cases[i].options, &engine, &err), MSC_OK);
        assert_null(engine);
        if (strstr(err.message, cases[i].words) == NULL)
            fail_msg("case %zu says: %s", i, err.message);
    }
    msc_context_destroy(ctx);
    training_close(&t);
}

static int count_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;

    while (folder != NULL && readdir(folder) != NULL)
        count++;
    if (folder != NULL)
        (void)closedir(folder);
    return count;
}

/* It may only let go of the file. */
static void a_child_is_refused(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_FILE);
    char bytes[64] = {1};
    msc_ticket ticket;
    training t;
    int status;
    pid_t child;

    (void)state;
    training_open(&t, &options, NULL);
    child = fork();
    if (child == 0) {
        bool right = msc_offload_put(t.engine, bytes, sizeof bytes, NULL, &ticket, NULL) == MSC_ESTATE &&
                     msc_offload_counters_now(t.engine).step_count == 0 &&
                     msc_offload_trace(t.engine, NULL, 8) == 0 &&
                     msc_offload_note(t.engine, MSC_TIER_HOST)[0] == '\0';
        int before = count_descriptors();
        int after;

        msc_offload_destroy(t.engine);
        after = count_descriptors();
        msc_offload_destroy(t.engine); /* closes nothing that is not the file's */
        _exit(right && after < before && count_descriptors() == after ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    (void)training_run(&t, &usual);
    training_close(&t);
}

/* Fails allocation 0, 1, 2 … of the engine until it lives. */
static void without_memory(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_FILE);
    training t;
    uint64_t n;

    (void)state;
    options.trace_count = 8;
    training_open(&t, &options, NULL);
    for (n = 0;; n++) {
        failing_alloc heap;
        msc_context *ctx;
        msc_offload *engine = (void *)&t;
        msc_status status;

        failing_alloc_init(&heap, n);
        ctx = failing_alloc_context(&heap);
        if (ctx == NULL)
            continue;
        status = msc_offload_create(ctx, t.device, &options, &engine, &err);
        if (status == MSC_OK)
            msc_offload_destroy(engine);
        else
            assert_null(engine);
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(&heap));
        if (heap.failed_count == 0)
            break;
        assert_int_equal(status, MSC_ENOMEM);
    }
    assert_true(n > 8);
    training_close(&t);
}

static void events(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    msc_offload_event trace[512];
    uint32_t kinds[MSC_OFFLOAD_EVENT_COUNT] = {0};
    training t;
    uint32_t count;
    uint32_t i;

    (void)state;
    options.trace_count = 512;
    training_open(&t, &options, NULL);
    (void)training_run(&t, &usual);
    count = msc_offload_trace(t.engine, trace, 512);
    for (i = 0; i < count; i++) {
        assert_true(trace[i].begin_ns >= 0 && trace[i].end_ns >= trace[i].begin_ns);
        assert_int_equal(trace[i].tier, MSC_TIER_HOST);
        kinds[trace[i].kind]++;
    }
    assert_int_equal(kinds[MSC_OFFLOAD_OUT], usual.block_count);
    assert_int_equal(kinds[MSC_OFFLOAD_IN], usual.block_count);
    assert_int_equal(kinds[MSC_OFFLOAD_DROP], usual.block_count);
    assert_int_equal(msc_offload_trace(t.engine, trace, 3), 3);
    training_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tier),
        cmocka_unit_test(every_way_to_go_back),
        cmocka_unit_test(prefetches_what_it_has_seen),
        cmocka_unit_test(without_prefetch_all_are_missed),
        cmocka_unit_test(a_step_that_repeats_allocates_nothing),
        cmocka_unit_test(steps_without_a_use_are_forgotten),
        cmocka_unit_test(steps_end_although_a_block_is_held),
        cmocka_unit_test(no_ticket_is_used_twice),
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(shapes_that_grow),
        cmocka_unit_test(pinning_refused),
        cmocka_unit_test(more_than_the_rings_hold),
        cmocka_unit_test(asked_for_at_once),
        cmocka_unit_test(dropped_ones_make_room),
        cmocka_unit_test(calls_in_a_wrong_order),
        cmocka_unit_test(several_are_settled),
        cmocka_unit_test(a_use_says_what_is_here),
        cmocka_unit_test(refused_options),
        cmocka_unit_test(a_child_is_refused),
        cmocka_unit_test(without_memory),
        cmocka_unit_test(events),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
