/* SPDX-License-Identifier: Apache-2.0 */
/*
 * In a process that has PyTorch's library, its team of threads does the work, with the same bits; a child of fork has no
 * team, and its own threads do.
 */
#include "optim_fixture.h"

#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "optim/optim_pool.h"
#include "team_library.h"

#define ELEMENTS (40u * 1024u)
#define THREADS 3u

static msc_optim_rule rule(void)
{
    return fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                        MSC_OPTIM_MOMENTS_FP32);
}

/* Steps by one thread and by `many` end with the same bits. Returns how often the team was asked. */
static unsigned compare(msc_optim *many)
{
    msc_optim_rule here = rule();
    fixture a = fixture_make(optim, &here, ELEMENTS, 0, 1);
    fixture b = fixture_make(optim, &here, ELEMENTS, 0, 1);
    unsigned before = team_calls();
    unsigned asked;
    uint64_t step;

    fixture_run(&a, optim, 1, 3, 4);
    for (step = 1; step <= 3; step++) {
        fixture_gradient(&b, optim, 4, step);
        b.tensor.step = step;
        assert_int_equal(msc_optim_step(many, &here, &b.tensor, 1, NULL), MSC_OK);
    }
    asked = team_calls() - before;
    fixture_same(&a, &b, "a team");
    fixture_end(&a);
    fixture_end(&b);
    return asked;
}

static void a_team_does_the_work(void **state)
{
    msc_optim *many = fixture_optim(MSC_OPTIM_ISA_ANY, THREADS);

    (void)state;
    assert_int_equal(compare(many), 3);
    fixture_optim_end(many);
}

/* As inside of a parallel region of the caller's. */
static void a_team_of_fewer(void **state)
{
    msc_optim *many = fixture_optim(MSC_OPTIM_ISA_ANY, THREADS);

    (void)state;
    team_limit(1);
    assert_int_equal(compare(many), 3);
    team_limit(THREADS);
    fixture_optim_end(many);
}

static void nobody_is_asked_for_one_thread(void **state)
{
    (void)state;
    assert_int_equal(compare(optim), 0);
}

static void there_are_no_workers_beside_a_team(void **state)
{
    msc_context *ctx;
    msc__pool pool = {0};

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    assert_int_equal(msc__pool_init(&pool, ctx, THREADS, NULL), MSC_OK);
    assert_int_equal(pool.worker_count, 0);
    msc__pool_fini(&pool);
    msc_context_destroy(ctx);
}

/* What a child does, which must not fail there: a step with the parent's object, and with one of its own. */
static char is_wrong_in_child(msc_optim *of_parent, fixture *tensor, const fixture *wanted)
{
    msc_optim_rule here = rule();
    unsigned before = team_calls();
    msc_optim *own = fixture_optim(MSC_OPTIM_ISA_ANY, THREADS);
    char wrong = msc_optim_step(of_parent, &here, &tensor[0].tensor, 1, NULL) != MSC_OK ||
                 msc_optim_step(own, &here, &tensor[1].tensor, 1, NULL) != MSC_OK ||
                 memcmp(tensor[0].tensor.weight, wanted->tensor.weight, ELEMENTS * sizeof(float)) != 0 ||
                 memcmp(tensor[1].tensor.weight, wanted->tensor.weight, ELEMENTS * sizeof(float)) != 0 ||
                 team_calls() != before;

    fixture_optim_end(own);
    return wrong;
}

static void a_child_has_none(void **state)
{
    msc_optim_rule here = rule();
    msc_optim *many = fixture_optim(MSC_OPTIM_ISA_ANY, THREADS);
    fixture wanted = fixture_make(optim, &here, ELEMENTS, 0, 1);
    fixture tensors[2] = {fixture_make(optim, &here, ELEMENTS, 0, 1),
                          fixture_make(optim, &here, ELEMENTS, 0, 1)};
    char wrong = 1;
    int ends[2];
    pid_t child;
    int i;

    (void)state;
    assert_int_equal(pipe(ends), 0);
    fixture_run(&wanted, optim, 1, 1, 4);
    for (i = 0; i < 2; i++) {
        fixture_gradient(&tensors[i], optim, 4, 1);
        tensors[i].tensor.step = 1;
    }
    child = fork();
    if (child == 0) { /* tells by the pipe: checkers of memory give a child an exit status of their own */
        wrong = is_wrong_in_child(many, tensors, &wanted);
        _exit(write(ends[1], &wrong, 1) != 1);
    }
    (void)close(ends[1]);
    assert_true(child > 0 && read(ends[0], &wrong, 1) == 1 && wrong == 0);
    assert_true(waitpid(child, NULL, 0) == child);
    (void)close(ends[0]);
    assert_int_equal(compare(many), 3);
    for (i = 0; i < 2; i++)
        fixture_end(&tensors[i]);
    fixture_end(&wanted);
    fixture_optim_end(many);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_team_does_the_work),
        cmocka_unit_test(a_team_of_fewer),
        cmocka_unit_test(nobody_is_asked_for_one_thread),
        cmocka_unit_test(there_are_no_workers_beside_a_team),
        cmocka_unit_test(a_child_has_none),
    };

    return cmocka_run_group_tests_name("optim_team", tests, fixture_begin, fixture_finish);
}
