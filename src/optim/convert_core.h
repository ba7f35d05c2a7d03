/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file convert_core.h
 * How one number is stored: BF16, FP16, masters with a rest, 8-bit codes, and rounding at random.
 *
 * All on bit patterns and with exact operations, so that whatever compiles this gets the same bits. No branches:
 * compilers turn the conditional expressions into selections and the loops around them into vectors. Nothing here
 * converts a float to an integer, which would be undefined for NaN and large values.
 *
 * A code is the upper bits of a small float X in [1, 256) / 128, of 3 bits of exponent and 4 or 5 of fraction, and stands
 * for X - 1/128 times its block's power of two. So 0 is code 0, and there is one rule for all codes:
 *
 *     X            1/128 … 1/64   1/64 … 1/32   …   1 … just below 2
 *     steps        all the same   twice as wide in each power of two
 *
 * What one power of two represents, the next smaller one does too, if it is large enough; so what was decoded is encoded
 * as the same number, whichever power the block gets.
 *
 * Functions of an element are MSC__CORE: what compiles this for a card says before what that is (cuda/one_lane.h).
 */
#ifndef MSC_OPTIM_CONVERT_CORE_H
#define MSC_OPTIM_CONVERT_CORE_H

#include <stdint.h>
#include <string.h>

#ifndef MSC__CORE
#define MSC__CORE static inline
#endif

#define MSC__SIGN 0x80000000u
#define MSC__EXPONENT 0x7F800000u /* also the pattern of infinity */

MSC__CORE uint32_t msc__bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

