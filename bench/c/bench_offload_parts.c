/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the offload engine stands on: bench_offload_parts [--csv] [MiB] [directory]
 *
 *   ranges   one take and one give among 1,000 ranges of a training step's sizes
 *   slabs    the same with blocks of memory, all slabs mapped before
 *   requests what an engine over host memory asks its allocator for: as it is opened, in a first step of 64 blocks that
 *            leave and come back, and in the 100 steps after it; those of the C library's own are not among them
 *   file     MiB (256) written and read in blocks of 1 and 4 MiB with 4, 8 and 16 in flight, by io_uring and by
 *            threads, past the page cache where the file system of `directory` (/tmp) allows it; and "plain", which
 *            does what `dd oflag=direct` and `dd iflag=direct` do: one block after the other with pwrite and pread
 *
 * The median of five runs counts; the ways of the file take turns in each run, so a disk that slows down slows all.
 * Space is reserved and written once before. Throughput of a disk means nothing by itself: compare with plain.
 *
 * With --csv one row per case, to be appended to a results file: bench, case, kind, then for ranges and slabs
 * operations, million per second and ns each; for requests their number; for file the block's bytes, depth, MiB per second, percent of plain.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* O_DIRECT, O_TMPFILE */
#endif
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench_measure.h"
#include "memscale/offload.h"
#include "offload/file/offload_file.h"
#include "offload/offload_ranges.h"
#include "offload/offload_slabs.h"

#define RUNS 5
#define RANGES 1000u
#define ROUNDS 2000u
#define DEPTH_MOST 16u
#define STEP_BLOCKS 64u
#define STEPS 100u
#define MIB (UINT64_C(1) << 20)

static int csv;

static void row(const char *name, const char *kind, double operations, double *taken)
{
    double each = median(taken, RUNS) / operations;

    if (csv)
        printf("offload_parts,%s,%s,%.0f,%.2f,%.1f\n", name, kind, operations, 1e-6 / each, 1e9 * each);
    else
        printf("%-8s %-24s %8.2f M/s %8.1f ns\n", name, kind, 1e-6 / each, 1e9 * each);
}

/* ---- ranges and slabs -------------------------------------------------------------------------------- */

static uint64_t random_state;

static uint64_t random_size(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return 512 + (random_state >> 8) % (UINT64_C(1) << (10 + random_state % 14)); /* up to 8 MiB */
}

/* Each round gives a random range back and takes one of another size. */
static double ranges_in_turn(msc__ranges *ranges, uint32_t *out)
{
    double start = seconds();
    uint64_t at;
    uint32_t i;

    for (i = 0; i < ROUNDS * 100; i++) {
        uint32_t *one = &out[random_state % RANGES];
        msc__ranges_give(ranges, *one);
        require(msc__ranges_take(ranges, random_size(), &at, one, NULL) == MSC_OK, "no range");
    }
    return seconds() - start;
}

static double slabs_in_turn(msc__slabs *slabs, msc__slab_block *out)
{
    double start = seconds();
    uint32_t i;

    for (i = 0; i < ROUNDS * 100; i++) {
        msc__slab_block *one = &out[random_state % RANGES];
        msc__slabs_give(slabs, *one);
        require(msc__slabs_take(slabs, random_size(), one, NULL) == MSC_OK, "no block");
    }
    return seconds() - start;
}

static void bench_ranges(msc_context *ctx)
{
    static uint32_t ranges_out[RANGES];
    static msc__slab_block blocks_out[RANGES];
    double in_ranges[RUNS], in_slabs[RUNS];
    msc__ranges *ranges;
    msc__slabs *slabs;
    uint64_t at;
    uint32_t i;

    random_state = 88172645463325252u;
    require(msc__ranges_create(ctx, UINT64_C(64) << 30, 512, &ranges, NULL) == MSC_OK, "no ranges");
    require(msc__slabs_create(ctx, NULL, UINT64_C(64) << 30, &slabs, NULL) == MSC_OK, "no slabs");
    for (i = 0; i < RANGES; i++) {
        require(msc__ranges_take(ranges, random_size(), &at, &ranges_out[i], NULL) == MSC_OK, "no range");
        require(msc__slabs_take(slabs, random_size(), &blocks_out[i], NULL) == MSC_OK, "no block");
    }
    (void)slabs_in_turn(slabs, blocks_out); /* maps what it needs */
    for (i = 0; i < RUNS; i++) {
        in_ranges[i] = ranges_in_turn(ranges, ranges_out);
        in_slabs[i] = slabs_in_turn(slabs, blocks_out);
    }
    row("ranges", "give and take", ROUNDS * 100, in_ranges);
    row("slabs", "give and take", ROUNDS * 100, in_slabs);
    msc__ranges_destroy(ranges);
    msc__slabs_destroy(slabs);
}

