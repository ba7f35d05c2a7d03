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
 *
 * **On a card** the values stay there: a table of slots has the fingerprints that are kept, and what is compared with them
 * is noted beside it. Nobody waits until the result is read, once for all of them.
 *
 * @code
 *     msc_fingerprint_keep(table, &tensor, MSC_FINGERPRINT_WHOLE, stream, &slot, NULL);
 *     recompute_on(stream, values);
 *     msc_fingerprint_compare(table, slot, &tensor, MSC_FINGERPRINT_WHOLE, 7, stream, NULL);
 *     msc_fingerprint_release(table, slot);
 *     …
 *     msc_fingerprint_read(table, &result, NULL);      waits
 *     if (result.differences > 0)
 *         printf("number %llu differs", (unsigned long long)result.tag);
 * @endcode
 */
#ifndef MEMSCALE_FINGERPRINT_H
#define MEMSCALE_FINGERPRINT_H

#include "base.h"
#include "device.h"

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
MSC_API MSC_NODISCARD msc_status msc_fingerprint(const msc_fingerprint_tensor *tensor, uint32_t one_in,
                                                 uint32_t thread_count, uint64_t *out, msc_error *err);

/** The fingerprint of a range of bytes, all of them, by the calling thread. `data` may be NULL if there are none. */
MSC_API uint64_t msc_fingerprint_bytes(const void *data, uint64_t bytes);

/* ---- on a card ----------------------------------------------------------------------------------------------- */

/** Bytes of a slot on the card, and those that a table has beside its slots. */
#define MSC_FINGERPRINT_SLOT_BYTES 8u
#define MSC_FINGERPRINT_TABLE_BYTES 64u

/** Most slots of a table. */
#define MSC_FINGERPRINT_MOST_SLOTS (1u << 24)

/** Options of a table. */
typedef struct msc_fingerprint_table_options {
    size_t struct_bytes; /**< sizeof(msc_fingerprint_table_options) */
    msc_device *device;  /**< a card; outlives the table */
    uint32_t
        slot_count; /**< fingerprints kept at a time, 1 to MSC_FINGERPRINT_MOST_SLOTS; 65536 if not set */
} msc_fingerprint_table_options;

/** What a table has found since it was read last. Without a difference the other fields are 0. */
typedef struct msc_fingerprint_differences {
    uint64_t differences; /**< comparisons that found another value */
    uint64_t tag;         /**< of the first of them, in the order of the calls */
    uint64_t kept;        /**< its value in the slot */
    uint64_t found;       /**< and that of the tensor that was compared */
} msc_fingerprint_differences;

/**
 * Fingerprints on a card: the values of `msc_fingerprint`, bit for bit, of tensors in the card's memory, at any address and in
 * any layout.
 *
 * All calls of a table happen on the card in the order in which they are made here, whatever streams they name: a stream waits
 * for the one before it. Each call comes behind what its stream was given before, so a caller that submits what makes a tensor, then
 * the call, then what overwrites the tensor, to one stream, need not wait for anything. No stream may be one that is being
 * captured.
 */
typedef struct msc_fingerprint_table msc_fingerprint_table;

/** 65536 slots, and no device. */
MSC_API void msc_fingerprint_table_options_init(msc_fingerprint_table_options *options, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_fingerprint_table_options msc_fingerprint_table_options_default(void)
{
    msc_fingerprint_table_options options;

    msc_fingerprint_table_options_init(&options, sizeof options);
    return options;
}

/**
 * Makes a table. Compiles the kernel where the device does not have it yet: some tenths of a second. On the card it takes
 * MSC_FINGERPRINT_TABLE_BYTES and MSC_FINGERPRINT_SLOT_BYTES for each slot, from the driver; here 4 bytes for each slot.
 *
 * @param ctx as of the device: one thread uses both at a time, during create and destroy only.
 * @param out the caller owns the result and ends it with `msc_fingerprint_table_destroy`, before the device.
 * Errors: EINVAL (names the field), EUNSUPPORTED (the device is no card, or has no compiler), ENOMEM, EDEVMEM, EDRIVER, ESTATE.
 */
MSC_API MSC_NODISCARD msc_status msc_fingerprint_table_create(msc_context *ctx,
                                                              const msc_fingerprint_table_options *options,
                                                              msc_fingerprint_table **out, msc_error *err);

/** Ends a table, when the card has done what it was given. NULL is accepted. */
MSC_API void msc_fingerprint_table_destroy(msc_fingerprint_table *table);

/**
 * Puts the fingerprint of a tensor into a slot.
 *
 * @param tensor its data are on the card; they must stay until `stream` has come to this call.
 * @param stream the driver's handle of a stream of the card; NULL: the default one.
 * @param slot   the caller's until `msc_fingerprint_release`.
 * Errors: EINVAL, EOVERFLOW (both as `msc_fingerprint`), EAGAIN (no slot is free: release some), EDRIVER, ESTATE (a process that
 * was forked). After an error no slot is taken.
 * Threads: any, one at a time; another one waits. Cost: one kernel; allocates nothing, waits for nothing.
 */
MSC_API MSC_NODISCARD msc_status msc_fingerprint_keep(msc_fingerprint_table *table,
                                                      const msc_fingerprint_tensor *tensor, uint32_t one_in,
                                                      void *stream, uint32_t *slot, msc_error *err);

/**
 * Compares a tensor with the fingerprint in a slot, which stays. The result is the next `msc_fingerprint_read`'s.
 *
 * @param one_in as the slot's fingerprint was made with.
 * @param tag    names this comparison in the result.
 * Errors, threads, cost: as `msc_fingerprint_keep`, without EAGAIN; EINVAL too for a slot that has no fingerprint.
 */
MSC_API MSC_NODISCARD msc_status msc_fingerprint_compare(msc_fingerprint_table *table, uint32_t slot,
                                                         const msc_fingerprint_tensor *tensor,
                                                         uint32_t one_in, uint64_t tag, void *stream,
                                                         msc_error *err);

/**
 * Gives a slot back, which the next `msc_fingerprint_keep` may have: what it submits comes behind all that reads the slot.
 * One that is not taken is left alone. Threads: any. Cost: asks nothing of the card.
 */
MSC_API void msc_fingerprint_release(msc_fingerprint_table *table, uint32_t slot);

/**
 * What comparisons have found since the last call of this. Waits for those that were submitted, and so for what their streams
 * had before; for nothing if there are none.
 *
 * Errors: EINVAL, EDRIVER (what was compared is not known; the next read tells it), ESTATE.
 * Threads: as `msc_fingerprint_keep`. Cost: a copy of 48 bytes; allocates nothing.
 */
MSC_API MSC_NODISCARD msc_status msc_fingerprint_read(msc_fingerprint_table *table,
                                                      msc_fingerprint_differences *out, msc_error *err);

/** The value in a slot, when it is there: for tests and for showing it. Errors as `msc_fingerprint_compare`. Waits. */
MSC_API MSC_NODISCARD msc_status msc_fingerprint_value(msc_fingerprint_table *table, uint32_t slot,
                                                       uint64_t *out, msc_error *err);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_FINGERPRINT_H */
