/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file, once with io_uring and once with threads: what is written is read back whatever the system does in
 * between, what fails is told, and nothing remains. Where there is no io_uring its half is skipped.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mincore */
#endif
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "offload/file/offload_file_internal.h"
#include "oom/failing_alloc.h"

#define PAGE MSC__FILE_PAGE
#define CHUNKS 16u
#define CHUNK_MOST (64u << 10)

static msc__file_way way; /* of the group that runs */

/* ---- between the file and the system --------------------------------------------------------------- */

/* What goes wrong. Counters are atomic because threads ask. */
typedef struct trouble {
    msc__file_wish wish; /* which requests the number is for */
    int number;          /* answered to request `nth` of that wish, or to each one */
    uint32_t nth;        /* counted from 1; 0: each */
    uint32_t divide;     /* not 0: only so much of the bytes, and an odd number */
    uint32_t interrupt;  /* every so many transfers are interrupted; 0: none */
    long sleep_ns;       /* before each transfer */
    atomic_uint asked;   /* requests of `wish` */
    atomic_uint transfers;
} trouble;

static int64_t censor(void *user, msc__file_wish wish, uint64_t bytes, uint64_t offset)
{
    trouble *t = user;

    (void)offset;
    if (wish == t->wish && t->number != 0) {
        uint32_t asked = atomic_fetch_add(&t->asked, 1) + 1;
        if (t->nth == 0 || t->nth == asked)
            return -t->number;
    }
    if (wish != MSC__FILE_WISH_READ && wish != MSC__FILE_WISH_WRITE)
        return (int64_t)bytes;
    if (t->sleep_ns > 0)
        (void)nanosleep(&(struct timespec){.tv_sec = 0, .tv_nsec = t->sleep_ns}, NULL);
    if (t->interrupt != 0 && atomic_fetch_add(&t->transfers, 1) % t->interrupt == 0)
        return -EINTR;
    return t->divide != 0 && bytes > t->divide ? (int64_t)(bytes / t->divide | 1) : (int64_t)bytes;
}

/* ---- helpers --------------------------------------------------------------------------------------- */

typedef struct fixture {
    msc_context *ctx;
    char directory[64];
    unsigned char *memory; /* CHUNKS chunks, aligned to a page */
    unsigned char *back;
    trouble trouble;
    msc__file_censor censor;
    int files_open;
} fixture;

static int count_entries(const char *path)
{
    DIR *directory = opendir(path);
    int count = 0;

    assert_non_null(directory);
    while (readdir(directory) != NULL)
        count++;
    (void)closedir(directory);
    return count;
}

static int setup(void **state)
{
    static fixture f;
    uint32_t i;

    memset(&f, 0, sizeof f);
    f.censor = (msc__file_censor){.user = &f.trouble, .ask = censor};
    f.files_open = count_entries("/proc/self/fd");
    (void)snprintf(f.directory, sizeof f.directory, "/tmp/memscale-test-XXXXXX");
    assert_non_null(mkdtemp(f.directory));
    assert_int_equal(msc_context_create(NULL, &f.ctx, NULL), MSC_OK);
    assert_int_equal(posix_memalign((void **)&f.memory, PAGE, CHUNKS * CHUNK_MOST), 0);
    assert_int_equal(posix_memalign((void **)&f.back, PAGE, CHUNKS * CHUNK_MOST), 0);
    for (i = 0; i < CHUNKS * CHUNK_MOST; i++)
        f.memory[i] = (unsigned char)(i * 2654435761u >> 13);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;

    assert_int_equal(rmdir(f->directory), 0); /* nothing remained in it */
    assert_int_equal(count_entries("/proc/self/fd"), f->files_open);
    assert_int_equal(msc_context_held_bytes(f->ctx), 0);
    msc_context_destroy(f->ctx);
    free(f->memory);
    free(f->back);
    return 0;
}

static msc__file *make(fixture *f, uint32_t depth, bool buffered)
{
    msc__file_options options = {.directory = f->directory, .depth = depth, .way = way, .buffered = buffered};
    msc__file *file = NULL;
    msc_status status = msc__file_create_censored(f->ctx, &options, &f->censor, &file, NULL);

    if (status == MSC_EUNSUPPORTED && way == MSC__FILE_RING)
        skip();
    assert_int_equal(status, MSC_OK);
    assert_int_equal(msc__file_facts_of(file).ring, way == MSC__FILE_RING);
    assert_int_equal(msc__file_reserve(file, CHUNKS * CHUNK_MOST, NULL), MSC_OK);
    return file;
}

