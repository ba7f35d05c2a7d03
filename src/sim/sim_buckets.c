/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Working memory and buckets.
 *
 * The counting sort needs no second array of cursors. Counts are taken two places ahead, so that after
 * summing, first[p + 1] is where the next item of position p goes, and after placing it is where they end:
 *
 *      counting   first[p + 2]++
 *      summing    first[p + 1] = number of items before position p
 *      placing    items[first[p + 1]++] = item
 *      afterwards items of p are items[first[p]] .. items[first[p + 1] - 1]
 */
#include "sim/sim_buckets.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"

void *msc__scratch_take(msc__scratch *scratch, size_t count, size_t item_bytes)
{
    size_t bytes = SIZE_MAX;
    void *at = NULL;

    if (scratch->failed_bytes > 0)
        return NULL;
    if (msc__mul_size(count > 0 ? count : 1, item_bytes, &bytes) && scratch->count < MSC__SCRATCH_MOST)
        at = msc__alloc(scratch->ctx, bytes);
    if (at == NULL) {
        scratch->failed_bytes = bytes;
        return NULL;
    }
    scratch->at[scratch->count] = at;
    scratch->bytes[scratch->count] = bytes;
    scratch->count++;
    return at;
}

msc_status msc__scratch_check(const msc__scratch *scratch, const char *what, msc_error *err)
{
    if (scratch->failed_bytes > 0)
        return msc__fail_memory(err, what, scratch->failed_bytes);
    return MSC_OK;
}

void msc__scratch_fini(msc__scratch *scratch)
{
    while (scratch->count > 0) {
        scratch->count--;
        msc__free(scratch->ctx, scratch->at[scratch->count], scratch->bytes[scratch->count]);
    }
    scratch->failed_bytes = 0;
}

void msc__buckets_init(msc__scratch *scratch, msc__buckets *buckets, uint32_t position_count)
{
    buckets->first = msc__scratch_take(scratch, (size_t)position_count + 2, sizeof *buckets->first);
    buckets->items = NULL;
    buckets->position_count = position_count;
    buckets->item_count = 0;
}

void msc__buckets_add(msc__buckets *buckets, uint32_t position, uint32_t item)
{
    if (buckets->first == NULL)
        return;
    MSC__ASSERT(position < buckets->position_count);
    if (buckets->items == NULL) {
        buckets->first[position + 2]++;
        buckets->item_count++;
    } else {
        MSC__ASSERT(buckets->first[position + 1] <
                    buckets->first[position + 2]); /* as many as were counted */
        buckets->items[buckets->first[position + 1]++] = item;
    }
}

void msc__buckets_place(msc__scratch *scratch, msc__buckets *buckets)
{
    uint32_t p;

    if (buckets->first == NULL)
        return;
    for (p = 2; p < buckets->position_count + 2; p++)
        buckets->first[p] += buckets->first[p - 1];
    MSC__ASSERT(buckets->items == NULL);
    MSC__ASSERT(buckets->first[buckets->position_count + 1] <= buckets->item_count);
    buckets->items = msc__scratch_take(scratch, buckets->item_count, sizeof *buckets->items);
    if (buckets->items == NULL)
        buckets->first = NULL;
}
