/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs: what is mapped never passes the limit, blocks do not overlap, sizes go where they belong, and what the
 * system refuses leaves nothing behind. Blocks are mostly not written, so that large ones cost nothing here.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "context_fixture.h"
#include "offload/offload_slabs.h"
#include "oom/failing_alloc.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define PAGE ((uint64_t)sysconf(_SC_PAGESIZE))
#define BLOCKS 200u

static msc__slabs *make(msc_context *ctx, msc_device *device, uint64_t limit_bytes)
{
    msc__slabs *slabs = NULL;

    assert_int_equal(msc__slabs_create(ctx, device, limit_bytes, &slabs, NULL), MSC_OK);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 0);
    return slabs;
}

static msc__slab_block take(msc__slabs *slabs, uint64_t bytes)
{
    msc__slab_block block;

    assert_int_equal(msc__slabs_take(slabs, bytes, &block, NULL), MSC_OK);
    assert_non_null(block.memory);
    assert_int_equal((uintptr_t)block.memory % MSC__SLAB_ALIGNMENT, 0);
    return block;
}

static void refuses(msc__slabs *slabs, uint64_t bytes)
{
    msc__slab_block block;
    msc_error err = {.status = MSC_OK};

    assert_int_equal(msc__slabs_take(slabs, bytes, &block, &err), MSC_EAGAIN);
    assert_null(block.memory);
    assert_int_equal(err.status, MSC_OK); /* no message */
}

static msc_device *host(msc_context *ctx, uint64_t pin_limit_bytes, uint32_t refuse_pins)
{
    msc_device_options options = msc_device_options_default();
    msc_device *device = NULL;

    options.faults.pin_limit_bytes = pin_limit_bytes;
    options.faults.refuse_pins = refuse_pins;
    assert_int_equal(msc_device_create(ctx, &options, &device, NULL), MSC_OK);
    return device;
}

/* ---- sizes and kinds ------------------------------------------------------------------------------- */

static void small_blocks_share(void **state)
{
    msc__slabs *slabs = make(*state, NULL, 1024 * MIB);
    msc__slab_block blocks[8];
    uint32_t i;

    for (i = 0; i < 8; i++) {
        blocks[i] = take(slabs, 8 * MIB);
        assert_int_equal(blocks[i].slab, 0);
        assert_ptr_equal(blocks[i].memory, (char *)blocks[0].memory + i * 8 * MIB);
    }
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 64 * MIB);
    assert_int_equal(take(slabs, 1).slab, 1);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 128 * MIB);
    assert_int_equal(msc__slabs_in_use(slabs).taken_bytes, 64 * MIB + 512);
    assert_int_equal(msc__slabs_in_use(slabs).block_count, 9);
    msc__slabs_give(slabs, blocks[3]);
    assert_ptr_equal(take(slabs, 8 * MIB).memory, blocks[3].memory);
    msc__slabs_destroy(slabs);
}

static void large_blocks_have_their_own(void **state)
{
    msc__slabs *slabs = make(*state, NULL, 1024 * MIB);
    msc__slab_block larger = take(slabs, 300 * MIB);
    msc__slab_block large;

    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 300 * MIB);
    large = take(slabs, 40 * MIB + 1);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 340 * MIB + PAGE);
    msc__slabs_give(slabs, larger);
    msc__slabs_give(slabs, large);
    /* A small one does not nibble at them, a large one takes the smallest that it fills for the most part. */
    assert_int_equal(take(slabs, 100).slab, 2);
    assert_int_equal(take(slabs, 40 * MIB).slab, large.slab);
    assert_int_equal(take(slabs, 270 * MIB).slab, larger.slab);
    assert_int_equal(take(slabs, 25 * MIB).slab, larger.slab); /* which has begun */
    assert_int_equal(take(slabs, 41 * MIB).slab, 3);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 445 * MIB + PAGE);
    msc__slabs_destroy(slabs);
}

