/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What host cores do, a card does with the same bits: `test_optim_card [LIBRARY COMPILER]`, on a real card without
 * arguments, where exit status 77 means that there is none, or no compiler; MEMSCALE_NVRTC may name one.
 *
 * The stand-in runs the kernels' text compiled for the host, from `msc_optim_step` to each thread. What it cannot show is
 * what NVIDIA's compiler and a card make of that text; the same cases do, where there is a card.
 */
#include "optim_card.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

static msc_error err;

static void must(msc_status status)
{
    if (status != MSC_OK)
        fail_msg("%s: %s", msc_status_name(status), err.message);
}

/* ---- steps ---------------------------------------------------------------------------------------------------- */

/* A step of both. Gradients are made on the host and sent with the rest. */
static void step_both(fixture *here, fixture *there, uint64_t step, uint64_t seed)
{
    msc_optim_tensor tensor;

    fixture_gradient(here, optim, seed, step);
    memcpy((void *)(uintptr_t)there->tensor.gradient, here->tensor.gradient, here->sizes.gradient_bytes);
    here->tensor.step = there->tensor.step = step;
    card_send();
    tensor = card_tensor(there);
    must(msc_optim_step(optim, &here->rule, &here->tensor, 1, &err));
    must(msc_optim_step(card_optim, &here->rule, &tensor, 1, &err));
    card_fetch();
}

/* 1 element; just a block and its neighbours; 3 strips and a rest that fills no block. */
static void equal_steps(const msc_optim_rule *rule, const char *name)
{
    static const uint64_t counts[] = {1, 127, 128, 129, 3 * 512 + 341};
    size_t i;
    uint64_t step;

    for (i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        fixture here = fixture_make(optim, rule, counts[i], 0, 7);
        fixture there;

        card_clear();
        there = card_mirror(&here);
        for (step = 1; step <= 3; step++) {
            step_both(&here, &there, step, 5);
            fixture_same(&here, &there, name);
        }
        fixture_end(&here);
    }
}

static void every_rule(void **state)
{
    (void)state;
    fixture_every_rule(equal_steps);
}

/* Gradients of every size that there is, zeros and denormal numbers among them. */
static void extremes(void **state)
{
    static const uint32_t bits[] = {0,          0x80000000, 1,          0x80000001, 0x007FFFFF, 0x00800000,
                                    0x0DA24260, 0x1E3CE508, 0x2EDBE6FF, 0x3F800000, 0xBF800000, 0x4B189680,
                                    0x5F7FFFFF, 0x60AD78EC, 0x7149F2CA, 0xF149F2CA, 0x7F7FFFFF, 0xFF7FFFFF};
    const uint32_t many = sizeof bits / sizeof bits[0];
    unsigned kind, moments;
    uint64_t step;
    uint32_t i;

    (void)state;
    for (kind = 0; kind < MSC_OPTIM_KIND_COUNT; kind++)
        for (moments = 0; moments < MSC_OPTIM_MOMENTS_COUNT; moments++) {
            msc_optim_rule rule = fixture_rule((msc_optim_kind)kind, MSC_OPTIM_FLOAT_FP32,
                                               MSC_OPTIM_WEIGHTS_MASTER_REST8, (msc_optim_moments)moments);
            fixture here = fixture_make(optim, &rule, many * 40u, 0, 3);
            float *gradient = (float *)(uintptr_t)here.tensor.gradient;
            fixture there;

            card_clear();
            there = card_mirror(&here);
            for (step = 1; step < 5; step++) {
                msc_optim_tensor tensor;

                for (i = 0; i < many * 40u; i++)
                    gradient[i] = fixture_from_bits(bits[(i + i / many * step) % many]);
                memcpy((void *)(uintptr_t)there.tensor.gradient, gradient, here.sizes.gradient_bytes);
                here.tensor.step = there.tensor.step = step;
                card_send();
                tensor = card_tensor(&there);
                must(msc_optim_step(optim, &rule, &here.tensor, 1, &err));
                must(msc_optim_step(card_optim, &rule, &tensor, 1, &err));
                card_fetch();
            }
            /* Infinity less infinity makes a NaN, and which one is not specified: only where none can be. */
            if (kind != MSC_OPTIM_KIND_SGD && !(kind < MSC_OPTIM_KIND_SGD && moments < 2))
                fixture_same(&here, &there, "extremes");
            fixture_end(&here);
        }
}

