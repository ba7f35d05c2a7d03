/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When buffers of the plain step end: at their natural end or at the last release of their saves.
 */
#include "graph_fixture.h"

static void test_release_after_end(void **state)
{
    graph_fixture *f = *state;
    uint32_t ends[4];

    assert_int_equal(build_step(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_plain_ends(f->graph, ends, &f->err), MSC_OK);
    assert_int_equal(ends[0], 6);
    assert_int_equal(ends[1], 4); /* natural end 2, released at 4 */
    assert_int_equal(ends[2], 4);
    assert_int_equal(ends[3], 6);
}

static void test_last_release_counts(void **state)
{
    graph_fixture *f = *state;
    uint32_t buffer;
    uint32_t early;
    uint32_t late;
    uint32_t end;

    add_op(f, "a");
    buffer = add_buffer(f, 8);
    late = add_save(f, buffer);
    early = add_save(f, buffer);
    assert_int_equal(msc_graph_end_buffer(f->graph, buffer, &f->err), MSC_OK);
    add_op(f, "b");
    assert_int_equal(msc_graph_release(f->graph, early, &f->err), MSC_OK);
    add_op(f, "c");
    assert_int_equal(msc_graph_release(f->graph, late, &f->err), MSC_OK);
    add_op(f, "d");
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_plain_ends(f->graph, &end, &f->err), MSC_OK);
    assert_int_equal(end, 3);
}

static void test_natural_end_after_release(void **state)
{
    graph_fixture *f = *state;
    uint32_t buffer;
    uint32_t save;
    uint32_t end;

    add_op(f, "a");
    buffer = add_buffer(f, 8);
    save = add_save(f, buffer);
    assert_int_equal(msc_graph_release(f->graph, save, &f->err), MSC_OK);
    add_op(f, "b");
    assert_int_equal(msc_graph_end_buffer(f->graph, buffer, &f->err), MSC_OK);
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_plain_ends(f->graph, &end, &f->err), MSC_OK);
    assert_int_equal(end, 2);
}

static void test_refusals(void **state)
{
    graph_fixture *f = *state;
    uint32_t end;

    assert_int_equal(msc_graph_plain_ends(f->graph, &end, &f->err), MSC_ESTATE);
    assert_int_equal(build_step(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_plain_ends(f->graph, NULL, &f->err), MSC_EINVAL);
}

static void test_empty(void **state)
{
    graph_fixture *f = *state;

    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_plain_ends(f->graph, NULL, &f->err), MSC_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        GRAPH_CASE("ends/release-after-end", test_release_after_end),
        GRAPH_CASE("ends/last-release-counts", test_last_release_counts),
        GRAPH_CASE("ends/natural-end-after-release", test_natural_end_after_release),
        GRAPH_CASE("ends/refusals", test_refusals),
        GRAPH_CASE("ends/empty", test_empty),
    };
    return cmocka_run_group_tests_name("graph_liveness", tests, NULL, NULL);
}
