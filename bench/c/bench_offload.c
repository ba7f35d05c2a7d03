/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The offload engine's file tier beside a plain program: bench_offload [--csv] [--sweep] [MiB] [directory] [rounds]
 *
 *   plain    one loop over one page-aligned buffer of ordinary pages, as dd and fio have: pwrite, or pread, of one
 *            block after the other, past the page cache where the file system allows it, in an unnamed file whose
 *            space is reserved
 *   huge     the same with a buffer of huge pages, where the system has some: what the disk gives at best
 *   dd       the same done by dd, `oflag=direct conv=notrunc` and `iflag=direct`, as a process of its own, its start
 *            included; left out where there is none
 *   engine   blocks of memory of any alignment that leave and come back: `put` and `settle` of all of them, then
 *            `get`, `arrive` of all, eight on their way at a time
 *
 * All move MiB (512) in the same directory (/tmp), with blocks as large as the engine's chunks (2 MiB), of which the
 * engine's memory blocks have eight each; "odd" ones end with a part of a page. The contenders take turns, in each
 * round (9) in another order; one round before is not counted, it writes where nothing has been. A row is the median
 * and half the distance between the quartiles, in percent of it, and the best round. What the engine reads is compared in that round.
 *
 * --sweep: chunks of 64 KiB to 8 MiB with 2, 4 and 8 buffers instead of the default alone; blocks have 4 MiB at least,
 * and the plain loop is measured with the default's only.
 *
 * With --csv one row per contender and direction: bench, case, kind, then block bytes, buffers, MiB per second,
 * spread in percent, percent of plain, best MiB per second, percent of plain's best.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* O_DIRECT, O_TMPFILE, madvise */
#endif
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench_measure.h"
#include "memscale/offload.h"

#define ROUNDS_MOST 99u
#define CONTENDERS_MOST 32u
#define CHUNKS_OF_BLOCK 8u
#define BLOCK_LEAST (4 * MIB) /* in a sweep: what leaves is much larger than the smallest chunks */
#define AHEAD 8u
#define BLOCKS_MOST 4096u
#define MIB (UINT64_C(1) << 20)
#define ODD_BYTES 1000u

enum { WRITES, READS };

typedef enum kind { PLAIN, HUGE, DD, ENGINE, ENGINE_ODD } kind;

static const char *const kinds[] = {"plain", "huge", "dd", "engine", "engine odd"};

typedef struct contender {
    kind kind;
    uint64_t chunk;
    uint32_t staging;
    msc_context *ctx;
    msc_offload *engine;
    msc_ticket tickets[BLOCKS_MOST];
    double mib_per_second[2][ROUNDS_MOST];
} contender;

static const char *directory = "/tmp";
static uint64_t total_bytes = 512 * MIB;
static uint32_t rounds = 9;
static int csv;
static int direct; /* the file system can */
static msc_device *device;
static unsigned char *source;      /* AHEAD blocks, so that they come from memory and not from a cache */
static unsigned char *destination; /* AHEAD */
static uint64_t room;              /* for one block */
static int plain_fd;
static unsigned char *buffers[2]; /* PLAIN, HUGE */
static char dd_path[64];

/* ---- plain ------------------------------------------------------------------------------------------ */