static void limit_is_exact(void **state)
{
    msc__slabs *slabs = make(*state, NULL, 100 * MIB + PAGE - 1);
    msc__slab_block large = take(slabs, 90 * MIB);

    refuses(slabs, 10 * MIB + 1);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 90 * MIB);
    (void)take(slabs, 6 * MIB); /* a shared slab of what is left */
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 100 * MIB);
    (void)take(slabs, 4 * MIB);
    refuses(slabs, 1);
    msc__slabs_give(slabs, large); /* it makes room for one of small ones, and for another */
    assert_int_equal(take(slabs, 100).slab, large.slab);
    (void)take(slabs, 26 * MIB);
    (void)take(slabs, 63 * MIB); /* now anything goes wherever it fits */
    refuses(slabs, 1 * MIB);
    refuses(slabs, UINT64_MAX);
    refuses(slabs, UINT64_MAX - PAGE);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 100 * MIB);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_peak_bytes, 100 * MIB);
    msc__slabs_destroy(slabs);
}

static void limits_below_a_page(void **state)
{
    static const uint64_t limits[] = {0, 1, 4095};
    msc__slabs *slabs;
    size_t i;

    for (i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        slabs = make(*state, NULL, limits[i]);
        refuses(slabs, 1);
        msc__slabs_destroy(slabs);
    }
    slabs = make(*state, NULL, PAGE);
    (void)take(slabs, PAGE - 512);
    (void)take(slabs, 512);
    refuses(slabs, 1);
    msc__slabs_destroy(slabs);
    msc__slabs_destroy(NULL);
}

static void no_block_of_nothing(void **state)
{
    msc__slabs *slabs = make(*state, NULL, MIB);
    msc__slab_block block;
    msc_error err;

    assert_int_equal(msc__slabs_take(slabs, 0, &block, &err), MSC_EINVAL);
    assert_null(block.memory);
    msc__slabs_destroy(slabs);
}

/* What would be refused gets the place of slabs that are empty, and of no more of them than it needs. */
static void empty_slabs_make_room(void **state)
{
    msc_context *ctx = *state;
    msc__slabs *slabs = make(ctx, NULL, 200 * MIB);
    msc__slab_block a = take(slabs, 100 * MIB);
    msc__slab_block b = take(slabs, 64);
    msc__slab_block c;

    refuses(slabs, 120 * MIB);
    msc__slabs_give(slabs, a);
    refuses(slabs, 137 * MIB);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 164 * MIB); /* nothing went in vain */
    c = take(slabs, 120 * MIB);
    assert_int_equal(c.slab, a.slab); /* its number is used again */
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 184 * MIB);
    msc__slabs_give(slabs, b);
    msc__slabs_give(slabs, c);
    a = take(slabs, 60 * MIB); /* in the place of the smallest that is enough */
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 180 * MIB);
    b = take(slabs, 130 * MIB);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 190 * MIB);
    refuses(slabs, 11 * MIB);
    msc__slabs_give(slabs, a);
    msc__slabs_give(slabs, b);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_peak_bytes, 190 * MIB);
    assert_int_equal(msc__slabs_in_use(slabs).block_count, 0);
    msc__slabs_destroy(slabs);
}

/* Shapes that grow from step to step, or become smaller, have seven eighths of the limit each time: what plans count. */
static void other_shapes_have_the_limit(void **state)
{
    const uint64_t limit = 1024 * MIB;
    msc__slabs *slabs = make(*state, NULL, limit);
    msc__slab_block blocks[64];
    uint64_t size, count, step, i;

    for (step = 0; step < 50; step++) {
        size = (step < 30 ? 100 + step : 130 - 5 * (step - 29)) * MIB;
        for (count = 0; count < limit * 7 / 8 / size; count++)
            blocks[count] = take(slabs, size);
        assert_true(msc__slabs_in_use(slabs).mapped_bytes <= limit);
        for (i = 0; i < count; i++)
            msc__slabs_give(slabs, blocks[i]);
    }
    for (i = 0; i < 896; i++) /* and then small ones */
        (void)take(slabs, MIB);
    msc__slabs_destroy(slabs);
}

