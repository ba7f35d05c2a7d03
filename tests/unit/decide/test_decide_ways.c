/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ways to treat modules: which outputs are worth keeping, which siblings are run together, which ways exclude
 * each other, and what a plan says about the way that was not taken.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "brute.h"
#include "synth.h"

typedef struct fixture {
    msc_context *ctx;
    msc_graph *graph;
    uint32_t saves[64];
    uint32_t save_count;
    msc__model model;
} fixture;

static void start(fixture *f)
{
    memset(f, 0, sizeof *f);
    assert_int_equal(msc_context_create(NULL, &f->ctx, NULL), MSC_OK);
    assert_int_equal(msc_graph_create(f->ctx, &f->graph, NULL), MSC_OK);
}

static void load(fixture *f, msc_graph *graph)
{
    const msc_decide_options options = msc_decide_options_default();

    assert_non_null(graph);
    f->graph = graph;
    assert_int_equal(msc__model_init(&f->model, f->ctx, graph, &options, NULL), MSC_OK);
}

static void stop(fixture *f)
{
    msc__model_fini(&f->model);
    msc_graph_destroy(f->graph);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
}

static uint32_t add_module(fixture *f, uint32_t parent, uint32_t flags)
{
    const msc_module module = {.parent = parent, .flags = flags};
    char path[16];
    uint32_t id;

    snprintf(path, sizeof path, "m%u", msc_graph_module_count(f->graph));
    assert_int_equal(msc_graph_add_module(f->graph, path, "M", &module, &id, NULL), MSC_OK);
    return id;
}

static uint32_t begin_call(fixture *f, uint32_t module)
{
    uint32_t call;

    assert_int_equal(msc_graph_begin_call(f->graph, module, &call, NULL), MSC_OK);
    return call;
}

static void end_call(fixture *f, uint32_t call)
{
    assert_int_equal(msc_graph_end_call(f->graph, call, NULL), MSC_OK);
}

