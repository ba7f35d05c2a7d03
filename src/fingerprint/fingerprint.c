/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fingerprints of tensors on host cores.
 *
 *     tensor ──► layout: a stream of bytes ──► windows of segments ──► blocks ──► kernel ──► a sum, which has no order
 *                                              │
 *                whole                         ■■■■■■■■■■■■■■■■■■■■■■■■■■■     portions of 64 segments, as threads take them
 *                samples, one in 4             ■···│··■·│■···│···■│·■··│·■     portions of 64 windows
 *
 * Blocks are read where they lie, if they lie together; others are gathered in a buffer. Meanwhile what is read next is
 * fetched from memory, which no processor can guess for rows with gaps and for samples. The last block is filled up with
 * zeros, and the length is part of the end.
 *
 * Threads take portions until none is left and add their sums; no sum depends on who did what. The threads are PyTorch's
 * (base/team.h): a fingerprint is wanted between two operations of PyTorch, when others of ours would only wait for a core.
 * Where there is none, the caller's thread reads alone.
 */
#include "memscale/fingerprint.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/team.h"
#include "fingerprint/fingerprint_core.h"
#include "fingerprint/fingerprint_kernels.h"
#include "fingerprint/fingerprint_layout.h"
#include "fingerprint/fingerprint_samples.h"

/* How far ahead of what it reads a kernel fetches. */
#define AHEAD_BLOCKS 4u

/* What a thread takes at a time. */
#define PORTION_WINDOWS 64u

/*
 * Fewer bytes are read by the caller: it takes less than a millisecond, and a member of the team whose core another program
 * has at the moment would be waited for longer than that.
 */
#define SHARED_BYTES (UINT64_C(8) << 20)

_Static_assert(MSC_FINGERPRINT_SEGMENT % MSC__FP_BLOCK_BYTES == 0, "segments begin at blocks");

/* ---- kernels ------------------------------------------------------------------------------------------------- */

msc__fp_kernel msc__fp_kernel_of(msc__fp_isa isa)
{
    switch (isa) {
    case MSC__FP_SCALAR:
        return msc__fp_scalar;
#ifdef MSC__FP_X86
    case MSC__FP_AVX2:
        return __builtin_cpu_supports("avx2") ? msc__fp_avx2 : NULL;
    case MSC__FP_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") ? msc__fp_avx512
                                                                                       : NULL;
#endif
    default:
        return NULL;
    }
}

msc__fp_kernel msc__fp_kernel_here(void)
{
    if (msc__fp_kernel_of(MSC__FP_AVX512) != NULL)
        return msc__fp_kernel_of(MSC__FP_AVX512);
    return msc__fp_kernel_of(msc__fp_kernel_of(MSC__FP_AVX2) != NULL ? MSC__FP_AVX2 : MSC__FP_SCALAR);
}

/* Sum of `bytes` that lie together and begin at a block. Zeros follow the last one. */
static uint64_t sum_bytes(msc__fp_kernel kernel, const unsigned char *at, uint64_t first, uint64_t bytes,
                          const unsigned char *ahead)
{
    uint64_t blocks = bytes / MSC__FP_BLOCK_BYTES;
    uint64_t rest = bytes % MSC__FP_BLOCK_BYTES;
    unsigned char last[MSC__FP_BLOCK_BYTES];
    uint64_t sum = kernel(at, first, blocks, ahead);

    MSC__ASSERT(blocks * MSC__FP_BLOCK_BYTES + rest == bytes);
    if (rest == 0)
        return sum;
    memset(last + rest, 0, sizeof last - rest);
    memcpy(last, at + bytes - rest, rest);
    return sum + kernel(last, first + blocks, 1, NULL);
}

/*
 * The same of a long range. Without fetching ahead a core waits for memory between blocks, and reads it at two thirds of
 * the speed of a plain sum; with it, at that speed (bench/python/fingerprint.py).
 */
static uint64_t sum_range(msc__fp_kernel kernel, const unsigned char *at, uint64_t first, uint64_t bytes)
{
    uint64_t blocks = bytes / MSC__FP_BLOCK_BYTES;
    uint64_t fetching = blocks > AHEAD_BLOCKS ? blocks - AHEAD_BLOCKS : 0;
    uint64_t done = fetching * MSC__FP_BLOCK_BYTES;
    uint64_t sum = 0;

    MSC__ASSERT(fetching <= blocks && done <= bytes);
    if (fetching > 0)
        sum = kernel(at, first, fetching, at + (size_t)AHEAD_BLOCKS * MSC__FP_BLOCK_BYTES);
    return sum + sum_bytes(kernel, at + done, first + fetching, bytes - done, NULL);
}

uint64_t msc_fingerprint_bytes(const void *data, uint64_t bytes)
{
    return msc__fp_end(bytes > 0 ? sum_range(msc__fp_kernel_here(), data, 0, bytes) : 0, bytes);
}

/* ---- tensors ------------------------------------------------------------------------------------------------- */

typedef struct fingerprint_job {
    msc__fp_kernel kernel;
    const msc__fp_layout *layout;
    msc__fp_samples samples;
    uint64_t portions;
    atomic_uint_fast64_t next; /* portion */
    atomic_uint_fast64_t sum;
} fingerprint_job;

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Where the stream goes on at a byte; NULL: it has no such. */
static const unsigned char *place_of(const msc__fp_layout *layout, uint64_t at)
{
    uint64_t bytes;

    return at < layout->bytes ? msc__fp_piece(layout, at, &bytes) : NULL;
}

/*
 * Sum of the bytes [at, stop) of a stream: blocks where they lie, if whole ones lie together; else in a buffer. `next`: the
 * byte that is read after these.
 */
