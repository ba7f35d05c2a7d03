/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that ends at once: nothing is forgotten, whatever order blocks grow and go in.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "http/http_memory.h"
#include "oom/failing_alloc.h"
#include "samples.h"

static void test_all_comes_back(void **state)
{
    failing_alloc heap;
    msc_context *ctx;
    http_memory memory = {0};
    uint64_t random = 3;
    char *blocks[32] = {NULL};
    size_t sizes[32] = {0};

    (void)state;
    failing_alloc_init(&heap, FAILING_ALLOC_NEVER);
    ctx = failing_alloc_context(&heap);
    memory.ctx = ctx;
    for (unsigned round = 0; round < 2000; round++) {
        size_t i = sample_random(&random) % 32;

        if (blocks[i] == NULL) {
            sizes[i] = 1 + sample_random(&random) % 100;
            blocks[i] = http_memory_get(&memory, sizes[i]);
            memset(blocks[i], (int)i, sizes[i]);
        } else if (sample_random(&random) % 2 == 0) {
            size_t bytes = sizes[i] + 1 + sample_random(&random) % 50;

            blocks[i] = http_memory_grow(&memory, blocks[i], bytes);
            assert_true(blocks[i][0] == (char)i && blocks[i][sizes[i] - 1] == (char)i);
            memset(blocks[i], (int)i, bytes);
            sizes[i] = bytes;
        } else {
            http_memory_drop(&memory, blocks[i]);
            blocks[i] = NULL;
        }
    }
    http_memory_end(&memory);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
    assert_true(failing_alloc_is_clean(&heap));
}

static void test_a_refused_growth_leaves_the_block(void **state)
{
    failing_alloc heap;
    http_memory memory = {0};
    char *block;

    (void)state;
    failing_alloc_init(&heap, 2); /* the context, the block, and then its growth */
    memory.ctx = failing_alloc_context(&heap);
    block = http_memory_get(&memory, 4);
    memcpy(block, "abc", 4);
    assert_null(http_memory_grow(&memory, block, 4096));
    assert_string_equal(block, "abc");
    assert_null(http_memory_get(&memory, SIZE_MAX));
    http_memory_end(&memory);
    msc_context_destroy(memory.ctx);
    assert_true(failing_alloc_is_clean(&heap));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_comes_back),
        cmocka_unit_test(test_a_refused_growth_leaves_the_block),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
