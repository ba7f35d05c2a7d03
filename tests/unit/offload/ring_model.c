/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Depth-first search over the states of a small ring. States that were seen are remembered by a 64-bit hash; of a
 * million states two share one with a probability of 3e-8.
 */
#include "ring_model.h"

#include <stdlib.h>
#include <string.h>

#define CELLS 2u
#define THREADS 4u
#define ENTRIES_MOST 6u
#define MESSAGES_MOST (ENTRIES_MOST + 1)

/* Atomic places. */
enum { TAIL, HEAD, TURN, PLACES = TURN + CELLS };

enum { GUESS, LOOK, CLAIM, USE, PASS };

/* What a thread knows: how much of each thread's past, and how old a value of each place it may still see. */
typedef struct view {
    uint8_t clock[THREADS];
    uint8_t oldest[PLACES];
} view;

/* A store to an atomic place. */
typedef struct message {
    uint8_t value;
    view view; /* what an acquiring load learns; nothing of a relaxed store */
} message;

typedef struct place {
    uint8_t count;
    message messages[MESSAGES_MOST]; /* the oldest that anybody may still see, to the newest */
} place;

typedef struct entry {
    uint8_t value;
    uint8_t writer;
    uint8_t written;       /* the writer's clock then */
    uint8_t read[THREADS]; /* each thread's clock when it last read */
} entry;

typedef struct thread {
    uint8_t step;
    uint8_t at;   /* position */
    uint8_t done; /* entries pushed or taken */
    uint8_t last; /* readers: the position taken last, plus 1 */
    view view;
} thread;

/* Bytes only, without padding, so that equal states are equal as memory. */
typedef struct state {
    place places[PLACES];
    entry entries[CELLS];
    thread threads[THREADS];
    uint8_t taken[ENTRIES_MOST]; /* by position: the entry taken there; 0: none yet */
} state;

typedef struct search {
    const ring_model *model;
    state *stack;
    size_t stack_count, stack_capacity;
    uint64_t *seen; /* open addressing; 0: empty */
    size_t seen_count, seen_capacity;
    ring_verdict verdict;
} search;

/* ---- states that were seen ------------------------------------------------------------------------ */

static uint64_t hash_of(const state *s)
{
    const unsigned char *bytes = (const unsigned char *)s;
    uint64_t hash = UINT64_C(0x9e3779b97f4a7c15);
    size_t i;

    for (i = 0; i < sizeof *s; i += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + i, sizeof *s - i < 8 ? sizeof *s - i : 8);
        hash = (hash ^ word) * UINT64_C(0xff51afd7ed558ccd);
        hash ^= hash >> 32;
    }
    return hash == 0 ? 1 : hash;
}

static void *grown(void *old, size_t bytes)
{
    void *result = realloc(old, bytes);

    if (result == NULL)
        abort();
    return result;
}

static bool insert(uint64_t *seen, size_t capacity, uint64_t hash)
{
    size_t i = (size_t)hash & (capacity - 1);

    for (; seen[i] != 0; i = (i + 1) & (capacity - 1))
        if (seen[i] == hash)
            return false;
    seen[i] = hash;
    return true;
}

static void grow_seen(search *x)
{
    size_t capacity = x->seen_capacity == 0 ? 65536 : 2 * x->seen_capacity;
    uint64_t *seen = grown(NULL, capacity * sizeof *seen);
    size_t i;

    memset(seen, 0, capacity * sizeof *seen);
    for (i = 0; i < x->seen_capacity; i++)
        if (x->seen[i] != 0)
            (void)insert(seen, capacity, x->seen[i]);
    free(x->seen);
    x->seen = seen;
    x->seen_capacity = capacity;
}

/* ---- memory --------------------------------------------------------------------------------------- */

static uint8_t larger(uint8_t a, uint8_t b)
{
    return a > b ? a : b;
}

static void learn(view *own, const view *other)
{
    uint32_t i;

    for (i = 0; i < THREADS; i++)
        own->clock[i] = larger(own->clock[i], other->clock[i]);
    for (i = 0; i < PLACES; i++)
        own->oldest[i] = larger(own->oldest[i], other->oldest[i]);
}

/* Loads message `m`, which the caller chose among those that the thread may see. */
static uint8_t load(state *s, uint32_t t, uint32_t p, uint32_t m, bool acquire)
{
    const message *loaded = &s->places[p].messages[m];

    s->threads[t].view.oldest[p] = (uint8_t)m;
    if (acquire)
        learn(&s->threads[t].view, &loaded->view);
    return loaded->value;
}

static void store(state *s, uint32_t t, uint32_t p, uint8_t value, bool release)
{
    place *to = &s->places[p];
    thread *by = &s->threads[t];
    message *stored = &to->messages[to->count];

    memset(stored, 0, sizeof *stored);
    stored->value = value;
    by->view.oldest[p] = to->count++;
    if (release) {
        stored->view = by->view;
        by->view.clock[t]++; /* what it does from now on, this store does not tell */
    }
}

