/* SPDX-License-Identifier: Apache-2.0 */
/* The block table, neighbours, and free sets against a sorted array. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "sim/sim_blocks.h"

typedef struct fixture {
    msc_context *ctx;
    msc__sim_blocks blocks;
    msc__sim_set set;
} fixture;

static int setup(void **state)
{
    static fixture f;

    f = (fixture){0};
    assert_int_equal(msc_context_create(NULL, &f.ctx, NULL), MSC_OK);
    assert_int_equal(msc__sim_blocks_reserve(f.ctx, &f.blocks, 2000, NULL), MSC_OK);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;

    msc__sim_blocks_fini(f->ctx, &f->blocks);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
    return 0;
}

static uint32_t add(fixture *f, uint64_t size_bytes, uint64_t address)
{
    uint32_t slot = msc__sim_blocks_take(&f->blocks);
    msc__sim_block *block = msc__sim_block_at(&f->blocks, slot);

    block->size_bytes = size_bytes;
    block->address = address;
    block->state = MSC__SIM_FREE;
    msc__sim_set_insert(&f->blocks, &f->set, slot);
    return slot;
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void classes(void **state)
{
    static const struct {
        uint64_t size_bytes;
        uint32_t class_index;
    } cases[] = {
        {512, 1},       {512 * 15, 15}, {512 * 16, 16},  {512 * 31, 31},
        {512 * 32, 32}, {512 * 33, 32}, {512 * 34, 33},  {512 * 63, 47},
        {512 * 64, 48}, {2097152, 144}, {20971520, 196}, {MSC__SIM_MOST_BYTES, 800},
        {1048576, 128},
    };
    uint64_t size;
    size_t i;

    (void)state;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(msc__sim_class_of(cases[i].size_bytes), cases[i].class_index);
    for (size = 512; size < 64u * 1024 * 1024; size += 512) {
        uint32_t step = msc__sim_class_of(size + 512) - msc__sim_class_of(size);
        assert_true(step <= 1); /* larger sizes never have a smaller class, and no class is skipped */
    }
    assert_true(msc__sim_class_of(MSC__SIM_MOST_BYTES) < MSC__SIM_CLASS_COUNT);
}

static void slots_are_reused(void **state)
{
    fixture *f = *state;
    uint32_t a = msc__sim_blocks_take(&f->blocks);
    uint32_t b = msc__sim_blocks_take(&f->blocks);

    assert_int_equal(a, 1);
    assert_int_equal(b, 2);
    msc__sim_block_at(&f->blocks, a)->state = MSC__SIM_FREE;
    msc__sim_blocks_give(&f->blocks, a);
    assert_int_equal(f->blocks.used_count, 1);
    assert_int_equal(msc__sim_blocks_take(&f->blocks), a);
    assert_int_equal(msc__sim_blocks_take(&f->blocks), 3);
    assert_int_equal(msc__sim_block_at(&f->blocks, a)->state, MSC__SIM_EMPTY);
    assert_int_equal(msc__sim_block_at(&f->blocks, a)->next, 0);
}

static void reserve_keeps_its_word(void **state)
{
    fixture *f = *state;
    uint32_t capacity;
    uint32_t i;

    assert_int_equal(msc__sim_blocks_reserve(f->ctx, &f->blocks, 5000, NULL), MSC_OK);
    capacity = f->blocks.slots.capacity;
    assert_true(capacity >= 5001);
    for (i = 0; i < 5000; i++)
        (void)msc__sim_blocks_take(&f->blocks);
    assert_int_equal(f->blocks.slots.count, 5001);
    assert_int_equal(f->blocks.slots.capacity, capacity);
}

static void reserve_reports_too_many(void **state)
{
    fixture *f = *state;
    msc_error err;

    assert_int_equal(msc__sim_blocks_reserve(f->ctx, &f->blocks, UINT64_MAX / 2, &err), MSC_EOVERFLOW);
    assert_int_equal(msc__sim_blocks_reserve(f->ctx, &f->blocks, UINT32_MAX - 1u, &err), MSC_EOVERFLOW);
    assert_int_equal(f->blocks.used_count, 0);
}

static void split_and_absorb(void **state)
{
    fixture *f = *state;
    uint32_t a = msc__sim_blocks_take(&f->blocks);
    uint32_t b, c;

    msc__sim_block_at(&f->blocks, a)->address = 4096;
    msc__sim_block_at(&f->blocks, a)->size_bytes = 3072;
    msc__sim_block_at(&f->blocks, a)->set_index = 5;
    msc__sim_block_at(&f->blocks, a)->state = MSC__SIM_FREE;
    c = msc__sim_blocks_split(&f->blocks, a, 2048);
    b = msc__sim_blocks_split(&f->blocks, a, 512);
    assert_int_equal(msc__sim_block_at(&f->blocks, a)->next, b);
    assert_int_equal(msc__sim_block_at(&f->blocks, b)->next, c);
    assert_int_equal(msc__sim_block_at(&f->blocks, c)->prev, b);
    assert_int_equal(msc__sim_block_at(&f->blocks, b)->prev, a);
    assert_int_equal(msc__sim_block_at(&f->blocks, b)->address, 4608);
    assert_int_equal(msc__sim_block_at(&f->blocks, b)->size_bytes, 1536);
    assert_int_equal(msc__sim_block_at(&f->blocks, c)->address, 6144);
    assert_int_equal(msc__sim_block_at(&f->blocks, c)->set_index, 5);
    msc__sim_blocks_absorb(&f->blocks, b, a); /* downwards */
    assert_int_equal(msc__sim_block_at(&f->blocks, b)->address, 4096);
    assert_int_equal(msc__sim_block_at(&f->blocks, b)->prev, 0);
    msc__sim_blocks_absorb(&f->blocks, b, c); /* upwards */
    assert_int_equal(msc__sim_block_at(&f->blocks, b)->size_bytes, 3072);
    assert_int_equal(msc__sim_block_at(&f->blocks, b)->next, 0);
    assert_int_equal(f->blocks.used_count, 1);
}