/* More tensors than a kernel takes, in runs of equal and unequal step numbers, empty ones and parts among them. */
static void lists(void **state)
{
    enum { TENSORS = 300 };
    static fixture here[TENSORS], there[TENSORS];
    static msc_optim_tensor list[TENSORS], list_there[TENSORS];
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32,
                                       MSC_OPTIM_WEIGHTS_MASTER_REST8, MSC_OPTIM_MOMENTS_CODE8);
    uint64_t i;

    (void)state;
    card_clear();
    for (i = 0; i < TENSORS; i++) {
        here[i] = fixture_make(optim, &rule, i % 17 == 3 ? 0 : i * i % 1291, 0, i);
        fixture_gradient(&here[i], optim, i, 1);
        here[i].tensor.step = i < 200 ? 4 : 1 + i % 3;
        here[i].tensor.first = i % 5 * MSC_OPTIM_BLOCK;
        there[i] = here[i].tensor.count > 0 ? card_mirror(&here[i]) : here[i];
        list[i] = here[i].tensor;
        list_there[i] = here[i].tensor.count > 0 ? card_tensor(&there[i]) : here[i].tensor;
    }
    card_send();
    must(msc_optim_step(optim, &rule, list, TENSORS, &err));
    must(msc_optim_step(card_optim, &rule, list_there, TENSORS, &err));
    card_fetch();
    for (i = 0; i < TENSORS; i++) {
        if (here[i].tensor.count > 0)
            fixture_same(&here[i], &there[i], "a list");
        fixture_end(&here[i]);
    }
}

/* ---- sums ------------------------------------------------------------------------------------------------------ */

/* Numbers of a type in the image, random ones with some that are not finite. */
static msc_optim_array place_numbers(uint64_t count, msc_optim_float type, uint64_t seed)
{
    float *numbers = malloc((size_t)count * sizeof *numbers + 1);
    msc_optim_array from = {numbers, count, MSC_OPTIM_FLOAT_FP32};
    msc_optim_array made = {NULL, count, type};
    void *at = card_place(NULL, count, type == MSC_OPTIM_FLOAT_FP32 ? 4 : 2);
    uint64_t i;

    assert_non_null(numbers);
    for (i = 0; i < count; i++)
        numbers[i] = fixture_float(&seed) * 100.0f;
    for (i = 77; i < count; i += 1009)
        numbers[i] = fixture_from_bits(i % 2 == 0 ? 0x7F800000 : 0x7FC00000);
    must(msc_optim_convert(optim, at, type, &from, &err));
    free(numbers);
    made.values = at;
    return made;
}

/* Of no arrays, empty ones, fewer strips than segments, and more arrays than a kernel takes. */
static void norms(void **state)
{
    enum { ARRAYS = 400 };
    static const uint64_t numbers[] = {0, 1, 2, 124, 125, ARRAYS};
    static msc_optim_array here[ARRAYS], there[ARRAYS];
    msc_optim_norm_result one, other;
    size_t k;
    uint64_t i;

    (void)state;
    card_clear();
    for (i = 0; i < ARRAYS; i++) {
        here[i] = place_numbers(i % 7 == 1 ? 0 : i == 0 ? 300001 : i * i % 4099, (msc_optim_float)(i % 3), i);
        there[i] = here[i];
        there[i].values = card_address(here[i].values);
    }
    card_send();
    for (k = 0; k < sizeof numbers / sizeof numbers[0]; k++) {
        must(msc_optim_norm(optim, here, numbers[k], 0.37f, &one, &err));
        must(msc_optim_norm(card_optim, there, numbers[k], 0.37f, &other, &err));
        assert_memory_equal(&one.sum_of_squares, &other.sum_of_squares, sizeof one.sum_of_squares);
        assert_int_equal(one.nonfinite_count, other.nonfinite_count);
    }
    assert_true(one.sum_of_squares > 0.0 && one.nonfinite_count > 0);
}

