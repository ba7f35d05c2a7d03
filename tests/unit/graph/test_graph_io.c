/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Canonical text: exactly one text per graph, read back byte for byte; hostile text refused with the line;
 * files replaced whole or not at all.
 */
#include "graph_fixture.h"

#include <stdio.h>

#define MOST_REQUESTS 1000u
#define FILE_NAME "test_graph_io.graph"
#define MOST_TEXT_BYTES 4096u

/* The step of graph_fixture.h as text: a golden value, since digests in stored plans depend on it. */
static const char step_text[] = "memscale-graph 1\n"
                                "counts 2 2 5 4 1 2 1\n"
                                "module - 1 0000000000000000 0 \n"
                                "type My Model\n"
                                "module 0 0 0000000000abcdef 16 layer.0\n"
                                "type Linear\n"
                                "call 0 - 0 3\n"
                                "call 1 0 0 2\n"
                                "op 1 0 0 100 64 8 aten.linear\n"
                                "op 1 0 0 100 64 8 aten.gelu\n"
                                "op 0 0 0 100 64 8 aten.loss\n"
                                "op - 1 0 100 64 8 aten.gelu\n"
                                "op - 1 0 100 64 8 aten.linear\n"
                                "buffer 1000 0 1 0 6\n"
                                "buffer 200 5 0 0 2\n"
                                "buffer 300 5 0 1 4\n"
                                "buffer 1000 2 0 3 6\n"
                                "save 1 1 1 3 4\n"
                                "input 0 0\n"
                                "input 1 0\n"
                                "write 1 0\n"
                                "end\n";

/* Two operations with classes, one of them in half precision, and with a note or without. */
#define CLASSED_RECORDS "op - 0 2 10 100 8 0 mm\nop - 0 0 0 0 8 0 view\n"
static const char classed_text[] = "memscale-graph 3\n"
                                   "counts 0 0 2 0 0 0 0\n" CLASSED_RECORDS "end\n";
static const char noted_text[] = "memscale-graph 4\n"
                                 "counts 0 0 2 0 0 0 0 1 0\n" CLASSED_RECORDS "op-note 1 - train.py:3\n"
                                 "end\n";

static uint64_t fnv1a(const char *text)
{
    uint64_t digest = 14695981039346656037u;

    for (; *text != '\0'; text++)
        digest = (digest ^ (unsigned char)*text) * 1099511628211u;
    return digest;
}

static void assert_refused(graph_fixture *f, const char *text, msc_status status, const char *message)
{
    msc_graph *graph = f->graph;

    memset(&f->err, 0, sizeof f->err);
    assert_int_equal(msc_graph_parse(f->ctx, text, strlen(text), &graph, &f->err), status);
    assert_null(graph);
    assert_int_equal(f->err.status, status);
    assert_string_equal(f->err.message, message);
}

