/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prefetch across groups: what comes back before its group is used stays within what the group in use allows, in every
 * order of uses, and is what the recorded order says where the program keeps to it.
 *
 * Blocks are of one size here and are named only, never fetched: naming is what the promise is about. That fetched
 * bytes are right is seen in test_offload.c and test_offload_soak.c, whose steps have groups, too.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "offload_training.h"

#define BYTES 1000u
#define MOST 16u

/* A program whose blocks are put in groups of `group_size`. */
typedef struct program {
    training t;
    uint32_t count;
    uint32_t group_size;
    uint64_t allowed[MOST]; /* by each group of the next */
    msc_ticket tickets[MOST];
    bool named[MOST]; /* and not used since */
    bool early[MOST]; /* likewise, while another group was in use */
    uint32_t early_most;
} program;

static char memory[BYTES];
static msc_error err;

static void open_program(program *p, uint32_t count, uint32_t group_size, uint64_t allowed)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    uint32_t i;

    memset(p, 0, sizeof *p);
    training_open(&p->t, &options, NULL);
    p->count = count;
    p->group_size = group_size;
    for (i = 0; i < MOST; i++)
        p->allowed[i] = allowed;
}

static uint32_t group_of(const program *p, uint32_t i)
{
    return i / p->group_size;
}

static void put_all(program *p)
{
    uint32_t i;

    memset(p->named, 0, sizeof p->named);
    memset(p->early, 0, sizeof p->early);
    p->early_most = 0;
    for (i = 0; i < p->count; i++) {
        if (i % p->group_size == 0)
            msc_offload_group_ahead(p->t.engine, p->allowed[group_of(p, i)]);
        assert_int_equal(msc_offload_put(p->t.engine, memory, BYTES, NULL, &p->tickets[i], &err), MSC_OK);
    }
}

static void drop(program *p, uint32_t i)
{
    msc_offload_drop(p->t.engine, p->tickets[i]);
    p->named[i] = p->early[i] = false;
}

static uint32_t find(const program *p, msc_ticket ticket)
{
    uint32_t i;

    for (i = 0; i < p->count; i++)
        if (p->tickets[i] == ticket)
            return i;
    fail_msg("a ticket that nobody has");
    return 0;
}

/* Blocks of other groups than that of `user` that were named and are not used. */
static uint32_t count_others(const program *p, uint32_t user)
{
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < p->count; i++)
        count += p->named[i] && group_of(p, i) != group_of(p, user);
    return count;
}

static void check_name(program *p, uint32_t user, uint32_t i)
{
    uint32_t early = 0;
    uint32_t j;

    assert_false(p->named[i]);
    p->named[i] = true;
    if (group_of(p, i) == group_of(p, user))
        return;
    p->early[i] = true;
    assert_true((uint64_t)count_others(p, user) * BYTES <= p->allowed[group_of(p, user)]);
    for (j = 0; j < p->count; j++)
        early += p->early[j];
    if (early > p->early_most)
        p->early_most = early;
}

/* A use; returns how many were named besides the block itself. */
static uint32_t use(program *p, uint32_t user)
{
    msc_ticket soon[MOST];
    uint32_t count = msc_offload_use(p->t.engine, p->tickets[user], soon, MOST);
    uint32_t named = 0;
    uint32_t i;

    for (i = 0; i < p->count; i++)
        if (group_of(p, i) == group_of(p, user))
            p->early[i] = false;
    p->named[user] = false;
    for (i = 0; i < count; i++) {
        if (soon[i] == p->tickets[user])
            continue;
        check_name(p, user, find(p, soon[i]));
        named++;
    }
    return named;
}

static void use_in_order(program *p, const uint32_t *order)
{
    uint32_t i;

    for (i = 0; i < p->count; i++) {
        (void)use(p, order[i]);
        drop(p, order[i]);
    }
}

static void reverse(uint32_t *order, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        order[i] = count - 1 - i;
}

/* Steps in reverse until the window is as wide as it gets. */
static void learn(program *p, uint32_t steps)
{
    uint32_t order[MOST];

    reverse(order, p->count);
    while (steps-- > 0) {
        put_all(p);
        use_in_order(p, order);
    }
}

static void as_much_as_is_allowed(void **state)
{
    program p;

    (void)state;
    open_program(&p, 12, 4, 2 * BYTES + BYTES / 2);
    learn(&p, 3);
    put_all(&p);
    (void)use(&p, 11); /* the others of its group, and two of the next */
    assert_true(p.named[10] && p.named[9] && p.named[8] && p.named[7] && p.named[6]);
    assert_false(p.named[5]);
    assert_int_equal(use(&p, 10), 0);
    drop(&p, 6); /* one of the early ones will not be needed: there is room for another */
    assert_int_equal(use(&p, 9), 1);
    assert_true(p.named[5]);
    assert_int_equal(use(&p, 8), 0);
    assert_true(use(&p, 7) > 0); /* now that group may reach into the next */
    assert_true(p.named[4] && p.named[3] && p.named[2]);
    assert_false(p.named[1]);
    assert_int_equal(p.early_most, 2);
    training_close(&p.t);
}