/* Without the system. */
static void now_asks_for_nothing(void **state)
{
    msc__slabs *slabs = make(*state, NULL, 100 * MIB);
    msc__slab_block block;
    msc__slab_block small;

    assert_int_equal(msc__slabs_take_now(slabs, MIB, &small, NULL), MSC_ETIMEDOUT);
    assert_null(small.memory);
    small = take(slabs, MIB);
    msc__slabs_give(slabs, small);
    assert_int_equal(msc__slabs_take_now(slabs, MIB, &small, NULL), MSC_OK);
    assert_int_equal(msc__slabs_take_now(slabs, 20 * MIB, &block, NULL), MSC_ETIMEDOUT);
    assert_int_equal(msc__slabs_take_now(slabs, 40 * MIB, &block, NULL), MSC_OK); /* where it fits */
    assert_int_equal(block.slab, small.slab);
    assert_int_equal(msc__slabs_take_now(slabs, 90 * MIB, &small, NULL), MSC_EAGAIN);
    msc__slabs_give(slabs, block);
    block = take(slabs, 30 * MIB);
    msc__slabs_give(slabs, block);
    assert_int_equal(msc__slabs_take_now(slabs, 36 * MIB, &block, NULL), MSC_OK);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 94 * MIB);
    assert_int_equal(msc__slabs_take_now(slabs, 32 * MIB, &small, NULL), MSC_ETIMEDOUT); /* one is empty */
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 94 * MIB);
    msc__slabs_destroy(slabs);
}

static void stopped_slabs_map_no_more(void **state)
{
    msc__slabs *slabs = make(*state, NULL, 1024 * MIB);
    msc__slab_block block = take(slabs, 64 * MIB);

    msc__slabs_stop(slabs);
    refuses(slabs, 1);
    msc__slabs_give(slabs, block);
    block = take(slabs, 1); /* what is there may be used, by any size */
    refuses(slabs, 64 * MIB);
    msc__slabs_give(slabs, block);
    refuses(slabs, 65 * MIB);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_peak_bytes, 64 * MIB);
    msc__slabs_destroy(slabs);
}

/* ---- many blocks ----------------------------------------------------------------------------------- */

/* Fills each block with its number and looks at it when it is given back. */
static void blocks_do_not_overlap(void **state)
{
    const uint64_t limit = 12 * MIB;
    msc__slabs *slabs = make(*state, NULL, limit);
    msc__slab_block blocks[BLOCKS] = {{0}};
    uint64_t sizes[BLOCKS] = {0};
    uint64_t random = 88172645463325252u;
    uint64_t taken = 0;
    uint32_t step;

    for (step = 0; step < 4000; step++) {
        uint32_t i;
        uint64_t k;
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        i = (uint32_t)(random % BLOCKS);
        if (blocks[i].memory != NULL) {
            const unsigned char *bytes = blocks[i].memory;
            for (k = 0; k < sizes[i]; k += 511)
                assert_int_equal(bytes[k], i);
            assert_int_equal(bytes[sizes[i] - 1], i);
            msc__slabs_give(slabs, blocks[i]);
            blocks[i].memory = NULL;
            taken -= (sizes[i] + 511) / 512 * 512;
        } else {
            sizes[i] = 1 + (random >> 20) % (random >> 63 != 0 ? 300 * KIB : 3 * KIB);
            if (msc__slabs_take(slabs, sizes[i], &blocks[i], NULL) == MSC_OK) {
                memset(blocks[i].memory, (int)i, sizes[i]);
                taken += (sizes[i] + 511) / 512 * 512;
            }
        }
        assert_int_equal(msc__slabs_in_use(slabs).taken_bytes, taken);
        assert_true(msc__slabs_in_use(slabs).mapped_bytes <= limit);
    }
    msc__slabs_destroy(slabs);
}

