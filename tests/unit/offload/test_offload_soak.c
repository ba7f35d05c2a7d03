/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine under trouble: copies that are late, slow, torn in two and fail, in every tier, with every order of
 * uses, by random seed. `test_offload_soak RUNS FIRST_SEED`; a seed that fails can be run alone.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "offload_training.h"

static uint64_t run_count = 40;
static uint64_t first_seed = 1;

static uint64_t pick(uint64_t *seed, uint64_t most)
{
    return training_random(seed) % (most + 1);
}

static msc_device_faults pick_faults(uint64_t *seed)
{
    msc_device_faults faults = {.seed = training_random(seed)};

    faults.delay_most_ns = pick(seed, 1) ? (int64_t)pick(seed, 400000) : 0;
    faults.bytes_per_second = pick(seed, 2) == 0 ? (100ull << 20) + pick(seed, 1ull << 30) : 0;
    faults.split_ppm = pick(seed, 1) ? (uint32_t)pick(seed, 1000000) : 0;
    faults.fail_ppm = pick(seed, 3) == 0 ? (uint32_t)pick(seed, 100000) : 0;
    faults.pin_limit_bytes = pick(seed, 3) == 0 ? pick(seed, 8u << 20) : 0;
    return faults;
}

/* One to three tiers, with limits that may be too small for some of the blocks. */
static msc_offload_options pick_options(uint64_t *seed)
{
    msc_offload_options options = training_options(MSC_TIER_FILE);
    uint32_t used = 1 + (uint32_t)pick(seed, 6);

    options.limit_bytes[MSC_TIER_PINNED] = (used & 1) ? (1u << 20) + pick(seed, 16u << 20) : 0;
    options.limit_bytes[MSC_TIER_HOST] = (used & 2) ? (2u << 20) + pick(seed, 16u << 20) : 0;
    options.limit_bytes[MSC_TIER_FILE] = (used & 4) ? 64u << 20 : 0;
    options.chunk_bytes = 4096 * (1 + pick(seed, 63));
    options.staging_count = 2 + (uint32_t)pick(seed, 2);
    options.prefetch_count = (uint32_t)pick(seed, 8);
    options.prefetch_bytes = pick(seed, 8u << 20);
    options.debug = (uint32_t)pick(seed, 1);
    return options;
}

static training_step pick_step(uint64_t *seed)
{
    training_step step = {.seed = training_random(seed) >> 20};

    step.block_count = 1 + (uint32_t)pick(seed, 15);
    step.most_bytes = 1 + pick(seed, 200000);
    step.behind = (uint32_t)pick(seed, 6);
    step.group_size = (uint32_t)pick(seed, 4);
    step.ahead_bytes = pick(seed, 1) ? pick(seed, 400000) : 0;
    step.shuffled = pick(seed, 1);
    step.twice = pick(seed, 3) == 0;
    step.same_sizes = pick(seed, 1);
    step.ends_early = pick(seed, 4) == 0;
    return step;
}

static void one_run(uint64_t number)
{
    uint64_t seed = number * 7919;
    msc_device_faults faults = pick_faults(&seed);
    msc_offload_options options = pick_options(&seed);
    training_step step = pick_step(&seed);
    training t;
    int i;

    step.copies_fail = faults.fail_ppm > 0;
    step.may_be_refused = true;
    training_open(&t, &options, &faults);
    for (i = 0; i < 3; i++) {
        msc_tier tier;
        msc_offload_counters counters;

        (void)training_run(&t, &step);
        counters = msc_offload_counters_now(t.engine);
        assert_int_equal(counters.block_count, 0);
        for (tier = 0; tier < MSC_TIER_COUNT; tier++) {
            assert_int_equal(counters.held_bytes[tier], 0);
            if (options.limit_bytes[tier] > 0) /* staging has to be somewhere */
                assert_true(counters.taken_bytes[tier] <= options.limit_bytes[tier]);
        }
    }
    training_close(&t);
}

static void random_trouble(void **state)
{
    uint64_t i;

    (void)state;
    for (i = 0; i < run_count; i++) {
        print_message("seed %llu\r", (unsigned long long)(first_seed + i));
        one_run(first_seed + i);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_trouble)};

    if (argc > 1)
        run_count = strtoull(argv[1], NULL, 10);
    if (argc > 2)
        first_seed = strtoull(argv[2], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
