/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranges against a map with one byte per unit, all invariants after every step; repeated steps; memory that runs
 * out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "context_fixture.h"
#include "offload/offload_ranges.h"
#include "oom/failing_alloc.h"

#define UNIT 512u
#define UNITS_MOST 4096u
#define OUT_MOST 256u

static uint64_t random_state;

static uint32_t next_random(uint32_t below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state % below);
}

static msc__ranges *make(msc_context *ctx, uint64_t capacity, uint64_t alignment)
{
    msc__ranges *ranges = NULL;

    assert_int_equal(msc__ranges_create(ctx, capacity, alignment, &ranges, NULL), MSC_OK);
    assert_true(msc__ranges_valid(ranges));
    return ranges;
}

static uint32_t take(msc__ranges *ranges, uint64_t size, uint64_t start_expected)
{
    uint64_t start = UINT64_MAX;
    uint32_t range = MSC_NONE;

    assert_int_equal(msc__ranges_take(ranges, size, &start, &range, NULL), MSC_OK);
    assert_true(msc__ranges_valid(ranges));
    assert_int_equal(start, start_expected);
    return range;
}

static void give(msc__ranges *ranges, uint32_t range)
{
    msc__ranges_give(ranges, range);
    assert_true(msc__ranges_valid(ranges));
}

/* ---- by hand --------------------------------------------------------------------------------------- */

static void sizes_are_exact(void **state)
{
    msc__ranges *ranges = make(*state, 100 * UNIT, UNIT);
    uint32_t a = take(ranges, 1, 0);
    uint32_t b = take(ranges, UNIT, UNIT);
    uint32_t c = take(ranges, UNIT + 1, 2 * UNIT);
    uint32_t d = take(ranges, 96 * UNIT, 4 * UNIT);
    uint64_t start;
    uint32_t range;

    assert_int_equal(msc__ranges_size_of(ranges, a), UNIT);
    assert_int_equal(msc__ranges_size_of(ranges, c), 2 * UNIT);
    assert_int_equal(msc__ranges_in_use(ranges).taken, 100 * UNIT);
    assert_int_equal(msc__ranges_in_use(ranges).count, 4);
    assert_int_equal(msc__ranges_in_use(ranges).largest, 0);
    assert_int_equal(msc__ranges_take(ranges, 1, &start, &range, NULL), MSC_EAGAIN);
    give(ranges, b);
    assert_int_equal(msc__ranges_in_use(ranges).largest, UNIT);
    give(ranges, d);
    give(ranges, c); /* joins on both sides */
    assert_int_equal(msc__ranges_in_use(ranges).largest, 99 * UNIT);
    give(ranges, a);
    assert_int_equal(msc__ranges_in_use(ranges).largest, 100 * UNIT);
    assert_int_equal(msc__ranges_in_use(ranges).taken, 0);
    give(ranges, take(ranges, 100 * UNIT, 0));
    msc__ranges_destroy(ranges);
}

/* What fits exactly is taken before something larger is cut, and what just fits is found in a full space. */
static void fits_are_good(void **state)
{
    msc__ranges *ranges = make(*state, 10000, 1);
    uint32_t wide, exact, tight;

    wide = take(ranges, 1030, 0);
    (void)take(ranges, 1, 1030);
    exact = take(ranges, 1028, 1031);
    (void)take(ranges, 1, 2059);
    tight = take(ranges, 1029, 2060);
    (void)take(ranges, 1, 3089);
    give(ranges, wide); /* all in one class, which begins at 1024 */
    give(ranges, exact);
    give(ranges, tight);
    (void)take(ranges, 1028, 1031);
    (void)take(ranges, 1026, 2060);
    (void)take(ranges, 1030, 0);
    assert_int_equal(msc__ranges_in_use(ranges).largest, 10000 - 3090);
    (void)take(ranges, 10000 - 3090, 3090);
    assert_int_equal(msc__ranges_in_use(ranges).largest, 3);
    msc__ranges_destroy(ranges);
}

