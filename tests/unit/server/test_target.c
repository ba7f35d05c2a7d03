/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A target has one reading or none.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "http/http_target.h"

static const char *parse(const char *raw, http_target *out)
{
    static char room[HTTP_TARGET_BYTES + 16];

    return http_target_parse(raw, room, out);
}

static void test_parts(void **state)
{
    http_target target;

    (void)state;
    assert_null(parse("/api/v1/a%2Fb?x=1&y=a+b%26c&flag&x=2", &target));
    assert_int_equal(target.segment_count, 3);
    assert_string_equal(target.segments[2], "a/b");
    assert_int_equal(target.parameter_count, 4);
    assert_string_equal(http_target_find(&target, "x"), "1");
    assert_string_equal(http_target_find(&target, "y"), "a b&c");
    assert_string_equal(http_target_find(&target, "flag"), "");
    assert_string_equal(target.parameters[3].value, "2");
    assert_null(http_target_find(&target, "z"));
    assert_null(parse("/", &target));
    assert_int_equal(target.segment_count, 0);
    assert_null(parse("/%C3%A9?%F0%9F%98%80=", &target));
    assert_string_equal(target.segments[0], "\xc3\xa9");
}

static void test_what_is_refused(void **state)
{
    static const char *const wrong[] = {
        "",
        "x",
        "http://host/",
        "*",
        "//a",
        "/a//b",
        "/a/",
        "/./a",
        "/a/..",
        "/%2e%2e/a",
        "/%2E",
        "/%",
        "/%4",
        "/%zz",
        "/%00",
        "/a b",
        "/a\tb",
        "/a#b",
        "/\x7f",
        "/\xc3\xa9",
        "/?a=%00",
        "/?%=1",
        "/%C3",
        "/%C0%80",
        "/%ED%A0%80",
        "/%F4%90%80%80",
        "/1/2/3/4/5/6/7/8/9/10/11/12/13",
    };
    http_target target;

    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        if (parse(wrong[i], &target) == NULL)
            fail_msg("%s was taken", wrong[i]);
}

static void test_limits(void **state)
{
    char raw[HTTP_TARGET_BYTES + 8];
    char many[4 * (HTTP_PARAMETERS + 1) + 2] = "/?";
    http_target target;

    (void)state;
    memset(raw, 'a', sizeof raw);
    raw[0] = '/';
    raw[HTTP_TARGET_BYTES] = '\0';
    assert_null(parse(raw, &target));
    raw[HTTP_TARGET_BYTES] = 'a';
    raw[HTTP_TARGET_BYTES + 1] = '\0';
    assert_non_null(parse(raw, &target));
    for (unsigned i = 0; i < HTTP_PARAMETERS; i++)
        strcat(many, "a=1&");
    assert_null(parse(many, &target));
    strcat(many, "a");
    assert_non_null(parse(many, &target));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_what_is_refused),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