/* A step that repeats maps nothing new and asks the context for nothing. */
static void repeated_steps_are_still(void **state)
{
    msc_context *ctx = *state;
    msc__slabs *slabs = make(ctx, NULL, 4096 * MIB);
    msc__slab_block blocks[40];
    uint64_t mapped = 0;
    uint64_t held = 0;
    uint32_t step, i;

    for (step = 0; step < 1000; step++) {
        for (i = 0; i < 40; i++)
            blocks[i] = take(slabs, (i * UINT64_C(7919) % 41 + 1) * MIB / 2 + i);
        for (i = 40; i-- > 0;)
            msc__slabs_give(slabs, blocks[i]);
        if (step == 0) {
            mapped = msc__slabs_in_use(slabs).mapped_bytes;
            held = msc_context_held_bytes(ctx);
        }
        assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, mapped);
        assert_int_equal(msc_context_held_bytes(ctx), held);
    }
    msc__slabs_destroy(slabs);
}

/* ---- pinning --------------------------------------------------------------------------------------- */

static void slabs_are_pinned(void **state)
{
    msc_context *ctx = *state;
    msc_device *device = host(ctx, 64 * MIB, 0);
    msc__slabs *slabs = make(ctx, device, 1024 * MIB);
    msc__slab_block small = take(slabs, 1);
    msc__slab_block block;
    msc_error err;

    /* The second slab is refused: nothing stays mapped, and what fits in the first is still to be had. */
    assert_int_equal(msc__slabs_take(slabs, 64 * MIB, &block, &err), MSC_ENOMEM);
    assert_null(block.memory);
    assert_non_null(strstr(err.message, "pin"));
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 64 * MIB);
    err.status = MSC_OK;
    assert_int_equal(msc__slabs_take(slabs, 60 * MIB, &block, &err), MSC_OK);
    assert_int_equal(err.status, MSC_OK);
    assert_int_equal(block.slab, small.slab);
    /* Unpinned when it is unmapped, or it could not be pinned again. */
    msc__slabs_give(slabs, small);
    msc__slabs_give(slabs, block);
    assert_int_equal(msc__slabs_take(slabs, 65 * MIB, &block, &err), MSC_ENOMEM);
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes,
                     64 * MIB); /* one more MiB than there is to give back */
    msc__slabs_destroy(slabs);
    slabs = make(ctx, device, 1024 * MIB);
    small = take(slabs, 30 * MIB);
    block = take(slabs, 34 * MIB);
    msc__slabs_give(slabs, small);
    msc__slabs_give(slabs, block);
    (void)take(slabs, 64 * MIB); /* refused by the system, too, until both are back */
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 64 * MIB);
    msc__slabs_destroy(slabs);
    slabs = make(ctx, device, 1024 * MIB);
    (void)take(slabs, 64 * MIB);
    msc__slabs_destroy(slabs);
    msc_device_destroy(device);
}

/* Pages of address space that the process has. */
static unsigned long address_space(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;

    assert_non_null(file);
    assert_int_equal(fscanf(file, "%lu", &pages), 1);
    (void)fclose(file);
    return pages;
}

static void pins_that_are_refused(void **state)
{
    msc_context *ctx = *state;
    msc_device *device = host(ctx, 0, 1);
    msc__slabs *slabs = make(ctx, device, 1024 * MIB);
    msc__slab_block block;
    unsigned long pages = 0;
    uint64_t held = 0;
    uint32_t i;

    for (i = 0; i < 100; i++) {
        msc_error err = {.status = MSC_OK};
        assert_int_equal(msc__slabs_take(slabs, 1000, &block, &err), MSC_ENOMEM);
        assert_int_equal(err.status, MSC_ENOMEM);
        assert_int_equal(msc__slabs_take(slabs, 1000, &block, NULL), MSC_ENOMEM);
        assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 0);
        assert_int_equal(msc__slabs_in_use(slabs).mapped_peak_bytes, 0);
        if (i == 0) {
            held = msc_context_held_bytes(ctx);
            pages = address_space();
        }
        assert_int_equal(msc_context_held_bytes(ctx), held);
    }
    assert_true((address_space() - pages) * PAGE < 64 * MIB); /* not one of them stayed mapped */
    msc__slabs_destroy(slabs);
    msc_device_destroy(device);
}

