/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file lanes.h
 * As many numbers as a vector holds, for loops that compilers do not turn into vectors well: those with bytes in them.
 *
 * A float or an integer of 32 bits in each lane. Operators work on all lanes, and with a single number on the other side;
 * what has no operator is here. Each function does the same to each lane, whatever the number of lanes, so a text that
 * is written on lanes says what is done to one element, and all sets give the same bits.
 */
#ifndef MSC_OPTIM_LANES_H
#define MSC_OPTIM_LANES_H

#include <stdint.h>
#include <string.h>

#include "optim/convert_core.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#define MSC__LANES_512
#define MSC__LANES 16u
#elif defined(__AVX2__)
#include <immintrin.h>
#define MSC__LANES_256
#define MSC__LANES 8u
#else
#define MSC__LANES 4u
#endif

typedef float msc__lanes __attribute__((vector_size(4 * MSC__LANES)));
typedef uint32_t msc__ulanes __attribute__((vector_size(4 * MSC__LANES)));

/** What is stored as bytes at a time: vectors, and elements. */
#define MSC__FOUR 4u
#define MSC__GROUP (MSC__FOUR * MSC__LANES)

#define MSC__LANE_INLINE static inline __attribute__((always_inline))

MSC__LANE_INLINE msc__ulanes msc__lane_bits(msc__lanes x)
{
    msc__ulanes bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

MSC__LANE_INLINE msc__lanes msc__lane_floats(msc__ulanes bits)
{
    msc__lanes x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

MSC__LANE_INLINE msc__lanes msc__load(const void *from)
{
    msc__lanes x;

    memcpy(&x, from, sizeof x);
    return x;
}

MSC__LANE_INLINE msc__ulanes msc__load_bits(const void *from)
{
    msc__ulanes bits;

    memcpy(&bits, from, sizeof bits);
    return bits;
}

MSC__LANE_INLINE void msc__store(void *to, msc__lanes x)
{
    memcpy(to, &x, sizeof x);
}

/* ---- 16 lanes ------------------------------------------------------------------------------------------- */

#if defined(MSC__LANES_512)

/** 0, step, 2 step, … */
MSC__LANE_INLINE msc__ulanes msc__rising(uint32_t step)
{
    const msc__ulanes numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

    return numbers * step;
}

/** -limit to limit; a NaN stays one. */
MSC__LANE_INLINE msc__lanes msc__clamp(msc__lanes x, float limit)
{
    x = _mm512_min_ps(_mm512_set1_ps(limit), x);
    return _mm512_max_ps(_mm512_set1_ps(-limit), x);
}

/** The limit for a NaN, too. */
MSC__LANE_INLINE msc__lanes msc__at_most(msc__lanes x, float limit)
{
    return _mm512_min_ps(x, _mm512_set1_ps(limit));
}

MSC__LANE_INLINE msc__lanes msc__sqrt(msc__lanes x)
{
    return _mm512_sqrt_ps(x);
}

MSC__LANE_INLINE msc__ulanes msc__larger(msc__ulanes a, msc__ulanes b)
{
    return (msc__ulanes)_mm512_max_epu32((__m512i)a, (__m512i)b);
}

MSC__LANE_INLINE msc__ulanes msc__smaller(msc__ulanes a, uint32_t b)
{
    return (msc__ulanes)_mm512_min_epu32((__m512i)a, _mm512_set1_epi32((int)b));
}

MSC__LANE_INLINE uint32_t msc__largest(msc__ulanes a)
{
    return _mm512_reduce_max_epu32((__m512i)a);
}

/** a / b, and 0 where b is. */
MSC__LANE_INLINE msc__lanes msc__ratio(msc__lanes a, msc__lanes b)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(b, _mm512_setzero_ps(), _CMP_GT_OQ), _mm512_div_ps(a, b));
}

MSC__LANE_INLINE msc__ulanes msc__load_bytes(const uint8_t *from)
{
    return (msc__ulanes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
}

MSC__LANE_INLINE msc__ulanes msc__load_signed_bytes(const uint8_t *from)
{
    return (msc__ulanes)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
}

MSC__LANE_INLINE msc__ulanes msc__load_halves(const void *from)
{
    return (msc__ulanes)_mm512_cvtepu16_epi32(_mm256_loadu_si256(from));
}

/** The lower bytes of four times as many numbers, below 2^15 each. */
MSC__LANE_INLINE void msc__store_bytes(uint8_t *to, const msc__ulanes x[MSC__FOUR])
{
    const __m512i byte = _mm512_set1_epi16(0xFF);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = _mm512_and_si512(_mm512_packus_epi32((__m512i)x[0], (__m512i)x[1]), byte);
    __m512i high = _mm512_and_si512(_mm512_packus_epi32((__m512i)x[2], (__m512i)x[3]), byte);

    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
}

/** The bytes above the lower ones, of any numbers. */
MSC__LANE_INLINE void msc__store_second_bytes(uint8_t *to, const msc__ulanes x[MSC__FOUR])
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = _mm512_packus_epi32((__m512i)(x[0] & 0xFFFFu), (__m512i)(x[1] & 0xFFFFu));
    __m512i high = _mm512_packus_epi32((__m512i)(x[2] & 0xFFFFu), (__m512i)(x[3] & 0xFFFFu));

    low = _mm512_packus_epi16(_mm512_srli_epi16(low, 8), _mm512_srli_epi16(high, 8));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, low));
}

