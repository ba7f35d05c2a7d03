/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The canonical writer: buffer, length and digest must agree whatever room there is, because formats are
 * sized in one pass and written in the next, and digests are taken without a buffer.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "base/text.h"

#define GUARD 0x6e

static void test_without_buffer(void **state)
{
    msc__text text;

    (void)state;
    msc__text_init(&text, NULL, 100);
    msc__text_put(&text, "graph 1\n");
    msc__text_end(&text);
    assert_int_equal(text.length, 8);
}

/* Published test vectors of FNV-1a, 64 bit. */
static void test_digest_vectors(void **state)
{
    msc__text text;

    (void)state;
    msc__text_init(&text, NULL, 0);
    assert_true(text.digest == UINT64_C(0xcbf29ce484222325));
    msc__text_put(&text, "a");
    assert_true(text.digest == UINT64_C(0xaf63dc4c8601ec8c));
    msc__text_init(&text, NULL, 0);
    msc__text_put(&text, "foobar");
    assert_true(text.digest == UINT64_C(0x85944171f73967e8));
}

static void test_digest_of_high_bytes(void **state)
{
    msc__text text;

    (void)state;
    msc__text_init(&text, NULL, 0);
    msc__text_put(&text, "\xff"); /* a signed char would be extended to 64 ones */
    assert_true(text.digest == (UINT64_C(0xcbf29ce484222325) ^ 0xff) * UINT64_C(0x100000001b3));
}

/* Whatever the room: never a byte beyond it, always a terminator, always the same length and digest. */
static void test_every_room(void **state)
{
    const char *whole = "module 12 00000000000000ff";
    size_t length = strlen(whole);
    uint64_t digest = 0;
    size_t room;

    (void)state;
    for (room = 0; room <= length + 2; room++) {
        char buffer[64];
        size_t kept = room == 0 ? 0 : room - 1 < length ? room - 1 : length;
        msc__text text;

        memset(buffer, GUARD, sizeof buffer);
        msc__text_init(&text, buffer, room);
        msc__text_put(&text, "module ");
        msc__text_put_u64(&text, 12);
        msc__text_put_char(&text, ' ');
        msc__text_put_hex64(&text, 255);
        msc__text_end(&text);
        assert_int_equal(text.length, length);
        assert_memory_equal(buffer, whole, kept);
        if (room > 0)
            assert_int_equal(buffer[kept], 0);
        assert_int_equal(buffer[room == 0 ? 0 : kept + 1], GUARD);
        if (room > 0)
            assert_true(text.digest == digest);
        digest = text.digest;
    }
}

static void assert_number(uint64_t value, const char *expected)
{
    char buffer[32];
    msc__text text;

    msc__text_init(&text, buffer, sizeof buffer);
    msc__text_put_u64(&text, value);
    msc__text_end(&text);
    assert_string_equal(buffer, expected);
}

static void assert_hex(uint64_t value, const char *expected)
{
    char buffer[32];
    msc__text text;

    msc__text_init(&text, buffer, sizeof buffer);
    msc__text_put_hex64(&text, value);
    msc__text_end(&text);
    assert_string_equal(buffer, expected);
}

static void test_numbers(void **state)
{
    (void)state;
    assert_number(0, "0");
    assert_number(9, "9");
    assert_number(10, "10");
    assert_number(UINT64_MAX, "18446744073709551615");
    assert_hex(0, "0000000000000000");
    assert_hex(UINT64_C(0x0123456789abcdef), "0123456789abcdef");
    assert_hex(UINT64_MAX, "ffffffffffffffff");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"put/without-buffer", test_without_buffer, NULL, NULL, NULL},
        {"digest/published-vectors", test_digest_vectors, NULL, NULL, NULL},
        {"digest/high-bytes", test_digest_of_high_bytes, NULL, NULL, NULL},
        {"put/every-room", test_every_room, NULL, NULL, NULL},
        {"put/numbers", test_numbers, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("base/text", tests, NULL, NULL);
}
