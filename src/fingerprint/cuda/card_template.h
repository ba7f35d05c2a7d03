/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file card_template.h
 * The kernel of fingerprints, in the macros of device/cuda/card_macros.h, which what includes it has defined.
 *
 *     stream    ■■■■■■■■│■■■■■■■■│■■■■■■■■│…      a group reads eight blocks at a time, and goes on behind what all groups read
 *     block     16 threads, a lane each            a row is 128 bytes that lie together
 *
 * Each group adds its sum to the card's. The last one to come knows that it is the last, ends the value and puts it away or
 * compares it; so a fingerprint is one launch.
 */
#ifndef MSC_FINGERPRINT_CARD_TEMPLATE_H
#define MSC_FINGERPRINT_CARD_TEMPLATE_H

#include "fingerprint/fingerprint_core.h"
/* after it */
#include "fingerprint/cuda/card_types.h"

#define MSC__FP_SEGMENT_BLOCKS (MSC_FINGERPRINT_SEGMENT / MSC__FP_BLOCK_BYTES)

/** Of a thread: the sum of its lanes; then, in each first lane, of sixteen threads. */
typedef struct msc__fp_part {
    uint64_t sum;
} msc__fp_part;

/** What the threads of a group show each other. */
typedef struct msc__fp_shown {
    uint64_t sum[MSC__FP_AT_A_TIME];
} msc__fp_shown;

/** Quotient and rest. A card divides numbers of 32 bits in a fraction of the time. */
MSC__CORE uint64_t msc__fp_divide(uint64_t x, uint64_t by, uint64_t *rest)
{
    if ((x | by) <= 0xFFFFFFFFu) {
        *rest = (uint32_t)x % (uint32_t)by;
        return (uint32_t)x / (uint32_t)by;
    }
    *rest = x % by;
    return x / by;
}

/** Where a byte of the stream lies. */
MSC__CORE const unsigned char *msc__fp_place(const msc__fp_launch *by, uint64_t at)
{
    const unsigned char *place = by->data;
    uint64_t rest;
    uint32_t d;

    if (by->dim_count == 0)
        return place + at;
    at = msc__fp_divide(at, by->run_bytes, &rest);
    place += rest;
    for (d = by->dim_count; d-- > 0;) {
        at = msc__fp_divide(at, by->dims[d].size, &rest);
        place += rest * by->dims[d].stride_bytes;
    }
    return place;
}

MSC__CORE uint64_t msc__fp_load(const unsigned char *at, uint32_t bytes)
{
    switch (bytes) {
    case 8:
        return *(const uint64_t *)(const void *)at;
    case 4:
        return *(const uint32_t *)(const void *)at;
    case 2:
        return *(const uint16_t *)(const void *)at;
    default:
        return *at;
    }
}

/** A word of the stream, from as many pieces as its place allows; zeros behind the end. */
MSC__CORE uint64_t msc__fp_word(const msc__fp_launch *by, uint64_t at)
{
    uint32_t grain = by->bytes - at >= 8 ? by->grain : 1;
    uint64_t word = 0;
    uint32_t i;

    for (i = 0; i < 8 && at + i < by->bytes; i += grain)
        word |= msc__fp_load(msc__fp_place(by, at + i), grain) << 8 * i;
    return word;
}

/** A lane of a whole block that lies together: all its words are on their way before the first is waited for. */
MSC__CORE uint64_t msc__fp_dense_lane(const unsigned char *at, uint64_t state)
{
    uint64_t words[MSC__FP_ROWS];
    uint32_t row;

    MSC__UNROLL
    for (row = 0; row < MSC__FP_ROWS; row++)
        words[row] = msc__fp_load(at + (uint64_t)row * MSC__FP_ROW_BYTES, 8);
    MSC__UNROLL
    for (row = 0; row < MSC__FP_ROWS; row++)
        state = msc__fp_step(state + words[row]);
    return msc__fp_mix(state);
}

