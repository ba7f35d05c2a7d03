/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The optimizer as an object: what it accepts and what it says, sizes, memory that runs out, several callers, fork.
 */
#include "optim_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"
#include "oom/failing_alloc.h"

static void defaults_are_torchs(void **state)
{
    msc_optim_rule adamw = msc_optim_rule_default(MSC_OPTIM_KIND_ADAMW);
    msc_optim_rule sgd = msc_optim_rule_default(MSC_OPTIM_KIND_SGD);
    msc_optim_rule lion = msc_optim_rule_default(MSC_OPTIM_KIND_LION);

    (void)state;
    assert_int_equal(adamw.struct_bytes, sizeof adamw);
    assert_true(adamw.learning_rate == 1e-3 && adamw.beta1 == 0.9 && adamw.beta2 == 0.999);
    assert_true(adamw.epsilon == 1e-8 && adamw.weight_decay == 0.01 && adamw.gradient_scale == 1.0f);
    assert_true(msc_optim_rule_default(MSC_OPTIM_KIND_ADAM).weight_decay == 0.0);
    assert_true(sgd.learning_rate == 1e-3 && sgd.momentum == 0.0 && sgd.weight_decay == 0.0);
    assert_true(lion.learning_rate == 1e-4 && lion.beta2 == 0.99);
}

static void sizes_are_bytes_per_parameter(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_BF16,
                                       MSC_OPTIM_WEIGHTS_MASTER_REST8, MSC_OPTIM_MOMENTS_CODE8);
    msc_optim_sizes sizes;
    msc_error err;

    (void)state;
    assert_int_equal(msc_optim_tensor_sizes(&rule, 1281, &sizes, NULL), MSC_OK);
    assert_int_equal(sizes.gradient_bytes, 2562);
    assert_int_equal(sizes.weight_bytes, 2562);
    assert_int_equal(sizes.master_bytes, 1281);
    assert_int_equal(sizes.moment1_bytes, 1281);
    assert_int_equal(sizes.moment2_bytes, 1281);
    assert_int_equal(sizes.scale1_bytes, 11);
    assert_int_equal(sizes.scale2_bytes, 11);
    rule.kind = MSC_OPTIM_KIND_SGD;
    rule.momentum = 0.0;
    rule.weights = MSC_OPTIM_WEIGHTS_FP32;
    assert_int_equal(msc_optim_tensor_sizes(&rule, 1281, &sizes, NULL), MSC_OK);
    assert_int_equal(sizes.weight_bytes, 5124);
    assert_int_equal(sizes.master_bytes + sizes.moment1_bytes + sizes.moment2_bytes + sizes.scale1_bytes, 0);
    rule.momentum = 0.5;
    rule.moments = MSC_OPTIM_MOMENTS_BF16;
    assert_int_equal(msc_optim_tensor_sizes(&rule, 1281, &sizes, NULL), MSC_OK);
    assert_int_equal(sizes.moment1_bytes, 2562);
    assert_int_equal(sizes.moment2_bytes + sizes.scale1_bytes, 0);
    assert_int_equal(msc_optim_tensor_sizes(&rule, UINT64_MAX / 2, &sizes, &err), MSC_EOVERFLOW);
}

/* ---- what is refused ------------------------------------------------------------------------------------------- */

/* The message names what is wrong. */
static void refused(msc_status status, const msc_error *err, const char *word)
{
    assert_int_equal(status, MSC_EINVAL);
    assert_int_equal(err->status, MSC_EINVAL);
    if (strstr(err->message, word) == NULL)
        fail_msg("\"%s\" does not say %s", err->message, word);
}

static void refuse_rule(msc_optim_rule rule, const char *word)
{
    msc_optim_sizes sizes;
    msc_error err;

    refused(msc_optim_tensor_sizes(&rule, 1, &sizes, &err), &err, word);
    refused(msc_optim_step(optim, &rule, NULL, 0, &err), &err, word);
}

