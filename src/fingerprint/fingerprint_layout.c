/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From sizes and strides to a stream of bytes.
 *
 *     a slice of 3 columns in rows of 5        transposed [4, 3] of [3, 4]        expanded [2, 9] of [2, 1]
 *
 *     ■ ■ ■ · ·                                strides (1, 4)                     strides (1, 0)
 *     ■ ■ ■ · ·     runs of 3 elements,        sorted (4, 1): dense,              the dimension of stride 0 goes:
 *     ■ ■ ■ · ·     3 of them, 5 apart         one run of 12                      one run of 2
 *
 * Dimensions of size 1 and of stride 0 go, the others are sorted by falling stride, and each that continues the next one
 * is joined with it. What overlaps (windows of `unfold`) is read as often as it has elements.
 */
#include "fingerprint/fingerprint_layout.h"

#include <stdbool.h>
#include <string.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/invariant.h"

static void insert(msc__fp_layout *layout, msc__fp_dim dim)
{
    uint32_t at = layout->dim_count++;

    MSC__ASSERT(at < MSC_FINGERPRINT_DIMS && dim.size > 1 && dim.stride_bytes > 0);
    for (; at > 0 && layout->dims[at - 1].stride_bytes < dim.stride_bytes; at--)
        layout->dims[at] = layout->dims[at - 1];
    layout->dims[at] = dim;
}

/* A dimension that steps over just what the one inside of it covers is one with it. */
static void join(msc__fp_layout *layout, uint64_t item_bytes)
{
    uint32_t kept = 0;
    uint32_t i;

    for (i = 0; i < layout->dim_count; i++) {
        msc__fp_dim dim = layout->dims[i];
        uint64_t covered;

        MSC__ASSERT(kept <= i && (kept == 0 || layout->dims[kept - 1].stride_bytes >= dim.stride_bytes));
        if (kept > 0 && msc__mul_u64(dim.size, dim.stride_bytes, &covered) &&
            layout->dims[kept - 1].stride_bytes == covered)
            layout->dims[kept - 1] = (msc__fp_dim){layout->dims[kept - 1].size * dim.size, dim.stride_bytes};
        else
            layout->dims[kept++] = dim;
    }
    layout->run_bytes = item_bytes;
    if (kept > 0 && layout->dims[kept - 1].stride_bytes == item_bytes)
        layout->run_bytes *= layout->dims[--kept].size;
    layout->dim_count = kept;
    MSC__ASSERT(layout->run_bytes > 0 && layout->bytes % layout->run_bytes == 0);
}

static msc_status check(const msc_fingerprint_tensor *tensor, msc_error *err)
{
    uint32_t i;

    if (tensor->item_bytes == 0)
        return msc__fail(err, MSC_EINVAL, "item_bytes is 0, allowed are 1 and above");
    if (tensor->dim_count > MSC_FINGERPRINT_DIMS)
        return msc__fail(err, MSC_EINVAL, "dim_count is %u, allowed are 0 to %u", tensor->dim_count,
                         MSC_FINGERPRINT_DIMS);
    if (tensor->dim_count > 0 && tensor->sizes == NULL)
        return msc__fail(err, MSC_EINVAL, "sizes is NULL");
    for (i = 0; i < tensor->dim_count; i++) {
        if (tensor->sizes[i] < 0)
            return msc__fail(err, MSC_EINVAL, "size %u is %lld, allowed are 0 and above", i,
                             (long long)tensor->sizes[i]);
        if (tensor->strides != NULL && tensor->strides[i] < 0)
            return msc__fail(err, MSC_EINVAL, "stride %u is %lld, allowed are 0 and above", i,
                             (long long)tensor->strides[i]);
    }
    return MSC_OK;
}

/* Dimensions from the innermost, so that strides that are not given can be counted. False: too many bytes. */
static bool collect(const msc_fingerprint_tensor *tensor, msc__fp_layout *layout)
{
    msc__fp_dim found[MSC_FINGERPRINT_DIMS];
    uint64_t contiguous = tensor->item_bytes;
    bool fits = true;
    uint32_t i;

    for (i = tensor->dim_count; i-- > 0;) {
        uint64_t size = (uint64_t)tensor->sizes[i];

        MSC__ASSERT(tensor->sizes[i] > 0);
        found[i] = (msc__fp_dim){size, contiguous};
        if (tensor->strides != NULL && size > 1)
            fits = msc__mul_u64((uint64_t)tensor->strides[i], tensor->item_bytes, &found[i].stride_bytes) &&
                   fits;
        fits = msc__mul_u64(contiguous, size, &contiguous) && fits;
    }
    for (i = 0; i < tensor->dim_count; i++) {
        if (found[i].size <= 1 || found[i].stride_bytes == 0)
            continue;
        insert(layout, found[i]);
        fits = msc__mul_u64(layout->bytes, found[i].size, &layout->bytes) && fits;
    }
    return fits;
}