static uint32_t begin(msc__file *file, bool writes, void *memory, uint64_t bytes, uint64_t offset)
{
    uint32_t slot = MSC_NONE;

    if (writes)
        assert_int_equal(msc__file_write(file, memory, bytes, offset, &slot, NULL), MSC_OK);
    else
        assert_int_equal(msc__file_read(file, memory, bytes, offset, &slot, NULL), MSC_OK);
    return slot;
}

static void finish(msc__file *file, uint32_t slot)
{
    msc_error err = {.message = "no message"};

    if (msc__file_wait(file, slot, &err) != MSC_OK)
        fail_msg("%s", err.message);
}

/* Size of chunk i: whole pages, sectors, and any number; `shift` moves its memory off every alignment. */
static uint64_t size_of(uint32_t i)
{
    static const uint64_t sizes[] = {CHUNK_MOST, PAGE, 512, 1, PAGE + 512, CHUNK_MOST - 1, 3 * PAGE, 511};

    return sizes[i % 8];
}

/* Moves all chunks in one direction, `depth` at a time. */
static void move_all(msc__file *file, bool writes, unsigned char *memory, uint32_t shift)
{
    uint32_t depth = file->depth;
    uint32_t slots[CHUNKS];
    uint32_t i;

    for (i = 0; i < CHUNKS + depth; i++) {
        if (i >= depth && i - depth < CHUNKS)
            finish(file, slots[i - depth]);
        if (i < CHUNKS) {
            uint64_t at = (uint64_t)i * CHUNK_MOST;
            uint64_t skipped = i % 3 == 2 && size_of(i) > shift ? shift : 0;
            slots[i] = begin(file, writes, memory + at + skipped, size_of(i) - skipped, at);
        }
    }
}

static void round_trip(fixture *f, msc__file *file, uint32_t shift)
{
    uint32_t i;

    memset(f->back, 0, CHUNKS * CHUNK_MOST);
    move_all(file, true, f->memory, shift);
    move_all(file, false, f->back, shift);
    for (i = 0; i < CHUNKS; i++) {
        uint64_t at = (uint64_t)i * CHUNK_MOST;
        uint64_t skipped = i % 3 == 2 && size_of(i) > shift ? shift : 0;
        assert_memory_equal(f->memory + at + skipped, f->back + at + skipped, size_of(i) - skipped);
    }
}

/* ---- what is written is read back ------------------------------------------------------------------ */

static void chunks_come_back(void **state)
{
    fixture *f = *state;
    uint32_t depth;

    for (depth = 1; depth <= 16; depth *= 4) {
        msc__file *file = make(f, depth, depth == 4);
        assert_false(depth == 4 && msc__file_facts_of(file).direct);
        round_trip(f, file, 0);
        round_trip(f, file, 7);
        round_trip(f, file, 512);
        msc__file_destroy(file);
    }
}

static void short_and_interrupted(void **state)
{
    fixture *f = *state;
    msc__file *file = make(f, 4, false);

    f->trouble.divide = 3;
    f->trouble.interrupt = 5;
    round_trip(f, file, 7);
    f->trouble.divide = 60000;
    round_trip(f, file, 0);
    assert_true(f->trouble.transfers > 2 * CHUNKS);
    msc__file_destroy(file);
}

static bool is_cached(const msc__file *file)
{
    unsigned char pages[CHUNK_MOST / PAGE];
    void *at = mmap(NULL, CHUNK_MOST, PROT_READ, MAP_SHARED, file->body->fd, 0);
    bool cached = false;
    size_t i;

    assert_ptr_not_equal(at, MAP_FAILED);
    assert_int_equal(mincore(at, CHUNK_MOST, pages), 0);
    for (i = 0; i < sizeof pages; i++)
        cached = cached || (pages[i] & 1) != 0;
    (void)munmap(at, CHUNK_MOST);
    return cached;
}

/* Memory, size and place in the file must each be aligned, or an operation goes through the cache. */
static void direct_passes_the_cache_by(void **state)
{
    static const uint32_t off[][3] = {{512, 0, 0}, {0, 0, 512}, {1, 0, 0}, {0, 1, 0}, {0, 0, 1}};
    fixture *f = *state;
    uint32_t i;

    for (i = 0; i < sizeof off / sizeof off[0]; i++) {
        msc__file *file = make(f, 2, false);
        if (msc__file_facts_of(file).direct) {
            uint32_t alignment = msc__file_facts_of(file).alignment;
            assert_in_range(alignment, 512, 4096);
            finish(file, begin(file, true, f->memory, CHUNK_MOST, 0));
            finish(file, begin(file, false, f->back, CHUNK_MOST, 0));
            assert_false(is_cached(file));
            finish(file, begin(file, false, f->back + off[i][0], PAGE - off[i][1], off[i][2]));
            assert_int_equal(is_cached(file), i != 0 || alignment > 512);
        }
        msc__file_destroy(file);
    }
}

