/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file codes_core.h
 * 8-bit codes (convert_core.h) as numbers and back, and Adam's step with moments that are stored so, on lanes.
 *
 * Multiplications with and divisions by powers of two are exact, so what is decoded is the same whichever constants have
 * been put together.
 *
 * Include lanes.h first, or on a card cuda/one_lane.h.
 */
#ifndef MSC_OPTIM_CODES_CORE_H
#define MSC_OPTIM_CODES_CORE_H

#include "optim/adamw_core.h"

/** `value`: the block's power of two. */
MSC__LANE_INLINE msc__lanes msc__decode_root(msc__ulanes code, float value)
{
    return (msc__lane_floats(code << MSC__ROOT_SHIFT | MSC__CODE_BITS) - MSC__CODE_ZERO) * value;
}

/** `code`: with its sign in all upper bits. */
MSC__LANE_INLINE msc__lanes msc__decode_signed(msc__ulanes code, float value)
{
    const uint32_t kept = MSC__SIGN | (MSC__SIGNED_LAST << MSC__SIGNED_SHIFT);
    msc__ulanes placed = code << MSC__SIGNED_SHIFT;
    msc__ulanes zero = (placed & MSC__SIGN) | MSC__CODE_BITS;

    return (msc__lane_floats((placed & kept) | MSC__CODE_BITS) - msc__lane_floats(zero)) * value;
}

/**
 * The code is the lower byte; what is above it, at most 16, is to be dropped. Roots above 0 have at least code 1.
 *
 * @param inverse of `msc__scale_inverse`.
 * @param random  of the element; its lower 18 bits count.
 */
MSC__LANE_INLINE msc__ulanes msc__encode_root(msc__lanes root, float inverse, msc__ulanes random)
{
    msc__ulanes lower = random & ((1u << MSC__ROOT_SHIFT) - 1u);
    msc__ulanes code = (msc__lane_bits(root * inverse + MSC__ENCODE_ZERO) + lower) >> MSC__ROOT_SHIFT;
    const uint32_t one = (128u << (23u - MSC__ROOT_SHIFT)) + 1u;

    return msc__larger(code, msc__smaller(msc__lane_bits(root), one)); /* the pattern of any root is larger */
}

/** The same; what the scale does not hold gets the last code. The upper 19 bits of `random` count. */
MSC__LANE_INLINE msc__ulanes msc__encode_signed(msc__lanes x, float inverse, msc__ulanes random)
{
    msc__ulanes bits = msc__lane_bits(x);
    msc__lanes size = msc__lane_floats(bits & ~MSC__SIGN) * inverse;
    msc__ulanes upper = random >> (32u - MSC__SIGNED_SHIFT);
    msc__ulanes code = (msc__lane_bits(size + MSC__ENCODE_ZERO) + upper) >> MSC__SIGNED_SHIFT;
    const uint32_t last = (128u << (23u - MSC__SIGNED_SHIFT)) + MSC__SIGNED_LAST;

    return msc__smaller(code, last) | (bits >> 24 & 0x80u);
}

/** Root of v and m over it: what is stored. */
typedef struct msc__rooted {
    msc__lanes root;
    msc__lanes ratio; /* between the halves of a step: m itself */
} msc__rooted;

/**
 * Adam's step (adamw_core.h), but that it multiplies with the inverse of root2. The first half, up to the root.
 *
 * In halves, because a root and what is divided by it take long: a loop over each half lets go of an element when its own
 * slow operation has begun.
 *
 * @param l2 whether decay goes into the gradient, known when this is compiled.
 * @param of the moments before; then the root after, and m.
 */
MSC__LANE_INLINE void msc__adam_rooted_moments(const msc__optim_numbers *by, int l2, msc__lanes g,
                                               msc__lanes *w, msc__rooted *of)
{
    msc__lanes m = of->ratio * of->root;
    msc__lanes v = of->root * of->root;

    g = msc__clamp(g * by->factor, by->limit);
    if (l2)
        g = g + by->l2 * *w;
    else
        *w = *w * by->keep;
    of->ratio = m + by->add1 * (g - m);
    of->root = msc__sqrt(v * by->average2 + by->add2 * g * g);
}

/** The second half. */
MSC__LANE_INLINE void msc__adam_rooted_weight(const msc__optim_numbers *by, msc__lanes *w, msc__rooted *of)
{
    msc__lanes m = of->ratio;

    of->ratio = msc__ratio(m, of->root);
    *w = *w + by->rate * m / (of->root * by->inverse2 + by->epsilon);
}

#endif /* MSC_OPTIM_CODES_CORE_H */
