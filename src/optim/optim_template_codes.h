/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim_template_codes.h
 * The part of optim_template.h for 8-bit codes, in whole blocks. Included by it alone.
 *
 * A code needs the largest number of its block, so blocks are gone through twice; all of a strip for the first time before
 * the second, because what one block waits for is the time in which others are worked on.
 */
#include "optim/codes_core.h"

#define BLOCKS (MSC__STRIP / MSC__BLOCK)

/* ---- one block ------------------------------------------------------------------------------------------- */

MSC__INLINE uint32_t most_of(const float *x)
{
    msc__ulanes most = msc__load_bits(x) & ~MSC__SIGN;
    uint32_t i;

    for (i = MSC__LANES; i < MSC__BLOCK; i += MSC__LANES)
        most = msc__larger(most, msc__load_bits(x + i) & ~MSC__SIGN);
    return msc__largest(most);
}

MSC__INLINE void encode_signed_block(uint8_t *code, uint32_t scale, const float *x, const uint32_t *random)
{
    float inverse = msc__scale_inverse(scale);
    msc__ulanes codes[MSC__FOUR];
    uint32_t i, k;

    for (i = 0; i < MSC__BLOCK; i += MSC__GROUP) {
        for (k = 0; k < MSC__FOUR; k++) {
            uint32_t at = i + k * MSC__LANES;

            codes[k] = msc__encode_signed(msc__load(x + at), inverse, msc__load_bits(random + at));
        }
        msc__store_bytes(code + i, codes);
    }
}

MSC__INLINE void decode_signed_block(float *x, const uint8_t *code, uint32_t scale)
{
    float value = msc__scale_value(scale);
    uint32_t i;

    for (i = 0; i < MSC__BLOCK; i += MSC__LANES)
        msc__store(x + i, msc__decode_signed(msc__load_signed_bytes(code + i), value));
}

MSC__INLINE void encode_root_block(uint8_t *code, uint32_t scale, const float *root, const uint32_t *random)
{
    float inverse = msc__scale_inverse(scale);
    msc__ulanes codes[MSC__FOUR];
    uint32_t i, k;

    for (i = 0; i < MSC__BLOCK; i += MSC__GROUP) {
        for (k = 0; k < MSC__FOUR; k++) {
            uint32_t at = i + k * MSC__LANES;

            codes[k] = msc__encode_root(msc__load(root + at), inverse, msc__load_bits(random + at));
        }
        msc__store_bytes(code + i, codes);
    }
}

MSC__INLINE void decode_root_block(float *root, const uint8_t *code, uint32_t scale)
{
    float value = msc__scale_value(scale);
    uint32_t i;

    for (i = 0; i < MSC__BLOCK; i += MSC__LANES)
        msc__store(root + i, msc__decode_root(msc__load_bytes(code + i), value));
}

/* ---- SGD's and Lion's -------------------------------------------------------------------------------------- */

static void decode_signed(float *m, const msc__codes *codes, uint32_t blocks)
{
    uint32_t i;

    for (i = 0; i < blocks; i++)
        decode_signed_block(m + i * MSC__BLOCK, codes->code1 + i * MSC__BLOCK, codes->scale1[i]);
}

static void encode_signed(const msc__codes *codes, const float *m, uint32_t blocks, const uint32_t *random)
{
    uint32_t most[BLOCKS];
    uint32_t i;

    for (i = 0; i < blocks; i++)
        most[i] = most_of(m + i * MSC__BLOCK);
    for (i = 0; i < blocks; i++) {
        uint32_t scale = msc__scale_of(most[i], MSC__SIGNED_FRACTION);

        codes->scale1[i] = (uint8_t)scale;
        encode_signed_block(codes->code1 + i * MSC__BLOCK, scale, m + i * MSC__BLOCK,
                            random + i * MSC__BLOCK);
    }
}

/* ---- what comes from elsewhere ------------------------------------------------------------------------------ */

/*
 * Rounded to nearest, in the smallest scale that holds a block, as everything; but in the next larger one, if that holds
 * all of it exactly and the smallest does not. A step that has rounded the largest number of a block down may have left
 * such a block; this way, what has been read is the same when it has been written.
 */

