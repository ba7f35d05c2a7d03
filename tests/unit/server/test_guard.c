/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The guard: which headers are let in. tests/server/test_raw_requests.py has the same on the wire.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "http/http_guard.h"

static const char *const hosts[] = {"localhost", "[::1]", "runs.example.org", NULL};

/* Lines "Name: value"; NULL ends. */
static unsigned guard(const char *version, const char *const *lines, http_guarded *out)
{
    http_field fields[8];
    uint32_t count = 0;

    for (; lines[count] != NULL; count++) {
        const char *colon = strchr(lines[count], ':');

        fields[count] =
            (http_field){lines[count], (size_t)(colon - lines[count]), colon + 2, strlen(colon + 2)};
    }
    return http_guard(version, fields, count, hosts, out).status;
}

#define GUARD(...) guard("HTTP/1.1", (const char *const[]){__VA_ARGS__, NULL}, &got)

static void test_let_in(void **state)
{
    http_guarded got;

    (void)state;
    assert_int_equal(GUARD("Host: localhost:8300", "Content-Length: 12", "X-A: b\tc"), 0);
    assert_true(got.has_length && got.length == 12);
    assert_string_equal(got.host, "localhost:8300");
    assert_int_equal(GUARD("host: LOCALHOST"), 0);
    assert_false(got.has_length);
    assert_int_equal(GUARD("Host: [::1]:80"), 0);
    assert_int_equal(GUARD("Host: [::1]"), 0);
    assert_int_equal(GUARD("Host: runs.example.org"), 0);
}

static void test_host(void **state)
{
    http_guarded got;

    (void)state;
    assert_int_equal(GUARD("X: y"), 400);
    assert_int_equal(GUARD("Host: localhost", "Host: localhost"), 400);
    assert_int_equal(GUARD("Host: evil.example"), 421);
    assert_int_equal(GUARD("Host: localhost.evil.example"), 421);
    assert_int_equal(GUARD("Host: localhost:8300:1"), 421);
    assert_int_equal(GUARD("Host: localhost:80x"), 421);
    assert_int_equal(GUARD("Host: localhost:123456"), 421);
    assert_int_equal(GUARD("Host: [::1"), 421);
    assert_int_equal(GUARD("Host: [::1]x"), 421);
    assert_int_equal(GUARD("Host: "), 421);
}

static void test_framing(void **state)
{
    static const char *const lengths[] = {"+5", "-1", "5,5", "0x5", "5 5", "", "99999999999999999999"};
    http_guarded got;
    char line[64];

    (void)state;
    assert_int_equal(GUARD("Host: localhost", "Transfer-Encoding: chunked"), 400);
    assert_int_equal(GUARD("Host: localhost", "transfer-encoding: identity", "Content-Length: 5"), 400);
    assert_int_equal(GUARD("Host: localhost", "Content-Length: 5", "Content-Length: 5"), 400);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        strcpy(line, "Content-Length: ");
        strcat(line, lengths[i]);
        if (GUARD("Host: localhost", line) != 400)
            fail_msg("%s was taken", line);
    }
}

static void test_names_and_values(void **state)
{
    http_guarded got;

    (void)state;
    assert_int_equal(GUARD("Host: localhost", "Content-Length : 5"), 400);
    assert_int_equal(GUARD("Host: localhost", "A(b: 5"), 400);
    assert_int_equal(GUARD("Host: localhost", ": 5"), 400);
    assert_int_equal(GUARD("Host: localhost", "A: b\x01"), 400);
    assert_int_equal(GUARD("Host: localhost", "A: b\rc"), 400);
    assert_int_equal(GUARD("Host: localhost", "A: b\x7f"), 400);
    assert_int_equal(GUARD("Host: localhost", "A: b\xc3\xa9"), 0);
}

static void test_version(void **state)
{
    const char *const lines[] = {"Host: localhost", NULL};
    http_guarded got;

    (void)state;
    assert_int_equal(guard("HTTP/1.0", lines, &got), 505);
    assert_int_equal(guard("HTTP/2.0", lines, &got), 505);
    assert_int_equal(guard("", lines, &got), 505);
}

static void test_find(void **state)
{
    const http_field fields[] = {{"Cookie", 6, "a", 1}, {"COOKIE", 6, "b", 1}};

    (void)state;
    assert_string_equal(http_field_find(fields, 2, "cookie"), "a");
    assert_null(http_field_find(fields, 2, "cooki"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_let_in),  cmocka_unit_test(test_host),
        cmocka_unit_test(test_framing), cmocka_unit_test(test_names_and_values),
        cmocka_unit_test(test_version), cmocka_unit_test(test_find),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