static void accumulated(void **state)
{
    const uint64_t count = 3001;
    unsigned type;

    (void)state;
    for (type = 0; type < MSC_OPTIM_FLOAT_COUNT; type++) {
        msc_optim_array gradient, there;
        float *sums;
        float here[3001];

        card_clear();
        gradient = place_numbers(count, (msc_optim_float)type, 3);
        sums = card_place(NULL, count, sizeof *sums);
        memset(here, 0, sizeof here);
        there = gradient;
        there.values = card_address(gradient.values);
        card_send();
        must(msc_optim_accumulate(optim, here, &gradient, &err));
        must(msc_optim_accumulate(optim, here, &gradient, &err));
        must(msc_optim_accumulate(card_optim, card_address(sums), &there, &err));
        must(msc_optim_accumulate(card_optim, card_address(sums), &there, &err));
        card_fetch();
        /* The NaNs that were added have a pattern that is not specified. */
        for (uint64_t i = 0; i < count; i++)
            if (here[i] == here[i] || sums[i] == sums[i])
                assert_int_equal(fixture_bits(here[i]), fixture_bits(sums[i]));
    }
}

/* ---- forms ----------------------------------------------------------------------------------------------------- */

/* Every pattern of 16 bits, or as many of 32: all exponents, with random fractions, NaNs among them. */
static void *patterns(uint32_t each)
{
    unsigned char *all = malloc((size_t)65536 * each);
    uint64_t seed = 9;
    uint32_t i;

    assert_non_null(all);
    for (i = 0; i < 65536; i++) {
        uint32_t wide = i << 16 | fixture_random(&seed) >> 16;
        uint16_t half = (uint16_t)i;

        if (each == 4)
            memcpy(all + (size_t)4 * i, &wide, 4);
        else
            memcpy(all + (size_t)2 * i, &half, 2);
    }
    return all;
}

static void converted(void **state)
{
    unsigned from, to;

    (void)state;
    for (from = 0; from < MSC_OPTIM_FLOAT_COUNT; from++)
        for (to = 0; to < MSC_OPTIM_FLOAT_COUNT; to++) {
            uint32_t each = to == MSC_OPTIM_FLOAT_FP32 ? 4 : 2;
            void *numbers = patterns(from == MSC_OPTIM_FLOAT_FP32 ? 4 : 2);
            unsigned char *expected = malloc((size_t)65536 * 4);
            msc_optim_array array = {numbers, 65536, (msc_optim_float)from};
            void *got;

            assert_non_null(expected);
            must(msc_optim_convert(optim, expected, (msc_optim_float)to, &array, &err));
            card_clear();
            array.values = card_address(card_place(numbers, 65536, from == MSC_OPTIM_FLOAT_FP32 ? 4 : 2));
            got = card_place(NULL, 65536, each);
            card_send();
            must(msc_optim_convert(card_optim, card_address(got), (msc_optim_float)to, &array, &err));
            card_fetch();
            assert_memory_equal(got, expected, (size_t)65536 * each);
            free(numbers);
            free(expected);
        }
}

