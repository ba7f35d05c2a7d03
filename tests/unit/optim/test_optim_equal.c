/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The same bits from every instruction set, every number of threads, in parts, in lists, from any address, and when a run
 * is cut off and goes on: for every kind of optimizer and storage.
 */
#include "optim_fixture.h"

#include <stdlib.h>
#include <string.h>

/* ---- instruction sets ---------------------------------------------------------------------------------------- */

static msc_optim *wide;

/* 3 strips and a rest that fills neither a vector nor a block; 1 element; just a block and its neighbours. */
static void equal_sets(const msc_optim_rule *rule, const char *name)
{
    static const uint64_t counts[] = {1, 127, 128, 129, 3 * 1024 + 341};
    size_t i;

    for (i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        fixture a = fixture_make(optim, rule, counts[i], 0, 7);
        fixture b = fixture_make(wide, rule, counts[i], i, 7); /* at any address */

        fixture_run(&a, optim, 1, 3, 5);
        fixture_run(&b, wide, 1, 3, 5);
        fixture_same(&a, &b, name);
        fixture_end(&a);
        fixture_end(&b);
    }
}

static void compare_sets(msc_optim_isa isa)
{
    if (!msc_optim_isa_runs(isa)) {
        print_message("this machine has no %s\n", msc_optim_isa_name(isa));
        skip();
    }
    wide = fixture_optim(isa, 1);
    assert_int_equal(msc_optim_isa_used(wide), isa);
    fixture_every_rule(equal_sets);
    fixture_optim_end(wide);
}

static void avx2_is_scalar(void **state)
{
    (void)state;
    compare_sets(MSC_OPTIM_ISA_AVX2);
}

static void avx512_is_scalar(void **state)
{
    (void)state;
    compare_sets(MSC_OPTIM_ISA_AVX512);
}

/* Gradients and weights of every size that there is, zeros and denormal numbers among them. */
static void extremes_are_equal(void **state)
{
    static const uint32_t bits[] = {0,          0x80000000, 1,          0x80000001, 0x007FFFFF, 0x00800000,
                                    0x0DA24260, 0x1E3CE508, 0x2EDBE6FF, 0x3F800000, 0xBF800000, 0x4B189680,
                                    0x5F7FFFFF, 0x60AD78EC, 0x7149F2CA, 0xF149F2CA, 0x7F7FFFFF, 0xFF7FFFFF};
    const uint32_t many = sizeof bits / sizeof bits[0];
    unsigned isa, kind, moments;

    (void)state;
    for (isa = MSC_OPTIM_ISA_AVX2; isa < MSC_OPTIM_ISA_COUNT; isa++) {
        if (!msc_optim_isa_runs((msc_optim_isa)isa))
            continue;
        wide = fixture_optim((msc_optim_isa)isa, 1);
        for (kind = 0; kind < MSC_OPTIM_KIND_COUNT; kind++)
            for (moments = 0; moments < MSC_OPTIM_MOMENTS_COUNT; moments++) {
                msc_optim_rule rule =
                    fixture_rule((msc_optim_kind)kind, MSC_OPTIM_FLOAT_FP32, MSC_OPTIM_WEIGHTS_MASTER_REST8,
                                 (msc_optim_moments)moments);
                fixture a = fixture_make(optim, &rule, many * 40u, 0, 3);
                fixture b = fixture_make(wide, &rule, many * 40u, 0, 3);
                float *gradient = (float *)(uintptr_t)a.tensor.gradient;
                uint64_t step;
                uint32_t i;

                for (step = 1; step < 5; step++) {
                    for (i = 0; i < many * 40u; i++)
                        gradient[i] = fixture_from_bits(bits[(i + i / many * step) % many]);
                    memcpy((void *)(uintptr_t)b.tensor.gradient, gradient, a.sizes.gradient_bytes);
                    a.tensor.step = b.tensor.step = step;
                    assert_int_equal(msc_optim_step(optim, &rule, &a.tensor, 1, NULL), MSC_OK);
                    assert_int_equal(msc_optim_step(wide, &rule, &b.tensor, 1, NULL), MSC_OK);
                }
                /* Infinity less infinity makes a NaN, whose sign is not specified: only where no NaN can be. */
                if (kind != MSC_OPTIM_KIND_SGD && !(kind < MSC_OPTIM_KIND_SGD && moments < 2))
                    fixture_same(&a, &b, "extremes");
                fixture_end(&a);
                fixture_end(&b);
            }
        fixture_optim_end(wide);
    }
}

/* ---- threads, parts, lists ------------------------------------------------------------------------------------- */

