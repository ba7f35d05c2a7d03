/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file fingerprint.h
 * A number of 64 bits for the bytes of a tensor: were two results the same, bit for bit?
 *
 * A recompute shall give what its forward gave. Keeping a second copy to compare would cost the memory that the recompute
 * saves; a fingerprint costs one pass over the bytes, at the speed of memory, and 8 bytes.
 *
 * **What it tells.** Equal bytes, equal fingerprints: on every processor, for every instruction set and number of threads,
 * in every run. Other bytes, another fingerprint:
 *
 *     for certain   if they differ within one word of 64 bits, counted from the first byte; and so in a single number
 *     otherwise     with probability 1 - 2^-64, for data that were not made to collide. It is not a cryptographic hash
 *
 * Every byte counts with its place: exchanged rows, also at a distance of any power of two, give another fingerprint. So
 * does the length: zeros of different lengths differ. Dtype and shape do not count, as little as attributes that change how
 * stored bytes are read (PyTorch's conjugate and negative bits): who compares tensors compares those first.
 *
 * **Which bytes.** Each element of a tensor once, in the order of memory: dimensions by falling stride, those of equal stride
 * as they come. Gaps between rows do not count, and neither does a dimension of stride 0, which repeats elements. A tensor
 * that is dense in any order of its dimensions, such as a transposed one, is read as one range.
 *
 * **Samples.** With `one_in` N the bytes are divided into windows of N segments of MSC_FINGERPRINT_SEGMENT bytes, and one
 * segment of each is read: the first of all, the last of all, and between them one whose place in its window is fixed but
 * follows no pattern, so that no stride of the data meets it always or never. What fits into one window is read whole, and
 * then has the fingerprint that it has without samples. A difference outside of the samples is not seen: this is for
 * tensors whose differences reach others that are read whole.
 *
 * @code
 *     const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
 *     msc_fingerprint_tensor tensor = {values, sizeof *values, 2, sizes, strides};
 *
 *     msc_fingerprint(&tensor, MSC_FINGERPRINT_WHOLE, 1, &before, NULL);
 *     recompute(values);
 *     msc_fingerprint(&tensor, MSC_FINGERPRINT_WHOLE, 1, &after, NULL);
 * @endcode
 */
#ifndef MEMSCALE_FINGERPRINT_H
#define MEMSCALE_FINGERPRINT_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Values of `one_in`: all bytes, and as few as there is a use for (1/16). */
#define MSC_FINGERPRINT_WHOLE 1u
#define MSC_FINGERPRINT_SAMPLE 16u

/** Bytes that are read together where samples are. */
#define MSC_FINGERPRINT_SEGMENT 4096u

/** Most dimensions of a tensor. */
#define MSC_FINGERPRINT_DIMS 64u

/** A tensor, as it lies in memory. */
typedef struct msc_fingerprint_tensor {
    const void *data;     /**< the element with all indices 0; at any address. NULL only if there are none */
    uint64_t item_bytes;  /**< of an element, above 0 */
    uint32_t dim_count;   /**< 0: a single element */
    const int64_t *sizes; /**< `dim_count` of them, 0 or above */
    const int64_t *strides; /**< in elements, 0 or above. NULL: contiguous */
} msc_fingerprint_tensor;

/**
 * The fingerprint of a tensor.
 *
 * @param one_in       share of the bytes that is read, see above; at least 1.
 * @param thread_count threads that read, the caller's among them; 0: as many as PyTorch computes with. More than one only
 *                     in a process that has PyTorch with OpenMP, whose threads they are, and from 8 MiB on that
 *                     are read.
 * Errors: EINVAL (names the field), EOVERFLOW (more bytes than there are addresses).
 * Threads: any. Cost: allocates nothing. From a core's cache 20 GB/s with AVX2, from memory its bandwidth
 * (bench/python/fingerprint.py); rows that are not dense are copied on the way.
 */
MSC_API msc_status msc_fingerprint(const msc_fingerprint_tensor *tensor, uint32_t one_in,
                                   uint32_t thread_count, uint64_t *out, msc_error *err);

/** The fingerprint of a range of bytes, all of them, by the calling thread. `data` may be NULL if there are none. */
MSC_API uint64_t msc_fingerprint_bytes(const void *data, uint64_t bytes);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_FINGERPRINT_H */
