/* SPDX-License-Identifier: Apache-2.0 */
/* Many copies with just the waits that they need, and several threads at once, on any device. */
#include "device_cases.h"

#include "base/thread.h"

/*
 * Random copies between cells of the host and of the device, on random streams, with the waits that their order
 * needs and no others: who reads a cell waits for whoever wrote it; who writes it waits for those who read and
 * wrote it before. Then every cell holds what it would hold if all had been done one by one.
 */
#define CELLS 6 /* on each side */
#define CELL_BYTES 2048u
#define STEPS 250

typedef struct cell {
    unsigned char *memory;
    uint64_t pattern;
    void *written;
    void *read[FIXTURE_STREAMS];
    int writer; /* stream, or -1: nobody since the program looked */
    bool has_reader[FIXTURE_STREAMS];
} cell;

static void cells_open(fixture *fix, cell *cells)
{
    int i;
    int s;

    memset(cells, 0, 2 * CELLS * sizeof *cells);
    for (i = 0; i < 2 * CELLS; i++) {
        cells[i].memory = i < CELLS ? fixture_host(fix, CELL_BYTES) : fixture_memory(fix, CELL_BYTES);
        cells[i].written = fixture_event(fix);
        cells[i].writer = -1;
        for (s = 0; s < FIXTURE_STREAMS; s++)
            cells[i].read[s] = fixture_event(fix);
    }
}

/* Lets `stream` wait, or the program itself (-1), until it may read the cell, and write it if `writes`. */
static void order_after(fixture *fix, cell *it, int stream, bool writes)
{
    int s;

    if (it->writer >= 0 && it->writer != stream) {
        if (stream >= 0)
            fixture_wait(fix, stream, it->written);
        else
            fixture_await(fix, it->written);
    }
    for (s = 0; writes && s < FIXTURE_STREAMS; s++) {
        if (!it->has_reader[s] || s == stream)
            continue;
        if (stream >= 0)
            fixture_wait(fix, stream, it->read[s]);
        else
            fixture_await(fix, it->read[s]);
    }
}

static void cell_copy(fixture *fix, cell *from, cell *to, msc_copy_kind kind, int stream)
{
    order_after(fix, from, stream, false);
    order_after(fix, to, stream, true);
    fixture_copy(fix, to->memory, from->memory, CELL_BYTES, kind, stream);
    fixture_record(fix, to->written, stream);
    fixture_record(fix, from->read[stream], stream);
    from->has_reader[stream] = true;
    memset(to->has_reader, 0, sizeof to->has_reader);
    to->writer = stream;
    to->pattern = from->pattern;
}

static bool cell_is_right(fixture *fix, cell *it)
{
    order_after(fix, it, -1, false);
    return fixture_holds(it->memory, CELL_BYTES, it->pattern);
}

/* The program writes a cell of the host. */
static void cell_write(fixture *fix, cell *it, uint64_t pattern)
{
    order_after(fix, it, -1, true);
    fixture_fill(it->memory, CELL_BYTES, pattern);
    it->pattern = pattern;
    it->writer = -1;
    memset(it->has_reader, 0, sizeof it->has_reader);
}

static void cells_close(fixture *fix, cell *cells)
{
    int i;
    int s;

    for (i = 0; i < 2 * CELLS; i++) {
        fix->ops->event_destroy(fix->device, cells[i].written);
        for (s = 0; s < FIXTURE_STREAMS; s++)
            fix->ops->event_destroy(fix->device, cells[i].read[s]);
        if (i < CELLS)
            fixture_host_end(fix, cells[i].memory, CELL_BYTES);
        else
            fix->ops->memory_destroy(fix->device, cells[i].memory, CELL_BYTES);
    }
}

static uint32_t roll(uint64_t *seed, uint32_t sides)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33) % sides;
}

void many_random_copies(void **state)
{
    uint64_t seed = 20;
    cell cells[2 * CELLS];
    fixture fix;
    int i;

    (void)state;
    fixture_open(&fix, &tested_options);
    cells_open(&fix, cells);
    for (i = 0; i < CELLS; i++) {
        cell_write(&fix, &cells[i], (uint64_t)i);
        cell_copy(&fix, &cells[i], &cells[CELLS + i], MSC_COPY_IN, 0);
    }
    for (i = 0; i < STEPS; i++) {
        cell *here = &cells[roll(&seed, CELLS)];
        cell *there = &cells[CELLS + roll(&seed, CELLS)];
        int stream = (int)roll(&seed, FIXTURE_STREAMS);

        switch (roll(&seed, 8)) {
        case 0: /* often enough that patterns do not die out */
        case 1:
            assert_true(cell_is_right(&fix, here));
            cell_write(&fix, here, (uint64_t)(100 + i));
            break;
        case 2:
        case 3:
        case 4:
            cell_copy(&fix, here, there, MSC_COPY_IN, stream);
            break;
        default:
            cell_copy(&fix, there, here, MSC_COPY_OUT, stream);
            break;
        }
    }
    for (i = 0; i < CELLS; i++)
        assert_true(cell_is_right(&fix, &cells[i]));
    for (i = 0; i < CELLS; i++) {
        cell_copy(&fix, &cells[CELLS + i], &cells[0], MSC_COPY_OUT, i % FIXTURE_STREAMS);
        assert_true(cell_is_right(&fix, &cells[0]));
    }
    for (i = 0; i < 2 * CELLS; i++)
        order_after(&fix, &cells[i], -1, true);
    cells_close(&fix, cells);
    fixture_close(&fix);
}