static void direct_that_is_refused(void **state)
{
    fixture *f = *state;
    msc__file *file;

    f->trouble.wish = MSC__FILE_WISH_DIRECT;
    f->trouble.number = EINVAL;
    file = make(f, 2, false);
    assert_false(msc__file_facts_of(file).direct);
    assert_int_equal(msc__file_facts_of(file).alignment, 1);
    round_trip(f, file, 0);
    msc__file_destroy(file);
    f->trouble.nth = 1; /* the disk has larger sectors */
    f->trouble.asked = 0;
    file = make(f, 2, false);
    assert_true(!msc__file_facts_of(file).direct || msc__file_facts_of(file).alignment == 4096);
    round_trip(f, file, 512);
    msc__file_destroy(file);
}

/* ---- slots ----------------------------------------------------------------------------------------- */

static void slots_run_out(void **state)
{
    fixture *f = *state;
    msc__file *file = make(f, 3, false);
    uint32_t slots[3];
    uint32_t fourth = 99;
    msc_error err = {.status = MSC_OK};
    uint32_t i;

    for (i = 0; i < 3; i++)
        slots[i] = begin(file, true, f->memory, PAGE, i * PAGE);
    assert_int_equal(slots[0] + slots[1] + slots[2], 0 + 1 + 2);
    assert_int_equal(msc__file_read(file, f->back, PAGE, 0, &fourth, &err), MSC_EAGAIN);
    assert_int_equal(err.status, MSC_OK);
    assert_int_equal(fourth, 99);
    while (!msc__file_done(file, slots[1]))
        (void)nanosleep(&(struct timespec){.tv_sec = 0, .tv_nsec = 100000}, NULL);
    assert_int_equal(msc__file_read(file, f->back, PAGE, 0, &fourth, &err), MSC_EAGAIN);
    finish(file, slots[1]);
    assert_int_equal(begin(file, false, f->back, PAGE, 3 * PAGE), slots[1]);
    for (i = 0; i < 3; i++)
        finish(file, slots[i]);
    assert_int_equal(msc__file_wait(file, 0, &err), MSC_EINVAL);
    assert_int_equal(msc__file_wait(file, 3, &err), MSC_EINVAL);
    msc__file_destroy(file);
}

static void only_what_is_reserved(void **state)
{
    const uint64_t all = CHUNKS * CHUNK_MOST;
    fixture *f = *state;
    msc__file *file = make(f, 2, false);
    uint32_t slot;

    assert_int_equal(msc__file_facts_of(file).reserved_bytes, all);
    assert_int_equal(msc__file_write(file, f->memory, 0, 0, &slot, NULL), MSC_EINVAL);
    assert_int_equal(msc__file_write(file, f->memory, 2, all - 1, &slot, NULL), MSC_EINVAL);
    assert_int_equal(msc__file_write(file, f->memory, UINT64_MAX, PAGE, &slot, NULL), MSC_EINVAL);
    assert_int_equal(msc__file_read(file, f->back, 1, UINT64_MAX, &slot, NULL), MSC_EINVAL);
    finish(file, begin(file, true, f->memory, 1, all - 1));
    msc__file_destroy(file);
}

/* The mover of a file, with its waits counted. */
static const msc__file_mover *real_mover;
static uint32_t wait_count;

static void counted_wait(msc__file *file, uint32_t slot)
{
    wait_count++;
    real_mover->wait(file, slot);
}