static void devices_that_cannot_pin(void **state)
{
    msc_device_ops ops = {.pin = NULL};
    msc_device device = {.ops = &ops, .name = "plain"};
    msc__slabs *slabs = (msc__slabs *)state;
    msc_error err;

    assert_int_equal(msc__slabs_create(*state, &device, MIB, &slabs, &err), MSC_EUNSUPPORTED);
    assert_null(slabs);
    assert_non_null(strstr(err.message, "plain"));
}

/* More than any machine has: the system's refusal is told, with its number. */
static void maps_that_are_refused(void **state)
{
    msc__slabs *slabs = make(*state, NULL, UINT64_MAX);
    msc__slab_block block;
    msc_error err;

    assert_int_equal(msc__slabs_take(slabs, UINT64_C(1) << 62, &block, &err), MSC_ENOMEM);
    assert_true(err.driver_code != 0);
    assert_non_null(strstr(err.message, "map"));
    assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, 0);
    msc__slabs_destroy(slabs);
}

/* ---- the context's memory -------------------------------------------------------------------------- */

static void without_memory(void **state)
{
    failing_alloc *heap = malloc(sizeof *heap);
    uint64_t n;
    bool complete = false;

    (void)state;
    assert_non_null(heap);
    for (n = 0; !complete; n++) {
        msc__slabs *slabs = NULL;
        msc_context *ctx;
        uint32_t i;
        failing_alloc_init(heap, n);
        ctx = failing_alloc_context(heap);
        if (ctx != NULL && msc__slabs_create(ctx, NULL, 300 * MIB, &slabs, NULL) == MSC_OK) {
            for (i = 0; i < 30; i++) {
                msc__slab_block block;
                uint64_t mapped = msc__slabs_in_use(slabs).mapped_bytes;
                msc_status status = msc__slabs_take(slabs, i % 5 == 0 ? 9 * MIB : 600, &block, NULL);
                if (status == MSC_OK)
                    continue;
                assert_int_equal(status, MSC_ENOMEM);
                assert_null(block.memory);
                assert_int_equal(msc__slabs_in_use(slabs).mapped_bytes, mapped);
            }
        }
        complete = heap->failed_count == 0;
        msc__slabs_destroy(slabs);
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(heap));
    }
    assert_true(n > 10);
    free(heap);
}

/* ---- forks ----------------------------------------------------------------------------------------- */

/* A child has no part in the slabs, and ending it does the parent no harm. */
static void forked_children_stay_out(void **state)
{
    msc__slabs *slabs = make(*state, NULL, 4 * PAGE);
    unsigned char *memory = take(slabs, 100).memory;
    unsigned char seen = 0;
    int pipes[2];
    int ended = 0;
    pid_t child;

    memory[0] = 1;
    assert_int_equal(pipe(pipes), 0);
    child = fork();
    if (child == 0) { /* the system reads for it: EFAULT, where a plain read would show as a crash */
        (void)!write(pipes[1], memory, 1);
        (void)raise(SIGKILL);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL);
    memory[0] = 2;
    assert_int_equal(write(pipes[1], memory, 1), 1);
    assert_int_equal(read(pipes[0], &seen, 1), 1);
    assert_int_equal(seen, 2);
    (void)close(pipes[0]);
    (void)close(pipes[1]);
    msc__slabs_destroy(slabs);
}

/* ---- group ---------------------------------------------------------------------------------------- */

int main(void)
{
    const struct CMUnitTest tests[] = {
        context_test(small_blocks_share),
        context_test(large_blocks_have_their_own),
        context_test(limit_is_exact),
        context_test(limits_below_a_page),
        context_test(no_block_of_nothing),
        context_test(empty_slabs_make_room),
        context_test(other_shapes_have_the_limit),
        context_test(now_asks_for_nothing),
        context_test(stopped_slabs_map_no_more),
        context_test(blocks_do_not_overlap),
        context_test(repeated_steps_are_still),
        context_test(slabs_are_pinned),
        context_test(pins_that_are_refused),
        context_test(devices_that_cannot_pin),
        context_test(maps_that_are_refused),
        cmocka_unit_test(without_memory),
        context_test(forked_children_stay_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
