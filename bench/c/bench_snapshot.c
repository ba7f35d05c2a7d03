/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening a memory snapshot: bench_snapshot [--csv] [MEBIBYTES [FILE]]
 *
 * Writes a pickle as Python's own pickler would (protocol 4: memo, frames shared, keys by BINGET), with
 * 40 frames per event and 2,000 distinct stacks, until it has the wanted size (default 256 MiB), to FILE
 * (default bench_snapshot.pickle, removed afterwards). Then loads it five times; the median counts.
 *
 * With --csv one row, to be appended to a results file: bench, MB, events, seconds, MB/s, peak of host
 * memory in MB, host memory of the snapshot in MB.
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_measure.h"
#include "memscale/snapshot.h"

#define RUNS 5
#define FRAMES 3000u
#define STACKS 2000u
#define DEPTH 40u
#define BATCH 1000u

typedef struct writer {
    FILE *file;
    uint64_t bytes;
    uint32_t memo; /* next number */
} writer;

static void put(writer *w, const void *bytes, size_t count)
{
    if (fwrite(bytes, 1, count, w->file) != count)
        exit(1);
    w->bytes += count;
}

static void put_op(writer *w, unsigned op)
{
    uint8_t byte = (uint8_t)op;

    put(w, &byte, 1);
}

static void put_number(writer *w, unsigned op, uint64_t number, size_t bytes)
{
    uint8_t out[10] = {(uint8_t)op};
    size_t i;

    for (i = 0; i < bytes; i++)
        out[1 + i] = (uint8_t)(number >> 8 * i);
    put(w, out, 1 + bytes);
}

static void put_new(writer *w, unsigned op)
{
    put_op(w, op);
    put_op(w, 0x94); /* MEMOIZE */
    w->memo++;
}

static uint32_t put_text(writer *w, const char *text)
{
    put_number(w, 0x8c, strlen(text), 1); /* SHORT_BINUNICODE */
    put(w, text, strlen(text));
    put_op(w, 0x94);
    return w->memo++;
}

static void put_get(writer *w, uint32_t memo)
{
    put_number(w, memo < 256 ? 'h' : 'j', memo, memo < 256 ? 1 : 4);
}

static void put_address(writer *w, uint64_t address)
{
    put_number(w, 0x8a, 6, 1); /* LONG1 */
    put_number(w, (unsigned)(address & 0xff), address >> 8, 5);
}

enum { KEY_ACTION, KEY_ADDR, KEY_SIZE, KEY_STREAM, KEY_TIME, KEY_COMPILE, KEY_USER, KEY_FRAMES, KEYS };
static const char *const keys[KEYS] = {"action",          "addr",          "size",  "stream", "time_us",
                                       "compile_context", "user_metadata", "frames"};
static uint32_t key_memo[KEYS];
static uint32_t frame_memo[FRAMES];

/* {"frames": [every frame], then the keys}: so that the rest can name all of them. */
static void put_preamble(writer *w)
{
    uint32_t names[3];
    uint32_t i;

    put_new(w, '}');
    put_op(w, '(');
    (void)put_text(w, "preamble");
    put_new(w, ']');
    put_op(w, '(');
    for (i = 0; i < 3; i++)
        names[i] = put_text(w, i == 0 ? "name" : i == 1 ? "filename" : "line");
    for (i = 0; i < KEYS; i++)
        key_memo[i] = put_text(w, keys[i]);
    for (i = 0; i < FRAMES; i++) {
        char text[64];
        put_new(w, '}');
        frame_memo[i] = w->memo - 1;
        put_op(w, '(');
        put_get(w, names[0]);
        (void)snprintf(text, sizeof text, "function_%u", i);
        (void)put_text(w, text);
        put_get(w, names[1]);
        (void)snprintf(text, sizeof text, "/package/module_%u.py", i / 20);
        (void)put_text(w, text);
        put_get(w, names[2]);
        put_number(w, 'M', i, 2);
        put_op(w, 'u');
    }
    put_op(w, 'e');
}

