/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reader of canonical text: what it accepts, what it refuses, that it stops at the first error, and that
 * it never looks beyond the given bytes (the text ends at the end of a heap block, where a sanitizer sees).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "base/reader.h"

static char *text_copy;
static msc_error last_error;

/* A reader over a copy of `text` that has no terminator and nothing behind it. */
static msc__reader read_text(const char *text)
{
    msc__reader reader;
    size_t bytes = strlen(text);

    free(text_copy);
    text_copy = malloc(bytes == 0 ? 1 : bytes);
    assert_non_null(text_copy);
    memcpy(text_copy, text, bytes);
    memset(&last_error, 0, sizeof last_error);
    msc__reader_init(&reader, "graph", text_copy, bytes, &last_error);
    return reader;
}

static int release_text(void **state)
{
    (void)state;
    free(text_copy);
    text_copy = NULL;
    return 0;
}

static void assert_format_error(const msc__reader *reader, const char *message)
{
    assert_int_equal(reader->status, MSC_EFORMAT);
    assert_int_equal(last_error.status, MSC_EFORMAT);
    assert_string_equal(last_error.message, message);
}

static void test_line_of_words(void **state)
{
    msc__reader reader = read_text("op 17 00000000000000ff add mm\nend");
    const char *rest;
    size_t rest_bytes;
    uint64_t value;

    (void)state;
    assert_true(msc__reader_expect(&reader, "op"));
    assert_true(msc__reader_u64(&reader, 17, &value));
    assert_int_equal(value, 17);
    assert_true(msc__reader_hex64(&reader, &value));
    assert_int_equal(value, 255);
    assert_true(msc__reader_rest(&reader, &rest, &rest_bytes));
    assert_int_equal(rest_bytes, 6);
    assert_memory_equal(rest, "add mm", 6);
    assert_true(msc__reader_line_end(&reader));
    assert_int_equal(reader.line, 2);
    assert_false(msc__reader_at_end(&reader));
    assert_true(msc__reader_expect(&reader, "end"));
    assert_true(msc__reader_at_end(&reader));
    assert_int_equal(reader.status, MSC_OK);
}

static void test_empty(void **state)
{
    msc__reader reader = read_text("");
    const char *word;
    size_t bytes;

    (void)state;
    assert_true(msc__reader_at_end(&reader));
    assert_true(msc__reader_rest(&reader, &word, &bytes));
    assert_int_equal(bytes, 0);
    assert_false(msc__reader_word(&reader, &word, &bytes));
    assert_format_error(&reader, "graph, line 1: a word is missing");
}

static void test_rest_may_be_empty(void **state)
{
    msc__reader reader = read_text("module \n");
    const char *rest;
    size_t bytes = 1;

    (void)state;
    assert_true(msc__reader_expect(&reader, "module"));
    assert_true(msc__reader_rest(&reader, &rest, &bytes));
    assert_int_equal(bytes, 0);
    assert_true(msc__reader_line_end(&reader));
    assert_true(msc__reader_at_end(&reader));
}

static void test_two_spaces(void **state)
{
    msc__reader reader = read_text("a  b");

    (void)state;
    assert_true(msc__reader_expect(&reader, "a"));
    assert_false(msc__reader_expect(&reader, "b"));
    assert_format_error(&reader, "graph, line 1: a word is missing");
}

static void test_unexpected_word(void **state)
{
    static const char *const wrong[] = {"operation", "o", "OP", "\xc3p"};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        msc__reader reader = read_text(wrong[i]);
        assert_false(msc__reader_expect(&reader, "op"));
        assert_format_error(&reader, "graph, line 1: an unexpected word");
    }
}

static void test_line_end_missing(void **state)
{
    msc__reader reader = read_text("a b");

    (void)state;
    assert_true(msc__reader_expect(&reader, "a"));
    assert_false(msc__reader_line_end(&reader));
    assert_format_error(&reader, "graph, line 1: the line should end here");

    reader = read_text("a");
    assert_true(msc__reader_expect(&reader, "a"));
    assert_false(msc__reader_line_end(&reader)); /* the last line needs its end too */
    assert_format_error(&reader, "graph, line 1: the line should end here");
}

static void test_trailing_space(void **state)
{
    msc__reader reader = read_text("a \n");

    (void)state;
    assert_true(msc__reader_expect(&reader, "a"));
    assert_false(msc__reader_line_end(&reader));
    assert_format_error(&reader, "graph, line 1: the line should end here");
}

static void test_carriage_return_is_no_break(void **state)
{
    msc__reader reader = read_text("end\r\n");

    (void)state;
    assert_false(msc__reader_expect(&reader, "end"));
    assert_format_error(&reader, "graph, line 1: an unexpected word");
}