/* More free ranges of the wanted class than the first look sees, the only one that fits at the list's end. */
static void what_fits_is_found(void **state)
{
    msc__ranges *ranges = make(*state, 0, 1);
    uint32_t out[100];
    uint64_t at = 0;
    uint64_t start;
    uint32_t range, i;

    assert_int_equal(msc__ranges_grow(ranges, UINT64_C(99) * 1025 + 1055 + 100, NULL), MSC_OK);
    for (i = 0; i < 100; i++) {
        uint64_t size = i == 0 ? 1055 : 1025;
        out[i] = take(ranges, size, at);
        (void)take(ranges, 1, at + size); /* keeps them apart */
        at += size + 1;
    }
    for (i = 0; i < 100; i++)
        give(ranges, out[i]);
    assert_int_equal(msc__ranges_in_use(ranges).largest, 1055);
    assert_int_equal(msc__ranges_take(ranges, 1056, &start, &range, NULL), MSC_EAGAIN);
    (void)take(ranges, 1050, 0);
    assert_int_equal(msc__ranges_take(ranges, 1050, &start, &range, NULL), MSC_EAGAIN);
    msc__ranges_destroy(ranges);
}

static void largest_spaces(void **state)
{
    msc__ranges *ranges = make(*state, 0, 1);
    uint64_t start;
    uint32_t range;
    msc_error err;

    assert_int_equal(msc__ranges_take(ranges, 1, &start, &range, NULL), MSC_EAGAIN);
    assert_int_equal(msc__ranges_grow(ranges, UINT64_MAX, NULL), MSC_OK);
    assert_int_equal(msc__ranges_grow(ranges, 1, &err), MSC_EOVERFLOW);
    assert_int_equal(msc__ranges_grow(ranges, 0, NULL), MSC_OK);
    give(ranges, take(ranges, UINT64_MAX, 0));
    (void)take(ranges, UINT64_C(1) << 63, 0);
    (void)take(ranges, (UINT64_C(1) << 63) - 1, UINT64_C(1) << 63);
    msc__ranges_destroy(ranges);

    ranges = make(*state, UINT64_MAX - 511, 512);
    assert_int_equal(msc__ranges_take(ranges, UINT64_MAX - 510, &start, &range, NULL), MSC_EAGAIN);
    (void)take(ranges, UINT64_MAX - 511, 0);
    msc__ranges_destroy(ranges);
}

static void refuses_what_makes_no_sense(void **state)
{
    msc_context *ctx = *state;
    msc__ranges *ranges = (msc__ranges *)state;
    uint64_t start;
    uint32_t range;
    msc_error err;

    assert_int_equal(msc__ranges_create(ctx, 0, 0, &ranges, &err), MSC_EINVAL);
    assert_null(ranges);
    assert_int_equal(msc__ranges_create(ctx, 0, 24, &ranges, &err), MSC_EINVAL);
    assert_int_equal(msc__ranges_create(ctx, 1000, 512, &ranges, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "1000"));
    assert_null(ranges);
    ranges = make(ctx, 1024, 512);
    assert_int_equal(msc__ranges_grow(ranges, 511, &err), MSC_EINVAL);
    assert_int_equal(msc__ranges_take(ranges, 0, &start, &range, &err), MSC_EINVAL);
    assert_true(msc__ranges_valid(ranges));
    assert_int_equal(msc__ranges_in_use(ranges).capacity, 1024);
    msc__ranges_destroy(ranges);
    msc__ranges_destroy(NULL);
}

/* ---- against a map --------------------------------------------------------------------------------- */

typedef struct book {
    msc__ranges *ranges;
    uint8_t map[UNITS_MOST]; /* 1: taken */
    uint32_t units;
    uint32_t count;
    struct {
        uint64_t start; /* in units */
        uint64_t size;
        uint32_t range;
    } out[OUT_MOST];
} book;

