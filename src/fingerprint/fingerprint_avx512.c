/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel for AVX-512, F and DQ. */
#include <immintrin.h>

#include "fingerprint/fingerprint_kernels.h"

#define MSC__KERNEL msc__fp_avx512
#define MSC__VECTOR __m512i
#define MSC__WIDTH 8u
#define MSC__AT_ONCE 2u

#define msc__load(from) _mm512_loadu_si512(from)
#define msc__store(to, x) _mm512_storeu_si512(to, x)
#define msc__all(word) _mm512_set1_epi64((long long)(word))
#define msc__add(x, y) _mm512_add_epi64(x, y)
#define msc__and(x, y) _mm512_and_si512(x, y)
#define msc__xor(x, y) _mm512_xor_si512(x, y)
#define msc__right(x, bits) _mm512_srli_epi64(x, bits)
#define msc__low_product(x, y) _mm512_mul_epu32(x, y)
#define msc__whole_product(x, y) _mm512_mullo_epi64(x, msc__all(y))

#include "fingerprint/fingerprint_template.h"