MSC__INLINE int is_same(const float *a, const float *b)
{
    msc__ulanes differ = {0};
    uint32_t i;

    for (i = 0; i < MSC__BLOCK; i += MSC__LANES)
        differ = differ | (msc__load_bits(a + i) ^ msc__load_bits(b + i));
    return msc__largest(differ) == 0;
}

/* What has been stored is loaded, not taken from registers: gcc 12 does that with a form of vmovq that valgrind 3.19
   does not know. */
MSC__INLINE void through_memory(void)
{
    __asm__ volatile("" ::: "memory");
}

MSC__INLINE void write_signed_block(uint8_t *code, uint8_t *scale, const float *x, const uint32_t *nearest)
{
    uint32_t smallest = msc__scale_of(most_of(x), MSC__SIGNED_FRACTION);
    uint32_t i;
    float back[MSC__BLOCK];

    for (i = smallest; i < smallest + 2; i++) {
        encode_signed_block(code, i, x, nearest);
        through_memory();
        decode_signed_block(back, code, i);
        *scale = (uint8_t)i;
        if (is_same(back, x))
            return;
    }
    encode_signed_block(code, smallest, x, nearest);
    *scale = (uint8_t)smallest;
}

MSC__INLINE void write_root_block(uint8_t *code, uint8_t *scale, const float *root, const uint32_t *nearest)
{
    uint32_t smallest = msc__scale_of(most_of(root), MSC__ROOT_FRACTION);
    uint32_t i;
    float back[MSC__BLOCK];

    for (i = smallest; i < smallest + 2; i++) {
        encode_root_block(code, i, root, nearest);
        through_memory();
        decode_root_block(back, code, i);
        *scale = (uint8_t)i;
        if (is_same(back, root))
            return;
    }
    encode_root_block(code, smallest, root, nearest);
    *scale = (uint8_t)smallest;
}

static void write_signed(const msc__codes *codes, const float *m, uint32_t blocks)
{
    uint32_t nearest[MSC__BLOCK];
    uint32_t i;

    for (i = 0; i < MSC__BLOCK; i++)
        nearest[i] = MSC__NEAREST_CODES;
    for (i = 0; i < blocks; i++)
        write_signed_block(codes->code1 + i * MSC__BLOCK, &codes->scale1[i], m + i * MSC__BLOCK, nearest);
}

/* m over the root that has been stored, so that it is as near as can be. */
static void write_adam(const msc__codes *codes, float *m, float *v, uint32_t blocks)
{
    uint32_t nearest[MSC__BLOCK];
    uint32_t i, k;

    for (i = 0; i < MSC__BLOCK; i++)
        nearest[i] = MSC__NEAREST_CODES;
    for (i = 0; i < blocks; i++) {
        uint8_t *code = codes->code2 + i * MSC__BLOCK;
        float *ratio = m + i * MSC__BLOCK;
        float *root = v + i * MSC__BLOCK;

        for (k = 0; k < MSC__BLOCK; k += MSC__LANES)
            msc__store(root + k, msc__at_most(msc__sqrt(msc__load(root + k)), MSC__ROOT_LIMIT));
        write_root_block(code, &codes->scale2[i], root, nearest);
        through_memory();
        decode_root_block(root, code, codes->scale2[i]);
        for (k = 0; k < MSC__BLOCK; k += MSC__LANES)
            msc__store(ratio + k, msc__ratio(msc__load(ratio + k), msc__load(root + k)));
    }
    write_signed(codes, m, blocks);
}

/* ---- Adam's -------------------------------------------------------------------------------------------- */

static void decode_adam(float *m, float *v, const msc__codes *codes, uint32_t blocks)
{
    uint32_t i, k;

    for (i = 0; i < blocks; i++) {
        decode_signed_block(m + i * MSC__BLOCK, codes->code1 + i * MSC__BLOCK, codes->scale1[i]);
        decode_root_block(v + i * MSC__BLOCK, codes->code2 + i * MSC__BLOCK, codes->scale2[i]);
        for (k = i * MSC__BLOCK; k < (i + 1) * MSC__BLOCK; k += MSC__LANES) {
            msc__lanes root = msc__load(v + k);

            msc__store(m + k, msc__load(m + k) * root);
            msc__store(v + k, root * root);
        }
    }
}
