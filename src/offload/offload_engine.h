/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file offload_engine.h
 * What the files of the engine share: the block, the lane, the engine, and who may touch what when.
 *
 *      caller ── put ──► queue ──► lane out ──► tier         caller ── get ──► queue ──► lane in ──► destination
 *                                  (a thread)                                          (a thread)
 *
 * Everything in `msc_offload` and in its blocks is guarded by `mutex`, except what is constant after create and
 * the two `msc__transfer` of a block, which belong to their lanes. No lane holds the mutex while bytes move. `changed` is broadcast
 * when the state of any block changes.
 *
 * With small blocks the mutex is what costs: each taking of it fetches its line, and those of the blocks, from the other
 * core. So a lane takes several small blocks under one lock, and what it has to tell of them it puts off until it
 * takes more, waits, or begins something large. A lane that waits has told everything.
 *
 * A lane never waits for a caller. Lane in waits for lane out (a block that is asked for before it is
 * stored); lane out waits for nobody: so there is no circle.
 */
#ifndef MSC_OFFLOAD_ENGINE_H
#define MSC_OFFLOAD_ENGINE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "base/array.h"
#include "base/thread.h"
#include "device/device_internal.h"
#include "memscale/offload.h"
#include "offload/file/offload_file.h"
#include "offload/offload_ranges.h"
#include "offload/offload_schedule.h"
#include "offload/offload_slabs.h"

#define MSC__OFFLOAD_QUEUE 4096u /* tickets that wait for a lane at most */
#define MSC__OFFLOAD_ITEMS 64u /* copies that a lane has under way at most; above the most staging buffers */
#define MSC__OFFLOAD_BATCH                                                                                   \
    16u /* blocks that a lane takes, and reports that it makes, under one lock at most */
#define MSC__OFFLOAD_BLOCKS_PER_PAGE 256u
#define MSC__OFFLOAD_AHEAD_MOST 1024u /* the most that prefetch_count may be */

/** The copy out of a block. */
typedef enum msc__out_state {
    MSC__OUT_QUEUED,
    MSC__OUT_RUNNING, /* the lane has it */
    MSC__OUT_ISSUED, /* likewise, and `out_done` is recorded behind its last copy: a stream may wait for it */
    MSC__OUT_STORED,
    MSC__OUT_FAILED
} msc__out_state;

/** The latest copy back of a block. */
typedef enum msc__in_state {
    MSC__IN_NONE,
    MSC__IN_QUEUED,
    MSC__IN_RUNNING, /* the lane has it */
    MSC__IN_ISSUED,  /* `in_done` is recorded behind its last copy */
    MSC__IN_OVER,    /* likewise, and the lane has seen the end of it */
    MSC__IN_FAILED
} msc__in_state;

/** Where a block lies. */
typedef struct msc__place {
    msc_tier tier;
    msc__slab_block slab; /* PINNED, HOST */
    uint64_t offset;      /* FILE */
    uint32_t range;       /* FILE */
} msc__place;

/** How far a copy in one direction is. It is the lane's alone from the moment that it took the block. */
typedef struct msc__transfer {
    uint32_t pieces_left; /* begun and not over */
    uint64_t offset;      /* in: what goes to the device next begins here */
    uint64_t checksum;    /* debug only; the one of `leaving` is read by lane in, after the block is stored */
    int64_t begin_ns;
    msc_status failure; /* the first; its text is in the engine's `failure` */
} msc__transfer;

