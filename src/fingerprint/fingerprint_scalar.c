/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel for what the compiler's target has by itself. Words are little-endian, as everywhere in this library's
 * formats.
 */
#include <string.h>

#include "fingerprint/fingerprint_kernels.h"

#define MSC__KERNEL msc__fp_scalar
#define MSC__VECTOR uint64_t
#define MSC__WIDTH 1u
#define MSC__AT_ONCE 4u

static inline uint64_t msc__load(const unsigned char *from)
{
    uint64_t word;

    memcpy(&word, from, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

#define msc__store(to, x) (*(to) = (x))
#define msc__all(word) ((uint64_t)(word))
#define msc__add(x, y) ((x) + (y))
#define msc__and(x, y) ((x) & (y))
#define msc__xor(x, y) ((x) ^ (y))
#define msc__right(x, bits) ((x) >> (bits))
#define msc__low_product(x, y) (((x)&MSC__FP_LOW) * (y))
#define msc__whole_product(x, y) ((x) * (y))

#include "fingerprint/fingerprint_template.h"