static void empty_set(void **state)
{
    fixture *f = *state;

    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 512, 0), 0);
    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, MSC__SIM_MOST_BYTES, 0), 0);
    assert_int_equal(msc__sim_set_largest(&f->blocks, &f->set), 0);
}

static void ties_go_to_the_lowest_address(void **state)
{
    fixture *f = *state;
    uint32_t high = add(f, 4096, 9000);
    uint32_t low = add(f, 4096, 1000);
    uint32_t middle = add(f, 4096, 5000);

    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 4096, 0), low);
    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 512, 0), low);
    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 4096, 1000), low);
    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 4096, 1001), middle);
    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 4096, 5001), high);
    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 4096, 9001), 0);
    assert_int_equal(msc__sim_set_largest(&f->blocks, &f->set), high);
}

/* 33 and 32 granules share a class, so the tree and not the bitmap must decide. */
static void exact_within_a_class(void **state)
{
    fixture *f = *state;
    uint32_t small = add(f, 512 * 32, 9000);
    uint32_t large = add(f, 512 * 33, 1000);

    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 512 * 32, 0), small);
    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 512 * 33, 0), large);
    msc__sim_set_erase(&f->blocks, &f->set, large);
    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 512 * 33, 0), 0);
    msc__sim_set_erase(&f->blocks, &f->set, small);
    assert_int_equal(f->set.summary, 0);
}

static void classes_far_apart(void **state)
{
    fixture *f = *state;
    uint32_t huge = add(f, MSC__SIM_MOST_BYTES / 2, 4096);

    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, 512, 0), huge);
    assert_int_equal(msc__sim_set_largest(&f->blocks, &f->set), huge);
    assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, MSC__SIM_MOST_BYTES, 0), 0);
}

#define POOL 600u

/* Best entry of a plain list, by looking at all of it. */
static uint32_t reference_bound(const fixture *f, const uint32_t *slots, uint32_t count, uint64_t size_bytes,
                                uint64_t address)
{
    const msc__sim_block *best = NULL;
    uint32_t best_slot = 0;
    uint32_t i;

    for (i = 0; i < count; i++) {
        const msc__sim_block *b = msc__sim_block_at(&f->blocks, slots[i]);
        if (b->size_bytes < size_bytes || (b->size_bytes == size_bytes && b->address < address))
            continue;
        if (best == NULL || b->size_bytes < best->size_bytes ||
            (b->size_bytes == best->size_bytes && b->address < best->address)) {
            best = b;
            best_slot = slots[i];
        }
    }
    return best_slot;
}

/* `sizes` small: many equal blocks in few trees; large: few blocks in each of many. */
static void random_against_a_list(fixture *f, uint64_t sizes)
{
    uint32_t slots[POOL];
    uint64_t seed = 88172645463325252u + sizes;
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < 20000; i++) {
        uint64_t size = 512 * (1 + next_random(&seed) % sizes);
        uint64_t address = next_random(&seed) % 3 == 0 ? 0 : 512 * (next_random(&seed) % 100000);
        if (count < POOL && next_random(&seed) % 2 == 0) {
            slots[count++] = add(f, size, (uint64_t)512 * 128 * i + address);
        } else if (count > 0) {
            uint32_t pick = (uint32_t)(next_random(&seed) % count);
            msc__sim_set_erase(&f->blocks, &f->set, slots[pick]);
            msc__sim_blocks_give(&f->blocks, slots[pick]);
            slots[pick] = slots[--count];
        }
        assert_int_equal(msc__sim_set_lower_bound(&f->blocks, &f->set, size, address),
                         reference_bound(f, slots, count, size, address));
    }
}

static void random_few_sizes(void **state)
{
    random_against_a_list(*state, 3);
}

static void random_many_sizes(void **state)
{
    random_against_a_list(*state, 40000);
}

#define CASE(name, function)                                                                                 \
    {                                                                                                        \
        name, function, setup, teardown, NULL                                                                \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE("class/table-and-order", classes),
        CASE("table/slots-are-reused", slots_are_reused),
        CASE("table/reserve-keeps-its-word", reserve_keeps_its_word),
        CASE("table/too-many-blocks", reserve_reports_too_many),
        CASE("neighbours/split-and-absorb", split_and_absorb),
        CASE("set/empty", empty_set),
        CASE("set/ties-go-to-the-lowest-address", ties_go_to_the_lowest_address),
        CASE("set/exact-within-a-class", exact_within_a_class),
        CASE("set/classes-far-apart", classes_far_apart),
        CASE("set/random-few-sizes", random_few_sizes),
        CASE("set/random-many-sizes", random_many_sizes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