static void destroy_waits(void **state)
{
    fixture *f = *state;
    msc__file *file = make(f, 16, false);
    msc__file_mover mover = *file->mover;
    uint32_t slot, i;

    real_mover = file->mover;
    mover.wait = counted_wait;
    file->mover = &mover;
    move_all(file, true, f->memory, 0);
    f->trouble.sleep_ns = way == MSC__FILE_THREADS ? 20000000 : 0; /* io_uring would sleep in `begin` */
    slot = begin(file, false, f->back, CHUNK_MOST, 0);
    assert_true(way != MSC__FILE_THREADS || !msc__file_done(file, slot));
    for (i = 1; i < 16; i++)
        (void)begin(file, false, f->back + i * CHUNK_MOST, CHUNK_MOST, (uint64_t)i * CHUNK_MOST);
    wait_count = 0;
    msc__file_destroy(file);
    assert_int_equal(wait_count, 16);
    memset(f->back, 0, 16 * CHUNK_MOST); /* nobody uses it any more */
    (void)nanosleep(&(struct timespec){.tv_sec = 0, .tv_nsec = 10000000}, NULL);
    for (i = 0; i < 16 * CHUNK_MOST; i++)
        if (f->back[i] != 0)
            fail_msg("byte %u was written after the file was gone", i);
    msc__file_destroy(NULL);
}

/* ---- what fails ------------------------------------------------------------------------------------ */

static void failures_are_told(void **state)
{
    static const int numbers[] = {ENOSPC, EIO, EDQUOT};
    fixture *f = *state;
    msc__file *file = make(f, 8, false);
    uint32_t slots[8];
    uint32_t k, i, failed;

    for (k = 0; k < 6; k++) {
        f->trouble.wish = k % 2 == 0 ? MSC__FILE_WISH_WRITE : MSC__FILE_WISH_READ;
        f->trouble.number = numbers[k / 2];
        f->trouble.nth = 1 + k;
        f->trouble.asked = 0;
        for (i = 0; i < 8; i++)
            slots[i] = begin(file, k % 2 == 0, (k % 2 == 0 ? f->memory : f->back) + i * PAGE, PAGE, i * PAGE);
        for (i = 0, failed = 0; i < 8; i++) {
            msc_error err = {.status = MSC_OK};
            if (msc__file_wait(file, slots[i], &err) == MSC_OK)
                continue;
            failed++;
            assert_int_equal(err.status, MSC_EIO);
            assert_int_equal(err.driver_code, numbers[k / 2]);
            assert_non_null(strstr(err.message, k % 2 == 0 ? "write 4096 bytes" : "read 4096 bytes"));
            assert_non_null(strstr(err.message, f->directory));
        }
        assert_int_equal(failed, 1);
    }
    f->trouble.number = 0;
    round_trip(f, file, 0); /* it goes on */
    msc__file_destroy(file);
}

/* The system itself fails: someone cut the file, so a read finds its end. */
static void the_end_is_an_error(void **state)
{
    fixture *f = *state;
    msc__file *file = make(f, 2, false);
    msc_error err;
    uint32_t slot;

    assert_int_equal(ftruncate(file->body->fd, PAGE), 0);
    slot = begin(file, false, f->back, PAGE, 2 * PAGE);
    assert_int_equal(msc__file_wait(file, slot, &err), MSC_EIO);
    assert_int_equal(err.driver_code, EIO);
    msc__file_destroy(file);
}

static void space_that_is_not_there(void **state)
{
    const uint64_t all = CHUNKS * CHUNK_MOST;
    fixture *f = *state;
    msc__file *file = make(f, 2, false);
    struct rlimit before, low;
    msc_error err;

    f->trouble.wish = MSC__FILE_WISH_SPACE;
    f->trouble.number = ENOSPC;
    f->trouble.nth = 2; /* the first piece was had and must be given back */
    assert_int_equal(msc__file_reserve(file, all + (UINT64_C(300) << 20), &err), MSC_EIO);
    assert_int_equal(err.driver_code, ENOSPC);
    assert_non_null(strstr(err.message, "full"));
    assert_int_equal(msc__file_facts_of(file).reserved_bytes, all);
    assert_int_equal(lseek(file->body->fd, 0, SEEK_END), all);
    f->trouble.number = 0;
    assert_int_equal(msc__file_reserve(file, UINT64_MAX, &err), MSC_EIO);
    assert_int_equal(err.driver_code, EFBIG);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    low = before;
    low.rlim_cur = all + PAGE;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    assert_int_equal(msc__file_reserve(file, all + 2 * PAGE, &err), MSC_EIO); /* and no SIGXFSZ */
    assert_int_equal(err.driver_code, EFBIG);
    assert_int_equal(msc__file_reserve(file, all + PAGE, &err), MSC_OK);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(msc__file_reserve(file, all, &err), MSC_OK); /* less: nothing to do */
    assert_int_equal(msc__file_facts_of(file).reserved_bytes, all + PAGE);
    assert_true(msc__file_facts_of(file).held);
    round_trip(f, file, 0);
    msc__file_destroy(file);
}

