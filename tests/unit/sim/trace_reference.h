/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is alive in each operation of a step under a plan, by the rules at the top of sim_trace.c and sim_moves.c,
 * one operation at a time, with no care for speed.
 */
#ifndef MSC_TEST_TRACE_REFERENCE_H
#define MSC_TEST_TRACE_REFERENCE_H

#include <stdbool.h>

#include "memscale/memscale.h"

enum { MOST_CALLS = 256, MOST_BUFFERS = 512, MOST_OPS = 1024, MOST_SAVES = 2048, MOST_MOVES = 1024 };

/* A storage that a region moves. */
typedef struct reference_move {
    uint32_t buffer, region, put, settle, use, back, release;
} reference_move;

/* A region is named by its first call. */
typedef struct reference {
    const msc_graph *graph;
    const msc_plan *plan;
    uint32_t region_of[MOST_CALLS]; /* per call: region, or MSC_NONE */
    bool outermost[MOST_CALLS];     /* per call: no call around it belongs to a region */
    uint32_t begin[MOST_CALLS], finish[MOST_CALLS];
    uint64_t state[MOST_CALLS];
    uint32_t stop[MOST_CALLS], redo[MOST_CALLS], until[MOST_CALLS];
    uint32_t end[MOST_BUFFERS], hold[MOST_BUFFERS];
    bool kept[MOST_OPS];             /* per operation */
    uint32_t offload_of[MOST_CALLS]; /* per call: offload that it lies in, by its first call, or MSC_NONE */
    reference_move moves[MOST_MOVES];
    uint32_t move_count;
    bool save_moves[MOST_SAVES];
} reference;

void prepare_reference(reference *r, const msc_graph *graph, const msc_plan *plan);

/* Appends what should be alive in each operation, in the order of events. */
size_t list_live(const reference *r, uint64_t *live, size_t most);

/* Bytes that are off the device before operation t. */
uint64_t away_at(const reference *r, uint32_t t);

/* First use in backward of what a region moves; UINT32_MAX: there is none. */
uint32_t first_use_of(const reference *r, uint32_t region);

/* ---- for the two files of the reference ------------------------------------------------------------- */

void find_moves(reference *r);

const msc_choice *choice_of_call(const reference *r, uint32_t call);

/* Whether a region moves a buffer. */
bool is_moved(const reference *r, uint32_t region, uint32_t buffer);

uint64_t size_of(const reference *r, const reference_move *move);

/* Whether what a move brings back is on the device at an operation. */
bool is_back(const reference_move *move, uint32_t position);

static inline uint32_t natural_end(const msc_buffer *b)
{
    return !b->resident && b->end == b->begin ? b->begin + 1 : b->end;
}

static inline bool made_inside(const reference *r, const msc_buffer *b, uint32_t region)
{
    return !b->resident && b->category != MSC_CATEGORY_PARAMETER && b->begin >= r->begin[region] &&
           b->begin < r->finish[region];
}

static inline bool internal_to(const reference *r, const msc_save *s, uint32_t region)
{
    const msc_buffer *b = &msc_graph_buffers(r->graph)[s->buffer];

    return made_inside(r, b, region) && !r->kept[b->begin] && s->release > r->finish[region];
}

static inline uint32_t region_of_save(const reference *r, const msc_save *s)
{
    return s->call == MSC_NONE ? MSC_NONE : r->region_of[s->call];
}

static inline bool never_used(const reference *r, const msc_save *s)
{
    return s->unpack == s->release && s->release == msc_graph_op_count(r->graph);
}

static inline uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

#endif /* MSC_TEST_TRACE_REFERENCE_H */