static void nothing_by_default(void **state)
{
    program p;
    uint32_t i;

    (void)state;
    open_program(&p, 12, 4, 0);
    learn(&p, 3);
    assert_int_equal(p.early_most, 0);
    put_all(&p);
    for (i = 0; i < 12; i++) /* and after `msc_offload_group` */
        drop(&p, i);
    for (i = 0; i < 12; i++) {
        if (i % 4 == 0) {
            msc_offload_group_ahead(p.t.engine, 100 * BYTES);
            msc_offload_group(p.t.engine);
        }
        assert_int_equal(msc_offload_put(p.t.engine, memory, BYTES, NULL, &p.tickets[i], &err), MSC_OK);
    }
    (void)use(&p, 11);
    assert_int_equal(count_others(&p, 11), 0);
    training_close(&p.t);
}

/* However much is allowed, the group behind the next has to wait. */
static void not_beyond_the_next(void **state)
{
    program p;

    (void)state;
    open_program(&p, 12, 2, 100 * BYTES);
    learn(&p, 4);
    put_all(&p);
    (void)use(&p, 11);
    assert_true(p.named[10] && p.named[9] && p.named[8]);
    assert_false(p.named[7] || p.named[6]);
    assert_int_equal(use(&p, 10), 0); /* all of the next are early already, and the one behind is not it */
    assert_int_equal(use(&p, 9), 2);
    assert_true(p.named[7] && p.named[6]);
    training_close(&p.t);
}

/* All orders of six blocks in three groups, whatever the engine had expected. */
static void every_order(void **state)
{
    static const uint64_t allowed[][3] = {
        {BYTES, BYTES, BYTES}, {0, 2 * BYTES, BYTES}, {100 * BYTES, 0, 100 * BYTES}};
    uint32_t order[MOST];
    uint32_t early_total = 0;
    uint32_t number;
    program p;

    (void)state;
    open_program(&p, 6, 2, 0);
    for (number = 0; number < 720; number++) {
        uint32_t left[6] = {0, 1, 2, 3, 4, 5};
        uint32_t rest = number;
        uint32_t i;

        memcpy(p.allowed, allowed[number % 3], sizeof allowed[0]);
        learn(&p, 1);
        for (i = 0; i < 6; i++) {
            uint32_t at = rest % (6 - i);

            rest /= 6 - i;
            order[i] = left[at];
            left[at] = left[5 - i];
        }
        put_all(&p);
        use_in_order(&p, order);
        assert_true((uint64_t)p.early_most * BYTES <= 2 * BYTES);
        early_total += p.early_most;
    }
    assert_true(early_total > 300);
    training_close(&p.t);
}

/* Forward was cut short: a group is never used. What came early for it counts until it is dropped. */
static void a_group_that_is_never_used(void **state)
{
    program p;

    (void)state;
    open_program(&p, 12, 4, 2 * BYTES);
    learn(&p, 3);
    put_all(&p);
    (void)use(&p, 11);
    assert_true(p.named[7] && p.named[6]);
    (void)use(&p, 3); /* past the group that was expected */
    assert_true(p.named[2]);
    assert_int_equal(count_others(&p, 3), 5); /* 10, 9, 8 and the early ones: left behind */
    drop(&p, 7);
    drop(&p, 6);
    assert_int_equal(msc_offload_counters_now(p.t.engine).block_count, 10);
    training_close(&p.t); /* with all that is left */
}

/* Two passes over one graph: the first group is expected behind the last. */
static void used_twice(void **state)
{
    uint32_t order[MOST];
    uint32_t i, pass, step;
    program p;

    (void)state;
    open_program(&p, 6, 2, 2 * BYTES);
    reverse(order, 6);
    for (step = 0; step < 4; step++) {
        put_all(&p);
        for (pass = 0; pass < 2; pass++)
            for (i = 0; i < 6; i++) {
                (void)use(&p, order[i]);
                if (step == 3 && pass == 0 && i == 5)
                    assert_true(p.named[5] && p.named[4]);
            }
        for (i = 0; i < 6; i++)
            drop(&p, i);
    }
    training_close(&p.t);
}

/* prefetch_count and prefetch_bytes are over all, early or not. */
static void other_limits_hold(void **state)
{
    msc_offload_options options = training_options(MSC_TIER_HOST);
    program p;

    (void)state;
    open_program(&p, 12, 4, 100 * BYTES);
    training_close(&p.t);
    options.prefetch_bytes = 4 * BYTES + BYTES / 2;
    training_open(&p.t, &options, NULL);
    learn(&p, 3);
    put_all(&p);
    assert_int_equal(use(&p, 11), 4);
    assert_true(p.named[10] && p.named[9] && p.named[8] && p.named[7]);
    training_close(&p.t);
    options.prefetch_bytes = UINT64_MAX;
    options.prefetch_count = 3;
    training_open(&p.t, &options, NULL);
    p.allowed[2] = UINT64_MAX;
    learn(&p, 3);
    put_all(&p);
    assert_int_equal(use(&p, 9), 3); /* 8, and two of the next */
    assert_true(p.named[8] && p.named[7] && p.named[6]);
    training_close(&p.t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_much_as_is_allowed),      cmocka_unit_test(nothing_by_default),
        cmocka_unit_test(not_beyond_the_next),        cmocka_unit_test(every_order),
        cmocka_unit_test(a_group_that_is_never_used), cmocka_unit_test(used_twice),
        cmocka_unit_test(other_limits_hold),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
