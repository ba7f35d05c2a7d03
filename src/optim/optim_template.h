/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file optim_template.h
 * The kernels themselves. Included once by optim_scalar.c, optim_avx2.c and optim_avx512.c, which define MSC__TABLE, the
 * name of the table, and MSC__DOUBLES, how many of them a vector holds, and are compiled with the flags of their
 * instruction set.
 *
 * Plain loops that compilers turn into vectors at -O3; the sums alone say which sixteen lanes they have, because the
 * order of additions shows in the result. Only static inline functions are called: an ordinary one would be shared
 * between the libraries, and the linker would keep that of any instruction set.
 */
#include "optim/optim_kernels.h"

#define MSC__BLOCK MSC_OPTIM_BLOCK
#define MSC__INLINE static inline __attribute__((always_inline))

/* ---- types --------------------------------------------------------------------------------------------- */

static void widen_fp32(msc__f32 *restrict to, const void *from, uint32_t count)
{
    memcpy(to, from, count * sizeof *to);
}

static void widen_bf16(msc__f32 *restrict to, const void *from, uint32_t count)
{
    const msc__u16 *restrict half = from;
    uint32_t i;

    for (i = 0; i < count; i++)
        to[i] = msc__widen_bf16(half[i]);
}

static void widen_fp16(msc__f32 *restrict to, const void *from, uint32_t count)
{
    const msc__u16 *restrict half = from;
    uint32_t i;

    for (i = 0; i < count; i++)
        to[i] = msc__widen_fp16(half[i]);
}

static void narrow_fp32(void *to, const msc__f32 *restrict from, uint32_t count)
{
    memcpy(to, from, count * sizeof *from);
}

static void narrow_bf16(void *to, const msc__f32 *restrict from, uint32_t count)
{
    msc__u16 *restrict half = to;
    uint32_t i;

    for (i = 0; i < count; i++)
        half[i] = msc__narrow_bf16(from[i]);
}

static void narrow_fp16(void *to, const msc__f32 *restrict from, uint32_t count)
{
    msc__u16 *restrict half = to;
    uint32_t i;

    for (i = 0; i < count; i++)
        half[i] = msc__narrow_fp16(from[i]);
}

static void narrow_bf16_random(void *to, const msc__f32 *restrict from, uint32_t count,
                               const uint32_t *restrict random, uint32_t part)
{
    msc__u16 *restrict half = to;
    uint32_t i;

    for (i = 0; i < count; i++)
        half[i] = msc__narrow_bf16_random(from[i], random[i] << part);
}

static void fill_random(uint32_t *restrict to, uint32_t first, uint32_t seed, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        to[i] = msc__random(first + i, seed);
}

/* ---- masters with a rest ------------------------------------------------------------------------------- */

static void join_rest16(msc__f32 *restrict to, const void *weight, const void *rest, uint32_t count)
{
    const msc__u16 *restrict upper = weight;
    const msc__u16 *restrict lower = rest;
    uint32_t i;

    for (i = 0; i < count; i++)
        to[i] = msc__join_rest16(upper[i], lower[i]);
}

static void join_rest8(msc__f32 *restrict to, const void *weight, const void *rest, uint32_t count)
{
    const msc__u16 *restrict upper = weight;
    const uint8_t *restrict lower = rest;
    uint32_t i;

    for (i = 0; i < count; i++)
        to[i] = msc__join_rest8(upper[i], lower[i]);
}

static void split_rest16(void *weight, void *rest, const msc__f32 *restrict from, uint32_t count)
{
    msc__u16 *restrict upper = weight;
    msc__u16 *restrict lower = rest;
    uint32_t i;

    for (i = 0; i < count; i++) {
        uint32_t master = msc__master_bits(from[i]);

        upper[i] = msc__master_weight(master);
        lower[i] = (uint16_t)(master & 0xFFFFu);
    }
}

static void split_rest8(void *weight, void *rest, const msc__f32 *restrict from, uint32_t count,
                        const uint32_t *restrict random)
{
    msc__u16 *restrict upper = weight;
    uint8_t *restrict lower = rest;
    uint32_t i;

    for (i = 0; i < count; i++) {
        uint32_t master = msc__master24_bits(from[i], random[i] << MSC__RANDOM_MASTER);

        upper[i] = msc__master_weight(master);
        lower[i] = (uint8_t)(master >> 8 & 0xFFu);
    }
}

#include "optim/optim_template_codes.h"

/* ---- updates ------------------------------------------------------------------------------------------- */

MSC__INLINE void adam_strip(const msc__optim_numbers *by, int rooted, int l2, msc__f32 *restrict w,
                            const msc__f32 *restrict g, msc__moments moments, uint32_t count)
{
    msc__optim_numbers numbers = *by;
    msc__f32 *restrict m = moments.of1;
    msc__f32 *restrict v = moments.of2;
    uint32_t i;

    for (i = 0; i < count; i++) {
        float weight = w[i];
        float first = m[i];
        float second = v[i];
        float root = msc__adam(&numbers, l2, g[i], &weight, &first, &second);

        w[i] = weight;
        m[i] = first;
        v[i] = rooted ? root : second;
    }
}

static void adam(const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g, msc__moments moments,
                 uint32_t count)
{
    if (by->l2 != 0.0f)
        adam_strip(by, 0, 1, w, g, moments, count);
    else
        adam_strip(by, 0, 0, w, g, moments, count);
}

