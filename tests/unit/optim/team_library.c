/* SPDX-License-Identifier: Apache-2.0 */
#include "team_library.h"

#include <pthread.h>
#include <stdlib.h>

#define MOST 16u

static unsigned calls;
static unsigned limit = MOST;

typedef struct region {
    void (*work)(void *);
    void *job;
} region;

static void *run_member(void *argument)
{
    const region *here = argument;

    here->work(here->job);
    return NULL;
}

TEAM_SEEN void GOMP_parallel(void (*work)(void *), void *job, unsigned threads, unsigned flags);

void GOMP_parallel(void (*work)(void *), void *job, unsigned threads, unsigned flags)
{
    region here = {work, job};
    pthread_t others[MOST];
    unsigned i;

    calls++;
    if (flags != 0)
        abort();
    threads = threads > 0 && threads < limit ? threads : limit; /* 0: as many as there are */
    for (i = 1; i < threads; i++)
        if (pthread_create(&others[i], NULL, run_member, &here) != 0)
            abort();
    work(job);
    for (i = 1; i < threads; i++)
        (void)pthread_join(others[i], NULL);
}

unsigned team_calls(void)
{
    return calls;
}

void team_limit(unsigned threads)
{
    limit = threads;
}
