/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store: batches once or not at all, buckets against plain arrays, pages, whose is whose, deletion.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "samples.h"

#define RUN_ID "run-00000001"

typedef struct world {
    char folder[SAMPLE_PATH];
    store *it;
    int64_t account;
    store_run run;
} world;

static store_run_ref ref_of(const world *w, const char *id)
{
    return (store_run_ref){.account = w->account, .id = id, .now_ms = SAMPLE_NOW_MS};
}

static store_run add_run(world *w, const char *id, const char *project, const char *name, int64_t created_ms)
{
    const store_new_run fresh = {.project = project, .name = name, .created_ms = created_ms};
    store_run run;
    bool made;

    assert_int_equal(store_run_add(w->it, ref_of(w, id), &fresh, &run, &made), STORE_OK);
    assert_true(made);
    return run;
}

static int set_up(void **state)
{
    world *w = calloc(1, sizeof *w);

    sample_folder(w->folder);
    w->it = sample_store(w->folder);
    w->account = sample_account(w->it, "ann");
    w->run = add_run(w, RUN_ID, "project", "first", SAMPLE_NOW_MS);
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    world *w = *state;

    store_close(w->it);
    sample_remove(w->folder);
    free(w);
    return 0;
}

static store_result send(world *w, const char *series, int64_t sequence, const block_point *points,
                         uint32_t count, store_ingested *out)
{
    const store_new_points new_points = {series, "bytes", points, count};
    const store_batch batch = {.client = "c", .sequence = sequence, .series = &new_points, .series_count = 1};

    return store_ingest(w->it, ref_of(w, RUN_ID), &batch, out);
}

static void test_a_batch_counts_once(void **state)
{
    const block_point points[] = {{1, 10, 5}, {2, 20, 7}};
    store_ingested done;
    store_series series;
    world *w = *state;

    assert_int_equal(send(w, "a", 1, points, 2, &done), STORE_OK);
    assert_true(!done.duplicate && done.version == 1);
    assert_int_equal(send(w, "a", 1, points, 2, &done), STORE_OK);
    assert_true(done.duplicate && done.version == 1);
    assert_int_equal(send(w, "a", 0, points, 1, &done), STORE_OK); /* an earlier one may come later */
    assert_true(!done.duplicate && done.version == 2);
    assert_int_equal(store_series_find(w->it, w->run.key, "a", &series), STORE_OK);
    assert_true(series.summary.count == 3 && series.summary.max == 7 && series.summary.last == 5);
    assert_string_equal(series.unit, "bytes");
}

/* Buckets of the store, and what they must be. */
static void check_buckets(world *w, const block_point *points, uint32_t count, int64_t from, int64_t to,
                          uint32_t wanted)
{
    uint64_t width = ((uint64_t)(to - from) + wanted) / wanted;
    block_summary *got = calloc(wanted, sizeof *got);
    block_summary *expected = calloc(wanted, sizeof *expected);
    store_series series;

    for (uint32_t i = 0; i < wanted; i++)
        got[i] = expected[i] = block_summary_empty();
    for (uint32_t i = 0; i < count; i++)
        if (points[i].step >= from && points[i].step <= to)
            block_summary_add(&expected[(uint64_t)(points[i].step - from) / width], &points[i]);
    assert_int_equal(store_series_find(w->it, w->run.key, "s", &series), STORE_OK);
    assert_int_equal(series.summary.count, count);
    assert_int_equal(
        store_read_buckets(w->it, series.key, &(const store_buckets){from, to, width, wanted, got}),
        STORE_OK);
    for (uint32_t i = 0; i < wanted; i++) {
        assert_int_equal(got[i].count, expected[i].count);
        assert_int_equal(got[i].nans, expected[i].nans);
        if (expected[i].count == 0)
            continue;
        assert_int_equal(got[i].first_step, expected[i].first_step);
        assert_int_equal(got[i].last_step, expected[i].last_step);
        assert_true(isnan(expected[i].max) ? isnan(got[i].max) : got[i].max == expected[i].max);
        assert_true(isnan(expected[i].min) ? isnan(got[i].min) : got[i].min == expected[i].min);
        assert_true(isnan(expected[i].last) ? isnan(got[i].last) : got[i].last == expected[i].last);
        assert_true(fabs(got[i].sum - expected[i].sum) <= 1e-6 * (1 + fabs(expected[i].sum)));
    }
    free(got);
    free(expected);
}

