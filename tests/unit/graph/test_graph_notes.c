/* SPDX-License-Identifier: Apache-2.0 */
/* Notes: what they say, in which order they stay, version 2 of the text, and that no digest depends on them.
 */
#include "graph_fixture.h"

#define MOST_REQUESTS 1000u
#define MOST_TEXT_BYTES 4096u
#define NO_MODULE MSC_NONE

/* Module 0 calls module 1; op 0 in it makes buffer 1, op 1 in backward makes buffer 2; buffer 0 is resident.
 */
static msc_status build_noted(msc_graph *g, msc_error *err)
{
    const msc_module root = {.parent = MSC_NONE, .flags = MSC_MODULE_ROOT};
    const msc_module layer = {.parent = 0};
    const msc_op op = {.flops = 1};

    GRAPH_TRY(msc_graph_add_module(g, "", "Model", &root, NULL, err));
    GRAPH_TRY(msc_graph_add_module(g, "layer", "Linear", &layer, NULL, err));
    GRAPH_TRY(msc_graph_add_resident(g, 100, MSC_CATEGORY_PARAMETER, NULL, err));
    GRAPH_TRY(msc_graph_begin_call(g, 1, NULL, err));
    GRAPH_TRY(msc_graph_add_op(g, "mm", &op, NULL, err));
    GRAPH_TRY(msc_graph_note_op(g, NO_MODULE, "model.py:7", err));
    GRAPH_TRY(msc_graph_add_buffer(g, 200, MSC_CATEGORY_ACTIVATION, NULL, err));
    GRAPH_TRY(msc_graph_note_buffer(g, 1, NO_MODULE, "float32[50]", err));
    GRAPH_TRY(msc_graph_end_call(g, 0, err));
    GRAPH_TRY(msc_graph_set_phase(g, MSC_PHASE_BACKWARD, err));
    GRAPH_TRY(msc_graph_add_op(g, "mm", &op, NULL, err));
    GRAPH_TRY(msc_graph_note_op(g, 1, "", err));
    GRAPH_TRY(msc_graph_add_buffer(g, 300, MSC_CATEGORY_TEMPORARY, NULL, err));
    GRAPH_TRY(msc_graph_note_buffer(g, 2, NO_MODULE, "float32[75]", err));
    GRAPH_TRY(msc_graph_note_buffer(g, 0, 1, "float32[25] layer.weight", err));
    GRAPH_TRY(msc_graph_note_buffer(g, 2, 0, "float32[75] weight", err));
    return msc_graph_finish(g, err);
}

static const char noted_text[] = "memscale-graph 2\n"
                                 "counts 2 1 2 3 0 0 0 2 3\n"
                                 "module - 1 0000000000000000 0 \n"
                                 "type Model\n"
                                 "module 0 0 0000000000000000 0 layer\n"
                                 "type Linear\n"
                                 "call 1 - 0 1\n"
                                 "op 0 0 0 1 0 0 mm\n"
                                 "op - 1 0 1 0 0 mm\n"
                                 "buffer 100 0 1 0 3\n"
                                 "buffer 200 5 0 0 3\n"
                                 "buffer 300 6 0 1 3\n"
                                 "op-note 0 - model.py:7\n"
                                 "op-note 1 1 \n"
                                 "buffer-note 0 1 float32[25] layer.weight\n"
                                 "buffer-note 1 - float32[50]\n"
                                 "buffer-note 2 0 float32[75] weight\n"
                                 "end\n";

