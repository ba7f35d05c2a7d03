/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file card_template.h
 * The kernels of a card. Written in what C and CUDA's C++ have in common: a card's compiler gets it by kernels.cu, and the
 * tests compile it for the host. What includes it has defined the macros of device/cuda/card_macros.h.
 */
#ifndef MSC_OPTIM_CARD_TEMPLATE_H
#define MSC_OPTIM_CARD_TEMPLATE_H

#include "optim/cuda/one_lane.h"
/* after it */
#include "optim/codes_core.h"
#include "optim/cuda/card_types.h"

/* In this order. */
#include "optim/cuda/card_step.h"

#include "optim/cuda/card_sums.h"

#include "optim/cuda/card_changes.h"

MSC__KERNEL(msc_card_step, msc__card_step)
{
    MSC__PER_THREAD(msc__card_piece, piece);

    MSC__PHASE(t, msc__card_load(&by, msc__card_find(&by, MSC__GROUP, t), &MSC__OWN(piece, t)));
    if (by.moments == MSC_OPTIM_MOMENTS_CODE8) {
        MSC__LARGEST(piece, most1);
        MSC__LARGEST(piece, most2);
    }
    MSC__PHASE(t, msc__card_store(&by, msc__card_find(&by, MSC__GROUP, t), &MSC__OWN(piece, t));
               msc__card_store_scales(&by, msc__card_find(&by, MSC__GROUP, t), &MSC__OWN(piece, t)));
}

MSC__KERNEL(msc_card_norm, msc__card_norm)
{
    const uint64_t last = by.arrays[by.array_count - 1].after;
    uint64_t strip = msc__segment_begin(by.strips, MSC__GROUP);
    uint64_t end = msc__segment_begin(by.strips, MSC__GROUP + 1);
    MSC__PER_THREAD(msc__card_lane, lane);
    MSC__SHARED(msc__card_shown, shown);

    strip = strip < by.first ? by.first : strip;
    end = end > last ? last : end;
    if (by.first == 0)
        MSC__PHASE(t, msc__card_begin(&by, MSC__GROUP, t));
    for (; strip < end; strip += MSC__CARD_AT_A_TIME) {
        MSC__PHASE(t, msc__card_squares(&by, strip, end, t, &MSC__OWN(lane, t)));
        MSC__FOLD(lane, sum);
        MSC__FOLD(lane, bad);
        MSC__PHASE(t, msc__card_show(t, &MSC__OWN(lane, t), &shown));
        MSC__PHASE(t, msc__card_total(&by, MSC__GROUP, end - strip, t, &shown));
    }
}

MSC__KERNEL(msc_card_change, msc__card_arrays)
{
    MSC__PHASE(t, msc__card_change_each(&by, msc__card_at(MSC__GROUP, t)));
}

MSC__KERNEL(msc_card_write, msc__card_arrays)
{
    MSC__PER_THREAD(msc__card_codes, codes);

    MSC__PHASE(t, msc__card_codes_load(&by, msc__card_at(MSC__GROUP, t), &MSC__OWN(codes, t)));
    if (by.change == MSC__CHANGE_WRITE_ADAM) {
        MSC__LARGEST(codes, most);
        MSC__PHASE(t, msc__card_try_roots(&MSC__OWN(codes, t)));
        MSC__LARGEST(codes, differ);
        MSC__LARGEST(codes, differ_next);
        MSC__PHASE(t, msc__card_write_roots(&by, msc__card_at(MSC__GROUP, t), &MSC__OWN(codes, t)));
    } else {
        MSC__PHASE(t, msc__card_most_signed(&MSC__OWN(codes, t)));
    }
    MSC__LARGEST(codes, most);
    MSC__PHASE(t, msc__card_try_signed(&MSC__OWN(codes, t)));
    MSC__LARGEST(codes, differ);
    MSC__LARGEST(codes, differ_next);
    MSC__PHASE(t, msc__card_write_signed(&by, msc__card_at(MSC__GROUP, t), &MSC__OWN(codes, t)));
}

#endif /* MSC_OPTIM_CARD_TEMPLATE_H */