#define REFUSE(kind, field, value)                                                                           \
    do {                                                                                                     \
        msc_optim_rule wrong = msc_optim_rule_default(kind);                                                 \
        wrong.field = value;                                                                                 \
        refuse_rule(wrong, #field);                                                                          \
    } while (0)

static void wrong_rules_are_named(void **state)
{
    (void)state;
    REFUSE(MSC_OPTIM_KIND_ADAMW, struct_bytes, 3);
    REFUSE(MSC_OPTIM_KIND_ADAMW, kind, MSC_OPTIM_KIND_COUNT);
    REFUSE(MSC_OPTIM_KIND_ADAMW, gradient, MSC_OPTIM_FLOAT_COUNT);
    REFUSE(MSC_OPTIM_KIND_ADAMW, weights, MSC_OPTIM_WEIGHTS_COUNT);
    REFUSE(MSC_OPTIM_KIND_ADAMW, moments, MSC_OPTIM_MOMENTS_COUNT);
    REFUSE(MSC_OPTIM_KIND_ADAMW, learning_rate, -1e-9);
    REFUSE(MSC_OPTIM_KIND_ADAMW, learning_rate, (double)NAN);
    REFUSE(MSC_OPTIM_KIND_ADAMW, learning_rate, 1e39);
    REFUSE(MSC_OPTIM_KIND_ADAMW, beta1, 1.0);
    REFUSE(MSC_OPTIM_KIND_LION, beta1, -0.1);
    REFUSE(MSC_OPTIM_KIND_ADAM, beta2, (double)NAN);
    REFUSE(MSC_OPTIM_KIND_ADAM, epsilon, -1.0);
    REFUSE(MSC_OPTIM_KIND_SGD, weight_decay, (double)INFINITY);
    REFUSE(MSC_OPTIM_KIND_SGD, momentum, -0.5);
    REFUSE(MSC_OPTIM_KIND_SGD, dampening, (double)NAN);
    REFUSE(MSC_OPTIM_KIND_SGD, nesterov, 1);
    REFUSE(MSC_OPTIM_KIND_SGD, gradient_scale, INFINITY);
    REFUSE(MSC_OPTIM_KIND_SGD, gradient_scale, NAN);
}

static void refuse_tensor(const fixture *one, msc_optim_tensor wrong, const char *word)
{
    msc_optim_tensor list[2] = {one->tensor, wrong};
    fixture before = fixture_make(optim, &one->rule, one->tensor.count, 0, 1);
    msc_error err;

    refused(msc_optim_step(optim, &one->rule, list, 2, &err), &err, word);
    assert_non_null(strstr(err.message, "tensor 1"));
    fixture_same(one, &before, "the first tensor of a call that was refused");
    fixture_end(&before);
}

#define WRONG(field, value, word)                                                                            \
    do {                                                                                                     \
        msc_optim_tensor wrong = other.tensor;                                                               \
        wrong.field = value;                                                                                 \
        refuse_tensor(&one, wrong, word);                                                                    \
    } while (0)

static void wrong_tensors_are_named(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_BF16,
                                       MSC_OPTIM_WEIGHTS_MASTER_REST8, MSC_OPTIM_MOMENTS_CODE8);
    fixture one = fixture_make(optim, &rule, 300, 0, 1);
    fixture other = fixture_make(optim, &rule, 300, 0, 2);
    msc_error err;

    (void)state;
    fixture_gradient(&one, optim, 1, 1);
    one.tensor.step = other.tensor.step = 1;
    WRONG(step, 0, "step");
    WRONG(first, 64, "first");
    WRONG(count, UINT64_MAX, "count");
    WRONG(gradient, NULL, "gradient");
    WRONG(weight, NULL, "weight");
    WRONG(master, NULL, "master");
    WRONG(moment1, NULL, "moment1");
    WRONG(moment2, NULL, "moment2");
    WRONG(scale1, NULL, "scale1");
    WRONG(scale2, NULL, "scale2");
    WRONG(weight, (char *)(uintptr_t)other.tensor.gradient + 599, "overlap");
    WRONG(scale2, (uint8_t *)other.tensor.moment1 + 299, "overlap");
    WRONG(master, (void *)(UINTPTR_MAX - 5), "beyond");
    refused(msc_optim_step(NULL, &rule, &one.tensor, 1, &err), &err, "optim");
    refused(msc_optim_step(optim, NULL, &one.tensor, 1, &err), &err, "rule");
    refused(msc_optim_step(optim, &rule, NULL, 1, &err), &err, "tensors");
    refused(msc_optim_moments_read(optim, &rule, &one.tensor, NULL, NULL, &err), &err, "as floats");
    refused(msc_optim_moments_read(optim, &rule, NULL, NULL, NULL, &err), &err, "tensor");
    fixture_end(&one);
    fixture_end(&other);
}

