/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine on a card: `test_offload_card [LIBRARY [STEPS]]`, on a real one without a library, where exit status 77
 * means that there is none.
 *
 * The program behaves as PyTorch does. It never waits for the card except at the end of a step; everything that
 * it computes is a copy on its one stream; and it takes memory back in the order of that stream, as a caching allocator
 * does: two buffers serve all sources, two all destinations, and a buffer gets its next tenant as soon as the engine
 * says that it may. So each ordering between the program's stream and the engine's shows in the bytes:
 *
 *      fill the source ──► put ──► settle ──► scribble on it, fill it for another block
 *      read the destination of another block ──► get ──► arrive ──► read it ──► drop
 *
 * Copies of one size take turns by themselves. So the scribble is a small one, which is over long before the engine
 * has read a source that was given up too early. Every other destination is read late, behind a large copy, when
 * the engine would long have filled it for another block; the others early, their first bytes by themselves.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "offload_training.h"

#include "device/device_internal.h"

#define BLOCKS 10u
#define BYTES 150000u
#define SLOTS 2u
#define PAGE 65536u
#define ROOM (((BYTES + PAGE - 1) / PAGE) * PAGE)

static const char *library;
static uint32_t step_count = 4;
static msc_error err;

typedef struct card {
    msc_context *ctx;
    msc_context *engine_ctx;
    msc_device *device;
    const msc_device_ops *ops;
    msc_offload *engine;
    void *stream; /* the program's */
    void *event;
    unsigned char *patterns[BLOCKS]; /* page-locked */
    unsigned char *results[BLOCKS];
    void *sources[SLOTS]; /* on the card */
    void *destinations[SLOTS];
    void *elsewhere; /* on the card, what the large copies fill */
    msc_ticket tickets[BLOCKS];
} card;

static void must(msc_status status)
{
    if (status != MSC_OK)
        fail_msg("%s: %s", msc_status_name(status), err.message);
}

static unsigned char *pinned(card *c)
{
    void *memory = aligned_alloc(PAGE, ROOM);

    assert_non_null(memory);
    must(c->ops->pin(c->device, memory, ROOM, &err));
    return memory;
}

static void unpinned(card *c, void *memory)
{
    c->ops->unpin(c->device, memory, ROOM);
    free(memory);
}

static msc_device_options card_options(void)
{
    msc_device_options options = msc_device_options_default();

    options.kind = MSC_DEVICE_CUDA;
    options.library = library;
    return options;
}

static void open_card(card *c, const msc_offload_options *options)
{
    msc_device_options device = card_options();
    uint32_t i;

    memset(c, 0, sizeof *c);
    must(msc_context_create(NULL, &c->ctx, &err));
    must(msc_context_create(NULL, &c->engine_ctx, &err));
    must(msc_device_create(c->ctx, &device, &c->device, &err));
    c->ops = c->device->ops;
    must(c->ops->stream_create(c->device, &c->stream, &err));
    must(c->ops->event_create(c->device, &c->event, &err));
    for (i = 0; i < BLOCKS; i++) {
        c->patterns[i] = pinned(c);
        c->results[i] = pinned(c);
    }
    for (i = 0; i < SLOTS; i++) {
        must(c->ops->memory_create(c->device, BYTES, &c->sources[i], &err));
        must(c->ops->memory_create(c->device, BYTES, &c->destinations[i], &err));
    }
    must(c->ops->memory_create(c->device, ROOM, &c->elsewhere, &err));
    must(msc_offload_create(c->engine_ctx, c->device, options, &c->engine, &err));
}

static void close_card(card *c)
{
    uint32_t i;

    msc_offload_destroy(c->engine);
    for (i = 0; i < SLOTS; i++) {
        c->ops->memory_destroy(c->device, c->sources[i], BYTES);
        c->ops->memory_destroy(c->device, c->destinations[i], BYTES);
    }
    c->ops->memory_destroy(c->device, c->elsewhere, ROOM);
    for (i = 0; i < BLOCKS; i++) {
        unpinned(c, c->patterns[i]);
        unpinned(c, c->results[i]);
    }
    c->ops->event_destroy(c->device, c->event);
    c->ops->stream_destroy(c->device, c->stream);
    msc_device_destroy(c->device);
    assert_int_equal(msc_context_held_bytes(c->ctx), 0);
    assert_int_equal(msc_context_held_bytes(c->engine_ctx), 0);
    msc_context_destroy(c->ctx);
    msc_context_destroy(c->engine_ctx);
}

static void wait_for_the_card(card *c)
{
    must(c->ops->event_record(c->device, c->event, c->stream, &err));
    must(c->ops->event_wait(c->device, c->event, &err));
}

/* The program's stream writes `bytes` of its own. */
static void write_on(card *c, void *to, uint64_t bytes)
{
    must(c->ops->copy(c->device, to, c->results[0], bytes, MSC_COPY_IN, c->stream, &err));
}

/* Sources are settled as late as their buffer allows. */
static void forward(card *c)
{
    uint32_t i;

    for (i = 0; i < BLOCKS; i++) {
        void *source = c->sources[i % SLOTS];

        if (i >= SLOTS) {
            must(msc_offload_settle(c->engine, c->tickets[i - SLOTS], c->stream, &err));
            write_on(c, source, 64);
        }
        must(c->ops->copy(c->device, source, c->patterns[i], BYTES, MSC_COPY_IN, c->stream, &err));
        must(msc_offload_put(c->engine, source, BYTES, c->stream, &c->tickets[i], &err));
    }
    for (i = BLOCKS - SLOTS; i < BLOCKS; i++) {
        must(msc_offload_settle(c->engine, c->tickets[i], c->stream, &err));
        write_on(c, c->sources[i % SLOTS], 64);
    }
}