/** The upper halves of twice as many numbers. */
MSC__LANE_INLINE void msc__store_halves(void *to, msc__ulanes a, msc__ulanes b)
{
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                         29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);

    _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)a, odd, (__m512i)b));
}

/* ---- 8 lanes -------------------------------------------------------------------------------------------- */

#elif defined(MSC__LANES_256)

MSC__LANE_INLINE msc__ulanes msc__rising(uint32_t step)
{
    const msc__ulanes numbers = {0, 1, 2, 3, 4, 5, 6, 7};

    return numbers * step;
}

MSC__LANE_INLINE msc__lanes msc__clamp(msc__lanes x, float limit)
{
    x = _mm256_min_ps(_mm256_set1_ps(limit), x);
    return _mm256_max_ps(_mm256_set1_ps(-limit), x);
}

MSC__LANE_INLINE msc__lanes msc__at_most(msc__lanes x, float limit)
{
    return _mm256_min_ps(x, _mm256_set1_ps(limit));
}

MSC__LANE_INLINE msc__lanes msc__sqrt(msc__lanes x)
{
    return _mm256_sqrt_ps(x);
}

MSC__LANE_INLINE msc__ulanes msc__larger(msc__ulanes a, msc__ulanes b)
{
    return (msc__ulanes)_mm256_max_epu32((__m256i)a, (__m256i)b);
}

MSC__LANE_INLINE msc__ulanes msc__smaller(msc__ulanes a, uint32_t b)
{
    return (msc__ulanes)_mm256_min_epu32((__m256i)a, _mm256_set1_epi32((int)b));
}

MSC__LANE_INLINE uint32_t msc__largest(msc__ulanes a)
{
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));

    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4E));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(x);
}

MSC__LANE_INLINE msc__lanes msc__ratio(msc__lanes a, msc__lanes b)
{
    return _mm256_and_ps(_mm256_div_ps(a, b), _mm256_cmp_ps(b, _mm256_setzero_ps(), _CMP_GT_OQ));
}

MSC__LANE_INLINE msc__ulanes msc__load_bytes(const uint8_t *from)
{
    return (msc__ulanes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
}

MSC__LANE_INLINE msc__ulanes msc__load_signed_bytes(const uint8_t *from)
{
    return (msc__ulanes)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
}

MSC__LANE_INLINE msc__ulanes msc__load_halves(const void *from)
{
    return (msc__ulanes)_mm256_cvtepu16_epi32(_mm_loadu_si128(from));
}

MSC__LANE_INLINE void msc__store_bytes(uint8_t *to, const msc__ulanes x[MSC__FOUR])
{
    const __m256i byte = _mm256_set1_epi16(0xFF);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i low = _mm256_and_si256(_mm256_packus_epi32((__m256i)x[0], (__m256i)x[1]), byte);
    __m256i high = _mm256_and_si256(_mm256_packus_epi32((__m256i)x[2], (__m256i)x[3]), byte);

    _mm256_storeu_si256((__m256i *)(void *)to,
                        _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
}

MSC__LANE_INLINE void msc__store_second_bytes(uint8_t *to, const msc__ulanes x[MSC__FOUR])
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i low = _mm256_packus_epi32((__m256i)(x[0] & 0xFFFFu), (__m256i)(x[1] & 0xFFFFu));
    __m256i high = _mm256_packus_epi32((__m256i)(x[2] & 0xFFFFu), (__m256i)(x[3] & 0xFFFFu));

    low = _mm256_packus_epi16(_mm256_srli_epi16(low, 8), _mm256_srli_epi16(high, 8));
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_permutevar8x32_epi32(low, order));
}

MSC__LANE_INLINE void msc__store_halves(void *to, msc__ulanes a, msc__ulanes b)
{
    __m256i both = _mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16));

    _mm256_storeu_si256(to, _mm256_permute4x64_epi64(both, 0xD8));
}