static void open_plain(void)
{
    int i;

    plain_fd = open(directory, O_TMPFILE | O_RDWR | O_DIRECT, 0600);
    direct = plain_fd >= 0;
    if (!direct)
        plain_fd = open(directory, O_TMPFILE | O_RDWR, 0600);
    require(plain_fd >= 0 && posix_fallocate(plain_fd, 0, (off_t)total_bytes) == 0, "no file");
    for (i = PLAIN; i <= HUGE; i++) {
        require(posix_memalign((void **)&buffers[i], 2 * MIB, 8 * MIB) == 0, "no memory");
        (void)madvise(buffers[i], 8 * MIB, i == HUGE ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
        memset(buffers[i], 0x5a, 8 * MIB);
    }
}

static double move_plain(const contender *c, int what)
{
    double start = seconds();
    uint64_t at;

    for (at = 0; at < total_bytes; at += c->chunk) {
        ssize_t moved = what == WRITES ? pwrite(plain_fd, buffers[c->kind], c->chunk, (off_t)at)
                                       : pread(plain_fd, buffers[c->kind], c->chunk, (off_t)at);
        require(moved == (ssize_t)c->chunk, "the disk failed");
    }
    return (double)(total_bytes / MIB) / (seconds() - start);
}

/* ---- dd --------------------------------------------------------------------------------------------- */

/* Its file has no name either: dd reaches it through this process. */
static int open_dd(void)
{
    int fd = open(directory, O_TMPFILE | O_RDWR, 0600);

    require(fd >= 0 && posix_fallocate(fd, 0, (off_t)total_bytes) == 0, "no file");
    (void)snprintf(dd_path, sizeof dd_path, "/proc/%ld/fd/%d", (long)getpid(), fd);
    return system("dd if=/dev/null of=/dev/null 2>/dev/null") == 0;
}

static double move_dd(const contender *c, int what)
{
    char size[32], count[32], path[80];
    double start = seconds();
    int status = 1;
    pid_t child = fork();

    require(child >= 0, "no process");
    if (child == 0) {
        (void)snprintf(size, sizeof size, "bs=%llu", (unsigned long long)c->chunk);
        (void)snprintf(count, sizeof count, "count=%llu", (unsigned long long)(total_bytes / c->chunk));
        (void)snprintf(path, sizeof path, "%s=%s", what == WRITES ? "of" : "if", dd_path);
        if (what == WRITES)
            (void)execlp("dd", "dd", "if=/dev/zero", path, size, count, "conv=notrunc", "status=none",
                         direct ? "oflag=direct" : "oflag=nonblock", (char *)NULL);
        else
            (void)execlp("dd", "dd", "of=/dev/null", path, size, count, "status=none",
                         direct ? "iflag=direct" : "iflag=nonblock", (char *)NULL);
        _exit(1);
    }
    require(waitpid(child, &status, 0) == child && status == 0, "dd failed");
    return (double)(total_bytes / MIB) / (seconds() - start);
}

/* ---- the engine ------------------------------------------------------------------------------------- */

static uint64_t block_room(const contender *c)
{
    return c->chunk * CHUNKS_OF_BLOCK > BLOCK_LEAST ? c->chunk * CHUNKS_OF_BLOCK : BLOCK_LEAST;
}

static uint64_t block_bytes(const contender *c)
{
    return block_room(c) - (c->kind == ENGINE_ODD ? ODD_BYTES : 0);
}

static uint32_t block_count(const contender *c)
{
    return (uint32_t)(total_bytes / block_room(c));
}

static void open_engine(contender *c)
{
    msc_offload_options options = msc_offload_options_default();
    msc_error err;

    options.limit_bytes[MSC_TIER_FILE] = total_bytes + (64u << 20);
    options.directory = directory;
    options.chunk_bytes = c->chunk;
    options.staging_count = c->staging;
    require(msc_context_create(NULL, &c->ctx, NULL) == MSC_OK, "no context");
    if (msc_offload_create(c->ctx, device, &options, &c->engine, &err) != MSC_OK)
        require(0, err.message);
    require(block_count(c) <= BLOCKS_MOST, "too many blocks");
}

static void put_all(contender *c)
{
    uint32_t i;

    for (i = 0; i < block_count(c); i++)
        require(msc_offload_put(c->engine, source + i % AHEAD * room + 64, block_bytes(c), NULL,
                                &c->tickets[i], NULL) == MSC_OK,
                "the engine refused a block");
    for (i = 0; i < block_count(c); i++)
        require(msc_offload_settle(c->engine, c->tickets[i], NULL, NULL) == MSC_OK, "a copy out failed");
}

static void get_all(contender *c, int compare)
{
    uint32_t count = block_count(c);
    uint32_t i;

    for (i = 0; i < count + AHEAD; i++) {
        unsigned char *memory = destination + i % AHEAD * room + 64; /* as aligned as a tensor is */

        if (i >= AHEAD && i - AHEAD < count) {
            require(msc_offload_arrive(c->engine, c->tickets[i - AHEAD], NULL, NULL) == MSC_OK,
                    "a copy back failed");
            require(!compare || memcmp(memory, source + (i - AHEAD) % AHEAD * room + 64, block_bytes(c)) == 0,
                    "a block came back wrong");
        }
        if (i < count)
            require(msc_offload_get(c->engine, c->tickets[i], memory, NULL, NULL) == MSC_OK, "no get");
    }
}

static double move_engine(contender *c, int what, int compare)
{
    double mib = (double)block_bytes(c) * block_count(c) / (double)MIB;
    double start;
    uint32_t i;

    if (what == WRITES) {
        for (i = 0; i < block_count(c); i++)
            msc_offload_drop(c->engine, c->tickets[i]);
        start = seconds();
        put_all(c);
    } else {
        start = seconds();
        get_all(c, compare);
    }
    return mib / (seconds() - start);
}

/* ---- rounds ----------------------------------------------------------------------------------------- */

static contender all[CONTENDERS_MOST];
static uint32_t contender_count;

static void enter(kind which, uint64_t chunk, uint32_t staging)
{
    contender *c = &all[contender_count++];

    c->kind = which;
    c->chunk = chunk;
    c->staging = staging;
    if (which == ENGINE || which == ENGINE_ODD)
        open_engine(c);
}

static double move(contender *c, int what, int compare)
{
    if (c->kind <= HUGE)
        return move_plain(c, what);
    return c->kind == DD ? move_dd(c, what) : move_engine(c, what, compare);
}

static void play(void)
{
    uint32_t round, i;
    int what;

    for (round = 0; round <= rounds; round++) {
        for (what = WRITES; what <= READS; what++) {
            for (i = 0; i < contender_count; i++) {
                contender *c = &all[(round % 2 ? contender_count - 1 - i : i + round) % contender_count];
                double speed = move(c, what, round == 0);

                if (round > 0)
                    c->mib_per_second[what][round - 1] = speed;
            }
        }
    }
}

/* The spread is half of what lies between the quartiles, in percent of the median. */
static double median_of_rounds(double *values, double *spread)
{
    double middle = median(values, rounds);

    *spread = 50 * (values[rounds * 3 / 4] - values[rounds / 4]) / middle;
    return middle;
}

static void tell(void)
{
    static const char *const directions[] = {"write", "read"};
    double plain[2] = {1, 1};
    double plain_best[2] = {1, 1};
    uint32_t i;
    int what;

    for (i = 0; i < contender_count; i++) {
        for (what = WRITES; what <= READS; what++) {
            contender *c = &all[i];
            double spread;
            double speed = median_of_rounds(c->mib_per_second[what], &spread);

            double best = c->mib_per_second[what][rounds - 1];
            const char *format =
                csv ? "offload,%s,%s,%llu,%u,%.0f,%.1f,%.0f,%.0f,%.0f\n"
                    : "%-5s  %-10s %8llu x %u %7.0f MiB/s +- %4.1f %% %4.0f %% of plain; best "
                      "%6.0f, %4.0f %%\n";

            if (c->kind == PLAIN) {
                plain[what] = speed;
                plain_best[what] = best;
            }
            printf(format, directions[what], kinds[c->kind], (unsigned long long)c->chunk, c->staging, speed,
                   spread, 100 * speed / plain[what], best, 100 * best / plain_best[what]);
        }
    }
}

int main(int argc, char **argv)
{
    const uint64_t standard = msc_offload_options_default().chunk_bytes;
    uint64_t chunk = standard;
    uint32_t staging = msc_offload_options_default().staging_count;
    uint64_t last = chunk;
    msc_context *ctx = NULL;
    int sweep = 0;
    int has_dd;

    for (; argc > 1 && strncmp(argv[1], "--", 2) == 0; argc--, argv++) {
        csv = csv || strcmp(argv[1], "--csv") == 0;
        sweep = sweep || strcmp(argv[1], "--sweep") == 0;
    }
    total_bytes = argc > 1 ? strtoull(argv[1], NULL, 10) * MIB : total_bytes;
    directory = argc > 2 ? argv[2] : directory;
    rounds = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : rounds;
    require(total_bytes > 0 && total_bytes % (64 * MIB) == 0, "MiB: a multiple of 64");
    require(rounds > 0 && rounds <= ROUNDS_MOST, "rounds: 1 to 99");
    require(msc_context_create(NULL, &ctx, NULL) == MSC_OK, "no context");
    require(msc_device_create(ctx, NULL, &device, NULL) == MSC_OK, "no device");
    if (sweep) {
        chunk = MIB / 16;
        last = 8 * MIB;
    }
    room = last * CHUNKS_OF_BLOCK + 4096;
    require((source = malloc(AHEAD * room)) != NULL && (destination = malloc(AHEAD * room)) != NULL,
            "no memory");
    for (uint64_t i = 0; i < AHEAD * room; i++)
        source[i] = (unsigned char)(i * 2654435761u >> 13);
    memset(destination, 0, AHEAD * room);
    open_plain();
    has_dd = open_dd();
    enter(PLAIN, standard, 1);
    enter(HUGE, standard, 1);
    if (has_dd)
        enter(DD, standard, 1);
    if (!sweep)
        enter(ENGINE_ODD, standard, staging);
    for (; chunk <= last; chunk *= 2) {
        if (sweep)
            enter(ENGINE, chunk, staging / 2);
        enter(ENGINE, chunk, staging);
        if (sweep)
            enter(ENGINE, chunk, 2 * staging);
    }
    play();
    tell();
    for (uint32_t i = 0; i < contender_count; i++) {
        msc_offload_destroy(all[i].engine);
        msc_context_destroy(all[i].ctx);
    }
    msc_device_destroy(device);
    msc_context_destroy(ctx);
    return 0;
}
