/* SPDX-License-Identifier: Apache-2.0 */
/* The recorder: what is put arrives in files, whoever puts it, and in a child of a fork nothing happens. */
#include "record_fixture.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "base/thread.h"
#include "oom/failing_alloc.h"

#define THREADS 4u
#define ROWS 500u

/* Values, events and documents in a file; `*last_end` is what the last batch says of the run's end. */
static uint64_t count_file(const place *here, unsigned number, int *last_end)
{
    msc_spool *spool = NULL;
    msc_spool_batch batch;
    char path[512];
    uint64_t count = 0;

    spool_path(here, number, path);
    assert_int_equal(msc_spool_load(here->ctx, path, 0, &spool, NULL), MSC_OK);
    while (msc_spool_next(spool, &batch)) {
        count += batch.value_count + batch.event_count + batch.document_count;
        if (batch.end_state != 0 && last_end != NULL)
            *last_end = batch.end_state;
    }
    assert_int_equal(msc_spool_damaged_bytes(spool), 0);
    msc_spool_destroy(spool);
    return count;
}

static void put_row(msc_record *record, int64_t step)
{
    msc_record_value value = {"loss", "", (double)step};

    assert_int_equal(msc_record_row(record, step, step, &value, 1, NULL), MSC_OK);
}

static void what_is_put_is_there(void **state)
{
    const place *here = *state;
    msc_record *record = opened(here);
    msc_record_figures figures;
    int ended = 0;

    put_row(record, 0);
    assert_int_equal(msc_record_event(record, "{}", 2, NULL), MSC_OK);
    assert_int_equal(msc_record_document(record, "plan", "{}", 2, NULL), MSC_OK);
    assert_int_equal(msc_record_flush(record, SECONDS_NS, NULL), MSC_OK);
    msc_record_destroy(record); /* a flushed file has all of it, whatever comes after */
    assert_int_equal(count_file(here, 0, &ended), 3);
    assert_int_equal(ended, 0);
    record = NULL;
    {
        msc_record_options options = options_for(here);

        options.client = "2-test";
        assert_int_equal(msc_record_create(here->ctx, &options, &record, NULL), MSC_OK);
    }
    put_row(record, 1);
    assert_int_equal(msc_record_end(record, "failed", NULL), MSC_OK);
    {
        msc_record_value value = {"loss", "", 0};

        assert_int_equal(msc_record_row(record, 2, 2, &value, 1, NULL), MSC_ESTATE);
        assert_int_equal(msc_record_event(record, "{}", 2, NULL), MSC_ESTATE);
        assert_int_equal(msc_record_end(record, "finished", NULL), MSC_ESTATE);
    }
    msc_record_figures_read(record, &figures, sizeof figures);
    assert_true(figures.row_count == 1 && figures.dropped_rows == 0 && figures.failures == 0);
    msc_record_destroy(record);
}

static void an_end_is_in_the_file(void **state)
{
    const place *here = *state;
    msc_record *record = opened(here);
    int ended = 0;

    put_row(record, 0);
    assert_int_equal(msc_record_end(record, "gone", NULL), MSC_EINVAL);
    assert_int_equal(msc_record_end(record, NULL, NULL), MSC_EINVAL);
    assert_int_equal(msc_record_end(record, "failed", NULL), MSC_OK);
    msc_record_destroy(record);
    assert_int_equal(count_file(here, 0, &ended), 1);
    assert_int_equal(ended, 2);
}

typedef struct putter {
    msc_record *record;
    int64_t first;
} putter;

static void *put_rows(void *argument)
{
    const putter *it = argument;
    int64_t i;

    for (i = 0; i < (int64_t)ROWS; i++)
        put_row(it->record, it->first + i);
    return NULL;
}

