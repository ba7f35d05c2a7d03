/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file decide_walker.h
 * A walker: one set of candidates that moves, with its exact peak and time, and offers what it sees.
 *
 * decide_walker.c   the set, moves, undo
 * decide_search.c   the walks
 * decide_improve.c  local improvement of the frontier, and the exhaustive walk
 *
 * The set is always an antichain: no active candidate lies inside another. A move is logged while it is made,
 * so that it can be undone; what is not undone stays.
 */
#ifndef MSC_DECIDE_WALKER_H
#define MSC_DECIDE_WALKER_H

#include "decide/decide_fit.h"
#include "decide/decide_frontier.h"

#define MSC__FEW_CANDIDATES 40u /* up to here every candidate is tried, beyond only the ends of groups */
#define MSC__MOST_GROUPS 96u    /* groups that are tried, the most rewarding ones */

typedef enum msc__move_kind {
    MSC__MOVE_NONE,
    MSC__MOVE_ADD,        /**< a candidate, in place of all that overlap it */
    MSC__MOVE_DROP,       /**< an active candidate */
    MSC__MOVE_SPLIT,      /**< an active candidate gives way to the outermost modules inside it */
    MSC__MOVE_GROUP,      /**< every member of a group, as by ADD */
    MSC__MOVE_SPLIT_GROUP /**< every active member of a group, as by SPLIT */
} msc__move_kind;

typedef struct msc__move {
    msc__move_kind kind;
    uint32_t id; /**< candidate, or group */
} msc__move;

typedef struct msc__walker {
    const msc__model *model;
    msc__fit *fit;
    msc__frontier *frontier;
    msc_error *err;
    msc_status status;      /**< the first failure; everything does nothing after it */
    uint64_t *set;          /**< the present set */
    uint64_t *start;        /**< a set to come back to */
    uint32_t *covered;      /**< per candidate: active ones above it */
    uint32_t *split;        /**< per candidate: active ones below it */
    uint32_t *log;          /**< candidates changed by the present move */
    uint32_t *by_cost;      /**< usable candidates, dearest first, then in module order */
    uint32_t *by_cost_late; /**< likewise, but of equal ones the last module first */
    uint32_t *entering;     /**< candidates that a neighbour adds */
    uint32_t *leaving;      /**< candidates that a neighbour drops */
    uint32_t *by_merit;     /**< groups, most saved bytes per nanosecond first */
    uint32_t log_count;
    int64_t added_ns;    /**< of the present set */
    uint64_t peak_bytes; /**< of the set evaluated last */
    uint64_t work;       /**< still allowed: blocks of the fit visited, or as much of anything else */
    uint32_t most_plans; /**< the frontier is thinned when it holds more */
} msc__walker;

static inline bool msc__walker_has(const msc__walker *s, uint32_t candidate)
{
    return msc__set_has(s->set, candidate);
}

/** False when memory or the allowed effort has run out. */
static inline bool msc__walker_may_go_on(const msc__walker *s)
{
    return s->status == MSC_OK && s->work > 0;
}

/** Holds back all work but a share, and gives what is held back; it is to be added again. */
static inline uint64_t msc__walker_hold(msc__walker *s, uint64_t share)
{
    uint64_t held = s->work > share ? s->work - share : 0;

    s->work -= held;
    return held;
}

/** Work of one evaluation. */
static inline uint64_t msc__walker_visit(const msc__walker *s)
{
    return (uint64_t)s->fit->block_count + 64;
}

/** Peak of the present set, which is offered to the frontier. */
uint64_t msc__walker_evaluate(msc__walker *s);

/** Goes to a set; NULL: the empty one. */
void msc__walker_go_to(msc__walker *s, const uint64_t *target);

/** Notes the smallest plan so far in `start`, without going there. */
void msc__walker_note_smallest(msc__walker *s);

/** Makes a move; undo takes it back. */
void msc__walker_make(msc__walker *s, msc__move move);

/** Makes a move on top of the last one; undo takes both back. */
void msc__walker_extend(msc__walker *s, msc__move move);
void msc__walker_undo(msc__walker *s);

/** First or last member of a group that is active, or that is neither active nor covered; or MSC_NONE. */
uint32_t msc__walker_end_member(const msc__walker *s, uint32_t group, bool active, bool last);

/* decide_improve.c */

/** Looks at the neighbours of every plan of the frontier, and of every plan that this adds. */
void msc__walk_improve(msc__walker *s);

/** Looks at every antichain, if there are at most `most` of them. */
void msc__walk_everywhere(msc__walker *s, uint64_t most);

#endif /* MSC_DECIDE_WALKER_H */