static void space_that_cannot_be_held(void **state)
{
    fixture *f = *state;
    msc__file *file;

    f->trouble.wish = MSC__FILE_WISH_SPACE;
    f->trouble.number = EOPNOTSUPP;
    file = make(f, 2, false);
    assert_false(msc__file_facts_of(file).held);
    assert_int_equal(lseek(file->body->fd, 0, SEEK_END), CHUNKS * CHUNK_MOST);
    round_trip(f, file, 0);
    f->trouble.number = EINTR; /* a signal: asked again */
    f->trouble.nth = 1;
    f->trouble.asked = 0;
    assert_int_equal(msc__file_reserve(file, UINT64_C(2) * CHUNKS * CHUNK_MOST, NULL), MSC_OK);
    assert_int_equal(f->trouble.asked, 2);
    msc__file_destroy(file);
}

/* ---- opening --------------------------------------------------------------------------------------- */

static void no_name_remains(void **state)
{
    fixture *f = *state;
    msc__file *file = make(f, 2, false);

    assert_int_equal(count_entries(f->directory), 2); /* . and .. */
    msc__file_destroy(file);
    f->trouble.wish = MSC__FILE_WISH_UNNAMED;
    f->trouble.number = EOPNOTSUPP; /* a file system without O_TMPFILE */
    file = make(f, 2, false);
    assert_int_equal(count_entries(f->directory), 2);
    round_trip(f, file, 0);
    msc__file_destroy(file);
}

static void options_are_checked(void **state)
{
    fixture *f = *state;
    msc__file_options good = {.directory = f->directory, .depth = 2, .way = MSC__FILE_THREADS};
    msc__file_options options;
    msc__file *file = (msc__file *)state;
    msc_error err;

    options = good;
    options.directory = NULL;
    assert_int_equal(msc__file_create(f->ctx, &options, &file, &err), MSC_EINVAL);
    assert_null(file);
    options = good;
    options.depth = 0;
    assert_int_equal(msc__file_create(f->ctx, &options, &file, &err), MSC_EINVAL);
    options.depth = MSC__FILE_DEPTH_MOST + 1;
    assert_int_equal(msc__file_create(f->ctx, &options, &file, &err), MSC_EINVAL);
    options = good;
    options.directory = "/tmp/there/is/no/such/directory";
    assert_int_equal(msc__file_create(f->ctx, &options, &file, &err), MSC_EIO);
    assert_int_equal(err.driver_code, ENOENT);
    assert_non_null(strstr(err.message, options.directory));
    options.directory = "/proc/self/status";
    assert_int_equal(msc__file_create(f->ctx, &options, &file, &err), MSC_EIO);
    assert_int_equal(err.driver_code, ENOTDIR);
    assert_int_equal(msc__file_create(f->ctx, &good, &file, &err), MSC_OK);
    msc__file_destroy(file);
}

static void rings_that_are_refused(void **state)
{
    static const int numbers[] = {EPERM, ENOSYS, ENOMEM};
    fixture *f = *state;
    msc__file_options options = {.directory = f->directory, .depth = 2};
    msc__file *file = NULL;
    msc_error err = {.status = MSC_OK};
    size_t i;

    f->trouble.wish = MSC__FILE_WISH_RING;
    for (i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        f->trouble.number = numbers[i];
        options.way = MSC__FILE_ANY;
        err.status = MSC_OK;
        assert_int_equal(msc__file_create_censored(f->ctx, &options, &f->censor, &file, &err), MSC_OK);
        assert_int_equal(err.status, MSC_OK);
        assert_false(msc__file_facts_of(file).ring);
        assert_int_equal(msc__file_reserve(file, CHUNKS * CHUNK_MOST, NULL), MSC_OK);
        round_trip(f, file, 0);
        msc__file_destroy(file);
        options.way = MSC__FILE_RING;
        assert_int_equal(msc__file_create_censored(f->ctx, &options, &f->censor, &file, &err),
                         MSC_EUNSUPPORTED);
        assert_null(file);
        assert_int_equal(err.status, MSC_EUNSUPPORTED);
    }
}

/* ---- two handles ----------------------------------------------------------------------------------- */

static void *write_on(void *argument)
{
    msc__file *file = argument;
    unsigned char *memory = NULL;
    uint32_t i;

    if (posix_memalign((void **)&memory, PAGE, PAGE) != 0)
        return argument;
    for (i = 0; i < 200; i++) {
        uint32_t slot;
        memset(memory, (int)i, PAGE);
        if (msc__file_write(file, memory, PAGE, CHUNK_MOST, &slot, NULL) != MSC_OK ||
            msc__file_wait(file, slot, NULL) != MSC_OK)
            break;
    }
    free(memory);
    return i == 200 ? NULL : argument;
}

