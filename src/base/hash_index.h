/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file hash_index.h
 * Finds records by hash: the table behind interned strings and sets.
 *
 * It holds hashes and indices only; the records stay in their arrays, and the caller compares:
 *
 *      uint32_t probe = hash;
 *      while ((i = msc__hash_index_next(&index, hash, &probe)) != MSC_NONE)
 *          if (is_equal(&records[i], wanted))
 *              return i;
 *
 * A zeroed one is empty. It is never iterated, hence its layout cannot leak into any result.
 */
#ifndef MSC_BASE_HASH_INDEX_H
#define MSC_BASE_HASH_INDEX_H

#include "memscale/base.h"

typedef struct msc__hash_slot {
    uint32_t hash;
    uint32_t item; /**< index + 1; 0: empty */
} msc__hash_slot;

/** Open addressing, linear probing, at most half full. */
typedef struct msc__hash_index {
    msc__hash_slot *slots;
    uint32_t capacity; /**< power of two, or 0 */
    uint32_t count;
} msc__hash_index;

/**
 * Makes room for one more entry.
 * @param what the records, in the plural, for the message.
 * Errors: ENOMEM, EOVERFLOW (2^30 entries); nothing has changed then.
 */
msc_status msc__hash_index_reserve(msc_context *ctx, msc__hash_index *index, const char *what,
                                   msc_error *err);

/** Enters the index of a record. There must be room. */
void msc__hash_index_insert(msc__hash_index *index, uint32_t hash, uint32_t record);

/** Next record with this hash, or MSC_NONE. `*probe` is the hash at first. */
uint32_t msc__hash_index_next(const msc__hash_index *index, uint32_t hash, uint32_t *probe);

/** Releases the memory and makes it empty. */
void msc__hash_index_fini(msc_context *ctx, msc__hash_index *index);

#endif /* MSC_BASE_HASH_INDEX_H */
