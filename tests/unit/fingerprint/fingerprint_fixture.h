/* SPDX-License-Identifier: Apache-2.0 */
/** @file fingerprint_fixture.h  Bytes to hash, and the definition of the hash written down a second time. */
#ifndef MSC_TEST_FINGERPRINT_FIXTURE_H
#define MSC_TEST_FINGERPRINT_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "memscale/fingerprint.h"

static inline uint64_t fixture_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9E3779B97F4A7C15);

    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

static inline void fixture_fill(unsigned char *to, size_t bytes, uint64_t seed)
{
    size_t i;

    for (i = 0; i < bytes; i++)
        to[i] = (unsigned char)(fixture_random(&seed) >> 56);
}

/* 64 bits of the product of a word's lower half, with the upper half on top. */
static inline uint64_t fixture_product(uint64_t x, uint64_t by)
{
    return (x & 0xFFFFFFFFu) * by + (x >> 32 << 32);
}

static inline uint64_t fixture_mix(uint64_t x)
{
    x = (x ^ x >> 32) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 29) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 32;
}

/* Byte `at` of the range, zeros behind the end. */
static inline uint64_t fixture_word(const unsigned char *data, uint64_t bytes, uint64_t at)
{
    uint64_t word = 0;
    uint64_t i;

    for (i = 0; i < 8 && at + i < bytes; i++)
        word |= (uint64_t)data[at + i] << 8 * i;
    return word;
}

/* Sum over block number `block`, whose bytes are those of the range from `at` on. */
static inline uint64_t fixture_block(const unsigned char *data, uint64_t bytes, uint64_t at, uint64_t block)
{
    uint64_t sum = 0;
    uint64_t lane, row;

    for (lane = 0; lane < 16; lane++) {
        uint64_t x = UINT64_C(0x6A09E667F3BCC909) + (block * 16 + lane) * UINT64_C(0x9E3779B97F4A7C15);

        for (row = 0; row < 8; row++) {
            x = fixture_product(x + fixture_word(data, bytes, at + row * 128 + lane * 8), 0xD2511F53u);
            x = fixture_product(x ^ x >> 32, 0xCD9E8D57u);
        }
        sum += fixture_mix(x);
    }
    return sum;
}

static inline uint64_t fixture_end(uint64_t sum, uint64_t bytes)
{
    return fixture_mix(sum + (bytes + 1) * UINT64_C(0x9E3779B97F4A7C15));
}

/* What `msc_fingerprint_bytes` shall give. */
static inline uint64_t fixture_fingerprint(const unsigned char *data, uint64_t bytes)
{
    uint64_t sum = 0;
    uint64_t at;

    for (at = 0; at < bytes; at += 1024)
        sum += fixture_block(data, bytes, at, at / 1024);
    return fixture_end(sum, bytes);
}

#endif /* MSC_TEST_FINGERPRINT_FIXTURE_H */
