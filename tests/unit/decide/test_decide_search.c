/* SPDX-License-Identifier: Apache-2.0 */
/* The search against all antichains, the frontier's own rules, and the arithmetic that orders moves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "decide/decide_cost.h"
#include "decide/decide_search.h"
#include "synth.h"

typedef struct fixture {
    msc_context *ctx;
    msc_graph *graph;
    msc__model model;
    msc__fit fit;
    msc__frontier all; /* every antichain was offered */
    uint64_t set[16];
} fixture;

static void start(fixture *f, uint32_t blocks)
{
    const msc_decide_options options = msc_decide_options_default();

    memset(f, 0, sizeof *f);
    assert_int_equal(msc_context_create(NULL, &f->ctx, NULL), MSC_OK);
    f->graph = synth_transformer(f->ctx, blocks);
    assert_non_null(f->graph);
    assert_int_equal(msc__model_init(&f->model, f->ctx, f->graph, &options, NULL), MSC_OK);
    assert_int_equal(msc__fit_init(&f->fit, &f->model, NULL), MSC_OK);
    assert_int_equal(msc__model_group(&f->model, NULL), MSC_OK);
    msc__frontier_init(&f->all, f->ctx, f->model.candidate_count);
}

static void stop(fixture *f)
{
    msc__frontier_fini(&f->all);
    msc__fit_fini(&f->fit);
    msc__model_fini(&f->model);
    msc_graph_destroy(f->graph);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
}

static bool overlaps(const fixture *f, const msc__buckets *lists, uint32_t candidate)
{
    uint32_t i;

    for (i = lists->first[candidate]; i < lists->first[candidate + 1]; i++)
        if (msc__set_has(f->set, lists->items[i]))
            return true;
    return false;
}

/* Offers every antichain of candidates from `next` on; as deep as there are candidates, about twenty. */
static void offer_all(fixture *f, uint32_t next, int64_t added_ns)
{
    if (next == f->model.candidate_count) {
        assert_int_equal(msc__frontier_offer(&f->all, msc__fit_peak(&f->fit), added_ns, f->set, NULL),
                         MSC_OK);
        return;
    }
    offer_all(f, next + 1, added_ns);
    if (overlaps(f, &f->model.above, next) || overlaps(f, &f->model.below, next))
        return;
    f->set[next / 64] ^= (uint64_t)1 << next % 64;
    msc__fit_set(&f->fit, next, true);
    offer_all(f, next + 1, added_ns + f->model.candidates[next].cost_ns);
    msc__fit_set(&f->fit, next, false);
    f->set[next / 64] ^= (uint64_t)1 << next % 64;
}

/* On a few blocks the search finds the true frontier, though it looks at a fraction of the sets. */
static void equals_exhaustive(void **state)
{
    msc__frontier found;
    uint32_t blocks;
    uint32_t i;

    (void)state;
    for (blocks = 1; blocks <= 3; blocks++) {
        fixture f;
        start(&f, blocks);
        offer_all(&f, 0, 0);
        msc__frontier_init(&found, f.ctx, f.model.candidate_count);
        assert_int_equal(msc__search(&f.model, &f.fit, &found, NULL), MSC_OK);
        assert_int_equal(found.plans.count, f.all.plans.count);
        for (i = 0; i < found.plans.count; i++) {
            assert_true(msc__frontier_plans(&found)[i].peak_bytes ==
                        msc__frontier_plans(&f.all)[i].peak_bytes);
            assert_true(msc__frontier_plans(&found)[i].added_ns == msc__frontier_plans(&f.all)[i].added_ns);
        }
        msc__frontier_fini(&found);
        stop(&f);
    }
}

static void frontier_rules(void **state)
{
    const uint64_t sets[] = {0, 1, 2, 3, 4};
    msc__frontier f;
    msc_context *ctx;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    msc__frontier_init(&f, ctx, 3);
    assert_int_equal(msc__frontier_offer(&f, 100, 0, &sets[0], NULL), MSC_OK);
    assert_int_equal(msc__frontier_offer(&f, 50, 20, &sets[2], NULL), MSC_OK);
    assert_int_equal(msc__frontier_offer(&f, 60, 20, &sets[3], NULL), MSC_OK); /* worse peak */
    assert_int_equal(msc__frontier_offer(&f, 50, 30, &sets[3], NULL), MSC_OK); /* slower */
    assert_int_equal(f.plans.count, 2);
    assert_int_equal(msc__frontier_offer(&f, 50, 20, &sets[1], NULL), MSC_OK); /* equal, comes first */
    assert_int_equal(msc__frontier_offer(&f, 50, 20, &sets[4], NULL), MSC_OK); /* equal, comes later */
    assert_int_equal(f.plans.count, 2);
    assert_int_equal(msc__frontier_set(&f, 1)[0], 1);
    assert_int_equal(msc__frontier_offer(&f, 20, 40, &sets[3], NULL), MSC_OK);
    assert_int_equal(msc__frontier_offer(&f, 10, 10, &sets[4], NULL), MSC_OK); /* beats both behind it */
    assert_int_equal(f.plans.count, 2);
    assert_int_equal(msc__frontier_set(&f, 0)[0], 0);
    assert_int_equal(msc__frontier_set(&f, 1)[0], 4);
    assert_int_equal(msc__frontier_offer(&f, 5, 50, &sets[2], NULL), MSC_OK);
    assert_int_equal(f.sets.count, 4); /* rows of plans that left are used again */
    msc__frontier_fini(&f);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
}

static void thinning(void **state)
{
    const uint64_t set = 0;
    msc__frontier f;
    msc_context *ctx;
    uint32_t i;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    msc__frontier_init(&f, ctx, 1);
    for (i = 0; i < 100; i++)
        assert_int_equal(msc__frontier_offer(&f, 1000 - i, i, &set, NULL), MSC_OK);
    msc__frontier_thin(&f, 200);
    assert_int_equal(f.plans.count, 100);
    msc__frontier_thin(&f, 7);
    assert_int_equal(f.plans.count, 7);
    assert_int_equal(msc__frontier_plans(&f)[0].added_ns, 0);
    assert_int_equal(msc__frontier_plans(&f)[6].added_ns, 99);
    for (i = 1; i < 7; i++)
        assert_true(msc__frontier_plans(&f)[i].added_ns > msc__frontier_plans(&f)[i - 1].added_ns);
    msc__frontier_fini(&f);
    msc_context_destroy(ctx);
}

static void comparison(void **state)
{
    const uint64_t big = UINT64_MAX;

    (void)state;
    assert_int_equal(msc__cost_compare(1, 2, 2, 4), 0);
    assert_int_equal(msc__cost_compare(1, 2, 2, 3), -1);
    assert_int_equal(msc__cost_compare(3, 2, 4, 3), 1);
    assert_int_equal(msc__cost_compare(big, big - 1, big - 1, big), 1);
    assert_int_equal(msc__cost_compare(big - 1, big, big, big), -1);
    assert_int_equal(msc__cost_compare(big, 1, big, 1), 0);
    assert_int_equal(msc__cost_compare((uint64_t)1 << 32, 1, 1, (uint64_t)1 << 32), 1);
    assert_int_equal(msc__cost_compare(0, 5, 0, 7), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"search/equals-exhaustive", equals_exhaustive, NULL, NULL, NULL},
        {"frontier/rules", frontier_rules, NULL, NULL, NULL},
        {"frontier/thinning", thinning, NULL, NULL, NULL},
        {"cost/comparison", comparison, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