static void other_calls_refuse_too(void **state)
{
    float a[8] = {0.0f};
    uint16_t w[8] = {0};
    uint16_t rest[8] = {0};
    msc_optim_array array = {a, 8, MSC_OPTIM_FLOAT_FP32};
    msc_optim_array null = {NULL, 8, MSC_OPTIM_FLOAT_FP32};
    msc_optim_array wrong = {a, 8, MSC_OPTIM_FLOAT_COUNT};
    msc_optim_norm_result norm;
    msc_error err;

    (void)state;
    refused(msc_optim_norm(optim, &null, 1, 1.0f, &norm, &err), &err, "values");
    refused(msc_optim_norm(optim, &wrong, 1, 1.0f, &norm, &err), &err, "type");
    refused(msc_optim_norm(optim, &array, 1, NAN, &norm, &err), &err, "scale");
    refused(msc_optim_norm(optim, &array, 1, 1.0f, NULL, &err), &err, "out");
    refused(msc_optim_norm(optim, NULL, 1, 1.0f, &norm, &err), &err, "arrays");
    refused(msc_optim_accumulate(optim, a + 7, &array, &err), &err, "overlap");
    refused(msc_optim_accumulate(optim, NULL, &array, &err), &err, "sums");
    refused(msc_optim_convert(optim, a, MSC_OPTIM_FLOAT_BF16, &array, &err), &err, "overlap");
    refused(msc_optim_convert(optim, w, MSC_OPTIM_FLOAT_COUNT, &array, &err), &err, "to_type");
    refused(msc_optim_split(optim, MSC_OPTIM_WEIGHTS_FP32, a, 8, w, rest, &err), &err, "form");
    refused(msc_optim_split(optim, MSC_OPTIM_WEIGHTS_MASTER_REST16, a, 8, w, w, &err), &err, "overlap");
    refused(msc_optim_join(optim, MSC_OPTIM_WEIGHTS_COUNT, w, rest, 8, a, &err), &err, "form");
    refused(msc_optim_join(optim, MSC_OPTIM_WEIGHTS_MASTER_REST16, w, rest, UINT64_MAX, a, &err), &err,
            "count");
}

static void wrong_options_are_named(void **state)
{
    msc_optim_options options = msc_optim_options_default();
    msc_optim *out = (msc_optim *)&options;
    msc_error err;

    options.thread_count = 0;
    refused(msc_optim_create(*state, &options, &out, &err), &err, "thread_count");
    assert_null(out);
    options.thread_count = 257;
    refused(msc_optim_create(*state, &options, &out, &err), &err, "257");
    options = msc_optim_options_default();
    options.isa = MSC_OPTIM_ISA_COUNT;
    refused(msc_optim_create(*state, &options, &out, &err), &err, "isa");
    options = msc_optim_options_default();
    options.struct_bytes = 1;
    refused(msc_optim_create(*state, &options, &out, &err), &err, "struct_bytes");
    refused(msc_optim_create(NULL, NULL, &out, &err), &err, "ctx");
    refused(msc_optim_create(*state, NULL, NULL, &err), &err, "out");
    msc_optim_destroy(NULL);
}

static void nothing_is_fine(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_BF16,
                                       MSC_OPTIM_WEIGHTS_MASTER_REST8, MSC_OPTIM_MOMENTS_CODE8);
    msc_optim_tensor empty;
    msc_optim_array none = {NULL, 0, MSC_OPTIM_FLOAT_BF16};

    (void)state;
    memset(&empty, 0, sizeof empty);
    assert_int_equal(msc_optim_step(optim, &rule, NULL, 0, NULL), MSC_OK);
    assert_int_equal(msc_optim_step(optim, &rule, &empty, 1, NULL), MSC_OK);
    assert_int_equal(msc_optim_moments_read(optim, &rule, &empty, NULL, NULL, NULL), MSC_OK);
    assert_int_equal(msc_optim_accumulate(optim, NULL, &none, NULL), MSC_OK);
    assert_int_equal(msc_optim_convert(optim, NULL, MSC_OPTIM_FLOAT_FP32, &none, NULL), MSC_OK);
    assert_int_equal(msc_optim_split(optim, MSC_OPTIM_WEIGHTS_MASTER_REST8, NULL, 0, NULL, NULL, NULL),
                     MSC_OK);
}

static void sets_have_names(void **state)
{
    (void)state;
    assert_string_equal(msc_optim_isa_name(MSC_OPTIM_ISA_AVX512), "avx512");
    assert_string_equal(msc_optim_isa_name(MSC_OPTIM_ISA_COUNT), "unknown");
    assert_true(msc_optim_isa_runs(MSC_OPTIM_ISA_SCALAR) && msc_optim_isa_runs(MSC_OPTIM_ISA_ANY));
    assert_false(msc_optim_isa_runs(MSC_OPTIM_ISA_COUNT));
    assert_true(msc_optim_isa_used(optim) != MSC_OPTIM_ISA_ANY);
}

/* ---- memory, callers, fork ---------------------------------------------------------------------------------------- */

static void memory_runs_out(void **state)
{
    static failing_alloc heap;
    uint64_t n;
    int done = 0;

    (void)state;
    for (n = 0; !done; n++) {
        msc_optim_options options = msc_optim_options_default();
        msc_context *ctx;
        msc_optim *made = NULL;
        msc_status status;

        options.thread_count = 3;
        failing_alloc_init(&heap, n);
        ctx = failing_alloc_context(&heap);
        if (ctx == NULL)
            continue;
        status = msc_optim_create(ctx, &options, &made, NULL);
        done = heap.failed_count == 0;
        assert_int_equal(status, done ? MSC_OK : MSC_ENOMEM);
        assert_true((made != NULL) == done);
        msc_optim_destroy(made);
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(&heap));
    }
    assert_true(n >= 3);
}