static uint32_t longest_free(const book *b)
{
    uint32_t longest = 0;
    uint32_t run = 0;
    uint32_t i;

    for (i = 0; i < b->units; i++) {
        run = b->map[i] != 0 ? 0 : run + 1;
        longest = run > longest ? run : longest;
    }
    return longest;
}

static void book_take(book *b)
{
    uint32_t exponent = next_random(10);
    uint64_t units = 1 + next_random(1u << exponent);
    uint64_t size = units * UNIT - next_random(UNIT);
    uint64_t start;
    uint32_t range;
    msc_status status = msc__ranges_take(b->ranges, size, &start, &range, NULL);
    uint64_t i;

    if (status != MSC_OK) {
        assert_int_equal(status, MSC_EAGAIN);
        assert_true(longest_free(b) < units); /* what fits is never refused */
        return;
    }
    assert_int_equal(start % UNIT, 0);
    assert_true(start / UNIT + units <= b->units);
    assert_int_equal(msc__ranges_size_of(b->ranges, range), units * UNIT);
    for (i = 0; i < units; i++)
        assert_int_equal(b->map[start / UNIT + i]++, 0);
    b->out[b->count].start = start / UNIT;
    b->out[b->count].size = units;
    b->out[b->count++].range = range;
}

static void book_give(book *b)
{
    uint32_t i = next_random(b->count);

    memset(b->map + b->out[i].start, 0, b->out[i].size);
    msc__ranges_give(b->ranges, b->out[i].range);
    b->out[i] = b->out[--b->count];
}

static void book_check(const book *b)
{
    msc__ranges_use use = msc__ranges_in_use(b->ranges);
    uint64_t taken = 0;
    uint32_t i;

    assert_true(msc__ranges_valid(b->ranges));
    for (i = 0; i < b->units; i++)
        taken += b->map[i];
    assert_int_equal(use.capacity, (uint64_t)b->units * UNIT);
    assert_int_equal(use.taken, taken * UNIT);
    assert_int_equal(use.largest, (uint64_t)longest_free(b) * UNIT);
    assert_int_equal(use.count, b->count);
}

static void random_steps(void **state)
{
    static book b;
    uint32_t seed, step;

    for (seed = 1; seed <= 8; seed++) {
        memset(&b, 0, sizeof b);
        random_state = seed * UINT64_C(0x9e3779b97f4a7c15);
        b.units = seed % 2 == 0 ? 0 : 1000;
        b.ranges = make(*state, (uint64_t)b.units * UNIT, UNIT);
        for (step = 0; step < 1500; step++) {
            uint32_t verb = next_random(100);
            if (verb < 2 && b.units < UNITS_MOST - 200) {
                uint32_t more = next_random(200);
                assert_int_equal(msc__ranges_grow(b.ranges, (uint64_t)more * UNIT, NULL), MSC_OK);
                b.units += more;
            } else if (b.count > 0 && (b.count == OUT_MOST || verb < 48)) {
                book_give(&b);
            } else {
                book_take(&b);
            }
            book_check(&b);
        }
        while (b.count > 0)
            book_give(&b);
        book_check(&b);
        assert_int_equal(msc__ranges_in_use(b.ranges).largest, (uint64_t)b.units * UNIT);
        msc__ranges_destroy(b.ranges);
    }
}

/* ---- steps that repeat ------------------------------------------------------------------------------ */

#define STEP_RANGES 60u

/* A training step: sizes of a forward pass are taken in order and given back in reverse, some of them early. */
static void play_step(msc__ranges *ranges, const uint64_t *sizes)
{
    uint32_t out[STEP_RANGES];
    uint32_t i;

    for (i = 0; i < STEP_RANGES; i++) {
        uint64_t start;
        while (msc__ranges_take(ranges, sizes[i], &start, &out[i], NULL) != MSC_OK)
            assert_int_equal(msc__ranges_grow(ranges, UINT64_C(64) * UNIT, NULL), MSC_OK);
        if (i % 5 == 4) {
            msc__ranges_give(ranges, out[i - 2]);
            out[i - 2] = MSC_NONE;
        }
    }
    for (i = STEP_RANGES; i-- > 0;)
        if (out[i] != MSC_NONE)
            msc__ranges_give(ranges, out[i]);
    assert_true(msc__ranges_valid(ranges));
}

