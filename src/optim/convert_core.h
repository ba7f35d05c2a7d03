/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file convert_core.h
 * How one number is stored: BF16, FP16, masters with a rest, 8-bit codes, and rounding at random.
 *
 * All on bit patterns and with exact operations, so that whatever compiles this gets the same bits. No branches:
 * compilers turn the conditional expressions into selections and the loops around them into vectors. Nothing here
 * converts a float to an integer, which would be undefined for NaN and large values.
 *
 * A code is a small float: 3 bits of exponent and 4 or 5 of fraction, the upper bits of y's pattern, where y is the
 * number over its block's power of two. As with any float, the exponent 0 has no implied 1:
 *
 *     y         0 … 2^-6       2^-6 … 2^-5   …   1 … just below 2
 *     steps     all the same   twice as wide in each power of two
 *
 * What one power of two represents, the next smaller one does too, if it is large enough; so what was decoded is encoded as
 * the same number, whichever power the block gets.
 */
#ifndef MSC_OPTIM_CONVERT_CORE_H
#define MSC_OPTIM_CONVERT_CORE_H

#include <stdint.h>
#include <string.h>

#define MSC__SIGN 0x80000000u
#define MSC__EXPONENT 0x7F800000u /* also the pattern of infinity */

static inline uint32_t msc__bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float msc__float(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- rounding at random ----------------------------------------------------------------------------- */

/*
 * To round, a random number below the last place is added and what is below it dropped. The random number's upper bits
 * are used, as many as are dropped; 0x80000000 is half the last place wherever that is, and rounds to the nearest, halves
 * away from zero.
 */

#define MSC__RANDOM_OF2 12u /* shifts that bring a part to the top */
#define MSC__RANDOM_MASTER 24u
#define MSC__RANDOM_NEAREST 0x80080080u /* half a last place in each part, and up to 2^-12 of it more */

/** 32 bits that look random, from the index of an element and a number for the step: an integer hash whose constants
    Wellons found by search ("lowbias32"). The first moment takes 12 of them, the second 12, the master 8. */
static inline uint32_t msc__random(uint32_t index, uint32_t seed)
{
    uint32_t x = index + seed;

    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

/* ---- BF16 and FP16 ---------------------------------------------------------------------------------- */

static inline float msc__widen_bf16(uint16_t half)
{
    return msc__float((uint32_t)half << 16);
}

static inline uint16_t msc__narrow_bf16(float x)
{
    uint32_t bits = msc__bits(x);
    uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;

    return (uint16_t)((bits & ~MSC__SIGN) > MSC__EXPONENT ? (bits >> 16 | 0x40u) : rounded);
}

/** To the upper or lower neighbour. Finite stays finite. */
static inline uint16_t msc__narrow_bf16_random(float x, uint32_t random)
{
    uint32_t bits = msc__bits(x);
    uint32_t size = bits & ~MSC__SIGN;
    uint32_t rounded = (size + (random >> 16)) >> 16;

    rounded = rounded > 0x7F7Fu ? 0x7F7Fu : rounded;
    rounded = size >= MSC__EXPONENT ? (size > MSC__EXPONENT ? 0x7FC0u : 0x7F80u) : rounded;
    return (uint16_t)(rounded | (bits & MSC__SIGN) >> 16);
}

/** FP16's smallest numbers have no implied 1: they are taken as 2^-14 more, and that is taken off again. */
static inline float msc__widen_fp16(uint16_t half)
{
    uint32_t size = ((uint32_t)half & 0x7FFFu) << 13;
    uint32_t normal = size + (112u << 23);
    float small = msc__float(size + (113u << 23)) - msc__float(113u << 23);
    uint32_t bits = size < 0x00800000u ? msc__bits(small) : normal;

    bits = size >= 0x0F800000u ? size + (224u << 23) : bits;
    return msc__float(bits | ((uint32_t)half & 0x8000u) << 16);
}

/** To nearest, halves to even; a float addition rounds the smallest ones at the right place. */
static inline uint16_t msc__narrow_fp16(float x)
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

/** The pattern of x; of a quiet NaN without low bits for NaNs, which rounding could otherwise turn into something else. */
static inline uint32_t msc__master_bits(float x)
{
    uint32_t bits = msc__bits(x);

    return (bits & ~MSC__SIGN) > MSC__EXPONENT ? ((bits & MSC__SIGN) | 0x7FC00000u) : bits;
}

/** Nearest BF16, halves away from zero; the low bits of the master are then the signed distance. */
static inline uint16_t msc__master_weight(uint32_t master)
{
    return (uint16_t)((master + 0x8000u) >> 16);
}

static inline float msc__join_rest16(uint16_t weight, uint16_t rest)
{
    return msc__float(((uint32_t)weight << 16) + ((uint32_t)rest ^ 0x8000u) - 0x8000u);
}

/** Rounds a master to 24 bits, to the upper or lower neighbour. Finite stays finite. */
static inline uint32_t msc__master24_bits(float x, uint32_t random)
{
    uint32_t bits = msc__master_bits(x);
    uint32_t size = bits & ~MSC__SIGN;
    uint32_t rounded = (size + (random >> 24)) & 0xFFFFFF00u;

    rounded = rounded > 0x7F7FFF00u ? 0x7F7FFF00u : rounded;
    rounded = size >= MSC__EXPONENT ? size : rounded;
    return rounded | (bits & MSC__SIGN);
}

static inline float msc__join_rest8(uint16_t weight, uint8_t rest)
{
    return msc__float(((uint32_t)weight << 16) + ((((uint32_t)rest ^ 0x80u) - 0x80u) << 8));
}

/* ---- 8-bit codes ------------------------------------------------------------------------------------ */

#define MSC__CODE_NORMAL (121u << 23) /* 2^-6: from here on there is an implied 1 */
#define MSC__ROOT_SHIFT 18u           /* 5 bits of fraction */
#define MSC__ROOT_LAST 255u
#define MSC__SIGNED_SHIFT 19u /* 4 bits of fraction */
#define MSC__SIGNED_LAST 127u

/** Largest gradient and root: the square of 2^62 leaves room for a moving average of such. */
#define MSC__ROOT_LIMIT 0x1p62f

/** Fractions of the largest number that a block's power of two times 1 holds: 1.96875 and 1.9375. */
#define MSC__ROOT_FRACTION 0x7C0000u
#define MSC__SIGNED_FRACTION 0x780000u

/**
 * The byte of a block: exponent of the smallest power of two that holds `most`, the largest pattern in it. Between 1 and
 * 253, so that the power and its inverse are normal numbers.
 */
static inline uint32_t msc__scale_of(uint32_t most, uint32_t fraction)
{
    uint32_t scale = (most + (0x7FFFFFu - fraction)) >> 23;

    scale = scale < 1u ? 1u : scale;
    return scale > 253u ? 253u : scale;
}

/** The block's power of two; 0 for the byte 0, which is what a state of zeros has. */
static inline float msc__scale_value(uint32_t scale)
{
    return msc__float(scale << 23);
}

static inline float msc__scale_inverse(uint32_t scale)
{
    return msc__float((254u - scale) << 23);
}

/**
 * Below 2^-6, the bits of y + 2^-6 have those of y without an implied 1 in the right place; above, those of 2 y are y's
 * with one exponent more. Of the two, the larger one is right in either case; undoing them, the smaller one.
 */
static inline uint32_t msc__encode(float y, uint32_t shift, uint32_t last, uint32_t random)
{
    uint32_t small = msc__bits(y + 0x1p-6f);
    uint32_t normal = msc__bits(y + y);
    uint32_t above = (small > normal ? small : normal) - MSC__CODE_NORMAL;
    uint32_t code = (above + (random >> (32u - shift))) >> shift;

    return code < last ? code : last;
}

static inline float msc__decode(uint32_t code, uint32_t shift)
{
    float x = msc__float((code << shift) + MSC__CODE_NORMAL);
    float small = x - 0x1p-6f;
    float normal = x * 0.5f;

    return small < normal ? small : normal;
}

static inline uint32_t msc__encode_root(float root, float inverse, uint32_t random)
{
    uint32_t code = msc__encode(root * inverse, MSC__ROOT_SHIFT, MSC__ROOT_LAST, random);
    uint32_t least = root > 0.0f ? 1u : 0u;

    return code > least ? code : least;
}

static inline float msc__decode_root(uint32_t code, float scale)
{
    return msc__decode(code, MSC__ROOT_SHIFT) * scale;
}

static inline uint32_t msc__encode_signed(float x, float inverse, uint32_t random)
{
    uint32_t bits = msc__bits(x);
    float y = msc__float(bits & ~MSC__SIGN) * inverse;

    return msc__encode(y, MSC__SIGNED_SHIFT, MSC__SIGNED_LAST, random) | bits >> 31 << 7;
}

static inline float msc__decode_signed(uint32_t code, float scale)
{
    float size = msc__decode(code & 0x7Fu, MSC__SIGNED_SHIFT) * scale;

    return msc__float(msc__bits(size) | (code & 0x80u) << 24);
}

#endif /* MSC_OPTIM_CONVERT_CORE_H */
