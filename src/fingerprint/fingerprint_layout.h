/* SPDX-License-Identifier: Apache-2.0 */
/** @file fingerprint_layout.h  A tensor as a stream of bytes: each element once, in the order of memory. */
#ifndef MSC_FINGERPRINT_LAYOUT_H
#define MSC_FINGERPRINT_LAYOUT_H

#include "memscale/fingerprint.h"

/** A dimension outside of the runs. */
typedef struct msc__fp_dim {
    uint64_t size;
    uint64_t stride_bytes;
} msc__fp_dim;

/** The stream: runs of bytes that lie together, in dimensions from the outermost. */
typedef struct msc__fp_layout {
    const unsigned char *data;
    uint64_t bytes;     /* of the stream */
    uint64_t run_bytes; /* all of them: the tensor is dense */
    uint32_t dim_count;
    msc__fp_dim dims[MSC_FINGERPRINT_DIMS];
} msc__fp_layout;

/** Errors: EINVAL, EOVERFLOW. */
msc_status msc__fp_layout_of(const msc_fingerprint_tensor *tensor, msc__fp_layout *out, msc_error *err);

/** Copies the bytes [begin, begin + count) of the stream, which has them. */
void msc__fp_gather(const msc__fp_layout *layout, uint64_t begin, uint64_t count, unsigned char *to);

/** Where byte `begin` of the stream lies, and how many lie together from there on. */
const unsigned char *msc__fp_piece(const msc__fp_layout *layout, uint64_t begin, uint64_t *bytes);

#endif /* MSC_FINGERPRINT_LAYOUT_H */
