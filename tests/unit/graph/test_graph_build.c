/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The streaming builders: what they record, what they refuse, and that a refusal, for want of memory or of
 * sense, leaves the graph as it was.
 */
#include "graph_fixture.h"

#define MOST_REQUESTS 1000u

static void test_step_records(void **state)
{
    graph_fixture *f = *state;
    const msc_op *ops;
    const msc_call *calls;

    assert_int_equal(build_step(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_is_finished(f->graph), 1);
    assert_int_equal(msc_graph_op_count(f->graph), 5);
    assert_int_equal(msc_graph_module_count(f->graph), 2);
    ops = msc_graph_ops(f->graph);
    assert_int_equal(ops[0].call, 1);
    assert_int_equal(ops[2].call, 0);
    assert_int_equal(ops[3].call, MSC_NONE);
    assert_int_equal(ops[2].phase, MSC_PHASE_FORWARD);
    assert_int_equal(ops[3].phase, MSC_PHASE_BACKWARD);
    calls = msc_graph_calls(f->graph);
    assert_int_equal(calls[0].parent, MSC_NONE);
    assert_int_equal(calls[1].parent, 0);
    assert_int_equal(calls[1].begin, 0);
    assert_int_equal(calls[1].end, 2);
    assert_int_equal(calls[0].end, 3);
    assert_int_equal(msc_graph_write_count(f->graph), 1);
    assert_int_equal(msc_graph_writes(f->graph)[0].op, 1);
}

static void test_step_buffers(void **state)
{
    graph_fixture *f = *state;
    const msc_buffer *buffers;
    const msc_save *save;

    assert_int_equal(build_step(f->graph, &f->err), MSC_OK);
    buffers = msc_graph_buffers(f->graph);
    assert_int_equal(msc_graph_buffer_count(f->graph), 4);
    assert_int_equal(buffers[0].resident, 1);
    assert_int_equal(buffers[0].end, 6);
    assert_int_equal(buffers[1].resident, 0);
    assert_int_equal(buffers[1].begin, 0);
    assert_int_equal(buffers[1].end, 2);
    assert_int_equal(buffers[3].begin, 3);
    assert_int_equal(buffers[3].end, 6);
    assert_int_equal(msc_graph_save_count(f->graph), 1);
    save = msc_graph_saves(f->graph);
    assert_int_equal(save->buffer, 1);
    assert_int_equal(save->call, 1);
    assert_int_equal(save->pack, 1);
    assert_int_equal(save->unpack, 3);
    assert_int_equal(save->release, 4);
}

static void test_names_are_interned(void **state)
{
    graph_fixture *f = *state;
    const msc_op *ops;

    add_op(f, "aten.mm");
    add_op(f, "");
    add_op(f, "aten.mm");
    ops = msc_graph_ops(f->graph);
    assert_int_equal(ops[0].name, ops[2].name);
    assert_int_not_equal(ops[0].name, ops[1].name);
    assert_string_equal(msc_graph_string(f->graph, ops[2].name), "aten.mm");
    assert_string_equal(msc_graph_string(f->graph, ops[1].name), "");
    assert_string_equal(msc_graph_string(f->graph, MSC_NONE), "");
}

static void test_many_names(void **state)
{
    graph_fixture *f = *state;
    uint32_t i;
    char name[8] = "n0000";

    for (i = 0; i < 2000; i++) {
        name[1] = (char)('0' + i / 1000);
        name[2] = (char)('0' + i / 100 % 10);
        name[3] = (char)('0' + i / 10 % 10);
        name[4] = (char)('0' + i % 10);
        add_op(f, name);
    }
    assert_string_equal(msc_graph_string(f->graph, msc_graph_ops(f->graph)[0].name), "n0000");
    assert_string_equal(msc_graph_string(f->graph, msc_graph_ops(f->graph)[1234].name), "n1234");
    assert_string_equal(msc_graph_string(f->graph, msc_graph_ops(f->graph)[1999].name), "n1999");
}

static void test_bad_names(void **state)
{
    graph_fixture *f = *state;
    msc_op op = {0};
    msc_module module = {.parent = MSC_NONE};
    char name[4098];

    memset(name, 'x', sizeof name);
    name[4097] = '\0';
    assert_int_equal(msc_graph_add_op(f->graph, name, &op, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_op(f->graph, "a\nb", &op, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_op(f->graph, "\x7f", &op, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_op(f->graph, NULL, &op, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_module(f->graph, "a", "b\t", &module, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_op_count(f->graph), 0);
    assert_int_equal(msc_graph_module_count(f->graph), 0);
    name[4096] = '\0';
    assert_int_equal(msc_graph_add_op(f->graph, name, &op, NULL, &f->err), MSC_OK);
    assert_int_equal(msc_graph_add_op(f->graph, "\xc3\xa4", &op, NULL, &f->err), MSC_OK);
}

static void test_residents(void **state)
{
    graph_fixture *f = *state;
    uint32_t early = add_buffer(f, 1);
    uint32_t made;
    uint32_t late = MSC_NONE;

    assert_int_equal(msc_graph_end_buffer(f->graph, early, &f->err), MSC_OK);
    add_op(f, "a");
    add_op(f, "b");
    made = add_buffer(f, 1);
    assert_int_equal(msc_graph_add_resident(f->graph, 1, MSC_CATEGORY_PARAMETER, &late, &f->err), MSC_OK);
    assert_int_equal(msc_graph_buffers(f->graph)[early].resident, 1);
    assert_int_equal(msc_graph_buffers(f->graph)[early].end, 0);
    assert_int_equal(msc_graph_buffers(f->graph)[made].resident, 0);
    assert_int_equal(msc_graph_buffers(f->graph)[made].begin, 1);
    assert_int_equal(msc_graph_buffers(f->graph)[late].resident, 1);
    assert_int_equal(msc_graph_buffers(f->graph)[late].begin, 0);
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
}

static void test_category(void **state)
{
    graph_fixture *f = *state;
    uint32_t buffer = add_buffer(f, 1);

    assert_int_equal(msc_graph_set_category(f->graph, buffer, MSC_CATEGORY_GRADIENT, &f->err), MSC_OK);
    assert_int_equal(msc_graph_buffers(f->graph)[buffer].category, MSC_CATEGORY_GRADIENT);
    assert_int_equal(msc_graph_set_category(f->graph, buffer, MSC_CATEGORY_COUNT, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_set_category(f->graph, 7, MSC_CATEGORY_GRADIENT, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_buffer(f->graph, 1, (msc_category)256, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_resident(f->graph, 1, MSC_CATEGORY_COUNT, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_buffer_count(f->graph), 1);
}

static void test_size_that_is_known_later(void **state)
{
    graph_fixture *f = *state;
    uint64_t most = (uint64_t)1 << 62;
    uint32_t buffer = add_buffer(f, 8);

    add_buffer(f, 16);
    assert_int_equal(msc_graph_set_size(f->graph, 2, 0, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_set_size(f->graph, buffer, most - 15, &f->err), MSC_EOVERFLOW);
    assert_int_equal(msc_graph_set_size(f->graph, buffer, UINT64_MAX, &f->err), MSC_EOVERFLOW);
    assert_int_equal(msc_graph_buffers(f->graph)[buffer].size_bytes, 8);
    assert_int_equal(msc_graph_set_size(f->graph, buffer, most - 16, &f->err), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(f->graph, 1, MSC_CATEGORY_INPUT, NULL, &f->err), MSC_EOVERFLOW);
    assert_int_equal(msc_graph_set_size(f->graph, buffer, 4, &f->err), MSC_OK);
    add_buffer(f, most - 20);
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_buffers(f->graph)[buffer].size_bytes, 4);
}

static void test_sum_of_buffers(void **state)
{
    graph_fixture *f = *state;
    uint64_t most = (uint64_t)1 << 62;

    add_buffer(f, most - 1);
    assert_int_equal(msc_graph_add_buffer(f->graph, 2, MSC_CATEGORY_INPUT, NULL, &f->err), MSC_EOVERFLOW);
    assert_int_equal(msc_graph_add_buffer(f->graph, UINT64_MAX, MSC_CATEGORY_INPUT, NULL, &f->err),
                     MSC_EOVERFLOW);
    add_buffer(f, 1);
    assert_int_equal(msc_graph_buffer_count(f->graph), 2);
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
}

static void test_end_twice(void **state)
{
    graph_fixture *f = *state;
    uint32_t buffer = add_buffer(f, 1);

    assert_int_equal(msc_graph_end_buffer(f->graph, 1, &f->err), MSC_EINVAL);
    assert_string_equal(f->err.message, "there is no buffer 1, only 1");
    assert_int_equal(msc_graph_end_buffer(f->graph, buffer, &f->err), MSC_OK);
    add_op(f, "a");
    assert_int_equal(msc_graph_end_buffer(f->graph, buffer, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_buffers(f->graph)[buffer].end, 0);
}

static void test_save_life(void **state)
{
    graph_fixture *f = *state;
    uint32_t buffer = add_buffer(f, 1);
    uint32_t used = add_save(f, buffer);
    uint32_t unused = add_save(f, buffer);
    uint32_t forgotten = add_save(f, buffer);
    const msc_save *saves;

    add_op(f, "a");
    assert_int_equal(msc_graph_unpack(f->graph, used, &f->err), MSC_OK);
    add_op(f, "b");
    assert_int_equal(msc_graph_unpack(f->graph, used, &f->err), MSC_OK);
    assert_int_equal(msc_graph_release(f->graph, used, &f->err), MSC_OK);
    assert_int_equal(msc_graph_release(f->graph, unused, &f->err), MSC_OK);
    assert_int_equal(msc_graph_release(f->graph, used, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_unpack(f->graph, used, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_unpack(f->graph, 9, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_save(f->graph, 9, NULL, &f->err), MSC_EINVAL);
    add_op(f, "c");
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    saves = msc_graph_saves(f->graph);
    assert_int_equal(saves[used].unpack, 1);
    assert_int_equal(saves[used].release, 2);
    assert_int_equal(saves[unused].unpack, 2);
    assert_int_equal(saves[unused].release, 2);
    assert_int_equal(saves[forgotten].unpack, 3);
    assert_int_equal(saves[forgotten].release, 3);
}

static void test_call_order(void **state)
{
    graph_fixture *f = *state;
    uint32_t module = add_module(f, "m", MSC_NONE);
    uint32_t outer = begin_call(f, module);
    uint32_t inner = begin_call(f, module);

    assert_int_equal(msc_graph_end_call(f->graph, outer, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_end_call(f->graph, 5, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_begin_call(f->graph, 1, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_end_call(f->graph, inner, &f->err), MSC_OK);
    assert_int_equal(msc_graph_end_call(f->graph, inner, &f->err), MSC_EINVAL);
    add_op(f, "a");
    assert_int_equal(msc_graph_ops(f->graph)[0].call, outer);
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_calls(f->graph)[outer].end, 1);
    assert_int_equal(msc_graph_calls(f->graph)[inner].end, 0);
}

static void test_inputs(void **state)
{
    graph_fixture *f = *state;
    uint32_t module = add_module(f, "m", MSC_NONE);
    uint32_t a = add_buffer(f, 1);
    uint32_t b = add_buffer(f, 1);
    uint32_t outer = begin_call(f, module);
    uint32_t inner = begin_call(f, module);
    const msc_input *inputs;

    assert_int_equal(msc_graph_add_input(f->graph, inner, b, &f->err), MSC_OK);
    assert_int_equal(msc_graph_add_input(f->graph, outer, b, &f->err), MSC_OK);
    assert_int_equal(msc_graph_add_input(f->graph, inner, a, &f->err), MSC_OK);
    assert_int_equal(msc_graph_add_input(f->graph, inner, b, &f->err), MSC_OK);
    assert_int_equal(msc_graph_input_count(f->graph), 3);
    assert_int_equal(msc_graph_end_call(f->graph, inner, &f->err), MSC_OK);
    assert_int_equal(msc_graph_add_input(f->graph, inner, a, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_input(f->graph, outer, 2, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_input(f->graph, 2, a, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    inputs = msc_graph_inputs(f->graph);
    assert_int_equal(inputs[0].call, outer);
    assert_int_equal(inputs[1].call, inner);
    assert_int_equal(inputs[1].buffer, b);
    assert_int_equal(inputs[2].call, inner);
    assert_int_equal(inputs[2].buffer, a);
}

static void test_modules(void **state)
{
    graph_fixture *f = *state;
    msc_module desc = {.parent = 0};
    const msc_module *modules;

    assert_int_equal(msc_graph_add_module(f->graph, "m", "M", &desc, NULL, &f->err), MSC_EINVAL);
    desc = (msc_module){.parent = MSC_NONE, .flags = 1u << 12};
    assert_int_equal(msc_graph_add_module(f->graph, "m", "M", &desc, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_module(f->graph, "m", "M", NULL, NULL, &f->err), MSC_EINVAL);
    add_module(f, "m", MSC_NONE);
    assert_int_equal(msc_graph_mark_module(f->graph, 0, MSC_MODULE_EXCLUDED, 5, &f->err), MSC_OK);
    assert_int_equal(msc_graph_mark_module(f->graph, 0, MSC_MODULE_NOT_TENSORS, 6, &f->err), MSC_OK);
    assert_int_equal(msc_graph_mark_module(f->graph, 0, 1u << 12, 0, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_mark_module(f->graph, 0, 0, UINT64_MAX, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_mark_module(f->graph, 1, 0, 0, &f->err), MSC_EINVAL);
    modules = msc_graph_modules(f->graph);
    assert_int_equal(modules[0].flags, MSC_MODULE_EXCLUDED | MSC_MODULE_NOT_TENSORS);
    assert_int_equal(modules[0].state_bytes, 11);
    assert_string_equal(msc_graph_string(f->graph, modules[0].path), "m");
    assert_string_equal(msc_graph_string(f->graph, modules[0].type), "Linear");
}

static void test_phases(void **state)
{
    graph_fixture *f = *state;

    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_BACKWARD, &f->err), MSC_OK);
    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_BACKWARD, &f->err), MSC_OK);
    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_FORWARD, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_COUNT, &f->err), MSC_EINVAL);
    add_op(f, "a");
    assert_int_equal(msc_graph_ops(f->graph)[0].phase, MSC_PHASE_BACKWARD);
}

static void test_bad_op_and_write(void **state)
{
    graph_fixture *f = *state;
    msc_op op = {.flags = 0x80};
    msc_op unclassed = {.work = MSC_WORK_COUNT};
    uint32_t buffer = add_buffer(f, 1);

    assert_int_equal(msc_graph_add_op(f->graph, "a", &op, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_op(f->graph, "a", &unclassed, NULL, &f->err), MSC_EINVAL);
    assert_string_equal(f->err.message, "cannot add an operation: there is no class of work 17");
    assert_int_equal(msc_graph_add_op(f->graph, "a", NULL, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_write(f->graph, buffer, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_write_count(f->graph), 0);
    add_op(f, "a");
    assert_int_equal(msc_graph_add_write(f->graph, 1, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_add_write(f->graph, buffer, &f->err), MSC_OK);
}

static void test_finished_is_frozen(void **state)
{
    graph_fixture *f = *state;
    msc_module module = {.parent = MSC_NONE};
    msc_op op = {0};
    msc_graph *g = f->graph;
    uint64_t digest;

    assert_int_equal(msc_graph_digest(g), 0);
    assert_int_equal(build_step(g, &f->err), MSC_OK);
    digest = msc_graph_digest(g);
    assert_int_not_equal(digest, 0);
    assert_int_equal(msc_graph_add_module(g, "m", "M", &module, NULL, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_mark_module(g, 0, 0, 0, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_set_phase(g, MSC_PHASE_OPTIMIZER, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_begin_call(g, 0, NULL, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_end_call(g, 0, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_add_input(g, 0, 0, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_add_op(g, "a", &op, NULL, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_add_buffer(g, 1, MSC_CATEGORY_INPUT, NULL, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_add_resident(g, 1, MSC_CATEGORY_INPUT, NULL, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_set_category(g, 0, MSC_CATEGORY_INPUT, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_set_size(g, 0, 1, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_end_buffer(g, 0, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_add_write(g, 0, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_add_save(g, 0, NULL, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_unpack(g, 0, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_release(g, 0, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_finish(g, &f->err), MSC_ESTATE);
    assert_int_equal(msc_graph_digest(g), digest);
}

static void test_empty_graph(void **state)
{
    graph_fixture *f = *state;

    assert_int_equal(msc_graph_finish(f->graph, &f->err), MSC_OK);
    assert_int_equal(msc_graph_op_count(f->graph), 0);
    msc_graph_destroy(NULL);
}

static void test_create_without_out(void **state)
{
    graph_fixture *f = *state;
    msc_graph *graph = f->graph;

    assert_int_equal(msc_graph_create(f->ctx, NULL, &f->err), MSC_EINVAL);
    assert_int_equal(msc_graph_create(NULL, &graph, &f->err), MSC_EINVAL);
    assert_null(graph);
}

static void test_create_without_memory(void **state)
{
    graph_fixture *f = *state;
    msc_graph *graph = f->graph;

    f->heap.fail_at = f->heap.request_count;
    assert_int_equal(msc_graph_create(f->ctx, &graph, &f->err), MSC_ENOMEM);
    assert_null(graph);
    assert_int_equal(f->err.status, MSC_ENOMEM);
}

static void test_build_without_memory(void **state)
{
    static graph_fixture f;
    uint64_t request;
    msc_status status = MSC_ENOMEM;

    (void)state;
    for (request = 0; request < MOST_REQUESTS && status != MSC_OK; request++) {
        graph_fixture_open(&f, request);
        status = build_step(f.graph, &f.err);
        if (status != MSC_OK) {
            assert_int_equal(status, MSC_ENOMEM);
            assert_int_equal(f.err.status, MSC_ENOMEM);
            assert_int_equal(msc_graph_is_finished(f.graph), 0);
        }
        graph_fixture_close(&f);
    }
    assert_int_equal(status, MSC_OK);
    assert_in_range(request, 10, MOST_REQUESTS - 1);
}

/* Seventeen records of a kind make its array grow once more; that growth is refused, then granted. */
static void test_refused_growth_changes_nothing(void **state)
{
    graph_fixture *f = *state;
    msc_op op = {0};
    uint32_t i;

    for (i = 0; i < 16; i++)
        add_op(f, "a");
    f->heap.fail_at = f->heap.request_count;
    assert_int_equal(msc_graph_add_op(f->graph, "b", &op, NULL, &f->err), MSC_ENOMEM);
    assert_int_equal(msc_graph_op_count(f->graph), 16);
    assert_int_equal(msc_graph_add_op(f->graph, "b", &op, NULL, &f->err), MSC_OK);
    assert_string_equal(msc_graph_string(f->graph, msc_graph_ops(f->graph)[15].name), "a");
    assert_string_equal(msc_graph_string(f->graph, msc_graph_ops(f->graph)[16].name), "b");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        GRAPH_CASE("step/records", test_step_records),
        GRAPH_CASE("step/buffers-and-saves", test_step_buffers),
        GRAPH_CASE("names/interned", test_names_are_interned),
        GRAPH_CASE("names/many", test_many_names),
        GRAPH_CASE("names/refused", test_bad_names),
        GRAPH_CASE("buffer/resident", test_residents),
        GRAPH_CASE("buffer/category", test_category),
        GRAPH_CASE("buffer/size-known-later", test_size_that_is_known_later),
        GRAPH_CASE("buffer/sum-below-2-to-62", test_sum_of_buffers),
        GRAPH_CASE("buffer/end-twice", test_end_twice),
        GRAPH_CASE("save/life", test_save_life),
        GRAPH_CASE("call/order", test_call_order),
        GRAPH_CASE("input/sorted-and-once", test_inputs),
        GRAPH_CASE("module/marks", test_modules),
        GRAPH_CASE("phase/never-back", test_phases),
        GRAPH_CASE("op/refused", test_bad_op_and_write),
        GRAPH_CASE("finish/frozen", test_finished_is_frozen),
        GRAPH_CASE("finish/empty", test_empty_graph),
        GRAPH_CASE("create/arguments", test_create_without_out),
        GRAPH_CASE("memory/create", test_create_without_memory),
        GRAPH_CASE("memory/build", test_build_without_memory),
        GRAPH_CASE("memory/refused-growth-changes-nothing", test_refused_growth_changes_nothing),
    };
    return cmocka_run_group_tests_name("graph_build", tests, NULL, NULL);
}