static void adam_root(const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g, msc__moments moments,
                      uint32_t count)
{
    if (by->l2 != 0.0f)
        adam_strip(by, 1, 1, w, g, moments, count);
    else
        adam_strip(by, 1, 0, w, g, moments, count);
}

static void sgd_plain(const msc__optim_numbers *by, msc__f32 *restrict w, const msc__f32 *restrict g,
                      msc__f32 *restrict m, uint32_t count)
{
    msc__optim_numbers numbers = *by;
    uint32_t i;

    (void)m;
    for (i = 0; i < count; i++) {
        float weight = w[i];

        msc__sgd(&numbers, g[i], &weight);
        w[i] = weight;
    }
}

MSC__INLINE void sgd_strip(const msc__optim_numbers *by, int nesterov, msc__f32 *restrict w,
                           const msc__f32 *restrict g, msc__f32 *restrict m, uint32_t count)
{
    msc__optim_numbers numbers = *by;
    uint32_t i;

    for (i = 0; i < count; i++) {
        float weight = w[i];
        float moment = m[i];

        msc__sgd_momentum(&numbers, nesterov, g[i], &weight, &moment);
        w[i] = weight;
        m[i] = moment;
    }
}

static void sgd_momentum(const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g, msc__f32 *m,
                         uint32_t count)
{
    sgd_strip(by, 0, w, g, m, count);
}

static void sgd_nesterov(const msc__optim_numbers *by, msc__f32 *w, const msc__f32 *g, msc__f32 *m,
                         uint32_t count)
{
    sgd_strip(by, 1, w, g, m, count);
}

static void lion(const msc__optim_numbers *by, msc__f32 *restrict w, const msc__f32 *restrict g,
                 msc__f32 *restrict m, uint32_t count)
{
    msc__optim_numbers numbers = *by;
    uint32_t i;

    for (i = 0; i < count; i++) {
        float weight = w[i];
        float moment = m[i];

        msc__lion(&numbers, g[i], &weight, &moment);
        w[i] = weight;
        m[i] = moment;
    }
}

/* ---- sums ---------------------------------------------------------------------------------------------- */

static void add(msc__f32 *restrict sums, const msc__f32 *restrict g, uint32_t count)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        sums[i] = sums[i] + g[i];
}

#define LANES 16u
#define WIDTH MSC__DOUBLES
#define GROUPS (LANES / WIDTH)

typedef float group_f32 __attribute__((vector_size(WIDTH * sizeof(float))));
typedef int32_t group_i32 __attribute__((vector_size(WIDTH * sizeof(int32_t))));
typedef double group_f64 __attribute__((vector_size(WIDTH * sizeof(double))));

/* Adds as many squares; lanes that are not finite are left out and not counted. */
MSC__INLINE void add_squares(const msc__f32 *values, float scale, group_f64 *sum, group_i32 *finite_count)
{
    group_f32 x;
    group_i32 bits, finite;
    group_f64 wide;

    memcpy(&x, values, sizeof x);
    x = x * scale;
    memcpy(&bits, &x, sizeof bits);
    finite = (bits & 0x7FFFFFFF) < (int32_t)MSC__EXPONENT;
    bits = bits & finite;
    memcpy(&x, &bits, sizeof x);
    wide = __builtin_convertvector(x, group_f64);
    *sum = *sum + wide * wide;
    *finite_count = *finite_count - finite;
}

static uint32_t squares(const msc__f32 *g, uint32_t count, float scale, double *sum)
{
    float rest[LANES] = {0.0f};
    group_f64 sums[GROUPS] = {{0.0}};
    group_i32 finite[GROUPS] = {{0}};
    double lanes[LANES];
    uint32_t finite_count = 0;
    uint32_t at, i, width;

    for (at = 0; at + LANES <= count; at += LANES)
        for (i = 0; i < GROUPS; i++)
            add_squares(g + at + WIDTH * i, scale, &sums[i], &finite[i]);
    for (i = 0; at + i < count; i++)
        rest[i] = g[at + i];
    for (i = 0; i < GROUPS; i++)
        add_squares(rest + WIDTH * i, scale, &sums[i], &finite[i]);
    for (i = 0; i < LANES; i++) {
        lanes[i] = sums[i / WIDTH][i % WIDTH];
        finite_count += (uint32_t)finite[i / WIDTH][i % WIDTH];
    }
    for (width = LANES / 2; width > 0; width /= 2)
        for (i = 0; i < width; i++)
            lanes[i] = lanes[i] + lanes[i + width];
    *sum = lanes[0];
    return at + LANES - finite_count; /* the zeros behind the last one were counted, too */
}

const msc__optim_kernels MSC__TABLE = {
    .random = fill_random,
    .widen = {widen_fp32, widen_bf16, widen_fp16},
    .narrow = {narrow_fp32, narrow_bf16, narrow_fp16},
    .narrow_bf16_random = narrow_bf16_random,
    .join_rest16 = join_rest16,
    .join_rest8 = join_rest8,
    .split_rest16 = split_rest16,
    .split_rest8 = split_rest8,
    .decode_signed = decode_signed,
    .encode_signed = encode_signed,
    .decode_adam = decode_adam,
    .encode_adam = encode_adam,
    .roots = roots,
    .adam = adam,
    .adam_root = adam_root,
    .sgd = {sgd_plain, sgd_momentum, sgd_nesterov},
    .lion = lion,
    .add = add,
    .squares = squares,
};