/* Writes or reads the entry of the position that the thread holds. False: a data race. */
static bool use_entry(state *s, uint32_t t, bool writes, uint8_t value, uint8_t *out)
{
    thread *by = &s->threads[t];
    entry *used = &s->entries[by->at % CELLS];
    bool ordered = used->written <= by->view.clock[used->writer];
    uint32_t i;

    *out = used->value;
    if (!writes) {
        used->read[t] = by->view.clock[t];
        return ordered;
    }
    for (i = 0; i < THREADS; i++)
        ordered = ordered && used->read[i] <= by->view.clock[i];
    memset(used, 0, sizeof *used);
    used->value = value;
    used->writer = (uint8_t)t;
    used->written = by->view.clock[t];
    return ordered;
}

/* ---- steps ---------------------------------------------------------------------------------------- */

static bool is_writer(const ring_model *model, uint32_t t)
{
    return t < model->writers;
}

/* Forgets the messages that nobody can load any more, so that states that differ in them only are one. */
static void forget(const search *x, state *s)
{
    uint32_t all = x->model->threads;
    uint32_t p, t, m;

    for (p = 0; p < PLACES; p++) {
        place *here = &s->places[p];
        uint8_t drop = (uint8_t)(here->count - 1);
        for (t = 0; t < all; t++)
            if (s->threads[t].done < x->model->turns[t] && s->threads[t].view.oldest[p] < drop)
                drop = s->threads[t].view.oldest[p];
        if (drop == 0)
            continue;
        here->count = (uint8_t)(here->count - drop);
        memmove(here->messages, here->messages + drop, here->count * sizeof here->messages[0]);
        memset(here->messages + here->count, 0, (MESSAGES_MOST - here->count) * sizeof here->messages[0]);
        for (t = 0; t < all; t++) {
            uint8_t *oldest = &s->threads[t].view.oldest[p];
            *oldest = (uint8_t)(*oldest > drop ? *oldest - drop : 0);
        }
        for (t = 0; t < PLACES; t++)
            for (m = 0; m < s->places[t].count; m++) {
                uint8_t *oldest = &s->places[t].messages[m].view.oldest[p];
                *oldest = (uint8_t)(*oldest > drop ? *oldest - drop : 0);
            }
    }
}

static void visit(search *x, state *s)
{
    forget(x, s);
    if (2 * (x->seen_count + 1) > x->seen_capacity)
        grow_seen(x);
    if (!insert(x->seen, x->seen_capacity, hash_of(s)))
        return;
    x->seen_count++;
    if (x->stack_count == x->stack_capacity) {
        x->stack_capacity = x->stack_capacity == 0 ? 4096 : 2 * x->stack_capacity;
        x->stack = grown(x->stack, x->stack_capacity * sizeof *x->stack);
    }
    x->stack[x->stack_count++] = *s;
}

/* A reader has taken `value` at its position: the position's only entry, after the entries before it? */
static bool take(state *s, thread *by, uint8_t value)
{
    uint32_t i;

    if (value == 0 || by->at >= ENTRIES_MOST || s->taken[by->at] != 0 || by->last > by->at)
        return false;
    by->last = (uint8_t)(by->at + 1);
    s->taken[by->at] = value;
    for (i = 0; i < ENTRIES_MOST; i++) {
        uint8_t other = s->taken[i];
        if (i == by->at || other == 0 || other / 8 != value / 8)
            continue;
        if ((i < by->at) != (other < value))
            return false; /* two entries of one writer: the later one further back */
    }
    return true;
}

/* Where a thread goes after USE or PASS, whichever comes first in this model. */
static void advance(const ring_model *model, state *s, uint32_t t)
{
    thread *by = &s->threads[t];
    bool passes_first = is_writer(model, t) ? model->writer_passes_first : model->reader_passes_first;
    uint8_t first = passes_first ? PASS : USE;

    if (by->step == CLAIM) {
        by->step = first;
    } else if (by->step == first) {
        by->step = passes_first ? USE : PASS;
    } else {
        by->step = GUESS;
        by->at = 0;
        by->done++;
        if (by->done == model->turns[t])
            memset(&by->view, 0, sizeof by->view); /* asked for never again */
    }
}

static void guess(search *x, const state *from, uint32_t t)
{
    uint32_t p = is_writer(x->model, t) ? TAIL : HEAD;
    uint32_t m;

    for (m = from->threads[t].view.oldest[p]; m < from->places[p].count; m++) {
        state s = *from;
        s.threads[t].at = load(&s, t, p, m, false);
        s.threads[t].step = LOOK;
        visit(x, &s);
    }
}