MSC__CORE float msc__float(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- rounding at random ----------------------------------------------------------------------------- */

/*
 * To round, a random number below the last place is added and what is below it dropped. The first moment takes the upper
 * bits of an element's number, the second one and the master the lower bits, as many as are dropped; the upper ones of
 * each, which matter, are its own. Half the last place in each of them rounds to the nearest, halves away from zero.
 */

#define MSC__RANDOM_STEP 0x9E3779B1u   /* from one element to the next */
#define MSC__RANDOM_FACTOR 0x846CA68Bu /* */
#define MSC__NEAREST_MASTER 0x80u      /* half a last place of a 24-bit master */
#define MSC__NEAREST_CODES 0x80020000u /* of both codes, and 2^-15 more of the first */
#define MSC__NEAREST_BF16 0x80008000u  /* of both moments, and 2^-16 more of the first */

/** 32 bits that look random, from a number that rises by MSC__RANDOM_STEP from one element to the next. */
MSC__CORE uint32_t msc__random(uint32_t x)
{
    x = (x ^ x >> 15) * MSC__RANDOM_FACTOR;
    return x ^ x >> 16;
}

/* ---- BF16 and FP16 ---------------------------------------------------------------------------------- */

MSC__CORE float msc__widen_bf16(uint16_t half)
{
    return msc__float((uint32_t)half << 16);
}

MSC__CORE uint16_t msc__narrow_bf16(float x)
{
    uint32_t bits = msc__bits(x);
    uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;

    return (uint16_t)((bits & ~MSC__SIGN) > MSC__EXPONENT ? (bits >> 16 | 0x40u) : rounded);
}

/** To the upper or lower neighbour, by 16 random bits. Finite stays finite. */
MSC__CORE uint16_t msc__narrow_bf16_random(float x, uint32_t random)
{
    uint32_t bits = msc__bits(x);
    uint32_t size = bits & ~MSC__SIGN;
    uint32_t rounded = (size + random) >> 16;

    rounded = rounded > 0x7F7Fu ? 0x7F7Fu : rounded;
    rounded = size >= MSC__EXPONENT ? (size > MSC__EXPONENT ? 0x7FC0u : 0x7F80u) : rounded;
    return (uint16_t)(rounded | (bits & MSC__SIGN) >> 16);
}

/** FP16's smallest numbers have no implied 1: they are taken as 2^-14 more, and that is taken off again. */
MSC__CORE float msc__widen_fp16(uint16_t half)
{
    uint32_t size = ((uint32_t)half & 0x7FFFu) << 13;
    uint32_t normal = size + (112u << 23);
    float small = msc__float(size + (113u << 23)) - msc__float(113u << 23);
    uint32_t bits = size < 0x00800000u ? msc__bits(small) : normal;

    bits = size >= 0x0F800000u ? size + (224u << 23) : bits;
    return msc__float(bits | ((uint32_t)half & 0x8000u) << 16);
}

/** To nearest, halves to even; a float addition rounds the smallest ones at the right place. */
MSC__CORE uint16_t msc__narrow_fp16(float x)
{
    uint32_t bits = msc__bits(x);
    uint32_t size = bits & ~MSC__SIGN;
    uint32_t normal = (size - (112u << 23) + 0xFFFu + (size >> 13 & 1u)) >> 13;
    uint32_t small = msc__bits(msc__float(size) + 0.5f) - (126u << 23);
    uint32_t half = size < (113u << 23) ? small : normal;

    half = size >= 0x477FF000u ? 0x7C00u : half; /* 65520 and more */
    half = size > MSC__EXPONENT ? 0x7E00u : half;
    return (uint16_t)(half | (bits & MSC__SIGN) >> 16);
}

/* ---- masters with a rest ---------------------------------------------------------------------------- */

#define MSC__UNDER_ZERO 0x7FFF0000u /* what 0 less a rest begins with, but for the sign; no master does */

/** The pattern of x; of a quiet NaN without low bits for NaNs, which rounding could otherwise turn into something else. */
MSC__CORE uint32_t msc__master_bits(float x)
{
    uint32_t bits = msc__bits(x);

    return (bits & ~MSC__SIGN) > MSC__EXPONENT ? ((bits & MSC__SIGN) | 0x7FC00000u) : bits;
}

/** Nearest BF16, halves away from zero; the low bits of the master are then the signed distance. */
MSC__CORE uint16_t msc__master_weight(uint32_t master)
{
    return (uint16_t)((master + 0x8000u) >> 16);
}

/**
 * The master of a weight and its rest. Nothing that was split is a weight of 0 with a negative rest: the weight has been set
 * to 0 since, and together the two would be a NaN. It is 0 then.
 */
MSC__CORE float msc__joined(uint32_t upper, uint32_t rest)
{
    uint32_t bits = upper + rest;

    return msc__float((bits & ~MSC__SIGN) >= MSC__UNDER_ZERO ? upper : bits);
}

MSC__CORE float msc__join_rest16(uint16_t weight, uint16_t rest)
{
    return msc__joined((uint32_t)weight << 16, ((uint32_t)rest ^ 0x8000u) - 0x8000u);
}

/** Rounds a master to 24 bits, to the upper or lower neighbour, by 8 random bits. Finite stays finite. */
MSC__CORE uint32_t msc__master24_bits(float x, uint32_t random)
{
    uint32_t bits = msc__master_bits(x);
    uint32_t size = bits & ~MSC__SIGN;
    uint32_t rounded = (size + random) & 0xFFFFFF00u;

    rounded = rounded > 0x7F7FFF00u ? 0x7F7FFF00u : rounded;
    rounded = size >= MSC__EXPONENT ? size : rounded;
    return rounded | (bits & MSC__SIGN);
}

MSC__CORE float msc__join_rest8(uint16_t weight, uint8_t rest)
{
    return msc__joined((uint32_t)weight << 16, (((uint32_t)rest ^ 0x80u) - 0x80u) << 8);
}

/* ---- 8-bit codes ------------------------------------------------------------------------------------ */

#define MSC__CODE_ZERO 0x1p-7f      /* X of code 0 */
#define MSC__CODE_BITS (120u << 23) /* its pattern: none of the bits that a code takes */
#define MSC__ROOT_SHIFT 18u         /* 5 bits of fraction */
#define MSC__SIGNED_SHIFT 19u       /* 4 bits of fraction */
#define MSC__SIGNED_LAST 127u

/** Largest gradient and root: the square of 2^62 leaves room for a moving average of such. */
#define MSC__ROOT_LIMIT 0x1p62f

/** Fractions of the largest number that a block's power of two times 1 holds: 1.9609375 and 1.9296875. */
#define MSC__ROOT_FRACTION 0x7B0000u
#define MSC__SIGNED_FRACTION 0x770000u

/** X is encoded 2^8 times larger: then code 0 has the pattern 128 << 23, whose part in a code's byte is 0. */
#define MSC__ENCODE_ZERO 2.0f
#define MSC__SCALE_LEAST 8u /* the inverse, as many times larger, is still a normal number */
#define MSC__SCALE_MOST 253u

/** The byte of a block: exponent of the smallest power of two that holds `most`, the largest pattern in it. */
MSC__CORE uint32_t msc__scale_of(uint32_t most, uint32_t fraction)
{
    uint32_t scale = (most + (0x7FFFFFu - fraction)) >> 23;

    scale = scale < MSC__SCALE_LEAST ? MSC__SCALE_LEAST : scale;
    return scale > MSC__SCALE_MOST ? MSC__SCALE_MOST : scale;
}

/** The block's power of two; 0 for the byte 0, which is what a state of zeros has. */
MSC__CORE float msc__scale_value(uint32_t scale)
{
    return msc__float(scale << 23);
}

/** For encoding: 2^8 over the block's power of two. */
MSC__CORE float msc__scale_inverse(uint32_t scale)
{
    return msc__float((254u + MSC__SCALE_LEAST - scale) << 23);
}

#endif /* MSC_OPTIM_CONVERT_CORE_H */
