/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Throughput of the allocator simulator: bench_sim [--csv]
 *
 * Two streams, each replayed by kind HOST, CUDA and CUDA with expandable segments:
 *
 *   transformer  48 layers; parameters stay, forward saves about half of what it allocates, backward frees
 *                the saved in reverse and keeps gradients to the end of the step. A program's own pattern.
 *   random       65,536 ids, log-uniform sizes from 1 byte to 64 MiB, each event frees or allocates one
 *                at random. Free sets are large and nothing repeats: the worst that a user can do.
 *
 * An event is one alloc or one free. Each case runs five times after a warm-up, in a simulator that keeps
 * its tables; the median counts. "bytes/live" is host memory at its peak over the peak of live blocks.
 *
 * With --csv one row per case, to be appended to a results file: bench, stream, kind, events, peak of live
 * blocks, million events per second, ns per event, bytes per live block.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_measure.h"
#include "memscale/sim.h"

#define RUNS 5
#define LAYERS 48u
#define STEPS 400u
#define RANDOM_IDS 65536u
#define RANDOM_EVENTS 2000000u

typedef struct event {
    uint64_t size_bytes; /* 0: free */
    uint32_t id;
    uint32_t stream;
} event;

typedef struct stream {
    event *events;
    size_t count;
    size_t capacity;
    uint32_t next_id;
    uint32_t live; /* now */
    uint32_t live_peak;
    uint32_t *spare_ids; /* ids freed, to keep the table dense */
    size_t spare_count;
} stream;

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void push(stream *s, uint64_t size_bytes, uint32_t id)
{
    if (s->count == s->capacity) {
        s->capacity = s->capacity == 0 ? 4096 : 2 * s->capacity;
        s->events = realloc(s->events, s->capacity * sizeof *s->events);
        s->spare_ids = realloc(s->spare_ids, s->capacity * sizeof *s->spare_ids);
        if (s->events == NULL || s->spare_ids == NULL)
            exit(1);
    }
    s->events[s->count++] = (event){size_bytes, id, 0};
    s->live = size_bytes == 0 ? s->live - 1 : s->live + 1;
    if (s->live > s->live_peak)
        s->live_peak = s->live;
}

static uint32_t take(stream *s, uint64_t size_bytes)
{
    uint32_t id = s->spare_count > 0 ? s->spare_ids[--s->spare_count] : s->next_id++;

    push(s, size_bytes, id);
    return id;
}

static void drop(stream *s, uint32_t id)
{
    push(s, 0, id);
    s->spare_ids[s->spare_count++] = id;
}

/* Sizes of a layer with batch 8, sequence 512, hidden 1024, bf16, in units of a hidden-size activation. */
static const uint32_t saved_halves[] = {2, 6, 2, 1, 2, 2, 8, 8, 2, 1};
static const uint32_t temporary_halves[] = {2, 2, 16, 2, 8, 2};
#define SAVED (sizeof saved_halves / sizeof saved_halves[0])
#define TEMPORARY (sizeof temporary_halves / sizeof temporary_halves[0])
#define HALF_BYTES (8u * 512u * 1024u)
#define PARAMETERS 12u

static uint64_t parameter_bytes(uint32_t i)
{
    return i % 3 == 0 ? 4u * 1024u * 1024u * 2u : 1024u * 2u;
}

static void layer_temporaries(stream *s)
{
    uint32_t i;

    for (i = 0; i < TEMPORARY; i++) {
        uint32_t a = take(s, (uint64_t)temporary_halves[i] * HALF_BYTES);
        uint32_t b = take(s, 512u * (i + 1)); /* statistics, seeds, masks */
        drop(s, a);
        drop(s, b);
    }
}

