/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file team.h
 * Threads that the process has already: the team with which PyTorch computes, if it is one of OpenMP.
 *
 * Members of such a team wait awake for some milliseconds after each parallel region. What we do in a training loop follows
 * operations of PyTorch, so they still turn on the very cores that threads of ours would need; but as members they begin
 * at once.
 */
#ifndef MSC_BASE_TEAM_H
#define MSC_BASE_TEAM_H

/**
 * Runs `work` in each of `threads` threads, or of fewer, the caller among them; returns when it has returned in all.
 * 0: in as many as the program has set for its parallel regions.
 */
typedef void (*msc__team_run)(void (*work)(void *), void *job, unsigned threads, unsigned flags);

typedef struct msc__team {
    msc__team_run run; /* NULL: there is no team */
    void *library;     /* whose dependency has `run`; held open as long as the team is used */
} msc__team;

/** What there is. None in a child of fork, if this library was there before: the runtime believes that its parent's
 * threads are still there. */
msc__team msc__team_find(void);
void msc__team_leave(msc__team *team);

#endif /* MSC_BASE_TEAM_H */