/* Enough strips that seven threads have some each. */
#define MANY (7u * 8u * 1024u + 1000u)

static void compare_threads(msc_optim *many, const msc_optim_rule *rule)
{
    fixture a = fixture_make(optim, rule, MANY, 0, 11);
    fixture b = fixture_make(many, rule, MANY, 0, 11);

    fixture_run(&a, optim, 1, 2, 5);
    fixture_run(&b, many, 1, 2, 5);
    fixture_same(&a, &b, "threads");
    fixture_end(&a);
    fixture_end(&b);
}

static void threads_do_not_show(void **state)
{
    static const uint32_t threads[] = {2, 3, 7};
    unsigned gradient, weights, moments;
    size_t i;

    (void)state;
    for (i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        msc_optim *many = fixture_optim(MSC_OPTIM_ISA_ANY, threads[i]);

        for (gradient = MSC_OPTIM_FLOAT_FP32; gradient <= MSC_OPTIM_FLOAT_BF16; gradient++)
            for (weights = 0; weights < MSC_OPTIM_WEIGHTS_COUNT; weights++)
                for (moments = 0; moments < MSC_OPTIM_MOMENTS_COUNT; moments++) {
                    msc_optim_rule rule =
                        fixture_rule(MSC_OPTIM_KIND_ADAMW, (msc_optim_float)gradient,
                                     (msc_optim_weights)weights, (msc_optim_moments)moments);

                    compare_threads(many, &rule);
                }
        fixture_optim_end(many);
    }
}

/* The part of a tensor that begins at `first`. */
static msc_optim_tensor part(const fixture *whole, uint64_t first, uint64_t count)
{
    msc_optim_tensor tensor = whole->tensor;
    uint64_t all = whole->tensor.count;
    char *gradient = (char *)(uintptr_t)tensor.gradient + whole->sizes.gradient_bytes / all * first;

    tensor.gradient = gradient;
    tensor.weight = (char *)tensor.weight + whole->sizes.weight_bytes / all * first;
    tensor.count = count;
    tensor.first = first;
    if (whole->sizes.master_bytes > 0)
        tensor.master = (char *)tensor.master + whole->sizes.master_bytes / all * first;
    if (whole->sizes.moment1_bytes > 0)
        tensor.moment1 = (char *)tensor.moment1 + whole->sizes.moment1_bytes / all * first;
    if (whole->sizes.moment2_bytes > 0)
        tensor.moment2 = (char *)tensor.moment2 + whole->sizes.moment2_bytes / all * first;
    if (whole->sizes.scale1_bytes > 0)
        tensor.scale1 += first / MSC_OPTIM_BLOCK;
    if (whole->sizes.scale2_bytes > 0)
        tensor.scale2 += first / MSC_OPTIM_BLOCK;
    return tensor;
}

/* In two parts, in one call; and in a list with others, of which some are empty. */
static void parts_are_the_whole(const msc_optim_rule *rule, const char *name)
{
    fixture a = fixture_make(optim, rule, 4000, 0, 1);
    fixture b = fixture_make(optim, rule, 4000, 0, 1);
    fixture small = fixture_make(optim, rule, 33, 0, 1);
    msc_optim_tensor list[5];

    fixture_run(&a, optim, 1, 2, 9);
    fixture_run(&b, optim, 1, 1, 9);
    fixture_gradient(&b, optim, 9, 2);
    fixture_gradient(&small, optim, 9, 2);
    b.tensor.step = small.tensor.step = 2;
    memset(list, 0, sizeof list);
    list[1] = part(&b, 13 * MSC_OPTIM_BLOCK, 4000 - 13 * MSC_OPTIM_BLOCK);
    list[2] = small.tensor;
    list[4] = part(&b, 0, 13 * MSC_OPTIM_BLOCK);
    assert_int_equal(msc_optim_step(optim, rule, list, 5, NULL), MSC_OK);
    fixture_same(&a, &b, name);
    fixture_end(&a);
    fixture_end(&b);
    fixture_end(&small);
}

static void parts_do_not_show(void **state)
{
    (void)state;
    fixture_every_rule(parts_are_the_whole);
}

