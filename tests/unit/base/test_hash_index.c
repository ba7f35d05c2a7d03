/* SPDX-License-Identifier: Apache-2.0 */
/* The table of hashes: every record is found through growth and collisions, and a refusal changes nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/hash_index.h"
#include "oom/failing_alloc.h"

static failing_alloc heap;

static msc_context *open_context(uint64_t fail_at)
{
    failing_alloc_init(&heap, fail_at);
    return failing_alloc_context(&heap);
}

static bool holds(const msc__hash_index *index, uint32_t hash, uint32_t record)
{
    uint32_t probe = hash;
    uint32_t found;

    while ((found = msc__hash_index_next(index, hash, &probe)) != MSC_NONE)
        if (found == record)
            return true;
    return false;
}

static void fill(msc_context *ctx, msc__hash_index *index, uint32_t count, uint32_t hashes)
{
    uint32_t i;

    for (i = 0; i < count; i++) {
        assert_int_equal(msc__hash_index_reserve(ctx, index, "records", NULL), MSC_OK);
        msc__hash_index_insert(index, i % hashes, i);
    }
}

static void growth(void **state)
{
    msc_context *ctx = open_context(UINT64_MAX);
    msc__hash_index index = {0};
    uint32_t i;

    (void)state;
    assert_false(holds(&index, 7, 7));
    fill(ctx, &index, 5000, 5000);
    for (i = 0; i < 5000; i++)
        assert_true(holds(&index, i, i));
    assert_false(holds(&index, 5000, 5000));
    msc__hash_index_fini(ctx, &index);
    assert_int_equal(index.count, 0);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
}

static void collisions(void **state)
{
    msc_context *ctx = open_context(UINT64_MAX);
    msc__hash_index index = {0};
    uint32_t i;

    (void)state;
    fill(ctx, &index, 300, 3);
    for (i = 0; i < 300; i++) {
        assert_true(holds(&index, i % 3, i));
        assert_false(holds(&index, (i + 1) % 3, i));
    }
    msc__hash_index_fini(ctx, &index);
    msc_context_destroy(ctx);
}

static void no_memory(void **state)
{
    msc_context *ctx = open_context(2); /* the context, the first slots, and no more */
    msc__hash_index index = {0};
    uint32_t count = 0;

    (void)state;
    while (msc__hash_index_reserve(ctx, &index, "records", NULL) == MSC_OK) {
        msc__hash_index_insert(&index, count, count);
        count++;
    }
    assert_true(count > 0);
    assert_int_equal(index.count, count);
    while (count-- > 0)
        assert_true(holds(&index, count, count));
    msc__hash_index_fini(ctx, &index);
    msc_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"hash_index/growth", growth, NULL, NULL, NULL},
        {"hash_index/collisions", collisions, NULL, NULL, NULL},
        {"hash_index/no-memory", no_memory, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
