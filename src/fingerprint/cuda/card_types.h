/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file card_types.h
 * What the kernel of fingerprints is given, copied by the driver when it is submitted, and what it leaves behind.
 *
 * Read by the library, which fills it, and by what compiles the kernel.
 */
#ifndef MSC_FINGERPRINT_CARD_TYPES_H
#define MSC_FINGERPRINT_CARD_TYPES_H

#include "device/cuda/card_group.h"
#include "fingerprint/fingerprint_layout.h"
#include "fingerprint/fingerprint_samples.h"

/** Blocks of the hash that a group reads at a time, a thread for each lane; and most groups of a launch. */
#define MSC__FP_AT_A_TIME (MSC__CARD_THREADS / MSC__FP_LANES)
#define MSC__FP_MOST_GROUPS 2048u

/** What a table has on the card in front of its slots. One launch after the other has it. */
typedef struct msc__fp_state {
    uint64_t sum;     /* of the launch in progress; 0 between launches */
    uint64_t arrived; /* groups of it that have added theirs; 0 between launches */
    uint64_t differences;
    uint64_t tag; /* of the first difference, and its values */
    uint64_t kept;
    uint64_t found;
} msc__fp_state;

/** A tensor to read, and where its fingerprint goes. */
typedef struct msc__fp_launch {
    const unsigned char *data;
    uint64_t bytes;     /* of the stream */
    uint64_t run_bytes; /* see msc__fp_layout */
    msc__fp_samples samples;
    msc__fp_state *state;
    uint64_t *slot;
    uint64_t tag;
    uint32_t compares; /* 0: the slot gets the value; else it has one, and the difference is noted */
    uint32_t groups;
    uint32_t grain; /* 8, 4, 2 or 1 bytes, which divide every address that is read but the last word's */
    uint32_t dim_count;
    msc__fp_dim dims[MSC_FINGERPRINT_DIMS];
} msc__fp_launch;

#endif /* MSC_FINGERPRINT_CARD_TYPES_H */