static void repeated_steps_do_not_grow(void **state)
{
    msc_context *ctx = *state;
    msc__ranges *ranges = make(ctx, 0, UNIT);
    uint64_t sizes[STEP_RANGES];
    uint64_t held, capacity;
    uint32_t i;

    random_state = 7;
    for (i = 0; i < STEP_RANGES; i++)
        sizes[i] = 1 + next_random(100 * UNIT);
    play_step(ranges, sizes);
    capacity = msc__ranges_in_use(ranges).capacity;
    held = msc_context_held_bytes(ctx);
    for (i = 0; i < 1000; i++)
        play_step(ranges, sizes);
    assert_int_equal(msc__ranges_in_use(ranges).capacity, capacity);
    assert_int_equal(msc_context_held_bytes(ctx), held);
    msc__ranges_destroy(ranges);
}

/* ---- memory that runs out --------------------------------------------------------------------------- */

/* False if something could not be had; then nothing may have changed. */
static int fill_and_empty(msc__ranges *ranges)
{
    uint32_t out[100];
    uint32_t count, i;
    uint64_t start;
    int complete;

    if (msc__ranges_grow(ranges, 1000, NULL) != MSC_OK) {
        assert_int_equal(msc__ranges_in_use(ranges).capacity, 0);
        return 0;
    }
    for (count = 0; count < 100; count++) {
        msc_status status = msc__ranges_take(ranges, 2, &start, &out[count], NULL);
        assert_true(msc__ranges_valid(ranges));
        if (status != MSC_OK) {
            assert_int_equal(status, MSC_ENOMEM);
            break;
        }
    }
    complete = count == 100;
    assert_int_equal(msc__ranges_in_use(ranges).taken, count * 2);
    for (i = 0; i < count; i += 2) /* giving back cannot fail, not even into the worst pieces */
        msc__ranges_give(ranges, out[i]);
    for (i = 1; i < count; i += 2)
        msc__ranges_give(ranges, out[i]);
    assert_true(msc__ranges_valid(ranges));
    assert_int_equal(msc__ranges_in_use(ranges).largest, 1000);
    return complete;
}

static void without_memory(void **state)
{
    failing_alloc *heap = malloc(sizeof *heap);
    uint64_t n;
    int complete = 0;

    (void)state;
    assert_non_null(heap);
    for (n = 0; !complete; n++) {
        msc__ranges *ranges = NULL;
        msc_context *ctx;
        failing_alloc_init(heap, n);
        heap->fail_rest = true;
        ctx = failing_alloc_context(heap);
        if (ctx != NULL) {
            msc_status status = msc__ranges_create(ctx, 0, 1, &ranges, NULL);
            assert_true(status == MSC_OK ? ranges != NULL : status == MSC_ENOMEM && ranges == NULL);
            complete = status == MSC_OK && fill_and_empty(ranges);
            msc__ranges_destroy(ranges);
        }
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(heap));
    }
    assert_true(n >= 5); /* the context, the object, its records, and these again as they grow */
    free(heap);
}

/* ---- group ---------------------------------------------------------------------------------------- */

int main(void)
{
    const struct CMUnitTest tests[] = {
        context_test(sizes_are_exact),
        context_test(fits_are_good),
        context_test(what_fits_is_found),
        context_test(largest_spaces),
        context_test(refuses_what_makes_no_sense),
        context_test(random_steps),
        context_test(repeated_steps_do_not_grow),
        cmocka_unit_test(without_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