typedef struct msc__block {
    /* One line: what callers and lanes tell each other, and what the callers look at beside it. */
    uint32_t index;
    uint32_t generation; /* odd: in use */
    msc__out_state out;
    msc__in_state in;
    bool out_busy; /* a lane has it: set when the lane takes the block, reset when its end is reported */
    bool in_busy;
    bool out_waits; /* the copy out waits for `out_ready`: the source was made on a stream */
    bool in_waits;  /* likewise the copy back, for `in_ready` */
    bool settled;   /* nobody waits for the copy out: the source's fate is the program's */
    bool arrived;   /* likewise for the latest copy back */
    bool dropped;   /* the last lane that has it frees it */
    uint32_t next_free;
    uint32_t group;
    uint32_t ordinal;     /* in its step */
    uint32_t ahead_place; /* in the engine's `ahead`; MSC_NONE: it does not count in the prefetch window */
    uint64_t bytes;
    uint64_t allowance; /* of its group: bytes of the next one that may be early */

    /* Written by callers, read by lanes. */
    msc__place place;
    const void *source;
    void *destination;
    bool to_host;    /* the destination is the host's: the lane fills it */
    void *events[4]; /* out_ready, out_done, in_ready, in_done; made when the block is used first */

    msc__transfer leaving;   /* lane out's */
    msc__transfer returning; /* lane in's */
} msc__block;

/** What a look ahead asks of a block that was put in this step. It lies apart, where no lane writes: a look at a block
    fetches its line from the lane's core. */
typedef struct msc__put {
    msc_ticket ticket;
    uint32_t group;
    bool ahead; /* the block counts in the prefetch window */
} msc__put;

enum { MSC__OUT_READY, MSC__OUT_DONE, MSC__IN_READY, MSC__IN_DONE };

/** One copy of a lane that is under way: a whole block, or a piece of one in a staging buffer. */
typedef struct msc__item {
    msc__block *block;
    uint64_t offset;
    uint64_t bytes;
    uint32_t staging; /* MSC_NONE: no buffer */
    uint32_t slot;    /* of the file operation */
    bool in_file;     /* the file operation is under way */
    bool copied;      /* out: the device's copy is over; in: it has begun */
} msc__item;

typedef struct msc__lane msc__lane;

typedef struct msc__staging {
    void *memory;
    msc__slab_block slab;
    void *event;
    bool busy; /* an item has it */
} msc__staging;

/** What a lane makes of a ticket, as things are now. */
typedef enum msc__ask { MSC__ASK_NOTHING, MSC__ASK_LATER, MSC__ASK_NOW } msc__ask;

/** What a lane has to tell of a block. */
typedef struct msc__report {
    msc__block *block;
    uint32_t state; /* msc__out_state or msc__in_state */
    int64_t when_ns;
} msc__report;

/** What the two directions do in their own way. */
typedef struct msc__direction {
    /** Takes a block that is wanted and can be begun: it is the lane's from then on. The mutex is held. */
    msc__ask (*claim)(msc__lane *lane, msc__block *block);
    /** Submits the copy of a whole block, which needs no buffer. */
    msc_status (*copy_whole)(msc__lane *lane, msc__block *block, msc_error *err);
    /** Begins a piece: its buffer is free. */
    msc_status (*copy_piece)(msc__lane *lane, msc__item *item, msc_error *err);
    /** Waits for the oldest copy, and ends it: `msc__lane_end_oldest`. */
    void (*retire)(msc__lane *lane);
    /** All pieces of a block that were begun are over. */
    void (*finish)(msc__lane *lane, msc__block *block);
    /** Makes a report come true. The mutex is held. */
    void (*tell)(msc__lane *lane, const msc__report *report);
} msc__direction;

/** A thread that moves blocks in one direction. */
struct msc__lane {
    msc_offload *engine;
    const msc__direction *direction;
    msc__thread thread;
    bool ready;      /* initialised as far as `awake` */
    msc__cond awake; /* with the engine's mutex */
    bool asleep;
    uint32_t put_off_count; /* submitted since it fell asleep, without waking it */
    uint64_t put_off_bytes;
    uint32_t full_count; /* submitters that wait for room in the queue */
    void *stream;
    msc__file *file; /* NULL: no file tier */
    msc__staging *staging;
    msc_ticket
        queue[MSC__OFFLOAD_QUEUE]; /* a ring: queue_first … queue_first + queued; guarded by the mutex */
    uint32_t queue_first;
    _Atomic uint32_t
        queued; /* the lane looks without the mutex too: with copies under way it need not take it in vain */
    msc_ticket next;                     /* out of the queue, and not taken yet; 0: none */
    msc__item items[MSC__OFFLOAD_ITEMS]; /* a ring: first … first + count; the lane's alone */
    uint32_t first, count;
    msc__report reports[MSC__OFFLOAD_BATCH];
    uint32_t report_count; /* not told yet */
};

