/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of src/fingerprint/cuda, compiled for the host. */
#include "fake_cuda/fake_kernels.h"
#include "fake_cuda/fake_macros.h"
/* after it */
#include "fingerprint/cuda/card_template.h"

/* Whether every piece of a word begins at a multiple of its size. */
static bool is_aligned(const msc__fp_launch *by)
{
    bool aligned = (uintptr_t)by->data % by->grain == 0;
    uint32_t i;

    for (i = 0; i < by->dim_count; i++)
        aligned = aligned && by->dims[i].stride_bytes % by->grain == 0 && by->run_bytes % by->grain == 0;
    return aligned;
}

/* From the first byte to the last. The bytes in between, which no element has, are in the same block. */
static uint64_t extent_of(const msc__fp_launch *by)
{
    uint64_t bytes = by->run_bytes;
    uint32_t i;

    for (i = 0; i < by->dim_count; i++)
        bytes += (by->dims[i].size - 1) * by->dims[i].stride_bytes;
    return by->bytes > 0 ? bytes : 0;
}

static const char *fault(const void *argument, int card)
{
    const msc__fp_launch *by = argument;
    const char *why = fake_fault_at(by->data, extent_of(by), 1, card);

    if (why == NULL && by->bytes > 0 && !is_aligned(by))
        why = "misaligned address";
    if (why == NULL)
        why = fake_fault_at(by->slot, 1, sizeof *by->slot, card);
    return why != NULL ? why : fake_fault_at(by->state, sizeof *by->state / 8, 8, card);
}

const fake_kernel fake_fingerprint_kernel = {"msc_card_fingerprint", sizeof(msc__fp_launch),
                                             msc_card_fingerprint, fault};
