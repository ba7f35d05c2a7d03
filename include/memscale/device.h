/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file device.h
 * Devices: where a training step computes, and where its bytes are copied from and to.
 *
 * Two kinds, one contract:
 *
 *   MSC_DEVICE_HOST   the processor. Device memory is the program's own memory, the program itself is the
 *                     default stream, other streams are threads. It is the reference: whatever is written
 *                     against it holds on a card.
 *   MSC_DEVICE_CUDA   an NVIDIA card, through the driver library alone, which is opened when it is asked for
 *                     and never linked. The card's primary context is used, the one that PyTorch uses, so
 *                     its pointers and streams can be handed over as they are.
 *
 * A **stream** is an order: what is submitted to one stream happens in the order of submission; two streams
 * know nothing of each other until one waits for an **event** that was recorded on the other. A stream of the
 * program is passed as the driver's own handle (`CUstream`, what PyTorch calls `cuda_stream`); NULL is the
 * default stream. On the host NULL is the only stream of the program: work "submitted" to it has happened when
 * the call returns.
 *
 * A process that was forked has none of its parent's devices: there, calls with a device of the parent fail with
 * ESTATE, and destroying one gives back memory and nothing else.
 *
 * Devices are opened here and passed to the engines that move bytes (offload.h). Their other functions are the
 * library's own.
 */
#ifndef MEMSCALE_DEVICE_H
#define MEMSCALE_DEVICE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum msc_device_kind { MSC_DEVICE_HOST, MSC_DEVICE_CUDA, MSC_DEVICE_COUNT } msc_device_kind;

/**
 * Fault injection, for tests: a missing ordering edge must show as wrong bytes, a failing device as an
 * error. Only the host kind has it; all zero means none. Everything is drawn from `seed`, so a run repeats as
 * far as the scheduling of threads does.
 */
typedef struct msc_device_faults {
    uint64_t seed;
    int64_t delay_most_ns;     /**< each copy waits for up to this long before it begins */
    uint64_t bytes_per_second; /**< copies are not faster than this; 0: as fast as they go */
    uint32_t split_ppm;        /**< share of copies that are done in two halves with a pause in between */
    uint32_t fail_ppm;         /**< share of copies that fail with EDRIVER */
    uint64_t pin_limit_bytes;  /**< pinning beyond this fails, as under `ulimit -l`; 0: no limit */
    uint32_t refuse_pins;      /**< not 0: no host memory can be pinned at all, as in some containers */
    uint32_t pin_delay_us;     /**< pinning takes this much longer */
} msc_device_faults;

/**
 * Options of a device.
 *
 * NVRTC, NVIDIA's run-time compiler, is opened when a kernel is first needed (optim.h). Without a name, one that the
 * process has loaded already is as good as the system's.
 */
typedef struct msc_device_options {
    size_t struct_bytes; /**< sizeof(msc_device_options) */
    msc_device_kind kind;
    uint32_t ordinal;         /**< CUDA: which card, as the driver counts. HOST: 0 */
    const char *library;      /**< CUDA: file name of the driver library; NULL: the system's. HOST: NULL */
    const char *compiler;     /**< CUDA: file name of NVRTC, see above; NULL: the system's. HOST: NULL */
    msc_device_faults faults; /**< HOST only */
} msc_device_options;

/** Memory of a device at this moment. */
typedef struct msc_device_memory {
    uint64_t free_bytes;
    uint64_t total_bytes;
} msc_device_memory;

typedef struct msc_device msc_device;

/** The host, without faults. */
MSC_API void msc_device_options_init(msc_device_options *options, size_t struct_bytes);

/** The same for the struct of this header. */
static inline msc_device_options msc_device_options_default(void)
{
    msc_device_options options;

    msc_device_options_init(&options, sizeof options);
    return options;
}

/**
 * Opens a device.
 *
 * @param ctx     used during create and destroy only, of the device and of what is made from it.
 * @param options NULL for the defaults.
 * @param out     the caller owns the result and ends it with `msc_device_destroy`, after everything made from it.
 * Errors: EINVAL (a field that the kind does not have; names it), ENODEV (no driver library, no such card),
 * EDRIVER (the driver's code is in `driver_code`), ENOMEM.
 * Threads: a device may be used from several threads at once.
 */
MSC_API MSC_NODISCARD msc_status msc_device_create(msc_context *ctx, const msc_device_options *options,
                                                   msc_device **out, msc_error *err);

/** Closes a device. NULL is accepted. */
MSC_API void msc_device_destroy(msc_device *device);

MSC_API msc_device_kind msc_device_kind_of(const msc_device *device);

/** "host", or the card's name as the driver has it. Lives as long as the device. */
MSC_API const char *msc_device_name(const msc_device *device);

/** Free and total memory now: of the card, or of the machine and its control group. Errors: EDRIVER, EIO, ESTATE. */
MSC_API MSC_NODISCARD msc_status msc_device_memory_now(msc_device *device, msc_device_memory *out,
                                                       msc_error *err);

#ifdef __cplusplus
}
#endif

#endif /* MEMSCALE_DEVICE_H */