static void split_and_joined(void **state)
{
    static const uint32_t master_bytes[] = {0, 4, 2, 1};
    static uint16_t weights[65536];
    static unsigned char masters[65536 * 4];
    static float floats[65536];
    unsigned form;

    (void)state;
    for (form = MSC_OPTIM_WEIGHTS_MASTER_FP32; form < MSC_OPTIM_WEIGHTS_COUNT; form++) {
        msc_optim_weights as = (msc_optim_weights)form;
        void *numbers = patterns(4);
        float *from, *back;
        void *weight, *master;

        must(msc_optim_split(optim, as, numbers, 65536, weights, masters, &err));
        must(msc_optim_join(optim, as, weights, masters, 65536, floats, &err));
        card_clear();
        from = card_place(numbers, 65536, 4);
        weight = card_place(NULL, 65536, 2);
        master = card_place(NULL, 65536, master_bytes[form]);
        back = card_place(NULL, 65536, 4);
        card_send();
        must(msc_optim_split(card_optim, as, card_address(from), 65536, card_address(weight),
                             card_address(master), &err));
        must(msc_optim_join(card_optim, as, card_address(weight), card_address(master), 65536,
                            card_address(back), &err));
        card_fetch();
        assert_memory_equal(weight, weights, sizeof weights);
        assert_memory_equal(master, masters, (size_t)65536 * master_bytes[form]);
        assert_memory_equal(back, floats, sizeof floats);
        free(numbers);
    }
}

/* Blocks of codes up to a random one, which no step may have left: some need a larger scale than their largest number. */
static void fill_codes(uint8_t *codes, uint8_t *scales, uint64_t count, uint8_t sign, uint64_t seed)
{
    uint64_t i;
    uint32_t most = 1;

    for (i = 0; i < count; i++) {
        if (i % MSC_OPTIM_BLOCK == 0) {
            most = 1 + fixture_random(&seed) % (sign != 0 ? 127 : 255);
            scales[i / MSC_OPTIM_BLOCK] = (uint8_t)(100 + fixture_random(&seed) % 60);
        }
        codes[i] = (uint8_t)(fixture_random(&seed) % (most + 1) | (fixture_random(&seed) & sign));
    }
}

/* After steps: moments as floats; written as they are, which changes nothing; and other ones, with blocks of zeros, of
   one number, and of all sizes. */
static void equal_moments(const msc_optim_rule *rule, const char *name)
{
    enum { COUNT = 50 * 128 + 77 };
    fixture here, there;
    float one[2][COUNT];
    float *other[2];
    msc_optim_tensor tensor;
    uint64_t seed = 21;
    unsigned i, round;

    if (rule->weights != MSC_OPTIM_WEIGHTS_FP32 || rule->gradient != MSC_OPTIM_FLOAT_FP32)
        return;
    memset(one, 0, sizeof one);
    here = fixture_make(optim, rule, COUNT, 0, 7);
    fixture_run(&here, optim, 1, 3, 5);
    if (rule->moments == MSC_OPTIM_MOMENTS_CODE8 && here.sizes.moment1_bytes > 0)
        fill_codes(here.tensor.moment1, here.tensor.scale1, COUNT - 2000, 0x80, 4);
    if (rule->moments == MSC_OPTIM_MOMENTS_CODE8 && here.sizes.moment2_bytes > 0)
        fill_codes(here.tensor.moment2, here.tensor.scale2, COUNT - 2000, 0, 5);
    card_clear();
    there = card_mirror(&here);
    other[0] = card_place(one[0], COUNT, 4);
    other[1] = card_place(one[1], COUNT, 4);
    for (round = 0; round < 3; round++) {
        card_send();
        tensor = card_tensor(&there);
        must(msc_optim_moments_read(optim, rule, &here.tensor, one[0], one[1], &err));
        must(msc_optim_moments_read(card_optim, rule, &tensor, card_address(other[0]), card_address(other[1]),
                                    &err));
        card_fetch();
        assert_memory_equal(one[0], other[0], sizeof one[0]);
        assert_memory_equal(one[1], other[1], sizeof one[1]);
        for (i = 0; round > 0 && i < COUNT; i++) {
            float x = i / 128 == 1 ? 0.0f : i / 128 == 2 ? 0.375f : fixture_float(&seed);

            one[0][i] = other[0][i] = i / 128 == 3 ? x * 0x1p-100f : x;
            one[1][i] = other[1][i] = i / 128 == 4 ? x * x * 0x1p120f : x * x;
        }
        card_send();
        must(msc_optim_moments_write(optim, rule, &here.tensor, one[0], one[1], &err));
        must(msc_optim_moments_write(card_optim, rule, &tensor, card_address(other[0]),
                                     card_address(other[1]), &err));
        card_fetch();
        fixture_same(&here, &there, name);
    }
    fixture_end(&here);
}

