/* SPDX-License-Identifier: Apache-2.0 */
/*
 * JSON text: numbers come back bit for bit, in any locale; what is no number is a string; memory may run out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "oom/failing_alloc.h"
#include "record/record_json.h"

static msc_context *ctx;

static int setup(void **state)
{
    (void)state;
    return msc_context_create(NULL, &ctx, NULL) == MSC_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    return 0;
}

static void check(double value, const char *text)
{
    msc__json json = {.ctx = ctx};

    msc__json_double(&json, value);
    assert_int_equal(json.status, MSC_OK);
    msc__json_put(&json, "", 1);
    if (text != NULL)
        assert_string_equal(json.text, text);
    else
        assert_true(strtod(json.text, NULL) == value);
    msc__json_fini(&json);
}

static void numbers_come_back(void **state)
{
    uint64_t bits = 1;
    int i;

    (void)state;
    check(0.0, "0");
    check(-0.0, "-0");
    check(3.0, "3");
    check(-17.0, "-17");
    check(9007199254740992.0, "9007199254740992");
    check(NAN, "\"NaN\"");
    check(INFINITY, "\"Infinity\"");
    check(-INFINITY, "\"-Infinity\"");
    for (i = 0; i < 20000; i++) {
        double value;

        bits = bits * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        memcpy(&value, &bits, sizeof value);
        if (isfinite(value))
            check(value, NULL);
    }
}

static void the_point_is_a_point(void **state)
{
    static const char *const locales[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "ps_AF.UTF-8", "C"};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof locales / sizeof locales[0]; i++) {
        msc__json json = {.ctx = ctx};

        (void)setlocale(LC_NUMERIC, locales[i]); /* where it is not installed, the test is the one for "C" */
        msc__json_double(&json, 0.5);
        msc__json_double(&json, -1.5e300);
        (void)setlocale(LC_NUMERIC, "C");
        msc__json_put(&json, "", 1);
        assert_string_equal(json.text, "0.5-1.5e+300");
        msc__json_fini(&json);
    }
}

static void strings_are_escaped(void **state)
{
    msc__json json = {.ctx = ctx};

    (void)state;
    msc__json_string(&json, "a\"b\\c/\xc3\xa4", 8);
    msc__json_put(&json, "", 1);
    assert_string_equal(json.text, "\"a\\\"b\\\\c/\xc3\xa4\"");
    msc__json_fini(&json);
}

static void memory_may_run_out(void **state)
{
    failing_alloc heap;
    msc__json json = {0};
    uint64_t fail_at;
    int i;

    (void)state;
    for (fail_at = 1;; fail_at++) {
        failing_alloc_init(&heap, fail_at);
        json.ctx = failing_alloc_context(&heap);
        json.status = MSC_OK;
        for (i = 0; i < 10000; i++)
            msc__json_i64(&json, i);
        assert_int_equal(json.status, heap.failed_count > 0 ? MSC_ENOMEM : MSC_OK);
        msc__json_fini(&json);
        msc_context_destroy(json.ctx);
        assert_true(failing_alloc_is_clean(&heap));
        if (heap.failed_count == 0)
            break;
    }
    assert_true(fail_at > 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_come_back),
        cmocka_unit_test(the_point_is_a_point),
        cmocka_unit_test(strings_are_escaped),
        cmocka_unit_test(memory_may_run_out),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