static void read_from(card *c, const char *from, unsigned char *to, uint64_t bytes)
{
    must(c->ops->copy(c->device, to, from, bytes, MSC_COPY_OUT, c->stream, &err));
}

static void read_all(card *c, uint32_t block, const void *destination)
{
    const uint64_t first = 64;

    if (block % 2 == 0)
        write_on(c, c->elsewhere, ROOM);
    read_from(c, destination, c->results[block], first);
    read_from(c, (const char *)destination + first, c->results[block] + first, BYTES - first);
}

/* A destination is asked for as soon as the program has submitted its last use, not when that is over. */
static void backward(card *c)
{
    uint32_t i;

    for (i = 0; i < SLOTS; i++)
        must(msc_offload_get(c->engine, c->tickets[BLOCKS - 1 - i], c->destinations[i], c->stream, &err));
    for (i = 0; i < BLOCKS; i++) {
        uint32_t block = BLOCKS - 1 - i;
        void *destination = c->destinations[i % SLOTS];

        must(msc_offload_arrive(c->engine, c->tickets[block], c->stream, &err));
        read_all(c, block, destination);
        msc_offload_drop(c->engine, c->tickets[block]);
        if (i + SLOTS < BLOCKS)
            must(msc_offload_get(c->engine, c->tickets[block - SLOTS], destination, c->stream, &err));
    }
}

static void run(card *c, uint32_t step)
{
    uint32_t i;

    for (i = 0; i < BLOCKS; i++)
        training_fill(c->patterns[i], BYTES, step * 1000 + i);
    forward(c);
    backward(c);
    wait_for_the_card(c);
    for (i = 0; i < BLOCKS; i++)
        if (!training_is(c->results[i], BYTES, step * 1000 + i))
            fail_msg("step %u: block %u came back wrong", step, i);
}

static void steps_in(msc_tier tier, uint32_t debug)
{
    msc_offload_options options = training_options(tier);
    card c;
    uint32_t step;

    options.limit_bytes[MSC_TIER_PINNED] = 8u << 20; /* staging, and in its own tier the blocks */
    if (tier != MSC_TIER_PINNED)
        options.limit_bytes[MSC_TIER_PINNED] = 2 * options.staging_count * options.chunk_bytes;
    options.debug = debug;
    open_card(&c, &options);
    for (step = 0; step < step_count; step++)
        run(&c, step);
    assert_int_equal(msc_offload_counters_now(c.engine).put_count[tier], step_count * BLOCKS);
    close_card(&c);
}

static void pinned_memory(void **state)
{
    (void)state;
    steps_in(MSC_TIER_PINNED, 0);
    steps_in(MSC_TIER_PINNED, 1);
}

static void pageable_memory(void **state)
{
    (void)state;
    steps_in(MSC_TIER_HOST, 0);
    steps_in(MSC_TIER_HOST, 1);
}

static void file(void **state)
{
    (void)state;
    steps_in(MSC_TIER_FILE, 0);
    steps_in(MSC_TIER_FILE, 1);
}

/* Blocks that the host reads, as soon as it may: while the card is still at the copy out of the next ones. */
static void read_by_the_host(card *c, uint32_t step)
{
    unsigned char *memory = malloc(BYTES);
    uint32_t i;

    assert_non_null(memory);
    for (i = 0; i < BLOCKS; i++)
        training_fill(c->patterns[i], BYTES, step * 1000 + i);
    forward(c);
    for (i = 0; i < BLOCKS; i++) {
        memset(memory, 0xee, BYTES);
        must(msc_offload_get_to_host(c->engine, c->tickets[BLOCKS - 1 - i], memory, &err));
        must(msc_offload_arrive(c->engine, c->tickets[BLOCKS - 1 - i], c->stream, &err));
        if (!training_is(memory, BYTES, step * 1000 + BLOCKS - 1 - i))
            fail_msg("step %u: the host reads block %u wrong", step, BLOCKS - 1 - i);
    }
    backward(c); /* the same blocks, on the card */
    wait_for_the_card(c);
    for (i = 0; i < BLOCKS; i++)
        assert_true(training_is(c->results[i], BYTES, step * 1000 + i));
    free(memory);
}

static void the_host_reads(void **state)
{
    msc_tier tier;

    (void)state;
    for (tier = MSC_TIER_PINNED; tier < MSC_TIER_COUNT; tier++) {
        msc_offload_options options = training_options(tier);
        card c;
        uint32_t step;

        options.limit_bytes[MSC_TIER_PINNED] =
            tier == MSC_TIER_PINNED ? 8u << 20 : 2 * options.staging_count * options.chunk_bytes;
        open_card(&c, &options);
        for (step = 0; step < step_count; step++)
            read_by_the_host(&c, step);
        close_card(&c);
    }
}

static int there_is_none(void)
{
    msc_device_options options = card_options();
    msc_context *ctx;
    msc_device *device;
    msc_status status;

    if (msc_context_create(NULL, &ctx, NULL) != MSC_OK)
        return 1;
    status = msc_device_create(ctx, &options, &device, NULL);
    msc_device_destroy(device);
    msc_context_destroy(ctx);
    return status == MSC_ENODEV;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pinned_memory),
        cmocka_unit_test(pageable_memory),
        cmocka_unit_test(file),
        cmocka_unit_test(the_host_reads),
    };

    library = argc > 1 ? argv[1] : NULL;
    if (argc > 2)
        step_count = (uint32_t)strtoul(argv[2], NULL, 10);
    if (library == NULL && there_is_none())
        return 77;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