struct msc_offload {
    msc_context *ctx;
    msc_device *device;
    msc_offload_options options;
    char *directory;
    int64_t born_ns;

    msc__mutex mutex;
    msc__cond changed;
    atomic_bool ending; /* set under the mutex; lanes look without it, and stop one block later at worst */

    msc__array pages; /* msc__block *: MSC__OFFLOAD_BLOCKS_PER_PAGE blocks each, which never move */
    uint32_t free_block;
    uint32_t process; /* `msc__fork_count` where it was created */

    msc__slabs *slabs[MSC_TIER_COUNT]; /* NULL: not used; never for the file */
    msc__slabs *staging_slabs;         /* NULL: every copy is direct */
    msc_tier staging_tier;             /* whose limit the staging buffers count for */
    msc__ranges *file_space;
    msc__file *file; /* lane out's, on which callers reserve; NULL: not used */
    char notes[MSC_TIER_COUNT][MSC_ERROR_MESSAGE_BYTES];

    msc__lane out, in;
    msc__schedule schedule;
    msc__array step_puts; /* msc__put: ordinal → block of this step, which may be gone */
    uint32_t live_count;  /* blocks that the program has not dropped */
    uint32_t group;       /* of the blocks put now */
    uint64_t allowance;   /* of that group */
    bool used_in_step;
    bool file_grows;                            /* a thread reserves space, without the mutex */
    uint32_t window;                            /* blocks on their way back at most, now */
    msc__block *ahead[MSC__OFFLOAD_AHEAD_MOST]; /* on their way back, or back and not used; in no order */
    uint64_t ahead_bytes;
    uint32_t ahead_count;
    msc_offload_counters counters;
    msc_error failure; /* the latest one of a copy */

    msc_offload_event *trace; /* a ring of options.trace_count */
    uint64_t traced;          /* events ever */
};

/** Whether a stream can be made to wait for a copy that is only on its way: the host has none but the caller. */
static inline bool msc__has_streams(const msc_offload *engine)
{
    return engine->device->kind != MSC_DEVICE_HOST;
}

/* offload_blocks.c: the table of blocks. The mutex is held. */

/** A block with its events, or NULL: ENOMEM, EDRIVER. */
msc__block *msc__block_take(msc_offload *engine, msc_error *err);

/** Gives its place and itself back. No lane has it. */
void msc__block_give(msc_offload *engine, msc__block *block);

/** The block that a ticket names, or NULL. */
msc__block *msc__block_find(msc_offload *engine, msc_ticket ticket);
msc_ticket msc__block_ticket(const msc__block *block);
void msc__blocks_fini(msc_offload *engine);

/** Gives a dropped block back if no lane has it. */
void msc__block_settle_drop(msc_offload *engine, msc__block *block);

/* offload_calls.c */

/** Takes the mutex and, unless `out` is NULL, finds a block that the program has not dropped. On failure the
    mutex is free. Errors: ESTATE (a child of fork), EINVAL (no such block). A thread that waits with the mutex has to
    find the block again: another thread may have dropped it, and its record may be another block's. */
msc_status msc__offload_enter(msc_offload *engine, msc_ticket ticket, msc__block **out, msc_error *err);

/** As `msc_offload_arrived`. The mutex is held. */
msc_status msc__offload_arrived(msc_offload *engine, msc__block *block, void *stream, msc_error *err);

/* offload_use.c: steps and prefetch. The mutex is held. */

/** Begins a step, if anything happened in the present one. One in which nothing was used is forgotten. */
void msc__offload_begin_step(msc_offload *engine);

/** The block is used or gone, and counts no more as on its way. */
void msc__window_leave(msc_offload *engine, msc__block *block);

/* offload_place.c: room in the tiers. The mutex is held. */

msc_status msc__places_init(msc_offload *engine, msc_error *err);
void msc__places_fini(msc_offload *engine);

/**
 * Finds room in the tiers from `first` to `last`. EAGAIN: none has room, with the reason. The mutex is free while the
 * system is asked for more; or, `now`, the system is not asked: ETIMEDOUT (no message).
 */