static void many_threads_put(void **state)
{
    const place *here = *state;
    msc_record *record = opened(here);
    msc__thread threads[THREADS];
    putter putters[THREADS];
    unsigned i;

    for (i = 0; i < THREADS; i++) {
        putters[i] = (putter){record, i * (int64_t)ROWS};
        assert_int_equal(msc__thread_start(&threads[i], "putter", put_rows, &putters[i], NULL), MSC_OK);
    }
    for (i = 0; i < THREADS; i++)
        msc__thread_join(&threads[i]);
    msc_record_destroy(record);
    assert_int_equal(count_file(here, 0, NULL), THREADS * ROWS);
}

static void a_child_has_no_recorder(void **state)
{
    const place *here = *state;
    msc_record *record = opened(here);
    msc_record_value value = {"loss", "", 0};
    pid_t child;
    int status = -1;

    put_row(record, 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        bool ok = msc_record_row(record, 1, 1, &value, 1, NULL) == MSC_ESTATE &&
                  msc_record_flush(record, 0, NULL) == MSC_ESTATE;

        msc_record_destroy(record);
        _exit(ok ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    put_row(record, 2);
    msc_record_destroy(record);
    assert_int_equal(count_file(here, 0, NULL), 2);
}

static void a_kill_leaves_what_was_flushed(void **state)
{
    const place *here = *state;
    int ready[2];
    pid_t child;
    char any;

    assert_int_equal(pipe(ready), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        msc_record *record = opened(here);
        int64_t step;

        for (step = 0; step < 100; step++)
            put_row(record, step);
        (void)!msc_record_flush(record, SECONDS_NS, NULL);
        (void)!write(ready[1], "x", 1);
        for (;;)
            put_row(record, step++ % 1000 + 1000);
    }
    assert_int_equal(read(ready[0], &any, 1), 1);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_true(count_file(here, 0, NULL) >= 100);
    (void)close(ready[0]);
    (void)close(ready[1]);
}

/* The limit is this process's: a child has it. */
static void a_full_disk_is_survived(void **state)
{
    const place *here = *state;
    pid_t child = fork();
    int status = -1;

    assert_true(child >= 0);
    if (child == 0) {
        msc_record *record = opened(here);
        struct rlimit limit = {4096, RLIM_INFINITY};
        msc_record_figures figures;
        msc_record_value value = {"a series whose name is long enough to fill the file soon", "", 0};
        bool ok;
        int i;

        ok = setrlimit(RLIMIT_FSIZE, &limit) == 0;
        for (i = 0; i < 1000; i++)
            ok = ok && msc_record_row(record, i, i, &value, 1, NULL) == MSC_OK;
        ok = ok && msc_record_flush(record, SECONDS_NS, NULL) == MSC_EIO; /* and no SIGXFSZ */
        msc_record_figures_read(record, &figures, sizeof figures);
        ok = ok && figures.failures > 0 && figures.system_error == EFBIG;
        limit.rlim_cur = RLIM_INFINITY; /* there is room again: nothing was lost */
        ok = ok && setrlimit(RLIMIT_FSIZE, &limit) == 0;
        msc_record_destroy(record);
        _exit(ok ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(count_file(here, 0, NULL), 1000);
}

static void a_full_ring_refuses_rows_before_events(void **state)
{
    const place *here = *state;
    pid_t child = fork();
    int status = -1;

    assert_true(child >= 0);
    if (child == 0) {
        msc_record *record;
        msc_record_options options = options_for(here);
        struct rlimit limit = {MSC_RECORD_MOST_BYTES, RLIM_INFINITY};
        msc_record_figures figures;
        msc_record_value value = {"x", "", 0};
        static char event[1 << 16];
        int taken = 0;
        int refused = 0;
        bool ok;

        options.ring_bytes = 1u << 20;
        ok = msc_record_create(here->ctx, &options, &record, NULL) == MSC_OK;
        limit.rlim_cur = 1; /* nothing can be written: the buffer fills, then the ring */
        ok = ok && setrlimit(RLIMIT_FSIZE, &limit) == 0;
        memset(event, ' ', sizeof event);
        while (refused < 100000) {
            if (msc_record_row(record, taken, 0, &value, 1, NULL) == MSC_OK)
                taken++;
            else
                refused++;
        }
        msc_record_figures_read(record, &figures, sizeof figures);
        ok = ok && figures.dropped_rows == 100000 && figures.row_count == (uint64_t)taken;
        ok = ok && msc_record_event(record, event, sizeof event, NULL) == MSC_OK; /* has room still */
        while (msc_record_event(record, event, sizeof event, NULL) == MSC_OK)
            taken++;
        msc_record_figures_read(record, &figures, sizeof figures);
        ok = ok && figures.dropped_count == 1;
        msc_record_destroy(record);
        _exit(ok ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void wrong_arguments_are_named(void **state)
{
    const place *here = *state;
    msc_record_options options = options_for(here);
    msc_record *record = NULL;
    msc_error err;

    options.client = "a/b";
    assert_int_equal(msc_record_create(here->ctx, &options, &record, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "client"));
    options = options_for(here);
    options.ring_bytes = 3u << 20;
    assert_int_equal(msc_record_create(here->ctx, &options, &record, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "ring_bytes"));
    options = options_for(here);
    options.cap_bytes = options.segment_bytes;
    assert_int_equal(msc_record_create(here->ctx, &options, &record, &err), MSC_EINVAL);
    assert_non_null(strstr(err.message, "cap_bytes"));
    options = options_for(here);
    options.batch_ns = 0;
    assert_int_equal(msc_record_create(here->ctx, &options, &record, &err), MSC_EINVAL);
    options = options_for(here);
    options.directory = "/nowhere/at/all";
    assert_int_equal(msc_record_create(here->ctx, &options, &record, &err), MSC_EIO);
    assert_int_equal(err.driver_code, ENOENT);
    assert_null(record);
    record = opened(here);
    options = options_for(here); /* a second one of this name would write into the first one's file */
    {
        msc_record *second = NULL;

        assert_int_equal(msc_record_create(here->ctx, &options, &second, &err), MSC_EIO);
        assert_int_equal(err.driver_code, EEXIST);
    }
    assert_int_equal(msc_record_document(record, "", "{}", 2, &err), MSC_EINVAL);
    assert_int_equal(msc_record_document(record, "plan", "", 0, &err), MSC_EINVAL);
    assert_int_equal(msc_record_event(record, "{}", MSC_RECORD_MOST_BYTES + 1, &err), MSC_EINVAL);
    assert_int_equal(msc_record_row(record, 0, 0, NULL, 0, &err), MSC_EINVAL);
    msc_record_destroy(record);
    msc_record_destroy(NULL);
}

static void any_allocation_may_fail(void **state)
{
    const place *here = *state;
    failing_alloc heap;
    uint64_t fail_at;

    for (fail_at = 1;; fail_at++) {
        msc_record_options options = options_for(here);
        msc_record *record = NULL;
        msc_context *ctx;
        char client[32];
        msc_status status;

        (void)snprintf(client, sizeof client, "oom-%u", (unsigned)fail_at);
        options.client = client;
        failing_alloc_init(&heap, fail_at);
        ctx = failing_alloc_context(&heap);
        status = msc_record_create(ctx, &options, &record, NULL);
        assert_int_equal(status, heap.failed_count > 0 ? MSC_ENOMEM : MSC_OK);
        assert_true((status == MSC_OK) == (record != NULL));
        msc_record_destroy(record);
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(&heap));
        if (heap.failed_count == 0)
            break;
    }
    assert_true(fail_at > 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        place_test(what_is_put_is_there),
        place_test(an_end_is_in_the_file),
        place_test(many_threads_put),
        place_test(a_child_has_no_recorder),
        place_test(a_kill_leaves_what_was_flushed),
        place_test(a_full_disk_is_survived),
        place_test(a_full_ring_refuses_rows_before_events),
        place_test(wrong_arguments_are_named),
        place_test(any_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