/* ---- 4 lanes, of any vectors that there are ----------------------------------------------------------------- */

#else

typedef uint8_t msc__byte_lanes __attribute__((vector_size(MSC__LANES)));
typedef uint16_t msc__half_lanes __attribute__((vector_size(2 * MSC__LANES)));

MSC__LANE_INLINE msc__ulanes msc__select(msc__ulanes mask, msc__ulanes a, msc__ulanes b)
{
    return (a & mask) | (b & ~mask);
}

MSC__LANE_INLINE msc__ulanes msc__rising(uint32_t step)
{
    const msc__ulanes numbers = {0, 1, 2, 3};

    return numbers * step;
}

MSC__LANE_INLINE msc__lanes msc__clamp(msc__lanes x, float limit)
{
    const msc__lanes most = {limit, limit, limit, limit};
    msc__ulanes clamped = msc__select((msc__ulanes)(x > most), msc__lane_bits(most), msc__lane_bits(x));

    x = msc__lane_floats(clamped);
    return msc__lane_floats(msc__select((msc__ulanes)(x < -most), msc__lane_bits(-most), clamped));
}

MSC__LANE_INLINE msc__lanes msc__at_most(msc__lanes x, float limit)
{
    const msc__lanes most = {limit, limit, limit, limit};

    return msc__lane_floats(msc__select((msc__ulanes)(x < most), msc__lane_bits(x), msc__lane_bits(most)));
}

MSC__LANE_INLINE msc__lanes msc__sqrt(msc__lanes x)
{
    const msc__lanes root = {__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]),
                             __builtin_sqrtf(x[3])};

    return root;
}

MSC__LANE_INLINE msc__ulanes msc__larger(msc__ulanes a, msc__ulanes b)
{
    return msc__select((msc__ulanes)(a > b), a, b);
}

MSC__LANE_INLINE msc__ulanes msc__smaller(msc__ulanes a, uint32_t b)
{
    const msc__ulanes most = {b, b, b, b};

    return msc__select((msc__ulanes)(a < most), a, most);
}

MSC__LANE_INLINE uint32_t msc__largest(msc__ulanes a)
{
    uint32_t first = a[0] > a[1] ? a[0] : a[1];
    uint32_t second = a[2] > a[3] ? a[2] : a[3];

    return first > second ? first : second;
}

MSC__LANE_INLINE msc__lanes msc__ratio(msc__lanes a, msc__lanes b)
{
    const msc__lanes none = {0.0f, 0.0f, 0.0f, 0.0f};

    return msc__lane_floats(msc__lane_bits(a / b) & (msc__ulanes)(b > none));
}

MSC__LANE_INLINE msc__ulanes msc__load_bytes(const uint8_t *from)
{
    msc__byte_lanes bytes;

    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, msc__ulanes);
}

MSC__LANE_INLINE msc__ulanes msc__load_signed_bytes(const uint8_t *from)
{
    return (msc__load_bytes(from) ^ 0x80u) - 0x80u;
}

MSC__LANE_INLINE msc__ulanes msc__load_halves(const void *from)
{
    msc__half_lanes halves;

    memcpy(&halves, from, sizeof halves);
    return __builtin_convertvector(halves, msc__ulanes);
}

MSC__LANE_INLINE void msc__store_bytes(uint8_t *to, const msc__ulanes x[MSC__FOUR])
{
    uint32_t i;

    for (i = 0; i < MSC__FOUR; i++) {
        msc__byte_lanes bytes = __builtin_convertvector(x[i] & 0xFFu, msc__byte_lanes);

        memcpy(to + i * MSC__LANES, &bytes, sizeof bytes);
    }
}

MSC__LANE_INLINE void msc__store_second_bytes(uint8_t *to, const msc__ulanes x[MSC__FOUR])
{
    const msc__ulanes bytes[MSC__FOUR] = {x[0] >> 8, x[1] >> 8, x[2] >> 8, x[3] >> 8};

    msc__store_bytes(to, bytes);
}

MSC__LANE_INLINE void msc__store_halves(void *to, msc__ulanes a, msc__ulanes b)
{
    const msc__half_lanes halves[2] = {__builtin_convertvector(a >> 16, msc__half_lanes),
                                       __builtin_convertvector(b >> 16, msc__half_lanes)};

    memcpy(to, halves, sizeof halves);
}

#endif

/** `msc__random` of each. */
MSC__LANE_INLINE msc__ulanes msc__lane_random(msc__ulanes x)
{
    x = (x ^ x >> 15) * MSC__RANDOM_FACTOR;
    return x ^ x >> 16;
}

#endif /* MSC_OPTIM_LANES_H */
