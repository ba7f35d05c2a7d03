/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One copy on the host, with fault injection.
 *
 *      wait a while  | its time, half     | first half | pause | its time, half | second half
 *      delay_most_ns | bytes_per_second   |            split_ppm
 *
 * Time passes before bytes move, so a source that is given up too early is read when it holds something else, and
 * a result that is used too early is not there yet. The pause lets half of a copy be seen; a copy that is not
 * split moves all its bytes at its end.
 *
 * What happens to a copy depends on the seed and its number alone: each question is answered by a number of its
 * own, mixed from both (splitmix64: its output passes tests of randomness for consecutive inputs).
 */
#include <string.h>

#include "base/invariant.h"
#include "device/device_host.h"

#define MILLION 1000000u
#define SECOND_NS 1000000000.0
#define PAUSE_LEAST_NS 20000 /* twice what a switch of threads takes */

/* What is asked of chance, for each copy. */
enum question { QUESTION_DELAY, QUESTION_SPLIT, QUESTION_PAUSE, QUESTION_FAIL, QUESTION_COUNT };

static uint64_t draw(uint64_t seed, uint64_t number, enum question question)
{
    uint64_t z = seed + (number * QUESTION_COUNT + (uint64_t)question + 1) * 0x9e3779b97f4a7c15u;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int64_t draw_ns(const msc_device_faults *faults, uint64_t number, enum question question)
{
    MSC__ASSERT(faults->delay_most_ns >= 0);
    if (faults->delay_most_ns == 0)
        return 0;
    return (int64_t)(draw(faults->seed, number, question) % ((uint64_t)faults->delay_most_ns + 1));
}

static int happens(const msc_device_faults *faults, uint64_t number, enum question question,
                   uint32_t share_ppm)
{
    MSC__ASSERT(share_ppm <= MILLION);
    return share_ppm > 0 && draw(faults->seed, number, question) % MILLION < share_ppm;
}

/* What `bytes` take at the speed that is allowed. */
static int64_t travel_ns(const msc_device_faults *faults, size_t bytes)
{
    if (faults->bytes_per_second == 0)
        return 0;
    return (int64_t)((double)bytes / (double)faults->bytes_per_second * SECOND_NS);
}

static void pass_time(int64_t ns)
{
    if (ns > 0)
        msc__sleep_ns(ns);
}

bool msc__host_copies_plainly(const msc_device_faults *faults)
{
    return faults->delay_most_ns == 0 && faults->bytes_per_second == 0 && faults->split_ppm == 0 &&
           faults->fail_ppm == 0;
}

void msc__host_copy_run(const msc_device_faults *faults, const msc__host_copy *copy,
                        msc__host_failure *failure)
{
    size_t bytes = (size_t)copy->bytes;
    size_t first = happens(faults, copy->number, QUESTION_SPLIT, faults->split_ppm) ? bytes / 2 : bytes;

    MSC__ASSERT(bytes > 0 && bytes == copy->bytes && first <= bytes);
    pass_time(draw_ns(faults, copy->number, QUESTION_DELAY));
    if (happens(faults, copy->number, QUESTION_FAIL, faults->fail_ppm)) {
        failure->status = MSC_EDRIVER;
        failure->kind = copy->kind;
        failure->bytes = copy->bytes;
        failure->number = copy->number;
        return;
    }
    pass_time(travel_ns(faults, first));
    memcpy(copy->to, copy->from, first);
    if (first == bytes)
        return;
    pass_time(PAUSE_LEAST_NS + draw_ns(faults, copy->number, QUESTION_PAUSE) +
              travel_ns(faults, bytes - first));
    memcpy((char *)copy->to + first, (const char *)copy->from + first, bytes - first);
}
