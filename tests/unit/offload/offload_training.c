/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps in miniature (offload_training.h). */
#include "offload_training.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ROOM_BYTES (256ull << 20)

uint64_t training_random(uint64_t *seed)
{
    uint64_t z = *seed += 0x9E3779B97F4A7C15ull;

    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

void training_fill(void *memory, uint64_t bytes, uint64_t seed)
{
    unsigned char *at = memory;
    uint64_t i;

    for (i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word = training_random(&seed);
        memcpy(at + i, &word, sizeof word);
    }
    for (; i < bytes; i++)
        at[i] = (unsigned char)training_random(&seed);
}

bool training_is(const void *memory, uint64_t bytes, uint64_t seed)
{
    unsigned char *expected = malloc((size_t)bytes);
    bool same;

    assert_non_null(expected);
    training_fill(expected, bytes, seed);
    same = memcmp(memory, expected, (size_t)bytes) == 0;
    free(expected);
    return same;
}

msc_offload_options training_options(msc_tier tier)
{
    msc_offload_options options = msc_offload_options_default();

    options.limit_bytes[tier] = ROOM_BYTES;
    options.chunk_bytes = 64u << 10;
    options.directory = ".";
    return options;
}

void training_open(training *t, const msc_offload_options *options, const msc_device_faults *faults)
{
    msc_device_options device = msc_device_options_default();
    msc_error err;

    memset(t, 0, sizeof *t);
    failing_alloc_init(&t->heap, FAILING_ALLOC_NEVER);
    failing_alloc_init(&t->device_heap, FAILING_ALLOC_NEVER);
    t->options = *options;
    if (faults != NULL)
        device.faults = t->faults = *faults;
    t->ctx = failing_alloc_context(&t->heap);
    t->device_ctx = failing_alloc_context(&t->device_heap);
    assert_non_null(t->ctx);
    assert_non_null(t->device_ctx);
    if (msc_device_create(t->device_ctx, &device, &t->device, &err) != MSC_OK)
        fail_msg("%s", err.message);
    if (msc_offload_create(t->ctx, t->device, options, &t->engine, &err) != MSC_OK)
        fail_msg("%s", err.message);
}

void training_close(training *t)
{
    msc_offload_destroy(t->engine);
    msc_device_destroy(t->device);
    msc_context_destroy(t->ctx);
    msc_context_destroy(t->device_ctx);
    assert_true(failing_alloc_is_clean(&t->heap));
    assert_true(failing_alloc_is_clean(&t->device_heap));
}

typedef struct piece {
    msc_ticket ticket;
    uint64_t bytes;
    uint64_t seed;
    void *source;
    void *destination;
    uint32_t group;
    bool settled;
    bool failed; /* the copy out was refused, or failed: the source is all there is */
    bool named;  /* by the engine, and not used since */
} piece;

static void must(msc_status status, const msc_error *err)
{
    if (status != MSC_OK)
        fail_msg("%s: %s", msc_status_name(status), err->message);
}

static uint64_t size_of(const training_step *step, uint32_t i)
{
    uint64_t seed = (step->same_sizes ? 0 : step->seed) * 1000 + i;

    return 1 + training_random(&seed) % step->most_bytes;
}

/* Asked in each of the two ways that do not wait, for some of the pieces. */
static msc_status ask_settled(training *t, const piece *p, msc_error *err)
{
    if (p->bytes % 4 == 1)
        return msc_offload_settled_of(t->engine, &p->ticket, 1) == 1 ? MSC_OK : MSC_EAGAIN;
    return p->bytes % 4 == 3 ? msc_offload_settled(t->engine, p->ticket, err) : MSC_EAGAIN;
}

/* The program takes its memory back: it is overwritten and gone, as another tensor would have it. */
static void settle(training *t, const training_step *step, piece *p)
{
    msc_error err;
    msc_status status;

    if (p->settled || p->failed)
        return;
    status = ask_settled(t, p, &err);
    if (status == MSC_EAGAIN)
        status = msc_offload_settle(t->engine, p->ticket, NULL, &err);
    p->failed = status == MSC_EDRIVER && step->copies_fail;
    if (p->failed)
        return;
    must(status, &err);
    p->settled = true;
    memset(p->source, 0xAA, (size_t)p->bytes);
    free(p->source);
    p->source = NULL;
}

static void forward(training *t, const training_step *step, piece *pieces)
{
    msc_error err;
    msc_status status;
    uint32_t i;

    for (i = 0; i < step->block_count; i++) {
        piece *p = &pieces[i];

        p->bytes = size_of(step, i);
        p->seed = step->seed * 4099 + i;
        if (step->group_size > 0 && i % step->group_size == 0)
            msc_offload_group_ahead(t->engine, step->ahead_bytes);
        p->group = step->group_size > 0 ? i / step->group_size : 0;
        p->source = malloc((size_t)p->bytes);
        assert_non_null(p->source);
        training_fill(p->source, p->bytes, p->seed);
        status = msc_offload_put(t->engine, p->source, p->bytes, NULL, &p->ticket, &err);
        p->failed = status == MSC_EAGAIN && step->may_be_refused;
        if (!p->failed)
            must(status, &err);
        if (i >= step->behind)
            settle(t, step, &pieces[i - step->behind]);
    }
    for (i = 0; i < step->block_count && !step->ends_early; i++)
        settle(t, step, &pieces[i]);
}

static piece *piece_of(piece *pieces, uint32_t count, msc_ticket ticket)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        if (pieces[i].ticket == ticket)
            return &pieces[i];
    fail_msg("the engine asks for a block that nobody put");
    return NULL;
}