/* Batches of all sizes; steps mostly in order; peaks and NaN where they may. */
static void test_buckets_are_those_of_the_points(void **state)
{
    enum { COUNT = 6000 };
    block_point *points = calloc(COUNT, sizeof *points);
    uint64_t random = 11;
    world *w = *state;
    uint32_t sent = 0;

    for (uint32_t i = 0; i < COUNT; i++) {
        uint64_t dice = sample_random(&random);

        points[i] =
            (block_point){(int64_t)i - (int64_t)(dice % 7), SAMPLE_NOW_MS + i, (double)(dice % 100000)};
        if (dice % 997 == 0)
            points[i].value = 1e12;
        if (dice % 101 == 0)
            points[i].value = NAN;
        if (i > 3000 && dice % 2 == 0)
            points[i].value /= 3;
    }
    for (int64_t sequence = 0; sent < COUNT; sequence++) {
        uint32_t count = 1 + (uint32_t)(sample_random(&random) % 1300);
        store_ingested done;

        count = count < COUNT - sent ? count : COUNT - sent;
        assert_int_equal(send(w, "s", sequence, points + sent, count, &done), STORE_OK);
        sent += count;
    }
    check_buckets(w, points, COUNT, -6, COUNT, 400);
    check_buckets(w, points, COUNT, -6, COUNT, 1);
    check_buckets(w, points, COUNT, 100, 130, 31);
    check_buckets(w, points, COUNT, 511, 3333, 17);
    check_buckets(w, points, COUNT, 7000, 9000, 10);
    for (unsigned i = 0; i < 50; i++) {
        int64_t from = (int64_t)(sample_random(&random) % COUNT);

        check_buckets(w, points, COUNT, from, from + (int64_t)(sample_random(&random) % COUNT),
                      1 + (uint32_t)(sample_random(&random) % 1000));
    }
    free(points);
}

static void test_blocks_hold_what_was_sent(void **state)
{
    block_point sent[1100];
    block_point got[BLOCK_POINTS];
    store_ingested done;
    store_series series;
    uint32_t count;
    world *w = *state;

    for (uint32_t i = 0; i < 1100; i++)
        sent[i] = (block_point){i, i, i};
    for (uint32_t i = 0; i < 1100; i += 100)
        assert_int_equal(send(w, "b", i, sent + i, 100, &done), STORE_OK);
    assert_int_equal(store_series_find(w->it, w->run.key, "b", &series), STORE_OK);
    assert_int_equal(series.blocks, 3);
    for (int64_t block = 0; block < 3; block++) {
        assert_int_equal(store_read_block(w->it, series.key, block, got, &count), STORE_OK);
        assert_int_equal(count, block < 2 ? BLOCK_POINTS : 1100 - 2 * BLOCK_POINTS);
        assert_memory_equal(got, sent + block * BLOCK_POINTS, count * sizeof *got);
    }
    assert_int_equal(store_read_block(w->it, series.key, 3, got, &count), STORE_NOT_FOUND);
}