static void test_format(void **state)
{
    graph_fixture *f = *state;
    char text[MOST_TEXT_BYTES];
    size_t needed = 0;

    assert_int_equal(msc_graph_format(f->graph, text, sizeof text, &needed, &f->err), MSC_ESTATE);
    assert_int_equal(build_step(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_format(f->graph, text, sizeof text, &needed, &f->err), MSC_OK);
    assert_string_equal(text, step_text);
    assert_int_equal(needed, strlen(step_text));
    assert_int_equal(msc_graph_digest(f->graph), fnv1a(step_text));
}

static void test_format_into_little_room(void **state)
{
    graph_fixture *f = *state;
    char text[8] = "#######";
    size_t needed = 0;

    assert_int_equal(build_step(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_format(f->graph, NULL, 0, &needed, &f->err), MSC_OK);
    assert_int_equal(needed, strlen(step_text));
    assert_int_equal(msc_graph_format(f->graph, NULL, 4, &needed, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_format(f->graph, text, 4, NULL, &f->err), MSC_OK);
    assert_memory_equal(text, "mem\0###", 8);
}

static void test_parse(void **state)
{
    graph_fixture *f = *state;
    char text[MOST_TEXT_BYTES];
    msc_graph *graph = NULL;

    assert_int_equal(build_step(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_parse(f->ctx, step_text, strlen(step_text), &graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_is_finished(graph), 1);
    assert_int_equal(msc_graph_digest(graph), msc_graph_digest(f->graph));
    assert_int_equal(msc_graph_format(graph, text, sizeof text, NULL, &f->err), MSC_OK);
    assert_string_equal(text, step_text);
    assert_string_equal(msc_graph_string(graph, msc_graph_modules(graph)[0].type), "My Model");
    assert_string_equal(msc_graph_string(graph, msc_graph_modules(graph)[0].path), "");
    assert_int_equal(msc_graph_set_phase(graph, MSC_PHASE_OPTIMIZER, &f->err), MSC_ESTATE);
    msc_graph_destroy(graph);
}

static msc_status build_classed(graph_fixture *f)
{
    const msc_op product = {
        .flags = MSC_OP_HALF, .work = MSC_WORK_MATRIX, .flops = 100, .moved_bytes = 8, .pad = 7};
    const msc_op view = {.moved_bytes = 8};
    msc_status status = msc_graph_add_op(f->graph, "mm", &product, NULL, &f->err);

    return status == MSC_OK ? msc_graph_add_op(f->graph, "view", &view, NULL, &f->err) : status;
}

/* A class of work makes another version of the text, with the same notes or none, and another digest. */
static void test_classes_of_work(void **state)
{
    graph_fixture *f = *state;
    const char *const texts[] = {classed_text, noted_text};
    char text[MOST_TEXT_BYTES];
    msc_graph *graph = NULL;
    size_t i;

    assert_int_equal(build_classed(f), MSC_OK);
    assert_int_equal(msc_graph_ops(f->graph)[0].pad, 0);
    assert_int_equal(msc_graph_note_op(f->graph, MSC_NONE, "train.py:3", &f->err), MSC_OK);
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_digest(f->graph), fnv1a(classed_text));
    assert_int_equal(msc_graph_format(f->graph, text, sizeof text, NULL, &f->err), MSC_OK);
    assert_string_equal(text, noted_text);
    for (i = 0; i < 2; i++) {
        assert_int_equal(msc_graph_parse(f->ctx, texts[i], strlen(texts[i]), &graph, &f->err), MSC_OK);
        assert_int_equal(msc_graph_ops(graph)[0].work, MSC_WORK_MATRIX);
        assert_int_equal(msc_graph_ops(graph)[0].flags, MSC_OP_HALF);
        assert_int_equal(msc_graph_digest(graph), msc_graph_digest(f->graph));
        assert_int_equal(msc_graph_format(graph, text, sizeof text, NULL, &f->err), MSC_OK);
        assert_string_equal(text, texts[i]);
        msc_graph_destroy(graph);
    }
}

static void test_bad_classes_of_work(void **state)
{
    graph_fixture *f = *state;

    assert_refused(f, "memscale-graph 3\ncounts 0 0 1 0 0 0 0\nop - 0 0 17 1 8 0 mm\nend\n", MSC_EFORMAT,
                   "graph, line 3: op 0: no such class of work");
    assert_refused(f, "memscale-graph 3\ncounts 0 0 1 0 0 0 0\nop - 0 0 0 1 8 0 mm\nend\n", MSC_EFORMAT,
                   "graph, line 5: a version with classes of work, without any");
    assert_refused(f, "memscale-graph 3\ncounts 0 0 1 0 0 0 0\nop - 0 0 256 1 8 0 mm\nend\n", MSC_EFORMAT,
                   "graph, line 3: a number out of range");
    assert_refused(f, "memscale-graph 1\ncounts 0 0 1 0 0 0 0\nop - 0 4 1 8 0 mm\nend\n", MSC_EFORMAT,
                   "graph, line 3: op 0: unknown flags");
}

/* The order in which names were first used is no part of a graph. */
static void test_digest_ignores_building_order(void **state)
{
    graph_fixture *f = *state;
    const msc_module root = {.parent = MSC_NONE};
    const msc_op op = {0};
    msc_graph *other = NULL;

    assert_int_equal(msc_graph_add_module(f->graph, "m", "M", &root, NULL, &f->err), MSC_OK);
    assert_int_equal(msc_graph_add_op(f->graph, "a", &op, NULL, &f->err), MSC_OK);
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_create(f->ctx, &other, &f->err), MSC_OK);
    assert_int_equal(msc_graph_add_op(other, "a", &op, NULL, &f->err), MSC_OK);
    assert_int_equal(msc_graph_add_module(other, "m", "M", &root, NULL, &f->err), MSC_OK);
    assert_int_equal(msc_graph_finish(other, &f->err), MSC_OK);
    assert_int_equal(msc_graph_digest(f->graph), msc_graph_digest(other));
    msc_graph_destroy(other);
}

static void test_every_truncation_is_refused(void **state)
{
    graph_fixture *f = *state;
    msc_graph *graph;
    size_t length;

    for (length = 0; length < strlen(step_text); length++) {
        char *copy = malloc(length == 0 ? 1 : length);
        assert_non_null(copy);
        memcpy(copy, step_text, length);
        graph = f->graph;
        assert_int_equal(msc_graph_parse(f->ctx, copy, length, &graph, &f->err), MSC_EFORMAT);
        assert_null(graph);
        free(copy);
    }
}

/* A changed byte is refused or gives a graph whose own text is the changed text. */
static void test_every_changed_byte(void **state)
{
    static const char bytes[] = {' ', '\n', '0', '9', '-', 'x', '\0', '\r', '\x80'};
    graph_fixture *f = *state;
    char text[sizeof step_text];
    char again[MOST_TEXT_BYTES];
    uint32_t accepted = 0;
    size_t i;
    size_t k;

    for (i = 0; i < strlen(step_text); i++) {
        for (k = 0; k < sizeof bytes; k++) {
            msc_graph *graph = NULL;
            memcpy(text, step_text, sizeof text);
            text[i] = bytes[k];
            if (msc_graph_parse(f->ctx, text, strlen(step_text), &graph, &f->err) != MSC_OK)
                continue;
            assert_int_equal(msc_graph_format(graph, again, sizeof again, NULL, &f->err), MSC_OK);
            assert_memory_equal(again, text, sizeof text);
            msc_graph_destroy(graph);
            accepted++;
        }
    }
    assert_in_range(accepted, 100, 4000);
}

static void test_bad_lines(void **state)
{
    graph_fixture *f = *state;

    assert_refused(f, "", MSC_EFORMAT, "graph, line 1: a word is missing");
    assert_refused(f, "memscale-plan 1\n", MSC_EFORMAT, "graph, line 1: an unexpected word");
    assert_refused(f, "memscale-graph 5\n", MSC_EVERSION, "graph, line 1: a version other than 1 to 4");
    assert_refused(f, "memscale-graph 0\n", MSC_EVERSION, "graph, line 1: a version other than 1 to 4");
    assert_refused(f, "memscale-graph 1 \n", MSC_EFORMAT, "graph, line 1: a space at the end of the line");
    assert_refused(f, "memscale-graph 1\ncounts 0 0 0 0 0 0 00\n", MSC_EFORMAT,
                   "graph, line 2: a number with a leading zero");
    assert_refused(f, "memscale-graph 1\ncounts 0 0 0 0 0 0\n", MSC_EFORMAT,
                   "graph, line 2: a word is missing");
    assert_refused(f, "memscale-graph 1\ncounts 0 0 0 0 0 0 4294967295\n", MSC_EFORMAT,
                   "graph, line 2: a number out of range");
    assert_refused(f, "memscale-graph 1\ncounts 0 0 0 0 0 0 0\nend\n\n", MSC_EFORMAT,
                   "graph, line 4: text after the end");
    assert_refused(f, "memscale-graph 1\ncounts 0 0 1 0 0 0 0\nop - 0 0 0 0 0\nend\n", MSC_EFORMAT,
                   "graph, line 3: a name is missing");
    assert_refused(f, "memscale-graph 1\ncounts 0 0 1 0 0 0 0\nop - 0 0 0 0 0 a\tb\nend\n", MSC_EFORMAT,
                   "graph, line 3: a name with control character 9");
    assert_refused(f, "memscale-graph 1\ncounts 0 0 1 0 0 0 0\nop - 0 256 0 0 0 a\nend\n", MSC_EFORMAT,
                   "graph, line 3: a number out of range");
}

static void test_huge_counts_cost_nothing(void **state)
{
    graph_fixture *f = *state;
    uint64_t held = msc_context_held_bytes(f->ctx);

    assert_refused(f, "memscale-graph 1\ncounts 4294967294 4294967294 4294967294 4294967294 1 1 1\nend\n",
                   MSC_EFORMAT, "graph, line 3: an unexpected word");
    assert_int_equal(msc_context_held_bytes(f->ctx), held);
    assert_in_range(msc_context_peak_bytes(f->ctx), held, held + 4096);
}

static void test_arguments(void **state)
{
    graph_fixture *f = *state;
    msc_graph *graph = f->graph;

    assert_int_equal(msc_graph_parse(f->ctx, "", 0, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_parse(f->ctx, NULL, 0, &graph, &f->err), MSC_EINVAL);
    assert_null(graph);
    graph = f->graph;
    assert_int_equal(msc_graph_load_file(f->ctx, NULL, &graph, &f->err), MSC_EINVAL);
    assert_null(graph);
    assert_int_equal(msc_graph_load_file(f->ctx, "x", NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_save_file(f->graph, NULL, &f->err), MSC_EINVAL);
}

static void test_file_round_trip(void **state)
{
    graph_fixture *f = *state;
    msc_graph *graph = NULL;
    FILE *file = fopen(FILE_NAME, "wb");

    assert_non_null(file);
    assert_true(fputs("old", file) >= 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(msc_graph_save_file(f->graph, FILE_NAME, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_load_file(f->ctx, FILE_NAME, &graph, &f->err), MSC_EFORMAT);
    assert_int_equal(build_step(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_save_file(f->graph, FILE_NAME, &f->err), MSC_OK);
    assert_int_equal(msc_graph_load_file(f->ctx, FILE_NAME, &graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_digest(graph), msc_graph_digest(f->graph));
    msc_graph_destroy(graph);
    assert_null(fopen(FILE_NAME ".tmp00", "rb"));
    assert_int_equal(remove(FILE_NAME), 0);
}

/* Someone else's temporary file is neither used nor removed. */
static void test_file_beside_another_writer(void **state)
{
    graph_fixture *f = *state;
    FILE *file = fopen(FILE_NAME ".tmp00", "wb");

    assert_non_null(file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(build_step(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_save_file(f->graph, FILE_NAME, &f->err), MSC_OK);
    assert_int_equal(remove(FILE_NAME ".tmp00"), 0);
    assert_int_equal(remove(FILE_NAME), 0);
}

static void test_file_errors(void **state)
{
    graph_fixture *f = *state;
    msc_graph *graph = f->graph;

    assert_int_equal(msc_graph_load_file(f->ctx, "no-such-folder/x", &graph, &f->err), MSC_EIO);
    assert_null(graph);
    assert_int_not_equal(f->err.driver_code, 0);
    assert_non_null(strstr(f->err.message, "no-such-folder/x"));
    graph = f->graph;
    assert_int_equal(msc_graph_load_file(f->ctx, ".", &graph, &f->err), MSC_EIO);
    assert_null(graph);
    assert_int_equal(build_step(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_save_file(f->graph, "no-such-folder/x", &f->err), MSC_EIO);
    assert_int_equal(msc_graph_save_file(f->graph, ".", &f->err), MSC_EIO);
}

static void test_parse_without_memory(void **state)
{
    static graph_fixture f;
    msc_status status = MSC_ENOMEM;
    uint64_t request;

    (void)state;
    for (request = 0; request < MOST_REQUESTS && status != MSC_OK; request++) {
        msc_graph *graph;
        graph_fixture_open(&f, request);
        graph = f.graph;
        status = msc_graph_parse(f.ctx, step_text, strlen(step_text), &graph, &f.err);
        if (status != MSC_OK) {
            assert_int_equal(status, MSC_ENOMEM);
            assert_int_equal(f.err.status, MSC_ENOMEM);
            assert_null(graph);
        }
        msc_graph_destroy(graph);
        graph_fixture_close(&f);
    }
    assert_int_equal(status, MSC_OK);
    assert_in_range(request, 10, MOST_REQUESTS - 1);
}

static void test_file_without_memory(void **state)
{
    static graph_fixture f;
    msc_status status = MSC_ENOMEM;
    uint64_t request;

    (void)state;
    for (request = 0; request < MOST_REQUESTS && status != MSC_OK; request++) {
        msc_graph *graph = NULL;
        graph_fixture_open(&f, FAILING_ALLOC_NEVER);
        assert_int_equal(build_step(f.graph, &f.err), MSC_OK);
        f.heap.fail_at = f.heap.request_count + request;
        status = msc_graph_save_file(f.graph, FILE_NAME, &f.err);
        if (status == MSC_OK)
            status = msc_graph_load_file(f.ctx, FILE_NAME, &graph, &f.err);
        if (status != MSC_OK) {
            assert_int_equal(status, MSC_ENOMEM);
            assert_null(graph);
        }
        msc_graph_destroy(graph);
        graph_fixture_close(&f);
    }
    assert_int_equal(status, MSC_OK);
    assert_in_range(request, 12, MOST_REQUESTS - 1);
    assert_int_equal(remove(FILE_NAME), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        GRAPH_CASE("format/golden", test_format),
        GRAPH_CASE("format/little-room", test_format_into_little_room),
        GRAPH_CASE("parse/round-trip", test_parse),
        GRAPH_CASE("work/round-trip", test_classes_of_work),
        GRAPH_CASE("work/refused", test_bad_classes_of_work),
        GRAPH_CASE("digest/building-order", test_digest_ignores_building_order),
        GRAPH_CASE("parse/every-truncation", test_every_truncation_is_refused),
        GRAPH_CASE("parse/every-changed-byte", test_every_changed_byte),
        GRAPH_CASE("parse/bad-lines", test_bad_lines),
        GRAPH_CASE("parse/huge-counts", test_huge_counts_cost_nothing),
        GRAPH_CASE("arguments", test_arguments),
        GRAPH_CASE("file/round-trip", test_file_round_trip),
        GRAPH_CASE("file/beside-another-writer", test_file_beside_another_writer),
        GRAPH_CASE("file/errors", test_file_errors),
        GRAPH_CASE("memory/parse", test_parse_without_memory),
        GRAPH_CASE("memory/file", test_file_without_memory),
    };
    return cmocka_run_group_tests_name("graph_io", tests, NULL, NULL);
}
