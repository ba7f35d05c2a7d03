/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file fingerprint_core.h
 * The hash of one lane of a block, for every processor. Integers only, so all of them give the same value.
 *
 *     block, 1 KiB     row 0   │ lane 0 │ lane 1 │ … │ lane 15 │     words of 64 bits, little-endian
 *                      …
 *                      row 7   │        │        │   │         │
 *
 *     lane             state = key of (block, lane);  for each row: state = step(state + word);  mix(state)
 *     fingerprint      end(sum of all lanes of all blocks, length)
 *
 * **Certain.** `step`, `mix` and `end` are bijections, and so is adding. If exactly one word differs, its lane's state
 * differs from there on, the sum differs by exactly that, and so does the fingerprint.
 *
 * **Likely.** A lane is a chain, so its rows have an order. Its key makes equal words at other places another number, and
 * `mix` makes the numbers of different lanes independent: sums of those agree with probability 2^-64.
 *
 * **Why two products in a step.** A product carries differences upwards only, and data differ in few bits: in signs, in the
 * last place. One product and one shift would let a changed sign pass as a single bit, which the sign of a number in the next
 * row could take back. After two, what could take a change back is an arbitrary pattern of 32 bits or more.
 *
 * The sum has no order: threads, cores and groups of a card add their parts as they come.
 */
#ifndef MSC_FINGERPRINT_CORE_H
#define MSC_FINGERPRINT_CORE_H

#ifndef MSC__CORE
#include <stdint.h>
#define MSC__CORE static inline
#endif

#define MSC__FP_LANES 16u
#define MSC__FP_ROWS 8u
#define MSC__FP_ROW_BYTES (8u * MSC__FP_LANES)
#define MSC__FP_BLOCK_BYTES (MSC__FP_ROWS * MSC__FP_ROW_BYTES)

/** Where keys begin, and what each is beyond the one before. */
#define MSC__FP_KEY UINT64_C(0x6A09E667F3BCC909)
#define MSC__FP_KEY_STEP UINT64_C(0x9E3779B97F4A7C15)

/** Odd, or nothing below would be a bijection. */
#define MSC__FP_STEP1 UINT64_C(0xD2511F53)
#define MSC__FP_STEP2 UINT64_C(0xCD9E8D57)
#define MSC__FP_MIX1 UINT64_C(0xBF58476D1CE4E5B9)
#define MSC__FP_MIX2 UINT64_C(0x94D049BB133111EB)

#define MSC__FP_LOW UINT64_C(0x00000000FFFFFFFF)
#define MSC__FP_HIGH UINT64_C(0xFFFFFFFF00000000)

MSC__CORE uint64_t msc__fp_key(uint64_t block, uint32_t lane)
{
    return MSC__FP_KEY + (block * MSC__FP_LANES + lane) * MSC__FP_KEY_STEP;
}

/** The lower half times an odd number, into both halves: a product of 32 bits by 32, which vectors have. */
MSC__CORE uint64_t msc__fp_product(uint64_t x, uint64_t by)
{
    return (x & MSC__FP_LOW) * by + (x & MSC__FP_HIGH);
}

MSC__CORE uint64_t msc__fp_step(uint64_t x)
{
    x = msc__fp_product(x, MSC__FP_STEP1);
    x ^= x >> 32;
    return msc__fp_product(x, MSC__FP_STEP2);
}

MSC__CORE uint64_t msc__fp_mix(uint64_t x)
{
    x ^= x >> 32;
    x *= MSC__FP_MIX1;
    x ^= x >> 29;
    x *= MSC__FP_MIX2;
    return x ^ x >> 32;
}

MSC__CORE uint64_t msc__fp_end(uint64_t sum, uint64_t bytes)
{
    return msc__fp_mix(sum + (bytes + 1) * MSC__FP_KEY_STEP);
}

#endif /* MSC_FINGERPRINT_CORE_H */