/* Several threads use one device, each its own stream. Asserts are the main thread's alone, hence the flag. */
typedef struct worker {
    fixture *fix;
    unsigned char *from;
    unsigned char *to;
    unsigned char *there;
    void *event;
    int number;
    bool failed;
} worker;

static void *work(void *argument)
{
    worker *me = argument;
    msc_device *device = me->fix->device;
    void *stream = me->fix->streams[me->number];
    const msc_device_ops *ops = me->fix->ops;
    uint64_t round;

    for (round = 0; round < 40 && !me->failed; round++) {
        uint64_t pattern = round * FIXTURE_STREAMS + (uint64_t)me->number;

        fixture_fill(me->from, FAST_BYTES, pattern);
        me->failed =
            ops->copy(device, me->there, me->from, FAST_BYTES, MSC_COPY_IN, stream, NULL) != MSC_OK ||
            ops->copy(device, me->to, me->there, FAST_BYTES, MSC_COPY_OUT, stream, NULL) != MSC_OK ||
            ops->event_record(device, me->event, stream, NULL) != MSC_OK ||
            ops->event_wait(device, me->event, NULL) != MSC_OK || !fixture_holds(me->to, FAST_BYTES, pattern);
    }
    return NULL;
}

void many_several_threads(void **state)
{
    worker workers[FIXTURE_STREAMS];
    msc__thread threads[FIXTURE_STREAMS];
    fixture fix;
    int i;

    (void)state;
    fixture_open(&fix, &tested_options);
    for (i = 0; i < FIXTURE_STREAMS; i++) {
        workers[i] = (worker){.fix = &fix, .number = i};
        workers[i].from = fixture_host(&fix, FAST_BYTES);
        workers[i].to = fixture_host(&fix, FAST_BYTES);
        workers[i].there = fixture_memory(&fix, FAST_BYTES);
        workers[i].event = fixture_event(&fix);
    }
    for (i = 0; i < FIXTURE_STREAMS; i++)
        OK(&fix, msc__thread_start(&threads[i], "worker", work, &workers[i], &fix.err));
    for (i = 0; i < FIXTURE_STREAMS; i++) {
        msc__thread_join(&threads[i]);
        assert_false(workers[i].failed);
        fix.ops->event_destroy(fix.device, workers[i].event);
        fix.ops->memory_destroy(fix.device, workers[i].there, FAST_BYTES);
        fixture_host_end(&fix, workers[i].from, FAST_BYTES);
        fixture_host_end(&fix, workers[i].to, FAST_BYTES);
    }
    fixture_close(&fix);
}

/* ---- several threads wait for one event --------------------------------------------------------------- */

#define WAITERS 5

static void *wait_for_event(void *argument)
{
    worker *me = argument;

    me->failed = me->fix->ops->event_wait(me->fix->device, me->event, NULL) != MSC_OK ||
                 !fixture_holds(me->to, tested_slow_bytes, 1);
    return NULL;
}

void many_waiting_threads(void **state)
{
    msc__thread threads[WAITERS];
    worker workers[WAITERS];
    unsigned char *from;
    unsigned char *to;
    unsigned char *there;
    fixture fix;
    void *event;
    int i;

    (void)state;
    fixture_open(&fix, &tested_options);
    from = fixture_host(&fix, tested_slow_bytes);
    to = fixture_host(&fix, tested_slow_bytes);
    there = fixture_memory(&fix, tested_slow_bytes);
    event = fixture_event(&fix);
    fixture_fill(from, tested_slow_bytes, 1);
    fixture_copy(&fix, there, from, tested_slow_bytes, MSC_COPY_IN, 0);
    fixture_copy(&fix, to, there, tested_slow_bytes, MSC_COPY_OUT, 0);
    fixture_record(&fix, event, 0);
    for (i = 0; i < WAITERS; i++) {
        workers[i] = (worker){.fix = &fix, .to = to, .event = event};
        OK(&fix, msc__thread_start(&threads[i], "waiter", wait_for_event, &workers[i], &fix.err));
    }
    for (i = 0; i < WAITERS; i++) {
        msc__thread_join(&threads[i]);
        assert_false(workers[i].failed);
    }
    fix.ops->event_destroy(fix.device, event);
    fix.ops->memory_destroy(fix.device, there, tested_slow_bytes);
    fixture_host_end(&fix, from, tested_slow_bytes);
    fixture_host_end(&fix, to, tested_slow_bytes);
    fixture_close(&fix);
}