msc_status msc__place_take(msc_offload *engine, uint64_t bytes, msc_tier first, msc_tier last, bool now,
                           msc__place *out, msc_error *err);
void msc__place_give(msc_offload *engine, const msc__place *place, uint64_t bytes);

/** Whether copies between the device and the place need no staging buffer. */
bool msc__place_is_direct(const msc_offload *engine, const msc__place *place);

/** What a piece of `bytes` takes in the file, where each piece begins a page: whole pages. A staging buffer has
    room for it. */
uint64_t msc__place_file_bytes(uint64_t bytes);

/** Bytes of the staging buffers, which a tier has taken. */
uint64_t msc__place_staging_bytes(const msc_offload *engine);

/** Bytes that a tier has taken from the machine. */
uint64_t msc__place_taken_bytes(const msc_offload *engine, msc_tier tier);

/* offload_lane.c: what both directions share. */

msc_status msc__lane_init(msc_offload *engine, msc__lane *lane, msc_error *err);

/** Starts the thread: it takes what is submitted until the engine ends, and meanwhile ends the copies under way. */
msc_status msc__lane_start(msc__lane *lane, const msc__direction *direction, const char *name,
                           msc_error *err);
void msc__lane_fini(msc__lane *lane);

/** Passes a block to a lane. The mutex is held; it is released while the queue is full. A lane that sleeps goes on
    sleeping while there is little to do, until `msc__lane_wake`: a thread that asks for a result calls that. Returns whether
    the lane is to be roused. */
bool msc__lane_submit(msc__lane *lane, msc_ticket ticket, uint64_t bytes);

/** Wakes a lane. The mutex is not held: or else the lane, awake, would wait for it. */
void msc__lane_rouse(msc__lane *lane);

/** Wakes a lane that sleeps in spite of something to do. The mutex is held. */
void msc__lane_wake(msc__lane *lane);

/** Notes what a block's state is now; told before the lane waits. The mutex is not held. */
void msc__lane_report(msc__lane *lane, msc__block *block, uint32_t state);

/** Whether it is worth telling that a copy is on its stream: a small one on the host is over before anybody could make
    use of that. */
bool msc__lane_tells_issue(const msc__lane *lane, const msc__block *block);

/** Tells what was noted: before whatever waits, or takes long. The mutex is not held. */
void msc__lane_tell(msc__lane *lane);

/** Waits for an event, having told everything. On an error nothing is under way on the lane's stream any more. */
msc_status msc__lane_await(msc__lane *lane, void *event, msc_error *err);

/** Waits until nothing is under way on the lane's stream: a copy began, and no event can tell of its end. */
void msc__lane_finish(msc__lane *lane);

/** Notes the first failure of the copy under way. */
void msc__lane_fail(msc__lane *lane, msc__transfer *move, msc_status status, const msc_error *why);

/** Begins a block: all its pieces, while older copies end. */
void msc__lane_begin(msc__lane *lane, msc__block *block);

/** The item at a place in the order of their begin; 0 is the oldest. */
static inline msc__item *msc__lane_item(msc__lane *lane, uint32_t place)
{
    return &lane->items[(lane->first + place) % MSC__OFFLOAD_ITEMS];
}

/** The copy of the oldest item is over: its buffer is free, and the block has a piece less to wait for. */
void msc__lane_end_oldest(msc__lane *lane);

/* offload_out.c, offload_in.c */

extern const msc__direction msc__direction_out;
extern const msc__direction msc__direction_in;

/* offload_trace.c: counters and events. The mutex is held. */

/** The clock, if events are kept. The mutex need not be held. */
int64_t msc__trace_now(const msc_offload *engine);
void msc__trace_add(msc_offload *engine, msc_offload_event_kind kind, const msc__block *block,
                    int64_t begin_ns, int64_t end_ns);

/** Sum over a piece of a block that follows `sum`; order matters. */
uint64_t msc__checksum(uint64_t sum, const void *memory, uint64_t bytes);

#endif /* MSC_OFFLOAD_ENGINE_H */