static void test_a_batch_is_whole_or_nothing(void **state)
{
    const block_point point = {1, 1, 1};
    const store_new_points series = {"whole", "", &point, 1};
    store_document documents[STORE_DOCUMENTS + 1];
    char names[STORE_DOCUMENTS + 1][8];
    store_batch batch = {
        .client = "c", .sequence = 9, .series = &series, .series_count = 1, .documents = documents};
    store_series found;
    store_ingested done;
    world *w = *state;

    for (uint32_t i = 0; i <= STORE_DOCUMENTS; i++) {
        (void)snprintf(names[i], sizeof names[i], "d%u", i);
        documents[i] = (store_document){names[i], "{}", 2};
    }
    batch.document_count = STORE_DOCUMENTS + 1;
    assert_int_equal(store_ingest(w->it, ref_of(w, RUN_ID), &batch, &done), STORE_TOO_MANY);
    assert_int_equal(store_series_find(w->it, w->run.key, "whole", &found), STORE_NOT_FOUND);
    batch.document_count = STORE_DOCUMENTS;
    assert_int_equal(store_ingest(w->it, ref_of(w, RUN_ID), &batch, &done),
                     STORE_OK); /* its number is free still */
    assert_false(done.duplicate);
    assert_int_equal(store_series_find(w->it, w->run.key, "whole", &found), STORE_OK);
}

static bool count_event(void *user, const store_event *event)
{
    int64_t *seen = user;

    assert_true(event->id > seen[0]);
    seen[0] = event->id;
    seen[1]++;
    return true;
}

static void test_events_in_pages(void **state)
{
    store_event events[5] = {{0}};
    const store_batch batch = {.client = "c", .sequence = 1, .events = events, .event_count = 5};
    int64_t seen[2] = {0, 0};
    store_ingested done;
    world *w = *state;

    for (int i = 0; i < 5; i++)
        events[i] =
            (store_event){.kind = i % 2 ? "oom" : "replan", .step = i == 0 ? STORE_NO_TIME : i, .text = ""};
    assert_int_equal(store_ingest(w->it, ref_of(w, RUN_ID), &batch, &done), STORE_OK);
    assert_int_equal(store_events(w->it, w->run.key, NULL, 0, 3, count_event, seen), STORE_OK);
    assert_int_equal(seen[1], 3);
    assert_int_equal(store_events(w->it, w->run.key, NULL, seen[0], 10, count_event, seen), STORE_OK);
    assert_int_equal(seen[1], 5);
    seen[0] = seen[1] = 0;
    assert_int_equal(store_events(w->it, w->run.key, "oom", 0, 10, count_event, seen), STORE_OK);
    assert_int_equal(seen[1], 2);
}

static void test_what_is_anothers_is_not_found(void **state)
{
    const store_run_change change = {.name = "mine", .archived = -1, .state = STORE_ANY};
    const store_new_run fresh = {.project = "project", .name = "x", .created_ms = SAMPLE_NOW_MS};
    const store_batch batch = {.client = "c", .sequence = 1};
    store_ingested done;
    store_run run;
    bool made;
    world *w = *state;
    store_run_ref other = {.account = sample_account(w->it, "bob"), .id = RUN_ID, .now_ms = SAMPLE_NOW_MS};
    store_runs_query query = {
        .who = {.account = other.account}, .project = w->run.project, .state = STORE_ANY, .limit = 10};

    assert_int_equal(store_run_find(w->it, other, &run), STORE_NOT_FOUND);
    assert_int_equal(store_run_alive(w->it, other), STORE_NOT_FOUND);
    assert_int_equal(store_run_alter(w->it, other, &change, &run), STORE_NOT_FOUND);
    assert_int_equal(store_run_delete(w->it, other, NULL, NULL), STORE_NOT_FOUND);
    assert_int_equal(store_ingest(w->it, other, &batch, &done), STORE_NOT_FOUND);
    assert_int_equal(store_run_add(w->it, other, &fresh, &run, &made), STORE_CONFLICT);
    assert_int_equal(store_runs(w->it, &query, NULL, NULL), STORE_NOT_FOUND);
    assert_int_equal(store_run_find(w->it, ref_of(w, RUN_ID), &run), STORE_OK);
    assert_string_equal(run.name, "first");
}