/* An operation of so many milliseconds, whose result is saved and otherwise ends at once. */
static uint32_t add_saved(fixture *f, const char *name, uint32_t ms, uint64_t bytes, uint8_t flags)
{
    const msc_op op = {.flops = ms * 100000000ull, .flags = flags};
    uint32_t buffer;

    assert_int_equal(msc_graph_add_op(f->graph, name, &op, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_buffer(f->graph, bytes, MSC_CATEGORY_ACTIVATION, &buffer, NULL), MSC_OK);
    assert_int_equal(msc_graph_add_save(f->graph, buffer, &f->saves[f->save_count++], NULL), MSC_OK);
    assert_int_equal(msc_graph_end_buffer(f->graph, buffer, NULL), MSC_OK);
    return buffer;
}

/* Backward, in which all saves are used in reverse. */
static void finish(fixture *f)
{
    uint32_t i;

    assert_int_equal(msc_graph_add_op(f->graph, "loss", &(msc_op){0}, NULL, NULL), MSC_OK);
    assert_int_equal(msc_graph_set_phase(f->graph, MSC_PHASE_BACKWARD, NULL), MSC_OK);
    for (i = f->save_count; i-- > 0;) {
        assert_int_equal(msc_graph_unpack(f->graph, f->saves[i], NULL), MSC_OK);
        assert_int_equal(msc_graph_add_op(f->graph, "backward", &(msc_op){0}, NULL, NULL), MSC_OK);
        assert_int_equal(msc_graph_release(f->graph, f->saves[i], NULL), MSC_OK);
    }
    assert_int_equal(msc_graph_finish(f->graph, NULL), MSC_OK);
    load(f, f->graph);
}

/* ---- what is kept ---------------------------------------------------------------------------------- */

/* The n-th way to treat a module, 0 being to keep nothing; NULL: there are not so many. */
static const msc__candidate *way(const fixture *f, uint32_t module, uint32_t n)
{
    uint32_t c = f->model.subjects[module].candidate;

    for (; n > 0 && c != MSC_NONE; n--)
        c = f->model.candidates[c].next;
    return c == MSC_NONE ? NULL : &f->model.candidates[c];
}

static void check_kept(const fixture *f, uint32_t module, uint32_t n, uint32_t count, const uint32_t *offsets)
{
    const msc__candidate *c = way(f, module, n);

    assert_non_null(c);
    assert_int_equal(c->kept_count, count);
    if (count > 0)
        assert_memory_equal(msc__kept_of(&f->model, c), offsets, count * sizeof *offsets);
}

/* Time per byte decides the order. What is random, a cast, changed in place later, or hardly takes time, is never
 * kept, and a way that saves nothing more is no way. */
static void order_of_keeping(void **state)
{
    const uint32_t first[] = {0};
    const uint32_t both[] = {0, 5};
    fixture f;
    uint32_t module;
    uint32_t call;
    uint32_t changed;

    (void)state;
    start(&f);
    module = add_module(&f, MSC_NONE, 0);
    call = begin_call(&f, module);
    add_saved(&f, "mm", 10, 1000, 0);
    add_saved(&f, "rand", 10, 1000, MSC_OP_RANDOM);
    add_saved(&f, "_to_copy", 10, 1000, 0);
    changed = add_saved(&f, "mm", 10, 1000, 0);
    add_saved(&f, "add_", 10, 0, 0);
    assert_int_equal(msc_graph_add_write(f.graph, changed, NULL), MSC_OK);
    add_saved(&f, "mm", 20, 4000, 0);
    add_saved(&f, "relu", 0, 100000, 0);
    end_call(&f, call);
    finish(&f);
    check_kept(&f, module, 0, 0, NULL);
    check_kept(&f, module, 1, 1, first);
    check_kept(&f, module, 2, 2, both);
    assert_null(way(&f, module, 3));
    /* 7 operations are looked at twice; 10 and then 20 ms are not computed again. */
    assert_int_equal(way(&f, module, 0)->cost_ns - way(&f, module, 1)->cost_ns, 10005000 - 14 * 15000);
    assert_int_equal(way(&f, module, 1)->cost_ns - way(&f, module, 2)->cost_ns, 20005000);
    stop(&f);
}

/* Equal operations lie on a straight line from nothing to all: there is no corner, only its end. */
static void corners_only(void **state)
{
    fixture f;
    uint32_t module;
    uint32_t call;
    uint32_t i;

    (void)state;
    start(&f);
    module = add_module(&f, MSC_NONE, 0);
    call = begin_call(&f, module);
    add_saved(&f, "rand", 10, 1000, MSC_OP_RANDOM);
    for (i = 0; i < 9; i++)
        add_saved(&f, "mm", 10, 1000, 0);
    end_call(&f, call);
    finish(&f);
    assert_int_equal(way(&f, module, 1)->kept_count, 9);
    assert_null(way(&f, module, 2));
    stop(&f);
}

/* At most six ways to keep something, each keeping what the one before does and more, in less time. */
static void ways_of_a_block(void **state)
{
    fixture f;
    uint32_t c;
    uint32_t i;
    uint32_t found = 0;

    (void)state;
    start(&f);
    msc_graph_destroy(f.graph);
    load(&f, synth_blocks(f.ctx, 2, SYNTH_HALVES | SYNTH_LAYERS));
    for (c = 0; c < f.model.candidate_count; c++) {
        const msc__candidate *a = &f.model.candidates[c];
        const msc__candidate *b = a->next == MSC_NONE ? NULL : &f.model.candidates[a->next];
        for (i = 0; i < a->kept_count; i++) {
            uint32_t op = f.model.regions[a->first_region].begin + msc__kept_of(&f.model, a)[i];
            assert_int_equal(f.model.ops[op].flags & MSC_OP_RANDOM, 0);
            assert_true(f.model.begins.first[op] < f.model.begins.first[op + 1]); /* no view */
            found++;
        }
        if (b == NULL)
            continue;
        assert_int_equal(b->base, a->base);
        assert_true(b->cost_ns < a->cost_ns);
        for (i = 0; i < a->kept_count; i++)
            assert_true(
                msc__offsets_have(msc__kept_of(&f.model, b), b->kept_count, msc__kept_of(&f.model, a)[i]));
    }
    assert_true(found > 20);
    for (i = 0; i < f.model.module_count; i++)
        if (f.model.subjects[i].candidate != MSC_NONE)
            assert_null(way(&f, i, 7));
    stop(&f);
}

/* A module called twice: what is kept is kept in both calls, if both do the same. */
static void check_two_calls(const char *second_name, bool alike)
{
    fixture f;
    uint32_t module;
    uint32_t i;

    start(&f);
    module = add_module(&f, MSC_NONE, 0);
    for (i = 0; i < 2; i++) {
        uint32_t call = begin_call(&f, module);
        add_saved(&f, "rand", 10, 1000, MSC_OP_RANDOM);
        add_saved(&f, i == 0 ? "mm" : second_name, 10, 1000, 0);
        end_call(&f, call);
    }
    finish(&f);
    assert_non_null(way(&f, module, 0));
    assert_int_equal(way(&f, module, 0)->region_count, 2);
    assert_int_equal(way(&f, module, 1) != NULL, alike);
    if (alike)
        assert_int_equal(way(&f, module, 0)->cost_ns - way(&f, module, 1)->cost_ns,
                         2 * (10005000 - 3 * 15000));
    stop(&f);
}

static void two_calls(void **state)
{
    (void)state;
    check_two_calls("mm", true);
    check_two_calls("bmm", false);
}

static void no_selective(void **state)
{
    msc_decide_options options = msc_decide_options_default();
    msc_context *ctx;
    msc_graph *graph;
    uint32_t allowed;
    uint32_t percent;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    graph = synth_blocks(ctx, 4, SYNTH_HALVES);
    assert_non_null(graph);
    for (allowed = 0; allowed < 2; allowed++) {
        uint32_t selective = 0;
        uint32_t checkpoints = 0;
        options.allow_selective = (uint8_t)allowed;
        for (percent = 50; percent < 100; percent += 5) {
            msc_plan *plan;
            uint32_t i;
            uint32_t kept;
            options.budget_bytes = 826539373 / 100 * percent; /* of about the plain peak */
            assert_int_equal(msc_decide(ctx, graph, &options, &plan, NULL), MSC_OK);
            for (i = 0; i < msc_plan_choice_count(plan); i++) {
                uint8_t action = msc_plan_choices(plan)[i].action;
                selective += action == MSC_ACTION_SELECTIVE;
                checkpoints += action == MSC_ACTION_CHECKPOINT;
                (void)msc_plan_kept(plan, i, &kept);
                assert_int_equal(kept > 0, action == MSC_ACTION_SELECTIVE);
            }
            msc_plan_destroy(plan);
        }
        assert_true(checkpoints > 0);
        assert_int_equal(selective > 0, allowed);
    }
    msc_graph_destroy(graph);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
}

/* ---- runs ------------------------------------------------------------------------------------------ */

/* Whether there is a run of the modules first … first + length - 1. */
static bool has_run(const fixture *f, uint32_t first, uint32_t length)
{
    uint32_t i;

    for (i = 0; i < f->model.candidate_count; i++) {
        const msc__candidate *c = &f->model.candidates[i];
        const msc__region *r = &f->model.regions[c->first_region];
        if (c->is_run && f->model.calls[r->first_call].module == first &&
            f->model.calls[r->last_call].module == first + length - 1)
            return true;
    }
    return false;
}

static uint32_t count_runs(const fixture *f)
{
    uint32_t count = 0;
    uint32_t i;

    for (i = 0; i < f->model.candidate_count; i++)
        count += f->model.candidates[i].is_run;
    return count;
}

static void short_chain(void **state)
{
    fixture f;
    uint32_t first;
    uint32_t length;

    (void)state;
    start(&f);
    msc_graph_destroy(f.graph);
    load(&f, synth_sequence(f.ctx, 12, 0));
    assert_int_equal(count_runs(&f), 12 * 11 / 2);
    for (length = 2; length <= 12; length++)
        for (first = 1; first + length <= 13; first++) /* module 0 is the root */
            assert_true(has_run(&f, first, length));
    stop(&f);
}

/* Of 16 layers: lengths 2, 3, 4, 6 and 8 at multiples of their length, the last one as far as it goes. */
static void long_chain(void **state)
{
    fixture f;

    (void)state;
    start(&f);
    msc_graph_destroy(f.graph);
    load(&f, synth_sequence(f.ctx, 16, 0));
    assert_int_equal(count_runs(&f), 8 + 5 + 4 + 3 + 2);
    assert_true(has_run(&f, 1, 2) && has_run(&f, 3, 2) && has_run(&f, 15, 2));
    assert_false(has_run(&f, 2, 2));
    assert_true(has_run(&f, 4, 3) && has_run(&f, 13, 3));
    assert_true(has_run(&f, 5, 4));
    assert_true(has_run(&f, 7, 6) && has_run(&f, 13, 4)); /* the third of length 6 has 4 layers */
    assert_true(has_run(&f, 9, 8));
    assert_false(has_run(&f, 1, 16));
    stop(&f);
}

enum { GAP = 4096, CALLED_AGAIN = 8192, CHAIN_TWICE = 16384, NO_CHAIN = 32768, NESTED_BAR = 65536 };

/* A chain, module 0, of modules 1 … 6; something is the matter with 3 (flags: below GAP). */
static void build_chain(fixture *f, uint32_t matter)
{
    uint32_t chain;
    uint32_t calls = (matter & CHAIN_TWICE) != 0 ? 2 : 1;
    uint32_t modules[8];
    uint32_t i;

    start(f);
    chain = add_module(f, MSC_NONE, (matter & NO_CHAIN) != 0 ? 0 : MSC_MODULE_CHAIN);
    for (i = 1; i <= 6; i++)
        modules[i] = add_module(f, chain, i == 3 ? matter % GAP : 0);
    modules[7] = add_module(f, modules[3], MSC_MODULE_PYTHON_STATE);
    for (; calls > 0; calls--) {
        uint32_t outer = begin_call(f, chain);
        for (i = 1; i <= 6; i++) {
            uint32_t call;
            if (i == 3 && (matter & GAP) != 0)
                add_saved(f, "between", 1, 100, 0);
            call = begin_call(f, modules[i]);
            if (i == 3 && (matter & NESTED_BAR) != 0) {
                uint32_t inner = begin_call(f, modules[7]);
                add_saved(f, "inner", 1, 100, 0);
                end_call(f, inner);
            }
            add_saved(f, "layer", 1, 1000, 0);
            end_call(f, call);
        }
        end_call(f, outer);
    }
    if ((matter & CALLED_AGAIN) != 0) {
        uint32_t call = begin_call(f, modules[3]);
        add_saved(f, "layer", 1, 1000, 0);
        end_call(f, call);
    }
    finish(f);
}

/* Whether the chain falls into 1, 2 and 4, 5, 6. */
static void check_split(uint32_t matter)
{
    fixture f;

    build_chain(&f, matter);
    assert_int_equal(count_runs(&f), 1 + 3);
    assert_true(has_run(&f, 1, 2));
    assert_true(has_run(&f, 4, 2) && has_run(&f, 5, 2) && has_run(&f, 4, 3));
    stop(&f);
}

static void what_splits(void **state)
{
    fixture f;

    (void)state;
    build_chain(&f, 0);
    assert_int_equal(count_runs(&f), 15);
    stop(&f);
    check_split(MSC_MODULE_PYTHON_STATE);
    check_split(MSC_MODULE_LEFT_OUT);
    check_split(NESTED_BAR);
    check_split(CALLED_AGAIN);
    build_chain(&f, GAP);
    assert_int_equal(count_runs(&f), 1 + 6); /* 3 is with 4, 5, 6 */
    assert_true(has_run(&f, 1, 2) && has_run(&f, 3, 4));
    assert_false(has_run(&f, 2, 2));
    stop(&f);
    build_chain(&f, CHAIN_TWICE);
    assert_int_equal(count_runs(&f), 0);
    stop(&f);
    build_chain(&f, NO_CHAIN);
    assert_int_equal(count_runs(&f), 0);
    stop(&f);
}

/* Alone it would repeat a change of what comes from outside; together with what makes that, it would not. */
static void in_place(void **state)
{
    fixture f;

    (void)state;
    start(&f);
    msc_graph_destroy(f.graph);
    load(&f, synth_sequence(f.ctx, 6, SYNTH_IN_PLACE));
    assert_int_equal(f.model.subjects[2].rule, MSC_RULE_WRITES_OUTSIDE);
    assert_true(f.model.subjects[2].candidate == MSC_NONE);
    assert_true(has_run(&f, 1, 2));
    assert_true(has_run(&f, 3, 4));
    assert_false(has_run(&f, 2, 2)); /* begins with the change */
    stop(&f);
}

/* ---- random graphs --------------------------------------------------------------------------------- */

static uint32_t random_state = 3;

static uint32_t random_u32(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static msc_graph *random_graph(msc_context *ctx)
{
    uint8_t bytes[700];
    size_t i;

    for (i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)random_u32();
    return synth_bytes(ctx, bytes, sizeof bytes);
}

/* Fixed costs that leave it worth while to keep something in such small graphs. */
static msc_decide_options random_options(void)
{
    msc_decide_options options = msc_decide_options_default();

    options.rates.launch_ns = 1000;
    options.rates.recompute_ns = 2000;
    options.rates.intercept_ns = 100;
    return options;
}

static uint32_t times_in(const msc__buckets *lists, uint32_t candidate, uint32_t other)
{
    uint32_t count = 0;
    uint32_t i;

    for (i = lists->first[candidate]; i < lists->first[candidate + 1]; i++)
        count += lists->items[i] == other;
    return count;
}

/* Every pair that treats a call both is in the lists, and no other is. Two modules that each call the other have
 * one of them above. */
static void overlaps(void **state)
{
    const msc_decide_options options = random_options();
    static brute b;
    msc_context *ctx;
    uint32_t round;
    uint32_t pairs = 0;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    for (round = 0; round < 200; round++) {
        msc_graph *graph = random_graph(ctx);
        uint32_t i;
        uint32_t k;
        assert_non_null(graph);
        assert_true(brute_init(&b, ctx, graph, &options));
        for (i = 0; i < b.model.candidate_count; i++) {
            assert_int_equal(times_in(&b.model.above, i, i) + times_in(&b.model.below, i, i), 0);
            for (k = i + 1; k < b.model.candidate_count; k++) {
                uint32_t above = times_in(&b.model.above, i, k);
                uint32_t below = times_in(&b.model.below, i, k);
                assert_int_equal(above + below, brute_overlap(&b, i, k));
                assert_int_equal(times_in(&b.model.below, k, i), above);
                assert_int_equal(times_in(&b.model.above, k, i), below);
                pairs += above + below;
            }
        }
        brute_fini(&b);
        msc_graph_destroy(graph);
    }
    assert_true(pairs > 5000);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
}

/* ---- plans of sets --------------------------------------------------------------------------------- */

static uint64_t replayed_peak(msc_context *ctx, const msc_graph *graph, const msc_plan *plan, msc_sim *sim)
{
    msc_trace *trace;
    msc_replay replay;

    assert_int_equal(msc_trace_create(ctx, graph, plan, &trace, NULL), MSC_OK);
    assert_int_equal(msc_trace_replay(trace, sim, NULL, 0, &replay, NULL), MSC_OK);
    msc_trace_destroy(trace);
    return replay.peak_bytes;
}

static uint64_t peak_of_set(brute *b, const uint64_t *set, msc_sim *sim)
{
    msc_plan *plan = NULL;
    uint64_t peak_bytes;

    assert_int_equal(msc__plan_of_set(&b->model, set, &plan, NULL), MSC_OK);
    peak_bytes = replayed_peak(b->ctx, b->model.graph, plan, sim);
    msc_plan_destroy(plan);
    return peak_bytes;
}

static int64_t added_of_set(const brute *b, const uint64_t *set)
{
    int64_t added_ns = 0;
    uint32_t i;

    for (i = 0; i < b->model.candidate_count; i++)
        if (msc__set_has(set, i))
            added_ns += b->model.candidates[i].cost_ns;
    return added_ns;
}

static void put(brute *b, uint64_t *set, uint32_t candidate)
{
    uint32_t i;

    for (i = 0; i < b->model.candidate_count; i++)
        if (msc__set_has(set, i) && brute_overlap(b, i, candidate))
            set[i / 64] ^= (uint64_t)1 << i % 64;
    set[candidate / 64] |= (uint64_t)1 << candidate % 64;
}

/* The candidate of the set that treats a module, or MSC_NONE. */
static uint32_t active_of(const brute *b, const uint64_t *set, uint32_t module)
{
    uint32_t i;
    uint32_t call;

    for (i = 0; i < b->model.candidate_count; i++) {
        const msc__candidate *c = &b->model.candidates[i];
        const msc__region *run = &b->model.regions[c->first_region];
        if (!msc__set_has(set, i))
            continue;
        if (c->module == module)
            return i;
        for (call = run->first_call; c->is_run && call <= run->last_call; call = b->model.last_call[call] + 1)
            if (b->model.calls[call].module == module)
                return i;
    }
    return MSC_NONE;
}

typedef struct coverage {
    uint32_t others, selective, joined, plans;
} coverage;

static void check_choice(brute *b, msc_sim *sim, const uint64_t *set, const msc_plan *plan, uint32_t index,
                         coverage *seen)
{
    const msc_choice *choice = &msc_plan_choices(plan)[index];
    uint32_t active = active_of(b, set, choice->module);
    uint32_t c = active != MSC_NONE ? active : b->model.subjects[choice->module].candidate;
    uint64_t other[BRUTE_MOST_CANDIDATES / 64];
    uint32_t kept;
    const uint32_t *offsets = msc_plan_kept(plan, index, &kept);

    assert_int_equal(choice->action != MSC_ACTION_KEEP, active != MSC_NONE);
    if (c == MSC_NONE) {
        assert_int_equal(choice->other_peak_bytes, 0);
        return;
    }
    if (active != MSC_NONE) {
        const msc__candidate *a = &b->model.candidates[active];
        assert_int_equal(choice->joined, a->is_run && a->module != choice->module);
        assert_int_equal(kept, a->kept_count);
        if (kept > 0)
            assert_memory_equal(offsets, msc__kept_of(&b->model, a), kept * sizeof *offsets);
        assert_int_equal(choice->action == MSC_ACTION_SELECTIVE, kept > 0);
        seen->selective += kept > 0;
        seen->joined += choice->joined;
    }
    memcpy(other, set, sizeof other);
    if (active != MSC_NONE)
        other[c / 64] ^= (uint64_t)1 << c % 64;
    else
        put(b, other, c);
    assert_true(choice->other_peak_bytes == peak_of_set(b, other, sim));
    assert_int_equal(choice->other_step_ns, 1000000000 + added_of_set(b, other));
    seen->others++;
}

static void check_set(brute *b, msc_sim *sim, const uint64_t *set, coverage *seen)
{
    msc__explained e = {
        .model = &b->model, .fit = &b->fit, .set = set, .fits = true, .allow_checkpoint = true};
    msc_plan *plan = NULL;
    uint32_t i;

    e.step_ns = 1000000000 + added_of_set(b, set);
    assert_int_equal(msc__plan_explain(&e, &plan, NULL), MSC_OK);
    assert_true(replayed_peak(b->ctx, b->model.graph, plan, sim) == peak_of_set(b, set, sim));
    for (i = 0; i < msc_plan_choice_count(plan); i++)
        check_choice(b, sim, set, plan, i, seen);
    msc_plan_destroy(plan);
    assert_true(msc__fit_peak(&b->fit) == b->fit.plain_peak_bytes); /* left as it was */
    seen->plans++;
}

/* On random graphs and random sets: the plan says what the set does, and what the other way round would bring is
 * what a replay of that gives. */
static void explained(void **state)
{
    const msc_sim_options sim_options = msc_sim_options_default(MSC_SIM_HOST);
    const msc_decide_options options = random_options();
    static brute b;
    coverage seen = {0};
    msc_context *ctx;
    msc_sim *sim;
    uint32_t round;

    (void)state;
    assert_int_equal(msc_context_create(NULL, &ctx, NULL), MSC_OK);
    assert_int_equal(msc_sim_create(ctx, &sim_options, &sim, NULL), MSC_OK);
    for (round = 0; round < 200; round++) {
        msc_graph *graph = random_graph(ctx);
        uint64_t set[BRUTE_MOST_CANDIDATES / 64] = {0};
        uint32_t i;
        assert_non_null(graph);
        assert_true(brute_init(&b, ctx, graph, &options));
        for (i = 0; i < 4 && b.model.candidate_count > 0; i++) {
            put(&b, set, random_u32() % b.model.candidate_count);
            check_set(&b, sim, set, &seen);
        }
        brute_fini(&b);
        msc_graph_destroy(graph);
    }
    assert_true(seen.plans > 500);
    assert_true(seen.others > 2000);
    assert_true(seen.selective > 200);
    assert_true(seen.joined > 200);
    msc_sim_destroy(sim);
    assert_int_equal(msc_context_held_bytes(ctx), 0);
    msc_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"variants/order", order_of_keeping, NULL, NULL, NULL},
        {"variants/corners-only", corners_only, NULL, NULL, NULL},
        {"variants/of-a-block", ways_of_a_block, NULL, NULL, NULL},
        {"variants/two-calls", two_calls, NULL, NULL, NULL},
        {"variants/not-allowed", no_selective, NULL, NULL, NULL},
        {"runs/short-chain", short_chain, NULL, NULL, NULL},
        {"runs/long-chain", long_chain, NULL, NULL, NULL},
        {"runs/what-splits-a-chain", what_splits, NULL, NULL, NULL},
        {"runs/in-place", in_place, NULL, NULL, NULL},
        {"overlaps/equal-naive-on-random-graphs", overlaps, NULL, NULL, NULL},
        {"explain/equals-replay-on-random-graphs", explained, NULL, NULL, NULL},
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