static void moments(void **state)
{
    (void)state;
    fixture_every_rule(equal_moments);
}

/* ---- what only a card refuses ------------------------------------------------------------------------------------ */

static void out_of_line(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_BF16, MSC_OPTIM_WEIGHTS_FP32,
                                       MSC_OPTIM_MOMENTS_BF16);
    fixture here = fixture_make(optim, &rule, 100, 0, 7);
    msc_optim_tensor good, bad;
    fixture there;

    (void)state;
    card_clear();
    there = card_mirror(&here);
    there.tensor.step = 1;
    good = card_tensor(&there);
    bad = good;
    bad.gradient = (const char *)good.gradient + 1;
    assert_int_equal(msc_optim_step(card_optim, &rule, &bad, 1, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "gradient is at"));
    bad = good;
    bad.weight = (char *)good.weight - 2;
    assert_int_equal(msc_optim_step(card_optim, &rule, &bad, 1, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "weight is at"));
    assert_non_null(strstr(err.message, "a multiple of 4 bytes"));
    bad = good;
    bad.moment2 = (char *)good.moment2 + 1;
    assert_int_equal(msc_optim_step(card_optim, &rule, &bad, 1, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "moment2 is at"));
    bad = good;
    bad.step = 0; /* what is checked everywhere is checked here */
    assert_int_equal(msc_optim_step(card_optim, &rule, &bad, 1, &err), MSC_EINVAL);
    fixture_end(&here);
}

static void options_of_a_device(void **state)
{
    msc_optim_options options = msc_optim_options_default();
    msc_context *ctx;
    msc_device *host;
    msc_optim *made;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, &err), MSC_OK);
    assert_int_equal(msc_device_create(ctx, NULL, &host, &err), MSC_OK);
#define REFUSED(status, words)                                                                               \
    do {                                                                                                     \
        made = (msc_optim *)(uintptr_t)8;                                                                    \
        assert_int_equal(msc_optim_create(ctx, &options, &made, &err), status);                              \
        assert_null(made);                                                                                   \
        if (strstr(err.message, words) == NULL)                                                              \
            fail_msg("'%s' does not say '%s'", err.message, words);                                          \
    } while (0)
    options.stream = &options;
    REFUSED(MSC_EINVAL, "of no device");
    options.stream = NULL;
    options.device = card_device;
    options.thread_count = 2;
    REFUSED(MSC_EINVAL, "thread_count is 2");
    options.thread_count = 1;
    options.isa = MSC_OPTIM_ISA_SCALAR;
    REFUSED(MSC_EINVAL, "isa is scalar");
    options.isa = MSC_OPTIM_ISA_ANY;
    options.device = host;
    REFUSED(MSC_EUNSUPPORTED, "'host' runs no kernels");
#undef REFUSED
    assert_int_equal(msc_optim_isa_used(card_optim), MSC_OPTIM_ISA_ANY);
    msc_device_destroy(host);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
}