static void test_unsigned_range(void **state)
{
    msc__reader reader = read_text("0 18446744073709551615 5");
    uint64_t value = 7;

    (void)state;
    assert_true(msc__reader_u64(&reader, 0, &value));
    assert_int_equal(value, 0);
    assert_true(msc__reader_u64(&reader, UINT64_MAX, &value));
    assert_true(value == UINT64_MAX);
    assert_false(msc__reader_u64(&reader, 4, &value));
    assert_format_error(&reader, "graph, line 1: a number out of range");
}

static void assert_not_unsigned(const char *text, const char *message)
{
    msc__reader reader = read_text(text);
    uint64_t value = 7;

    assert_false(msc__reader_u64(&reader, UINT64_MAX, &value));
    assert_format_error(&reader, message);
    assert_int_equal(value, 7);
}

static void test_unsigned_refuses(void **state)
{
    (void)state;
    assert_not_unsigned("18446744073709551616", "graph, line 1: a number beyond 64 bits");
    assert_not_unsigned("99999999999999999999", "graph, line 1: a number beyond 64 bits");
    assert_not_unsigned("00", "graph, line 1: a number with a leading zero");
    assert_not_unsigned("012", "graph, line 1: a number with a leading zero");
    assert_not_unsigned("+1", "graph, line 1: not a decimal number");
    assert_not_unsigned("-1", "graph, line 1: not a decimal number");
    assert_not_unsigned("1e3", "graph, line 1: not a decimal number");
    assert_not_unsigned("0x10", "graph, line 1: a number with a leading zero");
    assert_not_unsigned("1/", "graph, line 1: not a decimal number"); /* '/' and ':' lie beside the digits */
    assert_not_unsigned("1:", "graph, line 1: not a decimal number");
    assert_not_unsigned("\t1", "graph, line 1: not a decimal number");
    assert_not_unsigned("\n1", "graph, line 1: a word is missing");
}

static void test_hex_refuses(void **state)
{
    static const char *const wrong[] = {"0",
                                        "0123456789abcde",
                                        "0123456789abcdef0",
                                        "0123456789ABCDEF",
                                        "0x23456789abcdef",
                                        "0123456789abcdeg",
                                        "0123456 89abcdef"};
    size_t i;

    (void)state;
    for (i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        msc__reader reader = read_text(wrong[i]);
        uint64_t value = 7;
        assert_false(msc__reader_hex64(&reader, &value));
        assert_format_error(&reader, "graph, line 1: not 16 hexadecimal digits");
        assert_int_equal(value, 7);
    }
}

static void test_first_error_stays(void **state)
{
    msc__reader reader = read_text("graph 1\nop x\n");
    const char *word;
    size_t bytes;
    uint64_t value;

    (void)state;
    assert_true(msc__reader_expect(&reader, "graph"));
    assert_true(msc__reader_u64(&reader, 1, &value));
    assert_true(msc__reader_line_end(&reader));
    assert_true(msc__reader_expect(&reader, "op"));
    assert_false(msc__reader_u64(&reader, 9, &value));
    assert_false(msc__reader_word(&reader, &word, &bytes));
    assert_false(msc__reader_expect(&reader, "op"));
    assert_false(msc__reader_u64(&reader, 9, &value));
    assert_false(msc__reader_hex64(&reader, &value));
    assert_false(msc__reader_rest(&reader, &word, &bytes));
    assert_false(msc__reader_line_end(&reader));
    assert_false(msc__reader_fail(&reader, MSC_EVERSION, "another"));
    assert_format_error(&reader, "graph, line 2: not a decimal number");
}

static void test_without_record(void **state)
{
    msc__reader reader;
    uint64_t value;

    (void)state;
    msc__reader_init(&reader, "plan", "x", 1, NULL);
    assert_false(msc__reader_u64(&reader, 9, &value));
    assert_int_equal(reader.status, MSC_EFORMAT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"line/words", test_line_of_words, NULL, NULL, NULL},
        {"line/empty", test_empty, NULL, NULL, NULL},
        {"line/rest-may-be-empty", test_rest_may_be_empty, NULL, NULL, NULL},
        {"line/two-spaces", test_two_spaces, NULL, NULL, NULL},
        {"line/end-missing", test_line_end_missing, NULL, NULL, NULL},
        {"line/trailing-space", test_trailing_space, NULL, NULL, NULL},
        {"line/carriage-return", test_carriage_return_is_no_break, NULL, NULL, NULL},
        {"word/unexpected", test_unexpected_word, NULL, NULL, NULL},
        {"unsigned/range", test_unsigned_range, NULL, NULL, NULL},
        {"unsigned/refuses", test_unsigned_refuses, NULL, NULL, NULL},
        {"hex/refuses", test_hex_refuses, NULL, NULL, NULL},
        {"error/first-stays", test_first_error_stays, NULL, NULL, NULL},
        {"error/without-record", test_without_record, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("base/reader", tests, NULL, release_text);
}
