/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules of a consistent graph, one violation at a time. Text is the only way to violate them, since
 * the builders cannot; each case is the valid text below with one line changed, and names the line and
 * the record that the message must name.
 */
#include "graph_fixture.h"

#include <stdio.h>

/* The lines, counted from 1; line 2 has the counts. Four operations; call 1 and 2 lie in call 0. */
static const char *const valid_lines[] = {
    "memscale-graph 1",
    "counts 2 3 4 3 2 2 2",
    "module - 1 0000000000000000 0 ",   /*  3: module 0 */
    "type Model",                       /*  4 */
    "module 0 0 00000000000000aa 16 a", /*  5: module 1 */
    "type Block",                       /*  6 */
    "call 0 - 0 3",                     /*  7: call 0 */
    "call 1 0 0 1",                     /*  8 */
    "call 1 0 1 2",                     /*  9 */
    "op 1 0 0 1 2 3 x",                 /* 10: op 0 */
    "op 2 0 1 1 2 3 y",                 /* 11 */
    "op 0 1 0 1 2 3 x",                 /* 12 */
    "op - 2 0 1 2 3 x",                 /* 13 */
    "buffer 100 0 1 0 5",               /* 14: buffer 0 */
    "buffer 200 5 0 0 2",               /* 15 */
    "buffer 300 5 0 2 4",               /* 16 */
    "save 1 1 1 2 3",                   /* 17: save 0 */
    "save 0 - 3 4 4",                   /* 18 */
    "input 1 0",                        /* 19: input 0 */
    "input 2 1",                        /* 20 */
    "write 1 1",                        /* 21: write 0 */
    "write 2 0",                        /* 22 */
    "end",
};

#define LINE_COUNT (sizeof valid_lines / sizeof valid_lines[0])

/* Parses the valid text with line `line` (0: none) replaced. */
static msc_status parse_with(graph_fixture *f, uint32_t line, const char *replacement)
{
    char text[2048] = "";
    msc_graph *graph = f->graph;
    msc_status status;
    size_t length = 0;
    size_t i;

    for (i = 0; i < LINE_COUNT; i++)
        length += (size_t)snprintf(text + length, sizeof text - length, "%s\n",
                                   i + 1 == line ? replacement : valid_lines[i]);
    assert_in_range(length, 1, sizeof text - 1);
    memset(&f->err, 0, sizeof f->err);
    status = msc_graph_parse(f->ctx, text, length, &graph, &f->err);
    assert_int_equal(status != MSC_OK, graph == NULL);
    msc_graph_destroy(graph);
    return status;
}

static void assert_refused(graph_fixture *f, uint32_t line, const char *replacement, const char *message)
{
    assert_int_equal(parse_with(f, line, replacement), MSC_EFORMAT);
    assert_int_equal(f->err.status, MSC_EFORMAT);
    assert_string_equal(f->err.message, message);
}

static void test_valid(void **state)
{
    assert_int_equal(parse_with(*state, 0, ""), MSC_OK);
}

static void test_modules(void **state)
{
    assert_refused(*state, 3, "module 0 1 0000000000000000 0 ",
                   "graph, line 3: module 0: the parent does not come before it");
    assert_refused(*state, 5, "module 1 0 00000000000000aa 16 a",
                   "graph, line 5: module 1: the parent does not come before it");
    assert_refused(*state, 5, "module 0 4096 00000000000000aa 16 a",
                   "graph, line 5: module 1: unknown flags");
}

static void test_calls(void **state)
{
    assert_refused(*state, 7, "call 2 - 0 3", "graph, line 7: call 0: no such module");
    assert_refused(*state, 7, "call 0 - 0 5",
                   "graph, line 7: call 0: begin <= end <= operations does not hold");
    assert_refused(*state, 9, "call 1 0 2 1",
                   "graph, line 9: call 2: begin <= end <= operations does not hold");
    assert_refused(*state, 8, "call 1 1 0 1", "graph, line 8: call 1: the parent does not come before it");
    assert_refused(*state, 8, "call 1 2 0 1", "graph, line 8: call 1: the parent does not come before it");
    assert_refused(*state, 9, "call 1 0 0 2",
                   "graph, line 9: call 2: overlaps a call that does not enclose it");
    assert_refused(*state, 9, "call 1 - 1 2",
                   "graph, line 9: call 2: overlaps a call that does not enclose it");
    assert_refused(*state, 9, "call 1 0 1 4", "graph, line 9: call 2: does not lie inside its parent");
    assert_refused(*state, 7, "call 0 - 1 3",
                   "graph, line 8: call 1: begins before the call listed before it");
}

static void test_parent_that_has_ended(void **state)
{
    graph_fixture *f = *state;
    msc_graph *graph = f->graph;
    const char *text = "memscale-graph 1\ncounts 1 3 2 0 0 0 0\n"
                       "module - 0 0000000000000000 0 m\ntype M\n"
                       "call 0 - 0 1\ncall 0 - 1 2\ncall 0 0 2 2\n"
                       "op 0 0 0 0 0 0 a\nop 1 0 0 0 0 0 a\nend\n";

    assert_int_equal(msc_graph_parse(f->ctx, text, strlen(text), &graph, &f->err), MSC_EFORMAT);
    assert_null(graph);
    assert_string_equal(f->err.message, "graph, line 7: call 2: the parent is not an open call");
}