static void test_states(void **state)
{
    store_run_change change = {.archived = 1, .state = STORE_ANY};
    store_run run;
    world *w = *state;
    store_run_ref later = {.account = w->account, .id = RUN_ID, .now_ms = SAMPLE_NOW_MS + STORE_LOST_MS + 1};

    assert_int_equal(store_run_find(w->it, ref_of(w, RUN_ID), &run), STORE_OK);
    assert_int_equal(run.state, STORE_RUNNING);
    assert_int_equal(store_run_find(w->it, later, &run), STORE_OK);
    assert_int_equal(run.state, STORE_LOST);
    assert_int_equal(store_run_alter(w->it, later, &change, &run), STORE_OK);
    assert_true(run.archived && run.state == STORE_LOST && run.version == 1);
    assert_int_equal(store_run_alive(w->it, later), STORE_OK);
    assert_int_equal(store_run_find(w->it, later, &run), STORE_OK);
    assert_int_equal(run.state, STORE_RUNNING);
    change = (store_run_change){.archived = -1, .state = STORE_FINISHED};
    assert_int_equal(store_run_alter(w->it, later, &change, &run), STORE_OK);
    assert_true(run.state == STORE_FINISHED && run.ended_ms == later.now_ms && run.archived);
}

/* ---- pages of runs --------------------------------------------------------------------------- */

typedef struct page {
    store_run runs[64];
    uint32_t count;
} page;

static bool note_run(void *user, const store_run *run)
{
    page *into = user;

    assert_true(into->count < 64);
    into->runs[into->count++] = *run;
    return true;
}

static void check_paging(world *w, store_runs_query query, uint32_t expected)
{
    page whole = {.count = 0};
    page parts = {.count = 0};

    query.limit = 64;
    assert_int_equal(store_runs(w->it, &query, note_run, &whole), STORE_OK);
    assert_int_equal(whole.count, expected);
    query.limit = 3;
    for (uint32_t before = UINT32_MAX; before != parts.count;) {
        const store_run *last = &parts.runs[parts.count == 0 ? 0 : parts.count - 1];

        before = parts.count;
        query.resumes = parts.count > 0;
        query.after_key = last->key;
        query.after_name = last->name;
        query.after_ms = query.sort == STORE_BY_SEEN ? last->seen_ms : last->created_ms;
        assert_int_equal(store_runs(w->it, &query, note_run, &parts), STORE_OK);
    }
    assert_int_equal(parts.count, expected);
    for (uint32_t i = 0; i < expected; i++)
        assert_int_equal(whole.runs[i].key, parts.runs[i].key);
}

static void test_pages_are_the_whole(void **state)
{
    world *w = *state;
    store_runs_query query = {.who = {.account = w->account}, .state = STORE_ANY, .now_ms = SAMPLE_NOW_MS};
    char id[16];

    for (int i = 0; i < 20; i++) {
        char name[32];

        (void)snprintf(id, sizeof id, "page-%04d", i);
        (void)snprintf(name, sizeof name, i % 5 == 0 ? "100%%_Sure" : "name.%d", i / 4);
        query.project = add_run(w, id, "pages", name, SAMPLE_NOW_MS - i / 3).project;
    }
    for (int sort = STORE_BY_CREATED; sort <= STORE_BY_SEEN; sort++) {
        query.sort = (store_sort)sort;
        query.descending = false;
        check_paging(w, query, 20);
        query.descending = true;
        check_paging(w, query, 20);
    }
    query.search = "%_s";
    check_paging(w, query, 4);
    query.search = "'; DROP TABLE run; --";
    check_paging(w, query, 0);
    query.search = "NAME.1";
    check_paging(w, query, 3);
    query.search = NULL;
    query.state = STORE_FINISHED;
    check_paging(w, query, 0);
    query.state = STORE_RUNNING;
    check_paging(w, query, 20);
    query.state = STORE_LOST;
    query.now_ms += STORE_LOST_MS + 1;
    check_paging(w, query, 20);
}