/** A lane of a block that has at least a byte. */
MSC__CORE uint64_t msc__fp_lane(const msc__fp_launch *by, uint64_t block, uint32_t lane)
{
    uint64_t at = block * MSC__FP_BLOCK_BYTES + lane * 8u;
    uint64_t state = msc__fp_key(block, lane);
    uint32_t row;

    if (by->dim_count == 0 && by->grain == 8 && by->bytes / MSC__FP_BLOCK_BYTES > block)
        return msc__fp_dense_lane(by->data + at, state);
    for (row = 0; row < MSC__FP_ROWS; row++, at += MSC__FP_ROW_BYTES)
        state = msc__fp_step(state + (at < by->bytes ? msc__fp_word(by, at) : 0));
    return msc__fp_mix(state);
}

/** What a thread adds up of the blocks that are read. */
MSC__CORE void msc__fp_add_up(const msc__fp_launch *by, uint32_t group, uint32_t thread, msc__fp_part *part)
{
    uint64_t turn = (uint64_t)group * MSC__FP_AT_A_TIME + thread / MSC__FP_LANES;
    uint64_t turns = by->samples.windows * MSC__FP_SEGMENT_BLOCKS;

    part->sum = 0;
    for (; turn < turns; turn += (uint64_t)by->groups * MSC__FP_AT_A_TIME) {
        uint64_t segment = msc__fp_sample(&by->samples, turn / MSC__FP_SEGMENT_BLOCKS);
        uint64_t block = segment * MSC__FP_SEGMENT_BLOCKS + turn % MSC__FP_SEGMENT_BLOCKS;

        if (block * MSC__FP_BLOCK_BYTES < by->bytes)
            part->sum += msc__fp_lane(by, block, thread % MSC__FP_LANES);
    }
}

MSC__CORE void msc__fp_show(uint32_t thread, const msc__fp_part *part, msc__fp_shown *shown)
{
    if (thread % MSC__FP_LANES == 0)
        shown->sum[thread / MSC__FP_LANES] = part->sum;
}

/** What becomes of a fingerprint. */
MSC__CORE void msc__fp_conclude(const msc__fp_launch *by, uint64_t value)
{
    msc__fp_state *state = by->state;

    if (by->compares == 0) {
        *by->slot = value;
    } else if (*by->slot != value) {
        if (state->differences == 0) {
            state->tag = by->tag;
            state->kept = *by->slot;
            state->found = value;
        }
        state->differences++;
    }
}

/** One thread of a group adds what has been shown; that of the last group has all of it. */
MSC__CORE void msc__fp_finish(const msc__fp_launch *by, uint32_t thread, const msc__fp_shown *shown)
{
    uint64_t sum = 0;
    uint32_t i;

    if (thread != 0)
        return;
    for (i = 0; i < MSC__FP_AT_A_TIME; i++)
        sum += shown->sum[i];
    (void)MSC__ATOMIC_ADD(&by->state->sum, sum);
    MSC__FENCE();
    if (MSC__ATOMIC_ADD(&by->state->arrived, (uint64_t)1) + 1 != by->groups)
        return;
    MSC__FENCE();
    sum = MSC__ATOMIC_ADD(&by->state->sum, (uint64_t)0);
    by->state->sum = 0;
    by->state->arrived = 0;
    msc__fp_conclude(by, msc__fp_end(sum, by->bytes));
}

MSC__KERNEL(msc_card_fingerprint, msc__fp_launch)
{
    MSC__PER_THREAD(msc__fp_part, part);
    MSC__SHARED(msc__fp_shown, shown);

    MSC__PHASE(t, msc__fp_add_up(&by, MSC__GROUP, t, &MSC__OWN(part, t)));
    MSC__FOLD(part, sum);
    MSC__PHASE(t, msc__fp_show(t, &MSC__OWN(part, t), &shown));
    MSC__PHASE(t, msc__fp_finish(&by, t, &shown));
}

#endif /* MSC_FINGERPRINT_CARD_TEMPLATE_H */