static void transformer_step(stream *s)
{
    static uint32_t saved[LAYERS][SAVED];
    static uint32_t gradients[LAYERS][PARAMETERS];
    uint32_t layer, i;

    for (layer = 0; layer < LAYERS; layer++) {
        layer_temporaries(s);
        for (i = 0; i < SAVED; i++)
            saved[layer][i] = take(s, (uint64_t)saved_halves[i] * HALF_BYTES);
    }
    for (layer = LAYERS; layer-- > 0;) {
        layer_temporaries(s);
        for (i = 0; i < PARAMETERS; i++)
            gradients[layer][i] = take(s, parameter_bytes(i));
        for (i = SAVED; i-- > 0;)
            drop(s, saved[layer][i]);
    }
    for (layer = 0; layer < LAYERS; layer++)
        for (i = 0; i < PARAMETERS; i++)
            drop(s, gradients[layer][i]);
}

static void make_transformer(stream *s)
{
    uint32_t i;

    for (i = 0; i < LAYERS * PARAMETERS; i++)
        (void)take(s, parameter_bytes(i));
    for (i = 0; i < STEPS; i++)
        transformer_step(s);
}

static void make_random(stream *s)
{
    static uint8_t live[RANDOM_IDS];
    uint32_t i;

    for (i = 0; i < RANDOM_EVENTS; i++) {
        uint32_t id = (uint32_t)(next_random() % RANDOM_IDS);
        uint64_t bound = UINT64_C(1) << (1 + next_random() % 26);
        push(s, live[id] ? 0 : 1 + next_random() % bound, id);
        live[id] = !live[id];
    }
}

static double replay(msc_sim *sim, const stream *s)
{
    double start;
    size_t i;

    msc_sim_reset(sim);
    start = seconds();
    for (i = 0; i < s->count; i++) {
        const event *e = &s->events[i];
        msc_status status = e->size_bytes == 0 ? msc_sim_free(sim, e->id, NULL)
                                               : msc_sim_alloc(sim, e->id, e->size_bytes, e->stream, NULL);
        if (status != MSC_OK)
            exit(1);
    }
    return seconds() - start;
}

static void run_case(const char *name, const stream *s, msc_sim_kind kind, int expandable, int csv)
{
    static const char *const kinds[] = {"host", "cuda", "cuda-expandable"};
    const char *kind_name = kinds[(kind == MSC_SIM_CUDA ? 1 : 0) + expandable];
    msc_sim_options options = msc_sim_options_default(kind);
    msc_context *ctx = NULL;
    msc_sim *sim = NULL;
    double taken[RUNS];
    double each, bytes_per_live;
    int i;

    options.expandable_segments = (uint8_t)expandable;
    if (msc_context_create(NULL, &ctx, NULL) != MSC_OK || msc_sim_create(ctx, &options, &sim, NULL) != MSC_OK)
        exit(1);
    (void)replay(sim, s);
    for (i = 0; i < RUNS; i++)
        taken[i] = replay(sim, s);
    each = median(taken, RUNS) / (double)s->count;
    bytes_per_live = (double)msc_context_peak_bytes(ctx) / s->live_peak;
    if (csv)
        printf("sim,%s,%s,%zu,%u,%.2f,%.2f,%.1f\n", name, kind_name, s->count, s->live_peak, 1e-6 / each,
               1e9 * each, bytes_per_live);
    else
        printf("%-12s %-16s %9zu events %7u live %8.2f M events/s %7.2f ns/event %7.1f bytes/live\n", name,
               kind_name, s->count, s->live_peak, 1e-6 / each, 1e9 * each, bytes_per_live);
    msc_sim_destroy(sim);
    msc_context_destroy(ctx);
}

int main(int argc, char **argv)
{
    int csv = argc > 1 && strcmp(argv[1], "--csv") == 0;
    stream streams[2] = {{0}};
    static const char *const names[] = {"transformer", "random"};
    size_t i;

    make_transformer(&streams[0]);
    make_random(&streams[1]);
    for (i = 0; i < 2; i++) {
        run_case(names[i], &streams[i], MSC_SIM_HOST, 0, csv);
        run_case(names[i], &streams[i], MSC_SIM_CUDA, 0, csv);
        run_case(names[i], &streams[i], MSC_SIM_CUDA, 1, csv);
        free(streams[i].events);
        free(streams[i].spare_ids);
    }
    return 0;
}
