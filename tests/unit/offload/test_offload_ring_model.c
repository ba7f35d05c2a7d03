/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every run of the ring's algorithm in small cases: that it is right, and that no step of it can be left out. The
 * model is ring_model.h; that the code does what the model says is shown by test_offload_ring.c with threads. (Two
 * entries for each of two writers and two readers are 1.4 million states and right too, but not worth the time.)
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "ring_model.h"

static const ring_model one_and_one = {.writers = 1, .threads = 2, .turns = {6, 6}};
static const ring_model two_and_one = {.writers = 2, .threads = 3, .turns = {2, 2, 4}};
static const ring_model one_and_two = {.writers = 1, .threads = 3, .turns = {4, 2, 2}};
static const ring_model two_and_two = {.writers = 2, .threads = 4, .turns = {2, 1, 2, 1}};

static void is_right(ring_model model, uint64_t states_least)
{
    uint64_t states = 0;

    assert_int_equal(ring_model_run(&model, &states), RING_RIGHT);
    assert_true(states >= states_least); /* fewer: the search has left something out */
}

static void is_found(ring_model model, ring_verdict verdict)
{
    uint64_t states = 0;

    assert_int_equal(ring_model_run(&model, &states), verdict);
}

static void every_run_is_right(void **state)
{
    (void)state;
    is_right(one_and_one, 300);
    is_right(two_and_one, 10000);
    is_right(one_and_two, 10000);
    is_right(two_and_two, 30000);
}

static void each_order_is_needed(void **state)
{
    ring_model model;

    (void)state;
    model = one_and_one;
    model.no_writer_release = true;
    is_found(model, RING_RACE);
    model = one_and_one;
    model.no_reader_acquire = true;
    is_found(model, RING_RACE);
    model = one_and_one;
    model.no_reader_release = true;
    is_found(model, RING_RACE);
    model = one_and_one;
    model.no_writer_acquire = true;
    is_found(model, RING_RACE);
}

static void each_step_has_its_place(void **state)
{
    ring_model model;

    (void)state;
    model = one_and_one;
    model.writer_passes_first = true;
    is_found(model, RING_RACE);
    model.blind = true;
    is_found(model, RING_WRONG); /* the reader takes what was in the cell before */
    model = one_and_one;
    model.reader_passes_first = true;
    is_found(model, RING_RACE);
    model.blind = true;
    is_found(model, RING_WRONG);
    model = one_and_one;
    model.short_turn = true;
    is_found(model, RING_STUCK);
}

static void positions_must_be_claimed(void **state)
{
    ring_model model;

    (void)state;
    model = two_and_one;
    model.no_compare = true;
    model.blind = true;
    is_found(model, RING_STUCK); /* two writers filled one cell */
    model = one_and_two;
    model.no_compare = true;
    model.blind = true;
    is_found(model, RING_WRONG); /* two readers took one entry */
    model = one_and_one;
    model.no_compare = true;
    is_right(model, 200); /* alone on its side, a thread has nobody to compare with */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_run_is_right),
        cmocka_unit_test(each_order_is_needed),
        cmocka_unit_test(each_step_has_its_place),
        cmocka_unit_test(positions_must_be_claimed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
