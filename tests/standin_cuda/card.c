/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory and facts of a card that is not there.
 *
 *      addresses   |<- one range of the process, mapped without memory behind it ----------------->|
 *                  <- lowest         [ reserved ][ given back: no access ]....[ taken ][ taken ]
 *
 * Addresses are handed out from above, as Linux drivers do (seen with 580 and an H100), and never twice, so
 * that whoever keeps a pointer too long is caught by the host's memory protection. Pages are backed by the host on demand: what the program copies to the card
 * can be read back (a few bytes, usually), and what "kernels" would have written is zero.
 *
 * Invariant: `used` is the sum of the taken chunks and of what was counted; it never exceeds the capacity.
 */
#define _GNU_SOURCE
#include "card.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGE = 1 << 21, SMALL = 1 << 20, GRANULE = 512, RESERVED_ALIGNMENT = 1 << 25, RANGES_MOST = 256 };

typedef struct chunk {
    uintptr_t at;
    size_t size;
} chunk;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t begun = PTHREAD_ONCE_INIT;
static card_facts facts;
static size_t used;
static uintptr_t first, lowest, last;
static chunk *chunks;
static size_t chunk_count, chunk_room;
static chunk ranges[RANGES_MOST]; /* reserved */
static size_t range_count;
static bool lazy, computes;
static uint64_t now, settled;

/* ---- facts ------------------------------------------------------------------------------------------ */

/* Per capability: multiprocessors of a usual card, threads and shared memory of one (CUDA programming guide,
 * "technical specifications per compute capability"). */
static const card_facts known[] = {
    {7, 0, 80, 2048, 98304, 98304, 0, "V100"},        {7, 5, 40, 1024, 65536, 65536, 0, "T4"},
    {8, 0, 108, 2048, 166912, 167936, 0, "A100"},     {8, 6, 82, 1536, 101376, 102400, 0, "RTX 3090"},
    {8, 9, 128, 1536, 101376, 102400, 0, "RTX 4090"}, {9, 0, 132, 2048, 232448, 233472, 0, "H100"},
    {10, 0, 148, 2048, 232448, 233472, 0, "B200"},    {12, 0, 170, 1536, 101376, 102400, 0, "RTX 5090"},
};

static void read_facts(void)
{
    const char *capability = getenv("STANDIN_CAPABILITY"), *bytes = getenv("STANDIN_BYTES");
    const char *units = getenv("STANDIN_UNITS"), *name = getenv("STANDIN_NAME");
    int major = 8, minor = 6;

    if (capability != NULL) {
        sscanf(capability, "%d.%d", &major, &minor);
    }
    facts = known[3];
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (known[i].major == major && known[i].minor == minor) {
            facts = known[i];
        }
    }
    facts.major = major;
    facts.minor = minor;
    facts.units = units != NULL ? atoi(units) : facts.units;
    facts.name = name != NULL ? name : "Stand-in CUDA device (computes nothing)";
    facts.capacity_bytes = bytes != NULL ? strtoull(bytes, NULL, 10) : (size_t)80 << 30;
    lazy = getenv("STANDIN_LAZY_EVENTS") != NULL;
    computes = getenv("STANDIN_COMPUTE") != NULL;
}

static void begin(void)
{
    size_t span = (size_t)16 << 40;
    void *at;

    read_facts();
    do {
        at = mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        span /= at == MAP_FAILED ? 2 : 1;
    } while (at == MAP_FAILED && span > facts.capacity_bytes);
    if (at == MAP_FAILED) {
        fprintf(stderr, "stand-in CUDA: no address space\n");
        exit(1);
    }
    first = (uintptr_t)at;
    lowest = last = ((uintptr_t)at + span) & ~(uintptr_t)(RESERVED_ALIGNMENT - 1);
}

const card_facts *card(void)
{
    pthread_once(&begun, begin);
    return &facts;
}

bool card_computes(void)
{
    card();
    return computes;
}

/* ---- memory ----------------------------------------------------------------------------------------- */

static size_t up(size_t size, size_t step)
{
    return (size + step - 1) / step * step;
}

static void back(uintptr_t at, size_t size, int access)
{
    mmap((void *)at, size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static void remember(uintptr_t at, size_t size)
{
    if (chunk_count == chunk_room) {
        chunk_room = chunk_room > 0 ? 2 * chunk_room : 1024;
        chunks = realloc(chunks, chunk_room * sizeof *chunks);
    }
    chunks[chunk_count++] = (chunk){at, size};
}

void *card_take(size_t size)
{
    size_t taken = up(size, size >= SMALL ? PAGE : GRANULE), step = up(taken, PAGE);
    uintptr_t at = 0;

    card();
    pthread_mutex_lock(&lock);
    if (used + taken <= facts.capacity_bytes && lowest - first >= step) {
        at = lowest -= step;
        used += taken;
        back(at, step, PROT_READ | PROT_WRITE);
        remember(at, taken);
    }
    pthread_mutex_unlock(&lock);
    return (void *)at;
}

bool card_give(void *at)
{
    bool found = false;

    pthread_mutex_lock(&lock);
    for (size_t i = chunk_count; i-- > 0 && !found;) {
        if (chunks[i].at == (uintptr_t)at) {
            found = true;
            used -= chunks[i].size;
            back(chunks[i].at, up(chunks[i].size, PAGE), PROT_NONE);
            chunks[i] = chunks[--chunk_count];
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

bool card_count(size_t size)
{
    bool fits;

    card();
    pthread_mutex_lock(&lock);
    fits = used + size <= facts.capacity_bytes;
    used += fits ? size : 0;
    pthread_mutex_unlock(&lock);
    return fits;
}

void card_uncount(size_t size)
{
    pthread_mutex_lock(&lock);
    used -= size;
    pthread_mutex_unlock(&lock);
}

void *card_reserve(size_t size)
{
    uintptr_t at = 0;

    card();
    pthread_mutex_lock(&lock);
    if (lowest - first >= up(size, RESERVED_ALIGNMENT) + RESERVED_ALIGNMENT && range_count < RANGES_MOST) {
        at = lowest = (lowest - size) & ~(uintptr_t)(RESERVED_ALIGNMENT - 1);
        ranges[range_count++] = (chunk){at, size};
        back(at, size, PROT_READ | PROT_WRITE);
    }
    pthread_mutex_unlock(&lock);
    return (void *)at;
}

size_t card_free_bytes(void)
{
    card();
    return facts.capacity_bytes - used;
}

bool card_owns(const void *at)
{
    return (uintptr_t)at >= lowest && (uintptr_t)at < last;
}

bool card_holds(const void *at, size_t size)
{
    bool held = false;

    pthread_mutex_lock(&lock);
    for (size_t i = chunk_count; i-- > 0 && !held;) {
        held = (uintptr_t)at >= chunks[i].at && (uintptr_t)at + size <= chunks[i].at + chunks[i].size;
    }
    for (size_t i = range_count; i-- > 0 && !held;) {
        held = (uintptr_t)at >= ranges[i].at && (uintptr_t)at + size <= ranges[i].at + ranges[i].size;
    }
    pthread_mutex_unlock(&lock);
    return held;
}

/* ---- events ----------------------------------------------------------------------------------------- */

uint64_t card_tick(void)
{
    return __atomic_add_fetch(&now, 1, __ATOMIC_SEQ_CST);
}

void card_settle(void)
{
    settled = now;
}

bool card_reached(uint64_t at)
{
    card();
    return !lazy || at <= settled;
}