#define CALLER_COUNT 4u
#define CALLER_ELEMENTS 40000u

typedef struct caller {
    msc_optim *shared;
    fixture one;
} caller;

static void *call_often(void *argument)
{
    caller *me = argument;
    uint64_t step;

    for (step = 1; step <= 20; step++) {
        me->one.tensor.step = step;
        if (msc_optim_step(me->shared, &me->one.rule, &me->one.tensor, 1, NULL) != MSC_OK)
            return argument;
    }
    return NULL;
}

/* Callers with tensors of their own share the threads. */
static void callers_wait_for_each_other(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                                       MSC_OPTIM_MOMENTS_CODE8);
    msc_optim *shared = fixture_optim(MSC_OPTIM_ISA_ANY, 3);
    static caller callers[CALLER_COUNT];
    msc__thread threads[CALLER_COUNT];
    caller alone = {optim, fixture_make(optim, &rule, CALLER_ELEMENTS, 0, 1)};
    uint32_t i;

    (void)state;
    fixture_gradient(&alone.one, optim, 1, 1);
    assert_null(call_often(&alone));
    for (i = 0; i < CALLER_COUNT; i++) {
        callers[i].shared = shared;
        callers[i].one = fixture_make(optim, &rule, CALLER_ELEMENTS, 0, 1);
        fixture_gradient(&callers[i].one, optim, 1, 1);
    }
    for (i = 0; i < CALLER_COUNT; i++)
        assert_int_equal(msc__thread_start(&threads[i], "caller", call_often, &callers[i], NULL), MSC_OK);
    for (i = 0; i < CALLER_COUNT; i++) {
        msc__thread_join(&threads[i]);
        fixture_same(&alone.one, &callers[i].one, "one of several callers");
        fixture_end(&callers[i].one);
    }
    fixture_end(&alone.one);
    fixture_optim_end(shared);
}

/* A child has no threads of its parent; it gets the same result without. */
static void a_child_goes_on_alone(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_FP32,
                                       MSC_OPTIM_MOMENTS_FP32);
    msc_optim *shared = fixture_optim(MSC_OPTIM_ISA_ANY, 3);
    fixture a = fixture_make(optim, &rule, CALLER_ELEMENTS, 0, 1);
    fixture b = fixture_make(optim, &rule, CALLER_ELEMENTS, 0, 1);
    char failed = 1;
    int ends[2];
    pid_t child;

    (void)state;
    assert_int_equal(pipe(ends), 0);
    fixture_run(&a, optim, 1, 2, 4);
    fixture_run(&b, shared, 1, 1, 4);
    fixture_gradient(&b, shared, 4, 2);
    b.tensor.step = 2;
    child = fork();
    if (child == 0) { /* tells by the pipe: checkers of memory give a child an exit status of their own */
        failed = msc_optim_step(shared, &rule, &b.tensor, 1, NULL) != MSC_OK ||
                 memcmp(a.tensor.weight, b.tensor.weight, CALLER_ELEMENTS * sizeof(float)) != 0;
        msc_optim_destroy(shared);
        _exit(write(ends[1], &failed, 1) != 1);
    }
    (void)close(ends[1]);
    assert_true(child > 0 && read(ends[0], &failed, 1) == 1 && failed == 0);
    assert_true(waitpid(child, NULL, 0) == child);
    (void)close(ends[0]);
    assert_int_equal(msc_optim_step(shared, &rule, &b.tensor, 1, NULL), MSC_OK);
    fixture_same(&a, &b, "the parent of a fork");
    fixture_end(&a);
    fixture_end(&b);
    fixture_optim_end(shared);
}

static int begin(void **state)
{
    msc_context *ctx;

    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    *state = ctx;
    return fixture_begin(NULL);
}

static int end(void **state)
{
    assert_int_equal(msc_context_held_bytes(*state), 0);
    msc_context_destroy(*state);
    return fixture_finish(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_torchs),    cmocka_unit_test(sizes_are_bytes_per_parameter),
        cmocka_unit_test(wrong_rules_are_named),  cmocka_unit_test(wrong_tensors_are_named),
        cmocka_unit_test(other_calls_refuse_too), cmocka_unit_test(wrong_options_are_named),
        cmocka_unit_test(nothing_is_fine),        cmocka_unit_test(sets_have_names),
        cmocka_unit_test(memory_runs_out),        cmocka_unit_test(callers_wait_for_each_other),
        cmocka_unit_test(a_child_goes_on_alone),
    };

    return cmocka_run_group_tests_name("optim", tests, begin, end);
}