/* A thousand small tensors, divided among threads in the middle of anything. */
static void lists_are_single_calls(void **state)
{
    enum { TENSORS = 1000 };
    msc_optim *many = fixture_optim(MSC_OPTIM_ISA_ANY, 3);
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32,
                                       MSC_OPTIM_WEIGHTS_MASTER_REST8, MSC_OPTIM_MOMENTS_CODE8);
    static fixture alone[TENSORS], together[TENSORS];
    static msc_optim_tensor list[TENSORS];
    uint64_t i;

    (void)state;
    for (i = 0; i < TENSORS; i++) {
        alone[i] = fixture_make(optim, &rule, i * i % 2311, 0, i);
        together[i] = fixture_make(optim, &rule, i * i % 2311, 0, i);
        fixture_run(&alone[i], optim, 1 + i % 5, 1 + i % 5, i);
        fixture_gradient(&together[i], optim, i, 1 + i % 5);
        list[i] = together[i].tensor;
        list[i].step = 1 + i % 5; /* each tensor has its own */
    }
    assert_int_equal(msc_optim_step(many, &rule, list, TENSORS, NULL), MSC_OK);
    for (i = 0; i < TENSORS; i++) {
        fixture_same(&alone[i], &together[i], "a list");
        fixture_end(&alone[i]);
        fixture_end(&together[i]);
    }
    fixture_optim_end(many);
}

/* ---- resume ------------------------------------------------------------------------------------------------------ */

static void copy_state(const fixture *from, fixture *to)
{
    memcpy(to->tensor.weight, from->tensor.weight, from->sizes.weight_bytes);
    if (from->sizes.master_bytes > 0)
        memcpy(to->tensor.master, from->tensor.master, from->sizes.master_bytes);
    if (from->sizes.moment1_bytes > 0)
        memcpy(to->tensor.moment1, from->tensor.moment1, from->sizes.moment1_bytes);
    if (from->sizes.moment2_bytes > 0)
        memcpy(to->tensor.moment2, from->tensor.moment2, from->sizes.moment2_bytes);
    if (from->sizes.scale1_bytes > 0)
        memcpy(to->tensor.scale1, from->tensor.scale1, from->sizes.scale1_bytes);
    if (from->sizes.scale2_bytes > 0)
        memcpy(to->tensor.scale2, from->tensor.scale2, from->sizes.scale2_bytes);
}

static void resumed_is_uninterrupted(const msc_optim_rule *rule, const char *name)
{
    fixture a = fixture_make(optim, rule, 300, 0, 1);
    fixture b = fixture_make(optim, rule, 300, 0, 2);

    fixture_run(&a, optim, 1, 4, 3);
    copy_state(&a, &b);
    fixture_run(&a, optim, 5, 8, 3);
    fixture_run(&b, optim, 5, 8, 3);
    fixture_same(&a, &b, name);
    fixture_end(&a);
    fixture_end(&b);
}

static void a_run_goes_on(void **state)
{
    (void)state;
    fixture_every_rule(resumed_is_uninterrupted);
}

/* ---- the same as ever ---------------------------------------------------------------------------------------------- */

static uint64_t digest;

static void add_bytes(const void *memory, uint64_t bytes)
{
    const unsigned char *at = memory;
    uint64_t i;

    for (i = 0; i < bytes; i++)
        digest = (digest ^ at[i]) * UINT64_C(0x100000001B3);
}

static void add_state(const msc_optim_rule *rule, const char *name)
{
    fixture a = fixture_make(optim, rule, 700, 0, 1);

    (void)name;
    fixture_run(&a, optim, 1, 4, 3);
    add_bytes(a.tensor.weight, a.sizes.weight_bytes);
    add_bytes(a.tensor.master, a.sizes.master_bytes);
    add_bytes(a.tensor.moment1, a.sizes.moment1_bytes);
    add_bytes(a.tensor.moment2, a.sizes.moment2_bytes);
    add_bytes(a.tensor.scale1, a.sizes.scale1_bytes);
    add_bytes(a.tensor.scale2, a.sizes.scale2_bytes);
    fixture_end(&a);
}

/* Another compiler, another machine, another day: saved state stays good, and a run goes on as it would have. A change of
   this number is a change of MSC_OPTIM_STATE_VERSION. */
static void state_is_what_it_was(void **state)
{
    (void)state;
    assert_int_equal(MSC_OPTIM_STATE_VERSION, 1);
    digest = UINT64_C(0xCBF29CE484222325);
    fixture_every_rule(add_state);
    if (digest != UINT64_C(0x596E917E040DB851))
        fail_msg("%016llx", (unsigned long long)digest);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(avx2_is_scalar),     cmocka_unit_test(avx512_is_scalar),
        cmocka_unit_test(extremes_are_equal), cmocka_unit_test(threads_do_not_show),
        cmocka_unit_test(parts_do_not_show),  cmocka_unit_test(lists_are_single_calls),
        cmocka_unit_test(a_run_goes_on),      cmocka_unit_test(state_is_what_it_was),
    };

    return cmocka_run_group_tests_name("optim_equal", tests, fixture_begin_scalar, fixture_finish);
}
