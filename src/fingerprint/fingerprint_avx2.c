/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel for AVX2, which has no product of 64 bits by 64: it takes three of 32 by 32. */
#include <immintrin.h>

#include "fingerprint/fingerprint_kernels.h"

#define MSC__KERNEL msc__fp_avx2
#define MSC__VECTOR __m256i
#define MSC__WIDTH 4u
#define MSC__AT_ONCE 4u

#define msc__load(from) _mm256_loadu_si256((const __m256i *)(const void *)(from))
#define msc__store(to, x) _mm256_storeu_si256((__m256i *)(void *)(to), x)
#define msc__all(word) _mm256_set1_epi64x((long long)(word))
#define msc__add(x, y) _mm256_add_epi64(x, y)
#define msc__and(x, y) _mm256_and_si256(x, y)
#define msc__xor(x, y) _mm256_xor_si256(x, y)
#define msc__right(x, bits) _mm256_srli_epi64(x, bits)
#define msc__low_product(x, y) _mm256_mul_epu32(x, y)

static inline __m256i msc__whole_product(__m256i x, uint64_t by)
{
    __m256i low = _mm256_mul_epu32(x, msc__all(by));
    __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(x, msc__all(by >> 32)),
                                     _mm256_mul_epu32(_mm256_srli_epi64(x, 32), msc__all(by)));

    return _mm256_add_epi64(low, _mm256_slli_epi64(cross, 32));
}

#include "fingerprint/fingerprint_template.h"
