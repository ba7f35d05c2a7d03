/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory nodes of machines that are not there: described by files that the test writes, cores and pages told by functions of
 * its own.
 */
#include "optim_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "optim/optim_internal.h"
#include "optim/optim_nodes.h"
#include "optim/optim_shares.h"

static char folder[] = "/tmp/msc-nodes-XXXXXX";

static void write_file(const char *name, const char *text)
{
    char path[256];
    FILE *file;

    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    if (strchr(name, '/') != NULL) {
        *strrchr(path, '/') = '\0';
        (void)mkdir(path, 0700);
        (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    }
    file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* ---- what the system tells ------------------------------------------------------------------------------- */

static void no_description_is_one_node(void **state)
{
    msc__nodes nodes;

    (void)state;
    msc__nodes_read(&nodes, "/nowhere/at/all");
    assert_int_equal(nodes.count, 1);
    assert_int_equal(msc__nodes_here(&nodes), 0);
}

static void this_machine_is_read(void **state)
{
    msc__nodes nodes;

    (void)state;
    msc__nodes_read(&nodes, "/sys/devices/system/node");
    assert_in_range(nodes.count, 1, MSC__NODES_MOST);
    assert_in_range(msc__nodes_here(&nodes), 0, nodes.count - 1);
}

/* Memory without cores does not count, and numbers have gaps. */
static void nodes_with_cores_count(void **state)
{
    msc__nodes nodes;

    (void)state;
    write_file("online", "0-1,5,9\n");
    write_file("node0/cpulist", "0-3,8\n");
    write_file("node1/cpulist", "\n");
    write_file("node5/cpulist", "4-7,9,2000\n");
    write_file("node9/cpulist", "1020-4000");
    msc__nodes_read(&nodes, folder);
    assert_int_equal(nodes.count, 3);
    assert_memory_equal(nodes.number, ((int[]){0, 5, 9}), 3 * sizeof(int));
    assert_memory_equal(nodes.of_core, ((uint8_t[]){0, 0, 0, 0, 1, 1, 1, 1, 0, 1}), 10);
    assert_int_equal(nodes.of_core[1023], 2);
}

/* More than can be told apart are one. */
static void too_many_nodes_are_one(void **state)
{
    msc__nodes nodes;
    char name[64];
    char core[16];
    uint32_t i;

    (void)state;
    write_file("online", "0-16");
    for (i = 0; i <= MSC__NODES_MOST; i++) {
        (void)snprintf(name, sizeof name, "node%u/cpulist", i);
        (void)snprintf(core, sizeof core, "%u", i);
        write_file(name, core);
    }
    msc__nodes_read(&nodes, folder);
    assert_int_equal(nodes.count, 1);
    assert_int_equal(nodes.of_core[7], 0);
    write_file("online", "0-15");
    msc__nodes_read(&nodes, folder);
    assert_int_equal(nodes.count, MSC__NODES_MOST);
    assert_int_equal(nodes.of_core[7], 7);
}

static void broken_descriptions_are_one_node(void **state)
{
    static const char *const texts[] = {"", "\n", "x", "-1", "0-", "5-2", "0,,1", "99999999999999999999"};
    msc__nodes nodes;
    size_t i;

    (void)state;
    for (i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        write_file("online", i % 2 == 0 ? "0\n" : texts[i]);
        write_file("node0/cpulist", texts[i]);
        msc__nodes_read(&nodes, folder);
        assert_int_equal(nodes.count, 1);
        assert_in_range(msc__nodes_here(&nodes), 0, 0);
    }
}

/* ---- cores and pages of a machine with three nodes ------------------------------------------------------- */

#define NODES 3u
#define CORES_EACH 4

static int core_now;
static int refused; /* answers of `places` */
static uint32_t asked;

static int fake_core(void)
{
    return core_now;
}

/* "Addresses" are numbers: node 10 + number / 100 holds them; from 900 on there is no page. */
static long fake_places(unsigned long count, void *const *addresses, int *numbers)
{
    unsigned long i;

    asked++;
    assert_in_range(count, 1, MSC__PLACES_MOST);
    for (i = 0; i < count; i++)
        numbers[i] = (uintptr_t)addresses[i] >= 900 ? -2 : 10 + (int)((uintptr_t)addresses[i] / 100);
    return refused;
}

static msc__nodes three(void)
{
    msc__nodes nodes = {.count = NODES, .core = fake_core, .places = fake_places};
    uint32_t i;

    for (i = 0; i < NODES; i++) {
        nodes.number[i] = 10 + (int)i;
        memset(nodes.of_core + (size_t)i * CORES_EACH, (int)i, CORES_EACH);
    }
    refused = 0;
    asked = 0;
    return nodes;
}

static void a_thread_is_on_its_cores_node(void **state)
{
    msc__nodes nodes = three();

    (void)state;
    core_now = 9;
    assert_int_equal(msc__nodes_here(&nodes), 2);
    core_now = -1;
    assert_int_equal(msc__nodes_here(&nodes), 0);
    core_now = 100000;
    assert_int_equal(msc__nodes_here(&nodes), 0);
}

static void pages_lie_where_the_system_says(void **state)
{
    void *addresses[] = {(void *)250, (void *)0, (void *)150, (void *)901, (void *)700, (void *)902};
    msc__nodes nodes = three();
    uint8_t found[6];

    (void)state;
    msc__nodes_of(&nodes, addresses, 6, found);
    assert_memory_equal(found, ((uint8_t[]){2, 0, 1, 1, 2, 2}),
                        6); /* the last three: not known, spread evenly */
    refused = -1;
    msc__nodes_of(&nodes, addresses, 6, found);
    assert_memory_equal(found, ((uint8_t[]){0, 0, 1, 1, 2, 2}), 6);
}

/* ---- shares ---------------------------------------------------------------------------------------------- */

/* Item i has address i: 300 items, a hundred on each node. */
static const void *where(const void *job, uint64_t item)
{
    (void)job;
    return (const void *)(uintptr_t)item;
}

static void own_items_come_first(void **state)
{
    msc__nodes nodes = three();
    msc__shares shares;
    uint64_t begin;
    uint64_t end;
    uint64_t taken = 0;

    (void)state;
    msc__shares_begin(&shares, &nodes, 300, 2, where, NULL);
    assert_int_equal(asked, 1);
    while (taken < 300) {
        assert_true(msc__shares_take(&shares, 1, &begin, &end));
        assert_int_equal(begin, (100 + taken) % 300); /* node 1, then 2, then 0 */
        assert_int_equal(end, begin + 2);
        taken += 2;
    }
    assert_false(msc__shares_take(&shares, 1, &begin, &end));
    assert_false(msc__shares_take(&shares, 0, &begin, &end));
}

/* Every item once, whatever the counts, whichever nodes the threads that take are on. */
static void every_item_is_taken_once(void **state)
{
    static uint8_t taken[5000];
    msc__nodes nodes = three();
    msc__shares shares;
    uint64_t items;
    uint64_t chunk;
    uint64_t begin;
    uint64_t end;
    uint32_t turn;

    (void)state;
    for (items = 1; items < sizeof taken; items += 1 + items / 7)
        for (chunk = 1; chunk < 100; chunk += 1 + chunk / 2) {
            memset(taken, 0, sizeof taken);
            msc__shares_begin(&shares, &nodes, items, chunk, items % 3 == 0 ? NULL : where, NULL);
            for (turn = 0; msc__shares_take(&shares, turn * turn % NODES, &begin, &end); turn++)
                for (; begin < end; begin++)
                    taken[begin]++;
            for (begin = 0; begin < sizeof taken; begin++)
                assert_int_equal(taken[begin], begin < items);
        }
}

static void one_node_asks_nothing(void **state)
{
    msc__nodes nodes = three();
    msc__shares shares;
    uint64_t begin;
    uint64_t end;

    (void)state;
    nodes.count = 1;
    msc__shares_begin(&shares, &nodes, 100, 64, where, NULL);
    assert_true(msc__shares_take(&shares, 0, &begin, &end));
    assert_int_equal(end, 64);
    assert_true(msc__shares_take(&shares, 0, &begin, &end));
    assert_int_equal(end, 100);
    assert_false(msc__shares_take(&shares, 0, &begin, &end));
    assert_int_equal(asked, 0);
}

/* ---- an optimizer that has several nodes ----------------------------------------------------------------- */

#define COUNT 400000u

/* Threads are on cores of all nodes in turn, and pages on nodes by their addresses. */
static int any_core(void)
{
    static _Atomic int next;

    return atomic_fetch_add(&next, 1) % (int)(NODES * CORES_EACH);
}

static long any_places(unsigned long count, void *const *addresses, int *numbers)
{
    unsigned long i;

    for (i = 0; i < count; i++)
        numbers[i] = 10 + (int)((uintptr_t)addresses[i] / 4096 % (NODES + 1)); /* the last one is no node */
    return 0;
}

static float *filled(float scale)
{
    float *values = malloc(COUNT * sizeof *values);
    uint32_t i;

    assert_non_null(values);
    for (i = 0; i < COUNT; i++)
        values[i] = scale * (float)(i % 1000);
    return values;
}

/* The weights after three steps, and the norm of the gradients. */
static float *trained(msc_optim *by, double *norm)
{
    float *arrays[] = {filled(1e-3f), filled(1e-2f), filled(0), filled(0)};
    msc_optim_rule rule = msc_optim_rule_default(MSC_OPTIM_KIND_ADAMW);
    msc_optim_tensor tensors[] = {
        {.count = COUNT / 4,
         .gradient = arrays[0],
         .weight = arrays[1],
         .moment1 = arrays[2],
         .moment2 = arrays[3]},
        {.count = 0},
        {.count = COUNT - COUNT / 4},
    };
    msc_optim_array gradient = {arrays[0], COUNT, MSC_OPTIM_FLOAT_FP32};
    msc_optim_norm_result result;
    uint64_t step;

    tensors[2].gradient = arrays[0] + COUNT / 4;
    tensors[2].weight = arrays[1] + COUNT / 4;
    tensors[2].moment1 = arrays[2] + COUNT / 4;
    tensors[2].moment2 = arrays[3] + COUNT / 4;
    for (step = 1; step <= 3; step++) {
        tensors[0].step = tensors[1].step = tensors[2].step = step;
        assert_int_equal(msc_optim_step(by, &rule, tensors, 3, NULL), MSC_OK);
        assert_int_equal(msc_optim_accumulate(by, arrays[0], &(msc_optim_array){arrays[1], COUNT, 0}, NULL),
                         MSC_OK);
    }
    assert_int_equal(msc_optim_norm(by, &gradient, 1, 1.0f, &result, NULL), MSC_OK);
    *norm = result.sum_of_squares;
    free(arrays[0]);
    free(arrays[2]);
    free(arrays[3]);
    return arrays[1];
}

static void nodes_do_not_show_in_results(void **state)
{
    msc_optim_options options = msc_optim_options_default();
    msc_context *ctx;
    msc_optim *threads;
    double norms[2];
    float *weights[2];
    uint32_t round;

    (void)state;
    options.thread_count = 3;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    assert_int_equal(msc_optim_create(ctx, &options, &threads, NULL), MSC_OK);
    threads->pool.nodes.count = 1;
    weights[0] = trained(threads, &norms[0]);
    threads->pool.nodes = three();
    threads->pool.nodes.core = any_core;
    threads->pool.nodes.places = any_places;
    for (round = 0; round < 5; round++) {
        weights[1] = trained(threads, &norms[1]);
        assert_memory_equal(weights[0], weights[1], COUNT * sizeof(float));
        assert_memory_equal(&norms[0], &norms[1], sizeof norms[0]);
        free(weights[1]);
    }
    free(weights[0]);
    msc_optim_destroy(threads);
    msc_context_destroy(ctx);
}

static int begin_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) == NULL;
}

static int end_folder(void **state)
{
    char path[256];
    uint32_t i;

    (void)state;
    for (i = 0; i <= MSC__NODES_MOST; i++) {
        (void)snprintf(path, sizeof path, "%s/node%u/cpulist", folder, i);
        (void)remove(path);
        *strrchr(path, '/') = '\0';
        (void)rmdir(path);
    }
    (void)snprintf(path, sizeof path, "%s/online", folder);
    (void)remove(path);
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_description_is_one_node),       cmocka_unit_test(this_machine_is_read),
        cmocka_unit_test(nodes_with_cores_count),           cmocka_unit_test(too_many_nodes_are_one),
        cmocka_unit_test(broken_descriptions_are_one_node), cmocka_unit_test(a_thread_is_on_its_cores_node),
        cmocka_unit_test(pages_lie_where_the_system_says),  cmocka_unit_test(own_items_come_first),
        cmocka_unit_test(every_item_is_taken_once),         cmocka_unit_test(one_node_asks_nothing),
        cmocka_unit_test(nodes_do_not_show_in_results),
    };

    return cmocka_run_group_tests_name("optim_nodes", tests, begin_folder, end_folder);
}