static void test_reading(void **state)
{
    graph_fixture *f = *state;
    const msc_graph *g = f->graph;

    assert_int_equal(build_noted(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_op_note_count(g), 2);
    assert_int_equal(msc_graph_buffer_note_count(g), 3);
    assert_string_equal(msc_graph_string(g, msc_graph_op_note(g, 0)->text), "model.py:7");
    assert_string_equal(msc_graph_string(g, msc_graph_buffer_note(g, 2)->text), "float32[75] weight");
    assert_null(msc_graph_op_note(g, 2));
    assert_null(msc_graph_buffer_note(g, MSC_NONE));
}

static void test_modules(void **state)
{
    graph_fixture *f = *state;
    const msc_graph *g = f->graph;

    assert_int_equal(build_noted(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_module_of_op(g, 0), 1); /* by its call */
    assert_int_equal(msc_graph_module_of_op(g, 1), 1); /* by its note */
    assert_int_equal(msc_graph_module_of_op(g, 2), MSC_NONE);
    assert_int_equal(msc_graph_module_of_buffer(g, 0), 1); /* by its note, though resident */
    assert_int_equal(msc_graph_module_of_buffer(g, 1), 1); /* by the call of what made it */
    assert_int_equal(msc_graph_module_of_buffer(g, 2), 0); /* its own note before that of what made it */
    assert_int_equal(msc_graph_module_of_buffer(g, 3), MSC_NONE);
}

static void test_text(void **state)
{
    graph_fixture *f = *state;
    char text[MOST_TEXT_BYTES];
    msc_graph *again = NULL;
    size_t needed = 0;

    assert_int_equal(build_noted(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_format(f->graph, text, sizeof text, &needed, &f->err), MSC_OK);
    assert_string_equal(text, noted_text);
    assert_int_equal(msc_graph_parse(f->ctx, text, needed, &again, &f->err), MSC_OK);
    memset(text, 0, sizeof text);
    assert_int_equal(msc_graph_format(again, text, sizeof text, &needed, &f->err), MSC_OK);
    assert_string_equal(text, noted_text);
    assert_int_equal(msc_graph_digest(again), msc_graph_digest(f->graph));
    msc_graph_destroy(again);
}

/* The digest is that of the text without notes: the same step of version 1 has it too. */
static void test_digest_leaves_notes_out(void **state)
{
    static const char plain_text[] = "memscale-graph 1\n"
                                     "counts 2 1 2 3 0 0 0\n";
    graph_fixture *f = *state;
    char text[MOST_TEXT_BYTES] = "";
    msc_graph *plain = NULL;
    const char *body = strstr(noted_text, "module");
    const char *notes = strstr(noted_text, "op-note");
    size_t body_bytes = (size_t)(notes - body);

    assert_int_equal(build_noted(f->graph, &f->err), MSC_OK);
    memcpy(text, plain_text, strlen(plain_text));
    memcpy(text + strlen(plain_text), body, body_bytes);
    memcpy(text + strlen(plain_text) + body_bytes, "end\n", 5);
    assert_int_equal(msc_graph_parse(f->ctx, text, strlen(text), &plain, &f->err), MSC_OK);
    assert_int_equal(msc_graph_digest(plain), msc_graph_digest(f->graph));
    assert_null(msc_graph_op_note(plain, 0));
    msc_graph_destroy(plain);
}

static void assert_refused(graph_fixture *f, const char *from, const char *to, const char *message)
{
    char text[MOST_TEXT_BYTES] = "";
    msc_graph *graph = f->graph;
    const char *at = strstr(noted_text, from);
    size_t before = (size_t)(at - noted_text);

    assert_non_null(at);
    memcpy(text, noted_text, before);
    memcpy(text + before, to, strlen(to));
    memcpy(text + before + strlen(to), at + strlen(from), strlen(at + strlen(from)));
    assert_int_equal(msc_graph_parse(f->ctx, text, strlen(text), &graph, &f->err), MSC_EFORMAT);
    assert_null(graph);
    assert_string_equal(f->err.message, message);
}

static void test_bad_text(void **state)
{
    const char *order = "graph, line 14: op-note 1: notes are not sorted, or two are on one item";

    assert_refused(*state, "op-note 1 1 ", "op-note 2 1 ", "graph, line 14: op-note 1: no such item");
    assert_refused(*state, "op-note 1 1 ", "op-note 0 1 ", order);
    assert_refused(*state, "op-note 1 1 ", "op-note 1 2 ", "graph, line 14: op-note 1: no such module");
    assert_refused(*state, "op-note 1 1 ", "op-note 1 - ", "graph, line 14: op-note 1: says nothing");
    assert_refused(*state, "buffer-note 2", "buffer-note 3", "graph, line 17: buffer-note 2: no such item");
    assert_refused(*state, "0 0 0 2 3", "0 0 0 0 0", "graph, line 2: a version with notes, without notes");
}

static void test_refused_builders(void **state)
{
    graph_fixture *f = *state;

    assert_int_equal(msc_graph_note_op(f->graph, NO_MODULE, "x", &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_note_buffer(f->graph, 0, NO_MODULE, "x", &f->err), MSC_EINVAL);
    add_op(f, "mm");
    assert_int_equal(msc_graph_note_op(f->graph, 0, "x", &f->err), MSC_EINVAL);
    assert_string_equal(f->err.message, "there is no module 0, only 0");
    assert_int_equal(msc_graph_note_op(f->graph, NO_MODULE, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_note_op(f->graph, NO_MODULE, "a\nb", &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_note_op(f->graph, NO_MODULE, "", &f->err), MSC_OK); /* says nothing */
    assert_int_equal(msc_graph_note_op(f->graph, NO_MODULE, "x", &f->err), MSC_OK);
    assert_int_equal(msc_graph_note_op(f->graph, NO_MODULE, "x", &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_op_note_count(f->graph), 1);
    assert_int_equal(msc_graph_note_op(f->graph, NO_MODULE, "x", &f->err), MSC_ESTATE);
}

static void test_without_memory(void **state)
{
    static graph_fixture f;
    msc_status status = MSC_ENOMEM;
    uint64_t request;

    (void)state;
    for (request = 0; request < MOST_REQUESTS && status != MSC_OK; request++) {
        graph_fixture_open(&f, request);
        status = build_noted(f.graph, &f.err);
        if (status != MSC_OK)
            assert_int_equal(status, MSC_ENOMEM);
        graph_fixture_close(&f);
    }
    assert_int_equal(status, MSC_OK);
    assert_in_range(request, 8, MOST_REQUESTS - 1);
}

#define CASE(name, function)                                                                                 \
    {                                                                                                        \
        name, function, graph_fixture_setup, graph_fixture_teardown, NULL                                    \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE("notes/reading", test_reading),
        CASE("notes/whose", test_modules),
        CASE("notes/text-both-ways", test_text),
        CASE("notes/digest-leaves-them-out", test_digest_leaves_notes_out),
        CASE("notes/bad-text", test_bad_text),
        CASE("notes/refused-builders", test_refused_builders),
        {"notes/without-memory", test_without_memory, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