/* Whether the copy out of a block that was not settled has failed; the source is still there. */
static bool has_failed(training *t, const training_step *step, piece *p)
{
    p->failed = p->failed || (step->copies_fail && !p->settled &&
                              msc_offload_settle(t->engine, p->ticket, NULL, NULL) == MSC_EDRIVER);
    return p->failed;
}

static void start(training *t, const training_step *step, piece *p)
{
    msc_error err;
    msc_status status;

    if (p->destination == NULL)
        p->destination = malloc((size_t)p->bytes);
    assert_non_null(p->destination);
    memset(p->destination, 0x55, (size_t)p->bytes);
    status = msc_offload_get(t->engine, p->ticket, p->destination, NULL, &err);
    if (status != MSC_ESTATE || !has_failed(t, step, p))
        must(status, &err);
}

/* Waits for a block. A copy back that failed is tried again, unless the copy out had failed before it. */
/* Half of the pieces are asked about first, as a program would that has other things to do. */
static msc_status await(training *t, const piece *p, msc_error *err)
{
    msc_status status = p->bytes % 2 ? msc_offload_arrived(t->engine, p->ticket, NULL, err) : MSC_EAGAIN;

    return status == MSC_EAGAIN ? msc_offload_arrive(t->engine, p->ticket, NULL, err) : status;
}

static void arrive(training *t, const training_step *step, piece *p)
{
    msc_error err;
    msc_status status = await(t, p, &err);

    while (status == MSC_EDRIVER && step->copies_fail && !has_failed(t, step, p)) {
        start(t, step, p);
        status = await(t, p, &err);
    }
    if (p->failed)
        return;
    must(status, &err);
}

/* `next` is named while `p` is in use: what was named of other groups than that of `p` is what they allow. */
static void check_early(const training_step *step, const piece *pieces, const piece *p, const piece *next)
{
    uint64_t early = 0;
    uint32_t i;

    for (i = 0; i < step->block_count && next->group != p->group; i++)
        if (pieces[i].named && pieces[i].group != p->group)
            early += pieces[i].bytes;
    if (early > step->ahead_bytes)
        fail_msg("%llu bytes are early", (unsigned long long)early);
}

static void use(training *t, const training_step *step, piece *pieces, piece *p)
{
    msc_ticket soon[8];
    uint32_t here = 0;
    uint32_t count = p->bytes % 4 < 2 ? msc_offload_use_on(t->engine, p->ticket, NULL, soon, 8, &here)
                                      : msc_offload_use(t->engine, p->ticket, soon, 8);
    uint32_t i;

    p->named = false;
    for (i = 0; i < count; i++) {
        piece *next = piece_of(pieces, step->block_count, soon[i]);

        next->named = next != p;
        check_early(step, pieces, p, next);
        if (!next->failed)
            start(t, step, next);
    }
    if (!p->failed && !here)
        arrive(t, step, p);
    if (!training_is(p->failed ? p->source : p->destination, p->bytes, p->seed))
        fail_msg("block of %llu bytes came back wrong", (unsigned long long)p->bytes);
}

static void end(training *t, piece *p)
{
    msc_offload_drop(t->engine, p->ticket);
    free(p->destination);
    free(p->source);
    p->destination = p->source = NULL;
    p->named = false;
}

/* A random order of 0 … count − 1. */
static void shuffle(uint32_t *order, uint32_t count, uint64_t seed)
{
    uint32_t i;

    for (i = 0; i < count; i++) {
        uint32_t j = (uint32_t)(training_random(&seed) % (i + 1));

        order[i] = order[j];
        order[j] = i;
    }
}

static uint32_t backward(training *t, const training_step *step, piece *pieces)
{
    uint32_t order[TRAINING_MOST_BLOCKS];
    uint32_t last = step->ends_early ? step->block_count / 2 : step->block_count;
    uint32_t i;

    for (i = 0; i < step->block_count; i++)
        order[i] = step->block_count - 1 - i;
    if (step->shuffled)
        shuffle(order, step->block_count, step->seed);
    for (i = 0; i < last; i++) {
        piece *p = &pieces[order[i]];

        use(t, step, pieces, p);
        if (step->twice)
            use(t, step, pieces, p);
        end(t, p);
    }
    for (; i < step->block_count; i++)
        end(t, &pieces[order[i]]);
    return last;
}

uint32_t training_run(training *t, const training_step *step)
{
    piece pieces[TRAINING_MOST_BLOCKS];

    assert_in_range(step->block_count, 1, TRAINING_MOST_BLOCKS);
    memset(pieces, 0, sizeof pieces);
    forward(t, step, pieces);
    return backward(t, step, pieces);
}