static void put_event(writer *w, uint64_t index)
{
    uint32_t stack = (uint32_t)(index / 3 * 2654435761u % STACKS);
    uint32_t i;

    put_new(w, '}');
    put_op(w, '(');
    put_get(w, key_memo[KEY_ACTION]);
    (void)put_text(w, index % 3 == 0 ? "alloc" : index % 3 == 1 ? "free_requested" : "free_completed");
    put_get(w, key_memo[KEY_ADDR]);
    put_address(w, UINT64_C(0x7f0000000000) + index / 3 % 4096 * 2097152);
    put_get(w, key_memo[KEY_SIZE]);
    put_number(w, 'J', 512 * (stack + 1), 4);
    put_get(w, key_memo[KEY_STREAM]);
    put_number(w, 'K', 0, 1);
    put_get(w, key_memo[KEY_TIME]);
    put_number(w, 0x8a, 7, 1);
    put_number(w, (unsigned)(index & 0xff), index >> 8, 6);
    put_get(w, key_memo[KEY_COMPILE]);
    (void)put_text(w, "N/A");
    put_get(w, key_memo[KEY_USER]);
    (void)put_text(w, "");
    put_get(w, key_memo[KEY_FRAMES]);
    put_new(w, ']');
    put_op(w, '(');
    for (i = 0; i < DEPTH; i++)
        put_get(w, frame_memo[(stack * 7919u + i * i) % FRAMES]);
    put_op(w, 'e');
    put_op(w, 'u');
}

static uint64_t write_file(const char *path, uint64_t wanted_bytes, uint64_t *bytes)
{
    writer w = {fopen(path, "wb"), 0, 0};
    uint64_t events = 0;
    uint32_t i;

    if (w.file == NULL)
        exit(1);
    put(&w, "\x80\x04", 2);
    put_preamble(&w);
    (void)put_text(&w, "segments");
    put_new(&w, ']');
    (void)put_text(&w, "device_traces");
    put_new(&w, ']');
    put_new(&w, ']');
    while (w.bytes < wanted_bytes) {
        put_op(&w, '(');
        for (i = 0; i < BATCH; i++)
            put_event(&w, events++);
        put_op(&w, 'e');
    }
    put_op(&w, 'a');
    put_op(&w, 'u');
    put_op(&w, '.');
    if (fclose(w.file) != 0)
        exit(1);
    *bytes = w.bytes;
    return events;
}

static double load_once(const char *path, uint64_t *peak_bytes, uint64_t *held_bytes)
{
    msc_context *ctx = NULL;
    msc_snapshot *snapshot = NULL;
    msc_error err;
    double start, taken;

    start = seconds();
    if (msc_context_create(NULL, &ctx, NULL) != MSC_OK ||
        msc_snapshot_load(ctx, path, &snapshot, &err) != MSC_OK) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    taken = seconds() - start;
    *peak_bytes = msc_context_peak_bytes(ctx);
    *held_bytes = msc_context_held_bytes(ctx);
    msc_snapshot_destroy(snapshot);
    msc_context_destroy(ctx);
    return taken;
}

int main(int argc, char **argv)
{
    int csv = argc > 1 && strcmp(argv[1], "--csv") == 0;
    uint64_t mebibytes = argc > 1 + csv ? strtoull(argv[1 + csv], NULL, 10) : 256;
    const char *path = argc > 2 + csv ? argv[2 + csv] : "bench_snapshot.pickle";
    double taken[RUNS];
    double each;
    uint64_t peak_bytes = 0;
    uint64_t held_bytes = 0;
    uint64_t bytes;
    uint64_t events = write_file(path, mebibytes << 20, &bytes);
    int i;

    for (i = 0; i < RUNS; i++)
        taken[i] = load_once(path, &peak_bytes, &held_bytes);
    (void)remove(path);
    each = median(taken, RUNS);
    printf(csv ? "snapshot,%.0f,%" PRIu64 ",%.3f,%.0f,%.0f,%.0f\n"
               : "%.0f MB, %" PRIu64
                 " events: %.3f s, %.0f MB/s; host memory at its peak %.0f MB, after %.0f MB\n",
           (double)bytes / 1e6, events, each, (double)bytes / 1e6 / each, (double)peak_bytes / 1e6,
           (double)held_bytes / 1e6);
    return 0;
}