msc_status msc__fp_layout_of(const msc_fingerprint_tensor *tensor, msc__fp_layout *out, msc_error *err)
{
    msc_status status = check(tensor, err);
    uint32_t i;

    if (status != MSC_OK)
        return status;
    out->data = tensor->data;
    out->dim_count = 0;
    out->bytes = out->run_bytes = 0;
    for (i = 0; i < tensor->dim_count; i++)
        if (tensor->sizes[i] == 0)
            return MSC_OK;
    if (tensor->data == NULL)
        return msc__fail(err, MSC_EINVAL, "data is NULL, and the tensor has elements");
    out->bytes = tensor->item_bytes;
    if (!collect(tensor, out))
        return msc__fail(err, MSC_EOVERFLOW, "the tensor has more bytes than there are addresses");
    join(out, tensor->item_bytes);
    return MSC_OK;
}

/* ---- reading ------------------------------------------------------------------------------------------------- */

/* Copies `count` runs. Single elements are worth a loop of their own: a call each would take longer than the copy. */
static void copy_runs(unsigned char *to, const unsigned char *from, msc__fp_dim dim, uint64_t run_bytes)
{
    uint64_t i;

#define COPY_RUNS(bytes)                                                                                     \
    for (i = 0; i < dim.size; i++)                                                                           \
    memcpy(to + i * (bytes), from + i * dim.stride_bytes, bytes)
    switch (run_bytes) {
    case 1:
        COPY_RUNS(1);
        return;
    case 2:
        COPY_RUNS(2);
        return;
    case 4:
        COPY_RUNS(4);
        return;
    case 8:
        COPY_RUNS(8);
        return;
    default:
        COPY_RUNS(run_bytes);
    }
#undef COPY_RUNS
}

/* Where a run lies, and how many follow it in the innermost dimension, itself counted. */
static const unsigned char *find_run(const msc__fp_layout *layout, uint64_t run, uint64_t *in_line)
{
    const unsigned char *at = layout->data;
    uint32_t d;

    *in_line = 1;
    for (d = layout->dim_count; d-- > 0;) {
        uint64_t index = run % layout->dims[d].size;

        if (d == layout->dim_count - 1)
            *in_line = layout->dims[d].size - index;
        at += index * layout->dims[d].stride_bytes;
        run /= layout->dims[d].size;
    }
    MSC__ASSERT(run == 0 && *in_line > 0);
    return at;
}

void msc__fp_gather(const msc__fp_layout *layout, uint64_t begin, uint64_t count, unsigned char *to)
{
    MSC__ASSERT(begin + count <= layout->bytes);
    while (count > 0) {
        uint64_t in_line;
        uint64_t skipped = begin % layout->run_bytes;
        const unsigned char *at = find_run(layout, begin / layout->run_bytes, &in_line);
        uint64_t taken = layout->run_bytes - skipped;

        if (skipped > 0 || count < layout->run_bytes) { /* a part of a run */
            taken = taken < count ? taken : count;
            memcpy(to, at + skipped, taken);
        } else {
            msc__fp_dim line = {count / layout->run_bytes, 0};

            line.size = line.size < in_line ? line.size : in_line;
            line.stride_bytes = layout->dim_count > 0 ? layout->dims[layout->dim_count - 1].stride_bytes : 0;
            taken = line.size * layout->run_bytes;
            copy_runs(to, at, line, layout->run_bytes);
        }
        MSC__ASSERT(taken > 0 && taken <= count);
        to += taken;
        begin += taken;
        count -= taken;
    }
}

const unsigned char *msc__fp_piece(const msc__fp_layout *layout, uint64_t begin, uint64_t *bytes)
{
    uint64_t skipped = begin % layout->run_bytes;
    uint64_t in_line;

    MSC__ASSERT(begin < layout->bytes);
    *bytes = layout->run_bytes - skipped;
    return find_run(layout, begin / layout->run_bytes, &in_line) + skipped;
}
