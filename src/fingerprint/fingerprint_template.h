/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file fingerprint_template.h
 * The loop over blocks, on vectors of lanes: fingerprint_core.h, word for word. What includes it has defined
 *
 *      MSC__KERNEL           name of the function
 *      MSC__VECTOR           a type that holds MSC__WIDTH lanes
 *      MSC__AT_ONCE          vectors worked on side by side: as many as registers allow, for a step waits for the one before
 *      msc__load(p)          MSC__WIDTH words from any address
 *      msc__store(p, x)      to any address
 *      msc__all(word)        the same word in each lane
 *      msc__add, msc__and, msc__xor, msc__right(x, bits)
 *      msc__low_product(x, y)   of the lower halves, 64 bits
 *      msc__whole_product(x, y) of the words, modulo 2^64
 */
#include <stddef.h>

#include "fingerprint/fingerprint_core.h"
#include "fingerprint/fingerprint_kernels.h"

#define VECTORS (MSC__FP_LANES / MSC__WIDTH)
#define VECTOR_BYTES (8u * MSC__WIDTH)
#define INLINE static inline __attribute__((always_inline))

INLINE MSC__VECTOR product(MSC__VECTOR x, uint64_t by)
{
    return msc__add(msc__low_product(x, msc__all(by)), msc__and(x, msc__all(MSC__FP_HIGH)));
}

INLINE MSC__VECTOR step(MSC__VECTOR x)
{
    x = product(x, MSC__FP_STEP1);
    x = msc__xor(x, msc__right(x, 32));
    return product(x, MSC__FP_STEP2);
}

INLINE MSC__VECTOR mix(MSC__VECTOR x)
{
    x = msc__xor(x, msc__right(x, 32));
    x = msc__whole_product(x, MSC__FP_MIX1);
    x = msc__xor(x, msc__right(x, 29));
    x = msc__whole_product(x, MSC__FP_MIX2);
    return msc__xor(x, msc__right(x, 32));
}

/* Lanes from `vector` on, as many as are worked on side by side. */
INLINE void do_lanes(const unsigned char *at, const MSC__VECTOR *key, MSC__VECTOR *sum)
{
    MSC__VECTOR state[MSC__AT_ONCE];
    uint32_t row, i;

    for (i = 0; i < MSC__AT_ONCE; i++)
        state[i] = key[i];
    for (row = 0; row < MSC__FP_ROWS; row++)
        for (i = 0; i < MSC__AT_ONCE; i++)
            state[i] =
                step(msc__add(state[i], msc__load(at + row * MSC__FP_ROW_BYTES + (size_t)i * VECTOR_BYTES)));
    for (i = 0; i < MSC__AT_ONCE; i++)
        sum[i] = msc__add(sum[i], mix(state[i]));
}

INLINE void fetch(const unsigned char *block)
{
    uint32_t line;

    for (line = 0; line < MSC__FP_BLOCK_BYTES; line += 64)
        __builtin_prefetch(block + line);
}

static uint64_t total(const MSC__VECTOR *sum)
{
    uint64_t words[MSC__FP_LANES];
    uint64_t all = 0;
    uint32_t i;

    for (i = 0; i < VECTORS; i++)
        msc__store(words + (size_t)i * MSC__WIDTH, sum[i]);
    for (i = 0; i < MSC__FP_LANES; i++)
        all += words[i];
    return all;
}

uint64_t MSC__KERNEL(const unsigned char *at, uint64_t first, uint64_t count, const unsigned char *ahead)
{
    uint64_t keys[MSC__FP_LANES];
    MSC__VECTOR key[VECTORS];
    MSC__VECTOR sum[VECTORS];
    uint32_t i;

    for (i = 0; i < MSC__FP_LANES; i++)
        keys[i] = msc__fp_key(first, i);
    for (i = 0; i < VECTORS; i++) {
        key[i] = msc__load((const unsigned char *)keys + (size_t)i * VECTOR_BYTES);
        sum[i] = msc__all(0);
    }
    for (; count > 0; count--, at += MSC__FP_BLOCK_BYTES) {
        if (ahead != NULL) {
            fetch(ahead);
            ahead += MSC__FP_BLOCK_BYTES;
        }
        for (i = 0; i < VECTORS; i += MSC__AT_ONCE)
            do_lanes(at + (size_t)i * VECTOR_BYTES, key + i, sum + i);
        for (i = 0; i < VECTORS; i++)
            key[i] = msc__add(key[i], msc__all(MSC__FP_LANES * MSC__FP_KEY_STEP));
    }
    return total(sum);
}
