/* SPDX-License-Identifier: Apache-2.0 */
/** @file fingerprint_samples.h  Which segments of a stream are read: the same ones on every processor. */
#ifndef MSC_FINGERPRINT_SAMPLES_H
#define MSC_FINGERPRINT_SAMPLES_H

#include "fingerprint/fingerprint_core.h"

/** One segment of each window is read. */
typedef struct msc__fp_samples {
    uint64_t segments; /* the last one not always whole */
    uint64_t one_in;   /* segments of a window */
    uint64_t windows;
} msc__fp_samples;

MSC__CORE uint64_t msc__fp_divide_up(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

MSC__CORE msc__fp_samples msc__fp_samples_of(uint64_t bytes, uint64_t segment_bytes, uint64_t one_in)
{
    msc__fp_samples samples;

    samples.segments = msc__fp_divide_up(bytes, segment_bytes);
    samples.one_in = samples.segments > one_in ? one_in : 1; /* one window is read whole */
    samples.windows = msc__fp_divide_up(samples.segments, samples.one_in);
    return samples;
}

/** The segment of a window that is read. */
MSC__CORE uint64_t msc__fp_sample(const msc__fp_samples *of, uint64_t window)
{
    if (of->one_in == 1 || window == 0)
        return window;
    if (window == of->windows - 1)
        return of->segments - 1;
    return window * of->one_in + msc__fp_mix(window) % of->one_in;
}

#endif /* MSC_FINGERPRINT_SAMPLES_H */
