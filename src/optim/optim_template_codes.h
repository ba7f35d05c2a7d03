/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim_template_codes.h
 * The part of optim_template.h that turns 8-bit codes into moments and back. Included by it alone.
 *
 * What is named `_block` works on one block; `count` is MSC__BLOCK but in the last one, which the compiler uses. A code
 * needs the largest number of its block, so encoding takes several passes; each of them goes through all blocks of a strip
 * before the next one begins, because what one block waits for is the time in which others are worked on.
 */
#define BLOCKS (MSC__STRIP / MSC__BLOCK)

/* Elements of block `block` of a strip of `count`. */
MSC__INLINE uint32_t block_count(uint32_t block, uint32_t count)
{
    uint32_t left = count - block * MSC__BLOCK;

    return left < MSC__BLOCK ? left : MSC__BLOCK;
}

MSC__INLINE uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* ---- signed ---------------------------------------------------------------------------------------------- */

MSC__INLINE void decode_signed_block(msc__f32 *restrict m, const uint8_t *restrict code, uint8_t scale,
                                     uint32_t count)
{
    float value = msc__scale_value(scale);
    uint32_t i;

    for (i = 0; i < count; i++)
        m[i] = msc__decode_signed(code[i], value);
}

static void decode_signed(msc__f32 *restrict m, const msc__codes *codes, uint32_t count)
{
    uint32_t block;

    for (block = 0; block * MSC__BLOCK < count; block++) {
        uint32_t at = block * MSC__BLOCK;

        if (block_count(block, count) == MSC__BLOCK)
            decode_signed_block(m + at, codes->code1 + at, codes->scale1[block], MSC__BLOCK);
        else
            decode_signed_block(m + at, codes->code1 + at, codes->scale1[block], count - at);
    }
}

MSC__INLINE uint32_t most_block(const msc__f32 *restrict x, uint32_t count)
{
    uint32_t most = 0;
    uint32_t i;

    for (i = 0; i < count; i++)
        most = larger(most, msc__bits(x[i]) & ~MSC__SIGN);
    return most;
}

MSC__INLINE void encode_signed_block(uint8_t *restrict code, const msc__f32 *restrict x, uint8_t scale,
                                     const uint32_t *restrict random, uint32_t count)
{
    float inverse = msc__scale_inverse(scale);
    uint32_t i;

    for (i = 0; i < count; i++)
        code[i] = (uint8_t)msc__encode_signed(x[i], inverse, random[i]);
}

/* With the largest pattern of each block. */
MSC__INLINE void encode_signed_blocks(const msc__codes *codes, const msc__f32 *restrict x,
                                      const uint32_t *restrict most, uint32_t count,
                                      const uint32_t *restrict random)
{
    uint32_t block;

    for (block = 0; block * MSC__BLOCK < count; block++) {
        uint32_t at = block * MSC__BLOCK;
        uint8_t scale = (uint8_t)msc__scale_of(most[block], MSC__SIGNED_FRACTION);

        codes->scale1[block] = scale;
        if (block_count(block, count) == MSC__BLOCK)
            encode_signed_block(codes->code1 + at, x + at, scale, random + at, MSC__BLOCK);
        else
            encode_signed_block(codes->code1 + at, x + at, scale, random + at, count - at);
    }
}

static void encode_signed(const msc__codes *codes, const msc__f32 *restrict m, uint32_t count,
                          const uint32_t *restrict random)
{
    uint32_t most[BLOCKS];
    uint32_t block;

    for (block = 0; block * MSC__BLOCK < count; block++) {
        uint32_t at = block * MSC__BLOCK;

        if (block_count(block, count) == MSC__BLOCK)
            most[block] = most_block(m + at, MSC__BLOCK);
        else
            most[block] = most_block(m + at, count - at);
    }
    encode_signed_blocks(codes, m, most, count, random);
}

/* ---- Adam's ---------------------------------------------------------------------------------------------- */

MSC__INLINE void decode_adam_block(msc__f32 *restrict m, msc__f32 *restrict v, const msc__codes *codes,
                                   uint32_t block, uint32_t count)
{
    const uint8_t *restrict code1 = codes->code1 + block * MSC__BLOCK;
    const uint8_t *restrict code2 = codes->code2 + block * MSC__BLOCK;
    float value1 = msc__scale_value(codes->scale1[block]);
    float value2 = msc__scale_value(codes->scale2[block]);
    uint32_t i;

    for (i = 0; i < count; i++) {
        float root = msc__decode_root(code2[i], value2);

        m[i] = msc__decode_signed(code1[i], value1) * root;
        v[i] = root * root;
    }
}

static void decode_adam(msc__f32 *restrict m, msc__f32 *restrict v, const msc__codes *codes, uint32_t count)
{
    uint32_t block;

    for (block = 0; block * MSC__BLOCK < count; block++) {
        uint32_t at = block * MSC__BLOCK;

        if (block_count(block, count) == MSC__BLOCK)
            decode_adam_block(m + at, v + at, codes, block, MSC__BLOCK);
        else
            decode_adam_block(m + at, v + at, codes, block, count - at);
    }
}

/* Limits the roots, too. */
MSC__INLINE uint32_t most_root_block(msc__f32 *restrict root, uint32_t count)
{
    uint32_t most = 0;
    uint32_t i;

    for (i = 0; i < count; i++) {
        float r = root[i] < MSC__ROOT_LIMIT ? root[i] : MSC__ROOT_LIMIT;

        root[i] = r;
        most = larger(most, msc__bits(r));
    }
    return most;
}

/* Then divides m by what the code stands for, and gives the largest quotient. */
MSC__INLINE uint32_t encode_root_block(uint8_t *restrict code, msc__f32 *restrict m,
                                       const msc__f32 *restrict root, uint8_t scale,
                                       const uint32_t *restrict random, uint32_t count)
{
    float inverse = msc__scale_inverse(scale);
    float value = msc__scale_value(scale);
    uint32_t i;

    for (i = 0; i < count; i++) {
        uint32_t c = msc__encode_root(root[i], inverse, random[i] << MSC__RANDOM_OF2);
        float stored = msc__decode_root(c, value);
        float ratio = m[i] / stored;

        code[i] = (uint8_t)c;
        m[i] = stored > 0.0f ? ratio : 0.0f;
    }
    return most_block(m, count);
}

static void encode_adam(const msc__codes *codes, msc__f32 *restrict m, msc__f32 *restrict root,
                        uint32_t count, const uint32_t *restrict random)
{
    uint32_t most[BLOCKS];
    uint32_t block;

    for (block = 0; block * MSC__BLOCK < count; block++) {
        uint32_t at = block * MSC__BLOCK;

        if (block_count(block, count) == MSC__BLOCK)
            most[block] = most_root_block(root + at, MSC__BLOCK);
        else
            most[block] = most_root_block(root + at, count - at);
    }
    for (block = 0; block * MSC__BLOCK < count; block++) {
        uint32_t at = block * MSC__BLOCK;
        uint8_t scale = (uint8_t)msc__scale_of(most[block], MSC__ROOT_FRACTION);
        uint8_t *code = codes->code2 + at;

        codes->scale2[block] = scale;
        if (block_count(block, count) == MSC__BLOCK)
            most[block] = encode_root_block(code, m + at, root + at, scale, random + at, MSC__BLOCK);
        else
            most[block] = encode_root_block(code, m + at, root + at, scale, random + at, count - at);
    }
    encode_signed_blocks(codes, m, most, count, random);
}

static void roots(msc__f32 *restrict to, const msc__f32 *restrict v, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        to[i] = __builtin_sqrtf(v[i]);
}