static void test_a_deleted_run_is_gone(void **state)
{
    block_point points[2000];
    store_ingested done;
    store_series series;
    store_run again;
    uint32_t count;
    world *w = *state;

    for (uint32_t i = 0; i < 2000; i++)
        points[i] = (block_point){i, i, i};
    assert_int_equal(send(w, "s", 1, points, 2000, &done), STORE_OK);
    assert_int_equal(store_series_find(w->it, w->run.key, "s", &series), STORE_OK);
    assert_int_equal(store_run_delete(w->it, ref_of(w, RUN_ID), NULL, NULL), STORE_OK);
    assert_int_equal(store_run_delete(w->it, ref_of(w, RUN_ID), NULL, NULL), STORE_NOT_FOUND);
    again = add_run(w, RUN_ID, "project", "second", SAMPLE_NOW_MS);
    assert_true(again.key > w->run.key);
    assert_int_equal(store_series_find(w->it, again.key, "s", &series), STORE_NOT_FOUND);
    assert_int_equal(send(w, "s", 1, points, 1, &done), STORE_OK); /* numbers of the old run do not count */
    assert_false(done.duplicate);
    while (store_series_find(w->it, w->run.key, "s", &series) == STORE_OK)
        assert_int_equal(store_run_alive(w->it, ref_of(w, RUN_ID)),
                         STORE_OK); /* the writer purges when it has nothing to do */
    assert_int_equal(store_read_block(w->it, series.key, 0, points, &count), STORE_NOT_FOUND);
}

static void test_all_is_there_after_a_restart(void **state)
{
    const block_point points[] = {{1, 10, 5}, {2, 20, NAN}};
    store_ingested done;
    store_series series;
    world *w = *state;

    assert_int_equal(send(w, "a", 1, points, 2, &done), STORE_OK);
    store_close(w->it);
    w->it = sample_store(w->folder);
    assert_int_equal(send(w, "a", 1, points, 2, &done), STORE_OK);
    assert_true(done.duplicate);
    assert_int_equal(store_series_find(w->it, w->run.key, "a", &series), STORE_OK);
    assert_true(series.summary.count == 2 && series.summary.nans == 1 && isnan(series.summary.last));
}

/* ---- many at once ---------------------------------------------------------------------------- */

typedef struct sender {
    world *w;
    unsigned number;
    pthread_t thread;
} sender;

static void *send_many(void *user)
{
    const sender *from = user;
    char client[16];

    (void)snprintf(client, sizeof client, "c%u", from->number);
    for (int64_t i = 0; i < 50; i++) {
        const block_point point = {i, i, (double)from->number};
        const store_new_points series = {"shared", "", &point, 1};
        const store_batch batch = {.client = client, .sequence = i, .series = &series, .series_count = 1};
        store_ingested done;

        if (store_ingest(from->w->it, ref_of(from->w, RUN_ID), &batch, &done) != STORE_OK || done.duplicate)
            return user;
    }
    return NULL;
}

static void test_many_writers(void **state)
{
    sender senders[16];
    store_series series;
    store_figures figures;
    store_run run;
    world *w = *state;

    for (unsigned i = 0; i < 16; i++) {
        senders[i] = (sender){.w = w, .number = i};
        assert_int_equal(pthread_create(&senders[i].thread, NULL, send_many, &senders[i]), 0);
    }
    for (unsigned i = 0; i < 16; i++) {
        void *failed;

        assert_int_equal(pthread_join(senders[i].thread, &failed), 0);
        assert_null(failed);
    }
    assert_int_equal(store_series_find(w->it, w->run.key, "shared", &series), STORE_OK);
    assert_int_equal(series.summary.count, 16 * 50);
    assert_int_equal(store_run_find(w->it, ref_of(w, RUN_ID), &run), STORE_OK);
    assert_int_equal(run.version, 16 * 50);
    figures = store_count(w->it);
    assert_true(figures.points == 16 * 50 && figures.commits <= figures.jobs + 16);
    assert_true(store_is_ready(w->it));
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        CASE(test_a_batch_counts_once),
        CASE(test_buckets_are_those_of_the_points),
        CASE(test_blocks_hold_what_was_sent),
        CASE(test_a_batch_is_whole_or_nothing),
        CASE(test_events_in_pages),
        CASE(test_what_is_anothers_is_not_found),
        CASE(test_states),
        CASE(test_pages_are_the_whole),
        CASE(test_a_deleted_run_is_gone),
        CASE(test_all_is_there_after_a_restart),
        CASE(test_many_writers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