/* ---- file -------------------------------------------------------------------------------------------- */

typedef struct disk {
    msc__file *ways[2]; /* io_uring, or NULL; threads */
    int plain;          /* descriptor of a file like theirs */
    uint64_t bytes;
    unsigned char *memory; /* DEPTH_MOST blocks of 4 MiB */
} disk;

static double move_plain(const disk *d, int writes, uint64_t block)
{
    double start = seconds();
    uint64_t at;

    for (at = 0; at < d->bytes; at += block) {
        ssize_t moved = writes ? pwrite(d->plain, d->memory, block, (off_t)at)
                               : pread(d->plain, d->memory, block, (off_t)at);
        require(moved == (ssize_t)block, "the disk failed");
    }
    return seconds() - start;
}

static double move(const disk *d, msc__file *file, int writes, uint64_t block, uint32_t depth)
{
    double start = seconds();
    uint32_t slots[DEPTH_MOST];
    uint64_t count = d->bytes / block;
    uint64_t i;

    for (i = 0; i < count + depth; i++) {
        uint32_t lane = (uint32_t)(i % depth);
        unsigned char *memory = d->memory + lane * block;
        if (i >= depth)
            require(msc__file_wait(file, slots[lane], NULL) == MSC_OK, "the disk failed");
        if (i < count)
            require((writes ? msc__file_write(file, memory, block, i * block, &slots[lane], NULL)
                            : msc__file_read(file, memory, block, i * block, &slots[lane], NULL)) == MSC_OK,
                    "no operation");
    }
    return seconds() - start;
}

static void bench_moves(const disk *d, int writes, uint64_t block, uint32_t depth)
{
    static const char *const names[2][2] = {{"ring read", "threads read"}, {"ring write", "threads write"}};
    double plain[RUNS];
    double taken[2][RUNS];
    uint32_t way;
    int i;

    for (i = 0; i < RUNS; i++) {
        plain[i] = move_plain(d, writes, block);
        for (way = 0; way < 2; way++)
            if (d->ways[way] != NULL)
                taken[way][i] = move(d, d->ways[way], writes, block, depth);
    }
    for (way = 0; way < 2; way++) {
        double speed, share;
        if (d->ways[way] == NULL)
            continue;
        share = 100 * median(plain, RUNS) / median(taken[way], RUNS);
        speed = (double)(d->bytes / MIB) / median(taken[way], RUNS);
        if (csv)
            printf("offload_parts,file,%s,%llu,%u,%.0f,%.0f\n", names[writes][way], (unsigned long long)block,
                   depth, speed, share);
        else
            printf("file     %-14s %llu MiB x %-2u %9.0f MiB/s %6.0f %% of plain\n", names[writes][way],
                   (unsigned long long)(block / MIB), depth, speed, share);
        (void)fflush(stdout);
    }
}

/* A file like the tier's, opened by hand: direct if that one is. */
static int open_plain(const char *directory, int direct, uint64_t bytes)
{
    int fd = open(directory, O_TMPFILE | O_RDWR | (direct ? O_DIRECT : 0), 0600);

    require(fd >= 0 && posix_fallocate(fd, 0, (off_t)bytes) == 0, "no file");
    return fd;
}