static void test_ops(void **state)
{
    assert_refused(*state, 11, "op 1 0 1 1 2 3 y",
                   "graph, line 11: op 1: its call is not the innermost one around it");
    assert_refused(*state, 11, "op 0 0 1 1 2 3 y",
                   "graph, line 11: op 1: its call is not the innermost one around it");
    assert_refused(*state, 13, "op 0 2 0 1 2 3 x",
                   "graph, line 13: op 3: its call is not the innermost one around it");
    assert_refused(*state, 13, "op - 3 0 1 2 3 x", "graph, line 13: op 3: no such phase");
    assert_refused(*state, 13, "op - 0 0 1 2 3 x", "graph, line 13: op 3: the phase goes back");
    assert_refused(*state, 13, "op - 2 4 1 2 3 x", "graph, line 13: op 3: unknown flags");
}

static void test_buffers(void **state)
{
    graph_fixture *f = *state;

    assert_refused(f, 14, "buffer 100 8 1 0 5", "graph, line 14: buffer 0: no such category");
    assert_refused(f, 14, "buffer 100 0 2 0 5", "graph, line 14: buffer 0: resident is neither 0 nor 1");
    assert_int_equal(parse_with(f, 14, "buffer 100 7 1 1 5"), MSC_OK);
    assert_refused(f, 14, "buffer 100 7 1 5 5", "graph, line 14: buffer 0: no such operation makes it");
    assert_refused(f, 16, "buffer 300 5 0 4 4", "graph, line 16: buffer 2: no such operation makes it");
    assert_refused(f, 16, "buffer 300 5 0 2 1",
                   "graph, line 16: buffer 2: begin <= end <= operations + 1 does not hold");
    assert_refused(f, 16, "buffer 300 5 0 2 6",
                   "graph, line 16: buffer 2: begin <= end <= operations + 1 does not hold");
    assert_int_equal(parse_with(f, 16, "buffer 4611686018427387604 5 0 2 4"), MSC_OK);
    assert_int_equal(parse_with(f, 16, "buffer 4611686018427387605 5 0 2 4"), MSC_EOVERFLOW);
    assert_string_equal(f->err.message, "graph, line 16: buffer 2: all buffers exceed 2^62 bytes");
}

static void test_saves(void **state)
{
    const char *order = "graph, line 17: save 0: pack <= unpack <= release <= operations does not hold";

    assert_refused(*state, 17, "save 3 1 1 2 3", "graph, line 17: save 0: no such buffer");
    assert_refused(*state, 17, "save 2 1 1 2 3",
                   "graph, line 17: save 0: is packed before its buffer begins");
    assert_refused(*state, 17, "save 1 1 1 0 3", order);
    assert_refused(*state, 17, "save 1 1 1 3 2", order);
    assert_refused(*state, 17, "save 1 1 1 2 5", order);
    assert_refused(*state, 17, "save 1 3 1 2 3", "graph, line 17: save 0: no such call");
    assert_refused(*state, 17, "save 1 1 2 2 3", "graph, line 17: save 0: is packed outside its call");
    assert_refused(*state, 17, "save 1 2 0 2 3", "graph, line 17: save 0: is packed outside its call");
}

static void test_inputs(void **state)
{
    assert_refused(*state, 19, "input 3 0", "graph, line 19: input 0: no such call");
    assert_refused(*state, 19, "input 1 3", "graph, line 19: input 0: no such buffer");
    assert_refused(*state, 20, "input 0 1", "graph, line 20: input 1: inputs are not sorted by call");
    assert_refused(*state, 19, "input 1 2", "graph, line 19: input 0: the buffer begins after the call");
    assert_refused(*state, 20, "input 1 0", "graph, line 20: the same input twice");
}

static void test_writes(void **state)
{
    assert_refused(*state, 22, "write 4 0", "graph, line 22: write 1: no such operation");
    assert_refused(*state, 22, "write 2 3", "graph, line 22: write 1: no such buffer");
    assert_refused(*state, 22, "write 0 0", "graph, line 22: write 1: writes are not in program order");
    assert_refused(*state, 21, "write 1 2", "graph, line 21: write 0: the buffer begins after the operation");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        GRAPH_CASE("valid", test_valid),
        GRAPH_CASE("module", test_modules),
        GRAPH_CASE("call", test_calls),
        GRAPH_CASE("call/parent-that-has-ended", test_parent_that_has_ended),
        GRAPH_CASE("op", test_ops),
        GRAPH_CASE("buffer", test_buffers),
        GRAPH_CASE("save", test_saves),
        GRAPH_CASE("input", test_inputs),
        GRAPH_CASE("write", test_writes),
    };
    return cmocka_run_group_tests_name("graph_validate", tests, NULL, NULL);
}
