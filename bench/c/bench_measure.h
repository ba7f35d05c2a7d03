/* SPDX-License-Identifier: Apache-2.0 */
/** @file bench_measure.h  What benchmarks have in common: the clock, the median, and giving up. */
#ifndef MSC_BENCH_MEASURE_H
#define MSC_BENCH_MEASURE_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/** Ends the program unless a condition holds, which `what` completes to "bench: ...". */
static inline void require(int condition, const char *what)
{
    if (!condition) {
        (void)fprintf(stderr, "bench: %s\n", what);
        exit(1);
    }
}

/** Monotonic time. */
static inline double seconds(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static inline int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;

    return (x > y) - (x < y);
}

/** The upper one of the two in the middle, where there are two. Sorts in place. */
static inline double median(double *values, size_t count)
{
    qsort(values, count, sizeof *values, compare_doubles);
    return values[count / 2];
}

#endif /* MSC_BENCH_MEASURE_H */