static void bench_file(msc_context *ctx, const char *directory, uint64_t bytes)
{
    static const uint32_t depths[] = {4, 8, 16};
    disk d = {.bytes = bytes};
    uint64_t block;
    size_t i;

    for (i = 0; i < 2; i++) {
        msc__file_options options = {
            .directory = directory, .depth = DEPTH_MOST, .way = i == 0 ? MSC__FILE_RING : MSC__FILE_THREADS};
        msc_status status = msc__file_create(ctx, &options, &d.ways[i], NULL);
        require(status == MSC_OK || (status == MSC_EUNSUPPORTED && i == 0), "no file");
        require(d.ways[i] == NULL || msc__file_reserve(d.ways[i], bytes, NULL) == MSC_OK, "no space");
    }
    d.plain = open_plain(directory, msc__file_facts_of(d.ways[1]).direct, bytes);
    require(posix_memalign((void **)&d.memory, 4096, DEPTH_MOST * 4 * MIB) == 0, "no memory");
    memset(d.memory, 0x5a, DEPTH_MOST * 4 * MIB);
    (void)move_plain(&d, 1, MIB); /* space that was never written is not read from the disk */
    for (i = 0; i < 2; i++)
        if (d.ways[i] != NULL)
            (void)move(&d, d.ways[i], 1, MIB, 4);
    for (block = MIB; block <= 4 * MIB; block *= 4)
        for (i = 0; i < sizeof depths / sizeof depths[0]; i++) {
            bench_moves(&d, 1, block, depths[i]);
            bench_moves(&d, 0, block, depths[i]);
        }
    msc__file_destroy(d.ways[0]);
    msc__file_destroy(d.ways[1]);
    (void)close(d.plain);
    free(d.memory);
}

/* ---- requests for memory ---------------------------------------------------------------------------- */

static uint64_t request_count;

static void *counted_resize(void *user, void *old, size_t old_bytes, size_t new_bytes)
{
    (void)user;
    (void)old_bytes;
    request_count += new_bytes > 0;
    if (new_bytes > 0)
        return realloc(old, new_bytes);
    free(old);
    return NULL;
}

/* All blocks leave, and come back in the opposite order, as saved tensors do. */
static void run_step(msc_offload *engine, char (*blocks)[4096])
{
    msc_ticket tickets[STEP_BLOCKS];
    uint32_t i;

    msc_offload_step(engine);
    for (i = 0; i < STEP_BLOCKS; i++)
        require(msc_offload_put(engine, blocks[i], sizeof blocks[i], NULL, &tickets[i], NULL) == MSC_OK,
                "no put");
    for (i = 0; i < STEP_BLOCKS; i++)
        require(msc_offload_settle(engine, tickets[i], NULL, NULL) == MSC_OK, "no settle");
    for (i = STEP_BLOCKS; i-- > 0;) {
        require(msc_offload_get(engine, tickets[i], blocks[i], NULL, NULL) == MSC_OK, "no get");
        require(msc_offload_arrive(engine, tickets[i], NULL, NULL) == MSC_OK, "no arrival");
        msc_offload_drop(engine, tickets[i]);
    }
}

static void tell_requests(const char *kind)
{
    printf(csv ? "offload_parts,requests,%s,%llu\n" : "requests %-24s %8llu\n", kind,
           (unsigned long long)request_count);
    request_count = 0;
}

static void bench_requests(void)
{
    static char blocks[STEP_BLOCKS][4096];
    msc_context_options counted = msc_context_options_default();
    msc_offload_options options = msc_offload_options_default();
    msc_context *ctx = NULL;
    msc_device *device = NULL;
    msc_offload *engine = NULL;
    uint32_t i;

    counted.allocator.resize = counted_resize;
    options.limit_bytes[MSC_TIER_HOST] = MIB;
    require(msc_context_create(&counted, &ctx, NULL) == MSC_OK, "no context");
    require(msc_device_create(ctx, NULL, &device, NULL) == MSC_OK, "no device");
    require(msc_offload_create(ctx, device, &options, &engine, NULL) == MSC_OK, "no engine");
    tell_requests("opened");
    run_step(engine, blocks);
    tell_requests("first step");
    for (i = 0; i < STEPS; i++)
        run_step(engine, blocks);
    tell_requests("100 steps after it");
    msc_offload_destroy(engine);
    msc_device_destroy(device);
    msc_context_destroy(ctx);
}

int main(int argc, char **argv)
{
    msc_context *ctx = NULL;
    uint64_t mib = 256;
    const char *directory = "/tmp";

    if (argc > 1 && strcmp(argv[1], "--csv") == 0) {
        csv = 1;
        argc--;
        argv++;
    }
    if (argc > 1)
        mib = strtoull(argv[1], NULL, 10);
    if (argc > 2)
        directory = argv[2];
    require(mib >= 64 && mib % 64 == 0, "MiB: a multiple of 64");
    require(msc_context_create(NULL, &ctx, NULL) == MSC_OK, "no context");
    bench_ranges(ctx);
    bench_requests();
    bench_file(ctx, directory, mib * MIB);
    msc_context_destroy(ctx);
    return 0;
}