static uint64_t sum_runs(const fingerprint_job *job, uint64_t at, uint64_t stop, uint64_t next)
{
    const msc__fp_layout *layout = job->layout;
    uint64_t most =
        layout->run_bytes < 2 * MSC__FP_BLOCK_BYTES ? MSC_FINGERPRINT_SEGMENT : MSC__FP_BLOCK_BYTES;
    unsigned char gathered[MSC_FINGERPRINT_SEGMENT];
    uint64_t sum = 0;
    uint64_t bytes;

    MSC__ASSERT(stop <= layout->bytes);
    for (; at < stop; at += bytes) {
        const unsigned char *from = msc__fp_piece(layout, at, &bytes);

        MSC__ASSERT(at % MSC__FP_BLOCK_BYTES == 0 && bytes > 0);
        bytes = least(bytes, stop - at);
        if (bytes >= MSC__FP_BLOCK_BYTES) {
            bytes -= bytes % MSC__FP_BLOCK_BYTES;
        } else {
            bytes = least(stop - at, most);
            MSC__ASSERT(bytes <= sizeof gathered);
            msc__fp_gather(layout, at, bytes, gathered);
            from = gathered;
        }
        MSC__ASSERT(bytes > 0 && bytes <= stop - at);
        sum += sum_bytes(job->kernel, from, at / MSC__FP_BLOCK_BYTES, bytes,
                         place_of(layout, at + bytes < stop ? at + bytes : next));
    }
    return sum;
}

/* Sum of the segments [begin, end), which are all read. */
static uint64_t sum_segments(const fingerprint_job *job, uint64_t begin, uint64_t end)
{
    const msc__fp_layout *layout = job->layout;
    uint64_t at = begin * MSC_FINGERPRINT_SEGMENT;
    uint64_t stop = end < job->samples.segments ? end * MSC_FINGERPRINT_SEGMENT : layout->bytes;

    MSC__ASSERT(begin < end && end <= job->samples.segments && at < stop && stop <= layout->bytes);
    if (layout->run_bytes == layout->bytes)
        return sum_range(job->kernel, layout->data + at, at / MSC__FP_BLOCK_BYTES, stop - at);
    return sum_runs(job, at, stop, stop);
}

/* Sum of the samples of the windows [begin, end). While one is read, the next comes from memory: nobody guesses where. */
static uint64_t sum_samples(const fingerprint_job *job, uint64_t begin, uint64_t end)
{
    uint64_t at = msc__fp_sample(&job->samples, begin) * MSC_FINGERPRINT_SEGMENT;
    uint64_t sum = 0;

    MSC__ASSERT(begin < end && end <= job->samples.windows);
    for (; begin < end; begin++) {
        uint64_t stop = least(at + MSC_FINGERPRINT_SEGMENT, job->layout->bytes);
        uint64_t next = stop;

        MSC__ASSERT(at < job->layout->bytes);
        if (begin + 1 < job->samples.windows)
            next = msc__fp_sample(&job->samples, begin + 1) * MSC_FINGERPRINT_SEGMENT;
        sum += sum_runs(job, at, stop, next);
        at = next;
    }
    return sum;
}

static uint64_t sum_portion(const fingerprint_job *job, uint64_t portion)
{
    uint64_t window = portion * PORTION_WINDOWS;
    uint64_t end = least(window + PORTION_WINDOWS, job->samples.windows);

    MSC__ASSERT(window < job->samples.windows);
    return job->samples.one_in == 1 ? sum_segments(job, window, end) : sum_samples(job, window, end);
}

static void take_portions(void *argument)
{
    fingerprint_job *job = argument;
    uint64_t sum = 0;
    uint64_t portion;

    while ((portion = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->portions)
        sum += sum_portion(job, portion);
    atomic_fetch_add_explicit(&job->sum, sum,
                              memory_order_relaxed); /* the team's end orders it before who reads it */
}

static void run(fingerprint_job *job, uint32_t thread_count)
{
    bool shared = thread_count != 1 && job->samples.windows >= SHARED_BYTES / MSC_FINGERPRINT_SEGMENT;
    msc__team team = {NULL, NULL};

    if (shared)
        team = msc__team_find();
    if (team.run != NULL)
        team.run(take_portions, job, (unsigned)least(thread_count, job->portions), 0);
    else
        take_portions(job);
    msc__team_leave(&team);
}

msc_status msc_fingerprint(const msc_fingerprint_tensor *tensor, uint32_t one_in, uint32_t thread_count,
                           uint64_t *out, msc_error *err)
{
    msc__fp_layout layout;
    fingerprint_job job;
    msc_status status;

    if (tensor == NULL || out == NULL)
        return msc__fail(err, MSC_EINVAL, "tensor or out is NULL");
    if (one_in == 0)
        return msc__fail(err, MSC_EINVAL, "one_in is 0, allowed are 1 and above");
    status = msc__fp_layout_of(tensor, &layout, err);
    if (status != MSC_OK)
        return status;
    job.kernel = msc__fp_kernel_here();
    job.layout = &layout;
    job.samples = msc__fp_samples_of(layout.bytes, MSC_FINGERPRINT_SEGMENT, one_in);
    job.portions = msc__fp_divide_up(job.samples.windows, PORTION_WINDOWS);
    atomic_init(&job.next, 0);
    atomic_init(&job.sum, 0);
    MSC__ASSERT(job.kernel != NULL && (job.portions == 0) == (layout.bytes == 0));
    run(&job, thread_count);
    MSC__ASSERT(atomic_load_explicit(&job.next, memory_order_relaxed) > job.portions);
    *out = msc__fp_end(atomic_load_explicit(&job.sum, memory_order_relaxed), layout.bytes);
    return MSC_OK;
}
