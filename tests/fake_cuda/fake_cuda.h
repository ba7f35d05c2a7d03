/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file fake_cuda.h
 * A driver library without a card, for tests: libfake_cuda.so has the functions of libcuda that the library uses
 * (src/device/cuda_syms.h), and really copies. The card's memory is host memory within a budget; its streams are
 * those of the host device, whose copies come late, in pieces, and out of order between streams.
 *
 * It is stricter than a card. What a driver would answer with an error, a crash or wrong bytes is refused and
 * noted: handles that were destroyed, or that are another card's; addresses that no block holds; a call without
 * a current context; memory that is unpinned and was not pinned; calls in a forked child; and, when the last user
 * lets a context go, whatever is left of it.
 *
 * It runs the library's kernels, compiled for the host, and only those (fake_kernels.c); the compiler that goes with it
 * is libfake_nvrtc.so (fake_nvrtc.c).
 *
 * A program that opens the library by its path finds these functions by name. Everything can be set by the
 * environment as well, which is read at the first cuInit:
 *
 *      FAKE_CUDA_BYTES             memory of each card, 1 GiB if not set
 *      FAKE_CUDA_CARDS             2 if not set
 *      FAKE_CUDA_SEED              msc_device_faults, see device.h
 *      FAKE_CUDA_DELAY_MOST_NS
 *      FAKE_CUDA_BYTES_PER_SECOND
 *      FAKE_CUDA_SPLIT_PPM
 *      FAKE_CUDA_CAPABILITY        compute capability of each card, 90 if not set, for 9.0
 *      FAKE_CUDA_PIN_LIMIT_BYTES   cuMemHostRegister beyond this is refused; 0: no limit
 *      FAKE_CUDA_FAIL              cuMemAlloc_v2:3:2 lets the third call return 2
 */
#ifndef MSC_FAKE_CUDA_H
#define MSC_FAKE_CUDA_H

#include <stdint.h>

/** What happened since the library was loaded. */
typedef struct fake_cuda_report {
    uint64_t violation_count;  /**< calls that no correct program makes */
    char first_violation[256]; /**< the function and why */
    uint64_t left_count;       /**< objects that were alive when their context was let go */
    uint64_t context_count;    /**< retained now, counted with multiplicity */
    uint64_t object_count;     /**< streams, events and blocks that are alive now */
    uint64_t memory_bytes;     /**< of the blocks */
    uint64_t pinned_bytes;
    uint64_t
        pageable_copy_count; /**< copies from or to memory that is not pinned: done before the call returns */
    uint64_t copy_count;
    uint64_t launch_count;
} fake_cuda_report;

/** Fills `out`. */
typedef void fake_cuda_tell_function(fake_cuda_report *out);
fake_cuda_tell_function fake_cuda_tell;

/** Call number `nth`, from 1 and from now on, of the driver function `name` returns `result` and does nothing. */
typedef void fake_cuda_fail_function(const char *name, unsigned nth, int result);
fake_cuda_fail_function fake_cuda_fail;

/** Of libfake_nvrtc.so: programs that were created and not destroyed. */
typedef int fake_nvrtc_live_function(void);

#endif /* MSC_FAKE_CUDA_H */