static void handles_share_a_file(void **state)
{
    fixture *f = *state;
    msc__file *first = make(f, 2, false);
    msc__file *second = NULL;
    pthread_t thread;
    void *trouble_there;
    uint32_t i;

    assert_int_equal(msc__file_share(first, &second, NULL), MSC_OK);
    assert_int_equal(msc__file_facts_of(second).reserved_bytes, CHUNKS * CHUNK_MOST);
    finish(first, begin(first, true, f->memory, PAGE, 0));
    assert_int_equal(pthread_create(&thread, NULL, write_on, first), 0);
    for (i = 0; i < 200; i++) {
        memset(f->back, 0, PAGE);
        finish(second, begin(second, false, f->back, PAGE, 0));
        assert_memory_equal(f->back, f->memory, PAGE);
        if (i % 50 == 0) /* while the other writes */
            assert_int_equal(msc__file_reserve(second, (uint64_t)(CHUNKS + i) * CHUNK_MOST, NULL), MSC_OK);
    }
    assert_int_equal(pthread_join(thread, &trouble_there), 0);
    assert_null(trouble_there);
    msc__file_destroy(first);
    finish(second, begin(second, false, f->back, PAGE, CHUNK_MOST));
    assert_int_equal(f->back[0], 199);
    msc__file_destroy(second);
}

static void without_memory(void **state)
{
    fixture *f = *state;
    failing_alloc *heap = malloc(sizeof *heap);
    msc__file_options options = {.directory = f->directory, .depth = 2, .way = way};
    bool complete = false;
    uint64_t n;

    assert_non_null(heap);
    for (n = 0; !complete; n++) {
        msc__file *file = NULL;
        msc__file *second = NULL;
        msc_context *ctx;
        failing_alloc_init(heap, n);
        ctx = failing_alloc_context(heap);
        if (ctx != NULL) {
            msc_error err = {.status = MSC_OK};
            msc_status status = msc__file_create(ctx, &options, &file, &err);
            assert_true((status == MSC_OK) == (file != NULL));
            if (status == MSC_OK)
                status = msc__file_share(file, &second, &err);
            assert_int_equal(err.status, status);
            assert_true((status == MSC_OK) == (second != NULL));
            complete = heap->failed_count == 0;
            if (!complete)
                assert_int_equal(status, MSC_ENOMEM);
        }
        msc__file_destroy(file);
        msc__file_destroy(second);
        msc_context_destroy(ctx);
        assert_true(failing_alloc_is_clean(heap));
    }
    free(heap);
}

/* ---- group ---------------------------------------------------------------------------------------- */

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(chunks_come_back, setup, teardown),
        cmocka_unit_test_setup_teardown(short_and_interrupted, setup, teardown),
        cmocka_unit_test_setup_teardown(direct_passes_the_cache_by, setup, teardown),
        cmocka_unit_test_setup_teardown(direct_that_is_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(slots_run_out, setup, teardown),
        cmocka_unit_test_setup_teardown(only_what_is_reserved, setup, teardown),
        cmocka_unit_test_setup_teardown(destroy_waits, setup, teardown),
        cmocka_unit_test_setup_teardown(failures_are_told, setup, teardown),
        cmocka_unit_test_setup_teardown(the_end_is_an_error, setup, teardown),
        cmocka_unit_test_setup_teardown(space_that_is_not_there, setup, teardown),
        cmocka_unit_test_setup_teardown(space_that_cannot_be_held, setup, teardown),
        cmocka_unit_test_setup_teardown(no_name_remains, setup, teardown),
        cmocka_unit_test_setup_teardown(handles_share_a_file, setup, teardown),
        cmocka_unit_test_setup_teardown(without_memory, setup, teardown),
    };
    const struct CMUnitTest either[] = {
        cmocka_unit_test_setup_teardown(options_are_checked, setup, teardown),
        cmocka_unit_test_setup_teardown(rings_that_are_refused, setup, teardown),
    };
    int failed;

    way = MSC__FILE_THREADS;
    failed = cmocka_run_group_tests_name("threads", tests, NULL, NULL);
    failed += cmocka_run_group_tests_name("either", either, NULL, NULL);
    way = MSC__FILE_RING;
    return failed + cmocka_run_group_tests_name("io_uring", tests, NULL, NULL);
}