/* A second optimizer of the device, on the default stream, from a context that counts. */
static void calls_allocate_nothing(void **state)
{
    msc_optim_rule rule = fixture_rule(MSC_OPTIM_KIND_ADAMW, MSC_OPTIM_FLOAT_FP32,
                                       MSC_OPTIM_WEIGHTS_MASTER_REST8, MSC_OPTIM_MOMENTS_CODE8);
    msc_optim_options options = msc_optim_options_default();
    fixture here = fixture_make(optim, &rule, 1000, 0, 7);
    msc_optim_norm_result norm;
    msc_optim_array gradient;
    msc_optim_tensor tensor;
    msc_context *ctx;
    msc_optim *made;
    fixture there;
    uint64_t held;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, &err), MSC_OK);
    options.device = card_device;
    must(msc_optim_create(ctx, &options, &made, &err));
    held = msc_context_peak_bytes(ctx);
    card_clear();
    fixture_gradient(&here, optim, 5, 1);
    there = card_mirror(&here);
    here.tensor.step = there.tensor.step = 1;
    card_send();
    tensor = card_tensor(&there);
    gradient = (msc_optim_array){tensor.gradient, 1000, MSC_OPTIM_FLOAT_FP32};
    must(msc_optim_norm(made, &gradient, 1, 1.0f, &norm, &err));
    must(msc_optim_step(made, &rule, &tensor, 1, &err));
    must(msc_optim_norm(made, &gradient, 1, 1.0f, &norm, &err)); /* waits for the step before it */
    assert_int_equal(msc_context_peak_bytes(ctx), held);
    assert_int_equal(msc_context_held_bytes(ctx), held);
    card_fetch();
    must(msc_optim_step(optim, &rule, &here.tensor, 1, &err));
    fixture_same(&here, &there, "the default stream");
    msc_optim_destroy(made);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    fixture_end(&here);
}

/* Records fail, and what is under way is waited for all the same. */
static const msc_device_ops *real_ops;
static uint32_t finished;

static msc_status refuse_record(msc_device *of, void *which, void *on, msc_error *why)
{
    (void)of;
    (void)which;
    (void)on;
    return msc__fail(why, MSC_EDRIVER, "no record on purpose");
}

static void count_finish(msc_device *of, void *which)
{
    finished++;
    real_ops->stream_finish(of, which);
}

static void records_that_are_refused(void **state)
{
    msc_optim_norm_result norm;
    msc_optim_array gradient;
    msc_device_ops ops = *card_device->ops;

    (void)state;
    card_clear();
    gradient = (msc_optim_array){card_address(card_place(NULL, 1000, 4)), 1000, MSC_OPTIM_FLOAT_FP32};
    card_send();
    real_ops = card_device->ops;
    finished = 0;
    ops.event_record = refuse_record;
    ops.stream_finish = count_finish;
    card_device->ops = &ops;
    assert_int_equal(msc_optim_norm(card_optim, &gradient, 1, 1.0f, &norm, &err), MSC_EDRIVER);
    assert_int_equal(finished, 2); /* the program's stream, with its kernels, and the one of the copy */
    card_device->ops = real_ops;
    must(msc_optim_norm(card_optim, &gradient, 1, 1.0f, &norm, &err));
}

static int begin(void **state)
{
    return fixture_begin_scalar(state);
}

static int finish(void **state)
{
    card_close();
    return fixture_finish(state);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rule),
        cmocka_unit_test(extremes),
        cmocka_unit_test(lists),
        cmocka_unit_test(norms),
        cmocka_unit_test(accumulated),
        cmocka_unit_test(converted),
        cmocka_unit_test(split_and_joined),
        cmocka_unit_test(moments),
        cmocka_unit_test(out_of_line),
        cmocka_unit_test(options_of_a_device),
        cmocka_unit_test(calls_allocate_nothing),
        cmocka_unit_test(records_that_are_refused),
    };
    int opened = card_open(argc > 2 ? argv[1] : NULL, argc > 2 ? argv[2] : getenv("MEMSCALE_NVRTC"));

    if (opened != 0)
        return opened;
    return cmocka_run_group_tests_name("optim_card", tests, begin, finish);
}