static void look(search *x, const state *from, uint32_t t)
{
    bool writer = is_writer(x->model, t);
    bool acquire = !(writer ? x->model->no_writer_acquire : x->model->no_reader_acquire);
    uint8_t at = from->threads[t].at;
    uint32_t p = TURN + at % CELLS;
    uint32_t m;

    for (m = from->threads[t].view.oldest[p]; m < from->places[p].count; m++) {
        state s = *from;
        uint8_t turn = load(&s, t, p, m, acquire);
        if (turn == at + (writer ? 0 : 1)) {
            s.threads[t].step = CLAIM;
        } else { /* full or empty: asked again; or past: guessed again */
            s.threads[t].step = GUESS;
            s.threads[t].at = 0;
        }
        visit(x, &s);
    }
}

static void claim(search *x, const state *from, uint32_t t)
{
    uint32_t p = is_writer(x->model, t) ? TAIL : HEAD;
    uint32_t newest = from->places[p].count - 1u;
    uint8_t at = from->threads[t].at;
    uint32_t m;

    if (x->model->no_compare || from->places[p].messages[newest].value == at) {
        state s = *from;
        store(&s, t, p, (uint8_t)(at + 1), false);
        advance(x->model, &s, t);
        visit(x, &s);
    }
    if (x->model->no_compare)
        return;
    /* It fails where the newest is another; and a weak one may fail at any time. Either way it is a load. */
    for (m = from->threads[t].view.oldest[p]; m <= newest; m++) {
        state s = *from;
        s.threads[t].at = load(&s, t, p, m, false);
        s.threads[t].step = LOOK;
        visit(x, &s);
    }
}

static void use(search *x, const state *from, uint32_t t)
{
    bool writer = is_writer(x->model, t);
    state s = *from;
    thread *by = &s.threads[t];
    uint8_t pushed = (uint8_t)(8 * (t + 1) + by->done); /* the writer and its number among its own */
    uint8_t found;

    if (!use_entry(&s, t, writer, pushed, &found) && !x->model->blind)
        x->verdict = RING_RACE;
    else if (!writer && !take(&s, by, found))
        x->verdict = RING_WRONG;
    advance(x->model, &s, t);
    visit(x, &s);
}

static void pass(search *x, const state *from, uint32_t t)
{
    bool writer = is_writer(x->model, t);
    bool release = !(writer ? x->model->no_writer_release : x->model->no_reader_release);
    state s = *from;
    uint8_t at = s.threads[t].at;
    uint32_t ahead = writer || x->model->short_turn ? 1 : CELLS;

    store(&s, t, TURN + at % CELLS, (uint8_t)(at + ahead), release);
    advance(x->model, &s, t);
    visit(x, &s);
}

/* ---- search --------------------------------------------------------------------------------------- */

static uint8_t newest_of(const state *s, uint32_t p)
{
    return s->places[p].messages[s->places[p].count - 1].value;
}

/* Nobody is at work: the turns must be those of a ring with `tail` - `head` entries, or it would be stuck. */
static void check_rest(search *x, const state *s)
{
    uint8_t head = newest_of(s, HEAD);
    uint8_t tail = newest_of(s, TAIL);
    uint32_t t, i;

    for (t = 0; t < x->model->threads; t++)
        if (s->threads[t].step != GUESS)
            return;
    if (tail < head || tail > head + CELLS) {
        x->verdict = RING_STUCK;
        return;
    }
    for (i = head; i < head + CELLS; i++)
        if (newest_of(s, TURN + i % CELLS) != (i < tail ? i + 1 : i))
            x->verdict = RING_STUCK;
}

static void begin(search *x)
{
    state s;
    uint32_t i;

    memset(&s, 0, sizeof s);
    for (i = 0; i < PLACES; i++)
        s.places[i].count = 1;
    for (i = 0; i < CELLS; i++)
        s.places[TURN + i].messages[0].value = (uint8_t)i;
    for (i = 0; i < THREADS; i++)
        s.threads[i].view.clock[i] = 1; /* so that 0 means never */
    visit(x, &s);
}

ring_verdict ring_model_run(const ring_model *model, uint64_t *states)
{
    static void (*const steps[])(search *, const state *, uint32_t) = {guess, look, claim, use, pass};
    search x = {.model = model, .verdict = RING_RIGHT};
    bool finished = false;

    begin(&x);
    while (x.stack_count > 0 && x.verdict == RING_RIGHT) {
        state s = x.stack[--x.stack_count];
        bool over = true;
        uint32_t t;
        check_rest(&x, &s);
        for (t = 0; t < model->threads && x.verdict == RING_RIGHT; t++)
            if (s.threads[t].done < model->turns[t]) {
                over = false;
                steps[s.threads[t].step](&x, &s, t);
            }
        finished = finished || over;
    }
    *states = x.seen_count;
    free(x.stack);
    free(x.seen);
    if (x.verdict == RING_RIGHT && !finished)
        return RING_STUCK;
    return x.verdict;
}
