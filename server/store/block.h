/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file block.h
 * Points of a series packed into bytes, and what a block says of them without being unpacked. Knows no store.
 */
#ifndef MSC_SERVER_BLOCK_H
#define MSC_SERVER_BLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Points of a full block. */
#define BLOCK_POINTS 512u
/** Most bytes of a packed block: its kind, two varints and a value of at most 10 bytes each. */
#define BLOCK_BYTES (1u + BLOCK_POINTS * 30u)

typedef struct block_point {
    int64_t step;
    int64_t time_ms;
    double value; /**< any, NaN and infinities too */
} block_point;

/**
 * What is known of a set of points. Minimum, maximum and sum leave NaN out: NaN where there is nothing else.
 */
typedef struct block_summary {
    int64_t count;
    int64_t nans;
    int64_t first_step; /**< smallest */
    int64_t last_step;  /**< largest */
    int64_t last_time_ms;
    double min;
    double max;
    double sum;
    double last; /**< of the last that arrived */
} block_summary;

/** Of no points. */
block_summary block_summary_empty(void);
void block_summary_add(block_summary *summary, const block_point *point);
/** Adds what arrived after it. Either may be empty. */
void block_summary_merge(block_summary *summary, const block_summary *later);
/** Sum by the points that are not NaN; NaN without any. */
double block_summary_mean(const block_summary *summary);

/** Packs up to BLOCK_POINTS into at most BLOCK_BYTES; returns how many bytes. */
size_t block_pack(const block_point *points, uint32_t count, uint8_t *into);

/**
 * Unpacks `count` points. False, with nothing said of `points`, unless the bytes are exactly what holds so
 * many.
 */
bool block_unpack(const uint8_t *data, size_t bytes, uint32_t count, block_point *points);

#endif /* MSC_SERVER_BLOCK_H */
